"""The catalog's work without its HTTP: follow the stream and the pulses, ask for rounds, answer.

At the start the index comes from the newest checkpoint, and the rest from the stream after it. Without one, an index that could have had
one begins where SQL stands, with every instance in doubt, and asks them all for a round; else the stream is read from its first
message. Claims come from SQL in any case. What SQL has is not stored again, so that reading twice is harmless. From then on index and
SQL go their own speed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from kvbm.catalog.archive import Archive
from kvbm.catalog.checkpoints import Checkpointer, Checkpointing, load_newest
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.index import ClusterIndex, NewIndex
from kvbm.catalog.lag import Backlog, Confirmation
from kvbm.catalog.liveness import (
    LIVENESS_S,
    Followed,
    Freshness,
    Heard,
    Input,
    LifeState,
    Liveness,
    OwnPulse,
    Ticked,
    Why,
    Withhold,
    catalog_name,
    is_catalog,
)
from kvbm.catalog.lookup import locate, lookup
from kvbm.catalog.reference_index import ReferenceIndex
from kvbm.catalog.routing import Ask, Router, RoutingSettings
from kvbm.catalog.sequencer import Projector
from kvbm.catalog.snapshots import ASK_AGAIN_S, Doubt, RoundAsker
from kvbm.catalog.sql_store import InstanceState, Store
from kvbm.catalog.sql_writer import CLAIMS_EVERY_S, Numbering, Storing, numbering, slices
from kvbm.core.answers import (
    BlockAnswer,
    BlockHolder,
    InstanceHolding,
    InstanceSummary,
    LookupAnswer,
    NamespaceSummary,
    PoolSummary,
    RankedInstance,
    ReadyAnswer,
)
from kvbm.core.backend import REFERENCE, Kernels
from kvbm.core.errors import KvbmError, StreamError
from kvbm.core.events import JANITOR
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, SequenceHash
from kvbm.streams.base import (
    EventReader,
    EventStream,
    Heartbeat,
    Mark,
    Notice,
    Position,
    StreamMessage,
    still_holds,
)
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.stream import NatsStream
from kvbm.telemetry.metrics import CatalogNumbers

log = structlog.get_logger()

FETCH_WAIT_S = 0.25
ASK_END_S = 0.5
ASK_END_WAIT_S = 1.0
_SENT_PULSES = 256
RETRY_S = 0.1
ROUNDS_STEP_S = 0.1
SWEEP_EVERY_S = 1.0
SWEEP_PAGES = 64  # of the index between two other things
AUDIT_PAGES = 16  # every AUDIT_EVERY_S: 10 million residencies take about three minutes
AUDIT_EVERY_S = 0.25
AUDIT_PAUSE_S = 60.0  # between two passes
CLOSE_WAIT_S = 5.0
LAST_CHECKPOINT_S = 8.0
A = TypeVar("A", LookupAnswer, BlockAnswer)
D = TypeVar("D", InstanceHolding, RankedInstance, BlockHolder)
OWN_CLUSTER = "_catalogs"  # of the pulses of a catalog that follows all clusters


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a catalog needs to run.

    Attributes:
        cluster: the one to follow; None for all.
        listen: host:port; port 0 takes a free one.
        connect_s: how long NATS and the database have to answer at the start.
        replicas: of the streams, if they are made here.
        store_every_s: pause between two transactions.
        claims_every_s: how often claims in the index are held against those in the database.
        tenant_secrets: tenant → secret, for lookups by tokens.
        capacity: residencies and claims the index takes; more are refused and counted, and their instances marked partial.
        checkpoints: folder of the index's checkpoints; "" writes none.
        archive: folder where all frames are kept; "" keeps none.
        ask_again_s: between two requests to a doubtful instance for a round.
        whole_wait_s: how long readiness waits for live instances to be whole, once the stream was read.
    """

    nats_url: str
    credentials: Credentials = Credentials()
    database_url: str
    cluster: str | None = None
    listen: str = "127.0.0.1:7700"
    connect_s: float = 5.0
    replicas: int = 1
    liveness_s: float = LIVENESS_S
    store_every_s: float = 0.1
    claims_every_s: float = CLAIMS_EVERY_S
    tenant_secrets: dict[str, str] = {}
    routing: RoutingSettings = RoutingSettings()
    capacity: int = 100_000_000
    checkpoints: str = ""
    checkpoint_every_s: float = 60.0
    archive: str = ""
    ask_again_s: float = ASK_AGAIN_S
    whole_wait_s: float = 10.0


class _Beginning(NamedTuple):
    """An index, its projector, and where reading goes on from."""

    held: ClusterIndex
    projector: Projector
    after: Mark


class CatalogService:
    """The running catalog. Belongs to one asyncio loop; `start` makes it.

    Attributes:
        failed: set when it cannot go on; `failure` says why.
    """

    def __init__(
        self, settings: ServiceSettings, store: Store, stream: EventStream, begun: _Beginning, stored: Numbering, end: int,
        kernels: Kernels, new_index: NewIndex,
    ) -> None:  # fmt: skip
        """Prefer `CatalogService.start`."""
        self.settings = settings
        self.kernels = kernels
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._store, self._stream = store, stream
        self._index, self._projector, self._after = begun
        self._start_end = self._end = end  # of the stream, as of the start and of the last word
        self._liveness = Liveness(settings.liveness_s)
        self._ignored: dict[InstanceId, Heartbeat] = {}  # whose heartbeats count for nothing, and the last of them
        self._confirmation = Confirmation(time.monotonic())
        self._backlog = Backlog(1.25 * settings.liveness_s)  # who is silent is left out before it counts as behind
        self._sent_pulses: dict[
            int, float
        ] = {}  # own ones that may still be heard: the time they bear, and when they were sent
        self._heard_after_s = (
            time.monotonic()
        )  # the newest own pulse heard was sent then: what comes now was sent later
        self._told: dict[InstanceId, Followed] = {}  # what liveness knows of the stream
        self._own_run = secrets.token_hex(4)
        self._own_name = catalog_name(self._own_run)
        self._asker = RoundAsker(settings.ask_again_s)
        self._doubted = asyncio.Event()  # somebody has become doubtful
        self._found = 0  # of the projector's, as of the last look
        self._asking: set[asyncio.Task[None]] = set()
        self._router = Router(settings.routing)
        self._caught_up_s: float | None = None  # when the stream had been read up to its end as of the start
        self._is_ready = False
        self._reader: EventReader | None = None
        self._applying = asyncio.Lock()  # held while messages are applied, and while a checkpoint begins
        self._moved = asyncio.Condition()
        self._waiters = 0
        self._degraded = Degraded()
        self._storing = Storing(
            store, stream, settings.cluster, self._projector, stored, self._applying, self._degraded, new_index,
            kernels.scan_frames, settings.store_every_s, claims_every_s=settings.claims_every_s,
        )  # fmt: skip
        self._checkpointer: Checkpointer | None = None
        if settings.checkpoints and isinstance(self._index, Checkpointing):
            self._checkpointer = Checkpointer(
                Path(settings.checkpoints), self._index, self._projector, self._applying, lambda: self._storing.name,
                self._degraded, settings.checkpoint_every_s,
            )  # fmt: skip
        self._archive: Archive | None = None
        if settings.archive:
            self._archive = Archive(Path(settings.archive), stream, settings.cluster, self._degraded)
        self._audits = 0
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
            stream = stream or await NatsStream.connect(
                settings.nats_url, settings.connect_s, credentials=settings.credentials, replicas=settings.replicas
            )
        except BaseException:
            await store.close()
            raise
        try:
            state = await stream.state(settings.connect_s)
            stored = await numbering(store, settings.cluster, state, stream)
            begun = await _begin(settings, store, kernels, new_index, stored, stream)
            service = cls(settings, store, stream, begun, stored, state.last_sequence, kernels, new_index)
            await service._follow()
        except BaseException:
            await stream.close()
            await store.close()
            raise
        log.info(
            "catalog.started", stream=stored.name, stored=stored.place.sequence, stream_end=state.last_sequence,
            reading_after=begun.after.sequence, residencies=begun.held.residency_count(), blind=len(begun.projector.troubles()),
        )  # fmt: skip
        return service

    async def close(self) -> None:
        """Stop following, store what is left, write a last checkpoint, close the connections. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        tasks = [*self._tasks, *self._asking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                if self._reader is not None:
                    await self._reader.close()
                if self.failure is None:
                    await self._storing.flush()
        except (TimeoutError, KvbmError) as error:
            log.warning(
                "catalog.closed_early", why=str(error), stored=self._storing.stored, read=self._projector.sequence
            )
        try:
            async with asyncio.timeout(LAST_CHECKPOINT_S):
                if self._checkpointer is not None and self.failure is None:
                    await self._checkpointer.write()
                if self._archive is not None:
                    await self._archive.close()
        except TimeoutError:
            log.warning("catalog.closed_early", why="the last checkpoint was not written in time")
        await self._stream.close()
        await self._store.close()

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the stream was read up to its end as of the start, and live instances were whole then, or had time to be."""
        return self._is_ready and self.failure is None

    def readiness(self) -> ReadyAnswer:
        """Readiness, and what does not work."""
        reason = ""
        if self.failure is not None:
            reason = f"the catalog cannot go on: {self.failure}"
        elif self._caught_up_s is not None and not self._is_ready:
            names = ", ".join(sorted(self._unhealed())[:5])
            reason = f"the stream is read; waiting for rounds of doubtful instances: {names}"
        elif not self._is_ready:
            reason = f"reading the stream: at message {self._projector.sequence} of {self._start_end}"
        return ReadyAnswer(
            ready=not reason,
            reason=reason,
            degraded="; ".join([*([str(self._degraded)] if self._degraded else []), *self._staleness()]),
            stream_sequence=self._projector.sequence,
            lag_messages=self._lag_messages(),
        )

    def view_age_s(self) -> float:
        """How old the view is that answers rest on; 0 while everybody's silence counts and the stream is read to its end."""
        return round(self._freshness().age_s, 3)

    def _freshness(self) -> Freshness:
        now_s = time.monotonic()
        fresh = self._liveness.freshness(now_s)
        unconfirmed_s = self._confirmation.age_s(now_s)
        if unconfirmed_s > fresh.age_s:
            fresh = Freshness(unconfirmed_s, "so long nobody has confirmed that the stream is read to its end")
        is_old = (
            fresh.age_s >= self.settings.liveness_s / 2
        )  # before that, at the start, nobody could have fallen silent
        return fresh if is_old else Freshness(0.0, "")

    def _unhealed(self) -> list[InstanceId]:
        """Live instances that a round would make whole."""
        return [name for name in self._projector.troubles() if self._liveness.state(name) is LifeState.LIVE]

    async def ask_round(self, instance: InstanceId) -> bool | None:
        """Ask an instance for a round. Whether it has heard; None when there is no such instance. Raises StreamError."""
        cluster = self._cluster_of(instance)
        if cluster is None:
            return None
        return await self._stream.ask_round(cluster, instance)

    def _cluster_of(self, instance: InstanceId) -> str | None:
        row, pulse = self._projector.instance_row(instance), self._liveness.last(instance)
        return row.cluster if row is not None else pulse.heartbeat.cluster if pulse is not None else None

    def _staleness(self) -> list[str]:
        fresh, behind = self._freshness(), sorted(self._backlog.behind)
        found = [f"the view is {fresh.age_s:.1f} s old: {fresh.why}"] if fresh.why else []
        if behind:
            most_s = max(self._backlog.age_s(time.monotonic(), name) for name in behind)
            found.append(
                f"{len(behind)} instances may have decided what is not read, for {most_s:.1f} s: {', '.join(behind[:5])}"
            )
        return found

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
        answer = lookup(self._index, namespace, hashes)
        if self._backlog.behind:
            answer = msgspec.structs.replace(
                answer, instances=[self._doubted_if_behind(one, one.instance) for one in answer.instances]
            )
        return self._dated(answer)

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
        ranked = self._router.route(now_s, ask, self._index, candidates, pulses)
        return [self._doubted_if_behind(one, one.instance) for one in ranked]

    def block(self, namespace: NamespaceId, block: SequenceHash) -> BlockAnswer:
        """Who holds one block."""
        answer = locate(self._index, namespace, block)
        if self._backlog.behind:
            holders = [one if one.kind == "pool" else self._doubted_if_behind(one, one.name) for one in answer.holders]
            answer = msgspec.structs.replace(answer, holders=holders)
        return self._dated(answer)

    def _doubted_if_behind(self, answer: D, instance: str) -> D:
        is_behind = InstanceId(instance) in self._backlog.behind
        return msgspec.structs.replace(answer, doubtful=True) if is_behind else answer

    def _dated(self, answer: A) -> A:
        """The answer with the age of a view that is kept."""
        age_s = self.view_age_s()
        return msgspec.structs.replace(answer, view_age_s=age_s) if age_s else answer

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
        lag = self._lag_messages()
        newest_ns = self._projector.newest_wall_ns
        checkpoint = self._checkpointer.last if self._checkpointer is not None else None
        return CatalogNumbers(
            **msgspec.structs.asdict(self._projector.counters),
            rounds_asked=self._asker.asked,
            zombies=self._liveness.zombies,
            double_ids=self._liveness.double_ids,
            audits=self._audits,
            rows_read_again=self._storing.read_again,
            checkpoints=self._checkpointer.written if self._checkpointer is not None else 0,
            checkpoint_sequence=checkpoint.sequence if checkpoint is not None else 0,
            archive_sequence=self._archive.sequence if self._archive is not None else 0,
            archive_lost=self._archive.lost if self._archive is not None else 0,
            samples=self._archive.samples if self._archive is not None else 0,
            samples_lost=self._archive.samples_lost if self._archive is not None else 0,
            doubtful=len(self._projector.troubles()),
            behind=len(self._backlog.behind),
            behind_s=max((self._backlog.age_s(time.monotonic(), name) for name in self._backlog.behind), default=0.0),
            withheld=len(self._liveness.withheld()),
            ignored=len(self._ignored),
            view_age_s=self.view_age_s(),
            anomalies=self._index.anomalies(),
            stream_sequence=self._projector.sequence,
            stored_sequence=self._storing.stored,
            lag_messages=lag,
            lag_s=max(0.0, time.time() - newest_ns / 1e9) if lag and newest_ns else 0.0,
            ready=self.is_ready,
            degraded=bool(self._degraded),
            indexed_blocks=self._index.block_count(),
            residencies={
                (instance, tier.name): count
                for instance in self._index.instances()
                if (view := self._index.view(instance)) is not None
                for tier, count in view.counts.items()
            },
            claims=self._index.claim_counts(),
            put_bytes={
                (instance, namespace.hex()): sizes
                for instance in self._index.instances()
                if (pulse := self._liveness.last(instance)) is not None
                for namespace, sizes in pulse.heartbeat.put_bytes.items()
            },
        )

    def _serves(self, instance: InstanceId, wanted: NamespaceId, fields: Namespace | None) -> bool:
        """Whether an instance runs the model of a namespace; whoever has not said what it runs, may."""
        row = self._projector.instance_row(instance)
        if row is not None and row.engine == JANITOR:
            return False
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
            applied=heartbeat.applied or None if heartbeat is not None else None,
            doubtful=view is None or view.doubtful or instance in self._backlog.behind,
            partial=view is not None and view.partial,
            doubts=self._doubts(instance),
            round_asked_s=self._asker.age_s(now_s, instance),
            withheld=why.value if (why := self._liveness.why(instance)) is not None else "",
            trouble=heartbeat.trouble if heartbeat is not None else "",
            run=heartbeat.run if heartbeat is not None else "",
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

    def _doubts(self, instance: InstanceId) -> list[str]:
        """Why an instance is doubtful, in words."""
        view, trouble = self._index.view(instance), self._projector.troubles().get(instance)
        if (unreadable := self._projector.unreadable(instance)) is not None:
            return [unreadable.words()]
        if view is None:
            return ["nothing was read of it", *self._delays(instance)]
        doubts = trouble.reasons() if trouble is not None else ["its first round has not ended"] if view.missed else []
        if view.waiting:
            doubts.append("later events came first")
        if view.partial:
            doubts.append("the catalog is at its capacity")
        return doubts + self._delays(instance)

    def _delays(self, instance: InstanceId) -> list[str]:
        """That what an instance has decided is not read, in words."""
        if instance not in self._backlog.behind:
            return []
        decided, age_s = self._backlog.decided(instance), self._backlog.age_s(time.monotonic(), instance)
        if decided is None:
            return [f"nothing was heard of it for {age_s:.1f} s"]
        read = self._projector.position(instance)
        said = f"it has decided events up to offset {decided.offset} of epoch {decided.epoch}"
        return [f"{said}, and {age_s:.1f} s later only those up to offset {read.offset} of epoch {read.epoch} are read"]

    def _lag_messages(self) -> int:
        if self._reader is not None and self._reader.at_end:
            return 0
        return max(0, self._end - self._projector.sequence)

    # -- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        after, fingerprint = self._after
        self._reader = await self._stream.pull(after, self.settings.cluster, self.settings.connect_s, fingerprint)
        for instance in self._projector.instances():
            self._follow_life(instance)
        for name, work in (
            ("read", self._read(self._reader)),
            ("hear", self._hear()),
            ("tick", self._tick()),
            ("pulse", self._send_pulses()),
            ("rounds", self._ask_rounds()),
            ("store", self._storing.run()),
            ("end", self._watch_end()),
            ("sweep", self._sweep()),
            ("audit", self._audit()),
            ("doubt", self._find_unended()),
        ):
            self._spawn(name, work)
        if self._checkpointer is not None:
            self._spawn("checkpoint", self._checkpointer.run())
        if self._archive is not None:
            self._spawn("archive", self._archive.keep_frames(), is_vital=False)
            self._spawn("samples", self._archive.keep_samples(), is_vital=False)

    def _spawn(self, name: str, work: Coroutine[None, None, None], is_vital: bool = True) -> None:
        task = asyncio.create_task(work, name=f"catalog-{name}")
        task.add_done_callback(self._on_done if is_vital else self._on_side_done)
        self._tasks.append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is None:
            self.failure = error
            self.failed.set()
            log.error("catalog.failed", task=task.get_name(), why=str(error), exc_info=error)

    def _on_side_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._degraded.note(task.get_name(), f"{task.get_name()} has ended: {error}")
            log.error("catalog.task_failed", task=task.get_name(), why=str(error), exc_info=error)

    async def _read(self, reader: EventReader) -> None:
        begun = 0  # also at the start: between SQL's word and the reader's first the server may have gone
        while True:
            try:
                messages = await reader.fetch(FETCH_WAIT_S)
            except StreamError as error:
                self._degraded.note("NATS", str(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._degraded.clear("NATS")
            if reader.begun != begun:
                begun = reader.begun
                self._storing.check_place()
            parts = slices(messages)
            for part in parts[:-1]:
                await self._project(part, at_end=False)
            await self._project(parts[-1], at_end=reader.at_end)
            self._confirmation.read(max(self._projector.sequence, reader.reached))
            if not self._is_ready:
                self._get_ready(reader.at_end)

    def _get_ready(self, at_end: bool) -> None:
        now_s = time.monotonic()
        if self._caught_up_s is None and (self._projector.sequence >= self._start_end or at_end):
            self._caught_up_s = now_s
            self._doubted.set()
            log.info("catalog.caught_up", stream_sequence=self._projector.sequence)
        if self._caught_up_s is not None:
            has_waited = now_s - self._caught_up_s >= self.settings.whole_wait_s
            self._is_ready = has_waited or not self._unhealed()

    async def _project(self, messages: Sequence[StreamMessage], at_end: bool) -> None:
        async with self._applying:
            step = self._projector.step(time.monotonic(), messages, at_end)
            for instance in step.advanced:
                self._follow_life(instance)
            if step.renumbered:
                self._storing.begin_anew()
        self._storing.bound()
        if self._projector.found != self._found:
            self._found = self._projector.found
            self._doubted.set()
        if self._waiters and (step.advanced or step.gaps):
            async with self._moved:
                self._moved.notify_all()
        await asyncio.sleep(0)

    async def _sweep(self) -> None:
        """Free what the dead have left, a little at a time."""
        while True:
            has_more = self._index.sweep(SWEEP_PAGES)
            await asyncio.sleep(0 if has_more else SWEEP_EVERY_S)

    async def _audit(self) -> None:
        """Compare what memory holds with what was done, a little at a time; whoever differs is doubtful until a round."""
        while True:
            found = self._index.audit(AUDIT_PAGES)
            self._audits += found.is_whole
            for instance in found.differing:
                self._projector.counters.digest_divergence += 1
                self._projector.doubt(instance)
            if found.differing or found.damaged:
                self._doubted.set()
                log.warning(
                    "index.damaged", instances=sorted(found.differing), entries=found.damaged, blocks=found.blocks,
                    what_to_do="nothing: their rounds repair it; if it comes back, check the machine's memory",
                )  # fmt: skip
            await asyncio.sleep(AUDIT_PAUSE_S if found.is_whole else AUDIT_EVERY_S)

    async def _find_unended(self) -> None:
        """Find instances that are not whole though nothing of them was missed: their first round has not ended, or not well."""
        before: dict[InstanceId, Epoch] = {}
        while True:
            await asyncio.sleep(self.settings.ask_again_s)
            troubles = self._projector.troubles()
            now = {
                instance: view.epoch
                for instance in self._index.instances()
                if instance not in troubles and (view := self._index.view(instance)) is not None
                if view.missed and not view.stopped and not view.waiting
            }
            for instance, epoch in now.items():
                if before.get(instance) == epoch:
                    self._projector.want_round(instance)
                    self._doubted.set()
            before = now

    async def _ask_rounds(self) -> None:
        """Ask whoever a round would heal, at once and again."""
        while True:
            self._doubted.clear()
            if self._caught_up_s is not None:
                doubts = {
                    instance: Doubt(
                        trouble.found, once=(view := self._index.view(instance)) is not None and view.partial
                    )
                    for instance, trouble in self._projector.troubles().items()
                }
                for ask in self._asker.step(time.monotonic(), doubts, self._can_hear):
                    task = asyncio.create_task(self._ask(ask.instance), name=f"catalog-ask-{ask.instance}")
                    self._asking.add(task)
                    task.add_done_callback(self._asking.discard)
            try:
                async with asyncio.timeout(ROUNDS_STEP_S):
                    await self._doubted.wait()
            except TimeoutError:
                pass

    def _can_hear(self, instance: InstanceId) -> bool:
        is_gone = self._liveness.why(instance) is not None or self._liveness.state(instance) is LifeState.STOPPED
        return not is_gone and not self._projector.is_waiting(instance)

    async def _ask(self, instance: InstanceId) -> None:
        try:
            heard = await self.ask_round(instance)
        except StreamError as error:
            heard = False
            log.debug("round.not_asked", instance=instance, why=str(error))
        self._asker.answered(time.monotonic(), instance, bool(heard))
        trouble = self._projector.troubles().get(instance)
        log.info("round.asked", instance=instance, heard=bool(heard), reasons=trouble.reasons() if trouble else [])

    async def _hear(self) -> None:
        async for heartbeat in self._stream.watch_pulses(self.settings.cluster):
            if heartbeat.instance == self._own_name:
                self._live(OwnPulse())
                self._heard_after_s = max(self._heard_after_s, self._sent_pulses.get(heartbeat.wall_time_ns, 0.0))
            elif not is_catalog(heartbeat.instance):
                self._live(Heard(heartbeat))
                believed = self._liveness.last(heartbeat.instance)
                if believed is not None and believed.heartbeat == heartbeat:  # not of a zombie, nor of a second run
                    now_s, name = time.monotonic(), heartbeat.instance
                    self._projector.hear(now_s, heartbeat)
                    decided = Position(heartbeat.epoch, heartbeat.applied)
                    self._backlog.hear(now_s, self._heard_after_s, name, decided, self._projector.position(name))

    async def _tick(self) -> None:
        """Withhold the silent in time."""
        while True:
            self._live(Ticked())
            self._name_ignored()
            self._find_behind()
            await asyncio.sleep(self._liveness.tick_s)

    def _name_ignored(self) -> None:
        """Say whose heartbeats count for nothing: to who looks at the catalog, and to the instance itself."""
        if self._lag_messages():
            return  # what is not read yet may explain it
        ignored = self._liveness.ignored(time.monotonic())
        for instance in self._ignored.keys() - ignored.keys():
            self._degraded.clear(f"instance {instance}")
        for instance, heartbeat in ignored.items():
            holder = self._projector.holder(instance)
            why = (
                f"instance {instance} is ignored as run {heartbeat.run} of epoch {heartbeat.epoch}: on the stream its place "
                f"is that of run {holder.run or 'unknown'}, epoch {self._projector.position(instance).epoch}; stop one of "
                "the two, or give one another instance.id"
            )
            self._degraded.note(f"instance {instance}", why)
            if self._ignored.get(instance) != heartbeat:
                notice = Notice(instance=instance, cluster=heartbeat.cluster, run=heartbeat.run, why=why)
                self._inform(partial(self._stream.send_notice, notice), "notice.not_sent", instance)
        self._ignored = ignored

    def _find_behind(self) -> None:
        now_s, before = time.monotonic(), self._backlog.behind
        for instance in self._backlog.judge(now_s, self._projector.position):
            why = self._liveness.why(instance)
            is_left_out = why is not None or not self._projector.position(instance).epoch
            # it has died in its restart, or before anything of it was read
            is_dead = is_left_out and self._liveness.state(instance) is LifeState.SILENT
            has_stopped = why is Why.STOPPED  # its last heartbeat may come after its stop
            if is_dead or has_stopped or self._projector.unreadable(instance) is not None:
                self._backlog.leave_out(instance)
        behind = self._backlog.behind
        for instance in sorted(behind - before):
            log.warning("instance.behind", instance=instance, why=self._delays(instance)[0])
        for instance in sorted(before - behind):
            log.info("instance.caught_up", instance=instance)

    async def _send_pulses(self) -> None:
        """Pulses of the catalog's own: while they come back, silence is the silence of others."""
        cluster = self.settings.cluster or OWN_CLUSTER
        while True:
            pulse = Heartbeat(
                instance=self._own_name, cluster=cluster, epoch=Epoch(1), published=Offset(0),
                wall_time_ns=time.time_ns(), run=self._own_run,
            )  # fmt: skip
            self._sent_pulses[pulse.wall_time_ns] = time.monotonic()
            if len(self._sent_pulses) > _SENT_PULSES:
                del self._sent_pulses[next(iter(self._sent_pulses))]
            try:
                await self._stream.send_pulse(pulse)
            except StreamError as error:
                log.debug("catalog.pulse_not_sent", why=str(error))
            await asyncio.sleep(self._liveness.own_pulse_s)

    def _live(self, what: Input) -> None:
        """One step of liveness; what it decides is in answers from here on."""
        for effect in self._liveness.step(time.monotonic(), what):
            withheld = isinstance(effect, Withhold)
            if isinstance(effect, Withhold) and effect.why is not Why.RESTARTED:
                self._backlog.leave_out(effect.instance)  # it says no more, and is left out of answers
            why = effect.why.value if isinstance(effect, Withhold) else "heard"
            self._index.withhold(effect.instance, withheld)
            log.info(
                "instance.withheld" if withheld else "instance.returned",
                instance=effect.instance, epoch=effect.epoch, why=why,
            )  # fmt: skip

    def _inform(self, send: Callable[[], Coroutine[None, None, None]], failed: str, instance: InstanceId) -> None:
        """Send a word in the background; one that is lost costs nothing."""

        async def inform() -> None:
            try:
                await send()
            except StreamError as error:
                log.debug(failed, instance=instance, why=str(error))

        task = asyncio.ensure_future(inform())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def _follow_life(self, instance: InstanceId) -> None:
        """Tell liveness how far the stream has told of an instance, when that is news."""
        row = self._projector.instance_row(instance)
        if row is None:
            return
        epoch, holder = self._projector.position(instance).epoch, self._projector.holder(instance)
        is_unreadable = self._projector.unreadable(instance) is not None
        told = Followed(instance, epoch, row.state is InstanceState.STOPPED, holder.run, holder.life, is_unreadable)
        if self._told.get(instance) != told:
            self._told[instance] = told
            self._live(told)

    async def _watch_end(self) -> None:
        while True:
            await asyncio.sleep(ASK_END_S)
            asked_s, sequence = time.monotonic(), self._projector.sequence
            try:
                self._end = await self._stream.last_sequence(ASK_END_WAIT_S)
                self._confirmation.answered(asked_s, self._end, sequence)
            except StreamError as error:
                log.debug("stream.end_unknown", why=str(error))


async def _begin(
    settings: ServiceSettings, store: Store, kernels: Kernels, new_index: NewIndex, stored: Numbering, stream: EventStream
) -> _Beginning:  # fmt: skip
    """The newest checkpoint, or SQL's position with everybody in doubt, or nothing and the whole stream."""
    known = await store.instances()
    namespaces = [row.fields for row in await store.namespaces() if row.fields.id == row.id]
    positions = await store.instance_positions()  # before the claims: what they lie behind must be in those
    index = new_index(settings.capacity)
    loaded = None
    if settings.checkpoints and isinstance(index, Checkpointing):
        loaded = await load_newest(
            Path(settings.checkpoints), new_index, settings.capacity, stored.name, stored.place.sequence,
            lambda mark: still_holds(stream, mark),
        )  # fmt: skip
        index = loaded.held if loaded is not None else index
    projector = Projector(
        index, kernels.scan_frames, stored.name, stored.place.sequence, known=known, namespaces=namespaces
    )
    if loaded is not None:
        projector.restore(loaded.state, loaded.settled)
    elif stored.place.sequence and settings.checkpoints and isinstance(index, Checkpointing):
        projector.restore_blind(stored.place, positions.values())
    async for chunk in store.claims():
        index.claim(chunk.pool, chunk.namespace, chunk.hashes)
    return _Beginning(index, projector, projector.mark)


def _same_model(a: Namespace, b: Namespace) -> bool:
    """Whether an engine that serves one namespace serves the other: all but tenant, LoRA and KV group agree."""
    return msgspec.structs.replace(a, tenant="", lora="", kv_group=0) == msgspec.structs.replace(
        b, tenant="", lora="", kv_group=0
    )
