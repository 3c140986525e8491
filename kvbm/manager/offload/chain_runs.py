"""Runs of chains that wait to be copied, a way's in their order: bytes for each run, nothing for each block.

A sequence hash covers all blocks before it, so the last hash of a run tells whether the run waits already: what is
offered again and again while the copies are behind waits once. Runs of a chain are cut where its positions are
multiples of the longest run, so that the same blocks come in the same runs, whoever offers them. No thread, clock or
pool here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES

NOWHERE = -1  # the position of a run that is not known to be one chain


class ChainRun(NamedTuple):
    """Blocks that follow each other in a chain.

    Attributes:
        hashes: packed.
        start: position of the first in its chain, in blocks; NOWHERE: not known, and they may be of several chains.
    """

    hashes: bytes
    start: int = NOWHERE

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self.hashes) // HASH_BYTES

    def positions(self) -> list[int]:
        """Of each block in its chain."""
        return [NOWHERE] * self.blocks if self.start < 0 else list(range(self.start, self.start + self.blocks))

    def cut(self, blocks: int) -> tuple[ChainRun, ChainRun]:
        """The first `blocks` of it, and the rest."""
        at = blocks * HASH_BYTES
        rest = NOWHERE if self.start < 0 else self.start + blocks
        return ChainRun(self.hashes[:at], self.start), ChainRun(self.hashes[at:], rest)


class ChainRuns:
    """The runs that wait for one way, the first to go first.

    Args:
        run_bytes: of the longest run that is kept in one piece.
        unit_blocks: what is never cut apart: the blocks of an object, else one.
    """

    def __init__(self, run_bytes: int, unit_blocks: int = 1) -> None:
        self._run_bytes, self._unit_blocks = run_bytes, unit_blocks
        self._runs: OrderedDict[bytes, ChainRun] = OrderedDict()  # by the last hash

    def __bool__(self) -> bool:
        return bool(self._runs)

    def has(self, hashes: bytes) -> bool:
        """Whether all of a run waits already, as the end of one."""
        there = self._runs.get(hashes[-HASH_BYTES:])
        return there is not None and there.hashes.endswith(hashes)

    def add(self, run: ChainRun, parent: bytes = b"") -> int:
        """Let a run wait, no longer than the longest; gives how many blocks more wait now.

        Args:
            parent: the block before it: where a run that ends there waits, and both are no longer than one, they are
                one.
        """
        added = 0
        while run.hashes:
            there = self._runs.get(run.hashes[-HASH_BYTES:])
            if there is None:
                break
            if run.hashes.endswith(there.hashes):  # longer than it was
                self._runs[run.hashes[-HASH_BYTES:]] = run
                return added + run.blocks - there.blocks
            if there.hashes.endswith(run.hashes):
                return added
            run, _ = run.cut(max(0, run.blocks - self._unit_blocks))  # its last block, or object, waits
        if not run.hashes:
            return added
        added += run.blocks
        before = self._runs.get(parent) if run.start > 0 else None
        if before is not None and len(before.hashes) + len(run.hashes) <= self._run_bytes:
            del self._runs[parent]
            run = ChainRun(before.hashes + run.hashes, before.start)
        self._runs[run.hashes[-HASH_BYTES:]] = run
        return added

    def take(self) -> list[ChainRun]:
        """What has waited longest, as many runs as make no more than one of the longest."""
        room_bytes, taken = self._run_bytes, list[ChainRun]()
        while self._runs:
            key, run = next(iter(self._runs.items()))
            if taken and len(run.hashes) > room_bytes:
                break
            room_bytes -= len(run.hashes)
            taken.append(run)
            del self._runs[key]
        return taken

    def add_first(self, runs: Sequence[ChainRun]) -> None:
        """Runs that were taken wait again, before all others."""
        for run in reversed(runs):
            key = run.hashes[-HASH_BYTES:]
            self._runs[key] = run
            self._runs.move_to_end(key, last=False)

    def drop_last(self) -> ChainRun:
        """What was let wait last does no more."""
        return self._runs.popitem()[1]


def stretches(run: ChainRun, wanted: bytes) -> Iterator[tuple[int, ChainRun]]:
    """Some of a run's blocks, in its order, as stretches without a hole, each with the index of its first block in the
    run.
    """
    if run.start < 0:
        yield 0, ChainRun(wanted)
        return
    chain, at, taken = run.hashes, 0, 0
    while taken < len(wanted):
        at = _index(chain, wanted[taken : taken + HASH_BYTES], at)
        size = _same_bytes(chain, at, wanted, taken)
        yield at // HASH_BYTES, ChainRun(wanted[taken : taken + size], run.start + at // HASH_BYTES)
        at, taken = at + size, taken + size


def pieces(run: ChainRun, run_blocks: int) -> Iterator[tuple[int, ChainRun]]:
    """A run in pieces that end where positions are multiples of the longest, each with the index of its first block in
    the run.
    """
    hashes, start, blocks = run.hashes, run.start, run.blocks
    end = run_blocks - max(0, start) % run_blocks
    if blocks <= end:
        yield 0, run
        return
    index = 0
    while index < blocks:
        piece = hashes[index * HASH_BYTES : end * HASH_BYTES]
        yield index, ChainRun(piece, NOWHERE if start < 0 else start + index)
        index, end = end, end + run_blocks


def _index(chain: bytes, block: bytes, at: int) -> int:
    """Where a block lies, from a place on; it does."""
    found = chain.index(block, at)
    while found % HASH_BYTES:
        found = chain.index(block, found + 1)
    return found


def _same_bytes(one: bytes, at: int, other: bytes, there: int) -> int:
    """How far two columns are the same from two places on, at whole blocks; at least one is."""
    most = min(len(one) - at, len(other) - there)
    same, step = HASH_BYTES, most - HASH_BYTES
    while step >= HASH_BYTES:
        step -= step % HASH_BYTES
        if one[at + same : at + same + step] == other[there + same : there + same + step]:
            same += step
            step = min(step, most - same)
        else:
            step //= 2
    return same
