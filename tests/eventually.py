"""Wait until something is so.

Tests wait in this way alone for what nobody tells them; a fixed sleep is either too short or too long.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_S = 60.0
"""How long a test waits for what should be so at once.

Only a failure takes this long, so it is generous: machines are busy.
"""
_MOST_PAUSE_S = 0.02


def eventually(
    check: Callable[[], T], what: str = "", timeout_s: float = WAIT_S, state: Callable[[], object] | None = None
) -> T:
    """Wait until `check` gives something true, and give it.

    Args:
        check: asked again and again, at least once. What it raises is passed on.
        what: one sentence that says what is wrong when it never becomes true.
        timeout_s: how long to wait.
        state: gives what the failure tells of the last state, beside what `check` gave last.
    Raises: AssertionError: it has not become true in time.
    """
    until_s, pause_s = time.monotonic() + timeout_s, 0.001
    while not (found := check()):
        if time.monotonic() >= until_s:
            raise AssertionError(_words(check, what, timeout_s, found, state))
        time.sleep(pause_s)
        pause_s = min(_MOST_PAUSE_S, 2 * pause_s)
    return found


async def eventually_async(
    check: Callable[[], T | Awaitable[T]],
    what: str = "",
    timeout_s: float = WAIT_S,
    state: Callable[[], object] | None = None,
) -> T:
    """`eventually` in an event loop, which goes on meanwhile. `check` may be a coroutine function."""
    until_s, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        asked: Any = check()
        found: T = await asked if inspect.isawaitable(asked) else asked
        if found:
            return found
        if time.monotonic() >= until_s:
            raise AssertionError(_words(check, what, timeout_s, found, state))
        await asyncio.sleep(pause_s)
        pause_s = min(_MOST_PAUSE_S, 2 * pause_s)


def _words(
    check: Callable[[], object], what: str, timeout_s: float, found: object, state: Callable[[], object] | None
) -> str:
    code = getattr(check, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    more = f"; state: {state()!r}" if state else ""
    return f"{what or 'it does not become true'} within {timeout_s:g} s{where}; last answer: {found!r}{more}"
