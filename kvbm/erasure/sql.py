"""Takes namespaces, tenants, their usage and claims out of the catalog's database, and their bytes out of its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Table, and_, delete, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from kvbm.catalog.sql import tables
from kvbm.catalog.sql.database import database_errors, shown
from kvbm.catalog.sql.usage import erase_usage
from kvbm.core.errors import CatalogError
from kvbm.core.ids import NamespaceId

_NAMING: tuple[Table, ...] = (tables.namespaces, tables.tenants, tables.usage)  # with words in them
_CLAIMS = tables.object_claims  # may have very many rows, of ids and hashes
_ROWS = 500  # named in one statement


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

    SQLite overwrites what it deletes and is written anew. PostgreSQL writes the tables with names anew, with their
    indexes, frees the rows of claims for others to overwrite, and makes its statistics of what is left. Its write-ahead
    log, its backups and the free space of its other files are its operator's.

    Raises: CatalogError: the database does not answer, or refuses.
    """
    is_sqlite = engine.dialect.name == "sqlite"
    deleted = 0
    with database_errors(f"{shown(engine.url)} does not erase {len(namespaces)} namespaces"):
        async with engine.connect() as connection:
            if is_sqlite:
                await connection.exec_driver_sql("PRAGMA secure_delete = ON")
                await connection.commit()
            async with connection.begin():
                for at in range(0, len(namespaces), _ROWS):
                    part = list(namespaces[at : at + _ROWS])
                    for table, column in (
                        (tables.namespaces, tables.namespaces.c.id),
                        (tables.object_claims, tables.object_claims.c.namespace),
                    ):
                        deleted += (await connection.execute(delete(table).where(column.in_(part)))).rowcount
                for name in tenants:
                    deleted += (
                        await connection.execute(delete(tables.tenants).where(and_(tables.tenants.c.name == name)))
                    ).rowcount
                    deleted += await erase_usage(connection, name)
        if not is_sqlite:
            await _rewrite(engine)
            return deleted
        async with engine.connect() as connection:
            alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await alone.exec_driver_sql("VACUUM")
            is_busy, *_ = (await alone.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")).one()
            if is_busy:
                raise CatalogError(
                    f"{shown(engine.url)} is being read, so its log still has what was deleted; it is tried again"
                )
    return deleted


async def _rewrite(engine: AsyncEngine) -> None:
    """Have PostgreSQL's files and statistics name no more what was deleted from the tables."""
    async with engine.connect() as connection:
        alone = (await connection.get_raw_connection()).driver_connection
        for statement in (*(f"VACUUM (FULL) {table.name}" for table in _NAMING), f"VACUUM {_CLAIMS.name}"):
            await _say(alone, statement)
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


async def _say(connection: Any, statement: str) -> None:
    """Outside of a transaction, and as one message: a pooler may give the next one another connection.

    Raises CatalogError.
    """
    import asyncpg

    try:
        await connection.execute(statement)
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise CatalogError(f"the database refuses {statement} ({error})") from error


async def named_tenants(engine: AsyncEngine) -> list[str]:
    """The tenants that have a row of their own, or of usage. Raises CatalogError: the database does not answer."""
    asked = select(tables.tenants.c.name).union(select(tables.usage.c.tenant))
    with database_errors(f"{shown(engine.url)} does not answer"):
        async with engine.connect() as connection:
            return [str(row[0]) for row in await connection.execute(asked)]
