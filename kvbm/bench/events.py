"""`kvbm bench events`: what an event costs the engine.

Recording one is a few writes into memory; another thread does the rest.

The same lives of blocks run on two ledgers in turn: one records its events, the other has been made to overflow, so
that it decides and folds just the same and records nothing. The difference is the events' cost.
"""

from __future__ import annotations

import numpy as np

from kvbm.bench.ledger import LedgerPool
from kvbm.bench.measure import Found, difference_of, timed, within_noise

_SLOTS = 65_536


def bench_events(samples: int, seed: int) -> Found:
    """The difference a block, in runs of 16 and of 1: each life creates a block and evicts one.

    On a machine that is busy elsewhere the two runs of a pair differ by more than the events cost, and the difference
    may be below 0.
    """
    rows = []
    numbers: dict[str, float | None] = {}
    for run_blocks in (16, 1):
        recording = LedgerPool("lru", _SLOTS, run_blocks, np.random.default_rng(seed))
        silent = LedgerPool("lru", _SLOTS, run_blocks, np.random.default_rng(seed), event_bytes=1 << 20)
        while not silent.ledger.overflowed:
            silent.lives()[0]()
        costs: list[float] = []
        for number in range(8 * samples):
            lives = []
            order = (recording, silent) if number % 2 else (silent, recording)
            for pool in order:
                work, blocks = pool.lives()
                lives.append(timed(work).wall_s / blocks * 1e9)
                pool.drain()
            costs.append(lives[order.index(recording)] - lives[order.index(silent)])
        what = f"cost of the events in a block's life (one created, one evicted), runs of {run_blocks}"
        rows.append(difference_of(what, "ns/block", costs[2:]))
        numbers[f"event_ns_per_block_run{run_blocks}"] = rows[-1].value
    notes = tuple(
        f"{row.what}: no larger than its noise; try a quiet machine or more samples"
        for row in rows
        if within_noise(row)
    )
    return Found(rows, numbers, notes)
