"""A feed as the answer to an HTTP request: piece by piece, at the speed of its reader, and over as soon as that is
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CONTENT_TYPE = "text/event-stream"


class FeedSource(Protocol):
    """What is sent."""

    def events(self) -> AsyncIterator[bytes]:
        """What goes out, piece by piece, as server-sent events."""

    def close(self) -> None:
        """Give back what it holds. Idempotent."""


class FeedResponse(Response):
    """Sends a feed until it ends or the client goes. It closes the feed."""

    media_type = CONTENT_TYPE

    def __init__(self, feed: FeedSource) -> None:
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"})
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await send_until_gone(self._send(send), receive)
        finally:
            self._feed.close()

    async def _send(self, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for part in self._feed.events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_until_gone(answer: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Send an answer to its end, or until the client goes: it is cancelled then. Raises what the answer raises."""
    sending, leaving = asyncio.create_task(answer), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    with contextlib.suppress(asyncio.CancelledError):
        await sending


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
