"""Runs a `Publisher` in a thread of its own: brings it what has happened, and has done what it decides."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from kvbm.core.errors import KvbmError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.safe_log import SafeLog
from kvbm.streams.base import (
    ORIGIN,
    AccessSample,
    FrameLog,
    Position,
    PublisherOwner,
    events_subject,
)
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher.machine import LINGER_S, WINDOW_BYTES, Publisher, PublisherOptions
from kvbm.streams.publisher.messages import (
    Appended,
    AskPulse,
    Connect,
    Disconnected,
    Effect,
    EpochBegun,
    Input,
    Publish,
    PublisherTicked,
    PublisherWakeAt,
    ReadFence,
    ReportFenced,
    SetFence,
    SnapshotBegan,
    TakeOver,
)
from kvbm.streams.publisher.owner import OwnerCalls
from kvbm.streams.publisher.ownership import unknown_runs
from kvbm.streams.publisher.reports import RUNNING, PublisherReports
from kvbm.streams.publisher.requests import OpenStream, PublisherTarget, StreamRequests
from kvbm.streams.pulse_words import encoded_heartbeat

log = SafeLog()

_AGAIN_S = 1.0  # after there was no loop to be had, or a turn has failed


class PublisherThread:
    """Drives a `Publisher` over NATS from a daemon thread with a loop of its own, and sends heartbeats.

    The stream may be away for ever: the owner does not notice, but that `published` stands still. Whatever a turn
    raises is logged, is `trouble`, and ends nothing but the connection: what is not known to be stored is sent again on
    the next.

    Args:
        frames: the instance's log.
        owner: called in this thread; what it raises is logged and changes nothing.
        interval_s: between heartbeats.
        connect: (url, timeout_s) → the stream.
        window_bytes, linger_s: as of `PublisherOptions`. runs: as of `Publisher`.
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
        connect: OpenStream = NatsStream.connect,
        window_bytes: int = WINDOW_BYTES,
        linger_s: float = LINGER_S,
        runs: Callable[[], Mapping[Epoch, str]] = unknown_runs,
    ) -> None:
        events_subject(cluster, instance)
        self._owner = owner
        self._interval_s = interval_s
        options = PublisherOptions(interval_s, window_bytes, linger_s=linger_s)
        self._publisher = Publisher(frames, owner.epoch, owner.run, options, runs=runs)
        self._reports = PublisherReports(shown(url), cluster, instance)
        self._calls = OwnerCalls(owner, cluster, instance, self._reports)
        target = PublisherTarget(url, cluster, instance, window_bytes)
        self._requests = StreamRequests(target, connect, self._calls, owner.run, self._reports, self._take)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._is_notified = False
        self._stop_s: float | None = None
        self._published = ORIGIN
        self._is_over = False
        self._was_owner = False
        self._next_heartbeat_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvbm-publisher-{instance}", daemon=True)
        self._wake_s = 0.0

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
        """See `PublisherReports.trouble`."""
        return self._reports.trouble

    @property
    def place(self) -> str:
        """See `PublisherReports.place`."""
        return self._reports.place

    def notify(self) -> None:
        """Say that the log has more. Cheap: calls until the thread looks are one."""
        if not self._is_notified:
            self._is_notified = True
            self._call(self._take_notice)

    def snapshot_began(self) -> None:
        """Say that the owner begins to state what it holds: the fence is renewed with it."""
        self._call(lambda: self._take(SnapshotBegan()))

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Publish the rest if it can be done in time, send a last heartbeat, end the thread.

        Gives whether all is published.
        """
        stop_s = time.monotonic() + timeout_s
        self._stop_s = stop_s if self._stop_s is None else min(self._stop_s, stop_s)
        self._call(lambda: self._take(PublisherTicked()))
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
        while True:
            try:
                with asyncio.Runner() as runner:
                    runner.run(self._drive())
                return
            except Exception as error:  # noqa: BLE001 - an instance without it would leave routing without a word
                if self._is_over:
                    # The loop wanted a thread to end its resolver's threads with, and Python 3.12 starts none while it
                    # ends
                    return
                # There is no loop, for want of descriptors say, and nothing has begun.
                log.warning("publisher.not_begun", why=str(error), remedy="raise ulimit -n; it is tried again")
                time.sleep(_AGAIN_S)
                if self._is_late():
                    return

    def _take_notice(self) -> None:
        self._is_notified = False
        self._take(Appended())

    def _take(self, happened: Input) -> None:
        self._inputs.put_nowait(happened)

    async def _drive(self) -> None:
        self._inputs = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_notified = False
        try:
            happened: Input = PublisherTicked()
            while True:
                try:
                    await self._turn(happened)
                    if self._is_late() or (self._stop_s is not None and (self._publisher.is_fenced or self._has_all())):
                        break
                    wake_s = min(self._next_heartbeat_s, self._wake_s)
                    happened = await self._next_input(wake_s if self._stop_s is None else min(wake_s, self._stop_s))
                except Exception as error:  # noqa: BLE001 - see the class
                    happened = Disconnected(self._reports.bug("publisher.turn_failed", RUNNING, error))
                    await self._requests.close()
                    await asyncio.sleep(_AGAIN_S)
                    if self._is_late():
                        break
            await self._requests.send_samples(self._samples())
            await self._send_heartbeat(stopping=True)
        except Exception as error:  # noqa: BLE001 - it ends all the same
            self._reports.fault("publisher.end_failed", error)
        await self._requests.close()
        self._is_over = True

    def _is_late(self) -> bool:
        return self._stop_s is not None and time.monotonic() >= self._stop_s

    async def _turn(self, happened: Input) -> None:
        self._step(happened)
        if self._owner.epoch > self._publisher.epoch:
            self._step(EpochBegun(self._owner.epoch))
        now_s = time.monotonic()
        if self._publisher.is_owner and not self._was_owner:
            self._next_heartbeat_s = now_s  # it is back: nobody need wait to hear of it
        self._was_owner = self._publisher.is_owner
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + self._interval_s
            self._watch_progress(now_s)
            await self._send_heartbeat(stopping=False)
            await self._requests.send_samples(self._samples())

    async def _next_input(self, wake_s: float) -> Input:
        try:
            return self._inputs.get_nowait()
        except asyncio.QueueEmpty:
            pass
        try:
            async with asyncio.timeout(max(0.0, wake_s - time.monotonic())):
                return await self._inputs.get()
        except TimeoutError:
            return PublisherTicked()

    def _has_all(self) -> bool:
        try:
            return self._publisher.has_all()
        except (OSError, KvbmError):
            return False

    def _step(self, happened: Input) -> None:
        now_s = time.monotonic()
        self._wake_s = now_s + self._interval_s
        publisher = self._publisher
        try:
            effects = publisher.step(now_s, happened)
        except (OSError, KvbmError) as error:  # the log could not be read
            self._reports.connection("publisher.log_unreadable", str(error), self._published)
            effects = publisher.step(now_s, Disconnected(str(error)))
        if publisher.published != self._published:
            self._published = publisher.published
            self._calls.on_published(self._published)
        self._reports.take(happened, self._published)
        self._requests.listen(publisher.is_owner, publisher.is_fenced)
        if publisher.is_owner:
            self._reports.is_owned()
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Publish() | SetFence() | Connect() | ReadFence() | AskPulse():
                self._requests.begin(effect)
            case ReportFenced():
                self._reports.fenced(effect, self._publisher.epoch)
            case TakeOver(epoch):
                self._reports.took_over(epoch)
                self._calls.on_fenced(epoch)
            case PublisherWakeAt(at_s):
                self._wake_s = at_s
            case _:
                assert_never(effect)

    def _watch_progress(self, now_s: float) -> None:
        publisher = self._publisher
        self._reports.progress(now_s, publisher.confirmed, publisher.acks, publisher.waits_for, self._has_all)

    async def _send_heartbeat(self, stopping: bool) -> None:
        if not (self._requests.has_stream and self._publisher.is_owner):
            return
        if not stopping and self._calls.is_silent():
            return
        heartbeat, failure = self._calls.heartbeat(self._publisher.confirmed)
        data, unreadable = encoded_heartbeat(heartbeat)
        self._reports.heartbeat(unreadable, failure)
        if data:  # one that cannot be read goes out too: the catalog says then what it refuses
            last = msgspec.structs.replace(heartbeat, stopping=stopping or heartbeat.stopping)
            await self._requests.send_heartbeat(last)

    def _samples(self) -> list[AccessSample]:
        return self._calls.take_samples() if self._requests.has_stream else []
