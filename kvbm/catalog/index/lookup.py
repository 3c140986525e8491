"""Answers in the words of the API. Who is excluded is left out by the index itself; here it is only named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvbm.catalog.index.cluster_index import ClusterIndex, Holder, InstanceDepth, is_suspect
from kvbm.catalog.members.roster import Roster
from kvbm.core.answers import (
    LIMIT,
    BlockAnswer,
    BlockHolder,
    BlocksHeld,
    InstanceHolding,
    LookupAnswer,
    PoolHolding,
    PresenceAnswer,
)
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, SequenceHash, Tier

_TIERS = tuple(tier.name for tier in Tier)
# Of the instances of an answer, in one tier: 127 instances of the most blocks that can be asked for.
_MASKS_BYTES = 1 << 20
_HBM = Tier.HBM.name


def lookup(
    index: ClusterIndex,
    namespace: NamespaceId,
    hashes: bytes,
    limit: int = LIMIT,
    only: Sequence[InstanceId] | None = None,
    shown: str | None = None,
    view_age_s: float = 0.0,
    behind: Collection[InstanceId] = (),
) -> LookupAnswer:
    """Who has how much of a prefix, best first; and who is left out though they hold its first block.

    The readable twin of the native index's `ClusterIndex.lookup`.

    Args:
        namespace: to look in.
        hashes: packed, in prompt order.
        limit: of instances that are named.
        only: instances to look at; None for all.
        shown: what the answer calls the namespace, in hex; None: as the one it looks in.
        view_age_s: of the answer.
        behind: instances that are suspect whatever the index knows of them.
    """
    found = index.prefixes(namespace, hashes, limit, only)
    instances = [
        InstanceHolding(
            instance=entry.instance,
            depth=entry.depth,
            tiers=_tiers(entry),
            reach=entry.reach,
            suspect=entry.suspect or entry.instance in behind,
        )
        for entry in found.instances
    ]
    first = SequenceHash(hashes[:HASH_BYTES])
    excluded: list[str] = [*index.excluded_holders(namespace, first)] if first else []
    if only is not None:
        excluded = [name for name in excluded if name in only]
    pools = [PoolHolding(pool=entry.pool, depth=entry.depth) for entry in found.pools]
    return LookupAnswer(
        namespace=namespace.hex() if shown is None else shown,
        blocks=len(hashes) // HASH_BYTES,
        deepest=found.deepest,
        instances=instances,
        pools=sorted(pools, key=lambda entry: (-entry.depth, entry.pool)),
        excluded=sorted(excluded)[:limit],
        view_age_s=view_age_s,
        more=found.more,
        more_excluded=max(0, len(excluded) - limit),
    )


def _tiers(entry: InstanceDepth) -> dict[str, int]:
    """Blocks by the name of their tier. Most instances that are deep have all in HBM."""
    if entry.by_tier[0] == entry.depth:
        return {_HBM: entry.depth} if entry.depth else {}
    return {name: count for name, count in zip(_TIERS, entry.by_tier, strict=True) if count}


def left_out(
    index: ClusterIndex,
    roster: Roster,
    namespace: NamespaceId,
    hashes: bytes,
    limit: int,
    only: Collection[InstanceId] | None,
    may_know: Callable[[InstanceId], bool],
) -> dict[str, str]:
    """Instances that have a prompt's first block, as far as is known, and may not be sent it, or whose blocks do not
    count, and why.

    Args:
        hashes: packed, of its full blocks.
        only: instances to look at; None for all.
        may_know: whether the caller may know of an instance.
    Returns: at most `limit`, by name.
    """
    if not hashes or not roster.leaves_out:
        return {}
    first = SequenceHash(hashes[:HASH_BYTES])
    holders = {*index.excluded_holders(namespace, first)}
    if stopping := roster.stopping():
        found = index.prefixes(namespace, first, len(stopping), stopping).instances
        holders |= {one.instance for one in found if one.depth}
    shown: dict[str, str] = {}
    for one in sorted(holders if only is None else holders & set(only)):
        why = roster.why_left_out(one)
        if why and len(shown) < limit and may_know(one):
            shown[one] = why
    return shown


def presence(
    index: ClusterIndex,
    namespace: NamespaceId,
    hashes: bytes,
    limit: int = LIMIT,
    only: Sequence[InstanceId] | None = None,
    shown: str | None = None,
    view_age_s: float = 0.0,
    behind: Collection[InstanceId] = (),
) -> PresenceAnswer:
    """Who has which of some blocks. Arguments as `lookup`.

    Of very many blocks fewer instances are named than `limit`: their masks, of one tier, take a bounded room.
    """
    mask_bytes = len(hashes) // HASH_BYTES // 8 + 1
    found = index.presence(namespace, hashes, min(limit, max(1, _MASKS_BYTES // mask_bytes)), only)
    holders = [
        BlocksHeld(
            name=holder.name,
            kind=_kind(holder),
            tier=holder.tier.name,
            suspect=suspect or (not holder.is_pool and holder.name in behind),
            held=held.hex(),
        )
        for holder, suspect, held in found.rows
    ]
    return PresenceAnswer(
        namespace=namespace.hex() if shown is None else shown,
        blocks=len(hashes) // HASH_BYTES,
        holders=holders,
        view_age_s=view_age_s,
        more=found.more,
    )


def locate(
    index: ClusterIndex, namespace: NamespaceId, block: SequenceHash, asked: NamespaceId | None = None
) -> BlockAnswer:
    """Who holds one block. Arguments as `lookup`."""
    holders = [
        BlockHolder(
            name=holder.name,
            kind=_kind(holder),
            tier=holder.tier.name,
            suspect=not holder.is_pool and is_suspect(index, InstanceId(holder.name)),
        )
        for holder in index.holders(namespace, block)
    ]
    return BlockAnswer(namespace=(asked or namespace).hex(), hash=block.hex(), holders=holders)


def _kind(holder: Holder) -> str:
    return "pool" if holder.is_pool else "instance"
