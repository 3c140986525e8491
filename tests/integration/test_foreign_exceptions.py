"""What the clients of stores and databases raise becomes ours at the edge where they are called, whatever it is."""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from kvbm.catalog.database import open_database
from kvbm.core.errors import CatalogError, ConfigError, PoolError
from kvbm.pools.stores import azure, blobs, redis, s3
from kvbm.pools.stores.base import Get, Put, Refusal
from tests.object_stores import place_in

WAIT_S = 120.0
OF_SYSTEM = [
    OSError(5, "Input/output error"), ConnectionResetError(104, "reset"), TimeoutError("timed out"), ssl.SSLError(1, "bad"),
    UnicodeError("label too long"), EOFError("0 bytes"), ValueError("none"), TypeError("none"), RuntimeError("none"),
    KeyError("none"), AttributeError("none"), IndexError("none"),
]  # fmt: skip


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
                    response={}, status_code=None, _error_format="", message="a word"
                )  # which those of answers have
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
