"""An eviction policy that `whatif` tries and no tier has yet: it keeps what would take longest to compute again."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from kvbm.core.ids import SequenceHash

_SLACK = 4  # stale heap entries for each block before they are thrown out


class CostAware:
    """Evicts the block of least worth: an `EvictionPolicy`.

    A block's worth is its uses times the time to compute it again, on a clock that moves on to the worth of each
    victim, so that what was worth much long ago goes, too. A block is worth nothing without those before it in its
    prompt, so none is worth less than one that follows it.

    Args:
        cost: seconds to compute a block again.
        parent: the block before it in its prompt; None for the first.
    Source: GreedyDual-Size-Frequency, Cherkasova, HPL-98-69R1, 1998, with blocks of one size; the rule for prefixes is
        ours.
    """

    def __init__(
        self, cost: Callable[[SequenceHash], float], parent: Callable[[SequenceHash], SequenceHash | None]
    ) -> None:
        self._cost, self._parent = cost, parent
        self._clock = 0.0
        self._uses: dict[SequenceHash, int] = {}  # of every block of the tier
        self._worth: dict[SequenceHash, float] = {}  # of every block of the tier; 0 until it is first let go
        self._free: set[SequenceHash] = set()  # may be evicted
        self._heap: list[
            tuple[float, int, SequenceHash]
        ] = []  # of those; entries whose worth has changed since are stale
        self._entries = 0  # ties go in the order of entry

    def gain(self, block: SequenceHash, pinned: bool) -> None:
        self._uses[block], self._worth[block] = 1, 0.0
        if not pinned:
            self.free(block)

    def hold(self, block: SequenceHash) -> None:
        self._uses[block] += 1
        self._free.discard(block)

    def free(self, block: SequenceHash) -> None:
        self._free.add(block)
        self._raise(block, self._clock + self._uses[block] * self._cost(block))

    def lose(self, block: SequenceHash) -> None:
        if self._uses.pop(block, None) is not None:
            del self._worth[block]
            self._free.discard(block)

    def victims(self, count: int) -> list[SequenceHash]:
        return [self._victim() for _ in range(count)] if count <= len(self) else []

    def __len__(self) -> int:
        return len(self._free)

    def _raise(self, block: SequenceHash, worth: float) -> None:
        """Give a block at least this worth, and all before it in its prompt."""
        at: SequenceHash | None = block
        worth = max(worth, self._worth[block])
        while at is not None and at in self._worth and (at == block or self._worth[at] < worth):
            self._worth[at] = worth
            if at in self._free:
                self._entries += 1
                heappush(self._heap, (worth, self._entries, at))
            at = self._parent(at)
        if len(self._heap) > _SLACK * (len(self._free) + 1024):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    def _victim(self) -> SequenceHash:
        while True:
            entry = heappop(self._heap)
            if self._is_current(entry):
                worth, _, block = entry
                self._clock = worth
                self.lose(block)
                return block

    def _is_current(self, entry: tuple[float, int, SequenceHash]) -> bool:
        worth, _, block = entry
        return block in self._free and self._worth[block] == worth
