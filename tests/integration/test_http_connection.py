"""The way in over HTTP: short questions are answered as long ones are, however they come; what no caller of good will
sends is bounded.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.fast_path import MOST_BYTES
from kvbm.catalog.edge.http_connection import MAX_HEADER_BYTES, READ_BYTES
from kvbm.catalog.edge.server import CatalogThread, bind_path
from kvbm.catalog.service import ServiceSettings
from kvbm.core.answers import LookupAnswer, PresenceAnswer
from kvbm.core.errors import ArgumentError, CatalogError
from kvbm.core.ids import HASH_BYTES
from kvbm.core.prompt_batches import CONTENT_TYPE, MOST_ROUTES, PromptBatch, encode_batch
from kvbm.core.prompt_batches import LOOKUP as LOOKUP_KIND
from kvbm.locate.http import CatalogClient
from tests.floods import FIELDS, SPACE, CatalogProcess, catalog_process, publish_instances
from tests.http_wire import Wire, check_in_any_order, chunked, post, same
from tests.nats_fixture import WAIT_S, nats_url, new_cluster  # noqa: F401

NAMES = [f"instance-{number:02}" for number in range(12)]
ID = SPACE.id.hex()
HASHES = "".join(f"{number:032x}" for number in range(1, 17))


class Place(NamedTuple):
    """A stream's address and a cluster that has all instances on it."""

    url: str
    cluster: str


@pytest.fixture(scope="module")
def place(nats_url: str) -> Place:  # noqa: F811
    within = new_cluster("http-connection")
    publish_instances(nats_url, within, NAMES)
    return Place(nats_url, within)


@pytest.fixture(scope="module")
def catalog(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogProcess]:
    with catalog_process(tmp_path_factory.mktemp("catalog"), place.url, place.cluster) as process:
        yield process


LOOKUP: dict[str, Any] = {"namespace": ID, "hashes": HASHES}
BODIES: Sequence[tuple[str, object]] = [
    ("/v1/lookup", LOOKUP),
    ("/v1/lookup", {"namespace": FIELDS, "tokens": list(range(100))}),
    ("/v1/lookup", {**LOOKUP, "hashes": [HASHES[:32], HASHES[32:64]]}),
    ("/v1/lookup", {**LOOKUP, "hashes": [HASHES[:31]]}),
    ("/v1/lookup", {**LOOKUP, "hashes": "zz" * 16}),
    ("/v1/lookup", {**LOOKUP, "hashes": HASHES[:30] + "  "}),
    ("/v1/lookup", {**LOOKUP, "tokens": [1]}),
    ("/v1/lookup", {"namespace": ID}),
    ("/v1/lookup", {"namespace": FIELDS, "tokens": [-1]}),
    ("/v1/lookup", {"namespace": {**FIELDS, "tenant": "acme"}, "tokens": [1] * 16}),
    ("/v1/lookup", {"namespace": {**FIELDS, "block_tokens": 1}, "tokens": [1] * 10_000}),
    ("/v1/lookup", {**LOOKUP, "limit": 0}),
    ("/v1/lookup", {**LOOKUP, "limit": 3, "instances": NAMES[:5]}),
    ("/v1/lookup", {**LOOKUP, "nonsense": 1}),
    ("/v1/lookup", {**LOOKUP, "at_least": [{"instance": NAMES[0], "epoch": 1, "offset": 1}]}),
    ("/v1/lookup", {**LOOKUP, "at_least": [{"instance": NAMES[0], "epoch": 9, "offset": 1}], "timeout_s": 0.01}),
    ("/v1/lookup", b""),
    ("/v1/lookup", b"{"),
    ("/v1/lookup", b"\xff\xfe"),
    ("/v1/lookup", b"[" * 5000),
    ("/v1/route", {**LOOKUP, "input_tokens": 16}),
    ("/v1/route", LOOKUP),
    ("/v1/route", {**LOOKUP, "input_tokens": 1e308}),
    ("/v1/route", {**LOOKUP, "input_tokens": 300, "instances": []}),
]


@pytest.mark.parametrize(("path", "asked"), BODIES)
def test_a_question_is_answered_alike_the_short_way_and_the_long(
    catalog: CatalogProcess, path: str, asked: object
) -> None:
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    assert len(body) <= MOST_BYTES
    with Wire(catalog.url) as wire:
        wire.send(post(path, body))
        short, headers, answer = wire.answer()
        wire.send(chunked(path, body))
        long, long_headers, long_answer = wire.answer()
    assert (short, same(answer)) == (long, same(long_answer))
    assert headers["content-type"] == long_headers["content-type"] == "application/json"
    assert headers.keys() == long_headers.keys()


def test_a_route_names_as_many_as_asked_for_and_counts_the_rest(catalog: CatalogProcess) -> None:
    asked = {**LOOKUP, "input_tokens": 300}
    with Wire(catalog.url) as wire:
        found: dict[int, Any] = {}
        for limit in (1, 8, 100):
            wire.send(post("/v1/route", json.dumps({**asked, "limit": limit}).encode()))
            found[limit] = json.loads(wire.answer()[2])
        wire.send(post("/v1/route", json.dumps({**asked, "instances": NAMES[3:5]}).encode()))
        few = json.loads(wire.answer()[2])
    assert {limit: (len(one["ranked"]), one["more"]) for limit, one in found.items()} == {
        1: (1, 11),
        8: (8, 4),
        100: (12, 0),
    }
    assert {one["instance"] for one in few["ranked"]} == set(NAMES[3:5])


def test_a_body_may_come_in_pieces(catalog: CatalogProcess) -> None:
    request = post("/v1/lookup", json.dumps(LOOKUP).encode())
    with Wire(catalog.url) as wire:
        wire.send(request)
        whole = wire.answer()
        for cuts in ((10,), (60, 61, 62), (len(request) - 1,), range(1, len(request), 37)):
            places = [0, *cuts, len(request)]
            wire.send(*(request[first:end] for first, end in itertools.pairwise(places)), pause_s=0.002)
            assert same(wire.answer()[2]) == same(whole[2])
        wire.send(request[:-5])
        time.sleep(1.5)  # longer than the short way waits
        wire.send(request[-5:])
        assert same(wire.answer()[2]) == same(whole[2])


def test_short_and_long_questions_may_follow_each_other_at_once(catalog: CatalogProcess) -> None:
    body = json.dumps(LOOKUP).encode()
    kinds = [post("/v1/lookup", body), chunked("/v1/lookup", body), b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"]
    with Wire(catalog.url) as wire:
        check_in_any_order(wire, kinds, b"ok\n")
        wire.send(post("/v1/lookup", body) * 500)  # each answered before the next is looked at
        assert {wire.answer()[0] for _ in range(500)} == {200}


def test_more_requests_than_are_waited_for_end_the_connection(catalog: CatalogProcess) -> None:
    with Wire(catalog.url) as wire:
        wire.send(b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * (READ_BYTES // 44))
        assert wire.ends()
    with Wire(catalog.url) as wire:
        wire.send(post("/v1/lookup", json.dumps(LOOKUP).encode()))
        assert wire.answer()[0] == 200


@pytest.mark.parametrize("head", [b"x: " + b"y" * MAX_HEADER_BYTES, b"a: b\r\n" * (MAX_HEADER_BYTES // 6)])
def test_a_header_is_bounded(catalog: CatalogProcess, head: bytes) -> None:
    with Wire(catalog.url) as wire:
        wire.send(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n" + head + b"z: z")
        assert wire.answer()[0] == 400
        assert wire.ends()


def test_trailers_are_read_by_nobody(catalog: CatalogProcess) -> None:
    with Wire(catalog.url) as wire:
        whole = chunked("/v1/lookup", json.dumps(LOOKUP).encode())
        wire.send(whole[:-2] + b"authorization: Bearer x\r\n" * 3000 + b"\r\n")
        assert wire.answer()[0] == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /v1/lookup HTTP/1.0", 200),
        (b"POST /v1/lookup?x=1 HTTP/1.1", 200),
        (b"POST http://x/v1/lookup HTTP/1.1", 200),
        (b"GET /v1/lookup HTTP/1.1", 405),
        (b"POST //v1/lookup HTTP/1.1", 404),
        (b"POST /v1/lookup/ HTTP/1.1", 404),
    ],
)
def test_what_is_no_plain_question_goes_the_long_way(catalog: CatalogProcess, request_line: bytes, status: int) -> None:
    body = json.dumps(LOOKUP).encode()
    with Wire(catalog.url) as wire:
        wire.send(request_line + b"\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert wire.answer()[0] == status


@pytest.mark.parametrize(
    "headers",
    [
        ["content-length: 5", "content-length: 6"],
        ["content-length: 5", "transfer-encoding: chunked"],
        ["content-length: +5"],
        ["content-length: 5 5"],
        ["transfer-encoding: chunked, identity"],
    ],
)
def test_a_body_of_two_lengths_is_refused(catalog: CatalogProcess, headers: list[str]) -> None:
    with Wire(catalog.url) as wire:
        wire.send(post("/v1/lookup", b"{}   GET /healthz HTTP/1.1\r\n\r\n", *headers, length=False))
        assert wire.answer()[0] in (400, 422)
        assert wire.ends()


def test_who_may_not_ask_is_told_so_on_either_way(place: Place, tmp_path: Path) -> None:
    token = add_token(tmp_path / "access.toml", NewToken("scraper", "metrics"), time.time())
    body = json.dumps(LOOKUP).encode()
    asks: list[tuple[list[str], int]] = [
        ([], 401),
        ([f"authorization: Bearer {token}"], 403),
        (["authorization: Bearer x"] * 2, 401),
    ]
    with catalog_process(tmp_path, place.url, place.cluster, access={"access": tmp_path / "access.toml"}) as guarded:
        for headers, status in asks:
            with Wire(guarded.url) as wire:
                wire.send(post("/v1/lookup", body, *headers))
                assert wire.answer()[0] == status


def test_headers_of_strangers_shut_nobody_out(place: Place, tmp_path: Path) -> None:
    """They said that 256 KiB come, and had that much room of the 14 MiB for all, without a token and without a body."""
    token = add_token(tmp_path / "access.toml", NewToken("router", "router"), time.time())
    head = (
        f"POST /v1/lookup HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: 262144\r\n\r\n"
    )
    body = encode_batch(PromptBatch(LOOKUP_KIND, 8, SPACE.id, [(bytes(200 << 10), 0)]))
    with catalog_process(tmp_path, place.url, place.cluster, access={"access": tmp_path / "access.toml"}) as guarded:
        host, _, port = guarded.url.partition("//")[2].rpartition(":")
        with ExitStack() as stack:
            for number in range(80):
                source = (f"127.0.3.{number + 1}", 0)
                stranger = stack.enter_context(
                    socket.create_connection((host, int(port)), WAIT_S, source_address=source)
                )
                stranger.sendall(head.encode())
            with Wire(guarded.url) as wire:
                for _ in range(20):
                    wire.send(
                        post("/v1/lookup", body, f"content-type: {CONTENT_TYPE}", f"authorization: Bearer {token}")
                    )
                    assert wire.answer()[0] == 200


def test_a_caller_of_the_short_way_is_limited(place: Place, tmp_path: Path) -> None:
    body = json.dumps({**LOOKUP, "hashes": "00" * HASH_BYTES * 800}).encode()  # counts as much as two requests
    statuses: list[int] = []
    with catalog_process(tmp_path, place.url, place.cluster, loopback=True, requests_per_s=0.01, burst=60) as guarded:
        for _ in range(34):
            with Wire(guarded.url) as wire:
                wire.send(post("/v1/lookup", body))
                statuses.append(wire.answer()[0])
    assert 20 <= statuses.count(200) <= 32
    assert set(statuses) == {200, 429}


def test_a_unix_socket_is_its_owners_and_is_taken_over_when_nobody_listens(
    place: Place,
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "catalog.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:  # of a catalog that was killed
        left.bind(str(path))
    with catalog_process(tmp_path, place.url, place.cluster, access={"unix_socket": path}):
        assert path.stat().st_mode & 0o777 == 0o600
        with closing(CatalogClient(f"unix:{path}", timeout_s=WAIT_S)) as client:
            assert client.ready().ready
            assert len(client.instances()) == len(NAMES)
            hashes = bytes.fromhex(HASHES)
            assert client.lookup(SPACE.id, hashes).blocks == 16
            assert client.route(SPACE.id, hashes, 300, limit=2).more == len(NAMES) - 2
        with pytest.raises(CatalogError, match="unix socket"), bind_path(path):
            pass  # somebody listens there
    assert not path.exists()
    with (
        closing(CatalogClient(f"unix:{path}", timeout_s=WAIT_S)) as client,
        pytest.raises(CatalogError, match="does not answer"),
    ):
        client.ready()


def undated(answer: LookupAnswer | PresenceAnswer) -> LookupAnswer | PresenceAnswer:
    """The answer without the age of its view, which goes on."""
    return msgspec.structs.replace(answer, view_age_s=0.0)


@pytest.mark.parametrize("prompts", [1, 16, 200])
def test_a_batch_is_answered_as_its_prompts_are_alone(catalog: CatalogProcess, prompts: int) -> None:
    hashes = bytes.fromhex(HASHES)
    asked = [hashes[: HASH_BYTES * (number % 17)] for number in range(prompts)]
    with closing(CatalogClient(catalog.url, timeout_s=WAIT_S)) as client:
        found, alone = client.lookup_many(SPACE, asked), [client.lookup(SPACE, one) for one in asked]
        assert [undated(one) for one in found] == [undated(one) for one in alone]
        held, each = client.presence_many(SPACE, asked), [client.presence(SPACE, one) for one in asked]
        assert [undated(one) for one in held] == [undated(one) for one in each]
        if prompts <= MOST_ROUTES:
            routed = client.route_many(SPACE, asked, [300] * prompts, limit=3)
            assert [(len(one.ranked), one.more, one.blocks) for one in routed] == [
                (3, len(NAMES) - 3, len(one) // HASH_BYTES) for one in asked
            ]
        else:
            with pytest.raises(ArgumentError, match="give 1 to 64"):
                client.route_many(SPACE, asked, [300] * prompts)


@pytest.mark.parametrize("size", [0, 40, 100_000])
def test_a_batch_that_makes_no_sense_is_refused_in_json(catalog: CatalogProcess, size: int) -> None:
    with Wire(catalog.url) as wire:
        wire.send(post("/v1/lookup", b"\1" * size, f"content-type: {CONTENT_TYPE}"))
        status, headers, body = wire.answer()
    assert (status, headers["content-type"], json.loads(body)["error"]["code"]) == (
        422,
        "application/json",
        "bad_batch",
    )


def test_a_batch_too_long_for_the_short_way_goes_the_long(catalog: CatalogProcess) -> None:
    asked = [bytes.fromhex(HASHES) * 100] * 20
    with closing(CatalogClient(catalog.url, timeout_s=WAIT_S)) as client:
        found = client.lookup_many(SPACE, asked)
        assert [undated(one) for one in found] == [undated(client.lookup(SPACE, asked[0]))] * 20


def test_instances_come_in_pages(catalog: CatalogProcess) -> None:
    def page(query: str) -> Any:
        with Wire(catalog.url) as wire:
            wire.send(f"GET /v1/instances{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            status, _, body = wire.answer()
        assert status == 200, body
        found = json.loads(body)
        return [one["instance"] for one in found["instances"]], found["more"]

    assert page("") == (NAMES, 0)
    assert page("?limit=5") == (NAMES[:5], 7)
    assert page(f"?limit=5&after={NAMES[9]}") == (NAMES[10:], 0)
    assert page(f"?name={NAMES[3]}&name=nobody") == ([NAMES[3]], 0)
    with closing(CatalogClient(catalog.url, timeout_s=WAIT_S)) as client:
        found = client.instance(NAMES[3])
        assert found is not None and found.instance == NAMES[3]
        assert client.instance("no&body=x") is None
    for query in ("?limit=0", "?limit=1001", "?limit=x", "?first=a", "?" + "name=a&" * 300):
        with Wire(catalog.url) as wire:
            wire.send(f"GET /v1/instances{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            assert wire.answer()[0] == 422


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7700", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_catalog_that_asks_nobody_who_they_are_is_not_called_by_another_name(
    catalog: CatalogProcess, host: str
) -> None:
    body = json.dumps(LOOKUP).encode()
    with Wire(catalog.url) as wire:
        for request in (
            post("/v1/lookup", body),
            chunked("/v1/lookup", body),
            b"GET /v1/instances HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        ):
            wire.send(request.replace(b"host: 127.0.0.1", f"host: {host}".encode()))
            status, _, answer = wire.answer()
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (421, "other_host")
            assert host.partition(":")[0] in error["message"] and "catalog.hosts" in error["what_to_do"]
        for own in ("localhost", "LOCALHOST:7700", "127.0.0.1:1", "[::1]:7700", "localhost."):
            wire.send(post("/v1/lookup", body).replace(b"host: 127.0.0.1", f"host: {own}".encode()))
            assert wire.answer()[0] == 200


def test_a_catalog_that_knows_its_callers_or_a_proxys_name_is_called_by_it(
    nats_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    token = add_token(tmp_path / "callers.toml", NewToken("router", "router"), time.time())
    for name, access in (
        ("hosts", AccessOptions(hosts=("Catalog.example",))),
        ("access", AccessOptions(file=str(tmp_path / "callers.toml"))),
    ):
        settings = ServiceSettings(
            nats_url=nats_url,
            database_url=f"sqlite+aiosqlite:///{tmp_path / name}.db",
            cluster=name,
            listen="127.0.0.1:0",
            access=access,
        )
        with CatalogThread(settings, NATIVE, NATIVE_INDEX) as catalog, Wire(catalog.url) as wire:
            lines = ["GET /v1/instances HTTP/1.1", "host: catalog.example:80", f"authorization: Bearer {token}"]
            wire.send("\r\n".join([*lines, "", ""]).encode())
            assert wire.answer()[0] == 200
