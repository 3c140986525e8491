"""Settings → a manager on its journal and stream, or a catalog on its stream."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvbm.assembly.kept import kept_in_nvme
from kvbm.assembly.lending import Exchange, open_exchange
from kvbm.assembly.native import NATIVE, NATIVE_CORE, NATIVE_INDEX, NATIVE_MESSAGES, Core, ages_of
from kvbm.assembly.pools import instance_folder, open_pools
from kvbm.config import JournalSettings, NvmeSettings, ObjectSettings, Settings, check_settings
from kvbm.core.arguments import check_namespaces
from kvbm.core.backend import LedgerProtocol, LockProtocol
from kvbm.core.checks import check_plain_int, check_text, kind_of
from kvbm.core.errors import (
    ArgumentTypeError,
    CatalogError,
    ConfigError,
    ErasureError,
    PackageConflictError,
    StreamError,
)
from kvbm.core.events import JANITOR, PoolStated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Reach, Tier
from kvbm.core.parts import parts_of
from kvbm.core.policy import OFFLOAD_POLICIES, OffloadPolicy, Share, WriteBudget
from kvbm.core.results import Recovered
from kvbm.erasure.instance import DONE_FILE, DoneErasures, InstanceErasures, StartErasures
from kvbm.erasure.record import Record, decoded
from kvbm.erasure.watch import ErasureWatch, WatchOptions
from kvbm.files import make_folder
from kvbm.locate.base import Locator, Nowhere
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.locate.locator import HttpLocator
from kvbm.locate.nats_proof import NatsCredentials
from kvbm.locate.parts import PartedCatalog, catalogs_at
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
from kvbm.manager.salvage import SalvagePlan
from kvbm.manager.snapshot_policy import SnapshotPolicy
from kvbm.manager.staging import Staging
from kvbm.manager.transfer import Pools
from kvbm.pools.base import ObjectPool
from kvbm.pools.hbm.paged import PagedTensor
from kvbm.pools.nvme.pool import NvmePool
from kvbm.remarks import Remarks
from kvbm.streams.journal.history import Retention
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from kvbm.streams.memory import DiscardingSink, MemoryLog
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import INBOX, Credentials
from kvbm.streams.nats.erasures import ErasureLog
from kvbm.streams.nats.permissions import Role, catalog_inbox, grant, instance_inbox
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher.ownership import unknown_runs
from kvbm.streams.publisher.thread import PublisherThread
from kvbm.streams.server import shared_server
from kvbm.telemetry.remarks import to_standard_error
from kvbm.terminal import say
from kvbm_ledger import conflict

if TYPE_CHECKING:
    from kvbm.catalog.service import Companion

log = Remarks()

M = TypeVar("M", bound=BlockManager)
_LEAST_QUEUE_BLOCKS = 8192
_CATALOG_WAIT_S = 2.0  # at the start, for the epoch it knows


def kvbm_version() -> str:
    """The installed version; "0" where the package is not installed."""
    try:
        return version("kvbm-ledger")
    except PackageNotFoundError:
        return "0"


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
    if why := conflict():
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
    instance, backend = InstanceId(settings.instance.id), core.backend
    credentials = stream_credentials(settings, Role.JANITOR if engine == JANITOR else Role.INSTANCE, instance)
    with ExitStack() as whole:
        opened, opened_pools = whole.enter_context(ExitStack()), whole.enter_context(ExitStack())
        journal = None
        run = secrets.token_hex(8)
        if not settings.journal.in_memory:
            make_data_dir(settings)
            options = _journal_options(settings.journal)
            journal = opened.enter_context(closing(Journal.open(journal_folder(settings), instance, backend, options, run=run)))  # fmt: skip
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
        watched = WatchedErasures(settings, on_stream.erasures, lasting, journal is not None)
        pool_id, plan = _begin_epoch(ledger, exchange.lock, settings, journal, pools, namespaces, engine, known, watched, core)  # fmt: skip
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
            instance, settings.instance.cluster, ledger, pools, sink, backend,
            _offloader(settings, pools, namespaces, lasting), locator,
            ManagerOptions(
                settings.onboard.wait_s, settings.onboard.locate_s, settings.onboard.threads, settings.offload.threads,
                wall_clock_ns, retention=retention, snapshots=SnapshotPolicy(settings.snapshots.least_s, room_bytes), samples=samples,
                run=run, has_stream=bool(url), salvage=plan, lock=exchange.lock, budgets=_budgets(settings), lasting=lasting, unused=unused,
                staging=Staging(
                    settings.offload.staging_bytes, block_bytes, settings.onboard.threads, settings.offload.threads,
                    pools.object_blocks, pins=pools.has_gpu,
                ), ages=ages_of(pools.slots),
            ),
        )  # fmt: skip
        publishing = _publishing(settings, manager, frames, url, credentials, opened_pools) if frames is not None and url else None  # fmt: skip
        disowners = [*exchange.disowners, *([journal.disown] if journal is not None else [])]
        erasing_url = url if engine != JANITOR else ""
        stoppers = _begin_exchange(exchange, manager, opened_pools, watched, erasing_url, credentials)
        # Once it is the manager's, that closes it all, but leaves pools to a copy that has not ended.
        manager.start(publishing, [opened.close], disowners, stoppers, taken=whole.pop_all)
        return manager


def _begin_exchange(
    exchange: Exchange, manager: BlockManager, opened: ExitStack, watched: WatchedErasures, url: str, credentials: Credentials
) -> list[Callable[[float], object]]:  # fmt: skip
    """Begin to lend and to read, once what is to be erased is held back; `url` is empty where nobody tells of that.

    Returns: what is to be called first when the manager closes, with how long to wait.
    """
    stoppers = []
    if url:
        watching = watched.watching(manager, url, credentials)
        opened.callback(watching.stop)
        watching.start()
        stoppers.append(lambda _: watching.stop())
    return [*exchange.begin(manager, opened), *stoppers]


def run_catalog(
    settings: Settings, companion: Callable[[Settings, str, Credentials], tuple[str, Companion]] | None = None
) -> int:
    """Serve the catalog until SIGINT, SIGTERM or SIGHUP.

    Args:
        companion: makes what runs beside the service.

    Raises: ConfigError, StreamError, CatalogError, MissingExtraError: what does not answer, and what to do.
    """
    from kvbm.catalog.access.callers import AccessOptions
    from kvbm.catalog.edge.server import run
    from kvbm.catalog.service import ServiceSettings

    check_settings(settings)
    with ExitStack() as opened:
        credentials = stream_credentials(settings, Role.CATALOG)
        url = nats_url(settings, opened)
        if not (settings.catalog.database and settings.catalog.checkpoints):
            make_data_dir(settings)
        service = ServiceSettings(
            nats_url=url,
            credentials=credentials,
            database_url=database_url(settings),
            cluster=settings.instance.cluster,
            listen=settings.catalog.listen,
            unix_socket=settings.catalog.unix_socket,
            connect_s=settings.nats.timeout_s,
            replicas=settings.nats.replicas,
            liveness_s=settings.catalog.liveness_s,
            forget_s=settings.catalog.forget_s,
            used_s=settings.gc.used_s,
            tenant_secrets=settings.catalog.tenant_secrets,
            tenant_secrets_file=settings.catalog.tenant_secrets_file,
            capacity=settings.catalog.capacity,
            checkpoints=settings.catalog.checkpoints or str(Path(settings.instance.data_dir) / "catalog-checkpoints"),
            checkpoint_every_s=settings.catalog.checkpoint_every_s,
            archive=settings.catalog.archive,
            access=AccessOptions(
                file=settings.catalog.access,
                open=settings.catalog.open,
                tls_cert=settings.catalog.tls_cert,
                tls_key=settings.catalog.tls_key,
                tls_client_ca=settings.catalog.tls_client_ca,
            ),
            limits=settings.catalog.limits,
            companions=() if companion is None else (companion(settings, url, credentials),),
            routing=settings.catalog.routing,
            parts=parts_of(settings.catalog.parts),
            new_messages=NATIVE_MESSAGES,
        )
        follows = f"follows {shown(url)}"
        run(
            service,
            NATIVE,
            NATIVE_INDEX,
            lambda at: say(f"kvbm-catalog: {at} {follows}", to=sys.stderr),
        )
    return 0


def stream_of_catalog(settings: Settings, opened: ExitStack) -> tuple[str, Credentials]:
    """Where the stream is, and how a catalog proves itself to it. Raises ConfigError, StreamError, MissingExtraError."""
    credentials = stream_credentials(settings, Role.CATALOG)
    return nats_url(settings, opened), credentials


def _locator(settings: Settings) -> Locator:
    if not settings.catalog.url:
        return Nowhere()
    who, place = settings.instance.id, settings.instance.topology
    return HttpLocator(settings.catalog.url, catalog_credentials(settings), asker=who, topology=place)


def catalog_client(url: str, credentials: CatalogCredentials = NO_CREDENTIALS) -> CatalogClient:
    """A client of the catalog that hashes tokens natively. Raises CatalogError: the URL cannot be used."""
    return CatalogClient(url, hash_tokens=NATIVE.sequence_hashes, credentials=credentials)


def catalog_clients(settings: Settings, url: str = "") -> CatalogClient | PartedCatalog:
    """A client of the catalog at a URL, or of those of all parts. Raises CatalogError: a URL cannot be used.

    Args:
        url: instead of `catalog.url`.
    """
    return catalogs_at(
        url or settings.catalog.url, hash_tokens=NATIVE.sequence_hashes, credentials=catalog_credentials(settings)
    )


def catalog_credentials(settings: Settings) -> CatalogCredentials:
    """How this side proves to a catalog who it is, and knows the catalog, as the settings `catalog.*` say; over NATS, `nats.*`."""
    asked, nats = settings.catalog, settings.nats
    over_nats = NatsCredentials(nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key)
    return CatalogCredentials(asked.token, asked.tls_ca, asked.client_cert, asked.client_key, over_nats)


def _journal_options(settings: JournalSettings) -> JournalOptions:
    retention = Retention(settings.keep_s, settings.max_bytes or settings.capacity_bytes)
    return JournalOptions(
        settings.fsync, settings.segment_bytes, settings.capacity_bytes, settings.sync_interval_s, retention
    )


def _publishing(
    settings: Settings, manager: BlockManager, frames: Journal | MemoryLog, url: str, credentials: Credentials, opened: ExitStack
) -> Publishing:  # fmt: skip
    """A publisher that has begun; `opened` ends it, which else would go on to send signs of life."""

    async def connect(url: str, timeout_s: float) -> NatsStream:
        return await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)

    publisher = PublisherThread(
        frames, url, settings.instance.cluster, manager.instance, manager.publisher_port, settings.nats.heartbeat_s,
        connect, window_bytes=settings.nats.window_bytes, linger_s=settings.nats.linger_s,
        runs=frames.runs if isinstance(frames, Journal) else unknown_runs,
    )  # fmt: skip
    opened.callback(publisher.stop, 0.0)
    publisher.start()
    return Publishing(
        publisher.notify,
        lambda: publisher.published,
        publisher.stop,
        publisher.snapshot_began,
        lambda: publisher.trouble,
    )


class WatchedErasures:
    """What a manager has to do with erasures: what its start leaves out, and the thread that hears of others.

    Args:
        record: what is to be erased; None: the stream did not say.
        lasting: the namespaces the engine names, and whose each is.
    """

    def __init__(
        self, settings: Settings, record: Record | None, lasting: LastingNamespaces, has_journal: bool
    ) -> None:
        self._settings, self._record, self._lasting = settings, record, lasting
        self._done = DoneErasures(instance_folder(settings) / DONE_FILE if has_journal else None)
        self._start = StartErasures(record or Record(), self._done, lasting.tenants)
        self._recovered = 0

    def kept(self, found: Sequence[Recovered]) -> list[Recovered]:
        """What of the blocks that an earlier process left may be held."""
        kept = [one for one in found if self.keeps(one)]
        self._recovered = len(kept)
        if self._start.left_out:
            log.info("erasure.left_out", instance=self._settings.instance.id, blocks=self._start.left_out)
        return kept

    def keeps(self, one: Recovered) -> bool:
        """Whether a block that an earlier process left may be held."""
        return not self._lasting.must_not(one.namespace) and self._start.keeps(one)

    def keeps_run(self, namespace: NamespaceId, hashes: bytes) -> np.ndarray:
        """The same, for each block of a run of one namespace."""
        if self._lasting.must_not(namespace):
            return np.zeros(len(hashes) // HASH_BYTES, dtype=bool)
        return self._start.keeps_run(namespace, hashes)

    def expect_more(self) -> None:
        """Blocks of earlier processes come back later, too."""
        self._recovered += 1

    def watching(self, manager: BlockManager, url: str, credentials: Credentials) -> ErasureWatch:
        """What watches the record once it is started."""
        settings, nats = self._settings, self._settings.nats
        erasures = InstanceErasures(manager.erasing, self._done, self._record, time.time_ns)

        async def connect() -> ErasureLog:
            return await ErasureLog.open(url, settings.instance.cluster, nats.timeout_s, credentials, nats.replicas)

        is_known = self._record is not None or not self._recovered or not settings.erasure.hold_s
        options = WatchOptions(settings.erasure.poll_s, settings.erasure.hold_s)
        return ErasureWatch(manager.instance, erasures, connect, manager.erasing.hold_back, is_known, options)


class OnStream(NamedTuple):
    """What the stream knows of an instance that starts.

    Attributes:
        epoch: its last one; 0 when there is none, or the stream did not answer.
        erasures: what is to be erased; None: the stream did not say.
    """

    epoch: Epoch = Epoch(0)
    erasures: Record | None = None


def ask_stream(settings: Settings, instance: InstanceId, url: str, credentials: Credentials) -> OnStream:
    """The last epoch the stream has of this instance, and what is to be erased; nothing when it does not answer within `nats.timeout_s`.

    A journal that was lost, or kept in memory, would begin again with an epoch whose offsets the stream has seen; the stream
    would then pass for ahead and hide the new events.
    """
    found: list[OnStream] = []
    cluster, timeout_s = settings.instance.cluster, settings.nats.timeout_s

    async def ask() -> None:
        async with asyncio.timeout(timeout_s):
            stream = await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)
            try:
                tail = await stream.tail(cluster, instance, timeout_s)
                fence = await stream.fence(cluster, instance, timeout_s)
                epoch = max(tail.end.epoch if tail else Epoch(0), fence.epoch if fence else Epoch(0))
            finally:
                await stream.close()
        found.append(OnStream(epoch))
        async with asyncio.timeout(timeout_s):
            erasures = await ErasureLog.open(url, cluster, timeout_s, credentials, settings.nats.replicas)
            try:
                last = await erasures.record()
                found.append(OnStream(epoch, Record() if last is None else decoded(last.data)))
            finally:
                await erasures.close()

    def run() -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(ask())
        # A loop needs descriptors, its resolver a thread.
        except (StreamError, ErasureError, OSError, RuntimeError) as error:
            log.warning(
                "instance.stream_unasked", why=str(error) or f"no answer within {timeout_s:g} s", url=shown(url)
            )

    # The engine may have a loop of its own.
    asking = threading.Thread(target=run, name=f"kvbm-epoch-{instance}", daemon=True)
    asking.start()
    asking.join(timeout_s + 1.0)
    return found[-1] if found else OnStream()


def epoch_in_catalog(settings: Settings, instance: InstanceId) -> Epoch:
    """The last epoch the catalog has read of this instance; 0 when it has none, or does not answer soon.

    The stream forgets with age, also the fence; the catalog does not, and would ignore an epoch it takes for an old one.
    """
    if not settings.catalog.url:
        return Epoch(0)
    wait_s = min(_CATALOG_WAIT_S, settings.nats.timeout_s)
    client = catalogs_at(settings.catalog.url, wait_s, credentials=catalog_credentials(settings))
    try:
        found = client.instance(instance)
    except CatalogError as error:
        log.info("instance.catalog_unasked", why=str(error))
        return Epoch(0)
    finally:
        client.close()
    return Epoch(found.epoch if found is not None else 0)


def _begin_epoch(
    ledger: LedgerProtocol,
    lock: LockProtocol,
    settings: Settings,
    journal: Journal | None,
    pools: Pools,
    namespaces: Sequence[Namespace],
    engine: str,
    known: Epoch,
    watched: WatchedErasures,
    core: Core,
) -> tuple[str, SalvagePlan]:
    """Start the ledger in a new epoch.

    Returns: the name of the durable pool it speaks of, "" for none; what that pool holds beside what the ledger was told.
    """
    recovered: dict[Tier, list[Recovered]] = {}
    epoch, pool_id, plan = Epoch(known + 1), "", SalvagePlan()
    if journal is not None:
        nvme = pools.slots.get(Tier.NVME)
        pool_id = nvme.pool_id if isinstance(nvme, NvmePool) else ""
        if isinstance(nvme, NvmePool):
            recovered[Tier.NVME], plan = kept_in_nvme(settings, journal, nvme, known, watched, core.new_fold)
        if isinstance(nvme, NvmePool) and nvme.hints is not None and nvme.hints.is_new:
            for namespace, run in groupby(recovered[Tier.NVME], key=lambda one: one.namespace):
                kept = list(run)
                nvme.hints.note([one.slot for one in kept], namespace, b"".join(one.hash for one in kept))
        epoch = Epoch(max(journal.epoch, known) + 1)
    with lock:  # the instance may be listening already
        ledger.start(epoch, namespaces, settings.instance.topology, engine, kvbm_version(), recovered)
    if journal is not None:  # nobody has taken an event yet
        journal.begin_epoch(epoch, pool_id, ledger.applied)
        pools.note_epoch(epoch)
    log.info(
        "instance.started",
        instance=settings.instance.id,
        epoch=epoch,
        recovered_blocks=len(recovered.get(Tier.NVME, [])),
    )
    return pool_id, plan


def stream_credentials(settings: Settings, role: Role, name: str = "") -> Credentials:
    """How this process proves itself to the stream. Raises ConfigError, MissingExtraError: what cannot be used.

    Args:
        role, name: what it is there, as `kvbm nats-permissions` names it.
    """
    nats, cluster = settings.nats, settings.instance.cluster
    inbox = INBOX
    if role is Role.CATALOG:
        inbox = catalog_inbox(cluster)
    elif role in (Role.INSTANCE, Role.JANITOR):
        inbox = instance_inbox(cluster, name)
    credentials = Credentials(
        nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key, inbox, grant(cluster, role, name)
    )
    if nats.enabled:
        credentials.connect_options(nats.url)
    return credentials


def nats_url(settings: Settings, opened: ExitStack) -> str:
    """Where the stream is: as set, else a server of our own. Raises ConfigError, StreamError, MissingExtraError."""
    if settings.nats.url:
        shown(settings.nats.url)  # refuses what is none
        return settings.nats.url
    make_data_dir(settings)
    server = shared_server(Path(settings.instance.data_dir) / "nats", settings.nats.timeout_s)
    opened.callback(server.stop)
    return server.url


def database_url(settings: Settings) -> str | Path:
    return settings.catalog.database or Path(settings.instance.data_dir) / "catalog.db"  # no text: % or ? may be in it


def make_data_dir(settings: Settings) -> None:
    """Raises ConfigError: the folder cannot be made."""
    try:
        make_folder(Path(settings.instance.data_dir))
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


def _listed(pools: Pools) -> list[PoolStated]:
    listed = [PoolStated(pool.tier, pool.slots, pool.block_bytes, pool.reach) for pool in pools.slots.values()]
    if pools.object is not None:
        listed.append(PoolStated(Tier.OBJECT, 0, pools.object.block_bytes, Reach.CLUSTER, pools.object.name))
    return listed


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
