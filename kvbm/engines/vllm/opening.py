"""From vLLM's configuration to what serves it: whether it is served, by what settings, with which names and shape of
blocks.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvbm.assembly import NATIVE, open_engine_manager, open_objects
from kvbm.config import HbmSettings, NvmeSettings, ObjectSettings, PublishSettings, Settings, TransportSettings
from kvbm.core.chain_statement import ChainStatement
from kvbm.core.errors import KvbmError, PoolError
from kvbm.core.ids import Namespace, Tier
from kvbm.engines.vllm.chain import begin_of, chain_of
from kvbm.engines.vllm.facts import machine_words
from kvbm.engines.vllm.handoff import HandoffRules
from kvbm.engines.vllm.host_link import leave_host
from kvbm.engines.vllm.identity import EngineIdentity
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.metadata import HostShare
from kvbm.engines.vllm.ranks import Stage
from kvbm.engines.vllm.regions import has_mixed_layers, is_state, served_groups, specs_of, tokens_of
from kvbm.engines.vllm.requests import KvGroup
from kvbm.engines.vllm.resolved import find_resolved
from kvbm.engines.vllm.roles import EngineRole
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.engines.vllm.served import why_not_served
from kvbm.engines.vllm.settings import settings_of
from kvbm.engines.vllm.stages import StageBlocks, layout_of, ranks_of
from kvbm.engines.vllm.store_planner import StoreRules
from kvbm.engines.vllm.tenant_names import TenantNames
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.pools.host.pool import HostPool
from kvbm.pools.object.pool import BlockObjects
from kvbm.safe_log import SafeLog
from kvbm.tenant_secrets import TenantSecrets

log = SafeLog()

ENGINE = "vllm"


class ServedEngine(NamedTuple):
    """An engine that is served, as each of its processes sees it.

    Attributes:
        blocks: those of this process's pipeline stage; in the scheduler's, of the first.
    """

    vllm_config: Any
    kv_cache_config: Any
    blocks: StageBlocks

    @property
    def stages(self) -> int:
        """Of pipeline parallelism."""
        return int(self.vllm_config.parallel_config.pipeline_parallel_size)

    @property
    def workers_say(self) -> bool:
        """Whether the workers have to say how their blocks lie: of several stages, and of layers of several kinds in
        one KV group, vLLM's scheduler is told of the first alone.
        """
        return self.stages > 1 or has_mixed_layers(self.kv_cache_config)


def serve(vllm_config: Any, kv_cache_config: Any, is_telling: bool) -> ServedEngine | None:
    """What is served; None where this engine cannot be.

    Args:
        is_telling: whether to warn then; one of the engine's processes does.
    """
    why = why_not_served(vllm_config, kv_cache_config)
    blocks = StageBlocks(Stage(0), why=why) if why else StageBlocks.of(vllm_config, kv_cache_config)
    engine = ServedEngine(vllm_config, kv_cache_config, blocks)
    is_heard = engine.workers_say and not (is_telling and why)  # the workers say themselves why they are not
    if not blocks.why or is_heard:
        return engine
    if is_telling:
        tell_not_serving(blocks.why)
    return None


def tell_not_serving(why: str) -> None:
    """Say in the log why an engine is not served."""
    log.warning("connector.not_serving", why=why, notice="the engine runs as if kvbm were absent")


def open_scheduler(
    served: ServedEngine, stages: Sequence[StageBlocks], kv_transfer_config: Any, meeting: Meeting
) -> Scheduler:
    """The scheduler's half over a manager that has begun.

    Args:
        stages: what each says, from the first on.
        kv_transfer_config: vLLM's, of this connector.
        meeting: where the ranks have said what they resolved.
    Raises: ConfigError, LayoutError, PoolError, JournalError, StreamError, MissingExtraError: what cannot be used, and
        what to do.
    """
    kv_cache_config = served.kv_cache_config
    settings = _settings(served, kv_transfer_config)
    ranks = ranks_of(served.vllm_config, kv_cache_config, [one.stage for one in stages])
    groups = _groups(kv_cache_config, ranks.decode, _drops_last(served.vllm_config))
    if (left_out := len(kv_cache_config.kv_cache_groups) - len(groups)) > 0:
        log.info(
            "groups.left_out", groups=left_out, notice="they are no part of vLLM's prefix caching; it fills them anew"
        )
    said = settings.handoff
    handoff = HandoffRules(said.wait_s, said.unsaid_wait_s, said.ttl_s, said.keep_s, said.keep_most_s)
    role = EngineRole.of(kv_transfer_config.kv_role, handoff)
    settings = role.suited(_suited(settings, groups) if ranks.hosts == 1 else _of_hosts(settings, ranks.hosts))
    identity = EngineIdentity.of(
        served.vllm_config,
        kv_cache_config,
        layout_of(stages, [group.id for group in groups]),
        ranks=ranks,
        layers=[one.layers for one in stages],
        machine=machine_words(),
        resolved=find_resolved(meeting, ranks.ranks // ranks.hosts),  # those of other hosts do not come here
        secrets=TenantSecrets(settings.catalog.tenant_secrets, settings.catalog.tenant_secrets_file),
        environment=os.environ,
        tenant_in_salt=settings.handoff.tenant_in_salt,
    )
    namespaces, row_bytes = identity.named(settings.tenants), ranks.row_bytes
    settings, objects = _reachable(settings, namespaces, row_bytes)
    align_tokens = math.lcm(kv_cache_config.cache_hit_alignment_tokens or 1, *(group.block_tokens for group in groups))
    algorithm = served.vllm_config.cache_config.prefix_caching_hash_algo
    chain = chain_of(namespaces[0], groups, align_tokens, algorithm, begin_of(algorithm))
    manager = _opened(settings, namespaces, row_bytes, objects, chain)
    host = manager.pools.slots[Tier.HOST]
    assert isinstance(host, HostPool)
    share = HostShare(
        os.getpid(),
        host.fd,
        host.mapped_bytes,
        host.slots,
        ranks,
        huge_pages=settings.pools.host.huge_pages,
        token=secrets.token_hex(16),
    )
    try:
        leave_host(meeting, share, settings.pools.host.pin_s)
    except PoolError as error:  # the first plan says it too
        log.warning(
            "host.not_said", why=str(error), notice="ranks map it at the first copy, and do not register it with CUDA"
        )
    names = TenantNames(identity, [group.id for group in groups], manager.declare, settings.tenants)
    rules = StoreRules(
        stores_all=settings.offload.host == "write_through",
        by_recency=settings.pools.eviction == "lru",
        states=settings.offload.states,
    )
    if not (role.loads and role.stores):
        log.info("role.taken", role=kv_transfer_config.kv_role, loads=role.loads, stores=role.stores)
    return Scheduler(manager, NATIVE, groups, names.of, ranks, share, align_tokens, rules, role)


def copy_settings(served: ServedEngine, kv_transfer_config: Any) -> HbmSettings:
    """What a rank's copies on a GPU are told; what cannot be used the scheduler's half refuses."""
    try:
        return _settings(served, kv_transfer_config).pools.hbm
    except KvbmError:
        return HbmSettings()


def publish_settings(served: ServedEngine, kv_transfer_config: Any) -> PublishSettings:
    """What the engine tells of kvbm's tiers in its own words."""
    return _settings(served, kv_transfer_config).publish


def _settings(served: ServedEngine, kv_transfer_config: Any) -> Settings:
    parallel = served.vllm_config.parallel_config
    return settings_of(
        kv_transfer_config.kv_connector_extra_config,
        environment=os.environ,
        hbm_slots=served.kv_cache_config.num_blocks,
        data_parallel_size=parallel.data_parallel_size,
        data_parallel_rank=parallel.data_parallel_index,  # the rank is 0 where ranks are independent
    )


def _opened(
    settings: Settings,
    namespaces: Sequence[Namespace],
    row_bytes: int,
    objects: BlockObjects | None,
    chain: ChainStatement | None,
) -> EngineHbmManager:
    """The manager; without NVME where its files cannot be used, since an engine must start.

    Raises: as `open_engine_manager`.
    """
    nvme = settings.pools.nvme
    try:
        return open_engine_manager(settings, namespaces, row_bytes, ENGINE, objects, chain=chain)
    except PoolError as error:
        if not (nvme.slots or nvme.capacity_bytes or nvme.folder):
            raise
        log.warning(
            "pool.left_out",
            tier="NVME",
            why=str(error),
            notice="the engine runs without it until it is started again",
        )
    pools = msgspec.structs.replace(settings.pools, nvme=NvmeSettings())
    without = msgspec.structs.replace(settings, pools=pools)
    return open_engine_manager(without, namespaces, row_bytes, ENGINE, objects, chain=chain)


def _reachable(
    settings: Settings, namespaces: Sequence[Namespace], row_bytes: int
) -> tuple[Settings, BlockObjects | None]:
    """The object pool, and settings without it where its store refuses: an engine must start without.

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


def _drops_last(vllm_config: Any) -> bool:
    """Whether vLLM has a draft model compute the last block of a prefix again."""
    draft = vllm_config.speculative_config
    return draft is not None and bool(draft.use_eagle_block_drop())


def _groups(kv_cache_config: Any, decode: int, drops_last: bool = False) -> list[KvGroup]:
    """The engine's KV groups, those that need all blocks first.

    Args:
        decode: ranks that share a block's tokens.
        drops_last: vLLM has a draft model. Where it does not say which groups have its layers, as where all layers are
            of one group, all count as such.
    Source: vLLM's `KVCacheCoordinator.eagle_group_ids`.
    """
    groups = []
    is_anywhere = drops_last and not any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    for index in served_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        block_tokens, has_states = tokens_of(spec, decode), any(is_state(one) for one in specs_of(spec))
        hash_tokens = kv_cache_config.hash_block_size or block_tokens
        windows = {_window_tokens(one) for one in specs_of(spec)}
        window = None if None in windows else max(tokens for tokens in windows if tokens is not None)
        blocks = 1 if has_states else None if window is None else -(-(window - 1) // block_tokens)
        chunks = {_chunk_tokens(one) for one in specs_of(spec)}
        chunk = None if None in chunks else max(tokens for tokens in chunks if tokens is not None)
        has_draft = (group.is_eagle_group or is_anywhere) and not has_states
        groups.append(KvGroup(index, block_tokens, hash_tokens, blocks, has_states, chunk, has_draft))
    return sorted(groups, key=lambda group: not group.keeps_all)


def _window_tokens(spec: Any) -> int | None:
    """Tokens that attention of a layer reads back, those kept beyond for drafts among them; None: all."""
    window = getattr(spec, "sliding_window", None) if "SlidingWindow" in type(spec).__name__ else None
    return None if window is None else window + getattr(spec, "extra_retained_tokens", 0)


def _chunk_tokens(spec: Any) -> int | None:
    """Tokens of a chunk that attention of a layer does not look beyond; None: it does."""
    return int(spec.attention_chunk_size) if type(spec).__name__ == "ChunkedLocalAttentionSpec" else None


def _suited(settings: Settings, groups: list[KvGroup]) -> Settings:
    """Settings for an engine of this kind: what a window has left behind makes holes in objects, but for those of one
    block, and in what other instances would be asked for.
    """
    wanted = settings.pools.object
    if len(groups) == 1 and groups[0].keeps_all:
        return settings
    settings = _without_peers(
        settings, "models with several groups, sliding windows, chunks or states keep to own tiers and objects"
    )
    if not wanted.url:
        return settings
    if wanted.blocks > 1:
        log.warning(
            "object.one_block",
            blocks=wanted.blocks,
            notice="models with several groups, sliding windows, chunks or states have objects of one block",
        )
    objects = msgspec.structs.replace(wanted, blocks=1)
    return msgspec.structs.replace(settings, pools=msgspec.structs.replace(settings.pools, object=objects))


def _of_hosts(settings: Settings, hosts: int) -> Settings:
    """Settings without tiers behind HOST: what this process could copy there are the parts of its own host alone."""
    nvme, url = settings.pools.nvme, settings.pools.object.url
    if nvme.slots or nvme.capacity_bytes or nvme.folder or url:
        log.warning(
            "pool.left_out",
            tier="NVME and OBJECT",
            hosts=hosts,
            notice="an engine whose ranks are on several hosts keeps blocks in the memory of each host, and nowhere "
            "else",
        )
    settings = _without_peers(
        settings, "an engine whose ranks are on several hosts has parts of its blocks on each of them"
    )
    pools = msgspec.structs.replace(settings.pools, nvme=NvmeSettings(), object=ObjectSettings())
    return msgspec.structs.replace(settings, pools=pools)


def _without_peers(settings: Settings, why: str) -> Settings:
    """Settings of an instance that neither lends nor reads what others lend."""
    if settings.transport.listen or settings.transport.fetch:
        log.warning(
            "transport.left_out", notice=f"{why}; nothing is lent from here, and nothing read of other instances"
        )
    return msgspec.structs.replace(settings, transport=TransportSettings())


def _without_objects(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, pools=msgspec.structs.replace(settings.pools, object=ObjectSettings()))
