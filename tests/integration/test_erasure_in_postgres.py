"""Which of PostgreSQL's tables an erasure writes anew, and what it does while others use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvbm.catalog.sql.rows import StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.catalog.sql.usage import UsageWanted
from kvbm.core.errors import CatalogError
from kvbm.core.events import UsageRecorded, UsageRow
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.core.usage import HOUR_MS, entries_of
from kvbm.erasure import sql
from kvbm.erasure.sql import erase_rows
from tests.extras import needed

asyncpg = needed("asyncpg", "catalog")

WAIT_S = 20.0
TABLES = ("namespaces", "tenants", "usage")


def batch(number: int, *tenants: str) -> StoreBatch:
    event = UsageRecorded(
        since_ms=0, until_ms=HOUR_MS, rows=tuple(UsageRow(one, saved_tokens=7) for one in sorted(tenants))
    )
    entries = entries_of(InstanceId("a"), Epoch(1), Offset(number), event)
    return StoreBatch(stream="s@1", previous=number, stream_sequence=number + 1, usages=tuple(entries))


async def files(store: SqlStore) -> dict[str, int]:
    """The number of each table's file."""
    async with store.engine.connect() as connection:
        asked = [f"pg_relation_filenode('{table}')" for table in TABLES]
        row = (await connection.exec_driver_sql(f"SELECT {', '.join(asked)}")).one()
        return {table: int(number) for table, number in zip(TABLES, row, strict=True)}


async def names_in_file(store: SqlStore, name: str) -> int:
    """How often the file of `usage` has a name."""
    async with store.engine.connect() as connection:
        alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await alone.exec_driver_sql("CHECKPOINT")
        asked = "SELECT pg_read_binary_file(pg_relation_filepath('usage'))"
        return bytes((await alone.exec_driver_sql(asked)).scalar_one()).count(name.encode())


async def written_anew(store: SqlStore, before: dict[str, int]) -> set[str]:
    return {table for table, number in (await files(store)).items() if number != before[table]}


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(url, WAIT_S)
    try:
        yield store
    finally:
        await store.close()


def test_only_tables_of_which_rows_were_deleted_are_written_anew(postgres_url: str) -> None:
    async def work() -> None:
        async with opened(postgres_url) as store:
            assert await store.apply(batch(0, "initech", "globex"))
            async with store.engine.begin() as connection:
                await connection.exec_driver_sql("INSERT INTO tenants VALUES ('hooli', 1)")
            before = await files(store)
            await erase_rows(store.engine, [], [])
            await erase_rows(store.engine, [], ["nobody"])
            assert await written_anew(store, before) == set()
            await erase_rows(store.engine, [], ["hooli"])
            assert await written_anew(store, before) == {"tenants"}
            await erase_rows(store.engine, [], ["initech"])
            assert await written_anew(store, before) == {"tenants", "usage"}
            assert await names_in_file(store, "initech") == 0 < await names_in_file(store, "globex")
            before = await files(store)
            await erase_rows(store.engine, [], [])
            assert await written_anew(store, before) == set()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        ("BEGIN; SELECT FROM usage", "usage is in use"),
        ("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM positions", "from before the erasure is open"),
    ],
    ids=["who reads the table", "who may read what was deleted"],
)
def test_an_erasure_keeps_nobody_waiting_behind_a_reader_and_goes_on_once_that_has_ended(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, begin: str, why: str
) -> None:
    monkeypatch.setattr(sql, "_TRIES_S", 0.3)

    async def work() -> None:
        async with opened(postgres_url) as store:
            assert await store.apply(batch(0, "initech", "globex"))
            before = await files(store)
            reader = await asyncpg.connect(postgres_url.replace("+asyncpg", ""), timeout=WAIT_S)
            try:
                await reader.execute(begin)
                with pytest.raises(CatalogError, match=why):
                    await erase_rows(store.engine, [], ["initech"])
                erasing = asyncio.create_task(erase_rows(store.engine, [], []))
                for number in range(1, 5):
                    assert await store.apply(batch(number, "globex"))
                with pytest.raises(CatalogError, match=why):
                    await erasing
                hours = (await store.usage(UsageWanted(0, HOUR_MS))).hours
                assert [(hour.tenant, hour.saved_tokens) for hour in hours] == [("globex", 5 * 7)]
                assert await written_anew(store, before) == set()
            finally:
                await reader.close()
            await erase_rows(store.engine, [], [])
            assert await written_anew(store, before) == {"usage"}
            assert await names_in_file(store, "initech") == 0 < await names_in_file(store, "globex")

    asyncio.run(work())
