"""Frames as a source gives them, and where each lies; and the source over files. live.py is the one over a stream,
opening.py finds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbm.core.backend import Backend
from kvbm.core.codec import MAGIC, ScannedFrame
from kvbm.core.errors import KvbmError
from kvbm.files import data_pieces, next_data, open_plain
from kvbm.replay.scan import CORRUPT, TORN, Damage, Piece, scan
from kvbm.streams.fence_records import FenceRecord
from kvbm.streams.journal.history import KEPT_SUFFIX
from kvbm.streams.journal.segments import SEGMENT_SUFFIX

TRUNCATED = "truncated-capture"
ARCHIVE_SUFFIX = ".kvbm"

_WINDOW_BYTES = 1 << 20


class SourceError(KvbmError):
    """Input that cannot be used at all; the message names it and what would do. A retry does not help."""


class FramePlace(NamedTuple):
    """Where a frame lies.

    Attributes:
        source: the file, or the server.
        sequence: of the message in the stream; None in a file.
        at: byte in the file or the message.
    """

    source: str
    sequence: int | None
    at: int

    def __str__(self) -> str:
        where = self.source if self.sequence is None else f"stream sequence {self.sequence}"
        return f"{where} byte {self.at:,}"


class Located(NamedTuple):
    """A frame, a fence, or damage, and where it lies.

    Attributes:
        data: the frame's bytes; empty for damage and fences.
        group: what differs for two instances of one name: the journal's folder, or the stream's subject without the
            instance.
        order: the place among all that was read, from 0.
    """

    found: ScannedFrame | Damage | FenceRecord
    place: FramePlace
    data: bytes
    group: str
    order: int


class FrameSource(Protocol):
    """Frames in the order they lie.

    Attributes:
        name: as the user gave it, without passwords.
        is_trimmed: whether its beginning may have been let go, so that starting late is no defect.
        total, done: how much there is and was read, in bytes or messages, once reading has begun.
    """

    name: str
    is_trimmed: bool
    total: int
    done: int

    def read(self, backend: Backend) -> Iterator[Located]:
        """All frames, fences and damage, once. Raises SourceError, JournalError, StreamError."""


class SourceFile(NamedTuple):
    """One file of frames.

    Attributes:
        may_tear: it is the last of a journal, so a manager may be writing to its end; or one of an archive, whose
            writer begins another file after it was cut off and reads again what it had not written.
    """

    path: Path
    group: str
    may_tear: bool


class FileSource:
    """Files of whole frames: a `FrameSource`. Nothing is locked or changed, and a manager or catalog may go on writing.

    Args:
        is_trimmed: it is a journal or an archive: files may go from its beginning, now and while it is read.
    """

    def __init__(self, name: str, files: list[SourceFile], is_trimmed: bool) -> None:
        self.name = name
        self.is_trimmed = is_trimmed
        self.total = 0
        self.done = 0
        self._files = files

    def read(self, backend: Backend) -> Iterator[Located]:
        """See `FrameSource.read`."""
        order = before = frames = 0
        for file in self._files:
            try:
                handle = _opened(file.path)
            except FileNotFoundError:
                if not self.is_trimmed:
                    raise SourceError(f"{file.path} does not exist") from None
                continue  # it was let go since the folder was listed
            except OSError as error:
                raise SourceError(f"{file.path} cannot be read ({error.strerror})") from None
            try:
                size = os.fstat(handle).st_size
                self.total = max(self.total, before + size)
                for piece in scan(_Window(handle).read, size, backend, partial(next_data, handle)):
                    self.done = before + piece.at
                    frames += bool(piece.data)  # or fences
                    yield self._located(file, piece, order)
                    order += 1
            finally:
                os.close(handle)
            before += size
        self.done = before
        if not before:
            raise SourceError(f"{self.name} is empty: it holds no frame")
        if not frames and not self._has_magic():
            raise SourceError(
                f"{self.name} is not a capture, archive or journal of kvbm: no frame begins in its {before:,} bytes"
            )

    def _located(self, file: SourceFile, piece: Piece, order: int) -> Located:
        found = piece.found
        if isinstance(found, Damage) and found.kind == TORN and not file.may_tear:
            found = found._replace(kind=CORRUPT if self.is_trimmed else TRUNCATED)
        data = b"" if isinstance(found, FenceRecord) else piece.data
        return Located(found, FramePlace(str(file.path), None, piece.at), data, file.group, order)

    def _has_magic(self) -> bool:
        return any(_holds_magic(file.path) for file in self._files if file.path.exists())


def _holds_magic(path: Path) -> bool:
    handle = open_plain(path, follows=True)
    try:
        before, before_end = b"", 0  # the magic may lie across two pieces
        for at, data in data_pieces(handle):
            if MAGIC in (before if at == before_end else b"") + data:
                return True
            before, before_end = data[1 - len(MAGIC) :], at + len(data)
        return False
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    """A file, also when it has become history since its folder was listed. Raises OSError."""
    try:
        return open_plain(path, follows=True)
    except FileNotFoundError:
        if path.suffix != SEGMENT_SUFFIX:
            raise
        return open_plain(path.with_suffix(KEPT_SUFFIX), follows=True)


class _Window:
    """Reads a file by position, through one buffer."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._at = 0
        self._data = b""

    def read(self, at: int, size: int) -> bytes:
        """`size` bytes from `at` on; fewer at the end of the file."""
        if not self._at <= at <= at + size <= self._at + len(self._data):
            self._at, self._data = at, os.pread(self._handle, max(size, _WINDOW_BYTES), at)
        return self._data[at - self._at : at - self._at + size]


def only(located: Iterable[Located], instance: str | None) -> Iterator[Located]:
    """The frames of one instance, or of all. Damage stays: nobody knows whose it is."""
    if instance is None:
        return iter(located)
    return (one for one in located if isinstance(one.found, Damage) or one.found.instance == instance)
