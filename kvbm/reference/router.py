"""Routing, readable: one candidate at a time. It says what the native router must do; see `routing`."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.catalog.index.cluster_index import ClusterIndex, InstanceDepth, is_suspect
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.cost import (
    ClusterNumbers,
    InstanceNumbers,
    admits,
    believed,
    decode_cost,
    prefill_cost,
)
from kvbm.catalog.routing.router import (
    HEARD_LATE_S,
    MOST_CALLERS,
    MOST_QUEUED,
    NOBODY_ELSE,
    CandidateNumbers,
    LentPrefix,
    Ranking,
    ReadingInstance,
    RoutingTask,
    SharedRoute,
)
from kvbm.config.settings import RoutingSettings
from kvbm.core.answers import MAX_INPUT_TOKENS, MAX_TOKENS, RankedInstance
from kvbm.core.ids import InstanceId, Tier
from kvbm.core.ties import tie_word
from kvbm.core.topology import ASSUMED_BLOCK_BYTES, TIER_LINKS
from kvbm.reference.peer_prices import PeerPrice, price_of_peers
from kvbm.reference.routed_blocks import Chain, RoutedBlocks

_MOST_RECENT = 1e15
_SAME_TIME_S = 0.05  # routes so close to each other are remembered as one
_REMEMBERED_ROUTES = 1024  # per instance; older ones cannot matter for long
_LOOK_S = 5.0  # between two looks at what is remembered of instances that are not asked for


class _Load(NamedTuple):
    """What an instance has to do, as its heartbeat and this caller's routes say.

    Attributes:
        tokens_per_s: what it prefills in a second.
        queueing_s: how long a prompt that comes now waits there.
        recent_s: what was routed there lately, decayed, in seconds of prefill.
        running_requests: that it decodes.
    """

    tokens_per_s: float
    queueing_s: float
    recent_s: float
    running_requests: int


class _Routed:
    """What one caller routed to one instance, as far as it still matters."""

    __slots__ = ("in_flight", "recent")

    def __init__(self) -> None:
        self.recent = 0.0  # tokens, decaying
        self.in_flight: list[tuple[float, int]] = []  # when, missing tokens; oldest first

    def add(self, now_s: float, load: int, missing: int) -> None:
        """A prompt was routed there."""
        self.recent = min(self.recent + load, _MOST_RECENT)
        if self.in_flight and now_s - self.in_flight[-1][0] < _SAME_TIME_S:
            self.in_flight[-1] = (self.in_flight[-1][0], self.in_flight[-1][1] + missing)
            return
        self.in_flight.append((now_s, missing))
        if len(self.in_flight) > _REMEMBERED_ROUTES:
            self.forget(self.in_flight[0][0])

    def forget(self, oldest_s: float) -> None:
        """What was routed up to then is in flight no longer."""
        gone = 0
        while gone < len(self.in_flight) and self.in_flight[gone][0] <= oldest_s:
            gone += 1
        if gone:
            del self.in_flight[:gone]


class _Caller:
    """What one caller routed."""

    def __init__(self) -> None:
        self.routed: dict[InstanceId, _Routed] = {}
        self.last_s: float | None = None

    def recent(self, instance: InstanceId) -> float:
        """Tokens routed to an instance, decaying."""
        routed = self.routed.get(instance)
        return routed.recent if routed is not None else 0.0

    def decay(self, now_s: float, half_life_s: float) -> None:
        """Let time pass."""
        if self.last_s is not None and now_s > self.last_s:
            factor = 2.0 ** (-(now_s - self.last_s) / half_life_s)
            for routed in self.routed.values():
                routed.recent *= factor
        self.last_s = now_s if self.last_s is None else max(now_s, self.last_s)

    def shrink(self, now_s: float, settings: RoutingSettings) -> None:
        """Drop what no longer matters."""
        self.decay(now_s, settings.half_life_s)
        for instance in list(self.routed):
            routed = self.routed[instance]
            routed.forget(now_s - settings.hold_s)
            if routed.recent < 1.0 and not routed.in_flight:
                del self.routed[instance]


class Candidates:
    """A set of instances.

    Who leaves it is replaced by the last, as in C++, so that sums over it are the same to the last bit.
    """

    def __init__(self) -> None:
        self.instances: list[InstanceId] = []
        self._at: dict[InstanceId, int] = {}

    def __len__(self) -> int:
        return len(self.instances)

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._at

    def add(self, instance: InstanceId) -> None:
        """See `Router.add`."""
        if instance not in self._at:
            self._at[instance] = len(self.instances)
            self.instances.append(instance)

    def remove(self, instance: InstanceId) -> None:
        """See `Router.remove`."""
        at = self._at.pop(instance, None)
        if at is not None:
            last = self.instances.pop()
            if last != instance:
                self.instances[at], self._at[last] = last, at


class ReferenceRouter:
    """See `routing.Router`."""

    def __init__(self, index: ClusterIndex, settings: RoutingSettings | None = None) -> None:
        self.settings = settings or RoutingSettings()
        self._index = index
        self._soon = RoutedBlocks(self.settings.hold_s)
        self._pulses: dict[InstanceId, LastHeartbeat] = {}
        self._readers: dict[InstanceId, ReadingInstance] = {}
        self._callers: OrderedDict[str, _Caller] = OrderedDict()  # who has asked last is last
        self._looked_s: float | None = None

    def hear(self, instance: InstanceId, pulse: LastHeartbeat) -> None:
        """See `Router`."""
        self._pulses[instance] = pulse

    def candidates(self) -> Candidates:
        """See `Router`."""
        return Candidates()

    def add(self, candidates: Candidates, instance: InstanceId) -> None:
        """See `Router`."""
        candidates.add(instance)

    def remove(self, candidates: Candidates, instance: InstanceId) -> None:
        """See `Router`."""
        candidates.remove(instance)

    def route(
        self,
        now_s: float,
        task: RoutingTask,
        serving: Sequence[Candidates],
        visible: Sequence[Candidates] | None,
        limit: int,
        noted: bool = True,
        elsewhere: CandidateNumbers | None = None,
        lent: LentPrefix | None = None,
    ) -> Ranking:
        """See `Router`."""
        if task.input_tokens > MAX_INPUT_TOKENS:
            task = task._replace(input_tokens=MAX_INPUT_TOKENS)
        caller = self._caller(now_s, task.caller, task.phase == "decode")
        chain = self._soon.chain(task.namespace, task.hashes)
        each = dict.fromkeys(instance for group in serving for instance in group.instances)
        wanted = [one for one in each if visible is None or any(one in group for group in visible)]
        others = elsewhere if elsewhere is not None and elsewhere.candidates else NOBODY_ELSE
        ranked, together = self._rank(now_s, task, caller, chain, wanted, others, lent)
        best = ranked[0] if ranked else None
        if noted and best is not None and best.admitted:
            routed = caller.routed.setdefault(InstanceId(best.instance), _Routed())
            routed.add(now_s, min(task.input_tokens, MAX_TOKENS), min(best.missing_tokens, MAX_TOKENS))
            self._soon.note(now_s, task.caller, best.instance, chain)
        return Ranking(ranked[:limit], max(0, len(ranked) - limit), together)

    def take(self, now_s: float, route: SharedRoute) -> bool:
        """See `Router`."""
        chain = self._soon.marked(route.namespace, route.first, route.blocks, route.hashes)
        if chain is None or route.instance not in self._pulses:
            return False
        caller = self._caller(now_s, route.caller, route.is_decode)
        routed = caller.routed.setdefault(route.instance, _Routed())
        routed.add(now_s, _bounded(route.input_tokens), _bounded(route.missing_tokens))
        self._soon.note(now_s, route.caller, route.instance, chain)
        return True

    def _rank(
        self,
        now_s: float,
        task: RoutingTask,
        caller: _Caller,
        chain: Chain,
        candidates: Sequence[InstanceId],
        elsewhere: CandidateNumbers,
        lent: LentPrefix | None,
    ) -> tuple[list[RankedInstance], CandidateNumbers]:
        if not candidates:
            return [], NOBODY_ELSE
        found = {depth.instance: depth for depth in self._index.prefixes(task.namespace, task.hashes).instances}
        held = [found[instance].depth if instance in found else 0 for instance in candidates]
        depths = self._soon.depths(now_s, task.caller, candidates, chain, held)
        depths = [
            depth if caller.recent(instance) > 0 else own
            for instance, depth, own in zip(candidates, depths, held, strict=True)
        ]
        loads = [self._load(now_s, task, caller, instance) for instance in candidates]
        recent_s = 0.0
        for load in loads:
            recent_s += load.recent_s
        together = CandidateNumbers(min(load.queueing_s for load in loads), recent_s, len(loads))
        cluster = ClusterNumbers(
            min(together.least_s, elsewhere.least_s) if elsewhere.candidates else together.least_s,
            (recent_s + elsewhere.recent_s) / (len(loads) + elsewhere.candidates),
        )
        ranked = [
            self._price(task, cluster, instance, depth, found.get(instance), load, lent)
            for instance, depth, load in zip(candidates, depths, loads, strict=True)
        ]
        ranked.sort(
            key=lambda entry: (
                not entry.admitted,
                entry.cost_s,
                caller.recent(InstanceId(entry.instance)),
                tie_word(entry.instance, task.hashes, entry.depth),
            )
        )
        return ranked, together

    def reads(self, instance: InstanceId, reader: ReadingInstance | None) -> None:
        """See `Router`."""
        if reader is None:
            self._readers.pop(instance, None)
        else:
            self._readers[instance] = reader

    def forget(self, instance: InstanceId) -> None:
        """See `Router`."""
        self._pulses.pop(instance, None)
        self._readers.pop(instance, None)
        for caller in self._callers.values():
            caller.routed.pop(instance, None)

    def _caller(self, now_s: float, name: str, is_decode: bool) -> _Caller:
        """What a caller has routed, as it counts now.

        Prompts that are only decoded load an instance otherwise than those that are prefilled.
        """
        name = f"{name}\0decode" if is_decode else name
        caller = self._callers.get(name)
        if caller is None:
            caller = self._callers[name] = _Caller()
            if len(self._callers) > MOST_CALLERS:
                self._callers.popitem(last=False)
        self._callers.move_to_end(name)
        caller.decay(now_s, self.settings.half_life_s)
        if self._looked_s is None or now_s >= self._looked_s + _LOOK_S:
            self._looked_s = now_s
            for other in self._callers.values():
                other.shrink(now_s, self.settings)
        return caller

    def _load(self, now_s: float, task: RoutingTask, caller: _Caller, instance: InstanceId) -> _Load:
        """What the instance has to do."""
        settings, pulse = self.settings, self._pulses.get(instance)
        expected = settings.prefill_tokens_per_s
        tokens_per_s = queue_tokens_per_s = expected
        running = 0
        if pulse is not None:
            tokens_per_s = believed(pulse.heartbeat.prefill_tokens_per_s, expected)
            queue_tokens_per_s = believed(pulse.heartbeat.queue_tokens_per_s, tokens_per_s)
            queue_tokens_per_s = believed(queue_tokens_per_s, expected)
            running = min(max(0, pulse.heartbeat.running_requests), MOST_QUEUED)
        routed = caller.routed.get(instance)
        queueing_s = self._queued(now_s, routed, pulse, queue_tokens_per_s) / queue_tokens_per_s
        if task.phase == "decode" and routed is not None:
            running += len(routed.in_flight)
        return _Load(tokens_per_s, queueing_s, caller.recent(instance) / tokens_per_s, running)

    def _price(
        self,
        task: RoutingTask,
        cluster: ClusterNumbers,
        instance: InstanceId,
        depth: int,
        held: InstanceDepth | None,
        load: _Load,
        lent: LentPrefix | None,
    ) -> RankedInstance:
        """The cost of serving there, where it has, or will soon have, `depth` blocks."""
        settings, is_decode = self.settings, task.phase == "decode"
        fetch_s, fetch_blocks = 0.0, 0
        if held is not None:
            for tier in (Tier.HOST, Tier.NVME, Tier.OBJECT):
                fetch_s += self._fetch_s(instance, tier, held.by_tier[tier])
                fetch_blocks += held.by_tier[tier]
        reach = max(depth, held.reach) if held is not None else depth
        beyond = self._beyond(task, instance, depth, reach, load, None if is_decode else lent)
        if beyond.end > depth:
            fetch_s += beyond.seconds
            fetch_blocks += beyond.end - depth
            depth = beyond.end
        missing = max(0, task.input_tokens - depth * task.block_tokens)
        if is_decode:  # what neither it nor its pools have is brought from where it was prefilled
            brought = -(-missing // task.block_tokens)
            fetch_s += self._brought_s(instance, brought)
            fetch_blocks, missing = fetch_blocks + brought, 0
        numbers = InstanceNumbers(load.queueing_s, load.tokens_per_s, missing, load.recent_s, fetch_s)
        if is_decode:
            cost = decode_cost(settings, cluster, numbers, load.running_requests)
        else:
            cost = prefill_cost(settings, cluster, numbers, task.latency)
        return RankedInstance(
            instance=instance,
            cost_s=cost.sum_s,
            queueing_s=cost.queueing_s,
            recompute_s=cost.recompute_s,
            balance_s=cost.balance_s,
            fetch_s=cost.fetch_s,
            ttft_s=cost.ttft_s,
            admitted=admits(settings, task.latency, task.deadline_s, cost.ttft_s, cluster.least_s),
            depth=depth,
            missing_tokens=missing,
            fetch_blocks=fetch_blocks,
            peer=beyond.peer,
            peer_blocks=beyond.peer_blocks,
            suspect=held.suspect if held is not None else is_suspect(self._index, instance),
        )

    def _beyond(
        self, task: RoutingTask, instance: InstanceId, depth: int, reach: int, load: _Load, lent: LentPrefix | None
    ) -> PeerPrice:
        """What it would read from peers and its object pool behind its own blocks, which it decides by its time
        alone.
        """
        reader = self._readers.get(instance)
        if lent is not None and reader is not None:
            objects, compute_s = TIER_LINKS[Tier.OBJECT], task.block_tokens / load.tokens_per_s
            priced = price_of_peers(lent, instance, reader, depth, reach, objects, compute_s)
            if priced is not None:
                return priced
        if reach > depth:
            pool_s = self._fetch_s(instance, Tier.OBJECT, reach - depth)
            if task.phase == "decode" or pool_s < (reach - depth) * task.block_tokens / load.tokens_per_s:
                return PeerPrice(reach, pool_s)
        return PeerPrice()

    def _queued(self, now_s: float, routed: _Routed | None, pulse: LastHeartbeat | None, rate: float) -> float:
        """Tokens that wait there: as its heartbeat reported, with what was routed since, less what it has worked off
        since.

        Nothing is worked off before it has come: an instance that was idle for a second is no further than one that has
        just fallen idle.
        """
        if routed is not None:
            routed.forget(now_s - self.settings.hold_s if pulse is None else pulse.at_s - HEARD_LATE_S)
        queued = float(min(max(0, pulse.heartbeat.queued_tokens), MOST_QUEUED)) if pulse is not None else 0.0
        at_s = pulse.at_s if pulse is not None else -math.inf
        for routed_s, missing in routed.in_flight if routed is not None else ():
            if routed_s > at_s:
                queued = max(0.0, queued - (routed_s - at_s) * rate)
                at_s = routed_s
            queued += missing
        return max(0.0, queued - (now_s - at_s) * rate)

    def _fetch_s(self, instance: InstanceId, tier: Tier, blocks: int) -> float:
        if not blocks:
            return 0.0
        size = blocks * self._block_bytes(instance, tier)
        weight: float = getattr(self.settings.tier_weights, tier.name.lower())
        return TIER_LINKS[tier].seconds(size) * weight

    def _brought_s(self, instance: InstanceId, blocks: int) -> float:
        """Bringing blocks from another instance: over what is as far as a pool all can reach."""
        return TIER_LINKS[Tier.OBJECT].seconds(blocks * self._block_bytes(instance, Tier.HBM)) if blocks else 0.0

    def _block_bytes(self, instance: InstanceId, tier: Tier) -> int:
        """As the instance's start says; what it does not say is assumed, for nothing is brought for nothing."""
        view = self._index.view(instance)
        pools = view.pools if view is not None else ()
        return next((pool.block_bytes for pool in pools if pool.tier == tier), 0) or ASSUMED_BLOCK_BYTES


def _bounded(tokens: int) -> int:
    return min(max(0, tokens), MAX_TOKENS)
