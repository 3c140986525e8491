"""One connection to a NATS server, from its making to its loss; it never comes back.

nats-py carries bytes here and nothing more. Its own reconnection is off, because it sends again, in another order, what
it had buffered: a lost connection fails the calls in flight at once, and readers make a new one. Its JetStream layer is
not used either: acks are awaited by a reply inbox of ours, and readers pull by requests of ours.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import math
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import ParseResult, unquote

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoServersError, ProtocolError, SlowConsumerError, UnexpectedEOF

from kvbm.core.errors import ConfigError, MessageTooLargeError, MissingExtraError, StreamError
from kvbm.core.nats_address import servers_of
from kvbm.safe_log import SafeLog
from kvbm.streams.base import AwayError
from kvbm.streams.nats.credentials import CheckedClient, Credentials, NoTlsError
from kvbm.streams.nats.direct_parser import DirectParser, RunTaker, Taker
from kvbm.streams.nats.headers import HEADERS_BEGIN, MessageHeaders
from kvbm.streams.nats.messages import NatsMessages, NewMessages, ReadableMessages

log = SafeLog()

JS_API = "$JS.API"
BORROWED_API = "kvbm.v1.api"  # the same for a user whose account has no JetStream, and is lent that of another account
CLOSE_WAIT_S = 1.0
REMEDY = "start a nats-server there, or correct the URL"

# What calls of nats-py raise when a connection fails: its own errors, the system's, and uvloop's RuntimeError for a
# transport that is closed.
_FOREIGN = (NatsError, OSError, EOFError, RuntimeError)

# What nats-py stumbles with over a server that greets as no NATS does.
_STUMBLES = (ValueError, TypeError, LookupError, AttributeError, AssertionError)

_TURNED_AWAY = "check that a nats-server listens there, and the user and password it wants, or the key"
_TLS_FAILED = "check nats.tls_ca and nats.tls_cert, and that the server's certificate names this host"
_MOST_COMPLAINTS = 1024
_READ_BYTES = 1 << 20
_DROPPED_EVERY_S = 1.0  # so often it is told how many messages were dropped
_QUOTED = re.compile(r'"([^"]+)"')


def shown(url: str) -> str:
    """A URL, or several with commas between, without users and passwords. Raises ConfigError: it is none of NATS."""
    return ",".join(server.shown for server in servers_of(url))


def is_loopback(url: str) -> bool:
    """Whether a URL, or each of several with commas between, names this machine's loopback."""
    return all(server.host == "localhost" or _is_loopback_address(server.host) for server in servers_of(url))


def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RefusedError(StreamError):
    """The server forbids it: trying again soon is of no use."""


class NobodyError(AwayError):
    """Nobody listens to the subject."""


class LateError(AwayError):
    """No answer came in time, though the connection stands as far as is known."""


class GreetingError(NatsError):
    """The server does not greet as NATS does."""


class _Uri(ParseResult):
    """A server's URL with user and password as they are: nats-py sends them as they are written, with their %40 and
    %2F.
    """

    @property
    def username(self) -> str | None:
        """See `ParseResult`."""
        name = super().username
        return None if name is None else unquote(name)

    @property
    def password(self) -> str | None:
        """See `ParseResult`."""
        word = super().password
        return None if word is None else unquote(word)


class _Client(CheckedClient):
    """A client that leaves headers alone until somebody looks at them, and gives messages straight to who has asked for
    that.
    """

    def __init__(self, messages: NatsMessages) -> None:
        super().__init__()
        self.parser = DirectParser(self, messages)
        self._ps = self.parser

    def _setup_server_pool(self, connect_url: str | list[str]) -> None:
        super()._setup_server_pool(connect_url)  # type: ignore[arg-type]
        for server in self._server_pool:
            server.uri = _Uri(*server.uri)

    async def _process_connect_init(self) -> None:
        """As nats-py's.

        Raises GreetingError where that stumbles over what the server says; code of ours that it calls does not count.
        """
        try:
            await super()._process_connect_init()
        except _STUMBLES as error:
            if _is_raised_here(error):
                raise
            raise GreetingError(f"{type(error).__name__} in its client: {error}".rstrip(": ")) from error

    async def close(self) -> None:
        """As nats-py's, which can end only what it has begun to connect."""
        if self._flush_queue is not None:
            await super().close()

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        if headers and headers.startswith(HEADERS_BEGIN):
            return MessageHeaders(headers[len(HEADERS_BEGIN) :])
        found: dict[str, str] | None = await super()._process_headers(headers)  # a status of the server's
        return found

    async def _read_loop(self) -> None:
        """As nats-py's, which reads 32 KiB at a time; here all that has come is taken apart together."""
        while self._transport is not None and not (self.is_closed or self.is_reconnecting):
            try:
                if self._transport.at_eof():
                    await self._error_cb(UnexpectedEOF())
                    await self._process_op_err(UnexpectedEOF())
                    return
                await self._ps.parse(await self._transport.read(_READ_BYTES))
            except asyncio.CancelledError:
                return
            except (ProtocolError, OSError) as error:
                await self._process_op_err(error)
                return
            except Exception as error:
                log.exception("stream.reading_failed")
                await self._error_cb(error)
                await self._process_op_err(error)  # nobody reads it any more, so it is lost
                return

    @property
    def is_flowing(self) -> bool:
        """Whether all that was written has gone to the system."""
        transport: Any = self._transport
        return (
            transport is not None and not self._pending and not transport._io_writer.transport.get_write_buffer_size()
        )

    def write_now(self, data: bytes) -> None:
        """`write` where `is_flowing`: nothing is waited for."""
        assert self._transport is not None
        self._transport.write(data)

    async def write(self, data: bytes) -> None:
        """Bytes of the protocol, written at once: nats-py would leave them to a task of its own.

        Waits while too many are unsent.
        """
        transport = self._transport
        assert transport is not None
        if self._pending:  # these come first
            self._pending.append(data)
            self._pending_data_size += len(data)
            await self._flush_pending()
            return
        transport.write(data)
        await transport.drain()  # type: ignore[no-untyped-call]


class NatsConnection:
    """One connection. One asyncio loop.

    Attributes:
        shown: the URL without users and passwords.
        wakes: set when the connection is lost, or the server refuses something.
        is_lent: JetStream is another account's.
        most_in_flight: see `EventLog.most_in_flight`.
    """

    def __init__(self, url: str, credentials: Credentials, messages: NatsMessages) -> None:
        self.url = url
        self.shown = shown(url)
        self.client = _Client(messages)
        self.client.wants_tls = credentials.wants_tls(url)
        self.wakes: set[asyncio.Event] = set()
        self.is_lent = False
        self.most_in_flight = 0
        self._is_open = False
        self._why_lost = ""
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # reply inbox → subject asked, answer
        self._dropped, self._dropped_told_s = 0, -_DROPPED_EVERY_S  # messages since it was told
        self._complaints: dict[str, str] = {}  # subject → what the server said of the last thing sent there
        self._refused_subjects: dict[str, str] = {}  # subject that may not be subscribed to → what the server said
        self._inbox = ""
        self._grant = credentials.grant
        self._counter = itertools.count()

    @classmethod
    async def open(
        cls, url: str, timeout_s: float, credentials: Credentials, new_messages: NewMessages = ReadableMessages
    ) -> NatsConnection:
        """Connect. Raises StreamError: no answer in time, or the server refuses.

        Args:
            new_messages: makes what takes apart what comes.
        """
        connection = cls(url, credentials, new_messages())
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
            raise StreamError(
                f"no answer from NATS at {connection.shown} within {timeout_s:g} s; {REMEDY}", timeout_s=timeout_s
            ) from None
        except _FOREIGN as error:
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
        urls = [server.url for server in servers_of(self.url)]
        connecting = asyncio.ensure_future(
            self._tried(
                urls,
                name="kvbm",
                allow_reconnect=False,
                max_reconnect_attempts=1,  # of the first connection: nats-py repeats it regardless
                reconnect_time_wait=0.02,
                connect_timeout=timeout_s / len(urls),
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=0,  # buffer nothing while disconnected
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                **options,
            )
        )
        try:
            trouble = await asyncio.shield(connecting)
        except BaseException:
            connecting.cancel()
            await asyncio.wait([connecting], timeout=CLOSE_WAIT_S)
            raise
        if trouble is not None:
            raise trouble

    async def _tried(self, urls: list[str], **options: Any) -> Exception | None:
        """What went wrong, as a value: nobody may wait for it any more, and asyncio writes of each exception of a task
        that nobody takes.
        """
        try:
            await self.client.connect(urls, **options)
        except Exception as error:  # noqa: BLE001 - raised by who waits
            return error
        return None

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
            raise LateError(
                f"NATS at {self.shown} did not answer to {subject} within {timeout_s:g} s", timeout_s=timeout_s
            ) from None
        except MaxPayloadError:
            raise MessageTooLargeError(
                f"a message of {len(data)} bytes for {subject}; NATS at {self.shown} takes {self.client.max_payload}: "
                "raise max_payload there",
                len(data),
                self.client.max_payload,
            ) from None
        except _FOREIGN as error:
            raise self._lost(error_words(error)) from None
        finally:
            self._waiting.pop(inbox, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # taken: what came too late is nobody's
        if message.headers and message.headers.get("Status") == "503":
            why = "its server needs JetStream (nats-server -js), or the stream has no leader now"
            if self.is_lent:
                why = (
                    "the stream has no leader now, or the account of this user is new: then reload nats-server once "
                    "more"
                )
            raise NobodyError(f"nobody answers to {subject} at {self.shown}; {why}")
        return message

    def _routed(self, subject: str) -> str:
        return BORROWED_API + subject.removeprefix(JS_API) if self.is_lent and subject.startswith(JS_API) else subject

    async def round_trip(self, timeout_s: float) -> float:
        """Seconds until the server has answered a ping. Raises StreamError: lost, or late."""
        begin_s = time.perf_counter()
        try:
            await self.client.flush(math.ceil(timeout_s))
        except TimeoutError:
            raise LateError(
                f"NATS at {self.shown} did not answer within {timeout_s:g} s; {REMEDY}", timeout_s=timeout_s
            ) from None
        except _FOREIGN as error:
            raise self._lost(error_words(error)) from None
        return time.perf_counter() - begin_s

    async def subscribe(
        self,
        subject: str,
        take: Callable[[Msg], Awaitable[None]],
        group: str = "",
        most_waiting: int = 0,
        most_waiting_bytes: int = 0,
    ) -> Subscription:
        """Have messages given to `take`. Raises StreamError.

        Args:
            group: those of one group share the messages.
            most_waiting, most_waiting_bytes: of messages for `take`; more are dropped. 0: `take` must bound what it
                keeps.
        """
        try:
            return await self.client.subscribe(
                subject,
                queue=group,
                cb=take,
                pending_msgs_limit=most_waiting,
                pending_bytes_limit=most_waiting_bytes,
            )
        except _FOREIGN as error:
            raise self._lost(error_words(error)) from None

    async def subscribe_directly(
        self, subject: str, taker: Taker, group: str = "", early: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        """Have messages given to who takes them as they are read. Raises StreamError.

        Args:
            group: as in `subscribe`.
            early: takes those that come before this has returned; None: there are none.
        """
        subscription = await self.subscribe(subject, early or _nothing, group)
        self.client.parser.give(subscription._id, taker)
        return subscription

    async def subscribe_to_runs(self, subject: str, taker: RunTaker) -> Subscription:
        """The same for messages of a stream, which are given in runs; none come before this has returned.

        Raises StreamError.
        """
        subscription = await self.subscribe(subject, _nothing)
        self.client.parser.give_runs(subscription._id, taker)
        return subscription

    async def unsubscribe(self, subscription: Subscription | None) -> None:
        """Tell the server, if it still listens."""
        if subscription is None:
            return
        self.client.parser.keep(subscription._id)
        if not self.is_open:
            return
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await subscription.unsubscribe()
        except _FOREIGN:
            pass  # the connection is ending, and with it the subscription

    async def drain(self, subscription: Subscription) -> None:
        """Take no more messages, but those that the server has sent."""
        if not self.is_open:
            return
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await subscription.drain()  # type: ignore[no-untyped-call]
        except _FOREIGN:
            await self.unsubscribe(subscription)

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
        except _FOREIGN as error:
            raise self._lost(error_words(error)) from None

    async def send_headed(self, subject: str, head: bytes, data: bytes) -> None:
        """Send without waiting for an answer, and without a look at what the server said of this subject.

        Raises StreamError: lost.

        Args:
            subject: of a message that has come, to which this is the answer.
            head: headers as they travel.
        """
        message = self._headed(subject, head, data)
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self.client.write(message)
        except TimeoutError:
            raise StreamError(f"NATS at {self.shown} takes no more bytes") from None
        except _FOREIGN as error:
            raise self._lost(error_words(error)) from None

    def send_headed_now(self, subject: str, head: bytes, data: bytes) -> None:
        """`send_headed` while `client.is_flowing`: nothing is waited for. Raises StreamError: lost."""
        message = self._headed(subject, head, data)
        try:
            self.client.write_now(message)
        except _FOREIGN as error:
            raise self._lost(error_words(error)) from None

    def _headed(self, subject: str, head: bytes, data: bytes) -> bytes:
        if not self.is_open:
            raise self._lost(self._why_lost or "closed")
        line = b"HPUB %b %d %d\r\n" % (subject.encode(), len(head), len(head) + len(data))
        return b"".join((line, head, data, b"\r\n"))

    def check(self, subject: str) -> None:
        """Raises StreamError: the connection is lost, or the server has complained of this subject since the
        last call.
        """
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
        except _FOREIGN:
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
        if isinstance(error, SlowConsumerError):  # one for each message that is dropped
            self.note_dropped(error.subject)
            return
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
                if len(self._complaints) >= _MOST_COMPLAINTS:
                    self._complaints.clear()
                self._complaints[subject] = words
            self._wake_readers()
        else:
            self._why_lost = words
            log.debug("stream.error_reported", server=self.shown, why=words)

    def note_dropped(self, subject: str) -> None:
        """A message was dropped, because too many waited. It is told once in a while."""
        self._dropped += 1
        now_s = time.monotonic()
        if now_s >= self._dropped_told_s + _DROPPED_EVERY_S:
            log.debug("stream.messages_dropped", server=self.shown, subject=subject, count=self._dropped)
            self._dropped, self._dropped_told_s = 0, now_s

    async def _on_closed(self) -> None:
        self._is_open = False
        self._fail_waiting(self._lost(self._why_lost or "closed"))
        self._wake_readers()


async def _nothing(message: Msg) -> None:
    """What the subscription's own task would do: its messages go elsewhere."""


def _is_raised_here(error: BaseException) -> bool:
    """Whether kvbm's code has raised it, not the client's or what that calls."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__", "")).startswith("kvbm.")


def error_words(error: Exception) -> str:
    """An error that a call of nats-py has ended in, in words."""
    text = str(error).removeprefix("nats: ").rstrip(".")
    if isinstance(error, NatsError | OSError):
        return text or type(error).__name__
    return f"{type(error).__name__} in its client: {text}".rstrip(": ")
