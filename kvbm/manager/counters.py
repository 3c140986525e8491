"""What a manager counts."""

from __future__ import annotations

from kvbm.core.ids import Tier


class Counters:
    """What has been counted since the start.

    Under the manager's lock; the names are those of `ManagerStats`, which says what they mean.
    """

    def __init__(self) -> None:
        self.created_blocks = self.missed_blocks = self.corrupt_blocks = self.verified_reads = 0
        self.failed_copies = self.late_copies = self.peer_hits = self.peer_late_copies = 0
        self.engine_duplicates = self.engine_surplus = self.engine_stores = self.short_allocations = 0
        self.hit_blocks: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.offloaded_blocks: dict[Tier, int] = dict.fromkeys(Tier, 0)
