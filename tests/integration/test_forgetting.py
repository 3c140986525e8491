"""Instances that are gone are forgotten: by all catalogs of a database, for good, and without loss to who comes
back.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import urllib3

from kvbm import cli
from kvbm.assembly import NATIVE, NATIVE_FOLD, NATIVE_INDEX, open_manager
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.follow import forgetting
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog.sql import tables
from kvbm.catalog.sql.rows import AbsenceRow, ForgottenRow
from kvbm.catalog.sql.store import SqlStore
from kvbm.config import load_settings
from kvbm.core.errors import CatalogRefusedError, ConfigError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.core.parts import part_of, parts_of
from kvbm.locate.http import CatalogClient
from kvbm.replay.compare_catalog import CatalogComparison, Compared
from kvbm.replay.opening import open_source
from kvbm.replay.verify import verify
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.held_time import HeldTime, hold_catalogs
from tests.ledger_instances import HASHES, POOL, SPACE, LedgerInstance
from tests.nats_fixture import cluster, nats_url  # noqa: F401

text_string_to_metric_families = needed("prometheus_client.parser", "catalog").text_string_to_metric_families
delete = needed("sqlalchemy", "catalog").delete
insert = needed("sqlalchemy", "catalog").insert
select = needed("sqlalchemy", "catalog").select


class Running(NamedTuple):
    """A ready catalog, and how to ask it."""

    settings: ServiceSettings
    client: CatalogClient

    def instance(self, name: str, epoch: int = 1) -> LedgerInstance:
        return LedgerInstance(self.settings.nats_url, str(self.settings.cluster), name, epoch)

    def full(self, name: str, epoch: int = 1) -> LedgerInstance:
        """One with blocks 0 and 1 in HBM and a claim on eight, published."""
        made = self.instance(name, epoch)
        made.fill()
        made.publish()
        return made


def parsed(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.fixture(autouse=True)
def held_time(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    """Silence counts in it."""
    return hold_catalogs(monkeypatch)


@pytest.fixture
def settings(nats_url: str, cluster: str, sqlite_url: str) -> ServiceSettings:  # noqa: F811
    return settings_for(nats_url, cluster, sqlite_url)


def settings_for(server: str, within: str, database: str, **more: Any) -> ServiceSettings:
    return ServiceSettings(
        nats_url=server,
        database_url=database,
        cluster=within,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        liveness_s=0.6,
        whole_wait_s=0.0,
        **more,
    )


@contextmanager
def catalog(settings: ServiceSettings) -> Iterator[Running]:
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        client = CatalogClient(thread.url, timeout_s=WAIT_S)
        client.wait_ready(WAIT_S)
        yield Running(settings, client)
        client.close()


@contextmanager
def alive(held_time: HeldTime, *instances: LedgerInstance) -> Iterator[None]:
    """These are heard until it ends; time passes with their signs of life."""
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            for instance in instances:
                instance.beat()
            hold.pass_on(0.1)
            over.wait(0.1)

    thread = threading.Thread(target=beat)
    with held_time.held() as hold:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def eventually_heard(instance: LedgerInstance, check: Callable[[], bool]) -> None:
    """`eventually`, while an instance gives signs of life; a single one keeps it for no longer than `liveness_s`."""

    def heard() -> bool:
        instance.beat()
        return check()

    eventually(heard)


def names(running: Running) -> list[str]:
    return [found.instance for found in running.client.instances()]


def depths(running: Running) -> dict[str, int]:
    return {found.instance: found.depth for found in running.client.lookup(SPACE, HASHES).instances}


def forget(running: Running, name: str) -> None:
    """By name, once the catalog has listened for long enough."""

    def has_forgotten() -> bool:
        try:
            running.client.forget(InstanceId(name))
        except CatalogRefusedError as error:
            if error.code != "not_now":
                raise
            return False
        return True

    eventually(has_forgotten)


def verified(running: Running, name: str) -> Compared:
    """What `kvbm-replay verify` says of one instance on the stream and in the catalog."""
    against = CatalogComparison(running.client, name, wait_s=0.1)
    verify(open_source(running.settings.nats_url), NATIVE, NATIVE_FOLD, name, against=against)
    return against.report


def in_sql(settings: ServiceSettings, work: Callable[[SqlStore], Any]) -> Any:
    async def run() -> Any:
        store = await SqlStore.open(settings.database_url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def rows_of(settings: ServiceSettings, name: str) -> int:
    """Rows of an instance in the tables of instances, epochs, positions and absences."""

    async def count(store: SqlStore) -> int:
        found = 0
        for column in (
            tables.instances.c.id,
            tables.epochs.c.instance,
            tables.instance_positions.c.instance,
            tables.absences.c.instance,
        ):
            found += len(await store._read(select(column).where(column == name)))
        return found

    return int(in_sql(settings, count))


def test_who_is_gone_for_forget_s_leaves_memory_sql_metrics_and_answers(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    database_url: str,
    held_time: HeldTime,
) -> None:
    settings = settings_for(nats_url, cluster, database_url, forget_s=1.0)
    with catalog(settings) as running:
        with held_time.held():
            here, stopped, silent = (running.full(name) for name in ("here", "stopped", "silent"))
            stopped.stop()
            for one in (here, silent):
                eventually_heard(one, lambda one=one: state(running, one.name) == "live")  # type: ignore[misc]
            eventually(lambda: all(rows_of(settings, name) >= 3 for name in ("here", "stopped", "silent")))
        with alive(held_time, here):
            eventually(lambda: names(running) == ["here"])
            assert depths(running) == {"here": 2}
            metrics = running.client.metrics()
            assert (
                not any(f'instance="{name}"' in metrics for name in ("stopped", "silent"))
                and 'instance="here"' in metrics
            )
            assert parsed(metrics)["kvbm_catalog_forgotten_total"] == 2
            assert parsed(metrics)["kvbm_catalog_gone"] == 0
            assert rows_of(settings, "stopped") == rows_of(settings, "silent") == 0
            eventually(lambda: rows_of(settings, "here") == 3)
            pools = running.client.lookup(SPACE, HASHES).pools
            assert [(pool.pool, pool.depth) for pool in pools] == [(POOL, 8)]  # objects stay, and are found
            assert in_sql(settings, lambda store: store.claim_count()) == 8


def test_a_stopped_instance_is_in_no_count_of_residencies(settings: ServiceSettings, held_time: HeldTime) -> None:
    with catalog(settings) as running, held_time.held():
        here, gone = running.full("here"), running.full("gone")
        eventually(lambda: 'kvbm_catalog_residencies{instance="gone",tier="HBM"} 2.0' in running.client.metrics())
        gone.stop()
        eventually(lambda: 'kvbm_catalog_residencies{instance="gone"' not in running.client.metrics())
        assert f'kvbm_catalog_residencies{{instance="{here.name}",tier="HBM"}} 2.0' in running.client.metrics()
        assert "gone" in names(running)


def test_an_operator_forgets_one_by_name_and_never_a_live_one(
    settings: ServiceSettings, capsys: pytest.CaptureFixture[str], held_time: HeldTime
) -> None:
    with catalog(settings) as running, alive(held_time, running.full("here")):
        gone = running.full("gone")
        with alive(held_time, gone):
            eventually(lambda: {found.state for found in running.client.instances()} == {"live"})
            eventually(lambda: refusal(running, "gone").code != "not_now")
            error = refusal(running, "gone")
            assert (error.status, error.code) == (409, "instance_alive")
            assert "alive" in str(error) and "stop it first" in str(error)
            error = refusal(running, "nobody")
            assert (error.status, error.code) == (404, "instance_unknown")
        gone.stop()
        eventually(lambda: state(running, "gone") == "stopped")
        assert cli.catalog_main(["forget", "gone", "--set", f"catalog.url={running.client.url}"]) == 0
        assert "instance gone is forgotten" in capsys.readouterr().out
        assert names(running) == ["here"] and rows_of(settings, "gone") == 0
        assert cli.catalog_main(["forget", "gone", "--set", f"catalog.url={running.client.url}"]) == 2
        assert "no instance 'gone' is known" in capsys.readouterr().err


def test_a_catalog_tells_whom_it_has_forgotten_from_whom_it_never_heard_of(
    settings: ServiceSettings, held_time: HeldTime
) -> None:
    killed = f"killed-of-{settings.cluster}"  # the stream has others' instances, too
    with catalog(settings) as running, alive(held_time, running.full("here")):
        running.full(killed)
        eventually(lambda: killed in names(running))
        assert (running.client.has_forgotten(killed), running.client.has_forgotten("nobody")) == (False, False)
        eventually(
            lambda: any(one.excluded == "silent" for one in running.client.instances() if one.instance == killed)
        )
        forget(running, killed)
        assert (running.client.has_forgotten(killed), names(running)) == (True, ["here"])
        found = verified(running, killed)
        assert (found.differences, found.uncompared) == ([], [])
        assert found.notes[0].endswith("Z, and the catalog has forgotten it; not compared")
        page = json.loads(urllib3.request("GET", f"{running.client.url}/v1/instances").data)
        assert page["forgotten"] is None  # nobody was named


def refusal(running: Running, name: str) -> CatalogRefusedError:
    with pytest.raises(CatalogRefusedError) as caught:
        running.client.forget(InstanceId(name))
    return caught.value


def state(running: Running, name: str) -> str:
    found = running.client.instance(InstanceId(name))
    return "" if found is None else found.state


def test_namespaces_are_forgotten_with_the_last_who_declares_them_unless_blocks_are_claimed(
    settings: ServiceSettings, held_time: HeldTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "NAMESPACES_EVERY_S", 0.0)
    others = [Namespace(model=f"other-{number}", block_tokens=4) for number in range(2500)]

    def stored(store: SqlStore) -> Any:
        return store.namespaces()

    with catalog(settings) as running, held_time.held():
        a = LedgerInstance(settings.nats_url, str(settings.cluster), "a", more=others)
        a.fill()
        a.publish()
        b = LedgerInstance(settings.nats_url, str(settings.cluster), "b", space=others[7])
        b.publish()
        eventually(lambda: len(running.client.namespaces()) == 2501, "not all pages come")
        page = json.loads(urllib3.request("GET", f"{running.client.url}/v1/namespaces").data)
        assert (len(page["namespaces"]), page["more"]) == (1000, 1501)
        for bad in ("limit=0", "limit=1001", "after=x", "nonsense=1"):
            assert urllib3.request("GET", f"{running.client.url}/v1/namespaces?{bad}").status == 422
        eventually(lambda: len(in_sql(settings, stored)) == 2501, "SQL lacks some")
        LedgerInstance(settings.nats_url, str(settings.cluster), "a", epoch=2, space=others[8]).publish()
        wanted = {SPACE.id.hex(), others[7].id.hex(), others[8].id.hex()}  # claimed, declared by b, declared by a
        eventually(lambda: {one.id for one in running.client.namespaces()} == wanted, "they are not forgotten")
        eventually(lambda: {row.id.hex() for row in in_sql(settings, stored)} == wanted, "SQL keeps them")
    with catalog(settings) as running:  # it reads the stream anew
        eventually(lambda: {one.id for one in running.client.namespaces()} == wanted, "they came back")


def test_a_namespace_that_heartbeats_name_is_kept_until_they_name_it_no_more(
    settings: ServiceSettings, held_time: HeldTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "NAMESPACES_EVERY_S", 0.0)
    told, dropped = (Namespace(model=name, block_tokens=4) for name in ("told", "dropped"))

    def stored(store: SqlStore) -> Any:
        return store.namespaces()

    def known(running: Running) -> set[str]:
        return {one.id for one in running.client.namespaces()}

    def is_all(running: Running, *wanted: Namespace) -> bool:
        ids = {one.id.hex() for one in wanted}
        return known(running) == ids == {row.id.hex() for row in in_sql(settings, stored)}

    def is_told(running: Running) -> bool:
        b.beat(told=[told])
        return told.id.hex() in known(running)

    with catalog(settings) as running, held_time.held():
        b = running.instance("b")
        b.publish()
        eventually(lambda: is_told(running), "nobody has heard of it")
        LedgerInstance(settings.nats_url, str(settings.cluster), "a", more=[dropped]).publish()
        eventually(lambda: is_all(running, SPACE, told, dropped), "SQL lacks some")
        running.instance("a", epoch=2).publish()
        eventually(lambda: is_all(running, SPACE, told), "it is not forgotten, or too much is")
        running.instance("b", epoch=2).publish()  # what its heartbeats told goes with the life that told it
        eventually(lambda: is_all(running, SPACE), "it is not forgotten")


def test_a_catalog_that_has_not_listened_yet_forgets_nobody(settings: ServiceSettings, held_time: HeldTime) -> None:
    with held_time.held(), catalog(settings) as running:
        running.full("silent")
        eventually(lambda: "silent" in names(running))
        error = refusal(running, "silent")
        assert (error.status, error.code) == (503, "not_now") and "listened" in str(error)


def test_who_comes_back_in_a_later_epoch_is_whole_at_once(settings: ServiceSettings, tmp_path: Path) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "instance.cluster": settings.cluster,
        "instance.id": "a",
        "nats.url": settings.nats_url,
        "nats.heartbeat_s": 0.1,
        "pools.hbm.slots": 16,
        "pools.hbm.device": "memory",
    }
    with catalog(settings) as running:
        with open_manager(load_settings(flags=flags), [SPACE], 64) as manager:
            eventually(lambda: state(running, "a") == "live")
            first = manager.epoch
        eventually(lambda: state(running, "a") == "stopped")
        forget(running, "a")
        assert names(running) == []
        with open_manager(load_settings(flags=flags), [SPACE], 64) as manager:
            assert manager.epoch > first
            eventually(lambda: state(running, "a") == "live")
            eventually(lambda: is_whole(running, "a"))
            eventually(lambda: rows_of(settings, "a") >= 3)  # an instance, its epochs, its position


def test_a_catalog_that_hears_one_that_another_has_forgotten_has_it_speak(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "instance.cluster": settings.cluster,
        "instance.id": "a",
        "nats.url": settings.nats_url,
        "nats.heartbeat_s": 0.1,
        "pools.hbm.slots": 16,
        "pools.hbm.device": "memory",
        "snapshots.least_s": 0.2,
    }
    fast = msgspec.structs.replace(settings, forget_s=20.0, liveness_s=60.0)
    with catalog(fast) as running, open_manager(load_settings(flags=flags), [SPACE], 64):
        eventually(lambda: is_whole(running, "a") and rows_of(settings, "a") >= 3)
        assert in_sql(settings, forgotten_elsewhere)
        assert rows_of(settings, "a") == 0 or in_sql(settings, marks) == 0  # the catalog may have been quick
        eventually(lambda: rows_of(settings, "a") >= 3)
        assert in_sql(settings, marks) == 0 and is_whole(running, "a")


async def forgotten_elsewhere(store: SqlStore) -> bool:
    """As a catalog forgets `a` that has read everything and does not hear it."""
    (stream,) = await store.streams()
    place = await store.position(stream)
    mark = ForgottenRow(instance=InstanceId("a"), stream=stream, sequence=place, until_ns=1 << 62)
    return await store.forget([mark], place)


async def marks(store: SqlStore) -> int:
    return len(await store._read(select(tables.forgotten)))


def is_whole(running: Running, name: str) -> bool:
    found = running.client.instance(InstanceId(name))
    return found is not None and bool(found.epoch) and not found.suspect and not found.excluded


def test_who_goes_on_in_its_epoch_is_asked_for_a_snapshot_and_whole_after_it(settings: ServiceSettings) -> None:
    with catalog(settings) as running:
        a = running.full("a")
        eventually(lambda: names(running) == ["a"])
        forget(running, "a")
        assert names(running) == []
        eventually_heard(a, lambda: state(running, "a") == "live")
        eventually_heard(a, lambda: parsed(running.client.metrics())["kvbm_catalog_snapshots_asked_total"] > 0)
        a.snapshot()
        a.publish()
        eventually_heard(a, lambda: is_whole(running, "a"))
        found = running.client.instance(InstanceId("a"))
        assert (
            found is not None
            and found.held_blocks == {"HBM": 2, "HOST": 0}
            and found.digest == f"{a.ledger.residencies.digest:016x}"
        )
        assert [pool.tier for pool in found.pools] == ["HBM", "HOST", "OBJECT"]  # the mark has what its start declared
        eventually_heard(a, lambda: depths(running) == {"a": 2})
        eventually(lambda: rows_of(settings, "a") == 3)


def test_who_has_lost_its_journal_and_begins_at_epoch_one_is_followed(
    settings: ServiceSettings, held_time: HeldTime
) -> None:
    with catalog(settings) as running:
        running.full("a", epoch=7)
        eventually(lambda: names(running) == ["a"])
        forget(running, "a")
        again = running.instance("a", epoch=1)
        again.create(3)
        with held_time.held():  # it is not heard
            again.publish()
            eventually(lambda: depths(running) == {"a": 3})
        found = running.client.instance(InstanceId("a"))
        assert found is not None and (found.epoch, found.suspect) == (1, False)
        assert parsed(running.client.metrics())["kvbm_catalog_stale_total"] == 0
        eventually(lambda: rows_of(settings, "a") == 3)


def test_all_catalogs_of_a_database_forget_it_and_none_brings_it_back(
    settings: ServiceSettings, tmp_path: Path, held_time: HeldTime
) -> None:
    folder = tmp_path / "checkpoints"
    kept = msgspec.structs.replace(settings, checkpoints=str(folder))
    other = msgspec.structs.replace(settings, forget_s=20.0)  # looks for marks every second
    with catalog(kept) as running:
        here, gone = running.full("here"), running.full("gone")
        gone.beat()
        eventually(lambda: names(running) == ["gone", "here"])
    old = tmp_path / "old"
    shutil.copytree(folder, old)  # a checkpoint that holds it
    with catalog(other) as second, alive(held_time, here):
        with catalog(kept) as running:
            eventually(lambda: names(second) == ["gone", "here"] == names(running))
            forget(running, "gone")
            assert names(running) == ["here"]
            eventually(lambda: names(second) == ["here"])
        shutil.rmtree(folder)
        shutil.copytree(old, folder)
        with catalog(
            kept
        ) as running:  # from the old checkpoint; the heartbeat that the server has kept is no sign of life
            assert "here" in names(running)
            full_again = running.instance("third")
            full_again.create(4)
            full_again.publish()
            eventually(lambda: "third" in names(running) and "third" in names(second))
            assert "gone" not in names(running) and "gone" not in names(second)
            assert rows_of(settings, "gone") == 0
    with catalog(settings) as running:  # reads the stream from its first message
        assert "gone" not in names(running) and "here" in names(running)
        assert rows_of(settings, "gone") == 0


def test_what_another_catalog_has_counted_of_one_that_is_forgotten_is_not_kept(settings: ServiceSettings) -> None:
    with catalog(settings) as running:
        running.full("gone")
        eventually(lambda: rows_of(settings, "gone") == 3)
        forget(running, "gone")
        late = [AbsenceRow(instance=InstanceId(name), unheard_s=9) for name in ("gone", "other")]
        in_sql(settings, lambda store: store.note_absences(late, []))
        assert [row.instance for row in in_sql(settings, lambda store: store.absences())] == ["other"]


def test_a_checkpoint_and_no_mark_any_more(settings: ServiceSettings, tmp_path: Path) -> None:
    """What the mark was for is over, but the checkpoint is older: SQL knows who is known."""
    folder = tmp_path / "checkpoints"
    kept = msgspec.structs.replace(settings, checkpoints=str(folder))
    with catalog(kept) as running:
        running.full("gone")
        eventually(lambda: names(running) == ["gone"])
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    with catalog(kept) as running:
        forget(running, "gone")
    in_sql(settings, lambda store: drop_marks(store))
    shutil.rmtree(folder)
    shutil.copytree(old, folder)
    with catalog(kept) as running:
        assert names(running) == [] and depths(running) == {}


def test_catalogs_of_other_parts_of_one_database_forget_none_of_each_other(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    postgres_url: str,
    held_time: HeldTime,
) -> None:
    """What one hears nothing of is alive where it is heard."""
    low, high = (
        settings_for(nats_url, cluster, postgres_url, parts=parts_of(words), forget_s=forget_s)
        for words, forget_s in (("0-31", 4.0), ("32-63", 600.0))
    )
    here, there = "gpu-2", "gpu-0"
    assert (part_of(here) < 32, part_of(there) < 32) == (True, False)
    with catalog(high) as of_high, alive(held_time, of_high.full(there)):
        eventually(lambda: rows_of(high, there))
        with catalog(low) as of_low, alive(held_time, of_low.full(here)):  # SQL knows the other already
            with held_time.held():
                gone = of_low.full("gpu-3").name
                assert part_of(gone) < 32
                eventually(lambda: names(of_low) == [here, gone] and names(of_high) == [there])
            with pytest.raises(CatalogRefusedError) as refused:
                forget(of_low, there)
            assert refused.value.code == "instance_unknown"
            eventually(lambda: names(of_low) == [here])  # who is gone for so long is forgotten by now
            assert rows_of(low, there) > 0
            url = f"{of_low.client.url};{of_high.client.url}"
            of_high.full("gpu-1")
            eventually(lambda: "gpu-1" in names(of_high))
            eventually(lambda: cli.catalog_main(["forget", "gpu-1", "--set", f"catalog.url={url}"]) == 0)
            assert names(of_high) == [there]


async def drop_marks(store: SqlStore) -> None:
    async with store._engine.begin() as connection:
        await connection.execute(delete(tables.forgotten))


def test_a_database_restored_from_an_older_copy_is_told_again(settings: ServiceSettings) -> None:
    fast = msgspec.structs.replace(settings, forget_s=20.0)
    with catalog(fast) as running:
        running.full("gone")
        eventually(lambda: rows_of(settings, "gone") == 3)
        before = in_sql(settings, copied)
        forget(running, "gone")
        assert rows_of(settings, "gone") == 0
        assert in_sql(settings, lambda store: restored(store, before)) == 1
        eventually(lambda: rows_of(settings, "gone") == 0)
        assert names(running) == []


_COPIED = (tables.instances, tables.epochs, tables.instance_positions, tables.positions, tables.forgotten)


async def copied(store: SqlStore) -> list[list[dict[str, Any]]]:
    return [await store._read(select(table)) for table in _COPIED]


async def restored(store: SqlStore, copies: list[list[dict[str, Any]]]) -> int:
    """Bring the copy back. Returns how many instances it has."""
    async with store._engine.begin() as connection:
        for table, rows in zip(_COPIED, copies, strict=True):
            await connection.execute(delete(table))
            if rows:
                await connection.execute(insert(table), rows)
    return len(copies[0])


def test_nobody_is_forgotten_whose_events_the_stream_still_has() -> None:
    assert load_settings(flags={"catalog.forget_s": 90_000}).catalog.forget_s == 90_000
    for wrong in (0, 3600, 86_400, "nan", "inf"):
        with pytest.raises(ConfigError, match=r"catalog.forget_s is .*above 86400: so long the stream keeps events"):
            load_settings(flags={"catalog.forget_s": wrong})


def test_the_archive_and_replay_still_know_it(
    settings: ServiceSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = msgspec.structs.replace(settings, archive=str(tmp_path / "archive"))
    with catalog(kept) as running:
        running.full("gone")
        eventually(lambda: names(running) == ["gone"])
        forget(running, "gone")
    assert cli.replay_main(["stat", str(tmp_path / "archive")]) == 0
    assert "gone" in capsys.readouterr().out
