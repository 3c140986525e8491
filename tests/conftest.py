"""Fixtures over real servers. A server lasts a session (with xdist: one a worker); what a test gets in it is fresh."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from tests.ceph import Radosgw, radosgw
from tests.object_stores import Place, place_in
from tests.servers import azurite_server, fresh_database, postgres, redis_cluster, redis_server, s3_server

# A shell that starts something in the background ignores SIGINT for it, nohup SIGHUP; the processes of tests meet them
# as from a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_TESTS = Path(__file__).parent
_ENGINES = _TESTS / "engines"
_SGLANG = _ENGINES / "sglang"
_PD = _ENGINES / "pd"
_BRIDGE = _ENGINES / "bridge"
_RDMA = _TESTS / "rdma"
_WEB = _TESTS / "web"
_UPGRADE = _TESTS / "upgrade"
_REALTIME = ("conformance", "engines", "faults", "integration", "upgrade", "web")

# A slow machine is no failure. `make test` draws the same examples each time; with --nightly they are others each time.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, print_blob=True)
settings.load_profile("gate")


@pytest.fixture(autouse=True)
def logs_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs in this process sets up logs until the test ends.

    No logger keeps that setup for the tests after it.
    """
    before, configure = structlog.get_config(), structlog.configure

    def configure_for_now(**setup: Any) -> None:
        configure(**(setup | {"cache_logger_on_first_use": False}))

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    yield
    configure(**before)


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


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server (moto): quick, and believes any secret."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azurite_endpoint() -> Iterator[str]:
    """The account of an Azurite."""
    with azurite_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis; what tests do in it lies under prefixes of their own."""
    with redis_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_cluster_url() -> Iterator[str]:
    """A Redis Cluster of three nodes; what tests do in it lies under prefixes of their own."""
    with redis_cluster() as url:
        yield url


@pytest.fixture(scope="session")
def ceph() -> Iterator[Radosgw]:
    """A radosgw: an S3 server that checks what Amazon checks."""
    with radosgw() as running:
        yield running


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """An empty place in an object store; parametrize it with names of `OBJECT_STORES`."""
    return place_in(getattr(request, "param", "memory"), request)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what text scenarios do now into their files")
    parser.addoption(
        "--objects", action="store_true", help="run also what needs radosgw, Redis and PgBouncer: `make test-objects`"
    )
    parser.addoption(
        "--nightly", action="store_true", help="run also what is long, statistical or measured: `make test-all`"
    )
    parser.addoption(
        "--engines",
        action="store_true",
        help="run also what needs vLLM: `make test-engines-quick`, `make test-engines`",
    )
    parser.addoption("--web", action="store_true", help="run also what opens the page in Chromium: `make test-web`")
    parser.addoption("--sglang", action="store_true", help="run also what needs SGLang: `make test-sglang`")
    parser.addoption(
        "--upgrade", action="store_true", help="run also what upgrades a cluster of two versions: `make test-upgrade`"
    )
    parser.addoption("--pd", action="store_true", help="run also what needs vLLM and vllm-router: `make test-pd`")
    parser.addoption(
        "--bridge", action="store_true", help="run also what needs vLLM, its router and Dynamo's: `make test-bridge`"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: what a decorator leaves open is of the profile that is loaded then."""
    if config.getoption("--nightly"):
        settings.load_profile("nightly")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without --engines, tests of real engines are not even imported; those of SGLang without --sglang, those of
    prefillers and decoders without --pd, those of the bridge without --bridge, those of the page without --web, and
    those of upgrades without --upgrade. With it and without an engine they fail.

    Those over RDMA are for `make test-rdma` alone, which runs them in a VM without this file.
    """
    if collection_path == _RDMA:
        return True
    own = {_SGLANG: "--sglang", _PD: "--pd", _BRIDGE: "--bridge", _WEB: "--web", _UPGRADE: "--upgrade"}
    if collection_path in own:
        return True if not config.getoption(own[collection_path]) else None
    if collection_path == _ENGINES and not any(map(config.getoption, ("--engines", "--sglang", "--pd", "--bridge"))):
        return True
    return None


def is_realtime(path: Path) -> bool:
    """Whether tests of a file meet real servers, processes and clocks. The simulator's clock is its own."""
    folder, *rest = path.relative_to(_TESTS).parts
    return folder in _REALTIME and rest != ["test_simulator.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --objects, what needs radosgw, Redis or PgBouncer is left out: `make test-objects` runs it.

    So is without --nightly what is long, and always what needs RDMA devices: `make test-rdma` runs that.
    """
    for item in items:
        if is_realtime(item.path):
            item.add_marker(pytest.mark.realtime)
    for name in ("objects", "nightly", "rdma"):
        left_out = [item for item in items if item.get_closest_marker(name)]
        if left_out and not config.getoption(f"--{name}", False):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(name)]
