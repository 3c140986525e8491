"""What is open when the process leaves: closed before the interpreter ends, and left to its owner by a forked child.

A daemon thread that runs on while the interpreter ends is stopped wherever it asks for the GIL, with whatever lock it holds and
whatever destructor it is in. So what has threads is closed first: after the last thread that is not a daemon has ended, while
everything still works, and in a bounded time. A process that ends without its interpreter (`os._exit`, a signal nobody handles)
closes nothing; the next start goes on from what was durable.

After `fork` a child has what was open, but not one of its threads, and maybe locks that nobody will ever give back. Nothing of it is
the child's: it must not be used, and closing it there closes nothing.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from typing import Protocol

import structlog

log = structlog.get_logger()

LEAVE_S = 10.0  # all of it together is given so long to close, a part of which each takes
STEP_S = 2.0


class Open(Protocol):
    """Something with threads or locks of its own."""

    def close(self, timeout_s: float) -> None:
        """Close it; each step of it takes no longer than this."""

    def disown(self) -> None:
        """This process is a forked child: it is the parent's."""


_open: dict[int, Open] = {}  # in the order they were opened
_inherited: list[Open] = []  # of a parent: kept, so that no destructor waits for threads that are not here


def keep(opened: Open) -> None:
    """Remember what is open until `forget`."""
    _open[id(opened)] = opened


def forget(closed: Open) -> None:
    """It is closed, or is being closed."""
    _open.pop(id(closed), None)


@atexit.register
def close_all(within_s: float | None = None) -> None:
    """Close what is still open, what was opened last first, within LEAVE_S where nothing else is said."""
    deadline_s = time.monotonic() + (LEAVE_S if within_s is None else within_s)
    while _open:
        _, opened = _open.popitem()
        left_s = deadline_s - time.monotonic()
        try:
            opened.close(min(STEP_S, max(0.1, left_s)))
        except Exception:
            with suppress(OSError, ValueError):  # where the log goes may be closed
                log.exception(
                    "process.left_open", what=type(opened).__name__, remedy="close it before the program ends"
                )


def _disown_all() -> None:
    """In a forked child."""
    for opened in _open.values():
        with suppress(Exception):  # the child may be of another program that knows nothing of us
            opened.disown()
    _inherited.extend(_open.values())
    _open.clear()


os.register_at_fork(after_in_child=_disown_all)
