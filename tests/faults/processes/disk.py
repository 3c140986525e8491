"""A disk that can be full, and damage to files of a process that is down."""

from __future__ import annotations

import ctypes
import os
import random
import resource
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_DETACH = 2  # MNT_DETACH


class Disk:
    """A folder whose room can be taken away and given back.

    As root a tmpfs of its own, filled with a file: writes fail with ENOSPC. Otherwise the file size limit of the
    processes that write there, set below what their files have: writes fail with EFBIG.

    Attributes:
        kind: "tmpfs" or "limit".
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        options = f"size={size_bytes}".encode()
        mounted = _LIBC.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options) == 0
        self.kind = "tmpfs" if mounted else "limit"

    def fill(self, process_id: int) -> None:
        """Take all room away."""
        if self.kind == "limit":
            forbid_writes(process_id)
            return
        with open(self.folder / "filler", "wb", buffering=0) as filler:
            piece = bytes(1 << 20)
            while piece:
                try:
                    filler.write(piece)
                except OSError:
                    piece = piece[: len(piece) // 2]

    def free(self, process_id: int) -> None:
        """Give it back."""
        if self.kind == "limit":
            allow_writes(process_id)
            return
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it. What lies there is gone with it."""
        if self.kind == "tmpfs":
            _LIBC.umount2(str(self.folder).encode(), _DETACH)
            self.kind = "closed"


def forbid_writes(process_id: int) -> None:
    """No file of a process may grow any more, wherever it lies: writes fail with EFBIG."""
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


def allow_writes(process_id: int) -> None:
    """Undo `forbid_writes`."""
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def newest(folder: Path, pattern: str) -> Path | None:
    """The file of a pattern, not empty, that was written last."""
    files = [path for path in folder.rglob(pattern) if path.is_file() and path.stat().st_size]
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def flip_bits(path: Path, dice: random.Random, count: int, among_last: int = 0) -> str:
    """Flip bits at random places, of the whole file or of its last bytes. Says what was done."""
    size = path.stat().st_size
    first = max(0, size - among_last) if among_last else 0
    places = sorted(dice.randrange(first, size) for _ in range(count))
    with open(path, "r+b") as file:
        for at in places:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << dice.randrange(8)]), at)
    return f"{path.name}: bits of bytes {_few(places)} of {size} flipped"


def tear(path: Path, dice: random.Random, among_last: int) -> str:
    """Cut a file within its last bytes, as a write that did not get through; or leave zeros there.

    Says what was done.
    """
    size = path.stat().st_size
    at = dice.randrange(max(0, size - among_last), size)
    with open(path, "r+b") as file:
        file.truncate(at)
        if zeros := dice.random() < 0.3:
            file.truncate(size)
    return f"{path.name}: {'zeros' if zeros else 'cut'} from byte {at} of {size}"


def scribble(path: Path, dice: random.Random, count: int, page_bytes: int = 4096) -> str:
    """Overwrite halves of random pages but the first with other bytes, as torn writes do. Says what was done."""
    pages = path.stat().st_size // page_bytes
    chosen = sorted(dice.sample(range(1, pages), min(count, pages - 1)))
    with open(path, "r+b") as file:
        for page in chosen:
            os.pwrite(
                file.fileno(), dice.randbytes(page_bytes // 2), page * page_bytes + dice.choice((0, page_bytes // 2))
            )
    return f"{path.name}: half of pages {_few(chosen)} overwritten"


def _few(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return ", ".join(map(str, listed[:5])) + (f", … ({len(listed)})" if len(listed) > 5 else "")
