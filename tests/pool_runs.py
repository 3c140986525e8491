"""Runs of blocks for tests of pools."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbm._native import checksums
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace, NamespaceId
from kvbm.pools.base import Proof

SHAPE = Namespace(model="tiny", revision="r1", block_tokens=16, layout="layers=2 kv=2 tokens=16 heads=2 dim=8")


class Run(NamedTuple):
    """Blocks with their proof."""

    rows: np.ndarray
    proof: Proof

    @property
    def hashes(self) -> bytes:
        """Their packed hashes."""
        return self.proof.hashes

    @property
    def namespace(self) -> NamespaceId:
        """Their namespace."""
        return self.proof.namespace

    def room(self) -> np.ndarray:
        """Rows of the same shape to read into, filled with something else."""
        return np.full_like(self.rows, 0xA5)


def random_run(count: int, block_bytes: int, seed: int = 0, namespace: Namespace = SHAPE) -> Run:
    """Blocks of random bytes under random hashes."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    return Run(rows, Proof(namespace.id, Epoch(1), random.bytes(count * HASH_BYTES), checksums(rows)))


def part(run: Run, indexes: list[int]) -> Run:
    """Some of a run's blocks, in the given order."""
    hashes = b"".join(run.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in indexes)
    proof = run.proof._replace(hashes=hashes, checksums=run.proof.checksums[indexes])
    return Run(np.ascontiguousarray(run.rows[indexes]), proof)
