"""Two catalogs of one cluster under load, killed in turn: a client that knows both has an answer each time, and the right one.

FAILOVER_KILLS says how often one is killed (default 4). The long form is tools/catalog_kills.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.processes.catalog_kills import kill_catalogs
from tests.nats_fixture import cluster, nats_url  # noqa: F401

KILLS = int(os.environ.get("FAILOVER_KILLS", "4"))
RATE = 200.0


def test_no_question_fails_while_one_of_two_catalogs_is_killed(nats_url: str, cluster: str, tmp_path: Path) -> None:  # noqa: F811
    result = kill_catalogs(nats_url, cluster, tmp_path, KILLS, RATE, askers=1, seed=1)
    assert result.is_good, "\n".join(result.sentences())
    assert result.retried > 0, "no kill met a client"
