"""Which blocks go to a colder tier next: a bounded queue of wishes. No thread, clock or bytes here; the manager drives it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.policy import OffloadPolicy


class Wish(NamedTuple):
    """Blocks that a policy wants in a colder tier."""

    namespace: NamespaceId
    source: Tier
    target: Tier
    hashes: bytes


class Offloader:
    """Turns creations, uses and arrivals into offloads, each target by its policy.

    HBM feeds HOST; HOST (or HBM where there is no HOST) feeds NVME and OBJECT. A full queue skips wishes and counts them: the
    engine is never held up, and a block that was skipped is offered again when it is next used.

    Args:
        policies: what each target tier that exists wants.
        capacity_blocks: blocks that may wait.
        run_blocks: blocks one copy carries at most.
    """

    def __init__(
        self,
        policies: dict[Tier, OffloadPolicy],
        capacity_blocks: int = 8192,
        run_blocks: int = 64,
        remembered_claims: int = 1 << 20,
    ) -> None:
        self._policies = policies
        self._capacity_blocks, self._run_blocks, self._remembered_claims = (
            capacity_blocks,
            run_blocks,
            remembered_claims,
        )
        self._queue: deque[Wish] = deque()
        self._claims: OrderedDict[SequenceHash, None] = OrderedDict()  # blocks this instance has put in the object pool
        self.waiting_blocks = 0
        self.skipped_blocks = 0

    def offer(
        self,
        namespace: NamespaceId,
        tier: Tier,
        hashes: bytes,
        uses: int,
        holds: Callable[[Tier, SequenceHash], bool],
    ) -> bool:
        """Blocks were created (uses 1), used again (uses 2), or arrived by a copy (uses 1) in `tier`.

        Args:
            holds: whether a tier of this instance holds a block now.
        Returns: whether anything waits to be offloaded.
        """
        blocks = split_hashes(hashes)
        for source, target in self._routes(tier, uses):
            if self._policies[target].wants(uses):
                known = self._claims.__contains__ if target == Tier.OBJECT else partial(holds, target)
                lacking = [block for block in blocks if not known(block)]
                for at in range(0, len(lacking), self._run_blocks):
                    self._push(Wish(namespace, source, target, b"".join(lacking[at : at + self._run_blocks])))
        return bool(self._queue)

    def claimed(self, hashes: bytes) -> None:
        """The object pool holds these blocks; they are not offered to it again while this is remembered."""
        for block in split_hashes(hashes):
            self._claims[block] = None
        while len(self._claims) > self._remembered_claims:
            self._claims.popitem(last=False)

    def unclaim(self, hashes: bytes) -> None:
        """The object pool turned out not to hold these blocks."""
        for block in split_hashes(hashes):
            self._claims.pop(block, None)

    def _routes(self, tier: Tier, uses: int) -> list[tuple[Tier, Tier]]:
        below = [target for target in (Tier.NVME, Tier.OBJECT) if target in self._policies]
        if tier == Tier.HOST:
            return [(Tier.HOST, target) for target in below]
        if tier != Tier.HBM:
            return []
        if Tier.HOST not in self._policies:
            return [(Tier.HBM, target) for target in below]
        again = [(Tier.HOST, target) for target in below] if uses > 1 else []
        return [(Tier.HBM, Tier.HOST), *again]

    def _push(self, wish: Wish) -> None:
        count = len(wish.hashes) // HASH_BYTES
        if self.waiting_blocks + count > self._capacity_blocks:
            self.skipped_blocks += count
            return
        self._queue.append(wish)
        self.waiting_blocks += count

    def next(self) -> Wish | None:
        """The wish that has waited longest; None when there is none."""
        if not self._queue:
            return None
        wish = self._queue.popleft()
        self.waiting_blocks -= len(wish.hashes) // HASH_BYTES
        return wish
