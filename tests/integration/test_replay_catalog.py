"""`kvbm-replay` beside a running catalog: does it say the same, and can it be made again from the log?"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from structlog.testing import capture_logs

import kvbm.replay.cli
from kvbm.assembly import NATIVE, NATIVE_AGES, NATIVE_FOLD, NATIVE_INDEX, NATIVE_STAYS, catalog_client, decode_columns
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.codec import Frame
from kvbm.core.events import InstanceStopped, StopReason
from kvbm.core.ids import InstanceId, Offset, split_hashes
from kvbm.locate.http import CatalogClient
from kvbm.replay.cli import Parts
from kvbm.replay.compare_catalog import CatalogComparison
from kvbm.replay.format import place_text
from kvbm.replay.opening import open_source
from kvbm.replay.verify import verify
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from tests.captures import NAMESPACES, chain, make_capture, packed
from tests.eventually import WAIT_S, eventually
from tests.nats_fixture import (
    fresh_nats,  # noqa: F401
    messages,
    publish,
)
from tests.readable import main

ONE = make_capture(7, commands=120).frames()
TWO = make_capture(8, commands=120, instance="two").frames()
CLUSTER = "c"
PARTS = Parts(
    NATIVE,
    NATIVE_FOLD,
    decode_columns,
    NATIVE_INDEX,
    NATIVE_AGES,
    NATIVE_STAYS,
    lambda url, config, sets, timeout_s: catalog_client(url),
)


def replay(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """What the command says when it ends with this code: on standard error for 2."""
    capsys.readouterr()  # logs of the servers
    with capture_logs():  # theirs and the projector's
        assert main(list(words), PARTS) == code
    shown = capsys.readouterr()
    return shown.err if code == 2 else shown.out


@contextmanager
def catalog(url: str, folder: Path, name: str, **more: Any) -> Iterator[CatalogClient]:
    """A ready catalog with its own database and checkpoints."""
    settings = ServiceSettings(
        nats_url=url,
        database_url=f"sqlite+aiosqlite:///{folder / name}.db",
        cluster=CLUSTER,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        whole_wait_s=0.2,
        liveness_s=600.0,
        **more,
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        client = CatalogClient(thread.url)
        client.wait_ready(WAIT_S)
        yield client
        client.close()


def has_all(client: CatalogClient, *streams: list[Frame]) -> bool:
    """Whether a catalog stands at the end of these."""
    ends = {frames[-1].instance: (frames[-1].epoch, frames[-1].next_offset) for frames in streams}
    return {one.instance: (one.epoch, one.offset) for one in client.instances()} == ends


def beat(url: str, *streams: list[Frame]) -> None:
    """A sign of life of each instance."""

    async def work() -> None:
        stream = await NatsStream.connect(url, WAIT_S)
        try:
            for frames in streams:
                last = frames[-1]
                heartbeat = Heartbeat(
                    instance=last.instance,
                    cluster=CLUSTER,
                    epoch=last.epoch,
                    published=last.next_offset,
                    wall_time_ns=time.time_ns(),
                )
                await stream.send_pulse(heartbeat)
        finally:
            await stream.close()

    asyncio.run(work())


def is_live(client: CatalogClient) -> bool:
    """Whether nobody is excluded."""
    return {one.state for one in client.instances()} == {"live"} and not any(one.excluded for one in client.instances())


def gone_back(frames: list[Frame]) -> list[tuple[str, bytes]]:
    """Messages stored as 0 1 3 4 2 3 4."""
    sent = messages(frames)
    lost = next(n for n in range(4, len(frames)) if frames[n].epoch == frames[n + 2].epoch)
    return [*sent[:lost], *sent[lost + 1 : lost + 3], *sent[lost:]]


def answers(client: CatalogClient) -> dict[str, Any]:
    """All that a catalog answers of the log; what it knows from heartbeats is left out."""
    lookups = []
    blocks = {}
    for space in NAMESPACES:
        for prompt in range(12):
            hashes = chain(prompt, 8)
            found = client.lookup(space, hashes)
            lookups.append(sorted(map(msgspec.json.encode, (*found.instances, *found.pools))))
            for block in split_hashes(hashes):
                blocks[space.id, block] = client.block(space, block).holders
    kept = (
        "instance",
        "cluster",
        "epoch",
        "offset",
        "digest",
        "suspect",
        "partial",
        "engine",
        "version",
        "topology",
        "pools",
        "held_blocks",
    )
    instances = [{name: getattr(one, name) for name in kept} for one in client.instances()]
    return {"lookups": lookups, "blocks": blocks, "instances": instances, "namespaces": client.namespaces()}


class Rows(NamedTuple):
    """What a database says."""

    instances: list[Any]
    epochs: list[Any]
    namespaces: list[Any]
    positions: dict[Any, Any]
    claims: list[Any]


def rows(url: str) -> Rows:
    """What the database says of instances and claims."""

    async def read() -> Rows:
        store = await SqlStore.open(url)
        try:
            claims = [chunk async for chunk in store.claims()]
            instances = await store.instances()
            epochs = [epoch for one in instances for epoch in await store.epochs(one.id)]
            return Rows(instances, epochs, await store.namespaces(), await store.instance_positions(), claims)
        finally:
            await store.close()

    return asyncio.run(read())


def test_a_catalog_rebuilt_from_its_archive_answers_and_stores_as_the_live_one_and_goes_on(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, rest = tmp_path / "archive", TWO[-3:]
    assert len({frame.epoch for frame in rest}) == 1
    with catalog(fresh_nats, tmp_path, "live", archive=str(archive)) as live:
        publish(fresh_nats, [*gone_back(ONE), *messages(TWO[:-3], per_message=3)], CLUSTER)
        eventually(lambda: has_all(live, ONE, TWO[:-3]))
        beat(fresh_nats, ONE, TWO[:-3])
        eventually(lambda: is_live(live))
        wanted = answers(live)
    stored = rows(f"sqlite+aiosqlite:///{tmp_path / 'live'}.db")
    database = f"sqlite+aiosqlite:///{tmp_path / 'again'}.db"
    words = [
        "rebuild",
        str(archive),
        "--database",
        database,
        "--checkpoint",
        str(tmp_path / "checkpoints"),
        "--cluster",
        CLUSTER,
    ]
    said = replay(capsys, 0, *words)
    assert said.startswith("rebuilt: 2 instances, ") and "goes on after message" in said
    made = rows(database)
    assert made._replace(epochs=[]) == stored._replace(epochs=[])
    known = {(one.instance, one.epoch) for one in made.epochs}
    assert known == {(frame.instance, frame.epoch) for frame in [*ONE, *TWO[:-3]]}
    assert {(one.instance, one.epoch) for one in stored.epochs} == known
    with catalog(fresh_nats, tmp_path, "again", checkpoints=str(tmp_path / "checkpoints")) as again:
        beat(fresh_nats, ONE, TWO[:-3])
        eventually(lambda: is_live(again))
        found = answers(again)
        for part in wanted:
            assert found[part] == wanted[part]
        publish(fresh_nats, messages(rest), CLUSTER)
        eventually(lambda: has_all(again, ONE, TWO))
        two = again.instance("two")
        assert two is not None and (two.digest, two.suspect) == (f"{TWO[-1].digest:016x}", False)
    said = replay(capsys, 2, *words)
    assert "has rows already" in said


def test_a_capture_becomes_the_state_of_a_catalog_on_a_stream_of_its_own(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = tmp_path / "a.kvbm"
    capture.write_bytes(packed([*ONE, *TWO]))
    database = f"sqlite+aiosqlite:///{tmp_path / 'again'}.db"
    words = [
        "rebuild",
        str(capture),
        "--database",
        database,
        "--checkpoint",
        str(tmp_path / "checkpoints"),
        "--cluster",
        CLUSTER,
    ]
    said = replay(capsys, 0, *words, "--stream", fresh_nats, "--json")
    made = json.loads(said)
    assert (made["instances"], made["suspect"], made["digest_mismatches"]) == (2, [], 0)
    assert made["residencies"] > 0 and made["claims"] > 0
    with catalog(fresh_nats, tmp_path, "again", checkpoints=str(tmp_path / "checkpoints")) as again:
        assert has_all(again, ONE, TWO)
        one = again.instance("one")
        assert one is not None and (one.digest, one.suspect) == (f"{ONE[-1].digest:016x}", False)


def test_a_catalog_rebuilt_from_the_stream_itself_goes_on_behind_what_was_read(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = publish(fresh_nats, [*gone_back(ONE), *messages(TWO[:-3])], CLUSTER)[-1]
    database = f"sqlite+aiosqlite:///{tmp_path / 'again'}.db"
    folder = str(tmp_path / "checkpoints")
    said = replay(
        capsys, 0, "rebuild", fresh_nats, "--database", database, "--checkpoint", folder, "--cluster", CLUSTER, "--json"
    )
    assert json.loads(said)["sequence"] == last
    publish(fresh_nats, messages(TWO[-3:]), CLUSTER)
    with catalog(fresh_nats, tmp_path, "again", checkpoints=folder) as again:
        eventually(lambda: has_all(again, ONE, TWO))
        assert [(one.digest, one.suspect) for one in again.instances()] == [
            (f"{ONE[-1].digest:016x}", False),
            (f"{TWO[-1].digest:016x}", False),
        ]


def test_a_stream_that_has_more_than_the_log_cannot_go_on_from_it(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.kvbm").write_bytes(packed(ONE[:-1]))
    publish(fresh_nats, messages(ONE), CLUSTER)
    database = f"sqlite+aiosqlite:///{tmp_path / 'again'}.db"
    words = ["rebuild", str(tmp_path / "a.kvbm"), "--database", database, "--cluster", CLUSTER, "--stream", fresh_nats]
    said = replay(capsys, 2, *words)
    assert "the stream has instance one up to" in said


def test_verify_finds_the_catalog_equal_to_the_log_and_says_it_in_one_line(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(fresh_nats, [*gone_back(ONE), *messages(TWO)], CLUSTER)
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, ONE, TWO))
        said = replay(capsys, 0, "verify", fresh_nats, "--catalog", live.url)
        verdict, equal = said.splitlines()
        assert verdict.startswith("verified: 2 instances, ")
        assert equal.startswith(
            f"equal: the catalog at {live.url} is the fold of the log: 2 instances at equal offsets, "
        )
        assert int(equal.split(", ")[-1].split()[0]) > 0
        publish(fresh_nats, [], CLUSTER)
        said = replay(capsys, 0, "verify", fresh_nats, "--catalog", live.url, "--instance", "two", "--json")
        assert json.loads(said)["catalog"]["compared"] == 1


def test_verify_says_how_many_instances_it_compared_where_the_catalog_suspects_others(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [
        make_capture(8 + n, commands=120, instance=name).frames() for n, name in enumerate(("two", "three", "four"))
    ]
    gapped = [[frame for frame in frames if frame is not frames[-2]] for frames in logs]
    assert all(frames[-2].epoch == frames[-1].epoch for frames in logs)
    capture = tmp_path / "a.kvbm"
    capture.write_bytes(packed([frame for frames in (ONE, *logs) for frame in frames]))
    publish(fresh_nats, [sent for frames in (ONE, *gapped) for sent in messages(frames)], CLUSTER)
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, ONE, *logs) and sum(one.suspect for one in live.instances()) == 3)
        *notes, verdict = replay(capsys, 3, "verify", str(capture), "--catalog", live.url).splitlines()
        assert verdict.startswith("NOT ALL COMPARED: 1 of 4 instances compared, ") and f"{live.url}/readyz" in verdict
        for name in ("two", "three", "four"):
            assert any(note.startswith(f"instance {name} at ") and note.endswith("not compared") for note in notes)
        found = json.loads(replay(capsys, 3, "verify", str(capture), "--catalog", live.url, "--json"))["catalog"]
        assert (found["instances"], found["compared"], found["uncompared"]) == (4, 1, ["four", "three", "two"])


def test_verify_says_why_no_single_block_of_a_stopped_instance_was_looked_up(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = ONE[-1]
    stop = msgspec.structs.replace(
        last,
        first_offset=Offset(last.first_offset + len(last.events)),
        events=(InstanceStopped(reason=StopReason.SHUTDOWN),),
    )
    frames = [*ONE, stop]
    publish(fresh_nats, messages(frames), CLUSTER)
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, frames) and live.instances()[0].state == "stopped")
        said = replay(capsys, 0, "verify", fresh_nats, "--catalog", live.url)
    *_, note, equal = said.splitlines()
    assert "instance one: the catalog holds it for stopped, so single blocks were not compared" in note
    assert "1 instance at equal offsets, 0 blocks (the notes say of each instance why none" in equal


def test_verify_says_of_an_instance_that_went_on_that_its_blocks_were_not_looked_up(
    fresh_nats: str, tmp_path: Path
) -> None:
    publish(fresh_nats, messages(ONE[:-3]), CLUSTER)
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, ONE[:-3]))
        against = CatalogComparison(live, None)
        publish(fresh_nats, messages(ONE[-3:]), CLUSTER)  # while the log is read, which ends before
        eventually(lambda: has_all(live, ONE))
        capture = tmp_path / "a.kvbm"
        capture.write_bytes(packed(ONE[:-3]))
        found = verify(open_source(str(capture)), NATIVE, NATIVE_FOLD, against=against).catalog
    assert found is not None and (found.compared, found.blocks, found.differences) == (1, 0, [])
    place = place_text(ONE[-1].epoch, ONE[-1].next_offset)
    note = f"the catalog has moved on to {place} since, so single blocks were not compared"
    assert found.notes == [f"instance one: {note}"]


def test_a_log_that_is_written_still_is_read_again_and_one_that_stays_behind_has_a_status_of_its_own(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(fresh_nats, [*messages(ONE), *messages(TWO)], CLUSTER)
    capture = tmp_path / "a.kvbm"
    capture.write_bytes(packed([*ONE, *TWO[:-3]]))
    pauses: list[float] = []
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, ONE, TWO))
        monkeypatch.setattr(kvbm.replay.cli, "time", Waits(pauses.append))
        said = replay(capsys, 3, "verify", str(capture), "--catalog", live.url)
        assert "BEHIND: the log ends before where the catalog at " in said and "; 1 of 2 instances compared, " in said
        stood = place_text(TWO[-1].epoch, TWO[-1].next_offset)
        assert f"the catalog stood at {stood} before it was read" in said
        assert len(pauses) == 3

        def written(pause_s: float) -> None:
            capture.write_bytes(packed([*ONE, *TWO]))

        monkeypatch.setattr(kvbm.replay.cli, "time", Waits(written))
        said = replay(capsys, 0, "verify", str(capture), "--catalog", live.url)
        assert "2 instances at equal offsets" in said.splitlines()[-1]


class Waits:
    """The module `time`, with something else to do than to wait."""

    def __init__(self, sleep: Callable[[float], object]) -> None:
        self.sleep = sleep


def test_an_instance_that_is_gone_and_that_the_catalog_does_not_know_is_a_note(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last, now_ns = TWO[-1], time.time_ns()
    stop = msgspec.structs.replace(
        last,
        first_offset=Offset(last.next_offset),
        wall_time_ns=now_ns,
        events=(InstanceStopped(reason=StopReason.SHUTDOWN),),
    )
    publish(fresh_nats, messages(ONE), CLUSTER)
    capture = tmp_path / "a.kvbm"
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, ONE))
        capture.write_bytes(packed([*ONE, *TWO]))  # of months ago
        said = replay(capsys, 0, "verify", str(capture), "--catalog", live.url)
        assert "instance two: its last event is of 2026-01-01T" in said
        assert "it has forgotten it, or has never heard of it; not compared" in said and "equal: " in said
        capture.write_bytes(packed([*ONE, *TWO, stop]))
        said = replay(capsys, 0, "verify", str(capture), "--catalog", live.url)
        assert "instance two: it stopped at " in said and "(shutdown), and the catalog does not know it" in said
        for idle_s in (0, 3600):  # it goes on, and did an hour ago
            goes_on = msgspec.structs.replace(last, wall_time_ns=now_ns - idle_s * 1_000_000_000)
            capture.write_bytes(packed([*ONE, *TWO[:-1], goes_on]))
            said = replay(capsys, 1, "verify", str(capture), "--catalog", live.url)
            assert "DIFFERENT" in said and "catalog-absent of instance two" in said
            assert "the catalog does not know it and has not forgotten it" in said


def of_now(frame: Frame) -> Frame:
    return msgspec.structs.replace(frame, wall_time_ns=time.time_ns())


def test_verify_names_how_a_catalog_differs_from_the_log(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(fresh_nats, messages(ONE), CLUSTER)
    other = make_capture(9, commands=120).frames()  # the same name, another history
    capture = tmp_path / "a.kvbm"
    with catalog(fresh_nats, tmp_path, "live") as live:
        eventually(lambda: has_all(live, ONE))
        capture.write_bytes(packed([*TWO[:-1], of_now(TWO[-1])]))
        said = replay(capsys, 1, "verify", str(capture), "--catalog", live.url)
        assert "catalog-absent of instance two" in said and "catalog-ahead of instance one" in said
        cut = next(n for n in range(len(other), 0, -1) if other[n - 1].epoch < ONE[-1].epoch)
        capture.write_bytes(packed(other[:cut]))
        said = replay(capsys, 1, "verify", str(capture), "--catalog", live.url)
        assert "catalog-ahead of instance one" in said
        wrong = msgspec.structs.replace(ONE[-1], digest=ONE[-1].digest ^ 1)
        capture.write_bytes(packed([*ONE[:-2], wrong]))
        said = replay(capsys, 1, "verify", str(capture), "--catalog", live.url)
        assert "NOT COMPARED" in said
    said = replay(capsys, 2, "verify", str(capture), "--catalog", live.url, "--timeout", "1")


def test_a_log_is_served_into_a_stream_and_a_catalog_there_says_what_it_says(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = tmp_path / "a.kvbm"
    capture.write_bytes(packed([*ONE, *TWO]))
    with catalog(fresh_nats, tmp_path, "live") as live:
        said = replay(capsys, 0, "serve", str(capture), "--to", fresh_nats, "--cluster", CLUSTER)
        assert said.startswith(f"served: {len(ONE) + len(TWO):,} frames of 2 instances, ")
        eventually(lambda: has_all(live, ONE, TWO), "the catalog has not read what was served")
        said = replay(capsys, 0, "verify", str(capture), "--catalog", live.url)
        assert "equal: " in said
        said = replay(capsys, 0, "diff", str(capture), fresh_nats)
        said = replay(capsys, 2, "serve", str(capture), "--to", fresh_nats, "--cluster", CLUSTER)
        assert "nothing was written" in said
        fences = asyncio.run(fence_epochs(fresh_nats))
        assert fences == [ONE[-1].epoch, TWO[-1].epoch]


async def fence_epochs(url: str) -> list[int]:
    stream = await NatsStream.connect(url, WAIT_S)
    try:
        found = [await stream.fence(CLUSTER, InstanceId(name)) for name in ("one", "two")]
        return [one.epoch for one in found if one is not None]
    finally:
        await stream.close()


def test_a_live_stream_is_served_again_as_another_cluster(fresh_nats: str, capsys: pytest.CaptureFixture[str]) -> None:
    publish(fresh_nats, [*gone_back(ONE), *messages(TWO)], CLUSTER)
    said = replay(capsys, 0, "serve", fresh_nats, "--to", fresh_nats, "--cluster", "again")
    assert said.startswith(f"served: {len(ONE) + len(TWO) + 2:,} frames of 2 instances, ")
    said = replay(capsys, 0, "verify", fresh_nats)
    assert said.startswith("verified: 4 instances, ") and said.endswith("4 repeats, 0 findings (native fold)\n")
