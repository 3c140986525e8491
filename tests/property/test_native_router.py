"""The native router is the readable one, to the last bit; the best of a ranking are its beginning."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from kvbm.catalog.index.lent_blocks import deepest_first
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.marks import marked_depths
from kvbm.catalog.routing.peer_links import PeerLinks
from kvbm.catalog.routing.router import (
    CandidateNumbers,
    LentPrefix,
    Ranking,
    ReadingInstance,
    Router,
    RoutingTask,
    SharedRoute,
)
from kvbm.config import RoutingSettings, TierWeightSettings
from kvbm.core.answers import LentRun
from kvbm.core.events import BlocksCreated, BlocksEvicted, EvictReason, InstanceStarted, PoolStated
from kvbm.core.fetching import Transfer
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, Reach, Tier
from kvbm.streams.base import Heartbeat
from tests.indexes import NATIVE, REFERENCE, frame_bytes

SPACE = Namespace(model="m", block_tokens=16).id
OTHER = Namespace(model="n", block_tokens=16).id
NAMES = [InstanceId(f"i-{number}") for number in range(40)]
POOLS = (
    PoolStated(Tier.HBM, 1000, 1 << 20),
    PoolStated(Tier.HOST, 1000, 1 << 20),
    PoolStated(Tier.NVME, 0, 0),  # of a size that nobody has said
    PoolStated(Tier.OBJECT, 0, 1 << 20, Reach.CLUSTER, "pool"),
)
ALL = 1000


def chain(family: int, first: int, end: int) -> bytes:
    return b"".join(random.Random(family * 10_000 + number).randbytes(16) for number in range(first, end))


def numbers_of(pick: random.Random, group: type[msgspec.Struct]) -> dict[str, float]:
    """Each number of a table of settings, near its default."""
    fields = [field for field in msgspec.structs.fields(group) if isinstance(field.default, float)]
    return {field.name: field.default * pick.choice([0.3, 1.0, 3.0]) for field in fields}


class Both:
    """An index and its router of each language, told the same."""

    def __init__(self, pick: random.Random) -> None:
        settings = RoutingSettings(
            tier_weights=TierWeightSettings(**numbers_of(pick, TierWeightSettings)),
            **numbers_of(pick, RoutingSettings) | {"hold_s": pick.choice([1.0, 30.0]), "half_life_s": 20.0},
        )
        self.indexes = [twin.index() for twin in (REFERENCE, NATIVE)]
        self.routers: list[Router[Any]] = [index.router(settings) for index in self.indexes]
        self.groups: list[list[Any]] = [[router.candidates() for _ in range(3)] for router in self.routers]
        self.epochs = dict.fromkeys(NAMES, 0)

    def apply(self, instance: InstanceId, *events: Any) -> None:
        data = frame_bytes(instance, *events, epoch=self.epochs[instance])
        for index in self.indexes:
            index.apply(data)

    def start(self, instance: InstanceId) -> None:
        self.epochs[instance] += 1
        self.apply(instance, InstanceStarted(epoch=Epoch(self.epochs[instance]), pools=POOLS))

    def rankings(
        self,
        now_s: float,
        task: RoutingTask,
        serving: list[int],
        visible: list[int] | None,
        limit: int,
        noted: bool = True,
        elsewhere: CandidateNumbers | None = None,
        lent: LentPrefix | None = None,
    ) -> list[Ranking]:
        return [
            router.route(
                now_s,
                task,
                [groups[at] for at in serving],
                None if visible is None else [groups[at] for at in visible],
                limit,
                noted,
                elsewhere,
                lent,
            )
            for router, groups in zip(self.routers, self.groups, strict=True)
        ]

    def reads(self, instance: InstanceId, reader: ReadingInstance | None) -> None:
        for router in self.routers:
            router.reads(instance, reader)

    def take(self, now_s: float, route: SharedRoute) -> None:
        readable, native = (router.take(now_s, route) for router in self.routers)
        assert native == readable


def shared_route(pick: random.Random, instance: InstanceId, family: int) -> SharedRoute:
    """What another catalog tells; sometimes more or fewer hashes than it should have."""
    blocks, first = pick.choice([0, 1, 30, 60, 300, 1000]), pick.choice([0, 1, 7, 30, 290, 2000])
    whole = chain(family, 0, blocks)
    hashes = b"".join(whole[16 * depth - 16 : 16 * depth] for depth in marked_depths(first, blocks).tolist())
    return SharedRoute(
        pick.choice(["", "router", "other"]),
        pick.random() < 0.3,
        instance,
        pick.choice([0, 900, 10**7, 10**30]),
        pick.choice([0, 900, 10**7, -3]),
        pick.choice([SPACE, SPACE, OTHER]),
        first,
        blocks,
        hashes + pick.choice([b"", b"", b"", bytes(16)]),
    )


def lent_of(pick: random.Random) -> LentPrefix | None:
    """What some instances lend of any prompt, which may be more or less than they hold, at any speed."""
    if pick.random() < 0.4:
        return None
    runs = []
    for name in pick.sample(NAMES, pick.choice([1, 3, 9, 16])):
        begin = pick.choice([0, 0, 3, 20])
        runs.append(
            LentRun(
                instance=pick.choice([name, name, "a stranger " + name]),
                begin=begin,
                end=begin + pick.choice([1, 7, 30, 60, 3000]),
                place=place_of(pick),
                host=pick.choice(["", "h1", "h2"]),
                tcp=pick.random() < 0.7,
            )
        )
    links = PeerLinks()
    for _ in range(pick.choice([0, 30])):
        took_us = pick.choice([0, 1, 500, 10**7])
        links.measured(
            1.0,
            Transfer(
                pick.choice(["memory", "tcp", "rdma", "nixl"]),
                pick.randrange(10),
                pick.choice([0, 1 << 20, 1 << 40]),
                took_us,
            ),
        )
    return LentPrefix(deepest_first(runs), *links.table(1.0))


def place_of(pick: random.Random) -> tuple[str, ...]:
    labels = (pick.choice(["zone-a", "zone-b"]), pick.choice(["rack-1", "rack-2"]), pick.choice(["host-1", "host-2"]))
    return labels[: pick.choice([0, 2, 3, 3])]


def reader_of(pick: random.Random) -> ReadingInstance | None:
    sizes = [0, 1, 1 << 20, 1 << 20, 1 << 40]
    reader = ReadingInstance(place_of(pick), pick.choice(["", "h1", "h2"]), pick.random() < 0.7, pick.choice(sizes))
    return reader if pick.random() < 0.9 else None


def step(both: Both, pick: random.Random, now_s: float) -> None:
    """Something happens in the cluster."""
    instance, family = pick.choice(NAMES), pick.randrange(4)
    match pick.randrange(10):
        case 0:
            both.start(instance)
        case 1 | 2 if both.epochs[instance]:
            tier = pick.choice([Tier.HBM, Tier.HOST, Tier.NVME])
            created = BlocksCreated(namespace=SPACE, tier=tier, hashes=chain(family, 0, pick.randrange(1, 40)))
            both.apply(instance, created)
        case 3 if both.epochs[instance]:
            gone = BlocksEvicted(
                namespace=SPACE,
                tier=Tier.HBM,
                reason=EvictReason.CAPACITY,
                hashes=chain(family, pick.randrange(20), 21),
            )
            both.apply(instance, gone)
        case 4:
            first = pick.randrange(30)
            claimed = chain(family, first, first + pick.randrange(1, 20))
            for index in both.indexes:
                index.claim("pool", SPACE, claimed)
        case 5 | 6:
            heartbeat = Heartbeat(
                instance=instance,
                cluster="c",
                epoch=Epoch(1),
                published=Offset(0),
                wall_time_ns=0,
                queued_tokens=pick.choice([0, 100, 40_000, 300_000, 10**30, -5]),
                running_requests=pick.choice([0, 3, 64, 10**25]),
                prefill_tokens_per_s=pick.choice([0.0, 1e3, 2.5e4, 1e9, math.nan, math.inf, -1.0]),
                queue_tokens_per_s=pick.choice([0.0, 1e3, 2.5e4, 1e9]),
            )
            for router in both.routers:
                router.hear(instance, LastHeartbeat(heartbeat, now_s))
        case 7:
            group, is_added = pick.randrange(3), pick.random() < 0.8
            for router, groups in zip(both.routers, both.groups, strict=True):
                (router.add if is_added else router.remove)(groups[group], instance)
        case 9:
            both.take(now_s - pick.choice([0.0, 0.004, 0.9]), shared_route(pick, instance, family))
        case 8 if pick.random() < 0.2:
            for router, groups in zip(both.routers, both.groups, strict=True):
                for one in groups:
                    router.remove(one, instance)
                router.forget(instance)
            if pick.random() < 0.5:
                for index in both.indexes:
                    index.drop(instance)


def task_of(pick: random.Random) -> RoutingTask:
    blocks = pick.choice([0, 1, 5, 30, 60])
    return RoutingTask(
        pick.choice([SPACE, SPACE, SPACE, OTHER]),
        chain(pick.randrange(4), 0, blocks),
        blocks * 16 + pick.choice([0, 7, 10**9]),
        16,
        pick.choice(["", "router", "other"]),
        pick.choice(["standard", "standard", "interactive", "batch"]),
        pick.choice([None, None, 0.5, 20.0]),
        pick.choice(["both", "prefill", "decode"]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_both_rank_alike(seed: int) -> None:
    pick = random.Random(seed)
    both, now_s, routes, fetched = Both(pick), 100.0, 0, 0
    for instance in NAMES[: pick.choice([3, 20, 40])]:
        both.start(instance)
        for router, groups in zip(both.routers, both.groups, strict=True):
            router.add(groups[0], instance)
        both.reads(instance, reader_of(pick))
    for _ in range(400):
        now_s += pick.choice([0.0, 0.01, 0.3, 7.0])
        step(both, pick, now_s)
        if pick.random() < 0.1:
            both.reads(pick.choice(NAMES), reader_of(pick))
        if pick.random() < 0.4:
            serving, visible = pick.choice([[0], [0, 1], [2, 1, 0]]), pick.choice([None, None, [1], [0, 2]])
            others = pick.choice(
                [
                    None,
                    None,
                    CandidateNumbers(pick.random(), pick.random(), 0),
                    CandidateNumbers(pick.random(), pick.random(), 7),
                ]
            )
            readable, native = both.rankings(
                now_s, task_of(pick), serving, visible, pick.choice([1, 8, ALL]), elsewhere=others, lent=lent_of(pick)
            )
            assert native == readable
            routes += bool(native.best)
            fetched += sum(one.peer_blocks > 0 for one in native.best)
            assert all((one.peer_blocks > 0) == bool(one.peer) for one in native.best)
            assert all(one.peer_blocks <= one.fetch_blocks for one in native.best)
    assert routes > 20
    assert fetched > 5


@pytest.mark.parametrize("seed", range(5))
def test_the_best_are_the_beginning_of_the_whole_ranking(seed: int) -> None:
    pick = random.Random(seed)
    both, now_s = Both(pick), 100.0
    for instance in NAMES:
        both.start(instance)
        for router, groups in zip(both.routers, both.groups, strict=True):
            router.add(groups[0], instance)
    for _ in range(100):
        now_s += 0.1
        step(both, pick, now_s)
        task = task_of(pick)
        whole = both.rankings(now_s, task, [0], None, ALL, noted=False)[1]
        assert whole.more == 0
        costs = [(not one.admitted, one.cost_s) for one in whole.best]
        assert costs == sorted(costs)
        for limit in (1, 3, 8):
            assert both.rankings(now_s, task, [0], None, limit, noted=False)[1] == Ranking(
                whole.best[:limit], max(0, len(whole.best) - limit), whole.together
            )
        both.rankings(now_s, task, [0], None, 1)
