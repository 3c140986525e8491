"""Kill the leader of a NATS cluster's stream again and again under light and heavy load, and say who was back when.

    python tools/nats_kills.py --kills 50

Three nats-servers, a catalog process and three instances. It returns 0 when everybody agreed after every kill and no
answer hid that it was old.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.processes.leader_kills import Kill, LeaderKills


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Leaders of a NATS cluster, killed with -9; times and divergences.")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="how many (default 50)")
    parser.add_argument(
        "--light", type=float, default=20.0, metavar="R", help="runs a second and instance (default 20)"
    )
    parser.add_argument("--heavy", type=float, default=400.0, metavar="R", help="every second kill (default 400)")
    parser.add_argument("--instances", type=int, default=3, metavar="N", help="managers (default 3)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and stores there; it must not exist")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="kvbm-kills-") as folder:
        system = LeaderKills(arguments.keep or Path(folder), arguments.instances)
        try:
            for number in range(arguments.kills):
                kill = system.kill(number + 1, arguments.heavy if number % 2 else arguments.light)
                kills.append(kill)
                print(kill.sentence(), flush=True)
                for difference in kill.differences:
                    print(f"    DIFFERS {difference}", flush=True)
        finally:
            system.close()
    diverged = sum(bool(kill.differences) for kill in kills)
    untold = sum(kill.untold for kill in kills)
    for what, times in (
        ("new leader", [kill.leader_s for kill in kills]),
        ("publishers back", [kill.publishers_s for kill in kills]),
        ("reader back", [kill.reader_s for kill in kills]),
        ("80 % of the goodput", [kill.goodput_s for kill in kills if kill.goodput_s is not None]),
    ):
        if times:
            print(f"{what}: {statistics.median(times):.1f} s (median), {max(times):.1f} s (most), of {len(times)}")
    print(
        f"{'FAILED' if diverged or untold else 'ok'}: {len(kills)} leaders killed in {time.monotonic() - begin_s:.0f} "
        "s, "
        f"{diverged} divergences, {untold} stale answers untold"
    )
    return int(bool(diverged or untold))


if __name__ == "__main__":
    raise SystemExit(main())
