"""What kvbm makes of every architecture of vLLM's registry: docs/vllm-models.md, which `python -m
tests.engines.vllm.harness.registry` writes, or another file that it is given; with names of architectures behind it,
of these alone.

An architecture is made without weights, on the meta device, from a small configuration (architectures.py), where no
GPU is (stand_ins.py). vLLM's own code says whether it caches prefixes for such a model, and makes KV groups of its
layers; `why_not_served` and `block_regions` say what kvbm makes of those. Each has a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.vllm.harness import stand_ins
from tests.engines.vllm.harness.architectures import USUAL
from tests.engines.vllm.harness.architectures import configuration as configuration_of

PAGE = Path(__file__).parents[4] / "docs" / "vllm-models.md"
_BLOCKS, _CONTEXT_TOKENS, _MOST_S, _PROCESSES = 1 << 14, 1024, 60, 2
SERVED, REFUSED, DRAFT, NOT_BUILT = "Served", "Refused", "Draft models", "Not built"
WITHOUT = "Served without"
_ORDER = (SERVED, WITHOUT, REFUSED, DRAFT, NOT_BUILT)
_KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "latent attention (MLA)",
    "SlidingWindowSpec": "sliding windows",
    "SlidingWindowMLASpec": "sliding windows (MLA)",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MambaSpec": "recurrent states",
    "CrossAttentionSpec": "cross attention",
    "RSWASpec": "R-SWA",
    "CircularBufferSpec": "circular buffers",
}
_FLAG = "with `--enable-prefix-caching`"
_NO_PREFIXES = "vLLM caches no prefixes for it"
_TEXTS = {
    SERVED: "",
    WITHOUT: "vLLM keeps the groups named out of its prefix cache: they are computed anew for each request.",
    REFUSED: "vLLM runs them as if kvbm were absent.",
    DRAFT: "They have no engine of their own. With the one they draft for they are served, or not, as it is: "
    "[speculative decoding](vllm.md#what-is-not-served) costs a hit its last block.",
    NOT_BUILT: "An engine says at its start whether it is served (`connector.not_serving`).",
}
_HEADS = {
    SERVED: "| KV groups | how | architectures |",
    WITHOUT: "| KV groups | without | architectures |",
    REFUSED: "| KV groups | why | architectures |",
    DRAFT: "| KV groups | how | architectures |",
    NOT_BUILT: "| what vLLM says of it | why | architectures |",
}
_INDEXER = "vLLM cannot place the KV of its indexer beside its pages of a CPU"
# Why an architecture cannot be built here, and the error that says so. Another error is shown as it is.
_KNOWN = {
    "DeepseekV4ForCausalLM": ("NotImplementedError", _INDEXER),
    "Dots3NoteForCausalLM": ("ValidationError", "needs a GPU: its module is not imported without"),
    "Emu3ForConditionalGeneration": ("AttributeError", "its processor is not made without its files"),
    "Glm5NextForCausalLM": ("NotImplementedError", _INDEXER),
    "Glm5NextForConditionalGeneration": ("NotImplementedError", _INDEXER),
    "DeepseekV4ForConditionalGeneration": ("ValidationError", "vLLM has it for GPUs alone"),
    "DeepseekV41ForCausalLM": ("AssertionError", "needs a GPU: `compute_fp8_einsum_recipe`"),
    "InternS1ProForConditionalGeneration": (
        "AttributeError",
        "vLLM 0.32 cannot make it: its class has no `model_config`",
    ),
    "KananaVForConditionalGeneration": ("TypeError", "needs the package `timm`"),
    "OpenPanguVLForConditionalGeneration": ("RuntimeError", "needs a GPU: flash attention in its vision tower"),
    "Phi4MMForCausalLM": ("NotImplementedError", "no configuration without remote code: of its audio tower"),
    "Qwen4ExpForCausalLM": ("NotImplementedError", "needs a GPU: FlashAttention"),
    "Qwen4ExpForConditionalGeneration": ("NotImplementedError", "needs a GPU: FlashAttention"),
}


class Verdict(NamedTuple):
    """One architecture.

    Attributes:
        verdict: one of the sections of the page.
        groups: the kinds of its KV groups in words, or what vLLM's registry says of it where it was not built.
        why: it is refused or not built, or what it is served without.
    """

    name: str
    verdict: str
    groups: str
    why: str


def verdicts(names: Iterable[str] = ()) -> list[Verdict]:
    """Those of architectures, or of all, by name. For a process of its own."""
    stand_ins.install()
    models = _import_models()
    stand_ins.after_imports()
    waiting = sorted(names or models, reverse=True)
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[str, Any, float]] = {}
    found: list[Verdict] = []
    while waiting or running:
        while waiting and len(running) < _PROCESSES:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send_verdict, args=(name, theirs))
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic()
        ready = wait(list(running), timeout=1)
        for ours in [one for one in running if one in ready]:
            name, process, _ = running.pop(ours)
            try:
                found.append(Verdict(*ours.recv()))
            except EOFError:
                process.join()
                found.append(Verdict(name, NOT_BUILT, _facts(name), f"its process ended with {process.exitcode}"))
            process.join()
        for _, process, since in running.values():
            if time.monotonic() - since > _MOST_S:
                process.kill()
    return sorted(found)


def page_of(found: Sequence[Verdict]) -> str:
    """docs/vllm-models.md."""
    from vllm import __version__

    rows: dict[str, dict[tuple[str, str], list[str]]] = {section: defaultdict(list) for section in _ORDER}
    for one in found:
        rows[one.verdict][one.groups, one.why].append(one.name)
    counts = {section: sum(map(len, rows[section].values())) for section in _ORDER}
    lines = [
        "# Models of vLLM",
        _paragraph(
            f"What kvbm serves of the {len(found)} architectures in the registry of vLLM "
            f"{'.'.join(__version__.split('.')[:2])}. Written by a program that builds them, and held to it by a test "
            "(`tests/engines/vllm/test_registry.py`). [vLLM](vllm.md#what-is-not-served) says which engines are not "
            "served, whatever their model."
        ),
        "",
        _paragraph(
            "vLLM's own code makes the KV groups, from a small configuration of that architecture: of a default where "
            "there is one. A checkpoint may have fewer kinds, such as no sliding windows, or more. Pooling models "
            "have vLLM's pooling for their class; with pooling over all tokens vLLM caches no prefixes."
        ),
        "",
        "| verdict | architectures |",
        "|---|---|",
        *(f"| {section.lower()} | {counts[section]} |" for section in _ORDER if counts[section]),
    ]
    for section in _ORDER:
        if not counts[section]:
            continue
        lines += ["", f"## {section}"]
        if _TEXTS[section]:
            lines += [_paragraph(_TEXTS[section]), ""]
        lines += [_HEADS[section], "|---|---|---|"]
        for (groups, why), names in sorted(rows[section].items()):
            lines.append(f"| {groups} | {why} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def verdicts_on(page: str) -> dict[str, Verdict]:
    """What a page says, by architecture. Raises ValueError: of one it says two things."""
    told: dict[str, Verdict] = {}
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not section or not line.startswith("| ") or len(cells) != 3 or line == _HEADS[section]:
            continue
        for name in cells[2].split(", "):
            if name in told:
                raise ValueError(f"{name} stands on the page twice")
            told[name] = Verdict(name, section, cells[0], cells[1])
    return told


def be_the_only_rank() -> None:
    """Make this process the one rank that vLLM's layers ask for, those of the current configuration.

    One that began with a dense model has no group of experts.
    """
    from vllm.config import get_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.distributed.parallel_state import _EP, destroy_model_parallel

    from tests.servers import free_port

    if model_parallel_is_initialized():
        if _EP is not None or not get_current_vllm_config().model_config.is_moe:
            return
        destroy_model_parallel()
    else:
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
    initialize_model_parallel(1)


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _import_models() -> list[str]:
    """Import what all of them need, once for the processes to come; their names."""
    import vllm.engine.arg_utils
    import vllm.v1.core.kv_cache_utils
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    import kvbm.engines.vllm.served  # noqa: F401

    lazy: Any = registry._LazyRegisteredModel
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )  # else a process each
    for model in registry.ModelRegistry.models.values():
        try:
            model.load_model_cls()
        except Exception:  # noqa: BLE001 - the process that builds it says so
            continue
    return list(registry.ModelRegistry.models)


def _send_verdict(name: str, to: Connection) -> None:
    quiet = os.open(os.environ.get("KVBM_REGISTRY_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    to.send(tuple(_verdict(name)))
    to.close()
    os._exit(0)  # nothing of the parent's is ours to end


def _verdict(name: str) -> Verdict:
    from vllm.model_executor.models import registry

    if name in registry._SPECULATIVE_DECODING_MODELS:
        return Verdict(name, DRAFT, "of its engine", "as a draft model")
    try:
        configuration = configuration_of(name)
    except LookupError:
        needs = "needs the package `terratorch`" if name == "Terratorch" else "no configuration without remote code"
        return Verdict(name, NOT_BUILT, _facts(name), needs)
    try:
        return _built(name, configuration)
    except Exception as error:  # noqa: BLE001 - whatever it is, the page says it
        return Verdict(name, NOT_BUILT, _facts(name), _why_not_built(name, error))


def _facts(name: str) -> str:
    from vllm.model_executor.models import registry

    try:
        info = registry._ModelInfo.from_model_cls(registry.ModelRegistry.models[name].load_model_cls())
    except Exception:  # noqa: BLE001 - the same that it was not built for
        return "could not be imported"
    if info.is_attention_free:
        return "no attention"
    return "attention and recurrent states" if info.is_hybrid else "attention"


def _why_not_built(name: str, error: Exception) -> str:
    known, words = _KNOWN.get(name, ("", ""))
    if type(error).__name__ == known:
        return words
    missing = getattr(error, "name", None)
    if isinstance(error, AttributeError) and missing and "onfig" in type(error.obj).__name__ + str(error):
        return f"no configuration without remote code: `{missing}` has no default"
    if isinstance(error, AttributeError) and missing and type(error.obj).__name__ == "Remote":
        return f"no configuration without remote code: `{missing}` has no default"
    first = next(iter(str(error).splitlines()), "").replace("|", "\\|")
    return f"{type(error).__name__}: {first}"


def _built(name: str, configuration: Any) -> Verdict:
    """What kvbm makes of an architecture. Raises whatever its construction does."""
    from transformers import PreTrainedConfig
    from vllm.model_executor.models import registry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    os.environ.update(configuration.environment)
    if configuration.remote is not None:
        _CONFIG_REGISTRY[configuration.values["model_type"]] = configuration.remote
    ways: list[dict[str, Any]] = [{}]
    if name in registry._MULTIMODAL_MODELS:
        ways.append({"language_model_only": True})  # without its towers, whose KV no block holds
    first: Exception | None = None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configuration.values))
        for way in ways:
            while True:
                try:
                    return _verdict_of(name, folder, configuration, way)
                except AttributeError as error:
                    owner = type(error.obj)
                    if issubclass(owner, PreTrainedConfig) and error.name in USUAL and error.name not in vars(owner):
                        setattr(owner, error.name, USUAL[error.name])
                        continue
                    first = first or error
                except Exception as error:  # noqa: BLE001 - the second way, or it is raised
                    first = first or error
                break
    assert first is not None
    raise first


def _verdict_of(name: str, folder: str, configuration: Any, options: dict[str, Any]) -> Verdict:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.workspace import init_workspace_manager

    fixed = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True, "dtype": "bfloat16"}
    options = fixed | {"model": folder, "max_model_len": _CONTEXT_TOKENS} | dict(configuration.arguments) | options
    config = EngineArgs(**options).create_engine_config()
    model = config.model_config
    how = ""
    if model.attn_type == "attention_free" and model.runner_type == "generate":
        how = _FLAG
        config = EngineArgs(**options, enable_prefix_caching=True).create_engine_config()
    config.cache_config.kv_cache_layout = KVCacheLayout.LBNHC.name
    config.cache_config.num_gpu_blocks_override = _BLOCKS
    with set_current_vllm_config(config):
        be_the_only_rank()
        init_workspace_manager(torch.device("cpu"))
        with torch.device("cpu" if configuration.on_cpu else "meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        modules = config.compilation_config.static_forward_context.items()
        specs = {at: one.get_kv_cache_spec(config) for at, one in modules if isinstance(one, AttentionLayerBase)}
        known = {at: spec for at, spec in specs.items() if spec is not None}
        (made,) = get_kv_cache_configs(config, [known], [1 << 40])
    groups = _groups(made, cached=True) + _groups(made, cached=False)
    words = " + ".join(groups) or "none"
    if why := _why_refused(config, made):
        return Verdict(name, REFUSED, words, why)
    if without := _groups(made, cached=False):
        return Verdict(name, WITHOUT, words, ", ".join(without))
    return Verdict(name, SERVED, words, how)


def _groups(made: Any, cached: bool) -> list[str]:
    """The kinds of KV groups that vLLM's prefix cache has, or has not."""
    from kvbm.engines.vllm.regions import served_groups, specs_of

    indices = set(served_groups(made))
    kinds = {
        type(spec).__name__
        for index, group in enumerate(made.kv_cache_groups)
        if (index in indices) is cached
        for spec in specs_of(group.kv_cache_spec)
    }
    return sorted(_KINDS.get(kind, kind) for kind in kinds)


def _why_refused(config: Any, made: Any) -> str:
    """Why kvbm does not serve an engine as vLLM starts it, or ""."""
    from kvbm.core.errors import LayoutError
    from kvbm.engines.vllm.regions import block_regions
    from kvbm.engines.vllm.served import why_not_served

    model = config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        how = "bidirectional attention" if model.attn_type == "encoder_only" else "pooling over all tokens"
        return f"{_NO_PREFIXES}: {how}"
    if not config.cache_config.enable_prefix_caching and model.attn_type != "encoder_decoder":
        return f"{_NO_PREFIXES}: it switches its prefix cache off for this model"
    try:
        if not (why := why_not_served(config, made)):
            block_regions(made)
        return why
    except LayoutError as error:
        return str(error)


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_NO_USAGE_STATS": "1",
    }
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page_of(verdicts(sys.argv[2:])))
