"""Rows of a namespace and a tenant go from the catalog's database, and others stay: on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio

from kvbm.catalog.sql.rows import ClaimRun, NamespaceRow, StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace
from kvbm.erasure.sql import claimed, erase_rows, named_tenants

ACME = Namespace(model="m", block_tokens=16, tenant="acme")
GLOBEX = Namespace(model="m", block_tokens=16, tenant="globex")
HASHES = bytes(range(1, 1 + 3 * HASH_BYTES))


def test_what_is_erased_is_gone_and_the_rest_stays(database_url: str) -> None:
    async def work() -> None:
        store = await SqlStore.open(database_url, 20.0)
        spaces = tuple(NamespaceRow(id=one.id, fields=one, first_seen_ns=1) for one in (ACME, GLOBEX))
        claims = tuple(
            ClaimRun(pool="p", namespace=one.id, hashes=HASHES, instance=InstanceId("a"), at_ns=1)
            for one in (ACME, GLOBEX)
        )
        assert await store.apply(
            StoreBatch(stream="s", previous=0, stream_sequence=1, namespaces=spaces, claims=claims)
        )
        first = HASHES[:HASH_BYTES]
        assert await claimed(store.engine, [ACME.id], None) == 3
        assert await claimed(store.engine, [ACME.id], lambda run: run if run == first else b"") == 1
        assert await named_tenants(store.engine) == []
        assert await erase_rows(store.engine, [ACME.id], ["acme"]) == 4
        assert await claimed(store.engine, [ACME.id], None) == 0
        assert await claimed(store.engine, [GLOBEX.id], None) == 3
        assert [row.id for row in await store.namespaces()] == [GLOBEX.id]
        assert await erase_rows(store.engine, [], []) == 0
        await store.close()

    asyncio.run(work())
