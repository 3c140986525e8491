"""Carries out a publisher's effects on the stream, each in a task of its own, and answers with inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple, TypeVar

from kvbm.core.errors import FencedError, StreamError
from kvbm.core.ids import InstanceId
from kvbm.streams.base import (
    ORIGIN,
    AccessSample,
    AwayError,
    EventStream,
    Heartbeat,
    Tail,
    UnreadableError,
)
from kvbm.streams.publisher.machine import ACK_WAIT_S, WINDOW_MESSAGES, check_keeps
from kvbm.streams.publisher.messages import (
    Acked,
    AskPulse,
    Connect,
    Connected,
    Disconnected,
    FencedOff,
    FenceRead,
    FenceSet,
    Input,
    Publish,
    Pulse,
    ReadFence,
    Refused,
    SetFence,
    StreamRetention,
)
from kvbm.streams.publisher.owner import OwnerCalls
from kvbm.streams.publisher.reports import CONNECTING, FENCING, SENDING, PublisherReports

T = TypeVar("T")

CONNECT_WAIT_S = 5.0
PROBE_WAIT_S = 1.0  # for each answer of a look
STATE_EVERY_S = 60.0
ASKS_AGAIN_S = 1.0  # after the watch of snapshot requests has failed in an unforeseen way

OpenStream = Callable[[str, float], Awaitable[EventStream]]  # (url, timeout_s) → the stream


class PublisherTarget(NamedTuple):
    """Where a publisher's messages go.

    Attributes:
        window_bytes: sent and not acknowledged, at most; the stream must keep more.
    """

    url: str
    cluster: str
    instance: InstanceId
    window_bytes: int


class StreamRequests:
    """A publisher's connection, and what is under way on it. Belongs to one asyncio loop.

    Args:
        answer: takes what has happened.
    """

    def __init__(
        self,
        target: PublisherTarget,
        connect: OpenStream,
        owner: OwnerCalls,
        run: str,
        reports: PublisherReports,
        answer: Callable[[Input], None],
    ) -> None:
        self._target = target
        self._cluster = target.cluster
        self._instance = target.instance
        self._connect = connect
        self._owner = owner
        self._run = run
        self._reports = reports
        self._answer = answer
        self._stream: EventStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # requests, each of them short
        self._watches: set[asyncio.Task[None]] = set()  # as long as the connection
        self._asks: asyncio.Task[None] | None = None  # the watch of snapshot requests here, also when it has ended

    @property
    def has_stream(self) -> bool:
        """Whether a connection was made, and none is being made in its place."""
        return self._stream is not None

    def begin(self, effect: Connect | Publish | SetFence | ReadFence | AskPulse) -> None:
        """Carry out an effect. Messages go out in the order of these calls."""
        match effect:
            case Publish():
                self._begin(self._publish(effect), self._tasks)
            case SetFence():
                self._begin(self._set_fence(effect), self._tasks)
            case Connect(attempt, anew):
                self._begin(self._reconnect(attempt, anew), self._tasks)
            case ReadFence(sequence):
                self._begin(self._read_fence(sequence), self._tasks)
            case AskPulse():
                self._begin(self._ask_pulse(), self._tasks)

    def listen(self, is_owner: bool, is_fenced: bool) -> None:
        """Listen for snapshot requests while this run owns the instance: another's are not ours to answer."""
        if is_fenced and self._asks is not None:
            self._asks.cancel()
            self._asks = None
        elif is_owner and self._asks is None and self._stream is not None:
            self._asks = self._begin(self._follow_asks(self._stream), self._watches)

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Replace the instance's last heartbeat on the stream."""
        stream = self._stream
        if stream is None:
            return
        try:
            await stream.send_pulse(heartbeat)
        except StreamError as error:
            if stream.is_connected:
                self._reports.pulse_refused(str(error))
            elif stream is self._stream:
                self._answer(Disconnected(str(error)))
        except Exception as error:  # noqa: BLE001 - as a refusal: the next may go out
            self._reports.pulse_refused(self._reports.fault("publisher.pulse_failed", error))
        else:
            self._reports.pulse_refused("")

    async def send_samples(self, samples: list[AccessSample]) -> None:
        """Send samples to whoever listens."""
        stream = self._stream
        if stream is None:
            return
        try:
            for sample in samples:
                await stream.send_sample(sample)
        except StreamError as error:
            if stream.is_connected:
                self._reports.warn_once("publisher.sample_refused", why=str(error))
            elif stream is self._stream:
                self._answer(Disconnected(str(error)))
        except Exception as error:  # noqa: BLE001 - they are samples
            self._reports.fault("publisher.sample_failed", error)

    async def close(self) -> None:
        """End what is under way, and the connection; none of it raises. Another connection may be made then."""
        stream, self._stream = self._stream, None
        await _end(self._tasks | self._watches)  # what is being connected closes itself
        self._asks = None
        await self._close(stream)

    async def _close(self, stream: EventStream | None) -> None:
        if stream is not None:
            try:
                await stream.close()
            except Exception as error:  # noqa: BLE001 - nobody uses it any more
                self._reports.fault("publisher.close_failed", error)

    def _begin(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(lambda ended: self._note_end(ended, tasks))
        return task

    def _note_end(self, ended: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
        tasks.discard(ended)
        if not ended.cancelled() and (error := ended.exception()) is not None:
            self._reports.fault("publisher.request_failed", error)  # what it asked is asked again

    # -- the connection ------------------------------------------------------------------------------------------------

    async def _reconnect(self, attempt: int, anew: bool) -> None:
        stream = self._stream
        try:
            if anew or stream is None:
                old, stream, self._stream = stream, None, None
                await self._close(old)
                await _end(self._watches)
                stream = await self._connect(self._target.url, CONNECT_WAIT_S)
                check_keeps(await stream.state(CONNECT_WAIT_S), self._target.window_bytes, WINDOW_MESSAGES)
            wait_s = CONNECT_WAIT_S if anew else PROBE_WAIT_S
            fence = await stream.fence(self._cluster, self._instance, wait_s)
            tail = await self._tail(stream, wait_s)
        except AwayError as error:
            await self._fail_connection(stream, str(error), stands=stream is not None and stream is self._stream)
        except StreamError as error:
            await self._fail_connection(stream, str(error))
        except Exception as error:  # noqa: BLE001 - without an answer the publisher would wait for ever
            await self._fail_connection(stream, self._reports.bug("publisher.connect_failed", CONNECTING, error))
        except asyncio.CancelledError:
            if stream is not self._stream:
                await self._close(stream)
            raise
        else:
            if stream is not self._stream:
                self._stream = stream
                self._begin(self._follow_state(stream), self._watches)
                self._asks = None
            self._answer(Connected(attempt, fence, tail, stream.max_message_bytes, stream.most_in_flight))

    async def _fail_connection(self, stream: EventStream | None, why: str, stands: bool = False) -> None:
        if stream is not self._stream:
            await self._close(stream)
        self._answer(Disconnected(why, stands and stream is not None and stream.is_connected))

    async def _tail(self, stream: EventStream, wait_s: float) -> Tail | None:
        try:
            return await stream.tail(self._cluster, self._instance, wait_s)
        except UnreadableError as error:
            self._reports.warn_once(
                "publisher.foreign_message", why=str(error), remedy="all that the log has is sent again"
            )
            return Tail(ORIGIN, ORIGIN)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _publish(self, message: Publish) -> None:
        stream = self._stream
        if stream is None:
            return  # a new connection is being made; it learns what to send
        work = stream.publish(self._cluster, self._instance, message.data, 2 * ACK_WAIT_S, message.fence, message.acked)
        if await self._outcome(stream, message.attempt, SENDING, work) is not None:
            self._answer(Acked(message.attempt))

    async def _set_fence(self, wanted: SetFence) -> None:
        stream = self._stream
        if stream is None:
            return
        work = stream.set_fence(
            self._cluster, self._instance, wanted.epoch, wanted.run, wanted.expected, 2 * ACK_WAIT_S, wanted.log
        )
        fence = await self._outcome(stream, wanted.attempt, FENCING, work)
        if fence is not None:
            self._answer(FenceSet(wanted.attempt, fence))

    async def _outcome(self, stream: EventStream, attempt: int, what: str, work: Awaitable[T]) -> T | None:
        try:
            return await work
        except FencedError as error:
            self._answer(FencedOff(attempt, str(error)))
        except StreamError as error:
            if stream.is_connected:
                self._answer(Refused(attempt, str(error), isinstance(error, AwayError)))
            elif stream is self._stream:
                self._answer(Disconnected(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it was, the publisher waits for an answer
            self._answer(Refused(attempt, self._reports.bug("publisher.send_failed", what, error)))
        return None

    async def _read_fence(self, asked: int) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            fence = await stream.fence(self._cluster, self._instance, CONNECT_WAIT_S)
        except StreamError as error:
            if not stream.is_connected and stream is self._stream:
                self._answer(Disconnected(str(error)))
        else:
            self._answer(FenceRead(asked, fence))

    async def _ask_pulse(self) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            heartbeat = await stream.last_pulse(self._cluster, self._instance, CONNECT_WAIT_S)
        except StreamError as error:
            if stream is self._stream:
                self._answer(Disconnected(str(error)))
        else:
            self._answer(Pulse(heartbeat))

    # -- as long as the connection -------------------------------------------------------------------------------------

    async def _follow_state(self, stream: EventStream) -> None:
        while True:
            try:
                state = await stream.state(CONNECT_WAIT_S)
            except StreamError as error:
                self._reports.warn_once("publisher.state_unknown", why=str(error))
            except Exception as error:  # noqa: BLE001 - it is asked again
                self._reports.fault("publisher.state_failed", error)
            else:
                self._answer(StreamRetention(state.max_age_s))
                self._owner.on_stream_state(state)
            await asyncio.sleep(STATE_EVERY_S)

    async def _follow_asks(self, stream: EventStream) -> None:
        while True:
            try:
                await self._take_asks(stream)
                break
            except StreamError as error:
                self._reports.warn_once(
                    "publisher.asks_unheard",
                    why=str(error),
                    remedy="readers that miss events wait for its own snapshots",
                )
                return
            except Exception as error:  # noqa: BLE001 - it is listened to again
                self._reports.fault("publisher.asks_failed", error)
                await asyncio.sleep(ASKS_AGAIN_S)
        if stream is self._stream:  # it is the first to know when nothing else is under way
            self._answer(Disconnected("the connection is lost"))

    async def _take_asks(self, stream: EventStream) -> None:
        """Take snapshot requests until the connection is lost."""
        async for notice in stream.watch_snapshot_asks(self._cluster, self._instance):
            if notice is None:
                self._owner.on_snapshot_asked()
            elif notice.run == self._run:
                self._reports.warn_once("instance.ignored", why=notice.why)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tuple(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
