"""Requests to a catalog over HTTP from a loop of asyncio: what `transport` does with threads that wait, without any.

Connections are kept, and one at a time has a request: a task that is cancelled closes its own. HTTP/1.1 as a catalog
speaks it: an answer has a length, or comes in chunks, or ends with its connection. A catalog behind a proxy that the
environment names is asked by a thread of the loop's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from kvbm.locate.credentials import CatalogCredentials, CredentialProof
from kvbm.locate.proxies import proxy_of
from kvbm.locate.requests import UNIX, AskedFirst, CatalogRequest, Turns, away, distrusted, ended, late, place_of
from kvbm.locate.transport import CatalogTransport
from kvbm.telemetry.traceparent import NAME as TRACEPARENT
from kvbm.telemetry.traceparent import traceparent

KEPT = 16  # connections to a catalog that nobody uses
_HEAD_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}


class _LostError(Exception):
    """The connection ended.

    Attributes:
        is_silent: before a byte of an answer came, as a kept connection does that the other side has closed.
    """

    def __init__(self, why: str, is_silent: bool) -> None:
        super().__init__(why)
        self.is_silent = is_silent


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    term: int  # of the place when it was begun


class _Place:
    """One catalog, with its connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._is_unix = url.startswith(UNIX)
        parts = urlsplit("http://localhost" if self._is_unix else url)
        self._path, self._is_tls = url.removeprefix(UNIX), parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        self._named = parts.netloc
        self._idle: list[_Connection] = []
        self._term = 0

    def close(self) -> None:
        """Give up the connections that there are: those in use once their answers have come."""
        self._term += 1
        idle, self._idle = self._idle, []
        for one in idle:
            one.writer.close()

    async def ask(self, request: CatalogRequest, proof: CredentialProof) -> tuple[int, bytes]:
        """Its status and body. Raises AwayError, CatalogError."""
        while True:
            kept = self._idle.pop() if self._idle else None
            if kept is not None and kept.reader.at_eof():
                kept.writer.close()
                continue
            connection = kept or await self._opened(proof.context)
            try:
                return await self._exchange(connection, request, proof.token)
            except _LostError as error:
                if kept is None or not error.is_silent or not request.may_repeat:
                    shows_certificate = kept is None and error.is_silent and proof.shows_certificate
                    raise away(self.url, ended(str(error), shows_certificate)) from None
            except ssl.SSLError as error:  # a server's word on a certificate comes once the connection was made
                raise distrusted(self.url, error) from None
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
                raise away(self.url, str(error) or type(error).__name__) from None

    async def _opened(self, context: ssl.SSLContext | None) -> _Connection:
        term = self._term
        try:
            if self._is_unix:
                return _Connection(*await asyncio.open_unix_connection(self._path, limit=_HEAD_BYTES), term)
            tls = context if self._is_tls else None
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=tls, limit=_HEAD_BYTES), term)
        except ssl.SSLError as error:
            raise distrusted(self.url, error) from None
        except OSError as error:
            raise away(self.url, _words(error), was_asked=False) from None

    async def _exchange(self, connection: _Connection, request: CatalogRequest, token: str) -> tuple[int, bytes]:
        reader, writer, term = connection
        is_kept = False
        try:
            writer.write(_head(request, self._named, token))
            if request.body:
                writer.write(request.body)
            status, headers = await _answer_head(connection)
            if "content-length" in headers:
                body, is_kept = await reader.readexactly(int(headers["content-length"])), True
            elif headers.get("transfer-encoding", "").lower() == "chunked":
                body, is_kept = await _chunked(reader), True
            else:
                body = await reader.read()
            is_kept = is_kept and headers.get("connection", "").lower() != "close" and len(self._idle) < KEPT
            is_kept = (
                is_kept and term == self._term
            )  # else it speaks for a certificate that was replaced, or for nobody
            return status, body
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                writer.close()


class AsyncTransport:
    """As `CatalogTransport`, for one loop of asyncio.

    Args:
        urls: with commas between.
    Raises: CatalogError: a URL cannot be used. ConfigError: a file of the credentials cannot.
    """

    def __init__(self, urls: str, credentials: CatalogCredentials) -> None:
        self._places = [_Place(place_of(one)) for one in urls.split(",")]
        self._proxied = {
            place.url: CatalogTransport(place.url, credentials)
            for place in self._places
            if not place.url.startswith(UNIX) and proxy_of(place.url)
        }
        self._proof = CredentialProof(credentials, is_tls=any(one.url.startswith("https://") for one in self._places))
        self._first = AskedFirst([place.url for place in self._places])

    @property
    def url(self) -> str:
        """Of the catalog that is asked first."""
        return self._first.url

    async def send(self, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        """The answer's status and body.

        Raises CatalogError: none answers in time. CatalogClosedError: it was closed.
        """
        turns = Turns(self._first, request, timeout_s)
        for at, share_s in turns:
            with turns.asking():
                turns.take(at, await self._ask_within(self._places[at], request, share_s))
        return turns.end()

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._first.is_closed = True
        for place in self._places:
            place.close()
        for proxied in self._proxied.values():
            proxied.close()

    async def _ask_within(self, place: _Place, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(place, request, timeout_s)
        except TimeoutError:
            raise late(place.url, request.path, timeout_s) from None

    async def _ask(self, place: _Place, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        if (proxied := self._proxied.get(place.url)) is not None:
            return await asyncio.to_thread(proxied.send, request, timeout_s)
        self._prove()
        status, body = await place.ask(request, self._proof)
        if status == 401 and self._prove(again=True):
            status, body = await place.ask(request, self._proof)
        return status, body

    def _prove(self, again: bool = False) -> bool:
        """Take files that have changed; whether any has."""
        context = self._proof.context
        has_changed = self._proof.look(again)
        if self._proof.context is not context:
            for place in self._places:
                place.close()
        return has_changed


def _words(error: OSError) -> str:
    """Why a connection was not made; asyncio's own words name the address once more."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _head(request: CatalogRequest, host: str, token: str) -> bytes:
    lines = [f"{request.method} {request.path} HTTP/1.1", f"Host: {host}"]
    if request.body is not None:
        lines += [f"Content-Type: {request.content_type}", f"Content-Length: {len(request.body)}"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if parent := traceparent():
        lines.append(f"{TRACEPARENT}: {parent}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _answer_head(connection: _Connection) -> tuple[int, dict[str, str]]:
    """Status and headers, whose names are in lower case. Raises _LostError, ValueError: it is none of HTTP."""
    try:
        await connection.writer.drain()
        head = await connection.reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise _LostError("the connection was closed", is_silent=not error.partial) from None
    except (ConnectionError, BrokenPipeError) as error:
        raise _LostError(str(error), is_silent=True) from None
    first, *lines = head.decode("latin-1").split("\r\n")
    protocol, _, rest = first.partition(" ")
    if not protocol.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError("what answers speaks no HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(rest[:3]), headers


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # a trailer
    return b"".join(parts)
