"""A connection's bytes, read and written by the thread that asks: with a deadline each, and as few calls of the system
as can be.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time

_READ_BYTES = 64 << 10
_LEAST_S = 0.001  # of a call that is begun
_MOST_S = 1e6  # a poll takes no more


class PlainSocket:
    """A socket that never blocks; its waits are polls.

    A timeout of Python's own costs two calls of the system more, each time.

    Attributes:
        sock: itself.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def read(self) -> bytes | None:
        """What has come, b"" for its end; None: nothing has. Raises OSError."""
        try:
            return self.sock.recv(_READ_BYTES) if self._readable.poll(0) else None
        except BlockingIOError:
            return None

    def wait(self, timeout_s: float) -> bytes:
        """What comes next, b"" for its end. Raises OSError; TimeoutError: nothing does in time."""
        deadline_s = time.monotonic() + timeout_s
        while timeout_s > 0 and self._readable.poll(_whole_ms(timeout_s)):
            try:
                return self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                timeout_s = deadline_s - time.monotonic()
        raise TimeoutError

    def send(self, data: bytes, deadline_s: float) -> None:
        """Send all of it. Raises OSError; TimeoutError: it is not taken in time."""
        sent = 0
        while True:
            try:
                sent += self.sock.send(memoryview(data)[sent:] if sent else data)
            except BlockingIOError:
                pass
            if sent == len(data):
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._writable.poll(_whole_ms(left_s)):
                raise TimeoutError

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()


class TlsSocket:
    """The same behind TLS, which has bytes of its own between the system's calls and ours.

    Raises: OSError: there is no TLS.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        self.sock = context.wrap_socket(sock, server_hostname=host)

    def read(self) -> bytes | None:
        """See `PlainSocket.read`."""
        self.sock.settimeout(0.0)
        try:
            return self.sock.recv(_READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def wait(self, timeout_s: float) -> bytes:
        """See `PlainSocket.wait`."""
        if timeout_s <= 0:
            raise TimeoutError
        self.sock.settimeout(timeout_s)
        return self.sock.recv(_READ_BYTES)

    def send(self, data: bytes, deadline_s: float) -> None:
        """See `PlainSocket.send`."""
        self.sock.settimeout(max(_LEAST_S, deadline_s - time.monotonic()))
        self.sock.sendall(data)

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()


def _whole_ms(time_s: float) -> int:
    return math.ceil(min(time_s, _MOST_S) * 1000)
