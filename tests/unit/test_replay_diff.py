"""`kvbm-replay diff`: events are compared, however their frames were cut, repeated or begun."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from kvbm.core.codec import Frame
from kvbm.replay.diff import ABSENT, DIGEST, INSTANCE, Diffed
from kvbm.replay.frames import FrameLibrary
from kvbm.replay.opening import open_source
from kvbm.replay.source import FramePlace, SourceError
from tests.captures import make_capture, packed, starts
from tests.readable import diff, main

CAPTURE = make_capture(7, commands=120)
FRAMES = CAPTURE.frames()


def compared(folder: Path, a: Iterable[Frame], b: Iterable[Frame], is_archive: bool = False) -> Diffed:
    """Diff two lists of frames, as captures or as archives, whose beginning may be missing."""
    sources = []
    for name, frames in (("a", a), ("b", b)):
        path = folder / (f"{name}/{1:020d}.kvbm" if is_archive else f"{name}.kvbm")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(packed(frames))
        sources.append(open_source(str(path.parent if is_archive else path)))
    return diff(*sources)


def test_a_temporary_folder_that_takes_little_at_once_gets_all_of_a_streams_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:3], at))
    with FrameLibrary("a stream") as library:
        kept = [
            library.keep(FramePlace("stream", 0, sequence), data)
            for sequence, data in enumerate((b"0123456789", b"abcd"))
        ]
        assert [library.read(*kept[0], 10), library.read(*kept[1], 4)] == [b"0123456789", b"abcd"]


def recut(seed: int) -> list[Frame]:
    """The same events, cut elsewhere."""
    pick = random.Random(seed)
    ends = {
        index + 1 for index, one in enumerate(CAPTURE.recorded[:-1]) if one.epoch != CAPTURE.recorded[index + 1].epoch
    }
    ends |= {index + 1 for index in range(len(CAPTURE.recorded)) if pick.random() < 0.3} | {len(CAPTURE.recorded)}
    return CAPTURE._replace(cuts=sorted(ends)).frames()


def test_a_source_is_the_same_as_itself_and_no_frame_is_taken_apart(tmp_path: Path) -> None:
    report = compared(tmp_path, FRAMES, FRAMES)
    assert (report.divergences, report.notes) == ([], [])
    assert (report.equal_frames, report.events) == (len(FRAMES), sum(len(frame.events) for frame in FRAMES))
    assert list(report.lines()) == [f"same: {report.events:,} events of 1 instance compared"]


@pytest.mark.parametrize("seed", range(20))
def test_frames_cut_elsewhere_repeated_and_sent_out_of_order_tell_the_same(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    other = recut(seed)
    starts = [
        at for at in range(1, len(other) - 3) if other[at].epoch == other[at + 2].epoch
    ]  # a window is of one epoch
    at = pick.choice(starts)
    gone_back = [*other[:at], *other[at + 1 : at + 3], *other[at:]]  # 0 1 3 4 2 3 4
    report = compared(tmp_path, FRAMES, gone_back)
    assert (report.divergences, report.notes) == ([], [])
    assert report.events == len(CAPTURE.recorded)


def test_a_source_that_begins_later_or_ends_earlier_is_said_and_is_no_difference(tmp_path: Path) -> None:
    report = compared(tmp_path, FRAMES[3:], FRAMES[:-2], is_archive=True)
    assert report.divergences == []
    assert report.events == sum(len(frame.events) for frame in FRAMES[3:-2])
    begins, ends = report.notes
    a, b = tmp_path / "a", tmp_path / "b"
    assert begins.startswith(f"instance one: {b} begins at e{FRAMES[0].epoch}+0, {a} at e{FRAMES[3].epoch}+")
    assert (
        ends.startswith(f"instance one: {b} ends at ")
        and f"{a} at e{FRAMES[-1].epoch}+{FRAMES[-1].next_offset}; " in ends
    )


def test_a_frame_that_is_missing_between_others_is_a_difference_at_its_first_event(tmp_path: Path) -> None:
    number = next(n for n in range(3, len(FRAMES)) if FRAMES[n + 1].epoch == FRAMES[n].epoch)
    report = compared(tmp_path, FRAMES, FRAMES[:number] + FRAMES[number + 1 :])
    (found,) = report.divergences
    assert (found.kind, found.epoch, found.offset) == (ABSENT, FRAMES[number].epoch, FRAMES[number].first_offset)
    assert found.a.event is not None and found.b.event is None
    assert found.a.place.endswith(f"a.kvbm byte {starts(FRAMES)[number]:,}")
    assert any("events missing between others" in note for note in report.notes)


def test_the_lost_end_of_an_epoch_that_another_follows_is_a_difference(tmp_path: Path) -> None:
    last = next(n for n in range(len(FRAMES)) if FRAMES[n + 1].epoch != FRAMES[n].epoch)
    (found,) = compared(tmp_path, FRAMES[:last] + FRAMES[last + 1 :], FRAMES).divergences
    assert (found.kind, found.epoch, found.offset) == (ABSENT, FRAMES[last].epoch, FRAMES[last].first_offset)
    assert found.a.event is None and found.b.event is not None


def test_equal_events_with_other_digests_differ_and_other_times_do_not(tmp_path: Path) -> None:
    number = len(FRAMES) // 2
    frame = FRAMES[number]
    later = [msgspec.structs.replace(one, wall_time_ns=one.wall_time_ns + 5) for one in FRAMES]
    assert compared(tmp_path, FRAMES, later).divergences == []
    wrong = [*FRAMES[:number], msgspec.structs.replace(frame, digest=frame.digest ^ 1), *FRAMES[number + 1 :]]
    (found,) = compared(tmp_path, FRAMES, wrong).divergences
    assert (found.kind, found.epoch, found.offset) == (DIGEST, frame.epoch, frame.next_offset - 1)


def test_an_instance_that_one_source_does_not_have_is_a_difference_unless_another_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = make_capture(8, instance="two").frames()
    (found,) = compared(tmp_path, [*FRAMES, *two], FRAMES).divergences
    assert (found.kind, found.instance) == (INSTANCE, "two")
    paths = [str(tmp_path / "a.kvbm"), str(tmp_path / "b.kvbm")]
    assert main(["diff", *paths]) == 1
    assert "instance two: only " in capsys.readouterr().out
    assert main(["diff", *paths, "--instance", "one"]) == 0


def test_sources_without_a_common_event_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no events in common"):
        compared(tmp_path, FRAMES[:2], FRAMES[4:], is_archive=True)


def test_the_command_names_epoch_offset_both_places_and_both_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = len(CAPTURE.recorded) // 2
    other = CAPTURE.insert(index, CAPTURE.recorded[index - 1].event)
    a, b = tmp_path / "a.kvbm", tmp_path / "b.kvbm"
    a.write_bytes(packed(FRAMES))
    b.write_bytes(packed(other.frames()))
    assert main(["diff", str(a), str(a)]) == 0
    assert main(["diff", str(a), str(tmp_path / "absent")]) == 2
    capsys.readouterr()
    assert main(["diff", str(a), str(b), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["divergences"]
    assert main(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert f"epoch {found['epoch']} offset {found['offset']}" in out
    assert found["a"]["event"] in out and found["b"]["event"] in out
    assert found["a"]["place"].startswith(str(a)) and found["b"]["place"].startswith(str(b))
