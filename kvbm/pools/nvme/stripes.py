"""The files and devices of an NVME pool: found, locked, made, and held to what the pool is for.

A file that another manager holds, that was made for something else or that belongs to nobody is left as it is. A file of ours that is
missing or damaged is made anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import PoolError, PoolFullError, PoolMismatchError
from kvbm.files import FILE_MODE, make_folder
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.file_header import Damaged, FileHeader, FileShape, decode_header, encode_header

LOCK_WAIT_S = 1.0

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLANK_BYTES = 1 << 20  # zeros at the beginning and end of a blank device: file systems, RAID and LVM mark one of them


class Stripe(NamedTuple):
    """A stripe that is there and locked.

    Attributes:
        pool_id: "" where it holds nothing yet and has no header.
    """

    path: Path
    fd: int
    pool_id: str


class StripeFiles:
    """Opens the stripes of one pool, or makes them with all their bytes reserved.

    Args:
        paths: a file or block device each, in the order they were made in.
        shape: what the pool is for.

    Attributes:
        opened: "created": every stripe is new and empty. "reopened": blocks of earlier epochs are there.
        notices: sentences for the operator about what was not as it was left.
    """

    def __init__(self, paths: Sequence[Path], shape: FileShape, checksums: ChecksumRows) -> None:
        self.opened: Literal["created", "reopened"] = "reopened"
        self.notices: list[str] = []
        self._paths, self._shape, self._checksums = paths, shape, checksums

    def open(self) -> list[Stripe]:
        """Every stripe, locked, all of one pool."""
        resolved = [os.path.realpath(path) for path in self._paths]
        if len(set(resolved)) != len(resolved):
            raise PoolError(
                f"NVME pool {':'.join(map(str, self._paths))}: a path is named twice; each stripe takes one of its own in pools.nvme.path"
            )
        while True:
            with ExitStack() as undo:
                stripes = self._try_open(undo)
                if stripes is not None:
                    undo.pop_all()
                    return stripes

    def _try_open(self, undo: ExitStack) -> list[Stripe] | None:
        """The same; None when another manager has made a stripe meanwhile. New ones are made once all others have proved to fit.

        A stripe that is missing or damaged is made anew; its blocks then read as corrupt, those of the others are kept.
        """
        held: list[Stripe | None] = []
        for number, path in enumerate(self._paths):
            with _opening(path):
                stripe = self._reopen(number, path)
            if stripe is not None:
                undo.callback(os.close, stripe.fd)
            held.append(stripe)
        named = [stripe for stripe in held if stripe is not None and stripe.pool_id]
        for stripe in named[1:]:
            if stripe.pool_id != named[0].pool_id:
                raise PoolMismatchError(
                    f"NVME pool {stripe.path}: it is a stripe of pool {stripe.pool_id}, {named[0].path} is one of"
                    f" {named[0].pool_id}; both are left as they are: name the stripes of one pool in pools.nvme.path"
                )
        pool_id = named[0].pool_id if named else str(uuid.uuid4())
        stripes: list[Stripe] = []
        for number, (path, there) in enumerate(zip(self._paths, held, strict=True)):
            if there is not None and there.pool_id:
                stripes.append(there)
                continue
            header = FileHeader(shape=self._shape, pool_id=pool_id, stripe=number)
            with _opening(path):
                made = self._format(there, header) if there is not None else self._create(path, header)
            if made is None:
                return None
            if there is None:
                undo.callback(os.close, made.fd)
                undo.callback(path.unlink, missing_ok=True)
            if named:
                self.notices.append(
                    f"NVME pool {path}: stripe {number} was made anew; the blocks it held read as corrupt"
                )
            stripes.append(made)
        self.opened = "reopened" if named else "created"
        return stripes

    def _reopen(self, number: int, path: Path) -> Stripe | None:
        """The stripe that is there, without a name if it is a blank device. None: there is no file, or it was damaged and has been
        emptied, so that its room serves the new one.
        """
        make_folder(path.parent)
        if not path.exists():
            return None
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise PoolError(
                f"NVME pool {path}: it is no plain file and no block device; set pools.nvme.path to a device, or to a file in a"
                " folder of it"
            )
        if stat.S_ISREG(mode) and path.stat().st_size == 0:
            return None
        is_device = stat.S_ISBLK(mode)
        with ExitStack() as undo:
            fd = _open_locked(path, os.O_RDWR | (os.O_EXCL if is_device else 0))  # refused: mounted, or another's
            undo.callback(os.close, fd)
            if is_device:
                self._require_room(number, path, fd)
                if _is_blank(fd):
                    undo.pop_all()
                    return Stripe(path, fd, "")
            header = self._adopt(number, path, fd)
            if isinstance(header, Damaged):
                self.notices.append(
                    f"NVME pool {path}: {header.why}; its blocks are given up and the stripe starts empty"
                )
                if not is_device:
                    os.ftruncate(fd, 0)
                    return None
                undo.pop_all()
                return Stripe(path, fd, "")
            undo.pop_all()
            return Stripe(path, fd, header.pool_id)

    def _require_room(self, number: int, path: Path, fd: int) -> None:
        device_bytes = os.lseek(fd, 0, os.SEEK_END)
        if device_bytes < stripe_bytes(self._shape, number):
            raise self._full(number, path, device_bytes)

    def _adopt(self, number: int, path: Path, fd: int) -> FileHeader | Damaged:
        """The header of an existing stripe, once it proves to be ours, of our shape, and in its place."""
        page = os.pread(fd, PAGE_BYTES, 0)
        if (
            not any(page)
            and stat.S_ISREG(os.fstat(fd).st_mode)
            and os.fstat(fd).st_size == stripe_bytes(self._shape, number)
        ):
            return Damaged("the file's header is lost")  # no file of anybody else's has exactly this size and begins so
        header = decode_header(path, page, self._checksums)
        if isinstance(header, Damaged):
            return header
        self._require_shape(path, header.shape)
        if header.stripe != number:
            raise PoolMismatchError(
                f"NVME pool {path}: it is stripe {header.stripe} of {len(self._paths)} and is named as stripe {number}; it is left"
                " as it is: put the paths of pools.nvme.path into the order they were made in"
            )
        held_bytes = os.lseek(fd, 0, os.SEEK_END)
        if held_bytes < stripe_bytes(self._shape, number):
            self._reserve(number, path, fd)
            self.notices.append(
                f"NVME pool {path}: the file had {held_bytes} of {stripe_bytes(self._shape, number)} bytes; the blocks that were"
                " cut off read as corrupt"
            )
        return header

    def _require_shape(self, path: Path, held: FileShape) -> None:
        for name in FileShape.__struct_fields__:
            ours, theirs = getattr(self._shape, name), getattr(held, name)
            if ours != theirs:
                raise PoolMismatchError(
                    f"NVME pool {path}: the file was made for {name} {theirs!r}, this manager has {name} {ours!r};"
                    " it is left as it is: move it away or set another pools.nvme.path"
                )

    def _create(self, path: Path, header: FileHeader) -> Stripe | None:
        """A new file, locked; None when another manager has made one meanwhile.

        It is made under another name and renamed when it is whole, so under its own name it is never half made.
        """
        building = path.with_name(path.name + ".creating")
        with ExitStack() as undo:
            fd = _open_locked(building, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            undo.callback(os.close, fd)
            undo.callback(building.unlink, missing_ok=True)
            if path.exists() and path.stat().st_size > 0:
                return None
            os.ftruncate(fd, 0)  # what a crash left of an earlier attempt
            self._reserve(header.stripe, path, fd)
            _write_header(path, fd, header, self._checksums)
            building.rename(path)
            _sync_folder(path.parent)
            undo.pop_all()
        return Stripe(path, fd, header.pool_id)

    def _format(self, blank: Stripe, header: FileHeader) -> Stripe:
        """A device with nothing on it becomes a stripe."""
        _write_header(blank.path, blank.fd, header, self._checksums)
        return blank._replace(pool_id=header.pool_id)

    def _reserve(self, number: int, path: Path, fd: int) -> None:
        """Reserve every byte, so that no later write can lack room. Raises PoolFullError."""
        room = os.fstatvfs(fd)
        missing_bytes = stripe_bytes(self._shape, number) - os.fstat(fd).st_blocks * 512
        if missing_bytes > room.f_bavail * room.f_frsize:
            raise self._full(number, path, room.f_bavail * room.f_frsize)
        try:
            os.posix_fallocate(fd, 0, stripe_bytes(self._shape, number))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._full(number, path, room.f_bavail * room.f_frsize) from error

    def _full(self, number: int, path: Path, free_bytes: int) -> PoolFullError:
        return PoolFullError(
            f"NVME pool {path}: {stripe_bytes(self._shape, number)} bytes wanted for {_stripe_slots(self._shape, number)} slots of {stride_of(self._shape.block_bytes)} bytes,"
            f" {free_bytes} bytes free; lower pools.nvme.slots or capacity_bytes, free the disk, or set another"
            " pools.nvme.path",
            stripe_bytes(self._shape, number),
            free_bytes,
        )


def stripe_bytes(shape: FileShape, stripe: int) -> int:
    """Bytes of a stripe: its header and its slots."""
    return PAGE_BYTES + _stripe_slots(shape, stripe) * stride_of(shape.block_bytes)


def _stripe_slots(shape: FileShape, stripe: int) -> int:
    return -(-max(0, shape.slots - stripe) // shape.stripes)


def _write_header(path: Path, fd: int, header: FileHeader, checksums: ChecksumRows) -> None:
    view, at = memoryview(encode_header(path, header, checksums)), 0
    while at < len(view):
        at += os.pwrite(fd, view[at:], at)
    os.fsync(fd)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """What the system refuses is a PoolError."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"NVME pool {path}: it cannot be opened ({error.strerror}); check pools.nvme.path") from error


def _is_blank(fd: int) -> bool:
    """Whether a device bears nobody's mark: zeros where file systems, partitions, RAID and LVM have theirs."""
    device_bytes = os.lseek(fd, 0, os.SEEK_END)
    begin = os.pread(fd, _BLANK_BYTES, 0)
    end = os.pread(fd, _BLANK_BYTES, max(0, device_bytes - _BLANK_BYTES))
    return not any(begin) and not any(end)


def _open_locked(path: Path, flags: int) -> int:
    """Open a file and hold its lock. Raises PoolError: another manager does.

    The lock of a killed process goes with the last transfer its device still had, which is soon, but not at once.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        fd = os.open(
            path, flags | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE
        )  # KV tells what was asked: nobody else reads it
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):  # put there after it was looked at
            os.close(fd)
            raise PoolError(f"NVME pool {path}: it is no plain file and no block device; remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError as error:
            os.close(fd)
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise PoolError(
                f"NVME pool {path}: the file is in use by another manager; stop it or set another pools.nvme.path"
            ) from error
        os.close(
            fd
        )  # renamed or removed between opening and locking: another manager has just made the pool; look again


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
