"""An instance's own file of its events: whole frames one after another, in segments named by epoch and first offset.

    LOCK                                   held by the one manager that writes here
    EPOCH                                  JSON: instance, the epoch last begun (only grows), and with which durable pool
    0000000003-00000000000000000000.kvbj   segment: epoch 3 from offset 0
    0000000003-00000000000000004711.kvbj   the next segment of that epoch

Opening cuts a torn or damaged tail at the last whole frame and keeps what was cut beside the segment as `.damaged`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import structlog

from kvbm.core.codec import VERSION, Frame, FrameBytes
from kvbm.core.errors import FrameError, JournalError, NewerFrameError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.core.kernels import Kernels
from kvbm.streams.base import Position

log = structlog.get_logger()

SEGMENT_SUFFIX = ".kvbj"
FSYNC_MODES = ("off", "interval", "always")
SYNC_INTERVAL_S = 1.0


class _EpochFile(msgspec.Struct, frozen=True):
    """What the file EPOCH says.

    Attributes:
        pool_id: name of the durable pool the epoch began with, "" for none.
        pool_since: the first epoch that began with this pool; what older epochs say of slots is about another one.
    """

    instance: str
    epoch: int = 0
    pool_id: str = ""
    pool_since: int = 0


class _Entry(NamedTuple):
    """Where one frame lies in its segment."""

    first_offset: Offset
    next_offset: Offset
    at: int
    size: int


class Segment:
    """One file of consecutive frames of one epoch, and where each begins."""

    def __init__(self, path: Path, epoch: Epoch, first_offset: Offset) -> None:
        self.path = path
        self.epoch = epoch
        self.first_offset = first_offset
        self.entries: list[_Entry] = []
        self.size = 0

    @property
    def damaged_path(self) -> Path:
        """Where what was cut from it is kept; the file is there if anything ever was."""
        return self.path.with_suffix(".damaged")

    @property
    def next_offset(self) -> Offset:
        """The offset after the last frame."""
        return self.entries[-1].next_offset if self.entries else self.first_offset


def segment_files(folder: Path) -> list[tuple[Epoch, Offset, Path]]:
    """The segments of a journal folder, in order. Raises JournalError: a file's name is not a segment's."""
    found = []
    for path in folder.glob(f"*{SEGMENT_SUFFIX}"):
        epoch, _, offset = path.stem.partition("-")
        if not (epoch.isdigit() and offset.isdigit()):
            raise JournalError(
                f"{path} is not named <epoch>-<offset>{SEGMENT_SUFFIX}; move it out of the journal folder"
            )
        found.append((Epoch(int(epoch)), Offset(int(offset)), path))
    return sorted(found)


class Journal:
    """The journal of one instance; a `FrameLog`. Any thread may call it.

    Args:
        fsync: "off" survives a killed process, "always" a power cut as well; "interval" syncs as it closes a segment and at
            most once a second, by the append that finds the last time longer ago.
        segment_bytes: a segment is closed once it is this large.
    """

    def __init__(
        self, folder: Path, instance: InstanceId, kernels: Kernels, fsync: str, segment_bytes: int, lock_file: BinaryIO
    ) -> None:
        self.folder = folder
        self.instance = instance
        self._kernels = kernels
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._lock_file = lock_file
        self._guard = threading.Lock()
        self._segments: list[Segment] = []
        self._writer: BinaryIO | None = None
        self._torn = False  # bytes of a refused frame may lie behind the last whole one
        self._closed = False
        self._synced_s = 0.0
        self._begun = _EpochFile(instance)
        self.epoch = Epoch(0)

    @classmethod
    def open(
        cls, folder: Path, instance: InstanceId, kernels: Kernels, fsync: str = "off", segment_bytes: int = 64 << 20
    ) -> Journal:
        """Lock the folder and repair its tail.

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
        journal = cls(folder, instance, kernels, fsync, segment_bytes, lock_file)
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

    def _load(self) -> None:
        self._begun = self._read_begun()
        self.epoch = Epoch(self._begun.epoch)
        for epoch, first, path in segment_files(self.folder):
            self._segments.append(self._scan(Segment(path, epoch, first)))
            self.epoch = max(self.epoch, epoch)

    @property
    def pool_id(self) -> str:
        """The durable pool the last epoch began with, "" for none."""
        return self._begun.pool_id

    def epochs_of_pool(self) -> list[Epoch]:
        """The epochs that began with `pool_id`, the newest first, whether frames of them are here or not."""
        older = {segment.epoch for segment in self._segments if segment.epoch >= self._begun.pool_since}
        return sorted(older | {self.epoch}, reverse=True) if self.pool_id else []

    def was_cut(self, epoch: Epoch) -> bool:
        """Whether anything of an epoch was ever cut off."""
        return any(segment.damaged_path.exists() for segment in self._segments if segment.epoch == epoch)

    def _read_begun(self) -> _EpochFile:
        path = self.folder / "EPOCH"
        if not path.exists():
            return _EpochFile(self.instance)
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_EpochFile)
        except msgspec.MsgspecError as error:
            raise JournalError(f"{path} does not decode ({error}); restore it or start with an empty folder") from None
        if stored.instance != self.instance:
            raise JournalError(
                f"journal folder {self.folder} belongs to instance {stored.instance!r}, not {self.instance!r}; "
                "give each instance its own folder"
            )
        return stored

    def _scan(self, segment: Segment) -> Segment:
        data = segment.path.read_bytes()
        at = 0
        while at < len(data):
            try:
                frame, end = self._kernels.decode_frame(data, at)
            except NewerFrameError as error:
                raise JournalError(
                    f"{segment.path} was written by a newer kvbm (frame version {error.version}, this one reads up to "
                    f"{VERSION}); upgrade kvbm or use another folder"
                ) from None
            except FrameError as error:
                self._cut(segment, data, at, error)
                break
            segment.entries.append(_Entry(frame.first_offset, frame.next_offset, at, end - at))
            at = end
        segment.size = at
        return segment

    def _cut(self, segment: Segment, data: bytes, at: int, error: FrameError) -> None:
        damaged = segment.damaged_path
        damaged.write_bytes(data[at:])
        os.truncate(segment.path, at)
        log.warning(
            "journal.tail_cut", segment=str(segment.path), at=at, cut_bytes=len(data) - at, kept_as=str(damaged),
            why=error.detail,
        )  # fmt: skip

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, pool_id: str = "") -> None:
        """Persist that an epoch has begun, before any of its events.

        Args:
            pool_id: name of the durable pool whose slots its events will speak of, "" for none.
        Raises: JournalError: it is not newer, or no room.
        """
        if epoch <= self.epoch:
            raise JournalError(f"epoch {epoch} is not newer than epoch {self.epoch} of {self.folder}")
        since = self._begun.pool_since if pool_id == self._begun.pool_id else epoch
        begun = _EpochFile(self.instance, epoch, pool_id, since)
        temporary = self.folder / "EPOCH.new"
        try:
            with open(temporary, "wb") as file:
                file.write(msgspec.json.encode(begun))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / "EPOCH")
        except OSError as error:
            raise JournalError(
                f"{temporary} cannot be written ({error.strerror}); make room or choose another folder"
            ) from None
        with self._guard:
            self._begun, self.epoch = begun, epoch
            self._close_writer()

    def append(self, frame: FrameBytes) -> None:
        """Write one whole frame; when it returns the frame is durable as far as `fsync` promises.

        Raises: OSError: the device refused, or the journal is closed; nothing of the frame counts then, and it may be tried
            again.
        """
        with self._guard:
            if self._closed:
                raise OSError(errno.EBADF, f"journal folder {self.folder} is closed")
            writer = self._writer
            if self._torn and writer is not None:
                os.ftruncate(writer.fileno(), self._segments[-1].size)
                self._torn = False
            if writer is None or self._segments[-1].size >= self._segment_bytes:
                writer = self._open_segment(frame)
            segment = self._segments[-1]
            self._torn = True  # until the whole frame is there
            view = memoryview(frame.data)
            while view:
                view = view[writer.write(view) :]
            if self._fsync == "always" or (
                self._fsync == "interval" and time.monotonic() - self._synced_s >= SYNC_INTERVAL_S
            ):
                os.fsync(writer.fileno())
                self._synced_s = time.monotonic()
            self._torn = False
            segment.entries.append(_Entry(frame.first_offset, frame.next_offset, segment.size, len(frame.data)))
            segment.size += len(frame.data)

    def _open_segment(self, frame: FrameBytes) -> BinaryIO:
        self._close_writer()
        path = self.folder / f"{frame.epoch:010d}-{frame.first_offset:020d}{SEGMENT_SUFFIX}"
        writer = open(path, "ab", buffering=0)  # noqa: SIM115 - held until the next segment
        self._segments.append(Segment(path, frame.epoch, frame.first_offset))
        self._writer = writer
        return writer

    def sync(self) -> None:
        """Bring what was appended to the device. Raises OSError."""
        with self._guard:
            if self._writer is not None:
                os.fsync(self._writer.fileno())

    def drop_epochs_before(self, epoch: Epoch) -> int:
        """Delete segments of older epochs, which must be published. Returns how many went."""
        with self._guard:
            gone = [segment for segment in self._segments if segment.epoch < epoch]
            self._segments = [segment for segment in self._segments if segment.epoch >= epoch]
        for segment in gone:
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:  # the next start finds it and drops it again
                log.warning("journal.segment_kept", segment=str(segment.path), why=str(error))
        return len(gone)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """See `FrameLog.read_after`."""
        found: list[FrameBytes] = []
        room = limit_bytes
        with self._guard:
            for segment in self._segments:
                if Position(segment.epoch, segment.next_offset) <= position:
                    continue
                offset = position.offset if segment.epoch == position.epoch else Offset(0)
                start = bisect_right(segment.entries, offset, key=lambda entry: entry.next_offset)
                with open(segment.path, "rb") as file:
                    for entry in segment.entries[start:]:
                        if found and entry.size > room:
                            return found
                        file.seek(entry.at)
                        data = file.read(entry.size)
                        found.append(FrameBytes(segment.epoch, entry.first_offset, entry.next_offset, data))
                        room -= entry.size
        return found

    def frames(self, epoch: Epoch) -> Iterator[Frame]:
        """The frames of one epoch, decoded, in order. Raises FrameError: the file has changed since it was opened."""
        with self._guard:
            paths = [(segment.path, segment.size) for segment in self._segments if segment.epoch == epoch]
        for path, size in paths:
            data = path.read_bytes()[:size]
            at = 0
            while at < len(data):
                frame, at = self._kernels.decode_frame(data, at)
                yield frame

    def close(self) -> None:
        """Close the files and unlock the folder. Idempotent."""
        with self._guard:
            self._closed = True
            self._close_writer()
            self._lock_file.close()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            if self._torn:
                os.ftruncate(writer.fileno(), self._segments[-1].size)
                self._torn = False
            if self._fsync != "off":
                os.fsync(writer.fileno())
        except OSError as error:  # a torn tail is cut when the folder is opened again
            log.warning("journal.segment_unsynced", segment=str(self._segments[-1].path), why=str(error))
        finally:
            writer.close()
