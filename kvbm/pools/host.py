"""HOST: slots in this machine's memory, touched when the pool is made and pinned when a GPU is there."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvbm.core.errors import PoolError, PoolFullError
from kvbm.core.ids import NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class HostPool:
    """Anonymous shared memory in slots, and a column of checksums beside them.

    A read verifies nothing: the ledger vouches for what a slot holds. The checksum taken when the block left HBM comes
    back with it, so that colder tiers and other instances prove the bytes the engine computed and not what became of
    them here.

    Attributes:
        rows: the slots, (slots, block_bytes) uint8; workers copy to and from them directly.
        pinned: whether CUDA has registered the memory.
    """

    def __init__(self, slots: int, block_bytes: int, reach: Reach = Reach.INSTANCE) -> None:
        """Take the memory, every page of it.

        Raises: LayoutError: below 1 slot or byte. PoolFullError: the machine, or this container's limit, lacks the
        memory; nothing was taken.
        """
        check_size("HOST", slots, block_bytes)
        self.tier = Tier.HOST
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach
        self._closed = False
        self.rows = _touched_rows(slots, block_bytes)
        self._checksums = np.zeros(slots, dtype=np.uint32)
        self.pinned = _register(self.rows)

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof) -> None:
        """Put rows into slots, their checksums beside them. Raises PoolError: the pool is closed."""
        indexes = check_slots("HOST", slots, check_proof("HOST", rows, proof, self.block_bytes), self.slots)
        if self._closed:
            raise PoolError(f"HOST pool: it is closed; {len(indexes)} blocks were not written")
        self.rows[indexes] = rows
        self._checksums[indexes] = proof.checksums

    def read(self, slots: Sequence[int], namespace: NamespaceId, hashes: bytes, rows: np.ndarray) -> ReadResult:
        """Fill rows from slots, unverified, with the checksums they were written with."""
        count = check_rows("HOST", rows, hashes, self.block_bytes)
        indexes = check_slots("HOST", slots, count, self.slots)
        if self._closed:
            return all_failed(count)
        np.take(self.rows, indexes, axis=0, out=rows, mode="clip")  # clip needs no second buffer; slots are checked
        return ReadResult([ReadOutcome.GOOD] * count, self._checksums[indexes])

    def close(self) -> None:
        """Give the memory back once the last view of it is gone. Idempotent; no call may be under way."""
        if self._closed:
            return
        self._closed = True
        if self.pinned:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self.rows.ctypes.data)  # type: ignore[no-untyped-call]
            self.pinned = False
        self.rows = np.empty((0, self.block_bytes), dtype=np.uint8)


def available_memory_bytes() -> int | None:
    """Memory a new pool may take: the machine's, or what the container's limit leaves if less. None: unknown here."""
    if not _MEMINFO.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    machine_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP / "memory.max"
    if not limit.exists() or (limit_text := limit.read_text().strip()) == "max":
        return machine_bytes
    used_bytes = int((_CGROUP / "memory.current").read_text())
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return min(machine_bytes, int(limit_text) - used_bytes + int(stat["inactive_file"]))


def require_memory(pool: str, wanted_bytes: int, remedy: str) -> None:
    """Refuse what this machine cannot hold, before the kernel kills somebody for it. Raises PoolFullError."""
    free_bytes = available_memory_bytes()
    if free_bytes is not None and wanted_bytes > free_bytes:
        raise PoolFullError(
            f"{pool} pool: {wanted_bytes} bytes wanted, {free_bytes} bytes of memory available; {remedy}",
            wanted_bytes,
            free_bytes,
        )


def _touched_rows(slots: int, block_bytes: int) -> np.ndarray:
    wanted_bytes = slots * block_bytes
    remedy = "lower pools.host.slots or capacity_bytes, or free memory"
    require_memory("HOST", wanted_bytes, remedy)
    try:
        memory = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise PoolFullError(
            f"HOST pool: {wanted_bytes} bytes wanted, the system refuses them ({error}); {remedy}", wanted_bytes, 0
        ) from error
    flat = np.frombuffer(memory, dtype=np.uint8)
    flat[:: mmap.PAGESIZE] = 0  # each page is there before the first request needs it
    return flat.reshape(slots, block_bytes)


def _register(rows: np.ndarray) -> bool:
    """Pin rows for CUDA; whether it was done. Only who has loaded torch copies to a GPU, so we never load it here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    torch.cuda.init()
    return int(torch.cuda.cudart().cudaHostRegister(rows.ctypes.data, rows.nbytes, 0)) == 0
