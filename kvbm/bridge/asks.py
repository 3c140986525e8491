"""Asks over HTTP whose answers are bounded in bytes and in time, however a server sends them."""

from __future__ import annotations

import io
import socket
import time
from functools import partial
from http.client import HTTPResponse
from typing import Any, NamedTuple

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection


class HttpAnswer(NamedTuple):
    """What a server has answered.

    Attributes:
        body: longer than what was asked for: there is more, which was not read.
    """

    status: int
    body: bytes


class BoundedHttp:
    """Asks servers. One thread.

    Args:
        connect_s: of a connection to each address of the server's.
        within_s: from the ask, once it is sent, until the last byte of the answer that is read.
        most_bytes: of a body; a byte more is read of one that is longer.
    """

    def __init__(self, connect_s: float, within_s: float, most_bytes: int) -> None:
        self._timeout = urllib3.Timeout(connect=connect_s, read=within_s)
        self._most_bytes = most_bytes
        self._pools = urllib3.PoolManager(retries=False, timeout=self._timeout)
        self._pools.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def ask(self, method: str, url: str) -> HttpAnswer:
        """The answer. Raises urllib3.exceptions.HTTPError: none comes whole in time."""
        response = self._pools.request(method, url, preload_content=False, redirect=False)
        try:
            return HttpAnswer(response.status, response.read(self._most_bytes + 1, decode_content=False))
        finally:
            response.close()  # a connection that can be used again has been given back

    def status(self, method: str, url: str) -> int:
        """The answer's status; its body is not read. Raises as `ask`."""
        response = self._pools.request(method, url, preload_content=False, redirect=False)
        response.close()
        return int(response.status)

    def close(self) -> None:
        """Give the connections back."""
        self._pools.clear()


class _Bytes(io.RawIOBase):
    """The bytes of one answer, until a time on the monotonic clock; then TimeoutError."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._socket, self._until_s = sock, until_s
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)
        return self._raw.readinto(into)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, until_s: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        replaced, self.fp = self.fp, io.BufferedReader(_Bytes(sock, until_s))
        replaced.close()


class _Connection(HTTPConnection):
    def getresponse(self) -> Any:
        """As urllib3's, whose timeout is of each read."""
        assert isinstance(self.timeout, int | float)
        until_s = time.monotonic() + self.timeout
        self.response_class = partial(_Response, until_s=until_s)  # type: ignore[assignment]  # it is only called
        return super().getresponse()


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
