"""What an error says in numbers it has as attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from kvbm import MessageTooLargeError, StreamError
from kvbm.core.codec import VERSION, decode_frame
from kvbm.core.errors import FencedError, NewerFrameError
from kvbm.pools.hbm.device import DeviceTimeoutError
from kvbm.streams.base import AwayError, UnreadableError
from kvbm.streams.nats.connection import LateError, NobodyError, RefusedError
from tests.nats_fixture import make_frame

ROOT = Path(__file__).parents[2]
STREAM = (StreamError, FencedError, AwayError, UnreadableError, LateError, NobodyError, RefusedError)
FAMILY = {kind.__name__ for kind in (*STREAM, MessageTooLargeError, DeviceTimeoutError)}


class Site(NamedTuple):
    """One place that makes an error: where, the seconds that its sentence names, and what it has as `timeout_s`;

    "" for none.
    """

    where: str
    named: str
    given: str


def sites(path: Path) -> Iterator[Site]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FAMILY and node.args:
            parts = parts_of(node.args[0])
            seconds = [
                ast.unparse(part.value)
                for part, after in pairwise(parts)
                if isinstance(part, ast.FormattedValue)
                and isinstance(after, ast.Constant)
                and re.match(r" s\b", str(after.value))
            ]
            given = [ast.unparse(one.value) for one in node.keywords if one.arg == "timeout_s"]
            yield Site(f"{path}:{node.lineno}", "".join(seconds), "".join(given))


def parts_of(sentence: ast.expr) -> list[ast.expr]:
    return sentence.values if isinstance(sentence, ast.JoinedStr) else [sentence]


def test_whoever_names_how_long_was_waited_has_it_as_timeout_s() -> None:
    found = [site for path in sorted((ROOT / "kvbm").rglob("*.py")) for site in sites(path)]
    assert sum(bool(site.named) for site in found) > 10
    assert [site for site in found if site.named != site.given] == []


@pytest.mark.parametrize("kind", [*STREAM, DeviceTimeoutError], ids=lambda kind: str(kind.__name__))
def test_an_error_for_which_nothing_was_waited_names_no_time(kind: type[StreamError | DeviceTimeoutError]) -> None:
    assert kind("no").timeout_s is None
    waited = kind("no answer within 2 s", timeout_s=2.0)
    assert (str(waited), waited.timeout_s) == ("no answer within 2 s", 2.0)


def test_a_newer_frame_names_its_version_and_the_newest_that_is_read() -> None:
    data = bytearray(make_frame(0).data)
    data[4:6] = (VERSION + 5).to_bytes(2, "little")
    with pytest.raises(NewerFrameError) as refused:
        decode_frame(bytes(data))
    assert (refused.value.version, refused.value.supported) == (VERSION + 5, VERSION)
