"""NVME: slots in preallocated files or block devices that outlive the process, striped over them.

All integers are little-endian. Slot s lies in stripe s % n of n; `block_io.py` draws how slots follow each other there.

    stripe  0  4096 bytes of header; then the slots
    header  0  8 bytes  magic "KVBMPOOL"
            8  4        version
           12  4        json_bytes
           16  …        JSON: what the stripe was made for, then zeros
         4092  4        CRC-32C of the 4,092 bytes above

A block is proved by its own header, so a slot that was torn, swapped or never written reads as CORRUPT, whoever reads
it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import structlog

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import LayoutError, PoolError, PoolFullError, PoolMismatchError
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockEngine, OpenEngine, stride_of
from kvbm.pools.nvme.hints import SlotHints
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots

log = structlog.get_logger()

MAGIC = b"KVBMPOOL"
VERSION = 2
LOCK_WAIT_S = 1.0
CLOSE_S = 5.0  # a device that takes longer to end what it has is given up

_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_PROVED_BYTES = PAGE_BYTES - _CRC.size
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLANK_BYTES = (
    1 << 20
)  # of a block device that must be zeros at its beginning and end: file systems, RAID and LVM mark one of them


class FileShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool was made for. A file with another shape is not ours to read or to overwrite.

    Attributes:
        slots: of the whole pool.
        stripes: files and devices it is made of.
    """

    slots: int
    block_bytes: int
    model: str
    revision: str
    kv_dtype: str
    block_tokens: int
    layout: str
    kv_group: int
    ranks: str
    instance: str
    stripes: int = 1


class FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of a stripe: its shape, the name the pool got when it was made, and which of its stripes this is, from 0."""

    shape: FileShape
    pool_id: str
    stripe: int = 0


class Damaged(NamedTuple):
    """A stripe of ours whose header is not whole."""

    why: str


class _Stripe(NamedTuple):
    """A stripe that is there and locked.

    Attributes:
        pool_id: "" where it holds nothing yet and has no header.
    """

    path: Path
    fd: int
    pool_id: str


class NvmePool:
    """Slots of files or devices, each block beside its proof, verified at each read.

    Bytes go past the page cache where the file system can; they survive the process, and what power loss takes is found by the
    block's checksum. The engine reads before it writes: a request waits for reads only.

    Attributes:
        opened: "created": every stripe is new and empty, whatever a journal says. "reopened": blocks of earlier epochs are
            there.
        pool_id: name the pool got when it was made.
        notice: for the operator when something was not as it was left or as it was wanted, else "".
        io: "io_uring" or "threads".
        direct: whether bytes go past the page cache.
        hints: for the other instances of the pod, where it has that reach; a `PodFolder` closes them.
    """

    hints: SlotHints | None
    memory: np.ndarray | None = None

    def __init__(
        self,
        paths: Sequence[Path],
        slots: int,
        block_bytes: int,
        shape: Namespace,
        instance: InstanceId,
        checksums: ChecksumRows,
        open_engine: OpenEngine,
        reach: Reach = Reach.INSTANCE,
        io: str = "auto",
        direct: str = "auto",
        depth: int = 32,
        offload_share: float = 0.25,
    ) -> None:
        """Open the stripes, or make them with all their bytes reserved. They stay locked until `close`.

        Args:
            paths: a file or block device each, in the order they were made in.
            shape: any namespace of the pool; LoRA, tenant and hash scheme may differ between blocks of one file.
            open_engine: what moves the blocks.
            io, direct, depth, offload_share: as `NvmeSettings` has them.
        Raises: LayoutError: below 1 slot or byte, or no path. PoolMismatchError: a file was made for something else; it is left
            as it is. PoolFullError: a disk lacks the room; nothing is left behind. PoolError: a file is in use,
            foreign, of another place among the stripes, or cannot be opened; or `io` or `direct` asks for what the machine has not.
        """
        check_size("NVME", slots, block_bytes)
        if not paths:
            raise LayoutError("NVME pool: no path; it takes at least one file or block device")
        self.tier = Tier.NVME
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach
        self.paths = tuple(paths)
        self.opened: Literal["created", "reopened"] = "reopened"
        self._notices: list[str] = []
        self._checksum_rows = checksums
        self._stride = stride_of(block_bytes)
        self._calls = 0
        self._idle = threading.Condition()
        self._engine: BlockEngine | None = None
        self._given_up: BlockEngine | None = None
        self._wanted = shape_of(shape, block_bytes, slots, instance, len(paths))
        with ExitStack() as undo:
            stripes = self._open_stripes()
            for stripe in stripes:
                undo.callback(os.close, stripe.fd)
            self._fds = tuple(stripe.fd for stripe in stripes)
            self.pool_id = stripes[0].pool_id
            self.direct = self._set_direct(direct)
            self._engine = self._started(open_engine, io, depth, offload_share)
            self.hints = None
            if reach == Reach.POD:
                self.hints = SlotHints(self.path, slots, self.opened == "reopened")
            undo.pop_all()

    @property
    def path(self) -> Path:
        """The first stripe."""
        return self.paths[0]

    @property
    def notice(self) -> str:
        """Sentences for the operator, "" for none."""
        return "; ".join(self._notices)

    @property
    def io(self) -> str:
        """What moves the bytes: "io_uring" or "threads"."""
        return self._engine.io if self._engine is not None else ""

    @property
    def file_bytes(self) -> int:
        """Bytes all stripes take: their headers and every slot."""
        return sum(self._bytes_of(stripe) for stripe in range(len(self.paths)))

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Put blocks into slots. Raises PoolError: closed, or the device refused; the slots then prove nothing."""
        count = check_proof("NVME", rows, proof, self.block_bytes, at)
        indexes = check_slots("NVME", slots, count, self.slots)
        if count == 0:
            return
        with self._using() as engine:
            if engine is None:
                raise PoolError(f"{self}: it is closed; {count} blocks were not written")
            sums = np.ascontiguousarray(proof.checksums, dtype=np.uint32)
            errors = engine.write(
                indexes, rows, _row_numbers(at, count), proof.namespace, proof.hashes, proof.epoch, sums
            )
        refused = errors[errors != 0]
        if self.hints is not None and not len(refused):
            self.hints.note(slots, proof.namespace, proof.hashes)
        if len(refused):
            why = errno.errorcode.get(int(refused[0]), "")
            raise PoolError(
                f"{self}: the device refused {len(refused)} blocks of {count}: {os.strerror(int(refused[0]))} ({why});"
                " check its room and health"
            )

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows from slots and hold each to its header, its hash and its checksum."""
        count = check_rows("NVME", rows, hashes, self.block_bytes, at)
        indexes = check_slots("NVME", slots, count, self.slots)
        with self._using() as engine:
            if engine is None or count == 0:
                return all_failed(count)
            outcomes, sums = engine.read(indexes, rows, _row_numbers(at, count), namespace, hashes)
        return ReadResult([_OUTCOMES[outcome] for outcome in outcomes.tolist()], sums)

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """Raises LayoutError: there is no `memory` to compute them over."""
        raise LayoutError(f"{self}: it has no memory in reach of the CPU; only `read` gets at its {len(slots)} blocks")

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Raises LayoutError: nobody can have put bytes into it but `write`, which keeps proofs itself."""
        raise LayoutError(
            f"{self}: it has no memory in reach of the CPU; `write` puts {len(slots)} blocks and their proofs into it"
        )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Refuse new calls, and close and unlock the files once calls under way are over. Idempotent.

        What the device has not ended by then keeps its memory and its files, and these their locks, until the process is gone: a late
        write must not meet a slot that somebody else uses.
        """
        with self._idle:
            engine, self._engine = self._engine, None
        if engine is None:
            return
        is_over = engine.close(timeout_s)
        with self._idle:
            is_over = self._idle.wait_for(lambda: self._calls == 0, timeout_s) and is_over
        if is_over:
            for fd in self._fds:
                fcntl.flock(fd, fcntl.LOCK_UN)  # at once, whatever else in the kernel still knows the file
                os.close(fd)
            return
        self._notices.append(
            f"{self}: the device has not ended every transfer within {timeout_s:g} s; its files stay open and locked until this"
            " process ends: check the device's health"
        )
        log.warning("pool.left_open", tier="NVME", paths=[str(path) for path in self.paths], waited_s=timeout_s)

    def disown(self) -> None:
        """This process is a forked child: let go of the files, which would stay locked for as long as it lives. No transfer ends here."""
        self._idle = threading.Condition()
        if self._engine is None:
            return
        self._given_up, self._engine = self._engine, None  # whatever it has belongs to threads that are not here
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)

    def __str__(self) -> str:
        return f"NVME pool {':'.join(map(str, self.paths))}"

    @contextmanager
    def _using(self) -> Iterator[BlockEngine | None]:
        """The engine, its files kept open while used; None once closed. A number used later could be another file's."""
        with self._idle:
            engine = self._engine
            self._calls += 1
        try:
            yield engine
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _set_direct(self, wanted: str) -> bool:
        """Let bytes go past the page cache where that is wanted and can be. Raises PoolError: "on", and it cannot."""
        if wanted == "off":
            return False
        for path, fd in zip(self.paths, self._fds, strict=True):
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    os.preadv(fd, [page], 0)
            except OSError as error:
                if wanted == "on":
                    raise PoolError(
                        f"NVME pool {path}: its file system refuses direct transfers of {PAGE_BYTES} bytes ({error.strerror});"
                        " set pools.nvme.direct to auto, or put the pool on a local device"
                    ) from error
                for other in self._fds:
                    fcntl.fcntl(other, fcntl.F_SETFL, fcntl.fcntl(other, fcntl.F_GETFL) & ~os.O_DIRECT)
                self._notices.append(
                    f"NVME pool {path}: its file system refuses direct transfers ({error.strerror}); bytes go through the page cache"
                )
                return False
        return True

    def _started(self, open_engine: OpenEngine, io: str, depth: int, offload_share: float) -> BlockEngine:
        try:
            engine = open_engine(self._fds, self.slots, self.block_bytes, io, self.direct, depth, offload_share)
        except OSError as error:
            raise PoolError(
                f"{self}: pools.nvme.io is {io}, and the kernel refuses ({error.strerror}); set it to auto or threads, or allow"
                " io_uring (sysctl kernel.io_uring_disabled, the container's seccomp profile)"
            ) from error
        if engine.refusal:
            self._notices.append(f"{self}: io_uring is refused ({engine.refusal}); threads move its bytes")
        return engine

    # -- the stripes --------------------------------------------------------------------------------------------------

    def _open_stripes(self) -> list[_Stripe]:
        """Every stripe, locked, all of one pool."""
        resolved = [os.path.realpath(path) for path in self.paths]
        if len(set(resolved)) != len(resolved):
            raise PoolError(f"{self}: a path is named twice; each stripe takes one of its own in pools.nvme.path")
        while True:
            with ExitStack() as undo:
                stripes = self._try_stripes(undo)
                if stripes is not None:
                    undo.pop_all()
                    return stripes

    def _try_stripes(self, undo: ExitStack) -> list[_Stripe] | None:
        """The same; None when another manager has made a stripe meanwhile. New ones are made once all others have proved to fit.

        A stripe that is missing or damaged is made anew; its blocks then read as corrupt, those of the others are kept.
        """
        held: list[_Stripe | None] = []
        for number, path in enumerate(self.paths):
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
        stripes: list[_Stripe] = []
        for number, (path, there) in enumerate(zip(self.paths, held, strict=True)):
            if there is not None and there.pool_id:
                stripes.append(there)
                continue
            header = FileHeader(shape=self._wanted, pool_id=pool_id, stripe=number)
            with _opening(path):
                made = self._format(there, header) if there is not None else self._create(path, header)
            if made is None:
                return None
            if there is None:
                undo.callback(os.close, made.fd)
                undo.callback(path.unlink, missing_ok=True)
            if named:
                self._notices.append(
                    f"NVME pool {path}: stripe {number} was made anew; the blocks it held read as corrupt"
                )
            stripes.append(made)
        self.opened = "reopened" if named else "created"
        return stripes

    def _bytes_of(self, stripe: int) -> int:
        return PAGE_BYTES + self._slots_of(stripe) * self._stride

    def _slots_of(self, stripe: int) -> int:
        return -(-max(0, self.slots - stripe) // len(self.paths))

    def _reopen(self, number: int, path: Path) -> _Stripe | None:
        """The stripe that is there, without a name if it is a blank device. None: there is no file, or it was damaged and has been
        emptied, so that its room serves the new one.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
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
                    return _Stripe(path, fd, "")
            header = self._adopt(number, path, fd)
            if isinstance(header, Damaged):
                self._notices.append(
                    f"NVME pool {path}: {header.why}; its blocks are given up and the stripe starts empty"
                )
                if not is_device:
                    os.ftruncate(fd, 0)
                    return None
                undo.pop_all()
                return _Stripe(path, fd, "")
            undo.pop_all()
            return _Stripe(path, fd, header.pool_id)

    def _require_room(self, number: int, path: Path, fd: int) -> None:
        device_bytes = os.lseek(fd, 0, os.SEEK_END)
        if device_bytes < self._bytes_of(number):
            raise self._full(number, path, device_bytes)

    def _adopt(self, number: int, path: Path, fd: int) -> FileHeader | Damaged:
        """The header of an existing stripe, once it proves to be ours, of our shape, and in its place."""
        page = os.pread(fd, PAGE_BYTES, 0)
        if not any(page) and stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size == self._bytes_of(number):
            return Damaged("the file's header is lost")  # no file of anybody else's has exactly this size and begins so
        header = decode_header(path, page, self._checksum_rows)
        if isinstance(header, Damaged):
            return header
        self._require_shape(path, header.shape)
        if header.stripe != number:
            raise PoolMismatchError(
                f"NVME pool {path}: it is stripe {header.stripe} of {len(self.paths)} and is named as stripe {number}; it is left"
                " as it is: put the paths of pools.nvme.path into the order they were made in"
            )
        held_bytes = os.lseek(fd, 0, os.SEEK_END)
        if held_bytes < self._bytes_of(number):
            self._reserve(number, path, fd)
            self._notices.append(
                f"NVME pool {path}: the file had {held_bytes} of {self._bytes_of(number)} bytes; the blocks that were"
                " cut off read as corrupt"
            )
        return header

    def _require_shape(self, path: Path, held: FileShape) -> None:
        for name in FileShape.__struct_fields__:
            ours, theirs = getattr(self._wanted, name), getattr(held, name)
            if ours != theirs:
                raise PoolMismatchError(
                    f"NVME pool {path}: the file was made for {name} {theirs!r}, this manager has {name} {ours!r};"
                    " it is left as it is: move it away or set another pools.nvme.path"
                )

    def _create(self, path: Path, header: FileHeader) -> _Stripe | None:
        """A new file, locked; None when another manager has made one meanwhile.

        It is made under another name and renamed when it is whole, so under its own name it is never half made.
        """
        building = path.with_name(path.name + ".creating")
        with ExitStack() as undo:
            fd = _open_locked(building, os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, fd)
            undo.callback(building.unlink, missing_ok=True)
            if path.exists() and path.stat().st_size > 0:
                return None
            os.ftruncate(fd, 0)  # what a crash left of an earlier attempt
            self._reserve(header.stripe, path, fd)
            self._write_header(path, fd, header)
            building.rename(path)
            _sync_folder(path.parent)
            undo.pop_all()
        return _Stripe(path, fd, header.pool_id)

    def _format(self, blank: _Stripe, header: FileHeader) -> _Stripe:
        """A device with nothing on it becomes a stripe."""
        self._write_header(blank.path, blank.fd, header)
        return blank._replace(pool_id=header.pool_id)

    def _reserve(self, number: int, path: Path, fd: int) -> None:
        """Reserve every byte, so that no later write can lack room. Raises PoolFullError."""
        room = os.fstatvfs(fd)
        missing_bytes = self._bytes_of(number) - os.fstat(fd).st_blocks * 512
        if missing_bytes > room.f_bavail * room.f_frsize:
            raise self._full(number, path, room.f_bavail * room.f_frsize)
        try:
            os.posix_fallocate(fd, 0, self._bytes_of(number))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._full(number, path, room.f_bavail * room.f_frsize) from error

    def _full(self, number: int, path: Path, free_bytes: int) -> PoolFullError:
        return PoolFullError(
            f"NVME pool {path}: {self._bytes_of(number)} bytes wanted for {self._slots_of(number)} slots of {self._stride} bytes,"
            f" {free_bytes} bytes free; lower pools.nvme.slots or capacity_bytes, free the disk, or set another"
            " pools.nvme.path",
            self._bytes_of(number),
            free_bytes,
        )

    def _write_header(self, path: Path, fd: int, header: FileHeader) -> None:
        text = msgspec.json.encode(header)
        if _PREFIX.size + len(text) > _PROVED_BYTES:
            raise PoolError(
                f"NVME pool {path}: the names of model, layout and instance take {len(text)} bytes as JSON, the"
                f" file's header has {_PROVED_BYTES - _PREFIX.size}; shorten them"
            )
        proved = (_PREFIX.pack(MAGIC, VERSION, len(text)) + text).ljust(_PROVED_BYTES, b"\0")
        view, at = memoryview(proved + _CRC.pack(_crc(self._checksum_rows, proved))), 0
        while at < len(view):
            at += os.pwrite(fd, view[at:], at)
        os.fsync(fd)


def shape_of(shape: Namespace, block_bytes: int, slots: int, instance: InstanceId, stripes: int = 1) -> FileShape:
    """What a pool for blocks of this shape is made for."""
    return FileShape(
        slots=slots,
        block_bytes=block_bytes,
        model=shape.model,
        revision=shape.revision,
        kv_dtype=shape.kv_dtype,
        block_tokens=shape.block_tokens,
        layout=shape.layout,
        kv_group=shape.kv_group,
        ranks=shape.ranks,
        instance=instance,
        stripes=stripes,
    )


def decode_header(path: Path, page: bytes, checksums: ChecksumRows) -> FileHeader | Damaged:
    """What the first page of a stripe says. Raises PoolError: it is nobody's, or of a version this kvbm does not read."""
    if page[: len(MAGIC)] != MAGIC:
        mended = MAGIC + page[len(MAGIC) :]
        if len(page) == PAGE_BYTES and _CRC.pack(_crc(checksums, mended[:_PROVED_BYTES])) == page[_PROVED_BYTES:]:
            return Damaged("the first bytes of the file's header do not match its checksum")
        raise PoolError(
            f"NVME pool {path}: what is there is no kvbm pool (it begins with {page[:8].hex()}); it is left as it"
            " is: move it away or set another pools.nvme.path"
        )
    if len(page) < PAGE_BYTES:
        return Damaged(f"the file ends after {len(page)} bytes, inside its header of {PAGE_BYTES}")
    if _CRC.pack(_crc(checksums, page[:_PROVED_BYTES])) != page[_PROVED_BYTES:]:
        return Damaged("the checksum of the file's header does not match")
    _, version, json_bytes = _PREFIX.unpack_from(page)
    if version != VERSION:
        raise PoolError(
            f"NVME pool {path}: file version {version} is newer than {VERSION}, the newest this kvbm reads;"
            " upgrade kvbm or set another pools.nvme.path"
            if version > VERSION
            else f"NVME pool {path}: file version {version} is none that kvbm writes; it is left as it is: remove it (its blocks"
            " will be computed again) or set another pools.nvme.path"
        )
    try:
        return msgspec.json.decode(page[_PREFIX.size : _PREFIX.size + json_bytes], type=FileHeader)
    except msgspec.DecodeError as error:
        raise PoolError(
            f"NVME pool {path}: the file's header is whole and makes no sense ({error}); it is left as it"
            " is: move it away or set another pools.nvme.path"
        ) from error


_OUTCOMES = {int(outcome): outcome for outcome in ReadOutcome}


def _crc(checksums: ChecksumRows, data: bytes) -> int:
    return int(checksums(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0])


def _row_numbers(at: Sequence[int] | None, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) if at is None else np.asarray(at, dtype=np.int64)


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
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)  # KV tells what was asked: nobody else reads it
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
