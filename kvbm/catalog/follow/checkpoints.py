"""Checkpoints of the index in a folder: written while frames are applied, the newest good one loaded at the start.

    00000000000000004711-1f2e3d4c.index    what the index wrote, the sequencer's state as its note
    00000000000000004711-1f2e3d4c.json     its manifest, written last: without it the other file is nothing

The number is the stream sequence the state stands at. Blocks in the file may be newer, up to the manifest's `settled`:
whoever loads it reads the stream from the number on and compares digests only after `settled`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, runtime_checkable

import msgspec

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.sequencer import Sequencer, SequencerState
from kvbm.catalog.index.cluster_index import ClusterIndex, NewIndex
from kvbm.catalog.threads import in_thread
from kvbm.core.errors import CatalogError, CheckpointError
from kvbm.files import make_folder, open_plain, read_small, warn_exposed, write_new
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Mark

log = SafeLog()

KEPT = 2
ORPHAN_S = 3600.0  # a file without a manifest is no longer being written after this
_POLL_S = 0.0005  # the index waits for so long, once in a checkpoint
_VERSION = 1
_INDEX, _MANIFEST, _PART = ".index", ".json", ".part"


@runtime_checkable
class Checkpointing(Protocol):
    """An index that writes itself to a file while it is in use. The native one."""

    def write_checkpoint(self, path: str, note: bytes = b"") -> tuple[int, int, int]:
        """Bytes, blocks and frames before.

        Any thread. The file is not empty once the index's front, and so the note's moment, is taken.

        Raises: CheckpointError.
        """

    def load_checkpoint(self, path: str) -> bytes:
        """Fill an empty index; gives the note. Raises CheckpointError: the index cannot be used then."""


class _Versioned(msgspec.Struct):
    version: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest of a checkpoint holds.

    Attributes:
        stream: its name in SQL, another one for each store of it.
        sequence: where the state stands. settled: what was applied when the last block was written.
        fingerprint: of the message at `settled`, as in `Mark`; None: not known.
        bytes, blocks: of the index file.
    """

    version: int
    stream: str
    sequence: int
    settled: int
    bytes: int
    blocks: int
    wall_time_ns: int
    fingerprint: int | None = None


class LoadedCheckpoint(NamedTuple):
    """An index as a checkpoint had it, and the state its sequencer goes on from."""

    held: ClusterIndex
    state: SequencerState
    settled: int


class Writing:
    """One checkpoint being made: `write` in a thread, then `finish`. After an error nothing of it is left.

    Args:
        state: of the sequencer; nothing may be applied to the index between its taking and the moment `has_begun`.
    """

    def __init__(self, folder: Path, index: Checkpointing, state: SequencerState, stream: str) -> None:
        self.sequence = state.sequence
        self._folder, self._index, self._stream = folder, index, stream
        self._note = msgspec.msgpack.encode(state)
        # Of two at one place the later is the newer
        self.name = f"{state.sequence:020}-{time.time_ns():016x}{secrets.token_hex(2)}"
        self._part = folder / f"{self.name}{_INDEX}{_PART}"
        self._size = (0, 0)

    def has_begun(self) -> bool:
        """Whether the index may change again: what it was like at the state's moment is in the writer's hands."""
        try:
            return self._part.stat().st_size > 0
        except OSError:
            return False

    def write(self) -> None:
        """Write the index. Raises CatalogError: the folder does not take it."""
        try:
            make_folder(self._folder)
            os.close(open_plain(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # the index opens it as it is
            size, blocks, _ = self._index.write_checkpoint(str(self._part), self._note)
            _sync(self._part)
        except (CheckpointError, OSError) as error:
            raise self._failed(error) from error
        self._size = (size, blocks)

    def finish(self, settled: Mark) -> Manifest:
        """Make it count, and remove older ones. Raises CatalogError: the folder does not take it.

        Args:
            settled: what has been applied by now.
        """
        manifest = Manifest(
            version=_VERSION,
            stream=self._stream,
            sequence=self.sequence,
            settled=settled.sequence,
            fingerprint=settled.fingerprint,
            bytes=self._size[0],
            blocks=self._size[1],
            wall_time_ns=time.time_ns(),
        )
        body = msgspec.json.encode(manifest)
        final, part = self._folder / f"{self.name}{_MANIFEST}", self._folder / f"{self.name}{_MANIFEST}{_PART}"
        try:
            self._part.rename(self._folder / f"{self.name}{_INDEX}")
            write_new(part, body + b"\n%08x\n" % zlib.crc32(body))
            _sync(self._folder)
            part.rename(final)
            _sync(self._folder)
            _tidy(self._folder, self.name)
        except OSError as error:
            raise self._failed(error) from error
        return manifest

    def _failed(self, error: Exception) -> CatalogError:
        for path in self._folder.glob(f"{self.name}.*"):
            path.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else str(error)
        return CatalogError(
            f"no checkpoint can be written to {self._folder} ({why}); the next start reads more of the stream"
        )


async def load_newest(
    folder: Path,
    new_index: NewIndex,
    capacity: int,
    fits: Callable[[str], bool],
    stored: int | None,
    holds: Callable[[Mark], Awaitable[bool]],
) -> LoadedCheckpoint | None:
    """The index of the newest checkpoint that can be used, or None. One that is damaged is left out with a warning.

    Args:
        fits: whether a checkpoint may be used of a stream of this name in SQL.
        stored: SQL's position; a later checkpoint is of no use, because rows between the two would be lost. None: there
            is no SQL.
        holds: whether the stream's history is still the one of a mark; a checkpoint that knows of messages the stream
            has lost may hold blocks that nobody will speak of again.
    """
    await asyncio.to_thread(warn_exposed, "checkpoints", folder)
    for path, manifest in await asyncio.to_thread(lambda: list(_manifests(folder))):
        if not fits(manifest.stream):
            continue
        is_ahead = stored is not None and manifest.sequence > stored
        if is_ahead or not await holds(Mark(manifest.settled, manifest.fingerprint)):
            log.info(
                "checkpoint.passed_over",
                path=str(path),
                sequence=manifest.sequence,
                settled=manifest.settled,
                stored=stored,
                why="ahead of SQL" if is_ahead else "the stream has lost messages it knows of",
            )
            continue
        loaded = await asyncio.to_thread(_load, path.with_suffix(_INDEX), manifest, new_index(capacity))
        if loaded is not None:
            return loaded
    return None


class OpenCheckpoint(NamedTuple):
    """A checkpoint that is read: it stays whole when it is removed meanwhile.

    Attributes:
        manifest: the bytes of that file. file: the one of the index.
        bytes: of both.
    """

    manifest: bytes
    file: BinaryIO
    bytes: int


def open_newest(folder: Path) -> OpenCheckpoint | None:
    """The newest checkpoint of a folder, to be handed on; None: there is none."""
    for path, manifest in _manifests(folder):
        try:
            head = read_small(path)
            index = os.fdopen(open_plain(path.with_suffix(_INDEX)), "rb")
        except OSError:
            continue  # a newer one has come, and this one was removed
        return OpenCheckpoint(head, index, len(head) + manifest.bytes)
    return None


def _load(file: Path, manifest: Manifest, index: ClusterIndex) -> LoadedCheckpoint | None:
    """What one checkpoint has; None, and a warning, when it is damaged."""
    assert isinstance(index, Checkpointing)
    try:
        os.close(open_plain(file, follows=True))
        if file.stat().st_size != manifest.bytes:
            raise CatalogError(f"{file.stat().st_size} bytes instead of {manifest.bytes}")
        state = msgspec.msgpack.decode(index.load_checkpoint(str(file)), type=SequencerState)
    except (CheckpointError, CatalogError, msgspec.MsgspecError, OSError) as error:
        log.warning("checkpoint.damaged", path=str(file), why=str(error))
        return None
    return LoadedCheckpoint(index, state, manifest.settled)


class Checkpointer:
    """Writes checkpoints of a running catalog. One asyncio loop; bytes are written by a thread.

    Args:
        applying: held by whoever applies messages to the sequencer.
        stream: the stream's name, as it is then.

    Attributes:
        written: how many. last: the newest one's manifest, None before the first.
    """

    def __init__(
        self,
        folder: Path,
        index: Checkpointing,
        sequencer: Sequencer,
        applying: asyncio.Lock,
        stream: Callable[[], str],
        degraded: Degraded,
        every_s: float,
    ) -> None:
        self.written = 0
        self.last: Manifest | None = None
        self._folder, self._index, self._sequencer = folder, index, sequencer
        self._applying, self._stream, self._degraded, self._every_s = applying, stream, degraded, every_s
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Write one every so often, for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.write()

    def newest(self) -> OpenCheckpoint | None:
        """The newest one, to be handed on; None: there is none. Any thread."""
        return open_newest(self._folder)

    async def write_alone(self) -> bool:
        """Write one now and remove all others, which may name what is gone since. False: the folder did not take it."""
        async with self._writing:  # one under way would name it, and come later
            name = await self._write(with_frames=False)  # frames that wait may name it
            if not name:
                return False
            try:
                await in_thread(_remove_others, self._folder, name)
            except CatalogError as error:
                self._degraded.note("checkpoints", str(error))
                return False
            return True

    async def write(self) -> None:
        """Write one, unless nothing was read since the last.

        Trouble is noted; the next try is after the usual pause.
        """
        async with self._writing:
            if self.last is None or self.last.sequence != self._sequencer.sequence:
                await self._write()

    async def _write(self, with_frames: bool = True) -> str:
        """Its name; "" where the folder did not take it."""
        async with self._applying:
            writing = Writing(self._folder, self._index, self._sequencer.state(with_frames), self._stream())
            work = asyncio.ensure_future(in_thread(writing.write))
            while not work.done() and not writing.has_begun():
                await asyncio.wait([work], timeout=_POLL_S)
        try:
            await work
            self.last = await in_thread(writing.finish, self._sequencer.mark)
        except CatalogError as error:
            self._degraded.note("checkpoints", str(error))
            return ""
        self.written += 1
        self._degraded.clear("checkpoints")
        log.info(
            "checkpoint.written",
            sequence=self.last.sequence,
            settled=self.last.settled,
            blocks=self.last.blocks,
            bytes=self.last.bytes,
        )
        return writing.name


def _manifests(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The manifests that can be read, the newest first."""
    for path in sorted(folder.glob(f"*{_MANIFEST}"), reverse=True):
        try:
            body, _, checksum = read_small(path).rstrip(b"\n").rpartition(b"\n")
            if checksum != b"%08x" % zlib.crc32(body):
                raise CatalogError("its checksum is another")
            version = msgspec.json.decode(body, type=_Versioned).version
            if version != _VERSION:
                newer = "a newer kvbm wrote it, as" if version > _VERSION else "it is of"
                log.warning(
                    "checkpoint.unread", path=str(path), why=f"{newer} version {version}; this one reads {_VERSION}"
                )
                continue
            manifest = msgspec.json.decode(body, type=Manifest)
        except (CatalogError, msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            log.warning("checkpoint.damaged", path=str(path), why=str(error))
            continue
        yield path, manifest


def _remove_others(folder: Path, name: str) -> None:
    """Remove all checkpoints but one, and what writers that died have left, however young."""
    for kind in (_MANIFEST, _INDEX, f"{_MANIFEST}{_PART}", f"{_INDEX}{_PART}"):
        for path in folder.glob(f"*{kind}"):
            if not path.name.startswith(f"{name}."):
                path.unlink(missing_ok=True)
    _sync(folder)


def _tidy(folder: Path, written: str) -> None:
    """Remove all but the newest checkpoints, and what writers that died have left.

    Args:
        written: the name of the one just written: a stream that begins anew has smaller sequences.
    """
    found = (path.stem for path in folder.glob(f"*{_MANIFEST}"))
    names = sorted(found, key=lambda name: (name == written, name), reverse=True)
    for name in names[KEPT:]:
        (folder / f"{name}{_MANIFEST}").unlink(missing_ok=True)
        (folder / f"{name}{_INDEX}").unlink(missing_ok=True)
    for path in (*folder.glob(f"*{_PART}"), *folder.glob(f"*{_INDEX}")):
        is_orphan = path.suffix == _PART or path.stem not in names
        try:
            if is_orphan and time.time() - path.stat().st_mtime > ORPHAN_S:
                path.unlink()
        except FileNotFoundError:
            pass  # another catalog with this folder has tidied it up


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
