"""Messages nobody should send: repeats of old ones, in any order, and poison; published by a client without a fence."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

STREAM = "KVBM"
_HEADER_BYTES = 48


class Old(NamedTuple):
    """A message the stream has kept."""

    subject: str
    data: bytes


def inject(url: str, kind: str, dice: random.Random, subjects: Sequence[str]) -> str:
    """Publish messages of one kind. Says what was done.

    Args:
        kind: "repeat" (recent ones again), "late" (old ones again), "reorder" (old ones in any order), "poison",
            "foreign".
        subjects: of the instances.
    """
    return asyncio.run(_inject(url, kind, dice, subjects))


async def _inject(url: str, kind: str, dice: random.Random, subjects: Sequence[str]) -> str:
    client = Client()
    await client.connect(url, allow_reconnect=False, connect_timeout=5)
    try:
        messages = await _messages(client, kind, dice, subjects)
        stored = 0
        for subject, data in messages:
            reply = msgspec.json.decode((await client.request(subject, data, timeout=5)).data)
            stored += "error" not in reply
        return f"{len(messages)} messages of kind {kind} sent, {stored} stored"
    except (NatsError, TimeoutError) as error:
        return f"{kind} not sent: {error!r}"
    finally:
        await client.close()


async def _messages(client: Client, kind: str, dice: random.Random, subjects: Sequence[str]) -> list[Old]:
    first, last = await _bounds(client)
    if kind == "poison":
        return [
            Old(dice.choice(subjects), await _poison(client, dice, first, last)) for _ in range(dice.randrange(1, 6))
        ]
    span = max(1, last - first)
    begin = max(first, last - 40) if kind == "repeat" else first + dice.randrange(span)
    old = [found for at in range(begin, min(begin + 25, last + 1)) if (found := await _get(client, at)) is not None]
    if kind == "reorder":
        dice.shuffle(old)
    if kind == "foreign":
        return [
            Old(dice.choice([s for s in subjects if s != one.subject] or [f"{one.subject}-ghost"]), one.data)
            for one in old
        ]
    return old


async def _poison(client: Client, dice: random.Random, first: int, last: int) -> bytes:
    found = await _get(client, dice.randrange(first, last + 1)) if last else None
    data = bytearray(found.data if found is not None else b"KVBM" + bytes(100))
    match dice.randrange(7):
        case 0:
            return b""
        case 1:
            return dice.randbytes(dice.randrange(1, 2000))
        case 2:
            return b"hello, is this the right subject?"
        case 3:  # a bit of the header or the body
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case 4:  # cut short
            del data[dice.randrange(len(data)) :]
        case 5:  # a version that is not there yet
            data[4] = 200
        case _:  # a frame, then rubbish
            data += dice.randbytes(33)
    return bytes(data)


async def _bounds(client: Client) -> tuple[int, int]:
    reply = await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"{}", timeout=5)
    state = msgspec.json.decode(reply.data).get("state", {})
    return state.get("first_seq", 0), state.get("last_seq", 0)


async def _get(client: Client, sequence: int) -> Old | None:
    asked = msgspec.json.encode({"seq": sequence})
    reply = msgspec.json.decode((await client.request(f"$JS.API.STREAM.MSG.GET.{STREAM}", asked, timeout=5)).data)
    message = reply.get("message")
    if message is None or not message["subject"].startswith("kvbm.v1.events."):
        return None
    return Old(message["subject"], base64.b64decode(message.get("data", "")))
