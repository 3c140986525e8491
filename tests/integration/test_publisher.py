"""The publisher's thread.

What it decides is in tests/unit/test_publisher.py, what a real server makes of it in test_nats.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from kvbm.core.errors import StreamError
from kvbm.core.fetching import Transfer
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import Fence, Heartbeat, Notice, Position
from kvbm.streams.memory import MemoryLog, MemoryStream
from kvbm.streams.publisher import reports as publisher_reports
from kvbm.streams.publisher import requests as publisher_requests
from kvbm.streams.publisher import thread as publisher_thread
from kvbm.streams.publisher.thread import PublisherThread
from tests.eventually import WAIT_S, eventually
from tests.nats_fixture import PlainOwner, make_frame

ONE = InstanceId("one")


class Noting(MemoryStream):
    """A stream whose `publish` and `set_fence` may have a bug.

    Attributes:
        beats: heartbeats, oldest first.
        tries: messages and fences that met the bug, and heartbeats that were refused.
        pulse_error: what refuses heartbeats; None: nothing.
        asks_errors: watches of snapshot requests that still fail. asks: those that went.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.pulse_error: Exception | None = None
        self.beats: list[Heartbeat] = []
        self.tries = 0
        self.asks_errors = self.asks = 0

    async def publish(self, *args: Any, **kwargs: Any) -> int:
        """See `EventLog.publish`."""
        if self.is_broken:
            self.tries += 1
            raise TypeError("a bug")
        return await super().publish(*args, **kwargs)

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """See `Heartbeats.send_pulse`."""
        if self.pulse_error is not None:
            self.tries += 1
            raise self.pulse_error
        self.beats.append(heartbeat)
        await super().send_pulse(heartbeat)

    async def watch_snapshot_asks(self, cluster: str, instance: InstanceId) -> AsyncIterator[Notice | None]:
        """See `Broadcast.watch_snapshot_asks`."""
        if self.asks_errors:
            self.asks_errors -= 1
            raise MemoryError
        self.asks += 1
        async for notice in super().watch_snapshot_asks(cluster, instance):
            yield notice


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
        stream._is_closed = False  # it is connected to anew
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
    stream.pulse_error = StreamError("a message of 9 bytes; it takes 8")
    with capture_logs() as logs, publishing(MemoryLog(), PlainOwner("c", "one"), stream) as thread:
        eventually(lambda: stream.tries > 3, "it does not try again")
        assert "the stream refuses it (a message of 9 bytes; it takes 8)" in thread.trouble
        stream.pulse_error = None
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


class Faulty(PlainOwner):
    """An owner that cannot even say its epoch while `is_broken`."""

    is_broken = False
    _epoch = Epoch(0)

    @property
    def epoch(self) -> Epoch:  # type: ignore[override]
        """See `PublisherOwner.epoch`."""
        if self.is_broken:
            raise MemoryError("a fault")
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: Epoch) -> None:
        self._epoch = epoch


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed is tried again at once."""
    monkeypatch.setattr(publisher_thread, "_AGAIN_S", 0.001)
    monkeypatch.setattr(publisher_requests, "ASKS_AGAIN_S", 0.001)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_turn_that_fails_in_an_unforeseen_way_ends_the_connection_and_not_the_publisher(is_heard: bool) -> None:
    frames, owner, stream = MemoryLog(), Faulty("c", "one"), Noting()
    if not is_heard:  # nor does a remark on it that cannot be made
        structlog.configure(processors=[lambda *_: 1 / 0])
    caught: Any = capture_logs() if is_heard else nullcontext([])
    with caught as logs, publishing(frames, owner, stream) as thread:
        eventually(lambda: stream.beats, "it sends no heartbeat")
        owner.is_broken = True
        eventually(lambda: "the publisher fails with a bug (MemoryError: a fault)" in thread.trouble)
        frames.append(make_frame(0, instance="one"))
        thread.notify()
        before = len(stream.beats)
        owner.is_broken = False
        eventually(lambda: thread.published == Position(Epoch(1), Offset(1)), "it does not go on")
        eventually(lambda: len(stream.beats) > before, "its heartbeats have ended")
        eventually(lambda: not thread.trouble, "its trouble has not passed")
    assert [log["event"] for log in logs].count("publisher.turn_failed") == is_heard


@pytest.mark.usefixtures("soon")
def test_a_publisher_whose_turns_fail_ends_when_it_is_told_to() -> None:
    owner, stream = Faulty("c", "one"), Noting()
    with publishing(MemoryLog(), owner, stream) as thread:
        owner.is_broken = True
        eventually(lambda: thread.trouble, "it does not fail")
    assert "kvbm-publisher-one" not in [one.name for one in threading.enumerate()]


def test_a_heartbeat_that_fails_in_an_unforeseen_way_ends_no_others() -> None:
    stream = Noting()
    stream.pulse_error = RuntimeError("can't start new thread")
    with capture_logs() as logs, publishing(MemoryLog(), PlainOwner("c", "one"), stream) as thread:
        eventually(lambda: stream.tries > 3, "it does not try again")
        assert "the stream refuses it (RuntimeError: can't start new thread)" in thread.trouble
        stream.pulse_error = None
        eventually(lambda: not thread.trouble, "its trouble has not passed")
        stream.pulse_error = RuntimeError("its last one, too")
    events = [log["event"] for log in logs]
    assert events.count("publisher.pulse_failed") == 1  # of one place
    assert "kvbm-publisher-one" not in [one.name for one in threading.enumerate()]


@pytest.mark.usefixtures("soon")
def test_requests_for_snapshots_are_heard_again_after_their_watch_has_failed() -> None:
    stream = Noting()
    stream.asks_errors = 2
    with publishing(MemoryLog(), PlainOwner("c", "one"), stream):
        eventually(lambda: stream.asks, "nobody listens any more")
    assert stream.asks == 1


class Silent(MemoryStream):
    """A stream that connects and answers nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    async def fence(self, *_: object) -> Fence | None:
        """See `EventLog.fence`."""
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


def test_a_publisher_that_is_stopped_while_it_connects_leaves_no_connection() -> None:
    stream = Silent()
    with publishing(MemoryLog(), PlainOwner("c", "one"), stream) as thread:
        assert stream.asked.wait(WAIT_S)
        thread.stop(0.0)
    assert not stream.is_connected
