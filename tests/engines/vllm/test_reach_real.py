"""How far a prefix reaches is what vLLM's own cache says of the same blocks, for every kind of KV group that is
served.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvbm.engines.vllm.opening import _groups
from kvbm.engines.vllm.reach import ABSENT, reach

TOKENS, BLOCKS, DROPS = 16, 12, 400
SHAPE: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
MLA = MLAAttentionSpec(**SHAPE)
STATE = MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
MODELS = {
    "attention and states": [FULL, STATE, STATE],
    "latent attention and states": [MLA, STATE],
    "attention and windows": [FULL, SlidingWindowSpec(**SHAPE, sliding_window=40)],
    "latent attention and latent windows": [MLA, SlidingWindowMLASpec(**SHAPE, sliding_window=33)],
    "attention and chunks": [FULL, ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)],
    "attention, windows and states": [FULL, SlidingWindowSpec(**SHAPE, sliding_window=40), STATE],
    "a group that no prefix is made of": [FULL, STATE, CircularBufferSpec(**SHAPE)],
}
DRAFTED = {  # and which groups hold layers of a draft model
    "attention that a draft model shares": ([FULL], {0}),
    "latent attention that a draft model shares": ([MLA], {0}),
    "attention of a draft model beside windows": ([FULL, SlidingWindowSpec(**SHAPE, sliding_window=40)], {0}),
    "windows of a draft model": ([FULL, SlidingWindowSpec(**SHAPE, sliding_window=40)], {1}),
    "attention of a draft model beside states": ([FULL, STATE], {0}),
}


@pytest.mark.parametrize("name", [*MODELS, *DRAFTED])
def test_a_prefix_reaches_as_far_as_in_vllms_own_cache(name: str) -> None:
    specs, drafted = DRAFTED.get(name) or (MODELS[name], set())
    named = [KVCacheGroupSpec([f"{at}"], spec, is_eagle_group=at in drafted) for at, spec in enumerate(specs)]
    config = KVCacheConfig(500, [], named)
    config.hash_block_size = config.cache_hit_alignment_tokens = TOKENS
    groups = _groups(config, 1)
    assert {group.id for group in groups} == set(config.prefix_cacheable_group_ids)
    assert {group.id for group in groups if group.has_draft} == drafted
    hashes = [BlockHash(bytes([at]) * 32) for at in range(BLOCKS)]
    chosen, shortened = random.Random(name), 0
    for _ in range(DROPS):
        coordinator = get_kv_cache_coordinator(
            config, 4096, 4096, bool(drafted), True, False, 1, 1, scheduler_block_size=TOKENS, hash_block_size=TOKENS
        )
        pool, lost = coordinator.block_pool, chosen.choice((0.02, 0.1, 0.4))
        held = []
        for group in groups:
            share = min(1.0, lost * (4 if group.is_state else 1))
            found = bytes(ABSENT if chosen.random() < share else 1 for _ in range(BLOCKS))
            held.append(found)
            for at, tier in enumerate(found):
                if tier != ABSENT:
                    key = make_block_hash_with_group_id(hashes[at], group.id)
                    pool.cached_block_hash_to_block.insert(key, pool.get_new_blocks(1)[0])
        limit = chosen.randrange(1, BLOCKS + 1) * TOKENS
        looked_at = limit + TOKENS * (len(groups) == 1 and bool(drafted))  # of one group, vLLM looks no block behind
        _, hit, _ = coordinator.find_longest_cache_hit(hashes, looked_at)
        asked = [found[: limit // TOKENS + group.has_draft] for group, found in zip(groups, held, strict=True)]
        assert reach(groups, asked, 0, limit, TOKENS) == hit, (held, limit)
        shortened += hit < limit
    assert shortened > DROPS // 10
