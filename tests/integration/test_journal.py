"""The journal: what it keeps of what it took, on a disk that fills, fails, forgets, tears and flips bits."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE
from kvbm.core.codec import FRAME_OVERHEAD_BYTES, MAGIC, FrameBytes
from kvbm.core.errors import JournalError, LedgerError
from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.disk import OsDevice
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import FSYNC_MODES
from tests.journals import FRAME_BYTES, INSTANCE, a_frame, all_frames, begun

ROOT = Path(__file__).parents[2]


class FailingDevice(OsDevice):
    """Refuses what it is told to.

    Attributes:
        room: bytes it still takes; None for no end.
        refused: names of calls that fail.
        calls: what was done, by name.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self.refused: set[str] = set()
        self.calls: list[str] = []
        self.most_at_once: int | None = None

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refused:
            raise OSError(errno.EIO, "Input/output error")

    def write(self, file: int, pieces: Sequence[memoryview]) -> int:
        self._do("write")
        data = b"".join(pieces)
        if self.most_at_once is not None:
            data = data[: self.most_at_once]
        if self.room is not None:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[: self.room]
            self.room -= len(data)
        return super().write(file, [memoryview(data)])

    def sync(self, file: int) -> None:
        self._do("sync")
        super().sync(file)

    def truncate(self, file: int, size: int) -> None:
        self._do("truncate")
        super().truncate(file, size)


# -- refusals of the device --------------------------------------------------------------------------------------------


def test_half_a_frame_the_device_would_not_take_back_is_gone_before_the_next(tmp_path: Path) -> None:
    device = FailingDevice()
    journal = begun(tmp_path, device=device)
    journal.append(a_frame(0))
    device.room = FRAME_BYTES // 2
    with pytest.raises(OSError, match="No space left"):
        journal.append(a_frame(1))
    device.room, device.refused = None, {"truncate"}
    with pytest.raises(OSError, match="Input/output"):
        journal.append(a_frame(1))
    device.refused = set()
    journal.append(a_frame(1))
    journal.append(a_frame(2))
    assert all_frames(journal) == [a_frame(at) for at in range(3)]
    journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert [frame.first_offset for frame, _ in journal.frames(Epoch(1))] == [0, 1, 2]
    journal.close()


def test_a_closed_journal_takes_nothing_more(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.close()
    with pytest.raises(OSError, match="is closed"):
        journal.append(a_frame(0))
    assert list(tmp_path.glob("*.kvbj")) == []


def test_a_device_that_takes_little_at_once_gets_whole_frames(tmp_path: Path) -> None:
    device = FailingDevice()
    device.most_at_once = 7
    journal = begun(tmp_path, device=device)
    assert journal.append_all([a_frame(at) for at in range(3)]) == 3
    assert all_frames(journal) == [a_frame(at) for at in range(3)]
    journal.close()


ANYWHERE = range(3 * FRAME_BYTES)
NEAR_EDGES = [room for room in ANYWHERE if min(room % FRAME_BYTES, -room % FRAME_BYTES) < 3 or room % 13 == 0]


@pytest.mark.parametrize("fsync", FSYNC_MODES)
@pytest.mark.parametrize(
    "rooms", [NEAR_EDGES, pytest.param(ANYWHERE, marks=pytest.mark.nightly)], ids=["near edges", "anywhere"]
)
def test_a_disk_full_anywhere_in_a_batch_counts_nothing_twice_and_tears_nothing(
    tmp_path: Path, fsync: str, rooms: Sequence[int]
) -> None:
    batch = [a_frame(at) for at in range(1, 4)]
    for room in rooms:
        device = FailingDevice()
        journal = begun(tmp_path / str(room), fsync=fsync, device=device)
        journal.append(a_frame(0))
        device.room = room
        with pytest.raises(OSError, match="No space left"):
            journal.append_all(batch)
        assert all_frames(journal) == [a_frame(0)]
        device.room = None
        assert journal.append_all(batch) == 3
        assert all_frames(journal) == [a_frame(at) for at in range(4)]
        journal.close()


def test_several_frames_become_durable_with_one_write_and_one_sync(tmp_path: Path) -> None:
    device = FailingDevice()
    journal = begun(tmp_path, fsync="always", device=device)
    journal.append(a_frame(0))
    device.calls.clear()
    assert journal.append_all([a_frame(at) for at in range(1, 101)]) == 100
    assert device.calls == ["write", "sync"]
    journal.close()


def test_a_batch_over_segments_and_beyond_the_capacity_says_how_many_frames_count(tmp_path: Path) -> None:
    journal = begun(tmp_path, segment_bytes=3 * FRAME_BYTES, capacity_bytes=8 * FRAME_BYTES)
    frames = [a_frame(at) for at in range(12)]
    assert journal.append_all(frames) == 8
    assert journal.used_bytes == 8 * FRAME_BYTES
    assert len(list(tmp_path.glob("*.kvbj"))) == 3
    with pytest.raises(OSError, match=r"journal.capacity_bytes is \d+: no room for \d+ more") as refused:
        journal.append_all(frames[8:])
    assert refused.value.errno == errno.ENOSPC
    assert all_frames(journal) == frames[:8]
    journal.close()


@pytest.mark.parametrize("fsync", ["interval", "always"])
def test_a_failed_sync_is_not_forgotten(tmp_path: Path, fsync: str) -> None:
    now_s = 0.0
    device = FailingDevice()
    journal = begun(tmp_path, fsync=fsync, device=device, clock=lambda: now_s)
    journal.append_all([a_frame(0), a_frame(1)])
    journal.sync()
    journal.append(a_frame(2))  # "interval" has not synced this one
    first = next(iter(tmp_path.glob("*.kvbj")))
    now_s = 100.0
    device.refused = {"sync"}
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            journal.append(a_frame(3))
        assert all_frames(journal) == [a_frame(at) for at in range(3)]  # acknowledged before, so not given up
    device.refused = set()
    journal.append(a_frame(3))
    assert all_frames(journal) == [a_frame(at) for at in range(4)]
    # what the failed sync was asked for may be gone from the first file: it was written to another one
    kept = 2 if fsync == "interval" else 3
    assert first.read_bytes() == b"".join(a_frame(at).data for at in range(kept))
    assert journal.used_bytes == 4 * FRAME_BYTES
    journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert all_frames(journal) == [a_frame(at) for at in range(4)]
    journal.close()


@pytest.mark.parametrize("call", ["sync", "append"])
def test_frames_in_doubt_since_the_first_byte_of_a_segment_are_written_again_under_its_name(
    tmp_path: Path, call: str
) -> None:
    now_s = 0.0
    device = FailingDevice()
    journal = begun(tmp_path, fsync="interval", device=device, clock=lambda: now_s)
    journal.append(a_frame(0))
    assert not journal.sync_due(now_s)
    now_s = 5.0
    assert journal.sync_due(now_s)
    device.refused = {"sync"}
    with pytest.raises(OSError, match="Input/output"):
        journal.sync()
    with pytest.raises(OSError, match="Input/output"):  # it cannot be written again either
        journal.append(a_frame(1))
    device.refused = set()
    if call == "sync":
        journal.sync()
        assert not journal.sync_due(100.0)
    journal.append(a_frame(1))
    assert all_frames(journal) == [a_frame(0), a_frame(1)]
    journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert all_frames(journal) == [a_frame(0), a_frame(1)]
    journal.close()


def test_a_kill_between_writing_again_and_cutting_repeats_nothing(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.append_all([a_frame(at) for at in range(4)])
    journal.close()
    again = tmp_path / f"{1:010d}-{2:020d}.kvbj"
    again.write_bytes(a_frame(2).data + a_frame(3).data)
    (tmp_path / f"{again.name}.new").write_bytes(b"half")
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert all_frames(journal) == [a_frame(at) for at in range(4)]
    assert [frame.first_offset for frame, _ in journal.frames(Epoch(1))] == [0, 1, 2, 3]
    assert not journal.was_cut(Epoch(1))
    assert list(tmp_path.glob("*.new")) == []
    journal.close()


def test_a_folder_removed_under_the_journal_is_an_error_and_not_a_silent_loss(tmp_path: Path) -> None:
    journal = begun(tmp_path / "journal")
    journal.append(a_frame(0))
    shutil.rmtree(tmp_path / "journal")
    with pytest.raises(OSError, match="was removed"):
        journal.append(a_frame(1))
    with pytest.raises(JournalError, match="cannot be written"):
        journal.begin_epoch(Epoch(2))
    assert [frame.first_offset for frame in all_frames(journal)] in ([], [0])
    journal.close()


def test_a_frame_that_goes_back_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.append(a_frame(0, events=3))
    with pytest.raises(LedgerError, match="after one that ends at offset 3"):
        journal.append(a_frame(2))
    journal.close()


def test_one_manager_at_a_time_writes_also_after_the_first_was_killed(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    with pytest.raises(JournalError, match="in use by another manager"):
        Journal.open(tmp_path, INSTANCE, NATIVE)
    journal.close()
    Journal.open(tmp_path, INSTANCE, NATIVE).close()


# -- bounded -----------------------------------------------------------------------------------------------------------


def test_an_epochs_first_snapshot_is_let_in_beyond_the_capacity_and_nothing_else(tmp_path: Path) -> None:
    journal = begun(tmp_path, capacity_bytes=4 * FRAME_BYTES, segment_bytes=FRAME_BYTES)
    assert journal.append_all([a_frame(at) for at in range(9)]) == 4
    journal.begin_epoch(Epoch(2), snapshot_end=Offset(3))
    assert journal.append_all([a_frame(at, epoch=2) for at in range(9)]) == 3
    with pytest.raises(OSError, match="no room"):
        journal.append(a_frame(3, epoch=2))
    assert journal.used_bytes == 7 * FRAME_BYTES
    assert journal.truncate(Position(Epoch(2), Offset(3)), Position(Epoch(2), Offset(0))) == 4
    journal.append(a_frame(3, epoch=2))
    journal.close()


def test_whole_segments_go_once_they_are_published_and_behind_a_whole_snapshot(tmp_path: Path) -> None:
    journal = begun(tmp_path, segment_bytes=1 << 20)
    for at in range(0, 12, 3):
        journal.roll()
        journal.append_all([a_frame(at + n) for n in range(3)])

    def kept() -> list[int]:
        return [int(path.stem.partition("-")[2]) for path in sorted(tmp_path.glob("*.kvbj"))]

    def at(offset: int) -> Position:
        return Position(Epoch(1), Offset(offset))

    assert kept() == [0, 3, 6, 9]
    assert journal.truncate(at(12), at(0)) == 0  # published, and no snapshot
    assert journal.truncate(at(0), at(12)) == 0  # a snapshot, and nothing published
    assert journal.truncate(at(12), at(5)) == 1
    assert kept() == [3, 6, 9]
    assert journal.truncate(at(8), at(12)) == 1
    assert kept() == [6, 9]
    assert journal.used_bytes == 6 * FRAME_BYTES
    assert journal.truncate(at(12), at(12)) == 1  # the one that is being written stays
    assert kept() == [9]
    assert [frame.first_offset for frame in all_frames(journal)] == [9, 10, 11]
    journal.append(a_frame(12))
    journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert [frame.first_offset for frame in all_frames(journal)] == [9, 10, 11, 12]
    journal.close()


def test_nothing_goes_before_what_makes_it_needless_is_on_the_device(tmp_path: Path) -> None:
    device = FailingDevice()
    journal = begun(tmp_path, fsync="interval", device=device, clock=lambda: 0.0)
    journal.append(a_frame(0))
    journal.roll()
    journal.append(a_frame(1))
    device.refused = {"sync"}
    everything = Position(Epoch(1), Offset(2))
    assert journal.truncate(everything, everything) == 0
    device.refused = set()
    device.calls.clear()
    assert journal.truncate(everything, everything) == 1
    assert device.calls
    assert all_frames(journal) == [a_frame(1)]
    journal.close()


# -- reading -----------------------------------------------------------------------------------------------------------


def test_reading_in_any_order_and_size_gives_the_frames_from_there_on(tmp_path: Path) -> None:
    rng = random.Random(7)
    journal = begun(tmp_path, segment_bytes=300_000)
    frames: list[FrameBytes] = []
    ends: list[Position] = []
    for epoch in (1, 2):
        if epoch == 2:
            journal.begin_epoch(Epoch(2))
        at = 0
        while at < 700:
            frame = a_frame(at, rng.randrange(1, 4), epoch, rng.choice([1, 20, 400]))
            journal.append(frame)
            frames.append(frame)
            ends.append(Position(frame.epoch, frame.next_offset))
            at = frame.next_offset
    assert len(list(tmp_path.glob("*.kvbj"))) > 4
    # sequentially, as the publisher does
    position, read = ORIGIN, list[FrameBytes]()
    while more := journal.read_after(position, 20_000):
        assert len(more) == 1 or sum(len(frame.data) for frame in more) <= 20_000
        read += more
        position = Position(more[-1].epoch, more[-1].next_offset)
    assert read == frames
    for _ in range(300):
        position = Position(Epoch(rng.randrange(1, 4)), Offset(rng.randrange(720)))
        first = bisect_right(ends, position)
        more = journal.read_after(position, rng.choice([1, 5_000, 400_000]))
        assert more == frames[first : first + len(more)]
        assert bool(more) == (first < len(frames))
    journal.close()


def test_what_is_kept_in_memory_does_not_grow_with_the_frames(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.append_all([a_frame(at) for at in range(5000)])
    (segment,) = journal._segments.all()
    assert len(segment._starts) == len(segment._offsets) <= segment.size // (64 << 10) + 1
    journal.close()


def test_a_reader_goes_on_over_frames_that_were_appended_let_go_and_written_again_meanwhile(tmp_path: Path) -> None:
    device = FailingDevice()
    journal = begun(tmp_path, fsync="interval", device=device, clock=lambda: 0.0)
    journal.append(a_frame(0))
    assert all_frames(journal) == [a_frame(0)]
    journal.append(a_frame(1))
    assert journal.read_after(Position(Epoch(1), Offset(1)), 1) == [a_frame(1)]
    device.refused = {"sync"}
    with pytest.raises(OSError, match="Input/output"):
        journal.sync()
    device.refused = set()
    journal.sync()
    journal.append(a_frame(2))
    assert journal.read_after(Position(Epoch(1), Offset(2)), 1) == [a_frame(2)]
    journal.roll()
    journal.append(a_frame(3))
    journal.truncate(Position(Epoch(1), Offset(3)), Position(Epoch(1), Offset(3)))
    assert journal.read_after(Position(Epoch(1), Offset(1)), 1) == [a_frame(3)]
    journal.close()


def test_a_header_damaged_since_the_start_costs_what_is_up_to_the_next_known_place(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    frames = [a_frame(at, blocks=200) for at in range(100)]  # 3.3 KB each
    journal.append_all(frames)
    path = next(iter(tmp_path.glob("*.kvbj")))
    with open(path, "r+b") as file:
        file.seek(30 * len(frames[0].data) + 4)
        file.write(b"\xff\xff")
    with capture_logs() as logs:
        read = all_frames(journal)
    assert [entry["event"] for entry in logs] == ["journal.frame_damaged"]
    assert read[:30] == frames[:30]
    assert read[30:] == frames[-(len(read) - 30) :]
    assert len(read) >= 100 - 21
    journal.close()


@pytest.mark.parametrize("at", range(12))
def test_a_damaged_first_header_is_cut_or_said_in_words(tmp_path: Path, at: int) -> None:
    for value in (0x00, 0x01, 0x0B, 0x33, 0x7F, 0xFF):
        folder = tmp_path / str(value)
        with closing(begun(folder)) as journal:
            journal.append_all([a_frame(0), a_frame(1)])
        (segment,) = folder.glob("*.kvbj")
        data = bytearray(segment.read_bytes())
        size = data[8:12]
        data[4:6] = b"\xff\x7f"  # a version nobody has
        data[at] = value
        if at < 8:
            data[8:12] = value.to_bytes(4, "little")  # and a size that no frame has
        segment.write_bytes(data)
        is_another_size = data[8:12] != size and int.from_bytes(data[8:12], "little") >= FRAME_OVERHEAD_BYTES
        if is_another_size and data[:4] == MAGIC:  # as one may have it that nobody knows yet
            with pytest.raises(JournalError, match="newer kvbm"):
                Journal.open(folder, INSTANCE, NATIVE)
            assert segment.read_bytes() == data
            continue
        with closing(Journal.open(folder, INSTANCE, NATIVE)) as journal:
            assert all_frames(journal) == []
            assert journal.was_damaged(Epoch(1))
            assert segment.with_suffix(".damaged").read_bytes() == data


def test_a_large_journal_is_opened_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begun(tmp_path)
    frames = [a_frame(at, blocks=1 + 997 * at % 3000) for at in range(40)]
    journal.append_all(frames)
    journal.close()
    monkeypatch.setattr("kvbm.streams.journal.segments._WINDOW_BYTES", 1000)  # less than most frames
    sizes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: sizes.append(size) or pread(fd, size, at))
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert max(sizes) < 2 * max(len(frame.data) for frame in frames)
    assert all_frames(journal) == frames
    assert [frame.first_offset for frame, _ in journal.frames(Epoch(1))] == list(range(40))
    journal.close()


# -- the file EPOCH ----------------------------------------------------------------------------------------------------


def test_an_epoch_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    device = FailingDevice()
    journal = begun(tmp_path, device=device)
    for room in (0, 5, 40):
        device.room = room
        with pytest.raises(JournalError, match="make room"):
            journal.begin_epoch(Epoch(2))
        assert msgspec.json.decode((tmp_path / "EPOCH").read_bytes())["epoch"] == 1
        assert journal.epoch == 1
    device.room = None
    journal.begin_epoch(Epoch(2))
    journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert journal.epoch == 2
    journal.close()


# -- killed processes --------------------------------------------------------------------------------------------------

APPENDING = """
import sys
from pathlib import Path
from tests.journals import a_frame, begun
journal = begun(Path(sys.argv[1]), fsync=sys.argv[2], segment_bytes=20_000)
at = 0
while True:
    count = journal.append_all([a_frame(at + n, blocks=1 + (at + n) % 50) for n in range(5)])
    at += count
    print(at, flush=True)
"""


@pytest.mark.parametrize("fsync", FSYNC_MODES)
def test_a_killed_process_has_lost_nothing_it_acknowledged(tmp_path: Path, fsync: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", APPENDING, str(tmp_path), fsync], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(200)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    read = all_frames(journal)
    assert len(read) >= acknowledged[-1]
    assert read == [a_frame(at, blocks=1 + at % 50) for at in range(len(read))]
    journal.close()


# -- power cuts --------------------------------------------------------------------------------------------------------


class ForgetfulDevice(OsDevice):
    """Knows what a power cut would leave: of each file what it had when it was last synced and any part of what was
    written since, and only the names whose folder was synced since.
    """

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}  # inode → as last synced
        self.names: dict[Path, int] = {}  # name → inode, as last synced; below 0 where the inode has gone since
        self._frozen = itertools.count(-1, -1)

    def sync(self, file: int) -> None:
        super().sync(file)
        inode = os.fstat(file).st_ino
        self.contents[inode] = Path(f"/proc/self/fd/{file}").read_bytes()

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.names = {path: path.stat().st_ino for path in folder.iterdir()}

    def replace(self, source: Path, target: Path) -> None:
        self._freeze(target)
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        self._freeze(path)
        super().remove(path)

    def _freeze(self, path: Path) -> None:
        """The device still has the name until its folder is synced; the inode's number may serve another file
        before.
        """
        if path.exists():
            inode = path.stat().st_ino
            frozen = next(self._frozen)
            self.contents[frozen] = self.contents.pop(inode, b"")
            self.names = {name: frozen if number == inode else number for name, number in self.names.items()}

    def left(self, folder: Path, target: Path, rng: random.Random) -> None:
        """Write what a power cut may leave of a folder. What has no name on the device may have got one by chance."""
        target.mkdir()
        names = dict(self.names)
        for path in sorted(folder.iterdir()):  # so that a seed draws the same wherever it runs
            if rng.random() < 0.5:
                names[path] = path.stat().st_ino
        alive = {path.stat().st_ino: path for path in folder.iterdir()}
        for path, inode in sorted(names.items()):
            synced = self.contents.get(inode, b"")
            now = alive[inode].read_bytes() if inode in alive else synced
            data = now if rng.random() < 0.3 else synced
            if data is synced and now.startswith(synced):
                data = now[: rng.randrange(len(synced), len(now) + 1)]
                if rng.random() < 0.3:  # the size has come, its bytes have not
                    data += bytes(rng.randrange(0, len(now) - len(data) + 1))
            (target / path.name).write_bytes(data)


@pytest.mark.parametrize("fsync", FSYNC_MODES)
@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_takes_no_more_than_the_mode_says(tmp_path: Path, fsync: str, seed: int) -> None:
    rng = random.Random(seed)
    now_s = 0.0
    device = ForgetfulDevice()
    journal = begun(
        tmp_path / "before", fsync=fsync, segment_bytes=900, sync_interval_s=1.0, device=device, clock=lambda: now_s
    )
    appended: list[FrameBytes] = []
    appended_s: list[float] = []  # when frame n was acknowledged
    first_kept = 0
    for _ in range(rng.randrange(1, 60)):
        batch = [a_frame(len(appended_s) + n, blocks=rng.randrange(1, 9)) for n in range(rng.randrange(1, 4))]
        assert journal.append_all(batch) == len(batch)
        appended += batch
        appended_s += [now_s] * len(batch)
        now_s += rng.choice([0.0, 0.1, 0.4])
        if journal.sync_due(now_s):
            journal.sync()
        if rng.random() < 0.1:
            journal.roll()
        if rng.random() < 0.05:
            done = Position(Epoch(1), Offset(rng.randrange(len(appended_s))))
            journal.truncate(done, done)
    if held := all_frames(journal):
        first_kept = held[0].first_offset
    device.left(tmp_path / "before", tmp_path / "after", rng)
    journal.close()
    journal = Journal.open(tmp_path / "after", INSTANCE, NATIVE)  # it opens, whatever is left
    read = all_frames(journal)
    assert all(frame == appended[frame.first_offset] for frame in read)
    promised = {"always": len(appended), "interval": sum(at_s <= now_s - 1.0 for at_s in appended_s), "off": 0}[fsync]
    there = {frame.first_offset for frame in read}
    assert there >= set(range(first_kept, promised))
    if fsync != "off":
        assert journal.epoch == 1
    journal.begin_epoch(Epoch(journal.epoch + 1))
    journal.append(a_frame(0, epoch=journal.epoch))
    journal.close()


@pytest.mark.parametrize("fsync", FSYNC_MODES)
def test_an_epoch_that_has_begun_outlives_a_power_cut(tmp_path: Path, fsync: str) -> None:
    device = ForgetfulDevice()
    journal = begun(tmp_path / "before", fsync=fsync, device=device)
    for seed in range(10):
        journal.begin_epoch(Epoch(journal.epoch + 1))
        device.left(tmp_path / "before", tmp_path / str(seed), random.Random(seed))
        after = Journal.open(tmp_path / str(seed), INSTANCE, NATIVE)
        assert after.epoch == journal.epoch
        after.close()
    journal.close()


def test_a_journal_tells_which_process_began_the_epochs_it_has(tmp_path: Path) -> None:
    for epoch, run in ((1, "first"), (2, ""), (3, "third")):
        journal = Journal.open(tmp_path, INSTANCE, NATIVE, run=run)
        journal.begin_epoch(Epoch(epoch))
        journal.append(a_frame(0, epoch=epoch))
        journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE, run="fourth")
    assert [journal.run_of(Epoch(epoch)) for epoch in range(5)] == ["", "first", "", "third", ""]
    journal.truncate(Position(Epoch(3), Offset(0)), Position(Epoch(3), Offset(0)))
    journal.begin_epoch(Epoch(4))
    assert [journal.run_of(Epoch(epoch)) for epoch in range(5)] == ["", "", "", "third", "fourth"]
    journal.close()
