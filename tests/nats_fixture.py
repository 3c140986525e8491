"""Fixtures over a real nats-server, and frames to send through it.

Import them where they are used, or in conftest.py.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvbm.core.codec import Frame, FrameBytes, encode_frame
from kvbm.core.events import BlocksCreated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.streams.base import AccessSample, EventReader, EventStream, Heartbeat, Position, StreamMessage, StreamState
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from tests.servers import nats_server

WAIT_S = 60.0  # for what is sure to come


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """The URL of one nats-server for the session; each test uses a `cluster` of its own in it."""
    with nats_server() as server:
        yield server.url


@pytest.fixture
def fresh_nats() -> Iterator[str]:
    """The URL of a nats-server of the test's own."""
    with nats_server() as server:
        yield server.url


@pytest.fixture
def cluster() -> str:
    """A cluster name no other test uses."""
    return new_cluster("test")


def new_cluster(word: str) -> str:
    """A cluster name that nobody uses. Workers that take tests from each other make a module's fixture again."""
    return f"{word}-{uuid.uuid4().hex[:12]}"


_ANSWERED = (
    "publish",
    "tail",
    "fence",
    "set_fence",
    "state",
    "first_sequence",
    "last_sequence",
    "message",
    "pull",
    "last_pulse",
    "ask_snapshot",
)
Stream = TypeVar("Stream", bound=EventStream)


def patient(stream: Stream) -> Stream:
    """A stream whose answers are waited for as long as a busy machine may take, where a caller names no time."""
    for name in _ANSWERED:
        setattr(stream, name, _patient(getattr(stream, name)))
    return stream


def _patient(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(method)

    def ask(*args: Any, **named: Any) -> Any:
        bound = parameters.bind(*args, **named)
        bound.arguments.setdefault("timeout_s", WAIT_S)
        return method(*bound.args, **bound.kwargs)

    return ask


def started(folder: Path, port: int = -1, settings: str = "") -> EmbeddedServer:
    """A nats-server on a folder.

    Args:
        port: of `free_port`, for a server that is started again there; -1: any.
    """
    return EmbeddedServer.start(folder, port=port, settings=settings, timeout_s=WAIT_S)


class PlainOwner:
    """A `PublisherOwner` that writes down what it is told.

    Attributes:
        beats, fenced, asked, states, positions: what came, oldest first.
        takes_epochs: begin a later epoch when told of a silent one.
    """

    def __init__(
        self, cluster: str, instance: str = "i", epoch: int = 1, run: str = "", takes_epochs: bool = True
    ) -> None:
        self.run = run or uuid.uuid4().hex
        self.epoch = Epoch(epoch)
        self.takes_epochs = takes_epochs
        self.beats: list[Position] = []
        self.fenced: list[Epoch] = []
        self.asked = 0
        self.states: list[StreamState] = []
        self.positions: list[Position] = []
        self._cluster = cluster
        self._instance = InstanceId(instance)

    def heartbeat(self, published: Position) -> Heartbeat:
        """See `PublisherOwner.heartbeat`."""
        self.beats.append(published)
        return Heartbeat(
            instance=self._instance,
            cluster=self._cluster,
            epoch=self.epoch,
            published=published.offset,
            wall_time_ns=time.time_ns(),
            run=self.run,
        )

    def on_published(self, position: Position) -> None:
        """See `PublisherOwner.on_published`."""
        self.positions.append(position)

    def on_fenced(self, newer: Epoch) -> None:
        """See `PublisherOwner.on_fenced`."""
        self.fenced.append(newer)
        if self.takes_epochs:
            self.epoch = Epoch(newer + 1)

    def on_snapshot_asked(self) -> None:
        """See `PublisherOwner.on_snapshot_asked`."""
        self.asked += 1

    def on_stream_state(self, state: StreamState) -> None:
        """See `PublisherOwner.on_stream_state`."""
        self.states.append(state)

    def take_samples(self) -> list[AccessSample]:
        """See `PublisherOwner.take_samples`."""
        return []

    def is_silent(self) -> bool:
        """See `PublisherOwner.is_silent`."""
        return False


def make_frame(first: int, events: int = 1, epoch: int = 1, instance: str = "i", blocks: int = 1) -> FrameBytes:
    """A frame of `events` creations of `blocks` blocks each; the bytes follow from the arguments."""
    made = tuple(
        BlocksCreated(
            namespace=NamespaceId(bytes(HASH_BYTES)),
            tier=Tier.HOST,
            hashes=b"".join((at * blocks + block + 1).to_bytes(HASH_BYTES, "little") for block in range(blocks)),
        )
        for at in range(first, first + events)
    )
    frame = Frame(
        instance=InstanceId(instance),
        epoch=Epoch(epoch),
        first_offset=Offset(first),
        wall_time_ns=0,
        digest=0,
        events=made,
    )
    return FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, encode_frame(frame))


def publish(url: str, messages: list[tuple[str, bytes]], cluster: str = "c") -> list[int]:
    """Publish in order; gives the sequences."""

    async def work() -> list[int]:
        stream = patient(await NatsStream.connect(url, WAIT_S))
        try:
            return [await stream.publish(cluster, InstanceId(name), data) for name, data in messages]
        finally:
            await stream.close()

    return asyncio.run(work())


def messages(frames: list[Frame], per_message: int = 1) -> list[tuple[str, bytes]]:
    """Frames as messages of one epoch each."""
    made: list[tuple[str, bytes]] = []
    run: list[Frame] = []
    for frame in [*frames, None]:
        if run and (frame is None or len(run) == per_message or frame.epoch != run[0].epoch):
            made.append((run[0].instance, b"".join(encode_frame(one) for one in run)))
            run = []
        if frame is not None:
            run.append(frame)
    return made


async def fetch_for_ever(reader: EventReader) -> None:
    """Until it raises: an end that is not seen within one wait is seen within a later one."""
    while True:
        await reader.fetch(0.3)


async def fetched(reader: EventReader, count: int, wait_s: float = WAIT_S) -> list[StreamMessage]:
    """The next messages, so many of them however many come at once."""
    found: list[StreamMessage] = []
    async with asyncio.timeout(wait_s):
        while len(found) < count:
            found += await reader.fetch(wait_s)
    return found
