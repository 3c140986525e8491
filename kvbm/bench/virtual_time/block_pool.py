"""Pools of blocks without bytes: HBM, where requests pin what they use, and what is colder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks in a pool of fixed size.

    What is pinned stays; of the rest the least recently used goes first, ends of prompts before starts.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pins: dict[int, int] = {}  # of blocks that are held and pinned
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._written = 0  # slots of blocks that are being computed

    def __contains__(self, block: int) -> bool:
        return block in self._pins or block in self._unpinned

    def resize(self, slots: int) -> None:
        """Have so many slots from now on. What is pinned beyond them stays until it is unpinned."""
        self._slots = slots
        self._evict()

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
        """Pin what is held and take slots for the rest.

        Returns how many are held; None when pins leave too few slots.
        """
        depth = self.depth(blocks)
        missing = len(blocks) - depth
        pinned_anew = sum(block not in self._pins for block in blocks[:depth])
        if len(self._pins) + pinned_anew + self._written + missing > self._slots:
            return None
        for block in blocks[:depth]:
            self._pin(block)
        self._written += missing
        self._evict()
        return depth

    def create(self, blocks: Sequence[int]) -> None:
        """What `acquire` took slots for is there: it is held, and pinned."""
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
        self._evict()  # the pool may have become smaller meanwhile

    def _evict(self) -> None:
        while self._unpinned and len(self._pins) + len(self._unpinned) + self._written > self._slots:
            self._unpinned.popitem(last=False)

    def _pin(self, block: int) -> None:
        self._unpinned.pop(block, None)
        self._pins[block] = self._pins.get(block, 0) + 1


class ColderPool:
    """Blocks in HOST, NVME or an object store; the least recently used goes first, ends of prompts before starts.

    Attributes:
        slots: how many it holds.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._held: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def put(self, blocks: Sequence[int]) -> None:
        """They are here, and were used now. Of a run that is longer than the pool its beginning, as an offload does."""
        for block in reversed(blocks[: self.slots]):
            self._held.pop(block, None)
            self._held[block] = None
        while len(self._held) > self.slots:
            self._held.popitem(last=False)
