"""What a configuration wants of the machine, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from kvbm.assembly import journal_folder, nvme_paths
from kvbm.config import Settings
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.generations import TAIL_BYTES


class _Sized(Protocol):
    @property
    def slots(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...


class WantedBytes(NamedTuple):
    """Bytes a pool wants.

    Attributes:
        bytes: 0 for no pool; None where slots are set and nobody has said how large a block is.
    """

    bytes: int | None

    def __bool__(self) -> bool:
        return self.bytes != 0


class MachinePlan(NamedTuple):
    """What is configured, as far as a machine has to provide it.

    Attributes:
        settings: all of it.
        hbm, host, nvme: bytes of the pools; NVME's of all its files, with headers.
        nvme_paths: its files, striped.
        journal: its folder; None when it is kept in memory.
        slots: of all pools, as far as they are known.
    """

    settings: Settings
    hbm: WantedBytes
    host: WantedBytes
    nvme: WantedBytes
    nvme_paths: tuple[str, ...]
    journal: Path | None
    slots: int = 0


def plan_of(settings: Settings, block_bytes: int = 0) -> MachinePlan:
    """What settings want.

    Args:
        block_bytes: of one block; 0 where it is not known.
    """
    pools = settings.pools
    nvme = _wanted(pools.nvme, block_bytes)
    paths: tuple[str, ...] = ()
    if nvme:
        paths = tuple(map(str, nvme_paths(settings)))
    return MachinePlan(
        settings,
        _wanted(pools.hbm, block_bytes),
        _wanted(pools.host, block_bytes),
        _file_bytes(pools.nvme, block_bytes, len(paths)),
        paths,
        None if settings.journal.in_memory else journal_folder(settings),
        sum(_slots(pool, block_bytes) for pool in (pools.hbm, pools.host, pools.nvme)),
    )


def _slots(pool: _Sized, block_bytes: int) -> int:
    return pool.slots or (pool.capacity_bytes // block_bytes if block_bytes else 0)


def _wanted(pool: _Sized, block_bytes: int) -> WantedBytes:
    if pool.capacity_bytes:
        return WantedBytes(pool.capacity_bytes)
    return WantedBytes(pool.slots * block_bytes if block_bytes or not pool.slots else None)


def _file_bytes(pool: _Sized, block_bytes: int, files: int) -> WantedBytes:
    """With the header of each file and slot where the block is known; without it, what is known to be too little."""
    plain = _wanted(pool, block_bytes)
    if not plain or not block_bytes:
        return plain
    return WantedBytes(_slots(pool, block_bytes) * stride_of(block_bytes) + files * (PAGE_BYTES + TAIL_BYTES))
