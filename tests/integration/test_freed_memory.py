"""After a backlog a catalog gives memory back, and not while it reads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from kvbm.catalog.follow import freed_memory
from kvbm.catalog.follow.freed_memory import BACKLOG_BLOCKS, give_back_after_backlogs

_PROGRAM = """
from kvbm.bench.measure import resident_bytes
from kvbm.catalog.follow.freed_memory import give_back_freed
messages, kept = [], []
for number in range(10_000):
    messages.append(b"m" * 6000)
    kept.append(b"k" * 700)
del messages
before = resident_bytes()
give_back_freed()
print(before - resident_bytes())
"""


def test_memory_is_given_back_once_a_backlog_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "LOOK_S", 0.001)
    at = {"blocks": 0, "is_all_read": 0}
    given: list[int] = []

    async def run() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        def give_back() -> None:
            given.append(at["blocks"])
            loop.call_soon_threadsafe(came.set)

        work = give_back_after_backlogs(lambda: at["blocks"], lambda: bool(at["is_all_read"]), give_back)
        task = asyncio.create_task(work)
        for blocks, is_all_read, is_given in (
            (BACKLOG_BLOCKS - 1, 1, False),  # too little
            (BACKLOG_BLOCKS, 0, False),  # more is coming
            (BACKLOG_BLOCKS, 1, True),
            (2 * BACKLOG_BLOCKS - 1, 1, False),
            (2 * BACKLOG_BLOCKS, 1, True),
        ):
            at.update(blocks=blocks, is_all_read=is_all_read)
            if is_given:
                await asyncio.wait_for(came.wait(), 10.0)
            await asyncio.sleep(0.05)  # some looks more
            assert came.is_set() == is_given
            came.clear()
        task.cancel()

    asyncio.run(run())
    assert given == [BACKLOG_BLOCKS, 2 * BACKLOG_BLOCKS]


@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library keeps memory in its own way"
)
def test_what_lies_between_things_that_stay_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) > 20 << 20
