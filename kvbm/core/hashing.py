"""Token ids → sequence hashes. The native implementation is what production runs; this is what it must equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvbm.core.checks import as_int, kind_of
from kvbm.core.errors import HASHABLE_SCHEME, ArgumentTypeError, HashSchemeError, LayoutError
from kvbm.core.ids import HASH_BYTES, Namespace


def sequence_hashes(
    tokens: Sequence[int] | np.ndarray, block_tokens: int, root: bytes, extra_keys: Sequence[bytes] = ()
) -> bytes:
    """Chain-hash the full blocks of a token sequence.

    Equal hashes mean equal prefixes, because a hash covers everything before it. A partial last block has no hash.

    Args:
        tokens: T token ids in prompt order, each in [0, 2**32).
        block_tokens: B, tokens per block, at least 1.
        root: hash the chain starts from, 16 bytes: the namespace's root, or the last hash of the blocks before.
        extra_keys: for each full block what else its KV depends on (an image's digest, say); empty for none at all.
    Returns: T // B hashes, packed, 16 bytes each, in prompt order.
    Raises: LayoutError: B is below 1, the root is not 16 bytes, a token does not fit, or extra keys are miscounted.
    Source: docs/hash.md; checked against kvbm/hash_vectors.json.
    """
    columns = token_column(tokens)
    _check(block_tokens, [root])
    count = len(columns) // block_tokens
    if extra_keys and len(extra_keys) != count:
        raise LayoutError(f"{len(extra_keys)} extra keys for {count} full blocks; give one a block, or none")
    packed = columns.tobytes()
    width = 4 * block_tokens
    parent = bytes(root)
    hashes = bytearray()
    for index in range(count):
        block = packed[index * width : (index + 1) * width]
        extra = extra_keys[index] if extra_keys else b""
        parent = hashlib.sha256(parent + block + extra).digest()[:HASH_BYTES]
        hashes += parent
    return bytes(hashes)


def sequence_hashes_batch(
    prompts: Sequence[Sequence[int] | np.ndarray], block_tokens: int, roots: bytes | Sequence[bytes]
) -> list[bytes]:
    """What `sequence_hashes` gives for each prompt.

    A block waits for the one before it, so prompts are hashed side by side.

    Args:
        prompts: token ids of each prompt, as `sequence_hashes` takes them.
        block_tokens: B, tokens per block, at least 1.
        roots: the hash all chains start from, or one for each prompt.
    Returns: packed hashes of each prompt, in the order given.
    Raises: LayoutError: as `sequence_hashes`, or the roots are miscounted.
    """
    columns = [token_column(tokens) for tokens in prompts]
    given = [roots] if isinstance(roots, bytes) else roots
    _check(block_tokens, given)
    starts = [roots] * len(columns) if isinstance(roots, bytes) else given
    if len(starts) != len(columns):
        raise LayoutError(f"{len(starts)} roots for {len(columns)} prompts; give one a prompt, or one for all")
    return [sequence_hashes(tokens, block_tokens, root) for tokens, root in zip(columns, starts, strict=True)]


def check_hashable(namespace: Namespace) -> None:
    """Whether `sequence_hashes` gives the hashes of this namespace.

    Raises HashSchemeError: an engine's own scheme does.
    """
    if namespace.scheme != HASHABLE_SCHEME:
        raise HashSchemeError(namespace.scheme)


def _check(block_tokens: int, roots: Sequence[bytes]) -> None:
    if block_tokens < 1:
        raise LayoutError(f"block_tokens is {block_tokens}; a block holds at least 1 token")
    _check_roots(roots)


def _check_roots(roots: Sequence[bytes]) -> None:
    for root in roots:
        if len(root) != HASH_BYTES:
            raise LayoutError(f"the root has {len(root)} bytes, not {HASH_BYTES}")


def token_column(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens as a contiguous little-endian u32 array.

    Raises: ArgumentTypeError: one is no whole number. LayoutError: one is below 0 or above 2**32 - 1, or they are no
        one sequence.
    """
    try:
        column = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # ragged, say, or a tensor of a GPU
        raise ArgumentTypeError("tokens", f"is {kind_of(tokens)} that is no sequence of ints; give token ids") from None
    if column.ndim == 0:
        raise ArgumentTypeError("tokens", f"is {kind_of(tokens)}; give a sequence of token ids")
    if column.ndim != 1:
        raise LayoutError(f"tokens have {column.ndim} dimensions; give one sequence")
    if len(column) and column.dtype.kind not in "iu":
        column = _integers(tokens, column)
    if column.dtype != np.uint32 and len(column) and (int(column.min()) < 0 or int(column.max()) > 0xFFFFFFFF):
        raise LayoutError(f"token ids span {column.min()}..{column.max()}; each must fit in 32 unsigned bits")
    return np.ascontiguousarray(column, dtype="<u4")


def _integers(tokens: Sequence[int] | np.ndarray, column: np.ndarray) -> np.ndarray:
    """Tokens that NumPy does not take for integers.

    Raises ArgumentTypeError: one is none. LayoutError: one is far too large.
    """
    if not isinstance(tokens, np.ndarray):
        for at, token in enumerate(tokens):
            as_int(token, f"tokens[{at}]")
        raise LayoutError("a token id does not fit in 64 bits; each must fit in 32 unsigned bits")
    raise ArgumentTypeError("tokens", f"is an array of {column.dtype}; give whole numbers")


def derived_hashes(root: bytes, digests: Sequence[bytes]) -> bytes:
    """Another engine's own block digests as sequence hashes.

    Unlike `sequence_hashes` nothing is chained: a digest covers all before its block already, and the root keeps
    namespaces apart.

    Args:
        root: of the namespace, 16 bytes.
        digests: bytes of any length, one for each block.
    Returns: for each digest the first 16 bytes of SHA-256(root, digest), packed.
    Raises: LayoutError: the root is not 16 bytes, or a digest is not bytes.
    """
    if not isinstance(root, bytes):
        raise LayoutError(f"the root is {type(root).__name__}, not bytes")
    _check_roots([root])
    for index, digest in enumerate(digests):
        if not isinstance(digest, bytes):
            raise LayoutError(f"digest {index} is {type(digest).__name__}, not bytes")
    return b"".join(hashlib.sha256(root + digest).digest()[:HASH_BYTES] for digest in digests)
