"""Which instance should serve a prompt: the least cost, in seconds, of waiting, computing, balance and fetching.

With P the tokens an instance prefills a second, and W the weight of work that its owner could have been spared:

    queueing_s   what waits there now / P
    recompute_s  W * missing tokens / P
    balance_s    W * (input tokens / P) * (its share of what was routed lately against the mean's)
    fetch_s      bringing what is held elsewhere than in HBM to HBM

Measured on the conversation trace and on synthetic shared prompts: without the balance term everything that shares a system
prompt ends on one instance when arrivals are sparse.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvbm.catalog.index import ClusterIndex, InstanceDepth, is_suspect
from kvbm.catalog.liveness import LastHeartbeat
from kvbm.core.answers import RankedInstance
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, SequenceHash, Tier
from kvbm.core.topology import TIER_LINKS

_REMEMBERED_ROUTES = 4096  # per instance; older ones cannot matter for long


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the cost is made of; the defaults won a sweep over a recorded trace.

    Attributes:
        work_weight: W.
        half_life_s: after this long a routed token counts half for balance.
        prior_s: seconds of prefill added to the mean, so that a quiet cluster is not balanced over trifles.
        hold_s: for this long after a route its blocks count as soon to be held.
        prefill_tokens_per_s: P.
        prefill_by_instance: P of instances that differ.
        tier_weights: factors on the fetch cost from each tier, by name; 1 when absent.
    """

    work_weight: float = 8.0
    half_life_s: float = 300.0
    prior_s: float = 10.0
    hold_s: float = 30.0
    prefill_tokens_per_s: float = 10_000.0
    prefill_by_instance: dict[str, float] = {}
    tier_weights: dict[str, float] = {}


class RoutingTask(NamedTuple):
    """One prompt to route.

    Attributes:
        hashes: packed, of its full blocks.
        input_tokens: of the whole prompt.
        block_tokens: tokens of one block, at least 1.
    """

    namespace: NamespaceId
    hashes: bytes
    input_tokens: int
    block_tokens: int


class _Routed:
    """What was routed to one instance, as far as it still matters."""

    def __init__(self) -> None:
        self.recent = 0.0  # tokens, decaying
        self.soon: dict[bytes, float] = {}  # namespace + hash → when it was routed; oldest first
        self.in_flight: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED_ROUTES)  # when, missing tokens


class Router:
    """Ranks instances for prompts, and remembers its routes. Soft state only: it may be lost at any time."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self.settings = settings or RoutingSettings()
        self._routed: dict[InstanceId, _Routed] = {}
        self._last_s: float | None = None

    def route(
        self,
        now_s: float,
        task: RoutingTask,
        index: ClusterIndex,
        candidates: Sequence[InstanceId],
        pulses: Mapping[InstanceId, LastHeartbeat | None],
    ) -> list[RankedInstance]:
        """Rank the candidates, best first, and note the best as chosen.

        Args:
            now_s: on the clock of the pulses.
            candidates: at least one.
        """
        ranked = self.rank(now_s, task, index, candidates, pulses)
        best = ranked[0]
        routed = self._routed[InstanceId(best.instance)]
        routed.recent += task.input_tokens
        routed.in_flight.append((now_s, best.missing_tokens))
        for at in range(0, len(task.hashes), HASH_BYTES):
            key = task.namespace + task.hashes[at : at + HASH_BYTES]
            routed.soon.pop(key, None)
            routed.soon[key] = now_s
        return ranked

    def rank(
        self,
        now_s: float,
        task: RoutingTask,
        index: ClusterIndex,
        candidates: Sequence[InstanceId],
        pulses: Mapping[InstanceId, LastHeartbeat | None],
    ) -> list[RankedInstance]:
        """Rank the candidates, best first."""
        self._decay(now_s)
        for instance in candidates:
            self._routed.setdefault(instance, _Routed())
        depths = {depth.instance: depth for depth in index.prefixes(task.namespace, task.hashes).instances}
        mean = sum(self._routed[instance].recent for instance in candidates) / len(candidates)
        ranked = [
            self._price(now_s, task, index, instance, depths.get(instance), pulses.get(instance), mean)
            for instance in candidates
        ]
        ties: dict[str, bytes] = {}
        if len({(entry.cost_s, self._routed[InstanceId(entry.instance)].recent) for entry in ranked}) < len(ranked):
            ties = {entry.instance: _tie(task, entry) for entry in ranked}
        ranked.sort(
            key=lambda entry: (
                entry.cost_s, self._routed[InstanceId(entry.instance)].recent, ties.get(entry.instance, b""),
            )
        )  # fmt: skip
        return ranked

    def forget(self, instance: InstanceId) -> None:
        """Nothing was routed to the instance."""
        self._routed.pop(instance, None)

    def _price(
        self,
        now_s: float,
        task: RoutingTask,
        index: ClusterIndex,
        instance: InstanceId,
        held: InstanceDepth | None,
        pulse: LastHeartbeat | None,
        mean: float,
    ) -> RankedInstance:
        settings, routed = self.settings, self._routed[instance]
        rate = settings.prefill_by_instance.get(instance, settings.prefill_tokens_per_s)
        own = held.depth if held is not None else 0
        depth = self._soon_depth(routed, task, own)
        fetch_s, fetch_blocks = 0.0, 0
        if held is not None:
            for tier in (Tier.HOST, Tier.NVME, Tier.OBJECT):
                fetch_s += self._fetch_s(index, instance, tier, held.by_tier[tier])
                fetch_blocks += held.by_tier[tier]
            beyond = held.reach - depth
            if beyond > 0:
                pool_s = self._fetch_s(index, instance, Tier.OBJECT, beyond)
                if pool_s < settings.work_weight * beyond * task.block_tokens / rate:
                    fetch_s += pool_s
                    fetch_blocks += beyond
                    depth = held.reach
        missing = max(0, task.input_tokens - depth * task.block_tokens)
        queueing_s = self._queued(now_s, routed, pulse, rate) / rate
        recompute_s = settings.work_weight * missing / rate
        share = (routed.recent - mean) / (mean + settings.prior_s * rate)
        balance_s = settings.work_weight * (task.input_tokens / rate) * share
        return RankedInstance(
            instance=instance,
            cost_s=queueing_s + recompute_s + balance_s + fetch_s,
            queueing_s=queueing_s,
            recompute_s=recompute_s,
            balance_s=balance_s,
            fetch_s=fetch_s,
            depth=depth,
            missing_tokens=missing,
            fetch_blocks=fetch_blocks,
            suspect=held.suspect if held is not None else is_suspect(index, instance),
        )

    def _soon_depth(self, routed: _Routed, task: RoutingTask, depth: int) -> int:
        """The depth with what was routed there lately and will be held soon."""
        if routed.soon:
            blocks = len(task.hashes) // HASH_BYTES
            while depth < blocks:
                at = depth * HASH_BYTES
                if task.namespace + task.hashes[at : at + HASH_BYTES] not in routed.soon:
                    break
                depth += 1
        return depth

    def _queued(self, now_s: float, routed: _Routed, pulse: LastHeartbeat | None, rate: float) -> float:
        """Tokens that wait there: as its heartbeat reported, with what was routed since, less what was worked off since."""
        in_flight = routed.in_flight
        oldest_s = now_s - self.settings.hold_s if pulse is None else pulse.at_s
        while in_flight and in_flight[0][0] <= oldest_s:
            in_flight.popleft()
        since_s = pulse.at_s if pulse is not None else in_flight[0][0] if in_flight else now_s
        reported = pulse.heartbeat.queued_tokens if pulse is not None else 0
        return max(0.0, reported + sum(tokens for _, tokens in in_flight) - (now_s - since_s) * rate)

    def _fetch_s(self, index: ClusterIndex, instance: InstanceId, tier: Tier, blocks: int) -> float:
        if not blocks:
            return 0.0
        view = index.view(instance)
        block_bytes = next((pool.block_bytes for pool in view.pools if pool.tier == tier), 0) if view is not None else 0
        return TIER_LINKS[tier].seconds(blocks * block_bytes) * self.settings.tier_weights.get(tier.name, 1.0)

    def _decay(self, now_s: float) -> None:
        if self._last_s is not None and now_s > self._last_s:
            factor = 2.0 ** (-(now_s - self._last_s) / self.settings.half_life_s)
            for routed in self._routed.values():
                routed.recent *= factor
                while routed.soon and now_s - (oldest := next(iter(routed.soon.items())))[1] >= self.settings.hold_s:
                    del routed.soon[oldest[0]]
        self._last_s = now_s if self._last_s is None else max(now_s, self._last_s)


def _tie(task: RoutingTask, entry: RankedInstance) -> bytes:
    """Equal costs are decided by content: the same prompt goes to the same instance, different ones spread."""
    first = entry.depth * HASH_BYTES if entry.depth * HASH_BYTES < len(task.hashes) else 0
    block = SequenceHash(task.hashes[first : first + HASH_BYTES])
    return hashlib.blake2b(block + entry.instance.encode(), digest_size=8).digest()
