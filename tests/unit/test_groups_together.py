"""A prefix of a model with several KV groups counts as far as all of them hold what tokens behind it need."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvbm.catalog.answers.groups_together import tokens_together
from kvbm.core.chain_statement import ChainGroup

FULL, WINDOW = ChainGroup(0, 4), ChainGroup(1, 8, window_blocks=2)
CHUNKS, DRAFT = ChainGroup(2, 4, chunk_tokens=16), ChainGroup(3, 4, has_draft=True)


def bits(text: str) -> np.ndarray:
    return np.array([one == "1" for one in text], bool)


@pytest.mark.parametrize(
    ("groups", "step", "tokens"),
    [
        ([(FULL, "1110")], 4, 12),
        ([(FULL, "0111")], 4, 0),
        ([(FULL, "")], 4, 0),
        ([(FULL, "111111"), (WINDOW, "110")], 8, 16),
        ([(FULL, "11111111"), (WINDOW, "0011")], 8, 32),  # what lies before the window is not needed
        ([(FULL, "11111111"), (WINDOW, "0101")], 8, 0),
        ([(FULL, "1111"), (WINDOW, "10")], 8, 8),
        ([(CHUNKS, "0000110")], 4, 24),
        ([(CHUNKS, "0000010")], 4, 16),  # a chunk's beginning needs nothing before it
        ([(DRAFT, "1111")], 4, 12),
        ([(DRAFT, "1")], 4, 0),
        ([(FULL, "1111111"), (ChainGroup(1, 4), "1110111")], 8, 8),
    ],
)
def test_what_all_groups_hold_counts(groups: list[tuple[ChainGroup, str]], step: int, tokens: int) -> None:
    assert tokens_together([(group, bits(text)) for group, text in groups], step) == tokens


def test_it_is_the_longest_prefix_of_which_each_group_has_what_is_needed() -> None:
    numbers = random.Random(155)
    for _ in range(500):
        groups = numbers.sample([FULL, WINDOW, CHUNKS, DRAFT], numbers.randrange(1, 5))
        length = numbers.randrange(100)
        held = [
            (one, np.array([numbers.random() < 0.9 for _ in range(length // one.block_tokens)], bool)) for one in groups
        ]
        step = 8
        fitting = [end for end in range(0, length + 1, step) if all(_has(one, had, end) for one, had in held)]
        assert tokens_together(held, step) == max(fitting, default=0)


def _has(group: ChainGroup, held: np.ndarray, end: int) -> bool:
    """Whether a group has all that tokens behind `end` need, by its words alone."""
    last = end // group.block_tokens
    needed = range(group.first_needed(last), last + group.has_draft)
    return end == 0 or all(at < len(held) and bool(held[at]) for at in needed)
