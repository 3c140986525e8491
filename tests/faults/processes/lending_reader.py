"""Reads blocks of an owner over and over, until it is killed: lending_reader.py memory|tcp ADDRESS.

Says "reads" after the first read. It ends with 1 where a block that counts as good has other bytes than those of its
hash.
"""

from __future__ import annotations

import sys

import numpy as np

from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerReader
from kvbm.transport.memory import MemoryReader
from kvbm.transport.tcp import TcpReader
from tests.faults.processes.lending_owner import BLOCK, BLOCKS
from tests.lenders import KEY, NAMESPACE, OWNER, READER, blocks_of, hashes_of, new_client, root_of


def reader_of(transport: str, address: str) -> PeerReader:
    """A native reader of the owner there."""
    if transport == "memory":
        return MemoryReader(new_client, address, READER, OWNER, root_of)
    return TcpReader(new_client, address, READER, OWNER, root_of, KEY)


def main(transport: str, address: str) -> int:
    reader = reader_of(transport, address)
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
