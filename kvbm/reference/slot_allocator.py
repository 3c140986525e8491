"""Who gets a tier's slots: free ones first, then those of blocks that give way, within tenants' shares and quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from kvbm.core.errors import LedgerError
from kvbm.core.events import MAX_RUN_BLOCKS, BlocksEvicted, BlocksMigrated, EvictReason, MigrateCause, PoolStated
from kvbm.core.ids import DURABLE_TIERS, InstanceId, NamespaceId, Offset, SequenceHash, Tier, pack_slots
from kvbm.core.policy import OTHERS, FairShares, Share
from kvbm.core.results import Allocation
from kvbm.reference.recorder import Recorder
from kvbm.reference.slots import TierSlots


class SlotAllocator:
    """Gives out the slots of one ledger's pools and has blocks give way.

    Args:
        recorder: where evictions go.
        pools: the instance's pools.
        eviction: name of the eviction policy.
        shares: of tenants; without any, all blocks are alike.
    Raises: LedgerError: shares that make no sense.

    Attributes:
        shares: that of all others last; empty when there are none.
        tiers: the pools with slots.
    """

    def __init__(self, recorder: Recorder, pools: Sequence[PoolStated], eviction: str, shares: Sequence[Share]) -> None:
        self.shares = _with_others(shares)
        self._recorder = recorder
        self._share_of: dict[NamespaceId, int] = {}  # those that were assigned; the last share is everybody else's
        self.tiers: Mapping[Tier, TierSlots] = {
            pool.tier: TierSlots(pool, eviction, self._fair(pool, eviction), recorder.residencies)
            for pool in pools
            if pool.slots
        }

    def assign(self, namespace: NamespaceId, tenant: str) -> None:
        """Say whose a namespace is. A tenant without a share of its own is among the others.

        Blocks of it that are held count there from now on, as if gained anew: the last one first, so that it leaves
        first.
        """
        if not self.shares:
            return
        names = [share.tenant for share in self.shares]
        share = names.index(tenant) if tenant in names else len(names) - 1
        moved: dict[Tier, list[SequenceHash]] = {}
        if self._share(namespace) != share:
            for tier, state in self.tiers.items():
                held = self._recorder.residencies.held[tier]
                moved[tier] = [block for block, entry in reversed(held.items()) if entry.namespace == namespace]
                state.leave_share(moved[tier])
        self._share_of[namespace] = share
        for tier, blocks in moved.items():
            self.tiers[tier].enter_share(blocks)

    def allocate(self, tier: Tier, count: int, namespace: NamespaceId | None) -> Allocation | None:
        """Slots to write, evicting what the policy gives up and, where that is too little, what yields of what
        is kept.
        """
        state = self.tiers[tier]
        if self._recorder.is_closed(tier):
            return None
        short_by = count - state.free_count()
        if short_by > 0 and not self._make_room(state, short_by, namespace, count):
            return None
        if self._recorder.is_closed(
            tier
        ):  # by that very eviction: a slot whose withdrawal nobody hears of must not be written
            return None
        slots, after = state.take(count)
        return Allocation(pack_slots(slots), after if tier in DURABLE_TIERS else Offset(0))

    def adopt(
        self,
        namespace: NamespaceId,
        tier: Tier,
        blocks: Sequence[SequenceHash],
        slots: Sequence[int],
        finder: InstanceId,
    ) -> int:
        """Say that allocated slots hold these blocks already: their bytes were found there.

        They may be evicted at once.

        Slots of blocks that the tier holds anyway go back to the pool. So do all that are left once the stream has
        ended, or overflowed in a durable tier.

        Args:
            finder: the instance itself, as the source of the event: nobody knows any more who brought the bytes.
        Returns: how many blocks the tier has gained.
        Raises: LedgerError: a slot is not allocated or is a copy's, counts differ, or a hash or a slot is given twice;
            nothing has changed then.
        """
        state, held = self.tiers[tier], self._recorder.residencies.held[tier]
        state.require_fillable(blocks, slots, "adopt", "no block can be adopted in it")
        fresh = [(block, slot) for block, slot in zip(blocks, slots, strict=True) if block not in held]
        state.release([slot for block, slot in zip(blocks, slots, strict=True) if block in held])
        gained = list[SequenceHash]()
        for first in range(0, len(fresh), MAX_RUN_BLOCKS):
            if self._recorder.is_closed(tier) or self._recorder.residencies.stopped:
                state.release([slot for _, slot in fresh[first:]])
                break
            run = fresh[first : first + MAX_RUN_BLOCKS]
            self._recorder.record(
                BlocksMigrated(
                    namespace=namespace,
                    source=finder,
                    target=tier,
                    kept=True,
                    cause=MigrateCause.OFFLOAD,
                    hashes=b"".join(block for block, _ in run),
                    slots=pack_slots(slot for _, slot in run),
                )
            )
            gained += [block for block, _ in run]
        state.enter(gained, pinned=False)
        return len(gained)

    def evict(self, tier: Tier, blocks: Sequence[SequenceHash], reason: EvictReason) -> None:
        """Withdraw held blocks, a run of one namespace an event."""
        held = self._recorder.residencies.held[tier]
        for namespace, group in groupby(blocks, key=lambda block: held[block].namespace):
            run = list(group)
            for at in range(0, len(run), MAX_RUN_BLOCKS):
                hashes = b"".join(run[at : at + MAX_RUN_BLOCKS])
                self._recorder.record(BlocksEvicted(namespace=namespace, tier=tier, reason=reason, hashes=hashes))

    def quota_left(self, tier: Tier, namespace: NamespaceId, arriving: Mapping[NamespaceId, int]) -> int:
        """Blocks a copy may bring for a namespace's tenant before its own give way, below 0 beyond its quota.

        Args:
            arriving: blocks on their way to the tier, which count, by namespace.
        Returns: the pool's size where there is no quota.
        """
        state, share = self.tiers[tier], self._share(namespace)
        quota = self.shares[share].quota_slots.get(tier) if self.shares else None
        if quota is None or state.fair is None:
            return state.pool.slots
        coming = sum(count for of, count in arriving.items() if self._share(of) == share)
        return quota - state.fair.held[share] - coming

    def holds_half(self, tier: Tier, namespace: NamespaceId) -> bool:
        """Whether half of the quota of a namespace's tenant is kept or pinned; False where there is no quota."""
        fair, share = self.tiers[tier].fair, self._share(namespace)
        quota = self.shares[share].quota_slots.get(tier) if self.shares else None
        return fair is not None and quota is not None and 2 * (fair.held[share] - fair.evictable(share)) >= quota

    def own_evictable(self, tier: Tier, namespace: NamespaceId) -> int:
        """How many blocks of a namespace's tenant may give way; 0 where there are no shares."""
        fair = self.tiers[tier].fair
        return 0 if fair is None else fair.evictable(self._share(namespace))

    def evict_own(self, tier: Tier, namespace: NamespaceId, count: int) -> None:
        """Have so many blocks of a namespace's tenant give way to its others, as its quota wants it."""
        fair = self.tiers[tier].fair
        if fair is not None and count > 0:
            self.evict(tier, fair.victims_of(self._share(namespace), count), EvictReason.QUOTA)

    def _make_room(self, state: TierSlots, count: int, namespace: NamespaceId | None, coming: int) -> bool:
        """Evict so many blocks: the policy's victims, then kept blocks. False and no change when there are too few."""
        from_kept = max(0, count - len(state.policy))
        yielding = state.yielding() if from_kept else []
        if len(yielding) < from_kept:
            return False
        owners = [state.owner(slot) for slot in yielding[:from_kept]]
        given_up = [block for block in owners if block is not None]
        if state.fair is None or namespace is None:
            victims = state.policy.victims(count - from_kept)
        else:
            victims = state.fair.victims(count - from_kept, self._share(namespace), coming)
        self.evict(state.pool.tier, victims + given_up, EvictReason.CAPACITY)
        return True

    def _share(self, namespace: NamespaceId) -> int:
        return self._share_of.get(namespace, len(self.shares) - 1)

    def _fair(self, pool: PoolStated, eviction: str) -> FairShares | None:
        if not self.shares:
            return None

        def share_of(block: SequenceHash) -> int:
            return self._share(self._recorder.residencies.held[pool.tier][block].namespace)

        return FairShares(pool.slots, eviction, [share.weight for share in self.shares], share_of)


def _with_others(shares: Sequence[Share]) -> tuple[Share, ...]:
    """Shares with that of all others last. Raises LedgerError: a tenant named twice, or a weight that is none."""
    if not shares:
        return ()
    for share in shares:
        if share.weight < 1:
            raise LedgerError(f"the share of tenant {share.tenant!r} has weight {share.weight}; a weight is at least 1")
    named = {share.tenant: share for share in shares}
    if len(named) < len(shares):
        raise LedgerError(f"{len(shares)} shares name {len(named)} tenants; a tenant has one share")
    others = named.pop(OTHERS, Share(OTHERS))
    return (*named.values(), others)
