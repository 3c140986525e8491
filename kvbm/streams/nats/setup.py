"""The two streams kvbm keeps on a server, and how they are made.

KVBM        kvbm.v1.events.<cluster>.<part>.<instance>   on disk, kept 24 hours, nothing can be deleted or purged
            kvbm.v1.fence.<cluster>.<part>.<instance>    who may publish the instance's events; compared at each publish
KVBM_PULSE  kvbm.v1.pulse.<cluster>.<part>.<instance>    in memory, the last of each subject
no stream   kvbm.v1.rounds.<cluster>.<instance>   requests; kvbm.v1.samples.…: told to whoever listens
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from kvbm.core.errors import StreamError
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EVENTS_PREFIX, FENCE_PREFIX, PULSE_PREFIX, AwayError
from kvbm.streams.nats.api import NOT_ENABLED, NS, StreamInfo, request
from kvbm.streams.nats.connection import JS_API, NatsConnection
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.messages import NewMessages, ReadableMessages

log = SafeLog()

STREAM = "KVBM"
PULSE = "KVBM_PULSE"
ERASURES = "KVBM_ERASE"  # made by whoever erases and by catalogs: `kvbm/erasure/stream.py`
MAX_AGE_S = 24 * 3600
PULSE_WAIT_S = 1.5  # to see the stream of heartbeats; the events do not wait for it any longer

_NO_CLUSTER = 10074  # more than one replica wanted of a server that is alone
_NAME_TAKEN = 10058  # by a stream with another configuration

STREAMS: dict[str, dict[str, Any]] = {
    STREAM: {
        "name": STREAM,
        "subjects": [f"{EVENTS_PREFIX}.>", f"{FENCE_PREFIX}.>"],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "max_age": MAX_AGE_S * NS,
        "deny_delete": True,
        "deny_purge": True,
        "allow_direct": True,
    },
    PULSE: {
        "name": PULSE,
        "subjects": [f"{PULSE_PREFIX}.>"],
        "retention": "limits",
        "discard": "old",
        "storage": "memory",
        "max_age": MAX_AGE_S * NS,
        "max_msgs_per_subject": 1,
        "allow_direct": True,
    },
}


class StreamOptions(NamedTuple):
    """How streams are opened, and made where they are not there yet; see `NatsStream.connect`.

    Attributes:
        makes: false for who only reads: a stream that is not there is an error.
        new_messages: makes what takes apart what comes on a connection.
    """

    max_bytes: int = -1
    replicas: int = 1
    makes: bool = True
    new_messages: NewMessages = ReadableMessages

    def config(self, name: str) -> dict[str, Any]:
        """A stream's whole configuration."""
        limits = {"max_bytes": self.max_bytes} if name == STREAM else {}
        return STREAMS[name] | limits | {"num_replicas": self.replicas}


async def open_ready(url: str, timeout_s: float, options: StreamOptions, credentials: Credentials) -> NatsConnection:
    """A connection to a server that has both streams. Raises StreamError: nothing answers in time, or refuses."""
    deadline_s = time.monotonic() + timeout_s
    connection = await NatsConnection.open(url, timeout_s, credentials, options.new_messages)
    try:
        async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
            info = await request(connection, f"{JS_API}.STREAM.INFO.{STREAM}", {}, StreamInfo, timeout_s)
            connection.is_lent = info.error is not None and info.error.err_code == NOT_ENABLED
            if not options.makes:
                await _check_readable(connection, timeout_s)
                return connection
            events = await ensure_stream(connection, options.config(STREAM), timeout_s)
            # the leader of a replicated stream refuses a message that names a fence while another that names it is
            # under way
            connection.most_in_flight = 1 if events.config.num_replicas > 1 else 0
            try:
                await ensure_stream(connection, options.config(PULSE), timeout_s, PULSE_WAIT_S)
            except AwayError as error:  # its node is down: events go on without heartbeats
                log.warning("stream.pulses_away", server=connection.shown, why=str(error))
    except TimeoutError:
        await connection.close()
        raise AwayError(
            f"JetStream at {connection.shown} did not answer within {timeout_s:g} s", timeout_s=timeout_s
        ) from None
    except BaseException:
        await connection.close()
        raise
    return connection


async def _check_readable(connection: NatsConnection, timeout_s: float) -> None:
    info = await request(connection, f"{JS_API}.STREAM.INFO.{STREAM}", {}, StreamInfo, timeout_s)
    if info.error is not None:
        raise StreamError(f"the stream at {connection.shown} holds no events: {info.error.description}")


async def ensure_stream(
    connection: NatsConnection, config: dict[str, Any], timeout_s: float, look_s: float | None = None
) -> StreamInfo:
    """Make a stream, unless it is there: then it keeps its limits, which are its operator's. Gives it as it is now.

    Args:
        look_s: how long to wait for the answer whether it is there; None: `timeout_s`.
    Raises: StreamError: it cannot be made, or a stream of that name serves something else.
    """
    name = config["name"]
    info = await request(connection, f"$JS.API.STREAM.INFO.{name}", {}, StreamInfo, look_s or timeout_s)
    if info.error is not None and info.error.code == 404:
        info = await request(connection, f"$JS.API.STREAM.CREATE.{name}", config, StreamInfo, timeout_s)
        if info.error is not None and info.error.err_code == _NAME_TAKEN:  # another process has made it meanwhile
            info = await request(connection, f"$JS.API.STREAM.INFO.{name}", {}, StreamInfo, timeout_s)
    if info.error is not None:
        remedy = ""
        if info.error.err_code == _NO_CLUSTER:
            remedy = (
                f"; nats.replicas is {config['num_replicas']}: set it to 1, or run a cluster of at least so many "
                "servers"
            )
        raise StreamError(f"stream {name} cannot be had at {connection.shown}: {info.error.description}{remedy}")
    most = config.get("max_msgs_per_subject", -1)
    if not set(config["subjects"]) <= set(info.config.subjects) or info.config.max_msgs_per_subject != most:
        raise StreamError(
            f"stream {name} at {connection.shown} has subjects {info.config.subjects} and keeps "
            f"{info.config.max_msgs_per_subject} "
            f"messages a subject; it needs {', '.join(config['subjects'])} and {most}: rename the other stream"
        )
    return info
