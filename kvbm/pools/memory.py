"""Pools in this process's memory: what tests and the simulator run on, and what the other pools are held to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import PoolError, PoolFullError
from kvbm.core.ids import HASH_BYTES, NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.run import all_failed, check_proof, check_rows, check_sealed, check_size, check_slots, judged

_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


class MemoryPool:
    """A slot pool of any tier that keeps every proof and verifies every read, also where the real tier does not.

    HBM is the exception, as in the real pool: the engine writes `rows` itself, so a read computes checksums and trusts
    the slot. Memory is taken page by page when slots are first written: a pool of millions of slots costs nothing until
    then.

    Attributes:
        rows: the slots, (slots, block_bytes) uint8, of any tier.
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

    @property
    def memory(self) -> np.ndarray | None:
        """The slots of a tier that is memory; None for the others, and once closed."""
        return self.rows if self.tier in (Tier.HBM, Tier.HOST) and not self._closed else None

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Put rows into slots and keep their proof. Raises PoolError: the pool is closed."""
        count = check_proof(self._name, rows, proof, self.block_bytes, at)
        indexes = check_slots(self._name, slots, count, self.slots)
        self._require_open(f"{count} blocks were not written")
        self.rows[indexes] = rows if at is None else rows[np.asarray(at, dtype=np.intp)]
        self._keep(indexes, proof)

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows and hold them to their proof."""
        count = check_rows(self._name, rows, hashes, self.block_bytes, at)
        indexes = check_slots(self._name, slots, count, self.slots)
        if self._closed:
            return all_failed(count)
        found = self.rows[indexes]  # a copy, so that what is verified is what the caller gets
        rows[slice(None) if at is None else np.asarray(at, dtype=np.intp)] = found
        sums = self._checksum_rows(found)
        if self.tier is Tier.HBM:
            return ReadResult([ReadOutcome.GOOD] * count, sums)
        good = (self._owners[indexes] == _owners(namespace, hashes)).all(axis=1) & (self._checksums[indexes] == sums)
        return judged(good, sums)

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """CRC-32C of what slots hold, u32: computed in HBM, elsewhere as it was written.

        Raises PoolError: the pool is closed.
        """
        indexes = check_slots(self._name, slots, len(slots), self.slots)
        self._require_open(f"the checksums of {len(indexes)} blocks are gone")
        return self._checksum_rows(self.rows[indexes]) if self.tier is Tier.HBM else self._checksums[indexes]

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Keep the proofs of blocks that lie in slots already. Raises PoolError: the pool is closed."""
        count = check_sealed(self._name, proof)
        indexes = check_slots(self._name, slots, count, self.slots)
        self._require_open(f"{count} blocks were not sealed")
        self._keep(indexes, proof)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._closed = True
        self.rows = np.empty((0, self.block_bytes), dtype=np.uint8)

    def _keep(self, indexes: np.ndarray, proof: Proof) -> None:
        self._owners[indexes] = _owners(proof.namespace, proof.hashes)
        self._checksums[indexes] = proof.checksums

    def _require_open(self, else_what: str) -> None:
        if self._closed:
            raise PoolError(f"{self._name} pool: it is closed; {else_what}")


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
