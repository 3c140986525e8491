"""Tokens become the digests that vLLM and SGLang have of blocks, and these our hashes."""

from __future__ import annotations

import hashlib
import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm import _native
from kvbm.core import engine_chains
from kvbm.core.engine_chains import (
    CHAINS,
    DIGEST_BYTES,
    MOST_HASH_TOKENS,
    MOST_KEY_BYTES,
    SGLANG_SHA256,
    VLLM_CBOR,
    VLLM_SHA256,
    ExtraKeys,
    MediaPlace,
    block_keys,
    encoded_keys,
    sglang_begin,
)
from kvbm.core.errors import ArgumentValueError, LayoutError
from kvbm.core.hashing import derived_hashes

GOLDEN = Path(__file__).parents[1] / "golden" / "engine_chains.json"
BOTH = pytest.mark.parametrize("twin", [engine_chains, _native], ids=["python", "c++"])
ROOT, BEGIN = bytes(range(16)), bytes(range(32))


def golden() -> Any:
    """Written with cbor2 6 and pickle, as vLLM 0.32's `hash_block_tokens` uses them."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{case['chain']}: {case['name']}")


def keys_of(case: dict[str, Any]) -> list[bytes]:
    keys = [None if key is None else tuple(map(tuple, key)) for key in case.get("keys") or ()]
    return [encoded_keys(case["chain"], key) for key in keys]


@BOTH
@golden()
def test_digests_are_those_of_the_engine(case: dict[str, Any], twin: Any) -> None:
    begin = bytes.fromhex(case["begin"]) if "begin" in case else sglang_begin(case["salt"])
    found = twin.engine_digests(case["chain"], case["tokens"], case["hash_tokens"], begin, keys_of(case))
    assert found.hex() == "".join(case["digests"])


@BOTH
@pytest.mark.parametrize("hash_tokens", [1, 2, 3, 4, 17, 255, 256, 2000, MOST_HASH_TOKENS])
def test_blocks_of_any_size_are_hashed_as_pickle_writes_them(twin: Any, hash_tokens: int) -> None:
    random = np.random.default_rng(hash_tokens)
    tokens = (random.integers(0, 1 << 32, 3 * hash_tokens) >> random.integers(0, 32, 3 * hash_tokens)).tolist()
    media = [MediaPlace(f"image {at}", 5 * at, 3) for at in range(min(200, hash_tokens // 5))]
    keys = block_keys(3, hash_tokens, "pepper " * 60, ("adapter", "/adapters/é"), media)
    before, expected = BEGIN, b""
    for at, key in enumerate(keys):
        block = tuple(tokens[at * hash_tokens : (at + 1) * hash_tokens])
        before = hashlib.sha256(pickle.dumps((before, block, key), protocol=5)).digest()
        expected += before
    encoded = [encoded_keys(VLLM_SHA256, key) for key in keys]
    assert twin.engine_digests(VLLM_SHA256, tokens, hash_tokens, BEGIN, encoded) == expected


def test_a_block_has_the_keys_of_all_media_of_which_it_has_a_part() -> None:
    media = [MediaPlace("first", 2, 3), MediaPlace("second", 6, 7)]
    assert block_keys(5, 4, "salt", ("name", "/path"), media) == [
        (("lora", "name", "/path"), ("mm", "first", 2), ("cache_salt", "salt")),
        (("lora", "name", "/path"), ("mm", "first", -2), ("mm", "second", 2)),
        (("lora", "name", "/path"), ("mm", "second", -2)),
        (("lora", "name", "/path"), ("mm", "second", -6)),
        (("lora", "name", "/path"),),
    ]
    assert block_keys(2, 4) == [None, None]
    assert block_keys(0, 4, "salt") == []


@pytest.mark.parametrize(
    "keys",
    [
        (("mm", "same", 0), ("mm", "same", 2)),
        (("lora", "same", "same"),),
        (("mm", "lora", 0),),
        (("lora", "name", "/path"), ("cache_salt", "name")),
    ],
)
def test_what_pickle_writes_of_one_text_twice_is_refused_and_cbor_takes_it(keys: ExtraKeys) -> None:
    with pytest.raises(ArgumentValueError, match="one text twice"):
        encoded_keys(VLLM_SHA256, keys)
    assert encoded_keys(VLLM_CBOR, keys)


def test_keys_too_long_for_one_frame_are_refused() -> None:
    for kind in (VLLM_SHA256, VLLM_CBOR):
        with pytest.raises(ArgumentValueError, match=str(MOST_KEY_BYTES)):
            encoded_keys(kind, (("cache_salt", "s" * MOST_KEY_BYTES),))
    with pytest.raises(ArgumentValueError, match="SGLang"):
        encoded_keys(SGLANG_SHA256, (("mm", "image", 0),))


@BOTH
def test_a_block_of_several_digests_has_the_hash_of_its_last(twin: Any) -> None:
    digests = np.random.default_rng(7).bytes(7 * DIGEST_BYTES)
    single = [digests[begin:end] for begin, end in pairwise(range(0, len(digests) + 1, DIGEST_BYTES))]
    assert twin.digest_hashes(ROOT, digests) == derived_hashes(ROOT, single)
    assert twin.digest_hashes(ROOT, digests, 3) == derived_hashes(ROOT, [single[2], single[5]])
    in_hex = derived_hashes(ROOT, [one.hex().encode() for one in single])
    assert twin.digest_hashes(ROOT, digests, in_hex=True) == in_hex
    assert twin.digest_hashes(ROOT, b"") == b""


@BOTH
@pytest.mark.parametrize(
    "arguments",
    [
        ("vllm-xxhash", [1], 1, BEGIN),
        (VLLM_SHA256, [1], 0, BEGIN),
        (VLLM_SHA256, [1], MOST_HASH_TOKENS + 1, BEGIN),
        (VLLM_SHA256, [1], 1, b""),
        (VLLM_CBOR, [1], 1, BEGIN[:31]),
        (SGLANG_SHA256, [1], 1, BEGIN[:31]),
        (SGLANG_SHA256, [1], 1, BEGIN, [b""]),
        (VLLM_CBOR, [1, 2], 1, BEGIN, [b""]),
        (VLLM_CBOR, [1], 1, BEGIN, [bytes(MOST_KEY_BYTES + 1)]),
        (VLLM_CBOR, [1 << 32], 1, BEGIN),
    ],
)
def test_what_no_chain_can_be_made_of_is_refused(twin: Any, arguments: Any) -> None:
    with pytest.raises(LayoutError):
        twin.engine_digests(*arguments)


@BOTH
def test_digests_that_are_none_are_refused(twin: Any) -> None:
    for wrong in ((ROOT[:15], BEGIN), (ROOT, BEGIN[:31]), (ROOT, BEGIN, 0)):
        with pytest.raises(LayoutError):
            twin.digest_hashes(*wrong)


def test_each_chain_tells_prompts_apart() -> None:
    tokens = list(range(8))
    found = {kind: _native.engine_digests(kind, tokens, 4, BEGIN) for kind in CHAINS}
    assert len(set(found.values())) == len(CHAINS)
    for kind in CHAINS:
        assert found[kind] != _native.engine_digests(kind, [*tokens[:7], 9], 4, BEGIN)
        assert found[kind] != _native.engine_digests(kind, tokens, 4, bytes(32))
