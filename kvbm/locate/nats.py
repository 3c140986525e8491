"""Requests to a cluster's catalogs over NATS: any catalog that is ready answers, kept connections, several servers."""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec

from kvbm.core.answers import ErrorAnswer, ErrorDetail, ReadyAnswer
from kvbm.core.asks import JSON_TYPE, READY, STATUS_HEADER, TYPE_HEADER, ask_subject, message_of
from kvbm.core.errors import CatalogError
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.nats_bytes import NatsMessage, header
from kvbm.locate.nats_proof import NatsProof, target_of
from kvbm.locate.nats_wire import AnswerLateError, LostError, NobodyListensError, Question, Wire
from kvbm.locate.requests import NOT_READY, CatalogAwayError, CatalogRequest, closed, error_code, late
from kvbm.safe_log import SafeLog
from kvbm.telemetry.traceparent import NAME as TRACEPARENT
from kvbm.telemetry.traceparent import traceparent

log = SafeLog()

CONNECTIONS = 16  # kept; one for each question under way
_TRIES = 3
_PAUSE_S = 0.05  # before a question to which nobody listens is asked again; each next one is twice as long
_NOBODY_S = 2.0  # so long it is asked again: a catalog that has lost its connection is back by then
_STATUS = STATUS_HEADER.encode()
_SCHEMES = ("nats://", "tls://")


def is_nats(url: str) -> bool:
    """Whether a URL names servers of NATS."""
    return url.strip().lower().startswith(_SCHEMES)


class NatsTransport:
    """Asks the catalogs of a cluster. Any thread may call it.

    A question that is lost with its catalog or its connection is asked again, within its time.

    Args:
        url: nats://host:port/CLUSTER/CALLER; several servers with commas between, of which the one that answered last
            is asked first.
    Raises: CatalogError: the URL cannot be used. ConfigError, MissingExtraError: a file of the credentials cannot.
    """

    def __init__(self, url: str, credentials: CatalogCredentials) -> None:
        self._servers, self._cluster, self._caller = target_of(url)
        self._proof = NatsProof(credentials.nats)
        for server in self._servers:
            self._proof.connect_fields(server, "")  # what cannot be used is said now
        if any(map(self._proof.wants_tls, self._servers)):
            self._proof.tls_context()
        self._current = 0
        self._subjects: dict[str, bytes] = {}  # by verb
        self._guard = threading.Lock()
        self._idle: deque[Wire] = deque()
        self._is_closed = False

    page_limit = 250  # of which an answer stays within an ordinary max_payload

    @property
    def url(self) -> str:
        """Of the server that answered last, and whom is asked there."""
        return f"{self._servers[self._current].shown}/{self._cluster}/{self._caller}"

    def close(self) -> None:
        """See `Carrier.close`."""
        with self._guard:
            self._is_closed = True
            idle = list(self._idle)
            self._idle.clear()
        for wire in idle:
            wire.close()

    def send(self, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        """See `Carrier.send`."""
        asked = message_of(request.method, request.path, request.body)
        if asked is None:
            raise CatalogError(
                f"{request.method} {request.path} is not answered over NATS; ask the catalog over HTTP, with an "
                "operator's token"
            )
        verb, body = asked
        headers = b"" if request.content_type == JSON_TYPE else f"{TYPE_HEADER}: {request.content_type}\r\n".encode()
        if parent := traceparent():
            headers += f"{TRACEPARENT}: {parent}\r\n".encode()
        question = Question(self._subject(verb), headers, body)
        deadline_s = time.monotonic() + timeout_s
        unready: tuple[int, bytes] | None = None
        failed: CatalogError | None = None
        for tried in range(_TRIES if request.may_repeat else 1):
            left_s = deadline_s - time.monotonic()
            if tried and left_s <= 0:
                break
            share_s = left_s
            if request.may_repeat and tried < _TRIES - 1:  # a catalog that is lost leaves time for another
                share_s = min(left_s, request.wait_s + max(0.0, left_s - request.wait_s) / 2)
            try:
                status, answer = self._asked(question, verb, time.monotonic() + share_s)
            except NobodyListensError as error:
                raise CatalogAwayError(self._nobody(error), was_asked=False) from None
            except AnswerLateError:
                failed = late(self.url, request.path, timeout_s)
                continue
            except LostError as error:
                failed = failed or CatalogAwayError(str(error), error.was_asked)
                continue
            if status == 503 and request.may_repeat and error_code(answer) in NOT_READY:
                unready = (status, answer)  # another catalog may have read further
                continue
            return status, answer
        if unready is not None:
            return unready
        assert failed is not None
        raise failed

    # -- inside -------------------------------------------------------------------------------------------------------

    def _subject(self, verb: str) -> bytes:
        subject = self._subjects.get(verb)
        if subject is None:
            subject = self._subjects[verb] = ask_subject(self._cluster, self._caller, verb).encode()
        return subject

    def _asked(self, question: Question, verb: str, deadline_s: float) -> tuple[int, bytes]:
        """The answer of whoever listens, or why those that are there do not.

        Raises NobodyError: nobody has for some time.
        """
        until_s, pause_s = min(deadline_s, time.monotonic() + _NOBODY_S), _PAUSE_S
        while True:
            try:
                return self._ask(question, deadline_s)
            except NobodyListensError:
                unready = None if verb == READY else self._unready(deadline_s)
                if unready is not None:
                    return unready
                if verb == READY or time.monotonic() + pause_s >= until_s:
                    raise
            time.sleep(pause_s)
            pause_s *= 2

    def _ask(self, question: Question, deadline_s: float) -> tuple[int, bytes]:
        wire = self._taken(deadline_s)
        is_good = False
        try:
            if len(question.headers) + len(question.body) + 64 > wire.max_payload:
                is_good = True
                raise CatalogError(
                    f"a question of {len(question.body)} bytes; NATS at {wire.server.shown} takes {wire.max_payload}: "
                    "ask over HTTP, in "
                    "smaller batches, or have max_payload raised there"
                )
            message = wire.ask(question, deadline_s)
            is_good = True
        except NobodyListensError:
            is_good = True
            raise
        finally:
            self._give(wire, is_good)
        return self._status(message), message.body

    def _status(self, message: NatsMessage) -> int:
        status = header(message.headers, _STATUS)
        if not status.isdigit() or len(status) != 3:
            raise CatalogError(f"{self.url} answers with something else than a catalog's answer (no {STATUS_HEADER})")
        return int(status)

    def _taken(self, deadline_s: float) -> Wire:
        """A connection that is nobody else's meanwhile."""
        while True:
            with self._guard:
                if self._is_closed:
                    raise closed(self.url)
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return self._opened(deadline_s)
            if wire.is_alive():
                return wire
            wire.close()

    def _give(self, wire: Wire, is_good: bool) -> None:
        with self._guard:
            if is_good and not self._is_closed and len(self._idle) < CONNECTIONS:
                self._idle.append(wire)
                return
        wire.close()

    def _opened(self, deadline_s: float) -> Wire:
        """A new connection, to the server that answered last or the next one. Raises LostError."""
        count, first = len(self._servers), self._current
        failed: list[str] = []
        for tried in range(count):
            at, now_s = (first + tried) % count, time.monotonic()
            share_s = deadline_s - now_s if tried == count - 1 else (deadline_s - now_s) / 2
            try:
                wire = Wire.open(self._servers[at], self._proof, now_s + share_s)
            except LostError as error:
                failed.append(str(error))
                continue
            if at != first:
                self._current = at
                log.info("catalog.changed", url=self._servers[at].shown, before=self._servers[first].shown)
            return wire
        raise LostError("; ".join(failed))

    def _unready(self, deadline_s: float) -> tuple[int, bytes] | None:
        """Why nobody answers questions yet, as a catalog says that is there and not ready; None: there is none."""
        question = Question(self._subject(READY), b"", b"")
        try:
            status, body = self._ask(question, deadline_s)
            answer = msgspec.json.decode(body, type=ReadyAnswer)
        except (CatalogError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if status != 503 or answer.ready:
            return None
        detail = ErrorDetail(
            code="not_ready", message=answer.reason, what_to_do="ask again soon; /readyz says when it is ready"
        )
        return 503, msgspec.json.encode(ErrorAnswer(error=detail))

    def _nobody(self, error: NobodyListensError) -> str:
        return self._away(
            f"{error}: no catalog of cluster {self._cluster!r} runs, or none is ready, or its file of callers has no "
            "[[nats]] "
            f"of the name {self._caller!r}, or that caller asks too much"
        )

    def _away(self, why: str) -> str:
        return (
            f"the catalog at {self.url} does not answer ({why}); start it with kvbm-catalog serve, or correct "
            "catalog.url"
        )
