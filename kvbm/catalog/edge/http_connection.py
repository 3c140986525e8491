"""One HTTP connection of the catalog: uvicorn's httptools protocol, read in small pieces, bounded, and short-cut for
short questions.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvbm.catalog.access.judge import UNIX_HOST
from kvbm.catalog.edge.connections import Connection, Connections, ConnectionStage, unsent_bytes
from kvbm.catalog.edge.fast_path import BINARY_TYPE, NOTHING_HELD, PATHS, Answered, FastPath, ShortQuestion
from kvbm.catalog.edge.gate import PEER, authorization, content_type

MAX_HEADER_BYTES = 32 << 10
READ_BYTES = 16 << 10
_UNSENT_BYTES = 64 << 10
_BUFFERED_BYTES = 8 << 10  # of a body nobody has asked for yet
_SHORT_S = 1.0  # a body that takes longer goes the long way, which says when it took too long
_WISHES = (b"upgrade", b"http2-settings")
_MOST_PIPELINED = 32  # requests that wait for the answer before theirs; what comes then is not read


class HttpConnection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection, with its stage told to `connections`.

    All connections of a loop read into one buffer: what is in it is taken apart before the loop does something else.

    Args:
        at_once: answers what it can without the application.
        of_uvicorn: arguments of uvicorn's protocols.
    """

    _buffer = memoryview(bytearray(READ_BYTES))

    def __init__(self, connections: Connections, connection: Connection, at_once: FastPath, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._connections, self._connection, self._at_once = connections, connection, at_once
        self.parser = self._new_parser()
        self._is_refused_upgrade = False  # the header that was just read, which is read again without that wish
        self._idle = ConnectionStage.HEADER  # what it is between requests
        self._in_header = False
        self._is_between = True  # the parser has nothing of a request
        self._plain_s = -math.inf  # when a plain question was answered last
        self._header_bytes = 0
        self._question: ShortQuestion | None = None  # that may be answered at once
        self._body = bytearray()  # of it
        self._held = NOTHING_HELD
        self._waiting: asyncio.TimerHandle | None = None  # for the rest of that body
        self._certificate: Mapping[str, Any] | None = None

    # -- of asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if self._connection.sock.family == socket.AF_UNIX:
            self.client = (UNIX_HOST, 0)
        self._certificate = transport.get_extra_info("peercert") or None
        if self._certificate:
            self.app_state = {**self.app_state, PEER: self._certificate}
        if not self._connections.opened(self._connection, transport):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._connections.closed(self._connection)
        self._end_short()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.data_received(self._buffer[:nbytes])  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        """Answer plain questions, and take apart what else was read."""
        answered = self._answer_plain(data) if self._is_between else 0
        if not answered:
            self._take_apart(data, 0)
        elif answered < len(data):
            self._take_apart(memoryview(data)[answered:], answered)

    def timeout_keep_alive_handler(self) -> None:
        """See `HttpToolsProtocol`. Plain answers leave the timer as it is, and say when they were given."""
        left_s = self._plain_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def _answer_plain(self, data: bytes) -> int:
        """Answer the plain questions that what was read begins with. Returns how many bytes of it they are."""
        cycle = self._current()
        if (cycle is not None and not cycle.response_complete) or self.transport.is_closing():
            return 0
        at_once, host, at, end = self._at_once, self.client[0] if self.client else "", 0, len(data)
        while at < end and not self.flow.write_paused:
            asked = at_once.read_plain(data, at, end)
            if asked is None or (host != UNIX_HOST and not at_once.hosts.answers_to(asked.host)):
                break
            answered = at_once.answer_plain(asked, host, self._certificate)
            if answered is None:
                break
            self._write(answered)
            at += asked.request_bytes
        if at:
            self._plain_s = self.loop.time()
            if self._connection.stage is not self._idle:
                self._connections.moved(self._connection, self._idle)
        return at

    def _take_apart(self, data: bytes | memoryview, before: int) -> None:
        """Take apart what was read behind so many bytes that are answered."""
        if self.transport.is_closing():
            return
        was_in_header = self._in_header
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_header:
            self._header_bytes = before + len(data) + (self._header_bytes if was_in_header else 0)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("The header of the request is too large.")
        cycle = self._current()
        if cycle is not None and len(cycle.body) > _BUFFERED_BYTES:
            self.flow.pause_reading()
        if self._question is not None and self._waiting is None:
            self._waiting = self.loop.call_later(_SHORT_S, self._go_long)
        self._tell_stage()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._connections.stuck(self._connection, unsent_bytes(self.transport))

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._connections.flows(self._connection)

    # -- of httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many requests before their answers")
        self._in_header = True
        self._is_between = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which nobody reads."""
        if self._in_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a short answer, or the application."""
        self._in_header = False
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            self._is_refused_upgrade = True
        elif not self._begin_short():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._question is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """All of the request is there."""
        self._is_between = True
        if self._is_refused_upgrade:
            return
        if self._question is None:
            super().on_message_complete()
            return
        answered = self._at_once.answer(self._question, bytes(self._body))
        if answered is None:
            self._go_long()
            super().on_message_complete()
        else:
            self._end_short()
            self._write(answered)

    def on_response_complete(self) -> None:
        """The application has answered."""
        self._answered(bool(getattr(self.cycle.scope.get("kvbm.caller"), "name", "")))
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        self._tell_stage()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: an answer to what came before
        return parser

    def _parse(self, data: bytes | memoryview) -> None:
        """Take requests apart. Raises HttpParserError.

        The parser leaves behind the header of a request that wishes for another protocol (`Upgrade: h2c`, which Java's
        clients send with every request), and takes its body for the next request. We speak no other, and who ignores
        the wish answers the request (RFC 9110, 7.8): another parser reads the header without it, and goes on.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as left:
                data = data[left.args[0] :]
            else:
                return
            head = self._head_without_upgrade()
            self._is_refused_upgrade = False
            self.parser = self._new_parser()
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [line, *(b"%b: %b" % header for header in _without_upgrade(self.headers))]
        return b"\r\n".join([*lines, b"", b""])

    def _current(self) -> RequestResponseCycle | None:
        """The last request that the application got."""
        return self.cycle

    def _begin_short(self) -> bool:
        """Whether the request is one that may be answered at once; then room is taken for its body."""
        if self.url not in PATHS or self.parser.get_method() != b"POST" or self.expect_100_continue:
            return False
        cycle = self._current()
        if (cycle is not None and not cycle.response_complete) or self.flow.write_paused:
            return False
        length, kind, trace = -1, content_type(self.headers), ""
        for name, value in self.headers:
            if name == b"content-length":
                length = int(value) if value.isdigit() and len(value) < 9 else -1
            elif name == b"transfer-encoding":
                return False
            elif name == b"traceparent":
                trace = value.decode("latin-1")
        if length < 0 or kind is None or not self.parser.should_keep_alive():
            return False
        host = self.client[0] if self.client else ""
        if host != UNIX_HOST and self._at_once.hosts.refused(self.headers) is not None:
            return False
        proof = authorization(self.headers), self._certificate
        question = ShortQuestion(self.url, kind == BINARY_TYPE, host, *proof, trace)
        held = self._at_once.hold(question, length)
        if held is None:
            return False
        self._question, self._held = question, held
        return True

    def _end_short(self) -> None:
        if self._question is not None:
            self._at_once.give_back(self._held)
            self._question, self._held = None, NOTHING_HELD
            self._body = bytearray()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _go_long(self) -> None:
        """Give the request to the application, as far as it has come."""
        body, was_short = bytes(self._body), self._question is not None
        self._end_short()
        if was_short and not self.transport.is_closing():
            super().on_headers_complete()
            super().on_body(body)

    def _write(self, answered: Answered) -> None:
        self.server_state.total_requests += 1
        head = self._at_once.head(self.server_state.default_headers, answered.status, answered.content_type)
        self.transport.write(b"%b%d\r\n\r\n%b" % (head, len(answered.body), answered.body))
        self._answered(bool(answered.caller.name))
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _answered(self, is_known: bool) -> None:
        self._idle = ConnectionStage.KNOWN if is_known else ConnectionStage.IDLE
        self._connections.asked(self._connection)
        transport = self.transport
        unsent = unsent_bytes(transport) if self.scheme == "https" else transport.get_write_buffer_size()
        if unsent > _UNSENT_BYTES:
            self._connections.stuck(self._connection, unsent)

    def _tell_stage(self) -> None:
        self._connections.moved(self._connection, self._stage())

    def _stage(self) -> ConnectionStage:
        cycle = self._current()
        if cycle is not None and not cycle.response_complete:
            return ConnectionStage.BODY if cycle.more_body and not self.pipeline else ConnectionStage.ANSWER
        if self._question is not None:
            return ConnectionStage.BODY
        return ConnectionStage.HEADER if self._in_header else self._idle


def _without_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Headers without the wish for another protocol; names are in small letters."""
    for name, value in headers:
        if name == b"connection":
            others = [one.strip() for one in value.split(b",") if one.strip().lower() not in _WISHES]
            if others:
                yield name, b", ".join(others)
        elif name not in _WISHES:
            yield name, value
