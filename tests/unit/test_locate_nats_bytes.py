"""What a NATS server sends, taken apart: in any pieces, and whatever it is, in bounded memory."""

from __future__ import annotations

import random

import pytest

from kvbm.core.asks import ask_subject, caller_and_verb, message_of, request_of
from kvbm.core.errors import CatalogError, ConfigError
from kvbm.locate.nats_bytes import (
    MOST_INFO_BYTES,
    MOST_LINE_BYTES,
    NatsMessage,
    Parser,
    WireError,
    Word,
    header,
)
from kvbm.locate.nats_proof import target_of

HEADERS = b"NATS/1.0\r\nKvbm-Status: 200\r\nContent-Type: a/b\r\n\r\n"
NOBODY = b"NATS/1.0 503\r\n\r\n"
STREAM = (
    b'INFO {"max_payload":10}\r\nPING\r\n+OK\r\npong\r\n'
    b"MSG _INBOX.a.1 1 5\r\nhe\r\no\r\n"
    b"MSG _INBOX.a.2 1 reply.to 0\r\n\r\n"
    + b"HMSG _INBOX.a.3 1 %d %d\r\n%bbody\r\n" % (len(HEADERS), len(HEADERS) + 4, HEADERS)
    + b"HMSG _INBOX.a.4 1 %d %d\r\n%b\r\n" % (len(NOBODY), len(NOBODY), NOBODY)
    + b"-ERR 'Stale Connection'\r\n"
)
FOUND = [
    Word(b"INFO", b'{"max_payload":10}'),
    Word(b"PING", b""),
    Word(b"+OK", b""),
    Word(b"PONG", b""),
    NatsMessage(b"_INBOX.a.1", b"", b"", b"he\r\no"),
    NatsMessage(b"_INBOX.a.2", b"", b"", b""),
    NatsMessage(b"_INBOX.a.3", b"", HEADERS, b"body"),
    NatsMessage(b"_INBOX.a.4", b"503", NOBODY, b""),
    Word(b"-ERR", b"'Stale Connection'"),
]


def parsed(pieces: list[bytes], most_bytes: int = 1000) -> list[NatsMessage | Word]:
    parser, found = Parser(most_bytes), []
    for piece in pieces:
        parser.feed(piece)
        while (one := parser.next()) is not None:
            found.append(one)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_operations_come_out_whole_in_whatever_pieces_they_come(size: int) -> None:
    assert parsed([STREAM[at : at + size] for at in range(0, len(STREAM), size)]) == FOUND


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"\r\n",
        b"\x00\xff\r\n",
        b"MSG\r\n",
        b"MSG a 1\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 0x5\r\n",
        b"MSG a 1 5 6 7\r\n",
        b"MSG a 1 1001\r\n",
        b"MSG a 1 99999999999999999999\r\n",
        b"MSG a 1 3\r\nabcd\r\n",
        b"HMSG a 1 5\r\n",
        b"HMSG a 1 6 5\r\n",
        b"HMSG a 1 5 9\r\nhelloabcd\r\n",
        b"x" * (MOST_LINE_BYTES + 2),
        b"x" * (MOST_LINE_BYTES + 2) + b"\r\n",
        b"INFO " + b"x" * MOST_INFO_BYTES,
        b"MSG " + b"a" * MOST_LINE_BYTES,
    ],
)
def test_what_is_not_the_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        parsed([data])


def test_no_bytes_at_random_raise_anything_else_and_none_are_kept_beyond_the_bound() -> None:
    rng = random.Random(1)
    words = [b"MSG ", b"HMSG ", b"INFO ", b"PING", b"\r\n", b" 1 ", b"5", b"NATS/1.0", b"\x00", b"a.b", b"-ERR "]
    for _ in range(3000):
        data = b"".join(rng.choice(words) for _ in range(rng.randrange(1, 60)))
        try:
            parsed([data])
        except WireError:
            continue


def test_a_server_that_never_ends_a_line_is_refused_before_much_of_it_is_kept() -> None:
    parser, fed = Parser(1000), 0
    while fed <= MOST_LINE_BYTES:
        parser.feed(b"I" * 1024)
        fed += 1024
        if fed <= MOST_LINE_BYTES:
            assert parser.next() is None
    with pytest.raises(WireError):
        parser.next()


def test_a_header_is_found_by_its_name_alone() -> None:
    assert header(HEADERS, b"Kvbm-Status") == b"200"
    assert header(HEADERS, b"Content-Type") == b"a/b"
    assert header(HEADERS, b"Status") == b""
    assert header(b"NATS/1.0\r\nKvbm-Status: 2", b"Kvbm-Status") == b""


# -- subjects, and what they stand for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "body", "verb", "message"),
    [
        ("POST", "/v1/lookup", b"{}", "lookup", b"{}"),
        ("POST", "/v1/route", b"{}", "route", b"{}"),
        ("GET", "/v1/blocks/00/11", None, "blocks", b"00/11"),
        ("GET", "/v1/instances", None, "instances", b""),
        ("GET", "/v1/instances?after=a%20b&limit=3", None, "instances", b"after=a%20b&limit=3"),
        ("GET", "/v1/namespaces", None, "namespaces", b""),
        ("GET", "/readyz", None, "ready", b""),
    ],
)
def test_a_request_and_its_message_say_the_same(
    method: str, target: str, body: bytes | None, verb: str, message: bytes
) -> None:
    assert message_of(method, target, body) == (verb, message)
    asked = request_of(verb, message)
    assert asked is not None
    assert (asked.method, asked.body) == (method, body or b"")
    assert (asked.path + (f"?{asked.query.decode()}" if asked.query else "")) == target


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "/metrics"), ("DELETE", "/v1/instances/a"), ("POST", "/v1/instances/a/snapshot"), ("GET", "/v1/lookup")],
)
def test_what_only_an_operator_asks_has_no_message(method: str, target: str) -> None:
    assert message_of(method, target, None) is None


@pytest.mark.parametrize(
    ("verb", "body"), [("metrics", b""), ("", b""), ("blocks", b"a b"), ("instances", b"\n"), ("blocks", b"a" * 40_000)]
)
def test_a_message_that_stands_for_no_request_is_none(verb: str, body: bytes) -> None:
    assert request_of(verb, body) is None


def test_a_subject_names_its_caller_and_refuses_names_that_would_be_more_than_one() -> None:
    subject = ask_subject("c", "router-1", "lookup")
    assert subject == "kvbm.v1.ask.c.router-1.lookup"
    assert caller_and_verb(subject) == ("router-1", "lookup")
    for name in ("", "a.b", "a b", ">", "a*", "x" * 129, "é"):
        with pytest.raises(ConfigError):
            ask_subject("c", name, "lookup")
        with pytest.raises(ConfigError):
            ask_subject(name, "a", "lookup")


def test_a_url_names_servers_a_cluster_and_a_caller() -> None:
    found = target_of("nats://me:se%40cret@a:1/prod/router-1, tls://[::1]")
    assert [(one.host, one.port, one.is_tls, one.user, one.password) for one in found.servers] == [
        ("a", 1, False, "me", "se@cret"),
        ("::1", 4222, True, "", None),
    ]
    assert (found.cluster, found.caller) == ("prod", "router-1")
    assert [one.shown for one in found.servers] == ["nats://a:1", "tls://[::1]:4222"]
    assert target_of("nats://a")[1:] == ("local", "any")
    assert target_of("nats://a/prod")[1:] == ("prod", "any")
    with pytest.raises(CatalogError, match="several clusters or callers"):
        target_of("nats://a/b/c,nats://d/e/f")
