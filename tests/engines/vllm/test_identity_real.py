"""What identity, settings and the plugin rely on is there in the vLLM that is installed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import vllm
from transformers import LlamaConfig
from vllm.config import LoRAConfig, ParallelConfig, PoolerConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.config.cache import PrefixCachingHashAlgo
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

from kvbm.engines.vllm import facts, regions
from kvbm.engines.vllm.identity import EngineIdentity, HashScheme
from kvbm.engines.vllm.plugin import MODULE, NAME, register
from kvbm.engines.vllm.ranks import Stage
from kvbm.engines.vllm.resolved import backends_of, resolved_of
from kvbm.engines.vllm.served import why_not_served
from kvbm.engines.vllm.stages import ranks_of
from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engines
from tests.engines.vllm.harness.registry import be_the_only_rank
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype="float32",
    ).save_pretrained(folder)
    return folder


def engine(model: Path, **given: Any) -> VllmConfig:
    wanted = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128} | given
    return EngineArgs(model=str(model), **wanted).create_engine_config()


def cache(spec: Any = None) -> KVCacheConfig:
    spec = spec or FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=8 * page, layers=["layer.0"], layer_stride=8 * page, block_stride=page)
    return KVCacheConfig(8, [tensor], [KVCacheGroupSpec(["layer.0"], spec)])


def identity_of(config: VllmConfig) -> EngineIdentity:
    ranks = ranks_of(config, cache(), [Stage(1)])
    return EngineIdentity.of(
        config, cache(), "words", ranks=ranks, machine=facts.machine_words(), resolved=[], secrets={}, environment={}
    )


def test_a_real_engine_has_an_identity_that_another_would_have_too(model: Path) -> None:
    config = engine(model)
    identity = identity_of(config)
    (group,) = identity.groups
    assert (group.model, group.revision, group.kv_dtype) == ("tiny", "dummy:0", "float32")
    assert (group.block_tokens, group.ranks) == (32, "tp1")
    assert identity_of(engine(model)).groups == identity.groups
    said = json.dumps(identity.facts)
    assert '"absent"' not in said  # vLLM has every attribute that identity asks for
    assert "0x" not in said
    assert vllm.__version__ in identity.facts["machine"]
    assert why_not_served(config, cache()) == ""


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}},
        {"load_format": "auto"},
        {"seed": 5},
        {"enable_lora": True},
    ],
)
def test_a_real_engine_that_computes_otherwise_has_another(model: Path, given: dict[str, Any]) -> None:
    assert identity_of(engine(model, **given)).groups != identity_of(engine(model)).groups


@pytest.mark.parametrize("setup", [{}, {"core": "process"}, {"core": "process", "ranks": 2}])
def test_a_real_engine_names_what_its_ranks_have_resolved(
    engines: Engines, llama: str, truth: Truth, tmp_path: Path, setup: dict[str, Any]
) -> None:
    with engines.running(with_kvbm(llama, tmp_path, **setup)) as engine:
        said = engine.in_core("resolved", setup.get("ranks", 1))
        said_wrong = [
            word for word in ("identity.unresolved", "host.not_found", "host.not_said") if word in engine.printed()
        ]
        scenarios.ask(engine, truth, [truth.prompt("resolved", 40)], [0])
        assert engine.in_core("resolved", 1) is None  # nothing is left behind by an engine that is killed from now on
    assert said_wrong == []
    assert len(said) == 1  # all ranks have said the same
    assert backends_of(said) == ["CPU_ATTN"]


def test_vllms_own_layers_say_what_they_have_resolved(model: Path) -> None:
    config = engine(model)
    with set_current_vllm_config(config):
        be_the_only_rank()
        initialize_model(config)
    layers = config.compilation_config.static_forward_context
    page = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(list(layers), page)]

    def resolved(layout: KVCacheLayout, kernel_tokens: int) -> dict[str, Any]:
        size = 8 * page.page_size_bytes
        stride, block = (size, page.page_size_bytes) if layout.name.startswith("L") else (page.page_size_bytes, 0)
        placed = KVCacheTensor(
            size=len(layers) * size,
            layers=list(layers),
            layer_stride=stride,
            block_stride=block or len(layers) * page.page_size_bytes,
        )
        made = KVCacheConfig(8, [placed], groups)
        made.kv_cache_layout = layout.name
        return resolved_of(config, made, allocate_kv_cache(made, torch.device("cpu"), layout, [kernel_tokens]))

    (run,) = resolved(KVCacheLayout.LBHNC, 32)["layers"]
    assert run["is"]["name"] == "CPU_ATTN"
    assert run["is"]["kernel_block_tokens"] == 32
    assert run["is"]["scales"] == {"_k_scale": [1.0], "_v_scale": [1.0]}
    assert len(run["layers"]) == 2
    others = [resolved(KVCacheLayout.LBNHC, 32), resolved(KVCacheLayout.BLHNC, 32), resolved(KVCacheLayout.LBHNC, 16)]
    for layer in layers.values():
        layer._k_scale = torch.tensor(0.5)
    others.append(resolved(KVCacheLayout.LBHNC, 32))
    words = [json.dumps(one) for one in others]
    assert len({*words, json.dumps({"layout": "LBHNC", "layers": [run]})}) == 5


def test_a_real_engine_with_more_room_has_the_same(model: Path) -> None:
    more = engine(model, max_model_len=256, max_num_seqs=3, gpu_memory_utilization=0.5)
    assert identity_of(more).groups == identity_of(engine(model)).groups


def test_attributes_of_parts_that_are_absent_here_exist() -> None:
    assert set(facts._LORA) <= {field.name for field in fields(LoRAConfig)}
    drafts = {field.name for field in fields(SpeculativeConfig)}
    assert set(facts._DRAFT) | {"draft_model_config", "draft_load_config"} <= drafts
    assert {"data_parallel_index", "data_parallel_size"} <= {field.name for field in fields(ParallelConfig)}
    assert all(hasattr(kv_cache_interface, name) for name in regions._KINDS)


def test_a_rank_that_vllm_made_independent_still_says_which_it_is() -> None:
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=1)
    parallel.data_parallel_index = 1  # as EngineCore does
    parallel.reconfigure_for_independent_dp_rank()
    assert (parallel.data_parallel_size, parallel.data_parallel_rank, parallel.data_parallel_index) == (1, 0, 1)


@pytest.mark.parametrize("algorithm", get_args(PrefixCachingHashAlgo))
@pytest.mark.parametrize("seed", [None, "7"])
def test_hashes_last_where_vllm_comes_to_the_same_seed_again(
    algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    function = get_hash_fn_by_name(algorithm)
    lasts = resolve_none_hash_seed(function) == resolve_none_hash_seed(function)
    assert HashScheme.of(algorithm, environment).is_lasting == lasts


def test_engines_that_are_not_served_are_told_why(model: Path) -> None:
    assert "--enable-prefix-caching" in why_not_served(engine(model, enable_prefix_caching=False), cache())
    pooler = PoolerConfig(seq_pooling_type="MEAN")
    pooling = engine(model, runner="pooling", convert="embed", pooler_config=pooler, enable_prefix_caching=True)
    assert "of this pooling model" in why_not_served(pooling, cache())  # vLLM obeys, with a warning of wrong outputs
    last = engine(model, runner="pooling", convert="embed", pooler_config=PoolerConfig(seq_pooling_type="LAST"))
    assert not why_not_served(last, cache())
    mamba = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    assert "keeps its states in mode 'none'" in why_not_served(engine(model), cache(mamba))
    assert not why_not_served(engine(model), cache(replace(mamba, mamba_cache_mode="align")))


def test_a_real_request_names_its_tenant(model: Path) -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": {"kvbm.tenant": "a"}})
    request = Request("r", [1, 2, 3], params, pooling_params=None)
    assert identity_of(engine(model)).tenant_of(request) == "a"
    assert identity_of(engine(model)).lora_of(request) == ""


def test_the_connectors_name_is_registered_once_however_often_the_plugin_runs() -> None:
    register()
    first = KVConnectorFactory._registry[NAME]
    register()
    assert KVConnectorFactory._registry[NAME] is first
    assert first().__name__ == NAME
    assert MODULE == "kvbm.engines.vllm"
