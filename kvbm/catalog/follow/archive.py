"""The archive: every frame of the stream as files for `kvbm-replay`, and the samples that were heard.

    00000000000000000001.kvbm     whole frames as they came, and fences between them (`streams/fence_records.py`), named
                                  by the first message's sequence; about 64 MiB each
    r0002-00000000000000000001.kvbm   the same after the stream's store was replaced: its sequences began anew
    POSITION                      where writing stands; what files hold beyond it was torn off; it is cut and read anew
    samples/2026-11-21.samples    accesses, as kvbm.streams.access_samples describes

Names sort in stream order. `ArchiveFiles` writes, without thread or loop; `Archive` follows a stream and drives it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.sampled_hits import SampledHits
from kvbm.catalog.threads import run_in
from kvbm.core.errors import CatalogError, StreamError
from kvbm.core.parts import ALL_PARTS, part_of
from kvbm.files import make_folder, open_plain, opener, read_small, warn_exposed, write_new
from kvbm.safe_log import SafeLog
from kvbm.streams.access_samples import SUFFIX, encode_sample, whole_bytes
from kvbm.streams.base import AccessSample, EventStream, StreamMessage, is_fence, mark_of
from kvbm.streams.fence_owner import FenceOwners
from kvbm.streams.fence_records import VERSION, encode_fence, encode_told

log = SafeLog()

FILE_BYTES = 64 << 20
SYNC_BYTES = 16 << 20  # POSITION is moved on at least after so much
SYNC_EVERY_S = 1.0
STREAM_PART = "archive stream"  # as a degraded part: the archive does not get what it should write
RETRY_S = 1.0
SAMPLES_EVERY_S = 1.0
SAMPLES_WAITING = 10_000
FRAMES = ".kvbm"
PART = ".part"  # of a file that is being rewritten
_POSITION = "POSITION"
_POSITION_BYTES = 64 << 10
P = ParamSpec("P")
T = TypeVar("T")


class _Versioned(msgspec.Struct):
    version: int


class ArchivePosition(msgspec.Struct, frozen=True, kw_only=True):
    """What POSITION holds.

    Attributes:
        created: when the stream's store was made; "" before the first message.
        generation: of the store, from 1.
        sequence: the last one written. fingerprint: of that message, as in `Mark`; None: not known.
        file, bytes: the file it ends, and where.
        version: of the archive's files beside frames.
    """

    version: int = VERSION
    created: str = ""
    generation: int = 1
    sequence: int = 0
    fingerprint: int | None = None
    file: str = ""
    bytes: int = 0


class ArchiveFiles:
    """The files of one archive.

    One thread at a time. Every method raises CatalogError when the folder does not take it.

    After such an error the same call may be made again: what it had half written is cut off first.

    Attributes:
        position: what is written; the folder may know of less, until `sync`.
        lost: messages that were no longer on the stream when it was their turn.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self.position = ArchivePosition()
        self.lost = 0
        self._folder = folder
        self._file_bytes = file_bytes
        self._file = -1
        self._synced = ArchivePosition()
        self._has_failed = False  # the last `append`
        self._fence_owners = FenceOwners()
        self._kept: tuple[Sequence[StreamMessage], list[bytes]] | None = None

    @classmethod
    def open(cls, folder: Path, file_bytes: int = FILE_BYTES) -> ArchiveFiles:
        """The archive in a folder, which is made; a torn end is cut off. Raises CatalogError."""
        archive = cls(folder, file_bytes)
        try:
            make_folder(folder / "samples")
            warn_exposed("archive", folder)
            for path in (folder / "samples").glob(f"*{SUFFIX}"):
                os.truncate(path, whole_bytes(path))
            archive.position = archive._synced = archive._recover()
        except OSError as error:
            raise archive._failed(error) from error
        return archive

    def follow(self, created: str, first_sequence: int, last_sequence: int) -> int:
        """The sequence to read the stream after, given what it is and has.

        Args:
            created: when its store was made; another one than before begins a generation, and so does one that has lost
                its end.
        """
        here = self.position
        if here.created and (here.created != created or here.sequence > last_sequence):
            self._begin_generation()
        self.position = msgspec.structs.replace(self.position, created=created)
        missing = first_sequence - 1 - self.position.sequence
        if missing > 0 and self.position.sequence:
            self.lost += missing
            log.warning("archive.messages_missed", after=self.position.sequence, missing=missing)
        return self.position.sequence

    def append(self, messages: Sequence[StreamMessage]) -> None:
        """Write messages in stream order.

        Of a call that failed and is made again, those that were written are left out.
        """
        if messages and messages[0].sequence <= self.position.sequence and not self._has_failed:
            self._begin_generation()  # the reader has begun anew: another store
        self._has_failed = True
        if self._kept is None or self._kept[0] is not messages:  # a call that is made again keeps what it kept
            self._kept = (messages, [self._keep(message) for message in messages])
        kept = self._kept[1]
        at = 0
        while at < len(messages):
            if messages[at].sequence <= self.position.sequence:
                at += 1
                continue
            if not self.position.file or self.position.bytes >= self._file_bytes:
                self._rotate(messages[at].sequence)
            room = self._file_bytes - self.position.bytes
            end, size, parts = at, 0, list[bytes]()
            while end < len(messages):
                part = kept[end]
                if parts and size + len(part) > room:
                    break
                parts.append(part)
                size += len(part)
                end += 1
            try:
                self._write(b"".join(parts))
            except OSError as error:
                self._drop_half()
                raise self._failed(error) from error
            sequence, fingerprint = mark_of(messages[end - 1])
            self.position = msgspec.structs.replace(
                self.position, sequence=sequence, fingerprint=fingerprint, bytes=self.position.bytes + size
            )
            at = end
        self._has_failed = False
        self._kept = None
        if self.position.bytes - self._synced.bytes >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Make what is written last, and move POSITION on."""
        if self.position == self._synced:
            return
        try:
            if self._file >= 0:
                os.fsync(self._file)
            self._put_position()
        except OSError as error:
            raise self._failed(error) from error
        self._synced = self.position

    def append_samples(self, wall_time_ns: int, samples: Sequence[AccessSample]) -> None:
        """Write samples to the file of this day."""
        day = datetime.fromtimestamp(wall_time_ns / 1e9, UTC).strftime("%Y-%m-%d")
        path = self._folder / "samples" / f"{day}{SUFFIX}"
        data = b"".join(map(encode_sample, samples))
        begin = 0
        try:
            with open(path, "ab", buffering=0, opener=opener) as file:
                begin = file.tell()
                while data:
                    data = data[file.write(data) :]
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, begin)
            raise self._failed(error) from error

    def rewrite(self, frames: Callable[[Path], int], samples: Callable[[Path], int]) -> int:
        """Have every file rewritten. What comes next begins a file: POSITION names none that is rewritten.

        Args:
            frames, samples: rewrite one file, by a file beside it whose name ends with PART; give how much they have
                taken out of it.
        Returns: how much was taken out of all.
        """
        self.sync()
        self._close_file()
        taken_out = 0
        try:
            if self.position.bytes:
                os.truncate(self._folder / self.position.file, self.position.bytes)  # what a failed write has left
                self._rotate(self.position.sequence + 1)
                self.sync()
            for path in (*self._folder.glob(f"*{PART}"), *(self._folder / "samples").glob(f"*{PART}")):
                path.unlink()  # of a process that died
            for path in sorted(self._folder.glob(f"*{FRAMES}")):
                taken_out += frames(path)
            for path in sorted((self._folder / "samples").glob(f"*{SUFFIX}")):
                taken_out += samples(path)
        except OSError as error:
            raise self._failed(error) from error
        return taken_out

    def close(self) -> None:
        """Sync, and give the file back."""
        try:
            self.sync()
        finally:
            self._close_file()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _keep(self, message: StreamMessage) -> bytes:
        """What the archive keeps of a message."""
        counts, named = self._fence_owners.take(message)
        if is_fence(message.subject):
            return encode_fence(message)
        if not counts:
            return b""
        return message.data if named is None else encode_told(message, named) + message.data

    def _recover(self) -> ArchivePosition:
        files = sorted(path.name for path in self._folder.glob(f"*{FRAMES}"))
        position = self._read_position()
        if position is None:
            if not files:
                return ArchivePosition()
            generation, first = _parse(files[-1])
            log.warning("archive.position_lost", folder=str(self._folder), read_again=files[-1])
            (
                self._folder / files[-1]
            ).unlink()  # where its last message ends is not known; it is read again from its first
            return ArchivePosition(generation=generation, sequence=first - 1)
        for name in files:
            if name > position.file or not position.file:
                (self._folder / name).unlink()
        if position.file:
            path = self._folder / position.file
            size = path.stat().st_size if path.exists() else 0
            if size < position.bytes:
                log.warning("archive.file_lost", file=position.file, bytes=position.bytes)
                return msgspec.structs.replace(position, file="", bytes=0)
            if size:
                os.truncate(path, position.bytes)
        return position

    def _read_position(self) -> ArchivePosition | None:
        return _read_position(self._folder)

    def _put_position(self) -> None:
        body = msgspec.json.encode(self.position)
        part = self._folder / f"{_POSITION}.part"
        write_new(part, body + b"\n%08x\n" % zlib.crc32(body))
        part.rename(self._folder / _POSITION)
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _begin_generation(self) -> None:
        self.sync()
        self._close_file()
        self.position = ArchivePosition(generation=self.position.generation + 1)
        self._fence_owners.clear()
        log.warning("archive.store_replaced", generation=self.position.generation)

    def _rotate(self, first: int) -> None:
        self.sync()
        self._close_file()
        name = f"{first:020}{FRAMES}"
        if self.position.generation > 1:
            name = f"r{self.position.generation:04}-{name}"
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        self.position = msgspec.structs.replace(self.position, file=name, bytes=0)

    def _write(self, data: bytes) -> None:
        if self._file < 0:
            path = self._folder / self.position.file
            self._file = open_plain(path, os.O_WRONLY | os.O_CREAT)
            os.ftruncate(self._file, self.position.bytes)
            os.lseek(self._file, self.position.bytes, os.SEEK_SET)
        _write_all(self._file, data)

    def _drop_half(self) -> None:
        """What a failed write has left goes when the file is opened again; try at once, for a full disk wants every
        byte.
        """
        if self._file >= 0:
            with suppress(OSError):
                os.ftruncate(self._file, self.position.bytes)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _failed(self, error: OSError) -> CatalogError:
        return CatalogError(f"the archive {self._folder} takes nothing more ({error.strerror}); it goes on when it can")


def settled_end(folder: Path) -> tuple[str, int] | None:
    """The file of an archive up to which all is written for good, and how many bytes of it; None where it does not say.

    What lies behind may be cut off and written again.
    """
    try:
        position = _read_position(folder)
    except (OSError, CatalogError):
        return None
    return (position.file, position.bytes) if position is not None and position.file else None


def _read_position(folder: Path) -> ArchivePosition | None:
    """None: there is none, or it is damaged. Raises OSError. CatalogError: it is of a newer kvbm."""
    try:
        body, _, checksum = read_small(folder / _POSITION, _POSITION_BYTES).rstrip(b"\n").rpartition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return None  # damaged, as one with a flipped byte
    try:
        if checksum != b"%08x" % zlib.crc32(body):
            return None
        version = msgspec.json.decode(body, type=_Versioned).version
        if version > VERSION:
            raise CatalogError(
                f"the archive {folder} is of a newer kvbm, version {version}; this one writes version {VERSION}: "
                "upgrade it, or give --archive another folder"
            )
        position = msgspec.json.decode(body, type=ArchivePosition)
        is_ours = not position.file or (position.file.endswith(FRAMES) and "/" not in position.file)
        return position if is_ours else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _write_all(file: int, data: bytes) -> None:
    """All of it, however little the device takes at once: one that fills up takes a part first. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _parse(name: str) -> tuple[int, int]:
    """Generation and first sequence of a file."""
    generation, _, first = name.removesuffix(FRAMES).rpartition("-")
    try:
        return int(generation.removeprefix("r") or 1), int(first)
    except ValueError:
        raise CatalogError(f"{name} is no file of an archive; take it out of the archive's folder") from None


class Archive:
    """Follows a stream by a reader of its own and keeps its frames and samples.

    One asyncio loop; files are written by one thread.

    Trouble with the folder or the stream is noted and waited out: it never stops the catalog.
    """

    def __init__(
        self,
        folder: Path,
        stream: EventStream,
        cluster: str | None,
        degraded: Degraded,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> None:
        self.samples = 0
        self.samples_lost = 0
        self.hits = SampledHits()
        self._folder, self._stream, self._degraded = folder, stream, degraded
        self._cluster, self._parts = cluster, parts
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvbm-archive")
        self._files: ArchiveFiles | None = None
        self._opening = asyncio.Lock()  # opening cuts a torn end: once, before anything is written

    @property
    def sequence(self) -> int:
        """The last message that is written."""
        return self._files.position.sequence if self._files is not None else 0

    @property
    def lost(self) -> int:
        """Messages that were no longer on the stream when it was their turn."""
        return self._files.lost if self._files is not None else 0

    async def keep_frames(self) -> None:
        """Archive the stream for ever."""
        while True:
            try:
                await self._follow(await self._open())
            except StreamError as error:  # no fault of the folder
                self._degraded.note(STREAM_PART, str(error))
                await asyncio.sleep(RETRY_S)
            except CatalogError as error:
                self._degraded.note("archive", str(error))
                await asyncio.sleep(RETRY_S)

    async def keep_samples(self) -> None:
        """Archive what samples are heard, for ever; what cannot be written is lost and counted."""
        waiting: list[AccessSample] = []

        async def write() -> None:
            while True:
                await asyncio.sleep(SAMPLES_EVERY_S)
                if not waiting:
                    continue
                taken = waiting.copy()
                waiting.clear()
                try:
                    files = await self._open()
                    await self._run(files.append_samples, time.time_ns(), taken)
                    self.samples += len(taken)
                except CatalogError as error:
                    self.samples_lost += len(taken)
                    log.debug("samples.lost", count=len(taken), why=str(error))

        writing = asyncio.create_task(write(), name="catalog-archive-samples")
        try:
            async for sample in self._stream.watch_samples(self._cluster):
                if part_of(sample.instance) not in self._parts:
                    continue
                self.hits.hear(sample)
                if len(waiting) < SAMPLES_WAITING:
                    waiting.append(sample)
                else:
                    self.samples_lost += 1
        finally:
            writing.cancel()

    async def rewrite(self, frames: Callable[[Path], int], samples: Callable[[Path], int]) -> int:
        """As `ArchiveFiles.rewrite`. Raises CatalogError: the folder does not take it."""
        return await self._run((await self._open()).rewrite, frames, samples)

    async def close(self) -> None:
        """Sync and close the files."""
        files = self._files
        try:
            if files is not None:
                await self._run(files.close)
        except CatalogError as error:
            log.warning("archive.closed_early", why=str(error))
        self._writer.shutdown(wait=False)

    async def _open(self) -> ArchiveFiles:
        async with self._opening:
            if self._files is None:
                self._files = await self._run(ArchiveFiles.open, self._folder)
            return self._files

    async def _follow(self, files: ArchiveFiles) -> None:
        state = await self._stream.state()
        after = await self._run(files.follow, state.created, state.first_sequence, state.last_sequence)
        reader = await self._stream.pull(
            after, self._cluster, fingerprint=files.position.fingerprint, parts=self._parts
        )
        self._degraded.clear("archive")  # the stream answers, and the folder has taken what it says
        synced_s = time.monotonic()
        try:
            while True:
                messages = await reader.fetch(SYNC_EVERY_S)
                if messages:
                    await self._insist(files.append, messages)
                if time.monotonic() - synced_s >= SYNC_EVERY_S:
                    await self._insist(files.sync)
                    synced_s = time.monotonic()
                self._degraded.clear("archive")
                self._degraded.clear(STREAM_PART)
                if not files.position.created:
                    return  # another store: ask what it is
        finally:
            await reader.close()

    async def _insist(self, work: Callable[P, None], *arguments: P.args, **more: P.kwargs) -> None:
        """Do it until the folder takes it; what waits meanwhile is on the stream."""
        while True:
            try:
                await self._run(work, *arguments, **more)
                return
            except CatalogError as error:
                self._degraded.note("archive", str(error))
                await asyncio.sleep(RETRY_S)

    async def _run(self, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
        return await run_in(self._writer, work, *arguments, **more)
