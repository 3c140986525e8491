"""The connection that the readers of one stream share: made anew when it was lost."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from kvbm.core.errors import StreamError
from kvbm.safe_log import SafeLog
from kvbm.streams.nats.connection import NatsConnection, shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.setup import StreamOptions, open_ready

log = SafeLog()

RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 0.5  # a cluster's new leader is found soon after it was chosen


class Closable(Protocol):
    """What is to be closed with the connection."""

    async def close(self) -> None:
        """Give back what it holds. Idempotent."""


class Pauses:
    """Waits before what was in vain is tried again: twice as long each time, until something comes of it."""

    def __init__(self) -> None:
        self._next_s = RECONNECT_FIRST_S

    async def wait(self, most_s: float) -> None:
        """One pause."""
        await asyncio.sleep(min(most_s, self._next_s * random.uniform(0.5, 1.0)))
        self._next_s = min(2 * self._next_s, RECONNECT_MOST_S)

    def end(self) -> None:
        """Something has come of it."""
        self._next_s = RECONNECT_FIRST_S


class SharedConnection:
    """One connection at a time, for all who use a stream.

    Attributes:
        now: the last one made; it may be lost.
        options: how streams are opened.
        credentials: of each connection.
    """

    def __init__(self, url: str, first: NatsConnection, options: StreamOptions, credentials: Credentials) -> None:
        self.url = url
        self.now = first
        self.options = options
        self.is_closed = False
        self.credentials = credentials
        self._renewing = asyncio.Lock()
        self._users: set[Closable] = set()

    async def renewed(self, timeout_s: float) -> NatsConnection:
        """The connection, made anew if it was lost. Raises StreamError, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            async with self._renewing:
                self._check_open()
                if not self.now.is_open:
                    await self.now.close()
                    self.now = await open_ready(self.url, timeout_s, self.options, self.credentials)
                    try:
                        self._check_open()
                    except StreamError:
                        await self.now.close()  # it was made for nobody
                        raise
                    log.info("stream.reconnected", server=self.now.shown)
                return self.now

    def add_user(self, user: Closable) -> None:
        """Have it closed with the connection."""
        self._users.add(user)

    def remove_user(self, user: Closable) -> None:
        """Forget it."""
        self._users.discard(user)

    async def close(self) -> None:
        """Close the connection, and first its users; no other is made. Idempotent."""
        self.is_closed = True
        for user in tuple(self._users):
            await user.close()
        await self.now.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise StreamError(f"the stream at {shown(self.url)} is closed")
