"""An HTTP server that answers each request with a test's own bytes, wrong ones too."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_WAIT_S = 60.0

# Answers one request on its connection; False: the connection ends then.
Answer = Callable[[socket.socket], bool]


@dataclass
class ScriptedServer:
    """A running one.

    Attributes:
        port: on the loopback.
        answer: of each request, by its path.
        asked: paths, in the order in which they came.
        connections: that were made.
        goes_on: for answers that wait.
    """

    port: int
    answer: Callable[[str], Answer]
    asked: list[str] = field(default_factory=list)
    connections: int = 0
    goes_on: threading.Event = field(default_factory=threading.Event)


def sends(*parts: bytes, stays: bool = True) -> Answer:
    """These bytes, piece by piece."""

    def answer(connection: socket.socket) -> bool:
        for part in parts:
            connection.sendall(part)
        return stays

    return answer


@contextmanager
def scripted(answer: Callable[[str], Answer]) -> Iterator[ScriptedServer]:
    """A server on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ScriptedServer(listener.getsockname()[1], answer)
        open_now: list[socket.socket] = []
        accepting = threading.Thread(target=_accept, args=(listener, server, open_now), daemon=True)
        accepting.start()
        try:
            yield server
        finally:
            server.goes_on.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(_WAIT_S)
            for connection in open_now:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, server: ScriptedServer, open_now: list[socket.socket]) -> None:
    serving: list[threading.Thread] = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.settimeout(_WAIT_S)
        server.connections += 1
        open_now.append(connection)
        serving.append(threading.Thread(target=_serve, args=(connection, server), daemon=True))
        serving[-1].start()


def _serve(connection: socket.socket, server: ScriptedServer) -> None:
    came = b""
    with connection, suppress(OSError):
        while True:
            while b"\r\n\r\n" not in came:
                more = connection.recv(65536)
                if not more:
                    return
                came += more
            head, _, came = came.partition(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            server.asked.append(path)
            if not server.answer(path)(connection):
                return
