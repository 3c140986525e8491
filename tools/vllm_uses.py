"""What kvbm uses of vLLM, held against a vLLM that is not run: an installed one, a wheel, or the folder of an unpacked
one.

`python tools/vllm_uses.py [FOLDER | WHEEL]` prints what that vLLM's connector interface has besides, and ends with one
sentence on what that vLLM lacks or has otherwise (exit status 1). `make vllm-next-check` runs it on the wheel of the
next vLLM.

FOLDER has `vllm/` in it: site-packages, or what `unzip vllm-*.whl` makes. Without one it is where vLLM is installed.
Nothing of vLLM is imported: its source is read. What kvbm's classes override is read from kvbm's own source; what it
calls and reads is listed in USED.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OURS = Path(__file__).parents[1] / "kvbm" / "engines" / "vllm"

# A module, and below it what is used there: a function with its first parameters ("..." where it may have more), or a
# class with attributes.
USED = """
vllm.config.attention
    AttentionConfig:
vllm.config.cache
    CacheConfig: enable_prefix_caching prefix_caching_hash_algo cache_dtype kv_cache_dtype_skip_layers sliding_window
    CacheConfig: kv_sharing_fast_prefill swa_bounded_replay
vllm.config.compilation
    CompilationConfig: static_forward_context
vllm.config.kv_events
    KVEventsConfig: enable_kv_cache_events
vllm.config.kv_transfer
    KVTransferConfig: kv_role kv_connector_extra_config kv_load_failure_policy engine_id
vllm.config.load
    LoadConfig: load_format
vllm.config.lora
    LoRAConfig: lora_dtype target_modules enable_tower_connector_lora
vllm.config.model
    ModelConfig: model revision seed dtype quantization quantization_config hf_config hf_overrides
    ModelConfig: model_class_overrides model_impl model_weights disable_sliding_window code_revision runner_type
    ModelConfig: convert_type max_model_len multimodal_config attn_type is_prefix_caching_supported
vllm.config.multimodal
    MultiModalConfig: limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
    MultiModalConfig: mm_encoder_tp_mode skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
vllm.config.parallel
    ParallelConfig: tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size
    ParallelConfig: decode_context_parallel_size nnodes_within_dp distributed_executor_backend world_size
    ParallelConfig: data_parallel_size data_parallel_index cp_kv_cache_interleave_size dcp_kv_cache_interleave_size
vllm.config.speculative
    SpeculativeConfig: method quantization kv_cache_dtype attention_backend draft_model_config draft_load_config
    SpeculativeConfig.use_eagle_block_drop(self)
vllm.config.vllm
    VllmConfig: model_config cache_config load_config parallel_config lora_config speculative_config attention_config
    VllmConfig: additional_config weight_transfer_config mamba_config kv_transfer_config kv_events_config
    VllmConfig: compilation_config
vllm.distributed
    get_pcp_group()
    get_pp_group()
vllm.distributed.kv_events
    BlockStored: block_hashes parent_block_hash token_ids block_size lora_id lora_name medium group_idx
    BlockStored: extra_keys kv_cache_spec_kind kv_cache_spec_sliding_window
    BlockRemoved: block_hashes medium group_idx
vllm.distributed.kv_transfer
    get_kv_transfer_group()
vllm.distributed.kv_transfer.kv_connector.factory
    KVConnectorFactory.register_connector(cls, name, module_path, class_name)
vllm.distributed.kv_transfer.kv_connector.v1.base
    KVConnectorBase_V1: _kv_transfer_config _connector_metadata _vllm_config _kv_cache_config
    KVConnectorTransferResults: finished_recving failed_recving
    KVConnectorRole: SCHEDULER WORKER
vllm.distributed.kv_transfer.kv_connector.v1.metrics
    KVConnectorStats: data
    KVConnectorPromMetrics: _counter_cls _gauge_cls _histogram_cls per_engine_labelvalues
vllm.distributed.parallel_state
    GroupCoordinator: rank_in_group
    get_tensor_model_parallel_rank()
vllm.lora.request
    LoRARequest: lora_int_id lora_name lora_path
vllm.lora.utils
    get_adapter_absolute_path(lora_path)
vllm.lora.worker_manager
    WorkerLoRAManager: lora_config
    WorkerLoRAManager._load_adapter(self, lora_request)
    WorkerLoRAManager.list_adapters(self)
vllm.model_executor.layers.attention.attention
    Attention: kv_cache_dtype
vllm.model_executor.layers.attention_layer_base
    AttentionLayerBase.get_attn_backend(self)
vllm.multimodal.inputs
    MultiModalFeatureSpec: identifier
vllm.platforms.interface
    Platform.get_device_name(cls, ...)
    Platform.is_cpu(self)
    Platform.get_cpu_architecture(cls)
vllm.utils.hashing
    get_hash_fn_by_name(hash_fn_name)
vllm.v1.attention.backend
    AttentionBackend.get_name()
    AttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
vllm.v1.core.block_pool
    BlockPool: blocks cached_block_hash_to_block
    BlockPool.cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, \
block_size, kv_cache_group_id, ...)
    BlockPool.reset_prefix_cache(self)
    BlockPool.touch(self, blocks)
    BlockPool.free_blocks(self, ordered_blocks)
    BlockHashToBlockMap: _cache
    BlockHashToBlockMap.get_one_block(self, key)
    BlockHashToBlockMap.insert(self, key, block)
    BlockHashToBlockMap.pop(self, key, block_id)
vllm.v1.core.kv_cache_coordinator
    KVCacheCoordinator.get_num_cacheable_tokens(self, num_computed_tokens, kv_cache_group_id)
vllm.v1.core.kv_cache_manager
    KVCacheBlocks.get_block_ids(self, ...)
    KVCacheManager: block_pool coordinator
    KVCacheManager.get_block_ids(self, request_id)
vllm.v1.core.kv_cache_utils
    KVCacheBlock: block_id block_hash is_null
    generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    maybe_convert_block_hash(hash_bytes)
    to_event_extra_keys(extra_keys)
    resolve_none_hash_seed(hash_fn)
vllm.v1.core.sched.output
    SchedulerOutput: num_scheduled_tokens total_num_scheduled_tokens preempted_req_ids finished_req_ids
    SchedulerOutput: kv_connector_block_state scheduled_new_reqs scheduled_cached_reqs
    NewRequestData: req_id block_ids
    CachedRequestData: req_ids new_block_ids
    KVConnectorBlockState: boundary_state_offloads
vllm.v1.kv_cache_interface
    KVCacheConfig: num_blocks kv_cache_tensors kv_cache_groups kv_cache_layout hash_block_size
    KVCacheConfig: cache_hit_alignment_tokens kv_tp_replicas
    KVCacheTensor: size layers layer_stride block_stride offset host_resident
    KVCacheGroupSpec: layer_names kv_cache_spec host_resident enable_kv_transfer is_eagle_group
    KVCacheSpec: block_size page_size_bytes prefix_cacheable
    FullAttentionSpec: num_heads head_size head_size_v dtype kv_quant_mode sliding_window attention_chunk_size
    FullAttentionSpec: dcp_sharded
    MLAAttentionSpec: cache_dtype_str tokens_per_state
    SlidingWindowSpec: sliding_window extra_retained_tokens
    SlidingWindowMLASpec: sliding_window
    ChunkedLocalAttentionSpec: attention_chunk_size
    MambaSpec: mamba_cache_mode mamba_type shapes dtypes tp_replicated
    UniformTypeKVCacheSpecs: kv_cache_specs
    RSWASpec: page_size_bytes
    SinkFullAttentionSpec: page_size_bytes
    CrossAttentionSpec: page_size_bytes
    EncoderOnlyAttentionSpec: page_size_bytes
    HiddenStateCacheSpec: page_size_bytes
    get_kv_cache_spec_kind(kv_cache_spec)
    get_kv_cache_spec_sliding_window(kv_cache_spec)
vllm.v1.metrics.cache_hit_source
    CacheHitSource: HOST DISK EXTERNAL_UNSPECIFIED
vllm.v1.metrics.utils
    create_metric_per_engine(metric, per_engine_labelvalues)
vllm.v1.outputs
    KVConnectorOutput: failed_recving kv_connector_worker_meta
vllm.v1.request
    Request: request_id block_hashes num_tokens num_prompt_tokens num_computed_tokens num_in_flight_tokens
    Request: all_token_ids skip_reading_prefix_cache shared_prefix_boundary kv_transfer_params lora_request
    Request: cache_salt mm_features num_output_tokens status
    RequestStatus: FINISHED_STOPPED FINISHED_LENGTH_CAPPED
vllm.v1.worker.gpu.model_runner
    GPUModelRunner: vllm_config model
    GPUModelRunner.get_draft_model(self)
    GPUModelRunner.initialize_kv_cache(self, kv_cache_config, ...)
    GPUModelRunner.reload_weights(self, ...)
vllm.v1.worker.gpu_model_runner
    GPUModelRunner: vllm_config model
    GPUModelRunner.get_draft_model(self)
    GPUModelRunner.initialize_kv_cache(self, kv_cache_config, ...)
    GPUModelRunner.reload_weights(self, ...)
vllm.v1.worker.gpu_worker
    Worker: vllm_config
    Worker.sleep(self, level)
    Worker.reload_weights(self, ...)
    Worker.update_weights(self, update_info)
    Worker.start_weight_update(self)
    Worker.start_draft_weight_update(self)
    Worker.finish_weight_update(self)
"""

# Methods of vLLM's connector interface that are left as they are: what they are for is not done here.
LEFT = frozenset(
    {
        "bind_connector_metadata",
        "bind_gpu_block_pool",
        "clear_connector_metadata",
        "finish_forward",
        "get_block_ids_with_load_errors",
        "get_finished",
        "get_finished_count",
        "get_handshake_metadata",
        "get_kv_connector_kv_cache_events",
        "get_loaded_kv_cache_group_ids",
        "get_mem_pool_context",
        "get_required_kvcache_layout",
        "has_connector_metadata",
        "reset_capture_state",
        "role",
        "set_host_xfer_buffer_ops",
        "set_xfer_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "supports_divergent_local_hybrid_hits",
    }
)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Report(NamedTuple):
    """What was found.

    Attributes:
        lacking: what kvbm uses and this vLLM has not, or has otherwise.
        new: methods of the connector interface that kvbm knows nothing of.
    """

    lacking: list[str]
    new: list[str]


class Source:
    """vLLM's source below a folder, read and not run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._module = cache(self._read)

    def of(self, module: str, name: str) -> ast.ClassDef | _Function | None:
        """A class or function of a module, wherever that imports it from."""
        found = self._found(module, name)
        return found[1] if found else None

    def has(self, module: str, name: str) -> bool:
        """Whether a module has a name that another one may import."""
        tree = self._module(module)
        return tree is not None and (name in _names(tree.body) or self._found(module, name) is not None)

    def members(self, module: str, name: str) -> dict[str, _Function | None]:
        """A class's methods, and its attributes as None, those of its bases among them."""
        found = self._found(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        where, node = found[0], found[1]
        members: dict[str, _Function | None] = {}
        for base in reversed(node.bases):
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                members |= self.members(where, plain.id)
        members |= dict.fromkeys(_names(node.body)) | dict.fromkeys(_assigned(node))
        return members | {one.name: one for one in node.body if isinstance(one, _Function)}

    def _found(self, module: str, name: str) -> tuple[str, ast.ClassDef | _Function] | None:
        tree = self._module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | _Function) and node.name == name:
                return module, node
        for node in _statements(tree.body):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    found = self._found(self._imported(module, node), name if alias.name == "*" else alias.name)
                    if found:
                        return found
        return None

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import of another one names."""
        if not node.level:
            return node.module or ""
        is_package = self._folder.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")[: -node.level + is_package or None]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _read(self, module: str) -> ast.Module | None:
        path = self._folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None


def compare(folder: Path, ours: Path = OURS, uses: str = USED) -> Report:
    """Hold kvbm's use of vLLM against the one below a folder. Raises FileNotFoundError: there is none.

    Args:
        ours: kvbm's modules that import vLLM, `connector.py` among them.
        uses: as USED.
    """
    if not (folder / "vllm" / "__init__.py").is_file():
        raise FileNotFoundError(f"{folder} has no vllm/__init__.py; name a folder that has vllm/ in it")
    source = Source(folder)
    lacking = [*_lacking_uses(source, uses)]
    for path in sorted(ours.glob("*.py")):
        lacking += _lacking_of_ours(source, path)
    connector = ast.parse((ours / "connector.py").read_text())
    own = {
        one.name
        for node in connector.body
        if isinstance(node, ast.ClassDef)
        for one in node.body
        if isinstance(one, _Function)
    }
    interface = source.members("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1")
    methods = {name for name, one in interface.items() if one is not None and not name.startswith("_")}
    return Report(lacking, sorted(methods - own - LEFT))


def _lacking_uses(source: Source, uses: str) -> Iterator[str]:
    """What of a list in the form of USED is not there, or otherwise."""
    module = ""
    for line in uses.splitlines():
        if not line.strip():
            continue
        if not line.startswith(" "):
            module = line
            continue
        named, _, rest = line.strip().partition("(")
        if rest:
            owner, _, name = named.rpartition(".")
            there = source.members(module, owner).get(name) if owner else source.of(module, name)
            wanted = [one.strip() for one in rest.rstrip(")").split(",") if one.strip()]
            if not isinstance(there, _Function):
                yield f"{module}: no {named}"
            elif why := _why_otherwise(there, wanted):
                yield f"{module}: {named} {why}"
            continue
        owner, _, attributes = line.strip().partition(":")
        if not source.has(module, owner):
            yield f"{module}: no {owner}"
            continue
        members = source.members(module, owner)
        yield from (f"{module}: {owner} has no {one}" for one in attributes.split() if one not in members)


def _lacking_of_ours(source: Source, path: Path) -> Iterator[str]:
    """Names that a module of ours imports and vLLM has not, and methods it overrides whose parameters are others."""
    tree, imported = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            assert node.module is not None
            for alias in node.names:
                imported[alias.asname or alias.name] = node.module, alias.name
                if not source.has(node.module, alias.name):
                    yield f"{node.module}: no {alias.name}, which {path.name} imports"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            if not isinstance(base, ast.Name) or base.id not in imported:
                continue
            theirs = source.members(*imported[base.id])
            for one in node.body:
                there = theirs.get(one.name) if isinstance(one, _Function) else None
                if there is None or not isinstance(one, _Function):
                    continue
                if why := _why_otherwise(there, _parameters(one)):
                    yield f"{imported[base.id][0]}: {base.id}.{one.name} {why}, which {path.name} overrides"


def _why_otherwise(there: _Function, wanted: list[str]) -> str:
    """How a function's parameters differ from those wanted; "..." at the end of these allows more with defaults."""
    have = _parameters(there)
    if wanted[-1:] == ["..."]:
        first, optional = wanted[:-1], len(there.args.defaults)
        if have[: len(first)] == first and len(there.args.posonlyargs + there.args.args) - len(first) <= optional:
            return ""
    elif have == wanted:
        return ""
    return f"takes ({', '.join(have)}), and ({', '.join(wanted)}) is used"


def _parameters(function: _Function) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    return names + [one.arg for one in given.kwonlyargs] + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those under if and try as well."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _names(body: list[ast.stmt]) -> set[str]:
    """What a class or a module defines or imports."""
    names: set[str] = set()
    for node in _statements(body):
        if isinstance(node, ast.ClassDef | _Function):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _assigned(node: ast.ClassDef) -> set[str]:
    """What methods of a class set on `self`."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def installed() -> Path:
    """The folder that an installed vLLM is in. Raises ModuleNotFoundError."""
    found = find_spec("vllm")
    if found is None or not found.origin:
        raise ModuleNotFoundError("vLLM is not installed; name the folder of an unpacked wheel")
    return Path(found.origin).parents[1]


def unpacked(wheel: Path, folder: Path) -> Path:
    """The folder, with vLLM's Python source from a wheel in it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        )
    return folder


def verdict(name: str, report: Report) -> str:
    """One sentence: whether kvbm finds in a vLLM of some name what it uses, and where it does not."""
    if not report.lacking:
        return f"{name} has all that kvbm uses, as it is used"
    places = f"{len(report.lacking)} place{'s' if len(report.lacking) > 1 else ''}"
    return f"{name} is otherwise than kvbm uses it in {places}: {'; '.join(report.lacking)}"


def main() -> int:
    """Print what was found."""
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else installed()
    with tempfile.TemporaryDirectory() as folder:
        report = compare(unpacked(given, Path(folder)) if given.suffix == ".whl" else given)
    for name in report.new:
        print(f"new      KVConnectorBase_V1.{name}")
    print(verdict(given.name, report))
    return 1 if report.lacking else 0


if __name__ == "__main__":
    sys.exit(main())
