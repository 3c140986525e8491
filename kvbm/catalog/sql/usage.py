"""What tenants have used, in SQL: rows of a batch, sums of hours, and the times of which nothing is recorded.

Sums are of two halves of each number: instances may say any, and no database adds beyond 63 bits alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import and_, delete, exists, false, func, insert, literal, null, or_, select, true, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from kvbm.catalog.sql import tables
from kvbm.core.ids import InstanceId
from kvbm.core.usage import HOUR_MS, MOST_GAPS, START, UsageEntry, UsageGap, UsageHour, gap_of, hour_of

PAGE_ROWS = 5000  # hours of tenants in an answer, about: whole hours are given
_PAGE_HOURS = 1000
_HALF = 1 << 32
_DELETED_ROWS = 5000  # in one transaction


class UsageWanted(NamedTuple):
    """Whose usage, and of when.

    Attributes:
        since_ms, until_ms: hours that begin in [since_ms, until_ms), both at the beginning of an hour.
        tenants: of these; None: of all.
    """

    since_ms: int
    until_ms: int
    tenants: tuple[str, ...] | None = None


class UsagePage(NamedTuple):
    """Usage of some whole hours.

    Attributes:
        next_ms: where the next page begins; None: nothing is left.
    """

    hours: list[UsageHour]
    next_ms: int | None


def usage_values(entry: UsageEntry) -> dict[str, Any]:
    """An entry as a row."""
    return {
        "instance": entry.instance,
        "epoch": entry.epoch,
        "event_offset": entry.offset,
        "tenant": entry.tenant,
        "since_ms": entry.since_ms,
        "until_ms": entry.until_ms,
        "is_last": entry.is_last,
        **dict(zip(tables.USAGE_NUMBERS, entry.numbers, strict=True)),
    }


async def read_page(connection: AsyncConnection, wanted: UsageWanted) -> UsagePage:
    """The first hours of what is wanted."""
    table = tables.usage
    hour = (table.c.since_ms // HOUR_MS).label("hour")
    is_wanted = _is_wanted(wanted)
    counted = (
        select(hour, func.count(table.c.tenant.distinct()).label("tenants"))
        .where(is_wanted)
        .group_by(hour)
        .order_by(hour)
        .limit(_PAGE_HOURS + 1)
    )
    rows, last, next_ms = 0, None, None
    found = (await connection.execute(counted)).all()
    for number, (begun, tenants) in enumerate(found):
        if number and (rows + tenants > PAGE_ROWS or number == _PAGE_HOURS):
            next_ms = begun * HOUR_MS
            break
        rows, last = rows + tenants, begun
    if last is None:
        return UsagePage([], None)
    halves = [half for name in tables.USAGE_NUMBERS for half in _halves(table.c[name])]
    asked = select(hour, table.c.tenant, *halves).where(is_wanted, table.c.since_ms < (last + 1) * HOUR_MS)
    sums = [_summed(row) for row in await connection.execute(asked.group_by(hour, table.c.tenant))]
    return UsagePage([hour_of(*one) for one in sorted(sums, key=_order) if any(one[2])], next_ms)


async def read_gaps(connection: AsyncConnection, wanted: UsageWanted) -> list[UsageGap]:
    """Times of which instances have recorded nothing that begin within what is wanted, by instance and time, at most
    MOST_GAPS; of all tenants.
    """
    table = tables.usage
    place = (table.c.instance, table.c.epoch, table.c.event_offset)
    stretches = (
        select(*place, table.c.since_ms, table.c.until_ms, table.c.is_last)
        # a gap may begin where the hour before ends
        .where(table.c.since_ms >= wanted.since_ms - HOUR_MS, table.c.since_ms < wanted.until_ms)
        .distinct()
        .subquery()
    )
    ends = (
        select(stretches.c.instance, stretches.c.until_ms, _following(stretches).label("following"))
        .where(
            or_(
                and_(stretches.c.event_offset != START, stretches.c.is_last == false()),
                # what begins an epoch says so only where nothing before it does
                and_(stretches.c.event_offset == START, func.coalesce(_was_last(stretches), true()) == true()),
            ),
            stretches.c.until_ms >= wanted.since_ms,
            stretches.c.until_ms < wanted.until_ms,
        )
        .subquery()
    )
    asked = (
        select(ends.c.instance, ends.c.until_ms, ends.c.following)
        .where(or_(ends.c.following == null(), ends.c.following > ends.c.until_ms))
        .order_by(ends.c.instance, ends.c.until_ms)
        .limit(MOST_GAPS)
    )
    found = [gap_of(InstanceId(row[0]), row[1], row[2]) for row in await connection.execute(asked)]
    return sorted(found, key=lambda gap: gap.instance.encode())


def _following(one: Any) -> Any:
    """Where the next record behind a stretch begins; it may lie anywhere behind what is wanted."""
    later = tables.usage.alias("later")
    return (
        select(later.c.since_ms)
        .where(
            later.c.instance == one.c.instance,
            later.c.event_offset != START,
            tuple_(later.c.epoch, later.c.event_offset) > tuple_(one.c.epoch, one.c.event_offset),
        )
        .order_by(later.c.epoch, later.c.event_offset, later.c.since_ms)
        .limit(1)
        .correlate(one)
        .scalar_subquery()
    )


def _was_last(one: Any) -> Any:
    """Whether the stretch before one was the last of its epoch; none: there is no stretch before."""
    earlier = tables.usage.alias("earlier")
    return (
        select(earlier.c.is_last)
        .where(
            earlier.c.instance == one.c.instance,
            tuple_(earlier.c.epoch, earlier.c.event_offset) < tuple_(one.c.epoch, one.c.event_offset),
        )
        .order_by(earlier.c.epoch.desc(), earlier.c.event_offset.desc(), earlier.c.since_ms.desc())
        .limit(1)
        .correlate(one)
        .scalar_subquery()
    )


async def delete_before(connection: AsyncConnection, before_ms: int) -> int:
    """Remove some rows of hours before a time; how many."""
    table = tables.usage
    key = list(table.primary_key)
    oldest = select(*key).where(table.c.since_ms < before_ms).order_by(table.c.since_ms).limit(_DELETED_ROWS)
    removed = await connection.execute(delete(table).where(tuple_(*key).in_(oldest)))
    return int(removed.rowcount)


async def erase_usage(connection: AsyncConnection, tenant: str) -> int:
    """Remove a tenant's rows; how many. That their time was recorded stays: one without a name has used nothing in it,
    where nobody else has a row.
    """
    table, other = tables.usage, tables.usage.alias("other")
    stretch = ("instance", "epoch", "event_offset", "since_ms")
    is_there = exists().where(other.c.tenant == "", *(other.c[name] == table.c[name] for name in stretch))
    nobody = select(
        *(table.c[name] for name in (*stretch, "until_ms", "is_last")),
        literal("").label("tenant"),
        *(literal(0).label(name) for name in tables.USAGE_NUMBERS),
    ).where(table.c.tenant == tenant, ~is_there)
    if tenant:
        await connection.execute(insert(table).from_select([column.name for column in nobody.selected_columns], nobody))
        return int((await connection.execute(delete(table).where(table.c.tenant == tenant))).rowcount)
    nothing = dict.fromkeys(tables.USAGE_NUMBERS, 0)
    return int((await connection.execute(update(table).where(table.c.tenant == "").values(nothing))).rowcount)


def _is_wanted(wanted: UsageWanted) -> Any:
    table = tables.usage
    within = and_(table.c.since_ms >= wanted.since_ms, table.c.since_ms < wanted.until_ms)
    return within if wanted.tenants is None else and_(within, table.c.tenant.in_(wanted.tenants))


def _halves(column: Any) -> tuple[Any, Any]:
    return func.sum(column // _HALF), func.sum(column % _HALF)


def _summed(row: Any) -> tuple[int, str, list[int]]:
    hour, tenant, *halves = row
    return hour, tenant, [int(high) * _HALF + int(low) for high, low in zip(halves[::2], halves[1::2], strict=True)]


def _order(one: tuple[int, str, list[int]]) -> tuple[int, bytes]:
    return one[0], one[1].encode()
