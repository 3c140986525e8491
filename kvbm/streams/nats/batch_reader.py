"""Reads a stream in order by direct gets, each of which is answered by many messages: for a user who may read and
nothing else.

Who makes a consumer says where it sends, and the server sends there: so to a user who only reads none is lent. A direct
get leaves nothing on the server, and what it answers reaches the asker alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvbm.core.errors import StreamError
from kvbm.safe_log import SafeLog
from kvbm.streams.base import START, AwayError, Mark, StreamMessage, mark_of
from kvbm.streams.nats.api import message_at, ns_of, stream_info
from kvbm.streams.nats.connection import JS_API, NatsConnection, RefusedError, shown
from kvbm.streams.nats.headers import MessageHeaders, fence_in
from kvbm.streams.nats.shared import RECONNECT_FIRST_S, RECONNECT_MOST_S, Pauses, SharedConnection

log = SafeLog()

BATCH_MESSAGES = 1000
BATCH_BYTES = 8 << 20
SILENCE_S = 2.5  # a batch that says nothing for so long is asked for again
LOOK_S = 0.25  # between two looks for messages that are not there yet
ANSWER_S = 0.5  # the answer to such a look has so long, even where less is left
_OVER = ("204", "404")  # the end of a batch, and nothing after this place


class BatchRequest:
    """One request, and what it was answered. The first thing that goes wrong ends it; then another is made."""

    def __init__(self, inbox: str, after: int, wake: asyncio.Event) -> None:
        self.inbox = inbox
        self.ready: deque[StreamMessage] = deque()
        self.is_over = False
        self.pending = 0  # messages the server had left, as of its last word
        self.looked = after  # the batch has come so far
        self.why_broken = ""
        self.is_served = False
        self.heard_s = time.monotonic()
        self._wake = wake

    def take(self, message: Msg) -> None:
        """Take one answer."""
        self.heard_s = time.monotonic()
        headers = message.headers or {}
        try:
            self._take_status(headers) if "Status" in headers else self._take_message(message, headers)
        except (ValueError, StreamError) as error:
            self.why_broken = f"an answer that is none of a direct get ({error})"
        self._wake.set()

    def _take_status(self, headers: dict[str, str]) -> None:
        status = headers["Status"]
        if status in _OVER:
            self.is_over = self.is_served = True
            self.pending = int(headers.get("Nats-Num-Pending", "0")) if status != "404" else 0
        else:
            self.why_broken = f"{status} {headers.get('Description', '')}".strip()

    def _take_message(self, message: Msg, headers: dict[str, str]) -> None:
        sequence = int(headers.get("Nats-Sequence", ""))
        before = int(headers.get("Nats-Last-Sequence", "0"))  # in this batch; 0 for the first
        if sequence <= self.looked or before > self.looked:
            raise ValueError(f"message {sequence} after {before} came after {self.looked}")
        self.looked = sequence
        self.is_served = True
        self.pending = int(headers.get("Nats-Num-Pending", "0"))
        subject, stored_ns = headers.get("Nats-Subject", ""), ns_of(headers.get("Nats-Time-Stamp", ""), "a direct get")
        fence = fence_in(headers.raw) if isinstance(headers, MessageHeaders) else None
        self.ready.append(StreamMessage(sequence, subject, message.data, stored_ns, fence))

    def is_usable(self) -> bool:
        if not self.why_broken and not self.is_over and time.monotonic() - self.heard_s > SILENCE_S:
            self.why_broken = f"silent for {SILENCE_S:g} s"
        return not self.why_broken


class BatchReader:
    """An `EventReader`. It outlives connections: each new one goes on after what was fetched.

    Args:
        look_s: between two looks for messages that are not there yet.

    Attributes:
        begun: see `EventReader.begun`.
    """

    def __init__(
        self, connections: SharedConnection, name: str, subjects: tuple[str, ...], after: Mark, look_s: float = LOOK_S
    ) -> None:
        self.begun = 0
        self._connections, self._name, self._after = connections, name, after
        self._wanted = tuple(subject.removesuffix(">") for subject in subjects)
        self._created = ""  # when the stream that `_after` counts in was made
        self._wake = asyncio.Event()
        self._connection: NatsConnection | None = None
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._batch: BatchRequest | None = None
        self._asked, self._asked_s, self._look_s = 0, 0.0, look_s
        self._pauses = Pauses()
        self._is_closed = False

    @property
    def at_end(self) -> bool:
        """See `EventReader.at_end`."""
        batch = self._batch
        return batch is not None and batch.is_over and not batch.ready and batch.pending == 0

    @property
    def reached(self) -> int:
        """See `EventReader.reached`."""
        return self._after.sequence

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """See `EventReader.fetch`."""
        deadline_s = time.monotonic() + timeout_s
        wait_s = RECONNECT_FIRST_S
        while True:
            if self._is_closed:
                raise StreamError("the reader is closed")
            left_s = max(0.0, deadline_s - time.monotonic())
            self._wake.clear()
            if self._batch is not None and self._batch.ready:
                if found := self._taken(self._batch):
                    return found
                continue
            try:
                if not self._is_open() or self._batch is None or not self._batch.is_usable():
                    await self._pause_in_vain(left_s)
                    await self.begin(max(left_s, RECONNECT_FIRST_S))
                    continue
                if self._batch.is_over and self._batch.pending:
                    await self._ask(self._open_connection())
                elif self.at_end and time.monotonic() >= self._asked_s + self._look_s:  # perhaps there is more by now
                    await self.begin(max(left_s, ANSWER_S))
                    continue
            except RefusedError:
                raise
            except StreamError:
                if left_s <= wait_s:
                    raise
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, RECONNECT_MOST_S)
                continue
            if left_s <= 0:
                return []
            if self.at_end:
                await asyncio.sleep(min(left_s, max(0.0, self._asked_s + self._look_s - time.monotonic())))
                continue
            await self._pause(min(left_s, LOOK_S))

    async def _pause_in_vain(self, left_s: float) -> None:
        """Wait, if the last batch has brought nothing. Raises StreamError: there is no time left."""
        batch = self._batch
        if batch is None or not batch.why_broken or batch.is_served:
            self._pauses.end()
        elif left_s <= 0:
            raise AwayError(
                f"NATS at {shown(self._connections.url)} answers no reads of {self._name} ({batch.why_broken}); if the "
                "account is new to "
                "it, reload it once more"
            )
        else:
            await self._pauses.wait(left_s)

    def _taken(self, batch: BatchRequest) -> list[StreamMessage]:
        found = list(batch.ready)
        batch.ready.clear()
        self._after = mark_of(found[-1])
        return [message for message in found if message.subject.startswith(self._wanted)]

    async def begin(self, timeout_s: float) -> None:
        """Ask for a batch after what was fetched, on a new connection if there must be one. Raises StreamError."""
        if self._is_closed:
            raise StreamError("the reader is closed")
        if self._batch is not None and self._batch.why_broken:
            log.info(
                "stream.reader_restarted", stream=self._name, after=self._after.sequence, why=self._batch.why_broken
            )
        self._connections.add_user(self)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connections.renewed(timeout_s)
                if connection is not self._connection:
                    await self._listen(connection, timeout_s)
                await self._ask(connection)
                batch = self._batch
                while batch is not None and not batch.is_over and not batch.ready and batch.is_usable():
                    connection.check(f"{JS_API}.DIRECT.GET.{self._name}")  # a refusal is heard at once
                    await self._pause(LOOK_S)
        except TimeoutError:
            raise AwayError(
                f"no answer from NATS at {shown(self._connections.url)} within {timeout_s:g} s", timeout_s=timeout_s
            ) from None

    async def _listen(self, connection: NatsConnection, timeout_s: float) -> None:
        await self._end()
        await self._check_store(connection, timeout_s)
        self._inbox = connection.new_inbox()
        self._subscription = await connection.subscribe(f"{self._inbox}.*", self._on_message)
        connection.wakes.add(self._wake)
        self._connection = connection
        self.begun += 1

    async def check_store(self, timeout_s: float) -> None:
        """Begin anew, if the store was replaced while the connection stood. Raises StreamError."""
        await self._check_store(await self._connections.renewed(timeout_s), timeout_s)
        if self._after == START:
            self._batch = None  # it may be of the other store

    async def _check_store(self, connection: NatsConnection, timeout_s: float) -> None:
        """Begin anew when the store was replaced or has lost its end, because its sequences then name other
        messages.
        """
        info = await stream_info(connection, self._name, timeout_s)
        is_other = bool(self._created) and info.created != self._created
        is_other = is_other or info.state.last_seq < self._after.sequence
        if not is_other and self._after.fingerprint is not None:
            message = await message_at(connection, self._name, self._after.sequence, timeout_s)
            is_other = message is not None and mark_of(message) != self._after
        if is_other:
            log.warning("stream.store_replaced", stream=self._name, after=self._after.sequence)
            self._after = START
        self._created = info.created

    async def _ask(self, connection: NatsConnection) -> None:
        self._asked, self._asked_s = self._asked + 1, time.monotonic()
        self._batch = BatchRequest(f"{self._inbox}.{self._asked}", self._after.sequence, self._wake)
        wanted = {"seq": self._after.sequence + 1, "batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES}
        await connection.send(f"{JS_API}.DIRECT.GET.{self._name}", json.dumps(wanted).encode(), reply=self._batch.inbox)

    async def _on_message(self, message: Msg) -> None:
        if self._batch is not None and message.subject == self._batch.inbox:
            self._batch.take(message)

    def _is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def _open_connection(self) -> NatsConnection:
        assert self._connection is not None
        return self._connection

    async def _pause(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def close(self) -> None:
        """See `EventReader.close`."""
        self._is_closed = True
        self._connections.remove_user(self)
        self._wake.set()
        await self._end()

    async def _end(self) -> None:
        if self._connection is not None:
            self._connection.wakes.discard(self._wake)
            await self._connection.unsubscribe(self._subscription)
        self._connection = self._subscription = self._batch = None
