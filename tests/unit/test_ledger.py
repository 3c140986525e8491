"""The ledger, command by command: what a slot may become, what waits for what, what a bug in the caller is told."""

from __future__ import annotations

import pytest

from kvbm.core.codec import decode_frame, encoded_bytes
from kvbm.core.errors import LayoutError, LedgerError
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
from kvbm.core.fold import Residencies
from kvbm.core.ids import (
    NO_PARENT,
    Epoch,
    InstanceId,
    Namespace,
    Offset,
    Reach,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.policy import Share
from kvbm.core.results import LEAST_EVENT_BYTES, SNAPSHOT_LOOKS, Copy, Recovered
from kvbm.reference.ledger import Ledger
from tests.held import recomputed_digest, slot_of

NAMESPACE = Namespace(model="m", block_tokens=16)
OTHER = Namespace(model="other", block_tokens=16)
HBM, HOST, NVME, OBJECT = Tier.HBM, Tier.HOST, Tier.NVME, Tier.OBJECT


def blocks(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def block(number: int) -> SequenceHash:
    return SequenceHash(blocks(number))


def slots(*numbers: int) -> bytes:
    return pack_slots(numbers)


def make_ledger(recovered: list[Recovered] | None = None, eviction: str = "lru") -> Ledger:
    ledger = Ledger(
        [
            PoolStated(HBM, 4, 64),
            PoolStated(HOST, 4, 64),
            PoolStated(NVME, 2, 64),
            PoolStated(OBJECT, 0, 64, Reach.CLUSTER, "s3://bucket"),
        ],
        eviction,
        LEAST_EVENT_BYTES,
    )
    ledger.start(Epoch(1), [NAMESPACE], recovered={NVME: recovered or []})
    said(ledger)
    return ledger


def fill(ledger: Ledger, hashes: bytes, tier: Tier = HBM) -> bytes:
    """Create blocks and leave them unpinned."""
    allocation = ledger.allocate(tier, len(hashes) // 16)
    assert allocation is not None
    holders = ledger.create(NAMESPACE.id, tier, NO_PARENT, 0, hashes, allocation.slots)
    ledger.unpin(tier, holders)
    return holders


def begin(ledger: Ledger, source: Tier, target: Tier, hashes: bytes) -> Copy:
    copy = ledger.begin_copy(NAMESPACE.id, source, target, hashes)
    assert copy is not None
    return copy


def said(ledger: Ledger) -> list[Event]:
    frames = [decode_frame(frame.data)[0] for frame in ledger.take_frames(InstanceId("i"), 7)]
    return [event for frame in frames for event in frame.events]


def slots_are_whole(ledger: Ledger) -> None:
    """Every slot is free, allocated, held or orphaned, and only one of them."""
    for tier in (HBM, HOST, NVME):
        state = ledger._tiers[tier]
        held = [entry.slot for entry in ledger.residencies.held[tier].values()]
        free = [*state.free, *range(state.unused, state.pool.slots)]
        assert sorted([*held, *free, *state.allocated, *state.orphaned]) == list(range(state.pool.slots))


# -- the states of a slot ----------------------------------------------------------------------------------------------


def test_a_slot_goes_from_free_to_allocated_to_held_and_back() -> None:
    ledger = make_ledger()
    allocation = ledger.allocate(HBM, 2)
    assert allocation is not None
    assert ledger.counts(HBM) == (4, 2, 0, 0, 2)
    holders = ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, blocks(1, 2), allocation.slots)
    assert (holders, ledger.counts(HBM)) == (allocation.slots, (4, 2, 2, 0, 0))
    ledger.unpin(HBM, holders)
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
        ledger.release(HBM, allocation.slots[:4])
    slots_are_whole(ledger)


def test_a_release_that_is_refused_leaves_its_other_slots_with_the_caller() -> None:
    ledger = make_ledger()
    allocation = ledger.allocate(HBM, 2)
    assert allocation is not None
    with pytest.raises(LedgerError, match="slot 3 is not allocated") as refused:
        ledger.release(HBM, allocation.slots + slots(3))
    assert (refused.value.tier, refused.value.slot, refused.value.copy) == (HBM, 3, None)
    assert ledger.counts(HBM) == (4, 2, 0, 0, 2)
    ledger.release(HBM, allocation.slots)
    slots_are_whole(ledger)


def test_pinned_blocks_are_never_victims() -> None:
    ledger = make_ledger()
    ledger.pin(HBM, fill(ledger, blocks(1, 2, 3, 4))[:12])
    assert ledger.allocate(HBM, 2) is None
    assert ledger.allocate(HBM, 1) is not None
    assert ledger.holds(HBM, block(1))
    assert not ledger.holds(HBM, block(4))


def test_a_withdrawn_block_keeps_its_slot_while_pinned() -> None:
    ledger = make_ledger()
    first = fill(ledger, blocks(1, 2, 3, 4))[:4]
    ledger.pin(HBM, first)
    ledger.pin(HBM, first)
    ledger.evict(HBM, blocks(1), EvictReason.CLEARED)
    assert ledger.counts(HBM).free == 0
    with pytest.raises(LedgerError, match="holds no block"):
        ledger.pin(HBM, first)
    ledger.unpin(HBM, first)
    assert ledger.counts(HBM).free == 0
    ledger.unpin(HBM, first)
    assert ledger.counts(HBM).free == 1
    slots_are_whole(ledger)


def test_a_created_block_that_is_held_already_answers_its_holder() -> None:
    ledger = make_ledger()
    first = fill(ledger, blocks(1))
    allocation = ledger.allocate(HBM, 2)
    assert allocation is not None
    holders = ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, blocks(1, 2), allocation.slots)
    assert holders == first + allocation.slots[4:]
    assert ledger.counts(HBM) == (4, 2, 2, 0, 0)
    created = [event for event in said(ledger) if isinstance(event, BlocksCreated)]
    assert [(event.hashes, event.start) for event in created] == [(blocks(1), 0), (blocks(2), 1)]
    assert created[1].parent == blocks(1)


@pytest.mark.parametrize(
    ("hashes", "given"), [(blocks(1, 1), slots(0, 1)), (blocks(1, 2), slots(0, 0)), (blocks(1, 2), slots(0, 3))]
)
def test_a_creation_that_contradicts_itself_changes_nothing(hashes: bytes, given: bytes) -> None:
    ledger = make_ledger()
    assert ledger.allocate(HBM, 3) is not None
    with pytest.raises(LedgerError):
        ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, hashes, given)
    assert said(ledger) == []
    assert ledger.counts(HBM) == (4, 1, 0, 0, 3)


def test_unpinning_what_is_not_pinned_is_a_bug_of_the_caller() -> None:
    ledger = make_ledger()
    held = fill(ledger, blocks(1))
    with pytest.raises(LedgerError, match="not pinned"):
        ledger.unpin(HBM, held)


def test_an_unpin_that_is_refused_leaves_its_other_slots_pinned() -> None:
    ledger = make_ledger()
    held = fill(ledger, blocks(1, 2, 3))
    pinned = held[4:]
    ledger.pin(HBM, pinned)
    with pytest.raises(LedgerError, match="not pinned"):
        ledger.unpin(HBM, held)  # from the last on, so the one that is not pinned is looked at last
    assert ledger.counts(HBM).evictable == 1
    ledger.unpin(HBM, pinned)
    assert ledger.counts(HBM).evictable == 3


def test_a_tier_without_slots_has_nothing_to_evict() -> None:
    with pytest.raises(LedgerError, match="no OBJECT pool with slots"):
        make_ledger().evict(OBJECT, blocks(1), EvictReason.CLEARED)


# -- what a durable slot waits for -------------------------------------------------------------------------------------


def test_a_slot_that_dies_with_the_process_waits_for_nothing() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    allocation = ledger.allocate(HBM, 1)
    assert allocation is not None and allocation.after == 0


def test_a_durable_slot_waits_for_the_withdrawal_of_what_it_held() -> None:
    ledger = make_ledger([Recovered(block(1), NAMESPACE.id, 0)])
    fill(ledger, blocks(7, 8))
    copy = begin(ledger, HBM, NVME, blocks(7, 8))
    assert sorted(split_slots(copy.target_slots)) == [0, 1]
    assert copy.after == ledger.applied


def test_a_durable_slot_that_was_given_back_unwritten_still_waits() -> None:
    ledger = make_ledger([Recovered(block(1), NAMESPACE.id, 0)])
    fill(ledger, blocks(7, 8))
    first = begin(ledger, HBM, NVME, blocks(7, 8))
    ledger.end_copy(first, [False, False], MigrateCause.OFFLOAD)  # its withdrawal was not durable in time
    again = begin(ledger, HBM, NVME, blocks(7, 8))
    assert again.after == first.after


def test_durable_slots_wait_for_the_last_withdrawal_in_whatever_order_they_are_taken() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2), NVME)
    for number in (1, 2):
        ledger.evict(NVME, blocks(number), EvictReason.CLEARED)
    first = ledger.allocate(NVME, 1)
    assert first is not None
    ledger.release(NVME, first.slots)  # it comes back unwritten, and is taken behind what was withdrawn after it
    both = ledger.allocate(NVME, 2)
    assert both is not None and both.slots.endswith(first.slots)
    assert first.after < both.after == ledger.applied


def test_a_durable_slot_withdrawn_while_it_was_pinned_waits_for_that_withdrawal() -> None:
    ledger = make_ledger()
    held = fill(ledger, blocks(1, 2), NVME)
    ledger.pin(NVME, held[:4])
    ledger.evict(NVME, blocks(1), EvictReason.CLEARED)
    ledger.unpin(NVME, held[:4])
    again = ledger.allocate(NVME, 1)
    assert again is not None
    assert (again.slots, again.after) == (held[:4], ledger.applied)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_is_cut_to_what_fits_and_leaves_out_what_is_there_or_coming() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    copy = begin(ledger, HBM, NVME, blocks(1, 1, 9, 2, 3))
    assert copy.hashes == blocks(1, 2)
    assert ledger.begin_copy(NAMESPACE.id, HBM, NVME, blocks(1, 2)) is None
    assert ledger.begin_copy(NAMESPACE.id, HBM, NVME, blocks(3)) is None
    assert ledger.end_copy(copy, [True, False], MigrateCause.OFFLOAD) == [split_slots(copy.target_slots)[0], None]
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
    with pytest.raises(LedgerError, match="not in flight") as refused:
        ledger.end_copy(copy, [True], MigrateCause.OFFLOAD)
    assert (refused.value.tier, refused.value.slot, refused.value.copy) == (None, None, copy.id)


def test_a_block_cleared_while_it_was_copied_has_not_arrived() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2))
    copy = begin(ledger, HBM, HOST, blocks(1, 2))
    ledger.evict(HBM, blocks(1), EvictReason.CLEARED)
    assert ledger.counts(HBM).free == 2  # its slot is the copy's
    assert ledger.end_copy(copy, [True, True], MigrateCause.OFFLOAD) == [None, split_slots(copy.target_slots)[1]]
    assert ledger.counts(HBM).free == 3
    assert [event.hashes for event in said(ledger) if isinstance(event, BlocksMigrated)] == [blocks(2)]
    slots_are_whole(ledger)


def test_a_block_that_was_created_meanwhile_keeps_its_slot() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1), HOST)
    copy = begin(ledger, HOST, HBM, blocks(1))
    created = fill(ledger, blocks(1))
    assert ledger.end_copy(copy, [True], MigrateCause.ONBOARD, pinned=True) == split_slots(created)
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
    assert (copy.target_slots, copy.after) == (b"", 0)
    assert ledger.end_copy(copy, [False, True], MigrateCause.OFFLOAD) == [None, None]
    assert [event.hashes for event in said(ledger) if isinstance(event, BlocksMigrated)] == [blocks(2)]
    assert not ledger.residencies.held[OBJECT]


# -- the life of the stream --------------------------------------------------------------------------------------------


def test_an_epoch_begins_with_a_snapshot_of_what_was_kept() -> None:
    ledger = Ledger([PoolStated(HBM, 2, 64), PoolStated(NVME, 4, 64)])
    kept = [
        Recovered(block, NAMESPACE.id, slot) for block, slot in zip(split_hashes(blocks(1, 2)), (3, 1), strict=True)
    ]
    ledger.start(Epoch(5), [NAMESPACE], recovered={NVME: kept})
    events = said(ledger)
    assert [type(event) for event in events] == [InstanceStarted, SnapshotEnded, ResidenciesListed, SnapshotEnded]
    assert ledger.counts(NVME) == (4, 2, 2, 2, 0)
    with pytest.raises(LedgerError, match="restart begins another"):
        ledger.start(Epoch(6))


def test_a_recovered_slot_outside_its_pool_is_refused() -> None:
    with pytest.raises(LedgerError, match="slot 2 was recovered; the pool has 2"):
        make_ledger([Recovered(block(1), NAMESPACE.id, 2)])


def test_events_are_handed_out_once_with_their_offsets() -> None:
    ledger = make_ledger()
    at = ledger.applied
    fill(ledger, blocks(1))
    ledger.stop()
    (taken,) = ledger.take_frames(InstanceId("i"), 7)
    frame, _ = decode_frame(taken.data)
    assert (taken.epoch, taken.first_offset, taken.next_offset) == (1, at, at + 2)
    assert (frame.instance, frame.wall_time_ns, frame.digest) == ("i", 7, ledger.digest)
    assert [type(event) for event in frame.events] == [BlocksCreated, InstanceStopped]
    assert (ledger.take_frames(InstanceId("i"), 7), ledger.applied, ledger.stopped) == ([], at + 2, True)


def test_events_whose_frame_cannot_be_cut_wait_on() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1))
    with pytest.raises(LayoutError, match="the instance's name has 0 bytes"):
        ledger.take_frames(InstanceId(""), 7)
    assert [type(event) for event in said(ledger)] == [BlocksCreated]


def test_a_snapshot_states_what_is_held_while_commands_go_on() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3))
    reader = Residencies(strict=True)
    reader.evolve(InstanceStarted(epoch=Epoch(1), pools=ledger.pools))
    for tier in (HBM, HOST, NVME):
        reader.evolve(SnapshotEnded(tier=tier, snapshot=1, count=0))
    assert ledger.begin_snapshot()
    assert not ledger.begin_snapshot()
    assert ledger.step_snapshot(1)
    ledger.evict(HBM, blocks(2), EvictReason.CLEARED)
    fill(ledger, blocks(4, 5))
    while ledger.step_snapshot(1):
        pass
    assert not ledger.step_snapshot()
    for event in said(ledger):
        reader.evolve(event)
    assert reader.held == ledger.residencies.held
    assert reader.digest == ledger.digest


def test_a_missing_object_is_said_only_of_a_pool_of_cluster_reach() -> None:
    ledger = make_ledger()
    ledger.forget(OBJECT, NAMESPACE.id, blocks(1), EvictReason.MISSING)
    assert [type(event) for event in said(ledger)] == [BlocksEvicted]
    with pytest.raises(LedgerError, match="use evict"):
        ledger.forget(HBM, NAMESPACE.id, blocks(1), EvictReason.MISSING)


def test_what_was_found_in_a_pool_of_cluster_reach_is_claimed_by_who_found_it() -> None:
    ledger = make_ledger()
    ledger.claim(OBJECT, NAMESPACE.id, blocks(1, 2), InstanceId("finder"))
    [event] = said(ledger)
    assert isinstance(event, BlocksMigrated)
    assert (event.source, event.target, event.kept, event.hashes) == (InstanceId("finder"), OBJECT, True, blocks(1, 2))
    with pytest.raises(LedgerError, match="not a pool of cluster reach"):
        ledger.claim(HBM, NAMESPACE.id, blocks(1), InstanceId("finder"))


# -- what an engine asks -----------------------------------------------------------------------------------------------


def test_a_match_says_where_each_block_is_and_pins_only_when_asked() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2))
    ledger.end_copy(begin(ledger, HBM, HOST, blocks(1, 2)), [True, True], MigrateCause.OFFLOAD)
    ledger.evict(HBM, blocks(2), EvictReason.CLEARED)
    run = blocks(1, 2, 3)
    assert ledger.match(run) == (2, bytes([HBM, HOST]), slots(0, 1))
    assert ledger.counts(HBM).evictable == 1
    assert ledger.match(run, pinned=True) == (2, bytes([HBM, HOST]), slots(0, 1))
    assert (ledger.counts(HBM).evictable, ledger.counts(HOST).evictable) == (0, 2)
    ledger.unpin(HBM, slots(0))
    with pytest.raises(LedgerError, match="not pinned"):
        ledger.unpin(HBM, slots(0))


def test_a_ledger_says_what_it_holds_in_the_order_it_was_gained() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(3, 1, 2))
    ledger.evict(HBM, blocks(1), EvictReason.CLEARED)
    fill(ledger, blocks(1))
    assert ledger.held(HBM) == blocks(3, 2, 1)
    assert ledger.lacking(HBM, blocks(9, 1, 8, 3)) == blocks(9, 8)
    assert ledger.lacking(OBJECT, blocks(1)) == blocks(1)
    assert slot_of(ledger, HBM, block(2)) == 2
    assert slot_of(ledger, HOST, block(2)) is None


@pytest.mark.parametrize(
    ("eviction", "event_bytes", "why"), [("fifo", 1 << 20, "use one of lru, s3fifo"), ("lru", 1000, "at least 1048576")]
)
def test_a_ledger_that_cannot_be_made_is_refused(eviction: str, event_bytes: int, why: str) -> None:
    with pytest.raises(LedgerError, match=why):
        Ledger([PoolStated(HBM, 4, 64)], eviction, event_bytes)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_kept_blocks_are_not_evictable_until_their_time_has_come() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    assert ledger.keep(HBM, blocks(1, 2, 9), until_s=10.0) == 2
    assert ledger.counts(HBM).evictable == 2
    assert ledger.allocate(HBM, 2) is not None
    assert ledger.held(HBM) == blocks(1, 2)
    assert ledger.expire(9.9) == 0
    assert ledger.expire(10.0) == 2
    assert ledger.counts(HBM).evictable == 2
    assert ledger.expire(10.0) == 0


def test_what_expires_counts_as_just_used() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    ledger.keep(HBM, blocks(4, 3), until_s=1.0)  # the first victims otherwise
    ledger.expire(1.0)
    ledger.allocate(HBM, 3)
    assert ledger.held(HBM) == blocks(4)


def test_a_short_allocation_gives_up_kept_blocks_by_priority_time_and_slot() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    ledger.keep(HBM, blocks(1), until_s=1.0, priority=7)
    ledger.keep(HBM, blocks(2), until_s=9.0)
    ledger.keep(HBM, blocks(3), until_s=5.0)
    ledger.keep(HBM, blocks(4), until_s=9.0)
    left = [blocks(1, 2, 4), blocks(1, 4), blocks(1), b""]
    for expected in left:
        assert ledger.allocate(HBM, 1) is not None
        assert ledger.held(HBM) == expected
    assert {event.reason for event in said(ledger) if isinstance(event, BlocksEvicted)} == {EvictReason.CAPACITY}


def test_the_highest_priority_and_pinned_blocks_are_never_given_up() -> None:
    ledger = make_ledger()
    held = fill(ledger, blocks(1, 2, 3, 4))
    ledger.keep(HBM, blocks(1), until_s=1.0, priority=100)
    ledger.keep(HBM, blocks(2, 3), until_s=1.0, priority=99)
    ledger.pin(HBM, held[4:8])
    assert ledger.allocate(HBM, 3) is None
    assert ledger.held(HBM) == blocks(1, 2, 3, 4)
    assert ledger.allocate(HBM, 2) is not None
    assert ledger.held(HBM) == blocks(1, 2)


def test_keeping_again_takes_the_later_time_and_the_higher_priority() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2))
    ledger.keep(HBM, blocks(1), until_s=5.0, priority=100)
    ledger.keep(HBM, blocks(1), until_s=3.0, priority=1)
    assert ledger.expire(4.0) == 0
    assert ledger.allocate(HBM, 4) is None
    ledger.keep(HBM, blocks(1), until_s=8.0)
    assert ledger.expire(5.0) == 0
    assert ledger.expire(8.0) == 1


def test_a_kept_block_that_is_pinned_stays_kept_after_it() -> None:
    ledger = make_ledger()
    held = fill(ledger, blocks(1))
    ledger.pin(HBM, held)
    ledger.keep(HBM, blocks(1), until_s=5.0)
    ledger.unpin(HBM, held)
    assert ledger.counts(HBM).evictable == 0
    ledger.pin(HBM, held)
    assert ledger.expire(5.0) == 1
    assert ledger.counts(HBM).evictable == 0
    ledger.unpin(HBM, held)
    assert ledger.counts(HBM).evictable == 1


def test_what_is_kept_until_it_was_read_is_kept_no_more_after() -> None:
    ledger = make_ledger()
    held = fill(ledger, blocks(1, 2, 3, 4))
    ledger.keep(HBM, blocks(1, 2), until_s=5.0, until_read=True)
    ledger.keep(HBM, blocks(2, 3), until_s=5.0)
    ledger.pin(HBM, held)
    ledger.unpin(HBM, held)
    assert (ledger.kept(HBM), ledger.counts(HBM).evictable) == (3, 1)
    ledger.pin(HBM, held)
    ledger.unpin(HBM, held, read=True)
    assert (ledger.kept(HBM), ledger.counts(HBM).evictable) == (2, 2)
    assert ledger.expire(5.0) == 2


def test_whether_a_reader_ends_it_says_nothing_of_who_is_given_up_first() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    ledger.keep(HBM, blocks(1), until_s=5.0, until_read=True)
    ledger.keep(HBM, blocks(2, 3, 4), until_s=5.0)
    ledger.allocate(HBM, 1)
    assert ledger.held(HBM) == blocks(2, 3, 4)  # of equals the lowest slot


def test_a_tenant_may_have_half_of_its_quota_kept() -> None:
    ledger = Ledger([PoolStated(HBM, 8, 64)], "lru", 1 << 20, [Share("a", 1, {HBM: 6})])
    ledger.start(Epoch(1), [NAMESPACE])
    ledger.assign(NAMESPACE.id, "a")
    fill(ledger, blocks(1, 2, 3, 4))
    assert ledger.keep(HBM, blocks(1, 2, 3, 4), until_s=5.0, most=8) == 3
    assert ledger.keep(HBM, blocks(1, 2, 3, 4), until_s=5.0) == 4  # who keeps without a bound means it


def test_no_more_blocks_are_kept_than_may_be() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3, 4))
    assert ledger.keep(HBM, blocks(1, 2, 3), until_s=5.0, most=2) == 2
    assert ledger.keep(HBM, blocks(2, 3, 1), until_s=9.0, most=2) == 1  # what is kept already costs nothing
    assert ledger.kept(HBM) == 2
    assert (ledger.expire(5.0), ledger.expire(9.0)) == (1, 1)


def test_an_evicted_block_is_kept_no_more() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1))
    ledger.keep(HBM, blocks(1), until_s=5.0, priority=100)
    ledger.evict(HBM, blocks(1), EvictReason.CLEARED)
    fill(ledger, blocks(2))
    assert (ledger.expire(9.0), ledger.counts(HBM).evictable) == (0, 1)
    slots_are_whole(ledger)


@pytest.mark.parametrize(
    ("tier", "until_s", "priority", "why"),
    [
        (HBM, 1.0, 101, "priority is 101"),
        (HBM, 1.0, -1, "priority is -1"),
        (HBM, float("nan"), 0, "not a number"),
        (OBJECT, 1.0, 0, "no OBJECT pool"),
    ],
)
def test_what_cannot_be_kept_is_refused(tier: Tier, until_s: float, priority: int, why: str) -> None:
    with pytest.raises(LedgerError, match=why):
        make_ledger().keep(tier, blocks(1), until_s, priority)


# -- an overflow -------------------------------------------------------------------------------------------------------


def overflow(ledger: Ledger) -> int:
    """Create and withdraw blocks until events no longer fit; how often."""
    for count in range(100_000):
        fill(ledger, blocks(1, 2, 3, 4))
        ledger.evict(HBM, blocks(1, 2, 3, 4), EvictReason.CLEARED)
        if ledger.overflowed:
            return count
    raise AssertionError("the ledger takes everything")


def test_an_overflow_ends_the_stream_and_the_engine_goes_on() -> None:
    ledger = make_ledger([Recovered(block(1), NAMESPACE.id, 0)])
    fill(ledger, blocks(9), HOST)
    overflow(ledger)
    applied, events = ledger.applied, said(ledger)
    assert ledger.stopped
    assert (
        len(events) == applied - 5
    )  # InstanceStarted and a snapshot of three tiers, one of them with a block, came before
    assert events[-1] == InstanceStopped(reason=StopReason.OVERFLOW)
    assert sum(map(encoded_bytes, events)) <= LEAST_EVENT_BYTES
    assert sum(map(encoded_bytes, events)) > LEAST_EVENT_BYTES - 200  # no room was left unused
    ledger.evict(HBM, ledger.held(HBM), EvictReason.CLEARED)
    before = ledger.digest
    fill(ledger, blocks(5, 6, 7, 8))
    assert ledger.match(blocks(5, 6, 7, 8)).depth == 4
    assert ledger.digest == recomputed_digest(ledger.residencies) != before
    copy = begin(ledger, HBM, HOST, blocks(5))
    assert ledger.end_copy(copy, [True], MigrateCause.OFFLOAD)[0] is not None
    assert ledger.evict(NVME, blocks(1), EvictReason.CLEARED) == 1
    ledger.forget(OBJECT, NAMESPACE.id, blocks(1), EvictReason.MISSING)
    ledger.stop()
    assert (said(ledger), ledger.applied) == ([], applied)


def test_what_waits_replays_to_the_last_event_before_the_overflow() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(5), HOST)
    overflow(ledger)
    reader = Residencies(strict=False)
    reader.begin_blind(Epoch(1))
    for taken in ledger.take_frames(InstanceId("i"), 7):
        frame, _ = decode_frame(taken.data)
        for event in frame.events:
            reader.evolve(event)
        assert frame.digest == reader.digest
    assert reader.stopped


def test_durable_tiers_take_nothing_after_an_overflow() -> None:
    ledger = make_ledger()
    overflow(ledger)
    fill(ledger, blocks(1, 2))
    for target in (NVME, OBJECT):
        assert ledger.begin_copy(NAMESPACE.id, HBM, target, blocks(1, 2)) is None
    assert ledger.allocate(NVME, 1) is None
    assert ledger.counts(HBM).evictable == len(ledger.held(HBM)) // 16
    assert not ledger.begin_snapshot()


def test_a_durable_slot_whose_withdrawal_overflows_is_not_written() -> None:
    kept = [Recovered(block(number), NAMESPACE.id, number - 1) for number in (1, 2)]
    ledger = make_ledger(kept)
    fill(ledger, blocks(5))
    while LEAST_EVENT_BYTES - ledger._recorder._waiting_bytes > 20:  # the withdrawal takes 24 bytes
        ledger.forget(OBJECT, NAMESPACE.id, blocks(5), EvictReason.MISSING)
    assert not ledger.overflowed
    assert ledger.begin_copy(NAMESPACE.id, HBM, NVME, blocks(5)) is None
    assert ledger.overflowed
    assert ledger.counts(HBM).evictable == 1
    assert ledger.copies_in_flight() == 0
    slots_are_whole(ledger)


def test_a_snapshot_ends_with_the_overflow() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(9))
    ledger.begin_snapshot()
    ledger.step_snapshot(1)
    ledger.evict(HBM, blocks(9), EvictReason.CLEARED)
    overflow(ledger)
    assert not ledger.step_snapshot(1)
    assert isinstance(said(ledger)[-1], InstanceStopped)


def test_taking_events_makes_room_for_more() -> None:
    ledger = make_ledger()
    for _ in range(3):
        for _ in range(4000):
            fill(ledger, blocks(1, 2, 3, 4))
            ledger.evict(HBM, blocks(1, 2, 3, 4), EvictReason.CLEARED)
        assert not ledger.overflowed
        assert ledger.take_frames(InstanceId("i"), 7)
    assert Offset(24_004) == ledger.applied


def test_what_an_epoch_begins_with_is_never_an_overflow() -> None:
    count = LEAST_EVENT_BYTES // 16
    ledger = Ledger([PoolStated(NVME, count, 64)], event_bytes=LEAST_EVENT_BYTES)
    ledger.start(Epoch(1), recovered={NVME: [Recovered(block(at + 1), NAMESPACE.id, at) for at in range(count)]})
    assert not ledger.overflowed
    assert ledger.evict(NVME, blocks(1), EvictReason.CLEARED) == 1
    assert not ledger.overflowed


# -- who goes first ----------------------------------------------------------------------------------------------------


def test_the_deepest_block_of_a_prompt_goes_first() -> None:
    for eviction in ("lru", "s3fifo"):
        ledger = make_ledger(eviction=eviction)
        fill(ledger, blocks(1, 2, 3, 4))
        ledger.allocate(HBM, 2)
        assert ledger.held(HBM) == blocks(1, 2), eviction


def test_creating_a_block_is_no_use_of_it_and_acquiring_it_is() -> None:
    ledger = make_ledger(eviction="s3fifo")
    fill(ledger, blocks(1, 2))
    fill(ledger, blocks(3, 4))
    found = ledger.match(blocks(1, 2), pinned=True)
    ledger.unpin(HBM, found.slots)
    ledger.allocate(HBM, 1)
    assert ledger.held(HBM) == blocks(1, 2, 3)


def test_keeping_a_block_again_and_again_is_one_use() -> None:
    def use(number: int) -> None:
        ledger.unpin(HBM, ledger.match(blocks(number), pinned=True).slots)

    ledger = make_ledger(eviction="s3fifo")
    for number in (1, 2, 3, 4):
        fill(ledger, blocks(number))
    ledger.pin(HBM, slots(0, 2))
    ledger.allocate(HBM, 2)
    ledger.unpin(HBM, slots(0, 2))
    assert ledger.held(HBM) == blocks(1, 3)  # both in main now, their uses forgotten
    for _ in range(3):
        ledger.keep(HBM, blocks(1), until_s=1.0)
    ledger.expire(1.0)
    use(3)
    ledger.allocate(HBM, 1)
    assert ledger.held(HBM) == blocks(3)


# -- another epoch in place --------------------------------------------------------------------------------------------


def test_another_epoch_restates_all_that_is_held_and_records_again() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(9), HOST)
    overflow(ledger)
    said(ledger)
    fill(ledger, blocks(5, 6))  # unseen
    after = ledger.restart(Epoch(4))
    assert (ledger.epoch, ledger.applied, ledger.stopped, ledger.overflowed) == (4, after, False, False)
    (frame,) = ledger.take_frames(InstanceId("i"), 7)
    assert (frame.epoch, frame.first_offset, frame.next_offset) == (4, 0, after)
    events = decode_frame(frame.data)[0].events
    assert events[0] == InstanceStarted(epoch=Epoch(4), pools=ledger.pools, namespaces=(NAMESPACE,))
    reader = Residencies(strict=True)
    for event in events:
        reader.evolve(event)
    assert {tier: set(reader.held[tier]) for tier in Tier} == {
        HBM: {block(5), block(6)},
        HOST: {block(9)},
        NVME: set(),
        OBJECT: set(),
    }
    assert all(reader.is_whole(tier) for tier in (HBM, HOST, NVME))
    assert reader.digest == ledger.digest == recomputed_digest(ledger.residencies)
    copy = begin(ledger, HBM, NVME, blocks(5))  # durable tiers take blocks again
    ledger.end_copy(copy, [True], MigrateCause.OFFLOAD)
    assert isinstance(said(ledger)[-1], BlocksMigrated)


def test_an_epoch_in_place_is_listed_by_namespace_and_never_an_overflow() -> None:
    count = 2 * LEAST_EVENT_BYTES // 16
    ledger = Ledger([PoolStated(HBM, count, 64)], event_bytes=LEAST_EVENT_BYTES)
    ledger.start(Epoch(1))
    for at in range(0, count, 512):
        run = b"".join(block(number + 1) for number in range(at, at + 512))
        allocation = ledger.allocate(HBM, 512)
        assert allocation is not None
        owner = (OTHER, NAMESPACE)[at // 512 % 2].id
        ledger.create(owner, HBM, NO_PARENT, 0, run, allocation.slots)
        said(ledger)
    ledger.restart(Epoch(2))
    assert not ledger.overflowed
    listed = [event for event in said(ledger) if isinstance(event, ResidenciesListed)]
    assert [event.namespace for event in listed] == sorted(event.namespace for event in listed)
    assert {len(event.hashes) // 16 for event in listed} == {1024}


def test_what_is_no_event_survives_another_epoch() -> None:
    kept = [Recovered(block(7), NAMESPACE.id, 1)]
    ledger = make_ledger(kept)
    pinned = ledger.allocate(HBM, 1)
    given = ledger.allocate(HBM, 1)
    assert pinned is not None and given is not None
    ledger.create(NAMESPACE.id, HBM, NO_PARENT, 0, blocks(1), pinned.slots)
    fill(ledger, blocks(2))
    ledger.keep(HBM, blocks(2), 10.0)
    copy = begin(ledger, HBM, NVME, blocks(1))
    said(ledger)
    before = [ledger.counts(tier) for tier in (HBM, HOST, NVME)]
    ledger.restart(Epoch(2))
    assert [ledger.counts(tier) for tier in (HBM, HOST, NVME)] == before
    assert (copy.epoch, copy.after) == (1, 0)
    assert ledger.end_copy(copy, [True], MigrateCause.OFFLOAD) == [0]
    ledger.unpin(HBM, pinned.slots)
    ledger.create(NAMESPACE.id, HBM, block(1), 1, blocks(3), given.slots)
    assert ledger.expire(10.0) == 1
    slots_are_whole(ledger)
    assert [type(event) for event in said(ledger)][-2:] == [BlocksMigrated, BlocksCreated]


def test_a_durable_slot_that_holds_nothing_is_written_only_after_the_epochs_snapshot() -> None:
    ledger = make_ledger([Recovered(block(number), NAMESPACE.id, number - 1) for number in (1, 2)])
    fill(ledger, blocks(5))
    overflow(ledger)
    said(ledger)
    ledger.evict(NVME, blocks(1), EvictReason.CORRUPT)  # nobody hears of it; the journal says the slot holds the block
    fill(ledger, blocks(6))
    after = ledger.restart(Epoch(2))
    copy = begin(ledger, HBM, NVME, blocks(6))
    assert (split_slots(copy.target_slots), copy.epoch, copy.after) == ([0], 2, after)


def test_a_snapshot_under_way_is_dropped_by_another_epoch() -> None:
    ledger = make_ledger()
    fill(ledger, blocks(1, 2, 3))
    ledger.begin_snapshot()
    ledger.step_snapshot(1)
    said(ledger)
    ledger.restart(Epoch(2))
    said(ledger)
    assert not ledger.step_snapshot()
    assert said(ledger) == []
    assert ledger.begin_snapshot()


def test_another_epoch_is_refused_while_events_wait_or_when_it_is_not_newer() -> None:
    ledger = Ledger([PoolStated(HBM, 4, 64)])
    with pytest.raises(LedgerError, match="has not started"):
        ledger.restart(Epoch(2))
    ledger.start(Epoch(3))
    with pytest.raises(LedgerError, match="2 events of epoch 3 wait"):
        ledger.restart(Epoch(4))
    said(ledger)
    with pytest.raises(LedgerError, match="not newer"):
        ledger.restart(Epoch(3))
    assert (ledger.epoch, ledger.applied) == (3, 2)


def test_a_step_of_a_snapshot_looks_at_so_many_slots_and_no_more() -> None:
    ledger = Ledger([PoolStated(HBM, 3 * SNAPSHOT_LOOKS, 64)])
    ledger.start(Epoch(1))
    fill(ledger, blocks(1))
    fill(ledger, blocks(*range(10, 10 + 2 * SNAPSHOT_LOOKS)))
    ledger.begin_snapshot()
    ledger.step_snapshot(1)
    ledger.evict(HBM, blocks(*range(10, 10 + 2 * SNAPSHOT_LOOKS)), EvictReason.CLEARED)
    fill(ledger, blocks(*range(100_000, 100_000 + 2 * SNAPSHOT_LOOKS)))  # gained since: need no statement
    said(ledger)
    assert ledger.step_snapshot()
    assert said(ledger) == []
    assert not ledger.step_snapshot()
    assert said(ledger) == [SnapshotEnded(tier=HBM, snapshot=2, count=1)]
