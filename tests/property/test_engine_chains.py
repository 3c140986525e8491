"""Engines' chains: the native implementation gives what the readable one gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core import engine_chains
from kvbm.core.engine_chains import CHAINS, DIGEST_BYTES, SGLANG_SHA256, VLLM_CBOR, MediaPlace, block_keys, encoded_keys

TOKENS = st.one_of(st.integers(0, 300), st.integers(0, (1 << 32) - 1))
BEGINS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


@given(st.sampled_from(CHAINS), st.lists(TOKENS, max_size=120), st.integers(1, 40), BEGINS, st.text(max_size=300))
def test_digests_of_both_are_equal(kind: str, tokens: list[int], hash_tokens: int, begin: bytes, salt: str) -> None:
    keys: list[bytes] = []
    if kind != SGLANG_SHA256 and salt not in ("", "one", "two", "mm", "lora", "cache_salt"):
        media = [MediaPlace("one", 1, 3), MediaPlace("two", 5, 40)]
        found = block_keys(len(tokens) // hash_tokens, hash_tokens, salt, None, media)
        keys = [encoded_keys(kind, key) for key in found]
    expected = engine_chains.engine_digests(kind, tokens, hash_tokens, begin, keys)
    assert _native.engine_digests(kind, tokens, hash_tokens, begin, keys) == expected


@given(st.lists(BEGINS, max_size=150), st.integers(1, 200), st.booleans(), st.binary(min_size=16, max_size=16))
def test_hashes_of_digests_are_equal(digests: list[bytes], scale: int, in_hex: bool, root: bytes) -> None:
    packed = b"".join(digests)
    expected = engine_chains.digest_hashes(root, packed, scale, in_hex)
    assert _native.digest_hashes(root, packed, scale, in_hex) == expected


@given(st.text(min_size=1, max_size=400), st.integers(-100_000, 100_000))
def test_cbor_keys_begin_with_how_many_there_are(name: str, offset: int) -> None:
    assert encoded_keys(VLLM_CBOR, (("mm", name, offset),)).startswith(b"\x81\x83\x62mm")
