"""Prompts of models with several KV groups, or with windows: a prefix counts as far as all groups together hold what
tokens behind it need.

Each group's blocks are asked for one by one, since a window's may lack those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.answers.queries import Queries
from kvbm.catalog.answers.token_prompts import GroupBlocks, PromptBlocks
from kvbm.catalog.routing.router import CandidateNumbers, Ranking, RoutingTask
from kvbm.core.answers import MAX_LIMIT, BlocksHeld, InstanceHolding, LookupAnswer, PoolHolding
from kvbm.core.chain_statement import ChainGroup
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Tier

_MOST_LEVELS = 8


class RouteAsk(NamedTuple):
    """Who asks for a route, and for how many instances."""

    queries: Queries
    fields: Namespace | None
    asked: Namespace | NamespaceId
    caller: Caller
    limit: int

    def __call__(
        self,
        task: RoutingTask,
        only: Sequence[InstanceId] | None,
        remember: bool,
        elsewhere: CandidateNumbers | None,
    ) -> Ranking:
        """As `Queries.route`; of one that is not remembered all are told."""
        limit = self.limit if remember else MAX_LIMIT
        return self.queries.route(
            task, self.fields, self.asked, self.caller, limit, only, remember=remember, elsewhere=elsewhere
        )


class _Holder(NamedTuple):
    """What one holder has of the groups: of each a bit for each block, by tier."""

    by_group: dict[int, dict[str, np.ndarray]]
    suspect: bool

    def any_tier(self, group: int, blocks: int) -> np.ndarray:
        """For each block whether it is held at all."""
        held = np.zeros(blocks, bool)
        for bits in self.by_group.get(group, {}).values():
            held |= bits
        return held


class Together(NamedTuple):
    """Who has what of a prompt: instances and pools by name, each with the tokens of its prefix.

    Attributes:
        tiers: of an instance, blocks of the prefix in the namespace that was asked for, by the hottest tier.
        reaches: tokens of an instance's prefix when its cluster pools go on where its own tiers end.
        more: instances that hold some blocks and were not looked at: there are too many.
    """

    instances: dict[str, int]
    pools: dict[str, int]
    tiers: dict[str, dict[str, int]]
    reaches: dict[str, int]
    suspects: frozenset[str]
    more: int


def tokens_together(groups: Sequence[tuple[ChainGroup, np.ndarray]], step_tokens: int) -> int:
    """The longest prefix, in tokens, behind which each group has all that is still needed.

    Args:
        groups: of each for every full block of the prompt whether it is held.
        step_tokens: what a prefix grows by: a multiple of each group's block.
    """
    most = min((len(held) - group.has_draft) * group.block_tokens for group, held in groups)
    if most < step_tokens:
        return 0
    ends = np.arange(0, most // step_tokens + 1) * step_tokens
    fits = np.ones(len(ends), bool)
    for group, held in groups:
        counted = np.concatenate(([0], np.cumsum(held)))
        last = ends // group.block_tokens
        first = np.array([group.first_needed(int(end)) for end in last]) if not group.keeps_all else 0
        behind = last + group.has_draft
        fits &= counted[behind] - counted[first] == behind - first
    fits[0] = True
    return int(ends[np.flatnonzero(fits)[-1]])


def together(queries: Queries, prompt: PromptBlocks, caller: Caller, only: Sequence[InstanceId] | None) -> Together:
    """Who has what of a prompt, over all of its groups."""
    instances: dict[str, _Holder] = {}
    pools: dict[str, _Holder] = {}
    more = 0
    for at, group in enumerate(prompt.groups):
        found = queries.held(group.namespace, group.hashes, caller, only)
        more = max(more, found.more)
        for one in found.holders:
            _note(instances if one.kind == "instance" else pools, at, one, len(group.hashes) // HASH_BYTES)
    step, main = prompt.step_tokens, _main(prompt)
    depths = {name: _tokens(prompt.groups, [holder], step) for name, holder in instances.items()}
    reaches = {}
    for name, holder in instances.items():
        used = [pools[pool] for pool in queries.cluster_pools(InstanceId(name)) if pool in pools]
        reaches[name] = _tokens(prompt.groups, [holder, *used], step) if used else depths[name]
    size = prompt.groups[main].group.block_tokens
    return Together(
        depths,
        {name: _tokens(prompt.groups, [holder], step) for name, holder in pools.items()},
        {name: _tiers(holder.by_group.get(main, {}), depths[name] // size) for name, holder in instances.items()},
        reaches,
        frozenset(name for name, holder in instances.items() if holder.suspect),
        more,
    )


def lookup_together(
    queries: Queries, prompt: PromptBlocks, caller: Caller, limit: int, only: Sequence[InstanceId] | None
) -> LookupAnswer:
    """Who has how much of a prompt, in blocks of the namespace that was asked for."""
    return queries.misses.lookup(held_together(queries, prompt, caller, limit, only), caller, prompt.namespace)


def held_together(
    queries: Queries, prompt: PromptBlocks, caller: Caller, limit: int, only: Sequence[InstanceId] | None
) -> LookupAnswer:
    """As `lookup_together`, without a reason where nothing is found."""
    base = queries.holdings(prompt.namespace, prompt.hashes, caller, limit, only)
    found = together(queries, prompt, caller, only)
    size = prompt.groups[_main(prompt)].group.block_tokens
    ranked = sorted((name for name in found.reaches if found.reaches[name]), key=lambda name: _order(found, name))
    instances = [
        InstanceHolding(
            instance=name,
            depth=found.instances[name] // size,
            tiers=found.tiers[name],
            reach=found.reaches[name] // size,
            suspect=name in found.suspects,
        )
        for name in ranked[:limit]
    ]
    pools = [PoolHolding(pool=name, depth=tokens // size) for name, tokens in found.pools.items() if tokens]
    depths = [*(tokens // size for tokens in found.instances.values()), *(pool.depth for pool in pools)]
    return msgspec.structs.replace(
        base,
        deepest=max(depths, default=0),
        instances=instances,
        pools=sorted(pools, key=lambda pool: (-pool.depth, pool.pool)),
        more=max(0, len(ranked) - limit) + found.more,
    )


def rank_together(
    queries: Queries,
    prompt: PromptBlocks,
    ask: RouteAsk,
    task: RoutingTask,
    only: Sequence[InstanceId] | None,
    remember: bool,
    elsewhere: CandidateNumbers | None,
) -> Ranking:
    """The instances that may serve a prompt, none credited with more than it holds of all groups together.

    Args:
        ask: ranks for a task, as `Queries.route`.
        task: of the namespace that was asked for.
    """
    size = prompt.groups[_main(prompt)].group.block_tokens
    found, alone = together(queries, prompt, ask.caller, only), _alone(queries, prompt, ask.caller, only)
    less = {name: have for name, depth in alone.items() if (have := found.instances.get(name, 0) // size) < depth}
    if not less:
        return ask(task, only, remember, elsewhere)
    whole = ask(task, only, False, elsewhere)
    best = [one for one in whole.best if one.instance not in less]
    hashes = {one.instance: task.hashes for one in best}
    levels = _levels(less.values())
    for level in levels:
        names = [InstanceId(name) for name, depth in less.items() if _level(levels, depth) == level]
        shorter = task._replace(hashes=task.hashes[: level * HASH_BYTES])
        ranked = ask(shorter, names, False, whole.together).best
        best += ranked
        hashes |= dict.fromkeys((one.instance for one in ranked), shorter.hashes)
    best.sort(key=lambda one: (task.deadline_s is not None and one.ttft_s > task.deadline_s, one.cost_s, one.instance))
    if remember and best and best[0].admitted:
        chosen = task._replace(hashes=hashes[best[0].instance])
        ask(chosen, [InstanceId(best[0].instance)], True, whole.together)
    return Ranking(best[: ask.limit], whole.more + max(0, len(best) - ask.limit), whole.together)


def _alone(queries: Queries, prompt: PromptBlocks, caller: Caller, only: Sequence[InstanceId] | None) -> dict[str, int]:
    """What each instance holds of the group that was asked for."""
    found = queries.holdings(prompt.namespace, prompt.hashes, caller, MAX_LIMIT, only)
    return {one.instance: one.depth for one in found.instances}


def _levels(depths: Iterable[int]) -> list[int]:
    """Depths by which instances are ranked together: each rank is a question of its own."""
    found = sorted(set(depths))
    return found if len(found) <= _MOST_LEVELS else [0, *found[:: -(-len(found) // (_MOST_LEVELS - 1))]]


def _level(levels: Sequence[int], depth: int) -> int:
    return max(level for level in levels if level <= depth)


def _order(found: Together, name: str) -> tuple[int, int, str]:
    return -found.instances[name], -found.reaches[name], name


def _main(prompt: PromptBlocks) -> int:
    """The group whose namespace was asked for."""
    wanted = prompt.namespace if isinstance(prompt.namespace, bytes) else prompt.namespace.id
    return next(at for at, one in enumerate(prompt.groups) if one.namespace.id == wanted)


def _note(holders: dict[str, _Holder], group: int, one: BlocksHeld, blocks: int) -> None:
    known = holders.get(one.name, _Holder({}, suspect=False))
    bits = np.unpackbits(np.frombuffer(one.bits(), np.uint8), bitorder="little", count=blocks).astype(bool)
    known.by_group.setdefault(group, {})[one.tier] = bits
    holders[one.name] = known._replace(suspect=known.suspect or one.suspect)


def _tokens(groups: Sequence[GroupBlocks], holders: Sequence[_Holder], step_tokens: int) -> int:
    held = []
    for at, group in enumerate(groups):
        blocks = len(group.hashes) // HASH_BYTES
        either = np.zeros(blocks, bool)
        for holder in holders:
            either |= holder.any_tier(at, blocks)
        held.append((group.group, either))
    return tokens_together(held, step_tokens)


def _tiers(by_tier: Mapping[str, np.ndarray], blocks: int) -> dict[str, int]:
    """Blocks of a prefix by the hottest tier that holds each."""
    counts: dict[str, int] = {}
    left = np.ones(blocks, bool)
    for tier in Tier:
        if tier.name in by_tier:
            here = by_tier[tier.name][:blocks] & left
            left &= ~here
            if count := int(here.sum()):
                counts[tier.name] = count
    return counts
