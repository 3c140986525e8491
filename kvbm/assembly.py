"""Settings → a manager, a catalog, a replay. The only place that joins technologies to protocols."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import structlog

from kvbm import _native
from kvbm.catalog.index import NewIndex
from kvbm.config import Settings, check_settings
from kvbm.core.errors import CatalogError, ConfigError, StreamError
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Reach, Tier
from kvbm.core.kernels import REFERENCE, Kernels, LedgerTwin, NewFold, NewLedger
from kvbm.core.layout import slots_in
from kvbm.core.ledger import Ledger, Recovered
from kvbm.core.policy import OFFLOAD_POLICIES, OffloadPolicy, WriteBudget
from kvbm.core.residency import Residencies
from kvbm.locate.base import Locator, Nowhere
from kvbm.locate.http import CatalogClient, HttpLocator
from kvbm.manager.copies import Pools
from kvbm.manager.frames import FrameSink, Keeping
from kvbm.manager.keeping import JournalKeeping, MemoryKeeping
from kvbm.manager.manager import Manager, Publishing
from kvbm.manager.offload import Offloader
from kvbm.manager.recovery import recover
from kvbm.manager.rounds import Rounds
from kvbm.manager.samples import Samples
from kvbm.manager.staging import Staging
from kvbm.pools.base import ObjectPool, SlotPool
from kvbm.pools.block_io import BlockEngine, OpenEngine
from kvbm.pools.coding import DecodeBlocks, EncodeBlocks
from kvbm.pools.hbm import HbmPool
from kvbm.pools.host import HostPool
from kvbm.pools.memory import MemoryPool
from kvbm.pools.nvme import NvmePool
from kvbm.pools.object import S3Pool
from kvbm.pools.paged import NewSegmentCopies, PagedTensor
from kvbm.pools.rows import NewArena
from kvbm.streams.credentials import Credentials
from kvbm.streams.journal import Journal
from kvbm.streams.memory import DiscardingSink, MemoryLog
from kvbm.streams.nats import NatsStream, shown
from kvbm.streams.permissions import catalog_inbox, instance_inbox
from kvbm.streams.publisher import PublisherThread, unknown_run
from kvbm.streams.server import shared_server

log = structlog.get_logger()

NATIVE = Kernels(
    "native", _native.sequence_hashes, _native.crc32c, _native.checksums, _native.encode_frame, _native.decode_frame,
    _native.scan_frames,
)  # fmt: skip
NATIVE_FOLD: NewFold = _native.Residencies
NATIVE_LEDGER: NewLedger = _native.Ledger
NATIVE_INDEX: NewIndex = _native.ClusterIndex
NATIVE_ARENA: NewArena = _native.Arena
OPEN_BLOCK_IO: OpenEngine = _native.BlockIo  # the one that there is: "reference" checks no block of NVME by itself
RowCopier = _native.RowCopier  # as `pools.rows.RowCopies`


def segment_copies(copier: _native.RowCopier) -> NewSegmentCopies:
    """Copies of blocks that lie in pieces, on the threads of a copier."""
    return lambda addresses, strides, sizes, slots: _native.SegmentTable(addresses, strides, sizes, slots, copier)


decode_columns = _native.decode_columns  # frames → arrays, as `core.columns.decode_columns`
encode_blocks: EncodeBlocks = _native.encode_blocks
decode_blocks: DecodeBlocks = _native.decode_blocks
random_lines_ns = _native.random_lines_ns  # what memory itself can do, for benchmarks
hash_prompts = _native.sequence_hashes_batch  # as `core.hashing.sequence_hashes_batch`


def open_unverified(
    fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
) -> BlockEngine:
    """As OPEN_BLOCK_IO, and nothing it reads is checked: for a measurement of what that costs, and for nothing else."""
    return _native.BlockIo(fds, slots, block_bytes, io, direct, depth, offload_share, verified=False)


_CATALOG_WAIT_S = 2.0  # at the start, for the epoch it knows


def _kernels(settings: Settings) -> Kernels:
    return REFERENCE if settings.core == "reference" else NATIVE


def kvbm_version() -> str:
    """The installed version; "0" where the package is not installed."""
    try:
        return version("kvbm")
    except PackageNotFoundError:
        return "0"


def instance_folder(settings: Settings) -> Path:
    """Where an instance keeps its journal and its NVME pool."""
    return Path(settings.instance.data_dir) / "instances" / settings.instance.id


def nvme_paths(settings: Settings) -> list[Path]:
    """The stripes of an instance's NVME pool, in their order."""
    named = [Path(part) for part in settings.pools.nvme.path.split(":") if part]
    return named or [instance_folder(settings) / "nvme.pool"]


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
) -> Manager:
    """A running manager: journal locked, durable tiers recovered, a new epoch begun, publisher connected or connecting.

    Args:
        namespaces: those the engine uses from the start; all of one block shape. At least one.
        block_bytes: bytes of one block.
        engine: who embeds the manager, for the stream.
        object_pool: an object pool to use instead of the one `pools.object` names.
        wall_clock_ns: what frames and heartbeats are stamped with; a simulation has its own time.
        layers: the tensors an engine keeps its KV in: the HBM pool then lies there, and `pools.hbm` names no size. Each namespace has
            the layout that `paged_layout` gives them.
    Raises: ConfigError, LayoutError, JournalError, PoolError, MissingExtraError, StreamError: what cannot be used, and what to do.
    """
    if not namespaces:
        raise ConfigError("a manager needs at least one namespace; give that of the engine's model")
    check_settings(settings)
    instance, kernels = InstanceId(settings.instance.id), _kernels(settings)
    credentials = _credentials(settings, instance_inbox(settings.instance.cluster, instance))
    with ExitStack() as opened, ExitStack() as opened_pools:
        journal = None
        run = secrets.token_hex(8)
        if not settings.journal.in_memory:
            _make_data_dir(settings)
            journal = Journal.open(
                journal_folder(settings), instance, kernels, settings.journal.fsync, settings.journal.segment_bytes,
                settings.journal.capacity_bytes, settings.journal.sync_interval_s, run=run,
            )  # fmt: skip
            opened.callback(journal.close)
        pools = _open_pools(settings, namespaces, block_bytes, instance, object_pool, layers, opened_pools)
        new_ledger = Ledger if settings.core == "reference" else NATIVE_LEDGER
        ledger = new_ledger(_stated(pools), settings.pools.eviction, settings.journal.waiting_bytes)
        locator: Locator = HttpLocator(settings.catalog.url) if settings.catalog.url else Nowhere()
        memory = MemoryLog() if journal is None and settings.nats.enabled else None
        frames = journal or memory
        url = _nats_url(settings, opened) if settings.nats.enabled else ""
        # What can be refused has been by now: an epoch that begins and states nothing would hide what NVME kept.
        on_stream = _epoch_on_stream(settings, instance, url, credentials) if url else Epoch(0)
        known = max(on_stream, _epoch_in_catalog(settings, instance))
        pool_id = _begin_epoch(ledger, settings, journal, pools, namespaces, engine, known)
        keeping: Keeping | None = None
        sink: FrameSink = DiscardingSink()
        room_bytes = 0
        if journal is not None:
            keeping, sink = JournalKeeping(journal, pool_id, settings.journal.sync_interval_s), journal
            room_bytes = settings.journal.capacity_bytes
        elif memory is not None:
            keeping = sink = MemoryKeeping(memory)
            room_bytes = settings.journal.waiting_bytes  # not refused beyond it, but restated so that it can go
        samples = Samples(settings.samples.rate) if settings.samples.rate and url else None
        manager = Manager(
            instance, settings.instance.cluster, ledger, pools, sink, kernels,
            _offloader(settings, pools), locator, settings.onboard.wait_s, settings.onboard.locate_s,
            settings.onboard.threads, wall_clock_ns, keeping=keeping,
            rounds=Rounds(settings.rounds.least_s, room_bytes),
            samples=samples, has_stream=bool(url), run=run, offload_threads=settings.offload.threads,
            staging=Staging(
                settings.offload.staging_bytes, block_bytes, settings.onboard.threads, settings.offload.threads
            ), budgets=_budgets(settings),
        )  # fmt: skip
        publishing = _publishing(settings, manager, frames, url, credentials) if frames is not None and url else None
        opened_pools.pop_all()  # the manager closes them, or leaves them to a copy that has not ended
        manager.start(publishing, closers=[opened.pop_all().close])
        return manager


def run_catalog(settings: Settings) -> int:
    """Serve the catalog until SIGINT or SIGTERM.

    Raises: ConfigError, StreamError, CatalogError, MissingExtraError: what does not answer, and what to do.
    """
    from kvbm.catalog.reference_index import ReferenceIndex
    from kvbm.catalog.routing import RoutingSettings
    from kvbm.catalog.server import run
    from kvbm.catalog.service import ServiceSettings

    check_settings(settings)
    with ExitStack() as opened:
        credentials = _credentials(settings, catalog_inbox(settings.instance.cluster))
        url = _nats_url(settings, opened)
        if not (settings.catalog.database and settings.catalog.checkpoints):
            _make_data_dir(settings)
        default_database = f"sqlite+aiosqlite:///{Path(settings.instance.data_dir) / 'catalog.db'}"
        costs = msgspec.structs.asdict(settings.catalog.routing)
        weights = msgspec.structs.asdict(settings.catalog.routing.tier_weights)
        service = ServiceSettings(
            nats_url=url,
            credentials=credentials,
            database_url=settings.catalog.database or default_database,
            cluster=settings.instance.cluster,
            listen=settings.catalog.listen,
            connect_s=settings.nats.timeout_s,
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
            _kernels(settings),
            ReferenceIndex if settings.core == "reference" else NATIVE_INDEX,
            lambda at: print(f"kvbm-catalog: {at} {say}", file=sys.stderr, flush=True),
        )
    return 0


def catalog_client(url: str) -> CatalogClient:
    """A client of the catalog that hashes tokens natively. Raises CatalogError: the URL cannot be used."""
    return CatalogClient(url, hash_tokens=NATIVE.sequence_hashes)


def _publishing(
    settings: Settings, manager: Manager, frames: Journal | MemoryLog, url: str, credentials: Credentials
) -> Publishing:
    """A publisher that has begun."""

    async def connect(url: str, timeout_s: float) -> NatsStream:
        return await NatsStream.connect(url, timeout_s, credentials=credentials)

    publisher = PublisherThread(
        frames, url, settings.instance.cluster, manager.instance, manager, settings.nats.heartbeat_s,
        connect, window_bytes=settings.nats.window_bytes, linger_s=settings.nats.linger_s,
        run_of=frames.run_of if isinstance(frames, Journal) else unknown_run,
    )  # fmt: skip
    publisher.start()
    return Publishing(publisher.notify, lambda: publisher.published, publisher.stop, publisher.round_began)


def _epoch_on_stream(settings: Settings, instance: InstanceId, url: str, credentials: Credentials) -> Epoch:
    """The last epoch the stream has of this instance; 0 when it has none, or does not answer within `nats.timeout_s`.

    A journal that was lost, or kept in memory, would begin again with an epoch whose offsets the stream has seen; the stream
    would then pass for ahead and hide the new events.
    """
    found: list[Epoch] = []
    cluster, timeout_s = settings.instance.cluster, settings.nats.timeout_s

    async def ask() -> Epoch:
        async with asyncio.timeout(timeout_s):
            stream = await NatsStream.connect(url, timeout_s, credentials=credentials)
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
) -> str:
    """Start the ledger in a new epoch. Returns the name of the durable pool it speaks of, "" for none."""
    recovered: dict[Tier, list[Recovered]] = {}
    epoch, pool_id = Epoch(known + 1), ""
    if journal is not None:
        new_fold: NewFold = Residencies if settings.core == "reference" else NATIVE_FOLD
        nvme = pools.slots.get(Tier.NVME)
        pool_id = nvme.pool_id if isinstance(nvme, NvmePool) else ""
        if nvme is not None:
            recovered[Tier.NVME] = recover(journal, Tier.NVME, nvme.slots, pool_id, new_fold)
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


def _make_data_dir(settings: Settings) -> None:
    """Raises ConfigError: the folder cannot be made."""
    try:
        Path(settings.instance.data_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"instance.data_dir {settings.instance.data_dir} cannot be used ({error.strerror}); give a folder"
        ) from None


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
    shape = namespaces[0]
    wanted, checksums = settings.pools, _kernels(settings).checksums
    in_memory = wanted.hbm.device == "memory"
    copier = RowCopier(1 if in_memory else wanted.host.copy_threads)  # HBM and HOST share its threads

    def keep(pool: SlotPool) -> None:
        slots[pool.tier] = pool
        opened.callback(pool.close)

    count = _slots(wanted.hbm.slots, wanted.hbm.capacity_bytes, block_bytes, "pools.hbm")
    if not count and not layers:
        raise ConfigError("pools.hbm has neither slots nor capacity_bytes; an instance needs an HBM pool")
    native = segment_copies(copier) if _kernels(settings) is NATIVE else None
    if layers:
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
    if count := _slots(wanted.nvme.slots, wanted.nvme.capacity_bytes, block_bytes, "pools.nvme"):
        nvme = NvmePool(
            nvme_paths(settings), count, block_bytes, shape, instance, checksums, OPEN_BLOCK_IO, io=wanted.nvme.io,
            direct=wanted.nvme.direct, depth=wanted.nvme.depth, offload_share=wanted.nvme.offload_share,
        )  # fmt: skip
        if nvme.notice:
            log.info("pool.opened", tier="NVME", paths=[str(path) for path in nvme.paths], notice=nvme.notice)
        keep(nvme)
    objects = object_pool
    if objects is None and wanted.object.url:
        objects = S3Pool(
            wanted.object.url, block_bytes, checksums, endpoint_url=wanted.object.endpoint,
            region=wanted.object.region, deadline_s=wanted.object.timeout_s,
            on_trouble=lambda message: log.warning("object.troubled", why=message),
        )  # fmt: skip
        opened.callback(objects.close)
    return Pools(slots, objects)


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


def _offloader(settings: Settings, pools: Pools) -> Offloader:
    names = {Tier.HOST: settings.offload.host, Tier.NVME: settings.offload.nvme, Tier.OBJECT: settings.offload.object}
    there = {tier: True for tier in pools.slots} | ({Tier.OBJECT: True} if pools.object is not None else {})
    policies: dict[Tier, OffloadPolicy] = {
        tier: OFFLOAD_POLICIES[name]() for tier, name in names.items() if tier in there and name != "never"
    }
    return Offloader(policies, settings.offload.queue_blocks)


def _budgets(settings: Settings) -> dict[Tier, WriteBudget]:
    bytes_s = settings.pools.nvme.write_budget_bytes_s
    return {Tier.NVME: WriteBudget(bytes_s)} if bytes_s else {}
