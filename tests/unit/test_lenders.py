"""Who lends, and who of them is named to an instance that asks: near, alive, not itself, and with the most blocks among
them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbm.assembly.native import NATIVE_INDEX
from kvbm.catalog.index.cluster_index import ClusterIndex
from kvbm.catalog.index.lenders import Lenders, WantedPeers
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.answers import PeerHolding
from kvbm.core.events import BlocksCreated, InstanceStarted, PoolStated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Reach, Tier
from kvbm.core.peer_address import HOST_ALONE, PeerAddress, address_of, nearest_and_deepest
from kvbm.core.topology import distance
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.streams.base import Heartbeat
from tests.indexes import frame_bytes

SPACE = NamespaceId(bytes(range(16)))
HASHES = b"".join(bytes([number]) * HASH_BYTES for number in range(1, 9))
POOLS = (PoolStated(Tier.HBM, 64, 1), PoolStated(Tier.HOST, 64, 1), PoolStated(Tier.NVME, 64, 1, Reach.POD))
HERE = PeerAddress("machine", "/run/kvbm.sock", "10.0.0.1:9000")


class Site:
    """Instances whose word is taken for it, in one of the two indexes."""

    def __init__(self, index: ClusterIndex) -> None:
        self.index = index
        self.dead: set[InstanceId] = set()
        self.places: dict[InstanceId, tuple[str, ...]] = {}
        self.lenders = Lenders(self, lambda one: self.places.get(one, ()))

    def is_live(self, instance: InstanceId) -> bool:
        return instance not in self.dead

    def add(
        self, name: str, place: str, hbm: int = 0, host: int = 0, words: dict[str, str] | None = None, nvme: int = 0
    ) -> InstanceId:
        """An instance with the first `hbm` blocks in HBM, the first `host` in HOST, and the first `nvme` in NVME."""
        instance = InstanceId(name)
        self.places[instance] = tuple(place.split("/")) if place else ()
        events: list[Any] = [InstanceStarted(epoch=Epoch(1), pools=POOLS)]
        for tier, blocks in ((Tier.HBM, hbm), (Tier.HOST, host), (Tier.NVME, nvme)):
            if blocks:
                events.append(BlocksCreated(namespace=SPACE, tier=tier, hashes=HASHES[: blocks * HASH_BYTES]))
        self.index.apply(frame_bytes(instance, *events, epoch=1))
        self.hear(instance, HERE.words() if words is None else words)
        return instance

    def hear(self, instance: InstanceId, words: dict[str, str], **more: Any) -> None:
        heartbeat = Heartbeat(
            instance=instance, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=0, lends=words, **more
        )
        self.lenders.hear(instance, LastHeartbeat(heartbeat, 0.0))

    def find(
        self, asker: str = "me", place: str = "a/1", first: int = 0, limit: int = 4, **more: Any
    ) -> list[PeerHolding]:
        wanted = WantedPeers(SPACE, HASHES[first * HASH_BYTES :], asker, place.split("/"), limit, more.get("only"))
        return self.lenders.find(self.index, wanted, more.get("may_know", lambda _: True))

    def names(self, **more: Any) -> list[tuple[str, int]]:
        return [(one.instance, one.depth) for one in self.find(**more)]


@pytest.fixture(params=["native", "reference"])
def site(request: pytest.FixtureRequest) -> Site:
    return Site(NATIVE_INDEX(100_000) if request.param == "native" else ReferenceIndex(100_000))


def test_a_block_in_hbm_does_not_hide_that_it_lies_in_host(site: Site) -> None:
    site.add("both", "a/1", hbm=4, host=3)
    site.add("hot", "a/1", hbm=8)
    (found,) = site.find()
    assert (found.instance, found.depth, found.tiers) == ("both", 3, {"HOST": 3})
    assert found.lends == HERE.words()
    assert site.names(first=2) == [("both", 1)]
    assert site.names(first=3) == site.names(first=99) == []


def test_who_lends_host_alone_is_named_for_what_lies_there(site: Site) -> None:
    words = HERE.words() | HOST_ALONE
    site.add("hosted", "a/1", host=4, nvme=4, words=words)
    site.add("cold", "a/1", host=2, nvme=6, words=words)
    site.add("open", "a/1", host=2, nvme=6)
    assert sorted(site.names()) == [("hosted", 4), ("open", 6)]


def test_the_nearest_come_first_and_the_deepest_is_among_them(site: Site) -> None:
    for number in range(6):
        site.add(f"near-{number}", "a/1", host=2)
    site.add("far", "b/1", host=8)
    site.add("next", "a/2", host=3)
    found = site.names()
    assert found[-1] == ("far", 8) and len(found) == 4 and {depth for _, depth in found[:3]} == {2}
    assert [one.distance for one in site.find()] == [0, 0, 0, 2]
    assert site.names(place="a/2")[0] == ("next", 3)
    assert site.names(limit=1) == [("far", 8)]


def test_who_asks_who_is_dead_and_who_lends_nothing_is_no_answer(site: Site) -> None:
    me, dead, quiet, stopping = (site.add(name, "a/1", host=4) for name in ("me", "dead", "quiet", "stopping"))
    site.dead.add(dead)
    site.hear(quiet, {})
    site.hear(stopping, HERE.words(), stopping=True)
    gone = site.add("gone", "a/1", host=4)
    site.lenders.forget(gone)
    assert site.names() == []
    assert [name for name, _ in site.names(asker="somebody")] == [me]
    site.hear(quiet, HERE.words())
    assert site.names() == [(quiet, 4)]
    assert site.names(only=[InstanceId("other")]) == site.names(may_know=lambda one: one != quiet) == []


def test_who_is_asked_about_by_name_and_lends_is_told_before_it_holds_anything(site: Site) -> None:
    soon, dead, quiet = (site.add(name, "a/2") for name in ("soon", "dead", "quiet"))
    holder = site.add("holder", "a/1", host=4)
    site.dead.add(dead)
    site.hear(quiet, {})
    assert site.names() == [(holder, 4)]
    assert site.names(only=[soon, dead, quiet, InstanceId("nobody")]) == [(soon, 0)]
    assert site.names(only=[soon, holder]) == [(holder, 4), (soon, 0)]
    (found,) = site.find(only=[soon])
    assert (found.lends, found.tiers, found.distance) == (HERE.words(), {}, 1)
    assert site.names(only=[soon], asker=soon) == site.names(only=[soon], may_know=lambda _: False) == []


def test_of_very_many_holders_near_ones_are_found(site: Site) -> None:
    for number in range(400):
        site.add(f"far-{number}", "b/1", host=4)
    site.add("near", "a/1", host=4)
    assert site.names()[0] == ("near", 4)
    assert [one.distance for one in site.find()] == [0, 2, 2, 2]


def test_what_a_stranger_writes_of_where_it_lends_is_bounded(site: Site) -> None:
    wrong = [
        {"tcp": "x" * 301},
        {"unix": "/s"},
        {"host": "h", "unix": "/s\n"},
        {"host": "h"},
        {"rdma": "gid"},
        {"host": "h\0", "unix": "/s"},
    ]
    with capture_logs() as logs:
        for number, words in enumerate(wrong):
            assert address_of(words) is None
            name = site.add(f"wrong-{number}", "a/1", host=1, words=words)
            site.hear(name, words)  # no second warning
    assert site.names() == []
    assert [one["event"] for one in logs] == ["lender.refused"] * len(wrong)
    assert address_of({**HERE.words(), "nixl": "agent"}) == HERE
    assert address_of({"host": "h", "tcp": "a:1", "rdma": "rxe0 fe80"}) == PeerAddress("h", "", "a:1", "rxe0 fe80")
    assert address_of({"tcp": "a:1", "nixl": "UCX"}) == PeerAddress("", "", "a:1", "", "UCX")
    assert address_of({"tcp": "a:1", "nixl": "another"}) == PeerAddress("", "", "a:1"), "a way that is not known"
    assert address_of({"host": "h", "unix": "/s", "nixl": "UCX"}) == PeerAddress("h", "/s"), "it is reached by tcp"
    assert address_of({"host": "h", "unix": "/s", "rdma": "rxe0"}) == PeerAddress("h", "/s"), "it is reached by tcp"
    assert address_of({"host": "h", "unix": "/s\n", "tcp": "a:1"}) == PeerAddress("h", "", "a:1")


def test_distance_counts_the_labels_up_to_the_outermost_that_differs() -> None:
    assert distance(("z", "r", "h"), ("z", "r", "h")) == distance((), ()) == 0
    assert distance(("z", "r", "h"), ("z", "r", "g")) == 1
    assert distance(("z", "r", "h"), ("y", "r", "h")) == 3
    assert distance(("z", "r"), ()) == 2


def test_of_any_peers_the_best_are_chosen() -> None:
    dice = random.Random(7)
    for _ in range(300):
        peers = [
            PeerHolding(
                instance=f"i-{n}",
                depth=dice.randint(1, 9),
                tiers={},
                distance=dice.randint(0, 3),
                suspect=False,
                lends={},
            )
            for n in range(dice.randint(0, 9))
        ]
        chosen = nearest_and_deepest(peers, 4)
        assert len(chosen) == min(4, len(peers)) and len({one.instance for one in chosen}) == len(chosen)
        if peers:
            assert max(one.depth for one in chosen) == max(one.depth for one in peers)
            assert min(one.distance for one in chosen) == min(one.distance for one in peers) or len(chosen) == 1
