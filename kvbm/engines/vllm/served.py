"""Which engines kvbm can serve. The others run as if it were absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Kinds of attention whose block depends on nothing but the tokens up to its end, and stays as it is once full.
_SERVED_SPECS = frozenset(
    {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"}
)
_LOCAL_EXECUTORS = frozenset({"UniProcExecutor", "MultiprocExecutor"})


def why_not_served(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why an engine is not served, in words with a remedy where there is one; "" when it is.

    Args:
        vllm_config: vLLM's VllmConfig.
        kv_cache_config: vLLM's KVCacheConfig.
    """
    parallel = vllm_config.parallel_config
    for reason, holds in (
        (
            "prefix caching is off; start vLLM with --enable-prefix-caching",
            not vllm_config.cache_config.enable_prefix_caching,
        ),
        (f"pipeline parallelism of {parallel.pipeline_parallel_size} ranks", parallel.pipeline_parallel_size > 1),
        (
            f"prefill context parallelism of {parallel.prefill_context_parallel_size} ranks",
            parallel.prefill_context_parallel_size > 1,
        ),
        (
            f"decode context parallelism of {parallel.decode_context_parallel_size} ranks",
            parallel.decode_context_parallel_size > 1,
        ),
        (f"the engine's ranks are on {parallel.nnodes_within_dp} hosts", parallel.nnodes_within_dp > 1),
        (
            "its weights may change while it runs (--weight-transfer-config), and blocks in cold tiers would not notice",
            vllm_config.weight_transfer_config is not None,
        ),
    ):
        if holds:
            return reason
    return _executor(parallel) or _groups(kv_cache_config)


def _executor(parallel: Any) -> str:
    """Why the engine's ranks may be on another host."""
    backend = parallel.distributed_executor_backend
    names = {one.__name__ for one in backend.__mro__} if isinstance(backend, type) else {backend}
    if names & (_LOCAL_EXECUTORS | {"mp", "uni"}) or (backend == "external_launcher" and parallel.world_size == 1):
        return ""
    named = backend.__name__ if isinstance(backend, type) else backend
    return f"the executor {named!r} may put ranks on another host; use --distributed-executor-backend mp"


def _groups(kv_cache_config: Any) -> str:
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in layer_specs(group.kv_cache_spec):
            if type(spec).__name__ not in _SERVED_SPECS:
                return f"KV group {index} has layers of kind {type(spec).__name__}, whose blocks are not ours to keep"
        if not group.kv_cache_spec.prefix_cacheable:
            return f"KV group {index} takes no part in vLLM's prefix caching"
        if group.host_resident or not group.enable_kv_transfer:
            return f"KV group {index} is not for connectors, says vLLM"
    return ""


def layer_specs(spec: Any) -> Iterator[Any]:
    """The specs of a group's layers: itself, or those of a group of uniform type."""
    inner = getattr(spec, "kv_cache_specs", None)
    yield from inner.values() if inner else (spec,)
