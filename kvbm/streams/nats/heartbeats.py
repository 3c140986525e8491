"""Heartbeats on their stream, which keeps the last one of each instance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec

from kvbm.core.errors import StreamError
from kvbm.safe_log import RateLimitedLog, SafeLog
from kvbm.streams.base import Heartbeat, StreamMessage, subject_names
from kvbm.streams.nats.reader import PULL_EXPIRES_S, NatsReader
from kvbm.streams.nats.setup import PULSE, PULSE_WAIT_S, ensure_stream
from kvbm.streams.nats.shared import RECONNECT_FIRST_S, RECONNECT_MOST_S, SharedConnection
from kvbm.streams.pulse_words import heartbeat_of

log = SafeLog()
refusals = RateLimitedLog(most=20)  # whoever may send heartbeats can send any number that are none


async def watch_heartbeats(connections: SharedConnection, subjects: tuple[str, ...]) -> AsyncIterator[Heartbeat]:
    """See `Heartbeats.watch_pulses`."""
    reader = NatsReader(connections, PULSE, subjects, None)
    wait_s = RECONNECT_FIRST_S
    try:
        while not connections.is_closed:
            try:
                messages = await reader.fetch(PULL_EXPIRES_S)
            except StreamError as error:
                log.debug("stream.pulses_unreachable", why=str(error))
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, RECONNECT_MOST_S)
                await _make_stream(connections)
                continue
            wait_s = RECONNECT_FIRST_S
            for message in messages:
                heartbeat = heartbeat_in(message)
                if heartbeat is not None:
                    yield heartbeat
    finally:
        await reader.close()


async def _make_stream(connections: SharedConnection) -> None:
    """It may not be there: a connection does not wait for it."""
    try:
        await ensure_stream(await connections.renewed(PULSE_WAIT_S), connections.options.config(PULSE), PULSE_WAIT_S)
    except (StreamError, TimeoutError) as error:
        log.debug("stream.pulses_unreachable", why=str(error))


def heartbeat_in(message: StreamMessage) -> Heartbeat | None:
    """The heartbeat of a message; None, with a warning, when it is none, or another instance's."""
    try:
        heartbeat = heartbeat_of(message.data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        refusals.warn("pulse.refused", subject=message.subject, why=str(error))
        return None
    if subject_names(message.subject) != (heartbeat.cluster, heartbeat.instance):
        refusals.warn("pulse.refused", subject=message.subject, why=f"it is of instance {heartbeat.instance!r}")
        return None
    return heartbeat
