"""What replay's tests say of the specification, said again of the native fold, which must answer in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.replay.stat import stats_of
from kvbm.replay.state import states_at
from kvbm.replay.verify import verify
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


def test_the_tests_above_compare() -> None:
    for module, name in ((test_replay_mutations, "verify"), (test_replay_state, "states_at")):
        assert vars(module)[name].__qualname__.startswith("both_ways")
