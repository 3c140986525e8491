"""An HTTP server between a client and a real store, that answers as told instead: with errors, late, never, in part,
wrongly.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit, urlunsplit

from tests.certificates import Certificate

_DRIP_S = 0.05
_FORWARD_S = 120.0


class Fault(NamedTuple):
    """What becomes of a request.

    Attributes:
        kind: "status": answered with `status` and `code`, not passed on. "deaf": passed on, then answered with
            `status`. "never": no answer, ever. "held": passed on once the server is told `released`. "stalled": then
            the connection ends. "slow": the real answer, a byte at a time. "cut": the real answer's head and half its
            body, then the end. "without": passed on without its `header`. "dated": passed on with a date an hour old.
            "reset": the connection is reset. "again": the last real answer once more.
        times: how many requests it befalls; then all is well.
        method: of the requests it befalls; "" for all.
        header: that they must have, "" for none.
        region: that the answer names as the bucket's.
    """

    kind: str
    status: int = 0
    code: str = ""
    times: int = 1_000_000
    method: str = ""
    header: str = ""
    region: str = ""


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]


class FaultyServer:
    """A running one.

    Attributes:
        faults: the first that fits a request befalls it.
        asked: what has come.
        at_once: requests that are under way.
        most_at_once: of them at the same time.
        released: what was held goes on.
    """

    def __init__(self, port: int, path: str, scheme: str = "http") -> None:
        self.url = f"{scheme}://127.0.0.1:{port}{path}"
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self.at_once = 0
        self.over, self.released = threading.Event(), threading.Event()
        self.last: tuple[int, dict[str, str], bytes] = (200, {}, b"")
        self._lock = threading.Lock()

    def begun(self, asked: Asked) -> Fault | None:
        """Take note of a request; the fault that befalls it."""
        with self._lock:
            self.asked.append(asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            for at, fault in enumerate(self.faults):
                if fault.times and fault.method in ("", asked.method) and (fault.header in ("", *asked.headers)):
                    self.faults[at] = fault._replace(times=fault.times - 1)
                    return fault
        return None

    def ended(self) -> None:
        with self._lock:
            self.at_once -= 1


@contextmanager
def faulty(target: str, certificate: Certificate | None = None) -> Iterator[FaultyServer]:
    """A server before the one at URL `target`, faultless until told otherwise. It does as a proxy for http, too.

    Args:
        certificate: it speaks TLS with this one.
    """
    server = _Listener(urlsplit(target), certificate)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="faulty-http", daemon=True)
    thread.start()
    try:
        yield server.state
    finally:
        server.state.over.set()
        server.state.released.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


class _Listener(ThreadingHTTPServer):
    """Listens on a free port, with a thread for each connection."""

    daemon_threads = True

    def __init__(self, target: SplitResult, certificate: Certificate | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.cert, certificate.key)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.target = target
        self.state = FaultyServer(self.server_port, target.path, "http" if certificate is None else "https")


class _Handler(BaseHTTPRequestHandler):
    """One connection: each request is passed on, unless a fault befalls it."""

    protocol_version = "HTTP/1.1"
    timeout = 600
    server: _Listener

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self.server.state.begun(Asked(self.command, self.path, headers))
        self._is_under_way = True
        try:
            if fault is None:
                self._send(*self._forward(body))
            else:
                _BEFALL[fault.kind](self, fault, body)
        except OSError:
            self.close_connection = True  # the client has gone
        finally:
            self._leave()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

    # -- what befalls a request: `Fault.kind` -----------------------------------------------------------------------

    def _status(self, fault: Fault, _: bytes) -> None:
        headers = {"x-amz-bucket-region": fault.region} if fault.region else {}
        self._send(fault.status, headers, _words(fault.code))

    def _deaf(self, fault: Fault, body: bytes) -> None:
        self._forward(body)
        self._send(fault.status, {}, _words(fault.code))

    def _without(self, fault: Fault, body: bytes) -> None:
        del self.headers[fault.header]
        self._send(*self._forward(body))

    def _dated(self, _: Fault, body: bytes) -> None:
        past = datetime.now(UTC) - timedelta(hours=1)
        self.headers.replace_header("x-amz-date", past.strftime("%Y%m%dT%H%M%SZ"))
        self._send(*self._forward(body))

    def _never(self, *_: object) -> None:
        self.server.state.over.wait()
        self.close_connection = True

    def _stalled(self, *_: object) -> None:
        self.server.state.released.wait()
        self.close_connection = True

    def _held(self, _: Fault, body: bytes) -> None:
        self.server.state.released.wait()
        self._send(*self._forward(body))

    def _reset(self, *_: object) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _slow(self, _: Fault, body: bytes) -> None:
        self._send(*self._forward(body), dripping=True)

    def _cut(self, _: Fault, body: bytes) -> None:
        status, headers, real = self._forward(body)
        self._send(status, headers, real, sent=len(real) // 2)
        self.close_connection = True

    def _again(self, *_: object) -> None:
        self._send(*self.server.state.last)

    # -- the way to the real server, and the answer's -----------------------------------------------------------------

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection(
            self.server.target.hostname or "", self.server.target.port or 80, timeout=_FORWARD_S
        )
        try:
            asked = urlsplit(self.path)  # of a proxy the whole URL is asked for
            path = urlunsplit(asked._replace(scheme="", netloc=""))
            link.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                link.putheader(name, self.server.target.netloc if asked.netloc and name.lower() == "host" else value)
            link.endheaders(body or None)
            real = link.getresponse()
            self.server.state.last = (real.status, dict(real.getheaders()), real.read())
            return self.server.state.last
        finally:
            link.close()

    def _send(
        self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None, dripping: bool = False
    ) -> None:
        self._leave()
        self.send_response_only(status)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "keep-alive"):
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if not dripping:
            self.wfile.write(body[:sent])
            return
        for at in range(len(body)):
            self.wfile.write(body[at : at + 1])
            self.wfile.flush()
            if self.server.state.over.wait(_DRIP_S):
                return

    def _leave(self) -> None:
        """The request is no longer under way.

        Counted before the answer is sent: behind it the client may send the next.
        """
        if self._is_under_way:
            self._is_under_way = False
            self.server.state.ended()


_BEFALL: dict[str, Callable[[_Handler, Fault, bytes], None]] = {
    "status": _Handler._status,
    "deaf": _Handler._deaf,
    "without": _Handler._without,
    "dated": _Handler._dated,
    "never": _Handler._never,
    "stalled": _Handler._stalled,
    "held": _Handler._held,
    "reset": _Handler._reset,
    "slow": _Handler._slow,
    "cut": _Handler._cut,
    "again": _Handler._again,
}


def _words(code: str) -> bytes:
    return (
        f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>as told</Message></Error>'.encode() if code else b""
    )
