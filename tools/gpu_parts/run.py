"""The whole check: a process for each part, within the time there is; then one JSON file and one table."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpu_parts.budget import Budget, Share, Turn
from gpu_parts.pack import COMMIT
from gpu_parts.part import read
from gpu_parts.report import VERSION, Found, PartRun, Report, encode, table, wrong
from gpu_parts.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
TESTS, MANAGER = "tests", "manager"
SHARES = (Share(TESTS, 2.0), Share(MANAGER, 1.0), *(Share(shape.name, 1.0) for shape in SHAPES))
_LAST_WORDS = 400  # of a process that died, in the report
_LOG_END = 4000  # of a part in which something failed, on standard error


class Options(NamedTuple):
    """What to run.

    Attributes:
        until: when the whole has to be over, on `time.time`'s clock. began: when it began, there.
        only: parts to run, of SHARES; () for all.
        wheels: where a commit stands, for a machine without git.
    """

    dry_run: bool
    began: float
    until: float
    json: Path
    only: tuple[str, ...] = ()
    wheels: Path = ROOT / "build" / "gpu-check" / "wheels"


def main(options: Options) -> int:
    """Returns 0, or 1 when anything failed, was cut or left out."""
    shares = [share for share in SHARES if not options.only or share.name in options.only]
    budget = Budget(shares, options.until)
    with tempfile.TemporaryDirectory(prefix="kvbm-gpu-check-") as name:
        folder = Path(name)
        _copy_sources(folder)
        parts: list[tuple[PartRun, Found]] = []
        for share in shares:
            turn = budget.turn(share.name, time.time())
            parts.append(_left_out(share.name) if turn is None else run_part(share.name, turn, folder, options.dry_run))
            print(f"{share.name}: {parts[-1][0].outcome}, {parts[-1][0].seconds:.0f} s", file=sys.stderr, flush=True)
    report = joined(parts, options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(encode(report))
    print(table(report))
    print(f"\n{options.json}, after {report.seconds:.0f} s", flush=True)
    troubles = [trouble for trouble in wrong(report) if not options.only or not trouble.startswith("tests: no result")]
    for trouble in troubles:
        print(f"gpu-check: {trouble}", file=sys.stderr)
    return 1 if troubles else 0


def run_part(name: str, turn: Turn, folder: Path, dry_run: bool) -> tuple[PartRun, Found]:
    """A part in a process group of its own, which is ended when its time is up."""
    file = folder / f"{name}.json"
    until = time.time() + turn.asked_s
    command = [sys.executable, "-m", "gpu_parts.measure", name, str(file), str(until), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(folder / "tools")}
    if dry_run:
        environment["OMP_NUM_THREADS"] = "1"  # threads that wait for each other on a busy machine make small work long
    began = time.monotonic()
    with (folder / f"{name}.log").open("w+") as words:
        process = subprocess.Popen(
            [*command, *(["--dry-run"] if dry_run else [])],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returned: int | None = process.wait(turn.forced_s)
        except subprocess.TimeoutExpired:
            returned = None
        finally:
            _end(process)
        words.seek(0)
        log = words.read()
    went, found = _went(name, returned, time.monotonic() - began, file, " ".join(log[-_LAST_WORDS:].split()))
    if went.outcome != "done" or (found.tests is not None and found.tests.failed):
        print(f"-- the end of what {name} wrote:\n{log[-_LOG_END:]}\n--", file=sys.stderr)
    return went, found


def joined(parts: Sequence[tuple[PartRun, Found]], options: Options) -> Report:
    """One report of what all parts found."""
    found = [one for _, one in parts]
    return Report(
        version=VERSION,
        dry_run=options.dry_run,
        kvbm=version("kvbm-ledger"),
        commit=_commit(options.wheels),
        began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(options.began)),
        seconds=time.time() - options.began,
        machine=next((one.machine for one in found if one.machine is not None), None),
        tests=next((one.tests for one in found if one.tests is not None), None),
        parts=[part for part, _ in parts],
        copies=[row for one in found for row in one.copies],
        first_tokens=[row for one in found for row in one.first_tokens],
        waits=[row for one in found for row in one.waits],
    )


def _went(name: str, returned: int | None, seconds: float, file: Path, last_words: str) -> tuple[PartRun, Found]:
    try:
        found = read(file)
    except msgspec.DecodeError as error:
        found = Found(troubles=[f"what it wrote cannot be read: {error}"])
    troubles = [*found.troubles, *(f"not reached: {step}" for step in found.cut)]
    outcome = "failed" if found.troubles else "cut" if found.cut else "done"
    if returned is None:
        outcome = "cut"
        troubles.append("it was ended by force")
    elif returned:
        outcome = "failed"
        troubles.append(f"its process returned {returned}: {last_words}")
    return PartRun(name=name, outcome=outcome, seconds=seconds, troubles=troubles), found


def _left_out(name: str) -> tuple[PartRun, Found]:
    return PartRun(name=name, outcome="left out", seconds=0.0, troubles=[]), Found()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of the part, pytest and its children too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(20)


def _copy_sources(folder: Path) -> None:
    """Tests and tools without the checkout's kvbm, which would hide the installed one."""
    for part in ("tests", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", folder)


def _commit(wheels: Path) -> str:
    packed = wheels / COMMIT
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return packed.read_text().strip() if packed.exists() else ""
    return asked.stdout.strip() or (packed.read_text().strip() if packed.exists() else "")
