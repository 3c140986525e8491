"""The catalog's database in memory: batches by compare-and-swap, as `kvbm.catalog.sql.store.SqlStore` keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from kvbm.catalog.sql.rows import (
    AbsenceRow,
    EpochRow,
    ForgottenRow,
    InstancePosition,
    InstanceRow,
    NamespaceRow,
    StoreBatch,
)
from kvbm.catalog.sql.store import BatchOutcome, BatchResult, ClaimChunk
from kvbm.core.errors import CatalogError
from kvbm.core.ids import InstanceId, NamespaceId, split_hashes
from kvbm.streams.base import START, Mark
from tests.faults.simulator.kernel import World

_TABLES = (
    "places",
    "over",
    "instance_rows",
    "epoch_rows",
    "namespace_rows",
    "position_rows",
    "claim_rows",
    "absence_rows",
    "forgotten_rows",
)
_BACKUPS = 5


class SimStore:
    """Rows that survive every process. One for all catalogs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_down = False
        self.refused_rows = 0
        self.loses_replies = 0.0  # share of transactions that are kept although the caller hears of a failure
        self.places: dict[str, Mark] = {}
        self.over: dict[str, None] = {}  # streams that are counted under another name since
        self.instance_rows: dict[InstanceId, InstanceRow] = {}
        self.epoch_rows: dict[tuple[InstanceId, int], EpochRow] = {}
        self.namespace_rows: dict[NamespaceId, NamespaceRow] = {}
        self.position_rows: dict[InstanceId, InstancePosition] = {}
        self.claim_rows: dict[tuple[str, NamespaceId, bytes], InstanceId] = {}
        self.absence_rows: dict[InstanceId, AbsenceRow] = {}
        self.forgotten_rows: dict[InstanceId, ForgottenRow] = {}
        self.backups: list[dict[str, Any]] = [self._copy()]  # the first of an empty database

    def _copy(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in _TABLES}

    def back_up(self) -> None:
        """Keep a copy of all tables; of the copies, the first and the youngest."""
        self.backups.append(self._copy())
        del self.backups[1:-_BACKUPS]

    def restore(self, backup: dict[str, Any]) -> None:
        """The tables are those of a copy."""
        for name, rows in backup.items():
            setattr(self, name, dict(rows))

    async def close(self) -> None:
        return

    def _check(self) -> None:
        if self.is_down:
            raise CatalogError("the database does not answer (simulated)")

    def _hidden(self, batch: StoreBatch) -> set[InstanceId]:
        """The batch's instances that were forgotten after all that it has of them."""
        hidden = set()
        for name in {row.id for row in batch.instances} | {row.instance for row in (*batch.epochs, *batch.positions)}:
            mark = self.forgotten_rows.get(name)
            if mark is None or mark.stream != batch.stream:
                continue
            if batch.spoke.get(name, 0) > mark.sequence:
                del self.forgotten_rows[name]
            else:
                hidden.add(name)
        return hidden

    async def apply(self, batch: StoreBatch) -> BatchResult:
        self._check()
        assert 0 <= batch.previous < batch.stream_sequence
        place = self.places.get(batch.stream, START)
        if batch.stream in self.over:
            return BatchResult(BatchOutcome.OVER, *place)
        if place.sequence != batch.previous:
            if place.sequence >= batch.stream_sequence:
                return BatchResult(BatchOutcome.REPEATED, *place)
            return BatchResult(
                BatchOutcome.OVERTAKEN if place.sequence > batch.previous else BatchOutcome.MISSING, *place
            )
        if batch.stream not in self.places:
            whose = batch.stream.partition("@")[0]
            self.over |= dict.fromkeys(name for name in self.places if name.partition("@")[0] == whose)
        self.places[batch.stream] = Mark(batch.stream_sequence, batch.fingerprint)
        hidden = self._hidden(batch)
        for row in (row for row in batch.instances if row.id not in hidden):
            old = self.instance_rows.get(row.id)
            if old is None or row.epoch >= old.epoch or row.run not in ("", old.run):
                self.instance_rows[row.id] = row
        for epoch in (row for row in batch.epochs if row.instance not in hidden):
            known = self.epoch_rows.get((epoch.instance, epoch.epoch))
            if known is None or epoch.next_offset >= known.next_offset or epoch.run not in ("", known.run):
                self.epoch_rows[epoch.instance, epoch.epoch] = epoch
        for namespace in batch.namespaces:
            self.namespace_rows.setdefault(namespace.id, namespace)
        for position in (row for row in batch.positions if row.instance not in hidden):
            before = self.position_rows.get(position.instance)
            is_newer = before is None or (position.epoch, position.next_offset) > (before.epoch, before.next_offset)
            if is_newer or position.run not in ("", before.run):
                self.position_rows[position.instance] = position
        for run in batch.claims:
            for block in split_hashes(run.hashes):
                key = (run.pool, run.namespace, bytes(block))
                if run.withdrawn:
                    self.claim_rows.pop(key, None)
                else:
                    self.claim_rows.setdefault(key, run.instance)
        if self.loses_replies and self._world.rng.random() < self.loses_replies:
            raise CatalogError("the connection to the database was lost (simulated)")
        return BatchResult(BatchOutcome.APPLIED, batch.stream_sequence)

    async def forget(self, marks: Sequence[ForgottenRow], read: int) -> bool:
        self._check()
        stream = marks[0].stream
        if stream in self.over or self.places.get(stream, START).sequence > read:
            return False
        for mark in marks:
            for rows in (self.instance_rows, self.position_rows, self.absence_rows):
                rows.pop(mark.instance, None)  # type: ignore[attr-defined]
            for key in [key for key in self.epoch_rows if key[0] == mark.instance]:
                del self.epoch_rows[key]
            self.forgotten_rows[mark.instance] = mark
        if self.loses_replies and self._world.rng.random() < self.loses_replies:
            raise CatalogError("the connection to the database was lost (simulated)")
        return True

    async def forget_namespaces(
        self, stream: str, read: int, names: Collection[NamespaceId], followed: Collection[InstanceId]
    ) -> frozenset[NamespaceId] | None:
        self._check()
        if stream in self.over or self.places.get(stream, START).sequence > read:
            return None
        claimed = frozenset(names).intersection(namespace for _, namespace, _ in self.claim_rows)
        if self.instance_rows.keys() <= frozenset(followed):
            for name in frozenset(names) - claimed:
                self.namespace_rows.pop(name, None)
        if self.loses_replies and self._world.rng.random() < self.loses_replies:
            raise CatalogError("the connection to the database was lost (simulated)")
        return claimed

    async def drop_marks(self, stream: str, instances: Sequence[InstanceId]) -> None:
        self._check()
        for name, mark in list(self.forgotten_rows.items()):
            if mark.stream in self.over or (mark.stream == stream and name in instances):
                del self.forgotten_rows[name]

    async def note_absences(self, gone: Sequence[AbsenceRow], here: Sequence[InstanceId]) -> None:
        self._check()
        for name in here:
            self.absence_rows.pop(name, None)
        for row in gone:
            known = self.absence_rows.get(row.instance)
            if known is None or row.unheard_s > known.unheard_s:
                self.absence_rows[row.instance] = row

    async def forgotten(self, stream: str) -> list[ForgottenRow]:
        self._check()
        return [mark for _, mark in sorted(self.forgotten_rows.items()) if mark.stream == stream]

    async def absences(self) -> list[AbsenceRow]:
        self._check()
        return [row for _, row in sorted(self.absence_rows.items())]

    async def forget_usage(self, before_ms: int) -> int:
        self._check()
        return 0  # nothing is kept here that grows old

    async def instance_names(self, cluster: str | None) -> list[InstanceId]:
        self._check()
        return [name for name, row in sorted(self.instance_rows.items()) if cluster in (None, row.cluster)]

    async def position(self, stream: str) -> int:
        self._check()
        return self.places.get(stream, START).sequence

    async def positions(self) -> dict[str, Mark]:
        self._check()
        return dict(self.places)

    async def streams_over(self) -> set[str]:
        self._check()
        return set(self.over)

    async def instance_positions(self) -> dict[InstanceId, InstancePosition]:
        self._check()
        return dict(self.position_rows)

    async def instances(self) -> list[InstanceRow]:
        self._check()
        return [self.instance_rows[name] for name in sorted(self.instance_rows)]

    async def epochs(self, instance: InstanceId) -> list[EpochRow]:
        self._check()
        return [row for key, row in sorted(self.epoch_rows.items()) if key[0] == instance]

    async def namespaces(self) -> list[NamespaceRow]:
        self._check()
        return list(self.namespace_rows.values())

    async def claim_count(self, pool: str | None = None) -> int:
        self._check()
        return sum(pool is None or key[0] == pool for key in self.claim_rows)

    async def claims(self, pool: str | None = None, chunk_rows: int = 1 << 16) -> AsyncIterator[ClaimChunk]:
        self._check()
        by_pool: dict[tuple[str, NamespaceId], list[bytes]] = {}
        for key in sorted(self.claim_rows):
            if pool is None or key[0] == pool:
                by_pool.setdefault((key[0], key[1]), []).append(key[2])
        for (name, namespace), blocks in by_pool.items():
            yield ClaimChunk(name, namespace, b"".join(blocks))


class StoreClass:
    """Stands for the class `SqlStore`."""

    def __init__(self, store: SimStore) -> None:
        self._store = store

    async def open(self, url: str, *args: Any, **kwargs: Any) -> SimStore:
        self._store._check()
        return self._store
