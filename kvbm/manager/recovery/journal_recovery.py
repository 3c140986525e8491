"""After a restart: what a durable tier still holds, as the journal says."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.backend import Fold, NewFold
from kvbm.core.errors import FrameError, IllegalEventError
from kvbm.core.ids import Epoch, Tier, split_hashes
from kvbm.core.results import Recovered
from kvbm.safe_log import SafeLog
from kvbm.streams.journal.journal import Journal

log = SafeLog()


class Kept(NamedTuple):
    """What a durable tier still holds.

    Attributes:
        blocks: by namespace, and within one in the order the tier gained them.
        is_all: whether the journal has lost nothing that would have told of more, or of less.
    """

    blocks: list[Recovered]
    is_all: bool


def recover(
    journal: Journal,
    tier: Tier,
    slots: int,
    pool_id: str,
    new_fold: NewFold,
    can_scan: bool = False,
) -> Kept:
    """The residencies of one durable tier when the journal ends, by namespace.

    The newest epoch that ended its first snapshot in the tier decides. An epoch that was killed before changed no slot
    anybody relied on: a slot is overwritten only once the withdrawal of what it held is durable, and that comes after
    the snapshot. So the epoch before it still holds. That is not so of an epoch whose beginning was let go, or that has
    lost frames: of it only what a later completed snapshot has listed is known, and without such a snapshot nothing is.

    They are believed, not proven: each is verified against its slot's header and checksum when it is first read. A
    journal that contradicts itself, or speaks of another pool, gives nothing back: its blocks are lost to the cache, no
    more.

    Args:
        slots: of the pool; what is said to lie beyond is left out.
        can_scan: whether slots say what was cleared: an epoch of which whole frames were damaged is then not believed.
        new_fold: makes the fold; the specification, or its native implementation.
    """
    if pool_id != journal.pool_id:
        return Kept([], False)
    for epoch in journal.epochs_of_pool():
        is_damaged = journal.was_damaged(epoch)
        if is_damaged and can_scan:  # what it has lost may have withdrawn what it still says
            log.warning(
                "recovery.journal_damaged", epoch=epoch, tier=tier.name, effect="slots are asked what they hold"
            )
            return Kept([], False)
        try:
            fold, is_known, is_complete = _fold(journal, epoch, tier, new_fold)
        except (FrameError, IllegalEventError, OSError) as error:
            log.warning("recovery.journal_refused", epoch=epoch, why=str(error), remedy="run kvbm-replay verify")
            return Kept([], False)
        if is_known:
            blocks = fold.blocks(tier)
            owners = (namespace for namespace, count in blocks.namespaces for _ in range(count))
            numbers = memoryview(blocks.slots).cast("q")
            entries = zip(split_hashes(blocks.hashes), owners, numbers, strict=True)
            found = [Recovered(block, owner, slot) for block, owner, slot in entries if 0 <= slot < slots]
            return Kept(found, not is_damaged)
        if not is_complete or journal.was_cut(epoch):
            log.warning("recovery.snapshot_missing", epoch=epoch, tier=tier.name, remedy="run kvbm-replay verify")
            return Kept([], False)  # its snapshot may have been in what is gone, and slots overwritten after it
    return Kept([], False)


class _Folded(NamedTuple):
    """An epoch as far as the journal has it.

    Attributes:
        is_known: what the tier holds is known: a snapshot has ended, and the digest agrees.
        is_complete: everything from its first event on is there, but for what a torn tail may have held.
    """

    fold: Fold
    is_known: bool
    is_complete: bool


def _fold(journal: Journal, epoch: Epoch, tier: Tier, new_fold: NewFold) -> _Folded:
    """Everything the journal has of an epoch.

    From its first event on the fold is strict and every digest must agree. Where events are missing, at the beginning
    or further on, it goes on leniently, and digests must agree again from the first that does after a completed
    snapshot.

    Raises: IllegalEventError: it contradicts itself.
    """
    fold = new_fold()
    expected = 0
    in_step = is_complete = True
    for frame, data in journal.frames(epoch):
        place = f"{frame.instance} epoch {frame.epoch} offset {frame.first_offset}"
        if (frame.instance, frame.epoch) != (journal.instance, epoch) or frame.first_offset < expected:
            raise IllegalEventError("foreign-frame", f"{place} where epoch {epoch} offset {expected} was expected")
        if frame.first_offset > expected:
            log.info("recovery.events_missing", epoch=epoch, since=expected, until=frame.first_offset)
            if not expected:
                fold.begin_blind(epoch)
            fold.miss_events()
            fold.strict = in_step = is_complete = False
        expected = frame.next_offset
        folded = fold.evolve_frame(data, frame.at)
        if folded.illegal is not None:
            raise folded.illegal
        if folded.folded < frame.event_count:
            raise IllegalEventError(
                "epoch-differs", f"offset {frame.first_offset + folded.folded} begins another epoch"
            )
        agrees = fold.digest == frame.digest
        if in_step and not agrees:
            raise IllegalEventError("digest-mismatch", f"after offset {frame.next_offset - 1}")
        in_step = in_step or (agrees and fold.is_whole(tier))
    return _Folded(fold, in_step and fold.is_whole(tier), is_complete)
