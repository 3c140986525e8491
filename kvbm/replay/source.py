"""Frames as a source gives them, and where each lies; and the source over files. live.py is the one over a stream,
opening.py finds them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

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
CHECKED_BYTES = 64 << 10

_WINDOW_BYTES = 1 << 20


class SourceError(KvbmError):
    """Input that cannot be used at all; the message names it and what would do. A retry does not help."""


class SourceChangedError(SourceError):
    """A source is not any more what it was when it was read up to a place; a reader begins anew."""


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


class FileReached(msgspec.Struct, frozen=True, kw_only=True):
    """How far a file was read.

    Attributes:
        name: with what its source has of several such, without its suffix: a segment of a journal gets another one.
        bytes: from its beginning.
        crc32: of the last of these, as many as `CHECKED_BYTES`.
    """

    name: str
    bytes: int
    crc32: int


class SourceFile(NamedTuple):
    """One file of frames.

    Attributes:
        may_tear: it is the last of a journal, so a manager may be writing to its end; or one of an archive, whose
            writer begins another file after it was cut off and reads again what it had not written.
    """

    path: Path
    group: str
    may_tear: bool

    @property
    def key(self) -> str:
        """As `FileReached.name`."""
        return f"{self.group}/{self.path.with_suffix('').name}"


class FileSource:
    """Files of whole frames: a `FrameSource`. Nothing is locked or changed, and a manager or catalog may go on writing.

    Args:
        is_trimmed: it is a journal or an archive: files may go from its beginning, now and while it is read.
        settled: gives the last file that its writer will not write again, and how many bytes of it; None: all is
            settled.

    Attributes:
        reached: of `read_on`, how far it has come. order: as in `Located`, of what comes next.
        unsettled: what it has found behind that.
    """

    def __init__(
        self,
        name: str,
        files: list[SourceFile],
        is_trimmed: bool,
        settled: Callable[[], tuple[str, int] | None] = lambda: None,
    ) -> None:
        self.name = name
        self.reached: list[FileReached] = []
        self.order = 0
        self.unsettled: list[Located] = []
        self._settled = settled
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
        self._check_frames(before, frames)

    def read_on(
        self, backend: Backend, reached: Sequence[FileReached] = (), order: int = 0, beyond: bool = True
    ) -> Iterator[Located]:
        """What lies behind a place, up to where nothing is written again: a torn end, and what a writer may cut off, is
        in `unsettled`.

        Args:
            reached, order: as the attributes of one who has read before.
            beyond: whether to look for what is not settled.
        Raises: SourceError. SourceChangedError: what was read before is not there any more, or something else is.
        """
        before = {one.name: one for one in reached}
        self._check_order(before)
        self.reached, self.order, self.unsettled = list(reached), order, []
        settled = self._settled()
        frames = read = 0
        last = {file.group: file.key for file in self._files}
        last_known = {file.group: file.key for file in self._files if file.key in before}
        for file in self._files:
            known = before.get(file.key)
            try:
                handle = _opened(file.path)
            except FileNotFoundError:
                if not self.is_trimmed:
                    raise SourceError(f"{file.path} does not exist") from None
                continue
            except OSError as error:
                raise SourceError(f"{file.path} cannot be read ({error.strerror})") from None
            try:
                size = os.fstat(handle).st_size
                read += size
                begin = 0 if known is None else known.bytes
                is_checked = size < begin or last_known.get(file.group) == file.key
                if known is not None and is_checked and _checksum(handle, begin) != known.crc32:
                    raise SourceChangedError(f"{file.path} is not what it was when it was read before")
                end = size if settled is None or file.path.name < settled[0] else 0
                if settled is not None and file.path.name == settled[0]:
                    end = min(size, settled[1])
                at = begin
                for piece in _from(handle, begin, size if beyond else max(begin, end), backend):
                    piece_end = piece.at + _size_of(piece)
                    located = self._located(file, piece, self.order)
                    is_torn = isinstance(piece.found, Damage) and piece_end == size and last[file.group] == file.key
                    if piece_end > end or is_torn or self.unsettled_in(file.group):
                        if beyond:
                            self.unsettled.append(located)
                        continue
                    yield located
                    at = piece_end
                    self.order += 1
                    frames += bool(piece.data)
                    self.done = read - size + at
                crc32 = known.crc32 if known is not None and known.bytes == at else _checksum(handle, at)
                self._set_reached(file.key, at, crc32)
            finally:
                os.close(handle)
        if not reached and not self.unsettled:
            self._check_frames(read, frames)

    def unsettled_in(self, group: str) -> bool:
        """Whether something of a group is unsettled; so is all behind it."""
        return any(one.group == group for one in self.unsettled)

    def _check_order(self, before: dict[str, FileReached]) -> None:
        """Raises SourceChangedError: this is another source, or has files before those that were read."""
        keys = [file.key for file in self._files]
        if before and not any(key in before for key in keys):
            raise SourceChangedError(f"{self.name} has no file of those that were read before")
        unknown: set[str] = set()
        for file in self._files:
            if file.key not in before:
                unknown.add(file.group)
            elif file.group in unknown:
                raise SourceChangedError(f"{self.name} has a file before {file.path.name} that was not there before")

    def _set_reached(self, key: str, size: int, crc32: int) -> None:
        self.reached = [one for one in self.reached if one.name != key]
        self.reached.append(FileReached(name=key, bytes=size, crc32=crc32))

    def _check_frames(self, size: int, frames: int) -> None:
        if not size:
            raise SourceError(f"{self.name} is empty: it holds no frame")
        if not frames and not self._has_magic():
            raise SourceError(
                f"{self.name} is not a capture, archive or journal of kvbm: no frame begins in its {size:,} bytes"
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


def _from(handle: int, begin: int, end: int, backend: Backend) -> Iterator[Piece]:
    """What a file holds in [begin, end)."""
    for piece in scan(
        _Window(handle, begin).read, end - begin, backend, lambda at: next_data(handle, begin + at) - begin
    ):
        yield piece._replace(at=begin + piece.at)


def _size_of(piece: Piece) -> int:
    return piece.found.size if isinstance(piece.found, Damage) else len(piece.data)


def _checksum(handle: int, end: int) -> int:
    """Of the last bytes before a place. Raises OSError."""
    first = max(0, end - CHECKED_BYTES)
    return zlib.crc32(os.pread(handle, end - first, first))


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

    def __init__(self, handle: int, begin: int = 0) -> None:
        self._handle, self._begin = handle, begin
        self._at = 0
        self._data = b""

    def read(self, at: int, size: int) -> bytes:
        """`size` bytes from `at` on; fewer at the end of the file."""
        if not self._at <= at <= at + size <= self._at + len(self._data):
            self._at, self._data = at, os.pread(self._handle, max(size, _WINDOW_BYTES), self._begin + at)
        return self._data[at - self._at : at - self._at + size]


def only(located: Iterable[Located], instance: str | None) -> Iterator[Located]:
    """The frames of one instance, or of all. Damage stays: nobody knows whose it is."""
    if instance is None:
        return iter(located)
    return (one for one in located if isinstance(one.found, Damage) or one.found.instance == instance)
