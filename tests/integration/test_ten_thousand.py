"""`tools/ten_thousand.py`, with hundreds for some seconds: nobody is left out or suspect, and the catalog's memory is
flat.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_a_catalog_among_hundreds_of_instances_leaves_nobody_out_and_does_not_grow() -> None:
    command = [sys.executable, "tools/ten_thousand.py", "--instances", "300", "--seconds", "10", "--seed", "3"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("ok"), done.stdout + done.stderr


@pytest.mark.nightly
def test_it_says_what_is_wrong_and_fails() -> None:
    """Nobody can keep its memory below a growth of less than nothing."""
    command = [sys.executable, "tools/ten_thousand.py", "--instances", "20", "--seconds", "3", "--growth-mib", "-1000"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and "the catalog's memory grew by" in done.stdout.split("FAILED")[1], done.stderr
