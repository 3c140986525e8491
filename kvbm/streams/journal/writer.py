"""Writes a journal's frames to its last segment, and brings the end of that segment in order after a failure.

A device that fails to sync may have dropped what it was given, and says so only once (Linux marks the pages clean). So
frames that were not acknowledged are cut off again, and those that were acknowledged for the process's death alone are
written once more, to a fresh segment, before anything else is taken.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvbm.core.backend import Backend
from kvbm.core.codec import FrameBytes
from kvbm.core.errors import LedgerError
from kvbm.core.ids import Epoch, Offset
from kvbm.files import opener
from kvbm.safe_log import SafeLog
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.disk import MOST_PIECES, DiskWriter, write_all, write_file
from kvbm.streams.journal.history import Retention
from kvbm.streams.journal.segments import JournalSegment, JournalSegments, scan_file, segment_path

log = SafeLog()

FSYNC_MODES = ("off", "interval", "always")
SYNC_INTERVAL_S = 1.0
CAPACITY_BYTES = 4 << 30
_LISTED_BYTES = 24  # of a block in a snapshot, with its part of events and frames


class JournalOptions(NamedTuple):
    """How a journal writes and what it may take.

    Attributes:
        fsync: "off" survives a killed process, "always" a power cut as well; of "interval" a power cut takes what was
            appended in the last `sync_interval_s`, provided somebody calls `sync` when `sync_due` says so.
        segment_bytes: a segment is closed once it is this large.
        capacity_bytes: what segments may take together, without history; beyond it `append` refuses.
        retention: how much of what is let go stays as history.
    """

    fsync: str = "off"
    segment_bytes: int = 64 << 20
    capacity_bytes: int = CAPACITY_BYTES
    sync_interval_s: float = SYNC_INTERVAL_S
    retention: Retention = Retention()


def least_capacity(slots: int) -> int:
    """Bytes a journal must be able to hold where an instance has so many slots, or it can never be emptied.

    A snapshot begins when half of it is used, and only a whole one lets older segments go. So it is twice what a
    snapshot takes at most, and as much again for what happens while it is under way.
    """
    return 4 * _LISTED_BYTES * slots


class FullError(OSError):
    """The journal's own bound is reached, not the device's."""


class SegmentWriter:
    """Appends to the last segment, and opens the next one. Whoever holds the journal's lock for writing calls it.

    Args:
        clock: seconds that only grow.
    """

    def __init__(
        self,
        folder: Path,
        segments: JournalSegments,
        backend: Backend,
        options: JournalOptions,
        device: DiskWriter,
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._segments = segments
        self._backend = backend
        self._options = options
        self._device = device
        self._clock = clock
        self._file: int | None = None  # appends to the last segment
        self._torn = False  # bytes that do not count may lie behind the last whole frame
        self._unsure = False  # a sync failed: what was written since the last good one may be gone
        self._rolls = False
        self._unsynced_since_s: float | None = None
        self._free_until = ORIGIN  # frames of this epoch before this offset may exceed the capacity

    @property
    def is_writing(self) -> bool:
        """Whether the last segment is open."""
        return self._file is not None

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        """Begin a new segment with the next append, and let frames in beyond the capacity that begin before
        `snapshot_end`.
        """
        self._free_until = Position(epoch, snapshot_end)
        self._rolls = True

    def roll(self) -> None:
        """Begin a new segment with the next append."""
        self._rolls = True

    def let_in(self, until: Position) -> bool:
        """Let frames of an epoch that begin before a position exceed the capacity; whether that is new."""
        if until <= self._free_until:
            return False
        self._free_until = until
        return True

    def append_group(self, frames: Sequence[FrameBytes], done: int) -> int:
        """Write the frames from `done` on that go to one segment; gives how many.

        Raises OSError, LedgerError: none counts.
        """
        self.settle()
        first = frames[done]
        end = self._segments.end
        if Position(first.epoch, first.first_offset) < end:
            raise LedgerError(
                f"a frame from offset {first.first_offset} of epoch {first.epoch} after one that ends at offset "
                f"{end.offset} of epoch {end.epoch}"
            )
        self._check_room(first)
        if self._needs_segment(first):
            self._open_segment(first)
        segment, file = self._segments.last, self._file
        assert segment is not None and file is not None
        if os.fstat(file).st_nlink == 0:
            raise OSError(errno.ENOENT, f"{segment.path} was removed; restart the engine, and leave its folder alone")
        group: list[FrameBytes] = []
        size = segment.size
        for frame in frames[done : done + MOST_PIECES]:
            if group and (
                frame.epoch != segment.epoch
                or size >= self._options.segment_bytes
                or not self._has_room(frame, size - segment.size)
            ):
                break
            group.append(frame)
            size += len(frame.data)
        self._torn = True  # until all frames are there
        write_all(self._device, file, [memoryview(frame.data) for frame in group])
        if self._unsynced_since_s is None:
            self._unsynced_since_s = self._clock()
        if self._options.fsync == "always" or self.sync_due(self._clock()):
            self._sync_file(file)
            segment.synced = size
        self._torn = False
        self._segments.grow(segment, group)
        return len(group)

    def sync_due(self, now_s: float) -> bool:
        """See `Journal.sync_due`."""
        since_s = self._unsynced_since_s
        is_timed = self._options.fsync == "interval"
        return is_timed and since_s is not None and now_s - since_s >= self._options.sync_interval_s

    def sync(self) -> None:
        """Bring the last segment to the device. Raises OSError."""
        segment = self._segments.last
        if self._file is not None and segment is not None and segment.synced < segment.size:
            self._sync_file(self._file)
            segment.synced = segment.size
        self._unsynced_since_s = None

    def settle(self) -> None:
        """Bring the last segment's end in order before anything follows it. Raises OSError."""
        segment = self._segments.last
        if self._file is None or segment is None:
            return
        if self._torn:
            self._device.truncate(self._file, segment.size)
            self._torn = False
        if self._unsure:
            if segment.synced < segment.size:
                self._write_again(segment, self._file)
            elif segment.size == 0:
                self._device.remove(segment.path)
                self._segments.replace_last([])
            self._unsure = False
            self.close_file()

    def close_file(self) -> None:
        """Close the last segment; the next append opens another."""
        file, self._file = self._file, None
        self._unsynced_since_s = None
        if file is None:
            return
        try:
            self._device.close(file)
        except OSError as error:  # what had to be on the device was synced before
            log.warning("journal.segment_unclosed", folder=str(self._folder), why=str(error))

    def disown(self) -> None:
        """This process is a forked child: let go of the file and nothing else."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)

    # -- room ----------------------------------------------------------------------------------------------------------

    def raise_capacity(self, capacity_bytes: int) -> None:
        """Take so much instead of what the options say."""
        self._options = self._options._replace(capacity_bytes=capacity_bytes)

    def _has_room(self, frame: FrameBytes, more_bytes: int = 0) -> bool:
        if Position(frame.epoch, frame.first_offset) < self._free_until and frame.epoch == self._free_until.epoch:
            return True
        return self._segments.used_bytes + more_bytes + len(frame.data) <= self._options.capacity_bytes

    def _check_room(self, frame: FrameBytes) -> None:
        if not self._has_room(frame):
            raise FullError(
                errno.ENOSPC,
                f"journal folder {self._folder} holds {self._segments.used_bytes} bytes, and journal.capacity_bytes is "
                f"{self._options.capacity_bytes}: no room for {len(frame.data)} more until a completed snapshot is "
                "published",
            )

    # -- segments ------------------------------------------------------------------------------------------------------

    def _needs_segment(self, frame: FrameBytes) -> bool:
        segment = self._segments.last
        if self._file is None or segment is None:
            return True
        is_full = segment.size >= self._options.segment_bytes
        return segment.epoch != frame.epoch or is_full or (self._rolls and segment.size > 0)

    def _open_segment(self, frame: FrameBytes) -> None:
        if self._file is not None:
            if self._options.fsync != "off":
                self.sync()
            self.close_file()
        path = segment_path(self._folder, frame.epoch, frame.first_offset)
        file = self._device.open(path)
        try:
            self._device.truncate(file, 0)  # a file of that name holds nothing that counted
            if self._options.fsync != "off":
                self._device.sync_folder(self._folder)
        except OSError:
            self._device.close(file)
            raise
        self._segments.add(JournalSegment(path, frame.epoch, frame.first_offset))
        self._file = file
        self._rolls = False

    def _sync_file(self, file: int) -> None:
        """Raises OSError, and remembers that what the file has since the last good sync may be gone."""
        try:
            self._device.sync(file)
        except OSError:
            self._unsure = True
            raise
        self._unsynced_since_s = None

    def _write_again(self, segment: JournalSegment, file: int) -> None:
        """Write frames since the last good sync to a fresh segment, while the page cache still has them.

        Raises OSError.
        """
        with open(segment.path, "rb", opener=opener) as source:
            source.seek(segment.synced)
            data = source.read(segment.size - segment.synced)
        frames, error = self._backend.scan_frames(data)
        if error is not None or not frames:
            log.error(
                "journal.frames_lost",
                segment=str(segment.path),
                at=segment.synced,
                lost_bytes=len(data),
                why=error.detail if error else "the file is shorter than it was",
                remedy="replace the device; readers of the stream see a gap and are made whole by a snapshot",
            )
        instead: list[JournalSegment] = []
        if frames:
            path = segment_path(self._folder, segment.epoch, frames[0].first_offset)
            fresh = JournalSegment(path, segment.epoch, frames[0].first_offset)
            write_file(self._device, path, [memoryview(data)[: frames[-1].end]])
            for frame in frames:
                fresh.add(frame.first_offset, frame.next_offset, frame.end - frame.at)
            fresh.synced = fresh.size
            instead.append(fresh)
        if segment.synced:
            kept = JournalSegment(segment.path, segment.epoch, segment.first_offset)
            for _, earlier, _, _ in scan_file(segment.path, segment.synced, self._backend):
                for frame in earlier:
                    kept.add(frame.first_offset, frame.next_offset, frame.end - frame.at)
            self._device.truncate(file, segment.synced)
            kept.synced = kept.size
            instead.insert(0, kept)
        log.warning("journal.written_again", segment=str(segment.path), frames=len(frames))
        self._segments.replace_last(instead)
