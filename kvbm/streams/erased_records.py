"""What stands in an archive in the place of a frame that an erasure has taken out: which events are missing, and why.

magic "KVBE" · u16 version · u16 zero · u32 length of the body · body, MessagePack of `ErasedRecord` · CRC-32 of all
before it

Integers are little-endian. In every version to come magic, version, length and checksum stay where they are.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from kvbm.core.ids import Epoch, InstanceId, Offset

ERASED_MAGIC = b"KVBE"
HEAD_BYTES = 12
_VERSION = 1
_MOST_BYTES = 4 << 10

_HEAD = struct.Struct("<4sHHI")
_CHECKSUM = struct.Struct("<I")


class ErasedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Events [first_offset, first_offset + event_count) of an epoch were erased. `number`: of the erasure."""

    instance: InstanceId
    epoch: Epoch
    first_offset: Offset
    event_count: int
    wall_time_ns: int
    number: int


def encode_erased(record: ErasedRecord) -> bytes:
    """A record as an archive keeps it."""
    body = msgspec.msgpack.encode(record)
    data = _HEAD.pack(ERASED_MAGIC, _VERSION, 0, len(body)) + body
    return data + _CHECKSUM.pack(zlib.crc32(data))


def erased_bytes(head: bytes) -> int:
    """How long the record is that begins with these bytes, HEAD_BYTES of them; 0 when none begins there."""
    if len(head) < HEAD_BYTES:
        return 0
    magic, _, _, size = _HEAD.unpack_from(head)
    whole = HEAD_BYTES + size + _CHECKSUM.size
    return whole if magic == ERASED_MAGIC and whole <= _MOST_BYTES else 0


def decode_erased(data: bytes) -> ErasedRecord | None:
    """The record that these bytes are; None when they are damaged, or a newer kvbm's."""
    (checksum,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    if zlib.crc32(data[: -_CHECKSUM.size]) != checksum or _HEAD.unpack_from(data)[1] != _VERSION:
        return None
    try:
        return msgspec.msgpack.decode(data[HEAD_BYTES : -_CHECKSUM.size], type=ErasedRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
