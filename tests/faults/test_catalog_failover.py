"""Two catalogs of one cluster under load, killed in turn: a client that knows both has an answer each time, and the
right one.

FAILOVER_KILLS says how often one is killed (default 2, with --nightly 6 as well). The long form is
tools/catalog_kills.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.processes.catalog_kills import kill_catalogs
from tests.nats_fixture import cluster, nats_url  # noqa: F401

KILLS = int(os.environ.get("FAILOVER_KILLS", "2"))
RATE = 200.0
SEED = 1  # the first kills meet both catalogs, so one that the clients ask


@pytest.mark.parametrize("kills", [KILLS, pytest.param(6, marks=pytest.mark.nightly)])
def test_no_question_fails_while_one_of_two_catalogs_is_killed(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    kills: int,
) -> None:
    result = kill_catalogs(nats_url, cluster, tmp_path, kills, RATE, askers=1, seed=SEED)
    assert result.is_good, "\n".join(result.sentences())
    assert result.retried > 0, "no kill met a client"
