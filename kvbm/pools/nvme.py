"""NVME: slots in one preallocated file that outlives the process.

All integers are little-endian.

    file    0  4096 bytes of header; then the slots
    header  0  8 bytes  magic "KVBMPOOL"
            8  4        version
           12  4        json_bytes
           16  …        JSON: what the file was made for, then zeros
         4092  4        CRC-32C of the 4,092 bytes above
    slot    0  64       block header, as in header.py, magic "KVBS"
           64  …        the block's bytes, then zeros up to a multiple of 4,096

A block is proved by its own header, so a slot that was torn, swapped or never written reads as CORRUPT, whoever reads
it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from kvbm.core.errors import PoolError, PoolFullError, PoolMismatchError
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, Reach, Tier
from kvbm.core.kernels import ChecksumRows
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.header import HEADER_BYTES, SLOT_MAGIC, empty_headers, encode_headers, verify
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots, judged

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

MAGIC = b"KVBMPOOL"
VERSION = 1
PAGE_BYTES = 4096

_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_PROVED_BYTES = PAGE_BYTES - _CRC.size
_CALL_SLOTS = 256  # Linux takes 1,024 pieces a call; a slot has up to 3
_CALL_BYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool file was made for. A file with another shape is not ours to read or to overwrite."""

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


class FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of a pool file: its shape, and the name it got when it was made."""

    shape: FileShape
    pool_id: str


class _Damaged(NamedTuple):
    """A pool file of ours whose header is not whole; its blocks cannot be trusted."""

    why: str


class NvmePool:
    """Slots of one file, each block beside its proof, verified at each read.

    Bytes go through the page cache and survive the process, not the power; what power loss takes is found by the
    block's checksum.

    Attributes:
        opened: "created": the file is new and empty, whatever a journal says. "reopened": blocks of earlier epochs are
            there.
        pool_id: name the file got when it was made.
        notice: one sentence for the operator when the file was not as it was left, else "".
    """

    def __init__(
        self,
        path: Path,
        slots: int,
        block_bytes: int,
        shape: Namespace,
        instance: InstanceId,
        checksums: ChecksumRows,
        reach: Reach = Reach.INSTANCE,
    ) -> None:
        """Open the file, or make it with all its bytes reserved. It stays locked until `close`.

        Args:
            shape: any namespace of the pool; LoRA, tenant and hash scheme may differ between blocks of one file.
        Raises: LayoutError: below 1 slot or byte. PoolMismatchError: the file was made for something else; it is left
            as it is. PoolFullError: the disk lacks the room; nothing is left behind. PoolError: the file is in use,
            foreign, or cannot be opened.
        """
        check_size("NVME", slots, block_bytes)
        self.tier = Tier.NVME
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach
        self.path = path
        self.opened: Literal["created", "reopened"] = "reopened"
        self.notice = ""
        self._checksum_rows = checksums
        self._stride = -(-(HEADER_BYTES + block_bytes) // PAGE_BYTES) * PAGE_BYTES
        self._padding_bytes = self._stride - HEADER_BYTES - block_bytes
        self._calls = 0
        self._idle = threading.Condition()
        self._wanted = FileShape(
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
        )
        try:
            self._fd, self.pool_id = self._open()
        except OSError as error:
            raise PoolError(
                f"NVME pool {path}: it cannot be opened ({error.strerror}); check pools.nvme.path"
            ) from error

    @property
    def file_bytes(self) -> int:
        """Bytes the file takes: its header and every slot."""
        return PAGE_BYTES + self.slots * self._stride

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof) -> None:
        """Put blocks into slots. Raises PoolError: closed, or the device refused; the slots then prove nothing."""
        count = check_proof("NVME", rows, proof, self.block_bytes)
        indexes = check_slots("NVME", slots, count, self.slots)
        headers = encode_headers(SLOT_MAGIC, proof, self.block_bytes, self._checksum_rows)
        padding = bytes(self._padding_bytes)
        with self._using() as fd:
            if fd is None:
                raise PoolError(f"NVME pool {self.path}: it is closed; {count} blocks were not written")
            for group in self._groups(indexes):
                pieces: list[Buffer] = []
                for index in group.tolist():
                    pieces += (headers[index], rows[index], padding)
                try:
                    written = os.pwritev(fd, pieces, self._position(indexes[group[0]]))
                except OSError as error:
                    raise PoolError(
                        f"NVME pool {self.path}: the device refused {len(group)} blocks: {error}"
                    ) from error
                if written != len(group) * self._stride:
                    raise PoolError(
                        f"NVME pool {self.path}: the device took {written} of {len(group) * self._stride} bytes;"
                        " check its room and health"
                    )

    def read(self, slots: Sequence[int], namespace: NamespaceId, hashes: bytes, rows: np.ndarray) -> ReadResult:
        """Fill rows from slots and hold each to its header, its hash and its checksum."""
        count = check_rows("NVME", rows, hashes, self.block_bytes)
        indexes = check_slots("NVME", slots, count, self.slots)
        headers = empty_headers(count)
        failed: list[int] = []
        with self._using() as fd:
            if fd is None:
                return all_failed(count)
            for group in self._groups(indexes):
                if self._read_group(fd, indexes, group, headers, rows):
                    continue
                failed += [int(index) for index in group if not self._read_group(fd, indexes, [index], headers, rows)]
        result = judged(*verify(SLOT_MAGIC, headers, rows, namespace, hashes, self._checksum_rows))
        for index in failed:
            result.outcomes[index] = ReadOutcome.FAILED
        return result

    def close(self) -> None:
        """Close and unlock the file once calls under way are over. Idempotent."""
        with self._idle:
            fd, self._fd = self._fd, -1
            self._idle.wait_for(lambda: self._calls == 0)
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _using(self) -> Iterator[int | None]:
        """The open file, kept open while used; None once closed. A number used later could be another file's."""
        with self._idle:
            fd = self._fd
            self._calls += 1
        try:
            yield fd if fd >= 0 else None
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _position(self, slot: int) -> int:
        return PAGE_BYTES + int(slot) * self._stride

    def _groups(self, indexes: np.ndarray) -> Iterator[np.ndarray]:
        """A run's blocks in the order of their slots, cut into groups of neighbours: one system call each."""
        order = np.argsort(indexes, kind="stable")
        longest = max(1, min(_CALL_SLOTS, _CALL_BYTES // self._stride))
        for neighbours in np.split(order, np.flatnonzero(np.diff(indexes[order]) != 1) + 1):
            for begin in range(0, len(neighbours), longest):
                yield neighbours[begin : begin + longest]

    def _read_group(
        self, fd: int, indexes: np.ndarray, group: Sequence[int] | np.ndarray, headers: np.ndarray, rows: np.ndarray
    ) -> bool:
        """Read neighbours; False when the device refused. What a short read leaves out proves nothing."""
        padding = bytearray(self._padding_bytes)
        pieces: list[Buffer] = []
        for index in group:
            pieces += (headers[index], rows[index], padding)
        try:
            os.preadv(fd, pieces, self._position(indexes[group[0]]))
        except OSError:
            return False
        return True

    def _open(self) -> tuple[int, str]:
        """The locked file and its pool id.

        A file is made under another name and renamed when it is whole, so under its own name it is never half made.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            if self.path.exists() and not self.path.is_file():
                raise PoolError(
                    f"NVME pool {self.path}: it is no plain file; set pools.nvme.path to one in a folder of the device"
                )
            there = self.path.exists() and self.path.stat().st_size > 0
            held = self._reopen() if there else self._create()
            if held is not None:
                return held

    def _reopen(self) -> tuple[int, str] | None:
        """The file that is there; None once a damaged one has been emptied, so that its room serves the new one."""
        with ExitStack() as undo:
            fd = _open_locked(self.path, os.O_RDWR)
            undo.callback(os.close, fd)
            header = self._adopt(fd)
            if isinstance(header, _Damaged):
                self.notice = f"NVME pool {self.path}: {header.why}; its blocks are given up and the pool starts empty"
                os.ftruncate(fd, 0)
                return None
            undo.pop_all()
            return fd, header.pool_id

    def _adopt(self, fd: int) -> FileHeader | _Damaged:
        """The header of an existing file, once it proves to be ours and of our shape."""
        page = os.pread(fd, PAGE_BYTES, 0)
        if page[: len(MAGIC)] != MAGIC:
            raise PoolError(
                f"NVME pool {self.path}: the file is no kvbm pool (it begins with {page[:8].hex()}); it is left as it"
                " is: move it away or set another pools.nvme.path"
            )
        if len(page) < PAGE_BYTES:
            return _Damaged(f"the file ends after {len(page)} bytes, inside its header of {PAGE_BYTES}")
        if _CRC.pack(self._crc(page[:_PROVED_BYTES])) != page[_PROVED_BYTES:]:
            return _Damaged("the checksum of the file's header does not match")
        _, version, json_bytes = _PREFIX.unpack_from(page)
        if version > VERSION:
            raise PoolError(
                f"NVME pool {self.path}: file version {version} is newer than {VERSION}, the newest this kvbm reads;"
                " upgrade kvbm or set another pools.nvme.path"
            )
        try:
            header = msgspec.json.decode(page[_PREFIX.size : _PREFIX.size + json_bytes], type=FileHeader)
        except msgspec.DecodeError as error:
            raise PoolError(
                f"NVME pool {self.path}: the file's header is whole and makes no sense ({error}); it is left as it"
                " is: move it away or set another pools.nvme.path"
            ) from error
        self._require_shape(header.shape)
        held_bytes = os.fstat(fd).st_size
        if held_bytes < self.file_bytes:
            self._reserve(fd)
            self.notice = (
                f"NVME pool {self.path}: the file had {held_bytes} of {self.file_bytes} bytes; the blocks that were"
                " cut off read as corrupt"
            )
        return header

    def _require_shape(self, held: FileShape) -> None:
        for name in FileShape.__struct_fields__:
            ours, theirs = getattr(self._wanted, name), getattr(held, name)
            if ours != theirs:
                raise PoolMismatchError(
                    f"NVME pool {self.path}: the file was made for {name} {theirs!r}, this manager has {name} {ours!r};"
                    " it is left as it is: move it away or set another pools.nvme.path"
                )

    def _create(self) -> tuple[int, str] | None:
        """A new file, locked; None when another manager has made one meanwhile."""
        building = self.path.with_name(self.path.name + ".creating")
        with ExitStack() as undo:
            fd = _open_locked(building, os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, fd)
            undo.callback(building.unlink, missing_ok=True)
            if self.path.exists() and self.path.stat().st_size > 0:
                return None
            os.ftruncate(fd, 0)  # what a crash left of an earlier attempt
            self._reserve(fd)
            header = FileHeader(shape=self._wanted, pool_id=str(uuid.uuid4()))
            self._write_header(fd, header)
            building.rename(self.path)
            _sync_folder(self.path.parent)
            undo.pop_all()
        self.opened = "created"
        return fd, header.pool_id

    def _reserve(self, fd: int) -> None:
        """Reserve every byte, so that no later write can lack room. Raises PoolFullError."""
        room = os.fstatvfs(fd)
        missing_bytes = self.file_bytes - os.fstat(fd).st_blocks * 512
        if missing_bytes > room.f_bavail * room.f_frsize:
            raise self._full(room.f_bavail * room.f_frsize)
        try:
            os.posix_fallocate(fd, 0, self.file_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._full(room.f_bavail * room.f_frsize) from error

    def _full(self, free_bytes: int) -> PoolFullError:
        return PoolFullError(
            f"NVME pool {self.path}: {self.file_bytes} bytes wanted for {self.slots} slots of {self._stride} bytes,"
            f" {free_bytes} bytes free; lower pools.nvme.slots or capacity_bytes, free the disk, or set another"
            " pools.nvme.path",
            self.file_bytes,
            free_bytes,
        )

    def _write_header(self, fd: int, header: FileHeader) -> None:
        text = msgspec.json.encode(header)
        if _PREFIX.size + len(text) > _PROVED_BYTES:
            raise PoolError(
                f"NVME pool {self.path}: the names of model, layout and instance take {len(text)} bytes as JSON, the"
                f" file's header has {_PROVED_BYTES - _PREFIX.size}; shorten them"
            )
        proved = (_PREFIX.pack(MAGIC, VERSION, len(text)) + text).ljust(_PROVED_BYTES, b"\0")
        os.pwrite(fd, proved + _CRC.pack(self._crc(proved)), 0)
        os.fsync(fd)

    def _crc(self, data: bytes) -> int:
        return int(self._checksum_rows(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0])


def _open_locked(path: Path, flags: int) -> int:
    """Open a file and hold its lock. Raises PoolError: another manager does."""
    while True:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)  # KV tells what was asked: nobody else reads it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError as error:
            os.close(fd)
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
