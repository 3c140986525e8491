"""From a host pool of SGLang's to the tiers below it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbm.assembly import NATIVE, RowCopier, open_engine_manager, open_objects, segment_copies
from kvbm.config import NvmeSettings, ObjectSettings, Settings
from kvbm.core.chain_statement import ChainGroup, ChainStatement
from kvbm.core.engine_chains import MOST_HASH_TOKENS, SGLANG_SHA256
from kvbm.core.errors import ConfigError, PoolError
from kvbm.core.ids import Namespace
from kvbm.engines.sglang.host_pages import HostPages, SglangPool
from kvbm.engines.sglang.identity import Place, namespace_of
from kvbm.engines.sglang.settings import ExtraConfig
from kvbm.engines.sglang.tiers import PageTiers
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.pools.object.pool import BlockObjects
from kvbm.safe_log import SafeLog

log = SafeLog()

ENGINE = "sglang"
_MAIN_POOL = "kv"
_LEAST_HOST_PAGES = 8  # two are read and two written at a time, beside others that go on to what is colder


def open_tiers(
    extra: ExtraConfig,
    pool: SglangPool,
    place: Place,
    *,
    name: str,
    server_args: Any,
    machine: str,
    served_name: str = "",
) -> PageTiers:
    """The tiers below one host pool, with a manager that has begun.

    NVMe files and an object store that cannot be used are left out with one warning, since an engine must start.

    Args: as `namespace_of`.
    Raises: ConfigError, LayoutError, PoolError, JournalError, StreamError, MissingExtraError: what cannot be used, and
        what to do.
    """
    settings = extra.settings
    copier = RowCopier(settings.pools.host.copy_threads)
    pages = HostPages(pool, segment_copies(copier))
    _check_room(settings, pages)
    namespace = namespace_of(
        pool,
        pages,
        place,
        name=name,
        server_args=server_args,
        machine=machine,
        model=extra.model,
        revision=extra.revision,
        served_name=served_name,
    )
    log.info(
        "identity.made",
        model=namespace.model,
        revision=namespace.revision,
        scheme=namespace.scheme,
        ranks=namespace.ranks,
        layout=namespace.layout,
    )
    settings, objects = _reachable(settings, namespace, pages.page_bytes)
    chain = _chain_of(namespace, name, place, server_args)
    manager = _opened(settings, namespace, pages.page_bytes, objects, chain)
    return PageTiers(
        manager,
        namespace,
        namespace.root(),
        pages,
        NATIVE.derived_hashes,
        copier.checksum_rows,
        settings.onboard.wait_s,
    )


def _chain_of(namespace: Namespace, name: str, place: Place, server_args: Any) -> ChainStatement | None:
    """What is stated of keys and values; nothing where SGLang's keys may be of anything else than a page's tokens, as
    with draft models, whose keys are of pairs of tokens.
    """
    if name != _MAIN_POOL or place.context[1] > 1 or getattr(server_args, "speculative_algorithm", True):
        return None
    tokens = namespace.block_tokens
    if tokens > MOST_HASH_TOKENS:
        return None
    return ChainStatement(
        scheme=namespace.scheme,
        scheme_seed=namespace.scheme_seed,
        kind=SGLANG_SHA256,
        begin=b"",
        hash_tokens=tokens,
        groups=(ChainGroup(namespace.kv_group, tokens),),
    )


def _check_room(settings: Settings, pages: HostPages) -> None:
    host = settings.pools.host
    slots = host.slots or host.capacity_bytes // pages.page_bytes
    if slots < _LEAST_HOST_PAGES:
        raise ConfigError(
            f"pools.host has room for {slots} pages of {pages.page_bytes} bytes, and SGLang's pages pass through it;"
            f' set "pools.host.capacity_bytes" to {_LEAST_HOST_PAGES * pages.page_bytes} or more'
        )


def _opened(
    settings: Settings,
    namespace: Namespace,
    page_bytes: int,
    objects: BlockObjects | None,
    chain: ChainStatement | None,
) -> EngineHbmManager:
    nvme = settings.pools.nvme
    try:
        return open_engine_manager(settings, [namespace], page_bytes, ENGINE, objects, chain=chain)
    except PoolError as error:
        if not (nvme.slots or nvme.capacity_bytes or nvme.folder):
            raise
        _tell_left_out("NVME", error)
    pools = msgspec.structs.replace(settings.pools, nvme=NvmeSettings())
    without = msgspec.structs.replace(settings, pools=pools)
    return open_engine_manager(without, [namespace], page_bytes, ENGINE, objects, chain=chain)


def _reachable(settings: Settings, namespace: Namespace, page_bytes: int) -> tuple[Settings, BlockObjects | None]:
    """The object pool, and settings without it where its store refuses."""
    url = settings.pools.object.url
    if not url or not namespace.revision.strip():
        return settings, None  # without a revision the manager says that it is not used
    if not settings.catalog.url:
        log.warning(
            "pool.unread",
            tier="OBJECT",
            url=url,
            notice="without catalog.url nobody tells which objects there are: they are written, and none is read",
        )
    try:
        return settings, open_objects(settings, [namespace], page_bytes)
    except PoolError as error:
        _tell_left_out("OBJECT", error)
    pools = msgspec.structs.replace(settings.pools, object=ObjectSettings())
    return msgspec.structs.replace(settings, pools=pools), None


def _tell_left_out(tier: str, error: PoolError) -> None:
    log.warning(
        "pool.left_out", tier=tier, why=str(error), notice="the engine runs without it until it is started again"
    )
