"""What a ledger and a fold hold, asked in ways that only tests ask."""

from __future__ import annotations

from kvbm.core.backend import Fold, LedgerProtocol
from kvbm.core.ids import SequenceHash, Tier, split_slots


def slot_of(ledger: LedgerProtocol, tier: Tier, block: SequenceHash) -> int | None:
    """The slot in which a tier holds a block; None when it does not."""
    found = ledger.match(block, hottest=tier)
    return split_slots(found.slots)[0] if found.tiers == bytes([tier]) else None


def slots_of(ledger: LedgerProtocol, tier: Tier, blocks: list[SequenceHash]) -> dict[SequenceHash, int]:
    """The slots of those blocks that a tier holds."""
    found = {block: slot_of(ledger, tier, block) for block in blocks}
    return {block: slot for block, slot in found.items() if slot is not None}


def recomputed_digest(fold: Fold) -> int:
    """The digest computed anew from what is held; it equals `digest` unless memory or code is broken."""
    return sum(fold.tier_digest(tier) for tier in Tier) & ((1 << 64) - 1)
