"""A bridge that runs, and the catalog that follows what it publishes, on a real nats-server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.assembly.bridge import run_bridge
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import load_settings
from kvbm.locate.http import CatalogClient
from tests.eventually import eventually
from tests.foreign_engines import MODEL, Prompt
from tests.nats_fixture import WAIT_S


class Bridge(NamedTuple):
    """A bridge that runs in a thread, and a catalog that follows what it publishes."""

    catalog: CatalogClient

    def depths(self, prompt: Prompt) -> dict[str, dict[str, int]]:
        """Instance → hottest tier → blocks of a prompt."""
        answer = self.catalog.lookup(prompt.namespace(), b"".join(prompt.hashes()))
        return {one.instance: {tier: count for tier, count in one.tiers.items() if count} for one in answer.instances}

    def agrees(self, prompt: Prompt, expected: dict[str, dict[str, int]]) -> None:
        eventually(
            lambda: self.depths(prompt) == expected, f"{expected} were expected", state=lambda: self.depths(prompt)
        )


class Site:
    """Makes bridges of one cluster."""

    def __init__(self, url: str, within: str, catalog: CatalogClient) -> None:
        self.catalog, self._url, self._cluster = catalog, url, within
        self._ends: list[threading.Event] = []
        self._threads: list[threading.Thread] = []

    def bridge(self, url: str = "", **sources: dict[str, Any]) -> Bridge:
        """A bridge that publishes on the nats-server of the site, or through another address of it."""
        settings = load_settings(
            flags={
                "instance.cluster": self._cluster,
                "nats.url": url or self._url,
                "nats.heartbeat_s": 0.2,
                "bridge": {"sources": {name: {"model": MODEL} | source for name, source in sources.items()}},
            }
        )
        end = threading.Event()
        thread = threading.Thread(target=run_bridge, args=(settings, lambda: not end.is_set()), daemon=True)
        thread.start()
        self._ends.append(end)
        self._threads.append(thread)
        return Bridge(self.catalog)

    def close(self) -> None:
        for end, thread in zip(self._ends, self._threads, strict=True):
            end.set()
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def site(request: pytest.FixtureRequest, nats_url: str, cluster: str, tmp_path: Any) -> Iterator[Site]:
    """Its parameter, if any, is for how long an instance may be silent."""
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}",
        cluster=cluster,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        liveness_s=getattr(request, "param", WAIT_S),
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        client = CatalogClient(thread.url, timeout_s=WAIT_S)
        client.wait_ready(WAIT_S)
        made = Site(nats_url, cluster, client)
        yield made
        made.close()
        client.close()
