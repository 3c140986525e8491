"""Requests of the JetStream API, and what the server answers."""

from __future__ import annotations

import asyncio
import calendar
import json
import time
from typing import Any, NamedTuple, TypeVar

import msgspec
from nats.aio.msg import Msg

from kvbm.core.errors import FencedError, StreamError
from kvbm.streams.base import AwayError, StreamMessage
from kvbm.streams.nats.connection import NatsConnection, NobodyError

TRY_S = 1.0  # a request is sent again when it was not answered for so long: nobody answers while there is no leader
OFFLINE_WAIT_S = 0.5  # less is left than this: no time for another try
NS = 1_000_000_000

NOT_ENABLED = 10039  # JetStream, for this account
OFFLINE = (10008, 10009, 10118)  # no leader yet, not the leader, stream offline
_WRONG_LAST = (10071, 10164)  # an expected last sequence that is another
_UNDER_WAY = 10164  # so too, where the stream is replicated and has not yet decided on an earlier message

T = TypeVar("T")


class JetStreamFault(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class StreamConfig(msgspec.Struct):
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
    messages: int = 0
    bytes: int = 0


class AnyReply(msgspec.Struct):
    error: JetStreamFault | None = None


class StreamInfo(msgspec.Struct):
    config: StreamConfig = msgspec.field(default_factory=StreamConfig)
    state: _StreamState = msgspec.field(default_factory=_StreamState)
    created: str = ""
    error: JetStreamFault | None = None


class StoredMessage(msgspec.Struct):
    subject: str = ""
    data: bytes = b""  # base64 on the wire
    hdrs: bytes = b""  # so too
    seq: int = 0
    time: str = ""  # when it was stored: RFC 3339, with nanoseconds


class MessageReply(msgspec.Struct):
    message: StoredMessage | None = None
    error: JetStreamFault | None = None


class AccountLimits(msgspec.Struct):
    max_storage: int = -1


class AccountInfo(msgspec.Struct):
    storage: int = 0
    limits: AccountLimits = msgspec.field(default_factory=AccountLimits)
    error: JetStreamFault | None = None


class ConsumerReply(msgspec.Struct):
    name: str = ""
    num_pending: int = 0
    error: JetStreamFault | None = None


class PublishAck(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    error: JetStreamFault | None = None


class ServerMessage(NamedTuple):
    """A message as the server keeps it."""

    sequence: int
    data: bytes
    headers: dict[str, str]


async def request(connection: NatsConnection, subject: str, body: dict[str, Any], kind: type[T], timeout_s: float) -> T:
    """Send a request with a JSON body, and again while nobody answers. Raises StreamError."""
    return await ask_until(connection, subject, json.dumps(body).encode(), kind, timeout_s)


async def ask_until(connection: NatsConnection, subject: str, data: bytes, kind: type[T], timeout_s: float) -> T:
    """Send a request, and again while nobody answers: without a leader it is dropped, or refused for now.

    Raises: AwayError: no other answer came in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        reply = await connection.ask(subject, data, left_s, again_s=TRY_S)
        error = decode(reply, AnyReply, subject).error
        if error is None or error.err_code not in OFFLINE:
            return decode(reply, kind, subject)
        if deadline_s - time.monotonic() < OFFLINE_WAIT_S:
            raise AwayError(f"NATS at {connection.shown} answers to {subject}: {error.description}")
        await asyncio.sleep(OFFLINE_WAIT_S / 2)


def decode(message: Msg, kind: type[T], subject: str) -> T:
    """What an answer says. Raises StreamError: it is something else.

    Args:
        subject: that was asked, for the error.
    """
    try:
        return msgspec.json.decode(message.data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StreamError(f"NATS answered to {subject} with something else ({error})") from None


async def stream_info(connection: NatsConnection, name: str, timeout_s: float) -> StreamInfo:
    """A stream as it is. Raises StreamError: there is none, or the user may not see it."""
    info = await request(connection, f"$JS.API.STREAM.INFO.{name}", {}, StreamInfo, timeout_s)
    if info.error is not None:
        raise StreamError(f"stream {name} at {connection.shown}: {info.error.description}")
    return info


async def message_at(connection: NatsConnection, name: str, sequence: int, timeout_s: float) -> StreamMessage | None:
    """The message at a sequence;

    None: there is none, or it is damaged. The stream's leader is asked: only it must be believed.
    """
    if sequence < 1:
        return None
    asked = f"$JS.API.STREAM.MSG.GET.{name}"
    reply = await request(connection, asked, {"seq": sequence}, MessageReply, timeout_s)
    if reply.message is None:
        if reply.error is not None and reply.error.code != 404:
            raise StreamError(
                f"NATS at {connection.shown} refuses message {sequence} of {name}: {reply.error.description}"
            )
        return None
    found = reply.message
    return StreamMessage(found.seq, found.subject, found.data, ns_of(found.time, asked))


def ns_of(words: str, asked: str) -> int:
    """Nanoseconds since 1970 of a time as the server writes it, which leaves out zeros at the end.

    Raises StreamError.
    """
    whole, _, fraction = words.removesuffix("Z").partition(".")
    try:
        return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) * NS + int(fraction[:9].ljust(9, "0"))
    except ValueError:
        raise StreamError(f"NATS answered to {asked} with the time {words!r}, which is none") from None


async def store(
    connection: NatsConnection, stream: str, subject: str, data: bytes, headers: dict[str, str], timeout_s: float
) -> int:
    """Have a message stored; gives its sequence.

    Raises: FencedError: the last sequence it expects is another. AwayError, StreamError: it was not stored, or nobody
        knows.
    """
    ack = decode(await connection.ask(subject, data, timeout_s, headers), PublishAck, subject)
    if ack.error is not None:
        words = f"NATS at {connection.shown} refuses a message for {subject}: {ack.error.description}"
        if ack.error.err_code == _UNDER_WAY and connection.most_in_flight == 1:
            raise AwayError(f"{words}: another message that names the fence is under way")
        if ack.error.err_code in _WRONG_LAST:
            raise FencedError(words)
        raise AwayError(words) if ack.error.err_code in OFFLINE else StreamError(words)
    if ack.stream != stream:
        raise StreamError(f"{subject} at {connection.shown} is stored by stream {ack.stream!r}, not {stream!r}")
    return ack.seq


async def last_message(
    connection: NatsConnection, stream: str, subject: str, timeout_s: float, may_lack: bool = False
) -> ServerMessage | None:
    """The last message of a subject.

    It is asked for in a way that a permission can bind to the subject. Another replica of the server may answer, a
    little late: for a fence the next publish finds out, and a tail that lies earlier costs a repeat.

    Args:
        may_lack: there may be no such stream, and then there is no message; who may not ask its leader takes silence
            for that.
    """
    try:
        found = await connection.ask(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout_s)
    except NobodyError:
        if may_lack and connection.is_lent:
            return None
        return await _last_asked_of_leader(connection, stream, subject, timeout_s)  # a stream without direct access
    headers = {str(name): value for name, value in (found.headers or {}).items()}
    if headers.get("Status") == "404":
        return None
    sequence = headers.get("Nats-Sequence", "")
    if "Status" in headers or not sequence.isdigit():
        raise StreamError(
            f"NATS at {connection.shown} refuses the last message of {subject}: "
            f"{headers.get('Status', '')} {headers.get('Description', 'without a sequence')}".rstrip()
        )
    return ServerMessage(int(sequence), found.data, headers)


async def _last_asked_of_leader(
    connection: NatsConnection, stream: str, subject: str, timeout_s: float
) -> ServerMessage | None:
    asked = f"$JS.API.STREAM.MSG.GET.{stream}"
    reply = await request(connection, asked, {"last_by_subj": subject}, MessageReply, timeout_s)
    if reply.error is not None:
        if reply.error.code == 404:
            return None
        raise StreamError(
            f"NATS at {connection.shown} refuses the last message of {subject}: {reply.error.description}"
        )
    if reply.message is None:
        raise StreamError(f"NATS at {connection.shown} answered to {asked} with neither a message nor an error")
    lines = reply.message.hdrs.decode(errors="replace").splitlines()
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    return ServerMessage(reply.message.seq, reply.message.data, headers)
