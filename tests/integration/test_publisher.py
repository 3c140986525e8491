"""The publisher's thread. What it decides is in tests/unit/test_publisher.py, what a real server makes of it in test_nats.py."""

from __future__ import annotations

from kvbm.core.ids import InstanceId
from kvbm.streams.memory import MemoryLog, MemoryStream
from kvbm.streams.publisher import PublisherThread
from tests.eventually import eventually
from tests.nats_fixture import PlainOwner

ONE = InstanceId("one")


def test_a_publisher_whose_connection_fails_in_an_unforeseen_way_tries_again() -> None:
    stream: list[MemoryStream] = []
    tries: list[int] = []

    async def connect(url: str, timeout_s: float) -> MemoryStream:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a fault of the library")
        stream.append(MemoryStream())
        return stream[0]

    thread = PublisherThread(MemoryLog(), "nats://127.0.0.1:1", "c", ONE, PlainOwner("c"), 0.05, connect)
    thread.start()
    try:
        eventually(lambda: stream, "it has not tried again")
    finally:
        thread.stop(1.0)
