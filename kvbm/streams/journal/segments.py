"""The segments of a journal's folder: one file of frames each, named by epoch and first offset."""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm.core.backend import Backend
from kvbm.core.codec import MAX_FRAME_BYTES, FrameBytes, ScannedFrame
from kvbm.core.errors import FrameError, JournalError, TornFrameError
from kvbm.core.ids import Epoch, Offset
from kvbm.files import opener
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.history import DAMAGED_SUFFIX

SEGMENT_SUFFIX = ".kvbj"

_MARK_BYTES = 64 << 10  # between two frames whose places are kept in memory
_WINDOW_BYTES = 4 << 20  # read at once


class JournalSegment:
    """One file of frames of one epoch, and where some of them begin: one in 64 KiB, so that memory stays small.

    Attributes:
        next_offset: the offset after the last frame.
        size: where the last whole frame ends, in bytes.
        synced: up to where the device has it, as far as it was asked.
        damaged_bytes: what was cut from it and is kept beside it.
        is_damaged: whether this opening, or one before it, has cut whole frames off, which were perhaps acknowledged.
    """

    def __init__(self, path: Path, epoch: Epoch, first_offset: Offset) -> None:
        self.path = path
        self.epoch = epoch
        self.first_offset = self.next_offset = first_offset
        self.size = 0
        self.synced = 0
        self.damaged_bytes = 0
        self.is_damaged = False
        self._offsets = array("Q")  # of the frames whose places are known, ascending
        self._starts = array("Q")

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
        if not self._starts or self.size - self._starts[-1] >= _MARK_BYTES:
            self._offsets.append(first_offset)
            self._starts.append(self.size)
        self.next_offset = next_offset
        self.size += size

    def start_before(self, offset: Offset) -> int:
        """Where a frame begins that is not after an offset: the last known one."""
        at = bisect_right(self._offsets, offset)
        return self._starts[at - 1] if at else 0

    def start_after(self, at: int) -> int | None:
        """The next known beginning of a frame after a byte."""
        index = bisect_right(self._starts, at)
        return self._starts[index] if index < len(self._starts) else None


class Readable(NamedTuple):
    """The part of a segment that a reader may read now.

    Attributes:
        size: no further than this byte.
        end: the position after the last frame before it.
        start: where a frame begins that is not after the wanted position.
    """

    segment: JournalSegment
    size: int
    end: Position
    start: int


class JournalSegments:
    """The segments of one folder, the oldest first. Any thread may call it; no lock is held over I/O.

    Attributes:
        used_bytes: what they take, with what was cut from them.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._guard = threading.Lock()
        self._all: list[JournalSegment] = []

    @property
    def last(self) -> JournalSegment | None:
        """The newest."""
        return self._all[-1] if self._all else None

    @property
    def end(self) -> Position:
        """The position after the last frame of all."""
        return self._all[-1].end if self._all else ORIGIN

    def __contains__(self, segment: object) -> bool:
        with self._guard:
            return segment in self._all

    def all(self) -> list[JournalSegment]:
        """All of them, as of now."""
        with self._guard:
            return list(self._all)

    def of_epoch(self, epoch: Epoch) -> list[tuple[JournalSegment, int]]:
        """Those of one epoch, each with its size as of now."""
        with self._guard:
            return [(segment, segment.size) for segment in self._all if segment.epoch == epoch]

    def readable_at(self, position: Position) -> Readable | None:
        """Where the first frame lies that ends after a position; None: there is none yet."""
        with self._guard:
            index = bisect_right(self._all, position, key=lambda segment: segment.end)
            if index == len(self._all):
                return None
            segment = self._all[index]
            start = segment.start_before(position.offset) if segment.epoch == position.epoch else 0
            return Readable(segment, segment.size, segment.end, start)

    def add(self, segment: JournalSegment) -> None:
        """Add a segment at the end. An empty one of the same name is the same file, and gives way."""
        with self._guard:
            if self._all and self._all[-1].path == segment.path:  # all of it was cut off when the folder was opened
                gone = self._all.pop()
                segment.damaged_bytes = gone.damaged_bytes
                self.used_bytes -= gone.damaged_bytes
            self._all.append(segment)
            self.used_bytes += segment.size + segment.damaged_bytes

    def grow(self, segment: JournalSegment, frames: Sequence[FrameBytes]) -> None:
        """Count frames that were written at the end of a segment."""
        with self._guard:
            before = segment.size
            for frame in frames:
                segment.add(frame.first_offset, frame.next_offset, len(frame.data))
            self.used_bytes += segment.size - before

    def replace_last(self, segments: Sequence[JournalSegment]) -> None:
        """Put others in the place of the newest, whose damaged part stays counted."""
        with self._guard:
            gone = self._all.pop()
            self._all.extend(segments)
            self.used_bytes += sum(segment.size for segment in segments) - gone.size

    def count_before(self, position: Position, *, keeps_last: bool) -> int:
        """How many of the oldest end at or before a position.

        Args:
            keeps_last: never count the newest.
        """
        with self._guard:
            most = len(self._all) - keeps_last
            count = 0
            while count < most and self._all[count].end <= position:
                count += 1
            return count

    def take(self, count: int) -> list[JournalSegment]:
        """Remove the oldest; gives them."""
        with self._guard:
            gone, self._all = self._all[:count], self._all[count:]
            self.used_bytes -= sum(segment.size + segment.damaged_bytes for segment in gone)
        return gone


def segment_files(folder: Path, suffix: str = SEGMENT_SUFFIX) -> list[tuple[Epoch, Offset, Path]]:
    """The segments of a journal folder, in order; with KEPT_SUFFIX its history.

    Raises JournalError: a file's name is not a segment's.
    """
    found = []
    for path in folder.glob(f"*{suffix}"):
        epoch, _, offset = path.stem.partition("-")
        if not (epoch.isdigit() and offset.isdigit()):
            raise JournalError(f"{path} is not named <epoch>-<offset>{suffix}; move it out of the journal folder")
        found.append((Epoch(int(epoch)), Offset(int(offset)), path))
    return sorted(found)


def segment_path(folder: Path, epoch: Epoch, first_offset: Offset) -> Path:
    """The file of a segment."""
    return folder / f"{epoch:010d}-{first_offset:020d}{SEGMENT_SUFFIX}"


def scan_file(
    path: Path, size: int | None, backend: Backend
) -> Iterator[tuple[int, list[ScannedFrame], bytes, FrameError | None]]:
    """A file's good frames, piece by piece: where the piece begins, its frames (placed in it), its bytes, and after the
    last one why reading ended before the end.

    Args:
        size: read only so far; None for all.
    """
    with open(path, "rb", buffering=0, opener=opener) as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        at, window = 0, _WINDOW_BYTES
        while at < size:
            data = os.pread(file.fileno(), min(window, size - at), at)
            frames, error = backend.scan_frames(data)
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
