"""What a folder with a history says of it, and whether all of its files are there."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvbm.replay.findings import ReplayFinding
from kvbm.replay.format import counted
from kvbm.replay.source import FileReached, SourceError

VERSION = 2
MANIFEST = "history.json"
UNDONE = f".{MANIFEST}."  # begins the name of one that was being put in its place
DATA = "data-"
_PIECE_BYTES = 1 << 20
T = TypeVar("T")


class HistoryFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file below the data's folder."""

    name: str
    bytes: int
    crc32: int


class HistoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Stays that have ended, which nothing changes any more, and what began and ended in tiers.

    Attributes:
        stays: files in the order of blocks. counts, marks: as `history_counts.py` says; none where nothing did.
        rows: of all of them, for choosing which runs become one.
    """

    stays: list[HistoryFile] = []
    counts: HistoryFile | None = None
    marks: HistoryFile | None = None
    rows: int = 0

    def files(self) -> list[HistoryFile]:
        """All of them."""
        return [*self.stays, *(one for one in (self.counts, self.marks) if one is not None)]


class HistoryTail(msgspec.Struct, frozen=True, kw_only=True):
    """What is written anew each time.

    Attributes:
        stays: those that last, and what an end of the log there would mean. counts: of those alone that are not in a
            run's.
        state: where reading goes on from.
    """

    stays: list[HistoryFile] = []
    counts: HistoryFile | None = None
    instances: HistoryFile | None = None
    namespaces: HistoryFile | None = None
    holes: HistoryFile | None = None
    state: HistoryFile | None = None

    def files(self) -> list[HistoryFile]:
        """All of them."""
        rest = (self.counts, self.instances, self.namespaces, self.holes, self.state)
        return [*self.stays, *(one for one in rest if one is not None)]


class Retired(msgspec.Struct, frozen=True, kw_only=True):
    """Files that are needed no more, and since when, as Unix time: who has the history open may still read them."""

    names: list[str]
    at_s: float


class HistoryManifest(msgspec.Struct, kw_only=True):
    """What was written.

    Attributes:
        source: as the user gave it. instance: the only one it is of; "" for all.
        version: of the files.
        data: the folder they are in, below the one given. before: that of the history this one has taken the place of.
        serial: of the writings; names of files begin with it.
        begin, until: the earliest and the latest time in it, ISO 8601; "" where there is none. built: when it was
            written, by this machine's clock.
        stays: rows of residencies, those that last and claims among them. lasting: of those.
        bytes: of the files.
        lives: instance, stream and life by the number that counts have for them.
        reached: of the files it was made of. order: how much was read of them. unsettled: how much lay behind that, and
            is in the tail.
    """

    source: str
    instance: str = ""
    version: int = VERSION
    data: str = ""
    before: str = ""
    serial: int = 0
    begin: str = ""
    until: str = ""
    built: str = ""
    stays: int = 0
    lasting: int = 0
    instances: int = 0
    namespaces: int = 0
    holes: int = 0
    bytes: int = 0
    findings: list[ReplayFinding] = []
    notes: list[str] = []
    lives: list[tuple[str, str, int]] = []
    runs: list[HistoryRun] = []
    tail: HistoryTail = HistoryTail()
    reached: list[FileReached] = []
    order: int = 0
    unsettled: int = 0
    retired: list[Retired] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"history: {counted(self.stays, 'stay')} of blocks, {self.lasting:,} of which last, in "
            f"{counted(self.instances, 'epoch')} of instances, {counted(self.holes, 'hole')}, "
            f"{counted(self.bytes, 'byte')}; up to {self.until or 'nothing'}"
        )

    def files(self) -> list[HistoryFile]:
        """All files that it has."""
        return [*(file for run in self.runs for file in run.files()), *self.tail.files()]


class _Version(msgspec.Struct):
    version: int


def read_manifest(folder: Path) -> HistoryManifest:
    """What a folder's history is of. Raises SourceError: there is none, or of another version."""
    try:
        data = (folder / MANIFEST).read_bytes()
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            whose = "a newer" if version > VERSION else "an older"
            raise SourceError(f"{folder} was made by {whose} kvbm (history {version}, not {VERSION}); make it anew")
        found = msgspec.json.decode(data, type=HistoryManifest)
        names = [found.data, *(file.name for file in found.files())]
        if not found.data.startswith(DATA) or any(Path(name).name != name for name in names):
            raise SourceError(f"{folder / MANIFEST} names no folder of a history; make the history anew")
        return found
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{folder} has no history: make one with kvbm-replay history SOURCE {folder}") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SourceError(f"{folder / MANIFEST} cannot be read ({error}); make the history anew") from None


def check_files(folder: Path, history: HistoryManifest, reads_all: bool = False) -> None:
    """Raises SourceError: a file is not there, or another one.

    Args:
        reads_all: compare checksums too, not sizes alone.
    """
    for file in history.files():
        path = folder / history.data / file.name
        try:
            size = path.stat().st_size
            is_same = size == file.bytes and (not reads_all or checksum_of(path) == file.crc32)
        except OSError as error:
            raise SourceError(f"{path} cannot be read ({error.strerror}); make the history anew") from None
        if not is_same:
            why = f"has {size:,} bytes, not {file.bytes:,}" if size != file.bytes else "is damaged"
            raise SourceError(f"{path} {why}; make the history anew")


def checksum_of(path: Path) -> int:
    """CRC-32 of a file. Raises OSError."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def written(path: Path) -> HistoryFile:
    """A file that was just written, brought to the device. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    return HistoryFile(name=path.name, bytes=size, crc32=checksum_of(path))
