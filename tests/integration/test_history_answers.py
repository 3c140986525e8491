"""What `/v1/history` answers, from a history alone: states of instances, holes, clocks that differ, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kvbm.core.events import InstanceStarted, InstanceStopped, StopReason
from kvbm.core.ids import Epoch, Tier
from kvbm.replay.history_answers import AnswerError, HistoryAnswers
from kvbm.replay.sql import DamagedHistoryError
from tests.captures import BEGIN_NS, SECOND_NS
from tests.small_histories import (
    ACME,
    LOG,
    ONE,
    OTHER,
    POOLS,
    START,
    THREE,
    TWO,
    created,
    cut_at,
    frames_of,
    hash_of,
    made,
)

AGAIN = InstanceStarted(epoch=Epoch(2), pools=POOLS, namespaces=(ACME, OTHER))


def at(seconds: float) -> str:
    return f"2026-01-01T00:00:{seconds:09.6f}Z"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., HistoryAnswers]]:
    """Makes a history of frames and opens it."""
    answers: list[HistoryAnswers] = []

    def make(*frames: object) -> HistoryAnswers:
        made(tmp_path, list(frames))  # type: ignore[arg-type]
        answers.append(HistoryAnswers(tmp_path / "history", 256 << 20))
        return answers[-1]

    yield make
    for one in answers:
        one.close()


def test_an_instance_that_began_anew_without_a_stop_had_ended(opened: Callable[..., HistoryAnswers]):
    answers = opened(
        *frames_of([[START], [created(Tier.HBM, ONE, [0])], [AGAIN], [InstanceStopped(reason=StopReason.SHUTDOWN)]])
    )
    states = [
        (one.instances[0].epoch, one.instances[0].state, one.instances[0].blocks)
        for one in (answers.overview(at(second)) for second in (0, 1, 1.5, 2, 3))
    ]
    assert states == [(1, "running", 0), (1, "ended", 1), (1, "ended", 1), (2, "running", 0), (2, "stopped", 0)]
    assert answers.overview().instances[0].stopped == "shutdown"
    assert answers.instance("one", at(1)).epochs[1].stopped == "shutdown"


def test_clocks_that_differ_are_each_their_instances_own(opened: Callable[..., HistoryAnswers]):
    slow = [
        cut_at(frame, frame.wall_time_ns - 3600 * SECOND_NS)
        for frame in frames_of([[START], [created(Tier.HBM, ONE, [0])]], "slow")
    ]
    answers = opened(*frames_of([[START], [created(Tier.HBM, TWO, [0])]], "right"), *slow)
    assert answers.status().begin == "2025-12-31T23:00:00.000000Z"
    before = answers.overview("2025-12-31T23:30:00Z")
    assert [(one.instance, one.blocks) for one in before.instances] == [("slow", 1)]
    assert [(one.instance, one.blocks) for one in answers.overview().instances] == [("right", 1), ("slow", 1)]
    assert before.clocks == "instances"


def test_a_hole_is_told_with_what_it_touches(opened: Callable[..., HistoryAnswers]):
    frames = frames_of(
        [[START], [created(Tier.HBM, ONE, [0])], [created(Tier.HBM, TWO, [1])], [created(Tier.HBM, THREE, [2])]]
    )
    other = frames_of([[START], [created(Tier.HBM, hash_of(1), [0])]], "two")
    answers = opened(*frames[:2], frames[3], *other)
    (hole,) = answers.holes()
    assert (hole.instance, hole.first_offset, hole.next_offset, hole.events) == ("one", 2, 3, 1)
    assert (hole.since, hole.until) == (at(1), at(3))
    assert [len(answers.overview(at(second)).holes) for second in (0.5, 1, 2, 3)] == [0, 1, 1, 0]
    assert [len(answers.tenants(at(second)).holes) for second in (0.5, 2)] == [0, 1]
    assert answers.block(ONE.hex()).holes == [hole]
    assert answers.block(hash_of(1).hex()).holes == []
    assert answers.changes(at(0), at(0.5)).holes == []
    assert answers.changes(at(0), at(2)).holes == [hole]
    assert answers.changes(at(0), at(2), "two").holes == []
    assert answers.timeline(at(0), at(2)).holes == answers.instance("one").holes == [hole]
    assert answers.instance("two").holes == []


def test_the_timeline_sums_to_what_each_overview_says(opened: Callable[..., HistoryAnswers]):
    answers = opened(*frames_of(LOG), *frames_of(LOG[:4], "two"))
    line = answers.timeline(at(0), at(9.5), 19)
    for step in line.steps:
        before = datetime.fromisoformat(step.time) - timedelta(microseconds=1)
        held = {tier.tier: tier.blocks for tier in answers.overview(before.isoformat()).tiers if tier.blocks}
        assert step.blocks == held, step.time
    assert [one.time for one in line.starts] == [at(0), at(0), at(6)]


def test_a_block_of_many_events_gives_the_latest(
    opened: Callable[..., HistoryAnswers], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvbm.replay.history_answers.MOST_LISTED", 3)
    found = opened(*frames_of(LOG)).block(ONE.hex(), at(2))
    assert found.more and [one.offset for one in found.blocks[0].events] == [0, 1, 3]
    assert [(one.tier, one.since) for one in found.blocks[0].held] == [("HBM", at(1)), ("HOST", at(2))]


def test_sizes_that_nobody_has_told_are_unknown(opened: Callable[..., HistoryAnswers]):
    blind = frames_of([[START], [created(Tier.HBM, ONE, [0])], [created(Tier.HBM, TWO, [1])]])[1:]
    overview = opened(*blind).overview()
    (tier,) = overview.instances[0].tiers
    assert (tier.blocks, tier.slots, tier.bytes) == (2, None, None)
    assert (overview.tenants[0].tenant, overview.tenants[0].bytes) == (None, None)


def test_an_empty_history_and_bad_times(opened: Callable[..., HistoryAnswers]):
    answers = opened(*frames_of([[START]]))
    assert answers.overview().tiers[0].blocks == 0
    assert answers.timeline(at(0), at(1), 2).steps[1].blocks == {}
    for wrong in (lambda: answers.timeline(at(1), at(1)), lambda: answers.overview("e1+1"), lambda: answers.changes()):
        with pytest.raises(AnswerError) as error:
            wrong()
        assert (error.value.status, error.value.code) == (422, "bad_time")


def test_a_clock_time_up_to_which_is_the_first_one_after_that_from_which(opened: Callable[..., HistoryAnswers]):
    answers = opened(*frames_of(LOG))
    found = answers.changes("00:00:05", "00:00:30")  # the history ends before
    assert (found.since, found.to) == (at(5), at(30))
    assert answers.timeline("23:59", "00:00:03").to == at(3)


def test_times_at_the_ends_of_the_calendar_and_of_parts_are_exact(opened: Callable[..., HistoryAnswers]):
    answers = opened(*frames_of(LOG))
    line = answers.timeline("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", 500)
    assert line.steps[-1].time == line.to == "9999-12-31T23:59:59.999999Z"
    whole = answers.timeline()
    assert sum(step.gained for step in line.steps) == sum(step.gained for step in whole.steps) > 0
    assert answers.overview("0001-01-01T00:00:00Z").instances == []
    for steps in (7, 13, 70, 300):  # events lie at full seconds, and so do some ends of parts
        parts = answers.timeline(at(0), at(7), steps).steps
        for step in parts[steps // 7 - 1 :: max(1, steps // 7)]:
            before = datetime.fromisoformat(step.time) - timedelta(microseconds=1)
            held = {tier.tier: tier.blocks for tier in answers.overview(before.isoformat()).tiers if tier.blocks}
            assert step.blocks == held, (steps, step.time)


def test_a_block_that_nobody_names_may_be_in_a_hole(opened: Callable[..., HistoryAnswers]):
    frames = frames_of([[START], [created(Tier.HBM, ONE, [0])], [created(Tier.HBM, TWO, [1])]])
    with pytest.raises(AnswerError, match="missing: 1 event, which may"):
        opened(frames[0], frames[2]).block(ONE.hex())


def test_damaged_counts_are_told_as_damage(tmp_path: Path, opened: Callable[..., HistoryAnswers]):
    answers = opened(*frames_of(LOG))
    assert answers.overview(at(BEGIN_NS % SECOND_NS + 3)).instances
    for file in (tmp_path / "history").glob("data-*/*-marks.parquet"):
        file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(DamagedHistoryError, match="anew"):
        HistoryAnswers(tmp_path / "history", 256 << 20)
