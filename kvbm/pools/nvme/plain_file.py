"""A plain file in a folder that others may write into, opened so that nothing there can hold up or fool who opens it.

A FIFO without a writer would block an open for ever, a link would lead elsewhere, a device may do anything: each is an OSError at once.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A file descriptor of a plain file. Raises OSError: there is none, or something else has its name."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _no_plain_file(error.errno, path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_plain_file(errno.EINVAL, path)
    return fd


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The first bytes of a plain file, `most_bytes` at most. Raises OSError: as `open_plain`, or it cannot be read."""
    fd = open_plain(path)
    try:
        wanted = min(most_bytes, os.fstat(fd).st_size)
        parts: list[bytes] = []
        while wanted > 0 and (part := os.read(fd, wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _no_plain_file(number: int, path: Path) -> OSError:
    return OSError(number, "it is no plain file", str(path))
