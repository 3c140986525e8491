"""What is sent to a catalog, whatever carries it, and how it fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from kvbm.core.answers import ErrorAnswer
from kvbm.core.errors import CatalogClosedError, CatalogError
from kvbm.safe_log import SafeLog

log = SafeLog()

UNIX = "unix:"
_START = "start it with kvbm-catalog serve, or correct catalog.url"
_PATIENCE = "ask again, or wait longer (--timeout, timeout_s); where it is never heard in time, correct catalog.url"
NOT_READY = ("not_ready", "no_instance")  # another catalog may have read further


class CatalogRequest(NamedTuple):
    """One request, as HTTP has it.

    Attributes:
        path: with its query.
        body: None for none.
        may_repeat: asking twice does no harm.
        wait_s: for how long the catalog may wait before it answers.
    """

    method: str
    path: str
    body: bytes | None = None
    content_type: str = "application/json"
    may_repeat: bool = True
    wait_s: float = 0.0


class CatalogAwayError(CatalogError):
    """A catalog did not answer.

    Attributes:
        was_asked: it may have got the request.
        place: its URL, and in brackets why; "" where there is but one.
        is_late: nobody has refused; time was over.
    """

    def __init__(self, message: str, was_asked: bool, place: str = "", is_late: bool = False) -> None:
        super().__init__(message)
        self.was_asked, self.place, self.is_late = was_asked, place, is_late


def away(url: str, why: str, was_asked: bool = True, proxy: str = "") -> CatalogAwayError:
    """That the catalog at a URL does not answer.

    Args:
        proxy: that was asked for it, without its user and password; "" for none.
    """
    through, remedy = (f" through the proxy {proxy}", ", or name its host in no_proxy") if proxy else ("", "")
    return CatalogAwayError(
        f"the catalog at {url} does not answer{through} ({why}); {_START}{remedy}", was_asked, f"{url}{through} ({why})"
    )


def late(url: str, path: str, timeout_s: float, proxy: str = "") -> CatalogAwayError:
    """That the catalog at a URL does not answer in time: nobody has refused, so it is there, or cannot be reached.

    Args:
        path: what it was asked. proxy: as of `away`.
    """
    through = f" through the proxy {proxy}" if proxy else ""
    why = f"no answer to {path} within {timeout_s:.3g} s"
    return CatalogAwayError(
        f"the catalog at {url} does not answer in time{through} ({why}): it is busy, or what was asked takes longer; "
        f"{_PATIENCE}",
        was_asked=True,
        place=f"{url}{through} ({why})",
        is_late=True,
    )


def distrusted(url: str, why: object) -> CatalogError:
    """That TLS with the catalog at a URL does not come about."""
    return CatalogError(
        f"the catalog at {url} and this side do not trust each other ({why}); correct catalog.tls_ca, which signs its "
        "certificate, and catalog.client_cert, if it asks for one"
    )


def ended(why: str, shows_certificate: bool) -> str:
    """Why a connection ended before its answer.

    A catalog that does not trust a certificate hangs up once it was shown, without a word.

    Args:
        shows_certificate: this side has shown one.
    """
    return f"{why}, as a catalog does that does not trust catalog.client_cert" if shows_certificate else why


def closed(url: str) -> CatalogClosedError:
    """That the client was closed by whoever asks it now."""
    return CatalogClosedError(f"the client of the catalog at {url} is closed; make another")


class AskedFirst:
    """Which of several catalogs is asked first: the one that answered last. Closed, none is asked any more.

    Attributes:
        at: its index among `urls`.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls, self.at = urls, 0
        self.is_closed = False

    @property
    def url(self) -> str:
        """Of the catalog that is asked first."""
        return self.urls[self.at]

    def use(self, at: int) -> None:
        """One has answered."""
        if at != self.at:
            log.info("catalog.changed", url=self.urls[at], before=self.url)
            self.at = at

    def check_open(self) -> None:
        """Raises CatalogClosedError."""
        if self.is_closed:
            raise closed(self.url)


class Turns:
    """One request to several catalogs: whom to ask next and for how long, and what came of it all.

    A catalog that is away or not ready is passed over; one that hangs leaves time for the others.

    ```
    for at, share_s in turns:
        with turns.asking():
            turns.take(at, answer_of(at, request, share_s))
    return turns.end()
    ```
    """

    def __init__(self, asked: AskedFirst, request: CatalogRequest, timeout_s: float) -> None:
        self._asked, self._request = asked, request
        self._first, self._count = asked.at, len(asked.urls)
        self._deadline_s = time.monotonic() + timeout_s
        self._answer: tuple[int, bytes] | None = None
        self._unready: tuple[int, bytes] | None = None
        self._failed: list[CatalogAwayError] = []

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """The index of each, and the seconds it has, until one has answered.

        Raises CatalogClosedError: nobody is asked any more.
        """
        for tried in range(self._count):
            if self._answer is not None:
                return
            self._asked.check_open()
            left_s = max(0.001, self._deadline_s - time.monotonic())
            yield (self._first + tried) % self._count, left_s if tried == self._count - 1 else left_s / 2

    @contextmanager
    def asking(self) -> Iterator[None]:
        """One is asked, and passed over where it does not answer.

        Raises: AwayError: no other may be asked, because it may have done what is to be done once. CatalogClosedError:
            it does not answer because its client was closed meanwhile.
        """
        try:
            yield
        except CatalogAwayError as error:
            self._asked.check_open()
            self._failed.append(error)
            if error.was_asked and not self._request.may_repeat:
                raise

    def take(self, at: int, answer: tuple[int, bytes]) -> None:
        """The status and body that one answers with. It is asked first from now on, unless another may know more."""
        status, body = answer
        if status == 503 and self._count > 1 and error_code(body) in NOT_READY:
            self._unready = self._unready or answer
        else:
            self._answer = answer
            self._asked.use(at)

    def end(self) -> tuple[int, bytes]:
        """The answer, or once none has answered why the first is not ready.

        Raises AwayError: all are away; it names each.
        """
        if answer := self._answer or self._unready:
            return answer
        if len(self._failed) == 1:
            raise self._failed[0]
        are_late = all(error.is_late for error in self._failed)
        raise CatalogAwayError(
            f"none of the {self._count} catalogs answers: {', '.join(error.place for error in self._failed)}; "
            f"{_PATIENCE if are_late else _START}",
            any(error.was_asked for error in self._failed),
            is_late=are_late,
        )


def place_of(url: str) -> str:
    """The URL of a catalog over HTTP or a unix socket, as it is asked.

    Raises CatalogError: it is none; no password is shown.
    """
    name = url.strip()
    if name.startswith(UNIX) and len(name) > len(UNIX):
        return name
    try:
        parts = urlsplit(name if "://" in name or name.startswith(UNIX) else f"http://{name}")
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise _unusable(name, str(error) if "@" not in name else "its host or port cannot be read") from None
    if "@" in name:  # also behind a bare / of a password, which ends the host's part
        raise CatalogError(
            "a catalog's URL has a user or a password, which no catalog takes; leave them out and give a file with a "
            "token (catalog.token)"
        )
    if parts.scheme not in ("http", "https"):
        raise _unusable(name, f"{parts.scheme or 'it'} is no scheme of a catalog")
    if not host or port == 0:
        raise _unusable(name, "it names no host" if not host else "no catalog listens on port 0")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise _unusable(name, "a catalog answers at the root: leave out what is behind host and port")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" if port is None else f"{parts.scheme}://{shown}:{port}"


def _unusable(url: str, why: str) -> CatalogError:
    shown = repr(url) if "@" not in url else "(with a user or password)"  # what is written wrongly may be the password
    return CatalogError(
        f"the catalog's URL {shown} cannot be used ({why}); write http://host:port, https://host:port, unix:/path or "
        "nats://host:port/CLUSTER/CALLER, with commas between several of one kind"
    )


class Carrier(Protocol):
    """Takes requests to a catalog. Any thread may call it."""

    @property
    def page_limit(self) -> int:
        """Instances to ask for at a time; 0 for as many as the catalog gives."""

    @property
    def url(self) -> str:
        """Of the catalog, or of the server before it, that is asked first."""

    def send(self, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        """The answer's status and body. Raises CatalogError: none comes in time."""

    def close(self) -> None:
        """Give the connections back. Idempotent."""


def error_code(body: bytes) -> str:
    """The constant that names an error; "" where the body is none."""
    try:
        return msgspec.json.decode(body, type=ErrorAnswer).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
