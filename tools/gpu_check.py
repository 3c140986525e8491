"""What kvbm does on a GPU, in eight minutes at most: the tests that need one, HBM ↔ HOST of five published models,
first tokens.

    python tools/gpu_check.py --pack      # with a network: wheels for the GPU machine, into build/gpu-check/wheels
    python tools/gpu_check.py             # on the GPU machine: Python 3.12, PyTorch, Triton; nothing is downloaded
    python tools/gpu_check.py --dry-run   # the same program on a CPU with small shapes; its numbers are no GPU's

It ends with one JSON file and one table, and returns 0 only when all of it was done and nothing failed. Parts run in
processes of their own, each within its share of the time: one that fails or hangs is noted, and the others go on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu-check"
SECONDS = 480.0
WANTED = ("kvbm-ledger", "pytest", "pytest-timeout", "hypothesis")


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 when something failed, was cut or left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", action="store_true", help="gather wheels for the GPU machine, and run nothing")
    parser.add_argument(
        "--dry-run", action="store_true", help="small shapes on the CPU, with the Python that runs this"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=WORK,
        metavar="DIR",
        help="for the environment and the report (default build/gpu-check)",
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="where the wheels are (default: in the work folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report (default: in the work folder)")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="for all of it (default 480)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="tests, or a shape such as llama-3-8b"
    )
    parser.add_argument("--in-environment", type=float, default=0.0, metavar="BEGAN", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    began = options.in_environment or time.time()
    work = options.work.resolve()
    wheels = options.wheels.resolve() if options.wheels else work / "wheels"
    if options.pack:
        return _pack(wheels)
    if not options.dry_run and not options.in_environment:
        return _in_environment(work, wheels, began, sys.argv[1:] if arguments is None else arguments)
    from gpu_parts import run

    report = options.json or work / ("dry-run.json" if options.dry_run else "report.json")
    unknown = set(options.only) - {share.name for share in run.SHARES}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(share.name for share in run.SHARES)}")
    return run.main(run.Options(options.dry_run, began, began + options.seconds, report, tuple(options.only), wheels))


def _pack(wheels: Path) -> int:
    from gpu_parts.pack import PackError, pack

    try:
        size = pack(wheels)
    except PackError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1
    print(f"{wheels}: {len(list(wheels.glob('*.whl')))} wheels, {size / (1 << 20):.1f} MiB")
    return 0


def _in_environment(work: Path, wheels: Path, began: float, arguments: list[str]) -> int:
    """Run again in an environment of its own, over the packages of the Python that runs this."""
    if not list(wheels.glob("kvbm_ledger-*.whl")):
        print(
            f"gpu-check: {wheels} holds no wheel of kvbm; run: make gpu-pack, where there is a network", file=sys.stderr
        )
        return 1
    environment = work / "environment"
    python = environment / "bin" / "python"
    shutil.rmtree(environment, ignore_errors=True)
    quiet = [
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--find-links",
        str(wheels),
    ]
    for step in (
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(environment)],
        [str(python), *quiet, *WANTED],
    ):
        ran = subprocess.run(step, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"gpu-check: {' '.join(step)} returned {ran.returncode}: {ran.stderr[-2000:]}", file=sys.stderr)
            return 1
        _link_packages(environment)
    again = [str(python), str(Path(__file__).resolve()), *arguments, "--in-environment", repr(began)]
    return subprocess.run(again, check=False).returncode


def _link_packages(environment: Path) -> None:
    """Show the environment what this Python has, which may be an environment itself: then its packages are not the
    system's.
    """
    own = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in own)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "of_the_machine.pth").write_text(lines)


if __name__ == "__main__":
    raise SystemExit(main())
