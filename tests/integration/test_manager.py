"""The manager with its threads, on memory pools: tiers, safety rules, trouble."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvbm._native import Ledger as NativeLedger
from kvbm.core.backend import NewLedger
from kvbm.core.codec import FrameBytes
from kvbm.core.errors import ArgumentValueError, LedgerError, PoolError
from kvbm.core.events import BlocksEvicted, BlocksMigrated, EvictReason
from kvbm.core.fold import Residencies
from kvbm.core.ids import NO_PARENT, Namespace, Tier, split_hashes
from kvbm.manager.onboard.loads import Prefix
from kvbm.pools.base import ReadResult
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Position
from kvbm.streams.memory import MemoryLog
from tests.eventually import eventually
from tests.held import slot_of
from tests.managers import BLOCK_BYTES, NAMESPACE, KnowsAll, events_in, hashes_of, make_manager, serve
from tests.object_pools import memory_objects
from tests.wrapped_pools import Gate, Wrapped

WAIT_S = 60.0
SLOTS = {Tier.HBM: 12, Tier.HOST: 12, Tier.NVME: 24}


def test_a_prompt_comes_back_from_each_tier_with_its_bytes() -> None:
    objects = memory_objects(BLOCK_BYTES)
    with make_manager(SLOTS, objects=objects, locator=KnowsAll()) as manager:
        serve(manager, 1, 6)
        assert manager.settle(WAIT_S)
        assert serve(manager, 1, 6).prefix.hits == {Tier.HBM: 6}
        manager.evict(Tier.HBM, hashes_of(1, 6))
        assert serve(manager, 1, 6).prefix.hits == {Tier.HOST: 6}
        assert manager.settle(WAIT_S)
        for tier in (Tier.HBM, Tier.HOST):
            manager.evict(tier, hashes_of(1, 6))
        assert serve(manager, 1, 6).prefix.hits == {Tier.NVME: 6}
        assert manager.settle(WAIT_S)
        for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
            manager.evict(tier, hashes_of(1, 6))
        assert serve(manager, 1, 6).prefix.hits == {Tier.OBJECT: 6}
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, hashes_of(1, 6, start=3))
        manager.evict(Tier.HOST, hashes_of(1, 6, start=5))
        assert serve(manager, 1, 6).prefix.hits == {Tier.HBM: 3, Tier.HOST: 2, Tier.NVME: 1}


def test_a_manager_tells_what_it_has_put_in_the_object_pool() -> None:
    with make_manager(SLOTS, objects=memory_objects(BLOCK_BYTES)) as manager:
        serve(manager, 1, 6)
        assert manager.settle(WAIT_S)
        counted = manager.stats().objects
        assert counted is not None
        raw, stored = counted.namespaces[NAMESPACE.id]
        assert (counted.put_objects, raw) == (6, 6 * BLOCK_BYTES)
        beat = manager.heartbeat(Position(1, 0))  # type: ignore[arg-type]
        assert beat.put_bytes == {NAMESPACE.id: (raw, stored)} and beat.put_total == (raw, stored)
    with make_manager(SLOTS) as manager:
        assert manager.stats().objects is None


def test_the_journal_folds_to_the_live_state_and_digest() -> None:
    log = MemoryLog()
    objects = memory_objects(BLOCK_BYTES)
    manager = make_manager(SLOTS, sink=log, objects=objects, locator=KnowsAll())
    for snapshot_ in range(4):
        for prompt in range(9):
            serve(manager, prompt, 2 + (prompt + snapshot_) % 6)
        manager.take_snapshot()
    assert manager.settle(WAIT_S)
    digest = manager.digest()[1]
    held = {tier: set(manager.held(tier)) for tier in Tier}
    manager.close()
    fold = Residencies(strict=True)
    for event in events_in(log):
        fold.evolve(event)
    assert fold.digest == digest
    assert {tier: set(fold.held[tier]) for tier in Tier} == held


def test_claims_of_objects_that_are_not_there_are_misses() -> None:
    """As of a database, or a catalog, that lies."""
    with make_manager(SLOTS, objects=memory_objects(BLOCK_BYTES), locator=KnowsAll()) as manager:
        assert manager.acquire(NAMESPACE.id, hashes_of(1, 6)).depth == 0
        assert serve(manager, 1, 6).prefix.depth == 0  # and it is computed
        assert manager.stats().corrupt_blocks == 0


def test_corrupt_bytes_are_a_miss_an_eviction_and_a_counter() -> None:
    log = MemoryLog()
    with make_manager(SLOTS, sink=log) as manager:
        serve(manager, 1, 6)
        assert manager.settle(WAIT_S)
        for tier in (Tier.HBM, Tier.HOST):
            manager.evict(tier, hashes_of(1, 6))
        with manager._lock:
            slot = slot_of(manager._ledger, Tier.NVME, split_hashes(hashes_of(1, 6))[2])
        assert slot is not None
        manager.pools.slots[Tier.NVME].rows[slot, 5] ^= 1  # type: ignore[attr-defined]
        assert serve(manager, 1, 6).prefix.hits == {Tier.NVME: 2}
        assert manager.stats().corrupt_blocks == 1
        assert manager.settle(WAIT_S)
    corrupt = [e for e in events_in(log) if isinstance(e, BlocksEvicted) and e.reason == EvictReason.CORRUPT]
    assert [(e.tier, e.hashes) for e in corrupt] == [(Tier.NVME, hashes_of(1, 3, start=2))]


def test_trouble_is_told_outside_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, bool]] = []

    class SlowReader:
        def warning(self, event: str, **fields: object) -> None:
            free = manager._lock.acquire(timeout=WAIT_S)  # fails only when whoever tells holds it
            if free:
                manager._lock.release()
            told.append((event, free))

    objects = memory_objects(BLOCK_BYTES)
    with make_manager({Tier.HBM: 8}, objects=objects, locator=KnowsAll()) as manager:
        monkeypatch.setattr("kvbm.manager.copies.copies_in_flight.log", SlowReader())
        serve(manager, 1, 4)
    assert told == [("block.withdrawn", True)]


def test_a_missing_object_is_a_miss_and_said() -> None:
    log = MemoryLog()
    objects = memory_objects(BLOCK_BYTES)
    with make_manager({Tier.HBM: 8}, sink=log, objects=objects, locator=KnowsAll()) as manager:
        assert serve(manager, 1, 4).prefix.depth == 0
    said = [e for e in events_in(log) if isinstance(e, BlocksEvicted)]
    assert [(e.tier, e.reason) for e in said] == [(Tier.OBJECT, EvictReason.MISSING)]


def test_a_request_waits_no_longer_than_told_and_the_late_copy_keeps_its_slots() -> None:
    release = threading.Event()

    class SlowNvme(Wrapped):
        def read(self, *run: Any) -> ReadResult:
            if self.tier == Tier.NVME:
                release.wait(WAIT_S)
            return super().read(*run)

    with make_manager({Tier.HBM: 8, Tier.NVME: 8}, wrap=SlowNvme, wait_s=0.2, offload=(Tier.NVME,)) as manager:
        serve(manager, 1, 4)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, hashes_of(1, 4))
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 4))
        assert prefix.depth == 0
        assert manager.stats().copies_in_flight == 1  # the read goes on
        rest = manager.allocate(4)  # the other four slots; those of the copy cannot be had
        assert rest is not None
        assert manager.allocate(1) is None
        manager.evict(Tier.NVME, hashes_of(1, 4, start=3))  # even then its source slot is not free
        assert manager.stats().pools[Tier.NVME].free == 4
        release.set()
        assert manager.settle(WAIT_S)
        assert manager.stats().late_copies == 1
        assert manager.stats().pools[Tier.NVME].free == 5
        manager.release(rest)
        assert serve(manager, 1, 3).prefix.hits == {Tier.HBM: 3}


def test_a_durable_slot_is_overwritten_only_after_its_withdrawal_is_durable() -> None:
    gate = threading.Event()
    gate.set()
    written: list[tuple[int, int]] = []  # (slots, durable offset) at each NVME write

    class Journal(MemoryLog):
        def append(self, frame: FrameBytes) -> None:
            gate.wait(WAIT_S)
            super().append(frame)

    class Watched(Wrapped):
        def write(self, slots: Sequence[int], *run: Any) -> None:
            if self.tier == Tier.NVME:
                written.append((len(slots), manager.durable()))
            super().write(slots, *run)

    log = Journal()
    manager = make_manager({Tier.HBM: 8, Tier.NVME: 4}, sink=log, wrap=Watched, wait_s=0.3, offload=(Tier.NVME,))
    serve(manager, 1, 4)
    assert manager.settle(WAIT_S)
    assert len(written) == 1
    gate.clear()  # the journal's device hangs: nothing becomes durable, so nothing may be overwritten
    serve(manager, 2, 4)
    eventually(lambda: manager.stats().failed_copies, "no offload was given up")
    assert len(written) == 1
    gate.set()
    prompts = itertools.count(3)

    def is_written() -> bool:  # after a failure the offloader pauses
        serve(manager, next(prompts) % 50, 4)
        return manager.settle(WAIT_S) and len(written) > 1

    eventually(is_written, "the slots are not written once their withdrawals are durable")
    manager.close()
    events = events_in(log)
    evicted = next(i for i, e in enumerate(events) if isinstance(e, BlocksEvicted) and e.tier == Tier.NVME)
    assert written[1][1] > evicted


def test_a_claim_is_recorded_only_after_its_bytes() -> None:
    class Full(Wrapped):
        def write(self, slots: Sequence[int], *run: Any) -> None:
            if self.tier == Tier.NVME:
                raise PoolError("NVME pool: the device refused")
            super().write(slots, *run)

    log = MemoryLog()
    with make_manager({Tier.HBM: 8, Tier.NVME: 8}, sink=log, wrap=Full, offload=(Tier.NVME,)) as manager:
        serve(manager, 1, 4)
        assert manager.settle(WAIT_S)
        assert manager.stats().failed_copies == 1
        assert manager.held(Tier.NVME) == []
        assert manager.stats().pools[Tier.NVME].free == 8
    assert not [e for e in events_in(log) if isinstance(e, BlocksMigrated)]


def test_many_threads_share_one_manager_without_losing_a_slot() -> None:
    objects = memory_objects(BLOCK_BYTES)
    slots = {Tier.HBM: 40, Tier.HOST: 20, Tier.NVME: 30}
    with make_manager(slots, objects=objects, locator=KnowsAll()) as manager:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    serve(manager, int(rng.integers(0, 12)), int(rng.integers(1, 8)))
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert not errors
        assert manager.settle(WAIT_S)
        for counts in manager.stats().pools.values():
            assert counts.allocated == 0
            assert counts.free + counts.held == counts.slots
            assert counts.evictable == counts.held


def test_a_full_pool_of_pinned_blocks_says_so_and_recovers() -> None:
    with make_manager({Tier.HBM: 4}) as manager:
        served = serve(manager, 1, 4, keep=True)
        assert manager.allocate(1) is None
        manager.unpin(served.slots)
        assert manager.allocate(4) is not None


def test_a_callers_bug_is_named() -> None:
    with make_manager({Tier.HBM: 4}) as manager:
        with pytest.raises(LedgerError, match="slot 3 is not allocated"):
            manager.create(NAMESPACE.id, bytes(16), 0, hashes_of(1, 1), [3])
        with pytest.raises(LedgerError, match="slot 2 is not pinned"):
            manager.unpin([2])
        with pytest.raises(LedgerError, match="no tensor"):
            _ = manager.hbm


def test_closing_twice_is_closing_once() -> None:
    log = MemoryLog()
    manager = make_manager({Tier.HBM: 4}, sink=log)
    manager.close()
    manager.close()
    assert type(events_in(log)[-1]).__name__ == "InstanceStopped"


def test_unpinned_prompts_are_evicted_from_their_tail() -> None:
    with make_manager({Tier.HBM: 6}) as manager:
        serve(manager, 1, 4)
        serve(manager, 2, 4)
        assert [manager.match(hashes_of(p, 4)).depth for p in (1, 2)] == [2, 4]


def test_kept_blocks_outlive_pressure_until_their_time_is_over() -> None:
    now_s = 100.0
    with make_manager({Tier.HBM: 6}, clock=lambda: now_s) as manager:
        serve(manager, 1, 3)
        assert manager.keep(hashes_of(1, 5), ttl_s=10.0) == 3
        for prompt in (2, 3, 4):
            serve(manager, prompt, 3)
        assert manager.match(hashes_of(1, 3)).depth == 3
        now_s += 10.0
        serve(manager, 5, 3)
        serve(manager, 6, 3)
        assert manager.match(hashes_of(1, 3)).depth == 0


def test_blocks_kept_past_their_time_are_given_back_though_nobody_asks_for_anything() -> None:
    now_s = 100.0
    with make_manager({Tier.HBM: 6}, clock=lambda: now_s, by_hand=True) as manager:
        serve(manager, 1, 3)
        manager.step_frames(now_s)
        assert manager.step_frames(now_s) is None  # an engine that keeps nothing wakes nobody
        manager.keep(hashes_of(1, 2), ttl_s=10.0)
        manager.keep(hashes_of(1, 3), ttl_s=2.0)
        manager.keep(hashes_of(1, 1), ttl_s=math.inf)
        seen = []
        for _ in range(13):
            due_s = manager.step_frames(now_s)
            seen.append(manager.stats().pools[Tier.HBM].evictable)
            if due_s is None:
                break
            assert due_s > now_s
            now_s = due_s
        assert now_s == pytest.approx(110.0, abs=1.0)
        assert (seen[0], seen[3], seen[-1]) == (0, 1, 2)  # what is kept for ever stays


def test_an_idle_engine_of_threads_keeps_nothing_past_its_time() -> None:
    with make_manager({Tier.HBM: 6}) as manager:
        serve(manager, 1, 3)
        manager.keep(hashes_of(1, 3), ttl_s=0.2)
        assert manager.stats().pools[Tier.HBM].evictable == 0
        eventually(lambda: manager.stats().pools[Tier.HBM].evictable == 3, "blocks are kept past their time")


def test_kept_blocks_give_way_to_a_request_unless_of_the_highest_priority() -> None:
    with make_manager({Tier.HBM: 6}) as manager:
        serve(manager, 1, 3)
        serve(manager, 2, 3)
        manager.keep(hashes_of(1, 3), ttl_s=1000.0, priority=100)
        manager.keep(hashes_of(2, 3), ttl_s=1000.0, priority=99)
        assert manager.allocate(4) is None
        assert manager.allocate(3) is not None
        assert [manager.match(hashes_of(p, 3)).depth for p in (1, 2)] == [3, 0]
        with pytest.raises(ArgumentValueError, match="priority is 101"):
            manager.keep(hashes_of(1, 3), ttl_s=1.0, priority=101)
        with pytest.raises(ArgumentValueError, match="ttl_s is nan"):
            manager.keep(hashes_of(1, 3), ttl_s=float("nan"))


@pytest.mark.parametrize("held_in", [Tier.HBM, Tier.HOST, Tier.NVME])
def test_hashes_of_another_namespace_find_nothing_in_any_tier_and_take_nothing(held_in: Tier) -> None:
    other = Namespace(model="test", revision="r1", block_tokens=16, tenant="somebody else")
    with make_manager(SLOTS) as manager:
        manager.declare([other])
        serve(manager, 1, 6)
        assert manager.settle(WAIT_S)
        for tier in (Tier.HBM, Tier.HOST):
            if tier < held_in:
                manager.evict(tier, hashes_of(1, 6))
        before = manager.stats()
        assert manager.match(hashes_of(1, 6)).depth == manager.match(hashes_of(1, 6), NAMESPACE.id).depth == 6
        assert manager.match(hashes_of(1, 6), other.id).depth == 0
        assert manager.keep(hashes_of(1, 6), 60.0, namespace=other.id) == 0
        found = manager.acquire(other.id, hashes_of(1, 6))
        assert (found.depth, found.slots, found.hits) == (0, [], {})
        after = manager.stats()
        assert after.pools == before.pools
        if held_in is Tier.HBM:
            given = manager.allocate(6, other.id)
            assert given is not None
            with pytest.raises(LedgerError, match="held there under another namespace"):
                manager.create(other.id, NO_PARENT, 0, hashes_of(1, 6), given)
            manager.release(given)
        assert serve(manager, 1, 6).prefix.hits == {held_in: 6}


@pytest.mark.parametrize("core", [Ledger, NativeLedger])
def test_a_request_is_not_given_what_another_namespace_has_created_while_it_waited(core: NewLedger) -> None:
    other = Namespace(model="test", revision="r1", block_tokens=16, tenant="somebody else")
    gate = Gate(Tier.NVME, "read")
    with make_manager(SLOTS, wrap=gate, new_ledger=core, wait_s=WAIT_S) as manager:
        manager.declare([other])
        hashes = hashes_of(1, 2)
        given = manager.allocate(2, other.id)
        assert given is not None
        manager.unpin(manager.create(other.id, NO_PARENT, 0, hashes, given))
        assert manager.settle(WAIT_S)
        for tier in (Tier.HBM, Tier.HOST):
            manager.evict(tier, hashes)
        gate.close()
        got: list[Prefix] = []
        thread = threading.Thread(target=lambda: got.append(manager.acquire(other.id, hashes)))
        thread.start()
        try:
            eventually(lambda: manager.stats().copies_in_flight, "no copy has begun")
            given = manager.allocate(2, NAMESPACE.id)
            assert given is not None
            mine = manager.create(NAMESPACE.id, NO_PARENT, 0, hashes, given)
        finally:
            gate.opened.set()
            thread.join(WAIT_S)
        assert got[0].depth == 0 and not set(got[0].slots) & set(mine)
