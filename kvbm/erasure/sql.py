"""Takes namespaces, tenants, their usage and claims out of the catalog's database, and their bytes out of its files."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Table, and_, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kvbm.catalog.sql import tables
from kvbm.catalog.sql.database import database_errors, shown
from kvbm.catalog.sql.usage import erase_usage
from kvbm.core.errors import CatalogError
from kvbm.core.ids import NamespaceId

_NAMING: tuple[Table, ...] = (tables.namespaces, tables.tenants, tables.usage)  # with words in them
_CLAIMS = tables.object_claims  # may have very many rows, of ids and hashes
_ROWS = 500  # named in one statement
_TRIES_S, _TRY_S = 10.0, 0.05  # how long a table is tried that is in use, and how often
_REWRITE_S = 3600.0  # that PostgreSQL may take to write one anew


async def claimed(engine: AsyncEngine, namespaces: Sequence[NamespaceId], of: Callable[[bytes], bytes] | None) -> int:
    """How many blocks of namespaces are claimed still.

    Args:
        of: gives those of a run of hashes that count; None: all.
    Raises: CatalogError: the database does not answer.
    """
    table = tables.object_claims
    count = 0
    with database_errors(f"{shown(engine.url)} does not answer"):
        async with engine.connect() as connection:
            for namespace in namespaces:
                mine = table.c.namespace == namespace
                if of is None:
                    count += int((await connection.execute(select(func.count()).where(mine))).scalar_one())
                else:
                    async for row in await connection.stream(select(table.c.hash).where(mine)):
                        count += len(of(bytes(row[0]))) > 0
    return count


async def erase_rows(engine: AsyncEngine, namespaces: Sequence[NamespaceId], tenants: Sequence[str]) -> int:
    """Delete what names them, and have the database write nothing of it back; gives how many rows.

    SQLite overwrites what it deletes and is written anew. PostgreSQL writes tables with names anew, with
    their indexes, where this or an earlier call has deleted rows; it frees the rows of claims for others to overwrite,
    and makes its statistics of what is left. Its write-ahead log, its backups and the free space of its other files
    are its operator's.

    Raises: CatalogError: the database does not answer, or refuses, or a table is in use; what is deleted is then gone
        from the tables, and the next call goes on.
    """
    is_sqlite = engine.dialect.name == "sqlite"
    with database_errors(f"{shown(engine.url)} does not erase {len(namespaces)} namespaces"):
        async with engine.connect() as connection:
            if is_sqlite:
                await connection.exec_driver_sql("PRAGMA secure_delete = ON")
                await connection.commit()
            async with connection.begin():
                deleted = await _delete(connection, namespaces, tenants)
                for table in () if is_sqlite else _NAMING:
                    if deleted[table.name]:
                        await _note_deletion(connection, table)
        if not is_sqlite:
            await _rewrite(engine)
            return deleted.total()
        async with engine.connect() as connection:
            alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await alone.exec_driver_sql("VACUUM")
            is_busy, *_ = (await alone.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")).one()
            if is_busy:
                raise CatalogError(
                    f"{shown(engine.url)} is being read, so its log still has what was deleted; it is tried again"
                )
    return deleted.total()


async def _delete(
    connection: AsyncConnection, namespaces: Sequence[NamespaceId], tenants: Sequence[str]
) -> Counter[str]:
    """Delete the rows; how many of each table."""
    deleted = Counter[str]()
    for at in range(0, len(namespaces), _ROWS):
        part = list(namespaces[at : at + _ROWS])
        for table, column in (
            (tables.namespaces, tables.namespaces.c.id),
            (tables.object_claims, tables.object_claims.c.namespace),
        ):
            deleted[table.name] += (await connection.execute(delete(table).where(column.in_(part)))).rowcount
    for name in tenants:
        mine = delete(tables.tenants).where(and_(tables.tenants.c.name == name))
        deleted[tables.tenants.name] += (await connection.execute(mine)).rowcount
        deleted[tables.usage.name] += await erase_usage(connection, name)
    return deleted


class _Note(NamedTuple):
    """What a table's comment says of rows that are deleted and still in its file.

    Attributes:
        filenode: of that file; once the table is written anew it has another, and the note means nothing.
        transaction: that deleted them last.
    """

    filenode: int
    transaction: int

    def __str__(self) -> str:
        return f"kvbm erased rows of file {self.filenode} in transaction {self.transaction}"


async def _note_deletion(connection: AsyncConnection, table: Table) -> None:
    """Have the transaction that deletes rows note it, so that nobody's death leaves their bytes in the file."""
    asked = f"SELECT pg_relation_filenode('{table.name}'::regclass), txid_current() % 4294967296"
    row: Any = (await connection.exec_driver_sql(asked)).one()
    note = _Note(int(row[0]), int(row[1]))
    await connection.exec_driver_sql(f"COMMENT ON TABLE {table.name} IS '{note}'")


async def _noted(connection: AsyncConnection, table: Table) -> _Note | None:
    """What is noted of the file that a table has now."""
    asked = f"SELECT pg_relation_filenode(t), obj_description(t, 'pg_class') FROM to_regclass('{table.name}') AS t"
    row: Any = (await connection.exec_driver_sql(asked)).one()
    transaction = str(row[1]).rpartition(" ")[2]
    note = _Note(int(row[0]), int(transaction) if transaction.isdecimal() else 0)
    return note if str(note) == row[1] else None


async def _is_seen(connection: AsyncConnection, note: _Note) -> bool:
    """Whether somebody may still read rows that were deleted: VACUUM keeps these."""
    asked = (
        "SELECT EXISTS (SELECT FROM ("
        "SELECT unnest(ARRAY[backend_xmin, backend_xid]) AS seen FROM pg_stat_activity"
        " WHERE datname = current_database() OR datname IS NULL"
        " UNION ALL SELECT xmin FROM pg_replication_slots"
        " UNION ALL SELECT transaction FROM pg_prepared_xacts WHERE database = current_database()"
        f") AS every WHERE age(seen) >= age('{note.transaction}'::xid))"
    )
    return bool((await connection.exec_driver_sql(asked)).scalar_one())


async def _rewrite(engine: AsyncEngine) -> None:
    """Have PostgreSQL's files and statistics name no more what was deleted from the tables.

    Only VACUUM FULL does: VACUUM alone leaves the bytes of dead rows in their pages until other rows take the room.
    """
    for table in _NAMING:
        await _write_anew(engine, table)
    await _say(engine, f"VACUUM {_CLAIMS.name}")
    for table in (*_NAMING, _CLAIMS):
        async with engine.begin() as connection:
            if (await connection.execute(select(table.primary_key.columns[0]).limit(1))).first() is not None:
                await connection.exec_driver_sql(f"ANALYZE {table.name}")
                continue
            # ANALYZE keeps the statistics of a table that has become empty, with its most common values; a column that
            # is given a type loses them
            types = ", ".join(
                f"ALTER COLUMN {column.name} TYPE {column.type.compile(connection.dialect)}" for column in table.columns
            )
            await connection.exec_driver_sql(f"ALTER TABLE {table.name} {types}")


async def _write_anew(engine: AsyncEngine, table: Table) -> None:
    """Have a table's file written anew, where it has deleted rows.

    The table is locked while that goes on, and the lock is never waited for: everybody else would wait behind, for as
    long as a dump or another reader takes.

    Raises: CatalogError: the table, or a row that was deleted, was in use all the time.
    """
    until_s = time.monotonic() + _TRIES_S
    while True:
        async with engine.connect() as connection:
            note = await _noted(connection, table)
            is_seen = note is not None and await _is_seen(connection, note)
        if note is None:
            return
        if time.monotonic() >= until_s:
            whose = "a transaction from before the erasure is open" if is_seen else f"{table.name} is in use"
            raise CatalogError(f"{shown(engine.url)} keeps what was deleted: {whose}; it is tried again")
        if not is_seen:
            await _say(engine, f"VACUUM (FULL, SKIP_LOCKED) {table.name}")
        await asyncio.sleep(_TRY_S)


async def _say(engine: AsyncEngine, statement: str) -> None:
    """Outside of a transaction, and as one message: a pooler may give the next one another connection.

    Raises CatalogError.
    """
    import asyncpg

    async with engine.connect() as connection:
        alone: Any = (await connection.get_raw_connection()).driver_connection
        try:
            await alone.execute(statement, timeout=_REWRITE_S)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise CatalogError(f"the database refuses {statement} ({error})") from error


async def named_tenants(engine: AsyncEngine) -> list[str]:
    """The tenants that have a row of their own, or of usage. Raises CatalogError: the database does not answer."""
    asked = select(tables.tenants.c.name).union(select(tables.usage.c.tenant))
    with database_errors(f"{shown(engine.url)} does not answer"):
        async with engine.connect() as connection:
            return [str(row[0]) for row in await connection.execute(asked)]
