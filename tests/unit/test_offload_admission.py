"""Whether blocks may leave for a colder tier now, over all that is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.ids import DURABLE_TIERS, Tier
from kvbm.manager.offload.admission import Counts, Go, Leaving, Skip, Skipped, Wait, admit

BLOCK_BYTES = 1000
TO_HOST = Leaving(8, BLOCK_BYTES, (Tier.HOST,))
TO_OBJECT = Leaving(8, BLOCK_BYTES, (Tier.OBJECT,), unit_blocks=4)
THROUGH_HOST = Leaving(8, BLOCK_BYTES, (Tier.NVME, Tier.OBJECT), passes_host=True)
EMPTYING = Counts(takes_events=True, host_room=7, host_empties=True)


@pytest.mark.parametrize("leaving", [TO_OBJECT, THROUGH_HOST])
def test_what_outlives_the_process_waits_for_a_journal_that_takes_events(leaving: Leaving) -> None:
    assert admit(leaving, Counts(takes_events=False), {}) == Skip(Skipped.JOURNAL)
    assert admit(TO_HOST, Counts(takes_events=False), {}) == Go(8)


def test_a_budget_lets_whole_objects_go_from_the_first_on() -> None:
    for left_bytes, blocks in ((7999, 4), (8000, 8), (100_000, 8), (4000, 4)):
        assert admit(TO_OBJECT, Counts(takes_events=True), {Tier.OBJECT: left_bytes}) == Go(blocks)
    assert admit(TO_OBJECT, Counts(takes_events=True), {Tier.OBJECT: 3999}) == Skip(Skipped.BUDGET)
    assert admit(TO_OBJECT, Counts(takes_events=True), {Tier.NVME: 0}) == Go(8)  # another tier's


def test_blocks_pass_through_host_as_fast_as_others_leave_it() -> None:
    assert admit(THROUGH_HOST, EMPTYING, {}) == Wait()
    assert admit(THROUGH_HOST, EMPTYING._replace(host_room=8), {}) == Go(8)
    assert admit(THROUGH_HOST, EMPTYING._replace(host_empties=False), {}) == Go(8)  # waiting would make no room


def test_blocks_that_could_not_all_go_on_from_host_do_not_go_there() -> None:
    for tier in (Tier.NVME, Tier.OBJECT):
        assert admit(THROUGH_HOST, EMPTYING, {tier: 7999}) == Skip(Skipped.BUDGET)
        assert admit(THROUGH_HOST, EMPTYING, {tier: 8000}) == Wait()


def test_nothing_to_copy_is_not_over_budget() -> None:
    assert admit(TO_OBJECT._replace(blocks=0), Counts(takes_events=True), {Tier.OBJECT: 0}) == Go(0)


@given(
    st.integers(0, 40),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.booleans(),
    st.integers(-5, 60),
    st.booleans(),
    st.dictionaries(st.sampled_from([Tier.NVME, Tier.OBJECT]), st.integers(0, 60_000)),
    st.sampled_from([(Tier.HOST,), (Tier.NVME,), (Tier.OBJECT,), (Tier.NVME, Tier.OBJECT)]),
)
def test_what_goes_is_within_every_budget_and_in_whole_units(
    units: int,
    unit: int,
    passes: bool,
    takes: bool,
    room: int,
    empties: bool,
    budgets: dict[Tier, int],
    ends_in: tuple[Tier, ...],
) -> None:
    leaving = Leaving(units * unit, BLOCK_BYTES, ends_in, passes, unit)
    verdict = admit(leaving, Counts(takes, room, empties), budgets)
    match verdict:
        case Go(blocks):
            assert blocks <= leaving.blocks and blocks % unit == 0
            assert all(blocks * BLOCK_BYTES <= budgets.get(tier, 1 << 60) for tier in ends_in)
            assert takes or DURABLE_TIERS.isdisjoint(ends_in)
            assert not passes or blocks == leaving.blocks
        case Wait():
            assert passes and empties and room < leaving.blocks
        case Skip(why):
            assert why in (Skipped.JOURNAL, Skipped.BUDGET) and (takes or why == Skipped.JOURNAL)
            assert why != Skipped.BUDGET or budgets
