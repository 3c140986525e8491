"""Decide: commands → results, events, copies. The readable ledger; its native twin does the same in production.

The caller holds one lock around every call. A command that changes residencies is turned into events, which the fold applies at
once and which wait in order, each with its offset, until `take_frames` hands them out. Everything else here (pins, what is kept,
recency, free lists, copies in flight) is soft state and never an event. Runs go in and out packed: 16 bytes a hash, 4
little-endian bytes a slot, 1 byte a tier.

A slot is in one of these states, and only its owner may touch its bytes:

    free ──allocate──► allocated ──create / end_copy──► held ──evict──► free, or orphaned while pinned ──unpin──► free
                           └────────release──► free

Nothing takes the events for as long as the journal's device hangs, and the engine is not held up for it: events wait in
bounded room. One that does not fit any more is an *overflow*: the stream ends there with InstanceStopped, commands go on without
being recorded, and durable tiers take nothing, because nobody would ever know of it. `restart` begins another epoch in place,
with a round of all that is held, and with it the recording again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from kvbm.core.codec import STOPPED_BYTES, FrameBytes, cut_frames, encode_frame, encoded_bytes
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
from kvbm.core.fold import Delta, Residencies
from kvbm.core.ids import (
    DURABLE_TIERS,
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
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
from kvbm.core.policy import EVICTION_POLICIES, OTHERS, FairShares, Share

LEAST_EVENT_BYTES = 1 << 20  # room below this would overflow at the first large command
ROUND_LOOKS = 8192  # held slots that one step of a round looks at, at most
NOT_HELD = 0xFF  # in place of a tier, of a block that none holds
HIGHEST_PRIORITY = 100  # of a kept block: never given up


class Match(NamedTuple):
    """The longest run of held blocks, each in its hottest tier.

    Attributes:
        tiers, slots: where block i is, packed; both have `depth` entries.
    """

    depth: int
    tiers: bytes
    slots: bytes


class Allocation(NamedTuple):
    """Slots to write.

    Attributes:
        after: the offset that must be durable before the slots are overwritten; 0 for a tier that dies with the process.
    """

    slots: bytes
    after: Offset


class Copy(NamedTuple):
    """Bytes to move; source and target stay the copy's until it ends.

    Attributes:
        source: a tier, or the instance to fetch from.
        source_slots: packed; empty when the source has no slots of ours.
        target_slots: packed; empty for a target without slots.
        after: offset that must be durable before the target slots are overwritten.
        epoch: in which `after` counts.
    """

    id: int
    namespace: NamespaceId
    source: Tier | InstanceId
    target: Tier
    hashes: bytes
    source_slots: bytes
    target_slots: bytes
    after: Offset
    epoch: Epoch


class Recovered(NamedTuple):
    """A residency a durable tier has kept across a restart."""

    hash: SequenceHash
    namespace: NamespaceId
    slot: int


class TierCounts(NamedTuple):
    """How a pool's slots are used right now."""

    slots: int
    free: int
    held: int
    evictable: int
    allocated: int


class ShareCounts(NamedTuple):
    """How one share of a pool is used right now.

    Attributes:
        held: blocks.
        evictable: of those, what may be evicted.
        quota_slots: blocks it may hold at most, None where there is no such limit.
    """

    tenant: str
    weight: int
    held: int
    evictable: int
    quota_slots: int | None


class _Kept(NamedTuple):
    """What `keep` has said of a block. The block with the least of these is given up first."""

    priority: int
    until_s: float


class _RoundLeft(NamedTuple):
    """What is left to state of a tier's round.

    Attributes:
        at: the slot it goes on with.
        stated: blocks stated so far.
    """

    tier: Tier
    at: int
    stated: int


class _TierState:
    """The slots of one pool."""

    def __init__(self, pool: PoolStated, eviction: str, fair: FairShares | None) -> None:
        self.pool = pool
        self.fair = fair
        self.policy = EVICTION_POLICIES[eviction](pool.slots) if fair is None else fair
        self.unused = 0  # slots from here on were never used
        self.free: deque[int] = deque()
        self.free_after: dict[int, Offset] = {}  # slots → offset after the event that last withdrew a block from them
        self.allocated: set[int] = set()
        self.receiving: set[int] = (
            set()
        )  # those of `allocated` that a copy writes to: they are the copy's, nobody else's
        self.orphaned: set[int] = set()  # withdrawn while pinned
        self.pins: dict[int, int] = {}
        self.kept: dict[int, _Kept] = {}  # by slot
        self.arriving: set[SequenceHash] = set()  # on their way here by a copy

    def free_count(self) -> int:
        return len(self.free) + self.pool.slots - self.unused

    def is_evictable(self, slot: int) -> bool:
        """Whether the block held in a slot is neither pinned nor kept."""
        return slot not in self.pins and slot not in self.kept

    def yielding(self) -> list[int]:
        """Slots whose kept blocks are given up when an allocation would be short, the first to go first."""
        slots = [s for s, kept in self.kept.items() if s not in self.pins and kept.priority < HIGHEST_PRIORITY]
        return sorted(slots, key=lambda slot: (self.kept[slot], slot))

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
        self.residencies = Residencies(strict=True)
        self.applied = Offset(0)  # offset the next event gets
        self.overflowed = False  # the stream has ended for want of room
        self._shares = _shares(shares)
        self._share_of: dict[NamespaceId, int] = {}  # those that were assigned; the last share is everybody else's
        self._tiers = {
            pool.tier: _TierState(pool, eviction, self._fair(pool, eviction)) for pool in pools if pool.slots
        }
        self._event_bytes = event_bytes
        self._waiting: list[Event] = []
        self._digests: list[int] = []  # after each waiting event
        self._waiting_bytes = 0  # of waiting events, those of `start` not counted
        self._copies: dict[int, Copy] = {}
        self._next_copy = 1
        self._round = 0
        self._round_left: deque[_RoundLeft] = deque()
        self._started: InstanceStarted | None = None

    def assign(self, namespace: NamespaceId, tenant: str) -> None:
        """Say whose a namespace is, before any block of it is held. A tenant without a share of its own is among the others.

        Raises: LedgerError: blocks of it are counted for another share already.
        """
        if not self._shares:
            return
        names = [share.tenant for share in self._shares]
        share = names.index(tenant) if tenant in names else len(names) - 1
        if self._share(namespace) != share and any(
            entry.namespace == namespace for held in self.residencies.held.values() for entry in held.values()
        ):
            raise LedgerError(
                f"namespace {namespace.hex()[:8]} holds blocks already, so it cannot be assigned to tenant {tenant!r};"
                " assign it before its first block"
            )
        self._share_of[namespace] = share

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
    ) -> None:
        """Begin an epoch: InstanceStarted, then a round of what durable tiers have kept. Never an overflow: pools bound it.

        Args:
            recovered: blocks in the order they are to be stated, which is the order they count as used in.

        Raises: LedgerError: the ledger has started already, or a recovered slot does not exist.
        """
        if self.applied:
            raise LedgerError(f"the ledger is in epoch {self.epoch} already; restart begins another")
        started = InstanceStarted(
            epoch=epoch, pools=self.pools, namespaces=tuple(namespaces), topology=tuple(topology), engine=engine,
            version=version,
        )  # fmt: skip
        self._record(started, counted=False)
        self._started = started
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
                        ), counted=False,
                    )  # fmt: skip
            self._record(RoundEnded(tier=tier, round=self._round, count=len(kept)), counted=False)
            for entry in kept:
                state.policy.gain(entry.hash, pinned=False)

    def restart(self, epoch: Epoch) -> Offset:
        """Begin another epoch in place, whether the last one was stopped, has overflowed or goes on.

        InstanceStarted as `start` had it, then a whole first round of what every tier holds now: by namespace, within one by slot.
        It is never an overflow, since pools bound it. What is no event stays as it is, copies in flight among it; a round under way
        is dropped. Offsets begin again at 0. A slot of a durable tier that holds nothing now may have held something as far as
        the last epoch's journal goes, so it counts as withdrawn when this round ends.

        Returns: the offset after the round; once it is durable, so is all that is held.
        Raises: LedgerError: the ledger has not started, events wait, or the epoch is not newer; nothing has changed then.
        """
        if self._started is None:
            raise LedgerError("the ledger has not started, so it cannot begin another epoch")
        if self._waiting:
            raise LedgerError(
                f"{len(self._waiting)} events of epoch {self.epoch} wait; take them before another begins"
            )
        if epoch <= self.epoch:
            raise LedgerError(f"epoch {epoch} is not newer than epoch {self.epoch}")
        held = {tier: dict(self.residencies.held[tier]) for tier in self._tiers}
        self._started = msgspec.structs.replace(self._started, epoch=epoch)
        self.applied = Offset(0)
        self.overflowed = False
        self._round_left.clear()
        self._record(self._started, counted=False, heard=False)
        self._round = 1
        for tier in self._tiers:
            entries = sorted((e.namespace, e.slot, block) for block, e in held[tier].items() if e.slot is not None)
            for namespace, group in groupby(entries, key=lambda entry: entry[0]):
                blocks = list(group)
                for at in range(0, len(blocks), MAX_RUN_BLOCKS):
                    run = blocks[at : at + MAX_RUN_BLOCKS]
                    self._record(
                        ResidenciesStated(
                            namespace=namespace, tier=tier, round=self._round,
                            hashes=b"".join(block for _, _, block in run), slots=pack_slots(slot for _, slot, _ in run),
                        ), counted=False, heard=False,
                    )  # fmt: skip
            self._record(RoundEnded(tier=tier, round=self._round, count=len(entries)), counted=False, heard=False)
        for tier, state in self._tiers.items():
            if tier in DURABLE_TIERS:
                unheld = (slot for slot in range(state.unused) if self.residencies.slot_owner(tier, slot) is None)
                state.free_after = dict.fromkeys(unheld, self.applied)
        return self.applied

    def stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """End the stream cleanly; nothing may be recorded after it but by `restart`. Nothing to do after an overflow."""
        if not self.overflowed:
            self._record(InstanceStopped(reason=reason), counted=False)  # its room is always kept

    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]:
        """The events recorded since the last call, cut into frames; [] when there are none.

        Raises: LayoutError: the instance's name does not fit a frame; the events wait on.
        """
        first = Offset(self.applied - len(self._waiting))
        frames = [
            FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, encode_frame(frame))
            for frame in cut_frames(instance, self.epoch, first, self._waiting, self._digests, wall_time_ns)
        ]
        self._waiting, self._digests, self._waiting_bytes = [], [], 0
        return frames

    # -- what an engine asks ------------------------------------------------------------------------------------------

    def match(self, hashes: bytes, pinned: bool = False, hottest: Tier = Tier.HBM) -> Match:
        """The longest run of held blocks from the first hash on.

        Args:
            pinned: whether the caller gets a pin on each block found in the tier `hottest` itself; else nothing is pinned or
                counts as used.
            hottest: tiers hotter than this one are not looked at.
        """
        tiers: list[Tier] = []
        slots: list[int] = []
        order = [(tier, self.residencies.held[tier]) for tier in sorted(self._tiers) if tier >= hottest]
        for block in split_hashes(hashes):
            for tier, held in order:
                entry = held.get(block)
                if entry is not None and entry.slot is not None:
                    tiers.append(tier)
                    slots.append(entry.slot)
                    break
            else:
                break
        if pinned:
            local = [slot for tier, slot in zip(tiers, slots, strict=True) if tier == hottest]
            if local:
                self.pin(hottest, pack_slots(local))
        return Match(len(tiers), bytes(tiers), pack_slots(slots))

    def holders(self, hashes: bytes, hottest: Tier = Tier.HBM) -> bytes:
        """For each block the hottest tier with slots that holds it, one byte each, NOT_HELD where none does.

        Unlike `match` it goes on where a block is missing. Nothing is pinned or counts as used.

        Args:
            hottest: tiers hotter than this one are not looked at.
        """
        order = [(tier, self.residencies.held[tier]) for tier in sorted(self._tiers) if tier >= hottest]
        return bytes(next((tier for tier, held in order if block in held), NOT_HELD) for block in split_hashes(hashes))

    def holds(self, tier: Tier, block: SequenceHash) -> bool:
        """Whether a tier of this instance holds the block."""
        return block in self.residencies.held[tier]

    def lacking(self, tier: Tier, hashes: bytes) -> bytes:
        """The hashes of a run that the tier does not hold, in order."""
        held = self.residencies.held[tier]
        return b"".join(block for block in split_hashes(hashes) if block not in held)

    def held(self, tier: Tier) -> bytes:
        """The hashes of all blocks the tier holds, in the order it gained them."""
        return b"".join(self.residencies.held[tier])

    def pin(self, tier: Tier, slots: bytes) -> None:
        """Forbid the eviction of held blocks; counted. Each pin is a use.

        Raises: LedgerError: a slot holds no block; nothing has changed then.
        """
        state = self._state(tier)
        given = split_slots(slots)
        blocks = [self.residencies.slot_owner(tier, slot) for slot in given]
        for slot, block in zip(given, blocks, strict=True):
            if block is None:
                raise LedgerError(f"{tier.name} slot {slot} holds no block, so it cannot be pinned")
        for slot, block in zip(given, blocks, strict=True):
            assert block is not None
            state.pins[slot] = state.pins.get(slot, 0) + 1
            state.policy.hold(block)

    def unpin(self, tier: Tier, slots: bytes) -> None:
        """Take back one pin of each slot. Slots in prompt order: the deepest block becomes the first to be evicted.

        Raises: LedgerError: a slot is not pinned, or named more often than it is; nothing has changed then.
        """
        state = self._state(tier)
        given = split_slots(slots)
        named: Counter[int] = Counter()
        for slot in reversed(given):
            named[slot] += 1
            if state.pins.get(slot, 0) < named[slot]:
                raise LedgerError(f"{tier.name} slot {slot} is not pinned, so it cannot be unpinned")
        for slot in reversed(given):
            left = state.pins[slot] - 1
            if left:
                state.pins[slot] = left
                continue
            del state.pins[slot]
            block = self.residencies.slot_owner(tier, slot)
            if block is not None:
                if slot not in state.kept:
                    state.policy.free(block)
            elif slot in state.orphaned:
                state.orphaned.discard(slot)
                state.free.append(slot)

    def allocate(self, tier: Tier, count: int, namespace: NamespaceId | None = None) -> Allocation | None:
        """Slots to write, evicting what the policy gives up and, where that is too little, what yields of what is kept.

        Args:
            namespace: whose blocks will be written, as far as it is known: where tenants have shares, so many more count as theirs.
        Returns: None when pins and kept blocks leave too few, or after an overflow in a durable tier.
        """
        state = self._state(tier)
        if self._is_closed(tier):
            return None
        short_by = count - state.free_count()
        if short_by > 0 and not self._make_room(tier, state, short_by, namespace, count):
            return None
        if self._is_closed(tier):  # by that very eviction: a slot whose withdrawal nobody hears of must not be written
            return None
        slots, after = state.take(count)
        return Allocation(pack_slots(slots), after if tier in DURABLE_TIERS else Offset(0))

    def _make_room(self, tier: Tier, state: _TierState, count: int, namespace: NamespaceId | None, coming: int) -> bool:
        """Evict so many blocks: the policy's victims, then kept blocks. False and no change when there are too few."""
        from_kept = max(0, count - len(state.policy))
        yielding = state.yielding() if from_kept else []
        if len(yielding) < from_kept:
            return False
        owners = [self.residencies.slot_owner(tier, slot) for slot in yielding[:from_kept]]
        given_up = [block for block in owners if block is not None]
        if state.fair is None or namespace is None:
            victims = state.policy.victims(count - from_kept)
        else:
            victims = state.fair.victims(count - from_kept, self._share(namespace), coming)
        self._evict(tier, victims + given_up, EvictReason.CAPACITY)
        return True

    def release(self, tier: Tier, slots: bytes) -> None:
        """Give back allocated slots that hold no block yet.

        Raises: LedgerError: a slot is not allocated, or is a copy's, or is named twice; nothing has changed then.
        """
        state = self._state(tier)
        given = split_slots(slots)
        for at, slot in enumerate(given):
            try:
                _require_own(state, slot, "it cannot be released")
            except LedgerError:
                state.allocated.update(given[:at])
                raise
            state.allocated.discard(slot)
        state.free.extend(given)

    def create(
        self, namespace: NamespaceId, tier: Tier, parent: SequenceHash, start: int, hashes: bytes, slots: bytes
    ) -> bytes:
        """Declare allocated slots full; they are pinned for the caller.

        Returns: the slot that holds each block, packed. Where the hash was held already that is the holder's, now pinned once
            more, and the slot given goes back to the pool.
        Raises: LedgerError: a slot is not allocated or is a copy's, counts differ, or a hash or a slot is given twice; nothing
            has changed then.
        """
        state = self._state(tier)
        blocks, given = split_hashes(hashes), split_slots(slots)
        if len(blocks) != len(given):
            raise LedgerError(f"{len(blocks)} hashes for {len(given)} slots; give one slot a block")
        if len(set(blocks)) != len(blocks) or len(set(given)) != len(given):
            raise LedgerError(f"{len(blocks)} blocks to create in {tier.name} name a hash or a slot twice")
        for slot in given:
            _require_own(state, slot, "no block can be created in it")
        held = self.residencies.held[tier]
        known = [block in held for block in blocks]
        at = 0
        for repeated, group in groupby(known):
            end = at + len(list(group))
            if repeated:
                self.release(tier, pack_slots(given[at:end]))
            else:
                for first in range(at, end, MAX_RUN_BLOCKS):
                    last = min(end, first + MAX_RUN_BLOCKS)
                    before = blocks[first - 1] if first else parent
                    self._record(
                        BlocksCreated(
                            namespace=namespace, tier=tier, parent=before if start + first else NO_PARENT,
                            start=start + first, hashes=hashes[first * HASH_BYTES : last * HASH_BYTES],
                            slots=pack_slots(given[first:last]),
                        )
                    )  # fmt: skip
            at = end
        fresh = [block for block, repeated in zip(blocks, known, strict=True) if not repeated]
        self._gain_pinned(tier, fresh)
        self.pin(tier, self._slots_of(tier, [b for b, repeated in zip(blocks, known, strict=True) if repeated]))
        return self._slots_of(tier, blocks)

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

    def claim(self, tier: Tier, namespace: NamespaceId, hashes: bytes, finder: InstanceId) -> None:
        """Say that a pool of cluster reach has these blocks: somebody's bytes were found there.

        Args:
            finder: the instance that says so; nobody knows any more who brought them.
        """
        if not self.residencies.is_cluster(tier):
            raise LedgerError(f"{tier.name} is not a pool of cluster reach; its blocks are created or copied")
        self._record(
            BlocksMigrated(
                namespace=namespace, source=finder, target=tier, kept=True, cause=MigrateCause.OFFLOAD, hashes=hashes
            )
        )

    def keep(self, tier: Tier, hashes: bytes, until_s: float, priority: int = 0) -> int:
        """Forbid the eviction of those blocks of a run that are held, for a time.

        They do not count as evictable. Where an allocation would be short all the same they are given up: lowest priority
        first, then the earliest time, then the lowest slot; priority 100 never. To be kept is a use of a block that was
        evictable. Keeping a block again takes the later time and the higher priority.

        Args:
            until_s: on the clock that `expire` is told.
            priority: 0 to 100.
        Returns: how many of the run are held.
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
            slot = held[block].slot if block in held else None
            if slot is None:
                continue
            if state.is_evictable(slot):
                state.policy.hold(block)
            before = state.kept.get(slot, _Kept(priority, until_s))
            state.kept[slot] = _Kept(max(priority, before.priority), max(until_s, before.until_s))
            count += 1
        return count

    def expire(self, now_s: float) -> int:
        """Let go of kept blocks whose time has come, hottest tier first, lowest slot first; returns how many."""
        count = 0
        for tier in sorted(self._tiers):
            state = self._tiers[tier]
            for slot in sorted(slot for slot, kept in state.kept.items() if kept.until_s <= now_s):
                del state.kept[slot]
                count += 1
                block = self.residencies.slot_owner(tier, slot)
                if block is not None and state.is_evictable(slot):
                    state.policy.free(block)
        return count

    # -- copies -------------------------------------------------------------------------------------------------------

    def begin_copy(self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes) -> Copy | None:
        """Plan a copy of those blocks that the source has under this namespace and the target lacks.

        Both ends are the copy's from now on. Blocks already on their way, and repeats, are left out. When the target is short,
        the run is cut to what fits.
        Returns: None when nothing is to be copied or nothing fits, or after an overflow for a durable target.
        """
        if self._is_closed(target):
            return None
        state = self._tiers.get(target)
        blocks = list(dict.fromkeys(split_hashes(hashes)))
        if isinstance(source, Tier) and source in self._tiers:
            held = self.residencies.held[source]
            blocks = [b for b in blocks if (entry := held.get(b)) is not None and entry.namespace == namespace]
        after = Offset(0)
        target_slots = b""
        if state is not None:
            blocks = [b for b in blocks if b not in self.residencies.held[target] and b not in state.arriving]
            blocks = blocks[: min(state.room(), self._quota_room(target, state, namespace))]
        if not blocks:
            return None
        source_slots = self._pin_source(source, blocks)
        if state is not None:
            self._evict_beyond_quota(target, state, namespace, len(blocks))
            allocation = self.allocate(target, len(blocks), namespace)
            if allocation is None:  # the room was counted; making it was an overflow
                if isinstance(source, Tier) and source_slots:
                    self.unpin(source, source_slots)
                return None
            target_slots, after = allocation
            state.arriving.update(blocks)
            state.receiving.update(split_slots(target_slots))
        copy = Copy(
            self._next_copy, namespace, source, target, b"".join(blocks), source_slots, target_slots, after, self.epoch
        )
        self._next_copy += 1
        self._copies[copy.id] = copy
        return copy

    def _pin_source(self, source: Tier | InstanceId, blocks: list[SequenceHash]) -> bytes:
        if not isinstance(source, Tier) or source not in self._tiers:
            return b""
        slots = self._slots_of(source, blocks)
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
        target_slots = split_slots(copy.target_slots)
        state.receiving.difference_update(target_slots)
        held = self.residencies.held[copy.target]
        fresh: list[SequenceHash] = []
        fresh_slots: list[int] = []
        for block, slot, ok in zip(blocks, target_slots, arrived, strict=True):
            if ok and block not in held:
                fresh.append(block)
                fresh_slots.append(slot)
            else:
                self.release(copy.target, pack_slots([slot]))
        if fresh:
            self._migrate(copy, fresh, fresh_slots, kept, cause)
        self._unpin_source(copy)
        holders = [held[block].slot if ok else None for block, ok in zip(blocks, arrived, strict=True)]
        if pinned:
            created = set(good).difference(fresh)  # meanwhile, by somebody else
            self._gain_pinned(copy.target, fresh)
            self.pin(copy.target, self._slots_of(copy.target, [block for block in good if block in created]))
        else:
            for block in reversed(fresh):
                state.policy.gain(block, pinned=False)
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
        """Begin to restate what is held, tier by tier; `step_round` goes on with it.

        Returns: False when a round is under way already, or after an overflow.
        """
        if self._round_left or self.overflowed:
            return False
        self._round += 1
        self._round_left.extend(_RoundLeft(tier, 0, 0) for tier in self._tiers)
        return True

    def step_round(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """State up to `limit` blocks more, by slot number, a run for each stretch of one namespace; cut here and now.

        A tier's round begins at its first step: what is gained before it is stated, what is gained later needs no statement. A
        step looks at no more than `ROUND_LOOKS` held slots, and at one tier, so that no engine waits for it.

        Returns: whether the round goes on. An overflow ends it.
        """
        if limit < 1:
            raise LedgerError(f"limit is {limit}; a step of a round states at least 1 block")
        if self.overflowed:
            self._round_left.clear()
        if not self._round_left:
            return False
        tier, at, count = self._round_left.popleft()
        runs, at = self._next_runs(tier, at, min(limit, MAX_RUN_BLOCKS))
        for run in runs:
            namespace = self.residencies.held[tier][run[0]].namespace
            self._record(
                ResidenciesStated(
                    namespace=namespace,
                    tier=tier,
                    round=self._round,
                    hashes=b"".join(run),
                    slots=self._slots_of(tier, run),
                )
            )
            count += len(run)
        if at < self._tiers[tier].unused:
            self._round_left.appendleft(_RoundLeft(tier, at, count))
        else:
            self._record(RoundEnded(tier=tier, round=self._round, count=count))
        return bool(self._round_left) and not self.overflowed

    def _next_runs(self, tier: Tier, at: int, limit: int) -> tuple[list[list[SequenceHash]], int]:
        """Blocks to state next, from slot `at` on, and the held slot to go on with, or where used slots end."""
        held, unused = self.residencies.held[tier], self._tiers[tier].unused
        runs: list[list[SequenceHash]] = []
        looks = stated = 0
        for slot in range(at, unused):
            block = self.residencies.slot_owner(tier, slot)
            if block is None:
                continue
            if stated == limit or looks == ROUND_LOOKS:
                return runs, slot
            looks += 1
            if held[block].round == self._round:
                continue  # gained since the round began
            stated += 1
            if runs and held[runs[-1][-1]].namespace == held[block].namespace:
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs, unused

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

    def share_counts(self, tier: Tier) -> list[ShareCounts]:
        """How a pool's shares are used right now, OTHERS last; none where there are no shares."""
        fair = self._state(tier).fair
        if fair is None:
            return []
        return [
            ShareCounts(share.tenant, share.weight, fair.held[at], fair.evictable(at), share.quota_slots.get(tier))
            for at, share in enumerate(self._shares)
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _share(self, namespace: NamespaceId) -> int:
        return self._share_of.get(namespace, len(self._shares) - 1)

    def _fair(self, pool: PoolStated, eviction: str) -> FairShares | None:
        if not self._shares:
            return None

        def share_of(block: SequenceHash) -> int:
            return self._share(self.residencies.held[pool.tier][block].namespace)

        return FairShares(pool.slots, eviction, [share.weight for share in self._shares], share_of)

    def _quota_room(self, tier: Tier, state: _TierState, namespace: NamespaceId) -> int:
        """Blocks a copy may still bring to a tier for a namespace's tenant, if its own give way."""
        if state.fair is None:
            return state.pool.slots
        return max(0, self._quota_left(tier, state.fair, namespace) + state.fair.evictable(self._share(namespace)))

    def _quota_left(self, tier: Tier, fair: FairShares, namespace: NamespaceId) -> int:
        """What is left of a quota, below 0 beyond it; the pool's size where there is none. What is on its way counts."""
        share = self._share(namespace)
        quota = self._shares[share].quota_slots.get(tier)
        if quota is None:
            return self._tiers[tier].pool.slots
        arriving = sum(
            len(copy.target_slots) // SLOT_BYTES
            for copy in self._copies.values()
            if copy.target == tier and self._share(copy.namespace) == share
        )
        return quota - fair.held[share] - arriving

    def _evict_beyond_quota(self, tier: Tier, state: _TierState, namespace: NamespaceId, count: int) -> None:
        """Have a tenant's own blocks give way to `count` more of its blocks, as far as its quota wants it."""
        if state.fair is not None:
            beyond = count - self._quota_left(tier, state.fair, namespace)
            if beyond > 0:
                self._evict(tier, state.fair.victims_of(self._share(namespace), beyond), EvictReason.QUOTA)

    def _state(self, tier: Tier) -> _TierState:
        state = self._tiers.get(tier)
        if state is None:
            raise LedgerError(f"this instance has no {tier.name} pool with slots")
        return state

    def _is_closed(self, tier: Tier) -> bool:
        """Whether a tier takes nothing any more, because nothing about it would be durable."""
        return self.overflowed and tier in DURABLE_TIERS

    def _slots_of(self, tier: Tier, blocks: list[SequenceHash]) -> bytes:
        held = self.residencies.held[tier]
        return pack_slots(slot for block in blocks if (slot := held[block].slot) is not None)

    def _gain_pinned(self, tier: Tier, blocks: list[SequenceHash]) -> None:
        """Pin blocks the tier has just gained, which is no use. The deepest enters the policy first, so that it leaves first."""
        state, held = self._tiers[tier], self.residencies.held[tier]
        for block in reversed(blocks):
            slot = held[block].slot
            if slot is not None:
                state.pins[slot] = state.pins.get(slot, 0) + 1
                state.policy.gain(block, pinned=True)

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

    def _record(self, event: Event, counted: bool = True, heard: bool = True) -> None:
        """Apply an event and let it wait, or overflow.

        Args:
            counted: whether it counts against the room for waiting events.
            heard: whether soft state follows; not where the event only says again what is held.
        """
        size, before = encoded_bytes(event), self.digest
        delta = self.residencies.evolve(event)
        if not self.overflowed:
            if counted and self._waiting_bytes + size + STOPPED_BYTES > self._event_bytes:
                self.overflowed = True
                self._wait(InstanceStopped(reason=StopReason.OVERFLOW), before)
            else:
                self._wait(event, self.digest)
                self._waiting_bytes += size if counted else 0
        if heard:
            self._listen(delta)

    def _wait(self, event: Event, digest: int) -> None:
        self._waiting.append(event)
        self._digests.append(digest)
        self.applied = Offset(self.applied + 1)

    def _listen(self, delta: Delta) -> None:
        """Keep free lists, what is kept and recency in step with the fold."""
        for change in delta.withdrawn:
            state, slot = self._tiers[change.tier], change.slot
            state.policy.lose(change.hash)
            if slot is None:
                continue
            state.kept.pop(slot, None)
            state.free_after[slot] = self.applied
            if state.pins.get(slot):
                state.orphaned.add(slot)
            else:
                state.free.append(slot)
        for change in delta.added:
            state = self._tiers[change.tier]
            if change.slot is not None:
                state.allocated.discard(change.slot)


def _shares(shares: Sequence[Share]) -> tuple[Share, ...]:
    """Shares with that of all others last. Raises LedgerError: a tenant named twice, or a weight that is none."""
    if not shares:
        return ()
    for share in shares:
        if share.weight < 1:
            raise LedgerError(f"the share of tenant {share.tenant!r} has weight {share.weight}; a weight is at least 1")
    named = {share.tenant: share for share in shares}
    if len(named) < len(shares):
        raise LedgerError(f"{len(shares)} shares name {len(named)} tenants; a tenant has one share")
    others = named.pop(OTHERS, Share(OTHERS))
    return (*named.values(), others)


def _require_own(state: _TierState, slot: int, consequence: str) -> None:
    """Raises LedgerError: the slot is not the caller's."""
    name = state.pool.tier.name
    if slot not in state.allocated:
        raise LedgerError(f"{name} slot {slot} is not allocated, so {consequence}")
    if slot in state.receiving:
        raise LedgerError(f"{name} slot {slot} belongs to a copy, so {consequence}")
