"""An HTTP server between a client and a real store, that answers as told instead: with errors, late, never, in part, wrongly."""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from tests.certificates import Certificate

_DRIP_S = 0.05
_FORWARD_S = 120.0


class Fault(NamedTuple):
    """What becomes of a request.

    Attributes:
        kind: "status": answered with `status` and `code`, not passed on. "deaf": passed on, then answered with `status`. "never": no
            answer, ever. "held": passed on once the server is told `released`. "stalled": then the connection ends. "slow": the real answer, a byte at a time. "cut": the real answer's head and half its body, then the end.
            "without": passed on without its `header`.
            "dated": passed on with a date an hour old.
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
def faulty(target: str, certificate: Certificate | None = None) -> Iterator[FaultyServer]:  # noqa: C901 - a table of faults
    """A server before the one at URL `target`, faultless until told otherwise. It does as a proxy for http, too.

    Args:
        certificate: it speaks TLS with this one.
    """
    parts = urlsplit(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 600

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            fault = state.begun(Asked(self.command, self.path, headers))
            self._is_under_way = True
            try:
                self._answer(fault or Fault("none"), body)
            except OSError:
                self.close_connection = True  # the client has gone
            finally:
                self._leave()

        def _leave(self) -> None:
            """The request is no longer under way. Counted before the answer is sent: behind it the client may send the next."""
            if self._is_under_way:
                self._is_under_way = False
                state.ended()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

        def _answer(self, fault: Fault, body: bytes) -> None:
            match fault.kind:
                case "status":
                    headers = {"x-amz-bucket-region": fault.region} if fault.region else {}
                    self._send(fault.status, headers, _words(fault.code))
                case "without":
                    del self.headers[fault.header]
                    self._send(*self._forward(body))
                case "dated":
                    past = datetime.now(UTC) - timedelta(hours=1)
                    self.headers.replace_header("x-amz-date", past.strftime("%Y%m%dT%H%M%SZ"))
                    self._send(*self._forward(body))
                case "deaf":
                    self._forward(body)
                    self._send(fault.status, {}, _words(fault.code))
                case "never":
                    state.over.wait()
                    self.close_connection = True
                case "stalled":
                    state.released.wait()
                    self.close_connection = True
                case "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                case "slow":
                    status, headers, real = self._forward(body)
                    self._send(status, headers, real, dripping=True)
                case "cut":
                    status, headers, real = self._forward(body)
                    self._send(status, headers, real, sent=len(real) // 2)
                    self.close_connection = True
                case "again":
                    self._send(*state.last)
                case _:
                    if fault.kind == "held":
                        state.released.wait()
                    self._send(*self._forward(body))

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            link = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_FORWARD_S)
            try:
                asked = urlsplit(self.path)  # of a proxy the whole URL is asked for
                path = urlunsplit(asked._replace(scheme="", netloc=""))
                link.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    link.putheader(name, parts.netloc if asked.netloc and name.lower() == "host" else value)
                link.endheaders(body or None)
                real = link.getresponse()
                state.last = (real.status, dict(real.getheaders()), real.read())
                return state.last
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
                if state.over.wait(_DRIP_S):
                    return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.cert, certificate.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    state = FaultyServer(server.server_port, parts.path, "http" if certificate is None else "https")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="faulty-http", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.over.set()
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


def _words(code: str) -> bytes:
    return (
        f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>as told</Message></Error>'.encode() if code else b""
    )
