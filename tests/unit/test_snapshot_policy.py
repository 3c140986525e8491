"""When an instance takes a snapshot of what it holds: asked, by age, by messages, and by the room in its journal."""

from __future__ import annotations

from kvbm.manager.record.snapshot_policy import (
    Asked,
    Began,
    BeginSnapshot,
    Dropped,
    Effect,
    Ended,
    Input,
    JournalSize,
    Learned,
    SnapshotPolicy,
    Ticked,
    WakeAt,
)
from kvbm.streams.base import StreamState

BEGIN: list[Effect] = [BeginSnapshot()]


def told(snapshots: SnapshotPolicy, now_s: float, *inputs: Input) -> list[Effect]:
    effects: list[Effect] = []
    for happened in inputs:
        effects = snapshots.step(now_s, happened)
    return effects


def begun(least_s: float = 10.0, capacity_bytes: int = 0) -> SnapshotPolicy:
    """After the first snapshot of an epoch, at second 100."""
    snapshots = SnapshotPolicy(least_s, capacity_bytes)
    assert told(snapshots, 100.0, Began(), Ended()) == []
    return snapshots


def state(last: int, first: int = 1, size: int = 0, most: int = -1, age_s: float = 0.0, of: str = "a") -> StreamState:
    return StreamState(first, last, size, most, age_s, of)


def test_a_snapshot_that_is_asked_for_begins_at_once_and_the_next_one_only_after_a_while() -> None:
    snapshots = begun()
    assert told(snapshots, 101.0, Asked()) == BEGIN
    assert told(snapshots, 101.0, Ticked()) == BEGIN  # until it has
    assert told(snapshots, 101.0, Began()) == []
    assert told(snapshots, 101.1, Ended()) == []
    assert told(snapshots, 104.0, Asked(), Asked()) == [WakeAt(111.0)]
    assert told(snapshots, 110.9, Ticked()) == [WakeAt(111.0)]
    assert told(snapshots, 111.0, Ticked()) == BEGIN
    assert told(snapshots, 111.0, Began(), Ended()) == []  # both were served by it


def test_who_asks_during_a_snapshot_gets_another_one() -> None:
    snapshots = begun(least_s=1.0)
    told(snapshots, 101.0, Asked())
    told(snapshots, 101.0, Began())
    assert told(snapshots, 101.5, Asked()) == []  # it may have missed what was listed already
    assert told(snapshots, 101.7, Ended()) == [WakeAt(102.0)]
    assert told(snapshots, 102.0, Ticked()) == BEGIN


def test_a_snapshot_that_was_dropped_is_due_again_where_time_demands_it() -> None:
    snapshots = begun()
    told(snapshots, 101.0, Learned(state(1, age_s=400.0)))
    assert told(snapshots, 200.0, Ticked()) == BEGIN
    assert told(snapshots, 200.0, Began()) == []
    assert told(snapshots, 201.0, Dropped()) == BEGIN


def test_a_quarter_of_the_age_the_stream_keeps_makes_a_snapshot_due() -> None:
    snapshots = begun()
    assert told(snapshots, 110.0, Learned(state(5, age_s=40.0))) == BEGIN
    told(snapshots, 110.0, Began())
    assert told(snapshots, 113.0, Ended()) == [WakeAt(120.0)]  # counted from where it began


def test_a_quarter_of_a_stream_that_is_nearly_full_makes_a_snapshot_due() -> None:
    snapshots = begun()
    assert told(snapshots, 101.0, Learned(state(1000, size=700, most=1000))) == []
    assert told(snapshots, 102.0, Learned(state(2000, size=740, most=1000))) == []  # far, but the stream is not full
    assert told(snapshots, 103.0, Learned(state(2000, 1001, size=760, most=1000))) == BEGIN
    told(snapshots, 103.0, Began(), Ended())
    assert told(snapshots, 104.0, Learned(state(2249, 1250, size=990, most=1000))) == []
    assert told(snapshots, 105.0, Learned(state(2250, 1251, size=990, most=1000))) == BEGIN


def test_a_store_that_was_replaced_gets_a_snapshot() -> None:
    snapshots = begun()
    assert told(snapshots, 101.0, Learned(state(500))) == []
    assert told(snapshots, 102.0, Learned(state(0, of="b"))) == BEGIN


def test_a_journal_that_is_half_full_of_what_no_snapshot_has_made_needless_makes_one_due() -> None:
    snapshots = begun(capacity_bytes=1000)
    assert told(snapshots, 101.0, JournalSize(499, 499)) == []
    assert told(snapshots, 102.0, JournalSize(500, 500)) == BEGIN
    told(snapshots, 102.0, Began(), Ended())
    assert (
        told(snapshots, 103.0, JournalSize(749, 749)) == []
    )  # nothing is published: another snapshot would only make it fuller
    assert told(snapshots, 104.0, JournalSize(750, 750)) == BEGIN


def test_a_snapshot_as_large_as_half_the_journal_does_not_call_for_the_next_one() -> None:
    snapshots = begun(capacity_bytes=1000)
    assert told(snapshots, 102.0, JournalSize(500, 500)) == BEGIN
    assert told(snapshots, 102.0, Began(), JournalSize(1000, 1000)) == []
    assert told(snapshots, 103.0, Ended()) == []
    assert told(snapshots, 104.0, JournalSize(600, 1100)) == []
    assert told(snapshots, 105.0, JournalSize(750, 1250)) == BEGIN
