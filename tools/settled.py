"""Runs pytest as told, and settles what one or two failures among thousands of tests with real servers mean.

python tools/settled.py -n 2        as `pytest -n 2`

Where at most two tests fail, each is run three more times, alone. One that fails again fails the run. One that passes every time is
told at the end as *unstable*, with the words of its failure above: it is to be mended like any other, but it keeps nothing from landing.
`make test` itself knows no such thing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"

MOST_UNSTABLE = 2  # more at once are no accident
TIMES_ALONE = 3
KINDS = ("--engines", "--objects")  # options without which tests of a kind are left out
TESTS_FAILED = 1  # pytest's exit status where tests ran and some failed


def pytest_status(*args: str) -> int:
    """Exit status of one run."""
    return subprocess.run([sys.executable, "-m", "pytest", *args], cwd=ROOT, check=False).returncode


def failed_tests() -> list[str]:
    """What failed in the last run, by its pytest node id."""
    try:
        return sorted(json.loads(LAST_FAILED.read_text()))
    except FileNotFoundError:
        return []


def passes_alone(test: str, *options: str) -> bool:
    """Whether a test passes each time that it is run alone."""
    return all(pytest_status("-q", "-p", "no:cacheprovider", *options, test) == 0 for _ in range(TIMES_ALONE))


def main(args: list[str]) -> int:
    LAST_FAILED.unlink(missing_ok=True)
    status = pytest_status(*args)
    failed = failed_tests()
    if status != TESTS_FAILED or not 1 <= len(failed) <= MOST_UNSTABLE:
        return status
    print(f"\n{len(failed)} failed of a whole run; each now {TIMES_ALONE} times alone", flush=True)
    again = [test for test in failed if not passes_alone(test, *(one for one in args if one in KINDS))]
    for test in failed:
        said = (
            "FAILED AGAIN" if test in again else f"UNSTABLE: failed once, passed {TIMES_ALONE} of {TIMES_ALONE} alone"
        )
        print(f"{said}: {test}", flush=True)
    return TESTS_FAILED if again else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
