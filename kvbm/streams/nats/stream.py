"""Events, heartbeats and broadcasts of all instances, on NATS JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

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
    AccessSample,
    AskLine,
    AskTaker,
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
    part_filters,
    pulse_subject,
    read_subjects,
    subject_names,
)
from kvbm.streams.nats.api import NS, last_message, message_at, store, stream_info
from kvbm.streams.nats.asks import NatsAskLine
from kvbm.streams.nats.batch_reader import BatchReader
from kvbm.streams.nats.broadcast import listen, word_in
from kvbm.streams.nats.connection import LateError, NobodyError, is_loopback
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.headers import ACKED_HEADER, FENCE_HEADER, expecting, position_in
from kvbm.streams.nats.heartbeats import heartbeat_in, watch_heartbeats
from kvbm.streams.nats.messages import NewMessages, ReadableMessages
from kvbm.streams.nats.reader import NatsReader
from kvbm.streams.nats.setup import PULSE, STREAM, StreamOptions, open_ready
from kvbm.streams.nats.shared import SharedConnection

_HEADERS_BYTES = 1024  # more than the headers of a publish take; the server counts them as part of the message


class NatsStream:
    """An `EventStream` on NATS. One asyncio loop; it owns its connection.

    A lost connection fails the calls in flight, and later ones at once; readers and watchers make a new one for all.
    """

    def __init__(self, connections: SharedConnection) -> None:
        self._connections = connections

    @classmethod
    async def connect(
        cls,
        url: str,
        timeout_s: float = 5.0,
        max_bytes: int = -1,
        credentials: Credentials | None = None,
        replicas: int = 1,
        makes: bool = True,
        new_messages: NewMessages = ReadableMessages,
    ) -> NatsStream:
        """Connect and make sure that both streams exist; one that exists keeps its limits and its number of replicas.

        Args:
            max_bytes: what the events may take on the server's disk, if the stream is made here; -1 for no limit.
            credentials: keys and certificates, where the server wants some.
            replicas: servers of a cluster that keep each stream, if it is made here.
            makes: false for who only reads events: nothing is made then, and the other stream may be absent.
            new_messages: makes what takes apart what comes on a connection.
        Raises: StreamError: nothing answers in time, or a stream of that name serves something else.
        """
        credentials = credentials or Credentials()
        options = StreamOptions(max_bytes, replicas, makes, new_messages)
        first = await open_ready(url, timeout_s, options, credentials)
        return cls(SharedConnection(url, first, options, credentials))

    @property
    def is_connected(self) -> bool:
        """See `EventStream.is_connected`."""
        return self._connections.now.is_open

    async def close(self) -> None:
        """See `EventStream.close`."""
        await self._connections.close()

    # -- events -------------------------------------------------------------------------------------------------------

    @property
    def max_message_bytes(self) -> int:
        """See `EventLog.max_message_bytes`."""
        return max(1, self._connections.now.client.max_payload - _HEADERS_BYTES)

    @property
    def most_in_flight(self) -> int:
        """See `EventLog.most_in_flight`."""
        return self._connections.now.most_in_flight

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
        headers = {ACKED_HEADER: f"{acked.epoch}:{acked.offset}"}
        if fence is not None:
            headers |= expecting(fence.sequence, fence_subject(cluster, instance))
            if fence.run.isprintable() and fence.run.isascii():  # else it names none
                headers[FENCE_HEADER] = f"{fence.sequence}:{fence.epoch}:{fence.run}"
        return await store(self._connections.now, STREAM, subject, data, headers, timeout_s)

    async def tail(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Tail | None:
        """See `EventLog.tail`."""
        subject = events_subject(cluster, instance)
        last = await last_message(self._connections.now, STREAM, subject, timeout_s)
        if last is None:
            return None
        end = end_of_message(last.data, instance, f"message {last.sequence} of {subject}")
        return Tail(end, position_in(last.headers.get(ACKED_HEADER)) or end)

    async def fence(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Fence | None:
        """See `EventLog.fence`."""
        subject = fence_subject(cluster, instance)
        last = await last_message(self._connections.now, STREAM, subject, timeout_s)
        return None if last is None else fence_of(last.data, last.sequence, f"message {last.sequence} of {subject}")

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
        subject = fence_subject(cluster, instance)
        headers = expecting(expected, subject)
        return Fence(
            epoch,
            run,
            await store(self._connections.now, STREAM, subject, fence_data(epoch, run, epochs), headers, timeout_s),
            epochs,
        )

    async def state(self, timeout_s: float = 5.0) -> StreamState:
        """See `EventLog.state`."""
        info = await stream_info(self._connections.now, STREAM, timeout_s)
        first = info.state.first_seq if info.state.first_seq else info.state.last_seq + 1
        config, held = info.config, info.state
        most = config.max_msgs if config.discard == "old" else -1
        return StreamState(first, held.last_seq, held.bytes, config.max_bytes, config.max_age / NS, info.created, most)

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventLog.first_sequence`."""
        return (await self.state(timeout_s)).first_sequence

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventLog.last_sequence`."""
        return (await self.state(timeout_s)).last_sequence

    async def message(self, sequence: int, timeout_s: float = 5.0) -> StreamMessage | None:
        """See `EventLog.message`."""
        return await message_at(await self._connections.renewed(timeout_s), STREAM, sequence, timeout_s)

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> NatsReader | BatchReader:
        """See `EventLog.pull`."""
        after, subjects = Mark(after_sequence, fingerprint), read_subjects(cluster, parts)
        reader: NatsReader | BatchReader
        if self._connections.now.is_lent:  # consumers are lent to nobody
            reader = BatchReader(self._connections, STREAM, subjects, after)
        else:
            reader = NatsReader(self._connections, STREAM, subjects, after)
        await reader.begin(timeout_s)
        return reader

    # -- pulses -------------------------------------------------------------------------------------------------------

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """See `Heartbeats.send_pulse`."""
        subject = pulse_subject(heartbeat.cluster, heartbeat.instance)
        await self._connections.now.send(subject, msgspec.msgpack.encode(heartbeat))

    async def last_pulse(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Heartbeat | None:
        """See `Heartbeats.last_pulse`."""
        subject = pulse_subject(cluster, instance)
        last = await last_message(self._connections.now, PULSE, subject, timeout_s)
        return None if last is None else heartbeat_in(StreamMessage(last.sequence, subject, last.data))

    def watch_pulses(self, cluster: str | None = None, parts: tuple[int, ...] = ALL_PARTS) -> AsyncIterator[Heartbeat]:
        """See `Heartbeats.watch_pulses`."""
        return watch_heartbeats(self._connections, part_filters(PULSE_PREFIX, cluster, parts))

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """See `AskSource.is_local`."""
        return is_loopback(self._connections.url)

    async def open_asks(self, taker: AskTaker, timeout_s: float = 5.0) -> AskLine:
        """See `AskSource.open_asks`."""
        return await NatsAskLine.open(self._connections.url, self._connections.credentials, taker, timeout_s)

    # -- what nobody keeps --------------------------------------------------------------------------------------------

    async def ask_snapshot(self, cluster: str, instance: InstanceId, timeout_s: float = 1.0) -> bool:
        """See `Broadcast.ask_snapshot`."""
        try:
            await self._connections.now.ask(instance_subject(SNAPSHOTS_PREFIX, cluster, instance), b"", timeout_s)
        except (NobodyError, LateError):
            return False
        return True

    async def send_notice(self, notice: Notice) -> None:
        """See `Broadcast.send_notice`."""
        subject = instance_subject(SNAPSHOTS_PREFIX, notice.cluster, notice.instance)
        await self._connections.now.send(subject, msgspec.msgpack.encode(notice))

    async def watch_snapshot_asks(self, cluster: str, instance: InstanceId) -> AsyncIterator[Notice | None]:
        """See `Broadcast.watch_snapshot_asks`."""
        subject = instance_subject(SNAPSHOTS_PREFIX, cluster, instance)
        async for message in listen(self._connections, subject, ASKS_KEPT, reconnects=False):
            if not message.data:
                yield None
            elif (notice := word_in(message, Notice)) is not None:
                yield notice

    async def send_sample(self, sample: AccessSample) -> None:
        """See `Broadcast.send_sample`."""
        subject = instance_subject(SAMPLES_PREFIX, sample.cluster, sample.instance)
        await self._connections.now.send(subject, msgspec.msgpack.encode(sample))

    async def watch_samples(self, cluster: str | None = None) -> AsyncIterator[AccessSample]:
        """See `Broadcast.watch_samples`."""
        async for message in listen(self._connections, cluster_filter(SAMPLES_PREFIX, cluster), SAMPLES_KEPT):
            sample = word_in(message, AccessSample)
            if sample is not None:
                yield sample

    async def send_routes(self, cluster: str, catalog: InstanceId, data: bytes) -> None:
        """See `Broadcast.send_routes`."""
        await self._connections.now.send(instance_subject(ROUTES_PREFIX, cluster, catalog), data)

    async def watch_routes(self, cluster: str) -> AsyncIterator[RoutesMessage]:
        """See `Broadcast.watch_routes`."""
        async for message in listen(self._connections, cluster_filter(ROUTES_PREFIX, cluster), ROUTES_KEPT):
            yield RoutesMessage(subject_names(message.subject)[1], message.data)
