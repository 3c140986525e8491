"""From vLLM's configuration to what serves it: whether it is served, by what settings, with which names and shape of blocks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import structlog

from kvbm.assembly import NATIVE, open_engine_manager, open_objects
from kvbm.config import ObjectSettings, Settings
from kvbm.core.errors import LayoutError, PoolError
from kvbm.core.ids import Namespace, Tier
from kvbm.engines.vllm.facts import machine_words
from kvbm.engines.vllm.identity import Identity
from kvbm.engines.vllm.metadata import HostShare, Ranks
from kvbm.engines.vllm.regions import block_regions, layout_words, specs_of
from kvbm.engines.vllm.requests import Group, GroupNamespace
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.engines.vllm.served import why_not_served
from kvbm.engines.vllm.settings import settings_of
from kvbm.engines.vllm.store_planner import StoreRules
from kvbm.pools.host.pool import HostPool
from kvbm.pools.object.pool import BlockObjects
from kvbm.tenant_secrets import TenantSecrets

log = structlog.get_logger()

ENGINE = "vllm"
_MOST_KNOWN = 4096  # tenants and adapters kept at hand; clients choose their names


class Served(NamedTuple):
    """An engine that is served, as both its processes see it.

    Attributes:
        ranks: how a block is spread over ranks.
    """

    vllm_config: Any
    kv_cache_config: Any
    ranks: Ranks


def serve(vllm_config: Any, kv_cache_config: Any, is_telling: bool) -> Served | None:
    """What is served; None where this engine cannot be.

    Args:
        is_telling: whether to warn then; one of the engine's processes does.
    """
    why = why_not_served(vllm_config, kv_cache_config)
    if not why:
        try:
            part_bytes = block_regions(kv_cache_config).part_bytes
        except LayoutError as error:
            why = str(error)
        else:
            parallel = vllm_config.parallel_config
            ranks = Ranks(parallel.tensor_parallel_size, kv_cache_config.kv_tp_replicas, part_bytes)
            return Served(vllm_config, kv_cache_config, ranks)
    if is_telling:
        log.warning("connector.not_serving", why=why, notice="the engine runs as if kvbm were absent")
    return None


def open_scheduler(served: Served, extra: dict[str, Any]) -> Scheduler:
    """The scheduler's half over a manager that has begun.

    Args:
        extra: `kv_connector_extra_config`.
    Raises: ConfigError, LayoutError, PoolError, JournalError, StreamError, MissingExtraError: what cannot be used, and what to do.
    """
    parallel, kv_cache_config = served.vllm_config.parallel_config, served.kv_cache_config
    settings = settings_of(
        extra,
        environment=os.environ,
        hbm_slots=kv_cache_config.num_blocks,
        data_parallel_size=parallel.data_parallel_size,
        data_parallel_rank=parallel.data_parallel_index,  # the rank is 0 where ranks are independent
    )
    groups = _groups(kv_cache_config)
    settings = _suited(settings, groups)
    identity = Identity.of(
        served.vllm_config,
        kv_cache_config,
        " | ".join(layout_words(kv_cache_config, group.id, served.ranks) for group in groups),
        machine=machine_words(),
        secrets=TenantSecrets(settings.catalog.tenant_secrets, settings.catalog.tenant_secrets_file),
        environment=os.environ,
    )
    namespaces, row_bytes = identity.named(settings.tenants), served.ranks.row_bytes
    settings, objects = _reachable(settings, namespaces, row_bytes)
    manager = open_engine_manager(settings, namespaces, row_bytes, ENGINE, objects)
    host = manager.pools.slots[Tier.HOST]
    assert isinstance(host, HostPool)
    share = HostShare(
        os.getpid(), host.fd, host.mapped_bytes, host.slots, served.ranks.row_bytes, served.ranks.part_bytes
    )
    known: dict[tuple[str, str, str], list[GroupNamespace]] = {}

    def namespaces_of(request: Any, weights: str = "") -> list[GroupNamespace]:
        tenant, lora = identity.tenant_of(request), identity.lora_of(request, weights)
        whose = tenant, lora, identity.secret_of(tenant)
        found = known.get(whose)
        if found is None:
            names = identity.namespaces(tenant, lora)
            manager.declare(names)
            found = [GroupNamespace(names[group.id].id, identity.root(names[group.id])) for group in groups]
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[whose] = found
        return found

    align_tokens = math.lcm(kv_cache_config.cache_hit_alignment_tokens or 1, *(group.block_tokens for group in groups))
    rules = StoreRules(stores_all=settings.offload.host == "write_through", by_recency=settings.pools.eviction == "lru")
    return Scheduler(manager, NATIVE, groups, namespaces_of, served.ranks, share, align_tokens, rules)


def _reachable(
    settings: Settings, namespaces: Sequence[Namespace], row_bytes: int
) -> tuple[Settings, BlockObjects | None]:
    """The object pool, and settings without it where its store does not answer: an engine must start without.

    Raises: ConfigError, MissingExtraError: what no waiting would mend.
    """
    if not settings.pools.object.url or not namespaces[0].revision.strip():
        return settings, None  # without a revision the manager says that it is not used
    if not settings.catalog.url:
        log.warning(
            "pool.unread",
            tier="OBJECT",
            url=settings.pools.object.url,
            notice="without catalog.url nobody tells which objects there are: they are written, and none is read",
        )
    try:
        return settings, open_objects(settings, namespaces, row_bytes)
    except PoolError as error:
        log.warning(
            "pool.left_out",
            tier="OBJECT",
            why=str(error),
            notice="the engine runs without it until it is started again",
        )
        return _without_objects(settings), None


def _groups(kv_cache_config: Any) -> list[Group]:
    """The engine's KV groups, those that need all blocks first."""
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        block_tokens = spec.block_size
        hash_tokens = kv_cache_config.hash_block_size or block_tokens
        windows = {_window_tokens(one) for one in specs_of(spec)}
        window = None if None in windows else max(tokens for tokens in windows if tokens is not None)
        blocks = None if window is None else -(-(window - 1) // block_tokens)
        groups.append(Group(index, block_tokens, hash_tokens, blocks))
    return sorted(groups, key=lambda group: group.window_blocks is not None)


def _window_tokens(spec: Any) -> int | None:
    """Tokens that attention of a layer reads back, those kept beyond for drafts among them; None: all."""
    window = getattr(spec, "sliding_window", None) if "SlidingWindow" in type(spec).__name__ else None
    return None if window is None else window + getattr(spec, "extra_retained_tokens", 0)


def _suited(settings: Settings, groups: list[Group]) -> Settings:
    """Settings without what an engine of this kind cannot use."""
    if (len(groups) == 1 and groups[0].window_blocks is None) or not settings.pools.object.url:
        return settings
    log.warning(
        "pool.left_out",
        tier="OBJECT",
        url=settings.pools.object.url,
        notice="models with sliding windows use HOST and NVME: what a window has left behind makes holes in objects",
    )
    return _without_objects(settings)


def _without_objects(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, pools=msgspec.structs.replace(settings.pools, object=ObjectSettings()))
