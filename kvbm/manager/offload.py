"""Which blocks go to a colder tier next: a bounded queue of wishes. No thread, clock or bytes here; the manager drives it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
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
        self._routes = {(tier, again): self._targets(tier, again) for tier in Tier for again in (False, True)}
        self._claims: OrderedDict[SequenceHash, None] = OrderedDict()  # blocks this instance has put in the object pool
        self.waiting_blocks = 0
        self.skipped_blocks = 0

    def offer(
        self,
        namespace: NamespaceId,
        tier: Tier,
        hashes: bytes,
        uses: int,
        lacking: Callable[[Tier, bytes], bytes],
    ) -> bool:
        """Blocks were created (uses 1), used again (uses 2), or arrived by a copy (uses 1) in `tier`.

        Args:
            lacking: which of a run's blocks a tier of this instance does not hold now.
        Returns: whether anything waits to be offloaded.
        """
        for source, target in self._routes[tier, uses > 1]:
            if self._policies[target].wants(uses):
                wanted = self._unclaimed(hashes) if target == Tier.OBJECT else lacking(target, hashes)
                run_bytes = self._run_blocks * HASH_BYTES
                for at in range(0, len(wanted), run_bytes):
                    self._push(Wish(namespace, source, target, wanted[at : at + run_bytes]))
        return bool(self._queue)

    def _unclaimed(self, hashes: bytes) -> bytes:
        if not self._claims:
            return hashes
        return b"".join(block for block in split_hashes(hashes) if block not in self._claims)

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

    def _targets(self, tier: Tier, again: bool) -> list[tuple[Tier, Tier]]:
        """From where to where blocks of a tier may go, created or arrived there, or used again."""
        below = [target for target in (Tier.NVME, Tier.OBJECT) if target in self._policies]
        if tier == Tier.HOST:
            return [(Tier.HOST, target) for target in below]
        if tier != Tier.HBM:
            return []
        if Tier.HOST not in self._policies:
            return [(Tier.HBM, target) for target in below]
        return [(Tier.HBM, Tier.HOST), *([(Tier.HOST, target) for target in below] if again else [])]

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
