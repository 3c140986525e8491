"""The claims of a batch → SQL, thousands to a statement, in the order of the key, so that neighbours share a page.

A claim that SQL has is written again only when it is newer by more than `used_ns`: blocks that are read again and again
would else be rows that are written again and again. What SQL tells of a block's last use is never late and at most so
much early; `gc` reckons with it.

SQLite has one statement, which takes hashes as one value and the rest as JSON. PostgreSQL is asked first what it has,
by keys in order, and what it lacks is copied to it: `ON CONFLICT` costs twice as much for each row. That is right
because claims have one writer at a time: whoever writes some holds a lock of the whole database until its transaction
ends.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from kvbm.catalog.sql.net_claims import COLUMN, NetClaims
from kvbm.core.ids import split_hashes

STATEMENT_BLOCKS = 4096  # so that nothing else waits long for this loop, and one statement is far from its time limit
_LOCK = 0x6B76626D_00000002  # "kvbm" in the high half; the first one is the migrations'


async def write_claims(connection: AsyncConnection, claims: Sequence[NetClaims], used_ns: int) -> None:
    """Withdraw and claim, within the connection's transaction."""
    if not claims:
        return
    if connection.dialect.name == "sqlite":
        await _write_to_sqlite(connection, claims, used_ns)
    else:
        await _write_to_postgres(connection, claims, used_ns)


# -- SQLite -----------------------------------------------------------------------------------------------------------

_SQLITE_WITHDRAW = """
WITH RECURSIVE block (at) AS (SELECT 0 UNION ALL SELECT at + 1 FROM block WHERE 16 * (at + 1) < length(?3))
DELETE FROM object_claims WHERE pool = ?1 AND namespace = ?2 AND hash IN (SELECT substr(?3, 16 * at + 1, 16) FROM block)
"""
# `LIMIT -1` has SQLite make the words once, with an index, instead of looking through them for each block.
_SQLITE_CLAIM = """
INSERT INTO object_claims AS held (pool, namespace, hash, first_claimed_by, claimed_ns, last_claimed_ns)
SELECT ?1, ?2, substr(?3, 16 * block.key + 1, 16), word.who, word.first_ns, word.last_ns
FROM json_each(?5) AS block
CROSS JOIN (
    SELECT key AS number, json_extract(value, '$[0]') AS who, json_extract(value, '$[1]') AS first_ns,
        json_extract(value, '$[2]') AS last_ns
    FROM json_each(?4) LIMIT -1
) AS word ON word.number = block.value
WHERE true
ON CONFLICT (pool, namespace, hash) DO UPDATE SET last_claimed_ns = excluded.last_claimed_ns
WHERE held.last_claimed_ns < excluded.last_claimed_ns - ?6
"""


async def _write_to_sqlite(connection: AsyncConnection, claims: Sequence[NetClaims], used_ns: int) -> None:
    for net in claims:
        for at in range(0, len(net.withdrawn), STATEMENT_BLOCKS):
            hashes = net.withdrawn[at : at + STATEMENT_BLOCKS].tobytes()
            await connection.exec_driver_sql(_SQLITE_WITHDRAW, (net.pool, net.namespace, hashes))
    for net in claims:
        for part in net.parts(STATEMENT_BLOCKS):
            values = (net.pool, net.namespace, part.claimed.tobytes(), *_as_json(part), used_ns)
            await connection.exec_driver_sql(_SQLITE_CLAIM, values)


def _as_json(part: NetClaims) -> tuple[str, str]:
    """The different words about blocks, and for each block which of them it is."""
    numbers: dict[tuple[int, int, int], int] = {}
    words = zip(part.by.tolist(), part.first_ns.tolist(), part.last_ns.tolist(), strict=True)
    which = [numbers.setdefault(word, len(numbers)) for word in words]
    named = [(part.names[by], first_ns, last_ns) for by, first_ns, last_ns in numbers]
    return msgspec.json.encode(named).decode(), msgspec.json.encode(which).decode()


# -- PostgreSQL -------------------------------------------------------------------------------------------------------

# Plans are kept, those of an empty table, too: none of them may look at all rows for each block.
_POSTGRES_BEGIN = """
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true), pg_advisory_xact_lock($1::bigint)
"""
_POSTGRES_WITHDRAW = """
DELETE FROM object_claims WHERE pool = $1 AND namespace = $2 AND hash = ANY($3::bytea[])
"""
_POSTGRES_LOOK = """
SELECT string_agg(hash, ''::bytea) FILTER (WHERE last_claimed_ns >= $4::bigint),
    string_agg(hash, ''::bytea) FILTER (WHERE last_claimed_ns < $4::bigint)
FROM object_claims WHERE pool = $1 AND namespace = $2 AND hash = ANY($3::bytea[])
"""
_POSTGRES_RENEW = """
INSERT INTO object_claims AS held (pool, namespace, hash, first_claimed_by, claimed_ns, last_claimed_ns)
SELECT $1, $2, hash, who, first_ns, last_ns
FROM unnest($3::bytea[], $4::text[], $5::bigint[], $6::bigint[]) AS new (hash, who, first_ns, last_ns)
ON CONFLICT (pool, namespace, hash) DO UPDATE SET last_claimed_ns = excluded.last_claimed_ns
WHERE held.last_claimed_ns < excluded.last_claimed_ns - $7::bigint
"""
_COLUMNS = ("pool", "namespace", "hash", "first_claimed_by", "claimed_ns", "last_claimed_ns")
_COPY_HEAD, _COPY_END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
_TIMES = np.dtype([("first", ">i4"), ("first_ns", ">i8"), ("last", ">i4"), ("last_ns", ">i8")])


async def _write_to_postgres(connection: AsyncConnection, claims: Sequence[NetClaims], used_ns: int) -> None:
    await connection.exec_driver_sql(_POSTGRES_BEGIN, (_LOCK,))
    for net in claims:
        for at in range(0, len(net.withdrawn), STATEMENT_BLOCKS):
            hashes = split_hashes(net.withdrawn[at : at + STATEMENT_BLOCKS].tobytes())
            await connection.exec_driver_sql(_POSTGRES_WITHDRAW, (net.pool, net.namespace, hashes))
    for net in claims:
        for part in net.parts(STATEMENT_BLOCKS):
            await _claim_in_postgres(connection, part, used_ns)


async def _claim_in_postgres(connection: AsyncConnection, part: NetClaims, used_ns: int) -> None:
    new_enough_ns = int(part.last_ns.max()) - used_ns
    asked = (part.pool, part.namespace, split_hashes(part.claimed.tobytes()), new_enough_ns)
    known, old = tuple((await connection.exec_driver_sql(_POSTGRES_LOOK, asked)).one())
    lacks = ~_among(part.claimed, (known or b"") + (old or b""))
    if lacks.any():
        await _copy(connection, part.where(lacks))
    if old:
        left = part.where(_among(part.claimed, old))
        await connection.exec_driver_sql(
            _POSTGRES_RENEW,
            (
                left.pool,
                left.namespace,
                split_hashes(left.claimed.tobytes()),
                [left.names[by] for by in left.by.tolist()],
                left.first_ns.tolist(),
                left.last_ns.tolist(),
                used_ns,
            ),
        )


def _among(hashes: np.ndarray, found: bytes) -> np.ndarray:
    """Which of some hashes were found; all that were found are among them."""
    column = np.frombuffer(found, dtype=COLUMN)
    if len(column) in (0, len(hashes)):
        return np.full(len(hashes), len(column) > 0)
    return np.isin(hashes, column)


async def _copy(connection: AsyncConnection, rows: NetClaims) -> None:
    from asyncpg import InterfaceError, PostgresError

    driver: Any = (await connection.get_raw_connection()).driver_connection
    try:
        await driver.copy_to_table("object_claims", source=_copied(rows), columns=_COLUMNS, format="binary")
    except (PostgresError, InterfaceError) as error:
        raise OperationalError("COPY object_claims", None, error) from error


def _copied(rows: NetClaims) -> io.BytesIO:
    """Rows as PostgreSQL's binary COPY has them: how many fields, then each behind its length."""
    head = struct.pack(">h", len(_COLUMNS)) + _field(rows.pool.encode()) + _field(rows.namespace)
    hashes = (_field(one) for one in split_hashes(rows.claimed.tobytes()))
    names = [_field(name.encode()) for name in rows.names]
    times = np.empty(len(rows.claimed), dtype=_TIMES)
    times["first"] = times["last"] = 8
    times["first_ns"], times["last_ns"] = rows.first_ns, rows.last_ns
    packed, size = times.tobytes(), _TIMES.itemsize
    whens = (packed[at : at + size] for at in range(0, len(packed), size))
    fields = zip(repeat(head), hashes, (names[by] for by in rows.by.tolist()), whens, strict=False)
    return io.BytesIO(b"".join((_COPY_HEAD, *chain.from_iterable(fields), _COPY_END)))


def _field(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value
