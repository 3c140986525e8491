"""The record of erasures on NATS, and what everybody answers to it: a stream of its own that keeps the last message of
each subject.

KVBM_ERASE  kvbm.v1.erase.<cluster>           what is to be erased, as `kvbm-catalog erase` writes it
            kvbm.v1.erased.<cluster>.<name>   how far an instance, a catalog or an object pool has come, by itself

Nothing in it goes by age: an instance may return after a year. What the messages say is bytes here; `kvbm.erasure` has
the words.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import msgspec

from kvbm.core.errors import StreamError
from kvbm.streams.base import ERASE_PREFIX, ERASED_PREFIX, cluster_filter, instance_subject, subject_names
from kvbm.streams.nats.api import (
    NS,
    JetStreamFault,
    ServerMessage,
    last_message,
    message_at,
    request,
    store,
    stream_info,
)
from kvbm.streams.nats.connection import JS_API, NatsConnection
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.headers import expecting
from kvbm.streams.nats.setup import ERASURES, STREAM, StreamOptions, ensure_stream, open_ready

_LOOKS = 5  # for the first message of a stream that loses some
_CONFIG: dict[str, Any] = {
    "name": ERASURES,
    "subjects": [f"{ERASE_PREFIX}.>", f"{ERASED_PREFIX}.>"],
    "retention": "limits",
    "discard": "old",
    "storage": "file",
    "max_msgs_per_subject": 1,
    "allow_direct": True,
}


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct):
    state: _Subjects = msgspec.field(default_factory=_Subjects)
    error: JetStreamFault | None = None


class EventsKept(NamedTuple):
    """What the stream of events still has.

    Attributes:
        first_ns: when its oldest message was stored; None: it is empty; 0: nobody can tell.
        max_age_s: how long it keeps one; 0: for ever.
    """

    first_ns: int | None
    max_age_s: float


class ErasureLog:
    """The erasures of one cluster. One asyncio loop; it owns its connection. Every method raises StreamError."""

    def __init__(self, connection: NatsConnection, cluster: str, timeout_s: float, replicas: int) -> None:
        self._connection, self._cluster, self._timeout_s, self._replicas = connection, cluster, timeout_s, replicas
        self._subject = record_subject(cluster)

    @classmethod
    async def open(cls, url: str, cluster: str, timeout_s: float, credentials: Credentials, replicas: int) -> Self:
        """Connect. Raises StreamError: nothing answers in time, or refuses."""
        connection = await open_ready(url, timeout_s, StreamOptions(replicas=replicas), credentials)
        return cls(connection, cluster, timeout_s, replicas)

    @property
    def is_open(self) -> bool:
        """Whether the connection stands."""
        return self._connection.is_open

    async def make(self) -> None:
        """Make the stream, unless it is there."""
        await ensure_stream(self._connection, _CONFIG | {"num_replicas": self._replicas}, self._timeout_s)

    async def record(self) -> ServerMessage | None:
        """The record; None: nothing was ever erased here."""
        return await last_message(self._connection, ERASURES, self._subject, self._timeout_s, may_lack=True)

    async def put_record(self, data: bytes, expected: int) -> int:
        """Replace the record that lies at a sequence, 0 where there is none.

        Raises FencedError: another was written meanwhile.
        """
        headers = expecting(expected, self._subject)
        return await store(self._connection, ERASURES, self._subject, data, headers, self._timeout_s)

    async def put_answer(self, name: str, data: bytes) -> None:
        """Say how far one has come."""
        subject = instance_subject(ERASED_PREFIX, self._cluster, name)
        await store(self._connection, ERASURES, subject, data, {}, self._timeout_s)

    async def answers(self) -> dict[str, bytes]:
        """The last word of everybody, by the name whose account may say it."""
        wanted = {"subjects_filter": cluster_filter(ERASED_PREFIX, self._cluster)}
        asked = f"{JS_API}.STREAM.INFO.{ERASURES}"
        info = await request(self._connection, asked, wanted, _Info, self._timeout_s)
        if info.error is not None:
            if info.error.code == 404:
                return {}
            raise StreamError(f"stream {ERASURES} at {self._connection.shown}: {info.error.description}")
        found = {}
        for subject in sorted(info.state.subjects or {}):
            last = await last_message(self._connection, ERASURES, subject, self._timeout_s)
            if last is not None:
                found[str(subject_names(subject)[1])] = last.data
        return found

    async def events_kept(self) -> EventsKept:
        """What the stream of events still has.

        Its first message may go by age before it is read; then another is the first. One that is damaged cannot be read
        at all.
        """
        for _ in range(_LOOKS):
            info = await stream_info(self._connection, STREAM, self._timeout_s)
            if not info.state.messages:
                return EventsKept(None, info.config.max_age / NS)
            first = await message_at(self._connection, STREAM, info.state.first_seq, self._timeout_s)
            if first is not None:
                return EventsKept(first.stored_ns, info.config.max_age / NS)
        return EventsKept(0, info.config.max_age / NS)

    async def close(self) -> None:
        """End the connection. Idempotent."""
        await self._connection.close()


def record_subject(cluster: str) -> str:
    """Where a cluster's record lies. Raises ConfigError: an impossible name."""
    return cluster_filter(ERASE_PREFIX, cluster).removesuffix(".>")
