"""Whoever begins with what the catalog answers and applies its feed has the catalog's view at the end, whatever happens
meanwhile.

Random workloads from a seed: blocks come, go, move and are claimed; snapshots are taken, events lost, instances
restarted, stopped, killed and forgotten; the client's connection ends at random, and the catalog is restarted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import LimitSettings
from kvbm.core.backend import REFERENCE
from kvbm.core.events import EvictReason
from kvbm.core.ids import Tier
from kvbm.core.watch_events import Missed
from kvbm.locate.http import CatalogClient
from kvbm.locate.watched_blocks import WatchedBlocks
from kvbm.locate.watching import CatalogWatch
from kvbm.reference.cluster_index import ReferenceIndex
from tests.catalog_site import SPACE, is_forgotten
from tests.eventually import eventually
from tests.held_time import hold_catalogs
from tests.members import UNIVERSE, Member, step
from tests.nats_fixture import WAIT_S, cluster, nats_url  # noqa: F401

STEPS = 60


class Follower:
    """A client: asks once, then applies the feed; asks again where something was missed.

    Attributes:
        missed: what it was told it has missed.
    """

    def __init__(self, url: str) -> None:
        self.missed: list[Missed] = []
        self.blocks = WatchedBlocks()
        self.client = CatalogClient(url, timeout_s=WAIT_S)
        self.watch: CatalogWatch = self.client.watch(SPACE)
        assert eventually(lambda: self.take() and self.watch.position)
        self.ask()

    def ask(self) -> None:
        for block in UNIVERSE:
            for holder in self.client.block(SPACE, block).holders:
                self.blocks.add(holder.name, holder.kind == "pool", holder.tier, SPACE.id.hex(), block.hex())

    def take(self) -> bool:
        """Apply what has come; whether anything has."""
        has_come = False
        while (event := self.watch.next_event(0.05)) is not None:
            has_come = True
            if self.blocks.apply(event):
                assert isinstance(event, Missed)
                self.missed.append(event)
                self.ask()
        return has_come

    def connect_again(self) -> None:
        position = self.watch.position
        self.watch.close()
        self.watch = self.client.watch(SPACE, after=position)

    def move(self, url: str) -> None:
        """To another catalog, or the same at another address."""
        position = self.watch.position
        self.close()
        self.client = CatalogClient(url, timeout_s=WAIT_S)
        self.watch = self.client.watch(SPACE, after=position)

    def agrees(self) -> bool:
        self.take()
        return not self.difference()

    def difference(self) -> list[str]:
        found = []
        for block in UNIVERSE:
            holders = self.client.block(SPACE, block).holders
            told = {(one.name, one.tier) for one in holders if one.kind == "instance"}
            pools = {one.name for one in holders if one.kind == "pool"}
            seen = set(self.blocks.holders(SPACE.id.hex(), block.hex()))
            seen_pools = set(self.blocks.pools(SPACE.id.hex(), block.hex()))
            if told != seen or pools != seen_pools:
                found.append(
                    f"{block.hex()[:4]}: answers {sorted(told | {(p, '') for p in pools})}, "
                    f"feed {sorted(seen | {(p, '') for p in seen_pools})}"
                )
        suspect = {one.instance for one in self.client.instances() if one.suspect}
        seen_suspect = {one.instance for one in self.client.instances() if self.blocks.is_suspect(one.instance)}
        return found + ([f"suspect {suspect}, feed {seen_suspect}"] if suspect != seen_suspect else [])

    def close(self) -> None:
        self.watch.close()
        self.client.close()


@contextmanager
def catalog(settings: ServiceSettings, native: bool) -> Iterator[str]:
    with CatalogThread(settings, *((NATIVE, NATIVE_INDEX) if native else (REFERENCE, ReferenceIndex))) as thread:
        with_it = CatalogClient(thread.url, timeout_s=WAIT_S)
        with_it.wait_ready(WAIT_S)
        with_it.close()
        yield thread.url


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_lookup_and_its_feed_are_the_lookup_at_the_end(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    seed: int,
    native: bool,
) -> None:
    chance = random.Random(seed)
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=sqlite_url,
        cluster=cluster,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        liveness_s=1.0,
        ask_again_s=0.5,
        whole_wait_s=0.1,
        limits=LimitSettings(watch_bytes=chance.choice([1 << 16, 16 << 20])),
    )
    members = [Member(nats_url, cluster, f"i{at}") for at in range(3)]
    dead: set[str] = set()
    with catalog(settings, native) as url:
        for member in members:
            member.act(chance)
            member.publish()
        follower = Follower(url)
        for _ in range(STEPS):
            step(chance, members, dead, follower.client)
            if chance.random() < 0.15:
                follower.connect_again()
            if chance.random() < 0.3:
                follower.take()
        eventually(follower.agrees, "the feed has come to something else", state=follower.difference)
    with catalog(settings, native) as url:
        follower.move(url)
        for _ in range(STEPS // 3):
            step(chance, members, dead, follower.client)
        eventually(follower.agrees, "the feed has come to something else after a restart", state=follower.difference)
        follower.close()


def test_what_is_lost_joined_midway_or_forgotten_comes_to_the_same(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time_held = hold_catalogs(monkeypatch)
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=sqlite_url,
        cluster=cluster,
        listen="127.0.0.1:0",
        liveness_s=1.0,
        ask_again_s=60.0,
        whole_wait_s=0.1,
    )
    lost, joined, gone = (Member(nats_url, cluster, name) for name in ("lost", "joined", "gone"))
    alive = {lost, joined, gone}
    with catalog(settings, True) as url, time_held.held() as hold:
        follower = Follower(url)

        def until(check: Callable[[], object] = lambda: True) -> None:
            """Wait until they agree, and something is so. Time passes with the signs of life."""

            def is_so() -> bool:
                for member in alive:
                    member.beat()
                hold.pass_on(0.1)
                return follower.agrees() and bool(check())

            eventually(is_so, state=follower.difference)

        for member in alive:
            member.hold(UNIVERSE[:4])
            member.publish()
        until(lambda: len(follower.blocks.holders(SPACE.id.hex(), UNIVERSE[0].hex())) == 3)

        lost.ledger.evict(Tier.HBM, b"".join(UNIVERSE[:2]), EvictReason.CAPACITY)
        lost.publish(lose=True)
        lost.hold(UNIVERSE[4:6])
        lost.publish()
        until(lambda: follower.blocks.is_suspect("lost"))
        lost.snapshot(random.Random(1))
        lost.publish()
        until(lambda: not follower.blocks.is_suspect("lost"))
        assert not follower.blocks.tiers("lost", SPACE.id.hex(), UNIVERSE[0].hex())

        joined.begin_epoch()
        joined.publish(lose=True)
        joined.hold(UNIVERSE[8:9])
        joined.publish()
        until(lambda: follower.blocks.tiers("joined", SPACE.id.hex(), UNIVERSE[8].hex()))
        assert not follower.blocks.tiers("joined", SPACE.id.hex(), UNIVERSE[0].hex())

        alive.remove(gone)
        gone.ledger.stop()
        gone.publish()
        until(lambda: not follower.blocks.tiers("gone", SPACE.id.hex(), UNIVERSE[0].hex()))
        until(lambda: is_forgotten(follower.client, gone))
        gone.hold_again(UNIVERSE[9:10])
        alive.add(gone)
        until(lambda: follower.blocks.tiers("gone", SPACE.id.hex(), UNIVERSE[9].hex()))
        assert follower.missed == []
        follower.close()


def test_a_client_that_was_away_for_long_is_told_so_and_comes_to_the_same(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
) -> None:
    chance = random.Random(7)
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=sqlite_url,
        cluster=cluster,
        listen="127.0.0.1:0",
        limits=LimitSettings(watch_bytes=1 << 16),
    )
    member = Member(nats_url, cluster, "i0")
    with catalog(settings, True) as url:
        follower = Follower(url)
        position = follower.watch.position
        follower.watch.close()
        for at in range(400):
            member.act(chance)
            if at % 40 == 39:
                member.publish()
        wanted = member.publish()

        def is_read() -> bool:
            found = follower.client.instance(member.name)
            return found is not None and found.offset >= wanted.offset

        eventually(is_read, "the catalog has not read it")
        follower.connect_again()
        eventually(follower.agrees, "the feed has come to something else", state=follower.difference)
        assert [msgspec.structs.replace(one, until="", why="") for one in follower.missed] == [
            Missed(after=str(position), until="", why="")
        ]
        follower.close()
