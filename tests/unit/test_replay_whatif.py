"""`kvbm-replay whatif`: other policies and capacities on the prompts that were asked."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from kvbm.cli import replay_main
from kvbm.core.ids import InstanceId, NamespaceId, SequenceHash
from kvbm.core.policy import EVICTION_POLICIES
from kvbm.replay.costaware import CostAware
from kvbm.replay.source import SourceError
from kvbm.replay.whatif import POLICIES, Accesses, ComputeCost, Tiers, read_accesses, what_if
from kvbm.streams.access_samples import encode_sample
from kvbm.streams.base import AccessSample
from kvbm.workload.trace import read_trace


def block(*label: int) -> SequenceHash:
    return SequenceHash(b"".join(one.to_bytes(4, "little") for one in (*label, 0, 0, 0, 0)[:4]))


def prompt(user: int, depth: int, shared: int = 2) -> list[SequenceHash]:
    """A prompt that shares its first blocks with everybody's."""
    return [block(0, at) if at < shared else block(user + 1, at) for at in range(depth)]


def some_prompts(seed: int, count: int = 400) -> list[list[SequenceHash]]:
    """Some users come back often, most never."""
    pick = random.Random(seed)
    return [prompt(min(int(pick.expovariate(0.08)), 200), pick.randint(1, 12)) for _ in range(count)]


def accesses(prompts: list[list[SequenceHash]], rate: float = 1.0) -> Accesses:
    return Accesses("some", [(0, one) for one in prompts], 1, 16, rate, [])


@pytest.mark.parametrize("seed", range(20))
def test_lru_hits_are_those_of_a_plain_simulation(seed: int) -> None:
    prompts, slots = some_prompts(seed), random.Random(seed).randint(5, 120)
    held: OrderedDict[SequenceHash, None] = OrderedDict()
    hits = 0
    for one in prompts:
        hits += next((at for at, each in enumerate(one) if each not in held), len(one))
        kept = one[:slots]
        for each in kept:
            held.pop(each, None)
        while len(held) + len(kept) > slots:
            held.popitem(last=False)
        for each in reversed(kept):
            held[each] = None
    report = what_if(accesses(prompts), ["lru"], [slots])
    assert report.results[0].hit_blocks == hits


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tiers", [[], [2.0], [1.0, 4.0]])
def test_nothing_beats_a_pool_that_never_evicts_and_a_pool_that_holds_all_equals_it(
    seed: int, tiers: list[float]
) -> None:
    prompts = some_prompts(seed)
    distinct = len({each for one in prompts for each in one})
    report = what_if(accesses(prompts), POLICIES, [7, 40, distinct], tiers)
    most = report.results[-1]
    assert most.policy == "unbounded" and most.blocks == sum(map(len, prompts))
    for one in report.results:
        assert one.hit_blocks == sum(one.tier_hits) <= most.hit_blocks
        assert one.saved_s <= most.saved_s + 1e-9
        if one.capacity == distinct:
            assert (one.hit_blocks, one.tier_hits[0]) == (most.hit_blocks, most.hit_blocks)


@pytest.mark.parametrize("policy", POLICIES)
def test_pools_never_hold_more_than_their_slots_nor_a_block_twice(policy: str) -> None:
    prompts = some_prompts(1)
    depth = {each: at for one in prompts for at, each in enumerate(one)}
    parent = {each: one[at - 1] if at else None for one in prompts for at, each in enumerate(one)}
    sizes = [9, 20, 31]
    pools = Tiers(
        [
            (
                slots,
                CostAware(lambda each: 1.0 + depth[each], parent.__getitem__)
                if policy == "cost"
                else EVICTION_POLICIES[policy](slots),
            )
            for slots in sizes
        ]
    )
    for one in prompts:
        pools.ask(one)
        assert all(len(held) <= slots for held, slots in zip(pools._held, sizes, strict=True))
        assert len(set.union(*pools._held)) == sum(map(len, pools._held))
        assert set(one[: sizes[0]]) <= pools._held[0]


def test_results_are_ordered_by_what_they_save_within_each_capacity() -> None:
    report = what_if(accesses(some_prompts(3)), POLICIES, [60, 20])
    assert [one.capacity for one in report.results] == [20, 20, 20, 60, 60, 60, 0]
    for capacity in (20, 60):
        saved = [one.saved_s for one in report.results if one.capacity == capacity]
        assert saved == sorted(saved, reverse=True)


def test_a_cost_aware_pool_keeps_what_takes_longest_and_never_a_block_without_those_before_it() -> None:
    costs = {block(user, at): 1.0 + (9 * at if user == 1 else 0) for user in (1, 2, 3) for at in range(4)}
    parent = {block(user, at): block(user, at - 1) if at else None for user in (1, 2, 3) for at in range(4)}
    policy = CostAware(costs.__getitem__, parent.__getitem__)
    for user in (1, 2, 3):
        for at in range(4):
            policy.gain(block(user, at), pinned=True)
        for at in reversed(range(4)):
            policy.free(block(user, at))
    given_up = policy.victims(8)
    assert {each[:4] for each in given_up} == {block(2)[:4], block(3)[:4]}  # the dear prompt stays whole
    assert given_up.index(block(2, 3)) < given_up.index(block(2, 0))
    last = policy.victims(4)
    assert last == [block(1, at) for at in (3, 2, 1, 0)]
    assert policy.victims(1) == []


def test_a_block_that_was_used_more_often_outlives_one_that_was_not_until_the_clock_has_passed_it() -> None:
    policy = CostAware(lambda each: 1.0, lambda each: None)
    for number in range(3):
        policy.gain(block(number), pinned=False)
    for _ in range(3):
        policy.hold(block(0))
        policy.free(block(0))
    assert set(policy.victims(2)) == {block(1), block(2)}
    for number in range(
        3, 9
    ):  # each is worth one more than the last victim: at last more than what was once used often
        policy.gain(block(number), pinned=False)
        if policy.victims(1) == [block(0)]:
            return
    raise AssertionError("what was used often long ago stays for ever")


def write_samples(folder: Path, prompts: list[list[SequenceHash]], rate: float, instances: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "2026-01-01.samples").write_bytes(
        b"".join(
            encode_sample(
                AccessSample(
                    instance=InstanceId(f"i{number % instances}"),
                    cluster="c",
                    wall_time_ns=number,
                    namespace=NamespaceId(bytes(16)),
                    hashes=b"".join(one),
                    depth=0,
                    rate=rate,
                )
            )
            for number, one in enumerate(prompts)
        )
    )


def test_sampled_prompts_shrink_the_pools_and_scale_the_counts(tmp_path: Path) -> None:
    prompts = some_prompts(5)
    write_samples(tmp_path / "samples", prompts, 1.0)
    whole = what_if(read_accesses(str(tmp_path), read_trace), POLICIES, [50])
    write_samples(tmp_path / "samples", prompts, 0.1)
    tenth = what_if(read_accesses(str(tmp_path), read_trace), POLICIES, [500])
    for one, other in zip(whole.results, tenth.results, strict=True):
        assert one.policy == other.policy
        assert other.hit_ratio == pytest.approx(one.hit_ratio)
        assert other.hit_blocks == pytest.approx(10 * one.hit_blocks) and other.saved_s == pytest.approx(
            10 * one.saved_s
        )
    assert any("10.00%" in note for note in tenth.notes) and not any("%" in note for note in whole.notes)
    assert whole.results[0].hit_blocks == what_if(accesses(prompts), POLICIES, [50]).results[0].hit_blocks


def test_each_instance_has_a_pool_of_its_own(tmp_path: Path) -> None:
    write_samples(tmp_path, [prompt(1, 4), prompt(1, 4)], 1.0, instances=2)
    assert what_if(read_accesses(str(tmp_path), read_trace), ["lru"], [9]).results[0].hit_blocks == 0
    write_samples(tmp_path, [prompt(1, 4), prompt(1, 4)], 1.0, instances=1)
    assert what_if(read_accesses(str(tmp_path), read_trace), ["lru"], [9]).results[0].hit_blocks == 4


def test_a_block_costs_more_the_deeper_it_lies() -> None:
    cost = ComputeCost(tokens_per_s=1000.0, double_tokens=1000.0)
    assert cost.block_s(0, 100) == pytest.approx(0.1 * 1.05)
    assert cost.block_s(10, 100) == pytest.approx(0.1 * 2.05)


def write_trace(path: Path, count: int = 300) -> None:
    """A trace as the conversation trace is: sessions that grow and come back."""
    pick = random.Random(1)
    sessions: list[list[int]] = []
    fresh = iter(range(1, 1 << 30))
    with path.open("w") as lines:
        for number in range(count):
            if not sessions or pick.random() < 0.3:
                sessions.append([0])
            session = pick.choice(sessions[-20:])
            session.extend(next(fresh) for _ in range(pick.randint(1, 4)))
            tokens = len(session) * 512
            line = {"timestamp": number, "input_length": tokens, "output_length": 1, "hash_ids": session}
            lines.write(json.dumps(line) + "\n")


def test_the_command_orders_policies_at_three_capacities_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace)
    words = ["whatif", str(trace), "--policy", "lru,s3fifo,cost", "--capacity", "50,150,400"]
    assert replay_main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("300 prompts, ") and len(table) == 2 + 3 * 3 + 1
    assert replay_main([*words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    for capacity in (50, 150, 400):
        there = [one for one in results if one["capacity"] == capacity]
        assert {one["policy"] for one in there} == set(POLICIES)
        assert [one["saved_s"] for one in there] == sorted((one["saved_s"] for one in there), reverse=True)
        assert 0 < there[0]["hit_blocks"] <= results[-1]["hit_blocks"]


def test_what_cannot_be_run_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "samples").mkdir()
    for source, words in (
        (str(tmp_path), "samples.rate"),
        (str(tmp_path / "absent"), "does not exist"),
        (str(tmp_path / "bad.jsonl"), "line 1"),
    ):
        assert replay_main(["whatif", source, "--capacity", "10"]) == 2
        shown = capsys.readouterr().err
        assert words in shown and len(shown.splitlines()) == 1
    for option in (["--capacity", "0"], ["--capacity", "10", "--policy", "mru"], []):
        with pytest.raises(SystemExit):
            replay_main(["whatif", str(tmp_path), *option])
        capsys.readouterr()
    with pytest.raises(SourceError):
        read_accesses(str(tmp_path), read_trace)
