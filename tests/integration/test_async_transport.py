"""Clients of a catalog, with threads and with asyncio: what they refuse, what they say when nobody answers, and after
`close`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import kvbm
from kvbm.core.answers import CandidateLoad
from tests.catalog_site import HASHES, SPACE, TOKENS, Running, run_catalog
from tests.eventually import WAIT_S
from tests.nats_fixture import cluster, nats_url  # noqa: F401

NOBODY = "http://127.0.0.1:9"  # the port of `discard`, where nobody listens
READY = {"ready": True, "reason": "", "degraded": "", "stream_sequence": 7, "lag_messages": 0}
ROUTED = {"instance": "a", "namespace": "00" * 16, "blocks": 0, "ranked": []}
Serve = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


def answer(body: object, status: int = 200) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(data),
        data,
    )


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that does with each request what a test wants, until that says False; its URL, and the heads of the
    requests.
    """
    heads: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            goes_on = True
            while goes_on:
                head = await reader.readuntil(b"\r\n\r\n")
                heads.append(head)
                goes_on = await serve(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


# -- refused before anybody is asked -----------------------------------------------------------------------------------

ADDRESSES = [
    ("ftp://127.0.0.1:7700", "ftp is no scheme"),
    ("http://a,ftp://b", "ftp is no scheme"),
    ("http://", "names no host"),
    ("", "names no host"),
    ("http://h:99999", "out of range"),
    ("http://h:0", "port 0"),
    ("http://h:7700/kvbm", "answers at the root"),
    ("unix:", "unix is no scheme"),
    ("http://a,,http://b", "names no host"),
]


@pytest.mark.parametrize("client", [kvbm.CatalogClient, kvbm.AsyncCatalogClient])
@pytest.mark.parametrize(("url", "why"), ADDRESSES)
def test_an_address_that_is_none_is_refused_at_once_and_in_words(
    client: Callable[[str], object], url: str, why: str
) -> None:
    with pytest.raises(kvbm.CatalogError, match=rf"cannot be used \(.*{why}.*\); write http://host:port"):
        client(url)


@pytest.mark.parametrize("url", ["http://router:hunter2@catalog:7700", "https://hunter2@catalog"])
def test_a_password_in_an_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(kvbm.CatalogError, match=r"catalog\.token") as refused:
        kvbm.CatalogClient(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("secret", ["s3cret", None, 5])
def test_a_secret_that_is_no_bytes_is_our_error_and_is_not_shown(secret: Any) -> None:
    client = kvbm.CatalogClient(NOBODY)
    for call in (lambda: SPACE.root(secret), lambda: client.hashes(SPACE, secret, TOKENS)):
        with pytest.raises(kvbm.ArgumentTypeError, match=r"^secret is ") as refused:
            call()
        assert "s3cret" not in str(refused.value)
    client.close()


BAD: list[tuple[str, Callable[[kvbm.CatalogClient], object]]] = [
    ("timeout_s", lambda one: one.lookup(SPACE, HASHES, timeout_s="1")),  # type: ignore[arg-type]
    ("wait_s", lambda one: one.lookup(SPACE, HASHES, wait_s=-1.0)),
    ("wait_s", lambda one: one.route(SPACE, HASHES, 40, wait_s=5.5)),
    ("at_least", lambda one: one.lookup(SPACE, HASHES, at_least=None)),  # type: ignore[arg-type]
    ("at_least[0]", lambda one: one.route(SPACE, HASHES, 40, at_least=["a"])),  # type: ignore[list-item]
    (
        "at_least[0].epoch",
        lambda one: one.presence(SPACE, HASHES, [kvbm.PositionWanted(instance="a", epoch=-1, offset=0)]),
    ),
    ("instance", lambda one: one.instance(5)),  # type: ignore[arg-type]
    ("instance", lambda one: one.forget(None)),  # type: ignore[arg-type]
    ("instance", lambda one: one.ask_snapshot(b"a")),  # type: ignore[arg-type]
    ("latency", lambda one: one.route(SPACE, HASHES, 40, latency="soon")),  # type: ignore[arg-type]
    ("phase", lambda one: one.route(SPACE, HASHES, 40, phase=None)),  # type: ignore[arg-type]
    ("deadline_s", lambda one: one.route(SPACE, HASHES, 40, deadline_s="1")),  # type: ignore[arg-type]
    ("prompts", lambda one: one.lookup_many(SPACE, 5)),  # type: ignore[arg-type]
    ("prompts", lambda one: one.lookup_many(SPACE, HASHES)),  # type: ignore[arg-type]
    ("input_tokens", lambda one: one.route_many(SPACE, [HASHES], 5)),  # type: ignore[arg-type]
    ("timeout_s", lambda one: one.wait_ready("1")),  # type: ignore[arg-type]
    ("tokens", lambda one: one.lookup_tokens(SPACE, b"", 5)),  # type: ignore[arg-type]
    ("credentials", lambda _: kvbm.CatalogClient(NOBODY, credentials="token")),  # type: ignore[arg-type]
    ("flags", lambda _: kvbm.load_settings(flags="nats")),  # type: ignore[arg-type]
    ("path", lambda _: kvbm.load_settings(5)),  # type: ignore[arg-type]
    ("path", lambda _: kvbm.weights_digest(5)),  # type: ignore[arg-type]
    ("settings", lambda _: kvbm.open_replica(None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("argument", "call"), BAD, ids=[f"{at}-{one[0]}" for at, one in enumerate(BAD)])
def test_an_argument_that_cannot_be_used_is_named_before_anybody_is_asked(
    argument: str, call: Callable[[kvbm.CatalogClient], object]
) -> None:
    with kvbm.CatalogClient(NOBODY, timeout_s=0.1) as client, pytest.raises(kvbm.ArgumentError) as refused:
        call(client)
    assert str(refused.value).startswith(f"{argument} ")


# -- closed, away ------------------------------------------------------------------------------------------------------


def test_a_client_that_is_closed_says_so_and_nothing_of_the_catalog() -> None:
    with (
        kvbm.CatalogClient(NOBODY) as one,
        kvbm.CatalogClient("unix:/nowhere") as two,
        kvbm.PartedCatalog([NOBODY]) as parted,
    ):
        pass
    for client in (one, two, parted):
        for ask in (client.ready, client.instances, lambda: client.lookup(SPACE, HASHES)):  # noqa: B023 - called now
            with pytest.raises(kvbm.CatalogClosedError, match="is closed"):
                ask()
    with pytest.raises(kvbm.CatalogClosedError):  # at once: waiting for it is of no use
        one.wait_ready(WAIT_S)


def test_an_asyncio_client_that_is_closed_says_so() -> None:
    async def ask() -> None:
        async with kvbm.AsyncCatalogClient(NOBODY) as one:
            pass
        async with kvbm.AsyncCatalog(kvbm.CatalogClient(NOBODY)) as two:
            pass
        for client in (one, two):
            with pytest.raises(kvbm.CatalogClosedError, match="is closed"):
                await client.lookup(SPACE, HASHES)
            with pytest.raises(kvbm.CatalogClosedError):
                await client.wait_ready(WAIT_S)

    asyncio.run(ask())


def test_when_all_catalogs_are_away_each_is_named() -> None:
    url = "http://127.0.0.1:9, http://127.0.0.1:11"
    refused = r"http://127\.0\.0\.1:{} \(.*refused.*\)"
    said = rf"^none of the 2 catalogs answers: {refused.format(9)}, {refused.format(11)}; start it"
    with kvbm.CatalogClient(url) as client, pytest.raises(kvbm.CatalogError, match=said):
        client.lookup(SPACE, HASHES)

    async def ask() -> None:
        async with kvbm.AsyncCatalogClient(url) as client:
            with pytest.raises(kvbm.CatalogError, match=said):
                await client.lookup(SPACE, HASHES)

    asyncio.run(ask())


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_route_tokens_says_all_that_route_says() -> None:
    asked: list[dict[str, Any]] = []

    async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        size = int(
            next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")).split(b":")[1]
        )
        asked.append(json.loads(await reader.readexactly(size)))
        writer.write(answer(ROUTED))
        return True

    more: dict[str, Any] = {
        "at_least": [kvbm.PositionWanted(instance="a", epoch=1, offset=2)],
        "wait_s": 0.5,
        "limit": 3,
        "instances": ["a"],
        "latency": "batch",
        "deadline_s": 9.0,
        "phase": "prefill",
        "remember": False,
        "elsewhere": CandidateLoad(least_s=0.0, recent_s=0.0, candidates=1),
    }

    async def ask() -> None:
        async with served(serve) as (url, _):
            with kvbm.CatalogClient(url, timeout_s=WAIT_S) as client:
                await asyncio.to_thread(client.route, SPACE, HASHES, len(TOKENS), **more)
                await asyncio.to_thread(client.route_tokens, SPACE, b"", TOKENS, **more)
            async with kvbm.AsyncCatalogClient(url, timeout_s=WAIT_S) as waiting:
                await waiting.route_tokens(SPACE, b"", TOKENS, **more)

    asyncio.run(ask())
    assert asked[0] == asked[1] == asked[2] and asked[0]["deadline_s"] == 9.0 and asked[0]["at_least"][0]["offset"] == 2


# -- asyncio -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        answer(READY),
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps(READY).encode(),
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"rea\r\n%x;a=b\r\n%b\r\n0\r\nx: y\r\n\r\n'
        % (len(json.dumps(READY)) - 5, json.dumps(READY)[5:].encode()),
    ],
    ids=["length", "to its end", "chunks"],
)
def test_an_answer_is_read_however_long_it_says_it_is(body: bytes) -> None:
    async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for at in range(0, len(body), 7):
            writer.write(body[at : at + 7])
            await writer.drain()
        return b"close" not in body

    async def ask() -> None:
        async with served(serve) as (url, heads), kvbm.AsyncCatalogClient(url, timeout_s=WAIT_S) as client:
            for _ in range(3):
                assert (await client.ready()).stream_sequence == 7
            assert len(heads) == 3

    asyncio.run(ask())


def test_a_kept_connection_that_the_other_side_has_closed_is_no_error() -> None:
    async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer(READY))
        await writer.drain()
        return False

    async def ask() -> None:
        async with served(serve) as (url, _), kvbm.AsyncCatalogClient(url, timeout_s=WAIT_S) as client:
            for _ in range(5):
                assert (await client.ready()).ready

    asyncio.run(ask())


def test_a_question_that_is_cancelled_ends_and_gives_up_its_connection() -> None:
    async def ask() -> None:
        came, ended = asyncio.Event(), asyncio.Event()

        async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            came.set()
            assert await reader.read() == b""  # the client hangs up
            ended.set()
            return False

        async with served(serve) as (url, _), kvbm.AsyncCatalogClient(url, timeout_s=WAIT_S) as client:
            asking = asyncio.create_task(client.ready())
            await came.wait()
            asking.cancel()
            async with asyncio.timeout(WAIT_S):
                await ended.wait()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(ask())


def test_a_catalog_that_hangs_leaves_time_for_the_next_and_is_asked_last_from_then_on() -> None:
    async def hang(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await reader.read()
        return False

    async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer(READY))
        return True

    async def unready(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0))
        error = {"error": {"code": "not_ready", "message": "reading", "what_to_do": "wait"}}
        writer.write(answer(error, 503))
        return True

    async def ask() -> None:
        async with served(hang) as (first, hung), served(serve) as (second, heads), served(unready) as (third, _):
            async with kvbm.AsyncCatalogClient(f"{first},{second}", timeout_s=2.0) as client:
                assert (await client.ready()).ready and client.url == second
                assert (await client.ready()).ready
                assert (len(hung), len(heads)) == (1, 2)
            async with kvbm.AsyncCatalogClient(f"{third},{NOBODY}", timeout_s=WAIT_S) as client:
                with pytest.raises(kvbm.CatalogRefusedError, match="reading") as refused:
                    await client.lookup(SPACE, HASHES)
                assert refused.value.code == "not_ready"

    asyncio.run(ask())


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str, short_path: str) -> Any:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=3600.0, unix_socket=short_path)


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("s") / "c")


def test_a_catalog_answers_asyncio_as_it_answers_threads(running: Running, short_path: str) -> None:
    a = running.instance("a")
    a.create(0, 5)
    wanted = [a.publish()]

    async def ask(url: str) -> None:
        async with kvbm.AsyncCatalogClient(url, timeout_s=WAIT_S) as client:
            await client.wait_ready(WAIT_S)
            found = await client.lookup(SPACE, HASHES, at_least=wanted, wait_s=5.0)
            assert found == running.client.lookup(SPACE, HASHES)
            assert [one.depth for one in found.instances] == [5]
            assert (await client.route_tokens(SPACE, b"", TOKENS)).instance == "a"
            assert [one.blocks for one in await client.lookup_many(SPACE, [HASHES, HASHES[:16]])] == [10, 1]
            assert [one.instance for one in await client.route_many(SPACE, [HASHES], [40])] == ["a"]
            assert (await client.presence(SPACE, HASHES)).holders and (await client.find(SPACE, HASHES)).blocks == 10
            assert [one.instance for one in await client.instances()] == ["a"]
            assert (await client.instance("a")) is not None and (await client.instance("b")) is None
            assert len(await client.namespaces()) == 1 and (await client.block(SPACE, HASHES[:16])).holders
            both = await asyncio.gather(*(client.lookup(SPACE, HASHES[:16], limit=1) for _ in range(40)))
            assert {one.deepest for one in both} == {1}

    for url in (running.client.url, f"unix:{short_path}"):
        asyncio.run(ask(url))


def test_positions_of_an_instance_that_nobody_knows_are_not_reached(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 5)
    assert running.client.lookup(SPACE, HASHES, [a.publish()], wait_s=5.0).deepest == 5
    for epoch, offset in ((0, 0), (3, 7)):
        wanted = [kvbm.PositionWanted(instance="nobody", epoch=epoch, offset=offset)]
        with pytest.raises(kvbm.CatalogRefusedError, match="no instance 'nobody' is known here; ask again") as refused:
            running.client.lookup(SPACE, HASHES, wanted, wait_s=0.01)
        assert (refused.value.status, refused.value.code) == (504, "position_not_reached")
    wanted = [kvbm.PositionWanted(instance="a", epoch=9, offset=0)]
    said = "is at offset 4 of epoch 1 here, not yet at offset 0 of epoch 9"
    with pytest.raises(kvbm.CatalogRefusedError, match=said):
        running.client.route(SPACE, HASHES, 40, wanted, wait_s=0.01)
