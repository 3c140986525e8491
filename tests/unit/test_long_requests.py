"""Long requests give what short ones give, and those that are too long are refused before they take memory."""

from __future__ import annotations

import json
import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from kvbm.assembly.native import NATIVE
from kvbm.catalog.access import long_requests
from kvbm.catalog.access.limits import LARGE_BODY_BYTES, LimitError
from kvbm.catalog.access.long_requests import _tokens, decode_request
from kvbm.core.answers import MAX_HASHES, MAX_TOKENS, LookupRequest, RouteRequest
from kvbm.core.backend import REFERENCE, ReadNumberList
from kvbm.core.errors import LayoutError

READS = pytest.mark.parametrize(
    "read", [NATIVE.read_number_list, REFERENCE.read_number_list], ids=["native", "reference"]
)
FIELDS = {"model": "m", "block_tokens": 16}


def body(long: bool = True, **fields: object) -> bytearray:
    text = json.dumps({"namespace": FIELDS} | fields)
    return bytearray(text.encode() + b" " * (LARGE_BODY_BYTES if long else 0))


@pytest.mark.parametrize(
    "fields",
    [
        {"hashes": "00" * 16 * 9000, "input_tokens": 5},
        {"hashes": ["00" * 16] * 9000},
        {"hashes": ""},
        {"hashes": []},
        {},
        {"hashes": None, "tokens": None},
        {"at_least": [{"instance": "a", "epoch": 1, "offset": 2}] * 9, "timeout_s": 2},
    ],
)
def test_a_long_request_is_read_as_a_short_one(fields: dict[str, object]) -> None:
    assert decode_request(body(**fields), RouteRequest, NATIVE.read_number_list) == msgspec.json.decode(
        body(**fields), type=RouteRequest
    )


@READS
@pytest.mark.parametrize("tokens", [[], [7], list(range(100_000)), [0, (1 << 32) - 1]])
@pytest.mark.parametrize("indent", [None, 1])
def test_tokens_become_an_array(tokens: list[int], indent: int | None, read: ReadNumberList) -> None:
    text = json.dumps({"namespace": FIELDS, "tokens": tokens}, indent=indent).encode()
    found = decode_request(bytearray(text + b" " * LARGE_BODY_BYTES), LookupRequest, read).tokens
    assert isinstance(found, np.ndarray)
    assert found.tolist() == tokens


@READS
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tokens": [1, -1]}, LayoutError),
        ({"tokens": [1 << 32]}, LayoutError),
        ({"tokens": [1 << 70]}, OverflowError),
        ({"tokens": [[1, 2], [3]]}, msgspec.DecodeError),
        ({"tokens": [1.5]}, msgspec.ValidationError),
        ({"tokens": "1,2"}, msgspec.ValidationError),
        ({"tokens": {"1": 2}}, msgspec.ValidationError),
        ({"tokens": [1] * (MAX_TOKENS + 1)}, LimitError),
        ({"hashes": ["a"] * (MAX_HASHES + 1)}, LimitError),
        ({"hashes": [1]}, msgspec.ValidationError),
        ({"surprise": 1}, msgspec.ValidationError),
        ({"namespace": {"model": "m" * (1 << 20), "block_tokens": 1}}, LimitError),
        ({"namespace": 1}, msgspec.ValidationError),
        ({"at_least": [{"instance": "a", "epoch": 1, "offset": 2}] * 10_000}, LimitError),
        ({"at_least": [{"instance": "a", "epoch": 1, "offset": 2}] * 300}, msgspec.ValidationError),
    ],
)
def test_what_makes_no_sense_is_refused(
    fields: dict[str, object], error: type[Exception], read: ReadNumberList
) -> None:
    with pytest.raises(error):
        decode_request(body(**fields), LookupRequest, read)


ODD = (
    "",
    " ",
    ",",
    "1",
    "12",
    "4294967295",
    "4294967296",
    "99999999999999999999999",
    "-1",
    "-0",
    "0",
    "00",
    "01",
    "1.0",
    "1.5",
    "1e3",
    "null",
    "true",
    '"1"',
    "[1]",
    "1 2",
    "\n7\t",
    "\r",
    "x",
    "0x1",
    "+1",
    "\u0661",
    "1,",
    ",1",
    "]",
    "}",
)


@READS
def test_a_list_of_tokens_is_read_as_a_json_parser_reads_it(
    read: ReadNumberList, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of plain and odd elements, and wherever pieces end: its numbers, or the kind of error."""
    pick, outcomes = random.Random(7), Counter[str]()
    monkeypatch.setattr(long_requests, "_pause", lambda: None)
    for number in range(3000):
        monkeypatch.setattr(long_requests, "_PIECE_BYTES", pick.choice((0, 1, 3, 8, 64)))
        odd = pick.choice((0, 0, 1, 3))
        elements = [str(pick.randrange(1 << pick.randrange(1, 33))) for _ in range(pick.randrange(12))]
        for _ in range(odd):
            elements.insert(pick.randrange(len(elements) + 1), pick.choice(ODD))
        text = f"[{','.join(elements)}]".encode()
        want: object
        try:
            want = msgspec.json.decode(text, type=list[int])
            if any(not 0 <= one < 1 << 32 for one in want):
                want = LayoutError
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            want = type(error)
        got: object
        try:
            got = _tokens(memoryview(text), read).tolist()
        except (LayoutError, OverflowError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            got = LayoutError if isinstance(error, OverflowError) else type(error)
        kinds = isinstance(want, type), isinstance(got, type)
        assert got == want or kinds == (True, True), (number, text)
        outcomes["wrong" if kinds[0] else "right"] += 1
    assert min(outcomes["wrong"], outcomes["right"]) > 800, outcomes
