"""A checkpoint as the answer to an HTTP request: its manifest's file, and behind it that of the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse

from kvbm.catalog.follow.checkpoints import OpenCheckpoint

CONTENT_TYPE = "application/vnd.kvbm.checkpoint"
_PART_BYTES = 256 << 10


class CheckpointResponse(StreamingResponse):
    """Sends a checkpoint at the speed of its reader, and closes it."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        super().__init__(_parts(checkpoint), media_type=CONTENT_TYPE, headers={"content-length": str(checkpoint.bytes)})


async def _parts(checkpoint: OpenCheckpoint) -> AsyncIterator[bytes]:
    with checkpoint.file as file:
        yield checkpoint.manifest
        while part := await asyncio.to_thread(file.read, _PART_BYTES):
            yield part
