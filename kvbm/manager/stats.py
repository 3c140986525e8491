"""What a manager says of itself in numbers."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.ages import TierAges
from kvbm.core.ids import Tier
from kvbm.core.lent import LentCounts
from kvbm.core.results import ShareCounts, TierCounts
from kvbm.manager.offload.admission import Skipped
from kvbm.pools.base import ObjectStats
from kvbm.transport.peers import PeerStats

TROUBLED_PARTS = ("journal", "place", "stream", "tiers", "objects", "namespaces")


class ManagerStats(NamedTuple):
    """Counters since the start, and what is in use now.

    Attributes:
        created_blocks: blocks the engine declared full.
        hit_blocks: blocks that requests got instead of computing them, by the tier they were in.
        missed_blocks: blocks that requests asked for and did not get.
        offloaded_blocks: blocks brought to a colder tier, by that tier.
        corrupt_blocks: blocks whose bytes were found wrong; they were withdrawn and computed.
        verified_reads: blocks whose bytes were found right.
        failed_copies: copies a device or store did not carry out. What other instances did not give is in `peers`.
        late_copies: onboards that ended after their request had gone on.
        skipped_offloads: blocks a policy wanted in a colder tier that did not get there for want of something;
            `skipped` says of what.
        copies_in_flight: copies that hold slots, those that are late or quarantined among them.
        pools: how the slots of each tier are used.
        trouble: what the manager cannot do now, in words; "" when all is well.
        skipped: blocks that were not offloaded, by reason.
        late_slots: slots, at both ends, held by onboards that run on after their request.
        quarantined_slots: slots, at both ends, of copies nobody can confirm; nothing uses them before the process is
            gone.
        shares: how tenants use each pool, where they have shares. Who has reached its quota gives up its own blocks for
            new ones.
        objects: what the object pool has counted; None where there is none.
        waiting_requests: requests that wait for bytes now.
        engine_duplicates: blocks an engine said it holds of which it had said so before. All three of `engine_…` are 0
            where HBM is kvbm's own.
        engine_surplus: blocks an engine said it holds beyond what it has room for; they were left out.
        engine_stores: runs it was given to bring to HOST.
        peer_hits: blocks of `hit_blocks` that other instances lent; they count there as of HOST. peer_late_copies: of
            `late_copies`, those from them.
        peers: what reading from other instances has counted; None where none is read from.
        lent: what this process has lent to other instances, as `core.lent.LentCounts`; None where it lends nothing.
        short_allocations: calls of `allocate` that got no slots.
        ages: by tier, how old blocks were when they were wanted again and when they were evicted, and how many never
            were wanted; of large pools it is estimated from a part of the blocks. None where nobody counts it.
        kept_blocks: blocks of each tier that `keep` holds there now.
        troubled: the parts that `trouble` tells of, of TROUBLED_PARTS.
    """

    created_blocks: int
    hit_blocks: dict[Tier, int]
    missed_blocks: int
    offloaded_blocks: dict[Tier, int]
    corrupt_blocks: int
    verified_reads: int
    failed_copies: int
    late_copies: int
    skipped_offloads: int
    copies_in_flight: int
    pools: dict[Tier, TierCounts]
    trouble: str
    skipped: dict[Skipped, int]
    late_slots: int
    quarantined_slots: int
    shares: dict[Tier, list[ShareCounts]]
    objects: ObjectStats | None
    waiting_requests: int = 0
    engine_duplicates: int = 0
    engine_surplus: int = 0
    engine_stores: int = 0
    peer_hits: int = 0
    peer_late_copies: int = 0
    peers: PeerStats | None = None
    short_allocations: int = 0
    ages: dict[Tier, TierAges] | None = None
    lent: LentCounts | None = None
    kept_blocks: dict[Tier, int] = {}  # noqa: RUF012  # never changed in place
    troubled: tuple[str, ...] = ()
