"""The slots of one pool: whose each is, and which blocks may be evicted. Soft state, never an event.

free ──take──► allocated ──create / end_copy──► held ──evict──► free, or orphaned while pinned ──unpin──► free
                   └────────release──► free
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.errors import LedgerError
from kvbm.core.events import PoolStated
from kvbm.core.fold import Residencies
from kvbm.core.ids import Offset, SequenceHash
from kvbm.core.policy import EVICTION_POLICIES, FairShares
from kvbm.core.results import HIGHEST_PRIORITY


class _Kept(NamedTuple):
    """What `keep` has said of a block. The block of the lowest priority is given up first, then of the earliest end."""

    priority: int
    until_s: float
    until_read: bool = False


class TierSlots:
    """The slots of one pool. What they hold is the fold's; here is what follows from it.

    Args:
        pool: the pool, which has slots.
        eviction: name of the eviction policy, one of `policy.EVICTION_POLICIES`.
        fair: the policy instead, where tenants have shares.
        residencies: what is held; read, never changed.
    """

    def __init__(self, pool: PoolStated, eviction: str, fair: FairShares | None, residencies: Residencies) -> None:
        self.pool = pool
        self.fair = fair
        self.policy = EVICTION_POLICIES[eviction](pool.slots) if fair is None else fair
        self.unused = 0  # slots from here on were never used
        self.free: deque[int] = deque()
        self.free_after: dict[int, Offset] = {}  # slots → offset after the event that last withdrew a block from them
        self.allocated: set[int] = set()
        self.receiving: set[int] = set()  # those of `allocated` that a copy writes to: they are the copy's alone
        self.orphaned: set[int] = set()  # withdrawn while pinned
        self.pins: dict[int, int] = {}
        self.kept: dict[int, _Kept] = {}  # by slot
        self.arriving: set[SequenceHash] = set()  # on their way here by a copy
        self._residencies = residencies

    def owner(self, slot: int) -> SequenceHash | None:
        """The block a slot holds, if any."""
        return self._residencies.slot_owner(self.pool.tier, slot)

    # -- slots that hold no block -------------------------------------------------------------------------------------

    def free_count(self) -> int:
        """How many slots are nobody's."""
        return len(self.free) + self.pool.slots - self.unused

    def room(self) -> int:
        """The slots an allocation can have at most."""
        return self.free_count() + len(self.policy) + len(self.yielding())

    def take(self, count: int) -> tuple[list[int], Offset]:
        """Free slots, of which there must be enough, and the offset after which what they held was withdrawn."""
        slots: list[int] = []
        after = Offset(0)
        for _ in range(count):
            if self.free:
                slot = self.free.popleft()
                after = max(after, self.free_after.get(slot, Offset(0)))  # kept: it may come back unwritten
            else:
                slot = self.unused
                self.unused += 1
            slots.append(slot)
        self.allocated.update(slots)
        return slots, after

    def reserve(self, slots: Sequence[int]) -> None:
        """Take what a start finds in use. Raises LedgerError: a slot does not exist."""
        if slots and max(slots) >= self.pool.slots:
            raise self._slot_error(max(slots), f"was recovered; the pool has {self.pool.slots}")
        taken = set(slots)
        self.unused = max(slots, default=-1) + 1
        self.free.extend(slot for slot in range(self.unused) if slot not in taken)
        self.allocated.update(taken)

    def _slot_error(self, slot: int, what: str) -> LedgerError:
        tier = self.pool.tier
        return LedgerError(f"{tier.name} slot {slot} {what}", tier=tier, slot=slot)

    def require_own(self, slot: int, consequence: str) -> None:
        """Raises LedgerError: the slot is not the caller's."""
        if slot not in self.allocated:
            raise self._slot_error(slot, f"is not allocated, so {consequence}")
        if slot in self.receiving:
            raise self._slot_error(slot, f"belongs to a copy, so {consequence}")

    def require_fillable(
        self, blocks: Sequence[SequenceHash], slots: Sequence[int], verb: str, consequence: str
    ) -> None:
        """Raises LedgerError: counts differ, a hash or a slot is given twice, or a slot is not the caller's."""
        if len(blocks) != len(slots):
            raise LedgerError(f"{len(blocks)} hashes for {len(slots)} slots; give one slot a block")
        if len(set(blocks)) != len(blocks) or len(set(slots)) != len(slots):
            raise LedgerError(f"{len(blocks)} blocks to {verb} in {self.pool.tier.name} name a hash or a slot twice")
        for slot in slots:
            self.require_own(slot, consequence)

    def release(self, slots: Sequence[int]) -> None:
        """Give back allocated slots that hold no block yet.

        Raises: LedgerError: a slot is not allocated, or is a copy's, or is named twice; nothing has changed then.
        """
        for at, slot in enumerate(slots):
            try:
                self.require_own(slot, "it cannot be released")
            except LedgerError:
                self.allocated.update(slots[:at])
                raise
            self.allocated.discard(slot)
        self.free.extend(slots)

    # -- what may be evicted ------------------------------------------------------------------------------------------

    def enter(self, blocks: Sequence[SequenceHash], pinned: bool) -> None:
        """Let blocks the tier has just gained into the policy, which is no use.

        The deepest enters first, so it leaves first.
        """
        for block in reversed(blocks):
            slot = self._residencies.held[self.pool.tier][block].slot
            if pinned and slot is not None:
                self.pins[slot] = self.pins.get(slot, 0) + 1
            self.policy.gain(block, pinned=pinned)

    def leave_share(self, blocks: Sequence[SequenceHash]) -> None:
        """Held blocks leave the share they count for; `enter_share` follows, once their namespace is another's."""
        for block in blocks:
            self.policy.lose(block)

    def enter_share(self, blocks: Sequence[SequenceHash]) -> None:
        """… and enter that of their namespace, in this order, pinned and kept as they are."""
        for block in blocks:
            slot = self._residencies.held[self.pool.tier][block].slot
            self.policy.gain(block, pinned=slot is not None and not self._is_evictable(slot))

    def vacate(self, block: SequenceHash, slot: int, applied: Offset) -> None:
        """A block was withdrawn by the event before `applied`: its slot is free, or orphaned while it is pinned."""
        self.policy.lose(block)
        self.kept.pop(slot, None)
        self.free_after[slot] = applied
        if self.pins.get(slot):
            self.orphaned.add(slot)
        else:
            self.free.append(slot)

    def withdraw_unheld(self, applied: Offset) -> None:
        """Used slots that hold nothing count as withdrawn by the event before `applied`."""
        self.free_after = {slot: applied for slot in range(self.unused) if self.owner(slot) is None}

    def pin(self, slots: Sequence[int]) -> None:
        """Forbid the eviction of held blocks; counted.

        Raises LedgerError: a slot holds no block; nothing has changed then.
        """
        blocks = [self.owner(slot) for slot in slots]
        for slot, block in zip(slots, blocks, strict=True):
            if block is None:
                raise self._slot_error(slot, "holds no block, so it cannot be pinned")
        for slot, block in zip(slots, blocks, strict=True):
            assert block is not None
            self.pins[slot] = self.pins.get(slot, 0) + 1
            self.policy.hold(block)

    def unpin(self, slots: Sequence[int], read: bool = False) -> None:
        """Take back one pin of each slot, the last slot first.

        Args:
            read: what is kept until it was read is kept no more.
        Raises: LedgerError: a slot is not pinned, or named more often than it is; nothing has changed then.
        """
        named: Counter[int] = Counter()
        for slot in reversed(slots):
            named[slot] += 1
            if self.pins.get(slot, 0) < named[slot]:
                raise self._slot_error(slot, "is not pinned, so it cannot be unpinned")
        for slot in reversed(slots):
            left = self.pins[slot] - 1
            if read and slot in self.kept and self.kept[slot].until_read:
                del self.kept[slot]
            if left:
                self.pins[slot] = left
                continue
            del self.pins[slot]
            block = self.owner(slot)
            if block is not None:
                if slot not in self.kept:
                    self.policy.free(block)
            elif slot in self.orphaned:
                self.orphaned.discard(slot)
                self.free.append(slot)

    def keep(self, block: SequenceHash, slot: int, until_s: float, priority: int, until_read: bool) -> None:
        """Keep a held block; a repetition takes the later time and the higher priority, and a reader ends it only where
        both said so.
        """
        if self._is_evictable(slot):
            self.policy.hold(block)
        before = self.kept.get(slot, _Kept(priority, until_s, until_read))
        self.kept[slot] = _Kept(
            max(priority, before.priority), max(until_s, before.until_s), until_read and before.until_read
        )

    def expire(self, now_s: float) -> int:
        """Let go of kept blocks whose time has come, lowest slot first; returns how many."""
        over = sorted(slot for slot, kept in self.kept.items() if kept.until_s <= now_s)
        for slot in over:
            del self.kept[slot]
            block = self.owner(slot)
            if block is not None and self._is_evictable(slot):
                self.policy.free(block)
        return len(over)

    def yielding(self) -> list[int]:
        """Slots whose kept blocks are given up when an allocation would be short, the first to go first."""
        slots = [s for s, kept in self.kept.items() if s not in self.pins and kept.priority < HIGHEST_PRIORITY]
        return sorted(slots, key=lambda slot: (self.kept[slot].priority, self.kept[slot].until_s, slot))

    def _is_evictable(self, slot: int) -> bool:
        return slot not in self.pins and slot not in self.kept
