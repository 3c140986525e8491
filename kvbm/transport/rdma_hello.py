"""How reader and owner tell each other their ends of an RDMA connection, over one that is proved already: two messages.

The reader's RDMA_HELLO says where its queue pair is, the owner's RDMA_READY where its own is and where its memory lies.
They have the head that `sockets` says.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from kvbm.core.errors import PeerWireError
from kvbm.transport.sockets import HEAD, receive_body
from kvbm.transport.wire import VERSION
from kvbm.verbs.queue_pair import RemoteEnd

RDMA_HELLO, RDMA_READY = 12, 13
_HELLO = struct.Struct("<16sIIHBB")  # gid, queue pair, psn, lid, mtu, reads
# status, mtu, reads, 0, gid, queue pair, psn, lid, 0, key, slots, address, bytes, stride
_READY = struct.Struct("<BBBB16sIIHHIIQQQ")
_MOST_READS = 128
_MTUS = range(1, 6)
_24_BITS = 1 << 24


class RdmaStatus(IntEnum):
    """What an owner answers."""

    READY = 0
    NOT_PROVED = 1  # of a namespace that this owner has: the whole memory is not for this reader
    FULL = 2  # as many readers as there may be, or the device failed


class RdmaLentMemory(NamedTuple):
    """The owner's memory, as a reader reaches it.

    Attributes:
        address, bytes, key: of the registered memory.
        slots, stride: slot i begins at byte i * stride.
    """

    address: int
    bytes: int
    key: int
    slots: int
    stride: int


class RdmaReady(NamedTuple):
    """The owner's answer. Without READY the rest is zero."""

    status: RdmaStatus
    end: RemoteEnd
    memory: RdmaLentMemory


NOWHERE = RemoteEnd(bytes(16), 0, 0, 0, 0, 0)
NO_MEMORY = RdmaLentMemory(0, 0, 0, 0, 0)


def encode_hello(end: RemoteEnd) -> bytes:
    """RDMA_HELLO, head and all. Raises PeerWireError when decoding it would."""
    _check_end("RDMA_HELLO", end)
    body = _HELLO.pack(end.gid, end.number, end.psn, end.lid, end.mtu, end.reads)
    return HEAD.pack(len(body) + 4, VERSION, RDMA_HELLO, 0) + body


def decode_hello(body: bytes) -> RemoteEnd:
    """The reader's end. Raises PeerWireError: it makes no sense."""
    gid, number, psn, lid, mtu, reads = _unpack("RDMA_HELLO", _HELLO, body)
    return _check_end("RDMA_HELLO", RemoteEnd(gid, lid, number, psn, mtu, reads))


def encode_ready(ready: RdmaReady) -> bytes:
    """RDMA_READY, head and all. Raises PeerWireError when decoding it would."""
    _check_ready(ready)
    end, memory = ready.end, ready.memory
    body = _READY.pack(
        ready.status,
        end.mtu,
        end.reads,
        0,
        end.gid,
        end.number,
        end.psn,
        end.lid,
        0,
        memory.key,
        memory.slots,
        memory.address,
        memory.bytes,
        memory.stride,
    )
    return HEAD.pack(len(body) + 4, VERSION, RDMA_READY, 0) + body


def decode_ready(body: bytes) -> RdmaReady:
    """The owner's answer. Raises PeerWireError: it makes no sense."""
    fields = _unpack("RDMA_READY", _READY, body)
    status, mtu, reads, zero, gid, number, psn, lid, zeros, key, slots, address, size, stride = fields
    if zero or zeros or status not in list(RdmaStatus):
        raise PeerWireError(f"RDMA_READY: status {status}, or a byte that is zero is not")
    end, memory = RemoteEnd(gid, lid, number, psn, mtu, reads), RdmaLentMemory(address, size, key, slots, stride)
    return _check_ready(RdmaReady(RdmaStatus(status), end, memory))


def receive_message(connection: socket.socket, kind: int, until_s: float) -> bytes:
    """The body of the next message, which must be of this kind.

    Raises PeerWireError: it is not. OSError: not in time, or gone.
    """
    size = {RDMA_HELLO: _HELLO.size, RDMA_READY: _READY.size}[kind]
    return receive_body(connection, kind, range(size, size + 1), until_s)


def _unpack(name: str, form: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != form.size:
        raise PeerWireError(f"{name}: {len(body)} bytes; it has {form.size}")
    return form.unpack(body)


def _check_end(name: str, end: RemoteEnd) -> RemoteEnd:
    is_one = len(end.gid) == 16 and any(end.gid) and 0 <= end.lid < 1 << 16 and 1 < end.number < _24_BITS
    if not is_one or not 0 <= end.psn < _24_BITS or end.mtu not in _MTUS or not 1 <= end.reads <= _MOST_READS:
        raise PeerWireError(f"{name}: no end of a connection: {end}")
    return end


def _check_ready(ready: RdmaReady) -> RdmaReady:
    if ready.status is not RdmaStatus.READY:
        if ready[1:] != (NOWHERE, NO_MEMORY):
            raise PeerWireError(f"RDMA_READY: {ready.status.name} with an end or memory")
        return ready
    _check_end("RDMA_READY", ready.end)
    memory = ready.memory
    if memory.slots < 1 or memory.stride < 1 or memory.slots * memory.stride > memory.bytes or not memory.address:
        raise PeerWireError(f"RDMA_READY: memory that is none: {memory}")
    if memory.address + memory.bytes >= 1 << 64:
        raise PeerWireError(f"RDMA_READY: memory beyond the end of all addresses: {memory}")
    return ready
