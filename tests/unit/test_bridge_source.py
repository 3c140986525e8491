"""A source in hand-made time: how it is driven, when its engine counts as alive, and what a publisher without sense may
cost.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.bridge.source import CHECK_S, EPOCHS_S, MOST_EPOCHS, REST_S
from kvbm.core.ids import Tier
from kvbm.streams.base import ORIGIN
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import EngineConnected, PublishedMessage, Replayed, ReplayEnded
from kvbm.streams.foreign.wire import Kind, decode_batch
from tests.bridged import Driven, Made, native, readable
from tests.foreign_engines import MODEL, Prompt, payload, removed_event, stored_event

PROMPT = Prompt(tuple(range(100, 112)))
both = pytest.mark.parametrize("make", [readable, native])
Make = Callable[[ForeignSource], Made]


def driven_by(make: Make, can_replay: bool = True, most_bytes: int = 1 << 28) -> Driven:
    return Driven(make(ForeignSource(MODEL)), lambda data: decode_batch(data, Kind.VLLM), can_replay, most_bytes)


@both
def test_what_comes_is_in_the_stream_with_its_turn(make: Make):
    driven = driven_by(make)
    driven.turn(EngineConnected())
    assert driven.wire.asked == [0]
    driven.turn(Replayed(0, payload(stored_event(PROMPT))), ReplayEnded())
    fold = driven.fold()
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()
    assert driven.instance.heartbeat(ORIGIN).namespaces == (PROMPT.namespace().id,)


@both
def test_a_quiet_publisher_is_asked_each_second_and_counts_as_silent_when_it_does_not_answer(make: Make):
    driven = driven_by(make)
    driven.turn(EngineConnected())
    driven.turn(ReplayEnded())
    driven.turn(PublishedMessage(0, payload(stored_event(PROMPT))))
    for _ in range(8):
        asked = len(driven.wire.asked)
        driven.turn(after_s=CHECK_S)
        assert len(driven.wire.asked) == asked + 1
        driven.turn(Replayed(0, payload(stored_event(PROMPT))), ReplayEnded())
    assert driven.source.is_alive()
    assert not driven.instance.port.is_silent()
    for _ in range(8):
        driven.turn(after_s=CHECK_S)
    assert not driven.source.is_alive()
    assert driven.instance.port.is_silent()
    fold = driven.fold()
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()  # silence says nothing about blocks
    driven.turn(Replayed(0, payload(stored_event(PROMPT))), ReplayEnded())
    assert driven.source.is_alive()


@both
def test_a_publisher_that_makes_one_epoch_after_the_other_is_left_alone_for_a_while(make: Make):
    driven = driven_by(make, can_replay=False)
    for number in range(20 * MOST_EPOCHS):
        driven.turn(PublishedMessage(number % 2, payload(stored_event(PROMPT))), after_s=0.01)
    driven.read()
    assert driven.epochs <= MOST_EPOCHS + 2
    assert "two publishers" in driven.source.trouble()
    driven.wire.waiting.clear()
    driven.turn(PublishedMessage(9, payload(stored_event(PROMPT))), after_s=REST_S)
    fold = driven.fold()
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()
    assert "two publishers" not in driven.source.trouble()
    for number in range(5):  # and now and then is no trouble
        driven.turn(PublishedMessage(number % 2, payload()), after_s=EPOCHS_S)
    assert "two publishers" not in driven.source.trouble()


@both
def test_a_journal_that_nobody_takes_is_bounded(make: Make):
    driven = driven_by(make, can_replay=False, most_bytes=20_000)
    for number in range(3000):
        event = stored_event(PROMPT) if number % 2 == 0 else removed_event(PROMPT.keys())
        driven.turn(PublishedMessage(number, payload(event)))
    kept = sum(len(frame.data) for frame in driven.instance.log.read_after(ORIGIN, 1 << 30))
    assert kept < 40_000
    driven.turn(PublishedMessage(3000, payload(stored_event(PROMPT))))
    fold = driven.fold()
    assert driven.epochs == 1  # the last: those before it are gone
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()
