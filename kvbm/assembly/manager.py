"""Settings → a manager on its journal and stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvbm.assembly.lending import Exchange, open_exchange
from kvbm.assembly.logs import log_style
from kvbm.assembly.native import NATIVE_CORE, NATIVE_METER, Core, ages_of
from kvbm.assembly.pools import instance_folder, journal_folder, open_pools
from kvbm.assembly.services import catalog_credentials, erasure_log, make_data_dir, nats_url, stream_credentials
from kvbm.assembly.start import OnStream, ask_stream, begin_epoch, epoch_in_catalog, kvbm_version
from kvbm.assembly.traces import open_tracing
from kvbm.config import JournalSettings, NvmeSettings, ObjectSettings, Settings, check_settings
from kvbm.core.arguments import check_namespaces
from kvbm.core.backend import LedgerProtocol
from kvbm.core.chain_statement import ATTRIBUTE, ChainStatement
from kvbm.core.checks import check_plain_int, check_text, kind_of
from kvbm.core.codec import USAGE_VERSION
from kvbm.core.errors import (
    ArgumentTypeError,
    ConfigError,
    PackageConflictError,
)
from kvbm.core.events import JANITOR, PoolStated
from kvbm.core.ids import InstanceId, Namespace, Reach, Tier
from kvbm.core.policy import NO_OFFLOAD, OFFLOAD_POLICIES, OffloadPolicy, Share, WriteBudget
from kvbm.erasure.start import WatchedErasures
from kvbm.erasure.watch import WatchOptions
from kvbm.locate.base import Locator, Nowhere
from kvbm.locate.locator import HttpLocator
from kvbm.manager.base import BlockManager
from kvbm.manager.copies.staging import Staging
from kvbm.manager.copies.transfer import Pools
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.manager.offload.fair_queue import FairQueue
from kvbm.manager.offload.queue import Offloader, PromptLimits
from kvbm.manager.options import ManagerOptions
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.record.event_writer import FrameSink
from kvbm.manager.record.journal_retention import DiskRetention, JournalRetention, MemoryRetention
from kvbm.manager.record.prompt_samples import Samples
from kvbm.manager.record.publisher_port import Publishing
from kvbm.manager.record.snapshot_policy import SnapshotPolicy
from kvbm.manager.record.usage_account import UsagePlan
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.pools.base import ObjectPool
from kvbm.pools.hbm.paged import PagedTensor
from kvbm.safe_log import SafeLog
from kvbm.streams.journal.history import Retention
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from kvbm.streams.memory import DiscardingSink, MemoryLog
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.permissions import Role
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher.ownership import unknown_runs
from kvbm.streams.publisher.thread import PublisherThread
from kvbm.telemetry.stderr_log import to_standard_error
from kvbm_ledger import conflict

if TYPE_CHECKING:
    pass

log = SafeLog()

M = TypeVar("M", bound=BlockManager)
_LEAST_QUEUE_BLOCKS = 8192
_CATALOG_WAIT_S = 2.0  # at the start, for the epoch it knows


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

    NVME, the pod's folder and OBJECT hold blocks of namespaces that name a revision, and of no others: one warning says
    for whom they are not used, and `Manager.trouble` goes on saying it. Close it, or use it with `with`. A NATS server
    or a catalog that does not answer is no error: the manager serves, and `trouble` says what is missing.

    Args:
        settings: as `load_settings` gives them.
        namespaces: those the engine uses from the start; all of one block shape. At least one. `Manager.declare` takes
            further ones.
        block_bytes: bytes of one block, all layers of it; `KvShape.block_bytes`, or `paged_layout(layers).block_bytes`.
        engine: who embeds the manager, for the stream.
        object_pool: an object pool to use instead of the one `pools.object` names.
        wall_clock_ns: what frames and heartbeats are stamped with; a simulation has its own time.
        layers: the tensors an engine keeps its KV in: the HBM pool then lies there, and `pools.hbm` names no size. Each
            namespace has the layout that `paged_layout` gives them.
        core: for tests, which also run the readable one; None: NATIVE_CORE.
    Raises: ArgumentError: an argument that cannot be used. ConfigError, LayoutError, JournalError, PoolError,
        MissingExtraError, PackageConflictError, StreamError: what cannot be used, and what to do. ConfigError also
        where `pools.hbm.owner` is "engine": such a manager has other calls, and `open_engine_manager` opens it.
    """
    _check_opening(settings, namespaces, block_bytes, engine)
    if settings.pools.hbm.owner == "engine":
        raise ConfigError(
            'pools.hbm.owner is "engine"; such a manager is opened by open_engine_manager and has calls of its own: '
            "use that, or set"
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
    chain: ChainStatement | None = None,
) -> EngineHbmManager:
    """As `open_manager`, for an engine that owns HBM: `pools.hbm.owner` is "engine", and `pools.hbm` has as many slots
    as the engine blocks.

    Args:
        block_bytes: bytes of a row of HOST: a block of all ranks.
        chain: how the engine hashes tokens; None: it does not say, and catalogs find nothing for it by tokens.
    Raises: as `open_manager`; ConfigError where `pools.hbm.owner` is not "engine".
    """
    _check_opening(settings, namespaces, block_bytes, engine)
    if settings.pools.hbm.owner != "engine":
        raise ConfigError(
            f'pools.hbm.owner is {settings.pools.hbm.owner!r}; an engine that keeps its KV needs "engine"'
        )
    return _open_manager(
        EngineHbmManager, settings, namespaces, block_bytes, engine, object_pool, wall_clock_ns, (), core, chain
    )


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
    chain: ChainStatement | None = None,
) -> M:
    if why := conflict():
        raise PackageConflictError(why)
    if not namespaces and engine != JANITOR:
        raise ConfigError("a manager needs at least one namespace; give that of the engine's model")
    check_settings(settings)
    to_standard_error(log_style(settings.log))
    revisioned = RevisionedNamespaces(namespaces, all_may=engine == JANITOR)
    unused = _durable_tiers(settings, object_pool)
    if why := revisioned.why(unused):
        log.warning("namespace.unnamed", tiers=unused, notice=why)
    settings = _without_durable_tiers(settings, namespaces, engine)
    core = core or NATIVE_CORE
    instance, backend = InstanceId(settings.instance.id), core.backend
    credentials = stream_credentials(settings, Role.JANITOR if engine == JANITOR else Role.INSTANCE, instance)
    with ExitStack() as whole:
        opened, opened_pools = whole.enter_context(ExitStack()), whole.enter_context(ExitStack())
        journal = None
        run = secrets.token_hex(8)
        if not settings.journal.in_memory:
            make_data_dir(settings)
            options = _journal_options(settings.journal)
            journal = opened.enter_context(
                closing(Journal.open(journal_folder(settings), instance, backend, options, run=run))
            )
        tracing = open_tracing(settings, "kvbm", instance, kvbm_version()) if engine != JANITOR else None
        if tracing is not None:
            opened.callback(tracing.close)
        pools = open_pools(settings, namespaces, block_bytes, instance, object_pool, layers, opened_pools)
        ledger = core.new_ledger(
            _listed(pools), settings.pools.eviction, settings.journal.waiting_bytes, _shares(settings, block_bytes)
        )
        for namespace in namespaces:
            ledger.assign(namespace.id, namespace.tenant)
        locator = _locator(settings)
        memory = MemoryLog() if journal is None and settings.nats.enabled else None
        frames = journal or memory
        url = nats_url(settings, opened) if settings.nats.enabled else ""
        pools, exchange = open_exchange(settings, instance, namespaces, engine, ledger, pools, opened_pools)
        # What can be refused has been by now: an epoch that begins and states nothing would hide what NVME kept.
        on_stream = ask_stream(settings, instance, url, credentials) if url else OnStream()
        known = max(on_stream.epoch, epoch_in_catalog(settings, instance))
        folder = None if journal is None else instance_folder(settings)
        watched = WatchedErasures(instance, on_stream.erasures, revisioned, folder)
        stated = b"" if chain is None else chain.encoded()
        attributes = {ATTRIBUTE: stated} if stated else {}
        pool_id, plan = begin_epoch(
            ledger, exchange.lock, settings, journal, pools, namespaces, engine, known, watched, core, attributes
        )
        retention: JournalRetention | None = None
        sink: FrameSink = DiscardingSink()
        room_bytes = 0
        if journal is not None:
            room_bytes, interval_s = journal.fit(ledger.pools), settings.journal.sync_interval_s
            retention, sink = DiskRetention(journal, pool_id, interval_s, pools.note_epoch), journal
        elif memory is not None:
            retention = sink = MemoryRetention(memory)
            room_bytes = settings.journal.waiting_bytes  # not refused beyond it, but listed again so that it can go
        samples = Samples(settings.samples.rate) if settings.samples.rate and url else None
        manager = new_manager(
            instance,
            settings.instance.cluster,
            ledger,
            pools,
            sink,
            backend,
            _offloader(settings, pools, revisioned, ledger),
            locator,
            ManagerOptions(
                settings.onboard.wait_s,
                settings.onboard.locate_s,
                settings.onboard.threads,
                settings.offload.threads,
                wall_clock_ns,
                retention=retention,
                snapshots=SnapshotPolicy(settings.snapshots.least_s, room_bytes),
                samples=samples,
                run=run,
                has_stream=bool(url),
                salvage=plan,
                lock=exchange.lock,
                budgets=_budgets(settings),
                revisioned=revisioned,
                unused=unused,
                staging=Staging(
                    settings.offload.staging_bytes,
                    block_bytes,
                    settings.onboard.threads,
                    settings.offload.threads,
                    pools.object_blocks,
                    pins=pools.has_gpu,
                ),
                ages=ages_of(pools.slots),
                tracing=tracing,
                usage=_usage_plan(settings),
                chain=stated,
            ),
        )
        publishing = (
            _publishing(settings, manager, frames, url, credentials, opened_pools)
            if frames is not None and url
            else None
        )
        disowners = [*exchange.disowners, *([journal.disown] if journal is not None else [])]
        if tracing is not None:
            disowners.append(tracing.disown)
        erasing_url = url if engine != JANITOR else ""
        stoppers = _begin_exchange(settings, exchange, manager, opened_pools, watched, erasing_url, credentials)
        # Once it is the manager's, that closes it all, but leaves pools to a copy that has not ended.
        manager.start(publishing, [opened.close], disowners, stoppers, taken=whole.pop_all)
        return manager


def _usage_plan(settings: Settings) -> UsagePlan | None:
    if settings.journal.frame_version < USAGE_VERSION:
        return None
    return UsagePlan(NATIVE_METER, settings.journal.usage_every_s)


def _begin_exchange(
    settings: Settings,
    exchange: Exchange,
    manager: BlockManager,
    opened: ExitStack,
    watched: WatchedErasures,
    url: str,
    credentials: Credentials,
) -> list[Callable[[float], object]]:
    """Begin to lend and to read, once what is to be erased is held back; `url` is empty where nobody tells of that.

    Returns: what is to be called first when the manager closes, with how long to wait.
    """
    stoppers = []
    if url:
        options = WatchOptions(settings.erasure.poll_s, settings.erasure.hold_s)
        watching = watched.watching(manager.parts, lambda: erasure_log(settings, url, credentials), options)
        opened.callback(watching.stop)
        watching.start()
        stoppers.append(lambda _: watching.stop())
    return [*exchange.begin(manager, opened), *stoppers]


def _locator(settings: Settings) -> Locator:
    if not settings.catalog.url:
        return Nowhere()
    who, place = settings.instance.id, settings.instance.topology
    return HttpLocator(settings.catalog.url, catalog_credentials(settings), asker=who, topology=place)


def _journal_options(settings: JournalSettings) -> JournalOptions:
    retention = Retention(settings.keep_s, settings.max_bytes or settings.capacity_bytes)
    return JournalOptions(
        settings.fsync, settings.segment_bytes, settings.capacity_bytes, settings.sync_interval_s, retention
    )


def _publishing(
    settings: Settings,
    manager: BlockManager,
    frames: Journal | MemoryLog,
    url: str,
    credentials: Credentials,
    opened: ExitStack,
) -> Publishing:
    """A publisher that has begun; `opened` ends it, which else would go on to send signs of life."""

    async def connect(url: str, timeout_s: float) -> NatsStream:
        return await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)

    publisher = PublisherThread(
        frames,
        url,
        settings.instance.cluster,
        manager.instance,
        manager.publisher_port,
        settings.nats.heartbeat_s,
        connect,
        window_bytes=settings.nats.window_bytes,
        linger_s=settings.nats.linger_s,
        runs=frames.runs if isinstance(frames, Journal) else unknown_runs,
    )
    opened.callback(publisher.stop, 0.0)
    publisher.start()
    return Publishing(
        publisher.notify,
        lambda: publisher.published,
        publisher.stop,
        publisher.snapshot_began,
        lambda: publisher.trouble,
    )


def _durable_tiers(settings: Settings, object_pool: ObjectPool | None) -> list[str]:
    """What is configured of the tiers that outlive the process or are shared."""
    nvme, named = settings.pools.nvme, []
    if nvme.slots or nvme.capacity_bytes:
        named.append(Tier.NVME.name)
    if nvme.folder:
        named.append("the pod's folder")
    if settings.pools.object.url or object_pool is not None:
        named.append(Tier.OBJECT.name)
    return named


def _without_durable_tiers(settings: Settings, namespaces: Sequence[Namespace], engine: str) -> Settings:
    """Settings without tiers that no namespace may use: files that hold another model's blocks stay as they are."""
    if engine == JANITOR or any(namespace.revision.strip() for namespace in namespaces):
        return settings
    pools = msgspec.structs.replace(settings.pools, nvme=NvmeSettings(), object=ObjectSettings())
    return msgspec.structs.replace(settings, pools=pools)


def _listed(pools: Pools) -> list[PoolStated]:
    listed = [PoolStated(pool.tier, pool.slots, pool.block_bytes, pool.reach) for pool in pools.slots.values()]
    if pools.object is not None:
        listed.append(PoolStated(Tier.OBJECT, 0, pools.object.block_bytes, Reach.CLUSTER, pools.object.name))
    return listed


def _offloader(settings: Settings, pools: Pools, revisioned: RevisionedNamespaces, ledger: LedgerProtocol) -> Offloader:
    names = {Tier.HOST: settings.offload.host, Tier.NVME: settings.offload.nvme, Tier.OBJECT: settings.offload.object}
    there = {tier: True for tier in pools.slots} | ({Tier.OBJECT: True} if pools.object is not None else {})
    policies: dict[Tier, OffloadPolicy] = {
        tier: OFFLOAD_POLICIES[name]() for tier, name in names.items() if tier in there and name != NO_OFFLOAD
    }
    fair = FairQueue({tenant: share.weight for tenant, share in settings.tenants.items()}, revisioned.tenants)
    slots = {tier: pool.slots for tier, pool in pools.slots.items()}
    every_block = max(_LEAST_QUEUE_BLOCKS, slots[Tier.HBM] + 2 * slots.get(Tier.HOST, 0))
    quotas = {share.tenant: share.quota_slots for share in _shares(settings, pools.slots[Tier.HBM].block_bytes)}
    return Offloader(
        policies,
        ledger.lacking,
        settings.offload.queue_blocks or every_block,
        object_blocks=pools.object_blocks,
        fair=fair,
        engine_hbm=settings.pools.hbm.owner == "engine",
        limits=PromptLimits(slots, quotas),
        waiting_objects=max(_LEAST_QUEUE_BLOCKS, every_block // pools.object_blocks),
        may_be_durable=revisioned.may,
    )


def _shares(settings: Settings, block_bytes: int) -> list[Share]:
    """What tenants may have. Raises ConfigError: a quota that holds not one block."""
    shares = []
    for tenant, wanted in sorted(settings.tenants.items()):
        quotas = {Tier.HOST: ("host_bytes", wanted.host_bytes), Tier.NVME: ("nvme_bytes", wanted.nvme_bytes)}
        for name, quota_bytes in quotas.values():
            if 0 < quota_bytes < block_bytes:
                raise ConfigError(
                    f"tenants.{tenant}.{name} is {quota_bytes}; a block has {block_bytes} bytes; raise it, or 0 for no "
                    "limit"
                )
        quota_slots = {tier: quota_bytes // block_bytes for tier, (_, quota_bytes) in quotas.items() if quota_bytes}
        shares.append(Share(tenant, wanted.weight, quota_slots))
    return shares


def _budgets(settings: Settings) -> dict[Tier, WriteBudget]:
    budgets = {
        Tier.NVME: settings.pools.nvme.write_budget_bytes_s,
        Tier.OBJECT: settings.pools.object.write_budget_bytes_s,
    }
    return {tier: WriteBudget(bytes_s) for tier, bytes_s in budgets.items() if bytes_s}
