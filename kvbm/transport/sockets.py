"""Whole messages on a proved connection, for who reads over RDMA or NIXL: in time, or not at all.

They have the head of all messages between instances: u32 length of what follows, u8 version, u8 kind, u16 zero;
little-endian.
"""

from __future__ import annotations

import select
import socket
import struct
import time

from kvbm.core.errors import PeerWireError
from kvbm.transport.wire import VERSION, Bye, PeerMessageKind, decode_body, decode_head

HEAD = struct.Struct("<IBBH")


def send_message(connection: socket.socket, message: bytes, until_s: float) -> None:
    """Send all of it. Raises OSError: not in time, or the other end is gone."""
    connection.settimeout(max(0.001, until_s - time.monotonic()))
    connection.sendall(message)


def receive_body(connection: socket.socket, kind: int, sizes: range, until_s: float) -> bytes:
    """The body of the next message.

    Args:
        kind: that it must have, beside those of `wire`. sizes: bytes that its body may have.
        until_s: of `time.monotonic`.
    Raises PeerWireError: it is another, or the other end hangs up. OSError: not in time, or gone.
    """
    head = receive_exactly(connection, HEAD.size, until_s)
    length, version, found, zero = HEAD.unpack(head)
    if found == PeerMessageKind.BYE:
        bye = decode_body(PeerMessageKind.BYE, receive_exactly(connection, decode_head(head).body_bytes, until_s))
        raise PeerWireError(f"it hangs up: {bye.words}" if isinstance(bye, Bye) else "it hangs up")
    size = length + 4 - HEAD.size
    if (version, found, zero) != (VERSION, kind, 0) or size not in sizes:
        raise PeerWireError(f"message {found} of version {version} and {size} bytes; {kind} of {_of(sizes)} is awaited")
    return receive_exactly(connection, size, until_s)


def is_hung_up(connection: socket.socket) -> bool:
    """The other end has closed its socket, or its process has died; or this end is closed."""
    if connection.fileno() < 0:
        return True
    waiting = select.poll()
    waiting.register(connection, select.POLLRDHUP)
    return bool(waiting.poll(0))


def receive_exactly(connection: socket.socket, size: int, until_s: float) -> bytes:
    """The next bytes. Raises OSError: not in time, or the other end is gone."""
    data = b""
    while len(data) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{len(data)} of {size} bytes came in time")
        connection.settimeout(left_s)
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data


def _of(sizes: range) -> str:
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
