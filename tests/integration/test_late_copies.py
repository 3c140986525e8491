"""A slot in copy belongs to the copy: reads that come late or never, requests that are given up, devices that hold a
thread.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvbm.manager.copies.copies_in_flight
import kvbm.manager.copies.workers
from kvbm.core.ids import HASH_BYTES, Tier
from kvbm.core.policy import WriteBudget
from kvbm.manager.copies.staging import Staging
from kvbm.manager.copies.workers import Workers
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import ReadOutcome, ReadResult, SlotPool
from tests.eventually import eventually
from tests.managers import (
    BLOCK_BYTES,
    NAMESPACE,
    KnowsAll,
    check_bytes,
    hashes_of,
    make_manager,
    rows_of,
    serve,
)
from tests.object_pools import memory_objects
from tests.wrapped_pools import Gate, Jittery, OutOfReach, Wrapped

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@contextmanager
def held_in_nvme(gate: Gate, **more: Any) -> Iterator[Manager]:
    """A manager whose prompts 0 to 3, of four blocks, are in NVME alone, and whose gate is shut."""
    slots = {Tier.HBM: 16, Tier.NVME: 32}
    with make_manager(slots, wrap=gate, offload=(Tier.NVME,), **more) as manager:
        for prompt in range(4):
            serve(manager, prompt, 4)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
        gate.close()
        try:
            yield manager
        finally:
            gate.opened.set()


def leave_late(manager: Manager, prompt: int) -> None:
    """A request goes on while the copy it has asked for does not end.

    One that no thread has begun in time is given up instead.
    """
    before = manager.stats().late_slots

    def is_late() -> bool:
        assert manager.acquire(NAMESPACE.id, hashes_of(prompt, 4)).depth == 0
        return manager.stats().late_slots > before

    eventually(is_late, "no copy begins")


def test_who_took_the_place_of_a_stuck_thread_is_one_too_many_when_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvbm.manager.copies.workers, "_IDLE_S", 3600.0)  # no thread ends for want of work
    workers, going_on, ending = Workers(1, "test"), threading.Event(), threading.Event()

    def stuck() -> threading.Thread:
        assert going_on.wait(WAIT_S)
        workers.reclaim()  # as a copy that is late does when it ends
        return threading.current_thread()

    late = workers.submit(stuck)
    workers.replace_stuck()
    try:
        busy = workers.submit(ending.wait, WAIT_S)  # on the thread that takes its place
        eventually(busy.running, "nobody takes its place")
        going_on.set()
        thread = late.result(WAIT_S)
        thread.join(WAIT_S)
        assert not thread.is_alive(), "two threads are left where one is allowed"
        ending.set()
        assert busy.result(WAIT_S)
        assert workers.submit(threading.current_thread).result(WAIT_S) is not thread
    finally:
        ending.set()
        workers.shutdown()


def test_a_read_that_never_returns_is_a_miss_in_time_and_holds_its_slots() -> None:
    gate = Gate(Tier.NVME, "read")
    with held_in_nvme(gate, wait_s=0.2) as manager:
        leave_late(manager, 0)
        stats = manager.stats()
        assert (stats.late_slots, stats.copies_in_flight) == (8, 1)
        assert manager.allocate(13) is None  # the four slots of the copy are nobody else's
        fresh = manager.allocate(12)
        assert fresh is not None
        manager.release(fresh)
        assert manager.evict(Tier.NVME, hashes_of(0, 4)) == 4
        assert manager.stats().pools[Tier.NVME].free == 16  # those it reads from are not free either
        gate.opened.set()
        assert manager.settle(WAIT_S)
        stats = manager.stats()
        assert (stats.late_slots, stats.late_copies, stats.quarantined_slots) == (0, 1, 0)
        assert stats.pools[Tier.NVME].free == 20
        assert stats.pools[Tier.HBM].free == 16  # what was cleared meanwhile does not come back


class Stop(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_late_copy_counts_to_its_end_wherever_its_request_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(kvbm.manager.copies.workers, "_IDLE_S", 0.01)  # a thread ends when it has nothing to do
    gate, replace, calls = Gate(Tier.NVME, "read"), Workers.replace_stuck, [0]

    def interrupted(workers: Workers) -> None:
        calls[0] += 1
        if when == "after" or calls[0] > 1:
            replace(workers)
        if calls[0] == 1:
            raise Stop

    with held_in_nvme(gate, wait_s=0.2) as manager:
        executor = manager._copies._executor
        assert isinstance(executor, Workers)
        with monkeypatch.context() as signal:
            signal.setattr(Workers, "replace_stuck", interrupted)
            gate.opened.clear()
            with pytest.raises(Stop):
                manager.acquire(NAMESPACE.id, hashes_of(0, 4))
        gate.opened.set()
        assert manager.settle(WAIT_S)
        assert manager._copies.late_from == {} and manager.stats().late_slots == 0
        least = executor._threads
        eventually(
            lambda: executor._room in (least, least + 1), "not as many threads may be begun as before, or one more"
        )


def test_a_device_that_is_silent_is_asked_no_more_until_it_answers() -> None:
    gate = Gate(Tier.NVME, "read")
    with held_in_nvme(gate, wait_s=0.1) as manager:
        for prompt in range(2):
            leave_late(manager, prompt)
        assert "NVME: reads do not end" in manager.trouble()
        for prompt in range(4):  # would wait for ever with an endless deadline
            assert manager.acquire(NAMESPACE.id, hashes_of(prompt, 4), wait_s=WAIT_S * 10).depth == 0
        assert manager.stats().copies_in_flight == 2
        gate.opened.set()
        assert manager.settle(WAIT_S)
        assert manager.trouble() == ""
        assert manager.acquire(NAMESPACE.id, hashes_of(3, 4), wait_s=WAIT_S).hits == {Tier.NVME: 4}
        assert serve(manager, 3, 4).prefix.hits == {Tier.HBM: 4}  # with the right bytes


def test_a_silent_device_does_not_take_the_threads_of_the_others() -> None:
    gate = Gate(Tier.NVME, "read")
    slots = {Tier.HBM: 24, Tier.HOST: 4, Tier.NVME: 32}
    with make_manager(slots, wrap=gate, wait_s=0.1) as manager:
        for prompt in range(3):
            serve(manager, prompt, 4)
            assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
        gate.close()
        for prompt in range(2):  # both threads are kept
            leave_late(manager, prompt)
        prefix = manager.acquire(NAMESPACE.id, hashes_of(2, 4), wait_s=WAIT_S)
        assert prefix.hits == {Tier.HOST: 4}
        manager.unpin(prefix.slots)
        gate.opened.set()


def test_a_request_may_wait_for_nothing_and_finds_its_blocks_the_next_time() -> None:
    gate = Gate(Tier.NVME, "read")
    with held_in_nvme(gate) as manager:
        gate.opened.set()
        for prompt in range(4):
            prefix = manager.acquire(NAMESPACE.id, hashes_of(prompt, 4), wait_s=0.0)
            manager.unpin(prefix.slots)
            assert manager.settle(WAIT_S)
            for _ in range(3):  # a copy may be taken back before it began
                manager.unpin(manager.acquire(NAMESPACE.id, hashes_of(prompt, 4)).slots)
            assert serve(manager, prompt, 4).prefix.hits == {Tier.HBM: 4}


@pytest.mark.parametrize("reach", ["memory", "staged"])
@pytest.mark.parametrize("seed", range(3))
def test_what_arrives_after_its_deadline_never_lands_in_a_slot_that_is_used_again(seed: int, reach: str) -> None:
    rng, turns = random.Random(seed), 60

    def wrap(pool: SlotPool) -> SlotPool:
        jittery = Jittery(pool, random.Random(seed + pool.tier)) if pool.tier != Tier.HBM else pool
        return OutOfReach(jittery) if reach == "staged" else jittery

    slots = {Tier.HBM: 20, Tier.HOST: 14, Tier.NVME: 24}
    objects = memory_objects(BLOCK_BYTES)
    with make_manager(slots, wrap=wrap, wait_s=0.001, objects=objects, locator=KnowsAll()) as manager:

        def engine(number: int) -> None:
            chance = random.Random(seed * 100 + number)
            for _ in range(turns):
                prompt, depth = chance.randrange(8), chance.randint(1, 6)
                served = serve(manager, prompt, depth, keep=True)  # checks every byte
                time.sleep(chance.choice((0.0, 0.003)))
                check_bytes(manager, hashes_of(prompt, depth), served.slots)
                manager.unpin(served.slots)
                if chance.random() < 0.2:
                    manager.evict(chance.choice((Tier.HBM, Tier.HOST)), hashes_of(chance.randrange(8), 6))

        def are_late() -> bool:
            with ThreadPoolExecutor(3) as engines:
                for done in [engines.submit(engine, rng.randrange(1 << 30)) for _ in range(3)]:
                    done.result()
            assert manager.settle(WAIT_S)
            return manager.stats().late_copies > 5

        eventually(are_late, "copies are not late", 4 * WAIT_S)
        stats = manager.stats()
        assert (stats.corrupt_blocks, stats.late_slots, stats.quarantined_slots) == (0, 0, 0)
        for counts in stats.pools.values():
            assert counts.allocated == 0
            assert counts.free + counts.held == counts.slots


def test_a_manager_that_closes_lets_go_of_requests_whose_copies_have_not_begun() -> None:
    gate = Gate(Tier.NVME, "read")
    with held_in_nvme(gate, wait_s=WAIT_S * 10) as manager:
        depths: list[int] = []

        def acquire(prompt: int) -> None:
            depths.append(manager.acquire(NAMESPACE.id, hashes_of(prompt, 4)).depth)

        askers = [threading.Thread(target=acquire, args=(prompt,)) for prompt in range(4)]
        for asker in askers:
            asker.start()
        eventually(
            lambda: (
                manager.stats().copies_in_flight == 4
                and len(manager._copies.running) == 2
                and len(manager._executor._queue) == 2  # type: ignore[attr-defined]
            ),
            "two run, two wait",
            state=manager.stats,
        )
        closer = threading.Thread(target=manager.close, args=(0.2,))
        closer.start()
        eventually(lambda: len(depths) == 2, "those whose copies had not begun wait on")
        gate.opened.set()
        for thread in (*askers, closer):
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_a_request_given_up_during_its_offload_leaves_the_slot_to_the_copy() -> None:
    gate = Gate(Tier.NVME, "write")
    gate.close()
    with make_manager({Tier.HBM: 8, Tier.NVME: 8}, wrap=gate, offload=(Tier.NVME,)) as manager:
        served = serve(manager, 1, 4, keep=True)
        assert gate.entered.wait(WAIT_S)
        manager.unpin(served.slots)  # the engine aborts the request, and wants its slots for another
        manager.evict(Tier.HBM, hashes_of(1, 4))
        fresh = manager.allocate(4)
        assert fresh is not None and not set(fresh) & set(served.slots)
        assert manager.allocate(1) is None
        manager.pools.slots[Tier.HBM].memory[fresh] = 0xEE  # type: ignore[index]
        gate.opened.set()
        assert manager.settle(WAIT_S)
        assert manager.held(Tier.NVME) == []  # cleared at its source while it moved
        manager.release(fresh)
        assert manager.stats().pools[Tier.HBM].free == 8


def test_an_engine_never_waits_for_an_offload_and_is_told_what_was_skipped() -> None:
    gate = Gate(Tier.NVME, "write")
    gate.close()
    with make_manager({Tier.HBM: 64, Tier.NVME: 512}, wrap=gate, offload=(Tier.NVME,)) as manager:
        manager._offloader._capacity_blocks = 16
        for prompt in range(12):
            slots = manager.allocate(4)
            if slots is None:
                break  # every slot waits to be offloaded or is: the engine is told at once
            hashes = hashes_of(prompt, 4)
            manager.pools.slots[Tier.HBM].memory[slots] = rows_of(hashes)  # type: ignore[index]
            manager.unpin(manager.create(NAMESPACE.id, bytes(HASH_BYTES), 0, hashes, slots))
        assert manager.stats().skipped[Skipped.QUEUE] >= 12
        assert manager.stats().skipped_offloads == sum(manager.stats().skipped.values())
        gate.opened.set()
        assert manager.settle(WAIT_S)


def test_offloads_that_find_no_staging_are_skipped_and_requests_still_have_theirs() -> None:
    gate = Gate(Tier.NVME, "write")

    def wrap(pool: SlotPool) -> SlotPool:
        return OutOfReach(gate(pool))

    staging = Staging(2 * BLOCK_BYTES, BLOCK_BYTES)  # one lane for offloads, one for requests, of a block each
    slots = {Tier.HBM: 32, Tier.NVME: 32}
    with make_manager(slots, wrap=wrap, wait_s=0.2, offload=(Tier.NVME,), staging=staging) as manager:
        serve(manager, 1, 4)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, hashes_of(1, 4))
        gate.close()
        serve(manager, 2, 4)
        assert gate.entered.wait(WAIT_S)  # one offload has the lane; a thread more would wait for it
        with manager._lock:
            manager._offloader.offer(NAMESPACE.id, Tier.HBM, hashes_of(2, 4), 1)
        assert manager.offload_one()
        assert manager.stats().skipped == {Skipped.STAGING: 4}
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 4), wait_s=WAIT_S)
        assert prefix.hits == {Tier.NVME: 4}  # in four parts
        manager.unpin(prefix.slots)
        gate.opened.set()


def test_a_device_takes_no_more_than_its_budget() -> None:
    now_s = 0.0
    budget = WriteBudget(BLOCK_BYTES, begin_s=5.0)
    slots, budgets = {Tier.HBM: 32, Tier.NVME: 32}, {Tier.NVME: budget}
    with make_manager(slots, offload=(Tier.NVME,), by_hand=True, budgets=budgets, clock=lambda: now_s) as manager:
        serve(manager, 1, 8)
        while manager.offload_one():
            pass
        assert len(manager.held(Tier.NVME)) == 5
        assert manager.stats().skipped == {Skipped.BUDGET: 3}
        now_s += 3.0
        serve(manager, 1, 8)  # used again, so offered again
        while manager.offload_one():
            pass
        assert len(manager.held(Tier.NVME)) == 8


@pytest.mark.parametrize("source", [Tier.HBM, Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("reach", ["memory", "staged"])
def test_a_block_whose_read_is_not_good_never_arrives(reach: str, source: Tier) -> None:
    bad = {1, 2, 6}

    class Refusing(Wrapped):
        def read(self, slots: Sequence[int], *run: Any) -> ReadResult:
            result = super().read(slots, *run)
            wanted = run[1]
            for index in range(len(slots)):
                if any(wanted[index * HASH_BYTES : (index + 1) * HASH_BYTES] == hashes_of(1, b + 1, b) for b in bad):
                    result.outcomes[index] = ReadOutcome.FAILED
            return result

    def wrap(pool: SlotPool) -> SlotPool:
        pool = Refusing(pool) if pool.tier == source == Tier.HBM else pool  # the others once they are filled
        return OutOfReach(pool) if reach == "staged" else pool

    slots = {Tier.HBM: 16, Tier.HOST: 16, Tier.NVME: 16}
    parts_of_three = Staging(4 * 3 * BLOCK_BYTES, BLOCK_BYTES)
    with make_manager(slots, wrap=wrap, staging=parts_of_three) as manager:
        serve(manager, 1, 8)
        assert manager.settle(WAIT_S)
        if source == Tier.HBM:
            good = {hashes_of(1, b + 1, b) for b in range(8) if b not in bad}
            assert set(manager.held(Tier.HOST)) == set(manager.held(Tier.NVME)) == good
            return
        tiers = (Tier.HBM, Tier.HOST) if source == Tier.NVME else (Tier.HBM,)
        for tier in tiers:
            manager.evict(tier, hashes_of(1, 8))
        manager.pools.slots[source] = wrap_now(Refusing, manager.pools.slots[source], reach)
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 8))
        assert prefix.hits == {source: 1}
        manager.unpin(prefix.slots)
        assert manager.settle(WAIT_S)
        assert len(manager.held(Tier.HBM)) == 5
        assert manager.stats().pools[Tier.HBM].free == 11


def wrap_now(refusing: type[Wrapped], pool: SlotPool, reach: str) -> SlotPool:
    inner = refusing(pool.pool if isinstance(pool, OutOfReach) else pool)
    return OutOfReach(inner) if reach == "staged" else inner


# -- the end -----------------------------------------------------------------------------------------------------------


def test_memory_that_a_copy_nobody_can_confirm_may_write_outlives_its_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvbm.manager.copies.copies_in_flight, "_unended", kept := [])

    class Broken(Wrapped):
        breaks = False

        def read(self, *run: Any) -> ReadResult:
            if Broken.breaks and self.tier == Tier.NVME:
                raise RuntimeError("a bug in the pool")
            return super().read(*run)

    manager = make_manager({Tier.HBM: 8, Tier.NVME: 8}, wrap=Broken, offload=(Tier.NVME,))
    serve(manager, 1, 4)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(1, 4))
    Broken.breaks = True
    assert manager.acquire(NAMESPACE.id, hashes_of(1, 4)).depth == 0
    assert manager.stats().quarantined_slots == 8
    memory = manager.pools.slots[Tier.HBM].memory
    assert memory is not None
    first_byte, there = memory.ctypes.data, weakref.ref(memory)
    del memory
    manager.close(0.2)
    del manager
    gc.collect()
    left = there()
    assert left is not None and left.ctypes.data == first_byte and len(left) == 8
    assert len(kept) == 1


def test_pools_are_closed_by_the_copy_that_ends_last_after_their_manager() -> None:
    gate = Gate(Tier.NVME, "read")
    slots = {Tier.HBM: 8, Tier.NVME: 8}
    manager = make_manager(slots, wrap=gate, wait_s=0.1, offload=(Tier.NVME,))
    serve(manager, 1, 4)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(1, 4))
    gate.close()
    leave_late(manager, 1)
    manager.close(0.2)
    assert manager.pools.slots[Tier.HBM].memory is not None  # the copy may still write it
    gate.opened.set()
    eventually(lambda: manager.pools.slots[Tier.HBM].memory is None, "the pools stay open")


def test_a_process_ends_though_a_device_keeps_its_threads() -> None:
    script = """
import threading
from kvbm.core.ids import Tier
from tests.wrapped_pools import Gate
from tests.managers import NAMESPACE, hashes_of, make_manager, serve
gate = Gate(Tier.NVME, "read")
gate.hold = lambda: gate.opened.wait(1000)
manager = make_manager({Tier.HBM: 8, Tier.NVME: 8}, wrap=gate, wait_s=0.1, offload=(Tier.NVME,))
serve(manager, 1, 4)
assert manager.settle(60)
manager.evict(Tier.HBM, hashes_of(1, 4))
gate.close()
while not manager.stats().late_slots:
    assert manager.acquire(NAMESPACE.id, hashes_of(1, 4)).depth == 0
manager.close(0.2)
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, capture_output=True, text=True, timeout=4 * WAIT_S
    )
    assert done.stdout.splitlines()[-1] == "ended", done.stderr
    assert done.returncode == 0
