"""Pools in this process's memory: what tests and the simulator run on, and what the other pools are held to."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np

from kvbm.core.errors import PoolError, PoolFullError
from kvbm.core.ids import HASH_BYTES, NamespaceId, Reach, Tier, split_hashes
from kvbm.core.kernels import ChecksumRows
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots, judged

_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


class MemoryPool:
    """A slot pool of any tier that keeps every proof and verifies every read, also where the real tier does not.

    HBM is the exception, as in the real pool: the engine writes `rows` itself, so a read computes checksums and trusts
    the slot. Memory is taken page by page when slots are first written: a pool of millions of slots costs nothing until
    then.

    Attributes:
        rows: the slots, (slots, block_bytes) uint8.
    """

    def __init__(
        self, tier: Tier, slots: int, block_bytes: int, checksums: ChecksumRows, reach: Reach = Reach.INSTANCE
    ) -> None:
        """Make an empty pool. Raises LayoutError: below 1 slot or byte. PoolFullError: too many bytes to address."""
        check_size(f"{tier.name} memory", slots, block_bytes)
        self.tier = tier
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach
        self.rows = _lazy_rows(slots, block_bytes)
        self._name = f"{tier.name} memory"
        self._checksum_rows = checksums
        self._owners = _lazy_rows(slots, 2 * HASH_BYTES)  # namespace id and hash of each slot's block
        self._checksums = _lazy_rows(slots, 4).view(np.uint32)[:, 0]
        self._closed = False

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof) -> None:
        """Put rows into slots and keep their proof. Raises PoolError: the pool is closed."""
        indexes = check_slots(self._name, slots, check_proof(self._name, rows, proof, self.block_bytes), self.slots)
        if self._closed:
            raise PoolError(f"{self._name} pool: it is closed; {len(indexes)} blocks were not written")
        self.rows[indexes] = rows
        self._owners[indexes] = _owners(proof.namespace, proof.hashes)
        self._checksums[indexes] = proof.checksums

    def read(self, slots: Sequence[int], namespace: NamespaceId, hashes: bytes, rows: np.ndarray) -> ReadResult:
        """Fill rows and hold them to their proof."""
        count = check_rows(self._name, rows, hashes, self.block_bytes)
        indexes = check_slots(self._name, slots, count, self.slots)
        if self._closed:
            return all_failed(count)
        np.take(self.rows, indexes, axis=0, out=rows, mode="clip")  # clip needs no second buffer; slots are checked
        sums = self._checksum_rows(rows)
        if self.tier is Tier.HBM:
            return ReadResult([ReadOutcome.GOOD] * count, sums)
        good = (self._owners[indexes] == _owners(namespace, hashes)).all(axis=1) & (self._checksums[indexes] == sums)
        return judged(good, sums)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._closed = True
        self.rows = np.empty((0, self.block_bytes), dtype=np.uint8)


class MemoryObjectPool:
    """An object pool in a dictionary. Managers of one process share it; `close` keeps its blocks for the others."""

    def __init__(self, block_bytes: int, checksums: ChecksumRows, name: str = "memory://objects") -> None:
        """Make an empty pool. Raises LayoutError: `block_bytes` is below 1."""
        check_size(name, 1, block_bytes)
        self.tier = Tier.OBJECT
        self.block_bytes = block_bytes
        self.reach = Reach.CLUSTER
        self.name = name
        self.objects: dict[tuple[NamespaceId, bytes], tuple[bytes, int]] = {}  # (namespace, hash) → (bytes, checksum)
        self._checksum_rows = checksums
        self._lock = threading.Lock()

    def put(self, rows: np.ndarray, proof: Proof) -> list[bool]:
        """Keep each block that is not there yet; one of another size under its name stays and is answered False."""
        count = check_proof(self.name, rows, proof, self.block_bytes)
        held = []
        for index, block_hash in enumerate(split_hashes(proof.hashes)):
            offered = (rows[index].tobytes(), int(proof.checksums[index]))
            with self._lock:
                body, _ = self.objects.setdefault((proof.namespace, block_hash), offered)
            held.append(len(body) == self.block_bytes)
        assert len(held) == count
        return held

    def get(self, namespace: NamespaceId, hashes: bytes, rows: np.ndarray) -> ReadResult:
        """Fill rows with these blocks, each held to its checksum."""
        count = check_rows(self.name, rows, hashes, self.block_bytes)
        outcomes = [ReadOutcome.CORRUPT] * count
        wanted = np.zeros(count, dtype=np.uint32)
        for index, block_hash in enumerate(split_hashes(hashes)):
            with self._lock:
                found = self.objects.get((namespace, block_hash))
            if found is None:
                outcomes[index] = ReadOutcome.MISSING
            elif len(found[0]) == self.block_bytes:
                outcomes[index] = ReadOutcome.GOOD
                rows[index] = np.frombuffer(found[0], dtype=np.uint8)
                wanted[index] = found[1]
        sums = self._checksum_rows(rows)
        for index in np.flatnonzero(sums != wanted).tolist():
            if outcomes[index] is ReadOutcome.GOOD:
                outcomes[index] = ReadOutcome.CORRUPT
        return ReadResult(outcomes, sums)

    def close(self) -> None:
        """Nothing to give back: another manager may hold the same pool."""


def _owners(namespace: NamespaceId, hashes: bytes) -> np.ndarray:
    """Namespace id and hash of each block side by side, (n, 32) uint8."""
    owners = np.empty((len(hashes) // HASH_BYTES, 2 * HASH_BYTES), dtype=np.uint8)
    owners[:, :HASH_BYTES] = np.frombuffer(namespace, dtype=np.uint8)
    owners[:, HASH_BYTES:] = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
    return owners


def _lazy_rows(slots: int, block_bytes: int) -> np.ndarray:
    """Zeroed rows that take no memory before they are written.

    A map of our own, because the allocator asks for huge pages, which a few scattered blocks would fill the machine
    with.
    """
    wanted_bytes = slots * block_bytes
    try:
        memory = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise PoolFullError(
            f"memory pool: {slots} slots of {block_bytes} bytes need {wanted_bytes} bytes of addresses,"
            f" which the system refuses ({error}); use fewer slots",
            wanted_bytes,
            0,
        ) from error
    return np.frombuffer(memory, dtype=np.uint8).reshape(slots, block_bytes)
