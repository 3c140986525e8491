"""The tests that a machine without a GPU or Triton skips, run by pytest in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from gpu_parts.report import TestsRun

MARKS = "gpu or triton"
_MARKED = re.compile(r"mark\.(gpu|triton)\b")
_WORDS = 300


def marked_files(folder: Path) -> list[str]:
    """Test files below a folder's `tests` that have such marks, sorted."""
    files = sorted((folder / "tests").rglob("test_*.py"))
    return [str(file.relative_to(folder)) for file in files if _MARKED.search(file.read_text())]


def run(folder: Path, timeout_s: float) -> TestsRun:
    """Run them in this folder.

    Raises RuntimeError: pytest ran none, or did not end by itself; the message has its last words.
    """
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, f"--junitxml={results}"]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, *marked_files(folder)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"pytest had not ended after {timeout_s:.0f} s: {str(error.output)[-_WORDS:]}") from None
    if ended.returncode not in (0, 1) or not results.exists():
        raise RuntimeError(f"pytest returned {ended.returncode}: {(ended.stdout + ended.stderr)[-_WORDS:]}")
    print(ended.stdout, flush=True)  # into the part's log
    return results_of(results.read_text(), time.monotonic() - began)


def results_of(text: str, seconds: float) -> TestsRun:
    """From pytest's JUnit file."""
    reasons: Counter[str] = Counter()
    failures: list[str] = []
    selected = 0
    for case in ElementTree.fromstring(text).iter("testcase"):
        selected += 1
        skipped = case.find("skipped")
        if skipped is not None:
            reasons[skipped.get("message", "")] += 1
        elif (bad := case.find("failure") if case.find("failure") is not None else case.find("error")) is not None:
            why = (bad.get("message") or "").replace("\n", " ")[:_WORDS]
            failures.append(f"{case.get('classname')}.{case.get('name')}: {why}")
    skips = sum(reasons.values())
    return TestsRun(
        selected=selected,
        passed=selected - skips - len(failures),
        failed=len(failures),
        skipped=skips,
        seconds=seconds,
        reasons=dict(reasons),
        failures=failures,
    )
