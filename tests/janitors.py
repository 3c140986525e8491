"""A janitor in a world of its own: a real store, real objects, and a catalog and a clock that a test holds in its
hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.assembly.janitor import Clocks
from kvbm.catalog.sql.rows import NamespaceRow
from kvbm.core.errors import KvbmError
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Offset, split_hashes
from kvbm.janitor.driver import Driver, DriverOptions
from kvbm.janitor.effects import BlockRun, ClaimColumns, Effect, KnownClaims
from kvbm.janitor.janitor import Janitor
from kvbm.janitor.report import Report
from kvbm.janitor.rules import Rules
from kvbm.pools.base import Proof
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.pool import BlockObjects
from kvbm.pools.stores.base import Get, Got, Refusal, StoreTrouble
from kvbm.pools.stores.memory import MemoryStore
from kvbm.pools.tenant_keys import keys_of_file
from kvbm.streams.base import Position
from tests.object_pools import memory_objects

BLOCK_BYTES = 64
K = 4
SPACE = Namespace(model="janitor", block_tokens=4, tenant="acme")
OTHER = Namespace(model="janitor", block_tokens=4, tenant="globex")
RULES = Rules(ttl_s=1000.0, quota_bytes=0, grace_s=90.0, young_s=60.0, skew_s=30.0, lease_s=60.0)
SECOND_NS = 1_000_000_000
HOUR_S = 3600.0
_POLL_S = 0.1


class Died(Exception):
    """The process is gone, at once."""


def chain(number: int, objects: int = 1, blocks: int = K) -> bytes:
    """Packed hashes of whole objects of a chain."""
    return b"".join(number.to_bytes(8, "big") + at.to_bytes(7, "big") + b"\x07" for at in range(objects * blocks))


class _Store(MemoryStore):
    def __init__(self, world: World) -> None:
        super().__init__(clock_ns=lambda: int(world.now_s * SECOND_NS))
        self._world = world

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        silent = Refusal(StoreTrouble.SILENT, "no answer")
        return [
            silent if one.name in self._world.silent or at >= self._world.in_time else answer
            for at, (one, answer) in enumerate(zip(gets, super().get(gets, deadline_s), strict=True))
        ]


class World:
    """One store, shared by clusters; each has claims, as its SQL would."""

    def __init__(self, blocks: int = K, keys: Path | None = None) -> None:
        """Args: keys: a file of tenants' keys; objects are sealed then."""
        self.keys = keys
        self.now_s = 1_000_000.0  # of every clock that is right
        self.blocks = blocks
        self.silent: set[str] = set()  # names of which the store says nothing
        self.in_time = 1_000_000  # gets of one call that it answers in time
        self.store = _Store(self)
        self.writer = memory_objects(
            BLOCK_BYTES, blocks, self.store, namespaces=[SPACE, OTHER], envelopes=sealing(keys, blocks)
        )
        self.cluster = Cluster(self)

    def put(
        self, hashes: bytes, space: Namespace = SPACE, cluster: Cluster | None = None, claimed: bool = True
    ) -> list[str]:
        """An instance offloads blocks; gives the objects' names."""
        count = len(hashes) // HASH_BYTES
        rows = np.zeros((count, BLOCK_BYTES), dtype=np.uint8)
        proof = Proof(space.id, Epoch(1), hashes, self.writer._checksum_rows(rows))
        assert all(self.writer.put(rows, proof))
        if claimed:
            (cluster or self.cluster).claim(space.id, hashes)
        return self.names(hashes, space)

    def names(self, hashes: bytes, space: Namespace = SPACE) -> list[str]:
        return self.writer.names(space.id, split_hashes(hashes)[self.blocks - 1 :: self.blocks])

    def objects(self) -> set[str]:
        return {name for name in self.store.objects if not name.startswith(".kvbm/")}

    def kept(self) -> set[str]:
        return {name for name in self.store.objects if name.startswith(".kvbm/withdrawn/")}


class Cluster:
    """What one cluster's catalog knows, and its janitor's instance: a `ClaimsReader` and as much of a `Manager` as a
    janitor uses.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.times: dict[tuple[NamespaceId, bytes], int] = {}
        self.quotas: dict[str, int] = {}
        self.told = [SPACE, OTHER]  # namespaces whose fields instances have told
        self.said: list[tuple[NamespaceId, bytes, EvictReason | None]] = []
        self.stores_nothing = False
        self.instance = InstanceId("janitor")
        self.epoch = Epoch(1)
        self.offset = 0

    def stamp(self) -> int:
        return int(self.world.now_s * SECOND_NS)

    # -- as instances and the janitor say it ---------------------------------------------------------------------------

    def claim(self, namespace: NamespaceId, hashes: bytes) -> None:
        assert len(set(split_hashes(hashes))) == len(split_hashes(hashes)), (
            "a real ledger refuses a run that names a block twice"
        )
        self.said.append((namespace, hashes, None))
        self.offset += 1
        for block in split_hashes(hashes):
            self.times[namespace, block] = max(self.stamp(), self.times.get((namespace, block), 0))

    def withdraw(self, namespace: NamespaceId, hashes: bytes, reason: EvictReason) -> None:
        assert len(set(split_hashes(hashes))) == len(split_hashes(hashes)), (
            "a real ledger refuses a run that names a block twice"
        )
        self.said.append((namespace, hashes, reason))
        self.offset += 1
        for block in split_hashes(hashes):
            self.times.pop((namespace, block), None)

    def take_snapshot(self) -> None:
        self.offset += 1

    def applied(self) -> Offset:
        return Offset(self.offset)

    def close(self) -> None:
        return

    # -- as SQL knows it -----------------------------------------------------------------------------------------------

    def claims(self) -> KnownClaims:
        columns = []
        for space in (SPACE, OTHER):
            rows = sorted((block, at) for (namespace, block), at in self.times.items() if namespace == space.id)
            if rows:
                hashes = b"".join(block for block, _ in rows)
                columns.append(ClaimColumns(space.id, hashes, np.array([at for _, at in rows]), space.tenant))
        return KnownClaims(columns, self.quotas)

    def namespaces(self) -> list[Any]:
        return [NamespaceRow(id=space.id, fields=space, first_seen_ns=1) for space in self.told]

    def last(self, runs: Sequence[BlockRun]) -> list[int]:
        return [max(self.times.get((run.namespace, block), 0) for block in split_hashes(run.hashes)) for run in runs]

    def position(self, instance: InstanceId) -> Position:
        return Position(Epoch(0), Offset(0)) if self.stores_nothing else Position(self.epoch, Offset(self.offset))

    def holds(self, hashes: bytes, space: Namespace = SPACE) -> bool:
        return all((space.id, block) in self.times for block in split_hashes(hashes))

    def holds_none(self, hashes: bytes, space: Namespace = SPACE) -> bool:
        return not any((space.id, block) in self.times for block in split_hashes(hashes))


class Course:
    """One run of a janitor of a cluster, that a test can stop, watch and disturb."""

    def __init__(
        self,
        world: World,
        rules: Rules = RULES,
        cluster: Cluster | None = None,
        name: str = "a",
        dry_run: bool = False,
        ahead_s: float = 0.0,
    ) -> None:
        self.world = world
        self.cluster = cluster or world.cluster
        rules = rules._replace(sealed=world.keys is not None)
        self.janitor = Janitor("pool", f"janitor {name}", f"run-{name}", rules, dry_run)
        self.asleep_s = 0.0
        self.driver = Driver(
            world.store,
            self.cluster,  # type: ignore[arg-type]
            lambda k: folder(world, k),
            lambda spaces: self.cluster,  # type: ignore[arg-type,return-value]
            DriverOptions(f"cluster-{id(self.cluster)}", f"run-{name}", 1.0, rules.batch_s, dry_run),
            wall_clock_ns=lambda: int((world.now_s + ahead_s) * SECOND_NS),
            sleep=self._sleep,
        )
        self.done: list[Effect[Any]] = []
        self.next = self.janitor.step(world.now_s)

    def _sleep(self, seconds: float) -> None:
        self.world.now_s += seconds

    def go(
        self,
        until: type[Effect[Any]] | None = None,
        count: int = 1,
        before: Callable[[Effect[Any]], None] = lambda effect: None,
    ) -> Course:
        """Go on to the end, or until the next effect is the `count`-th of a kind, which is not done yet."""
        while self.next is not None:
            if until is not None and isinstance(self.next, until):
                count -= 1
                if not count:
                    break
            before(self.next)
            self.step()
        return self

    def step(self) -> None:
        """Do the next effect."""
        assert self.next is not None
        answer: Any
        try:
            answer = self.driver.do(self.next)
        except KvbmError as error:
            answer = error
        self.done.append(self.next)
        self.next = self.janitor.step(self.world.now_s, answer)

    def fail(self, error: KvbmError) -> None:
        """The next effect fails."""
        self.next = self.janitor.step(self.world.now_s, error)
        self.go()

    @property
    def report(self) -> Report:
        return self.janitor.report

    def did(self, kind: type[Effect[Any]]) -> list[Any]:
        return [effect for effect in self.done if isinstance(effect, kind)]


class Skipping:
    """Clocks of a janitor that does not wait for its grace: over a pause they are set forward.

    Args:
        meanwhile: happens in the place of each pause.
    """

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile
        self._skipped_s = 0.0

    def clocks(self) -> Clocks:
        return Clocks(self._monotonic_s, sleep=self._sleep)

    def _monotonic_s(self) -> float:
        return time.monotonic() + self._skipped_s

    def _sleep(self, seconds: float) -> None:
        if seconds <= _POLL_S:  # between two looks at SQL
            time.sleep(seconds)
            return
        self._meanwhile()
        self._skipped_s += seconds


def folder(world: World, blocks: int) -> BlockObjects:
    """What a janitor knows of objects: nothing but their k."""
    return memory_objects(1, blocks, world.store, envelopes=sealing(world.keys, blocks))


def sealing(keys: Path | None, blocks: int) -> Sealing | None:
    return None if keys is None else Sealing(keys_of_file(str(keys)), blocks, header_bytes(blocks))


def gc(world: World, rules: Rules = RULES, **options: Any) -> Report:
    """One whole run."""
    return Course(world, rules, **options).go().report
