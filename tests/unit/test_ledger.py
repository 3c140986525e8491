"""The ledger, command by command: what a slot may become, what waits for what, what a bug in the caller is told."""

from __future__ import annotations

import pytest

from kvbm.core.errors import LedgerError
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
    ResidenciesStated,
    RoundEnded,
)
from kvbm.core.ids import NO_PARENT, Epoch, Namespace, Reach, Tier, split_hashes
from kvbm.core.ledger import Copy, Ledger, Recovered
from kvbm.core.residency import Residencies

NAMESPACE = Namespace(model="m", block_tokens=16)
OTHER = Namespace(model="other", block_tokens=16)
HBM, HOST, NVME, OBJECT = Tier.HBM, Tier.HOST, Tier.NVME, Tier.OBJECT


def blocks(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def make_ledger(recovered: list[Recovered] | None = None) -> Ledger:
    ledger = Ledger(
        [
            PoolStated(HBM, 4, 64),
            PoolStated(HOST, 4, 64),
            PoolStated(NVME, 2, 64),
            PoolStated(OBJECT, 0, 64, Reach.CLUSTER, "s3://bucket"),
        ]
    )
    ledger.start(Epoch(1), [NAMESPACE], recovered={NVME: recovered or []})
    ledger.take_events()
    return ledger


def fill(ledger: Ledger, hashes: bytes, tier: Tier = HBM) -> list[int]:
    """Create blocks and leave them unpinned."""
    allocation = ledger.allocate(tier, len(hashes) // 16)
    assert allocation is not None
    slots = ledger.create(NAMESPACE.id, tier, NO_PARENT, 0, hashes, allocation.slots)
    ledger.unpin(tier, slots)
    return slots


def begin(ledger: Ledger, source: Tier, target: Tier, hashes: bytes) -> Copy:
    copy = ledger.begin_copy(NAMESPACE.id, source, target, hashes)
    assert copy is not None
    return copy


def said(ledger: Ledger) -> list[Event]:
    return [pending.event for pending in ledger.take_events()[1]]


def slots_are_whole(ledger: Ledger) -> None:
    """Every slot is free, allocated, held or orphaned, and only one of them."""
    for tier in (HBM, HOST, NVME):
        state = ledger._tiers[tier]
        held = [entry.slot for entry in ledger.residencies.held[tier].values()]
        free = [*state.free, *range(state.unused, state.pool.slots)]
        assert sorted([*held, *free, *state.allocated, *state.orphaned]) == list(range(state.pool.slots))


# -- the states of a slot -----------------------------------------------------------------------------------------------


def test_a_slot_goes_from_free_to_allocated_to_held_and_back() -> None:
    ledger = make_ledger()
    allocation = ledger.allocate(HBM, 2)
    assert allocation is not None
    assert ledger.counts(HBM) == (4, 2, 0, 0, 2)
    slots = ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, blocks(1, 2), allocation.slots)
    assert (slots, ledger.counts(HBM)) == (allocation.slots, (4, 2, 2, 0, 0))
    ledger.unpin(HBM, slots)
    assert ledger.counts(HBM) == (4, 2, 2, 2, 0)
    assert ledger.evict(HBM, blocks(1, 2, 9), EvictReason.CLEARED) == 2
    assert ledger.counts(HBM) == (4, 4, 0, 0, 0)
    assert [type(event) for event in said(ledger)] == [BlocksCreated, BlocksEvicted]


def test_released_slots_are_free_again() -> None:
    ledger = make_ledger()
    allocation = ledger.allocate(HBM, 3)
    assert allocation is not None
    ledger.release(HBM, allocation.slots)
    assert ledger.counts(HBM).free == 4
    with pytest.raises(LedgerError, match="not allocated, so it cannot be released"):
        ledger.release(HBM, allocation.slots[:1])
    slots_are_whole(ledger)


def test_pinned_blocks_are_never_victims() -> None:
    ledger = make_ledger()
    slots = fill(ledger, blocks(1, 2, 3, 4))
    ledger.pin(HBM, slots[:3])
    assert ledger.allocate(HBM, 2) is None
    assert ledger.allocate(HBM, 1) is not None
    assert ledger.holds(HBM, split_hashes(blocks(1))[0])
    assert not ledger.holds(HBM, split_hashes(blocks(4))[0])


def test_a_withdrawn_block_keeps_its_slot_while_pinned() -> None:
    ledger = make_ledger()
    slots = fill(ledger, blocks(1, 2, 3, 4))
    ledger.pin(HBM, slots[:1])
    ledger.pin(HBM, slots[:1])
    ledger.evict(HBM, blocks(1), EvictReason.CLEARED)
    assert ledger.counts(HBM).free == 0
    with pytest.raises(LedgerError, match="holds no block"):
        ledger.pin(HBM, slots[:1])
    ledger.unpin(HBM, slots[:1])
    assert ledger.counts(HBM).free == 0
    ledger.unpin(HBM, slots[:1])
    assert ledger.counts(HBM).free == 1
    slots_are_whole(ledger)


def test_a_created_block_that_is_held_already_answers_its_holder() -> None:
    ledger = make_ledger()
    first = fill(ledger, blocks(1))
    allocation = ledger.allocate(HBM, 2)
    assert allocation is not None
    holders = ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, blocks(1, 2), allocation.slots)
    assert holders == [first[0], allocation.slots[1]]
    assert ledger.counts(HBM) == (4, 2, 2, 0, 0)
    created = [event for event in said(ledger) if isinstance(event, BlocksCreated)]
    assert [(event.hashes, event.start) for event in created] == [(blocks(1), 0), (blocks(2), 1)]
    assert created[1].parent == blocks(1)


@pytest.mark.parametrize(("hashes", "slots"), [(blocks(1, 1), [0, 1]), (blocks(1, 2), [0, 0]), (blocks(1, 2), [0, 3])])
def test_a_creation_that_contradicts_itself_changes_nothing(hashes: bytes, slots: list[int]) -> None:
    ledger = make_ledger()
    assert ledger.allocate(HBM, 3) is not None
    with pytest.raises(LedgerError):
        ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, hashes, slots)
    assert said(ledger) == []
    assert ledger.counts(HBM) == (4, 1, 0, 0, 3)


def test_unpinning_what_is_not_pinned_is_a_bug_of_the_caller() -> None:
    ledger = make_ledger()
    slots = fill(ledger, blocks(1))
    with pytest.raises(LedgerError, match="not pinned"):
        ledger.unpin(HBM, slots)


def test_a_tier_without_slots_has_nothing_to_evict() -> None:
    with pytest.raises(LedgerError, match="no OBJECT pool with slots"):
        make_ledger().evict(OBJECT, blocks(1), EvictReason.CLEARED)


# -- what a durable slot waits for --------------------------------------------------------------------------------------


def test_a_slot_that_dies_with_the_process_waits_for_nothing() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    allocation = ledger.allocate(HBM, 1)
    assert allocation is not None and allocation.after == 0


def test_a_durable_slot_waits_for_the_withdrawal_of_what_it_held() -> None:
    ledger = make_ledger([Recovered(split_hashes(blocks(1))[0], NAMESPACE.id, 0)])
    fill(ledger, blocks(7, 8))
    copy = begin(ledger, HBM, NVME, blocks(7, 8))
    assert sorted(copy.target_slots) == [0, 1]
    assert copy.after == ledger.applied


def test_a_durable_slot_that_was_given_back_unwritten_still_waits() -> None:
    ledger = make_ledger([Recovered(split_hashes(blocks(1))[0], NAMESPACE.id, 0)])
    fill(ledger, blocks(7, 8))
    first = begin(ledger, HBM, NVME, blocks(7, 8))
    ledger.end_copy(first, [False, False], MigrateCause.OFFLOAD)  # its withdrawal was not durable in time
    again = begin(ledger, HBM, NVME, blocks(7, 8))
    assert again.after == first.after


# -- copies -------------------------------------------------------------------------------------------------------------


def test_a_copy_is_cut_to_what_fits_and_leaves_out_what_is_there_or_coming() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    copy = begin(ledger, HBM, NVME, blocks(1, 1, 9, 2, 3))
    assert copy.hashes == blocks(1, 2)
    assert ledger.begin_copy(NAMESPACE.id, HBM, NVME, blocks(1, 2)) is None
    assert ledger.begin_copy(NAMESPACE.id, HBM, NVME, blocks(3)) is None
    assert ledger.end_copy(copy, [True, False], MigrateCause.OFFLOAD) == [copy.target_slots[0], None]
    assert begin(ledger, HBM, NVME, blocks(1, 2)).hashes == blocks(2)
    slots_are_whole(ledger)


def test_a_copy_leaves_out_blocks_of_another_namespace() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1))
    assert ledger.begin_copy(OTHER.id, HBM, HOST, blocks(1)) is None


def test_both_ends_of_a_copy_belong_to_it_until_it_ends() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    copy = begin(ledger, HBM, HOST, blocks(1))
    assert ledger.allocate(HBM, 4) is None
    with pytest.raises(LedgerError, match="belongs to a copy"):
        ledger.release(HOST, copy.target_slots)
    with pytest.raises(LedgerError, match="belongs to a copy"):
        ledger.create(NAMESPACE.id, HOST, NO_PARENT, 0, blocks(9), copy.target_slots)
    ledger.end_copy(copy, [True], MigrateCause.OFFLOAD)
    assert ledger.allocate(HBM, 4) is not None
    with pytest.raises(LedgerError, match="not in flight"):
        ledger.end_copy(copy, [True], MigrateCause.OFFLOAD)


def test_a_block_cleared_while_it_was_copied_has_not_arrived() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2))
    copy = begin(ledger, HBM, HOST, blocks(1, 2))
    ledger.evict(HBM, blocks(1), EvictReason.CLEARED)
    assert ledger.counts(HBM).free == 2  # its slot is the copy's
    assert ledger.end_copy(copy, [True, True], MigrateCause.OFFLOAD) == [None, copy.target_slots[1]]
    assert ledger.counts(HBM).free == 3
    assert [event.hashes for event in said(ledger) if isinstance(event, BlocksMigrated)] == [blocks(2)]
    slots_are_whole(ledger)


def test_a_block_that_was_created_meanwhile_keeps_its_slot() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1), HOST)
    copy = begin(ledger, HOST, HBM, blocks(1))
    created = fill(ledger, blocks(1))
    assert ledger.end_copy(copy, [True], MigrateCause.ONBOARD, pinned=True) == created
    assert ledger.counts(HBM) == (4, 3, 1, 0, 0)
    slots_are_whole(ledger)


def test_a_copy_that_does_not_keep_its_source_withdraws_it_by_the_same_event() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1))
    copy = begin(ledger, HBM, HOST, blocks(1))
    ledger.end_copy(copy, [True], MigrateCause.OFFLOAD, kept=False)
    assert ledger.counts(HBM) == (4, 4, 0, 0, 0)
    assert [type(event) for event in said(ledger)] == [BlocksCreated, BlocksMigrated]


def test_a_copy_to_the_object_pool_is_a_claim() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2))
    copy = begin(ledger, HBM, OBJECT, blocks(1, 2))
    assert (copy.target_slots, copy.after) == ([], 0)
    assert ledger.end_copy(copy, [False, True], MigrateCause.OFFLOAD) == [None, None]
    assert [event.hashes for event in said(ledger) if isinstance(event, BlocksMigrated)] == [blocks(2)]
    assert not ledger.residencies.held[OBJECT]


# -- the life of the stream ---------------------------------------------------------------------------------------------


def test_an_epoch_begins_with_a_round_of_what_was_kept() -> None:
    ledger = Ledger([PoolStated(HBM, 2, 64), PoolStated(NVME, 4, 64)])
    kept = [
        Recovered(block, NAMESPACE.id, slot) for block, slot in zip(split_hashes(blocks(1, 2)), (3, 1), strict=True)
    ]
    ledger.start(Epoch(5), [NAMESPACE], recovered={NVME: kept})
    events = said(ledger)
    assert [type(event) for event in events] == [InstanceStarted, RoundEnded, ResidenciesStated, RoundEnded]
    assert ledger.counts(NVME) == (4, 2, 2, 2, 0)
    with pytest.raises(LedgerError, match="make a new one"):
        ledger.start(Epoch(6))


def test_a_recovered_slot_outside_its_pool_is_refused() -> None:
    with pytest.raises(LedgerError, match="slot 2 was recovered; the pool has 2"):
        make_ledger([Recovered(split_hashes(blocks(1))[0], NAMESPACE.id, 2)])


def test_events_are_handed_out_once_with_their_offsets() -> None:
    ledger = make_ledger()
    at = ledger.applied
    fill(ledger, blocks(1))
    ledger.stop()
    first, pending = ledger.take_events()
    assert (first, [type(p.event) for p in pending]) == (at, [BlocksCreated, InstanceStopped])
    assert ledger.take_events() == (at + 2, [])


def test_a_round_states_what_is_held_while_commands_go_on() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3))
    reader = Residencies(strict=True)
    reader.evolve(InstanceStarted(epoch=Epoch(1), pools=ledger.pools))
    for tier in (HBM, HOST, NVME):
        reader.evolve(RoundEnded(tier=tier, round=1, count=0))
    assert ledger.begin_round()
    assert not ledger.begin_round()
    assert ledger.step_round(1)
    ledger.evict(HBM, blocks(2), EvictReason.CLEARED)
    fill(ledger, blocks(4, 5))
    while ledger.step_round(1):
        pass
    assert not ledger.step_round()
    for event in said(ledger):
        reader.evolve(event)
    assert reader.held == ledger.residencies.held
    assert reader.digest == ledger.residencies.digest


def test_a_missing_object_is_said_only_of_a_pool_of_cluster_reach() -> None:
    ledger = make_ledger()
    ledger.forget(OBJECT, NAMESPACE.id, blocks(1), EvictReason.MISSING)
    assert [type(event) for event in said(ledger)] == [BlocksEvicted]
    with pytest.raises(LedgerError, match="use evict"):
        ledger.forget(HBM, NAMESPACE.id, blocks(1), EvictReason.MISSING)
