"""The metadata part of `kvbm bench pools`: what the manager does for a block beside its bytes, in runs of 32 from
Python.

A run's slots are allocated (evicting, for the pool is full), its blocks created, matched and unpinned. The manager is
one as an engine opens it, its journal in a folder; nothing is published. What the journal's writer takes of the core
meanwhile is in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvbm.assembly import open_manager
from kvbm.bench.measure import Row, Sample, row_of, timed
from kvbm.config import load_settings
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, SequenceHash
from kvbm.manager.owned_hbm import Manager

_NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
_RUN_BLOCKS = 32
_SLOTS = 65_536
_BLOCK_BYTES = 16  # nobody looks at them


def bench_metadata(folder: Path, samples: int, seed: int) -> Row:
    """Blocks a second."""
    flags = {
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": _SLOTS,
    }
    rng = np.random.default_rng(seed)
    taken: list[Sample] = []
    with open_manager(load_settings(flags=flags), [_NAMESPACE], _BLOCK_BYTES, engine="bench") as manager:
        for number in range(2 * samples + 2):
            data = rng.bytes(_SLOTS * HASH_BYTES)
            run_bytes = _RUN_BLOCKS * HASH_BYTES
            runs = [data[at : at + run_bytes] for at in range(0, len(data), run_bytes)]
            sample = timed(lambda runs=runs: _live(manager, runs))  # type: ignore[misc]
            if number > 1:  # the first fills the pool
                taken.append(sample)
    what = f"allocate, create, match, unpin: runs of {_RUN_BLOCKS}, {_SLOTS:,} slots, journal in a file"
    return row_of(what, "M blocks/s", [_SLOTS / sample.wall_s / 1e6 for sample in taken], taken)


def _live(manager: Manager, runs: list[bytes]) -> None:
    space, parent = _NAMESPACE.id, SequenceHash(NO_PARENT)
    for hashes in runs:
        slots = manager.allocate(_RUN_BLOCKS)
        assert slots is not None
        held = manager.create(space, parent, 0, hashes, slots)
        depth = manager.match(hashes).depth
        assert depth == _RUN_BLOCKS
        manager.unpin(held)
