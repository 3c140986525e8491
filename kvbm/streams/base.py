"""What a stream carries and how it is read. Frames travel as the bytes that were cut once; nobody encodes them again."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

import msgspec

from kvbm.core.codec import FrameBytes, decode_header
from kvbm.core.errors import ConfigError, FrameError, StreamError
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Tier

EVENTS_PREFIX = "kvbm.v1.events"
PULSE_PREFIX = "kvbm.v1.pulse"
MAX_NAME_BYTES = 255  # a frame's header has one byte for the length

_BAD_IN_NAME = re.compile(r"[\s.*>\x00-\x20\x7f]")


class Position(NamedTuple):
    """A place in an instance's stream: everything before `offset` of `epoch` is behind it. Ordered."""

    epoch: Epoch
    offset: Offset


class FrameLog(Protocol):
    """Where a publisher reads frames from: an instance's journal, on disk or in memory."""

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """The frames from `position` on, in order, at least one if there is one, else up to `limit_bytes` together.

        A frame that contains `position` counts. Epochs follow each other: after the last frame of one comes the first of the next.
        """


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's sign of life, every second; soft state that routing needs. MessagePack on the wire.

    Attributes:
        published: offset up to which its events are on the stream.
        wall_time_ns: when it was sent.
        queued_tokens: prompt tokens that wait for their prefill.
        running_requests: requests being decoded.
        free_slots: slots that can be had without evicting, by tier.
        namespaces: namespaces it has used.
    """

    instance: InstanceId
    cluster: str
    epoch: Epoch
    published: Offset
    wall_time_ns: int
    queued_tokens: int = 0
    running_requests: int = 0
    free_slots: dict[Tier, int] = {}
    namespaces: tuple[NamespaceId, ...] = ()
    stopping: bool = False


class Load(NamedTuple):
    """What an engine tells of its queue, for the heartbeat."""

    queued_tokens: int = 0
    running_requests: int = 0


class StreamMessage(NamedTuple):
    """One message as the stream keeps it.

    Attributes:
        sequence: its place in the stream of all instances, from 1; grows, with holes where a filter leaves others out.
        data: one or more whole frames of one epoch of one instance.
    """

    sequence: int
    subject: str
    data: bytes


class EventReader(Protocol):
    """Reads a stream in order. What was fetched is never fetched again, except that a replaced store is read anew."""

    @property
    def at_end(self) -> bool:
        """Whether all that was on the stream, as of the last word from it, has been fetched.

        It is a moment's truth: to know that everything before some moment was read, ask `last_sequence` after it.
        """

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """The next messages, at least one unless none came in time.

        Raises: StreamError: the stream could not be reached in time; a later call goes on where the last one ended.
        """

    async def close(self) -> None:
        """Give back what the reader holds. Idempotent."""


class EventStream(Protocol):
    """The events and pulses of all instances. Methods belong to one asyncio loop.

    All raise StreamError, in time, when the stream does not answer or refuses, and ConfigError for an impossible name.
    """

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands, as far as is known."""

    async def publish(self, cluster: str, instance: InstanceId, data: bytes, timeout_s: float = 5.0) -> int:
        """Store one message of whole frames; gives its sequence once the stream has it.

        An error leaves open whether it was stored, except for a refusal. A repeat is harmless to readers.
        """

    async def last_position(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Position | None:
        """The end of the instance's last message; None when the stream holds none."""

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        """The sequence of the oldest message kept; one more than `last_sequence` when there is none."""

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        """The sequence of the newest message; 0 before the first."""

    async def pull(self, after_sequence: int = 0, cluster: str | None = None, timeout_s: float = 5.0) -> EventReader:
        """A reader of everything after a sequence, of one cluster or of all."""

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """Replace the instance's last heartbeat. Not acknowledged: the next one follows soon."""

    def watch_pulses(self, cluster: str | None = None) -> AsyncIterator[Heartbeat]:
        """The last heartbeat of every instance, then each new one; survives a lost connection, ends with `close`."""

    async def close(self) -> None:
        """End readers and watchers and free the connection. Idempotent."""


def checked_name(what: str, name: str) -> str:
    """The name, if it can be one part of a subject. Raises ConfigError.

    Args:
        what: the setting it comes from, such as "cluster".
    """
    if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable() or _BAD_IN_NAME.search(name):
        raise ConfigError(
            f"{what} {name!r} cannot be part of a stream's subject; use 1 to {MAX_NAME_BYTES} bytes without dots, "
            "spaces, '*' and '>'"
        )
    return name


def events_subject(cluster: str, instance: str) -> str:
    """Where an instance's events go. Raises ConfigError as `checked_name`."""
    return f"{EVENTS_PREFIX}.{checked_name('cluster', cluster)}.{checked_name('instance', instance)}"


def pulse_subject(cluster: str, instance: str) -> str:
    """Where an instance's heartbeats go. Raises ConfigError as `checked_name`."""
    return f"{PULSE_PREFIX}.{checked_name('cluster', cluster)}.{checked_name('instance', instance)}"


def cluster_filter(prefix: str, cluster: str | None) -> str:
    """The subjects of one cluster, or of all. Raises ConfigError as `checked_name`."""
    return f"{prefix}.>" if cluster is None else f"{prefix}.{checked_name('cluster', cluster)}.>"


def subject_names(subject: str) -> tuple[str, InstanceId]:
    """Cluster and instance of an events or pulse subject."""
    _, cluster, instance = subject.rsplit(".", 2)
    return cluster, InstanceId(instance)


def end_of_message(data: bytes, what: str) -> Position:
    """The position after a message's last frame. Raises StreamError: it is not made of whole frames.

    Args:
        what: the message, for the error.
    """
    at = 0
    try:
        while True:
            header = decode_header(data, at)
            at += header.frame_bytes
            if at == len(data):
                return Position(header.epoch, header.next_offset)
            if at > len(data):
                raise StreamError(
                    f"{what} ends {at - len(data)} bytes before its last frame; another program writes there"
                )
    except FrameError as error:
        raise StreamError(f"{what} is not made of frames ({error}); another program writes there") from None
