"""After a restart: what a durable tier still holds, as the journal of the last epoch says."""

from __future__ import annotations

import structlog

from kvbm.core.errors import IllegalEventError
from kvbm.core.ids import Epoch, Tier
from kvbm.core.ledger import Recovered
from kvbm.core.residency import Residencies
from kvbm.streams.journal import Journal

log = structlog.get_logger()


def recover(journal: Journal, last_epoch: Epoch, tier: Tier, slots: int) -> list[Recovered]:
    """The residencies of one durable tier at the end of the last epoch, by namespace.

    They are believed, not proven: each is verified against its slot's header and checksum when it is first read. A journal that
    contradicts itself gives nothing back: its blocks are lost to the cache, no more.
    """
    fold = Residencies(strict=True)
    try:
        for frame in journal.frames(last_epoch):
            for event in frame.events:
                fold.evolve(event)
            if fold.digest != frame.digest:
                raise IllegalEventError("digest-mismatch", f"after offset {frame.next_offset - 1}")
    except IllegalEventError as error:
        log.warning("recovery.journal_refused", epoch=last_epoch, why=str(error), remedy="run kvbm-replay verify")
        return []
    if not fold.is_whole(tier):
        return []
    kept = [
        Recovered(block, held.namespace, held.slot)
        for block, held in fold.held[tier].items()
        if held.slot is not None and held.slot < slots
    ]
    return sorted(kept, key=lambda entry: entry.namespace)
