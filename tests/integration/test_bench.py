"""`kvbm bench` measures each part, says on what, and names the numbers in its report."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvbm.bench import BenchOptions
from kvbm.bench.catalog_index import bench_checkpoint_pause
from kvbm.bench.fio import FioError, find_fio
from kvbm.bench.measure import difference_of, within_noise
from kvbm.bench.objects import ObjectsOptions, bench_objects
from kvbm.bench.objects import steps_of as objects_steps
from kvbm.cli import main
from tests.eventually import eventually
from tests.object_stores import s3_place

KEYS = {
    "hash": {"hash_blocks_per_s"},
    "codec": {"encode_blocks_per_s", "decode_blocks_per_s"},
    "ledger": {"ledger_ns_per_block_run16"},
    "bridge": {
        *("bridge_blocks_per_s", "bridge_events_per_s", "bridge_bytes_per_block"),
        *("bridge_visible_ms_p50", "bridge_visible_ms_p99", "engine_event_ns_per_block"),
    },
    "index": {"apply_events_per_s", "bytes_per_residency", "query_us_p50", "query_us_p99", "query_us_p99_small_frames"},
    "events": {"event_ns_per_block_run16", "event_ns_per_block_run1"},
    "replay": {"verify_native_events_per_s", "verify_reference_events_per_s"},
    "history": {
        *("history_build_s", "history_bytes_per_stay", "asof_10m_s", "block_life_s", "changes_5min_s", "overview_s"),
    },
    "ingest": {"ingest_events_per_s"},
    "catalog": {
        "http_lookups_per_s",
        "http_lookup_us_p50",
        "http_routes_per_s",
        "http_route_us_p50",
        "binary_prompts_per_s",
        "unix_us_p50",
        "nats_us_p50",
        "many_lookup_ms_p50",
        "many_lookup_ms_p99",
        "many_route_ms_p50",
        "many_route_ms_p99",
        "many_answer_bytes",
        "replica_lookup_us_p50",
        "replica_route_us_p50",
        "replica_p99_us_loaded",
        "loaded_lookup_ms_p99",
        "ingest_loss",
        "heartbeat_core_share",
        "rss_10k_mib",
        "visible_ms_p50",
        "visible_ms_p99",
        "query_us_p99_small_frames",
        "checkpoint_pause_ms_50m",
    },
    "sql": {"sql_claims_per_s", "sql_claims_per_s_sqlite", "reclaims_per_s", "reclaims_per_s_sqlite"},
}

NOT_ASKED_FOR = {"checkpoint_pause_ms_50m"}  # without its flag: it takes minutes and 5 GB
DIFFERENCES = {"event_ns_per_block_run16", "event_ns_per_block_run1", "ingest_loss"}  # of two noisy runs: of any sign


QUICK = {"hash", "codec"}


@pytest.mark.parametrize("what", [pytest.param(one, marks=[pytest.mark.nightly] * (one not in QUICK)) for one in KEYS])
def test_each_bench_measures_its_part_and_reports_it(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    arguments = ["bench", what, "--samples", "2", "--live", "100000", "--replacements", "1", "--instances", "200"]
    assert main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert report["machine"] and report["build"] and report["rows"]
    assert set(report) - {"machine", "build", "load_average", "rows", "notes"} == KEYS[what]
    measured = KEYS[what] - NOT_ASKED_FOR
    assert all(report[key] > 0 for key in measured - DIFFERENCES)
    assert all(math.isfinite(report[key]) for key in measured)
    assert all(report[key] is None for key in KEYS[what] & NOT_ASKED_FOR)
    printed = capsys.readouterr().out
    for row in report["rows"]:
        is_difference = row["spread"] is not None
        assert is_difference == (what == "events")
        assert is_difference or row["value"] >= 0
        assert row["what"] in printed


def test_frames_that_wait_for_a_checkpoint_are_measured_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BenchOptions] = []

    def run_bench(options: BenchOptions, path: Path | None) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("kvbm.bench.run_bench", run_bench)
    assert main(["bench", "catalog", "--checkpoint"]) == 0 and main(["bench", "catalog", "--live", "200000"]) == 0
    assert [one.checkpoint for one in asked] == [True, False]
    assert [(max(one.live), one.indexed) for one in asked] == [(1_000_000, 10_000_000), (200_000, 200_000)]
    found = bench_checkpoint_pause(20_000, 2, 1)
    assert found.numbers["checkpoint_pause_ms_50m"] == found.rows[0].value >= 0
    assert "0.02 M residencies" in found.rows[0].what
    left_out = bench_checkpoint_pause(0, 2, 1)
    assert left_out.numbers == {"checkpoint_pause_ms_50m": None} and "--checkpoint" in left_out.notes[0]


@pytest.mark.parametrize("costs", [[0.0, 0.0, 0.0, 0.0], [-3.0, -1.0, 1.0, 2.0], [9.0, 10.0, 11.0]])
def test_a_difference_of_two_runs_tells_how_far_it_scatters_whatever_its_sign(costs: list[float]) -> None:
    row = difference_of("cost", "ns/block", costs)
    assert row.spread is not None and row.noise is None
    assert within_noise(row) == (min(costs) <= 0.0)


@pytest.mark.parametrize(
    "arguments", [["bench", "nothing"], ["bench", "index", "--live", "7"], ["bench", "hash", "--samples", "0"]]
)
def test_a_bench_that_does_not_exist_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    words = capsys.readouterr().err
    assert "invalid choice" in words or "will not do" in words


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "hash", "--json", str(tmp_path / "no folder" / "bench.json")]) == 2
    captured = capsys.readouterr()
    assert "no folder" in captured.err and "hash" not in captured.out


POOL_KEYS = {
    "nvme_read_over_fio",
    "nvme_write_over_fio",
    "nvme_scan_over_fio",
    "checksum_cost",
    "nvme_encryption_cost",
    "host_copy_over_memcpy",
    "metadata_blocks_per_s",
    "nvme_read_p99_over_p50_loaded",
    "bf16_ratio",
    "encode_gb_per_s",
    "decode_gb_per_s",
    "fp8_ratio_over_limit",
}
FIO_KEYS = {"nvme_read_over_fio", "nvme_write_over_fio", "nvme_scan_over_fio"}
POOLS = ["bench", "pools", "--samples", "2", "--file-mib", "16"]


@pytest.mark.nightly
def test_the_pools_are_measured_without_fio_and_a_sentence_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    path, folder = tmp_path / "bench.json", tmp_path / "device"
    assert main([*POOLS, "--dir", str(folder), "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert set(report) & POOL_KEYS == POOL_KEYS
    assert {key for key in POOL_KEYS if report[key] is None} == FIO_KEYS
    printed = capsys.readouterr().out
    assert "fio is not installed" in printed and "apt-get install fio" in printed
    assert any("fio is not installed" in note for note in report["notes"])
    assert "goal ≤ 0.10" in printed and "goal ≥ 0.85" in printed
    assert all(row["what"] in printed for row in report["rows"])
    assert not folder.exists(), "what the run made must be gone"


@pytest.mark.nightly
def test_the_pools_are_measured_beside_fio_on_the_same_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find_fio(tmp_path)  # where it is missing, this says how to install it
    path = tmp_path / "bench.json"
    assert main([*POOLS, "--dir", str(tmp_path), "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert all(report[key] > 0 for key in POOL_KEYS - {"checksum_cost", "nvme_encryption_cost"})
    whats = [row["what"] for row in report["rows"]]
    assert {"NVME reads over fio, 1 MiB blocks", "NVME writes over fio, 4 MiB blocks"} <= set(whats)
    assert "goal ≥ 0.90" in capsys.readouterr().out
    assert [found.name for found in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.nightly
def test_fio_that_cannot_write_there_is_said_in_its_own_words(tmp_path: Path) -> None:
    fio = find_fio(tmp_path)
    assert fio.rate("write", tmp_path / "file", 1 << 20, 1 << 20, 4) > 0
    with pytest.raises(FioError, match="fio failed"):
        fio.rate("read", tmp_path / "file" / "below", 1 << 20, 1 << 20, 4)


def test_a_device_without_room_is_refused_before_a_file_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pools", "--dir", str(tmp_path / "device"), "--file-mib", str(1 << 24)]) == 2
    assert "bytes free; free the disk, give another --dir or a smaller --file-mib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([*POOLS, "--dir", str(tmp_path / "file")]) == 2
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_no_file(told: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "device"
    bench = subprocess.Popen(
        [sys.executable, "-m", "kvbm", "bench", "pools", "--dir", str(folder), "--file-mib", "64", "--samples", "100"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
        # a shell's background jobs ignore SIGINT; noqa: it makes one system call
        preexec_fn=lambda: signal.signal(told, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        eventually(lambda: list(folder.glob("*/nvme.pool")) or bench.poll() is not None, "there is no file")
        assert bench.poll() is None
        bench.send_signal(told)
        _, words = bench.communicate(timeout=180)
    finally:
        bench.kill()
        bench.wait()
    assert bench.returncode == 130 and words.strip() == "kvbm: interrupted"
    assert not folder.exists()


@pytest.mark.nightly
def test_the_object_pool_is_measured_beside_the_bare_client(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = s3_place(s3_endpoint)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    steps: list[None] = []
    found = bench_objects(
        ObjectsOptions(place.url, s3_endpoint, "us-east-1", objects=4), 2, 1, lambda: steps.append(None)
    )
    assert set(found.numbers) == {"object_put_over_client", "object_get_over_client"}
    assert all(number and number > 0 for number in found.numbers.values())
    assert len(steps) == objects_steps(2)
    with closing(place.open()) as store:
        assert list(store.listed("", 20)) == []  # nothing is left behind
