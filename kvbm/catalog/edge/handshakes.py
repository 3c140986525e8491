"""TLS handshakes, so many at a time: each takes some 100 KB before anybody has said who asks, and what was taken once
stays the process's.

Who has no turn waits in the socket, which costs nothing. Turns go to the address that has fewest; while somebody waits,
a handshake that takes long ends, first of the address that has most.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MOST = 128
SLOW_S = 0.75  # less than between two looks, so that each look ends those that began at the one before


class Handshakes:
    """Turns for handshakes. Belongs to one asyncio loop."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._active: dict[
            str, dict[asyncio.Future[None], tuple[float, Callable[[], None]]]
        ] = {}  # in order of their begin
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def ask(self, peer: str) -> asyncio.Future[None]:
        """Ask for a turn, which is there once the future is done. Who wants it no more cancels it."""
        own: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(own)
        self._serve()
        return own

    @asynccontextmanager
    async def turn(self, peer: str, own: asyncio.Future[None], end: Callable[[], None]) -> AsyncIterator[None]:
        """Wait for a turn that was asked for, and hold it during one handshake.

        Args:
            end: ends the handshake, where it takes long and others wait.
        """
        try:
            await own
            self._active[peer][own] = (self._clock(), end)
            yield
        finally:
            if own.done() and not own.cancelled():
                self._count -= 1
                self._drop(peer, own)
            self._serve()

    def look(self) -> int:
        """End handshakes that take long, as many as are waited for. Returns how many."""
        wanted = sum(not own.done() for waiting in self._waiting.values() for own in waiting)
        now_s = self._clock()
        slow = [
            (len(active), -since_s, end)
            for active in self._active.values()
            for since_s, end in active.values()
            if now_s >= since_s + SLOW_S
        ]
        slow.sort(key=lambda one: one[:2], reverse=True)
        for _, _, end in slow[:wanted]:
            end()
        return min(wanted, len(slow))

    def _serve(self) -> None:
        """Give turns to those who wait."""
        while self._count < self._most and self._waiting:
            peer = min(self._waiting, key=lambda one: len(self._active.get(one, ())))
            waiting = self._waiting[peer]
            own = waiting.popleft()
            if not waiting:
                del self._waiting[peer]
            if not own.done():
                self._count += 1
                self._active.setdefault(peer, {})[own] = (self._clock(), _nothing)
                own.set_result(None)

    def _drop(self, peer: str, own: asyncio.Future[None]) -> None:
        active = self._active.get(peer, {})
        active.pop(own, None)
        if not active:
            self._active.pop(peer, None)


def _nothing() -> None:
    """Until its turn has begun there is nothing to end."""
