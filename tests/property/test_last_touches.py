"""Which step may touch a block, natively as readably."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm.assembly import last_touches
from kvbm.engines.vllm.forwards import LastTouches

BLOCKS = 12
names = st.sampled_from(["a", "b", "ç", ""])
ids = st.lists(st.integers(0, BLOCKS - 1), max_size=6)
taken = st.lists(st.tuples(names, st.lists(ids, max_size=3)), max_size=4)
calls = st.lists(st.one_of(taken, names), max_size=40)


@given(calls, ids)
def test_native_touches_are_the_readable_ones(
    calls: list[list[tuple[str, list[list[int]]]] | str], run: list[int]
) -> None:
    native, readable = last_touches(BLOCKS), LastTouches(BLOCKS)
    for call in calls:
        if isinstance(call, str):
            native.leave(call)
            readable.leave(call)
        else:
            assert native.plan(call) == readable.plan(call)
        assert [native.of([id]) for id in range(BLOCKS)] == [readable.of([id]) for id in range(BLOCKS)]
        assert native.of(run) == readable.of(run)
        assert native.step == readable.step
