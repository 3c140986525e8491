"""A manager at full disk speed, killed and restarted at seeded instants, by hand.

    python tools/churn.py --seconds 300 --seed 1

Engines create and acquire as fast as HBM (memory), HOST and NVME allow, with blocks and reach that leave most of the
work to NVME; every byte is compared before and after. At the end the digest equals the journal's strict fold, no byte
was wrong, and no life's memory grew. Prints one line, with what NVME read and wrote beside what the disk does alone
and, by fio, of the same mix while no life had it; returns 0 when all of it holds. It takes some 3 GB of memory and as
much of the disk, beside half a minute for the disk's own speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.processes.lives import CHURN, churn


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="A manager at full speed, killed and restarted.")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="of lives (default 300)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of kills and workload (default 1)")
    parser.add_argument("--life", type=float, default=12.0, metavar="S", help="how long a process lives, in the mean")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="on the disk to use; default: a temporary one")
    parser.add_argument(
        "--device", choices=("memory", "cpu"), default="memory", help="of HBM; cpu takes the real HOST pool"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        import torch  # noqa: F401  # once, before the lives are forked
    load = CHURN._replace(device=arguments.device)
    with tempfile.TemporaryDirectory(prefix="kvbm-churn-") as temporary:
        try:
            result = churn(arguments.folder or Path(temporary), arguments.seed, arguments.seconds, load, arguments.life)
        except AssertionError as error:
            print(f"FAILED: seed {arguments.seed}: {error}")
            return 1
    print(json.dumps(result._asdict() | {"seed": arguments.seed}) if arguments.json else result.sentence())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
