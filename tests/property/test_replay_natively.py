"""Replay answers natively in the same words as with the specification's fold.

Its other tests ask with both: `tests/both_folds.py`.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from kvbm.cli import replay_main
from kvbm.core.events import BlocksEvicted, EvictReason
from kvbm.core.ids import Tier
from tests.both_folds import both_ways
from tests.captures import NAMESPACE, make_capture, packed, some_hash


@pytest.mark.parametrize("command", ["verify", "cat", "stat", "state --blocks", "state --blocks --at e1+9"])
@pytest.mark.parametrize("seed", range(6))
def test_the_command_says_the_same_with_and_without_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, command: str
) -> None:
    pick = random.Random(seed)
    frames = make_capture(seed, commands=80).frames()
    del frames[pick.randrange(2, len(frames))]
    broken = pick.randrange(2, len(frames))
    evicted = BlocksEvicted(namespace=NAMESPACE, tier=Tier.HBM, reason=EvictReason.TTL, hashes=some_hash("x"))
    frames[broken] = msgspec.structs.replace(frames[broken], events=(evicted, *frames[broken].events[1:]))
    data = bytearray(packed(frames))
    data[-pick.randrange(1, 200)] ^= 1
    path = tmp_path / "capture.kvbm"
    path.write_bytes(data)
    said = []
    for options in ([], ["--reference"]):
        words, *rest = command.split()
        for shape in ([], ["--json"]):
            code = replay_main([words, str(path), *rest, *options, *shape])
            out, err = capsys.readouterr()
            used = "reference" if options else "native"
            assert command != "verify" or f"({used} fold)" in out or f'"fold":"{used}"' in out.replace(" ", "")
            said.append((code, out.replace(used, "some"), err))
    assert said[:2] == said[2:]
    assert said[0][0] == 1 and (said[0][1] or "not there yet" in said[0][2])


def test_a_native_report_that_differs_is_noticed() -> None:
    """`both_ways` is what the other tests of replay ask with."""

    class Named(msgspec.Struct):
        fold: str

    def report(same: bool, backend: object = None, fold: object = None) -> Named:
        return Named("" if same else str(fold))

    assert both_ways(report, {}, {})(True) == Named("")
    with pytest.raises(AssertionError):
        both_ways(report, {}, {})(False)
