"""A tiny HTTP server for metrics, for programs that have none: one thread, bounded in all that strangers can take."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from kvbm.core.checks import check_text, checked_int
from kvbm.core.errors import ConfigError
from kvbm.safe_log import RateLimitedLog

_PATH: Final = "/metrics"
_MOST_CONNECTIONS = 16  # when one more comes, the oldest goes: whoever waits takes no place for ever
_BACKLOG = 128
_MOST_REQUEST_BYTES = 8192
_CONNECTION_S = 10.0  # for a whole scrape
_REUSED_S = 0.5  # a text is read so seldom, however many ask
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}

_log = RateLimitedLog()


class MetricsServer:
    """Serves metrics over HTTP until it is closed. `kvbm.serve_metrics` opens it.

    A context manager. Any thread may call it. It answers `GET /metrics` in a thread of its own, without TLS and without
    asking who it is, so listen on the loopback, or where only Prometheus can reach it.

    Args:
        read: gives the text in Prometheus' format; called in the server's thread, twice a second at most.
        content_type: of the text.
        host, port: where to listen; port 0 takes a free one.
        ended: called once when it is closed.
    Raises: ConfigError: nobody can listen there.

    Attributes:
        host, port: where it listens.
    """

    def __init__(
        self,
        read: Callable[[], bytes],
        content_type: str,
        host: str,
        port: int,
        ended: Callable[[MetricsServer], None] = lambda _: None,
    ) -> None:
        self._read, self._content_type, self._ended = read, content_type, ended
        self._listener = _listen(host, port)
        self.host, self.port = str(self._listener.getsockname()[0]), int(self._listener.getsockname()[1])
        self._text, self._read_s = b"", -_REUSED_S
        self._connections: dict[socket.socket, _Connection] = {}  # the oldest first
        self._is_closing = False
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"kvbm-metrics-{self.port}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._close_sockets()
            raise

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{_PATH}"

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop listening, and end the thread if it ends in this time. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        with suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._listener.close()  # also where the thread still waits for a manager
        self._ended(self)

    def disown(self) -> None:
        """This process is a forked child: the port is its parent's."""
        self._is_closing = True
        self._close_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                while not self._is_closing:
                    self._step(selector)
            finally:
                self._close_sockets()

    def _step(self, selector: selectors.BaseSelector) -> None:
        try:
            for key, _ in selector.select(1.0 if self._connections else None):
                if key.fileobj is self._listener:
                    self._accept(selector)
                elif (connection := self._connections.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._serve(connection, selector)
            now_s = time.monotonic()
            for connection in [one for one in self._connections.values() if one.until_s <= now_s]:
                self._drop(connection, selector)
        except Exception as error:  # noqa: BLE001 - the thread ends for nothing but `close`
            if not self._is_closing:
                _log.warn("scrape.failed", why=repr(error), remedy="report it; the next one is tried")
                time.sleep(0.05)  # what goes on failing takes no CPU from the engine

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:  # whoever came has gone
            return
        accepted.setblocking(False)
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._drop(next(iter(self._connections.values())), selector)
        connection = _Connection(accepted, time.monotonic() + _CONNECTION_S)
        self._connections[accepted] = connection
        selector.register(accepted, selectors.EVENT_READ)

    def _serve(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        try:
            if connection.answer is None and (request := connection.receive()) is not None:
                connection.answer = memoryview(self._answer(request))
                selector.modify(connection.socket, selectors.EVENT_WRITE)
            elif connection.answer and connection.send():
                selector.modify(connection.socket, selectors.EVENT_READ)  # until the other end has read it, and closes
            elif connection.has_ended():
                self._drop(connection, selector)
        except BlockingIOError:
            return
        except OSError:  # it has gone
            self._drop(connection, selector)

    def _drop(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection.socket)
        del self._connections[connection.socket]
        connection.socket.close()

    def _answer(self, request: bytes) -> bytes:
        """The whole answer to a request's head; an empty one is too long."""
        if not request:
            return _said(431, f"a request has {_MOST_REQUEST_BYTES} bytes at most")
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _said(400, "this is no HTTP/1 request")
        method, target, _ = words
        if target.partition("?")[0] != _PATH:
            return _said(404, f"metrics are at {_PATH}", head=method == "HEAD")
        if method not in ("GET", "HEAD"):
            return _said(405, "ask with GET", more="Allow: GET, HEAD\r\n")
        now_s = time.monotonic()
        if now_s - self._read_s >= _REUSED_S:
            try:
                self._text = self._read()
            except Exception as error:  # noqa: BLE001 - a scrape that fails is Prometheus' to tell
                _log.warn("scrape.failed", why=repr(error), remedy="report it; the next one is tried")
                return _said(500, "the metrics cannot be read; the process's log says why")
            self._read_s = time.monotonic()
        return _answered(200, self._content_type, self._text, head=method == "HEAD")

    def _close_sockets(self) -> None:
        for one in (self._listener, self._woken, self._waker, *self._connections):
            with suppress(OSError):
                one.close()
        self._connections.clear()


class _Connection:
    """One that has asked, or may.

    Attributes:
        until_s: when it is dropped at the latest.
        answer: what is not sent of it; None: nothing was asked yet.
    """

    __slots__ = ("_received", "answer", "socket", "until_s")

    def __init__(self, accepted: socket.socket, until_s: float) -> None:
        self.socket, self.until_s = accepted, until_s
        self.answer: memoryview | None = None
        self._received = b""

    def receive(self) -> bytes | None:
        """The head of the request, b"" where it is too long; None while it is not whole. Raises OSError: it has ended,
        BlockingIOError: nothing has come.
        """
        got = self.socket.recv(_MOST_REQUEST_BYTES)
        if not got:
            raise ConnectionResetError
        self._received += got
        if b"\r\n\r\n" in self._received[:_MOST_REQUEST_BYTES]:
            return self._received
        return b"" if len(self._received) >= _MOST_REQUEST_BYTES else None

    def send(self) -> bool:
        """Send on; whether all is sent. The other end then sees the end of it."""
        assert self.answer is not None
        self.answer = self.answer[self.socket.send(self.answer) :]
        if not self.answer:
            self.socket.shutdown(socket.SHUT_WR)
        return not self.answer

    def has_ended(self) -> bool:
        """Whether the other end has closed; what it still sends is thrown away, else a reset could overtake the
        answer.
        """
        return self.answer is not None and not self.answer and not self.socket.recv(_MOST_REQUEST_BYTES)


def _said(status: int, words: str, more: str = "", head: bool = False) -> bytes:
    return _answered(status, "text/plain; charset=utf-8", f"{words}\n".encode(), more, head)


def _answered(status: int, content_type: str, body: bytes, more: str = "", head: bool = False) -> bytes:
    begin = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}"
        "Connection: close\r\n\r\n"
    )
    return begin.encode() + (b"" if head else body)


def _listen(host: str, port: int) -> socket.socket:
    check_text(host, "host")
    checked_int(port, "port", most=65535)
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(
            f"metrics cannot be served at {host}:{port} ({why}); give another host or port, port 0 takes a free one"
        ) from None
    return listener
