"""A JetStream server in memory, and the connections to it, as far as kvbm uses them and as badly as they may behave.

Server   what survives a restart: the stream of events and fences, in order of sequence. Pulses are kept in memory.
Link     one connection: in order, with a delay, until it breaks. What was under way towards the server when it broke
         may still be stored, up to some message; replies are lost.
SimStream the `EventStream` that production code gets instead of `NatsStream`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvbm.core.errors import FencedError, StreamError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.core.parts import ALL_PARTS, part_of
from kvbm.streams.base import (
    ORIGIN,
    START,
    AccessSample,
    EpochRuns,
    Fence,
    Heartbeat,
    Mark,
    Notice,
    Position,
    StreamMessage,
    StreamState,
    Tail,
    end_of_message,
    events_subject,
    fence_data,
    fence_subject,
    mark_of,
    read_subjects,
)
from tests.faults.simulator.kernel import RUNNER, Process, World

PING_S = 10.0  # a connection over which nothing comes is given up after this
BATCH = 64  # messages a consumer is handed at once


class Stored(NamedTuple):
    """A message as the server keeps it."""

    sequence: int
    subject: str
    data: bytes
    acked: Position
    fence: Fence | None  # of a fence message
    stored_s: float
    by: str  # the process that sent it
    named: Fence | None  # by a message of events

    @property
    def message(self) -> StreamMessage:
        return StreamMessage(self.sequence, self.subject, self.data, int(self.stored_s * 1e9), self.named)


class Link:
    """One connection between a process and the server."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._world = network.world
        self.process = process
        self.is_up = True
        self._to_server_s = self._to_client_s = 0.0
        self._held: list[tuple[Process, Callable[[], None]]] = []
        self._silent_since_s: float | None = None
        self.on_break: list[Callable[[], None]] = []
        self.number = 0
        self.late_left: int | None = None  # messages that still arrive once it is broken

    def to_server(self, deliver: Callable[[], None]) -> None:
        """Bytes leave the client. Raises StreamError: the connection is known to be lost."""
        if not self.is_up:
            raise StreamError("the connection to NATS is lost (simulated)")
        if self._network.is_cut(self.process):
            self._hold(self._world.nature, deliver)
            return
        self._to_server_s = max(self._to_server_s, self._world.now + self._network.delay_s())
        self._world.call_at(self._to_server_s, self._world.nature, self._arrive, deliver)

    def to_client(self, deliver: Callable[[], None]) -> None:
        """Bytes leave the server; lost when the connection is gone by the time they would arrive."""
        if not self.is_up:
            return
        if self._network.is_cut(self.process):
            self._hold(self.process, deliver)
            return
        self._to_client_s = max(self._to_client_s, self._world.now + self._network.delay_s())
        self._world.call_at(self._to_client_s, self.process, self._come, deliver)

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if self.is_up or self._network.arrives_late(self):
            deliver()

    def _come(self, deliver: Callable[[], None]) -> None:
        if self.is_up and self.process.alive:
            deliver()

    def _hold(self, whose: Process, deliver: Callable[[], None]) -> None:
        self._held.append((whose, deliver))
        if self._silent_since_s is None:
            self._silent_since_s = self._world.now
            self._world.after(PING_S, self.process, self._ping)

    def _ping(self) -> None:
        if self._silent_since_s is not None and self.is_up:
            self.break_off()

    def flush(self) -> None:
        """The network is whole again: what waited in the sockets arrives."""
        held, self._held = self._held, []
        self._silent_since_s = None
        for whose, deliver in held:
            if whose is self.process:
                self.to_client(deliver)
            elif self.is_up:
                self.to_server(deliver)
            elif self._network.arrives_late(self):
                self._world.after(self._network.delay_s(), whose, deliver)

    def break_off(self) -> None:
        """The connection is lost, for both sides."""
        if not self.is_up:
            return
        self.is_up = False
        self._network.links.discard(self)
        callbacks, self.on_break = self.on_break, []
        for callback in callbacks:
            self._world.call_at(self._world.now, self.process, callback)


class Network:
    """All connections, their delays, and who is cut off."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: set[Link] = set()
        self.cut: set[str] = set()  # names of machines
        self.slow_s = 0.0

    def is_cut(self, process: Process) -> bool:
        return process.machine in self.cut

    def delay_s(self) -> float:
        rng = self.world.rng
        return 0.0002 + 0.002 * rng.random() + (self.slow_s * rng.random() if self.slow_s else 0.0)

    def arrives_late(self, link: Link) -> bool:
        """Whether what was under way on a broken connection still arrives: a beginning of it does, in order."""
        if link.late_left is None:
            link.late_left = self.world.rng.randrange(4)
        link.late_left -= 1
        return link.late_left >= 0

    def sorted_links(self) -> list[Link]:
        return sorted(self.links, key=lambda link: link.number)

    def heal(self, machine: str) -> None:
        self.cut.discard(machine)
        for link in self.sorted_links():
            if link.process.machine == machine:
                link.flush()


class _Consumer:
    """A pull consumer of the server."""

    def __init__(
        self, link: Link, prefixes: tuple[str, ...], after: int, take: Callable[[list[StreamMessage], int], None]
    ) -> None:
        self.link, self.prefixes, self.after, self.take = link, prefixes, after, take
        self.credit = 4
        self.is_gone = False

    def end(self) -> None:
        """The reader hears that its consumer went with its stream."""
        self.is_gone = True
        self.take([], 1)


class Server:
    """The stream's server: what it stores and how it answers."""

    def __init__(self, world: World, network: Network, max_bytes: int = -1, max_age_s: float = 0.0) -> None:
        self.world, self.network = world, network
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        self.is_up = True
        self._streams, self.created = 1, "created-1"
        self.messages: deque[Stored] = deque()
        self.first_sequence, self.last_sequence = 1, 0
        self.bytes = 0
        self.synced = 0
        self.last: dict[str, Stored] = {}
        self.pulses: dict[str, Heartbeat] = {}
        self.refuses = 0.0  # share of publishes refused with an error
        self.takes_nothing = False  # nor says so: its disk is full
        self.max_payload_bytes = 0  # of a heartbeat; 0: of any size
        self.on_too_large: Callable[[Heartbeat, int], None] = lambda heartbeat, size: None
        self.drop_acks = 0.0
        self.loses_asks = 0.0
        self.on_stored: Callable[[Stored], None] = lambda stored: None
        self.on_pulse: Callable[[Heartbeat], None] = lambda heartbeat: None
        self._consumers: list[_Consumer] = []
        self._pulse_watchers: list[tuple[Link, str, Callable[[Heartbeat], None]]] = []
        self._snapshot_watchers: list[tuple[Link, str, Callable[[Notice | None], None]]] = []
        self._fans: list[tuple[Link, str, Callable[[Any], None]]] = []
        self._links = 0
        self.fenced_off = 0
        self.generation = 0
        self.has_lost = False  # its end, ever
        self.hidden = False  # messages that had been stored were ever lost from the middle

    @property
    def is_another(self) -> bool:
        """Whether the stream was made anew: a fence may have the number that another had in the stream before."""
        return self._streams > 1

    @property
    def is_whole(self) -> bool:
        """Whether the stream still has everything that was ever stored."""
        return not (self.first_sequence > 1 or self.hidden or self.has_lost or self.is_another)

    # -- connections --------------------------------------------------------------------------------------------------

    def accept(self, process: Process) -> Link:
        link = Link(self.network, process)
        self._links += 1
        link.number = self._links
        self.network.links.add(link)
        return link

    # -- storing ------------------------------------------------------------------------------------------------------

    def store(
        self, subject: str, data: bytes, acked: Position, fence: Fence | None, by: str, named: Fence | None = None
    ) -> int:
        self.last_sequence += 1
        if fence is not None:
            fence = fence._replace(sequence=self.last_sequence)
        stored = Stored(self.last_sequence, subject, data, acked, fence, self.world.now, by, named)
        self.messages.append(stored)
        self.bytes += len(data) + 64
        self.last[subject] = stored
        self.on_stored(stored)
        self._trim()
        for consumer in list(self._consumers):
            self._feed(consumer)
        return self.last_sequence

    def _trim(self) -> None:
        old_s = self.world.now - self.max_age_s if self.max_age_s else None
        while self.messages and (
            (0 <= self.max_bytes < self.bytes) or (old_s is not None and self.messages[0].stored_s < old_s)
        ):
            self.drop_first()

    def drop_first(self) -> None:
        gone = self.messages.popleft()
        self.bytes -= len(gone.data) + 64
        self.first_sequence = gone.sequence + 1
        if self.last.get(gone.subject) is gone:
            del self.last[gone.subject]

    def hide(self, begin: int, end: int) -> int:
        """A flipped bit in the store: messages of these sequences are gone without a word."""
        kept = [stored for stored in self.messages if not begin <= stored.sequence < end]
        gone = len(self.messages) - len(kept)
        self.hidden = self.hidden or gone > 0
        self._replace(kept)
        return gone

    def _replace(self, kept: list[Stored]) -> None:
        self.messages = deque(kept)
        self.bytes = sum(len(stored.data) + 64 for stored in kept)
        self.last = {stored.subject: stored for stored in kept}

    def recreate(self) -> None:
        """Another stream has the name: it is empty, its sequences begin with 1, and whoever read the old one is
        told.
        """
        self._replace([])
        self.first_sequence, self.last_sequence, self.synced = 1, 0, 0
        self._streams += 1
        self.created = f"created-{self._streams}"
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            consumer.link.to_client(consumer.end)

    def sync(self) -> None:
        self.synced = self.last_sequence

    def go_down(self, lose_tail: bool) -> None:
        """Killed (`lose_tail`: by a power cut, which takes what was not synced)."""
        self.is_up = False
        self.generation += 1
        if lose_tail and self.last_sequence > self.synced:
            end = self.world.rng.randint(self.synced, self.last_sequence)
            self._replace([stored for stored in self.messages if stored.sequence <= end])
            self.has_lost = self.has_lost or end < self.last_sequence
            self.last_sequence = end
        self.pulses.clear()
        self._consumers.clear()
        self._pulse_watchers.clear()
        self._snapshot_watchers.clear()
        self._fans.clear()
        for link in self.network.sorted_links():
            link.break_off()

    def come_up(self) -> None:
        self.is_up = True

    # -- requests -----------------------------------------------------------------------------------------------------

    def publish(
        self, subject: str, fence_subject: str, data: bytes, fence: Fence | None, acked: Position, by: str
    ) -> int | Exception:
        if fence is not None:
            last = self.last.get(fence_subject)
            if (0 if last is None else last.sequence) != fence.sequence:
                self.fenced_off += 1
                return FencedError(f"the fence of {subject} is not {fence} (simulated)")
        if self.refuses and self.world.rng.random() < self.refuses:
            return StreamError("insufficient resources (simulated)")
        return self.store(subject, data, acked, None, by, fence)

    def set_fence(
        self, subject: str, epoch: Epoch, run: str, expected: int, by: str, epochs: EpochRuns = ()
    ) -> Fence | Exception:
        last = self.last.get(subject)
        if (0 if last is None else last.sequence) != expected:
            return FencedError(f"the fence {subject} is not {expected} (simulated)")
        sequence = self.store(subject, fence_data(epoch, run, epochs), ORIGIN, Fence(epoch, run, 0, epochs), by)
        return Fence(epoch, run, sequence, epochs)

    def message(self, sequence: int) -> StreamMessage | None:
        return next((stored.message for stored in self.messages if stored.sequence == sequence), None)

    def state(self) -> StreamState:
        self._trim()
        first = self.messages[0].sequence if self.messages else self.last_sequence + 1
        return StreamState(first, self.last_sequence, self.bytes, self.max_bytes, self.max_age_s, self.created)

    def consume(
        self, link: Link, prefixes: tuple[str, ...], after: int, take: Callable[[list[StreamMessage], int], None]
    ) -> _Consumer:
        consumer = _Consumer(link, prefixes, after, take)
        self._consumers.append(consumer)
        self._feed(consumer, greet=True)
        return consumer

    def _feed(self, consumer: _Consumer, greet: bool = False) -> None:
        if not consumer.link.is_up:
            if consumer in self._consumers:
                self._consumers.remove(consumer)
            return
        while consumer.credit > 0:
            batch: list[StreamMessage] = []
            pending = 0
            for stored in self._after(consumer.after):
                if stored.subject.startswith(consumer.prefixes):
                    if len(batch) < BATCH:
                        batch.append(stored.message)
                    else:
                        pending += 1
            if not batch and not greet:
                return
            greet = False
            if batch:
                consumer.credit -= 1
                consumer.after = batch[-1].sequence
            self._hand(consumer, batch, pending)
            if not pending:
                return

    def _after(self, sequence: int) -> list[Stored]:
        found: list[Stored] = []
        for stored in reversed(self.messages):
            if stored.sequence <= sequence:
                break
            found.append(stored)
        return found[::-1]

    @staticmethod
    def _hand(consumer: _Consumer, batch: list[StreamMessage], pending: int) -> None:
        consumer.link.to_client(lambda: consumer.take(batch, pending))

    def more(self, consumer: _Consumer) -> None:
        consumer.credit += 1
        self._feed(consumer)

    def pulse(self, subject: str, heartbeat: Heartbeat) -> None:
        self.pulses[subject] = heartbeat
        self.on_pulse(heartbeat)
        for link, prefix, take in self._pulse_watchers:
            if subject.startswith(prefix):
                link.to_client(lambda take=take: take(heartbeat))  # type: ignore[misc]

    def watch_pulses(self, link: Link, prefix: str, take: Callable[[Heartbeat], None]) -> None:
        self._pulse_watchers.append((link, prefix, take))
        for subject, heartbeat in self.pulses.items():
            if subject.startswith(prefix):
                link.to_client(lambda heartbeat=heartbeat: take(heartbeat))  # type: ignore[misc]

    def watch_snapshots(self, link: Link, subject: str, take: Callable[[Notice | None], None]) -> None:
        self._snapshot_watchers.append((link, subject, take))

    def ask_snapshot(self, subject: str) -> bool:
        heard = False
        if self.loses_asks and self.world.rng.random() < self.loses_asks:
            return self.world.rng.random() < 0.5
        for link, watched, take in self._snapshot_watchers:
            if watched == subject and link.is_up:
                link.to_client(partial(take, None))
                heard = True
        return heard

    def notify(self, subject: str, notice: Notice) -> None:
        for link, watched, take in self._snapshot_watchers:
            if watched == subject and link.is_up:
                link.to_client(partial(take, notice))

    def fan(self, link: Link, kind: str, take: Callable[[Any], None]) -> None:
        self._fans.append((link, kind, take))

    def tell(self, kind: str, fact: Any) -> None:
        for link, wanted, take in self._fans:
            if wanted == kind:
                link.to_client(lambda take=take: take(fact))  # type: ignore[misc]


class SimStream:
    """An `EventStream` over a simulated connection."""

    def __init__(self, server: Server, link: Link) -> None:
        self._server = server
        self._world = server.world
        self._link = link
        self._closed = False
        self._readers: set[SimReader] = set()
        self._process = link.process

    @classmethod
    async def connect_to(cls, server: Server, timeout_s: float) -> SimStream:
        return cls(server, await _connect(server, timeout_s))

    @property
    def is_connected(self) -> bool:
        return self._link.is_up and not self._closed

    @property
    def max_message_bytes(self) -> int:
        return 1 << 20

    @property
    def most_in_flight(self) -> int:
        return 0

    async def link(self, timeout_s: float) -> Link:
        """The connection, or a new one. Raises StreamError."""
        if self._closed:
            raise StreamError("the stream is closed")
        if not self._link.is_up:
            self._link = await _connect(self._server, timeout_s)
        return self._link

    async def close(self) -> None:
        self._closed = True
        for reader in list(self._readers):
            await reader.close()
        self._link.break_off()

    async def _ask(self, timeout_s: float, handle: Callable[[], Any], ack: bool = False) -> Any:
        return await ask(self._server, self._link, timeout_s, handle, ack)

    # -- events -------------------------------------------------------------------------------------------------------

    async def publish(
        self,
        cluster: str,
        instance: InstanceId,
        data: bytes,
        timeout_s: float = 5.0,
        fence: Fence | None = None,
        acked: Position = ORIGIN,
    ) -> int:
        subject, fenced = events_subject(cluster, instance), fence_subject(cluster, instance)
        sequence: int = await self._ask(
            timeout_s,
            lambda: self._server.publish(subject, fenced, data, fence, acked, self._process.name),
            ack=True,
        )
        return sequence

    async def tail(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Tail | None:
        subject = events_subject(cluster, instance)
        stored: Stored | None = await self._ask(timeout_s, lambda: self._server.last.get(subject))
        if stored is None:
            return None
        return Tail(end_of_message(stored.data, instance, "the last message"), stored.acked)

    async def fence(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Fence | None:
        subject = fence_subject(cluster, instance)
        stored: Stored | None = await self._ask(timeout_s, lambda: self._server.last.get(subject))
        return None if stored is None else stored.fence

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
        subject = fence_subject(cluster, instance)
        fence: Fence = await self._ask(
            timeout_s,
            lambda: self._server.set_fence(subject, epoch, run, expected, self._process.name, epochs),
            ack=True,
        )
        return fence

    async def state(self, timeout_s: float = 5.0) -> StreamState:
        state: StreamState = await self._ask(timeout_s, self._server.state)
        return state

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        return (await self.state(timeout_s)).first_sequence

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        return (await self.state(timeout_s)).last_sequence

    async def message(self, sequence: int, timeout_s: float = 5.0) -> StreamMessage | None:
        message: StreamMessage | None = await self._ask(timeout_s, lambda: self._server.message(sequence))
        return message

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> SimReader:
        prefixes = tuple(subjects.removesuffix(">") for subjects in read_subjects(cluster, parts))
        reader = SimReader(self, self._server, prefixes, Mark(after_sequence, fingerprint))
        await reader.begin(timeout_s)
        self._readers.add(reader)
        return reader

    # -- signs of life and asks ---------------------------------------------------------------------------------------

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        subject, most = f"{heartbeat.cluster}.{heartbeat.instance}", self._server.max_payload_bytes
        if most and (size := len(msgspec.msgpack.encode(heartbeat))) > most:
            self._server.on_too_large(heartbeat, size)
            raise StreamError("nats: maximum payload exceeded (simulated)")
        self._tell(lambda: self._server.pulse(subject, heartbeat))

    async def last_pulse(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Heartbeat | None:
        heartbeat: Heartbeat | None = await self._ask(
            timeout_s, lambda: self._server.pulses.get(f"{cluster}.{instance}")
        )
        return heartbeat

    async def watch_pulses(
        self, cluster: str | None = None, parts: tuple[int, ...] = ALL_PARTS
    ) -> AsyncIterator[Heartbeat]:
        prefix = "" if cluster is None else f"{cluster}."
        async for item in self._watch(lambda link, put: self._server.watch_pulses(link, prefix, put)):
            if part_of(item.instance) in parts:
                yield item

    async def ask_snapshot(self, cluster: str, instance: InstanceId, timeout_s: float = 1.0) -> bool:
        heard: bool = await self._ask(timeout_s, lambda: self._server.ask_snapshot(f"{cluster}.{instance}"))
        return heard

    async def send_notice(self, notice: Notice) -> None:
        self._tell(lambda: self._server.notify(f"{notice.cluster}.{notice.instance}", notice))

    async def watch_snapshot_asks(self, cluster: str, instance: InstanceId) -> AsyncIterator[Notice | None]:
        subject = f"{cluster}.{instance}"
        """On this connection alone: whoever publishes must learn anew where to go on before it uses another."""
        subscribed = self._watch(lambda link, put: self._server.watch_snapshots(link, subject, put), reconnects=False)
        async for item in subscribed:
            yield item

    async def send_sample(self, sample: AccessSample) -> None:
        self._tell(lambda: self._server.tell("samples", sample))

    async def watch_samples(self, cluster: str | None = None) -> AsyncIterator[AccessSample]:
        async for item in self._watch(lambda link, put: self._server.fan(link, "samples", put)):
            yield item

    def _tell(self, handle: Callable[[], None]) -> None:
        generation = self._server.generation

        def arrive() -> None:
            if self._server.is_up and self._server.generation == generation:
                handle()

        self._link.to_server(arrive)

    async def _watch(
        self, subscribe: Callable[[Link, Callable[[Any], None]], None], reconnects: bool = True
    ) -> AsyncIterator[Any]:
        """Items until the stream is closed, over as many connections as it takes; or until the connection is lost."""
        wait_s = 0.05
        while not self._closed and (reconnects or self._link.is_up):
            items: deque[Any] = deque()
            wake = asyncio.Event()
            try:
                link = await self.link(1.0)
                link.on_break.append(wake.set)

                def put(item: Any, items: deque[Any] = items, wake: asyncio.Event = wake) -> None:
                    items.append(item)
                    wake.set()

                await ask(self._server, link, 1.0, partial(subscribe, link, put))
            except StreamError:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 2.0)
                continue
            wait_s = 0.05
            while link.is_up and not self._closed:
                await wake.wait()
                wake.clear()
                while items:
                    yield items.popleft()


class SimReader:
    """An `EventReader` over connections that come and go; a replaced store, or one that lost its end, is read anew."""

    def __init__(self, stream: SimStream, server: Server, prefixes: tuple[str, ...], after: Mark) -> None:
        self.begun = 0
        self._stream, self._server, self._prefixes, self._after = stream, server, prefixes, after
        self._created = ""
        self._link: Link | None = None
        self._consumer: _Consumer | None = None
        self._ready: deque[StreamMessage] = deque()
        self._pending = 1
        self._wake = asyncio.Event()
        self._closed = False
        self.slow_s = 0.0

    @property
    def at_end(self) -> bool:
        return self._link is not None and self._link.is_up and not self._ready and self._pending == 0

    @property
    def reached(self) -> int:
        return self._server.last_sequence if self.at_end else self._after.sequence

    async def begin(self, timeout_s: float) -> None:
        link = await self._stream.link(timeout_s)
        state = await ask(self._server, link, timeout_s, self._server.state)
        is_other = (self._created and state.created != self._created) or state.last_sequence < self._after.sequence
        if is_other or await ask(self._server, link, timeout_s, self._is_overwritten):
            self._after = START
        self._created = state.created
        self._pending = 1
        self._ready.clear()
        after = self._after.sequence

        def take(batch: list[StreamMessage], pending: int) -> None:
            if self._link is link:
                self._ready.extend(batch)
                self._pending = pending
                self._wake.set()

        self._link = link
        self._consumer = await ask(
            self._server, link, timeout_s, lambda: self._server.consume(link, self._prefixes, after, take)
        )
        link.on_break.append(self._wake.set)
        self.begun += 1

    def _is_overwritten(self) -> bool:
        """As `NatsReader._is_overwritten`: another message than the one fetched last has its sequence."""
        if self._after.fingerprint is None:
            return False
        message = self._server.message(self._after.sequence)
        return message is not None and mark_of(message) != self._after

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        wait_s = 0.05
        while True:
            if self._closed:
                raise StreamError("the reader is closed")
            self._wake.clear()
            if self._ready:
                messages = list(self._ready)
                self._ready.clear()
                self._after = mark_of(messages[-1])
                consumer, link = self._consumer, self._link
                if consumer is not None and link is not None and link.is_up:
                    link.to_server(partial(self._server.more, consumer))
                return messages
            left_s = max(0.0, end_s - loop.time())
            if self._consumer is not None and self._consumer.is_gone:
                self._consumer = self._link = None
            if self._link is None or not self._link.is_up:
                try:
                    await self.begin(max(left_s, 0.05))
                    continue
                except StreamError:
                    self._link = None
                    if left_s <= wait_s:
                        raise
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, 2.0)
                    continue
            try:
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            except TimeoutError:
                if loop.time() >= end_s:
                    return []

    async def close(self) -> None:
        self._closed = True
        self._wake.set()


async def _connect(server: Server, timeout_s: float) -> Link:
    world = server.world
    process = world.current
    generation = server.generation
    try:
        world.loop.run_in_executor(RUNNER.get(), lambda: None)  # the server's name is looked up in a thread
        process.shortages.check_descriptor("a connection")
    except (OSError, RuntimeError) as error:
        raise StreamError(f"no connection to NATS: {error}") from None
    if server.network.is_cut(process):
        await asyncio.sleep(timeout_s)
        raise StreamError(f"no answer from NATS within {timeout_s:g} s (simulated)")
    await asyncio.sleep(0.001 + 0.003 * world.rng.random())
    if not server.is_up or server.generation != generation:
        raise StreamError("no connection to NATS: refused (simulated)")
    return server.accept(process)


async def ask(server: Server, link: Link, timeout_s: float, handle: Callable[[], Any], ack: bool = False) -> Any:
    """Send a request, wait for its answer. Raises what the server answers with, or StreamError."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    generation = server.generation

    def give(result: Any) -> None:
        if not answer.done():
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    def arrive() -> None:
        if not server.is_up or server.generation != generation:
            return
        if ack and server.takes_nothing:
            return
        result = handle()
        if ack and server.drop_acks and server.world.rng.random() < server.drop_acks:
            return
        link.to_client(lambda: give(result))

    def lost() -> None:
        give(StreamError("the connection to NATS is lost (simulated)"))

    link.to_server(arrive)
    link.on_break.append(lost)
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise StreamError(f"NATS did not answer within {timeout_s:g} s (simulated)") from None
    finally:
        if lost in link.on_break:
            link.on_break.remove(lost)
