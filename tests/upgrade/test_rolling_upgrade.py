"""A cluster of the newest release becomes one of the next version under load, and answers as one that stays as it is.

Real processes of both versions on one nats-server and one PostgreSQL: two catalogs and three instances that are
upgraded one after the other, one old catalog beside them that nobody upgrades, and the control cluster. `make
test-upgrade` builds both versions and runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbm.core.answers import PositionWanted
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.streams.server import EmbeddedServer
from tests.eventually import eventually
from tests.servers import fresh_database
from tests.upgrade_builds import Side, new_side, old_side
from tests.upgrade_clusters import PROMPTS, WAIT_S, Asker, Cluster, Load, refusal

ENGINES = ("engine-0", "engine-1", "engine-2")
CATALOGS = ("catalog-a", "catalog-b")
WITNESS = "witness"  # an old catalog with a database of its own


class Rollout:
    """The cluster that is upgraded, the control cluster, and their load."""

    def __init__(self, old: Side, new: Side, nats: str, databases: tuple[str, str], folder: Path) -> None:
        self.old, self.new, self.databases, self.folder = old, new, databases, folder
        self.opened = ExitStack()
        self.cluster = Cluster("upgraded", nats, databases[0], folder, self.opened)
        self.control = Cluster("control", nats, databases[1], folder, self.opened)
        self.load = Load([self.cluster, self.control])

    def begin(self) -> None:
        """All of it is of the old version."""
        for name in CATALOGS:
            self.cluster.start_catalog(name, self.old)
        self.cluster.start_catalog(WITNESS, self.old, f"sqlite+aiosqlite:///{self.folder / 'witness.db'}")
        self.control.start_catalog("catalog", self.old)
        for name in ENGINES:
            for cluster in (self.cluster, self.control):
                cluster.start_engine(name, self.old, self.old.frame_version)

    def check(self, step: str, newer: tuple[str, ...] = ()) -> None:
        """Every catalog answers for every prompt as the control cluster's; the witness leaves out the newer ones."""
        self.cluster.settle()
        self.control.settle()
        wanted = self.control.depths("catalog")
        for name in CATALOGS:
            assert self.cluster.depths(name) == wanted, f"{step}: {name} answers otherwise than the control cluster"
        without = {
            prompt: {one: depth for one, depth in depths.items() if one not in newer}
            for prompt, depths in wanted.items()
        }
        found = self.cluster.depths(WITNESS, unread=newer)
        assert found == without, f"{step}: the old catalog answers otherwise than the control cluster"
        print(f"{step}: {sum(map(len, wanted.values()))} depths of {PROMPTS} prompts are equal", flush=True)

    async def variants(self) -> list[str]:
        """The new field of each namespace in the database."""
        import asyncpg

        connection = await asyncpg.connect(self.databases[0].replace("+asyncpg", ""), timeout=WAIT_S)
        try:
            return [row["variant"] for row in await connection.fetch("SELECT variant FROM namespaces ORDER BY 1")]
        finally:
            await connection.close()

    def replace_catalog(self, name: str) -> None:
        with self.load.under():
            self.cluster.stop_catalog(name)
            self.cluster.start_catalog(name, self.new)

    def replace_engine(self, name: str, side: Side, frame_version: int, has_variant: bool = False) -> None:
        """One becomes another version, while the others work; the control's begins anew as it was."""
        with self.load.under(left_out=[name]):
            self.cluster.stop_engine(name)
            self.control.stop_engine(name)
            self.cluster.start_engine(name, side, frame_version, has_variant)
            self.control.start_engine(name, self.old, self.old.frame_version)
        with self.load.under():
            pass


@pytest.fixture
def rollout(tmp_path: Path, postgres_server: str) -> Iterator[Rollout]:
    old, new = old_side(), new_side()
    assert (new.frame_version, old.version) == (old.frame_version + 1, "0.1.0")
    server = EmbeddedServer.start(tmp_path / "nats", timeout_s=WAIT_S)
    databases = tuple(asyncio.run(fresh_database(postgres_server)) for _ in range(2))
    made = Rollout(old, new, server.url, (databases[0], databases[1]), tmp_path)
    try:
        yield made
    finally:
        made.opened.close()
        server.stop()


@pytest.mark.timeout(3600)
@pytest.mark.bytes
def test_a_cluster_is_upgraded_under_load_and_answers_as_one_that_is_not(rollout: Rollout) -> None:
    rollout.begin()
    with rollout.load.under():
        pass
    rollout.check("all are old")
    with Asker([rollout.cluster.url_of(name) for name in CATALOGS]) as asker:
        upgrade_catalogs(rollout)
        upgrade_engines(rollout)
        go_back(rollout)
        raise_frames(rollout)
    use_the_new_field(rollout)
    assert asker.asked > 100 and not asker.wrong and not asker.failed, (asker.wrong[:3], asker.failed[:3])
    evicted = [one for one in rollout.load.served if one[0] not in rollout.control.depths("catalog")[one[1]]]
    assert evicted, "no tier has evicted by capacity"


def upgrade_catalogs(rollout: Rollout) -> None:
    """The first brings the schema up to date; the old one beside it goes on, and does not start again."""
    rollout.replace_catalog(CATALOGS[0])
    rollout.check("one catalog is new")
    words = refusal(lambda: rollout.cluster.start_catalog("late", rollout.old))
    assert "which is newer than" in words and "upgrade kvbm" in words, words
    rollout.replace_catalog(CATALOGS[1])
    rollout.check("both catalogs are new")


def upgrade_engines(rollout: Rollout) -> None:
    """Writers stay on the old version of frames, so the old catalog reads them."""
    for name in ENGINES:
        rollout.replace_engine(name, rollout.new, rollout.old.frame_version)
        rollout.check(f"{name} is new")


def go_back(rollout: Rollout) -> None:
    """Before frames change, an instance goes back to the old version and keeps what NVMe holds."""
    name = ENGINES[1]
    rollout.replace_engine(name, rollout.old, rollout.old.frame_version)
    rollout.check(f"{name} is old again")
    assert any(name in depths for depths in rollout.control.depths("catalog").values())
    rollout.replace_engine(name, rollout.new, rollout.old.frame_version)
    rollout.check(f"{name} is new once more")


def raise_frames(rollout: Rollout) -> None:
    """One after the other is told to write the new frames; then there is no way back for its journal."""
    newest, newer = rollout.new.frame_version, ()
    words = refusal(
        lambda: rollout.cluster.start_engine("engine-3", rollout.new, rollout.old.frame_version, has_variant=True)
    )
    assert f"journal.frame_version = {newest}" in words, words
    for name in ENGINES:
        rollout.replace_engine(name, rollout.new, newest, has_variant=True)
        newer = (*newer, name)
        rollout.check(f"{name} writes frames of version {newest}", newer)
        left_out = rollout.cluster.catalogs[WITNESS].instance(name)
        assert left_out is not None and left_out.excluded == "newer", left_out
        assert "kvbm_catalog_newer_total 0" not in rollout.cluster.catalogs[WITNESS].metrics()
    name = ENGINES[0]
    with rollout.load.under(left_out=[name]):
        rollout.cluster.stop_engine(name)
        rollout.control.stop_engine(name)
        words = refusal(lambda: rollout.cluster.start_engine(name, rollout.old, rollout.old.frame_version))
        assert "newer" in words, words
        rollout.cluster.start_engine(name, rollout.new, newest, has_variant=True)
        rollout.control.start_engine(name, rollout.old, rollout.old.frame_version)
    rollout.check("after an old version was refused the journal", newer)


def use_the_new_field(rollout: Rollout) -> None:
    """What only the next version can say reaches its catalogs and their database, and the old catalog has none of
    it.
    """
    name = ENGINES[2]
    served = rollout.cluster.engines[name].ask(serve=100, depth=4, space=1)
    namespace, hashes = NamespaceId(bytes.fromhex(served["namespace"])), bytes.fromhex(served["hashes"])
    assert served["depth"] == 0 and len(hashes) == 4 * HASH_BYTES
    place = rollout.cluster.engines[name].ask(place=True)
    wanted = [PositionWanted(instance=name, epoch=place["epoch"], offset=place["offset"])]
    for catalog in CATALOGS:
        found = rollout.cluster.catalogs[catalog].lookup(namespace, hashes, at_least=wanted, timeout_s=5.0)
        assert {one.instance: one.depth for one in found.instances} == {name: 4}
    assert not rollout.cluster.catalogs[WITNESS].lookup(namespace, hashes).instances
    assert eventually(lambda: len(variants := asyncio.run(rollout.variants())) == 2 and variants) == ["", "v2"]
