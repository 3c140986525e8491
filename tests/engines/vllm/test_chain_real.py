"""What kvbm makes of tokens are the hashes that vLLM makes of a request with them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvbm.assembly import NATIVE
from kvbm.core.engine_chains import VLLM_CBOR, VLLM_SHA256, MediaPlace, block_keys, encoded_keys
from kvbm.engines.vllm.chain import begin_of

TOKENS = [*range(151_000, 151_090), *range(40)]
ADAPTER = LoRARequest("adapter", 1, "/adapters/one")
MEDIA = [("image-1", 3, 20), ("image-2", 40, 5), ("image-3", 47, 30)]


def request_of(salt: str | None, lora: LoRARequest | None, media: list[tuple[str, int, int]]) -> Request:
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset, tokens)
        )
        for name, offset, tokens in media
    ]
    return Request(
        request_id="one",
        prompt_token_ids=list(TOKENS),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        lora_request=lora,
        cache_salt=salt,
    )


@pytest.mark.parametrize("seed", [None, "0", "a seed"])
@pytest.mark.parametrize(("algorithm", "kind"), [("sha256", VLLM_SHA256), ("sha256_cbor", VLLM_CBOR)])
@pytest.mark.parametrize("hash_tokens", [4, 16, 130])
@pytest.mark.parametrize("salt", [None, "pepper"])
@pytest.mark.parametrize("lora", [None, ADAPTER])
@pytest.mark.parametrize("media", [[], MEDIA])
def test_digests_are_vllms(
    monkeypatch: pytest.MonkeyPatch,
    seed: str | None,
    algorithm: str,
    kind: str,
    hash_tokens: int,
    salt: str | None,
    lora: LoRARequest | None,
    media: Any,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    begin = begin_of(algorithm)
    assert begin == kv_cache_utils.NONE_HASH
    expected = kv_cache_utils.get_request_block_hasher(hash_tokens, function)(request_of(salt, lora, media))
    named = None if lora is None else (lora.lora_name, lora.lora_path)
    places = [MediaPlace(*one) for one in media]
    keys = block_keys(len(TOKENS) // hash_tokens, hash_tokens, salt or "", named, places)
    encoded = [encoded_keys(kind, key) for key in keys]
    assert NATIVE.engine_digests(kind, TOKENS, hash_tokens, begin, encoded) == b"".join(expected)


def test_of_hashes_with_a_random_seed_nothing_is_stated() -> None:
    assert begin_of("xxhash") == begin_of("xxhash_cbor") == b""
