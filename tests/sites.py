"""Clusters of real parts that share an object store: a nats-server, a catalog with its database, instances, a janitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager, run_gc
from kvbm.catalog.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import Settings, load_settings
from kvbm.core.ids import NamespaceId, split_hashes
from kvbm.janitor import ClaimsReader, Report
from kvbm.locate.http import CatalogClient
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.stores.base import Store
from kvbm.streams.server import EmbeddedServer
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of
from tests.object_pools import memory_objects

K = 4
DEPTH = 8  # blocks of a prompt: two objects
WAIT_S = 30.0
Claims = dict[NamespaceId, set[bytes]]


class Site:
    """A cluster: a nats-server, a catalog with its database, and instances that share a store with other clusters."""

    def __init__(self, folder: Path, name: str, new_store: Callable[[], Store], opened: ExitStack) -> None:
        self.folder, self.name, self.new_store = folder / name, name, new_store
        self.folder.mkdir(parents=True)
        self.server = EmbeddedServer.start(self.folder / "nats")
        opened.callback(self.server.stop)
        self.database = f"sqlite+aiosqlite:///{self.folder / 'catalog.db'}"
        self._catalog = CatalogThread(
            ServiceSettings(
                nats_url=self.server.url, database_url=self.database, cluster=name, listen="127.0.0.1:0", store_every_s=0.02,
                whole_wait_s=0.2, checkpoints=str(self.folder / "checkpoints"),
            ),
            NATIVE,
            NATIVE_INDEX,
        )  # fmt: skip
        self._catalog.start()
        opened.callback(self._catalog.stop)
        self.client = CatalogClient(self._catalog.url)
        opened.callback(self.client.close)
        self.client.wait_ready(WAIT_S)
        self._opened = opened

    def settings(self, instance: str, **flags: object) -> Settings:
        named = {key.replace("__", "."): value for key, value in flags.items()}
        return load_settings(
            flags={
                "instance.data_dir": str(self.folder), "instance.cluster": self.name, "instance.id": instance,
                "pools.hbm.slots": 64, "pools.hbm.device": "memory", "pools.host.slots": 64, "nats.url": self.server.url,
                "nats.heartbeat_s": 0.2, "catalog.url": self.client.url, "catalog.database": self.database,
                "journal.in_memory": True, "onboard.locate_s": 2.0, "onboard.wait_s": 10.0, "pools.object.timeout_s": 1.0, "pools.object.look_s": 1.0,
                **named,
            }
        )  # fmt: skip

    def instance(self, name: str, look_s: float = 0.0) -> Manager:
        """A manager on the shared store, closed with everything."""
        objects = memory_objects(BLOCK_BYTES, K, self.new_store(), look_s=look_s, deadline_s=1.0)
        manager = open_manager(self.settings(name), [NAMESPACE], BLOCK_BYTES, object_pool=objects)
        self._opened.callback(manager.close)
        return manager

    def gc(self, **rules: object) -> Report:
        """One run of the janitor."""
        wanted: dict[str, object] = {
            "ttl_s": 0.0,
            "grace_s": 4.0,
            "young_s": 0.0,
            "skew_s": 30.0,
            "lease_s": 10.0,
            "used_s": 0.0,
        } | rules
        reports: list[Report] = []
        flags = {f"gc__{key}": value for key, value in wanted.items()}
        assert run_gc(self.settings("unused", **flags), False, reports.append, self.new_store) == 0
        return reports[0]

    def claims(self, pool: str) -> Claims:
        """What SQL knows."""
        book = ClaimsReader(self.database, pool)
        try:
            columns = book.claims().columns
        finally:
            book.close()
        return {column.namespace: set(map(bytes, split_hashes(column.hashes))) for column in columns}

    def depth(self, prompt: int) -> int:
        """How much of a prompt the catalog's index says that the pool holds."""
        answer = self.client.lookup(NAMESPACE, hashes_of(prompt, DEPTH))
        return max((pool.depth for pool in answer.pools), default=0)


@contextmanager
def site(folder: Path, name: str, new_store: Callable[[], Store]) -> Iterator[Site]:
    with ExitStack() as opened:
        yield Site(folder, name, new_store, opened)
