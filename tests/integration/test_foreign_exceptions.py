"""What the clients of stores and databases raise becomes ours at the edge where they are called, whatever it is."""

from __future__ import annotations

import asyncio
import gc
import inspect
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from kvbm.catalog.sql.database import open_database
from kvbm.core.errors import CatalogError, ConfigError, PoolError, StreamError
from kvbm.locate.nats_proof import NatsCredentials, NatsProof
from kvbm.pools.stores import azure, blobs, redis, s3
from kvbm.pools.stores.base import Get, Put, Refusal
from kvbm.streams.nats.connection import NatsConnection, _Client
from kvbm.streams.nats.credentials import CheckedClient, Credentials
from kvbm.streams.nats.messages import ReadableMessages
from kvbm.streams.nats.reader import NatsReader
from kvbm.streams.nats.server_view import look
from kvbm.streams.nats.stream import NatsStream
from tests.nats_fixture import nats_url  # noqa: F401
from tests.object_stores import place_in

WAIT_S = 120.0
OF_SYSTEM = [
    OSError(5, "Input/output error"),
    ConnectionResetError(104, "reset"),
    TimeoutError("timed out"),
    ssl.SSLError(1, "bad"),
    UnicodeError("label too long"),
    EOFError("0 bytes"),
    ValueError("none"),
    TypeError("none"),
    RuntimeError("none"),
    KeyError("none"),
    AttributeError("none"),
    IndexError("none"),
]


OF_WAY = OF_SYSTEM[:5]  # what a connection raises on its way


class PanicException(BaseException):
    """Named as what the client of bytes raises when it fails inside."""


def raised_by(module: Any, base: type[BaseException] = Exception) -> list[BaseException]:
    """One of each exception that a library defines; those that want more than words are made without them."""

    def made() -> Iterator[BaseException]:
        for _, kind in sorted(inspect.getmembers(module, inspect.isclass)):
            if not issubclass(kind, base):
                continue
            try:
                yield kind("a word")
            except Exception:  # noqa: BLE001 - it wants arguments of its own
                one = kind.__new__(kind)
                one.args = ("a word",)
                vars(one).update(
                    response={}, status_code=None, _error_format="", message="a word", subject="a", sid=1, sub=None
                )  # which those of answers have, or those about messages
                yield one

    found = list(made())
    assert found
    return found


def all_of(store: Any) -> list[Any]:
    """Each kind of call."""
    listing: Callable[[], list[Any]] = lambda: list(store.listed("", 1.0))  # noqa: E731
    answers = [
        *store.put([Put("a", b"x")], 1.0),
        *store.get([Get("a"), Get("a", 0, 0), Get("a", 3, 4, most_bytes=9)], 1.0),
        *store.delete(["a"], 1.0),
        *store.delete(["a", "b"], 1.0),
        store.replace("a", b"x", None, 1.0),
        store.replace("a", b"x", b"y", 1.0),
    ]
    with pytest.raises(PoolError):
        listing()
    return answers


def test_every_error_of_the_client_of_bytes_is_a_refusal(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore.exceptions

    monkeypatch.setattr(blobs, "_FIRST_DELAY_S", 0.0)
    errors = [*raised_by(obstore.exceptions), *OF_SYSTEM, PanicException("called `Result::unwrap()`")]
    with closing(place_in("s3", request).open()) as store:
        for error in errors:

            async def fails(*_: Any, error: BaseException = error, **__: Any) -> Any:
                raise error

            for name in ("put_async", "get_async", "delete_async", "head_async"):
                monkeypatch.setattr(store._obstore, name, fails)  # type: ignore[attr-defined]
            monkeypatch.setattr(store, "_pages", lambda *_, fails=fails: Pages(fails))
            answers = all_of(store)
            ours = [one for one in answers if isinstance(one, Refusal)]
            absent = type(error).__name__ == "NotFoundError"
            assert len(ours) == len(answers) or absent, (error, answers)
        monkeypatch.undo()


class Pages:
    """A listing whose next page fails."""

    def __init__(self, fails: Callable[[], Any]) -> None:
        self._fails = fails

    async def __anext__(self) -> Any:
        return await self._fails()


def test_every_error_of_redis_is_a_refusal() -> None:
    import redis.exceptions as of_redis

    for error in [*raised_by(of_redis), *OF_SYSTEM]:

        def fails(asked: Any, error: BaseException = error) -> list[Any]:
            raise error

        [answer] = redis._attempts(fails, ["a"], 0.0)
        assert isinstance(answer, Refusal), error
        assert "\n" not in answer.words


@pytest.mark.parametrize(
    "error", [*OF_WAY, ValueError("none"), TypeError("none")], ids=lambda error: type(error).__name__
)
def test_every_error_while_a_redis_is_opened_is_ours(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(redis, "_connect", fails)
    with pytest.raises((PoolError, ConfigError)) as caught:
        redis.open_redis_store("redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in str(caught.value)


def test_every_error_of_boto3_while_a_bucket_is_opened_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.exceptions

    for error in [*raised_by(botocore.exceptions), *OF_SYSTEM]:

        def fails(*_: Any, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr(s3, "_linked", fails)
        with pytest.raises((PoolError, ConfigError)) as caught:
            s3.open_s3_store("s3://bucket/x", endpoint="http://127.0.0.1:1", open_wait_s=WAIT_S)
        assert "\n" not in str(caught.value)


def test_every_error_of_azures_client_while_a_container_is_opened_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import azure.core.exceptions as of_azure

    for error in [*raised_by(of_azure), *OF_SYSTEM]:

        def fails(*_: Any, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr(azure, "_look", fails)
        with pytest.raises((PoolError, ConfigError)) as caught:
            azure.open_azure_store(
                "az://blocks", endpoint="http://127.0.0.1:1/a", account_key="a2V5", open_wait_s=WAIT_S
            )
        assert "\n" not in str(caught.value)


def test_every_error_of_postgres_while_it_is_opened_is_the_catalogs(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncpg

    async def run() -> None:
        bases = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)  # the others are warnings
        for error in [*(one for base in bases for one in raised_by(asyncpg.exceptions, base)), *OF_WAY]:

            async def fails(*_: Any, error: BaseException = error, **__: Any) -> Any:
                raise error

            monkeypatch.setattr(asyncpg, "connect", fails)
            with pytest.raises(CatalogError) as caught:
                await open_database("postgresql://u:hunter2@127.0.0.1:1/x", WAIT_S)
            assert "hunter2" not in str(caught.value)

    asyncio.run(run())


# -- nats-py, at each edge where the stream's code calls it ------------------------------------------------------------

NOBODY = "nats://127.0.0.1:1"


def of_nats() -> list[BaseException]:
    """What calls of nats-py may end in. Its JetStream layer is not called."""
    return [*raised_by(nats.errors), *OF_WAY[:4], EOFError("0 bytes"), RuntimeError("the handler is closed")]


# What only a mistake in our own code raises, once a server has greeted.
MISTAKES = [
    ValueError("none"),
    TypeError("none"),
    KeyError("none"),
    IndexError("none"),
    AttributeError("none"),
    AssertionError(),
]


def failing(error: BaseException) -> Callable[..., Any]:
    """A call of the client's that ends in an error."""

    async def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


async def nothing(*_: Any) -> None:
    """Takes a message."""


@pytest.mark.parametrize("step", ["connect", "subscribe"])
def test_every_error_of_nats_while_a_connection_is_made_is_the_streams(
    nats_url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    async def run() -> None:
        for error in of_nats():
            monkeypatch.setattr(_Client, step, failing(error))
            with pytest.raises(StreamError) as caught:
                await NatsConnection.open(nats_url, WAIT_S, Credentials())
            assert "\n" not in str(caught.value) and nats_url in str(caught.value)

    asyncio.run(run())


@pytest.mark.parametrize("step", ["connect", "subscribe"])
def test_a_mistake_of_ours_while_a_connection_is_made_is_no_server_that_is_away(
    nats_url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    async def run() -> None:
        for error in MISTAKES:
            monkeypatch.setattr(_Client, step, failing(error))
            with pytest.raises(type(error)) as caught:
                await NatsConnection.open(nats_url, WAIT_S, Credentials())
            assert caught.value is error

    asyncio.run(run())


def test_a_mistake_of_ours_while_a_server_greets_is_no_greeting_of_another_server(
    nats_url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CheckedClient, "server_info", property(lambda _: {}))  # it cannot be set
    with pytest.raises(AttributeError, match="no setter"):
        asyncio.run(NatsConnection.open(nats_url, WAIT_S, Credentials()))


EDGES = pytest.mark.parametrize(
    ("call", "edge"),
    [
        ("publish", lambda one: one.ask("a.subject", b"", WAIT_S)),
        ("publish", lambda one: one.send("a.subject", b"")),
        ("subscribe", lambda one: one.subscribe("a.subject", nothing)),
        ("subscribe", lambda one: one.subscribe_directly("a.subject", None)),
        ("subscribe", lambda one: one.subscribe_to_runs("a.subject", None)),
        ("write", lambda one: one.send_headed("a.subject", b"NATS/1.0\r\n\r\n", b"")),
        ("flush", lambda one: one.round_trip(WAIT_S)),
    ],
    ids=["ask", "send", "subscribe", "subscribe-directly", "subscribe-to-runs", "send-headed", "round-trip"],
)


@EDGES
def test_a_mistake_of_ours_on_a_connection_is_no_connection_that_is_lost(
    nats_url: str,  # noqa: F811
    call: str,
    edge: Callable[[NatsConnection], Any],
) -> None:
    async def run() -> None:
        connection = await NatsConnection.open(nats_url, WAIT_S, Credentials())
        with pytest.MonkeyPatch.context() as patch:
            for error in MISTAKES:
                patch.setattr(connection.client, call, failing(error))
                with pytest.raises(type(error)) as caught:
                    await edge(connection)
                assert caught.value is error
        await connection.round_trip(WAIT_S)  # as before
        await connection.close()

    asyncio.run(run())


@EDGES
def test_every_error_of_nats_on_a_connection_is_the_streams(
    nats_url: str,  # noqa: F811
    call: str,
    edge: Callable[[NatsConnection], Any],
) -> None:
    async def run() -> None:
        connection = await NatsConnection.open(nats_url, WAIT_S, Credentials())
        with pytest.MonkeyPatch.context() as patch:
            for error in of_nats():
                patch.setattr(connection.client, call, failing(error))
                with pytest.raises(StreamError) as caught:
                    await edge(connection)
                assert "\n" not in str(caught.value)
        await connection.round_trip(WAIT_S)  # as before
        await connection.close()

    asyncio.run(run())


def test_every_error_of_nats_while_an_answer_is_written_at_once_is_the_streams(nats_url: str) -> None:  # noqa: F811
    async def run() -> None:
        connection = await NatsConnection.open(nats_url, WAIT_S, Credentials())
        with pytest.MonkeyPatch.context() as patch:
            for error in of_nats():

                def fails(_: bytes, error: BaseException = error) -> None:
                    raise error

                patch.setattr(connection.client, "write_now", fails)
                with pytest.raises(StreamError):
                    connection.send_headed_now("a.subject", b"NATS/1.0\r\n\r\n", b"")
        await connection.close()

    asyncio.run(run())


def test_no_error_of_nats_keeps_a_subscription_a_reader_or_a_connection_from_ending(
    nats_url: str,  # noqa: F811
) -> None:
    async def run() -> None:
        for error in of_nats():
            stream = await NatsStream.connect(nats_url, WAIT_S)
            reader = await stream.pull(timeout_s=WAIT_S)
            assert isinstance(reader, NatsReader) and reader._pull is not None
            connection = reader._pull.connection
            subscription = await connection.subscribe("a.subject", nothing)
            with pytest.MonkeyPatch.context() as patch:
                for place, name in (
                    (subscription, "unsubscribe"),
                    (subscription, "drain"),
                    (reader._pull.subscription, "unsubscribe"),
                    (connection.client, "publish"),
                    (connection.client, "close"),
                ):
                    patch.setattr(place, name, failing(error))
                await connection.unsubscribe(subscription)
                await connection.drain(subscription)
                await reader.close()
                await connection.close()
                assert not connection.is_open
            await connection.client.close()

    asyncio.run(run())


def test_every_error_of_nats_while_a_server_is_looked_at_is_the_streams(
    nats_url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        for error in of_nats():
            monkeypatch.setattr(_Client, "flush", failing(error))
            with pytest.raises(StreamError):
                await look(nats_url, WAIT_S, Credentials())

    asyncio.run(run())


@pytest.mark.parametrize(
    "greeting",
    [
        b"INFO []\r\n",
        b"INFO 5\r\n",
        b"INFO {}\r\nHELLO\r\n",
        b'INFO {"max_payload":"x"}\r\nPONG\r\n',
        b"INFO {\r\n",
        b"INFO\r\n",
        b"INFO \xff\r\n",
        b"INFO null\r\n",
        b'INFO {"connect_urls":5}\r\nPONG\r\n',
        b"x" * 100_000,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_what_greets_as_no_nats_does_is_a_connection_that_is_not_made(greeting: bytes) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(StreamError) as caught:
                await NatsConnection.open(url, WAIT_S, Credentials())
            assert url in str(caught.value)

    asyncio.run(run())


def test_a_word_of_the_server_that_the_client_stumbles_over_ends_the_connection() -> None:
    """It is not kept, unread, until pings are missed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload":1048576,"headers":true}\r\n')
        while not (await reader.readline()).startswith(b"PING"):
            pass
        writer.write(b"PONG\r\n")
        while not (await reader.readline()).startswith(b"SUB"):
            pass
        writer.write(b"INFO []\r\n")
        await reader.read()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            connection = await NatsConnection.open(url, WAIT_S, Credentials())
            lost = asyncio.Event()
            connection.wakes.add(lost)
            if connection.is_open:
                async with asyncio.timeout(WAIT_S):
                    await lost.wait()
            with pytest.raises(StreamError, match="AttributeError in its client"):
                connection.check("a.subject")
            await connection.close()

    asyncio.run(run())


@pytest.mark.parametrize("content", [b"", b"\x30\x82\x01\x0a\xff", b"no PEM", "-----BEGIN CERTIFICATE-----é".encode()])
def test_a_ca_of_the_stream_that_is_none_is_our_error_at_both_edges(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(ConfigError, match="give PEM"):
        Credentials(tls_ca=str(tmp_path / "ca.pem")).connect_options(NOBODY)
    with pytest.raises(ConfigError, match="give PEM"):
        NatsProof(NatsCredentials(tls_ca=str(tmp_path / "ca.pem"))).tls_context()
    with pytest.raises(StreamError, match="give PEM"):
        asyncio.run(NatsConnection.open(NOBODY, WAIT_S, Credentials(tls_ca=str(tmp_path / "ca.pem"))))


def test_a_connection_that_is_given_up_twice_leaves_no_exception_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py may lose a cancellation and fail later on: by then nobody waits for it."""
    told: list[object] = []

    async def given_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def connect(*_: object, **__: object) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await goes_on.wait()
            raise TimeoutError

        connection = NatsConnection("nats://127.0.0.1:4222", Credentials(), ReadableMessages())
        monkeypatch.setattr(connection.client, "connect", connect)
        connecting = asyncio.create_task(connection._connect(1.0, {}))
        await begun.wait()
        for _ in range(2):  # as a timeout does, and then a close
            connecting.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await connecting
        goes_on.set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others)
        del others
        gc.collect()

    asyncio.run(given_up())
    assert told == []
