"""Engines of models that vLLM's attention for a CPU cannot run, or not with its prefix cache: latent attention, draft
models, chunks, scales.

vLLM's own configuration, layers, KV groups, scheduler, block pool, allocation and aggregator, with the connector and a
worker for each rank. Only the forward is in script: it writes of each token, into every byte that its layer keeps of
it, what must be found at its place again; a layer of a draft model what depends on the next token, too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvbm.core.ids import Tier
from kvbm.engines.vllm.connector import KvbmHandshake, KvbmWorkerMetadata
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.resolved import leave_resolved
from kvbm.engines.vllm.stages import StageBlocks
from kvbm.engines.vllm.worker import RankWorker
from tests.engines.vllm.harness.registry import be_the_only_rank
from tests.engines.vllm.harness.setups import connector

LONG_S = 120.0
SAMPLED = 7  # every token that is generated
GARBAGE = 0xEE
HBM_BLOCKS = 300


def model_folder(folder: Path, config: Any, **values: Any) -> str:
    """A model that is its configuration alone; vLLM makes up the weights."""
    folder.mkdir(parents=True)
    said = json.loads(config.to_json_string(use_diff=False)) | values
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder)


def config_of(
    model: str,
    kept: Path | None,
    settings: Mapping[str, Any] | None = None,
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    **given: Any,
) -> VllmConfig:
    """vLLM's configuration of an engine.

    Args:
        kept: where kvbm has its files; None: vLLM without it.
        given: further arguments of vLLM's `EngineArgs`.
    """
    transfer = {} if kept is None else {"kv_transfer_config": connector(kept, settings)}
    wanted = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": HBM_BLOCKS,
    }
    config = EngineArgs(model=model, **(wanted | transfer | given)).create_engine_config()
    # Both are off for latent attention on a CPU, and on for it on a GPU.
    config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True
    config.cache_config.kv_cache_layout = layout.name
    parallel = config.parallel_config
    parallel.world_size = parallel.tensor_parallel_size
    parallel.distributed_executor_backend = "mp"
    return config


def layers_of(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What vLLM's own layers of a model say of their KV, by name."""
    with set_current_vllm_config(config):
        be_the_only_rank()
        with torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
    modules = config.compilation_config.static_forward_context.items()
    found = {name: one.get_kv_cache_spec(config) for name, one in modules if isinstance(one, AttentionLayerBase)}
    return {name: spec for name, spec in found.items() if spec is not None}


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens without a beginning in common with those of another seed, and none that is generated."""
    return np.random.default_rng(seed).integers(10, 500, tokens).tolist()  # type: ignore[no-any-return]


class ScriptedRank:
    """A worker, and the KV of a model in script."""

    def __init__(self, rank: int, config: KVCacheConfig, layout: KVCacheLayout, drafts: frozenset[str]) -> None:
        """Args: drafts: the layers of a draft model."""
        self.shard = rank // config.kv_tp_replicas  # which heads it has
        self._groups, self._drafts = config.kv_cache_groups, drafts
        sizes = [group.kv_cache_spec.block_size for group in self._groups]
        self.tensors = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
        self.bytes = {name: view.view(torch.uint8).numpy() for name, view in self.tensors.items()}  # block, head, token
        self.worker = RankWorker(rank, config, threads=1)
        self.worker.register(self.tensors)

    def compute(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], begin: int, end: int) -> None:
        """A forward over some tokens of a request, whose blocks are given by KV group."""
        for index, name, size in self._layers():
            places = _places(blocks[index], size, begin, end)
            assert places.block.all(), f"{name}: vLLM has no block for some of the tokens from {begin} to {end}"
            self.bytes[name][places.block, :, places.at] = self.values(name, tokens, begin, end)

    def lost(self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], end: int) -> list[tuple[str, int]]:
        """Layers and positions before `end` that attention reads from there on, and finds not as they were computed."""
        lost: list[tuple[str, int]] = []
        for index, name, size in self._layers():
            begin = first_read(self._groups[index].kv_cache_spec, end)
            places = _places(blocks[index], size, begin, end)
            found = self.bytes[name][places.block, :, places.at]
            right = (found == self.values(name, tokens, begin, end)).all(axis=(1, 2)) & (places.block != 0)
            lost += [(name, begin + int(at)) for at in np.flatnonzero(~right)]
        return lost

    def values(self, name: str, tokens: Sequence[int], begin: int, end: int) -> np.ndarray:
        """All that a layer keeps of some tokens: those before count, and for a draft model the next one.

        Returns: uint8, by token, head and content.
        """
        _, heads, _, size = self.bytes[name].shape
        seen = [*tokens, SAMPLED]
        drawn = []
        for position in range(begin, end):
            count = position + 1 + (name in self._drafts)
            drawn.append(_drawn(tuple(seen[:count]), f"{name} {self.shard}", heads * size))
        return np.frombuffer(b"".join(drawn), dtype=np.uint8).reshape(-1, heads, size)

    def overwrite(self) -> None:
        """Garbage everywhere."""
        for view in self.bytes.values():
            view.fill(GARBAGE)

    def _layers(self) -> Iterator[tuple[int, str, int]]:
        """Layers with their KV group and tokens of a block. Those that no prefix is made of are a request's own,
        written anew: the script leaves them alone.
        """
        for index, group in enumerate(self._groups):
            if group.kv_cache_spec.prefix_cacheable:
                yield from ((index, name, group.kv_cache_spec.block_size) for name in group.layer_names)


class _Places(NamedTuple):
    """Where some tokens lie: their blocks, and their places in them."""

    block: np.ndarray
    at: np.ndarray


def _places(blocks: Sequence[int], size: int, begin: int, end: int) -> _Places:
    positions = np.arange(begin, end)
    return _Places(np.asarray(blocks, dtype=np.int64)[positions // size], positions % size)


@lru_cache(maxsize=100_000)
def _drawn(seen: tuple[int, ...], key: str, size: int) -> bytes:
    return hashlib.shake_128(np.asarray(seen, dtype="<u2").tobytes() + key.encode()).digest(size)


def first_read(spec: KVCacheSpec, end: int) -> int:
    """The first position that a layer's attention reads for the token at `end`."""
    (one, *_) = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    if isinstance(one, SlidingWindowSpec):
        return max(0, end - (int(one.sliding_window) - 1))
    if isinstance(one, ChunkedLocalAttentionSpec):
        return end // int(one.attention_chunk_size) * int(one.attention_chunk_size)
    return 0


class ScriptedEngine:
    """vLLM's scheduler, with the connector where it is configured, and ranks."""

    def __init__(
        self,
        config: VllmConfig,
        layers: Mapping[str, KVCacheSpec],
        drafts: Collection[str] = (),
        resolved: Mapping[str, Any] | None = None,
    ) -> None:
        """Start it.

        Args:
            config: as `config_of` gives it; an engine's own.
            layers: what each rank has.
            drafts: those of a draft model.
            resolved: what each rank says that its vLLM has resolved; None: nothing but the layout.
        """
        self.config = config
        count = config.parallel_config.tensor_parallel_size
        layout = KVCacheLayout[config.cache_config.kv_cache_layout]
        configs = get_kv_cache_configs(config, [dict(layers) for _ in range(count)], [1 << 30] * count)
        self.plan = generate_scheduler_kv_cache_config(configs)
        config.cache_config.num_gpu_blocks = self.plan.num_blocks
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(self.plan, config)
        align = resolve_cache_hit_alignment_tokens(self.plan, config, block_tokens, hash_tokens)
        for one in (*configs, self.plan):
            one.kv_cache_layout = layout.name
            one.hash_block_size, one.cache_hit_alignment_tokens = hash_tokens, align
        self.block_tokens = block_tokens
        self.configs = configs
        self.ranks = [ScriptedRank(rank, configs[rank], layout, frozenset(drafts)) for rank in range(count)]
        transfer = config.kv_transfer_config
        if transfer is not None:
            meeting = Meeting(str(transfer.engine_id))
            for rank in range(count):  # what a connector says of vLLM's own layers, which are not here
                leave_resolved(meeting, rank, resolved or {"layout": layout.name, "layers": []})
        self.scheduler = Scheduler(config, self.plan, StructuredOutputManager(config), block_tokens, hash_tokens)
        if transfer is not None:  # as vLLM's core does once it has its scheduler
            said = {(0, at): KvbmHandshake(0, StageBlocks.of(config, one)) for at, one in enumerate(configs)}
            self.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(said)
        self.aggregator = KVOutputAggregator(count)
        function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(hash_tokens, function)
        self._begins: list[int] = []  # where each step of a request goes on

    @property
    def half(self) -> Any:
        """The connector's half beside vLLM's scheduler; None: the engine is not served."""
        return self.scheduler.connector._scheduler

    def request(self, name: str, tokens: Sequence[int], generated: int = 2) -> Request:
        """A request that generates so many tokens."""
        params = SamplingParams(max_tokens=generated, ignore_eos=True)
        params.update_from_generation_config({}, None)
        return Request(name, list(tokens), params, None, block_hasher=self._hasher)

    def ask(self, name: str, tokens: Sequence[int], generated: int = 2) -> int:
        """Compute a prompt and the token after it; gives how many tokens were not computed, once the KV of all was
        found right.
        """
        request = self.request(name, tokens, generated)
        self.scheduler.add_request(request)
        self._begins.clear()
        until_s = time.monotonic() + LONG_S
        while not request.is_finished():
            assert time.monotonic() < until_s, f"{name} does not end"
            self._step(request)
        self._idle()
        return self._begins[0]

    def own_hit(self, tokens: Sequence[int], most: int | None = None) -> int:
        """Tokens of a prompt that vLLM's own prefix cache has now.

        Args:
            most: tokens that it looks at; None: as many as its scheduler lets it.
        """
        request = self.request("looked up", tokens)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        _, hit, _ = coordinator.find_longest_cache_hit(request.block_hashes, len(tokens) - 1 if most is None else most)
        return int(hit)

    def hit_blocks(self, tier: Tier) -> int:
        """Blocks that requests had from a tier."""
        return int(self.half.manager.stats().hit_blocks.get(tier, 0))

    def settle(self) -> None:
        """Until everything stored has reached NVMe."""
        self._idle()
        assert self.half.manager.settle(LONG_S)

    def forget(self) -> None:
        """Nothing is in HBM but garbage."""
        assert self.scheduler.reset_prefix_cache()
        for rank in self.ranks:
            rank.overwrite()

    def close(self) -> None:
        """End it."""
        for rank in self.ranks:
            rank.worker.close()
        self.scheduler.shutdown()

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _idle(self) -> None:
        until_s, kvbm = time.monotonic() + LONG_S, self.scheduler.connector and self.half
        while self.scheduler.has_requests() or (kvbm and kvbm.stores.has_work()):
            assert time.monotonic() < until_s, "the engine does not come to rest"
            self._step(None)

    def _step(self, request: Request | None) -> None:
        """One step of all."""
        output = self.scheduler.schedule()
        scheduled, said_plan = output.num_scheduled_tokens, output.kv_connector_metadata
        if said_plan is not None:
            for rank in self.ranks:
                rank.worker.begin(said_plan.plan)
                assert rank.worker.flush(LONG_S)
        if request is not None and request.request_id in scheduled:
            begin = request.num_computed_tokens - scheduled[request.request_id]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            tokens = list(request.all_token_ids)
            self._begins.append(begin)
            for rank in self.ranks:
                lost = rank.lost(tokens, blocks, begin)
                assert lost == [], f"{len(lost)} places of {begin} tokens that vLLM takes for computed"
                rank.compute(tokens, blocks, begin, request.num_computed_tokens)
        names = list(scheduled)
        is_prefilled = request is None or request.num_computed_tokens >= request.num_tokens
        sampled = [[SAMPLED] if is_prefilled else [] for _ in names]
        outputs = [
            ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=said)
            for said in map(self._said, self.ranks)
        ]
        whole = self.aggregator.aggregate(outputs)
        assert whole is not None
        self.scheduler.update_from_output(output, whole)

    def _said(self, rank: ScriptedRank) -> KVConnectorOutput | None:
        if self.scheduler.connector is None:
            return None
        answers, received = rank.worker.finish(), rank.worker.received()
        said = KvbmWorkerMetadata(answers) if answers else None
        return KVConnectorOutput(
            finished_recving=received.finished, failed_recving=received.failed, kv_connector_worker_meta=said
        )
