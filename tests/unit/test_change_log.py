"""The ring of recent changes: bounded, read at each reader's own speed, and entered again at a place."""

from __future__ import annotations

import asyncio

import pytest

from kvbm.catalog.index.change_log import ChangeKind, ChangeLog, LogPlace, RecordedIndex, place_of
from kvbm.core.codec import decode_frame
from kvbm.core.ids import Epoch, InstanceId
from kvbm.reference.cluster_index import ReferenceIndex
from tests.nats_fixture import make_frame

A = InstanceId("a")


def new_log(most_bytes: int = 1 << 20, sequence: int = 0) -> ChangeLog:
    log = ChangeLog(most_bytes, decode_frame)
    log.begin(sequence, lambda: "stream")
    return log


def serials(log: ChangeLog, after: int) -> list[int]:
    found = []
    while (entry := log.after(after)) is not None:
        found.append(entry.serial)
        after = entry.serial
    return found


def test_each_reader_goes_through_all_entries_in_order() -> None:
    log = new_log()
    for sequence in range(1, 6):
        log.add(sequence, ChangeKind.STATUS, A)
    assert serials(log, 0) == [1, 2, 3, 4, 5]
    assert serials(log, 3) == [4, 5]
    assert log.after(5) is None


def test_the_ring_has_its_bytes_and_whoever_is_behind_learns_it() -> None:
    log = new_log(most_bytes=20_000)
    for sequence in range(1, 2000):
        log.add(sequence, ChangeKind.FRAME, A, make_frame(sequence, blocks=4).data)
        assert log.bytes <= 20_000
    assert 5 < len(log) < 100
    with pytest.raises(LookupError):
        log.after(0)
    assert log.find(LogPlace(1, 1, log.run, "stream")) is None
    assert log.find(LogPlace(1, 1, "another", "stream")) is None
    assert log.find(log.place()) == log.last


def test_a_frame_larger_than_the_ring_is_missed_by_all() -> None:
    log = new_log(most_bytes=100)
    log.add(1, ChangeKind.FRAME, A, make_frame(0, blocks=100).data)
    assert (len(log), log.bytes, log.last) == (0, 0, 1)
    with pytest.raises(LookupError):
        log.after(0)
    assert log.after(1) is None


def test_a_place_of_another_catalog_is_found_by_its_sequence() -> None:
    log = new_log(sequence=10)
    for sequence in (11, 12, 12, 13):
        log.add(sequence, ChangeKind.STATUS, A)
    assert [log.find(LogPlace(at, 77, "another", "stream")) for at in (9, 10, 11, 12, 13, 99)] == [None, 0, 1, 3, 4, 4]
    assert log.find(LogPlace(12, 77, "another", "other stream")) is None


def test_a_place_lies_before_frames_in_a_reorder_buffer() -> None:
    log = new_log()
    log.add(1, ChangeKind.STATUS, A)
    log.wait(2, A, True)
    log.add(5, ChangeKind.STATUS, A)
    entry = log.after(1)
    assert entry is not None
    assert (entry.sequence, log.place_behind(entry).sequence, log.place().sequence) == (5, 1, 1)
    log.wait(5, A, False)
    assert log.place().sequence == 5


def test_sequences_that_begin_anew_are_another_history() -> None:
    names = ["one"]
    log = ChangeLog(1 << 20, decode_frame)
    log.begin(0, lambda: names[0])
    for sequence in (1, 2, 3):
        log.add(sequence, ChangeKind.STATUS, A)
    before = log.place()
    log.add(1, ChangeKind.STATUS, A)
    names[0] = "two"
    assert log.run != before.run
    assert log.find(before) is None
    assert serials(log, log.last - 1) == [log.last]
    with pytest.raises(LookupError):
        log.after(before.serial)


@pytest.mark.parametrize(
    "text", ["", "1", "1.2.3", "a.1.r.s", "1.-1.r.s", f"{'9' * 30}.1.r.s", f"1.1.{'r' * 65}.s", "1.1.r." + "s" * 300]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    assert place_of(text) is None


def test_a_place_reads_as_it_was_written() -> None:
    place = LogPlace(7, 9, "run", "a.stream.with.dots")
    assert place_of(place.text()) == place


def test_an_index_records_what_changes_it_and_answers_as_before() -> None:
    log, plain = new_log(), ReferenceIndex(100)
    index = RecordedIndex(plain, log, lambda: 7)
    data = make_frame(0, events=2, blocks=3, instance="a").data
    assert index.apply(data).blocks == 6
    index.miss(A)
    index.exclude(A, True)
    index.begin_blind(A, Epoch(2))
    index.drop(A)
    kinds = []
    at = 0
    while (entry := log.after(at)) is not None:
        kinds.append((entry.kind, entry.name(), entry.sequence))
        at = entry.serial
    assert kinds == [
        (kind, "a", 7)
        for kind in (ChangeKind.FRAME, ChangeKind.MISSED, ChangeKind.STATUS, ChangeKind.EMPTIED, ChangeKind.DROPPED)
    ]
    assert index.instances() == plain.instances() == []
    first = log.after(0)
    assert first is not None
    assert first.frame(decode_frame) is first.frame(decode_frame)
    assert len(first.frame(decode_frame).events) == 2


def test_readers_wake_when_something_comes_and_wait_no_longer_than_they_want() -> None:
    async def work() -> None:
        log = new_log()
        waiting = [asyncio.create_task(log.wait_after(0, 1000.0)) for _ in range(3)]
        await asyncio.sleep(0)
        log.add(1, ChangeKind.STATUS, A)
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)
            await log.wait_after(1, 0.01)
            await log.wait_after(0, 1000.0)

    asyncio.run(work())
