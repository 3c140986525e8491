"""Whom the catalog asks for a snapshot, and when."""

from __future__ import annotations

from kvbm.catalog.follow.snapshots import SnapshotAsker, SnapshotReason
from kvbm.core.ids import InstanceId

ONE, TWO = InstanceId("one"), InstanceId("two")


def asker(chance: float = 0.0) -> SnapshotAsker:
    return SnapshotAsker(again_s=10.0, chance=lambda: chance)


def asked(
    snapshots: SnapshotAsker, now_s: float, *, deaf: bool = False, **suspicions: SnapshotReason
) -> list[InstanceId]:
    return snapshots.step(now_s, {InstanceId(k): v for k, v in suspicions.items()}, lambda instance: not deaf)


def test_an_instance_is_asked_at_once_and_again_while_it_stays_suspect() -> None:
    snapshots = asker()
    assert asked(snapshots, 0.0, one=SnapshotReason(1)) == ["one"]
    snapshots.answered(0.0, ONE, True)
    assert asked(snapshots, 9.9, one=SnapshotReason(1)) == []
    assert asked(snapshots, 10.0, one=SnapshotReason(1)) == ["one"]
    assert snapshots.asked == 2
    assert asked(snapshots, 100.0) == []


def test_requests_of_replicas_lie_apart() -> None:
    snapshots = asker(chance=1.0)
    asked(snapshots, 0.0, one=SnapshotReason(1))
    assert asked(snapshots, 12.4, one=SnapshotReason(1)) == []
    assert asked(snapshots, 12.5, one=SnapshotReason(1)) == ["one"]


def test_news_is_asked_for_at_once_but_not_twice_in_a_moment() -> None:
    snapshots = asker()
    asked(snapshots, 0.0, one=SnapshotReason(1))
    assert asked(snapshots, 0.1, one=SnapshotReason(2)) == []
    assert asked(snapshots, 0.5, one=SnapshotReason(2)) == ["one"]
    assert asked(snapshots, 1.5, one=SnapshotReason(2)) == []


def test_suspicion_that_ends_is_forgotten() -> None:
    snapshots = asker()
    asked(snapshots, 0.0, one=SnapshotReason(1))
    assert snapshots.age_s(1.0, ONE) == 1.0
    assert asked(snapshots, 1.0) == []
    assert snapshots.age_s(1.0, ONE) is None
    assert asked(snapshots, 1.1, one=SnapshotReason(1)) == ["one"]


def test_whoever_does_not_hear_is_not_asked_until_he_does() -> None:
    snapshots = asker()
    assert asked(snapshots, 0.0, deaf=True, one=SnapshotReason(1)) == []
    assert asked(snapshots, 5.0, one=SnapshotReason(1)) == ["one"]


def test_a_request_that_nobody_took_is_sent_again_sooner_and_ever_later() -> None:
    snapshots = asker()
    sent = []
    for tenth in range(160):
        now_s = tenth / 10
        if asked(snapshots, now_s, one=SnapshotReason(1)):
            sent.append(now_s)
            snapshots.answered(now_s, ONE, False)
    assert sent == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5]


def test_what_a_snapshot_may_not_heal_is_asked_for_once() -> None:
    snapshots = asker()
    assert asked(snapshots, 0.0, one=SnapshotReason(1, once=True), two=SnapshotReason(1)) == ["one", "two"]
    assert asked(snapshots, 20.0, one=SnapshotReason(1, once=True), two=SnapshotReason(1)) == ["two"]
    assert asked(snapshots, 21.0, one=SnapshotReason(2, once=True), two=SnapshotReason(1)) == ["one"]
