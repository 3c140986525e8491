"""The crash loop over real processes, by hand: nats-server, Postgres, catalogs and workers, faults from one seed.

    python tools/crash_loop.py --seed 7 --faults 200 --keep crash-files

It returns 0 when everybody agreed after every fault, 1 at the first divergence; then FOLDER has every log, journal and
store, and the same seed draws the same faults again (when exactly they hit is the machine's affair).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.processes.bursts import Burst, run_burst
from tests.faults.processes.loop import KINDS, CrashLoop, Fault, Options, System, archive_verdicts, ends_with_us


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Real processes, killed, stopped, cut off and damaged; then compared.")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the faults and the workload (default 1)")
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="manager processes (default 3)")
    parser.add_argument(
        "--catalogs", type=int, default=2, metavar="N", help="catalog replicas on one database (default 2)"
    )
    parser.add_argument("--rate", type=float, default=6.0, metavar="N", help="prompts a second and worker (default 6)")
    parser.add_argument(
        "--slow", type=float, default=1.0, metavar="F", help="factor on the 90 s a system has to be whole again"
    )
    parser.add_argument(
        "--only", default="", metavar="KIND,…", help=f"draw from these alone: {', '.join(sorted(KINDS))}"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep everything there; it must not exist")
    parser.add_argument(
        "--burst",
        type=int,
        default=0,
        metavar="BLOCKS",
        help="instead of the loop: so many blocks into a stopped, then started catalog; with --kills, while "
        "nats-server is killed",
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="of nats-server during the burst")
    arguments = parser.parse_args()
    if unknown := [kind for kind in arguments.only.split(",") if kind and kind not in KINDS]:
        parser.error(f"there is no fault {unknown[0]!r}")
    ends_with_us()
    with tempfile.TemporaryDirectory(prefix="kvbm-crash-") as temporary:
        folder = Path(temporary) / "run"
        failed = True
        try:
            failed = burst(arguments, folder) if arguments.burst else loop(arguments, folder)
        finally:
            if failed and arguments.keep is None:
                arguments.keep = Path(f"crash-loop-{arguments.seed}-{int(time.time())}")
            if arguments.keep is not None and folder.exists():
                shutil.copytree(folder, arguments.keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                print(f"kept: {arguments.keep}")
    return int(failed)


def loop(arguments: argparse.Namespace, folder: Path) -> bool:
    """The loop; whether it failed."""
    options = Options(
        folder, arguments.seed, arguments.workers, arguments.catalogs, arguments.rate, slow=arguments.slow
    )
    begin_s = time.monotonic()
    system = System(options)
    try:
        kinds = [kind for kind in arguments.only.split(",") if kind]
        faults = CrashLoop(system, kinds, _tell).run(arguments.faults)
        unexplained = []
        for line, found in archive_verdicts(system):
            print(line)
            unexplained += found
    finally:
        system.keep_disks()
        system.close()
    failed = bool(faults[-1].differences or unexplained)
    whole = sorted(fault.whole_s for fault in faults)
    print(
        f"{'FAILED' if failed else 'ok'}: seed {arguments.seed}, {len(faults)} faults of "
        f"{len({f.kind for f in faults})} kinds, "
        f"{int(failed)} divergences, {time.monotonic() - begin_s:.0f} s; agreed again after "
        f"{statistics.median(whole):.1f} s "
        f"(median), {whole[-1]:.1f} s (most)"
    )
    return failed


def burst(arguments: argparse.Namespace, folder: Path) -> bool:
    """The burst; whether it failed."""
    wanted = Burst(arguments.burst, kills=arguments.kills, stopped_catalog=True, seed=arguments.seed)
    result = run_burst(folder, wanted, arguments.slow)
    print(result.sentence())
    return bool(result.differences)


def _tell(fault: Fault) -> None:
    print(
        f"{fault.number:4} {fault.kind:20} {fault.fault_s:5.1f} s, whole after {fault.whole_s:5.1f} s: {fault.what}",
        flush=True,
    )
    for difference in fault.differences:
        print(f"     DIFFERS {difference}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
