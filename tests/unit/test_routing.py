"""Routing: each part of the cost, by numbers one can check by hand; then lookup's excluding."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from kvbm.catalog.index.lookup import lookup
from kvbm.catalog.members.liveness import (
    LIVENESS_S,
    Exclude,
    HeartbeatReceived,
    Input,
    LastHeartbeat,
    LifeState,
    Liveness,
    LivenessTicked,
    OwnPulse,
    StreamProgress,
)
from kvbm.catalog.routing.router import HEARD_LATE_S, MOST_CALLERS, Router, RoutingTask
from kvbm.config import RoutingSettings, TierWeightSettings
from kvbm.core.answers import MAX_HASHES, MAX_INPUT_TOKENS, MAX_TOKENS, RankedInstance
from kvbm.core.events import BlocksCreated, Event, InstanceStarted, InstanceStopped, PoolStated, StopReason
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, Tier
from kvbm.core.topology import ASSUMED_BLOCK_BYTES, TIER_LINKS
from kvbm.reference.routed_blocks import WAYS, RoutedBlocks
from kvbm.streams.base import Heartbeat
from tests.indexes import REFERENCE, Twin, each_twin, frame_bytes

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
SPACE = Namespace(model="m", block_tokens=100).id
BLOCK_BYTES = 1 << 20
POOLS = (
    PoolStated(Tier.HBM, 100, BLOCK_BYTES),
    PoolStated(Tier.HOST, 100, BLOCK_BYTES),
    PoolStated(Tier.OBJECT, 0, BLOCK_BYTES, Reach.CLUSTER, "pool"),
)


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def ask(*numbers: int, extra_tokens: int = 0) -> RoutingTask:
    return RoutingTask(SPACE, hashes(*numbers), 100 * len(numbers) + extra_tokens, 100)


def beat(instance: InstanceId, at_s: float = 0.0, queued: int = 0, **more: object) -> LastHeartbeat:
    heartbeat = Heartbeat(
        instance=instance,
        cluster="c",
        epoch=Epoch(1),
        published=Offset(0),
        wall_time_ns=0,
        queued_tokens=queued,
        **more,  # type: ignore[arg-type]
    )
    return LastHeartbeat(heartbeat, at_s)


class Cluster:
    def __init__(self, twin: Twin, *instances: InstanceId, settings: RoutingSettings | None = None) -> None:
        self.index = twin.index()
        self.router: Router[Any] = self.index.router(settings or RoutingSettings())
        self.pulses: dict[InstanceId, LastHeartbeat | None] = {}
        for instance in instances or (A, B):
            self.index.apply(frame_bytes(instance, InstanceStarted(epoch=Epoch(1), pools=POOLS)))
            self.pulses[instance] = beat(instance)

    def hold(self, instance: InstanceId, tier: Tier, *numbers: int) -> None:
        created = BlocksCreated(namespace=SPACE, tier=tier, hashes=hashes(*numbers))
        self.index.apply(frame_bytes(instance, created))

    def listed(self, now_s: float, asked: RoutingTask, noted: bool = False) -> list[RankedInstance]:
        """All instances, best first."""
        candidates = self.router.candidates()
        for instance, pulse in self.pulses.items():
            self.router.add(candidates, instance)
            if pulse is not None:
                self.router.hear(instance, pulse)
        best, more, _ = self.router.route(now_s, asked, [candidates], None, len(self.pulses), noted)
        assert more == 0
        return best

    def rank(self, now_s: float, asked: RoutingTask) -> dict[str, RankedInstance]:
        return {entry.instance: entry for entry in self.listed(now_s, asked)}

    def route(self, now_s: float, asked: RoutingTask) -> str:
        ranked = self.listed(now_s, asked, noted=True)
        assert [entry.cost_s for entry in ranked] == sorted(entry.cost_s for entry in ranked)
        for entry in ranked:
            parts = entry.queueing_s + entry.recompute_s + entry.balance_s + entry.fetch_s
            assert entry.cost_s == pytest.approx(parts)
        return ranked[0].instance


@each_twin
def test_whoever_has_the_prefix_gets_the_prompt(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.hold(B, Tier.HBM, 1, 2, 3)
    found = cluster.rank(0.0, ask(1, 2, 3, 4, extra_tokens=50))
    assert (found[B].depth, found[B].missing_tokens) == (3, 150)
    assert found[B].recompute_s == pytest.approx(2.0 * 150 / 10_000)
    assert found[A].recompute_s == pytest.approx(2.0 * 450 / 10_000)
    assert cluster.route(0.0, ask(1, 2, 3, 4)) == B


@each_twin
def test_blocks_of_a_size_that_nobody_has_said_are_brought_at_a_price(twin: Twin) -> None:
    cluster = Cluster(twin)
    unsaid = tuple(PoolStated(tier, 0, 0) for tier in (Tier.HBM, Tier.HOST, Tier.NVME))
    cluster.index.apply(frame_bytes(C, InstanceStarted(epoch=Epoch(1), pools=unsaid)))
    cluster.pulses[C] = beat(C)
    cluster.hold(C, Tier.HOST, 1, 2, 3)
    cluster.hold(B, Tier.HBM, 1, 2, 3)
    found = cluster.rank(0.0, ask(1, 2, 3))
    assert found[C].fetch_s == pytest.approx(TIER_LINKS[Tier.HOST].seconds(3 * ASSUMED_BLOCK_BYTES))
    assert found[B].fetch_s == 0.0
    assert cluster.route(0.0, ask(1, 2, 3)) == B


@each_twin
def test_a_long_queue_outweighs_a_held_prefix(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.hold(B, Tier.HBM, 1, 2, 3)
    cluster.pulses[B] = beat(B, queued=20_000)
    found = cluster.rank(0.5, ask(1, 2, 3))
    assert found[B].queueing_s == pytest.approx((20_000 - 0.5 * 10_000) / 10_000)  # half a second was worked off
    assert cluster.route(0.5, ask(1, 2, 3)) == A


@each_twin
def test_what_was_routed_since_the_heartbeat_counts_as_queued(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.route(1.0, ask(*range(50)))
    assert cluster.rank(1.0, ask(99))[A].queueing_s == pytest.approx(0.5)  # it did nothing before that
    assert cluster.rank(1.3, ask(99))[A].queueing_s == pytest.approx(0.2)
    cluster.pulses[A] = beat(A, at_s=0.9)
    assert cluster.rank(1.0, ask(99))[A].queueing_s == pytest.approx(0.5)
    cluster.pulses[A] = beat(A, at_s=1.1, queued=700)  # the heartbeat has seen it
    assert cluster.rank(1.1, ask(99))[A].queueing_s == pytest.approx(0.07)


@each_twin
def test_an_instance_whose_last_heartbeat_is_older_has_done_no_more_of_what_is_routed_now(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.pulses = {A: beat(A, at_s=0.0), B: beat(B, at_s=0.9)}
    chosen = Counter(cluster.route(1.0, ask(*range(100 * number, 100 * number + 10))) for number in range(20))
    assert chosen == {A: 10, B: 10}


@each_twin
def test_a_queue_is_worked_off_up_to_each_route_and_not_beyond(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.pulses[A] = beat(A, queued=2_000)
    cluster.route(0.1, ask(*range(10)))  # 1,000 of the 2,000 are left, and 1,000 come
    assert cluster.rank(0.1, ask(99))[A].queueing_s == pytest.approx(0.2)
    cluster.route(0.9, ask(*range(100, 150)))  # all was done at 0.3
    assert cluster.rank(0.9, ask(99))[A].queueing_s == pytest.approx(0.5)


@each_twin
def test_a_heartbeat_that_comes_just_after_a_route_does_not_know_of_it(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.pulses[A] = beat(A, at_s=1.0)
    cluster.route(1.0, ask(*range(50)))
    for at_s in (1.0, 1.0 + 0.9 * HEARD_LATE_S):
        cluster.pulses[A] = beat(A, at_s=at_s)
        assert cluster.rank(at_s, ask(99))[A].queueing_s == pytest.approx(0.5)
    cluster.pulses[A] = beat(A, at_s=1.0 + 1.1 * HEARD_LATE_S)
    assert cluster.rank(1.1, ask(99))[A].queueing_s == 0.0


@each_twin
def test_without_heartbeats_what_was_routed_is_worked_off_too(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.pulses[A] = None
    cluster.route(1.0, ask(*range(300)))
    assert cluster.rank(1.0, ask(999))[A].queueing_s == pytest.approx(3.0)
    assert cluster.rank(2.0, ask(999))[A].queueing_s == pytest.approx(2.0)
    assert cluster.rank(40.0, ask(999))[A].queueing_s == 0.0


@each_twin
def test_a_routed_prompt_counts_as_soon_to_be_held_for_a_while(twin: Twin) -> None:
    cluster = Cluster(twin)
    chosen = cluster.route(0.0, ask(1, 2, 3))
    found = cluster.rank(29.0, ask(1, 2, 3, 4))
    assert found[chosen].depth == 3
    assert {entry.depth for name, entry in found.items() if name != chosen} == {0}
    assert {entry.depth for entry in cluster.rank(30.0, ask(1, 2, 3, 4)).values()} == {0}


@each_twin
def test_routed_blocks_extend_held_ones(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.hold(A, Tier.HBM, 1, 2)
    cluster.route(0.0, ask(1, 2, 3, 4))
    assert cluster.rank(1.0, ask(1, 2, 3, 4, 5))[A].depth == 4
    other = RoutingTask(NamespaceId(bytes(16)), hashes(1, 2, 3, 4), 400, 100)
    assert cluster.rank(1.0, other)[A].depth == 0


@each_twin
def test_balance_is_against_the_mean_and_decays(twin: Twin) -> None:
    cluster = Cluster(twin)
    first = cluster.route(0.0, ask(*range(100)))
    found = cluster.rank(0.0, ask(*range(200, 210)))
    other = B if first == A else A  # one has got a second of prefill, the mean is half of one, ten are added to it
    assert found[first].balance_s == pytest.approx(2.0 * (1.0 - 0.5) / (0.5 + 10))
    assert found[other].balance_s == pytest.approx(2.0 * (0.0 - 0.5) / (0.5 + 10))
    later = cluster.rank(300.0, ask(*range(200, 210)))
    assert later[first].balance_s == pytest.approx(2.0 * (0.5 - 0.25) / (0.25 + 10))


@each_twin
def test_prompts_with_a_common_start_are_spread_when_they_come_seldom(twin: Twin) -> None:
    cluster = Cluster(twin, A, B, C)
    counts: Counter[str] = Counter()
    for number in range(60):
        now_s = 40.0 * number
        prompt = ask(1, 2, *range(1000 + 100 * number, 1080 + 100 * number))
        cluster.pulses = {name: beat(name, at_s=now_s) for name in (A, B, C)}
        chosen = InstanceId(cluster.route(now_s, prompt))
        cluster.hold(chosen, Tier.HBM, 1, 2)
        counts[chosen] += 1
    assert max(counts.values()) <= 1.3 * min(counts.values())


@each_twin
def test_colder_tiers_cost_what_their_links_cost(twin: Twin) -> None:
    cluster = Cluster(twin, A, settings=RoutingSettings(tier_weights=TierWeightSettings(host=2.0)))
    cluster.hold(A, Tier.HBM, 1)
    cluster.hold(A, Tier.HOST, 2, 3)
    found = cluster.rank(0.0, ask(1, 2, 3))[A]
    assert (found.depth, found.fetch_blocks) == (3, 2)
    assert found.fetch_s == pytest.approx(2.0 * TIER_LINKS[Tier.HOST].seconds(2 * BLOCK_BYTES))


@each_twin
def test_a_pool_beyond_the_own_tiers_counts_when_fetching_beats_computing(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.hold(A, Tier.HBM, 1)
    cluster.index.claim("pool", SPACE, hashes(2, 3, 4))
    found = cluster.rank(0.0, ask(1, 2, 3, 4, 5))[A]
    assert (found.depth, found.fetch_blocks, found.missing_tokens) == (4, 3, 100)
    assert found.fetch_s == pytest.approx(TIER_LINKS[Tier.OBJECT].seconds(3 * BLOCK_BYTES))
    cluster.router = cluster.index.router(RoutingSettings(prefill_tokens_per_s=1e7))
    found = cluster.rank(0.0, ask(1, 2, 3, 4, 5))[A]
    assert (found.depth, found.fetch_s, found.missing_tokens) == (1, 0.0, 400)


@each_twin
def test_equal_costs_are_told_apart_by_content_and_always_the_same_way(twin: Twin) -> None:
    chosen = []
    for number in range(40):
        once, again = Cluster(twin, A, B).route(0.0, ask(number)), Cluster(twin, B, A).route(0.0, ask(number))
        assert once == again
        chosen.append(once)
    assert 8 <= chosen.count("a") <= 32


@each_twin
def test_a_prompt_shorter_than_a_block_is_routed_too(twin: Twin) -> None:
    assert Cluster(twin).route(0.0, RoutingTask(SPACE, b"", 7, 100)) in ("a", "b")


# -- what instances have measured -------------------------------------------------------------------------------------


@each_twin
def test_a_measured_speed_counts_within_four_times_of_what_is_expected(twin: Twin) -> None:
    cluster = Cluster(twin, A, B, C)
    cluster.pulses = {
        A: beat(A, queued=10_000, prefill_tokens_per_s=20_000.0, queue_tokens_per_s=5_000.0),
        B: beat(B, queued=10_000, prefill_tokens_per_s=1e12, queue_tokens_per_s=1e12),
        C: beat(C, queued=10_000, prefill_tokens_per_s=1.0, queue_tokens_per_s=1e-9),
    }
    found = cluster.rank(0.0, ask(1, 2))
    assert [found[name].queueing_s for name in (A, B, C)] == pytest.approx([2.0, 0.25, 4.0])
    for name, tokens_per_s in ((A, 20_000), (B, 40_000), (C, 2_500)):
        assert found[name].ttft_s == pytest.approx(found[name].queueing_s + 200 / tokens_per_s)
    for nothing in (0.0, -1.0, math.nan, math.inf):
        cluster.pulses = {A: beat(A, queued=10_000, prefill_tokens_per_s=nothing, queue_tokens_per_s=nothing)}
        assert cluster.rank(0.0, ask(1, 2))[A].ttft_s == pytest.approx(1.0 + 0.02)


@each_twin
def test_no_route_changes_how_quick_an_instance_is_taken_to_be(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.pulses = {A: beat(A, prefill_tokens_per_s=20_000.0)}
    before = cluster.rank(0.0, ask(1, 2))[A]
    for tokens in (0, 1, 10**18):
        cluster.route(0.0, RoutingTask(SPACE, b"", tokens, 100, "other"))
    after = cluster.rank(0.0, ask(1, 2))[A]
    assert (after.ttft_s, after.cost_s) == (before.ttft_s, before.cost_s)


@each_twin
def test_when_all_wait_missing_blocks_weigh_more(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.hold(B, Tier.HBM, *range(20))
    prompt = ask(*range(20))
    cluster.pulses = {A: beat(A), B: beat(B, queued=5_000)}
    assert cluster.rank(0.0, prompt)[A].cost_s < cluster.rank(0.0, prompt)[B].cost_s
    cluster.pulses = {A: beat(A, queued=100_000), B: beat(B, queued=105_000)}
    assert cluster.rank(0.0, prompt)[A].cost_s > cluster.rank(0.0, prompt)[B].cost_s


# -- what a request says of itself ------------------------------------------------------------------------------------


@each_twin
def test_a_deadline_puts_first_who_keeps_it_and_what_nobody_keeps_is_neither_admitted_nor_remembered(
    twin: Twin,
) -> None:
    cluster = Cluster(twin)
    cluster.hold(B, Tier.HBM, *range(100))
    cluster.pulses = {A: beat(A, queued=12_000), B: beat(B, queued=20_000)}
    prompt = ask(*range(100))
    assert cluster.rank(0.0, prompt)[B].cost_s < cluster.rank(0.0, prompt)[A].cost_s
    ranked = cluster.listed(0.0, prompt._replace(deadline_s=2.1))
    assert [(entry.instance, entry.admitted) for entry in ranked] == [("b", True), ("a", False)]
    cluster.pulses[B] = beat(B, queued=22_500)
    in_time = prompt._replace(deadline_s=2.24)
    ranked = cluster.listed(0.0, in_time)
    assert [(entry.instance, entry.admitted) for entry in ranked] == [("a", True), ("b", False)]
    late = cluster.listed(0.0, prompt._replace(deadline_s=0.5), noted=True)
    assert not late[0].admitted
    again = cluster.listed(0.0, prompt._replace(deadline_s=0.5))
    assert again == late  # nothing was remembered
    assert cluster.listed(0.0, prompt, noted=True)[0].admitted
    assert cluster.listed(0.0, prompt)[0].balance_s != 0


@each_twin
def test_a_batch_waits_until_somebody_is_free_and_others_do_not(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.pulses = {A: beat(A, queued=150_000), B: beat(B, queued=110_000)}
    asked = {latency: ask(1)._replace(latency=latency) for latency in ("interactive", "standard", "batch")}

    def admitted(latency: str) -> bool:
        return cluster.listed(0.0, asked[latency])[0].admitted

    assert [admitted(latency) for latency in asked] == [True, True, False]
    cluster.pulses[B] = beat(B, queued=90_000)
    assert admitted("batch")
    weights = [cluster.rank(0.0, one)[A].recompute_s for one in asked.values()]
    assert weights[0] < weights[1] < weights[2]


@each_twin
def test_decoding_is_priced_by_requests_that_run_and_blocks_to_bring_and_remembered_apart(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.hold(B, Tier.HBM, 1, 2)
    cluster.pulses = {A: beat(A, running_requests=3), B: beat(B, queued=100_000, running_requests=3)}
    prompt = ask(1, 2, 3)._replace(phase="decode")
    found = cluster.rank(0.0, prompt)
    assert (found[A].recompute_s, found[A].missing_tokens) == (0.0, 0)
    assert [found[name].fetch_blocks for name in (A, B)] == [3, 1]
    assert found[A].queueing_s == found[B].queueing_s == pytest.approx(0.03)  # who decodes waits for no prefill
    assert found[B].cost_s < found[A].cost_s
    cluster.pulses[B] = beat(B, running_requests=30)
    assert cluster.rank(0.0, prompt)[A].cost_s < cluster.rank(0.0, prompt)[B].cost_s
    before = cluster.rank(0.0, ask(1, 2, 3))
    assert cluster.route(0.0, ask(*range(50, 60))._replace(phase="decode")) in ("a", "b")
    assert cluster.rank(0.0, ask(1, 2, 3)) == before


# -- what one request may do to the others -----------------------------------------------------------------------------


@each_twin
def test_no_number_makes_costs_infinite_or_starves_an_instance_for_long(twin: Twin) -> None:
    cluster = Cluster(twin, A, B)
    for tokens in (10**18, 10**308, 10**309, MAX_INPUT_TOKENS):
        cluster.route(0.0, RoutingTask(SPACE, b"", tokens, 100))
    cluster.pulses[A] = beat(A, at_s=0.5, queued=10**400)
    ranked = cluster.rank(1.0, ask(1, 2, 3))
    assert all(math.isfinite(entry.cost_s) for entry in ranked.values())
    cluster.pulses = {name: beat(name, at_s=1.0) for name in (A, B)}
    counts: Counter[str] = Counter()
    for number in range(1000):  # as much as the four may have claimed
        counts[cluster.route(1.0 + number / 1000, ask(*range(1000 * number, 1000 * number + 40)))] += 1
        cluster.pulses = {name: beat(name, at_s=1.0 + number / 1000) for name in (A, B)}
    assert min(counts.values()) > 200


@each_twin
@pytest.mark.parametrize("block_tokens", [1 << 40, (1 << 63) - 1, 1 << 80])
def test_a_block_may_be_said_to_have_any_number_of_tokens(twin: Twin, block_tokens: int) -> None:
    cluster = Cluster(twin, A)
    found = cluster.rank(0.0, RoutingTask(SPACE, b"", 1000, block_tokens, phase="decode"))[A]
    assert (found.fetch_blocks, found.missing_tokens) == (1, 0)
    assert cluster.rank(0.0, RoutingTask(SPACE, b"", 1000, block_tokens))[A].missing_tokens == 1000


@each_twin
def test_a_route_adds_no_more_than_the_longest_prompt(twin: Twin) -> None:
    cluster = Cluster(twin, A)
    cluster.route(1.0, RoutingTask(SPACE, b"", MAX_INPUT_TOKENS, 100))
    assert cluster.rank(1.0, ask(1))[A].queueing_s == pytest.approx(MAX_TOKENS / 10_000)


@each_twin
def test_what_one_caller_routes_changes_no_answer_for_another(twin: Twin) -> None:
    flooded, quiet = Cluster(twin, A, B, C), Cluster(twin, A, B, C)
    for number in range(300):
        now_s = 0.01 * number
        for blocks in (range(7), range(100 * number, 100 * number + 90)):
            flooded.route(now_s, ask(*blocks)._replace(input_tokens=MAX_TOKENS, caller="other"))
        task = ask(*range(number // 3, number // 3 + 5))._replace(caller="router")
        assert flooded.rank(now_s, task) == quiet.rank(now_s, task)
        assert flooded.route(now_s, task) == quiet.route(now_s, task)


def test_routes_are_remembered_of_so_many_callers_and_forgotten_when_they_no_longer_matter() -> None:
    cluster = Cluster(REFERENCE, A, B)
    for number in range(MOST_CALLERS + 50):
        cluster.route(0.0, ask(1, 2)._replace(caller=f"caller {number}"))
    assert len(cluster.router._callers) == MOST_CALLERS
    cluster.route(10_000.0, ask(1, 2)._replace(caller="later"))
    assert sum(len(caller.routed) for caller in cluster.router._callers.values()) == 1


def test_long_prompts_are_found_again_and_cost_a_bounded_table_few_entries() -> None:
    soon, pick = RoutedBlocks(30.0), random.Random(1)
    for blocks in (1, 255, 256, 257, 1000, 8191, MAX_HASHES):
        prompt = pick.randbytes(16 * blocks)
        before = soon.entries(0.0)
        soon.note(0.0, "", "a", soon.chain(SPACE, prompt))
        assert soon.entries(0.0) - before <= 1300
        assert soon.depths(1.0, "", ["a", "b"], soon.chain(SPACE, prompt), [0, 0]) == [blocks, 0]
        longer = soon.chain(SPACE, (prompt + pick.randbytes(1600))[: 16 * MAX_HASHES])
        assert 0.99 * blocks <= soon.depths(1.0, "", ["a"], longer, [0])[0] <= blocks
        shorter = soon.chain(SPACE, prompt[: 16 * (blocks // 2)])
        assert 0.99 * (blocks // 2) <= soon.depths(1.0, "", ["a"], shorter, [0])[0] <= blocks // 2
        assert soon.depths(30.0, "", ["a"], soon.chain(SPACE, prompt), [0]) == [0]


def test_many_instances_are_found_as_few_are() -> None:
    soon, names = RoutedBlocks(30.0), [f"i{number}" for number in range(60)]
    chain = soon.chain(SPACE, random.Random(1).randbytes(16 * 300))
    for name in names[::2]:
        soon.note(0.0, "", name, chain)
    found = soon.depths(1.0, "", names, chain, [5] * 60)
    assert found == [300, 5] * 30
    assert found == [soon.depths(1.0, "", [name], chain, [5])[0] for name in names]


def test_a_caller_that_fills_the_table_pushes_out_nobody_elses_routes() -> None:
    soon, pick = RoutedBlocks(30.0, sets=1 << 10), random.Random(1)
    prompts = [pick.randbytes(16 * 100) for _ in range(10)]
    for prompt in prompts:
        soon.note(0.0, "router", "a", soon.chain(SPACE, prompt))
    for _ in range(100):
        soon.note(1.0, "flood", "a", soon.chain(SPACE, pick.randbytes(16 * 5000)))
    assert soon.entries(1.0) <= (1 << 10) * WAYS
    found = [soon.depths(2.0, "router", ["a"], soon.chain(SPACE, prompt), [0])[0] for prompt in prompts]
    assert sum(found) >= 500
    again = soon.chain(SPACE, pick.randbytes(16))
    soon.note(2.0, "router", "a", again)
    assert soon.depths(3.0, "router", ["a"], again, [0]) == [1]


# -- who is considered ------------------------------------------------------------------------------------------------


class Heads:
    """An index, and a liveness that decides what of it answers leave out, as the catalog joins them."""

    def __init__(self, twin: Twin, *started: InstanceId) -> None:
        self.index, self.liveness = twin.index(), Liveness()
        self.step(0.0, OwnPulse())
        for instance in started:
            created = BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=hashes(1))
            self.tell(0.0, instance, InstanceStarted(epoch=Epoch(1), pools=POOLS), created)

    def step(self, now_s: float, what: Input) -> None:
        for effect in self.liveness.step(now_s, what):
            self.index.exclude(effect.instance, isinstance(effect, Exclude))

    def tell(self, now_s: float, instance: InstanceId, *events: Event) -> None:
        self.index.apply(frame_bytes(instance, *events))
        view = self.index.view(instance)
        assert view is not None
        self.step(now_s, StreamProgress(instance, view.epoch, view.stopped))

    def hear(self, pulse: LastHeartbeat) -> None:
        self.step(pulse.at_s, HeartbeatReceived(pulse.heartbeat))

    def wait(self, now_s: float) -> None:
        self.step(now_s, OwnPulse())
        self.step(now_s, LivenessTicked())


@each_twin
def test_only_the_live_are_candidates_and_the_silent_are_excluded(twin: Twin) -> None:
    heads = Heads(twin, A, B, C)
    heads.hear(beat(A, 0.5))
    for second in (1.0, 2.0, 3.0):
        heads.wait(second)
    heads.hear(beat(B, 3.5))
    heads.hear(beat(C, 3.5, stopping=True))
    heads.wait(0.5 + LIVENESS_S - 0.1)
    assert [entry.instance for entry in lookup(heads.index, SPACE, hashes(1)).instances] == ["a", "b", "c"]
    heads.wait(5.0)
    assert heads.liveness.candidates() == [B]
    assert heads.liveness.state(C) is LifeState.STOPPING
    answer = lookup(heads.index, SPACE, hashes(1))
    assert [entry.instance for entry in answer.instances] == ["b", "c"]
    assert answer.excluded == ["a"]
    assert lookup(heads.index, SPACE, hashes(2)).excluded == []


@each_twin
def test_a_route_counts_nothing_that_is_excluded(twin: Twin) -> None:
    cluster = Cluster(twin)
    cluster.hold(B, Tier.HBM, 1, 2, 3)
    cluster.index.exclude(B, True)
    found = cluster.rank(0.0, ask(1, 2, 3))
    assert (found[B].depth, found[B].recompute_s) == (0, found[A].recompute_s)
    cluster.index.exclude(B, False)
    assert cluster.rank(0.0, ask(1, 2, 3))[B].depth == 3


@each_twin
def test_when_everybody_falls_silent_the_view_is_kept(twin: Twin) -> None:
    heads = Heads(twin, A, B, C)
    for instance in (A, B, C):
        heads.hear(beat(instance, 0.1))
    for second in range(1, 60):
        heads.wait(float(second))
    assert heads.liveness.candidates() == [A, B, C]
    assert len(lookup(heads.index, SPACE, hashes(1)).instances) == 3


@each_twin
def test_without_any_heartbeat_those_known_and_not_stopped_are_candidates(twin: Twin) -> None:
    heads = Heads(twin, A, B)
    assert heads.liveness.candidates() == [A, B]
    heads.tell(1.0, B, InstanceStopped(reason=StopReason.SHUTDOWN))
    assert heads.liveness.candidates() == [A]
    assert lookup(heads.index, SPACE, hashes(1)).excluded == ["b"]
    heads.tell(1.0, A, InstanceStopped(reason=StopReason.SHUTDOWN))
    assert heads.liveness.candidates() == []


@each_twin
def test_an_instance_that_only_sends_heartbeats_is_a_candidate(twin: Twin) -> None:
    heads = Heads(twin)
    heads.hear(beat(C, 0.5))
    assert heads.liveness.candidates() == [C]
