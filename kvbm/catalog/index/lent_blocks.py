"""What a route is told of blocks that instances lend: who lends which run of the prompt, and what reading it costs.

The index knows which instances lend, and the router which of them read; both are told when heartbeats say so. While
nobody lends, a route costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvbm.catalog.index.cluster_index import ClusterIndex
from kvbm.catalog.index.lenders import Lenders, Living, Place
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.peer_links import PeerLinks
from kvbm.catalog.routing.router import LentPrefix, ReadingInstance
from kvbm.core.answers import MAX_HASHES, MAX_LABEL, MAX_LABELS, MOST_LENT, LentRun
from kvbm.core.events import PoolStated
from kvbm.core.ids import InstanceId, NamespaceId, Tier
from kvbm.core.peer_address import PeerAddress

_LOOKED_AT = 4 * MOST_LENT  # some are dead, or nobody's business
_MOST_BLOCK_BYTES = 1 << 40
_HOST_BIT, _NVME_BIT = 1 << Tier.HOST, 1 << Tier.NVME


def reader_of(address: PeerAddress, place: Place, pools: Sequence[PoolStated]) -> ReadingInstance:
    """An instance that lends, as one that reads: it does both in the same ways.

    Args:
        pools: as its start declares them.
    """
    sizes = {pool.tier: pool.block_bytes for pool in pools}
    size = sizes.get(Tier.HBM, 0) or sizes.get(Tier.HOST, 0)
    labels = tuple(label[:MAX_LABEL] for label in place[:MAX_LABELS])
    return ReadingInstance(
        labels, address.host_id if address.unix else "", bool(address.tcp), min(size, _MOST_BLOCK_BYTES)
    )


class LentBlocks:
    """See the module. One thread.

    Args:
        tell_router: that an instance reads so, or not any more.
        lenders: has heard each heartbeat before this one hears it.
        pools_of: the pools that an instance's start has declared.
        is_part: the catalog follows some instances only: blocks that none of them holds may be held by others.
    """

    def __init__(
        self,
        index: ClusterIndex,
        tell_router: Callable[[InstanceId, ReadingInstance | None], object],
        liveness: Living,
        lenders: Lenders,
        pools_of: Callable[[InstanceId], Sequence[PoolStated]],
        is_part: bool,
    ) -> None:
        self._index, self._tell_router, self._liveness, self._lenders = index, tell_router, liveness, lenders
        self._pools_of, self._is_part = pools_of, is_part
        self.links = PeerLinks()
        self._readers: dict[InstanceId, ReadingInstance] = {}

    def hear(self, instance: InstanceId, last: LastHeartbeat) -> None:
        """Take note of a heartbeat that is believed."""
        known = self._lenders.known(instance)
        if known is None:
            if instance in self._readers:
                self.forget(instance)
            return
        address, place, is_host_alone = known
        self._index.report_lent_tiers(instance, _HOST_BIT if is_host_alone else _HOST_BIT | _NVME_BIT)
        reader = reader_of(address, place, self._pools_of(instance))
        if self._readers.get(instance) != reader:
            self._readers[instance] = reader
            self._tell_router(instance, reader)

    def forget(self, instance: InstanceId) -> None:
        """It lends nothing any more, as far as is known, and reads nothing."""
        if self._readers.pop(instance, None) is not None:
            self._index.report_lent_tiers(instance, 0)
            self._tell_router(instance, None)

    def runs(self, namespace: NamespaceId, hashes: bytes, may_know: Callable[[InstanceId], bool]) -> list[LentRun]:
        """What this catalog's own instances lend of a prompt, the deepest first.

        Args:
            may_know: whether who asks may know of an instance.
        """
        if not self._readers or not hashes:
            return []
        runs: list[LentRun] = []
        for name, begin, end in self._index.lent(namespace, hashes, _LOOKED_AT, self._is_part):
            reader = self._readers.get(name)
            if reader is not None and self._liveness.is_live(name) and may_know(name):
                runs.append(
                    LentRun(instance=name, begin=begin, end=end, place=reader.place, host=reader.host, tcp=reader.tcp)
                )
        return runs[:MOST_LENT]

    def priced(
        self, now_s: float, own: Sequence[LentRun], elsewhere: Sequence[LentRun] = (), blocks: int = MAX_HASHES
    ) -> LentPrefix | None:
        """By what candidates are priced; None: nothing is lent, or nobody reads.

        Args:
            own: as of `runs`. elsewhere: what other catalogs' instances are said to lend of the prompt. blocks: of the
                prompt.
        """
        if not self._readers or not (own or elsewhere):
            return None
        found = own
        if elsewhere:
            named = {run.instance for run in own}
            others = [run for run in elsewhere if run.instance not in named and run.begin < run.end <= blocks]
            found = deepest_first([*own, *others])
        return LentPrefix(found, *self.links.table(now_s))


def deepest_first(runs: Iterable[LentRun]) -> list[LentRun]:
    """The deepest, of equals those that begin first, then by name."""
    return sorted(runs, key=lambda run: (-run.end, run.begin, run.instance))[:MOST_LENT]
