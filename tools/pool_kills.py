"""Kill a manager again and again on the same pool file, by hand; every block it serves afterwards is compared.

    python tools/pool_kills.py --points 500 --seed 1

A manager works HBM → HOST → NVME at full speed and is killed (SIGKILL) at seeded instants, some of them while it opens.
Each life first holds what it recovered to the journal's strict fold, reads every block back and serves it. Returns 0
when nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.processes.lives import kill_again_and_again


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="A manager, killed at seeded instants on one pool file.")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the instants and the workload (default 1)")
    parser.add_argument("--points", type=int, default=500, metavar="N", help="kills (default 500)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="where its files lie; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvbm-kills-") as temporary:
        try:
            killed = kill_again_and_again(
                arguments.folder or Path(temporary), arguments.seed, arguments.points, say=_tell
            )
        except AssertionError as error:
            print(f"FAILED: {error}")
            return 1
    if arguments.json:
        print(json.dumps(killed._asdict() | {"seed": arguments.seed, "seconds": round(time.monotonic() - began_s, 1)}))
    else:
        print(f"{killed.sentence()} (seed {arguments.seed}, {time.monotonic() - began_s:.0f} s)")
    return 0


def _tell(point: int) -> None:
    if point % 50 == 49:
        print(f"{point + 1} kills", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
