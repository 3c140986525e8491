"""The fold's rules, by name: strict refuses and changes nothing, lenient applies what makes sense and lists the
rest.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvbm.core.errors import IllegalEventError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.fold import Residencies, residency_mix
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Reach, SequenceHash, Tier, pack_slots
from tests.held import recomputed_digest

HBM, HOST, OBJECT = Tier.HBM, Tier.HOST, Tier.OBJECT
MINE = Namespace(model="m", block_tokens=16).id
OTHER = Namespace(model="other", block_tokens=16).id
POOLS = (PoolStated(HBM, 4, 64), PoolStated(HOST, 4, 64), PoolStated(OBJECT, 0, 64, Reach.CLUSTER, "s3://bucket"))


def blocks(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def block(number: int) -> SequenceHash:
    return SequenceHash(blocks(number))


def started(epoch: int = 1) -> InstanceStarted:
    return InstanceStarted(epoch=Epoch(epoch), pools=POOLS)


def created(hashes: bytes, slots: list[int], tier: Tier = HBM, namespace: NamespaceId = MINE) -> BlocksCreated:
    return BlocksCreated(namespace=namespace, tier=tier, hashes=hashes, slots=pack_slots(slots))


def evicted(hashes: bytes, tier: Tier = HBM, namespace: NamespaceId = MINE) -> BlocksEvicted:
    return BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.CLEARED, hashes=hashes)


def migrated(
    hashes: bytes, slots: list[int], source: Tier | InstanceId = HBM, target: Tier = HOST, kept: bool = True
) -> BlocksMigrated:
    return BlocksMigrated(
        namespace=MINE,
        source=source,
        target=target,
        kept=kept,
        cause=MigrateCause.OFFLOAD,
        hashes=hashes,
        slots=pack_slots(slots),
    )


def listed(
    snapshot_: int, hashes: bytes, slots: list[int], tier: Tier = HBM, namespace: NamespaceId = MINE
) -> ResidenciesListed:
    return ResidenciesListed(namespace=namespace, tier=tier, snapshot=snapshot_, hashes=hashes, slots=pack_slots(slots))


def ended(snapshot_: int, count: int, tier: Tier = HBM) -> SnapshotEnded:
    return SnapshotEnded(tier=tier, snapshot=snapshot_, count=count)


# An instance in step: its first snapshot was empty, blocks 1 and 2 are in HBM slots 0 and 1, block 2 in HOST slot 3 as
# well.
BEFORE: list[Event] = [
    started(),
    ended(1, 0),
    ended(1, 0, HOST),
    created(blocks(1, 2), [0, 1]),
    migrated(blocks(2), [3]),
]
OPEN_SNAPSHOT: list[Event] = [listed(2, blocks(1), [0])]
STOPPED: list[Event] = [InstanceStopped(reason=StopReason.SHUTDOWN)]


def fold(events: list[Event], strict: bool = True) -> Residencies:
    made = Residencies(strict)
    for event in events:
        made.evolve(event)
    return made


def state(made: Residencies) -> dict[str, Any]:
    return copy.deepcopy(vars(made))


REFUSED: list[tuple[str, list[Event], Event]] = [
    ("not-started", [], created(blocks(3), [2])),
    ("epoch-not-newer", BEFORE, started(1)),
    ("already-stopped", BEFORE + STOPPED, created(blocks(3), [2])),
    ("created-twice", BEFORE, created(blocks(3, 1), [2, 3])),
    ("slot-reused", BEFORE, created(blocks(3), [1])),
    ("slot-outside", BEFORE, created(blocks(3), [4])),
    ("repeated-in-run", BEFORE, created(blocks(3, 3), [2, 3])),
    ("repeated-in-run", BEFORE, created(blocks(3, 4), [2, 2])),
    ("repeated-in-run", BEFORE, evicted(blocks(1, 1))),
    ("repeated-in-run", BEFORE, migrated(blocks(1, 1), [0, 1])),
    ("repeated-in-run", BEFORE, listed(2, blocks(1, 1), [0, 0])),
    ("repeated-in-run", BEFORE, created(blocks(3, 3), [], OBJECT)),
    ("evicted-unheld", BEFORE, evicted(blocks(1, 3))),
    ("foreign-namespace", BEFORE, evicted(blocks(1), namespace=OTHER)),
    ("moved-nowhere", BEFORE, migrated(blocks(1), [2], HBM, HBM)),
    ("migrated-unheld", BEFORE, migrated(blocks(3), [0])),
    ("migrated-twice", BEFORE, migrated(blocks(2), [0])),
    ("slot-reused", BEFORE, migrated(blocks(1), [3])),
    ("snapshot-added", BEFORE, listed(2, blocks(3), [2])),
    ("moved-silently", BEFORE, listed(2, blocks(1), [3])),
    ("moved-silently", BEFORE, listed(2, blocks(1), [0], namespace=OTHER)),
    ("snapshot-went-back", BEFORE, listed(1, blocks(1), [0])),
    ("snapshot-went-back", BEFORE, ended(1, 2)),
    ("snapshot-incomplete", BEFORE + OPEN_SNAPSHOT, ended(2, 2)),
    ("snapshot-incomplete", BEFORE, ended(2, 1)),
    ("snapshot-withdrew", BEFORE + OPEN_SNAPSHOT, ended(2, 1)),
]


@pytest.mark.parametrize(("rule", "before", "event"), REFUSED, ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSED)])
def test_strict_refuses_by_name_and_nothing_has_changed(rule: str, before: list[Event], event: Event) -> None:
    made = fold(before)
    untouched = state(made)
    with pytest.raises(IllegalEventError) as refused:
        made.evolve(event)
    assert refused.value.rule == rule
    assert state(made) == untouched


LENIENT: list[tuple[str, Event, set[int]]] = [
    ("created-twice", created(blocks(3, 1), [2, 0]), {1, 2, 3}),
    ("moved-silently", created(blocks(1), [3]), {1, 2}),
    ("slot-reused", created(blocks(3), [1]), {1, 3}),
    ("evicted-unheld", evicted(blocks(1, 3)), {2}),
    ("snapshot-added", listed(2, blocks(3), [2]), {1, 2, 3}),
    ("moved-silently", listed(2, blocks(1), [3]), {1, 2}),
    ("snapshot-incomplete", ended(2, 2), {1, 2}),
]


@pytest.mark.parametrize(("rule", "event", "held"), LENIENT, ids=[f"{i}-{case[0]}" for i, case in enumerate(LENIENT)])
def test_lenient_applies_what_makes_sense_and_lists_the_rule(rule: str, event: Event, held: set[int]) -> None:
    made = fold(BEFORE, strict=False)
    delta = made.evolve(event)
    assert rule in [name for name, _ in delta.anomalies]
    assert set(made.held[HBM]) == {block(number) for number in held}
    assert made.digest == recomputed_digest(made)
    occupied = {entry.slot for entry in made.held[HBM].values()}
    assert all(made.slot_owner(HBM, slot) is None for slot in range(4) if slot not in occupied)


def test_lenient_withdraws_what_a_snapshot_left_out_and_says_so() -> None:
    made = fold(BEFORE + OPEN_SNAPSHOT, strict=False)
    delta = made.evolve(ended(2, 1))
    assert [change.hash for change in delta.withdrawn] == [block(2)]
    assert [name for name, _ in delta.anomalies] == ["snapshot-withdrew"]


def test_legal_events_have_no_anomalies_in_either_mode() -> None:
    events = [
        *BEFORE,
        migrated(blocks(1), [0], kept=False),
        evicted(blocks(2)),
        listed(2, blocks(1, 2), [0, 3], HOST),
        created(blocks(4), [0]),
        ended(2, 2, HOST),
        *STOPPED,
        started(2),
    ]
    strict, lenient = Residencies(strict=True), Residencies(strict=False)
    for event in events:
        delta = strict.evolve(event)
        assert delta == lenient.evolve(event)
        assert delta.anomalies == []
        assert strict.digest == recomputed_digest(strict)
    assert (strict.count(), strict.epoch) == (0, 2)


def test_a_block_that_moves_is_gained_and_lost_by_one_event() -> None:
    delta = fold(BEFORE).evolve(migrated(blocks(1), [0], kept=False))
    assert [(change.tier, change.slot) for change in delta.added] == [(HOST, 0)]
    assert [(change.tier, change.slot) for change in delta.withdrawn] == [(HBM, 0)]


def test_bytes_from_another_instance_are_gained_without_a_source_here() -> None:
    made = fold(BEFORE)
    delta = made.evolve(migrated(blocks(7), [0], source=InstanceId("other"), kept=False))
    assert [change.hash for change in delta.added] == [block(7)]
    assert delta.withdrawn == []


def test_claims_pass_through_and_are_held_by_nobody() -> None:
    made = fold(BEFORE)
    digest = made.digest
    assert [change.hash for change in made.evolve(migrated(blocks(1), [], target=OBJECT)).claimed] == [block(1)]
    assert [change.hash for change in made.evolve(evicted(blocks(1, 9), OBJECT)).unclaimed] == [block(1), block(9)]
    assert (made.held[OBJECT], made.digest) == ({}, digest)
    read = migrated(blocks(5), [3], source=OBJECT, target=HBM)
    assert [change.hash for change in fold(BEFORE).evolve(read).claimed] == [block(5)]  # what was read there is there
    for event in (listed(1, blocks(1), [], OBJECT), ended(1, 1, OBJECT), listed(2, blocks(2), [], OBJECT)):
        assert made.evolve(event).withdrawn == []
    assert (made.held[OBJECT], made.digest) == ({}, digest)
    assert made.evolve(started(2)).unclaimed == []


def test_a_new_epoch_withdraws_everything() -> None:
    delta = fold(BEFORE).evolve(started(2))
    assert sorted((change.tier, change.hash) for change in delta.withdrawn) == [
        (HBM, block(1)),
        (HBM, block(2)),
        (HOST, block(2)),
    ]


def test_a_snapshot_in_the_midst_of_events_counts_what_was_gained_since_it_began() -> None:
    made = fold(BEFORE)
    for event in (listed(2, blocks(1), [0]), created(blocks(3), [2]), evicted(blocks(2)), ended(2, 1)):
        assert made.evolve(event).anomalies == []
    assert set(made.held[HBM]) == {block(1), block(3)}


def test_an_empty_snapshot_clears_a_tier() -> None:
    made = fold(BEFORE)
    assert [change.hash for change in made.evolve(ended(2, 0)).withdrawn] == [block(1), block(2)]
    assert set(made.held[HOST]) == {block(2)}


def test_a_reader_that_missed_events_is_whole_after_the_next_whole_snapshot_and_not_after_one_under_way() -> None:
    made = fold([*BEFORE, *OPEN_SNAPSHOT], strict=False)
    made.miss_events()
    assert [name for name, _ in made.evolve(ended(2, 1)).anomalies] == ["snapshot-incomplete"]
    assert not made.is_whole(HBM)
    made.evolve(listed(3, blocks(1), [0]))
    delta = made.evolve(ended(3, 1))
    assert (delta.anomalies, [change.hash for change in delta.withdrawn]) == ([], [block(2)])
    assert made.is_whole(HBM)


def test_a_reader_that_enters_blind_holds_nothing_and_is_whole_nowhere() -> None:
    made = fold(BEFORE, strict=False)
    assert len(made.begin_blind(Epoch(5)).withdrawn) == 3
    assert (made.count(), made.epoch, made.digest) == (0, 5, 0)
    assert not any(made.is_whole(tier) for tier in Tier)


def test_the_digest_is_the_sum_of_its_residencies_whatever_their_slots() -> None:
    here, there = fold(BEFORE), fold([*BEFORE[:3], created(blocks(2, 1), [3, 2]), migrated(blocks(2), [0])])
    expected = residency_mix(HBM, block(1)) + residency_mix(HBM, block(2)) + residency_mix(HOST, block(2))
    assert here.digest == there.digest == expected % 2**64
