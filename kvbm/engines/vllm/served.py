"""Which engines kvbm can serve. The others run as if it were absent."""

from __future__ import annotations

from typing import Any

from kvbm.engines.vllm.regions import served_groups, why_group_not_served

_LOCAL_EXECUTORS = frozenset({"UniProcExecutor", "MultiprocExecutor"})


def why_not_served(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why an engine is not served, in words with a remedy where there is one; "" when it is.

    Args:
        vllm_config: vLLM's VllmConfig.
        kv_cache_config: vLLM's KVCacheConfig.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for reason, holds in (
        (
            "vLLM caches no prefixes of this pooling model",
            model.runner_type == "pooling" and not model.is_prefix_caching_supported,
        ),
        (
            "vLLM caches no prefixes of an encoder with a decoder",
            model.attn_type == "encoder_decoder",
        ),
        (
            "prefix caching is off; start vLLM with --enable-prefix-caching",
            not vllm_config.cache_config.enable_prefix_caching,
        ),
        (
            (
                "its weights may change while it runs (--weight-transfer-config), and blocks in cold tiers would not "
                "notice"
            ),
            vllm_config.weight_transfer_config is not None,
        ),
    ):
        if holds:
            return reason
    return _executor(parallel) or _groups(kv_cache_config)


def _executor(parallel: Any) -> str:
    """Why the engine's ranks may be on another host."""
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        names = {one.__name__ for one in backend.__mro__}
    else:
        path = str(backend)  # also of a class
        names = {path.rpartition(".")[2]} if path.startswith("vllm.") else {path}
    is_local = backend in ("mp", "uni") or bool(names & _LOCAL_EXECUTORS)
    if is_local or (backend == "external_launcher" and parallel.world_size == 1):
        return ""
    named = backend.__name__ if isinstance(backend, type) else backend
    return f"the executor {named!r} may put ranks on another host; use --distributed-executor-backend mp"


def _groups(kv_cache_config: Any) -> str:
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    served = served_groups(kv_cache_config)
    if not served:
        return "no KV group takes part in vLLM's prefix caching"
    reasons = (why_group_not_served(index, kv_cache_config.kv_cache_groups[index]) for index in served)
    return next(filter(None, reasons), "")
