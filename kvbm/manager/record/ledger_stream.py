"""The ledger of one instance with the lock around it, and its stream of events: its frames, its snapshots, another
epoch of it.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvbm.core.backend import LedgerProtocol, LockProtocol
from kvbm.core.codec import USAGE_VERSION, FrameBytes, decode_frame
from kvbm.core.errors import LedgerError
from kvbm.core.events import MAX_RUN_BLOCKS, UsageRecorded
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.manager.record.snapshot_policy import Began, Dropped, Ended, Input
from kvbm.manager.record.usage_account import UsageAccount
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Position

log = SafeLog()

_EXPIRE_S = 1.0  # how often kept blocks are looked through for those whose time is over
_NEVER = float("-inf")
_VERSION_AT = slice(4, 6)  # of a frame
_USAGES_A_TURN = 4  # recorded at once, of those that had to wait: they must not fill the room for events


class CompletedSnapshot(NamedTuple):
    """A snapshot that has ended: what lies before `began` is truncatable once everything before `ended` is safe."""

    began: Position
    ended: Position


class LedgerStream:
    """A ledger that several threads use, and what the event writer takes from it. Nothing is recorded after `end`.

    Args:
        ledger: started.
        lock: a `threading.Lock`, or what does the same; None makes one.
        usage: as the attribute.

    Attributes:
        lock: held around every call of the ledger, by whoever calls it, also by threads that know nothing of Python.
            The methods here take it themselves unless their names end in `_locked`.
        wake: set when the event writer has something to do.
        closing: no copy begins any more. Written under the lock.
        ended: the stream has ended for good. Written under the lock.
        usage: what tenants use of the instance; None: it is not recorded.
    """

    def __init__(
        self,
        instance: InstanceId,
        ledger: LedgerProtocol,
        wall_clock_ns: Callable[[], int],
        lock: LockProtocol | None = None,
        usage: UsageAccount | None = None,
    ) -> None:
        self.instance, self.ledger = instance, ledger
        self.lock: LockProtocol = lock or threading.Lock()
        self.wake = threading.Event()
        self.closing = self.ended = False
        self.usage = usage
        self._wall_clock_ns = wall_clock_ns
        self._taking = threading.Lock()  # before `lock`: frames are taken and metered in the order of their events
        self._taken: list[FrameBytes] = []  # by `end`, for the event writer
        self._usages: list[UsageRecorded] = []  # that wait in the ledger
        self._inherited_by = 0  # the forked child this is in
        self._expire_at_s = 0.0
        self._kept_until_s = _NEVER
        self._overflow_logged = Epoch(0)
        self._began: Position | None = None  # of the snapshot under way
        self._happened: list[Input] = []
        self._whole: deque[CompletedSnapshot] = deque()
        self._note_epoch(ledger.applied)

    # -- whoever records ----------------------------------------------------------------------------------------------

    def require_open_locked(self) -> None:
        """Refuse a caller. Raises LedgerError: closed, or another process's."""
        if self._inherited_by:
            raise LedgerError(
                f"the manager of instance {self.instance!r} was opened by the process that forked this one"
                f" ({self._inherited_by}); open one here, with an instance.id of its own, or start this process by "
                "spawn"
            )
        if self.closing:
            raise LedgerError(f"the manager is closed, and instance {self.instance!r} with it; open a new one")

    def kept_locked(self, until_s: float) -> None:
        """Blocks are kept until then: the event writer looks after them, for an engine that asks for nothing."""
        if self._kept_until_s < until_s < math.inf:
            self._kept_until_s = until_s
            self.wake.set()

    def expire_locked(self, now_s: float) -> None:
        """Stop keeping blocks whose time is over, at most once a second."""
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + _EXPIRE_S
            self.ledger.expire(now_s)
            if now_s >= self._kept_until_s:
                self._kept_until_s = _NEVER

    def recorded(self) -> None:
        """Events may have been recorded: wake the writer.

        Outside the lock. Costs nothing while a frame is already on its way.
        """
        if not self.wake.is_set():
            self.wake.set()
        if self.ledger.overflowed and self._overflow_logged != self.ledger.epoch:
            self._log_overflow()

    def _log_overflow(self) -> None:
        with self.lock:
            last, self._overflow_logged = self._overflow_logged, self.ledger.epoch
        if last != self._overflow_logged:
            log.warning(
                "ledger.overflowed",
                instance=self.instance,
                offset=self.ledger.applied,
                remedy="the journal took nothing for too long: see to its device (journal.write_failed); until it "
                "takes events "
                "again and another epoch begins, the engine is served, but unseen by the catalog and without NVME and "
                "OBJECT",
            )

    # -- the event writer ---------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> float | None:
        """Stop keeping blocks whose time is over.

        Returns: when to look again; None: nothing is kept that ever ends.
        """
        if self._kept_until_s == _NEVER or self.ended:
            return None
        with self.lock:
            self.expire_locked(now_s)
            return None if self._kept_until_s == _NEVER else self._expire_at_s

    def take(self) -> list[FrameBytes]:
        """The events that wait, as frames."""
        with self._taking:
            now_ns = self._wall_clock_ns()
            with self.lock:
                frames = self.ledger.take_frames(self.instance, now_ns)
                self._usages = []
                reads = self.usage.take_reads_locked(now_ns // 1_000_000) if self.usage is not None else {}
            if self.usage is not None and not self.ended:
                self.usage.take(frames, reads, now_ns // 1_000_000)
                self._record_usage()
            before, self._taken = self._taken, []
            return before + frames

    def _record_usage(self) -> None:
        """Record what tenants have used, once the stream goes on."""
        assert self.usage is not None
        with self.lock:
            if self.ledger.stopped:
                return
            events, recorded = self.usage.take_events(), 0
            for event in events[:_USAGES_A_TURN]:
                self.ledger.record_usage(event)
                if self.ledger.overflowed:
                    break  # it is in no frame
                recorded += 1
            self._usages = events[:recorded]
            self.usage.put_back(events[recorded:])
            if events:
                self.wake.set()

    def usage_due_in_s(self) -> float | None:
        """In how many seconds usage is to be recorded; None: it is not."""
        if self.usage is None or self.ended:
            return None
        return self.usage.due_in_s(self._wall_clock_ns() // 1_000_000)

    def erase_usage(self, number: int, is_meant: Callable[[str], bool]) -> None:
        """What tenants that an erasure means have used until now is recorded no more."""
        with self.lock:
            if self.usage is not None:
                self.usage.erase_locked(number, is_meant, self._wall_clock_ns() // 1_000_000)

    def restart(self, epoch: Epoch) -> Offset | None:
        """Begin another epoch in place; events that still wait are given up, since its first snapshot says what they
        led to.

        Returns: the offset after the snapshot; None when the stream has ended for good.
        """
        with self.lock:
            if self.ended:
                return None
            self.ledger.take_frames(self.instance, 0)
            after = self.ledger.restart(epoch)
            if self.usage is not None:
                self.usage.put_back(self._usages)
                self._usages = []
            if self._began is not None:
                self._happened.append(Dropped())
                self._began = None
            self._note_epoch(after)
            return after

    def record_usage_of(self, frames: Iterable[FrameBytes]) -> None:
        """Frames of epochs before are given up, and nobody has read them: what they say of usage is recorded anew."""
        usage = self.usage
        if usage is None:
            return
        given_up = [
            event
            for frame in frames
            if int.from_bytes(frame.data[_VERSION_AT], "little") >= USAGE_VERSION
            for event in decode_frame(frame.data)[0].events
            if isinstance(event, UsageRecorded)
        ]
        with self.lock:
            usage.put_back(given_up)

    def expected_snapshot_end(self) -> Offset:
        """About where the first snapshot of an epoch that began now would end."""
        with self.lock:
            tiers = [self.ledger.counts(pool.tier) for pool in self.ledger.pools if pool.slots]
        return Offset(1 + sum(2 + counts.held // MAX_RUN_BLOCKS for counts in tiers))

    def begin_snapshot(self) -> bool:
        """Begin a snapshot; False when one is under way, or the stream has ended."""
        with self.lock:
            began = Position(self.ledger.epoch, self.ledger.applied)
            if self.ended or not self.ledger.begin_snapshot():
                return False
            self._began = began
            self._happened.append(Began())
            return True

    def step_snapshot(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """State some more of what is held; whether the snapshot goes on."""
        with self.lock:
            if self.ended:
                return False
            going_on = self.ledger.step_snapshot(limit)
            if self._began is not None and not going_on:
                if self.ledger.overflowed:
                    self._happened.append(Dropped())
                else:
                    self._whole.append(CompletedSnapshot(self._began, Position(self.ledger.epoch, self.ledger.applied)))
                    self._happened.append(Ended())
                self._began = None
            return going_on

    @property
    def in_snapshot(self) -> bool:
        """Whether a snapshot is under way."""
        return self._began is not None

    def take_happened(self) -> list[Input]:
        """What became of snapshots since the last call, whoever began or stepped them."""
        with self.lock:
            happened, self._happened = self._happened, []
        return happened

    def take_whole(self, safe: Position) -> CompletedSnapshot | None:
        """The last snapshot of which everything lies before `safe`, once."""
        if not self._whole:
            return None
        with self.lock:
            found = None
            while self._whole and self._whole[0].ended <= safe:
                found = self._whole.popleft()
        return found

    def waits_for(self, position: Position) -> bool:
        """Whether a snapshot has ended before a position that nobody has taken."""
        return any(whole.ended <= position for whole in tuple(self._whole))

    # -- its end ------------------------------------------------------------------------------------------------------

    def begin_closing(self) -> None:
        """No copy begins any more."""
        with self.lock:
            self.closing = True

    def end(self) -> None:
        """End the stream for good, with what tenants have used until now. Idempotent."""
        with self._taking, self.lock:
            if not self.ended:
                self.ended = True
                try:
                    if self.usage is not None and not self.ledger.stopped:
                        self._record_last_usage_locked(self.usage)
                finally:  # a signal's handler may raise anywhere, and nobody ends it once more
                    self.ledger.stop()

    def _record_last_usage_locked(self, usage: UsageAccount) -> None:
        now_ns = self._wall_clock_ns()
        frames = self.ledger.take_frames(self.instance, now_ns)
        self._taken += frames
        reads = usage.take_reads_locked(now_ns // 1_000_000, is_last=True)
        usage.take(frames, reads, now_ns // 1_000_000, is_last=True)
        for event in usage.take_events():
            self.ledger.record_usage(event)

    def disown(self) -> None:
        """This process is a forked child: the lock opens, since whoever had it may not be here to give it back.

        A thread that has the lock, but not yet the GIL, leaves one that says that it is not locked and can not be
        taken: so it is made anew in place, as the standard library does with its own.
        """
        self.closing = True
        self._inherited_by = os.getpid()
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]

    def _note_epoch(self, after: Offset) -> None:
        """An epoch's first snapshot is whole as it begins."""
        epoch = self.ledger.epoch
        self._happened += [Began(), Ended()]
        self._whole.clear()
        self._whole.append(CompletedSnapshot(Position(epoch, Offset(0)), Position(epoch, after)))
