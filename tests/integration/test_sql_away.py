"""PostgreSQL that cuts off connections, or is away for half a minute: rows come late, and answers do not change."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from kvbm.core.answers import LookupAnswer
from kvbm.core.errors import CatalogError
from kvbm.core.events import MigrateCause
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Tier
from tests.catalog_site import SPACE, Instance, Running, run_catalog
from tests.eventually import eventually
from tests.extras import needed
from tests.managers import hashes_of
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.servers import PostgresServer, own_postgres

asyncpg = needed("asyncpg", "catalog")

WAIT_S = 120.0
BLOCKS = 8
AUDIT = """
CREATE TABLE audit (pool text, namespace bytea, hash bytea);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO audit VALUES (NEW.pool, NEW.namespace, NEW.hash); RETURN NULL; END $$;
CREATE TRIGGER inserted AFTER INSERT ON object_claims FOR EACH ROW EXECUTE FUNCTION note();
"""
CUT_OFF = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND datname = current_database()
"""


class Site(NamedTuple):
    """A catalog, its database in PostgreSQL with an audit of each row that is inserted, and an instance that claims."""

    database: str
    catalog: Running
    instance: Instance

    def ask(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Something on a connection of the test's own."""

        async def connected() -> Any:
            connection = await asyncpg.connect(self.database.replace("+asyncpg", ""), timeout=WAIT_S)
            try:
                return await work(connection)
            finally:
                await connection.close()

        return asyncio.run(connected())

    def claim(self, prompt: int) -> None:
        """Compute a prompt, put it into the object pool, say both; both questions about it have the right answer."""
        ledger, hashes = self.instance.ledger, hashes_of(prompt, BLOCKS)
        allocation = ledger.allocate(Tier.HBM, BLOCKS)
        assert allocation is not None
        slots = ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots)
        copy = ledger.begin_copy(SPACE.id, Tier.HBM, Tier.OBJECT, hashes)
        assert copy is not None
        ledger.end_copy(copy, [True] * BLOCKS, MigrateCause.OFFLOAD)
        ledger.unpin(Tier.HBM, slots)
        self.check(prompt, self.instance.publish())

    def check(self, prompt: int, *at_least: Any) -> None:
        """The catalog knows the whole prompt, in the instance and in the pool, and sends it there."""
        client, hashes = self.catalog.client, hashes_of(prompt, BLOCKS)

        def look() -> LookupAnswer | None:
            try:
                return client.lookup(SPACE, hashes, at_least=at_least, wait_s=5.0)
            except CatalogError:  # a busy machine: it has not read that far yet
                return None

        found = eventually(look, "the catalog does not read on", WAIT_S)
        assert found is not None
        assert [one.depth for one in found.pools] == [BLOCKS]
        assert [one.depth for one in found.instances] == [BLOCKS]
        routed = client.route(SPACE, hashes, BLOCKS * SPACE.block_tokens)
        assert (routed.instance, routed.ranked[0].depth) == (self.instance.name, BLOCKS)

    def inserted(self) -> dict[bytes, int]:
        """How often each claim was inserted, in transactions that count."""
        rows = self.ask(lambda it: it.fetch("SELECT hash, count(*) AS times FROM audit GROUP BY hash"))
        return {row["hash"]: row["times"] for row in rows}

    def claimed(self) -> int:
        """How many claims SQL has."""
        return int(self.ask(lambda it: it.fetchval("SELECT count(*) FROM object_claims")))

    def cut_off(self) -> int:
        """End all connections but this one."""
        return int(self.ask(lambda it: it.fetchval(CUT_OFF)))

    def check_rows(self, prompts: int) -> None:
        """Each claim is in SQL in the end, and was inserted once."""
        eventually(lambda: self.claimed() == prompts * BLOCKS, "claims do not reach SQL", WAIT_S, state=self.claimed)
        all_of_them = b"".join(hashes_of(prompt, BLOCKS) for prompt in range(prompts))
        hashes = [all_of_them[at : at + HASH_BYTES] for at in range(0, len(all_of_them), HASH_BYTES)]
        assert self.inserted() == dict.fromkeys(hashes, 1)


def run_site(nats_url: str, cluster: str, database: str) -> Iterator[Site]:  # noqa: F811
    for catalog in run_catalog(nats_url, cluster, database, liveness_s=WAIT_S):
        instance = catalog.instance("one")
        instance.publish()
        instance.beat()
        made = Site(database, catalog, instance)
        made.ask(lambda it: it.execute(AUDIT))
        yield made


@pytest.fixture
def site(nats_url: str, cluster: str, postgres_url: str) -> Iterator[Site]:  # noqa: F811
    yield from run_site(nats_url, cluster, postgres_url)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """One of the test's own, which it may end."""
    with own_postgres(durable=True) as server:
        yield server


@pytest.fixture
def own_site(nats_url: str, cluster: str, own_server: PostgresServer) -> Iterator[Site]:  # noqa: F811
    yield from run_site(nats_url, cluster, own_server.url)


def test_connections_that_postgres_cuts_off_cost_no_answer_and_no_claim_twice(site: Site) -> None:
    """While batches are stored, again and again."""
    ended = threading.Event()
    cut: list[int] = []

    def cut_off() -> None:
        while not ended.is_set():
            cut.append(site.cut_off())

    cutter = threading.Thread(target=cut_off)
    cutter.start()
    try:
        for prompt in range(6):
            site.claim(prompt)
        eventually(lambda: sum(cut) >= 5, "no connection of the catalog was cut off", state=lambda: cut)
    finally:
        ended.set()
        cutter.join(WAIT_S)
    site.claim(6)
    site.check_rows(7)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_postgres_that_is_away_for_half_a_minute_delays_rows_alone(
    own_site: Site, own_server: PostgresServer, how: int
) -> None:
    """Answers are right throughout, and what was claimed meanwhile is in SQL afterwards, once."""
    prompts = itertools.count()
    own_site.claim(next(prompts))
    own_site.check_rows(1)
    own_server.stop(how)
    until_s = time.monotonic() + 30.0
    asked = 0
    while time.monotonic() < until_s:
        number = next(prompts)
        own_site.claim(number)
        for earlier in range(max(0, number - 3), number):
            own_site.check(earlier)
        asked += 1
    assert asked > 0
    own_server.start()
    number = next(prompts)
    own_site.claim(number)
    own_site.check_rows(number + 1)
