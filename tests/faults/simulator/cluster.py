"""The simulated cluster: machines, managers with their engines, the catalog.

All of it production code but what it stands on.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import greenlet
import msgspec
import numpy as np

import kvbm.catalog.service as service_module
from kvbm import assembly
from kvbm.catalog.members.downtime import FORGET_S
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.config import (
    CatalogSettings,
    HbmSettings,
    HostSettings,
    InstanceSettings,
    JournalSettings,
    NatsSettings,
    NvmeSettings,
    OnboardSettings,
    PoolsSettings,
    Settings,
    SnapshotsSettings,
)
from kvbm.core.errors import KvbmError, LedgerError
from kvbm.core.fold import Residencies
from kvbm.core.ids import HASH_BYTES, NO_PARENT, InstanceId, Namespace, NamespaceId, SequenceHash, Tier
from kvbm.locate.base import FoundElsewhere
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import ObjectStats, Proof, ReadResult
from kvbm.pools.stores.memory import MemoryStore
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.reference.ledger import Ledger
from tests.faults.simulator.disk import Disk
from tests.faults.simulator.disk_faults import USUAL_NAP_S
from tests.faults.simulator.kernel import NO_THREAD, Clock, Process, Shortages, Thread, Violation, Waiter, World
from tests.faults.simulator.limits import CLOSED_IN_S, MAX_PAYLOAD_BYTES, Interrupted, Keys, Limits, Signalled
from tests.faults.simulator.owning import REQUESTS, OwningEngine, call_of, drawn_owner, plain
from tests.faults.simulator.peers import PeerNetwork
from tests.faults.simulator.server import Network, Server, SimStream
from tests.faults.simulator.store import SimStore, StoreClass
from tests.object_pools import memory_objects

READABLE = assembly.Core(assembly.NATIVE, Ledger, Residencies)  # the twins under test are the ledger and the fold
BLOCK_BYTES = 64
FORGOTTEN_SHARE = (
    0.3  # of prompts, where there are peers: the instance drops their blocks first, so that others are read from
)
CLUSTER = "sim"
NAMESPACES = (
    Namespace(model="sim", revision="r1", block_tokens=16),
    Namespace(model="sim", revision="r1", block_tokens=16, tenant="other"),
)


def block_hash(namespace: int, chain: int, depth: int) -> bytes:
    return hashlib.sha256(f"{namespace}/{chain}/{depth}".encode()).digest()[:HASH_BYTES]


def rows_of(hashes: bytes) -> np.ndarray:
    """The bytes these blocks must have."""
    return np.tile(np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES), BLOCK_BYTES // HASH_BYTES)


class Chains:
    """Prompts with shared beginnings: a tree of blocks in each namespace."""

    def __init__(self, rng: random.Random, chains: int, depth: int) -> None:
        self._prompts: list[tuple[Namespace, bytes]] = []
        for number in range(chains):
            which = 0 if rng.random() < 0.75 else 1
            shared = rng.choice((0, 0, 2, 4, depth // 2)) if number else 0
            blocks = [block_hash(which, 0 if at < shared else number, at) for at in range(rng.randint(2, depth))]
            self._prompts.append((NAMESPACES[which], b"".join(blocks)))
        self.universe = sorted(
            {
                (namespace.id, SequenceHash(hashes[at : at + HASH_BYTES]))
                for namespace, hashes in self._prompts
                for at in range(0, len(hashes), HASH_BYTES)
            }
        )

    def prompt(self, rng: random.Random) -> tuple[NamespaceId, bytes]:
        at = min(int(rng.expovariate(1.0) * len(self._prompts) / 3), len(self._prompts) - 1)
        namespace, hashes = self._prompts[at]
        depth = rng.randint(1, len(hashes) // HASH_BYTES)
        return namespace.id, hashes[: depth * HASH_BYTES]


class SlowObjects:
    """The object pool of the cluster, slow and at times lossy."""

    def __init__(self, world: World) -> None:
        self.store = MemoryStore()
        blocks = random.Random(world.rng.getstate()[1][:8].__repr__()).choice(
            (1, 1, 2, 4)
        )  # leaves the seed's own draws as they were
        self.inner = memory_objects(BLOCK_BYTES, blocks, self.store)
        self.tier, self.block_bytes, self.blocks = self.inner.tier, self.inner.block_bytes, self.inner.blocks
        self.reach, self.name, self.forgets = self.inner.reach, self.inner.name, self.inner.forgets
        self._world = world
        self.refuses = 0.0

    def admit(self, namespaces: Iterable[Namespace]) -> None:
        self.inner.admit(namespaces)

    def absent(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[bool]:
        return self.inner.absent(namespace, hashes)

    def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
        nap(self._world, 0.01)
        if self.refuses and self._world.rng.random() < self.refuses:
            return [False] * (len(proof.hashes) // HASH_BYTES)
        held = self.inner.put(rows, proof, at)
        nap(self._world, 0.01)  # who dies here leaves an object that nobody claims
        return held

    def get(
        self, namespace: NamespaceId, chain: bytes, rows: np.ndarray, at: Sequence[int] | None = None, first: int = 0
    ) -> ReadResult:
        nap(self._world, 0.01)
        return self.inner.get(namespace, chain, rows, at, first)

    def stats(self) -> ObjectStats:
        return self.inner.stats()

    def close(self) -> None:
        return


def nap(world: World, mean_s: float) -> None:
    """Let others run; nothing in the loop, which cannot wait."""
    if greenlet.getcurrent() is not world.hub:
        Waiter(world).wait(world.rng.expovariate(1 / mean_s))


class Machine:
    """A disk, two clocks, a place in the network.

    Args:
        of: the machine it is: another place in the network, as a container has it, with that one's disk and clocks.
    """

    def __init__(self, cluster: Cluster, name: str, of: Machine | None = None) -> None:
        self.name = name
        if of is not None:
            self.clock, self.disk, self.shortages = of.clock, of.disk, of.shortages
            return
        self.clock = Clock(cluster.world, 1000.0 * cluster.world.rng.random())
        self.clock.wall_step_s = 4.0 * cluster.world.rng.random() - 2.0
        self.disk = Disk(cluster.folder / name, cluster.world.rng)
        self.shortages = Shortages() if cluster.limits is None else cluster.limits.shortages()

    def process(self, name: str) -> Process:
        process = Process(name, self.clock, self.name, self.shortages)
        process.disk = self.disk
        return process


class Node:
    """One instance on one machine: its processes, one after another.

    Attributes:
        nap_s: what a step of a pool takes. hangs: none of them ends.
        keys: what its last process has read of them, where it reads keys.
        engine: that of its last process, where that owns HBM.
        signals: how probable a signal is in a call of its engines; closing_signals: how many of them have a handler
            that closes.
    """

    def __init__(
        self, cluster: Cluster, machine: Machine, instance: str, settings: Settings, core: assembly.Core
    ) -> None:
        self.cluster, self.machine, self.instance = cluster, machine, InstanceId(instance)
        self.settings, self.core = settings, core
        self.world = cluster.world
        self.process: Process | None = None
        self.manager: Any = None
        self.engine: OwningEngine | None = None
        self.wanted = False
        self.starts = 0
        self.nap_s, self.hangs = USUAL_NAP_S, False
        self.signals = self.closing_signals = 0.0
        self.keys: Keys | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.alive and self.manager is not None

    @property
    def is_owner(self) -> bool:
        """Whether its engine owns HBM."""
        return self.settings.pools.hbm.owner == "engine"

    def start(self) -> None:
        """Start a process; it tries until the manager opens."""
        self.wanted = True
        if self.process is not None and self.process.alive:
            return
        self.starts += 1
        process = self.process = self.machine.process(f"{self.instance}@{self.machine.name}#{self.starts}")
        process.on_kill.append(lambda: self.machine.disk.release(process))
        process.on_kill.append(lambda: self.cluster.checker.ended(process))
        self.spawn(process, self._main, "main")

    def spawn(self, process: Process, target: Callable[[], object], name: str) -> None:
        thread = Thread(self.world, target=target, name=name)
        thread.process = process
        self.world.call_at(self.world.now, process, thread.start)

    def kill(self) -> None:
        if self.process is not None:
            self.world.kill(self.process)
        self.manager = None

    def _main(self) -> None:
        process = self.process
        assert process is not None
        open_it: Any = assembly.open_engine_manager if self.is_owner else assembly.open_manager
        while True:
            try:
                manager = open_it(
                    self.settings,
                    NAMESPACES[:1],
                    BLOCK_BYTES,
                    "simulated",
                    self.cluster.objects,
                    process.clock.wall_ns,
                    core=self.core,
                )
                break
            except (KvbmError, OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and NO_THREAD not in str(error):
                    raise
                self.cluster.told("start_failed", {"instance": self.instance, "why": str(error)})
                if self.cluster.limits is not None:
                    self.cluster.limits.not_opened(process)
                Waiter(self.world).wait(0.5)
        if self.cluster.limits is not None:
            self.cluster.limits.opened(self, manager)
        manager.declare(NAMESPACES[1:])
        self._slow_down(manager, process)
        manager._loads.locator = SimLocator(self.cluster, self.instance)
        self.manager = manager
        self.engine = OwningEngine(self, process, manager, NAMESPACES, rows_of) if self.is_owner else None
        self.cluster.checker.opened(self, process, manager)
        for number in range(REQUESTS if self.is_owner else self.cluster.engines):
            self.spawn(process, lambda: self._engine(manager, process), f"engine-{number}")

    def _slow_down(self, manager: Any, process: Process) -> None:
        for tier, pool in manager.pools.slots.items():
            if tier == Tier.HBM:
                continue
            pool.read = self._slow_read(pool.read)  # type: ignore[method-assign]
            pool.write = self._slow_write(pool.write, tier, process)  # type: ignore[method-assign]
            pool.seal = self._slow_seal(pool.seal)  # type: ignore[method-assign]
        if manager.pools.pod is not None and self.cluster.limits is not None:
            self.cluster.limits.watch_pod(manager.pools.pod, self._nap)

    def _nap(self) -> None:
        nap(self.world, self.nap_s)
        while self.hangs and greenlet.getcurrent() is not self.world.hub:
            Waiter(self.world).wait(0.05)

    def _slow_read(self, read: Callable[..., ReadResult]) -> Callable[..., ReadResult]:
        def slow(slots: Any, namespace: NamespaceId, hashes: bytes, rows: np.ndarray, at: Any = None) -> ReadResult:
            self._nap()
            result = read(slots, namespace, hashes, rows, at)  # late: whoever waits may have gone on
            self._nap()
            return result

        return slow

    def _slow_seal(self, seal: Callable[..., None]) -> Callable[..., None]:
        def slow(slots: Any, proof: Proof) -> None:
            self._nap()
            seal(slots, proof)

        return slow

    def _slow_write(self, write: Callable[..., None], tier: Tier, process: Process) -> Callable[..., None]:
        def slow(slots: Any, rows: np.ndarray, proof: Proof, at: Any = None) -> None:
            half = len(slots) // 2
            places = list(range(len(slots)) if at is None else at)
            self._nap()
            for begin, end in ((0, half), (half, len(slots))):
                if begin == end:
                    continue
                if tier == Tier.NVME:
                    self.cluster.checker.overwrites(self, process, list(slots[begin:end]))
                part = Proof(
                    proof.namespace,
                    proof.epoch,
                    proof.hashes[begin * HASH_BYTES : end * HASH_BYTES],
                    np.ascontiguousarray(proof.checksums[begin:end]),
                )
                write(slots[begin:end], rows, part, places[begin:end])
                if tier == Tier.NVME:
                    self.cluster.checker.has_put(self, list(slots[begin:end]), part.hashes)
                self._nap()

        return slow

    # -- what an engine does ------------------------------------------------------------------------------------------

    def _engine(self, manager: Any, process: Process) -> None:
        rng, world, engine = self.world.rng, self.world, self.engine
        caller: Any = manager if self.cluster.limits is None else Signalled(manager, self, self._close_in_handler)
        while True:
            Waiter(world).wait(rng.expovariate(1 / self.cluster.pause_s))
            if self.cluster.is_over:
                continue
            try:
                if engine is None:
                    self._operate(caller, rng)
                else:
                    self.cluster.operations += 1
                    engine.operate(call_of(caller), *self.cluster.chains.prompt(rng))
            except Interrupted:
                caller.give_back()
            except IndexError:
                if self.cluster.limits is None or not manager._stream.ended:
                    raise
                return  # a handler has closed it meanwhile: there are no rows any more
            except LedgerError as error:
                if "closed" in str(error):
                    return
                raise

    def _close_in_handler(self, manager: Any) -> None:
        """What a handler of SIGTERM does: the process leaves once it is closed."""
        process = self.process
        if self.manager is manager and process is not None:
            self.manager = None
            self.world.after(0.5, self.world.nature, self._leave, process, manager, self.world.now)
        manager.close(2.0)

    def _leave(self, process: Process, manager: Any, since_s: float) -> None:
        """The process ends once its manager is closed, and comes back.

        What nobody has closed by then is closed as interpreters do it.
        """
        world = self.world
        if not process.alive:
            return
        if manager._closing.is_over:
            world.kill(process)
            if self.wanted:
                self.start()
            return
        if not (process.frozen or process.thawed_s >= since_s) and world.now > since_s + CLOSED_IN_S:
            raise Violation(f"{process} has not closed {CLOSED_IN_S:g} s after a signal's handler closed it")
        if not manager._stream.closing:
            self.spawn(process, lambda: manager.close(2.0), "leave")
        world.after(0.5, world.nature, self._leave, process, manager, since_s)

    def _operate(self, manager: Manager, rng: random.Random) -> None:
        self.cluster.operations += 1
        namespace, hashes = self.cluster.chains.prompt(rng)
        dice = rng.random()
        if dice < 0.80:
            self.serve(manager, rng, namespace, hashes)
        elif dice < 0.86:
            manager.evict(rng.choice(list(manager.pools.slots)), hashes)
        elif dice < 0.88:
            tier = rng.choice(list(manager.pools.slots))
            manager.evict(tier, b"".join(manager.held(tier)))
        elif dice < 0.92:
            manager.keep(hashes, rng.uniform(0.1, 5.0), rng.choice((0, 50, 99)))
        elif dice < 0.94:
            manager.take_snapshot()
        elif dice < 0.96:
            manager.report_load(rng.randrange(1000), rng.randrange(8))
        else:
            slots = manager.allocate(rng.randint(1, 4))
            if slots:
                Waiter(self.world).wait(rng.expovariate(50))
                manager.release(slots)

    def serve(self, manager: Manager, rng: random.Random, namespace: NamespaceId, hashes: bytes) -> None:
        """One prompt: what is there of it is acquired, the rest computed."""
        if self.engine is not None:
            self.engine.serve(plain, namespace, hashes)
            return
        depth = len(hashes) // HASH_BYTES
        if self.cluster.peers is not None and rng.random() < FORGOTTEN_SHARE:
            for tier in manager.pools.slots:
                manager.evict(tier, hashes)
        prefix = manager.acquire(namespace, hashes)
        self._check_bytes(manager, hashes, prefix.slots)
        slots = list(prefix.slots)
        if prefix.depth < depth:
            fresh = manager.allocate(depth - prefix.depth)
            if fresh:
                at = prefix.depth * HASH_BYTES
                rest = hashes[at:]
                Waiter(self.world).wait(rng.expovariate(200))
                manager.pools.slots[Tier.HBM].rows[fresh] = rows_of(rest)  # type: ignore[attr-defined]
                parent = SequenceHash(hashes[at - HASH_BYTES : at]) if at else NO_PARENT
                slots += manager.create(namespace, parent, prefix.depth, rest, fresh)
        if rng.random() < 0.5:
            Waiter(self.world).wait(rng.expovariate(20))
        self._check_bytes(manager, hashes, slots)
        if slots:
            manager.unpin(slots)

    def _check_bytes(self, manager: Manager, hashes: bytes, slots: list[int]) -> None:
        if not slots:
            return
        rows = manager.pools.slots[Tier.HBM].rows[slots]  # type: ignore[attr-defined]
        if not np.array_equal(rows, rows_of(hashes[: len(slots) * HASH_BYTES])):
            raise Violation(f"wrong bytes in HBM of {self.instance} at {self.world.now:.3f} s")


class CatalogNode:
    """The catalog on its machine: its processes, one after another."""

    def __init__(self, cluster: Cluster, machine: Machine, use_reference: bool) -> None:
        self.cluster, self.machine, self.world = cluster, machine, cluster.world
        self.use_reference = use_reference
        self.process: Process | None = None
        self.service: CatalogService | None = None
        self.starts = 0

    def start(self) -> None:
        if self.process is not None and self.process.alive:
            return
        self.starts += 1
        process = self.process = self.machine.process(f"{self.machine.name}#{self.starts}")
        process.on_kill.append(lambda: self.machine.disk.release(process))
        self.service = None
        self.world.call_at(self.world.now, process, self._spawn, self._main(process))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.world.loop.create_task(work, name="catalog")
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Violation):
            Violation(f"the catalog ended with {error!r}")

    def forget(self, instance: InstanceId) -> None:
        """An operator asks it to forget an instance. It refuses while it has reason to."""
        process, service = self.process, self.service
        if process is None or not process.alive or service is None:
            return

        async def ask() -> None:
            try:
                await service.forgetting.forget(instance)
            except KvbmError as error:
                self.cluster.told("not_forgotten", {"instance": instance, "why": str(error)})

        self.world.call_at(self.world.now, process, lambda: self._spawn(ask()))

    def kill(self) -> None:
        if self.process is not None:
            self.world.kill(self.process)
        self.service = None

    async def _main(self, process: Process) -> None:
        while True:
            try:
                await self._serve(process)
            except (KvbmError, OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and NO_THREAD not in str(error):
                    raise
                self.cluster.told("catalog_start_failed", {"why": str(error)})
            await asyncio.sleep(0.5)

    async def _serve(self, process: Process) -> None:
        stream = await SimStream.connect_to(self.cluster.server, 5.0)
        new_index = ReferenceIndex if self.use_reference else assembly.NATIVE_INDEX
        service = await CatalogService.start(
            self.cluster.catalog_settings(self.machine), assembly.NATIVE, new_index, stream
        )
        self.service = service
        self.cluster.checker.catalog_began(self, service)
        await service.failed.wait()
        self.cluster.told("catalog_failed", {"why": repr(service.failure)})
        if not isinstance(service.failure, (KvbmError, OSError)) and NO_THREAD not in str(service.failure):
            raise Violation(f"the catalog cannot go on: {service.failure!r}") from service.failure
        self.service = None
        await service.close()


class SimLocator:
    """Asks the catalog's index, as it stands: what it says may be old."""

    def __init__(self, cluster: Cluster, asker: InstanceId) -> None:
        self._cluster, self._asker = cluster, asker

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        service = self._cluster.catalog.service
        nap(self._cluster.world, 0.002)
        if service is None or self._cluster.catalog.process is None or self._cluster.catalog.process.frozen:
            return FoundElsewhere()
        found = service.index.prefixes(namespace, hashes)
        claimed = max((entry.depth for entry in found.pools if entry.pool == pool), default=0)
        peers, wanted = self._cluster.peers, hashes[first * HASH_BYTES :]
        if peers is None or not wanted:
            return FoundElsewhere(claimed)
        ask = partial(service.queries.find, namespace, wanted, asker=self._asker)
        return FoundElsewhere(claimed, peers.lenders(ask, self._asker, namespace, wanted))

    def claimed(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> bytes:
        service = self._cluster.catalog.service
        nap(self._cluster.world, 0.002)
        if service is None or self._cluster.catalog.process is None or self._cluster.catalog.process.frozen:
            return b""
        found = service.index.presence(namespace, hashes, 1)
        return next((row.held for row in found.rows if row.holder.is_pool and row.holder.name == pool), b"")

    def close(self) -> None:
        return


class Cluster:
    """Everything there is."""

    def __init__(
        self,
        world: World,
        folder: Path,
        checker: Any,
        told: Callable[[str, dict[str, Any]], None],
        has_peers: bool = False,
        limits: Limits | None = None,
        owners: random.Random | None = None,
    ) -> None:
        self._real_store: Any = None
        self.limits, self._owners = limits, owners
        self.owning: Counter[str] = Counter()  # what engines that own HBM have reached
        rng = world.rng
        self.world, self.folder, self.checker, self.told = world, folder, checker, told
        self.network = Network(world)
        self.server = Server(
            world, self.network, rng.choice((-1, -1, 1 << 20, 1 << 17)), rng.choice((0.0, 0.0, 0.0, 12.0, 30.0))
        )
        self.peers = PeerNetwork(world, self.network.cut, rows_of, told) if has_peers else None
        world.peers = self.peers  # type: ignore[attr-defined]
        if limits is not None:
            self.server.max_payload_bytes = MAX_PAYLOAD_BYTES
        self.store = SimStore(world)
        self.objects = SlowObjects(world)
        self.chains = Chains(rng, rng.randint(6, 14), rng.randint(6, 16))
        self.engines = 2
        self.remembers = True  # the stream keeps every fence
        self.forget_s = FORGET_S
        self.pause_s = 0.05
        self.is_over = False
        self.operations = 0
        self.machines: dict[str, Machine] = {}
        self.nodes: list[Node] = []
        self.has_checkpoints, self.has_archive = rng.random() < 0.7, rng.random() < 0.2
        self.checkpoint_every_s = rng.choice((1.0, 4.0))
        world.server = self.server  # type: ignore[attr-defined]
        world.told = told  # type: ignore[attr-defined]
        self.catalogs = [
            CatalogNode(self, self._machine(f"catalog-{number}"), use_reference=rng.random() < 0.35)
            for number in range(rng.choice((1, 1, 1, 2)))
        ]
        self.catalog = self.catalogs[0]  # whom managers ask

    def _machine(self, name: str) -> Machine:
        machine = self.machines[name] = Machine(self, name)
        return machine

    def add_node(self, instance: str, like: Node | None = None) -> Node:
        machine = self._machine(f"machine-{len(self.machines)}")
        settings, core = (like.settings, like.core) if like is not None else self._settings(instance)
        settings = settings_at(settings, machine)
        if self.limits is not None:
            settings = self.limits.settings(settings, machine.disk.folder)
        node = Node(self, machine, instance, settings, core)
        self.nodes.append(node)
        return node

    def add_mate(self, node: Node) -> Node:
        """Another instance on the machine of one, which keeps its NVME in the same folder."""
        machine = Machine(self, f"machine-{len(self.machines)}", node.machine)
        self.machines[machine.name] = machine
        named = msgspec.structs.replace(node.settings.instance, id=f"mate-{len(self.nodes)}")
        mate = Node(self, machine, named.id, msgspec.structs.replace(node.settings, instance=named), node.core)
        self.nodes.append(mate)
        return mate

    def on_disk_of(self, node: Node) -> list[Node]:
        """The instances of its machine, itself as well."""
        return [one for one in self.nodes if one.machine.disk is node.machine.disk]

    def _settings(self, instance: str) -> tuple[Settings, assembly.Core]:
        rng = self.world.rng
        in_memory = rng.random() < 0.1 and self.remembers
        most = self.server.max_bytes  # a stream must keep two windows
        windows = [window for window in (2 << 10, 16 << 10, 4 << 20) if most < 0 or 2 * window <= most]
        core = READABLE if rng.random() < 0.5 else assembly.NATIVE_CORE
        settings = Settings(
            instance=InstanceSettings(id=instance, cluster=CLUSTER),
            pools=PoolsSettings(
                hbm=HbmSettings(slots=rng.randint(18, 40), device="memory"),
                host=HostSettings(slots=rng.choice((0, 8, 24))),
                nvme=NvmeSettings(slots=0 if in_memory else rng.choice((0, 12, 24, 24)), direct="off"),  # tmpfs
                eviction=rng.choice(("lru", "s3fifo")),
            ),
            onboard=OnboardSettings(wait_s=rng.choice((0.01, 0.05, 1.0)), threads=2),
            journal=JournalSettings(
                fsync=rng.choice(("off", "interval", "always")),
                segment_bytes=rng.choice((4 << 10, 16 << 10)),
                capacity_bytes=rng.choice((128 << 10, 1 << 20)),
                waiting_bytes=1 << 20,
                in_memory=in_memory,
            ),
            nats=NatsSettings(url="nats://sim:4222", window_bytes=rng.choice(windows)),
            snapshots=SnapshotsSettings(least_s=rng.choice((1.0, 4.0))),
        )
        if self.peers is not None:
            settings = self._with_peers(settings)
        return settings if self._owners is None or not drawn_owner(self._owners) else self._owning(settings), core

    def _owning(self, settings: Settings) -> Settings:
        """Of an engine that owns HBM: half of its slots are what the engine has room for."""
        pools, replace = settings.pools, msgspec.structs.replace
        hbm = HbmSettings(slots=2 * pools.hbm.slots, owner="engine")
        host = HostSettings(slots=pools.host.slots or 8, copy_threads=1)
        return replace(settings, pools=replace(pools, hbm=hbm, host=host))

    def _with_peers(self, settings: Settings) -> Settings:
        """An instance that has room to lend from and says soon that it does; now and then it has another secret than
        the others.
        """
        rng, replace = self.world.rng, msgspec.structs.replace
        host = HostSettings(slots=rng.choice((0, 6, 6, 10, 16)))
        secrets = {"other": "wrong" if rng.random() < 0.1 else "right"}
        return replace(
            settings,
            pools=replace(settings.pools, host=host),
            catalog=CatalogSettings(tenant_secrets=secrets),
            onboard=replace(settings.onboard, wait_s=rng.choice((0.05, 0.5, 1.0))),
            nats=replace(settings.nats, heartbeat_s=0.1),
        )

    def catalog_settings(self, machine: Machine) -> ServiceSettings:
        return ServiceSettings(
            nats_url="nats://sim:4222",
            database_url="sqlite://",
            cluster=CLUSTER,
            store_every_s=0.5,
            capacity=1 << 20,
            claims_every_s=15.0,
            forget_s=self.forget_s,
            checkpoints=str(machine.disk.folder / "checkpoints") if self.has_checkpoints else "",
            checkpoint_every_s=self.checkpoint_every_s,
            archive=str(machine.disk.folder / "archive") if self.has_archive else "",
        )

    def begin(self) -> None:
        self._real_store = service_module.SqlStore
        service_module.SqlStore = StoreClass(self.store)  # type: ignore[misc, assignment]
        for catalog in self.catalogs:
            catalog.start()
        for node in self.nodes:
            node.start()
        self._sync_server()
        self._back_up()

    def _back_up(self) -> None:
        self.store.back_up()
        self.world.after(0.4, self.world.nature, self._back_up)

    def _sync_server(self) -> None:
        self.server.sync()
        self.world.after(1.5, self.world.nature, self._sync_server)

    def end(self) -> None:
        for node in self.nodes:
            node.kill()
        for catalog in self.catalogs:
            catalog.kill()
        self.world.bury()
        for machine in self.machines.values():
            machine.disk.remove()
        if self._real_store is not None:
            service_module.SqlStore = self._real_store  # type: ignore[misc]


def settings_at(settings: Settings, machine: Machine) -> Settings:
    """The same settings with another folder."""
    place = msgspec.structs.replace(settings.instance, data_dir=str(machine.disk.folder))
    return msgspec.structs.replace(settings, instance=place)
