"""How reader and owner join over NIXL, on a connection that is proved already: two messages.

The reader's NIXL_HELLO asks, the owner's NIXL_READY says what NIXL is to know of the owner and where its memory lies.
They have the head that `sockets` says.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from kvbm.core.errors import PeerWireError
from kvbm.transport.sockets import HEAD, receive_body
from kvbm.transport.wire import VERSION

NIXL_HELLO, NIXL_READY = 14, 15
MOST_METADATA_BYTES = 64 << 10
_READY = struct.Struct("<B3xIIQQQ")  # status, slots, metadata bytes, address, bytes, stride


class NixlStatus(IntEnum):
    """What an owner answers."""

    READY = 0
    NOT_PROVED = 1  # of a namespace that this owner has: the whole memory is not for this reader
    FULL = 2  # as many readers as there may be, or NIXL failed


class NixlLentMemory(NamedTuple):
    """The owner's memory, as a reader reaches it.

    Attributes:
        address, bytes: where it lies in the owner's process of NIXL.
        slots, stride: slot i begins at byte i * stride.
    """

    address: int
    bytes: int
    slots: int
    stride: int


class NixlReady(NamedTuple):
    """The owner's answer. Without READY the rest is empty.

    Attributes:
        metadata: of the owner's agent, for NIXL, at most MOST_METADATA_BYTES.
    """

    status: NixlStatus
    metadata: bytes
    memory: NixlLentMemory


NO_MEMORY = NixlLentMemory(0, 0, 0, 0)


def encode_hello() -> bytes:
    """NIXL_HELLO, which has no body."""
    return HEAD.pack(HEAD.size - 4, VERSION, NIXL_HELLO, 0)


def encode_ready(ready: NixlReady) -> bytes:
    """NIXL_READY, head and all. Raises PeerWireError when decoding it would."""
    _check(ready)
    memory = ready.memory
    body = _READY.pack(ready.status, memory.slots, len(ready.metadata), memory.address, memory.bytes, memory.stride)
    body += ready.metadata
    return HEAD.pack(len(body) + HEAD.size - 4, VERSION, NIXL_READY, 0) + body


def decode_ready(body: bytes) -> NixlReady:
    """The owner's answer. Raises PeerWireError: it makes no sense."""
    if len(body) < _READY.size:
        raise PeerWireError(f"NIXL_READY: {len(body)} bytes; it has at least {_READY.size}")
    status, slots, size, address, bytes_, stride = _READY.unpack_from(body)
    if status not in list(NixlStatus) or any(body[1:4]) or size != len(body) - _READY.size:
        raise PeerWireError(f"NIXL_READY: status {status}, {size} bytes of metadata in {len(body)}")
    return _check(NixlReady(NixlStatus(status), body[_READY.size :], NixlLentMemory(address, bytes_, slots, stride)))


def receive_ready(connection: socket.socket, until_s: float) -> NixlReady:
    """The answer to NIXL_HELLO, which must be next. Raises PeerWireError: it is not. OSError: not in time, or gone."""
    sizes = range(_READY.size, _READY.size + MOST_METADATA_BYTES + 1)
    return decode_ready(receive_body(connection, NIXL_READY, sizes, until_s))


def is_hello(head: bytes) -> bool:
    """Whether these 8 bytes are NIXL_HELLO."""
    return head == encode_hello()


def _check(ready: NixlReady) -> NixlReady:
    memory = ready.memory
    if ready.status is not NixlStatus.READY:
        if ready.metadata or memory != NO_MEMORY:
            raise PeerWireError(f"NIXL_READY: {ready.status.name} with metadata or memory")
        return ready
    if not 1 <= len(ready.metadata) <= MOST_METADATA_BYTES:
        raise PeerWireError(f"NIXL_READY: {len(ready.metadata)} bytes of metadata; 1 to {MOST_METADATA_BYTES} can be")
    if memory.slots < 1 or memory.stride < 1 or memory.slots * memory.stride > memory.bytes or not memory.address:
        raise PeerWireError(f"NIXL_READY: memory that is none: {memory}")
    if memory.address + memory.bytes >= 1 << 64:
        raise PeerWireError(f"NIXL_READY: memory beyond the end of all addresses: {memory}")
    return ready
