"""The stream on a real nats-server: started, shared, killed, absent, silent, forbidding."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.core.codec import decode_header
from kvbm.core.errors import ConfigError, MissingExtraError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.core.kernels import REFERENCE
from kvbm.streams import server as server_module
from kvbm.streams.base import Heartbeat, Position, StreamMessage
from kvbm.streams.journal import Journal
from kvbm.streams.memory import MemoryLog
from kvbm.streams.nats import NatsStream
from kvbm.streams.publisher import PublisherThread
from kvbm.streams.server import EmbeddedServer, answers, shared_server
from tests.nats_fixture import PlainOwner, cluster, fresh_nats, make_frame, nats_url  # noqa: F401
from tests.servers import free_port, nats_server

ONE = InstanceId("one")
WAIT_S = 20.0


def process_state(pid: int) -> str:
    """One letter, as in ps; "" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


def wait_until(what: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if what():
            return True
        time.sleep(0.01)
    return False


async def read_all(url: str, cluster: str) -> list[StreamMessage]:
    stream = await NatsStream.connect(url, WAIT_S)
    try:
        reader = await stream.pull(0, cluster)
        found: list[StreamMessage] = []
        while not reader.at_end:
            found += await reader.fetch(WAIT_S)
        return found
    finally:
        await stream.close()


def offsets_without_repeats(messages: list[StreamMessage]) -> list[int]:
    """The first offsets of the frames that go beyond those before them."""
    found: list[int] = []
    reached = 0
    for message in messages:
        at = 0
        while at < len(message.data):
            header = decode_header(message.data, at)
            at += header.frame_bytes
            if header.next_offset > reached:
                found.append(header.first_offset)
                reached = header.next_offset
    return found


# -- the embedded server ------------------------------------------------------------------------------------------------


def test_an_embedded_server_answers_on_the_loopback_and_leaves_nothing_behind(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "nats")
    try:
        assert server.url.startswith("nats://127.0.0.1:")
        assert answers(server.url, 1.0)
        assert (tmp_path / "nats" / "nats.url").read_text() == server.url
    finally:
        server.stop()
        server.stop()
    assert not is_alive(server.pid)
    assert not answers(server.url, 1.0)
    assert not (tmp_path / "nats" / "nats.url").exists()


def test_a_second_server_on_a_folder_is_refused_and_a_killed_one_makes_room(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)
    try:
        with pytest.raises(StreamError, match="in use by another nats-server"):
            EmbeddedServer.start(tmp_path)
        os.kill(server.pid, signal.SIGKILL)
        second = EmbeddedServer.start(tmp_path)
        second.stop()
    finally:
        server.stop()


def test_a_failed_start_names_the_log_and_quotes_its_last_line(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(StreamError, match=r"nonsense.*nats-server\.log"):
        EmbeddedServer.start(tmp_path, settings="nonsense: 1")
    assert time.monotonic() - started_s < 5.0
    assert not (tmp_path / "nats.url").exists()


def test_a_missing_wheel_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kvbm\[catalog\]"):
        EmbeddedServer.start(tmp_path)


def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer.start(tmp_path)))
    thread.start()
    thread.join(WAIT_S)
    time.sleep(0.2)
    assert answers(started[0].url, 1.0)
    started[0].stop()


SHARE = """
import sys, pathlib
from kvbm.streams.server import shared_server
server = shared_server(pathlib.Path(sys.argv[1]), 20.0)
print(server.url, server.owned.pid if server.owned else 0, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that use one folder's server, each until its input ends."""
    running: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SHARE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=WAIT_S)


def said(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        if line.startswith("nats://"):
            url, pid = line.split()
            return url, int(pid)
        assert line, f"the process ended with {process.wait(WAIT_S)}"


def test_processes_on_one_folder_share_the_server_of_the_first(
    share: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    answers_of_all = [said(process) for process in [share() for _ in range(4)]]
    assert len({url for url, _ in answers_of_all}) == 1
    assert sorted(pid > 0 for _, pid in answers_of_all) == [False, False, False, True]
    here = shared_server(tmp_path, WAIT_S)
    assert here.owned is None
    assert here.url == answers_of_all[0][0]


def test_a_server_dies_with_its_killed_owner_and_the_next_one_takes_its_port(
    share: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    owner = share()
    url, pid = said(owner)
    owner.kill()
    assert wait_until(lambda: not is_alive(pid))
    second = shared_server(tmp_path, WAIT_S)
    try:
        assert second.owned is not None
        assert second.url == url
    finally:
        second.stop()


def test_a_stale_url_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "nats.url").write_text(f"nats://127.0.0.1:{free_port()}")
    server = shared_server(tmp_path, WAIT_S)
    try:
        assert server.owned is not None
        assert answers(server.url, 1.0)
    finally:
        server.stop()


# -- connections --------------------------------------------------------------------------------------------------------


def failing_connect(url: str) -> tuple[str, float]:
    """What connecting says, and how long it took."""
    started_s = time.monotonic()
    with pytest.raises(StreamError) as caught:
        asyncio.run(NatsStream.connect(url, 1.0))
    return str(caught.value), time.monotonic() - started_s


def test_a_closed_port_ends_in_one_sentence_without_the_password() -> None:
    port = free_port()
    words, took_s = failing_connect(f"nats://someone:hunter2@127.0.0.1:{port}")
    assert f"nats://127.0.0.1:{port}" in words
    assert "hunter2" not in words
    assert "someone" not in words
    assert "\n" not in words
    assert took_s < 2.0


def test_a_port_that_never_answers_ends_in_one_sentence_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        words, took_s = failing_connect(f"127.0.0.1:{silent.getsockname()[1]}")
    assert "no answer" in words
    assert "\n" not in words
    assert took_s < 2.0


def test_a_server_without_jetstream_is_named(tmp_path: Path) -> None:
    port = free_port()
    command = [str(server_module.server_binary()), "-a", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            words = ""
            assert wait_until(lambda: not failing_connect(f"nats://127.0.0.1:{port}")[0].startswith("no connection"))
            words, _ = failing_connect(f"nats://127.0.0.1:{port}")
            assert "JetStream" in words
        finally:
            process.kill()


@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "nats://host:port", "nats://", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="nats://host:port"):
        asyncio.run(NatsStream.connect(url, 1.0))


def test_wrong_credentials_are_named() -> None:
    with nats_server('authorization { user: "kvbm", password: "right" }') as server:
        words, _ = failing_connect(server.url.replace("://", "://kvbm:wrong@"))
        assert "the user and password it wants" in words
        assert "wrong" not in words
        asyncio.run(read_all(server.url.replace("://", "://kvbm:right@"), "c"))


def test_the_streams_are_as_they_must_be(nats_url: str) -> None:
    import nats

    async def work() -> None:
        await (await NatsStream.connect(nats_url, WAIT_S)).close()
        client = await nats.connect(nats_url)
        try:
            events = (await client.jsm().stream_info("KVBM")).config
            assert events.subjects == ["kvbm.v1.events.>", "kvbm.v1.fence.>"]
            assert (events.storage, events.max_age) == ("file", 86400.0)
            assert (events.deny_delete, events.deny_purge, events.allow_direct) == (True, True, True)
            pulses = (await client.jsm().stream_info("KVBM_PULSE")).config
            assert (pulses.subjects, pulses.storage) == (["kvbm.v1.pulse.>"], "memory")
            assert pulses.max_msgs_per_subject == 1
        finally:
            await client.close()

    asyncio.run(work())


def test_a_foreign_stream_of_our_name_is_not_used(fresh_nats: str) -> None:
    import nats

    async def work() -> None:
        client = await nats.connect(fresh_nats)
        await client.jetstream().add_stream(name="KVBM", subjects=["else.>"])
        await client.close()
        with pytest.raises(StreamError, match="rename the other stream"):
            await NatsStream.connect(fresh_nats, WAIT_S)

    asyncio.run(work())


def test_a_forbidden_subject_is_an_error_and_others_still_work() -> None:
    settings = """
    authorization { users: [
      { user: "one", password: "x", permissions: {
          publish: ["kvbm.v1.events.c.one", "$JS.API.>"], subscribe: "_INBOX.>" } } ] }
    """
    with nats_server(settings) as server:
        url = server.url.replace("://", "://one:x@")

        async def work() -> None:
            stream = await NatsStream.connect(url, WAIT_S)
            started_s = time.monotonic()
            with pytest.raises(StreamError, match="permissions violation"):
                await stream.publish("c", InstanceId("two"), make_frame(0).data, WAIT_S)
            assert time.monotonic() - started_s < 2.0
            await stream.send_pulse(PlainOwner("c").heartbeat(Position(Epoch(1), Offset(0))))
            await stream.publish("c", ONE, make_frame(0).data, WAIT_S)
            with pytest.raises(StreamError, match="permissions violation"):
                await stream.send_pulse(PlainOwner("c").heartbeat(Position(Epoch(1), Offset(0))))
            assert stream.is_connected
            await stream.close()

        asyncio.run(work())


def test_a_full_stream_refuses_in_the_servers_words(fresh_nats: str) -> None:
    import nats
    from nats.js.api import DiscardPolicy, StreamConfig

    async def work() -> None:
        stream = await NatsStream.connect(fresh_nats, WAIT_S)
        client = await nats.connect(fresh_nats)
        config = (await client.jsm().stream_info("KVBM")).config
        assert isinstance(config, StreamConfig)
        await client.jsm().update_stream(config.evolve(max_msgs=1, discard=DiscardPolicy.NEW))
        await client.close()
        await stream.publish("c", ONE, make_frame(0).data)
        with pytest.raises(StreamError, match="maximum messages exceeded"):
            await stream.publish("c", ONE, make_frame(1).data)
        assert stream.is_connected
        await stream.close()

    asyncio.run(work())


def test_a_lost_connection_fails_what_waits_and_what_comes(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)

    async def work() -> None:
        stream = await NatsStream.connect(server.url, WAIT_S)
        os.kill(server.pid, signal.SIGSTOP)
        assert wait_until(lambda: process_state(server.pid) == "T")
        waiting = asyncio.create_task(stream.publish("c", ONE, make_frame(0).data, WAIT_S))
        await asyncio.sleep(0.1)
        os.kill(server.pid, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(StreamError, match="lost"):
            await waiting
        assert not stream.is_connected
        with pytest.raises(StreamError, match="lost"):
            await stream.publish("c", ONE, make_frame(0).data, WAIT_S)
        assert time.monotonic() - started_s < 2.0
        await stream.close()

    try:
        asyncio.run(work())
    finally:
        server.stop()


# -- through a server's death -------------------------------------------------------------------------------------------


def test_a_reader_and_a_watcher_go_on_after_a_kill_and_restart(tmp_path: Path) -> None:
    first = EmbeddedServer.start(tmp_path)
    port = int(first.url.rpartition(":")[2])

    async def work() -> None:
        reading = await NatsStream.connect(first.url, WAIT_S)
        writing = await NatsStream.connect(first.url, WAIT_S)
        for at in range(3):
            await writing.publish("c", ONE, make_frame(at).data)
        await writing.send_pulse(PlainOwner("c").heartbeat(Position(Epoch(1), Offset(1))))
        reader = await reading.pull(0, "c")
        watch = reading.watch_pulses("c")
        found = await reader.fetch(WAIT_S)
        while not reader.at_end:
            found += await reader.fetch(WAIT_S)
        assert (await anext(watch)).published == 1
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(StreamError):
            await reader.fetch(0.3)
        second = EmbeddedServer.start(tmp_path, port=port)
        try:
            writing = await NatsStream.connect(second.url, WAIT_S)
            await writing.publish("c", ONE, make_frame(3).data)
            more: list[StreamMessage] = []
            while not more:
                more = await reader.fetch(WAIT_S)
            assert [message.sequence for message in found + more] == [1, 2, 3, 4]
            await writing.send_pulse(PlainOwner("c").heartbeat(Position(Epoch(1), Offset(2))))
            async with asyncio.timeout(WAIT_S):
                assert (await anext(watch)).published == 2
            await writing.close()
            await reading.close()
        finally:
            second.stop()

    try:
        asyncio.run(work())
    finally:
        first.stop()


def test_a_reader_of_a_replaced_store_begins_anew(tmp_path: Path) -> None:
    port = free_port()
    first = EmbeddedServer.start(tmp_path / "a", port=port)

    async def work() -> None:
        stream = await NatsStream.connect(first.url, WAIT_S)
        await stream.publish("c", ONE, make_frame(0).data)
        reader = await stream.pull(0, "c")
        assert len(await reader.fetch(WAIT_S)) == 1
        first.stop()
        second = EmbeddedServer.start(tmp_path / "b", port=port)
        try:
            writing = await NatsStream.connect(second.url, WAIT_S)
            for at in range(3):
                await writing.publish("c", ONE, make_frame(at).data)
            found: list[StreamMessage] = []
            while len(found) < 3:
                found += await reader.fetch(WAIT_S)
            assert [message.sequence for message in found] == [1, 2, 3]
            await writing.close()
            await stream.close()
        finally:
            second.stop()

    try:
        asyncio.run(work())
    finally:
        first.stop()


def test_a_publisher_loses_nothing_over_kills_and_restarts_of_the_server(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", ONE, REFERENCE)
    journal.begin_epoch(Epoch(1))
    server = EmbeddedServer.start(tmp_path / "nats")
    port = int(server.url.rpartition(":")[2])
    publisher = PublisherThread(journal, server.url, "c", ONE, PlainOwner("c"), interval_s=0.1)
    publisher.start()
    try:
        for at in range(1500):
            journal.append(make_frame(at, blocks=8))
            publisher.notify()
            time.sleep(0.001)
            if at in (300, 700, 1100):
                os.kill(server.pid, signal.SIGKILL)
                server.stop()
                server = EmbeddedServer.start(tmp_path / "nats", port=port)
        assert publisher.wait_published(Position(Epoch(1), Offset(1500)), WAIT_S)
        assert publisher.stop(WAIT_S)
        messages = asyncio.run(read_all(server.url, "c"))
        assert offsets_without_repeats(messages) == list(range(1500))
    finally:
        publisher.stop(0.0)
        server.stop()
        journal.close()


def test_a_publisher_without_nats_does_not_hold_its_owner_up_and_catches_up_later(tmp_path: Path) -> None:
    frames = MemoryLog()
    port = free_port()
    publisher = PublisherThread(frames, f"nats://127.0.0.1:{port}", "c", ONE, PlainOwner("c"), interval_s=0.1)
    publisher.start()
    started_s = time.monotonic()
    for at in range(2000):
        frames.append(make_frame(at))
        publisher.notify()
    assert time.monotonic() - started_s < 5.0
    assert not publisher.wait_published(Position(Epoch(1), Offset(1)), 0.3)
    server = EmbeddedServer.start(tmp_path, port=port)
    try:
        assert publisher.wait_published(Position(Epoch(1), Offset(2000)), WAIT_S)
        assert publisher.stop(WAIT_S)
        messages = asyncio.run(read_all(server.url, "c"))
        assert offsets_without_repeats(messages) == list(range(2000))
        assert len(messages) < 1000  # grouped
    finally:
        publisher.stop(0.0)
        server.stop()


def test_a_publisher_stops_in_time_when_nats_never_comes() -> None:
    frames = MemoryLog()
    frames.append(make_frame(0))
    publisher = PublisherThread(frames, f"nats://127.0.0.1:{free_port()}", "c", ONE, PlainOwner("c"))
    publisher.start()
    started_s = time.monotonic()
    assert not publisher.stop(0.5)
    assert time.monotonic() - started_s < 2.0


def test_a_new_publisher_goes_on_where_the_stream_ends(nats_url: str, cluster: str) -> None:
    frames = MemoryLog()
    for epoch, count in ((1, 3), (2, 2)):
        for at in range(count):
            frames.append(make_frame(at, epoch=epoch))
        publisher = PublisherThread(frames, nats_url, cluster, ONE, PlainOwner(cluster, epoch=epoch))
        publisher.start()
        assert publisher.wait_published(Position(Epoch(epoch), Offset(count)), WAIT_S)
        assert publisher.stop(WAIT_S)
        assert publisher.published == Position(Epoch(epoch), Offset(count))
    messages = asyncio.run(read_all(nats_url, cluster))
    headers = [decode_header(message.data) for message in messages]
    # the first message could not know that it would arrive, so the second publisher repeats it
    assert [(header.epoch, header.first_offset) for header in headers] == [(1, 0), (1, 0), (2, 0)]


def test_heartbeats_tell_how_far_the_stream_is_and_the_last_one_that_it_stops(nats_url: str, cluster: str) -> None:
    frames = MemoryLog()
    publisher = PublisherThread(frames, nats_url, cluster, ONE, PlainOwner(cluster), interval_s=0.05)
    publisher.start()

    async def work() -> None:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        seen: list[Heartbeat] = []
        async with asyncio.timeout(WAIT_S):
            async for heartbeat in stream.watch_pulses(cluster):
                seen.append(heartbeat)
                if len(seen) == 3:
                    frames.append(make_frame(0))
                    publisher.notify()
                if heartbeat.published and not heartbeat.stopping:
                    await asyncio.to_thread(publisher.stop, WAIT_S)
                if heartbeat.stopping:
                    break
        assert [heartbeat.published for heartbeat in seen] == sorted(heartbeat.published for heartbeat in seen)
        assert seen[0].published == 0
        assert seen[-1].published == 1
        await stream.close()

    try:
        asyncio.run(work())
    finally:
        publisher.stop(0.0)


def test_a_publisher_refuses_impossible_names_at_once(nats_url: str) -> None:
    with pytest.raises(ConfigError, match=r"host\.1"):
        PublisherThread(MemoryLog(), nats_url, "c", InstanceId("host.1"), PlainOwner("c"))
