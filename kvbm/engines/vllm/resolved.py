"""What a rank's vLLM has resolved for itself, which no configuration says: how its attention reads and writes a block.

Two hosts with one configuration may resolve it differently: another backend is installed, or the GPU is another one.
Then equal tokens have other bytes. A rank reads it off the layers and tensors it has, and leaves word of it before the
scheduler makes the namespaces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvbm.core.errors import LayoutError
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.regions import CacheConfig, layer_specs

_SCALES = ("_k_scale", "_v_scale")


def resolved_of(vllm_config: Any, kv_cache_config: CacheConfig, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the bytes of a block on this rank, as plain values with names.

    Args:
        vllm_config: vLLM's VllmConfig of this rank, whose model is loaded.
        kv_caches: the tensors of its layers, as `register_kv_caches` gets them.
    Raises: LayoutError: a layer of KV is not there, or does not say what computes it.
    """
    modules = vllm_config.compilation_config.static_forward_context
    groups: dict[str, dict[str, Any]] = {}
    for name, spec in layer_specs(kv_cache_config).items():
        module, view = modules.get(name), kv_caches.get(name)
        if not hasattr(module, "get_attn_backend") or view is None:
            raise LayoutError(f"layer {name}: vLLM does not say what computes its KV")
        groups[name] = _layer(module, spec, view, kv_cache_config.num_blocks)
    return {"layout": getattr(kv_cache_config, "kv_cache_layout", None), "layers": _runs(groups)}


def leave_resolved(meeting: Meeting, rank: int, resolved: Mapping[str, Any]) -> None:
    """Say it to the scheduler's process. Raises PoolError: it cannot be said."""
    meeting.leave(_name(rank), resolved)


def forget_resolved(meeting: Meeting, rank: int) -> None:
    """Take away what a rank of an engine before this one has said. Raises PoolError: it stays."""
    meeting.forget(_name(rank))


def find_resolved(meeting: Meeting, ranks: int) -> list[Any] | None:
    """What all ranks have said, once where they agree; None: one has said nothing."""
    found = [meeting.find(_name(rank)) for rank in range(ranks)]
    if any(one is None for one in found):
        return None
    return found[:1] if all(one == found[0] for one in found) else found


def backends_of(resolved: Sequence[Any]) -> list[str]:
    """The names of the attention backends in what ranks have said."""
    runs = (run for rank in resolved if isinstance(rank, Mapping) for run in rank["layers"])
    return sorted({run["is"]["name"] for run in runs})


def _name(rank: int) -> str:
    return f"resolved-{rank}"


def _layer(module: Any, spec: Any, view: Any, blocks: int) -> dict[str, Any]:
    backend = module.get_attn_backend()
    tokens = getattr(spec, "block_size", 0)
    sizes: Any = getattr(backend, "get_supported_kernel_block_sizes", None)
    return {
        "backend": f"{backend.__module__}.{backend.__qualname__}",
        "name": backend.get_name(),
        "kernel_block_tokens": tokens * blocks / view.shape[0] if view.shape[0] else tokens,
        "kernel_block_sizes": [_size(size) for size in sizes(spec)] if sizes else [],
        "shape": [int(size) for size in view.shape[1:]],
        "order": _order(view),
        "dtype": str(view.dtype),
        "cache_dtype": str(getattr(module, "kv_cache_dtype", "")),
        "scales": {name: _numbers(getattr(module, name, None)) for name in _SCALES},
    }


def _size(size: Any) -> str:
    """A size of kernel blocks: a number, or what it is a multiple of."""
    base = getattr(size, "base", None)
    return str(size) if base is None else f"multiple of {base}"


def _order(view: Any) -> list[int]:
    """A tensor's dimensions from the one that steps farthest to the one that steps least; how far depends on how many
    blocks there are.
    """
    strides = view.stride()
    return sorted((at for at in range(len(strides)) if view.shape[at] > 1), key=lambda at: (-strides[at], at))


def _numbers(scale: Any) -> list[float | str] | None:
    if scale is None:
        return None
    given = scale.detach().reshape(-1).tolist() if hasattr(scale, "detach") else [scale]
    return [number if math.isfinite(number) else str(number) for number in map(float, given)]


def _runs(layers: Mapping[str, Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Layers that are equal, together."""
    runs: list[dict[str, Any]] = []
    for name, said in layers.items():
        same = next((run for run in runs if run["is"] == said), None)
        if same is None:
            runs.append({"is": said, "layers": [name]})
        else:
            same["layers"].append(name)
    return runs
