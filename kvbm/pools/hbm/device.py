"""Copies between an accelerator's slots and rows of host memory, each run on a queue of its own, ordered by marks.

A run goes straight to or from the rows when the device reaches them (pinned memory), in one launch; else through
staging of bounded size, in two halves, so that the device fills one while a CPU empties the other. A call returns when
its mark was passed:
- a gather into staging gives up after the deadline, and its lane is never used again: what comes late reaches nobody;
- any other copy writes into rows or slots that others would get next (safety rule 6), so it holds them until the device
  confirms; meanwhile the pool refuses further calls.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.pools.hbm.paged import NewSegmentCopies, SegmentCopies
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    import torch

log = SafeLog()

_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3


class QueueMark(Protocol):
    """A place in a queue of work, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises RuntimeError: the device failed."""


class DeviceQueue(Protocol):
    """The order of one lane's work on the device."""

    def begin(self) -> None:
        """What is queued from now on starts after all that the engine has queued so far."""

    def run(self, work: Callable[[], None]) -> QueueMark:
        """Queue what `work` launches; passed when all of it is over."""


class Mover(Protocol):
    """Queues copies between slots on the device and rows at an address that the device reaches."""

    def gather(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """Row at[i] becomes slots[i].

        Both int64 on the host, unchanged until the copy is over; `address` is the device's for `rows`.
        """

    def scatter(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """slots[i] becomes row at[i]."""


class Half(NamedTuple):
    """Half of a lane's staging: rows on the host that the device reaches, and what the host calls them.

    Attributes:
        rows: (blocks, block_bytes) uint8.
        copies: the same rows as a place that CPU threads copy from and to.
        address: the device's for the rows.
        slots, at: room for the indexes of a part, int64.
    """

    rows: np.ndarray
    copies: SegmentCopies
    address: int
    slots: torch.Tensor
    at: torch.Tensor


class Lane(NamedTuple):
    """What one copy needs for itself."""

    order: DeviceQueue
    halves: tuple[Half, Half]


_Move = Callable[["torch.Tensor", "torch.Tensor", np.ndarray, int], None]


class DeviceTimeoutError(PoolError):
    """The device did not answer in time. A retry can help once it does.

    Attributes:
        timeout_s: how long was waited for it; None: an earlier call has, and nothing was waited for now.
    """

    def __init__(self, message: str, *, timeout_s: float | None = None) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class HeldCopies:
    """Counts copies that the device has not confirmed within the deadline; each keeps its rows and slots until it has.

    Args:
        deadline_s: how long a copy is waited for without a word.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there are now."""
        with self._lock:
            return self._count

    def wait(self, confirmed: Callable[[float], bool]) -> None:
        """Wait until a copy is confirmed. Raises what `confirmed` raises: the device failed, and writes no more.

        Args:
            confirmed: waits for so many seconds at most, and says whether it is.
        """
        if confirmed(self._deadline_s):
            return
        with self._lock:
            self._count += 1
        log.warning(
            "hbm.copy_held", waited_s=self._deadline_s, why="the device does not answer; the copy keeps its slots"
        )
        try:
            while not confirmed(self._deadline_s):
                pass
        finally:
            with self._lock:
                self._count -= 1


class DeviceCopies:
    """Gathers and scatters of any run on a few lanes.

    Of several lanes gathers leave one free: nobody waits for them, requests wait for scatters.
    """

    def __init__(
        self,
        mover: Mover,
        lanes: list[Lane],
        copies: NewSegmentCopies,
        device_address: Callable[[np.ndarray], int | None],
        deadline_s: float,
        run_blocks: int,
    ) -> None:
        """Take lanes made for this pool.

        Args:
            copies: makes the CPU's part, with its checksums.
            device_address: the device's address of rows; None where it does not reach them.
            deadline_s: how long a call waits for the device, or for a lane, before that is trouble.
            run_blocks: blocks of one launch at most, where no staging says less; the halves have room for their
                indexes.
        """
        self._mover = mover
        self._copies = copies
        self._device_address = device_address
        self._deadline_s = deadline_s
        self._run_blocks = run_blocks
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in lanes:
            self._lanes.put(lane)
        self._gathers = threading.Semaphore(max(1, len(lanes) - 1))  # lanes that gathers may have
        self._lock = threading.Lock()  # guards the count below
        self._lanes_left = len(lanes)
        self._held = HeldCopies(deadline_s)

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        """Fill rows from slots; the CRC-32C of what arrived.

        Raises RuntimeError, PoolError: the device failed, or does not answer.
        """
        return self.fetch(slots, rows, at)()

    def fetch(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> Callable[[], np.ndarray]:
        """As `gather`, but for the checksums: what is returned gives them, in any thread, while the rows are as they
        are.
        """
        if not len(slots):
            return partial(np.empty, 0, dtype=np.uint32)
        where = np.arange(len(slots)) if at is None else at
        address = self._device_address(rows)
        if address is not None:
            with self._lane(gathers=True) as lane:
                self._straight(lane, self._mover.gather, slots, where, rows, address)
            return partial(self._whole(rows).checksums, where)
        sums = np.empty(len(slots), dtype=np.uint32)

        def empty(half: Half, begin: int, end: int, mark: QueueMark) -> None:
            if not _passed(mark, self._deadline_s):
                raise DeviceTimeoutError(
                    f"HBM pool: {end - begin} blocks did not arrive within {self._deadline_s:g} s; the device does not "
                    "answer",
                    timeout_s=self._deadline_s,
                )
            sums[begin:end] = half.copies.gather(np.arange(end - begin), rows, where[begin:end])

        with self._lane(gathers=True) as lane:
            filled: deque[tuple[Half, int, int, QueueMark]] = deque()
            for half, begin, end in _parts(len(slots), lane, len(lane.halves[0].rows)):
                if len(filled) == len(lane.halves):
                    empty(*filled.popleft())
                filled.append((half, begin, end, self._launch(lane, half, self._mover.gather, slots[begin:end])))
            while filled:
                empty(*filled.popleft())
        return lambda: sums

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None:
        """Fill slots from rows. Raises RuntimeError, PoolError: the device failed, or does not answer."""
        if not len(slots):
            return
        where = np.arange(len(slots)) if at is None else at
        address = self._device_address(rows)
        with self._lane() as lane:
            if address is not None:
                self._straight(lane, self._mover.scatter, slots, where, rows, address)
                return
            whole = self._whole(rows)
            queued: deque[QueueMark] = deque()
            for half, begin, end in _parts(len(slots), lane, len(lane.halves[0].rows)):
                if len(queued) == len(lane.halves):
                    self._hold(queued.popleft())
                whole.gather(where[begin:end], half.rows[: end - begin])
                queued.append(self._launch(lane, half, self._mover.scatter, slots[begin:end]))
            while queued:
                self._hold(queued.popleft())

    def close(self) -> None:
        """Give the staging back. No call may be under way."""
        self._lanes = queue.SimpleQueue()
        self._lanes_left = 0

    def _straight(
        self, lane: Lane, move: _Move, slots: np.ndarray, where: np.ndarray, rows: np.ndarray, address: int
    ) -> None:
        """Copy between slots and rows that the device reaches. Ends when the device has confirmed it."""
        queued: deque[QueueMark] = deque()
        for half, begin, end in _parts(len(slots), lane, self._run_blocks):
            if len(queued) == len(lane.halves):
                self._hold(queued.popleft())
            queued.append(self._launch(lane, half, move, slots[begin:end], where[begin:end], rows, address))
        while queued:
            self._hold(queued.popleft())

    def _launch(
        self,
        lane: Lane,
        half: Half,
        move: _Move,
        slots: np.ndarray,
        at: np.ndarray | None = None,
        rows: np.ndarray | None = None,
        address: int = 0,
    ) -> QueueMark:
        """Queue one launch: with the half's own rows unless others are given."""
        count = len(slots)
        half.slots.numpy()[:count] = slots
        half.at.numpy()[:count] = np.arange(count) if at is None else at
        named = half.slots[:count], half.at[:count]
        if rows is None:
            return lane.order.run(lambda: move(*named, half.rows, half.address))
        return lane.order.run(lambda: move(*named, rows, address))

    def _whole(self, rows: np.ndarray) -> SegmentCopies:
        """Rows as a place the CPU copies from: each is a slot of one segment."""
        return row_copies(self._copies, rows)

    @contextmanager
    def _lane(self, gathers: bool = False) -> Iterator[Lane]:
        """A lane to oneself, behind what the engine has queued.

        It comes back only once the device has nothing left to do for it.
        """
        held = self._held.count
        with self._lock:
            left = self._lanes_left
        if held or not left:
            raise DeviceTimeoutError(
                f"HBM pool: the device has not confirmed {held} earlier copies, {left} lanes are left; look at the GPU"
            )
        lane = self._take(gathers)
        usable = False
        try:
            lane.order.begin()
            yield lane
            usable = True
        except DeviceTimeoutError:
            raise
        except BaseException:
            self._hold(
                lane.order.run(_nothing)
            )  # what was queued before the trouble still writes; raises if the device is gone
            usable = True
            raise
        finally:
            if usable:
                self._lanes.put(lane)
                if gathers:
                    self._gathers.release()
            else:  # a lane that a gather has lost is one that gathers have less
                with self._lock:
                    self._lanes_left -= 1

    def _take(self, gathers: bool) -> Lane:
        """Wait for a lane, as long as for the device. Raises DeviceTimeoutError."""
        if gathers and not self._gathers.acquire(timeout=self._deadline_s):
            raise DeviceTimeoutError(
                f"HBM pool: no lane for a gather came free within {self._deadline_s:g} s", timeout_s=self._deadline_s
            )
        try:
            return self._lanes.get(timeout=self._deadline_s)
        except queue.Empty:
            if gathers:
                self._gathers.release()
            raise DeviceTimeoutError(
                f"HBM pool: no lane came free within {self._deadline_s:g} s", timeout_s=self._deadline_s
            ) from None

    def _hold(self, mark: QueueMark) -> None:
        """Wait until the device has passed a mark. Raises RuntimeError: it failed, and writes no more."""
        self._held.wait(partial(_passed, mark))


def row_copies(copies: NewSegmentCopies, rows: np.ndarray) -> SegmentCopies:
    """Rows as slots of one segment."""
    address, apart, row_bytes = (
        np.array([number], dtype=np.int64)
        for number in (rows.ctypes.data, max(rows.strides[0], rows.shape[1]), rows.shape[1])
    )
    return copies(address, apart, row_bytes, len(rows))


def _nothing() -> None:
    pass


def _parts(count: int, lane: Lane, limit: int) -> Iterator[tuple[Half, int, int]]:
    """A run in parts of at most `limit` blocks, each with the half whose turn it is."""
    for half, begin in zip(itertools.cycle(lane.halves), range(0, count, limit), strict=False):
        yield half, begin, min(count, begin + limit)


def _passed(mark: QueueMark, deadline_s: float) -> bool:
    """Whether a mark was passed in time. Naps, for a thread that spins keeps the engine's from running."""
    until_s = time.monotonic() + deadline_s
    nap_s = _SHORTEST_NAP_S
    while not mark.query():
        if time.monotonic() >= until_s:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True
