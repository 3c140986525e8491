"""Decide: commands → results, events, copies.

The readable ledger; its native implementation does the same in production.

The caller holds one lock around every call. A command that changes residencies is turned into events, which the fold
applies at once and which wait in order, each with its offset, until `take_frames` hands them out. Everything else
(pins, what is kept, recency, free lists, copies in flight) is soft state and never an event. Runs go in and out packed:
16 bytes a hash, 4 little-endian bytes a slot, 1 byte a tier.

Nothing takes the events for as long as the journal's device hangs, and the engine is not held up for it: events wait in
bounded room. One that does not fit any more is an *overflow*: the stream ends there with InstanceStopped, commands go
on without being recorded, and durable tiers take nothing, because nobody would ever know of it. `restart` begins
another epoch in place, with a snapshot of all that is held, and with it the recording again.

Parts of it: `slots` (whose each slot is), `slot_allocator` (who gets one), `copies`, `snapshots` (snapshots), and
`recorder` (events, from the fold to frames).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import msgspec

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import LedgerError
from kvbm.core.events import (
    MAX_RUN_BLOCKS,
    PLACE_OF_A_RUN,
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    StopReason,
    UsageRecorded,
    misplaced,
)
from kvbm.core.fold import Delta, Held
from kvbm.core.ids import (
    HASH_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Offset,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.policy import EVICTION_POLICIES, Share
from kvbm.core.results import (
    HIGHEST_PRIORITY,
    LEAST_EVENT_BYTES,
    LENT_TIERS,
    NOT_HELD,
    Allocation,
    Copy,
    Match,
    Recovered,
    ShareCounts,
    TierCounts,
)
from kvbm.reference.copies import LedgerCopies
from kvbm.reference.recorder import Recorder
from kvbm.reference.slot_allocator import SlotAllocator
from kvbm.reference.slots import TierSlots
from kvbm.reference.snapshots import Snapshots


class Ledger:
    """The reference ledger of one instance.

    Args:
        pools: the instance's pools; a pool without slots (OBJECT) is only ever the target or source of a copy.
        eviction: name of the eviction policy, one of `policy.EVICTION_POLICIES`.
        event_bytes: room for events that wait, as large as frames would make them; what `start` records comes on top.
        shares: of tenants; without any, all blocks are alike.
    Raises: LedgerError: no such policy, too little room, or shares that make no sense.
    """

    def __init__(
        self,
        pools: Sequence[PoolStated],
        eviction: str = "lru",
        event_bytes: int = 64 << 20,
        shares: Sequence[Share] = (),
    ) -> None:
        if eviction not in EVICTION_POLICIES:
            raise LedgerError(f"there is no eviction policy {eviction!r}; use one of {', '.join(EVICTION_POLICIES)}")
        if event_bytes < LEAST_EVENT_BYTES:
            raise LedgerError(f"event_bytes is {event_bytes}; give waiting events at least {LEAST_EVENT_BYTES}")
        self.pools = tuple(pools)
        self._recorder = Recorder(event_bytes, self._follow)
        self._allocator = SlotAllocator(self._recorder, pools, eviction, shares)
        self._tiers = self._allocator.tiers
        self._snapshots = Snapshots(self._recorder, self._tiers)
        self._copies = LedgerCopies(self._recorder, self._allocator)
        self._started: InstanceStarted | None = None
        self.residencies = self._recorder.residencies

    def assign(self, namespace: NamespaceId, tenant: str) -> None:
        """Say whose a namespace is. A tenant without a share of its own is among the others.

        Blocks of it that are held count there from now on, as if gained anew: the last one first, so that it leaves
        first.
        """
        self._allocator.assign(namespace, tenant)

    # -- the life of the stream ---------------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        """The epoch begun; 0 before."""
        return self.residencies.epoch

    @property
    def digest(self) -> int:
        """Of what is held now."""
        return self.residencies.digest

    @property
    def applied(self) -> Offset:
        """Offset the next event gets."""
        return self._recorder.applied

    @property
    def overflowed(self) -> bool:
        """Whether the stream has ended for want of room."""
        return self._recorder.overflowed

    @property
    def stopped(self) -> bool:
        """Whether the stream has ended, by `stop` or by an overflow."""
        return self.residencies.stopped or self.overflowed

    def start(
        self,
        epoch: Epoch,
        namespaces: Sequence[Namespace] = (),
        topology: Sequence[str] = (),
        engine: str = "",
        version: str = "",
        recovered: Mapping[Tier, Sequence[Recovered]] | None = None,
        attributes: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Begin an epoch: InstanceStarted, then a snapshot of what durable tiers have kept.

        Never an overflow: pools bound it.

        Args:
            recovered: blocks in the order they are to be listed, which is the order they count as used in.
            attributes: as in InstanceStarted.

        Raises: LedgerError: the ledger has started already, or a recovered slot does not exist.
        """
        if self.applied:
            raise LedgerError(f"the ledger is in epoch {self.epoch} already; restart begins another")
        started = InstanceStarted(
            epoch=epoch,
            pools=self.pools,
            namespaces=tuple(namespaces),
            topology=tuple(topology),
            engine=engine,
            version=version,
            attributes=dict(attributes),
        )
        self._recorder.begin(started)
        self._started = started
        self._snapshots.state_recovered(recovered or {})

    def restart(self, epoch: Epoch) -> Offset:
        """Begin another epoch in place, whether the last one was stopped, has overflowed or goes on.

        InstanceStarted as `start` had it, then a whole first snapshot of what every tier holds now: by namespace,
        within one by slot. It is never an overflow, since pools bound it. What is no event stays as it is, copies in
        flight among it; a snapshot under way is dropped. Offsets begin again at 0. A slot of a durable tier that holds
        nothing now may have held something as far as the last epoch's journal goes, so it counts as withdrawn when this
        snapshot ends.

        Returns: the offset after the snapshot; once it is durable, so is all that is held.
        Raises: LedgerError: the ledger has not started, events wait, or the epoch is not newer; nothing has changed
            then.
        """
        if self._started is None:
            raise LedgerError("the ledger has not started, so it cannot begin another epoch")
        if self._recorder.waiting:
            raise LedgerError(
                f"{self._recorder.waiting} events of epoch {self.epoch} wait; take them before another begins"
            )
        if epoch <= self.epoch:
            raise LedgerError(f"epoch {epoch} is not newer than epoch {self.epoch}")
        self._started = msgspec.structs.replace(self._started, epoch=epoch)
        self._snapshots.begin_epoch(self._started)
        return self.applied

    def stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """End the stream cleanly; nothing may be recorded after it but by `restart`.

        Nothing to do after an overflow.
        """
        if not self.overflowed:
            self._recorder.record(InstanceStopped(reason=reason), counted=False)  # its room is always kept

    def record_usage(self, usage: UsageRecorded) -> None:
        """Record what tenants have used. It changes nothing that is held.

        Raises: LayoutError: it does not encode. IllegalEventError: the epoch has not begun, or is over.
        """
        self._recorder.record(usage)

    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]:
        """The events recorded since the last call, cut into frames; [] when there are none.

        Raises: LayoutError: the instance's name does not fit a frame; the events wait on.
        """
        return self._recorder.take_frames(instance, wall_time_ns)

    # -- what an engine asks ------------------------------------------------------------------------------------------

    def match(
        self, hashes: bytes, pinned: bool = False, hottest: Tier = Tier.HBM, namespace: NamespaceId | None = None
    ) -> Match:
        """The longest run of held blocks from the first hash on.

        Args:
            pinned: whether the caller gets a pin on each block found in the tier `hottest` itself; else nothing is
                pinned or counts as used.
            hottest: tiers hotter than this one are not looked at.
            namespace: whose blocks count; None: everybody's.
        """
        order = {tier: self.residencies.held[tier] for tier in sorted(self._tiers) if tier >= hottest}
        tiers, slots = _longest_run(order, hashes, namespace)
        if pinned:
            local = [slot for tier, slot in zip(tiers, slots, strict=True) if tier == hottest]
            if local:
                self._tiers[hottest].pin(local)
        return Match(len(tiers), bytes(tiers), pack_slots(slots))

    def lend(self, namespace: NamespaceId, hashes: bytes, coldest: Tier = Tier.NVME) -> Match:
        """The longest run of blocks of a namespace that another instance may read here: each in HOST, else in NVME, and
        pinned there.

        Each pin is a use, and is given back with `unpin`. Tiers colder than `coldest` are not looked at.
        """
        order = {tier: self.residencies.held[tier] for tier in LENT_TIERS if tier in self._tiers and tier <= coldest}
        tiers, slots = _longest_run(order, hashes, namespace)
        for tier, slot in zip(tiers, slots, strict=True):
            self._tiers[tier].pin([slot])
        return Match(len(tiers), bytes(tiers), pack_slots(slots))

    def holders(self, hashes: bytes, hottest: Tier = Tier.HBM, namespace: NamespaceId | None = None) -> bytes:
        """For each block the hottest tier with slots that holds it, one byte each, NOT_HELD where none does.

        Unlike `match` it goes on where a block is missing. Nothing is pinned or counts as used.

        Args:
            hottest, namespace: as in `match`.
        """
        tiers = [tier for tier in sorted(self._tiers) if tier >= hottest]
        return bytes(
            next((tier for tier in tiers if self.holds(tier, block, namespace)), NOT_HELD)
            for block in split_hashes(hashes)
        )

    def holds(self, tier: Tier, block: SequenceHash, namespace: NamespaceId | None = None) -> bool:
        """Whether a tier of this instance holds the block, of a namespace or of any."""
        entry = self.residencies.held[tier].get(block)
        return entry is not None and namespace in (None, entry.namespace)

    def lacking(self, tier: Tier, hashes: bytes) -> bytes:
        """The hashes of a run that the tier does not hold, in order."""
        held = self.residencies.held[tier]
        return b"".join(block for block in split_hashes(hashes) if block not in held)

    def held(self, tier: Tier) -> bytes:
        """The hashes of all blocks the tier holds, in the order it gained them."""
        return b"".join(self.residencies.held[tier])

    def held_of(self, tier: Tier, namespace: NamespaceId | None = None) -> tuple[bytes, bytes]:
        """Hashes and slots, packed, of the blocks the tier holds of a namespace, or of all; in the order it gained
        them.
        """
        return _held_of(self.residencies.held[tier], namespace)

    def pin(self, tier: Tier, slots: bytes) -> None:
        """Forbid the eviction of held blocks; counted. Each pin is a use.

        Raises: LedgerError: a slot holds no block; nothing has changed then.
        """
        self._state(tier).pin(split_slots(slots))

    def unpin(self, tier: Tier, slots: bytes, read: bool = False) -> None:
        """Take back one pin of each slot. Slots in prompt order: the deepest block becomes the first to be evicted.

        Args:
            read: a reader gives them back: what is kept until it was read is kept no more.
        Raises: LedgerError: a slot is not pinned, or named more often than it is; nothing has changed then.
        """
        self._state(tier).unpin(split_slots(slots), read)

    def allocate(self, tier: Tier, count: int, namespace: NamespaceId | None = None) -> Allocation | None:
        """Slots to write, evicting what the policy gives up and, where that is too little, what yields of what is kept.

        Args:
            namespace: whose blocks will be written, as far as it is known: where tenants have shares, so many more
                count as theirs.
        Returns: None when pins and kept blocks leave too few, or after an overflow in a durable tier.
        """
        self._state(tier)
        return self._allocator.allocate(tier, count, namespace)

    def release(self, tier: Tier, slots: bytes) -> None:
        """Give back allocated slots that hold no block yet.

        Raises: LedgerError: a slot is not allocated, or is a copy's, or is named twice; nothing has changed then.
        """
        self._state(tier).release(split_slots(slots))

    def create(
        self, namespace: NamespaceId, tier: Tier, parent: SequenceHash, start: int, hashes: bytes, slots: bytes
    ) -> bytes:
        """Declare allocated slots full; they are pinned for the caller.

        Returns: the slot that holds each block, packed. Where the hash was held already that is the holder's, now
            pinned once more, and the slot given goes back to the pool.
        Raises: LedgerError: start and parent contradict each other, a slot is not allocated or is a copy's, counts
            differ, a hash or a slot is given twice, or a block is held under another namespace; nothing has changed
            then.
        """
        state = self._state(tier)
        blocks, given = split_hashes(hashes), split_slots(slots)
        if why := misplaced(parent, start):
            raise LedgerError(f"blocks to create in {tier.name}: {why}; {PLACE_OF_A_RUN}")
        state.require_fillable(blocks, given, "create", "no block can be created in it")
        held = self.residencies.held[tier]
        known = [block in held for block in blocks]
        _require_own([held.get(block) for block in blocks], namespace, tier)
        begin = 0
        for repeated, group in groupby(known):
            end = begin + len(list(group))
            if repeated:
                state.release(given[begin:end])
            else:
                for event in _created(namespace, tier, parent, start, hashes, given, begin, end):
                    self._recorder.record(event)
            begin = end
        fresh = [block for block, repeated in zip(blocks, known, strict=True) if not repeated]
        state.enter(fresh, pinned=True)
        slots_of = {block: at for block in blocks if (at := held[block].slot) is not None}
        state.pin([slots_of[block] for block, repeated in zip(blocks, known, strict=True) if repeated])
        return pack_slots(slots_of[block] for block in blocks)

    def evict(self, tier: Tier, hashes: bytes, reason: EvictReason) -> int:
        """Withdraw blocks that are held; others are ignored.

        A pinned block's slot stays untouched until it is unpinned.

        Returns: how many were withdrawn.
        Raises: LedgerError: the tier has no slots; `forget` is for claims on a pool of cluster reach.
        """
        self._state(tier)
        held = self.residencies.held[tier]
        blocks = [block for block in dict.fromkeys(split_hashes(hashes)) if block in held]
        self._allocator.evict(tier, blocks, reason)
        return len(blocks)

    def forget(self, tier: Tier, namespace: NamespaceId, hashes: bytes, reason: EvictReason) -> None:
        """Say that a pool of cluster reach no longer has these blocks (`missing`, `corrupt`)."""
        if not self.residencies.is_cluster(tier):
            raise LedgerError(f"{tier.name} is not a pool of cluster reach; use evict")
        self._recorder.record(BlocksEvicted(namespace=namespace, tier=tier, reason=reason, hashes=hashes))

    def claim(self, tier: Tier, namespace: NamespaceId, hashes: bytes, finder: InstanceId) -> None:
        """Say that a pool of cluster reach has these blocks: somebody's bytes were found there.

        Args:
            finder: the instance that says so; nobody knows any more who brought them.
        """
        if not self.residencies.is_cluster(tier):
            raise LedgerError(f"{tier.name} is not a pool of cluster reach; its blocks are created or copied")
        self._recorder.record(
            BlocksMigrated(
                namespace=namespace, source=finder, target=tier, kept=True, cause=MigrateCause.OFFLOAD, hashes=hashes
            )
        )

    def adopt(self, namespace: NamespaceId, tier: Tier, hashes: bytes, slots: bytes, finder: InstanceId) -> int:
        """Say that allocated slots hold these blocks already: their bytes were found there.

        As `SlotAllocator.adopt`.
        """
        self._state(tier)
        return self._allocator.adopt(namespace, tier, split_hashes(hashes), split_slots(slots), finder)

    def keep(
        self,
        tier: Tier,
        hashes: bytes,
        until_s: float,
        priority: int = 0,
        namespace: NamespaceId | None = None,
        until_read: bool = False,
        most: int | None = None,
    ) -> int:
        """Forbid the eviction of those blocks of a run that are held, for a time.

        They do not count as evictable. Where an allocation would be short all the same they are given up: lowest
        priority first, then the earliest time, then the lowest slot; priority 100 never. To be kept is a use of a block
        that was evictable. Keeping a block again takes the later time and the higher priority, and a reader
        ends it only where both said so.

        Args:
            until_s: on the clock that `expire` is told.
            priority: 0 to 100.
            namespace: whose blocks count; None: everybody's.
            until_read: or until a reader gives them back, by `unpin`.
            most: blocks of the tier that may be kept; the run is cut before one that would be too many. A tenant with a
                quota of the tier may have half of that kept or pinned. None: no bound.
        Returns: how many of the run are held, up to where it is cut.
        Raises: LedgerError: a priority that does not exist, a time that is none, or the tier has no slots.
        """
        state = self._state(tier)
        if not 0 <= priority <= HIGHEST_PRIORITY:
            raise LedgerError(f"priority is {priority}; give 0 to {HIGHEST_PRIORITY}")
        if math.isnan(until_s):
            raise LedgerError("until_s is not a number; give a time on the clock that expire is told")
        held = self.residencies.held[tier]
        count = 0
        for block in split_hashes(hashes):
            entry = held.get(block)
            if entry is not None and entry.slot is not None and namespace in (None, entry.namespace):
                is_bounded = most is not None and entry.slot not in state.kept
                if is_bounded and (len(state.kept) >= (most or 0) or self._allocator.holds_half(tier, entry.namespace)):
                    break
                state.keep(block, entry.slot, until_s, priority, until_read)
                count += 1
        return count

    def expire(self, now_s: float) -> int:
        """Let go of kept blocks whose time has come, hottest tier first, lowest slot first; returns how many."""
        return sum(self._tiers[tier].expire(now_s) for tier in sorted(self._tiers))

    # -- copies -------------------------------------------------------------------------------------------------------

    def begin_copy(self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes) -> Copy | None:
        """Plan a copy of those blocks that the source has under this namespace and the target lacks.

        As `LedgerCopies.begin`.
        """
        return self._copies.begin(namespace, source, target, hashes)

    def end_copy(
        self, copy: Copy, arrived: Sequence[bool], cause: MigrateCause, kept: bool = True, pinned: bool = False
    ) -> list[int | None]:
        """Record what arrived, free what did not. As `LedgerCopies.end`.

        Args:
            arrived: for each block whether its bytes are in place and verified.
            kept: whether the source keeps the blocks.
            pinned: whether the caller gets a pin on each arrived block.
        """
        return self._copies.end(copy, arrived, cause, kept, pinned)

    def copies_in_flight(self) -> int:
        """How many copies hold slots now."""
        return len(self._copies)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def begin_snapshot(self) -> bool:
        """Begin to state what is held;

        `step_snapshot` goes on with it. False when a snapshot is under way, or after an overflow.
        """
        return self._snapshots.begin()

    def step_snapshot(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """State up to `limit` blocks more. As `Snapshots.step`. Returns whether the snapshot goes on."""
        return self._snapshots.step(limit)

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

    def kept(self, tier: Tier) -> int:
        """How many blocks `keep` forbids to evict now, pinned or not."""
        return len(self._state(tier).kept)

    def share_counts(self, tier: Tier) -> list[ShareCounts]:
        """How a pool's shares are used right now, OTHERS last; none where there are no shares."""
        fair = self._state(tier).fair
        if fair is None:
            return []
        return [
            ShareCounts(share.tenant, share.weight, fair.held[at], fair.evictable(at), share.quota_slots.get(tier))
            for at, share in enumerate(self._allocator.shares)
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state(self, tier: Tier) -> TierSlots:
        state = self._tiers.get(tier)
        if state is None:
            raise LedgerError(f"this instance has no {tier.name} pool with slots")
        return state

    def _follow(self, delta: Delta) -> None:
        """Keep free lists, what is kept and recency in step with the fold."""
        for change in delta.withdrawn:
            if change.slot is not None:
                self._tiers[change.tier].vacate(change.hash, change.slot, self.applied)
        for change in delta.added:
            if change.slot is not None:
                self._tiers[change.tier].allocated.discard(change.slot)


def _created(
    namespace: NamespaceId,
    tier: Tier,
    parent: SequenceHash,
    start: int,
    hashes: bytes,
    slots: Sequence[int],
    begin: int,
    end: int,
) -> Iterator[BlocksCreated]:
    """The events that say that blocks [begin, end) of a run were created."""
    for first in range(begin, end, MAX_RUN_BLOCKS):
        last = min(end, first + MAX_RUN_BLOCKS)
        before = SequenceHash(hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES]) if first else parent
        yield BlocksCreated(
            namespace=namespace,
            tier=tier,
            parent=before,
            start=start + first,
            hashes=hashes[first * HASH_BYTES : last * HASH_BYTES],
            slots=pack_slots(slots[first:last]),
        )


def _require_own(entries: Sequence[Held | None], namespace: NamespaceId, tier: Tier) -> None:
    """Refuse a run of which something is held under another namespace. Raises LedgerError."""
    for number, entry in enumerate(entries):
        if entry is not None and entry.namespace != namespace:
            raise LedgerError(
                f"block {number} of {len(entries)} to create in {tier.name} is held there under another namespace; "
                "hash each prompt from"
                " its own namespace's root"
            )


def _longest_run(
    order: Mapping[Tier, Mapping[SequenceHash, Held]], hashes: bytes, namespace: NamespaceId | None
) -> tuple[list[Tier], list[int]]:
    """Tier and slot of each block, from the first hash on, up to one that no tier holds; of a namespace, or of any."""
    tiers: list[Tier] = []
    slots: list[int] = []
    for block in split_hashes(hashes):
        for tier, held in order.items():
            entry = held.get(block)
            if entry is not None and entry.slot is not None and namespace in (None, entry.namespace):
                tiers.append(tier)
                slots.append(entry.slot)
                break
        else:
            break
    return tiers, slots


def _held_of(held: Mapping[SequenceHash, Held], namespace: NamespaceId | None) -> tuple[bytes, bytes]:
    found = [
        (block, entry.slot)
        for block, entry in held.items()
        if entry.slot is not None and namespace in (None, entry.namespace)
    ]
    return b"".join(block for block, _ in found), pack_slots(slot for _, slot in found)
