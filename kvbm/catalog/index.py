"""Who holds what in the whole cluster: every instance's fold, and one table over all of them.

The table has one integer a block: four bits, one a tier, for each holder. A holder is an instance or a pool of cluster reach. So a
prefix is walked once for everybody, and neighbouring blocks with the same holders are one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from kvbm.core.events import Event, InstanceStarted, PoolStated, RunEvent
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Reach, SequenceHash, Tier, split_hashes
from kvbm.core.residency import Change, Delta, Residencies

_TIER_BITS = 4  # bit t of a holder's four stands for tier t
_HOTTEST = tuple((bits & -bits).bit_length() - 1 for bits in range(1 << _TIER_BITS))


class Holder(NamedTuple):
    """Someone who holds a block: an instance, or else a pool of cluster reach."""

    name: str
    tier: Tier
    is_pool: bool


class InstanceDepth(NamedTuple):
    """How far one instance has a prefix.

    Attributes:
        depth: blocks it holds from the first on, in any tier, without a hole.
        by_tier: blocks of that run by the hottest tier that holds each, indexed by Tier.
        reach: where the run ends when the instance's cluster pools go on where its own tiers end; at least `depth`.
        doubtful: events of it were missed and no round has ended since.
    """

    instance: InstanceId
    depth: int
    by_tier: tuple[int, int, int, int]
    reach: int
    doubtful: bool


class PoolDepth(NamedTuple):
    """How many blocks of a prefix, from the first on, a pool of cluster reach is claimed to hold."""

    pool: str
    depth: int


class Prefixes(NamedTuple):
    """Who has how much of a prefix.

    Attributes:
        deepest: the largest depth of all instances and pools.
        instances, pools: those that have, or reach, at least the first block.
    """

    deepest: int
    instances: list[InstanceDepth]
    pools: list[PoolDepth]


NOBODY = Prefixes(0, [], [])


class _Instance:
    """One instance's fold and its place in the table."""

    def __init__(self, name: InstanceId, shift: int) -> None:
        self.name = name
        self.fold = Residencies(strict=False)
        self.shift = shift
        self.bits = tuple(1 << (shift + tier) for tier in Tier)
        self.pool_names: dict[Tier, str] = {}
        self.pool_mask = 0  # all bits of its cluster pools
        self.pools_known = False
        self.proven = False  # pools unknown, but a digest has agreed since a round ended
        self.waiting = False


class ClusterIndex:
    """The cluster's residencies and claims. Used from one thread; no event is fatal, what is wrong is counted.

    Attributes:
        anomalies: rules that events broke, counted by name.
        unnamed_claims: blocks claimed for a pool whose name no start has told.
    """

    def __init__(self) -> None:
        self.anomalies: Counter[str] = Counter()
        self.unnamed_claims = 0
        self._tables: dict[NamespaceId, dict[bytes, int]] = {}
        self._instances: dict[InstanceId, _Instance] = {}
        self._shifts: dict[tuple[str, bool], int] = {}  # (name, is_pool) → where its four bits begin
        self._pools: dict[str, int] = {}
        self._claims: Counter[str] = Counter()
        self._lowest = 0  # the first bit of every holder
        self._pool_mask = 0  # all bits of all pools

    # -- following instances ------------------------------------------------------------------------------------------

    def apply(self, instance: InstanceId, event: Event) -> Delta:
        """Fold one event of an instance and keep the table in step. Returns what it changed."""
        entry = self._entry(instance)
        delta = entry.fold.evolve(event)
        if isinstance(event, InstanceStarted):
            self._declare(entry, event.pools)
        self._follow(entry, delta)
        if delta.anomalies:
            self.anomalies.update(rule for rule, _ in delta.anomalies)
            if not isinstance(event, InstanceStarted) and any(rule == "moved-silently" for rule, _ in delta.anomalies):
                self._rename(entry, event)  # type: ignore[arg-type]  # only runs break this rule
        return delta

    def begin_blind(
        self,
        instance: InstanceId,
        epoch: Epoch,
        pools: Iterable[PoolStated] | None = None,
        likely: Iterable[PoolStated] = (),
    ) -> None:
        """Enter an epoch whose start was not seen: nothing is held, all of it is doubtful.

        Args:
            pools: what the epoch's start declared, when that is known from elsewhere; None when it is not.
            likely: what another epoch's start declared; names the pools of claims when no start was seen here.
        """
        entry = self._entry(instance)
        self._follow(entry, entry.fold.begin_blind(epoch))
        if pools is not None:
            stated = tuple(pools)
            entry.fold.pools = {pool.tier: pool for pool in stated}
            self._declare(entry, stated)
        else:  # the names of the last known start are the best guess for claims
            if not entry.pool_names:
                self._declare(entry, likely)
            entry.pools_known = entry.proven = False

    def miss(self, instance: InstanceId) -> None:
        """Events of the instance were missed: it is doubtful until a whole round has ended."""
        entry = self._entry(instance)
        entry.fold.miss_events()
        entry.proven = False

    def wait(self, instance: InstanceId, waiting: bool) -> None:
        """Later events than the next are there already, so for now the instance is doubtful; or no longer."""
        self._entry(instance).waiting = waiting

    def agrees(self, instance: InstanceId, digest: int) -> bool:
        """Whether an instance in step has this digest. One that is not in step has nothing to compare: True."""
        entry = self._entry(instance)
        same = entry.fold.digest == digest
        if not entry.pools_known:
            rounds = [tier for tier in Tier if entry.fold.is_whole(tier)]
            entry.proven = entry.proven or (same and bool(rounds))
        return same or not self._is_whole(entry)

    def drop(self, instance: InstanceId) -> None:
        """Forget an instance and what it held. Its claims stay: their holder is the pool."""
        entry = self._instances.get(instance)
        if entry is not None:
            self._follow(entry, entry.fold.begin_blind(entry.fold.epoch))
            del self._instances[instance]

    def claim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """Say that a pool of cluster reach holds blocks. Saying it twice changes nothing."""
        self._claim(pool, Tier.OBJECT, namespace, split_hashes(hashes))

    def unclaim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """Say that a pool of cluster reach no longer holds blocks, in whatever tier it was said to."""
        for tier in Tier:
            self._unclaim(pool, tier, namespace, split_hashes(hashes))

    # -- asking -------------------------------------------------------------------------------------------------------

    def prefixes(self, namespace: NamespaceId, hashes: bytes) -> Prefixes:
        """Who has how much of a prefix.

        Args:
            hashes: packed, in prompt order.
        """
        runs = self._runs(self._tables.get(namespace, {}), hashes)
        if not runs:
            return NOBODY
        instances = [found for entry in self._instances.values() if (found := self._depth(entry, runs)).reach]
        pools = [PoolDepth(pool, depth) for pool, shift in self._pools.items() if (depth := _pool_depth(shift, runs))]
        deepest = max([depth.depth for depth in instances] + [pool.depth for pool in pools], default=0)
        return Prefixes(deepest, instances, pools)

    def holders(self, namespace: NamespaceId, block: SequenceHash) -> list[Holder]:
        """Who holds one block, by name, hottest tier first."""
        mask = self._tables.get(namespace, {}).get(block, 0)
        if not mask:
            return []
        return sorted(
            Holder(name, tier, is_pool)
            for (name, is_pool), shift in self._shifts.items()
            for tier in Tier
            if mask >> (shift + tier) & 1
        )

    def instances(self) -> list[InstanceId]:
        """Every instance of which an event was applied, in the order of their first."""
        return list(self._instances)

    def fold(self, instance: InstanceId) -> Residencies | None:
        """An instance's fold, to read: its epoch, pools, digest, whether it has stopped. None for an unknown one."""
        entry = self._instances.get(instance)
        return None if entry is None else entry.fold

    def pool_name(self, instance: InstanceId, tier: Tier) -> str | None:
        """The cluster pool an instance's claims in a tier belong to; None when no start has told it."""
        entry = self._instances.get(instance)
        return None if entry is None else entry.pool_names.get(tier)

    def counts(self, instance: InstanceId) -> dict[Tier, int]:
        """How many blocks an instance holds in each of its tiers."""
        entry = self._instances.get(instance)
        if entry is None:
            return {}
        return {tier: len(held) for tier, held in entry.fold.held.items() if held or tier in entry.fold.pools}

    def is_doubtful(self, instance: InstanceId) -> bool:
        """Whether events of the instance were missed and no round has ended since. An unknown instance is doubtful."""
        entry = self._instances.get(instance)
        return entry is None or entry.waiting or not self._is_whole(entry)

    def residency_count(self) -> int:
        """Residencies of all instances together; claims are not counted."""
        return sum(entry.fold.count() for entry in self._instances.values())

    def claim_counts(self) -> dict[str, int]:
        """Blocks claimed, by pool."""
        return {pool: self._claims[pool] for pool in self._pools}

    def block_count(self) -> int:
        """Distinct blocks that somebody holds."""
        return sum(map(len, self._tables.values()))

    # -- inside: the table --------------------------------------------------------------------------------------------

    def _entry(self, instance: InstanceId) -> _Instance:
        entry = self._instances.get(instance)
        if entry is None:
            entry = self._instances[instance] = _Instance(instance, self._shift(instance, is_pool=False))
        return entry

    def _shift(self, name: str, is_pool: bool) -> int:
        shift = self._shifts.get((name, is_pool))
        if shift is None:
            shift = self._shifts[name, is_pool] = len(self._shifts) * _TIER_BITS
            self._lowest |= 1 << shift
            if is_pool:
                self._pools[name] = shift
                self._pool_mask |= 0b1111 << shift
        return shift

    def _declare(self, entry: _Instance, pools: Iterable[PoolStated]) -> None:
        shared = [pool for pool in pools if pool.reach == Reach.CLUSTER]
        entry.pool_names = {pool.tier: pool.name or pool.tier.name.lower() for pool in shared}
        entry.pool_mask = 0
        for name in entry.pool_names.values():
            entry.pool_mask |= 0b1111 << self._shift(name, is_pool=True)
        entry.pools_known, entry.proven = True, False

    def _follow(self, entry: _Instance, delta: Delta) -> None:
        for tier, block, namespace, _ in delta.withdrawn:
            self._clear(namespace, block, entry.bits[tier])
        for tier, block, namespace, _ in delta.added:
            held = entry.fold.held[tier].get(block)  # one event may add a block and withdraw it again
            if held is not None and held.namespace == namespace:
                table = self._tables.get(namespace)
                if table is None:
                    table = self._tables[namespace] = {}
                table[block] = table.get(block, 0) | entry.bits[tier]
        # Within an event a claim comes before its withdrawal, so the lists may be followed one after the other.
        for change in delta.claimed:
            self._say(entry, change, held=True)
        for change in delta.unclaimed:
            self._say(entry, change, held=False)

    def _say(self, entry: _Instance, change: Change, held: bool) -> None:
        pool = entry.pool_names.get(change.tier)
        if pool is None:
            self.unnamed_claims += 1
        elif held:
            self._claim(pool, change.tier, change.namespace, [change.hash])
        else:
            self.unclaim(pool, change.namespace, change.hash)  # in every tier, as SQL, which keeps none

    def _claim(self, pool: str, tier: Tier, namespace: NamespaceId, blocks: list[SequenceHash]) -> None:
        shift = self._shift(pool, is_pool=True)
        table = self._tables.setdefault(namespace, {})
        for block in blocks:
            mask = table.get(block, 0)
            self._claims[pool] += not mask >> shift & 0b1111
            table[block] = mask | 1 << (shift + tier)

    def _unclaim(self, pool: str, tier: Tier, namespace: NamespaceId, blocks: list[SequenceHash]) -> None:
        shift = self._shift(pool, is_pool=True)
        table = self._tables.get(namespace, {})
        for block in blocks:
            before = table.get(block, 0) >> shift & 0b1111
            self._claims[pool] -= before == 1 << tier
            if before >> tier & 1:
                self._clear(namespace, block, 1 << (shift + tier))

    def _clear(self, namespace: NamespaceId, block: SequenceHash, bit: int) -> None:
        table = self._tables.get(namespace)
        if table is None:
            return
        mask = table.get(block, 0) & ~bit
        if mask:
            table[block] = mask
        elif table.pop(block, 0) and not table:
            del self._tables[namespace]

    def _rename(self, entry: _Instance, event: RunEvent) -> None:
        """A block the instance held turned up in another namespace: the delta does not say which it was in."""
        for block in split_hashes(event.hashes):
            for tier, held in entry.fold.held.items():
                now = held.get(block)
                for namespace in list(self._tables):
                    if now is None or namespace != now.namespace:
                        self._clear(namespace, block, entry.bits[tier])
                if now is not None:
                    table = self._tables.setdefault(now.namespace, {})
                    table[block] = table.get(block, 0) | entry.bits[tier]

    # -- inside: prefixes ---------------------------------------------------------------------------------------------

    def _runs(self, table: dict[bytes, int], hashes: bytes) -> list[tuple[int, int]]:
        """The prefix as (who holds it, blocks) while anyone's run, or a pool's part of one, can go on."""
        runs: list[tuple[int, int]] = []
        alive = self._lowest
        current, begin, at = 0, 0, 0
        for at in range(0, len(hashes) - HASH_BYTES + 1, HASH_BYTES):
            mask = table.get(hashes[at : at + HASH_BYTES], 0)
            if mask == current:
                if not mask:
                    return runs
                continue
            if at > begin:
                runs.append((current, (at - begin) // HASH_BYTES))
            current, begin = mask, at
            alive &= mask | mask >> 1 | mask >> 2 | mask >> 3
            if not alive and not mask & self._pool_mask:
                return runs
        if current:
            runs.append((current, (at + HASH_BYTES - begin) // HASH_BYTES))
        return runs

    def _depth(self, entry: _Instance, runs: list[tuple[int, int]]) -> InstanceDepth:
        by_tier = [0, 0, 0, 0]
        beyond = 0  # blocks of its pools after its own
        for mask, blocks in runs:
            own = 0 if beyond else mask >> entry.shift & 0b1111
            if own:
                by_tier[_HOTTEST[own]] += blocks
            elif mask & entry.pool_mask:
                beyond += blocks
            else:
                break
        depth = sum(by_tier)
        doubtful = entry.waiting or not self._is_whole(entry)
        counts = (by_tier[0], by_tier[1], by_tier[2], by_tier[3])
        return InstanceDepth(entry.name, depth, counts, depth + beyond, doubtful)

    def _is_whole(self, entry: _Instance) -> bool:
        if not entry.pools_known:
            return entry.proven
        return all(entry.fold.is_whole(tier) for tier in entry.fold.pools if not entry.fold.is_cluster(tier))


def _pool_depth(shift: int, runs: list[tuple[int, int]]) -> int:
    depth = 0
    for mask, blocks in runs:
        if not mask >> shift & 0b1111:
            break
        depth += blocks
    return depth
