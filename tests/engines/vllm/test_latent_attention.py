"""Latent attention (MLA), of one kind of layer and with DeepSeek V3.2's indexers beside it: what was stored comes back
from HOST and from NVMe, ranks that hold the same keep it once, and a byte that has changed is a miss.

vLLM's attention for a CPU switches its prefix cache off for such models, so engines are `scripted`: all but the forward
is vLLM's own, its layers of DeepSeek V3 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DeepseekV3Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized, ensure_kv_transfer_shutdown
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvbm.core.ids import Tier
from kvbm.engines.vllm.connector import KvbmConnector
from tests.engines.vllm.harness.registry import be_the_only_rank
from tests.engines.vllm.harness.scripted import ScriptedEngine, config_of, layers_of, model_folder, prompt

LATENT, ROPE = 512, 64  # numbers that DeepSeek V2 and V3 keep of a token in each layer
INDEX_BYTES = 128 + 4  # of an indexer, in eight bits, and a scale
TOKENS = 16  # of a block: what vLLM makes of any size for latent attention on a CPU
BLOCKS = 5


class Model(NamedTuple):
    """A model's folder, and the KV of its layers: alone, and with an indexer before each as DeepSeek V3.2 has it."""

    folder: str
    latent: Mapping[str, KVCacheSpec]
    indexed: Mapping[str, KVCacheSpec]


class Shape(NamedTuple):
    """Of an engine."""

    layers: str
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    ranks: int = 1


SHAPES = {
    "latent": Shape("latent"),
    "latent, packed": Shape("latent", KVCacheLayout.BLNHC),
    "latent, two ranks": Shape("latent", ranks=2),
    "latent, four ranks, packed": Shape("latent", KVCacheLayout.BLNHC, ranks=4),
    "indexed": Shape("indexed"),
    "indexed, packed": Shape("indexed", KVCacheLayout.BLNHC),
    "indexed, two ranks": Shape("indexed", ranks=2),
    "indexers behind": Shape("indexed behind"),
    "indexers behind, packed": Shape("indexed behind", KVCacheLayout.BLNHC),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    sizes = DeepseekV3Config(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=4096,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        q_lora_rank=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    folder = model_folder(
        tmp_path_factory.mktemp("models") / "deepseek", sizes, architectures=["DeepseekV3ForCausalLM"]
    )
    latent, config = layers_of(config_of(folder, None)), config_of(folder, None, block_size=TOKENS)
    indexed: dict[str, KVCacheSpec] = {}
    with set_current_vllm_config(config):
        for name, spec in latent.items():
            indexer = DeepseekV32IndexerCache(INDEX_BYTES, torch.uint8, f"{name}.indexer", config.cache_config)
            indexed |= {f"{name}.indexer": indexer.get_kv_cache_spec(config), name: spec}
    return Model(folder, latent, indexed)


def layers(model: Model, which: str) -> dict[str, KVCacheSpec]:
    """The KV of a model's layers; vLLM's scheduler is told of the first one's kind alone."""
    found = dict(model.latent if which == "latent" else model.indexed)
    return {name: found[name] for name in sorted(found, key=len)} if which == "indexed behind" else found


def vllm_config(model: Model, shape: Shape, kept: Path | None, settings: Mapping[str, Any] | None = None) -> VllmConfig:
    return config_of(model.folder, kept, settings, shape.layout, block_size=TOKENS, tensor_parallel_size=shape.ranks)


def engine(model: Model, shape: Shape, kept: Path | None, settings: Mapping[str, Any] | None = None) -> ScriptedEngine:
    return ScriptedEngine(vllm_config(model, shape, kept, settings), layers(model, shape.layers))


def test_vllms_own_layers_are_as_deepseeks(model: Model) -> None:
    for name, spec in model.indexed.items():
        assert isinstance(spec, MLAAttentionSpec)
        assert spec.max_tp_shards == 1  # all ranks have all of it
        size = INDEX_BYTES if name.endswith("indexer") else 2 * (LATENT + ROPE)
        assert spec.page_size_bytes == TOKENS * size
    assert len(model.indexed) == 2 * len(model.latent) == 4


@pytest.mark.bytes
@pytest.mark.parametrize("name", SHAPES)
def test_latents_come_back_from_host_and_after_a_restart_from_nvme(model, tmp_path, name):
    shape, nvme = SHAPES[name], {"pools.nvme.slots": 100}
    whole, asks = BLOCKS * TOKENS, [prompt(seed, BLOCKS * TOKENS + 3 * seed) for seed in (0, 1)]
    goes_on = asks[0] + prompt(9, TOKENS)
    with engine(model, shape, None) as plain:
        for at, tokens in enumerate(asks):
            assert plain.ask(f"cold-{at}", tokens) == 0
        own = [plain.ask(f"warm-{at}", tokens) for at, tokens in enumerate([*asks, goes_on])]
        assert own == [whole - TOKENS, whole, whole]  # one token at least is computed
    with engine(model, shape, tmp_path / "a", nvme) as first:
        assert first.half is not None, "not served"
        page = sum(spec.page_size_bytes for spec in layers(model, shape.layers).values())
        assert first.half._host.ranks.part_sizes == (page,)  # of all ranks together
        for at, tokens in enumerate(asks):
            assert first.ask(f"cold-{at}", tokens) == 0
        first.forget()
        for at, tokens in enumerate([*asks, goes_on]):
            assert first.ask(f"warm-{at}", tokens) == own[at]
            first.forget()
        first.settle()
        assert first.half.refusal == ""
    with engine(model, shape, tmp_path / "a", nvme) as second:
        assert [second.ask(f"again-{at}", tokens) for at, tokens in enumerate(asks)] == own[:2]
        assert second.hit_blocks(Tier.NVME) == 2 * BLOCKS - 1
        assert second.half.refusal == ""


@pytest.mark.bytes
@pytest.mark.parametrize("which", ["latent", "indexed"])
def test_what_all_ranks_hold_is_stored_by_the_first_and_read_by_all(model, tmp_path, which):
    """The second rank's script writes other bytes than the first's, so it is seen whose are read."""
    tokens = prompt(3, BLOCKS * TOKENS + 1)
    with engine(model, Shape(which, ranks=2), tmp_path / "a") as both:
        first, second = both.ranks
        assert first.shard == second.shard == 0
        second.shard = 9
        assert both.ask("cold", tokens) == 0
        both.forget()
        second.shard = 0
        assert both.ask("warm", tokens) == BLOCKS * TOKENS
        page = sum(spec.page_size_bytes for spec in layers(model, which).values())
        said = [rank.worker.take_numbers() for rank in (first, second)]
        assert [numbers.get("stored_bytes", 0) for numbers in said] == [BLOCKS * page, 0]
        assert [numbers.get("loaded_bytes", 0) for numbers in said] == [BLOCKS * page] * 2
        assert both.half.manager.pools.slots[Tier.HOST].memory.shape[1] == page


@pytest.mark.bytes
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("which", ["latent", "indexed"])
def test_a_latent_that_has_changed_on_disk_is_a_miss_from_its_block_on(model, tmp_path, which, block):
    shape, nvme, tokens = Shape(which), {"pools.nvme.slots": 100}, prompt(4, BLOCKS * TOKENS + 1)
    with engine(model, shape, tmp_path / "a", nvme) as first:
        assert first.ask("cold", tokens) == 0
        first.settle()
        layer = next(iter(layers(model, which)))
        wanted = first.ranks[0].values(layer, tokens, block * TOKENS + block, block * TOKENS + block + 1).tobytes()
    found = [path for path in tmp_path.rglob("*") if path.is_file() and wanted in path.read_bytes()]
    assert len(found) == 1, "the bytes of a token lie once in the files"
    data = found[0].read_bytes()
    at = data.index(wanted) + len(wanted) - 1
    with found[0].open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    with engine(model, shape, tmp_path / "a", nvme) as second:
        assert second.ask("again", tokens) == block * TOKENS
        assert second.half.manager.stats().corrupt_blocks == 1


def test_engines_with_indexers_and_without_never_share(model, tmp_path):
    tokens, nvme = prompt(5, BLOCKS * TOKENS + 1), {"pools.nvme.slots": 100}
    for which in ("latent", "indexed", "latent"):
        with engine(model, Shape(which), tmp_path / "a", nvme) as one:
            assert one.ask("cold", tokens) == 0
            one.forget()
            assert one.ask("warm", tokens) == BLOCKS * TOKENS
            one.settle()


@pytest.mark.parametrize("which", ["latent", "indexed", "indexed behind"])
def test_a_worker_says_how_its_blocks_lie_where_vllms_scheduler_is_not_told(model, tmp_path, which):
    """Of layers of several sizes in one KV group the scheduler's KVCacheConfig has the first one's alone."""
    config = vllm_config(model, Shape(which), tmp_path / "a")
    with ScriptedEngine(config, layers(model, which)) as running, set_current_vllm_config(config):
        be_the_only_rank()
        ensure_kv_transfer_initialized(config, running.configs[0])
        try:
            worker = get_kv_transfer_group()
            assert isinstance(worker, KvbmConnector)
            worker.register_kv_caches(running.ranks[0].tensors)
            said = worker._handshake
        finally:
            ensure_kv_transfer_shutdown()
    assert (said is not None) == (which != "latent")
    if said is not None:
        page = sum(spec.page_size_bytes for spec in layers(model, which).values())
        assert (said.stage, said.blocks.stage.part_bytes, said.blocks.why) == (0, page, "")
