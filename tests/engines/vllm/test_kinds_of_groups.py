"""KV groups beside those of full attention: chunks (Llama 4), blocks of several sizes, groups that no prefix is made
of, attention sinks, and eight bits with scales.

The engines are `scripted`: what kvbm finds is held against what vLLM's own prefix cache finds of the same prompts, and
each byte that attention would read against what was computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import GptOssConfig, Llama4TextConfig, LlamaConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvbm.assembly import NATIVE
from kvbm.core.ids import Tier
from kvbm.engines.vllm.opening import serve
from kvbm.engines.vllm.regions import block_regions
from kvbm.engines.vllm.requests import RequestState
from kvbm.engines.vllm.resolved import resolved_of
from kvbm.engines.vllm.served import why_not_served
from tests.engines.vllm.harness.scripted import SAMPLED, ScriptedEngine, config_of, layers_of, model_folder, prompt

TOKENS, CHUNK = 32, 128
SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=TOKENS, **SHAPE)
CHUNKS = ChunkedLocalAttentionSpec(block_size=TOKENS, **SHAPE, attention_chunk_size=CHUNK)
WINDOW = SlidingWindowSpec(block_size=TOKENS, **SHAPE, sliding_window=40)
HALF: dict[str, Any] = {"block_size": TOKENS // 2, "num_kv_heads": 4}  # blocks of half the tokens, and of equal bytes
NVME = {"pools.nvme.slots": 1000}
GENERATED = 60
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


class Models(NamedTuple):
    """Their folders."""

    llama: str
    llama4: str
    gpt_oss: str


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    base = tmp_path_factory.mktemp("models")
    chunks = Llama4TextConfig(**SIZES, attention_chunk_size=CHUNK, num_local_experts=2, intermediate_size_mlp=64)
    oss = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=64)
    return Models(
        model_folder(base / "llama", LlamaConfig(**SIZES), architectures=["LlamaForCausalLM"]),
        model_folder(base / "llama4", chunks, architectures=["Llama4ForCausalLM"]),
        model_folder(base / "gpt-oss", oss, architectures=["GptOssForCausalLM"], quantization_config=None),
    )


def found(engine: ScriptedEngine, lengths: Sequence[int], has_kvbm: bool) -> list[int]:
    """Where an engine goes on with prompts: with the same again, with one that goes on otherwise, with the turn after
    the answer, and with one that parts within. With kvbm, HBM has forgotten each.
    """
    begins: list[int] = []
    for count in lengths:
        whole = prompt(count, count)
        assert engine.ask(f"{count} cold", whole, GENERATED) == 0
        for name, tokens in (
            ("again", whole),
            ("otherwise", whole + prompt(count + 1, TOKENS)),
            ("turn", whole + [SAMPLED] * GENERATED + prompt(count + 2, TOKENS)),
            ("parted", whole[: count - 40] + prompt(count + 3, 3 * TOKENS)),
        ):
            if has_kvbm:
                engine.forget()
            own = engine.own_hit(tokens)
            begins.append(engine.ask(f"{count} {name}", tokens))
            if has_kvbm:
                assert own == 0
            elif not engine.scheduler.prefix_replay_tokens:
                assert begins[-1] == own
    return begins


def both(
    config: Any, layers: Mapping[str, KVCacheSpec], kept: Path, lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """What vLLM's own prefix cache finds, and what kvbm finds of what vLLM has forgotten."""
    with ScriptedEngine(config(None), layers) as plain:
        own = found(plain, lengths, has_kvbm=False)
    with ScriptedEngine(config(kept), layers) as engine:
        assert engine.half is not None, "not served"
        ours = found(engine, lengths, has_kvbm=True)
        assert engine.half.refusal == ""
    return own, ours


AROUND_A_CHUNK = [41, 64, 100, CHUNK, CHUNK + 1, CHUNK + 31, 160, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 40]


@pytest.mark.bytes
@pytest.mark.parametrize("steps", [{}, {"max_num_batched_tokens": 80}], ids=["whole", "in small steps"])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BLHNC], ids=lambda layout: layout.name)
def test_a_prefix_beside_chunks_reaches_as_far_as_vllms_own(models, tmp_path, steps, layout):
    layers = {"0": CHUNKS, "1": CHUNKS, "2": CHUNKS, "3": FULL}
    config = partial(config_of, models.llama4, layout=layout, **steps)
    with ScriptedEngine(config(None), layers) as engine:
        kinds = {type(group.kv_cache_spec) for group in engine.plan.kv_cache_groups}
        assert kinds == {FullAttentionSpec, ChunkedLocalAttentionSpec}
    own, ours = both(config, layers, tmp_path / "a", AROUND_A_CHUNK)
    assert ours == own
    assert max(own) >= 2 * CHUNK


@pytest.mark.bytes
def test_chunks_that_vllm_keeps_as_if_they_were_full_attention_are_so_for_kvbm(models, tmp_path, monkeypatch):
    """As vLLM does beside a draft model, and where it is told so."""
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "0")
    layers, config = {"0": CHUNKS, "1": FULL}, partial(config_of, models.llama4)
    with ScriptedEngine(config(None), layers) as engine:
        assert len(engine.plan.kv_cache_groups) == 1
    own, ours = both(config, layers, tmp_path / "a", [100, CHUNK, CHUNK + 40])
    assert ours == own


def test_llama_4s_own_layers_are_of_these_kinds(models):
    specs = layers_of(config_of(models.llama4, None)).values()
    assert {type(spec) for spec in specs} == {FullAttentionSpec, ChunkedLocalAttentionSpec}
    assert {getattr(spec, "attention_chunk_size", None) for spec in specs} == {None, CHUNK}


@pytest.mark.bytes
def test_of_chunks_that_have_ended_nothing_is_needed_and_nothing_loaded(models, tmp_path):
    tokens, blocks = prompt(1, 2 * CHUNK + TOKENS + 5), (2 * CHUNK + TOKENS) // TOKENS
    with ScriptedEngine(config_of(models.llama4, tmp_path / "a"), {"0": CHUNKS, "1": FULL}) as engine:
        assert engine.ask("cold", tokens) == 0
        (index,) = (at for at, group in enumerate(engine.half._groups) if group.chunk_tokens == CHUNK)
        state = RequestState(
            engine.request("hashes", tokens),
            engine.half._groups,
            engine.half.requests.state_of(engine.request("named", tokens)).namespaces,
        )

        def lose(begin: int, end: int) -> None:
            """Blocks of chunks."""
            lost = state.hashes(index, begin, end, NATIVE.derived_hashes)
            assert engine.half.manager.evict(Tier.HOST, lost) == end - begin

        engine.forget()
        lose(0, 2 * CHUNK // TOKENS)
        assert engine.ask("warm", tokens) == 2 * CHUNK + TOKENS
        assert engine.ranks[0].worker.take_numbers()["loaded_blocks"] == blocks + 1  # and one of the last chunk
        engine.forget()
        lose(blocks - 1, blocks)
        assert engine.ask("shorter", tokens) == 2 * CHUNK  # where a chunk begins none of them is read


UNEQUAL = {
    "windows of half a block": {"0": FULL, "1": replace(WINDOW, **HALF)},
    "windows of two blocks": {"0": replace(FULL, **HALF), "1": WINDOW},
    "equal": {"0": FULL, "1": WINDOW},
}


@pytest.mark.bytes
@pytest.mark.parametrize("steps", [{}, {"max_num_batched_tokens": 48}], ids=["whole", "in small steps"])
@pytest.mark.parametrize("interval", [0, 64, None])
@pytest.mark.parametrize("name", UNEQUAL)
def test_groups_whose_blocks_have_other_sizes_find_what_vllm_finds(models, tmp_path, name, interval, steps):
    config = partial(config_of, models.llama, prefix_cache_retention_interval=interval, **steps)
    own, ours = both(config, UNEQUAL[name], tmp_path / "a", [80, 96, 97, 131])
    assert ours == own
    assert any(own)


@pytest.mark.bytes
def test_a_group_that_no_prefix_is_made_of_is_left_out_and_the_others_are_served(models, tmp_path):
    layers = {"0": FULL, "ring": CircularBufferSpec(block_size=TOKENS, **SHAPE)}
    config = partial(config_of, models.llama)
    own, ours = both(config, layers, tmp_path / "a", [64, 65, 163])
    assert ours == own
    with ScriptedEngine(config(tmp_path / "b"), layers) as engine:
        (served,) = engine.plan.prefix_cacheable_group_ids
        assert len(engine.plan.kv_cache_groups) == 2
        assert [group.id for group in engine.half._groups] == [served]
        tokens, ring = prompt(7, 163), engine.ranks[0].bytes["ring"]
        assert engine.ask("cold", tokens) == 0
        engine.forget()
        assert engine.ask("warm", tokens) == 160
        assert engine.ranks[0].worker.take_numbers()["loaded_blocks"] == 5
        assert ring.shape == engine.ranks[0].bytes["0"].shape


REPLAYED: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16}


@pytest.mark.bytes
@pytest.mark.parametrize("is_replayed", [False, True], ids=["kept", "computed again"])
def test_latent_windows_are_kept_unless_vllm_computes_them_again_behind_each_prefix(models, tmp_path, is_replayed):
    """As DeepSeek V4.1 does: a window's worth of tokens is computed again, so such layers take no part in prefixes."""
    layers: dict[str, KVCacheSpec] = {
        "0": MLAAttentionSpec(**REPLAYED),
        "1": SlidingWindowMLASpec(**REPLAYED, sliding_window=40, bounded_replay=is_replayed),
    }
    config = partial(config_of, models.llama, prefix_cache_retention_interval=None)
    own, ours = both(config, layers, tmp_path / "a", [80, 83, 163])
    assert ours == own
    assert any(own)
    with ScriptedEngine(config(tmp_path / "b"), layers) as engine:
        assert engine.scheduler.prefix_replay_tokens == (40 if is_replayed else 0)
        assert len(engine.half._groups) == (1 if is_replayed else 2)


# -- attention sinks ---------------------------------------------------------------------------------------------------


def test_sinks_that_are_blocks_of_the_cache_are_refused_in_words_and_vllm_cannot_schedule_them(models, tmp_path, capfd):
    """vLLM's manager of such blocks does not take what its coordinator gives it, so no engine with them starts."""
    sink = SinkFullAttentionSpec(block_size=TOKENS, **SHAPE, sink_len=TOKENS)
    config = config_of(models.llama, tmp_path / "a")
    with ScriptedEngine(config_of(models.llama, None), {"0": FULL}) as engine:
        plan = replace(engine.plan, kv_cache_groups=[replace(engine.plan.kv_cache_groups[0], kv_cache_spec=sink)])
    words = "KV group 0 has layers of kind SinkFullAttentionSpec; vLLM 0.32 cannot schedule such a model"
    assert why_not_served(config, plan) == words
    assert serve(config, plan, is_telling=True) is None
    out = "".join(capfd.readouterr())
    assert "connector.not_serving" in out
    assert words in out
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        get_kv_cache_coordinator(
            plan, 1024, 1024, False, True, False, 1, 1, scheduler_block_size=TOKENS, hash_block_size=TOKENS
        )


@pytest.mark.bytes
def test_sinks_that_are_weights_are_served_as_any_attention(models, tmp_path):
    """Those of gpt-oss: its layers keep nothing more."""
    config = partial(config_of, models.gpt_oss)
    layers = layers_of(config(None))
    assert {type(spec) for spec in layers.values()} == {FullAttentionSpec, SlidingWindowSpec}
    own, ours = both(config, layers, tmp_path / "a", [100, 160, 163])
    assert ours == own


# -- eight bits --------------------------------------------------------------------------------------------------------


def eight_bits(dtype: str) -> KVCacheSpec:
    """A layer's KV as vLLM has it under `--kv-cache-dtype`; scales of each token and head lie behind its numbers, where
    there are such.
    """
    config: Any = None
    kind = torch.bfloat16 if dtype == "auto" else kv_cache_dtype_str_to_dtype(dtype, config)
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=16, dtype=kind, kv_quant_mode=get_kv_quant_mode(dtype)
    )
    return TritonAttentionBackend.customize_spec(spec)


def eight_bit_engine(models: Models, kept: Path | None, dtype: str, **more: Any) -> ScriptedEngine:
    config = config_of(models.llama, kept, NVME, kv_cache_dtype=dtype, **more)
    return ScriptedEngine(config, {f"{at}": eight_bits(dtype) for at in range(2)})


DTYPES = ["auto", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]


@pytest.mark.bytes
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LHBNC, KVCacheLayout.BHLNC], ids=str)
@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_the_scales_of_each_token_and_head_are_stored_and_loaded_with_its_numbers(models, tmp_path, dtype, layout):
    tokens = prompt(1, 5 * TOKENS + 1)
    with eight_bit_engine(models, tmp_path / "a", dtype, layout=layout) as engine:
        with_scales = 2 * 16 + 2 * 4  # K and V of a head in eight bits, and a scale of 32 bits for each
        page = 2 * TOKENS * with_scales
        assert engine.configs[0].kv_cache_groups[0].kv_cache_spec.page_size_bytes == page
        assert block_regions(engine.configs[0]).part_bytes == 2 * page
        rank = engine.ranks[0]
        assert all(view.shape[-1] == with_scales for view in rank.bytes.values())
        assert engine.ask("cold", tokens) == 0
        engine.forget()
        assert engine.ask("warm", tokens) == 5 * TOKENS  # `ask` has compared each byte, those of scales too
        engine.settle()
    with eight_bit_engine(models, tmp_path / "a", dtype, layout=layout) as again:
        assert again.ask("again", tokens) == 5 * TOKENS
        assert again.hit_blocks(Tier.NVME) == 5


@pytest.mark.parametrize("first", DTYPES)
def test_engines_whose_kv_has_other_types_never_share_even_where_it_has_equal_bytes(models, tmp_path, first):
    """Each over the files of the first, and in its own it finds its blocks."""
    tokens = prompt(2, 5 * TOKENS + 1)
    for dtype in (first, *(other for other in DTYPES if other != first)):
        folder = tmp_path / dtype
        with eight_bit_engine(models, folder, first) as engine:
            assert engine.ask("cold", tokens) == 0
            engine.settle()
        with eight_bit_engine(models, folder, dtype) as engine:
            assert engine.ask("other", tokens) == (5 * TOKENS if dtype == first else 0)


def test_engines_whose_layers_have_other_scales_never_share(models, tmp_path):
    """Under `--kv-cache-dtype fp8` a layer has one scale for all tokens, a weight of its own."""
    tokens = prompt(3, 5 * TOKENS + 1)
    for scale, begins in ((1.0, 0), (0.5, 0), (1.0, 5 * TOKENS), (0.5, 5 * TOKENS)):
        config = config_of(models.llama, tmp_path / "a", NVME, kv_cache_dtype="fp8")
        layers = layers_of(config)
        for module in config.compilation_config.static_forward_context.values():
            module._k_scale, module._v_scale = torch.tensor(scale), torch.tensor(1.0)
        with ScriptedEngine(config_of(models.llama, None, kv_cache_dtype="fp8"), layers) as plain:
            resolved = resolved_of(config, plain.configs[0], plain.ranks[0].tensors)
        with ScriptedEngine(config, layers, resolved=resolved) as engine:
            assert engine.ask("asked", tokens) == begins
            engine.settle()
