"""A stream that takes nothing, or has lost its leader: real nats-servers, a catalog process and real managers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from urllib.parse import urlsplit

import nats as nats_library
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.config import load_settings
from kvbm.core.answers import InstanceSummary
from kvbm.core.errors import ConfigError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.base import Position
from kvbm.streams.nats.setup import PULSE, STREAM
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import start_catalog_process
from tests.eventually import eventually, eventually_async
from tests.faults.processes.disk import Disk
from tests.faults.processes.leader_kills import LeaderKills
from tests.faults.processes.nats_cluster import NatsCluster

WAIT_S = 120.0
SPACE = Namespace(model="away", block_tokens=16)


def create(manager: Manager, hashes: bytes) -> None:
    """Create blocks and let go of them; the pool evicts its oldest for them."""
    slots = manager.allocate(len(hashes) // HASH_BYTES)
    assert slots is not None
    manager.unpin(manager.create(SPACE.id, NO_PARENT, 0, hashes, slots))


def is_published(manager: Manager) -> bool:
    return manager.published() == Position(manager.epoch, manager.applied())


# -- a server whose disk is full ---------------------------------------------------------------------------------------


def test_a_server_that_takes_nothing_is_noticed_by_everybody(tmp_path: Path) -> None:
    """nats-server answers no publish while its disk is full, and says so to nobody."""
    disk = Disk(tmp_path / "disk", 32 << 20)
    server = EmbeddedServer.start(disk.folder / "nats", timeout_s=WAIT_S)
    port = urlsplit(server.url).port
    assert port is not None
    flags = {
        "instance.id": "i",
        "instance.data_dir": str(tmp_path),
        "nats.url": server.url,
        "nats.heartbeat_s": 0.2,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 16,
        "snapshots.least_s": 1,
    }
    dice = random.Random(1)
    first = dice.randbytes(16 * HASH_BYTES)
    catalog, client = start_catalog_process(tmp_path / "catalog", server.url)
    try:
        with open_manager(load_settings(flags=flags), [SPACE], 16) as manager, capture_logs() as logs:
            create(manager, first)
            client.wait_ready(WAIT_S)

            def seen() -> bool:
                told = client.instance("i")
                return told is not None and (told.offset, told.suspect) == (manager.applied(), False)

            eventually(lambda: is_published(manager) and seen(), "the catalog does not see the instance")
            disk.fill(server.pid)
            prompts = [first, *(dice.randbytes(16 * HASH_BYTES) for _ in range(2000))]
            for prompt in prompts[1:]:
                create(manager, prompt)  # all before it are gone
            eventually(lambda: "nothing is published after offset" in manager.trouble(), "the manager sees no trouble")
            assert "stream" in manager.stats().trouble
            (line, *_) = [line for line in logs if line["event"] == "publisher.stalled"]
            assert line["waited_s"] >= 5 and line["offset"] < manager.applied()

            def behind() -> InstanceSummary | None:
                told = client.instance("i")
                assert told is not None
                is_told = told.suspect and told.suspicions and told.trouble and told.state == "live"
                return told if is_told and told.applied == manager.applied() else None

            told = eventually(behind, "the catalog does not say that the instance is behind")
            assert told is not None and told.applied > told.offset
            assert f"decided events up to offset {manager.applied()}" in told.suspicions[0]

            def is_suspected() -> (
                bool
            ):  # what the catalog cannot know better; left out while its publisher connects anew
                for prompt in prompts[:20]:  # the server may still have taken a message or two
                    found = [(one.suspect, one.depth) for one in client.lookup(SPACE, prompt).instances]
                    assert found in ([], [(True, 16)])
                    holders = client.block(SPACE, prompt[:HASH_BYTES]).holders
                    if found and [one.suspect for one in holders] == [True]:
                        return True
                return False

            eventually(is_suspected, "the answers do not say that they are suspect")

            disk.free(server.pid)
            os.kill(server.pid, signal.SIGKILL)  # until it is started again it takes nothing
            server.stop()
            server = EmbeddedServer.start(disk.folder / "nats", port=port, timeout_s=WAIT_S)
            eventually(lambda: is_published(manager) and not manager.trouble(), "the rest is not published")
            eventually(seen, "the instance stays behind")
    finally:
        client.close()
        catalog.stop()
        server.stop()
        disk.close()


# -- a cluster ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_everybody_agrees_after_the_leader_was_killed(tmp_path: Path) -> None:
    system = LeaderKills(tmp_path, instances=2)
    try:
        kill = system.kill(0, 20.0)
        assert not kill.differences, kill.sentence()
    finally:
        system.close()


@pytest.mark.nightly
def test_everybody_agrees_after_leaders_were_killed_under_light_and_heavy_load(tmp_path: Path) -> None:
    """And no answer hid that it was old. `tools/nats_kills.py` kills more of them, and says how long it took."""
    system = LeaderKills(tmp_path)
    try:
        for number, rate in enumerate((20.0, 400.0, 20.0)):
            kill = system.kill(number, rate)
            assert not kill.differences, kill.sentence()
            assert not kill.untold, kill.sentence()
    finally:
        system.close()


@pytest.mark.nightly
def test_events_go_on_while_each_server_in_turn_is_restarted_and_while_the_pulses_have_no_leader(
    tmp_path: Path,
) -> None:
    system = LeaderKills(tmp_path, instances=2)
    try:
        nats = system.nats
        for instance in system.instances:
            instance.rate = 100.0
        for name in nats.names:
            nats.kill(name, signal.SIGTERM)
            nats.start(name)
            eventually(nats.is_whole, "the cluster is not whole")
        before = [instance.manager.published() for instance in system.instances]
        eventually(
            lambda: all(one.manager.published() > was for one, was in zip(system.instances, before, strict=True)),
            "a publisher does not go on",
        )
        for instance in system.instances:
            instance.pause()
        assert not system.differences()
        kill = system.kill(1, 50.0, victim=eventually(lambda: nats.leader(PULSE), "no leader of the pulses"))
        assert not kill.differences and not kill.untold, kill.sentence()
    finally:
        system.close()


def test_events_flow_while_the_only_server_with_the_pulses_is_down(tmp_path: Path) -> None:
    """An operator's cluster: events on three servers, heartbeats on one.

    Without it nobody knows who lives, and says so.
    """
    with NatsCluster(tmp_path / "nats") as nats:

        async def make(name: str) -> None:
            await (await NatsStream.connect(nats.url, 10.0)).close()
            client = await nats_library.connect(nats.url.split(","))
            config = (await client.jsm().stream_info(name)).config
            await client.jsm().update_stream(config.evolve(num_replicas=3))
            await client.close()

        asyncio.run(make(STREAM))
        eventually(nats.is_whole, "the cluster is not whole")
        home = eventually(lambda: nats.leader(PULSE), "nobody has the pulses")
        nats.kill(home)
        eventually(lambda: nats.leader() and nats.meta_leader(), "no leader")
        url = ",".join(nats.url_of(name) for name in nats.running)
        settings = ServiceSettings(
            nats_url=url,
            database_url=f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}",
            liveness_s=1.0,
            connect_s=WAIT_S,
        )
        flags = {
            "instance.id": "i",
            "instance.data_dir": str(tmp_path),
            "nats.url": url,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 16,
        }

        async def play() -> None:
            service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
            try:
                await eventually_async(
                    lambda: service.sequencer.position(manager.instance).offset == manager.applied() > 0
                )
                await eventually_async(service.queries.view_age_s)
                nats.start(home)
                await eventually_async(
                    lambda: not service.queries.view_age_s() and service.heartbeats.liveness.last(manager.instance)
                )
            finally:
                await service.close()

        with open_manager(load_settings(flags=flags), [SPACE], 16) as manager:
            create(manager, random.Random(2).randbytes(16 * HASH_BYTES))
            asyncio.run(play())


@pytest.mark.parametrize("replicas", [0, 2, 4, 7])
def test_a_number_of_replicas_that_helps_nobody_is_refused(replicas: int) -> None:
    with pytest.raises(ConfigError, match=r"nats\.replicas"):
        load_settings(flags={"nats.replicas": str(replicas)})
