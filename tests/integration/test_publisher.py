"""The publisher's thread. What it decides is in tests/unit/test_publisher.py, what a real server makes of it in test_nats.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.core.errors import StreamError
from kvbm.core.fetching import Transfer
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams import publisher_reports
from kvbm.streams.base import Heartbeat, Position
from kvbm.streams.memory import MemoryLog, MemoryStream
from kvbm.streams.publisher_thread import PublisherThread
from tests.eventually import eventually
from tests.nats_fixture import PlainOwner, make_frame

ONE = InstanceId("one")


class Noting(MemoryStream):
    """A stream whose `publish` and `set_fence` may have a bug.

    Attributes:
        beats: heartbeats, oldest first.
        tries: messages and fences that met the bug, and heartbeats that were refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = self.refuses_pulses = False
        self.beats: list[Heartbeat] = []
        self.tries = 0

    async def publish(self, *args: Any, **kwargs: Any) -> int:
        """See `EventLog.publish`."""
        if self.is_broken:
            self.tries += 1
            raise TypeError("a bug")
        return await super().publish(*args, **kwargs)

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """See `Heartbeats.send_pulse`."""
        if self.refuses_pulses:
            self.tries += 1
            raise StreamError("a message of 9 bytes; it takes 8")
        self.beats.append(heartbeat)
        await super().send_pulse(heartbeat)


class Raising(PlainOwner):
    """An owner whose heartbeat raises while `is_broken`."""

    is_broken = False

    def heartbeat(self, published: Position) -> Heartbeat:
        """See `PublisherOwner.heartbeat`."""
        made = super().heartbeat(published)
        if self.is_broken:
            raise RuntimeError("a fault")
        return msgspec.structs.replace(made, transfers=(Transfer("tcp", 0, 1, 1),))


@contextmanager
def publishing(frames: MemoryLog, owner: PlainOwner, stream: MemoryStream) -> Iterator[PublisherThread]:
    """A publisher that runs."""

    async def connect(url: str, timeout_s: float) -> MemoryStream:
        return stream

    thread = PublisherThread(frames, "nats://127.0.0.1:1", "c", ONE, owner, 0.02, connect)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(1.0)


def test_a_publisher_whose_connection_fails_in_an_unforeseen_way_tries_again() -> None:
    stream: list[MemoryStream] = []
    tries: list[int] = []

    async def connect(url: str, timeout_s: float) -> MemoryStream:
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("a fault of the library")
        stream.append(MemoryStream())
        return stream[0]

    thread = PublisherThread(MemoryLog(), "nats://127.0.0.1:1", "c", ONE, PlainOwner("c"), 0.05, connect)
    with capture_logs() as logs:
        thread.start()
        try:
            eventually(lambda: "connecting fails with a bug (RuntimeError: a fault of the library)" in thread.trouble)
            eventually(lambda: stream, "it has not tried again")
            eventually(lambda: not thread.trouble, "its trouble has not passed")
        finally:
            thread.stop(1.0)
    assert [log["event"] for log in logs].count("publisher.connect_failed") == 1


def test_a_bug_in_the_sending_path_is_logged_once_and_is_trouble_until_it_passes() -> None:
    frames, stream = MemoryLog(), Noting()
    stream.is_broken = True
    frames.append(make_frame(0, instance="one"))
    with capture_logs() as logs, publishing(frames, PlainOwner("c", "one"), stream) as thread:
        eventually(lambda: stream.tries > 3, "it does not try again")
        assert "sending fails with a bug (TypeError: a bug)" in thread.trouble
        stream.is_broken = False
        eventually(lambda: thread.published == Position(Epoch(1), Offset(1)), "it does not go on")
        eventually(lambda: not thread.trouble, "its trouble has not passed")
    (logged,) = [log for log in logs if log["event"] == "publisher.send_failed"]
    assert isinstance(logged["exc_info"], TypeError)


def test_a_heartbeat_that_the_owner_cannot_make_goes_out_as_its_last_one_and_says_so() -> None:
    frames, owner, stream = MemoryLog(), Raising("c", "one"), Noting()
    with publishing(frames, owner, stream) as thread:
        eventually(lambda: stream.beats, "it sends no heartbeat")
        owner.is_broken = True
        frames.append(make_frame(0, instance="one"))
        thread.notify()
        eventually(lambda: stream.beats[-1].published == 1 and stream.beats[-1].trouble, "its heartbeats have ended")
        last = stream.beats[-1]
        assert (last.run, last.epoch) == (owner.run, owner.epoch)
        assert stream.beats[0].transfers and not last.transfers  # reads are told of once
        assert last.wall_time_ns > stream.beats[0].wall_time_ns
        assert "the manager fails to make it (RuntimeError: a fault)" in last.trouble
        assert thread.trouble == last.trouble
        owner.is_broken = False
        eventually(lambda: not stream.beats[-1].trouble, "it does not send the owner's again")
        assert not thread.trouble


def test_a_heartbeat_that_the_stream_refuses_is_trouble_until_it_takes_one() -> None:
    stream = Noting()
    stream.refuses_pulses = True
    with capture_logs() as logs, publishing(MemoryLog(), PlainOwner("c", "one"), stream) as thread:
        eventually(lambda: stream.tries > 3, "it does not try again")
        assert "the stream refuses it (a message of 9 bytes; it takes 8)" in thread.trouble
        stream.refuses_pulses = False
        eventually(lambda: not thread.trouble, "its trouble has not passed")
    assert [log["event"] for log in logs].count("publisher.pulse_refused") == 1


def test_an_owner_that_never_made_a_heartbeat_still_shows_a_sign_of_life() -> None:
    owner, stream = Raising("c", "one"), Noting()
    owner.is_broken = True
    with publishing(MemoryLog(), owner, stream):
        eventually(lambda: stream.beats, "it sends no heartbeat")
    assert {(beat.instance, beat.cluster, beat.run, beat.epoch) for beat in stream.beats} == {
        (ONE, "c", owner.run, owner.epoch)
    }


def test_a_call_of_the_owner_that_goes_on_failing_is_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_reports, "OWNER_WARNING_S", 0.0)
    owner, stream = Raising("c", "one"), Noting()
    owner.is_broken = True
    with capture_logs() as logs, publishing(MemoryLog(), owner, stream):
        eventually(lambda: [log["event"] for log in logs].count("publisher.owner_failed.heartbeat") > 1)
