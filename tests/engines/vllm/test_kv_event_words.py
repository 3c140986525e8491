"""What kvbm says quickly in vLLM's words is what vLLM's own functions say, block by block."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.request import Request

from kvbm.core.ids import Tier
from kvbm.engines.vllm.kv_events import LayerKind, extra_keys_of, kv_event
from kvbm.engines.vllm.requests import KvGroup
from kvbm.engines.vllm.tier_events import GroupRun, ToldBlocks

BLOCK_TOKENS, BLOCKS = 16, 6
IMAGE = MultiModalFeatureSpec(data=None, modality="image", identifier="one", mm_position=PlaceholderRange(20, 30))
DIGESTS = [hashlib.sha256(bytes([at])).digest() for at in range(BLOCKS)]


def request_of(salt: str | None, lora: LoRARequest | None, media: list[Any]) -> Request:
    return Request(
        request_id="one",
        prompt_token_ids=list(range(BLOCKS * BLOCK_TOKENS + 3)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=media,
        lora_request=lora,
        cache_salt=salt,
    )


@pytest.mark.parametrize("salt", [None, "pepper"])
@pytest.mark.parametrize("lora", [None, LoRARequest("adapter", 1, "/adapters/one")])
@pytest.mark.parametrize("media", [[], [IMAGE]])
@pytest.mark.parametrize("begin", [0, 1, 4])
def test_extra_keys_are_those_of_each_block(salt: str | None, lora: Any, media: list[Any], begin: int) -> None:
    request = request_of(salt, lora, media)
    found, image = [], 0
    for at in range(begin, BLOCKS):
        keys, image = generate_block_hash_extra_keys(request, at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS, image)
        found.append(keys)
    expected = to_event_extra_keys(found) if any(found) else None
    assert extra_keys_of(request, begin, BLOCKS, BLOCK_TOKENS) == expected


@pytest.mark.parametrize("as_int", ["0", "1"])
def test_hashes_have_the_form_that_vllm_is_told_to_use(monkeypatch: pytest.MonkeyPatch, as_int: str) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)
    request = request_of(None, None, [])
    request.block_hashes = DIGESTS
    run = GroupRun.of(request, KvGroup(0, BLOCK_TOKENS, BLOCK_TOKENS), 1, BLOCKS, extra_keys_of)
    kinds = [LayerKind("full_attention", None)]
    stored = kv_event(ToldBlocks(run, 1, 4, Tier.HOST, True), kinds)
    expected = [maybe_convert_block_hash(one) for one in DIGESTS]
    assert isinstance(expected[0], int) == (as_int == "1")
    assert (stored.block_hashes, stored.parent_block_hash) == (expected[2:5], expected[1])
    assert kv_event(ToldBlocks(run, 0, 1, Tier.HOST, False), kinds).block_hashes == expected[1:2]
