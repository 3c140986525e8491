"""Whom the catalog asks for a round, and when."""

from __future__ import annotations

from kvbm.catalog.snapshots import Doubt, RoundAsker
from kvbm.core.ids import InstanceId

ONE, TWO = InstanceId("one"), InstanceId("two")


def asker(chance: float = 0.0) -> RoundAsker:
    return RoundAsker(again_s=10.0, chance=lambda: chance)


def asked(rounds: RoundAsker, now_s: float, *, deaf: bool = False, **doubts: Doubt) -> list[InstanceId]:
    return rounds.step(now_s, {InstanceId(k): v for k, v in doubts.items()}, lambda instance: not deaf)


def test_an_instance_is_asked_at_once_and_again_while_it_stays_doubtful() -> None:
    rounds = asker()
    assert asked(rounds, 0.0, one=Doubt(1)) == ["one"]
    rounds.answered(0.0, ONE, True)
    assert asked(rounds, 9.9, one=Doubt(1)) == []
    assert asked(rounds, 10.0, one=Doubt(1)) == ["one"]
    assert rounds.asked == 2
    assert asked(rounds, 100.0) == []


def test_requests_of_replicas_lie_apart() -> None:
    rounds = asker(chance=1.0)
    asked(rounds, 0.0, one=Doubt(1))
    assert asked(rounds, 12.4, one=Doubt(1)) == []
    assert asked(rounds, 12.5, one=Doubt(1)) == ["one"]


def test_news_is_asked_for_at_once_but_not_twice_in_a_moment() -> None:
    rounds = asker()
    asked(rounds, 0.0, one=Doubt(1))
    assert asked(rounds, 0.1, one=Doubt(2)) == []
    assert asked(rounds, 0.5, one=Doubt(2)) == ["one"]
    assert asked(rounds, 1.5, one=Doubt(2)) == []


def test_doubt_that_ends_is_forgotten() -> None:
    rounds = asker()
    asked(rounds, 0.0, one=Doubt(1))
    assert rounds.age_s(1.0, ONE) == 1.0
    assert asked(rounds, 1.0) == []
    assert rounds.age_s(1.0, ONE) is None
    assert asked(rounds, 1.1, one=Doubt(1)) == ["one"]


def test_whoever_does_not_hear_is_not_asked_until_he_does() -> None:
    rounds = asker()
    assert asked(rounds, 0.0, deaf=True, one=Doubt(1)) == []
    assert asked(rounds, 5.0, one=Doubt(1)) == ["one"]


def test_a_request_that_nobody_took_is_sent_again_sooner_and_ever_later() -> None:
    rounds = asker()
    sent = []
    for tenth in range(160):
        now_s = tenth / 10
        if asked(rounds, now_s, one=Doubt(1)):
            sent.append(now_s)
            rounds.answered(now_s, ONE, False)
    assert sent == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5]


def test_what_a_round_may_not_heal_is_asked_for_once() -> None:
    rounds = asker()
    assert asked(rounds, 0.0, one=Doubt(1, once=True), two=Doubt(1)) == ["one", "two"]
    assert asked(rounds, 20.0, one=Doubt(1, once=True), two=Doubt(1)) == ["two"]
    assert asked(rounds, 21.0, one=Doubt(2, once=True), two=Doubt(1)) == ["one"]
