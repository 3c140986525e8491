"""Whatever comes over a connection, however it is cut: a catalog that reads plain questions in one step answers byte
for byte as one that leaves all to the parsers of HTTP and JSON, and counts the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import LimitSettings
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Tier
from kvbm.core.plain_questions import PlainQuestion
from kvbm.reference.ledger import Ledger
from kvbm.streams.nats.stream import NatsStream
from tests.eventually import eventually
from tests.http_wire import chunked, post, same
from tests.nats_fixture import WAIT_S, nats_url, patient

__all__ = ["nats_url"]

CLUSTER = "plain-connections"
SPACE = Namespace(model="m", block_tokens=16)
ID = SPACE.id.hex()
PROMPT = "".join(f"{number:032x}" for number in range(1, 9))
LAST = b"GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n"
QUIET_S = 0.3  # after which nothing more is expected of a connection that neither side ends


class Sides(NamedTuple):
    """Two catalogs of the same stream: one that reads plain questions, one that reads none."""

    plain: str
    parsed: str
    counted: Callable[[], int]  # plain questions that were read


async def _publish(url: str) -> None:
    stream = patient(await NatsStream.connect(url, WAIT_S))
    for number in range(3):
        ledger = Ledger((PoolStated(Tier.HBM, 64, 1024),))
        ledger.start(Epoch(1), [SPACE], (), "test", "0")
        run = bytes.fromhex(PROMPT)[: (8 - 2 * number) * HASH_BYTES]
        allocation = ledger.allocate(Tier.HBM, len(run) // HASH_BYTES)
        assert allocation is not None
        ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, run, allocation.slots)
        name = InstanceId(f"instance-{number}")
        for frame in ledger.take_frames(name, time.time_ns()):
            await stream.publish(CLUSTER, name, frame.data)
    await stream.close()


@contextmanager
def both(url: str, folder: Path, access: AccessOptions | None = None, **limits: Any) -> Iterator[Sides]:
    read = 0

    def counting(data: bytes | bytearray | memoryview, begin: int, end: int) -> PlainQuestion | None:
        nonlocal read
        found = NATIVE.read_plain_question(data, begin, end)
        read += found is not None
        return found

    def never(data: bytes | bytearray | memoryview, begin: int, end: int) -> PlainQuestion | None:
        return None

    def started(name: str, reader: Any) -> CatalogThread:
        chosen = ServiceSettings(
            nats_url=url,
            database_url=f"sqlite:///{folder / name}.db",
            cluster=CLUSTER,
            listen="127.0.0.1:0",
            liveness_s=600.0,
            limits=LimitSettings(loop_share=1.0, **limits),
            **({} if access is None else {"access": access}),
        )
        return CatalogThread(chosen, NATIVE._replace(read_plain_question=reader), NATIVE_INDEX)

    with started("plain", counting) as plain, started("parsed", never) as parsed:
        yield Sides(plain.url, parsed.url, lambda: read)


@pytest.fixture(scope="module")
def published(nats_url: str) -> str:
    asyncio.run(_publish(nats_url))
    return nats_url


@pytest.fixture(scope="module")
def sides(published: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with both(published, tmp_path_factory.mktemp("plain")) as made:
        for url in (made.plain, made.parsed):
            eventually(lambda url=url: b'"deepest":8' in ask(url, [lookup(), LAST]), WAIT_S)  # type: ignore[misc]
        yield made


def lookup(*headers: str, **fields: object) -> bytes:
    body = json.dumps({"namespace": ID, "hashes": PROMPT, **fields}).encode()
    return post("/v1/lookup", body, *headers)


def ask(url: str, pieces: list[bytes], pause_s: float = 0.0, quiet_s: float = WAIT_S) -> bytes:
    """All that comes back until the catalog ends the connection, or is quiet. The date is left out, and a length stands
    before the type: where one request waits for another is a matter of time, and the short and the long way write them
    in another order, which means nothing.
    """
    host, _, port = url.partition("//")[2].rpartition(":")
    came = b""
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # what was answered before lies here still
            for piece in pieces:
                connection.sendall(piece)
                if pause_s:
                    time.sleep(pause_s)
        connection.settimeout(quiet_s)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while data := connection.recv(1 << 16):
                came += data
    came = re.sub(rb"(\r\ncontent-type: [^\r]*)(\r\ncontent-length: [^\r]*)", rb"\2\1", came)
    return same(re.sub(rb"\r\ndate: [^\r]*", b"", came))


def check_alike(sides: Sides, pieces: list[bytes], pause_s: float = 0.0, quiet_s: float = WAIT_S) -> bytes:
    plain, parsed = (ask(url, pieces, pause_s, quiet_s) for url in (sides.plain, sides.parsed))
    if plain != parsed and quiet_s < WAIT_S:  # a busy machine may have been quiet for too long
        plain, parsed = (ask(url, pieces, pause_s, 20 * quiet_s) for url in (sides.plain, sides.parsed))
    assert plain == parsed
    return plain


KINDS: Mapping[str, bytes] = {
    "plain": lookup(),
    "few": lookup(limit=1),
    "list": lookup("User-Agent: test/1", "Accept: */*", hashes=[PROMPT[:32], PROMPT[32:64].upper()]),
    "nothing found": lookup(hashes="ab" * 16),
    "another namespace": lookup(namespace="00" * 16),
    "no hashes": lookup(hashes=""),
    "half a hash": lookup(hashes="0" * 31),
    "no limit": lookup(limit=0),
    "unknown field": lookup(nonsense=1),
    "fields": lookup(namespace={"model": "m", "block_tokens": 16}),
    "escaped": lookup().replace(b'"hashes"', b'"hashe\\u0073"').replace(b"content-length: 308", b"content-length: 313"),
    "no JSON": post("/v1/lookup", b"{"),
    "no body": post("/v1/lookup", b""),
    "nobody routes there": post(
        "/v1/route", json.dumps({"namespace": "00" * 16, "hashes": PROMPT, "input_tokens": 128}).encode()
    ),
    "short prompt": post("/v1/route", json.dumps({"namespace": ID, "hashes": PROMPT, "input_tokens": 3}).encode()),
    "presence": post("/v1/presence", json.dumps({"namespace": ID, "hashes": PROMPT}).encode()),
    "chunked": chunked("/v1/lookup", json.dumps({"namespace": ID, "hashes": PROMPT}).encode()),
    "traced": lookup(f"traceparent: 00-{'1' * 32}-{'2' * 16}-01"),
    "kept": lookup("Connection: keep-alive"),
    "closed": lookup("Connection: close"),
    "older": lookup().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "other host": lookup().replace(b"127.0.0.1", b"evil.example"),
    "named host": lookup().replace(b"host: 127.0.0.1", b"Host: LocalHost:7700"),
    "two hosts": lookup("host: localhost"),
    "two types": lookup("content-type: application/json", "content-type: application/json"),
    "two lengths": lookup("content-length: 5"),
    "two ways": lookup("Transfer-Encoding: chunked"),
    "wish": lookup("Upgrade: h2c", "Connection: upgrade"),
    "word": lookup("Expect: 100-continue"),
    "folded": lookup("x-a: b\r\n c"),
    "blank": lookup("host : localhost"),
    "bare": lookup().replace(b"\r\n", b"\n"),
    "before": b"\r\n" + lookup(),
    "nowhere": post("/v1/nowhere", b"{}"),
    "got": b"GET /v1/lookup HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "head": b"HEAD /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "query": lookup().replace(b"/v1/lookup ", b"/v1/lookup?a=b "),
    "lower": lookup().replace(b"POST", b"post"),
    "large": lookup(hashes=PROMPT * 64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_answered_alike_between_plain_ones(sides: Sides, kind: str) -> None:
    one, before = KINDS[kind], sides.counted()
    for pieces in ([one, LAST], [lookup() + one + lookup(limit=2), LAST], [one, one, lookup(), LAST]):
        assert check_alike(sides, pieces).startswith(b"HTTP/1.1 ")
    assert sides.counted() > before


def test_a_plain_question_is_answered_alike_wherever_it_is_cut(sides: Sides) -> None:
    two = lookup(limit=1) + lookup(hashes=PROMPT[:64])
    whole = check_alike(sides, [two, LAST])
    assert whole.count(b"HTTP/1.1 200 OK") == 3
    for at in [*range(1, 140, 3), *range(140, len(two), 29)]:
        assert ask(sides.plain, [two[:at], two[at:] + LAST], 0.002) == whole
    letters = [two[at : at + 1] for at in range(len(two))]
    assert ask(sides.plain, [*letters, LAST], 0.0001) == whole


CHANGES = [b"", b"\r", b"\n", b" ", b":", b"\x00", b"\xff", b'"', b"POST "]


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5), st.data())
def test_any_bytes_are_answered_alike_however_they_are_cut(sides: Sides, kinds: list[str], data: st.DataObject) -> None:
    stream = bytearray(b"".join(KINDS[kind] for kind in kinds))
    for _ in range(data.draw(st.integers(0, 2), label="changes")):
        at = data.draw(st.integers(0, len(stream) - 1), label="at")
        change = data.draw(
            st.sampled_from([b"", b"\r", b"\n", b" ", b":", b"\x00", b"\xff", b'"', b"POST "]), label="to"
        )
        stream[at : at + data.draw(st.integers(0, 2), label="taken")] = change
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=4), label="cuts"))
    pieces = [bytes(stream[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    check_alike(sides, [*(piece for piece in pieces if piece), LAST], 0.001, QUIET_S)


def test_both_count_alike(published: str, tmp_path: Path) -> None:
    with both(published, tmp_path) as made:
        for url in (made.plain, made.parsed):
            eventually(lambda url=url: b'"deepest":8' in ask(url, [lookup(), LAST]), WAIT_S)  # type: ignore[misc]
        before = [counts(url) for url in (made.plain, made.parsed)]
        for kind in (
            "plain",
            "list",
            "nothing found",
            "no JSON",
            "short prompt",
            "nobody routes there",
            "closed",
            "got",
        ):
            check_alike(made, [KINDS[kind], LAST])
        after = [counts(url) for url in (made.plain, made.parsed)]
        grown = [
            {key: value - then.get(key, 0.0) for key, value in now.items()}
            for then, now in zip(before, after, strict=True)
        ]
        assert grown[0] == grown[1]
        assert grown[0]['kvbm_catalog_answers_total{status="200"}'] > 5
        assert grown[0]["kvbm_catalog_lookup_seconds_count"] == 4


def counts(url: str) -> dict[str, float]:
    """Metrics that count requests and answers."""
    told = urllib3.PoolManager().request("GET", f"{url}/metrics").data.decode()
    wanted = r"(?:requests|answers|refusals|misses)_total|(?:lookup|route)_seconds_count"
    return {name: float(value) for name, value in re.findall(rf"(?m)^(kvbm_catalog_(?:{wanted})\S*) (\S+)$", told)}


def test_who_may_not_ask_is_told_alike(published: str, tmp_path: Path) -> None:
    file = tmp_path / "callers.toml"
    tokens = {role: add_token(file, NewToken(role, role), 1.0) for role in ("router", "metrics")}
    acme = add_token(file, NewToken("acme", "router", ("acme",)), 1.0)
    with both(published, tmp_path, AccessOptions(file=str(file)), requests_per_s=0.001, burst=6) as made:
        for url in (made.plain, made.parsed):  # each has used 1 of what it may ask
            eventually(lambda url=url: probe(url) == 200, WAIT_S)  # type: ignore[misc]
        for proof in (*tokens.values(), acme, "kvbm_nobody", ""):
            check_alike(made, [lookup(f"authorization: Bearer {proof}"), LAST])
        check_alike(made, [lookup("authorization: Basic x"), lookup(), LAST])
        check_alike(made, [lookup(f"authorization: Bearer {acme}", "authorization: Bearer x"), LAST])
        many = check_alike(made, [lookup(f"Authorization: bearer {tokens['router']}") * 9, LAST])
        assert 0 < many.count(b"HTTP/1.1 200 OK") < many.count(b"HTTP/1.1 ")
        assert b"HTTP/1.1 429" in many


def probe(url: str) -> int:
    return urllib3.PoolManager().request("GET", f"{url}/readyz").status
