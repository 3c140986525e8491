"""What kvbm makes of every architecture of vLLM's registry: docs/vllm-models.md, which `python -m
tests.engines.vllm.harness.registry` writes, or another file that it is given.

An architecture is built on the meta device, without weights, from the defaults of its configuration in transformers
with few layers; vLLM's own code makes KV groups of its layers. What cannot be built so is sorted by what vLLM's
registry says of its class.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[4] / "docs" / "vllm-models.md"
_LAYERS, _BLOCKS, _CONTEXT_TOKENS, _MOST_S = 8, 1 << 14, 1024, 250
_KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "latent attention (MLA)",
    "SlidingWindowSpec": "sliding windows",
    "SlidingWindowMLASpec": "sliding windows (MLA)",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MambaSpec": "recurrent states",
}


class Verdict(NamedTuple):
    """One architecture.

    Attributes:
        groups: the kinds of its KV groups in words; "" where it could not be built.
        why: it is not served, or "".
        facts: what vLLM's registry says of it.
    """

    name: str
    groups: str
    why: str
    facts: str


def verdicts() -> list[Verdict]:
    """All of them, by name. For a process of its own: it becomes the only rank of an engine."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import registry

    types = {name: kind for kind, name in reversed(list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))}
    lazy: Any = registry._LazyRegisteredModel
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )  # else a process each
    signal.signal(signal.SIGALRM, _give_up)
    found = []
    for name, model in sorted(registry.ModelRegistry.models.items()):
        facts, groups, why = _facts(registry, name, model), "", ""
        if name in types:
            signal.alarm(_MOST_S)
            try:
                groups, why = _built(name, types[name])
            except Exception:  # noqa: BLE001 - its defaults make no configuration, or this machine lacks a kernel
                groups = ""
            finally:
                signal.alarm(0)
        found.append(Verdict(name, groups, why, facts))
    return found


def page_of(found: list[Verdict]) -> str:
    """docs/vllm-models.md."""
    from vllm import __version__

    built: dict[tuple[str, str], list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    for one in found:
        if one.groups:
            built[one.groups, one.why].append(one.name)
        else:
            others[one.facts].append(one.name)
    lines = [
        "# Models of vLLM",
        _paragraph(
            f"What kvbm serves of the {len(found)} architectures in the registry of vLLM "
            f"{'.'.join(__version__.split('.')[:2])}. Written by a program that builds them, and held to it by a test "
            "(`tests/engines/vllm/test_registry.py`). [vLLM](vllm.md#what-is-not-served) says which engines are not "
            "served, whatever their model."
        ),
        "",
        "Models with recurrent states alone need `--enable-prefix-caching`: vLLM switches it off for them.",
        "",
        "## Built, and their KV groups looked at",
        "| KV groups | served | architectures |",
        "|---|---|---|",
    ]
    for (groups, why), names in sorted(built.items()):
        lines.append(f"| {groups} | {f'no: {why}' if why else 'yes'} | {', '.join(names)} |")
    lines += [
        "",
        "## Not built on this machine, so by what vLLM says of their kind",
        _paragraph(
            "Their configuration has no defaults that make a model, or they need a GPU's kernels or packages that are "
            "not installed where this page is made. An engine says at its start whether it is served "
            "(`connector.not_serving`)."
        ),
        "",
        "| kind | architectures |",
        "|---|---|",
    ]
    lines += [f"| {facts} | {', '.join(names)} |" for facts, names in sorted(others.items())]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _facts(registry: Any, name: str, model: Any) -> str:
    if name in registry._SPECULATIVE_DECODING_MODELS:
        return "a draft model: served as a part of the engine it drafts for"
    try:
        kind = model.load_model_cls()
        info = registry._ModelInfo.from_model_cls(kind)
    except Exception:  # noqa: BLE001 - a package is missing
        return "could not be imported"
    if not info.is_text_generation_model and not info.is_pooling_model:
        return "neither generates nor pools text: as vLLM serves it"
    if info.is_attention_free:
        return "recurrent states alone: served where prefix caching is switched on (`--enable-prefix-caching`)"
    if info.is_hybrid:
        return (
            "attention and recurrent states: served where vLLM keeps states at block boundaries"
            if info.is_text_generation_model
            else "pooling with recurrent states: vLLM caches no prefixes, so not served"
        )
    if not info.is_text_generation_model:
        return "pooling: served where vLLM caches its prefixes (causal attention, last token)"
    return "attention alone: served unless its layers are of a kind that is not"


def _built(name: str, kind: str) -> tuple[str, str]:
    """The kinds of an architecture's KV groups, and why they are not served. Raises whatever its construction does."""
    import torch
    from transformers import CONFIG_MAPPING
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvbm.core.errors import LayoutError
    from kvbm.engines.vllm.regions import block_regions
    from kvbm.engines.vllm.served import why_not_served

    values = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False)) | {"architectures": [name]}
    layers = values.get("num_hidden_layers") or 0
    if layers > _LAYERS and not any(isinstance(one, list) and len(one) == layers for one in values.values()):
        values["num_hidden_layers"] = _LAYERS
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values))
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=_CONTEXT_TOKENS,
            enable_prefix_caching=True,
        )
        config = arguments.create_engine_config()
    config.cache_config.kv_cache_layout = KVCacheLayout.LBNHC.name
    config.cache_config.num_gpu_blocks_override = _BLOCKS
    with set_current_vllm_config(config):
        be_the_only_rank()
        with torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        modules = config.compilation_config.static_forward_context.items()
        specs = {at: one.get_kv_cache_spec(config) for at, one in modules if isinstance(one, AttentionLayerBase)}
        known = {at: spec for at, spec in specs.items() if spec is not None}
        (made,) = get_kv_cache_configs(config, [known], [1 << 40])
    config.cache_config.enable_prefix_caching = True  # the CPU's backend of latent attention has none, a GPU's has
    why = why_not_served(config, made)
    if not why:
        try:
            block_regions(made)
        except LayoutError as error:
            why = str(error)
    kinds = {type(group.kv_cache_spec).__name__ for group in made.kv_cache_groups}
    return " + ".join(sorted(_KINDS.get(one, one) for one in kinds)), why


def be_the_only_rank() -> None:
    """Make this process the one rank that vLLM's layers ask for."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

    from tests.servers import free_port

    if not model_parallel_is_initialized():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1)


def _give_up(*_: Any) -> None:
    raise TimeoutError


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
    }
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page_of(verdicts()))
