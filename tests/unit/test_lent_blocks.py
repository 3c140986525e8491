"""What a route is told of blocks that instances lend, and who is told to be one that reads them."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm.catalog.index.lenders import Lenders
from kvbm.catalog.index.lent_blocks import LentBlocks, deepest_first
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.router import ReadingInstance
from kvbm.core.answers import MAX_LABEL, MAX_LABELS, MOST_LENT, CandidateLoad, LentRun
from kvbm.core.events import BlocksCreated, InstanceStarted, PoolStated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, Offset, Tier
from kvbm.core.peer_address import HOST_ALONE, PeerAddress
from kvbm.streams.base import Heartbeat
from tests.indexes import Twin, each_twin, frame_bytes

SPACE = Namespace(model="m", block_tokens=16).id
HASHES = b"".join(bytes([number]) * HASH_BYTES for number in range(1, 21))
POOLS = (PoolStated(Tier.HBM, 64, 7), PoolStated(Tier.HOST, 64, 9), PoolStated(Tier.NVME, 64, 9))
HERE = PeerAddress("machine", "/run/kvbm.sock", "10.0.0.1:9000").words()


class Site:
    """Instances whose word is taken for it."""

    def __init__(self, twin: Twin, is_part: bool = False) -> None:
        self.index = twin.index()
        self.dead: set[InstanceId] = set()
        self.pools: dict[InstanceId, tuple[PoolStated, ...]] = {}
        self.places: dict[InstanceId, tuple[str, ...]] = {}
        self.told: list[tuple[InstanceId, ReadingInstance | None]] = []
        self.lenders = Lenders(self, lambda one: self.places.get(one, ()))
        self.lent = LentBlocks(
            self.index,
            lambda *told: self.told.append(told),
            self,
            self.lenders,
            lambda one: self.pools.get(one, ()),
            is_part,
        )

    def is_live(self, instance: InstanceId) -> bool:
        return instance not in self.dead

    def add(self, name: str, words: dict[str, str] = HERE, pools: Any = POOLS, **held: range) -> InstanceId:
        """An instance that holds blocks in tiers."""
        instance = InstanceId(name)
        self.pools[instance] = pools
        self.index.apply(frame_bytes(instance, InstanceStarted(epoch=Epoch(1), pools=POOLS)))
        for tier, blocks in held.items():
            hashes = HASHES[blocks.start * HASH_BYTES : blocks.stop * HASH_BYTES]
            self.index.apply(frame_bytes(instance, BlocksCreated(namespace=SPACE, tier=Tier[tier], hashes=hashes)))
        self.hear(instance, words)
        return instance

    def hear(self, instance: InstanceId, words: dict[str, str]) -> None:
        beat = Heartbeat(
            instance=instance, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=0, lends=words
        )
        for one in (self.lenders, self.lent):
            one.hear(instance, LastHeartbeat(beat, 0.0))

    def runs(self) -> list[tuple[str, int, int]]:
        return [(one.instance, one.begin, one.end) for one in self.lent.runs(SPACE, HASHES, lambda _: True)]


@each_twin
def test_a_run_may_begin_anywhere_and_hbm_is_not_lent(twin: Twin) -> None:
    site = Site(twin)
    site.add("whole", HBM=range(9), HOST=range(9))
    site.add("tail", HBM=range(4), HOST=range(3, 7), NVME=range(7, 12))
    site.add("hot", HBM=range(12))
    site.add("silent", words={}, HOST=range(12))
    assert site.runs() == [("tail", 3, 12), ("whole", 0, 9)]


@each_twin
def test_hashes_that_repeat_begin_many_runs_of_which_the_longest_count(twin: Twin) -> None:
    site = Site(twin)
    for number in range(12):
        site.add(f"lends-{number:02}", HOST=range(1))
    site.add("other", words={}, HOST=range(1, 2))
    two = HASHES[: 2 * HASH_BYTES] * 1000
    runs = site.lent.runs(SPACE, two + HASHES[:HASH_BYTES], lambda _: True)
    assert [(one.begin, one.end) for one in runs] == [(0, 1)] * 12


@each_twin
def test_of_what_lies_in_nvme_nothing_is_named_where_host_alone_is_lent(twin: Twin) -> None:
    site = Site(twin)
    site.add("cold", words=HERE | HOST_ALONE, HOST=range(3), NVME=range(9))
    assert site.runs() == [("cold", 0, 3)]


@each_twin
def test_behind_a_block_that_nobody_holds_only_a_catalog_of_parts_looks(twin: Twin) -> None:
    for is_part, runs in ((False, []), (True, [("far", 5, 9)])):
        site = Site(twin, is_part)
        site.add("far", HOST=range(5, 9))
        site.add("near", words={}, HBM=range(4))
        assert site.runs() == runs


@each_twin
def test_the_dead_the_unknown_and_those_who_stopped_lending_are_not_named(twin: Twin) -> None:
    site = Site(twin)
    a, b = site.add("a", HOST=range(3)), site.add("b", HOST=range(3))
    site.dead.add(a)
    assert site.runs() == [("b", 0, 3)]
    assert site.lent.runs(SPACE, HASHES, lambda one: one != b) == []
    site.hear(b, {})
    assert site.runs() == []
    assert site.told[-1] == (b, None)
    site.dead.clear()
    site.lent.forget(a)
    assert site.runs() == []
    site.hear(a, HERE)
    assert site.runs() == [("a", 0, 3)]


@each_twin
def test_who_lends_reads_by_the_same_ways_with_the_bytes_that_its_start_declared(twin: Twin) -> None:
    site = Site(twin)
    site.places[InstanceId("a")] = ("z" * 500, *"r" * 40)
    site.add("a", pools=(PoolStated(Tier.HOST, 4, 9), PoolStated(Tier.HBM, 4, 0)))
    site.add("b", words={"host": "machine", "unix": "/s"}, pools=())
    site.add("c", words={"tcp": "10.0.0.2:1"}, pools=(PoolStated(Tier.HBM, 4, 1 << 60),))
    place = ("z" * MAX_LABEL, *"r" * (MAX_LABELS - 1))
    assert site.told == [
        ("a", ReadingInstance(place, "machine", True, 9)),
        ("b", ReadingInstance((), "machine", False, 0)),
        ("c", ReadingInstance((), "", True, 1 << 40)),
    ]
    for name in "abc":
        site.hear(
            InstanceId(name),
            {"tcp": "10.0.0.2:1"} if name == "c" else HERE if name == "a" else {"host": "machine", "unix": "/s"},
        )
    assert len(site.told) == 3  # nothing new


@each_twin
def test_what_other_catalogs_instances_lend_counts_where_somebody_reads(twin: Twin) -> None:
    site = Site(twin)
    other = LentRun(instance="other", begin=0, end=15, tcp=True)
    assert site.lent.priced(0.0, [], [other]) is None
    site.add("a", HOST=range(3))
    own = site.lent.runs(SPACE, HASHES, lambda _: True)
    beyond = LentRun(instance="beyond", begin=0, end=21)
    lent = site.lent.priced(0.0, own, [other, beyond, LentRun(instance="a", begin=0, end=20)], 20)
    assert lent is not None
    assert [(one.instance, one.end) for one in lent.runs] == [("other", 15), ("a", 3)]
    assert site.lent.priced(0.0, [], []) is None


@each_twin
def test_of_very_many_the_deepest_are_named(twin: Twin) -> None:
    site = Site(twin)
    for number in range(40):
        site.add(f"i-{number:02}", HOST=range(1 + number % 20))
    assert [end for _, _, end in site.runs()] == sorted([1 + number % 20 for number in range(40)])[::-1][:MOST_LENT]
    runs = site.lent.runs(SPACE, HASHES, lambda _: True)
    assert deepest_first(reversed(runs)) == runs
    CandidateLoad(least_s=0.0, recent_s=0.0, candidates=1, lent=tuple(runs))


@pytest.mark.parametrize("words", [{}, {"host": "h"}])
def test_while_nobody_lends_the_index_is_not_asked(words: dict[str, str]) -> None:
    site = Site(Twin(_Deaf, lambda *_: []))  # type: ignore[arg-type]
    site.hear(InstanceId("a"), words)
    assert site.runs() == []


class _Deaf:
    def __init__(self, capacity: int) -> None:
        pass
