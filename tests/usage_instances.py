"""Instances whose usage is recorded by hand, on a clock that a test moves, with tenants of hostile names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from kvbm import _native
from kvbm.core.backend import LedgerProtocol
from kvbm.core.codec import Frame, FrameBytes, decode_frame
from kvbm.core.events import EvictReason, MigrateCause, PoolStated, UsageRecorded
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Reach, Tier
from kvbm.core.usage import UsageMeter
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.usage_account import UsageAccount, UsagePlan
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from tests.captures import some_hash

INSTANCE = InstanceId("engine-1")
POOLS = (
    PoolStated(Tier.HBM, 24, 4096),
    PoolStated(Tier.HOST, 40, 4096),
    PoolStated(Tier.NVME, 60, 4096),
    PoolStated(Tier.OBJECT, 0, 4096, Reach.CLUSTER, "s3://bucket/kv"),
)
TENANTS = ("acme", "", 'a,"b"\n', "=1+1", "\x1b[2Jé", "ü" * 127)
SPACES = [Namespace(model="tiny", block_tokens=16, revision="1", tenant=tenant) for tenant in TENANTS]
LATE = Namespace(model="tiny", block_tokens=32, revision="1", tenant="late")  # nobody tells of it
BEGUN_MS = 1_790_000_000_000


class Clock:
    """A wall clock that a test moves."""

    def __init__(self) -> None:
        self.ms = BEGUN_MS

    def __call__(self) -> int:
        return self.ms * 1_000_000 + 999_999  # below a millisecond nothing counts


class Driven(NamedTuple):
    """An instance whose stream is taken by hand."""

    stream: LedgerStream
    account: UsageAccount
    clock: Clock
    takes: list[tuple[int, list[FrameBytes]]]

    @property
    def frames(self) -> list[FrameBytes]:
        return [frame for _, frames in self.takes for frame in frames]

    def take(self) -> None:
        self.takes.append((self.clock.ms, self.stream.take()))

    def events(self) -> list[UsageRecorded]:
        return [one for frame in decoded(self.frames) for one in frame.events if isinstance(one, UsageRecorded)]


def decoded(frames: list[FrameBytes]) -> list[Frame]:
    return [decode_frame(frame.data)[0] for frame in frames]


def driven(
    new_ledger: Callable[..., LedgerProtocol] = _native.Ledger,
    new_meter: Callable[[int], UsageMeter] = _native.UsageMeter,
    every_s: int = 3600,
    epoch: int = 1,
    clock: Clock | None = None,
    event_bytes: int = 64 << 20,
    instance: InstanceId = INSTANCE,
) -> Driven:
    """A started instance of which nothing was taken."""
    clock = clock or Clock()
    ledger = new_ledger(POOLS, "lru", event_bytes)
    ledger.start(Epoch(epoch), SPACES)
    account = UsageAccount(UsagePlan(new_meter, every_s), POOLS, RevisionedNamespaces(SPACES))
    stream = LedgerStream(instance, ledger, clock, usage=account)
    return Driven(stream, account, clock, [])


def do_something(ledger: LedgerProtocol, rng: random.Random, spaces: list[Namespace]) -> None:
    """One legal command of an engine."""
    namespace = rng.choice(spaces).id
    kind = rng.randrange(6)
    blocks = [some_hash(f"{namespace.hex()}-{rng.randrange(40)}") for _ in range(rng.randint(1, 4))]
    hashes = b"".join(dict.fromkeys(blocks))
    if kind <= 2:
        hashes = ledger.lacking(Tier.HBM, hashes)
        count = len(hashes) // HASH_BYTES
        allocated = ledger.allocate(Tier.HBM, count, namespace) if count else None
        if allocated is not None:
            held = ledger.create(namespace, Tier.HBM, NO_PARENT, 0, hashes, allocated.slots)
            ledger.unpin(Tier.HBM, held)
    elif kind <= 4:
        source, target, cause = rng.choice(
            [
                (Tier.HBM, Tier.HOST, MigrateCause.OFFLOAD),
                (Tier.HOST, Tier.NVME, MigrateCause.OFFLOAD),
                (Tier.HOST, Tier.OBJECT, MigrateCause.OFFLOAD),
                (Tier.NVME, Tier.HBM, MigrateCause.ONBOARD),
                (Tier.HOST, Tier.HBM, MigrateCause.ONBOARD),
            ]
        )
        copy = ledger.begin_copy(namespace, source, target, hashes)
        if copy is not None:
            arrived = [rng.random() < 0.9 for _ in range(len(copy.hashes) // HASH_BYTES)]
            ledger.end_copy(copy, arrived, cause, kept=rng.random() < 0.7)
    else:
        ledger.evict(rng.choice([Tier.HBM, Tier.HOST, Tier.NVME]), hashes, EvictReason.CLEARED)
    if rng.random() < 0.1 and ledger.begin_snapshot():
        while ledger.step_snapshot(3):
            pass
