"""Kill one of two catalogs again and again under a steady rate of lookups, and say what their clients had of it.

    python tools/catalog_kills.py --kills 20 --rate 2000

A nats-server, two catalogs that start from their checkpoints, three instances, and clients in processes of their own
that know both catalogs and the right answers. It returns 0 when no lookup failed after its second try, none was wrong,
and none was older than it said.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvbm.streams.server import EmbeddedServer
from tests.faults.processes.catalog_kills import kill_catalogs


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Two catalogs under lookups, one killed with -9 again and again.")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="how many (default 20)")
    parser.add_argument("--rate", type=float, default=2000.0, metavar="R", help="lookups a second (default 2000)")
    parser.add_argument("--askers", type=int, default=2, metavar="N", help="processes of 4 clients (default 2)")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of the moments and of who is killed (default 1)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbm-kills-") as folder:
        server = EmbeddedServer.start(Path(folder) / "nats")
        try:
            result = kill_catalogs(
                server.url, "kills", Path(folder), arguments.kills, arguments.rate, arguments.askers, arguments.seed
            )
        finally:
            server.stop()
    print("ok" if result.is_good else "FAILED", *result.sentences(), sep="\n")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
