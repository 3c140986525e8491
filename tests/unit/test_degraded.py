"""What does not work, in words: each part by its name, and no longer than it lasts."""

from __future__ import annotations

import asyncio
from typing import Any

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.sql_writer import Numbering, SqlWriter
from kvbm.streams.base import START


def test_each_part_that_does_not_work_is_named() -> None:
    degraded = Degraded()
    degraded.note("SQL", "the database does not answer")
    degraded.note("NATS", "no answer within 1 s")
    degraded.note("instance a", "instance a is ignored")
    assert str(degraded) == "NATS: no answer within 1 s; SQL: the database does not answer; instance a is ignored"
    degraded.clear("NATS")
    degraded.clear("instance a")
    assert str(degraded) == "SQL: the database does not answer"
    degraded.clear("SQL")
    assert not degraded and str(degraded) == ""


def test_sql_is_tried_again_as_soon_as_the_stream_is_heard() -> None:
    nothing: Any = None
    writer = SqlWriter(nothing, nothing, nothing, nothing, Numbering("s", START), nothing, Degraded(), nothing)

    async def wait() -> None:
        waiting = asyncio.create_task(writer._pause(3600.0))
        await asyncio.sleep(0)
        writer.on_reader()
        await waiting

    asyncio.run(wait())
