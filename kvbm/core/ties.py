"""Who of equals serves a prompt: decided by content, so that the same prompt goes to the same instance and different
ones spread.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from kvbm.core.ids import HASH_BYTES

MOST_WORD = (1 << 64) - 1
MIX_FACTOR = 0xD6E8FEB86659FD93


def mixed_word(word: int) -> int:
    """A number of 64 bits of which every bit depends on all of the given one's lowest 64."""
    word &= MOST_WORD
    word ^= word >> 32
    word = word * MIX_FACTOR & MOST_WORD
    return word ^ word >> 32


def tie_word(instance: str, hashes: bytes, depth: int) -> int:
    """The smaller serves.

    Args:
        hashes: packed, of the prompt's full blocks. depth: how many of them the instance need not compute.
    """
    first = depth * HASH_BYTES if depth * HASH_BYTES < len(hashes) else 0
    block = hashes[first : first + HASH_BYTES].ljust(HASH_BYTES, b"\0")
    low, high = int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")
    return mixed_word(low + mixed_word(high + _word_of(instance)))


@lru_cache(4096)
def _word_of(instance: str) -> int:
    return int.from_bytes(hashlib.sha256(instance.encode()).digest()[:8], "little")
