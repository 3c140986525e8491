"""A worker of Dynamo's: its KV events from a subject of Dynamo's own NATS, taken by a thread.

NATS keeps nothing of such a subject, so what is lost is lost: each connection begins an epoch, and so does a worker
that another one has taken the place of. No message says that a worker is gone; where it has an address for that, it is
asked each second whether it lives.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import nats
import urllib3
from nats.errors import Error as NatsError
from nats.errors import SlowConsumerError

from kvbm.bridge.asks import BoundedHttp
from kvbm.bridge.inbox import Inbox
from kvbm.safe_log import SafeLog
from kvbm.streams.foreign.dynamo import read_message
from kvbm.streams.foreign.events import ForeignEventError
from kvbm.streams.foreign.state import EngineConnected, PublishedMessage

log = SafeLog()

_ASK_S = 1.0  # between asks whether the worker lives
_AGAIN_S, _AGAIN_MOST_S = 0.5, 5.0  # after a connection that has ended, doubled while none lasts longer than the other
_PING_S, _PINGS = 2, 2  # of NATS itself; a server that leaves so many without an answer is gone
_CONNECT_S = 2.0
_LIVES_S = 1.0  # of a connection to a worker, and of the head of its answer
_CLOSE_S = 5.0


class SubscribedWorker(Inbox):
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
        super().__init__(subject)
        self._url, self._subject, self._worker, self._rank, self._health = url, subject, worker, rank, health
        self._publisher: int | None = None
        self._http = BoundedHttp(_LIVES_S, _LIVES_S, 0)
        self._end = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="kvbm-bridge-nats", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and wait a while for the thread."""
        self._end.set()
        super().close()
        if self._thread.ident is None:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            remedy = "none: it ends with its connection, or with the process"
            log.warning("bridge.thread_left", subject=self._subject, after_s=_CLOSE_S, remedy=remedy)

    def _run(self) -> None:
        again_s = _AGAIN_S
        while not self._end.is_set():
            begun_s = time.monotonic()
            try:
                asyncio.run(self._one_connection())
            except Exception as error:  # noqa: BLE001  the thread goes on: the next connection may be better
                self._remark(f"{type(error).__name__} {error}".strip())
            finally:
                self.is_connected = False
                self.wake()
            if time.monotonic() - begun_s > _AGAIN_MOST_S:
                again_s, self._said = _AGAIN_S, ""
            self._end.wait(again_s)
            again_s = min(2 * again_s, _AGAIN_MOST_S)
        self._http.close()

    async def _one_connection(self) -> None:
        """Listen until the connection is lost. Raises what says that there is none."""
        async with asyncio.timeout(2 * _CONNECT_S):
            client = await nats.connect(
                self._url,
                allow_reconnect=False,
                connect_timeout=int(_CONNECT_S),
                ping_interval=_PING_S,
                max_outstanding_pings=_PINGS,
                error_cb=self._on_error,
            )
        try:
            await client.subscribe(self._subject, cb=self._on_message)
            await client.flush(int(_CONNECT_S))
            self.put(EngineConnected())
            while client.is_connected and not self._end.is_set():
                self.is_connected = not self._health or await asyncio.to_thread(self._lives)
                await asyncio.to_thread(self._end.wait, _ASK_S)
        finally:
            with suppress(NatsError, OSError):  # a TimeoutError is one
                async with asyncio.timeout(_CONNECT_S):
                    await client.close()

    def _lives(self) -> bool:
        try:
            return 200 <= self._http.status("GET", self._health) < 300
        except (urllib3.exceptions.HTTPError, OSError, ValueError):  # also an answer that is none
            return False

    async def _on_error(self, error: Exception) -> None:
        """NATS tells of messages that it had to drop, as if a connection had been lost, and of what else went wrong."""
        if isinstance(error, SlowConsumerError):
            self.put(EngineConnected())
        self._remark(f"{type(error).__name__} {error}".strip())

    async def _on_message(self, message: Any) -> None:
        try:
            read = read_message(message.data)
        except ForeignEventError:
            self.unreadable += 1
            self.put(EngineConnected())  # it may have said that blocks are gone
            return
        if (self._worker and read.worker != self._worker) or self._rank not in (None, read.rank):
            return
        if read.publisher != self._publisher:
            if self._publisher is not None:
                self.put(EngineConnected())
            self._publisher = read.publisher
        self.put(PublishedMessage(read.sequence, read.payload))

    def _remark(self, why: str) -> None:
        if why != self._said and not self._end.is_set():
            self._said = why
            log.warning(
                "bridge.subscription_failed", subject=self._subject, error=why[:300], remedy="see Dynamo's NATS"
            )
