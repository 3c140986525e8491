"""The protocol of NATS as nats-py reads it, but messages of some subscriptions go straight to who takes them.

nats-py puts each message into a queue and has a task of the subscription take it out: a reader of events spends more on
that than on all that follows. `messages` takes apart what comes, and gives a reader whole runs; all else is nats-py's
affair.
"""

from __future__ import annotations

from typing import Protocol

from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from kvbm.safe_log import SafeLog
from kvbm.streams.nats.messages import Delivered, NatsMessages, Run

log = SafeLog()


class Taker(Protocol):
    """Takes the messages of a subscription. It must not wait, and must bound what it keeps."""

    def on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        """Take a message. `headers`: as they came; b"" for none."""


class RunTaker(Protocol):
    """Takes what comes for a reader of a stream. It must not wait, and must bound what it keeps."""

    def on_run(self, first: int, pending: int, messages: list[Delivered]) -> None:
        """Take messages of a stream.

        Args:
            first: the consumer's count of the first; the others follow one after the other.
            pending: how many it had left after the last.
        """

    def on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        """Take a message that names no place in a stream: what the server says of a request."""


class DirectParser(Parser):
    """Reads what a server sends. One asyncio loop.

    Args:
        messages: takes it apart.
    """

    def __init__(self, client: Client, messages: NatsMessages) -> None:
        self._takers: dict[int, Taker | RunTaker] = {}
        self._run_takers: dict[int, RunTaker] = {}  # those of them that take runs
        self._messages = messages
        super().__init__(client)

    def give(self, subscription: int, taker: Taker) -> None:
        """Have messages of a subscription given to who takes them."""
        self._takers[subscription] = taker

    def give_runs(self, subscription: int, taker: RunTaker) -> None:
        """The same, in runs."""
        self._takers[subscription] = self._run_takers[subscription] = taker
        self._messages.watch(subscription)

    def keep(self, subscription: int) -> None:
        """Have them given no longer. Idempotent."""
        self._takers.pop(subscription, None)
        self._run_takers.pop(subscription, None)
        self._messages.forget(subscription)

    def reset(self) -> None:
        """Forget what is there of a message."""
        super().reset()
        self._messages.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take bytes as they came. Raises ProtocolError: no server sends such."""
        items, is_malformed = self._messages.take(data)
        for item in items:
            if isinstance(item, bytes):
                await super().parse(item)
                continue
            if len(item) == 4:
                self._give_run(item)
                continue
            subscription, subject, reply, headers, payload = item
            taker = self._takers.get(subscription)
            if taker is None:
                await self.nc._process_msg(subscription, subject, reply, payload, headers or None)
                continue
            try:
                taker.on_message(subject.decode(), reply.decode(), payload, headers)
            except Exception:
                log.exception("stream.message_not_taken", subject=subject)
        if is_malformed:
            raise ProtocolError("nats: no server sends such")

    def _give_run(self, run: Run) -> None:
        subscription, first, pending, messages = run
        taker = self._run_takers.get(subscription)
        if taker is None:
            return  # it has gone meanwhile
        try:
            taker.on_run(first, pending, messages)
        except Exception:
            log.exception("stream.run_not_taken", first=first, messages=len(messages))
