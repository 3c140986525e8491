"""Reads blocks of an owner over and over, until it is killed: borrower.py memory|tcp ADDRESS."""

from __future__ import annotations

import sys

import numpy as np

from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerReader
from kvbm.transport.memory import MemoryReader
from kvbm.transport.tcp import TcpReader
from tests.lenders import KEY, NAMESPACE, OWNER, READER, blocks_of, hashes_of, new_client, root_of

BLOCK = 20_000


def main(transport: str, address: str) -> None:
    reader: PeerReader
    if transport == "memory":
        reader = MemoryReader(new_client, address, READER, OWNER, root_of, 2)
    else:
        reader = TcpReader(new_client, address, READER, OWNER, root_of, KEY, 2)
    hashes, blocks = hashes_of(40), blocks_of(40, BLOCK)
    rows = np.zeros_like(blocks)
    is_told = False
    while True:
        found = reader.read(NAMESPACE, hashes, rows, None, 120.0)
        assert found.result.outcomes == [ReadOutcome.GOOD] * 40, found
        assert np.array_equal(rows, blocks)
        if not is_told:
            print("reads", flush=True)
            is_told = True


if __name__ == "__main__":
    main(*sys.argv[1:])
