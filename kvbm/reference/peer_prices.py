"""What a candidate of a route would read from other instances, and how long that takes: readable twin of
`native/src/peer_prices.cpp`.

It is decided as the instance itself will decide it, by `core.fetching`: by its own time, whatever others wait for.
"""

from __future__ import annotations

from typing import NamedTuple

from kvbm.catalog.routing.router import LentPrefix, PeerLink, ReadingInstance
from kvbm.catalog.routing.transfers import MOST_DISTANCE
from kvbm.core.answers import MAX_PEERS, LentRun
from kvbm.core.fetching import LOT_BLOCKS, FetchSource, least_times, quickest
from kvbm.core.ids import InstanceId
from kvbm.core.topology import Link, distance

_LOTS = 16  # that a price looks at: those of a long prompt are larger


class PeerPrice(NamedTuple):
    """What is read of a prompt, and from whom.

    Attributes:
        end: behind the last block that is read; 0: none is.
        seconds: until all are there.
        peer_blocks: that come from peers. peer: the one most of them come from, the nearest of equals.
    """

    end: int = 0
    seconds: float = 0.0
    peer_blocks: int = 0
    peer: str = ""


class Usable(NamedTuple):
    """Who could be read from, in the order of preference."""

    is_tcp: bool
    apart: int
    before: int  # -end
    at: int  # in `LentPrefix.runs`


def price_of_peers(
    lent: LentPrefix,
    instance: InstanceId,
    reader: ReadingInstance,
    depth: int,
    reach: int,
    objects: Link,
    block_compute_s: float,
) -> PeerPrice | None:
    """What a candidate would read; None: nobody lends what it needs.

    Args:
        depth: blocks it has. reach: where its run ends with its object pool.
        objects: what reading from that costs.
    """
    if reader.block_bytes <= 0:
        return None
    usable = _chosen(lent, instance, reader, depth)
    if not usable:
        return None
    sources = [_source(lent, one) for one in usable]
    if reach > depth:
        sources.append(FetchSource(reach, objects))
    longest = max(one.end for one in sources)
    lot = max(LOT_BLOCKS, -(-(longest - depth) // _LOTS))
    best = quickest(depth, least_times(depth, sources, reader.block_bytes, lot), block_compute_s)
    if best is None:
        return PeerPrice()
    from_peers = best.blocks[: len(usable)]
    most = max(range(len(usable)), key=lambda at: (from_peers[at], -at))
    peer = lent.runs[usable[most].at].instance if from_peers[most] else ""
    return PeerPrice(best.end, best.seconds, sum(from_peers), peer)


def _chosen(lent: LentPrefix, instance: InstanceId, reader: ReadingInstance, depth: int) -> list[Usable]:
    """The nearest that lend block `depth`, and the one that has the most from there on among them."""
    found = sorted(
        Usable(is_tcp, min(distance(reader.place, run.place), MOST_DISTANCE), -run.end, at)
        for at, run in enumerate(lent.runs)
        if run.instance != instance
        and run.begin <= depth < run.end
        and (is_tcp := _is_over_tcp(reader, run)) is not None
    )
    chosen, others = found[:MAX_PEERS], found[MAX_PEERS:]
    if others:
        deepest = min(others, key=lambda one: one.before)
        if deepest.before < min(one.before for one in chosen):
            chosen[-1] = deepest
    return chosen


def _is_over_tcp(reader: ReadingInstance, run: LentRun) -> bool | None:
    """How the two reach each other; None: not at all."""
    if reader.host and reader.host == run.host:
        return False
    return True if reader.tcp and run.tcp else None


def _source(lent: LentPrefix, one: Usable) -> FetchSource:
    link: PeerLink = (lent.tcp if one.is_tcp else lent.memory)[one.apart]
    return FetchSource(-one.before, Link(link.latency_s, link.bytes_per_s), link.together_bytes_per_s)
