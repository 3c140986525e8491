"""The publisher's decisions, alone: virtual time, a stream that loses acks, refuses, and disconnects."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from kvbm.core.codec import decode_header
from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import Position, end_of_message
from kvbm.streams.memory import MemoryLog
from kvbm.streams.publisher import (
    ACK_WAIT_S,
    BACKOFF_MOST_S,
    LINGER_S,
    ORIGIN,
    Acked,
    Appended,
    Connect,
    Connected,
    Disconnected,
    Effect,
    Input,
    Publish,
    Publisher,
    Refused,
    Ticked,
    WakeAt,
)
from tests.nats_fixture import make_frame


def position(epoch: int, offset: int) -> Position:
    return Position(Epoch(epoch), Offset(offset))


def connected(
    frames: MemoryLog, at: Position | None = None, message_bytes: int = 1 << 18
) -> tuple[Publisher, list[Effect]]:
    """A publisher that has just connected, and what it did then, at time 0."""
    publisher = Publisher(frames, message_bytes, jitter=lambda: 0.0)
    assert publisher.step(0.0, Ticked()) == [Connect()]
    return publisher, publisher.step(0.0, Connected(at))


def published(effects: list[Effect]) -> list[Publish]:
    return [effect for effect in effects if isinstance(effect, Publish)]


def test_it_begins_where_the_stream_ends() -> None:
    frames = MemoryLog()
    for first in range(5):
        frames.append(make_frame(first))
    publisher, effects = connected(frames, position(1, 3))
    assert publisher.published == position(1, 3)
    assert published(effects) == [Publish(make_frame(3).data + make_frame(4).data, position(1, 5))]


def test_small_frames_wait_together_for_two_milliseconds() -> None:
    frames = MemoryLog()
    publisher, effects = connected(frames)
    assert effects == []
    frames.append(make_frame(0))
    assert publisher.step(1.0, Appended()) == [WakeAt(1.0 + LINGER_S)]
    frames.append(make_frame(1))
    assert published(publisher.step(1.001, Appended())) == []
    effects = publisher.step(1.0 + LINGER_S, Ticked())
    assert published(effects) == [Publish(make_frame(0).data + make_frame(1).data, position(1, 2))]


def test_one_message_is_in_flight_and_published_grows_only_by_its_ack() -> None:
    frames = MemoryLog()
    frames.append(make_frame(0))
    publisher, effects = connected(frames)
    assert len(published(effects)) == 1
    frames.append(make_frame(1))
    assert published(publisher.step(0.5, Appended())) == []
    assert publisher.published == ORIGIN
    effects = publisher.step(1.0, Acked(position(1, 1)))
    assert publisher.published == position(1, 1)
    assert [message.through for message in published(effects)] == [position(1, 2)]


def test_a_message_has_whole_frames_of_one_epoch_up_to_its_size() -> None:
    frames = MemoryLog()
    size = len(make_frame(0).data)
    for first in range(3):
        frames.append(make_frame(first))
    frames.append(make_frame(0, epoch=2))
    publisher, effects = connected(frames, message_bytes=2 * size + 1)
    sent = published(effects)
    for at in range(1, 3):
        sent += published(publisher.step(float(at), Acked(sent[-1].through)))
    assert [message.through for message in sent] == [position(1, 2), position(1, 3), position(2, 1)]
    assert sent[2].data == make_frame(0, epoch=2).data


def test_a_frame_larger_than_a_message_goes_alone() -> None:
    frames = MemoryLog()
    frames.append(make_frame(0, blocks=100))
    frames.append(make_frame(1))
    _, effects = connected(frames, message_bytes=64)
    assert [message.through for message in published(effects)] == [position(1, 1)]


@pytest.mark.parametrize("trouble", [Refused("full"), Disconnected("gone"), Ticked()])
def test_whatever_fails_ends_in_a_new_connection_that_says_where_to_go_on(trouble: Input) -> None:
    frames = MemoryLog()
    frames.append(make_frame(0))
    publisher, _ = connected(frames)
    effects = publisher.step(ACK_WAIT_S, trouble)
    assert isinstance(effects[0], WakeAt)
    assert publisher.step(effects[0].at_s, Ticked()) == [Connect()]
    effects = publisher.step(effects[0].at_s, Connected(position(1, 1)))  # it was stored after all
    assert published(effects) == []
    assert publisher.published == position(1, 1)


def test_it_waits_longer_after_each_failure_up_to_a_limit_and_less_after_an_ack() -> None:
    frames = MemoryLog()
    frames.append(make_frame(0))
    publisher = Publisher(frames, jitter=lambda: 1.0)
    now_s, waits = 0.0, []
    for _ in range(10):
        assert publisher.step(now_s, Ticked()) == [Connect()]
        (effect,) = publisher.step(now_s, Disconnected("nobody"))
        assert isinstance(effect, WakeAt)
        waits.append(effect.at_s - now_s)
        now_s = effect.at_s
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(BACKOFF_MOST_S)
    publisher.step(now_s, Ticked())
    publisher.step(now_s, Connected(None))
    publisher.step(now_s, Acked(position(1, 1)))
    (effect,) = publisher.step(now_s, Disconnected("gone"))
    assert isinstance(effect, WakeAt)
    assert effect.at_s - now_s == pytest.approx(waits[0])


def test_a_stream_that_lost_its_end_gets_it_again() -> None:
    frames = MemoryLog()
    for first in range(4):
        frames.append(make_frame(first))
    publisher, _ = connected(frames)
    publisher.step(0.0, Acked(position(1, 4)))
    wake = publisher.step(1.0, Disconnected("power cut"))[0]
    assert isinstance(wake, WakeAt)
    publisher.step(wake.at_s, Ticked())
    effects = publisher.step(wake.at_s, Connected(position(1, 2)))
    assert published(effects) == [Publish(make_frame(2).data + make_frame(3).data, position(1, 4))]
    assert publisher.published == position(1, 4)


class World:
    """A stream behind an unreliable connection, in virtual time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.log = MemoryLog()
        self.stored: list[bytes] = []
        self.publisher = Publisher(
            self.log, self.random.choice((1, 300, 2000, 1 << 18)), jitter=self.random.random, ack_wait_s=1.0
        )
        self.is_calm = False
        self.appended: list[Position] = []
        self._connection = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._high = ORIGIN

    def later(self, wait_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + wait_s, next(self._order), do))

    def run_until(self, end_s: float) -> None:
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, do = heapq.heappop(self._agenda)
            do()

    def append(self, epoch: int, first: int, events: int) -> None:
        frame = make_frame(first, events, epoch, blocks=self.random.choice((1, 1, 5, 40)))
        self.log.append(frame)
        self.appended.append(Position(frame.epoch, frame.next_offset))
        self.step(Appended())

    def step(self, happened: Input) -> None:
        for effect in self.publisher.step(self.now_s, happened):
            self.do(effect)
        assert self.publisher.published >= self._high
        assert self.publisher.published <= max([ORIGIN, *(end_of_message(data, "") for data in self.stored)])
        self._high = self.publisher.published

    def do(self, effect: Effect) -> None:
        match effect:
            case WakeAt(at_s):
                assert at_s >= self.now_s
                self.later(at_s - self.now_s, lambda: self.step(Ticked()))
            case Connect():
                self._connection += 1
                self.later(self.random.uniform(0.0, 0.2), self.answer_connect)
            case Publish(data, through):
                assert end_of_message(data, "") == through
                self.publish(data, through, self._connection)

    def fails(self, chance: float) -> bool:
        return not self.is_calm and self.random.random() < chance

    def answer_connect(self) -> None:
        if self.fails(0.3):
            self.step(Disconnected("nobody there"))
            return
        self.step(Connected(end_of_message(self.stored[-1], "") if self.stored else None))

    def publish(self, data: bytes, through: Position, connection: int) -> None:
        wait_s = self.random.uniform(0.0, 0.01)
        if self.fails(0.05):
            self.later(wait_s, lambda: self.answer(connection, Refused("full")))
            return
        if self.fails(0.05):
            self.later(wait_s, lambda: self.answer(connection, Disconnected("lost on the way")))
            return
        delay_s = (
            self.random.uniform(0.0, 3.0) if self.fails(0.03) else wait_s
        )  # may be stored after a newer connection's
        self.later(delay_s, lambda: self.stored.append(data))
        fate = self.random.random()
        if self.is_calm or fate < 0.8:
            self.later(delay_s, lambda: self.step(Acked(through)))
        elif fate < 0.9:
            self.later(delay_s, lambda: self.answer(connection, Disconnected("ack lost")))

    def answer(self, connection: int, happened: Input) -> None:
        if connection == self._connection:
            self.step(happened)


@pytest.mark.parametrize("seed", range(300))
def test_what_the_stream_holds_less_repeats_is_the_log_in_order(seed: int) -> None:
    world = World(seed)
    world.step(Ticked())
    at_s = 0.0
    for epoch in range(1, world.random.randint(2, 4)):
        first = 0
        for _ in range(world.random.randint(0, 60)):
            events = world.random.randint(1, 4)
            at_s += world.random.choice((0.0, 0.0005, 0.01, 0.5))
            world.run_until(at_s)
            world.now_s = at_s
            world.append(epoch, first, events)
            first += events
    world.is_calm = True
    world.run_until(at_s + 60.0)

    reached = ORIGIN
    for data in world.stored:
        at = 0
        while at < len(data):
            header = decode_header(data, at)
            at += header.frame_bytes
            if Position(header.epoch, header.next_offset) <= reached:
                continue  # a repeat
            is_next = header.epoch == reached.epoch and header.first_offset == reached.offset
            assert is_next or (header.epoch > reached.epoch and header.first_offset == 0)
            reached = Position(header.epoch, header.next_offset)
    last = world.appended[-1] if world.appended else ORIGIN
    assert reached == last
    assert world.publisher.published == last
