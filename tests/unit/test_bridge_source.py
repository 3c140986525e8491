"""A source in hand-made time: how it is driven, when its engine counts as alive, and what a publisher without sense may
cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.bridge.held import HeldLedger, Said
from kvbm.bridge.instance import BridgedInstance, BridgeLimits, Names
from kvbm.bridge.source import CHECK_S, EPOCHS_S, MOST_EPOCHS, REST_S, BridgedSource
from kvbm.core.codec import decode_frame
from kvbm.core.events import InstanceStarted, PoolStated
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, Tier
from kvbm.streams.base import ORIGIN
from kvbm.streams.foreign.state import EngineConnected, Input, PublishedMessage, Replayed, ReplayEnded
from tests.foreign_engines import Prompt, new_state, payload, removed_event, stored_event

PROMPT = Prompt(tuple(range(100, 112)))


class Wire:
    """Sockets in memory: what is put there comes."""

    def __init__(self) -> None:
        self.is_connected, self.unreadable = True, 0
        self.waiting: list[Input] = []
        self.asked: list[int] = []

    def sockets(self) -> list[Any]:
        return []

    def receive(self, limit: int) -> Iterator[Input]:
        while self.waiting:
            yield self.waiting.pop(0)

    def ask(self, start: int) -> None:
        self.asked.append(start)

    def end_ask(self) -> None:
        """Nothing to close."""

    def close(self) -> None:
        """Nothing to close."""


class Driven:
    """A source whose turns a test gives."""

    def __init__(self, can_replay: bool = True, most_bytes: int = 1 << 28) -> None:
        self.now_s, self.wire = 100.0, Wire()
        state = new_state(can_replay=can_replay)
        self.source = BridgedSource("a", self.wire, state, can_replay, 5.0, lambda: self.now_s)
        ledger = HeldLedger(
            InstanceId("a"),
            [PoolStated(tier, 0, 0) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)],
            NATIVE_FOLD,
            NATIVE.encode_frame,
            Said(),
        )
        self.instance = BridgedInstance(
            Names(InstanceId("a"), "c", "run"),
            ledger,
            BridgeLimits(1.0, 1 << 26, most_bytes),
            lambda: self.now_s,
            lambda: 1,
            self.source,
            Epoch(1),
        )
        self.source.instance = self.instance

    def turn(self, *happened: Input, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.wire.waiting += happened
        self.source.turn(self.now_s)

    def fold(self) -> tuple[Residencies, int]:
        """What a reader of the whole stream holds, and how many epochs it has seen."""
        fold, epochs = Residencies(strict=True), 0
        for frame in self.instance.log.read_after(ORIGIN, 1 << 30):
            for event in decode_frame(frame.data)[0].events:
                fold.evolve(event)
                epochs += isinstance(event, InstanceStarted)
        return fold, epochs


def test_what_comes_is_in_the_stream_with_its_turn():
    driven = Driven()
    driven.turn(EngineConnected())
    assert driven.wire.asked == [0]
    driven.turn(Replayed(0, payload(stored_event(PROMPT))), ReplayEnded())
    fold, _ = driven.fold()
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()
    assert driven.instance.heartbeat(ORIGIN).namespaces == (PROMPT.namespace().id,)


def test_a_quiet_publisher_is_asked_each_second_and_counts_as_silent_when_it_does_not_answer():
    driven = Driven()
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
    fold, _ = driven.fold()
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()  # silence says nothing about blocks
    driven.turn(Replayed(0, payload(stored_event(PROMPT))), ReplayEnded())
    assert driven.source.is_alive()


def test_a_publisher_that_makes_one_epoch_after_the_other_is_left_alone_for_a_while():
    driven = Driven(can_replay=False)
    for number in range(20 * MOST_EPOCHS):
        driven.turn(PublishedMessage(number % 2, payload(stored_event(PROMPT))), after_s=0.01)
    _, epochs = driven.fold()
    assert epochs <= MOST_EPOCHS + 2
    assert "two publishers" in driven.source.trouble()
    driven.wire.waiting.clear()
    driven.turn(PublishedMessage(9, payload(stored_event(PROMPT))), after_s=REST_S)
    fold, _ = driven.fold()
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()
    assert "two publishers" not in driven.source.trouble()
    for number in range(5):  # and now and then is no trouble
        driven.turn(PublishedMessage(number % 2, payload()), after_s=EPOCHS_S)
    assert "two publishers" not in driven.source.trouble()


def test_a_journal_that_nobody_takes_is_bounded():
    driven = Driven(can_replay=False, most_bytes=20_000)
    for number in range(3000):
        event = stored_event(PROMPT) if number % 2 == 0 else removed_event(PROMPT.keys())
        driven.turn(PublishedMessage(number, payload(event)))
    kept = sum(len(frame.data) for frame in driven.instance.log.read_after(ORIGIN, 1 << 30))
    assert kept < 40_000
    driven.turn(PublishedMessage(3000, payload(stored_event(PROMPT))))
    fold, epochs = driven.fold()
    assert epochs == 1  # the last: those before it are gone
    assert list(fold.held[Tier.HBM]) == PROMPT.hashes()
