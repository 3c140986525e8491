"""Requests to a catalog over HTTP: kept connections, proofs that are renewed, and several catalogs of which one must
answer.
"""

from __future__ import annotations

import threading
import time

import urllib3

from kvbm.core.errors import CatalogError
from kvbm.locate.credentials import CatalogCredentials, CredentialProof
from kvbm.locate.proxies import proxied, proxy_of, shown
from kvbm.locate.requests import (
    UNIX,
    AskedFirst,
    CatalogAwayError,
    CatalogRequest,
    Turns,
    away,
    closed,
    distrusted,
    ended,
    late,
    place_of,
)
from kvbm.locate.unix_socket import unix_pool
from kvbm.telemetry.traceparent import NAME as TRACEPARENT
from kvbm.telemetry.traceparent import traceparent

CONNECTIONS = 16


class _Place:
    """One catalog, with its connections."""

    def __init__(self, url: str, proof: CredentialProof) -> None:
        self.url = url
        self._proof = proof
        self._proxy = "" if url.startswith(UNIX) else proxy_of(url)
        self._base = url if self._proxy and url.lower().startswith("http://") else ""  # a proxy is told whom to ask
        self.pool = self._new_pool()
        self._context = proof.context

    def renew(self) -> None:
        """New connections where the proof is another; requests under way keep those they have."""
        if self._proof.context is not self._context:
            self.pool, self._context = self._new_pool(), self._proof.context

    def ask(self, request: CatalogRequest, timeout_s: float, deadline_s: float) -> tuple[int, bytes]:
        """Its status and body. Raises CatalogError."""
        headers = {"content-type": request.content_type} if request.body is not None else {}
        if self._proof.token:
            headers["authorization"] = f"Bearer {self._proof.token}"
        if parent := traceparent():
            headers[TRACEPARENT] = parent
        for is_last in (False, True):
            timeout = urllib3.Timeout(total=max(0.001, deadline_s - time.monotonic()))
            try:
                answer = self.pool.request(
                    request.method,
                    self._base + request.path,
                    body=request.body,
                    headers=headers,
                    timeout=timeout,
                    retries=False,
                    assert_same_host=False,
                )
                return answer.status, answer.data
            except urllib3.exceptions.ProtocolError as error:
                if (
                    is_last or not request.may_repeat
                ):  # the first may be a kept connection that the other side has closed
                    raise self._failure(error, request, timeout_s) from None
            except urllib3.exceptions.HTTPError as error:
                raise self._failure(error, request, timeout_s) from None
        raise self._away("no connection")

    def follow(self, request: CatalogRequest, timeout_s: float, quiet_s: float) -> urllib3.BaseHTTPResponse:
        """Its answer, whose body is read as it comes; on a connection of its own. Raises CatalogError.

        Args:
            timeout_s: of the connection. quiet_s: nothing comes for so long, then reading raises.
        """
        headers = {"content-type": request.content_type} if request.body is not None else {}
        if self._proof.token:
            headers["authorization"] = f"Bearer {self._proof.token}"
        timeout = urllib3.Timeout(connect=timeout_s, read=quiet_s)
        try:
            return self._new_pool().request(
                request.method,
                self._base + request.path,
                body=request.body,
                headers=headers,
                timeout=timeout,
                retries=False,
                preload_content=False,
                assert_same_host=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise self._failure(error, request, quiet_s) from None

    def _failure(self, error: urllib3.exceptions.HTTPError, request: CatalogRequest, timeout_s: float) -> CatalogError:
        if isinstance(error, urllib3.exceptions.ClosedPoolError):
            return closed(self.url)
        if isinstance(error, urllib3.exceptions.NewConnectionError):  # which urllib3 counts among the timeouts
            return self._away(_words(error), was_asked=False)
        if isinstance(error, urllib3.exceptions.TimeoutError):
            return late(self.url, request.path, timeout_s, shown(self._proxy) if self._proxy else "")
        if isinstance(error, urllib3.exceptions.SSLError):
            return distrusted(self.url, error)
        is_ended = isinstance(error, urllib3.exceptions.ProtocolError)
        return self._away(ended(_words(error), is_ended and self._proof.shows_certificate))

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        if self.url.startswith(UNIX):
            return unix_pool(self.url.removeprefix(UNIX), CONNECTIONS)
        more = {"ssl_context": self._proof.context} if self._proof.context is not None else {}
        if self._proxy:
            return proxied(self._proxy, maxsize=CONNECTIONS, retries=False, **more).connection_from_url(self.url)
        return urllib3.connectionpool.connection_from_url(self.url, maxsize=CONNECTIONS, retries=False, **more)

    def _away(self, why: str, was_asked: bool = True) -> CatalogAwayError:
        return away(self.url, why, was_asked, shown(self._proxy) if self._proxy else "")


class CatalogTransport:
    """Asks the catalog that answered last; where it does not, or is not ready, the next one. Any thread may call it.

    Args:
        urls: with commas between; all of one scheme.
    Raises: CatalogError: a URL cannot be used. ConfigError: a file of the credentials cannot.
    """

    def __init__(self, urls: str, credentials: CatalogCredentials) -> None:
        names = [place_of(one) for one in urls.split(",")]
        self._proof = CredentialProof(credentials, is_tls=any(one.startswith("https://") for one in names))
        self._guard = threading.Lock()
        self._first = AskedFirst(names)
        try:
            self.places = [_Place(name, self._proof) for name in names]
        except (urllib3.exceptions.HTTPError, ValueError, KeyError) as error:
            raise CatalogError(f"the catalog's URL {urls!r} cannot be used ({error}); write http://host:port") from None

    page_limit = 0

    @property
    def url(self) -> str:
        """Of the catalog that is asked first."""
        return self._first.url

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._first.is_closed = True
        for place in self.places:
            place.pool.close()

    def send(self, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        """The answer's status and body.

        Raises CatalogError: none answers in time. CatalogClosedError: it was closed.
        """
        turns = Turns(self._first, request, timeout_s)
        for at, share_s in turns:
            with turns.asking():
                turns.take(at, self._ask(self.places[at], request, share_s))
        return turns.end()

    def follow(self, request: CatalogRequest, at: int, timeout_s: float, quiet_s: float) -> urllib3.BaseHTTPResponse:
        """The answer of one catalog, whose body is read as it comes. Raises CatalogError: it does not answer.

        Args:
            at: which catalog, counted on from the one that answered last.
            quiet_s: nothing comes for so long, then reading raises.
        """
        self._first.check_open()
        at = (self._first.at + at) % len(self.places)
        self._prove()
        answer = self.places[at].follow(request, timeout_s, quiet_s)
        if answer.status == 401 and self._prove(again=True):
            answer.close()
            answer = self.places[at].follow(request, timeout_s, quiet_s)
        if answer.status == 200:
            self._first.use(at)
        return answer

    def _ask(self, place: _Place, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        deadline_s = time.monotonic() + timeout_s
        self._prove()
        status, answer = place.ask(request, timeout_s, deadline_s)
        if status == 401 and self._prove(again=True):
            status, answer = place.ask(request, timeout_s, deadline_s)
        return status, answer

    def _prove(self, again: bool = False) -> bool:
        """Take files that have changed; whether any has."""
        with self._guard:
            changed = self._proof.look(again)
            for place in self.places:
                place.renew()
            return changed


def _words(error: urllib3.exceptions.HTTPError) -> str:
    text = str(error)
    return text.rpartition(": ")[2] or type(error).__name__
