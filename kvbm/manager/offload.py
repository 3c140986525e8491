"""Which blocks go to a colder tier next: a bounded queue of wishes. No thread, clock or bytes here; the manager drives it."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.policy import OffloadPolicy


class Skipped(StrEnum):
    """Why blocks that a policy wanted in a colder tier were not offloaded. Each is offered again when it is next used."""

    QUEUE = "queue"  # too many waited: the copies do not keep up with the engine
    JOURNAL = "journal"  # it takes no events, so nobody would know of the blocks
    STAGING = "staging"  # no memory for the copy became free
    BUDGET = "budget"  # the device has been written enough for now


class Wish(NamedTuple):
    """Blocks that a policy wants in a colder tier."""

    namespace: NamespaceId
    source: Tier
    target: Tier
    hashes: bytes


class _Way(NamedTuple):
    """What wishes that one copy can carry out have in common."""

    namespace: NamespaceId
    source: Tier
    target: Tier


class Offloader:
    """Turns creations, uses and arrivals into offloads, each target by its policy.

    HBM feeds HOST; HOST (or HBM where there is no HOST) feeds NVME and OBJECT. A full queue skips wishes and counts them: the
    engine is never held up, and a block that was skipped is offered again when it is next used. Wishes for one way are joined, so
    that a device sees long runs also where an engine creates blocks one by one; ways take turns.

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
        self._ways: OrderedDict[_Way, deque[bytes]] = OrderedDict()  # what waits for each, the next way first
        self._routes = {(tier, again): self._targets(tier, again) for tier in Tier for again in (False, True)}
        self._claims: OrderedDict[SequenceHash, None] = OrderedDict()  # blocks this instance has put in the object pool
        self.waiting_blocks = 0
        self.skipped: Counter[Skipped] = Counter()  # blocks

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
        return bool(self._ways)

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
            self.skip(Skipped.QUEUE, wish.hashes)
            return
        self._ways.setdefault(_Way(wish.namespace, wish.source, wish.target), deque()).append(wish.hashes)
        self.waiting_blocks += count

    def skip(self, why: Skipped, hashes: bytes) -> None:
        """These blocks will not be offloaded now."""
        self.skipped[why] += len(hashes) // HASH_BYTES

    def next(self) -> Wish | None:
        """What has waited longest on the way whose turn it is, as long a run as a copy may carry; None when nothing waits."""
        if not self._ways:
            return None
        way, runs = self._ways.popitem(last=False)
        room_bytes = self._run_blocks * HASH_BYTES
        taken: list[bytes] = []
        while runs and len(runs[0]) <= room_bytes:
            room_bytes -= len(runs[0])
            taken.append(runs.popleft())
        if runs:
            self._ways[way] = runs
        hashes = b"".join(taken)
        self.waiting_blocks -= len(hashes) // HASH_BYTES
        return Wish(way.namespace, way.source, way.target, hashes)
