"""The prompts that workers serve, and what the bytes of each block must be: both follow from names alone.

So the loop knows which lookups to ask, and a worker knows at every acquire whether it was given wrong bytes.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvbm.core.ids import HASH_BYTES, Namespace

BLOCK_BYTES = 4032  # no whole page: past the page cache it goes through a bounce buffer
NAMESPACE = Namespace(model="crash-loop", revision="r1", block_tokens=16)
FAMILIES, BRANCHES = 10, 6
STEM_BLOCKS, LEAF_BLOCKS = 12, 8

_PIECES = np.arange(BLOCK_BYTES // HASH_BYTES, dtype=np.uint8).reshape(1, -1, 1)


def prompt_hashes(family: int, branch: int, depth: int = STEM_BLOCKS + LEAF_BLOCKS) -> bytes:
    """Packed hashes of a prompt's first blocks. Prompts of one family share their stem."""
    stem = [_named(f"{family}/{at}") for at in range(min(depth, STEM_BLOCKS))]
    leaf = [_named(f"{family}/{branch}/{at}") for at in range(STEM_BLOCKS, depth)]
    return b"".join(stem + leaf)


def rows_of(hashes: bytes) -> np.ndarray:
    """The bytes these blocks must have, (n, BLOCK_BYTES) uint8; every 16 of them are others, so that half a block
    shows.
    """
    rows: np.ndarray = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 1, HASH_BYTES) + _PIECES
    return rows.reshape(-1, BLOCK_BYTES)


def _named(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:HASH_BYTES]
