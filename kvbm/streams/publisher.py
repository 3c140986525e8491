"""Carries an instance's frames from its log to the stream: `Publisher` decides, `PublisherThread` does."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from enum import Enum, auto
from typing import NamedTuple, TypeVar, assert_never

import msgspec
import structlog

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import FencedError, KvbmError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import (
    ORIGIN,
    AwayError,
    EpochRuns,
    EventStream,
    Fence,
    FrameLog,
    Heartbeat,
    Position,
    PublisherOwner,
    SampleSource,
    StreamState,
    Tail,
    UnreadableError,
    encoded_heartbeat,
    events_subject,
)
from kvbm.streams.nats.stream import NatsStream, shown

log = structlog.get_logger()
T = TypeVar("T")

MESSAGE_BYTES = 256 << 10
WINDOW_BYTES = 4 << 20
WINDOW_MESSAGES = 512
LINGER_S = 0.002
ACK_WAIT_S = 5.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 2.0
ACK_LEAST_S = 1.0  # no acknowledgement counts as late before, however short the round trips are
ACK_FIRST_S = 3.0  # before any acknowledgement has come
LOOK_MOST_S = 0.5  # between two looks whether a stream that is away is back: a new leader is there within seconds
LOOKS_MOST = 8  # then by another connection: perhaps it is this server that hears nothing
PROBE_WAIT_S = 1.0  # for each answer of a look
WINDOWS_KEPT = 2  # so many windows a stream must keep, or an instance's own messages push out its fence
STALLED_S = 5.0  # after this long without progress it is said what is waited for
STEADY_S = 10.0  # a connection that lasted this long clears the count of failures
CONNECT_WAIT_S = 5.0
STATE_EVERY_S = 60.0
SILENT_HEARTBEATS = 3  # so long must another run be silent before its place is taken
FENCE_CHECK_HEARTBEATS = 10  # so often an instance that has nothing to publish looks whether the place is still its own
LOG_EPOCHS = 64  # named by a fence, the newest of them
FENCE_SHARE = 4  # a fence is moved at least so often in the time the stream keeps a message


def check_keeps(state: StreamState, window_bytes: int, window_messages: int) -> None:
    """Raises StreamError: the stream keeps so little that an instance's own messages may push out its fence."""
    for key, most, window in (
        ("max_bytes", state.max_bytes, window_bytes),
        ("max_msgs", state.max_messages, window_messages),
    ):
        if 0 < most < WINDOWS_KEPT * window:
            least = WINDOWS_KEPT * window
            raise StreamError(
                f"stream KVBM keeps {key}={most}, and an instance may have {window} on the way: its own messages push out its "
                f"fence, and nothing more is taken; give the stream at least {least} (nats stream edit KVBM "
                f"--{key.replace('_', '-')}={least})"
            )


def unknown_runs() -> Mapping[Epoch, str]:
    """Of a log that does not know who began its epochs."""
    return {}


class Connected(NamedTuple):
    """A connection stands.

    Attributes:
        attempt: of the Connect that this answers.
        fence, tail: what the stream holds of this instance.
        message_bytes: the most that one message may have.
        in_flight: messages that may be under way at a time; 0: any number.
    """

    attempt: int
    fence: Fence | None
    tail: Tail | None
    message_bytes: int
    in_flight: int = 0


class Disconnected(NamedTuple):
    """The connection is lost, or could not be made.

    Attributes:
        stands: it is there, and what a Connect asked was not answered.
    """

    reason: str
    stands: bool = False


class Appended(NamedTuple):
    """The log may have more."""


class Acked(NamedTuple):
    """The stream has stored a message."""

    attempt: int


class FenceSet(NamedTuple):
    """The stream has stored the fence."""

    attempt: int
    fence: Fence


class Refused(NamedTuple):
    """The stream did not take a message or a fence, for another reason than the fence.

    Attributes:
        away: it has no leader now, or does not answer: nobody has looked at what was sent.
    """

    attempt: int
    reason: str
    away: bool = False


class FencedOff(NamedTuple):
    """The stream did not take a message or a fence, because the fence is another one by now."""

    attempt: int
    reason: str


class FenceRead(NamedTuple):
    """The fence that the stream holds.

    Attributes:
        asked: sequence of the ReadFence that this answers.
    """

    asked: int
    fence: Fence | None


class Begun(NamedTuple):
    """The owner is in this epoch."""

    epoch: Epoch


class RoundBegan(NamedTuple):
    """The owner begins to state what it holds: the fence is to be as young as the round."""


class Kept(NamedTuple):
    """How long the stream keeps a message; 0 for ever."""

    max_age_s: float


class Pulse(NamedTuple):
    """The instance's last heartbeat that the stream has."""

    heartbeat: Heartbeat | None


class Ticked(NamedTuple):
    """Time has passed."""


Input = (
    Connected
    | Disconnected
    | Appended
    | Acked
    | FenceSet
    | Refused
    | FencedOff
    | FenceRead
    | Begun
    | RoundBegan
    | Kept
    | Pulse
    | Ticked
)


class Connect(NamedTuple):
    """Learn fence and tail. Answer with Connected or Disconnected.

    Attributes:
        anew: drop the connection, if there is one, and make a new one first.
    """

    attempt: int
    anew: bool


class Publish(NamedTuple):
    """Send one message, behind those of earlier effects. Answer with Acked, Refused, FencedOff or Disconnected.

    Attributes:
        attempt: tells this sending from every other.
        data: whole frames of one epoch.
        through: where they end.
        fence: the one it names.
        safe: see `Tail.safe`.
    """

    attempt: int
    data: bytes
    through: Position
    fence: Fence
    safe: Position


class SetFence(NamedTuple):
    """Move the fence, if it is still where it was. Answer with FenceSet, Refused, FencedOff or Disconnected.

    Attributes:
        log: see `Fence.log`.
    """

    attempt: int
    epoch: Epoch
    run: str
    expected: int
    log: EpochRuns = ()


class ReadFence(NamedTuple):
    """See whose the place is: who publishes nothing is never refused. Answer with FenceRead or Disconnected.

    Attributes:
        sequence: of the fence that is there as far as is known.
    """

    sequence: int


class AskPulse(NamedTuple):
    """Read the instance's last heartbeat. Answer with Pulse or Disconnected."""


class ShutOut(NamedTuple):
    """Say it: another run has the instance's place, so nothing is published.

    Attributes:
        epoch: that run's, as far as is known.
        run: "" when only its events are known.
    """

    epoch: Epoch
    run: str


class Supersede(NamedTuple):
    """Have the owner begin an epoch later than this one: the run that has the place is silent. Answer with Begun."""

    epoch: Epoch


class WakeAt(NamedTuple):
    """Step with Ticked at this time, if nothing comes before."""

    at_s: float


Effect = Connect | Publish | SetFence | ReadFence | AskPulse | ShutOut | Supersede | WakeAt


class _State(Enum):
    WAITING = auto()  # until `_wake_s`, then connect
    CONNECTING = auto()
    FENCING = auto()  # nothing is in flight but a fence, until `_wake_s`
    SENDING = auto()
    PAUSED = auto()  # until `_wake_s`, then SENDING: a message was refused
    FENCED = auto()  # another run has the place; it is asked for at `_wake_s`


class _Sent(NamedTuple):
    attempt: int
    through: Position
    size: int
    sent_s: float


class _RoundTrips:
    """How long acknowledgements take, and so how long to wait for one: as TCP's retransmission timer (RFC 6298)."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = min(least_s, most_s), most_s
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def take(self, took_s: float) -> None:
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
            return
        self._deviation_s += (abs(self._mean_s - took_s) - self._deviation_s) / 4
        self._mean_s += (took_s - self._mean_s) / 8

    def wait_s(self, late: int) -> float:
        """How long to wait, after so many that came late, or not at all, one after another."""
        wait_s = ACK_FIRST_S
        if self._mean_s is not None:
            wait_s = max(self._least_s, self._mean_s + 4 * self._deviation_s)
        return min(self._most_s, wait_s * float(1 << min(late, 16)))


class Publisher:
    """Decides what to send when: a state machine without thread, clock or socket.

        WAITING → CONNECTING → FENCING ⇄ SENDING ⇄ PAUSED        each → WAITING when the connection fails
                             ↘ FENCED → CONNECTING               SENDING, FENCING → CONNECTING when the fence is another

    Go-back-N: messages follow each other without waiting, and when one is not stored, everything from it on is sent again. So
    the stream may hold 0 1 3 4 2 3 4; a reader that puts frames aside loses nothing. Each message says before which position
    all was acknowledged; a new connection goes on there, because what follows may have holes, and the end of the stream does
    not show them. The stream's word is believed even when it is less than what was acknowledged once: then it has lost its end,
    or is another one, and gets again what the log still has.

    An acknowledgement that is late, or the word that the stream is away, costs no connection: fence and end are asked for again on
    the one that stands, soon and often, because a cluster's stream has a new leader within seconds. How long an acknowledgement may
    take follows from how long they took.

    Every connection, round and epoch sets a fence, alone in flight. Behind it no message that an earlier fence let pass can be
    stored. A fence of a newer epoch, of another run in the same epoch, or set by another run after this run's own, means that
    another process has the instance's place: this one is quiet, and takes a later epoch only once no new heartbeat of the other has
    come for three heartbeats' time. Only a fence that this run has once replaced is no such word: the server has lost its end.

    Args:
        epoch: the owner's; `Begun` says when it grows. A frame of a later one says so too.
        run: of this process.
        heartbeat_s: between two heartbeats of an instance.
        window_bytes, window_messages: sent and not acknowledged, at most; one message may always be.
        linger_s: a message follows another at the earliest after this time, unless it is full; so frames share one.
        runs: which processes began the log's epochs, as far as it knows.
        jitter: gives numbers in [0, 1) that spread the retries of many instances.

    Attributes:
        published: the stream has held everything before it; only grows.
        confirmed: the stream holds everything before it, as far as this connection knows.
        epoch: the owner's.
        acks: messages of this run that were stored, as far as is known.
    """

    def __init__(
        self,
        frames: FrameLog,
        epoch: Epoch,
        run: str,
        heartbeat_s: float = 1.0,
        window_bytes: int = WINDOW_BYTES,
        window_messages: int = WINDOW_MESSAGES,
        message_bytes: int = MESSAGE_BYTES,
        linger_s: float = LINGER_S,
        ack_wait_s: float = ACK_WAIT_S,
        jitter: Callable[[], float] = random.random,
        runs: Callable[[], Mapping[Epoch, str]] = unknown_runs,
    ) -> None:
        self.published = ORIGIN
        self.confirmed = ORIGIN
        self.epoch = epoch
        self.acks = 0
        self._frames = frames
        self._run = run
        self._heartbeat_s = heartbeat_s
        self._window_bytes = window_bytes
        self._window_messages = window_messages
        self._message_bytes = min(message_bytes, max(1, window_bytes // 4))
        self._linger_s = linger_s
        self._round_trips = _RoundTrips(ACK_LEAST_S, ack_wait_s)
        self._jitter = jitter
        self._runs = runs

        self._now_s = float("-inf")
        self._state = _State.WAITING
        self._wake_s = float("-inf")
        self._attempts = 0
        self._awaited = 0  # attempt of the Connect or SetFence in flight
        self._failures = 0
        self._looks = 0  # on this connection, without an ack between
        self._late = 0  # acks that were late, without one in time between
        self._is_looking = False  # the next Connect is one, and the place is this run's as far as is known
        self._fenced_off_s = float("-inf")
        self._fencings = 0  # that followed each other closely
        self._acked_s = float("-inf")  # the last ack
        self._connected_s = 0.0
        self._first_epoch = epoch  # this run's; those before it are of the log's earlier runs
        self._has_begun = False  # a connection has said where to go on

        self._fence_sequence = 0
        self._fence_epoch = Epoch(0)  # the newest of this run that the stream has had
        self._found: Fence | None = None  # the other run's fence that the one being set replaces
        self._replaced: dict[str, int] = {}  # run → sequence of its newest fence that this run has replaced
        self._is_fence_wanted = False
        self._fence_due_s = float("inf")
        self._fence_check_s = float("inf")  # when to see whether it is still this run's
        self._max_age_s = 0.0

        self._message_limit = message_bytes  # of this connection
        self._most_in_flight = window_messages  # so too
        self._cursor = ORIGIN  # where the next message begins
        self._sent_s = float("-inf")  # when the last one was sent
        self._window: deque[_Sent] = deque()
        self._in_flight: dict[int, _Sent] = {}  # by attempt: those of the window without an ack
        self._window_used = 0
        self._due_s: float | None = (
            None  # when to look into the log; None when it holds nothing more, as far as is known
        )

        self._rival = Epoch(0)  # the epoch to surpass, in FENCED
        self._rival_fence: Fence | None = None  # in FENCED
        self._floor = ORIGIN  # before it, another run has had the place: nobody reads frames of ours from there
        self._told: tuple[Epoch, str] | None = None  # the rival that ShutOut has named
        self._rival_pulse: Heartbeat | None = None
        self._silent_from_s = 0.0
        self._is_superseding = False

    @property
    def is_fenced(self) -> bool:
        """Whether another run has the place."""
        return self._state is _State.FENCED

    @property
    def has_place(self) -> bool:
        """Whether the place is this run's, as far as this connection knows: only then may it send heartbeats."""
        is_asking = self._is_looking and self._state in (_State.WAITING, _State.CONNECTING)
        is_using = self._state in (_State.FENCING, _State.SENDING, _State.PAUSED)
        is_anothers = self._found is not None  # until the fence is moved
        return self._fence_sequence > 0 and not is_anothers and (is_using or is_asking)

    @property
    def waits_for(self) -> str:
        """What has to come before anything goes on, in words; "" while it may send."""
        match self._state:
            case _State.FENCING:
                return "its fence to be stored"
            case _State.FENCED:
                return "its place, which another process has"
            case _State.SENDING:
                return "messages to be stored" if self._in_flight else ""
            case _State.PAUSED:
                return "a refused message to be taken"
            case _:
                return "an answer of the stream"

    def has_all(self) -> bool:
        """Whether all of the log is on the stream."""
        return not self._in_flight and not self._frames.read_after(self.confirmed, 1)

    def step(self, now_s: float, happened: Input) -> list[Effect]:
        """Take one input; gives what to do about it. A time that lies before an earlier one counts as that one."""
        self._now_s = max(self._now_s, now_s)
        effects: list[Effect] = []
        match happened:
            case Connected():
                self._take_connection(happened, effects)
            case Disconnected(_, stands):
                if stands and self._is_looking and self._state is _State.CONNECTING:
                    self._look_again()
                else:
                    self._retry()
            case Appended():
                if self._due_s is None:
                    self._due_s = max(self._now_s, self._sent_s + self._linger_s)
            case Acked(attempt):
                self._take_ack(attempt)
            case FenceSet(attempt, fence):
                self._take_fence(attempt, fence)
            case Refused(attempt, _, away):
                self._take_refusal(attempt, away)
            case FencedOff(attempt):
                self._take_fencing(attempt, effects)
            case FenceRead(asked, fence):
                self._compare_fence(asked, fence, effects)
            case Begun(epoch):
                self._begin_epoch(epoch, effects)
            case RoundBegan():
                self._is_fence_wanted = True
            case Kept(max_age_s):
                self._max_age_s = max_age_s
                self._fence_due_s = min(self._fence_due_s, self._next_fence_s())
            case Pulse(heartbeat):
                self._take_pulse(heartbeat, effects)
            case Ticked():
                pass
            case _:
                assert_never(happened)
        self._advance(effects)
        return effects

    def _advance(self, effects: list[Effect]) -> None:
        match self._state:
            case _State.WAITING:
                if self._now_s >= self._wake_s:
                    self._connect(not self._is_looking, effects)
                else:
                    effects.append(WakeAt(self._wake_s))
            case _State.CONNECTING:
                pass
            case _State.FENCING:
                if self._now_s >= self._wake_s:
                    self._late += 1
                    self._look_again()
                effects.append(WakeAt(self._wake_s))
            case _State.PAUSED:
                if self._now_s >= self._wake_s:
                    self._state = _State.SENDING
                    self._send(effects)
                else:
                    effects.append(WakeAt(self._wake_s))
            case _State.SENDING:
                self._send(effects)
            case _State.FENCED:
                if self._now_s >= self._wake_s:
                    self._wake_s = self._now_s + self._heartbeat_s
                    effects.append(AskPulse())
                effects.append(WakeAt(self._wake_s))
            case _:
                assert_never(self._state)

    # -- the connection -----------------------------------------------------------------------------------------------

    def _connect(self, anew: bool, effects: list[Effect]) -> None:
        self._give_up_window()
        self._state = _State.CONNECTING
        self._awaited = self._next_attempt()
        effects.append(Connect(self._awaited, anew))

    def _take_connection(self, found: Connected, effects: list[Effect]) -> None:
        if self._state is not _State.CONNECTING or found.attempt != self._awaited:
            return
        self._connected_s = self._now_s
        self._message_limit = max(1, min(self._message_bytes, found.message_bytes))
        self._most_in_flight = min(self._window_messages, found.in_flight or self._window_messages)
        fence, tail = found.fence, found.tail
        if fence is not None and fence.run == self._run:
            self._fence_epoch = max(self._fence_epoch, fence.epoch)  # set, though the ack may not have come
        if self._is_of_another(fence, tail):
            self._yield_place(fence, tail, effects)
            return
        self._told = None
        if fence is None and tail is None:
            self._replaced.clear()  # of a stream that is gone
        others = [Epoch(0) if tail is None else tail.end.epoch]
        if fence is not None and fence.run != self._run:
            others.append(fence.epoch)
        if max(others) >= max(self._first_epoch, self._fence_epoch + 1):  # it came between this run's own
            self._floor = Position(Epoch(max(others) + 1), Offset(0))
        if fence is not None and fence.run not in (self._run, self._runs().get(fence.epoch) or fence.run):
            # two processes began that epoch, each for itself while it could not ask: the other's is on the stream
            self._floor = max(self._floor, Position(Epoch(fence.epoch + 1), Offset(0)))
        resume = min(tail) if tail is not None else ORIGIN
        if self._has_begun:
            resume = min(resume, self.published)
        self._has_begun = True
        self.confirmed = self._cursor = max(resume, self._floor)
        self.published = max(self.published, resume)
        self._due_s = self._now_s
        self._fence_sequence = fence.sequence if fence is not None else 0
        self._found = fence if fence is not None and fence.run != self._run else None
        self._set_fence(effects)
        if (
            self.epoch < self._floor.epoch
        ):  # the rival is gone, and the stream with all it had of it: readers may remember
            effects.append(Supersede(Epoch(self._floor.epoch - 1)))

    def _retry(self) -> None:
        if self._state is _State.WAITING:
            return
        if self._state is not _State.CONNECTING and self._now_s - self._connected_s >= STEADY_S:
            self._failures = 0
        self._give_up_window()
        self._is_looking = False
        self._looks = 0
        self._state = _State.WAITING
        self._wake_s = self._now_s + self._backoff_s()

    def _look_again(self) -> None:
        """The stream is late or away: see soon where it stands, by the connection there is."""
        if self._looks >= LOOKS_MOST:
            self._retry()
            return
        self._give_up_window()
        self._is_looking = True
        self._looks += 1
        self._state = _State.WAITING
        wait_s: float = min(LOOK_MOST_S, BACKOFF_FIRST_S * 2 ** min(self._looks - 1, 16))
        self._wake_s = self._now_s + wait_s * (0.5 + 0.5 * self._jitter())

    def _backoff_s(self) -> float:
        wait_s: float = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
        self._failures += 1
        return wait_s * (0.5 + 0.5 * self._jitter())

    def _next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    # -- the fence ----------------------------------------------------------------------------------------------------

    def _set_fence(self, effects: list[Effect]) -> None:
        self._state = _State.FENCING
        self._wake_s = self._now_s + self._round_trips.wait_s(self._late)
        self._awaited = self._next_attempt()
        self._is_fence_wanted = False
        effects.append(SetFence(self._awaited, self.epoch, self._run, self._fence_sequence, self._log()))

    def _log(self) -> EpochRuns:
        """The epochs that are not on the stream to their end, as far as this connection knows, and who began each."""
        known = {epoch: run for epoch, run in self._runs().items() if self.confirmed.epoch <= epoch < self._first_epoch}
        own = range(max(self._first_epoch, self.confirmed.epoch), self.epoch + 1)
        runs = known | {Epoch(epoch): self._run for epoch in own[-LOG_EPOCHS:]}
        return tuple(sorted(runs.items()))[-LOG_EPOCHS:]

    def _take_fence(self, attempt: int, fence: Fence) -> None:
        if self._state is not _State.FENCING or attempt != self._awaited:
            return
        self._is_looking = False
        self._fence_sequence = fence.sequence
        if self._found is not None:
            self._replaced[self._found.run] = max(self._found.sequence, self._replaced.get(self._found.run, 0))
            self._found = None
        self._fence_epoch = max(self._fence_epoch, fence.epoch)
        self._fence_due_s = self._next_fence_s()
        self._see_to_fence()
        self._is_fence_wanted = self._is_fence_wanted or fence.epoch < self.epoch
        self._state = _State.SENDING

    def _see_to_fence(self) -> None:
        """It was this run's a moment ago, or is being asked for: no need to look for a while."""
        self._fence_check_s = self._now_s + FENCE_CHECK_HEARTBEATS * self._heartbeat_s

    def _compare_fence(self, asked: int, fence: Fence | None, effects: list[Effect]) -> None:
        is_asked_of_now = self._state in (_State.SENDING, _State.PAUSED) and asked == self._fence_sequence
        if is_asked_of_now and (fence is None or fence.sequence != asked):
            self._connect(False, effects)

    def _next_fence_s(self) -> float:
        return self._now_s + self._max_age_s / FENCE_SHARE if self._max_age_s > 0 else float("inf")

    def _begin_epoch(self, epoch: Epoch, effects: list[Effect]) -> None:
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self._is_fence_wanted = True
        if self._state is _State.FENCED and epoch > self._rival:
            self._connect(False, effects)

    def _take_fencing(self, attempt: int, effects: list[Effect]) -> None:
        if attempt not in self._in_flight and not (self._state is _State.FENCING and attempt == self._awaited):
            return
        self._fencings = self._fencings + 1 if self._now_s - self._fenced_off_s < STEADY_S else 0
        self._fenced_off_s = self._now_s
        self._is_looking = False
        if self._failures or self._fencings > 1:
            self._failures = max(self._failures, self._fencings)  # acks between do not make it worth more haste
            self._retry()
        else:
            self._failures = 1
            self._connect(False, effects)

    def _is_of_another(self, fence: Fence | None, tail: Tail | None) -> bool:
        newest = tail.end.epoch if tail is not None else Epoch(0)
        if fence is not None and self._fence_epoch and fence.run != self._run:  # this run has had the place
            return fence.sequence > self._replaced.get(fence.run, 0) or newest > self.epoch
        if fence is not None and fence.epoch >= self.epoch:
            return fence.epoch > self.epoch or fence.run != self._run or newest > self.epoch
        # a run sends events of an epoch only once it has set a fence for it, so without that they are another's
        return newest > self.epoch or newest == self.epoch > self._fence_epoch

    def _yield_place(self, fence: Fence | None, tail: Tail | None, effects: list[Effect]) -> None:
        self._state = _State.FENCED
        self._fence_sequence = 0
        self._rival = max(
            fence.epoch if fence is not None else Epoch(0), tail.end.epoch if tail is not None else Epoch(0)
        )
        self._rival_fence = fence
        self._floor = Position(Epoch(self._rival + 1), Offset(0))
        self._is_superseding = False
        self._silent_from_s = self._now_s
        self._wake_s = self._now_s
        who = (self._rival, fence.run if fence is not None and fence.epoch == self._rival else "")
        if who != self._told:
            self._told = who
            effects.append(ShutOut(*who))

    def _take_pulse(self, heartbeat: Heartbeat | None, effects: list[Effect]) -> None:
        if self._state is not _State.FENCED:
            return
        if heartbeat is not None and heartbeat.run != self._run and heartbeat != self._rival_pulse:
            is_first = self._rival_pulse is None
            self._rival_pulse = heartbeat
            if not is_first:  # the first may be old: it is by its successors that another shows it is alive
                self._silent_from_s = self._now_s
        silent_s = self._now_s - self._silent_from_s
        if silent_s >= SILENT_HEARTBEATS * self._heartbeat_s and not self._is_superseding:
            self._is_superseding = True
            if self._rival_fence is not None:  # the next one that it sets shows it is alive
                self._replaced[self._rival_fence.run] = self._rival_fence.sequence
            effects.append(Supersede(self._rival))

    # -- messages -----------------------------------------------------------------------------------------------------

    def _take_ack(self, attempt: int) -> None:
        acked = self._in_flight.pop(attempt, None)
        if acked is None:
            return  # late: it was given up, and is sent again
        self.acks += 1
        self._round_trips.take(self._now_s - acked.sent_s)
        self._acked_s = self._now_s
        self._looks = self._late = 0
        self._see_to_fence()
        while self._window and self._window[0].attempt not in self._in_flight:
            sent = self._window.popleft()
            self._window_used -= sent.size
            self.confirmed = sent.through
            self._failures = 0
        self.published = max(self.published, self.confirmed)

    def _take_refusal(self, attempt: int, away: bool) -> None:
        is_fence = self._state is _State.FENCING and attempt == self._awaited
        if away and (is_fence or attempt in self._in_flight):
            self._look_again()
        elif is_fence:
            self._retry()
        elif attempt in self._in_flight:
            self._give_up_window()
            self._state = _State.PAUSED
            self._wake_s = self._now_s + self._backoff_s()
            self._due_s = self._wake_s

    def _give_up_window(self) -> None:
        self._window.clear()
        self._in_flight.clear()
        self._window_used = 0
        self._cursor = self.confirmed

    def _send(self, effects: list[Effect]) -> None:
        if self._in_flight and self._now_s >= self._overdue_s():
            self._late += 1
            self._look_again()
            effects.append(WakeAt(self._wake_s))
            return
        if self._now_s >= self._fence_due_s:
            self._is_fence_wanted = True
        while not self._is_fence_wanted and self._due_s is not None and self._now_s >= self._due_s:
            if self._window and (
                len(self._window) >= self._most_in_flight
                or self._window_used + self._message_limit > self._window_bytes
            ):
                break
            self._send_one(effects)
        if self._is_fence_wanted and not self._in_flight:
            self._set_fence(effects)
        if self._now_s >= self._fence_check_s:
            self._see_to_fence()
            effects.append(ReadFence(self._fence_sequence))
        waits = [self._fence_due_s, self._fence_check_s] if not self._is_fence_wanted else []
        if self._state is _State.FENCING:
            waits = [self._wake_s]
        elif self._window:
            waits.append(self._overdue_s())
        if self._due_s is not None and self._due_s > self._now_s:
            waits.append(self._due_s)
        at_s = min(waits, default=float("inf"))
        if at_s < float("inf"):
            effects.append(WakeAt(at_s))

    def _overdue_s(self) -> float:
        """When the oldest message counts as late. Acks of others show that the stream stores; so they give it time anew."""
        return max(self._window[0].sent_s, self._acked_s) + self._round_trips.wait_s(self._late)

    def _send_one(self, effects: list[Effect]) -> None:
        frames, is_cut = self._read()
        if not frames:
            self._due_s = None
            return
        if frames[0].epoch > self.epoch:
            self.epoch = frames[0].epoch
        if frames[0].epoch > self._fence_epoch:
            self._is_fence_wanted = True
            return
        self._sent_s = self._now_s
        data = b"".join([frame.data for frame in frames])
        is_more = is_cut or 2 * len(data) >= self._message_limit
        self._due_s = self._now_s if is_more else self._now_s + self._linger_s  # a little may as well wait for company
        self._cursor = Position(frames[-1].epoch, frames[-1].next_offset)
        sent = _Sent(self._next_attempt(), self._cursor, len(data), self._now_s)
        self._window.append(sent)
        self._in_flight[sent.attempt] = sent
        self._window_used += sent.size
        fence = Fence(self._fence_epoch, self._run, self._fence_sequence)
        effects.append(Publish(sent.attempt, data, sent.through, fence, self.confirmed))

    def _read(self) -> tuple[list[FrameBytes], bool]:
        """The next message's frames, consecutive ones of one epoch, so that its last header tells where it ends; is there more?"""
        found: list[FrameBytes] = []
        for frame in self._frames.read_after(self._cursor, self._message_limit):
            if found and (frame.epoch, frame.first_offset) != (found[-1].epoch, found[-1].next_offset):
                return found, True
            found.append(frame)
        return found, False


class PublisherThread:
    """Drives a `Publisher` over NATS from a daemon thread with a loop of its own, and sends heartbeats.

    The stream may be away for ever: the owner does not notice, but that `published` stands still.

    Args:
        frames: the instance's log.
        owner: called in this thread; what it raises is said once and changes nothing. It may be a `SampleSource` too.
        interval_s: between heartbeats.
        connect: (url, timeout_s) → the stream.
        window_bytes, linger_s, runs: as of `Publisher`.
    Raises: ConfigError: a name or the URL cannot be used.
    """

    def __init__(
        self,
        frames: FrameLog,
        url: str,
        cluster: str,
        instance: InstanceId,
        owner: PublisherOwner,
        interval_s: float = 1.0,
        connect: Callable[[str, float], Awaitable[EventStream]] = NatsStream.connect,
        window_bytes: int = WINDOW_BYTES,
        linger_s: float = LINGER_S,
        runs: Callable[[], Mapping[Epoch, str]] = unknown_runs,
    ) -> None:
        events_subject(cluster, instance)
        self._server = shown(url)
        self._url = url
        self._cluster = cluster
        self._instance = instance
        self._owner = owner
        self._samples = owner if isinstance(owner, SampleSource) else None
        self._interval_s = interval_s
        self._connect = connect
        self._window_bytes = window_bytes
        self._publisher = Publisher(
            frames, owner.epoch, owner.run, interval_s, window_bytes, linger_s=linger_s, runs=runs
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._is_notified = False
        self._stop_s: float | None = None
        self._published = ORIGIN
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"kvbm-publisher-{instance}", daemon=True)
        self._stream: EventStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # requests, each of them short
        self._watches: set[asyncio.Task[None]] = set()  # as long as the connection
        self._asks: asyncio.Task[None] | None = (
            None  # the watch of round requests on this connection, also when it has ended
        )
        self._wake_s = 0.0
        self._trouble = ""
        self._heartbeat_trouble = ""
        self._progress_s = time.monotonic()  # when something was stored last, or nothing was waiting
        self._progress_acks = 0
        self._stalls: set[str] = set()  # what was said of the stall that lasts
        self._why = ""
        self._said = ""
        self._warned: set[str] = set()

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def published(self) -> Position:
        """Everything before it is on the stream."""
        return self._published

    @property
    def trouble(self) -> str:
        """What the stream does not take for a while now, and why nobody reads the heartbeats, in words; "" when all is well."""
        return "; ".join(filter(None, (self._trouble, self._heartbeat_trouble)))

    def notify(self) -> None:
        """Say that the log has more. Cheap: calls until the thread looks are one."""
        if not self._is_notified:
            self._is_notified = True
            self._call(self._take_notice)

    def round_began(self) -> None:
        """Say that the owner begins to state what it holds: the fence is renewed with it."""
        self._call(lambda: self._inputs.put_nowait(RoundBegan()))

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Publish the rest if it can be done in time, send a last heartbeat, end the thread. Gives whether all is published."""
        if self._stop_s is None:
            self._stop_s = time.monotonic() + timeout_s
        self._call(lambda: self._inputs.put_nowait(Ticked()))
        if self._thread.is_alive():
            self._thread.join(timeout_s + 2.0)
        return self._has_all()

    def _call(self, function: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return  # not begun: it looks into the log when it does
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            return  # it has ended

    # -- its own thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._drive())
        except RuntimeError:
            if not self._is_over:
                raise
            # all is done; the loop wanted a thread to end its resolver's threads with, and Python 3.12 starts none while it ends

    def _take_notice(self) -> None:
        self._is_notified = False
        self._inputs.put_nowait(Appended())

    async def _drive(self) -> None:
        self._inputs = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_notified = False
        next_pulse_s = 0.0
        had_place = False
        happened: Input = Ticked()
        while True:
            self._step(happened)
            if self._owner.epoch > self._publisher.epoch:
                self._step(Begun(self._owner.epoch))
            now_s = time.monotonic()
            if self._publisher.has_place and not had_place:
                next_pulse_s = now_s  # it is back: nobody need wait to hear of it
            had_place = self._publisher.has_place
            if now_s >= next_pulse_s:
                next_pulse_s = now_s + self._interval_s
                self._watch_progress(now_s)
                await self._send_pulse(stopping=False)
                await self._send_samples()
            if self._stop_s is not None and (now_s >= self._stop_s or self._publisher.is_fenced or self._has_all()):
                break
            happened = await self._next_input(min(next_pulse_s, self._wake_s, self._stop_s or next_pulse_s))
        await self._send_samples()
        await self._send_pulse(stopping=True)
        if self._stream is not None:
            await self._stream.close()
        await self._end_tasks(self._tasks | self._watches)
        self._is_over = True

    async def _next_input(self, wake_s: float) -> Input:
        try:
            return self._inputs.get_nowait()
        except asyncio.QueueEmpty:
            pass
        try:
            async with asyncio.timeout(max(0.0, wake_s - time.monotonic())):
                return await self._inputs.get()
        except TimeoutError:
            return Ticked()

    def _has_all(self) -> bool:
        try:
            return self._publisher.has_all()
        except (OSError, KvbmError):
            return False

    def _step(self, happened: Input) -> None:
        now_s = time.monotonic()
        self._wake_s = now_s + self._interval_s
        try:
            effects = self._publisher.step(now_s, happened)
        except (OSError, KvbmError) as error:  # the log could not be read
            self._say("publisher.log_unreadable", str(error))
            effects = self._publisher.step(now_s, Disconnected(str(error)))
        if self._publisher.published != self._published:
            self._published = self._publisher.published
            self._ask_owner("on_published", lambda: self._owner.on_published(self._published))
        self._tell_state(happened)
        self._serve_asks()
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Publish():
                self._begin(self._publish(effect))
            case SetFence():
                self._begin(self._set_fence(effect))
            case Connect(attempt, anew):
                self._begin(self._reconnect(attempt, anew))
            case ReadFence(sequence):
                self._begin(self._read_fence(sequence))
            case AskPulse():
                self._begin(self._ask_pulse())
            case ShutOut(epoch, run):
                self._said = ""
                log.error(
                    "instance.fenced", server=self._server, cluster=self._cluster, instance=self._instance,
                    epoch=self._publisher.epoch, other_epoch=epoch, other_run=run,
                    why="another process has this instance's place on the stream; nothing is published from here",
                    remedy=f"stop one of the two, or give one another instance.id; once the other has been silent for "
                    f"{SILENT_HEARTBEATS} heartbeats, this one begins a later epoch",
                )  # fmt: skip
            case Supersede(epoch):
                log.info("instance.place_free", instance=self._instance, other_epoch=epoch)
                self._ask_owner("on_fenced", lambda: self._owner.on_fenced(epoch))
            case WakeAt(at_s):
                self._wake_s = at_s
            case _:
                assert_never(effect)

    def _begin(self, work: Coroutine[None, None, None], watch: bool = False) -> asyncio.Task[None]:
        tasks = self._watches if watch else self._tasks
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _end_tasks(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reconnect(self, attempt: int, anew: bool) -> None:
        stream = self._stream
        try:
            if anew or stream is None:
                self._stream = None
                if stream is not None:
                    await stream.close()
                    stream = None
                await self._end_tasks(self._watches)
                stream = await self._connect(self._url, CONNECT_WAIT_S)
                check_keeps(await stream.state(CONNECT_WAIT_S), self._window_bytes, WINDOW_MESSAGES)
            wait_s = CONNECT_WAIT_S if anew else PROBE_WAIT_S
            fence = await stream.fence(self._cluster, self._instance, wait_s)
            tail = await self._tail(stream, wait_s)
        except AwayError as error:
            await self._fail_connection(stream, str(error), stands=stream is not None and stream is self._stream)
        except StreamError as error:
            await self._fail_connection(stream, str(error))
        except Exception as error:  # whatever it was, without a word of it the publisher would wait for ever
            log.exception("publisher.connect_failed", server=self._server, instance=self._instance)
            await self._fail_connection(stream, f"{type(error).__name__}: {error}")
        else:
            if stream is not self._stream:
                self._stream = stream
                self._begin(self._follow_state(stream), watch=True)
                self._asks = None
            self._inputs.put_nowait(Connected(attempt, fence, tail, stream.max_message_bytes, stream.most_in_flight))

    async def _fail_connection(self, stream: EventStream | None, why: str, stands: bool = False) -> None:
        if stream is not None and stream is not self._stream:
            await stream.close()
        self._inputs.put_nowait(Disconnected(why, stands and stream is not None and stream.is_connected))

    async def _tail(self, stream: EventStream, wait_s: float) -> Tail | None:
        try:
            return await stream.tail(self._cluster, self._instance, wait_s)
        except UnreadableError as error:
            self._warn_once("publisher.foreign_message", why=str(error), remedy="all that the log has is sent again")
            return Tail(ORIGIN, ORIGIN)

    async def _publish(self, message: Publish) -> None:
        stream = self._stream
        if stream is None:
            return  # a new connection is being made; it learns what to send
        work = stream.publish(self._cluster, self._instance, message.data, 2 * ACK_WAIT_S, message.fence, message.safe)
        if await self._outcome(stream, message.attempt, work) is not None:
            self._inputs.put_nowait(Acked(message.attempt))

    async def _set_fence(self, wanted: SetFence) -> None:
        stream = self._stream
        if stream is None:
            return
        work = stream.set_fence(
            self._cluster, self._instance, wanted.epoch, wanted.run, wanted.expected, 2 * ACK_WAIT_S, wanted.log
        )
        fence = await self._outcome(stream, wanted.attempt, work)
        if fence is not None:
            self._inputs.put_nowait(FenceSet(wanted.attempt, fence))

    async def _outcome(self, stream: EventStream, attempt: int, work: Awaitable[T]) -> T | None:
        try:
            return await work
        except FencedError as error:
            self._inputs.put_nowait(FencedOff(attempt, str(error)))
        except StreamError as error:
            if stream.is_connected:
                self._inputs.put_nowait(Refused(attempt, str(error), isinstance(error, AwayError)))
            elif stream is self._stream:
                self._inputs.put_nowait(Disconnected(str(error)))
        except Exception as error:  # whatever it was, the publisher waits for a word
            log.exception("publisher.send_failed", server=self._server, instance=self._instance)
            self._inputs.put_nowait(Refused(attempt, f"{type(error).__name__}: {error}"))
        return None

    async def _read_fence(self, asked: int) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            fence = await stream.fence(self._cluster, self._instance, CONNECT_WAIT_S)
        except StreamError as error:
            if not stream.is_connected and stream is self._stream:
                self._inputs.put_nowait(Disconnected(str(error)))
        else:
            self._inputs.put_nowait(FenceRead(asked, fence))

    async def _ask_pulse(self) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            heartbeat = await stream.last_pulse(self._cluster, self._instance, CONNECT_WAIT_S)
        except StreamError as error:
            if stream is self._stream:
                self._inputs.put_nowait(Disconnected(str(error)))
        else:
            self._inputs.put_nowait(Pulse(heartbeat))

    async def _follow_state(self, stream: EventStream) -> None:
        while True:
            try:
                state = await stream.state(CONNECT_WAIT_S)
            except StreamError as error:
                self._warn_once("publisher.state_unknown", why=str(error))
            else:
                self._inputs.put_nowait(Kept(state.max_age_s))
                self._ask_owner("on_stream_state", lambda: self._owner.on_stream_state(state))  # noqa: B023 - called now
            await asyncio.sleep(STATE_EVERY_S)

    def _serve_asks(self) -> None:
        """Listen for round requests while the place is ours: another's are not ours to answer."""
        if self._publisher.is_fenced and self._asks is not None:
            self._asks.cancel()
            self._asks = None
        elif self._publisher.has_place and self._asks is None and self._stream is not None:
            self._asks = self._begin(self._follow_asks(self._stream), watch=True)

    async def _follow_asks(self, stream: EventStream) -> None:
        try:
            async for notice in stream.watch_round_asks(self._cluster, self._instance):
                if notice is None:
                    self._ask_owner("on_round_asked", self._owner.on_round_asked)
                elif notice.run == self._owner.run:
                    self._warn_once("instance.ignored", why=notice.why)
        except StreamError as error:
            self._warn_once(
                "publisher.asks_unheard", why=str(error), remedy="readers that miss events wait for its own rounds"
            )
        else:
            if stream is self._stream:  # it is the first to know when nothing else is under way
                self._inputs.put_nowait(Disconnected("the connection is lost"))

    async def _send_pulse(self, stopping: bool) -> None:
        stream = self._stream
        if stream is None or not self._publisher.has_place:
            return
        heartbeat = self._ask_owner("heartbeat", lambda: self._owner.heartbeat(self._publisher.confirmed))
        why, is_sendable = "the manager fails to make it", False
        if heartbeat is not None:
            data, why = encoded_heartbeat(heartbeat)
            is_sendable = bool(data)  # the catalog says then what it refuses
        self._tell_heartbeat(why)
        if heartbeat is None or not is_sendable:
            return
        try:
            await stream.send_pulse(msgspec.structs.replace(heartbeat, stopping=stopping or heartbeat.stopping))
        except StreamError as error:
            self._take_word_refused(stream, "publisher.pulse_refused", error)

    def _tell_heartbeat(self, why: str) -> None:
        """Say, once for as long as it lasts, that no reader can read the heartbeats: the catalog would only see silence."""
        is_new = bool(why) and not self._heartbeat_trouble
        self._heartbeat_trouble = (
            f"heartbeat: it cannot be read ({why}); the catalog leaves this instance out of answers until it can"
            if why
            else ""
        )
        if is_new:
            log.warning(
                "heartbeat.unreadable", server=self._server, instance=self._instance, why=why,
                remedy="the catalog leaves this instance out of answers; correct what the engine reports, or report the bug",
            )  # fmt: skip

    async def _send_samples(self) -> None:
        stream, source = self._stream, self._samples
        if stream is None or source is None:
            return
        try:
            for sample in self._ask_owner("take_samples", source.take_samples) or ():
                await stream.send_sample(sample)
        except StreamError as error:
            self._take_word_refused(stream, "publisher.sample_refused", error)

    def _take_word_refused(self, stream: EventStream, what: str, error: StreamError) -> None:
        if stream.is_connected:
            self._warn_once(what, why=str(error))
        elif stream is self._stream:
            self._inputs.put_nowait(Disconnected(str(error)))

    def _ask_owner(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - an owner's fault must not end what carries its events
            self._warn_once(f"publisher.owner_failed.{what}", why=f"{type(error).__name__}: {error}")
            return None

    # -- words, once per change ---------------------------------------------------------------------------------------

    def _tell_state(self, happened: Input) -> None:
        match happened:
            case FenceSet() if self._said != "publisher.refused":
                self._say("publisher.connected", "")
            case Acked() if self._said == "publisher.refused":
                self._say("publisher.connected", "")
            case Disconnected(reason, stands):
                self._why = reason
                if not stands:
                    self._say("publisher.disconnected", reason)
            case Refused(_, reason, away):
                self._why = reason
                if not away:
                    self._say("publisher.refused", reason)

    def _watch_progress(self, now_s: float) -> None:
        """Say what is waited for, once for each thing, when nothing was stored for a while though there is something to store."""
        confirmed, acks = self._publisher.confirmed, self._publisher.acks
        if acks != self._progress_acks or self._has_all():
            self._progress_acks, self._progress_s = acks, now_s
            if self._stalls:
                log.info(
                    "publisher.goes_on", server=self._server, instance=self._instance, epoch=confirmed.epoch,
                    offset=confirmed.offset,
                )  # fmt: skip
            self._stalls.clear()
            self._trouble = ""
            return
        waited_s = now_s - self._progress_s
        if waited_s < STALLED_S:
            return
        waits_for = self._publisher.waits_for or "its turn"
        self._trouble = f"stream: it waits for {waits_for}; nothing is published after offset {confirmed.offset} of epoch {confirmed.epoch}"
        if waits_for not in self._stalls:
            self._stalls.add(waits_for)
            log.warning(
                "publisher.stalled", server=self._server, instance=self._instance, waits_for=waits_for,
                waited_s=round(waited_s, 1), epoch=confirmed.epoch, offset=confirmed.offset, why=self._why,
                remedy="look whether the server's disk is full, and whether its cluster has a leader of stream KVBM",
            )  # fmt: skip

    def _say(self, what: str, why: str) -> None:
        if what == self._said:
            return
        self._said = what
        if why:
            log.warning(what, server=self._server, instance=self._instance, why=why)
        else:
            log.info(
                what,
                server=self._server,
                instance=self._instance,
                epoch=self._published.epoch,
                offset=self._published.offset,
            )

    def _warn_once(self, what: str, **fields: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning(what, server=self._server, instance=self._instance, **fields)
