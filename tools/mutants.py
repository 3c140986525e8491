"""Plants the deliberate defects of tests/faults/source_mutants.py, one at a time, and says what notices them.

    python tools/mutants.py                       every defect: does its test fail?
    python tools/mutants.py --fast                the same without the native ones, which have to be compiled
    python tools/mutants.py torn_bytes_stay …     these alone
    python tools/mutants.py --table               tests and simulator alike, as the table of tests/faults/README.md
    python tools/mutants.py --try tests/unit/test_journal.py torn_bytes_stay   does any of these tests notice it?

A test has to pass without the defect first. One that does not end within WAIT_S has noticed. Ends with 1 when a test
did not notice its defect. The simulator runs its generic mix, SEEDS seeds at most. Native tests are built below
build/mutants.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.source_mutants import ROOT, SEEDS, SOURCE_MUTANTS, SourceMutant

WAIT_S = 900.0
ALL_WAIT_S = 5400.0  # for all of them without a defect
BUILD = ROOT / "build" / "mutants"
SOURCES = ("CMakeLists.txt", "native", "tests/golden")


class Verdict(NamedTuple):
    """What noticed a defect.

    Attributes:
        test: the test that failed, "" for none. nightly: `make test` leaves it to `make test-all`.
        seeds: how many seeds of the generic mix it took; 0: none of SEEDS noticed; None: none was asked.
    """

    test: str
    seeds: int | None = None
    nightly: bool = False


# -- Python ------------------------------------------------------------------------------------------------------------


def planted(mutant: SourceMutant, folder: Path, *, is_whole: bool = False) -> dict[str, str]:
    """The environment of a process that has the defect, or everything of it but the defect."""
    path = ROOT / mutant.file
    text = path.read_text()
    patched = folder / path.name
    patched.write_text(text if is_whole else mutant.patched(text))
    module = mutant.file.removesuffix(".py").replace("/", ".")
    before = os.environ.get("PYTHONPATH", "")
    hook = str(ROOT / "tests" / "faults" / "planted")
    return os.environ | {"PLANTED_DEFECT": f"{module}={patched}", "PYTHONPATH": f"{hook}:{before}".rstrip(":")}


def failed_tests(
    tests: Sequence[str], environment: dict[str, str], nightly: bool = False, wait_s: float = WAIT_S
) -> list[str]:
    """The first of some tests that fails; none when all pass. Raises RuntimeError: they could not be run.

    Args:
        nightly: also those that `make test` leaves to `make test-all`.
    """
    options = ["--nightly"] if nightly else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-rfE",
        *options,
        *tests,
    ]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=wait_s
        )
    except subprocess.TimeoutExpired:
        return [f"{tests[0]} (does not end)" if len(tests) == 1 else f"one of {len(tests)} tests (does not end)"]
    if ran.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return []
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode != 1 or not found:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return found


def noticing_seed(environment: dict[str, str]) -> int:
    """How many seeds of the generic mix it takes to notice; 0: none of SEEDS does."""
    command = [sys.executable, __file__, "--seeds-here"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the simulator did not run:\n{ran.stdout}{ran.stderr}")
    return int(ran.stdout.split()[-1])


def seeds_here() -> int:
    """The same in this process."""
    from tests.faults.simulator.run import run_seed, watched

    with watched():
        for seed in range(SEEDS):
            if run_seed(seed).violation:
                return seed + 1
            gc.collect()
    return 0


# -- native ------------------------------------------------------------------------------------------------------------


def copy_sources() -> Path:
    """The native sources as they are, below build/mutants; what has not changed keeps its time, so little is compiled
    again.
    """
    top = BUILD / "sources"
    for name in SOURCES:
        for path in [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")):
            copied = top / path.relative_to(ROOT)
            if path.is_file() and "corpus" not in path.parts:
                copied.parent.mkdir(parents=True, exist_ok=True)
                if not copied.exists() or copied.read_bytes() != path.read_bytes():
                    shutil.copyfile(path, copied)
    return top


def native_failure(name: str) -> str:
    """Build one C++ test of the copied sources and run it: the case that fails, "" when all pass.

    Raises RuntimeError: it does not compile.
    """
    tools = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    target, objects = Path(name).stem, BUILD / "objects"
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        str(BUILD / "sources"),
        "-B",
        str(objects),
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_CXX_FLAGS=-O1",
        "-DKVBM_BUILD_PYTHON=OFF",
        "-DKVBM_BUILD_TESTS=ON",
        "-DKVBM_WARNINGS_ARE_ERRORS=OFF",
    ]
    for command in (configure, ["cmake", "--build", str(objects), "--target", target, "--parallel", "2"]):
        built = subprocess.run(command, env=tools, check=False, capture_output=True, text=True)
        if built.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {built.returncode}:\n{built.stdout[-4000:]}{built.stderr}"
            )
    cases = re.findall(r'\{"([^"]+)",', (ROOT / name).read_text().rpartition("int main")[2])
    line_buffered = ["stdbuf", "-oL", str(objects / target)]
    try:
        ran = subprocess.run(line_buffered, check=False, capture_output=True, text=True, timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        return f"{name} (does not end)"
    if ran.returncode == 0:
        return ""
    passed = ran.stdout.count("ok  ")
    return f"{name}::{cases[passed] if passed < len(cases) else '?'}"


def native_verdict(mutant: SourceMutant, test: str) -> Verdict:
    """Build the test with the defect and run it."""
    copied = copy_sources() / mutant.file
    whole = copied.read_text()
    copied.write_text(mutant.patched(whole))
    try:
        return Verdict(native_failure(test))
    finally:
        copied.write_text(whole)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def verdict_of(mutant: SourceMutant, with_seeds: bool) -> Verdict:
    """What notices a defect."""
    if mutant.is_native:
        return native_verdict(mutant, mutant.test)
    with tempfile.TemporaryDirectory() as folder:
        environment = planted(mutant, Path(folder))
        failed = failed_tests([mutant.test], environment)
        nightly = not failed
        if nightly:
            failed = failed_tests([mutant.test], environment, nightly=True)
        return Verdict(failed[0] if failed else "", noticing_seed(environment) if with_seeds else None, nightly)


def check_tests(mutants: dict[str, SourceMutant]) -> None:
    """Every named test passes while nothing is planted, by the same means. Raises RuntimeError."""
    python = [mutant for mutant in mutants.values() if not mutant.is_native]
    if python:
        with tempfile.TemporaryDirectory() as folder:
            tests = sorted({mutant.test for mutant in python})
            if failed := failed_tests(tests, planted(python[0], Path(folder), is_whole=True), True, ALL_WAIT_S):
                raise RuntimeError(f"{failed[0]} fails without any defect")
    native = sorted({mutant.test for mutant in mutants.values() if mutant.is_native})
    if native:
        copy_sources()
    for test in native:
        if failure := native_failure(test):
            raise RuntimeError(f"{failure} fails without any defect")


def row(name: str, mutant: SourceMutant, verdict: Verdict) -> str:
    """One line of the table."""
    file, _, case = verdict.test.partition("[")[0].partition("::")
    words = case.removeprefix("test_").replace("_", " ")
    test = f"`{Path(file).name}`{f': {words}' if words else ''}" if file else "**nothing**"
    seeds = {None: "", 0: "–"}.get(verdict.seeds, str(verdict.seeds))
    return (
        f"| `{name}` | `{Path(mutant.file).name}` | {mutant.rule} | {test} | "
        f"{'`make test-all`' if verdict.nightly else 'gate'} | {seeds} |"
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of defects; all without any")
    parser.add_argument("--fast", action="store_true", help="leave out what has to be compiled")
    parser.add_argument("--table", action="store_true", help="judge by tests and simulator alike, and print the table")
    parser.add_argument("--try", dest="tried", action="append", help="judge by these tests instead", metavar="TEST")
    parser.add_argument("--seeds-here", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.seeds_here:
        print(seeds_here())
        return 0
    mutants = {name: SOURCE_MUTANTS[name] for name in wanted.names or SOURCE_MUTANTS}
    if wanted.fast:
        mutants = {name: mutant for name, mutant in mutants.items() if not mutant.is_native}
    if wanted.tried:
        return try_tests(mutants, wanted.tried)
    check_tests(mutants)
    missed, rows = [], []
    for name, mutant in mutants.items():
        verdict = verdict_of(mutant, wanted.table and not mutant.is_native)
        where = " (of make test-all)" if verdict.nightly and verdict.test else ""
        print(f"{name}: {verdict.test or 'NOBODY noticed'}{where}", file=sys.stderr, flush=True)
        rows.append(row(name, mutant, verdict))
        if not verdict.test:
            missed.append(name)
    if wanted.table:
        heading = f"| defect | in | what no longer holds | the test that fails | runs in | of {SEEDS} seeds |"
        print("\n".join((heading, "|---|---|---|---|---|---|", *rows)))
    print(
        f"{len(mutants) - len(missed)} of {len(mutants)} noticed; missed: {', '.join(missed) or 'none'}",
        file=sys.stderr,
    )
    return 1 if missed else 0


def try_tests(mutants: dict[str, SourceMutant], tests: list[str]) -> int:
    """Which of some tests notices each defect."""
    for name, mutant in mutants.items():
        if mutant.is_native:
            found = [native_verdict(mutant, test).test for test in tests]
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = failed_tests(tests, planted(mutant, Path(folder)))
        print(f"{name}: {', '.join(filter(None, found)) or 'nobody'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
