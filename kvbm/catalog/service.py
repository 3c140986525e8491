"""The catalog's work without its HTTP: follow the stream and the pulses, keep SQL in step, answer.

At the start claims come from SQL and everything else from the stream, read again from its first message; SQL's own position makes
repeating that harmless. From then on index and SQL go their own speed: the index never waits for the database.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence

import msgspec
import structlog

from kvbm.catalog.index import ClusterIndex, NewIndex
from kvbm.catalog.liveness import (
    LIVENESS_S,
    Followed,
    Heard,
    Input,
    Liveness,
    OwnPulse,
    Ticked,
    Withhold,
    catalog_name,
    is_catalog,
)
from kvbm.catalog.lookup import locate, lookup
from kvbm.catalog.projector import Projector
from kvbm.catalog.reference_index import ReferenceIndex
from kvbm.catalog.routing import Ask, Router, RoutingSettings
from kvbm.catalog.store import Outcome, Store, StoreBatch
from kvbm.core.answers import (
    BlockAnswer,
    InstanceSummary,
    LookupAnswer,
    NamespaceSummary,
    PoolSummary,
    RankedInstance,
    ReadyAnswer,
)
from kvbm.core.errors import CatalogError, KvbmError, StreamError
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, SequenceHash
from kvbm.core.kernels import REFERENCE, Kernels
from kvbm.streams.base import EventReader, EventStream, Heartbeat, Position, StreamMessage
from kvbm.streams.nats import STREAM, NatsStream
from kvbm.telemetry.metrics import CatalogNumbers

log = structlog.get_logger()

SLICE_BYTES = 64 << 10  # messages applied at once, so that requests are answered in between
FETCH_WAIT_S = 0.25
ASK_END_S = 1.0
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
SWEEP_EVERY_S = 1.0
SWEEP_PAGES = 64  # of the index between two other things
AUDIT_PAGES = 16  # every AUDIT_EVERY_S: 10 million residencies take about three minutes
AUDIT_EVERY_S = 0.25
AUDIT_PAUSE_S = 60.0  # between two passes
CLOSE_WAIT_S = 5.0
OWN_CLUSTER = "_catalogs"  # of the pulses of a catalog that follows all clusters


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a catalog needs to run.

    Attributes:
        cluster: the one to follow; None for all.
        listen: host:port; port 0 takes a free one.
        connect_s: how long NATS and the database have to answer at the start.
        store_every_s: pause between two transactions.
        tenant_secrets: tenant → secret, for lookups by tokens.
        capacity: residencies and claims the index takes; more are refused and counted, and their instances marked partial.
    """

    nats_url: str
    database_url: str
    cluster: str | None = None
    listen: str = "127.0.0.1:7700"
    connect_s: float = 5.0
    liveness_s: float = LIVENESS_S
    store_every_s: float = 0.1
    tenant_secrets: dict[str, str] = {}
    routing: RoutingSettings = RoutingSettings()
    capacity: int = 100_000_000


class CatalogService:
    """The running catalog. Belongs to one asyncio loop; `start` makes it.

    Attributes:
        failed: set when it cannot go on; `failure` says why.
    """

    def __init__(
        self, settings: ServiceSettings, store: Store, stream: EventStream, index: ClusterIndex, projector: Projector,
        numbering: str, end: int, kernels: Kernels,
    ) -> None:  # fmt: skip
        """Prefer `CatalogService.start`."""
        self.settings = settings
        self.kernels = kernels
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._store, self._stream, self._index, self._projector = store, stream, index, projector
        self._numbering = numbering
        self._start_end = self._end = end  # of the stream, as of the start and of the last word
        self._liveness = Liveness(settings.liveness_s)
        self._own_run = secrets.token_hex(4)
        self._own_name = catalog_name(self._own_run)
        self._router = Router(settings.routing)
        self._is_ready = end == 0
        self._reader: EventReader | None = None
        self._moved = asyncio.Condition()
        self._waiters = 0
        self._batch: StoreBatch | None = None
        self._stored = 0
        self._troubles: dict[str, str] = {}  # what does not answer → its words
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    @classmethod
    async def start(
        cls,
        settings: ServiceSettings,
        kernels: Kernels = REFERENCE,
        new_index: NewIndex = ReferenceIndex,
        stream: EventStream | None = None,
    ) -> CatalogService:
        """Connect, load what SQL has, and begin to follow.

        Args:
            stream: instead of the NATS of the settings; the service closes it.
        Raises: StreamError, CatalogError, MissingExtraError: what did not answer in time, in one sentence.
        """
        store = await Store.open(settings.database_url, settings.connect_s)
        try:
            stream = stream or await NatsStream.connect(settings.nats_url, settings.connect_s)
        except BaseException:
            await store.close()
            raise
        try:
            end = await stream.last_sequence(settings.connect_s)
            numbering, stored = await _numbering(store, settings.cluster, end)
            index = new_index(settings.capacity)
            claimed = 0
            async for chunk in store.claims():
                index.claim(chunk.pool, chunk.namespace, chunk.hashes)
                claimed += len(chunk.hashes) // HASH_BYTES
            projector = Projector(
                index,
                kernels.scan_frames,
                numbering,
                stored,
                known=await store.instances(),
                namespaces=[row.fields for row in await store.namespaces() if row.fields.id == row.id],
            )
            service = cls(settings, store, stream, index, projector, numbering, end, kernels)
            service._stored = stored
            await service._follow()
        except BaseException:
            await stream.close()
            await store.close()
            raise
        log.info("catalog.started", stream=numbering, stored=stored, stream_end=end, claims=claimed)
        return service

    async def close(self) -> None:
        """Stop following, store what is left, close the connections. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                if self._reader is not None:
                    await self._reader.close()
                if self.failure is None and await self._store_batch():
                    await self._store_batch()  # what was cut before, then what came after it
        except (TimeoutError, KvbmError) as error:
            log.warning("catalog.closed_early", why=str(error), stored=self._stored, read=self._projector.sequence)
        await self._stream.close()
        await self._store.close()

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the stream was read up to its end as of the start."""
        return self._is_ready and self.failure is None

    def readiness(self) -> ReadyAnswer:
        """Readiness, and what does not work."""
        reason = ""
        if self.failure is not None:
            reason = f"the catalog cannot go on: {self.failure}"
        elif not self._is_ready:
            reason = f"reading the stream: at message {self._projector.sequence} of {self._start_end}"
        return ReadyAnswer(
            ready=not reason,
            reason=reason,
            degraded="; ".join([*(self._troubles[what] for what in sorted(self._troubles)), *self._staleness()]),
            stream_sequence=self._projector.sequence,
            lag_messages=self._lag_messages(),
        )

    def _staleness(self) -> list[str]:
        fresh = self._liveness.freshness(time.monotonic())
        return [f"the view is {fresh.age_s:.1f} s old: {fresh.why}"] if fresh.why else []

    async def wait_for(self, instance: InstanceId, position: Position, timeout_s: float) -> Position:
        """Wait until a place in an instance's stream is in the index. Returns where it is, in time or not."""
        deadline_s = time.monotonic() + timeout_s
        self._waiters += 1
        try:
            async with self._moved:
                while (reached := self._projector.position(instance)) < position:
                    try:
                        async with asyncio.timeout(deadline_s - time.monotonic()):
                            await self._moved.wait()
                    except TimeoutError:
                        return self._projector.position(instance)
                return reached
        finally:
            self._waiters -= 1

    def lookup(self, namespace: NamespaceId, hashes: bytes) -> LookupAnswer:
        """Who has how much of a prefix."""
        return lookup(self._index, namespace, hashes)

    def route(self, ask: Ask, fields: Namespace | None) -> list[RankedInstance]:
        """The instances that may serve a prompt, best first; the first is noted as chosen. Empty when there are none.

        Args:
            fields: of the prompt's namespace, when they are known.
        """
        now_s = time.monotonic()
        candidates = [
            instance for instance in self._liveness.candidates() if self._serves(instance, ask.namespace, fields)
        ]
        if not candidates:
            return []
        pulses = {instance: self._liveness.last(instance) for instance in candidates}
        return self._router.route(now_s, ask, self._index, candidates, pulses)

    def block(self, namespace: NamespaceId, block: SequenceHash) -> BlockAnswer:
        """Who holds one block."""
        return locate(self._index, namespace, block)

    def namespace(self, namespace: NamespaceId) -> Namespace | None:
        """A namespace's fields, if an instance has told them."""
        return self._projector.namespaces().get(namespace)

    def namespaces(self) -> list[NamespaceSummary]:
        """The namespaces whose fields are known, by id."""
        known = self._projector.namespaces()
        return [NamespaceSummary(id=key.hex(), fields=known[key]) for key in sorted(known)]

    def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""
        now_s = time.monotonic()
        claims = self._index.claim_counts()
        known = {*self._liveness.instances(), *self._index.instances()}
        return [self._summary(now_s, instance, claims) for instance in sorted(known)]

    def numbers(self) -> CatalogNumbers:
        """What the metrics show."""
        counters = msgspec.structs.asdict(self._projector.counters)
        del counters["blind_starts"]
        lag = self._lag_messages()
        newest_ns = self._projector.newest_wall_ns
        return CatalogNumbers(
            **counters,
            anomalies=self._index.anomalies(),
            stream_sequence=self._projector.sequence,
            stored_sequence=self._stored,
            lag_messages=lag,
            lag_s=max(0.0, time.time() - newest_ns / 1e9) if lag and newest_ns else 0.0,
            ready=self.is_ready,
            degraded=bool(self._troubles),
            indexed_blocks=self._index.block_count(),
            residencies={
                (instance, tier.name): count
                for instance in self._index.instances()
                if (view := self._index.view(instance)) is not None
                for tier, count in view.counts.items()
            },
            claims=self._index.claim_counts(),
        )

    def _serves(self, instance: InstanceId, wanted: NamespaceId, fields: Namespace | None) -> bool:
        """Whether an instance runs the model of a namespace; whoever has not said what it runs, may."""
        pulse = self._liveness.last(instance)
        told = self._projector.declared(instance)
        if fields is None or not told or wanted in told or (pulse and wanted in pulse.heartbeat.namespaces):
            return True
        return any(_same_model(fields, other) for key in told if (other := self.namespace(key)) is not None)

    def _summary(self, now_s: float, instance: InstanceId, claims: dict[str, int]) -> InstanceSummary:
        view, row = self._index.view(instance), self._projector.instance_row(instance)
        pulse = self._liveness.last(instance)
        position = self._projector.position(instance)
        heartbeat = pulse.heartbeat if pulse is not None else None
        counts = view.counts if view is not None else {}
        pools = sorted(view.pools, key=lambda pool: pool.tier) if view is not None else []
        return InstanceSummary(
            instance=instance,
            cluster=row.cluster if row is not None else heartbeat.cluster if heartbeat is not None else "",
            state=self._liveness.state(instance).value,
            epoch=position.epoch,
            offset=position.offset,
            published=heartbeat.published if heartbeat is not None else None,
            digest=f"{view.digest if view is not None else 0:016x}",
            doubtful=view is None or view.doubtful,
            partial=view is not None and view.partial,
            engine=row.engine if row is not None else "",
            version=row.version if row is not None else "",
            topology=list(row.topology) if row is not None else [],
            pools=[
                PoolSummary(
                    tier=pool.tier.name,
                    slots=pool.slots,
                    block_bytes=pool.block_bytes,
                    reach=pool.reach.name,
                    name=pool.name,
                    held_blocks=claims.get(self._index.pool_name(instance, pool.tier) or "", 0)
                    if pool.reach == Reach.CLUSTER
                    else counts.get(pool.tier, 0),
                )
                for pool in pools
            ],
            held_blocks={tier.name: count for tier, count in counts.items()},
            heartbeat_age_s=round(now_s - pulse.at_s, 3) if pulse is not None else None,
            queued_tokens=heartbeat.queued_tokens if heartbeat is not None else None,
            running_requests=heartbeat.running_requests if heartbeat is not None else None,
            free_slots={tier.name: free for tier, free in heartbeat.free_slots.items()}
            if heartbeat is not None
            else None,
        )

    def _lag_messages(self) -> int:
        if self._reader is not None and self._reader.at_end:
            return 0
        return max(0, self._end - self._projector.sequence)

    # -- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        self._reader = await self._stream.pull(0, self.settings.cluster, self.settings.connect_s)
        for name, work in (
            ("read", self._read(self._reader)),
            ("hear", self._hear()),
            ("tick", self._tick()),
            ("pulse", self._send_pulses()),
            ("store", self._keep_storing()),
            ("end", self._watch_end()),
            ("sweep", self._sweep()),
            ("audit", self._audit()),
        ):
            self._spawn(name, work)

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"catalog-{name}")
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is None:
            self.failure = error
            self.failed.set()
            log.error("catalog.failed", task=task.get_name(), why=str(error), exc_info=error)

    async def _read(self, reader: EventReader) -> None:
        while True:
            try:
                messages = await reader.fetch(FETCH_WAIT_S)
            except StreamError as error:
                self._note_trouble("NATS", str(error))
                await asyncio.sleep(RETRY_FIRST_S)
                continue
            self._clear_trouble("NATS")
            slices = _slices(messages)
            for part in slices[:-1]:
                await self._project(part, at_end=False)
            await self._project(slices[-1], at_end=reader.at_end)
            if not self._is_ready and (self._projector.sequence >= self._start_end or reader.at_end):
                self._is_ready = True
                log.info("catalog.caught_up", stream_sequence=self._projector.sequence)

    async def _project(self, messages: Sequence[StreamMessage], at_end: bool) -> None:
        step = self._projector.step(time.monotonic(), messages, at_end)
        for instance in step.advanced:
            if (view := self._index.view(instance)) is not None:
                self._live(Followed(instance, view.epoch, view.stopped))
        if step.renumbered:
            await self._renumber(messages[-1].sequence)
        if step.advanced and self._waiters:
            async with self._moved:
                self._moved.notify_all()
        await asyncio.sleep(0)

    async def _sweep(self) -> None:
        """Free what the dead have left, a little at a time."""
        while True:
            has_more = self._index.sweep(SWEEP_PAGES)
            await asyncio.sleep(0 if has_more else SWEEP_EVERY_S)

    async def _audit(self) -> None:
        """Prove that the digests are those of the table, a little at a time; whose is not is doubtful until a round."""
        while True:
            found = self._index.audit(AUDIT_PAGES)
            for instance in found.differing:
                self._index.miss(instance)
            if found.differing or found.damaged:
                log.error("index.damaged", instances=found.differing, entries=found.damaged, blocks=found.blocks)
            await asyncio.sleep(AUDIT_PAUSE_S if found.is_whole else AUDIT_EVERY_S)

    async def _renumber(self, end: int) -> None:
        """The stream's store was replaced: count it under another name in SQL."""
        while True:
            try:
                self._numbering, self._stored = await _numbering(self._store, self.settings.cluster, end)
            except CatalogError as error:
                self._note_trouble("SQL", str(error))
                await asyncio.sleep(RETRY_MOST_S)
            else:
                self._projector.renumber(self._numbering, self._stored)
                return

    async def _hear(self) -> None:
        async for heartbeat in self._stream.watch_pulses(self.settings.cluster):
            if heartbeat.instance == self._own_name:
                self._live(OwnPulse())
            elif not is_catalog(heartbeat.instance):
                self._live(Heard(heartbeat))
                self._projector.hear(time.monotonic(), heartbeat)

    async def _tick(self) -> None:
        """Withhold the silent in time."""
        while True:
            self._live(Ticked())
            await asyncio.sleep(self._liveness.tick_s)

    async def _send_pulses(self) -> None:
        """Pulses of the catalog's own: while they come back, silence is the silence of others."""
        cluster = self.settings.cluster or OWN_CLUSTER
        while True:
            pulse = Heartbeat(
                instance=self._own_name, cluster=cluster, epoch=Epoch(1), published=Offset(0),
                wall_time_ns=time.time_ns(), run=self._own_run,
            )  # fmt: skip
            try:
                await self._stream.send_pulse(pulse)
            except StreamError as error:
                log.debug("catalog.pulse_not_sent", why=str(error))
            await asyncio.sleep(self._liveness.own_pulse_s)

    def _live(self, what: Input) -> None:
        """One step of liveness; what it decides is in answers from here on."""
        for effect in self._liveness.step(time.monotonic(), what):
            withheld = isinstance(effect, Withhold)
            self._index.withhold(effect.instance, withheld)
            log.info(
                "instance.withheld" if withheld else "instance.returned",
                instance=effect.instance,
                epoch=effect.epoch,
                why=effect.why.value if isinstance(effect, Withhold) else "heard",
            )

    async def _watch_end(self) -> None:
        while True:
            await asyncio.sleep(ASK_END_S)
            try:
                self._end = await self._stream.last_sequence(ASK_END_S)
            except StreamError as error:
                log.debug("stream.end_unknown", why=str(error))

    # -- storing ------------------------------------------------------------------------------------------------------

    async def _keep_storing(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            await asyncio.sleep(self.settings.store_every_s)
            try:
                await self._store_batch()
            except CatalogError as error:
                self._note_trouble("SQL", str(error))
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MOST_S)
            else:
                self._clear_trouble("SQL")
                retry_s = RETRY_FIRST_S

    async def _store_batch(self) -> bool:
        """Store the batch that waits, or a new one. Returns whether one was stored. Raises CatalogError: try again."""
        batch = self._batch or self._projector.take_batch()
        if batch is None:
            return False
        self._batch = batch
        applied = await self._store.apply(batch)
        if applied.outcome is Outcome.OVERTAKEN:  # rows say how things are, so the rest of them may be said again
            self._batch = msgspec.structs.replace(batch, previous=applied.position)
            return False
        if applied.outcome is Outcome.MISSING:
            raise _DatabaseReplacedError(
                f"the database stands at message {applied.position} of {batch.stream}, before {batch.previous}: it was "
                "restored or replaced; start the catalog again, and it goes on from there"
            )
        self._batch = None
        if batch.stream == self._numbering:
            self._stored = max(self._stored, applied.position)
        return True

    def _note_trouble(self, what: str, words: str) -> None:
        if what not in self._troubles:
            log.warning("catalog.degraded", what=what, why=words)
        self._troubles[what] = words

    def _clear_trouble(self, what: str) -> None:
        if self._troubles.pop(what, None) is not None:
            log.info("catalog.recovered", what=what)


class _DatabaseReplacedError(KvbmError):
    """The database is not the one this projection began with; only a new start helps."""


async def _numbering(store: Store, cluster: str | None, end: int) -> tuple[str, int]:
    """Name of the stream in SQL, and the position it has there.

    A stream whose end lies before the stored position is another one: its store was replaced. It gets a name of its own.
    """
    first = STREAM if cluster is None else f"{STREAM}/{cluster}"
    name, generation = first, 1
    while (stored := await store.position(name)) > end:
        generation += 1
        name = f"{first}#{generation}"
    if generation > 1:
        log.warning("stream.store_replaced", stream=name, end=end)
    return name, stored


def _slices(messages: Sequence[StreamMessage]) -> list[Sequence[StreamMessage]]:
    """Messages in parts of about SLICE_BYTES; one empty part when there are none."""
    parts: list[Sequence[StreamMessage]] = []
    begin = size = 0
    for at, message in enumerate(messages):
        if size and size + len(message.data) > SLICE_BYTES:
            parts.append(messages[begin:at])
            begin, size = at, 0
        size += len(message.data)
    parts.append(messages[begin:])
    return parts


def _same_model(a: Namespace, b: Namespace) -> bool:
    """Whether an engine that serves one namespace serves the other: all but tenant, LoRA and KV group agree."""
    return msgspec.structs.replace(a, tenant="", lora="", kv_group=0) == msgspec.structs.replace(
        b, tenant="", lora="", kv_group=0
    )
