"""Ways of routing that are compared in virtual time: ours, random, a one-line baseline, and what others have published.

A policy is told a request and all instances, and gives the index of one. All but ours see the instances as they are at
that very moment; ours sees a heartbeat a second and what it has routed itself, as in service.

Sources, written anew from their documents:

- `dynamo`: NVIDIA Dynamo, "Routing Concepts" (docs.nvidia.com/dynamo/components/router/routing-concepts): the least
  `overlap_score_weight * prefill_blocks + decode_blocks`, weight 1 and temperature 0 as shipped.
- `llm-d`: llm-d inference scheduler, docs/architecture.md, and its guide to precise prefix cache routing: the highest
  weighted sum of prefix-cache-scorer (3), kv-cache-utilization-scorer (2) and queue-scorer (2), at random among equals.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from kvbm.bench.virtual_time.instance_model import InstanceModel, WorkloadRequest
from kvbm.catalog.index.cluster_index import ClusterIndex, InstanceDepth, InstanceView, Prefixes
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.router import RoutingTask
from kvbm.config import RoutingSettings
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Tier
from kvbm.core.topology import ASSUMED_BLOCK_BYTES
from kvbm.reference.router import ReferenceRouter
from kvbm.streams.base import Heartbeat
from kvbm.workload.trace import TRACE_BLOCK_TOKENS

HEARTBEAT_S = 1.0
BASELINE_WEIGHT = 8.0
PREFIX_WEIGHT, QUEUE_WEIGHT, UTILIZATION_WEIGHT = 3.0, 2.0, 2.0
BLOCK_BYTES = ASSUMED_BLOCK_BYTES * TRACE_BLOCK_TOKENS // 16  # of a model with 8 billion parameters
_SPACE = Namespace(model="trace", block_tokens=TRACE_BLOCK_TOKENS).id


class Policy(Protocol):
    """Chooses who serves a request."""

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        """The index of an instance."""


def least(costs: Sequence[float], rng: random.Random) -> int:
    """The index of the smallest number, at random among equals."""
    best = min(costs)
    return rng.choice([index for index, cost in enumerate(costs) if cost == best])


class RandomPolicy:
    """Anybody."""

    def __init__(self, instances: Sequence[InstanceModel], rng: random.Random) -> None:
        self._instances, self._rng = instances, rng

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        return least([0.0 if not instance.is_drained else math.inf for instance in self._instances], self._rng)


class PrefixAndLoad:
    """The one-line baseline: 8 x missing blocks + queued blocks."""

    def __init__(self, instances: Sequence[InstanceModel], rng: random.Random) -> None:
        self._instances, self._rng = instances, rng

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        return least([self._cost(now_s, request, instance) for instance in self._instances], self._rng)

    def _cost(self, now_s: float, request: WorkloadRequest, instance: InstanceModel) -> float:
        if instance.is_drained:
            return math.inf
        missing = len(request.blocks) - instance.depth(request.blocks)
        return BASELINE_WEIGHT * missing + instance.queued_tokens(now_s) / TRACE_BLOCK_TOKENS


class DynamoCost:
    """Dynamo's published cost: blocks to prefill, of all requests without a first token, and blocks in decode, with the
    new request.
    """

    def __init__(self, instances: Sequence[InstanceModel], rng: random.Random) -> None:
        self._instances, self._rng = instances, rng

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        return least([self._cost(request, instance) for instance in self._instances], self._rng)

    def _cost(self, request: WorkloadRequest, instance: InstanceModel) -> float:
        if instance.is_drained:
            return math.inf
        missing = request.input_tokens - instance.depth(request.blocks) * TRACE_BLOCK_TOKENS
        prefill_blocks = (instance.assigned_tokens + missing) / TRACE_BLOCK_TOKENS
        decode_blocks = len(instance.active) + sum(block not in instance.active for block in request.blocks)
        return prefill_blocks + decode_blocks


class LlmdScore:
    """llm-d's published scorers, weighed as in its guide."""

    def __init__(self, instances: Sequence[InstanceModel], rng: random.Random) -> None:
        self._instances, self._rng = instances, rng

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        queues = [len(instance.queue) for instance in self._instances if not instance.is_drained]
        shortest, longest = min(queues), max(queues)
        costs = []
        for instance in self._instances:
            if instance.is_drained:
                costs.append(math.inf)
                continue
            queue = len(instance.queue)
            prefix = instance.depth(request.blocks) / max(1, len(request.blocks))
            short = (longest - queue) / (longest - shortest) if longest > shortest else 1.0
            costs.append(
                -PREFIX_WEIGHT * prefix - QUEUE_WEIGHT * short - UTILIZATION_WEIGHT * (1.0 - instance.pool.used)
            )
        return least(costs, self._rng)


class PoolsIndex:
    """As much of `ClusterIndex` as routing asks, over pools in this process; of the request it was told last."""

    def __init__(self, names: Sequence[InstanceId], instances: Sequence[InstanceModel]) -> None:
        self._instances = dict(zip(names, instances, strict=True))
        self._views = {name: _view(instance) for name, instance in self._instances.items()}
        self.request: WorkloadRequest | None = None

    def prefixes(self, namespace: NamespaceId, hashes: bytes) -> Prefixes:
        """Who has how much of that request's prompt."""
        assert self.request is not None
        blocks = self.request.blocks
        found = []
        for name, instance in self._instances.items():
            held = instance.held(blocks) if instance.colder else [Tier.HBM] * instance.pool.depth(blocks)
            depth = reach = len(held)
            if (objects := instance.colder.get(Tier.OBJECT)) is not None:
                reach = next((at for at in range(depth, len(blocks)) if blocks[at] not in objects), len(blocks))
            if reach:
                by_tier = (held.count(Tier.HBM), held.count(Tier.HOST), held.count(Tier.NVME), 0)
                found.append(InstanceDepth(name, depth, by_tier, reach, False))
        return Prefixes(max((one.depth for one in found), default=0), found, [])

    def view(self, instance: InstanceId) -> InstanceView | None:
        """How large blocks are, where there are tiers to read from; else nothing."""
        return self._views[instance]


def _view(instance: InstanceModel) -> InstanceView | None:
    if not instance.colder:
        return None
    pools = tuple(PoolStated(tier, pool.slots, BLOCK_BYTES) for tier, pool in instance.colder.items())
    return InstanceView(Epoch(1), False, False, False, 0, pools, {}, False, False, False)


class KvbmRouting:
    """The catalog's router itself, which hears every instance once a second."""

    def __init__(
        self, instances: Sequence[InstanceModel], rng: random.Random, settings: RoutingSettings | None = None
    ) -> None:
        self._instances = instances
        self._names = [InstanceId(f"sim-{number}") for number in range(len(instances))]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._index = PoolsIndex(self._names, instances)
        self._router = ReferenceRouter(cast(ClusterIndex, self._index), settings)
        self._candidates = self._router.candidates()
        for name in self._names:
            self._router.add(self._candidates, name)
        self._next_s = [HEARTBEAT_S * number / len(instances) for number in range(len(instances))]

    def next_heartbeat_s(self) -> float:
        """When the next one is due."""
        return min(self._next_s)

    def hear(self, now_s: float) -> None:
        """Heartbeats that are due now; an instance that is drained is routed to no more once it has said so."""
        for number, due_s in enumerate(self._next_s):
            if due_s <= now_s:
                if self._instances[number].is_drained and self._names[number] in self._candidates:
                    self._router.remove(self._candidates, self._names[number])
                self._router.hear(self._names[number], LastHeartbeat(self._heartbeat(now_s, number), now_s))
                self._next_s[number] += HEARTBEAT_S

    def _heartbeat(self, now_s: float, number: int) -> Heartbeat:
        instance = self._instances[number]
        return Heartbeat(
            instance=self._names[number],
            cluster="sim",
            epoch=Epoch(1),
            published=Offset(0),
            wall_time_ns=0,
            queued_tokens=round(instance.queued_tokens(now_s)),
            running_requests=instance.running,
            prefill_tokens_per_s=instance.meter.prefill_tokens_per_s,
            queue_tokens_per_s=instance.meter.queue_tokens_per_s,
        )

    def choose(self, now_s: float, request: WorkloadRequest) -> int:
        self._index.request = request
        task = RoutingTask(_SPACE, request.hashes, request.input_tokens, TRACE_BLOCK_TOKENS)
        ranking = self._router.route(now_s, task, [self._candidates], None, 1)
        return self._numbers[InstanceId(ranking.best[0].instance)]


POLICIES: dict[str, Callable[[Sequence[InstanceModel], random.Random], Policy]] = {
    "kvbm": KvbmRouting,
    "random": RandomPolicy,
    "prefix+load": PrefixAndLoad,
    "dynamo": DynamoCost,
    "llm-d": LlmdScore,
}
