"""What identity, settings and the plugin rely on is there in the vLLM that is installed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import vllm
from transformers import LlamaConfig
from vllm.config import LoRAConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.config.cache import PrefixCachingHashAlgo
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.request import Request

from kvbm.engines.vllm import facts, regions
from kvbm.engines.vllm.identity import HashScheme, Identity
from kvbm.engines.vllm.plugin import MODULE, NAME, register
from kvbm.engines.vllm.served import why_not_served


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


def identity_of(config: VllmConfig) -> Identity:
    return Identity.of(config, cache(), "words", machine=facts.machine_words(), secrets={}, environment={})


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
    mamba = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    assert "MambaSpec" in why_not_served(engine(model), cache(mamba))


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
    assert MODULE == "kvbm.engines.vllm.connector"
