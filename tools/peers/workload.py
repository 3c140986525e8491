"""The work both sides do, from a seed: which blocks instances hold, and in which order they gain and lose them.

numpy and the standard library only, because this file is read by our interpreter and by each peer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

INSTANCES = 16
CHAIN_BLOCKS = 256
RUN_BLOCKS = 16
BLOCK_TOKENS = 16
POOL_SLOTS = 65_536
_REUSED_RUNS = 1024  # a run is used again while so many are younger; an LRU of 4,096 runs then still has it


class Part(NamedTuple):
    """Consecutive blocks of a chain."""

    chain: int
    first: int
    count: int


class Step(NamedTuple):
    """What one instance gains and loses, the latter from its end; either may be None."""

    instance: int
    created: Part | None
    withdrawn: Part | None


class Life(NamedTuple):
    """One step of an engine: a run that is held is used again while a new one of the same length is computed.

    Attributes:
        reused: the earlier step whose run is matched; None while the pool fills.
        created: names the new run; its tokens are made from this number.
        blocks: length of both.
    """

    reused: int | None
    created: int
    blocks: int


def hashes(part: Part) -> np.ndarray:
    """The hashes of a part, (count, 2) u64: 16 bytes a block, and for a peer with two hashes a block, one in
    each half.
    """
    names = np.uint64(part.chain << 24) + np.arange(part.first, part.first + part.count, dtype=np.uint64)
    return np.stack([_mix(names * np.uint64(2)), _mix(names * np.uint64(2) + np.uint64(1))], axis=1)


def block_rows(count: int, block_bytes: int) -> np.ndarray:
    """The bytes of blocks, (count, block_bytes) uint8, none like another, none that compresses; begins on a page."""
    room = np.zeros(count * block_bytes + 4096, dtype=np.uint8)
    first = -room.ctypes.data % 4096
    rows = room[first : first + count * block_bytes].reshape(count, block_bytes)
    rng = np.random.default_rng(5)
    for row in rows:
        row[:] = np.frombuffer(rng.bytes(block_bytes), dtype=np.uint8)
    return rows


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def live_chains(live_blocks: int) -> int:
    """How many chains make a live set: as near as whole chains, equally many of each instance, come."""
    return max(1, round(live_blocks / CHAIN_BLOCKS / INSTANCES)) * INSTANCES


def filling(chains: int) -> Iterator[Step]:
    """The live set from nothing: every chain held by one instance, the instances in turn."""
    for chain in range(chains):
        yield Step(chain % INSTANCES, Part(chain, 0, CHAIN_BLOCKS), None)


def replacing(chains: int, first: int, steps: int) -> Iterator[Step]:
    """Steady state: each step creates the next chain and withdraws the oldest, both of one instance."""
    for chain in range(first, first + steps):
        yield Step(chain % INSTANCES, Part(chain, 0, CHAIN_BLOCKS), Part(chain - chains, 0, CHAIN_BLOCKS))


def shared_depths(chain: int, seed: int = 1) -> list[int]:
    """How much of a chain that all instances share each of them holds: 1 to 256 blocks, 128 on average."""
    return [int(depth) for depth in np.random.default_rng([seed, chain]).integers(1, CHAIN_BLOCKS + 1, INSTANCES)]


def shared_chains(live_blocks: int) -> int:
    """How many chains, each held by all instances to its own depth, make so many residencies."""
    return max(1, live_blocks // (INSTANCES * (CHAIN_BLOCKS + 1) // 2))


def sharing(chains: int) -> Iterator[Step]:
    """The residencies that prefix queries ask for."""
    for chain in range(chains):
        for instance, depth in enumerate(shared_depths(chain)):
            yield Step(instance, Part(chain, 0, depth), None)


def pool_filling() -> Iterator[Life]:
    """Runs of 16 until every slot of the pool holds a block."""
    for run in range(POOL_SLOTS // RUN_BLOCKS):
        yield Life(None, run, RUN_BLOCKS)


def lives(first: int, count: int, blocks: int, seed: int = 1) -> Iterator[Life]:
    """Steps on a full pool: every one evicts as much as it creates."""
    ages = np.random.default_rng([seed, first]).integers(1, _REUSED_RUNS, count)
    for at, age in enumerate(ages):
        yield Life(first + at - int(age), first + at, blocks)


def tokens(run: int, blocks: int) -> np.ndarray:
    """The tokens of a run, u32; a prompt of its own."""
    return np.random.default_rng([7, run]).integers(0, 32_000, blocks * BLOCK_TOKENS, dtype=np.uint32)
