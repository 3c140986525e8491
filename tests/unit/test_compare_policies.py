"""Ways of routing compared in virtual time: the pool, the published costs, and what a comparison says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvbm.bench.virtual_time.block_pool import BlockPool
from kvbm.bench.virtual_time.changes import ModelChange, What, parse_changes
from kvbm.bench.virtual_time.compare_policies import (
    CompareOptions,
    PolicyComparison,
    compare,
    main,
    max_over_mean,
    requests_of,
    run_policy,
)
from kvbm.bench.virtual_time.instance_model import InstanceModel, WorkloadRequest
from kvbm.bench.virtual_time.policies import POLICIES, DynamoCost, LlmdScore, Policy, PrefixAndLoad
from kvbm.bench.virtual_time.workloads import LOADS, WORKLOADS, workload
from kvbm.core.errors import ConfigError
from kvbm.workload.trace import TraceRequest, full_blocks


def request(*blocks: int, number: int = 0, at_s: float = 0.0, output_tokens: int = 10) -> WorkloadRequest:
    hashes = b"".join(block.to_bytes(16, "big") for block in blocks)
    return WorkloadRequest(number, at_s, 512 * len(blocks), output_tokens, blocks, hashes)


def instances(count: int, slots: int = 100) -> list[InstanceModel]:
    return [InstanceModel(slots, 10_000.0) for _ in range(count)]


def hold(instance: InstanceModel, *blocks: int) -> None:
    assert instance.pool.acquire(blocks) is not None
    instance.pool.create(blocks)
    instance.pool.unpin(blocks)


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_a_pool_evicts_what_was_used_least_recently_and_ends_before_starts() -> None:
    pool = BlockPool(4)
    for blocks in ((1, 2), (3, 4)):
        assert pool.acquire(blocks) == 0
        pool.create(blocks)
        pool.unpin(blocks)
    assert pool.acquire((1, 2)) == 2
    pool.unpin((1, 2))
    assert pool.acquire((5,)) == 0
    assert (pool.depth((1, 2)), pool.depth((3, 4))) == (2, 1)


def test_a_pool_evicts_nothing_pinned_and_refuses_what_has_no_room() -> None:
    pool = BlockPool(3)
    assert pool.acquire((1, 2)) == 0
    assert pool.acquire((7, 8)) is None  # two slots are being written
    pool.create((1, 2))
    assert pool.acquire((7, 8)) is None
    assert pool.used == pytest.approx(2 / 3)
    pool.unpin((1, 2))
    assert pool.acquire((7, 8)) == 0
    assert pool.depth((1, 2)) == 1


# -- the costs of others ----------------------------------------------------------------------------------------------


def test_the_baseline_weighs_a_missing_block_as_eight_queued_ones() -> None:
    two = instances(2)
    hold(two[1], 1)
    policy = PrefixAndLoad(two, random.Random(1))
    two[1].waiting_tokens = 7 * 512
    assert policy.choose(0.0, request(1, 2)) == 1
    two[1].waiting_tokens = 9 * 512
    assert policy.choose(0.0, request(1, 2)) == 0


def test_dynamos_cost_is_blocks_to_prefill_and_blocks_in_decode() -> None:
    two = instances(2)
    hold(two[1], 1, 2, 3)
    policy = DynamoCost(two, random.Random(1))
    assert policy.choose(0.0, request(1, 2, 3)) == 1
    two[1].assigned_tokens = 2 * 512
    assert policy.choose(0.0, request(1, 2, 3)) == 1
    two[1].begin(request(7, 8))
    assert policy.choose(0.0, request(1, 2, 3)) == 0  # 2 + 0 + 5 blocks against 3 + 3
    two[1].end(request(7, 8))
    two[1].begin(request(1, 2, 3))  # blocks that are there already count once
    assert policy.choose(0.0, request(1, 2, 3)) == 1


def test_llmds_scores_are_three_for_the_prefix_and_two_each_for_queue_and_room() -> None:
    two = instances(2, slots=10)
    hold(two[1], 1, 2, 3, 4)
    policy = LlmdScore(two, random.Random(1))
    assert policy.choose(0.0, request(1, 2, 3, 4)) == 1
    two[1].queue.append((request(9), 512))  # the whole score of the queue: 3 against 2
    assert policy.choose(0.0, request(1, 2, 3, 4)) == 1
    assert two[1].pool.acquire((1, 2, 3, 4)) == 4
    assert two[1].pool.acquire((5, 6)) == 0  # 6 of 10 slots cannot be evicted: 3 + 0.8 against 4
    assert policy.choose(0.0, request(1, 2, 3, 4)) == 0


# -- one run ----------------------------------------------------------------------------------------------------------


class Always:
    """The first instance."""

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        return 0


def first(_: object) -> Policy:
    return Always()


def test_a_run_queues_first_come_first_served_and_hits_what_is_held() -> None:
    asked = [request(1, 2, at_s=0.0), request(1, 2, at_s=0.0, number=1), request(1, 2, 3, at_s=0.05, number=2)]
    outcome = PolicyComparison(first, [1_024.0, 1_024.0], 100).run(asked)
    assert outcome.ttft_s == pytest.approx([1.0, 1.0, 1.45])  # the second finds all, the third computes one block
    assert (outcome.hits, outcome.blocks) == (4, 7)
    assert (outcome.prompt_blocks, outcome.requests) == ([7, 0], [3, 0])


def test_a_request_waits_for_slots_that_others_pin_and_one_that_never_fits_is_refused() -> None:
    asked = [request(1, 2, at_s=0.0, output_tokens=100), request(3, 4, at_s=0.0, number=1)]
    outcome = PolicyComparison(first, [1_024.0], 3).run(asked)
    assert outcome.ttft_s == pytest.approx([1.0, 1.0 + 100 * 0.03 + 1.0])
    with pytest.raises(ConfigError, match="give --pools hbm=4"):
        PolicyComparison(first, [1_024.0], 3).run([request(1, 2, 3, 4)])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_the_same_for_the_same_seed_and_serves_everybody(policy: str) -> None:
    asked = requests_of(workload("tool-agents", "normal", 3, 300))
    once = run_policy(policy, asked, [10_000.0] * 3, 1_000, 5)
    assert once == run_policy(policy, asked, [10_000.0] * 3, 1_000, 5)
    assert (len(once.ttft_s), sum(once.requests)) == (300, 300)
    assert once.blocks == sum(len(one.blocks) for one in asked)
    assert 0 < once.hits < once.blocks


# -- what changes meanwhile ------------------------------------------------------------------------------------------


def test_an_instance_that_slows_down_computes_what_comes_then_more_slowly() -> None:
    asked = [request(1, at_s=0.0), request(2, at_s=10.0, number=1)]
    slower = (ModelChange(5.0, 0, What.SPEED, 0.25),)
    assert PolicyComparison(first, [512.0], 50, changes=slower).run(asked).ttft_s == pytest.approx([1.0, 4.0])


def test_a_pool_that_shrinks_keeps_what_is_pinned_and_then_evicts() -> None:
    pool = BlockPool(4)
    assert pool.acquire((1, 2)) == 0 and pool.acquire((3,)) == 0
    pool.create((1, 2))
    pool.create((3,))
    pool.unpin((3,))
    pool.resize(1)
    assert (pool.depth((1, 2)), pool.depth((3,))) == (2, 0)
    pool.unpin((1, 2))
    assert pool.depth((1, 2)) == 1
    assert pool.acquire((7, 8)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_routes_to_an_instance_that_is_drained(policy: str) -> None:
    asked = requests_of(workload("tool-agents", "normal", 3, 300))
    at_s = asked[100].at_s
    outcome = run_policy(policy, asked, [10_000.0] * 3, 1_000, 5, [ModelChange(at_s, 1, What.DRAIN)])
    assert sum(outcome.requests) == len(outcome.ttft_s) == 300
    later = sum(one.at_s <= at_s + 1.0 for one in asked)  # ours hears of it within a heartbeat
    assert 0 < outcome.requests[1] <= later
    whole = run_policy(policy, asked, [10_000.0] * 3, 1_000, 5)
    assert outcome.requests[1] < whole.requests[1]


def test_ours_learns_within_seconds_that_an_instance_is_slower() -> None:
    asked = requests_of(workload("conversation", "normal", 9, 600))
    slower = [ModelChange(60.0, 0, What.SPEED, 0.25)]
    ours = run_policy("kvbm", asked, [10_000.0] * 4, 4_000, 1, slower)
    even = run_policy("kvbm", asked, [10_000.0] * 4, 4_000, 1)
    assert ours.requests[0] < 0.75 * even.requests[0]


def test_changes_are_read_as_they_are_written() -> None:
    assert parse_changes("60:1:speed=0.25,61.5:0:slots=0.5,90:2:drain") == (
        ModelChange(60.0, 1, What.SPEED, 0.25),
        ModelChange(61.5, 0, What.SLOTS, 0.5),
        ModelChange(90.0, 2, What.DRAIN),
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "60", "60:1", "60:1:fast=2", "x:1:drain", "-1:1:drain", "nan:1:drain", "60:-1:drain", "60:1:drain=1"),
        *("60:1:speed", "60:1:speed=0", "60:1:speed=nan", "60:1:slots=1e9", "60:1:drain,"),
    ],
)
def test_what_is_no_change_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match="--change"):
        parse_changes(text)


def test_changes_of_others_and_of_everybody_are_refused() -> None:
    for text in ("60:3:drain", "1:0:drain,1:1:drain,1:2:drain"):
        with pytest.raises(ConfigError, match="--change"):
            main(SMALL._replace(changes=parse_changes(text)), None)


# -- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_a_seed_and_comes_quicker_in_overload(name: str) -> None:
    assert workload(name, "normal", 4, 400) == workload(name, "normal", 4, 400)
    assert workload(name, "normal", 4, 400) != workload(name, "normal", 5, 400)
    spans = [workload(name, load, 4, 400)[-1].timestamp_ms for load in LOADS]
    assert spans == sorted(spans, reverse=True)


def test_workloads_differ_in_what_is_shared() -> None:
    def repeated(name: str) -> float:
        blocks = [block for one in workload(name, "normal", 1, 1000) for block in full_blocks(one)]
        return 1 - len(set(blocks)) / len(blocks)

    assert 0.4 < repeated("conversation") < 0.7
    assert repeated("tool-agents") > 0.85
    assert repeated("long-documents") > 0.7


# -- a comparison -----------------------------------------------------------------------------------------------------


SMALL = CompareOptions(
    workloads=("conversation", "shared-prompts"), seeds=(101, 102), requests=1_200, speeds=(10_000.0,) * 3, slots=2_000
)


def test_a_comparison_has_a_row_for_each_policy_and_ours_is_best_or_within_a_hundredth() -> None:
    report = compare(SMALL)
    rows = {(row.workload, row.load, row.policy): row for row in report.rows}
    assert set(rows) == {(w, load, p) for w in SMALL.workloads for load in SMALL.loads for p in POLICIES}
    for workload_name in SMALL.workloads:
        for load in SMALL.loads:
            of_policy = {policy: rows[workload_name, load, policy] for policy in POLICIES}
            assert min(row.against_best for row in of_policy.values()) == 1.0
            assert of_policy["random"].hit_ratio < of_policy["kvbm"].hit_ratio
            assert of_policy["random"].mean_ttft_s > of_policy["kvbm"].mean_ttft_s
    for row in report.rows:
        assert (row.seeds, row.requests) == ([101, 102], 1_200)
        assert 0 < row.p50_ttft_s <= row.p99_ttft_s
        assert 1 <= row.load_max_over_mean < 3


def test_a_trace_is_compared_too_and_in_overload_it_comes_quicker(tmp_path: Path) -> None:
    trace = tmp_path / "own.jsonl"
    lines = [
        f'{{"timestamp": {100 * n}, "input_length": 512, "output_length": 5, "hash_ids": [{n}]}}' for n in range(40)
    ]
    trace.write_text("\n".join(lines))
    report = compare(CompareOptions(policies=("prefix+load",), trace=trace, speeds=(4_000.0,), slots=50))
    normal, overload = report.rows
    assert (normal.workload, normal.load, overload.load) == ("own.jsonl", "normal", "overload")
    assert overload.mean_ttft_s > normal.mean_ttft_s


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (CompareOptions(policies=("best",)), "--policy 'best'"),
        (CompareOptions(workloads=("mail",)), "--workload 'mail'"),
        (CompareOptions(loads=("heavy",)), "--load 'heavy'"),
        (CompareOptions(requests=0), "--requests 0"),
        (CompareOptions(speeds=(1.0, 0.0)), "--speeds"),
    ],
)
def test_what_there_is_not_is_named(options: CompareOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main(options, None)


def test_the_largest_over_the_mean_of_nothing_is_one() -> None:
    assert max_over_mean([0, 0]) == 1.0
    assert max_over_mean([3, 1]) == 1.5
    assert requests_of([TraceRequest(0, 600, 1, (5, 6))])[0].blocks == (5,)
