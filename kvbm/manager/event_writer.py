"""The ledger's frames → the journal: the frame writer, which also restates what is held and begins another epoch when one is due.

`FrameWriter.step` is one turn, without sleeping: a thread of its own takes turns in production, a simulator by hand.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import structlog

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import JournalError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.manager.ledger_stream import EventSource
from kvbm.manager.offsets import Offsets
from kvbm.manager.snapshot_policy import Asked, BeginRound, Effect, Input, Learned, Rounds, Stored, Ticked, WakeAt
from kvbm.streams.base import ORIGIN, Position, StreamState

log = structlog.get_logger()

RUNS_A_TURN = 8  # of a round, before what they recorded is written
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


class Keeping(Protocol):
    """What the journal does beside taking frames."""

    @property
    def epoch(self) -> Epoch:
        """The epoch last begun."""

    def begin_epoch(self, epoch: Epoch, round_end: Offset) -> None:
        """Persist that an epoch begins, before any of its frames. Raises JournalError or OSError: nothing has changed.

        Args:
            round_end: frames that begin before it are taken also when the journal is full.
        """

    def begin_round(self) -> None:
        """What comes next begins a round."""

    def sync(self, now_s: float) -> float | None:
        """Bring to the device what is due. Gives when more will be; None for not at all. Raises OSError."""

    def let_go(self, published: Position, whole_round: Position) -> None:
        """Forget what lies before a whole round and is published."""

    def used_bytes(self) -> int:
        """How large the journal is."""


class NothingKept:
    """For sinks that keep nothing for another process."""

    epoch = Epoch(0)

    def begin_epoch(self, epoch: Epoch, round_end: Offset) -> None:
        """See `Keeping.begin_epoch`."""

    def begin_round(self) -> None:
        """See `Keeping.begin_round`."""

    def sync(self, now_s: float) -> float | None:
        """See `Keeping.sync`."""
        return None

    def let_go(self, published: Position, whole_round: Position) -> None:
        """See `Keeping.let_go`."""

    def used_bytes(self) -> int:
        """See `Keeping.used_bytes`."""
        return 0


class FrameWriter:
    """Makes frames durable. The engine never waits for it.

    Nothing is taken while the device refuses what was taken before, so that what waits stays in the ledger's bounded room. When
    that overflows, the epoch has ended; once the device takes frames again another begins, with a round of all that is held. So
    it is when another run has the fence, and when frames were lost by a bug. The end of an epoch that could not be written is
    given up only when nothing else would ever make room: the journal is full, its first round is in it, and all of it is published.

    Args:
        written: called after frames have become durable.
        published: how far the stream has come; None: there is none. Then what is durable counts as published, but nothing is let
            go before the journal is half full.
        began: called when a round has begun.
        linger_s: how long the thread lets events gather before a frame is cut.
        clock: what the thread tells `step`.
    """

    def __init__(
        self,
        instance: InstanceId,
        source: EventSource,
        sink: FrameSink,
        offsets: Offsets,
        written: Callable[[], None] = lambda: None,
        keeping: Keeping | None = None,
        rounds: Rounds | None = None,
        published: Callable[[], Position | None] = lambda: None,
        began: Callable[[], None] = lambda: None,
        linger_s: float = 0.002,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._source, self._sink, self._offsets, self._written = source, sink, offsets, written
        self._keeping = keeping or NothingKept()
        self._rounds = rounds or Rounds(least_s=0.0)
        self._published, self._began = published, began
        self._needless = ORIGIN  # what lies before it may be let go
        self._linger_s, self._clock = linger_s, clock
        self._unwritten: deque[FrameBytes] = deque()
        self._end = ORIGIN  # of the last frame written
        self._written_bytes = 0
        self._refusal = ""
        self._is_full = False  # why it takes nothing: for want of room
        self._failures = 0
        self._retry_s = float("-inf")
        self._broke = False  # frames were lost
        self._fenced_by: Epoch | None = None
        self._asked = False
        self._state: StreamState | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"kvbm-frames-{instance}", daemon=True)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notify(self) -> None:
        """There are events. Costs nothing while a frame is already on its way."""
        if not self._wake.is_set():
            self._wake.set()

    def fence(self, newer: Epoch) -> None:
        """The epoch is another run's by now: begin one above `newer`."""
        self._fenced_by = max(newer, self._fenced_by or newer)
        self.notify()

    def ask_round(self) -> None:
        """A reader has missed events."""
        self._asked = True
        self.notify()

    def learn_stream(self, state: StreamState) -> None:
        """What the stream holds and keeps."""
        self._state = state
        self.notify()

    def retry(self) -> None:
        """There may be room now: try at once what was refused."""
        self._retry_s = float("-inf")
        self.notify()

    @property
    def refusal(self) -> str:
        """Why the journal takes nothing; "" while it does."""
        return self._refusal

    def stop(self, timeout_s: float) -> bool:
        """Write what waits and end; False when it was not all written in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self.step(self._clock())
        else:
            self._thread.join(timeout_s)
        return not (self._thread.is_alive() or self._unwritten or self._refusal or self._broke)

    # -- one turn at a time -------------------------------------------------------------------------------------------

    def step(self, now_s: float, runs: int = RUNS_A_TURN) -> float | None:
        """Write what waits, go on with a round, begin another epoch: whatever is due.

        Args:
            runs: steps of a round to make at most.
        Returns: when the next turn is due if `notify` does not come first: `now_s` for at once, None for not at all.
        """
        if now_s < self._retry_s and not self._stopping:
            return self._retry_s
        wake_s: float | None = None
        try:
            done = not self._broke and self.drain()  # nothing may be written after a hole
            if self._wants_epoch():
                done = self._begin_epoch(done)
            self._let_go()
            if done:
                wakes = [self._go_on_with_rounds(now_s, runs)]
                done = self.drain()
                wakes.append(self._keeping.sync(now_s))
                wake_s = min((at_s for at_s in wakes if at_s is not None), default=None)
        except (OSError, JournalError) as error:
            self._refuse(error)
            done = False
        except Exception:
            # What was taken may be lost, which only an epoch that needs nothing before it makes good.
            if self._refusal != _LOST:
                log.exception("journal.writer_broke", instance=self._instance, remedy="report it; another epoch begins")
            self._broke, done = True, False
            self._refusal = _LOST
            self._unwritten.clear()
        if done:
            if self._refusal:
                log.info("journal.write_resumed", instance=self._instance)
                self._refusal = ""
            self._failures, self._retry_s = 0, float("-inf")
            return wake_s
        self._retry_s = now_s + min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
        self._failures += 1
        return self._retry_s

    def drain(self) -> bool:
        """Take and write everything that waits now; False when the device refused, and it will be tried again."""
        if not self._write():
            return False
        self._unwritten.extend(self._source.take())
        return self._write()

    def _write(self) -> bool:
        wrote = False
        while self._unwritten:
            try:
                count = self._append()
            except OSError as error:
                self._refuse(error)
                break
            wrote = True
            for _ in range(count):
                frame = self._unwritten.popleft()
                self._end = Position(frame.epoch, frame.next_offset)
                self._written_bytes += len(frame.data)
            self._offsets.advance_durable(*self._end)
        if wrote:
            self._written()
        return not self._unwritten

    def _append(self) -> int:
        """Write what comes first; gives how many frames. Raises OSError."""
        if isinstance(self._sink, GroupSink):
            return self._sink.append_all(tuple(self._unwritten))
        self._sink.append(self._unwritten[0])
        return 1

    def _refuse(self, error: Exception) -> None:
        was_told = bool(self._refusal)
        self._refusal = str(error) or type(error).__name__  # first: the log may lie on the same full disk
        self._is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if not was_told:
            log.warning(
                "journal.write_failed", instance=self._instance, error=str(error), waiting_frames=len(self._unwritten),
                remedy="make room or see to its device; until then nothing new goes to NVME and OBJECT",
            )  # fmt: skip

    # -- another epoch ------------------------------------------------------------------------------------------------

    def _wants_epoch(self) -> bool:
        if self._source.ended:
            return False
        return self._source.overflowed or self._broke or self._fenced_by is not None

    def _begin_epoch(self, done: bool) -> bool:
        """Begin another epoch, unless what the last one has to say can still be written. Whether all is written now."""
        last = self._source.epoch
        if not done and not self._broke and self._fenced_by is None and not self._may_leave_unwritten(last):
            return False
        fenced_by = self._fenced_by
        why = "broke" if self._broke else "overflowed" if fenced_by is None else "fenced"
        round_end, expected = self._source.expected_round_end(), Offset(0)
        while round_end > expected:  # more than once only if blocks of very many namespaces came meanwhile
            expected = Offset(round_end + round_end // 4 + 16)
            epoch = Epoch(max(self._source.epoch, self._keeping.epoch, self._end.epoch, fenced_by or last) + 1)
            self._keeping.begin_epoch(epoch, expected)
            restarted = self._source.restart(epoch)
            if restarted is None:
                return done
            round_end = restarted
        self._unwritten.clear()
        self._offsets.begin_epoch(epoch, round_end)
        self._broke = False
        if self._fenced_by == fenced_by:
            self._fenced_by = None
        log.info("instance.epoch_begun", instance=self._instance, epoch=epoch, after=last, why=why)
        return self.drain()

    def _may_leave_unwritten(self, epoch: Epoch) -> bool:
        published = self._published()
        return self._is_full and self._offsets.is_whole(epoch) and (published is None or published >= self._end)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _go_on_with_rounds(self, now_s: float, runs: int) -> float | None:
        """Begin a round if one is due, and make some steps of the one under way. Returns when the next turn is due."""
        inputs = self._source.take_happened()
        if self._asked:
            self._asked = False
            inputs.append(Asked())
        if self._state is not None:
            inputs.append(Learned(self._state))
            self._state = None
        inputs.append(Stored(self._keeping.used_bytes(), self._written_bytes))
        if BeginRound() in self._tell_rounds(now_s, inputs) and self._source.begin_round():
            self._keeping.begin_round()
            self._began()
            self._tell_rounds(now_s, self._source.take_happened())
        if self._source.in_round:
            for _ in range(runs):
                if not self._source.step_round():
                    break
        effects = self._tell_rounds(now_s, [*self._source.take_happened(), Ticked()])
        if self._source.ended or self._source.overflowed:
            return None
        if self._source.in_round or BeginRound() in effects:
            return now_s
        return next((effect.at_s for effect in effects if isinstance(effect, WakeAt)), None)

    def _tell_rounds(self, now_s: float, inputs: list[Input]) -> list[Effect]:
        effects: list[Effect] = []
        for happened in inputs:
            effects = self._rounds.step(now_s, happened)
        return effects

    def _let_go(self) -> None:
        """What lies before a round that is durable and published is needless."""
        durable = self._offsets.durable
        published = self._published()
        safe = durable if published is None else min(durable, published)
        whole = self._source.take_whole(safe)
        if whole is not None:
            self._needless = whole.began
        if self._needless > ORIGIN and (published is not None or self._rounds.is_half_full):
            self._keeping.let_go(safe, self._needless)
            self._needless = ORIGIN

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake_s: float | None = None
        while True:
            self._wake.wait(None if wake_s is None else max(0.0, wake_s - self._clock()))
            self._wake.clear()  # before looking at what it woke for: a stop that comes now wakes it once more
            stopping = self._stopping
            now_s = self._clock()
            try:
                wake_s = self.step(now_s)
            except (
                OSError,
                ValueError,
            ):  # what tells of trouble has failed itself: a log that is closed, or on a full disk
                wake_s = now_s + BACKOFF_MOST_S
            if stopping:
                return
            if wake_s is None or wake_s > now_s:
                time.sleep(self._linger_s)
