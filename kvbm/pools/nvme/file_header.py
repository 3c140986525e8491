"""The first page of a stripe of the NVME pool: what the stripe was made for, and which one it is.

All integers are little-endian.

    header  0  8 bytes  magic "KVBMPOOL"
            8  4        version: 3, or 2 where the stripe has no tail
           12  4        json_bytes
           16  …        JSON: what the stripe was made for, then zeros
         4092  4        CRC-32C of the 4,092 bytes above; of version 3 with every bit turned

A tail, drawn in generations.py, lies behind the slots. A kvbm that knows nothing of tails would clear blocks and not
say so there: it takes the turned checksum for damage, gives the blocks up and makes the file anew, so that it starts,
and nothing it did not write is there.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import PoolError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.generations import TAIL_BYTES

MAGIC = b"KVBMPOOL"
VERSION = 3
_WITHOUT_TAIL = 2

_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_PROVED_BYTES = PAGE_BYTES - _CRC.size
_TURNED = 0xFFFFFFFF


class FileShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool was made for. A file whose shape differs in more than `slots` holds nothing we can use.

    Attributes:
        slots: of the whole pool.
        stripes: files and devices it is made of.
        encrypted: whether its blocks are sealed.
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
    encrypted: bool = False


class FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of a stripe.

    Attributes:
        pool_id: name the pool got when it was made.
        stripe: which of its stripes this is, from 0.
        has_tail: whether a tail follows the slots.
        room_slots: where the pool was larger and its last blocks have not been moved yet, the slots it had; else 0.
    """

    shape: FileShape
    pool_id: str
    stripe: int = 0
    has_tail: bool = False
    room_slots: int = 0

    @property
    def tail_at(self) -> int:
        """Where the slots end in the stripe's file."""
        slots = max(self.shape.slots, self.room_slots)
        return PAGE_BYTES + slots_of_stripe(slots, self.stripe, self.shape.stripes) * stride_of(self.shape.block_bytes)

    @property
    def file_bytes(self) -> int:
        """What the stripe takes."""
        return self.tail_at + (TAIL_BYTES if self.has_tail else 0)


def slots_of_stripe(slots: int, stripe: int, stripes: int) -> int:
    """How many of a pool's slots lie in one of its stripes."""
    return -(-max(0, slots - stripe) // stripes)


class Damaged(NamedTuple):
    """A stripe of ours whose header is not whole."""

    why: str


def shape_of(
    shape: Namespace, block_bytes: int, slots: int, instance: InstanceId, stripes: int = 1, encrypted: bool = False
) -> FileShape:
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
        encrypted=encrypted,
    )


def encode_header(path: Path, header: FileHeader, checksums: ChecksumRows) -> bytes:
    """The first page of a stripe. Raises PoolError: its names do not fit."""
    text = msgspec.json.encode(header)
    if _PREFIX.size + len(text) > _PROVED_BYTES:
        raise PoolError(
            f"NVME pool {path}: the names of model, layout and instance take {len(text)} bytes as JSON, the"
            f" file's header has {_PROVED_BYTES - _PREFIX.size}; shorten them"
        )
    version = VERSION if header.has_tail else _WITHOUT_TAIL
    proved = (_PREFIX.pack(MAGIC, version, len(text)) + text).ljust(_PROVED_BYTES, b"\0")
    return proved + _CRC.pack(_crc(checksums, proved) ^ (_TURNED if header.has_tail else 0))


def decode_header(path: Path, page: bytes, checksums: ChecksumRows) -> FileHeader | Damaged:
    """What the first page of a stripe says.

    Raises PoolError: it is nobody's, or of a version this kvbm does not read.
    """
    if page[: len(MAGIC)] != MAGIC:
        if len(page) == PAGE_BYTES and _proof_of(MAGIC + page[len(MAGIC) :], checksums) is not None:
            return Damaged("the first bytes of the file's header do not match its checksum")
        raise PoolError(
            f"NVME pool {path}: what is there is no kvbm pool (it begins with {page[:8].hex()}); move it away or set "
            "another"
            " pools.nvme.path"
        )
    if len(page) < PAGE_BYTES:
        return Damaged(f"the file ends after {len(page)} bytes, inside its header of {PAGE_BYTES}")
    proved_version = _proof_of(page, checksums)
    if proved_version is None:
        return Damaged("the checksum of the file's header does not match")
    _, version, json_bytes = _PREFIX.unpack_from(page)
    if version != proved_version:
        is_newer = version > VERSION or version > proved_version
        raise PoolError(
            f"NVME pool {path}: file version {version} is newer than {VERSION}, the newest this kvbm reads;"
            " upgrade kvbm or set another pools.nvme.path"
            if is_newer
            else f"NVME pool {path}: file version {version} is none that kvbm writes; remove it (its blocks will be "
            "computed again) or"
            " set another pools.nvme.path"
        )
    try:
        return msgspec.json.decode(page[_PREFIX.size : _PREFIX.size + json_bytes], type=FileHeader)
    except msgspec.DecodeError as error:
        raise PoolError(
            f"NVME pool {path}: the file's header is whole and makes no sense ({error}); move it away or set another "
            "pools.nvme.path"
        ) from error


def _proof_of(page: bytes, checksums: ChecksumRows) -> int | None:
    """The version whose kind of checksum a page has; None: neither."""
    wanted, computed = _CRC.unpack_from(page, _PROVED_BYTES)[0], _crc(checksums, page[:_PROVED_BYTES])
    return {computed: _WITHOUT_TAIL, computed ^ _TURNED: VERSION}.get(wanted)


def _crc(checksums: ChecksumRows, data: bytes) -> int:
    return int(checksums(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0])
