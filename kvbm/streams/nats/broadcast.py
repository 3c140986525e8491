"""Listens to subjects that no stream keeps: asks and notices for an instance, samples for whoever wants them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from nats.aio.msg import Msg

from kvbm.core.errors import StreamError
from kvbm.safe_log import RateLimitedLog, SafeLog
from kvbm.streams.access_samples import refused
from kvbm.streams.base import AccessSample, Notice, subject_names
from kvbm.streams.nats.shared import RECONNECT_FIRST_S, RECONNECT_MOST_S, SharedConnection

log = SafeLog()
refusals = RateLimitedLog(most=20)  # whoever may tell something can tell any number of things that are none

LISTEN_WAIT_S = 30.0  # for a connection

Word = TypeVar("Word", AccessSample, Notice)


async def listen(connections: SharedConnection, subject: str, kept: int, reconnects: bool = True) -> AsyncIterator[Msg]:
    """What comes on a subject from now on; who asks is answered. Raises StreamError: the server refuses."""
    wake = asyncio.Event()
    ready: deque[Msg] = deque(maxlen=kept)

    async def take(message: Msg) -> None:
        ready.append(message)
        wake.set()
        if message.reply:
            try:
                await connection.send(message.reply, b"")
            except StreamError as error:
                log.debug("stream.answer_failed", subject=subject, why=str(error))

    wait_s = RECONNECT_FIRST_S
    while not connections.is_closed:
        try:
            connection = await connections.renewed(LISTEN_WAIT_S) if reconnects else connections.now
            subscription = await connection.subscribe(subject, take)
        except (StreamError, TimeoutError) as error:
            if not reconnects:
                return
            log.debug("stream.subject_unreachable", subject=subject, why=str(error))
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, RECONNECT_MOST_S)
            continue
        wait_s = RECONNECT_FIRST_S
        connection.wakes.add(wake)
        try:
            while connection.is_open:
                while ready:
                    yield ready.popleft()
                connection.check_subscribed(subject)
                wake.clear()
                if connection.is_open:
                    await wake.wait()
        finally:
            connection.wakes.discard(wake)
            await connection.unsubscribe(subscription)
        if not reconnects:
            return


def word_in(message: Msg, kind: type[Word]) -> Word | None:
    """The sample or notice of a message; None, with a warning, when it is none, or another instance's."""
    try:
        word = msgspec.msgpack.decode(message.data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        refusals.warn("stream.word_refused", subject=message.subject, why=str(error))
        return None
    if subject_names(message.subject) != (word.cluster, word.instance):
        refusals.warn("stream.word_refused", subject=message.subject, why=f"it is of instance {word.instance!r}")
        return None
    if why := _refused(word):
        refusals.warn("stream.word_refused", subject=message.subject, why=why)
        return None
    return word


def _refused(word: AccessSample | Notice) -> str:
    """Why a word counts for nothing; "" when it counts."""
    return refused(word) if isinstance(word, AccessSample) else ""
