"""The catalog without its HTTP: starts its parts, composes them, and stops them.

At the start the index comes from the newest checkpoint, and the rest from the stream after it. Without one, an index
that could have had one begins where SQL stands, with every instance suspect, and asks them all for a snapshot; else the
stream is read from its first message. Claims come from SQL in any case. What SQL has is not stored again, so that
reading twice is harmless. From then on index and SQL go their own speed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Set
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import msgspec

from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.answers.queries import Queries
from kvbm.catalog.answers.watches import WatchedCluster, Watches
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.archive import Archive
from kvbm.catalog.follow.checkpoints import Checkpointer, Checkpointing, load_newest
from kvbm.catalog.follow.follower import StreamFollower
from kvbm.catalog.follow.forgetting import Forgetting
from kvbm.catalog.follow.freed_memory import give_back_after_backlogs, give_back_freed
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.lag import StreamLag
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.snapshots import ASK_AGAIN_S, SnapshotRequests
from kvbm.catalog.follow.sql_writer import CLAIMS_EVERY_S, Numbering, SqlWriter, WriterOptions, numbering
from kvbm.catalog.follow.upkeep import IndexUpkeep
from kvbm.catalog.follow.usage_retention import keep_usage
from kvbm.catalog.history.past import HistoryOptions, PastAnswers
from kvbm.catalog.index.change_log import ChangeLog, RecordedIndex
from kvbm.catalog.index.cluster_index import ClusterIndex, NewIndex
from kvbm.catalog.members.downtime import FORGET_S
from kvbm.catalog.members.liveness import LIVENESS_S
from kvbm.catalog.routing.route_sharing import RouteSharing
from kvbm.catalog.sql.store import SqlStore
from kvbm.config.settings import LimitSettings, RoutingSettings
from kvbm.core.answers import ReadyAnswer
from kvbm.core.backend import Backend
from kvbm.core.errors import KvbmError
from kvbm.core.ids import InstanceId
from kvbm.core.parts import ALL_PARTS, words_of
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventReader, EventStream, Mark, still_holds
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.messages import NewMessages, ReadableMessages
from kvbm.streams.nats.stream import NatsStream
from kvbm.tenant_secrets import TenantSecrets

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import Tracing

log = SafeLog()

CLOSE_WAIT_S = 5.0
LAST_CHECKPOINT_S = 8.0


Companion: TypeAlias = "Callable[[CatalogService], Coroutine[None, None, None]]"


class TenantLimits(NamedTuple):
    """What a tenant may have, as the settings say: in each instance's pool, and in object pools; 0: no limit."""

    host_bytes: int = 0
    nvme_bytes: int = 0
    object_bytes: int = 0


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a catalog needs to run.

    Attributes:
        cluster: the one to follow; None for all.
        listen: host:port; port 0 takes a free one. unix_socket: a path to listen on too; "" for none.
        connect_s: how long NATS and the database have to answer at the start.
        forget_s: an instance that is gone for so long, in time in which a catalog listens, is forgotten.
        usage_keep_days: for so long SQL keeps what tenants have used.
        replicas: of the streams, if they are made here.
        store_every_s: pause between two transactions.
        used_s: a claim that SQL has is written again where it is newer by more than this.
        claims_every_s: how often claims in the index are held against those in the database.
        tenant_secrets: tenant → secret, for lookups by tokens. tenant_secrets_file: the same in a file that may change;
            "" for none.
        tenants: their limits, which are told and no more: instances and the janitor keep them.
        capacity: residencies and claims the index takes; more are refused and counted, and their instances marked
            partial.
        checkpoints: folder of the index's checkpoints; "" writes none.
        archive: folder where all frames are kept; "" keeps none.
        history: what keeps a history of the archive going; None keeps none.
        ask_again_s: between two requests to a suspect instance for a snapshot.
        whole_wait_s: how long readiness waits for live instances to be whole, once the stream was read.
        access: who may ask, and how the catalog knows.
        limits: what callers may ask.
        parts: instances in these are followed, the others not; see `core.parts`.
        new_messages: as in `NatsStream.connect`.
        tracing: makes spans of questions about prompts; None: nobody wants them.
        companions: what else runs beside the service until it is closed, by name. The service goes on without one that
            ends.
    """

    nats_url: str
    credentials: Credentials = Credentials()
    database_url: str | Path
    cluster: str | None = None
    listen: str = "127.0.0.1:7700"
    unix_socket: str = ""
    connect_s: float = 5.0
    replicas: int = 1
    liveness_s: float = LIVENESS_S
    forget_s: float = FORGET_S
    usage_keep_days: int = 400
    store_every_s: float = 0.1
    used_s: float = 0.0
    claims_every_s: float = CLAIMS_EVERY_S
    tenant_secrets: dict[str, str] = {}
    tenant_secrets_file: str = ""
    tenants: dict[str, TenantLimits] = {}
    routing: RoutingSettings = RoutingSettings()
    capacity: int = 100_000_000
    checkpoints: str = ""
    checkpoint_every_s: float = 60.0
    archive: str = ""
    history: HistoryOptions | None = None
    ask_again_s: float = ASK_AGAIN_S
    whole_wait_s: float = 10.0
    access: AccessOptions = AccessOptions()
    limits: LimitSettings = LimitSettings()
    parts: tuple[int, ...] = ALL_PARTS
    new_messages: NewMessages = ReadableMessages
    tracing: Tracing | None = None
    companions: tuple[tuple[str, Companion], ...] = ()


class _Beginning(NamedTuple):
    """What the start has loaded: a sequencer, the rows gathered of it, and where reading goes on from; and the log of
    its index.
    """

    sequencer: Sequencer
    rows: RowCollector
    after: Mark
    changes: ChangeLog


class CatalogService:
    """The running catalog. Belongs to one asyncio loop; `start` makes it.

    Attributes:
        failed: set when it cannot go on; `failure` has the reason.
        stream, reader, sequencer, index, rows, writer, store: from the stream to the index and to SQL. lag: what is not
            read yet.
        follower, heartbeats, requests, upkeep: what follows the stream and the heartbeats, asks for snapshots, and
            cares for the index.
        forgetting: forgets who is gone for long.
        queries: what it answers. changes, watches: what has changed lately, and who is told. secrets: of tenants, for
            lookups by tokens.
        past: answers questions about the past; None where no history is kept.
        begun_after: where reading has begun.
        tasks: those that run until it is closed.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        store: SqlStore,
        stream: EventStream,
        begun: _Beginning,
        stored: Numbering,
        end: int,
        reader: EventReader,
        backend: Backend,
        new_index: NewIndex,
    ) -> None:
        """Prefer `CatalogService.start`."""
        self.settings = settings
        self.secrets = TenantSecrets(settings.tenant_secrets, settings.tenant_secrets_file)
        self.backend = backend
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.store, self.stream, self.reader = store, stream, reader
        self.sequencer, self.rows, self.begun_after, self.changes = begun
        self.index = self.sequencer.index
        self.sequencer.known_namespaces.on_told = lambda told: self.rows.add_namespaces(told, time.time_ns())
        self.sequencer.known_namespaces.on_gone = self.rows.drop_namespaces
        self.lag = StreamLag(stream, reader, self.sequencer, end)
        self.degraded = Degraded()
        applying = asyncio.Lock()  # held while messages are applied, and while a checkpoint begins
        self.writer = SqlWriter(
            store,
            stream,
            self.sequencer,
            self.rows,
            stored,
            applying,
            self.degraded,
            lambda known, namespaces: Sequencer(new_index(1), backend.scan_frames, known, namespaces),
            WriterOptions(
                settings.cluster, settings.store_every_s, claims_every_s=settings.claims_every_s, parts=settings.parts
            ),
        )
        self.heartbeats = HeartbeatFollower(
            stream,
            self.sequencer,
            self.degraded,
            settings.cluster,
            settings.liveness_s,
            self.lag,
            settings.parts,
        )
        self.requests = SnapshotRequests(stream, self.sequencer, self.heartbeats, settings.ask_again_s)
        self.follower = StreamFollower(
            reader,
            self.lag,
            self.sequencer,
            self.heartbeats,
            self.requests,
            applying,
            self.degraded,
            settings.whole_wait_s,
            self.writer,
        )
        self.upkeep = IndexUpkeep(self.sequencer, self.requests.look)
        self.queries = Queries(
            self.sequencer,
            self.heartbeats,
            self.requests,
            self.lag.confirmation,
            settings.routing,
            settings.liveness_s,
            settings.parts,
        )
        self.sharing = RouteSharing(stream, self.queries.shared, self.heartbeats.own_cluster, self.heartbeats.own_name)
        self.changes.begin(self.sequencer.sequence, lambda: self.writer.name)
        self.watches = Watches(
            WatchedCluster(self.changes, self.sequencer, self.heartbeats, self.queries), settings.limits
        )
        self.forgetting = Forgetting(
            store,
            stream,
            self.sequencer,
            self.writer,
            self.heartbeats,
            self.lag,
            applying,
            self._let_go,
            settings.cluster,
            settings.forget_s,
        )
        self.checkpointer: Checkpointer | None = None
        if settings.checkpoints and isinstance(self.index, Checkpointing):
            self.checkpointer = Checkpointer(
                Path(settings.checkpoints),
                self.index,
                self.sequencer,
                applying,
                lambda: self.writer.name,
                self.degraded,
                settings.checkpoint_every_s,
            )
        self.archive: Archive | None = None
        if settings.archive:
            self.archive = Archive(Path(settings.archive), stream, settings.cluster, self.degraded, settings.parts)
        self.past: PastAnswers | None = None
        if settings.history is not None:
            self.past = PastAnswers(settings.history, settings.limits, self.degraded)
        self._is_closing = False

    @classmethod
    async def start(
        cls,
        settings: ServiceSettings,
        backend: Backend,
        new_index: NewIndex,
        stream: EventStream | None = None,
    ) -> CatalogService:
        """Connect, load what SQL has, and begin to follow.

        Args:
            stream: instead of the NATS of the settings; the service closes it.
        Raises: StreamError, CatalogError, MissingExtraError: what did not answer in time, in one sentence.
        """
        store = await SqlStore.open(settings.database_url, settings.connect_s, settings.used_s, settings.parts)
        try:
            stream = stream or await NatsStream.connect(
                settings.nats_url,
                settings.connect_s,
                credentials=settings.credentials,
                replicas=settings.replicas,
                new_messages=settings.new_messages,
            )
        except BaseException:
            await store.close()
            raise
        try:
            state = await stream.state(settings.connect_s)
            stored = await numbering(store, settings.cluster, state, stream, parts=settings.parts)
            begun = await _begin(settings, store, backend, new_index, stored, stream)
            after, fingerprint = begun.after
            reader = await stream.pull(after, settings.cluster, settings.connect_s, fingerprint, settings.parts)
            service = cls(settings, store, stream, begun, stored, state.last_sequence, reader, backend, new_index)
            service._spawn_all()
        except BaseException:
            await stream.close()
            await store.close()
            raise
        log.info(
            "catalog.started",
            stream=stored.name,
            stored=stored.place.sequence,
            stream_end=state.last_sequence,
            reading_after=begun.after.sequence,
            residencies=begun.sequencer.index.residency_count(),
            blind=len(begun.sequencer.suspicions.by_instance),
        )
        return service

    async def close(self) -> None:
        """Stop following, store what is left, write a last checkpoint, close the connections. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self.watches.close()
        tasks = [*self.tasks, *self.requests.sending, *self.heartbeats.sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.past is not None:
            await self.past.close()
        self.follower.close()
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self.reader.close()
                if self.failure is None:
                    await self.writer.flush()
        except (TimeoutError, KvbmError) as error:
            log.warning("catalog.closed_early", why=str(error), stored=self.writer.stored, read=self.sequencer.sequence)
        try:
            async with asyncio.timeout(LAST_CHECKPOINT_S):
                if self.checkpointer is not None and self.failure is None:
                    await self.checkpointer.write()
                if self.archive is not None:
                    await self.archive.close()
        except TimeoutError:
            log.warning("catalog.closed_early", why="the last checkpoint was not written in time")
        await self.stream.close()
        await self.store.close()
        log.info("catalog.stopped", stream=self.writer.name, read=self.sequencer.sequence, stored=self.writer.stored)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the stream was read up to its end as of the start, and live instances were whole then, or had time to
        be.
        """
        return self.follower.is_ready and self.failure is None

    def readiness(self) -> ReadyAnswer:
        """Readiness, and what does not work."""
        reason = self.follower.why_unready()
        if self.failure is not None:
            reason = f"the catalog cannot go on: {self.failure}"
        return ReadyAnswer(
            ready=not reason,
            reason=reason,
            degraded="; ".join([*([str(self.degraded)] if self.degraded else []), *self.queries.staleness()]),
            stream_sequence=self.sequencer.sequence,
            lag_messages=self.lag.known_messages(time.monotonic()),
            parts=words_of(self.settings.parts),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _blocks_read(self) -> int:
        return self.sequencer.counters.blocks

    def _is_all_read(self) -> bool:
        return self.lag.known_messages(time.monotonic()) == 0

    def _let_go(self, instance: InstanceId) -> None:
        """An instance was forgotten."""
        self.rows.forget(instance)
        self.queries.forget(instance)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _spawn_all(self) -> None:
        for instance in self.sequencer.instances():
            self.heartbeats.on_progress(instance)
        for name, work in (
            ("read", self.follower.run()),
            ("hear", self.heartbeats.watch()),
            ("tick", self.heartbeats.tick()),
            ("pulse", self.heartbeats.send_pulses()),
            ("snapshots", self.requests.run()),
            ("store", self.writer.run()),
            ("end", self.lag.watch()),
            ("sweep", self.upkeep.sweep()),
            ("audit", self.upkeep.audit()),
            ("give back", give_back_after_backlogs(self._blocks_read, self._is_all_read, give_back_freed)),
            ("suspicion", self.requests.find_unended()),
            ("forget", self.forgetting.run()),
            ("usage", keep_usage(self.store, self.settings.usage_keep_days)),
        ):
            self._spawn(name, work)
        for name, work in (("tell", self.sharing.tell()), ("listen", self.sharing.listen())):
            self._spawn(name, work, is_vital=False)
        if self.checkpointer is not None:
            self._spawn("checkpoint", self.checkpointer.run())
        if self.archive is not None:
            self._spawn("archive", self.archive.keep_frames(), is_vital=False)
            self._spawn("samples", self.archive.keep_samples(), is_vital=False)
        if self.past is not None:
            self._spawn("history", self.past.keeper.run(), is_vital=False)
        for name, companion in self.settings.companions:
            self._spawn(name, companion(self), is_vital=False)

    def _spawn(self, name: str, work: Coroutine[None, None, None], is_vital: bool = True) -> None:
        task = asyncio.create_task(work, name=f"catalog-{name}")
        task.add_done_callback(self._on_done if is_vital else self._on_side_done)
        self.tasks.append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is None:
            self.failure = error
            self.failed.set()
            log.error("catalog.failed", task=task.get_name(), why=str(error), exc_info=error)

    def _on_side_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.degraded.note(task.get_name(), f"{task.get_name()} has ended: {error}")
            log.error("catalog.task_failed", task=task.get_name(), why=str(error), exc_info=error)


async def _begin(
    settings: ServiceSettings,
    store: SqlStore,
    backend: Backend,
    new_index: NewIndex,
    stored: Numbering,
    stream: EventStream,
) -> _Beginning:
    """The newest checkpoint, or SQL's position with everybody suspect, or nothing and the whole stream."""
    known = await store.instances()
    namespaces = [row.fields for row in await store.namespaces() if row.fields.id == row.id]
    marks = await store.forgotten(stored.name)
    positions = await store.instance_positions()  # before the claims: what they lie behind must be in those
    index = new_index(settings.capacity)
    loaded = None
    if settings.checkpoints and isinstance(index, Checkpointing):
        loaded = await load_newest(
            Path(settings.checkpoints),
            new_index,
            settings.capacity,
            stored.name.__eq__,
            stored.place.sequence,
            lambda mark: still_holds(stream, mark),
        )
        index = loaded.held if loaded is not None else index
    changes = ChangeLog(settings.limits.watch_bytes, backend.decode_frame)
    held = RecordedIndex(index, changes, lambda: sequencer.sequence)
    sequencer = Sequencer(cast(ClusterIndex, held), backend.scan_frames, known, namespaces)
    sequencer.on_run = held.note_run
    rows = RowCollector(stored.name, stored.place.sequence)
    if loaded is not None:
        sequencer.restore(loaded.state, loaded.settled)
        _drop_forgotten(sequencer, {row.id for row in known})
    elif stored.place.sequence and settings.checkpoints and isinstance(index, Checkpointing):
        rows.take(sequencer.restore_positions(stored.place, positions.values()))
    for mark in marks:
        if sequencer.spoke(mark.instance) <= mark.sequence:
            sequencer.drop(mark.instance)
            sequencer.expect(mark)
    async for chunk in store.claims():
        index.claim(chunk.pool, chunk.namespace, chunk.hashes)
    return _Beginning(sequencer, rows, sequencer.mark, changes)


def _drop_forgotten(sequencer: Sequencer, known: Set[InstanceId]) -> None:
    """Drop what a checkpoint has of instances that were forgotten since.

    SQL is never behind a checkpoint that is used, so it had the rows of each instance that the checkpoint has.
    """
    gone = [name for name in sequencer.followed if sequencer.position(name).epoch and name not in known]
    for instance in gone:
        sequencer.drop(instance)
    if gone:
        log.info("instances.forgotten", instances=gone, why="a checkpoint has them, SQL has them no more")
