"""Runs of blocks copied beside the caller, who asks later which of them are over."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import LayoutError

_CLOSING_S = 60.0  # for the run under way; a device that answers no more holds its thread for good


class CopyQueue(Protocol):
    """Gathers and scatters of a place whose blocks lie in segments, one after another, scatters first.

    `slots` and `at` are C-contiguous int64 arrays of one length, `rows` uint8 of (m, block_bytes) as `SegmentCopies` has them. What a
    run names stays untouched until it has ended. Runs added together name different slots, and different rows.
    """

    @property
    def under_way(self) -> int:
        """Runs added that have not ended."""

    def gather(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """Begin to fill row at[i] from slots[i]. Raises LayoutError: what it names is not there, or the queue is closed."""

    def scatter(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """Begin to fill slots[i] from row at[i]. Raises as `gather`."""

    def ended(self) -> Sequence[tuple[int, np.ndarray | None, float, str]]:
        """Runs that have ended since the last call: id, a gather's checksums (u32), seconds of copying, why it failed or ""."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether that is so."""

    def close(self) -> None:
        """End the run under way and drop the others. Idempotent; no call may be under way."""


class Copies(Protocol):
    """Copies that return when they are over: `SegmentCopies`, or `DeviceCopies`, which raises when the device fails."""

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray: ...
    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None: ...


class Ordering(NamedTuple):
    """How a device orders runs behind its engine's work.

    Attributes:
        mark: what the engine has queued so far; called where a run is added.
        follow: copies that begin from now on wait for a mark; called in the queue's thread.
        aside: that thread works within it.
    """

    mark: Callable[[], Any]
    follow: Callable[[Any], None]
    aside: AbstractContextManager[Any]


class _Run(NamedTuple):
    mark: Any
    id: int
    gathers: bool
    slots: np.ndarray
    rows: np.ndarray
    at: np.ndarray


class ThreadedQueue:
    """A queue over any copies, in a Python thread: a GPU's, and what the native queue is held to on a CPU."""

    def __init__(self, copies: Copies, slots: int, block_bytes: int, ordering: Ordering | None = None) -> None:
        self._copies = copies
        self._ordering = ordering or Ordering(lambda: None, lambda mark: None, nullcontext())
        self._slots = slots
        self._block_bytes = block_bytes
        self._changed = threading.Condition()  # guards what follows
        self._scatters: deque[_Run] = deque()
        self._gathers: deque[_Run] = deque()
        self._ended: list[tuple[int, np.ndarray | None, float, str]] = []
        self._under_way = 0
        self._named: set[int] = set()  # runs whose end nobody has asked for yet
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvbm-queue", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> int:
        """As `CopyQueue.under_way`."""
        with self._changed:
            return self._under_way

    def gather(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """As `CopyQueue.gather`."""
        self._add(_Run(self._ordering.mark(), id, True, slots, rows, at))

    def scatter(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """As `CopyQueue.scatter`."""
        self._add(_Run(self._ordering.mark(), id, False, slots, rows, at))

    def ended(self) -> Sequence[tuple[int, np.ndarray | None, float, str]]:
        """As `CopyQueue.ended`."""
        with self._changed:
            ended, self._ended = self._ended, []
            self._named.difference_update(run[0] for run in ended)
        return ended

    def wait(self, timeout_s: float) -> bool:
        """As `CopyQueue.wait`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way or self._closed, timeout_s) and not self._closed

    def close(self) -> None:
        """As `CopyQueue.close`."""
        with self._changed:
            self._closed = True
            self._scatters.clear()
            self._gathers.clear()
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)

    def _add(self, run: _Run) -> None:
        check_run(run.slots, run.rows, run.at, self._slots, self._block_bytes)
        with self._changed:
            if self._closed:
                raise LayoutError(f"the queue of copies is closed; {len(run.slots)} blocks were not copied")
            if run.id in self._named:
                raise LayoutError(f"run {run.id} is under way already; give each a number of its own")
            self._named.add(run.id)
            self._under_way += 1
            (self._gathers if run.gathers else self._scatters).append(run)
            self._changed.notify_all()

    def _work(self) -> None:
        with self._ordering.aside:
            self._work_off()

    def _work_off(self) -> None:
        while True:
            with self._changed:
                while not (self._scatters or self._gathers or self._closed):
                    self._changed.wait(_CLOSING_S)
                if self._closed:
                    return
                run = (self._scatters or self._gathers).popleft()
            began_s = time.perf_counter()
            sums: np.ndarray | None = None
            why = ""
            try:
                self._ordering.follow(run.mark)
                if run.gathers:
                    sums = self._copies.gather(run.slots, run.rows, run.at)
                else:
                    self._copies.scatter(run.slots, run.rows, run.at)
            except Exception as error:  # noqa: BLE001  whatever a device's library raises: somebody waits for the run's end
                why = str(error) or type(error).__name__
            busy_s = time.perf_counter() - began_s
            with self._changed:
                self._ended.append((run.id, sums, busy_s, why))
                del run  # its arrays are the caller's again
                self._under_way -= 1
                self._changed.notify_all()


def check_run(slots: np.ndarray, rows: np.ndarray, at: np.ndarray, slot_count: int, block_bytes: int) -> None:
    """Refuse a run that names what is not there. Raises LayoutError."""
    if rows.shape[1] != block_bytes or len(at) != len(slots):
        raise LayoutError(f"{len(slots)} slots of {block_bytes} bytes, rows of {rows.shape[1]}: {len(at)}")
    for what, indexes, end in (("slot", slots, slot_count), ("row", at, len(rows))):
        if len(indexes) and (int(indexes.min()) < 0 or int(indexes.max()) >= end):
            raise LayoutError(f"{what}s {indexes.min()} to {indexes.max()} wanted, there are {end}")
