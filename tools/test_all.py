"""Everything that can be asked of a checkout, one stage after the other, whatever fails on the way; then one report.

    python tools/test_all.py                     all stages: hours
    python tools/test_all.py --only tests,fuzz   these
    python tools/test_all.py --list              their names

It ends at once, with the line that installs them, where servers are missing that a stage asks for.

What the gate (`make check`) leaves out is here: statistics and measurements, every seed and every meeting of faults,
other examples of Hypothesis each time, radosgw and Redis, RDMA in VMs, all of the tests with engines, upgrades, every
Python, planted defects, free fuzzing.

build/report.md has a table of the stages, what failed, and what repeats a stage; build/test-all/STAGE.log what each has
printed. A stage that was not asked for keeps what its last run told, with the commit and the time of that run. Ends
with 1 when a stage of this run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "test-all"
REPORT = ROOT / "build" / "report.md"
FUZZ_SECONDS = 60
LIMIT_S = 6 * 3600.0  # of one stage
LAST_LINES = 15  # of a stage that failed without a report of its tests

# name -> targets and variables of make; those that run pytest get what PYTEST_ARGS says, and tell their tests
TRIPLES = "tests/faults/test_simulator.py::test_three_faults_that_meet_break_nothing"
STAGES: dict[str, list[str]] = {
    "demo": ["demo"],
    "code": ["--keep-going", "lint", "sizes", "type", "contract", "docs"],
    "native": ["native-test"],
    "tests": ["test"],
    "web": ["test-web"],
    "triples": ["test-triples"],
    "rdma": ["test-rdma"],
    "engines": ["test-engines"],
    "pd": ["test-pd"],
    "bridge": ["test-bridge"],
    "sglang": ["test-sglang"],
    "upgrade": ["test-upgrade"],
    "gpu-dry-run": ["gpu-check-dry"],
    "wheels": ["wheels-check"],
    "fuzz": ["fuzz", f"FUZZ_SECONDS={FUZZ_SECONDS}"],
    "mutants": ["mutants"],
}
PYTEST = {
    "tests": f"--nightly --objects --deselect={TRIPLES}",
    "web": "--nightly",
    "triples": "",
    "engines": "--nightly",
    "pd": "--nightly",
    "bridge": "--nightly",
    "sglang": "--nightly",
    "upgrade": "",
}
COMMANDS = {  # of a stage, what must be here before it begins: an hour later is too late to be told
    "tests": {
        "radosgw": "radosgw ceph-mon ceph-osd ceph-mgr ceph-common",
        "redis-server": "redis-server",
        "pgbouncer": "pgbouncer",
        "fio": "fio",
    },
    "web": {"chromium": "chromium", "chromedriver": "chromium-driver"},
    "rdma": {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "kmod": "kmod", "cpio": "cpio"},
}


class Ended(NamedTuple):
    """One stage.

    Attributes:
        commit, at: of the checkout it ran on, and its end as UTC in words. seed: Hypothesis' of that run.
        told: its numbers in words. failed: tests that failed, each with its first message.
        load: of the machine, the minute before it began and the one before it ended.
    """

    name: str
    status: int
    seconds: float
    told: str
    failed: list[tuple[str, str]]
    load: tuple[float, float]
    commit: str
    at: str
    seed: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of stages, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the names of the stages")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of Hypothesis; a report names the one it had"
    )
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(STAGES))
        return 0
    names = list(STAGES) if options.only is None else options.only.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"no stage is called {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if packages := missing_packages(names):
        parser.error(f"stages need what is not here; install it first: apt-get install {' '.join(packages)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    ended = {name: kept for name in STAGES if (kept := kept_of(name)) and name not in names}
    for name in names:
        print(f"{name}: begins, log: {(FOLDER / f'{name}.log').relative_to(ROOT)}", flush=True)
        one = ended[name] = run(name, options.seed)
        REPORT.write_text(report(ended))  # so far: a run that is cut short has one, too
        print(f"{name}: {_result(one)}, {one.told}, {one.seconds:.0f} s", flush=True)
    print(REPORT.read_text())
    return int(any(ended[name].status for name in names))


def missing_packages(names: list[str]) -> list[str]:
    """Debian's packages of the commands that these stages need and this machine lacks."""
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))
    return [
        packages
        for name in names
        for command, packages in COMMANDS.get(name, {}).items()
        if shutil.which(command, path=places) is None
    ]


def run(name: str, seed: int) -> Ended:
    """Run a stage to its end, and keep what it told."""
    tests, kept = FOLDER / f"{name}.xml", FOLDER / f"{name}.json"
    for earlier in (tests, kept):
        earlier.unlink(missing_ok=True)
    command = ["make", "-C", str(ROOT), *STAGES[name]]
    if name in PYTEST:
        command.append(f"PYTEST_ARGS={PYTEST[name]} --hypothesis-seed={seed} --junitxml={tests} --durations=30")
    load, begin_s = os.getloadavg()[0], time.monotonic()
    with (FOLDER / f"{name}.log").open("w") as log:
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    told, failed = counted(tests) if tests.exists() else ("", [])
    if status and not failed:
        last = (FOLDER / f"{name}.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        failed = [(name, line) for line in last]
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    one = Ended(name, status, time.monotonic() - begin_s, told, failed, (load, os.getloadavg()[0]), _commit(), at, seed)
    kept.write_text(json.dumps(one._asdict()))
    return one


def kept_of(name: str) -> Ended | None:
    """What the last run of a stage told, None where none ended."""
    kept = FOLDER / f"{name}.json"
    return Ended(**json.loads(kept.read_text())) if kept.exists() else None


def counted(tests: Path) -> tuple[str, list[tuple[str, str]]]:
    """Numbers and failures of a JUnit file that pytest has written."""
    numbers = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed: list[tuple[str, str]] = []
    for suite in ET.parse(tests).getroot().iter("testsuite"):
        for key in numbers:
            numbers[key] += int(suite.get(key, 0))
        for case in suite.iter("testcase"):
            for found in (*case.iter("failure"), *case.iter("error")):
                message = (found.get("message") or "").strip().partition("\n")[0]
                failed.append((f"{case.get('classname')}::{case.get('name')}", message))
    bad = numbers["failures"] + numbers["errors"]
    return f"{numbers['tests'] - bad - numbers['skipped']} passed, {bad} failed, {numbers['skipped']} skipped", failed


def report(ended: dict[str, Ended]) -> str:
    """The whole, in Markdown."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    lines = [
        f"# make test-all: {_commit()}",
        "",
        f"{machine}. `python tools/test_all.py --only STAGE --seed SEED` draws the same examples.",
        "",
        "| stage | result | tests | seconds | load before, after | commit | ended, UTC | seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in STAGES:
        if (one := ended.get(name)) is None:
            lines.append(f"| {name} | not run | | | | | | |")
            continue
        load = f"{one.load[0]:.1f}, {one.load[1]:.1f}"
        row = (name, _result(one), one.told, f"{one.seconds:.0f}", load, one.commit, one.at, one.seed)
        lines.append(f"| {' | '.join(map(str, row))} |")
    if failed := [(name, test, message) for name in ended for test, message in ended[name].failed]:
        lines += ["", "## Failed", "", *(f"- {name}: `{test}`: {message}" for name, test, message in failed)]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    """The checkout's, with "-dirty" where files differ from it."""
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "no commit"


def _result(one: Ended) -> str:
    return "passed" if one.status == 0 else f"FAILED ({one.status})"


if __name__ == "__main__":
    sys.exit(main())
