"""Where to send a prompt, as an answer: the same from the service and from a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbm.catalog.access.callers import EMBEDDED, Caller
from kvbm.catalog.answers.groups_together import RouteAsk, held_together, rank_together
from kvbm.catalog.answers.prompts import ApiError, id_of
from kvbm.catalog.answers.queries import Queries
from kvbm.catalog.answers.token_prompts import PromptBlocks
from kvbm.catalog.routing.router import CandidateNumbers, Ranking, RoutingTask
from kvbm.core.answers import LIMIT, MOST_LOAD_S, CandidateLoad, MissedAnswer, MissedWhy, RouteAnswer
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId

_NOBODY: Mapping[str, str] = {}


class NobodyServesError(ApiError):
    """There is nobody to send the prompt to."""


def routing_task(
    namespace: Namespace | NamespaceId,
    fields: Namespace | None,
    hashes: bytes,
    input_tokens: int,
    key: str = "",
    latency: str = "standard",
    deadline_s: float | None = None,
    phase: str = "both",
) -> RoutingTask:
    """What the router is asked. Raises ApiError: more hashes than the prompt has full blocks.

    Args:
        fields: of the namespace, when they are known.
        key: of the caller, whose routes are remembered together.
        latency, deadline_s, phase: as in RouteRequest.
    """
    blocks = len(hashes) // HASH_BYTES
    block_tokens = fields.block_tokens if fields is not None else input_tokens // blocks if blocks else 1
    if blocks * block_tokens > input_tokens:
        raise ApiError(
            422,
            "too_many_hashes",
            f"{blocks} full blocks of {block_tokens} tokens are more than {input_tokens} tokens",
            "give the whole prompt's length as input_tokens, and hashes of full blocks only",
        )
    return RoutingTask(id_of(namespace), hashes, input_tokens, max(1, block_tokens), key, latency, deadline_s, phase)


def routed(
    queries: Queries,
    task: RoutingTask,
    fields: Namespace | None,
    namespace: Namespace | NamespaceId,
    caller: Caller = EMBEDDED,
    limit: int = LIMIT,
    only: Sequence[InstanceId] | None = None,
    remember: bool = True,
    elsewhere: CandidateLoad | None = None,
    prompt: PromptBlocks | None = None,
) -> RouteAnswer:
    """The answer to it; the best is noted as chosen. Raises NobodyServesError.

    Args:
        namespace: as the caller has given it.
        only: instances to look at; None for all.
        remember, elsewhere: as in RouteRequest.
        prompt: where several groups are answered together; None: what the task says is all there is.
    """
    others = None
    if (
        elsewhere is not None and caller.sees_all
    ):  # else it could be tried out which of them changes the order, and so what waits where
        others = CandidateNumbers(elsewhere.least_s, elsewhere.recent_s, elsewhere.candidates, elsewhere.lent)
    if prompt is not None and prompt.groups:
        ask = RouteAsk(queries, fields, namespace, caller, limit)
        ranking = rank_together(queries, prompt, ask, task, only, remember, others)
    else:
        ranking = queries.route(task, fields, namespace, caller, limit, only, remember, others)
    left_out = queries.left_out(task, namespace, caller, limit, only)
    missed = None
    if not any(one.depth for one in ranking.best) or not queries.misses.knows(caller, namespace):  # it may hold it soon
        full_blocks = 0 if fields is None else task.input_tokens // task.block_tokens
        groups = prompt if prompt is not None and prompt.groups else None
        why = _why_none(queries, task, namespace, caller, only, groups, full_blocks, bool(left_out))
        missed = None if why is None else queries.misses.explained("route", caller, namespace, why)
    return answer_of(ranking, task, queries.view_age_s(), not remember and caller.sees_all, left_out, missed)


def _why_none(
    queries: Queries,
    task: RoutingTask,
    namespace: Namespace | NamespaceId,
    caller: Caller,
    only: Sequence[InstanceId] | None,
    groups: PromptBlocks | None,
    full_blocks: int,
    is_left_out: bool,
) -> MissedWhy | None:
    """Why those that are ranked have nothing of a prompt, as a lookup of it says; None where it finds something: a pool
    that is slower than computing, or an instance that is not among them.

    Args:
        groups: as in `routed`, where there are several.
        full_blocks: of the prompt; 0: it is not known.
        is_left_out: instances that have its first block are named as left out.
    """
    if is_left_out:  # also where one is about to stop, whose blocks a lookup finds
        return queries.misses.why(caller, namespace, len(task.hashes) // HASH_BYTES, full_blocks, is_excluded=True)
    if groups is not None:
        found = held_together(queries, groups, caller, 1, only)
    else:
        found = queries.holdings(namespace, task.hashes, caller, 1, only)
    if found.deepest or found.instances or found.pools:
        return None
    return queries.misses.why(caller, namespace, len(task.hashes) // HASH_BYTES, full_blocks, bool(found.excluded))


def answer_of(
    ranking: Ranking,
    task: RoutingTask,
    view_age_s: float = 0.0,
    is_told: bool = False,
    left_out: Mapping[str, str] = _NOBODY,
    missed: MissedAnswer | None = None,
) -> RouteAnswer:
    """A ranking as an answer. Raises NobodyServesError.

    Args:
        is_told: whether it says what the candidates are together.
        left_out: as `Queries.left_out` says.
        missed: why nobody has anything of the prompt, where that is so.
    """
    ranked = ranking.best
    if not ranked:
        is_unknown = missed is not None and missed.why == "namespace_unknown"
        raise NobodyServesError(
            503,
            "no_instance",
            "no live instance serves this "
            f"namespace{f': {missed.message}' if missed is not None and is_unknown else ''}",
            "ask with the fields that the engines have, see /v1/namespaces"
            if is_unknown
            else "start an instance, or see /v1/instances for what is known of each",
        )
    return RouteAnswer(
        instance=ranked[0].instance,
        namespace=task.namespace.hex(),
        blocks=len(task.hashes) // HASH_BYTES,
        ranked=ranked,
        admitted=ranked[0].admitted,
        view_age_s=view_age_s,
        more=ranking.more,
        missed=msgspec.UNSET if missed is None else missed,
        candidates=_told(ranking.together) if is_told else None,
        excluded=dict(left_out),
    )


def _told(together: CandidateNumbers) -> CandidateLoad:
    return CandidateLoad(
        least_s=min(together.least_s, MOST_LOAD_S),
        recent_s=min(together.recent_s, MOST_LOAD_S),
        candidates=together.candidates,
        lent=tuple(together.lent),
    )
