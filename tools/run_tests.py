"""Runs pytest as told, for the gate: of what a stalled machine can make fail, one failure is not yet an answer.

    python tools/run_tests.py -n 2 …        as `pytest -n 2 …`

Where at most `MOST` tests fail and each is `realtime` (processes, kills, deadlines, servers under load), each is run
once more, alone. One that passes then is told as `FLAKED: name, first message, seconds, load` and kept in
build/flakes.jsonl, or in the file that KVBM_FLAKES names; it keeps nothing from landing. Two such lines of one test,
and it is mended or becomes `nightly`.

What is never run again: tests without that marker, whatever is marked `bytes`, and failures whose words speak of bytes
or digests. `make test` itself knows no such thing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAKES = Path(os.environ.get("KVBM_FLAKES") or ROOT / "build" / "flakes.jsonl")
MOST = 5  # more at once are no accident
LIMIT_S = 1200.0  # of one test alone: twice a test's own limit
# Options without which tests of a kind are left out.
KINDS = ("--engines", "--pd", "--bridge", "--sglang", "--web", "--objects", "--nightly")
OF_BYTES = re.compile(r"\b(bytes?|digests?|checksums?|corrupt\w*|wrong|violation)\b", re.IGNORECASE)


class Failure(NamedTuple):
    """One test that failed, as pytest told it.

    Attributes:
        message: the first line of what was wrong. duration_s: of the phase that failed.
    """

    test: str
    message: str
    duration_s: float
    is_realtime: bool
    is_of_bytes: bool

    @property
    def may_run_again(self) -> bool:
        return self.is_realtime and not self.is_of_bytes


class Recorder:
    """A plugin of pytest that remembers failures. With xdist it hears of all workers' tests."""

    def __init__(self) -> None:
        self.failures: dict[str, Failure] = {}
        self.is_broken = False  # something failed that is no test: a module that cannot be imported, a worker that died

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        whole = str(report.longrepr)
        message = (crash.message if crash is not None else whole).strip().partition("\n")[0]
        words = "\n".join(line for line in whole.splitlines() if line.startswith("E "))
        keywords = report.keywords
        is_of_bytes = "bytes" in keywords or bool(OF_BYTES.search(f"{words}\n{message}"))
        failure = Failure(report.nodeid, message, report.duration, "realtime" in keywords, is_of_bytes)
        self.failures.setdefault(report.nodeid, failure)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_broken |= report.failed

    def pytest_internalerror(self) -> None:
        self.is_broken = True


def run_alone(test: str, options: list[str]) -> bool:
    """Whether a test passes when it is run once more, with nothing beside it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, test]
    try:
        return subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def keep(flaked: list[Failure], load: float) -> None:
    """One JSON line for each, behind those of earlier runs."""
    FLAKES.parent.mkdir(parents=True, exist_ok=True)
    with FLAKES.open("a") as file:
        for one in flaked:
            line = {
                "test": one.test,
                "message": one.message,
                "seconds": round(one.duration_s, 1),
                "load": round(load, 1),
            }
            file.write(json.dumps(line | {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n")


def to_run_again(status: int, recorder: Recorder) -> list[Failure]:
    """What a run's failures may be settled by; nothing when one of them counts as it is."""
    failures = list(recorder.failures.values())
    if status != pytest.ExitCode.TESTS_FAILED or recorder.is_broken or len(failures) > MOST:
        return []
    return failures if all(one.may_run_again for one in failures) else []


def settle(failures: list[Failure], passes_alone: Callable[[str], bool]) -> bool:
    """Run each once more, tell what came of it, and keep what passed. Whether all have passed."""
    load = os.getloadavg()[0]
    again = [one for one in failures if not passes_alone(one.test)]
    if flaked := [one for one in failures if one not in again]:
        keep(flaked, load)
    for one in again:
        print(f"FAILED AGAIN: {one.test}, {one.message}", flush=True)
    for one in flaked:
        print(f"FLAKED: {one.test}, {one.message}, {one.duration_s:.0f} s, load {load:.1f}", flush=True)
    return not again


def main(arguments: list[str]) -> int:
    recorder = Recorder()
    status = int(pytest.main(arguments, plugins=[recorder]))
    failures = to_run_again(status, recorder)
    if not failures:
        return status
    print(f"\n{len(failures)} realtime tests failed in a whole run; each is run once more, alone", flush=True)
    options = [one for one in arguments if one in KINDS]
    return 0 if settle(failures, lambda test: run_alone(test, options)) else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
