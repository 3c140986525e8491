"""The HOST part of `kvbm bench pools`: runs copied into and out of a HOST pool beside a parallel memcpy of the same bytes, in turn.

The limit is libc's memcpy between the same two pieces of memory by as many threads as the pool copies with, each its own share, in
the way that is the faster one in the median: block by block in the order of the runs, or the whole share at once.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from kvbm.assembly import NATIVE_ARENA, RowCopier
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
        self._copiers = ThreadPoolExecutor(self.threads)

    def close(self) -> None:
        """Give back memory and threads."""
        self._copiers.shutdown()
        self._pool.close()

    def measure(self, pairs: int, step: Callable[[], object]) -> Copies:
        """Sides in turn, each pair begun by another; the first round warms up."""
        slots, rows = self._slots(), self._rows
        sides: list[Callable[[], float]] = [
            self._write,
            lambda: self._memcpy_shares(slots, rows),
            lambda: self._memcpy_blocks(slots, rows),
            self._read,
            lambda: self._memcpy_shares(rows, slots),
            lambda: self._memcpy_blocks(rows, slots),
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
        limit_in, way_in = _faster(into[0], into[1])
        limit_out, way_out = _faster(out_shares, out_blocks)
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

    def _memcpy_shares(self, target: np.ndarray, source: np.ndarray) -> float:
        to, of, size = target.ctypes.data, source.ctypes.data, source.nbytes

        def copy(thread: int) -> None:
            begin, end = size * thread // self.threads, size * (thread + 1) // self.threads
            ctypes.memmove(to + begin, of + begin, end - begin)

        return self._limit(copy)

    def _memcpy_blocks(self, target: np.ndarray, source: np.ndarray) -> float:
        to, of, size = target.ctypes.data, source.ctypes.data, self.block_bytes
        places = [block * size for run in self._runs for block in run]

        def copy(thread: int) -> None:
            for place in places[thread :: self.threads]:
                ctypes.memmove(to + place, of + place, size)

        return self._limit(copy)

    def _limit(self, copy: Callable[[int], None]) -> float:
        began = time.perf_counter()
        list(self._copiers.map(copy, range(self.threads)))
        return self.count * self.block_bytes / (time.perf_counter() - began)


def _faster(shares: list[float], blocks: list[float]) -> tuple[list[float], str]:
    by_shares = statistics.median(shares) > statistics.median(blocks)
    return (shares, "whole shares") if by_shares else (blocks, "block by block")
