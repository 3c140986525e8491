"""How far a prompt's prefix reaches that can be loaded, from what is held of each KV group. Pure.

A prefix counts as far as every group has what the tokens behind it need: a group of full attention all of its blocks,
one of a sliding window those that the window still reads, one of recurrent layers the state at that very boundary. One
with layers of a draft model has to have the block behind the prefix besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvbm.engines.vllm.requests import KvGroup

ABSENT = 0xFF  # of `EngineHbmManager.holders`: no tier holds the block
_ABSENT = bytes([ABSENT])
_LOOKED_AT = 64  # blocks at first, where the last one is sought that is held


class HeldBlocks(Protocol):
    """What is held of a group's blocks: for each the tier that holds it, or ABSENT."""

    def __len__(self) -> int: ...
    def __getitem__(self, blocks: slice, /) -> bytes: ...


class LookedUp:
    """A `HeldBlocks` that is looked up as far as it is asked for: of a window or a state that is little, at the end of
    a prompt.

    Args:
        look: (begin, end) → what is held of those blocks.
        blocks: how many there are.
    """

    def __init__(self, look: Callable[[int, int], bytes], blocks: int) -> None:
        self._look, self._blocks = look, blocks
        self._begin = self._end = 0  # what is known
        self._found = b""

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, blocks: slice, /) -> bytes:
        begin, end, _ = blocks.indices(self._blocks)
        if begin >= end:
            return b""
        if not self._found:
            self._begin = self._end = end
        if begin < self._begin:
            self._found = self._look(begin, self._begin) + self._found
            self._begin = begin
        if self._end < end:
            self._found += self._look(self._end, end)
            self._end = end
        return self._found[begin - self._begin : end - self._begin]


def reach(
    groups: Sequence[KvGroup], held: Sequence[HeldBlocks], computed_tokens: int, limit_tokens: int, align_tokens: int
) -> int:
    """The most tokens for which every group has what it needs; at least `computed_tokens`.

    Args:
        held: by group, of blocks from `computed_tokens` on. What lies beyond its end is not held.
        computed_tokens: of the prompt, in the engine already; a multiple of `align_tokens`.
        limit_tokens: as far as a prefix may reach.
        align_tokens: what prefixes are multiples of, itself a multiple of every group's block.
    """
    end_tokens = min(limit_tokens, whole_reach(groups, held, computed_tokens, limit_tokens))
    some = [(group, found) for group, found in zip(groups, held, strict=True) if not group.keeps_all]
    return part_reach(some, computed_tokens, end_tokens, align_tokens)


def part_reach(
    some: Sequence[tuple[KvGroup, HeldBlocks]], computed_tokens: int, end_tokens: int, align_tokens: int
) -> int:
    """What `reach` gives for groups that do not keep all blocks, where the others reach to `end_tokens`."""
    end_tokens -= end_tokens % align_tokens
    while end_tokens > computed_tokens:
        best = end_tokens
        for group, found in some:
            best = min(best, _reach_of(group, found, computed_tokens, best))
            best -= best % align_tokens
            if best <= computed_tokens:
                return computed_tokens
        if best == end_tokens:
            return end_tokens
        end_tokens = best
    return computed_tokens


def _reach_of(group: KvGroup, found: HeldBlocks, computed_tokens: int, end_tokens: int) -> int:
    """Tokens beyond which no prefix of at most so many has what a group needs, one that does not keep all blocks."""
    first, end = computed_tokens // group.block_tokens, end_tokens // group.block_tokens
    begin, behind = max(first, group.first_needed(end)), int(group.has_draft)
    if begin == end + behind:
        return end_tokens
    if end + behind - first > len(found):
        return (first + len(found) - behind) * group.block_tokens
    hole = found[begin - first : end + behind - first].rfind(_ABSENT)
    if hole < 0:
        return end_tokens
    last = begin - first + hole
    if group.window_blocks is not None:  # any prefix needs its last block
        last = _last_held(found, last)
    return (first + last - behind) * group.block_tokens


def _last_held(found: HeldBlocks, end: int) -> int:
    """How many blocks there are up to the last one before `end` that is held."""
    count = _LOOKED_AT
    while end > 0:
        begin = max(0, end - count)
        if kept := len(found[begin:end].rstrip(_ABSENT)):
            return begin + kept
        end, count = begin, 2 * count
    return 0


def joined(own: bytes, elsewhere: bytes) -> bytes:
    """What is held of a group's blocks in the own tiers or else beyond them, as `reach` takes it.

    Args:
        elsewhere: from the same block on; what lies beyond its end is not held there.
    """
    mine = np.frombuffer(own, dtype=np.uint8)
    others = np.full(len(mine), ABSENT, dtype=np.uint8)
    shared = min(len(mine), len(elsewhere))
    others[:shared] = np.frombuffer(elsewhere, dtype=np.uint8)[:shared]
    return np.where(mine == ABSENT, others, mine).tobytes()


def whole_reach(groups: Sequence[KvGroup], held: Sequence[HeldBlocks], computed_tokens: int, limit_tokens: int) -> int:
    """The tokens up to which the groups that keep all blocks hold them; `limit_tokens` where there is no such group."""
    end_tokens = limit_tokens
    for group, found in zip(groups, held, strict=True):
        if group.keeps_all:
            depth = found[:].find(_ABSENT)
            depth = len(found) if depth < 0 else depth
            blocks = computed_tokens // group.block_tokens + depth - group.has_draft
            end_tokens = min(end_tokens, blocks * group.block_tokens)
    return end_tokens
