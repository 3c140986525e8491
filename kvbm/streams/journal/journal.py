"""An instance's own file of its events: whole frames one after another, in segments named by epoch and first offset.

    LOCK                                   held by the one manager that writes here
    EPOCH                                  the epoch last begun (only grows), and with which durable pool: `streams/journal/epoch_file.py`
    0000000003-00000000000000000000.kvbj   segment: epoch 3 from offset 0
    0000000003-00000000000000004711.kvbj   the next segment of that epoch
    0000000002-00000000000000000000.kept   history: a segment nobody needs any more, see `streams/journal/history.py`

Opening cuts a torn or damaged tail at the last whole frame and keeps what was cut beside the segment as `.damaged`. Frames behind
damage in the middle of an epoch stay: they are good, but no longer follow what is before them.

A device that fails to sync may have dropped what it was given, and says so only once (Linux marks the pages clean). So frames that
were not acknowledged are cut off again, and those that were acknowledged for the process's death alone are written once more, to
a fresh segment, before anything else is taken.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import structlog

from kvbm.core.backend import Kernels
from kvbm.core.codec import MAX_FRAME_BYTES, VERSION, FrameBytes, FrameHeader, ScannedFrame, decode_header
from kvbm.core.errors import FrameError, JournalError, LedgerError, NewerFrameError, TornFrameError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.disk import Device, OsDevice
from kvbm.streams.journal.epoch_file import EPOCH_FILE, Begun, read_begun
from kvbm.streams.journal.history import DAMAGED_SUFFIX, KEPT_SUFFIX, History, Retention

log = structlog.get_logger()

SEGMENT_SUFFIX = ".kvbj"
FSYNC_MODES = ("off", "interval", "always")
SYNC_INTERVAL_S = 1.0
CAPACITY_BYTES = 4 << 30

_MARK_BYTES = 64 << 10  # between two frames whose places are kept in memory
_WINDOW_BYTES = 4 << 20  # read at once
_READ_BYTES = 256 << 10
_MOST_HEADER_BYTES = 48 + 255  # with the longest name
_MOST_PIECES = 512  # given to one write; the kernel takes 1,024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


class Segment:
    """One file of frames of one epoch, and where some of them begin: one in 64 KiB, so that memory stays small.

    Attributes:
        next_offset: the offset after the last frame.
        size: where the last whole frame ends, in bytes.
        synced: up to where the device has it, as far as it was asked.
        damaged_bytes: what was cut from it and is kept beside it.
    """

    def __init__(self, path: Path, epoch: Epoch, first_offset: Offset) -> None:
        self.path = path
        self.epoch = epoch
        self.first_offset = self.next_offset = first_offset
        self.size = 0
        self.synced = 0
        self.damaged_bytes = 0
        self._offsets = array("Q")  # of the frames whose places are known, ascending
        self._places = array("Q")

    @property
    def damaged_path(self) -> Path:
        """Where what was cut from it is kept; the file is there if anything ever was."""
        return self.path.with_suffix(DAMAGED_SUFFIX)

    @property
    def end(self) -> Position:
        """The position after the last frame."""
        return Position(self.epoch, self.next_offset)

    def add(self, first_offset: Offset, next_offset: Offset, size: int) -> None:
        """Count a frame that lies at the end."""
        if not self._places or self.size - self._places[-1] >= _MARK_BYTES:
            self._offsets.append(first_offset)
            self._places.append(self.size)
        self.next_offset = next_offset
        self.size += size

    def place_before(self, offset: Offset) -> int:
        """Where a frame begins that is not after an offset: the last known one."""
        at = bisect_right(self._offsets, offset)
        return self._places[at - 1] if at else 0

    def place_after(self, at: int) -> int | None:
        """The next known beginning of a frame after a byte."""
        index = bisect_right(self._places, at)
        return self._places[index] if index < len(self._places) else None


class _FullError(OSError):
    """The journal's own bound, not the device's."""


def segment_files(folder: Path, suffix: str = SEGMENT_SUFFIX) -> list[tuple[Epoch, Offset, Path]]:
    """The segments of a journal folder, in order; with KEPT_SUFFIX its history. Raises JournalError: a file's name is not a segment's."""
    found = []
    for path in folder.glob(f"*{suffix}"):
        epoch, _, offset = path.stem.partition("-")
        if not (epoch.isdigit() and offset.isdigit()):
            raise JournalError(f"{path} is not named <epoch>-<offset>{suffix}; move it out of the journal folder")
        found.append((Epoch(int(epoch)), Offset(int(offset)), path))
    return sorted(found)


class Journal:
    """The journal of one instance; a `FrameLog`. Any thread may call it; readers wait for no write and no sync.

    Args:
        fsync: "off" survives a killed process, "always" a power cut as well; of "interval" a power cut takes what was appended
            in the last `sync_interval_s`, provided somebody calls `sync` when `sync_due` says so.
        segment_bytes: a segment is closed once it is this large.
        capacity_bytes: what segments may take together, without history; beyond it `append` refuses.
        clock: seconds that only grow.
        retention: how much of what is let go stays as history.
    """

    def __init__(
        self,
        folder: Path,
        instance: InstanceId,
        kernels: Kernels,
        lock_file: BinaryIO,
        fsync: str,
        segment_bytes: int,
        capacity_bytes: int,
        sync_interval_s: float,
        device: Device,
        clock: Callable[[], float],
        run: str,
        retention: Retention = Retention(),  # noqa: B008 - immutable
    ) -> None:
        self.folder = folder
        self.instance = instance
        self._kernels = kernels
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._capacity_bytes = capacity_bytes
        self._sync_interval_s = sync_interval_s
        self._device = device
        self._clock = clock
        self._lock_file = lock_file
        self._writing = threading.RLock()  # taken before the two below
        self._reading = threading.Lock()  # taken before the one below
        self._guard = threading.Lock()  # the list of segments, and their sizes; never held over I/O
        self._segments: list[Segment] = []
        self._used_bytes = 0
        self._writer: int | None = None  # appends to the last segment
        self._torn = False  # bytes that do not count may lie behind the last whole frame
        self._doubtful = False  # a sync failed: what was written since the last good one may be gone
        self._rolls = False
        self._unsynced_since_s: float | None = None
        self._free_until = ORIGIN  # frames of this epoch before this offset may exceed the capacity
        self._reader: _SegmentReader | None = None  # where the last reading ended
        self._closed = False
        self._history = History(retention, device)
        self._begun = Begun(instance)
        self._run = run
        self.epoch = Epoch(0)

    @classmethod
    def open(
        cls,
        folder: Path,
        instance: InstanceId,
        kernels: Kernels,
        fsync: str = "off",
        segment_bytes: int = 64 << 20,
        capacity_bytes: int = CAPACITY_BYTES,
        sync_interval_s: float = SYNC_INTERVAL_S,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
        run: str = "",
        retention: Retention = Retention(),  # noqa: B008 - immutable
    ) -> Journal:
        """Lock the folder and repair its tail.

        Args:
            run: of this process, as in `Fence.run`; `run_of` tells it of the epochs begun by it.
        Raises: JournalError: another manager has it, it is another instance's, it cannot be written, or it was written by a
            newer kvbm.
        """
        if fsync not in FSYNC_MODES:
            raise JournalError(f"journal.fsync is {fsync!r}; use one of {', '.join(FSYNC_MODES)}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_file = open(folder / "LOCK", "ab")  # noqa: SIM115 - held until close
        except OSError as error:
            raise JournalError(
                f"journal folder {folder} cannot be written ({error.strerror}); choose another"
            ) from None
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise JournalError(
                f"journal folder {folder} is in use by another manager; give each instance its own folder, or stop the other"
            ) from None
        journal = cls(
            folder, instance, kernels, lock_file, fsync, segment_bytes, capacity_bytes, sync_interval_s,
            device or OsDevice(), clock, run, retention,
        )  # fmt: skip
        try:
            journal._load()
        except OSError as error:
            journal.close()
            raise JournalError(
                f"journal folder {folder} cannot be read and repaired ({error}); make it readable and make room"
            ) from None
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def pool_id(self) -> str:
        """The durable pool the last epoch began with, "" for none."""
        return self._begun.pool_id

    @property
    def used_bytes(self) -> int:
        """What its segments take, with what was cut from them; history is not counted."""
        return self._used_bytes

    @property
    def history_bytes(self) -> int:
        """What kept segments take, with what was cut from them."""
        return self._history.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """What its segments may take."""
        return self._capacity_bytes

    def epochs_of_pool(self) -> list[Epoch]:
        """The epochs that began with `pool_id`, the newest first, whether frames of them are here or not."""
        with self._guard:
            older = {segment.epoch for segment in self._segments if segment.epoch >= self._begun.pool_since}
        return sorted(older | {self.epoch}, reverse=True) if self.pool_id else []

    def was_cut(self, epoch: Epoch) -> bool:
        """Whether anything of an epoch that is still here was ever cut off."""
        with self._guard:
            segments = [segment for segment in self._segments if segment.epoch == epoch]
        return any(segment.damaged_path.exists() for segment in segments)

    # -- opening ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        for unfinished in self.folder.glob("*.new"):
            self._device.remove(unfinished)
        self._begun = read_begun(self.folder, self.instance, self._kernels.crc32c)
        kept = segment_files(self.folder, KEPT_SUFFIX)
        self._history.load(path for _, _, path in kept)
        self.epoch = Epoch(max(self._begun.epoch, *(epoch for epoch, _, _ in kept), 0))
        files = segment_files(self.folder)
        for index, (epoch, first, path) in enumerate(files):
            following = files[index + 1] if index + 1 < len(files) else None
            until = following[1] if following is not None and following[0] == epoch else None
            segment = Segment(path, epoch, first)
            self._scan(segment, until)
            self._segments.append(segment)
            self._used_bytes += segment.size + segment.damaged_bytes
            self.epoch = max(self.epoch, epoch)
        self._history.trim(self._used_bytes)

    def _scan(self, segment: Segment, until: Offset | None) -> None:
        """Find a segment's frames, and cut what are none.

        Args:
            until: where the next segment of the epoch begins: frames from there on are here from before they were written
                again, there.
        """
        error: FrameError | None = None
        has_repeats = False
        for _, frames, _, why_ended in _scan_file(segment.path, None, self._kernels):
            error = why_ended
            if frames and frames[0].instance != self.instance:
                raise JournalError(
                    f"{segment.path} is of instance {frames[0].instance!r}, not {self.instance!r}; "
                    "give each instance its own folder"
                )
            for frame in frames:
                has_repeats = until is not None and frame.next_offset > until
                if has_repeats:
                    break
                segment.add(frame.first_offset, frame.next_offset, frame.end - frame.at)
            if has_repeats:
                break
        is_first = not segment.size  # behind older frames it is damage: one kvbm writes one file
        if isinstance(error, NewerFrameError) and is_first and not self._is_flipped_version(segment.path):
            raise JournalError(
                f"{segment.path} was written by a newer kvbm (frame version {error.version}, this one reads up to "
                f"{VERSION}); upgrade kvbm or use another folder"
            )
        if has_repeats:
            log.info("journal.repeats_cut", segment=str(segment.path), at=segment.size)
            os.truncate(segment.path, segment.size)
        elif error is not None:
            self._cut(segment, error)
        segment.synced = segment.size
        if segment.damaged_path.exists():
            segment.damaged_bytes = segment.damaged_path.stat().st_size

    def _is_flipped_version(self, path: Path) -> bool:
        """Whether the first frame of a file is a good one but for its version: then that was changed, and nobody newer wrote it."""
        with open(path, "rb") as file:
            head = file.read(12)
            data = head + file.read(min(int.from_bytes(head[8:], "little"), MAX_FRAME_BYTES) - len(head))
        of_known = (data[:4] + version.to_bytes(2, "little") + data[6:] for version in range(1, VERSION + 1))
        return any(self._kernels.scan_frames(one)[0] for one in of_known)

    def _cut(self, segment: Segment, error: FrameError) -> None:
        damaged = segment.damaged_path
        with open(segment.path, "rb") as source, open(damaged, "wb") as kept:
            source.seek(segment.size)
            cut_bytes = 0
            while piece := source.read(_WINDOW_BYTES):
                cut_bytes += kept.write(piece)
            kept.flush()
            os.fsync(kept.fileno())
        os.truncate(segment.path, segment.size)
        log.warning(
            "journal.tail_cut", segment=str(segment.path), at=segment.size, cut_bytes=cut_bytes, kept_as=str(damaged),
            why=error.detail,
        )  # fmt: skip

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, pool_id: str = "", round_end: Offset | None = None) -> None:
        """Persist that an epoch has begun, before any of its events.

        Args:
            pool_id: name of the durable pool whose slots its events will speak of, "" for none.
            round_end: frames that begin before it may exceed the capacity: without its first round an epoch is of no use, and
                the round is what lets older segments go.
        Raises: JournalError: it is not newer, or no room.
        """
        with self._writing:
            if epoch <= self.epoch:
                raise JournalError(f"epoch {epoch} is not newer than epoch {self.epoch} of {self.folder}")
            since = self._begun.pool_since if pool_id == self._begun.pool_id else epoch
            runs = {segment.epoch: self.run_of(segment.epoch) for segment in self._segments} | {epoch: self._run}
            named = {int(begun): run for begun, run in runs.items() if run}
            begun = Begun(self.instance, epoch, pool_id, since, named)
            data = begun.encoded(self._kernels.crc32c)
            try:
                self._with_room(lambda: self._write_file(self.folder / EPOCH_FILE, [memoryview(data)]))
            except OSError as error:
                raise JournalError(
                    f"{self.folder / EPOCH_FILE} cannot be written ({error.strerror}); make room or choose another folder"
                ) from None
            self._begun, self.epoch = begun, epoch
            self._free_until = Position(epoch, round_end or Offset(0))
            self._rolls = True

    def runs(self) -> dict[Epoch, str]:
        """The epochs here whose beginner is known, and the run of the process that began each, as in `Fence.run`."""
        return {Epoch(epoch): run for epoch, run in self._begun.runs.items()}

    def run_of(self, epoch: Epoch) -> str:
        """The process that began an epoch here, as in `Fence.run`; "" when it is not known."""
        return self._begun.runs.get(epoch, "")

    def roll(self) -> None:
        """Begin a new segment with the next append, as when a round begins: what is before it can then go as a whole."""
        with self._writing:
            self._rolls = True

    def append(self, frame: FrameBytes) -> None:
        """Write one whole frame; when it returns the frame is durable as far as `fsync` promises.

        Raises: OSError: as `append_all`.
        """
        self.append_all([frame])

    def append_all(self, frames: Sequence[FrameBytes]) -> int:
        """Write whole frames with one write and, where every append is synced, one sync; gives how many are durable now, as far
        as `fsync` promises: the first ones, at least one.

        A device without room gets that of history first.

        Raises: OSError: the device refused, the journal is full (ENOSPC), or closed; nothing of any frame counts then, and it
            may be tried again. LedgerError: a frame begins before the last one ends; a bug in the caller.
        """
        done = 0
        with self._writing:
            self._check_open()
            try:
                while done < len(frames):
                    first = done
                    done += self._with_room(lambda: self._append_group(frames, first))  # noqa: B023 - called now
            except OSError:
                if not done:
                    raise
            self._history.trim(self._used_bytes)
        return done

    def sync_due(self, now_s: float) -> bool:
        """Whether `sync` should be called now: "interval", and frames wait since `sync_interval_s` ago.

        Args:
            now_s: by the journal's clock.
        """
        since_s = self._unsynced_since_s
        return self._fsync == "interval" and since_s is not None and now_s - since_s >= self._sync_interval_s

    def sync(self) -> None:
        """Bring what was appended to the device. Raises OSError: it did not take it; a later call or append tries again."""
        with self._writing:
            self._check_open()
            self._with_room(self._settle)
            self._with_room(self._sync_writer)

    def let_go(self, published: Position, whole_round: Position) -> int:
        """Make history of the segments nobody needs: all of whose frames are on the stream and before a whole round. Gives how many.

        What may not stay as history is deleted. The segment being written stays. May wait for a sync, since what makes them needless has to be on the device first.

        Args:
            published: everything before it is on the stream.
            whole_round: where the last round began that is whole, durable and published.
        """
        needless = min(published, whole_round)
        with self._writing:
            with self._guard:
                most = len(self._segments) - (self._writer is not None)
                count = 0
                while count < most and self._segments[count].end <= needless:
                    count += 1
            if not count:
                return 0
            if self._fsync != "off":
                try:
                    self._settle()
                    self._sync_writer()
                except OSError as error:
                    log.warning("journal.segments_kept", segments=count, why=str(error))
                    return 0
            with self._guard:
                gone, self._segments = self._segments[:count], self._segments[count:]
                self._used_bytes -= sum(segment.size + segment.damaged_bytes for segment in gone)
            for segment in gone:
                try:
                    self._history.take(segment.path)
                except OSError as error:  # the next start finds it and lets it go again
                    log.warning("journal.segment_kept", segment=str(segment.path), why=str(error))
            self._history.trim(self._used_bytes)
        return len(gone)

    def _with_room(self, write: Callable[[], Result]) -> Result:
        """Write, and again for as long as the device has no room and there is history to give up. Raises OSError."""
        while True:
            try:
                return write()
            except OSError as error:
                if isinstance(error, _FullError) or error.errno not in _NO_ROOM or not self._history.give_up_oldest():
                    raise

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, f"journal folder {self.folder} is closed")

    def _append_group(self, frames: Sequence[FrameBytes], done: int) -> int:
        """Write the frames from `done` on that go to one segment; gives how many. Raises OSError, LedgerError: none counts."""
        self._settle()
        first = frames[done]
        last = self._segments[-1].end if self._segments else ORIGIN
        if Position(first.epoch, first.first_offset) < last:
            raise LedgerError(
                f"a frame from offset {first.first_offset} of epoch {first.epoch} after one that ends at offset "
                f"{last.offset} of epoch {last.epoch}"
            )
        self._check_room(first)
        if self._needs_segment(first):
            self._open_segment(first)
        segment, writer = self._segments[-1], self._writer
        assert writer is not None
        if os.fstat(writer).st_nlink == 0:
            raise OSError(errno.ENOENT, f"{segment.path} was removed; restart the engine, and leave its folder alone")
        group: list[FrameBytes] = []
        size = segment.size
        for frame in frames[done : done + _MOST_PIECES]:
            if group and (
                frame.epoch != segment.epoch
                or size >= self._segment_bytes
                or not self._has_room(frame, size - segment.size)
            ):
                break
            group.append(frame)
            size += len(frame.data)
        self._torn = True  # until all frames are there
        self._write(writer, [memoryview(frame.data) for frame in group])
        if self._unsynced_since_s is None:
            self._unsynced_since_s = self._clock()
        if self._fsync == "always" or self.sync_due(self._clock()):
            self._sync_file(writer)
            segment.synced = size
        self._torn = False
        with self._guard:
            self._used_bytes += size - segment.size
            for frame in group:
                segment.add(frame.first_offset, frame.next_offset, len(frame.data))
        return len(group)

    def _needs_segment(self, frame: FrameBytes) -> bool:
        if self._writer is None:
            return True
        segment = self._segments[-1]
        return segment.epoch != frame.epoch or segment.size >= self._segment_bytes or (self._rolls and segment.size > 0)

    def _has_room(self, frame: FrameBytes, more_bytes: int = 0) -> bool:
        if Position(frame.epoch, frame.first_offset) < self._free_until and frame.epoch == self._free_until.epoch:
            return True
        return self._used_bytes + more_bytes + len(frame.data) <= self._capacity_bytes

    def _check_room(self, frame: FrameBytes) -> None:
        if not self._has_room(frame):
            raise _FullError(
                errno.ENOSPC,
                f"journal folder {self.folder} holds {self._used_bytes} bytes, and journal.capacity_bytes is "
                f"{self._capacity_bytes}: no room for {len(frame.data)} more until a whole round is published",
            )

    def _write(self, file: int, pieces: list[memoryview]) -> None:
        """All of it, however little the device takes at once. Raises OSError."""
        while pieces:
            taken = self._device.write(file, pieces[:_MOST_PIECES])
            while pieces and taken >= len(pieces[0]):
                taken -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][taken:]

    def _write_file(self, path: Path, pieces: list[memoryview]) -> None:
        """A whole file under its name, on the device, or none. Raises OSError."""
        temporary = path.with_name(f"{path.name}.new")
        self._device.remove(temporary)
        file = self._device.open(temporary)
        try:
            self._write(file, pieces)
            self._device.sync(file)
        finally:
            self._device.close(file)
        self._device.replace(temporary, path)
        self._device.sync_folder(self.folder)

    def _sync_file(self, file: int) -> None:
        """Raises OSError, and remembers that what the file has since the last good sync is in doubt."""
        try:
            self._device.sync(file)
        except OSError:
            self._doubtful = True
            raise
        self._unsynced_since_s = None

    def _sync_writer(self) -> None:
        if self._writer is not None and self._segments[-1].synced < self._segments[-1].size:
            self._sync_file(self._writer)
            self._segments[-1].synced = self._segments[-1].size
        self._unsynced_since_s = None

    def _settle(self) -> None:
        """Bring the last segment's end in order before anything follows it. Raises OSError."""
        if self._writer is None:
            return
        segment = self._segments[-1]
        if self._torn:
            self._device.truncate(self._writer, segment.size)
            self._torn = False
        if self._doubtful:
            if segment.synced < segment.size:
                self._write_again(segment, self._writer)
            elif segment.size == 0:
                self._device.remove(segment.path)
                with self._guard:
                    self._segments.pop()
            self._doubtful = False
            self._forget_writer()

    def _write_again(self, segment: Segment, writer: int) -> None:
        """Frames since the last good sync, to a fresh segment, while the page cache still has them. Raises OSError."""
        with open(segment.path, "rb") as file:
            file.seek(segment.synced)
            data = file.read(segment.size - segment.synced)
        frames, error = self._kernels.scan_frames(data)
        if error is not None or not frames:
            log.error(
                "journal.frames_lost", segment=str(segment.path), at=segment.synced, lost_bytes=len(data),
                why=error.detail if error else "the file is shorter than it was",
                remedy="replace the device; readers of the stream see a gap and are made whole by a round",
            )  # fmt: skip
        fresh: Segment | None = None
        if frames:
            path = self._segment_path(segment.epoch, frames[0].first_offset)
            fresh = Segment(path, segment.epoch, frames[0].first_offset)
            self._write_file(path, [memoryview(data)[: frames[-1].end]])
            for frame in frames:
                fresh.add(frame.first_offset, frame.next_offset, frame.end - frame.at)
            fresh.synced = fresh.size
        kept = Segment(segment.path, segment.epoch, segment.first_offset)
        if segment.synced:
            for _, earlier, _, _ in _scan_file(segment.path, segment.synced, self._kernels):
                for frame in earlier:
                    kept.add(frame.first_offset, frame.next_offset, frame.end - frame.at)
            self._device.truncate(writer, segment.synced)
            kept.synced = kept.size
        log.warning("journal.written_again", segment=str(segment.path), frames=len(frames))
        with self._guard:
            self._segments[-1:] = ([kept] if segment.synced else []) + ([fresh] if fresh is not None else [])
            self._used_bytes += kept.size + (fresh.size if fresh is not None else 0) - segment.size

    def _segment_path(self, epoch: Epoch, first_offset: Offset) -> Path:
        return self.folder / f"{epoch:010d}-{first_offset:020d}{SEGMENT_SUFFIX}"

    def _open_segment(self, frame: FrameBytes) -> None:
        if self._writer is not None:
            if self._fsync != "off":
                self._sync_writer()
            self._forget_writer()
        path = self._segment_path(frame.epoch, frame.first_offset)
        writer = self._device.open(path)
        try:
            self._device.truncate(writer, 0)  # a file of that name holds nothing that counted
            if self._fsync != "off":
                self._device.sync_folder(self.folder)
        except OSError:
            self._device.close(writer)
            raise
        fresh = Segment(path, frame.epoch, frame.first_offset)
        with self._guard:
            if self._segments and self._segments[-1].path == path:  # all of it was cut off when the folder was opened
                fresh.damaged_bytes = self._segments.pop().damaged_bytes
            self._segments.append(fresh)
        self._writer = writer
        self._rolls = False

    def _forget_writer(self) -> None:
        writer, self._writer = self._writer, None
        self._unsynced_since_s = None
        if writer is None:
            return
        try:
            self._device.close(writer)
        except OSError as error:  # what had to be on the device was synced before
            log.warning("journal.segment_unclosed", folder=str(self.folder), why=str(error))

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """See `FrameLog.read_after`. Reading on where the last call ended costs no search.

        A frame whose header the device has damaged since is left out, with a warning, and so is what follows it up to the next
        known place: to readers of the stream that is a gap like any other.

        Raises: OSError: the device does not read.
        """
        found: list[FrameBytes] = []
        room = limit_bytes
        with self._reading:
            while True:
                with self._guard:
                    index = bisect_right(self._segments, position, key=lambda segment: segment.end)
                    if index == len(self._segments):
                        return found
                    segment = self._segments[index]
                    size, end = segment.size, segment.end
                    place = segment.place_before(position.offset) if segment.epoch == position.epoch else 0
                reader = self._reader_of(segment, position, place)
                if reader is not None:
                    more, is_full = reader.read(size, room, not found)
                    found += more
                    room -= sum(len(frame.data) for frame in more)
                    if is_full:
                        return found
                position = end

    def _reader_of(self, segment: Segment, position: Position, place: int) -> _SegmentReader | None:
        """The reader that stands there, or a new one; None when the file is gone. Raises OSError."""
        reader = self._reader
        offset = position.offset if position.epoch == segment.epoch else Offset(0)
        if reader is not None and reader.segment is segment and reader.offset == offset:
            return reader
        if reader is not None:
            reader.file.close()
            self._reader = None
        try:
            file = open(segment.path, "rb", buffering=0)  # noqa: SIM115 - kept for the next call
        except FileNotFoundError:
            with self._guard:
                is_missed = segment in self._segments  # and was not let go just now
            if is_missed:
                log.warning("journal.segment_missing", segment=str(segment.path), remedy="leave the folder alone")
            return None
        self._reader = _SegmentReader(segment, file, offset, place)
        return self._reader

    def frames(self, epoch: Epoch) -> Iterator[tuple[ScannedFrame, bytes]]:
        """The frames of one epoch, in order, each with the piece of its segment it lies in.

        Raises: FrameError: the file has changed since it was opened. OSError.
        """
        with self._guard:
            paths = [(segment.path, segment.size) for segment in self._segments if segment.epoch == epoch]
        for path, size in paths:
            for _, frames, data, error in _scan_file(path, size, self._kernels):
                for frame in frames:
                    yield frame, data
                if error is not None:
                    raise error

    def close(self) -> None:
        """Close the files and unlock the folder. Idempotent."""
        with self._writing, self._reading:
            if self._closed:
                return
            try:
                self._settle()
                if self._fsync != "off":
                    self._sync_writer()
            except OSError as error:  # a torn tail is cut when the folder is opened again
                log.warning("journal.closed_unsynced", folder=str(self.folder), why=str(error))
            self._closed = True
            self._forget_writer()
            if self._reader is not None:
                self._reader.file.close()
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # at once, though a forked child may know the file still
            self._lock_file.close()

    def disown(self) -> None:
        """This process is a forked child: let go of the files, which would keep the folder locked for as long as it lives."""
        self._writing, self._reading = threading.RLock(), threading.Lock()
        self._closed = True
        self._lock_file.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                os.close(writer)


class _SegmentReader:
    """Reads a segment's frames one after another, through a buffer.

    Attributes:
        offset: everything before it was read, or was not asked for.
    """

    def __init__(self, segment: Segment, file: FileIO, offset: Offset, place: int) -> None:
        self.segment = segment
        self.file = file
        self.offset = offset
        self._at = place
        self._data = b""
        self._data_at = 0

    def read(self, size: int, room: int, at_least_one: bool) -> tuple[list[FrameBytes], bool]:
        """The next frames before byte `size` that fit, and whether one was left because it does not. Raises OSError."""
        found: list[FrameBytes] = []
        while self._at < size:
            header = self._header(size)
            if header is None:
                skipped = self.segment.place_after(self._at) or size
                log.warning(
                    "journal.frame_damaged", segment=str(self.segment.path), at=self._at, left_out=skipped - self._at,
                    remedy="the device changes what it keeps; replace it",
                )  # fmt: skip
                self._at = skipped
                continue
            if header.next_offset > self.offset:
                if header.frame_bytes > room and (found or not at_least_one):
                    return found, True
                data = self._bytes(header.frame_bytes, size)
                found.append(FrameBytes(header.epoch, header.first_offset, header.next_offset, data))
                room -= len(data)
                self.offset = header.next_offset
            self._at += header.frame_bytes
        return found, False

    def _header(self, size: int) -> FrameHeader | None:
        try:
            header = decode_header(self._bytes(_MOST_HEADER_BYTES, size))
        except FrameError:
            return None
        is_good = (
            header.epoch == self.segment.epoch and self._at + header.frame_bytes <= size and header.event_count > 0
        )
        return header if is_good else None

    def _bytes(self, count: int, size: int) -> bytes:
        """The next bytes; fewer at the segment's end. Nothing from behind it, which may be cut and written anew."""
        count = min(count, size - self._at)
        start = self._at - self._data_at
        if not 0 <= start <= start + count <= len(self._data):
            start, self._data_at = 0, self._at
            self._data = os.pread(self.file.fileno(), min(max(count, _READ_BYTES), size - self._at), self._at)
        return self._data[start : start + count]


def _scan_file(
    path: Path, size: int | None, kernels: Kernels
) -> Iterator[tuple[int, list[ScannedFrame], bytes, FrameError | None]]:
    """A file's good frames, piece by piece: where the piece begins, its frames (placed in it), its bytes, and after the last one
    why reading ended before the end.

    Args:
        size: read only so far; None for all.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        at, window = 0, _WINDOW_BYTES
        while at < size:
            data = os.pread(file.fileno(), min(window, size - at), at)
            frames, error = kernels.scan_frames(data)
            if isinstance(error, TornFrameError) and data and at + len(data) < size and window < MAX_FRAME_BYTES:
                window = _WINDOW_BYTES if frames else 2 * window  # the piece ends, not the file
                error = None
            elif not data:
                error = TornFrameError(0, f"the file has {at} of {size} bytes")
            else:
                window = _WINDOW_BYTES
            yield at, frames, data, error
            if error is not None:
                return
            at += frames[-1].end if frames else 0
