"""Archives as a source, and what a fenced, pipelined publisher leaves in a log: none of it is a defect."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.catalog.follow.archive import ArchiveFiles
from kvbm.core.codec import UNKNOWN_DIGEST, Frame, decode_frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    Event,
    InstanceStarted,
    InstanceStopped,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
    UsageRow,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier, pack_slots
from kvbm.erasure.archive import Meant, rewrite_frames
from kvbm.replay.opening import open_source
from kvbm.replay.scan import Damage, Piece, scan
from kvbm.replay.verify import Verified
from kvbm.streams.base import StreamMessage, events_subject, fence_data, fence_subject, is_fence
from kvbm.streams.fence_records import HEAD_BYTES, record_bytes
from tests.captures import NAMESPACE, NAMESPACES, POOLS, Capture, Recorded, chain, make_capture
from tests.readable import diff, main, states_at, verify


def verified(path: Path) -> Verified:
    """What verify says, natively and by the specification, which agree but for the name of the fold."""
    native, reference = verify(open_source(str(path)), NATIVE, NATIVE_FOLD), verify(open_source(str(path)))
    assert (native.fold, reference.fold) == ("native", "reference")
    assert native == msgspec.structs.replace(reference, fold="native")
    return native


def gone_back(seed: int, frames: list[Frame]) -> list[list[Frame]]:
    """Messages as a publisher that goes back now and then has them stored: 0 1 3 4 2 3 4."""
    pick = random.Random(seed)
    messages: list[list[Frame]] = []
    for frame in frames:
        if messages and messages[-1][-1].epoch == frame.epoch and pick.random() < 0.3:
            messages[-1].append(frame)
        else:
            messages.append([frame])
    stored, at = [], 0
    while at < len(messages):
        if pick.random() < 0.25:
            window = messages[at : at + pick.randint(2, 5)]
            epoch = window[0][0].epoch  # the next one's are sent when all of it is acknowledged
            window = [message for message in window if message[0].epoch == epoch]
            missing = pick.randrange(len(window))
            stored += window[:missing] + window[missing + 1 :]
            at += missing
        stored.append(messages[at])
        at += 1
    return stored


def write_archive(folder: Path, seed: int, file_bytes: int = 3000) -> tuple[int, int]:
    """An archive of two instances, mixed, in several files; how many different frames and how many instances' epochs it
    has.
    """
    pick = random.Random(seed)
    streams = [make_capture(seed, 80).frames(), make_capture(seed + 500, 80, instance="two").frames()]
    waiting = [gone_back(seed, frames) for frames in streams]
    archive = ArchiveFiles.open(folder, file_bytes)
    archive.follow("created", 1, 1 << 40)
    sequence = 0
    while any(waiting):
        queue = pick.choice([queue for queue in waiting if queue])
        message = queue.pop(0)
        sequence += pick.choice([1, 1, 2])  # a fence message between takes a number, too
        data = b"".join(encode_frame(frame) for frame in message)
        archive.append([StreamMessage(sequence, events_subject("c", message[0].instance), data)])
    archive.close()
    return sum(map(len, streams)), len({(frame.instance, frame.epoch) for frames in streams for frame in frames})


@pytest.mark.parametrize("seed", range(25))
def test_an_archive_of_publishers_that_went_back_verifies_as_one_source(tmp_path: Path, seed: int) -> None:
    frames, epochs = write_archive(tmp_path, seed)
    assert len(list(tmp_path.glob("*.kvbm"))) > 2
    report = verified(tmp_path)
    assert (report.findings, report.notes, report.stale) == ([], [], 0)
    assert (report.instances, report.epochs, report.frames + report.late) == (2, epochs, frames)
    assert report.repeats > 0


@pytest.mark.parametrize("seed", range(10))
def test_an_archive_whose_beginning_was_let_go_and_whose_end_is_torn_has_no_findings(tmp_path: Path, seed: int) -> None:
    write_archive(tmp_path, seed)
    files = sorted(tmp_path.glob("*.kvbm"))
    files[0].unlink()
    last = files[-1].read_bytes()
    files[-1].write_bytes(last[:-7])
    report = verified(tmp_path)
    assert report.findings == []
    assert any("torn" in note for note in report.notes)
    assert main(["verify", str(tmp_path)]) == 0


def test_a_file_that_is_missing_in_the_middle_is_a_hole(tmp_path: Path) -> None:
    write_archive(tmp_path, 3)
    files = sorted(tmp_path.glob("*.kvbm"))
    files[len(files) // 2].unlink()
    assert {finding.kind for finding in verified(tmp_path).findings} == {"missing-frame"}


def recorded(events: list[tuple[int, Event]], fold: Residencies | None = None) -> Capture:
    """Legal events of some epochs, a frame each."""
    fold = fold or Residencies()
    made = []
    for epoch, event in events:
        fold.evolve(event)
        made.append(Recorded(Epoch(epoch), event, fold.digest))
    return Capture(InstanceId("one"), made, list(range(1, len(made) + 1)))


def started(epoch: int) -> InstanceStarted:
    return InstanceStarted(epoch=Epoch(epoch), pools=POOLS, namespaces=NAMESPACES)


def created(slot: int) -> BlocksCreated:
    return BlocksCreated(namespace=NAMESPACE, tier=Tier.HBM, hashes=chain(slot, 3)[-16:], slots=pack_slots([slot]))


def listed(slot: int, number: int) -> ResidenciesListed:
    block = created(slot)
    return ResidenciesListed(
        namespace=NAMESPACE, tier=Tier.HBM, snapshot=number, hashes=block.hashes, slots=block.slots
    )


@pytest.mark.parametrize("end", [[(1, InstanceStopped(reason=StopReason.OVERFLOW))], []])
def test_an_epoch_begun_in_place_restates_what_is_held_and_is_legal(
    tmp_path: Path, end: list[tuple[int, Event]]
) -> None:
    events: list[tuple[int, Event]] = [(1, started(1)), (1, created(0)), (1, created(2)), *end]
    events += [(2, started(2)), (2, listed(0, 1)), (2, created(4)), (2, listed(2, 1)), (2, listed(4, 1))]
    events += [(2, SnapshotEnded(tier=Tier.HBM, snapshot=1, count=3)), (2, created(6))]
    capture = recorded(events)
    path = tmp_path / "a.kvbm"
    path.write_bytes(b"".join(encode_frame(frame) for frame in capture.frames()))
    report = verified(path)
    assert (report.findings, report.epochs, report.events) == ([], 2, len(events))
    lost = next(
        index for index, (epoch, event) in enumerate(events) if epoch == 2 and isinstance(event, ResidenciesListed)
    )
    path.write_bytes(b"".join(encode_frame(frame) for frame in capture.replace({lost: None}).frames()))
    (found,) = verified(path).findings
    assert found.epoch == 2 and found.kind in ("digest-mismatch", "skipped-snapshot-run")


def test_an_epoch_whose_beginning_was_let_go_is_trusted_from_the_end_of_its_first_whole_snapshot_on(
    tmp_path: Path,
) -> None:
    events: list[tuple[int, Event]] = [(1, started(1)), *((1, created(slot)) for slot in (0, 2, 4))]
    events += [(1, listed(slot, 1)) for slot in (0, 2, 4)] + [(1, SnapshotEnded(tier=Tier.HBM, snapshot=1, count=3))]
    before = len(events)
    events += [(1, created(slot)) for slot in (6, 8, 10)]
    capture = recorded(events)
    folder = tmp_path / "archive"
    folder.mkdir()
    for first in (
        4,
        5,
    ):  # with the snapshot's beginning, and without: then it has not begun here, and nothing is trusted
        frames = capture.frames()[first:]
        (folder / f"{1:020d}.kvbm").write_bytes(b"".join(encode_frame(frame) for frame in frames))
        report = verified(folder)
        assert report.findings == [] and len(report.notes) == 1
        wrong = capture.replace({before + 1: created(12)}).frames()[first:]
        (folder / f"{1:020d}.kvbm").write_bytes(b"".join(encode_frame(frame) for frame in wrong))
        findings = [(finding.kind, finding.offset) for finding in verified(folder).findings]
        assert findings == ([("digest-mismatch", before + 1)] if first == 4 else [])


# -- lives -------------------------------------------------------------------------------------------------------------


def with_fences(capture: Capture, *lives: tuple[str, list[Frame]]) -> list[StreamMessage]:
    """Messages as the stream of one instance has them: each life's fence, then its frames."""
    messages: list[StreamMessage] = []
    instance = capture.frames()[0].instance
    for run, frames in lives:
        fence = fence_data(frames[-1].epoch, run, tuple((epoch, run) for epoch in sorted({f.epoch for f in frames})))
        messages.append(StreamMessage(len(messages) + 1, fence_subject("c", instance), fence))
        messages += [
            StreamMessage(len(messages) + 1 + at, events_subject("c", instance), encode_frame(frame))
            for at, frame in enumerate(frames)
        ]
    return messages


def archived(folder: Path, messages: list[StreamMessage]) -> Path:
    files = ArchiveFiles.open(folder, file_bytes=1 << 14)
    files.follow("now", 1, len(messages))
    files.append(messages)
    files.close()
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_a_life_that_begins_again_with_a_small_epoch_is_told_by_its_fence_and_is_the_one_that_counts(
    tmp_path: Path, seed: int
) -> None:
    capture, other = make_capture(seed, 300), make_capture(seed + 100, 200)
    name = capture.frames()[0].instance
    second = [msgspec.structs.replace(frame, instance=name) for frame in other.frames()]
    report = verified(archived(tmp_path / "two", with_fences(capture, ("old", capture.frames()), ("new", second))))
    assert not report.findings and report.lives == 1 and report.stale == 0
    assert report.frames == len(capture.frames()) + len(second)
    assert any("another life" in note for note in report.notes)
    (state,) = states_at(open_source(str(tmp_path / "two"))).instances
    (alone,) = states_at(open_source(str(archived(tmp_path / "one", with_fences(capture, ("new", second)))))).instances
    assert (state.epoch, state.offset, state.digest) == (alone.epoch, alone.offset, alone.digest)
    without = [
        message
        for message in with_fences(capture, ("old", capture.frames()), ("new", second))
        if not is_fence(message.subject)
    ]
    assert verified(archived(tmp_path / "none", without)).lives == 0  # nothing says so then


def test_fences_of_one_life_change_nothing(tmp_path: Path) -> None:
    capture = make_capture(7, 200)
    half = len(capture.frames()) // 2
    messages = with_fences(capture, ("run", capture.frames()[:half]), ("run", capture.frames()[half:]))
    report = verified(archived(tmp_path, messages))
    assert not report.findings and not report.lives and report.frames == len(capture.frames())


@pytest.mark.parametrize("at", [0, 5, 12, -1])
def test_a_flipped_byte_in_a_fence_of_an_archive_is_named_and_hides_no_frame(tmp_path: Path, at: int) -> None:
    capture = make_capture(7, 200)
    folder = archived(tmp_path, with_fences(capture, ("run", capture.frames())))
    first = sorted(folder.glob("*.kvbm"))[0]
    data = bytearray(first.read_bytes())
    size = record_bytes(bytes(data[:HEAD_BYTES]))
    assert size
    data[at if at >= 0 else size - 1] ^= 1
    first.write_bytes(data)
    report = verified(folder)
    assert [finding.kind for finding in report.findings] == ["corrupt-frame"]
    assert report.frames == len(capture.frames())


def test_a_fence_of_a_newer_kvbm_is_named_as_that_and_hides_no_frame(tmp_path: Path) -> None:
    capture = make_capture(7, 200)
    folder = archived(tmp_path, with_fences(capture, ("run", capture.frames())))
    first = sorted(folder.glob("*.kvbm"))[0]
    data = first.read_bytes()
    size = record_bytes(data[:HEAD_BYTES])
    record = data[:4] + (2).to_bytes(2, "little") + data[6 : size - 4]
    first.write_bytes(record + zlib.crc32(record).to_bytes(4, "little") + data[size:])
    report = verified(folder)
    assert [finding.kind for finding in report.findings] == ["newer-frame"]
    assert "a fence of version 2; this kvbm reads up to 1: upgrade it" in str(report.findings[0])
    assert report.frames == len(capture.frames())


def usage(tenant: str) -> UsageRecorded:
    return UsageRecorded(since_ms=3_600_000, until_ms=3_600_001, rows=(UsageRow(tenant, saved_tokens=7),))


def whole_frames(*parts: Sequence[Event]) -> list[Frame]:
    """Consecutive frames of an epoch, with true digests."""
    fold, frames, first = Residencies(), list[Frame](), 0
    for number, events in enumerate(parts):
        for event in events:
            fold.evolve(event)
        frame = Frame(
            instance=InstanceId("one"),
            epoch=Epoch(1),
            first_offset=Offset(first),
            wall_time_ns=number,
            digest=fold.digest,
            events=tuple(events),
        )
        frames.append(frame)
        first += len(events)
    return frames


def test_usage_that_an_erasure_cuts_out_of_a_frame_says_no_false_digest(tmp_path: Path) -> None:
    started = InstanceStarted(epoch=Epoch(1), engine="e", version="1", topology=(), namespaces=NAMESPACES, pools=POOLS)
    theirs, mine = NAMESPACES
    created = BlocksCreated(namespace=theirs.id, tier=Tier.HBM, hashes=chain(0, 3))
    erased = BlocksCreated(namespace=mine.id, tier=Tier.HBM, hashes=chain(1, 3))
    frames = whole_frames([started, created], [usage("other"), erased, usage("other"), usage("acme")])
    data = b"".join(map(encode_frame, frames))
    meant = Meant(lambda found: erased in found.events, lambda _: False, lambda tenant: tenant == "acme", 77)
    paths = [tmp_path / name for name in ("whole.kvbm", "erased.kvbm", "cut.kvbm")]
    for path in paths:
        path.write_bytes(data)
    assert rewrite_frames(paths[1], meant) == 1
    cut = [decode_frame(one.data)[0] for one in _pieces(paths[1]) if not isinstance(one.found, Damage)]
    assert [(frame.first_offset, frame.digest) for frame in cut] == [
        (0, frames[0].digest),
        (2, UNKNOWN_DIGEST),
        (4, frames[1].digest),
    ]
    assert not verified(paths[1]).findings
    paths[1].write_bytes(b"".join(map(encode_frame, cut[:2])))  # and before the record, where nothing is suspect yet
    assert not verified(paths[1]).findings
    (state,) = states_at(open_source(str(paths[1]))).instances
    assert (state.digest, state.frame_digest) == (f"{frames[0].digest:016x}", None)
    paths[2].write_bytes(b"".join(map(encode_frame, whole_frames([started, created], [usage("other")]))))
    assert not diff(open_source(str(paths[1])), open_source(str(paths[2]))).divergences


def _pieces(path: Path) -> list[Piece]:
    data = path.read_bytes()
    return list(scan(lambda at, size: data[at : at + size], len(data), NATIVE))
