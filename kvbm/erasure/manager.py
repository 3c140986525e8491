"""What an erasure asks of a manager: which blocks are held, their withdrawal, zeros where they lay, a journal that
names them no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.core.events import MAX_RUN_BLOCKS, EvictReason
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId, Tier, pack_slots, split_slots
from kvbm.core.results import NOT_HELD
from kvbm.manager.base import ManagerParts
from kvbm.pools.base import Proof
from kvbm.pools.nvme.pool import NvmePool
from kvbm.streams.base import Position

_ZERO_BYTES = 16 << 20  # written at once
_EVICT_BYTES = 8 * MAX_RUN_BLOCKS * HASH_BYTES  # withdrawn in one turn under the lock
_DURABLE_WAIT_S = 2.0
_NOBODY = NamespaceId(bytes(HASH_BYTES))


class HeldRun(NamedTuple):
    """Blocks of one namespace that a tier holds.

    `namespace`, `tenant`: None where this process was not told whose they are.
    """

    tier: Tier
    namespace: NamespaceId | None
    tenant: str | None
    hashes: bytes


class Wiped(NamedTuple):
    """What one pass over a tier has done.

    Attributes:
        clean: slots that hold zeros now, or a block.
        zeroed: how many of these were written.
    """

    clean: list[int]
    zeroed: int


class ErasableManager:
    """See the module. One thread beside the manager's own; it has to end before the manager closes its pools."""

    def __init__(self, parts: ManagerParts) -> None:
        self._parts, self._stream, self._ledger, self._pools = parts, parts.stream, parts.stream.ledger, parts.pools
        self._salvage, self._revisioned, self._owns_hbm = parts.salvage, parts.revisioned, parts.owns_hbm

    @property
    def is_over(self) -> bool:
        """Whether the manager closes."""
        return self._stream.closing or self._stream.ended

    @property
    def tiers(self) -> list[Tier]:
        """The tiers whose slots are the manager's, hottest first."""
        return [tier for tier in sorted(self._pools.slots) if tier is not Tier.HBM or self._owns_hbm]

    @property
    def engine_tier(self) -> Tier | None:
        """HBM where it is the engine's, who alone evicts from it."""
        return None if self._owns_hbm else Tier.HBM

    def slots(self, tier: Tier) -> int:
        """How many slots a tier has."""
        return self._pools.slots[tier].slots

    def end_salvage(self) -> None:
        """Nothing that NVME holds now comes back by a scan of its slots, in this process or a later one."""
        with self._salvage.clearing():
            return

    def hold_back(self, held_back: bool) -> None:
        """Serve nothing of tiers that outlive the process, or serve it again."""
        with self._stream.lock:
            self._revisioned.held_back = held_back

    @property
    def is_held_back(self) -> bool:
        """Whether `hold_back` is in force."""
        return self._revisioned.held_back

    # -- what is held -------------------------------------------------------------------------------------------------

    def tenants(self) -> dict[NamespaceId, str]:
        """The namespaces this process was told of, and whose each is."""
        with self._stream.lock:
            return dict(self._revisioned.tenants)

    def held(self, tier: Tier) -> list[HeldRun]:
        """What a tier holds, by namespace; last what is of none that this process was told of: an earlier one
        left it.
        """
        with self._stream.lock:
            every, _ = self._ledger.held_of(tier)
        runs = []
        for namespace, tenant in self.tenants().items():
            with self._stream.lock:
                hashes, _ = self._ledger.held_of(tier, namespace)
            if hashes:
                runs.append(HeldRun(tier, namespace, tenant, hashes))
        told = b"".join(run.hashes for run in runs)
        if len(told) < len(every):
            mine = {told[at : at + HASH_BYTES] for at in range(0, len(told), HASH_BYTES)}
            blocks = (every[at : at + HASH_BYTES] for at in range(0, len(every), HASH_BYTES))
            runs.append(HeldRun(tier, None, None, b"".join(block for block in blocks if block not in mine)))
        return runs

    def evict(self, tier: Tier, hashes: bytes) -> int:
        """Withdraw those blocks of a run that a tier holds, pinned or not; gives how many."""
        count = 0
        if tier is Tier.NVME:
            with self._stream.lock:
                is_held = bool(self._ledger.holders(hashes, tier).strip(bytes([NOT_HELD])))
            if is_held:  # also what a copy has brought there since the erasure began
                self.end_salvage()
        for at in range(0, len(hashes), _EVICT_BYTES):
            with self._stream.lock:
                if self.is_over:
                    return count
                count += self._ledger.evict(tier, hashes[at : at + _EVICT_BYTES], EvictReason.CLEARED)
            self._stream.recorded()
        return count

    def drop_samples(self) -> None:
        """Sampled prompts that were not sent on yet are lost."""
        self._parts.port.drop_samples()

    def unclaim(self, hashes: bytes) -> None:
        """The object pool has these no more: when they are used anew they are put anew."""
        with self._stream.lock:
            self._parts.offloader.claims.drop(hashes)

    def unname(self, namespaces: Iterable[NamespaceId]) -> None:
        """Heartbeats do not name these until they are used again."""
        with self._stream.lock:
            for namespace in namespaces:
                self._parts.used.forget(namespace)

    def erase_usage(self, number: int, is_meant: Callable[[str], bool]) -> None:
        """What tenants that an erasure means have used until now is recorded no more."""
        self._stream.erase_usage(number, is_meant)

    # -- the bytes ----------------------------------------------------------------------------------------------------

    def wipe(self, tier: Tier, dirty: set[int]) -> Wiped:
        """Fill those slots of a tier with zeros that are free now.

        Others are clean once another block has overwritten them.

        The free slots are taken for as long as this takes, so that nobody else writes them; a full pool evicts then
        what it would have evicted later.

        Args:
            dirty: slots that may hold bytes that were erased.
        Raises: PoolError: the device refused.
        """
        nvme = self._pools.slots[tier]
        if isinstance(nvme, NvmePool):
            nvme.forget_asides()
            self._trim(nvme)
        with self._stream.lock:
            if self.is_over:
                return Wiped([], 0)
            _, held = self._ledger.held_of(tier)
            free = self._ledger.counts(tier).free
            taken = self._ledger.allocate(tier, free) if free else None
            epoch = self._ledger.epoch
        self._stream.recorded()
        clean = [slot for slot in split_slots(held) if slot in dirty]
        if taken is None:
            return Wiped(clean, 0)
        mine = split_slots(taken.slots)
        wanted = [slot for slot in mine if slot in dirty]
        self._release(tier, [slot for slot in mine if slot not in dirty])
        zeroed = 0
        try:
            if wanted and self._parts.offsets.wait_durable(epoch, taken.after, _DURABLE_WAIT_S):
                zeroed = self._zero(tier, wanted)
                clean += wanted
        finally:
            self._release(tier, wanted)
        return Wiped(clean, zeroed)

    def _trim(self, nvme: NvmePool) -> None:
        """What lies beyond the end of a pool that has become smaller goes too. Raises PoolError: not yet."""
        if not nvme.room_slots:
            return
        if not self._salvage.is_over:
            raise PoolError(f"{nvme}: slots beyond its end are still being moved")
        nvme.trim()

    def _zero(self, tier: Tier, slots: list[int]) -> int:
        pool = self._pools.slots[tier]
        if isinstance(pool, NvmePool):
            slots = pool.written(slots)
        step = max(1, _ZERO_BYTES // pool.block_bytes)
        rows = np.zeros((min(step, len(slots)), pool.block_bytes), dtype=np.uint8)
        for at in range(0, len(slots), step):
            if self.is_over:
                raise PoolError(f"{tier.name} pool: the manager closes; {len(slots) - at} slots were not erased")
            part = rows[: len(slots) - at]
            pool.write(slots[at : at + step], part, self._proof(part))
        if isinstance(pool, NvmePool):
            pool.sync()
        return len(slots)

    def _proof(self, rows: np.ndarray) -> Proof:
        """Zeros prove nothing to anybody: they are of no namespace."""
        return Proof(_NOBODY, Epoch(0), bytes(len(rows) * HASH_BYTES), self._parts.checksums(rows))

    def _release(self, tier: Tier, slots: Sequence[int]) -> None:
        if slots:
            with self._stream.lock:
                self._ledger.release(tier, pack_slots(slots))

    # -- the journal --------------------------------------------------------------------------------------------------

    def mark(self) -> Position:
        """The place of the next event: all that names what was evicted lies before it."""
        with self._stream.lock:
            return Position(self._ledger.epoch, self._ledger.applied)

    def ask_snapshot(self) -> None:
        """Have what is held listed again, which makes what the journal had before needless."""
        self._parts.port.on_snapshot_asked()

    def is_durable(self, place: Position) -> bool:
        """Whether all before a place is in the journal."""
        return self._parts.offsets.is_durable(place.epoch, place.offset)

    def forget_before(self, place: Position) -> bool:
        """Delete the journal's history; whether the journal has nothing any more from before a place.

        Raises OSError.
        """
        return self._parts.retention is None or self._parts.retention.erase_before(place)
