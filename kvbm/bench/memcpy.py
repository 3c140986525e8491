"""libc's memcpy by threads: the limit that copies within the memory of one machine are held to."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class Memcpy:
    """From one memory to another of the same size, by threads of which each has its share. `close` ends them.

    Args:
        order: blocks in the order in which they are copied one by one; None: as they lie.
    """

    def __init__(
        self, target: np.ndarray, source: np.ndarray, block_bytes: int, threads: int, order: Sequence[int] | None = None
    ) -> None:
        assert target.nbytes == source.nbytes
        self._kept = target, source  # they stay mapped
        self._to, self._of, self._bytes = target.ctypes.data, source.ctypes.data, target.nbytes
        self._block_bytes, self._threads = block_bytes, threads
        self._order = range(self._bytes // block_bytes) if order is None else order
        self._copiers = ThreadPoolExecutor(threads)

    def close(self) -> None:
        """End the threads."""
        self._copiers.shutdown()

    def shares(self, _: object = None) -> None:
        """Each thread copies its share at once."""

        def copy(thread: int) -> None:
            begin, end = (self._bytes * at // self._threads for at in (thread, thread + 1))
            ctypes.memmove(self._to + begin, self._of + begin, end - begin)

        list(self._copiers.map(copy, range(self._threads)))

    def blocks(self, _: object = None) -> None:
        """The threads copy block by block, side by side."""

        def copy(thread: int) -> None:
            for block in self._order[thread :: self._threads]:
                at = block * self._block_bytes
                ctypes.memmove(self._to + at, self._of + at, self._block_bytes)

        list(self._copiers.map(copy, range(self._threads)))


def faster(shares: list[float], blocks: list[float]) -> tuple[list[float], str]:
    """The rates of the way of memcpy that is the faster one in the median, and which it is."""
    by_shares = statistics.median(shares) > statistics.median(blocks)
    return (shares, "whole shares") if by_shares else (blocks, "block by block")
