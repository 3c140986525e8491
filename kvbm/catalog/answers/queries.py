"""What a catalog answers: who has a prefix, who should serve it, who holds a block, what is known of each instance, and
how old all that is.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvbm.catalog.access.callers import EMBEDDED, Caller
from kvbm.catalog.answers.candidates import CandidateSets, model_of
from kvbm.catalog.answers.misses import LookupsAsked, Misses
from kvbm.catalog.answers.visibility import NOWHERE, Visibility
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.lag import Confirmation
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.snapshots import SnapshotRequests
from kvbm.catalog.follow.stated_chains import StatedChains
from kvbm.catalog.index.lenders import Lenders, WantedPeers
from kvbm.catalog.index.lent_blocks import LentBlocks
from kvbm.catalog.index.lookup import left_out, locate, presence
from kvbm.catalog.index.object_sizes import ObjectSizes
from kvbm.catalog.members.ages_heard import AgesHeard
from kvbm.catalog.members.liveness import Freshness
from kvbm.catalog.routing.router import CandidateNumbers, Ranking, Router, RoutingTask
from kvbm.catalog.routing.shared_routes import SharedRoutes
from kvbm.catalog.routing.transfers import Transfers
from kvbm.config.settings import RoutingSettings
from kvbm.core.answers import (
    LIMIT,
    MAX_INSTANCES,
    MAX_LIMIT,
    MAX_PEERS,
    BlockAnswer,
    BlockHolder,
    FindAnswer,
    InstancesAnswer,
    InstanceSummary,
    LentRun,
    LookupAnswer,
    NamespacesAnswer,
    NamespaceSummary,
    PeerHolding,
    PoolHolding,
    PoolSummary,
    PresenceAnswer,
    RankedInstance,
)
from kvbm.core.events import JANITOR, PoolStated
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Reach, SequenceHash, Tier
from kvbm.core.parts import ALL_PARTS
from kvbm.core.prompt_batches import PromptBatch, encode_find, encode_lookup, encode_presence

_PAGE_BYTES = 1 << 20  # of namespaces in one answer, about
_NO_AGE = "0.0"  # as JSON
D = TypeVar("D", RankedInstance, BlockHolder, PeerHolding)


class Queries:
    """Answers from what was read and heard. One asyncio loop; nothing here waits.

    Attributes:
        visibility: what a caller may know of. misses: why nothing was found.
        shared: its routes that other catalogs are told, and theirs.
    Args:
        confirmation: since when it is not known that the whole stream was read.
        liveness_s: a view is called old from half of this on.
        parts: those whose instances are followed.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        heartbeats: HeartbeatFollower,
        requests: SnapshotRequests,
        confirmation: Confirmation,
        routing: RoutingSettings,
        liveness_s: float,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> None:
        self._sequencer, self._heartbeats, self._requests = sequencer, heartbeats, requests
        self._index, self._liveness, self._backlog = sequencer.index, heartbeats.liveness, heartbeats.backlog
        self._confirmation, self._liveness_s = confirmation, liveness_s
        self._router: Router[Any] = self._index.router(routing)
        self._candidates = CandidateSets(self._router, self._liveness, sequencer)
        self.visibility = Visibility(sequencer)
        self.misses = Misses(sequencer, self.visibility, self._candidates.is_named)
        self.shared = SharedRoutes(self._router.take, parts)
        self._lenders = Lenders(self._liveness, self._place_of)
        self._lent = LentBlocks(
            self._index, self._router.reads, self._liveness, self._lenders, self._pools_of, parts != ALL_PARTS
        )
        self.transfers = Transfers(self._lent.links.measured)
        self._objects, self.ages = ObjectSizes(self._index, sequencer), AgesHeard()
        heartbeats.listeners += [
            self._router.hear,
            self._lenders.hear,
            self._lent.hear,
            self.transfers.hear,
            self._objects.hear,
            self.ages.hear,
        ]

    # -- blocks -------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        asked: Namespace | NamespaceId,
        hashes: bytes,
        caller: Caller = EMBEDDED,
        limit: int = LIMIT,
        only: Sequence[InstanceId] | None = None,
    ) -> LookupAnswer:
        """Who has how much of a prefix, as far as the caller may know of it.

        Arguments as `kvbm.catalog.index.lookup.lookup`.

        Args:
            asked: the namespace as the caller has given it.
        """
        return self.misses.lookup(self.holdings(asked, hashes, caller, limit, only), caller, asked)

    def lookup_json(self, asked: NamespaceId, hashes: bytes, caller: Caller, limit: int) -> bytes | None:
        """`lookup` as JSON, where something is found; None where that has to be asked."""
        if self._backlog.behind:
            return None
        key, shown = self._keyed(asked, caller)
        age_s = self.view_age_s()
        return self._index.lookup_json(
            key, hashes, limit, shown, msgspec.json.encode(age_s).decode() if age_s else _NO_AGE
        )

    def holdings(
        self,
        asked: Namespace | NamespaceId,
        hashes: bytes,
        caller: Caller,
        limit: int,
        only: Sequence[InstanceId] | None,
    ) -> LookupAnswer:
        """As `lookup`, without a reason where nothing is found: for who asks again and again."""
        key, shown = self._keyed(asked, caller)
        return self._index.lookup(key, hashes, limit, only, shown, self.view_age_s(), self._backlog.behind)

    def presence(
        self,
        asked: Namespace | NamespaceId,
        hashes: bytes,
        caller: Caller = EMBEDDED,
        limit: int = LIMIT,
        only: Sequence[InstanceId] | None = None,
    ) -> PresenceAnswer:
        """Who has which of some blocks, as far as the caller may know of it. Arguments as `lookup`."""
        key, shown = self._keyed(asked, caller)
        found = presence(self._index, key, hashes, limit, only, shown, self.view_age_s(), self._backlog.behind)
        return self.misses.presence(found, caller, asked)

    def find(
        self,
        asked: Namespace | NamespaceId,
        hashes: bytes,
        caller: Caller = EMBEDDED,
        limit: int = MAX_PEERS,
        only: Sequence[InstanceId] | None = None,
        first: int = 0,
        asker: str = "",
        topology: Sequence[str] = (),
    ) -> FindAnswer:
        """What of some blocks can be read from elsewhere, as far as the caller may know of it. Arguments as `lookup`.

        Args:
            first, asker, topology: as in FindRequest.
        """
        key, shown = self._keyed(asked, caller)
        pools = self._index.prefixes(key, hashes, 0, ()).pools
        wanted = WantedPeers(key, hashes[first * HASH_BYTES :], asker, topology, min(limit, MAX_PEERS), only)
        peers = self._lenders.find(self._index, wanted, lambda one: self.visibility.instance(caller, one))
        found = FindAnswer(
            namespace=shown,
            blocks=len(hashes) // HASH_BYTES,
            pools=[
                PoolHolding(pool=one.pool, depth=one.depth) for one in sorted(pools, key=lambda p: (-p.depth, p.pool))
            ],
            peers=[self._suspected_if_behind(one, one.instance) for one in peers],
            view_age_s=self.view_age_s(),
        )
        return self.misses.find(found, self._index, key, wanted.hashes, caller, asked)

    def finds_encoded(self, asked: PromptBatch, caller: Caller = EMBEDDED) -> bytes:
        """The answers to several questions of what can be read, one behind the other in the binary form."""
        asker, *topology = asked.asker or ("",)
        return b"".join(
            encode_find(self.find(asked.namespace, hashes, caller, asked.limit, None, first, asker, topology))
            for hashes, first in asked.prompts
        )

    def presences_encoded(self, asked: PromptBatch, caller: Caller = EMBEDDED) -> bytes:
        """The answers to several questions of presence, one behind the other in the binary form."""
        return b"".join(
            encode_presence(self.presence(asked.namespace, hashes, caller, asked.limit)) for hashes, _ in asked.prompts
        )

    def lookups_encoded(self, asked: PromptBatch, caller: Caller = EMBEDDED) -> bytes:
        """The answers to several lookups, one behind the other in the binary form."""
        if not self._backlog.behind:
            key = self.visibility.key(caller, asked.namespace)
            prompts = [hashes for hashes, _ in asked.prompts]
            lookups = LookupsAsked(self._index, key, prompts, asked.limit, caller, asked.namespace)
            return self.misses.lookups(lookups, self._liveness.leaves_out)
        return b"".join(
            encode_lookup(self.lookup(asked.namespace, hashes, caller, asked.limit)) for hashes, _ in asked.prompts
        )

    def route(
        self,
        task: RoutingTask,
        fields: Namespace | None,
        asked: Namespace | NamespaceId | None = None,
        caller: Caller = EMBEDDED,
        limit: int = LIMIT,
        only: Collection[InstanceId] | None = None,
        remember: bool = True,
        elsewhere: CandidateNumbers | None = None,
    ) -> Ranking:
        """The instances that may serve a prompt, best first; the first is noted as chosen. Empty when there are none.

        A caller of some tenants sees the order, and of the cost what its own prompt makes: what waits at an instance,
        and what was routed there, is of all tenants. For a namespace it may not know of there is nobody.

        Args:
            fields: of the prompt's namespace, when they are known.
            asked: the namespace as the caller has given it; None: by its id.
            limit: at most so many are told.
            only: instances to look at; None for all.
            remember: False: nothing is noted. elsewhere: see `Router.route`.
        """
        now_s = time.monotonic()
        sees_all = caller is EMBEDDED or caller.sees_all
        if not sees_all and self.visibility.key(caller, task.namespace if asked is None else asked) == NOWHERE:
            return Ranking([], 0)
        self._candidates.refresh()
        if only is None and self._liveness.hears_anybody():
            serving = self._candidates.serving(task.namespace, fields)
            visible = None if sees_all else self._candidates.visible(caller)
        else:
            serving, visible = [self._picked(task.namespace, fields, caller, only)], None
        own: Sequence[LentRun] = ()
        if task.phase != "decode":
            own = self._lent.runs(
                task.namespace, task.hashes, lambda one: sees_all or self.visibility.instance(caller, one)
            )
        lent = self._lent.priced(
            now_s, own, () if elsewhere is None else elsewhere.lent, len(task.hashes) // HASH_BYTES
        )
        ranking = self._router.route(now_s, task, serving, visible, limit, remember, elsewhere, lent)
        if own:
            ranking = ranking._replace(together=ranking.together._replace(lent=own))
        if remember and self._heartbeats.peer_until_s > now_s and ranking.best and ranking.best[0].admitted:
            self.shared.note(now_s, task, ranking.best[0])
        is_fresh = self._liveness.loads_are_fresh(now_s)
        if sees_all and is_fresh and not self._backlog.behind:
            return ranking
        shown = ranking.best if sees_all else [_without_load(one) for one in ranking.best]
        if not is_fresh:
            shown = [_with_load_age(one, self._liveness.load_age_s(now_s, InstanceId(one.instance))) for one in shown]
        return Ranking([self._suspected_if_behind(one, one.instance) for one in shown], ranking.more, ranking.together)

    def left_out(
        self,
        task: RoutingTask,
        asked: Namespace | NamespaceId,
        caller: Caller,
        limit: int,
        only: Collection[InstanceId] | None,
    ) -> dict[str, str]:
        """As `lookup.left_out`, of a prompt that is routed."""
        key, may_know = self._keyed(asked, caller)[0], partial(self.visibility.instance, caller)
        return left_out(self._index, self._liveness, key, task.hashes, limit, only, may_know)

    # -- prompts of several KV groups ----------------------------------------------------------------------------------

    def held(
        self, asked: Namespace | NamespaceId, hashes: bytes, caller: Caller, only: Sequence[InstanceId] | None
    ) -> PresenceAnswer:
        """As `presence`, of as many instances as can be, without a reason where nothing is found."""
        key, shown = self._keyed(asked, caller)
        return presence(self._index, key, hashes, MAX_LIMIT, only, shown, self.view_age_s(), self._backlog.behind)

    @property
    def chains(self) -> StatedChains:
        """How engines hash tokens."""
        return self._sequencer.chains

    def is_served(self, namespace: Namespace) -> bool:
        """Whether a live instance runs a namespace's model."""
        return self._candidates.is_run(namespace)

    def cluster_pools(self, instance: InstanceId) -> set[str]:
        """The pools of cluster reach that an instance uses, by name."""
        return {pool.name for pool in self._pools_of(instance) if pool.reach is Reach.CLUSTER and pool.name}

    def forget(self, instance: InstanceId) -> None:
        """Nothing was routed to the instance, and it lends nothing."""
        self._candidates.forget(instance)
        self._router.forget(instance)
        self._lenders.forget(instance)
        self._lent.forget(instance)
        self.transfers.forget(instance)
        self._objects.forget(instance)
        self.ages.forget(instance)

    def block(self, namespace: NamespaceId, block: SequenceHash, caller: Caller = EMBEDDED) -> BlockAnswer:
        """Who holds one block, as far as the caller may know of it."""
        age_s = self.view_age_s()
        answer = locate(self._index, self.visibility.key(caller, namespace), block, namespace)
        if self._backlog.behind:
            holders = [
                one if one.kind == "pool" else self._suspected_if_behind(one, one.name) for one in answer.holders
            ]
            answer = msgspec.structs.replace(answer, holders=holders)
        answer = msgspec.structs.replace(answer, view_age_s=age_s) if age_s else answer
        return self.misses.block(answer, caller, namespace)

    def _pools_of(self, instance: InstanceId) -> Sequence[PoolStated]:
        row = self._sequencer.instance_row(instance)
        return row.pools if row is not None else ()

    def _place_of(self, instance: InstanceId) -> tuple[str, ...]:
        row = self._sequencer.instance_row(instance)
        return tuple(row.topology) if row is not None else ()

    def _keyed(self, asked: Namespace | NamespaceId, caller: Caller) -> tuple[NamespaceId, str]:
        """Where to look for a namespace as the caller has given it, and what the answer calls it."""
        public = asked.id if isinstance(asked, Namespace) else asked
        return public if caller is EMBEDDED else self.visibility.key(caller, asked), public.hex()

    def _suspected_if_behind(self, answer: D, instance: str) -> D:
        is_behind = InstanceId(instance) in self._backlog.behind
        return msgspec.structs.replace(answer, suspect=True) if is_behind else answer

    def _picked(
        self,
        namespace: NamespaceId,
        fields: Namespace | None,
        caller: Caller,
        only: Collection[InstanceId] | None,
    ) -> Any:
        """The candidates one by one: of those that are asked for, or where nobody is heard."""
        picked = self._router.candidates()
        if only is not None and self._liveness.hears_anybody():
            named = sorted(one for one in set(only) if self._liveness.may_serve(one))
        else:
            named = [one for one in self._liveness.candidates() if only is None or one in only]
        for instance in named:
            if self._serves(instance, namespace, fields) and self.visibility.instance(caller, instance):
                self._router.add(picked, instance)
        return picked

    def _serves(self, instance: InstanceId, wanted: NamespaceId, fields: Namespace | None) -> bool:
        """Whether an instance has named a namespace, or runs its model; one that has said that it names none, may."""
        row = self._sequencer.instance_row(instance)
        if row is not None and row.engine == JANITOR:
            return False
        declared = self._sequencer.declared(instance)
        if wanted in declared or self._sequencer.declares_nothing(instance):
            return True
        fields = self.namespace(wanted) if fields is None else fields
        return fields is not None and any(
            model_of(fields) == model_of(other) for key in declared if (other := self.namespace(key)) is not None
        )

    # -- how old the view is ------------------------------------------------------------------------------------------

    def view_age_s(self) -> float:
        """How old the view is that answers rest on; 0 while everybody's silence counts and the stream is read to its
        end.
        """
        now_s = time.monotonic()
        age_s = self._confirmation.age_s(now_s)
        if not self._liveness.is_fresh(now_s):
            age_s = max(self._liveness.freshness(now_s).age_s, age_s)
        return round(age_s, 3) if age_s >= self._liveness_s / 2 else 0.0

    def staleness(self) -> list[str]:
        """What makes answers old, in words; empty when they are fresh."""
        fresh, behind = self._freshness(), sorted(self._backlog.behind)
        found = [f"the view is {fresh.age_s:.1f} s old: {fresh.why}"] if fresh.why else []
        if behind:
            most_s = max(self._backlog.age_s(time.monotonic(), name) for name in behind)
            found.append(
                f"{len(behind)} instances may have decided what is not read, for {most_s:.1f} s: "
                f"{', '.join(behind[:5])}"
            )
        return found

    def _freshness(self) -> Freshness:
        now_s = time.monotonic()
        fresh = self._liveness.freshness(now_s)
        unconfirmed_s = self._confirmation.age_s(now_s)
        if unconfirmed_s > fresh.age_s:
            fresh = Freshness(unconfirmed_s, "so long nobody has confirmed that the stream is read to its end")
        is_old = fresh.age_s >= self._liveness_s / 2  # before that, at the start, nobody could have fallen silent
        return fresh if is_old else Freshness(0.0, "")

    # -- namespaces and instances -------------------------------------------------------------------------------------

    def namespace(self, namespace: NamespaceId) -> Namespace | None:
        """A namespace's fields, if an instance has declared them."""
        return self._sequencer.namespaces().get(namespace)

    def namespaces(self, caller: Caller = EMBEDDED) -> list[NamespaceSummary]:
        """All of `namespace_page`."""
        known = self.visibility.namespaces(caller)
        return [NamespaceSummary(id=key.hex(), fields=known[key]) for key in sorted(known)]

    def namespace_page(self, caller: Caller, after: bytes = b"", limit: int = MAX_INSTANCES) -> NamespacesAnswer:
        """The namespaces whose fields are known and that the caller may know of, by id.

        Args:
            after: only those whose ids come behind this.
            limit: at most so many; of those with long texts fewer, but one at least.
        """
        known = self.visibility.namespaces(caller)
        names = self._sequencer.known_namespaces.ids() if caller.sees_all else sorted(known)
        begin = bisect_right(names, after)
        found, size = [], 0
        for key in names[begin : begin + limit]:
            found.append(NamespaceSummary(id=key.hex(), fields=known[key]))
            size += len(known[key].canonical())
            if size > _PAGE_BYTES:
                break
        return NamespacesAnswer(namespaces=found, more=len(names) - begin - len(found))

    def instances(self, caller: Caller = EMBEDDED) -> list[InstanceSummary]:
        """All of `instance_page`."""
        return self.instance_page(caller).instances

    def instance_page(
        self, caller: Caller, after: str = "", limit: int = 0, names: Collection[str] = ()
    ) -> InstancesAnswer:
        """The instances the caller may know of, by name.

        A caller of some tenants sees who they are and whether they serve, no numbers.

        Args:
            after: only those whose names come behind this.
            limit: at most so many; 0 for all.
            names: only these; empty for all.
        """
        now_s, known = time.monotonic(), self._known()
        wanted = known & set(names) if names else known
        shown = sorted(one for one in wanted if one > after and self.visibility.instance(caller, one))
        page = shown[:limit] if limit else shown
        if caller.sees_all:
            claims = self._index.claim_counts()
            found = [self._summary(now_s, instance, claims) for instance in page]
        else:
            found = [_without_counts(self._summary(now_s, instance, {})) for instance in page]
        tells = bool(names) and caller.sees_all
        forgotten = sorted(set(names) & self._sequencer.forgotten.keys() - known) if tells else None
        return InstancesAnswer(instances=found, more=len(shown) - len(page), forgotten=forgotten)

    def instance_count(self) -> int:
        """How many instances there are."""
        return len(self._known())

    def _known(self) -> set[InstanceId]:
        return {*self._liveness.instances(), *self._index.instances()}

    def _summary(self, now_s: float, instance: InstanceId, claims: dict[str, int]) -> InstanceSummary:
        view, row = self._index.view(instance), self._sequencer.instance_row(instance)
        pulse = self._liveness.last(instance)
        position = self._sequencer.position(instance)
        heartbeat = pulse.heartbeat if pulse is not None else None
        counts = view.counts if view is not None else {}
        pools = sorted(view.pools, key=lambda pool: pool.tier) if view is not None else []
        return InstanceSummary(
            instance=instance,
            cluster=self._heartbeats.cluster_of(instance) or "",
            state=self._liveness.state(instance).value,
            epoch=position.epoch,
            offset=position.offset,
            published=heartbeat.published if heartbeat is not None else None,
            digest=f"{view.digest if view is not None else 0:016x}",
            applied=heartbeat.applied or None if heartbeat is not None else None,
            suspect=view is None or view.suspect or instance in self._backlog.behind,
            partial=view is not None and view.partial,
            suspicions=self.suspicions(instance),
            snapshot_asked_s=self._requests.asker.age_s(now_s, instance),
            excluded=why.value if (why := self._liveness.why(instance)) is not None else "",
            trouble=heartbeat.trouble if heartbeat is not None else "",
            run=heartbeat.run if heartbeat is not None else "",
            engine=row.engine if row is not None else "",
            version=row.version if row is not None else "",
            topology=list(row.topology) if row is not None else [],
            pools=[_pool_summary(pool, self._held(instance, pool, counts, claims)) for pool in pools],
            held_blocks={tier.name: count for tier, count in counts.items()},
            heartbeat_age_s=round(now_s - pulse.at_s, 3) if pulse is not None else None,
            queued_tokens=heartbeat.queued_tokens if heartbeat is not None else None,
            running_requests=heartbeat.running_requests if heartbeat is not None else None,
            free_slots={tier.name: free for tier, free in heartbeat.free_slots.items()}
            if heartbeat is not None
            else None,
        )

    def _held(self, instance: InstanceId, pool: PoolStated, counts: Mapping[Tier, int], claims: dict[str, int]) -> int:
        name = self._index.pool_name(instance, pool.tier) or ""
        return claims.get(name, 0) if pool.reach == Reach.CLUSTER else counts.get(pool.tier, 0)

    def suspicions(self, instance: InstanceId) -> list[str]:
        """Why an instance is suspect, in words."""
        view, trouble = self._index.view(instance), self._sequencer.suspicions.by_instance.get(instance)
        if (unreadable := self._sequencer.unreadable(instance)) is not None:
            return [unreadable.reason()]
        if view is None:
            return ["nothing was read of it", *self._heartbeats.delays(instance)]
        suspicions = (
            trouble.reasons() if trouble is not None else ["its first snapshot has not ended"] if view.missed else []
        )
        if view.waiting:
            suspicions.append("later events came first")
        if view.partial:
            suspicions.append("the catalog is at its capacity")
        return suspicions + self._heartbeats.delays(instance)


def _pool_summary(pool: PoolStated, held_blocks: int) -> PoolSummary:
    return PoolSummary(
        tier=pool.tier.name,
        slots=pool.slots,
        block_bytes=pool.block_bytes,
        reach=pool.reach.name,
        name=pool.name,
        held_blocks=held_blocks,
    )


def _with_load_age(ranked: RankedInstance, age_s: float | None) -> RankedInstance:
    return ranked if age_s == 0.0 else msgspec.structs.replace(ranked, load_age_s=age_s)


def _without_load(ranked: RankedInstance) -> RankedInstance:
    """Without what other tenants' prompts have made of the cost."""
    own_s = max(0.0, ranked.ttft_s - ranked.queueing_s)
    return msgspec.structs.replace(
        ranked, queueing_s=0.0, recompute_s=own_s - ranked.fetch_s, balance_s=0.0, cost_s=own_s, ttft_s=own_s
    )


def _without_counts(summary: InstanceSummary) -> InstanceSummary:
    """Who an instance is and whether it serves: numbers of blocks, events and requests are of all tenants, and so are
    words of trouble.
    """
    return msgspec.structs.replace(
        summary,
        offset=0,
        published=None,
        applied=None,
        digest="0" * 16,
        suspicions=[],
        snapshot_asked_s=None,
        trouble="",
        run="",
        topology=[],
        pools=[],
        held_blocks={},
        queued_tokens=None,
        running_requests=None,
        free_slots=None,
    )
