"""A good stream verifies; one seeded defect gives one finding of the right name at the right place, and never a
second.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbm.core.codec import VERSION, Frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    ResidenciesListed,
    SnapshotEnded,
    UsageRecorded,
)
from kvbm.core.ids import HASH_BYTES, Epoch, Offset, Tier, pack_slots
from kvbm.replay.findings import ReplayFinding, exit_code
from kvbm.replay.opening import open_source
from kvbm.replay.verify import Verified
from tests.both_folds import verify
from tests.captures import NAMESPACE, Capture, make_capture, packed, some_hash, starts


def seeds(count: int) -> list[Any]:
    """So many, of which the gate has every fourth."""
    return [pytest.param(seed, marks=[pytest.mark.nightly] * (seed % 4 != 0)) for seed in range(count)]


SEEDS = seeds(40)


def verify_bytes(folder: Path, data: bytes) -> Verified:
    """What verify says of a capture file with these bytes."""
    path = folder / "capture.kvbm"
    path.write_bytes(data)
    return verify(open_source(str(path)))


def only_finding(report: Verified) -> ReplayFinding:
    """The one finding there is."""
    assert len(report.findings) == 1, [finding.sentence() for finding in report.findings]
    assert exit_code(report.findings) == 1
    assert report.verdict().startswith("FAILED: 1 finding in ")
    return report.findings[0]


def interleaved(seed: int) -> list[Frame]:
    """Frames of two instances, each in its order."""
    pick = random.Random(seed)
    waiting = [make_capture(seed, instance="one").frames(), make_capture(seed + 1000, instance="two").frames()]
    frames = []
    while any(waiting):
        queue = pick.choice([queue for queue in waiting if queue])
        frames.append(queue.pop(0))
    return frames


@pytest.mark.parametrize("seed", SEEDS)
def test_a_good_stream_has_no_findings_and_every_event_counts(tmp_path: Path, seed: int) -> None:
    frames = interleaved(seed)
    report = verify_bytes(tmp_path, packed(frames))
    assert report.findings == [] and report.notes == [] and exit_code(report.findings) == 0
    assert (report.instances, report.frames, report.repeats) == (2, len(frames), 0)
    assert report.events == sum(len(frame.events) for frame in frames)
    assert report.epochs == len({(frame.instance, frame.epoch) for frame in frames})
    assert report.verdict().startswith("verified: 2 instances, ") and report.verdict().endswith(", 0 findings")


@pytest.mark.parametrize("seed", seeds(120))
def test_a_flipped_bit_is_one_corrupt_frame_where_it_is(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    frames = interleaved(seed % 20)
    data, at = bytearray(packed(frames)), starts(frames)
    number = pick.randrange(len(frames))
    is_header = pick.random() < 0.5  # lengths, versions and names are the interesting ones
    byte = pick.randrange(at[number], min(at[number + 1], at[number] + 52) if is_header else at[number + 1])
    data[byte] ^= 1 << pick.randrange(8)
    report = verify_bytes(tmp_path, bytes(data))
    finding = only_finding(report)
    assert (finding.kind, finding.byte) == ("corrupt-frame", at[number]), finding.sentence()
    assert report.frames == len(frames) - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_frame_is_named_with_its_offsets(tmp_path: Path, seed: int) -> None:
    frames = interleaved(seed)
    followed = {
        number: after
        for number, frame in enumerate(frames)
        for after in range(number + 1, len(frames))
        if (frames[after].instance, frames[after].epoch, frames[after].first_offset)
        == (frame.instance, frame.epoch, frame.next_offset)
    }
    number = random.Random(seed).choice(list(followed))
    lost = frames[number]
    rest = frames[:number] + frames[number + 1 :]
    finding = only_finding(verify_bytes(tmp_path, packed(rest)))
    assert (finding.kind, finding.instance, finding.epoch, finding.offset) == (
        "missing-frame",
        lost.instance,
        lost.epoch,
        lost.first_offset,
    )
    assert finding.byte == starts(rest)[followed[number] - 1]
    assert f"{len(lost.events):,} event" in finding.message


@pytest.mark.parametrize("seed", SEEDS)
def test_a_repeat_with_other_bytes_is_a_conflict_and_the_first_is_believed(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    frames = interleaved(seed)
    number = pick.randrange(len(frames))
    frame = frames[number]
    changed = msgspec.structs.replace(frame, events=(*frame.events[:-1], changed_event(frame.events[-1])))
    at = pick.randint(number + 1, len(frames))
    finding = only_finding(verify_bytes(tmp_path, packed([*frames[:at], changed, *frames[at:]])))
    assert (finding.kind, finding.byte) == ("conflicting-repeat", starts(frames)[at])
    assert (finding.instance, finding.epoch, finding.offset) == (frame.instance, frame.epoch, frame.first_offset)


def changed_event(event: Event) -> Event:
    """Another event that encodes as well."""
    match event:
        case BlocksCreated() | BlocksMigrated() | BlocksEvicted() | ResidenciesListed():
            return msgspec.structs.replace(event, hashes=some_hash("changed") + event.hashes[HASH_BYTES:])
        case SnapshotEnded():
            return msgspec.structs.replace(event, count=event.count + 1)
        case InstanceStarted():
            return msgspec.structs.replace(event, engine="another")
        case InstanceStopped() | UsageRecorded():
            return SnapshotEnded(tier=Tier.HBM, snapshot=7, count=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_stored_again_as_go_back_n_does_are_counted_and_harmless(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    frames = make_capture(seed).frames()
    stored: list[Frame] = []
    number = 0
    while number < len(frames):
        window = frames[number : number + pick.randint(1, 8)]
        lost = pick.randrange(len(window)) if pick.random() < 0.3 else None
        if lost is None:
            stored += window
        else:  # 0 1 3 4, then again from 2
            stored += window[:lost] + window[lost + 1 :] + window[lost:]
        if pick.random() < 0.3:
            back = max(0, number - pick.randint(0, 5))
            stored += frames[back : number + len(window)]
        number += len(window)
    report = verify_bytes(tmp_path, packed(stored))
    assert report.findings == []
    assert (report.frames + report.late, report.repeats) == (len(frames), len(stored) - len(frames))


class Illegal(NamedTuple):
    """An event no ledger would record, and the rule it breaks."""

    event: Event
    rule: str


def illegal_events(capture: Capture, index: int) -> Iterator[Illegal]:
    """What would be illegal before event `index`."""
    held = capture.held_before(index).held
    unheld = some_hash(str(index))
    for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
        evicted = BlocksEvicted(namespace=NAMESPACE, tier=tier, reason=EvictReason.CAPACITY, hashes=unheld)
        yield Illegal(evicted, "evicted-unheld")
        outside = BlocksCreated(namespace=NAMESPACE, tier=tier, hashes=unheld, slots=pack_slots([999]))
        yield Illegal(outside, "slot-outside")
        for block, entry in list(held[tier].items())[:2]:
            assert entry.slot is not None
            again = BlocksCreated(namespace=entry.namespace, tier=tier, hashes=block, slots=pack_slots([entry.slot]))
            yield Illegal(again, "created-twice")
            in_use = BlocksCreated(namespace=NAMESPACE, tier=tier, hashes=unheld, slots=pack_slots([entry.slot]))
            yield Illegal(in_use, "slot-reused")
    moved = BlocksMigrated(
        namespace=NAMESPACE, source=Tier.HBM, target=Tier.HOST, kept=True, cause=MigrateCause.OFFLOAD, hashes=unheld
    )
    yield Illegal(moved, "migrated-unheld")


@pytest.mark.parametrize("seed", seeds(60))
def test_an_illegal_event_is_named_by_its_rule_and_offset(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    capture = make_capture(seed)
    inside = [
        index
        for index in range(1, len(capture.recorded))
        if capture.recorded[index].epoch == capture.recorded[index - 1].epoch
    ]
    index = pick.choice(inside)
    illegal = pick.choice(list(illegal_events(capture, index)))
    changed = capture.insert(index, illegal.event)
    finding = only_finding(verify_bytes(tmp_path, packed(changed.frames())))
    check_place(finding, changed, index)
    assert (finding.kind, finding.rule) == ("illegal-event", illegal.rule)


def check_place(finding: ReplayFinding, capture: Capture, index: int) -> None:
    """The finding names the event of this index and its frame."""
    frames = capture.frames()
    number = capture.frame_of(index)
    first = sum(len(frame.events) for frame in frames[:number])
    assert finding.byte == starts(frames)[number]
    assert (finding.epoch, finding.offset) == (frames[number].epoch, frames[number].first_offset + index - first)


class SkippedRun(NamedTuple):
    """A statement of a snapshot that can be left out, and the end of its snapshot."""

    listed: int
    ended: int
    blocks: int


def skippable(capture: Capture) -> Iterator[SkippedRun]:
    """Statements of snapshots that take_snapshot something known, whose last block is still held when the snapshot
    ends.
    """
    last_ended: dict[tuple[Tier, int], int] = {}
    for index in reversed(range(len(capture.recorded))):
        event = capture.recorded[index].event
        if isinstance(event, SnapshotEnded):
            last_ended[event.tier, capture.recorded[index].epoch] = index
        if isinstance(event, ResidenciesListed):
            ended = last_ended.get((event.tier, capture.recorded[index].epoch), 0)
            if not ended:
                continue
            whole = {
                entry.event.tier
                for entry in capture.recorded[:index]
                if entry.epoch == capture.recorded[index].epoch and isinstance(entry.event, SnapshotEnded)
            }
            end = capture.recorded[ended].event
            assert isinstance(end, SnapshotEnded) and end.snapshot == event.snapshot
            run = len(event.hashes) // HASH_BYTES
            touched = b"".join(
                entry.event.hashes
                for entry in capture.recorded[index + 1 : ended]
                if isinstance(entry.event, BlocksEvicted | BlocksMigrated)
            )
            if event.tier in whole and end.count > run and event.hashes[-HASH_BYTES:] not in touched:
                yield SkippedRun(index, ended, run)


@pytest.mark.parametrize("how", ["removed", "shrunk", "not counted"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_that_skips_a_run_is_found_at_its_end(tmp_path: Path, seed: int, how: str) -> None:
    capture = make_capture(seed, commands=120)
    skipped = random.Random(seed).choice(list(skippable(capture)))
    listed, ended = capture.recorded[skipped.listed].event, capture.recorded[skipped.ended].event
    assert isinstance(listed, ResidenciesListed) and isinstance(ended, SnapshotEnded)
    if how == "shrunk" and skipped.blocks > 1:
        less = msgspec.structs.replace(listed, hashes=listed.hashes[:-HASH_BYTES], slots=listed.slots[:-4])
        changed = capture.replace({skipped.listed: less, skipped.ended: counted(ended, 1)})
        index = skipped.ended
    else:
        end = ended if how == "not counted" else counted(ended, skipped.blocks)
        changed = capture.replace({skipped.listed: None, skipped.ended: end})
        index = skipped.ended - 1
    finding = only_finding(verify_bytes(tmp_path, packed(changed.frames())))
    check_place(finding, changed, index)
    rule = "snapshot-incomplete" if how == "not counted" else "snapshot-withdrew"
    assert (finding.kind, finding.rule) == ("skipped-snapshot-run", rule)


def counted(ended: SnapshotEnded, less: int) -> SnapshotEnded:
    return msgspec.structs.replace(ended, count=ended.count - less)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_that_states_what_was_not_held_is_found_at_that_statement(tmp_path: Path, seed: int) -> None:
    capture = make_capture(seed, commands=120)
    listed_at = random.Random(seed).choice(list(skippable(capture))).listed
    listed = capture.recorded[listed_at].event
    assert isinstance(listed, ResidenciesListed)
    more = msgspec.structs.replace(listed, hashes=some_hash("x") + listed.hashes[HASH_BYTES:])
    changed = capture.replace({listed_at: more})
    finding = only_finding(verify_bytes(tmp_path, packed(changed.frames())))
    check_place(finding, changed, listed_at)
    assert (finding.kind, finding.rule) == ("skipped-snapshot-run", "snapshot-added")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_digest_is_found_once_at_its_frame(tmp_path: Path, seed: int) -> None:
    frames = make_capture(seed).frames()
    number = random.Random(seed).randrange(len(frames))
    frames[number] = msgspec.structs.replace(frames[number], digest=frames[number].digest ^ 1 << seed)
    finding = only_finding(verify_bytes(tmp_path, packed(frames)))
    assert (finding.kind, finding.byte) == ("digest-mismatch", starts(frames)[number])
    assert finding.offset == frames[number].next_offset - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_creation_that_was_never_recorded_is_found_by_the_digest_or_what_follows(tmp_path: Path, seed: int) -> None:
    capture = make_capture(seed)
    created = [
        index
        for index, (entry, after) in enumerate(pairwise(capture.recorded))
        if isinstance(entry.event, BlocksCreated) and entry.epoch == after.epoch  # an epoch's lost end is never seen
    ]
    changed = capture.replace({random.Random(seed).choice(created): None})
    report = verify_bytes(tmp_path, packed(changed.frames()))
    assert only_finding(report).kind in ("digest-mismatch", "illegal-event", "skipped-snapshot-run")


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_of_an_epoch_that_is_over_are_counted_and_do_not_count(tmp_path: Path, seed: int) -> None:
    capture = next(c for c in (make_capture(seed + 100 * n, 120) for n in range(20)) if len(epochs(c)) > 1)
    frames = capture.frames()
    old = epochs(capture)[0]
    last = max(number for number, frame in enumerate(frames) if frame.epoch == old)
    zombie = Frame(
        instance=capture.instance,
        epoch=old,
        first_offset=frames[last].next_offset,
        wall_time_ns=1,
        digest=frames[last].digest,
        events=(SnapshotEnded(tier=Tier.HBM, snapshot=99, count=0),),
    )
    at = random.Random(seed).randint(last + 2, len(frames))
    good = verify_bytes(tmp_path, packed(frames))
    report = verify_bytes(tmp_path, packed([*frames[:at], zombie, *frames[at:]]))
    assert report.findings == [] and (report.stale, report.frames) == (1, good.frames)
    assert "1 stale, 0 findings" in report.verdict()
    assert len(report.notes) == 1 and f"byte {starts(frames)[at]:,} after epoch" in report.notes[0]
    assert f"epoch {old} goes on" in report.notes[0]


def epochs(capture: Capture) -> list[Epoch]:
    return sorted({entry.epoch for entry in capture.recorded})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_capture_that_was_cut_short_is_said_with_the_byte(tmp_path: Path, seed: int) -> None:
    frames = interleaved(seed)
    at = starts(frames)
    end = random.Random(seed).randint(1, at[-1])
    report = verify_bytes(tmp_path, packed(frames)[:end])
    if end in at:
        assert report.findings == []
    else:
        finding = only_finding(report)
        assert (finding.kind, finding.byte) == ("truncated-capture", max(start for start in at if start < end))


def newer(frame: Frame) -> bytes:
    """The frame as the next version's writer might write it: this one cannot know its inside."""
    data = bytearray(encode_frame(frame))
    data[4] = VERSION + 1
    data[-1] ^= 0xFF
    return bytes(data)


def rechecked(frame: Frame) -> bytes:
    """As `newer`, with this version's layout and a good checksum."""
    from kvbm.core.checksum import crc32c

    data = bytearray(encode_frame(frame))
    data[4] = VERSION + 1
    return bytes(data[:-4]) + crc32c(bytes(data[:-4])).to_bytes(4, "little")


@pytest.mark.parametrize("write", [newer, rechecked])
def test_a_newer_frame_is_no_corruption_and_the_input_is_not_fully_usable(
    tmp_path: Path, write: Callable[[Frame], bytes]
) -> None:
    frames = interleaved(3)
    data = packed(frames[:4]) + write(frames[4]) + packed(frames[5:])
    report = verify_bytes(tmp_path, data)
    assert [(finding.kind, finding.byte) for finding in report.findings] == [("newer-frame", starts(frames)[4])]
    assert exit_code(report.findings) == 2
    assert "upgrade kvbm" in report.findings[0].message


def test_an_epoch_without_its_beginning_is_a_missing_frame_in_a_capture(tmp_path: Path) -> None:
    frames = make_capture(1).frames()
    finding = only_finding(verify_bytes(tmp_path, packed(frames[1:])))
    assert (finding.kind, finding.epoch, finding.offset) == ("missing-frame", frames[0].epoch, Offset(0))


def test_two_defects_are_two_findings_each_in_its_place(tmp_path: Path) -> None:
    frames = interleaved(5)
    at = starts(frames)
    ones = [number for number, frame in enumerate(frames) if frame.instance == "one"]
    twos = [number for number, frame in enumerate(frames) if frame.instance == "two"]
    data = bytearray(packed(frames))
    data[at[ones[2]] + 60] ^= 1
    del data[at[twos[-3]] : at[twos[-3] + 1]]
    report = verify_bytes(tmp_path, bytes(data))
    assert sorted(finding.kind for finding in report.findings) == ["corrupt-frame", "missing-frame"]
    missing = next(finding for finding in report.findings if finding.kind == "missing-frame")
    assert (missing.instance, missing.offset) == ("two", frames[twos[-3]].first_offset)


@pytest.mark.parametrize("seed", SEEDS)
def test_once_every_tier_has_ended_a_snapshot_a_second_defect_is_found_again(tmp_path: Path, seed: int) -> None:
    capture = make_capture(seed, commands=150)
    evicted = BlocksEvicted(namespace=NAMESPACE, tier=Tier.HBM, reason=EvictReason.TTL, hashes=some_hash("x"))
    first = 6  # after InstanceStarted and the three ends of the first snapshot
    if capture.recorded[first].epoch != capture.recorded[0].epoch:
        return
    begun: set[tuple[Tier, int]] = set()  # snapshots that began and ended after the first defect, so that they heal
    healed: set[Tier] = set()
    listed = [entry.event for entry in capture.recorded[:first] if isinstance(entry.event, ResidenciesListed)]
    before = {takes_snapshot(event) for event in listed}
    for second in range(first, len(capture.recorded)):
        epoch, event, _ = capture.recorded[second]
        is_new_epoch = epoch != capture.recorded[0].epoch
        if (is_new_epoch or len(healed) == 3) and capture.recorded[second - 1].epoch == epoch:
            break
        if isinstance(event, ResidenciesListed) and not is_new_epoch and takes_snapshot(event) not in before:
            begun.add(takes_snapshot(event))
        if isinstance(event, SnapshotEnded) and (event.count == 0 or (event.tier, event.snapshot) in begun):
            healed.add(event.tier)
    changed = capture.insert(second, evicted).insert(first, evicted)
    report = verify_bytes(tmp_path, packed(changed.frames()))
    assert [finding.rule for finding in report.findings] == ["evicted-unheld", "evicted-unheld"]
    check_place(report.findings[0], changed, first)


def takes_snapshot(event: ResidenciesListed) -> tuple[Tier, int]:
    return event.tier, event.snapshot


@pytest.mark.parametrize("seed", range(10))
def test_damaged_neighbours_are_a_finding_each(tmp_path: Path, seed: int) -> None:
    frames = interleaved(seed)
    at = starts(frames)
    data = bytearray(packed(frames))
    for number in (4, 5):
        data[at[number + 1] - 1] ^= 1
    report = verify_bytes(tmp_path, bytes(data))
    assert [(finding.kind, finding.byte) for finding in report.findings] == [
        ("corrupt-frame", at[4]),
        ("corrupt-frame", at[5]),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_frame_explains_no_other_instances_hole_around_it(tmp_path: Path, seed: int) -> None:
    one, two = make_capture(seed, instance="one").frames(), make_capture(seed + 1000, instance="two").frames()
    number = next(n for n in range(1, len(two)) if two[n - 1].epoch == two[n + 1].epoch)
    damaged = next(n for n in range(1, len(one)) if one[n - 1].epoch == one[n + 1].epoch)
    begin, lost = one[:damaged] + two[:number], one[damaged]
    broken = bytearray(encode_frame(lost))
    broken[-1] ^= 1
    data = packed(begin) + broken + packed(two[number + 1 :]) + packed(one[damaged + 1 :])
    report = verify_bytes(tmp_path, data)
    assert [(finding.kind, finding.instance, finding.offset) for finding in report.findings] == [
        ("corrupt-frame", "one", lost.first_offset),
        ("missing-frame", "two", two[number].first_offset),
    ]
