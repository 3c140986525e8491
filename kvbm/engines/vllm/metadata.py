"""What the scheduler's half tells the workers at each step, and what they answer. Pickled by vLLM, so plain and small.

A job is one run of blocks between the engine's paged tensors and rows of HOST. Its columns are packed: 4 little-endian
bytes a number. Every rank carries out every job on its own part of the rows and answers once; a job is over when all
ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm.engines.vllm.adapters import Loaded
from kvbm.engines.vllm.ranks import Ranks


class HostShare(NamedTuple):
    """The HOST pool's memory, for processes of the same host to map.

    Attributes:
        pid, fd: of the process that holds it; `/proc/<pid>/fd/<fd>` opens it.
        mapped_bytes: of the whole memory.
        rows: slots of the pool; row s begins at byte s * ranks.row_bytes_on(host).
        ranks: where the part of each rank lies in a row.
        host: whose ranks have their parts there.
        huge_pages: as `pools.host.huge_pages`.
        token: random; pid and descriptor alone may name another engine's memory once this one is gone.
    """

    pid: int
    fd: int
    mapped_bytes: int
    rows: int
    ranks: Ranks
    host: int = 0
    huge_pages: str = "auto"
    token: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of a block on that host, all parts of it."""
        return self.ranks.row_bytes_on(self.host)


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
        after: the last step whose forward may touch the blocks; -1: any before the plan's.
    """

    id: int
    blocks: bytes
    rows: bytes
    request: str = ""
    why: str = ""
    adapter: int = 0
    weights: tuple[str, ...] = ()
    after: int = -1


@dataclass
class StepPlan:
    """What workers do at one step: loads at once, stores of blocks that earlier steps have computed.

    Attributes:
        host: where HOST is on the first host; None while there is nothing to do.
        other_hosts: where it is on the others, as far as they have said.
        is_idle: the step has no model work, so that waiting a little for copies holds up nobody.
        step: its number, from 1; 0: it has none.
    """

    host: HostShare | None = None
    other_hosts: tuple[HostShare, ...] = ()
    is_idle: bool = False
    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    step: int = 0


class StoredPart(NamedTuple):
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
        stored: job → rank's part → how it ended. Ranks that hold the same KV as another answer for no part and store
            nothing.
        loaded: load job → how many ranks are over with it, well or not.
        failed: load job → why it failed on some rank.
        refused: why a rank cannot take part at all, "" when it can: its tensors are not what the scheduler was told, or
            HOST cannot be mapped, or its weights are not those it was started with.
        adapters: rank → what it has done with adapters, in its order.
        hosts: host → where HOST is there; said by its first rank.
    """

    stored: dict[int, dict[int, StoredPart]] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: str = ""
    adapters: dict[int, list[Loaded]] = field(default_factory=dict)
    hosts: dict[int, HostShare] = field(default_factory=dict)

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
        self.hosts.update(other.hosts)

    def __bool__(self) -> bool:
        return bool(self.stored or self.loaded or self.failed or self.refused or self.adapters or self.hosts)
