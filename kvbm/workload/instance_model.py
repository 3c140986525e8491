"""One instance in virtual time without bytes or events: a prefill queue, first come first served, before a pool of blocks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.manager.load_meter import LoadMeter


class Request(NamedTuple):
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


class BlockPool:
    """Blocks in a pool of fixed size. What is pinned stays; of the rest the least recently used goes first, ends of prompts before starts."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pins: dict[int, int] = {}  # of blocks that are held and pinned
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._written = 0  # slots of blocks that are being computed

    def depth(self, blocks: Sequence[int]) -> int:
        """How many blocks from the first on are held."""
        for index, block in enumerate(blocks):
            if block not in self._pins and block not in self._unpinned:
                return index
        return len(blocks)

    @property
    def used(self) -> float:
        """The share of the slots that nothing can be evicted from."""
        return (len(self._pins) + self._written) / self._slots

    def acquire(self, blocks: Sequence[int]) -> int | None:
        """Pin what is held and take slots for the rest. Returns how many are held; None when pins leave too few slots."""
        depth = self.depth(blocks)
        missing = len(blocks) - depth
        pinned_anew = sum(block not in self._pins for block in blocks[:depth])
        if len(self._pins) + pinned_anew + self._written + missing > self._slots:
            return None
        for block in blocks[:depth]:
            self._pin(block)
        self._written += missing
        while len(self._pins) + len(self._unpinned) + self._written > self._slots:
            self._unpinned.popitem(last=False)
        return depth

    def create(self, blocks: Sequence[int]) -> None:
        """What `acquire` took slots for is computed: it is held, and pinned."""
        self._written -= len(blocks)
        for block in blocks:
            self._pin(block)

    def unpin(self, blocks: Sequence[int]) -> None:
        """The request needs its blocks no more."""
        for block in reversed(blocks):
            left = self._pins[block] - 1
            if left:
                self._pins[block] = left
            else:
                del self._pins[block]
                self._unpinned[block] = None

    def _pin(self, block: int) -> None:
        self._unpinned.pop(block, None)
        self._pins[block] = self._pins.get(block, 0) + 1


class InstanceModel:
    """A queue and a pool, and what a router may know of them.

    Attributes:
        tokens_per_s: what it prefills in a second.
        queue: requests that wait, with the tokens that were missing when they came.
        waiting_tokens: of those.
        busy: the request in prefill: when it began, its missing tokens.
        assigned_tokens: missing tokens of all requests that have no first token yet.
        running: requests being decoded.
        active: blocks of requests that have not ended, and of how many each.
        prompt_blocks, requests, hits: what it was given and what it had.
        meter: what it measures of itself.
    """

    def __init__(self, slots: int, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.pool = BlockPool(slots)
        self.queue: deque[tuple[Request, int]] = deque()
        self.waiting_tokens = 0
        self.busy: tuple[float, int] | None = None
        self.assigned_tokens = 0
        self.running = 0
        self.active: dict[int, int] = {}
        self.prompt_blocks = self.requests = self.hits = 0
        self.meter = LoadMeter()

    def queued_tokens(self, now_s: float) -> float:
        """Tokens that must be computed before a request that comes now."""
        left = 0.0
        if self.busy is not None:
            began_s, missing = self.busy
            left = max(0.0, missing - (now_s - began_s) * self.tokens_per_s)
        return self.waiting_tokens + left

    def begin(self, request: Request) -> None:
        """The request is one of its own until it ends."""
        for block in request.blocks:
            self.active[block] = self.active.get(block, 0) + 1

    def end(self, request: Request) -> None:
        """Its last token is out."""
        for block in request.blocks:
            left = self.active[block] - 1
            if left:
                self.active[block] = left
            else:
                del self.active[block]
