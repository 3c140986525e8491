"""Runs of blocks between a GPU's slots and pinned rows by rings: what takes one for a run, waits for its end, and says what became of it.

A ring copies in one direction at a time and one run at a time; loads and offloads have rings of their own, so neither waits for the
other. Rows that the device does not reach go another way (`device.py`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.pools.hbm.device import DeviceCopies, DeviceTimeoutError
from kvbm.remarks import Remarks

log = Remarks()

RING_BYTES = 64 << 20  # of a GPU's memory, for each direction


class Ring(Protocol):
    """A run at a time between slots and rows of the host that the device reaches.

    `slots` and `at` are C-contiguous int64 arrays of one length, `rows` uint8 of (m, block_bytes). `events` and `streams` are handles of the
    driver's: a run begins, on the device, behind those events and behind all that is queued on those streams now.
    """

    @property
    def is_lost(self) -> bool:
        """Whether the device was lost: nothing is copied any more."""

    @property
    def is_under_way(self) -> bool:
        """Whether a run has begun that the device has not confirmed."""

    @property
    def programs(self) -> int:
        """Of one launch."""

    def gather(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None, events: list[int], streams: list[int]
    ) -> None:
        """Begin to fill row at[i], or row i, from slots[i]. Raises LayoutError, RuntimeError: nothing has begun."""

    def scatter(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None, events: list[int], streams: list[int]
    ) -> None:
        """Begin to fill slots[i] from row at[i]. Raises as `gather`."""

    def advance(self, timeout_s: float) -> bool:
        """Carry the run on; whether it is over. Raises RuntimeError: it has ended, and not all of it is there."""

    def checksums(self) -> np.ndarray | None:
        """CRC-32C of each row of the last gather, u32; None before it has ended, and once they were taken."""

    def has_passed(self, event: int) -> bool:
        """Whether the device has passed an event. Also while a graph is captured, which it does not end."""

    def reaches(self, rows: np.ndarray) -> bool:
        """Whether all of the rows' memory is registered with CUDA."""


class NewRing(Protocol):
    """Makes a ring for a pool's segments, with memory of the device of this number, which rings of a direction share.

    Raises: RuntimeError, LayoutError: it cannot be had.
    """

    def __call__(
        self,
        addresses: np.ndarray,
        strides: np.ndarray,
        sizes: np.ndarray,
        slots: int,
        device: int,
        among: int,
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


class RingCopies:
    """Gathers and scatters by rings where the device reaches the rows, else by other copies. As `copy_queue.Copies`; any thread."""

    def __init__(
        self,
        gathers: Sequence[Ring],
        scatters: Sequence[Ring],
        after: Callable[[np.ndarray], After],
        others: DeviceCopies,
        deadline_s: float,
    ) -> None:
        """Take rings made for this pool.

        Args:
            after: what a run over these slots waits for.
            others: for rows that the device does not reach.
            deadline_s: how long a call waits for the device, or for a ring, before that is trouble.
        """
        self._all = [*gathers, *scatters]
        self._gathers, self._scatters = _queue_of(gathers), _queue_of(scatters)
        self._after = after
        self._others = others
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._held = 0  # runs that the device has not confirmed within the deadline
        self._is_lost = False

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        """Fill rows from slots; the CRC-32C of what arrived. Raises RuntimeError, PoolError: the device failed, or does not answer."""
        if not len(slots):
            return np.empty(0, dtype=np.uint32)
        if not self._all[0].reaches(rows):
            return self._others.gather(slots, rows, at)
        with self._ring(self._gathers) as ring:
            self._carry(ring, partial(ring.gather, slots, rows, at), slots)
            sums = ring.checksums()
        assert sums is not None
        return sums

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None:
        """Fill slots from rows. Raises RuntimeError, PoolError: the device failed, or does not answer."""
        if not len(slots):
            return
        if not self._all[0].reaches(rows):
            self._others.scatter(slots, rows, at)
            return
        with self._ring(self._scatters) as ring:
            self._carry(ring, partial(ring.scatter, slots, rows, at), slots)

    def close(self) -> None:
        """Give the rings' memory back. No call may be under way."""
        self._gathers, self._scatters = _queue_of(()), _queue_of(())
        self._all = []
        self._others.close()

    @contextmanager
    def _ring(self, rings: queue.SimpleQueue[Ring]) -> Iterator[Ring]:
        """A ring to oneself. One whose run the device has not confirmed does not come back."""
        with self._lock:
            held = self._held
        if held:
            raise DeviceTimeoutError(f"HBM pool: the GPU has not confirmed {held} earlier copies; look at it")
        if self._is_lost:
            raise PoolError("HBM pool: the GPU is lost; nothing is copied any more")
        try:
            ring = rings.get(timeout=self._deadline_s)
        except queue.Empty:
            raise DeviceTimeoutError(
                f"HBM pool: no ring came free within {self._deadline_s:g} s; the GPU does not answer"
            ) from None
        try:
            yield ring
        finally:
            if not ring.is_under_way:
                rings.put(ring)

    def _carry(self, ring: Ring, begin: Callable[[list[int], list[int]], None], slots: np.ndarray) -> None:
        """From begin to end. Whoever is told of an end gives rows or slots to others, so it comes once the device has confirmed it."""
        after = self._after(slots)
        begin(after.events, after.streams)
        try:
            if not ring.advance(self._deadline_s):
                self._hold(ring)
        except BaseException:
            while ring.is_under_way:  # it was a signal's handler's, say
                with suppress(RuntimeError):
                    ring.advance(self._deadline_s)
            raise
        finally:
            if ring.is_lost:
                self._say_lost()

    def _hold(self, ring: Ring) -> None:
        with self._lock:
            self._held += 1
        log.warning(
            "hbm.copy_held", waited_s=self._deadline_s, why="the device does not answer; the copy keeps its slots"
        )
        try:
            while not ring.advance(self._deadline_s):
                pass
        finally:
            with self._lock:
                self._held -= 1

    def _say_lost(self) -> None:
        with self._lock:
            is_news, self._is_lost = not self._is_lost, True
        if is_news:
            log.warning(
                "hbm.lost", why="a copy was told that the GPU is gone", notice="every copy from and to HBM is a miss"
            )


def _queue_of(rings: Sequence[Ring]) -> queue.SimpleQueue[Ring]:
    made: queue.SimpleQueue[Ring] = queue.SimpleQueue()
    for ring in rings:
        made.put(ring)
    return made
