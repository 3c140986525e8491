"""Captures to read again: seeded commands on the real ledger, cut into frames, and ways to change a stream's events."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm.core.codec import Frame, FrameBytes, decode_frame, encode_frame
from kvbm.core.events import Event, EvictReason, MigrateCause, PoolStated
from kvbm.core.fold import Residencies
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Offset,
    Reach,
    SequenceHash,
    Tier,
)
from kvbm.core.results import Copy, Recovered
from kvbm.reference.ledger import Ledger

POOLS = (
    PoolStated(Tier.HBM, 24, 64),
    PoolStated(Tier.HOST, 16, 64),
    PoolStated(Tier.NVME, 20, 64),
    PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, "s3://bucket/kv"),
)
NAMESPACES = (Namespace(model="a", block_tokens=16), Namespace(model="b", block_tokens=16))
BEGIN_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z
SECOND_NS = 1_000_000_000


class Recorded(NamedTuple):
    """One event with its epoch and the digest after it."""

    epoch: Epoch
    event: Event
    digest: int


def chain(prompt: int, depth: int) -> bytes:
    """Packed hashes of one of a few prompts; prompts of a namespace share their first two blocks."""
    space = prompt % len(NAMESPACES)
    labels = [f"{space}/{at if at < 2 else (prompt, at)}" for at in range(depth)]
    return b"".join(hashlib.sha256(label.encode()).digest()[:HASH_BYTES] for label in labels)


class _Driver:
    """Runs random commands against ledgers of one instance, epoch after epoch."""

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.epoch = Epoch(0)
        self.recorded: list[Recorded] = []
        self.cuts: set[int] = set()  # after how many events a frame was cut
        self.ledger = Ledger(POOLS)
        self.fold = Residencies()  # of what was drained
        self.copies: list[Copy] = []
        self.restart()

    def restart(self) -> None:
        if self.epoch and self.random.random() < 0.5:
            self.ledger.stop()
            self.drain()
        kept = self.ledger.residencies.held[Tier.NVME] if self.epoch else {}
        recovered = [
            Recovered(block, held.namespace, held.slot) for block, held in kept.items() if held.slot is not None
        ]
        recovered.sort(key=lambda entry: entry.namespace)
        self.epoch = Epoch(self.epoch + self.random.randint(1, 3))
        self.ledger = Ledger(POOLS)
        self.copies = []
        self.ledger.start(self.epoch, NAMESPACES, recovered={Tier.NVME: recovered})
        self.drain()

    def drain(self) -> None:
        """What waits becomes a frame."""
        for taken in self.ledger.take_frames(InstanceId("driver"), 0):
            for event in decode_frame(taken.data)[0].events:
                self.fold.evolve(event)
                self.recorded.append(Recorded(self.epoch, event, self.fold.digest))
        self.cuts.add(len(self.recorded))

    def step(self) -> None:
        roll = self.random.random()
        if roll < 0.35:
            self.create()
        elif roll < 0.65:
            self.copy()
        elif roll < 0.75:
            self.evict()
        elif roll < 0.85:
            self.ledger.begin_snapshot()
        elif roll < 0.87:
            self.restart()
        elif roll < 0.9:
            space = NAMESPACES[0].id
            self.ledger.forget(Tier.OBJECT, space, chain(0, 2), EvictReason.MISSING)
        self.ledger.step_snapshot(self.random.randint(1, 6))
        if self.random.random() < 0.4:
            self.drain()

    def create(self) -> None:
        prompt, depth = self.random.randrange(12), self.random.randint(1, 8)
        hashes = chain(prompt, depth)
        allocation = self.ledger.allocate(Tier.HBM, depth)
        if allocation is not None:
            namespace = NAMESPACES[prompt % len(NAMESPACES)].id
            slots = self.ledger.create(namespace, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots)
            self.ledger.unpin(Tier.HBM, slots)

    def copy(self) -> None:
        if self.copies and self.random.random() < 0.6:
            copy = self.copies.pop(self.random.randrange(len(self.copies)))
            arrived = [self.random.random() < 0.9 for _ in range(len(copy.hashes) // HASH_BYTES)]
            is_kept = copy.target == Tier.OBJECT or self.random.random() < 0.7
            self.ledger.end_copy(copy, arrived, MigrateCause.OFFLOAD, is_kept)
            return
        ways = [(Tier.HBM, Tier.HOST), (Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HBM), (Tier.HBM, Tier.OBJECT)]
        source, target = self.random.choice(ways)
        held = self.ledger.residencies.held[source]
        namespace = self.random.choice(NAMESPACES).id
        blocks = [block for block in held if held[block].namespace == namespace][: self.random.randint(1, 8)]
        begun = self.ledger.begin_copy(namespace, source, target, b"".join(blocks)) if blocks else None
        if begun is not None:
            self.copies.append(begun)

    def evict(self) -> None:
        tier = self.random.choice([Tier.HBM, Tier.HOST, Tier.NVME])
        held = list(self.ledger.residencies.held[tier])
        blocks = self.random.sample(held, min(len(held), self.random.randint(1, 4)))
        self.ledger.evict(tier, b"".join(blocks), self.random.choice([EvictReason.TTL, EvictReason.CLEARED]))


class Capture(NamedTuple):
    """One instance's events, and after how many of them each frame ends."""

    instance: InstanceId
    recorded: list[Recorded]
    cuts: list[int]

    def frames(self) -> list[Frame]:
        """The frames, with offsets and digests as they follow from the events."""
        frames: list[Frame] = []
        offset, begin = 0, 0
        for number, end in enumerate(self.cuts):
            run = self.recorded[begin:end]
            offset = 0 if not frames or frames[-1].epoch != run[0].epoch else offset
            frames.append(
                Frame(
                    instance=self.instance,
                    epoch=run[0].epoch,
                    first_offset=Offset(offset),
                    wall_time_ns=BEGIN_NS + number * SECOND_NS,
                    digest=run[-1].digest,
                    events=tuple(entry.event for entry in run),
                )
            )
            offset, begin = offset + len(run), end
        return frames

    def frame_of(self, index: int) -> int:
        """The number of the frame that has the event."""
        return next(number for number, end in enumerate(self.cuts) if index < end)

    def insert(self, index: int, event: Event) -> Capture:
        """With one more event before `index`; later offsets move on by one, digests stay."""
        before = self.recorded[index - 1]
        made = [*self.recorded[:index], Recorded(before.epoch, event, before.digest), *self.recorded[index:]]
        return Capture(self.instance, made, [end + 1 if end > index else end for end in self.cuts])

    def replace(self, changes: dict[int, Event | None]) -> Capture:
        """With events changed, or removed where None; later offsets close up, digests stay."""
        made: list[Recorded] = []
        cuts: list[int] = []
        for index, entry in enumerate(self.recorded):
            event = changes.get(index, entry.event)
            if event is not None:
                made.append(entry._replace(event=event))
            if index + 1 in self.cuts and (not cuts or len(made) > cuts[-1]):
                cuts.append(len(made))
        return Capture(self.instance, made, cuts)

    def held_before(self, index: int) -> Residencies:
        """What is held before an event."""
        fold = Residencies()
        for entry in self.recorded[:index]:
            fold.evolve(entry.event)
        return fold


def make_capture(seed: int, commands: int = 60, instance: str = "one") -> Capture:
    """What an instance records under seeded commands, with several tiers, namespaces, snapshots and restarts."""
    driver = _Driver(random.Random(seed))
    for _ in range(commands):
        driver.step()
    while driver.ledger.step_snapshot():
        pass
    driver.drain()
    return Capture(InstanceId(instance), driver.recorded, sorted(driver.cuts - {0}))


def packed(frames: Iterable[Frame]) -> bytes:
    """A capture file's bytes."""
    return b"".join(encode_frame(frame) for frame in frames)


def frame_bytes(frame: Frame) -> FrameBytes:
    """A frame as a journal takes it."""
    return FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, encode_frame(frame))


def starts(frames: Sequence[Frame]) -> list[int]:
    """Where each frame begins in `packed(frames)`, and where the last one ends."""
    at = [0]
    for frame in frames:
        at.append(at[-1] + len(encode_frame(frame)))
    return at


def some_hash(label: str) -> SequenceHash:
    """A hash no capture holds."""
    return SequenceHash(hashlib.sha256(f"unheld {label}".encode()).digest()[:HASH_BYTES])


NAMESPACE: NamespaceId = NAMESPACES[0].id
