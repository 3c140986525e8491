"""What each pipeline stage says of its blocks.

The scheduler has vLLM's KVCacheConfig of the first stage alone, and the others have other layers.

vLLM asks every worker once, after its tensors are there and before the first request, and gives the scheduler's half
all answers (its handshake). With one stage, and layers of one kind in each KV group, nothing is asked: its
configuration says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvbm.core.errors import LayoutError
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.regions import block_regions, layout_words, served_groups


class StageBlocks(NamedTuple):
    """The blocks of one stage, as each of its ranks sees them. Sent from workers to the scheduler.

    Attributes:
        stage: its part of each block.
        groups: vLLM's indices of the KV groups that are served.
        words: of each of those, what its bytes are.
        layers: of each of vLLM's groups, the names of its layers here.
        why: why this stage cannot be served, "" when it can.
    """

    stage: Stage
    groups: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    layers: tuple[tuple[str, ...], ...] = ()
    why: str = ""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> StageBlocks:
        """Those that vLLM's configuration describes."""
        parallel = vllm_config.parallel_config
        try:
            stage = Stage(block_regions(kv_cache_config).part_bytes, kv_cache_config.kv_tp_replicas)
            parts = ranks_of(vllm_config, kv_cache_config, [stage]).part_sizes
            groups = tuple(served_groups(kv_cache_config))
            words = tuple(layout_words(kv_cache_config, group, len(parts)) for group in groups)
        except LayoutError as error:
            return cls(Stage(0), why=str(error))
        layers = tuple(tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups)
        return cls(stage, groups, words, layers if parallel.pipeline_parallel_size > 1 else ())


def all_stages(found: Mapping[int, StageBlocks], count: int) -> tuple[list[StageBlocks], str]:
    """What all stages say, from the first on, and why they cannot be served together, "" when they can."""
    missing = [index for index in range(count) if index not in found]
    if missing:
        what = f"pipeline stage {missing[0]}" if count > 1 else "a worker"
        return [], (
            f"{what} has not said how its blocks lie; vLLM's MultiConnector asks one connector alone, so with pipeline "
            "parallelism, or layers of several kinds in one KV group, kvbm has to be the only connector"
        )
    stages = [found[index] for index in range(count)]
    for index, stage in enumerate(stages):
        if stage.why:
            return [], f"pipeline stage {index}: {stage.why}" if count > 1 else stage.why
        if stage.groups != stages[0].groups:
            return [], f"pipeline stage {index} shares the KV groups {stage.groups}, stage 0 shares {stages[0].groups}"
    return stages, ""


def layout_of(stages: Sequence[StageBlocks], order: Sequence[int]) -> str:
    """The bytes of a block of all stages in words, for a namespace's `layout` field.

    Args:
        order: of KV groups.
    """
    said = [" | ".join(stage.words[stage.groups.index(group)] for group in order) for stage in stages]
    return said[0] if len(said) == 1 else " || ".join(said)


def ranks_of(vllm_config: Any, kv_cache_config: Any, stages: Sequence[Stage]) -> Ranks:
    """How blocks are spread over the ranks of an engine."""
    parallel = vllm_config.parallel_config
    return Ranks(
        tuple(stages),
        parallel.tensor_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        interleave_of(vllm_config, kv_cache_config),
        parallel.nnodes_within_dp,
    )


def interleave_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Consecutive tokens of a block that one rank of decode context parallelism has; 1 without it.

    vLLM settles it in each worker, where a connector is made, from two options and the block size; a scheduler's
    configuration is not told.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size <= 1:
        return 1
    old = parallel.dcp_kv_cache_interleave_size
    return int(old if old > 1 else parallel.cp_kv_cache_interleave_size)
