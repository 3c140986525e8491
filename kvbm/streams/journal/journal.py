"""An instance's own file of its events: whole frames one after another, in segments named by epoch and first offset.

    LOCK                                   held by the one manager that writes here
    EPOCH                                  the epoch last begun (only grows), and with which durable pool:
                                           `streams/journal/epoch_file.py`
    0000000003-00000000000000000000.kvbj   segment: epoch 3 from offset 0
    0000000003-00000000000000004711.kvbj   the next segment of that epoch
    0000000002-00000000000000000000.kept   history: a segment nobody needs any more, see `streams/journal/history.py`

Opening cuts a torn or damaged tail at the last whole frame and keeps what was cut beside the segment as `.damaged`.
Frames behind damage in the middle of an epoch stay: they are good, but no longer follow what is before them.
"""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from kvbm.core.backend import Backend
from kvbm.core.codec import FrameBytes, ScannedFrame
from kvbm.core.errors import JournalError
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.files import make_folder, opener, warn_exposed
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Position
from kvbm.streams.journal.disk import DiskWriter, OsDevice, write_file
from kvbm.streams.journal.epoch_file import EPOCH_FILE, EpochRecord, read_begun
from kvbm.streams.journal.history import DAMAGED_SUFFIX, KEPT_SUFFIX, History
from kvbm.streams.journal.reader import JournalReader
from kvbm.streams.journal.repair import load_segments
from kvbm.streams.journal.segments import SEGMENT_SUFFIX, JournalSegments, scan_file, segment_files
from kvbm.streams.journal.writer import FSYNC_MODES, FullError, JournalOptions, SegmentWriter, least_capacity

log = SafeLog()

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


class Journal:
    """The journal of one instance; a `FrameLog`. Any thread may call it; readers wait for no write and no sync.

    Args:
        lock_file: locked; closed with the journal.
        clock: seconds that only grow.
        run: of this process, as in `Fence.run`.

    Attributes:
        epoch: the newest that has begun here.
    """

    def __init__(
        self,
        folder: Path,
        instance: InstanceId,
        backend: Backend,
        lock_file: BinaryIO,
        options: JournalOptions,
        device: DiskWriter,
        clock: Callable[[], float],
        run: str,
    ) -> None:
        self.folder = folder
        self.instance = instance
        self.epoch = Epoch(0)
        self._backend = backend
        self._options = options
        self._device = device
        self._lock_file = lock_file
        self._run = run
        self._writing = threading.RLock()  # taken before every other lock
        self._segments = JournalSegments()
        self._writer = SegmentWriter(folder, self._segments, backend, options, device, clock)
        self._reader = JournalReader(self._segments)
        self._history = History(options.retention, device)
        self._begun = EpochRecord(instance)
        self._is_closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        instance: InstanceId,
        backend: Backend,
        options: JournalOptions = JournalOptions(),  # noqa: B008 - immutable
        device: DiskWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
        run: str = "",
    ) -> Journal:
        """Lock the folder and repair its tail.

        Args:
            run: of this process, as in `Fence.run`; `run_of` tells it of the epochs begun by it.
        Raises: JournalError: another manager has it, it is another instance's, it cannot be written, or it was written
            by a newer kvbm.
        """
        if options.fsync not in FSYNC_MODES:
            raise JournalError(f"journal.fsync is {options.fsync!r}; use one of {', '.join(FSYNC_MODES)}")
        try:
            make_folder(folder)
            lock_file = open(folder / "LOCK", "ab", opener=opener)  # noqa: SIM115 - held until close
        except OSError as error:
            raise JournalError(
                f"journal folder {folder} cannot be written ({error.strerror}); choose another"
            ) from None
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise JournalError(
                f"journal folder {folder} is in use by another manager; give each instance its own folder, or stop the "
                "other"
            ) from None
        warn_exposed("journal", folder)
        journal = cls(folder, instance, backend, lock_file, options, device or OsDevice(), clock, run)
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
    def has_begun(self) -> bool:
        """Whether it knows the last epoch that began, and with which pool: not if it is new, or that was lost."""
        return self._begun.epoch > 0

    @property
    def used_bytes(self) -> int:
        """What its segments take, with what was cut from them; history is not counted."""
        return self._segments.used_bytes

    @property
    def history_bytes(self) -> int:
        """What kept segments take, with what was cut from them."""
        return self._history.used_bytes

    def epochs_of_pool(self) -> list[Epoch]:
        """The epochs that began with `pool_id`, the newest first, whether frames of them are here or not."""
        older = {segment.epoch for segment in self._segments.all() if segment.epoch >= self._begun.pool_since}
        return sorted(older | {self.epoch}, reverse=True) if self.pool_id else []

    def was_cut(self, epoch: Epoch) -> bool:
        """Whether anything of an epoch that is still here was ever cut off."""
        return any(segment.damaged_path.exists() for segment, _ in self._segments.of_epoch(epoch))

    def was_damaged(self, epoch: Epoch) -> bool:
        """Whether more of an epoch that is still here was ever cut off than the frame that a crash leaves
        unfinished.
        """
        return any(segment.is_damaged for segment, _ in self._segments.of_epoch(epoch))

    def _load(self) -> None:
        for unfinished in self.folder.glob("*.new"):
            self._device.remove(unfinished)
        self._begun = read_begun(self.folder, self.instance, self._backend.crc32c)
        kept = segment_files(self.folder, KEPT_SUFFIX)
        self._history.load(path for _, _, path in kept)
        self.epoch = Epoch(max(self._begun.epoch, *(epoch for epoch, _, _ in kept), 0))
        for segment in load_segments(self.folder, self.instance, self._backend):
            self._segments.add(segment)
            self.epoch = max(self.epoch, segment.epoch)
        self._history.trim(self._segments.used_bytes)

    def fit(self, pools: Iterable[PoolStated]) -> int:
        """Make sure that snapshots of these pools fit into it, with a warning where its capacity is raised for that;
        gives the capacity.
        """
        slots = sum(pool.slots for pool in pools)
        capacity_bytes, least_bytes = self._options.capacity_bytes, least_capacity(slots)
        if capacity_bytes >= least_bytes:
            return capacity_bytes
        log.warning(
            "journal.too_small",
            folder=str(self.folder),
            capacity_bytes=capacity_bytes,
            needed_bytes=least_bytes,
            slots=slots,
            effect="it takes what is needed: a snapshot that does not fit into half of it could never end, nor make "
            "room",
            remedy="set journal.capacity_bytes to what is needed",
        )
        with self._writing:
            self._writer.raise_capacity(least_bytes)
        return least_bytes

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, pool_id: str = "", snapshot_end: Offset | None = None) -> None:
        """Persist that an epoch has begun, before any of its events.

        Args:
            pool_id: name of the durable pool whose slots its events will speak of, "" for none.
            snapshot_end: frames that begin before it may exceed the capacity: without its first snapshot an epoch is of
                no use, and the snapshot is what lets older segments go.
        Raises: JournalError: it is not newer, or no room.
        """
        with self._writing:
            if epoch <= self.epoch:
                raise JournalError(f"epoch {epoch} is not newer than epoch {self.epoch} of {self.folder}")
            since = self._begun.pool_since if pool_id == self._begun.pool_id else epoch
            epochs = {segment.epoch for segment in self._segments.all()}
            runs = {begun: self.run_of(begun) for begun in epochs} | {epoch: self._run}
            named = {int(begun): run for begun, run in runs.items() if run}
            begun = EpochRecord(self.instance, epoch, pool_id, since, named)
            data = begun.encoded(self._backend.crc32c)
            try:
                self._with_room_locked(lambda: write_file(self._device, self.folder / EPOCH_FILE, [memoryview(data)]))
            except OSError as error:
                raise JournalError(
                    f"{self.folder / EPOCH_FILE} cannot be written ({error.strerror}); make room or choose another "
                    "folder"
                ) from None
            self._begun, self.epoch = begun, epoch
            self._writer.begin_epoch(epoch, snapshot_end or Offset(0))

    def runs(self) -> dict[Epoch, str]:
        """The epochs here whose beginner is known, and the run of the process that began each, as in `Fence.run`."""
        return {Epoch(epoch): run for epoch, run in self._begun.runs.items()}

    def run_of(self, epoch: Epoch) -> str:
        """The process that began an epoch here, as in `Fence.run`; "" when it is not known."""
        return self._begun.runs.get(epoch, "")

    def roll(self) -> None:
        """Begin a new segment with the next append, as when a snapshot begins: what is before it can then go as a
        whole.
        """
        with self._writing:
            self._writer.roll()

    def let_in(self, until: Position) -> bool:
        """Take frames of an epoch that begin before a position beyond the capacity, as those of its first snapshot;
        whether that is new.
        """
        with self._writing:
            return self._writer.let_in(until)

    def append(self, frame: FrameBytes) -> None:
        """Write one whole frame; when it returns the frame is durable as far as `fsync` promises.

        Raises: OSError: as `append_all`.
        """
        self.append_all([frame])

    def append_all(self, frames: Sequence[FrameBytes]) -> int:
        """Write whole frames with one write and, where every append is synced, one sync; gives how many are durable
        now, as far as `fsync` promises: the first ones, at least one.

        A device without room gets that of history first.

        Raises: OSError: the device refused, the journal is full (ENOSPC), or closed; nothing of any frame counts then,
            and it may be tried again. LedgerError: a frame begins before the last one ends; a bug in the caller.
        """
        done = 0
        with self._writing:
            self._check_open()
            try:
                while done < len(frames):
                    done += self._with_room_locked(partial(self._writer.append_group, frames, done))
            except OSError:
                if not done:
                    raise
            self._history.trim(self._segments.used_bytes)
        return done

    def sync_due(self, now_s: float) -> bool:
        """Whether `sync` should be called now: "interval", and frames wait since `sync_interval_s` ago.

        Args:
            now_s: by the journal's clock.
        """
        return self._writer.sync_due(now_s)

    def sync(self) -> None:
        """Bring what was appended to the device.

        Raises OSError: it did not take it; a later call or append tries again.
        """
        with self._writing:
            self._check_open()
            self._with_room_locked(self._writer.settle)
            self._with_room_locked(self._writer.sync)

    def truncate(self, published: Position, completed_snapshot: Position) -> int:
        """Make history of the segments nobody needs: all of whose frames are on the stream and before a completed
        snapshot. Gives how many.

        What may not stay as history is deleted. The segment being written stays. May wait for a sync, because what
        makes them truncatable has to be on the device first.

        Args:
            published: everything before it is on the stream.
            completed_snapshot: where the last snapshot began that is whole, durable and published.
        """
        truncatable = min(published, completed_snapshot)
        with self._writing:
            count = self._segments.count_before(truncatable, keeps_last=self._writer.is_writing)
            if not count:
                return 0
            if self._options.fsync != "off":
                try:
                    self._writer.settle()
                    self._writer.sync()
                except OSError as error:
                    log.warning("journal.segments_kept", segments=count, why=str(error))
                    return 0
            gone = self._segments.take(count)
            for segment in gone:
                try:
                    self._history.take(segment.path)
                except OSError as error:  # the next start finds it and lets it go again
                    log.warning("journal.segment_kept", segment=str(segment.path), why=str(error))
            self._history.trim(self._segments.used_bytes)
        return len(gone)

    def erase_history(self, before: Position) -> bool:
        """Delete all history, and what was cut from segments that are gone.

        Whether no segment begins before a position.

        The files are unlinked, not overwritten: what their blocks on the device held is there until the device uses
        them again.

        Raises: OSError: a file cannot be removed.
        """
        with self._writing:
            while self._history.give_up_oldest():
                pass
            for path in (*self.folder.glob(f"*{KEPT_SUFFIX}"), *self.folder.glob(f"*-*{DAMAGED_SUFFIX}")):
                if not path.with_suffix(SEGMENT_SUFFIX).exists():
                    self._device.remove(path)
            self._device.sync_folder(self.folder)
            return all(Position(one.epoch, one.first_offset) >= before for one in self._segments.all())

    def _with_room_locked(self, write: Callable[[], Result]) -> Result:
        """Write, and again for as long as the device has no room and there is history to give up. Raises OSError."""
        while True:
            try:
                return write()
            except OSError as error:
                if isinstance(error, FullError) or error.errno not in _NO_ROOM or not self._history.give_up_oldest():
                    raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, f"journal folder {self.folder} is closed")

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """See `FrameLog.read_after` and `JournalReader.read_after`. Raises OSError."""
        return self._reader.read_after(position, limit_bytes)

    def frames(self, epoch: Epoch) -> Iterator[tuple[ScannedFrame, bytes]]:
        """The frames of one epoch, in order, each with the piece of its segment it lies in.

        Raises: FrameError: the file has changed since it was opened. OSError.
        """
        for segment, size in self._segments.of_epoch(epoch):
            for _, frames, data, error in scan_file(segment.path, size, self._backend):
                for frame in frames:
                    yield frame, data
                if error is not None:
                    raise error

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files and unlock the folder. Idempotent."""
        with self._writing:
            if self._is_closed:
                return
            try:
                self._writer.settle()
                if self._options.fsync != "off":
                    self._writer.sync()
            except OSError as error:  # a torn tail is cut when the folder is opened again
                log.warning("journal.closed_unsynced", folder=str(self.folder), why=str(error))
            self._is_closed = True
            self._writer.close_file()
            self._reader.close()
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # at once, though a forked child may know the file still
            self._lock_file.close()

    def disown(self) -> None:
        """This process is a forked child: let go of the files, which would keep the folder locked for as long as it
        lives.
        """
        self._writing = threading.RLock()
        self._is_closed = True
        self._lock_file.close()
        self._reader.disown()
        self._writer.disown()
