"""The publisher's decisions, alone: virtual time, a stream that loses acks, refuses, forgets, and disconnects."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.core.codec import FrameBytes, decode_header
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import ORIGIN, Fence, Heartbeat, Position, Tail, end_of_message
from kvbm.streams.memory import MemoryLog
from kvbm.streams.publisher.machine import (
    ACK_WAIT_S,
    BACKOFF_MOST_S,
    FENCE_CHECK_HEARTBEATS,
    FENCE_SHARE,
    LINGER_S,
    LOOK_MOST_S,
    LOOKS_MOST,
    SILENT_HEARTBEATS,
    Publisher,
    PublisherOptions,
)
from kvbm.streams.publisher.messages import (
    Acked,
    Appended,
    AskPulse,
    Connect,
    Connected,
    Disconnected,
    Effect,
    EpochBegun,
    FencedOff,
    FenceRead,
    FenceSet,
    Input,
    Publish,
    PublisherTicked,
    PublisherWakeAt,
    Pulse,
    ReadFence,
    Refused,
    ReportFenced,
    SetFence,
    SnapshotBegan,
    StreamRetention,
    TakeOver,
)
from tests.examples import examples
from tests.nats_fixture import make_frame

T = TypeVar("T", bound=Effect)
ROOM = 1 << 20


def position(epoch: int, offset: int) -> Position:
    return Position(Epoch(epoch), Offset(offset))


def of_kind(effects: Sequence[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def the(effects: Sequence[Effect], kind: type[T]) -> T:
    """The one effect of a kind."""
    (found,) = of_kind(effects, kind)
    return found


class Driven:
    """A publisher of run "me" that is stepped by hand, and what the stream's fence is."""

    def __init__(
        self,
        frames: MemoryLog,
        epoch: int = 1,
        message_bytes: int = 1 << 18,
        window_bytes: int = 4 << 20,
        window_messages: int = 512,
    ) -> None:
        self.publisher = Publisher(
            frames, Epoch(epoch), "me", PublisherOptions(1.0, window_bytes, window_messages, message_bytes), lambda: 0.0
        )
        self.now_s = 0.0

    def step(self, happened: Input, at_s: float | None = None) -> list[Effect]:
        self.now_s = self.now_s if at_s is None else at_s
        return self.publisher.step(self.now_s, happened)

    def find(
        self,
        fence: Fence | None = None,
        tail: Tail | None = None,
        happened: Input = PublisherTicked(),  # noqa: B008
    ) -> list[Effect]:
        """Step with what leads to a Connect, and answer it."""
        connect = the(self.step(happened), Connect)
        return self.step(Connected(connect.attempt, fence, tail, ROOM))

    def find_again(self, fence: Fence | None, tail: Tail | None = None) -> list[Effect]:
        """Lose the connection, make another one, and answer it."""
        self.step(Disconnected("gone"))
        self.now_s += BACKOFF_MOST_S
        return self.find(fence, tail)

    def begin(self, fence: Fence | None = None, tail: Tail | None = None) -> list[Effect]:
        """Connect and set the fence, at sequence 100; what follows."""
        wanted = the(self.find(fence, tail), SetFence)
        assert wanted.expected == (fence.sequence if fence else 0)
        return self.step(FenceSet(wanted.attempt, Fence(wanted.epoch, wanted.run, 100)))

    def wait(self, effects: list[Effect]) -> list[Effect]:
        """Step at the time the effects name."""
        return self.step(PublisherTicked(), the(effects, PublisherWakeAt).at_s)


def log_of(*frames: FrameBytes) -> MemoryLog:
    log = MemoryLog()
    for frame in frames:
        log.append(frame)
    return log


def frames_of(count: int, epoch: int = 1) -> list[FrameBytes]:
    return [make_frame(at, epoch=epoch) for at in range(count)]


SIZE = len(make_frame(0).data)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_fence_set_after_its_own_is_anothers_whatever_its_epoch() -> None:
    """The stream was lost and made anew, an instance that remembers nothing has begun there with epoch 1; then the old
    self thaws.
    """
    driven = Driven(log_of(*frames_of(3, epoch=5)), epoch=5)
    driven.begin()
    effects = driven.find_again(Fence(Epoch(1), "new", 1), Tail(position(1, 2), position(1, 2)))
    assert the(effects, ReportFenced) == (1, "new")
    assert driven.publisher.is_fenced
    for _ in range(SILENT_HEARTBEATS):
        effects = driven.wait(effects)
        assert of_kind(effects, AskPulse)
        effects = driven.step(Pulse(None))
    assert the(effects, TakeOver).epoch == 1  # the other has been silent: its fence is no bar any more
    connect = the(driven.step(EpochBegun(Epoch(6))), Connect)
    fence = Fence(Epoch(1), "new", 1)
    wanted = the(driven.step(Connected(connect.attempt, fence, Tail(position(1, 2), position(1, 2)), ROOM)), SetFence)
    assert (wanted.expected, wanted.epoch) == (1, 6)
    driven.step(FenceSet(wanted.attempt, Fence(Epoch(6), "me", 7)))
    assert of_kind(driven.find_again(Fence(Epoch(1), "new", 8)), ReportFenced)  # a later one of its shows that it lives


def test_a_fence_that_it_has_replaced_shows_that_the_server_has_lost_its_end() -> None:
    driven = Driven(log_of(*frames_of(3, epoch=5)), epoch=5)
    old = Fence(Epoch(4), "before", 9)
    driven.begin(old)
    wanted = the(driven.find_again(old), SetFence)
    assert wanted.expected == 9


def test_a_fence_that_it_has_replaced_in_a_stream_that_is_gone_says_nothing_of_the_next_one() -> None:
    driven = Driven(log_of(*frames_of(3, epoch=5)), epoch=5)
    driven.begin(
        Fence(Epoch(4), "other", 50)
    )  # replaced: to find it again here would mean that the server has lost its end
    wanted = the(driven.find_again(None), SetFence)  # made anew
    driven.step(FenceSet(wanted.attempt, Fence(wanted.epoch, wanted.run, 1)))
    effects = driven.find_again(Fence(Epoch(4), "other", 7))  # its next one, behind this run's
    assert the(effects, ReportFenced) == (4, "other")
    assert driven.publisher.is_fenced


def test_the_place_is_its_own_only_once_its_fence_is_stored() -> None:
    driven = Driven(log_of(*frames_of(3, epoch=5)), epoch=5)
    wanted = the(driven.find(Fence(Epoch(4), "before", 9)), SetFence)
    assert not driven.publisher.is_owner
    driven.step(FenceSet(wanted.attempt, Fence(Epoch(5), "me", 10)))
    assert driven.publisher.is_owner


def test_a_fence_names_who_began_the_epochs_that_follow_it() -> None:
    log = log_of(*frames_of(2, epoch=3), *frames_of(2, epoch=5))
    driven = Driven(log, epoch=5)
    driven.publisher._ownership._runs = lambda: {Epoch(2): "older", Epoch(3): "before"}
    wanted = the(driven.find(Fence(Epoch(3), "before", 9), Tail(position(3, 1), position(3, 1))), SetFence)
    assert wanted.log == ((3, "before"), (5, "me"))
    driven.step(FenceSet(wanted.attempt, Fence(Epoch(5), "me", 100)))
    driven.step(EpochBegun(Epoch(6)))
    assert driven.publisher._ownership.epochs_after(driven.publisher.confirmed, driven.publisher.epoch)[-2:] == (
        (5, "me"),
        (6, "me"),
    )


def test_it_begins_where_the_stream_is_known_to_be_whole_and_not_where_it_ends() -> None:
    driven = Driven(log_of(*frames_of(6)))
    sent = the(driven.begin(Fence(Epoch(1), "me", 9), Tail(position(1, 5), position(1, 3))), Publish)
    assert sent.data == b"".join(frame.data for frame in frames_of(6)[3:])
    assert (sent.through, sent.fence.sequence, sent.acked) == (position(1, 6), 100, position(1, 3))
    assert driven.publisher.published == position(1, 3)


def test_nothing_is_sent_before_the_fence_is_set() -> None:
    driven = Driven(log_of(*frames_of(2)))
    wanted = the(driven.find(), SetFence)
    assert (wanted.epoch, wanted.run, wanted.expected) == (1, "me", 0)
    assert not driven.publisher.is_owner
    assert not of_kind(driven.step(Appended(), 1.0), Publish)
    assert of_kind(driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 7))), Publish)
    assert driven.publisher.is_owner


def test_who_has_nothing_to_publish_looks_now_and_then_whether_the_place_is_still_its_own() -> None:
    driven = Driven(log_of(*frames_of(1)))
    sent = the(driven.begin(), Publish)
    driven.step(Acked(sent.attempt), 1.0)
    at_s = 1.0 + FENCE_CHECK_HEARTBEATS
    assert not of_kind(driven.step(PublisherTicked(), at_s - 0.1), ReadFence)
    assert the(driven.step(PublisherTicked(), at_s), ReadFence).sequence == 100
    assert not of_kind(driven.step(FenceRead(100, Fence(Epoch(1), "me", 100))), Connect)
    assert not of_kind(driven.step(FenceRead(90, None)), Connect)  # asked before the fence was set anew
    connect = the(driven.step(FenceRead(100, Fence(Epoch(2), "other", 120))), Connect)
    assert not connect.anew
    found = driven.step(Connected(connect.attempt, Fence(Epoch(2), "other", 120), None, ROOM))
    assert the(found, ReportFenced).epoch == 2
    assert driven.publisher.is_fenced


def test_who_was_shut_out_takes_a_later_epoch_when_the_stream_has_lost_its_rival() -> None:
    frames = log_of(*frames_of(1))
    driven = Driven(frames)
    assert of_kind(driven.find(Fence(Epoch(2), "other", 9)), ReportFenced)
    driven.step(Disconnected("power"), 0.1)
    connect = the(driven.step(PublisherTicked(), 1.0), Connect)
    effects = driven.step(Connected(connect.attempt, None, None, ROOM))
    assert the(effects, TakeOver).epoch == 2
    wanted = the(effects, SetFence)
    assert not of_kind(driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 3))), Publish)  # nobody reads epoch 1
    frames.append(make_frame(0, epoch=3))
    wanted = the(driven.step(EpochBegun(Epoch(3))), SetFence)
    driven.step(FenceSet(wanted.attempt, Fence(Epoch(3), "me", 4)))
    assert the(driven.step(Appended(), 2.0), Publish).through == position(3, 1)


@pytest.mark.parametrize(("began", "is_sent"), [("other", True), ("", True), ("mine before", False)])
def test_an_old_epoch_that_another_process_began_as_well_is_not_mixed_into_its_frames(
    began: str, is_sent: bool
) -> None:
    """`began`: who began epoch 1 here; on the stream it is of the run "other"."""
    frames = log_of(*frames_of(3, epoch=1), make_frame(0, epoch=2))
    driven = Driven(frames, epoch=2)
    driven.publisher._ownership._runs = lambda: {Epoch(1): began}
    sent = of_kind(driven.begin(Fence(Epoch(1), "other", 9), Tail(position(1, 2), position(1, 2))), Publish)
    assert sent[0].through == (position(1, 3) if is_sent else position(2, 1))


def test_a_frame_goes_at_once_and_those_of_the_next_two_milliseconds_together() -> None:
    frames = MemoryLog()
    driven = Driven(frames)
    driven.begin()
    frames.append(make_frame(0))
    assert the(driven.step(Appended(), 1.0), Publish).data == make_frame(0).data
    frames.append(make_frame(1))
    effects = driven.step(Appended(), 1.001)
    assert the(effects, PublisherWakeAt).at_s == 1.0 + LINGER_S and not of_kind(effects, Publish)
    frames.append(make_frame(2))
    assert not of_kind(driven.step(Appended(), 1.0015), Publish)
    sent = the(driven.step(PublisherTicked(), 1.0 + LINGER_S), Publish)
    assert sent.data == make_frame(1).data + make_frame(2).data


def test_messages_follow_each_other_without_waiting_up_to_the_windows_bytes() -> None:
    driven = Driven(log_of(*frames_of(20)), window_bytes=8 * SIZE, message_bytes=2 * SIZE)
    sent = of_kind(driven.begin(), Publish)
    assert [message.through.offset for message in sent] == [2, 4, 6, 8]
    assert {message.acked for message in sent} == {ORIGIN}
    more = the(driven.step(Acked(sent[0].attempt)), Publish)
    assert (more.through, more.acked) == (position(1, 10), position(1, 2))
    assert driven.publisher.published == position(1, 2)


def test_the_window_is_bounded_in_messages_too() -> None:
    driven = Driven(log_of(*frames_of(20)), message_bytes=SIZE, window_messages=3)
    sent = of_kind(driven.begin(), Publish)
    assert [message.through.offset for message in sent] == [1, 2, 3]


def test_published_grows_by_acks_without_a_hole_in_whatever_order_they_come() -> None:
    driven = Driven(log_of(*frames_of(4)), message_bytes=SIZE)
    sent = of_kind(driven.begin(), Publish)
    reached = []
    for at in (1, 0, 3, 2):
        driven.step(Acked(sent[at].attempt))
        reached.append(driven.publisher.published.offset)
    assert reached == [0, 2, 2, 4]
    assert driven.publisher.has_all()


def test_a_message_has_whole_frames_of_one_epoch_up_to_its_size() -> None:
    driven = Driven(log_of(*frames_of(3), make_frame(0, epoch=2)), epoch=2, message_bytes=2 * SIZE + 1)
    sent = of_kind(driven.begin(), Publish)
    assert [message.through for message in sent] == [position(1, 2), position(1, 3), position(2, 1)]
    assert sent[2].data == make_frame(0, epoch=2).data


def test_a_frame_larger_than_a_message_goes_alone() -> None:
    driven = Driven(log_of(make_frame(0, blocks=100), make_frame(1)), message_bytes=64)
    assert [message.through.offset for message in of_kind(driven.begin(), Publish)] == [1, 2]


def test_a_message_keeps_to_what_the_connection_takes() -> None:
    driven = Driven(log_of(*frames_of(4)))
    connect = the(driven.step(PublisherTicked()), Connect)
    wanted = the(driven.step(Connected(connect.attempt, None, None, 2 * SIZE)), SetFence)
    sent = of_kind(driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 1))), Publish)
    assert [message.through.offset for message in sent] == [2, 4]


def test_a_small_frame_before_a_large_one_does_not_keep_it_back() -> None:
    driven = Driven(log_of(make_frame(0), make_frame(1, blocks=100)), message_bytes=4 * SIZE)
    effects = driven.begin()
    assert the(effects, Publish).through.offset == 1
    assert the(driven.step(PublisherTicked(), LINGER_S), Publish).through.offset == 2


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_from_a_refused_message_on_all_is_sent_again_after_a_wait_and_late_acks_count_for_nothing() -> None:
    driven = Driven(log_of(*frames_of(4)), message_bytes=SIZE)
    sent = of_kind(driven.begin(), Publish)
    driven.step(Acked(sent[0].attempt))
    effects = driven.step(Refused(sent[1].attempt, "full"))
    assert not of_kind(effects, Publish)
    driven.step(Acked(sent[2].attempt))
    driven.step(Acked(sent[3].attempt))
    assert driven.publisher.published == position(1, 1)
    again = of_kind(driven.wait(effects), Publish)
    assert [message.through.offset for message in again] == [2, 3, 4]
    assert {message.acked for message in again} == {position(1, 1)}
    assert not {message.attempt for message in again} & {message.attempt for message in sent}
    driven.step(Refused(sent[1].attempt, "full"))  # late as well
    for message in again:
        driven.step(Acked(message.attempt))
    assert driven.publisher.published == position(1, 4)


@pytest.mark.parametrize("trouble", [Disconnected("gone"), PublisherTicked()], ids=["lost", "overdue"])
def test_after_a_lost_connection_and_an_overdue_ack_the_stream_is_asked_where_it_ends(trouble: Input) -> None:
    driven = Driven(log_of(*frames_of(1)))
    sent = the(driven.begin(), Publish)
    effects = driven.step(trouble, ACK_WAIT_S)
    assert not of_kind(effects, Publish)
    assert the(driven.wait(effects), Connect).anew == isinstance(trouble, Disconnected)
    assert not of_kind(driven.step(Appended()), Publish)
    driven.step(Acked(sent.attempt))
    assert driven.publisher.published == ORIGIN


def test_after_a_reconnection_it_goes_on_from_the_hole_before_the_tail() -> None:
    """0 1 3 4 are stored: 2 was lost with its connection, which the last message cannot know."""
    driven = Driven(log_of(*frames_of(6)), message_bytes=SIZE)
    sent = of_kind(driven.begin(), Publish)
    for message in sent[:2]:
        driven.step(Acked(message.attempt))
    effects = driven.step(Disconnected("gone"), 1.0)
    connect = the(driven.wait(effects), Connect)
    found = Connected(connect.attempt, Fence(Epoch(1), "me", 100), Tail(position(1, 5), position(1, 2)), ROOM)
    wanted = the(driven.step(found), SetFence)
    assert wanted.expected == 100
    again = of_kind(driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 101))), Publish)
    assert [message.through.offset for message in again] == [3, 4, 5, 6]
    assert {message.fence.sequence for message in again} == {101}


def test_it_waits_longer_after_each_failure_up_to_a_limit_and_less_after_an_ack() -> None:
    publisher = Publisher(log_of(*frames_of(1)), Epoch(1), "me", jitter=lambda: 1.0)
    now_s, waits = 0.0, []
    for _ in range(10):
        the(publisher.step(now_s, PublisherTicked()), Connect)
        wake = the(publisher.step(now_s, Disconnected("nobody")), PublisherWakeAt)
        waits.append(wake.at_s - now_s)
        now_s = wake.at_s
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(BACKOFF_MOST_S)
    connect = the(publisher.step(now_s, PublisherTicked()), Connect)
    wanted = the(publisher.step(now_s, Connected(connect.attempt, None, None, ROOM)), SetFence)
    sent = the(publisher.step(now_s, FenceSet(wanted.attempt, Fence(Epoch(1), "me", 1))), Publish)
    publisher.step(now_s, Acked(sent.attempt))
    wake = the(publisher.step(now_s, Disconnected("gone")), PublisherWakeAt)
    assert wake.at_s - now_s == pytest.approx(waits[0])


@pytest.mark.parametrize(
    ("tail", "expected"),
    [(Tail(position(1, 2), position(1, 1)), 1), (None, 0)],
    ids=["its end is lost", "another stream"],
)
def test_a_stream_that_lost_what_it_had_gets_it_again_and_published_does_not_shrink(
    tail: Tail | None, expected: int
) -> None:
    driven = Driven(log_of(*frames_of(4)), message_bytes=SIZE)
    for message in of_kind(driven.begin(), Publish):
        driven.step(Acked(message.attempt))
    effects = driven.step(Disconnected("power cut"), 1.0)
    connect = the(driven.wait(effects), Connect)
    wanted = the(driven.step(Connected(connect.attempt, None, tail, ROOM)), SetFence)
    again = of_kind(driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 1))), Publish)
    assert [message.through.offset for message in again] == list(range(expected + 1, 5))
    assert {message.acked.offset for message in again} == {expected}
    assert driven.publisher.published == position(1, 4)
    assert driven.publisher.confirmed.offset == expected
    assert not driven.publisher.has_all()


def test_an_answer_to_an_earlier_attempt_to_connect_is_not_taken() -> None:
    driven = Driven(log_of(*frames_of(1)))
    first = the(driven.step(PublisherTicked()), Connect)
    effects = driven.step(Disconnected("nobody"))
    second = the(driven.wait(effects), Connect)
    assert driven.step(Connected(first.attempt, None, None, ROOM)) == []
    assert of_kind(driven.step(Connected(second.attempt, None, None, ROOM)), SetFence)


def test_a_fence_that_is_not_acknowledged_in_time_ends_in_a_new_connection() -> None:
    driven = Driven(MemoryLog())
    effects = driven.wait(driven.find())
    assert of_kind(driven.wait(effects), Connect)


# -- the fence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("happened", [SnapshotBegan(), EpochBegun(Epoch(2))])
def test_a_snapshot_and_a_new_epoch_move_the_fence_once_all_that_is_in_flight_is_acknowledged(happened: Input) -> None:
    frames = log_of(*frames_of(2))
    driven = Driven(frames, message_bytes=SIZE)
    sent = of_kind(driven.begin(), Publish)
    assert not of_kind(driven.step(happened), SetFence)
    frames.append(make_frame(2))
    assert not of_kind(driven.step(Appended(), 1.0), Publish)
    driven.step(Acked(sent[0].attempt))
    wanted = the(driven.step(Acked(sent[1].attempt)), SetFence)
    assert (wanted.epoch, wanted.expected) == (driven.publisher.epoch, 100)
    following = of_kind(driven.step(FenceSet(wanted.attempt, Fence(wanted.epoch, "me", 103)), 2.0), Publish)
    assert [(message.through.offset, message.fence.sequence) for message in following] == [(3, 103)]


def test_frames_of_a_later_epoch_wait_for_its_fence_even_if_nobody_said_that_it_began() -> None:
    frames = log_of(make_frame(0))
    driven = Driven(frames)
    first = the(driven.begin(), Publish)
    frames.append(make_frame(0, epoch=2))
    assert not of_kind(driven.step(Appended(), 1.0), Publish)
    wanted = the(driven.step(Acked(first.attempt), 2.0), SetFence)
    assert wanted.epoch == 2
    sent = the(driven.step(FenceSet(wanted.attempt, Fence(Epoch(2), "me", 102))), Publish)
    assert (sent.through, sent.fence.sequence) == (position(2, 1), 102)


def test_a_fence_is_moved_before_the_stream_lets_go_of_it() -> None:
    driven = Driven(MemoryLog())
    driven.begin()
    wake = the(driven.step(StreamRetention(20.0)), PublisherWakeAt)
    assert wake.at_s == 20.0 / FENCE_SHARE
    wanted = the(driven.step(PublisherTicked(), wake.at_s), SetFence)
    assert wanted.expected == 100
    effects = driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 101)))
    assert the(effects, PublisherWakeAt).at_s == 2 * 20.0 / FENCE_SHARE


def test_a_fence_that_aged_out_is_set_again() -> None:
    frames = log_of(*frames_of(2))
    driven = Driven(frames, message_bytes=SIZE)
    sent = of_kind(driven.begin(), Publish)
    connect = the(driven.step(FencedOff(sent[0].attempt, "wrong last sequence: 0")), Connect)
    assert not connect.anew
    wanted = the(driven.step(Connected(connect.attempt, None, Tail(position(1, 1), ORIGIN), ROOM)), SetFence)
    assert wanted.expected == 0
    again = of_kind(driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 200))), Publish)
    assert [(message.through.offset, message.fence.sequence) for message in again] == [(1, 200), (2, 200)]


def test_a_fence_that_is_refused_again_and_again_is_not_asked_for_in_haste() -> None:
    driven = Driven(log_of(*frames_of(1)))
    sent = the(driven.begin(), Publish)
    connect = the(driven.step(FencedOff(sent.attempt, "")), Connect)
    wanted = the(driven.step(Connected(connect.attempt, None, None, ROOM)), SetFence)
    effects = driven.step(FencedOff(wanted.attempt, ""))
    assert not of_kind(effects, Connect)
    assert the(effects, PublisherWakeAt).at_s > 0


OTHERS_PLACE = [
    (Fence(Epoch(2), "other", 9), None, 2),
    (Fence(Epoch(1), "other", 9), None, 1),
    (None, Tail(position(3, 5), position(3, 5)), 3),
    (None, Tail(position(1, 5), position(1, 5)), 1),
    (Fence(Epoch(1), "me", 9), Tail(position(3, 5), position(3, 5)), 3),
]


@pytest.mark.parametrize(("fence", "tail", "newest"), OTHERS_PLACE)
def test_another_runs_place_is_left_alone_with_one_word(fence: Fence | None, tail: Tail | None, newest: int) -> None:
    frames = log_of(*frames_of(2))
    driven = Driven(frames)
    effects = driven.find(fence, tail)
    shut = the(effects, ReportFenced)
    assert (shut.epoch, shut.run) == (newest, "other" if tail is None else "")
    assert driven.publisher.is_fenced
    assert not driven.publisher.is_owner
    frames.append(make_frame(2))
    assert not of_kind(driven.step(Appended(), 1.0), Publish)
    effects = driven.step(Disconnected("gone"))
    connect = the(driven.wait(effects), Connect)
    assert not of_kind(driven.step(Connected(connect.attempt, fence, tail, ROOM)), ReportFenced)


@pytest.mark.parametrize("fence", [Fence(Epoch(1), "other", 9), Fence(Epoch(2), "me", 9), None])
def test_an_older_epochs_place_and_its_own_are_taken(fence: Fence | None) -> None:
    driven = Driven(MemoryLog(), epoch=2)
    wanted = the(driven.find(fence, Tail(position(1, 5), position(1, 5))), SetFence)
    assert (wanted.epoch, wanted.expected) == (2, 9 if fence else 0)


def beat(run: str, at: int) -> Heartbeat:
    return Heartbeat(
        instance=InstanceId("one"), cluster="c", epoch=Epoch(2), published=Offset(0), wall_time_ns=at, run=run
    )


def test_it_takes_a_later_epoch_only_when_the_other_is_silent_for_three_heartbeats() -> None:
    driven = Driven(log_of(*frames_of(3), make_frame(0, epoch=3)))
    effects = driven.find(Fence(Epoch(2), "other", 9), Tail(position(2, 7), position(2, 4)))
    assert of_kind(effects, AskPulse)
    for at in range(1, 20):  # it lives
        assert not of_kind(driven.step(Pulse(beat("other", at)), float(at)), TakeOver)
    for at_s in (19.0, 20.0, 21.0, 21.9):
        assert not of_kind(driven.step(Pulse(beat("other", 19)), at_s), TakeOver)
    assert the(driven.step(Pulse(beat("other", 19)), 19.0 + SILENT_HEARTBEATS), TakeOver).epoch == 2
    assert not of_kind(driven.step(Pulse(beat("other", 19)), 30.0), TakeOver)  # said once
    assert not of_kind(driven.step(EpochBegun(Epoch(2))), Connect)
    wanted = the(
        driven.find(Fence(Epoch(2), "other", 9), Tail(position(2, 7), position(2, 4)), EpochBegun(Epoch(3))), SetFence
    )
    assert (wanted.epoch, wanted.expected) == (3, 9)
    sent = the(driven.step(FenceSet(wanted.attempt, Fence(Epoch(3), "me", 10))), Publish)
    assert sent.data == make_frame(0, epoch=3).data  # what it had of epochs before is nobody's any more


def test_its_own_last_heartbeat_is_no_sign_of_the_other() -> None:
    driven = Driven(MemoryLog())
    driven.find(Fence(Epoch(2), "other", 9))
    for at in range(1, SILENT_HEARTBEATS):
        assert not of_kind(driven.step(Pulse(beat("me", at)), float(at)), TakeOver)
    assert of_kind(driven.step(Pulse(None), float(SILENT_HEARTBEATS)), TakeOver)


def test_silence_does_not_count_while_the_stream_cannot_be_asked() -> None:
    driven = Driven(MemoryLog())
    driven.find(Fence(Epoch(2), "other", 9))
    effects = driven.step(Disconnected("gone"), 1.0)
    connect = the(driven.step(PublisherTicked(), 100.0), Connect)
    effects = driven.step(Connected(connect.attempt, Fence(Epoch(2), "other", 9), None, ROOM))
    assert of_kind(effects, AskPulse)
    assert not of_kind(driven.step(Pulse(None), 100.5), TakeOver)


def test_one_that_is_shut_out_in_the_middle_stops_at_once() -> None:
    driven = Driven(log_of(*frames_of(4)), message_bytes=SIZE)
    sent = of_kind(driven.begin(), Publish)
    connect = the(driven.step(FencedOff(sent[1].attempt, "")), Connect)
    assert not driven.publisher.is_owner
    effects = driven.step(Connected(connect.attempt, Fence(Epoch(2), "other", 300), Tail(position(2, 1), ORIGIN), ROOM))
    assert the(effects, ReportFenced) == ReportFenced(Epoch(2), "other")
    driven.step(Acked(sent[0].attempt))
    assert driven.publisher.published == ORIGIN


# -- everything at once ------------------------------------------------------------------------------------------------


class World:
    """A stream with fences behind an unreliable connection, in virtual time. Another run may take the place, and go."""

    def __init__(self, choice: random.Random) -> None:
        self.random = choice
        self.now_s = 0.0
        self.log = MemoryLog()
        self.stored: list[tuple[bytes, Position]] = []
        self.sequence = 0
        self.fence: Fence | None = None
        self.pulse: Heartbeat | None = None
        options = PublisherOptions(
            0.2,
            self.random.choice((1000, 4000, 4 << 20)),
            self.random.choice((1, 3, 512)),
            self.random.choice((1, 300, 2000, 1 << 18)),
            ack_wait_s=1.0,
        )
        self.publisher = Publisher(self.log, Epoch(1), "me", options, self.random.random)
        self.is_calm = False
        self.appended: list[FrameBytes] = []
        self.next_offset = 0
        self.epoch = 1
        self.others: list[int] = [0]
        self._connection = 0
        self._server = 0
        self._line_s = 0.0  # when the server has taken the last message of this connection
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._high = ORIGIN

    def later(self, wait_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + wait_s, next(self._order), do))

    def run_until(self, end_s: float) -> None:
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, do = heapq.heappop(self._agenda)
            do()
        self.now_s = end_s

    def append(self) -> None:
        frame = make_frame(
            self.next_offset, self.random.randint(1, 4), self.epoch, blocks=self.random.choice((1, 1, 5, 40))
        )
        self.next_offset = frame.next_offset
        self.log.append(frame)
        self.appended.append(frame)
        self.step(Appended())

    def begin_epoch(self, epoch: int, says_so: bool = True) -> None:
        self.epoch, self.next_offset = epoch, 0
        if says_so:
            self.step(EpochBegun(Epoch(epoch)))

    def step(self, happened: Input) -> None:
        for effect in self.publisher.step(self.now_s, happened):
            self.do(effect)
        assert self.publisher.published >= self._high
        self._high = self.publisher.published

    def do(self, effect: Effect) -> None:
        match effect:
            case PublisherWakeAt(at_s):
                assert at_s >= self.now_s
                self.later(at_s - self.now_s, lambda: self.step(PublisherTicked()))
            case Connect(attempt, anew):
                if anew:
                    self._connection += 1
                    self._line_s = self.now_s
                self.later(self.random.uniform(0.0, 0.2), lambda: self.answer_connect(attempt))
            case Publish():
                assert end_of_message(effect.data, InstanceId("i"), "") == effect.through
                self.send(effect.attempt, lambda: self.store(effect))
            case SetFence():
                self.send(effect.attempt, lambda: self.move_fence(effect))
            case ReadFence(sequence):
                fence = self.fence
                self.later(0.001, lambda: self.step(FenceRead(sequence, fence)))
            case AskPulse():
                pulse = self.pulse
                self.later(0.001, lambda: self.step(Pulse(pulse)))
            case TakeOver(epoch):
                self.later(self.random.uniform(0.0, 0.5), lambda: self.begin_epoch(max(epoch, self.epoch) + 1))
            case ReportFenced():
                pass

    def fails(self, chance: float) -> bool:
        return not self.is_calm and self.random.random() < chance

    def answer_connect(self, attempt: int) -> None:
        if self.fails(0.3):
            self.step(Disconnected("nobody there"))
            return
        data, acked = self.stored[-1] if self.stored else (b"", ORIGIN)
        self.step(
            Connected(
                attempt, self.fence, Tail(end_of_message(data, InstanceId("i"), ""), acked) if data else None, ROOM
            )
        )

    def send(self, attempt: int, store: Callable[[], Input]) -> None:
        """One connection's messages are stored in order; an earlier connection's may come late."""
        connection, server = self._connection, self._server
        if self.fails(0.05):
            self.later(0.01, lambda: self.answer(connection, Refused(attempt, "full")))
            return
        if self.fails(0.03):
            self.later(0.01, lambda: self.answer(connection, Disconnected("lost on the way")))
            return
        self._line_s = max(self._line_s, self.now_s + self.random.uniform(0.0, 0.01))
        if self.fails(0.02):
            self._line_s += self.random.uniform(0.0, 3.0)
        is_lost = self.fails(0.05)

        def arrive() -> None:
            if server != self._server:
                return
            answer = store()
            if is_lost:
                self.answer(connection, Disconnected("ack lost"))
            else:
                self.answer(connection, answer)

        self.later(self._line_s - self.now_s, arrive)

    def answer(self, connection: int, happened: Input) -> None:
        if connection == self._connection:
            self.step(happened)

    def store(self, message: Publish) -> Input:
        if self.fence is None or message.fence.sequence != self.fence.sequence:
            return FencedOff(message.attempt, "wrong last sequence")
        self.sequence += 1
        self.stored.append((message.data, message.acked))
        return Acked(message.attempt)

    def move_fence(self, wanted: SetFence) -> Input:
        if wanted.expected != (self.fence.sequence if self.fence else 0):
            return FencedOff(wanted.attempt, "wrong last sequence")
        self.sequence += 1
        self.fence = Fence(wanted.epoch, wanted.run, self.sequence)
        return FenceSet(wanted.attempt, self.fence)

    def lose_power(self) -> None:
        """The server comes back without its last writes, and perhaps without the last fence."""
        self.stored = self.stored[: self.random.randint(0, len(self.stored))]
        if self.random.random() < 0.5:
            self.fence = None
        self._server += 1
        self._connection += 1
        self.step(Disconnected("the server was away"))

    def usurp(self) -> None:
        """Another run takes a later epoch, tells one thing, lives for a while and is gone."""
        epoch = Epoch(max(self.epoch, self.fence.epoch if self.fence else 0, *self.others) + 1)
        self.others.append(epoch)
        self.sequence += 2
        self.fence = Fence(epoch, "other", self.sequence - 1)
        self.stored.append((make_frame(0, 7, epoch).data, ORIGIN))

        def live(at: int) -> None:
            self.pulse = beat("other", self.sequence + at)

        for at in range(self.random.randint(0, 5)):
            self.later(0.2 * at, partial(live, at))

    def contiguous(self) -> Position:
        """How far the stream has our log from its beginning, as a reader that puts frames aside finds."""
        frames = set()
        for data, _ in self.stored:
            at = 0
            while at < len(data):
                size = decode_header(data, at).frame_bytes
                frames.add(data[at : at + size])
                at += size
        reached = ORIGIN
        for frame in self.appended:
            if frame.data not in frames:
                break
            reached = Position(frame.epoch, frame.next_offset)
        return reached


def run_world(choice: random.Random, steps: int, with_losses: bool, with_others: bool) -> World:
    world = World(choice)
    world.step(PublisherTicked())
    at_s = 0.0
    for _ in range(steps):
        at_s += choice.choice((0.0, 0.0005, 0.01, 0.5))
        world.run_until(at_s)
        kind = choice.random()
        if kind < 0.9:
            world.append()
        elif kind < 0.93:
            world.begin_epoch(world.epoch + 1, world.publisher.is_fenced or choice.random() < 0.8)
        elif kind < 0.95:
            world.step(SnapshotBegan())
        elif kind < 0.97:
            world.fence = None  # it aged out
        elif kind < 0.985 and with_others:
            world.usurp()
        elif with_losses:
            world.lose_power()
        if not with_losses and not with_others:
            assert world.publisher.published <= world.contiguous()
    world.is_calm = True
    world.run_until(at_s + 60.0)
    world.append()  # an epoch of its own that is heard of
    world.run_until(at_s + 120.0)
    return world


@given(st.randoms(use_true_random=False), st.integers(0, 60))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_frame_reaches_the_stream_and_published_never_passes_what_is_there(
    choice: random.Random, steps: int
) -> None:
    world = run_world(choice, steps, with_losses=False, with_others=False)
    last = Position(world.appended[-1].epoch, world.appended[-1].next_offset)
    assert world.contiguous() == world.publisher.published == last
    assert world.publisher.has_all()


@pytest.mark.parametrize("seed", range(100))
def test_a_stream_that_loses_its_end_again_and_again_is_whole_at_last(seed: int) -> None:
    world = run_world(random.Random(seed), 60, with_losses=True, with_others=False)
    last = Position(world.appended[-1].epoch, world.appended[-1].next_offset)
    assert world.contiguous() == world.publisher.published == last


@pytest.mark.parametrize("seed", range(100))
def test_after_other_runs_have_come_and_gone_the_last_epoch_is_whole(seed: int) -> None:
    world = run_world(random.Random(seed), 60, with_losses=False, with_others=True)
    assert not world.publisher.is_fenced
    for epoch in world.others[1:]:  # what this one had in the same epoch is not mixed into the other's
        assert {data for data, _ in world.stored if decode_header(data).epoch == epoch} == {
            make_frame(0, 7, epoch).data
        }
    assert world.publisher.published == Position(Epoch(world.epoch), Offset(world.next_offset))
    world.appended = [frame for frame in world.appended if frame.epoch == world.epoch]
    assert world.contiguous() == world.publisher.published


# -- a stream that is away ---------------------------------------------------------------------------------------------


def test_a_stream_that_is_away_is_asked_again_soon_by_the_same_connection_and_heartbeats_go_on() -> None:
    driven = Driven(log_of(*frames_of(2)))
    (sent,) = of_kind(driven.begin(), Publish)
    effects = driven.step(Refused(sent.attempt, "no leader", away=True))
    begin_s = driven.now_s
    for _ in range(LOOKS_MOST - 1):
        assert driven.publisher.is_owner
        connect = the(driven.wait(effects), Connect)
        assert not connect.anew and driven.publisher.is_owner
        effects = driven.step(Disconnected("late", stands=True))
    assert driven.now_s - begin_s < LOOKS_MOST * LOOK_MOST_S
    connect = the(driven.wait(effects), Connect)
    effects = driven.step(Connected(connect.attempt, Fence(Epoch(1), "me", 100), None, ROOM))
    wanted = the(effects, SetFence)
    effects = driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 200)))
    assert the(effects, Publish).fence.sequence == 200


def test_a_stream_that_stays_away_is_tried_by_another_connection() -> None:
    driven = Driven(log_of(*frames_of(1)))
    (sent,) = of_kind(driven.begin(), Publish)
    effects = driven.step(Refused(sent.attempt, "no leader", away=True))
    kinds = []
    for _ in range(LOOKS_MOST + 1):
        kinds.append(the(driven.wait(effects), Connect).anew)
        effects = driven.step(Disconnected("late", stands=True))
    assert kinds == [False] * LOOKS_MOST + [True]


def test_how_long_an_ack_may_take_follows_from_how_long_acks_took() -> None:
    def late_after_s(took_s: float) -> float:
        driven = Driven(MemoryLog())
        driven.begin()
        for at in range(30):
            driven.publisher._frames.append(make_frame(at))  # type: ignore[attr-defined]
            (sent,) = of_kind(driven.step(Appended(), driven.now_s + 1.0), Publish)
            driven.step(Acked(sent.attempt), driven.now_s + took_s)
        driven.publisher._frames.append(make_frame(30))  # type: ignore[attr-defined]
        effects = driven.step(Appended(), driven.now_s + 0.1)
        begin_s = driven.now_s
        while not of_kind(effects, Connect):
            effects = driven.wait(effects)
        return driven.now_s - begin_s

    assert late_after_s(0.001) < 1.2
    assert 2.0 < late_after_s(2.0) <= ACK_WAIT_S


def test_messages_that_take_longer_than_expected_are_given_more_time_each_time() -> None:
    """Otherwise a link slower than the first acknowledgement said would never get a message through."""
    driven = Driven(log_of(*frames_of(1)))
    effects = driven.begin()
    waits = []
    for _ in range(4):
        begin_s = driven.now_s
        while not (connects := of_kind(effects, Connect)):
            effects = driven.wait(effects)
        waits.append(driven.now_s - begin_s)
        effects = driven.step(Connected(connects[0].attempt, Fence(Epoch(1), "me", 100), None, ROOM))
        wanted = the(effects, SetFence)
        effects = driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 100)))
    assert waits[-1] >= ACK_WAIT_S > waits[0]


def test_a_fence_that_is_pushed_out_again_and_again_costs_few_attempts_though_messages_are_stored_between() -> None:
    driven = Driven(log_of(*frames_of(400)), message_bytes=SIZE)
    effects, snapshots, fence = driven.begin(), 0, 100
    while driven.now_s < 60.0 and snapshots < 1000:
        sent = of_kind(effects, Publish)
        if sent:
            snapshots += 1
            driven.step(Acked(sent[0].attempt))
            effects = driven.step(FencedOff(sent[1].attempt, "pushed out"))
            continue
        if connects := of_kind(effects, Connect):
            effects = driven.step(Connected(connects[0].attempt, None, None, ROOM))
            wanted = the(effects, SetFence)
            fence += 1
            effects = driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", fence)))
            continue
        effects = driven.wait(effects)
    assert snapshots < 100


def test_no_more_messages_are_under_way_than_the_stream_bears() -> None:
    driven = Driven(log_of(*frames_of(4)), message_bytes=SIZE)
    connect = the(driven.step(PublisherTicked()), Connect)
    wanted = the(driven.step(Connected(connect.attempt, None, None, ROOM, in_flight=1)), SetFence)
    effects = driven.step(FenceSet(wanted.attempt, Fence(Epoch(1), "me", 7)))
    for offset in range(1, 5):
        (sent,) = of_kind(effects, Publish)
        assert sent.through == position(1, offset)
        effects = driven.step(Acked(sent.attempt))
