"""A worker of Dynamo's: its KV events from a subject of Dynamo's own NATS, taken by a thread.

NATS keeps nothing of such a subject, so what is lost is lost: each connection begins an epoch, and so does a worker
that another one has taken the place of. No message says that a worker is gone; where it has an address for that, it is
asked each second whether it lives.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import nats
import urllib3
from nats.errors import Error as NatsError

from kvbm.safe_log import SafeLog
from kvbm.streams.foreign.dynamo import read_message
from kvbm.streams.foreign.events import ForeignEventError
from kvbm.streams.foreign.state import MAX_WAITING, EngineConnected, Input, PublishedMessage

log = SafeLog()

_ASK_S = 1.0  # between asks whether the worker lives
_AGAIN_S = 0.5  # after a connection that could not be made
_CONNECT_S = 2.0


class SubscribedWorker:
    """What a source needs of sockets. Its thread runs from `start` until `close`.

    Args:
        url: of Dynamo's NATS server. subject: that its events are published on.
        worker: Dynamo's number of the worker; 0: the only one that publishes there.
        rank: data-parallel rank that counts; None: anybody's.
        health: URL that answers 2xx while the worker lives; "" for none: then the connection counts.

    Attributes:
        is_connected: whether the connection stands, and the worker answers.
        unreadable: messages that are none of Dynamo's.
    """

    def __init__(self, url: str, subject: str, worker: int = 0, rank: int | None = None, health: str = "") -> None:
        self.is_connected = False
        self.unreadable = 0
        self._url, self._subject, self._worker, self._rank, self._health = url, subject, worker, rank, health
        self._waiting: deque[Input] = deque(maxlen=MAX_WAITING)  # beyond it the oldest go, which leaves a hole
        self._publisher: int | None = None
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(connect=1.0, read=1.0))
        self._wakes, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._end = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="kvbm-bridge-nats", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    # -- the bridge's thread -------------------------------------------------------------------------------------------

    def sockets(self) -> list[int]:
        """Those to wait for."""
        return [self._wakes]

    def receive(self, limit: int) -> Iterator[Input]:
        """What has come, up to so many."""
        with suppress(BlockingIOError):
            os.read(self._wakes, 1 << 16)
        for _ in range(limit):
            if not self._waiting:
                return
            yield self._waiting.popleft()

    def ask(self, start: int) -> None:
        """Nothing: NATS has kept nothing."""

    def end_ask(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Listen no more."""
        self._end.set()
        self._thread.join()
        os.close(self._wakes)
        os.close(self._wake_end)

    # -- its own -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        while not self._end.is_set():
            try:
                await self._one_connection()
            except (NatsError, OSError, TimeoutError) as error:
                self._remark(f"{type(error).__name__} {error}".strip())
            self.is_connected = False
            await asyncio.sleep(_AGAIN_S)

    async def _one_connection(self) -> None:
        """Listen until the connection is lost. Raises what says that there is none."""
        client = await nats.connect(
            self._url, allow_reconnect=False, connect_timeout=int(_CONNECT_S), error_cb=self._on_error
        )
        try:
            subscription = await client.subscribe(self._subject, cb=self._on_message)
            await client.flush(int(_CONNECT_S))
            self._put(EngineConnected())
            while client.is_connected and not self._end.is_set():
                self.is_connected = not self._health or await asyncio.to_thread(self._lives)
                await asyncio.to_thread(self._end.wait, _ASK_S)
            with suppress(NatsError):
                await subscription.unsubscribe()
        finally:
            with suppress(NatsError, OSError):
                await client.close()

    def _lives(self) -> bool:
        try:
            return 200 <= self._http.request("GET", self._health).status < 300
        except urllib3.exceptions.HTTPError:
            return False

    async def _on_error(self, error: Exception) -> None:
        """NATS tells of messages that it had to drop: they are a hole, and found as one."""
        self._remark(f"{type(error).__name__} {error}".strip())

    async def _on_message(self, message: Any) -> None:
        try:
            read = read_message(message.data)
        except ForeignEventError:
            self.unreadable += 1
            self._put(EngineConnected())  # it may have said that blocks are gone
            return
        if (self._worker and read.worker != self._worker) or self._rank not in (None, read.rank):
            return
        if read.publisher != self._publisher:
            if self._publisher is not None:
                self._put(EngineConnected())
            self._publisher = read.publisher
        self._put(PublishedMessage(read.sequence, read.payload))

    def _put(self, happened: Input) -> None:
        self._waiting.append(happened)
        with suppress(BlockingIOError):  # it has not looked since the last time
            os.write(self._wake_end, b"x")

    def _remark(self, why: str) -> None:
        if why != self._said and not self._end.is_set():
            self._said = why
            log.warning(
                "bridge.subscription_failed", subject=self._subject, error=why[:300], remedy="see Dynamo's NATS"
            )
