"""What catalogs that divide a cluster are asked, and their answers as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Literal, NamedTuple, NoReturn, TypeVar

import msgspec

from kvbm.core.answers import (
    MOST_CANDIDATES,
    MOST_LENT,
    MOST_LOAD_S,
    BlocksHeld,
    CandidateLoad,
    FindAnswer,
    LookupAnswer,
    MissedAnswer,
    PoolHolding,
    PositionWanted,
    PresenceAnswer,
    RankedInstance,
    RouteAnswer,
)
from kvbm.core.errors import CatalogRefusedError
from kvbm.core.ids import Namespace, NamespaceId, Tier
from kvbm.core.missed import joined_missed
from kvbm.core.parts import part_of
from kvbm.core.peer_address import nearest_and_deepest
from kvbm.core.ties import tie_word
from kvbm.locate.http import CatalogClient

_SAME_COST = 9  # digits behind the point: beyond them sums of other orders differ
_LEAST_S = 0.001
_NOBODY = "no_instance"
A = TypeVar("A")


class Member(NamedTuple):
    """One catalog, or several that follow the same parts."""

    client: CatalogClient
    parts: tuple[int, ...]


class RouteOffer(NamedTuple):
    """An instance that may serve a prompt, and the catalog that says so."""

    member: Member
    ranked: RankedInstance


class Prompt(NamedTuple):
    """What a route asks, of whichever catalog. `until_s`: when it has to be answered."""

    namespace: Namespace | NamespaceId
    hashes: bytes
    input_tokens: int
    at_least: Sequence[PositionWanted]
    wait_s: float
    limit: int
    names: list[str] | None
    latency: Literal["interactive", "standard", "batch"]
    deadline_s: float | None
    phase: Literal["both", "prefill", "decode"]
    until_s: float

    def left_s(self) -> float:
        """The time there is left for it."""
        return max(_LEAST_S, self.until_s - time.monotonic())

    def priced(self, member: Member, elsewhere: CandidateLoad | None) -> RouteAnswer | None:
        """What serving it costs at a catalog's instances; None: at none of them."""
        at_least = wanted_of(member, self.at_least)
        timeout_s = max(_LEAST_S, self.left_s() - self.wait_s) if at_least else self.left_s()
        try:
            return member.client.route(
                self.namespace,
                self.hashes,
                self.input_tokens,
                at_least,
                self.wait_s,
                timeout_s,
                self.limit,
                named_of(member, self.names),
                self.latency,
                self.deadline_s,
                self.phase,
                False,
                elsewhere,
            )
        except CatalogRefusedError as error:
            if error.code != _NOBODY:
                raise
            return None

    def remembered(self, offer: RouteOffer, together: CandidateLoad | None) -> bool:
        """Have it remembered as sent; False: the instance is not there any more.

        Args:
            together: all candidates: whether it is admitted depends on who waits least among them.
        """
        try:
            offer.member.client.route(
                self.namespace,
                self.hashes,
                self.input_tokens,
                timeout_s=self.left_s(),
                limit=1,
                instances=[offer.ranked.instance],
                latency=self.latency,
                deadline_s=self.deadline_s,
                phase=self.phase,
                elsewhere=together,
            )
        except CatalogRefusedError as error:
            if error.code != _NOBODY:
                raise
            return False
        return True


NO_LOAD = CandidateLoad(least_s=0.0, recent_s=0.0, candidates=0)


def wanted_of(member: Member, at_least: Sequence[PositionWanted]) -> list[PositionWanted]:
    """Those positions that a catalog may come to."""
    return [wanted for wanted in at_least if part_of(wanted.instance) in member.parts]


def named_of(member: Member, instances: Sequence[str] | None) -> list[str] | None:
    """Those instances that a catalog may know."""
    return None if instances is None else [name for name in instances if part_of(name) in member.parts]


def together(loads: Iterable[CandidateLoad]) -> CandidateLoad | None:
    """What several are together, no more of anything than a question may say; None: nobody."""
    some = [load for load in loads if load.candidates]
    if not some:
        return None
    lent = {run.instance: run for load in some for run in load.lent}
    return CandidateLoad(
        least_s=min(load.least_s for load in some),
        recent_s=min(sum(load.recent_s for load in some), MOST_LOAD_S),
        candidates=min(sum(load.candidates for load in some), MOST_CANDIDATES),
        lent=tuple(sorted(lent.values(), key=lambda run: (-run.end, run.begin, run.instance))[:MOST_LENT]),
    )


def without_lent(load: CandidateLoad) -> CandidateLoad:
    """It, without what is of one prompt alone."""
    return msgspec.structs.replace(load, lent=()) if load.lent else load


def ranked(answers: Iterable[tuple[Member, RouteAnswer | None]], hashes: bytes) -> list[RouteOffer]:
    """All that were found, the best first, each instance once."""
    offers = [RouteOffer(member, one) for member, answer in answers if answer is not None for one in answer.ranked]
    offers.sort(
        key=lambda offer: (
            not offer.ranked.admitted,
            round(offer.ranked.cost_s, _SAME_COST),
            tie_word(offer.ranked.instance, hashes, offer.ranked.depth),
        )
    )
    return _each_once(offers, lambda offer: offer.ranked.instance)


def excluded_of(answers: Iterable[RouteAnswer], limit: int) -> dict[str, str]:
    """Who is left out of several answers, and why, by name."""
    each = dict(sorted(entry for answer in answers for entry in answer.excluded.items()))
    return dict(list(each.items())[:limit])


def _each_once(found: Iterable[A], name: Callable[[A], str]) -> list[A]:
    """The first of each name: two catalogs may follow one part."""
    each: dict[str, A] = {}
    for one in found:
        each.setdefault(name(one), one)
    return list(each.values())


def joined_lookups(answers: Sequence[LookupAnswer], limit: int) -> LookupAnswer:
    """One answer of those of several catalogs, each of which names its best."""
    turns = [
        one for of_each in zip_longest(*(answer.instances for answer in answers)) for one in of_each if one is not None
    ]
    turns.sort(key=lambda one: (-one.depth, -one.reach))
    instances = _each_once(turns, lambda one: one.instance)
    depths: dict[str, int] = {}
    for pool in chain.from_iterable(answer.pools for answer in answers):
        depths[pool.pool] = max(pool.depth, depths.get(pool.pool, 0))
    excluded = sorted({name for answer in answers for name in answer.excluded})
    return msgspec.structs.replace(
        answers[0],
        deepest=max(answer.deepest for answer in answers),
        instances=instances[:limit],
        pools=[
            PoolHolding(pool=name, depth=depth)
            for name, depth in sorted(depths.items(), key=lambda one: (-one[1], one[0]))
        ],
        excluded=excluded[:limit],
        missed=msgspec.UNSET if instances or depths else joined_missed(answer.missed for answer in answers),
        view_age_s=max(answer.view_age_s for answer in answers),
        more=sum(answer.more for answer in answers) + sum(one.depth > 0 for one in instances[limit:]),
        more_excluded=sum(answer.more_excluded for answer in answers) + max(0, len(excluded) - limit),
    )


def joined_finds(answers: Sequence[FindAnswer], limit: int) -> FindAnswer:
    """One answer of those of several catalogs."""
    depths: dict[str, int] = {}
    for pool in chain.from_iterable(answer.pools for answer in answers):
        depths[pool.pool] = max(pool.depth, depths.get(pool.pool, 0))
    peers = _each_once(chain.from_iterable(answer.peers for answer in answers), lambda one: one.instance)
    return msgspec.structs.replace(
        answers[0],
        pools=[
            PoolHolding(pool=name, depth=depth)
            for name, depth in sorted(depths.items(), key=lambda one: (-one[1], one[0]))
        ],
        peers=nearest_and_deepest(peers, limit),
        view_age_s=max(answer.view_age_s for answer in answers),
        missed=missed_by_all(answers),
    )


def missed_by_all(answers: Sequence[FindAnswer] | Sequence[RouteAnswer]) -> MissedAnswer | msgspec.UnsetType:
    """Why nothing was found; of a catalog that says no reason, an instance or a pool holds some of it."""
    said = [answer.missed for answer in answers]
    return msgspec.UNSET if msgspec.UNSET in said else joined_missed(said)


def joined_presences(answers: Sequence[PresenceAnswer], limit: int) -> PresenceAnswer:
    """One answer of those of several catalogs. What one of them has seen is there."""
    found: dict[tuple[str, str, str], list[BlocksHeld]] = {}
    for one in chain.from_iterable(answer.holders for answer in answers):
        found.setdefault((one.kind, one.name, one.tier), []).append(one)
    joined = [
        msgspec.structs.replace(
            same[0], suspect=all(one.suspect for one in same), held=joined_bits([one.bits() for one in same]).hex()
        )
        for same in found.values()
    ]
    masks: dict[str, list[bytes]] = {}
    for one in joined:
        if one.kind == "instance":
            masks.setdefault(one.name, []).append(one.bits())
    counts = {name: int.from_bytes(joined_bits(of_one)).bit_count() for name, of_one in masks.items()}
    order = sorted(counts, key=lambda name: (-counts[name], name))
    place = {name: at for at, name in enumerate(order[:limit])}
    holders = [one for one in joined if one.kind == "pool" or one.name in place]
    holders.sort(key=lambda one: (one.kind, place.get(one.name, 0), one.name, Tier[one.tier]))
    return msgspec.structs.replace(
        answers[0],
        holders=holders,
        missed=msgspec.UNSET if holders else joined_missed(answer.missed for answer in answers),
        view_age_s=max(answer.view_age_s for answer in answers),
        more=sum(answer.more for answer in answers) + len(order[limit:]),
    )


def joined_bits(masks: Sequence[bytes]) -> bytes:
    """What is set in any of several masks, which are as long as each other."""
    if len(masks) < 2:
        return masks[0] if masks else b""
    together = 0
    for mask in masks:
        together |= int.from_bytes(mask, "little")
    return together.to_bytes(max(map(len, masks)), "little")


def refuse_nobody(url: str) -> NoReturn:
    """There is nobody to send a prompt to."""
    raise CatalogRefusedError(
        f"the catalogs at {url} refuse: no live instance serves this namespace; start an instance", 503, _NOBODY
    )
