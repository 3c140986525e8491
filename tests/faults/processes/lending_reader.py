"""Reads blocks of an owner over and over, until it is killed: lending_reader.py WAY ADDRESS FOLDER.

WAY is one of `tests.peer_ways.WAYS`. FOLDER holds the certificate, where the way needs one. Says "reads" after the
first read. It ends with 1 where a block that counts as good has other bytes than those of its hash.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvbm.core.reads import ReadOutcome
from tests.faults.processes.lending_owner import BLOCK, BLOCKS
from tests.lenders import NAMESPACE, blocks_of, hashes_of
from tests.peer_ways import NIXL, new_nixl_process, reader_of


def main(way: str, address: str, folder: str) -> int:
    reader = reader_of(way, address, Path(folder), new_nixl_process() if way == NIXL else None)
    hashes, blocks = hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK)
    rows = np.zeros_like(blocks)
    is_told = False
    while True:
        rows[:] = 0
        outcomes = reader.read(NAMESPACE, hashes, rows, None, 120.0).result.outcomes
        good = [at for at, outcome in enumerate(outcomes) if outcome is ReadOutcome.GOOD]
        if not np.array_equal(rows[good], blocks[good]):
            return 1
        if not is_told and len(good) == BLOCKS:
            print("reads", flush=True)
            is_told = True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
