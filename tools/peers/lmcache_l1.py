"""LMCache's L1 manager (`lmcache.v1.distributed.l1_manager.L1Manager`), which books the blocks of its own CPU memory.

Runs in that package's own environment. `register` is reserve_write and finish_write of a run, then reserve_read and
finish_read; room for it comes from its allocator, which is in it. Deleting what a sample booked is not.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager
from peers.measure import serve
from peers.workload import Part, hashes

_BLOCK_BYTES = 4096  # the least it aligns to
_ROOM_BYTES = 256 << 20
_KV_RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)


class LmcacheL1:
    """A Store that only books."""

    def __init__(self, folder: str) -> None:
        self._manager = L1Manager(
            L1ManagerConfig(
                L1MemoryManagerConfig(size_in_bytes=_ROOM_BYTES, use_lazy=False, init_size_in_bytes=_ROOM_BYTES)
            )
        )
        self._layout = MemoryLayoutDesc([torch.Size([_BLOCK_BYTES])], [torch.uint8])
        self._booked: list[ObjectKey] = []

    def keys(self, blocks: list[int], generation: int) -> list[ObjectKey]:
        """A key a block."""
        rows = hashes(Part(generation, blocks[0], len(blocks)))
        return [ObjectKey(chunk_hash=row.tobytes(), model_name="m", kv_rank=_KV_RANK) for row in rows]

    def register(self, keys: list[ObjectKey]) -> None:
        """See the module."""
        manager = self._manager
        reserved = manager.reserve_write(keys, [False] * len(keys), self._layout)
        written = manager.finish_write(keys)
        found = manager.reserve_read(keys)
        read = manager.finish_read(keys)
        said = {error for error, _ in (*reserved.values(), *found.values())} | {*written.values(), *read.values()}
        if said != {L1Error.SUCCESS}:
            raise LookupError(f"Error: {said}")
        self._booked += keys

    def settle(self) -> None:
        """Nothing waits."""

    def put(self, keys: list[ObjectKey], blocks: list[int]) -> None:
        """It is only booked here."""
        raise NotImplementedError

    def clear(self) -> None:
        """Delete what was booked."""
        self._manager.delete(self._booked)
        self._booked = []

    def cpu_s(self) -> float:
        """Nobody else works for it."""
        return 0.0

    def close(self) -> None:
        """Give back its memory."""
        self._manager.close()


if __name__ == "__main__":
    serve("LMCache L1 manager", version("lmcache"), LmcacheL1)
