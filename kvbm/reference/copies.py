"""Copies: bytes on their way between tiers or from another instance, and the slots that are theirs until they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbm.core.errors import LedgerError
from kvbm.core.events import MAX_RUN_BLOCKS, BlocksMigrated, MigrateCause
from kvbm.core.ids import (
    SLOT_BYTES,
    InstanceId,
    NamespaceId,
    Offset,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.results import Copy
from kvbm.reference.recorder import Recorder
from kvbm.reference.slot_allocator import SlotAllocator


class LedgerCopies:
    """The copies of one ledger."""

    def __init__(self, recorder: Recorder, allocator: SlotAllocator) -> None:
        self._recorder, self._allocator = recorder, allocator
        self._held = recorder.residencies.held
        self._copies: dict[int, Copy] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._copies)

    def begin(self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes) -> Copy | None:
        """Plan a copy of those blocks that the source has under this namespace and the target lacks.

        Both ends are the copy's from now on. Blocks already on their way, and repeats, are left out. When the target is
        short, the run is cut to what fits.
        Returns: None when nothing is to be copied or nothing fits, or after an overflow for a durable target.
        """
        if self._recorder.is_closed(target):
            return None
        into = self._allocator.tiers.get(target)
        blocks = self._choose(namespace, source, target, hashes)
        within_quota = 0
        if into is not None:
            within_quota = self._allocator.quota_left(target, namespace, self._arriving(target))
            most = max(0, within_quota + self._allocator.own_evictable(target, namespace))
            blocks = blocks[: min(into.room(), most)]
        if not blocks:
            return None
        source_slots = self._pin_source(source, blocks)
        target_slots, after = b"", Offset(0)
        if into is not None:
            self._allocator.evict_own(target, namespace, len(blocks) - within_quota)
            allocation = self._allocator.allocate(target, len(blocks), namespace)
            if allocation is None:  # the room was counted; making it was an overflow
                self._unpin_source(source, source_slots)
                return None
            target_slots, after = allocation
            into.arriving.update(blocks)
            into.receiving.update(split_slots(target_slots))
        copy = Copy(
            self._next,
            namespace,
            source,
            target,
            b"".join(blocks),
            pack_slots(source_slots),
            target_slots,
            after,
            self._recorder.residencies.epoch,
        )
        self._next += 1
        self._copies[copy.id] = copy
        return copy

    def end(
        self, copy: Copy, arrived: Sequence[bool], cause: MigrateCause, kept: bool, pinned: bool
    ) -> list[int | None]:
        """The transport has confirmed the end: record what arrived, free what did not.

        A block that its source has withdrawn meanwhile (cleared, say) has not arrived: a copy does not bring back what
        was cleared. Nor has one that either end holds under another namespace by now.

        Returns: for each block the target slot that holds it, or None.
        Raises: LedgerError: the copy is not in flight.
        """
        if self._copies.pop(copy.id, None) is None:
            raise LedgerError(f"copy {copy.id} is not in flight", copy=copy.id)
        blocks, source_slots = split_hashes(copy.hashes), split_slots(copy.source_slots)
        tier = self._own_tier(copy.source)
        into = self._allocator.tiers.get(copy.target)
        good = [
            ok
            and (tier is None or self._is_of(copy.namespace, tier, b))
            and (into is None or b not in self._held[copy.target] or self._is_of(copy.namespace, copy.target, b))
            for b, ok in zip(blocks, arrived, strict=True)
        ]
        if into is None:
            self._migrate(copy, [block for block, ok in zip(blocks, good, strict=True) if ok], [], kept, cause)
            self._unpin_source(copy.source, source_slots)
            return [None] * len(blocks)
        target_slots, held = split_slots(copy.target_slots), self._held[copy.target]
        into.arriving.difference_update(blocks)
        into.receiving.difference_update(target_slots)
        fresh = {b: slot for b, slot, ok in zip(blocks, target_slots, good, strict=True) if ok and b not in held}
        for block, slot in zip(blocks, target_slots, strict=True):
            if block not in fresh:
                into.release([slot])
        self._migrate(copy, list(fresh), list(fresh.values()), kept, cause)
        self._unpin_source(copy.source, source_slots)
        into.enter(list(fresh), pinned)
        holders = [held[block].slot if ok else None for block, ok in zip(blocks, good, strict=True)]
        if pinned:  # created meanwhile by somebody else
            into.pin([s for b, s in zip(blocks, holders, strict=True) if s is not None and b not in fresh])
        return holders

    def _choose(
        self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes
    ) -> list[SequenceHash]:
        """Those blocks of a run, each once, that the source has under the namespace and the target neither has nor
        awaits.
        """
        blocks = list(dict.fromkeys(split_hashes(hashes)))
        tier = self._own_tier(source)
        if tier is not None:
            held = self._held[tier]
            blocks = [b for b in blocks if (entry := held.get(b)) is not None and entry.namespace == namespace]
        into = self._allocator.tiers.get(target)
        if into is None:
            return blocks
        return [b for b in blocks if b not in self._held[target] and b not in into.arriving]

    def _arriving(self, target: Tier) -> Counter[NamespaceId]:
        """Blocks on their way to a tier, by namespace."""
        arriving: Counter[NamespaceId] = Counter()
        for copy in self._copies.values():
            if copy.target == target:
                arriving[copy.namespace] += len(copy.target_slots) // SLOT_BYTES
        return arriving

    def _migrate(
        self, copy: Copy, blocks: Sequence[SequenceHash], slots: Sequence[int], kept: bool, cause: MigrateCause
    ) -> None:
        """Record the arrival of blocks that the target does not hold."""
        for at in range(0, len(blocks), MAX_RUN_BLOCKS):
            end = at + MAX_RUN_BLOCKS
            self._recorder.record(
                BlocksMigrated(
                    namespace=copy.namespace,
                    source=copy.source,
                    target=copy.target,
                    kept=kept,
                    cause=cause,
                    hashes=b"".join(blocks[at:end]),
                    slots=pack_slots(slots[at:end]),
                )
            )

    def _is_of(self, namespace: NamespaceId, tier: Tier, block: SequenceHash) -> bool:
        """Whether a tier holds a block of a namespace."""
        entry = self._held[tier].get(block)
        return entry is not None and entry.namespace == namespace

    def _own_tier(self, source: Tier | InstanceId) -> Tier | None:
        """The tier a copy reads from, when it has slots of ours."""
        return source if isinstance(source, Tier) and source in self._allocator.tiers else None

    def _pin_source(self, source: Tier | InstanceId, blocks: Sequence[SequenceHash]) -> list[int]:
        tier = self._own_tier(source)
        if tier is None:
            return []
        slots = [slot for block in blocks if (slot := self._held[tier][block].slot) is not None]
        self._allocator.tiers[tier].pin(slots)
        return slots

    def _unpin_source(self, source: Tier | InstanceId, slots: Sequence[int]) -> None:
        tier = self._own_tier(source)
        if tier is not None:
            self._allocator.tiers[tier].unpin(slots)
