"""Starts over a volume after two things have gone wrong at once: what was cleared stays away."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.assembly import journal_folder
from kvbm.core.errors import ConfigError, LedgerError, PoolError
from kvbm.core.events import EvictReason
from kvbm.core.ids import Tier, split_hashes
from kvbm.erasure.manager import ErasableManager
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.recovery import salvage
from kvbm.manager.recovery.salvage import Salvage
from kvbm.pools.base import Proof
from kvbm.pools.nvme import pool as nvme_pool
from kvbm.pools.nvme import stripes
from kvbm.pools.nvme.pool import NvmePool
from kvbm.streams.journal.journal import Journal
from tests.eventually import eventually
from tests.managers import hashes_of, serve
from tests.nvme_volumes import (
    DEPTH,
    WAIT_S,
    fill,
    flip,
    flip_in_journal,
    held,
    lose_journal,
    open_at,
    pool_path,
    salvaged,
    scans_wait,
    segments,
    settings_at,
    unhurried,
    verify,
)
from tests.owning_engines import OwningEngine
from tests.owning_engines import opened as opened_owning

__all__ = ["unhurried"]

# -- a pool that was not there -----------------------------------------------------------------------------------------


def test_a_clear_while_the_engine_ran_without_its_pool_holds(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened_owning(tmp_path, pools__nvme__slots=0) as manager:
        manager.clear()
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


def test_a_pool_restored_from_a_copy_brings_nothing_back_that_was_cleared_since(tmp_path: Path) -> None:
    before = fill(tmp_path)
    copy = shutil.copy(pool_path(tmp_path), tmp_path / "copy")
    with open_at(tmp_path) as manager:
        manager.evict(Tier.NVME, b"".join(before))
    shutil.copy(copy, pool_path(tmp_path))
    flip_in_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


def test_a_journal_restored_from_a_copy_brings_nothing_back_that_was_cleared_since(tmp_path: Path) -> None:
    before = fill(tmp_path)
    journal = journal_folder(settings_at(tmp_path))
    shutil.copytree(journal, tmp_path / "copy")
    with open_at(tmp_path) as manager:
        manager.evict(Tier.NVME, b"".join(before))
    shutil.rmtree(journal)
    shutil.copytree(tmp_path / "copy", journal)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


# -- a start that fails ------------------------------------------------------------------------------------------------


def test_a_damaged_journal_is_not_believed_by_the_second_start_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fill(tmp_path)
    with open_at(tmp_path) as manager:
        manager.evict(Tier.NVME, hashes_of(1, DEPTH))
        eventually(lambda: manager.durable() == manager.applied())
        size = segments(tmp_path)[-1].stat().st_size
        serve(manager, 10, DEPTH)
        assert manager.settle(WAIT_S)
    flip(segments(tmp_path)[-1], size - 10)

    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("something else is wrong")

    for name in ("open_pools", "begin_epoch"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvbm.assembly.manager.{name}", refused)
            with pytest.raises(ConfigError):
                open_at(tmp_path)
    with monkeypatch.context() as patch:
        begin = Journal.begin_epoch

        def dies(self: Journal, *given: Any) -> None:
            begin(self, *given)
            raise ConfigError("it dies before a snapshot")

        patch.setattr(Journal, "begin_epoch", dies)
        with pytest.raises(ConfigError):
            open_at(tmp_path)
    with open_at(tmp_path) as manager:
        eventually(lambda: manager._salvage.is_over)
        assert not held(manager).keys() & set(before)


# -- copies that a clear overtakes -------------------------------------------------------------------------------------


def test_what_a_clear_has_overtaken_on_its_way_to_a_slot_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrives, goes = threading.Event(), threading.Event()
    write = NvmePool.write

    def late(
        self: NvmePool, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None
    ) -> None:
        arrives.set()
        assert goes.wait(WAIT_S)
        write(self, slots, rows, proof, at)

    with opened_owning(tmp_path) as manager:
        engine = OwningEngine(manager)
        with monkeypatch.context() as patch:
            patch.setattr(NvmePool, "write", late)
            engine.compute(0, DEPTH)
            engine.store(0, DEPTH)
            assert arrives.wait(WAIT_S)
            manager.clear()
            goes.set()
            assert manager.settle(WAIT_S)
        assert not manager.held(Tier.NVME)
    lose_journal(tmp_path)
    with opened_owning(tmp_path) as manager:
        eventually(lambda: manager._salvage.is_over)
        assert not manager.held(Tier.NVME)


# -- clears of blocks that are not held --------------------------------------------------------------------------------


def test_a_clear_of_a_block_that_the_scan_has_not_found_yet_holds(tmp_path: Path) -> None:
    fill(tmp_path)
    lose_journal(tmp_path)
    with scans_wait() as begin, open_at(tmp_path) as manager:
        assert manager.evict(Tier.NVME, hashes_of(1, DEPTH)) == 0
        begin()
        assert not salvaged(manager).keys() & set(split_hashes(hashes_of(1, DEPTH)))


def test_a_clear_of_a_block_that_has_left_for_room_holds(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_at(tmp_path) as manager:
        manager.evict(Tier.NVME, hashes_of(1, DEPTH), EvictReason.CAPACITY)
        assert manager.evict(Tier.NVME, hashes_of(1, DEPTH)) == 0
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert not salvaged(manager).keys() & set(split_hashes(hashes_of(1, DEPTH)))


# -- killed, and damaged later -----------------------------------------------------------------------------------------


def test_a_tail_that_a_killed_grow_has_left_is_never_taken_for_the_pools_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fill(tmp_path)
    write_page = stripes._write_page

    def dies(fd: int, position: int, data: bytes) -> None:
        if not position:
            raise OSError(5, "killed before the header")
        write_page(fd, position, data)

    with monkeypatch.context() as patch:
        patch.setattr(stripes, "_write_page", dies)
        with pytest.raises(PoolError):
            open_at(tmp_path, pools__nvme__slots=40)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before
        manager.evict(Tier.NVME, b"".join(before))
    flip(pool_path(tmp_path), 20)
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


def test_a_clear_while_the_pools_end_is_given_back_is_noted_where_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fill(tmp_path, pools__nvme__slots=64)
    rewrite, clears = nvme_pool.rewrite, list[threading.Thread]()
    with scans_wait() as begin, open_at(tmp_path, pools__nvme__slots=16) as manager:
        generations = manager.pools.slots[Tier.NVME].generations

        def cleared_meanwhile(*given: Any) -> None:
            clears.append(threading.Thread(target=manager.evict, args=(Tier.NVME, b"".join(before))))
            clears[0].start()
            eventually(lambda: generations._lock.locked() or not clears[0].is_alive())
            rewrite(*given)

        monkeypatch.setattr(nvme_pool, "rewrite", cleared_meanwhile)
        begin()
        eventually(lambda: manager._salvage.is_over)
        clears[0].join()
    lose_journal(tmp_path)
    with open_at(tmp_path, pools__nvme__slots=16) as manager:
        assert salvaged(manager) == {}


def test_a_clear_has_reached_the_journal_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_waited_for = threading.Event()
    append, wait = Journal.append_all, Offsets.wait_durable

    def appended(self: Journal, frames: Any) -> int:
        assert is_waited_for.wait(WAIT_S)
        return append(self, frames)

    def waits(self: Offsets, *given: Any) -> bool:
        is_waited_for.set()
        return wait(self, *given)

    with opened_owning(tmp_path) as manager:
        engine = OwningEngine(manager)
        engine.compute(0, DEPTH)
        engine.store(0, DEPTH)
        assert manager.settle(WAIT_S)
        eventually(lambda: manager.durable() == manager.applied())
        monkeypatch.setattr(Journal, "append_all", appended)
        monkeypatch.setattr(Offsets, "wait_durable", waits)
        manager.clear()
        is_durable = manager.durable() == manager.applied()
        is_waited_for.set()
        assert is_durable


# -- an erasure, and slots beyond the end ------------------------------------------------------------------------------


def test_an_erasure_is_not_over_while_slots_beyond_the_pools_end_are_there(tmp_path: Path) -> None:
    fill(tmp_path, pools__nvme__slots=20)
    with scans_wait() as begin, open_at(tmp_path, pools__nvme__slots=12) as manager:
        with pytest.raises(PoolError, match="beyond its end"):
            ErasableManager(manager.parts).wipe(Tier.NVME, set(range(12)))
        begin()
        eventually(lambda: manager._salvage.is_over)
        ErasableManager(manager.parts).wipe(Tier.NVME, set(range(12)))
        assert pool_path(tmp_path).stat().st_size == manager.pools.slots[Tier.NVME].file_bytes


# -- a slot is given back once -----------------------------------------------------------------------------------------


def test_a_scan_that_breaks_off_gives_no_slot_back_that_it_has_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fill(tmp_path)
    lose_journal(tmp_path)
    monkeypatch.setattr(salvage, "_TURN_SLOTS", 2)
    adopt, turns, released = Salvage._adopt, list[int](), list[int]()

    def breaks(self: Salvage, *given: Any) -> None:
        turns.append(len(turns))
        if len(turns) == 3:
            raise LedgerError("something is wrong")
        adopt(self, *given)

    monkeypatch.setattr(Salvage, "_adopt", breaks)
    with scans_wait() as begin, open_at(tmp_path) as manager:
        give_back = Salvage._give_back

        def gives(self: Salvage, slots: list[int]) -> None:
            released.extend(slots)
            give_back(self, slots)

        monkeypatch.setattr(Salvage, "_give_back", gives)
        begin()
        found = salvaged(manager)
        assert len(found) == 4 and found.items() <= before.items()
        assert not set(released) & set(found.values())
        assert manager._ledger.counts(Tier.NVME).free == 12
    verify(tmp_path)


def test_a_pod_sees_a_pool_that_found_no_room_to_grow(tmp_path: Path) -> None:
    folder = tmp_path / "pod"
    fill(tmp_path, pools__nvme__folder=str(folder))
    with open_at(tmp_path, pools__nvme__folder=str(folder), pools__nvme__slots=1 << 30):
        assert next(folder.glob("*.slots")).stat().st_size == 16 * 32
