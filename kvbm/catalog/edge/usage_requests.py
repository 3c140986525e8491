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
    if set(asked.keys()) - {*times, "tenant"} or None in found.values():
        raise ApiError(
            422,
            "bad_usage",
            f"{str(asked)[:200]!r} is no question about usage",
            "give from=TIME, to=TIME (ISO 8601 or Unix seconds), and tenant=NAME, which may be repeated",
        )
    until_ms = end_of_hour(found.get("to") or now_ms)
    since_ms = begin_of_hour(max(found.get("next") or 0, found.get("from") or max(0, until_ms - _TOLD_MS)))
    tenants = asked.getlist("tenant")[:MAX_POSITIONS] if "tenant" in asked else None
    if not caller.sees_all:
        own = caller.tenants or frozenset()
        tenants = sorted(own if tenants is None else own.intersection(tenants))
    return UsageWanted(since_ms, until_ms, None if tenants is None else tuple(tenants))
