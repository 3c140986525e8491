"""How far a prefix can be loaded when blocks and states are missing: held to trying every length."""

from __future__ import annotations

import random

import pytest

from kvbm.engines.vllm.reach import ABSENT, LookedUp, joined, reach, whole_reach
from kvbm.engines.vllm.requests import KvGroup

DROPS = 10_000
FULL = KvGroup(0, 4, 4)
WINDOW = KvGroup(1, 4, 4, window_blocks=3)
CHUNK = KvGroup(5, 4, 4, chunk_tokens=12)
STATE = KvGroup(2, 4, 4, window_blocks=1, is_state=True)
MODELS = {
    "attention and state": [FULL, STATE],
    "several states": [FULL, STATE, STATE._replace(id=3), STATE._replace(id=4)],
    "state alone": [STATE],
    "attention, window and state": [FULL, WINDOW, STATE],
    "attention and chunks": [FULL, CHUNK],
    "chunks and states": [CHUNK, STATE],
    "a draft model's layers": [FULL._replace(has_draft=True)],
    "windows of a draft model": [FULL, WINDOW._replace(has_draft=True)],
    "attention, state and a draft model": [FULL._replace(has_draft=True), FULL._replace(id=6), STATE],
    "blocks of several sizes": [FULL._replace(block_tokens=2, hash_tokens=2), STATE._replace(hash_tokens=2)],
}


def right(groups: list[KvGroup], held: list[bytes], computed: int, limit: int, align: int) -> int:
    """The longest prefix that may be loaded, found by trying all."""

    def is_whole(group: KvGroup, found: bytes, end: int) -> bool:
        first, last = computed // group.block_tokens, end // group.block_tokens
        needed = range(max(first, group.first_needed(last)), last + group.has_draft)
        return all(at - first < len(found) and found[at - first] != ABSENT for at in needed)

    ends = range(limit // align * align, computed, -align)
    return next((end for end in ends if all(map(is_whole, groups, held, [end] * len(groups)))), computed)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_counts_only_as_far_as_blocks_and_the_state_at_its_boundary_are_held(name: str) -> None:
    groups = MODELS[name]
    align = max(group.block_tokens for group in groups)
    chosen = random.Random(name)
    shortened = 0
    for _ in range(DROPS // len(MODELS)):
        limit = chosen.randrange(1, 16) * align
        computed = chosen.randrange(0, limit, align)
        lost = chosen.choice((0.0, 0.05, 0.2, 0.6))
        held = [
            bytes(
                ABSENT if chosen.random() < lost * (4 if group.is_state else 1) else chosen.choice((1, 2))
                for _ in range((limit - computed) // group.block_tokens + chosen.choice((-1, 0, 0, 0, 1, 1)))
            )
            for group in groups
        ]
        expected = right(groups, held, computed, limit, align)
        assert reach(groups, held, computed, limit, align) == expected, (held, computed, limit)
        shortened += expected < limit
    assert shortened > 100


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_pods_and_objects_count_as_those_of_own_tiers(name: str) -> None:
    """What each holds has holes of its own; a block that either has is held."""
    groups, chosen, longer = MODELS[name], random.Random(f"elsewhere {name}"), 0
    align = max(group.block_tokens for group in groups)
    for _ in range(DROPS // len(MODELS)):
        limit = chosen.randrange(1, 16) * align
        computed = chosen.randrange(0, limit, align)
        own, elsewhere, both = [], [], []
        for group in groups:
            count = (limit - computed) // group.block_tokens + group.has_draft
            mine = [ABSENT if chosen.random() < 0.5 else chosen.choice((1, 2)) for _ in range(count)]
            told = max(0, count + chosen.choice((-2, 0, 0, 0, 3)))
            theirs = [ABSENT if chosen.random() < 0.2 else chosen.choice((2, 3)) for _ in range(told)]
            own.append(bytes(mine))
            elsewhere.append(bytes(theirs))
            theirs += [ABSENT] * count
            both.append(bytes(one if one != ABSENT else other for one, other in zip(mine, theirs, strict=False)))
        held = [joined(mine, theirs) for mine, theirs in zip(own, elsewhere, strict=True)]
        assert held == both
        assert reach(groups, held, computed, limit, align) == right(groups, both, computed, limit, align)
        longer += reach(groups, held, computed, limit, align) > reach(groups, own, computed, limit, align)
    assert longer > 100


def test_a_state_elsewhere_is_no_help() -> None:
    whole, none = bytes([1] * 4), ABSENT
    assert reach([FULL, STATE], [whole, bytes([1, 1, 1, none])], 0, 16, 4) == 12
    assert reach([FULL, STATE], [whole, bytes([none, none, none, none])], 0, 16, 4) == 0
    assert reach([FULL, STATE], [bytes([1, 1, none, 1]), bytes([none, 1, none, 1])], 0, 16, 4) == 8
    assert reach([FULL, STATE], [bytes([1, none]), bytes([none, 1])], 8, 16, 4) == 8


def test_blocks_without_a_state_say_where_a_state_would_help() -> None:
    assert whole_reach([FULL, STATE], [bytes([1, 1, ABSENT]), bytes([ABSENT] * 3)], 0, 12) == 8
    assert whole_reach([STATE], [bytes([ABSENT] * 3)], 0, 12) == 12


def looked_up(found: bytes, asked: list[tuple[int, int]]) -> LookedUp:
    def look(begin: int, end: int) -> bytes:
        asked.append((begin, end))
        return found[begin:end]

    return LookedUp(look, len(found))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_looked_up_as_it_is_needed_reaches_as_far(name: str) -> None:
    groups, chosen = MODELS[name], random.Random(f"looked up {name}")
    align = max(group.block_tokens for group in groups)
    for _ in range(1000):
        limit = chosen.randrange(1, 40) * align
        computed = chosen.randrange(0, limit, align)
        lost = chosen.choice((0.0, 0.02, 0.3, 0.9))
        held, asked = [], []
        for group in groups:
            count = (limit - computed) // group.block_tokens + chosen.choice((-1, 0, 1))
            held.append(bytes(ABSENT if chosen.random() < lost else 1 for _ in range(count)))
            asked.append([])
        some = [looked_up(found, questions) for found, questions in zip(held, asked, strict=True)]
        assert reach(groups, some, computed, limit, align) == reach(groups, held, computed, limit, align)
        for questions in asked:  # no block twice
            assert sum(end - begin for begin, end in questions) == len(
                {at for begin, end in questions for at in range(begin, end)}
            )


def test_of_a_window_only_its_blocks_are_looked_up_and_of_states_those_from_the_last_one_held() -> None:
    asked: list[tuple[int, int]] = []
    window = WINDOW._replace(window_blocks=64)
    assert reach([FULL, window], [bytes(1000), looked_up(bytes(1000), asked)], 0, 4000, 4) == 4000
    assert asked == [(936, 1000)]
    asked.clear()
    states = bytearray([ABSENT]) * 1000
    states[700] = 1
    assert reach([FULL, STATE], [bytes(1000), looked_up(bytes(states), asked)], 0, 4000, 4) == 2804
    assert sum(end - begin for begin, end in asked) < 600 and len(asked) < 6
    asked.clear()
    assert reach([FULL, STATE], [bytes([ABSENT]) * 1000, looked_up(bytes(1000), asked)], 0, 4000, 4) == 0
    assert not asked
