"""Which blocks go to a colder tier next: a bounded queue of requests.

No thread, clock or bytes here: `OffloadDriver` drives it.

What waits are runs of hashes (`manager/offload/chain_runs.py`), 16 bytes a block and a little for each run, so a prompt
of any length waits as a whole, in its order from the beginning. The blocks themselves stay where they are; what has
left its tier when its turn comes is counted.

A tier that holds fewer blocks than a prompt has gets its beginning: what lies beyond would only push the beginning out.
HOST is also the way to what is colder, so it takes as much as the largest tier behind it does.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvbm.core.ids import DURABLE_TIERS, HASH_BYTES, NO_PARENT, Namespace, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.policy import OTHERS, OffloadPolicy
from kvbm.manager.objects.object_groups import Groups, ObjectGroup, groups_of
from kvbm.manager.objects.own_claims import OwnClaims
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.offload.chain_runs import NOWHERE, ChainRun, ChainRuns, pieces, stretches
from kvbm.manager.offload.fair_queue import FairQueue

_PASSING_S = 2.0  # after which nobody waits any more for room to pass through HOST

Lacking = Callable[[Tier, bytes], bytes]  # which of a run's blocks a tier of this instance does not hold now


class Route(NamedTuple):
    """What the requests that one copy can carry out have in common: whose blocks, from where, to where."""

    namespace: NamespaceId
    source: Tier
    target: Tier


class OffloadRequest(NamedTuple):
    """Blocks that a policy wants in a colder tier.

    Attributes:
        runs: the same blocks, with their positions.
        passes_host: whether they only pass through HOST: it cannot hold all that is before them in their prompt.
    """

    namespace: NamespaceId
    source: Tier
    target: Tier
    hashes: bytes
    runs: tuple[ChainRun, ...] = ()
    passes_host: bool = False

    @property
    def route(self) -> Route:
        """What it has in common with the requests that the same copy can carry out."""
        return Route(self.namespace, self.source, self.target)

    def positions(self) -> dict[SequenceHash, int]:
        """Of each block in its chain, NOWHERE where that is not known."""
        if not self.runs:
            return dict.fromkeys(split_hashes(self.hashes), NOWHERE)
        at = [position for run in self.runs for position in run.positions()]
        return dict(zip(split_hashes(self.hashes), at, strict=True))


class PromptLimits(NamedTuple):
    """How many blocks of one prompt a tier can hold.

    Attributes:
        slots: of each tier that has some.
        quota_slots: of tenants that may have fewer.
    """

    slots: Mapping[Tier, int] = {}
    quota_slots: Mapping[str, Mapping[Tier, int]] = {}

    def of(self, tenant: str, tier: Tier) -> int | None:
        """None: as many as there are."""
        slots = self.slots.get(tier)
        quota = self.quota_slots.get(tenant, {}).get(tier)
        return slots if quota is None else quota if slots is None else min(slots, quota)


class Offloader:
    """Turns creations, uses and arrivals into offloads, each target by its policy.

    HBM feeds HOST; HOST (or HBM where there is no HOST) feeds NVME and OBJECT. Where HBM is the engine's, HOST alone
    feeds. A full queue skips requests and counts them: the engine is never held up, and a block that was skipped is
    offered again when it is next used. Requests for one route are joined, so that a device sees long runs also where an
    engine creates blocks one by one. Tenants take turns by their weights, and the routes of each; in a full queue, who
    has most for its weight makes room for who has less.

    What goes to OBJECT is whole objects: see `manager/objects/object_groups.py`. Each leaves once the tier it leaves
    from holds all of it.

    Args:
        policies: what each target tier that exists wants.
        lacking: the ledger's.
        capacity_blocks: blocks that may wait.
        run_blocks: blocks one copy carries at most, or one object where that is more.
        object_blocks: k, blocks of an object.
        fair: the order of tenants; None: all blocks are alike.
        engine_hbm: HBM is the engine's, which brings blocks to HOST itself: nothing is taken from HBM.
        limits: how much of one prompt tiers can hold; None: all of it.
        waiting_objects: objects that may wait for blocks of theirs to arrive.
        may_be_durable: whether a namespace's blocks may go to tiers that outlive the process.

    Attributes:
        wanted: set when something waits; for the threads that carry it out, who clear it.
        claims: objects that are not offered, because they were put.
    """

    def __init__(
        self,
        policies: dict[Tier, OffloadPolicy],
        lacking: Lacking,
        capacity_blocks: int = 8192,
        run_blocks: int = 64,
        object_blocks: int = 1,
        fair: FairQueue | None = None,
        engine_hbm: bool = False,
        limits: PromptLimits | None = None,
        waiting_objects: int = 8192,
        may_be_durable: Callable[[NamespaceId], bool] = lambda _: True,
    ) -> None:
        self._policies, self._unheld = policies, lacking
        self._capacity_blocks = capacity_blocks
        self._object_bytes = object_blocks * HASH_BYTES
        self._limits = limits or PromptLimits()
        self._run_bytes = {
            tier: min(run_blocks, max(1, self._limits.slots.get(tier, run_blocks))) * HASH_BYTES for tier in Tier
        }
        self._run_bytes[Tier.OBJECT] = max(object_blocks, run_blocks // object_blocks * object_blocks) * HASH_BYTES
        self._groups: Groups | None = None
        if Tier.OBJECT in policies and object_blocks > 1:
            self._groups = Groups(object_blocks, waiting=waiting_objects)
        self._engine_hbm, self._may_be_durable = engine_hbm, may_be_durable
        self._objects_from = Tier.HOST if Tier.HOST in policies or engine_hbm else Tier.HBM
        self._fair = fair or FairQueue()
        # tenant → what waits for each of its routes, the next route first
        self._routes: dict[str, OrderedDict[Route, ChainRuns]] = {}
        self._waiting: Counter[str] = Counter()  # blocks of each tenant
        self._passing_s: dict[NamespaceId, float] = {}  # until when prompts go through HOST that it cannot hold
        self._feeds = {(tier, again): self._targets(tier, again) for tier in Tier for again in (False, True)}
        self._reaches: dict[Tier, int | None] = {
            tier: self._reach(OTHERS, tier) for tier in Tier
        }  # of a tenant without a quota
        self.claims = OwnClaims(object_blocks)
        self.wanted = threading.Event()
        self.waiting_blocks = 0
        self._waiting_from: Counter[Tier] = Counter()
        self.skipped: Counter[Skipped] = Counter()  # blocks

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """Know whose further namespaces are, before the first request of theirs."""
        self._fair.declare(namespaces)

    def offer(
        self,
        namespace: NamespaceId,
        tier: Tier,
        hashes: bytes,
        uses: int,
        parent: bytes = NO_PARENT,
        start: int | None = None,
    ) -> bool:
        """Blocks were created (uses 1), used again (uses 2), or arrived by a copy (uses 1) in `tier`.

        Args:
            parent, start: of a run that is one chain, as what was created or used again is: the block before it, and
                its position.
        Returns: whether anything waits to be offloaded.
        """
        if not hashes:
            return bool(self._routes)
        for source, target in self._feeds[tier, uses > 1]:
            if self._policies[target].wants(uses):
                run = ChainRun(hashes, NOWHERE if start is None else start)
                self._push_chain(Route(namespace, source, target), run, parent)
        if self._groups is not None and self._may_be_durable(namespace):
            if start is not None:
                self._offer_chain(self._groups, namespace, hashes, uses, parent, start)
            elif tier == self._objects_from:
                self._offer_arrived(self._groups, hashes)
        if self._routes:
            self.wanted.set()
        return bool(self._routes)

    def offer_arrived(self, namespace: NamespaceId, tier: Tier, hashes: bytes, positions: Sequence[int]) -> bool:
        """Blocks have arrived in a tier by a copy: `offer`, of blocks whose positions in their chains are known, or
        NOWHERE.

        Returns: whether anything waits to be offloaded.
        """
        blocks = split_hashes(hashes)
        begin = 0
        for end in range(1, len(blocks) + 1):
            if end < len(blocks) and positions[begin] >= 0 and positions[end] == positions[end - 1] + 1:
                continue
            if end < len(blocks) and positions[begin] < 0 and positions[end] < 0:
                continue
            run = ChainRun(hashes[begin * HASH_BYTES : end * HASH_BYTES], positions[begin])
            for source, target in self._feeds[tier, False]:
                if self._policies[target].wants(1):
                    self._push_chain(Route(namespace, source, target), run, b"")
            begin = end
        if self._groups is not None and tier == self._objects_from:
            self._offer_arrived(self._groups, hashes)
        if self._routes:
            self.wanted.set()
        return bool(self._routes)

    def lacking(self, tier: Tier, hashes: bytes) -> bytes:
        """Those blocks of a run that a tier lacks now: that it does not hold, or of OBJECT the whole objects that were
        not put.
        """
        return self.claims.lacking(hashes) if tier == Tier.OBJECT else self._unheld(tier, hashes)

    def within(self, namespace: NamespaceId, target: Tier, run: ChainRun) -> tuple[ChainRun, ChainRun]:
        """As much of a run as the target can hold together with all that is before it in its chain, and the rest."""
        limit = self._reaches[target] if not self._limits.quota_slots else self._reach_of(namespace, target)
        if target == Tier.HOST and limit is not None and self.behind_host() and not self._may_be_durable(namespace):
            limit = self._limits.of(self._fair.tenant_of(namespace), target)  # it goes nowhere from there
        if limit is None or run.start < 0 or run.start + run.blocks <= limit:
            return run, ChainRun(b"")
        return run.cut(max(0, limit - run.start))

    def _reach_of(self, namespace: NamespaceId, target: Tier) -> int | None:
        return self._reach(self._fair.tenant_of(namespace), target)

    def _reach(self, tenant: str, target: Tier) -> int | None:
        """Up to which position blocks of a prompt are of use in a tier, or in one it is on the way to;

        None: all are.
        """
        limit = self._limits.of(tenant, target)
        if target != Tier.HOST or limit is None:
            return limit
        limits = [limit, *(self._limits.of(tenant, tier) for tier in self.behind_host())]
        known = [one for one in limits if one is not None]
        return max(known) if len(known) == len(limits) else None

    def passes_through(self, namespace: NamespaceId, target: Tier, run: ChainRun, now_s: float) -> bool:
        """Whether some of a run for HOST lies beyond what HOST can hold of its prompt, and is only on its way to what
        is colder.

        For a while its namespace's blocks then leave HOST when they are there (`leaves_host`).
        """
        limit = self._limits.of(self._fair.tenant_of(namespace), target)
        passes = target == Tier.HOST and limit is not None and run.start >= 0 and run.start + run.blocks > limit
        if passes:
            self._passing_s[namespace] = now_s + _PASSING_S
        return passes

    def leaves_host(self, namespace: NamespaceId, now_s: float) -> bool:
        """Whether blocks of a namespace make room in HOST once they are in what is colder: more of their prompt is
        behind them.
        """
        if now_s < self._passing_s.get(namespace, now_s):
            return True
        self._passing_s.pop(namespace, None)
        return False

    def behind_host(self) -> list[Tier]:
        """The colder tiers that take every block that arrives in HOST."""
        return [tier for tier in (Tier.NVME, Tier.OBJECT) if tier in self._policies and self._policies[tier].wants(1)]

    def waiting_in(self, source: Tier) -> int:
        """How many blocks wait to be taken from a tier; those of a copy under way do no more."""
        return self._waiting_from[source]

    def wants(self, target: Tier, uses: int) -> bool:
        """Whether blocks used so often should go to a tier."""
        policy = self._policies.get(target)
        return policy is not None and policy.wants(uses)

    def forget(self) -> None:
        """Offload nothing of what waits, nor of what waits for blocks to arrive."""
        self._routes.clear()
        self._waiting.clear()
        self._waiting_from.clear()
        self.waiting_blocks = 0
        if self._groups is not None:
            self._groups.forget_waiting()

    def _offer_arrived(self, groups: Groups, hashes: bytes) -> None:
        """Offer the objects that waited for these blocks, and have all of theirs now."""
        for block in split_hashes(hashes):
            for group in groups.arrived(block):
                self._want_object(groups, group)

    def _offer_chain(
        self,
        groups: Groups,
        namespace: NamespaceId,
        hashes: bytes,
        uses: int,
        parent: bytes,
        start: int,
    ) -> None:
        """Offer the objects that a chain makes whole, now or once their blocks are where they leave from."""
        whole, lost = groups.follow(parent, start, hashes)
        if not self._policies[Tier.OBJECT].wants(uses):
            return
        self.skip(Skipped.PARTIAL, lost)
        if not whole or not (unclaimed := self.lacking(Tier.OBJECT, whole)):
            return
        missing = self.lacking(self._objects_from, unclaimed)
        if not missing:
            self._push_run(Route(namespace, self._objects_from, Tier.OBJECT), ChainRun(unclaimed), b"")
            return
        for hashes in groups_of(unclaimed, groups.blocks):
            group = ObjectGroup(namespace, hashes)
            if len(missing) == len(unclaimed):  # nothing is there yet, as after a prefill
                self._await(groups, group, hashes)
            else:
                self._want_object(groups, group)

    def _want_object(self, groups: Groups, group: ObjectGroup) -> None:
        if missing := self.lacking(self._objects_from, group.hashes):
            self._await(groups, group, missing)
        elif self.lacking(Tier.OBJECT, group.hashes):
            self._push(Route(group.namespace, self._objects_from, Tier.OBJECT), ChainRun(group.hashes), b"")

    def _await(self, groups: Groups, group: ObjectGroup, missing: bytes) -> None:
        """Offer the group when the last block it misses has arrived; where nothing will bring it, not at all."""
        given_up = groups.watch(group, missing) if self._objects_from == Tier.HOST else [group]
        for other in given_up:
            self.skip(Skipped.PARTIAL, other.hashes)

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

    def _push_chain(self, route: Route, run: ChainRun, parent: bytes) -> None:
        """Let those of a run's blocks wait that the target lacks and can hold; none where its namespace may not last
        there.
        """
        if route.target in DURABLE_TIERS and not self._may_be_durable(route.namespace):
            return
        run, beyond = self.within(route.namespace, route.target, run)
        if beyond.hashes:
            self.skip(Skipped.BEYOND, self.lacking(route.target, beyond.hashes))
        if not run.hashes:
            return
        wanted = self.lacking(route.target, run.hashes)
        if len(wanted) == len(run.hashes):
            self._push_run(route, run, parent)
            return
        done_bytes = 0
        for index, stretch in stretches(run, wanted):
            before = run.hashes[(index - 1) * HASH_BYTES : index * HASH_BYTES] if index else parent
            done_bytes += len(stretch.hashes)
            if not self._push_run(route, stretch, before):
                self.skip(Skipped.QUEUE, wanted[done_bytes:])
                return

    def _runs_of(self, route: Route) -> ChainRuns:
        unit_bytes = self._object_bytes if route.target == Tier.OBJECT else HASH_BYTES
        return ChainRuns(self._run_bytes[route.target], unit_bytes // HASH_BYTES)

    def _push_run(self, route: Route, run: ChainRun, parent: bytes) -> bool:
        """As many runs as it takes copies; whether all of it waits now. Where the queue is full its beginning does."""
        routes = self._routes.get(self._fair.tenant_of(route.namespace))
        waiting = None if routes is None else routes.get(route)
        for index, piece in pieces(run, self._run_bytes[route.target] // HASH_BYTES):
            if waiting is not None and waiting.has(piece.hashes):
                continue
            before = run.hashes[(index - 1) * HASH_BYTES : index * HASH_BYTES] if index else parent
            if not self._push(route, piece, before):
                self.skip(Skipped.QUEUE, run.hashes[(index + piece.blocks) * HASH_BYTES :])
                return False
        return True

    def _push(self, route: Route, run: ChainRun, parent: bytes) -> bool:
        """Let a run wait, as far as there is room for it; whether all of it does."""
        tenant, kept = self._fair.tenant_of(route.namespace), run
        while self.waiting_blocks + run.blocks > self._capacity_blocks:
            above = self._fair.above(self._waiting, tenant, run.blocks) if self._waiting else None
            if above is None:
                room = max(0, self._capacity_blocks - self.waiting_blocks)
                unit = self._object_bytes // HASH_BYTES if route.target == Tier.OBJECT else 1
                kept, left = run.cut(room // unit * unit)
                self.skip(Skipped.QUEUE, left.hashes)
                break
            self._drop_last(above)
        if kept.hashes:
            if tenant not in self._routes:
                self._fair.begin(tenant)
            routes = self._routes.setdefault(tenant, OrderedDict())
            if route not in routes:
                routes[route] = self._runs_of(route)
            self._count(tenant, route.source, routes[route].add(kept, parent))
        return len(kept.hashes) == len(run.hashes)

    def _drop_last(self, tenant: str) -> None:
        """Skip what a tenant asked for last, on the route whose turn is last."""
        routes = self._routes[tenant]
        route = next(reversed(routes))
        run = routes[route].drop_last()
        if not routes[route]:
            del routes[route]
        self.skip(Skipped.QUEUE, run.hashes)
        self._count(tenant, route.source, -run.blocks)

    def _count(self, tenant: str, source: Tier, more: int) -> None:
        self.waiting_blocks += more
        self._waiting[tenant] += more
        self._waiting_from[source] += more
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._routes[tenant]

    def room_came(self) -> None:
        """A copy has ended: what waited for its room may go."""
        if self.waiting_blocks:
            self.wanted.set()

    def put_back(self, request: OffloadRequest) -> None:
        """What one copy could not carry, for the next one."""
        self._push_run(request.route, ChainRun(request.hashes), b"")

    def defer(self, request: OffloadRequest) -> None:
        """A request whose time has not come waits again, before all others of its route; its tenant's turn was none."""
        tenant, route = self._fair.tenant_of(request.namespace), request.route
        blocks = len(request.hashes) // HASH_BYTES
        self._fair.spend(tenant, -blocks)
        routes = self._routes.setdefault(tenant, OrderedDict())
        routes.setdefault(route, self._runs_of(route)).add_first(request.runs)
        self._count(tenant, request.source, blocks)

    def skip(self, why: Skipped, hashes: bytes) -> None:
        """These blocks will not be offloaded now."""
        if hashes:
            self.skipped[why] += len(hashes) // HASH_BYTES

    def next(self, now_s: float, passed_over: Collection[Route] = ()) -> OffloadRequest | None:
        """What has waited longest on the route whose turn it is, as long a run as a copy may carry;

        None when nothing waits.

        Args:
            passed_over: routes (`OffloadRequest.route`) whose time has not come.
        """
        tenants = [
            tenant for tenant, routes in self._routes.items() if any(route not in passed_over for route in routes)
        ]
        if not tenants:
            return None
        tenant = self._fair.next(tenants)
        routes = self._routes[tenant]
        route = next(route for route in routes if route not in passed_over)
        runs = routes.pop(route)
        taken = tuple(runs.take())
        if runs:
            routes[route] = runs
        hashes = b"".join(run.hashes for run in taken)
        self._count(tenant, route.source, -(len(hashes) // HASH_BYTES))
        self._fair.spend(tenant, len(hashes) // HASH_BYTES)
        passes = any(self.passes_through(route.namespace, route.target, run, now_s) for run in taken)
        return OffloadRequest(route.namespace, route.source, route.target, hashes, taken, passes)
