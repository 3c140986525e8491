"""What serving a prompt would have cost at an earlier moment, of what a history has: what was held, not what waited.

Costs are those of `routing.cost` where nothing waits and nothing was routed lately; reads are priced as the router
prices them until it has measured any.
"""

from __future__ import annotations

from kvbm.catalog.routing.cost import ClusterNumbers, InstanceNumbers, prefill_cost
from kvbm.config.settings import RoutingSettings
from kvbm.core.history_answers import HistoryLeftOut, HistoryPrompt, HistoryPromptHolder, HistoryRanked, HistoryRoute
from kvbm.core.ids import Tier
from kvbm.core.topology import ASSUMED_BLOCK_BYTES, TIER_LINKS

RUNNING = "running"
_IDLE = ClusterNumbers(0.0, 0.0)


def routed_then(
    answer: HistoryPrompt, input_tokens: int, settings: RoutingSettings, latency: str, limit: int
) -> HistoryRoute:
    """A route as of a moment.

    Args:
        answer: who held how much of the prompt then.
        input_tokens: of the whole prompt, no fewer than its full blocks have.
        latency: as in RouteRequest. limit: at most so many are told.
    """
    prices = _Prices(settings, answer.block_tokens or input_tokens // max(1, answer.blocks), input_tokens, latency)
    running = [one for one in answer.holders if one.state == RUNNING]
    ranked = sorted((prices.of(one) for one in running), key=lambda one: (one.cost_s, one.instance, one.stream))
    return HistoryRoute(
        at=answer.at,
        until=answer.until,
        namespace=answer.namespace,
        blocks=answer.blocks,
        input_tokens=input_tokens,
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
        ranked=ranked[:limit],
        without=prices.priced("", "", None, 0, 0.0, 0),
        excluded=[
            HistoryLeftOut(instance=one.instance, stream=one.stream, why=one.state)
            for one in answer.holders
            if one.state != RUNNING
        ],
        more=answer.more + max(0, len(ranked) - limit),
        not_known=_not_known(answer, settings),
        holes=answer.holes,
    )


def _not_known(answer: HistoryPrompt, settings: RoutingSettings) -> list[str]:
    """What the costs leave out, in sentences."""
    rate = f"{settings.prefill_tokens_per_s:g} tokens a second"
    said = [
        "load then is not recorded: costs are those of idle engines",
        f"what engines measured then is not recorded: each is taken to compute {rate} (routing.prefill_tokens_per_s)",
        "what instances lent one another is not recorded: no read from another one is priced",
        "which instances served the namespace is not recorded: those that held nothing of the prompt are not ranked",
    ]
    if answer.block_tokens is None:
        said.append("no start has told the tokens of a block: they are reckoned from those of the prompt")
    return said


class _Prices:
    """Of one prompt."""

    def __init__(self, settings: RoutingSettings, block_tokens: int, input_tokens: int, latency: str) -> None:
        self._settings, self._latency = settings, latency
        self._block_tokens, self._input_tokens = block_tokens, input_tokens

    def of(self, holder: HistoryPromptHolder) -> HistoryRanked:
        """Of one that held some of it."""
        fetch_s = sum(self._fetch_s(holder, tier, count) for tier, count in holder.run.items())
        fetch_blocks = sum(count for tier, count in holder.run.items() if tier != Tier.HBM.name)
        depth, behind = holder.depth, holder.reach - holder.depth
        pool_s = self._fetch_s(holder, Tier.OBJECT.name, behind)
        if behind and pool_s < behind * self._block_tokens / self._settings.prefill_tokens_per_s:
            depth, fetch_s, fetch_blocks = holder.reach, fetch_s + pool_s, fetch_blocks + behind
        return self.priced(holder.instance, holder.stream, holder.last_frame, depth, fetch_s, fetch_blocks)

    def priced(
        self, instance: str, stream: str, last_frame: str | None, depth: int, fetch_s: float, fetch_blocks: int
    ) -> HistoryRanked:
        """Of one that has so many blocks once it has fetched some."""
        missing = max(0, self._input_tokens - depth * self._block_tokens)
        numbers = InstanceNumbers(0.0, self._settings.prefill_tokens_per_s, missing, 0.0, fetch_s)
        cost = prefill_cost(self._settings, _IDLE, numbers, self._latency)
        return HistoryRanked(
            instance=instance,
            stream=stream,
            last_frame=last_frame,
            cost_s=cost.sum_s,
            recompute_s=cost.recompute_s,
            fetch_s=cost.fetch_s,
            ttft_s=cost.ttft_s,
            depth=depth,
            missing_tokens=missing,
            fetch_blocks=fetch_blocks,
        )

    def _fetch_s(self, holder: HistoryPromptHolder, tier: str, blocks: int) -> float:
        if not blocks or tier == Tier.HBM.name:
            return 0.0
        weight: float = getattr(self._settings.tier_weights, tier.lower())
        size = holder.block_bytes.get(tier) or ASSUMED_BLOCK_BYTES
        return TIER_LINKS[Tier[tier]].seconds(blocks * size) * weight
