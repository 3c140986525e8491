"""Questions to the catalog from NATS, on a connection of their own: a flood of them keeps no events waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from functools import lru_cache

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvbm.core.asks import GROUP, JSON_TYPE, STATUS_HEADER, TYPE_HEADER, caller_and_verb
from kvbm.safe_log import SafeLog
from kvbm.streams.base import AskTaker, CatalogAsk
from kvbm.streams.nats.connection import NatsConnection
from kvbm.streams.nats.credentials import INBOX, Credentials
from kvbm.streams.nats.headers import HEADERS_BEGIN, MessageHeaders
from kvbm.telemetry.traceparent import NAME as TRACEPARENT

log = SafeLog()

_MOST_WAITING = 1024  # questions of one caller that were read and not looked at; more are dropped, and time out
_WAITING_BYTES = 4 << 20  # of these, beside one message of the largest size
_HEADER_BYTES = 256
_IN_A_ROW = 16  # questions of one caller that are answered before others get a turn
_REPLIES = (f"{INBOX}.", "_R_.")  # subjects of inboxes; the server makes the second for an asker of another account


class NatsAskLine:
    """An `AskLine`. One asyncio loop."""

    def __init__(self, connection: NatsConnection, taker: AskTaker) -> None:
        """Prefer `NatsAskLine.open`."""
        self._connection, self._taker = connection, taker
        self._subscriptions: dict[str, tuple[Subscription, _Taker]] = {}

    @classmethod
    async def open(cls, url: str, credentials: Credentials, taker: AskTaker, timeout_s: float) -> NatsAskLine:
        """Connect. Raises StreamError."""
        return cls(await NatsConnection.open(url, timeout_s, credentials), taker)

    @property
    def is_open(self) -> bool:
        """See `AskLine.is_open`."""
        return self._connection.is_open

    @property
    def max_answer_bytes(self) -> int:
        """See `AskLine.max_answer_bytes`."""
        return max(1, self._connection.client.max_payload - _HEADER_BYTES)

    async def listen(self, subjects: Collection[str]) -> None:
        """See `AskLine.listen`."""
        for subject in self._subscriptions.keys() - set(subjects):
            subscription, questions = self._subscriptions.pop(subject)
            await self._connection.unsubscribe(subscription)
            questions.close()
        for subject in set(subjects) - self._subscriptions.keys():
            questions = _Taker(self, self._connection, self._taker)
            subscription = await self._connection.subscribe_directly(subject, questions, GROUP, questions.take_early)
            self._subscriptions[subject] = (subscription, questions)
        for subject in self._subscriptions:
            self._connection.check_subscribed(subject)

    async def drain(self) -> None:
        """See `AskLine.drain`."""
        while self._subscriptions:
            subscription, questions = self._subscriptions.popitem()[1]
            await self._connection.drain(subscription)
            await questions.end()

    async def answer(
        self, ask: CatalogAsk, status: int, kind: str, body: bytes, more: dict[str, str] | None = None
    ) -> None:
        """See `AskLine.answer`."""
        await self._connection.send_headed(ask.reply, _head(status, kind, tuple((more or {}).items())), body)

    def answer_now(self, ask: CatalogAsk, status: int, kind: str, body: bytes) -> None:
        """See `AskLine.answer_now`."""
        self._connection.send_headed_now(ask.reply, _head(status, kind, ()), body)

    async def close(self) -> None:
        """See `AskLine.close`."""
        for _, questions in self._subscriptions.values():
            questions.close()
        await self._connection.close()


class _Taker:
    """Takes the messages of one subscription: a few are answered as they are read; what is more waits, and lets others
    have a turn.
    """

    def __init__(self, line: NatsAskLine, connection: NatsConnection, taker: AskTaker) -> None:
        self._line, self._connection, self._taker = line, connection, taker
        self._loop = asyncio.get_running_loop()
        self._at_once = 0  # answered in this turn of the loop
        self._waiting: deque[CatalogAsk] = deque()
        self._waiting_bytes = 0
        self._working: asyncio.Task[None] | None = None  # answers those that wait, while there are any

    def on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        """One message.

        Only an inbox is answered: a question could have its answer stored as anybody's events otherwise.
        """
        if not reply.startswith(_REPLIES):
            log.debug("ask.dropped", subject=subject, reply=reply[:200])
            return
        kind, trace = JSON_TYPE, ""
        if headers.startswith(HEADERS_BEGIN):
            named = MessageHeaders(headers[len(HEADERS_BEGIN) :])
            kind, trace = named.get(TYPE_HEADER, JSON_TYPE), named.get(TRACEPARENT, "")
        ask = CatalogAsk(*caller_and_verb(subject), reply, kind, data, trace)
        if self._working is None and self._at_once < _IN_A_ROW and self._connection.client.is_flowing:
            if not self._at_once:
                self._loop.call_soon(self._begin_turn)
            self._at_once += 1
            if self._taker.at_once(self._line, ask):
                return
        self._keep(subject, ask)

    async def take_early(self, message: Msg) -> None:
        """One that has come before the server's word that it sends any."""
        headers = message.headers
        head = (
            b""
            if not headers
            else HEADERS_BEGIN + f"{TYPE_HEADER}: {headers.get(TYPE_HEADER, JSON_TYPE)}\r\n\r\n".encode()
        )
        self.on_message(message.subject, message.reply, message.data, head)

    async def end(self) -> None:
        """Answer those that wait."""
        if self._working is not None:
            await self._working

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self._waiting.clear()
        if self._working is not None:
            self._working.cancel()

    def _begin_turn(self) -> None:
        self._at_once = 0

    def _keep(self, subject: str, ask: CatalogAsk) -> None:
        most_bytes = _WAITING_BYTES + self._connection.client.max_payload
        if len(self._waiting) >= _MOST_WAITING or self._waiting_bytes + len(ask.body) > most_bytes:
            self._connection.note_dropped(subject)
            return
        self._waiting.append(ask)
        self._waiting_bytes += len(ask.body)
        if self._working is None:
            self._working = self._loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            in_a_row = 0
            while self._waiting:
                ask = self._waiting.popleft()
                self._waiting_bytes -= len(ask.body)
                try:
                    await self._taker.take(self._line, ask)
                except Exception:
                    log.exception("ask.failed", verb=ask.verb)
                in_a_row += 1
                if in_a_row % _IN_A_ROW == 0:
                    await asyncio.sleep(0)
        finally:
            self._working = None


@lru_cache(256)
def _head(status: int, kind: str, more: tuple[tuple[str, str], ...]) -> bytes:
    """The headers of an answer, as they travel."""
    headers = [(STATUS_HEADER, str(status)), *([] if kind == JSON_TYPE else [(TYPE_HEADER, kind)]), *more]
    return b"NATS/1.0\r\n%b\r\n" % "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
