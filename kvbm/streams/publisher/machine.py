"""Decides when to send which of an instance's frames to the stream. `PublisherThread` does what is decided."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import NamedTuple, assert_never

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import StreamError
from kvbm.core.ids import Epoch
from kvbm.streams.base import ORIGIN, Fence, FrameLog, Heartbeat, Position, StreamState
from kvbm.streams.publisher.messages import (
    Acked,
    Appended,
    AskPulse,
    Connect,
    Connected,
    Disconnected,
    Effect,
    EpochBegun,
    FencedOff,
    FenceRead,
    FenceSet,
    Input,
    Publish,
    PublisherTicked,
    PublisherWakeAt,
    Pulse,
    ReadFence,
    Refused,
    ReportFenced,
    SetFence,
    SnapshotBegan,
    StreamRetention,
    TakeOver,
)
from kvbm.streams.publisher.ownership import Ownership, unknown_runs
from kvbm.streams.publisher.window import SendWindow, Sent

MESSAGE_BYTES = 256 << 10
WINDOW_BYTES = 4 << 20
WINDOW_MESSAGES = 512
LINGER_S = 0.002
ACK_WAIT_S = 5.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 2.0
LOOK_MOST_S = 0.5  # between two looks whether a stream that is away is back: a new leader is there within seconds
LOOKS_MOST = 8  # then by another connection: perhaps it is this server that hears nothing
WINDOWS_KEPT = 2  # so many windows a stream must keep, or an instance's own messages push out its fence
STEADY_S = 10.0  # a connection that lasted this long clears the count of failures
SILENT_HEARTBEATS = 3  # another run must be silent for so long before this one takes over
FENCE_CHECK_HEARTBEATS = 10  # so often an instance that has nothing to publish looks whether it still owns its events
FENCE_SHARE = 4  # a fence is moved at least so often in the time the stream keeps a message


class PublisherOptions(NamedTuple):
    """How a publisher sends.

    Attributes:
        heartbeat_s: between two heartbeats of an instance.
        window_bytes, window_messages: sent and not acknowledged, at most; one message may always be.
        message_bytes: a message's frames, at most, unless one frame is larger.
        linger_s: a message follows another at the earliest after this time, unless it is full; so frames share one.
        ack_wait_s: the longest wait for an acknowledgement.
    """

    heartbeat_s: float = 1.0
    window_bytes: int = WINDOW_BYTES
    window_messages: int = WINDOW_MESSAGES
    message_bytes: int = MESSAGE_BYTES
    linger_s: float = LINGER_S
    ack_wait_s: float = ACK_WAIT_S


def check_keeps(state: StreamState, window_bytes: int, window_messages: int) -> None:
    """Raises StreamError: the stream keeps so little that an instance's own messages may push out its fence."""
    for key, most, window in (
        ("max_bytes", state.max_bytes, window_bytes),
        ("max_msgs", state.max_messages, window_messages),
    ):
        if 0 < most < WINDOWS_KEPT * window:
            least = WINDOWS_KEPT * window
            raise StreamError(
                f"stream KVBM keeps {key}={most}, and an instance may have {window} on the way: its own messages push "
                "out its "
                f"fence, and nothing more is taken; give the stream at least {least} (nats stream edit KVBM "
                f"--{key.replace('_', '-')}={least})"
            )


class _State(Enum):
    WAITING = auto()  # until `_wake_s`, then connect
    CONNECTING = auto()
    FENCING = auto()  # nothing is in flight but a fence, until `_wake_s`
    SENDING = auto()
    PAUSED = auto()  # until `_wake_s`, then SENDING: a message was refused
    FENCED = auto()  # another run owns the instance; its heartbeat is asked for at `_wake_s`


class Publisher:
    """Decides what to send when: a state machine without thread, clock or socket.

        WAITING → CONNECTING → FENCING ⇄ SENDING ⇄ PAUSED        each → WAITING when the connection fails
                             ↘ FENCED → CONNECTING               SENDING, FENCING → CONNECTING when the fence is another

    Go-back-N: messages follow each other without waiting, and when one is not stored, everything from it on is sent
        again. So
    the stream may hold 0 1 3 4 2 3 4; a reader that puts frames aside loses nothing. Each message says before which
    position all was acknowledged. A new connection goes on there, because what follows may have holes, and the end of
    the stream does not show them. The stream's word is believed even when it is less than what was acknowledged once:
    then it has lost its end, or is another one, and gets again what the log still has.

    An acknowledgement that is late, or the word that the stream is away, costs no connection: fence and end are asked
    for again on the one that stands, soon and often, because a cluster's stream has a new leader within seconds. How
    long an acknowledgement may take follows from how long they took.

    Every connection, snapshot and epoch sets a fence, alone in flight. Behind it no message that an earlier fence let
    pass can be stored. Where another process owns the instance (`Ownership`), this one is quiet, and takes over with a
    later epoch only once no new heartbeat of the other has come for three heartbeats' time.

    Args:
        epoch: the manager's; `EpochBegun` says when it grows. A frame of a later one says so too.
        run: of this process.
        jitter: gives numbers in [0, 1) that spread the retries of many instances.
        runs: which processes began the log's epochs, as far as it knows.

    Attributes:
        published: the stream has held everything before it; only grows.
        confirmed: the stream holds everything before it, as far as this connection knows.
        epoch: the manager's.
        acks: messages of this run that were stored, as far as is known.
    """

    def __init__(
        self,
        frames: FrameLog,
        epoch: Epoch,
        run: str,
        options: PublisherOptions = PublisherOptions(),  # noqa: B008 - immutable
        jitter: Callable[[], float] = random.random,
        runs: Callable[[], Mapping[Epoch, str]] = unknown_runs,
    ) -> None:
        self.published = ORIGIN
        self.confirmed = ORIGIN
        self.epoch = epoch
        self.acks = 0
        self._frames = frames
        self._run = run
        self._heartbeat_s = options.heartbeat_s
        self._window_bytes = options.window_bytes
        self._window_messages = options.window_messages
        self._message_bytes = min(options.message_bytes, max(1, options.window_bytes // 4))
        self._linger_s = options.linger_s
        self._jitter = jitter
        self._ownership = Ownership(run, epoch, runs)

        self._now_s = float("-inf")
        self._state = _State.WAITING
        self._wake_s = float("-inf")
        self._attempts = 0
        self._awaited = 0  # attempt of the Connect or SetFence in flight
        self._failures = 0
        self._looks = 0  # on this connection, without an ack between
        self._is_looking = False  # the next Connect is one, and this run owns the instance as far as is known
        self._fenced_off_s = float("-inf")
        self._fencings = 0  # that followed each other closely
        self._connected_s = 0.0
        self._has_begun = False  # a connection has said where to go on

        self._is_fence_wanted = False
        self._fence_due_s = float("inf")
        self._fence_check_s = float("inf")  # when to see whether it is still this run's
        self._max_age_s = 0.0

        self._message_limit = options.message_bytes  # of this connection
        self._most_in_flight = options.window_messages  # so too
        self._cursor = ORIGIN  # where the next message begins
        self._sent_s = float("-inf")  # when the last one was sent
        self._window = SendWindow(options.ack_wait_s)
        self._due_s: float | None = None  # when to look into the log; None: it holds nothing more, as far as is known

    @property
    def is_fenced(self) -> bool:
        """Whether another run owns the instance."""
        return self._state is _State.FENCED

    @property
    def is_owner(self) -> bool:
        """Whether this run owns the instance, as far as this connection knows: only then may it send heartbeats."""
        is_asking = self._is_looking and self._state in (_State.WAITING, _State.CONNECTING)
        is_using = self._state in (_State.FENCING, _State.SENDING, _State.PAUSED)
        return self._ownership.has_fence and (is_using or is_asking)

    @property
    def waits_for(self) -> str:
        """What has to come before anything goes on, in words; "" while it may send."""
        match self._state:
            case _State.FENCING:
                return "its fence to be stored"
            case _State.FENCED:
                return "its place, which another process has"
            case _State.SENDING:
                return "messages to be stored" if self._window else ""
            case _State.PAUSED:
                return "a refused message to be taken"
            case _:
                return "an answer of the stream"

    def has_all(self) -> bool:
        """Whether all of the log is on the stream."""
        return not self._window and not self._frames.read_after(self.confirmed, 1)

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
            case EpochBegun(epoch):
                self._begin_epoch(epoch, effects)
            case SnapshotBegan():
                self._is_fence_wanted = True
            case StreamRetention(max_age_s):
                self._max_age_s = max_age_s
                self._fence_due_s = min(self._fence_due_s, self._next_fence_s())
            case Pulse(heartbeat):
                self._take_heartbeat(heartbeat, effects)
            case PublisherTicked():
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
                    effects.append(PublisherWakeAt(self._wake_s))
            case _State.CONNECTING:
                pass
            case _State.FENCING:
                if self._now_s >= self._wake_s:
                    self._window.count_late()
                    self._look_again()
                effects.append(PublisherWakeAt(self._wake_s))
            case _State.PAUSED:
                if self._now_s >= self._wake_s:
                    self._state = _State.SENDING
                    self._send(effects)
                else:
                    effects.append(PublisherWakeAt(self._wake_s))
            case _State.SENDING:
                self._send(effects)
            case _State.FENCED:
                if self._now_s >= self._wake_s:
                    self._wake_s = self._now_s + self._heartbeat_s
                    effects.append(AskPulse())
                effects.append(PublisherWakeAt(self._wake_s))
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
        self._ownership.take_found(fence)
        if self._ownership.is_anothers(fence, tail, self.epoch):
            self._state = _State.FENCED
            self._wake_s = self._now_s
            other = self._ownership.lose(fence, tail, self._now_s)
            if other is not None:
                effects.append(ReportFenced(*other))
            return
        self._ownership.claim(fence, tail)
        resume = min(tail) if tail is not None else ORIGIN
        if self._has_begun:
            resume = min(resume, self.published)
        self._has_begun = True
        self.confirmed = self._cursor = max(resume, self._ownership.minimum)
        self.published = max(self.published, resume)
        self._due_s = self._now_s
        self._set_fence(effects)
        lowest = self._ownership.minimum.epoch
        if self.epoch < lowest:  # the other run is gone, and the stream with all it had of it: readers may remember
            effects.append(TakeOver(Epoch(lowest - 1)))

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
        self._wake_s = self._now_s + self._window.wait_s()
        self._awaited = self._next_attempt()
        self._is_fence_wanted = False
        epochs = self._ownership.epochs_after(self.confirmed, self.epoch)
        effects.append(SetFence(self._awaited, self.epoch, self._run, self._ownership.fence_sequence, epochs))

    def _take_fence(self, attempt: int, fence: Fence) -> None:
        if self._state is not _State.FENCING or attempt != self._awaited:
            return
        self._is_looking = False
        self._ownership.fence_stored(fence)
        self._fence_due_s = self._next_fence_s()
        self._see_to_fence()
        self._is_fence_wanted = self._is_fence_wanted or fence.epoch < self.epoch
        self._state = _State.SENDING

    def _see_to_fence(self) -> None:
        """It was this run's a moment ago, or is being asked for: no need to look for a while."""
        self._fence_check_s = self._now_s + FENCE_CHECK_HEARTBEATS * self._heartbeat_s

    def _compare_fence(self, asked: int, fence: Fence | None, effects: list[Effect]) -> None:
        is_asked_of_now = self._state in (_State.SENDING, _State.PAUSED) and asked == self._ownership.fence_sequence
        if is_asked_of_now and (fence is None or fence.sequence != asked):
            self._connect(False, effects)

    def _next_fence_s(self) -> float:
        return self._now_s + self._max_age_s / FENCE_SHARE if self._max_age_s > 0 else float("inf")

    def _begin_epoch(self, epoch: Epoch, effects: list[Effect]) -> None:
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self._is_fence_wanted = True
        if self._state is _State.FENCED and epoch > self._ownership.other_epoch:
            self._connect(False, effects)

    def _take_fencing(self, attempt: int, effects: list[Effect]) -> None:
        if attempt not in self._window and not (self._state is _State.FENCING and attempt == self._awaited):
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

    def _take_heartbeat(self, heartbeat: Heartbeat | None, effects: list[Effect]) -> None:
        silence_s = SILENT_HEARTBEATS * self._heartbeat_s
        if self._state is _State.FENCED and self._ownership.take_heartbeat(heartbeat, self._now_s, silence_s):
            effects.append(TakeOver(self._ownership.other_epoch))

    # -- messages -----------------------------------------------------------------------------------------------------

    def _take_ack(self, attempt: int) -> None:
        if not self._window.take_ack(attempt, self._now_s):
            return
        self.acks += 1
        self._looks = 0
        self._see_to_fence()
        whole = self._window.take_whole()
        if whole is not None:
            self.confirmed = whole
            self._failures = 0
        self.published = max(self.published, self.confirmed)

    def _take_refusal(self, attempt: int, away: bool) -> None:
        is_fence = self._state is _State.FENCING and attempt == self._awaited
        if away and (is_fence or attempt in self._window):
            self._look_again()
        elif is_fence:
            self._retry()
        elif attempt in self._window:
            self._give_up_window()
            self._state = _State.PAUSED
            self._wake_s = self._now_s + self._backoff_s()
            self._due_s = self._wake_s

    def _give_up_window(self) -> None:
        self._window.clear()
        self._cursor = self.confirmed

    def _send(self, effects: list[Effect]) -> None:
        if self._window and self._now_s >= self._window.overdue_s():
            self._window.count_late()
            self._look_again()
            effects.append(PublisherWakeAt(self._wake_s))
            return
        if self._now_s >= self._fence_due_s:
            self._is_fence_wanted = True
        while not self._is_fence_wanted and self._due_s is not None and self._now_s >= self._due_s:
            if self._window and (
                len(self._window) >= self._most_in_flight
                or self._window.used_bytes + self._message_limit > self._window_bytes
            ):
                break
            self._send_one(effects)
        if self._is_fence_wanted and not self._window:
            self._set_fence(effects)
        if self._now_s >= self._fence_check_s:
            self._see_to_fence()
            effects.append(ReadFence(self._ownership.fence_sequence))
        waits = [self._fence_due_s, self._fence_check_s] if not self._is_fence_wanted else []
        if self._state is _State.FENCING:
            waits = [self._wake_s]
        elif self._window:
            waits.append(self._window.overdue_s())
        if self._due_s is not None and self._due_s > self._now_s:
            waits.append(self._due_s)
        at_s = min(waits, default=float("inf"))
        if at_s < float("inf"):
            effects.append(PublisherWakeAt(at_s))

    def _send_one(self, effects: list[Effect]) -> None:
        frames, is_cut = self._read()
        if not frames:
            self._due_s = None
            return
        if frames[0].epoch > self.epoch:
            self.epoch = frames[0].epoch
        if frames[0].epoch > self._ownership.fence_epoch:
            self._is_fence_wanted = True
            return
        self._sent_s = self._now_s
        data = b"".join([frame.data for frame in frames])
        is_more = is_cut or 2 * len(data) >= self._message_limit
        self._due_s = self._now_s if is_more else self._now_s + self._linger_s  # a little may as well wait for company
        self._cursor = Position(frames[-1].epoch, frames[-1].next_offset)
        sent = Sent(self._next_attempt(), self._cursor, len(data), self._now_s)
        self._window.add(sent)
        effects.append(Publish(sent.attempt, data, sent.through, self._ownership.fence(), self.confirmed))

    def _read(self) -> tuple[list[FrameBytes], bool]:
        """The next message's frames, consecutive ones of one epoch, so that its last header tells where it ends; is
        there more?
        """
        found: list[FrameBytes] = []
        for frame in self._frames.read_after(self._cursor, self._message_limit):
            if found and (frame.epoch, frame.first_offset) != (found[-1].epoch, found[-1].next_offset):
                return found, True
            found.append(frame)
        return found, False
