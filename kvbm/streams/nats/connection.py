"""One connection to a NATS server, from its making to its loss; it never comes back.

nats-py carries bytes here and nothing more. Its own reconnection is off, because it sends again, in another order, what it had
buffered: a lost connection fails the calls in flight at once, and readers make a new one. Its JetStream layer is not used
either: acks are awaited by a reply inbox of ours, and readers pull by requests of ours.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoServersError

from kvbm.core.errors import ConfigError, MissingExtraError, StreamError
from kvbm.streams.base import AwayError
from kvbm.streams.nats.credentials import CheckedClient, Credentials, NoTlsError
from kvbm.streams.nats.headers import Headers

log = structlog.get_logger()

JS_API = "$JS.API"
BORROWED_API = "kvbm.v1.api"  # the same for a user whose account has no JetStream, and is lent that of another account
CLOSE_WAIT_S = 1.0
REMEDY = "start a nats-server there, or correct the URL"

_TURNED_AWAY = "check that a nats-server listens there, and the user and password it wants, or the key"
_TLS_FAILED = "check nats.tls_ca and nats.tls_cert, and that the server's certificate names this host"
_HEADERS_BEGIN = b"NATS/1.0\r\n"  # of headers without a status
_QUOTED = re.compile(r'"([^"]+)"')


def shown(url: str) -> str:
    """A URL, or several with commas between, without users and passwords. Raises ConfigError: it is none of NATS."""
    found = []
    for one in url.split(","):
        try:
            parts = urlsplit(one if "://" in one else f"nats://{one}")
            host, port = parts.hostname, parts.port or 4222
        except ValueError:
            host, port = None, 0
        if not host or parts.scheme not in ("nats", "tls"):
            raise ConfigError("the URL of NATS cannot be used; write nats://host:port or tls://host:port")
        found.append(f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    return ",".join(found)


class RefusedError(StreamError):
    """The server forbids it: trying again soon is of no use."""


class NobodyError(AwayError):
    """Nobody listens to the subject."""


class LateError(AwayError):
    """No answer came in time, though the connection stands as far as is known."""


class _Client(CheckedClient):
    """A client that leaves headers alone until somebody looks at them."""

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        if headers and headers.startswith(_HEADERS_BEGIN):
            return Headers(headers[len(_HEADERS_BEGIN) :])
        found: dict[str, str] | None = await super()._process_headers(headers)  # a status of the server's
        return found


class NatsConnection:
    """One connection. One asyncio loop.

    Attributes:
        shown: the URL without users and passwords.
        wakes: set when the connection is lost, or the server refuses something.
        is_lent: JetStream is another account's.
        most_in_flight: see `EventLog.most_in_flight`.
    """

    def __init__(self, url: str, credentials: Credentials) -> None:
        self.url = url
        self.shown = shown(url)
        self.client = _Client()
        self.client.wants_tls = credentials.wants_tls(url)
        self.wakes: set[asyncio.Event] = set()
        self.is_lent = False
        self.most_in_flight = 0
        self._is_open = False
        self._why_lost = ""
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # reply inbox → subject asked, answer
        self._complaints: dict[str, str] = {}  # subject → what the server said of the last thing sent there
        self._refused_subjects: dict[str, str] = {}  # subject that may not be subscribed to → what the server said
        self._inbox = ""
        self._grant = credentials.grant
        self._counter = itertools.count()

    @classmethod
    async def open(cls, url: str, timeout_s: float, credentials: Credentials) -> NatsConnection:
        """Connect. Raises StreamError: no answer in time, or the server refuses."""
        connection = cls(url, credentials)
        try:
            options = credentials.connect_options(url)
        except (
            ConfigError,
            MissingExtraError,
        ) as error:  # found at the start by who has the settings; files may change
            raise StreamError(str(error)) from None
        try:
            async with asyncio.timeout(timeout_s):
                await connection._connect(timeout_s, options)
                connection._inbox = connection.client.new_inbox()
                connection._is_open = True
                await connection.client.subscribe(f"{connection._inbox}.*", cb=connection._on_answer)
        except TimeoutError:
            await connection.close()
            raise StreamError(f"no answer from NATS at {connection.shown} within {timeout_s:g} s; {REMEDY}") from None
        except (OSError, ssl.SSLError, NatsError, ValueError) as error:
            await connection.close()
            why = connection._why_lost or error_words(error)
            # a refused user may show as a reset, because the server closes before nats-py has read its reason
            remedy = REMEDY if isinstance(error, NoServersError) else _TURNED_AWAY
            if isinstance(error, ssl.SSLError | NoTlsError) or "certificate" in why:
                remedy = _TLS_FAILED
            raise StreamError(f"no connection to NATS at {connection.shown} ({why}); {remedy}") from None
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _connect(self, timeout_s: float, options: dict[str, Any]) -> None:
        """In a task of its own, because a cancellation that comes while one of nats-py's steps ends is lost in it.

        It waits by asyncio.wait_for, which until Python 3.12 prefers a result to a cancellation.
        """
        urls = self.url.split(",")
        connecting = asyncio.ensure_future(
            self.client.connect(
                urls,
                name="kvbm",
                allow_reconnect=False,
                max_reconnect_attempts=1,  # of the first connection: nats-py repeats it regardless
                reconnect_time_wait=0.02,  # type: ignore[arg-type]
                connect_timeout=timeout_s / len(urls),  # type: ignore[arg-type]
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=0,  # buffer nothing while disconnected
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                **options,
            )
        )
        try:
            await asyncio.shield(connecting)
        except BaseException:
            connecting.cancel()
            await asyncio.wait([connecting], timeout=CLOSE_WAIT_S)
            if connecting.done() and not connecting.cancelled():
                connecting.exception()  # it is said by now, or of no use
            raise

    @property
    def is_open(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self._is_open and self.client.is_connected

    def new_inbox(self) -> str:
        """A subject for answers that nobody else has."""
        return self.client.new_inbox()

    async def ask(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        again_s: float | None = None,
    ) -> Msg:
        """Send a request and wait for its answer. Nothing is awaited before the bytes are in line to go.

        Args:
            again_s: send it again so often while no answer comes.
        Raises: StreamError: lost, refused, or late.
        """
        subject = self._routed(subject)
        self.check(subject)
        inbox = f"{self._inbox}.{next(self._counter)}"
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = (subject, answer)
        try:
            async with asyncio.timeout(timeout_s):
                done: set[asyncio.Future[Msg]] = set()
                while not done:
                    await self.client.publish(subject, data, reply=inbox, headers=headers)
                    done, _ = await asyncio.wait({answer}, timeout=again_s)
                message = answer.result()
        except TimeoutError:
            raise LateError(f"NATS at {self.shown} did not answer to {subject} within {timeout_s:g} s") from None
        except MaxPayloadError:
            raise StreamError(
                f"a message of {len(data)} bytes for {subject}; NATS at {self.shown} takes {self.client.max_payload}: "
                "raise max_payload there"
            ) from None
        except NatsError as error:
            raise self._lost(error_words(error)) from None
        finally:
            self._waiting.pop(inbox, None)
        if message.headers and message.headers.get("Status") == "503":
            why = "its server needs JetStream (nats-server -js), or the stream has no leader now"
            if self.is_lent:
                why = "the stream has no leader now, or the account of this user is new: then reload nats-server once more"
            raise NobodyError(f"nobody answers to {subject} at {self.shown}; {why}")
        return message

    def _routed(self, subject: str) -> str:
        return BORROWED_API + subject.removeprefix(JS_API) if self.is_lent and subject.startswith(JS_API) else subject

    async def subscribe(self, subject: str, take: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Without nats-py's limits, because beyond them it drops messages: `take` must bound what it keeps. Raises StreamError."""
        try:
            return await self.client.subscribe(subject, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
        except NatsError as error:
            raise self._lost(error_words(error)) from None

    async def unsubscribe(self, subscription: Subscription | None) -> None:
        """Tell the server, if it still listens."""
        if subscription is None or not self.is_open:
            return
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await subscription.unsubscribe()
        except (TimeoutError, NatsError):
            pass  # the connection is ending, and with it the subscription

    def check_subscribed(self, subject: str) -> None:
        """Raises StreamError: the server refuses a subscription to this subject."""
        complaint = self._refused_subjects.get(subject.lower())
        if complaint:
            raise self._refusal(complaint)

    def _refusal(self, complaint: str) -> RefusedError:
        remedy = f"; {self._grant}" if self._grant else ""
        return RefusedError(f"NATS at {self.shown} refuses: {complaint}{remedy}")

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send without waiting for an answer. Raises StreamError: lost, or refused before."""
        subject = self._routed(subject)
        self.check(subject)
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self.client.publish(subject, data, reply=reply)
        except TimeoutError:
            raise StreamError(f"NATS at {self.shown} takes no more bytes") from None
        except NatsError as error:
            raise self._lost(error_words(error)) from None

    def check(self, subject: str) -> None:
        """Raises StreamError: the connection is lost, or the server has complained of this subject since the last call."""
        if not self.is_open:
            raise self._lost(self._why_lost or "closed")
        subject = self._routed(subject)
        complaint = self._complaints.pop(subject.lower(), "") or self._refused_subjects.get(
            f"{self._inbox}.*".lower(), ""
        )
        if complaint:
            raise self._refusal(complaint)

    async def close(self) -> None:
        """Fail what waits, wake who reads, and end the connection. Idempotent."""
        self._is_open = False
        self._fail_waiting(self._lost("closed"))
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self.client.close()
        except (TimeoutError, OSError, NatsError):
            pass  # nothing is left to lose
        self._wake_readers()

    def _wake_readers(self) -> None:
        for wake in self.wakes:
            wake.set()

    def _lost(self, why: str) -> StreamError:
        return StreamError(f"the connection to NATS at {self.shown} is lost ({why})")

    def _fail_waiting(self, error: StreamError, subject: str | None = None) -> bool:
        found = False
        for asked, answer in self._waiting.values():
            if not answer.done() and (subject is None or asked.lower() == subject):
                answer.set_exception(error)
                found = True
        return found

    async def _on_answer(self, message: Msg) -> None:
        _, answer = self._waiting.get(message.subject, ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        """nats-py reports here what happens outside of a call: violations of permissions, a lost connection."""
        words = error_words(error)
        if not self._is_open:
            self._why_lost = words
        elif "permissions violation" in words:
            log.warning("stream.permission_refused", server=self.shown, why=words, remedy=self._grant)
            quoted = _QUOTED.search(words)
            subject = quoted.group(1) if quoted else ""
            refusal = self._refusal(words)
            if " subscription " in words:
                self._refused_subjects[subject] = words
                if subject == f"{self._inbox}.*".lower():
                    self._fail_waiting(refusal)  # no answer can come
            elif not self._fail_waiting(refusal, subject):
                self._complaints[subject] = words
            self._wake_readers()
        else:
            self._why_lost = words
            log.debug("stream.error_reported", server=self.shown, why=words)

    async def _on_closed(self) -> None:
        self._is_open = False
        self._fail_waiting(self._lost(self._why_lost or "closed"))
        self._wake_readers()


def error_words(error: Exception) -> str:
    """An error of nats-py in words."""
    text = str(error).removeprefix("nats: ").rstrip(".")
    return text or type(error).__name__
