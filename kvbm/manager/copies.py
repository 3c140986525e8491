"""Moving the bytes of one copy between two pools. The ledger has given both ends to the copy; nobody else touches them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import structlog

from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, Tier, split_slots
from kvbm.core.ledger import Copy
from kvbm.manager.offsets import Offsets
from kvbm.pools.base import ObjectPool, Proof, ReadOutcome, ReadResult, SlotPool

log = structlog.get_logger()


class Pools(NamedTuple):
    """The pools of one instance: those with slots by tier, and the cluster's object pool if there is one."""

    slots: dict[Tier, SlotPool]
    object: ObjectPool | None = None

    def close(self) -> None:
        """Close every pool."""
        for pool in self.slots.values():
            pool.close()
        if self.object is not None:
            self.object.close()


class Moved(NamedTuple):
    """How a copy ended, block by block.

    Attributes:
        arrived: whether the block's bytes are in place and verified.
        outcomes: what became of its read.
        unwritten: why the target took none of them, "" when it did.
    """

    arrived: list[bool]
    outcomes: list[ReadOutcome]
    unwritten: str = ""


def move(copy: Copy, pools: Pools, offsets: Offsets, durable_wait_s: float) -> Moved:
    """Read from the source, verify, write to the target. Returns when the bytes are in place or will never be.

    A target that outlives the process is written only once the withdrawal of what its slots held is durable.
    """
    count = len(copy.hashes) // HASH_BYTES
    try:
        rows = np.empty((count, _block_bytes(copy, pools)), dtype=np.uint8)
    except MemoryError as error:
        return Moved([False] * count, [ReadOutcome.FAILED] * count, str(error))
    result = _read(copy, pools, rows)
    good = [outcome == ReadOutcome.GOOD for outcome in result.outcomes]
    if not any(good):
        return Moved(good, result.outcomes)
    if not offsets.wait_durable(copy.epoch, copy.after, durable_wait_s):
        why = f"offset {copy.after} of epoch {copy.epoch} was not durable within {durable_wait_s} s"
        return Moved([False] * count, result.outcomes, why)
    kept = [index for index, ok in enumerate(good) if ok]
    chosen = rows if len(kept) == count else np.ascontiguousarray(rows[kept])
    hashes = b"".join(copy.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in kept)
    proof = Proof(copy.namespace, copy.epoch, hashes, np.ascontiguousarray(result.checksums[kept]))
    if copy.target == Tier.OBJECT:
        assert pools.object is not None
        stored = pools.object.put(chosen, proof)
        arrived = [False] * count
        for index, ok in zip(kept, stored, strict=True):
            arrived[index] = ok
        return Moved(arrived, result.outcomes, "" if all(stored) else "the object store did not take every block")
    try:
        target_slots = split_slots(copy.target_slots)
        pools.slots[copy.target].write([target_slots[i] for i in kept], chosen, proof)
    except PoolError as error:
        return Moved([False] * count, result.outcomes, str(error))
    return Moved(good, result.outcomes)


def _block_bytes(copy: Copy, pools: Pools) -> int:
    if copy.target == Tier.OBJECT:
        assert pools.object is not None
        return pools.object.block_bytes
    return pools.slots[copy.target].block_bytes


def _read(copy: Copy, pools: Pools, rows: np.ndarray) -> ReadResult:
    if copy.source == Tier.OBJECT:
        assert pools.object is not None
        return pools.object.get(copy.namespace, copy.hashes, rows)
    assert isinstance(copy.source, Tier)
    return pools.slots[copy.source].read(split_slots(copy.source_slots), copy.namespace, copy.hashes, rows)
