"""Settings → pools: HBM, HOST, NVME with a pod's folder, and OBJECT over a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvbm.assembly.native import (
    CODER,
    NATIVE,
    NATIVE_ARENA,
    NEW_OBJECT_RECEIVER,
    OPEN_BLOCK_IO,
    RowCopier,
    device_rings,
    segment_copies,
)
from kvbm.config import Settings
from kvbm.core.errors import ConfigError
from kvbm.core.ids import InstanceId, Namespace, Reach, Tier
from kvbm.core.layout import blocks_of_object, pool_name, slots_in
from kvbm.manager.copies.transfer import Pools
from kvbm.pools.base import ObjectPool, SlotPool
from kvbm.pools.hbm.engine_owned import EngineHbm
from kvbm.pools.hbm.paged import PagedTensor
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.pool import HostPool
from kvbm.pools.memory import MemoryPool
from kvbm.pools.nvme.block_io import BlockIoOptions, OpenEngine
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.pools.stores.base import ObjectStore, StoreAwayError
from kvbm.pools.stores.cache_tier import CachedStore
from kvbm.pools.stores.late import LateStore
from kvbm.pools.stores.link import LIMITS, RequestLimits
from kvbm.pools.stores.opening import open_store
from kvbm.pools.tenant_keys import KeySource, keys_of_command, keys_of_file
from kvbm.safe_log import SafeLog

log = SafeLog()


def instance_folder(settings: Settings) -> Path:
    """Where an instance keeps its journal and its NVME pool."""
    return Path(settings.instance.data_dir) / "instances" / settings.instance.id


def journal_folder(settings: Settings) -> Path:
    """Where an instance keeps its journal."""
    return instance_folder(settings) / "journal"


def open_pools(
    settings: Settings,
    namespaces: Sequence[Namespace],
    block_bytes: int,
    instance: InstanceId,
    object_pool: ObjectPool | None,
    layers: Sequence[Sequence[PagedTensor]],
    opened: ExitStack,
) -> Pools:
    """The pools of an instance, each closed with `opened`.

    Raises ConfigError, LayoutError, PoolError: what cannot be used.
    """
    slots: dict[Tier, SlotPool] = {}
    wanted, checksums = settings.pools, NATIVE.checksums
    in_memory = wanted.hbm.device == "memory" and wanted.hbm.owner != "engine"
    copier = RowCopier(1 if in_memory else wanted.host.copy_threads)  # HBM and HOST share its threads
    if copier.lacking:
        log.warning(
            "pool.threads_lacking",
            tier="HOST",
            threads=copier.threads,
            lacking=copier.lacking,
            notice="the system gave no more; copies are slower until this process is started again",
        )

    def keep(pool: SlotPool) -> None:
        slots[pool.tier] = pool
        opened.callback(pool.close)

    _open_hbm(settings, namespaces, block_bytes, layers, copier, keep)
    if count := _slots(wanted.host.slots, wanted.host.capacity_bytes, block_bytes, "pools.host"):
        if in_memory:
            keep(MemoryPool(Tier.HOST, count, block_bytes, checksums))
        else:
            pages, node = wanted.host.huge_pages, wanted.host.numa_node
            # An engine that owns HBM copies in its workers' processes; this one, its scheduler's, opens no GPU.
            pins = wanted.hbm.owner != "engine"
            host = HostPool(count, block_bytes, NATIVE_ARENA, copier, huge_pages=pages, numa_node=node, pins=pins)
            if host.notice:
                log.warning("pool.opened", tier="HOST", notice=host.notice)
            keep(host)
    keys, open_engine = _slot_keys(settings, namespaces, opened)
    block_io = BlockIoOptions(
        wanted.nvme.io, wanted.nvme.direct, wanted.nvme.depth, wanted.nvme.offload_share, keys is not None
    )
    if count := _slots(wanted.nvme.slots, wanted.nvme.capacity_bytes, block_bytes, "pools.nvme"):
        nvme = NvmePool(
            nvme_paths(settings),
            count,
            block_bytes,
            _first_named(namespaces),
            instance,
            checksums,
            open_engine,
            block_io,
            Reach.POD if wanted.nvme.folder else Reach.INSTANCE,
            wanted.nvme.aside_bytes,
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
            open_engine,
            own.hints if isinstance(own, NvmePool) else None,
            block_io,
        )
        opened.callback(pod.close)
        pod.start()
    objects = object_pool
    if objects is None and wanted.object.url:
        objects = open_objects(settings, namespaces, block_bytes)
        opened.callback(objects.close)
    return Pools(slots, objects, pod, keys)


def _slot_keys(
    settings: Settings, namespaces: Sequence[Namespace], opened: ExitStack
) -> tuple[SlotKeys | None, OpenEngine]:
    """The keys of what NVME holds, where it is encrypted, and what moves its blocks.

    Raises ConfigError, MissingExtraError.
    """
    wanted = settings.pools.nvme
    if not wanted.encrypt or not (wanted.slots or wanted.capacity_bytes or wanted.folder):
        return None, OPEN_BLOCK_IO
    keys = SlotKeys(key_source(settings), namespaces)
    opened.callback(keys.close)
    keys.start()
    return keys, keys.opening(OPEN_BLOCK_IO, NATIVE.checksums)


def _open_hbm(
    settings: Settings,
    namespaces: Sequence[Namespace],
    block_bytes: int,
    layers: Sequence[Sequence[PagedTensor]],
    copier: RowCopier,
    keep: Callable[[SlotPool], None],
) -> None:
    """The HBM pool: the engine's own, one over an engine's tensors, or one of ours."""
    hbm, checksums, native = settings.pools.hbm, NATIVE.checksums, segment_copies(copier)
    rings = device_rings(copier, hbm.programs)
    is_engines = hbm.owner == "engine"
    count = _slots(hbm.slots, hbm.capacity_bytes, block_bytes, "pools.hbm")
    if not count and not layers:
        raise ConfigError("pools.hbm has neither slots nor capacity_bytes; an instance needs an HBM pool")
    if is_engines and layers:
        raise ConfigError('pools.hbm.owner is "engine", so the HBM pool lies in no tensors of ours; give no layers')
    if is_engines:
        keep(EngineHbm(count, block_bytes))
    elif layers:
        paged = HbmPool.of_layers(layers, checksums, native, rings=rings, ring_bytes=hbm.ring_bytes, is_told=True)
        keep(paged)
        _check_layers(paged, count, block_bytes, namespaces)
    elif hbm.device == "memory":
        keep(MemoryPool(Tier.HBM, count, block_bytes, checksums))
    else:
        keep(HbmPool(count, block_bytes, checksums, hbm.device, native, rings, hbm.ring_bytes, is_told=True))


def open_objects(
    settings: Settings, namespaces: Sequence[Namespace], block_bytes: int, waits: bool = True
) -> BlockObjects:
    """The object pool that `pools.object` names, for blocks of one shape.

    Its name says what keeps it from meeting another pool in the same store: a k that is not the usual one, and
    encryption.

    Args:
        namespaces: at least one.
        waits: a store that does not answer is taken when it comes, and refuses everything until then; otherwise it is a
            PoolError.
    Raises: ConfigError, PoolError, MissingExtraError: what cannot be used, and what to do.
    """
    wanted, usual = settings.pools.object, blocks_of_object(block_bytes, namespaces[0].block_tokens)
    blocks = wanted.blocks or usual
    limits = RequestLimits(requests_in_flight=wanted.requests)

    def on_trouble(message: str) -> None:
        log.warning("object.troubled", why=message)

    sealing = None
    if wanted.keys or wanted.keys_command:
        sealing = Sealing(key_source(settings), blocks, header_bytes(blocks), on_trouble)
        sealing.check(namespaces)

    with ExitStack() as opened:
        store = _opened(lambda: open_object_store(settings, limits), on_trouble if waits else None)
        opened.callback(store.close)
        if wanted.front:
            front = _opened(
                lambda: open_store(wanted.front, ca=wanted.ca, ttl_s=wanted.ttl_s, limits=limits),
                on_trouble if waits else None,
            )
            opened.callback(front.close)  # it may go on looking for its server, and the two of them want a thread
            store = CachedStore(front, store, on_trouble)
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
            new_receiver=NEW_OBJECT_RECEIVER,
            on_trouble=on_trouble,
        )
        pool = BlockObjects(store, block_bytes, NATIVE.checksums, CODER, options)
        opened.pop_all()
        return pool


def open_object_store(settings: Settings, limits: RequestLimits = LIMITS, tries: bool = True) -> ObjectStore:
    """The store of the object pool. Arguments and errors are those of `stores.opening.open_store`."""
    wanted = settings.pools.object
    return open_store(
        wanted.url,
        endpoint=wanted.endpoint,
        region=wanted.region,
        ca=wanted.ca,
        name=wanted.name,
        ttl_s=wanted.ttl_s,
        limits=limits,
        tries=tries,
    )


def _opened(reopen: Callable[[], ObjectStore], on_trouble: Callable[[str], None] | None) -> ObjectStore:
    """A store, or where it does not answer what stands for it until it does.

    Raises as `open_store`; also when away, without `on_trouble`.
    """

    def came(store: ObjectStore) -> None:
        log.info("store.opened", tier="OBJECT", name=store.name, notice="it answers, and is used from now on")
        tell(store)

    def tell(store: ObjectStore) -> None:
        for notice in getattr(store, "remarks", ()):
            log.info("pool.opened", tier="OBJECT", name=store.name, notice=notice)

    try:
        store = reopen()
    except StoreAwayError as away:
        if on_trouble is None:
            raise
        log.warning(
            "store.away",
            tier="OBJECT",
            name=away.name,
            why=str(away),
            notice="the instance starts without it, which costs hits, and takes it when it answers",
        )
        return LateStore(away, reopen, came, on_trouble)
    tell(store)
    return store


def key_source(settings: Settings) -> KeySource:
    wanted = settings.pools.object
    return keys_of_file(wanted.keys) if wanted.keys else keys_of_command(wanted.keys_command)


def _check_layers(hbm: HbmPool, slots: int, block_bytes: int, namespaces: Sequence[Namespace]) -> None:
    """Hold what was said of an engine's tensors to what they are.

    Raises ConfigError: a namespace would share other blocks' bytes.
    """
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


def _first_named(namespaces: Sequence[Namespace]) -> Namespace:
    return next((one for one in namespaces if one.revision.strip()), namespaces[0])


def nvme_paths(settings: Settings) -> list[Path]:
    """The stripes of an instance's NVME pool, in their order."""
    if settings.pools.nvme.folder:
        return [pod_file(settings)]
    named = [Path(part) for part in settings.pools.nvme.path.split(":") if part]
    return named or [instance_folder(settings) / "nvme.pool"]


def pod_file(settings: Settings) -> Path:
    """An instance's file in the folder of its pod."""
    return Path(settings.pools.nvme.folder) / f"{settings.instance.cluster}.{settings.instance.id}.pool"
