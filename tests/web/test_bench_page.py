"""`kvbm bench page`, with a cluster that is small."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvbm.cli import main

KEYS = {
    "first_paint_ms",
    "slider_step_ms",
    "slider_step_worst_ms",
    "asof_10m_s",
    "block_life_s",
    "changes_5min_s",
}


def test_the_page_is_measured_and_its_goals_stand_beside_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    sizes = ["--samples", "2", "--instances", "100", "--live", "100000", "--events", "300000"]
    assert main(["bench", "page", *sizes, "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert set(report) - {"machine", "build", "load_average", "rows", "notes"} == KEYS
    assert all(math.isfinite(report[key]) and report[key] > 0 for key in KEYS)
    assert report["slider_step_ms"] <= report["slider_step_worst_ms"]
    assert "100 instances, 100,000 residencies and 300,000 block events" in report["notes"][0]
    goals = {row["what"]: row["goal"] for row in report["rows"] if row["goal"]}
    assert list(goals.values()) == ["≤ 1000", "≤ 500", "≤ 2", "≤ 0.2"]
    printed = capsys.readouterr().out
    for row in report["rows"]:
        assert row["what"] in printed
        assert not row["goal"] or f"goal {row['goal']}" in printed
