"""What replay's tests say of the specification, said again of the native fold, which must answer in the same words."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.cli import replay_main
from kvbm.core.events import BlocksEvicted, EvictReason
from kvbm.core.ids import Tier
from kvbm.replay.stat import stats_of
from kvbm.replay.state import states_at
from kvbm.replay.verify import verify
from tests.captures import NAMESPACE, make_capture, packed, some_hash
from tests.property import test_replay_mutations
from tests.property.test_replay_mutations import *  # noqa: F403 - its tests are collected here once more
from tests.unit import test_replay_state
from tests.unit.test_replay_state import *  # noqa: F403

Report = Callable[..., msgspec.Struct]


def both_ways(report: Report) -> Report:
    """A report made natively, once it was found equal to the specification's."""

    def made(*arguments: Any, **options: Any) -> msgspec.Struct:
        native = report(*arguments, **options, kernels=NATIVE, fold=NATIVE_FOLD)
        assert native == report(*arguments, **options)
        return native

    return made


@pytest.fixture(autouse=True)
def _both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_replay_mutations, "verify", both_ways(verify))
    monkeypatch.setattr(test_replay_state, "states_at", both_ways(states_at))
    monkeypatch.setattr(test_replay_state, "stats_of", both_ways(stats_of))


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
            said.append((code, capsys.readouterr()))
    assert said[:2] == said[2:]
    assert said[0][0] == 1 and said[0][1].out


def test_the_tests_above_compare() -> None:
    for module, name in ((test_replay_mutations, "verify"), (test_replay_state, "states_at")):
        assert vars(module)[name].__qualname__.startswith("both_ways")
