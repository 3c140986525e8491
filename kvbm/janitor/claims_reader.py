"""What SQL knows of a pool's claims, for a janitor that has no event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvbm.catalog.sql.rows import NamespaceRow
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Reach
from kvbm.janitor.effects import BlockRun, ClaimColumns, KnownClaims
from kvbm.streams.base import ORIGIN, Position


class ClaimsReader:
    """The claims of one pool, which `use` names.

    Every method raises CatalogError: the database does not answer, or refuses.
    """

    def __init__(self, url: str | Path, pool: str = "") -> None:
        """Open the catalog's database. Raises CatalogError, MissingExtraError: as `SqlStore.open`."""
        self._pool = pool
        self._runner = asyncio.Runner()
        try:
            self._store = self._runner.run(SqlStore.open(url))
        except BaseException:
            self._runner.close()
            raise

    def pools(self) -> set[str]:
        """The names of all pools of cluster reach that instances have declared, or that blocks are claimed for."""
        rows = self._runner.run(self._store.instances())
        claimed = self._runner.run(self._store.claimed_pools())  # whoever declared them may be forgotten
        return {pool.name for row in rows for pool in row.pools if pool.reach == Reach.CLUSTER} | claimed

    def use(self, pool: str) -> None:
        """Read the claims of this pool from now on."""
        self._pool = pool

    def claims(self) -> KnownClaims:
        """All claims, a namespace's together."""
        return self._runner.run(self._claims())

    def namespaces(self) -> list[NamespaceRow]:
        """Those whose fields an instance has told."""
        return self._runner.run(self._store.namespaces())

    def streams(self) -> list[str]:
        """The names of the streams it was made from: another cluster's are others, for they tell when a stream was
        made.
        """
        return self._runner.run(self._store.streams())

    def last(self, runs: Sequence[BlockRun]) -> list[int]:
        """When a block of each run was last claimed; 0 where none is."""
        return self._runner.run(self._last(runs))

    def position(self, instance: InstanceId) -> Position:
        """Up to where SQL has the events of an instance."""
        positions = self._runner.run(self._store.instance_positions())
        found = positions.get(instance)
        return ORIGIN if found is None else Position(Epoch(found.epoch), Offset(found.next_offset))

    def close(self) -> None:
        """Give the connections back."""
        self._runner.run(self._store.close())
        self._runner.close()

    async def _claims(self) -> KnownClaims:
        rows = await self._store.namespaces()
        tenants = {row.fields.id: row.fields.tenant for row in rows}
        hashes: dict[NamespaceId, list[bytes]] = {}
        times: dict[NamespaceId, list[np.ndarray]] = {}
        async for chunk in self._store.claim_times(self._pool):
            hashes.setdefault(chunk.namespace, []).append(chunk.hashes)
            times.setdefault(chunk.namespace, []).append(np.array(chunk.last_ns, dtype=np.int64))
        columns = [
            ClaimColumns(namespace, b"".join(parts), np.concatenate(times[namespace]), tenants.get(namespace, ""))
            for namespace, parts in hashes.items()
        ]
        return KnownClaims(columns, await self._store.tenant_quotas())

    async def _last(self, runs: Sequence[BlockRun]) -> list[int]:
        asked: dict[NamespaceId, dict[bytes, None]] = {}
        for namespace, hashes in runs:
            asked.setdefault(namespace, {}).update(dict.fromkeys(_split(hashes)))
        known = {
            namespace: await self._store.last_claimed(self._pool, namespace, b"".join(blocks))
            for namespace, blocks in asked.items()
        }
        return [max((known[run.namespace].get(block, 0) for block in _split(run.hashes)), default=0) for run in runs]


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
