"""The ledger's events → the journal: the event writer, which also takes a snapshot of what is held and begins another
epoch when one is due, and gives back what was kept for a time that is over.

`EventWriter.step` is one turn, without sleeping: a thread of its own takes turns in production, a simulator by hand.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvbm.core.ages import BlockAges
from kvbm.core.codec import FrameBytes
from kvbm.core.errors import JournalError
from kvbm.core.ids import Epoch, Offset
from kvbm.manager.record.journal_retention import JournalRetention, NoRetention
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.publisher_port import PublisherPort
from kvbm.manager.record.snapshot_policy import (
    BeginSnapshot,
    Effect,
    Input,
    JournalSize,
    SnapshotPolicy,
    Ticked,
    WakeAt,
)
from kvbm.safe_log import SafeLog
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.writer import FullError

log = SafeLog()

RUNS_A_TURN = 8  # of a snapshot, before what they recorded is written
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 2.0
_LOST = "frames were lost by a bug"


class FrameSink(Protocol):
    """Where frames become durable: the journal, or memory."""

    def append(self, frame: FrameBytes) -> None:
        """Write one whole frame. Raises OSError: nothing of it was written; it may be tried again."""


@runtime_checkable
class GroupSink(FrameSink, Protocol):
    """A sink that takes several frames for the price of one sync."""

    def append_all(self, frames: Sequence[FrameBytes]) -> int:
        """Write whole frames; gives how many, at least one. Raises OSError: as `append`, of the first."""


class EventWriter:
    """Makes events durable, frame by frame. The engine never waits for it.

    Nothing is taken while the device refuses what was taken before, so that what waits stays in the ledger's bounded
    room. When that overflows, the epoch has ended; once the device takes frames again another begins, with a snapshot
    of all that is held. So it is when another run has the fence, and when frames were lost by a bug.

    A journal that is full by its own bound while all of it is published is emptied by nothing but a snapshot. So one
    begins then, and what waits is let in beyond the bound until it is whole. On a device that is full, where that
    cannot be, the end of an epoch that could not be written is given up once its first snapshot is there and all is
    published: nothing else would ever make room.

    Where nobody says how far the stream has come, what is durable counts as published, but nothing is truncated before
    the journal is half full.

    Args:
        stream: where events come from.
        sink: where they go.
        port: the publisher's.
        retention: what the journal does beside taking frames; None where nothing outlives the process.
        snapshots: when what is held is listed again; None: when somebody asks.
        clock: what the thread tells `step`.
        linger_s: how long the thread lets events gather before a frame is cut.
        ages: follows what is written.

    Attributes:
        refusal: why the journal takes nothing; "" while it does.
    """

    def __init__(
        self,
        stream: LedgerStream,
        sink: FrameSink,
        offsets: Offsets,
        port: PublisherPort,
        retention: JournalRetention | None = None,
        snapshots: SnapshotPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        linger_s: float = 0.002,
        ages: BlockAges | None = None,
    ) -> None:
        self._stream, self._sink, self._offsets, self._port = stream, sink, offsets, port
        self._group = sink if isinstance(sink, GroupSink) else None
        self._retention: JournalRetention = retention or NoRetention()
        self._snapshots = snapshots or SnapshotPolicy(least_s=0.0)
        self._clock, self._linger_s = clock, linger_s
        self.refusal = ""
        self._instance, self._ages = stream.instance, ages
        self._truncatable = ORIGIN  # what lies before it may go
        self._unwritten: deque[FrameBytes] = deque()
        self._end = ORIGIN  # of the last frame written
        self._written_bytes = 0
        self._stored: JournalSize | None = None  # as the snapshots were told last
        self._is_full = False  # it takes nothing for want of room
        self._failures = 0
        self._retry_s = float("-inf")
        self._published = ORIGIN  # at the last try
        self._broke = False  # frames were lost
        self._keeps_fail = False  # what is kept past its time could not be given back
        self._asked_epoch = ""  # why another epoch is to begin
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"kvbm-frames-{self._instance}", daemon=True)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._stream.wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Write what waits and end; False when it was not all written in time."""
        self._stopping = True
        self._stream.wake.set()
        if self._thread.ident is None:
            self.step(self._clock())
        else:
            self._thread.join(timeout_s)
        return not (self._thread.is_alive() or self._unwritten or self.refusal or self._broke)

    # -- one turn at a time -------------------------------------------------------------------------------------------

    def ask_epoch(self, why: str) -> None:
        """Begin another epoch at the next turn. In the thread that takes turns."""
        self._asked_epoch = why

    def step(self, now_s: float, runs: int = RUNS_A_TURN) -> float | None:
        """Write what waits, go on with a snapshot, begin another epoch, keep no block past its time: whatever is due.

        Args:
            runs: steps of a snapshot to make at most.
        Returns: when the next turn is due if nothing wakes it before: `now_s` for at once, None for not at all.
        """
        try:
            look_s = self._stream.expire(now_s)
        except Exception as error:  # noqa: BLE001 - the journal goes on
            look_s = now_s + BACKOFF_MOST_S
            if not self._keeps_fail:  # one warning until it works again
                log.warning("keeps.not_ended", instance=self._instance, error=repr(error), remedy="report it")
            self._keeps_fail = True
        else:
            self._keeps_fail = False
        wakes = (look_s, self._write_due(now_s, runs), self._usage_due(now_s))
        return min((at_s for at_s in wakes if at_s is not None), default=None)

    def _usage_due(self, now_s: float) -> float | None:
        if now_s < self._retry_s:
            return None  # until then nothing is taken, so no period ends either
        due_in_s = self._stream.usage_due_in_s()
        return None if due_in_s is None else now_s + due_in_s

    def _write_due(self, now_s: float, runs: int) -> float | None:
        published = self._port.published
        if now_s < self._retry_s and published == self._published and not self._stopping:
            return self._retry_s
        self._published = published  # more of it may have made room
        wake_s: float | None = None
        try:
            done = not self._broke and self._drain()  # nothing may be written after a hole
            if self._wants_epoch():
                done = self._begin_epoch(done)
            self._truncate()
            if done:
                wakes = [self._go_on_with_snapshots(now_s, runs)]
                done = self._drain()
                wakes.append(self._retention.sync(now_s))
                wake_s = min((at_s for at_s in wakes if at_s is not None), default=None)
        except (OSError, JournalError) as error:
            self._refuse(error)
            done = False
        except Exception as error:
            # What was taken may be lost. An epoch that needs nothing before it makes that good.
            last, self.refusal = self.refusal, f"{_LOST} ({type(error).__name__}: {error})"
            self._broke, self._port.awaits_room, done = True, True, False
            self._unwritten.clear()
            if self._ages is not None:
                self._ages.forget()
            if self.refusal != last:
                log.exception("journal.writer_broke", instance=self._instance, remedy="report it; another epoch begins")
        if done:
            if self.refusal:
                log.info("journal.write_resumed", instance=self._instance)
                self.refusal, self._port.awaits_room = "", False
            self._failures, self._retry_s = 0, float("-inf")
            return wake_s
        self._retry_s = now_s + min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
        self._failures += 1
        return self._retry_s

    def _drain(self) -> bool:
        """Take and write everything that waits now; False when the device refused, and it will be tried again."""
        if self._unwritten and not self._write():
            return False
        self._unwritten.extend(self._stream.take())
        return not self._unwritten or self._write()

    def _write(self) -> bool:
        wrote = False
        while self._unwritten:
            try:
                count = self._append()
            except OSError as error:
                if isinstance(error, FullError) and self._lets_in():
                    continue
                self._refuse(error)
                break
            wrote = True
            for _ in range(count):
                frame = self._unwritten.popleft()
                self._end = Position(frame.epoch, frame.next_offset)
                self._written_bytes += len(frame.data)
                if self._ages is not None:
                    self._ages.take(frame.data)
            self._offsets.advance_durable(*self._end)
        if wrote and self._port.publishing is not None:
            self._port.publishing.notify()
        return not self._unwritten

    def _append(self) -> int:
        """Write what comes first; gives how many frames. Raises OSError."""
        if self._group is not None:
            return self._group.append_all(tuple(self._unwritten))
        self._sink.append(self._unwritten[0])
        return 1

    def _lets_in(self) -> bool:
        """Whether the journal, full by its own bound, takes all the same what was recorded until now: a snapshot is
        under way.
        """
        if not (self._is_all_published and (self._stream.in_snapshot or self._begin_snapshot())):
            return False
        return self._retention.let_in(Position(self._stream.ledger.epoch, self._stream.ledger.applied))

    def _refuse(self, error: Exception) -> None:
        is_first = not self.refusal
        # First of all: the log may lie on the same full disk.
        self.refusal, self._port.awaits_room = str(error) or type(error).__name__, True
        self._is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if is_first:
            log.warning(
                "journal.write_failed",
                instance=self._instance,
                error=str(error),
                waiting_frames=len(self._unwritten),
                remedy="make room or see to its device; until then nothing new goes to NVME and OBJECT",
            )

    # -- another epoch ------------------------------------------------------------------------------------------------

    def _wants_epoch(self) -> bool:
        if self._stream.ended:
            return False
        is_over = self._stream.ledger.overflowed or self._broke
        return is_over or self._port.fenced_by is not None or bool(self._asked_epoch)

    def _begin_epoch(self, done: bool) -> bool:
        """Begin another epoch, unless what the last one has to say can still be written. Whether all is written now."""
        last, fenced_by = self._stream.ledger.epoch, self._port.fenced_by
        if not done and not self._broke and fenced_by is None and not self._may_leave_unwritten(last):
            return False
        why = "broke" if self._broke else "fenced" if fenced_by is not None else self._asked_epoch or "overflowed"
        snapshot_end, expected = self._stream.expected_snapshot_end(), Offset(0)
        while snapshot_end > expected:  # more than once only if blocks of very many namespaces came meanwhile
            expected = Offset(snapshot_end + snapshot_end // 4 + 16)
            newest = max(self._stream.ledger.epoch, self._retention.epoch, self._end.epoch, fenced_by or last)
            epoch = Epoch(newest + 1)
            self._retention.begin_epoch(epoch, expected)
            restarted = self._stream.restart(epoch)
            if restarted is None:
                return done
            snapshot_end = restarted
        self._stream.record_usage_of(self._unwritten)
        self._unwritten.clear()
        self._offsets.begin_epoch(epoch, snapshot_end)
        self._broke, self._asked_epoch = False, ""
        if self._port.fenced_by == fenced_by:
            self._port.fenced_by = None
        log.info("instance.epoch_begun", instance=self._instance, epoch=epoch, after=last, why=why)
        return self._drain()

    def _may_leave_unwritten(self, epoch: Epoch) -> bool:
        return self._is_full and self._offsets.is_whole(epoch) and self._is_all_published

    @property
    def _is_all_published(self) -> bool:
        """Whether the stream has what the journal has, where there is one."""
        published = self._port.confirmed()
        return published is None or published >= self._end

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _go_on_with_snapshots(self, now_s: float, runs: int) -> float | None:
        """Begin a snapshot if one is due, and make some steps of the one under way.

        Returns when the next turn is due.
        """
        stream = self._stream
        effects = self._tell_snapshots(now_s, self._news_of_snapshots())
        if BeginSnapshot() in effects and self._begin_snapshot():
            self._tell_snapshots(now_s, stream.take_happened())
        if stream.in_snapshot:
            for _ in range(runs):
                if not stream.step_snapshot():
                    break
            if happened := stream.take_happened():  # else all is as it was
                effects = self._tell_snapshots(now_s, happened)
        if stream.ended or stream.ledger.overflowed:
            return None
        if stream.in_snapshot or BeginSnapshot() in effects:
            return now_s
        return next((effect.at_s for effect in effects if isinstance(effect, WakeAt)), None)

    def _begin_snapshot(self) -> bool:
        """Begin a snapshot; False when one is under way, or nothing more can be recorded."""
        if not self._stream.begin_snapshot():
            return False
        self._retention.begin_snapshot()
        if self._port.publishing is not None:
            self._port.publishing.snapshot_began()
        return True

    def _news_of_snapshots(self) -> list[Input]:
        """What has come since the last turn that decides when a snapshot begins; at least that time has passed."""
        news = [*self._stream.take_happened(), *self._port.take_news()]
        stored = JournalSize(self._retention.used_bytes(), self._written_bytes)
        if stored != self._stored:
            self._stored = stored
            news.append(stored)
        return news or [Ticked()]

    def _tell_snapshots(self, now_s: float, inputs: list[Input]) -> list[Effect]:
        effects: list[Effect] = []
        for happened in inputs:
            effects = self._snapshots.step(now_s, happened)
        return effects

    def _truncate(self) -> None:
        """What lies before a snapshot that is durable and published is truncatable."""
        published, durable = self._port.confirmed(), self._offsets.durable
        safe = durable if published is None else min(durable, published)
        whole = self._stream.take_whole(safe)
        if whole is not None:
            self._truncatable = whole.began
        if self._truncatable > ORIGIN and (published is not None or self._snapshots.is_half_full):
            self._retention.truncate(safe, self._truncatable)
            self._truncatable = ORIGIN

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake, wake_s = self._stream.wake, None
        while True:
            wake.wait(None if wake_s is None else max(0.0, wake_s - self._clock()))
            wake.clear()  # before looking at what it woke for: a stop that comes now wakes it once more
            stopping = self._stopping
            now_s = self._clock()
            try:
                wake_s = self.step(now_s)
            except (
                OSError,
                ValueError,
            ):  # a log that is closed, or on a full disk: what reports trouble has failed itself
                wake_s = now_s + BACKOFF_MOST_S
            if stopping:
                return
            if wake_s is None or wake_s > now_s:
                time.sleep(self._linger_s)
