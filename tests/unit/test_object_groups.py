"""Which blocks make whole objects: chains that grow block by block, fork, are forgotten; objects that wait for their
blocks.
"""

from __future__ import annotations

import random

from kvbm.core.ids import HASH_BYTES, NO_PARENT, NamespaceId, Tier, split_hashes
from kvbm.core.policy import SecondUse, WriteThrough
from kvbm.manager.objects.object_groups import Groups, ObjectGroup, groups_of
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.offload.queue import Offloader

ONE = NamespaceId(b"1" * 16)
K = 4


def chain(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "little") for number in range(first, first + count))


def last(run: bytes) -> bytes:
    return run[-HASH_BYTES:] or NO_PARENT


class Held:
    """What the tiers of an instance hold."""

    def __init__(self) -> None:
        self.blocks: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}

    def add(self, tier: Tier, run: bytes) -> bytes:
        self.blocks[tier].update(split_hashes(run))
        return run

    def lacking(self, tier: Tier, run: bytes) -> bytes:
        return b"".join(block for block in split_hashes(run) if block not in self.blocks[tier])


class Instance:
    """An offloader, what its tiers hold, and offloads to HOST that end at once or when told."""

    def __init__(self, host: bool = True, objects: WriteThrough | SecondUse | None = None) -> None:
        policies = {Tier.OBJECT: objects or WriteThrough()} | ({Tier.HOST: WriteThrough()} if host else {})
        self.held = Held()
        self.queue = Offloader(policies, self.held.lacking, object_blocks=K)

    def create(self, parent: bytes, start: int, run: bytes) -> None:
        self.held.add(Tier.HBM, run)
        self.queue.offer(ONE, Tier.HBM, run, 1, parent, start)

    def use(self, prompt: bytes) -> None:
        self.queue.offer(ONE, Tier.HBM, prompt, 2, NO_PARENT, 0)

    def arrive(self, run: bytes) -> None:
        self.queue.offer(ONE, Tier.HOST, self.held.add(Tier.HOST, run), 1)

    def objects(self) -> list[bytes]:
        """What leaves for OBJECT now; what leaves for HOST arrives first."""
        found: list[bytes] = []
        while (request := self.queue.next(0.0)) is not None:
            if request.target == Tier.HOST:
                self.arrive(request.hashes)
            else:
                found += groups_of(request.hashes, K)
        return found


def test_blocks_that_are_created_one_by_one_make_objects_as_they_fill() -> None:
    for host in (True, False):
        one = Instance(host)
        for at in range(11):
            one.create(last(chain(0, at)), at, chain(at, 1))
            assert one.objects() == ([chain(at - 3, 4)] if at % K == 3 else [])


def test_a_prompt_that_was_found_goes_on_from_any_block() -> None:
    one = Instance(host=False)
    one.held.add(Tier.HBM, chain(0, 6))
    one.use(chain(0, 6))
    assert one.objects() == [chain(0, 4)]
    one.queue.claims.add(chain(0, 4))
    one.create(chain(5, 1), 6, chain(6, 7))
    assert one.objects() == [chain(4, 4), chain(8, 4)]


def test_each_branch_of_a_fork_has_an_object_of_its_own() -> None:
    one = Instance()
    one.create(NO_PARENT, 0, chain(0, 3))
    one.create(chain(2, 1), 3, chain(100, 1))
    one.create(chain(2, 1), 3, chain(200, 1))
    assert one.objects() == [chain(0, 3) + chain(100, 1), chain(0, 3) + chain(200, 1)]


def test_a_group_whose_beginning_nobody_remembers_is_counted_and_the_next_is_whole() -> None:
    one = Instance(host=False)
    one.create(b"?" * HASH_BYTES, 5, chain(5, 8))
    assert one.objects() == [chain(8, 4)]
    assert one.queue.skipped == {Skipped.PARTIAL: 3}


def test_an_object_leaves_when_the_last_of_its_blocks_is_in_host_whatever_their_order() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        one = Instance()
        one.create(NO_PARENT, 0, chain(0, 12))
        while one.queue.next(0.0) is not None:
            pass
        order = split_hashes(chain(0, 12))
        rng.shuffle(order)
        gone: set[bytes] = set()
        for block in order:
            one.arrive(block)
            whole = [group for group in groups_of(chain(0, 12), K) if not one.held.lacking(Tier.HOST, group)]
            left = one.objects()
            assert set(left) == set(whole) - gone
            assert len(left) == len(set(left))
            gone.update(left)
        assert len(gone) == 3
        assert not one.queue._groups._waiting and not one.queue._groups._waiting_groups  # type: ignore[union-attr]


def test_an_object_that_is_claimed_is_not_offered_again_until_it_proves_missing() -> None:
    one = Instance(host=False)
    one.create(NO_PARENT, 0, chain(0, 8))
    assert one.objects() == [chain(0, 4), chain(4, 4)]
    one.queue.claims.add(chain(0, 8))
    one.use(chain(0, 8))
    assert one.objects() == []
    one.queue.claims.drop(chain(4, 4))
    one.use(chain(0, 8))
    assert one.objects() == [chain(4, 4)]


def test_what_a_policy_wants_at_the_second_use_leaves_then() -> None:
    one = Instance(objects=SecondUse())
    one.create(NO_PARENT, 0, chain(0, 6))
    assert one.objects() == []
    one.use(chain(0, 6))
    assert one.objects() == [chain(0, 4)]
    one.create(chain(5, 1), 6, chain(6, 2))
    one.use(chain(0, 8))
    assert one.objects() == [chain(0, 4), chain(4, 4)]


def test_what_left_hbm_before_its_object_was_whole_is_counted_where_there_is_no_host() -> None:
    one = Instance(host=False)
    one.create(NO_PARENT, 0, chain(0, 3))
    one.held.blocks[Tier.HBM].clear()
    one.create(chain(2, 1), 3, chain(3, 1))
    assert one.objects() == []
    assert one.queue.skipped == {Skipped.PARTIAL: 4}


def test_memory_for_chains_and_for_objects_that_wait_is_bounded() -> None:
    groups = Groups(K, unfinished=10, waiting=5)
    for number in range(1000):
        groups.follow(NO_PARENT, 0, chain(number * 10, 2))
        forgotten = groups.watch(ObjectGroup(ONE, chain(number * 10, 4)), chain(number * 10, 4))
        assert len(forgotten) == (1 if number >= 5 else 0)
    assert (len(groups._unfinished), groups._waiting_groups) == (10, 5)
    assert groups.follow(chain(9991, 1), 2, chain(9992, 2)) == (chain(9990, 4), b"")
    assert groups.follow(chain(1, 1), 2, chain(2, 2)) == (b"", chain(2, 2))


def test_who_waits_already_does_not_wait_twice() -> None:
    groups = Groups(K)
    for _ in range(3):
        groups.watch(ObjectGroup(ONE, chain(0, 4)), chain(0, 4))
    assert groups.arrived(chain(3, 1)) == [ObjectGroup(ONE, chain(0, 4))]
    assert groups.arrived(chain(3, 1)) == []


def test_a_run_to_objects_is_never_cut_inside_one() -> None:
    held = Held()
    queue = Offloader({Tier.OBJECT: WriteThrough()}, held.lacking, run_blocks=10, object_blocks=K)
    held.add(Tier.HBM, chain(0, 40))
    queue.offer(ONE, Tier.HBM, chain(0, 40), 1, NO_PARENT, 0)
    runs = []
    while (request := queue.next(0.0)) is not None:
        runs.append(request.hashes)
    assert runs == [chain(at, 8) for at in range(0, 40, 8)]


def test_an_object_larger_than_a_copy_is_carried_by_one_all_the_same() -> None:
    held = Held()
    queue = Offloader({Tier.OBJECT: WriteThrough()}, held.lacking, run_blocks=2, object_blocks=K)
    held.add(Tier.HBM, chain(0, 8))
    queue.offer(ONE, Tier.HBM, chain(0, 8), 1, NO_PARENT, 0)
    assert [request[:4] for request in (queue.next(0.0), queue.next(0.0)) if request is not None] == [
        (ONE, Tier.HBM, Tier.OBJECT, chain(0, 4)),
        (ONE, Tier.HBM, Tier.OBJECT, chain(4, 4)),
    ]


def test_a_group_that_waited_is_forgotten_with_what_was_to_be_offloaded() -> None:
    one = Instance()
    one.create(NO_PARENT, 0, chain(0, 6))
    one.queue.forget()
    one.arrive(chain(0, 4))
    assert one.objects() == []
    one.create(last(chain(0, 6)), 6, chain(6, 2))  # the chain itself is remembered
    one.arrive(chain(4, 2))
    assert one.objects() == [chain(4, 4)]
