"""Native functions that are there to be measured, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm import _native
from kvbm.pools.nvme.block_io import BlockEngine

random_lines_ns = _native.random_lines_ns  # what memory itself can do


def open_unverified(
    fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
) -> BlockEngine:
    """As `assembly.OPEN_BLOCK_IO`, but nothing that it reads is checked: to measure what checks cost."""
    return _native.BlockIo(fds, slots, block_bytes, io, direct, depth, offload_share, verified=False)
