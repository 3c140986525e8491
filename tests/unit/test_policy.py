"""Eviction policies, block by block: who is given up, in which order, and who is passed over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.ids import SequenceHash
from kvbm.core.policy import EVICTION_POLICIES, EvictionPolicy, LeastRecentlyUsed, S3Fifo
from tests.examples import examples


def block(number: int) -> SequenceHash:
    return SequenceHash(number.to_bytes(16, "big"))


def gain(policy: EvictionPolicy, *numbers: int) -> None:
    for number in numbers:
        policy.gain(block(number), pinned=False)


def use(policy: EvictionPolicy, number: int, times: int = 1) -> None:
    for _ in range(times):
        policy.hold(block(number))
        policy.free(block(number))


def victims(policy: EvictionPolicy, count: int) -> list[int]:
    """Numbers of the blocks given up, each withdrawn as a ledger would."""
    chosen = policy.victims(count)
    for victim in chosen:
        policy.lose(victim)
    return [int.from_bytes(victim, "big") for victim in chosen]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_held_back_blocks_are_never_victims_and_too_few_are_none(name: str) -> None:
    policy = EVICTION_POLICIES[name](10)
    gain(policy, 1, 2, 3)
    policy.gain(block(4), pinned=True)
    policy.hold(block(2))
    assert len(policy) == 2
    assert victims(policy, 3) == []
    assert len(policy) == 2
    assert sorted(victims(policy, 2)) == [1, 3]
    assert len(policy) == 0
    policy.free(block(4))
    policy.free(block(2))
    assert sorted(victims(policy, 2)) == [2, 4]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_a_withdrawn_block_is_forgotten_even_while_held_back(name: str) -> None:
    policy = EVICTION_POLICIES[name](10)
    gain(policy, 1, 2)
    policy.hold(block(1))
    policy.lose(block(1))
    policy.lose(block(2))
    assert (len(policy), victims(policy, 1)) == (0, [])
    gain(policy, 1)
    assert victims(policy, 1) == [1]


def test_least_recently_used_gives_up_what_was_let_go_longest_ago() -> None:
    policy = LeastRecentlyUsed(10)
    gain(policy, 1, 2, 3)
    use(policy, 1)
    assert victims(policy, 3) == [2, 3, 1]


def test_s3fifo_gives_up_one_hit_blocks_before_those_used_again() -> None:
    policy = S3Fifo(10)
    gain(policy, 1, 2, 3)
    use(policy, 1)
    gain(policy, 4, 5, 6)
    assert victims(policy, 5) == [2, 3, 4, 5, 1]  # 6 is small's share; 1 went on to main when it was looked at
    assert victims(policy, 1) == [6]


def test_s3fifo_remembers_whom_it_gave_up_from_small_and_puts_them_in_main() -> None:
    policy = S3Fifo(10)
    gain(policy, 1, 2, 3)
    assert victims(policy, 1) == [1]
    gain(policy, 1, 4)
    assert victims(policy, 3) == [2, 3, 1]  # once small has its share, main's head goes
    assert victims(policy, 1) == [4]


def test_a_block_that_was_cleared_is_no_ghost() -> None:
    policy = S3Fifo(10)
    gain(policy, 1, 2, 3)
    policy.lose(block(1))
    gain(policy, 1)
    assert victims(policy, 3) == [2, 3, 1]


def test_s3fifo_takes_main_round_once_for_each_use_three_at_most() -> None:
    policy = S3Fifo(10)
    gain(policy, 1, 2, 3, 4)
    assert victims(policy, 3) == [1, 2, 3]
    gain(policy, 1, 2, 3)  # ghosts: main is 1 2 3, small is 4
    use(policy, 1, times=9)
    use(policy, 2, times=3)
    use(policy, 3, times=1)
    assert victims(policy, 3) == [3, 1, 2]


def test_s3fifo_passes_over_what_is_held_back_at_the_head() -> None:
    policy = S3Fifo(10)
    gain(policy, 1, 2, 3)
    policy.hold(block(1))
    assert victims(policy, 1) == [2]  # 1 went on to main
    policy.free(block(1))
    assert victims(policy, 1) == [1]  # its uses ended with the move; 3 is small's share
    assert victims(policy, 1) == [3]


def test_s3fifo_looks_at_small_when_all_of_main_is_held_back() -> None:
    policy = S3Fifo(20)
    gain(policy, 1, 2, 3, 4)
    assert victims(policy, 2) == [1, 2]
    gain(policy, 1, 2)
    policy.hold(block(1))
    policy.hold(block(2))
    assert victims(policy, 2) == [3, 4]  # although small has no more than its share


def test_s3fifo_remembers_as_many_ghosts_as_main_has_slots() -> None:
    policy = S3Fifo(4)  # small 1, main 3
    gain(policy, 1, 2, 3, 4)
    assert victims(policy, 4) == [1, 2, 3, 4]
    gain(policy, 1, 2)  # 1 was forgotten, 2 is a ghost
    gain(policy, 5)
    assert victims(policy, 3) == [1, 2, 5]


def test_s3fifo_of_one_slot_has_no_main_and_no_ghosts() -> None:
    policy = S3Fifo(1)
    for _ in range(3):
        gain(policy, 1)
        assert victims(policy, 1) == [1]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@settings(max_examples=examples(200), deadline=None)
@given(
    slots=st.integers(1, 12),
    script=st.lists(st.tuples(st.sampled_from(["gain", "hold", "free", "lose", "victims"]), st.integers(1, 12))),
)
def test_victims_are_exactly_what_may_go_whatever_came_before(
    name: str, slots: int, script: list[tuple[str, int]]
) -> None:
    policy = EVICTION_POLICIES[name](slots)
    known: dict[int, bool] = {}  # whether it is held back
    for step, number in script:
        if step == "gain" and number not in known and len(known) < slots:
            policy.gain(block(number), pinned=number % 3 == 0)
            known[number] = number % 3 == 0
        elif step == "hold" and number in known:
            policy.hold(block(number))
            known[number] = True
        elif step == "free" and known.get(number):
            policy.free(block(number))
            known[number] = False
        elif step == "lose" and known.pop(number, None) is not None:
            policy.lose(block(number))
        elif step == "victims":
            evictable = {number for number, held in known.items() if not held}
            chosen = victims(policy, number)
            assert len(chosen) == (number if number <= len(evictable) else 0)
            assert len(set(chosen)) == len(chosen) and set(chosen) <= evictable
            for gone in chosen:
                del known[gone]
        assert len(policy) == sum(not held for held in known.values())
