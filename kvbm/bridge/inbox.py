"""What a thread of an engine's has for the bridge's thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from kvbm.safe_log import SafeLog
from kvbm.streams.foreign.state import (
    MAX_WAITING,
    MAX_WAITING_BYTES,
    EngineConnected,
    Input,
    PublishedMessage,
)

log = SafeLog()


class Inbox:
    """What a source needs of sockets, of an engine whose messages a thread brings and which sends nothing again.

    What waits is bounded. Beyond the bound all of it goes, and the source is told of a new connection in its place:
    nothing that was held is certain any more then.

    Args:
        name: of the engine, in what is logged.
        most, most_bytes: messages that wait, and their bytes. One alone may be larger.

    Attributes:
        is_connected: whether the engine answers. Its thread writes it.
        unreadable: what has come that is none of such an engine's.
    """

    def __init__(self, name: str, most: int = MAX_WAITING, most_bytes: int = MAX_WAITING_BYTES) -> None:
        self.is_connected = False
        self.unreadable = 0
        self._name, self._most, self._most_bytes = name, most, most_bytes
        self._waiting: deque[Input] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._is_open, self._is_woken = True, False
        self._wakes, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def put(self, happened: Input) -> None:
        """One more, for which the bridge's thread wakes."""
        size = len(happened.payload) if isinstance(happened, PublishedMessage) else 0
        dropped = dropped_bytes = 0
        with self._lock:
            if not self._is_open:
                return
            if self._waiting and (len(self._waiting) >= self._most or self._bytes + size > self._most_bytes):
                dropped, dropped_bytes = len(self._waiting), self._bytes
                self._waiting.clear()
                self._waiting.append(EngineConnected())
                self._bytes = 0
            self._waiting.append(happened)
            self._bytes += size
            self._wake_locked()
        if dropped:
            remedy = "the bridge is too slow for its engines: run one for each, or give it more of a processor"
            log.warning(
                "bridge.messages_dropped", source=self._name, messages=dropped, bytes=dropped_bytes, remedy=remedy
            )

    def wake(self) -> None:
        """Have the bridge's thread look."""
        with self._lock:
            self._wake_locked()

    def _wake_locked(self) -> None:
        if self._is_open and not self._is_woken:
            self._is_woken = True
            os.write(self._wake_end, b"x")

    # -- the bridge's thread -------------------------------------------------------------------------------------------

    def sockets(self) -> list[int]:
        """Those to wait for."""
        return [self._wakes]

    def receive(self, limit: int) -> Iterator[Input]:
        """What has come, up to so many."""
        with self._lock:
            if self._is_woken and self._is_open:
                self._is_woken = False
                with suppress(BlockingIOError):
                    os.read(self._wakes, 1)
        for _ in range(limit):
            with self._lock:
                if not self._waiting:
                    return
                happened = self._waiting.popleft()
                self._bytes -= len(happened.payload) if isinstance(happened, PublishedMessage) else 0
            yield happened

    def ask(self, start: int) -> None:
        """Nothing: such an engine sends nothing again."""

    def end_ask(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Take nothing more; the engine's thread may go on. Idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._waiting.clear()
                self._bytes = 0
                os.close(self._wakes)
                os.close(self._wake_end)
