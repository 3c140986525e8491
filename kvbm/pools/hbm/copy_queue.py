"""Runs of blocks copied beside the caller, who asks later which of them are over.

Somebody waits for a scatter; nobody waits for a gather. So they have queues, threads and lanes of their own, and a
gather's checksums are computed in a third thread: a scatter never stands behind a gather, nor a gather's copy behind
checksums.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import LayoutError

_CLOSING_S = 60.0  # for the run under way; a device that answers no more holds its thread for good
_READY_S = 1.0  # a run whose mark has not been passed lets others go first for so long, then waits on the device
_SHORTEST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.001  # a thread that looks more often keeps the engine's from running


class CopyQueue(Protocol):
    """Gathers and scatters of a place whose blocks lie in segments; scatters go first.

    `slots` and `at` are C-contiguous int64 arrays of one length, `rows` uint8 of (m, block_bytes) as `SegmentCopies`
    has them. What a run names stays untouched until it has ended. Runs added together name different slots, and
    different rows.
    """

    @property
    def under_way(self) -> int:
        """Runs added that have not ended."""

    def gather(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """Begin to fill row at[i] from slots[i].

        Raises LayoutError: what it names is not there, or the queue is closed.
        """

    def scatter(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """Begin to fill slots[i] from row at[i]. Raises as `gather`."""

    def ended(self) -> Sequence[tuple[int, np.ndarray | None, float, str]]:
        """Runs that have ended since the last call: id, a gather's checksums (u32), seconds of copying, why it failed
        or "".
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether that is so."""

    def close(self) -> None:
        """End the run under way and drop the others. Idempotent; no call may be under way."""


class BlockingCopies(Protocol):
    """Copies that return when they are over: `SegmentCopies`, or `DeviceCopies`, which raises when the device fails."""

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray: ...
    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None: ...


class Ordering(NamedTuple):
    """How a device orders runs behind its engine's work.

    Attributes:
        mark: what the engine has queued so far; called where a run is added.
        follow: copies that begin from now on wait for a mark; called in the queue's thread.
        aside: that thread works within it.
        is_passed: whether a mark was passed, so that a copy behind it can begin at once.
    """

    mark: Callable[[], Any]
    follow: Callable[[Any], None]
    aside: AbstractContextManager[Any]
    is_passed: Callable[[Any], bool] = lambda mark: True


class QueueSide(NamedTuple):
    """What gathers, or scatters, have for themselves.

    Attributes:
        fetch: a gather in two steps: the copy, and what computes its checksums; None: `copies.gather` does both.
    """

    copies: BlockingCopies
    ordering: Ordering
    fetch: Callable[[np.ndarray, np.ndarray, np.ndarray | None], Callable[[], np.ndarray]] | None = None


class _Run(NamedTuple):
    mark: Any
    id: int
    gathers: bool
    slots: np.ndarray
    rows: np.ndarray
    at: np.ndarray
    added_s: float


class _Copied(NamedTuple):
    """A gather whose bytes are there."""

    run: _Run
    sums: Callable[[], np.ndarray]
    began_s: float


class ThreadedQueue:
    """A queue over any copies, in Python threads: a GPU's, and what the native queue is held to on a CPU."""

    def __init__(
        self,
        copies: BlockingCopies,
        slots: int,
        block_bytes: int,
        ordering: Ordering | None = None,
        gathers: QueueSide | None = None,
    ) -> None:
        """Args: copies, ordering: of scatters, and of gathers too unless they have a side of their own."""
        plain = Ordering(lambda: None, lambda mark: None, nullcontext())
        self._scattering = QueueSide(copies, ordering or plain)
        self._gathering = gathers or QueueSide(copies, ordering or plain)
        self._slots = slots
        self._block_bytes = block_bytes
        self._changed = threading.Condition()  # guards what follows
        self._scatters: deque[_Run] = deque()
        self._gathers: deque[_Run] = deque()
        self._ended: list[tuple[int, np.ndarray | None, float, str]] = []
        self._under_way = 0
        self._named: set[int] = set()  # runs whose end nobody has asked for yet
        self._closed = False
        self._copied: queue.SimpleQueue[_Copied | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work, args=(self._scattering, self._scatters), name="kvbm-loads", daemon=True
            ),
            threading.Thread(target=self._work, args=(self._gathering, self._gathers), name="kvbm-stores", daemon=True),
            threading.Thread(target=self._sum, name="kvbm-sums", daemon=True),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system gives no more
            self.close()
            raise

    @property
    def under_way(self) -> int:
        """As `CopyQueue.under_way`."""
        with self._changed:
            return self._under_way

    def mark(self) -> Any:
        """A mark of now, for runs that are added later. Raises RuntimeError: the device takes none."""
        return self._scattering.ordering.mark()

    def is_passed(self, mark: Any) -> bool:
        """Whether the device has passed a mark."""
        return self._scattering.ordering.is_passed(mark)

    def gather(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray, mark: Any = None) -> None:
        """As `CopyQueue.gather`, behind a mark; None: one of now."""
        mark = self._gathering.ordering.mark() if mark is None else mark
        self._add(_Run(mark, id, True, slots, rows, at, time.monotonic()))

    def scatter(self, id: int, slots: np.ndarray, rows: np.ndarray, at: np.ndarray, mark: Any = None) -> None:
        """As `CopyQueue.scatter`, behind a mark; None: one of now."""
        mark = self._scattering.ordering.mark() if mark is None else mark
        self._add(_Run(mark, id, False, slots, rows, at, time.monotonic()))

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
        until_s = time.monotonic() + _CLOSING_S
        begun = [thread for thread in self._threads if thread.ident is not None]
        for thread in begun[:2]:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._copied.put(None)
        for thread in begun[2:]:
            thread.join(max(0.0, until_s - time.monotonic()))

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

    def _work(self, side: QueueSide, runs: deque[_Run]) -> None:
        with side.ordering.aside:
            while (run := self._next(side.ordering, runs)) is not None:
                self._copy(side, run)
                del run  # its arrays are the caller's again

    def _next(self, ordering: Ordering, runs: deque[_Run]) -> _Run | None:
        """The run to begin, the first that need not wait for the device; None: the queue is closed."""
        nap_s = _SHORTEST_NAP_S
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                for at, run in enumerate(runs):
                    if ordering.is_passed(run.mark) or now_s - run.added_s >= _READY_S:
                        del runs[at]
                        return run
                self._changed.wait(nap_s if runs else _CLOSING_S)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S) if runs else _SHORTEST_NAP_S
            return None

    def _copy(self, side: QueueSide, run: _Run) -> None:
        began_s = time.perf_counter()
        try:
            side.ordering.follow(run.mark)
            if not run.gathers:
                side.copies.scatter(run.slots, run.rows, run.at)
            elif side.fetch is None:
                sums = side.copies.gather(run.slots, run.rows, run.at)
                self._end(run, sums, began_s, "")
                return
            else:
                self._copied.put(_Copied(run, side.fetch(run.slots, run.rows, run.at), began_s))
                return
        except Exception as error:  # noqa: BLE001  whatever a device's library raises: somebody waits for the run's end
            self._end(run, None, began_s, str(error) or type(error).__name__)
            return
        self._end(run, None, began_s, "")

    def _sum(self) -> None:
        while (copied := self._copied.get()) is not None:
            try:
                self._end(copied.run, copied.sums(), copied.began_s, "")
            except Exception as error:  # noqa: BLE001  as above
                self._end(copied.run, None, copied.began_s, str(error) or type(error).__name__)
            del copied

    def _end(self, run: _Run, sums: np.ndarray | None, began_s: float, why: str) -> None:
        with self._changed:
            self._ended.append((run.id, sums, time.perf_counter() - began_s, why))
            self._under_way -= 1
            self._changed.notify_all()


def check_run(slots: np.ndarray, rows: np.ndarray, at: np.ndarray, slot_count: int, block_bytes: int) -> None:
    """Refuse a run that names what is not there. Raises LayoutError."""
    if rows.shape[1] != block_bytes or len(at) != len(slots):
        raise LayoutError(f"{len(slots)} slots of {block_bytes} bytes, rows of {rows.shape[1]}: {len(at)}")
    for what, indexes, end in (("slot", slots, slot_count), ("row", at, len(rows))):
        if len(indexes) and (int(indexes.min()) < 0 or int(indexes.max()) >= end):
            raise LayoutError(f"{what}s {indexes.min()} to {indexes.max()} wanted, there are {end}")
