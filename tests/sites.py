"""Clusters of real parts that share an object store: a nats-server, a catalog with its database, instances, a
janitor.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager, run_gc
from kvbm.assembly.janitor import Clocks
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import Settings, load_settings
from kvbm.core.ids import NamespaceId, split_hashes
from kvbm.janitor import ClaimsReader, Report
from kvbm.locate.http import CatalogClient
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.stores.base import Listed, ObjectStore
from kvbm.streams.server import EmbeddedServer
from tests.janitors import Skipping
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of
from tests.object_pools import memory_objects

K = 4
DEPTH = 8  # blocks of a prompt: two objects
WAIT_S = 120.0  # for what should come: answers of stores, servers and catalogs among it
GRACE_S = 3 * WAIT_S  # of the janitor, which does not wait for it here
Claims = dict[NamespaceId, set[bytes]]


class Site:
    """A cluster: a nats-server, a catalog with its database, and instances that share a store with other clusters."""

    def __init__(
        self,
        folder: Path,
        name: str,
        new_store: Callable[[], ObjectStore],
        opened: ExitStack,
        listen: str = "127.0.0.1:0",
    ) -> None:
        self.folder, self.name, self.new_store = folder / name, name, new_store
        self._older_ns: dict[str, int] = {}
        self.folder.mkdir(parents=True)
        self.server = EmbeddedServer.start(self.folder / "nats", timeout_s=WAIT_S)
        opened.callback(self.server.stop)
        self.database = f"sqlite+aiosqlite:///{self.folder / 'catalog.db'}"
        self._catalog = CatalogThread(
            ServiceSettings(
                nats_url=self.server.url,
                database_url=self.database,
                cluster=name,
                listen=listen,
                access=AccessOptions(open=True),  # of a network of its own, where it is not the loopback
                store_every_s=0.02,
                connect_s=WAIT_S,
                liveness_s=WAIT_S,
                whole_wait_s=0.2,
                checkpoints=str(self.folder / "checkpoints"),
            ),
            NATIVE,
            NATIVE_INDEX,
        )
        self._catalog.start()
        opened.callback(self._catalog.stop)
        self.client = CatalogClient(self._catalog.url, WAIT_S)
        opened.callback(self.client.close)
        self.client.wait_ready(WAIT_S)
        self._opened = opened

    def settings(self, instance: str, **flags: object) -> Settings:
        named = {key.replace("__", "."): value for key, value in flags.items()}
        return load_settings(
            flags={
                "instance.data_dir": str(self.folder),
                "instance.cluster": self.name,
                "instance.id": instance,
                "pools.hbm.slots": 64,
                "pools.hbm.device": "memory",
                "pools.host.slots": 64,
                "nats.url": self.server.url,
                "nats.heartbeat_s": 0.2,
                "nats.timeout_s": WAIT_S,
                "catalog.url": self.client.url,
                "catalog.database": self.database,
                "journal.in_memory": True,
                "onboard.locate_s": WAIT_S,
                "onboard.wait_s": WAIT_S,
                "pools.object.timeout_s": WAIT_S,
                "pools.object.look_s": 1.0,
                **named,
            }
        )

    def instance(self, name: str, look_s: float = 0.0) -> Manager:
        """A manager on the shared store, closed with everything."""
        objects = memory_objects(BLOCK_BYTES, K, self.new_store(), look_s=look_s, deadline_s=WAIT_S)
        manager = open_manager(self.settings(name), [NAMESPACE], BLOCK_BYTES, object_pool=objects)
        self._opened.callback(manager.close)
        return manager

    def gc(self, clocks: Clocks | None = None, **rules: object) -> Report:
        """One run of the janitor, which waits for no grace unless it is given clocks."""
        wanted: dict[str, object] = {
            "ttl_s": 0.0,
            "grace_s": GRACE_S,
            "young_s": 0.0,
            "skew_s": WAIT_S,
            "lease_s": WAIT_S,
            "used_s": 0.0,
        } | rules
        reports: list[Report] = []
        flags = {f"gc__{key}": value for key, value in wanted.items()}
        clocks = clocks or Skipping().clocks()

        def new_store() -> Any:
            return Aged(self.new_store(), self._older_ns)

        assert run_gc(self.settings("unused", **flags), False, reports.append, new_store, clocks) == 0
        return reports[0]

    def claims(self, pool: str) -> Claims:
        """What SQL knows."""
        book = ClaimsReader(self.database, pool)
        try:
            columns = book.claims().columns
        finally:
            book.close()
        return {column.namespace: set(map(bytes, split_hashes(column.hashes))) for column in columns}

    def claimed(self, since_s: float = 0.0) -> int:
        """How many blocks SQL says were claimed or used since then."""
        with sqlite3.connect(self.folder / "catalog.db", timeout=WAIT_S) as database:
            question = "SELECT count(*) FROM object_claims WHERE last_claimed_ns >= ?"
            (count,) = database.execute(question, [int(since_s * 1e9)]).fetchone()
        database.close()
        return int(count)

    def age(self, age_s: float) -> None:
        """What there is was put, claimed and used so much earlier, as far as a janitor is told here."""
        with closing(self.new_store()) as store:
            for entry in store.listed("", WAIT_S):
                self._older_ns[entry.name] = self._older_ns.get(entry.name, 0) + int(age_s * 1e9)
        with sqlite3.connect(self.folder / "catalog.db", timeout=WAIT_S) as database:
            database.execute("UPDATE object_claims SET last_claimed_ns = last_claimed_ns - ?", [int(age_s * 1e9)])
        database.close()

    def depth(self, prompt: int) -> int:
        """How much of a prompt the catalog's index says that the pool holds."""
        answer = self.client.lookup(NAMESPACE, hashes_of(prompt, DEPTH))
        return max((pool.depth for pool in answer.pools), default=0)


class Aged:
    """A store that tells of some objects that they were put earlier."""

    def __init__(self, store: ObjectStore, older_ns: Mapping[str, int]) -> None:
        self._store, self._older_ns = store, older_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        for entry in self._store.listed(prefix, deadline_s, after):
            yield entry._replace(modified_ns=entry.modified_ns - self._older_ns.get(entry.name, 0))


@contextmanager
def site(folder: Path, name: str, new_store: Callable[[], ObjectStore]) -> Iterator[Site]:
    with ExitStack() as opened:
        yield Site(folder, name, new_store, opened)
