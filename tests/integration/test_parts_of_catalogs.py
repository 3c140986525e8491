"""Two catalogs that divide a cluster between them, as processes of their own would: what each reads and stores, and
what both together answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import Access
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.api import create_surface
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.follow.checkpoints import load_newest
from kvbm.catalog.replica import CatalogReplica, ReplicaSettings
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.catalog.sql.rows import InstanceRow, InstanceStatus, StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.cli import replay_main
from kvbm.config import check_settings, load_settings
from kvbm.core.answers import PositionWanted
from kvbm.core.errors import CatalogError, ConfigError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.core.parts import ALL_PARTS, has_parts, part_of, parts_of
from kvbm.erasure.catalog import CatalogErasures
from kvbm.erasure.record import Matcher, Record, Subject, with_erasure
from kvbm.erasure.report import INSTANCE, Answer, Progress
from kvbm.locate.base import NOTHING_FOUND
from kvbm.locate.http import CatalogClient
from kvbm.locate.locator import HttpLocator
from kvbm.locate.parts import PartedCatalog, catalogs_at
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.read_only import ReadOnlyStream
from kvbm.streams.nats.stream import NatsStream
from tests.callers import ACME, BETA, ask, beat, hashes_in, publish
from tests.eventually import eventually, eventually_async
from tests.held_time import hold_catalogs
from tests.nats_fixture import WAIT_S, cluster, fresh_nats, nats_url

__all__ = ["cluster", "fresh_nats", "nats_url"]

NOW_NS = 1_700_000_000_000_000_000
LOW, HIGH = "0-31", "32-63"
NAMES = [f"gpu-{number}" for number in range(8)]
OF_LOW = sorted(name for name in NAMES if part_of(name) < 32)
OF_HIGH = sorted(name for name in NAMES if part_of(name) >= 32)


@contextmanager
def served(url: str, cluster: str, folder: Path, parts: str) -> Iterator[CatalogThread]:
    settings = ServiceSettings(
        nats_url=url,
        database_url=f"sqlite+aiosqlite:///{folder / 'catalog.db'}",
        cluster=cluster,
        listen="127.0.0.1:0",
        parts=parts_of(parts),
        checkpoints=str(folder / "checkpoints"),
        liveness_s=600.0,
    )
    folder.mkdir(exist_ok=True)
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        yield thread


@pytest.fixture
def offsets(nats_url: str, cluster: str) -> dict[str, int]:
    """Eight instances that hold the same blocks, and what they have published."""

    async def work() -> dict[str, int]:
        return {
            name: await publish(nats_url, cluster, name, BETA if at == 7 else ACME) for at, name in enumerate(NAMES)
        }

    return asyncio.run(work())


async def beaten(url: str, cluster: str, offsets: dict[str, int]) -> None:
    stream = await NatsStream.connect(url, WAIT_S)
    for name, offset in offsets.items():
        await beat(stream, cluster, name, offset)
    await stream.close()


def names(found: Any) -> list[str]:
    return sorted(one.instance for one in found)


def test_two_catalogs_divide_a_cluster_and_answer_together_as_one(
    nats_url: str, cluster: str, tmp_path: Path, offsets: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    time_held = hold_catalogs(monkeypatch, "kvbm.locate.parts")
    with ExitStack() as opened:
        whole, low, high = (
            opened.enter_context(served(nats_url, cluster, tmp_path / (parts or "all"), parts)).url
            for parts in ("", LOW, HIGH)
        )
        one = opened.enter_context(closing(CatalogClient(whole, timeout_s=WAIT_S)))
        both = opened.enter_context(closing(PartedCatalog([low, high], WAIT_S)))
        for client in (one, both):
            client.wait_ready(WAIT_S)
            eventually(
                lambda client=client: len(client.lookup(ACME, hashes_in(ACME)).instances) == 7, "not all is read"
            )
        assert names(both.instances()) == names(one.instances()) == NAMES
        for url, mine in ((low, OF_LOW), (high, OF_HIGH)):
            with closing(CatalogClient(url, timeout_s=WAIT_S)) as alone:
                assert names(alone.instances()) == mine
                assert alone.ready().parts == (LOW if url == low else HIGH)
        expected, found = one.lookup(ACME, hashes_in(ACME)), both.lookup(ACME, hashes_in(ACME))
        assert (names(found.instances), found.deepest, found.more) == (names(expected.instances), expected.deepest, 0)
        assert names(both.lookup_many(ACME, [hashes_in(ACME)])[0].instances) == names(expected.instances)
        assert sorted(one.name for one in both.block(ACME, hashes_in(ACME)[:16]).holders) == names(expected.instances)
        assert {one.id for one in both.namespaces()} == {ACME.id.hex(), BETA.id.hex()}
        assert both.instance(OF_HIGH[0]) == one.instance(OF_HIGH[0]) or both.instance(OF_HIGH[0]) is not None
        assert both.instance("nobody") is None
        for name in (OF_LOW[0], OF_HIGH[0]):
            wanted = PositionWanted(instance=name, epoch=1, offset=offsets[name])
            assert both.lookup(ACME, hashes_in(ACME), at_least=[wanted], instances=[name]).instances[0].instance == name
        begin_s = time.monotonic()
        asyncio.run(beaten(nats_url, cluster, offsets))

        def is_heard() -> bool:
            """What waits at an instance grows less from then on."""
            ages_s = [one.heartbeat_age_s for one in both.instances()]
            return all(age_s is not None and age_s < time.monotonic() - begin_s for age_s in ages_s)

        eventually(is_heard, "a catalog does not hear them")
        opened.enter_context(time_held.held())  # what was routed fades on a slow machine as on a quick one
        sent = [both.route(ACME, hashes_in(ACME), 43).instance for _ in range(40)]
        assert {part_of(name) < 32 for name in sent} == {True, False}
        assert max(sent.count(name) for name in set(sent)) <= 20
        ranked = both.route(ACME, hashes_in(ACME), 43, limit=3)
        assert (len(ranked.ranked), ranked.more) == (3, 5)
        with closing(HttpLocator(f"{low};{high}")) as locator:
            assert locator.find("pool", ACME.id, hashes_in(ACME), 0, WAIT_S) == NOTHING_FOUND
        with (
            closing(PartedCatalog([low], WAIT_S)) as half,
            pytest.raises(CatalogError, match="follows parts 32-63 of the cluster"),
        ):
            half.lookup(ACME, hashes_in(ACME))


def test_what_the_candidates_are_together_is_told_to_and_taken_from_who_sees_all(
    nats_url: str, cluster: str, tmp_path: Path, offsets: dict[str, int]
) -> None:
    access = tmp_path / "access.toml"
    router = add_token(access, NewToken("acme", "router", ["acme"]), time.time())
    operator = add_token(access, NewToken("ops", "operator"), time.time())
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}",
        cluster=cluster,
        liveness_s=600.0,
    )

    async def work() -> None:
        service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        try:
            app = create_surface(service, "", Access(str(access))).app
            asked = {"namespace": ACME.id.hex(), "hashes": hashes_in(ACME).hex(), "input_tokens": 43, "limit": 100}

            async def route(token: str, **more: Any) -> Any:
                answer = await ask(app, "POST", "/v1/route", asked | more, token)
                return answer.status, msgspec.json.decode(answer.body)

            async def is_routed() -> bool:
                return service.is_ready and (await route(operator))[0] == 200

            await eventually_async(is_routed, "nothing is routed")
            _, told = await route(operator, remember=False)
            assert told["candidates"]["candidates"] == 8
            assert told["candidates"]["recent_s"] > 0
            for more in ({}, {"remember": True}):
                assert (await route(operator, **more))[1]["candidates"] is None
            _, kept = await route(router, remember=False)
            assert kept["candidates"] is None
            # so many have so much to do elsewhere that what waits here weighs nothing
            elsewhere = {"least_s": 0.0, "recent_s": 1e6, "candidates": 1000}
            _, before = await route(operator, remember=False)
            _, after = await route(operator, remember=False, elsewhere=elsewhere)
            assert {one["balance_s"] for one in after["ranked"]} != {one["balance_s"] for one in before["ranked"]}
            assert [
                one["instance"] for one in (await route(router, remember=False, elsewhere=elsewhere))[1]["ranked"]
            ] == [one["instance"] for one in kept["ranked"]]
            for wrong in (
                {"least_s": -1.0},
                {"recent_s": 1e12},
                {"candidates": 10**9},
                {"candidates": 0.5},
                {"more": 1},
            ):
                status, said = await route(operator, elsewhere=elsewhere | wrong)
                assert (status, said["error"]["code"]) == (422, "invalid_request"), wrong
        finally:
            await service.close()

    asyncio.run(work())


def test_a_catalog_goes_on_where_it_ended_and_reads_anew_when_its_parts_are_others(
    nats_url: str, cluster: str, tmp_path: Path, offsets: dict[str, int]
) -> None:
    folder = tmp_path / "one"
    for parts, mine in ((LOW, OF_LOW), (LOW, OF_LOW), ("", NAMES), (HIGH, OF_HIGH)):
        with (
            served(nats_url, cluster, folder, parts) as thread,
            closing(CatalogClient(thread.url, timeout_s=WAIT_S)) as client,
        ):
            client.wait_ready(WAIT_S)
            wanted = [name for name in mine if name != NAMES[7]]
            eventually(
                lambda client=client, wanted=wanted: names(client.lookup(ACME, hashes_in(ACME)).instances) == wanted,
                f"not as it should be with parts {parts!r}",
            )
            assert names(client.instances()) == sorted(mine)


def test_a_replica_takes_no_checkpoint_of_other_parts(
    nats_url: str, cluster: str, tmp_path: Path, offsets: dict[str, int]
) -> None:
    folder = tmp_path / "low"
    with (
        served(nats_url, cluster, folder, LOW) as thread,
        closing(CatalogClient(thread.url, timeout_s=WAIT_S)) as client,
    ):
        client.wait_ready(WAIT_S)
        eventually(lambda: len(client.instances()) == len(OF_LOW), "not all is read")
    asked: list[Path] = []

    async def holds(mark: object) -> bool:
        return True

    for parts, fits in ((parts_of(LOW), True), (ALL_PARTS, False), (parts_of(HIGH), False)):
        loaded = asyncio.run(
            load_newest(
                folder / "checkpoints",
                NATIVE_INDEX,
                1000,
                lambda name, parts=parts: has_parts(name, parts),
                None,
                holds,
            )
        )
        assert (loaded is not None) == fits

    def fetch(into: Path) -> bool:
        asked.append(into)
        for path in (folder / "checkpoints").iterdir():
            (into / path.name).write_bytes(path.read_bytes())
        return True

    for words, mine in ((LOW, OF_LOW), ("", NAMES)):
        replica = CatalogReplica(
            ReplicaSettings(cluster=cluster, parts=parts_of(words), liveness_s=600.0),
            lambda: ReadOnlyStream.follow(nats_url, WAIT_S, Credentials()),
            fetch,
            NATIVE,
            NATIVE_INDEX,
        )
        replica.start()
        with closing(replica):
            replica.wait_ready(WAIT_S)
            assert replica.ready().parts == words
            followed = replica._view.sequencer.followed  # type: ignore[union-attr]
            assert [str(name) for name in sorted(followed)] == sorted(mine)
    assert len(asked) == 2


def test_verify_compares_those_that_are_followed_and_all_with_catalogs_of_all_parts(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("gpu-0", "gpu-2")
    assert [part_of(name) < 32 for name in names] == [False, True]
    for name in names:
        asyncio.run(publish(fresh_nats, "c", name, ACME))
    with ExitStack() as opened:
        low, high = (opened.enter_context(served(fresh_nats, "c", tmp_path / one, one)).url for one in (LOW, HIGH))
        with closing(PartedCatalog([low, high], WAIT_S)) as both:
            both.wait_ready(WAIT_S)
            eventually(lambda: len(both.instances()) == 2)
        for url, compared in ((low, "1 instance at"), (f"{low};{high}", "2 instances at")):
            assert replay_main(["verify", fresh_nats, "--catalog", url]) == 0
            shown = capsys.readouterr().out
            assert f"equal: the catalog at {url} is the fold of the log: {compared} equal offsets" in shown
            assert ("1 instance in parts that the catalog does not follow" in shown) == (url == low)


def test_a_catalog_of_some_parts_waits_for_all_instances_of_its_database(sqlite_url: str) -> None:
    """Those of other parts write claims and namespaces of the same tables, which it erases."""

    _, erasure = with_erasure(Record(), Subject("acme"), NOW_NS)

    async def waits(answers: list[Answer], parts: tuple[int, ...]) -> str:
        store = await SqlStore.open(sqlite_url, parts=parts)
        row = InstanceRow(
            id=InstanceId("gpu-0"),
            cluster="c",
            epoch=Epoch(1),
            first_seen_ns=1,
            last_frame_ns=1,
            engine="",
            version="",
            topology=(),
            pools=(),
            state=InstanceStatus.LIVE,
        )
        await store.apply(StoreBatch(stream="s", previous=0, stream_sequence=1, instances=(row,)))
        service = cast(Any, SimpleNamespace(store=store))
        try:
            side = CatalogErasures(service, "catalog-1", cast(Any, None), 1.0)
            return await side._waits(erasure, answers, Matcher(erasure, []), [])
        finally:
            await store.close()

    done = Answer(name="gpu-0", kind=INSTANCE, at_ns=1, progress={erasure.number: Progress(places=(), done_ns=1)})
    other = tuple(part for part in ALL_PARTS if part != part_of("gpu-0"))
    for parts in (ALL_PARTS, other):
        assert asyncio.run(waits([], parts)) == "instances gpu-0"
        assert asyncio.run(waits([done], parts)) == ""


def test_settings_take_the_urls_of_all_parts_and_refuse_what_is_none() -> None:
    for url in ("http://a:1;http://b:1", "http://a1:1,http://a2:1; unix:/run/b"):
        check_settings(load_settings(flags={"catalog.url": url}))
    for url in ("http://a:1;b:1", "http://a:1;", ";"):
        with pytest.raises(ConfigError, match="semicolons between those of different parts"):
            check_settings(load_settings(flags={"catalog.url": url}))


def test_one_url_is_one_catalog_and_semicolons_are_between_those_of_parts() -> None:
    with closing(catalogs_at("http://a:1,http://b:1")) as one:
        assert isinstance(one, CatalogClient)
    with closing(catalogs_at("http://a:1,http://b:1; http://c:1")) as both:
        assert isinstance(both, PartedCatalog)
        assert both.url == "http://a:1;http://c:1"
