"""What two processes do with sockets and nothing else, which fetches are held to: no hashes, no checksums, no leases.

A question of 64 bytes names a piece of the answerer's memory, and the piece is the answer. Each end makes one system
call for all of it where the kernel lets it, so that what the interpreter adds is some microseconds an exchange.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm.workload.processes import ProcessError

_QUESTION = struct.Struct("<BQQ47x")
_TIMEOUT = struct.pack("ll", 30, 0)  # seconds, microseconds
_PIECE, _WORD = 0, 1


class BareAddress(NamedTuple):
    """Where a `BareServer` answers."""

    port: int
    unix: str


class BareServer:
    """Answers with pieces of some memory, until the process ends.

    Args:
        memory: flat, uint8.
        unix: path of its unix socket; over TCP it listens on the loopback interface alone.
        on_word: called with a number that the other process says, before that is answered.
    """

    def __init__(self, memory: np.ndarray, unix: Path, on_word: Callable[[int], None]) -> None:
        self._memory, self._on_word = memory.data, on_word
        tcp = socket.create_server(("127.0.0.1", 0))
        local = socket.socket(socket.AF_UNIX)
        local.bind(str(unix))
        local.listen()
        self.address = BareAddress(tcp.getsockname()[1], str(unix))
        for listener in (tcp, local):
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            _without_delay(connection)
            while len(question := connection.recv(_QUESTION.size, socket.MSG_WAITALL)) == _QUESTION.size:
                kind, first, count = _QUESTION.unpack(question)
                if kind == _WORD:
                    self._on_word(first)
                    connection.sendall(b"\0")
                else:
                    connection.sendall(self._memory[first : first + count])


class BareStreams:
    """Connections to a `BareServer`, each with a thread of its own where all are used at once. `close` ends them.

    Args:
        is_tcp: else over the unix socket.
    """

    def __init__(self, address: BareAddress, is_tcp: bool, count: int) -> None:
        self._streams = [_connected(address, is_tcp) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count)

    def close(self) -> None:
        """End the connections."""
        self._threads.shutdown()
        for stream in self._streams:
            stream.close()

    def say(self, word: int) -> None:
        """Say a number, and wait until it was heard."""
        self._streams[0].sendall(_QUESTION.pack(_WORD, word, 0))
        _receive(self._streams[0], memoryview(bytearray(1)))

    def exchange(self, rows: np.ndarray, first: int = 0) -> None:
        """Fill rows with the bytes there are from one on, over one connection."""
        view = rows.reshape(-1).data
        self._streams[0].sendall(_QUESTION.pack(_PIECE, first, len(view)))
        _receive(self._streams[0], view)

    def pull(self, rows: np.ndarray) -> None:
        """Fill rows with the first bytes there are, each connection its share at the same time."""
        view, count = rows.reshape(-1).data, len(self._streams)

        def share(number: int) -> None:
            begin, end = (len(view) * at // count for at in (number, number + 1))
            self._streams[number].sendall(_QUESTION.pack(_PIECE, begin, end - begin))
            _receive(self._streams[number], view[begin:end])

        list(self._threads.map(share, range(count)))


def _connected(address: BareAddress, is_tcp: bool) -> socket.socket:
    stream = socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX)
    # The kernel's timeouts leave the socket blocking, so that one call receives all.
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT)
    stream.connect(("127.0.0.1", address.port) if is_tcp else address.unix)
    _without_delay(stream)
    return stream


def _without_delay(stream: socket.socket) -> None:
    if stream.family == socket.AF_INET:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(stream: socket.socket, view: memoryview) -> None:
    while view:
        try:
            count = stream.recv_into(view, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise ProcessError(f"no answer over bare sockets: {error}") from None
        if not count:
            raise ProcessError("the process that answers over bare sockets has ended")
        view = view[count:]
