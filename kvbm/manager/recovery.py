"""After a restart: what a durable tier still holds, as the journal says."""

from __future__ import annotations

import structlog

from kvbm.core.errors import FrameError, IllegalEventError
from kvbm.core.ids import Epoch, Tier
from kvbm.core.ledger import Recovered
from kvbm.core.residency import Residencies
from kvbm.streams.journal import Journal

log = structlog.get_logger()


def recover(journal: Journal, tier: Tier, slots: int, pool_id: str) -> list[Recovered]:
    """The residencies of one durable tier when the journal ends, by namespace.

    The newest epoch that ended its first round in the tier decides. An epoch that was killed before changed no slot anybody
    relied on: a slot is overwritten only once the withdrawal of what it held is durable, and that comes after the round. So the
    epoch before it still holds.

    They are believed, not proven: each is verified against its slot's header and checksum when it is first read. A journal that
    contradicts itself, or speaks of another pool, gives nothing back: its blocks are lost to the cache, no more.
    """
    if pool_id != journal.pool_id:
        return []
    for epoch in journal.epochs_of_pool():
        try:
            fold = _fold(journal, epoch)
        except (FrameError, IllegalEventError, OSError) as error:
            log.warning("recovery.journal_refused", epoch=epoch, why=str(error), remedy="run kvbm-replay verify")
            return []
        if fold.is_whole(tier):
            kept = [
                Recovered(block, held.namespace, held.slot)
                for block, held in fold.held[tier].items()
                if held.slot is not None and held.slot < slots
            ]
            return sorted(kept, key=lambda entry: entry.namespace)
        if journal.was_cut(epoch):
            return []  # its round may have been in what was cut, and slots overwritten after it
    return []


def _fold(journal: Journal, epoch: Epoch) -> Residencies:
    """Everything the journal has of an epoch. Raises IllegalEventError: it contradicts itself, or something is missing."""
    fold = Residencies(strict=True)
    expected = 0
    for frame in journal.frames(epoch):
        if (frame.instance, frame.epoch, frame.first_offset) != (journal.instance, epoch, expected):
            detail = (
                f"{frame.instance} epoch {frame.epoch} offset {frame.first_offset} where offset {expected} was expected"
            )
            raise IllegalEventError("hole", detail)
        expected = frame.next_offset
        for event in frame.events:
            fold.evolve(event)
        if fold.digest != frame.digest:
            raise IllegalEventError("digest-mismatch", f"after offset {frame.next_offset - 1}")
    return fold
