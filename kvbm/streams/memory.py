"""Streams in memory: for tests, and for instances without durable tiers."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import LedgerError, StreamError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.streams.base import (
    EVENTS_PREFIX,
    PULSE_PREFIX,
    Heartbeat,
    Position,
    StreamMessage,
    cluster_filter,
    end_of_message,
    events_subject,
    pulse_subject,
)

FETCH_MESSAGES = 2000


class MemoryLog:
    """A `FrameLog` that dies with its process. Any thread may call it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._frames: list[FrameBytes] = []
        self._ends: list[Position] = []

    def append(self, frame: FrameBytes) -> None:
        """Add the next frame. Raises LedgerError: it begins before the last one ends."""
        with self._guard:
            if self._ends and Position(frame.epoch, frame.first_offset) < self._ends[-1]:
                raise LedgerError(
                    f"a frame from offset {frame.first_offset} of epoch {frame.epoch} after one that ends at "
                    f"offset {self._ends[-1].offset} of epoch {self._ends[-1].epoch}"
                )
            self._frames.append(frame)
            self._ends.append(Position(frame.epoch, frame.next_offset))

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """See `FrameLog.read_after`."""
        found: list[FrameBytes] = []
        room = limit_bytes
        with self._guard:
            for at in range(bisect_right(self._ends, position), len(self._frames)):
                frame = self._frames[at]
                if found and len(frame.data) > room:
                    break
                found.append(frame)
                room -= len(frame.data)
        return found

    def drop_before(self, position: Position) -> int:
        """Forget frames that end at or before a position, which must be published. Returns how many went."""
        with self._guard:
            gone = bisect_right(self._ends, position)
            del self._frames[:gone], self._ends[:gone]
        return gone

    def drop_epochs_before(self, epoch: Epoch) -> int:
        """Forget older epochs, which must be published. Returns how many frames went."""
        with self._guard:
            gone = sum(frame.epoch < epoch for frame in self._frames)
            del self._frames[:gone], self._ends[:gone]
        return gone


class MemoryStream:
    """An `EventStream` in one process and one asyncio loop; nothing is ever lost or slow."""

    def __init__(self) -> None:
        self.messages: list[StreamMessage] = []
        self._pulses: dict[str, Heartbeat] = {}
        self._pulse_count = 0
        self._pulse_numbers: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """See `EventStream.is_connected`."""
        return not self._is_closed

    async def publish(self, cluster: str, instance: InstanceId, data: bytes, timeout_s: float = 5.0) -> int:
        """See `EventStream.publish`."""
        subject = events_subject(cluster, instance)
        async with self._changed:
            self._check_open()
            self.messages.append(StreamMessage(len(self.messages) + 1, subject, data))
            self._changed.notify_all()
            return len(self.messages)

    async def last_position(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Position | None:
        """See `EventStream.last_position`."""
        self._check_open()
        subject = events_subject(cluster, instance)
        for message in reversed(self.messages):
            if message.subject == subject:
                return end_of_message(message.data, f"message {message.sequence} of {subject}")
        return None

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventStream.first_sequence`."""
        self._check_open()
        return 1

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventStream.last_sequence`."""
        self._check_open()
        return len(self.messages)

    async def pull(self, after_sequence: int = 0, cluster: str | None = None, timeout_s: float = 5.0) -> MemoryReader:
        """See `EventStream.pull`."""
        self._check_open()
        return MemoryReader(self, cluster_filter(EVENTS_PREFIX, cluster).removesuffix(">"), after_sequence)

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """See `EventStream.send_pulse`."""
        subject = pulse_subject(heartbeat.cluster, heartbeat.instance)
        async with self._changed:
            self._check_open()
            self._pulse_count += 1
            self._pulses[subject] = heartbeat
            self._pulse_numbers[subject] = self._pulse_count
            self._changed.notify_all()

    async def watch_pulses(self, cluster: str | None = None) -> AsyncIterator[Heartbeat]:
        """See `EventStream.watch_pulses`."""
        prefix = cluster_filter(PULSE_PREFIX, cluster).removesuffix(">")
        seen = 0
        while not self._is_closed:
            newer = sorted(
                (at, name) for name, at in self._pulse_numbers.items() if at > seen and name.startswith(prefix)
            )
            seen = self._pulse_count
            for heartbeat in [self._pulses[name] for _, name in newer]:
                yield heartbeat
            async with self._changed:
                while self._pulse_count == seen and not self._is_closed:
                    await self._wait(1.0)

    async def close(self) -> None:
        """See `EventStream.close`."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    async def wait_longer_than(self, count: int, timeout_s: float) -> None:
        """Wait until there are more messages than `count`, or time is up. Raises StreamError: it is closed."""
        deadline_s = time.monotonic() + timeout_s
        async with self._changed:
            while len(self.messages) <= count and time.monotonic() < deadline_s:
                self._check_open()
                await self._wait(deadline_s - time.monotonic())
        self._check_open()

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamError("the stream in memory is closed")


class MemoryReader:
    """An `EventReader` of a `MemoryStream`."""

    def __init__(self, stream: MemoryStream, prefix: str, after_sequence: int) -> None:
        self._stream = stream
        self._prefix = prefix
        self._after = after_sequence if after_sequence <= len(stream.messages) else 0
        self._is_closed = False

    @property
    def at_end(self) -> bool:
        """See `EventReader.at_end`."""
        return not self._following(1)

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """See `EventReader.fetch`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._is_closed:
                raise StreamError("the reader is closed")
            count = len(self._stream.messages)
            found = self._following(FETCH_MESSAGES)
            if found:
                self._after = found[-1].sequence
                return found
            if time.monotonic() >= deadline_s:
                return []
            await self._stream.wait_longer_than(count, deadline_s - time.monotonic())

    def _following(self, limit: int) -> list[StreamMessage]:
        rest = itertools.islice(self._stream.messages, self._after, None)
        return list(itertools.islice((message for message in rest if message.subject.startswith(self._prefix)), limit))

    async def close(self) -> None:
        """See `EventReader.close`."""
        self._is_closed = True


class DiscardingSink:
    """Takes frames and keeps none: the journal of an instance whose events nobody reads and nothing survives."""

    def append(self, frame: FrameBytes) -> None:
        """Forget the frame."""
