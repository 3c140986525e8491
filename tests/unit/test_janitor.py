"""The janitor as a state machine: what it withdraws, deletes, claims and leaves alone, whoever dies, sleeps or has a
wrong clock.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbm.core.errors import JanitorError, PoolError
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, split_hashes
from kvbm.core.policy import OTHERS
from kvbm.janitor import TenantPart
from kvbm.janitor import lease as leases
from kvbm.janitor.effects import (
    ClaimedLast,
    Delete,
    Describe,
    Effect,
    EmitClaims,
    ListPage,
    Pause,
    PutLease,
    WaitForSql,
    WriteList,
)
from kvbm.janitor.report import as_json, as_words
from kvbm.janitor.used import UsedBy, UsedHere, UsedList
from kvbm.pools.object.tombstones import LEASE_NAME, Tombstones, decode_list, encode_list, read_lists
from kvbm.pools.stores.base import Put, Refusal, StoreTrouble
from kvbm.pools.tenant_keys import add_key
from tests.janitors import BLOCK_BYTES, HOUR_S, OTHER, RULES, SPACE, Cluster, Course, K, World, chain, gc


def old_and_new(world: World) -> tuple[bytes, bytes]:
    """An object nobody has used for an hour, and a new one."""
    old, new = chain(1), chain(2)
    world.put(old)
    world.now_s += HOUR_S
    world.put(new)
    return old, new


# -- time and quota ----------------------------------------------------------------------------------------------------


def test_what_is_older_than_its_time_is_withdrawn_then_named_then_deleted_after_the_grace() -> None:
    world = World()
    old, new = old_and_new(world)
    run = Course(world).go(until=Delete)
    assert world.cluster.holds_none(old) and world.cluster.holds(new)
    assert [decode_list(world.store.objects[name][0]) for name in world.kept()] == [world.names(old)]
    assert world.objects() == {*world.names(old), *world.names(new)}
    begun_s = world.now_s
    assert sum(effect.seconds for effect in run.did(Pause)) == pytest.approx(RULES.grace_s)
    report = run.go().report
    assert world.objects() == set(world.names(new))
    assert (world.kept(), world.now_s) == (set(), begun_s)
    assert (report.withdrawn, report.deleted, report.found) == ({"ttl": 1}, 1, 0)
    assert (SPACE.id, old, EvictReason.TTL) in world.cluster.said
    order = [
        type(effect)
        for effect in run.done
        if type(effect) in (EmitClaims, WaitForSql, WriteList, Pause, ClaimedLast, Delete)
    ]
    assert order[1:5] == [ClaimedLast, EmitClaims, WaitForSql, WriteList]
    assert order[-4:] == [WaitForSql, ClaimedLast, Delete, WriteList]


def test_a_use_makes_an_object_young_again_also_while_the_janitor_looks() -> None:
    world = World()
    old, _ = old_and_new(world)
    world.cluster.claim(SPACE.id, old)
    assert gc(world).withdrawn == {}
    world.now_s += HOUR_S
    run = Course(world).go(until=ClaimedLast)  # its claims have been read
    world.cluster.claim(SPACE.id, old[-HASH_BYTES:])
    report = run.go().report
    assert (report.used, report.deleted) == (1, 1)
    assert set(world.names(old)) <= world.objects() and world.cluster.holds(old)


def test_above_a_quota_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    world = World()
    runs = [chain(number) for number in range(5)]
    for run in runs:
        world.put(run)
        world.now_s += 10
    world.cluster.claim(SPACE.id, runs[0])
    size = len(world.store.objects[world.names(runs[0])[0]][0])
    report = gc(world, RULES._replace(quota_bytes=3 * size))
    assert report.withdrawn == {"quota": 2}
    assert world.objects() == {name for run in (runs[0], runs[3], runs[4]) for name in world.names(run)}
    assert gc(world, RULES._replace(quota_bytes=3 * size)).withdrawn == {}


@pytest.mark.parametrize("block", [0, K - 1])
def test_what_is_used_while_the_janitor_looks_stays_though_it_was_chosen_by_quota(block: int) -> None:
    world = World()
    runs = [chain(number) for number in range(3)]
    for run in runs:
        world.put(run)
        world.now_s += 10
    size = len(world.store.objects[world.names(runs[0])[0]][0])
    course = Course(world, RULES._replace(quota_bytes=2 * size)).go(until=ClaimedLast)  # its claims have been read
    world.cluster.claim(SPACE.id, runs[0][block * HASH_BYTES : (block + 1) * HASH_BYTES])
    report = course.go().report
    assert (report.used, report.withdrawn, report.deleted) == (1, {}, 0)
    assert set(world.names(runs[0])) <= world.objects() and world.cluster.holds(runs[0])


def test_objects_that_nobody_claimed_count_towards_the_quota_of_the_pool() -> None:
    world = World()
    runs = [chain(number) for number in range(3)]
    for run in runs:
        world.put(run, claimed=run is not runs[2])
        world.now_s += 100
    size = len(world.store.objects[world.names(runs[0])[0]][0])
    report = gc(world, RULES._replace(quota_bytes=2 * size))
    assert (report.found, report.withdrawn) == (1, {"quota": 1})
    assert world.objects() == {name for run in runs[1:] for name in world.names(run)}


def test_a_tenant_above_its_quota_loses_its_own_blocks_alone() -> None:
    world = World()
    for number in range(4):
        world.put(chain(number), SPACE if number % 2 else OTHER)
        world.now_s += 1
    size = len(world.store.objects[world.names(chain(1))[0]][0])
    world.cluster.quotas = {"globex": size}
    report = gc(world)
    assert report.withdrawn == {"quota": 1}
    assert world.objects() == {*world.names(chain(2), OTHER), *world.names(chain(1)), *world.names(chain(3))}
    assert report.parts[OTHER.id.hex()].tenant == "globex"


def test_a_tenants_part_is_its_quota_and_its_weight_where_the_pool_is_full() -> None:
    world = World()
    runs = [chain(number) for number in range(8)]
    for number, run in enumerate(runs):
        world.put(run, OTHER if number < 4 else SPACE)
        world.now_s += 1
    size = len(world.store.objects[world.names(runs[4])[0]][0])
    world.cluster.quotas = {"globex": size}
    parts = {"globex": TenantPart(1, 3 * size), OTHERS: TenantPart(3)}
    report = gc(world, RULES._replace(parts=parts))
    assert report.withdrawn == {"quota": 1}  # its own part goes before what SQL says
    assert gc(world, RULES._replace(parts=parts, quota_bytes=4 * size)).withdrawn == {"quota": 3}
    left = [*world.names(runs[3], OTHER), *(name for run in runs[5:] for name in world.names(run))]
    assert world.objects() == set(left)  # 1 to 3, though those of globex are all older


def test_all_without_a_part_of_their_own_have_one_quota_together() -> None:
    world = World()
    runs = [chain(number) for number in range(4)]
    for number, run in enumerate(runs):
        world.put(run, SPACE if number % 2 else OTHER)
        world.now_s += 1
    size = len(world.store.objects[world.names(runs[1])[0]][0])
    report = gc(world, RULES._replace(parts={OTHERS: TenantPart(1, 2 * size)}))
    assert report.withdrawn == {"quota": 2}
    assert world.objects() == {*world.names(runs[2], OTHER), *world.names(runs[3])}


def test_no_time_and_no_quota_mean_that_nothing_goes() -> None:
    world = World()
    old_and_new(world)
    assert gc(world, RULES._replace(ttl_s=0)).withdrawn == {}


# -- prompts that part within an object --------------------------------------------------------------------------------


def parting(count: int) -> tuple[bytes, list[bytes]]:
    """Objects of prompts whose first two blocks are the same, and these two."""
    shared = chain(1)[: 2 * HASH_BYTES]
    return shared, [shared + chain(10 + at)[2 * HASH_BYTES :] for at in range(count)]


def test_blocks_that_objects_share_are_claimed_again_once() -> None:
    world = World()
    shared, objects = parting(3)
    for one in objects:
        world.put(one)
    world.cluster.withdraw(SPACE.id, shared, EvictReason.MISSING)
    world.now_s += 200
    report = gc(world)
    assert (report.mended_blocks, report.missing_blocks) == (2, 0)
    assert all(world.cluster.holds(one) for one in objects)
    assert gc(world).mended_blocks == 0


def test_an_object_goes_though_another_with_blocks_of_it_is_read_all_the_time_and_that_one_stays_claimed_whole() -> (
    None
):
    world = World()
    shared, (old, busy) = parting(2)
    world.put(old)
    world.now_s += HOUR_S
    world.put(busy)

    def read(effect: Effect[object]) -> None:
        if type(effect) in (ClaimedLast, Pause, ListPage):
            assert world.cluster.holds(busy)
            world.cluster.claim(SPACE.id, busy)

    report = Course(world).go(before=read).report
    assert (report.withdrawn, report.used, report.kept, report.deleted) == ({"ttl": 1}, 0, 0, 1)
    assert world.objects() == set(world.names(busy))
    assert world.cluster.holds(busy) and world.cluster.holds_none(old[len(shared) :])
    report = gc(world)
    assert (report.mended_blocks, report.missing_blocks, report.found) == (0, 0, 0)


def test_when_all_objects_with_a_block_go_its_claim_goes() -> None:
    world = World()
    _, objects = parting(3)
    for one in objects:
        world.put(one)
    world.now_s += HOUR_S
    assert gc(world).deleted == 3
    assert all(world.cluster.holds_none(one) for one in objects) and world.objects() == set()


def test_shared_blocks_that_make_up_for_claims_without_an_object_in_the_numbers_are_found_out_within_some_runs() -> (
    None
):
    world = World()
    shared, objects = parting(2)
    for run in objects:
        world.put(run)
    gone = chain(77)[: len(shared)]
    world.cluster.claim(SPACE.id, gone)  # as many as are counted twice
    world.now_s += RULES.young_s + RULES.skew_s + 1
    for number in range(16):
        gc(world, name=f"n{number}")
    assert world.cluster.holds_none(gone)
    assert all(world.cluster.holds(run) for run in objects)


def test_without_word_of_who_shares_an_object_the_claim_that_names_it_goes_first_and_the_others_next() -> None:
    world = World()
    shared, (old, busy) = parting(2)
    world.put(old)
    world.now_s += HOUR_S
    (name,) = world.put(busy)
    world.silent.add(name)
    assert gc(world).deleted == 1
    assert world.cluster.holds(busy) and world.cluster.holds_none(old[-HASH_BYTES:])
    world.silent.clear()
    world.now_s += 200
    assert gc(world).missing_blocks == 1
    assert world.cluster.holds(busy) and world.cluster.holds_none(old[len(shared) :])


# -- a claim during the grace ------------------------------------------------------------------------------------------


def test_what_is_claimed_during_the_grace_stays_and_is_claimed_whole() -> None:
    world = World()
    old, _ = old_and_new(world)
    other = chain(7)
    world.now_s -= HOUR_S
    world.put(other)
    world.now_s += HOUR_S
    run = Course(world).go(until=Pause, count=3)
    world.cluster.claim(SPACE.id, old[:HASH_BYTES])  # a read that began before the list was there
    report = run.go().report
    assert (report.kept, report.deleted) == (1, 1)
    assert set(world.names(old)) <= world.objects() and world.cluster.holds(old)
    assert world.kept() == set()
    assert not set(world.names(other)) & world.objects()


def test_instances_see_what_is_withdrawn_until_it_is_over() -> None:
    world = World()
    old, new = old_and_new(world)
    seen = Tombstones(world.store, RULES.grace_s / 3, 1.0, clock=lambda: world.now_s)
    names = [*world.names(old), *world.names(new)]
    assert seen.among(names) == set()
    run = Course(world).go(until=Pause)
    assert seen.among(names) == set()  # it has looked a moment ago
    world.now_s += RULES.grace_s / 3
    assert seen.among(names) == set(world.names(old))
    run.go()
    world.now_s += RULES.grace_s
    assert seen.among(names) == set()


def test_a_list_that_is_none_names_nothing() -> None:
    assert decode_list(encode_list(["1/a", "1/b"])) == ["1/a", "1/b"]
    assert decode_list(encode_list([])) == []
    assert decode_list(b"\xff\x00garbage\n1/a") == []
    assert decode_list(b"") == []


# -- repair ------------------------------------------------------------------------------------------------------------


def test_an_object_that_nobody_claims_is_claimed_once_it_is_old_enough() -> None:
    world = World()
    lost = chain(1, objects=3)
    world.put(lost, claimed=False)
    report = gc(world)
    assert (report.waiting, report.found) == (3, 0)
    world.now_s += RULES.young_s
    report = gc(world)
    assert (report.waiting, report.found, report.foreign) == (0, 3, 0)
    assert world.cluster.holds(lost)
    assert gc(world).found == 0


def test_a_catalog_that_has_lost_every_claim_has_them_again_after_one_run() -> None:
    world = World()
    for number in range(20):
        world.put(chain(number, objects=1 + number % 3), SPACE if number % 2 else OTHER)
    before = set(world.cluster.times)
    world.cluster.times.clear()
    world.now_s += 2 * RULES.young_s
    gc(world)
    assert set(world.cluster.times) == before
    assert len([said for said in world.cluster.said if said[2] is None]) <= 22  # an event a namespace, not an object


def test_claims_without_an_object_are_withdrawn_as_missing_and_half_claimed_objects_are_claimed_whole() -> None:
    world = World()
    here, gone, half = chain(1, objects=2), chain(2), chain(3)
    world.put(here)
    (name,) = world.put(gone)
    world.put(half)
    world.cluster.withdraw(SPACE.id, half[:HASH_BYTES], EvictReason.MISSING)
    del world.store.objects[name]
    world.now_s += 200
    report = gc(world)
    assert (report.missing_blocks, report.mended_blocks) == (K, 1)
    assert world.cluster.holds(here) and world.cluster.holds(half) and world.cluster.holds_none(gone)


def test_a_claim_that_is_younger_than_its_object_may_be_is_not_missed() -> None:
    world = World(blocks=1)
    world.put(chain(1, blocks=1))
    world.now_s += 1000
    world.cluster.claim(SPACE.id, chain(2, blocks=1))  # its object was put after the listing passed by
    assert gc(world, RULES._replace(ttl_s=0)).missing_blocks == 0
    world.now_s += 1000
    assert gc(world, RULES._replace(ttl_s=0)).missing_blocks == 1


def test_headers_are_read_only_where_numbers_differ() -> None:
    world = World()
    world.put(chain(1, objects=5))
    run = Course(world).go()
    assert run.did(Describe) == []


def test_a_store_that_does_not_answer_for_a_header_makes_nothing_missing() -> None:
    world = World()
    names = world.put(chain(1, objects=2))
    world.cluster.claim(SPACE.id, chain(9))
    world.now_s += 500

    world.silent.add(names[0])
    report = gc(world)
    assert (report.unknown, report.missing_blocks) == (1, 0)
    assert world.cluster.holds(chain(1, objects=2))


def test_what_a_slow_store_did_not_answer_in_time_is_asked_for_again_while_it_answers() -> None:
    world = World()
    lost = chain(1, objects=7)
    world.put(lost, claimed=False)
    world.now_s += 500

    world.in_time = 2
    report = gc(world)
    assert (report.found, report.unknown) == (7, 0)
    assert world.cluster.holds(lost)


def test_what_is_not_ours_is_counted_and_left_alone_however_old_it_is() -> None:
    world = World()
    names = world.put(chain(1, objects=3))
    first, second, third = names
    world.store.objects[first] = (b"KVBO and then nonsense", world.store.objects[first][1])
    world.store.objects[second] = world.store.objects[third]  # another object's bytes
    world.cluster.times.clear()
    world.store.put([Put("readme.txt", b"hello"), Put("4/zz/x", b"")], 1.0)
    world.now_s += 1000 * HOUR_S
    report = gc(world)
    assert (report.foreign, report.first_foreign != "", report.found, report.deleted) == (4, True, 1, 0)
    assert world.objects() == {*names, "readme.txt", "4/zz/x"}


def test_objects_of_every_k_are_looked_after_and_a_pool_with_a_k_of_its_own_sees_its_own_alone() -> None:
    world = World(blocks=4)
    world.put(chain(1), claimed=False)
    world.blocks, world.writer = 2, folder_of(world, 2)
    world.put(chain(2, blocks=2), claimed=False)
    world.now_s += 100
    assert gc(world, RULES._replace(only_blocks=2)).found == 1
    assert world.cluster.holds(chain(2, blocks=2)) and world.cluster.holds_none(chain(1))
    assert gc(world).found == 1


def folder_of(world: World, blocks: int):  # type: ignore[no-untyped-def]
    from tests.object_pools import memory_objects

    return memory_objects(BLOCK_BYTES, blocks, world.store)


# -- sealed objects, whose names tell nothing --------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    made = tmp_path / "keys.toml"
    add_key(made, "acme", "first")
    add_key(made, "globex", "first")
    return made


def test_sealed_objects_age_and_are_repaired_like_others(keys: Path) -> None:
    world = World(keys=keys)
    _, new = old_and_new(world)
    world.put(chain(3), OTHER)
    assert all("/e/" in name for name in world.objects())
    run = Course(world).go()
    assert (run.report.deleted, run.report.found, run.report.foreign) == (1, 0, 0)
    assert world.objects() == {*world.names(new), *world.names(chain(3), OTHER)}
    before = set(world.cluster.times)
    world.cluster.times.clear()
    world.now_s += 100
    assert gc(world).found == 2
    assert set(world.cluster.times) == before


def test_sealed_objects_of_a_namespace_nobody_has_told_of_age_too(keys: Path) -> None:
    world = World(keys=keys)
    world.cluster.told = []
    old, new = chain(1), chain(2)
    world.put(old)
    world.now_s += HOUR_S
    world.put(new)
    report = gc(world)
    assert (report.found, report.missing_blocks, report.deleted) == (0, 0, 1)
    assert world.objects() == set(world.names(new)) and world.cluster.holds(new)


def test_a_janitor_without_a_tenants_keys_leaves_its_objects_and_claims_alone(keys: Path, tmp_path: Path) -> None:
    world = World(keys=keys)
    world.put(chain(1))
    world.put(chain(2), OTHER)
    poorer = tmp_path / "poorer.toml"
    add_key(poorer, "nobody", "first")
    world.keys = poorer
    world.now_s += 1000 * HOUR_S
    claims = dict(world.cluster.times)
    report = gc(world)
    assert (report.foreign, report.deleted, report.missing_blocks) == (2, 0, 0)
    assert world.cluster.times == claims and len(world.objects()) == 2


# -- death at each step ------------------------------------------------------------------------------------------------


def effects_of_a_run() -> int:
    world = World()
    old_and_new(world)
    return len(Course(world).go().done)


@pytest.mark.parametrize("after_it", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(effects_of_a_run()))
def test_after_a_death_at_any_step_the_next_runs_come_to_the_same_end(at: int, after_it: bool) -> None:
    world = World()
    old, new = old_and_new(world)
    run = Course(world)
    for _ in range(at):
        run.step()
    if after_it and run.next is not None:
        run.driver.do(run.next)  # and nobody learns of it
    world.now_s += 2 * RULES.lease_s
    gc(world, name="b")
    assert world.kept() == set()
    assert set(world.names(new)) <= world.objects() and world.cluster.holds(new)
    is_there = set(world.names(old)) <= world.objects()
    assert is_there == world.cluster.holds(old)  # either both or neither: no ghost and no orphan
    world.now_s += 2 * HOUR_S
    world.cluster.claim(SPACE.id, new)
    gc(world, name="c")
    assert world.objects() == set(world.names(new))
    assert set(world.cluster.times) == {(SPACE.id, new[at : at + HASH_BYTES]) for at in range(0, len(new), HASH_BYTES)}


def test_a_list_left_by_another_clusters_janitor_is_finished_as_this_ones_catalog_knows_it() -> None:
    world = World()
    ours, theirs = chain(1), chain(2)
    there = Cluster(world)
    world.put(ours)
    world.put(theirs, cluster=there)
    there.claim(SPACE.id, ours)
    world.now_s += HOUR_S
    Course(world, cluster=there).go(until=Pause)  # and it dies: both are in its list
    world.cluster.claim(SPACE.id, ours)
    world.now_s += 2 * RULES.lease_s
    begun_s = world.now_s
    report = gc(world, name="b")
    assert world.now_s - begun_s >= RULES.grace_s  # the grace began anew
    assert (report.lists, report.kept, report.deleted) == (1, 1, 1)
    assert world.objects() == set(world.names(ours))
    assert world.kept() == set()


def test_what_the_store_does_not_delete_stays_in_the_list_for_the_next_run() -> None:
    world = World()
    old = chain(1, objects=2)
    world.put(old)
    world.now_s += HOUR_S
    run = Course(world).go(until=Delete)
    first, second = world.names(old)
    answer = [False, True]
    del world.store.objects[second]
    run.next = run.janitor.step(world.now_s, answer)
    report = run.go().report
    assert (report.deleted, report.undeleted) == (1, 1)
    assert read_lists(world.store, 1.0).popitem()[1] == [first]
    assert gc(world).deleted == 1
    assert (world.objects(), world.kept()) == (set(), set())


def test_what_a_list_names_and_the_store_does_not_tell_of_stays_in_the_list() -> None:
    world = World()
    old, _ = old_and_new(world)
    run = Course(world).go(until=Pause)  # and it dies
    assert run.report.deleted == 0
    world.now_s += 2 * RULES.lease_s
    (name,) = world.names(old)
    world.silent.add(name)
    assert gc(world, name="b").unknown == 2  # in the list, and in the listing
    assert [decode_list(world.store.objects[kept][0]) for kept in world.kept()] == [[name]]
    world.silent.clear()
    assert gc(world, name="c").deleted == 1
    assert world.kept() == set()


# -- several clusters --------------------------------------------------------------------------------------------------


def test_what_another_cluster_used_lately_stays_and_goes_once_that_one_is_gone_for_long() -> None:
    world = World()
    there = Cluster(world)
    ours, theirs = chain(1), chain(2)
    world.put(ours)
    world.put(theirs)
    there.claim(SPACE.id, theirs)
    world.now_s += HOUR_S
    there.claim(SPACE.id, theirs)
    there.claim(SPACE.id, ours)
    for block in split_hashes(ours):
        there.times[SPACE.id, block] = 1  # there it is old too
    gc(world, RULES._replace(ttl_s=0), cluster=there, name="there")
    report = gc(world)
    assert report.withdrawn == {"ttl": 1}
    assert world.objects() == set(world.names(theirs))
    world.now_s += RULES.ttl_s + RULES.skew_s + 1
    assert gc(world).withdrawn == {"ttl": 1}
    assert world.objects() == set()


def test_above_a_quota_what_another_cluster_uses_goes_last() -> None:
    world = World()
    there = Cluster(world)
    for number in range(3):
        world.put(chain(number))
        world.now_s += 10
    there.claim(SPACE.id, chain(0))
    gc(world, cluster=there, name="there")
    size = len(world.store.objects[world.names(chain(0))[0]][0])
    assert gc(world, RULES._replace(quota_bytes=size)).withdrawn == {"quota": 2}
    assert world.objects() == set(world.names(chain(0)))


def test_what_a_cluster_says_it_used_is_never_later_than_the_store_knows_and_nonsense_says_nothing() -> None:
    here = UsedHere()
    here.add("1/a", 50)
    here.add("1/b", 500)
    used = UsedBy([UsedList(here.body(), 100), UsedList(b"nonsense", 100), UsedList(here.body()[:-1], 100)])
    assert (used.last_ns("1/a"), used.last_ns("1/b"), used.last_ns("1/c")) == (50, 100, 0)
    assert UsedBy([]).last_ns("1/a") == 0


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_of_two_janitors_the_second_ends_with_one_sentence_and_touches_nothing() -> None:
    world = World()
    old_and_new(world)
    first = Course(world).go(until=Pause)
    held = dict(world.store.objects)
    second = Course(world, name="b")
    with pytest.raises(JanitorError, match=r"another janitor works: janitor a renewed its lease \d+ s ago"):
        second.go()
    assert world.store.objects == held
    assert first.go().report.deleted == 1
    assert gc(world, name="b").deleted == 0  # the lease was given back


def test_of_two_that_find_no_lease_at_once_one_gets_it() -> None:
    world = World()
    runs = [Course(world, name=name).go(until=PutLease) for name in "ab"]
    runs[1].go()
    with pytest.raises(JanitorError, match="took the lease"):
        runs[0].go()


def test_a_janitor_that_sleeps_past_its_lease_deletes_nothing_once_another_has_it() -> None:
    world = World()
    old, _ = old_and_new(world)
    first = Course(world).go(until=ClaimedLast, count=2)  # the grace is over
    world.now_s += 10 * RULES.lease_s  # a long sleep
    second = Course(world, name="b").go(until=Pause)
    with pytest.raises(JanitorError, match="lease was lost"):
        first.go()
    assert first.did(Delete) == [] and set(world.names(old)) <= world.objects()
    assert second.go().report.deleted == 1


def test_a_janitor_that_sleeps_past_its_lease_goes_on_when_nobody_took_it() -> None:
    world = World()
    old_and_new(world)
    run = Course(world).go(until=ClaimedLast, count=2)
    world.now_s += 10 * RULES.lease_s
    assert run.go().report.deleted == 1


def test_the_lease_is_renewed_before_it_is_needed_and_never_good_for_less_than_a_batch_when_deleting() -> None:
    world = World()
    old_and_new(world)
    renewed_s = [world.now_s]

    def watch(effect: Effect[object]) -> None:
        if isinstance(effect, PutLease):
            renewed_s.append(world.now_s)
        if isinstance(effect, Delete):
            assert renewed_s[-1] + RULES.lease_s - world.now_s >= RULES.batch_s

    Course(world, RULES._replace(grace_s=600.0)).go(before=watch)
    gaps = [later - earlier for earlier, later in pairwise(renewed_s)]
    assert max(gaps) < RULES.lease_s and len(gaps) > 10


def test_where_the_store_ignores_conditions_no_janitor_works_unless_it_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    old_and_new(world)
    words = ("a put over one ETag alone (If-Match) is done over another",)
    monkeypatch.setattr(world.store, "ignored_conditions", lambda name, deadline_s: words)
    held = dict(world.store.objects)
    with pytest.raises(JanitorError, match=r"If-Match.*gc\.alone"):
        Course(world).go()
    assert world.store.objects == held
    assert gc(world, RULES, dry_run=True).withdrawn  # it looks, and takes no lease
    assert gc(world, RULES._replace(alone=True)).deleted == 1


def test_a_store_that_does_not_let_conditions_be_tried_has_no_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    denied = Refusal(StoreTrouble.DENIED, "403 AccessDenied")
    monkeypatch.setattr(world.store, "ignored_conditions", lambda name, deadline_s: denied)
    with pytest.raises(PoolError, match=r"trial of conditional puts.*403 AccessDenied"):
        Course(world).go()


def test_what_trials_and_clocks_of_others_have_left_goes_after_an_hour() -> None:
    world = World()
    left = [".kvbm/clock/x", ".kvbm/trial/x"]
    world.store.put([Put(name, b"x") for name in left], 1.0)
    gc(world)
    assert set(left) <= set(world.store.objects)
    world.now_s += HOUR_S + 1
    gc(world)
    assert not set(left) & set(world.store.objects)


def test_a_lease_whose_bytes_are_nonsense_is_nobodys() -> None:
    world = World()
    world.store.put([Put(LEASE_NAME, b"\xff{")], 1.0)
    old_and_new(world)
    assert gc(world).deleted == 1
    lease = leases.decode(world.store.objects[LEASE_NAME][0])
    assert lease is not None and lease.holder == ""


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [31.0, -31.0, 1e9])
def test_a_janitor_whose_clock_is_far_from_the_stores_refuses_to_work(ahead_s: float) -> None:
    world = World()
    old_and_new(world)
    held = world.objects()
    with pytest.raises(JanitorError, match=rf"{'ahead of' if ahead_s > 0 else 'behind'} the store's"):
        gc(world, ahead_s=ahead_s)
    assert world.objects() == held and LEASE_NAME not in world.store.objects


def test_claims_from_a_clock_that_is_ahead_do_not_age_and_are_told() -> None:
    world = World()
    world.put(chain(1))
    world.now_s += HOUR_S
    for key in world.cluster.times:
        world.cluster.times[key] = int((world.now_s + HOUR_S) * 1e9)
    report = gc(world)
    assert (report.future_blocks, report.withdrawn) == (K, {})


def test_claims_from_a_clock_that_is_behind_make_no_object_older_than_the_store_says() -> None:
    world = World()
    world.put(chain(1))
    for key in world.cluster.times:
        world.cluster.times[key] = 1
    world.now_s += RULES.ttl_s + RULES.skew_s - 1
    assert gc(world).withdrawn == {}
    world.now_s += 2
    assert gc(world).withdrawn == {"ttl": 1}


def test_an_object_goes_no_earlier_for_uses_that_sql_does_not_tell_apart() -> None:
    world, rules = World(), RULES._replace(used_s=100.0)
    world.put(chain(1))
    world.now_s += RULES.ttl_s + RULES.skew_s + 99  # it may have been used 100 s after SQL's last word of it
    assert gc(world, rules).withdrawn == {}
    world.now_s += 2
    assert gc(world, rules).withdrawn == {"ttl": 1}


def test_the_grace_is_the_janitors_own_time_whatever_the_stores_clock_does() -> None:
    world = World()
    old_and_new(world)
    run = Course(world).go(until=Pause)
    world.store._clock_ns = lambda: int((world.now_s + 10 * HOUR_S) * 1e9)
    run.go(until=Delete)
    assert sum(effect.seconds for effect in run.did(Pause)) == pytest.approx(RULES.grace_s)


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_nothing_is_deleted_while_the_catalog_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr("kvbm.janitor.driver.time", SimpleNamespace(monotonic=lambda: world.now_s))
    old_and_new(world)
    run = Course(world).go(until=EmitClaims)
    world.cluster.stores_nothing = True
    with pytest.raises(JanitorError, match="has not stored within"):
        run.go()
    assert run.did(Delete) == [] and run.did(WriteList) == []
    lease = leases.decode(world.store.objects[LEASE_NAME][0])
    assert lease is not None and lease.holder == ""


def test_an_instance_that_lost_its_place_deletes_nothing() -> None:
    world = World()
    old_and_new(world)
    run = Course(world).go(until=Pause)
    world.cluster.epoch += 1  # type: ignore[assignment]
    with pytest.raises(JanitorError, match="took its place"):
        run.go()
    assert run.did(Delete) == []


def test_a_listing_that_breaks_off_ends_the_run_before_anything_was_withdrawn() -> None:
    world = World()
    old_and_new(world)
    run = Course(world).go(until=ListPage)
    said = len(world.cluster.said)
    with pytest.raises(PoolError, match="broke off"):
        run.fail(PoolError("the listing broke off"))
    assert len(world.cluster.said) == said


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_same_and_changes_nothing() -> None:
    world = World()
    old_and_new(world)
    world.put(chain(5), claimed=False)
    world.now_s += 100
    held, said = dict(world.store.objects), list(world.cluster.said)
    told = gc(world, dry_run=True)
    assert (world.store.objects, world.cluster.said) == (held, said)
    assert (told.withdrawn, told.found, told.deleted) == ({"ttl": 1}, 1, 0)
    done = gc(world)
    assert (done.withdrawn, done.found, done.parts.keys()) == (told.withdrawn, told.found, told.parts.keys())
    assert "1 objects would be withdrawn: 1 for ttl" in as_words(told)
    assert "1 objects deleted" in as_words(done) and "acme" in as_words(done)
    assert '"deleted":1' in as_json(done)
