"""A manager on memory pools, driven as an engine would drive it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import numpy as np

from kvbm.assembly import NATIVE
from kvbm.core.backend import NewLedger
from kvbm.core.codec import decode_frame
from kvbm.core.events import Event, PoolStated
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Reach,
    SequenceHash,
    Tier,
)
from kvbm.core.policy import WriteBudget, WriteThrough
from kvbm.locate.base import FoundElsewhere, Locator, Nowhere
from kvbm.manager.copies.staging import Staging
from kvbm.manager.copies.transfer import Pools
from kvbm.manager.offload.queue import Offloader, PromptLimits
from kvbm.manager.onboard.loads import Prefix
from kvbm.manager.options import ManagerOptions
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.record.event_writer import FrameSink
from kvbm.manager.record.journal_retention import JournalRetention
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.prompt_samples import SampleSink
from kvbm.manager.record.snapshot_policy import SnapshotPolicy
from kvbm.manager.record.usage_account import UsagePlan
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.pools.base import ObjectPool, PodPool, Proof, SlotPool
from kvbm.pools.memory import MemoryPool
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Position
from kvbm.streams.memory import MemoryLog
from kvbm.transport.peers import Peers
from tests.eventually import eventually

BLOCK_BYTES = 64
NAMESPACE = Namespace(model="test", revision="r1", block_tokens=16)


def hashes_of(prompt: int, depth: int, start: int = 0) -> bytes:
    """Packed hashes of blocks start … depth - 1 of a prompt."""
    return b"".join(hashlib.sha256(f"{prompt}/{i}".encode()).digest()[:HASH_BYTES] for i in range(start, depth))


def rows_of(hashes: bytes) -> np.ndarray:
    """The bytes a block must have: its hash, repeated."""
    return np.tile(np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES), BLOCK_BYTES // HASH_BYTES)


class KnowsAll(Locator):
    """Claims that the object pool has everything; what it does not have is `missing`."""

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        return FoundElsewhere(len(hashes) // HASH_BYTES)

    def claimed(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> bytes:
        return b"\xff" * -(-len(hashes) // HASH_BYTES // 8)

    def close(self) -> None:
        return


def make_manager(
    slots: dict[Tier, int],
    *,
    sink: FrameSink | None = None,
    objects: ObjectPool | None = None,
    locator: Locator | None = None,
    wait_s: float = 60.0,
    wrap: Callable[[SlotPool], SlotPool] = lambda pool: pool,
    offload: tuple[Tier, ...] = (Tier.HOST, Tier.NVME, Tier.OBJECT),
    clock: Callable[[], float] = time.monotonic,
    event_bytes: int = 64 << 20,
    by_hand: bool = False,
    retention: JournalRetention | None = None,
    snapshots: SnapshotPolicy | None = None,
    samples: SampleSink | None = None,
    executor: Executor | None = None,
    offsets: Offsets | None = None,
    has_stream: bool = False,
    new_ledger: NewLedger = Ledger,
    staging: Staging | None = None,
    pod: PodPool | None = None,
    instance: str = "test",
    epoch: int = 1,
    queue_blocks: int = 8192,
    budgets: Mapping[Tier, WriteBudget] | None = None,
    peers: Peers | None = None,
    usage: UsagePlan | None = None,
    wall_clock_ns: Callable[[], int] = time.time_ns,
) -> Manager:
    """A manager with memory pools of the given sizes, started unless it is driven by hand."""
    pools = Pools({t: wrap(MemoryPool(t, n, BLOCK_BYTES, NATIVE.checksums)) for t, n in slots.items()}, objects, pod)
    pools = pools._replace(peers=peers)
    listed = [PoolStated(tier, count, BLOCK_BYTES) for tier, count in slots.items()]
    if objects is not None:
        listed.append(PoolStated(Tier.OBJECT, 0, BLOCK_BYTES, Reach.CLUSTER, objects.name))
    ledger = new_ledger(listed, "lru", event_bytes)
    ledger.start(Epoch(epoch), [NAMESPACE])
    there = {tier for tier in offload if tier in slots or (tier == Tier.OBJECT and objects is not None)}
    manager = Manager(
        InstanceId(instance),
        "tests",
        ledger,
        pools,
        sink or MemoryLog(),
        NATIVE,
        Offloader(
            {tier: WriteThrough() for tier in there},
            ledger.lacking,
            queue_blocks,
            object_blocks=pools.object_blocks,
            limits=PromptLimits(slots),
        ),
        locator or Nowhere(),
        ManagerOptions(
            wait_s,
            clock=clock,
            wall_clock_ns=wall_clock_ns,
            usage=usage,
            staging=staging,
            retention=retention,
            snapshots=snapshots,
            samples=samples,
            executor=executor,
            offsets=offsets,
            run="a-run",
            has_stream=has_stream,
            budgets=budgets or {},
            revisioned=RevisionedNamespaces([NAMESPACE], all_may=True),
        ),
    )
    if not by_hand:
        manager.start()
    return manager


class Served:
    """One prompt that was served: which blocks came from where, and its pinned slots."""

    def __init__(self, prefix: Prefix, slots: list[int]) -> None:
        self.prefix, self.slots = prefix, slots


def serve(manager: Manager, prompt: int, depth: int, keep: bool = False) -> Served:
    """Acquire, check every byte, compute the rest, create, unpin, as an engine does for one prompt."""
    hashes = hashes_of(prompt, depth)
    prefix = manager.acquire(NAMESPACE.id, hashes)
    check_bytes(manager, hashes[: prefix.depth * HASH_BYTES], prefix.slots)
    allocated: list[list[int] | None] = []

    def is_allocated() -> bool:  # offloads may pin slots for a moment
        allocated.append(manager.allocate(depth - prefix.depth))
        return allocated[-1] is not None

    eventually(is_allocated, "HBM stays short", state=manager.stats)
    fresh = allocated[-1]
    slots = prefix.slots
    if fresh:
        rest = hashes[prefix.depth * HASH_BYTES :]
        rows = rows_of(rest)
        proof = Proof(NAMESPACE.id, Epoch(1), rest, NATIVE.checksums(rows))
        manager.pools.slots[Tier.HBM].write(fresh, rows, proof)
        at = prefix.depth * HASH_BYTES
        parent = SequenceHash(hashes[at - HASH_BYTES : at]) if at else NO_PARENT
        slots = slots + manager.create(NAMESPACE.id, parent, prefix.depth, rest, fresh)
    check_bytes(manager, hashes, slots)
    if not keep:
        manager.unpin(slots)
    return Served(prefix, slots)


def check_bytes(manager: Manager, hashes: bytes, slots: list[int]) -> None:
    """The HBM slots hold exactly these blocks' bytes."""
    if slots:
        rows = np.empty((len(slots), BLOCK_BYTES), dtype=np.uint8)
        manager.pools.slots[Tier.HBM].read(slots, NAMESPACE.id, hashes, rows)
        assert np.array_equal(rows, rows_of(hashes)), "wrong bytes in HBM"


def events_in(log: MemoryLog) -> list[Event]:
    frames = log.read_after(Position(0, 0), 1 << 30)  # type: ignore[arg-type]
    return [event for frame in frames for event in decode_frame(frame.data)[0].events]
