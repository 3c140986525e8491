"""How old blocks are when they are wanted again and when they are evicted, by tier, and how many never were: from the
events alone.

A block of a tier is *wanted again* when it is brought from there to a hotter tier, or becomes full in a hotter tier
while this one has it: an engine that owns HBM says so of what it has loaded. Of HBM no event says it, and OBJECT is
everybody's, so one stream does not tell its blocks' ages. What is moved to a colder tier was neither wanted nor
evicted, and neither was what somebody had cleared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvbm.core.codec import decode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    MigrateCause,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.ids import SequenceHash, Tier, split_hashes

AGE_BOUNDS_S = (1, 10, 60, 300, 1800, 7200, 43_200, 259_200)  # of the counts' ages; older ones are counted last
FOLLOWED = (Tier.HBM, Tier.HOST, Tier.NVME)
PRESSURE = frozenset({EvictReason.CAPACITY, EvictReason.TTL, EvictReason.QUOTA})
_SECOND_NS = 1_000_000_000
_LAST_NS = (1 << 63) - 2


class TierAges(msgspec.Struct, frozen=True, array_like=True):
    """What is counted of one tier.

    Ages are counted by AGE_BOUNDS_S, the last count is of older ones: an age of exactly a bound is within it.

    Attributes:
        wanted: by age, how often blocks were wanted again. wanted_s: their ages together.
        evicted: by age, blocks evicted for want of room, or because their time was over. evicted_s: their ages
            together.
        reused, unused: of those, how many had been wanted again, and how many never.
    """

    wanted: tuple[int, ...] = (0,) * (len(AGE_BOUNDS_S) + 1)
    evicted: tuple[int, ...] = (0,) * (len(AGE_BOUNDS_S) + 1)
    wanted_s: int = 0
    evicted_s: int = 0
    reused: int = 0
    unused: int = 0


class BlockAges(Protocol):
    """What follows one instance's frames. Any thread may ask `tiers`; one at a time does the rest."""

    def take(self, data: bytes, at: int = 0) -> None:
        """Take one frame. Raises FrameError: it is no good frame, and a part of it may be taken."""

    def forget(self) -> None:
        """Events were missed: blocks that are held now have no age. What was counted stays."""

    def tiers(self) -> list[TierAges]:
        """What was counted, by tier: HBM, HOST, NVME."""


class NewAges(Protocol):
    """Makes one; see `ReadableAges`."""

    def __call__(self, most: int, every: int = 1) -> BlockAges: ...


class _Held:
    """A block that a tier has: since when, None where that was not seen, and whether it was wanted again."""

    __slots__ = ("since_ns", "wanted")

    def __init__(self, since_ns: int | None) -> None:
        self.since_ns, self.wanted = since_ns, False


class _Counts:
    def __init__(self) -> None:
        buckets = len(AGE_BOUNDS_S) + 1
        self.wanted, self.evicted = [0] * buckets, [0] * buckets
        self.wanted_s = self.evicted_s = self.reused = self.unused = 0


class ReadableAges:
    """See `BlockAges`; what the native one must do.

    Args:
        most: blocks whose ages are followed; of more the newest are not.
        every: one block of so many is followed, chosen by its hash, and counts for as many.
    """

    def __init__(self, most: int, every: int = 1) -> None:
        self._most, self._every, self._size = most, every, 0
        self._held: dict[Tier, dict[SequenceHash, _Held]] = {tier: {} for tier in FOLLOWED}
        self._counts = {tier: _Counts() for tier in FOLLOWED}

    def take(self, data: bytes, at: int = 0) -> None:
        """See `BlockAges.take`."""
        frame, _ = decode_frame(data, at)
        for event in frame.events:
            self._fold(event, min(frame.wall_time_ns, _LAST_NS))

    def forget(self) -> None:
        """See `BlockAges.forget`."""
        self._size = 0
        for held in self._held.values():
            held.clear()

    def tiers(self) -> list[TierAges]:
        """See `BlockAges.tiers`."""
        return [
            TierAges(
                tuple(count * self._every for count in one.wanted),
                tuple(count * self._every for count in one.evicted),
                one.wanted_s * self._every,
                one.evicted_s * self._every,
                one.reused * self._every,
                one.unused * self._every,
            )
            for one in self._counts.values()
        ]

    def _fold(self, event: Event, now_ns: int) -> None:
        match event:
            case BlocksCreated(tier=tier, hashes=hashes):
                for block in self._chosen(hashes):
                    self._want(
                        next((one for one in FOLLOWED if one > tier and block in self._held[one]), None), block, now_ns
                    )
                    self._gain(tier, block, now_ns)
            case BlocksMigrated(source=source, target=target, kept=kept, cause=cause, hashes=hashes):
                for block in self._chosen(hashes):
                    if isinstance(source, Tier):
                        if cause != MigrateCause.OFFLOAD:
                            self._want(source, block, now_ns)
                        if not kept:
                            self._lose(source, block)
                    self._gain(target, block, now_ns)
            case BlocksEvicted(tier=tier, reason=reason, hashes=hashes):
                for block in self._chosen(hashes):
                    gone = self._lose(tier, block)
                    if gone is not None and gone.since_ns is not None and reason in PRESSURE:
                        self._evict(tier, gone, gone.since_ns, now_ns)
            case ResidenciesListed(tier=tier, hashes=hashes):
                for block in self._chosen(hashes):
                    if tier in self._held and block not in self._held[tier]:
                        self._gain(tier, block, None)
            case SnapshotEnded(tier=tier, count=0) if tier in self._held:
                self._size -= len(self._held[tier])
                self._held[tier].clear()
            case _:
                pass

    def _chosen(self, hashes: bytes) -> list[SequenceHash]:
        return [block for block in split_hashes(hashes) if not int.from_bytes(block[:8], "little") % self._every]

    def _gain(self, tier: Tier, block: SequenceHash, now_ns: int | None) -> None:
        held = self._held.get(tier)
        if held is None:
            return
        if block not in held:
            if self._size >= self._most:
                return
            self._size += 1
        held[block] = _Held(now_ns)

    def _lose(self, tier: Tier, block: SequenceHash) -> _Held | None:
        gone = self._held[tier].pop(block, None) if tier in self._held else None
        self._size -= gone is not None
        return gone

    def _want(self, tier: Tier | None, block: SequenceHash, now_ns: int) -> None:
        held = self._held[tier].get(block) if tier is not None and tier in self._held else None
        if tier is None or held is None:
            return
        held.wanted = True
        if held.since_ns is not None:
            counts, age_s = self._counts[tier], _age_s(held.since_ns, now_ns)
            counts.wanted[bisect_left(AGE_BOUNDS_S, age_s)] += 1
            counts.wanted_s += age_s

    def _evict(self, tier: Tier, gone: _Held, since_ns: int, now_ns: int) -> None:
        counts, age_s = self._counts[tier], _age_s(since_ns, now_ns)
        counts.evicted[bisect_left(AGE_BOUNDS_S, age_s)] += 1
        counts.evicted_s += age_s
        counts.reused += gone.wanted
        counts.unused += not gone.wanted


def _age_s(since_ns: int, now_ns: int) -> int:
    """Whole seconds, rounded up; 0 where a clock was set back."""
    return max(0, -(-(now_ns - since_ns) // _SECOND_NS))


def added(one: Sequence[TierAges], other: Sequence[TierAges]) -> list[TierAges]:
    """Two counts together, tier by tier."""
    return [
        TierAges(
            tuple(map(sum, zip(a.wanted, b.wanted, strict=True))),
            tuple(map(sum, zip(a.evicted, b.evicted, strict=True))),
            a.wanted_s + b.wanted_s,
            a.evicted_s + b.evicted_s,
            a.reused + b.reused,
            a.unused + b.unused,
        )
        for a, b in zip(one, other, strict=True)
    ]
