"""One connection to a NATS server, on which one question is asked at a time: the thread that asks writes and reads by
itself.

A library that reads in a thread or loop of its own costs two changes of threads a question, which take longer than the
answer.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from typing import Any, NamedTuple

import msgspec

from kvbm.core.errors import CatalogError
from kvbm.core.nats_address import NatsServer
from kvbm.locate.nats_bytes import MOST_MESSAGE_BYTES, NatsMessage, Parser, WireError, Word
from kvbm.locate.nats_proof import NatsProof
from kvbm.locate.nats_socket import PlainSocket, TlsSocket

_NOBODY = b"503"
_MOST_IDLE_READS = 64
_ANY_SERVER = "start a nats-server there, or correct the URL"
_REFUSED_USER = "check the user, password or key, and that a nats-server listens there"


class LostError(CatalogError):
    """The connection is lost, or cannot be made: another one may do.

    Attributes:
        was_asked: the question may have reached somebody.
    """

    def __init__(self, message: str, was_asked: bool = False) -> None:
        super().__init__(message)
        self.was_asked = was_asked


class AnswerLateError(CatalogError):
    """No answer came in time."""


class NobodyListensError(CatalogError):
    """Nobody listens to the subject."""


class _Info(msgspec.Struct):
    """What a server says of itself."""

    max_payload: int = 1 << 20
    nonce: str = ""
    tls_required: bool = False
    tls_available: bool = False
    headers: bool = False


class Question(NamedTuple):
    """What is sent.

    Attributes:
        headers: lines, each with its end; b"" for none.
    """

    subject: bytes
    headers: bytes
    body: bytes


class Wire:
    """A connection. One thread at a time.

    Attributes:
        server: that it leads to.
        max_payload: bytes a message may have there.
    """

    def __init__(self, sock: socket.socket, server: NatsServer) -> None:
        """Prefer `Wire.open`."""
        self._sock: PlainSocket | TlsSocket = PlainSocket(sock)
        self.server = server
        self.max_payload = 1 << 20
        self._parser = Parser()
        self._inbox = b"_INBOX." + secrets.token_hex(11).encode()
        self._counter = itertools.count(1)

    @classmethod
    def open(cls, server: NatsServer, proof: NatsProof, deadline_s: float) -> Wire:
        """Connect and prove who asks. Raises LostError; ConfigError, MissingExtraError: files that cannot be used."""
        try:
            sock = socket.create_connection((server.host, server.port), _left(deadline_s))
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error) or "no answer"
            raise LostError(f"no connection to NATS at {server.shown} ({why}); {_ANY_SERVER}") from None
        wire = cls(sock, server)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire._greet(proof, deadline_s)
        except BaseException:
            wire.close()
            raise
        return wire

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def is_alive(self) -> bool:
        """Whether an idle connection can be used: what has come meanwhile is read, and the server's pings are
        answered.
        """
        try:
            for _ in range(_MOST_IDLE_READS):
                data = self._sock.read()
                if data is None:
                    return True
                if not data:
                    return False
                self._parser.feed(data)
                while (found := self._parser.next()) is not None:
                    if isinstance(found, Word):
                        self._heed(found, time.monotonic() + 1.0)
            return False  # nobody has asked for so much
        except (OSError, CatalogError):
            return False

    def ask(self, question: Question, deadline_s: float) -> NatsMessage:
        """Send a question and wait for its answer.

        Raises: LostError: the connection ended. LateError: no answer in time; one that comes later is passed over.
            NobodyError.
        CatalogError: the server refuses.
        """
        inbox = b"%b.%d" % (self._inbox, next(self._counter))
        subject, headers, body = question
        if headers:
            head = b"NATS/1.0\r\n%b\r\n" % headers
            sizes = b"%d %d" % (len(head), len(head) + len(body))
            line = b"HPUB %b %b %b\r\n%b" % (subject, inbox, sizes, head)
        else:
            line = b"PUB %b %b %d\r\n" % (subject, inbox, len(body))
        self._send(b"".join((line, body, b"\r\n")), deadline_s)
        while True:
            found = self._next(deadline_s, was_asked=True)
            if isinstance(found, Word):
                self._heed(found, deadline_s, was_asked=True)
            elif found.subject == inbox:
                if found.status == _NOBODY and not found.body:
                    raise NobodyListensError(f"nobody listens to {subject.decode()} at {self.server.shown}")
                return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _greet(self, proof: NatsProof, deadline_s: float) -> None:
        found = self._next(deadline_s)
        if not isinstance(found, Word) or found.name != b"INFO":
            raise self._lost("it does not greet as NATS does", _ANY_SERVER)
        info = self._info(found)
        is_wanted = proof.wants_tls(self.server)
        if is_wanted and not (info.tls_required or info.tls_available):
            raise self._lost("the server offers no TLS, and the settings want it", "check nats.tls_ca and the server")
        if is_wanted or info.tls_required:
            if not self._parser.is_empty:  # somebody between us has put it there
                raise self._lost("it goes on in the clear before TLS has begun", "look who is between")
            self._begin_tls(proof, deadline_s)
        self.max_payload = max(1, min(info.max_payload, MOST_MESSAGE_BYTES))
        self._parser.most_bytes = self.max_payload + (64 << 10)
        if not info.headers:
            raise self._lost("the server has no headers", "use nats-server 2.2 or newer")
        fields: dict[str, Any] = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "kvbm",
            "name": "kvbm",
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "echo": False,
            "tls_required": is_wanted,
        } | proof.connect_fields(self.server, info.nonce)
        begin = b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n" % (msgspec.json.encode(fields), self._inbox)
        self._send(begin, deadline_s)
        while True:
            found = self._next(deadline_s)
            if isinstance(found, Word):
                if found.name == b"PONG":
                    return
                self._heed(found, deadline_s)

    def _begin_tls(self, proof: NatsProof, deadline_s: float) -> None:
        try:
            self._sock = TlsSocket(self._sock.sock, proof.tls_context(), self.server.host, _left(deadline_s))
        except OSError as error:
            why = getattr(error, "reason", None) or error
            raise self._lost(
                f"no TLS: {why}",
                "check nats.tls_ca and nats.tls_cert, and that the server's certificate names this host",
            ) from None

    def _info(self, word: Word) -> _Info:
        try:
            return msgspec.json.decode(word.rest, type=_Info)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._lost("it does not greet as NATS does", _ANY_SERVER) from None

    def _heed(self, word: Word, deadline_s: float, was_asked: bool = False) -> None:
        """Answer a ping; raise what the server complains of."""
        if word.name == b"PING":
            self._send(b"PONG\r\n", deadline_s)
        elif word.name == b"-ERR":
            text = word.rest.strip(b"'").decode("ascii", "replace")[:300]
            if text.lower().startswith("permissions violation"):
                raise CatalogError(
                    f"NATS at {self.server.shown} refuses: {text}; use the key of the caller that the URL names, as "
                    "`kvbm nats-permissions --router NAME` makes it"
                )
            raise self._lost(text, _REFUSED_USER, was_asked)

    def _next(self, deadline_s: float, was_asked: bool = False) -> NatsMessage | Word:
        while True:
            try:
                found = self._parser.next()
            except WireError as error:
                raise self._lost(f"it says what NATS does not: {error}", _ANY_SERVER, was_asked) from None
            if found is not None:
                return found
            try:
                data = self._sock.wait(deadline_s - time.monotonic())
            except TimeoutError:
                if was_asked:
                    raise AnswerLateError(f"no answer over NATS at {self.server.shown}") from None
                raise self._lost("no answer in time", _ANY_SERVER) from None
            except OSError as error:
                raise self._lost(error.strerror or str(error), _ANY_SERVER, was_asked) from None
            if not data:
                raise self._lost("it has ended the connection", _REFUSED_USER, was_asked)
            self._parser.feed(data)

    def _send(self, data: bytes, deadline_s: float) -> None:
        try:
            self._sock.send(data, deadline_s)
        except OSError as error:
            why = "it takes no more bytes" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise self._lost(why, _ANY_SERVER) from None

    def _lost(self, why: str, remedy: str, was_asked: bool = False) -> LostError:
        return LostError(f"the connection to NATS at {self.server.shown} is lost ({why}); {remedy}", was_asked)


def _left(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
