"""Where the catalog takes connections: what may stay, at a bounded pace, on any event loop, also when the process has
no files left.

asyncio's own server would try again for each place of its backlog without files, log each, and start as many times
again a second later; uvloop's asks nobody whom it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

from kvbm.catalog.edge.connections import Connection, Connections

_MOST_A_TURN = 32  # connections taken before the loop does something else
_PAUSE_S = 1.0  # without files
_HANDSHAKE_S = 60.0
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RESET = struct.pack("ii", 1, 0)


class Listener:
    """Takes connections of one listening socket, from `start` to `close`.

    Args:
        connections: asked about every new one.
        make: a protocol for a connection.
        context: of TLS; None for none.
    """

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make: Callable[[Connection], asyncio.BaseProtocol],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._sock, self._connections, self._make, self._context = sock, connections, make, context
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._beginning: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False

    def start(self) -> None:
        """Take connections in this loop from now on."""
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._loop.add_reader(self._sock, self._take)

    def close(self) -> None:
        """Take no more; those that are in TLS's handshake end. Idempotent."""
        self._is_open = False
        if self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._loop = None
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is left of it."""
        if self._beginning:
            await asyncio.wait(self._beginning, timeout=_PAUSE_S)

    def _take(self) -> None:
        for _ in range(_MOST_A_TURN):
            try:
                taken, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_MORE:
                    raise
                if not self._shed(error):
                    return
                continue
            connection = self._connections.admit(taken, address)
            if connection is None:
                reset(taken)
                continue
            assert self._loop is not None
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: Connection) -> None:
        connection.sock.setblocking(False)
        try:
            if self._context is None:
                await self._open(connection)
            else:
                handshakes, peer = self._connections.handshakes, connection.peer.key
                own = connection.turn = handshakes.ask(peer)
                async with handshakes.turn(peer, own, connection.end):
                    await self._open(connection, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_S)
        except (OSError, asyncio.CancelledError):  # whoever asked for it has gone, or cannot do what TLS asks for
            self._connections.closed(connection)
            if connection.turn is not None and connection.turn.cancelled():
                connection.sock.close()  # nobody else has it yet

    async def _open(self, connection: Connection, **tls: Any) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._make(connection), connection.sock, **tls)

    def _shed(self, error: OSError) -> bool:
        """Take a connection with the file that is kept for this, and close it: else it would be offered for ever.

        Whether it could.
        """
        self._connections.refusals["no_files"] += 1
        self._connections.limited_log.warn("catalog.connections_refused", why=os.strerror(error.errno or 0))
        if self._reserve is None:
            assert self._loop is not None
            self._loop.remove_reader(self._sock)
            self._loop.call_later(_PAUSE_S, self._go_on)
            return False
        os.close(self._reserve)
        self._reserve = None
        with contextlib.suppress(OSError):
            reset(self._sock.accept()[0])
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return True

    def _go_on(self) -> None:
        if self._is_open and self._loop is not None:
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._loop.add_reader(self._sock, self._take)


def reset(sock: socket.socket) -> None:
    """End a connection at once, without a word."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
