"""Arbitrary command sequences: the journal replays to the live state, rounds heal readers, frames re-encode to themselves, and
an overflow ends all that without touching the engine."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.core.codec import FRAME_EVENT_BYTES, Frame, decode_frame, encode_frame, encoded_bytes
from kvbm.core.errors import IllegalEventError
from kvbm.core.events import (
    Event,
    EvictReason,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesStated,
    RoundEnded,
    StopReason,
)
from kvbm.core.ids import (
    DURABLE_TIERS,
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Reach,
    SequenceHash,
    Tier,
    split_hashes,
)
from kvbm.core.ledger import Copy, Ledger, Recovered
from kvbm.core.policy import EVICTION_POLICIES
from kvbm.core.residency import Residencies
from tests.held import recomputed_digest

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
        self.copies, self.pinned = [], []
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
            case ("finish", which):
                if self.pinned:
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
            case ("expire", now_s):
                self.ledger.expire(now_s)
            case ("missing", prompt):
                namespace = NAMESPACES[prompt % len(NAMESPACES)].id
                self.ledger.forget(Tier.OBJECT, namespace, chain(prompt, 1), EvictReason.MISSING)
            case ("found", prompt, depth):
                namespace = NAMESPACES[prompt % len(NAMESPACES)].id
                self.ledger.claim(Tier.OBJECT, namespace, chain(prompt, depth), InstanceId("i"))
            case ("round",):
                self.ledger.begin_round()
            case ("step", limit):
                self.ledger.step_round(limit)
            case ("cut",):
                self.cut()
            case ("restart",):
                self.cut()
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
    st.tuples(st.just("expire"), st.integers(0, 9)),
    st.tuples(st.just("missing"), prompts),
    st.tuples(st.just("found"), prompts, depths),
    st.tuples(st.just("round")),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cut")),
    st.tuples(st.just("restart")),
)
evictions = st.sampled_from(sorted(EVICTION_POLICIES))
thorough = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def held_by(fold: Residencies) -> dict[Tier, dict[SequenceHash, tuple[NamespaceId, int | None]]]:
    return {tier: {block: (h.namespace, h.slot) for block, h in held.items()} for tier, held in fold.held.items()}


@thorough
@given(st.lists(commands, max_size=60), evictions)
def test_replaying_the_frames_gives_the_live_state(script: list[tuple[Any, ...]], eviction: str) -> None:
    driver = Driver(eviction)
    for command in script:
        driver.run(command)
    driver.cut()
    fold = Residencies(strict=True)
    for frame in driver.frames:
        for event in frame.events:
            fold.evolve(event)
        assert fold.digest == frame.digest
    assert held_by(fold) == held_by(driver.ledger.residencies)
    assert fold.digest == recomputed_digest(fold) == driver.ledger.residencies.digest


@thorough
@given(st.lists(commands, max_size=60), evictions)
def test_no_slot_is_ever_lost_or_given_twice(script: list[tuple[Any, ...]], eviction: str) -> None:
    driver = Driver(eviction)
    for command in script:
        driver.run(command)
        slots_are_whole(driver.ledger)


def slots_are_whole(ledger: Ledger) -> None:
    """Every slot is free, allocated, held or orphaned, and only one of them; only what is held can be kept or evictable."""
    for pool in POOLS[:3]:
        state = ledger._tiers[pool.tier]
        held = [h.slot for h in ledger.residencies.held[pool.tier].values()]
        free = list(state.free) + list(range(state.unused, pool.slots))
        owned = sorted([*held, *free, *state.allocated, *state.orphaned])
        assert owned == list(range(pool.slots)), pool.tier
        assert set(state.kept) <= set(held)
        assert len(state.policy) == sum(slot not in state.pins and slot not in state.kept for slot in held), pool.tier


@thorough
@given(st.lists(commands, max_size=30), st.integers(0, 400), st.lists(commands, max_size=50), evictions)
def test_an_overflow_ends_the_stream_and_nothing_else(
    before: list[tuple[Any, ...]], room_bytes: int, after: list[tuple[Any, ...]], eviction: str
) -> None:
    driver = Driver(eviction)
    for command in before:
        driver.run(command)
    driver.cut()
    driver.ledger._event_bytes = room_bytes + 2
    for command in [c for c in after if c[0] not in ("restart", "cut")]:
        was_over, copies = driver.ledger.overflowed, len(driver.copies)
        driver.run(command)
        if was_over and len(driver.copies) > copies:
            assert driver.copies[-1].target not in DURABLE_TIERS
        slots_are_whole(driver.ledger)
    driver.cut()
    driver.cut()  # hands out nothing more, and the offset stays
    fold = Residencies(strict=True)
    for frame in driver.frames:
        for event in frame.events:
            fold.evolve(event)
        assert fold.digest == frame.digest
    assert fold.stopped == driver.ledger.stopped == driver.ledger.overflowed
    if driver.ledger.overflowed:
        assert driver.frames[-1].events[-1] == InstanceStopped(reason=StopReason.OVERFLOW)
    else:
        assert held_by(fold) == held_by(driver.ledger.residencies)
    assert driver.ledger.digest == recomputed_digest(driver.ledger.residencies)


@thorough
@given(st.lists(commands, max_size=40), st.lists(commands, max_size=20), st.integers(1, 5))
def test_a_round_changes_nothing_for_a_reader_in_step(
    before: list[tuple[Any, ...]], during: list[tuple[Any, ...]], limit: int
) -> None:
    driver = Driver()
    for command in before:
        driver.run(command)
    finish_round(driver, limit)
    strict = Residencies(strict=True)
    for event in all_events(driver):
        strict.evolve(event)
    told = len(driver.frames)
    driver.ledger.begin_round()
    for command in [c for c in during if c[0] != "restart"]:
        driver.ledger.step_round(limit)
        driver.run(command)
    finish_round(driver, limit)
    for event in all_events(driver, told):
        strict.evolve(event)  # strict refuses a round that adds, moves or withdraws anything
    assert held_by(strict) == held_by(driver.ledger.residencies)


@thorough
@given(st.lists(commands, max_size=40), st.lists(commands, max_size=20), st.data())
def test_a_round_heals_a_reader_that_missed_events(
    before: list[tuple[Any, ...]], during: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    driver = Driver()
    for command in [*before, ("cut",)]:
        driver.run(command)
    finish_round(driver, 3)
    reader = Residencies(strict=False)
    seen = [event for frame in driver.frames if frame.epoch == driver.epoch for event in frame.events]
    missed = data.draw(st.sets(st.integers(0, max(0, len(seen) - 1))))
    reader.begin_blind(driver.epoch)
    for index, event in enumerate(seen):
        if index not in missed:
            reader.evolve(event)
    reader.miss_events()
    told = len(driver.frames)
    driver.ledger.begin_round()
    for command in [c for c in during if c[0] != "restart"]:
        driver.ledger.step_round(2)
        driver.run(command)
    finish_round(driver, 2)
    for event in all_events(driver, told):
        reader.evolve(event)
    assert held_by(reader) == held_by(driver.ledger.residencies)
    assert reader.digest == driver.ledger.residencies.digest
    assert all(reader.is_whole(pool.tier) for pool in POOLS[:3])


@thorough
@given(st.lists(commands, max_size=40))
def test_a_round_that_skips_a_run_is_refused(script: list[tuple[Any, ...]]) -> None:
    driver = Driver()
    for command in script:
        driver.run(command)
    finish_round(driver, 2)
    told = len(driver.frames)
    fold = Residencies(strict=True)
    for event in all_events(driver):
        fold.evolve(event)
    driver.ledger.begin_round()
    finish_round(driver, 2)
    events = all_events(driver, told)
    runs = [i for i, e in enumerate(events) if isinstance(e, ResidenciesStated)]
    if not runs:
        return
    skipped = events.pop(runs[-1])
    assert isinstance(skipped, ResidenciesStated)
    ended = next(i for i, e in enumerate(events) if isinstance(e, RoundEnded) and e.tier == skipped.tier)
    end = events[ended]
    assert isinstance(end, RoundEnded)
    left = end.count - len(split_hashes(skipped.hashes))
    if not left:
        return  # an empty round clears the tier, which is legal; the frame's digest tells
    for event in events[:ended]:
        fold.evolve(event)
    with pytest.raises(IllegalEventError) as refused:
        fold.evolve(RoundEnded(tier=end.tier, round=end.round, count=left))
    assert refused.value.rule == "round-withdrew"


def finish_round(driver: Driver, limit: int) -> None:
    while driver.ledger.step_round(limit):
        pass
    driver.cut()


def all_events(driver: Driver, start: int = 0) -> list[Event]:
    return [event for frame in driver.frames[start:] for event in frame.events]


def test_frames_are_cut_at_their_size_and_carry_their_own_digest() -> None:
    driver = Driver()
    for index in range(3000):
        driver.prefill(index % 6, 5)
        driver.run(("finish", 0))
    cut_before = len(driver.frames)
    driver.cut()
    frames = driver.frames[cut_before:]
    assert len(frames) > 1
    assert all(frame.next_offset == after.first_offset for frame, after in pairwise(frames))
    fold = Residencies(strict=True)
    for frame in driver.frames:
        for event in frame.events:
            fold.evolve(event)
        assert fold.digest == frame.digest
        assert sum(map(encoded_bytes, frame.events[:-1])) < FRAME_EVENT_BYTES
