"""Where a frame lies, held to the events it has; and whoever follows a stream by that rule applies the same frames in
the same order.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.core.codec import Frame, ScannedFrame, decode_frame, encode_frame, scan_frames
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.reference.cluster_index import Applied, ReferenceIndex
from kvbm.replay.order import Missing, Next, in_order
from kvbm.replay.source import FramePlace, Located
from kvbm.streams.base import Position, StreamMessage
from kvbm.streams.frame_order import Order, order_of
from tests.ledger_driver import Driver

Piece = tuple[Epoch, Offset, Offset]  # epoch, first and next offset


def scanned(epoch: int, first: int, following: int) -> ScannedFrame:
    return ScannedFrame(InstanceId("i"), Epoch(epoch), Offset(first), Offset(following), 0, 0, (0, 0, 0, 0), 0, 0)


@pytest.mark.parametrize("place", [Position(Epoch(epoch), Offset(offset)) for epoch in range(3) for offset in range(4)])
def test_where_a_frame_lies_follows_from_which_of_its_events_were_read(place: Position) -> None:
    for epoch, first, count in product(range(1, 4), range(5), range(1, 4)):
        events = [(epoch, offset) for offset in range(first, first + count)]
        was_read = [event < place for event in events]
        order = order_of(scanned(epoch, first, first + count), place)
        if epoch < place.epoch:
            expected = Order.STALE
        elif epoch > place.epoch:
            expected = Order.START if (epoch, 0) in events else Order.MIDSTREAM
        elif all(was_read):
            expected = Order.REPEAT
        elif place in events:
            expected = Order.OVERLAP if any(was_read) else Order.NEXT
        else:
            expected = Order.BEYOND
        assert order is expected


def told(rng: random.Random) -> list[Frame]:
    """What an instance publishes: a few epochs, each of a few frames."""
    driver = Driver()
    for _ in range(rng.randint(5, 25)):
        if rng.random() < 0.1:
            driver.run(("restart",))
        driver.run(("prefill", rng.randrange(6), rng.randint(1, 4)))
        driver.run(("finish", rng.randrange(9)))
        driver.cut()
    return driver.frames


def stored(rng: random.Random, frames: list[Frame]) -> list[Frame]:
    """How they lie on the stream: of what is in flight some is lost, and what follows is sent again, also what was
    stored.

    An epoch's first frame is never lost, and nothing of a newer epoch is in flight with what is lost: there the catalog
    goes on, and replay waits.
    """
    lying: list[Frame] = []
    at = 0
    while at < len(frames):
        flight = [frame for frame in frames[at : at + rng.randint(1, 5)] if frame.epoch == frames[at].epoch]
        kept = [not frame.first_offset or rng.random() < 0.8 for frame in flight]
        lying += [frame for frame, is_kept in zip(flight, kept, strict=True) if is_kept]
        at += len(flight) if all(kept) else kept.index(False)
        if rng.random() < 0.2:  # an acknowledgement is lost
            at = max(0, at - rng.randint(1, 4))
    return lying


class Listening(ReferenceIndex):
    """An index that keeps which events it was given."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.applied: list[Piece] = []

    def apply(self, data: bytes, at: int = 0, skip: int = 0) -> Applied:
        frame, _ = decode_frame(data, at)
        self.applied.append((frame.epoch, Offset(frame.first_offset + skip), frame.next_offset))
        return super().apply(data, at, skip)


def of_catalog(lying: list[Frame], rng: random.Random) -> list[Piece]:
    index = Listening(1 << 10)
    sequencer = Sequencer(index, scan_frames)
    messages = [
        StreamMessage(number, "kvbm.v1.events.c.i", encode_frame(frame)) for number, frame in enumerate(lying, 1)
    ]
    at = 0
    while at < len(messages):
        taken = messages[at : at + rng.randint(1, 8)]
        at += len(taken)
        sequencer.step(0.0, taken, at_end=rng.random() < 0.5)
    assert (sequencer.counters.gaps, sequencer.counters.digest_mismatches) == (0, 0)
    return index.applied


def of_replay(lying: list[Frame]) -> list[Piece]:
    found = []
    located = (
        Located(frame, FramePlace("file", None, number), encode_frame(frame), "", number)
        for number, frame in enumerate(lying)
    )
    for _, step in in_order(located, is_trimmed=False):  # type: ignore[misc]
        assert not isinstance(step, Missing)
        if isinstance(step, Next):
            found.append((step.frame.epoch, step.frame.first_offset, step.frame.next_offset))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_catalog_and_replay_put_an_instances_frames_in_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    frames = told(rng)
    lying = stored(rng, frames)
    expected = [(frame.epoch, frame.first_offset, frame.next_offset) for frame in frames]
    assert of_replay(lying) == expected
    assert of_catalog(lying, rng) == expected


def test_what_is_put_in_order_was_out_of_order() -> None:
    """Else the test above would say little."""
    disordered = 0
    for seed in range(60):
        rng = random.Random(seed)
        frames = told(rng)
        disordered += stored(rng, frames) != frames
    assert disordered > 50
