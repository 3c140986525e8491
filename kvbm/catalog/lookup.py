"""What of the cluster an answer may speak of: instances that are alive, and how much of a prefix each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from kvbm.catalog.index import ClusterIndex, is_doubtful
from kvbm.core.answers import BlockAnswer, BlockHolder, InstanceHolding, LookupAnswer, PoolHolding
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, SequenceHash, Tier
from kvbm.streams.base import Heartbeat

LIVENESS_S = 4.0


class Liveness(Enum):
    """What is known of an instance's life."""

    LIVE = "live"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SILENT = "silent"
    UNHEARD = "unheard"


class Pulse(NamedTuple):
    """An instance's last heartbeat, and when it came."""

    heartbeat: Heartbeat
    at_s: float


class Pulses:
    """The last heartbeat of every instance. `now_s` is the same clock everywhere.

    Args:
        liveness_s: an instance not heard for this long is silent. When all are silent the view is kept: then it is more
            likely that nothing arrives here than that everybody died at once.
    """

    def __init__(self, index: ClusterIndex, liveness_s: float = LIVENESS_S) -> None:
        self._index = index
        self._liveness_s = liveness_s
        self._pulses: dict[InstanceId, Pulse] = {}

    def hear(self, now_s: float, heartbeat: Heartbeat) -> None:
        """Take note of a heartbeat; one of an older epoch than the last is ignored."""
        last = self._pulses.get(heartbeat.instance)
        if last is None or heartbeat.epoch >= last.heartbeat.epoch:
            self._pulses[heartbeat.instance] = Pulse(heartbeat, now_s)

    def last(self, instance: InstanceId) -> Pulse | None:
        """The last heartbeat of an instance."""
        return self._pulses.get(instance)

    def instances(self) -> set[InstanceId]:
        """Everyone heard of, by heartbeat or events."""
        return {*self._pulses, *self._index.instances()}

    def liveness(self, now_s: float, instance: InstanceId) -> Liveness:
        """What is known of one instance. A start of a newer epoch than the heartbeat's outweighs it."""
        view, pulse = self._index.view(instance), self._pulses.get(instance)
        if view is not None and view.stopped and (pulse is None or pulse.heartbeat.epoch <= view.epoch):
            return Liveness.STOPPED
        if pulse is None:
            return Liveness.UNHEARD
        if now_s - pulse.at_s >= self._liveness_s:
            return Liveness.SILENT
        if pulse.heartbeat.stopping and (view is None or pulse.heartbeat.epoch >= view.epoch):
            return Liveness.STOPPING
        return Liveness.LIVE

    def withheld(self, now_s: float) -> set[InstanceId]:
        """Instances whose residencies are left out of answers: stopped, or silent while others are heard."""
        states = {instance: self.liveness(now_s, instance) for instance in self.instances()}
        hidden = {Liveness.STOPPED}
        if Liveness.LIVE in states.values():
            hidden.add(Liveness.SILENT)
        return {instance for instance, state in states.items() if state in hidden}

    def candidates(self, now_s: float) -> list[InstanceId]:
        """Instances a prompt may be routed to: the live ones; when nobody is heard, those known and not stopped."""
        states = {instance: self.liveness(now_s, instance) for instance in sorted(self.instances())}
        live = [instance for instance, state in states.items() if state is Liveness.LIVE]
        if live or Liveness.STOPPING in states.values():
            return live
        return [instance for instance, state in states.items() if state in (Liveness.SILENT, Liveness.UNHEARD)]


def lookup(index: ClusterIndex, namespace: NamespaceId, hashes: bytes, withheld: Iterable[InstanceId]) -> LookupAnswer:
    """Who has how much of a prefix, deepest first.

    Args:
        hashes: packed, in prompt order.
        withheld: instances to leave out.
    """
    found = index.prefixes(namespace, hashes)
    hidden = set(withheld)
    instances = [
        InstanceHolding(
            instance=entry.instance,
            depth=entry.depth,
            tiers={tier.name: entry.by_tier[tier] for tier in Tier if entry.by_tier[tier]},
            reach=entry.reach,
            doubtful=entry.doubtful,
        )
        for entry in found.instances
        if entry.instance not in hidden
    ]
    pools = [PoolHolding(pool=entry.pool, depth=entry.depth) for entry in found.pools]
    return LookupAnswer(
        namespace=namespace.hex(),
        blocks=len(hashes) // HASH_BYTES,
        deepest=max([entry.depth for entry in instances] + [entry.depth for entry in pools], default=0),
        instances=sorted(instances, key=lambda entry: (-entry.depth, -entry.reach, entry.instance)),
        pools=sorted(pools, key=lambda entry: (-entry.depth, entry.pool)),
        withheld=sorted(entry.instance for entry in found.instances if entry.instance in hidden),
    )


def locate(
    index: ClusterIndex, namespace: NamespaceId, block: SequenceHash, is_withheld: Callable[[InstanceId], bool]
) -> BlockAnswer:
    """Who holds one block."""
    holders = [
        BlockHolder(
            name=holder.name,
            kind="pool" if holder.is_pool else "instance",
            tier=holder.tier.name,
            doubtful=not holder.is_pool and is_doubtful(index, InstanceId(holder.name)),
        )
        for holder in index.holders(namespace, block)
        if holder.is_pool or not is_withheld(InstanceId(holder.name))
    ]
    return BlockAnswer(namespace=namespace.hex(), hash=block.hex(), holders=holders)
