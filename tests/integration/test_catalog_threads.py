"""A catalog goes on where the system gives no more threads: what needs one is trouble of a moment, and never
done late.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbm.catalog.sql.database import database_errors
from kvbm.catalog.threads import in_thread, run_in
from kvbm.core.errors import CatalogError
from tests.eventually import WAIT_S


def refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_what_gets_no_thread_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def run() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(CatalogError, match=r"can't start new thread .*ulimit -u"):
                await in_thread(done.append, "late")
        await in_thread(done.append, "now")  # in a thread that finds both in its queue

    asyncio.run(run())
    assert done == ["now"]


def test_what_another_thread_has_taken_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor queues a call before it begins a thread for it; one that is there may take it, though the new one is
    refused.
    """
    begun, end = threading.Event(), threading.Event()

    def held() -> str:
        begun.set()
        end.wait(WAIT_S)
        return "done"

    async def run() -> None:
        with ThreadPoolExecutor(2) as executor:
            first = threading.Event()
            executor.submit(first.wait, WAIT_S)  # busy, so that another thread is wanted

            def start(*_: object) -> None:
                first.set()  # the one that is there takes it
                begun.wait(WAIT_S)
                refuse()

            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", start)
                asking = asyncio.ensure_future(run_in(executor, held))
                await asyncio.sleep(0)
            assert begun.is_set() and not asking.done()
            end.set()
            assert await asyncio.wait_for(asking, WAIT_S) == "done"

    asyncio.run(run())


def test_an_error_of_the_work_is_told_as_it_is() -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match="its own"):
            await in_thread(_fail)

    asyncio.run(run())


def _fail() -> None:
    raise RuntimeError("its own")


def test_a_driver_without_a_thread_is_trouble_of_the_database() -> None:
    with pytest.raises(CatalogError, match=r"x\.db: can't start new thread"), database_errors("x.db"):
        refuse()
    with pytest.raises(RuntimeError, match="another"), database_errors("x.db"):
        raise RuntimeError("another")
