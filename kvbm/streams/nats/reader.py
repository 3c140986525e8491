"""Reads a stream in order, by pull requests to a consumer on the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from contextlib import suppress
from typing import Any

from nats.aio.subscription import Subscription

from kvbm.core.errors import StreamError
from kvbm.safe_log import SafeLog
from kvbm.streams.base import START, AwayError, Mark, StreamMessage, mark_of
from kvbm.streams.nats.api import NS, ConsumerReply, ask_until, message_at, stream_info
from kvbm.streams.nats.connection import NatsConnection, RefusedError, shown
from kvbm.streams.nats.headers import fence_named, status_in
from kvbm.streams.nats.messages import Delivered
from kvbm.streams.nats.shared import RECONNECT_FIRST_S, RECONNECT_MOST_S, Pauses, SharedConnection

log = SafeLog()

PULL_MESSAGES = 2000
PULL_BYTES = 16 << 20
PULL_EXPIRES_S = 30
PULL_HEARTBEAT_S = 1  # so often the server says that a reader's consumer lives
SILENCE_S = 2.5 * PULL_HEARTBEAT_S
READER_IDLE_S = 60  # after this long without a request the server forgets a reader; the next fetch makes a new one


class Pull:
    """One consumer on the server, and what it has sent.

    The first thing that goes wrong ends it; then another is made.
    """

    def __init__(self, connection: NatsConnection, wake: asyncio.Event) -> None:
        self.connection = connection
        self.wake = wake
        self.inbox = connection.new_inbox()
        self.path = ""  # <stream>.<consumer>, once it exists
        self.subscription: Subscription | None = None
        self.ready: deque[StreamMessage] = deque()
        self.asked = 0  # messages that requests in flight may still bring
        self.pending = 0  # messages the server had left, as of its last word
        self.looked = 0  # the consumer has come so far, past what its filter leaves out
        self.heard_s = time.monotonic()
        self.why_broken = ""
        self.is_served = False  # the server has given it something, if only a word that it lives
        self._delivered = 0  # by the consumer's own count, which has no holes

    def on_run(self, first: int, pending: int, messages: list[Delivered]) -> None:
        """Take messages of the stream."""
        self.heard_s = time.monotonic()
        self.wake.set()
        if self.why_broken or first != self._delivered + 1:
            self._break(f"delivery {first} came after {self._delivered}")
            return
        self._delivered += len(messages)
        self.is_served = True
        self.asked -= len(messages)
        self.pending = pending
        self.ready += [
            StreamMessage(sequence, subject, data, stored_ns, None if words is None else fence_named(words))
            for sequence, subject, data, stored_ns, words in messages
        ]

    def on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        """Take the server's word on a request."""
        self.heard_s = time.monotonic()
        self.wake.set()
        status = status_in(headers) if headers and not reply else None
        if status is not None:
            self._on_status(status)
        else:
            self._break(f"a message with the reply subject {reply!r}")

    def _on_status(self, headers: dict[str, str]) -> None:
        status, words = headers["Status"], headers.get("Description", "")
        if status == "100":
            self.is_served = True
            looked = headers.get("Nats-Last-Stream", "")
            if looked.isdigit() and headers.get("Nats-Last-Consumer") == str(self._delivered):
                self.looked = int(looked)
            return
        unserved = headers.get("Nats-Pending-Messages", "")
        if status in ("404", "408", "409") and unserved.isdigit():
            self.asked -= int(unserved)  # a request ended before it was used up
            self.is_served = True
        else:
            self._break(f"{status} {words}".strip())

    def _break(self, why: str) -> None:
        self.why_broken = self.why_broken or why

    def is_usable(self) -> bool:
        if not self.connection.is_open:
            self._break("the connection is lost")
        elif self.asked > 0 and time.monotonic() - self.heard_s > SILENCE_S:
            self._break(f"silent for {SILENCE_S:g} s")
        return not self.why_broken

    async def ask_more(self) -> None:
        """Keep two requests in flight. Their sizes bound what arrives unread. Raises StreamError."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.path}"
        self.connection.check(subject)
        while self.asked + len(self.ready) <= PULL_MESSAGES:
            if self.asked <= 0:
                self.heard_s = time.monotonic()
            self.asked += PULL_MESSAGES
            request = {
                "batch": PULL_MESSAGES,
                "max_bytes": max(PULL_BYTES, 2 * self.connection.client.max_payload),
                "expires": PULL_EXPIRES_S * NS,
                "idle_heartbeat": PULL_HEARTBEAT_S * NS,
            }
            await self.connection.send(subject, json.dumps(request).encode(), reply=self.inbox)

    async def end(self) -> None:
        """Tell the server, if it still listens."""
        self.connection.wakes.discard(self.wake)
        await self.connection.unsubscribe(self.subscription)
        if not self.path:
            return
        with suppress(StreamError):  # the server forgets it by itself
            await self.connection.send(f"$JS.API.CONSUMER.DELETE.{self.path}", b"")


class NatsReader:
    """An `EventReader` by pull requests, without acks.

    It outlives connections: each new one starts after what was fetched.

    Args:
        after: where to begin; None for the last message of each subject, after a lost connection again.

    Attributes:
        begun: see `EventReader.begun`.
    """

    def __init__(self, connections: SharedConnection, name: str, subjects: tuple[str, ...], after: Mark | None) -> None:
        self.begun = 0
        self._connections = connections
        self._name = name
        self._subjects = subjects
        self._after = after
        self._created = ""  # when the stream that `_after` counts in was made
        self._wake = asyncio.Event()
        self._pull: Pull | None = None
        self._pauses = Pauses()
        self._is_closed = False

    @property
    def at_end(self) -> bool:
        """See `EventReader.at_end`."""
        pull = self._pull
        return pull is not None and not pull.why_broken and not pull.ready and pull.pending == 0

    @property
    def reached(self) -> int:
        """See `EventReader.reached`."""
        pull, after = self._pull, self._after.sequence if self._after is not None else 0
        return after if pull is None or pull.ready or pull.why_broken else max(after, pull.looked)

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """See `EventReader.fetch`."""
        deadline_s = time.monotonic() + timeout_s
        wait_s = RECONNECT_FIRST_S
        while True:
            if self._is_closed:
                raise StreamError("the reader is closed")
            left_s = max(0.0, deadline_s - time.monotonic())
            self._wake.clear()
            pull = self._pull
            if pull is not None and pull.ready:
                return await self._take(pull)
            try:
                if pull is None or not pull.is_usable():
                    if pull is not None and not pull.is_served:
                        await self._pauses.wait(left_s)
                    else:
                        self._pauses.end()
                    await self.begin(max(left_s, RECONNECT_FIRST_S))
                    continue
                await pull.ask_more()
            except RefusedError:
                raise
            except StreamError:
                if left_s <= wait_s:
                    raise
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, RECONNECT_MOST_S)
                continue
            try:
                async with asyncio.timeout(min(left_s, PULL_HEARTBEAT_S)):
                    await self._wake.wait()
            except TimeoutError:
                if time.monotonic() >= deadline_s:
                    return []

    async def _take(self, pull: Pull) -> list[StreamMessage]:
        messages = list(pull.ready)
        pull.ready.clear()
        if self._after is not None:
            self._after = mark_of(messages[-1])
        if pull.is_usable():
            try:
                await pull.ask_more()
            except StreamError as error:
                pull.why_broken = str(error)  # what was read is good; the next fetch begins anew
        return messages

    async def begin(self, timeout_s: float) -> None:
        """Make a new consumer after what was fetched. Raises StreamError."""
        if self._is_closed:
            raise StreamError("the reader is closed")
        if self._pull is not None:
            after = None if self._after is None else self._after.sequence
            log.info("stream.reader_restarted", stream=self._name, after=after, why=self._pull.why_broken)
            await self._pull.end()
            self._pull = None
        self._connections.add_user(self)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connections.renewed(timeout_s)
                await self._check_store(connection, timeout_s)
                self._pull = await self._make_pull(connection, timeout_s)
                self.begun += 1
        except TimeoutError:
            raise AwayError(
                f"no answer from NATS at {shown(self._connections.url)} within {timeout_s:g} s", timeout_s=timeout_s
            ) from None

    async def _check_store(self, connection: NatsConnection, timeout_s: float) -> None:
        """Begin anew when the store was replaced or has lost its end, because its sequences then name other
        messages.
        """
        if self._after is None:
            return
        info = await stream_info(connection, self._name, timeout_s)
        is_replaced = bool(self._created) and info.created != self._created
        is_other = is_replaced or info.state.last_seq < self._after.sequence
        if is_other or await self._is_overwritten(connection, timeout_s):
            log.warning(
                "stream.store_replaced", stream=self._name, last=info.state.last_seq, after=self._after.sequence
            )
            self._after = START
        self._created = info.created

    async def _is_overwritten(self, connection: NatsConnection, timeout_s: float) -> bool:
        """Whether another message than the one fetched last has its sequence: the store lost its end and has grown
        since.
        """
        after = self._after
        if after is None or not after.sequence or after.fingerprint is None:
            return False
        message = await message_at(connection, self._name, after.sequence, timeout_s)
        return message is not None and mark_of(message) != after

    async def _make_pull(self, connection: NatsConnection, timeout_s: float) -> Pull:
        pull = Pull(connection, self._wake)
        connection.wakes.add(self._wake)
        try:
            pull.subscription = await connection.subscribe_to_runs(pull.inbox, pull)  # what was asked for bounds it
            start: dict[str, Any] = {"deliver_policy": "all"}
            if self._after is None:
                start = {"deliver_policy": "last_per_subject"}
            elif self._after.sequence:
                start = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._after.sequence + 1}
            config = start | {
                "ack_policy": "none",
                "replay_policy": "instant",
                "filter_subjects": self._subjects,
                "inactive_threshold": READER_IDLE_S * NS,
                "mem_storage": True,
                "num_replicas": 1,
            }
            subject = f"$JS.API.CONSUMER.CREATE.{self._name}"
            request = json.dumps({"stream_name": self._name, "config": config}).encode()
            reply = await ask_until(connection, subject, request, ConsumerReply, timeout_s)
            if reply.error is not None:
                raise StreamError(
                    f"NATS at {connection.shown} refuses a reader of {self._name}: {reply.error.description}"
                )
            pull.path = f"{self._name}.{reply.name}"
            pull.pending = reply.num_pending
            await pull.ask_more()
        except BaseException:
            await pull.end()
            raise
        return pull

    async def close(self) -> None:
        """See `EventReader.close`."""
        self._is_closed = True
        self._connections.remove_user(self)
        self._wake.set()
        if self._pull is not None:
            await self._pull.end()
