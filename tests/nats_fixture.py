"""Fixtures over a real nats-server, and frames to send through it. Import them where they are used, or in conftest.py."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from kvbm.core.codec import Frame, FrameBytes, encode_frame
from kvbm.core.events import BlocksCreated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier
from tests.servers import nats_server


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
    return f"test-{uuid.uuid4().hex[:12]}"


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
    return FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, encode_frame(frame, lambda data: 0))
