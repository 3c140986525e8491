"""PostgreSQL as it is run: behind PgBouncer, which gives each transaction another connection, and after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from kvbm.catalog.sql.database import look
from kvbm.catalog.sql.rows import StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.errors import CatalogError
from kvbm.core.ids import NamespaceId
from kvbm.erasure.sql import erase_rows
from tests.extras import needed
from tests.servers import fresh_database, pgbouncer, postgres

asyncpg = needed("asyncpg", "catalog")

WAIT_S = 120.0
STREAMS = 6


def batch(stream: str, previous: int) -> StoreBatch:
    return StoreBatch(stream=stream, previous=previous, stream_sequence=previous + 1)


@pytest.fixture(scope="module")
def pooler(postgres_server: str) -> Iterator[str]:
    """A PgBouncer with two connections to the server, for any number of clients."""
    with pgbouncer(postgres_server) as url:
        yield url


@pytest.mark.objects
def test_many_catalogs_share_few_connections_of_a_pooler(pooler: str, postgres_server: str) -> None:
    name = asyncio.run(fresh_database(postgres_server)).rpartition("/")[2]
    url = f"{pooler.rpartition('/')[0]}/{name}"

    async def project(store: SqlStore, stream: str) -> None:
        for at in range(20):
            assert await store.apply(batch(stream, at))
            assert await store.position(stream) == at + 1

    async def run() -> None:
        stores = await asyncio.gather(*(SqlStore.open(url, WAIT_S) for _ in range(STREAMS)))
        erased = erase_rows(stores[0].engine, [NamespaceId(bytes(16))], ["nobody"])
        await asyncio.gather(erased, *(project(store, f"stream-{at}") for at, store in enumerate(stores)))
        assert {place.sequence for place in (await stores[0].positions()).values()} == {20}
        for store in stores:
            await store.close()
        view = await look(url, WAIT_S)
        assert (view.schema, view.unwritable) == (view.head, "")

    asyncio.run(run())


@pytest.mark.nightly
def test_after_a_failover_the_next_batch_is_on_the_new_primary() -> None:
    """Two servers, of which the one that takes no writes keeps its connections, as a demoted primary does."""

    async def set_read_only(server: str, on: bool) -> None:
        connection = await asyncpg.connect(server.replace("+asyncpg", ""), timeout=WAIT_S)
        said = "on" if on else "off"
        await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {said}")
        await connection.execute("SELECT pg_reload_conf()")
        while await connection.fetchval("SHOW default_transaction_read_only") != said:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # its files are read between two commands
        await connection.close()

    async def run(first: str, second: str) -> None:
        for server in (first, second):  # both have the schema, as a replica has
            await (await SqlStore.open(server, WAIT_S)).close()
        await set_read_only(second, True)
        hosts = ",".join(urlsplit(one).netloc.rpartition("@")[2] for one in (second, first))
        store = await SqlStore.open(f"postgresql://postgres@{hosts}/postgres", WAIT_S)
        assert await store.apply(batch("s", 0))
        await set_read_only(first, True)
        await set_read_only(second, False)
        with pytest.raises(CatalogError, match="read-only transaction"):
            await store.apply(batch("s", 1))
        assert await store.apply(batch("s", 0))  # of this one, which has no rows yet
        assert await store.position("s") == 1
        await store.close()

    with ExitStack() as opened:
        asyncio.run(run(opened.enter_context(postgres()), opened.enter_context(postgres())))
