"""What the scheduler's half tells the workers at each step, and what they answer. Pickled by vLLM, so plain and small.

A job is one run of blocks between the engine's paged tensors and rows of HOST. Its columns are packed: 4 little-endian bytes a number.
Every rank carries out every job on its own part of the rows and answers once; a job is over when all ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm.engines.vllm.adapters import Loaded


class HostShare(NamedTuple):
    """The HOST pool's memory, for processes of the same host to map.

    Attributes:
        pid, fd: of the process that holds it; `/proc/<pid>/fd/<fd>` opens it.
        mapped_bytes: of the whole memory.
        rows: slots of the pool; row s begins at byte s * row_bytes.
        row_bytes: bytes of a block, all parts of it.
        part_bytes: bytes of one rank's part; part p of a row begins at byte p * part_bytes in it.
    """

    pid: int
    fd: int
    mapped_bytes: int
    rows: int
    row_bytes: int
    part_bytes: int


class Job(NamedTuple):
    """Blocks to copy.

    Attributes:
        id: grows; never used twice in the life of a scheduler.
        blocks: the engine's block ids, packed u32.
        rows: the HOST slot of each, packed u32.
        request: a load's request, which waits for it; "" for a store.
        why: in words when it is known to fail, else "".
        adapter: of a load, the number of the request's adapter; 0: none.
        weights: of a load with an adapter, the digest that each rank must have loaded under that number.
    """

    id: int
    blocks: bytes
    rows: bytes
    request: str = ""
    why: str = ""
    adapter: int = 0
    weights: tuple[str, ...] = ()


@dataclass
class Plan:
    """What workers do at one step: loads at once, stores of blocks that earlier steps have computed.

    Attributes:
        host: where HOST is; None while there is nothing to do.
        is_idle: the step has no model work, so that waiting a little for copies holds up nobody.
    """

    host: HostShare | None = None
    is_idle: bool = False
    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)


class Stored(NamedTuple):
    """How one rank's copy of a stored job ended.

    Attributes:
        checksums: CRC-32C of each block's part, packed u32; empty when the copy failed.
        why: in words when it failed, else "".
    """

    checksums: bytes
    why: str = ""


@dataclass
class Answers:
    """What the ranks have finished since they last answered.

    Attributes:
        stored: job → rank's part → how it ended. Ranks that hold the same KV as another answer for no part and store nothing.
        loaded: load job → how many ranks are over with it, well or not.
        failed: load job → why it failed on some rank.
        refused: why a rank cannot take part at all, "" when it can: its tensors are not what the scheduler was told, or HOST
            cannot be mapped, or its weights are not those it was started with.
        adapters: rank → what it has done with adapters, in its order.
    """

    stored: dict[int, dict[int, Stored]] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: str = ""
    adapters: dict[int, list[Loaded]] = field(default_factory=dict)

    def merge(self, other: Answers) -> None:
        """Take in what another rank answers."""
        for job, parts in other.stored.items():
            self.stored.setdefault(job, {}).update(parts)
        for job, count in other.loaded.items():
            self.loaded[job] = self.loaded.get(job, 0) + count
        for job, why in other.failed.items():
            self.failed.setdefault(job, why)
        self.refused = self.refused or other.refused
        self.adapters.update(other.adapters)

    def __bool__(self) -> bool:
        return bool(self.stored or self.loaded or self.failed or self.refused or self.adapters)


class Ranks(NamedTuple):
    """How the KV of a block is spread over the ranks of one engine.

    Attributes:
        ranks: workers of the engine.
        replicas: consecutive ranks that hold identical KV; the first of them stores, all of them load.
        part_bytes: what a block has on one rank.
    """

    ranks: int
    replicas: int
    part_bytes: int

    @property
    def parts(self) -> int:
        """Different parts of a block."""
        return self.ranks // self.replicas

    @property
    def row_bytes(self) -> int:
        """A block of all ranks."""
        return self.parts * self.part_bytes

    def part_of(self, rank: int) -> int:
        """The part a rank reads."""
        return rank // self.replicas

    def stores(self, rank: int) -> bool:
        """Whether a rank is the one that stores its part."""
        return rank % self.replicas == 0
