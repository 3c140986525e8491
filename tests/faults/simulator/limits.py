"""Where threads, descriptors, memory for names and uninterrupted calls run out: what is simulated for that, and what
must hold.

`Limits` has what is drawn for a run of that kind, and what such a run measures. `Signalled` is a manager as an engine's
thread calls it whose calls signals interrupt: their handlers raise, or close the manager. Such an engine knows what it
holds, and gives it back.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import greenlet
import msgspec

import kvbm.manager.copies.workers as workers_module
import kvbm.pools.nvme.pod as pod_module
from kvbm.config import Settings
from kvbm.core.errors import KvbmError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Tier
from kvbm.manager.copies.workers import Workers
from kvbm.manager.used_namespaces import UsedNamespaces
from kvbm.pools.base import ReadOutcome, ReadResult
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.tenant_keys import keys_of_file, parse_keys
from tests.faults.simulator.kernel import NO_THREAD, Process, Shortages, Signal, Thread, Violation, Waiter, World

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Node

MOST_USED = 48  # namespaces that heartbeats name; scaled down as what the server takes is
MAX_PAYLOAD_BYTES = 4096
PEERS_SHARE = 0.4  # of runs in which instances read from each other, too
POD_SHARE = 0.5  # of machines that keep their NVME in a pod's folder
CLOSED_IN_S = 40.0  # so long a close in a handler may take
LEFT_IN_S = 20.0  # and threads of an open that failed
TENANT = "other"  # whose secret is in files
KEYS_LOOK_S, POD_POLL_S = 0.3, 0.2  # runs are short: what changes in files is seen within them
TENANTS = Namespace(model="sim", revision="r1", block_tokens=16, tenant=TENANT)

WITH_KEYS = (TENANTS, Namespace(model="sim", revision="r1", block_tokens=16))

_INTERRUPTS = (KeyboardInterrupt, TimeoutError)


class Interrupted(Exception):
    """A signal's handler has raised in a call of the manager."""


class Keys(NamedTuple):
    """What a process has read of keys: for NVME, and for objects."""

    process: Process
    of_slots: SlotKeys
    of_objects: Sealing


class Limits:
    """See the module.

    Args:
        seed: of the run; the other draws of a run know nothing of these.

    Attributes:
        secret: of the tenant, as files have it.
        has_pods: machines keep their NVME in folders of pods, which other instances may join. has_keys: they read keys
            from files.
        keys: how many each tenant has there; the last is the one to seal with.
        reached: how often what runs out did, by what it was.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed ^ 0x11317)
        self.has_peers = self.rng.random() < PEERS_SHARE
        self.idle_s = self.rng.choice((0.02, 0.2, workers_module._IDLE_S))
        self.heartbeat_s = self.rng.choice((0.1, 0.25))
        self.secret = "s"
        self.has_pods = self.has_keys = False
        self.keys = 1
        self.reached: Counter[str] = Counter()

    def prepare(self, kinds: Collection[str]) -> None:
        """Say which faults are to come: some need what other runs do without."""
        self.has_pods, self.has_keys = "pod_mate" in kinds, "change_keys" in kinds
        self.has_peers = self.has_peers and not self.has_pods  # what comes from a pod is no read from a peer

    def shortages(self) -> Shortages:
        """Of one machine."""
        return Shortages(random.Random(self.rng.getrandbits(32)), self.reached)

    @contextmanager
    def scaled_down(self) -> Iterator[None]:
        """Threads of loads end soon, so that others are started again and again, as where requests are few."""
        before, workers_module._IDLE_S = workers_module._IDLE_S, self.idle_s
        poll_s, pod_module.POLL_S = pod_module.POLL_S, POD_POLL_S if self.has_pods else pod_module.POLL_S
        replace_stuck = Workers.replace_stuck

        def counted(workers: Workers) -> None:
            self.reached["stuck"] += 1
            replace_stuck(workers)

        Workers.replace_stuck = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            workers_module._IDLE_S = before
            pod_module.POLL_S = poll_s
            Workers.replace_stuck = replace_stuck  # type: ignore[method-assign]

    def settings(self, settings: Settings, folder: Path) -> Settings:
        """The settings of an instance on one machine: with a file of secrets, perhaps with its NVME in a folder of a
        pod.
        """
        replace, wanted = msgspec.structs.replace, settings.pools
        if not wanted.host.slots:
            wanted = replace(wanted, host=replace(wanted.host, slots=8))  # there is something to load from
        if self.has_pods and not settings.journal.in_memory:
            wanted = replace(wanted, nvme=replace(wanted.nvme, slots=wanted.nvme.slots or 12))
        if wanted.nvme.slots and (self.rng.random() < POD_SHARE or self.has_pods):
            (folder / "pod").mkdir(exist_ok=True)
            wanted = replace(wanted, nvme=replace(wanted.nvme, folder=str(folder / "pod")))
        if self.has_keys:
            self.write_keys(folder)
        catalog = settings.catalog
        if catalog.tenant_secrets.get(TENANT) == "right":
            catalog = replace(catalog, tenant_secrets_file=str(self.write_secret(folder)))
        return replace(
            settings, pools=wanted, catalog=catalog, nats=replace(settings.nats, heartbeat_s=self.heartbeat_s)
        )

    def write_secret(self, folder: Path) -> Path:
        """Write the file of secrets of one machine.

        Another secret has another length: clocks of file systems are no part of a run.
        """
        path = folder / "secrets.toml"
        path.write_text(f'[tenants.{TENANT}]\nsecret = "{self.secret}"\n')
        return path

    def write_keys(self, folder: Path) -> Path:
        """Write the file of tenants' keys of one machine. With another key it is longer."""
        path = folder / "keys.toml"
        path.write_text(self._keys_text())
        return path

    def sealing_key(self, tenant: str) -> bytes:
        """The id of the key that a tenant's blocks are to be sealed with, as those files have it."""
        return parse_keys(self._keys_text(), "keys")[tenant].current

    def _keys_text(self) -> str:
        keys = [_key_text(number) for number in range(self.keys)]
        lines = [f"keys.k{number} = {key!r}\n" for number, key in enumerate(keys)]
        entry = f"names = {_key_text(-1)!r}\ncurrent = 'k{self.keys - 1}'\n{''.join(lines)}"
        return "".join(f"[tenants.{json.dumps(one.tenant)}]\n{entry}" for one in WITH_KEYS)

    def _read_keys(self, node: Node) -> None:
        """Have a process read keys as its pools do, again and again; what they seal is no part of the run.

        In a thread of its own.
        """
        source = keys_of_file(str(node.machine.disk.folder / "keys.toml"))
        while True:
            try:
                of_slots = SlotKeys(source, WITH_KEYS, KEYS_LOOK_S)
                of_slots.start()
                of_objects = Sealing(source, 1, 64)
                break
            except (KvbmError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and NO_THREAD not in str(error):
                    raise
                self.reached["keys_unread"] += 1
                Waiter(self.world).wait(0.3)
        assert node.process is not None
        node.keys = Keys(node.process, of_slots, of_objects)

        def watch() -> None:
            while True:
                Waiter(self.world).wait(KEYS_LOOK_S)
                of_objects.refresh()

        node.spawn(node.process, watch, "object-keys")

    def watch_pod(self, pod: Any, nap: Callable[[], None]) -> None:
        """Have reads of a pod's other instances take time, and count what they bring."""
        read = pod.read

        def slow(*args: Any, **more: Any) -> ReadResult:
            nap()  # who owns what its hints named goes on meanwhile
            result: ReadResult = read(*args, **more)
            self.reached["pod_blocks"] += result.outcomes.count(ReadOutcome.GOOD)
            nap()
            return result

        pod.read = slow

    def opened(self, node: Node, manager: Any) -> None:
        """A manager has opened: what it remembers of names is scaled down."""
        assert isinstance(manager._namespaces, UsedNamespaces)
        manager._namespaces._most = MOST_USED
        if self.has_keys:
            self._read_keys(node)

    def not_opened(self, process: Process) -> None:
        """An open has failed: none of its threads may stay."""
        self.reached["unopened"] += 1
        left = [thread for thread in process.threads if thread.may_lack]
        since_s = self.world.now

        def check() -> None:
            is_spared = process.frozen or process.thawed_s >= since_s or not process.alive
            if not is_spared and (still := sorted(thread.name for thread in left if thread.is_alive())):
                Violation(f"threads of {process} stay though it could not be opened: {', '.join(still)}")

        if left:
            self.world.after(LEFT_IN_S, self.world.nature, check)


def name_of(instance: str, number: int) -> tuple[Namespace, bytes]:
    """A namespace of a tenant that somebody has just made up, and a block in it."""
    tenant = f"{instance}-{number}"
    namespace = Namespace(model="sim", revision="r1", block_tokens=16, tenant=tenant)
    return namespace, hashlib.sha256(tenant.encode()).digest()[:HASH_BYTES]


class Signalled:
    """A manager as an engine's thread calls it, some of whose calls a signal interrupts; see the module.

    Args:
        closes: what a handler does instead of raising, where it closes.
    """

    def __init__(self, manager: Any, node: Node, closes: Callable[[Any], None]) -> None:
        self._manager, self._node, self._closes = manager, node, closes
        self._rng = random.Random(node.cluster.limits.rng.getrandbits(32))  # type: ignore[union-attr]
        self._pinned: Counter[int] = Counter()
        self._allocated: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    # -- what an engine calls -----------------------------------------------------------------------------------------

    def acquire(self, namespace: NamespaceId, hashes: bytes) -> Any:
        prefix = self._call(self._manager.acquire, namespace, hashes, points=8)
        self._pinned.update(prefix.slots)
        return prefix

    def allocate(self, count: int) -> list[int] | None:
        slots: list[int] | None = self._call(self._manager.allocate, count)
        self._allocated.update(slots or ())
        return slots

    def create(
        self, namespace: NamespaceId, parent: bytes, start: int, hashes: bytes, slots: Sequence[int]
    ) -> list[int]:
        holders: list[int] = self._call(self._manager.create, namespace, parent, start, hashes, slots)
        self._allocated.difference_update(slots)
        self._pinned.update(holders)
        return holders

    def unpin(self, slots: Sequence[int]) -> None:
        self._call(self._manager.unpin, slots)
        self._pinned.subtract(slots)

    def release(self, slots: Sequence[int]) -> None:
        self._call(self._manager.release, slots)
        self._allocated.difference_update(slots)

    def evict(self, tier: Tier, hashes: bytes) -> int:
        count: int = self._call(self._manager.evict, tier, hashes, points=3)
        return count

    def keep(self, hashes: bytes, ttl_s: float, priority: int) -> int:
        count: int = self._call(self._manager.keep, hashes, ttl_s, priority, points=3)
        return count

    def take_snapshot(self) -> None:
        self._call(self._manager.take_snapshot, points=6)

    def interrupted_call(self, call: Callable[..., Any], *args: Any, points: int = 1) -> Any:
        """A call that a signal may interrupt. Raises Interrupted: it has."""
        return self._call(call, *args, points=points)

    # -- after a signal -----------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """The engine gives up what it was doing.

        A call that was interrupted has done nothing, so what it holds is known.
        """
        pinned, allocated = list(self._pinned.elements()), sorted(self._allocated)
        self._pinned.clear()
        self._allocated.clear()
        if pinned:
            self._manager.unpin(pinned)
        if allocated:
            self._manager.release(allocated)

    def _call(self, call: Callable[..., Any], *args: Any, points: int = 1) -> Any:
        """A call, and perhaps a signal in the middle of it: at the first of so many places, or one behind it.

        Raises: Interrupted: the handler has raised.
        """
        chance, rng = self._node.signals, self._rng
        thread: Thread | None = getattr(greenlet.getcurrent(), "sim_thread", None)
        if thread is None or not chance or rng.random() >= chance:
            return call(*args)
        is_closing = rng.random() < self._node.closing_signals
        kind, limits = rng.choice(_INTERRUPTS), self._node.cluster.limits
        assert limits is not None

        def handler() -> None:
            limits.reached["close" if is_closing else "interrupt"] += 1
            if is_closing:
                self._closes(self._manager)
            else:
                raise kind("from a signal's handler (simulated)")

        thread.signal = Signal(rng.randrange(points), rng.expovariate(50.0), handler)
        try:
            return call(*args)
        except _INTERRUPTS as error:
            raise Interrupted(str(error)) from error
        finally:
            thread.signal = None


def unkept(node: Node) -> str:
    """What of an instance whose engines rest is not as it must be; "" when all is well."""
    manager: Any = node.manager
    return held(manager) or _lost_threads(node, manager) or _unsynced(node) or _old_secret(node) or _old_key(node)


def held(manager: Any) -> str:
    """What is still anybody's."""
    stats = manager.stats()
    if stats.copies_in_flight or manager._copies.running:
        return f"{stats.copies_in_flight} copies have not ended"
    if stats.waiting_requests or stats.late_slots or stats.quarantined_slots:
        return (
            f"{stats.waiting_requests} requests wait, {stats.late_slots} slots are late, {stats.quarantined_slots} "
            "in quarantine"
        )
    manager._ledger.expire(float("inf"))  # what engines keep is theirs
    for tier in manager.pools.slots:
        counts = manager._ledger.counts(tier)
        if counts.held != counts.evictable:
            return f"{counts.held - counts.evictable} blocks in {tier.name} are pinned"
        if counts.allocated or counts.free + counts.held != counts.slots:
            return (
                f"{counts.slots - counts.free - counts.held} slots of {tier.name} are nobody's ({counts.allocated} "
                "allocated)"
            )
    return ""


def _lost_threads(node: Node, manager: Any) -> str:
    """Threads that may never be started again though they do not run."""
    workers = manager._executor
    assert node.process is not None
    running = sum(thread.name == workers._name and thread.is_alive() for thread in node.process.threads)
    if workers._room + running != workers._threads:
        return f"{running} threads of {workers._name} run and {workers._room} may be started, of {workers._threads}"
    return ""


def _unsynced(node: Node) -> str:
    """Hints that other machines of a pod may not see yet."""
    lacking = sorted(Path(path).name for path in node.machine.disk.unsynced)
    return f"{', '.join(lacking)} has not reached its device" if lacking else ""


def _old_secret(node: Node) -> str:
    """Whether it still goes by a secret that its file has no more."""
    cluster, process = node.cluster, node.process
    limits, world = cluster.limits, cluster.world
    if cluster.peers is None or not node.settings.catalog.tenant_secrets_file:
        return ""
    assert limits is not None and process is not None
    if (roots := cluster.peers.roots.get(process)) is None:
        return "it has not opened yet"
    before, world.current = world.current, process  # by its clock
    try:
        root = roots.find(TENANTS)
    finally:
        world.current = before
    return "" if root == TENANTS.root(limits.secret.encode()) else "it goes by a secret that is in no file any more"


def _old_key(node: Node) -> str:
    """Whether it still seals with a key that is not the one of its file."""
    limits, world, keys = node.cluster.limits, node.world, node.keys
    assert limits is not None and node.process is not None
    if not limits.has_keys:
        return ""
    if keys is None or keys.process is not node.process:
        return "it has not read its keys yet"
    before, world.current = world.current, node.process
    try:
        for one in WITH_KEYS:
            wanted, envelope = limits.sealing_key(one.tenant), keys.of_objects.of(one.id, one)
            if keys.of_slots.sealer(one.id, bytes(16)).key_id != wanted:
                return f"it would seal slots of tenant {one.tenant!r} with a key that is not the newest"
            if getattr(envelope, "_current", b"") != wanted:
                return f"it would seal objects of tenant {one.tenant!r} with a key that is not the newest"
    finally:
        world.current = before
    return ""


def _key_text(number: int) -> str:
    return base64.b64encode(hashlib.sha256(f"key {number}".encode()).digest()).decode()


def names_without_end(node: Node, manager: Any, rng: random.Random, is_over: Callable[[], bool]) -> None:
    """What an engine does whose clients make up tenants. In a thread of its own."""
    limits = node.cluster.limits
    assert limits is not None
    try:
        while not is_over():
            for _ in range(rng.randint(1, 40)):
                limits.reached["names"] += 1
                namespace, block = name_of(node.instance, limits.reached["names"])
                manager.declare([namespace])
                if rng.random() < 0.03:
                    node.serve(manager, rng, namespace.id, block)
                elif node.is_owner:
                    manager.begin_acquire(namespace.id, block).release()
                else:
                    manager.acquire(namespace.id, block)
            Waiter(node.world).wait(rng.expovariate(20.0))
    except KvbmError:  # it closes
        return
    except IndexError:
        if not manager._stream.ended:
            raise
