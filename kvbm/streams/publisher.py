"""Carries an instance's frames from its log to the stream: `Publisher` decides, `PublisherThread` does."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from typing import NamedTuple, assert_never

import msgspec
import structlog

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import EventStream, FrameLog, Heartbeat, Position, events_subject
from kvbm.streams.nats import NatsStream, shown

log = structlog.get_logger()

ORIGIN = Position(Epoch(0), Offset(0))
MESSAGE_BYTES = 256 << 10
LINGER_S = 0.002
ACK_WAIT_S = 5.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 5.0
STEADY_S = 10.0  # a connection that lasted this long clears the count of failures
CONNECT_WAIT_S = 5.0


class Connected(NamedTuple):
    """A connection stands, and the stream's last message of this instance ends at `position`."""

    position: Position | None


class Disconnected(NamedTuple):
    """The connection is lost, or could not be made."""

    reason: str


class Appended(NamedTuple):
    """The log may have more."""


class Acked(NamedTuple):
    """The stream holds everything up to here."""

    through: Position


class Refused(NamedTuple):
    """The stream did not take a message."""

    reason: str


class Ticked(NamedTuple):
    """Time has passed."""


Input = Connected | Disconnected | Appended | Acked | Refused | Ticked


class Publish(NamedTuple):
    """Send one message. Answer with Acked(through), Refused or Disconnected.

    Attributes:
        data: whole frames of one epoch.
    """

    data: bytes
    through: Position


class Connect(NamedTuple):
    """Drop the connection, if there is one, and make a new one. Answer with Connected or Disconnected."""


class WakeAt(NamedTuple):
    """Step with Ticked at this time, if nothing comes before."""

    at_s: float


Effect = Publish | Connect | WakeAt


class _State(Enum):
    WAITING = auto()  # until `_wake_s`, then connect
    CONNECTING = auto()
    READY = auto()
    SENDING = auto()  # one message is in flight, until `_wake_s`


class Publisher:
    """Decides what to send when: a state machine without thread, clock or socket.

    WAITING → CONNECTING → READY ⇄ SENDING, and from each back to WAITING when something fails. Whatever fails ends in a new
    connection, which learns from the stream where to go on; so nothing is left out, and a message whose ack was lost is not
    sent twice, or if it is, harmlessly. Positions are ordered, so what an old epoch left comes first.

    Args:
        linger_s: how long a frame may wait for others to share its message.
        jitter: gives numbers in [0, 1) that spread the retries of many instances.
    """

    def __init__(
        self,
        frames: FrameLog,
        message_bytes: int = MESSAGE_BYTES,
        linger_s: float = LINGER_S,
        ack_wait_s: float = ACK_WAIT_S,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.published = ORIGIN  # grows only by the stream's own word
        self._frames = frames
        self._message_bytes = message_bytes
        self._linger_s = linger_s
        self._ack_wait_s = ack_wait_s
        self._jitter = jitter
        self._state = _State.WAITING
        self._wake_s = float("-inf")
        self._connected_s = 0.0
        self._failures = 0
        self._cursor = ORIGIN  # everything before it is on the stream of this connection
        self._sent = ORIGIN  # where the message in flight ends
        self._due_s: float | None = (
            None  # when to look into the log; None when it holds nothing more, as far as is known
        )

    def step(self, now_s: float, happened: Input) -> list[Effect]:
        """Take one input; gives what to do about it. A time that lies before an earlier one counts as that one."""
        match happened:
            case Connected(position):
                return self._begin(now_s, position)
            case Disconnected():
                return self._retry(now_s)
            case Refused():
                return self._retry(now_s) if self._state is _State.SENDING else []
            case Acked(through):
                return self._take_ack(now_s, through)
            case Appended():
                if self._due_s is None:
                    self._due_s = now_s + self._linger_s
                return self._send(now_s)
            case Ticked():
                return self._tick(now_s)
            case _:
                assert_never(happened)

    def _tick(self, now_s: float) -> list[Effect]:
        match self._state:
            case _State.WAITING:
                if now_s < self._wake_s:
                    return [WakeAt(self._wake_s)]
                self._state = _State.CONNECTING
                return [Connect()]
            case _State.SENDING:
                return self._retry(now_s) if now_s >= self._wake_s else [WakeAt(self._wake_s)]
            case _State.READY:
                return self._send(now_s)
            case _State.CONNECTING:
                return []
            case _:
                assert_never(self._state)

    def _begin(self, now_s: float, position: Position | None) -> list[Effect]:
        if self._state is not _State.CONNECTING:
            return []
        self._cursor = position or ORIGIN  # may lie before `published`: then the stream has lost its end, or aged
        self.published = max(self.published, self._cursor)
        self._connected_s = now_s
        self._state = _State.READY
        self._due_s = now_s
        return self._send(now_s)

    def _take_ack(self, now_s: float, through: Position) -> list[Effect]:
        self.published = max(self.published, through)
        if self._state is not _State.SENDING or through < self._sent:
            return []  # late: its message was given up, or sent again as part of a larger one
        self._cursor = self._sent
        self._state = _State.READY
        self._failures = 0
        if self._due_s is None:
            self._due_s = now_s  # the last read may have ended for its size
        return self._send(now_s)

    def _send(self, now_s: float) -> list[Effect]:
        if self._state is not _State.READY or self._due_s is None:
            return []
        if now_s < self._due_s:
            return [WakeAt(self._due_s)]
        frames = self._read()
        if not frames:
            self._due_s = None
            return []
        size = sum(len(frame.data) for frame in frames)
        self._due_s = now_s if 2 * size >= self._message_bytes else None
        self._sent = Position(frames[-1].epoch, frames[-1].next_offset)
        self._state = _State.SENDING
        self._wake_s = now_s + self._ack_wait_s
        return [Publish(b"".join(frame.data for frame in frames), self._sent), WakeAt(self._wake_s)]

    def _read(self) -> list[FrameBytes]:
        """The next message's frames: consecutive ones of one epoch, so that its last header tells where it ends."""
        found: list[FrameBytes] = []
        for frame in self._frames.read_after(self._cursor, self._message_bytes):
            if found and (frame.epoch, frame.first_offset) != (found[-1].epoch, found[-1].next_offset):
                break
            found.append(frame)
        return found

    def _retry(self, now_s: float) -> list[Effect]:
        if self._state is not _State.WAITING:
            if self._state is not _State.CONNECTING and now_s - self._connected_s >= STEADY_S:
                self._failures = 0
            wait_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
            self._failures += 1
            self._state = _State.WAITING
            self._wake_s = now_s + wait_s * (0.5 + 0.5 * self._jitter())
        return [WakeAt(self._wake_s)]


class PublisherThread:
    """Drives a `Publisher` over NATS from a daemon thread with a loop of its own, and sends heartbeats.

    The stream may be away for ever: the owner does not notice, but that `published` stands still.

    Args:
        frames: the instance's log.
        heartbeat: makes the heartbeat from the published position; called in this thread, must not block.
        interval_s: between heartbeats.
        connect: (url, timeout_s) → the stream.
    Raises: ConfigError: a name or the URL cannot be used.
    """

    def __init__(
        self,
        frames: FrameLog,
        url: str,
        cluster: str,
        instance: InstanceId,
        heartbeat: Callable[[Position], Heartbeat],
        interval_s: float = 1.0,
        connect: Callable[[str, float], Awaitable[EventStream]] = NatsStream.connect,
    ) -> None:
        events_subject(cluster, instance)
        self._server = shown(url)
        self._url = url
        self._cluster = cluster
        self._instance = instance
        self._heartbeat = heartbeat
        self._interval_s = interval_s
        self._connect = connect
        self._frames = frames
        self._publisher = Publisher(frames)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._is_notified = False
        self._stop_s: float | None = None
        self._progress = threading.Condition()
        self._published = ORIGIN
        self._thread = threading.Thread(target=self._run, name=f"kvbm-publisher-{instance}", daemon=True)
        self._stream: EventStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake_s = 0.0
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

    def notify(self) -> None:
        """Say that the log has more. Cheap: calls until the thread looks are one."""
        if not self._is_notified:
            self._is_notified = True
            self._call(self._take_notice)

    def wait_published(self, position: Position, timeout_s: float) -> bool:
        """Wait until everything before a position is on the stream; gives whether it is."""
        with self._progress:
            return self._progress.wait_for(lambda: self._published >= position, timeout_s)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Publish the rest if it can be done in time, send a last heartbeat, end the thread. Gives whether all is published."""
        if self._stop_s is None:
            self._stop_s = time.monotonic() + timeout_s
        self._call(lambda: self._inputs.put_nowait(Appended()))
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
        asyncio.run(self._drive())

    def _take_notice(self) -> None:
        self._is_notified = False
        self._inputs.put_nowait(Appended())

    async def _drive(self) -> None:
        self._inputs = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_notified = False
        next_pulse_s = 0.0
        happened: Input = Ticked()
        while True:
            self._step(happened)
            now_s = time.monotonic()
            if now_s >= next_pulse_s:
                next_pulse_s = now_s + self._interval_s
                await self._send_pulse(stopping=False)
            if self._stop_s is not None and (now_s >= self._stop_s or self._has_all()):
                break
            wake_s = min(next_pulse_s, self._wake_s, self._stop_s if self._stop_s is not None else next_pulse_s)
            try:
                async with asyncio.timeout(max(0.0, wake_s - time.monotonic())):
                    happened = await self._inputs.get()
            except TimeoutError:
                happened = Ticked()
        await self._send_pulse(stopping=True)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()

    def _has_all(self) -> bool:
        try:
            return not self._frames.read_after(self._published, 1)
        except OSError:
            return False

    def _step(self, happened: Input) -> None:
        now_s = time.monotonic()
        self._wake_s = now_s + self._interval_s
        try:
            effects = self._publisher.step(now_s, happened)
        except OSError as error:  # the log could not be read
            self._say("publisher.log_unreadable", str(error))
            effects = self._publisher.step(now_s, Disconnected(str(error)))
        if self._publisher.published != self._published:
            with self._progress:
                self._published = self._publisher.published
                self._progress.notify_all()
        self._tell_state(happened)
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Publish():
                self._begin_task(self._publish(effect))
            case Connect():
                self._begin_task(self._reconnect())
            case WakeAt(at_s):
                self._wake_s = at_s
            case _:
                assert_never(effect)

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reconnect(self) -> None:
        old, self._stream = self._stream, None
        if old is not None:
            await old.close()
        stream: EventStream | None = None
        try:
            stream = await self._connect(self._url, CONNECT_WAIT_S)
            tail = await stream.tail(self._cluster, self._instance, CONNECT_WAIT_S)
        except StreamError as error:
            if stream is not None:
                await stream.close()
            self._inputs.put_nowait(Disconnected(str(error)))
        except Exception as error:  # whatever it was, without a word of it the publisher would wait for ever
            log.exception("publisher.connect_failed", server=self._server, instance=self._instance)
            if stream is not None:
                await stream.close()
            self._inputs.put_nowait(Disconnected(f"{type(error).__name__}: {error}"))
        else:
            self._stream = stream
            self._inputs.put_nowait(Connected(tail.end if tail else None))

    async def _publish(self, message: Publish) -> None:
        stream = self._stream
        if stream is None:
            return  # a new connection is being made; it learns what to send
        try:
            await stream.publish(self._cluster, self._instance, message.data, ACK_WAIT_S)
        except StreamError as error:
            if stream is self._stream:
                self._inputs.put_nowait(Refused(str(error)) if stream.is_connected else Disconnected(str(error)))
        else:
            self._inputs.put_nowait(Acked(message.through))

    async def _send_pulse(self, stopping: bool) -> None:
        heartbeat = self._heartbeat(self._published)
        if heartbeat.epoch < self._published.epoch:
            self._warn_once(
                "publisher.epoch_behind", epoch=heartbeat.epoch, epoch_on_stream=self._published.epoch,
                remedy="another instance has this name, or the journal was lost: begin a newer epoch",
            )  # fmt: skip
        stream = self._stream
        if stream is None:
            return
        try:
            await stream.send_pulse(msgspec.structs.replace(heartbeat, stopping=stopping or heartbeat.stopping))
        except StreamError as error:
            if stream.is_connected:
                self._warn_once("publisher.pulse_refused", why=str(error))
            elif stream is self._stream:
                self._inputs.put_nowait(Disconnected(str(error)))

    # -- words, once per change ---------------------------------------------------------------------------------------

    def _tell_state(self, happened: Input) -> None:
        match happened:
            case Connected() if self._said != "publisher.refused":
                self._say("publisher.connected", "")
            case Acked() if self._said == "publisher.refused":
                self._say("publisher.connected", "")
            case Disconnected(reason):
                self._say("publisher.disconnected", reason)
            case Refused(reason):
                self._say("publisher.refused", reason)

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
