"""Which blocks go to a colder tier next: a bounded queue of wishes. No thread, clock or bytes here; the manager drives it."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES, NO_PARENT, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.policy import OffloadPolicy
from kvbm.manager.groups import Group, Groups, groups_of
from kvbm.manager.turns import Turns

Lacking = Callable[[Tier, bytes], bytes]  # which of a run's blocks a tier of this instance does not hold now


class Skipped(StrEnum):
    """Why blocks that a policy wanted in a colder tier were not offloaded. Each is offered again when it is next used."""

    QUEUE = "queue"  # too many waited: the copies do not keep up with the engine
    JOURNAL = "journal"  # it takes no events, so nobody would know of the blocks
    STAGING = "staging"  # no memory for the copy became free
    BUDGET = "budget"  # the device or store has been written enough for now
    PARTIAL = "partial"  # not every block of the object is known or where it would be taken from


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

    HBM feeds HOST; HOST (or HBM where there is no HOST) feeds NVME and OBJECT. Where HBM is the engine's, HOST alone feeds. A full queue skips wishes and counts them: the
    engine is never held up, and a block that was skipped is offered again when it is next used. Wishes for one way are joined, so
    that a device sees long runs also where an engine creates blocks one by one. Tenants take turns by their weights, and the ways of
    each; in a full queue, who has most for its weight makes room for who has less.

    What goes to OBJECT is whole objects: see `manager/groups.py`. Each leaves once the tier it leaves from holds all of it.

    Args:
        policies: what each target tier that exists wants.
        capacity_blocks: blocks that may wait.
        run_blocks: blocks one copy carries at most, or one object where that is more.
        object_blocks: k, blocks of an object.
        turns: of tenants; None: all blocks are alike.
        engine_hbm: HBM is the engine's, which brings blocks to HOST itself: nothing is taken from HBM.
        may_last: whether a namespace's blocks may go to tiers that outlive the process.
    """

    def __init__(
        self,
        policies: dict[Tier, OffloadPolicy],
        capacity_blocks: int = 8192,
        run_blocks: int = 64,
        remembered_claims: int = 1 << 20,
        object_blocks: int = 1,
        turns: Turns | None = None,
        engine_hbm: bool = False,
        may_last: Callable[[NamespaceId], bool] = lambda _: True,
    ) -> None:
        self._policies = policies
        self._capacity_blocks, self._remembered_claims = capacity_blocks, remembered_claims
        self._object_bytes = object_blocks * HASH_BYTES
        self._run_bytes = {tier: run_blocks * HASH_BYTES for tier in Tier}
        self._run_bytes[Tier.OBJECT] = max(object_blocks, run_blocks // object_blocks * object_blocks) * HASH_BYTES
        self._groups = Groups(object_blocks) if Tier.OBJECT in policies and object_blocks > 1 else None
        self._engine_hbm, self._may_last = engine_hbm, may_last
        self._objects_from = Tier.HOST if Tier.HOST in policies or engine_hbm else Tier.HBM
        self._turns = turns or Turns()
        # tenant → what waits for each of its ways, the next way first
        self._ways: dict[str, OrderedDict[_Way, deque[bytes]]] = {}
        self._waiting: Counter[str] = Counter()  # blocks of each tenant
        self._routes = {(tier, again): self._targets(tier, again) for tier in Tier for again in (False, True)}
        self._claims: OrderedDict[SequenceHash, None] = OrderedDict()  # last blocks of objects this instance has put
        self.waiting_blocks = 0
        self.skipped: Counter[Skipped] = Counter()  # blocks

    def offer(
        self,
        namespace: NamespaceId,
        tier: Tier,
        hashes: bytes,
        uses: int,
        lacking: Lacking,
        parent: bytes = NO_PARENT,
        start: int | None = None,
    ) -> bool:
        """Blocks were created (uses 1), used again (uses 2), or arrived by a copy (uses 1) in `tier`.

        Args:
            parent, start: of a run that is one chain, as what was created or used again is: the block before it, and its position.
        Returns: whether anything waits to be offloaded.
        """
        for source, target in self._routes[tier, uses > 1]:
            if self._policies[target].wants(uses) and (target == Tier.HOST or self._may_last(namespace)):
                wanted = self.unclaimed(hashes) if target == Tier.OBJECT else lacking(target, hashes)
                self._push_all(namespace, source, target, wanted)
        if self._groups is not None and self._may_last(namespace):
            if start is not None:
                self._offer_chain(self._groups, namespace, hashes, uses, lacking, parent, start)
            elif tier == self._objects_from:
                self._offer_arrived(self._groups, hashes, lacking)
        return bool(self._ways)

    def wants(self, target: Tier, uses: int) -> bool:
        """Whether blocks used so often should go to a tier."""
        policy = self._policies.get(target)
        return policy is not None and policy.wants(uses)

    def forget(self) -> None:
        """Offload nothing of what waits, nor of what waits for blocks to arrive."""
        self._ways.clear()
        self._waiting.clear()
        self.waiting_blocks = 0
        if self._groups is not None:
            self._groups.forget_waiting()

    def _offer_arrived(self, groups: Groups, hashes: bytes, lacking: Lacking) -> None:
        """Offer the objects that waited for these blocks, and have all of theirs now."""
        for block in split_hashes(hashes):
            for group in groups.arrived(block):
                self._want_object(groups, group, lacking)

    def _offer_chain(
        self,
        groups: Groups,
        namespace: NamespaceId,
        hashes: bytes,
        uses: int,
        lacking: Lacking,
        parent: bytes,
        start: int,
    ) -> None:
        """Offer the objects that a chain makes whole, now or once their blocks are where they leave from."""
        whole, lost = groups.follow(parent, start, hashes)
        if not self._policies[Tier.OBJECT].wants(uses):
            return
        self.skip(Skipped.PARTIAL, lost)
        if not whole or not (unclaimed := self.unclaimed(whole)):
            return
        missing = lacking(self._objects_from, unclaimed)
        if not missing:
            self._push_all(namespace, self._objects_from, Tier.OBJECT, unclaimed)
            return
        for hashes in groups_of(unclaimed, groups.blocks):
            group = Group(namespace, hashes)
            if len(missing) == len(unclaimed):  # nothing is there yet, as after a prefill
                self._await(groups, group, hashes)
            else:
                self._want_object(groups, group, lacking)

    def _want_object(self, groups: Groups, group: Group, lacking: Lacking) -> None:
        if missing := lacking(self._objects_from, group.hashes):
            self._await(groups, group, missing)
        elif self.unclaimed(group.hashes):
            self._push(Wish(group.namespace, self._objects_from, Tier.OBJECT, group.hashes))

    def _await(self, groups: Groups, group: Group, missing: bytes) -> None:
        """Offer the group when the last block it misses has arrived; where nothing will bring it, not at all."""
        given_up = groups.watch(group, missing) if self._objects_from == Tier.HOST else [group]
        for other in given_up:
            self.skip(Skipped.PARTIAL, other.hashes)

    def unclaimed(self, hashes: bytes) -> bytes:
        """Those objects of a run of whole objects that this instance has not put, as far as it remembers."""
        if not self._claims:
            return hashes
        objects = groups_of(hashes, self._object_bytes // HASH_BYTES)
        return b"".join(group for group in objects if group[-HASH_BYTES:] not in self._claims)

    def claimed(self, hashes: bytes) -> None:
        """The object pool holds these whole objects; they are not offered to it again while this is remembered."""
        for group in groups_of(hashes, self._object_bytes // HASH_BYTES):
            self._claims[SequenceHash(group[-HASH_BYTES:])] = None
        while len(self._claims) > self._remembered_claims:
            self._claims.popitem(last=False)

    def unclaim(self, hashes: bytes) -> None:
        """The object pool turned out not to hold these blocks."""
        for block in split_hashes(hashes):
            self._claims.pop(block, None)

    def _targets(self, tier: Tier, again: bool) -> list[tuple[Tier, Tier]]:
        """From where to where blocks of a tier may go, created or arrived there, or used again."""
        singly = (Tier.NVME, Tier.OBJECT) if self._groups is None else (Tier.NVME,)
        below = [target for target in singly if target in self._policies]
        if tier == Tier.HOST:
            return [(Tier.HOST, target) for target in below]
        if tier != Tier.HBM:
            return []
        if self._engine_hbm:
            return [(Tier.HOST, target) for target in below] if again else []
        if Tier.HOST not in self._policies:
            return [(Tier.HBM, target) for target in below]
        return [(Tier.HBM, Tier.HOST), *([(Tier.HOST, target) for target in below] if again else [])]

    def _push_all(self, namespace: NamespaceId, source: Tier, target: Tier, hashes: bytes) -> None:
        """As many wishes as it takes copies."""
        run_bytes = self._run_bytes[target]
        for at in range(0, len(hashes), run_bytes):
            self._push(Wish(namespace, source, target, hashes[at : at + run_bytes]))

    def _push(self, wish: Wish) -> None:
        count, tenant = len(wish.hashes) // HASH_BYTES, self._turns.tenant_of(wish.namespace)
        while self.waiting_blocks + count > self._capacity_blocks:
            above = self._turns.above(self._waiting, tenant, count) if self._waiting else None
            if above is None:
                self.skip(Skipped.QUEUE, wish.hashes)
                return
            self._drop_last(above)
        if tenant not in self._ways:
            self._turns.begin(tenant)
        ways = self._ways.setdefault(tenant, OrderedDict())
        ways.setdefault(_Way(wish.namespace, wish.source, wish.target), deque()).append(wish.hashes)
        self._count(tenant, count)

    def _drop_last(self, tenant: str) -> None:
        """Skip what a tenant wished last, on the way whose turn is last."""
        ways = self._ways[tenant]
        way = next(reversed(ways))
        hashes = ways[way].pop()
        if not ways[way]:
            del ways[way]
        self.skip(Skipped.QUEUE, hashes)
        self._count(tenant, -(len(hashes) // HASH_BYTES))

    def _count(self, tenant: str, more: int) -> None:
        self.waiting_blocks += more
        self._waiting[tenant] += more
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._ways[tenant]

    def put_back(self, wish: Wish) -> None:
        """What one copy could not carry, for the next one."""
        self._push(wish)

    def skip(self, why: Skipped, hashes: bytes) -> None:
        """These blocks will not be offloaded now."""
        if hashes:
            self.skipped[why] += len(hashes) // HASH_BYTES

    def next(self) -> Wish | None:
        """What has waited longest on the way whose turn it is, as long a run as a copy may carry; None when nothing waits."""
        if not self._ways:
            return None
        tenant = self._turns.next(self._ways)
        ways = self._ways[tenant]
        way, runs = ways.popitem(last=False)
        room_bytes = self._run_bytes[way.target]
        taken: list[bytes] = []
        while runs and len(runs[0]) <= room_bytes:
            room_bytes -= len(runs[0])
            taken.append(runs.popleft())
        if runs:
            ways[way] = runs
        hashes = b"".join(taken)
        self._count(tenant, -(len(hashes) // HASH_BYTES))
        self._turns.spend(tenant, len(hashes) // HASH_BYTES)
        return Wish(way.namespace, way.source, way.target, hashes)
