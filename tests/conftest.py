"""Fixtures over real servers. A server lasts a session (with xdist: one a worker); what a test gets in it is fresh."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.servers import fresh_database, postgres

settings.register_profile("untimed", deadline=None)  # a slow machine is no failure
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A test that runs a command in this process sets up logs for its own captured output, which ends with it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of one Postgres server's maintenance database; tests take `postgres_url`."""
    with postgres() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The URL of an empty Postgres database of the test's own."""
    return asyncio.run(fresh_database(postgres_server))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an SQLite file that does not exist yet."""
    return f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind the catalog supports."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what text scenarios do now into their files")
