"""The cluster index, readable: dictionaries, one block at a time. It says what the native index must do.

Per instance and tier it has what `core.fold.Residencies` has for a reader that has missed events, with two differences:
slots are not kept, and blocks are told apart by namespace and hash, so that what one tenant says never touches
another's blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from kvbm.catalog.index.cluster_index import (
    NOBODY,
    Applied,
    Audit,
    Claims,
    Holder,
    InstanceDepth,
    InstanceView,
    LendableRun,
    PlainApplied,
    PoolDepth,
    Prefixes,
    Presence,
    Presences,
    StreamPlace,
)
from kvbm.catalog.index.lookup import lookup
from kvbm.catalog.index.plain_frames import apply_plain
from kvbm.config.settings import RoutingSettings
from kvbm.core.answers import LookupAnswer
from kvbm.core.codec import decode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    InstanceStarted,
    InstanceStopped,
    PoolStated,
    ResidenciesListed,
    RunEvent,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
)
from kvbm.core.fold import residency_mix
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Reach, SequenceHash, Tier, split_hashes
from kvbm.core.layout import named_blocks
from kvbm.core.missed import missed_of
from kvbm.core.prompt_batches import encode_lookup
from kvbm.reference.router import ReferenceRouter

MOST_SIZED = 65_536  # namespaces of whose objects the size is kept
MOST_SPACES = 1 << 20  # namespaces
MOST_SPACES_OF_ONE = 1 << 16  # those that one instance has brought, and those that it holds blocks of
MOST_POOLS_OF_ONE = 64  # cluster pools that one instance has brought
_MASK = (1 << 64) - 1
_Key = tuple[NamespaceId, SequenceHash]
_Claim = tuple[Tier, NamespaceId, SequenceHash]


class _TierFold:
    """One tier of one instance."""

    def __init__(self) -> None:
        self.held: dict[_Key, int] = {}  # block → `begun` when it was last gained or listed
        self.snapshot = 0  # number of the snapshot last begun
        self.begun = 0  # snapshots begun; a number that comes back is another snapshot
        self.listed = 0  # blocks it has listed
        self.is_open = False  # it has begun and not ended
        self.is_whole = False  # nothing was missed since a snapshot ended
        self.is_partial = False  # residencies were refused
        self.has_refused = False  # the same, since the snapshot began

    def enter(self, number: int) -> None:
        """A snapshot of this number goes on, or begins."""
        if number != self.snapshot:
            self.snapshot, self.listed, self.is_open, self.has_refused = number, 0, True, False
            self.begun += 1


class _Instance:
    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self.stopped = False
        self.pools: tuple[PoolStated, ...] = ()
        self.pool_names: dict[Tier, str] = {}
        self.pools_known = False
        self.proven = False  # pools unknown, but a digest has agreed since a snapshot ended
        self.waiting = False
        self.excluded = False
        self.queued = 0
        self.lent_tiers = 0
        self.digest = 0
        self.spaces: set[NamespaceId] = set()  # it holds blocks of, or did since the last audit
        self.made_spaces = self.made_pools = 0  # that it has brought
        self.tiers = {tier: _TierFold() for tier in Tier}

    def is_cluster(self, tier: Tier) -> bool:
        reaches = {pool.tier: pool.reach for pool in self.pools}
        return reaches[tier] == Reach.CLUSTER if tier in reaches else tier == Tier.OBJECT

    def is_shown(self, tier: Tier) -> bool:
        """Whether answers speak of what it holds in a tier."""
        reaches = {pool.tier: pool.reach for pool in self.pools}
        return not self.excluded or reaches.get(tier, Reach.INSTANCE) != Reach.INSTANCE

    def is_partial(self) -> bool:
        return any(fold.is_partial for fold in self.tiers.values())

    def is_whole(self) -> bool:
        if not self.pools_known:
            return self.proven
        return all(self.tiers[pool.tier].is_whole for pool in self.pools if not self.is_cluster(pool.tier))

    def is_suspect(self) -> bool:
        return self.waiting or self.is_partial() or not self.is_whole()

    def view(self) -> InstanceView:
        declared = {pool.tier for pool in self.pools if not self.is_cluster(pool.tier)}
        counts = {tier: len(fold.held) for tier, fold in self.tiers.items() if fold.held or tier in declared}
        return InstanceView(
            self.epoch,
            self.stopped,
            self.is_suspect(),
            self.is_partial(),
            self.digest,
            self.pools,
            counts,
            self.excluded,
            self.waiting,
            not self.is_whole(),
        )


class _NamedSpaces:
    """The namespaces that events have named, and who has brought each; None: nobody's event."""

    def __init__(self) -> None:
        self._makers: dict[NamespaceId, _Instance | None] = {}

    def is_brought(self, entry: _Instance | None, namespace: NamespaceId) -> bool:
        """Whether a namespace is there, or may be brought by an event of this instance, or by nobody's."""
        if namespace not in self._makers:
            if entry is not None:
                if len(self._makers) >= MOST_SPACES or entry.made_spaces >= MOST_SPACES_OF_ONE:
                    return False
                entry.made_spaces += 1
            self._makers[namespace] = entry
        return True

    def has_room(self, entry: _Instance, namespace: NamespaceId) -> bool:
        """Whether an instance may hold blocks of a namespace; it counts from then on."""
        if namespace not in entry.spaces:
            if not self.is_brought(entry, namespace) or len(entry.spaces) >= MOST_SPACES_OF_ONE:
                return False
            entry.spaces.add(namespace)
        return True

    def keep(self, entries: Iterable[_Instance], claimed: set[NamespaceId]) -> None:
        """Forget those that nobody has a block of."""
        used = set(claimed)
        for entry in entries:
            entry.spaces = {space for fold in entry.tiers.values() for space, _ in fold.held}
            used |= entry.spaces
        for space in self._makers.keys() - used:
            if (maker := self._makers.pop(space)) is not None:
                maker.made_spaces -= 1


class _NamedPools:
    """The cluster pools that were named, what is claimed of each, and which instance has brought it, if one has."""

    def __init__(self) -> None:
        self.claims: dict[str, set[_Claim]] = {}
        self._makers: dict[str, _Instance] = {}

    def name(self, entry: _Instance, pools: Iterable[PoolStated]) -> dict[Tier, str]:
        """Names of the cluster pools of a start by tier, of as many as an instance may bring."""
        last: dict[Tier, str | None] = {}  # of two pools in one tier the later counts
        for pool in pools:
            last[pool.tier] = None
            if pool.reach == Reach.CLUSTER:
                name = pool.name or pool.tier.name.lower()
                last[pool.tier] = name if self._is_brought(entry, name) else None
        return {tier: name for tier, name in last.items() if name is not None}

    def _is_brought(self, entry: _Instance, name: str) -> bool:
        if name not in self.claims:
            if entry.made_pools >= MOST_POOLS_OF_ONE:
                return False
            entry.made_pools += 1
            self.claims[name], self._makers[name] = set(), entry
        return True

    def keep(self, entries: Iterable[_Instance]) -> None:
        """Forget those that nobody claims a block of, and that no instance's claims go to."""
        named = {name for entry in entries for name in entry.pool_names.values()}
        for name in [name for name, known in self.claims.items() if not known and name not in named]:
            del self.claims[name]
            if (maker := self._makers.pop(name, None)) is not None:
                maker.made_pools -= 1


class ReferenceIndex:
    """See `index.ClusterIndex`.

    Args:
        capacity: residencies and claims at most; more are refused and counted, and their instance is marked partial.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._instances: dict[InstanceId, _Instance] = {}
        self._pools = _NamedPools()
        self._claims = self._pools.claims
        self._object_blocks: dict[NamespaceId, int] = {}  # as was told
        self._spaces = _NamedSpaces()
        self._anomalies: Counter[str] = Counter()
        self._prompts_missed = 0

    # -- following instances ------------------------------------------------------------------------------------------

    def apply(self, data: bytes, at: int = 0, skip: int = 0) -> Applied:
        """As `ClusterIndex.apply`."""
        frame, _ = decode_frame(data, at)
        instance = self._entry(frame.instance)
        blocks = 0
        started: InstanceStarted | None = None
        stopped: StopReason | None = None
        claims: list[Claims] = []
        usages: list[tuple[int, UsageRecorded]] = []
        for number, event in enumerate(frame.events[skip:], skip):
            match event:
                case InstanceStarted():
                    started = event
                    self._begin(instance, frame.epoch, event.pools)
                case InstanceStopped():
                    instance.stopped, stopped = True, event.reason
                case SnapshotEnded():
                    self._end_snapshot(instance, event)
                case BlocksCreated():
                    self._add(instance, event.tier, event.namespace, event.hashes, claims)
                case BlocksMigrated():
                    self._add(instance, event.target, event.namespace, event.hashes, claims)
                    if isinstance(event.source, Tier) and not event.kept:
                        self._withdraw(instance, event.source, event.namespace, event.hashes, claims)
                    elif isinstance(event.source, Tier) and instance.is_cluster(event.source):
                        said = Claims(
                            event.source, event.namespace, event.hashes, False
                        )  # it was read there, so it is there
                        self._say(instance, said, claims)
                case BlocksEvicted():
                    self._withdraw(instance, event.tier, event.namespace, event.hashes, claims)
                case ResidenciesListed():
                    self._state(instance, event, claims)
                case UsageRecorded():
                    usages.append((number, event))
            if isinstance(event, RunEvent):
                blocks += len(split_hashes(event.hashes))
        return Applied(len(frame.events[skip:]), blocks, started, stopped, claims, usages)

    def apply_plain(self, messages: list[tuple[int, bytes]], places: list[StreamPlace]) -> PlainApplied:
        """As `ClusterIndex.apply_plain`."""
        return apply_plain(self, messages, places)

    def begin_blind(
        self,
        instance: InstanceId,
        epoch: Epoch,
        pools: Iterable[PoolStated] | None = None,
        likely: Iterable[PoolStated] = (),
    ) -> None:
        """As `ClusterIndex.begin_blind`."""
        entry = self._entry(instance)
        names = entry.pool_names
        self._begin(entry, epoch, () if pools is None else pools)
        if pools is None:
            likely_names = self._pools.name(entry, likely)
            entry.pool_names = names or likely_names
            entry.pools_known = False

    def miss(self, instance: InstanceId) -> None:
        """As `ClusterIndex.miss`."""
        entry = self._entry(instance)
        entry.proven = False
        for fold in entry.tiers.values():
            fold.is_open = fold.is_whole = False

    def wait(self, instance: InstanceId, waiting: bool) -> None:
        """As `ClusterIndex.wait`."""
        self._entry(instance).waiting = waiting

    def exclude(self, instance: InstanceId, excluded: bool) -> None:
        """As `ClusterIndex.exclude`."""
        self._entry(instance).excluded = excluded

    def agrees(self, instance: InstanceId, digest: int) -> bool:
        """As `ClusterIndex.agrees`."""
        entry = self._entry(instance)
        same = entry.digest == digest
        if not entry.pools_known and same and any(fold.is_whole for fold in entry.tiers.values()):
            entry.proven = True
        return same or not entry.is_whole() or entry.is_partial()

    def drop(self, instance: InstanceId) -> None:
        """As `ClusterIndex.drop`."""
        self._instances.pop(instance, None)

    def claim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """As `ClusterIndex.claim`."""
        self._spaces.is_brought(None, namespace)
        self._claim(pool, Tier.OBJECT, namespace, hashes)

    def unclaim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """As `ClusterIndex.unclaim`."""
        claimed = self._claims.setdefault(pool, set())
        for block in split_hashes(hashes):
            claimed.difference_update((tier, namespace, block) for tier in Tier)

    def claims(self, first: int = 0, pages: int = 64) -> tuple[int | None, list[tuple[str, NamespaceId, bytes]]]:
        """As `ClusterIndex.claims`; here a stretch is all of them."""
        runs: dict[tuple[str, NamespaceId], set[SequenceHash]] = {}
        for pool, known in self._claims.items():
            for _, namespace, block in known:
                runs.setdefault((pool, namespace), set()).add(block)
        return None, [(*key, b"".join(blocks)) for key, blocks in runs.items()]

    def forget_namespace(self, namespace: NamespaceId) -> None:
        """As `ClusterIndex.forget_namespace`; here a namespace is known by its blocks, and what was told of its
        objects.
        """
        self._object_blocks.pop(namespace, None)

    def size_objects(self, namespace: NamespaceId, blocks: int) -> None:
        """As `ClusterIndex.size_objects`."""
        known = self._object_blocks.get(namespace)
        if blocks and (len(self._object_blocks) < MOST_SIZED if known is None else blocks < known):
            self._object_blocks[namespace] = blocks

    def namespaces(self) -> list[NamespaceId]:
        """As `ClusterIndex.namespaces`."""
        folds = (fold for entry in self._instances.values() for fold in entry.tiers.values())
        held = {namespace for fold in folds for namespace, _ in fold.held}
        return [*held | {namespace for known in self._claims.values() for _, namespace, _ in known}]

    def sweep(self, pages: int = 256) -> bool:
        """As `ClusterIndex.sweep`; here a death leaves nothing."""
        return False

    def audit(self, pages: int = 64) -> Audit:
        """As `ClusterIndex.audit`; here a call is a pass."""
        claimed = {space for known in self._claims.values() for _, space, _ in known}
        self._spaces.keep(self._instances.values(), claimed)
        self._pools.keep(self._instances.values())
        differing = [
            name
            for name, entry in self._instances.items()
            if entry.digest
            != sum(residency_mix(tier, block) for tier, fold in entry.tiers.items() for _, block in fold.held) & _MASK
        ]
        return Audit(True, self.block_count(), differing, 0)

    # -- asking -------------------------------------------------------------------------------------------------------

    def report_queued(self, instance: InstanceId, tokens: int) -> None:
        """As `ClusterIndex.report_queued`."""
        if instance in self._instances:
            self._instances[instance].queued = tokens

    def report_lent_tiers(self, instance: InstanceId, tiers: int) -> None:
        """As `ClusterIndex.report_lent_tiers`."""
        if instance in self._instances:
            self._instances[instance].lent_tiers = tiers

    def lent(self, namespace: NamespaceId, hashes: bytes, most: int, whole: bool) -> list[LendableRun]:
        """As `ClusterIndex.lent`."""
        blocks = split_hashes(hashes)
        if not whole:
            blocks = blocks[: _run([bool(self.holders(namespace, block)) for block in blocks])]
        longest = [run for name, entry in self._instances.items() if (run := _lendable(name, entry, namespace, blocks))]
        return sorted(longest, key=lambda run: (-run.end, run.begin, run.instance))[:most]

    def prefixes(
        self,
        namespace: NamespaceId,
        hashes: bytes,
        best: int = 0,
        only: Iterable[InstanceId] | None = None,
        hottest: Tier = Tier.HBM,
    ) -> Prefixes:
        """As `ClusterIndex.prefixes`."""
        wanted = self._instances.keys() if only is None else self._instances.keys() & set(only)
        blocks = split_hashes(hashes)
        claimed = {
            pool: _whole(
                [any((tier, namespace, block) in known for tier in Tier) for block in blocks],
                named_blocks(pool) or self._object_blocks.get(namespace, 1),
            )
            for pool, known in self._claims.items()
        }
        pools = [PoolDepth(pool, depth) for pool, flags in claimed.items() if (depth := _run(flags))]
        pools.sort(key=lambda one: (-one.depth, one.pool))
        instances: list[InstanceDepth] = []
        for name in wanted:
            found = _depth_of(name, self._instances[name], namespace, blocks, hottest, claimed)
            if found.depth or (found.reach and not self._instances[name].excluded):
                instances.append(found)
        more = 0
        if best:
            instances.sort(key=lambda one: (-one.depth, -one.reach, self._instances[one.instance].queued, one.instance))
            more = sum(one.depth > 0 for one in instances[best:])
            instances = instances[:best]
        deepest = max([entry.depth for entry in instances] + [pool.depth for pool in pools], default=0)
        return Prefixes(deepest, instances, pools, more) if deepest or instances else NOBODY

    def presence(
        self, namespace: NamespaceId, hashes: bytes, best: int = 0, only: Iterable[InstanceId] | None = None
    ) -> Presences:
        """As `ClusterIndex.presence`."""
        rows, more = _presences(self, split_hashes(hashes), namespace, best, None if only is None else set(only))
        suspects = {name for name, entry in self._instances.items() if entry.is_suspect()}
        return Presences(
            [row._replace(suspect=not row.holder.is_pool and row.holder.name in suspects) for row in rows], more
        )

    def lookup(
        self,
        namespace: NamespaceId,
        hashes: bytes,
        limit: int,
        only: Sequence[InstanceId] | None,
        shown: str,
        view_age_s: float,
        behind: Collection[InstanceId],
    ) -> LookupAnswer:
        """As `ClusterIndex.lookup`."""
        return lookup(self, namespace, hashes, limit, only, shown, view_age_s, behind)

    def lookup_json(
        self, namespace: NamespaceId, hashes: bytes, limit: int, shown: str, view_age_s: str
    ) -> bytes | None:
        """As `ClusterIndex.lookup_json`."""
        found = lookup(self, namespace, hashes, limit, None, shown, float(view_age_s))
        told = msgspec.json.encode(found)
        is_found = bool(found.deepest or found.instances or found.pools)
        return told if is_found and b"\\" not in told else None

    def encode_prefixes(self, namespace: NamespaceId, prompts: Sequence[bytes], best: int, missed: int = 0) -> bytes:
        """As `ClusterIndex.encode_prefixes`."""
        found = [lookup(self, namespace, hashes, limit=best) for hashes in prompts]
        self._prompts_missed += sum(not (one.instances or one.pools) for one in found)
        return b"".join(encode_lookup(_with_reason(one, missed)) for one in found)

    def prompts_missed(self) -> int:
        """As `ClusterIndex.prompts_missed`."""
        return self._prompts_missed

    def router(self, settings: RoutingSettings) -> ReferenceRouter:
        """See `ClusterIndex`."""
        return ReferenceRouter(self, settings)

    def holders(self, namespace: NamespaceId, block: SequenceHash) -> list[Holder]:
        """As `ClusterIndex.holders`."""
        found = [
            Holder(name, tier, False)
            for name, entry in self._instances.items()
            for tier, fold in entry.tiers.items()
            if (namespace, block) in fold.held and entry.is_shown(tier)
        ]
        found += [
            Holder(pool, tier, True)
            for pool, known in self._claims.items()
            for tier in Tier
            if (tier, namespace, block) in known
        ]
        return sorted(found)

    def excluded_holders(self, namespace: NamespaceId, block: SequenceHash) -> list[InstanceId]:
        """As `ClusterIndex.excluded_holders`."""
        return [
            name
            for name, entry in self._instances.items()
            if any((namespace, block) in fold.held and not entry.is_shown(tier) for tier, fold in entry.tiers.items())
        ]

    def instances(self) -> list[InstanceId]:
        """As `ClusterIndex.instances`."""
        return list(self._instances)

    def view(self, instance: InstanceId) -> InstanceView | None:
        """As `ClusterIndex.view`."""
        entry = self._instances.get(instance)
        return None if entry is None else entry.view()

    def pool_name(self, instance: InstanceId, tier: Tier) -> str | None:
        """As `ClusterIndex.pool_name`."""
        entry = self._instances.get(instance)
        return None if entry is None else entry.pool_names.get(tier)

    def claim_counts(self) -> dict[str, int]:
        """As `ClusterIndex.claim_counts`."""
        return {pool: len({key[1:] for key in known}) for pool, known in self._claims.items()}

    def residency_count(self) -> int:
        """As `ClusterIndex.residency_count`."""
        return sum(len(fold.held) for entry in self._instances.values() for fold in entry.tiers.values())

    def block_count(self) -> int:
        """As `ClusterIndex.block_count`."""
        held = {key for entry in self._instances.values() for fold in entry.tiers.values() for key in fold.held}
        return len(held | {key[1:] for known in self._claims.values() for key in known})

    def anomalies(self) -> dict[str, int]:
        """As `ClusterIndex.anomalies`."""
        return dict(+self._anomalies)

    def memory(self) -> dict[str, int]:
        """As `ClusterIndex.memory`; not known here."""
        return {}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _entry(self, instance: InstanceId) -> _Instance:
        return self._instances.setdefault(instance, _Instance())

    def _begin(self, entry: _Instance, epoch: Epoch, pools: Iterable[PoolStated]) -> None:
        entry.epoch, entry.stopped, entry.digest = epoch, False, 0
        entry.spaces = set()
        entry.tiers = {tier: _TierFold() for tier in Tier}
        entry.pools = tuple(pools)
        entry.pool_names = self._pools.name(entry, entry.pools)
        entry.pools_known, entry.proven = True, False

    def _add(self, entry: _Instance, tier: Tier, namespace: NamespaceId, hashes: bytes, claims: list[Claims]) -> None:
        if entry.is_cluster(tier):
            self._say(entry, Claims(tier, namespace, hashes, False), claims)
            return
        fold = entry.tiers[tier]
        if not self._spaces.has_room(entry, namespace):
            self._refuse(fold, hashes)
            return
        for block in split_hashes(hashes):
            if (namespace, block) in fold.held:
                self._anomalies["created-twice"] += 1
                fold.held[namespace, block] = fold.begun
            else:
                self._gain(entry, tier, namespace, block)

    def _state(self, entry: _Instance, event: ResidenciesListed, claims: list[Claims]) -> None:
        fold = entry.tiers[event.tier]
        fold.enter(event.snapshot)
        blocks = split_hashes(event.hashes)
        fold.listed += len(blocks)
        if entry.is_cluster(event.tier):
            self._say(entry, Claims(event.tier, event.namespace, event.hashes, False), claims)
            return
        if not self._spaces.has_room(entry, event.namespace):
            self._refuse(fold, event.hashes)
            return
        for block in blocks:
            if (event.namespace, block) in fold.held:
                fold.held[event.namespace, block] = fold.begun
            else:
                self._anomalies["snapshot-added"] += fold.is_whole
                self._gain(entry, event.tier, event.namespace, block)

    def _withdraw(
        self, entry: _Instance, tier: Tier, namespace: NamespaceId, hashes: bytes, claims: list[Claims]
    ) -> None:
        if entry.is_cluster(tier):
            self._say(entry, Claims(tier, namespace, hashes, True), claims)
            return
        for block in split_hashes(hashes):
            if (namespace, block) in entry.tiers[tier].held:
                self._lose(entry, tier, namespace, block)
            else:
                self._anomalies["evicted-unheld"] += 1

    def _end_snapshot(self, entry: _Instance, event: SnapshotEnded) -> None:
        fold = entry.tiers[event.tier]
        fold.enter(event.snapshot)
        if not fold.is_open or fold.listed != event.count:
            self._anomalies["snapshot-incomplete"] += 1
            return
        for namespace, block in [key for key, begun in fold.held.items() if begun != fold.begun]:
            self._anomalies["snapshot-withdrew"] += bool(fold.is_whole and event.count)
            self._lose(entry, event.tier, namespace, block)
        fold.is_open, fold.is_whole, fold.is_partial = False, True, fold.has_refused

    def _gain(self, entry: _Instance, tier: Tier, namespace: NamespaceId, block: SequenceHash) -> None:
        fold = entry.tiers[tier]
        if self._is_full():
            fold.is_partial = fold.has_refused = True
            return
        fold.held[namespace, block] = fold.begun
        entry.digest = (entry.digest + residency_mix(tier, block)) & _MASK

    def _refuse(self, fold: _TierFold, hashes: bytes) -> None:
        self._anomalies["refused-at-capacity"] += len(split_hashes(hashes))
        fold.is_partial = fold.has_refused = True

    def _lose(self, entry: _Instance, tier: Tier, namespace: NamespaceId, block: SequenceHash) -> None:
        del entry.tiers[tier].held[namespace, block]
        entry.digest = (entry.digest - residency_mix(tier, block)) & _MASK

    def _is_full(self) -> bool:
        full = self.residency_count() + sum(map(len, self._claims.values())) >= self._capacity
        self._anomalies["refused-at-capacity"] += full
        return full

    def _say(self, entry: _Instance, said: Claims, claims: list[Claims]) -> None:
        claims.append(said)
        pool = entry.pool_names.get(said.tier)
        if pool is None:
            self._anomalies["unnamed-claim"] += len(split_hashes(said.hashes))
        elif said.withdrawn:
            self.unclaim(pool, said.namespace, said.hashes)
        elif not self._spaces.is_brought(entry, said.namespace):
            self._anomalies["refused-at-capacity"] += len(split_hashes(said.hashes))
        else:
            self._claim(pool, said.tier, said.namespace, said.hashes)

    def _claim(self, pool: str, tier: Tier, namespace: NamespaceId, hashes: bytes) -> None:
        known = self._claims.setdefault(pool, set())
        for block in split_hashes(hashes):
            if (tier, namespace, block) not in known and not self._is_full():
                known.add((tier, namespace, block))


def _lendable(
    name: InstanceId, entry: _Instance, namespace: NamespaceId, blocks: Sequence[SequenceHash]
) -> LendableRun | None:
    """The longest run of these blocks that an instance could lend; None: it could lend none."""
    tiers = [tier for tier in Tier if entry.lent_tiers >> tier & 1 and entry.is_shown(tier)]
    flags = [any((namespace, block) in entry.tiers[tier].held for tier in tiers) for block in blocks]
    begins = [at for at, flag in enumerate(flags) if flag and not (at and flags[at - 1])]
    runs = [LendableRun(name, begin, begin + _run(flags[begin:])) for begin in begins]
    return max(runs, key=lambda run: run.end - run.begin) if runs else None


def _presences(
    index: ReferenceIndex,
    blocks: Sequence[SequenceHash],
    namespace: NamespaceId,
    best: int,
    names: set[InstanceId] | None,
) -> tuple[list[Presence], int]:
    """Who has which of these blocks, in order, and how many instances more."""
    flags: dict[Holder, list[bool]] = {}
    for at, block in enumerate(blocks):
        for holder in index.holders(namespace, block):
            flags.setdefault(holder, [False] * len(blocks))[at] = True
    counts = {
        name: sum(map(any, zip(*(held for holder, held in flags.items() if holder.name == name), strict=True)))
        for name in {holder.name for holder in flags if not holder.is_pool}
        if names is None or name in names
    }
    order = sorted(counts, key=lambda name: (-counts[name], name))
    wanted = order[:best] if best else order
    rows = [
        Presence(holder, False, _bits(held))
        for holder, held in flags.items()
        if holder.is_pool or holder.name in wanted
    ]
    place = {name: at for at, name in enumerate(wanted)}
    rows.sort(key=lambda row: (row.holder.is_pool, place.get(row.holder.name, 0), row.holder))
    return rows, len(order) - len(wanted)


def _bits(flags: list[bool]) -> bytes:
    """A bit for each flag, the first in the lowest bit of the first byte."""
    return sum(flag << at for at, flag in enumerate(flags)).to_bytes(-(-len(flags) // 8), "little")


def _with_reason(answer: LookupAnswer, missed: int) -> LookupAnswer:
    """An answer, with the reason of this number where nothing was found."""
    is_missed = not (answer.instances or answer.pools)
    return msgspec.structs.replace(answer, missed=missed_of(missed)) if is_missed else answer


def _depth_of(
    name: InstanceId,
    entry: _Instance,
    namespace: NamespaceId,
    blocks: Sequence[SequenceHash],
    hottest: Tier,
    claimed: Mapping[str, list[bool]],
) -> InstanceDepth:
    """How far an instance has these blocks, and reaches with what pools are claimed to have of them."""
    by_tier = [0, 0, 0, 0]
    for block in blocks:
        tiers = [
            tier
            for tier in Tier
            if tier >= hottest and (namespace, block) in entry.tiers[tier].held and entry.is_shown(tier)
        ]
        if not tiers:
            break
        by_tier[min(tiers)] += 1
    depth = sum(by_tier)
    rest = [
        any(claimed[pool][at] for pool in entry.pool_names.values() if pool in claimed)
        for at in range(depth, len(blocks))
    ]
    counts = (by_tier[0], by_tier[1], by_tier[2], by_tier[3])
    return InstanceDepth(name, depth, counts, depth + _run(rest), entry.is_suspect())


def _whole(flags: list[bool], k: int) -> list[bool]:
    """The flags that are set with all others of their object: k consecutive ones from a multiple of k on."""
    return [all(flags[at // k * k : at // k * k + k]) and at // k * k + k <= len(flags) for at in range(len(flags))]


def _run(flags: list[bool]) -> int:
    """How many flags are set, from the first on."""
    return flags.index(False) if False in flags else len(flags)
