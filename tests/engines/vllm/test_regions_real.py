"""Regions and copies over vLLM's own KVCacheConfig and its own allocation, in each of its layouts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvbm._native import Arena, RowCopier
from kvbm.engines.vllm.metadata import HostShare, Job, StepPlan
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.regions import block_regions, layout_words
from kvbm.engines.vllm.worker import RankWorker
from kvbm.pools.host.pool import HostPool

LONG_S = 120.0
BLOCKS = 7
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WIDE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
EIGHT_BITS = FullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
)
SCALED = FullAttentionSpec(  # each token's scales lie behind its numbers
    block_size=16,
    num_kv_heads=2,
    head_size=8,
    dtype=torch.uint8,
    kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
    state_content_bytes=2 * (8 + 4),
)


def config_of(layout: KVCacheLayout, groups: list[list[KVCacheSpec]]) -> KVCacheConfig:
    """What vLLM's engine core makes of groups, each the specs of its layers."""
    named = []
    for at, specs in enumerate(groups):
        layers = {f"{at}.{layer}": spec for layer, spec in enumerate(specs)}
        uniform = len(set(specs)) == 1
        spec = specs[0] if uniform else UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
        named.append(KVCacheGroupSpec(list(layers), spec))
    wanted: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=BLOCKS,
        ),
    )
    config = kv_cache_utils.get_kv_cache_config_from_groups(wanted, named, 1 << 24)
    config.kv_cache_layout = layout.name
    assert config.num_blocks == BLOCKS
    return config


CASES = {
    **{layout.name: (layout, [[FULL] * 3], 1) for layout in KVCacheLayout},
    "eight bits": (KVCacheLayout.LBNHC, [[EIGHT_BITS] * 3], 1),
    "eight bits and scales": (KVCacheLayout.LBNHC, [[SCALED] * 3], 1),
    "eight bits and scales, packed": (KVCacheLayout.BLNHC, [[SCALED] * 3], 1),
    "eight bits and scales, heads outside": (KVCacheLayout.BHLNC, [[SCALED] * 3], 1),
    "one layer": (KVCacheLayout.LBNHC, [[FULL]], 1),
    "one layer, heads outside": (KVCacheLayout.BHLNC, [[FULL]], 1),
    "kernel blocks": (KVCacheLayout.LBNHC, [[FULL] * 3], 4),
    "latent": (KVCacheLayout.LBNHC, [[LATENT] * 2], 1),
    "latent, packed": (KVCacheLayout.BLNHC, [[LATENT] * 2], 1),
    "hybrid": (KVCacheLayout.LBNHC, [[FULL] * 3, [WINDOW] * 3, [WINDOW] * 2], 1),
    "hybrid, packed": (KVCacheLayout.BLNHC, [[FULL] * 3, [WINDOW] * 3, [WINDOW] * 2], 1),
    "hybrid, heads outside": (KVCacheLayout.LHBNC, [[FULL] * 3, [WINDOW] * 3], 1),
    "two sizes": (KVCacheLayout.LBNHC, [[FULL, WIDE, FULL]], 1),
    "two sizes, packed": (KVCacheLayout.BLHNC, [[FULL, WIDE, FULL], [WINDOW]], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_block_of_vllms_own_tensors_comes_back_into_another(case: str) -> None:
    layout, groups, pieces = CASES[case]
    config = config_of(layout, groups)
    sizes = [16 // pieces] * len(groups)
    tensors = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
    storage = next(iter(tensors.values())).untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage).random_(0, 256)
    ranks = Ranks((Stage(block_regions(config).part_bytes),))
    assert ranks.row_bytes == max(sum(spec.page_size_bytes for spec in group) for group in groups)
    assert len({layout_words(config, group, 1) for group in range(len(groups))}) >= len(
        {tuple(group) for group in groups}
    )
    pool = HostPool(4, ranks.row_bytes, Arena, RowCopier(1), huge_pages="off")
    share = HostShare(os.getpid(), pool.fd, pool.mapped_bytes, 4, ranks)
    worker = RankWorker(0, config, threads=1)
    worker.register(tensors)
    assert worker.refused == ""

    def seen(block: int) -> list[bytes]:
        views = (view[block * pieces : (block + 1) * pieces].contiguous() for view in tensors.values())
        return [view.view(torch.uint8).numpy().tobytes() for view in views]

    def numbers(*values: int) -> bytes:
        return np.array(values, "<u4").tobytes()

    kept, others = [seen(5), seen(2)], {block: seen(block) for block in (0, 4, 6)}
    worker.begin(StepPlan(share, stores=[Job(1, numbers(5, 2), numbers(3, 0))]))
    assert worker.flush(LONG_S) and worker.finish().stored[1][0].why == ""
    worker.begin(StepPlan(share, loads=[Job(2, numbers(1, 3), numbers(3, 0), "r")]))
    assert worker.flush(LONG_S) and not worker.finish().failed
    assert [seen(1), seen(3)] == kept
    assert {block: seen(block) for block in others} == others
    worker.close()


def test_bytes_that_are_read_otherwise_are_named_otherwise() -> None:
    named = set()
    for specs in ([FULL], [EIGHT_BITS], [SCALED], [LATENT], [WINDOW]):
        for layout in (KVCacheLayout.LBNHC, KVCacheLayout.LHBNC, KVCacheLayout.BLNHC):
            config = config_of(layout, [specs * 2])
            named.add(str(layout_words(config, 0, 1)))
    assert len(named) == 15
