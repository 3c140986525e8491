"""For how long instances are gone: counted in time that was listened, through restarts, and never at once."""

from __future__ import annotations

from kvbm.catalog.members.downtime import LISTEN_FIRST_S, Downtimes
from kvbm.catalog.sql.rows import AbsenceRow
from kvbm.core.ids import InstanceId

A, B = InstanceId("a"), InstanceId("b")
DAY_S = 86_400.0
FORGET_S = 7 * DAY_S


def listen(
    downtimes: Downtimes, begin_s: float, end_s: float, step_s: float = 5.0, here: tuple[InstanceId, ...] = ()
) -> None:
    now_s = begin_s
    while now_s <= end_s:
        downtimes.listen(now_s, True)
        for instance in (A, B):
            downtimes.note(instance, instance not in here, 0)
        now_s += step_s


def gone_for(unheard_s: float) -> Downtimes:
    downtimes = Downtimes(FORGET_S)
    downtimes.load([A], [AbsenceRow(instance=A, unheard_s=int(unheard_s))])
    return downtimes


def test_who_is_gone_for_forget_s_is_due_and_who_is_here_is_not() -> None:
    downtimes = Downtimes(100.0, first_s=10.0)
    listen(downtimes, 0.0, 95.0, here=(B,))
    assert downtimes.due(10) == []
    listen(downtimes, 100.0, 105.0, here=(B,))
    assert downtimes.due(10) == [A]
    downtimes.forget(A)
    assert downtimes.due(10) == [] and downtimes.gone() == []


def test_a_catalog_that_was_away_for_a_week_forgets_nobody_before_it_has_listened() -> None:
    downtimes = gone_for(FORGET_S - 30.0)
    downtimes.listen(8 * DAY_S, True)  # on a clock that went on meanwhile
    downtimes.note(A, True, 0)
    assert downtimes.unheard_s(A) == FORGET_S - 30.0 and downtimes.due(10) == []
    listen(downtimes, 8 * DAY_S + 5, 8 * DAY_S + 25)
    assert downtimes.due(10) == []
    listen(downtimes, 8 * DAY_S + 30, 8 * DAY_S + LISTEN_FIRST_S)
    assert A in downtimes.due(10)


def test_a_message_is_a_sign_of_life_also_in_a_stream_whose_sequences_began_anew() -> None:
    downtimes = Downtimes(FORGET_S)
    for now_s, spoke in ((0.0, 500), (5.0, 3), (10.0, 3)):  # 3: the number says no more than that it is another history
        downtimes.listen(now_s, True)
        downtimes.note(A, True, spoke)
    assert downtimes.unheard_s(A) == 10.0
    downtimes.note(A, True, 7)
    assert downtimes.unheard_s(A) == 0.0


def test_one_long_gone_is_not_forgotten_in_the_first_minute_and_not_when_it_is_back() -> None:
    downtimes = gone_for(10 * FORGET_S)
    listen(downtimes, 0.0, LISTEN_FIRST_S - 10.0)
    assert downtimes.due(10) == []
    downtimes.note(A, False, 0)  # it is heard
    listen(downtimes, LISTEN_FIRST_S, LISTEN_FIRST_S + 100.0)
    assert downtimes.due(10) == []


def test_time_in_which_the_catalog_is_cut_off_or_frozen_counts_for_nobody() -> None:
    downtimes = Downtimes(100.0, first_s=10.0, most_step_s=10.0)
    listen(downtimes, 0.0, 50.0)
    for second in range(51, 500):
        downtimes.listen(float(second), False)
    downtimes.listen(500.0, True)
    downtimes.note(A, True, 0)
    assert downtimes.listened_s == 50.0
    downtimes.listen(900.0, True)  # it stood still in between
    assert downtimes.listened_s == 60.0 and downtimes.due(10) == []


def test_a_message_is_a_sign_of_life() -> None:
    downtimes = Downtimes(100.0, first_s=10.0)
    downtimes.listen(0.0, True)
    downtimes.note(A, True, 7)
    for second in range(1, 90):
        downtimes.listen(float(second), True)
    downtimes.note(A, True, 8)
    assert downtimes.unheard_s(A) == 0.0


def test_the_count_outlasts_restarts_and_returns_end_it() -> None:
    downtimes = Downtimes(100.0, first_s=10.0)
    listen(downtimes, 0.0, 60.0)
    gone, here = downtimes.rows(30.0)
    assert {row.instance: row.unheard_s for row in gone} == {A: 60, B: 60} and here == []
    downtimes.stored(gone, here)
    downtimes.note(A, False, 0)
    assert downtimes.rows(30.0)[1] == [A]
    downtimes.note(A, True, 0)  # gone again at once: what SQL has is too much
    assert downtimes.rows(30.0)[1] == [A]
    downtimes.stored(*downtimes.rows(30.0))
    assert downtimes.rows(30.0)[1] == []
    again = Downtimes(100.0, first_s=10.0)
    again.load([A, B], gone)
    assert again.unheard_s(B) == 60.0
    listen(again, 0.0, 40.0)
    assert set(again.due(10)) == {A, B}
    assert again.due(1) == [A] and len(again) == 2


def test_the_longest_gone_are_first() -> None:
    downtimes = Downtimes(10.0, first_s=1.0)
    downtimes.listen(0.0, True)
    downtimes.note(B, True, 0)
    downtimes.listen(5.0, True)
    downtimes.note(A, True, 0)
    downtimes.listen(15.0, True)
    downtimes.listen(20.0, True)
    assert downtimes.due(10) == [B, A] and downtimes.due(1) == [B]
