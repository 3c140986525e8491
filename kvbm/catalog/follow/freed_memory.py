"""Gives memory back to the machine after a backlog: messages that were read lie between things that stay, so the C
library alone would keep their pages for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable

LOOK_S = 10.0
BACKLOG_BLOCKS = 1_000_000  # block events, about 20 MiB of messages


async def give_back_after_backlogs(
    blocks: Callable[[], int], is_all_read: Callable[[], bool], give_back: Callable[[], None]
) -> None:
    """Call `give_back` on a thread each time that so many block events more were read, once all is read; for ever.

    Not while more is to be read: it takes some ms, in which nobody else gets memory.

    Args:
        blocks: block events that were read so far.
    """
    done = 0
    while True:
        await asyncio.sleep(LOOK_S)
        if blocks() - done >= BACKLOG_BLOCKS and is_all_read():
            done = blocks()
            await asyncio.to_thread(give_back)


def give_back_freed() -> None:
    """Have the C library give back pages that nothing lies in. Another one than glibc does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
