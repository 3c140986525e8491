"""Clusters of processes that share one object store: each has a nats-server, a catalog with its database, and
instances.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvbm.assembly import CODER, NATIVE
from kvbm.core.ids import HASH_BYTES, SequenceHash, split_hashes
from kvbm.core.layout import blocks_of_object
from kvbm.janitor import ClaimsReader, Report
from kvbm.locate.http import CatalogClient
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, start_catalog_process
from tests.eventually import eventually
from tests.faults.processes.content import BLOCK_BYTES, NAMESPACE, prompt_hashes
from tests.faults.processes.told import ToldWorker
from tests.object_stores import Place

K = blocks_of_object(BLOCK_BYTES, NAMESPACE.block_tokens)
WAIT_S = 120.0
KEPT_TIERS = ("NVME", "OBJECT")  # what outlives a process
_STORE_S = 60.0  # of a call to the store; only a deletion waits for the grace, which is twice that
_GC: dict[str, object] = {"ttl_s": 0, "young_s": 0, "lease_s": 60}
Prompt = tuple[int, int]


class Index(NamedTuple):
    """What a catalog says of blocks, and how deep the pool goes in each prompt.

    Attributes:
        holders: for each block who keeps it where, in tiers that outlive a process.
        claims: of the pool, as the pools of instances count them.
    """

    holders: dict[bytes, frozenset[tuple[str, str]]]
    depths: dict[Prompt, int]
    claims: int

    def of(self, tier: str) -> dict[bytes, frozenset[str]]:
        """Who keeps each block in one tier; blocks that nobody has there are left out."""
        found = {
            block: frozenset(name for name, where in holders if where == tier)
            for block, holders in self.holders.items()
        }
        return {block: names for block, names in found.items() if names}


class Cluster:
    """One cluster. What its processes keep lies in a folder; a place in an object store is shared.

    Attributes:
        workers: the instances that were started and not killed, by name.
        wrong: wrong bytes that any of its instances was ever given.
    """

    def __init__(self, folder: Path, name: str, place: Place) -> None:
        self.folder, self.name, self.place = folder / name, name, place
        self.workers: dict[str, ToldWorker] = {}
        self.wrong: list[dict[str, Any]] = []
        self._database = f"sqlite+aiosqlite:///{self.folder / 'catalog' / 'catalog.db'}"
        self._nats: EmbeddedServer | None = None
        self._catalog: Child | None = None
        self._client: CatalogClient | None = None

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def client(self) -> CatalogClient:
        """Of its catalog."""
        assert self._client is not None
        return self._client

    @property
    def nats(self) -> EmbeddedServer:
        """Its nats-server."""
        assert self._nats is not None
        return self._nats

    def start(self) -> None:
        """A nats-server and a catalog, ready."""
        self._nats = EmbeddedServer.start(self.folder / "nats", timeout_s=WAIT_S)
        (self.folder / "catalog").mkdir(parents=True, exist_ok=True)
        self._catalog, self._client = start_catalog_process(
            self.folder / "catalog", self._nats.url, {"instance.cluster": self.name, "catalog.database": self._database}
        )
        self._client.wait_ready(WAIT_S)

    def instances(self, *names: str, rate: float = 0.0, **settings: object) -> list[ToldWorker]:
        """Start instances, all at once, and wait until they serve."""
        flags = {
            "instance.cluster": self.name,
            "instance.data_dir": self.folder,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 256,
            "nats.url": self.nats.url,
            "nats.heartbeat_s": 0.2,
            "catalog.url": self.client.url,
            "onboard.locate_s": 60.0,
            "onboard.wait_s": 60.0,
            **self._shared(_STORE_S),
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        started = [
            ToldWorker(
                name,
                self.folder / "logs",
                number,
                rate,
                {"instance.id": name} | flags,
                self.wrong,
                self.place.environment,
            )
            for number, name in enumerate(names)
        ]
        self.workers |= dict(zip(names, started, strict=True))
        for worker in started:
            worker.expect(WAIT_S, "start")
        return started

    def kill(self) -> None:
        """kill -9 of everything at once."""
        children = [*self.workers.values(), *([self._catalog] if self._catalog is not None else [])]
        for child in children:
            child.process.send_signal(signal.SIGKILL)
        if self._nats is not None:
            os.kill(self._nats.pid, signal.SIGKILL)
            self._nats.stop()
        for child in children:
            child.process.wait(WAIT_S)
            child.stop()
        if self._client is not None:
            self._client.close()
        self.workers, self._nats, self._catalog, self._client = {}, None, None, None

    def forget(self, *, instances: bool) -> None:
        """Throw away what stream and catalog kept, and on request what the instances kept."""
        for folder in ("nats", "catalog", *(["instances"] if instances else [])):
            shutil.rmtree(self.folder / folder)

    def serve(self, name: str, prompts: Iterable[Prompt]) -> list[dict[str, int]]:
        """An instance serves prompts, and all that is to be stored is. Returns the hits of each, by tier."""
        worker = self.workers[name]
        hits = [worker.ask(op="serve", family=family, branch=branch)["hits"] for family, branch in prompts]
        assert worker.ask(op="pause")["settled"]
        eventually(lambda: is_durable(worker), f"{name} does not come to write its events")
        return hits

    def wait_until_known(self) -> None:
        """Wait until index and SQL have all that the instances have said."""
        book = ClaimsReader(self._database)
        try:
            for name, worker in self.workers.items():
                eventually(partial(self._knows, book, name, worker), f"{name} is not known")
        finally:
            book.close()

    def _knows(self, book: ClaimsReader, name: str, worker: ToldWorker) -> bool:
        status = worker.ask(op="status")
        found = self.client.instance(name)
        said = (status["epoch"], status["applied"])
        return (
            found is not None
            and (found.epoch, found.offset, found.digest, found.suspect) == (*said, status["digest"], False)
            and tuple(book.position(found.instance)) == said  # type: ignore[arg-type]
        )

    def index(self, prompts: Iterable[Prompt]) -> Index:
        """What the catalog answers about prompts."""
        asked = list(prompts)
        blocks = {block for prompt in asked for block in split_hashes(prompt_hashes(*prompt))}
        holders = {
            bytes(block): frozenset(
                (holder.name, holder.tier)
                for holder in self.client.block(NAMESPACE, block).holders
                if holder.tier in KEPT_TIERS
            )
            for block in blocks
        }
        depths = {prompt: self._pool_depth(prompt) for prompt in asked}
        counts = {pool.held_blocks for one in self.client.instances() for pool in one.pools if pool.tier == "OBJECT"}
        return Index(holders, depths, max(counts, default=0))

    def _pool_depth(self, prompt: Prompt) -> int:
        answer = self.client.lookup(NAMESPACE, prompt_hashes(*prompt))
        return max((pool.depth for pool in answer.pools), default=0)

    def claims(self) -> set[bytes]:
        """What SQL says that the pool holds."""
        book = ClaimsReader(self._database)
        try:
            pools = book.pools()
            if not pools:
                return set()
            (pool,) = pools
            book.use(pool)
            columns = book.claims().columns
        finally:
            book.close()
        return {bytes(block) for column in columns for block in split_hashes(column.hashes)}

    def gc(self, store_s: float = _STORE_S, **rules: object) -> Report:
        """`kvbm catalog gc`, to its end.

        Args:
            store_s: of a call to the store; who deletes waits twice as long before it does.
        """
        given = {"grace_s": 2 * store_s, **_GC, **rules}
        flags = {
            "instance.cluster": self.name,
            "instance.data_dir": self.folder / "janitor",
            "nats.url": self.nats.url,
            "catalog.database": self._database,
            **self._shared(store_s),
            **{f"gc.{key}": value for key, value in given.items()},
        }
        command = [
            sys.executable,
            "-m",
            "kvbm",
            "catalog",
            "gc",
            "--json",
            *(f"--set={k}={v}" for k, v in flags.items()),
        ]
        done = subprocess.run(
            command, capture_output=True, timeout=3 * WAIT_S, check=False, env={**os.environ, **self.place.environment}
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout, done.stderr.decode()
        return msgspec.json.decode(done.stdout, type=Report)

    def _shared(self, store_s: float) -> dict[str, object]:
        return {
            "pools.object.url": self.place.url,
            "pools.object.endpoint": self.place.endpoint,
            "pools.object.region": "us-east-1",
            "pools.object.timeout_s": store_s,
            "pools.object.look_s": 0.5,
        }


def is_durable(worker: ToldWorker) -> bool:
    """Whether all that an instance did would outlive it."""
    status = worker.ask(op="status")
    return bool(status["durable"] == status["applied"])


def objects_in(place: Place) -> dict[str, list[SequenceHash]]:
    """The objects of a place by name, and their blocks. Each must be whole, and be what its name says."""
    store = place.open()
    objects = BlockObjects(
        store, BLOCK_BYTES, NATIVE.checksums, CODER, ObjectPoolOptions(blocks=K, threads=2, deadline_s=_STORE_S)
    )
    try:
        objects.admit([NAMESPACE])
        names = [entry.name for entry in store.listed("", _STORE_S) if not entry.name.startswith(".kvbm/")]
        found: dict[str, list[SequenceHash]] = {}
        for name, described in zip(names, objects.describe(names), strict=True):
            assert described is not None, f"{name} is not what its name says"
            assert hasattr(described, "hashes"), f"{name}: {described}"
            found[name] = split_hashes(described.hashes)
            assert len(found[name]) == K
            assert objects.names(NAMESPACE.id, [found[name][-1]]) == [name]
        return found
    finally:
        objects.close()


def hashes_of(prompts: Iterable[Prompt], depth: int) -> set[bytes]:
    """The first blocks of prompts."""
    return {bytes(block) for prompt in prompts for block in split_hashes(prompt_hashes(*prompt)[: depth * HASH_BYTES])}
