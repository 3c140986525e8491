"""What is open when the process leaves: closed before the interpreter ends, and left to its owner by a forked child.

A daemon thread that runs on while the interpreter ends is stopped wherever it asks for the GIL, with whatever lock it
holds and whatever destructor it is in. So what has threads is closed first: after the last thread that is not a daemon
has ended, while everything still works, and in a bounded time. A process that ends without its interpreter (`os._exit`,
a signal nobody handles) closes nothing; the next start goes on from what was durable.

After `fork` a child has what was open, but not one of its threads, and maybe locks that nobody will ever give back.
Nothing of it is the child's: it must not be used, and closing it there closes nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Protocol

from kvbm.safe_log import SafeLog

log = SafeLog()

LEAVE_S = 10.0  # all of it together is given so long to close, a part of which each takes
STEP_S = 2.0


class OpenResource(Protocol):
    """Something with threads or locks of its own."""

    def close(self, timeout_s: float) -> None:
        """Close it; each step of it takes no longer than this."""

    def disown(self) -> None:
        """This process is a forked child: it is the parent's."""


_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_WITH_LOCKS = tuple(f"{_OURS}{name}{os.sep}" for name in ("core", "locate", "manager", "pools", "streams", "transport"))

_open: dict[int, OpenResource] = {}  # in the order they were opened
_inherited: list[OpenResource] = []  # of a parent: kept, so that no destructor waits for threads that are not here


def keep(opened: OpenResource) -> None:
    """Remember what is open until `forget`."""
    _open[id(opened)] = opened


def forget(closed: OpenResource) -> None:
    """It is closed, or is being closed."""
    _open.pop(id(closed), None)


def close_aside(opened: OpenResource, timeout_s: float) -> bool:
    """Whether it is closed by a thread of its own, because who closes it is a signal's handler that has interrupted a
    call of ours.

    That call may have any lock of ours, and gets on only once the handler has returned: whoever waited here would wait
    for ever. The interpreter waits for the thread before it ends; where none can be started, it closes what is open
    itself.
    """
    if current_thread() is not main_thread() or not _is_within_a_call(sys._getframe(1)):
        return False
    with suppress(RuntimeError, MemoryError):
        Thread(target=opened.close, args=(timeout_s,), name="kvbm-close").start()
    return True


def _is_within_a_call(frame: FrameType | None) -> bool:
    """Whether a call of ours, other than the one that closes, lies below: between the two is somebody else's
    handler.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    while frame is not None:
        if frame.f_code.co_filename.startswith(_WITH_LOCKS):
            return True
        frame = frame.f_back
    return False


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
