"""The stream's store is lost, with it all that was known of an instance that keeps its journal in memory; real
processes.

What begins again with a small epoch must not be taken for an older self of what the catalog remembers, and the older
self, when it goes on after all, must not be taken for the newer one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.core.ids import InstanceId
from kvbm.locate.http import CatalogClient
from kvbm.replay.opening import open_source
from kvbm.replay.verify import Verified
from kvbm.streams.nats.stream import NatsStream
from kvbm.workload.processes import Child, start_catalog_process
from tests.eventually import eventually
from tests.faults.processes.clusters import WAIT_S
from tests.faults.processes.parties import NatsParty
from tests.faults.processes.told import ToldWorker
from tests.readable import verify

INSTANCE, CLUSTER = "engine", "lost"


class Lost:
    """A nats-server whose store can be lost, a catalog with an archive, and processes of one instance that remember
    nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nats = NatsParty(folder, disk=False)
        self.nats.start()
        self.catalog: Child
        self.client: CatalogClient
        self.archive = folder / "archive"
        self.catalog, self.client = start_catalog_process(
            folder / "catalog", self.nats.url, {"catalog.archive": self.archive, "instance.cluster": CLUSTER}
        )
        self.client.wait_ready(WAIT_S)
        self.children: list[ToldWorker] = []

    def begin(self, family: int) -> ToldWorker:
        """Another process of the instance, which serves a prompt."""
        flags: dict[str, object] = {
            "instance.id": INSTANCE,
            "instance.cluster": CLUSTER,
            "instance.data_dir": self.folder / "instance",
            "journal.in_memory": True,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 256,
            "pools.nvme.slots": 0,
            "nats.url": self.nats.url,
            "nats.heartbeat_s": 0.2,
        }
        child = ToldWorker(f"{INSTANCE}-{len(self.children)}", self.folder / "logs", family, 0.0, flags, [])
        self.children.append(child)
        child.expect(WAIT_S, "start")
        child.ask(op="serve", family=family, branch=0)
        return child

    def lose_stream(self) -> None:
        """The server comes back with nothing."""
        self.nats.kill()
        shutil.rmtree(self.nats.folder)
        self.nats.start()

    def has_events(self) -> bool:
        """Whether the stream has any of the instance."""

        async def look() -> bool:
            stream = await NatsStream.connect(self.nats.url, WAIT_S)
            try:
                return await stream.tail(CLUSTER, InstanceId(INSTANCE)) is not None
            finally:
                await stream.close()

        return asyncio.run(look())

    def is_known(self, child: ToldWorker) -> bool:
        """Whether the catalog is sure that the instance is what this process says it is."""
        status, found = child.ask(op="status"), self.client.instance(INSTANCE)
        return found is not None and (found.epoch, found.offset, found.digest, found.suspect, found.excluded) == (
            status["epoch"],
            status["applied"],
            status["digest"],
            False,
            "",
        )

    def wait_known(self, child: ToldWorker) -> None:
        eventually(lambda: self.is_known(child), f"the catalog does not know {child.name}", state=self._found)

    def _found(self) -> Any:
        return self.client.instance(INSTANCE)

    def end(self) -> None:
        for child in (*self.children, self.catalog):
            child.process.send_signal(signal.SIGCONT)
            child.kill()
        self.client.close()
        self.nats.close()


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Lost]:
    system = Lost(tmp_path)
    try:
        yield system
    finally:
        system.end()


def freeze(child: ToldWorker) -> None:
    os.kill(child.process.pid, signal.SIGSTOP)


def thaw(child: ToldWorker) -> None:
    os.kill(child.process.pid, signal.SIGCONT)


def verified(source: str) -> Verified:
    return verify(open_source(source), NATIVE, NATIVE_FOLD)


@pytest.mark.parametrize(
    "thawed", ["first", "twice", *(pytest.param(part, marks=pytest.mark.nightly) for part in ("never", "last"))]
)  # parts of "twice"
def test_an_instance_that_begins_again_with_a_small_epoch_is_followed_when_the_stream_was_lost(
    lost: Lost, thawed: str
) -> None:
    for family in range(3):
        old = lost.begin(family)
        lost.wait_known(old)  # so that the stream can remind the next one of its epoch
        if family < 2:
            old.kill()
    assert old.ask(op="status")["epoch"] == 3
    freeze(old)
    lost.lose_stream()
    if thawed == "first":
        thaw(old)
        eventually(lost.has_events, "the older self does not say again what it has said")
        lost.wait_known(old)
        freeze(old)
    new = lost.begin(3)
    assert new.ask(op="status")["epoch"] == (4 if thawed == "first" else 1)
    lost.wait_known(new)
    if thawed in ("last", "twice"):
        thaw(old)
        eventually(
            lambda: "instance.fenced" in old.output.read_text(),
            "the older self does not see that its place is another's",
        )
    if thawed == "twice":
        freeze(old)
        new.ask(op="serve", family=4, branch=0)
        lost.wait_known(new)
        thaw(old)
    old.ask(op="serve", family=5, branch=0) if thawed in ("last", "twice") else old.kill()
    new.ask(op="serve", family=6, branch=0)
    lost.wait_known(new)
    assert new.ask(op="status")["epoch"] <= 4
    eventually(lambda: not lost.client.ready().degraded, "the catalog stays degraded")
    lives = 0 if thawed == "first" else 1  # in the archive, which has the lost stream too and is written a moment later
    eventually(lambda: verified(str(lost.archive)).lives == lives, "the archive does not have both streams")
    for source in (lost.nats.url, str(lost.archive)):
        report = verified(source)
        assert not report.findings, report
    assert report.lives == lives, report
