"""The salvage part of `kvbm bench pools`: a manager is opened over a full NVME file without its journal, and has all of
it back.

What is timed is the whole scan as a start makes it: each slot's header is read, held to its checksum and to the clear
generation, and the block is adopted by the ledger, which tells it in an event. Beside it fio reads as many pages from
the same places of the same file.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm.assembly import NATIVE, journal_folder, open_manager
from kvbm.bench.fio import Fio
from kvbm.config import Settings, load_settings
from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace, Tier
from kvbm.pools.base import Proof
from kvbm.pools.nvme.block_io import stride_of

_NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
_BLOCK_BYTES = 64 << 10  # small ones: many slots, as a pool has them
_RUN_BLOCKS = 32  # written at once
_OVER_S = 120.0
_LOOK_S = 0.002


class ScanRates(NamedTuple):
    """Headers a second, pair by pair; fio's is empty without fio."""

    slots: int
    ours: list[float]
    fio: list[float]


def scan_rates(
    folder: Path, file_bytes: int, depth: int, fio: Fio | None, pairs: int, step: Callable[[], object]
) -> ScanRates:
    """Fill a file, then lose its journal and open it, again and again. Raises FioError, PoolError.

    Args:
        depth: headers under way at a time, ours and fio's.
        step: called after each scan of either side.
    """
    slots = file_bytes // _BLOCK_BYTES
    settings = load_settings(
        flags={
            "instance.data_dir": str(folder),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": _RUN_BLOCKS,
            "pools.host.slots": _RUN_BLOCKS,
            "pools.nvme.path": str(folder / "salvaged.pool"),
            "pools.nvme.slots": slots,
            "pools.nvme.depth": depth,
        }
    )
    _fill(settings, slots)
    found = ScanRates(slots, [], [])
    for pair in range(pairs + 1):  # the first warms up
        sides = [lambda: _scan(settings, slots)]
        if fio is not None:
            sides.append(lambda: fio.pages(folder / "salvaged.pool", stride_of(_BLOCK_BYTES), slots, depth))
        kept = (found.ours, found.fio)
        order = range(len(sides)) if pair % 2 else reversed(range(len(sides)))
        for side in order:
            rate = sides[side]()
            if pair:
                kept[side].append(rate)
                step()
    return found


def _fill(settings: Settings, slots: int) -> None:
    """Every slot has a block that nothing but its header tells of."""
    rng = np.random.default_rng(1)
    rows = np.frombuffer(rng.bytes(_RUN_BLOCKS * _BLOCK_BYTES), dtype=np.uint8).reshape(_RUN_BLOCKS, -1)
    sums = NATIVE.checksums(rows)
    with open_manager(settings, [_NAMESPACE], _BLOCK_BYTES, engine="bench") as manager:
        pool = manager.pools.slots[Tier.NVME]
        for first in range(0, slots, _RUN_BLOCKS):
            count = min(_RUN_BLOCKS, slots - first)
            proof = Proof(_NAMESPACE.id, Epoch(1), rng.bytes(count * HASH_BYTES), sums[:count])
            pool.write(range(first, first + count), rows[:count], proof)


def _scan(settings: Settings, slots: int) -> float:
    """Headers a second, from the scan's begin to its end."""
    shutil.rmtree(journal_folder(settings))
    deadline_s = time.monotonic() + _OVER_S
    with open_manager(settings, [_NAMESPACE], _BLOCK_BYTES, engine="bench") as manager:
        salvage = manager.parts.salvage
        while not salvage.is_over:
            if time.monotonic() > deadline_s:
                raise PoolError(
                    f"NVME pool: its slots were not scanned within {_OVER_S:.0f} s; the device is busy or fails"
                )
            time.sleep(_LOOK_S)
    if salvage.found_blocks != slots:
        raise PoolError(
            f"NVME pool: a scan found {salvage.found_blocks} of {slots} blocks; the device or the pool fails"
        )
    return slots / salvage.elapsed_s
