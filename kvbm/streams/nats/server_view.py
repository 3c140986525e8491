"""A server and its stream as they are, looked at without making anything."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from kvbm.core.errors import StreamError
from kvbm.streams.nats.api import NOT_ENABLED, NS, AccountInfo, StreamInfo, request
from kvbm.streams.nats.connection import (
    JS_API,
    REMEDY,
    NatsConnection,
    NobodyError,
    RefusedError,
)
from kvbm.streams.nats.credentials import INBOX, Credentials
from kvbm.streams.nats.permissions import catalog_inbox, instance_inbox
from kvbm.streams.nats.setup import STREAM, STREAMS

_PINGS = 5


class StreamView(NamedTuple):
    """The stream of events as it is.

    Attributes:
        missing: subjects it lacks.
        max_bytes, max_messages, max_age_s: limits; -1, -1 and 0 for none.
    """

    missing: tuple[str, ...]
    bytes: int
    max_bytes: int
    max_age_s: float
    storage: str
    replicas: int
    max_messages: int = -1


class ServerView(NamedTuple):
    """What a server says of itself.

    Attributes:
        url: where, without users and passwords.
        round_trip_s: the middle one of a few.
        has_jetstream: "" when it has, for this user; else why not.
        stream: None when it is not there yet, or the user may not see it: then `unseen` says why.
        stored_bytes, may_store_bytes: of the user's account; -1 where there is no limit, or the user may not ask.
    """

    url: str
    version: str
    max_payload: int
    is_tls: bool
    round_trip_s: float
    has_jetstream: str
    stream: StreamView | None
    unseen: str
    stored_bytes: int
    may_store_bytes: int


async def look(url: str, timeout_s: float, credentials: Credentials) -> ServerView:
    """A server and its stream, which is not made if it is not there.

    Raises StreamError: no connection, or no answers allowed.
    """
    connection = await NatsConnection.open(url, timeout_s, credentials)
    try:
        async with asyncio.timeout(timeout_s):
            times = []
            for _ in range(_PINGS):
                times.append(await connection.round_trip(timeout_s))
            connection.check("")
            has_jetstream, stream, unseen = await _look_at_stream(connection, timeout_s)
            stored, most = (
                (-1, -1) if has_jetstream or connection.is_lent else await _look_at_account(connection, timeout_s)
            )
            info = connection.client.server_info
            return ServerView(
                connection.shown,
                str(info.get("version", "")),
                connection.client.max_payload,
                bool(info.get("tls_required")),
                sorted(times)[len(times) // 2],
                has_jetstream,
                stream,
                unseen,
                stored,
                most,
            )
    except TimeoutError:
        raise StreamError(
            f"NATS at {connection.shown} did not answer within {timeout_s:g} s; {REMEDY}", timeout_s=timeout_s
        ) from None
    finally:
        await connection.close()


def look_as_anybody(
    url: str, timeout_s: float, credentials: Credentials, cluster: str, instance: str
) -> tuple[ServerView, str]:
    """`look`, and whom the server takes this user for: "instance", "catalog" or "tool", for each has inboxes of its
    own.

    Raises: StreamError: no connection, or no answers allowed to any of them. ConfigError: an impossible name.
    """
    until_s = time.monotonic() + timeout_s
    first: StreamError | None = None
    grant = f"give nats.nkey_seed of a user of cluster {cluster}: an instance's with its instance.id, or the catalog's"
    for role, inbox in (
        ("catalog", catalog_inbox(cluster)),
        ("instance", instance_inbox(cluster, instance)),
        ("tool", INBOX),
    ):
        try:
            left_s = max(0.1, until_s - time.monotonic())
            return asyncio.run(look(url, left_s, credentials._replace(inbox=inbox, grant=grant))), role
        except StreamError as error:
            first = first or error
            if "refuses" not in str(error):
                break  # it is not the inbox
    assert first is not None
    raise first


async def _look_at_stream(connection: NatsConnection, timeout_s: float) -> tuple[str, StreamView | None, str]:
    """Why there is no JetStream, the stream, and why it is not seen."""
    asked = f"{JS_API}.STREAM.INFO.{STREAM}"
    try:
        info = await request(connection, asked, {}, StreamInfo, timeout_s)
        if info.error is not None and info.error.err_code == NOT_ENABLED:
            connection.is_lent = True
            try:
                info = await request(connection, asked, {}, StreamInfo, timeout_s)
            except (NobodyError, RefusedError):
                return "JetStream is not enabled for the user's account", None, ""
    except NobodyError:
        return "the server runs without JetStream", None, ""
    except RefusedError as error:
        return "", None, str(error)
    if info.error is not None:
        return "", None, "" if info.error.code == 404 else info.error.description
    config = info.config
    missing = tuple(subject for subject in STREAMS[STREAM]["subjects"] if subject not in config.subjects)
    most = config.max_msgs if config.discard == "old" else -1
    view = StreamView(
        missing, info.state.bytes, config.max_bytes, config.max_age / NS, config.storage, config.num_replicas, most
    )
    return "", view, ""


async def _look_at_account(connection: NatsConnection, timeout_s: float) -> tuple[int, int]:
    try:
        account = await request(connection, f"{JS_API}.INFO", {}, AccountInfo, timeout_s)
    except RefusedError:
        return -1, -1
    return (-1, -1) if account.error is not None else (account.storage, account.limits.max_storage)
