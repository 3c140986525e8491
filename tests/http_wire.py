"""HTTP whose bytes are a test's own."""

from __future__ import annotations

import itertools
import re
import socket
import time
from collections.abc import Sequence

from tests.nats_fixture import WAIT_S


class Wire:
    """A connection whose bytes are ours."""

    def __init__(self, url: str) -> None:
        host, _, port = url.partition("//")[2].rpartition(":")
        self.socket = socket.create_connection((host, int(port)), WAIT_S)
        self._read = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes, pause_s: float = 0.0) -> None:
        for part in parts:
            self.socket.sendall(part)
            time.sleep(pause_s)

    def answer(self, with_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """The next answer that is final: its status, headers and body.

        `with_body`: it has one, as answers to HEAD have not.
        """
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        if status.split()[1] == "100":
            return self.answer(with_body)
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"]) if with_body else 0
        while len(self._read) < length:
            self._more()
        body, self._read = self._read[:length], self._read[length:]
        return int(status.split()[1]), headers, body

    def ends(self) -> bool:
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError(f"ended after {self._read!r}")
        self._read += data


def check_in_any_order(wire: Wire, kinds: Sequence[bytes], plain: bytes) -> None:
    """Send each three of some requests in each order, as one piece: each is answered with 200, in its turn.

    Args:
        kinds: of which the last is answered with the body `plain`, the others with another.
    """
    for order in itertools.product(range(len(kinds)), repeat=3):
        wire.send(b"".join(kinds[kind] for kind in order))
        for kind in order:
            status, _, answer = wire.answer()
            assert (status, answer == plain) == (200, kind == len(kinds) - 1)


def post(path: str, body: bytes, *headers: str, length: bool = True) -> bytes:
    """A request; `length`: with the header that says how long its body is."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: 127.0.0.1",
        *headers,
        *([f"content-length: {len(body)}"] if length else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(path: str, body: bytes, *headers: str) -> bytes:
    """The same request in a form that goes the long way."""
    parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part)
    return post(path, b"", *headers, "transfer-encoding: chunked", length=False) + parts + b"0\r\n\r\n"


def same(body: bytes) -> bytes:
    """Without what differs from answer to answer: how old the view is."""
    return re.sub(rb'"view_age_s":[0-9.]+', b"", body)
