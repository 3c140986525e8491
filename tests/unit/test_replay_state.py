"""`state`: what was held at a time or an offset is what a plain fold of the events before it holds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvbm.core.codec import Frame
from kvbm.core.errors import ConfigError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    EvictReason,
    InstanceStarted,
    MigrateCause,
    SnapshotEnded,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier
from kvbm.replay.format import At, parse_at, place_text, time_text
from kvbm.replay.opening import open_source
from kvbm.replay.state import InstanceState, States
from tests.both_folds import states_at, stats_of
from tests.captures import BEGIN_NS, NAMESPACES, SECOND_NS, Capture, chain, make_capture, packed

CAPTURE = make_capture(11, commands=120)
FRAMES = CAPTURE.frames()


def write(folder: Path, frames: list[Frame]) -> str:
    path = folder / "capture.kvbm"
    path.write_bytes(packed(frames))
    return str(path)


def states(path: str, at: str) -> States:
    return states_at(open_source(path), parse_at(at), with_blocks=True)


def check_state(state: InstanceState, fold: Residencies) -> None:
    assert (state.epoch, state.digest) == (fold.epoch, f"{fold.digest:016x}")
    shown = {
        tier.tier: {(block.hash, block.namespace, block.slot) for block in tier.blocks or ()} for tier in state.tiers
    }
    for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
        held = {(block.hex(), entry.namespace.hex(), entry.slot) for block, entry in fold.held[tier].items()}
        assert shown[tier.name] == held
    assert sum(int(tier.digest, 16) for tier in state.tiers) % (1 << 64) == fold.digest
    assert not any(tier.suspect for tier in state.tiers)


def test_the_state_at_every_offset_is_that_of_a_plain_fold(tmp_path: Path) -> None:
    path = write(tmp_path, FRAMES)
    fold = Residencies()
    offset, ends = 0, set(CAPTURE.cuts)
    for index, entry in enumerate(CAPTURE.recorded):
        offset = offset + 1 if fold.epoch == entry.epoch else 1
        fold.evolve(entry.event)
        if index % 8 and index + 1 not in ends:
            continue
        (state,) = states(path, f"e{entry.epoch}+{offset}").instances
        check_state(state, fold)
        assert state.offset == offset
        assert (state.frame_digest is not None) == (index + 1 in ends)


def test_the_state_at_every_frames_time_is_that_after_the_frame(tmp_path: Path) -> None:
    path = write(tmp_path, FRAMES)
    fold = Residencies()
    for number, frame in enumerate(FRAMES):
        for event in frame.events:
            fold.evolve(event)
        for text in (time_text(frame.wall_time_ns), str((BEGIN_NS + number * SECOND_NS) // SECOND_NS)):
            (state,) = states(path, text).instances
            check_state(state, fold)
            assert (state.offset, state.wall_time_ns) == (frame.next_offset, frame.wall_time_ns)
            assert state.frame_digest == f"{frame.digest:016x}" == state.digest


def test_a_bare_offset_is_one_of_the_last_epoch_and_no_place_is_the_end(tmp_path: Path) -> None:
    path = write(tmp_path, FRAMES)
    last = FRAMES[-1].epoch
    assert last > FRAMES[0].epoch
    assert states(path, "5").instances == states(path, place_text(last, 5)).instances
    (end,) = states_at(open_source(path), with_blocks=True).instances
    check_state(end, CAPTURE.held_before(len(CAPTURE.recorded)))


def test_an_offset_beyond_the_stream_is_said_and_the_end_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, FRAMES)
    answer = states(path, place_text(FRAMES[-1].epoch, 900000))
    assert "before the one asked for" in answer.notes[0]
    assert answer.instances[0].offset == FRAMES[-1].next_offset
    before = states(path, "1999-01-01T00:00:00Z")
    assert (before.instances, before.later) == ([], [FRAMES[0].instance])
    assert "one: not there yet, its first event in the log is of 2026-" in before.notes[0]


def test_after_a_hole_a_tier_is_suspect_until_a_snapshot_has_ended_in_it(tmp_path: Path) -> None:
    for seed in range(12):
        capture = make_capture(seed)
        frames = capture.frames()
        number = 3
        if frames[number + 1].epoch != frames[number].epoch:
            continue
        path = write(tmp_path, frames[:number] + frames[number + 1 :])
        epoch, hole = frames[number].epoch, frames[number].next_offset
        assert all(tier.suspect for tier in states(path, place_text(epoch, hole)).instances[0].tiers)
        for later in frames[number + 1 :]:
            if later.epoch != epoch:
                break
            (state,) = states(path, place_text(epoch, later.next_offset)).instances
            ended = snapshots_ended(capture, epoch, hole, later.next_offset)
            assert {Tier[tier.tier] for tier in state.tiers if not tier.suspect} <= ended
            if not any(tier.suspect for tier in state.tiers):
                assert state.frame_digest == state.digest


def snapshots_ended(capture: Capture, epoch: Epoch, first: Offset, end: Offset) -> set[Tier]:
    events = [entry.event for entry in capture.recorded if entry.epoch == epoch]
    return {event.tier for event in events[first:end] if isinstance(event, SnapshotEnded)}


def test_stat_counts_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, [*FRAMES, FRAMES[-1]])
    stats = stats_of(open_source(path))
    (stat,) = stats.instances
    assert (stat.frames, stat.events, stat.repeats) == (len(FRAMES), len(CAPTURE.recorded), 1)
    assert stat.epochs == len({frame.epoch for frame in FRAMES})
    assert stat.bytes == len(packed(FRAMES))
    hashes = sum(len(getattr(entry.event, "hashes", b"")) // 16 for entry in CAPTURE.recorded)
    assert stat.block_total() == hashes
    end = CAPTURE.held_before(len(CAPTURE.recorded))
    assert sum(stat.held.values()) == end.count()
    assert (stat.first_wall_time_ns, stat.last_wall_time_ns) == (BEGIN_NS, FRAMES[-1].wall_time_ns)
    assert list(stats.lines())[-1].startswith("total: 1 instance, ")


def test_stat_tells_how_old_blocks_were_when_they_were_wanted_again_and_when_they_were_evicted(tmp_path: Path) -> None:
    space, hashes = NAMESPACES[0].id, chain(0, 3)
    offset, frames = 0, []
    for at_s, *events in (
        (0, InstanceStarted(epoch=Epoch(1)), BlocksCreated(namespace=space, tier=Tier.HBM, hashes=hashes)),
        (
            1,
            BlocksMigrated(
                namespace=space, source=Tier.HBM, target=Tier.NVME, kept=True, cause=MigrateCause.OFFLOAD, hashes=hashes
            ),
        ),
        (30, BlocksEvicted(namespace=space, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=hashes)),
        (
            61,
            BlocksMigrated(
                namespace=space,
                source=Tier.NVME,
                target=Tier.HBM,
                kept=True,
                cause=MigrateCause.ONBOARD,
                hashes=hashes[:32],
            ),
        ),
        (5001, BlocksEvicted(namespace=space, tier=Tier.NVME, reason=EvictReason.CAPACITY, hashes=hashes)),
    ):
        frames.append(
            Frame(
                instance=InstanceId("i"),
                epoch=Epoch(1),
                first_offset=Offset(offset),
                wall_time_ns=BEGIN_NS + int(at_s) * SECOND_NS,
                events=tuple(events),
                digest=0,
            )
        )
        offset += len(events)
    (stat,) = stats_of(open_source(write(tmp_path, frames))).instances
    hbm, nvme = stat.ages["HBM"], stat.ages["NVME"]
    assert (hbm.evicted, hbm.unused, sum(hbm.wanted)) == ([0, 0, 3, 0, 0, 0, 0, 0, 0], 3, 0)
    assert (nvme.wanted, nvme.evicted) == ([0, 0, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3, 0, 0, 0])
    assert (nvme.reused, nvme.unused, nvme.within_s[2], nvme.within_s[5]) == (2, 1, 60, 7200)
    lines = [line.strip() for line in stat.lines()]
    assert "HBM    evicted 3 blocks (50% within 60 s, 90% within 60 s)" in lines
    assert (
        "NVME   wanted again 2 times (50% within 60 s, 90% within 60 s);"
        " evicted 3 blocks (50% within 7,200 s, 90% within 7,200 s), 1 of them never wanted again"
    ) in lines


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("e3+4711", At(epoch=Epoch(3), offset=Offset(4711))),
        ("4711", At(offset=Offset(4711))),
        ("1767225600", At(time_us=1_767_225_600_000_000)),
        ("1767225600.25", At(time_us=1_767_225_600_250_000)),
        ("2026-01-01T00:00:00Z", At(time_us=1_767_225_600_000_000)),
        ("2026-01-01T01:00:00+01:00", At(time_us=1_767_225_600_000_000)),
        ("2026-01-01", At(time_us=1_767_225_600_000_000)),
        ("2026-01-01T00:00:00.000001", At(time_us=1_767_225_600_000_001)),
        ("13:19", At(clock_us=47_940_000_000)),
        ("9:05", At(clock_us=32_700_000_000)),
        ("13:19:05", At(clock_us=47_945_000_000)),
        ("13:19:05.25Z", At(clock_us=47_945_250_000)),
        ("00:30+02:00", At(clock_us=81_000_000_000)),
    ],
)
def test_a_place_is_an_offset_or_a_time(text: str, at: At) -> None:
    assert parse_at(text) == at


def test_what_is_no_place_is_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"e3\+4711"):
        parse_at("yesterday")


@pytest.mark.parametrize("text", ["3:4711", "13:77", "25:00", "13:19:61", "13:19 pm", "13:", "3:4711Z"])
def test_what_looks_like_a_time_of_day_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time of day"):
        parse_at(text)


def test_an_epoch_and_an_offset_written_as_before_are_told_how_to_write_them_now() -> None:
    with pytest.raises(ConfigError, match=r"for offset 4711 of epoch 3 write e3\+4711"):
        parse_at("3:4711")


def test_a_time_of_day_is_the_last_one_the_log_reaches(tmp_path: Path) -> None:
    path = write(tmp_path, FRAMES)
    last_us = FRAMES[-1].wall_time_ns // 1000
    end = datetime.fromtimestamp(last_us / 1e6, UTC)
    for moment in (end.replace(microsecond=0), end - timedelta(hours=1), end + timedelta(hours=1)):
        at = moment if moment <= end else moment - timedelta(days=1)
        shown = states(path, moment.strftime("%H:%M:%S"))
        same = states(path, at.strftime("%Y-%m-%dT%H:%M:%SZ"))
        assert shown.instances == same.instances
        assert any(at.strftime("%Y-%m-%dT%H:%M:%S") in note for note in shown.notes)


def test_a_place_that_is_written_is_read_back_as_the_same_place() -> None:
    assert parse_at(place_text(13, 19)) == At(epoch=Epoch(13), offset=Offset(19))


def test_a_time_that_is_written_is_read_back_as_the_same_microsecond() -> None:
    now_ns = int(datetime(2026, 5, 4, 3, 2, 1, 987654, tzinfo=UTC).timestamp()) * SECOND_NS + 987_654_321
    assert parse_at(time_text(now_ns)).time_us == now_ns // 1000
