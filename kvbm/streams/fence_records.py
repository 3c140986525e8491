"""Fences in a file of frames, as an archive keeps them: among the frames, where they stood in the stream.

magic "KVBF" · u16 version · u16 zero · u32 length of the body · body, MessagePack of `FenceRecord` · CRC-32 of all
before it

Integers are little-endian. In every version to come magic, version, length and checksum stay where they are.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from kvbm.core.ids import InstanceId
from kvbm.streams.base import Fence, StreamMessage, UnreadableError, fence_of, subject_names

FENCE_MAGIC = b"KVBF"
VERSION = 1
HEAD_BYTES = 12
MOST_BYTES = 64 << 10  # a fence names 64 epochs at most

_HEAD = struct.Struct("<4sHHI")
_CHECKSUM = struct.Struct("<I")


class FenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Whose events come from here on. See `Fence`."""

    cluster: str
    instance: InstanceId
    fence: Fence


def encode_fence(message: StreamMessage) -> bytes:
    """A fence message as an archive keeps it; nothing for one that is none, which counts for nothing."""
    cluster, instance = subject_names(message.subject)
    try:
        fence = fence_of(message.data, message.sequence, f"message {message.sequence}")
    except UnreadableError:
        return b""
    return _encode(cluster, instance, fence)


def encode_told(message: StreamMessage, fence: Fence) -> bytes:
    """A fence that a message of events has told of, as an archive keeps it before that message."""
    return _encode(*subject_names(message.subject), fence)


def _encode(cluster: str, instance: InstanceId, fence: Fence) -> bytes:
    body = msgspec.msgpack.encode(FenceRecord(cluster=cluster, instance=instance, fence=fence))
    data = _HEAD.pack(FENCE_MAGIC, VERSION, 0, len(body)) + body
    return data + _CHECKSUM.pack(zlib.crc32(data)) if len(data) + _CHECKSUM.size <= MOST_BYTES else b""


def record_bytes(head: bytes) -> int:
    """How long the record is that begins with these bytes, HEAD_BYTES of them; 0 when none begins there."""
    if len(head) < HEAD_BYTES:
        return 0
    magic, _, _, size = _HEAD.unpack_from(head)
    whole = HEAD_BYTES + size + _CHECKSUM.size
    return whole if magic == FENCE_MAGIC and whole <= MOST_BYTES else 0


def decode_fence(data: bytes) -> FenceRecord | int | None:
    """The record that these bytes are; its version when a newer kvbm wrote it; None when they are damaged."""
    (checksum,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    if zlib.crc32(data[: -_CHECKSUM.size]) != checksum:
        return None
    _, version, _, _ = _HEAD.unpack_from(data)
    if version != VERSION:
        return version if version > VERSION else None
    try:
        return msgspec.msgpack.decode(data[HEAD_BYTES : -_CHECKSUM.size], type=FenceRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
