"""A machine's disk: real files on tmpfs, reached through stand-ins for `os` and `open` that know of faults.

A process that is killed leaves everything it wrote; a power cut takes what was not synced, at any byte. A write may
fail, stop in the middle because the room is gone, or be the last thing its process does.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.simulator.kernel import INSTALLED, Process

_open = open


class Disk:
    """Files of one machine, and what is wrong with them."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._rng = rng
        self.full = False
        self.broken = False  # EIO
        self.kill_at_write = False
        self.slow_s = 0.0
        self.synced: dict[str, int] = {}
        self.unsynced: set[str] = set()  # hints of pools that were written since they were synced
        self._forgotten: set[str] = set()
        self.open_files: dict[Process, dict[int, int]] = {}  # inode by number
        self.files: dict[Process, list[File]] = {}
        self.paths: dict[int, str] = {}  # of the files ever open under a number

    def opened(self, process: Process, fd: int, path: str) -> None:
        self.open_files.setdefault(process, {})[fd] = os.fstat(fd).st_ino
        self.paths[fd] = path

    def closed(self, process: Process, fd: int) -> None:
        self.open_files.get(process, {}).pop(fd, None)

    def release(self, process: Process) -> None:
        """The kernel closes what a dead process had open.

        What was closed past the stand-in of `os` may be somebody else's by now.
        """
        self.unsynced.clear()  # a file that is closed is written
        for fd, inode in self.open_files.pop(process, {}).items():
            try:
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:
                pass
        for file in self.files.pop(process, []):
            file.raw.close()

    def path_of(self, fd: int) -> str:
        return self.paths.get(fd, "")

    def write(self, process: Process, path: str, data: Any, put: Callable[[Any], int]) -> int:
        """One write with whatever is wrong now. Raises OSError, or Killed."""
        size = len(data)
        if self.kill_at_write and path.endswith(".kvbj"):
            self.kill_at_write = False
            if part := self._rng.randrange(size):
                put(memoryview(data)[:part])
            INSTALLED.world.die(process)
        if self.broken:
            raise OSError(errno.EIO, "Input/output error (simulated)", path)
        if self.full:
            part = self._rng.randrange(size) if size else 0
            if part and self._rng.random() < 0.5:
                return put(memoryview(data)[:part])  # the rest finds no room
            raise OSError(errno.ENOSPC, "No space left on device (simulated)", path)
        return put(data)

    def sync(self, path: str) -> None:
        if not self.broken:
            self.unsynced.discard(path)
        if self.broken:
            self._forgotten.add(path)  # Linux marks the pages clean: a later sync that succeeds says nothing of them
            raise OSError(errno.EIO, "Input/output error (simulated)", path)
        if path and path not in self._forgotten:
            try:
                self.synced[path] = os.stat(path).st_size
            except FileNotFoundError:
                pass

    def journal_files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kvbj"))

    def pool_files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.pool"))

    def cut_power(self) -> int:
        """What was not synced is gone, from any byte on, or reads as zeros. Returns how many bytes the journal lost."""
        lost = 0
        for path in self.journal_files():
            size = path.stat().st_size
            kept = min(self.synced.get(str(path), 0), size)
            cut = self._rng.randint(kept, size)
            if cut < size:
                os.truncate(path, cut)
                if self._rng.random() < 0.3:
                    os.truncate(path, size)  # the length was on the device, the bytes were not
                lost += size - cut
        for path in self.pool_files():
            with _open(path, "r+b") as file:
                size = path.stat().st_size
                for _ in range(self._rng.randrange(3)):
                    file.seek(4096 * self._rng.randrange(1, max(2, size // 4096)))
                    file.write(bytes(4096))
        return lost

    def wipe(self) -> None:
        """Another disk is in the machine: nothing is on it."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.synced.clear()
        self.unsynced.clear()
        self._forgotten.clear()

    def flip(self, path: Path, begin: int = 0) -> bool:
        """Flip one bit of a file."""
        size = path.stat().st_size
        if size <= begin:
            return False
        at = self._rng.randrange(begin, size)
        with _open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << self._rng.randrange(8))]))
        return True

    def remove(self) -> None:
        for process in [*self.open_files, *self.files]:
            self.release(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def _here() -> tuple[Process, Disk | None]:
    process = INSTALLED.world.current
    return process, process.disk


class Os:
    """Stands for the module `os` where files are written."""

    def __getattr__(self, name: str) -> Any:
        if not INSTALLED.world.current.alive:
            raise OSError(errno.EBADF, "the process is dead (simulated)")
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        process, disk = _here()
        process.shortages.check_descriptor(str(path))
        fd = os.open(path, flags, mode, **kwargs)
        if disk is not None:
            disk.opened(process, fd, str(path))
        return fd

    def dup(self, fd: int) -> int:
        process, disk = _here()
        process.shortages.check_descriptor("another of a file")
        again = os.dup(fd)
        if disk is not None:
            disk.opened(process, again, disk.path_of(fd))
        return again

    def scandir(self, path: Any) -> Any:
        process, _ = _here()
        process.shortages.check_descriptor(str(path))
        return os.scandir(path)

    def close(self, fd: int) -> None:
        process, disk = _here()
        if disk is not None:
            disk.closed(process, fd)
        os.close(fd)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        process, disk = _here()
        if not process.alive:
            raise OSError(errno.EBADF, "the process is dead (simulated)")
        if disk is None or not (path := disk.path_of(fd)).endswith(".slots"):
            return os.pwrite(fd, data, offset)
        disk.unsynced.add(path)
        return disk.write(process, path, data, lambda part: os.pwrite(fd, part, offset))

    def write(self, fd: int, data: Any) -> int:
        process, disk = _here()
        if disk is None:
            return os.write(fd, data)
        return disk.write(process, disk.path_of(fd), data, lambda part: os.write(fd, part))

    def pwritev(self, fd: int, pieces: Any, offset: int) -> int:
        self._refuse_if_broken(fd)
        return os.pwritev(fd, pieces, offset)

    def preadv(self, fd: int, pieces: Any, offset: int) -> int:
        self._refuse_if_broken(fd)
        return os.preadv(fd, pieces, offset)

    @staticmethod
    def _refuse_if_broken(fd: int) -> None:
        process, disk = _here()
        if not process.alive:
            raise OSError(errno.EBADF, "the process is dead (simulated)")
        if disk is not None and disk.broken:
            raise OSError(errno.EIO, "Input/output error (simulated)", disk.path_of(fd))

    def writev(self, fd: int, pieces: Any) -> int:
        return self.write(fd, b"".join(pieces))

    def fsync(self, fd: int) -> None:
        _, disk = _here()
        if disk is not None:
            disk.sync(disk.path_of(fd))

    fdatasync = fsync

    def replace(self, source: Any, target: Any) -> None:
        _, disk = _here()
        if disk is not None and disk.broken:
            raise OSError(errno.EIO, "Input/output error (simulated)", str(target))
        os.replace(source, target)


class File:
    """A file open for writing."""

    def __init__(self, process: Process, disk: Disk, path: str, raw: Any) -> None:
        self._process, self._disk, self._path, self.raw = process, disk, path, raw
        disk.files.setdefault(process, []).append(self)
        disk.paths[raw.fileno()] = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def write(self, data: Any) -> int:
        if not self._process.alive:
            raise OSError(errno.EBADF, "the process is dead (simulated)")
        return self._disk.write(self._process, self._path, data, self.raw.write)

    def close(self) -> None:
        files = self._disk.files.get(self._process, [])
        if self in files:
            files.remove(self)
        self.raw.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_file(path: Any, mode: str = "r", buffering: int = -1, **kwargs: Any) -> Any:
    """Stands for the builtin `open` where files are written."""
    process, disk = _here()
    if not isinstance(path, int):
        process.shortages.check_descriptor(str(path))
    if "opener" in kwargs:  # it would open with the stand-in of `os`, and nobody would close with it
        kwargs["opener"] = _opener
    if disk is None or ("r" in mode and "+" not in mode):
        return _open(path, mode, buffering, **kwargs)
    if disk.broken:
        raise OSError(errno.EIO, "Input/output error (simulated)", str(path))
    if isinstance(path, int):  # opened with the stand-in; it is the file's from now on
        disk.closed(process, path)
    name = disk.path_of(path) if isinstance(path, int) else str(path)
    return File(process, disk, name, _open(path, mode, 0, **kwargs))


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
