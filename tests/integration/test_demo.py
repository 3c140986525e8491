"""`kvbm demo` as it is run by a newcomer, once, and every number its report promises.

`make check` runs the demo itself, which fails where one of its own checks does (`DemoReport.failures` in
`kvbm/demo/run.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvbm


@pytest.mark.nightly
def test_the_demo_proves_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    nobody = "http://127.0.0.1:9"  # a proxy that is not there: what the demo starts is on this machine
    source = os.pathsep.join([str(Path(kvbm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "kvbm", "demo", "--json", str(path)],
        env=os.environ | {"PYTHONPATH": source, "http_proxy": nobody, "https_proxy": nobody},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "every check passed" in ended.stdout
    report = json.loads(path.read_bytes())
    assert report["requests"] > 0
    assert report["tokens_identical"] is True
    assert report["tokens_compared"] >= report["requests"]
    assert set(report["hits_by_tier"]) == {"HBM", "HOST", "NVME", "OBJECT"}
    assert all(count > 0 for count in report["hits_by_tier"].values()), report["hits_by_tier"]
    assert report["peer_blocks"] == report["peer_prompt_blocks"] == 64
    assert report["peer_tokens_identical"] is True
    assert report["ttft_ratio"] > 1
    assert report["events_published"] == report["events_applied"] > 0
    assert report["gaps"] == 0
    assert report["digests_equal"] is True
    assert all(pair["engine"] == pair["catalog"] for pair in report["digests"].values())
    assert report["killed_and_recovered"] is True
    assert report["recovered_blocks"] > 0
    assert report["replay_verified"] is True
    assert report["corrupt_blocks"] == report["failed_copies"] == 0
    assert report["verified_reads"] > 0
    assert list(tmp_path.iterdir()) == [path]  # nothing is left where it ran
