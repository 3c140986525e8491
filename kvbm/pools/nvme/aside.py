"""Files that lay where a pool was to be, and were made for something else: kept beside it under another name, within a
bound.

`nvme.pool` becomes `nvme.pool.aside-1`. Nothing there is ever read again by itself. What kvbm has made is deleted, the
oldest first, where the bound or a new pool needs its room; of other files none ever is.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from kvbm.files import read_plain
from kvbm.safe_log import SafeLog

log = SafeLog()

DEFAULT_ASIDE_BYTES = 64 << 30

_MAGIC = b"KVBMPOOL"


class _Kept(NamedTuple):
    """A file that was set aside."""

    number: int
    path: Path
    held_bytes: int
    is_ours: bool


class Aside:
    """What was set aside of one path.

    Args:
        most_bytes: that all of it may take on the disk.
    """

    def __init__(self, path: Path, most_bytes: int = DEFAULT_ASIDE_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes

    def take(self, path: Path, fd: int, is_ours: bool) -> str:
        """Set the file that has the pool's name aside; its new name, "" where it may not or cannot be kept.

        Args:
            fd: the same, open.
        """
        wanted, kept = os.fstat(fd).st_blocks * 512, self._kept()
        while kept and wanted + sum(one.held_bytes for one in kept) > self._most_bytes:
            if not self._delete_oldest(kept):
                break
            kept = self._kept()
        if wanted + sum(one.held_bytes for one in kept) > self._most_bytes:
            return ""
        aside = path.with_name(f"{path.name}.aside-{max((one.number for one in kept), default=0) + 1}")
        try:
            os.rename(path, aside)
            sync_folder(path.parent)
        except OSError as error:
            log.warning("pool.not_set_aside", path=str(path), why=error.strerror, is_ours=is_ours)
            return ""
        return aside.name

    def give_up_oldest(self) -> bool:
        """Delete the oldest file that kvbm has made; False where there is none, or it cannot be."""
        return self._delete_oldest(self._kept())

    def give_up_all(self) -> int:
        """Delete every file that kvbm has made; gives how many. Raises OSError."""
        ours = [one for one in self._kept() if one.is_ours]
        for one in ours:
            one.path.unlink(missing_ok=True)
        if ours:
            sync_folder(self._path.parent)
        return len(ours)

    def _delete_oldest(self, kept: list[_Kept]) -> bool:
        oldest = next((one for one in kept if one.is_ours), None)
        if oldest is None:
            return False
        try:
            oldest.path.unlink()
            sync_folder(oldest.path.parent)
        except OSError as error:
            log.warning("pool.aside_not_deleted", path=str(oldest.path), why=error.strerror)
            return False
        log.info("pool.aside_deleted", path=str(oldest.path), held_bytes=oldest.held_bytes)
        return True

    def _kept(self) -> list[_Kept]:
        """What is there, the oldest first."""
        found = []
        name = re.compile(re.escape(self._path.name) + r"\.aside-([1-9][0-9]{0,8})")
        try:
            entries = list(os.scandir(self._path.parent))
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.warning("pool.asides_unknown", folder=str(self._path.parent), why=error.strerror)
            return []
        for entry in entries:
            matched = name.fullmatch(entry.name)
            if matched is None:
                continue
            try:
                held = os.lstat(entry.path)
                if stat.S_ISREG(held.st_mode):
                    is_ours = read_plain(Path(entry.path), len(_MAGIC)) == _MAGIC
                    found.append(_Kept(int(matched[1]), Path(entry.path), held.st_blocks * 512, is_ours))
            except OSError:
                continue  # gone meanwhile, or not ours to look at
        return sorted(found)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
