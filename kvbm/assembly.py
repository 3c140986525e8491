"""Settings → a manager, a catalog, a replay. The only place that joins technologies to protocols."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import structlog

from kvbm import _native
from kvbm.catalog.index import NewIndex
from kvbm.config import (
    HbmSettings,
    JournalSettings,
    NvmeSettings,
    ObjectSettings,
    PoolsSettings,
    Settings,
    check_gc,
    check_settings,
)
from kvbm.core.arguments import check_namespaces
from kvbm.core.backend import Kernels, LedgerTwin, NewFold, NewLedger
from kvbm.core.checks import check_plain_int, check_text, kind_of
from kvbm.core.errors import (
    ArgumentTypeError,
    CatalogError,
    ConfigError,
    KvbmError,
    MissingExtraError,
    PackageConflictError,
    StreamError,
)
from kvbm.core.events import JANITOR, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Reach, Tier
from kvbm.core.layout import blocks_of_object, slots_in
from kvbm.core.policy import OFFLOAD_POLICIES, OffloadPolicy, Share, WriteBudget
from kvbm.core.snapshots import Recovered
from kvbm.locate.base import Locator, Nowhere
from kvbm.locate.http import CatalogClient, HttpLocator
from kvbm.manager.base import BlockManager
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.manager.event_writer import FrameSink
from kvbm.manager.fair_queue import FairQueue
from kvbm.manager.journal_retention import DiskRetention, JournalRetention, MemoryRetention
from kvbm.manager.lasting import LastingNamespaces
from kvbm.manager.offload_queue import Offloader, PromptLimits
from kvbm.manager.options import ManagerOptions
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.prompt_samples import Samples
from kvbm.manager.publisher_port import Publishing
from kvbm.manager.recovery import recover
from kvbm.manager.snapshot_policy import Rounds
from kvbm.manager.staging import Staging
from kvbm.manager.transfer import Pools
from kvbm.pools.base import ObjectPool, SlotPool
from kvbm.pools.hbm.copy_queue import CopyQueue
from kvbm.pools.hbm.engine_owned import EngineHbm
from kvbm.pools.hbm.paged import NewSegmentCopies, PagedLayout, PagedTensor
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.pool import HostPool
from kvbm.pools.host.rows import NewArena
from kvbm.pools.memory import MemoryPool
from kvbm.pools.nvme.block_io import BlockEngine, BlockIoOptions, OpenEngine
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.object.coding import BlockCoder
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.keys import KeySource, keys_of_command, keys_of_file
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.pools.stores.base import Store
from kvbm.pools.stores.blobs import Limits
from kvbm.pools.stores.cache_tier import CachedStore
from kvbm.pools.stores.opening import open_store
from kvbm.streams.journal.history import Retention
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from kvbm.streams.memory import DiscardingSink, MemoryLog
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.permissions import catalog_inbox, instance_inbox
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher_ownership import unknown_runs
from kvbm.streams.publisher_thread import PublisherThread
from kvbm.streams.server import shared_server
from kvbm.telemetry.remarks import to_standard_error
from kvbm_ledger import conflict

if TYPE_CHECKING:
    from kvbm.janitor.report import Report

log = structlog.get_logger()

NATIVE = Kernels(
    "native", _native.sequence_hashes, _native.derived_hashes, _native.crc32c, _native.checksums,
    _native.joined_checksums, _native.encode_frame, _native.decode_frame, _native.scan_frames,
)  # fmt: skip
NATIVE_FOLD: NewFold = _native.Residencies
NATIVE_LEDGER: NewLedger = _native.Ledger
NATIVE_INDEX: NewIndex = _native.ClusterIndex


class Core(NamedTuple):
    """What a manager makes of events with: the native functions, or in tests the readable ones that specify them."""

    kernels: Kernels
    new_ledger: NewLedger
    new_fold: NewFold


NATIVE_CORE = Core(NATIVE, NATIVE_LEDGER, NATIVE_FOLD)
NATIVE_ARENA: NewArena = _native.Arena
OPEN_BLOCK_IO: OpenEngine = _native.BlockIo  # as `pools.block_io.OpenEngine`; it has no readable twin
RowCopier = _native.RowCopier  # as `pools.rows.RowCopies`
CODER = BlockCoder(_native.encode_blocks, _native.decode_blocks)  # of blocks in objects


def segment_copies(copier: _native.RowCopier) -> NewSegmentCopies:
    """Copies of blocks that lie in pieces, on the threads of a copier."""
    return lambda addresses, strides, sizes, slots: _native.SegmentTable(addresses, strides, sizes, slots, copier)


def copy_queue(layout: PagedLayout, threads: int = 0) -> CopyQueue:
    """Copies of an engine's blocks on a CPU, in a thread of their own that needs no GIL.

    Args:
        threads: that copy; 0: as many as help.
    """
    return _native.CopyQueue(_native.SegmentTable(*layout.segments, layout.slots, _native.RowCopier(threads)))


decode_columns = _native.decode_columns  # frames → arrays, as `core.columns.decode_columns`
random_lines_ns = _native.random_lines_ns  # what memory itself can do, for benchmarks
hash_prompts = _native.sequence_hashes_batch  # as `core.hashing.sequence_hashes_batch`


def open_unverified(
    fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
) -> BlockEngine:
    """As OPEN_BLOCK_IO, and nothing it reads is checked: for a measurement of what that costs, and for nothing else."""
    return _native.BlockIo(fds, slots, block_bytes, io, direct, depth, offload_share, verified=False)


M = TypeVar("M", bound=BlockManager)
_LEAST_QUEUE_BLOCKS = 8192
_CATALOG_WAIT_S = 2.0  # at the start, for the epoch it knows


def kvbm_version() -> str:
    """The installed version; "0" where the package is not installed."""
    try:
        return version("kvbm-ledger")
    except PackageNotFoundError:
        return "0"


def instance_folder(settings: Settings) -> Path:
    """Where an instance keeps its journal and its NVME pool."""
    return Path(settings.instance.data_dir) / "instances" / settings.instance.id


def nvme_paths(settings: Settings) -> list[Path]:
    """The stripes of an instance's NVME pool, in their order."""
    if settings.pools.nvme.folder:
        return [pod_file(settings)]
    named = [Path(part) for part in settings.pools.nvme.path.split(":") if part]
    return named or [instance_folder(settings) / "nvme.pool"]


def pod_file(settings: Settings) -> Path:
    """An instance's file in the folder of its pod."""
    return Path(settings.pools.nvme.folder) / f"{settings.instance.cluster}.{settings.instance.id}.pool"


def journal_folder(settings: Settings) -> Path:
    """Where an instance keeps its journal."""
    return instance_folder(settings) / "journal"


def open_manager(
    settings: Settings,
    namespaces: Sequence[Namespace],
    block_bytes: int,
    engine: str = "",
    object_pool: ObjectPool | None = None,
    wall_clock_ns: Callable[[], int] = time.time_ns,
    layers: Sequence[Sequence[PagedTensor]] = (),
    core: Core | None = None,
) -> Manager:
    """A running manager: journal locked, durable tiers recovered, a new epoch begun, publisher connected or connecting.

    NVME, the pod's folder and OBJECT hold blocks of namespaces that name a revision, and of no others: one warning says for whom they
    are not used, and `Manager.trouble` goes on saying it. Close it, or use it with `with`. A NATS server or a catalog that does not
    answer is no error: the manager serves, and `trouble` says what is missing.

    Args:
        settings: as `load_settings` gives them.
        namespaces: those the engine uses from the start; all of one block shape. At least one. `Manager.declare` takes further ones.
        block_bytes: bytes of one block, all layers of it; `KvShape.block_bytes`, or `paged_layout(layers).block_bytes`.
        engine: who embeds the manager, for the stream.
        object_pool: an object pool to use instead of the one `pools.object` names.
        wall_clock_ns: what frames and heartbeats are stamped with; a simulation has its own time.
        layers: the tensors an engine keeps its KV in: the HBM pool then lies there, and `pools.hbm` names no size. Each namespace has
            the layout that `paged_layout` gives them.
        core: for tests, which also run the readable one; None: NATIVE_CORE.
    Raises: ArgumentError: an argument that cannot be used. ConfigError, LayoutError, JournalError, PoolError, MissingExtraError,
        PackageConflictError, StreamError: what cannot be used, and what to do. ConfigError also where `pools.hbm.owner` is "engine":
        such a manager has other calls, and `open_engine_manager` opens it.
    """
    _check_opening(settings, namespaces, block_bytes, engine)
    if settings.pools.hbm.owner == "engine":
        raise ConfigError(
            'pools.hbm.owner is "engine"; such a manager is opened by open_engine_manager and has calls of its own: use that, or set'
            ' pools.hbm.owner to "kvbm"'
        )
    return _open_manager(Manager, settings, namespaces, block_bytes, engine, object_pool, wall_clock_ns, layers, core)


def open_engine_manager(
    settings: Settings,
    namespaces: Sequence[Namespace],
    block_bytes: int,
    engine: str = "",
    object_pool: ObjectPool | None = None,
    wall_clock_ns: Callable[[], int] = time.time_ns,
    core: Core | None = None,
) -> EngineHbmManager:
    """As `open_manager`, for an engine that owns HBM: `pools.hbm.owner` is "engine", and `pools.hbm` has as many slots as the engine blocks.

    Args:
        block_bytes: bytes of a row of HOST: a block of all ranks.
    Raises: as `open_manager`; ConfigError where `pools.hbm.owner` is not "engine".
    """
    _check_opening(settings, namespaces, block_bytes, engine)
    if settings.pools.hbm.owner != "engine":
        raise ConfigError(
            f'pools.hbm.owner is {settings.pools.hbm.owner!r}; an engine that keeps its KV needs "engine"'
        )
    return _open_manager(
        EngineHbmManager, settings, namespaces, block_bytes, engine, object_pool, wall_clock_ns, (), core
    )  # fmt: skip


def _check_opening(settings: Settings, namespaces: Sequence[Namespace], block_bytes: int, engine: str) -> None:
    """Refuse arguments that no manager can be opened with. Raises ArgumentError."""
    if not isinstance(settings, Settings):
        raise ArgumentTypeError("settings", f"is {kind_of(settings)}; give what load_settings returns")
    check_namespaces(namespaces)
    check_plain_int(block_bytes, "block_bytes", least=1)
    check_text(engine, "engine")


def _open_manager(
    new_manager: type[M],
    settings: Settings,
    namespaces: Sequence[Namespace],
    block_bytes: int,
    engine: str,
    object_pool: ObjectPool | None,
    wall_clock_ns: Callable[[], int],
    layers: Sequence[Sequence[PagedTensor]],
    core: Core | None,
) -> M:
    why = conflict()
    if why:
        raise PackageConflictError(why)
    to_standard_error()
    if not namespaces and engine != JANITOR:
        raise ConfigError("a manager needs at least one namespace; give that of the engine's model")
    check_settings(settings)
    lasting = LastingNamespaces(namespaces, all_may=engine == JANITOR)
    unused = _lasting_tiers(settings, object_pool)
    if why := lasting.why(unused):
        log.warning("namespace.unnamed", tiers=unused, notice=why)
    settings = _without_lasting(settings, namespaces, engine)
    core = core or NATIVE_CORE
    instance, kernels = InstanceId(settings.instance.id), core.kernels
    credentials = _credentials(settings, instance_inbox(settings.instance.cluster, instance))
    with ExitStack() as opened, ExitStack() as opened_pools:
        journal = None
        run = secrets.token_hex(8)
        if not settings.journal.in_memory:
            _make_data_dir(settings)
            journal = Journal.open(
                journal_folder(settings), instance, kernels, _journal_options(settings.journal), run=run
            )
            opened.callback(journal.close)
        pools = _open_pools(settings, namespaces, block_bytes, instance, object_pool, layers, opened_pools)
        ledger = core.new_ledger(
            _stated(pools), settings.pools.eviction, settings.journal.waiting_bytes, _shares(settings, block_bytes)
        )
        for namespace in namespaces:
            ledger.assign(namespace.id, namespace.tenant)
        locator: Locator = HttpLocator(settings.catalog.url) if settings.catalog.url else Nowhere()
        memory = MemoryLog() if journal is None and settings.nats.enabled else None
        frames = journal or memory
        url = _nats_url(settings, opened) if settings.nats.enabled else ""
        # What can be refused has been by now: an epoch that begins and states nothing would hide what NVME kept.
        on_stream = _epoch_on_stream(settings, instance, url, credentials) if url else Epoch(0)
        known = max(on_stream, _epoch_in_catalog(settings, instance))
        pool_id = _begin_epoch(ledger, settings, journal, pools, namespaces, engine, known, lasting, core.new_fold)
        retention: JournalRetention | None = None
        sink: FrameSink = DiscardingSink()
        room_bytes = 0
        if journal is not None:
            retention, sink = DiskRetention(journal, pool_id, settings.journal.sync_interval_s), journal
            room_bytes = settings.journal.capacity_bytes
        elif memory is not None:
            retention = sink = MemoryRetention(memory)
            room_bytes = settings.journal.waiting_bytes  # not refused beyond it, but restated so that it can go
        samples = Samples(settings.samples.rate) if settings.samples.rate and url else None
        manager = new_manager(
            instance, settings.instance.cluster, ledger, pools, sink, kernels,
            _offloader(settings, pools, namespaces, lasting), locator,
            ManagerOptions(
                settings.onboard.wait_s, settings.onboard.locate_s, settings.onboard.threads, settings.offload.threads,
                wall_clock_ns, retention=retention, rounds=Rounds(settings.rounds.least_s, room_bytes), samples=samples,
                run=run, has_stream=bool(url), budgets=_budgets(settings), lasting=lasting, unused=unused,
                staging=Staging(
                    settings.offload.staging_bytes, block_bytes, settings.onboard.threads, settings.offload.threads,
                    pools.object_blocks,
                ),
            ),
        )  # fmt: skip
        publishing = _publishing(settings, manager, frames, url, credentials) if frames is not None and url else None
        opened_pools.pop_all()  # the manager closes them, or leaves them to a copy that has not ended
        disowners = [journal.disown] if journal is not None else []
        manager.start(publishing, closers=[opened.pop_all().close], disowners=disowners)
        return manager


def run_catalog(settings: Settings) -> int:
    """Serve the catalog until SIGINT, SIGTERM or SIGHUP.

    Raises: ConfigError, StreamError, CatalogError, MissingExtraError: what does not answer, and what to do.
    """
    from kvbm.catalog.routing import RoutingSettings
    from kvbm.catalog.server import run
    from kvbm.catalog.service import ServiceSettings

    check_settings(settings)
    with ExitStack() as opened:
        credentials = _credentials(settings, catalog_inbox(settings.instance.cluster))
        url = _nats_url(settings, opened)
        if not (settings.catalog.database and settings.catalog.checkpoints):
            _make_data_dir(settings)
        costs = msgspec.structs.asdict(settings.catalog.routing)
        weights = msgspec.structs.asdict(settings.catalog.routing.tier_weights)
        service = ServiceSettings(
            nats_url=url,
            credentials=credentials,
            database_url=_database_url(settings),
            cluster=settings.instance.cluster,
            listen=settings.catalog.listen,
            connect_s=settings.nats.timeout_s,
            replicas=settings.nats.replicas,
            liveness_s=settings.catalog.liveness_s,
            tenant_secrets=settings.catalog.tenant_secrets,
            capacity=settings.catalog.capacity,
            checkpoints=settings.catalog.checkpoints or str(Path(settings.instance.data_dir) / "catalog-checkpoints"),
            checkpoint_every_s=settings.catalog.checkpoint_every_s,
            archive=settings.catalog.archive,
            routing=RoutingSettings(
                **costs | {"tier_weights": {tier.upper(): weight for tier, weight in weights.items()}}
            ),
        )
        say = f"follows {shown(url)}"
        run(
            service,
            NATIVE,
            NATIVE_INDEX,
            lambda at: print(f"kvbm-catalog: {at} {say}", file=sys.stderr, flush=True),
        )
    return 0


def run_gc(
    settings: Settings, dry_run: bool, tell: Callable[[Report], None], new_store: Callable[[], Store] | None = None
) -> int:
    """Run the janitor of the pool that `pools.object` names: once, or with `gc.every_s` again and again until interrupted.

    Args:
        tell: gets the report of each run.
        new_store: opens a store to use instead of the one `pools.object` names.
    Raises: ConfigError, MissingExtraError; once, also PoolError, CatalogError, StreamError, JanitorError: why it could not go on.
    """
    check_settings(settings)
    check_gc(settings.gc, settings.pools.object)
    if new_store is None and not settings.pools.object.url:
        raise ConfigError(
            "pools.object.url names no store, so there is nothing for a janitor; give the URL of the pool's store"
        )
    while True:
        try:
            tell(_gc_once(settings, dry_run, new_store or (lambda: _open_store(settings))))
        except (ConfigError, MissingExtraError):
            raise
        except KvbmError as error:
            if not settings.gc.every_s:
                raise
            log.warning("gc.ended", why=str(error), again_s=settings.gc.every_s)
        if not settings.gc.every_s:
            return 0
        time.sleep(settings.gc.every_s)


def _gc_once(settings: Settings, dry_run: bool, new_store: Callable[[], Store]) -> Report:
    from kvbm.janitor import ClaimsReader, Driver, DriverOptions, Janitor, Rules, TenantPart, run_once

    gc, wanted = settings.gc, settings.pools.object
    is_sealed = bool(wanted.keys or wanted.keys_command)
    rules = Rules(
        gc.ttl_s,
        gc.quota_bytes,
        gc.grace_s,
        gc.young_s,
        gc.skew_s,
        gc.lease_s,
        only_blocks=wanted.blocks,
        sealed=is_sealed,
        parts={
            tenant: TenantPart(share.weight, share.object_bytes or None) for tenant, share in settings.tenants.items()
        },
    )
    with ExitStack() as opened:
        store = new_store()
        opened.callback(store.close)
        if not settings.catalog.database:
            _make_data_dir(settings)
        claims = ClaimsReader(_database_url(settings))
        opened.callback(claims.close)
        pool = _pool_of(store.name, wanted.blocks, is_sealed, claims.pools())
        claims.use(pool)

        def folder(blocks: int) -> BlockObjects:
            envelopes = Sealing(_key_source(settings), blocks, header_bytes(blocks)) if is_sealed else None
            way = ObjectPoolOptions(
                blocks=blocks, envelopes=envelopes, name=pool, threads=1, deadline_s=wanted.timeout_s
            )
            return BlockObjects(store, 1, NATIVE.checksums, CODER, way)

        run, me = secrets.token_hex(8), janitor_id(pool)
        cluster = f"{settings.instance.cluster}-{hashlib.sha256(repr(claims.streams()).encode()).hexdigest()[:8]}"
        options = DriverOptions(cluster, run, wanted.timeout_s, rules.batch_s, dry_run)
        driver = Driver(store, claims, folder, lambda spaces: _open_janitor(settings, me, spaces, folder(1)), options)
        opened.callback(driver.close)
        holder = f"{me} of {settings.instance.cluster} on {socket.gethostname()}, process {os.getpid()}"
        report = run_once(Janitor(pool, holder, run, rules, dry_run), driver)
        log.info("gc.completed", pool=pool, claimed=report.found, deleted=report.deleted, kept=report.kept)
        return report


def _pool_of(store: str, blocks: int, is_sealed: bool, known: Collection[str]) -> str:
    """The pool's name among those that instances have said: a k that is what the shape gives anyway is not in it."""
    marked = pool_name(store, blocks, is_sealed)
    return marked if not blocks or marked in known else pool_name(store, 0, is_sealed)


def pool_name(store: str, blocks: int, is_sealed: bool) -> str:
    """What a pool over a store is called; `blocks`: 0 where k is what the shape gives."""
    marks = [f"blocks={blocks}"] if blocks else []
    marks += ["sealed"] if is_sealed else []
    return f"{store}#{','.join(marks)}" if marks else store


def _key_source(settings: Settings) -> KeySource:
    wanted = settings.pools.object
    return keys_of_file(wanted.keys) if wanted.keys else keys_of_command(wanted.keys_command)


def _open_store(settings: Settings) -> Store:
    """The store of the object pool. Raises ConfigError, MissingExtraError, PoolError: as `stores.opening.open_store`."""
    wanted = settings.pools.object
    return open_store(wanted.url, endpoint=wanted.endpoint, region=wanted.region, name=wanted.name, ttl_s=wanted.ttl_s)


def janitor_id(pool: str) -> InstanceId:
    """The instance a pool's janitor is in its cluster."""
    return InstanceId(f"janitor-{hashlib.sha256(pool.encode()).hexdigest()[:8]}")


def _open_janitor(settings: Settings, me: InstanceId, namespaces: Sequence[Namespace], objects: ObjectPool) -> Manager:
    """A manager that holds nothing and offloads nothing: what a janitor says things with."""
    replace = msgspec.structs.replace
    mine = replace(
        settings,
        instance=replace(settings.instance, id=me),
        pools=PoolsSettings(hbm=HbmSettings(slots=1, device="memory"), object=replace(settings.pools.object, url="")),
        offload=replace(settings.offload, host="never", nvme="never", object="never"),
        journal=replace(settings.journal, in_memory=True),
        samples=replace(settings.samples, rate=0.0),
        catalog=replace(settings.catalog, url=""),
    )
    return open_manager(mine, namespaces, objects.block_bytes, JANITOR, objects)


def catalog_client(url: str) -> CatalogClient:
    """A client of the catalog that hashes tokens natively. Raises CatalogError: the URL cannot be used."""
    return CatalogClient(url, hash_tokens=NATIVE.sequence_hashes)


def _journal_options(settings: JournalSettings) -> JournalOptions:
    retention = Retention(settings.keep_s, settings.max_bytes or settings.capacity_bytes)
    return JournalOptions(
        settings.fsync, settings.segment_bytes, settings.capacity_bytes, settings.sync_interval_s, retention
    )


def _publishing(
    settings: Settings, manager: BlockManager, frames: Journal | MemoryLog, url: str, credentials: Credentials
) -> Publishing:
    """A publisher that has begun."""

    async def connect(url: str, timeout_s: float) -> NatsStream:
        return await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)

    publisher = PublisherThread(
        frames, url, settings.instance.cluster, manager.instance, manager.publisher_port, settings.nats.heartbeat_s,
        connect, window_bytes=settings.nats.window_bytes, linger_s=settings.nats.linger_s,
        runs=frames.runs if isinstance(frames, Journal) else unknown_runs,
    )  # fmt: skip
    publisher.start()
    return Publishing(
        publisher.notify, lambda: publisher.published, publisher.stop, publisher.round_began, lambda: publisher.trouble
    )


def _epoch_on_stream(settings: Settings, instance: InstanceId, url: str, credentials: Credentials) -> Epoch:
    """The last epoch the stream has of this instance; 0 when it has none, or does not answer within `nats.timeout_s`.

    A journal that was lost, or kept in memory, would begin again with an epoch whose offsets the stream has seen; the stream
    would then pass for ahead and hide the new events.
    """
    found: list[Epoch] = []
    cluster, timeout_s = settings.instance.cluster, settings.nats.timeout_s

    async def ask() -> Epoch:
        async with asyncio.timeout(timeout_s):
            stream = await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)
            try:
                tail = await stream.tail(cluster, instance, timeout_s)
                fence = await stream.fence(cluster, instance, timeout_s)
                return max(tail.end.epoch if tail else Epoch(0), fence.epoch if fence else Epoch(0))
            finally:
                await stream.close()

    def run() -> None:
        try:
            found.append(asyncio.run(ask()))
        except (StreamError, TimeoutError) as error:
            log.warning(
                "instance.stream_unasked", why=str(error) or f"no answer within {timeout_s:g} s", url=shown(url)
            )

    asking = threading.Thread(
        target=run, name=f"kvbm-epoch-{instance}", daemon=True
    )  # the engine may have a loop of its own
    asking.start()
    asking.join(timeout_s + 1.0)
    return found[0] if found else Epoch(0)


def _epoch_in_catalog(settings: Settings, instance: InstanceId) -> Epoch:
    """The last epoch the catalog has read of this instance; 0 when it has none, or does not answer soon.

    The stream forgets with age, also the fence; the catalog does not, and would ignore an epoch it takes for an old one.
    """
    if not settings.catalog.url:
        return Epoch(0)
    client = CatalogClient(settings.catalog.url, min(_CATALOG_WAIT_S, settings.nats.timeout_s))
    try:
        found = client.instance(instance)
    except CatalogError as error:
        log.info("instance.catalog_unasked", why=str(error))
        return Epoch(0)
    finally:
        client.close()
    return Epoch(found.epoch if found is not None else 0)


def _begin_epoch(
    ledger: LedgerTwin,
    settings: Settings,
    journal: Journal | None,
    pools: Pools,
    namespaces: Sequence[Namespace],
    engine: str,
    known: Epoch,
    lasting: LastingNamespaces,
    new_fold: NewFold,
) -> str:
    """Start the ledger in a new epoch. Returns the name of the durable pool it speaks of, "" for none."""
    recovered: dict[Tier, list[Recovered]] = {}
    epoch, pool_id = Epoch(known + 1), ""
    if journal is not None:
        nvme = pools.slots.get(Tier.NVME)
        pool_id = nvme.pool_id if isinstance(nvme, NvmePool) else ""
        if nvme is not None:
            found = recover(journal, Tier.NVME, nvme.slots, pool_id, new_fold)
            recovered[Tier.NVME] = [one for one in found if not lasting.must_not(one.namespace)]
        if isinstance(nvme, NvmePool) and nvme.hints is not None and nvme.hints.is_new:
            for namespace, run in groupby(recovered[Tier.NVME], key=lambda one: one.namespace):
                kept = list(run)
                nvme.hints.note([one.slot for one in kept], namespace, b"".join(one.hash for one in kept))
        epoch = Epoch(max(journal.epoch, known) + 1)
    ledger.start(epoch, namespaces, settings.instance.topology, engine, kvbm_version(), recovered)
    if journal is not None:  # nobody has taken an event yet
        journal.begin_epoch(epoch, pool_id, ledger.applied)
    log.info(
        "instance.started",
        instance=settings.instance.id,
        epoch=epoch,
        recovered_blocks=len(recovered.get(Tier.NVME, [])),
    )
    return pool_id


def _credentials(settings: Settings, inbox: str) -> Credentials:
    """How this process proves itself to the stream. Raises ConfigError, MissingExtraError: what cannot be used."""
    nats = settings.nats
    credentials = Credentials(nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key, inbox)
    if nats.enabled:
        credentials.connect_options(nats.url)
    return credentials


def _nats_url(settings: Settings, opened: ExitStack) -> str:
    """Where the stream is: as set, else a server of our own. Raises ConfigError, StreamError, MissingExtraError."""
    if settings.nats.url:
        shown(settings.nats.url)  # refuses what is none
        return settings.nats.url
    _make_data_dir(settings)
    server = shared_server(Path(settings.instance.data_dir) / "nats", settings.nats.timeout_s)
    opened.callback(server.stop)
    return server.url


def _database_url(settings: Settings) -> str:
    return settings.catalog.database or f"sqlite+aiosqlite:///{Path(settings.instance.data_dir) / 'catalog.db'}"


def _make_data_dir(settings: Settings) -> None:
    """Raises ConfigError: the folder cannot be made."""
    try:
        Path(settings.instance.data_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"instance.data_dir {settings.instance.data_dir} cannot be used ({error.strerror}); give a folder"
        ) from None


def _lasting_tiers(settings: Settings, object_pool: ObjectPool | None) -> list[str]:
    """What is configured of the tiers that outlive the process or are shared."""
    nvme, named = settings.pools.nvme, []
    if nvme.slots or nvme.capacity_bytes:
        named.append(Tier.NVME.name)
    if nvme.folder:
        named.append("the pod's folder")
    if settings.pools.object.url or object_pool is not None:
        named.append(Tier.OBJECT.name)
    return named


def _without_lasting(settings: Settings, namespaces: Sequence[Namespace], engine: str) -> Settings:
    """Settings without tiers that no namespace may use: files that hold another model's blocks stay as they are."""
    if engine == JANITOR or any(namespace.revision.strip() for namespace in namespaces):
        return settings
    pools = msgspec.structs.replace(settings.pools, nvme=NvmeSettings(), object=ObjectSettings())
    return msgspec.structs.replace(settings, pools=pools)


def _first_named(namespaces: Sequence[Namespace]) -> Namespace:
    return next((one for one in namespaces if one.revision.strip()), namespaces[0])


def _open_pools(
    settings: Settings,
    namespaces: Sequence[Namespace],
    block_bytes: int,
    instance: InstanceId,
    object_pool: ObjectPool | None,
    layers: Sequence[Sequence[PagedTensor]],
    opened: ExitStack,
) -> Pools:
    slots: dict[Tier, SlotPool] = {}
    wanted, checksums = settings.pools, NATIVE.checksums
    is_engines = wanted.hbm.owner == "engine"
    in_memory = wanted.hbm.device == "memory" and not is_engines
    copier = RowCopier(1 if in_memory else wanted.host.copy_threads)  # HBM and HOST share its threads

    def keep(pool: SlotPool) -> None:
        slots[pool.tier] = pool
        opened.callback(pool.close)

    count = _slots(wanted.hbm.slots, wanted.hbm.capacity_bytes, block_bytes, "pools.hbm")
    if not count and not layers:
        raise ConfigError("pools.hbm has neither slots nor capacity_bytes; an instance needs an HBM pool")
    native = segment_copies(copier)
    if is_engines and layers:
        raise ConfigError('pools.hbm.owner is "engine", so the HBM pool lies in no tensors of ours; give no layers')
    if is_engines:
        keep(EngineHbm(count, block_bytes))
    elif layers:
        hbm = HbmPool.of_layers(layers, checksums, native)
        keep(hbm)
        _check_layers(hbm, count, block_bytes, namespaces)
    elif in_memory:
        keep(MemoryPool(Tier.HBM, count, block_bytes, checksums))
    else:
        keep(HbmPool(count, block_bytes, checksums, wanted.hbm.device, native))
    if count := _slots(wanted.host.slots, wanted.host.capacity_bytes, block_bytes, "pools.host"):
        if in_memory:
            keep(MemoryPool(Tier.HOST, count, block_bytes, checksums))
        else:
            host = HostPool(
                count, block_bytes, NATIVE_ARENA, copier,
                huge_pages=wanted.host.huge_pages, numa_node=wanted.host.numa_node,
            )  # fmt: skip
            if host.notice:
                log.warning("pool.opened", tier="HOST", notice=host.notice)
            keep(host)
    block_io = BlockIoOptions(wanted.nvme.io, wanted.nvme.direct, wanted.nvme.depth, wanted.nvme.offload_share)
    if count := _slots(wanted.nvme.slots, wanted.nvme.capacity_bytes, block_bytes, "pools.nvme"):
        nvme = NvmePool(
            nvme_paths(settings),
            count,
            block_bytes,
            _first_named(namespaces),
            instance,
            checksums,
            OPEN_BLOCK_IO,
            block_io,
            Reach.POD if wanted.nvme.folder else Reach.INSTANCE,
        )
        if nvme.notice:
            log.info("pool.opened", tier="NVME", paths=[str(path) for path in nvme.paths], notice=nvme.notice)
        keep(nvme)
    pod = None
    if wanted.nvme.folder:
        own = slots.get(Tier.NVME)
        pod = PodFolder(
            pod_file(settings),
            settings.instance.cluster,
            block_bytes,
            _first_named(namespaces),
            checksums,
            OPEN_BLOCK_IO,
            own.hints if isinstance(own, NvmePool) else None,
            block_io,
        )
        opened.callback(pod.close)
        pod.start()
    objects = object_pool
    if objects is None and wanted.object.url:
        objects = open_objects(settings, namespaces, block_bytes)
        opened.callback(objects.close)
    return Pools(slots, objects, pod)


def open_objects(settings: Settings, namespaces: Sequence[Namespace], block_bytes: int) -> BlockObjects:
    """The object pool that `pools.object` names, for blocks of one shape.

    Its name says what keeps it from meeting another pool in the same store: a k that is not the usual one, and encryption.

    Args:
        namespaces: at least one.
    Raises: ConfigError, PoolError, MissingExtraError: what cannot be used, and what to do.
    """
    wanted, usual = settings.pools.object, blocks_of_object(block_bytes, namespaces[0].block_tokens)
    blocks = wanted.blocks or usual
    limits = Limits(requests_in_flight=wanted.requests)

    def on_trouble(message: str) -> None:
        log.warning("object.troubled", why=message)

    sealing = None
    if wanted.keys or wanted.keys_command:
        sealing = Sealing(_key_source(settings), blocks, header_bytes(blocks), on_trouble)
        sealing.check(namespaces)
    with ExitStack() as opened:
        store = open_store(
            wanted.url, endpoint=wanted.endpoint, region=wanted.region, name=wanted.name, ttl_s=wanted.ttl_s,
            limits=limits,
        )  # fmt: skip
        opened.callback(store.close)
        for notice in getattr(store, "remarks", ()):
            log.info("pool.opened", tier="OBJECT", name=store.name, notice=notice)
        if wanted.front:
            store = CachedStore(open_store(wanted.front, ttl_s=wanted.ttl_s, limits=limits), store, on_trouble)
            opened.callback(store.close)
        name = pool_name(store.name, blocks if blocks != usual else 0, sealing is not None)
        options = ObjectPoolOptions(
            blocks=blocks,
            namespaces=namespaces,
            compressed=wanted.compression == "auto",
            envelopes=sealing,
            look_s=wanted.look_s,
            name=name,
            deadline_s=wanted.timeout_s,
            on_trouble=on_trouble,
        )
        pool = BlockObjects(store, block_bytes, NATIVE.checksums, CODER, options)
        opened.pop_all()
        return pool


def _check_layers(hbm: HbmPool, slots: int, block_bytes: int, namespaces: Sequence[Namespace]) -> None:
    """Hold what was said of an engine's tensors to what they are. Raises ConfigError: a namespace would share other blocks' bytes."""
    if slots not in (0, hbm.slots):
        raise ConfigError(
            f"pools.hbm has {slots} slots, the engine's tensors {hbm.slots}; leave slots and capacity_bytes out"
        )
    if block_bytes != hbm.block_bytes:
        raise ConfigError(
            f"blocks of {block_bytes} bytes are wanted, those of the engine's tensors have {hbm.block_bytes}"
        )
    for namespace in namespaces:
        if namespace.layout != hbm.layout:
            raise ConfigError(
                f"namespace of model {namespace.model!r} has the layout {namespace.layout!r}, the engine's tensors have"
                f" {hbm.layout!r}; give it paged_layout(layers).layout"
            )


def _slots(slots: int, capacity_bytes: int, block_bytes: int, key: str) -> int:
    return slots_in(capacity_bytes, block_bytes, key) if capacity_bytes else slots


def _stated(pools: Pools) -> list[PoolStated]:
    stated = [PoolStated(pool.tier, pool.slots, pool.block_bytes, pool.reach) for pool in pools.slots.values()]
    if pools.object is not None:
        stated.append(PoolStated(Tier.OBJECT, 0, pools.object.block_bytes, Reach.CLUSTER, pools.object.name))
    return stated


def _offloader(
    settings: Settings, pools: Pools, namespaces: Sequence[Namespace], lasting: LastingNamespaces
) -> Offloader:
    names = {Tier.HOST: settings.offload.host, Tier.NVME: settings.offload.nvme, Tier.OBJECT: settings.offload.object}
    there = {tier: True for tier in pools.slots} | ({Tier.OBJECT: True} if pools.object is not None else {})
    policies: dict[Tier, OffloadPolicy] = {
        tier: OFFLOAD_POLICIES[name]() for tier, name in names.items() if tier in there and name != "never"
    }
    fair = FairQueue(
        {tenant: share.weight for tenant, share in settings.tenants.items()}, {n.id: n.tenant for n in namespaces}
    )
    slots = {tier: pool.slots for tier, pool in pools.slots.items()}
    every_block = max(_LEAST_QUEUE_BLOCKS, slots[Tier.HBM] + 2 * slots.get(Tier.HOST, 0))
    quotas = {share.tenant: share.quota_slots for share in _shares(settings, pools.slots[Tier.HBM].block_bytes)}
    return Offloader(
        policies, settings.offload.queue_blocks or every_block, object_blocks=pools.object_blocks, fair=fair,
        engine_hbm=settings.pools.hbm.owner == "engine", limits=PromptLimits(slots, quotas),
        waiting_objects=max(_LEAST_QUEUE_BLOCKS, every_block // pools.object_blocks), may_last=lasting.may,
    )  # fmt: skip


def _shares(settings: Settings, block_bytes: int) -> list[Share]:
    """What tenants may have. Raises ConfigError: a quota that holds not one block."""
    shares = []
    for tenant, wanted in sorted(settings.tenants.items()):
        quotas = {Tier.HOST: ("host_bytes", wanted.host_bytes), Tier.NVME: ("nvme_bytes", wanted.nvme_bytes)}
        for name, quota_bytes in quotas.values():
            if 0 < quota_bytes < block_bytes:
                raise ConfigError(
                    f"tenants.{tenant}.{name} is {quota_bytes}; a block has {block_bytes} bytes; raise it, or 0 for no limit"
                )
        quota_slots = {tier: quota_bytes // block_bytes for tier, (_, quota_bytes) in quotas.items() if quota_bytes}
        shares.append(Share(tenant, wanted.weight, quota_slots))
    return shares


def _budgets(settings: Settings) -> dict[Tier, WriteBudget]:
    budgets = {
        Tier.NVME: settings.pools.nvme.write_budget_bytes_s, Tier.OBJECT: settings.pools.object.write_budget_bytes_s,
    }  # fmt: skip
    return {tier: WriteBudget(bytes_s) for tier, bytes_s in budgets.items() if bytes_s}
