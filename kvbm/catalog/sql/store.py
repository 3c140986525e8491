"""The catalog's database: rows of what was read, one transaction a batch.

A batch and the stream position it reaches are stored together or not at all, so applying one twice is applying it
once. Its first statement moves the position's row from `previous` to `stream_sequence`: the row's lock lets one replica
at a time write, and a replica whose `previous` no longer holds learns that and writes nothing.

A stream that was replaced, or has lost its end, is counted under another name. The first batch under that name ends
those before it: a replica that has not noticed yet must not write older rows over newer ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from enum import Enum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from kvbm.core.errors import ArgumentError, LayoutError, MissingExtraError
from kvbm.core.events import PoolStated
from kvbm.core.ids import (
    HASH_BYTES,
    InstanceId,
    Namespace,
    NamespaceId,
    Reach,
    Tier,
    split_hashes,
)
from kvbm.core.parts import ALL_PARTS, part_of

try:
    from sqlalchemy import Executable, Table, and_, delete, exists, func, or_, select, tuple_, update
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.exc import StatementError
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
except ImportError:
    raise MissingExtraError("the catalog's database library (sqlalchemy[asyncio], alembic)", "catalog") from None

from kvbm.catalog.sql import tables
from kvbm.catalog.sql.claims import write_claims
from kvbm.catalog.sql.database import database_errors, open_database, shown
from kvbm.catalog.sql.net_claims import NetClaims, net_claims
from kvbm.catalog.sql.refusals import RefusedRow, is_refused_data, write_leaving_out
from kvbm.catalog.sql.rows import (
    AbsenceRow,
    EpochRow,
    ForgottenRow,
    InstancePosition,
    InstanceRow,
    InstanceStatus,
    NamespaceRow,
    StoreBatch,
)
from kvbm.catalog.sql.usage import UsagePage, UsageWanted, delete_before, read_gaps, read_page, usage_values
from kvbm.catalog.threads import in_thread
from kvbm.core.usage import UsageGap
from kvbm.safe_log import RateLimitedLog, SafeLog
from kvbm.streams.base import START, Mark

log = SafeLog()

CHUNK_ROWS = 1 << 16  # hashes of one chunk that `claims` yields: 1 MiB
_WRITE_ROWS = 5000  # rows handed to a driver at once
_ASKED_ROWS = 1000  # keys named in one question
_END_S = 5.0  # for a batch under way when whoever stores it is stopped
_MOST_LINES = 20  # of one event in ten seconds
_SHOWN = 200  # characters of a row's key, and of the database's words, in a log
R = TypeVar("R")


class BatchOutcome(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    REPEATED = "repeated"  # the position is at or past the batch's end: everything that comes from messages is there
    OVERTAKEN = "overtaken"  # another replica stands within the batch: read the position, cut anew from there
    OVER = "over"  # another name of this stream's counts since: find the name, and project anew
    MISSING = "missing"  # the position is before `previous`: the database was restored or replaced; project from there


class BatchResult(NamedTuple):
    """A batch's outcome and the stream's stored position, with the message there. True when this call wrote it."""

    outcome: BatchOutcome
    position: int
    fingerprint: int | None = None

    def __bool__(self) -> bool:
        return self.outcome is BatchOutcome.APPLIED


class ClaimChunk(NamedTuple):
    """Some claimed blocks of one pool and namespace; `hashes` is packed and ascending."""

    pool: str
    namespace: NamespaceId
    hashes: bytes


class ClaimTimes(NamedTuple):
    """Some claimed blocks of one pool and namespace;

    `hashes` is packed and ascending, `last_ns` when each was last claimed.
    """

    namespace: NamespaceId
    hashes: bytes
    last_ns: list[int]


class SqlStore:
    """The catalog's database. Use it from one event loop; methods may run concurrently.

    Every method raises CatalogError when the database does not answer or refuses; a retry helps once it is back.

    Attributes:
        refused_rows: of batches, left out because the database refuses what they hold.
    """

    def __init__(self, engine: AsyncEngine, used_s: float = 0.0, parts: tuple[int, ...] = ALL_PARTS) -> None:
        """Prefer `SqlStore.open`: the engine must stand on a migrated database."""
        self._engine, self._parts = engine, parts
        self._used_ns = int(used_s * 1_000_000_000)
        self.refused_rows = 0
        self._limited_log = RateLimitedLog(most=_MOST_LINES)  # an instance can have each batch refused in part
        self._where = shown(engine.url)
        self._upserts = _upserts(engine.dialect.name == "sqlite")

    @classmethod
    async def open(
        cls, url: str | Path, connect_timeout_s: float = 5.0, used_s: float = 0.0, parts: tuple[int, ...] = ALL_PARTS
    ) -> Self:
        """The store at a URL, its schema brought up to date.

        Args:
            url: sqlite:///path or postgresql://user:password@host:port/database, with or without kvbm's drivers; a path
                is an SQLite file's.
            used_s: a claim that is there already is written again where it is newer by more than this.
            parts: of other instances than those in these nothing is read; catalogs of other parts may write them.
        Raises:
            CatalogError: the URL is malformed, nothing answers within `connect_timeout_s`, or its schema is newer than
                this kvbm's.
            MissingExtraError: the driver is not installed.
        """
        return cls(await open_database(url, connect_timeout_s), used_s, parts)

    @property
    def engine(self) -> AsyncEngine:
        """Its connections."""
        return self._engine

    async def close(self) -> None:
        """Give the connections back."""
        await self._engine.dispose()

    # -- writing ------------------------------------------------------------------------------------------------------

    async def apply(self, batch: StoreBatch) -> BatchResult:
        """Store a batch and its position in one transaction, unless the position is another.

        Rows that the database refuses for what they hold are left out, logged and counted.

        Raises: LayoutError: `stream_sequence` is not above `previous`, or a run of hashes is no multiple of 16 bytes.
        """
        if not 0 <= batch.previous < batch.stream_sequence:
            raise LayoutError(
                f"a batch from position {batch.previous} to {batch.stream_sequence} does not move forward"
            )
        return await _to_its_end(self._write(batch))

    async def _write(self, batch: StoreBatch) -> BatchResult:
        claims = await in_thread(net_claims, batch.claims) if batch.claims else []
        with database_errors(f"{self._where} does not take the batch up to {batch.stream_sequence} of {batch.stream}"):
            try:
                return await self._write_rows(batch, claims)
            except (StatementError, OverflowError, UnicodeError) as error:
                if not is_refused_data(error):
                    raise
            refused: list[RefusedRow] = []
            result = await self._write_rows(batch, claims, refused)
        self._tell_refused(batch, refused)
        return result

    async def _write_rows(
        self, batch: StoreBatch, claims: Sequence[NetClaims], refused: list[RefusedRow] | None = None
    ) -> BatchResult:
        """One transaction. Raises what the database says.

        Args:
            refused: is filled with the rows that are left out; None: one that is refused ends the transaction.
        """
        async with self._engine.begin() as connection:
            if not await _move_position(connection, batch, self._upserts["first_position"]):
                return await _not_applied(connection, batch)
            hidden = await _hidden(connection, batch)
            instances = [_instance_values(row) for row in batch.instances if row.id not in hidden]
            epochs = [_epoch_values(row) for row in batch.epochs if row.instance not in hidden]
            namespaces = map(_namespace_values, reversed(batch.namespaces))
            positions = [msgspec.structs.asdict(row) for row in batch.positions if row.instance not in hidden]
            for table, rows in (
                ("instances", _last(instances, "id")),
                ("epochs", _last(epochs, "instance", "epoch")),
                ("namespaces", _last(namespaces, "id")),
                ("instance_positions", _last(positions, "instance")),
                (
                    "usage",
                    _last(map(usage_values, batch.usages), "instance", "epoch", "event_offset", "tenant", "since_ms"),
                ),
            ):
                if refused is None:
                    await self._upsert(connection, table, rows)
                else:
                    left = await write_leaving_out(connection, rows, partial(self._upsert, connection, table))
                    refused += [RefusedRow(table, str(next(iter(row.values()))), 1, str(why)) for row, why in left]
            if refused is None:
                await write_claims(connection, claims, self._used_ns)
            else:
                lost = await write_leaving_out(connection, claims, partial(self._write_claims, connection))
                refused += [RefusedRow("object_claims", net.pool, len(net.claimed), str(why)) for net, why in lost]
        return BatchResult(BatchOutcome.APPLIED, batch.stream_sequence, batch.fingerprint)

    async def _write_claims(self, connection: AsyncConnection, claims: Sequence[NetClaims]) -> None:
        await write_claims(connection, claims, self._used_ns)

    def _tell_refused(self, batch: StoreBatch, refused: Sequence[RefusedRow]) -> None:
        """One warning for all that a batch had."""
        if refused:
            self.refused_rows += sum(row.rows for row in refused)
            first = refused[0]
            self._limited_log.warn(
                "rows.refused",
                stream=batch.stream,
                position=batch.stream_sequence,
                rows=sum(row.rows for row in refused),
                table=first.table,
                key=first.key[:_SHOWN],
                why=first.why.partition("\n")[0][:_SHOWN],
                what_to_do="find who writes that: another program, or an instance that lies; everything else is stored",
            )

    async def forget(self, marks: Sequence[ForgottenRow], read: int) -> bool:
        """Remove every row of some instances but their claims, and keep their marks, in one transaction.

        Args:
            marks: of one stream, at least one.
            read: whoever calls has read the stream up to here. Where SQL is ahead of that, another catalog may know
                more.
        Returns: False when nothing was done: SQL is ahead, or counts the stream under another name.
        """
        return await _to_its_end(self._forget(marks, read))

    async def _forget(self, marks: Sequence[ForgottenRow], read: int) -> bool:
        stream, names = marks[0].stream, [mark.instance for mark in marks]
        with database_errors(f"{self._where} does not forget {len(names)} instances"):
            async with self._engine.begin() as connection:
                if not await _hold_position(connection, stream, read):
                    return False
                for column in (
                    tables.instances.c.id,
                    tables.epochs.c.instance,
                    tables.instance_positions.c.instance,
                    tables.absences.c.instance,
                ):
                    for at in range(0, len(names), _ASKED_ROWS):
                        await connection.execute(delete(column.table).where(column.in_(names[at : at + _ASKED_ROWS])))
                await self._upsert(connection, "forgotten", _last(map(_forgotten_values, marks), "instance"))
        return True

    async def forget_namespaces(
        self, stream: str, read: int, names: Collection[NamespaceId], followed: Collection[InstanceId]
    ) -> frozenset[NamespaceId] | None:
        """Remove the rows of namespaces that nobody declares any more, but of those of which blocks are claimed.

        Args:
            stream, read: as in `forget`.
            followed: the instances of which whoever calls knows what they declare. Where SQL has others, it keeps the
                rows.
        Returns: those of which blocks are claimed. None where SQL is ahead of `read`, or counts the stream under
            another name: then nothing was done.
        """
        return await _to_its_end(self._forget_namespaces(stream, read, sorted(names), frozenset(followed)))

    async def _forget_namespaces(
        self, stream: str, read: int, names: Sequence[NamespaceId], followed: frozenset[InstanceId]
    ) -> frozenset[NamespaceId] | None:
        table, claims = tables.namespaces, tables.object_claims
        pools = sorted(await self.claimed_pools())
        claimed: set[NamespaceId] = set()
        with database_errors(f"{self._where} does not forget {len(names)} namespaces"):
            async with self._engine.begin() as connection:
                if not await _hold_position(connection, stream, read):
                    return None
                others = not followed.issuperset((await connection.execute(select(tables.instances.c.id))).scalars())
                has_claims = exists().where(claims.c.pool.in_(pools), claims.c.namespace == table.c.id)
                for at in range(0, len(names), _ASKED_ROWS):
                    is_asked = table.c.id.in_(names[at : at + _ASKED_ROWS])
                    found = (await connection.execute(select(table.c.id).where(is_asked, has_claims))).scalars()
                    claimed.update(NamespaceId(bytes(name)) for name in found)
                    if not others:
                        await connection.execute(delete(table).where(is_asked, ~has_claims))
        return frozenset(claimed)

    async def drop_marks(self, stream: str, instances: Sequence[InstanceId]) -> None:
        """Remove marks: nothing can bring these instances back any more. Those of streams that are over go as well."""
        table, places = tables.forgotten, tables.positions
        over = select(places.c.stream).where(places.c.is_over)
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.begin() as connection:
                await connection.execute(delete(table).where(table.c.stream.in_(over)))
                for at in range(0, len(instances), _ASKED_ROWS):
                    names = instances[at : at + _ASKED_ROWS]
                    await connection.execute(delete(table).where(table.c.stream == stream, table.c.instance.in_(names)))

    async def note_absences(self, gone: Sequence[AbsenceRow], here: Sequence[InstanceId]) -> None:
        """Keep for how long some are gone, never less than is stored, unless they were here since, or were forgotten
        meanwhile.
        """
        column = tables.absences.c.instance
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.begin() as connection:
                for at in range(0, len(here), _ASKED_ROWS):
                    await connection.execute(delete(column.table).where(column.in_(here[at : at + _ASKED_ROWS])))
                await self._upsert(connection, "absences", _last(map(msgspec.structs.asdict, gone), "instance"))
                # another catalog may have forgotten one since it was counted: nobody would ever remove its row
                await connection.execute(delete(column.table).where(column.in_(select(tables.forgotten.c.instance))))

    async def _upsert(self, connection: AsyncConnection, table: str, rows: Sequence[dict[str, Any]]) -> None:
        await _in_chunks(connection, self._upserts[table], rows)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def position(self, stream: str) -> int:
        """The last sequence of the stream that was applied, 0 when none was."""
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.connect() as connection:
                return (await _position(connection, stream)).sequence

    async def positions(self) -> dict[str, Mark]:
        """The last place of every stream that was applied, and the message it was."""
        table = tables.positions
        return {
            row["stream"]: Mark(row["stream_sequence"], row["fingerprint"]) for row in await self._read(select(table))
        }

    async def streams_over(self) -> set[str]:
        """The names of those that are counted under another name since."""
        table = tables.positions
        return {row["stream"] for row in await self._read(select(table.c.stream).where(table.c.is_over))}

    async def streams(self) -> list[str]:
        """The names of all streams that were applied, in order."""
        table = tables.positions
        return [row["stream"] for row in await self._read(select(table.c.stream).order_by(table.c.stream))]

    async def instance_positions(self) -> dict[InstanceId, InstancePosition]:
        """How far each instance's stream has been applied."""
        rows = await self._read(select(tables.instance_positions))
        return {row["instance"]: InstancePosition(**row) for row in rows if self._reads(row["instance"])}

    async def instances(self, of_all_parts: bool = False) -> list[InstanceRow]:
        """Every instance ever seen, by id.

        Args:
            of_all_parts: also those of which nothing is read here, where catalogs of other parts write them.
        """
        table = tables.instances
        rows = await self._read(select(table).order_by(table.c.id))
        return [_instance_row(row) for row in rows if of_all_parts or self._reads(row["id"])]

    def _reads(self, instance: InstanceId) -> bool:
        return self._parts == ALL_PARTS or part_of(instance) in self._parts

    async def forgotten(self, stream: str) -> list[ForgottenRow]:
        """The marks of instances that were forgotten, by name."""
        table = tables.forgotten
        rows = await self._read(select(table).where(table.c.stream == stream).order_by(table.c.instance))
        return [_forgotten_row(row) for row in rows]

    async def absences(self) -> list[AbsenceRow]:
        """For how long instances are gone, by name; none of one whose absence was not noted yet."""
        table = tables.absences
        return [AbsenceRow(**row) for row in await self._read(select(table).order_by(table.c.instance))]

    async def instance_names(self, cluster: str | None) -> list[InstanceId]:
        """Every instance that SQL knows and this store reads, of one cluster or of all, by name."""
        table = tables.instances
        asked = select(table.c.id).order_by(table.c.id)
        rows = await self._read(asked if cluster is None else asked.where(table.c.cluster == cluster))
        return [row["id"] for row in rows if self._reads(row["id"])]

    async def epochs(self, instance: InstanceId) -> list[EpochRow]:
        """The epochs of an instance, oldest first."""
        table = tables.epochs
        rows = await self._read(select(table).where(table.c.instance == instance).order_by(table.c.epoch))
        return [EpochRow(**row) for row in rows]

    async def namespaces(self) -> list[NamespaceRow]:
        """The namespaces whose fields are known, oldest first."""
        table = tables.namespaces
        rows = await self._read(select(table).order_by(table.c.first_seen_ns, table.c.id))
        return [found for row in rows if (found := _namespace_row(row)) is not None]

    async def claimed_namespaces(self) -> set[NamespaceId]:
        """The namespaces that blocks are claimed of, in any pool."""
        column = tables.object_claims.c.namespace
        found = await self._read(select(column).distinct())
        return {NamespaceId(bytes(row["namespace"])) for row in found}

    async def claimed_pools(self) -> set[str]:
        """The pools that blocks are claimed for."""
        column = tables.object_claims.c.pool
        found: list[str] = []
        while True:  # by the first part of the key, from one to the next
            asked = select(func.min(column).label("pool"))
            rows = await self._read(asked.where(column > found[-1]) if found else asked)
            if rows[0]["pool"] is None:
                return set(found)
            found.append(rows[0]["pool"])

    async def claim_count(self, pool: str | None = None) -> int:
        """How many blocks are claimed, in one pool or in all."""
        table = tables.object_claims
        statement = select(func.count().label("count")).select_from(table)
        rows = await self._read(statement if pool is None else statement.where(table.c.pool == pool))
        return int(rows[0]["count"])

    async def claims(self, pool: str | None = None, chunk_rows: int = CHUNK_ROWS) -> AsyncIterator[ClaimChunk]:
        """The claimed blocks, of one pool or of all, in packed chunks.

        Pages by key and holds no transaction between chunks. To load an index, read `position` *before* and fold the
        stream from there: a claim that changed meanwhile comes again from the stream.
        """
        key = list(tables.object_claims.primary_key)
        statement = select(*key).order_by(*key).limit(chunk_rows)
        if pool is not None:
            statement = statement.where(tables.object_claims.c.pool == pool)
        last: tuple[str, bytes, bytes] | None = None
        while True:
            page = statement if last is None else statement.where(tuple_(*key) > tuple_(*last))
            with database_errors(f"{self._where} does not answer"):
                async with self._engine.connect() as connection:
                    rows = [(str(row[0]), bytes(row[1]), bytes(row[2])) for row in await connection.execute(page)]
            for chunk in _pack(rows):
                yield chunk
            if len(rows) < chunk_rows:
                return
            last = rows[-1]

    async def claim_times(self, pool: str, chunk_rows: int = CHUNK_ROWS) -> AsyncIterator[ClaimTimes]:
        """The claims of one pool with their times, by namespace and hash. Pages by key, as `claims`."""
        table = tables.object_claims
        key = [table.c.namespace, table.c.hash]
        statement = select(*key, table.c.last_claimed_ns).where(table.c.pool == pool).order_by(*key).limit(chunk_rows)
        last: tuple[bytes, bytes] | None = None
        while True:
            page = statement if last is None else statement.where(tuple_(*key) > tuple_(*last))
            with database_errors(f"{self._where} does not answer"):
                async with self._engine.connect() as connection:
                    rows = [(bytes(row[0]), bytes(row[1]), int(row[2])) for row in await connection.execute(page)]
            for namespace, group in groupby(rows, key=lambda row: row[0]):
                entries = list(group)
                hashes = b"".join(block for _, block, _ in entries)
                yield ClaimTimes(NamespaceId(namespace), hashes, [last_ns for _, _, last_ns in entries])
            if len(rows) < chunk_rows:
                return
            last = rows[-1][:2]

    async def last_claimed(self, pool: str, namespace: NamespaceId, hashes: bytes) -> dict[bytes, int]:
        """Those of some blocks that are claimed, and when they were last."""
        table = tables.object_claims
        found: dict[bytes, int] = {}
        for at in range(0, len(hashes), _ASKED_ROWS * HASH_BYTES):
            blocks = split_hashes(hashes[at : at + _ASKED_ROWS * HASH_BYTES])
            statement = select(table.c.hash, table.c.last_claimed_ns).where(
                table.c.pool == pool, table.c.namespace == namespace, table.c.hash.in_(blocks)
            )
            found |= {bytes(row["hash"]): int(row["last_claimed_ns"]) for row in await self._read(statement)}
        return found

    async def tenant_quotas(self) -> dict[str, int]:
        """Bytes each tenant may have in a pool of cluster reach; who is not named has no quota."""
        table = tables.tenants
        rows = await self._read(select(table).where(table.c.quota_bytes.is_not(None)))
        return {row["name"]: int(row["quota_bytes"]) for row in rows}

    async def usage(self, wanted: UsageWanted) -> UsagePage:
        """What tenants have used: the first hours of what is wanted."""
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.connect() as connection:
                return await read_page(connection, wanted)

    async def usage_gaps(self, wanted: UsageWanted) -> list[UsageGap]:
        """Of what times instances have recorded no usage."""
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.connect() as connection:
                return await read_gaps(connection, wanted)

    async def forget_usage(self, before_ms: int) -> int:
        """Remove some of what was used before a time; how many rows, 0 once there are none."""
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.begin() as connection:
                return await delete_before(connection, before_ms)

    async def _read(self, statement: Executable) -> list[dict[str, Any]]:
        with database_errors(f"{self._where} does not answer"):
            async with self._engine.connect() as connection:
                return [dict(row) for row in (await connection.execute(statement)).mappings()]


# -- the position -----------------------------------------------------------------------------------------------------


async def _to_its_end(transaction: Coroutine[Any, Any, R]) -> R:
    """The outcome of a transaction, which goes on where whoever waits for it is cancelled, and is waited for a little
    then.

    A connection of SQLite that is given up in the middle of a transaction keeps the database locked until somebody
    collects it.
    """
    task = asyncio.ensure_future(transaction)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        ended, _ = await asyncio.wait([task], timeout=_END_S)
        for one in ended:
            if not one.cancelled():
                one.exception()  # nobody asks for it any more
        raise


async def _position(connection: AsyncConnection, stream: str) -> Mark:
    table = tables.positions
    asked = select(table.c.stream_sequence, table.c.fingerprint).where(table.c.stream == stream)
    stored = (await connection.execute(asked)).one_or_none()
    return START if stored is None else Mark(*stored)


async def _move_position(connection: AsyncConnection, batch: StoreBatch, first: Executable) -> bool:
    """Compare and swap. Waits for a replica that is writing; keeps the row locked until this transaction ends."""
    table = tables.positions
    moved = await connection.execute(
        update(table)
        .where(table.c.stream == batch.stream, table.c.stream_sequence == batch.previous, table.c.is_over.is_(False))
        .values(stream_sequence=batch.stream_sequence, fingerprint=batch.fingerprint)
    )
    if moved.rowcount == 1:
        return True
    if batch.previous:
        return False
    values = {"stream": batch.stream, "stream_sequence": batch.stream_sequence, "fingerprint": batch.fingerprint}
    made = await connection.execute(first, values)
    if made.rowcount != 1:
        return False
    whose = f"{batch.stream.partition('@')[0]}@"
    is_before = and_(func.substr(table.c.stream, 1, len(whose)) == whose, table.c.stream != batch.stream)
    await connection.execute(update(table).where(is_before).values(is_over=True))
    return True


async def _hold_position(connection: AsyncConnection, stream: str, read: int) -> bool:
    """Keep the position's row locked until this transaction ends.

    False: SQL is ahead of `read`, or the stream is over.
    """
    table = tables.positions
    held = await connection.execute(
        update(table)
        .where(table.c.stream == stream, table.c.stream_sequence <= read, table.c.is_over.is_(False))
        .values(stream_sequence=table.c.stream_sequence)
    )
    if held.rowcount == 1:
        return True
    return (await connection.execute(select(table.c.stream).where(table.c.stream == stream))).first() is None


async def _hidden(connection: AsyncConnection, batch: StoreBatch) -> set[InstanceId]:
    """The batch's instances that were forgotten after all that it has of them.

    The marks of others end: they have spoken since.
    """
    table = tables.forgotten
    names = sorted(
        {row.id for row in batch.instances}
        | {row.instance for row in batch.epochs}
        | {row.instance for row in batch.positions}
    )
    hidden: set[InstanceId] = set()
    known: list[InstanceId] = []
    for at in range(0, len(names), _ASKED_ROWS):
        asked = select(table.c.instance, table.c.sequence).where(
            table.c.stream == batch.stream, table.c.instance.in_(names[at : at + _ASKED_ROWS])
        )
        for instance, sequence in await connection.execute(asked):
            (known.append if batch.spoke.get(instance, 0) > sequence else hidden.add)(instance)
    if known:
        await connection.execute(delete(table).where(table.c.stream == batch.stream, table.c.instance.in_(known)))
    return hidden


async def _not_applied(connection: AsyncConnection, batch: StoreBatch) -> BatchResult:
    table = tables.positions
    asked = select(table.c.is_over).where(table.c.stream == batch.stream)
    stored = await _position(connection, batch.stream)
    if (await connection.execute(asked)).scalar():
        return BatchResult(BatchOutcome.OVER, *stored)
    if stored.sequence >= batch.stream_sequence:
        return BatchResult(BatchOutcome.REPEATED, *stored)
    return BatchResult(BatchOutcome.OVERTAKEN if stored.sequence > batch.previous else BatchOutcome.MISSING, *stored)


# -- statements -------------------------------------------------------------------------------------------------------


def _upserts(is_sqlite: bool) -> dict[str, Executable]:
    """One statement a table: insert, or bring the stored row up to date, never back."""
    largest = func.max if is_sqlite else func.greatest
    smallest = func.min if is_sqlite else func.least

    def into(table: Table) -> Any:
        return sqlite.insert(table) if is_sqlite else postgresql.insert(table)

    def upsert(table: Table, **merged: Any) -> Any:
        statement = into(table)
        keys = list(table.primary_key)
        fresh = [column.name for column in table.c if column not in keys and column.name not in merged]
        changes = {name: statement.excluded[name] for name in fresh}
        changes |= {name: merge(table.c[name], statement.excluded[name]) for name, merge in merged.items()}
        return statement, {"index_elements": keys, "set_": changes}

    instance, epoch = tables.instances, tables.epochs
    instance_insert, instance_changes = upsert(instance, first_seen_ns=smallest, last_frame_ns=largest)
    epoch_insert, epoch_changes = upsert(epoch, started_ns=smallest)
    position = tables.instance_positions
    position_insert, position_changes = upsert(position)
    newer = tuple_(position_insert.excluded.epoch, position_insert.excluded.next_offset) > tuple_(
        position.c.epoch, position.c.next_offset
    )

    absence_insert, absence_changes = upsert(tables.absences, unheard_s=largest, sequence=largest)
    forgotten_insert, forgotten_changes = upsert(tables.forgotten)

    def is_other_life(insert: Any, table: Table) -> Any:
        return and_(insert.excluded.run != "", insert.excluded.run != table.c.run)

    return {
        "instances": instance_insert.on_conflict_do_update(
            **instance_changes,
            where=or_(instance_insert.excluded.epoch >= instance.c.epoch, is_other_life(instance_insert, instance)),
        ),
        "epochs": epoch_insert.on_conflict_do_update(
            **epoch_changes,
            where=or_(epoch_insert.excluded.next_offset >= epoch.c.next_offset, is_other_life(epoch_insert, epoch)),
        ),
        "namespaces": into(tables.namespaces).on_conflict_do_nothing(),
        "usage": into(tables.usage).on_conflict_do_nothing(),
        "instance_positions": position_insert.on_conflict_do_update(
            **position_changes, where=or_(newer, is_other_life(position_insert, position))
        ),
        "absences": absence_insert.on_conflict_do_update(**absence_changes),
        "forgotten": forgotten_insert.on_conflict_do_update(**forgotten_changes),
        "first_position": into(tables.positions).on_conflict_do_nothing(),
    }


async def _in_chunks(connection: AsyncConnection, statement: Executable, rows: Sequence[dict[str, Any]]) -> None:
    """Run a statement once a row, by the driver's own loop: no limit on parameters, one prepared statement."""
    for at in range(0, len(rows), _WRITE_ROWS):
        await connection.execute(statement, list(rows[at : at + _WRITE_ROWS]))


def _last(rows: Any, *keys: str) -> list[dict[str, Any]]:
    """The last row of each key, ordered by key so that two streams' batches never wait for each other in a circle."""
    by_key = {tuple(row[key] for key in keys): row for row in rows}
    return [by_key[key] for key in sorted(by_key)]


# -- rows ↔ values ----------------------------------------------------------------------------------------------------


def _pack(rows: Sequence[tuple[str, bytes, bytes]]) -> list[ClaimChunk]:
    packed: dict[tuple[str, bytes], list[bytes]] = {}
    for pool, namespace, block in rows:
        packed.setdefault((pool, namespace), []).append(block)
    return [ClaimChunk(pool, NamespaceId(namespace), b"".join(blocks)) for (pool, namespace), blocks in packed.items()]


def _instance_values(row: InstanceRow) -> dict[str, Any]:
    values = msgspec.structs.asdict(row)
    values["pools"] = [
        msgspec.structs.asdict(pool) | {"tier": pool.tier.name, "reach": pool.reach.name} for pool in row.pools
    ]
    return values | {"topology": list(row.topology), "state": row.state.value}


def _instance_row(values: dict[str, Any]) -> InstanceRow:
    pools = tuple(
        PoolStated(**(pool | {"tier": Tier[pool["tier"]], "reach": Reach[pool["reach"]]})) for pool in values["pools"]
    )
    state = InstanceStatus(values["state"])
    return InstanceRow(**(values | {"pools": pools, "topology": tuple(values["topology"]), "state": state}))


def _forgotten_values(mark: ForgottenRow) -> dict[str, Any]:
    declared = {} if mark.declared is None else _instance_values(mark.declared)
    return msgspec.structs.asdict(mark) | {"declared": declared}


def _forgotten_row(values: dict[str, Any]) -> ForgottenRow:
    declared = _instance_row(values["declared"]) if values["declared"] else None
    return ForgottenRow(**(values | {"declared": declared}))


def _epoch_values(row: EpochRow) -> dict[str, Any]:
    return msgspec.structs.asdict(row)


def _namespace_values(row: NamespaceRow) -> dict[str, Any]:
    fields = msgspec.structs.asdict(row.fields) | {"scheme_seed": str(row.fields.scheme_seed)}
    return fields | {"id": row.id, "first_seen_ns": row.first_seen_ns}


def _namespace_row(values: dict[str, Any]) -> NamespaceRow | None:
    """A namespace; None where its row has texts that no namespace may have."""
    fields = {name: value for name, value in values.items() if name not in ("id", "first_seen_ns")}
    fields["scheme_seed"] = int(fields["scheme_seed"])
    namespace = NamespaceId(bytes(values["id"]))
    try:
        return NamespaceRow(id=namespace, fields=Namespace(**fields), first_seen_ns=values["first_seen_ns"])
    except ArgumentError as error:
        log.warning("namespace.unreadable", namespace=namespace.hex(), why=str(error))
        return None
