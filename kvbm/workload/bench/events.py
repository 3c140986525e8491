"""`kvbm bench events`: what an event costs the engine. Recording one is a few writes into memory; another thread does the rest.

The same lives of blocks run on two ledgers in turn: one records its events, the other has been made to overflow, so that it decides
and folds just the same and records nothing. The difference is the events' cost.
"""

from __future__ import annotations

import statistics

import numpy as np

from kvbm.workload.bench.ledger import LedgerPool
from kvbm.workload.bench.measure import Row, timed

_SLOTS = 65_536


def bench_events(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """The difference a block, in runs of 16 and of 1: each life creates a block and evicts one."""
    rows: list[Row] = []
    numbers: dict[str, float] = {}
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
        low, middle, high = statistics.quantiles(costs[2:], n=4)
        what = f"cost of the events in a block's life (one created, one evicted), runs of {run_blocks}"
        rows.append(Row(what=what, unit="ns/block", value=middle, noise=(high - low) / 2 / abs(middle)))
        numbers[f"event_ns_per_block_run{run_blocks}"] = middle
    return rows, numbers
