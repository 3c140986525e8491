"""Token ids → the digests by which vLLM and SGLang know blocks, and these → our hashes.

The native implementation is what production runs; this is what it must equal. Each engine has a chain: the digest of a
block covers its tokens and the digest of the block before it.

    vllm-sha256       SHA-256 of (digest before, tokens, extra keys) as `pickle` of protocol 5 writes that tuple
    vllm-sha256_cbor  SHA-256 of the same tuple in canonical CBOR
    sglang-sha256     SHA-256 of the digest before and the tokens as u32, little-endian

In vLLM 0.32 the extra keys of a block are None, or a tuple of ("lora", name, path), of ("mm", identifier, offset from
the block's first token) for each image or the like of which it has a part, and, in the first block alone, of
("cache_salt", salt), in that order. Embeddings given in the place of tokens are keys there, too; here they are not.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvbm.core.errors import ArgumentValueError, LayoutError
from kvbm.core.hashing import derived_hashes, token_column

VLLM_SHA256: Final = "vllm-sha256"
VLLM_CBOR: Final = "vllm-sha256_cbor"
SGLANG_SHA256: Final = "sglang-sha256"
CHAINS: Final = (VLLM_SHA256, VLLM_CBOR, SGLANG_SHA256)
DIGEST_BYTES: Final = 32
MOST_HASH_TOKENS: Final = 8192  # of one digest
MOST_KEY_BYTES: Final = 16 << 10  # of the extra keys of one digest: with them `pickle` writes one frame, as is assumed
_TAGS = ("lora", "mm", "cache_salt")

ExtraKeys = tuple[tuple[str | int, ...], ...]


class MediaPlace(NamedTuple):
    """An image, a sound or the like in a prompt.

    Attributes:
        name: what the engine knows it by: vLLM's identifier.
        offset: of its first token in the prompt. tokens: how many stand for it.
    """

    name: str
    offset: int
    tokens: int


def block_keys(
    blocks: int, hash_tokens: int, salt: str = "", lora: tuple[str, str] | None = None, media: Sequence[MediaPlace] = ()
) -> list[ExtraKeys | None]:
    """The extra keys of a prompt's blocks, as vLLM has them.

    Args:
        blocks: how many digests there are. hash_tokens: of each.
        lora: name and path of the adapter.
        media: in the order of the prompt; none overlaps another.
    """
    keys: list[list[tuple[str | int, ...]]] = [[] if lora is None else [("lora", *lora)] for _ in range(blocks)]
    for one in media:
        first, last = one.offset // hash_tokens, (one.offset + one.tokens - 1) // hash_tokens
        for at in range(first, min(last + 1, blocks)):
            keys[at].append(("mm", one.name, one.offset - at * hash_tokens))
    if salt and blocks:
        keys[0].append(("cache_salt", salt))
    return [tuple(one) or None for one in keys]


def encoded_keys(kind: str, keys: ExtraKeys | None) -> bytes:
    """The extra keys of a block as they stand in what is hashed; empty for none.

    Raises: ArgumentValueError: they are too long, or what `pickle` writes of them is not certain. It writes a text that
        is met a second time as a reference, and whether two equal texts are one depends on the engine's process.
    """
    if keys is None:
        return b""
    if kind == SGLANG_SHA256:
        raise ArgumentValueError("media", "and LoRA are no part of SGLang's hashes as they are known here")
    if kind == VLLM_SHA256:
        texts = [word for key in keys for word in key[1:] if isinstance(word, str)]
        if len(set(texts)) < len(texts) or not set(texts).isdisjoint(_TAGS):
            raise ArgumentValueError(
                "salt, lora or media",
                "has one text twice in one block: what vLLM's sha256 makes of that is not certain; with "
                "--prefix-caching-hash-algo sha256_cbor it is",
            )
    encoded = _pickled(keys) if kind == VLLM_SHA256 else _cbor(keys)
    if len(encoded) > MOST_KEY_BYTES:
        raise ArgumentValueError(
            "salt, lora or media", f"makes {len(encoded)} bytes in one block; at most {MOST_KEY_BYTES} are taken"
        )
    return encoded


def engine_digests(
    kind: str, tokens: Sequence[int] | np.ndarray, hash_tokens: int, begin: bytes, keys: Sequence[bytes] = ()
) -> bytes:
    """The digests of a prompt's full blocks.

    Args:
        kind: one of CHAINS.
        tokens: T token ids in prompt order, each in [0, 2**32).
        hash_tokens: tokens of a digest, 1 to MOST_HASH_TOKENS.
        begin: what the first block has in the place of a digest before it: 32 bytes, or of SGLang none.
        keys: for each full block its `encoded_keys`, MOST_KEY_BYTES at most; empty for none at all. None of SGLang.
    Returns: T // hash_tokens digests, packed, 32 bytes each, in prompt order.
    Raises: LayoutError: an argument is none of these.
    """
    column = token_column(tokens)
    _check(kind, hash_tokens, begin)
    count = len(column) // hash_tokens
    if keys and (len(keys) != count or kind == SGLANG_SHA256):
        raise LayoutError(f"{len(keys)} extra keys for {count} blocks of {kind}; give one a block, or none")
    if any(len(key) > MOST_KEY_BYTES for key in keys):
        raise LayoutError(f"the extra keys of a block have more than {MOST_KEY_BYTES} bytes")
    digest, digests = begin, bytearray()
    for at in range(count):
        block, key = column[at * hash_tokens : (at + 1) * hash_tokens], keys[at] if keys else b""
        digest = hashlib.sha256(_MESSAGES[kind](digest, block, key)).digest()
        digests += digest
    return bytes(digests)


def digest_hashes(root: bytes, digests: bytes, scale: int = 1, in_hex: bool = False) -> bytes:
    """Our hashes of blocks whose engine has these digests, as `hashing.derived_hashes` makes them.

    Args:
        root: of the namespace, 16 bytes.
        digests: packed, 32 bytes each.
        scale: digests of one block; the last of them is the block's.
        in_hex: derive them from the digests' hexadecimal texts.
    Returns: 16 bytes for each whole block, packed.
    Raises: LayoutError: the root has not 16 bytes, or the digests are no whole ones.
    """
    if len(digests) % DIGEST_BYTES or scale < 1:
        raise LayoutError(f"{len(digests)} bytes, {scale} digests a block; a digest has {DIGEST_BYTES} bytes")
    ends = range(scale * DIGEST_BYTES, len(digests) + 1, scale * DIGEST_BYTES)
    whole = [digests[end - DIGEST_BYTES : end] for end in ends]
    return derived_hashes(root, [one.hex().encode() for one in whole] if in_hex else whole)


def sglang_begin(salt: str) -> bytes:
    """What an SGLang chain begins with, for a request with this `cache_salt`; b"" for none."""
    if not salt:
        return b""
    text = salt.encode()
    return hashlib.sha256(b"sglang-cache-namespace-v1\0\1" + struct.pack("<Q", len(text)) + text).digest()


def _check(kind: str, hash_tokens: int, begin: bytes) -> None:
    if kind not in CHAINS:
        raise LayoutError(f"{kind!r} is no chain; give one of {', '.join(CHAINS)}")
    if not 1 <= hash_tokens <= MOST_HASH_TOKENS:
        raise LayoutError(f"hash_tokens is {hash_tokens}; give 1 to {MOST_HASH_TOKENS}")
    if len(begin) != DIGEST_BYTES and (begin or kind != SGLANG_SHA256):
        raise LayoutError(f"a chain of {kind} begins with {DIGEST_BYTES} bytes, not {len(begin)}")


# -- pickle, protocol 5 -----------------------------------------------------------------------------------------------

_MEMOIZE = b"\x94"
_INT32 = struct.Struct("<i")


def _pickle_message(before: bytes, block: np.ndarray, keys: bytes) -> bytes:
    tokens = _tuple_of([_pickled_int(token) for token in block.tolist()])
    body = b"C\x20" + before + _MEMOIZE + tokens + (keys or b"N") + b"\x87" + _MEMOIZE + b"."
    return b"\x80\x05\x95" + struct.pack("<Q", len(body)) + body


def _pickled_int(value: int) -> bytes:
    if 0 <= value <= 0xFF:
        return b"K" + bytes([value])
    if 0 <= value <= 0xFFFF:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _INT32.pack(value)
    return b"\x8a\x05" + struct.pack("<Q", value)[:5]  # a token of 32 bits: a byte more, or it would be below 0


def _pickled(keys: ExtraKeys) -> bytes:
    """Behind the digest and the tokens, which are the memo's first two."""
    memo: dict[str, int] = {}
    count = 2

    def word(value: str | int) -> bytes:
        nonlocal count
        if isinstance(value, int):
            return _pickled_int(value)
        if value in memo:  # one of the engine's own words
            at = memo[value]
            return b"h" + bytes([at]) if at <= 0xFF else b"j" + struct.pack("<I", at)
        memo[value] = count
        count += 1
        text = value.encode()
        head = b"\x8c" + bytes([len(text)]) if len(text) <= 0xFF else b"X" + struct.pack("<I", len(text))
        return head + text + _MEMOIZE

    written = []
    for key in keys:
        written.append(_tuple_of([word(one) for one in key]))
        count += 1
    return _tuple_of(written)


def _tuple_of(items: Sequence[bytes]) -> bytes:
    if len(items) <= 3:
        return b"".join(items) + bytes([0x84 + len(items)]) + _MEMOIZE
    return b"(" + b"".join(items) + b"t" + _MEMOIZE


# -- canonical CBOR ---------------------------------------------------------------------------------------------------


def _cbor_message(before: bytes, block: np.ndarray, keys: bytes) -> bytes:
    tokens = b"".join(_cbor_head(0, token) for token in block.tolist())
    return b"\x83\x58\x20" + before + _cbor_head(4, len(block)) + tokens + (keys or b"\xf6")


def _cbor_head(major: int, value: int) -> bytes:
    head = major << 5
    if value < 24:
        return bytes([head | value])
    for more, fmt in ((24, "B"), (25, ">H"), (26, ">I")):
        if value < 1 << 8 * struct.calcsize(fmt):
            return bytes([head | more]) + struct.pack(fmt, value)
    return bytes([head | 27]) + struct.pack(">Q", value)


def _cbor(value: ExtraKeys | tuple[str | int, ...] | str | int) -> bytes:
    if isinstance(value, tuple):
        return _cbor_head(4, len(value)) + b"".join(_cbor(one) for one in value)
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)


def _sglang_message(before: bytes, block: np.ndarray, keys: bytes) -> bytes:
    return before + block.tobytes() + keys


_MESSAGES = {VLLM_SHA256: _pickle_message, VLLM_CBOR: _cbor_message, SGLANG_SHA256: _sglang_message}
