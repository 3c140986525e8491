"""Reads of blocks from other instances as metrics: a histogram of their rates."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_S = (1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10)  # upper bounds of the histogram's buckets


@dataclass(slots=True)
class Transferred:
    """Reads by one transport, over one distance.

    Attributes:
        by_rate: how many had up to the rate of each of `BYTES_PER_S`, and not up to the one before; the last ones had
            more.
        rates: their sum. size: bytes that came. failed: reads that brought nothing.
    """

    by_rate: list[int]
    rates: float = 0.0
    size: int = 0
    failed: int = 0
