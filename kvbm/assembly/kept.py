"""What a start may believe of an NVME pool that an earlier one has left: the journal, its slots, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvbm.config import Settings
from kvbm.core.backend import NewFold
from kvbm.core.errors import PoolError
from kvbm.core.ids import Epoch, NamespaceId, Tier
from kvbm.core.results import Recovered
from kvbm.manager.recovery.journal_recovery import Kept, recover
from kvbm.manager.recovery.salvage import SalvagePlan
from kvbm.pools.nvme.pool import NvmePool
from kvbm.safe_log import SafeLog
from kvbm.streams.journal.journal import Journal

log = SafeLog()


class Watched(Protocol):
    """Which blocks of an earlier process may be held."""

    def kept(self, found: Sequence[Recovered]) -> list[Recovered]: ...
    def keeps_run(self, namespace: NamespaceId, hashes: bytes) -> np.ndarray: ...
    def expect_more(self) -> None: ...


def kept_in_nvme(
    settings: Settings, journal: Journal, nvme: NvmePool, known: Epoch, watched: Watched, new_fold: NewFold
) -> tuple[list[Recovered], SalvagePlan]:
    """What the ledger is told that the pool holds, and what is to be brought back while it serves.

    One line says what was kept.
    """
    generations = nvme.generations if nvme.opened == "reopened" else None
    room, has_record = max(nvme.slots, nvme.room_slots), generations is not None
    is_behind = False
    if generations is not None:
        is_behind = generations.record.epoch > journal.epoch > 0
        if not _was_in_use(journal, nvme.pool_id, generations.record.epoch, known):
            generations.forget()
            generations = None
    kept = Kept([], False)
    if is_behind:  # what it does not know of may have withdrawn what it says
        log.warning(
            "recovery.journal_behind", epoch=journal.epoch, effect="the pool was used since; it is not believed"
        )
    else:
        kept = recover(journal, Tier.NVME, room, nvme.pool_id, new_fold, can_scan=has_record)
    blocks = watched.kept(kept.blocks)
    inside = [one for one in blocks if one.slot < nvme.slots]
    beyond = [one for one in blocks[-nvme.slots :] if one.slot >= nvme.slots]  # the latest that fit
    scans = generations is not None and (generations.is_scan_due or not kept.is_all)
    if generations is not None and (scans or beyond):
        watched.expect_more()
        try:
            generations.note_scan(True)  # before an epoch begins that says nothing of these blocks
        except PoolError as error:
            log.warning("salvage.unnoted", why=str(error), effect="a process that dies now leaves what was not found")
    if nvme.opened == "reopened":
        log.info(
            "pool.kept",
            tier="NVME",
            kept_blocks=len(inside),
            moves_blocks=len(beyond),
            given_up_blocks=max(0, len(blocks) - nvme.slots),
            is_scanned=scans,
            why=nvme.notice or ("its journal is not whole" if scans else ""),
        )
    sealed = settings.pools.nvme.encrypt
    return inside, SalvagePlan(scans, beyond, watched.keeps_run, settings.pools.nvme.depth, sealed)


def _was_in_use(journal: Journal, pool_id: str, epoch: int, known: Epoch) -> bool:
    """Whether nobody has had the instance's place since without this pool: what was cleared then was not noted there.

    Args:
        epoch: the last one that began with the pool.
        known: the newest one that others know of.
    """
    latest = max(journal.epoch, known)
    return epoch == latest and journal.pool_id == pool_id if journal.has_begun else epoch >= latest
