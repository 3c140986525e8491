"""The fold: an instance's events → what it holds, and the digest that says so in 64 bits.

One fold, three listeners: the manager's free lists and prefix index, the catalog's index and rows, the replay tool's
checks all follow the `Delta` that `evolve` returns. Pools of cluster reach have no owner: a claim on one passes through
the delta and is neither held here nor part of the digest.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, assert_never

import numpy as np

from kvbm.core.codec import ScannedFrame, decode_frame, scanned
from kvbm.core.errors import IllegalEventError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    InstanceStopped,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    UsageRecorded,
    misplaced,
)
from kvbm.core.ids import Epoch, NamespaceId, Reach, SequenceHash, Tier, short, split_hashes, split_slots

_MASK = (1 << 64) - 1
MISPLACED = "start-contradicts-parent"  # the rule of `events.misplaced`


class Held(NamedTuple):
    """One residency.

    Attributes:
        namespace: whose block it is.
        slot: where, or None in a tier whose slots kvbm does not own.
        snapshot: the snapshot of its tier that was current when it was last gained or listed.
    """

    namespace: NamespaceId
    slot: int | None
    snapshot: int


class Change(NamedTuple):
    """One residency gained or lost."""

    tier: Tier
    hash: SequenceHash
    namespace: NamespaceId
    slot: int | None


class Delta(NamedTuple):
    """What one event changed. Lists are in event order; a block that moved is in both `added` and `withdrawn`.

    Attributes:
        added, withdrawn: residencies of this instance.
        claimed, unclaimed: blocks of pools of cluster reach this instance spoke of.
        anomalies: rules the event broke, as (rule, detail), empty for a legal event. Strict, MISPLACED alone: it
            contradicts nothing that is held.
    """

    added: list[Change]
    withdrawn: list[Change]
    claimed: list[Change]
    unclaimed: list[Change]
    anomalies: list[tuple[str, str]]


class TierBlocks(NamedTuple):
    """What one tier holds, by namespace id, and within one in the order it was gained.

    Attributes:
        hashes: packed, 16 bytes a block.
        slots: packed little-endian i64, 8 bytes a block; -1 where kvbm does not own the tier's slots.
        namespaces: runs of blocks of one namespace, as (namespace, blocks).
    """

    hashes: bytes
    slots: bytes
    namespaces: list[tuple[NamespaceId, int]]


class FoldedFrame(NamedTuple):
    """How far a frame was folded.

    Attributes:
        frame: what the frame says of itself.
        folded: events folded, those before the first asked for included; fewer than the frame has if one is illegal, or
            is an InstanceStarted of another epoch than the frame's, which is the caller's to judge.
        anomalies: rules that were broken by events folded nevertheless.
        illegal: strict: why the event after them was refused.
        changed: blocks added, withdrawn, claimed and unclaimed.
    """

    frame: ScannedFrame
    folded: int
    anomalies: list[tuple[str, str]]
    illegal: IllegalEventError | None
    changed: tuple[int, int, int, int]


def residency_mix(tier: int, block_hash: bytes) -> int:
    """64 well-mixed bits of one residency; a digest is the sum of them modulo 2**64.

    Source: the finaliser of SplitMix64, applied to both halves of the hash; checked against tests/golden/digests.json.
    """
    low = int.from_bytes(block_hash[:8], "little")
    high = int.from_bytes(block_hash[8:], "little")
    return _finalise((_finalise((low + 0x9E3779B97F4A7C15 * (tier + 1)) & _MASK) + high) & _MASK)


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Residencies:
    """What one instance holds, by tier.

    `strict` refuses an event that contradicts what is held and changes nothing then: the ledger and `verify` use it.
    Lenient, it applies what makes sense, lists the rest as anomalies and stays usable: a reader that has missed events
    uses it until a snapshot has made it whole.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.epoch: Epoch = Epoch(0)
        self.pools: dict[Tier, PoolStated] = {}
        self.held: dict[Tier, dict[SequenceHash, Held]] = {tier: {} for tier in Tier}
        self.digest = 0
        self.stopped = False
        self._snapshots: dict[Tier, int] = {tier: 0 for tier in Tier}  # the snapshot last begun in a tier
        self._listed: dict[Tier, int] = {tier: 0 for tier in Tier}  # blocks it has listed so far
        self._open: dict[Tier, bool] = {tier: False for tier in Tier}  # it has begun and not ended
        self._whole: dict[Tier, bool] = {tier: False for tier in Tier}  # nothing was missed since a snapshot ended
        self._occupied: dict[Tier, dict[int, SequenceHash]] = {tier: {} for tier in Tier}

    def evolve(self, event: Event) -> Delta:
        """Apply one event.

        Raises: IllegalEventError: strict, and the event contradicts what is held; nothing has changed then.
        """
        delta = Delta([], [], [], [], [])
        if self.strict:
            self._check(event)
        match event:
            case InstanceStarted():
                self._begin(event, delta)
            case BlocksCreated():
                if why := misplaced(event.parent, event.start):
                    delta.anomalies.append((MISPLACED, f"{event.tier.name}: {why}"))
                self._add(event.namespace, event.tier, event.hashes, event.slots, delta)
            case BlocksMigrated():
                self._move(event, delta)
            case BlocksEvicted():
                self._withdraw(event.namespace, event.tier, event.hashes, delta)
            case ResidenciesListed():
                self._state(event, delta)
            case SnapshotEnded():
                self._end_snapshot(event, delta)
            case InstanceStopped():
                self._end(delta)
            case UsageRecorded():
                pass  # it changes nothing that is held
            case _:
                assert_never(event)
        return delta

    def evolve_frame(self, data: bytes, at: int = 0, first: int = 0) -> FoldedFrame:
        """Apply the events of the frame at a position, from index `first` on, as far as they are legal.

        Raises: FrameError: no good frame is there; nothing has changed then.
        """
        frame, end = decode_frame(data, at)
        folded, anomalies, illegal, changed = min(first, len(frame.events)), list[tuple[str, str]](), None, [0, 0, 0, 0]
        for event in frame.events[first:]:
            if isinstance(event, InstanceStarted) and event.epoch != frame.epoch:
                break
            try:
                delta = self.evolve(event)
            except IllegalEventError as error:
                illegal = error
                break
            folded += 1
            anomalies += delta.anomalies
            changed = [count + len(changes) for count, changes in zip(changed, delta[:4], strict=True)]
        added, withdrawn, claimed, unclaimed = changed
        return FoldedFrame(scanned(frame, at, end), folded, anomalies, illegal, (added, withdrawn, claimed, unclaimed))

    def tier_digest(self, tier: Tier) -> int:
        """What one tier holds, in 64 bits; `digest` is the sum of all tiers' modulo 2**64."""
        return sum(residency_mix(tier, block) for block in self.held[tier]) & _MASK

    def count(self, tier: Tier | None = None) -> int:
        """How many residencies are held, in a tier or all together."""
        return sum(len(held) for held in self.held.values()) if tier is None else len(self.held[tier])

    def blocks(self, tier: Tier) -> TierBlocks:
        """What a tier holds, as columns."""
        held = sorted(self.held[tier].items(), key=lambda entry: entry[1].namespace)
        slots = [-1 if one.slot is None else one.slot for _, one in held]
        return TierBlocks(
            b"".join(block for block, _ in held),
            np.array(slots, dtype="<i8").tobytes(),
            list(Counter(one.namespace for _, one in held).items()),
        )

    def slot_owner(self, tier: Tier, slot: int) -> SequenceHash | None:
        """The block a slot holds, if any."""
        return self._occupied[tier].get(slot)

    def is_cluster(self, tier: Tier) -> bool:
        """Whether the tier's pool belongs to the cluster, so that its blocks are claims and not residencies."""
        pool = self.pools.get(tier)
        return pool.reach == Reach.CLUSTER if pool else tier == Tier.OBJECT

    def is_whole(self, tier: Tier) -> bool:
        """Whether this reader is in step in a tier: a snapshot has ended here and no event was missed since."""
        return self._whole[tier]

    def miss_events(self) -> None:
        """Say that events were missed: every tier is suspect until a completed snapshot begins and ends from
        here on.
        """
        for tier in Tier:
            self._open[tier] = self._whole[tier] = False

    def begin_blind(self, epoch: Epoch) -> Delta:
        """Enter an epoch whose start was missed: nothing is held, every tier is suspect."""
        delta = Delta([], [], [], [], [])
        self._begin(InstanceStarted(epoch=epoch), delta)
        return delta

    # -- the work of each event -------------------------------------------------------------------------------------

    def _begin(self, event: InstanceStarted, delta: Delta) -> None:
        self._drop_all(delta)
        self.epoch = event.epoch
        self.pools = {pool.tier: pool for pool in event.pools}
        self.stopped = False
        for tier in Tier:
            self._snapshots[tier] = self._listed[tier] = 0
            self._open[tier] = self._whole[tier] = False

    def _end(self, delta: Delta) -> None:
        self.stopped = True

    def _drop_all(self, delta: Delta) -> None:
        for tier in Tier:
            for block in list(self.held[tier]):
                self._lose(tier, block, delta)

    def _add(self, namespace: NamespaceId, tier: Tier, hashes: bytes, slots: bytes, delta: Delta) -> None:
        for block, slot in zip(split_hashes(hashes), _slots(hashes, slots), strict=True):
            if self.is_cluster(tier):
                delta.claimed.append(Change(tier, block, namespace, None))
            elif block in self.held[tier]:
                self._relist(tier, block, namespace, slot, delta, "created-twice")
            else:
                self._gain(tier, block, namespace, slot, delta)

    def _move(self, event: BlocksMigrated, delta: Delta) -> None:
        self._add(event.namespace, event.target, event.hashes, event.slots, delta)
        if isinstance(event.source, Tier) and not event.kept:
            self._withdraw(event.namespace, event.source, event.hashes, delta)
        elif isinstance(event.source, Tier) and self.is_cluster(event.source):  # it was read there, so it is there
            for block in split_hashes(event.hashes):
                delta.claimed.append(Change(event.source, block, event.namespace, None))

    def _withdraw(self, namespace: NamespaceId, tier: Tier, hashes: bytes, delta: Delta) -> None:
        for block in split_hashes(hashes):
            if self.is_cluster(tier):
                delta.unclaimed.append(Change(tier, block, namespace, None))
            elif block in self.held[tier]:
                self._lose(tier, block, delta)
            else:
                delta.anomalies.append(("evicted-unheld", f"{tier.name} does not hold {short(block)}"))

    def _state(self, event: ResidenciesListed, delta: Delta) -> None:
        tier = event.tier
        if event.snapshot != self._snapshots[tier]:
            self._snapshots[tier], self._listed[tier], self._open[tier] = event.snapshot, 0, True
        for block, slot in zip(split_hashes(event.hashes), _slots(event.hashes, event.slots), strict=True):
            self._listed[tier] += 1
            if self.is_cluster(tier):
                delta.claimed.append(Change(tier, block, event.namespace, None))
            elif block in self.held[tier]:
                self._relist(tier, block, event.namespace, slot, delta, None)
            else:
                if self._whole[tier]:
                    delta.anomalies.append(("snapshot-added", f"{tier.name} had not held {short(block)}"))
                self._gain(tier, block, event.namespace, slot, delta)

    def _end_snapshot(self, event: SnapshotEnded, delta: Delta) -> None:
        tier = event.tier
        if event.snapshot != self._snapshots[tier]:
            self._snapshots[tier], self._listed[tier], self._open[tier] = event.snapshot, 0, True
        if not self._open[tier] or self._listed[tier] != event.count:
            detail = (
                f"{tier.name} snapshot {event.snapshot} listed {self._listed[tier]} blocks here, {event.count} "
                "at "
                "its source"
            )
            delta.anomalies.append(("snapshot-incomplete", detail))
            return
        for block in [block for block, held in self.held[tier].items() if held.snapshot != event.snapshot]:
            if self._whole[tier] and event.count:
                detail = f"{tier.name} snapshot {event.snapshot} had not listed {short(block)}"
                delta.anomalies.append(("snapshot-withdrew", detail))
            self._lose(tier, block, delta)
        self._open[tier], self._whole[tier] = False, True

    def _gain(self, tier: Tier, block: SequenceHash, namespace: NamespaceId, slot: int | None, delta: Delta) -> None:
        if slot is not None:
            self._vacate(tier, slot, delta)
            self._occupied[tier][slot] = block
        self.held[tier][block] = Held(namespace, slot, self._snapshots[tier])
        self.digest = (self.digest + residency_mix(tier, block)) & _MASK
        delta.added.append(Change(tier, block, namespace, slot))

    def _lose(self, tier: Tier, block: SequenceHash, delta: Delta) -> None:
        held = self.held[tier].pop(block)
        if held.slot is not None:
            del self._occupied[tier][held.slot]
        self.digest = (self.digest - residency_mix(tier, block)) & _MASK
        delta.withdrawn.append(Change(tier, block, held.namespace, held.slot))

    def _relist(
        self, tier: Tier, block: SequenceHash, namespace: NamespaceId, slot: int | None, delta: Delta, rule: str | None
    ) -> None:
        held = self.held[tier][block]
        if rule is not None:
            delta.anomalies.append((rule, f"{tier.name} already holds {short(block)}"))
        if slot != held.slot or namespace != held.namespace:
            delta.anomalies.append(
                ("moved-silently", f"{tier.name} held {short(block)} in slot {held.slot}, not {slot}")
            )
            if held.slot is not None:
                del self._occupied[tier][held.slot]
            if slot is not None:
                self._vacate(tier, slot, delta)
                self._occupied[tier][slot] = block
        self.held[tier][block] = Held(namespace, slot, self._snapshots[tier])

    def _vacate(self, tier: Tier, slot: int, delta: Delta) -> None:
        other = self._occupied[tier].get(slot)
        if other is not None:
            delta.anomalies.append(("slot-reused", f"{tier.name} slot {slot} still held {short(other)}"))
            self._lose(tier, other, delta)

    # -- what strict refuses, before anything changes -----------------------------------------------------------------

    def _check(self, event: Event) -> None:
        if isinstance(event, InstanceStarted):
            if event.epoch <= self.epoch:
                raise IllegalEventError("epoch-not-newer", f"epoch {event.epoch} begins after epoch {self.epoch}")
            return
        if not self.epoch:
            raise IllegalEventError("not-started", f"{type(event).__name__} before InstanceStarted")
        if self.stopped:
            raise IllegalEventError("already-stopped", f"{type(event).__name__} after InstanceStopped")
        match event:
            case BlocksCreated():
                self._check_gain("created-twice", event.tier, event.hashes, event.slots)
            case BlocksMigrated():
                self._check_move(event)
            case BlocksEvicted():
                self._check_held("evicted-unheld", event.tier, event.hashes, event.namespace)
            case ResidenciesListed():
                self._check_state(event)
            case SnapshotEnded():
                self._check_snapshot(event)

    def _check_move(self, event: BlocksMigrated) -> None:
        if event.source == event.target:
            raise IllegalEventError("moved-nowhere", f"source and target are both {event.target.name}")
        if isinstance(event.source, Tier):
            self._check_held("migrated-unheld", event.source, event.hashes, event.namespace)
        self._check_gain("migrated-twice", event.target, event.hashes, event.slots)

    @staticmethod
    def _blocks_of_run(tier: Tier, hashes: bytes) -> list[SequenceHash]:
        """The blocks of a run. Raises IllegalEventError: it names one twice."""
        blocks = split_hashes(hashes)
        if len(set(blocks)) != len(blocks):
            raise IllegalEventError("repeated-in-run", f"a run in {tier.name} names a block twice")
        return blocks

    def _check_held(self, rule: str, tier: Tier, hashes: bytes, namespace: NamespaceId) -> None:
        blocks = self._blocks_of_run(tier, hashes)
        if self.is_cluster(tier):
            return
        for block in blocks:
            held = self.held[tier].get(block)
            if held is None:
                raise IllegalEventError(rule, f"{tier.name} does not hold {short(block)}")
            if held.namespace != namespace:
                detail = f"{short(block)} belongs to namespace {short(held.namespace)}, not {short(namespace)}"
                raise IllegalEventError("foreign-namespace", detail)

    def _check_gain(self, rule: str, tier: Tier, hashes: bytes, slots: bytes) -> None:
        blocks = self._blocks_of_run(tier, hashes)
        if self.is_cluster(tier):
            return
        for block in blocks:
            if block in self.held[tier]:
                raise IllegalEventError(rule, f"{tier.name} already holds {short(block)}")
        self._check_slots(tier, blocks, slots)

    def _check_slots(self, tier: Tier, blocks: list[SequenceHash], slots: bytes) -> None:
        numbers = split_slots(slots)
        if len(set(numbers)) != len(numbers):
            raise IllegalEventError("repeated-in-run", f"a run in {tier.name} names a slot twice")
        pool = self.pools.get(tier)
        for block, slot in zip(blocks, numbers, strict=False):
            if pool is not None and slot >= pool.slots:
                raise IllegalEventError("slot-outside", f"{tier.name} has {pool.slots} slots, not slot {slot}")
            other = self._occupied[tier].get(slot)
            if other is not None and other != block:
                raise IllegalEventError("slot-reused", f"{tier.name} slot {slot} still holds {short(other)}")

    def _check_state(self, event: ResidenciesListed) -> None:
        tier = event.tier
        blocks = split_hashes(event.hashes)
        if len(set(blocks)) != len(blocks):
            raise IllegalEventError("repeated-in-run", f"a run in {tier.name} names a block twice")
        self._check_snapshot_number(tier, event.snapshot)
        if self.is_cluster(tier):
            return
        for block, slot in zip(blocks, _slots(event.hashes, event.slots), strict=True):
            held = self.held[tier].get(block)
            if held is None and self._whole[tier]:
                raise IllegalEventError(
                    "snapshot-added", f"{tier.name} snapshot states {short(block)}, which it does not hold"
                )
            if held is not None and (held.slot != slot or held.namespace != event.namespace):
                detail = f"{tier.name} snapshot states {short(block)} in slot {slot}; it is in slot {held.slot}"
                raise IllegalEventError("moved-silently", detail)
        self._check_slots(tier, blocks, event.slots)

    def _check_snapshot_number(self, tier: Tier, number: int) -> None:
        current = self._snapshots[tier]
        if number < current or (number == current and not self._open[tier]):
            raise IllegalEventError("snapshot-went-back", f"{tier.name} snapshot {number} after snapshot {current}")

    def _check_snapshot(self, event: SnapshotEnded) -> None:
        tier, current = event.tier, self._snapshots[event.tier]
        self._check_snapshot_number(tier, event.snapshot)
        listed = self._listed[tier] if event.snapshot == current else 0
        if listed != event.count:
            detail = f"{tier.name} snapshot {event.snapshot} listed {listed} blocks, its end says {event.count}"
            raise IllegalEventError("snapshot-incomplete", detail)
        unlisted = [block for block, held in self.held[tier].items() if held.snapshot != event.snapshot]
        if unlisted and not (event.count == 0 and event.snapshot > current):
            detail = (
                f"{tier.name} snapshot {event.snapshot} skipped {len(unlisted)} held blocks, the first "
                f"{short(unlisted[0])}"
            )
            raise IllegalEventError("snapshot-withdrew", detail)


def _slots(hashes: bytes, slots: bytes) -> list[int] | list[None]:
    return split_slots(slots) if slots else [None] * (len(hashes) // 16)
