"""What a NATS server sends is read as nats-py reads it, however it is cut, and messages go straight to who has asked
for that.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from kvbm.assembly import NATIVE_MESSAGES
from kvbm.streams.nats.direct_parser import DirectParser
from kvbm.streams.nats.headers import fence_in, status_in
from kvbm.streams.nats.messages import Delivered, NewMessages, ReadableMessages
from tests.nats_bytes import MINE, said


class Client:
    """What a parser asks of its client, written down."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.said.append((sid, bytes(subject), bytes(reply), data, headers or b""))

    async def _process_err(self, words: str) -> None:
        self.said.append(("err", words))

    async def _process_ping(self) -> None:
        self.said.append("ping")

    async def _process_pong(self) -> None:
        self.said.append("pong")

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.said.append(("info", info))


async def read(parser: Any, data: bytes, rng: random.Random, most: int) -> None:
    at = 0
    while at < len(data):
        step = rng.randint(1, most)
        await parser.parse(data[at : at + step])
        at += step


class Taken:
    """Who takes messages of a subscription, and writes them down as nats-py would give them."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def on_run(self, first: int, pending: int, messages: list[Delivered]) -> None:
        for at, (sequence, subject, data, stored_ns, _) in enumerate(messages):
            left = pending + len(messages) - 1 - at
            self.said.append(
                (MINE, subject.encode(), b"$JS.ACK.S.C.1.%d.%d.%d.%d" % (sequence, first + at, stored_ns, left), data)
            )

    def on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        self.said.append((MINE, reply.encode(), headers))


def as_taken(said: Any) -> Any:
    """What nats-py gives, as `Taken` writes it down."""
    if not isinstance(said, tuple) or said[0] != MINE:
        return said
    sid, subject, reply, data, headers = said
    return (sid, subject, reply, data) if reply else (sid, reply, headers)


BOTH = pytest.mark.parametrize("new_messages", [ReadableMessages, NATIVE_MESSAGES], ids=["readable", "native"])


@BOTH
@pytest.mark.parametrize("seed", range(40))
def test_it_reads_what_nats_py_reads_however_it_is_cut(seed: int, new_messages: NewMessages) -> None:
    rng = random.Random(seed)
    data = b"".join(said(rng) for _ in range(60))
    theirs, ours = Client(), Client()
    direct = DirectParser(ours, new_messages())  # type: ignore[arg-type]
    direct.give_runs(MINE, Taken(ours.said))
    asyncio.run(read(Parser(theirs), data, random.Random(seed), 32768))
    asyncio.run(read(direct, data, random.Random(seed), rng.choice([1, 7, 100, 40_000])))
    assert ours.said == [as_taken(one) for one in theirs.said]
    assert len(ours.said) == 60


@BOTH
def test_who_cannot_take_a_message_does_not_end_the_connection(new_messages: NewMessages) -> None:
    client = Client()
    parser = DirectParser(client, new_messages())  # type: ignore[arg-type]

    class Broken:
        def on_run(self, first: int, pending: int, messages: list[Delivered]) -> None:
            raise RuntimeError("broken")

        def on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
            raise RuntimeError("broken")

    parser.give_runs(7, Broken())
    asyncio.run(parser.parse(b"MSG a 7 1\r\nx\r\nMSG a 7 $JS.ACK.S.C.1.1.1.1.1 1\r\nx\r\nMSG a 3 1\r\ny\r\n"))
    assert client.said == [(3, b"a", b"", b"y", b"")]


@BOTH
@pytest.mark.parametrize(
    "data",
    [
        b"MSG a\r\n",
        b"MSG a x 1\r\n",
        b"MSG a 1 2 3 4\r\n",
        b"HMSG a 1 5 2\r\nxx\r\n",
        b"HMSG a 1 -1 2\r\nxx\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 1000000000\r\n",
        b"MSG a 1 1_0\r\n",
        b"WHAT\r\n",
        b"x" * 5000,
    ],
)
def test_what_no_server_says_is_refused(data: bytes, new_messages: NewMessages) -> None:
    with pytest.raises(ProtocolError):
        asyncio.run(DirectParser(Client(), new_messages()).parse(data))  # type: ignore[arg-type]


@BOTH
def test_a_part_of_a_message_is_forgotten_with_its_connection(new_messages: NewMessages) -> None:
    client = Client()
    parser = DirectParser(client, new_messages())  # type: ignore[arg-type]

    async def run() -> None:
        await parser.parse(b"MSG a 3 1000\r\nabc")
        parser.reset()
        await parser.parse(b"PING\r\n")

    asyncio.run(run())
    assert client.said == ["ping"]


def test_a_status_is_told_from_headers() -> None:
    assert status_in(b"NATS/1.0\r\nStatus: 5\r\n\r\n") is None and status_in(b"") is None
    idle = status_in(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\nNats-Last-Stream: 9\r\n\r\n")
    assert idle == {
        "Status": "100",
        "Description": "Idle Heartbeat",
        "Nats-Last-Consumer": "7",
        "Nats-Last-Stream": "9",
    }
    assert status_in(b"NATS/1.0 503\r\n\r\n") == {"Status": "503", "Description": ""}
    fence = fence_in(b"NATS/1.0\r\nKvbm-Fence: 3:1:run\r\n\r\n")
    assert fence is not None and (fence.sequence, fence.epoch, fence.run) == (3, 1, "run")
