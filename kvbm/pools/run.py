"""What a pool's calls are given: one run of blocks, checked before a byte moves. A failure is a bug in the caller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, hash_count
from kvbm.pools.base import Proof, ReadOutcome, ReadResult


def check_size(pool: str, slots: int, block_bytes: int) -> None:
    """Refuse a pool without room. Raises LayoutError: not even one slot, or a slot without a byte."""
    if slots < 1 or block_bytes < 1:
        raise LayoutError(f"{pool} pool: {slots} slots of {block_bytes} bytes; both must be at least 1")


def check_rows(pool: str, rows: np.ndarray, hashes: bytes, block_bytes: int, at: Sequence[int] | None = None) -> int:
    """The number n of blocks in a call.

    Raises LayoutError: rows are not C-contiguous uint8 rows of `block_bytes`, one for each of n hashes, or `at` does
    not name one for each.
    """
    count = hash_count(hashes)
    wanted = len(rows) if at is not None and rows.ndim == 2 else count
    if rows.dtype != np.uint8 or rows.shape != (wanted, block_bytes) or not rows.flags.c_contiguous:
        raise LayoutError(
            f"{pool} pool: rows must be C-contiguous uint8 of shape ({wanted}, {block_bytes}) for {count} hashes;"
            f" got {rows.dtype} {rows.shape}"
        )
    if at is not None:
        check_slots(f"{pool} pool, rows of another", at, count, len(rows))
    return count


def check_proof(pool: str, rows: np.ndarray, proof: Proof, block_bytes: int, at: Sequence[int] | None = None) -> int:
    """The number n of blocks in a write. Raises LayoutError: rows, hashes and checksums disagree."""
    check_rows(pool, rows, proof.hashes, block_bytes, at)
    return check_sealed(pool, proof)


def check_sealed(pool: str, proof: Proof) -> int:
    """The number n of blocks in a proof that comes without rows. Raises LayoutError: hashes and checksums disagree."""
    count = hash_count(proof.hashes)
    if len(proof.checksums) != count:
        raise LayoutError(f"{pool} pool: {count} hashes come with {len(proof.checksums)} checksums")
    return count


def check_objects(pool: str, count: int, blocks: int) -> int:
    """The number of objects that n blocks are. Raises LayoutError: the last one would not be whole."""
    objects, rest = divmod(count, blocks)
    if rest:
        raise LayoutError(f"{pool} pool: {count} blocks are no whole objects of {blocks}")
    return objects


def check_chain(
    pool: str, rows: np.ndarray, chain: bytes, block_bytes: int, blocks: int, at: Sequence[int] | None, first: int
) -> int:
    """The number n of blocks that are wanted of a chain of whole objects, from `first` on.

    Raises LayoutError: rows are not C-contiguous uint8 rows of `block_bytes`, `at` names others, or the chain is too
    short or no multiple of `blocks`.
    """
    count = len(rows) if at is None else len(at)
    there = hash_count(chain)
    check_objects(pool, there, blocks)
    if first < 0 or first + count > there:
        raise LayoutError(f"{pool} pool: blocks {first} to {first + count - 1} are wanted of a chain of {there}")
    return check_rows(pool, rows, chain[first * HASH_BYTES : (first + count) * HASH_BYTES], block_bytes, at)


def check_slots(pool: str, slots: Sequence[int], count: int, slot_count: int) -> np.ndarray:
    """Slots as an array of indexes. Raises LayoutError: not one for each block, or outside the pool."""
    indexes = np.asarray(slots, dtype=np.intp)
    if indexes.shape != (count,):
        raise LayoutError(f"{pool} pool: {count} blocks come with {len(indexes)} slots")
    if count and (int(indexes.min()) < 0 or int(indexes.max()) >= slot_count):
        raise LayoutError(f"{pool} pool: slots {indexes.min()} to {indexes.max()} wanted, it has 0 to {slot_count - 1}")
    return indexes


def all_failed(count: int) -> ReadResult:
    """The answer of a pool that could read nothing."""
    return ReadResult([ReadOutcome.FAILED] * count, np.zeros(count, dtype=np.uint32))


def judged(good: np.ndarray, checksums: np.ndarray) -> ReadResult:
    """GOOD where a row was proved, CORRUPT elsewhere."""
    return ReadResult([ReadOutcome.GOOD if ok else ReadOutcome.CORRUPT for ok in good.tolist()], checksums)
