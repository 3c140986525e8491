"""After a restart: what a durable tier still holds, as the journal says."""

from __future__ import annotations

import structlog

from kvbm.core.errors import FrameError, IllegalEventError
from kvbm.core.ids import Epoch, Tier, split_hashes
from kvbm.core.kernels import Fold, NewFold
from kvbm.core.ledger import Recovered
from kvbm.core.residency import Residencies
from kvbm.streams.journal import Journal

log = structlog.get_logger()


def recover(journal: Journal, tier: Tier, slots: int, pool_id: str, new_fold: NewFold = Residencies) -> list[Recovered]:
    """The residencies of one durable tier when the journal ends, by namespace.

    The newest epoch that ended its first round in the tier decides. An epoch that was killed before changed no slot anybody
    relied on: a slot is overwritten only once the withdrawal of what it held is durable, and that comes after the round. So the
    epoch before it still holds.

    They are believed, not proven: each is verified against its slot's header and checksum when it is first read. A journal that
    contradicts itself, or speaks of another pool, gives nothing back: its blocks are lost to the cache, no more.

    Args:
        new_fold: makes the fold; the specification, or its native twin.
    """
    if pool_id != journal.pool_id:
        return []
    for epoch in journal.epochs_of_pool():
        try:
            fold = _fold(journal, epoch, new_fold)
        except (FrameError, IllegalEventError, OSError) as error:
            log.warning("recovery.journal_refused", epoch=epoch, why=str(error), remedy="run kvbm-replay verify")
            return []
        if fold.is_whole(tier):
            blocks = fold.blocks(tier)
            owners = (namespace for namespace, count in blocks.namespaces for _ in range(count))
            numbers = memoryview(blocks.slots).cast("q")
            entries = zip(split_hashes(blocks.hashes), owners, numbers, strict=True)
            return [Recovered(block, owner, slot) for block, owner, slot in entries if 0 <= slot < slots]
        if journal.was_cut(epoch):
            return []  # its round may have been in what was cut, and slots overwritten after it
    return []


def _fold(journal: Journal, epoch: Epoch, new_fold: NewFold) -> Fold:
    """Everything the journal has of an epoch. Raises IllegalEventError: it contradicts itself, or something is missing."""
    fold = new_fold()
    expected = 0
    for frame, data in journal.frames(epoch):
        if (frame.instance, frame.epoch, frame.first_offset) != (journal.instance, epoch, expected):
            detail = (
                f"{frame.instance} epoch {frame.epoch} offset {frame.first_offset} where offset {expected} was expected"
            )
            raise IllegalEventError("hole", detail)
        expected = frame.next_offset
        folded = fold.evolve_frame(data, frame.at)
        if folded.illegal is not None:
            raise folded.illegal
        if folded.folded < frame.event_count:
            raise IllegalEventError(
                "epoch-differs", f"offset {frame.first_offset + folded.folded} begins another epoch"
            )
        if fold.digest != frame.digest:
            raise IllegalEventError("digest-mismatch", f"after offset {frame.next_offset - 1}")
    return fold
