"""What clients of many languages send, byte by byte: each is answered as a plain request is, and its connection goes
on.

The bytes were recorded (curl 7.88, Java 17, Node.js 20, the clients of Python) or written after the client's source
(Go, Ruby, .NET, wrk, ApacheBench, health checkers).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from tests.floods import CatalogProcess, catalog_process, publish_instances
from tests.http_wire import Wire, check_in_any_order, post, same
from tests.nats_fixture import nats_url, new_cluster  # noqa: F401

BODY = b'{"namespace":{"model":"m","block_tokens":16},"tokens":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]}'
LENGTH = len(BODY)
JSON = "content-type: application/json"


@pytest.fixture(scope="module")
def catalog(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogProcess]:  # noqa: F811
    within = new_cluster("real-clients")
    publish_instances(nats_url, within)
    with catalog_process(tmp_path_factory.mktemp("catalog"), nats_url, within) as process:
        yield process


def request(line: str, *headers: str) -> bytes:
    """A header, up to where the body begins."""
    return "".join(f"{one}\r\n" for one in (line, *headers, "")).encode()


def in_one_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


class Sent(NamedTuple):
    """What a client sends.

    Attributes:
        packets: each in a packet of its own.
        status: of the answer.
        ends: the answer is the connection's last.
    """

    client: str
    packets: Sequence[bytes]
    status: int = 200
    ends: bool = False


LOOKUP, HOST = "POST /v1/lookup HTTP/1.1", "Host: 127.0.0.1:7700"
JAVA_UPGRADE = (
    "Connection: Upgrade, HTTP2-Settings",
    f"Content-Length: {LENGTH}",
    HOST,
    "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA",
    "Upgrade: h2c",
)

ASKED = [
    Sent("Java 17 HttpClient", [request(LOOKUP, *JAVA_UPGRADE, "User-Agent: Java-http-client/17.0.15", JSON), BODY]),
    Sent(
        "Java 17 HttpURLConnection",
        [
            request(
                LOOKUP,
                JSON,
                "User-Agent: Java/17.0.15",
                HOST,
                "Accept: text/html, image/gif, image/jpeg, */*; q=0.2",
                "Connection: keep-alive",
                f"Content-Length: {LENGTH}",
            ),
            BODY,
        ],
    ),
    Sent(
        "Go net/http",
        [
            request(
                LOOKUP,
                HOST,
                "User-Agent: Go-http-client/1.1",
                f"Content-Length: {LENGTH}",
                "Content-Type: application/json",
                "Accept-Encoding: gzip",
            )
            + BODY
        ],
    ),
    Sent(
        "Node.js fetch",
        [
            request(
                LOOKUP,
                "host: 127.0.0.1:7700",
                "connection: keep-alive",
                JSON,
                "accept: */*",
                "accept-language: *",
                "sec-fetch-mode: cors",
                "user-agent: node",
                "accept-encoding: gzip, deflate",
                f"content-length: {LENGTH}",
            )
            + BODY
        ],
    ),
    Sent(
        "Node.js http",
        [request(LOOKUP, JSON, HOST, "Connection: keep-alive", "Transfer-Encoding: chunked") + in_one_chunk(BODY)],
    ),
    Sent(
        "Ruby Net::HTTP",
        [
            request(
                LOOKUP,
                "Content-Type: application/json",
                "Accept-Encoding: gzip;q=1.0,deflate;q=0.6,identity;q=0.3",
                "Accept: */*",
                "User-Agent: Ruby",
                HOST,
                f"Content-Length: {LENGTH}",
            ),
            BODY,
        ],
    ),
    Sent(
        ".NET JsonContent",
        [
            request(LOOKUP, HOST, "Transfer-Encoding: chunked", "Content-Type: application/json; charset=utf-8"),
            b"%X\r\n" % LENGTH,
            BODY,
            b"\r\n0\r\n\r\n",
        ],
    ),
    Sent(
        ".NET StringContent",
        [request(LOOKUP, HOST, "Content-Type: application/json; charset=utf-8", f"Content-Length: {LENGTH}") + BODY],
    ),
    Sent(
        "aiohttp",
        [
            request(
                LOOKUP,
                HOST,
                JSON,
                "Accept: */*",
                "Accept-Encoding: gzip, deflate",
                "User-Agent: Python/3.11 aiohttp/3.12.15",
                f"Content-Length: {LENGTH}",
            )
            + BODY
        ],
    ),
    Sent(
        "httpx",
        [
            request(
                LOOKUP,
                HOST,
                "Accept: */*",
                "Accept-Encoding: gzip, deflate",
                "Connection: keep-alive",
                "User-Agent: python-httpx/0.28.1",
                JSON,
                f"Content-Length: {LENGTH}",
            ),
            BODY,
        ],
    ),
    Sent(
        "urllib3",
        [
            request(
                LOOKUP,
                HOST,
                "Accept-Encoding: identity",
                f"Content-Length: {LENGTH}",
                "User-Agent: python-urllib3/2.8.0",
                JSON,
            )
            + BODY
        ],
    ),
    Sent(
        "urllib",
        [
            request(
                LOOKUP,
                "Accept-Encoding: identity",
                f"Content-Length: {LENGTH}",
                HOST,
                "User-Agent: Python-urllib/3.11",
                "Content-Type: application/json",
                "Connection: close",
            ),
            BODY,
        ],
        ends=True,
    ),
    Sent(
        "curl",
        [request(LOOKUP, HOST, "User-Agent: curl/7.88.1", "Accept: */*", JSON, f"Content-Length: {LENGTH}") + BODY],
    ),
    Sent(
        "curl --http2",
        [
            request(
                LOOKUP,
                HOST,
                "User-Agent: curl/7.88.1",
                "Accept: */*",
                "Connection: Upgrade, HTTP2-Settings",
                "Upgrade: h2c",
                "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
                JSON,
                f"Content-Length: {LENGTH}",
            )
            + BODY
        ],
    ),
    Sent(
        "curl --http1.0",
        [
            request(
                "POST /v1/lookup HTTP/1.0",
                HOST,
                "User-Agent: curl/7.88.1",
                "Accept: */*",
                JSON,
                f"Content-Length: {LENGTH}",
            )
            + BODY
        ],
        ends=True,
    ),
    Sent(
        "curl of a file",
        [
            request(
                LOOKUP,
                HOST,
                "User-Agent: curl/7.88.1",
                "Accept: */*",
                f"Content-Length: {LENGTH}",
                JSON,
                "Expect: 100-continue",
            ),
            BODY,
        ],
    ),
    Sent(
        "curl -T -",
        [
            request(
                LOOKUP,
                HOST,
                "User-Agent: curl/7.88.1",
                "Accept: */*",
                "Transfer-Encoding: chunked",
                JSON,
                "Expect: 100-continue",
            ),
            in_one_chunk(BODY + b"\n"),
        ],
    ),
    Sent(
        "curl --http2 of a file",
        [
            request(
                LOOKUP,
                HOST,
                "Connection: Upgrade, HTTP2-Settings",
                "Upgrade: h2c",
                "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
                "Transfer-Encoding: chunked",
                JSON,
                "Expect: 100-continue",
            ),
            in_one_chunk(BODY),
        ],
    ),
    Sent(
        "curl --http2-prior-knowledge",
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\4\0\0\0\0\0\0\3\0\0\0d"],
        400,
        ends=True,
    ),
    Sent("wrk with a script", [request(LOOKUP, HOST, JSON, f"Content-Length: {LENGTH}") + BODY]),
    Sent(
        "an upgrade of HTTP/1.0",
        [
            request(
                "POST /v1/lookup HTTP/1.0", HOST, "Connection: upgrade", "Upgrade: h2c", f"Content-Length: {LENGTH}"
            ),
            BODY,
        ],
        ends=True,
    ),
    Sent(
        "an upgrade, then the end",
        [request(LOOKUP, HOST, "Connection: close, Upgrade", "Upgrade: h2c", f"Content-Length: {LENGTH}"), BODY],
        ends=True,
    ),
    Sent(
        "an upgrade to TLS",
        [
            request(LOOKUP, HOST, "Upgrade: TLS/1.2, HTTP/1.1", "Connection: Upgrade", f"Content-Length: {LENGTH}")
            + BODY
        ],
    ),
    Sent("a proxy's tunnel", [request("CONNECT 127.0.0.1:7700 HTTP/1.1", HOST)], 400, ends=True),
]

# (client, request, status): of what has no body
LOOKED = [
    ("wrk", request("GET /healthz HTTP/1.1", HOST), 200),
    (
        "a kubelet",
        request(
            "GET /readyz HTTP/1.1",
            "Host: 10.0.0.7:7700",
            "User-Agent: kube-probe/1.31",
            "Accept: */*",
            "Connection: close",
        ),
        200,
    ),
    ("ApacheBench", request("GET /healthz HTTP/1.0", HOST, "User-Agent: ApacheBench/2.3", "Accept: */*"), 200),
    ("a checker with HTTP/1.0", request("GET /healthz HTTP/1.0"), 200),
    ("curl -I", request("HEAD /healthz HTTP/1.1", HOST, "User-Agent: curl/7.88.1", "Accept: */*"), 200),
    ("a checker with HEAD", request("HEAD /readyz HTTP/1.0", HOST, "User-Agent: ELB-HealthChecker/2.0"), 200),
    ("a checker with HEAD of what is not there", request("HEAD /nothing HTTP/1.1", HOST), 404),
    ("HAProxy without a path", request("OPTIONS / HTTP/1.0"), 405),
    (
        "a browser's socket",
        request(
            "GET /healthz HTTP/1.1",
            HOST,
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==",
        ),
        200,
    ),
    (
        "Java 17 HttpClient",
        request(
            "GET /readyz HTTP/1.1",
            "Connection: Upgrade, HTTP2-Settings",
            "Content-Length: 0",
            HOST,
            "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA",
            "Upgrade: h2c",
            "User-Agent: Java-http-client/17.0.15",
        ),
        200,
    ),
]


@pytest.mark.parametrize("sent", ASKED, ids=lambda one: one.client)
def test_a_clients_question_is_answered_as_a_plain_one_however_it_comes(catalog: CatalogProcess, sent: Sent) -> None:
    with Wire(catalog.url) as wire:
        wire.send(post("/v1/lookup", BODY))
        plain = wire.answer()
    whole = b"".join(sent.packets)
    for packets in (sent.packets, [whole], [whole[:40], whole[40:]]):
        with Wire(catalog.url) as wire:
            for _ in range(1 if sent.ends else 3):
                wire.send(*packets, pause_s=0.002)
                status, headers, body = wire.answer()
                assert status == sent.status, body
                assert same(body) == same(plain[2]) or sent.status != 200
                assert headers.get("connection") == ("close" if sent.ends else None)
            assert not sent.ends or wire.ends()


@pytest.mark.parametrize(("asked", "status"), [pytest.param(*one[1:], id=one[0]) for one in LOOKED])
def test_who_looks_whether_a_catalog_is_there_is_told(catalog: CatalogProcess, asked: bytes, status: int) -> None:
    is_head = asked.startswith(b"HEAD")
    with Wire(catalog.url) as wire:
        wire.send(asked)
        found, headers, body = wire.answer(with_body=not is_head)
        ends = b"HTTP/1.0" in asked or b"Connection: close" in asked
        assert (found, headers.get("connection")) == (status, "close" if ends else None), body
        assert "allow" in headers or status != 405
        if ends:
            assert wire.ends()
        else:  # nothing of a body is left
            wire.send(post("/v1/lookup", BODY))
            assert wire.answer()[0] == 200


def test_requests_that_wish_for_another_protocol_may_follow_each_other(catalog: CatalogProcess) -> None:
    """Cut anywhere, and beside requests of the long way and of none."""
    wish = request(LOOKUP, *JAVA_UPGRADE, JSON) + BODY
    kinds = [
        wish,
        post("/v1/lookup", BODY),
        request("GET /healthz HTTP/1.1", HOST, "Connection: Upgrade", "Upgrade: h2c"),
    ]
    with Wire(catalog.url) as wire:
        check_in_any_order(wire, kinds, b"ok\n")
        for cut in range(1, len(wish), 7):
            wire.send(wish[:cut], wish[cut:], pause_s=0.001)
            assert wire.answer()[0] == 200
        wire.send(wish * 100)
        assert {wire.answer()[0] for _ in range(100)} == {200}


def test_a_body_that_looks_like_a_request_is_a_body_beside_a_wish_for_another_protocol(catalog: CatalogProcess) -> None:
    inner = request("GET /healthz HTTP/1.1", HOST)
    head = request(LOOKUP, HOST, "Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(inner)}")
    with Wire(catalog.url) as wire:
        wire.send(head + inner)
        assert wire.answer()[0] == 400  # it is not JSON
        wire.send(request("GET /healthz HTTP/1.1", HOST))
        assert wire.answer()[2] == b"ok\n"


@pytest.mark.parametrize(
    "lengths", [("content-length: 5", "content-length: 6"), ("content-length: 5", "transfer-encoding: chunked")]
)
def test_a_body_of_two_lengths_is_refused_beside_a_wish_for_another_protocol(
    catalog: CatalogProcess, lengths: tuple[str, str]
) -> None:
    with Wire(catalog.url) as wire:
        wire.send(
            request(LOOKUP, HOST, "Connection: Upgrade", "Upgrade: h2c", *lengths)
            + b"{}   "
            + request("GET /healthz HTTP/1.1", HOST)
        )
        assert wire.answer()[0] in (400, 422)
        assert wire.ends()
