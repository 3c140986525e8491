"""Our side of the stores: a ledger that says where blocks are, and the pools that hold them.

HOST: a put allocates slots, copies the blocks in and creates them; a get matches and copies out. NVME: blocks lie in a
HOST pool before the clock runs and come back to it; a put allocates, writes past the page cache and creates, with a
checksum for each block, and a get matches, reads and holds every block to its checksum. `register` is allocate, create,
match and unpin by the manager.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from peers.measure import serve
from peers.workload import block_rows

from kvbm.assembly import NATIVE, NATIVE_ARENA, NATIVE_LEDGER, OPEN_BLOCK_IO, RowCopier, open_manager
from kvbm.config import load_settings
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, SequenceHash, Tier, split_slots
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.host.pool import HostPool
from kvbm.pools.nvme.pool import NvmePool

_NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
_EPOCH = Epoch(1)
_PARENT = SequenceHash(NO_PARENT)
_REGISTER_SLOTS = 65_536


def names(blocks: list[int], generation: int) -> bytes:
    """Packed hashes."""
    return np.stack([np.full(len(blocks), generation), np.asarray(blocks)], axis=1).astype("<u8").tobytes()


class OurStore:
    """A Store over one tier.

    Args:
        tier: "host" or "nvme".
        folder: where the NVME file lies.
    """

    def __init__(self, tier: str, folder: str, blocks: int, block_bytes: int) -> None:
        self._files = Path(tempfile.mkdtemp(prefix="kvbm-", dir=folder))
        self._copies = RowCopier()
        self._host = HostPool(blocks, block_bytes, NATIVE_ARENA, self._copies)
        self._nvme: NvmePool | None = None
        self._rows = block_rows(blocks, block_bytes)
        self._target = HostPool(blocks, block_bytes, NATIVE_ARENA, self._copies)  # where a get ends
        self._sums = NATIVE.checksums(self._rows)
        self._ledger = NATIVE_LEDGER([PoolStated(Tier.HBM, blocks, block_bytes)], "lru", 64 << 20)
        self._ledger.start(_EPOCH, [_NAMESPACE])
        if tier == "nvme":
            self._nvme = NvmePool(
                [self._files / "nvme.pool"],
                blocks,
                block_bytes,
                _NAMESPACE,
                InstanceId("bench"),
                NATIVE.checksums,
                OPEN_BLOCK_IO,
            )
            _memory(self._host)[:] = self._rows

    def keys(self, blocks: list[int], generation: int) -> bytes:
        """Packed hashes."""
        return names(blocks, generation)

    def put(self, keys: bytes, blocks: list[int]) -> None:
        """See the module."""
        allocation = self._ledger.allocate(Tier.HBM, len(blocks))
        assert allocation is not None
        slots = split_slots(allocation.slots)
        proof = Proof(_NAMESPACE.id, _EPOCH, keys, self._sums[blocks])
        if self._nvme is None:
            self._host.write(slots, self._rows, proof, blocks)
        else:
            self._nvme.write(slots, _memory(self._host), proof, blocks)
        held = self._ledger.create(_NAMESPACE.id, Tier.HBM, _PARENT, 0, keys, allocation.slots)
        self._ledger.unpin(Tier.HBM, held)

    def settle(self) -> None:
        """What was put is stored."""

    def get(self, keys: bytes, blocks: list[int]) -> None:
        """See the module."""
        match = self._ledger.match(keys, True)
        slots = split_slots(match.slots)
        if len(slots) != len(blocks):
            raise LookupError(f"of {len(blocks)} blocks {len(slots)} are there")
        if self._nvme is None:
            outcomes = self._host.read(slots, _NAMESPACE.id, keys, _memory(self._target), blocks).outcomes
        else:
            outcomes = self._nvme.read(slots, _NAMESPACE.id, keys, _memory(self._target), blocks).outcomes
        self._ledger.unpin(Tier.HBM, match.slots)
        if any(outcome != ReadOutcome.GOOD for outcome in outcomes):
            raise LookupError("a block did not prove itself")

    def wrong(self) -> int:
        """Compare all that came back."""
        back = _memory(self._target)
        wrong = int((back != self._rows).any(axis=1).sum())
        back[:] = 0
        return wrong

    def clear(self) -> None:
        """A full pool evicts what was put before."""
        self._ledger.take_frames(InstanceId("bench"), 0)

    def cpu_s(self) -> float:
        """Nobody else works for it."""
        return 0.0

    def close(self) -> None:
        """Give back memory and files."""
        if self._nvme is not None:
            self._nvme.close()
        self._host.close()
        self._target.close()
        shutil.rmtree(self._files, ignore_errors=True)


def _memory(pool: HostPool) -> np.ndarray:
    assert pool.memory is not None
    return pool.memory


class OurRegister:
    """A Store that holds no bytes: the manager as an engine opens it, its journal in a file, nothing published."""

    def __init__(self, folder: str) -> None:
        self._files = Path(tempfile.mkdtemp(prefix="kvbm-", dir=folder))
        flags = {
            "instance.data_dir": str(self._files),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": _REGISTER_SLOTS,
        }
        self._manager: Manager = open_manager(load_settings(flags=flags), [_NAMESPACE], 16, engine="bench")

    def keys(self, blocks: list[int], generation: int) -> bytes:
        """Packed hashes."""
        return names(blocks, generation)

    def register(self, keys: bytes) -> None:
        """See the module."""
        manager, count = self._manager, len(keys) // HASH_BYTES
        slots = manager.allocate(count)
        assert slots is not None
        held = manager.create(_NAMESPACE.id, _PARENT, 0, keys, slots)
        if manager.match(keys).depth != count:
            raise LookupError("a block is not there after its creation")
        manager.unpin(held)

    def settle(self) -> None:
        """Nothing waits."""

    def put(self, keys: bytes, blocks: list[int]) -> None:
        """It holds no bytes."""
        raise NotImplementedError

    def clear(self) -> None:
        """A full pool evicts what was there before."""

    def cpu_s(self) -> float:
        """Nobody else works for it."""
        return 0.0

    def close(self) -> None:
        """End the manager."""
        self._manager.close()
        shutil.rmtree(self._files, ignore_errors=True)


_MAKE: dict[str, Callable[..., OurStore | OurRegister]] = {"bytes": OurStore, "register": OurRegister}


def main(side: str, **options: object) -> OurStore | OurRegister:
    """A side, by name."""
    return _MAKE[side](**options)


if __name__ == "__main__":
    serve("kvbm", version("kvbm-ledger"), main)
