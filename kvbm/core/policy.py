"""Choices as small pure pieces: which block to evict, what to offload. Soft state only; nothing here is an event."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvbm.core.ids import SequenceHash


class EvictionPolicy(Protocol):
    """The order in which a tier's blocks are given up. It knows only blocks that may be evicted now: unpinned ones."""

    def add(self, block: SequenceHash) -> None:
        """The block may be evicted from now on, and has just been used."""

    def remove(self, block: SequenceHash) -> None:
        """The block may not be evicted any more: pinned, or gone. Unknown blocks are ignored."""

    def victims(self, count: int) -> list[SequenceHash]:
        """Up to `count` blocks to evict, the first to go first. They stay known until removed."""

    def __len__(self) -> int:
        """How many blocks may be evicted."""


class LeastRecentlyUsed:
    """Evicts what was used longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[SequenceHash, None] = OrderedDict()

    def add(self, block: SequenceHash) -> None:
        self._order[block] = None
        self._order.move_to_end(block)

    def remove(self, block: SequenceHash) -> None:
        self._order.pop(block, None)

    def victims(self, count: int) -> list[SequenceHash]:
        chosen: list[SequenceHash] = []
        for block in self._order:
            if len(chosen) == count:
                break
            chosen.append(block)
        return chosen

    def __len__(self) -> int:
        return len(self._order)


class OffloadPolicy(Protocol):
    """What goes to a colder tier, decided when a block was created or used in the hotter one."""

    def wants(self, uses: int) -> bool:
        """Whether a block with so many uses (1: just created) should be offloaded now."""


class WriteThrough:
    """Every block, as soon as it is there."""

    def wants(self, uses: int) -> bool:
        return uses >= 1


class SecondUse:
    """A block that was used again after it was created: what is used twice will be used a third time."""

    def wants(self, uses: int) -> bool:
        return uses >= 2


class Never:
    """Nothing."""

    def wants(self, uses: int) -> bool:
        return False


OFFLOAD_POLICIES: dict[str, Callable[[], OffloadPolicy]] = {
    "write_through": WriteThrough,
    "second_use": SecondUse,
    "never": Never,
}
EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}
