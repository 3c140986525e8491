"""Requests that are passed on: whoever leaves ends what is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
from starlette.requests import Request

T = TypeVar("T")


async def unless_gone(request: Request, asked: Coroutine[Any, Any, T]) -> T | None:
    """What comes of it, or None once whoever sent the request has left. Its body must have been read."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(asked), asyncio.ensure_future(left())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


def content_of(answer: httpx.Response) -> Any:
    """Its JSON, or text."""
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.json() if is_json else answer.text
