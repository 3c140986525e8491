"""Reads a journal's frames in order, for its publisher. It waits for no write and no sync."""

from __future__ import annotations

import os
import threading
from io import FileIO

from kvbm.core.codec import FrameBytes, FrameHeader, decode_header
from kvbm.core.errors import FrameError
from kvbm.core.ids import Offset
from kvbm.files import opener
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Position
from kvbm.streams.journal.segments import JournalSegment, JournalSegments

log = SafeLog()

_READ_BYTES = 256 << 10
_MOST_HEADER_BYTES = 48 + 255  # with the longest name


class JournalReader:
    """Reads frames from a position on, and remembers where the last call ended. Any thread may call it."""

    def __init__(self, segments: JournalSegments) -> None:
        self._segments = segments
        self._reading = threading.Lock()
        self._last: _SegmentReader | None = None  # where the last reading ended

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """See `FrameLog.read_after`. Reading on where the last call ended costs no search.

        A frame whose header the device has damaged since is left out, with a warning, and so is what follows it up to
        the next known place: to readers of the stream that is a gap like any other.

        Raises: OSError: the device does not read.
        """
        found: list[FrameBytes] = []
        room = limit_bytes
        with self._reading:
            while True:
                readable = self._segments.readable_at(position)
                if readable is None:
                    return found
                reader = self._reader_of_locked(readable.segment, position, readable.start)
                if reader is not None:
                    more, is_full = reader.read(readable.size, room, not found)
                    found += more
                    room -= sum(len(frame.data) for frame in more)
                    if is_full:
                        return found
                position = readable.end

    def _reader_of_locked(self, segment: JournalSegment, position: Position, start: int) -> _SegmentReader | None:
        """The reader that stands there, or a new one; None when the file is gone. Raises OSError."""
        reader = self._last
        offset = position.offset if position.epoch == segment.epoch else Offset(0)
        if reader is not None and reader.segment is segment and reader.offset == offset:
            return reader
        if reader is not None:
            reader.file.close()
            self._last = None
        try:
            file = open(segment.path, "rb", buffering=0, opener=opener)  # noqa: SIM115 - kept for the next call
        except FileNotFoundError:
            if segment in self._segments:  # else it was let go just now
                log.warning("journal.segment_missing", segment=str(segment.path), remedy="leave the folder alone")
            return None
        self._last = _SegmentReader(segment, file, offset, start)
        return self._last

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._reading:
            if self._last is not None:
                self._last.file.close()

    def disown(self) -> None:
        """This process is a forked child: a thread that is not here may hold the lock."""
        self._reading = threading.Lock()


class _SegmentReader:
    """Reads a segment's frames one after another, through a buffer.

    Attributes:
        offset: everything before it was read, or was not asked for.
    """

    def __init__(self, segment: JournalSegment, file: FileIO, offset: Offset, start: int) -> None:
        self.segment = segment
        self.file = file
        self.offset = offset
        self._at = start
        self._data = b""
        self._data_at = 0

    def read(self, size: int, room: int, at_least_one: bool) -> tuple[list[FrameBytes], bool]:
        """The next frames before byte `size` that fit, and whether one was left because it does not. Raises OSError."""
        found: list[FrameBytes] = []
        while self._at < size:
            header = self._header(size)
            if header is None:
                skipped = self.segment.start_after(self._at) or size
                log.warning(
                    "journal.frame_damaged",
                    segment=str(self.segment.path),
                    at=self._at,
                    left_out=skipped - self._at,
                    remedy="the device changes what it keeps; replace it",
                )
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
