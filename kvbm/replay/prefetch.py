"""Reading a source from within an asyncio loop: in a thread of its own, because a live stream is read by a loop of its
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from kvbm.replay.source import Located

_BATCH = 256  # frames


async def read_ahead(located: Iterator[Located]) -> AsyncIterator[list[Located]]:
    """The same frames, some at a time. What reading raises is raised here."""
    loop = asyncio.get_running_loop()
    close = getattr(located, "close", None)  # of a generator, which ends in the thread it began in
    with ThreadPoolExecutor(1, "kvbm-replay-read") as reader:
        try:
            while batch := await loop.run_in_executor(reader, lambda: list(islice(located, _BATCH))):
                yield batch
        finally:
            if close is not None:
                reader.submit(close)
