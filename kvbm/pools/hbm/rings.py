"""Runs of blocks between a GPU's slots and rows of the host by rings: what takes one for a run, waits for its end, and
says what became of it.

A ring copies one run at a time, straight to and from rows that the device reaches; others go through staging that it
reaches, in parts, the next on the link while a CPU copies the last. Loads and offloads have rings of their own, and of
each a small one for short runs: so neither waits for the other, nor a few blocks for a gigabyte.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.pools.hbm.device import DeviceTimeoutError, HeldCopies, row_copies
from kvbm.pools.hbm.paged import NewSegmentCopies, SegmentCopies
from kvbm.safe_log import SafeLog

log = SafeLog()

RING_BYTES = 128 << 20  # of a GPU's memory, for each direction
SHORT_BYTES = 32 << 20  # of a run that goes by a direction's small ring
_SMALL_SHARE = 8  # of the memory of a direction, its small ring has this part


class Ring(Protocol):
    """A run at a time between slots and rows of the host that the device reaches.

    `slots` and `at` are C-contiguous int64 arrays of one length, `rows` uint8 of (m, block_bytes). `events` and
    `streams` are handles of the driver's: a run begins, on the device, behind those events and behind all that is
    queued on those streams now.
    """

    @property
    def is_lost(self) -> bool:
        """Whether the device was lost: nothing is copied any more."""

    @property
    def is_under_way(self) -> bool:
        """Whether a run has begun that the device has not confirmed."""

    def gather(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray | None,
        events: list[int],
        streams: list[int],
        wants_sums: bool = True,
    ) -> None:
        """Begin to fill row at[i], or row i, from slots[i]. Raises LayoutError, RuntimeError: nothing has begun."""

    def scatter(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None, events: list[int], streams: list[int]
    ) -> None:
        """Begin to fill slots[i] from row at[i]. Raises as `gather`."""

    def advance(self, timeout_s: float) -> bool:
        """Carry the run on; whether it is over. Raises RuntimeError: it has ended, and not all of it is there."""

    def checksums(self) -> np.ndarray | None:
        """CRC-32C of each row of the last gather, u32;

        None where none were wanted, before it has ended, and once they were taken.
        """

    def settle(self) -> None:
        """Wait until the run under way has ended, if there is one, whatever becomes of it: one call, which nothing
        interrupts.
        """

    def mark(self, events: list[int], streams: list[int]) -> int:
        """An event of the ring's own, behind these as they are now.

        Raises RuntimeError: none can be had; a stream is captured.
        """

    def drop_mark(self, mark: int) -> None:
        """Nobody will wait for it any more."""

    def has_passed(self, event: int) -> bool:
        """Whether the device has passed an event. Also while a graph is captured, which it does not end."""

    def reaches(self, rows: np.ndarray) -> bool:
        """Whether all of the rows' memory is registered with CUDA."""


class NewRing(Protocol):
    """Makes a ring for a pool's segments, with so much memory of the device of this number.

    Raises RuntimeError, LayoutError: none is to be had.
    """

    def __call__(
        self,
        addresses: np.ndarray,
        strides: np.ndarray,
        sizes: np.ndarray,
        slots: int,
        device: int,
        ring_bytes: int,
    ) -> Ring: ...


class After(NamedTuple):
    """What a run waits for.

    Attributes:
        events, streams: handles of the driver's.
        kept: what the handles are of, which must live until the run has begun.
    """

    events: list[int]
    streams: list[int]
    kept: Any = None


class Outliving:
    """CUDA's memory whose destructor runs only where it is let go: on a device that was lost it would end the
    process.
    """

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def let_go(self) -> None:
        """The device is well, and does nothing with it. Idempotent."""
        if self._kept is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._kept))
            self._kept = None


class RingHalf(NamedTuple):
    """Half of a lane's staging: rows that the device reaches, and the same as a place that CPU threads copy from and
    to.

    Attributes:
        rows: (blocks, block_bytes) uint8.
        kept: whose memory it is.
    """

    rows: np.ndarray
    copies: SegmentCopies
    kept: Outliving | None = None


class RingLane(NamedTuple):
    """What one run needs for itself."""

    ring: Ring
    halves: tuple[RingHalf, RingHalf]

    def let_go(self) -> None:
        """Give its staging back, unless the device may still write it or was lost."""
        if self.ring.is_under_way or self.ring.is_lost:
            return
        for half in self.halves:
            if half.kept is not None:
                half.kept.let_go()


class RingCopies:
    """Gathers and scatters by rings. As `copy_queue.BlockingCopies`; any thread.

    A call returns when the device has confirmed all of it. A gather into staging gives up after the deadline, and its
    lane serves nobody before the device has confirmed it: what comes late reaches nobody. Any other copy writes into
    rows or slots that others would get next (safety rule 6), so it holds them for as long as it takes; meanwhile
    further calls are refused.
    """

    def __init__(
        self,
        gathers: Sequence[RingLane],
        scatters: Sequence[RingLane],
        after: Callable[[np.ndarray], After],
        copies: NewSegmentCopies,
        deadline_s: float,
    ) -> None:
        """Take lanes made for this pool.

        Args:
            gathers, scatters: of each direction: one, or one for long runs and one for short runs.
            after: what a run over these slots waits for.
            copies: makes the CPU's part, with its checksums.
            deadline_s: how long a call waits for the device, or for a lane, before that is trouble.
        """
        self._gathers, self._scatters = _Lanes(gathers, deadline_s), _Lanes(scatters, deadline_s)
        self._after = after
        self._copies = copies
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._held = HeldCopies(deadline_s)
        self._is_lost = False

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        """Fill rows from slots; the CRC-32C of what arrived.

        Raises RuntimeError, PoolError: the device failed, or does not answer.
        """
        if not len(slots):
            return np.empty(0, dtype=np.uint32)
        run_bytes = len(slots) * rows.shape[1]
        if not self._gathers.reach(rows):
            with self._lane(self._gathers, run_bytes, gives_up=True) as lane:
                return self._gather_staged(lane, slots, rows, np.arange(len(slots)) if at is None else at)
        with self._lane(self._gathers, run_bytes) as lane:
            self._begin(lane.ring, partial(lane.ring.gather, slots, rows, at), slots)
            self._end(lane.ring)
            sums = lane.ring.checksums()
        assert sums is not None
        return sums

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None:
        """Fill slots from rows. Raises RuntimeError, PoolError: the device failed, or does not answer."""
        if not len(slots):
            return
        with self._lane(self._scatters, len(slots) * rows.shape[1]) as lane:
            if not lane.ring.reaches(rows):
                self._scatter_staged(lane, slots, rows, np.arange(len(slots)) if at is None else at)
                return
            self._begin(lane.ring, partial(lane.ring.scatter, slots, rows, at), slots)
            self._end(lane.ring)

    def close(self) -> None:
        """Let the rings' memory go, on the device and here. No call may be under way."""
        for lane in [*self._gathers.close(), *self._scatters.close()]:
            lane.let_go()
        self._after = _nothing  # who is asked has a ring

    def _gather_staged(self, lane: RingLane, slots: np.ndarray, rows: np.ndarray, where: np.ndarray) -> np.ndarray:
        sums = np.empty(len(slots), dtype=np.uint32)
        full: tuple[RingHalf, int, int] | None = None

        def empty(half: RingHalf, begin: int, end: int) -> None:
            sums[begin:end] = half.copies.gather(np.arange(end - begin), rows, where[begin:end])

        for half, begin, end in _parts(len(slots), lane):
            part = slots[begin:end]
            fill = partial(lane.ring.gather, part, half.rows[: end - begin], None, wants_sums=False)
            self._begin(lane.ring, fill, part)
            if full is not None:
                empty(*full)
            if not lane.ring.advance(self._deadline_s):
                raise DeviceTimeoutError(
                    f"HBM pool: {end - begin} blocks did not arrive within {self._deadline_s:g} s; the device does not "
                    "answer",
                    timeout_s=self._deadline_s,
                )
            full = half, begin, end
        assert full is not None
        empty(*full)
        return sums

    def _scatter_staged(self, lane: RingLane, slots: np.ndarray, rows: np.ndarray, where: np.ndarray) -> None:
        whole = row_copies(self._copies, rows)
        parts = list(_parts(len(slots), lane))
        first, _, end = parts[0]
        whole.gather(where[:end], first.rows[:end])
        for (half, begin, end), next_ in zip(parts, [*parts[1:], None], strict=True):
            part = slots[begin:end]
            self._begin(lane.ring, partial(lane.ring.scatter, part, half.rows[: end - begin], None), part)
            if next_ is not None:
                other, other_begin, other_end = next_
                whole.gather(where[other_begin:other_end], other.rows[: other_end - other_begin])
            self._end(lane.ring)

    @contextmanager
    def _lane(self, lanes: _Lanes, run_bytes: int, gives_up: bool = False) -> Iterator[RingLane]:
        """A lane to oneself. Where this is left its run has ended: whoever is told so gives rows or slots to others.

        Args:
            gives_up: a run may still fill the lane's own memory then, which nobody is given before it has ended.
        """
        if held := self._held.count:
            raise DeviceTimeoutError(f"HBM pool: the GPU has not confirmed {held} earlier copies; look at it")
        if self._is_lost:
            raise PoolError("HBM pool: the GPU is lost; nothing is copied any more")
        taken: list[RingLane] = []
        try:
            lanes.take(run_bytes, taken)
            yield taken[0]
        finally:
            for lane in taken:
                if not gives_up:
                    lane.ring.settle()  # nothing to do, unless an exception of a signal's handler came between
                lanes.give(lane)
                if lane.ring.is_lost:
                    self._say_lost()

    def _begin(self, ring: Ring, begin: Callable[..., None], slots: np.ndarray) -> None:
        """Queue a run, as far as the ring has room."""
        after = self._after(slots)
        begin(events=after.events, streams=after.streams)
        ring.advance(0.0)

    def _end(self, ring: Ring) -> None:
        """Wait until the device has confirmed the run."""
        self._held.wait(ring.advance)

    def _say_lost(self) -> None:
        with self._lock:
            is_news, self._is_lost = not self._is_lost, True
        if is_news:
            log.warning(
                "hbm.lost", why="a copy was told that the GPU is gone", notice="each copy from and to HBM fails"
            )


class _Lanes:
    """Those of a direction: one for all runs, or one for long and one for short ones."""

    def __init__(self, lanes: Sequence[RingLane], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._lanes = list(lanes)
        self._taken = [False] * len(self._lanes)

    def reach(self, rows: np.ndarray) -> bool:
        """Whether the device reaches rows. Raises PoolError: the pool is closed."""
        if not self._lanes:
            raise PoolError("HBM pool: it is closed")
        return self._lanes[0].ring.reaches(rows)

    def take(self, run_bytes: int, taken: list[RingLane]) -> None:
        """Wait for a lane, as long as for the device, and put it into `taken`.

        Raises DeviceTimeoutError, PoolError: the pool is closed.
        """
        if not self._lanes:
            raise PoolError("HBM pool: it is closed")
        index = len(self._lanes) - 1 if run_bytes <= SHORT_BYTES else 0
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free_locked(index), self._deadline_s):
                raise DeviceTimeoutError(
                    f"HBM pool: no ring came free within {self._deadline_s:g} s; the GPU does not answer",
                    timeout_s=self._deadline_s,
                )
            self._taken[index] = True
            taken.append(self._lanes[index])

    def give(self, lane: RingLane) -> None:
        """It is free again, once its run has ended."""
        with self._changed:
            self._taken = [is_taken and one is not lane for is_taken, one in zip(self._taken, self._lanes, strict=True)]
            self._changed.notify_all()

    def close(self) -> list[RingLane]:
        """Let all lanes go; those there were."""
        lanes, self._lanes, self._taken = self._lanes, [], []
        return lanes

    def _is_free_locked(self, index: int) -> bool:
        if self._taken[index]:
            return False
        ring = self._lanes[index].ring
        if ring.is_under_way:  # of somebody who gave up; the device may have confirmed it since
            with suppress(RuntimeError):
                ring.advance(0.0)
        return not ring.is_under_way


def _nothing(slots: np.ndarray) -> After:
    return After([], [])


def ring_sizes(ring_bytes: int) -> tuple[int, int]:
    """Of a direction's memory: for its ring of long runs, and for that of short ones."""
    small = ring_bytes // _SMALL_SHARE
    return ring_bytes - small, small


def _parts(count: int, lane: RingLane) -> Iterator[tuple[RingHalf, int, int]]:
    """A run in parts of as many blocks as half a lane's staging holds, each with the half whose turn it is."""
    limit = len(lane.halves[0].rows)
    for half, begin in zip(cycle(lane.halves), range(0, count, limit), strict=False):
        yield half, begin, min(count, begin + limit)
