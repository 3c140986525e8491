"""Managers on a real stream: snapshots that are asked for, a small journal that never fills, and two processes with one
name.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbm.assembly import journal_folder
from kvbm.core.codec import Frame, decode_frame
from kvbm.core.events import ResidenciesListed, SnapshotEnded
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.base import Position, is_fence
from kvbm.streams.nats.stream import NatsStream
from kvbm.workload.processes import start_catalog_process
from tests.eventually import eventually
from tests.managers import serve
from tests.nats_fixture import WAIT_S, cluster, nats_url, patient, started
from tests.published import is_published, opened, settings_of
from tests.servers import free_port

__all__ = ["cluster", "nats_url"]


async def frames_of(url: str, cluster: str) -> list[Frame]:
    """All frames of a cluster's one instance, in the stream's order."""
    stream = patient(await NatsStream.connect(url, WAIT_S))
    reader = await stream.pull(0, cluster)
    frames: list[Frame] = []
    try:
        while not reader.at_end:
            for message in await reader.fetch(WAIT_S):
                if is_fence(message.subject):
                    continue
                at = 0
                while at < len(message.data):
                    frame, at = decode_frame(message.data, at)
                    frames.append(frame)
    finally:
        await reader.close()
        await stream.close()
    return frames


def folded(frames: list[Frame]) -> Residencies:
    """The strict fold of frames, repeats left out; each epoch without a hole."""
    fold, end = Residencies(strict=True), Position(Epoch(0), Offset(0))
    for frame in frames:
        begins = Position(frame.epoch, frame.first_offset)
        if Position(frame.epoch, frame.next_offset) <= end:
            continue
        assert begins == end or (begins.epoch > end.epoch and begins.offset == 0), (begins, end)
        for event in frame.events:
            fold.evolve(event)
        assert fold.digest == frame.digest
        end = Position(frame.epoch, frame.next_offset)
    return fold


async def ask(url: str, cluster: str) -> bool:
    stream = patient(await NatsStream.connect(url, WAIT_S))
    try:
        return await stream.ask_snapshot(cluster, InstanceId("instance-0"))
    finally:
        await stream.close()


async def hear(url: str, cluster: str, epoch: Epoch, beats: int) -> None:
    """Wait for some heartbeats of an epoch."""
    stream = patient(await NatsStream.connect(url, WAIT_S))
    try:
        async with asyncio.timeout(WAIT_S):
            async for beat in stream.watch_pulses(cluster):
                beats -= beat.epoch == epoch
                if not beats:
                    return
    finally:
        await stream.close()


def test_a_snapshot_that_a_reader_asks_for_is_on_the_stream(tmp_path: Path, nats_url: str, cluster: str) -> None:
    with opened(settings_of(tmp_path, nats_url, cluster)) as manager:
        serve(manager, 1, 40)
        eventually(lambda: is_published(manager), "the stream does not come")
        before = manager.applied()
        assert asyncio.run(ask(nats_url, cluster))
        eventually(lambda: manager.applied() >= before + 2, "no snapshot began")
        eventually(lambda: is_published(manager), "the snapshot is not on the stream")
        frames = asyncio.run(frames_of(nats_url, cluster))
        kinds = [type(event) for frame in frames for event in frame.events][-2:]
        assert kinds == [ResidenciesListed, SnapshotEnded]
        assert set(folded(frames).held[Tier.HBM]) == set(manager.held(Tier.HBM))


def test_a_journal_much_smaller_than_what_it_has_carried_takes_everything(
    tmp_path: Path, nats_url: str, cluster: str
) -> None:
    settings = settings_of(tmp_path, nats_url, cluster, journal__segment_bytes=8192, journal__capacity_bytes=65536)
    with opened(settings) as manager:
        for prompt in range(400):
            serve(manager, prompt, 60)
            if prompt % 2 == 0:  # a burst that leaves no room for a snapshot would fill the journal for good
                eventually(lambda: is_published(manager), "the stream does not come")
        eventually(lambda: is_published(manager) and not manager.trouble(), "the journal is in trouble")
        assert manager.epoch == 1
        frames = asyncio.run(frames_of(nats_url, cluster))
    kept = sum(path.stat().st_size for path in journal_folder(settings).glob("*.kvbj"))
    assert kept <= 65536
    assert sum(len(event.hashes) for frame in frames for event in frame.events if hasattr(event, "hashes")) > 4 * 65536
    assert folded(frames).epoch == 1
    with opened(settings) as manager:
        assert manager.epoch == 2


def test_a_journal_in_memory_forgets_what_is_published(tmp_path: Path, nats_url: str, cluster: str) -> None:
    settings = settings_of(tmp_path, nats_url, cluster, journal__in_memory=True, journal__waiting_bytes=1 << 20)
    with opened(settings) as manager:
        for prompt in range(1500):
            serve(manager, prompt, 60)
            if prompt % 50 == 0:
                eventually(lambda: is_published(manager), "the stream does not come")
        eventually(lambda: is_published(manager), "the stream does not come")
        fold = folded(asyncio.run(frames_of(nats_url, cluster)))
        assert set(fold.held[Tier.HBM]) == set(manager.held(Tier.HBM))
        eventually(lambda: manager._writer._retention.used_bytes() < 1 << 20, "it keeps everything")


def test_a_server_that_is_away_until_the_journal_is_full_gets_another_epoch_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    server = started(tmp_path / "nats", port)
    flags = {"journal__segment_bytes": 8192, "journal__capacity_bytes": 65536, "journal__waiting_bytes": 1 << 20}
    settings = settings_of(tmp_path, server.url, "c", pools__nvme__slots=64, offload__nvme="second_use", **flags)
    try:
        with opened(settings) as manager:
            serve(manager, 1, 40)
            eventually(lambda: is_published(manager), "the stream does not come")
            server.stop()
            for prompt in range(2000):
                serve(manager, prompt, 60)
                if "unseen" in manager.trouble():
                    break
            assert "unseen by the catalog" in manager.trouble()
            eventually(lambda: "65536" in manager.trouble(), "the journal does not say why", state=manager.trouble)
            serve(manager, 77, 60)
            assert serve(manager, 77, 60).prefix.depth == 60
            assert manager.epoch == 1
            server = started(tmp_path / "nats", port)
            eventually(lambda: manager.epoch == 2 and not manager.trouble(), "no other epoch has begun")
            serve(manager, 78, 60)
            assert manager.settle(WAIT_S)
            eventually(lambda: is_published(manager), "the new epoch is not on the stream")
            fold = folded(asyncio.run(frames_of(server.url, "c")))
            assert set(fold.held[Tier.HBM]) == set(manager.held(Tier.HBM))
            assert set(fold.held[Tier.NVME]) == set(manager.held(Tier.NVME))
        with opened(settings) as manager:
            assert set(manager.held(Tier.NVME)) == set(fold.held[Tier.NVME])
    finally:
        server.stop()


def two_of_one_name(folder: Path, url: str, cluster: str, core: str, first_beats_s: float) -> tuple[Manager, Manager]:
    """Two managers, each of which has published a prompt. The second owns the name.

    Args:
        first_beats_s: three of them without a word from the second are silence to the first.
    """
    first = opened(settings_of(folder / "a", url, cluster, nats__heartbeat_s=first_beats_s), core)
    serve(first, 1, 20)
    eventually(lambda: is_published(first), "the stream does not come")
    second = opened(settings_of(folder / "b", url, cluster), core)
    assert second.epoch == 2
    serve(second, 2, 20)
    eventually(lambda: is_published(second), "the second does not get the stream")
    return first, second


def keeps_still(first: Manager, url: str, cluster: str, beats: int) -> None:
    """While so many heartbeats of the second come, the first does not take its place."""
    serve(first, 3, 20)
    asyncio.run(hear(url, cluster, Epoch(2), beats))
    assert first.epoch == 1
    assert first.published() < Position(Epoch(1), first.applied())


def comes_back(first: Manager, url: str, cluster: str) -> None:
    """Once the second has ended, the first begins a later epoch."""
    eventually(lambda: first.epoch == 3 and is_published(first), "the first does not come back")
    fold = folded(asyncio.run(frames_of(url, cluster)))
    assert fold.epoch == 3
    assert set(fold.held[Tier.HBM]) == set(first.held(Tier.HBM))


@pytest.mark.parametrize("core", ["native", "reference"])
def test_of_two_processes_with_one_name_the_first_keeps_still(
    tmp_path: Path, nats_url: str, cluster: str, core: str
) -> None:
    first, second = two_of_one_name(tmp_path, nats_url, cluster, core, 20.0)
    keeps_still(first, nats_url, cluster, 5)
    second.close()
    first.close()


@pytest.mark.parametrize("core", ["native", "reference"])
def test_of_two_processes_with_one_name_the_one_that_is_left_begins_a_later_epoch(
    tmp_path: Path, nats_url: str, cluster: str, core: str
) -> None:
    first, second = two_of_one_name(tmp_path, nats_url, cluster, core, 0.2)
    second.close()  # alive, it might be taken for silent whenever this machine is busy
    serve(first, 3, 20)
    comes_back(first, nats_url, cluster)
    first.close()


@pytest.mark.nightly
@pytest.mark.parametrize("core", ["native", "reference"])
def test_of_two_processes_with_one_name_the_one_that_stays_begins_a_later_epoch(
    tmp_path: Path, nats_url: str, cluster: str, core: str
) -> None:
    first, second = two_of_one_name(tmp_path, nats_url, cluster, core, 4.0)
    keeps_still(first, nats_url, cluster, 100)  # for longer than silence needs
    second.close()
    comes_back(first, nats_url, cluster)
    first.close()


def test_an_instance_that_has_lost_its_journal_goes_on_above_what_the_catalog_knows(tmp_path: Path) -> None:
    """The stream has forgotten it as well, fence and all: here it is another stream."""
    server = started(tmp_path / "nats")
    child, client = start_catalog_process(tmp_path / "catalog", server.url)
    try:
        client.wait_ready(WAIT_S)
        for number in (1, 2):
            settings = settings_of(tmp_path / f"life-{number}", server.url, "local", catalog__url=client.url)
            with opened(settings) as manager:
                assert manager.epoch == number
                eventually(lambda: is_published(manager), "it was not published")
        eventually(lambda: (found := client.instance("instance-0")) and found.epoch == 2, "the catalog has not read it")
        with opened(
            settings_of(tmp_path / "life-3", "", "local", catalog__url=client.url, nats__enabled=False)
        ) as manager:
            assert manager.epoch == 3
        child.stop()
        with opened(
            settings_of(tmp_path / "life-4", "", "local", catalog__url=client.url, nats__enabled=False)
        ) as manager:
            assert manager.epoch == 1  # nobody knows better
    finally:
        client.close()
        child.stop()
        server.stop()
