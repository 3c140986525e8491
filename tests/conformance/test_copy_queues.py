"""Queues of copies: the native one and the readable one do the same; and rows that are parts of wider rows."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm._native import CopyQueue as NativeQueue
from kvbm._native import RowCopier, SegmentTable, checksums
from kvbm.core.errors import LayoutError, PoolError
from kvbm.pools.hbm.copy_queue import CopyQueue, Ordering, ThreadedQueue
from kvbm.pools.hbm.paged import ReferenceCopies, SegmentCopies

LONG_S = 60.0
COPIER = RowCopier(2)


class Place:
    """An engine's memory in segments, and rows that are wider than a block."""

    def __init__(self, seed: int, slots: int, sizes: list[int], part: int, parts: int) -> None:
        random = np.random.default_rng(seed)
        self.slots = slots
        self.block_bytes = sum(sizes)
        self.memory = random.integers(0, 256, slots * self.block_bytes, dtype=np.uint8)
        begins = np.cumsum([0, *sizes[:-1]]) * slots
        self.columns = (
            (self.memory.ctypes.data + begins).astype(np.int64),
            np.array(sizes, dtype=np.int64),
            np.array(sizes, dtype=np.int64),
        )
        self.pieces = [
            self.memory[begin : begin + slots * size].reshape(slots, size)
            for begin, size in zip(begins.tolist(), sizes, strict=True)
        ]
        self.whole = random.integers(0, 256, (slots + 3, parts * self.block_bytes), dtype=np.uint8)
        self.rows = self.whole[:, part * self.block_bytes : (part + 1) * self.block_bytes]

    def native(self) -> SegmentTable:
        return SegmentTable(*self.columns, self.slots, COPIER)

    def reference(self) -> SegmentCopies:
        return ReferenceCopies(*self.columns, self.slots, checksums)

    def block(self, slot: int) -> np.ndarray:
        return np.concatenate([piece[slot] for piece in self.pieces])


def native(place: Place) -> CopyQueue:
    return NativeQueue(place.native())


def threaded(place: Place) -> CopyQueue:
    return ThreadedQueue(place.reference(), place.slots, place.block_bytes)


QUEUES = pytest.mark.parametrize("new", [native, threaded])
New = Callable[[Place], CopyQueue]


def _place() -> Place:
    return Place(1, 12, [64, 64, 40], 1, 3)


@st.composite
def _runs(draw: st.DrawFn) -> tuple[Place, Place, np.ndarray, np.ndarray]:
    shape = (
        draw(st.integers(0, 99)),
        draw(st.integers(1, 20)),
        draw(st.lists(st.integers(1, 300), min_size=1, max_size=8)),
        *draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)])),
    )
    slots = draw(st.permutations(range(shape[1])))
    count = draw(st.integers(0, shape[1]))
    at = draw(st.permutations(range(shape[1] + 3)))
    return Place(*shape), Place(*shape), np.array(slots[:count], np.int64), np.array(at[:count], np.int64)


@settings(max_examples=150)
@given(_runs())
def test_native_and_readable_copies_agree_on_parts_of_rows(run: tuple[Place, Place, np.ndarray, np.ndarray]) -> None:
    one, other, slots, at = run
    assert (one.native().gather(slots, one.rows, at) == other.reference().gather(slots, other.rows, at)).all()
    assert (one.whole == other.whole).all()
    for slot, row in zip(slots.tolist(), at.tolist(), strict=True):
        assert (one.rows[row] == one.block(slot)).all()
    one.whole ^= 0xFF
    other.whole ^= 0xFF
    one.native().scatter(slots, one.rows, at)
    other.reference().scatter(slots, other.rows, at)
    assert (one.memory == other.memory).all()
    for slot, row in zip(slots.tolist(), at.tolist(), strict=True):
        assert (one.rows[row] == one.block(slot)).all()


def test_rows_that_reach_into_each_other_are_refused() -> None:
    place = _place()
    slots = np.arange(2)
    flat = np.zeros(2 * place.block_bytes, dtype=np.uint8)
    over = np.lib.stride_tricks.as_strided(flat, (2, place.block_bytes), (place.block_bytes - 1, 1))
    apart = np.zeros((2, 2 * place.block_bytes), dtype=np.uint8)[:, ::2]
    backwards = np.zeros((2, place.block_bytes), dtype=np.uint8)[::-1]
    for copies in (place.native(), place.reference()):
        for rows in (over, apart, backwards):
            with pytest.raises(LayoutError, match="side by side, and in no other row"):
                copies.gather(slots, rows)
            with pytest.raises(LayoutError, match="side by side, and in no other row"):
                copies.scatter(slots, rows)


@QUEUES
def test_a_run_ends_with_its_bytes_and_checksums(new: New) -> None:
    place = _place()
    queue = new(place)
    slots, at = np.array([3, 0, 7]), np.array([1, 14, 2])
    before = place.whole.copy()
    queue.gather(5, slots, place.rows, at)
    assert queue.wait(LONG_S)
    assert queue.under_way == 0
    ((id, sums, seconds, why),) = queue.ended()
    assert (id, why) == (5, "") and seconds >= 0
    wanted = np.stack([place.block(slot) for slot in slots])
    assert (place.rows[at] == wanted).all()
    assert sums is not None and (sums == checksums(wanted)).all()
    assert queue.ended() == []
    others = np.setdiff1d(np.arange(len(before)), at)
    assert (place.whole[others] == before[others]).all()
    width = place.block_bytes
    assert (place.whole[:, :width] == before[:, :width]).all() and (
        place.whole[:, 2 * width :] == before[:, 2 * width :]
    ).all()
    queue.scatter(6, np.array([5, 6, 4]), place.rows, at)
    assert queue.wait(LONG_S)
    ((id, sums, _, why),) = queue.ended()
    assert (id, sums, why) == (6, None, "")
    assert all((place.block(slot) == row).all() for slot, row in zip((5, 6, 4), wanted, strict=True))
    queue.close()


@QUEUES
def test_runs_of_nothing_end_too(new: New) -> None:
    place = _place()
    queue = new(place)
    none = np.empty(0, dtype=np.int64)
    queue.gather(1, none, place.rows, none)
    queue.scatter(2, none, place.rows, none)
    assert queue.wait(LONG_S)
    assert sorted(id for id, *_ in queue.ended()) == [1, 2]
    queue.close()


@QUEUES
def test_what_is_not_there_is_refused_before_a_byte_moves(new: New) -> None:
    place = _place()
    queue = new(place)
    before = place.memory.copy(), place.whole.copy()
    two = np.array([0, 1])
    for slots, rows, at in (
        (np.array([0, 12]), place.rows, two),
        (np.array([-1, 0]), place.rows, two),
        (two, place.rows, np.array([0, 15])),
        (two, place.rows, np.array([0])),
        (two, place.rows[:, :-1], two),
    ):
        for begin in (queue.gather, queue.scatter):
            with pytest.raises(LayoutError):
                begin(1, slots, rows, at)
    assert queue.wait(LONG_S) and queue.ended() == []
    assert (place.memory == before[0]).all() and (place.whole == before[1]).all()
    queue.close()


@QUEUES
def test_a_closed_queue_keeps_nothing(new: New) -> None:
    place = _place()
    queue = new(place)
    slots = np.array([0, 1])
    queue.gather(1, slots, place.rows, slots)
    queue.close()
    queue.close()
    with pytest.raises(LayoutError, match="closed; 2 blocks were not copied"):
        queue.gather(2, slots, place.rows, slots)
    assert not queue.wait(0.0)
    gone = weakref.ref(slots)
    del slots, queue
    assert gone() is None


@QUEUES
def test_a_number_names_one_run_at_a_time(new: New) -> None:
    place = _place()
    queue = new(place)
    slots = np.arange(12)
    queue.gather(1, slots, place.rows, slots)
    with pytest.raises(LayoutError, match="run 1 is under way already"):
        queue.gather(1, slots, place.rows, slots)
    assert queue.wait(LONG_S)
    assert [id for id, *_ in queue.ended()] == [1]
    queue.gather(1, slots, place.rows, slots)
    queue.close()


def test_the_native_queue_copies_while_a_thread_keeps_the_gil() -> None:
    place = _place()
    queue = native(place)
    slots = np.arange(12)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(2 * LONG_S)  # no other thread gets the GIL from a loop of ours
    try:
        until_s = time.monotonic() + LONG_S
        queue.gather(1, slots, place.rows, slots)
        while not (ended := queue.ended()) and time.monotonic() < until_s:
            pass
    finally:
        sys.setswitchinterval(before_s)
    assert [id for id, *_ in ended] == [1]
    assert all((place.rows[slot] == place.block(slot)).all() for slot in range(12))
    queue.close()


class Failing:
    """Copies of a device that fails or does not answer."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        raise self.error

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("the device is gone"), PoolError("no answer within 30 s"), ValueError("what is this")]
)
def test_a_device_that_fails_ends_runs_in_words_and_the_queue_goes_on(error: Exception) -> None:
    place = _place()
    queue = ThreadedQueue(Failing(error), place.slots, place.block_bytes)
    slots = np.arange(3)
    queue.gather(1, slots, place.rows, slots)
    queue.scatter(2, slots, place.rows, slots)
    assert queue.wait(LONG_S)
    assert {(id, sums is None, why) for id, sums, _, why in queue.ended()} == {
        (1, True, str(error)),
        (2, True, str(error)),
    }
    queue.close()


def test_a_device_that_takes_no_mark_refuses_the_run_at_once() -> None:
    place = _place()

    def mark() -> None:
        raise RuntimeError("no event")

    queue = ThreadedQueue(
        place.reference(), place.slots, place.block_bytes, Ordering(mark, lambda mark: None, nullcontext())
    )
    with pytest.raises(RuntimeError, match="no event"):
        queue.gather(1, np.arange(2), place.rows, np.arange(2))
    assert queue.under_way == 0
    queue.close()


def test_each_run_follows_the_mark_of_its_own_adding() -> None:
    place = _place()
    may_go = threading.Event()
    seen: list[object] = []

    class Noting(Failing):
        def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
            assert may_go.wait(LONG_S)
            seen.append(("copied", int(slots[0])))
            return np.zeros(len(slots), dtype=np.uint32)

    marks = iter(["first", "second"])
    ordering = Ordering(lambda: next(marks), seen.append, nullcontext())
    queue = ThreadedQueue(Noting(RuntimeError()), place.slots, place.block_bytes, ordering)
    for id in (0, 1):
        queue.gather(id, np.array([id]), place.rows, np.array([id]))
    may_go.set()
    assert queue.wait(LONG_S)
    assert seen == ["first", ("copied", 0), "second", ("copied", 1)]
    queue.close()
