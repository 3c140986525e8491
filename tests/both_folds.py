"""Replay's reports as tests ask for them: made by the native fold, once they were found equal to what the
specification's fold says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec

from kvbm.assembly import NATIVE, NATIVE_AGES, NATIVE_FOLD
from kvbm.core.ages import ReadableAges
from kvbm.core.backend import REFERENCE
from kvbm.core.fold import Residencies
from kvbm.replay import stat, state
from kvbm.replay import verify as verifying
from kvbm.replay.format import END, At
from kvbm.replay.source import FrameSource

P = ParamSpec("P")
Report = TypeVar("Report", bound=msgspec.Struct)


def both_ways(
    report: Callable[P, Report], natively: dict[str, object], readably: dict[str, object]
) -> Callable[P, Report]:
    """A report made natively. AssertionError: it differs from the specification's."""

    def made(*arguments: P.args, **options: P.kwargs) -> Report:
        native = report(*arguments, **options, backend=NATIVE, fold=NATIVE_FOLD, **natively)  # type: ignore[arg-type]
        readable = report(
            *arguments,
            **options,
            backend=REFERENCE,
            fold=Residencies,
            **readably,  # type: ignore[arg-type]
        )
        if isinstance(native, verifying.Verified) and isinstance(readable, verifying.Verified):
            assert (native.fold, readable.fold) == ("native", "reference")
            readable.fold = native.fold
        assert native == readable
        return native

    return made


verify = both_ways(verifying.verify, {}, {})


def _states_at(source: FrameSource, at: At = END, **more: Any) -> state.States:
    return state.states_at(source, at, **more)


states_at = both_ways(_states_at, {}, {})
stats_of = both_ways(stat.stats_of, {"new_ages": NATIVE_AGES}, {"new_ages": ReadableAges})
