"""Usage from instances to the bill: what a catalog answers is what `kvbm-replay usage` says of its archive, to the
byte; tenants see their own; managers record it.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvbm.catalog.sql.usage
import kvbm.catalog_questions
from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.assembly.recorded import open_log
from kvbm.catalog.access.file import NewToken
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog.sql.rows import StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.catalog.sql.usage import UsageWanted
from kvbm.cli import catalog_main, replay_main
from kvbm.config import Settings, load_settings
from kvbm.core.codec import FrameBytes, decode_frame
from kvbm.core.errors import ArgumentError
from kvbm.core.events import InstanceStarted, UsageRecorded, UsageRow
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Offset, Tier
from kvbm.core.usage import HOUR_MS, UsageReport, UsageSums, begin_of_hour, csv_of, entries_of, start_of, time_text
from kvbm.erasure.sql import erase_rows, named_tenants
from kvbm.locate.asynchronous import AsyncCatalogClient
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.streams.nats.stream import NatsStream
from tests.eventually import WAIT_S, eventually
from tests.nats_fixture import cluster, nats_url, patient  # noqa: F401
from tests.secured_catalogs import Files, files, serve  # noqa: F401
from tests.usage_instances import BEGUN_MS, SPACES, Clock, do_something, driven

SINCE, UNTIL = "2026-09-21T00:00:00Z", "2026-09-23T00:00:00Z"  # around BEGUN_MS


def life(name: str, epoch: int, seed: int, clock: Clock, hours: int, stops: bool) -> list[FrameBytes]:
    """An epoch of an instance: some hours of work; without `stops` it is killed."""
    rng = random.Random(seed)
    one = driven(epoch=epoch, clock=clock, instance=InstanceId(name))
    for _ in range(4 * hours):
        for _ in range(3):
            do_something(one.stream.ledger, rng, SPACES)
        one.account.prefill_tokens_per_s = rng.choice([0.0, 900.0])
        one.account.read_locked(rng.choice(SPACES).id, {rng.choice(list(Tier)): rng.randint(1, 9)})
        one.take()
        clock.ms += HOUR_MS // 4
    if stops:
        one.stream.end()
    one.take()
    return one.frames


def lives() -> list[tuple[str, list[FrameBytes]]]:
    """Two instances, of which one is killed, comes back, and stops; and two that are killed before they have recorded
    anything, of which one comes back twice.
    """
    clock = Clock()
    a = life("a", 1, 1, clock, 3, stops=False)
    clock.ms += 1_234_567
    a += life("a", 2, 2, clock, 2, stops=True)
    clock = Clock()
    c = []
    for epoch, hours in ((1, 0), (2, 0), (3, 1)):
        c += life("c", epoch, 4, clock, hours, stops=epoch == 3)
        clock.ms += 300_000
    return [
        ("a", a),
        ("b", life("b", 1, 3, Clock(), 4, stops=True)),
        ("c", c),
        ("d", life("d", 1, 5, Clock(), 0, stops=False)),
    ]


def publish(server: str, within: str, frames: list[tuple[str, list[FrameBytes]]]) -> None:
    async def send() -> None:
        stream = patient(await NatsStream.connect(server, WAIT_S))
        try:
            for name, those in frames:
                for frame in those:
                    await stream.publish(within, InstanceId(name), frame.data)
        finally:
            await stream.close()

    asyncio.run(send())


def expected_of(told: list[tuple[str, list[FrameBytes]]]) -> UsageReport:
    sums = UsageSums()
    for name, frames in told:
        for frame in (decode_frame(one.data)[0] for one in frames):
            for offset, event in enumerate(frame.events, frame.first_offset):
                if isinstance(event, InstanceStarted) and (
                    began := start_of(InstanceId(name), frame.wall_time_ns, event)
                ):
                    sums.note(began)
                if isinstance(event, UsageRecorded):
                    for entry in entries_of(InstanceId(name), frame.epoch, Offset(offset), event):
                        sums.add(entry)
    return sums.report()


def replay_csv(source: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    capsys.readouterr()
    assert replay_main(["usage", str(source), "--csv", "--from", SINCE, "--to", UNTIL, *more]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def catalog_csv(url: str, *more: str) -> tuple[str, str]:
    """What `kvbm-catalog usage --csv` prints, a process of its own, to the byte."""
    words = ["catalog", "usage", "--url", url, "--csv", "--from", SINCE, "--to", UNTIL, *more]
    ended = subprocess.run([sys.executable, "-m", "kvbm", *words], capture_output=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode(), ended.stderr.decode()


def settings_of(server: str, within: str, database: str, folder: Path, **more: Any) -> ServiceSettings:
    return ServiceSettings(
        nats_url=server,
        database_url=database,
        cluster=within,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        connect_s=WAIT_S,
        archive=str(folder / "archive"),
        **more,
    )


def test_a_catalog_and_its_archive_say_the_same_to_the_byte(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    database_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = lives()
    settings = settings_of(nats_url, cluster, database_url, tmp_path)
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread, CatalogClient(thread.url, WAIT_S) as client:
        client.wait_ready(WAIT_S)
        publish(nats_url, cluster, told)

        expected = expected_of(told)
        begun = time_text(BEGUN_MS)
        assert [(gap.instance, gap.since, gap.until) for gap in expected.gaps] == [
            ("a", "2026-09-21T16:00:00Z", "2026-09-21T17:33:54.567Z"),
            ("c", begun, time_text(BEGUN_MS + 600_000)),
            ("d", begun, ""),
        ]
        assert len(expected.hours) > 25
        eventually(lambda: client.usage(SINCE, UNTIL) == expected, "the catalog has other usage than was published")
        publish(nats_url, cluster, told)  # once more, as a publisher that goes back does
        first = client.usage(SINCE, UNTIL)
        assert asyncio.run(_async_usage(thread.url)) == first
        of_acme = client.usage(SINCE, UNTIL, tenants=["acme"])
        assert of_acme.hours == tuple(hour for hour in first.hours if hour.tenant == "acme")
        assert of_acme.gaps == first.gaps  # what was not recorded may be its own
        assert not client.usage("1970-01-01", "1970-01-02").hours
        assert client.usage("0", "2027-12-01") == first  # and not of the month before
        # where that ends, it was not killed yet
        assert client.usage(SINCE, "2026-09-21T16:00:00Z").gaps == first.gaps[1:]
        assert client.usage("2026-09-21T16:00:00Z", "2026-09-21T17:00:00Z").gaps == first.gaps[:1]
        metrics = client.metrics()
        assert 'kvbm_catalog_usage_saved_tokens_total{tenant="acme"}' in metrics
        saved = sum(hour.saved_tokens for hour in first.hours if hour.tenant == "acme")
        assert f'kvbm_catalog_usage_saved_tokens_total{{tenant="acme"}} {saved}' in metrics.replace(".0\n", "\n")
        asked, asked_words = catalog_csv(thread.url)
        asked_of_one = catalog_csv(thread.url, "--tenant", "acme")[0]
    csv, words = replay_csv(tmp_path / "archive", capsys)
    assert csv == csv_of(first.hours) == asked
    assert replay_csv(tmp_path / "archive", capsys, "--tenant", "acme")[0] == asked_of_one != asked
    gap = "not recorded: a from 2026-09-21T16:00:00Z until 2026-09-21T17:33:54.567Z"
    assert gap in words and gap in asked_words
    assert gap in replay_csv(tmp_path / "archive", capsys, "--from", "2026-09-21T16:00:00Z")[1]
    assert gap in replay_csv(tmp_path / "archive", capsys, "--tenant", "acme")[1]
    assert gap not in replay_csv(tmp_path / "archive", capsys, "--to", "2026-09-21T16:00:00Z")[1]
    assert f"not recorded: d from {begun} on, up to now" in words
    assert words.replace("kvbm-replay: ", "") == asked_words
    assert csv.count("acme") > 5 and '"a,""b""\n"' in csv
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread, CatalogClient(thread.url, WAIT_S) as client:
        client.wait_ready(WAIT_S)
        assert client.usage(SINCE, UNTIL) == first  # rows that were read again count once


async def _async_usage(url: str) -> object:
    async with AsyncCatalogClient(url, WAIT_S) as client:
        return await client.usage(SINCE, UNTIL)


def test_a_hole_in_the_log_is_said_and_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = life("a", 1, 7, Clock(), 5, stops=True)
    holds_usage = [
        at
        for at, frame in enumerate(frames)
        if any(isinstance(event, UsageRecorded) for event in decode_frame(frame.data)[0].events)
    ]
    whole, holed = tmp_path / "whole.kvbm", tmp_path / "holed.kvbm"
    whole.write_bytes(b"".join(frame.data for frame in frames))
    holed.write_bytes(b"".join(frame.data for at, frame in enumerate(frames) if at != holds_usage[1]))
    assert "not recorded" not in replay_csv(whole, capsys)[1]
    capsys.readouterr()
    assert replay_main(["usage", str(holed), "--csv", "--from", SINCE, "--to", UNTIL]) == 0
    said = capsys.readouterr()
    assert "not recorded: a from 2026-09-21T15:00:00Z until 2026-09-21T16:00:00Z" in said.err
    assert "2026-09-21T15:00:00Z" not in said.out and "2026-09-21T16:00:00Z" in said.out
    assert "of epoch 1 of a are missing: what they say of usage is lost" in said.err


def test_a_tenant_that_has_used_nothing_is_named_and_whether_its_name_is_known(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = [("a", life("a", 1, 7, Clock(), 2, stops=True))]
    nobody = "tenant 'nosuch' has used nothing in these hours, and the {} has nothing of that name; it has '', "
    settings = settings_of(nats_url, cluster, sqlite_url, tmp_path)
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread, CatalogClient(thread.url, WAIT_S) as client:
        client.wait_ready(WAIT_S)
        publish(nats_url, cluster, told)
        eventually(lambda: client.usage(SINCE, UNTIL) == expected_of(told), "the catalog has no usage")

        def said(*words: str) -> str:
            capsys.readouterr()
            assert catalog_main(["usage", "--url", thread.url, "--csv", *words]) == 0
            shown = capsys.readouterr()
            assert shown.out.startswith("hour,tenant,")
            return "\n".join(line for line in shown.err.splitlines() if "tenant '" in line)

        assert nobody.format("catalog") in said(
            "--from", SINCE, "--to", UNTIL, "--tenant", "nosuch", "--tenant", "acme"
        )
        assert "acme' has" not in said("--from", SINCE, "--to", UNTIL, "--tenant", "nosuch", "--tenant", "acme")
        assert said("--from", "0", "--to", "3600", "--tenant", "acme").endswith(
            "'acme' has used nothing in these hours"
        )
    assert nobody.format("log") in replay_csv(tmp_path / "archive", capsys, "--tenant", "nosuch")[1]
    assert "tenant '" not in replay_csv(tmp_path / "archive", capsys, "--tenant", "acme")[1]
    none = replay_csv(tmp_path / "archive", capsys, "--tenant", "acme", "--to", "2026-09-21T01:00:00Z")[1]
    assert none == "kvbm-replay: tenant 'acme' has used nothing in these hours\n"


def test_json_and_words_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.kvbm"
    log.write_bytes(b"".join(frame.data for frame in life("a", 1, 7, Clock(), 2, stops=True)))
    assert replay_main(["usage", str(log), "--json", "--tenant", "acme"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {hour["tenant"] for hour in report["hours"]} == {"acme"} and report["events"] == 3
    assert replay_main(["usage", str(log)]) == 0
    words = capsys.readouterr().out
    assert "GPU h" in words and "\\x1b[2Jé" in words and "\x1b" not in words
    assert replay_main(["usage", str(log), "--json", "--csv"]) == 2
    assert replay_main(["cat", str(log), "--limit", "400"]) == 0
    assert "UsageRecorded 2026-09-21T14:13:20.000000Z to 2026-09-21T15:00:00.000000Z of " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        replay_main(["usage", str(log), "--from", "yesterday"])


def test_hours_of_a_log_are_asked_for_by_times_of_day_and_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.kvbm"
    log.write_bytes(b"".join(frame.data for frame in life("a", 1, 7, Clock(), 3, stops=True)))  # 14:13 to 17:13

    def hours(*words: str) -> set[str]:
        assert replay_main(["usage", str(log), "--json", *words]) == 0
        return {hour["hour"][11:13] for hour in json.loads(capsys.readouterr().out)["hours"]}

    assert hours() == {"14", "15", "16", "17"}
    assert hours("--from", "15:00", "--to", "17:00:00") == {"15", "16"}
    assert hours("--from", "18:00+02:00") == {"16", "17"}
    assert hours("--from", "21:40:44", "--to", "15:00") == {"14"}  # from the evening before
    assert hours("--from", "15:00", "--to", "18:00") == {"15", "16", "17"}  # the log ends before, and not the day
    assert hours("--from", "16:00", "--to", "15:00") == {"16", "17"}  # of the next day
    assert hours("--from", "2026-09-21T15:00:00Z", "--to", "16:00") == {"15"}
    dead = life("dead", 1, 8, Clock(), 2, stops=False)
    with log.open("ab") as file:
        file.write(b"".join(frame.data for frame in dead))  # an instance that is killed at 16:13
    assert hours("--instance", "dead", "--from", "14:00", "--to", "16:30") == {"14"}
    assert hours("--instance", "dead", "--from", "16:30") == set()  # the end is that of the whole log
    assert replay_main(["usage", str(log), "--from", "16:00", "--to", "2026-09-21T15:00:00Z"]) == 2
    assert "does not lie before --to" in capsys.readouterr().err
    for text in ("25:00", "12", "", "e1+4"):
        with pytest.raises(SystemExit):
            replay_main(["usage", str(log), "--from", text, "--to", "x"])


def test_a_catalog_is_asked_for_usage_by_times_of_day_and_without_any(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    clock.ms = begin_of_hour(time.time_ns() // 1_000_000) - 30 * HOUR_MS
    with CatalogThread(settings_of(nats_url, cluster, sqlite_url, tmp_path), NATIVE, NATIVE_INDEX) as thread:
        with CatalogClient(thread.url, WAIT_S) as client:
            client.wait_ready(WAIT_S)
            told = [("a", life("a", 1, 7, clock, 28, stops=True))]
            report = expected_of(told)
            publish(nats_url, cluster, told)
            eventually(lambda: client.usage() == report, "the catalog has other usage than was published")

        def hours(*words: str) -> set[str]:
            capsys.readouterr()  # what the catalog logs
            assert catalog_main(["usage", "--url", thread.url, "--json", *words]) == 0
            return {hour["hour"] for hour in json.loads(capsys.readouterr().out)["hours"]}

        assert hours() == {hour.hour for hour in report.hours}
        begin = time_text(clock.ms - 10 * HOUR_MS)
        monkeypatch.setattr(kvbm.catalog_questions, "time", StoppedTime(clock.ms))
        asked = hours("--from", begin[11:16])  # the last one there was
        assert asked == {hour for hour in hours() if hour >= begin} != set()
        end = time_text(clock.ms + 3 * HOUR_MS)  # not yet
        assert hours("--from", begin[11:16], "--to", end[11:16]) == asked
        assert catalog_main(["usage", "--url", thread.url, "--from", "2026-01-02", "--to", "2026-01-01"]) == 2
        assert "does not lie before --to" in capsys.readouterr().err


class StoppedTime:
    """The module `time`, whose clock stands."""

    def __init__(self, ms: int) -> None:
        self._ms = ms

    def time_ns(self) -> int:
        return self._ms * 1_000_000


def test_a_tenant_sees_its_own_usage_alone(
    files: Files,  # noqa: F811
    serve: Callable[..., str],  # noqa: F811
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
) -> None:
    op = files.kept("op", files.token(NewToken(name="op", role="operator", tenants=None)))
    acme = files.kept("acme", files.token(NewToken(name="acme", role="router", tenants=frozenset({"acme"}))))
    url = serve(file=str(files.access))
    operator, own = (CatalogClient(url, WAIT_S, credentials=CatalogCredentials(token=one)) for one in (op, acme))
    told = lives()
    publish(nats_url, cluster, told)
    eventually(lambda: operator.usage(SINCE, UNTIL) == expected_of(told), "the catalog has no usage")
    everything = operator.usage(SINCE, UNTIL)
    report = own.usage(SINCE, UNTIL)
    assert report.hours == tuple(hour for hour in everything.hours if hour.tenant == "acme") and not report.gaps
    assert own.usage(SINCE, UNTIL, tenants=["", "acme"]) == report
    assert not own.usage(SINCE, UNTIL, tenants=[""]).hours
    many = "?" + "&".join(["tenant=acme"] * 257)
    for asked in ("?from=yesterday", "?since=1", "?from=1e400", "?next=x", many):
        status = _status(url, op, f"/v1/usage{asked}")
        assert status == 422, asked
    with pytest.raises(ArgumentError, match="since"):
        own.usage("yesterday")
    own.close()
    operator.close()


def _status(url: str, token: str, path: str) -> int:
    import urllib3

    headers = {"authorization": f"Bearer {Path(token).read_text().strip()}"}
    return urllib3.request("GET", url + path, headers=headers, timeout=WAIT_S).status


def test_pages_and_numbers_of_any_size_come_whole_from_both_databases(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvbm.catalog.sql.usage, "PAGE_ROWS", 100)
    most = 2**64 - 1

    async def work() -> None:
        store = await SqlStore.open(database_url, WAIT_S)
        try:
            for hour in range(3):
                entries = []
                for part in range(3):
                    rows = tuple(
                        UsageRow(f"t{number:04}", (most,) * 4, (1, 2, 3, 4), (most, 0, 0, 0), 7, 5, most)
                        for number in range(part * 20, part * 20 + 20)
                    )
                    event = UsageRecorded(
                        since_ms=BEGUN_MS + hour * HOUR_MS,
                        until_ms=BEGUN_MS + hour * HOUR_MS + 1,
                        block_bytes=(most,) * 4,
                        rows=rows,
                    )
                    for name in ("a", "b"):
                        entries += entries_of(InstanceId(name), Epoch(1), Offset(3 * hour + part), event)
                batch = StoreBatch(stream="s@1", previous=hour, stream_sequence=hour + 1, usages=tuple(entries))
                assert await store.apply(batch)
            wanted = UsageWanted(0, 2**62)
            found = []
            while True:
                page = await store.usage(wanted)
                assert len(page.hours) == 60
                found += page.hours
                if page.next_ms is None:
                    break
                wanted = wanted._replace(since_ms=page.next_ms)
            assert len(found) == 180 and len({(hour.hour, hour.tenant) for hour in found}) == 180
            assert {hour.hbm_byte_seconds for hour in found} == {2 * (2**63 - 1)}
            assert {hour.object_put_blocks for hour in found} == {8}
            assert {hour.saved_gpu_us for hour in found} == {2 * (2**63 - 1)}
            assert len(await store.usage_gaps(UsageWanted(0, 2**62))) == 6
            hour_ms = BEGUN_MS // HOUR_MS * HOUR_MS
            one_hour = await store.usage_gaps(UsageWanted(hour_ms, hour_ms + HOUR_MS))
            assert [(gap.instance, gap.until) for gap in one_hour] == [
                (name, time_text(BEGUN_MS + HOUR_MS)) for name in ("a", "b")
            ]
            before = BEGUN_MS + HOUR_MS
            assert await store.forget_usage(before) == 120 and not await store.forget_usage(before)
            assert len((await store.usage(UsageWanted(0, before // HOUR_MS * HOUR_MS))).hours) == 0
        finally:
            await store.close()

    asyncio.run(work())


def test_an_erased_tenants_rows_go_and_that_their_time_was_recorded_stays(database_url: str) -> None:
    async def work() -> None:
        store = await SqlStore.open(database_url, WAIT_S)
        try:
            entries = [
                one
                for offset, tenants in enumerate([("acme",), ("acme", "globex", "other"), ("", "acme"), ("globex",)])
                for one in entries_of(InstanceId("a"), Epoch(1), Offset(offset), _hour_of(offset, *tenants))
            ]
            batch = StoreBatch(stream="s@1", previous=0, stream_sequence=1, usages=tuple(entries))
            assert await store.apply(batch)
            gaps = await store.usage_gaps(UsageWanted(0, 2**62))
            assert set(await named_tenants(store.engine)) == {"acme", "globex", "other", ""}
            assert await erase_rows(store.engine, [], ["acme", "globex"]) == 5
            left = (await store.usage(UsageWanted(0, 2**62))).hours
            assert [(hour.tenant, hour.saved_tokens) for hour in left] == [("other", 7), ("", 7)]
            assert await store.usage_gaps(UsageWanted(0, 2**62)) == gaps
            assert set(await named_tenants(store.engine)) == {"other", ""}
            await erase_rows(store.engine, [], [""])
            assert [hour.tenant for hour in (await store.usage(UsageWanted(0, 2**62))).hours] == ["other"]
        finally:
            await store.close()

    asyncio.run(work())


def _hour_of(hour: int, *tenants: str) -> UsageRecorded:
    rows = tuple(UsageRow(tenant, saved_tokens=7) for tenant in tenants)
    begun_ms = BEGUN_MS // HOUR_MS * HOUR_MS + hour * HOUR_MS
    return UsageRecorded(since_ms=begun_ms, until_ms=begun_ms + HOUR_MS, rows=rows)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.slots": 16,
        "pools.hbm.device": "memory",
    }
    return load_settings(flags=flags)


@pytest.mark.parametrize("version", [2, 3])
def test_a_manager_records_what_its_tenants_use_unless_it_writes_version_2(settings: Settings, version: int) -> None:
    journal = msgspec.structs.replace(settings.journal, frame_version=version)
    settings = msgspec.structs.replace(settings, journal=journal)
    space = Namespace(model="tiny", block_tokens=16, revision="1", tenant="acme", kv_dtype="float32")
    manager = open_manager(settings, [space], 64)
    hashes = manager.hash_tokens(range(64), space.root(), 16)
    manager.report_load(0, 0, prefill_tokens_per_s=1000.0)
    slots = manager.allocate(4)
    assert slots is not None
    manager.unpin(manager.create(space.id, NO_PARENT, 0, hashes, slots))
    manager.unpin(manager.acquire(space.id, hashes).slots)
    manager.close()
    with open_log(settings) as log:
        recorded = [one.event for one in log.events() if isinstance(one.event, UsageRecorded)]
    if version == 2:
        assert not recorded
        return
    (event,) = recorded
    (row,) = event.rows
    assert event.is_last and event.block_bytes[Tier.HBM] == 64
    assert (row.tenant, row.put_blocks[Tier.HBM], row.read_blocks) == ("acme", 4, (4, 0, 0, 0))
    assert (row.saved_tokens, row.unrated_tokens, row.saved_us) == (64, 0, 64_000)
