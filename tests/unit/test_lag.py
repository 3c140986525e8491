"""How old what a catalog knows is: unit tests of two small state machines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvbm.catalog.follow.lag import Backlog, Confirmation, StreamLag
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import EventReader, EventStream, Position

ONE, TWO = InstanceId("one"), InstanceId("two")


def at(epoch: int, offset: int) -> Position:
    return Position(Epoch(epoch), Offset(offset))


# -- the stream's end --------------------------------------------------------------------------------------------------


def test_a_view_is_as_young_as_the_question_whose_answer_is_read() -> None:
    view = Confirmation(0.0)
    view.answered(10.0, 100, 90)
    assert view.age_s(11.0) == 11.0  # known, and not read
    view.read(99)
    assert view.age_s(11.0) == 11.0
    view.read(150)
    assert view.age_s(11.0) == 1.0


def test_a_view_grows_old_while_nobody_answers_whatever_is_read() -> None:
    view = Confirmation(0.0)
    view.answered(1.0, 5, 5)
    for sequence in range(5, 50):
        view.read(sequence)
    assert view.age_s(61.0) == 60.0


def test_a_stream_that_ends_before_what_is_read_confirms_nothing() -> None:
    view = Confirmation(0.0)
    view.answered(1.0, 1000, 1000)
    view.read(1000)
    view.answered(2.0, 3, 1000)  # another store, or one that lost its end; the reader does not know yet
    view.read(1000)
    assert view.age_s(5.0) == 4.0
    view.answered(6.0, 3, 0)  # it has begun anew
    view.read(3)
    assert view.age_s(7.0) == 1.0


def test_a_reader_that_stays_behind_by_more_than_is_remembered_is_as_old_as_it_is() -> None:
    view = Confirmation(0.0)
    for second in range(1, 1000):
        view.answered(float(second), second, 0)
        view.read(second - 200)
    assert 200 <= view.age_s(999.0) <= 400


# -- instances ---------------------------------------------------------------------------------------------------------


class Read:
    """What a catalog has read, by instance."""

    def __init__(self) -> None:
        self.backlog = Backlog(3.0)
        self.places: dict[InstanceId, Position] = {}

    def on_heartbeat(
        self, now_s: float, epoch: int, decided: int, instance: InstanceId = ONE, sent_s: float | None = None
    ) -> None:
        self.backlog.on_heartbeat(
            now_s,
            now_s if sent_s is None else sent_s,
            instance,
            at(epoch, decided),
            self.places.get(instance, at(0, 0)),
        )

    def behind(self, now_s: float) -> set[InstanceId]:
        return set(self.backlog.judge(now_s, lambda name: self.places.get(name, at(0, 0))))


def test_who_says_it_has_decided_what_is_never_read_is_behind_after_a_while_though_it_is_heard() -> None:
    read = Read()
    read.places = {ONE: at(1, 13), TWO: at(1, 13)}
    for second in range(10):
        read.on_heartbeat(float(second), 1, 13 + 100 * second)
        read.on_heartbeat(float(second), 1, 13, TWO)
    assert read.behind(9.0) == {ONE}
    assert read.backlog.age_s(9.0, ONE) == 9.0
    assert read.backlog.decided(ONE) == at(1, 913)
    read.places[ONE] = at(1, 700)
    assert read.behind(10.0) == {ONE}
    assert read.backlog.age_s(10.0, ONE) == 4.0  # as of when it had decided 613
    read.places[ONE] = at(1, 913)
    assert not read.behind(11.0)


def test_who_is_not_heard_is_behind_at_once_when_it_is_heard_again_until_its_events_are_read() -> None:
    """A stream without a leader takes neither events nor heartbeats; the first heartbeat after it says nothing of the
    time between.
    """
    read = Read()
    read.places = {ONE: at(1, 13)}
    read.on_heartbeat(0.0, 1, 13)
    assert read.behind(6.0) == {ONE}
    read.on_heartbeat(6.5, 1, 999)
    assert read.behind(7.0) == {ONE}
    read.places[ONE] = at(1, 999)
    assert not read.behind(8.0)


def test_who_comes_back_after_it_was_left_out_is_behind_from_its_first_word_on() -> None:
    read = Read()
    read.places = {ONE: at(1, 13)}
    read.on_heartbeat(0.0, 1, 13)
    read.backlog.leave_out(ONE)
    assert not read.behind(6.0)
    read.on_heartbeat(6.1, 1, 999)
    assert read.backlog.behind == {ONE}
    read.places[ONE] = at(1, 999)
    read.on_heartbeat(6.2, 1, 999)
    assert not read.backlog.behind


def test_an_old_heartbeat_that_is_heard_late_does_not_count_as_of_now() -> None:
    """The stream of pulses keeps the last of everyone, and gives it to a reader that begins anew, perhaps for the first
    time.
    """
    read = Read()
    read.places = {ONE: at(1, 100)}
    read.on_heartbeat(0.0, 1, 50)
    read.on_heartbeat(4.0, 1, 60, sent_s=0.5)  # the newest own pulse heard before it was sent then
    assert read.behind(4.0) == {ONE}


def test_an_epoch_that_is_over_and_never_came_is_not_waited_for() -> None:
    read = Read()
    read.places = {ONE: at(1, 5)}
    read.on_heartbeat(0.0, 1, 50)
    read.on_heartbeat(1.0, 2, 3)
    read.places[ONE] = at(2, 3)
    assert not read.behind(3.5)


def test_who_does_not_say_what_it_has_decided_is_behind_only_when_it_is_not_heard() -> None:
    read = Read()
    read.on_heartbeat(0.0, 1, 0)
    read.on_heartbeat(5.0, 1, 0)
    assert not read.behind(5.0)


def test_what_is_remembered_of_one_instance_is_bounded_and_the_oldest_counts() -> None:
    read = Read()
    for second in range(1, 10_000):
        read.on_heartbeat(float(second), 1, second)
    assert read.behind(10_000.0) == {ONE}
    assert read.backlog.age_s(10_000.0, ONE) == 9_999.0
    read.places[ONE] = at(1, 9_999)
    assert not read.behind(10_001.0)


def test_what_another_life_had_decided_is_not_waited_for() -> None:
    """Its epoch was larger: nobody will ever read so far. The new life is always a little ahead of what is read."""
    backlog = Backlog(4.0)
    for offset in (700, 800, 900):
        backlog.on_heartbeat(0.0, 0.0, ONE, at(8, offset), at(8, 600))
    for second in range(1, 60):
        backlog.on_heartbeat(float(second), float(second), ONE, at(1, 10 * second), at(1, 10 * second - 5))
        backlog.judge(float(second), lambda _, read=10 * second - 5: at(1, read))
    assert backlog.age_s(60.0, ONE) < 4.0 and not backlog.behind


# -- how much is not read ----------------------------------------------------------------------------------------------


def test_while_nobody_says_where_the_stream_ends_it_is_not_known_how_much_is_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("kvbm.catalog.follow.lag.time", SimpleNamespace(monotonic=lambda: now.s))
    reader = SimpleNamespace(at_end=False)
    sequencer = SimpleNamespace(sequence=40)
    lag = StreamLag(cast(EventStream, None), cast(EventReader, reader), cast(Sequencer, sequencer), 42)
    assert (lag.messages(), lag.known_messages(101.0), lag.seconds(101.0, 7.0)) == (2, 2, 7.0)
    reader.at_end = True  # as a reader still is once its server is gone
    assert (lag.known_messages(101.9), lag.seconds(101.9, 7.0)) == (0, 0.0)
    assert (lag.messages(), lag.known_messages(130.0), lag.seconds(130.0, 7.0)) == (0, None, 30.0)
