"""Catalogs of parts of a cluster, joined, answer as one of the whole: who has a prefix, who should serve it, who holds
a block.
"""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import kvbm.locate.parts
from kvbm.catalog.answers.routed import NobodyServesError, answer_of
from kvbm.catalog.index.lenders import Lenders
from kvbm.catalog.index.lent_blocks import LentBlocks
from kvbm.catalog.index.lookup import locate, lookup, presence
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.router import CandidateNumbers, RoutingTask
from kvbm.config import RoutingSettings
from kvbm.core.answers import (
    MOST_LOAD_S,
    BlockAnswer,
    CandidateLoad,
    FindAnswer,
    LookupAnswer,
    PeerHolding,
    PoolHolding,
    PositionWanted,
    PresenceAnswer,
    ReadyAnswer,
    RouteAnswer,
)
from kvbm.core.errors import ArgumentError, CatalogError, CatalogRefusedError
from kvbm.core.events import BlocksCreated, BlocksEvicted, EvictReason, InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, SequenceHash, Tier
from kvbm.core.missed import missed
from kvbm.core.parts import ALL_PARTS, part_of, words_of
from kvbm.locate.joined import joined_finds, together
from kvbm.locate.parts import PartedCatalog
from kvbm.streams.base import Heartbeat
from tests.indexes import NATIVE, frame_bytes

SPACE = Namespace(model="m", block_tokens=16).id
NAMES = [InstanceId(f"gpu-{number}") for number in range(60)]
POOLS = (
    PoolStated(Tier.HBM, 1000, 1 << 20),
    PoolStated(Tier.HOST, 1000, 1 << 20),
    PoolStated(Tier.NVME, 1000, 1 << 20),
)
ALL = 1000


def chain(family: int, end: int) -> bytes:
    return b"".join(random.Random(family * 10_000 + number).randbytes(16) for number in range(end))


def place_of(instance: InstanceId) -> tuple[str, ...]:
    number = int(instance.split("-")[1])
    return (f"zone-{number % 2}", f"rack-{number % 5}", f"host-{number % 20}")


def words_of_lender(instance: InstanceId) -> dict[str, str]:
    """Two stand on each host of three; one in three has no port."""
    number = int(instance.split("-")[1])
    tcp = {} if number % 3 == 0 else {"tcp": f"10.0.0.{number}:1"}
    tiers = {"tiers": "HOST"} if number % 7 == 0 else {}
    return {"host": f"machine-{number % 20}", "unix": f"/run/{number}.sock"} | tcp | tiers


class Part:
    """What a catalog of some parts answers from, asked as a client asks it."""

    def __init__(self, parts: tuple[int, ...], clock: list[float]) -> None:
        self.parts, self.url = parts, f"http://{words_of(parts) or 'all'}"
        self.index = NATIVE.index()
        self.router: Any = self.index.router(RoutingSettings())
        self.candidates = self.router.candidates()
        self.dead: set[InstanceId] = set()
        self.lenders = Lenders(self, place_of)
        self.lent = LentBlocks(self.index, self.router.reads, self, self.lenders, lambda _: POOLS, parts != ALL_PARTS)
        self.is_ready, self.is_away = True, False
        self.routes: list[
            tuple[bool, CandidateLoad | None, RouteAnswer]
        ] = []  # whether it is remembered, and its answer
        self.positions: list[PositionWanted] = []  # waited for
        self.told: list[InstanceId | Path] = []
        self.holds: threading.Event | None = None  # no lookup is answered before
        self._guard, self._clock = threading.Lock(), clock

    def apply(self, instance: InstanceId, epoch: int, *events: Any) -> None:
        self.index.apply(frame_bytes(instance, *events, epoch=epoch))

    def hear(self, instance: InstanceId, queued: int, tokens_per_s: float) -> None:
        heartbeat = Heartbeat(
            instance=instance,
            cluster="c",
            epoch=Epoch(1),
            published=Offset(0),
            wall_time_ns=0,
            queued_tokens=queued,
            prefill_tokens_per_s=tokens_per_s,
        )
        self.router.hear(instance, LastHeartbeat(heartbeat, self._clock[0]))
        self.index.report_queued(instance, queued)

    def is_live(self, instance: InstanceId) -> bool:
        return instance not in self.dead

    def lend(self, instance: InstanceId, words: dict[str, str]) -> None:
        heartbeat = Heartbeat(
            instance=instance, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=0, lends=words
        )
        for one in (self.lenders, self.lent):
            one.hear(instance, LastHeartbeat(heartbeat, self._clock[0]))

    def lookup(
        self, namespace: Any, hashes: bytes, at_least: Any, wait_s: float, timeout_s: Any, limit: int, only: Any
    ) -> LookupAnswer:
        self.positions += at_least
        if self.is_away:
            raise CatalogError(f"{self.url} is away")
        if self.holds is not None:
            self.holds.wait(60.0)
        with self._guard:
            return lookup(self.index, namespace, hashes, limit=limit, only=only)

    def presence(
        self, namespace: Any, hashes: bytes, at_least: Any, wait_s: float, timeout_s: Any, limit: int, only: Any
    ) -> PresenceAnswer:
        with self._guard:
            return presence(self.index, namespace, hashes, limit=limit, only=only)

    def block(self, namespace: Any, block: bytes) -> BlockAnswer:
        with self._guard:
            return locate(self.index, namespace, SequenceHash(block))

    def route(
        self,
        namespace: Any,
        hashes: bytes,
        input_tokens: int,
        at_least: Any = (),
        wait_s: float = 1.0,
        timeout_s: Any = None,
        limit: int = 8,
        instances: Any = None,
        latency: Any = "standard",
        deadline_s: Any = None,
        phase: Any = "both",
        remember: bool = True,
        elsewhere: CandidateLoad | None = None,
    ) -> RouteAnswer:
        task = RoutingTask(namespace, hashes, input_tokens, 16, "", latency, deadline_s, phase)
        others = None
        if elsewhere is not None:
            others = CandidateNumbers(elsewhere.least_s, elsewhere.recent_s, elsewhere.candidates)
        with self._guard:
            own = self.lent.runs(namespace, hashes, lambda _: True) if phase != "decode" else []
            lent = self.lent.priced(self._clock[0], own, elsewhere.lent if elsewhere is not None else ())
            candidates = self.candidates
            if instances is not None:
                candidates = self.router.candidates()
                for name in instances:
                    self.router.add(candidates, name)
            ranking = self.router.route(self._clock[0], task, [candidates], None, limit, remember, others, lent)
            ranking = ranking._replace(together=ranking.together._replace(lent=own))
        try:
            answer = answer_of(ranking, task, is_told=not remember)
            self.routes.append((remember, elsewhere, answer))
            return answer
        except NobodyServesError as error:
            raise CatalogRefusedError("nobody", error.status, error.answer.error.code) from None

    def forget(self, instance: InstanceId) -> None:
        self.told.append(instance)

    def fetch_checkpoint(self, folder: Path) -> bool:
        self.told.append(folder)
        return True

    def ready(self) -> ReadyAnswer:
        if self.is_away:
            raise CatalogError(f"{self.url} is away")
        why = "" if self.is_ready else "reading"
        return ReadyAnswer(
            ready=not why, reason=why, degraded="", stream_sequence=7, lag_messages=0, parts=words_of(self.parts)
        )

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Cluster:
    """The same instances in one whole catalog, and divided among several."""

    def __init__(self, pick: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = [100.0]
        cuts = sorted(pick.sample(range(1, 64), pick.choice([1, 2, 4])))
        self.whole = Part(ALL_PARTS, self.now_s)
        ends = [0, *cuts, 64]
        self.parts = [Part(ALL_PARTS[a:b], self.now_s) for a, b in pairwise(ends)]
        by_url = {part.url: part for part in self.parts}
        monkeypatch.setattr(kvbm.locate.parts, "CatalogClient", lambda url, *more: by_url[url])
        self.joined = PartedCatalog(list(by_url))
        self.epochs = dict.fromkeys(NAMES, 0)

    def of(self, instance: InstanceId) -> list[Part]:
        return [self.whole, *(part for part in self.parts if part_of(instance) in part.parts)]

    def start(self, instance: InstanceId) -> None:
        self.epochs[instance] += 1
        for part in self.of(instance):
            part.apply(
                instance, self.epochs[instance], InstanceStarted(epoch=Epoch(self.epochs[instance]), pools=POOLS)
            )
            part.router.add(part.candidates, instance)

    def step(self, pick: random.Random) -> None:
        instance, family = pick.choice(NAMES), pick.randrange(4)
        what = pick.randrange(6)
        held, queued, rate = (
            pick.randrange(1, 40),
            pick.choice([0, 100, 40_000, 300_000]),
            pick.choice([0.0, 1e3, 2.5e4]),
        )
        tier = pick.choice([Tier.HBM, Tier.HOST, Tier.NVME])
        for part in self.of(instance):
            epoch = self.epochs[instance]
            if what <= 2:
                part.apply(instance, epoch, BlocksCreated(namespace=SPACE, tier=tier, hashes=chain(family, held)))
            elif what == 3:
                hashes = chain(family, 21)[16 * (held // 2) :]
                evicted = BlocksEvicted(namespace=SPACE, tier=tier, reason=EvictReason.CAPACITY, hashes=hashes)
                if hashes:
                    part.apply(instance, epoch, evicted)
            elif what == 4:
                part.hear(instance, queued, rate)
            elif epoch:
                part.index.exclude(instance, queued == 0)


@pytest.mark.parametrize("seed", range(12))
def test_parts_together_are_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(seed)
    cluster = Cluster(pick, monkeypatch)
    for instance in NAMES:
        cluster.start(instance)
    seen = 0
    for _ in range(150):
        cluster.now_s[0] += pick.choice([0.0, 0.01, 0.3])
        cluster.step(pick)
        hashes = chain(pick.randrange(4), pick.choice([0, 1, 5, 30]))
        only = pick.choice([None, None, sorted(pick.sample(NAMES, 5)), ["nobody"]])
        whole = cluster.whole.lookup(SPACE, hashes, (), 0.0, None, ALL, only)
        joined = cluster.joined.lookup(SPACE, hashes, limit=ALL, instances=only)
        key = lambda one: (-one.depth, -one.reach, one.instance)  # noqa: E731 - least waits is told by no answer
        assert sorted(joined.instances, key=key) == sorted(whole.instances, key=key)
        assert [one.depth for one in joined.instances] == [one.depth for one in whole.instances]
        assert joined == LookupAnswer(**{**_fields(whole), "instances": joined.instances})
        for limit in (1, 3, 8):
            some, best = (
                cluster.joined.lookup(SPACE, hashes, limit=limit),
                cluster.whole.lookup(SPACE, hashes, (), 0.0, None, limit, None),
            )
            assert [one.depth for one in some.instances] == [one.depth for one in best.instances]
            assert (some.deepest, some.more, some.more_excluded) == (best.deepest, best.more, best.more_excluded)
        of_all = cluster.whole.presence(SPACE, hashes, (), 0.0, None, ALL, only)
        of_parts = cluster.joined.presence(SPACE, hashes, limit=ALL, instances=only)
        place = lambda one: (one.name, one.tier)  # noqa: E731 - who is equal is in no order
        assert sorted(of_parts.holders, key=place) == sorted(of_all.holders, key=place)
        assert (of_parts.blocks, of_parts.more) == (of_all.blocks, 0)
        for limit in (1, 3):
            some_of, best_of = (
                cluster.joined.presence(SPACE, hashes, limit=limit),
                cluster.whole.presence(SPACE, hashes, (), 0.0, None, limit, None),
            )
            assert (some_of.more, held_by_each(some_of)) == (best_of.more, held_by_each(best_of))
        if hashes:
            block = hashes[-16:]
            held = cluster.whole.block(SPACE, block)
            assert sorted(one.name for one in held.holders) == [
                one.name for one in cluster.joined.block(SPACE, block).holders
            ]
            seen += len(held.holders)
    assert seen > 100


def held_by_each(answer: PresenceAnswer) -> list[int]:
    """How many of the blocks each instance has that is named, in order."""
    masks: dict[str, int] = {}
    for one in answer.holders:
        if one.kind == "instance":
            masks[one.name] = masks.get(one.name, 0) | int.from_bytes(one.bits(), "little")
    return [mask.bit_count() for mask in masks.values()]


def _fields(answer: LookupAnswer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__struct_fields__}


@pytest.mark.parametrize("lenders", [0, 16])
@pytest.mark.parametrize("seed", range(12))
def test_a_prompt_goes_where_the_whole_sends_it(seed: int, lenders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole catalog and those of parts hear the same heartbeats and have sent the same prompts to the same
    instances all along.
    """
    pick = random.Random(seed)
    cluster = Cluster(pick, monkeypatch)
    for instance in NAMES:
        cluster.start(instance)
    for instance in pick.sample(NAMES, 2 * lenders):
        for part in cluster.of(instance):
            part.lend(instance, words_of_lender(instance))
    chosen, apart, read = set(), 0, 0
    for _ in range(150):
        cluster.now_s[0] += pick.choice([0.0, 0.01, 0.3])
        cluster.step(pick)
        blocks = pick.choice([0, 1, 5, 30])
        hashes, tokens = chain(pick.randrange(4), blocks), blocks * 16 + 7
        more = {
            "latency": pick.choice(["standard", "standard", "interactive", "batch"]),
            "deadline_s": pick.choice([None, None, 0.5]),
        }
        only = None if lenders else pick.choice([None, None, sorted(pick.sample(NAMES, 5))])
        whole = cluster.whole.route(SPACE, hashes, tokens, limit=ALL, remember=False, instances=only, **more)
        if only is None:
            cluster.joined._loads.clear()  # what the others have to do is of the last question, unless that was none
        joined = cluster.joined.route(SPACE, hashes, tokens, limit=ALL, instances=only, **more)
        by_name = {one.instance: one for one in whole.ranked}
        assert {one.instance for one in joined.ranked} == by_name.keys()
        for one in joined.ranked:
            assert one.cost_s == pytest.approx(by_name[one.instance].cost_s, rel=1e-9, abs=1e-9)
            other = by_name[one.instance]
            assert (one.depth, one.missing_tokens, one.admitted) == (other.depth, other.missing_tokens, other.admitted)
            assert (one.peer, one.peer_blocks) == (other.peer, other.peer_blocks)
            read += one.peer_blocks
        assert by_name[joined.instance].cost_s == pytest.approx(whole.ranked[0].cost_s, rel=1e-9, abs=1e-9)
        assert joined.admitted == whole.admitted
        apart += joined.instance != whole.instance
        if joined.admitted:
            cluster.whole.route(SPACE, hashes, tokens, instances=[joined.instance], elsewhere=whole.candidates, **more)
            chosen.add(joined.instance)
    assert len(chosen) > 5
    assert (read > 100) == bool(lenders)
    assert apart <= 7  # who of equals has had less lately is known to the whole alone


def test_a_pool_is_as_deep_as_the_catalog_says_that_knows_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    hashes = chain(1, 10)
    cluster.parts[0].index.claim("pool", SPACE, hashes[: 16 * 4])
    cluster.parts[-1].index.claim("pool", SPACE, hashes[: 16 * 7])
    cluster.parts[0].index.claim("other", SPACE, hashes[:16])
    answer = cluster.joined.lookup(SPACE, hashes)
    assert [(one.pool, one.depth) for one in answer.pools] == [("pool", 7), ("other", 1)]
    assert answer.deepest == 7


def test_parts_that_nobody_follows_are_an_error_and_a_reason_not_to_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    assert cluster.joined.ready().ready
    cluster.parts[0].is_ready = False
    assert cluster.joined.ready().reason == f"{cluster.parts[0].url}: reading"
    some = PartedCatalog([part.url for part in cluster.parts[1:]])
    missing = words_of(cluster.parts[0].parts)
    assert f"follows parts {missing} of the cluster" in some.ready().reason
    with pytest.raises(CatalogError, match=f"follows parts {missing} of the cluster"):
        some.lookup(SPACE, chain(1, 3))


def test_one_that_is_closed_or_answers_anything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    monkeypatch.setattr(
        Part,
        "ready",
        lambda self: ReadyAnswer(ready=True, reason="", degraded="", stream_sequence=1, lag_messages=0, parts="99"),
    )
    with pytest.raises(CatalogError, match="something else than a catalog's answer"):
        cluster.joined.lookup(SPACE, chain(1, 3))
    assert "something else" in cluster.joined.ready().reason
    cluster.joined.close()
    cluster.joined.close()
    with pytest.raises(CatalogError, match="is closed"):
        cluster.joined.lookup(SPACE, chain(1, 3))
    with pytest.raises(ArgumentError):
        cluster.joined.lookup(SPACE, chain(1, 3), instances="gpu-0")


def in_part(cluster: Cluster, at: int) -> list[InstanceId]:
    return [name for name in NAMES if part_of(name) in cluster.parts[at].parts]


def test_a_prompt_of_a_batch_is_remembered_where_another_instance_of_its_catalog_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who holds all of it waits longer than a batch may; whether it is admitted depends on who waits least."""
    cluster = Cluster(random.Random(3), monkeypatch)
    holds, idle = in_part(cluster, 0)[:2]
    hashes = chain(1, 6000)
    for name in (holds, idle):
        cluster.start(name)
    for part in cluster.of(holds):
        part.apply(holds, 1, BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=hashes))
        part.hear(holds, 30_000, 1e3)
        part.hear(idle, 0, 1e3)
    answer = cluster.joined.route(SPACE, hashes, 96_000, latency="batch")
    assert (answer.instance, answer.admitted) == (holds, True)
    assert answer.ranked[0].queueing_s > 10.0
    ((_, _, remembered),) = [one for part in cluster.parts for one in part.routes if one[0]]
    assert (remembered.instance, remembered.admitted) == (holds, True)


def test_a_prompt_goes_to_another_instance_where_the_best_has_just_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    gone, stays = in_part(cluster, 0)[0], in_part(cluster, 1)[0]
    hashes = chain(1, 200)
    for name in (gone, stays):
        cluster.start(name)
        for part in cluster.of(name):
            part.hear(name, 0, 1e3)
    for part in cluster.of(gone):
        part.apply(gone, 1, BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=hashes))
    first, route = cluster.parts[0], Part.route

    def goes(self: Part, *asked: Any, **more: Any) -> RouteAnswer:
        if self is first and more.get("limit") == 1 and "elsewhere" in more:
            first.router.remove(first.candidates, gone)
            raise CatalogRefusedError("nobody", 503, "no_instance")
        return route(self, *asked, **more)

    monkeypatch.setattr(Part, "route", goes)
    assert cluster.joined.route(SPACE, hashes, 3200).instance == stays


def test_what_others_have_to_do_is_asked_again_when_the_last_question_is_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    for at, queued in ((0, 0), (1, 5000)):
        name = in_part(cluster, at)[0]
        cluster.start(name)
        for part in cluster.of(name):
            part.hear(name, queued, 1e3)
    busy = in_part(cluster, 1)[0]

    def told() -> list[float]:
        """What the first was told that waits at the second, by each question of one route."""
        cluster.parts[0].routes.clear()
        cluster.joined.route(SPACE, chain(1, 3), 48)
        return [others.least_s if others else -1.0 for remembers, others, _ in cluster.parts[0].routes if not remembers]

    nothing, before = told()
    assert (nothing, before > 0.0) == (-1.0, True)
    for part in cluster.of(busy):
        part.hear(busy, 10_000, 1e3)
    assert told() == [before]
    monkeypatch.setattr(kvbm.locate.parts, "_LOADS_KEPT_S", 0.0)
    assert told() == [-1.0, 2 * before]


def test_no_more_is_told_of_the_others_than_a_question_may_say() -> None:
    """An instance says how quickly it computes, so it may say that it takes a thousand years."""
    much = CandidateLoad(least_s=MOST_LOAD_S, recent_s=MOST_LOAD_S, candidates=600_000)
    found = together([much, much, CandidateLoad(least_s=0.0, recent_s=0.0, candidates=0)])
    assert found == CandidateLoad(least_s=MOST_LOAD_S, recent_s=MOST_LOAD_S, candidates=1_000_000)
    assert together([]) is None


def test_an_instance_that_two_catalogs_follow_is_named_once_as_who_has_most_of_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    early, late = Part(ALL_PARTS[:40], now_s), Part(ALL_PARTS[20:], now_s)
    late.url = "http://late"
    by_url = {one.url: one for one in (early, late)}
    monkeypatch.setattr(kvbm.locate.parts, "CatalogClient", lambda url, *more: by_url[url])
    joined = PartedCatalog(list(by_url))
    twice = [name for name in NAMES if 20 <= part_of(name) < 40][:2]
    for one, blocks in ((early, (9, 5)), (late, (2, 5))):
        for name, held in zip(twice, blocks, strict=True):
            one.apply(name, 1, InstanceStarted(epoch=Epoch(1), pools=POOLS))
            one.apply(name, 1, BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=chain(1, held)))
            one.router.add(one.candidates, name)
            one.hear(name, 0, 1e3)
    answer = joined.lookup(SPACE, chain(1, 10))
    assert [(one.instance, one.depth) for one in answer.instances] == list(zip(twice, (9, 5), strict=True))
    ranked = joined.route(SPACE, chain(1, 10), 160).ranked
    assert [(one.instance, one.depth) for one in ranked] == list(zip(twice, (9, 5), strict=True))


def test_a_catalog_that_is_away_is_an_error_to_those_that_need_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    there, away = in_part(cluster, 0)[0], in_part(cluster, 1)[0]
    for name in (there, away):
        cluster.start(name)
        for part in cluster.of(name):
            part.apply(name, 1, BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=chain(1, 3)))
    monkeypatch.setattr(kvbm.locate.parts, "_PARTS_KEPT_S", 0.0)
    assert len(cluster.joined.lookup(SPACE, chain(1, 3)).instances) == 2
    cluster.parts[1].is_away = True
    found = cluster.joined.lookup(SPACE, chain(1, 3), instances=[there])
    assert [one.instance for one in found.instances] == [there]
    for names in (None, [away], [there, away]):
        with pytest.raises(CatalogError, match=f"{cluster.parts[1].url} is away"):
            cluster.joined.lookup(SPACE, chain(1, 3), instances=names)
    with pytest.raises(CatalogError, match="is away"):  # what it follows was never known
        PartedCatalog([part.url for part in cluster.parts]).lookup(SPACE, chain(1, 3), instances=[there])


def test_a_position_is_waited_for_where_its_instance_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    asked, waited = in_part(cluster, 0)[0], in_part(cluster, 1)[0]
    for name in (asked, waited):
        cluster.start(name)
        for part in cluster.of(name):
            part.apply(name, 1, BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=chain(1, 3)))
    wanted = PositionWanted(instance=waited, epoch=1, offset=2)
    found = cluster.joined.lookup(SPACE, chain(1, 3), [wanted], instances=[asked])
    assert [one.instance for one in found.instances] == [asked]
    assert (cluster.parts[0].positions, cluster.parts[1].positions) == ([], [wanted])


def test_a_question_behind_many_others_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbm.locate.parts, "_ASKED_AT_ONCE", 1)
    monkeypatch.setattr(kvbm.locate.parts, "_LATE_S", 0.05)
    cluster = Cluster(random.Random(3), monkeypatch)
    cluster.joined.ready()
    cluster.joined.lookup(SPACE, chain(1, 3))
    over = threading.Event()
    for part in cluster.parts[1:]:
        part.holds = over
    try:
        for _ in range(3):
            with pytest.raises(CatalogError, match="ask fewer questions at a time"):
                cluster.joined.lookup(SPACE, chain(1, 3), timeout_s=0.05)
    finally:
        over.set()
    cluster.joined.close()


def test_none_of_several_prompts_is_remembered_where_one_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    cluster.start(NAMES[0])
    assert len(cluster.joined.route_many(SPACE, [chain(1, 3)], [48])) == 1
    for part in cluster.parts:
        part.routes.clear()
    for prompts, tokens in (
        ([chain(1, 3), b"short"], [48, 7]),
        ([chain(1, 3)] * 2, [48, -1]),
        ([chain(1, 3)] * 65, [48] * 65),
        ([], []),
    ):
        with pytest.raises(ArgumentError):
            cluster.joined.route_many(SPACE, prompts, tokens)
    assert not any(part.routes for part in cluster.parts)


def test_an_instance_is_forgotten_and_a_checkpoint_fetched_where_its_parts_are_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    name = in_part(cluster, 1)[0]
    cluster.joined.forget(name)
    assert cluster.joined.fetch_checkpoint(tmp_path, cluster.parts[0].parts)
    assert not cluster.joined.fetch_checkpoint(tmp_path, ALL_PARTS)
    assert [part.told for part in cluster.parts[:2]] == [[tmp_path], [name]]


def test_where_nobody_serves_is_an_error_as_of_one_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(random.Random(3), monkeypatch)
    with pytest.raises(CatalogRefusedError) as raised:
        cluster.joined.route(SPACE, b"", 7)
    assert (raised.value.status, raised.value.code) == (503, "no_instance")
    cast(Any, cluster.joined).close()


def peer_of(name: str, depth: int, distance: int) -> PeerHolding:
    return PeerHolding(
        instance=name, depth=depth, tiers={"HOST": depth}, distance=distance, suspect=False, lends={"tcp": "a:1"}
    )


def test_what_can_be_read_of_several_parts_is_the_nearest_of_all_and_the_deepest() -> None:
    here = FindAnswer(
        namespace=SPACE.hex(),
        blocks=9,
        pools=[PoolHolding(pool="s3", depth=2), PoolHolding(pool="az", depth=7)],
        peers=[peer_of("a", 2, 0), peer_of("b", 3, 2), peer_of("twice", 1, 1)],
    )
    there = FindAnswer(
        namespace=SPACE.hex(),
        blocks=9,
        pools=[PoolHolding(pool="s3", depth=5)],
        view_age_s=3.0,
        peers=[peer_of("c", 2, 1), peer_of("deep", 9, 3), peer_of("twice", 1, 1)],
    )
    joined = joined_finds([here, there], 4)
    assert [(one.pool, one.depth) for one in joined.pools] == [("az", 7), ("s3", 5)]
    assert [one.instance for one in joined.peers] == ["a", "c", "twice", "deep"]
    assert (joined.view_age_s, joined.blocks) == (3.0, 9)
    assert [one.instance for one in joined_finds([here], 2).peers] == ["a", "b"]


def test_what_no_part_has_is_missed_for_the_reason_that_tells_most_and_for_none_where_a_part_holds_it() -> None:
    held = FindAnswer(namespace=SPACE.hex(), blocks=9, pools=[], peers=[])  # by an instance that does not lend it
    unknown = msgspec.structs.replace(held, missed=missed("namespace_unknown"))
    new = msgspec.structs.replace(held, missed=missed("not_held"))
    found = msgspec.structs.replace(held, peers=[peer_of("a", 2, 0)])
    assert joined_finds([unknown, new], 4).missed == new.missed
    assert joined_finds([unknown, unknown], 4).missed == unknown.missed
    for other in (held, found):
        assert joined_finds([new, other], 4).missed is msgspec.UNSET
