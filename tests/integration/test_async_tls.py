"""`AsyncCatalogClient` over TLS: whom it trusts, whom it is taken for, and files that are replaced while it asks, as of
`CatalogClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

import kvbm
from kvbm.catalog.access.file import NewToken
from tests.callers import ACME, hashes_in
from tests.certificates import Certificate, certify
from tests.eventually import WAIT_S
from tests.secured_catalogs import Files, cluster, files, look_at_once, nats_url, put, serve

__all__ = ["cluster", "files", "look_at_once", "nats_url", "serve"]

OPERATOR = NewToken("ops", "operator")
ACME_ROUTER = NewToken("acme", "router", ["acme"])
HUNG_UP = r"do not trust each other .*catalog\.client_cert|does not trust catalog\.client_cert"
CERTIFIED = '\n[[certificate]]\nname = "router-beta"\nrole = "router"\ntenants = ["beta"]\n'


def client_of(url: str, ca: Path | None, token: str = "", mine: Certificate | None = None) -> kvbm.AsyncCatalogClient:
    more = (str(mine.cert), str(mine.key)) if mine else ("", "")
    return kvbm.AsyncCatalogClient(url, WAIT_S, credentials=kvbm.CatalogCredentials(token, str(ca or ""), *more))


def test_with_a_token_and_the_ca_it_is_answered_and_without_it_is_told_why(
    files: Files, serve: Callable[..., str]
) -> None:
    token = files.kept("acme", files.token(ACME_ROUTER))
    url = serve(file=str(files.access), tls_cert=str(files.server.cert), tls_key=str(files.server.key))

    async def run() -> None:
        async with client_of(url, files.ca.cert, token) as good:
            await good.wait_ready(WAIT_S)
            answers = await asyncio.gather(*(good.lookup(ACME, hashes_in(ACME)) for _ in range(20)))
            assert {one.deepest for one in answers} == {0}
        async with client_of(url, files.ca.cert) as nobody:
            for _ in range(3):  # a body nobody reads does not harm the next request
                with pytest.raises(kvbm.CatalogRefusedError, match="does not know who asks"):
                    await nobody.lookup(ACME, hashes_in(ACME) * 1000)
        (elsewhere := files.folder / "elsewhere").mkdir()
        for ca in (None, certify(elsewhere, "ca").cert):  # the system's, and one of the same name
            async with client_of(url, ca, token) as doubting:
                with pytest.raises(kvbm.CatalogError, match=r"do not trust each other .*correct catalog\.tls_ca"):
                    await doubting.instances()
                with pytest.raises(kvbm.CatalogError, match=r"is not ready after 0\.2 s: .*do not trust each other"):
                    await doubting.wait_ready(0.2)
        with pytest.raises(kvbm.ConfigError, match=r"catalog\.tls_ca .* is no file"):
            client_of(url, files.folder / "none", token)

    asyncio.run(run())


def test_a_certificate_for_another_host_is_not_trusted(files: Files, serve: Callable[..., str]) -> None:
    other = certify(files.folder, "elsewhere", files.ca, host="127.0.0.2")
    token = files.kept("ops", files.token(OPERATOR))
    url = serve(file=str(files.access), tls_cert=str(other.cert), tls_key=str(other.key))

    async def run() -> None:
        async with client_of(url, files.ca.cert, token) as client:
            with pytest.raises(kvbm.CatalogError, match="do not trust each other"):
                await client.instances()

    asyncio.run(run())


def test_a_catalog_without_tls_is_not_asked_in_the_clear(files: Files, serve: Callable[..., str]) -> None:
    files.token(OPERATOR)
    url = serve(file=str(files.access)).replace("http://", "https://")

    async def run() -> None:
        async with client_of(url, files.ca.cert) as client:
            with pytest.raises(kvbm.CatalogError, match=r"do not trust each other|does not answer"):
                await client.instances()

    asyncio.run(run())


def test_its_certificate_names_the_caller(files: Files, serve: Callable[..., str]) -> None:
    """Where the certificate is of another CA, the catalog ends the connection once it was made; that is no silence."""
    files.token(OPERATOR)
    beta, stranger = certify(files.folder, "router-beta", files.ca), certify(files.folder, "stranger", files.ca)
    (elsewhere := files.folder / "elsewhere").mkdir()
    forged = certify(elsewhere, "router-beta", certify(elsewhere, "ca"))
    with files.access.open("a") as file:
        file.write(CERTIFIED)
    url = serve(
        file=str(files.access),
        tls_cert=str(files.server.cert),
        tls_key=str(files.server.key),
        tls_client_ca=str(files.ca.cert),
    )

    async def run() -> None:
        async with client_of(url, files.ca.cert, mine=beta) as known:
            await known.wait_ready(WAIT_S)
            assert await known.namespaces() == []
        for unknown in (stranger, None):
            async with client_of(url, files.ca.cert, mine=unknown) as client:
                with pytest.raises(kvbm.CatalogRefusedError, match="does not know who asks"):
                    await client.namespaces()
        async with client_of(url, files.ca.cert, mine=forged) as client:
            for _ in range(5):
                with pytest.raises(kvbm.CatalogError, match=HUNG_UP):
                    await client.namespaces()

    asyncio.run(run())


def test_certificates_and_cas_are_replaced_on_both_sides_while_it_asks(files: Files, serve: Callable[..., str]) -> None:
    files.token(OPERATOR)
    with files.access.open("a") as file:
        file.write(CERTIFIED)
    (folder := files.folder / "second").mkdir()
    second = certify(folder, "second-ca")
    old, new = certify(files.folder, "router-beta", files.ca), certify(folder, "router-beta", second)
    new_server = certify(folder, "server", second)
    ca, cert, key, client_ca = (files.folder / name for name in ("live-ca", "live-cert", "live-key", "live-client-ca"))
    mine, my_key = files.folder / "mine", files.folder / "my-key"
    put((files.ca.cert, ca), (files.server.cert, cert), (files.server.key, key), (files.ca.cert, client_ca))
    put((old.cert, mine), (old.key, my_key))
    url = serve(file=str(files.access), tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(client_ca))
    credentials = kvbm.CatalogCredentials("", str(ca), str(mine), str(my_key))

    async def run() -> None:
        async with kvbm.AsyncCatalogClient(url, WAIT_S, credentials=credentials) as client:
            await client.wait_ready(WAIT_S)
            assert await client.namespaces() == []
            put((new_server.cert, cert), (new_server.key, key), (second.cert, client_ca))
            assert await client.namespaces() == []  # its connection goes on
            async with kvbm.AsyncCatalogClient(url, WAIT_S, credentials=credentials) as other:
                with pytest.raises(kvbm.CatalogError, match="do not trust each other"):
                    await other.namespaces()
            put((second.cert, ca))
            with pytest.raises(kvbm.CatalogError, match=HUNG_UP):
                await client.namespaces()  # the old certificate of this side is good no more
            put((new.cert, mine), (new.key, my_key))
            assert await client.namespaces() == []
            mine.write_text("garbage")  # those before are used until the files are good
            assert await client.namespaces() == []

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["replaced", "closed"])
def test_a_connection_in_use_is_not_kept_once_its_certificate_was_replaced_or_the_client_closed(
    files: Files, ends: str
) -> None:
    """A question is under way meanwhile.

    It is answered, and its connection, which speaks for the one before, asks nothing more.
    """
    old, new = certify(files.folder, "old", files.ca), certify(files.folder, "new", files.ca)
    mine, my_key = files.folder / "mine", files.folder / "my-key"
    put((old.cert, mine), (old.key, my_key))
    context = server_context(files)
    credentials = kvbm.CatalogCredentials("", str(files.ca.cert), str(mine), str(my_key))
    ready = b'{"ready":true,"reason":""}'
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ready), ready)

    async def run() -> None:
        asked: list[tuple[int, str]] = []  # number of the connection, and whose certificate it has
        waits, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        connections = 0

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            number, connections = connections, connections + 1
            name = dict(part[0] for part in writer.get_extra_info("peercert")["subject"])["commonName"]
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    asked.append((number, name))
                    if len(asked) == 1:
                        waits.set()
                        await go_on.wait()
                    writer.write(answer)
            writer.close()
            ended.set()

        async with await asyncio.start_server(take, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with kvbm.AsyncCatalogClient(url, WAIT_S, credentials=credentials) as client:
                first = asyncio.ensure_future(client.ready())
                await waits.wait()
                if ends == "replaced":
                    put((new.cert, mine), (new.key, my_key))
                    assert (await client.ready()).ready
                else:
                    await client.aclose()
                go_on.set()
                assert (await first).ready
                async with asyncio.timeout(WAIT_S):
                    await ended.wait()  # of the first connection
                if ends == "replaced":
                    for _ in range(3):
                        await client.ready()
                    assert asked[0] == (0, "old") and set(asked[1:]) == {(1, "new")}

    asyncio.run(run())


def server_context(files: Files) -> ssl.SSLContext:
    """Of a server that wants certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server.cert, files.server.key)
    context.load_verify_locations(files.ca.cert)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
