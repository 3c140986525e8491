"""What a route costs where blocks can be read from other instances: by numbers one can check by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.peer_links import PeerLinks
from kvbm.catalog.routing.router import LentPrefix, ReadingInstance, RoutingTask
from kvbm.config import RoutingSettings
from kvbm.core.answers import LentRun, RankedInstance
from kvbm.core.events import BlocksCreated, InstanceStarted, PoolStated
from kvbm.core.fetching import MEMORY_LINK, TCP_LINKS
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, Reach, Tier
from kvbm.core.topology import TIER_LINKS
from kvbm.streams.base import Heartbeat
from tests.indexes import Twin, each_twin, frame_bytes

A, B = InstanceId("a"), InstanceId("b")
SPACE = Namespace(model="m", block_tokens=100).id
BYTES = 1 << 20
POOLS = (PoolStated(Tier.HBM, 100, BYTES), PoolStated(Tier.OBJECT, 0, BYTES, Reach.CLUSTER, "pool"))
PLACE = ("z", "r", "h")


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def run(end: int, begin: int = 0, instance: str = "peer", **more: object) -> LentRun:
    given: dict[str, Any] = {"place": ("z", "r", "g"), "tcp": True} | more
    return LentRun(instance=instance, begin=begin, end=end, **given)


def reader(size: int = BYTES, host: str = "", tcp: bool = True) -> ReadingInstance:
    return ReadingInstance(PLACE, host, tcp, size)


class Cluster:
    """Two instances, of which A may read."""

    def __init__(
        self, twin: Twin, reads: ReadingInstance | None = None, prefill_tokens_per_s: float = 10_000.0
    ) -> None:
        self.index = twin.index()
        self.router = self.index.router(RoutingSettings(prefill_tokens_per_s=prefill_tokens_per_s))
        self.candidates = self.router.candidates()
        for instance in (A, B):
            self.index.apply(frame_bytes(instance, InstanceStarted(epoch=Epoch(1), pools=POOLS)))
            self.router.add(self.candidates, instance)
            self.hear(instance, 0)
        self.router.reads(A, reads)

    def hear(self, instance: InstanceId, queued: int) -> None:
        heartbeat = Heartbeat(
            instance=instance, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=0, queued_tokens=queued
        )
        self.router.hear(instance, LastHeartbeat(heartbeat, 0.0))

    def hold(self, instance: InstanceId, *numbers: int) -> None:
        created = BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=hashes(*numbers))
        self.index.apply(frame_bytes(instance, created))

    def of_a(self, *runs: LentRun, blocks: int = 10, phase: str = "both") -> RankedInstance:
        task = RoutingTask(SPACE, hashes(*range(1, blocks + 1)), 100 * blocks, 100, phase=phase)
        ranking = self.router.route(
            0.0, task, [self.candidates], None, 2, False, None, LentPrefix(runs, *PeerLinks().table(0.0))
        )
        for one in ranking.best:
            assert one.cost_s == pytest.approx(one.queueing_s + one.recompute_s + one.balance_s + one.fetch_s)
            assert one.instance == A or not one.peer
        return next(one for one in ranking.best if one.instance == A)


@each_twin
def test_what_a_peer_lends_behind_its_own_blocks_is_priced_as_read(twin: Twin) -> None:
    cluster = Cluster(twin, reader())
    cluster.hold(A, 1, 2)
    found = cluster.of_a(run(8))
    assert (found.depth, found.missing_tokens, found.fetch_blocks) == (8, 200, 6)
    assert (found.peer, found.peer_blocks) == ("peer", 6)
    assert found.fetch_s == pytest.approx(TCP_LINKS[1].seconds(6 * BYTES))
    assert found.ttft_s == pytest.approx(found.fetch_s + 0.02)


@each_twin
def test_the_nearest_is_read_from_and_one_machine_has_memory(twin: Twin) -> None:
    cluster = Cluster(twin, reader(host="m"))
    far, near = run(8, instance="far", place=("y",)), run(8, instance="near")
    assert cluster.of_a(far, near).peer == "near"
    found = cluster.of_a(far, near, run(8, instance="same", host="m"))
    assert (found.peer, found.fetch_s) == ("same", pytest.approx(MEMORY_LINK.seconds(8 * BYTES)))
    assert cluster.of_a(far).fetch_s == pytest.approx(TCP_LINKS[3].seconds(8 * BYTES))


@each_twin
def test_the_deepest_is_among_the_four_that_are_looked_at(twin: Twin) -> None:
    cluster = Cluster(twin, reader())
    near = [run(3, instance=f"near-{number}") for number in range(6)]
    found = cluster.of_a(run(9, instance="deep", place=("z", "q")), *near)
    assert (found.depth, found.peer) == (9, "deep")


@each_twin
def test_nothing_is_read_that_cannot_be_or_of_which_no_size_is_known(twin: Twin) -> None:
    unread = [
        (reader(size=0), run(8)),
        (None, run(8)),
        (reader(tcp=False), run(8)),
        (reader(), run(8, tcp=False)),
        (reader(), run(8, begin=1)),
        (reader(), run(8, instance=A)),
        (reader(host=""), run(8, host="", tcp=False)),
    ]
    for reads, lent in unread:
        found = Cluster(twin, reads).of_a(lent)
        assert (found.depth, found.fetch_s, found.peer, found.peer_blocks) == (0, 0.0, "", 0)


@each_twin
def test_what_is_read_slower_than_computed_is_computed_however_long_others_wait(twin: Twin) -> None:
    cluster = Cluster(twin, reader(), prefill_tokens_per_s=300_000.0)  # 0.33 ms a block, and 0.52 ms to read it
    assert cluster.of_a(run(8)).depth == 0
    for instance in (A, B):
        cluster.hear(instance, 3_000_000)
    found = cluster.of_a(run(8))
    assert (found.depth, found.peer, found.missing_tokens) == (0, "", 1000)
    assert Cluster(twin, reader()).of_a(run(8)).depth == 8


@each_twin
def test_an_object_pool_goes_on_behind_what_peers_lend(twin: Twin) -> None:
    cluster = Cluster(twin, reader())
    cluster.index.claim("pool", SPACE, hashes(*range(1, 11)))
    found = cluster.of_a(run(4))
    assert (found.depth, found.fetch_blocks, found.peer_blocks, found.peer) == (10, 10, 4, "peer")
    alone_s = TIER_LINKS[Tier.OBJECT].seconds(6 * BYTES)
    assert found.fetch_s == pytest.approx(alone_s)  # the peer is through before
    assert cluster.of_a().fetch_s == pytest.approx(TIER_LINKS[Tier.OBJECT].seconds(10 * BYTES))


@each_twin
def test_a_prompt_that_is_only_decoded_is_brought_from_where_it_was_prefilled(twin: Twin) -> None:
    cluster = Cluster(twin, reader())
    with_peer, without = cluster.of_a(run(8), phase="decode"), cluster.of_a(phase="decode")
    assert with_peer == without
    assert with_peer.peer == ""


@each_twin
def test_a_long_prompt_is_read_from_several_at_once(twin: Twin) -> None:
    cluster = Cluster(twin, reader(host="m"))
    two = [run(2000, instance=name, host="m") for name in ("one", "two")]
    found = cluster.of_a(*two, blocks=2000)
    assert found.peer_blocks == 2000
    assert found.fetch_s < 0.6 * MEMORY_LINK.seconds(2000 * BYTES)


@each_twin
def test_who_has_the_prefix_in_hbm_still_gets_the_prompt(twin: Twin) -> None:
    cluster = Cluster(twin, reader())
    cluster.hold(B, *range(1, 11))
    task = RoutingTask(SPACE, hashes(*range(1, 11)), 1000, 100)
    lent = LentPrefix([run(10)], *PeerLinks().table(0.0))
    assert cluster.router.route(0.0, task, [cluster.candidates], None, 1, True, None, lent).best[0].instance == B
    for _ in range(5):
        cluster.hear(B, 50_000)  # 5 s of work
    best = cluster.router.route(0.0, task, [cluster.candidates], None, 1, True, None, lent).best[0]
    assert (best.instance, best.peer_blocks) == (A, 10)
