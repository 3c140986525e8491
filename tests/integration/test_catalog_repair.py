"""The catalog loses nothing: gaps are repaired by snapshots it asks for, restarts go on where they were, SQL catches
up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm import _native
from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.follow import upkeep
from kvbm.catalog.follow.archive import ArchiveFiles
from kvbm.catalog.follow.sql_writer import numbering
from kvbm.catalog.index.cluster_index import Audit, NewIndex
from kvbm.catalog.members.liveness import ExcludedWhy
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.catalog.sql.rows import ClaimRun, StoreBatch
from kvbm.catalog.sql.store import BatchOutcome, BatchResult, ClaimChunk, SqlStore
from kvbm.core.codec import VERSION, decode_frame, encode_frame
from kvbm.core.errors import CatalogError
from kvbm.core.events import EvictReason
from kvbm.core.ids import (
    InstanceId,
    NamespaceId,
    SequenceHash,
    Tier,
    pack_slots,
)
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.streams.access_samples import read_samples
from kvbm.streams.base import START, AccessSample, Mark, Position, StreamMessage, is_fence, mark_of
from kvbm.streams.fence_records import encode_fence
from kvbm.streams.memory import MemoryStream
from kvbm.streams.nats.reader import NatsReader
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from tests.catalog_metrics import metrics_of
from tests.eventually import WAIT_S, eventually_async
from tests.held_time import HeldTime, Hold, hold_catalogs
from tests.nats_fixture import cluster, nats_url, patient  # noqa: F401
from tests.servers import nats_server
from tests.snapshot_instances import SPACE, Instance, block_hashes

# Nobody falls silent and nothing is late because the machine is busy.
PATIENT: dict[str, Any] = {"connect_s": WAIT_S, "liveness_s": 10 * WAIT_S, "whole_wait_s": 2 * WAIT_S}


@contextlib.asynccontextmanager
async def catalog_on(
    settings: ServiceSettings, new_index: NewIndex = NATIVE_INDEX, stream: Any = None, ready: bool = True
) -> AsyncIterator[CatalogService]:
    catalog = await CatalogService.start(settings, NATIVE, new_index, stream)
    try:
        if ready:
            await eventually_async(lambda: catalog.is_ready, timeout_s=3 * WAIT_S)
        yield catalog
    finally:
        await catalog.close()


async def kill(catalog: CatalogService) -> None:
    """As if its process had been killed: nothing is stored or written any more."""
    for task in catalog.tasks:
        task.cancel()
    await asyncio.gather(*catalog.tasks, return_exceptions=True)
    await catalog.stream.close()
    await catalog.store.close()


@pytest.fixture
def settings(nats_url: str, cluster: str, sqlite_url: str, tmp_path: Path) -> ServiceSettings:  # noqa: F811
    return ServiceSettings(
        nats_url=nats_url,
        database_url=sqlite_url,
        cluster=cluster,
        store_every_s=0.02,
        ask_again_s=0.5,
        checkpoints=str(tmp_path / "checkpoints"),
        **PATIENT,
    )


def forget_checkpoints(settings: ServiceSettings) -> None:
    for path in Path(settings.checkpoints).iterdir():
        path.unlink()


def damage_checkpoints(settings: ServiceSettings) -> None:
    for path in Path(settings.checkpoints).glob("*.index"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)


def serve_catalog(server: str, database: str, within: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvbm.cli",
            "catalog",
            "serve",
            "--set",
            f"nats.url={server}",
            "--set",
            f"catalog.database={database}",
            "--set",
            f"instance.cluster={within}",
            "--set",
            "catalog.listen=127.0.0.1:0",
            "--set",
            f"instance.data_dir={folder}",
        ],
        stderr=subprocess.PIPE,
    )


def run(work: Callable[[NatsStream], Awaitable[None]], server: str) -> None:
    async def connected() -> None:
        stream = patient(await NatsStream.connect(server, WAIT_S))
        try:
            await work(stream)
        finally:
            await stream.close()

    asyncio.run(connected())


# -- gaps and snapshots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_index", [NATIVE_INDEX, ReferenceIndex], ids=["native", "reference"])
def test_a_gap_is_repaired_by_a_snapshot_the_catalog_asks_for(settings: ServiceSettings, new_index: NewIndex) -> None:
    async def work(stream: NatsStream) -> None:
        one, two = Instance(stream, str(settings.cluster), "one"), Instance(stream, str(settings.cluster), "two")
        async with catalog_on(settings, new_index) as catalog, one.alive(), two.alive():
            one.create(0, 10)
            two.create(0, 10)
            await two.publish()
            await one.publish()
            one.create(10, 20)
            await one.publish(lose=True)
            one.create(20, 30)
            await one.publish()
            await eventually_async(lambda: catalog.sequencer.counters.gaps == 1)
            await eventually_async(lambda: one.is_whole_in(catalog))
            assert catalog.queries.lookup(SPACE.id, block_hashes(0, 30)).deepest == 30
            assert two.is_whole_in(catalog) and two.snapshots == 0
            numbers = metrics_of(catalog)
            assert (numbers.gaps, numbers.gaps_repaired, numbers.suspect) == (1, 1, 0)
            assert one.snapshots >= 1 and numbers.snapshots_asked >= 1

    run(work, settings.nats_url)


def test_a_lost_end_is_found_by_the_heartbeat_and_repaired(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as catalog, one.alive():
            one.create(0, 10)
            await one.publish()
            one.create(10, 20)
            await one.publish(lose=True)
            await eventually_async(lambda: one.snapshots > 0 and one.is_whole_in(catalog))
            assert catalog.queries.lookup(SPACE.id, block_hashes(0, 30)).deepest == 20

    run(work, settings.nats_url)


async def claim_in_sql(settings: ServiceSettings, first: int, end: int) -> None:
    """As another catalog does that has read a message the stream lost since."""
    store = await SqlStore.open(settings.database_url)
    try:
        run = ClaimRun(
            pool="pool", namespace=SPACE.id, hashes=block_hashes(first, end), instance=InstanceId("gone"), at_ns=1
        )
        batch = StoreBatch(stream="another", previous=0, stream_sequence=1, claims=(run,))
        assert (await store.apply(batch)).outcome is BatchOutcome.APPLIED
    finally:
        await store.close()


def test_claims_of_events_that_were_missed_are_taken_from_sql(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as catalog, one.alive():
            one.create(0, 10)
            await one.publish()
            await claim_in_sql(settings, 100, 105)
            one.offload(0, 2)
            await one.publish(lose=True)
            one.offload(2, 4)
            await one.publish()
            await eventually_async(lambda: one.snapshots > 0 and one.is_whole_in(catalog))
            await eventually_async(lambda: catalog.queries.lookup(SPACE.id, block_hashes(100, 105)).deepest == 5)
            assert catalog.index.claim_counts() == {"pool": 7}  # no snapshot states claims again

    run(work, settings.nats_url)


def test_claims_that_only_sql_has_are_found_by_counting(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        counting = msgspec.structs.replace(settings, claims_every_s=0.05)
        async with catalog_on(counting) as catalog, one.alive():
            one.create(0, 10)
            one.offload(0, 2)
            await one.publish()
            await claim_in_sql(settings, 100, 105)
            await eventually_async(lambda: catalog.index.claim_counts() == {"pool": 7})
            assert metrics_of(catalog).gaps == 0

    run(work, settings.nats_url)


def test_a_claim_withdrawn_while_claims_are_taken_from_sql_stays_withdrawn(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw: list[Callable[[], Awaitable[None]]] = []
    read = SqlStore.claims

    async def slow(self: SqlStore, *args: Any) -> AsyncIterator[ClaimChunk]:
        chunks = [chunk async for chunk in read(self, *args)]
        while withdraw:
            await withdraw.pop()()
        for chunk in chunks:
            yield chunk

    monkeypatch.setattr(SqlStore, "claims", slow)

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        counting = msgspec.structs.replace(settings, claims_every_s=0.05)
        async with catalog_on(counting) as catalog, one.alive():
            one.create(0, 10)
            one.offload(0, 4)
            await one.publish()
            await eventually_async(lambda: catalog.index.claim_counts() == {"pool": 4})

            async def withdrawn() -> None:
                one.ledger.forget(Tier.OBJECT, SPACE.id, block_hashes(0, 1), EvictReason.MISSING)
                place = await one.publish()
                assert await catalog.follower.wait_for(one.name, place, WAIT_S) >= place

            withdraw.append(withdrawn)
            await claim_in_sql(settings, 100, 105)
            await eventually_async(lambda: catalog.index.claim_counts() == {"pool": 8})
            assert catalog.index.holders(SPACE.id, SequenceHash(block_hashes(0, 1))) == [("one", Tier.HBM, False)]

    run(work, settings.nats_url)


def test_an_instance_that_does_not_hear_is_asked_again(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as catalog:
            one.create(0, 10)
            await one.publish(lose=True)
            one.create(10, 20)
            await one.publish()  # joined midway, and nobody serves snapshots
            await one.beat()
            await eventually_async(lambda: metrics_of(catalog).snapshots_asked >= 2)
            (summary,) = catalog.queries.instances()
            assert (summary.suspicions, summary.trouble, summary.run) == (
                ["joined midway"],
                "journal full: 3 of 4 bytes",
                "r1",
            )
            assert summary.snapshot_asked_s is not None
            assert await catalog.requests.ask(one.name) is False
            assert await catalog.requests.ask(InstanceId("nobody")) is None
            async with one.alive():
                await eventually_async(lambda: one.is_whole_in(catalog))
            await eventually_async(lambda: catalog.queries.instances()[0].snapshot_asked_s is None)
            assert catalog.queries.instances()[0].suspicions == []

    run(work, settings.nats_url)


def test_two_catalogs_are_repaired_by_the_same_snapshots(settings: ServiceSettings, tmp_path: Path) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        other = msgspec.structs.replace(settings, checkpoints=str(tmp_path / "other"))
        async with catalog_on(settings) as first, catalog_on(other) as second, one.alive():
            one.create(0, 10)
            await one.publish()
            one.create(10, 20)
            await one.publish(lose=True)
            one.create(20, 30)
            await one.publish()
            await eventually_async(lambda: one.is_whole_in(first) and one.is_whole_in(second))
            assert metrics_of(first).gaps_repaired == metrics_of(second).gaps_repaired == 1

    run(work, settings.nats_url)


def test_what_memory_holds_wrongly_is_suspected_and_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged(ReferenceIndex):
        damaged = True

        def audit(self, pages: int = 64) -> Audit:
            differing = [InstanceId("one")] if self.damaged and self.view(InstanceId("one")) else []
            self.damaged = self.damaged and not differing
            return Audit(True, 10, differing, 0)

    async def work() -> None:
        stream = MemoryStream()
        one = Instance(stream, "c", "one")
        async with catalog_on(asked, Damaged, stream) as catalog, one.alive():
            one.create(0, 10)
            await one.publish()
            with capture_logs() as logs:
                await eventually_async(lambda: one.snapshots > 0 and one.is_whole_in(catalog))
            numbers = metrics_of(catalog)
            assert (numbers.digest_divergence, numbers.digest_repaired) == (1, 1)
            assert sum(entry["event"] == "index.damaged" for entry in logs) == 1

    monkeypatch.setattr(upkeep, "AUDIT_PAUSE_S", 0.01)
    asked = ServiceSettings(nats_url="", database_url="", cluster="c", ask_again_s=0.5, **PATIENT)
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(contextlib.closing(_Folder()))
        asked = msgspec.structs.replace(asked, database_url=f"sqlite:///{folder.path}/c.db")
        asyncio.run(work())


class _Folder:
    def __init__(self) -> None:
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self.path = self._folder.name

    def close(self) -> None:
        self._folder.cleanup()


# -- starts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_restarted_catalog_goes_on_from_its_checkpoint(settings: ServiceSettings, killed: bool) -> None:
    async def work(stream: NatsStream) -> None:
        one, two = Instance(stream, str(settings.cluster), "one"), Instance(stream, str(settings.cluster), "two")
        one.create(0, 5000)
        two.create(0, 100)
        two.offload(0, 50)
        first = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        await one.publish()
        wanted = await two.publish()
        await first.follower.wait_for(two.name, wanted, WAIT_S)
        await eventually_async(lambda: one.is_whole_in(first) and two.is_whole_in(first))
        await eventually_async(lambda: metrics_of(first).stored_sequence == metrics_of(first).stream_sequence)
        if killed:
            assert first.checkpointer is not None
            await first.checkpointer.write()
            two.create(100, 200)  # after the checkpoint
            await two.publish()
            await eventually_async(lambda: two.is_whole_in(first))
            await kill(first)
        else:
            await first.close()
        one.ledger.evict(Tier.HBM, block_hashes(0, 10), EvictReason.CAPACITY)
        await one.publish()
        with capture_logs() as logs:
            async with catalog_on(settings) as second:
                assert one.is_whole_in(second) and two.is_whole_in(second)
                assert metrics_of(second).digest_mismatches == metrics_of(second).blind_starts == 0
                assert second.index.claim_counts() == {"pool": 50}
                assert one.snapshots == two.snapshots == 0
        (started,) = [entry for entry in logs if entry["event"] == "catalog.started"]
        assert started["reading_after"] > 0 and started["residencies"] == 5100

    run(work, settings.nats_url)


def test_a_checkpoint_written_while_frames_are_applied_is_exact(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        first = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        assert first.checkpointer is not None
        one.create(0, 50_000)
        await one.publish()
        writing = asyncio.create_task(first.checkpointer.write())
        for number in range(100):
            one.ledger.evict(Tier.HBM, block_hashes(number * 100, number * 100 + 50), EvictReason.CAPACITY)
            one.create(50_000 + number * 100, 50_100 + number * 100)
            if number == 50:
                await one.snapshot()
            await one.publish()
        await writing
        await eventually_async(lambda: one.is_whole_in(first))
        await eventually_async(lambda: metrics_of(first).stored_sequence == metrics_of(first).stream_sequence)
        await kill(first)
        async with catalog_on(settings) as second:
            assert one.is_whole_in(second)
            assert metrics_of(second).digest_mismatches == 0
            assert second.index.anomalies().get("snapshot-incomplete", 0) == 0

    run(work, settings.nats_url)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_checkpoint_written_alone_is_the_only_one_whatever_is_written_beside_it(
    settings: ServiceSettings, is_under_way: bool
) -> None:
    """All stand at one place of the stream; the older ones name what the newest does not."""
    folder = Path(settings.checkpoints)

    def indexes() -> list[bytes]:
        return [path.read_bytes() for path in folder.glob("*.index*")]

    def has_begun(writing: asyncio.Task[Any]) -> bool:
        return any(folder.glob("*.part")) or writing.done()

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        first = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        checkpointer = first.checkpointer
        assert checkpointer is not None
        for number in range(6):
            one.create(number * 100, number * 100 + 100)
            end = await one.publish()
            await first.follower.wait_for(one.name, end, WAIT_S)
            writing = asyncio.create_task(checkpointer.write())
            if is_under_way:
                await eventually_async(partial(has_begun, writing))
            else:
                await writing
            first.sequencer.forget_namespaces([SPACE.id])
            first.index.forget_namespace(SPACE.id)
            assert await checkpointer.write_alone()
            await writing
            (index,) = indexes()
            assert SPACE.id not in index
        await first.close()

    run(work, settings.nats_url)


def test_without_a_checkpoint_every_instance_is_asked_for_a_snapshot(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one, gone = Instance(stream, str(settings.cluster), "one"), Instance(stream, str(settings.cluster), "gone")
        async with catalog_on(settings) as first:
            one.create(0, 100)
            gone.create(0, 100)
            gone.offload(0, 10)
            gone.ledger.unpin(Tier.HBM, pack_slots(range(100)))
            gone.ledger.stop()
            await one.publish()
            await gone.publish()
            await eventually_async(lambda: one.is_whole_in(first) and first.index.claim_counts() == {"pool": 10})
        forget_checkpoints(settings)
        async with one.alive(), catalog_on(settings, ready=False) as second:
            await eventually_async(lambda: second.is_ready)
            assert second.begun_after.sequence > 0
            assert one.is_whole_in(second) and one.snapshots > 0
            assert second.index.claim_counts() == {"pool": 10}
            assert second.queries.lookup(SPACE.id, block_hashes(0, 100)).deepest == 100

    run(work, settings.nats_url)


def test_a_catalog_whose_instances_stay_silent_is_ready_all_the_same(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as first:
            one.create(0, 100)
            await one.publish()
            await eventually_async(lambda: one.is_whole_in(first))
        forget_checkpoints(settings)
        await one.beat()
        async with catalog_on(msgspec.structs.replace(settings, whole_wait_s=0.3)) as second:
            assert second.queries.instances()[0].suspect

    run(work, settings.nats_url)


def test_a_damaged_checkpoint_is_passed_over(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as first:
            one.create(0, 100)
            await one.publish()
            await eventually_async(lambda: one.is_whole_in(first))
        damage_checkpoints(settings)
        with capture_logs() as logs:
            async with one.alive(), catalog_on(settings) as second:
                await eventually_async(lambda: one.is_whole_in(second))
        assert sum(entry["event"] == "checkpoint.damaged" for entry in logs) == 1

    run(work, settings.nats_url)


def test_a_replaced_stream_is_another_one_to_checkpoints_and_to_sql(
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    settings = ServiceSettings(
        nats_url="",
        database_url=sqlite_url,
        cluster=cluster,
        store_every_s=0.02,
        checkpoints=str(tmp_path / "checkpoints"),
        **PATIENT,
    )
    for epoch in (1, 2):
        with nats_server() as server:
            here = msgspec.structs.replace(settings, nats_url=server.url)

            async def work(stream: NatsStream, here: ServiceSettings = here, epoch: int = epoch) -> None:
                one = Instance(stream, cluster, "one", epoch)
                async with catalog_on(here) as catalog:
                    assert catalog.begun_after == START
                    for number in range(5):
                        one.create(number * 10, number * 10 + 10)
                        await one.publish()
                    one.offload(0, 10 * epoch)
                    await one.publish()
                    await eventually_async(lambda: one.is_whole_in(catalog))

            run(work, server.url)

    async def claims() -> int:
        store = await SqlStore.open(sqlite_url)
        try:
            return await store.claim_count()
        finally:
            await store.close()

    assert asyncio.run(claims()) == 20


def test_a_stream_replaced_under_a_running_catalog_is_followed_and_stored(
    cluster: str,  # noqa: F811
    sqlite_url: str,
) -> None:
    async def work(url: str, replace: Callable[[], None]) -> None:
        settings = ServiceSettings(
            nats_url=url, database_url=sqlite_url, cluster=cluster, store_every_s=0.02, **PATIENT
        )
        async with catalog_on(settings) as catalog:
            stream = patient(await NatsStream.connect(url, WAIT_S))
            one = Instance(stream, cluster, "one")
            for number in range(5):
                one.create(number, number + 1)
                await one.publish()
            await eventually_async(lambda: one.is_whole_in(catalog))
            await stream.close()
            replace()
            stream = patient(await NatsStream.connect(url, WAIT_S))
            two = Instance(stream, cluster, "two")
            two.create(0, 10)
            two.offload(0, 10)
            await two.publish()
            await eventually_async(lambda: two.is_whole_in(catalog))
            await eventually_async(
                lambda: metrics_of(catalog).stored_sequence == metrics_of(catalog).stream_sequence == 1
            )
            assert await catalog.store.claim_count() == 10
            await stream.close()

    with nats_server() as server:
        port = int(server.url.rpartition(":")[2])
        begun: list[Any] = []

        def replace() -> None:
            server.stop()
            shutil.rmtree(server.folder)
            server.folder.mkdir()
            begun.append(type(server).start(server.folder, port=port))

        try:
            asyncio.run(work(server.url, replace))
        finally:
            for another in begun:
                another.stop()


# -- a server that loses its end ---------------------------------------------------------------------------------------


class Losing:
    """A nats-server whose store can be set back to an older copy, as a power cut does to what was not synced."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._copy = folder / "server", folder / "copy"
        self._server = EmbeddedServer.start(self._folder)
        self.url = self._server.url

    def stop(self) -> None:
        self._server.stop()

    def start(self, elsewhere: bool = False) -> str:
        """Start it where it was, or on a port that nobody knows yet. Gives the URL."""
        port = -1 if elsewhere else int(self.url.rpartition(":")[2])
        self._server = EmbeddedServer.start(self._folder, port=port)
        return self._server.url

    def keep_copy(self) -> None:
        self.stop()
        shutil.copytree(self._folder, self._copy)
        self.start()

    def go_back(self) -> None:
        """Stopped, and as it was when the copy was made."""
        self.stop()
        shutil.rmtree(self._folder)
        self._copy.rename(self._folder)


@pytest.fixture
def losing(tmp_path: Path) -> Iterator[Losing]:
    server = Losing(tmp_path)
    try:
        yield server
    finally:
        server.stop()


class Lost:
    """Instance `one` has published what the server then loses; `two` and `three` have its sequences and more."""

    def __init__(self, server: Losing) -> None:
        self.server = server
        self.one, self.two, self.three = (Instance(None, "c", name) for name in ("one", "two", "three"))

    async def publish(self, instance: Instance, url: str, count: int, offloads: bool = False) -> int:
        """Messages of one block each. Gives the stream's end."""
        instance.stream = stream = patient(await NatsStream.connect(url, WAIT_S))
        first = int(instance.ledger.applied)
        for number in range(first, first + count):
            instance.create(number, number + 1)
            if offloads:
                instance.offload(number, number + 1)
            await instance.publish()
        end = await stream.last_sequence()
        await stream.close()
        return end

    async def publish_others(self, url: str, lost: int) -> None:
        """The stream grows past the sequences that were lost; at the end they are quiet."""
        kept = await self.end(url)
        assert await self.publish(self.two, url, lost - kept - 1, offloads=True) < lost
        assert await self.publish(self.three, url, 4) > lost

    async def end(self, url: str) -> int:
        stream = patient(await NatsStream.connect(url, WAIT_S))
        end = await stream.last_sequence()
        await stream.close()
        return end

    async def check(self, catalog: CatalogService) -> None:
        """Index and SQL tell of everybody what they have said, and of the same claims."""
        self.one.stream = stream = patient(await NatsStream.connect(self.server.url, WAIT_S))
        everybody = (self.one, self.two, self.three)
        try:
            async with self.one.alive():
                await eventually_async(lambda: all(one.is_whole_in(catalog) for one in everybody))
                await eventually_async(lambda: self.is_stored(catalog))
        finally:
            await stream.close()
        await eventually_async(lambda: "#" in catalog.writer.name)

    async def is_stored(self, catalog: CatalogService) -> bool:
        rows = await catalog.store.instance_positions()
        stands = {name: Position(row.epoch, row.next_offset) for name, row in rows.items()}
        wanted = {one.name: Position(one.epoch, one.ledger.applied) for one in (self.one, self.two, self.three)}
        claims = sum(catalog.index.claim_counts().values())
        return stands == wanted and claims == await catalog.store.claim_count() > 0


def settings_of(server: Losing, sqlite_url: str, folder: Path) -> ServiceSettings:
    return ServiceSettings(
        nats_url=server.url,
        database_url=sqlite_url,
        cluster="c",
        store_every_s=0.02,
        ask_again_s=0.5,
        checkpoints=str(folder / "checkpoints"),
        **PATIENT,
    )


@pytest.mark.parametrize("beginning", ["checkpoint", "position", "checkpoint of before", "position of before"])
def test_a_catalog_that_was_dead_while_the_server_lost_its_end_reads_the_new_history(
    losing: Losing,
    sqlite_url: str,
    tmp_path: Path,
    beginning: str,
) -> None:
    settings = settings_of(losing, sqlite_url, tmp_path)

    async def work() -> None:
        lost = Lost(losing)
        async with catalog_on(settings) as catalog:
            await lost.publish(lost.one, losing.url, 3)
            await eventually_async(lambda: lost.one.is_whole_in(catalog))
            if beginning.endswith(
                "of before"
            ):  # the checkpoint stands where the stream is still the same, SQL does not
                assert catalog.checkpointer is not None
                await catalog.checkpointer.write()
                catalog.checkpointer = None
        losing.keep_copy()
        async with catalog_on(settings) as catalog:
            if beginning.endswith("of before"):
                catalog.checkpointer = None
            end = await lost.publish(lost.one, losing.url, 12)
            await eventually_async(lambda: lost.one.is_whole_in(catalog))
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == end)
        if beginning.startswith("position"):
            forget_checkpoints(settings)
        losing.go_back()
        losing.start()
        await lost.publish_others(losing.url, end)
        async with catalog_on(settings, ready=False) as catalog:
            await lost.check(catalog)

    asyncio.run(work())


@pytest.mark.parametrize("idle", [True, False], ids=["nothing fetched since its start", "reading"])
def test_a_running_catalog_whose_server_lost_its_end_reads_the_new_history(
    losing: Losing,
    sqlite_url: str,
    tmp_path: Path,
    idle: bool,
) -> None:
    settings = settings_of(losing, sqlite_url, tmp_path)

    async def work() -> None:
        lost = Lost(losing)
        await lost.publish(lost.one, losing.url, 3)
        losing.keep_copy()
        async with catalog_on(settings) as catalog:
            end = await lost.publish(lost.one, losing.url, 12)
            await eventually_async(lambda: lost.one.is_whole_in(catalog))
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == end)
            if not idle:
                await lose(lost, end)
                await lost.check(catalog)
        if idle:
            async with catalog_on(settings) as catalog:
                assert catalog.begun_after.sequence == end
                await lose(lost, end)
                await lost.check(catalog)

    async def lose(lost: Lost, end: int) -> None:
        losing.go_back()
        await lost.publish_others(losing.start(elsewhere=True), end)
        losing.stop()
        losing.start()

    asyncio.run(work())


def test_a_catalog_that_was_behind_another_stores_the_new_history(
    losing: Losing,
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    """What it has read itself the stream still holds; what SQL stands at, by the other, it does not."""
    settings = settings_of(losing, sqlite_url, tmp_path)

    async def work() -> None:
        lost = Lost(losing)
        await lost.publish(lost.one, losing.url, 3)
        losing.keep_copy()
        slow = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        await eventually_async(lambda: lost.one.is_whole_in(slow))
        reading = next(task for task in slow.tasks if task.get_name() == "catalog-read")
        reading.cancel()  # it is slow: nothing of what follows reaches it
        await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(slow.reader, NatsReader) and slow.reader._pull is not None
        await slow.reader._pull.end()
        slow.reader._pull.why_broken = "the server went away"
        async with catalog_on(msgspec.structs.replace(settings, checkpoints=str(tmp_path / "other"))) as other:
            end = await lost.publish(lost.one, losing.url, 12)
            await eventually_async(lambda: metrics_of(other).stored_sequence == end)
        losing.go_back()
        losing.start()
        await lost.publish_others(losing.url, end)
        slow.tasks.append(asyncio.create_task(slow.follower.run()))
        try:
            await lost.check(slow)
        finally:
            await slow.close()

    asyncio.run(work())


def test_the_archive_of_a_catalog_that_was_dead_while_the_server_lost_its_end_begins_a_generation(
    losing: Losing,
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    settings = msgspec.structs.replace(settings_of(losing, sqlite_url, tmp_path), archive=str(tmp_path / "archive"))

    async def work() -> None:
        lost = Lost(losing)
        await lost.publish(lost.one, losing.url, 3)
        losing.keep_copy()
        async with catalog_on(settings) as catalog:
            end = await lost.publish(lost.one, losing.url, 12)
            await eventually_async(lambda: metrics_of(catalog).archive_sequence == end)
        losing.go_back()
        losing.start()
        await lost.publish_others(losing.url, end)
        end = await lost.end(losing.url)
        async with catalog_on(settings, ready=False) as catalog:
            await eventually_async(lambda: metrics_of(catalog).archive_sequence == end)
        generations = [path.name for path in sorted((tmp_path / "archive").glob("*.kvbm"))]
        assert [name.startswith("r0002-") for name in generations] == [False, True]
        written = (tmp_path / "archive" / generations[1]).read_bytes()
        stream = patient(await NatsStream.connect(losing.url, WAIT_S))
        reader = await stream.pull(0, "c")
        messages: list[StreamMessage] = []
        while not messages or messages[-1].sequence < end:
            more = await reader.fetch(WAIT_S)
            assert more, f"the stream gave nothing after {len(messages)} messages"
            messages += more
        assert written == b"".join(
            encode_fence(message) if is_fence(message.subject) else message.data for message in messages
        )
        await stream.close()

    asyncio.run(work())


def test_a_stream_gets_another_name_for_each_history_and_the_newest_counts(sqlite_url: str) -> None:
    async def work() -> None:
        store, stream = await SqlStore.open(sqlite_url), MemoryStream()
        one = Instance(stream, "c", "one")
        first = f"KVBM/c@{(await stream.state()).created}"

        async def named(lost: str = "") -> tuple[str, int]:
            name, place = await numbering(store, "c", await stream.state(), stream, lost)
            return name.removeprefix(first), place.sequence

        async def stored(name: str, previous: int, place: Mark) -> None:
            sequence, fingerprint = place
            batch = StoreBatch(
                stream=first + name, previous=previous, stream_sequence=sequence, fingerprint=fingerprint
            )
            assert (await store.apply(batch)).outcome is BatchOutcome.APPLIED

        async def publish(count: int) -> None:
            for _ in range(count):
                one.create(int(one.ledger.applied), int(one.ledger.applied) + 1)
                await one.publish()

        assert await named() == ("", 0)
        await publish(9)
        held = await stream.message(6)
        assert held is not None
        await stored("", 0, mark_of(held))
        assert await named() == ("", 6)
        stream.lose_end(5)
        assert await named() == ("#2", 0)  # too short
        await publish(5)
        assert await named() == ("#2", 0)  # another message is there
        held = await stream.message(8)
        assert held is not None
        await stored("#2", 0, mark_of(held))
        assert await named() == ("#2", 8)
        stream.forget(range(1, 9))
        assert await named() == ("#2", 8)  # aged out: no other message is there
        assert await named(first) == ("#2", 8)
        assert await named(first + "#2") == ("#3", 0)
        await stored("#2", 8, Mark(9, None))  # as `kvbm-replay rebuild` leaves it
        assert await named() == ("#2", 9)
        await store.close()

    asyncio.run(work())


# -- life -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def held_time(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    """Silence counts in it."""
    return hold_catalogs(monkeypatch)


async def time_passes(hold: Hold, catalog: CatalogService, heard: Instance) -> None:
    """A little, in which an instance is heard."""
    sent_ns = time.time_ns()
    await heard.beat()

    def is_heard() -> bool:
        last = catalog.heartbeats.liveness.last(heard.name)
        return last is not None and last.heartbeat.wall_time_ns >= sent_ns

    await eventually_async(is_heard, "a heartbeat does not come")
    hold.pass_on(0.1)
    await asyncio.sleep(0.01)  # others have their turn


def test_a_silent_instance_is_excluded_and_comes_back_and_both_are_logged(
    settings: ServiceSettings, held_time: HeldTime
) -> None:
    async def work(stream: NatsStream) -> None:
        one, two = Instance(stream, str(settings.cluster), "one"), Instance(stream, str(settings.cluster), "two")
        quick = msgspec.structs.replace(settings, liveness_s=0.8)
        with capture_logs() as logs, held_time.held() as hold:
            await excluded_and_back(quick, hold, one, two)
        said = [(entry["event"], entry["why"]) for entry in logs if entry.get("instance") == "one" and "why" in entry]
        assert [entry for entry in said if entry[0] in ("instance.excluded", "instance.returned")] == [
            ("instance.excluded", "silent"),
            ("instance.returned", "heard"),
            ("instance.excluded", "stopped"),
        ]

    async def excluded_and_back(quick: ServiceSettings, hold: Hold, one: Instance, two: Instance) -> None:
        async with catalog_on(quick) as catalog:
            one.create(0, 10)
            await one.publish()
            await two.publish()
            async with one.alive():
                await eventually_async(lambda: one.is_whole_in(catalog))
                assert catalog.queries.lookup(SPACE.id, block_hashes(0, 10)).deepest == 10

            async def is_excluded() -> bool:
                await time_passes(hold, catalog, two)
                return catalog.queries.lookup(SPACE.id, block_hashes(0, 10)).excluded == ["one"]

            await eventually_async(is_excluded)
            assert catalog.queries.lookup(SPACE.id, block_hashes(0, 10)).deepest == 0
            assert {entry.instance: entry.excluded for entry in catalog.queries.instances()} == {
                "one": "silent",
                "two": "",
            }
            assert metrics_of(catalog).excluded == 1
            async with one.alive():
                await eventually_async(lambda: catalog.queries.lookup(SPACE.id, block_hashes(0, 10)).deepest == 10)
            one.ledger.stop()
            await one.publish()
            await eventually_async(lambda: catalog.queries.lookup(SPACE.id, block_hashes(0, 10)).deepest == 0)

    run(work, settings.nats_url)


def test_an_instance_of_a_newer_kvbm_is_left_out_with_that_reason_until_an_epoch_that_can_be_read(
    settings: ServiceSettings,
) -> None:
    async def work(stream: NatsStream) -> None:
        within = str(settings.cluster)
        one, two = Instance(stream, within, "one"), Instance(stream, within, "two")
        async with catalog_on(settings) as catalog, one.alive(), two.alive():
            for instance in (one, two):
                instance.create(0, 10)
                await instance.publish()
            await eventually_async(lambda: one.is_whole_in(catalog) and two.is_whole_in(catalog))
            one.create(10, 20)
            for frame in one.ledger.take_frames(one.name, time.time_ns()):
                data = frame.data[:4] + (VERSION + 1).to_bytes(2, "little") + frame.data[6:-4]
                data += _native.crc32c(data).to_bytes(4, "little")
                await stream.publish(within, one.name, data)
            one.create(20, 30)
            await one.publish()  # in a version that is known
            await eventually_async(lambda: catalog.queries.lookup(SPACE.id, block_hashes(0, 30)).excluded == ["one"])
            await eventually_async(lambda: metrics_of(catalog).newer == 2)
            answer = catalog.queries.lookup(SPACE.id, block_hashes(0, 30))
            assert [(found.instance, found.depth) for found in answer.instances] == [("two", 10)]
            (shown,) = [entry for entry in catalog.queries.instances() if entry.instance == "one"]
            assert (shown.state, shown.excluded) == ("live", "newer")
            words = (
                f"epoch 1 has frames of version {VERSION + 1}; this catalog reads up to {VERSION}: upgrade the catalog"
            )
            assert shown.suspicions == [words]
            numbers = metrics_of(catalog)
            assert (numbers.excluded, numbers.gaps, numbers.poison, numbers.suspect, one.snapshots) == (1, 0, 0, 0, 0)
            again = Instance(stream, within, "one", epoch=2)
            one.epoch, one.ledger = again.epoch, again.ledger
            one.create(0, 5)
            await one.publish()
            await eventually_async(lambda: one.is_whole_in(catalog) and not metrics_of(catalog).excluded)
            depths = {
                found.instance: found.depth for found in catalog.queries.lookup(SPACE.id, block_hashes(0, 30)).instances
            }
            assert depths == {"one": 5, "two": 10}

    run(work, settings.nats_url)


def test_an_instance_of_a_newer_kvbm_is_not_said_to_have_caught_up_at_each_heartbeat(
    settings: ServiceSettings, held_time: HeldTime
) -> None:
    async def work(stream: NatsStream) -> None:
        one, two = Instance(stream, str(settings.cluster), "one"), Instance(stream, str(settings.cluster), "two")
        quick = msgspec.structs.replace(settings, liveness_s=0.8)
        with held_time.held() as hold:
            async with catalog_on(quick) as catalog:
                one.create(0, 10)
                for frame in one.ledger.take_frames(one.name, time.time_ns()):
                    data = frame.data[:4] + (VERSION + 1).to_bytes(2, "little") + frame.data[6:-4]
                    data += _native.crc32c(data).to_bytes(4, "little")
                    await stream.publish(str(settings.cluster), one.name, data)
                await two.publish()
                await eventually_async(lambda: metrics_of(catalog).newer > 0)
                until_s = hold.now_s + 5 * quick.liveness_s
                while hold.now_s < until_s:
                    await one.beat(one.ledger.applied)
                    await time_passes(hold, catalog, two)
                (shown,) = [entry for entry in catalog.queries.instances() if entry.instance == "one"]
                assert (shown.state, shown.excluded) == ("live", "newer")

    with capture_logs() as logs:
        run(work, settings.nats_url)
    assert [entry for entry in logs if entry["event"] == "instance.unreadable"]
    assert not [entry for entry in logs if entry["event"] in ("instance.caught_up", "instance.behind")]


def test_an_instance_that_stopped_is_never_behind_though_its_last_heartbeat_comes_after_its_stop(
    settings: ServiceSettings, held_time: HeldTime
) -> None:
    async def work(stream: NatsStream) -> None:
        one, two = Instance(stream, str(settings.cluster), "one"), Instance(stream, str(settings.cluster), "two")
        quick = msgspec.structs.replace(settings, liveness_s=0.8)
        with held_time.held() as hold:
            await stopped(quick, hold, one, two)

    async def stopped(quick: ServiceSettings, hold: Hold, one: Instance, two: Instance) -> None:
        async with catalog_on(quick) as catalog:
            one.create(0, 10)
            await one.publish()
            await two.publish()
            await one.beat()
            await eventually_async(lambda: one.is_whole_in(catalog))
            one.ledger.stop()
            await one.publish()
            await eventually_async(lambda: catalog.heartbeats.liveness.excluded() == {"one": ExcludedWhy.STOPPED})
            await one.beat()
            until_s = hold.now_s + 3 * quick.liveness_s
            while hold.now_s < until_s:
                await time_passes(hold, catalog, two)
            answer = catalog.queries.lookup(SPACE.id, block_hashes(0, 10))
            assert (answer.deepest, answer.excluded) == (0, ["one"])
            assert [entry.suspect for entry in catalog.queries.instances() if entry.instance == "one"] == [False]

    run(work, settings.nats_url)


# -- SQL --------------------------------------------------------------------------------------------------------------


def test_rows_dropped_while_the_database_was_away_are_read_again(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: SqlStore, batch: StoreBatch) -> BatchResult:
        raise CatalogError("the database does not answer")

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as catalog, one.alive():
            one.create(0, 1000)
            one.offload(0, 10)
            await one.publish()
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == metrics_of(catalog).stream_sequence)
            catalog.writer.waiting_bytes = 1000
            with monkeypatch.context() as away:
                away.setattr(SqlStore, "apply", refuse)
                for number in range(20):
                    one.offload(10 + number * 10, 20 + number * 10)
                    await one.publish()
                    await asyncio.sleep(0.02)
                await eventually_async(lambda: catalog.writer.is_behind)
                assert catalog.rows.waiting_bytes == 0
                one.offload(500, 600)
                await one.publish()
                await eventually_async(lambda: one.is_whole_in(catalog))
            await eventually_async(lambda: metrics_of(catalog).rows_read_again == 1)
            one.offload(600, 610)
            await one.publish()
            await eventually_async(lambda: catalog.index.claim_counts() == {"pool": 320})
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == metrics_of(catalog).stream_sequence)
            assert await catalog.store.claim_count() == 320
            (position,) = (await catalog.store.instance_positions()).values()
            assert Position(position.epoch, position.next_offset) == catalog.sequencer.position(one.name)
            assert not catalog.readiness().degraded

    run(work, settings.nats_url)


def test_a_database_restored_from_an_older_copy_is_brought_up_to_date(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(settings) as catalog:
            one.create(0, 100)
            for number in range(10):
                one.offload(number * 10, number * 10 + 10)
                await one.publish()
            last = await stream.last_sequence()
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == last)
            fourth = await stream.message(last - 6)
            assert fourth is not None
            with sqlite3.connect(tmp_path / "catalog.db") as database:  # as it was after the fourth message
                place = (last - 6, f"{mark_of(fourth).fingerprint:016x}")
                database.execute("UPDATE positions SET stream_sequence = ?, fingerprint = ?", place)
                database.execute("UPDATE instance_positions SET next_offset = 1")
                database.execute("DELETE FROM object_claims")
            one.create(100, 110)
            await one.publish()
            await eventually_async(lambda: metrics_of(catalog).rows_read_again == 1)
            await one.publish()
            one.offload(100, 101)
            await one.publish()
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == last + 2)
            assert await catalog.store.claim_count() == 61  # what lay in messages 5 to 12
            assert catalog.failure is None

    run(work, settings.nats_url)


def test_a_replica_goes_on_when_the_one_that_wrote_is_killed(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    postgres_url: str,
    tmp_path: Path,
) -> None:
    """The writer is a process of its own, killed in the midst of its work; positions in SQL never go back."""
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=postgres_url,
        cluster=cluster,
        store_every_s=0.01,
        checkpoints=str(tmp_path / "b"),
        **PATIENT,
    )

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, cluster, "one")
        one.create(0, 4000)
        await one.publish()
        seen: list[int] = []
        claimed = 0
        for _ in range(2):
            child = serve_catalog(nats_url, postgres_url, cluster, tmp_path)
            try:
                store = await SqlStore.open(postgres_url)
                async with catalog_on(settings) as replica:
                    read_line = child.stderr.readline  # type: ignore[union-attr]
                    while child.poll() is None and b"follows" not in await asyncio.to_thread(read_line):
                        pass
                    assert child.poll() is None
                    for number in range(100):
                        one.offload(claimed, claimed + 10)
                        claimed += 10
                        await one.publish()
                        seen.append(await store.position(replica.writer.name))
                        if number == 50:
                            os.kill(child.pid, signal.SIGKILL)
                            child.wait()
                    await eventually_async(lambda: one.is_whole_in(replica))
                    last = await stream.last_sequence()
                    while seen[-1] < last:
                        await asyncio.sleep(0.02)
                        seen.append(await store.position(replica.writer.name))
                    assert await store.claim_count() == claimed
                    (position,) = (await store.instance_positions()).values()
                    assert Position(position.epoch, position.next_offset) == (1, one.ledger.applied)
                    assert replica.failure is None
                await store.close()
            finally:
                child.kill()
                child.wait()
                assert child.stderr is not None
                child.stderr.close()
        assert seen == sorted(seen)

    run(work, nats_url)


# -- archive ----------------------------------------------------------------------------------------------------------


def test_the_archive_keeps_every_frame_once_over_restarts(settings: ServiceSettings, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    archiving = msgspec.structs.replace(settings, archive=str(folder))

    def has_archived(catalog: CatalogService, last: int) -> bool:
        return metrics_of(catalog).archive_sequence == last

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        sent: list[bytes] = []
        for turn in range(3):
            catalog = await CatalogService.start(archiving, NATIVE, NATIVE_INDEX)
            for number in range(20):
                one.create(turn * 1000 + number * 10, turn * 1000 + number * 10 + 10)
                for frame in one.ledger.take_frames(one.name, time.time_ns()):
                    sent.append(frame.data)
                    await stream.publish(one.cluster, one.name, frame.data)
            last = await stream.last_sequence()
            await stream.send_sample(sample)
            await eventually_async(partial(has_archived, catalog, last))
            await eventually_async(lambda catalog=catalog: metrics_of(catalog).samples >= 1)  # type: ignore[misc]
            if turn == 1:
                await kill(catalog)
            else:
                await catalog.close()
        written = b"".join(path.read_bytes() for path in sorted(folder.glob("*.kvbm")))
        assert written == b"".join(sent)
        assert len(list(read_samples(folder / "samples"))) >= 3

    sample = AccessSample(
        instance=InstanceId("one"),
        cluster=str(settings.cluster),
        wall_time_ns=1,
        namespace=NamespaceId(SPACE.id),
        hashes=block_hashes(0, 3),
        depth=2,
        rate=1.0,
    )
    run(work, settings.nats_url)


def test_an_archive_whose_disk_is_full_is_said_and_waited_for(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiving = msgspec.structs.replace(settings, archive=str(tmp_path / "archive"))

    def full(self: ArchiveFiles, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        async with catalog_on(archiving) as catalog:
            with monkeypatch.context() as disk:
                disk.setattr(ArchiveFiles, "_write", full)
                one.create(0, 10)
                await one.publish()
                await eventually_async(lambda: "No space left" in catalog.readiness().degraded)
                await eventually_async(lambda: one.is_whole_in(catalog))
                assert catalog.is_ready
            await eventually_async(lambda: not catalog.readiness().degraded)
            await eventually_async(lambda: metrics_of(catalog).archive_sequence > 0)

    run(work, settings.nats_url)


# -- bursts -----------------------------------------------------------------------------------------------------------


def test_a_burst_into_a_stopped_catalog_ends_with_equal_digests(settings: ServiceSettings) -> None:
    """The size by hand: KVBM_BURST_BLOCKS=1000000."""
    blocks = int(os.environ.get("KVBM_BURST_BLOCKS", "200000"))
    each = 50_000

    async def work(stream: NatsStream) -> None:
        instances = [
            Instance(stream, str(settings.cluster), f"i{number}") for number in range(max(2, blocks // each // 2))
        ]
        async with catalog_on(settings) as catalog:
            for instance in instances:
                await instance.publish()
            await eventually_async(lambda: len(catalog.queries.instances()) == len(instances))
        events = 0
        while events < blocks:
            for instance in instances:
                instance.create(0, each // 2)
                instance.ledger.evict(Tier.HBM, block_hashes(0, each // 4), EvictReason.CAPACITY)
                instance.create(0, each // 4)
                instance.ledger.evict(Tier.HBM, block_hashes(0, each // 2), EvictReason.CAPACITY)
                events += 3 * each // 2
                await instance.publish()
        for instance in instances:
            instance.create(0, each // 10)
            await instance.publish()
        async with catalog_on(settings) as catalog:
            assert all(instance.is_whole_in(catalog) for instance in instances)
            numbers = metrics_of(catalog)
            assert numbers.blocks >= blocks
            assert (numbers.gaps, numbers.digest_mismatches, numbers.holes) == (0, 0, 0)

    run(work, settings.nats_url)


def test_nothing_of_a_catalog_is_an_instance(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        async with catalog_on(settings) as first, catalog_on(settings) as second:
            await eventually_async(
                lambda: first.heartbeats.liveness._own_s is not None and second.heartbeats.liveness._own_s is not None
            )
            assert first.queries.instances() == second.queries.instances() == []

    run(work, settings.nats_url)


def test_a_database_that_hangs_does_not_make_rows_pile_up(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SqlStore.apply
    answers = asyncio.Event()

    async def hang(self: SqlStore, batch: StoreBatch) -> BatchResult:
        await answers.wait()
        return await real(self, batch)

    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        monkeypatch.setattr(SqlStore, "apply", hang)
        async with catalog_on(settings) as catalog:
            catalog.writer.waiting_bytes = 1000
            one.create(0, 1000)
            for number in range(60):
                one.offload(number * 10, number * 10 + 10)
                await one.publish()
            await eventually_async(lambda: one.is_whole_in(catalog))
            assert catalog.rows.waiting_bytes <= 4000
            answers.set()
            await eventually_async(lambda: metrics_of(catalog).rows_read_again == 1)
            await eventually_async(lambda: metrics_of(catalog).stored_sequence == metrics_of(catalog).stream_sequence)
            assert await catalog.store.claim_count() == 600

    run(work, settings.nats_url)


def test_an_instance_whose_first_snapshot_never_ended_is_asked_for_one(settings: ServiceSettings) -> None:
    async def work(stream: NatsStream) -> None:
        one = Instance(stream, str(settings.cluster), "one")
        (frame,) = one.ledger.take_frames(one.name, time.time_ns())
        decoded, _ = decode_frame(frame.data)
        start = msgspec.structs.replace(decoded, events=decoded.events[:1], digest=0)
        async with catalog_on(settings) as catalog:
            await stream.publish(one.cluster, one.name, encode_frame(start))  # and the rest of its start was never cut
            await eventually_async(
                lambda: (
                    catalog.queries.instances()[0].suspicions == ["no completed snapshot"]
                    if catalog.queries.instances()
                    else False
                )
            )
            await eventually_async(lambda: metrics_of(catalog).snapshots_asked >= 1)

    run(work, settings.nats_url)
