"""A ledger that is given commands as a manager would give them, and Hypothesis strategies for the commands."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import strategies as st

from kvbm.core.codec import Frame, decode_frame, encode_frame
from kvbm.core.events import (
    EvictReason,
    MigrateCause,
    PoolStated,
)
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    Reach,
    SequenceHash,
    Tier,
    pack_slots,
    split_slots,
)
from kvbm.core.policy import EVICTION_POLICIES
from kvbm.core.results import LENT_TIERS, Copy, Recovered
from kvbm.reference.ledger import Ledger

POOLS = (
    PoolStated(Tier.HBM, 7, 64),
    PoolStated(Tier.HOST, 6, 64),
    PoolStated(Tier.NVME, 9, 64),
    PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, "s3://bucket/kv"),
)


NAMESPACES = (Namespace(model="a", block_tokens=16), Namespace(model="b", block_tokens=16))


def chain(prompt: int, depth: int) -> bytes:
    """Hashes of one of a few prompts; prompts of one namespace share their first two blocks."""
    space = prompt % len(NAMESPACES)
    blocks = []
    for position in range(depth):
        label = f"{space}/{position if position < 2 else (prompt, position)}"
        blocks.append(hashlib.sha256(label.encode()).digest()[:HASH_BYTES])
    return b"".join(blocks)


class Driver:
    """Runs commands against a ledger as a manager would, and keeps every frame that was cut."""

    def __init__(self, eviction: str = "lru") -> None:
        self.epoch, self.eviction = Epoch(0), eviction
        self.frames: list[Frame] = []
        self.ledger = Ledger(POOLS, eviction)
        self.copies: list[Copy] = []
        self.pinned: list[bytes] = []
        self.lent: list[tuple[Tier, bytes]] = []
        self.restart()

    def restart(self) -> None:
        old = self.ledger.residencies
        kept = sorted(
            (
                Recovered(block, held.namespace, held.slot)
                for block, held in old.held[Tier.NVME].items()
                if held.slot is not None
            ),
            key=lambda entry: entry.namespace,
        )
        self.epoch = Epoch(self.epoch + 1)
        self.ledger = Ledger(POOLS, self.eviction)
        self.copies, self.pinned, self.lent = [], [], []
        self.ledger.start(self.epoch, NAMESPACES, recovered={Tier.NVME: kept})
        self.cut()

    def cut(self) -> None:
        for taken in self.ledger.take_frames(InstanceId("i"), 7):
            frame, end = decode_frame(taken.data)
            assert (end, encode_frame(frame)) == (len(taken.data), taken.data)
            assert taken[:3] == (frame.epoch, frame.first_offset, frame.next_offset)
            self.frames.append(frame)
        assert not self.frames or self.frames[-1].next_offset == self.ledger.applied

    def prefill(self, prompt: int, depth: int) -> None:
        hashes = chain(prompt, depth)
        namespace = NAMESPACES[prompt % len(NAMESPACES)].id
        found = self.ledger.match(hashes)
        held = len(found.tiers) - len(found.tiers.lstrip(bytes([Tier.HBM])))
        slots = self.ledger.match(hashes[: held * HASH_BYTES], pinned=True).slots
        assert slots == found.slots[: held * SLOT_BYTES]
        allocation = self.ledger.allocate(Tier.HBM, depth - held)
        if allocation is None:
            self.ledger.unpin(Tier.HBM, slots)
            return
        parent = SequenceHash(hashes[(held - 1) * 16 : held * 16]) if held else NO_PARENT
        slots = slots + self.ledger.create(namespace, Tier.HBM, parent, held, hashes[held * 16 :], allocation.slots)
        self.pinned.append(slots)

    def lend(self, give_back: bool, which: int, depth: int) -> None:
        """Lend blocks of a prompt, or take back what was lent."""
        if give_back:
            if self.lent:
                self.ledger.unpin(*self.lent.pop(which % len(self.lent)))
            return
        prompt = which % 6
        lent = self.ledger.lend(NAMESPACES[prompt % len(NAMESPACES)].id, chain(prompt, depth))
        for tier in LENT_TIERS:
            placed = zip(lent.tiers, split_slots(lent.slots), strict=True)
            self.lent.append((tier, pack_slots(slot for at, slot in placed if at == tier)))

    def begin_copy(self, source: Tier, target: Tier, prompt: int, depth: int) -> None:
        if source != target:
            namespace = NAMESPACES[prompt % len(NAMESPACES)].id
            copy = self.ledger.begin_copy(namespace, source, target, chain(prompt, depth))
            if copy is not None:
                self.copies.append(copy)

    def run(self, command: tuple[Any, ...]) -> None:
        match command:
            case ("prefill", prompt, depth):
                self.prefill(prompt, depth)
            case ("finish", which) if self.pinned:
                self.ledger.unpin(Tier.HBM, self.pinned.pop(which % len(self.pinned)))
            case ("copy", source, target, prompt, depth):
                self.begin_copy(source, target, prompt, depth)
            case ("arrive", which, mask, kept):
                if self.copies:
                    copy = self.copies.pop(which % len(self.copies))
                    arrived = [bool(mask >> i & 1) for i in range(len(copy.hashes) // 16)]
                    cause = MigrateCause.OFFLOAD if copy.source < copy.target else MigrateCause.ONBOARD
                    self.ledger.end_copy(copy, arrived, cause, kept or copy.source == Tier.OBJECT)
            case ("evict", tier, prompt, depth):
                self.ledger.evict(tier, chain(prompt, depth), EvictReason.CLEARED)
            case ("keep", tier, prompt, depth, until_s, priority):
                self.ledger.keep(tier, chain(prompt, depth), until_s, priority)
            case ("lend", give_back, which, depth):
                self.lend(give_back, which, depth)
            case ("expire", now_s):
                self.ledger.expire(now_s)
            case ("missing" | "found" as what, prompt, depth):
                namespace = NAMESPACES[prompt % len(NAMESPACES)].id
                if what == "missing":
                    self.ledger.forget(Tier.OBJECT, namespace, chain(prompt, depth), EvictReason.MISSING)
                else:
                    self.ledger.claim(Tier.OBJECT, namespace, chain(prompt, depth), InstanceId("i"))
            case ("snapshot",):
                self.ledger.begin_snapshot()
            case ("step", limit):
                self.ledger.step_snapshot(limit)
            case ("cut" | "restart" as what,):
                self.cut()
                if what == "restart":
                    self.restart()


slot_tiers = st.sampled_from([Tier.HBM, Tier.HOST, Tier.NVME])
prompts = st.integers(0, 5)
depths = st.integers(1, 5)
commands = st.one_of(
    st.tuples(st.just("prefill"), prompts, depths),
    st.tuples(st.just("prefill"), prompts, depths),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("copy"), slot_tiers, st.sampled_from(list(Tier)), prompts, depths),
    st.tuples(st.just("copy"), st.just(Tier.OBJECT), st.sampled_from([Tier.HBM, Tier.HOST]), prompts, depths),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.integers(0, 31), st.booleans()),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.just(31), st.just(True)),
    st.tuples(st.just("evict"), slot_tiers, prompts, depths),
    st.tuples(st.just("keep"), slot_tiers, prompts, depths, st.integers(0, 9), st.sampled_from([0, 50, 100])),
    st.tuples(st.just("lend"), st.booleans(), st.integers(0, 9), depths),
    st.tuples(st.just("expire"), st.integers(0, 9)),
    st.tuples(st.just("missing"), prompts, st.just(1)),
    st.tuples(st.just("found"), prompts, depths),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cut")),
    st.tuples(st.just("restart")),
)


evictions = st.sampled_from(sorted(EVICTION_POLICIES))


def finish_snapshot(driver: Driver, limit: int) -> None:
    while driver.ledger.step_snapshot(limit):
        pass
    driver.cut()
