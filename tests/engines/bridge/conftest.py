"""Real vLLM processes, a bridge, a nats-server and a catalog: `make test-bridge`. Engines run in the environment of
`make test-engines-quick`, routers in one of their own, everything else in that of `make setup`.
"""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.locate.http import CatalogClient
from tests.engines.bridge.harness.engines import Models, made_models
from tests.engines.bridge.harness.site import Site
from tests.eventually import WAIT_S
from tests.servers import nats_server


@pytest.fixture(scope="session")
def tiny() -> Models:
    """A model and an adapter."""
    return made_models()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A catalog without instances."""
    cluster = f"bridge-{uuid.uuid4().hex[:8]}"
    with nats_server() as server:
        settings = ServiceSettings(
            nats_url=server.url,
            database_url=f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}",
            cluster=cluster,
            listen="127.0.0.1:0",
            store_every_s=0.02,
            liveness_s=60.0,
        )
        with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
            client = CatalogClient(thread.url, WAIT_S / 2)
            client.wait_ready(WAIT_S)
            yield Site(client, thread.url, server.url, cluster, tmp_path)
            client.close()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Those that are ended after the test."""
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
    for process in made:
        process.wait(WAIT_S)
