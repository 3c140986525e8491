"""Rows that a database refuses for what they hold: a batch is cut until they are found, and the rest of it is stored.

Whoever may write to the stream may write anything, and what is read has bounds. Where a bound has been forgotten, one
row must not keep all others out for ever: the batch would come again, and be refused again, also after a restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection

_DATA, _INTEGRITY, _TOO_LARGE = "22", "23", "54"  # classes of SQLSTATE
R = TypeVar("R")


class RefusedRow(NamedTuple):
    """A row that was left out.

    Attributes:
        table: where it should have gone.
        key: what names it there.
        rows: how many it stands for.
        why: the database's own words.
    """

    table: str
    key: str
    rows: int
    why: str


def is_refused_data(error: BaseException) -> bool:
    """Whether a statement failed for the values in it: it would fail again, whenever it is tried."""
    if isinstance(error, OverflowError | UnicodeError):
        return True  # a driver's own, before it has asked anybody
    if not isinstance(error, StatementError):
        return False
    state = getattr(error.orig, "sqlstate", None)
    if state:
        return str(state)[:2] in (_DATA, _INTEGRITY, _TOO_LARGE)
    if not isinstance(error, DBAPIError):
        return isinstance(error.orig, ValueError | TypeError)  # it could not be made of these values
    return isinstance(error, DataError | IntegrityError) or isinstance(
        getattr(error.orig, "__cause__", None), ValueError
    )


async def write_leaving_out(
    connection: AsyncConnection, rows: Sequence[R], write: Callable[[Sequence[R]], Awaitable[None]]
) -> list[tuple[R, BaseException]]:
    """Write rows within the connection's transaction, in halves where the database refuses some; what it refuses alone
    is left out.

    Returns: those that were left out, and what was said of each. Raises: whatever else `write` raises.
    """
    if not rows:
        return []
    try:
        async with connection.begin_nested():
            await write(rows)
    except Exception as error:
        if not is_refused_data(error):
            raise
        if len(rows) == 1:
            return [(rows[0], error)]
    else:
        return []
    half = len(rows) // 2
    first = await write_leaving_out(connection, rows[:half], write)
    return first + await write_leaving_out(connection, rows[half:], write)
