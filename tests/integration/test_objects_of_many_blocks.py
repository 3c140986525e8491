"""Managers on an object pool whose objects hold several blocks: what is put, found, cut to what fits, forgotten; late
reads; deaths.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvbm.core.errors import LayoutError
from kvbm.core.events import BlocksEvicted, BlocksMigrated, EvictReason
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, NamespaceId, SequenceHash, Tier
from kvbm.core.policy import WriteBudget
from kvbm.locate.base import FoundElsewhere
from kvbm.manager.copies.staging import Staging
from kvbm.manager.objects.object_groups import groups_of
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import ObjectPool, ObjectStats, Proof, ReadOutcome, ReadResult, SlotPool
from kvbm.pools.object.pool import BlockObjects
from kvbm.streams.memory import MemoryLog
from tests.eventually import eventually
from tests.managers import (
    BLOCK_BYTES,
    NAMESPACE,
    KnowsAll,
    check_bytes,
    events_in,
    hashes_of,
    make_manager,
    rows_of,
    serve,
)
from tests.object_pools import memory_objects
from tests.wrapped_pools import Jittery, OutOfReach

WAIT_S = 120.0
K = 4


def objects_of(blocks: int) -> BlockObjects:
    return memory_objects(BLOCK_BYTES, blocks)


def names_in(pool: BlockObjects) -> set[bytes]:
    """The last hashes of the objects it holds."""
    return {bytes.fromhex(one.name.rsplit("/", 1)[1]) for one in pool.store.listed("", 1.0)}


class Claims(KnowsAll):
    """Knows what the streams of managers claimed and withdrew, as a catalog would."""

    def __init__(self) -> None:
        self.logs: list[MemoryLog] = []
        self.asked: list[bytes] = []

    def claims(self) -> set[bytes]:
        held: set[bytes] = set()
        for log in self.logs:
            for event in events_in(log):
                if isinstance(event, BlocksMigrated) and event.target == Tier.OBJECT:
                    held.update(groups_of(event.hashes, 1))
                elif isinstance(event, BlocksEvicted) and event.tier == Tier.OBJECT:
                    held.difference_update(groups_of(event.hashes, 1))
        return held

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        self.asked.append(hashes)
        held = self.claims()
        depth = 0
        while hashes[depth * HASH_BYTES :] and hashes[depth * HASH_BYTES : (depth + 1) * HASH_BYTES] in held:
            depth += 1
        return FoundElsewhere(depth)


class Asked:
    """An object pool that notes what it is asked, and can hold back, refuse or spoil its answers."""

    def __init__(self, pool: ObjectPool) -> None:
        self.pool = pool
        self.tier, self.block_bytes, self.reach = pool.tier, pool.block_bytes, pool.reach
        self.name, self.blocks, self.forgets = pool.name, pool.blocks, pool.forgets
        self.puts: list[int] = []
        self.gets: list[tuple[int, int, int]] = []  # objects, first, wanted
        self.lock, self.opened, self.entered = threading.Lock(), threading.Event(), threading.Event()
        self.opened.set()
        self.spoils: ReadOutcome | None = None

    def admit(self, namespaces: Iterable[Namespace]) -> None:
        self.pool.admit(namespaces)

    def absent(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[bool]:
        return self.pool.absent(namespace, hashes)

    def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
        with self.lock:
            self.puts.append(len(proof.hashes) // HASH_BYTES)
        return self.pool.put(rows, proof, at)

    def get(
        self,
        namespace: NamespaceId,
        chain: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
        first: int = 0,
    ) -> ReadResult:
        with self.lock:
            wanted = len(rows) if at is None else len(at)
            self.gets.append((len(chain) // HASH_BYTES // self.blocks, first, wanted))
        self.entered.set()
        self.opened.wait(WAIT_S)
        result = self.pool.get(namespace, chain, rows, at, first)
        if self.spoils is not None:
            return ReadResult([*result.outcomes[:-1], self.spoils], result.checksums)
        return result

    def stats(self) -> ObjectStats:
        return self.pool.stats()

    def close(self) -> None:
        self.pool.close()


def settled(manager: Manager) -> bool:
    """Nothing is offloaded any more, and the log has all of it."""
    return manager.settle(WAIT_S) and eventually(
        lambda: manager.durable() == manager.applied(), "the log does not take everything"
    )


def everything_but_objects(manager: Manager, prompt: int, depth: int, start: int = 0) -> None:
    for tier in manager.pools.slots:
        manager.evict(tier, hashes_of(prompt, depth, start))


@pytest.mark.parametrize("slots", [{Tier.HBM: 32}, {Tier.HBM: 32, Tier.HOST: 32}])
def test_only_whole_objects_are_put_and_come_back_with_their_bytes(slots: dict[Tier, int]) -> None:
    objects, claims, log = Asked(objects_of(K)), Claims(), MemoryLog()
    claims.logs.append(log)
    with make_manager(slots, sink=log, objects=objects, locator=claims) as manager:
        serve(manager, 1, 10)
        assert settled(manager)
        assert sum(objects.puts) == 8 and all(count % K == 0 for count in objects.puts)
        assert claims.claims() == set(groups_of(hashes_of(1, 8), 1))
        everything_but_objects(manager, 1, 10)
        assert serve(manager, 1, 10).prefix.hits == {Tier.OBJECT: 8}
        assert manager.stats().skipped == {}


def test_an_engine_that_decodes_puts_each_object_once_as_it_fills() -> None:
    objects = Asked(objects_of(K))
    with make_manager({Tier.HBM: 64, Tier.HOST: 64}, objects=objects, locator=KnowsAll()) as manager:
        slots: list[int] = []
        hashes = hashes_of(1, 20)
        prefix = manager.acquire(NAMESPACE.id, hashes[: 6 * HASH_BYTES])
        assert prefix.depth == 0
        for at in [(0, 6), *((at, at + 1) for at in range(6, 20))]:
            run = hashes[at[0] * HASH_BYTES : at[1] * HASH_BYTES]
            fresh = manager.allocate(at[1] - at[0])
            assert fresh is not None
            manager.pools.slots[Tier.HBM].memory[fresh] = rows_of(run)  # type: ignore[index]
            parent = hashes[(at[0] - 1) * HASH_BYTES : at[0] * HASH_BYTES] if at[0] else NO_PARENT
            slots += manager.create(NAMESPACE.id, SequenceHash(parent), at[0], run, fresh)
            assert settled(manager)
        manager.unpin(slots)
        assert sum(objects.puts) == 20
        everything_but_objects(manager, 1, 20)
        assert serve(manager, 1, 20).prefix.hits == {Tier.OBJECT: 20}


def test_what_is_held_of_an_object_is_not_copied_again() -> None:
    objects, claims, log = Asked(objects_of(K)), Claims(), MemoryLog()
    claims.logs.append(log)
    with make_manager({Tier.HBM: 32}, sink=log, objects=objects, locator=claims) as manager:
        serve(manager, 1, 12)
        assert settled(manager)
        everything_but_objects(manager, 1, 12, start=6)
        objects.gets.clear()
        assert serve(manager, 1, 12).prefix.hits == {Tier.HBM: 6, Tier.OBJECT: 6}
        assert claims.asked[-1] == hashes_of(1, 12, start=4)  # from the beginning of the object that block 6 is in
        assert objects.gets == [(2, 2, 6)]  # two objects, of which the first two blocks are not wanted


def test_a_hole_inside_objects_takes_a_call_for_each_side_of_it() -> None:
    objects = Asked(objects_of(K))
    with make_manager({Tier.HBM: 32}, objects=objects, locator=KnowsAll()) as manager:
        serve(manager, 1, 12)
        assert settled(manager)
        everything_but_objects(manager, 1, 12)
        assert serve(manager, 1, 12).prefix.hits == {Tier.OBJECT: 12}
        manager.evict(Tier.HBM, hashes_of(1, 3, start=1) + hashes_of(1, 10, start=5))
        objects.gets.clear()
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 12))
        check_bytes(manager, hashes_of(1, prefix.depth), prefix.slots)
        assert objects.gets == [(1, 1, 2), (2, 1, 5)]
        manager.unpin(prefix.slots)
        assert manager.acquire(NAMESPACE.id, hashes_of(1, 12)).hits == {Tier.HBM: 12}


def test_a_fetch_is_cut_to_the_room_there_is_also_inside_an_object() -> None:
    objects = Asked(objects_of(K))
    with make_manager({Tier.HBM: 16}, objects=objects, locator=KnowsAll()) as manager:
        serve(manager, 1, 12)
        assert settled(manager)
        everything_but_objects(manager, 1, 12)
        taken = manager.allocate(10)
        assert taken is not None
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 12))
        assert prefix.hits == {Tier.OBJECT: 6}
        check_bytes(manager, hashes_of(1, 6), prefix.slots)
        manager.unpin(prefix.slots)
        manager.release(taken)
        assert serve(manager, 1, 12).prefix.hits == {Tier.HBM: 6, Tier.OBJECT: 6}
        assert objects.gets[-1] == (2, 2, 6)


@pytest.mark.parametrize("spoils", [ReadOutcome.MISSING, ReadOutcome.CORRUPT])
def test_what_proves_bad_takes_the_claims_of_its_whole_object_with_it(spoils: ReadOutcome) -> None:
    objects, claims, log = Asked(objects_of(K)), Claims(), MemoryLog()
    claims.logs.append(log)
    with make_manager({Tier.HBM: 32}, sink=log, objects=objects, locator=claims) as manager:
        serve(manager, 1, 12)
        assert settled(manager)
        everything_but_objects(manager, 1, 12)
        objects.spoils = spoils
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 12))
        assert prefix.depth == 11
        manager.unpin(prefix.slots)
        assert settled(manager)
        assert claims.claims() == set(groups_of(hashes_of(1, 8), 1))
    said = [event for event in events_in(log) if isinstance(event, BlocksEvicted) and event.tier == Tier.OBJECT]
    reason = EvictReason.MISSING if spoils == ReadOutcome.MISSING else EvictReason.CORRUPT
    assert [(event.reason, event.hashes) for event in said] == [(reason, hashes_of(1, 12, start=8))]


def test_a_block_that_is_cleared_while_its_object_is_put_leaves_no_claim_on_any_part() -> None:
    claims, log = Claims(), MemoryLog()
    claims.logs.append(log)

    class Clearing(Asked):
        def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
            manager.evict(Tier.HBM, proof.hashes[HASH_BYTES : 2 * HASH_BYTES])
            return super().put(rows, proof, at)

    objects = Clearing(objects_of(K))
    with make_manager({Tier.HBM: 32}, sink=log, objects=objects, locator=claims, by_hand=True) as manager:
        serve(manager, 1, 8)
        while manager.offload_one():
            pass
        assert manager.stats().offloaded_blocks[Tier.OBJECT] == 4
        manager.step_frames(0.0)
        assert claims.claims() == set(groups_of(hashes_of(1, 8, start=4), 1))


def test_two_branches_that_share_blocks_are_put_as_two_objects() -> None:
    objects = objects_of(K)
    with make_manager({Tier.HBM: 32}, objects=objects, locator=KnowsAll(), by_hand=True) as manager:
        shared, ends = hashes_of(1, 3), (hashes_of(2, 4, start=3), hashes_of(3, 4, start=3))
        slots = manager.allocate(5)
        assert slots is not None
        manager.pools.slots[Tier.HBM].memory[slots] = rows_of(shared + ends[0] + ends[1])  # type: ignore[index]
        manager.create(NAMESPACE.id, NO_PARENT, 0, shared, slots[:3])
        for end, slot in zip(ends, slots[3:], strict=True):
            manager.create(NAMESPACE.id, SequenceHash(shared[-HASH_BYTES:]), 3, end, [slot])
        while manager.offload_one():
            pass
        assert names_in(objects) == {ends[0], ends[1]}
        assert manager.stats().offloaded_blocks[Tier.OBJECT] == 8


def test_objects_go_through_staging_whole() -> None:
    objects = Asked(objects_of(K))
    staging = Staging(14 * BLOCK_BYTES, BLOCK_BYTES, object_blocks=K)
    assert (staging.lanes, staging.lane_blocks) == (3, 4)
    with make_manager({Tier.HBM: 32}, objects=objects, locator=KnowsAll(), wrap=OutOfReach, staging=staging) as manager:
        serve(manager, 1, 14)
        assert settled(manager)
        assert objects.puts == [4, 4, 4]
        everything_but_objects(manager, 1, 14, start=2)
        objects.gets.clear()
        assert serve(manager, 1, 14).prefix.hits == {Tier.HBM: 2, Tier.OBJECT: 10}
        assert objects.gets == [(1, 2, 2), (1, 0, 4), (1, 0, 4)]  # each object is read once


def test_a_lane_that_holds_no_object_is_refused_when_the_manager_is_made() -> None:
    with pytest.raises(
        LayoutError, match=r"a lane of staging holds 1 blocks of 64 bytes, an object 4; raise offload.stag"
    ):
        make_manager({Tier.HBM: 8}, objects=objects_of(K), staging=Staging(2 * BLOCK_BYTES, BLOCK_BYTES))


def test_a_store_takes_no_more_than_its_budget_in_whole_objects() -> None:
    now_s = 0.0
    objects = Asked(objects_of(K))
    budgets = {Tier.OBJECT: WriteBudget(BLOCK_BYTES, begin_s=7.0)}
    with make_manager({Tier.HBM: 32}, objects=objects, by_hand=True, budgets=budgets, clock=lambda: now_s) as manager:
        serve(manager, 1, 12)
        while manager.offload_one():
            pass
        assert sum(objects.puts) == 4
        assert manager.stats().skipped == {Skipped.BUDGET: 8}


def test_a_get_that_returns_after_its_request_has_gone_keeps_its_slots_until_then() -> None:
    objects, claims, log = Asked(objects_of(K)), Claims(), MemoryLog()
    claims.logs.append(log)
    with make_manager({Tier.HBM: 16}, sink=log, objects=objects, locator=claims, wait_s=0.2) as manager:
        serve(manager, 1, 8)
        assert settled(manager)
        everything_but_objects(manager, 1, 8)
        objects.opened.clear()
        assert manager.acquire(NAMESPACE.id, hashes_of(1, 8)).depth == 0
        assert manager.stats().late_slots == 8
        assert manager.allocate(9) is None
        other = serve(manager, 2, 8, keep=True)  # all that is left of HBM
        objects.opened.set()
        assert settled(manager)
        check_bytes(manager, hashes_of(2, 8), other.slots)
        assert (manager.stats().late_copies, manager.stats().late_slots) == (1, 0)
        assert serve(manager, 1, 8).prefix.hits == {Tier.HBM: 8}


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("staged", [False, True])
def test_late_objects_never_land_in_slots_that_are_used_again(blocks: int, staged: bool) -> None:
    rng = random.Random(blocks)

    class Late(Asked):
        def get(self, *run: object, **more: object) -> ReadResult:
            time.sleep(rng.choice((0.0, 0.0, 0.002, 0.006)))
            result = super().get(*run, **more)  # type: ignore[arg-type]
            time.sleep(rng.choice((0.0, 0.002)))
            return result

    def wrap(pool: SlotPool) -> SlotPool:
        jittery = Jittery(pool, random.Random(pool.tier)) if pool.tier != Tier.HBM else pool
        return OutOfReach(jittery) if staged else jittery

    objects = Late(objects_of(blocks))
    slots = {Tier.HBM: 24, Tier.HOST: 12}
    with make_manager(slots, objects=objects, locator=KnowsAll(), wait_s=0.002, wrap=wrap) as manager:

        def engine(number: int) -> None:
            chance = random.Random(number)
            for _ in range(120):
                prompt, depth = chance.randrange(8), chance.randint(1, 8)
                served = serve(manager, prompt, depth, keep=True)  # checks every byte
                time.sleep(chance.choice((0.0, 0.003)))
                check_bytes(manager, hashes_of(prompt, depth), served.slots)
                manager.unpin(served.slots)
                if chance.random() < 0.3:
                    manager.evict(chance.choice((Tier.HBM, Tier.HOST)), hashes_of(chance.randrange(8), 8))

        with ThreadPoolExecutor(2) as engines:
            for done in [engines.submit(engine, number) for number in range(2)]:
                done.result(4 * WAIT_S)
        assert settled(manager)

        def is_in_objects() -> bool:
            everything_but_objects(manager, 1, 8)
            found = manager.acquire(NAMESPACE.id, hashes_of(1, 8), wait_s=WAIT_S)
            manager.unpin(found.slots)
            serve(manager, 1, 8)  # what no engine has put, for HOST never had it whole, may be put now
            return settled(manager) and found.hits.get(Tier.OBJECT, 0) > 0

        eventually(is_in_objects, "no object of the prompt is put")
        objects.opened.clear()  # one that is late in any case, then one that is not
        everything_but_objects(manager, 1, 8)
        manager.unpin(manager.acquire(NAMESPACE.id, hashes_of(1, 8)).slots)
        objects.opened.set()
        assert settled(manager)
        everything_but_objects(manager, 1, 8)
        found = manager.acquire(NAMESPACE.id, hashes_of(1, 8), wait_s=WAIT_S)
        assert found.hits.get(Tier.OBJECT, 0) > 0
        check_bytes(manager, hashes_of(1, found.depth), found.slots)
        manager.unpin(found.slots)
        assert settled(manager)
        stats = manager.stats()
        assert stats.late_copies > 0 and stats.hit_blocks[Tier.OBJECT] > 0
        assert (stats.corrupt_blocks, stats.late_slots, stats.quarantined_slots) == (0, 0, 0)
        for counts in stats.pools.values():
            assert counts.free + counts.held == counts.slots


def test_an_object_whose_writer_died_before_it_could_claim_it_is_claimed_by_the_next() -> None:
    objects, claims = objects_of(K), Claims()
    dead = make_manager({Tier.HBM: 16}, objects=Asked(objects), locator=claims, by_hand=True)
    serve(dead, 1, 8)
    while dead.offload_one():
        pass  # its events are never written: it dies here
    assert len(names_in(objects)) == 2 and claims.claims() == set()
    log = MemoryLog()
    claims.logs.append(log)
    with make_manager({Tier.HBM: 16}, sink=log, objects=objects, locator=claims) as manager:
        assert serve(manager, 1, 8).prefix.depth == 0  # nobody has claimed it: computed again
        assert settled(manager)
        everything_but_objects(manager, 1, 8)
        assert serve(manager, 1, 8).prefix.hits == {Tier.OBJECT: 8}
    assert len(names_in(objects)) == 2
