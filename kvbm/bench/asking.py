"""Questions over sockets as a benchmark asks them: bytes made beforehand, answers only told apart."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

_WAIT_S = 120.0


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """A request as it goes over the wire."""
    lines = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


class AskingResult(NamedTuple):
    """What asking for a while has brought."""

    answers: int
    wall_s: float

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return self.answers / self.wall_s


class Asker:
    """Connections that each ask again as soon as they have their answer. Raises AssertionError: an answer is not 200.

    Attributes:
        longest: bytes of the longest answer.
    """

    def __init__(self, address: tuple[str, int] | str, connections: int) -> None:
        """
        Args:
            address: host and port, or the path of a unix socket.
        """
        self.longest = 0
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        for _ in range(connections):
            if isinstance(address, str):
                taken = socket.socket(socket.AF_UNIX)
                taken.settimeout(_WAIT_S)
                taken.connect(address)
            else:
                taken = socket.create_connection(address, _WAIT_S)
                taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(taken)
            self._selector.register(taken, selectors.EVENT_READ)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for one in self._sockets:
            one.close()

    def ask_for(self, questions: Sequence[bytes], seconds: float) -> AskingResult:
        """Ask on all connections for some time."""
        began_s = time.perf_counter()
        end_s, count = began_s + seconds, 0
        for one in self._sockets:
            one.sendall(questions[count % len(questions)])
            count += 1
        waiting = len(self._sockets)
        while waiting:
            for key, _ in self._selector.select(_WAIT_S):
                assert isinstance(key.fileobj, socket.socket)
                _answer(key.fileobj)
                if time.perf_counter() < end_s:
                    key.fileobj.sendall(questions[count % len(questions)])
                    count += 1
                else:
                    waiting -= 1
        return AskingResult(count, time.perf_counter() - began_s)

    def ask_at(self, questions: Sequence[bytes], per_s: float, is_over: Callable[[], bool]) -> list[float]:
        """Ask at a steady rate, whether answers come or not, until it is over.

        Seconds from when each was due to its answer.
        """
        free, due_s = list(self._sockets), {}
        times_s: list[float] = []
        began_s, count = time.perf_counter(), 0
        while True:
            now_s = time.perf_counter()
            if now_s < began_s + count / per_s:
                if is_over():
                    break
            elif free:
                due_s[(taken := free.pop())] = began_s + count / per_s
                taken.sendall(questions[count % len(questions)])
                count += 1
                continue
            wait_s = max(0.0, began_s + count / per_s - now_s) if free else _WAIT_S
            for key, _ in self._selector.select(wait_s):
                assert isinstance(key.fileobj, socket.socket)
                _answer(key.fileobj)
                times_s.append(time.perf_counter() - due_s.pop(key.fileobj))
                free.append(key.fileobj)
        for one in due_s:
            _answer(one)
        return times_s

    def ask(self, questions: Sequence[bytes], count: int) -> list[float]:
        """Ask one question after the other on the first connection. How long each took, in seconds."""
        asked, times_s = self._sockets[0], []
        for number in range(count):
            began_s = time.perf_counter()
            asked.sendall(questions[number % len(questions)])
            body = _answer(asked)
            times_s.append(time.perf_counter() - began_s)
            self.longest = max(self.longest, len(body))
        return times_s


def _answer(sock: socket.socket) -> bytes:
    """The body of one answer."""
    data = sock.recv(1 << 16)
    while (end := data.find(b"\r\n\r\n")) < 0:
        more = sock.recv(1 << 16)
        assert more, "the catalog has ended the connection"
        data += more
    assert data.startswith(b"HTTP/1.1 200"), data[:400]
    at = data.find(b"content-length: ", 0, end)
    length = int(data[at + 16 : data.find(b"\r\n", at)])
    while len(data) < end + 4 + length:
        data += sock.recv(1 << 16)
    return data[end + 4 :]
