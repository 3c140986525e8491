"""The bytes that blocks must have, made and compared at the speed of memory: a block is a stretch of seeded noise that
its hash names.

Two blocks begin at different bytes of a 512, or in different noise. So no sector of 512 bytes of any block equals one
of another block or of another place, wherever sectors, pages and blocks were confused, moved, or left from earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from kvbm.core.ids import HASH_BYTES

SECTOR_BYTES = 512
_SEED = 20_240_229


class Noise:
    """Of all blocks of one size. The first 8 bytes of a hash are its block's number. Any thread."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        """Noise for blocks that have numbers below `blocks`."""
        self._block_bytes = block_bytes
        rows = -(-blocks // SECTOR_BYTES)
        self._rows = np.random.default_rng(_SEED).integers(0, 256, (rows, block_bytes + SECTOR_BYTES), dtype=np.uint8)
        self._rows.flags.writeable = False

    @staticmethod
    @cache
    def of(block_bytes: int, blocks: int) -> Noise:
        """The one of this size; made once in a process, and before it forks where its children are to have it for
        nothing.
        """
        return Noise(block_bytes, blocks)

    def block(self, number: int) -> np.ndarray:
        """The bytes of a block, a view."""
        row, first = divmod(number, SECTOR_BYTES)
        return self._rows[row, first : first + self._block_bytes]

    def fill(self, hashes: bytes, memory: np.ndarray, slots: Sequence[int]) -> None:
        """Write blocks into slots of a memory, as an engine would that computes them."""
        for number, slot in zip(_numbers(hashes), slots, strict=True):
            memory[slot] = self.block(number)

    def check(self, hashes: bytes, memory: np.ndarray, slots: Sequence[int], where: str) -> None:
        """Hold every byte of slots to their blocks.

        Raises AssertionError: how many are wrong, in which block, from where on.
        """
        for number, slot in zip(_numbers(hashes), slots, strict=True):
            wanted, found = self.block(number), memory[slot]
            if not np.array_equal(found, wanted):
                wrong = np.flatnonzero(found != wanted)
                raise AssertionError(
                    f"wrong bytes in {where}: {len(wrong)} of block {number} in slot {slot}, from {wrong[0]} to "
                    f"{wrong[-1]}"
                )


def _numbers(hashes: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(hashes, dtype=np.uint64)[:: HASH_BYTES // 8]]
