"""`kvbm bench` measures each part, says on what, and names the numbers in its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.cli import main

KEYS = {
    "hash": {"hash_blocks_per_s"},
    "codec": {"encode_blocks_per_s", "decode_blocks_per_s"},
    "ledger": {"ledger_ns_per_block_run16"},
    "index": {"apply_events_per_s", "bytes_per_residency", "query_us_p50", "query_us_p99"},
    "events": {"event_ns_per_block_run16", "event_ns_per_block_run1"},
    "replay": {"verify_native_events_per_s", "verify_reference_events_per_s"},
    "ingest": {"ingest_events_per_s"},
}


@pytest.mark.parametrize("what", KEYS)
def test_each_bench_measures_its_part_and_reports_it(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    arguments = ["bench", what, "--samples", "2", "--live", "100000", "--replacements", "1", "--json", str(path)]
    assert main(arguments) == 0
    report = json.loads(path.read_bytes())
    assert report["machine"] and report["build"] and report["rows"]
    assert set(report) - {"machine", "build", "load_average", "rows"} == KEYS[what]
    assert all(report[key] > 0 for key in KEYS[what])
    printed = capsys.readouterr().out
    for row in report["rows"]:
        assert row["value"] >= 0
        assert row["what"] in printed


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
