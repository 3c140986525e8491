"""One instance in virtual time without bytes or events: a prefill queue, first come first served, before its pools of
blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbm.bench.virtual_time.block_pool import BlockPool, ColderPool
from kvbm.core.ids import Tier
from kvbm.manager.load_meter import LoadMeter


class WorkloadRequest(NamedTuple):
    """One request of a workload, ready to be routed.

    Attributes:
        blocks: ids of its full blocks, in prompt order; equal ids mean equal prefixes.
        hashes: the same, packed.
    """

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    hashes: bytes


class InstanceModel:
    """A queue and pools, and what a router may know of them.

    Args:
        slots: of its HBM pool.
        colder: its pools of colder tiers; that of OBJECT is shared with others.

    Attributes:
        tokens_per_s: what it prefills in a second.
        is_drained: it is given no new requests.
        pool: its HBM pool.
        queue: requests that wait, with the tokens that were missing when they came.
        waiting_tokens: of those.
        busy: the request in prefill: when it began, its missing tokens. It begins at infinity while its blocks are
            being read.
        assigned_tokens: missing tokens of all requests that have no first token yet.
        running: requests being decoded.
        active: blocks of requests that have not ended, and of how many each.
        prompt_blocks, requests, hits: what it was given and what it had.
        meter: what it measures of itself.
    """

    def __init__(self, slots: int, tokens_per_s: float, colder: Mapping[Tier, ColderPool] | None = None) -> None:
        self.tokens_per_s = tokens_per_s
        self.is_drained = False
        self.pool = BlockPool(slots)
        self.colder = dict(colder or {})
        self.queue: deque[tuple[WorkloadRequest, int]] = deque()
        self.waiting_tokens = 0
        self.busy: tuple[float, int] | None = None
        self.assigned_tokens = 0
        self.running = 0
        self.active: dict[int, int] = {}
        self.prompt_blocks = self.requests = self.hits = 0
        self.meter = LoadMeter()

    def held(self, blocks: Sequence[int]) -> list[Tier]:
        """For each block from the first on, as far as its own tiers go without a hole, the hottest that holds it."""
        tiers: list[Tier] = []
        for block in blocks:
            if block in self.pool:
                tiers.append(Tier.HBM)
                continue
            tier = next((tier for tier in (Tier.HOST, Tier.NVME) if block in self.colder.get(tier, ())), None)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def depth(self, blocks: Sequence[int]) -> int:
        """How many blocks from the first on its own tiers hold."""
        return len(self.held(blocks)) if self.colder else self.pool.depth(blocks)

    def lends(self, block: int) -> bool:
        """Whether others can read a block here: from HOST and NVME, as managers lend."""
        return any(block in self.colder.get(tier, ()) for tier in (Tier.HOST, Tier.NVME))

    def queued_tokens(self, now_s: float) -> float:
        """Tokens that must be computed before a request that comes now."""
        left = 0.0
        if self.busy is not None:
            began_s, missing = self.busy
            left = max(0.0, missing - max(0.0, now_s - began_s) * self.tokens_per_s)
        return self.waiting_tokens + left

    def begin(self, request: WorkloadRequest) -> None:
        """The request is one of its own until it ends."""
        for block in request.blocks:
            self.active[block] = self.active.get(block, 0) + 1

    def end(self, request: WorkloadRequest) -> None:
        """Its last token is out."""
        for block in request.blocks:
            left = self.active[block] - 1
            if left:
                self.active[block] = left
            else:
                del self.active[block]
