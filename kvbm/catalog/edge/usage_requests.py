"""Questions about usage: whose, and of which hours, as far as the caller may know."""

from __future__ import annotations

import time

from starlette.datastructures import QueryParams

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.answers.prompts import ApiError
from kvbm.catalog.sql.usage import UsageWanted
from kvbm.core.answers import MAX_POSITIONS
from kvbm.core.usage import begin_of_hour, end_of_hour, parse_time

_TOLD_MS = 31 * 24 * 3_600_000  # where nobody says from when


def usage_wanted(caller: Caller, asked: QueryParams) -> UsageWanted:
    """Whose usage of what time is asked for, as far as the caller may know of it. Raises ApiError."""
    now_ms = time.time_ns() // 1_000_000
    times = {name: asked.get(name, "") for name in ("from", "to", "next")}
    found = {name: parse_time(text) for name, text in times.items() if text}
    tenants = asked.getlist("tenant") if "tenant" in asked else None
    if (
        set(asked.keys()) - {*times, "tenant"}
        or None in found.values()
        or (tenants is not None and len(tenants) > MAX_POSITIONS)  # of fewer than were asked for is no answer
    ):
        raise ApiError(
            422,
            "bad_usage",
            f"{str(asked)[:200]!r} is no question about usage",
            "give from=TIME, to=TIME (ISO 8601 or Unix seconds), and tenant=NAME, which may be repeated, "
            f"{MAX_POSITIONS} times at most",
        )
    until_ms, since_ms = found.get("to"), found.get("from")
    until_ms = end_of_hour(now_ms if until_ms is None else until_ms)
    since_ms = max(0, until_ms - _TOLD_MS) if since_ms is None else since_ms
    since_ms = begin_of_hour(max(found.get("next") or 0, since_ms))
    if not caller.sees_all:
        own = caller.tenants or frozenset()
        tenants = sorted(own if tenants is None else own.intersection(tenants))
    return UsageWanted(since_ms, until_ms, None if tenants is None else tuple(tenants))
