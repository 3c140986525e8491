"""Ranks that share the tokens of a block (decode context parallelism), and ranks that compute a prompt together
(prefill context parallelism).

vLLM's attention for a CPU can do neither. So its own configuration, scheduler, block pool, allocation and aggregator
run here with the connector and a worker for each rank, and only the model is in script: it writes of each token what
must be found at its place again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
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
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvbm.core.ids import Tier
from kvbm.engines.vllm.connector import KvbmWorkerMetadata
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.resolved import leave_resolved
from kvbm.engines.vllm.worker import RankWorker
from tests.engines.vllm.harness.setups import connector
from tests.engines.vllm.harness.words import BLOCK_TOKENS

LONG_S = 120.0
LAYERS, HEADS, HEAD_SIZE = 2, 1, 8
HBM_BLOCKS = 40


class Sizes(NamedTuple):
    """Of an engine."""

    tensor: int
    decode: int = 1
    prefill: int = 1
    interleave: int = 1

    @property
    def block_tokens(self) -> int:
        """Of all ranks that share a block's tokens."""
        return BLOCK_TOKENS * self.decode

    def decode_rank(self, rank: int) -> int:
        """Which share of a block's tokens a rank has: groups lie over ranks of prefill first, then over those of tensor
        parallelism.
        """
        prefill, tensor = divmod(rank, self.tensor)
        return (tensor * self.prefill + prefill) % self.decode


CASES = {
    "two share tokens": Sizes(4, decode=2),
    "two share tokens, a block of each at a time": Sizes(4, decode=2, interleave=BLOCK_TOKENS),
    "two compute prompts": Sizes(2, prefill=2),
    "two compute prompts and share tokens": Sizes(1, prefill=2, decode=2),
    "four compute prompts and share tokens": Sizes(2, prefill=2, decode=4, interleave=8),
}


def config_of(model: str, sizes: Sizes, folder: Path) -> Any:
    """vLLM's, of such an engine.

    Prefill context parallelism needs a runner of models that is not there on a CPU, so it is put in here.
    """
    alone = {"decode_context_parallel_size": sizes.decode} if sizes.prefill == 1 else {}
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        num_gpu_blocks_override=HBM_BLOCKS,
        tensor_parallel_size=sizes.tensor,
        cp_kv_cache_interleave_size=sizes.interleave,
        kv_transfer_config=connector(folder, {"pools.nvme.slots": 100}),
        **alone,
    ).create_engine_config()
    parallel = config.parallel_config
    parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size = sizes.prefill, sizes.decode
    parallel.world_size = sizes.tensor * sizes.prefill
    parallel.distributed_executor_backend = "mp"
    config.cache_config.kv_cache_layout = KVCacheLayout.LBNHC.name
    return config


def value(tokens: list[int], position: int, shard: int) -> int:
    """What a rank keeps of a token: all before it count, and which heads it has."""
    said = hashlib.sha256(repr((tokens[: position + 1], shard)).encode()).digest()
    return said[0]


class Rank:
    """A worker, and the KV of a model in script."""

    def __init__(self, rank: int, sizes: Sizes, config: Any) -> None:
        self.sizes, self.rank = sizes, rank
        self.shard = rank % sizes.tensor if sizes.decode == 1 else 0  # those that share tokens have the same heads
        self.tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [BLOCK_TOKENS])
        self.worker = RankWorker(rank, config, threads=1, interleave=sizes.interleave if sizes.decode > 1 else 1)
        self.worker.register(self.tensors)
        assert self.worker.refused == ""

    def places(self, blocks: list[int], count: int) -> Iterator[tuple[int, int, int]]:
        """Of each of a prompt's tokens that is this rank's: its position, its block and where in that it is.

        Source: vLLM's `compute_slot_mapping`, for block tables under context parallelism.
        """
        sizes, own = self.sizes, self.sizes.decode_rank(self.rank)
        for position in range(count):
            block, within = divmod(position, sizes.block_tokens)
            if within // sizes.interleave % sizes.decode == own:
                turn = within // (sizes.decode * sizes.interleave)
                yield position, blocks[block], turn * sizes.interleave + within % sizes.interleave

    def compute(self, tokens: list[int], blocks: list[int], begin: int, end: int) -> None:
        for position, block, at in self.places(blocks, end):
            if position >= begin:
                for view in self.tensors.values():
                    view[block, :, at] = float(value(tokens, position, self.shard))

    def lost(self, tokens: list[int], blocks: list[int], end: int) -> list[int]:
        """Positions whose KV is not what it was computed to be."""
        return [
            position
            for position, block, at in self.places(blocks, end)
            for view in self.tensors.values()
            if not (view[block, :, at] == float(value(tokens, position, self.shard))).all()
        ]

    def overwrite(self) -> None:
        for view in self.tensors.values():
            view.fill_(-1.0)


class Engine:
    """vLLM's scheduler with the connector, and a rank for each worker."""

    def __init__(self, model: str, sizes: Sizes, folder: Path) -> None:
        self.sizes, self.config = sizes, config_of(model, sizes, folder)
        count = sizes.tensor * sizes.prefill
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            max_tp_shards=sizes.tensor,
        )
        specs = [{f"layer.{layer}": spec for layer in range(LAYERS)} for _ in range(count)]
        configs = get_kv_cache_configs(self.config, specs, [1 << 24] * count)
        plan = generate_scheduler_kv_cache_config(configs)
        self.config.cache_config.num_gpu_blocks = plan.num_blocks
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(plan, self.config)
        align = resolve_cache_hit_alignment_tokens(plan, self.config, block_tokens, hash_tokens)
        for one in (*configs, plan):
            one.kv_cache_layout = KVCacheLayout.LBNHC.name
            one.hash_block_size, one.cache_hit_alignment_tokens = hash_tokens, align
        assert block_tokens == hash_tokens == sizes.block_tokens
        self.ranks = [Rank(rank, sizes, configs[rank]) for rank in range(count)]
        meeting = Meeting(self.config.kv_transfer_config.engine_id)
        for rank in range(count):  # what a connector says of vLLM's own layers, which are not here
            leave_resolved(meeting, rank, {"layout": KVCacheLayout.LBNHC.name, "layers": []})
        self.scheduler = Scheduler(self.config, plan, StructuredOutputManager(self.config), block_tokens, hash_tokens)
        self.half = self.scheduler.connector._scheduler  # type: ignore[union-attr]
        assert self.half is not None
        self.aggregator = KVOutputAggregator(count)
        function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self._begins: list[int] = []  # where each step of a request goes on
        self.hasher = get_request_block_hasher(hash_tokens, function)

    def ask(self, name: str, tokens: list[int]) -> int:
        """Compute a prompt and one token after it; gives how many of its tokens were not computed, once the KV of all
        was found right.
        """
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(name, tokens, params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self._begins.clear()
        while not request.is_finished():
            self._step(request)
        self._idle()
        return self._begins[0]

    def settle(self) -> None:
        """Until everything stored has reached NVMe."""
        self._idle()
        assert self.half.manager.settle(LONG_S)

    def forget(self) -> None:
        assert self.scheduler.reset_prefix_cache()
        for rank in self.ranks:
            rank.overwrite()

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self.scheduler.shutdown()

    def _idle(self) -> None:
        while self.scheduler.has_requests() or self.half.stores.has_work():
            self._step(None)

    def _step(self, request: Request | None) -> None:
        """One step of all."""
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        for rank in self.ranks:
            rank.worker.begin(output.kv_connector_metadata.plan)  # type: ignore[union-attr]
            assert rank.worker.flush(LONG_S)
        if request is not None and request.request_id in scheduled:
            begin = request.num_computed_tokens - scheduled[request.request_id]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            tokens = list(request.all_token_ids)
            self._begins.append(begin)
            for rank in self.ranks:
                assert rank.lost(tokens, blocks, begin) == []  # what vLLM takes for computed
                rank.compute(tokens, blocks, begin, request.num_computed_tokens)
        names = list(scheduled)
        sampled = [[7] for _ in names]
        outputs = [
            ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=said)
            for said in map(self._said, self.ranks)
        ]
        whole = self.aggregator.aggregate(outputs)
        assert whole is not None
        self.scheduler.update_from_output(output, whole)

    def _said(self, rank: Rank) -> KVConnectorOutput:
        answers, received = rank.worker.finish(), rank.worker.received()
        said = KvbmWorkerMetadata(answers) if answers else None
        return KVConnectorOutput(
            finished_recving=received.finished, failed_recving=received.failed, kv_connector_worker_meta=said
        )


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, tokens).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_each_ranks_tokens_come_back_from_host_and_from_nvme(llama, tmp_path, name):
    sizes = CASES[name]
    asks = [prompt(seed, 5 * sizes.block_tokens + 3 * seed) for seed in (1, 2)]
    engine = Engine(llama, sizes, tmp_path / "a")
    ranks = engine.half._host.ranks
    assert len(ranks.part_sizes) == (sizes.tensor * sizes.prefill if sizes.decode > 1 else sizes.tensor)
    assert [engine.ask(f"cold-{at}", tokens) for at, tokens in enumerate(asks)] == [0, 0]
    engine.forget()
    assert [engine.ask(f"warm-{at}", tokens) for at, tokens in enumerate(asks)] == [5 * sizes.block_tokens] * 2
    engine.settle()
    engine.close()
    engine = Engine(llama, sizes, tmp_path / "a")
    assert [engine.ask(f"again-{at}", tokens) for at, tokens in enumerate(asks)] == [5 * sizes.block_tokens] * 2
    assert engine.half.manager.stats().hit_blocks[Tier.NVME] == 10
    engine.close()


@pytest.mark.parametrize("other", [Sizes(4), Sizes(4, decode=2, interleave=16)], ids=["not shared", "in another order"])
def test_over_the_volume_of_ranks_that_share_tokens_otherwise_an_engine_starts_cold(llama, tmp_path, other):
    sizes, tokens = CASES["two share tokens"], prompt(3, 300)
    engine = Engine(llama, sizes, tmp_path / "a")
    assert engine.ask("cold", tokens) == 0
    engine.settle()
    engine.close()
    engine = Engine(llama, other, tmp_path / "a")
    assert engine.ask("other", tokens) == 0
    engine.forget()
    assert engine.ask("warm", tokens) > 0
    engine.close()


def test_a_rank_that_shares_tokens_otherwise_than_the_scheduler_was_told_takes_no_part(llama, tmp_path):
    """As with NixlConnector beside kvbm: vLLM then gives workers another interleave than the scheduler's configuration
    has.
    """
    engine = Engine(llama, CASES["two share tokens"], tmp_path / "a")
    engine.ranks[1].worker._interleave = BLOCK_TOKENS
    tokens = prompt(4, 300)
    assert engine.ask("cold", tokens) == 0
    engine.forget()
    assert engine.ask("again", tokens) == 0
    assert "rank 1: this rank keeps 32 tokens in a row of each block, the scheduler was told 1" in engine.half.refusal
    engine.close()
