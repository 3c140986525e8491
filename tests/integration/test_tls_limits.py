"""TLS together with limits: what a stranger costs before the handshake is done, and how long he may take; who does not
read.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import urllib3

from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.connections import unsent_bytes
from tests.certificates import certify
from tests.eventually import eventually
from tests.floods import FIELDS, CatalogProcess, catalog_process, publish_instances, raise_file_limit
from tests.nats_fixture import nats_url, new_cluster  # noqa: F401

MIB = 1 << 20
SOCKETS = 400
END_WAIT_S = 60.0


class Site(NamedTuple):
    """A catalog behind TLS with short deadlines, what its clients trust, and an operator's token."""

    catalog: CatalogProcess
    ca: str
    token: str

    def ask(self, path: str) -> urllib3.BaseHTTPResponse:
        with urllib3.PoolManager(ca_certs=self.ca) as pool:
            return pool.request(
                "GET",
                self.catalog.url + path,
                headers={"authorization": f"Bearer {self.token}"},
                timeout=END_WAIT_S,
                retries=False,
            )

    def refused(self, why: str) -> int:
        line = f'kvbm_catalog_refusals_total{{why="{why}"}} '
        found = [one for one in self.ask("/metrics").data.decode().splitlines() if one.startswith(line)]
        return int(float(found[0].removeprefix(line)))

    def connect(self, size: int = 0, source: str = "") -> socket.socket:
        one = socket.socket()
        if source:
            one.bind((source, 0))
        if size:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        one.settimeout(END_WAIT_S)
        host, _, port = self.catalog.url.removeprefix("https://").rpartition(":")
        one.connect((host, int(port)))
        return one

    def shake_hands(self, one: socket.socket) -> ssl.SSLSocket:
        return ssl.create_default_context(cafile=self.ca).wrap_socket(one, server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def site(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:  # noqa: F811
    raise_file_limit()
    folder = tmp_path_factory.mktemp("tls")
    ca = certify(folder, "ca")
    server = certify(folder, "server", ca)
    token = add_token(folder / "access.toml", NewToken("ops", "operator"), time.time())
    within = new_cluster("tls-limits")
    publish_instances(nats_url, within, [f"instance-{number:04}" for number in range(600)])
    given = {"access": folder / "access.toml", "tls_cert": server.cert, "tls_key": server.key}
    limits = {"header_s": 5, "write_s": 5, "idle_s": 600, "sockets": 512}
    with catalog_process(folder, nats_url, within, access=given, ca=str(ca.cert), **limits) as catalog:
        yield Site(catalog, str(ca.cert), token)


def ended(one: socket.socket) -> bool:
    """Whether the other side ends the connection, within `END_WAIT_S`."""
    try:
        while one.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.nightly
def test_who_does_not_shake_hands_takes_little_memory_and_is_ended(site: Site) -> None:
    rss, before = site.catalog.rss_bytes(), site.refused("connection_slow")
    with ExitStack() as stack:
        silent = [stack.enter_context(site.connect()) for _ in range(SOCKETS)]
        for one in silent[::2]:
            one.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # the beginning of a hello
        assert site.ask("/healthz").status == 200
        assert site.catalog.rss_bytes() - rss < 48 * MIB
        assert all(ended(one) for one in silent)
    assert site.refused("connection_slow") - before >= SOCKETS


def test_half_handshakes_in_hundreds_take_bounded_memory_and_let_others_in(site: Site) -> None:
    """Each has begun: the catalog has answered its hello, and holds what it needs to go on."""
    rss = site.catalog.rss_bytes()
    context = ssl.create_default_context(cafile=site.ca)
    with ExitStack() as stack:
        for _ in range(SOCKETS):
            hello = ssl.MemoryBIO()
            half = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1")
            with pytest.raises(ssl.SSLWantReadError):
                half.do_handshake()
            stack.enter_context(site.connect(source="127.0.5.1")).sendall(hello.read())
        assert site.ask("/healthz").status == 200
        assert site.catalog.rss_bytes() - rss < 24 * MIB


def test_through_tls_a_header_and_a_body_have_their_time(site: Site) -> None:
    header = site.shake_hands(site.connect())
    body = site.shake_hands(site.connect())
    header.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
    head = f"POST /v1/lookup HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.token}\r\ncontent-length: 100\r\n\r\n"
    body.sendall(head.encode() + b"{")
    with header, body:
        assert ended(header)
        assert body.recv(64).startswith(b"HTTP/1.1 408 ")
    assert site.refused("too_slow") >= 1


def test_through_tls_who_does_not_read_is_ended(site: Site) -> None:
    before = site.refused("connection_unread")
    head = f"GET /v1/instances HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.token}\r\n\r\n"
    with site.shake_hands(site.connect(4096)) as deaf:
        deaf.sendall(head.encode() * 30)
        eventually(lambda: site.refused("connection_unread") > before, "who does not read is not ended")


def test_an_answer_that_waits_below_tls_counts_as_unsent(tmp_path: Path) -> None:
    """asyncio's TLS hands all of a first answer to the socket's transport, and says that nothing waits."""
    ca = certify(tmp_path, "ca")
    server = certify(tmp_path, "server", ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)

    async def counted() -> tuple[int, int]:
        found: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        class Answers(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                transport.write(bytes(32 * MIB))
                found.set_result((transport.get_write_buffer_size(), unsent_bytes(transport)))
                transport.abort()

        loop = asyncio.get_running_loop()
        listener = await loop.create_server(Answers, "127.0.0.1", 0, ssl=context)
        async with listener, asyncio.timeout(END_WAIT_S):
            client = ssl.create_default_context(cafile=str(ca.cert))
            _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), ssl=client)
            try:
                return await found
            finally:
                writer.transport.abort()

    told, unsent = asyncio.run(counted())
    assert told < MIB
    assert unsent > 16 * MIB


def test_refusals_are_counted_by_kind_whoever_asks(site: Site) -> None:
    dice = random.Random(1)
    kinds = ("unknown_caller", "not_allowed", "too_large")
    before = [site.refused(kind) for kind in kinds]
    with urllib3.PoolManager(ca_certs=site.ca, retries=False, timeout=END_WAIT_S) as pool:
        for _ in range(20):
            name = dice.randbytes(8).hex()
            assert pool.request("GET", f"{site.catalog.url}/{name}", headers={"authorization": name}).status == 401
        headers = {"authorization": f"Bearer {site.token}"}
        body = json.dumps({"namespace": FIELDS, "hashes": "00" * 16 * 70_000})
        assert pool.request("POST", f"{site.catalog.url}/v1/lookup", headers=headers, body=body).status == 422
    after = [site.refused(kind) for kind in kinds]
    assert [now - then for now, then in zip(after, before, strict=True)] == [20, 0, 1]
    assert name not in site.ask("/metrics").data.decode()
