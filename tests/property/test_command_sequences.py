"""Arbitrary command sequences: the journal replays to the live state, snapshots heal readers, frames re-encode to
themselves, and an overflow ends all that without touching the engine.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.core.codec import FRAME_EVENT_BYTES, encoded_bytes
from kvbm.core.errors import IllegalEventError
from kvbm.core.events import (
    Event,
    InstanceStopped,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import (
    DURABLE_TIERS,
    NamespaceId,
    SequenceHash,
    Tier,
    split_hashes,
)
from kvbm.reference.ledger import Ledger
from tests.examples import examples
from tests.held import recomputed_digest
from tests.ledger_driver import (
    POOLS,
    Driver,
    commands,
    evictions,
    finish_snapshot,
)

thorough = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
    """Every slot is free, allocated, held or orphaned, and only one of them; only what is held can be kept or
    evictable.
    """
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
def test_a_snapshot_changes_nothing_for_a_reader_in_step(
    before: list[tuple[Any, ...]], during: list[tuple[Any, ...]], limit: int
) -> None:
    driver = Driver()
    for command in before:
        driver.run(command)
    finish_snapshot(driver, limit)
    strict = Residencies(strict=True)
    for event in all_events(driver):
        strict.evolve(event)
    told = len(driver.frames)
    driver.ledger.begin_snapshot()
    for command in [c for c in during if c[0] != "restart"]:
        driver.ledger.step_snapshot(limit)
        driver.run(command)
    finish_snapshot(driver, limit)
    for event in all_events(driver, told):
        strict.evolve(event)  # strict refuses a snapshot that adds, moves or withdraws anything
    assert held_by(strict) == held_by(driver.ledger.residencies)


@thorough
@given(st.lists(commands, max_size=40), st.lists(commands, max_size=20), st.data())
def test_a_snapshot_heals_a_reader_that_missed_events(
    before: list[tuple[Any, ...]], during: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    driver = Driver()
    for command in [*before, ("cut",)]:
        driver.run(command)
    finish_snapshot(driver, 3)
    reader = Residencies(strict=False)
    seen = [event for frame in driver.frames if frame.epoch == driver.epoch for event in frame.events]
    missed = data.draw(st.sets(st.integers(0, max(0, len(seen) - 1))))
    reader.begin_blind(driver.epoch)
    for index, event in enumerate(seen):
        if index not in missed:
            reader.evolve(event)
    reader.miss_events()
    told = len(driver.frames)
    driver.ledger.begin_snapshot()
    for command in [c for c in during if c[0] != "restart"]:
        driver.ledger.step_snapshot(2)
        driver.run(command)
    finish_snapshot(driver, 2)
    for event in all_events(driver, told):
        reader.evolve(event)
    assert held_by(reader) == held_by(driver.ledger.residencies)
    assert reader.digest == driver.ledger.residencies.digest
    assert all(reader.is_whole(pool.tier) for pool in POOLS[:3])


@thorough
@given(st.lists(commands, max_size=40))
def test_a_snapshot_that_skips_a_run_is_refused(script: list[tuple[Any, ...]]) -> None:
    driver = Driver()
    for command in script:
        driver.run(command)
    finish_snapshot(driver, 2)
    told = len(driver.frames)
    fold = Residencies(strict=True)
    for event in all_events(driver):
        fold.evolve(event)
    driver.ledger.begin_snapshot()
    finish_snapshot(driver, 2)
    events = all_events(driver, told)
    runs = [i for i, e in enumerate(events) if isinstance(e, ResidenciesListed)]
    if not runs:
        return
    skipped = events.pop(runs[-1])
    assert isinstance(skipped, ResidenciesListed)
    ended = next(i for i, e in enumerate(events) if isinstance(e, SnapshotEnded) and e.tier == skipped.tier)
    end = events[ended]
    assert isinstance(end, SnapshotEnded)
    left = end.count - len(split_hashes(skipped.hashes))
    if not left:
        return  # an empty snapshot clears the tier, which is legal; the frame's digest tells
    for event in events[:ended]:
        fold.evolve(event)
    with pytest.raises(IllegalEventError) as refused:
        fold.evolve(SnapshotEnded(tier=end.tier, snapshot=end.snapshot, count=left))
    assert refused.value.rule == "snapshot-withdrew"


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
