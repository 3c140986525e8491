"""What a journal does to its folder, as few calls that another disk can stand in for: one that fails, or forgets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvbm.files import open_plain

MOST_PIECES = 512  # given to one write; the kernel takes 1,024


class DiskWriter(Protocol):
    """The writing half of a disk.

    All raise OSError. What was written is safe from a power cut once its file was synced, and a name once its folder
    was.
    """

    def open(self, path: Path) -> int:
        """A file to append to, made if it is not there."""

    def write(self, file: int, pieces: Sequence[memoryview]) -> int:
        """Append; gives how many bytes were taken, maybe not all."""

    def sync(self, file: int) -> None:
        """Bring a file to the device."""

    def sync_folder(self, folder: Path) -> None:
        """Bring the names in a folder to the device."""

    def truncate(self, file: int, size: int) -> None:
        """Cut a file."""

    def replace(self, source: Path, target: Path) -> None:
        """Give a file another name, which another file may have had."""

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""

    def close(self, file: int) -> None:
        """Close a file."""


class OsDevice:
    """The operating system's."""

    def open(self, path: Path) -> int:
        """See `DiskWriter.open`."""
        return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, file: int, pieces: Sequence[memoryview]) -> int:
        """See `DiskWriter.write`."""
        return os.writev(file, pieces)

    def sync(self, file: int) -> None:
        """See `DiskWriter.sync`."""
        os.fsync(file)

    def sync_folder(self, folder: Path) -> None:
        """See `DiskWriter.sync_folder`."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def truncate(self, file: int, size: int) -> None:
        """See `DiskWriter.truncate`."""
        os.ftruncate(file, size)

    def replace(self, source: Path, target: Path) -> None:
        """See `DiskWriter.replace`."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """See `DiskWriter.remove`."""
        path.unlink(missing_ok=True)

    def close(self, file: int) -> None:
        """See `DiskWriter.close`."""
        os.close(file)


def write_all(device: DiskWriter, file: int, pieces: list[memoryview]) -> None:
    """Append all of it, however little the device takes at once; uses up the list. Raises OSError."""
    while pieces:
        taken = device.write(file, pieces[:MOST_PIECES])
        while pieces and taken >= len(pieces[0]):
            taken -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][taken:]


def write_file(device: DiskWriter, path: Path, pieces: list[memoryview]) -> None:
    """Put a whole file under its name, on the device, or none. Raises OSError."""
    temporary = path.with_name(f"{path.name}.new")
    device.remove(temporary)
    file = device.open(temporary)
    try:
        write_all(device, file, pieces)
        device.sync(file)
    finally:
        device.close(file)
    device.replace(temporary, path)
    device.sync_folder(path.parent)
