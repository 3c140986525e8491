"""What goes to a colder tier next, and what may not: queue, ways, budget, and memory to go through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.ids import HASH_BYTES, NO_PARENT, NamespaceId, Tier, split_hashes
from kvbm.core.policy import OffloadPolicy, SecondUse, WriteBudget, WriteThrough
from kvbm.manager.copies.staging import Staging
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.offload.chain_runs import NOWHERE, ChainRun, ChainRuns
from kvbm.manager.offload.fair_queue import FairQueue
from kvbm.manager.offload.queue import Lacking, Offloader, PromptLimits

ONE, OTHER = NamespaceId(b"1" * 16), NamespaceId(b"2" * 16)


def hashes(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "little") for number in range(first, first + count))


def everything(tier: Tier, run: bytes) -> bytes:
    return run


def offloader(lacking: Lacking = everything, **more: int) -> Offloader:
    return Offloader({Tier.HOST: WriteThrough(), Tier.NVME: SecondUse()}, lacking, **more)


def drained(queue: Offloader) -> bytes:
    """All that waits, in the order in which it goes."""
    taken = []
    while (request := queue.next(0.0)) is not None:
        taken.append(request.hashes)
    return b"".join(taken)


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_blocks_that_are_created_one_by_one_leave_in_long_runs() -> None:
    queue = offloader(run_blocks=64)
    for number in range(100):
        queue.offer(ONE, Tier.HBM, hashes(number, 1), 1)
    runs = [queue.next(0.0), queue.next(0.0)]
    assert [request and request.hashes for request in runs] == [hashes(0, 64), hashes(64, 36)]
    assert queue.next(0.0) is None
    assert queue.waiting_blocks == 0


def test_a_run_carries_one_namespace_one_source_and_one_target() -> None:
    queue = offloader()
    for namespace, tier in ((ONE, Tier.HBM), (OTHER, Tier.HBM), (ONE, Tier.HOST), (ONE, Tier.HBM)):
        queue.offer(namespace, tier, hashes(0, 2), 2)
    found = []
    while (request := queue.next(0.0)) is not None:
        found.append((request.namespace, request.source, request.target, len(request.hashes) // HASH_BYTES))
    assert found == [
        (ONE, Tier.HBM, Tier.HOST, 2),
        (ONE, Tier.HOST, Tier.NVME, 2),
        (OTHER, Tier.HBM, Tier.HOST, 2),
        (OTHER, Tier.HOST, Tier.NVME, 2),
    ]


def test_nothing_is_taken_from_an_engines_hbm() -> None:
    queue = Offloader({Tier.HOST: WriteThrough(), Tier.NVME: WriteThrough()}, everything, engine_hbm=True)
    assert not queue.offer(ONE, Tier.HBM, hashes(0, 2), 1)
    assert queue.offer(ONE, Tier.HBM, hashes(0, 2), 2)  # used again
    assert queue.offer(ONE, Tier.HOST, hashes(2, 2), 1)  # brought by the engine
    request = queue.next(0.0)
    assert request is not None
    assert (request.source, request.target, request.hashes) == (Tier.HOST, Tier.NVME, hashes(0, 4))
    assert queue.next(0.0) is None


def test_an_engine_is_told_what_host_wants() -> None:
    queue = offloader()
    asked = [(Tier.HOST, 1), (Tier.HOST, 2), (Tier.NVME, 1), (Tier.NVME, 2), (Tier.OBJECT, 2)]
    assert [queue.wants(tier, uses) for tier, uses in asked] == [True, True, False, True, False]


def test_what_is_forgotten_is_not_offloaded_and_what_comes_later_is() -> None:
    queue = offloader(capacity_blocks=8)
    queue.offer(ONE, Tier.HBM, hashes(0, 5), 1)
    queue.offer(OTHER, Tier.HBM, hashes(5, 3), 1)
    queue.forget()
    assert (queue.next(0.0), queue.waiting_blocks) == (None, 0)
    queue.offer(ONE, Tier.HBM, hashes(10, 8), 1)
    request = queue.next(0.0)
    assert request is not None
    assert request.hashes == hashes(10, 8)
    assert queue.skipped == {}


def test_one_busy_way_does_not_hold_up_another() -> None:
    queue = offloader(run_blocks=4)
    queue.offer(ONE, Tier.HBM, hashes(0, 40), 1)
    queue.offer(OTHER, Tier.HBM, hashes(0, 4), 1)
    first, second = queue.next(0.0), queue.next(0.0)
    assert first is not None and second is not None
    assert (first.namespace, second.namespace) == (ONE, OTHER)


def test_a_full_queue_skips_and_says_so() -> None:
    queue = offloader(capacity_blocks=100, run_blocks=64)
    queue.offer(ONE, Tier.HBM, hashes(0, 200), 1)
    assert queue.waiting_blocks == 100  # its beginning: what lies behind a hole is of no use
    assert queue.skipped == {Skipped.QUEUE: 100}
    assert drained(queue) == hashes(0, 100)


# -- long prompts ------------------------------------------------------------------------------------------------------

PROMPT = 62_500


def test_a_prompt_of_any_length_waits_whole_in_its_order_and_others_take_their_turns() -> None:
    queue = Offloader(
        {Tier.HOST: WriteThrough()},
        everything,
        PROMPT + 64,
        fair=FairQueue({"long": 1, "short": 1}, {ONE: "long", OTHER: "short"}),
    )
    for at in range(0, PROMPT, 512):  # as a prefill creates them
        count = min(512, PROMPT - at)
        queue.offer(ONE, Tier.HBM, hashes(at, count), 1, hashes(at - 1, 1) if at else NO_PARENT, at)
    queue.offer(OTHER, Tier.HBM, hashes(1 << 40, 8), 1, NO_PARENT, 0)
    first, second = queue.next(0.0), queue.next(0.0)
    assert first is not None and second is not None
    assert {first.namespace, second.namespace} == {ONE, OTHER}
    assert hashes(0, 64) in (first.hashes, second.hashes)
    assert drained(queue) == hashes(64, PROMPT - 64)
    assert queue.skipped == {}


def test_what_is_offered_again_while_it_waits_waits_once() -> None:
    queue = offloader(capacity_blocks=1000)
    for at in range(0, 900, 3):
        queue.offer(ONE, Tier.HOST, hashes(at, 3), 2, hashes(at - 1, 1) if at else NO_PARENT, at)
    for _ in range(50):
        queue.offer(ONE, Tier.HOST, hashes(0, 900), 2, NO_PARENT, 0)
        queue.offer(ONE, Tier.HOST, hashes(100, 700), 2, hashes(99, 1), 100)
    assert queue.waiting_blocks < 900 + 64  # a run that ends within one that waits waits beside it
    assert queue.skipped == {}
    assert b"".join(dict.fromkeys(split_hashes(drained(queue)))) == hashes(0, 900)


def test_a_prompt_waits_as_far_as_it_is_lacking_hole_by_hole() -> None:
    there = {number for number in range(500) if number % 7 == 3 or 100 <= number < 230 or number < 5}

    def lacking(tier: Tier, run: bytes) -> bytes:
        return b"".join(block for block in split_hashes(run) if int.from_bytes(block, "little") not in there)

    queue = offloader(lacking)
    queue.offer(ONE, Tier.HBM, hashes(0, 500), 1, NO_PARENT, 0)
    assert drained(queue) == lacking(Tier.HOST, hashes(0, 500))


def test_positions_follow_blocks_into_their_copies() -> None:
    queue = offloader()
    queue.offer(ONE, Tier.HBM, hashes(10, 5), 1, hashes(9, 1), 10)
    queue.offer(ONE, Tier.HBM, hashes(900, 2), 1)
    request = queue.next(0.0)
    assert request is not None
    assert list(request.positions().values()) == [10, 11, 12, 13, 14, NOWHERE, NOWHERE]


def test_a_tier_that_cannot_hold_a_prompt_gets_its_beginning() -> None:
    limits = PromptLimits({Tier.HBM: 1000, Tier.HOST: 100})
    queue = Offloader({Tier.HOST: WriteThrough()}, everything, limits=limits)
    for at in range(0, 300, 30):
        queue.offer(ONE, Tier.HBM, hashes(at, 30), 1, hashes(at - 1, 1) if at else NO_PARENT, at)
    assert drained(queue) == hashes(0, 100)
    assert queue.skipped == {Skipped.BEYOND: 200}


def test_a_tenant_gets_no_more_of_a_prompt_than_its_quota() -> None:
    limits = PromptLimits({Tier.HOST: 100}, {"small": {Tier.HOST: 20}})
    fair = FairQueue({"small": 1}, {ONE: "small"})
    queue = Offloader({Tier.HOST: WriteThrough()}, everything, limits=limits, fair=fair)
    queue.offer(ONE, Tier.HBM, hashes(0, 50), 1, NO_PARENT, 0)
    assert drained(queue) == hashes(0, 20)


@pytest.mark.parametrize(
    ("nvme", "object_", "reach"),
    [
        (WriteThrough(), None, 200),  # HOST is the way to NVME
        (SecondUse(), None, 100),  # not on the first use
        (None, WriteThrough(), 300),
        (WriteThrough(), WriteThrough(), 300),
    ],
)
def test_host_takes_as_much_of_a_prompt_as_what_lies_behind_it(
    nvme: OffloadPolicy | None, object_: OffloadPolicy | None, reach: int
) -> None:
    policies = {Tier.HOST: WriteThrough(), Tier.NVME: nvme, Tier.OBJECT: object_}
    limits = PromptLimits({Tier.HOST: 100, Tier.NVME: 200})
    queue = Offloader({tier: policy for tier, policy in policies.items() if policy}, everything, limits=limits)
    queue.offer(ONE, Tier.HBM, hashes(0, 300), 1, NO_PARENT, 0)
    assert drained(queue) == hashes(0, reach)
    queue.offer_arrived(ONE, Tier.HOST, hashes(0, 300), list(range(300)))
    taken = []
    while (request := queue.next(0.0)) is not None:
        taken.append((request.target, len(request.hashes) // HASH_BYTES))
    assert sum(blocks for tier, blocks in taken if tier == Tier.NVME) == (200 if isinstance(nvme, WriteThrough) else 0)
    assert sum(blocks for tier, blocks in taken if tier == Tier.OBJECT) == (300 if object_ else 0)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90), st.integers(0, 5)), max_size=40))
def test_whatever_is_offered_in_whatever_pieces_goes_once_at_least_and_is_counted_right(
    offers: list[tuple[int, int, int]],
) -> None:
    queue, wanted, gone = offloader(run_blocks=8), set[bytes](), list[bytes]()
    for start, count, takes in offers:
        run = hashes(start, count)
        queue.offer(ONE, Tier.HBM, run, 1, hashes(start - 1, 1) if start else NO_PARENT, start)
        wanted.update(split_hashes(run))
        for _ in range(takes):
            if (request := queue.next(0.0)) is not None:
                gone += split_hashes(request.hashes)
    waiting = queue.waiting_blocks
    last = split_hashes(drained(queue))
    assert len(last) == waiting
    assert queue.waiting_blocks == 0
    assert {*gone, *last} == wanted


# -- the budget of a device's endurance --------------------------------------------------------------------------------


def test_a_budget_is_spent_and_earned_again() -> None:
    budget = WriteBudget(1000, begin_s=2.0)
    assert budget.left_bytes(50.0) == 2000
    budget.spend(1500)
    assert budget.left_bytes(50.0) == 500
    assert budget.left_bytes(51.5) == 2000
    budget.spend(5000)
    assert budget.left_bytes(51.5) == 0
    assert budget.left_bytes(54.5) == 0
    assert budget.left_bytes(55.5) == 1000


def test_a_day_is_saved_up_and_no_more() -> None:
    budget = WriteBudget(10)
    budget.left_bytes(0.0)
    assert budget.left_bytes(1e9) == 864_000


def test_a_clock_that_goes_back_earns_nothing() -> None:
    budget = WriteBudget(1000, begin_s=1.0)
    assert budget.left_bytes(100.0) == 1000
    budget.spend(1000)
    assert budget.left_bytes(90.0) == 0
    assert budget.left_bytes(100.0) == 0
    assert budget.left_bytes(101.0) == 1000


# -- memory to go through ----------------------------------------------------------------------------------------------


def test_offloads_never_have_the_lanes_that_requests_need() -> None:
    staging = Staging(64 << 10, 4096, onboard_lanes=2, offload_lanes=2)
    taken = [staging.take(0.0, is_offload=True) for _ in range(3)]
    assert [lane is not None for lane in taken] == [True, True, False]
    assert all(staging.take(0.0, is_offload=False) is not None for _ in range(2))
    assert staging.take(0.0, is_offload=False) is None


def test_a_request_may_have_every_lane() -> None:
    staging = Staging(64 << 10, 4096, onboard_lanes=2, offload_lanes=2)
    assert sum(staging.take(0.0, is_offload=False) is not None for _ in range(5)) == staging.lanes == 4


def test_lanes_are_aligned_and_share_no_byte_and_the_arena_is_bounded() -> None:
    staging = Staging(1 << 20, 5000)
    lanes = [lane for lane in (staging.take(0.0, is_offload=False) for _ in range(4)) if lane is not None]
    assert len(lanes) == 4
    assert all(lane.ctypes.data % 4096 == 0 and lane.shape == (52, 5000) for lane in lanes)
    for number, lane in enumerate(lanes):
        lane[:] = number
    assert all((lane == number).all() for number, lane in enumerate(lanes))
    assert sum(lane.nbytes for lane in lanes) <= 1 << 20


def test_blocks_larger_than_the_arena_get_two_lanes_all_the_same() -> None:
    staging = Staging(4096, 10_000)
    assert (staging.lanes, staging.lane_blocks) == (2, 1)
    assert staging.take(0.0, is_offload=True) is not None
    assert staging.take(0.0, is_offload=True) is None
    assert staging.take(0.0, is_offload=False) is not None


def test_a_run_of_objects_is_shortened_by_whole_objects() -> None:
    """Its last object waits already, with other blocks before it: half an object would join the next run to a wrong
    one.
    """
    runs = ChainRuns(64 * HASH_BYTES, unit_blocks=2)
    runs.add(ChainRun(hashes(1, 2) + hashes(5, 2), 0))
    assert runs.add(ChainRun(hashes(3, 2) + hashes(5, 2), 2)) == 2
    assert [run.hashes for run in runs.take()] == [hashes(1, 2) + hashes(5, 2), hashes(3, 2)]


def test_blocks_that_arrive_go_on_only_where_their_namespace_may_be_durable() -> None:
    queue = Offloader(
        {Tier.HOST: WriteThrough(), Tier.NVME: WriteThrough()},
        everything,
        may_be_durable=lambda namespace: namespace == ONE,
    )
    assert not queue.offer_arrived(OTHER, Tier.HOST, hashes(1, 4), range(4))
    assert queue.offer_arrived(ONE, Tier.HOST, hashes(1, 4), range(4))
