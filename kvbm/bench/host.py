"""The HOST part of `kvbm bench pools`: runs copied into and out of a HOST pool beside a parallel memcpy of the same
bytes, in turn.

The limit is libc's memcpy between the same two pieces of memory by as many threads as the pool copies with, each its
own share, in the way that is the faster one in the median: block by block in the order of the runs, or the whole share
at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvbm.assembly import NATIVE_ARENA, RowCopier
from kvbm.bench.memcpy import Memcpy, faster
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof
from kvbm.pools.host.pool import HostPool

RUN_BLOCKS = 32
_NAMESPACE = NamespaceId(bytes(16))


class Copies(NamedTuple):
    """Bytes a second, pair by pair.

    Attributes:
        sealed: writes whose checksums are computed on the way, as when blocks leave HBM.
        memcpy_in, memcpy_out: the limit of writes, and that of reads.
        ways: of memcpy that these are, in words.
    """

    writes: list[float]
    reads: list[float]
    sealed: list[float]
    memcpy_in: list[float]
    memcpy_out: list[float]
    ways: str


class Memory:
    """A HOST pool, rows of as many bytes outside of it, and threads that copy between the two. `close` ends it.

    Attributes:
        threads: that copy, the pool's and those of the limit.
    """

    def __init__(self, total_bytes: int, block_bytes: int) -> None:
        self.count = max(1, total_bytes // block_bytes)
        self.block_bytes = block_bytes
        rng = np.random.default_rng(2)
        self._rows = rng.integers(0, 256, (self.count, block_bytes), dtype=np.uint8)
        order = rng.permutation(self.count)
        self._runs = [order[at : at + RUN_BLOCKS].tolist() for at in range(0, self.count, RUN_BLOCKS)]
        self._proofs = [
            Proof(_NAMESPACE, Epoch(1), rng.bytes(len(run) * HASH_BYTES), np.zeros(len(run), dtype=np.uint32))
            for run in self._runs
        ]
        self._copies = RowCopier()
        self._pool = HostPool(self.count, block_bytes, NATIVE_ARENA, self._copies)
        self.threads = self._copies.threads
        self._into = Memcpy(self._slots(), self._rows, block_bytes, self.threads, order.tolist())
        self._out = Memcpy(self._rows, self._slots(), block_bytes, self.threads, order.tolist())

    def close(self) -> None:
        """Give back memory and threads."""
        self._into.close()
        self._out.close()
        self._pool.close()

    def measure(self, pairs: int, step: Callable[[], object]) -> Copies:
        """Sides in turn, each pair begun by another; the first round warms up."""
        sides: list[Callable[[], float]] = [
            self._write,
            lambda: self._limit(self._into.shares),
            lambda: self._limit(self._into.blocks),
            self._read,
            lambda: self._limit(self._out.shares),
            lambda: self._limit(self._out.blocks),
            self._write_sealed,
        ]
        rates: list[list[float]] = [[] for _ in sides]
        for pair in range(-1, pairs):
            for at in range(len(sides)):
                side = (at + pair) % len(sides)
                rate = sides[side]()
                if pair >= 0:
                    rates[side].append(rate)
            step()
        writes, *into, reads, out_shares, out_blocks, sealed = rates
        limit_in, way_in = faster(into[0], into[1])
        limit_out, way_out = faster(out_shares, out_blocks)
        return Copies(writes, reads, sealed, limit_in, limit_out, f"into the pool {way_in}, out of it {way_out}")

    def _slots(self) -> np.ndarray:
        memory = self._pool.memory
        assert memory is not None
        return memory

    def _write(self) -> float:
        return self._rate(lambda run, proof: self._pool.write(run, self._rows, proof, run))

    def _read(self) -> float:
        return self._rate(lambda run, proof: self._pool.read(run, _NAMESPACE, proof.hashes, self._rows, run))

    def _write_sealed(self) -> float:
        def write(run: list[int], proof: Proof) -> None:
            places = np.asarray(run, dtype=np.int64)
            self._copies.copy_rows(self._slots(), places, self._rows, places, proof.checksums)
            self._pool.seal(run, proof)

        return self._rate(write)

    def _rate(self, work: Callable[[list[int], Proof], object]) -> float:
        began = time.perf_counter()
        for run, proof in zip(self._runs, self._proofs, strict=True):
            work(run, proof)
        return self.count * self.block_bytes / (time.perf_counter() - began)

    def _limit(self, copy: Callable[[], None]) -> float:
        began = time.perf_counter()
        copy()
        return self.count * self.block_bytes / (time.perf_counter() - began)
