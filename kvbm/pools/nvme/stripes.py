"""The files and devices of an NVME pool: found, locked, made, and brought to the shape the pool is wanted in.

A file of ours that is missing or damaged is made anew. One that only has more or fewer slots than are wanted gets the
wanted ones, and keeps its blocks. One that was made for other blocks, or is nobody's, is set aside under another name.
What another manager holds, and a device with anything on it that is not ours, is left as it is.

A stripe changes its size in steps that may end at any place: its room is reserved, its new tail is written, then its
header, then what is too much is cut off. Each of them leaves a header that fits the tail, in the first page or, where
that is torn, in the copy at the end.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import PoolError, PoolFullError, PoolMismatchError
from kvbm.files import FILE_MODE, make_folder
from kvbm.pools.nvme.aside import DEFAULT_ASIDE_BYTES, Aside, sync_folder
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.file_header import (
    Damaged,
    FileHeader,
    FileShape,
    decode_header,
    encode_header,
    slots_of_stripe,
)
from kvbm.pools.nvme.generations import (
    RECORD_BYTES,
    RECORDS_AT,
    TAIL_BYTES,
    GenerationRecord,
    encode_record,
    new_record,
    newest_record,
)

LOCK_WAIT_S = 1.0

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLANK_BYTES = 1 << 20  # zeros at the beginning and end of a blank device: file systems, RAID and LVM mark one of them


class Stripe(NamedTuple):
    """A stripe that is there and locked.

    Attributes:
        header: None where it holds nothing yet.
    """

    path: Path
    fd: int
    header: FileHeader | None

    @property
    def is_device(self) -> bool:
        """Whether it is a block device, whose size is what it is."""
        return stat.S_ISBLK(os.fstat(self.fd).st_mode)


class OpenedStripes(NamedTuple):
    """The stripes of a pool.

    Attributes:
        shape: what they hold; fewer slots than were wanted where a disk lacks the room to grow.
        room_slots: slots that the pool had and whose blocks have not been moved yet; 0: none beyond those of the shape.
        record: what is known of its generations; None: its first stripe has no tail.
    """

    stripes: list[Stripe]
    shape: FileShape
    room_slots: int
    record: GenerationRecord | None


class StripeFiles:
    """Opens the stripes of one pool, or makes them with all their bytes reserved.

    Args:
        paths: a file or block device each, in the order they were made in.
        shape: what the pool is for.
        aside_bytes: room for files that were set aside.

    Attributes:
        opened: "created": every stripe is new and empty. "reopened": blocks of earlier epochs are there.
        notices: sentences for the operator about what was not as it was left.
    """

    def __init__(
        self, paths: Sequence[Path], shape: FileShape, checksums: ChecksumRows, aside_bytes: int = DEFAULT_ASIDE_BYTES
    ) -> None:
        self.opened: Literal["created", "reopened"] = "reopened"
        self.notices: list[str] = []
        self._paths, self._shape, self._checksums = paths, shape, checksums
        self._asides = [Aside(path, aside_bytes) for path in paths]

    def open(self) -> OpenedStripes:
        """Every stripe, locked, all of one pool."""
        resolved = [os.path.realpath(path) for path in self._paths]
        if len(set(resolved)) != len(resolved):
            raise PoolError(
                f"NVME pool {':'.join(map(str, self._paths))}: a path is named twice; each stripe takes one of its own "
                "in pools.nvme.path"
            )
        while True:
            with ExitStack() as undo:
                opened = self._try_open(undo)
                if opened is not None:
                    undo.pop_all()
                    return opened

    def _try_open(self, undo: ExitStack) -> OpenedStripes | None:
        """The same;

        None when another manager has made a stripe meanwhile. New ones are made once all others have proved to fit.

        A stripe that is missing or damaged is made anew; its blocks then read as corrupt, those of the others are kept.
        """
        held: list[Stripe | None] = []
        for number, path in enumerate(self._paths):
            with _opening(path):
                stripe = self._reopen(number, path)
            if stripe is not None:
                undo.callback(os.close, stripe.fd)
            held.append(stripe)
        named = [(one, one.header) for one in held if one is not None and one.header is not None]
        for stripe, header in named[1:]:
            if header.pool_id != named[0][1].pool_id:
                raise PoolMismatchError(
                    f"NVME pool {stripe.path}: it is a stripe of pool {header.pool_id}, {named[0][0].path} is one of"
                    f" {named[0][1].pool_id}; both are left as they are: name the stripes of one pool in "
                    "pools.nvme.path"
                )
        pool_id = named[0][1].pool_id if named else str(uuid.uuid4())
        shape, room_slots = self._settled(named)
        record: GenerationRecord | None = None
        stripes: list[Stripe] = []
        for number, (path, there) in enumerate(zip(self._paths, held, strict=True)):
            header = FileHeader(shape=shape, pool_id=pool_id, stripe=number, has_tail=True, room_slots=room_slots)
            with _opening(path):
                if there is not None and there.header is not None:
                    made: Stripe | None = self._resized(there, there.header, header)
                elif there is not None:
                    made = self._format(there, header)
                else:
                    made = self._create(path, header)
            if made is None or made.header is None:
                return None
            if there is None:
                undo.callback(os.close, made.fd)
                undo.callback(path.unlink, missing_ok=True)
            if named and (there is None or there.header is None):
                self.notices.append(
                    f"NVME pool {path}: stripe {number} was made anew; the blocks it held read as corrupt"
                )
            if not number and made.header.has_tail:
                with _opening(path):
                    record = self._record_of(made, made.header)
            stripes.append(made)
        self.opened = "reopened" if named else "created"
        return OpenedStripes(stripes, shape, room_slots, record)

    # -- what is there ------------------------------------------------------------------------------------------------

    def _reopen(self, number: int, path: Path) -> Stripe | None:
        """The stripe that is there, without a header if it is a blank device or was given up.

        None: there is no file any more, or one that has been emptied, so that its room serves the new one.
        """
        make_folder(path.parent)
        if not path.exists():
            return None
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise PoolError(
                f"NVME pool {path}: it is no plain file and no block device; set pools.nvme.path to a device, or to a "
                "file in a"
                " folder of it"
            )
        if stat.S_ISREG(mode) and path.stat().st_size == 0:
            return None
        is_device = stat.S_ISBLK(mode)
        with ExitStack() as undo:
            fd = _open_with_lock(path, os.O_RDWR | (os.O_EXCL if is_device else 0))  # refused: mounted, or another's
            undo.callback(os.close, fd)
            if is_device:
                self._require_room(number, path, fd)
                if _is_blank(fd):
                    undo.pop_all()
                    return Stripe(path, fd, None)
            found = self._adopt(number, path, fd)
            if isinstance(found, FileHeader):
                undo.pop_all()
                return Stripe(path, fd, found)
            if is_device:
                self.notices.append(
                    f"NVME pool {path}: {found.why}; its blocks are given up and the stripe starts empty"
                )
                undo.pop_all()
                return Stripe(path, fd, None)
            self._give_up(number, path, fd, found)
            return None

    def _give_up(self, number: int, path: Path, fd: int, found: Damaged | _Other) -> None:
        """A file that cannot be used makes room for a new one: it is set aside, or emptied where nothing of it is worth
        that.
        """
        kept = ""
        if isinstance(found, _Other) and found.may_stay:
            kept = self._asides[number].take(path, fd, found.is_ours)
        if kept:
            self.notices.append(f"NVME pool {path}: {found.why}; it is set aside as {kept} and the stripe starts empty")
            return
        if isinstance(found, _Other) and not found.is_ours:
            raise PoolError(
                f"NVME pool {path}: {found.why}, and there is no room to set it aside (pools.nvme.aside_bytes); move "
                "it away or set"
                " another pools.nvme.path"
            )
        self.notices.append(f"NVME pool {path}: {found.why}; its blocks are given up and the stripe starts empty")
        os.ftruncate(fd, 0)

    def _require_room(self, number: int, path: Path, fd: int) -> None:
        device_bytes = os.lseek(fd, 0, os.SEEK_END)
        if device_bytes < stripe_bytes(self._shape, number):
            raise self._full(stripe_bytes(self._shape, number), number, path, device_bytes)

    def _adopt(self, number: int, path: Path, fd: int) -> FileHeader | Damaged | _Other:
        """The header of an existing stripe, once it proves to be ours, for our blocks, and in its place.

        Raises: PoolError: it is a device with anything else on it. PoolMismatchError: it has another place.
        """
        page, size = os.pread(fd, PAGE_BYTES, 0), os.fstat(fd).st_size
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        try:
            found: FileHeader | Damaged | _Other = decode_header(path, page, self._checksums)
        except PoolError as error:
            if not is_file:
                raise
            is_lost = not any(page) and size in self._sizes(number)  # nobody else's has exactly this size and begins so
            found = Damaged("the file's header is lost") if is_lost else _Other(_reason(error), is_ours=False)
        if not isinstance(found, FileHeader) and is_file:
            copy = self._copied_header(number, path, fd, size)
            if copy is not None:
                self.notices.append(f"NVME pool {path}: the header was damaged and is written anew from its copy")
                _write_page(fd, 0, encode_header(path, copy, self._checksums))
                found = copy
        if not isinstance(found, FileHeader):
            return found
        if why := self._difference(found.shape):
            if not is_file and found.shape.instance != self._shape.instance:
                raise PoolMismatchError(
                    f"NVME pool {path}: the device is that of instance {found.shape.instance!r}, this manager is"
                    f" {self._shape.instance!r}; it is left as it is: set another pools.nvme.path"
                )
            return _Other(why, is_ours=True, may_stay=found.shape.encrypted or not self._shape.encrypted)
        if found.stripe != number:
            raise PoolMismatchError(
                f"NVME pool {path}: it is stripe {found.stripe} of {len(self._paths)} and is named as stripe {number}; "
                "it is left"
                " as it is: put the paths of pools.nvme.path into the order they were made in"
            )
        return found

    def _sizes(self, number: int) -> tuple[int, int]:
        wanted = stripe_bytes(self._shape, number)
        return wanted, wanted + TAIL_BYTES

    def _copied_header(self, number: int, path: Path, fd: int, size: int) -> FileHeader | None:
        """The header as the tail at the end of a file has it; None: there is none that fits the file."""
        at = size - TAIL_BYTES
        if at < PAGE_BYTES or at % PAGE_BYTES:
            return None
        try:
            copy = decode_header(path, os.pread(fd, PAGE_BYTES, at), self._checksums)
        except PoolError:
            return None
        fits = isinstance(copy, FileHeader) and copy.has_tail and copy.stripe == number and copy.tail_at == at
        return copy if fits and isinstance(copy, FileHeader) else None

    def _difference(self, held: FileShape) -> str:
        """In what blocks there differ from ours; "" where they mean the same."""
        for name in FileShape.__struct_fields__:
            ours, theirs = getattr(self._shape, name), getattr(held, name)
            if ours != theirs and name != "slots":
                return f"the file was made for {name} {theirs!r}, this manager has {name} {ours!r}"
        return ""

    def _record_of(self, stripe: Stripe, header: FileHeader) -> GenerationRecord:
        """What is known of the pool's generations.

        Where that is lost, nothing that is there now is brought back by a scan.
        """
        copies = [os.pread(stripe.fd, RECORD_BYTES, header.tail_at + at) for at in RECORDS_AT]
        record = newest_record(copies, self._checksums)
        if record is None:
            record = new_record()
            self.notices.append(
                f"NVME pool {stripe.path}: the record of what was cleared is lost; a scan brings back nothing that was "
                "written before"
            )
        if any(copy != encode_record(record, self._checksums) for copy in copies):
            write_record(stripe.fd, header.tail_at, record, self._checksums)
        return record

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _settled(self, named: Sequence[tuple[Stripe, FileHeader]]) -> tuple[FileShape, int]:
        """What the pool is to hold from now on, and the slots of before whose blocks have not been moved yet.

        A disk without room to grow keeps the pool at the size it has.
        """
        wanted = self._shape
        if not named:
            return wanted, 0
        sizes = [header.shape.slots for _, header in named]
        least, room = min(sizes), max(max(header.shape.slots, header.room_slots) for _, header in named)
        if wanted.slots > least:
            for stripe, header in named:
                try:
                    grown = msgspec.structs.replace(header, shape=wanted, has_tail=True, room_slots=room)
                    self._reserve(grown.file_bytes, header.stripe, stripe)
                except PoolFullError as error:
                    wanted = msgspec.structs.replace(wanted, slots=least)
                    self.notices.append(f"{error}; the pool stays at {least} slots")
                    break
        return wanted, room if room > wanted.slots else 0

    def _resized(self, stripe: Stripe, old: FileHeader, wanted: FileHeader) -> Stripe:
        """A stripe with the size and the tail it is to have, as far as its device has room for a tail."""
        fits = True
        try:
            self._reserve(wanted.file_bytes, old.stripe, stripe)
        except PoolFullError:
            fits = False
        if not fits:
            wanted = msgspec.structs.replace(wanted, has_tail=False)
            self._reserve(wanted.file_bytes, old.stripe, stripe)
            self.notices.append(
                f"NVME pool {stripe.path}: there is no room for the {TAIL_BYTES} bytes that say what was cleared; "
                "without them no scan"
                " of slots brings blocks back"
            )
        if old == wanted:
            _cut_end(stripe.fd, old)
            return stripe
        copies = [os.pread(stripe.fd, RECORD_BYTES, old.tail_at + at) for at in RECORDS_AT] if old.has_tail else []
        record = newest_record(copies, self._checksums) or new_record()
        rewrite(stripe.path, stripe.fd, wanted, record, self._checksums)
        return stripe._replace(header=wanted)

    # -- new ones -----------------------------------------------------------------------------------------------------

    def _create(self, path: Path, header: FileHeader) -> Stripe | None:
        """A new file, locked; None when another manager has made one meanwhile.

        It is made under another name and renamed when it is whole, so under its own name it is never half made.
        """
        building = path.with_name(path.name + ".creating")
        with ExitStack() as undo:
            fd = _open_with_lock(building, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            undo.callback(os.close, fd)
            undo.callback(building.unlink, missing_ok=True)
            if path.exists() and path.stat().st_size > 0:
                return None
            os.ftruncate(fd, 0)  # what a crash left of an earlier attempt
            stripe = Stripe(path, fd, header)
            while True:
                try:
                    self._reserve(header.file_bytes, header.stripe, stripe)
                    break
                except PoolFullError:
                    if not self._asides[header.stripe].give_up_oldest():
                        raise
            rewrite(path, fd, header, new_record(), self._checksums)
            building.rename(path)
            sync_folder(path.parent)
            undo.pop_all()
        return stripe

    def _format(self, blank: Stripe, header: FileHeader) -> Stripe:
        """A device with nothing on it becomes a stripe."""
        if os.lseek(blank.fd, 0, os.SEEK_END) < header.file_bytes:
            header = msgspec.structs.replace(header, has_tail=False)
        rewrite(blank.path, blank.fd, header, new_record(), self._checksums)
        return blank._replace(header=header)

    def _reserve(self, wanted_bytes: int, number: int, stripe: Stripe) -> None:
        """Reserve every byte, so that no later write can lack room. Raises PoolFullError."""
        path, fd = stripe.path, stripe.fd
        held_bytes = os.lseek(fd, 0, os.SEEK_END)
        if stripe.is_device:
            if held_bytes < wanted_bytes:
                raise self._full(wanted_bytes, number, path, held_bytes)
            return
        if stripe.header is not None and 0 < held_bytes < stripe.header.tail_at:
            self.notices.append(
                f"NVME pool {path}: the file had {held_bytes} of {stripe.header.file_bytes} bytes; the blocks that were"
                " cut off read as corrupt"
            )
        if held_bytes >= wanted_bytes:
            return
        room = os.fstatvfs(fd)
        missing_bytes = wanted_bytes - os.fstat(fd).st_blocks * 512
        if missing_bytes > room.f_bavail * room.f_frsize:
            raise self._full(wanted_bytes, number, path, room.f_bavail * room.f_frsize)
        try:
            os.posix_fallocate(fd, 0, wanted_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._full(wanted_bytes, number, path, room.f_bavail * room.f_frsize) from error

    def _full(self, wanted_bytes: int, number: int, path: Path, free_bytes: int) -> PoolFullError:
        slots = slots_of_stripe(self._shape.slots, number, self._shape.stripes)
        return PoolFullError(
            f"NVME pool {path}: {wanted_bytes} bytes wanted for {slots} slots of {stride_of(self._shape.block_bytes)} "
            "bytes,"
            f" {free_bytes} bytes free; lower pools.nvme.slots or capacity_bytes, free the disk, or set another"
            " pools.nvme.path",
            wanted_bytes,
            free_bytes,
        )


class _Other(NamedTuple):
    """What is no pool for our blocks.

    Attributes:
        is_ours: whether kvbm has made it.
        may_stay: whether it may be set aside.
    """

    why: str
    is_ours: bool
    may_stay: bool = True


def stripe_bytes(shape: FileShape, stripe: int) -> int:
    """Bytes of a stripe without its tail: its header and its slots."""
    return PAGE_BYTES + slots_of_stripe(shape.slots, stripe, shape.stripes) * stride_of(shape.block_bytes)


def rewrite(path: Path, fd: int, header: FileHeader, record: GenerationRecord, checksums: ChecksumRows) -> None:
    """Give a stripe, whose room is reserved, its tail, then its header, then its end. Raises OSError."""
    page = encode_header(path, header, checksums)
    if header.has_tail:
        _write_page(fd, header.tail_at, page)
        write_record(fd, header.tail_at, record, checksums)
    _write_page(fd, 0, page)
    _cut_end(fd, header)


def _cut_end(fd: int, header: FileHeader) -> None:
    """What lies behind a stripe's tail goes: another tail, which a step that did not end has left, would pass for its
    own. Raises OSError.
    """
    if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size > header.file_bytes:
        os.ftruncate(fd, header.file_bytes)
        os.fsync(fd)


def write_record(fd: int, tail_at: int, record: GenerationRecord, checksums: ChecksumRows) -> None:
    """Make a record durable, one copy after the other, so that one is always whole. Raises OSError."""
    data = encode_record(record, checksums)
    for at in RECORDS_AT:
        _write_page(fd, tail_at + at, data)


def _write_page(fd: int, position: int, data: bytes) -> None:
    """Write whole pages and bring them to the device, whether the file is open past the page cache or not."""
    with mmap.mmap(-1, len(data)) as room:
        room[:] = data
        at = 0
        with memoryview(room) as view:
            while at < len(data):
                with view[at:] as rest:
                    at += os.pwrite(fd, rest, position + at)
    os.fsync(fd)


def _reason(error: PoolError) -> str:
    """What an error says of a file, without its name and what to do about it."""
    return str(error).split(": ", 1)[-1].split(";")[0]


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


def _open_with_lock(path: Path, flags: int) -> int:
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
