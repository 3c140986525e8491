"""Events and heartbeats on NATS JetStream.

    KVBM        kvbm.v1.events.<cluster>.<instance>   on disk, kept 24 hours, nothing can be deleted or purged
                kvbm.v1.fence.<cluster>.<instance>    who may publish the instance's events; the server compares at each publish
    KVBM_PULSE  kvbm.v1.pulse.<cluster>.<instance>    in memory, the last of each subject
    no stream   kvbm.v1.rounds.<cluster>.<instance>   requests; kvbm.v1.samples.…: told to whoever listens

nats-py carries bytes here and nothing more. Its own reconnection is off, because it sends again, in another order, what it had
buffered: a lost connection fails the calls in flight at once, and readers make a new one. Its JetStream layer is not used
either: acks are awaited by a reply inbox of ours, and readers pull by requests of ours.
"""

from __future__ import annotations

import asyncio
import calendar
import itertools
import json
import math
import random
import re
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoServersError

from kvbm.core.errors import ConfigError, FencedError, MissingExtraError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import (
    ASKS_KEPT,
    EVENTS_PREFIX,
    FENCE_PREFIX,
    ORIGIN,
    PULSE_PREFIX,
    ROUNDS_PREFIX,
    SAMPLES_KEPT,
    SAMPLES_PREFIX,
    START,
    AccessSample,
    AwayError,
    EpochRuns,
    Fence,
    Heartbeat,
    Mark,
    Notice,
    Position,
    StreamMessage,
    StreamState,
    Tail,
    cluster_filter,
    end_of_message,
    events_subject,
    fence_data,
    fence_of,
    fence_subject,
    instance_subject,
    mark_of,
    pulse_subject,
    read_subjects,
    subject_names,
)
from kvbm.streams.nats.credentials import CheckedClient, Credentials, NoTlsError

log = structlog.get_logger()

STREAM = "KVBM"
PULSE = "KVBM_PULSE"
MAX_AGE_S = 24 * 3600
PULL_MESSAGES = 2000
PULL_BYTES = 16 << 20
PULL_EXPIRES_S = 30
PULL_HEARTBEAT_S = 1  # so often the server says that a reader's consumer lives
SILENCE_S = 2.5 * PULL_HEARTBEAT_S
READER_IDLE_S = 60  # after this long without a request the server forgets a reader; the next fetch makes a new one
RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 0.5  # a cluster's new leader is found soon after it was chosen
TRY_S = (
    1.0  # a request of JetStream's API is sent again when it was not answered: nobody answers while there is no leader
)
PULSE_WAIT_S = 1.5  # to see the stream of heartbeats; the events do not wait for it any longer

JS_API = "$JS.API"
BORROWED_API = "kvbm.v1.api"  # the same for a user whose account has no JetStream, and is lent that of another account

FENCE_HEADER = "Kvbm-Fence"  # <sequence>:<epoch>:<run> of the fence that a message of events names
SAFE_HEADER = "Kvbm-Safe"  # <epoch>:<offset>, see `Tail.safe`

_FENCE_LINE = f"{FENCE_HEADER}: ".encode()
_MOST_FENCE_WORDS = 200
_HEADERS_BEGIN = b"NATS/1.0\r\n"  # of headers without a status
_HEADERS_BYTES = 1024  # more than the headers of a publish take; the server counts them as part of the message
_WRONG_LAST = (10071, 10164)  # the server's codes for an expected last sequence that is another
_UNDER_WAY = 10164  # so too, where the stream is replicated and has not yet decided on an earlier message
_NOT_ENABLED = 10039  # JetStream, for this account
_OFFLINE = (10008, 10009, 10118)  # no leader yet, not the leader, stream offline
_NO_CLUSTER = 10074  # more than one replica wanted of a server that is alone
_NS = 1_000_000_000
_CLOSE_WAIT_S = 1.0
_LOOKED_PINGS = 5
_QUOTED = re.compile(r'"([^"]+)"')
T = TypeVar("T")
Told = TypeVar("Told", AccessSample, Notice)


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _StreamConfig(msgspec.Struct):
    subjects: list[str] = []
    max_msgs_per_subject: int = -1
    max_bytes: int = -1
    max_msgs: int = -1
    discard: str = "old"
    max_age: int = 0
    storage: str = ""
    num_replicas: int = 1


class _StreamState(msgspec.Struct):
    first_seq: int = 0
    last_seq: int = 0
    bytes: int = 0


class _AnyReply(msgspec.Struct):
    error: _ApiError | None = None


class _StreamInfo(msgspec.Struct):
    config: _StreamConfig = msgspec.field(default_factory=_StreamConfig)
    state: _StreamState = msgspec.field(default_factory=_StreamState)
    created: str = ""
    error: _ApiError | None = None


class _StoredMessage(msgspec.Struct):
    subject: str = ""
    data: bytes = b""  # base64 on the wire
    hdrs: bytes = b""  # so too
    seq: int = 0
    time: str = ""  # when it was stored: RFC 3339, with nanoseconds


class _MessageReply(msgspec.Struct):
    message: _StoredMessage | None = None
    error: _ApiError | None = None


class _AccountLimits(msgspec.Struct):
    max_storage: int = -1


class _AccountInfo(msgspec.Struct):
    storage: int = 0
    limits: _AccountLimits = msgspec.field(default_factory=_AccountLimits)
    error: _ApiError | None = None


class _ConsumerReply(msgspec.Struct):
    name: str = ""
    num_pending: int = 0
    error: _ApiError | None = None


class _PublishAck(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    error: _ApiError | None = None


_STREAMS: dict[str, dict[str, Any]] = {
    STREAM: {
        "name": STREAM,
        "subjects": [f"{EVENTS_PREFIX}.>", f"{FENCE_PREFIX}.>"],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "max_age": MAX_AGE_S * _NS,
        "deny_delete": True,
        "deny_purge": True,
        "allow_direct": True,
    },
    PULSE: {
        "name": PULSE,
        "subjects": [f"{PULSE_PREFIX}.>"],
        "retention": "limits",
        "discard": "old",
        "storage": "memory",
        "max_age": MAX_AGE_S * _NS,
        "max_msgs_per_subject": 1,
        "allow_direct": True,
    },
}


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


class _RefusedError(StreamError):
    """The server forbids it: trying again soon is of no use."""


class _NobodyError(AwayError):
    """Nobody listens to the subject."""


class _LateError(AwayError):
    """No answer came in time, though the connection stands as far as is known."""


class _Stored(NamedTuple):
    sequence: int
    data: bytes
    headers: dict[str, str]


class _Headers(dict[str, str]):
    """Headers of a message, taken apart when first looked at: readers of events never do. `Status` is never among them."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw
        self._is_apart = False

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        self._take_apart()
        return super().__contains__(name)

    def __missing__(self, name: str) -> str:
        if name not in self:  # which takes them apart
            raise KeyError(name)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        self._take_apart()
        return super().get(name, default)

    def items(self) -> Any:
        self._take_apart()
        return super().items()

    def _take_apart(self) -> None:
        if self._is_apart:
            return
        self._is_apart = True
        for line in self.raw.decode(errors="replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon:
                self[name] = value.strip()


class _Client(CheckedClient):
    """A client that leaves headers alone until somebody looks at them."""

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        if headers and headers.startswith(_HEADERS_BEGIN):
            return _Headers(headers[len(_HEADERS_BEGIN) :])
        found: dict[str, str] | None = await super()._process_headers(headers)  # a status of the server's
        return found


class _Link:
    """One connection, from its making to its loss; it never comes back."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self.url = url
        self.shown = shown(url)
        self.client = _Client()
        self.client.wants_tls = credentials.wants_tls(url)
        self.wakes: set[asyncio.Event] = set()  # set when the connection is lost
        self._is_open = False
        self._why_lost = ""
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # reply inbox → subject asked, answer
        self._complaints: dict[str, str] = {}  # subject → what the server said of the last thing sent there
        self._unheard: dict[str, str] = {}  # subject that may not be subscribed to → what the server said
        self._inbox = ""
        self._counter = itertools.count()
        self.is_lent = False  # JetStream is another account's
        self.most_in_flight = 0  # see `EventStream.most_in_flight`

    @classmethod
    async def open(cls, url: str, timeout_s: float, credentials: Credentials) -> _Link:
        link = cls(url, credentials)
        try:
            options = credentials.connect_options(url)
        except (
            ConfigError,
            MissingExtraError,
        ) as error:  # found at the start by whoever has the settings; files may change
            raise StreamError(str(error)) from None
        try:
            async with asyncio.timeout(timeout_s):
                await link._connect(timeout_s, options)
                link._inbox = link.client.new_inbox()
                link._is_open = True
                await link.client.subscribe(f"{link._inbox}.*", cb=link._on_answer)
        except TimeoutError:
            await link.close()
            raise StreamError(f"no answer from NATS at {link.shown} within {timeout_s:g} s; {_REMEDY}") from None
        except (OSError, ssl.SSLError, NatsError, ValueError) as error:
            await link.close()
            why = link._why_lost or _words(error)
            # a refused user may show as a reset, because the server closes before nats-py has read its reason
            remedy = _REMEDY if isinstance(error, NoServersError) else _TURNED_AWAY
            if isinstance(error, ssl.SSLError | NoTlsError) or "certificate" in why:
                remedy = _TLS_FAILED
            raise StreamError(f"no connection to NATS at {link.shown} ({why}); {remedy}") from None
        except BaseException:
            await link.close()
            raise
        return link

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
            await asyncio.wait([connecting], timeout=_CLOSE_WAIT_S)
            if connecting.done() and not connecting.cancelled():
                connecting.exception()  # it is said by now, or of no use
            raise

    @property
    def is_open(self) -> bool:
        return self._is_open and self.client.is_connected

    def new_inbox(self) -> str:
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
            raise _LateError(f"NATS at {self.shown} did not answer to {subject} within {timeout_s:g} s") from None
        except MaxPayloadError:
            raise StreamError(
                f"a message of {len(data)} bytes for {subject}; NATS at {self.shown} takes {self.client.max_payload}: "
                "raise max_payload there"
            ) from None
        except NatsError as error:
            raise self._lost(_words(error)) from None
        finally:
            self._waiting.pop(inbox, None)
        if message.headers and message.headers.get("Status") == "503":
            raise _NobodyError(
                f"nobody answers to {subject} at {self.shown}; its server needs JetStream (nats-server -js), or the stream "
                "has no leader now"
            )
        return message

    def _routed(self, subject: str) -> str:
        return BORROWED_API + subject.removeprefix(JS_API) if self.is_lent and subject.startswith(JS_API) else subject

    async def subscribe(self, subject: str, take: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Without nats-py's limits, because beyond them it drops messages: `take` must bound what it keeps. Raises StreamError."""
        try:
            return await self.client.subscribe(subject, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
        except NatsError as error:
            raise self._lost(_words(error)) from None

    async def unsubscribe(self, subscription: Subscription | None) -> None:
        """Tell the server, if it still listens."""
        if subscription is None or not self.is_open:
            return
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await subscription.unsubscribe()
        except (TimeoutError, NatsError):
            pass  # the connection is ending, and with it the subscription

    def check_heard(self, subject: str) -> None:
        """Raises StreamError: the server refuses a subscription to this subject."""
        complaint = self._unheard.get(subject.lower())
        if complaint:
            raise _RefusedError(f"NATS at {self.shown} refuses: {complaint}")

    async def tell(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send without waiting for an answer. Raises StreamError: lost, or refused before."""
        self.check(subject)
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await self.client.publish(subject, data, reply=reply)
        except TimeoutError:
            raise StreamError(f"NATS at {self.shown} takes no more bytes") from None
        except NatsError as error:
            raise self._lost(_words(error)) from None

    def check(self, subject: str) -> None:
        """Raises StreamError: the connection is lost, or the server has complained of this subject since the last call."""
        if not self.is_open:
            raise self._lost(self._why_lost or "closed")
        complaint = self._complaints.pop(subject.lower(), "") or self._unheard.get(f"{self._inbox}.*".lower(), "")
        if complaint:
            raise _RefusedError(f"NATS at {self.shown} refuses: {complaint}")

    async def close(self) -> None:
        self._is_open = False
        self._fail_waiting(self._lost("closed"))
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
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
        words = _words(error)
        if not self._is_open:
            self._why_lost = words
        elif "permissions violation" in words:
            log.warning("stream.permission_refused", server=self.shown, why=words)
            quoted = _QUOTED.search(words)
            subject = quoted.group(1) if quoted else ""
            refusal = _RefusedError(f"NATS at {self.shown} refuses: {words}")
            if " subscription " in words:
                self._unheard[subject] = words
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


_REMEDY = "start a nats-server there, or correct the URL"
_TURNED_AWAY = "check that a nats-server listens there, and the user and password it wants, or the key"
_TLS_FAILED = "check nats.tls_ca and nats.tls_cert, and that the server's certificate names this host"


def _words(error: Exception) -> str:
    text = str(error).removeprefix("nats: ").rstrip(".")
    return text or type(error).__name__


class Making(NamedTuple):
    """How streams are made that are not there yet; see `NatsStream.connect`."""

    max_bytes: int = -1
    replicas: int = 1

    def config(self, name: str) -> dict[str, Any]:
        """A stream's whole configuration."""
        limits = {"max_bytes": self.max_bytes} if name == STREAM else {}
        return _STREAMS[name] | limits | {"num_replicas": self.replicas}


class NatsStream:
    """An `EventStream` on NATS. One asyncio loop; it owns its connection.

    A lost connection fails the calls in flight, and later ones at once; readers and watchers make a new one for all.
    """

    def __init__(self, url: str, link: _Link, making: Making, credentials: Credentials) -> None:
        self.url = url
        self._credentials = credentials
        self._link = link
        self._making = making
        self._relinking = asyncio.Lock()
        self._is_closed = False
        self._readers: set[NatsReader] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        timeout_s: float = 5.0,
        max_bytes: int = -1,
        credentials: Credentials | None = None,
        replicas: int = 1,
    ) -> NatsStream:
        """Connect and make sure that both streams exist; one that exists keeps its limits and its number of replicas.

        Args:
            max_bytes: what the events may take on the server's disk, if the stream is made here; -1 for no limit.
            credentials: keys and certificates, where the server wants some.
            replicas: servers of a cluster that keep each stream, if it is made here.
        Raises: StreamError: nothing answers in time, or a stream of that name serves something else.
        """
        credentials, making = credentials or Credentials(), Making(max_bytes, replicas)
        return cls(url, await _open_ready(url, timeout_s, making, credentials), making, credentials)

    @property
    def is_connected(self) -> bool:
        """See `EventStream.is_connected`."""
        return self._link.is_open

    async def close(self) -> None:
        """See `EventStream.close`."""
        self._is_closed = True
        for reader in tuple(self._readers):
            await reader.close()
        await self._link.close()

    # -- events -------------------------------------------------------------------------------------------------------

    @property
    def max_message_bytes(self) -> int:
        """See `EventStream.max_message_bytes`."""
        return max(1, self._link.client.max_payload - _HEADERS_BYTES)

    @property
    def most_in_flight(self) -> int:
        """See `EventStream.most_in_flight`."""
        return self._link.most_in_flight

    async def publish(
        self,
        cluster: str,
        instance: InstanceId,
        data: bytes,
        timeout_s: float = 5.0,
        fence: Fence | None = None,
        safe: Position = ORIGIN,
    ) -> int:
        """See `EventStream.publish`."""
        subject = events_subject(cluster, instance)
        headers = {SAFE_HEADER: f"{safe.epoch}:{safe.offset}"}
        if fence is not None:
            headers |= _expecting(fence.sequence, fence_subject(cluster, instance))
            if fence.run.isprintable() and fence.run.isascii():  # else it names none
                headers[FENCE_HEADER] = f"{fence.sequence}:{fence.epoch}:{fence.run}"
        return await self._store(subject, data, headers, timeout_s)

    async def tail(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Tail | None:
        """See `EventStream.tail`."""
        subject = events_subject(cluster, instance)
        last = await self._last(STREAM, subject, timeout_s)
        if last is None:
            return None
        end = end_of_message(last.data, instance, f"message {last.sequence} of {subject}")
        return Tail(end, _position_in(last.headers.get(SAFE_HEADER)) or end)

    async def fence(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Fence | None:
        """See `EventStream.fence`."""
        subject = fence_subject(cluster, instance)
        last = await self._last(STREAM, subject, timeout_s)
        return None if last is None else fence_of(last.data, last.sequence, f"message {last.sequence} of {subject}")

    async def set_fence(
        self,
        cluster: str,
        instance: InstanceId,
        epoch: Epoch,
        run: str,
        expected: int,
        timeout_s: float = 5.0,
        epochs: EpochRuns = (),
    ) -> Fence:
        """See `EventStream.set_fence`."""
        subject = fence_subject(cluster, instance)
        headers = _expecting(expected, subject)
        return Fence(epoch, run, await self._store(subject, fence_data(epoch, run, epochs), headers, timeout_s), epochs)

    async def _store(self, subject: str, data: bytes, headers: dict[str, str], timeout_s: float) -> int:
        ack = _decode(await self._link.ask(subject, data, timeout_s, headers), _PublishAck, subject)
        if ack.error is not None:
            words = f"NATS at {shown(self.url)} refuses a message for {subject}: {ack.error.description}"
            if ack.error.err_code == _UNDER_WAY and self.most_in_flight == 1:
                raise AwayError(f"{words}: another message that names the fence is under way")
            if ack.error.err_code in _WRONG_LAST:
                raise FencedError(words)
            raise AwayError(words) if ack.error.err_code in _OFFLINE else StreamError(words)
        if ack.stream != STREAM:
            raise StreamError(f"{subject} at {shown(self.url)} is stored by stream {ack.stream!r}, not {STREAM!r}")
        return ack.seq

    async def _last(self, stream: str, subject: str, timeout_s: float) -> _Stored | None:
        """The last message of a subject.

        It is asked for in a way that a permission can bind to the subject. Another replica of the server may answer, a little
        late: for a fence the next publish finds out, and a tail that lies earlier costs a repeat.
        """
        try:
            found = await self._link.ask(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout_s)
        except _NobodyError:
            return await self._last_asked_of_leader(stream, subject, timeout_s)  # a stream without direct access
        headers = {str(name): value for name, value in (found.headers or {}).items()}
        if headers.get("Status") == "404":
            return None
        sequence = headers.get("Nats-Sequence", "")
        if "Status" in headers or not sequence.isdigit():
            raise StreamError(
                f"NATS at {shown(self.url)} refuses the last message of {subject}: "
                f"{headers.get('Status', '')} {headers.get('Description', 'without a sequence')}".rstrip()
            )
        return _Stored(int(sequence), found.data, headers)

    async def _last_asked_of_leader(self, stream: str, subject: str, timeout_s: float) -> _Stored | None:
        asked = f"$JS.API.STREAM.MSG.GET.{stream}"
        reply = await _request(self._link, asked, {"last_by_subj": subject}, _MessageReply, timeout_s)
        if reply.error is not None:
            if reply.error.code == 404:
                return None
            raise StreamError(
                f"NATS at {shown(self.url)} refuses the last message of {subject}: {reply.error.description}"
            )
        if reply.message is None:
            raise StreamError(f"NATS at {shown(self.url)} answered to {asked} with neither a message nor an error")
        lines = reply.message.hdrs.decode(errors="replace").splitlines()
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        return _Stored(reply.message.seq, reply.message.data, headers)

    async def state(self, timeout_s: float = 5.0) -> StreamState:
        """See `EventStream.state`."""
        info = await _stream_info(self._link, STREAM, timeout_s)
        first = info.state.first_seq if info.state.first_seq else info.state.last_seq + 1
        config, held = info.config, info.state
        most = config.max_msgs if config.discard == "old" else -1
        return StreamState(first, held.last_seq, held.bytes, config.max_bytes, config.max_age / _NS, info.created, most)

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventStream.first_sequence`."""
        return (await self.state(timeout_s)).first_sequence

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        """See `EventStream.last_sequence`."""
        return (await self.state(timeout_s)).last_sequence

    async def message(self, sequence: int, timeout_s: float = 5.0) -> StreamMessage | None:
        """See `EventStream.message`."""
        return await _message_at(await self.link(timeout_s), STREAM, sequence, timeout_s)

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
    ) -> NatsReader:
        """See `EventStream.pull`."""
        reader = NatsReader(self, STREAM, read_subjects(cluster), Mark(after_sequence, fingerprint))
        await reader.begin(timeout_s)
        return reader

    # -- pulses -------------------------------------------------------------------------------------------------------

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """See `EventStream.send_pulse`."""
        subject = pulse_subject(heartbeat.cluster, heartbeat.instance)
        await self._link.tell(subject, msgspec.msgpack.encode(heartbeat))

    async def last_pulse(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Heartbeat | None:
        """See `EventStream.last_pulse`."""
        subject = pulse_subject(cluster, instance)
        last = await self._last(PULSE, subject, timeout_s)
        return None if last is None else _heartbeat_in(StreamMessage(last.sequence, subject, last.data))

    async def watch_pulses(self, cluster: str | None = None) -> AsyncIterator[Heartbeat]:
        """See `EventStream.watch_pulses`."""
        reader = NatsReader(self, PULSE, (cluster_filter(PULSE_PREFIX, cluster),), None)
        wait_s = RECONNECT_FIRST_S
        try:
            while not self._is_closed:
                try:
                    messages = await reader.fetch(PULL_EXPIRES_S)
                except StreamError as error:
                    log.debug("stream.pulses_unreachable", why=str(error))
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                    wait_s = min(2 * wait_s, RECONNECT_MOST_S)
                    await self._make_pulse_stream()
                    continue
                wait_s = RECONNECT_FIRST_S
                for message in messages:
                    heartbeat = _heartbeat_in(message)
                    if heartbeat is not None:
                        yield heartbeat
        finally:
            await reader.close()

    async def _make_pulse_stream(self) -> None:
        """It may not be there: a connection does not wait for it."""
        try:
            await _ensure_stream(await self.link(PULSE_WAIT_S), self._making.config(PULSE), PULSE_WAIT_S)
        except (StreamError, TimeoutError) as error:
            log.debug("stream.pulses_unreachable", why=str(error))

    # -- what nobody keeps --------------------------------------------------------------------------------------------

    async def ask_round(self, cluster: str, instance: InstanceId, timeout_s: float = 1.0) -> bool:
        """See `EventStream.ask_round`."""
        try:
            await self._link.ask(instance_subject(ROUNDS_PREFIX, cluster, instance), b"", timeout_s)
        except (_NobodyError, _LateError):
            return False
        return True

    async def send_notice(self, notice: Notice) -> None:
        """See `EventStream.send_notice`."""
        subject = instance_subject(ROUNDS_PREFIX, notice.cluster, notice.instance)
        await self._link.tell(subject, msgspec.msgpack.encode(notice))

    async def watch_round_asks(self, cluster: str, instance: InstanceId) -> AsyncIterator[Notice | None]:
        """See `EventStream.watch_round_asks`."""
        subject = instance_subject(ROUNDS_PREFIX, cluster, instance)
        async for message in self._listen(subject, ASKS_KEPT, reconnects=False):
            if not message.data:
                yield None
            elif (notice := _told_in(message, Notice)) is not None:
                yield notice

    async def send_sample(self, sample: AccessSample) -> None:
        """See `EventStream.send_sample`."""
        subject = instance_subject(SAMPLES_PREFIX, sample.cluster, sample.instance)
        await self._link.tell(subject, msgspec.msgpack.encode(sample))

    async def watch_samples(self, cluster: str | None = None) -> AsyncIterator[AccessSample]:
        """See `EventStream.watch_samples`."""
        async for message in self._listen(cluster_filter(SAMPLES_PREFIX, cluster), SAMPLES_KEPT):
            sample = _told_in(message, AccessSample)
            if sample is not None:
                yield sample

    async def _listen(self, subject: str, kept: int, reconnects: bool = True) -> AsyncIterator[Msg]:
        """What comes on a subject from now on; who asks is answered. Raises StreamError: the server refuses."""
        wake = asyncio.Event()
        ready: deque[Msg] = deque(maxlen=kept)

        async def take(message: Msg) -> None:
            ready.append(message)
            wake.set()
            if message.reply:
                try:
                    await link.tell(message.reply, b"")
                except StreamError as error:
                    log.debug("stream.answer_failed", subject=subject, why=str(error))

        wait_s = RECONNECT_FIRST_S
        while not self._is_closed:
            try:
                link = await self.link(PULL_EXPIRES_S) if reconnects else self._link
                subscription = await link.subscribe(subject, take)
            except (StreamError, TimeoutError) as error:
                if not reconnects:
                    return
                log.debug("stream.subject_unreachable", subject=subject, why=str(error))
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, RECONNECT_MOST_S)
                continue
            wait_s = RECONNECT_FIRST_S
            link.wakes.add(wake)
            try:
                while link.is_open:
                    while ready:
                        yield ready.popleft()
                    link.check_heard(subject)
                    wake.clear()
                    if link.is_open:
                        await wake.wait()
            finally:
                link.wakes.discard(wake)
                await link.unsubscribe(subscription)
            if not reconnects:
                return

    # -- the connection -----------------------------------------------------------------------------------------------

    async def link(self, timeout_s: float) -> _Link:
        """The connection, made anew if it was lost. For readers. Raises StreamError."""
        async with asyncio.timeout(timeout_s):
            async with self._relinking:
                self._check_open()
                if not self._link.is_open:
                    await self._link.close()
                    self._link = await _open_ready(self.url, timeout_s, self._making, self._credentials)
                    try:
                        self._check_open()
                    except StreamError:
                        await self._link.close()  # it was made for nobody
                        raise
                    log.info("stream.reconnected", server=self._link.shown)
                return self._link

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamError(f"the stream at {shown(self.url)} is closed")

    def add_reader(self, reader: NatsReader) -> None:
        """Have it closed with the stream."""
        self._readers.add(reader)

    def remove_reader(self, reader: NatsReader) -> None:
        """Forget it."""
        self._readers.discard(reader)


class _Pull:
    """One consumer on the server, and what it has sent: from its making until the first thing that goes wrong."""

    def __init__(self, link: _Link, wake: asyncio.Event) -> None:
        self.link = link
        self.wake = wake
        self.inbox = link.new_inbox()
        self.path = ""  # <stream>.<consumer>, once it exists
        self.subscription: Subscription | None = None
        self.ready: deque[StreamMessage] = deque()
        self.asked = 0  # messages that requests in flight may still bring
        self.pending = 0  # messages the server had left, as of its last word
        self.looked = 0  # the consumer has come so far, past what its filter leaves out
        self.heard_s = time.monotonic()
        self.why_broken = ""
        self._delivered = 0  # by the consumer's own count, which has no holes

    async def on_message(self, message: Msg) -> None:
        """Take a message, or the server's word on a request."""
        self.heard_s = time.monotonic()
        if not message.reply and message.headers and "Status" in message.headers:
            self._on_status(message.headers)
        else:
            self._on_data(message)
        self.wake.set()

    def _on_data(self, message: Msg) -> None:
        # $JS.ACK.<stream>.<consumer>.<times>.<stream sequence>.<consumer sequence>.<time>.<pending>; a longer form has domain
        # and account before the stream, and one more part at its end
        parts = message.reply.split(".")
        at = 5 if len(parts) == 9 else 7
        try:
            sequence, count, stored_ns, pending = map(int, parts[at : at + 4])
        except ValueError:
            self._break(f"a message with the reply subject {message.reply!r}")
            return
        if self.why_broken or count != self._delivered + 1:
            self._break(f"delivery {count} came after {self._delivered}")
            return
        self._delivered = count
        self.asked -= 1
        self.pending = pending
        fence = _fence_in(message.headers.raw) if isinstance(message.headers, _Headers) else None
        self.ready.append(StreamMessage(sequence, message.subject, message.data, stored_ns, fence))

    def _on_status(self, headers: dict[str, str]) -> None:
        status, words = headers["Status"], headers.get("Description", "")
        if status == "100":
            looked = headers.get("Nats-Last-Stream", "")
            if looked.isdigit() and headers.get("Nats-Last-Consumer") == str(self._delivered):
                self.looked = int(looked)
            return
        unserved = headers.get("Nats-Pending-Messages", "")
        if status in ("404", "408", "409") and unserved.isdigit():
            self.asked -= int(unserved)  # a request ended before it was used up
        else:
            self._break(f"{status} {words}".strip())

    def _break(self, why: str) -> None:
        self.why_broken = self.why_broken or why

    def is_usable(self) -> bool:
        if not self.link.is_open:
            self._break("the connection is lost")
        elif self.asked > 0 and time.monotonic() - self.heard_s > SILENCE_S:
            self._break(f"silent for {SILENCE_S:g} s")
        return not self.why_broken

    async def ask_more(self) -> None:
        """Keep two requests in flight. Their sizes bound what arrives unread. Raises StreamError."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.path}"
        self.link.check(subject)
        while self.asked + len(self.ready) <= PULL_MESSAGES:
            if self.asked <= 0:
                self.heard_s = time.monotonic()
            self.asked += PULL_MESSAGES
            request = {
                "batch": PULL_MESSAGES,
                "max_bytes": max(PULL_BYTES, 2 * self.link.client.max_payload),
                "expires": PULL_EXPIRES_S * _NS,
                "idle_heartbeat": PULL_HEARTBEAT_S * _NS,
            }
            await self.link.tell(subject, json.dumps(request).encode(), reply=self.inbox)

    async def end(self) -> None:
        """Tell the server, if it still listens."""
        self.link.wakes.discard(self.wake)
        if not self.link.is_open:
            return
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                if self.subscription is not None:
                    await self.subscription.unsubscribe()
                if self.path:
                    await self.link.client.publish(f"$JS.API.CONSUMER.DELETE.{self.path}", b"")
        except (TimeoutError, NatsError):
            pass  # the server forgets it by itself


class NatsReader:
    """An `EventReader` by pull requests, without acks. It outlives connections: each new one starts after what was fetched.

    Args:
        after: where to begin; None for the last message of each subject, after a lost connection again.

    Attributes:
        begun: see `EventReader.begun`.
    """

    def __init__(self, stream: NatsStream, name: str, subjects: tuple[str, ...], after: Mark | None) -> None:
        self.begun = 0
        self._stream = stream
        self._name = name
        self._subjects = subjects
        self._after = after
        self._created = ""  # when the stream that `_after` counts in was made
        self._wake = asyncio.Event()
        self._pull: _Pull | None = None
        self._is_closed = False

    @property
    def at_end(self) -> bool:
        """See `EventReader.at_end`."""
        pull = self._pull
        return pull is not None and not pull.why_broken and not pull.ready and pull.pending == 0

    @property
    def reached(self) -> int:
        """See `EventReader.reached`."""
        pull, after = self._pull, self._after.sequence if self._after is not None else 0
        return after if pull is None or pull.ready or pull.why_broken else max(after, pull.looked)

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """See `EventReader.fetch`."""
        deadline_s = time.monotonic() + timeout_s
        wait_s = RECONNECT_FIRST_S
        while True:
            if self._is_closed:
                raise StreamError("the reader is closed")
            left_s = max(0.0, deadline_s - time.monotonic())
            self._wake.clear()
            pull = self._pull
            if pull is not None and pull.ready:
                return await self._take(pull)
            try:
                if pull is None or not pull.is_usable():
                    await self.begin(max(left_s, RECONNECT_FIRST_S))
                    continue
                await pull.ask_more()
            except _RefusedError:
                raise
            except StreamError:
                if left_s <= wait_s:
                    raise
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, RECONNECT_MOST_S)
                continue
            try:
                async with asyncio.timeout(min(left_s, PULL_HEARTBEAT_S)):
                    await self._wake.wait()
            except TimeoutError:
                if time.monotonic() >= deadline_s:
                    return []

    async def _take(self, pull: _Pull) -> list[StreamMessage]:
        messages = list(pull.ready)
        pull.ready.clear()
        if self._after is not None:
            self._after = mark_of(messages[-1])
        if pull.is_usable():
            try:
                await pull.ask_more()
            except StreamError as error:
                pull.why_broken = str(error)  # what was read is good; the next fetch begins anew
        return messages

    async def begin(self, timeout_s: float) -> None:
        """Make a new consumer after what was fetched. Raises StreamError."""
        if self._is_closed:
            raise StreamError("the reader is closed")
        if self._pull is not None:
            after = None if self._after is None else self._after.sequence
            log.info("stream.reader_restarted", stream=self._name, after=after, why=self._pull.why_broken)
            await self._pull.end()
            self._pull = None
        self._stream.add_reader(self)
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._stream.link(timeout_s)
                await self._check_store(link, timeout_s)
                self._pull = await self._make_pull(link, timeout_s)
                self.begun += 1
        except TimeoutError:
            raise AwayError(f"no answer from NATS at {shown(self._stream.url)} within {timeout_s:g} s") from None

    async def _check_store(self, link: _Link, timeout_s: float) -> None:
        """Begin anew when the store was replaced or has lost its end, because its sequences then name other messages."""
        if self._after is None:
            return
        info = await _stream_info(link, self._name, timeout_s)
        is_replaced = bool(self._created) and info.created != self._created
        is_other = is_replaced or info.state.last_seq < self._after.sequence
        if is_other or await self._is_overwritten(link, timeout_s):
            log.warning(
                "stream.store_replaced", stream=self._name, last=info.state.last_seq, after=self._after.sequence
            )
            self._after = START
        self._created = info.created

    async def _is_overwritten(self, link: _Link, timeout_s: float) -> bool:
        """Whether another message than the one fetched last has its sequence: the store lost its end and has grown since."""
        after = self._after
        if after is None or not after.sequence or after.fingerprint is None:
            return False
        message = await _message_at(link, self._name, after.sequence, timeout_s)
        return message is not None and mark_of(message) != after

    async def _make_pull(self, link: _Link, timeout_s: float) -> _Pull:
        pull = _Pull(link, self._wake)
        link.wakes.add(self._wake)
        try:
            pull.subscription = await link.subscribe(pull.inbox, pull.on_message)  # what was asked for bounds it
            start: dict[str, Any] = {"deliver_policy": "all"}
            if self._after is None:
                start = {"deliver_policy": "last_per_subject"}
            elif self._after.sequence:
                start = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._after.sequence + 1}
            config = start | {
                "ack_policy": "none",
                "replay_policy": "instant",
                "filter_subjects": self._subjects,
                "inactive_threshold": READER_IDLE_S * _NS,
                "mem_storage": True,
                "num_replicas": 1,
            }
            subject = f"$JS.API.CONSUMER.CREATE.{self._name}"
            request = json.dumps({"stream_name": self._name, "config": config}).encode()
            reply = await _ask_until(link, subject, request, _ConsumerReply, timeout_s)
            if reply.error is not None:
                raise StreamError(f"NATS at {link.shown} refuses a reader of {self._name}: {reply.error.description}")
            pull.path = f"{self._name}.{reply.name}"
            pull.pending = reply.num_pending
            await pull.ask_more()
        except NatsError as error:
            link.wakes.discard(self._wake)
            raise StreamError(f"the connection to NATS at {link.shown} is lost ({_words(error)})") from None
        except BaseException:
            await pull.end()
            raise
        return pull

    async def close(self) -> None:
        """See `EventReader.close`."""
        self._is_closed = True
        self._stream.remove_reader(self)
        self._wake.set()
        if self._pull is not None:
            await self._pull.end()


# -- looking, without making anything ----------------------------------------------------------------------------------


class StreamView(NamedTuple):
    """The stream of events as it is.

    Attributes:
        missing: subjects it lacks.
        max_bytes, max_messages, max_age_s: limits; -1, -1 and 0 for none.
    """

    missing: tuple[str, ...]
    bytes: int
    max_bytes: int
    max_age_s: float
    storage: str
    replicas: int
    max_messages: int = -1


class ServerView(NamedTuple):
    """What a server says of itself.

    Attributes:
        url: where, without users and passwords.
        round_trip_s: the middle one of a few.
        has_jetstream: "" when it has, for this user; else why not.
        stream: None when it is not there yet, or the user may not see it: then `unseen` says why.
        stored_bytes, may_store_bytes: of the user's account; -1 where there is no limit, or the user may not ask.
    """

    url: str
    version: str
    max_payload: int
    is_tls: bool
    round_trip_s: float
    has_jetstream: str
    stream: StreamView | None
    unseen: str
    stored_bytes: int
    may_store_bytes: int


async def look(url: str, timeout_s: float, credentials: Credentials) -> ServerView:
    """A server and its stream, which is not made if it is not there. Raises StreamError: no connection, or no answers allowed."""
    link = await _Link.open(url, timeout_s, credentials)
    try:
        async with asyncio.timeout(timeout_s):
            times = []
            for _ in range(_LOOKED_PINGS):
                begin_s = time.perf_counter()
                await link.client.flush(math.ceil(timeout_s))
                times.append(time.perf_counter() - begin_s)
            link.check("")
            has_jetstream, stream, unseen = await _look_at_stream(link, timeout_s)
            stored, most = (-1, -1) if has_jetstream or link.is_lent else await _look_at_account(link, timeout_s)
            told = link.client.told
            return ServerView(
                link.shown, str(told.get("version", "")), link.client.max_payload, bool(told.get("tls_required")),
                sorted(times)[len(times) // 2], has_jetstream, stream, unseen, stored, most,
            )  # fmt: skip
    except TimeoutError:
        raise StreamError(f"NATS at {link.shown} did not answer within {timeout_s:g} s; {_REMEDY}") from None
    except NatsError as error:
        raise StreamError(f"NATS at {link.shown} is lost ({_words(error)}); {_REMEDY}") from None
    finally:
        await link.close()


async def _look_at_stream(link: _Link, timeout_s: float) -> tuple[str, StreamView | None, str]:
    """Why there is no JetStream, the stream, and why it is not seen."""
    asked = f"{JS_API}.STREAM.INFO.{STREAM}"
    try:
        info = await _request(link, asked, {}, _StreamInfo, timeout_s)
        if info.error is not None and info.error.err_code == _NOT_ENABLED:
            link.is_lent = True
            try:
                info = await _request(link, asked, {}, _StreamInfo, timeout_s)
            except (_NobodyError, _RefusedError):
                return "JetStream is not enabled for the user's account", None, ""
    except _NobodyError:
        return "the server runs without JetStream", None, ""
    except _RefusedError as error:
        return "", None, str(error)
    if info.error is not None:
        return "", None, "" if info.error.code == 404 else info.error.description
    config = info.config
    missing = tuple(subject for subject in _STREAMS[STREAM]["subjects"] if subject not in config.subjects)
    most = config.max_msgs if config.discard == "old" else -1
    view = StreamView(
        missing, info.state.bytes, config.max_bytes, config.max_age / _NS, config.storage, config.num_replicas, most
    )
    return "", view, ""


async def _look_at_account(link: _Link, timeout_s: float) -> tuple[int, int]:
    try:
        account = await _request(link, f"{JS_API}.INFO", {}, _AccountInfo, timeout_s)
    except _RefusedError:
        return -1, -1
    return (-1, -1) if account.error is not None else (account.storage, account.limits.max_storage)


# -- requests of the JetStream API --------------------------------------------------------------------------------------


async def _open_ready(url: str, timeout_s: float, making: Making, credentials: Credentials) -> _Link:
    deadline_s = time.monotonic() + timeout_s
    link = await _Link.open(url, timeout_s, credentials)
    try:
        async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
            info = await _request(link, f"{JS_API}.STREAM.INFO.{STREAM}", {}, _StreamInfo, timeout_s)
            link.is_lent = info.error is not None and info.error.err_code == _NOT_ENABLED
            events = await _ensure_stream(link, making.config(STREAM), timeout_s)
            # the leader of a replicated stream refuses a message that names a fence while another that names it is under way
            link.most_in_flight = 1 if events.config.num_replicas > 1 else 0
            try:
                await _ensure_stream(link, making.config(PULSE), timeout_s, PULSE_WAIT_S)
            except AwayError as error:  # its node is down: events go on without heartbeats
                log.warning("stream.pulses_away", server=link.shown, why=str(error))
    except TimeoutError:
        await link.close()
        raise AwayError(f"JetStream at {link.shown} did not answer within {timeout_s:g} s") from None
    except BaseException:
        await link.close()
        raise
    return link


async def _ensure_stream(
    link: _Link, config: dict[str, Any], timeout_s: float, look_s: float | None = None
) -> _StreamInfo:
    """Make the stream, unless it is there; one that is there keeps its limits, which are its operator's. What it is now.

    Args:
        look_s: how long to wait for word of one that may be there.
    """
    name = config["name"]
    info = await _request(link, f"$JS.API.STREAM.INFO.{name}", {}, _StreamInfo, look_s or timeout_s)
    if info.error is not None and info.error.code == 404:
        info = await _request(link, f"$JS.API.STREAM.CREATE.{name}", config, _StreamInfo, timeout_s)
        if info.error is not None and info.error.err_code == 10058:  # another made it meanwhile, with other limits
            info = await _request(link, f"$JS.API.STREAM.INFO.{name}", {}, _StreamInfo, timeout_s)
    if info.error is not None:
        remedy = ""
        if info.error.err_code == _NO_CLUSTER:
            remedy = f"; nats.replicas is {config['num_replicas']}: set it to 1, or run a cluster of at least so many servers"
        raise StreamError(f"stream {name} cannot be had at {link.shown}: {info.error.description}{remedy}")
    most = config.get("max_msgs_per_subject", -1)
    if not set(config["subjects"]) <= set(info.config.subjects) or info.config.max_msgs_per_subject != most:
        raise StreamError(
            f"stream {name} at {link.shown} has subjects {info.config.subjects} and keeps {info.config.max_msgs_per_subject} "
            f"messages a subject; it needs {', '.join(config['subjects'])} and {most}: rename the other stream"
        )
    return info


async def _stream_info(link: _Link, name: str, timeout_s: float) -> _StreamInfo:
    info = await _request(link, f"$JS.API.STREAM.INFO.{name}", {}, _StreamInfo, timeout_s)
    if info.error is not None:
        raise StreamError(f"stream {name} at {link.shown}: {info.error.description}")
    return info


async def _message_at(link: _Link, name: str, sequence: int, timeout_s: float) -> StreamMessage | None:
    """The message at a sequence; None: there is none, or it is damaged. The stream's leader is asked: only it must be believed."""
    if sequence < 1:
        return None
    asked = f"$JS.API.STREAM.MSG.GET.{name}"
    reply = await _request(link, asked, {"seq": sequence}, _MessageReply, timeout_s)
    if reply.message is None:
        if reply.error is not None and reply.error.code != 404:
            raise StreamError(f"NATS at {link.shown} refuses message {sequence} of {name}: {reply.error.description}")
        return None
    found = reply.message
    return StreamMessage(found.seq, found.subject, found.data, _ns_of(found.time, asked))


def _ns_of(words: str, asked: str) -> int:
    """Nanoseconds since 1970 of a time as the server writes it, which leaves out zeros at the end. Raises StreamError."""
    whole, _, fraction = words.removesuffix("Z").partition(".")
    try:
        return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) * _NS + int(fraction[:9].ljust(9, "0"))
    except ValueError:
        raise StreamError(f"NATS answered to {asked} with the time {words!r}, which is none") from None


async def _request(link: _Link, subject: str, body: dict[str, Any], kind: type[T], timeout_s: float) -> T:
    return await _ask_until(link, subject, json.dumps(body).encode(), kind, timeout_s)


async def _ask_until(link: _Link, subject: str, data: bytes, kind: type[T], timeout_s: float) -> T:
    """A request of the API, sent again while nobody answers it: without a leader it is dropped, or refused for now.

    Raises: AwayError: no other answer came in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        reply = await link.ask(subject, data, left_s, again_s=TRY_S)
        error = _decode(reply, _AnyReply, subject).error
        if error is None or error.err_code not in _OFFLINE:
            return _decode(reply, kind, subject)
        if deadline_s - time.monotonic() < RECONNECT_MOST_S:
            raise AwayError(f"NATS at {link.shown} answers to {subject}: {error.description}")
        await asyncio.sleep(RECONNECT_MOST_S / 2)


def _decode(message: Msg, kind: type[T], subject: str) -> T:
    try:
        return msgspec.json.decode(message.data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StreamError(f"NATS answered to {subject} with something else ({error})") from None


def _expecting(sequence: int, subject: str) -> dict[str, str]:
    """Headers that have the server refuse a message when the last one of `subject` is not at `sequence`."""
    return {
        "Nats-Expected-Last-Subject-Sequence": str(sequence),
        "Nats-Expected-Last-Subject-Sequence-Subject": subject,
    }


def _fence_in(headers: bytes) -> Fence | None:
    """The fence that headers as they came name; those of one fence are one object."""
    at = headers.find(_FENCE_LINE)
    if at < 0:
        return None
    at += len(_FENCE_LINE)
    return _fence_named(headers[at : headers.find(b"\r\n", at)])


@lru_cache(1024)
def _fence_named(words: bytes) -> Fence | None:
    sequence, _, rest = words.partition(b":")
    epoch, _, run = rest.partition(b":")
    if not (sequence.isdigit() and epoch.isdigit() and run and len(words) <= _MOST_FENCE_WORDS):
        return None  # another program's
    named = Fence(Epoch(int(epoch)), run.decode(errors="replace"), int(sequence))
    return (
        named if max(named.epoch, named.sequence) < 1 << 63 else None
    )  # no server gives such numbers, no file holds them


def _position_in(words: str | None) -> Position | None:
    epoch, _, offset = (words or "").partition(":")
    return Position(Epoch(int(epoch)), Offset(int(offset))) if epoch.isdecimal() and offset.isdecimal() else None


def _told_in(message: Msg, kind: type[Told]) -> Told | None:
    try:
        told = msgspec.msgpack.decode(message.data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("stream.word_refused", subject=message.subject, why=str(error))
        return None
    if subject_names(message.subject) != (told.cluster, told.instance):
        log.warning("stream.word_refused", subject=message.subject, why=f"it is of instance {told.instance!r}")
        return None
    return told


def _heartbeat_in(message: StreamMessage) -> Heartbeat | None:
    try:
        heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("pulse.refused", subject=message.subject, why=str(error))
        return None
    if subject_names(message.subject) != (heartbeat.cluster, heartbeat.instance):
        log.warning("pulse.refused", subject=message.subject, why=f"it is of instance {heartbeat.instance!r}")
        return None
    return heartbeat
