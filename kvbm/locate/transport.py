"""Requests to a catalog over HTTP: kept connections, proofs that are renewed, and several catalogs of which one must answer."""

from __future__ import annotations

import threading
import time
from urllib.parse import urlsplit

import urllib3

from kvbm.core.errors import CatalogError
from kvbm.locate.credentials import CatalogCredentials, Proof
from kvbm.locate.proxies import proxied, proxy_of, shown
from kvbm.locate.requests import NOT_READY, AwayError, Request, error_code
from kvbm.locate.unix_socket import SCHEME, unix_pool
from kvbm.remarks import Remarks

log = Remarks()

CONNECTIONS = 16


class _Place:
    """One catalog, with its connections."""

    def __init__(self, url: str, proof: Proof) -> None:
        self.url = url
        self._proof = proof
        self._proxy = "" if url.startswith(SCHEME) else proxy_of(url)
        self._base = url if self._proxy and url.lower().startswith("http://") else ""  # a proxy is told whom to ask
        self.pool = self._new_pool()
        self._context = proof.context

    def renew(self) -> None:
        """New connections where the proof is another; requests under way keep those they have."""
        if self._proof.context is not self._context:
            self.pool, self._context = self._new_pool(), self._proof.context

    def ask(self, request: Request, timeout_s: float, deadline_s: float) -> tuple[int, bytes]:
        """Its status and body. Raises CatalogError."""
        headers = {"content-type": request.content_type} if request.body is not None else {}
        if self._proof.token:
            headers["authorization"] = f"Bearer {self._proof.token}"
        for is_last in (False, True):
            timeout = urllib3.Timeout(total=max(0.001, deadline_s - time.monotonic()))
            try:
                answer = self.pool.request(
                    request.method, self._base + request.path, body=request.body, headers=headers, timeout=timeout, retries=False,
                    assert_same_host=False,
                )  # fmt: skip
                return answer.status, answer.data
            except urllib3.exceptions.ProtocolError as error:
                if (
                    is_last or not request.may_repeat
                ):  # the first may be a kept connection that the other side has closed
                    raise self._failure(error, request, timeout_s) from None
            except urllib3.exceptions.HTTPError as error:
                raise self._failure(error, request, timeout_s) from None
        raise self._away("no connection")

    def follow(self, request: Request, timeout_s: float, quiet_s: float) -> urllib3.BaseHTTPResponse:
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
                request.method, self._base + request.path, body=request.body, headers=headers, timeout=timeout, retries=False,
                preload_content=False, assert_same_host=False,
            )  # fmt: skip
        except urllib3.exceptions.HTTPError as error:
            raise self._failure(error, request, quiet_s) from None

    def _failure(self, error: urllib3.exceptions.HTTPError, request: Request, timeout_s: float) -> CatalogError:
        if isinstance(error, urllib3.exceptions.NewConnectionError):  # which urllib3 counts among the timeouts
            return self._away(_words(error), was_asked=False)
        if isinstance(error, urllib3.exceptions.TimeoutError):
            return self._away(f"no answer to {request.path} within {timeout_s:g} s")
        if isinstance(error, urllib3.exceptions.SSLError):
            return CatalogError(
                f"the catalog at {self.url} and this side do not trust each other ({error}); correct catalog.tls_ca, which signs its "
                "certificate, and catalog.client_cert, if it asks for one"
            )
        return self._away(_words(error))

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        if self.url.startswith(SCHEME):
            return unix_pool(self.url.removeprefix(SCHEME), CONNECTIONS)
        more = {"ssl_context": self._proof.context} if self._proof.context is not None else {}
        if self._proxy:
            return proxied(self._proxy, maxsize=CONNECTIONS, retries=False, **more).connection_from_url(self.url)
        return urllib3.connectionpool.connection_from_url(self.url, maxsize=CONNECTIONS, retries=False, **more)

    def _away(self, why: str, was_asked: bool = True) -> AwayError:
        through = f" through the proxy {shown(self._proxy)}" if self._proxy else ""
        remedy = ", or name its host in no_proxy" if self._proxy else ""
        return AwayError(
            f"the catalog at {self.url} does not answer{through} ({why}); start it with kvbm-catalog serve, or correct catalog.url{remedy}",
            was_asked,
        )


class Transport:
    """Asks the catalog that answered last; where it does not, or is not ready, the next one. Any thread may call it.

    Args:
        urls: with commas between; all of one scheme.
    Raises: CatalogError: a URL cannot be used. ConfigError: a file of the credentials cannot.
    """

    def __init__(self, urls: str, credentials: CatalogCredentials) -> None:
        names = [one.strip().rstrip("/") for one in urls.split(",")]
        self._proof = Proof(credentials, is_tls=any(one.lower().startswith("https://") for one in names))
        self._guard = threading.Lock()
        self._current = 0
        for name in names:
            _check(name)
        self.places = [_Place(name, self._proof) for name in names]

    page_limit = 0

    @property
    def url(self) -> str:
        """Of the catalog that is asked first."""
        return self.places[self._current].url

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        for place in self.places:
            place.pool.close()

    def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
        """The answer's status and body. Raises CatalogError: none answers in time."""
        deadline_s, count, first = time.monotonic() + timeout_s, len(self.places), self._current
        unready: tuple[int, bytes] | None = None
        failed: CatalogError | None = None
        for tried in range(count):
            at = (first + tried) % count
            left_s = max(0.001, deadline_s - time.monotonic())
            share_s = left_s if tried == count - 1 else left_s / 2  # a catalog that hangs leaves time for the others
            try:
                status, body = self._ask(self.places[at], request, share_s)
            except AwayError as error:
                failed = failed or error
                if error.was_asked and not request.may_repeat:
                    raise
                continue
            if status == 503 and count > 1 and error_code(body) in NOT_READY:
                unready = unready or (status, body)
                continue
            self._use(at)
            return status, body
        if unready is not None:
            return unready
        assert failed is not None
        raise failed

    def follow(self, request: Request, at: int, timeout_s: float, quiet_s: float) -> urllib3.BaseHTTPResponse:
        """The answer of one catalog, whose body is read as it comes. Raises CatalogError: it does not answer.

        Args:
            at: which catalog, counted on from the one that answered last.
            quiet_s: nothing comes for so long, then reading raises.
        """
        at = (self._current + at) % len(self.places)
        self._prove()
        answer = self.places[at].follow(request, timeout_s, quiet_s)
        if answer.status == 401 and self._prove(again=True):
            answer.close()
            answer = self.places[at].follow(request, timeout_s, quiet_s)
        if answer.status == 200:
            self._use(at)
        return answer

    def _ask(self, place: _Place, request: Request, timeout_s: float) -> tuple[int, bytes]:
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

    def _use(self, at: int) -> None:
        if at != self._current:
            log.info("catalog.changed", url=self.places[at].url, before=self.places[self._current].url)
            self._current = at


def _check(url: str) -> None:
    """Raises CatalogError: it is no catalog's place. What is written wrongly may be a password, so that little of it is shown."""
    if url.startswith(SCHEME):
        return
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
        urllib3.util.parse_url(url)
    except (urllib3.exceptions.HTTPError, ValueError):
        raise CatalogError(f"the catalog's URL {_shown(url)} cannot be used; write http://host:port") from None
    if "@" in url:
        raise CatalogError(
            "the catalog's URL has a user, and a catalog knows who asks by a token or a certificate; write http://host:port, and set "
            "catalog.token to the token's file"
        )
    if parts.path or parts.query or parts.fragment:
        raise CatalogError(
            f"the catalog's URL {url} has a path, and a catalog answers at the root alone; write {parts.scheme}://{parts.netloc}"
        )


def _shown(url: str) -> str:
    return repr(url) if "@" not in url else "(with a user or password)"


def _words(error: urllib3.exceptions.HTTPError) -> str:
    text = str(error)
    return text.rpartition(": ")[2] or type(error).__name__
