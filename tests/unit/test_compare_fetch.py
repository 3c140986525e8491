"""Blocks read from other instances in virtual time: what a read takes, what it finds, and that it pays where it can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbm.bench.virtual_time.compare_fetch import cluster_of, compare_fetch, main, parse_link, run_fetch
from kvbm.bench.virtual_time.compare_policies import CompareOptions, PolicyOutcome, requests_of
from kvbm.bench.virtual_time.fetch_run import LOT, FetchCluster, FetchingRun
from kvbm.bench.virtual_time.instance_model import WorkloadRequest
from kvbm.bench.virtual_time.policies import BLOCK_BYTES, Policy
from kvbm.bench.virtual_time.workloads import workload
from kvbm.core.errors import ConfigError
from kvbm.core.ids import Tier
from kvbm.core.topology import TIER_LINKS, Link

SPEEDS = (10_000.0,) * 4
POOLS = {"hbm": 800, "host": 3_000}
BLOCK_S = 4.0  # what the instances of hand-made requests compute a block in


def request(number: int, at_s: float, *blocks: int) -> WorkloadRequest:
    return WorkloadRequest(
        number, at_s, 512 * len(blocks) + 1, 1, blocks, b"".join(block.to_bytes(16, "big") for block in blocks)
    )


class Told:
    """The instance of each request, by its number."""

    def __init__(self, instances: Sequence[int]) -> None:
        self._instances = instances

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        return self._instances[request.number]


def run_told(
    asked: Sequence[WorkloadRequest], to: Sequence[int], cluster: FetchCluster
) -> tuple[PolicyOutcome, FetchingRun]:
    """Requests at instances that are told, whose blocks take BLOCK_S; the partial block's one token takes BLOCK_S /
    512.
    """

    def policy(_: object) -> Policy:
        return Told(to)

    run = FetchingRun(policy, [512 / BLOCK_S] * len(cluster.places), cluster, True)
    return run.run(asked), run


def cluster(blocks_per_s: float, count: int = 2, latency_s: float = 0.25, **slots: int) -> FetchCluster:
    """Instances that are read from at so many blocks a second."""
    tiers = {Tier[name.upper()]: value for name, value in slots.items()}
    return FetchCluster(
        {Tier.HBM: 100, Tier.HOST: 100} | tiers,
        [("rack", str(at)) for at in range(count)],
        Link(latency_s, blocks_per_s * BLOCK_BYTES),
    )


PARTIAL_S = BLOCK_S / 512


# -- one read ---------------------------------------------------------------------------------------------------------


def test_a_read_takes_latency_and_bytes_and_what_came_is_kept() -> None:
    asked = [request(0, 0, 1, 2, 3), request(1, 20, 1, 2, 3), request(2, 30, 7, 8, 9), request(3, 50, 1, 2, 3)]
    outcome, run = run_told(asked, [0, 1, 1, 1], cluster(6.0, hbm=3))
    host_s = TIER_LINKS[Tier.HOST].seconds(3 * BLOCK_BYTES)
    computed_s, read_s = 3 * BLOCK_S + PARTIAL_S, 0.25 + 3 / 6 + PARTIAL_S
    lot_latency_s = TIER_LINKS[Tier.HOST].latency_s
    assert outcome.ttft_s == pytest.approx(
        sorted([computed_s, read_s, computed_s, host_s + PARTIAL_S]), abs=lot_latency_s
    )
    assert outcome.tokens == {
        "computed": 6 * 512 + 4,
        "peer": 3 * 512,
        "HOST": 3 * 512,
    }  # the last: HBM had to make room
    assert all(block in run.instances[1].colder[Tier.HOST] for block in (1, 2, 3))


def test_what_only_hbm_holds_is_not_read() -> None:
    asked = [request(0, 0, 1, 2, 3), request(1, 20, 1, 2, 3)]
    outcome, _ = run_told(asked, [0, 1], cluster(6.0, host=1))
    assert outcome.tokens == {"computed": 5 * 512 + 2, "peer": 512}  # HOST has room for the first block alone


def test_a_block_that_its_owner_has_evicted_meanwhile_is_computed() -> None:
    asked = [request(0, 0, 1, 2), request(1, 10, 5, 6), request(2, 17.9, 1, 2)]
    found, _ = run_told(asked, [0, 0, 1], cluster(6.0, host=4, latency_s=0.5))
    gone, _ = run_told(asked, [0, 0, 1], cluster(6.0, host=2, latency_s=0.5))
    assert found.tokens["peer"] == 2 * 512
    assert "peer" not in gone.tokens  # the others were written over them before the turn of the read came
    assert gone.ttft_s[-1] == pytest.approx(0.5 + 2 * BLOCK_S + PARTIAL_S)
    assert gone.blocks == 6


def test_readers_of_one_owner_wait_for_each_other() -> None:
    blocks = (1, 2, 3, 4)
    asked = [request(0, 0, *blocks), request(1, 20, *blocks), request(2, 20, *blocks)]
    outcome, _ = run_told(asked, [0, 1, 2], cluster(8.0, count=3))
    alone_s = 0.25 + 4 / 8 + PARTIAL_S
    assert outcome.tokens["peer"] == 8 * 512
    assert outcome.ttft_s[0] == pytest.approx(alone_s + (4 - LOT) / 8)  # lots take turns
    assert outcome.ttft_s[1] == pytest.approx(alone_s + 4 / 8)


def test_two_owners_halve_nothing_for_a_reader_with_one_link() -> None:
    blocks = (1, 2, 3, 4)
    asked = [request(0, 0, *blocks), request(1, 0, *blocks), request(2, 20, *blocks)]
    outcome, _ = run_told(asked, [0, 1, 2], cluster(8.0, count=3))
    assert outcome.tokens["peer"] == 4 * 512
    assert outcome.ttft_s[0] == pytest.approx(0.25 + 4 / 8 + PARTIAL_S)


def test_in_one_place_memory_is_read_and_nobody_waits_for_a_link() -> None:
    blocks = (1, 2, 3, 4)
    asked = [request(0, 0, *blocks), request(1, 20, *blocks), request(2, 20, *blocks)]
    outcome, _ = run_told(asked, [0, 1, 2], cluster(8.0, count=3)._replace(places=[("host",)] * 3))
    assert outcome.ttft_s[:2] == pytest.approx([0.25 + 4 / 8 + PARTIAL_S] * 2)


def test_what_does_not_come_in_time_is_computed() -> None:
    asked = [request(0, 0, 1, 2, 3, 4), request(1, 20, 1, 2, 3, 4)]
    outcome, run = run_told(asked, [0, 1], cluster(LOT / 1.5))  # a lot in 1.5 s, and a request waits for 2 s
    assert outcome.tokens["peer"] == LOT * 512
    assert outcome.ttft_s[0] == pytest.approx(2.0 + (4 - LOT) * BLOCK_S + PARTIAL_S)
    assert all(block in run.instances[1].colder[Tier.HOST] for block in (1, 2, 3, 4))


def test_objects_that_all_share_are_a_source_without_and_with_reading_from_instances() -> None:
    blocks = tuple(range(1, 9))
    asked = [request(0, 0, *blocks), request(1, 50, *blocks)]
    outcome, _ = run_told(asked, [0, 1], cluster(0.001, object=50))
    assert outcome.tokens["OBJECT"] == 8 * 512
    assert "peer" not in outcome.tokens


# -- a workload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["kvbm", "random"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("link", [None, "10"])
def test_four_instances_that_read_from_each_other_beat_those_that_do_not(
    policy: str, seed: int, link: str | None
) -> None:
    requests = requests_of(workload("conversation", "normal", seed, 600))
    four = cluster_of(POOLS, 4, None, link)
    without, fetching = (run_fetch(policy, requests, SPEEDS, four, seed, fetches) for fetches in (False, True))
    assert "peer" not in without.tokens
    assert fetching.tokens["peer"] > 0
    assert sum(fetching.ttft_s) < sum(without.ttft_s)
    assert fetching.hits > without.hits


@pytest.mark.parametrize("policy", ["kvbm", "random"])
@pytest.mark.parametrize("link", ["1.2", "0.8,5000", "0.1", None])
def test_over_links_slower_than_prefill_nothing_is_read_and_nothing_is_lost(policy: str, link: str | None) -> None:
    """Prefill makes 1.3 GB of KV in a second. Three sources with such links have the reader's own in common."""
    requests = requests_of(workload("conversation", "overload", 5, 400))
    zones = [f"zone-{at}/rack/host" for at in range(4)]
    four = cluster_of(POOLS, 4, zones, link)
    without, fetching = (run_fetch(policy, requests, SPEEDS, four, 5, fetches) for fetches in (False, True))
    assert fetching == without


@pytest.mark.parametrize("pools", [POOLS, {"hbm": 200, "host": 300, "nvme": 900, "object": 3_000}])
def test_sources_add_up_to_all_tokens_and_a_seed_gives_the_same_again(pools: dict[str, int]) -> None:
    requests = requests_of(workload("tool-agents", "overload", 7, 400))
    four = cluster_of(pools, 4, None, "5,50")
    once = run_fetch("kvbm", requests, SPEEDS, four, 7, True)
    assert once == run_fetch("kvbm", requests, SPEEDS, four, 7, True)
    assert sum(once.tokens.values()) == sum(one.input_tokens for one in requests)
    assert once.blocks == sum(len(one.blocks) for one in requests)
    assert sum(count for source, count in once.tokens.items() if source != "computed") == once.hits * 512
    assert (len(once.ttft_s), sum(once.requests)) == (400, 400)


# -- the command's options --------------------------------------------------------------------------------------------


def test_a_comparison_has_a_row_without_and_one_with_for_each_policy() -> None:
    options = CompareOptions(
        policies=("kvbm", "random"), workloads=("conversation",), loads=("normal",), seeds=(1, 2), requests=300
    )
    report = compare_fetch(options, cluster_of(POOLS, 4, None, "10"))
    assert [(row.policy, row.fetch) for row in report.rows] == [
        ("kvbm", False),
        ("kvbm", True),
        ("random", False),
        ("random", True),
    ]
    for row in report.rows:
        assert (row.against_without == 1.0) == (not row.fetch)
        assert (row.tokens_by_source["peer"] > 0) == row.fetch
        assert list(row.tokens_by_source) == ["HBM", "HOST", "NVME", "peer", "OBJECT", "computed"]
    assert len({sum(row.tokens_by_source.values()) for row in report.rows}) == 1
    assert (report.link_bytes_per_s, report.link_latency_s) == (10e9, 300e-6)


def test_a_link_is_gigabytes_a_second_and_microseconds() -> None:
    assert parse_link("2.5") == Link(300e-6, 2.5e9)
    assert parse_link("10,50") == Link(50e-6, 10e9)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "inf", "nan", "1,", "1,-5", "1,2,3"])
def test_a_link_that_is_none_is_named(text: str) -> None:
    if text == "1,":
        assert parse_link(text) == parse_link("1")
        return
    with pytest.raises(ConfigError, match="--fetch-link"):
        parse_link(text)


def test_what_instances_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give host=SLOTS"):
        cluster_of({"hbm": 5}, 2, None, None)
    for topology in (["a"], ["a", "b", "c"], ["a", ""]):
        with pytest.raises(ConfigError, match="--topology"):
            cluster_of(POOLS, 2, topology, None)
    with pytest.raises(ConfigError, match="--speeds gives 3 numbers for 2 instances"):
        main(CompareOptions(speeds=(1.0,) * 3), cluster_of(POOLS, 2, None, None), None)
    with pytest.raises(ConfigError, match="does not fit an idle HBM pool"):
        run_told([request(0, 0, 1, 2, 3)], [0], cluster(1.0, hbm=2))
