"""`kvbm bench sql`: claims on their way to SQL: from what a step of the sequencer has changed to the committed
transaction.

Each of 16 instances claims runs of 64 blocks for one pool. What the service would have gathered while it stored the
batch before is one batch here. PostgreSQL runs on this machine with its own settings, synced to disk at each commit;
SQLite as the catalog opens it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm.bench.measure import Found, Row, Sample, row_of
from kvbm.bench.postgres import postgres_server
from kvbm.catalog.follow.instance_sequence import Changes, StreamCursor
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.sql.rows import ClaimRun, InstanceRows
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.errors import MissingExtraError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace
from kvbm.streams.base import Mark

INSTANCES = 16
RUN_BLOCKS = 64
BATCH_BLOCKS = 65_536
USED_S = 60.0
_POOL = "bench"
_NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16).id
_SECOND_NS = 1_000_000_000
_BEGIN_NS = 1_700_000_000 * _SECOND_NS
_FILLS = 3  # fresh databases that are filled, at most


class ClaimRates(NamedTuple):
    """What one database takes, in claims a second.

    Attributes:
        new: of blocks that it does not have. known: that it has, claimed again within USED_S. newer: claimed again
            after it.
    """

    new: Row
    known: Row
    newer: Row


def bench_sql(live: int, samples: int, seed: int) -> Found:
    """Claims a second into SQLite and PostgreSQL.

    Args:
        live: blocks that are claimed.
    """
    sqlite = sqlite_rates(live, samples, seed)
    numbers: dict[str, float | None] = {
        "sql_claims_per_s": None,
        "reclaims_per_s": None,
        "sql_claims_per_s_sqlite": sqlite.new.value,
        "reclaims_per_s_sqlite": sqlite.known.value,
    }
    note = f"{live:,} claims of {INSTANCES} instances in runs of {RUN_BLOCKS}, {BATCH_BLOCKS:,} to a batch"
    try:
        postgres = postgres_rates(live, samples, seed)
    except MissingExtraError as error:
        return Found(list(sqlite), numbers, (note, str(error)))
    numbers |= {"sql_claims_per_s": postgres.new.value, "reclaims_per_s": postgres.known.value}
    return Found([*postgres, *sqlite], numbers, (note,))


def sqlite_rates(live: int, samples: int, seed: int) -> ClaimRates:
    """Into a file in the folder for temporary ones."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        urls = [Path(folder) / f"{fill}.db" for fill in range(_fills(samples))]
        return asyncio.run(_rates("SQLite", urls, live, samples, seed))


def postgres_rates(live: int, samples: int, seed: int) -> ClaimRates:
    """Into a server of its own. Raises MissingExtraError: there is none. ProcessError: it does not start."""
    with postgres_server() as url:
        return asyncio.run(_postgres_rates(url, live, samples, seed))


async def _postgres_rates(server: str, live: int, samples: int, seed: int) -> ClaimRates:
    import asyncpg

    connection = await asyncpg.connect(server, timeout=10)
    urls = []
    try:
        for fill in range(_fills(samples)):
            await connection.execute(f"CREATE DATABASE bench_{fill}")
            urls.append(f"{server.rpartition('/')[0]}/bench_{fill}")
    finally:
        await connection.close()
    return await _rates("PostgreSQL, synced", urls, live, samples, seed)


def _fills(samples: int) -> int:
    return min(samples, _FILLS)


async def _rates(what: str, urls: Sequence[str | Path], live: int, samples: int, seed: int) -> ClaimRates:
    rng = np.random.default_rng(seed)
    runs = [rng.bytes(RUN_BLOCKS * HASH_BYTES) for _ in range(max(1, live // RUN_BLOCKS))]
    claims = len(runs) * RUN_BLOCKS
    new: list[Sample] = []
    for url in urls:
        store = await SqlStore.open(url, used_s=USED_S)
        sink = ClaimSink(store)
        try:
            new.append(await sink.store_all(runs, _BEGIN_NS))
            if url is not urls[-1]:
                continue
            rng.shuffle(runs)  # prompts that are read again come in another order
            known = [await sink.store_all(runs, _BEGIN_NS + (turn + 1) * _SECOND_NS) for turn in range(samples)]
            assert await store.claim_count() == claims
            step_ns = int((USED_S + 1) * _SECOND_NS)
            newer = [await sink.store_all(runs, _BEGIN_NS + (turn + 1) * step_ns) for turn in range(_fills(samples))]
        finally:
            await store.close()
    return ClaimRates(
        *(
            row_of(f"{what}: {kind}", "claims/s", [claims / sample.wall_s for sample in taken], taken)
            for kind, taken in (
                ("claims", new),
                ("claims said again", known),
                ("… after what gc can tell apart", newer),
            )
        )
    )


class ClaimSink:
    """Brings claims to SQL as the catalog does."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._rows = RowCollector("bench")
        self._sequence = 0

    async def store_all(self, runs: Sequence[bytes], at_ns: int) -> Sample:
        """Claim runs of packed hashes, batch by batch. This thread's CPU time beside wall time."""
        of_batch = BATCH_BLOCKS // RUN_BLOCKS
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        for at in range(0, len(runs), of_batch):
            await self._store_batch(runs[at : at + of_batch], at_ns + at)
        return Sample(time.perf_counter() - wall_s, time.thread_time() - cpu_s)

    async def _store_batch(self, runs: Sequence[bytes], at_ns: int) -> None:
        changes = Changes(StreamCursor(), self._sequence)
        for number, hashes in enumerate(runs):
            self._sequence += 1
            changes.claims.append(
                (
                    self._sequence,
                    ClaimRun(
                        pool=_POOL,
                        namespace=_NAMESPACE,
                        hashes=hashes,
                        instance=InstanceId(f"instance-{number % INSTANCES}"),
                        at_ns=at_ns + number,
                    ),
                )
            )
        self._rows.take(changes)
        batch = self._rows.take_batch(Mark(self._sequence, None), _no_rows)
        assert batch is not None
        assert await self._store.apply(batch)


def _no_rows(instance: InstanceId) -> InstanceRows:
    raise KeyError(instance)
