"""Decide: commands → results, events, copies. The readable ledger; its native twin comes to replace it in production.

The caller holds one lock around every call. A command that changes residencies is turned into events, which the fold applies at
once and which wait in order, each with its offset, until `take_events` hands them to whoever cuts frames. Everything else here
(pins, recency, free lists, copies in flight) is soft state and never an event.

A slot is in one of these states, and only its owner may touch its bytes:

    free ──allocate──► allocated ──create / end_copy──► held ──evict──► free, or orphaned while pinned ──unpin──► free
                           └────────release──► free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from kvbm.core.errors import LedgerError
from kvbm.core.events import (
    MAX_RUN_BLOCKS,
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesStated,
    RoundEnded,
    StopReason,
)
from kvbm.core.ids import (
    DURABLE_TIERS,
    HASH_BYTES,
    NO_PARENT,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Offset,
    SequenceHash,
    Tier,
    pack_slots,
    short,
    split_hashes,
)
from kvbm.core.policy import EVICTION_POLICIES
from kvbm.core.residency import Delta, Residencies


class Match(NamedTuple):
    """The longest run of held blocks, each in its hottest tier.

    Attributes:
        tiers, slots: where block i is; both have `depth` entries.
    """

    depth: int
    tiers: list[Tier]
    slots: list[int]


class Allocation(NamedTuple):
    """Slots to write.

    Attributes:
        after: the offset that must be durable before the slots are overwritten; 0 for a tier that dies with the process.
    """

    slots: list[int]
    after: Offset


class Copy(NamedTuple):
    """Bytes to move; source and target stay the copy's until it ends.

    Attributes:
        source: a tier, or the instance to fetch from.
        source_slots: empty when the source has no slots of ours.
        target_slots: empty for a target without slots.
        after: offset that must be durable before the target slots are overwritten.
    """

    id: int
    namespace: NamespaceId
    source: Tier | InstanceId
    target: Tier
    hashes: bytes
    source_slots: list[int]
    target_slots: list[int]
    after: Offset


class Recovered(NamedTuple):
    """A residency a durable tier has kept across a restart."""

    hash: SequenceHash
    namespace: NamespaceId
    slot: int


class Pending(NamedTuple):
    """An event that waits for its frame, with the digest after it."""

    event: Event
    digest: int


class TierCounts(NamedTuple):
    """How a pool's slots are used right now."""

    slots: int
    free: int
    held: int
    evictable: int
    allocated: int


class _TierState:
    """The slots of one pool."""

    def __init__(self, pool: PoolStated, eviction: str) -> None:
        self.pool = pool
        self.policy = EVICTION_POLICIES[eviction]()
        self.unused = 0  # slots from here on were never used
        self.free: deque[int] = deque()
        self.free_after: dict[int, Offset] = {}  # slots → offset after the event that last withdrew a block from them
        self.allocated: set[int] = set()
        self.receiving: set[int] = (
            set()
        )  # those of `allocated` that a copy writes to: they are the copy's, nobody else's
        self.orphaned: set[int] = set()  # withdrawn while pinned
        self.pins: dict[int, int] = {}
        self.arriving: set[SequenceHash] = set()  # on their way here by a copy

    def free_count(self) -> int:
        return len(self.free) + self.pool.slots - self.unused

    def take(self, count: int) -> Allocation:
        """Free slots, of which there must be enough."""
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
        return Allocation(slots, after)


class Ledger:
    """The reference ledger of one instance.

    Args:
        pools: the instance's pools; a pool without slots (OBJECT) is only ever the target or source of a copy.
        eviction: name of the eviction policy, one of `policy.EVICTION_POLICIES`.
    """

    def __init__(self, pools: Sequence[PoolStated], eviction: str = "lru") -> None:
        self.pools = tuple(pools)
        self.residencies = Residencies(strict=True)
        self.applied = Offset(0)  # offset the next event gets
        self._tiers = {pool.tier: _TierState(pool, eviction) for pool in pools if pool.slots}
        self._pending: list[Pending] = []
        self._copies: dict[int, Copy] = {}
        self._next_copy = 1
        self._round = 0
        self._round_left: deque[tuple[Tier, deque[SequenceHash] | None, int]] = deque()  # None: not begun yet

    # -- the life of the stream ---------------------------------------------------------------------------------------

    def start(
        self,
        epoch: Epoch,
        namespaces: Sequence[Namespace] = (),
        topology: Sequence[str] = (),
        engine: str = "",
        version: str = "",
        recovered: dict[Tier, list[Recovered]] | None = None,
    ) -> None:
        """Begin an epoch: InstanceStarted, then a round of what durable tiers have kept.

        Raises: LedgerError: the ledger has started already, or a recovered slot does not exist.
        """
        if self.applied:
            raise LedgerError(
                f"the ledger is in epoch {self.residencies.epoch} already; make a new one for a new epoch"
            )
        self._record(
            InstanceStarted(
                epoch=epoch, pools=self.pools, namespaces=tuple(namespaces), topology=tuple(topology),
                engine=engine, version=version,
            )
        )  # fmt: skip
        self._round = 1
        for tier, state in self._tiers.items():
            kept = (recovered or {}).get(tier, [])
            self._reserve(state, [entry.slot for entry in kept])
            for namespace, group in groupby(kept, key=lambda entry: entry.namespace):
                entries = list(group)
                for at in range(0, len(entries), MAX_RUN_BLOCKS):
                    run = entries[at : at + MAX_RUN_BLOCKS]
                    self._record(
                        ResidenciesStated(
                            namespace=namespace, tier=tier, round=self._round, hashes=b"".join(e.hash for e in run),
                            slots=pack_slots(e.slot for e in run),
                        )
                    )  # fmt: skip
            self._record(RoundEnded(tier=tier, round=self._round, count=len(kept)))

    def stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """End the stream cleanly; nothing may be recorded after it."""
        self._record(InstanceStopped(reason=reason))

    def take_events(self) -> tuple[Offset, list[Pending]]:
        """The events recorded since the last call, and the offset of the first of them."""
        taken, self._pending = self._pending, []
        return Offset(self.applied - len(taken)), taken

    # -- what an engine asks ------------------------------------------------------------------------------------------

    def match(self, hashes: bytes) -> Match:
        """The longest run of held blocks from the first hash on. Nothing is pinned and nothing counts as used."""
        tiers: list[Tier] = []
        slots: list[int] = []
        order = [(tier, self.residencies.held[tier]) for tier in sorted(self._tiers)]
        for block in split_hashes(hashes):
            for tier, held in order:
                entry = held.get(block)
                if entry is not None and entry.slot is not None:
                    tiers.append(tier)
                    slots.append(entry.slot)
                    break
            else:
                break
        return Match(len(tiers), tiers, slots)

    def holds(self, tier: Tier, block: SequenceHash) -> bool:
        """Whether a tier of this instance holds the block."""
        return block in self.residencies.held[tier]

    def pin(self, tier: Tier, slots: Iterable[int]) -> None:
        """Forbid the eviction of held blocks; counted. Raises LedgerError: a slot holds no block."""
        state = self._state(tier)
        for slot in slots:
            block = self.residencies.slot_owner(tier, slot)
            if block is None:
                raise LedgerError(f"{tier.name} slot {slot} holds no block, so it cannot be pinned")
            state.pins[slot] = state.pins.get(slot, 0) + 1
            state.policy.remove(block)

    def unpin(self, tier: Tier, slots: Sequence[int]) -> None:
        """Take back one pin of each slot. Slots in prompt order: the deepest block becomes the first to be evicted.

        Raises: LedgerError: a slot is not pinned.
        """
        state = self._state(tier)
        for slot in reversed(slots):
            left = state.pins.get(slot, 0) - 1
            if left < 0:
                raise LedgerError(f"{tier.name} slot {slot} is not pinned, so it cannot be unpinned")
            if left:
                state.pins[slot] = left
                continue
            del state.pins[slot]
            block = self.residencies.slot_owner(tier, slot)
            if block is not None:
                state.policy.add(block)
            elif slot in state.orphaned:
                state.orphaned.discard(slot)
                state.free.append(slot)

    def allocate(self, tier: Tier, count: int) -> Allocation | None:
        """Slots to write, evicting what the policy gives up; None when pins leave too few."""
        state = self._state(tier)
        short_by = count - state.free_count()
        if short_by > 0:
            victims = state.policy.victims(short_by)
            if len(victims) < short_by:
                return None
            self._evict(tier, victims, EvictReason.CAPACITY)
        slots, after = state.take(count)
        return Allocation(slots, after if tier in DURABLE_TIERS else Offset(0))

    def release(self, tier: Tier, slots: Iterable[int]) -> None:
        """Give back allocated slots that hold no block yet. Raises LedgerError: a slot is not allocated, or is a copy's."""
        state = self._state(tier)
        for slot in slots:
            _require_own(state, slot, "it cannot be released")
            state.allocated.discard(slot)
            state.free.append(slot)

    def create(
        self, namespace: NamespaceId, tier: Tier, parent: SequenceHash, start: int, hashes: bytes, slots: Sequence[int]
    ) -> list[int]:
        """Declare allocated slots full; they are pinned for the caller.

        Returns: the slot that holds each block. Where the hash was held already that is the holder's, now pinned once more,
            and the slot given goes back to the pool.
        Raises: LedgerError: a slot is not allocated or is a copy's, counts differ, or a hash or a slot is given twice; nothing
            has changed then.
        """
        state = self._state(tier)
        blocks = split_hashes(hashes)
        if len(blocks) != len(slots):
            raise LedgerError(f"{len(blocks)} hashes for {len(slots)} slots; give one slot a block")
        if len(set(blocks)) != len(blocks) or len(set(slots)) != len(slots):
            raise LedgerError(f"{len(blocks)} blocks to create in {tier.name} name a hash or a slot twice")
        for slot in slots:
            _require_own(state, slot, "no block can be created in it")
        held = self.residencies.held[tier]
        known = [block in held for block in blocks]
        at = 0
        for repeated, group in groupby(known):
            end = at + len(list(group))
            if repeated:
                self.release(tier, slots[at:end])
            else:
                for first in range(at, end, MAX_RUN_BLOCKS):
                    last = min(end, first + MAX_RUN_BLOCKS)
                    before = blocks[first - 1] if first else parent
                    self._record(
                        BlocksCreated(
                            namespace=namespace, tier=tier, parent=before if start + first else NO_PARENT,
                            start=start + first, hashes=hashes[first * HASH_BYTES : last * HASH_BYTES],
                            slots=pack_slots(slots[first:last]),
                        )
                    )  # fmt: skip
            at = end
        holders = [holder for block in blocks if (holder := held[block].slot) is not None]
        self.pin(tier, holders)
        return holders

    def evict(self, tier: Tier, hashes: bytes, reason: EvictReason) -> int:
        """Withdraw blocks that are held; others are ignored. A pinned block's slot stays untouched until it is unpinned.

        Returns: how many were withdrawn.
        Raises: LedgerError: the tier has no slots; `forget` is for claims on a pool of cluster reach.
        """
        self._state(tier)
        held = self.residencies.held[tier]
        blocks = [block for block in dict.fromkeys(split_hashes(hashes)) if block in held]
        self._evict(tier, blocks, reason)
        return len(blocks)

    def forget(self, tier: Tier, namespace: NamespaceId, hashes: bytes, reason: EvictReason) -> None:
        """Say that a pool of cluster reach no longer has these blocks (`missing`, `corrupt`)."""
        if not self.residencies.is_cluster(tier):
            raise LedgerError(f"{tier.name} is not a pool of cluster reach; use evict")
        self._record(BlocksEvicted(namespace=namespace, tier=tier, reason=reason, hashes=hashes))

    # -- copies -------------------------------------------------------------------------------------------------------

    def begin_copy(self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes) -> Copy | None:
        """Plan a copy of those blocks that the source has under this namespace and the target lacks.

        Both ends are the copy's from now on. Blocks already on their way, and repeats, are left out. When the target is short,
        the run is cut to what fits.
        Returns: None when nothing is to be copied or nothing fits.
        """
        state = self._tiers.get(target)
        blocks = list(dict.fromkeys(split_hashes(hashes)))
        if isinstance(source, Tier) and source in self._tiers:
            held = self.residencies.held[source]
            blocks = [b for b in blocks if (entry := held.get(b)) is not None and entry.namespace == namespace]
        after = Offset(0)
        target_slots: list[int] = []
        if state is not None:
            blocks = [b for b in blocks if b not in self.residencies.held[target] and b not in state.arriving]
            blocks = blocks[: state.free_count() + len(state.policy)]
        if not blocks:
            return None
        source_slots = self._pin_source(source, blocks)
        if state is not None:
            allocation = self.allocate(target, len(blocks))
            if allocation is None:
                raise LedgerError(f"{target.name} could not give {len(blocks)} slots it had counted")
            target_slots, after = allocation
            state.arriving.update(blocks)
            state.receiving.update(target_slots)
        copy = Copy(self._next_copy, namespace, source, target, b"".join(blocks), source_slots, target_slots, after)
        self._next_copy += 1
        self._copies[copy.id] = copy
        return copy

    def _pin_source(self, source: Tier | InstanceId, blocks: list[SequenceHash]) -> list[int]:
        if not isinstance(source, Tier) or source not in self._tiers:
            return []
        held = self.residencies.held[source]
        slots = [slot for block in blocks if (slot := held[block].slot) is not None]
        self.pin(source, slots)
        return slots

    def end_copy(
        self, copy: Copy, arrived: Sequence[bool], cause: MigrateCause, kept: bool = True, pinned: bool = False
    ) -> list[int | None]:
        """The transport has confirmed the end: record what arrived, free what did not.

        A block that its source has withdrawn meanwhile (cleared, say) has not arrived: a copy does not bring back what was cleared.

        Args:
            arrived: for each block whether its bytes are in place and verified.
            kept: whether the source keeps the blocks.
            pinned: whether the caller gets a pin on each arrived block.
        Returns: for each block the target slot that holds it, or None.
        Raises: LedgerError: the copy is not in flight.
        """
        if self._copies.pop(copy.id, None) is None:
            raise LedgerError(f"copy {copy.id} is not in flight")
        blocks = split_hashes(copy.hashes)
        arrived = [ok and self._still_at_source(copy, block) for block, ok in zip(blocks, arrived, strict=True)]
        good = [block for block, ok in zip(blocks, arrived, strict=True) if ok]
        state = self._tiers.get(copy.target)
        if state is None:
            if good:
                self._migrate(copy, good, [], kept, cause)
            self._unpin_source(copy)
            return [None] * len(blocks)
        state.arriving.difference_update(blocks)
        state.receiving.difference_update(copy.target_slots)
        held = self.residencies.held[copy.target]
        fresh: list[SequenceHash] = []
        fresh_slots: list[int] = []
        for block, slot, ok in zip(blocks, copy.target_slots, arrived, strict=True):
            if ok and block not in held:
                fresh.append(block)
                fresh_slots.append(slot)
            else:
                self.release(copy.target, [slot])
        if fresh:
            self._migrate(copy, fresh, fresh_slots, kept, cause)
        self._unpin_source(copy)
        holders = [held[block].slot if ok else None for block, ok in zip(blocks, arrived, strict=True)]
        if pinned:
            self.pin(copy.target, [slot for slot in holders if slot is not None])
        else:
            for block in reversed(fresh):
                state.policy.add(block)
        return holders

    def _still_at_source(self, copy: Copy, block: SequenceHash) -> bool:
        if not isinstance(copy.source, Tier) or copy.source not in self._tiers:
            return True
        return block in self.residencies.held[copy.source]

    def _migrate(
        self, copy: Copy, blocks: list[SequenceHash], slots: list[int], kept: bool, cause: MigrateCause
    ) -> None:
        for at in range(0, len(blocks), MAX_RUN_BLOCKS):
            end = at + MAX_RUN_BLOCKS
            self._record(
                BlocksMigrated(
                    namespace=copy.namespace, source=copy.source, target=copy.target, kept=kept, cause=cause,
                    hashes=b"".join(blocks[at:end]), slots=pack_slots(slots[at:end]),
                )
            )  # fmt: skip

    def _unpin_source(self, copy: Copy) -> None:
        if isinstance(copy.source, Tier) and copy.source_slots:
            self.unpin(copy.source, copy.source_slots)

    def copies_in_flight(self) -> int:
        """How many copies hold slots now."""
        return len(self._copies)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self) -> bool:
        """Begin to restate what is held, tier by tier; `step_round` goes on with it. False when a round is under way."""
        if self._round_left:
            return False
        self._round += 1
        self._round_left.extend((tier, None, 0) for tier in self._tiers)
        return True

    def step_round(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """State one more run, cut here and now. Returns whether the round goes on.

        A tier's round begins at its first step: what is gained before it is stated, what is gained later needs no statement.
        """
        if not self._round_left:
            return False
        tier, left, count = self._round_left.popleft()
        held = self.residencies.held[tier]
        if left is None:
            left = deque(sorted(held, key=lambda block: held[block].namespace))
        run: list[SequenceHash] = []
        while left and len(run) < limit:
            if left[0] not in held:
                left.popleft()
                continue
            if run and held[left[0]].namespace != held[run[0]].namespace:
                break
            run.append(left.popleft())
        if run:
            slots = [slot for block in run if (slot := held[block].slot) is not None]
            self._record(
                ResidenciesStated(
                    namespace=held[run[0]].namespace, tier=tier, round=self._round, hashes=b"".join(run),
                    slots=pack_slots(slots),
                )
            )  # fmt: skip
            count += len(run)
        if left:
            self._round_left.appendleft((tier, left, count))
        else:
            self._record(RoundEnded(tier=tier, round=self._round, count=count))
        return bool(self._round_left)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def counts(self, tier: Tier) -> TierCounts:
        """How a pool's slots are used right now."""
        state = self._state(tier)
        return TierCounts(
            state.pool.slots,
            state.free_count(),
            len(self.residencies.held[tier]),
            len(state.policy),
            len(state.allocated),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state(self, tier: Tier) -> _TierState:
        state = self._tiers.get(tier)
        if state is None:
            raise LedgerError(f"this instance has no {tier.name} pool with slots")
        return state

    def _evict(self, tier: Tier, blocks: list[SequenceHash], reason: EvictReason) -> None:
        held = self.residencies.held[tier]
        for namespace, group in groupby(blocks, key=lambda block: held[block].namespace):
            run = list(group)
            for at in range(0, len(run), MAX_RUN_BLOCKS):
                hashes = b"".join(run[at : at + MAX_RUN_BLOCKS])
                self._record(BlocksEvicted(namespace=namespace, tier=tier, reason=reason, hashes=hashes))

    def _reserve(self, state: _TierState, slots: list[int]) -> None:
        taken = set(slots)
        if slots and max(slots) >= state.pool.slots:
            raise LedgerError(
                f"{state.pool.tier.name} slot {max(slots)} was recovered; the pool has {state.pool.slots}"
            )
        state.unused = max(slots, default=-1) + 1
        state.free.extend(slot for slot in range(state.unused) if slot not in taken)
        state.allocated.update(taken)

    def _record(self, event: Event) -> None:
        delta = self.residencies.evolve(event)
        self.applied = Offset(self.applied + 1)
        self._pending.append(Pending(event, self.residencies.digest))
        self._listen(event, delta)

    def _listen(self, event: Event, delta: Delta) -> None:
        """Keep free lists and recency in step with the fold."""
        for change in delta.withdrawn:
            state, slot = self._tiers[change.tier], change.slot
            state.policy.remove(change.hash)
            if slot is None:
                continue
            state.free_after[slot] = self.applied
            if state.pins.get(slot):
                state.orphaned.add(slot)
            else:
                state.free.append(slot)
        for change in delta.added:
            state = self._tiers[change.tier]
            if change.slot is not None:
                state.allocated.discard(change.slot)
            if isinstance(event, ResidenciesStated):
                state.policy.add(change.hash)

    def describe(self, block: SequenceHash) -> str:
        """Where this instance holds a block, in words, for messages."""
        tiers = [tier.name for tier in Tier if block in self.residencies.held[tier]]
        return f"{short(block)} in {', '.join(tiers) or 'no tier'}"


def _require_own(state: _TierState, slot: int, consequence: str) -> None:
    """Raises LedgerError: the slot is not the caller's."""
    name = state.pool.tier.name
    if slot not in state.allocated:
        raise LedgerError(f"{name} slot {slot} is not allocated, so {consequence}")
    if slot in state.receiving:
        raise LedgerError(f"{name} slot {slot} belongs to a copy, so {consequence}")
