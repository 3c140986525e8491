"""What an engine's KV depends on besides tokens and weights: two engines share blocks only where all of it is equal."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from kvbm.engines.vllm.regions import is_state, specs_of
from kvbm.engines.vllm.revision import model_of, revision_of
from kvbm.engines.vllm.tested import vllm_version

_MODEL = (
    "dtype",
    "quantization",
    "quantization_config",
    "hf_overrides",
    "model_class_overrides",
    "model_impl",
    "model_weights",
    "disable_sliding_window",
    "code_revision",
    "runner_type",
    "convert_type",
)
_CACHE = (
    "cache_dtype",
    "kv_cache_dtype_skip_layers",
    "sliding_window",
    "kv_sharing_fast_prefill",
    "swa_bounded_replay",
)
_LORA = ("lora_dtype", "target_modules", "enable_tower_connector_lora")
_DRAFT = ("method", "quantization", "kv_cache_dtype", "attention_backend")
# Of MultiModalConfig: what says only how much room there is, or who does the work.
_NOT_MULTIMODAL = frozenset(
    {
        "limit_per_prompt",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_encoder_tp_mode",
        "skip_mm_profiling",
        "mm_tensor_ipc",
        "mm_ipc_gpu_memory_gb",
    }
)
# of the model's config.json
_NOT_CONFIG = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
# Kinds of RoPE whose angles do not depend on how long the engine lets sequences be.
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "mrope", "proportional"})


def facts_of(vllm_config: Any, kv_cache_config: Any, machine: str) -> dict[str, Any]:
    """Everything that changes the bytes of a block for equal tokens and weights, as plain values with names.

    Args:
        vllm_config, kv_cache_config: vLLM's VllmConfig and KVCacheConfig.
        machine: as `machine_words` says it: the inside of a block is the business of vLLM's backend.
    """
    model, config = vllm_config.model_config, vllm_config
    hf = model.hf_config.to_dict()
    facts: dict[str, Any] = {
        "machine": machine,
        "config": {name: value for name, value in hf.items() if name not in _NOT_CONFIG},
        "model": _named(model, _MODEL),
        "cache": _named(config.cache_config, _CACHE),
        "attention": config.attention_config,
        "groups": [
            {"layers": group.layer_names, "specs": list(specs_of(group.kv_cache_spec))}
            for group in kv_cache_config.kv_cache_groups
        ],
        "additional": config.additional_config,
    }
    if not set(_rope_kinds(hf)) <= _FIXED_ROPES:
        facts["max_model_len"] = model.max_model_len
    if any(is_state(spec) for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec)):
        facts["states"] = getattr(config, "mamba_config", None)
    if (multimodal := getattr(model, "multimodal_config", None)) is not None:
        facts["multimodal"] = {name: value for name, value in _fields(multimodal) if name not in _NOT_MULTIMODAL}
    if config.lora_config is not None:
        facts["lora"] = _named(config.lora_config, _LORA)
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None:
        load_config = getattr(config.speculative_config, "draft_load_config", None) or config.load_config
        facts["draft"] = _named(config.speculative_config, _DRAFT) | {
            "model": model_of(draft),
            "revision": revision_of(draft, load_config),
        }
    plain: dict[str, Any] = _plain(facts)
    return plain


def digest_of(facts: Mapping[str, Any]) -> str:
    """The facts in 16 hex digits."""
    return hashlib.sha256(b"kvbm.vllm.facts.v1\0" + json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def machine_words() -> str:
    """vLLM's version and the device it computes on: what decides how its backend lay out the inside of a block.

    Raises: ModuleNotFoundError: there is no vLLM.
    """
    import torch
    from vllm.platforms import current_platform

    device = str(current_platform.get_device_name())
    if current_platform.is_cpu():  # keys lie in another order where there are matrix tiles
        tiles = torch.cpu._is_amx_tile_supported()
        arch = current_platform.get_cpu_architecture().name
        device = f"{device} {arch} {torch.backends.cpu.get_cpu_capability()} amx={tiles}"
    return f"vllm {vllm_version()} on {device}"


def _named(source: Any, names: Sequence[str]) -> dict[str, Any]:
    """Attributes by name; one that this vLLM lacks is told from one that is None."""
    return {name: getattr(source, name, "absent") for name in names}


def _fields(source: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(source, field.name)) for field in fields(source)]


def _rope_kinds(config: Mapping[str, Any], is_rope: bool = False) -> list[str]:
    """All kinds of RoPE that a model's config names, at whatever depth."""
    kinds = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            kinds += _rope_kinds(value, is_rope or "rope" in str(name))
        elif is_rope and name in ("rope_type", "type"):
            kinds.append(str(value))
    return kinds


def _plain(value: Any) -> Any:
    """A value as JSON can say it, the same in every process."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(one) for one in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__} | {name: _plain(one) for name, one in _fields(value)}
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    words = repr(value)
    return type(value).__qualname__ if " at 0x" in words else words  # an address is another one in each process
