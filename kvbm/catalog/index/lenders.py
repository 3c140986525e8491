"""Which live instances lend their blocks, and which of them could be read from for some blocks: the nearest first.

Who lends says so in its heartbeats. A question is answered by one or two walks of the index: one for the deepest of
all, and where there are more than it names, another that looks at the nearest lenders alone. So what is rare is found
wherever it is, and what many have is found near.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from kvbm.catalog.index.cluster_index import ClusterIndex, InstanceDepth
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.answers import PeerHolding
from kvbm.core.ids import InstanceId, NamespaceId, Tier
from kvbm.core.peer_address import HOST_ALONE, PeerAddress, address_of, nearest_and_deepest
from kvbm.core.topology import distance
from kvbm.safe_log import RateLimitedLog

LOOKED_AT = 256  # instances a walk names
_NEAR_KEPT = 128  # places whose nearest lenders are remembered
_LENT = (Tier.HOST, Tier.NVME)

Place = tuple[str, ...]


class WantedPeers(NamedTuple):
    """What is asked for.

    Attributes:
        hashes: packed, from the first block that is wanted on.
        asker: who asks, which is no answer. topology: where it stands, outermost first.
        limit: at most so many.
        only: instances to look at; None for all. Of these, who lends is named even where it holds no block: blocks that
            are on their way to it can be asked for there.
    """

    namespace: NamespaceId
    hashes: bytes
    asker: str
    topology: Sequence[str]
    limit: int
    only: Collection[InstanceId] | None = None


class Living(Protocol):
    """Who is alive; `Liveness` is one."""

    def is_live(self, instance: InstanceId) -> bool:
        """Whether an instance is heard and serves."""


class Lenders:
    """See the module. One thread.

    Args:
        place_of: where an instance stands, outermost first.
    """

    def __init__(self, liveness: Living, place_of: Callable[[InstanceId], Place]) -> None:
        self._liveness, self._place_of = liveness, place_of
        self._words: dict[InstanceId, dict[str, str]] = {}  # as the last heartbeat has them
        self._known: dict[InstanceId, tuple[PeerAddress, Place]] = {}
        self._near: dict[Place, list[InstanceId]] = {}
        self._limited_log = RateLimitedLog(most=20)  # a heartbeat may name another place each time

    def hear(self, instance: InstanceId, last: LastHeartbeat) -> None:
        """Take note of a heartbeat that is believed."""
        heartbeat = last.heartbeat
        words = {} if heartbeat.stopping else heartbeat.lends
        if not words and instance not in self._words:
            return
        known = self._known.get(instance)
        if self._words.get(instance) == words and (known is None or known[1] == self._place_of(instance)):
            return
        self.forget(instance)
        if not words:
            return
        self._words[instance] = words
        if (address := address_of(words)) is None:
            self._limited_log.warn(
                "lender.refused", instance=instance, notice="its heartbeat names no socket that could be read from"
            )
            return
        self._known[instance] = (address, self._place_of(instance))
        self._near.clear()

    def forget(self, instance: InstanceId) -> None:
        """It lends nothing any more, as far as is known."""
        self._words.pop(instance, None)
        if self._known.pop(instance, None) is not None:
            self._near.clear()

    def known(self, instance: InstanceId) -> tuple[PeerAddress, Place, bool] | None:
        """Where an instance lends, where it stands, and whether it lends HOST alone; None: it lends nothing."""
        known = self._known.get(instance)
        return None if known is None else (*known, HOST_ALONE.items() <= self._words[instance].items())

    def find(
        self, index: ClusterIndex, wanted: WantedPeers, may_know: Callable[[InstanceId], bool]
    ) -> list[PeerHolding]:
        """Live instances that lend blocks, from the first that is wanted on: nearest first, and the one with the most
        of them in any case.

        Args:
            may_know: whether who asks may know of an instance.
        """
        if not wanted.hashes or not self._known:
            return []
        only = None if wanted.only is None else list(wanted.only)
        found = index.prefixes(wanted.namespace, wanted.hashes, LOOKED_AT, only, Tier.HOST)
        holders = {one.instance: one for one in found.instances}
        if found.more:
            near = self._nearest(tuple(wanted.topology))
            near = near if only is None else [one for one in near if one in set(only)]
            again = index.prefixes(wanted.namespace, wanted.hashes, 0, near[:LOOKED_AT], Tier.HOST)
            holders |= {one.instance: one for one in again.instances}
        named = set(only or ())
        lacking = {one for one in named if one not in holders or (one in self._known and not self._lends(holders[one]))}
        holders |= {one: InstanceDepth(one, 0, (0, 0, 0, 0), 0, False) for one in lacking}
        peers = [
            self._holding(one, wanted.topology)
            for name, one in holders.items()
            if (one.depth or name in named)
            and name != wanted.asker
            and name in self._known
            and self._lends(one)
            and self._liveness.is_live(name)
            and may_know(name)
        ]
        return nearest_and_deepest(peers, wanted.limit)

    def _lends(self, one: InstanceDepth) -> bool:
        """Whether it lends what it holds.

        Who lends HOST alone is named only where all of it lies there: which block does not is not known here.
        """
        return not (HOST_ALONE.items() <= self._words[one.instance].items() and one.by_tier[Tier.NVME])

    def _holding(self, one: InstanceDepth, topology: Sequence[str]) -> PeerHolding:
        address, place = self._known[one.instance]
        return PeerHolding(
            instance=one.instance,
            depth=one.depth,
            tiers={tier.name: one.by_tier[tier] for tier in _LENT if one.by_tier[tier]},
            distance=distance(topology, place),
            suspect=one.suspect,
            lends=address.words(),
        )

    def _nearest(self, place: Place) -> list[InstanceId]:
        """Those that lend, nearest first; equals in an order of each place's own, so that not all ask the same."""
        near = self._near.get(place)
        if near is None:
            if len(self._near) >= _NEAR_KEPT:
                self._near.clear()
            salt = "/".join(place)
            near = self._near[place] = sorted(
                self._known,
                key=lambda one: (distance(place, self._known[one][1]), zlib.crc32(f"{salt} {one}".encode())),
            )
        return near
