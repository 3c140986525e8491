"""Streams in memory: for tests, and for instances without durable tiers."""

from __future__ import annotations

import asyncio
import threading
import uuid
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import FencedError, LedgerError, StreamError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.core.parts import ALL_PARTS
from kvbm.streams.base import (
    ASKS_KEPT,
    ORIGIN,
    PULSE_PREFIX,
    ROUTES_KEPT,
    ROUTES_PREFIX,
    SAMPLES_KEPT,
    SAMPLES_PREFIX,
    SNAPSHOTS_PREFIX,
    START,
    AccessSample,
    EpochRuns,
    Fence,
    Heartbeat,
    Mark,
    Notice,
    Position,
    RoutesMessage,
    StreamMessage,
    StreamState,
    Tail,
    cluster_filter,
    end_of_message,
    events_subject,
    fence_data,
    fence_of,
    fence_subject,
    instance_subject,
    mark_of,
    part_filters,
    pulse_subject,
    read_subjects,
)

FETCH_MESSAGES = 2000
MAX_MESSAGE_BYTES = 8 << 20


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


class MemoryStream:
    """An `EventStream` in one process and one asyncio loop; nothing is ever lost or slow.

    It keeps the time of its loop, which need not be the clock's.

    Attributes:
        messages: events and fences, oldest first.
        connections: how often a reader would have had to make one.
    """

    def __init__(self) -> None:
        self.messages: list[StreamMessage] = []
        self.connections = 1
        self._last_sequence = 0
        self._last_of: dict[str, StreamMessage] = {}  # subject → its last message
        self._acked: dict[int, Position] = {}  # sequence of a message of events → what it says was acknowledged
        self._created = f"memory-{uuid.uuid4().hex}"
        self._pulses: dict[str, Heartbeat] = {}
        self._pulse_count = 0
        self._pulse_numbers: dict[str, int] = {}
        self._listeners: list[tuple[str, deque[object]]] = []  # subject or what it begins with, what came
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """See `EventStream.is_connected`."""
        return not self._is_closed

    @property
    def max_message_bytes(self) -> int:
        """See `EventLog.max_message_bytes`."""
        return MAX_MESSAGE_BYTES

    @property
    def end(self) -> int:
        """The sequence of the newest message; 0 before the first."""
        return self._last_sequence

    # -- events -------------------------------------------------------------------------------------------------------

    @property
    def most_in_flight(self) -> int:
        """See `EventLog.most_in_flight`."""
        return 0

    async def publish(
        self,
        cluster: str,
        instance: InstanceId,
        data: bytes,
        timeout_s: float = 5.0,
        fence: Fence | None = None,
        acked: Position = ORIGIN,
    ) -> int:
        """See `EventLog.publish`."""
        subject = events_subject(cluster, instance)
        self._check_open()
        if fence is not None:
            self._check_fence(cluster, instance, fence.sequence)
            fence = fence._replace(log=())
        self._acked[self._last_sequence + 1] = acked
        return self._store(subject, data, fence)

    async def tail(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Tail | None:
        """See `EventLog.tail`."""
        self._check_open()
        message = self._last_of.get(events_subject(cluster, instance))
        if message is None:
            return None
        end = end_of_message(message.data, instance, f"message {message.sequence} of {message.subject}")
        return Tail(end, self._acked[message.sequence])

    async def fence(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Fence | None:
        """See `EventLog.fence`."""
        self._check_open()
        message = self._last_of.get(fence_subject(cluster, instance))
        if message is None:
            return None
        return fence_of(message.data, message.sequence, f"message {message.sequence} of {message.subject}")

    async def set_fence(
        self,
        cluster: str,
        instance: InstanceId,
        epoch: Epoch,
        run: str,
        expected: int,
        timeout_s: float = 5.0,
        epochs: EpochRuns = (),
    ) -> Fence:
        """See `EventLog.set_fence`."""
        self._check_open()
        self._check_fence(cluster, instance, expected)
        sequence = self._store(fence_subject(cluster, instance), fence_data(epoch, run, epochs))
        return Fence(epoch, run, sequence, epochs)

    def _check_fence(self, cluster: str, instance: InstanceId, expected: int) -> None:
        subject = fence_subject(cluster, instance)
        last = self._last_of.get(subject)
        found = last.sequence if last is not None else 0
        if found != expected:
            raise FencedError(
                f"the fence of {subject} is at {found}, not {expected}: another has moved it, or it has aged out"
            )

    def _store(self, subject: str, data: bytes, fence: Fence | None = None) -> int:
        self._last_sequence += 1
        stored_ns = int(asyncio.get_running_loop().time() * 1e9)
        message = StreamMessage(self._last_sequence, subject, data, stored_ns, fence)
        self.messages.append(message)
        self._last_of[subject] = message
        self._wake()
        return message.sequence

    async def state(self, timeout_s: float = 5.0) -> StreamState:
        """See `EventLog.state`."""
        size = sum(len(message.data) for message in self.messages)
        return StreamState(await self.first_sequence(), self._last_sequence, size, -1, 0.0, self._created)

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventLog.first_sequence`."""
        self._check_open()
        return self.messages[0].sequence if self.messages else self._last_sequence + 1

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventLog.last_sequence`."""
        self._check_open()
        return self._last_sequence

    async def message(self, sequence: int, timeout_s: float = 5.0) -> StreamMessage | None:
        """See `EventLog.message`."""
        self._check_open()
        return self.held(sequence)

    def held(self, sequence: int) -> StreamMessage | None:
        """The message at a sequence, if there is one."""
        at = bisect_left(self.messages, sequence, key=lambda message: message.sequence)
        found = self.messages[at] if at < len(self.messages) else None
        return found if found is not None and found.sequence == sequence else None

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> MemoryEventReader:
        """See `EventLog.pull`."""
        self._check_open()
        prefixes = tuple(subjects.removesuffix(">") for subjects in read_subjects(cluster, parts))
        return MemoryEventReader(self, prefixes, Mark(after_sequence, fingerprint))

    def forget(self, sequences: Iterable[int]) -> None:
        """Lose messages, as a server that trims by age or loses its disk does. The sequences of others stay."""
        gone = set(sequences)
        self.messages = [message for message in self.messages if message.sequence not in gone]
        self._last_of = {message.subject: message for message in self.messages}

    def lose_end(self, after: int) -> None:
        """Lose what comes after a sequence, as a server does whose power is cut: others get those sequences, readers
        connect anew.
        """
        self.messages = [message for message in self.messages if message.sequence <= after]
        self._last_of = {message.subject: message for message in self.messages}
        self._last_sequence = min(after, self._last_sequence)
        self.connections += 1
        self._wake()

    # -- pulses -------------------------------------------------------------------------------------------------------

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """See `Heartbeats.send_pulse`."""
        subject = pulse_subject(heartbeat.cluster, heartbeat.instance)
        self._check_open()
        self._pulse_count += 1
        self._pulses[subject] = heartbeat
        self._pulse_numbers[subject] = self._pulse_count
        self._wake()

    async def last_pulse(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Heartbeat | None:
        """See `Heartbeats.last_pulse`."""
        self._check_open()
        return self._pulses.get(pulse_subject(cluster, instance))

    async def watch_pulses(
        self, cluster: str | None = None, parts: tuple[int, ...] = ALL_PARTS
    ) -> AsyncIterator[Heartbeat]:
        """See `Heartbeats.watch_pulses`."""
        prefixes = tuple(subjects.removesuffix(">") for subjects in part_filters(PULSE_PREFIX, cluster, parts))
        seen = 0
        while not self._is_closed:
            newer = sorted(
                (at, name) for name, at in self._pulse_numbers.items() if at > seen and name.startswith(prefixes)
            )
            seen = self._pulse_count
            for heartbeat in [self._pulses[name] for _, name in newer]:
                yield heartbeat
            while self._pulse_count == seen and not self._is_closed:
                await self.wait(None)

    # -- what nobody keeps ---------------------------------------------------------------------------------------------

    async def ask_snapshot(self, cluster: str, instance: InstanceId, timeout_s: float = 1.0) -> bool:
        """See `Broadcast.ask_snapshot`."""
        self._check_open()
        return self._send(instance_subject(SNAPSHOTS_PREFIX, cluster, instance), None)

    async def send_notice(self, notice: Notice) -> None:
        """See `Broadcast.send_notice`."""
        self._check_open()
        self._send(instance_subject(SNAPSHOTS_PREFIX, notice.cluster, notice.instance), notice)

    async def watch_snapshot_asks(self, cluster: str, instance: InstanceId) -> AsyncIterator[Notice | None]:
        """See `Broadcast.watch_snapshot_asks`."""
        async for item in self._listen(instance_subject(SNAPSHOTS_PREFIX, cluster, instance), ASKS_KEPT):
            yield item if isinstance(item, Notice) else None

    async def send_sample(self, sample: AccessSample) -> None:
        """See `Broadcast.send_sample`."""
        self._check_open()
        self._send(instance_subject(SAMPLES_PREFIX, sample.cluster, sample.instance), sample)

    async def watch_samples(self, cluster: str | None = None) -> AsyncIterator[AccessSample]:
        """See `Broadcast.watch_samples`."""
        async for sample in self._listen(cluster_filter(SAMPLES_PREFIX, cluster), SAMPLES_KEPT):
            assert isinstance(sample, AccessSample)
            yield sample

    async def send_routes(self, cluster: str, catalog: InstanceId, data: bytes) -> None:
        """See `Broadcast.send_routes`."""
        self._check_open()
        self._send(instance_subject(ROUTES_PREFIX, cluster, catalog), RoutesMessage(catalog, data))

    async def watch_routes(self, cluster: str) -> AsyncIterator[RoutesMessage]:
        """See `Broadcast.watch_routes`."""
        async for message in self._listen(cluster_filter(ROUTES_PREFIX, cluster), ROUTES_KEPT):
            assert isinstance(message, RoutesMessage)
            yield message

    def _send(self, subject: str, item: object) -> bool:
        is_heard = False
        for wanted, items in self._listeners:
            if subject == wanted or (wanted.endswith(">") and subject.startswith(wanted[:-1])):
                items.append(item)
                is_heard = True
        self._wake()
        return is_heard

    async def _listen(self, subject: str, kept: int) -> AsyncIterator[object]:
        items: deque[object] = deque(maxlen=kept)
        listener = (subject, items)
        self._listeners.append(listener)
        try:
            while not self._is_closed:
                while items:
                    yield items.popleft()
                if not self._is_closed:
                    await self.wait(None)
        finally:
            self._listeners.remove(listener)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See `EventStream.close`."""
        self._is_closed = True
        self._wake()

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until anything happens, or time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamError("the stream in memory is closed")


class MemoryEventReader:
    """An `EventReader` of a `MemoryStream`."""

    def __init__(self, stream: MemoryStream, prefixes: tuple[str, ...], after: Mark) -> None:
        self.begun = 0
        self._stream = stream
        self._prefixes = prefixes
        self._after = after
        self._last: StreamMessage | None = None  # fetched; `_after` is made of it when it is asked for
        self._is_closed = False
        self._connect()

    @property
    def at_end(self) -> bool:
        """See `EventReader.at_end`."""
        return self.begun == self._stream.connections and not self._following(1)

    @property
    def reached(self) -> int:
        """See `EventReader.reached`."""
        if self.at_end:
            return self._stream.end
        return self._after.sequence if self._last is None else self._last.sequence

    def _connect(self) -> None:
        """Begin anew where the stream has lost what was fetched."""
        self.begun = self._stream.connections
        after = self._after if self._last is None else mark_of(self._last)
        message = self._stream.held(after.sequence)
        is_other = message is not None and after.fingerprint is not None and mark_of(message) != after
        if is_other or after.sequence > self._stream.end:
            self._after, self._last = START, None

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """See `EventReader.fetch`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            if self._is_closed:
                raise StreamError("the reader is closed")
            if not self._stream.is_connected:
                raise StreamError("the stream in memory is closed")
            if self.begun != self._stream.connections:
                self._connect()
            found = self._following(FETCH_MESSAGES)
            if found:
                self._last = found[-1]
                return found
            if loop.time() >= deadline_s:
                return []
            await self._stream.wait(deadline_s - loop.time())

    def _following(self, limit: int) -> list[StreamMessage]:
        messages = self._stream.messages
        found: list[StreamMessage] = []
        after = self._after.sequence if self._last is None else self._last.sequence
        for at in range(bisect_right(messages, after, key=lambda message: message.sequence), len(messages)):
            if messages[at].subject.startswith(self._prefixes):
                found.append(messages[at])
                if len(found) == limit:
                    break
        return found

    async def close(self) -> None:
        """See `EventReader.close`."""
        self._is_closed = True


class DiscardingSink:
    """Takes frames and keeps none: the journal of an instance whose events nobody reads and nothing survives."""

    def append(self, frame: FrameBytes) -> None:
        """Forget the frame."""
