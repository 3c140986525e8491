"""Replay's reports as tests ask for them: made by the native fold, once they were found equal to what the specification's fold says."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from kvbm.assembly import NATIVE, NATIVE_AGES, NATIVE_FOLD
from kvbm.replay import stat, state
from kvbm.replay import verify as verifying

P = ParamSpec("P")
Report = TypeVar("Report", bound=msgspec.Struct)


def both_ways(report: Callable[P, Report], **natively: object) -> Callable[P, Report]:
    """A report made natively. AssertionError: it differs from the specification's."""

    def made(*arguments: P.args, **options: P.kwargs) -> Report:
        native = report(*arguments, **options, backend=NATIVE, fold=NATIVE_FOLD, **natively)  # type: ignore[arg-type]
        readable = report(*arguments, **options)
        if isinstance(native, verifying.Verified) and isinstance(readable, verifying.Verified):
            assert (native.fold, readable.fold) == ("native", "reference")
            readable.fold = native.fold
        assert native == readable
        return native

    return made


verify = both_ways(verifying.verify)
states_at = both_ways(state.states_at)
stats_of = both_ways(stat.stats_of, new_ages=NATIVE_AGES)
