"""Questions of one subscription: a few are answered as they are read, the rest wait their turn, and too many are
dropped.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kvbm.streams.base import CatalogAsk
from kvbm.streams.nats.asks import _IN_A_ROW, _MOST_WAITING, _Taker

SUBJECT = "kvbm.v1.ask.c.any.lookup"


class Site:
    """Who answers, and a connection that takes what it is given."""

    def __init__(self, is_short: bool = True, is_flowing: bool = True) -> None:
        self.is_short, self.dropped = is_short, 0
        self.at_once_: list[bytes] = []
        self.answered: list[bytes] = []
        self.kinds: set[str] = set()
        self.client = SimpleNamespace(is_flowing=is_flowing, max_payload=1 << 20)

    def note_dropped(self, subject: str) -> None:
        self.dropped += 1

    def at_once(self, line: object, ask: CatalogAsk) -> bool:
        if self.is_short:
            self.at_once_.append(ask.body)
            self.answered.append(ask.body)
            self.kinds.add(ask.kind)
        return self.is_short

    async def take(self, line: object, ask: CatalogAsk) -> None:
        self.answered.append(ask.body)


def taker(site: Any) -> _Taker:
    return _Taker(site, site, site)


def bodies(count: int) -> list[bytes]:
    return [b"%d" % at for at in range(count)]


def test_a_few_are_answered_in_the_call_and_the_rest_afterwards_in_order() -> None:
    async def run() -> None:
        site = Site()
        questions = taker(site)
        for body in bodies(3 * _IN_A_ROW):
            questions.on_message(SUBJECT, "_INBOX.a", body, b"")
        assert site.answered == bodies(_IN_A_ROW)
        await questions.end()
        assert site.answered == bodies(3 * _IN_A_ROW)
        await asyncio.sleep(0)  # the next turn of the loop
        questions.on_message(SUBJECT, "_INBOX.a", b"later", b"NATS/1.0\r\nContent-Type: x\r\n\r\n")
        assert site.at_once_[-1] == b"later"
        assert "x" in site.kinds

    asyncio.run(run())


def test_while_bytes_are_unsent_or_a_question_is_long_none_is_answered_in_the_call() -> None:
    async def run() -> None:
        for site in (Site(is_flowing=False), Site(is_short=False)):
            questions = taker(site)
            questions.on_message(SUBJECT, "_INBOX.a", b"q", b"")
            assert not site.answered
            await questions.end()
            assert site.answered == [b"q"]

    asyncio.run(run())


def test_too_many_that_wait_are_dropped_and_only_inboxes_are_answered() -> None:
    async def run() -> None:
        site = Site(is_short=False)
        questions = taker(site)
        questions.on_message(SUBJECT, "kvbm.v1.events.c.i", b"no inbox", b"")
        for body in bodies(_MOST_WAITING + 3):
            questions.on_message(SUBJECT, "_INBOX.a", body, b"")
        assert site.dropped == 3
        await questions.end()
        assert site.answered == bodies(_MOST_WAITING)

    asyncio.run(run())
