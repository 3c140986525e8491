"""`kvbm simulate` with a real nats-server and a real catalog: what it reports, and that routing pays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import kvbm
from kvbm.bench.virtual_time.compare_fetch import FetchReport
from kvbm.cli import main
from kvbm.workload.generator import generate
from kvbm.workload.simulate import SimulationReport, arrivals_of, ideal_hit_ratio, simulate
from kvbm.workload.trace import TraceRequest, read_trace

ROOT = Path(kvbm.__file__).parents[1]
RECORDED = ROOT.parent / "shared" / "data" / "mooncake_conversation_trace.jsonl"
RECORDED_LINES = 400
RUN_WAIT_S = 300.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvbm simulate …`, to its end."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "kvbm", "simulate", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        timeout=RUN_WAIT_S,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def no_progress(what: str, total: int) -> Callable[[int], None]:
    return lambda done: None


def check_report(report: SimulationReport) -> None:
    """What is true of every run: nothing lost, nothing wrong, and routing between its bounds."""
    assert report.digests_equal
    assert report.events > 0
    assert report.events_per_s > 0
    assert 0 < report.catalog_lag_ms_p50 <= report.catalog_lag_ms_p99
    assert set(report.routing) == {"catalog", "random", "pooled"}
    routed, at_random, pooled = (report.routing[name] for name in ("catalog", "random", "pooled"))
    assert not any(outcome.wrong_bytes for outcome in report.routing.values())
    assert {outcome.requests for outcome in report.routing.values()} == {report.requests}
    assert len({outcome.blocks for outcome in report.routing.values()}) == 1
    assert routed.hit_ratio >= at_random.hit_ratio
    assert max(routed.hit_ratio, pooled.hit_ratio) <= report.ideal_hit_ratio + 1e-3
    assert report.hit_ratio == routed.hit_ratio
    assert sum(report.hits_by_tier.values()) / report.blocks == pytest.approx(report.hit_ratio, abs=1e-3)
    assert 1 <= report.load_max_over_mean < 2


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `kvbm simulate …` says, run in this process, where it refuses what it is given."""
    try:
        code: object = main(["simulate", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return capsys.readouterr().err


def test_a_trace_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.jsonl cannot be read" in refused(capsys, "--policy", "kvbm", "--trace", "nowhere.jsonl")


def test_the_command_reports_every_key_of_a_generated_workload(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ended = run("--requests", "200", "--instances", "2", "--pools", "hbm=600", "--seed", "3", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    written = json.loads(path.read_bytes())
    assert set(written) == set(SimulationReport.__struct_fields__)
    report = msgspec.convert(written, SimulationReport)
    assert (report.instances, report.pools, report.requests) == (2, "hbm=600", 200)
    assert report.trace == "generated, seed 3"
    check_report(report)
    assert "digests equal: yes" in " ".join(ended.stdout.split())
    assert not ended.stderr.strip()


def test_the_command_runs_the_same_requests_without_and_with_fetching(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    topology = "a/1,a/1,a/2,b/1"
    ended = run(
        "--fetch",
        "--topology",
        topology,
        "--policy",
        "random",
        "--load",
        "normal",
        "--requests",
        "300",
        "--pools",
        "hbm=300,host=900,nvme=900,object=100",
        "--json",
        str(path),
    )
    assert ended.returncode == 0, ended.stderr
    report = msgspec.json.decode(path.read_bytes(), type=FetchReport)
    assert (report.instances, ",".join(report.topology), report.link_bytes_per_s) == (4, topology, None)
    without, fetching = report.rows
    assert (without.fetch, fetching.fetch) == (False, True)
    assert (without.tokens_by_source["peer"], fetching.tokens_by_source["peer"] > 0) == (0, True)
    assert sum(without.tokens_by_source.values()) == sum(fetching.tokens_by_source.values())
    assert fetching.mean_ttft_s < without.mean_ttft_s
    assert "links: as their distance says" in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fetch", "--pools", "hbm=100"), "give host=SLOTS"),
        (("--fetch-link", "quick"), "--fetch-link 'quick'"),
        (("--fetch", "--topology", "a,b"), "4 places are needed"),
        (("--topology", "a,b"), "give --fetch, too"),
        (("--pools", "hbm=100,object=100"), "'object=100' is not TIER=SLOTS"),
    ],
)
def test_what_cannot_be_fetched_is_refused_before_it_begins(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *arguments)


def test_a_trace_of_ones_own_hits_exactly_what_it_repeats(tmp_path: Path) -> None:
    """Two prompts, each asked five times, in Mooncake's format: everything but the first time and the partial block."""
    trace, path = tmp_path / "own.jsonl", tmp_path / "report.json"
    lines = [
        {
            "timestamp": 3000 * turn + 1500 * prompt,
            "input_length": 512 * 4 + 100,
            "output_length": 5,
            "hash_ids": [10 * prompt + index for index in range(4)] + [1000 + 10 * turn + prompt],
        }
        for turn in range(5)
        for prompt in range(2)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = run("--trace", str(trace), "--instances", "2", "--pools", "hbm=64,host=64", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    report = msgspec.json.decode(path.read_bytes(), type=SimulationReport)
    assert (report.requests, report.blocks) == (10, 40)
    assert report.ideal_hit_ratio == 0.8
    assert report.routing["pooled"].hit_ratio == 0.8
    check_report(report)


def recorded_or_generated() -> tuple[list[TraceRequest], str]:
    """The beginning of the recorded conversation trace where it is at hand, else a generated workload of that
    length.
    """
    if not RECORDED.exists():
        return generate(1, RECORDED_LINES), "generated: the recorded trace is not beside the project"
    requests = []
    for request in read_trace(RECORDED):
        requests.append(request)
        if len(requests) == RECORDED_LINES:
            break
    return requests, f"recorded: the first {RECORDED_LINES} lines"


def test_routing_by_the_catalog_is_no_worse_than_random_on_recorded_conversations(
    record_property: Callable[[str, object], None],
) -> None:
    requests, what = recorded_or_generated()
    record_property("workload", what)
    print(f"workload: {what}")
    report = simulate(requests, what, 2, "hbm=4000,host=4000", 1, no_progress)
    check_report(report)
    assert report.ideal_hit_ratio == ideal_hit_ratio(arrivals_of(requests, bytes(16)))
    assert report.hit_ratio > 0


def test_several_tiers_serve_hits_and_every_byte_is_the_right_one() -> None:
    report = simulate(generate(5, 250), "generated", 1, "hbm=300,host=300,nvme=6000", 1, no_progress)
    assert report.digests_equal
    assert set(report.routing) == {"catalog"}  # with one instance there is nothing to compare
    assert set(report.hits_by_tier) == {"HBM", "HOST", "NVME"}
    assert report.routing["catalog"].wrong_bytes == 0


@pytest.mark.parametrize("hash_id", [2**64, 2**128 - 1])
def test_ids_wider_than_64_bits_are_ids_too(hash_id: int) -> None:
    arrivals = arrivals_of([TraceRequest(0, 512, 1, (hash_id,)), TraceRequest(1, 512, 1, (hash_id - 1,))], bytes(16))
    assert arrivals[0].hashes != arrivals[1].hashes
    assert ideal_hit_ratio([arrivals[0], arrivals[0]]) == 0.5
