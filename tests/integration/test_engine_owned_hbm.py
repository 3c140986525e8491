"""An engine that owns HBM: what it holds is in the stream, and its blocks come to and from HOST without anybody waiting
in a call.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbm.assembly import NATIVE, journal_folder, open_engine_manager
from kvbm.config import load_settings
from kvbm.core.codec import decode_frame
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError, ConfigError, LedgerError, PoolError
from kvbm.core.events import BlocksCreated, BlocksEvicted, BlocksMigrated, Event, EvictReason
from kvbm.core.ids import HASH_BYTES, NO_PARENT, InstanceId, NamespaceId, Tier, split_hashes
from kvbm.locate.base import FoundElsewhere
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from kvbm.pools.base import Proof
from kvbm.pools.nvme import pod as pod_module
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from tests.eventually import eventually
from tests.held import slot_of
from tests.managers import BLOCK_BYTES, NAMESPACE, KnowsAll, hashes_of
from tests.object_pools import memory_objects
from tests.owning_engines import WAIT_S, OwningEngine, mapped_rows, opened
from tests.readable import main as replay
from tests.wrapped_pools import Gate

ROOT = Path(__file__).parents[2]
BOTH_CORES = pytest.mark.parametrize("core", ["native", "reference"])


@contextmanager
def engine(folder: Path, **more: Any) -> Iterator[OwningEngine]:
    with opened(folder, **more) as manager:
        yield OwningEngine(manager)


def events_of(folder: Path) -> list[Event]:
    """What the journal of a closed manager says."""
    settings = load_settings(flags={"instance.data_dir": str(folder)})
    journal = Journal.open(journal_folder(settings), InstanceId("instance-0"), NATIVE, JournalOptions("off", 1 << 20))
    try:
        return [
            event for frame, data in journal.frames(journal.epoch) for event in decode_frame(data, frame.at)[0].events
        ]
    finally:
        journal.close()


def gated(manager: EngineHbmManager, call: str = "read") -> Gate:
    """NVME is slow from now on: until the gate opens."""
    gate = Gate(Tier.NVME, call)
    manager.pools.slots[Tier.NVME] = gate(manager.pools.slots[Tier.NVME])
    gate.close()
    return gate


def pinned(manager: EngineHbmManager) -> int:
    counts = manager.stats().pools[Tier.HOST]
    return counts.held - counts.evictable


@BOTH_CORES
def test_a_stored_prompt_comes_back_from_host_and_from_nvme_with_its_bytes(tmp_path: Path, core: str) -> None:
    with engine(tmp_path, core=core) as one:
        assert one.store(1, 6) == 6
        assert one.manager.settle(WAIT_S)
        first = one.acquired(1, 6)
        assert first.hits == {Tier.HOST: 6}
        assert pinned(one.manager) == 6
        first.release()
        first.release()
        assert pinned(one.manager) == 0
        one.empty_host()
        assert one.hits(1, 8) == {Tier.NVME: 6}
        assert one.hits(1, 8, first=2) == {Tier.HOST: 4}  # it has two itself
        stats = one.manager.stats()
        assert stats.hit_blocks == {Tier.HBM: 2, Tier.HOST: 10, Tier.NVME: 6, Tier.OBJECT: 0}
        assert (stats.missed_blocks, stats.corrupt_blocks, stats.failed_copies, stats.copies_in_flight) == (4, 0, 0, 0)
        assert stats.offloaded_blocks == {Tier.HBM: 0, Tier.HOST: 6, Tier.NVME: 6, Tier.OBJECT: 0}
        assert (stats.engine_stores, stats.waiting_requests, stats.created_blocks) == (1, 0, 6)
    migrated = [event for event in events_of(tmp_path) if isinstance(event, BlocksMigrated)]
    assert [(event.source, event.target, event.kept) for event in migrated] == [
        (Tier.HBM, Tier.HOST, True),
        (Tier.HOST, Tier.NVME, True),
        (Tier.NVME, Tier.HOST, True),
    ]


@BOTH_CORES
def test_what_the_engine_holds_is_listed_once_and_withdrawn_with_its_last_copy(tmp_path: Path, core: str) -> None:
    chain = hashes_of(1, 8)
    blocks = split_hashes(chain)
    with engine(tmp_path, core=core, pools__hbm__slots=10) as one:
        assert one.compute(1, 2) == 0
        assert one.compute(1, 6) == 2
        assert one.manager.engine_removed(b"".join([*blocks[3:5], blocks[7]]), EvictReason.CAPACITY) == 2
        assert one.compute(1, 8) == 4  # 0 to 2, and 5
        assert one.manager.stats().engine_duplicates == 6
        assert one.compute(2, 5) == 0
        stats = one.manager.stats()
        assert (stats.engine_surplus, stats.pools[Tier.HBM].held, stats.pools[Tier.HBM].free) == (3, 10, 0)
        assert one.manager.engine_removed(hashes_of(2, 5)) == 2  # it never said that it held the others
        assert one.manager.holders(chain) == b"\xff" * 8
        assert one.manager.engine_cleared() == 8
        assert one.manager.stats().pools[Tier.HBM].free == 10
    created = [event for event in events_of(tmp_path) if isinstance(event, BlocksCreated)]
    assert [(event.start, event.parent, len(event.hashes) // HASH_BYTES) for event in created] == [
        (0, NO_PARENT, 2),
        (2, blocks[1], 4),
        (3, blocks[2], 2),
        (6, blocks[5], 2),
        (0, NO_PARENT, 2),
    ]
    reasons = [event.reason for event in events_of(tmp_path) if isinstance(event, BlocksEvicted)]
    assert reasons == [EvictReason.CAPACITY, EvictReason.CAPACITY, EvictReason.CLEARED]


@BOTH_CORES
def test_the_journal_with_a_snapshot_over_hbm_blocks_is_true(tmp_path: Path, core: str) -> None:
    with engine(tmp_path, core=core) as one:
        one.store(1, 6)
        one.compute(2, 5)
        one.empty_host()
        one.manager.take_snapshot()
        one.hits(1, 6)
        one.manager.engine_removed(hashes_of(2, 3))
        one.manager.take_snapshot()
        assert one.manager.settle(WAIT_S)
    settings = load_settings(flags={"instance.data_dir": str(tmp_path)})
    assert replay(["verify", str(journal_folder(settings))]) == 0
    assert replay(["verify", str(journal_folder(settings)), "--reference"]) == 0


@BOTH_CORES
def test_a_restarted_manager_has_what_nvme_kept(tmp_path: Path, core: str) -> None:
    with engine(tmp_path, core=core) as one:
        one.store(1, 6)
        assert one.manager.settle(WAIT_S)
    with engine(tmp_path, core=core) as one:
        assert one.manager.holders(hashes_of(1, 7)) == bytes([Tier.NVME] * 6) + b"\xff"
        assert one.manager.held(Tier.HBM) == one.manager.held(Tier.HOST) == []
        assert one.hits(1, 7) == {Tier.NVME: 6}


def test_a_block_whose_bytes_are_damaged_ends_the_run_and_is_withdrawn(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.store(1, 6)
        one.empty_host()
        with one.manager._lock:
            slot = slot_of(one.manager._ledger, Tier.NVME, split_hashes(hashes_of(1, 6))[3])
        assert slot is not None
        with open(tmp_path / "instances/instance-0/nvme.pool", "r+b") as file:
            file.seek(PAGE_BYTES + slot * stride_of(BLOCK_BYTES) + 70)
            file.write(b"\xfe\xfe\xfe")
        assert one.hits(1, 6) == {Tier.NVME: 3}
        assert pinned(one.manager) == 0  # what lay behind the hole is not kept either
        assert one.manager.stats().corrupt_blocks == 1
        assert one.manager.holders(hashes_of(1, 6)).count(0xFF) == 1


def test_a_request_released_before_it_is_done_pins_nothing_and_its_copies_end(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.store(1, 6)
        one.empty_host()
        one.store(1, 2)  # HOST has the first two
        gate = gated(one.manager)
        acquiring = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
        assert not acquiring.poll()
        assert gate.entered.wait(WAIT_S)
        assert (one.manager.stats().waiting_requests, pinned(one.manager)) == (1, 2)
        acquiring.release()
        assert acquiring.poll()
        assert (acquiring.depth, acquiring.slots) == (0, [])
        stats = one.manager.stats()
        assert (stats.waiting_requests, stats.late_slots, pinned(one.manager)) == (0, 8, 0)
        assert (sum(stats.hit_blocks.values()), stats.missed_blocks) == (0, 0)  # it was given up, not answered
        gate.opened.set()
        assert one.manager.settle(WAIT_S)
        assert one.manager.stats().late_copies == 1
        assert pinned(one.manager) == 0
        assert one.hits(1, 6) == {Tier.HOST: 6}  # the late copy serves the next one


def test_what_is_late_is_a_miss_and_what_came_counts(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.store(1, 6)
        one.empty_host()
        one.store(1, 2)
        gate = gated(one.manager)
        acquiring = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
        assert gate.entered.wait(WAIT_S) and not acquiring.poll()
        acquiring.deadline_s = 0.0  # its time is up
        one.awaited(acquiring, 1)
        assert (acquiring.depth, acquiring.hits) == (2, {Tier.HOST: 2})
        stats = one.manager.stats()
        assert (stats.missed_blocks, stats.late_slots, stats.waiting_requests) == (4, 8, 0)
        gate.opened.set()
        assert one.manager.settle(WAIT_S)
        acquiring.release()
        assert pinned(one.manager) == 0
        assert one.hits(1, 6) == {Tier.HOST: 6}


def test_requests_for_the_same_blocks_wait_for_one_copy(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.store(1, 6)
        one.empty_host()
        gate = gated(one.manager)
        three = [one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6)) for _ in range(3)]
        assert gate.entered.wait(WAIT_S)
        assert not any(acquiring.poll() for acquiring in three)
        assert one.manager.stats().copies_in_flight == 1
        gate.opened.set()
        assert [one.awaited(acquiring, 1).hits for acquiring in three] == [
            {Tier.NVME: 6},
            {Tier.HOST: 6},
            {Tier.HOST: 6},
        ]
        assert pinned(one.manager) == 6
        for acquiring in three:
            acquiring.release()
        assert pinned(one.manager) == 0


def test_who_waits_for_another_that_gives_up_goes_on_by_itself(tmp_path: Path) -> None:
    with engine(tmp_path, onboard__threads=1) as one:
        one.store(1, 6)
        one.store(2, 6)
        one.empty_host()
        gate = gated(one.manager)
        busy = one.manager.begin_acquire(NAMESPACE.id, hashes_of(2, 6))  # the only thread
        assert gate.entered.wait(WAIT_S)
        first = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
        second = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
        first.release()  # its copy never began
        assert not second.poll()  # a copy of its own now
        gate.opened.set()
        assert one.awaited(second, 1).hits == {Tier.NVME: 6}
        assert one.awaited(busy, 2).depth == 6


def test_nobody_waits_for_what_the_engine_itself_is_storing(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.store(1, 4)
        one.empty_host()
        store = one.begin_store(1, 4)
        assert store is not None
        acquiring = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 4))
        assert acquiring.poll()  # the store ends when the engine takes its next steps
        assert acquiring.depth == 0
        one.manager.end_store(store, [True] * 4, one.fill(store))
        assert one.hits(1, 4) == {Tier.HOST: 4}


class Unanswering(KnowsAll):
    """A catalog that says nothing until it is let."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        self.asked.set()
        self.answers.wait(WAIT_S)
        return super().find(pool, namespace, hashes, first, timeout_s)


def test_neither_beginning_nor_polling_waits_for_whoever_is_asked(tmp_path: Path) -> None:
    with engine(tmp_path, objects=memory_objects(BLOCK_BYTES)) as one:
        locator = Unanswering()
        one.manager._loads.locator = locator
        acquiring = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 4))
        assert locator.asked.wait(WAIT_S)
        assert not acquiring.poll()
        acquiring.release()
        late = one.acquired(1, 4, wait_s=0.05)
        assert late.depth == 0
        locator.answers.set()
        one.manager._executor.submit(int).result(WAIT_S)
        assert one.manager.settle(WAIT_S)
        assert one.manager.stats().copies_in_flight == 0


@BOTH_CORES
def test_objects_of_several_blocks_follow_the_chain_through_chunks(tmp_path: Path, core: str) -> None:
    store = MemoryStore()
    objects = memory_objects(BLOCK_BYTES, blocks=4, store=store)
    with engine(tmp_path / "a", objects=objects, core=core) as one:
        for start, depth in ((0, 3), (3, 5), (5, 6), (6, 11)):
            assert one.store(1, depth, start) == depth - start
        assert one.manager.settle(WAIT_S)
        assert one.manager.stats().offloaded_blocks[Tier.OBJECT] == 8
    objects = memory_objects(BLOCK_BYTES, blocks=4, store=store)
    with engine(tmp_path / "b", objects=objects, core=core) as one:
        one.manager._loads.locator = KnowsAll()
        assert one.hits(1, 11, first=5) == {Tier.OBJECT: 3}  # 5 to 7, of the second object
        assert one.hits(1, 11) == {Tier.OBJECT: 5, Tier.HOST: 3}
        assert one.hits(1, 9) == {Tier.HOST: 8}


@BOTH_CORES
def test_blocks_in_objects_are_among_the_holders_for_who_asks_for_them(tmp_path: Path, core: str) -> None:
    with engine(tmp_path, objects=memory_objects(BLOCK_BYTES), core=core, pools__nvme__slots=0) as one:
        one.manager.follow_objects()
        one.store(1, 6)
        assert one.manager.settle(WAIT_S)
        assert one.manager.stats().offloaded_blocks[Tier.OBJECT] == 6
        chain = hashes_of(1, 7)
        assert one.manager.holders(chain, objects=True) == bytes([Tier.HOST] * 6) + b"\xff"
        one.empty_host()
        assert one.manager.holders(chain) == b"\xff" * 7
        assert one.manager.holders(chain, objects=True) == bytes([Tier.OBJECT] * 6) + b"\xff"


def look(manager: EngineHbmManager) -> None:
    pod = manager.pools.pod
    assert isinstance(pod, PodFolder)
    pod.poll()
    pod.poll()  # once more: the clock of files ticks slowly


def test_instances_of_a_pod_bring_each_others_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_module, "POLL_S", 3600.0)  # they look when they are told to
    pod = {"pools__nvme__folder": str(tmp_path / "pod")}
    with (
        engine(tmp_path / "a", instance__id="a", **pod) as a,
        engine(tmp_path / "b", instance__id="b", **pod) as b,
    ):
        a.store(1, 6)
        b.store(2, 3)
        assert a.manager.settle(WAIT_S)
        assert b.manager.settle(WAIT_S)
        look(b.manager)
        look(a.manager)
        assert b.hits(1, 8) == {Tier.NVME: 6}
        assert b.hits(1, 8) == {Tier.HOST: 6}
        assert a.hits(2, 3, first=1) == {Tier.NVME: 2}
        assert b.manager.stats().corrupt_blocks == 0


@pytest.mark.parametrize(
    ("policy", "stored"), [("write_through", [True, True]), ("second_use", [False, True]), ("never", [False, False])]
)
def test_the_policy_for_host_is_honoured(tmp_path: Path, policy: str, stored: list[bool]) -> None:
    with engine(tmp_path, offload__host=policy) as one:
        for uses, is_stored in ((1, stored[0]), (2, stored[1])):
            one.compute(uses, 4)
            store = one.begin_store(uses, 4, uses=uses)
            assert (store is not None) == is_stored
            if store is not None:
                one.manager.end_store(store, [True] * 4, one.fill(store))
        assert one.manager.settle(WAIT_S)
        assert len(one.manager.held(Tier.NVME)) == 4 * sum(stored)


def test_a_store_takes_only_what_hbm_holds_host_lacks_and_nobody_brings(tmp_path: Path) -> None:
    with engine(tmp_path, pools__host__slots=5) as one:
        one.store(1, 2)
        assert one.manager.settle(WAIT_S)
        one.compute(1, 8)
        one.manager.engine_removed(hashes_of(1, 5, start=4))
        assert one.begin_store(1, 2) is None
        three = one.begin_store(1, 8)
        assert three is not None
        assert three.at == [2, 3, 5, 6, 7]  # those in HOST had to make room, and it has room for so many
        assert three.hashes == b"".join(split_hashes(hashes_of(1, 8))[at] for at in three.at)
        assert one.begin_store(1, 8) is None  # all of HOST belongs to that copy
        checksums = one.fill(three)
        one.manager.end_store(three, [True, False, True, True, True], checksums)
        assert one.manager.stats().failed_copies == 1
        with pytest.raises(LedgerError, match="it ends once"):
            one.manager.end_store(three, [True] * 5, checksums)
        assert set(one.manager.held(Tier.HOST)) == {split_hashes(hashes_of(1, 8))[at] for at in (2, 5, 6, 7)}
        assert one.manager.stats().pools[Tier.HOST].allocated == 0
        assert one.hits(1, 8, first=5) == {Tier.HOST: 3}
        with pytest.raises(ArgumentValueError, match="arrived has 4 entries for a store of 5 blocks"):
            one.manager.end_store(three, [True] * 4, checksums)


def test_a_list_of_checksums_ends_a_store_as_an_array_does(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.compute(1, 4)
        store = one.begin_store(1, 4)
        assert store is not None
        one.manager.end_store(store, [True] * 4, one.fill(store).tolist())
        one.manager.engine_removed(hashes_of(1, 4))
        assert one.hits(1, 4) == {Tier.HOST: 4}
        one.empty_host()
        assert one.hits(1, 4) == {Tier.NVME: 4}  # as they were verified with these checksums


@pytest.mark.parametrize("bad", [[1, 2, 3, "four"], [[1], [2], [3], [4, 5]], np.zeros((4, 2), np.uint32), np.zeros(4)])
def test_columns_that_cannot_be_used_leave_the_store_to_be_ended(tmp_path: Path, bad: Any) -> None:
    with engine(tmp_path) as one:
        one.compute(1, 4)
        store = one.begin_store(1, 4)
        assert store is not None
        checksums = one.fill(store)
        with pytest.raises(ArgumentTypeError, match="checksums"):
            one.manager.end_store(store, [True] * 4, bad)
        with pytest.raises(ArgumentTypeError, match="arrived"):
            one.manager.end_store(store, np.ones((4, 2), bool), checksums)  # type: ignore[arg-type]
        one.manager.end_store(store, [True] * 4, checksums)
        assert one.manager.stats().copies_in_flight == 0
        assert len(one.manager.held(Tier.HOST)) == 4


def test_an_error_while_a_store_ends_loses_its_blocks_and_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path) as one:
        one.compute(1, 4)
        store = one.begin_store(1, 4)
        assert store is not None
        checksums = one.fill(store)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(one.manager.pools.slots[Tier.HOST], "seal", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.manager.end_store(store, [True] * 4, checksums)
        stats = one.manager.stats()
        assert (stats.copies_in_flight, stats.pools[Tier.HOST].free, stats.pools[Tier.HOST].allocated) == (0, 32, 0)
        assert one.store(1, 4) == 4


def test_a_store_that_never_ends_keeps_its_slots_also_beyond_close(tmp_path: Path) -> None:
    manager = opened(tmp_path, pools__host__slots=8)
    one = OwningEngine(manager)
    one.store(1, 2)
    assert manager.settle(WAIT_S)
    one.compute(2, 6)
    store = one.begin_store(2, 6)
    assert store is not None
    assert one.store(3, 6) == 2  # in place of what may go: the six belong to the copy
    assert not manager.settle(0.05)
    eventually(lambda: manager.durable() == manager.applied(), "the journal takes nothing")
    manager.close(timeout_s=0.05)
    assert manager.pools.slots[Tier.HOST].memory is not None  # a worker may still write
    manager.end_store(store, [True] * 6, one.fill(store))
    assert manager.pools.slots[Tier.HOST].memory is None
    with pytest.raises(LedgerError, match="closed"):
        manager.begin_store(NAMESPACE.id, NO_PARENT, 0, hashes_of(2, 6))
    created = [
        event for event in events_of(tmp_path) if isinstance(event, BlocksMigrated) and event.target == Tier.HOST
    ]
    assert sum(len(event.hashes) // HASH_BYTES for event in created) == 4  # nothing is said after the end


@BOTH_CORES
def test_clearing_empties_host_and_nvme_and_nothing_under_way_comes_back(tmp_path: Path, core: str) -> None:
    with engine(tmp_path, core=core) as one:
        one.store(1, 6)
        one.empty_host()
        one.store(2, 3)
        assert one.manager.settle(WAIT_S)
        held = one.acquired(2, 3)
        gate = gated(one.manager)
        reading = one.manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
        assert gate.entered.wait(WAIT_S)
        one.compute(3, 4)
        store = one.begin_store(3, 4)
        assert store is not None
        assert one.manager.clear() == 12  # 6 and 3 in NVME, 3 in HOST
        assert one.manager.stats().pools[Tier.HOST].held == one.manager.stats().pools[Tier.NVME].held == 0
        one.manager.end_store(store, [True] * 4, one.fill(store))  # HBM has them, but they are older than the clearing
        gate.opened.set()
        assert one.awaited(reading, 1).depth == 0
        assert one.manager.settle(WAIT_S)
        assert one.manager.held(Tier.HOST) == one.manager.held(Tier.NVME) == []
        assert one.manager.stats().pools[Tier.HOST].free == 29  # three are still pinned
        held.release()
        assert one.manager.stats().pools[Tier.HOST].free == 32
        assert one.store(3, 4) == 4  # what is stored from now on counts
        assert one.manager.settle(WAIT_S)
        assert len(one.manager.held(Tier.NVME)) == 4
    reasons = [event.reason for event in events_of(tmp_path) if isinstance(event, BlocksEvicted)]
    assert set(reasons[1:]) == {EvictReason.CLEARED}


def test_clearing_forgets_offloads_that_wait(tmp_path: Path) -> None:
    with engine(tmp_path, offload__threads=1) as one:
        gate = gated(one.manager, "write")
        one.store(1, 4)
        assert gate.entered.wait(WAIT_S)
        one.store(2, 4)
        assert one.manager._offloader.waiting_blocks == 4
        one.manager.clear()
        assert one.manager._offloader.waiting_blocks == 0
        gate.opened.set()
        assert one.manager.settle(WAIT_S)
        assert one.manager.held(Tier.NVME) == []


def test_closing_ends_requests_that_wait(tmp_path: Path) -> None:
    manager = opened(tmp_path, onboard__threads=1)
    one = OwningEngine(manager)
    one.store(1, 6)
    one.store(2, 6)
    one.empty_host()
    gate = gated(manager)
    running = manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6), wait_s=0.2)
    assert gate.entered.wait(WAIT_S)
    queued = manager.begin_acquire(NAMESPACE.id, hashes_of(2, 6))
    manager.close(timeout_s=0.05)
    assert one.awaited(queued, 2).depth == 0
    assert one.awaited(running, 1).depth == 0
    queued.release()
    running.release()
    gate.opened.set()
    eventually(lambda: not manager._copies.running, "the late copy does not end")
    with pytest.raises(LedgerError, match="closed"):
        manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))


def test_calls_for_hbm_of_ones_own_are_refused_in_words(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        calls: list[Callable[[], object]] = [
            lambda: one.manager.hbm,
            lambda: one.manager.acquire(NAMESPACE.id, b""),
            lambda: one.manager.allocate(1),
            lambda: one.manager.create(NAMESPACE.id, NO_PARENT, 0, b"", []),
            lambda: one.manager.unpin([0]),
            lambda: one.manager.release([0]),
        ]
        for call in calls:
            with pytest.raises(LedgerError, match=r'pools\.hbm\.owner is "engine"'):
                call()
        hbm, rows = one.manager.pools.slots[Tier.HBM], np.zeros((1, BLOCK_BYTES), np.uint8)
        proof = Proof(NAMESPACE.id, one.manager.epoch, hashes_of(1, 1), np.zeros(1, np.uint32))
        for touch in (
            lambda: hbm.write([0], rows, proof),
            lambda: hbm.read([0], NAMESPACE.id, hashes_of(1, 1), rows),
            lambda: hbm.seal([0], proof),
            lambda: hbm.checksums([0]),
        ):
            with pytest.raises(PoolError, match=r"1 blocks cannot be"):
                touch()


def test_settings_that_make_no_sense_with_an_engines_hbm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pools\.host has neither slots nor capacity_bytes"):
        opened(tmp_path, pools__host__slots=0)
    with pytest.raises(ConfigError, match=r"pools\.hbm\.owner is 'somebody'"):
        opened(tmp_path, pools__hbm__owner="somebody")
    with pytest.raises(ConfigError, match=r"pools\.hbm has neither slots"):
        opened(tmp_path, pools__hbm__slots=0)
    with pytest.raises(ConfigError, match=r"needs \"engine\""):
        open_engine_manager(load_settings(flags={"pools.hbm.slots": 4}), [NAMESPACE], BLOCK_BYTES)


def test_no_torch_is_loaded_for_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.owning_engines import OwningEngine, opened\n"
        f"with opened(Path({str(tmp_path)!r})) as manager:\n"
        "    engine = OwningEngine(manager); engine.store(1, 6); engine.empty_host(); print(engine.hits(1, 6))\n"
        "print('torch' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=4 * WAIT_S, check=True
    )
    assert ran.stdout.splitlines()[-2:] == ["{<Tier.NVME: 2>: 6}", "False"]


def test_keeping_a_prompt_keeps_it_in_host(tmp_path: Path) -> None:
    with engine(tmp_path, pools__host__slots=8) as one:
        one.store(1, 4)
        assert one.manager.keep(hashes_of(1, 6), 3600.0, 100) == 4
        one.store(2, 6)
        assert one.hits(1, 4) == {Tier.HOST: 4}


class Caller:
    """An engine's calls in any order.

    Attributes:
        stores, acquirings: not ended, not released; of the latter also the prompt and its first block.
    """

    def __init__(self, engine: OwningEngine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.stores: list[Store] = []
        self.acquirings: list[tuple[Acquiring, int, int]] = []

    def call(self) -> None:
        prompt, depth = self.rng.randrange(6), self.rng.randrange(1, 7)
        match self.rng.randrange(9):
            case 0 | 1:
                self.engine.compute(prompt, depth)
            case 2 | 3:
                store = self.engine.begin_store(prompt, depth, uses=self.rng.randrange(1, 3))
                self.stores += [store] if store is not None else []
            case 4 if self.stores:
                self.end(self.stores.pop(self.rng.randrange(len(self.stores))), 0.9)
            case 5 | 6:
                first, wait_s = self.rng.randrange(depth), self.rng.choice([0.0, WAIT_S])
                begun = self.engine.manager.begin_acquire(NAMESPACE.id, hashes_of(prompt, depth), wait_s, first)
                self.acquirings.append((begun, prompt, first))
            case 7 if self.acquirings:
                acquiring, whose, first = self.acquirings.pop(self.rng.randrange(len(self.acquirings)))
                if self.rng.random() < 0.8:
                    self.engine.awaited(acquiring, whose, first)
                acquiring.release()
            case 8:
                self.lose(prompt, depth)

    def lose(self, prompt: int, depth: int) -> None:
        manager = self.engine.manager
        match self.rng.randrange(6):
            case 0:
                manager.clear()
            case 1:
                manager.engine_cleared()
            case 2:
                manager.take_snapshot()
            case _:
                manager.engine_removed(hashes_of(prompt, depth))

    def end(self, store: Store, share: float) -> None:
        arrived = [self.rng.random() < share for _ in store.slots]
        self.engine.manager.end_store(store, arrived, self.engine.fill(store))

    def finish(self) -> None:
        for acquiring, whose, first in self.acquirings:
            self.engine.awaited(acquiring, whose, first).release()
        for store in self.stores:
            self.end(store, 1.0)
        assert self.engine.manager.settle(WAIT_S)
        eventually(lambda: not self.engine.manager.stats().copies_in_flight, "copies do not end")
        eventually(lambda: not self.engine.manager.stats().late_slots, "late copies do not end")


@BOTH_CORES
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_keeps_bytes_right_and_the_stream_true(tmp_path: Path, core: str, seed: int) -> None:
    flags = {"core": core, "pools__host__slots": 12, "pools__nvme__slots": 24, "pools__hbm__slots": 40}
    with engine(tmp_path, objects=memory_objects(BLOCK_BYTES, blocks=2), **flags) as one:
        one.manager._loads.locator = KnowsAll()
        caller = Caller(one, seed)
        for _ in range(300):
            caller.call()
        caller.finish()
        stats, manager = one.manager.stats(), one.manager
        assert (stats.copies_in_flight, stats.waiting_requests, stats.late_slots, pinned(manager)) == (0, 0, 0, 0)
        copies = manager._copies
        assert not (copies.open or copies.coming or copies.stores or copies._cancelled)
        for counts in stats.pools.values():
            assert (counts.allocated, counts.free + counts.held) == (0, counts.slots)
        for prompt in range(6):
            one.hits(prompt, 7)
    settings = load_settings(flags={"instance.data_dir": str(tmp_path)})
    assert replay(["verify", str(journal_folder(settings)), "--reference"]) == 0


def test_workers_map_the_rows_that_the_manager_has(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.store(1, 1)
        memory = one.manager.pools.slots[Tier.HOST].memory
        assert memory is not None
        assert np.array_equal(memory, mapped_rows(one.manager))


@BOTH_CORES
@pytest.mark.parametrize("held_in", [Tier.HOST, Tier.NVME])
def test_hashes_of_another_namespace_find_nothing_and_touch_nothing(tmp_path: Path, core: str, held_in: Tier) -> None:
    other = msgspec.structs.replace(NAMESPACE, tenant="somebody else")
    with engine(tmp_path, core=core) as one:
        one.manager.declare([other])
        assert one.store(1, 6) == 6
        assert one.manager.settle(WAIT_S)
        if held_in is Tier.NVME:
            one.empty_host()
        before = one.manager.stats()
        acquiring = one.manager.begin_acquire(other.id, hashes_of(1, 6))
        eventually(acquiring.poll, "it waits for what is not its own")
        assert (acquiring.depth, acquiring.hits) == (0, {})
        acquiring.release()
        one.manager.refresh(hashes_of(1, 6), other.id)
        assert one.manager.holders(hashes_of(1, 6), other.id) == b"\xff" * 6
        assert one.manager.holders(hashes_of(1, 6), NAMESPACE.id) == bytes([held_in]) * 6
        assert one.manager.stats().pools == before.pools
        assert one.hits(1, 6) == {held_in: 6}
        one.compute(2, 3)
        assert one.manager.engine_stored(NAMESPACE.id, NO_PARENT, 0, hashes_of(2, 3)) == 3
        assert one.manager.engine_stored(other.id, NO_PARENT, 0, hashes_of(2, 3)) == 0
