"""What a ledger takes and answers, and the numbers that it and its callers share; both ledgers give these."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, SequenceHash, Tier

LEAST_EVENT_BYTES = 1 << 20  # room below this would overflow at the first large command
NOT_HELD = 0xFF  # in place of a tier, of a block that none holds
LENT_TIERS = (Tier.HOST, Tier.NVME)  # what other instances may read of this one, the tier to read from first
HIGHEST_PRIORITY = 100  # of a kept block: never given up
SNAPSHOT_LOOKS = 8192  # held slots that one step of a snapshot looks at, at most


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
        after: the offset that must be durable before the slots are overwritten; 0 for a tier that dies with the
            process.
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
