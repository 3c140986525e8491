"""Work beside the loop, also where the system gives no more threads: that is trouble of a moment, as a full disk is."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from kvbm.core.errors import CatalogError

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """As `asyncio.to_thread`. Raises: CatalogError: no thread was to be had, and the work is never done."""
    return await run_in(None, work, *arguments, **more)


async def run_in(executor: Executor | None, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """As `in_thread`, in the threads of an executor; None: the loop's own."""
    outcome, context = Future[T](), contextvars.copy_context()

    def call() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(context.run(work, *arguments, **more))
        except BaseException as error:  # noqa: BLE001  # it is for whoever waits
            outcome.set_exception(error)

    try:
        asyncio.get_running_loop().run_in_executor(executor, call)
    except RuntimeError as error:  # an executor queues the call first: another of its threads may have it by now
        if outcome.cancel():
            raise CatalogError(f"{error} (a container's limit of pids, ulimit -u)") from None
    return await asyncio.wrap_future(outcome)
