"""Answers in the words of the API. Who is excluded is left out by the index itself; here it is only named."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.catalog.index import ClusterIndex, is_suspect
from kvbm.core.answers import LIMIT, BlockAnswer, BlockHolder, InstanceHolding, LookupAnswer, PoolHolding
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, SequenceHash, Tier


def lookup(
    index: ClusterIndex,
    namespace: NamespaceId,
    hashes: bytes,
    asked: Namespace | NamespaceId | None = None,
    limit: int = LIMIT,
    only: Sequence[InstanceId] | None = None,
) -> LookupAnswer:
    """Who has how much of a prefix, best first; and who is left out though they hold its first block.

    Args:
        namespace: to look in.
        hashes: packed, in prompt order.
        asked: what the answer calls the namespace; None: as the one it looks in.
        limit: of instances that are named.
        only: instances to look at; None for all.
    """
    found = index.prefixes(namespace, hashes, limit, only)
    instances = [
        InstanceHolding(
            instance=entry.instance,
            depth=entry.depth,
            tiers={tier.name: entry.by_tier[tier] for tier in Tier if entry.by_tier[tier]},
            reach=entry.reach,
            suspect=entry.suspect,
        )
        for entry in found.instances
    ]
    first = SequenceHash(hashes[:HASH_BYTES])
    excluded: list[str] = [*index.excluded_holders(namespace, first)] if first else []
    if only is not None:
        excluded = [name for name in excluded if name in only]
    pools = [PoolHolding(pool=entry.pool, depth=entry.depth) for entry in found.pools]
    return LookupAnswer(
        namespace=(asked.id if isinstance(asked, Namespace) else asked or namespace).hex(),
        blocks=len(hashes) // HASH_BYTES,
        deepest=found.deepest,
        instances=instances,
        pools=sorted(pools, key=lambda entry: (-entry.depth, entry.pool)),
        excluded=sorted(excluded)[:limit],
        more=found.more,
        more_excluded=max(0, len(excluded) - limit),
    )


def locate(
    index: ClusterIndex, namespace: NamespaceId, block: SequenceHash, asked: NamespaceId | None = None
) -> BlockAnswer:
    """Who holds one block. Arguments as `lookup`."""
    holders = [
        BlockHolder(
            name=holder.name,
            kind="pool" if holder.is_pool else "instance",
            tier=holder.tier.name,
            suspect=not holder.is_pool and is_suspect(index, InstanceId(holder.name)),
        )
        for holder in index.holders(namespace, block)
    ]
    return BlockAnswer(namespace=(asked or namespace).hex(), hash=block.hex(), holders=holders)
