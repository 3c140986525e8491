"""The stream on a real nats-server: started, shared, killed, absent, silent, forbidding."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbm.core.backend import REFERENCE
from kvbm.core.codec import decode_header
from kvbm.core.errors import ConfigError, FencedError, MessageTooLargeError, MissingExtraError, StreamError
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset
from kvbm.streams import server as server_module
from kvbm.streams.base import (
    ORIGIN,
    AccessSample,
    Fence,
    Heartbeat,
    Position,
    StreamMessage,
    Tail,
    events_subject,
    is_fence,
)
from kvbm.streams.journal.journal import Journal
from kvbm.streams.memory import MemoryLog
from kvbm.streams.nats.reader import PULL_MESSAGES, NatsReader
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher import reports as publisher_reports
from kvbm.streams.publisher import window as publisher_window
from kvbm.streams.publisher.machine import Publisher, PublisherOptions
from kvbm.streams.publisher.messages import (
    Acked,
    Appended,
    Connect,
    Connected,
    Effect,
    FencedOff,
    FenceSet,
    Input,
    Publish,
    PublisherTicked,
    ReportFenced,
    SetFence,
)
from kvbm.streams.publisher.thread import PublisherThread
from kvbm.streams.server import EmbeddedServer, answers, shared_server
from tests.eventually import eventually, eventually_async
from tests.nats_fixture import (  # noqa: F401
    WAIT_S,
    PlainOwner,
    cluster,
    fetch_for_ever,
    fresh_nats,
    make_frame,
    nats_url,
    started,
)
from tests.servers import free_port, nats_server

ONE = InstanceId("i")  # whose frames `make_frame` makes


def process_state(pid: int) -> str:
    """One letter, as in ps; "" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


def comes_to(publisher: PublisherThread, position: Position, timeout_s: float) -> bool:
    """Whether everything before a position gets on the stream in time."""
    until_s = time.monotonic() + timeout_s
    while publisher.published < position:
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.01)
    return True


async def read_all(url: str, cluster: str) -> list[StreamMessage]:
    stream = await NatsStream.connect(url, WAIT_S)
    try:
        reader = await stream.pull(0, cluster, timeout_s=WAIT_S)
        found: list[StreamMessage] = []
        while not reader.at_end:
            found += await reader.fetch(WAIT_S)
        return [message for message in found if not is_fence(message.subject)]
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


# -- the embedded server -----------------------------------------------------------------------------------------------


def test_an_embedded_server_answers_on_the_loopback_and_leaves_nothing_behind(tmp_path: Path) -> None:
    server = started(tmp_path / "nats")
    try:
        assert server.url.startswith("nats://127.0.0.1:")
        assert answers(server.url, WAIT_S)
        assert (tmp_path / "nats" / "nats.url").read_text() == server.url
    finally:
        server.stop()
        server.stop()
    assert not is_alive(server.pid)
    assert not answers(server.url, WAIT_S)
    assert not (tmp_path / "nats" / "nats.url").exists()


def test_a_second_server_on_a_folder_is_refused_and_a_killed_one_makes_room(tmp_path: Path) -> None:
    server = started(tmp_path)
    try:
        with pytest.raises(StreamError, match="in use by another nats-server"):
            started(tmp_path)
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: not is_alive(server.pid), "the killed server goes on")
        second = started(tmp_path)
        second.stop()
    finally:
        server.stop()


def test_a_failed_start_names_the_log_and_quotes_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(
        StreamError, match=r"nonsense.*nats-server\.log"
    ):  # other words than those of a start that takes too long
        EmbeddedServer.start(tmp_path, settings="nonsense: 1", timeout_s=WAIT_S)
    assert not (tmp_path / "nats.url").exists()


def test_a_missing_wheel_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kvbm-ledger\[catalog\]"):
        started(tmp_path)


def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    begun: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: begun.append(started(tmp_path)))
    thread.start()
    thread.join(WAIT_S)
    eventually(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), "the thread has not ended")
    assert answers(begun[0].url, WAIT_S)
    begun[0].stop()


SHARE = """
import sys, pathlib
from kvbm.streams.server import shared_server
server = shared_server(pathlib.Path(sys.argv[1]), 60.0)
print(server.url, server.owned.pid if server.owned else 0, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that use one folder's server, each until its input ends."""
    (tmp_path / "nats.url").write_text(
        f"nats://127.0.0.1:{free_port()}"
    )  # a port that no client's end is given meanwhile
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
    eventually(lambda: not is_alive(pid))
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
        assert answers(server.url, WAIT_S)
    finally:
        server.stop()


def test_the_address_of_another_folders_server_is_not_believed(tmp_path: Path) -> None:
    other = started(tmp_path / "other")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "nats.url").write_text(other.url)  # left by a killed server, whose port the other was given
    try:
        mine = shared_server(folder, WAIT_S)
        assert mine.url != other.url
        assert mine.owned is not None
        for damage in (other.url.encode(), b"", b"\xff" * 9, b"nats://127.0.0.1:4x22", b"nats://127.0.0.2:4222"):
            (folder / "nats.url").write_bytes(damage)
            assert shared_server(folder, WAIT_S) == (mine.url, None), damage
        (folder / "nats.url").write_text(mine.url)
        for ports in folder.glob("*.ports"):
            ports.write_bytes(b'{"nats":["nats://127.0.0.1:1"]}')
        assert shared_server(folder, WAIT_S) == (mine.url, None)
        mine.stop()
    finally:
        other.stop()


@pytest.mark.parametrize(
    "left", [b"\xff\xfe", b"nats://127.0.0.1:4x22", b"nats://[", b"nats://127.0.0.1:99999999", b"\x00" * 20]
)
def test_a_damaged_address_costs_no_more_than_the_port(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "nats.url").write_bytes(left)
    server = shared_server(tmp_path, WAIT_S)
    try:
        assert server.owned is not None
    finally:
        server.stop()


# -- connections -------------------------------------------------------------------------------------------------------


def failing_connect(url: str, timeout_s: float = WAIT_S) -> str:
    """What connecting says when it fails."""
    with pytest.raises(StreamError) as caught:
        asyncio.run(NatsStream.connect(url, timeout_s))
    return str(caught.value)


def test_a_closed_port_ends_in_one_sentence_without_the_password() -> None:
    port = free_port()
    words = failing_connect(f"nats://someone:hunter2@127.0.0.1:{port}")
    assert f"nats://127.0.0.1:{port}" in words
    assert "hunter2" not in words
    assert "someone" not in words
    assert "\n" not in words


def test_a_port_that_never_answers_ends_in_one_sentence_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StreamError, match=r"\Ano answer .* within 1 s.*\Z") as late:
            asyncio.run(NatsStream.connect(f"127.0.0.1:{silent.getsockname()[1]}", 1.0))
    assert late.value.timeout_s == 1.0


def test_a_server_without_jetstream_is_named(tmp_path: Path) -> None:
    port = free_port()
    command = [str(server_module.server_binary()), "-a", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            words = ""
            eventually(lambda: not failing_connect(f"nats://127.0.0.1:{port}").startswith("no connection"))
            words = failing_connect(f"nats://127.0.0.1:{port}")
            assert "JetStream" in words
        finally:
            process.kill()


@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "nats://host:port", "nats://", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="nats://host:port"):
        asyncio.run(NatsStream.connect(url, WAIT_S))


def test_wrong_credentials_are_named() -> None:
    with nats_server('authorization { user: "kvbm", password: "right" }') as server:
        words = failing_connect(server.url.replace("://", "://kvbm:wrong@"))
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
        for subjects in (["else.>"], ["kvbm.v1.events.>"]):
            await client.jetstream().add_stream(name="KVBM", subjects=subjects)
            with pytest.raises(
                StreamError, match=r"needs kvbm\.v1\.events\.>, kvbm\.v1\.fence\.>.*rename the other stream"
            ):
                await NatsStream.connect(fresh_nats, WAIT_S)
            assert (await client.jsm().stream_info("KVBM")).config.subjects == subjects
            await client.jsm().delete_stream("KVBM")
        await client.close()

    asyncio.run(work())


def test_a_forbidden_subject_is_an_error_and_others_still_work() -> None:
    settings = """
    authorization { users: [
      { user: "one", password: "x", permissions: {
          publish: ["SUBJECT", "$JS.API.>"], subscribe: "_INBOX.>" } } ] }
    """.replace("SUBJECT", events_subject("c", "i"))
    with nats_server(settings) as server:
        url = server.url.replace("://", "://one:x@")

        async def work() -> None:
            stream = await NatsStream.connect(url, WAIT_S)
            with pytest.raises(StreamError, match="permissions violation"):  # not the words of a wait that ended
                await stream.publish("c", InstanceId("two"), make_frame(0).data, WAIT_S)
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
        await stream.publish("c", ONE, make_frame(0).data, WAIT_S)
        with pytest.raises(StreamError, match="maximum messages exceeded"):
            await stream.publish("c", ONE, make_frame(1).data, WAIT_S)
        assert stream.is_connected
        await stream.close()

    asyncio.run(work())


def test_a_lost_connection_fails_what_waits_and_what_comes(tmp_path: Path) -> None:
    server = started(tmp_path)

    async def work() -> None:
        stream = await NatsStream.connect(server.url, WAIT_S)
        os.kill(server.pid, signal.SIGSTOP)
        eventually(lambda: process_state(server.pid) == "T")
        waiting = asyncio.create_task(stream.publish("c", ONE, make_frame(0).data, WAIT_S))
        ended, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not ended  # the server has stopped, and answers nothing
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StreamError, match="lost"):
            await waiting
        assert not stream.is_connected
        with pytest.raises(StreamError, match="lost"):
            await stream.publish("c", ONE, make_frame(0).data, WAIT_S)
        await stream.close()

    try:
        asyncio.run(work())
    finally:
        server.stop()


# -- through a server's death ------------------------------------------------------------------------------------------


def test_a_reader_and_a_watcher_go_on_after_a_kill_and_restart(tmp_path: Path) -> None:
    port = free_port()
    first = started(tmp_path, port)

    async def work() -> None:
        reading = await NatsStream.connect(first.url, WAIT_S)
        writing = await NatsStream.connect(first.url, WAIT_S)
        for at in range(3):
            await writing.publish("c", ONE, make_frame(at).data, WAIT_S)
        await writing.send_pulse(PlainOwner("c").heartbeat(Position(Epoch(1), Offset(1))))
        reader = await reading.pull(0, "c", timeout_s=WAIT_S)
        watch = reading.watch_pulses("c")
        found = await reader.fetch(WAIT_S)
        while not reader.at_end:
            found += await reader.fetch(WAIT_S)
        assert (await anext(watch)).published == 1
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(StreamError):
            await fetch_for_ever(reader)
        second = started(tmp_path, port)
        try:
            writing = await NatsStream.connect(second.url, WAIT_S)
            await writing.publish("c", ONE, make_frame(3).data, WAIT_S)
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
    first = started(tmp_path / "a", port)

    async def work() -> None:
        stream = await NatsStream.connect(first.url, WAIT_S)
        await stream.publish("c", ONE, make_frame(0).data, WAIT_S)
        reader = await stream.pull(0, "c", timeout_s=WAIT_S)
        assert len(await reader.fetch(WAIT_S)) == 1
        first.stop()
        second = started(tmp_path / "b", port)
        try:
            writing = await NatsStream.connect(second.url, WAIT_S)
            for at in range(3):
                await writing.publish("c", ONE, make_frame(at).data, WAIT_S)
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


def test_a_reader_of_a_store_that_lost_its_end_and_has_grown_past_it_begins_anew(tmp_path: Path) -> None:
    port = free_port()

    async def publish(server: EmbeddedServer, *numbers: int) -> None:
        stream = await NatsStream.connect(server.url, WAIT_S)
        for at in numbers:
            await stream.publish("c", ONE, make_frame(at).data, WAIT_S)
        await stream.close()

    async def read(reader: NatsReader, count: int) -> list[int]:
        found: list[StreamMessage] = []
        while len(found) < count:
            found += await reader.fetch(WAIT_S)
        return [message.sequence for message in found]

    async def work() -> None:
        server = started(tmp_path / "a", port)
        await publish(server, 0, 1, 2)
        server.stop()
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # what a power cut leaves of it
        server = started(tmp_path / "a", port)
        stream = await NatsStream.connect(server.url, WAIT_S)
        reader = await stream.pull(0, "c", timeout_s=WAIT_S)
        await publish(server, 3, 4)
        assert await read(reader, 5) == [1, 2, 3, 4, 5]
        server.stop()
        server = started(tmp_path / "b", port)
        try:
            await publish(server, 13, 14, 15, 16)  # it has grown past what was read before the reader is back
            assert await read(reader, 7) == [1, 2, 3, 4, 5, 6, 7]
            server.stop()
            server = started(tmp_path / "b", port)
            await publish(server, 17)
            assert await read(reader, 1) == [8]  # the same store again: it goes on
            await stream.close()
        finally:
            server.stop()

    asyncio.run(work())


def test_a_publisher_loses_nothing_over_kills_and_restarts_of_the_server(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", ONE, REFERENCE)
    journal.begin_epoch(Epoch(1))
    port = free_port()
    server = started(tmp_path / "nats", port)
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
                server = started(tmp_path / "nats", port)
        assert comes_to(publisher, Position(Epoch(1), Offset(1500)), WAIT_S)
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
    for at in range(2000):  # nobody listens at that port: what waited for a connection would wait for ever
        frames.append(make_frame(at))
        publisher.notify()
    assert not comes_to(publisher, Position(Epoch(1), Offset(1)), 0.3)
    server = started(tmp_path, port)
    try:
        assert comes_to(publisher, Position(Epoch(1), Offset(2000)), WAIT_S)
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
    assert not publisher.stop(0.5)
    eventually(lambda: not publisher._thread.is_alive(), "it goes on")


def test_a_new_publisher_goes_on_where_the_stream_ends(nats_url: str, cluster: str) -> None:
    frames = MemoryLog()
    for epoch, count in ((1, 3), (2, 2)):
        for at in range(count):
            frames.append(make_frame(at, epoch=epoch))
        publisher = PublisherThread(frames, nats_url, cluster, ONE, PlainOwner(cluster, epoch=epoch))
        publisher.start()
        assert comes_to(publisher, Position(Epoch(epoch), Offset(count)), WAIT_S)
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


# -- one place, several that want it -----------------------------------------------------------------------------------


def headers_in(messages: list[StreamMessage]) -> list[tuple[int, int]]:
    """Epoch and first offset of every frame, as stored."""
    found = []
    for message in messages:
        at = 0
        while at < len(message.data):
            header = decode_header(message.data, at)
            at += header.frame_bytes
            found.append((header.epoch, header.first_offset))
    return found


async def drive(publisher: Publisher, stream: NatsStream, cluster: str, happened: Input) -> list[Effect]:
    """Step and do what it says, until it only waits; the effects. A frozen process is one that is not stepped."""
    done: list[Effect] = []
    inputs = [happened]
    while inputs:
        effects = publisher.step(time.monotonic(), inputs.pop(0))
        done += effects
        for effect in effects:
            try:
                match effect:
                    case Connect(attempt, _):
                        fence, tail = await stream.fence(cluster, ONE, WAIT_S), await stream.tail(cluster, ONE, WAIT_S)
                        inputs.append(Connected(attempt, fence, tail, stream.max_message_bytes))
                    case SetFence(attempt, epoch, run, expected):
                        fence = await stream.set_fence(cluster, ONE, epoch, run, expected, WAIT_S)
                        inputs.append(FenceSet(attempt, fence))
                    case Publish(attempt, data, _, named, acked):
                        await stream.publish(cluster, ONE, data, WAIT_S, fence=named, acked=acked)
                        inputs.append(Acked(attempt))
                    case _:
                        pass
            except FencedError as error:
                inputs.append(FencedOff(attempt, str(error)))
    return done


def test_a_process_that_wakes_after_its_epoch_ended_stores_nothing_more(nats_url: str, cluster: str) -> None:
    old_log, new_log = MemoryLog(), MemoryLog()

    async def work() -> None:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        options = PublisherOptions(0.05, message_bytes=1, linger_s=0.0)
        old = Publisher(old_log, Epoch(1), "old", options)
        old_log.append(make_frame(0))
        await drive(old, stream, cluster, PublisherTicked())
        new = Publisher(new_log, Epoch(2), "new", options)
        new_log.append(make_frame(0, epoch=2))
        await drive(new, stream, cluster, PublisherTicked())
        before = await stream.last_sequence(WAIT_S)
        for at in range(1, 4):
            old_log.append(make_frame(at))
        done = await drive(old, stream, cluster, Appended())
        assert [effect for effect in done if isinstance(effect, Publish)]  # it did not know
        assert ReportFenced(Epoch(2), "new") in done
        assert await stream.last_sequence(WAIT_S) == before
        new_log.append(make_frame(1, epoch=2))
        await drive(new, stream, cluster, Appended())
        assert new.published == Position(Epoch(2), Offset(2))
        assert headers_in(await read_all(nats_url, cluster)) == [(1, 0), (2, 0), (2, 1)]
        await stream.close()

    asyncio.run(work())


async def ask_snapshot(url: str, cluster: str) -> bool:
    stream = await NatsStream.connect(url, WAIT_S)
    try:
        return await stream.ask_snapshot(cluster, ONE, WAIT_S)
    finally:
        await stream.close()


class Two:
    """Two processes with one name: the first owns it, and the second has nothing but events of its own.

    Args:
        second_interval_s: three of them without a word from the first are silence to the second.
    """

    def __init__(self, url: str, cluster: str, second_interval_s: float) -> None:
        self.logs = MemoryLog(), MemoryLog()
        self.owners = PlainOwner(cluster, epoch=1, run="first"), PlainOwner(cluster, epoch=1, run="second")
        self.first, self.second = (
            PublisherThread(log, url, cluster, ONE, owner, interval_s)
            for log, owner, interval_s in zip(self.logs, self.owners, (0.1, second_interval_s), strict=True)
        )
        for log in self.logs:
            log.append(make_frame(0))
        self.first.start()
        assert comes_to(self.first, Position(Epoch(1), Offset(1)), WAIT_S)

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *error: object) -> None:
        self.first.stop(0.0)
        self.second.stop(0.0)

    def end_first(self) -> None:
        """Let the second take over: it sends what it has in a later epoch."""
        assert self.first.stop(WAIT_S)
        eventually(lambda: self.owners[1].fenced == [Epoch(1)], "the second does not take over")
        self.logs[1].append(make_frame(0, epoch=2))
        self.second.notify()
        assert comes_to(self.second, Position(Epoch(2), Offset(1)), WAIT_S)
        assert self.second.place == ""


def test_of_two_with_one_name_the_second_is_quiet(
    nats_url: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Two(nats_url, cluster, second_interval_s=20.0) as two:
        two.second.start()
        told = []

        def is_told() -> bool:
            told.append(capsys.readouterr().out)
            return "instance.fenced" in told[-1]

        eventually(is_told, "the second is not told that it is")
        assert f"run {two.owners[0].run} has" in two.second.place and two.first.place == ""
        seen = len(two.owners[0].beats)
        eventually(lambda: len(two.owners[0].beats) > seen + 4)
        assert two.owners[1].fenced == []
        assert not comes_to(two.second, Position(Epoch(1), Offset(1)), 0.0)
        assert two.owners[1].beats == []
        assert asyncio.run(ask_snapshot(nats_url, cluster))
        eventually(lambda: two.owners[0].asked == 1)
        assert two.owners[1].asked == 0
        assert "".join([*told, capsys.readouterr().out]).count("instance.fenced") == 1
        two.logs[0].append(make_frame(1))
        two.first.notify()
        assert comes_to(two.first, Position(Epoch(1), Offset(2)), WAIT_S)
        assert set(headers_in(asyncio.run(read_all(nats_url, cluster)))) == {(1, 0), (1, 1)}


def test_who_finds_one_of_its_name_that_has_ended_takes_a_later_epoch(nats_url: str, cluster: str) -> None:
    with Two(nats_url, cluster, second_interval_s=0.2) as two:
        assert two.first.stop(WAIT_S)  # alive, it might be taken for silent whenever this machine is busy
        two.second.start()
        two.end_first()
        assert set(headers_in(asyncio.run(read_all(nats_url, cluster)))) == {(1, 0), (2, 0)}


@pytest.mark.nightly
def test_of_two_with_one_name_one_is_quiet_while_the_other_lives_and_takes_a_later_epoch_after_it(
    nats_url: str, cluster: str
) -> None:
    with Two(nats_url, cluster, second_interval_s=4.0) as two:
        two.second.start()
        seen = len(two.owners[0].beats)
        eventually(lambda: len(two.owners[0].beats) > seen + 200)  # for longer than silence needs
        assert two.owners[1].fenced == []
        assert two.owners[1].beats == []
        assert not comes_to(two.second, Position(Epoch(1), Offset(1)), 0.0)
        two.end_first()
        assert set(headers_in(asyncio.run(read_all(nats_url, cluster)))) == {(1, 0), (2, 0)}


def test_messages_of_a_window_behind_a_refused_one_come_again_in_order(fresh_nats: str) -> None:
    """The server takes ten messages of the window and refuses the rest until it may hold more."""
    import nats
    from nats.js.api import DiscardPolicy

    async def allow(count: int, discard: DiscardPolicy) -> None:
        client = await nats.connect(fresh_nats)
        config = (await client.jsm().stream_info("KVBM")).config
        await client.jsm().update_stream(config.evolve(max_msgs=count, discard=discard))
        await client.close()

    async def prepare() -> None:
        await (await NatsStream.connect(fresh_nats, WAIT_S)).close()
        await allow(11, DiscardPolicy.NEW)

    asyncio.run(prepare())
    frames = MemoryLog()
    for at in range(40):
        frames.append(make_frame(at, blocks=1500))
    publisher = PublisherThread(frames, fresh_nats, "c", ONE, PlainOwner("c"), interval_s=0.1, window_bytes=128 << 10)
    publisher.start()
    try:
        eventually(lambda: publisher.published.offset >= 10)
        assert not comes_to(publisher, Position(Epoch(1), Offset(40)), 0.3)
        asyncio.run(allow(-1, DiscardPolicy.OLD))
        assert comes_to(publisher, Position(Epoch(1), Offset(40)), WAIT_S)
        assert offsets_kept_aside(asyncio.run(read_all(fresh_nats, "c"))) == list(range(40))
    finally:
        publisher.stop(0.0)


def offsets_kept_aside(messages: list[StreamMessage]) -> list[int]:
    """The first offsets in the order in which a reader that keeps frames behind a hole aside takes them."""
    aside: dict[int, int] = {}
    found: list[int] = []
    reached = 0
    for message in messages:
        at = 0
        while at < len(message.data):
            header = decode_header(message.data, at)
            at += header.frame_bytes
            aside[header.first_offset] = header.next_offset
        while reached in aside:
            found.append(reached)
            reached = aside[reached]
    return found


class DroppingStream(NatsStream):
    """Loses the messages whose first offset is in `lost`, once each, without a word; as a connection that ends does."""

    lost: set[int]
    behind: set[int]  # messages of its window that arrive before the connection is lost
    _arrived: set[int]

    async def publish(
        self,
        cluster: str,
        instance: InstanceId,
        data: bytes,
        timeout_s: float = 5.0,
        fence: Fence | None = None,
        acked: Position = ORIGIN,
    ) -> int:
        """See `EventLog.publish`."""
        first = decode_header(data).first_offset
        if first in self.lost:
            self.lost.discard(first)
            await eventually_async(lambda: self._arrived >= self.behind, "the others of its window do not arrive")
            await self._connections.now.close()
            raise StreamError("the connection is lost")
        sequence = await super().publish(cluster, instance, data, timeout_s, fence, acked)
        self._arrived.add(first)
        return sequence


def test_a_hole_before_the_tail_is_filled_by_the_next_process(
    nats_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has 0 1 3 4 when the process ends: its last message ends at 5, and 2 is not there."""
    for name in ("ACK_FIRST_S", "ACK_LEAST_S"):  # a busy machine's acknowledgements are not late
        monkeypatch.setattr(publisher_window, name, WAIT_S)
    lost = {2}
    connections: list[DroppingStream] = []

    async def connect(url: str, timeout_s: float) -> NatsStream:
        if connections:
            raise StreamError("the server is away")
        stream = await DroppingStream.connect(url, timeout_s)
        assert isinstance(stream, DroppingStream)
        stream.lost, stream.behind, stream._arrived = lost, {3, 4}, set()
        connections.append(stream)
        return stream

    frames = MemoryLog()
    for at in range(5):
        frames.append(make_frame(at, blocks=1100))  # one a message, with this window
    owner = PlainOwner(cluster)
    first = PublisherThread(frames, nats_url, cluster, ONE, owner, 0.1, connect, window_bytes=100 << 10)
    first.start()
    eventually(lambda: bool(connections) and not connections[0].is_connected)
    assert not first.stop(0.0)
    eventually(lambda: not first._thread.is_alive(), "it goes on")
    assert headers_in(asyncio.run(read_all(nats_url, cluster))) == [(1, 0), (1, 1), (1, 3), (1, 4)]
    assert first.published == Position(Epoch(1), Offset(2))

    second = PublisherThread(frames, nats_url, cluster, ONE, owner, 0.1, window_bytes=100 << 10)
    second.start()
    try:
        assert comes_to(second, Position(Epoch(1), Offset(5)), WAIT_S)
        assert offsets_kept_aside(asyncio.run(read_all(nats_url, cluster))) == list(range(5))
    finally:
        second.stop(0.0)


def test_a_fence_that_is_gone_is_set_again_by_its_owner(fresh_nats: str) -> None:
    """As after the stream's max_age without a renewal; here somebody has deleted the message."""
    import nats

    async def lose_fence() -> None:
        client = await nats.connect(fresh_nats)
        config = (await client.jsm().stream_info("KVBM")).config
        await client.jsm().delete_stream("KVBM")
        await client.jsm().add_stream(config.evolve(deny_delete=False, deny_purge=False))
        await client.close()

    async def purge_fence() -> None:
        client = await nats.connect(fresh_nats)
        await client.jsm().purge_stream("KVBM", subject="kvbm.v1.fence.>")
        await client.close()

    async def prepare() -> None:
        await (await NatsStream.connect(fresh_nats, WAIT_S)).close()
        await lose_fence()

    asyncio.run(prepare())
    frames = MemoryLog()
    publisher = PublisherThread(frames, fresh_nats, "c", ONE, PlainOwner("c"), interval_s=0.1)
    publisher.start()
    try:
        for at in range(4):
            frames.append(make_frame(at))
            publisher.notify()
            assert comes_to(publisher, Position(Epoch(1), Offset(at + 1)), WAIT_S)
            asyncio.run(purge_fence())
        assert offsets_kept_aside(asyncio.run(read_all(fresh_nats, "c"))) == list(range(4))
    finally:
        publisher.stop(0.0)


def test_a_stream_that_was_replaced_is_filled_again_from_the_log(fresh_nats: str) -> None:
    import nats

    async def replace() -> None:
        client = await nats.connect(fresh_nats)
        config = (await client.jsm().stream_info("KVBM")).config
        await client.jsm().delete_stream("KVBM")
        await client.jsm().add_stream(config)
        await client.close()

    frames = MemoryLog()
    for at in range(10):
        frames.append(make_frame(at))
    publisher = PublisherThread(frames, fresh_nats, "c", ONE, PlainOwner("c"), interval_s=0.1)
    publisher.start()
    try:
        assert comes_to(publisher, Position(Epoch(1), Offset(10)), WAIT_S)
        asyncio.run(replace())
        frames.append(make_frame(10))
        publisher.notify()
        assert comes_to(publisher, Position(Epoch(1), Offset(11)), WAIT_S)
        assert offsets_kept_aside(asyncio.run(read_all(fresh_nats, "c"))) == list(range(11))
    finally:
        publisher.stop(0.0)


def test_a_burst_while_the_server_is_killed_five_times_is_whole(tmp_path: Path) -> None:
    port = free_port()
    server = started(tmp_path / "nats", port)
    frames = MemoryLog()
    publisher = PublisherThread(frames, server.url, "c", ONE, PlainOwner("c"), interval_s=0.1, window_bytes=64 << 10)
    publisher.start()
    try:
        for kill in range(5):
            for at in range(kill * 400, (kill + 1) * 400):
                frames.append(make_frame(at, blocks=64))
                publisher.notify()
            assert comes_to(publisher, Position(Epoch(1), Offset(kill * 400 + 1)), WAIT_S)
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            server = started(tmp_path / "nats", port)
        assert comes_to(publisher, Position(Epoch(1), Offset(2000)), WAIT_S)
        assert publisher.stop(WAIT_S)
        assert offsets_kept_aside(asyncio.run(read_all(server.url, "c"))) == list(range(2000))
    finally:
        publisher.stop(0.0)
        server.stop()


def test_an_owner_that_raises_ends_nothing(nats_url: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Faulty(PlainOwner):
        def heartbeat(self, published: Position) -> Heartbeat:
            self.beats.append(published)
            raise RuntimeError("a fault")

        def on_published(self, position: Position) -> None:
            raise RuntimeError("another")

    frames, owner = MemoryLog(), Faulty(cluster)
    publisher = PublisherThread(frames, nats_url, cluster, ONE, owner, interval_s=0.02)
    publisher.start()
    try:
        eventually(lambda: len(owner.beats) > 3)
        frames.append(make_frame(0))
        publisher.notify()
        assert comes_to(publisher, Position(Epoch(1), Offset(1)), WAIT_S)
        assert capsys.readouterr().out.count("owner_failed.heartbeat") == 1
    finally:
        publisher.stop(0.0)


def test_an_owner_hears_of_snapshot_requests_and_of_the_streams_limits_and_its_samples_travel(
    nats_url: str, cluster: str
) -> None:
    class Sampling(PlainOwner):
        def take_samples(self) -> list[AccessSample]:
            return [
                AccessSample(
                    instance=ONE,
                    cluster=cluster,
                    wall_time_ns=1,
                    namespace=NamespaceId(b"n" * 16),
                    hashes=b"",
                    depth=0,
                    rate=1.0,
                )
            ]

    owner = Sampling(cluster)
    publisher = PublisherThread(MemoryLog(), nats_url, cluster, ONE, owner, interval_s=0.05)
    publisher.start()

    async def work() -> None:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            assert (await anext(stream.watch_samples(cluster))).instance == ONE
            await eventually_async(lambda: stream.ask_snapshot(cluster, ONE, WAIT_S), "it does not listen")
        await stream.close()

    try:
        asyncio.run(work())
        eventually(lambda: owner.asked == 1)
        assert eventually(lambda: owner.states)[0].max_age_s == 86400.0
    finally:
        publisher.stop(0.0)


def test_a_heartbeat_follows_each_connection_at_once(tmp_path: Path) -> None:
    port = free_port()
    server = started(tmp_path, port)
    owner = PlainOwner("c")
    publisher = PublisherThread(MemoryLog(), server.url, "c", ONE, owner, interval_s=3600.0)
    publisher.start()
    try:
        eventually(lambda: owner.beats)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        before = len(owner.beats)
        server = started(tmp_path, port)
        eventually(lambda: len(owner.beats) > before)
    finally:
        publisher.stop(0.0)
        server.stop()


def test_an_idle_publisher_fills_the_store_of_a_server_that_came_back_without_its_own(tmp_path: Path) -> None:
    port = free_port()
    server = started(tmp_path / "a", port)
    frames = MemoryLog()
    for at in range(5):
        frames.append(make_frame(at))
    publisher = PublisherThread(frames, server.url, "c", ONE, PlainOwner("c"), interval_s=3600.0)
    publisher.start()
    try:
        assert comes_to(publisher, Position(Epoch(1), Offset(5)), WAIT_S)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server = started(tmp_path / "b", port)
        eventually(lambda: offsets_kept_aside(asyncio.run(read_all(server.url, "c"))) == list(range(5)))
    finally:
        publisher.stop(0.0)
        server.stop()


def test_a_snapshot_renews_the_fence(nats_url: str, cluster: str) -> None:
    publisher = PublisherThread(MemoryLog(), nats_url, cluster, ONE, PlainOwner(cluster, run="r"), interval_s=0.05)
    publisher.start()

    async def fence() -> int:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        found = await stream.fence(cluster, ONE, WAIT_S)
        await stream.close()
        assert found is None or (found.epoch, found.run) == (1, "r")
        return found.sequence if found else 0

    try:
        eventually(lambda: asyncio.run(fence()) > 0)
        before = asyncio.run(fence())
        publisher.snapshot_began()
        eventually(lambda: asyncio.run(fence()) > before)
    finally:
        publisher.stop(0.0)


# -- readers -----------------------------------------------------------------------------------------------------------


def test_a_reader_whose_server_is_killed_while_it_reads_misses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    port = free_port()
    server = started(tmp_path, port)

    async def work() -> None:
        nonlocal server
        writing = await NatsStream.connect(server.url, WAIT_S)
        sequences: list[int] = []
        for start in range(0, 9000, 500):
            sequences += await asyncio.gather(
                *(writing.publish("c", ONE, make_frame(start + at).data, WAIT_S) for at in range(500))
            )
        await writing.close()
        reading = await NatsStream.connect(server.url, WAIT_S)
        reader = await reading.pull(0, "c", timeout_s=WAIT_S)
        found: list[StreamMessage] = []
        kills = 0
        while len(found) < len(sequences):
            try:
                found += await reader.fetch(WAIT_S)
            except StreamError:
                continue
            if kills < 3 and len(found) > 2000 * kills:
                kills += 1
                os.kill(server.pid, signal.SIGKILL)
                await asyncio.to_thread(server.stop)
                server = await asyncio.to_thread(started, tmp_path, port)
        assert [message.sequence for message in found] == sorted(sequences)
        assert reader.at_end
        await reading.close()

    try:
        asyncio.run(work())
    finally:
        server.stop()


async def delete_consumers(url: str, subjects: str) -> None:
    import nats

    client = await nats.connect(url)
    for consumer in await client.jsm().consumers_info("KVBM"):
        if consumer.config.filter_subject == subjects:
            await client.jsm().delete_consumer("KVBM", consumer.name)
    await client.close()


def test_a_reader_whose_consumer_the_server_deleted_makes_a_new_one(nats_url: str, cluster: str) -> None:
    async def work() -> None:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        await stream.publish(cluster, ONE, make_frame(0).data, WAIT_S)
        reader = await stream.pull(0, cluster, timeout_s=WAIT_S)
        found = await reader.fetch(WAIT_S)
        await delete_consumers(nats_url, f"kvbm.v1.events.{cluster}.>")
        await stream.publish(cluster, ONE, make_frame(1).data, WAIT_S)
        while len(found) < 2:
            found += await reader.fetch(WAIT_S)
        assert [offset for _, offset in headers_in(found)] == [0, 1]
        await stream.close()

    asyncio.run(work())


def test_a_reader_passes_over_sequences_that_are_gone(fresh_nats: str) -> None:
    import nats

    async def work() -> None:
        stream = await NatsStream.connect(fresh_nats, WAIT_S)
        client = await nats.connect(fresh_nats)
        config = (await client.jsm().stream_info("KVBM")).config
        await client.jsm().delete_stream("KVBM")
        await client.jsm().add_stream(config.evolve(deny_delete=False))
        for at in range(6):
            await stream.publish("c", ONE, make_frame(at).data, WAIT_S)
        for sequence in (1, 3, 4):
            await client.jsm().delete_msg("KVBM", sequence)
        await client.close()
        reader = await stream.pull(0, "c", timeout_s=WAIT_S)
        found: list[StreamMessage] = []
        while not reader.at_end:
            found += await reader.fetch(WAIT_S)
        assert [message.sequence for message in found] == [2, 5, 6]
        await delete_consumers(fresh_nats, "kvbm.v1.events.c.>")
        await stream.publish("c", ONE, make_frame(6).data, WAIT_S)
        assert [message.sequence for message in await reader.fetch(WAIT_S)] == [7]
        await stream.close()

    asyncio.run(work())


def test_a_reader_that_does_not_take_is_sent_no_more_than_it_asked_for(nats_url: str, cluster: str) -> None:
    async def work() -> None:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        writing = await NatsStream.connect(nats_url, WAIT_S)
        reader = await stream.pull(0, cluster, timeout_s=WAIT_S)
        for start in range(0, 12_000, 500):
            await asyncio.gather(
                *(writing.publish(cluster, ONE, make_frame(start + at).data, WAIT_S) for at in range(500))
            )
        first = await reader.fetch(WAIT_S)
        assert len(first) <= 2 * PULL_MESSAGES
        found = list(first)
        while len(found) < 12_000:
            found += await reader.fetch(WAIT_S)
        assert [offset for _, offset in headers_in(found)] == list(range(12_000))
        await writing.close()
        await stream.close()

    asyncio.run(work())


# -- what users may do -------------------------------------------------------------------------------------------------


TWO_USERS = """
authorization { users: [
  { user: "all", password: "x", permissions: { publish: ">", subscribe: ">" } },
  { user: "one", password: "x", permissions: {
      publish: { allow: ["kvbm.v1.*.c.i", "kvbm.v1.*.c.*.i", "$JS.API.>"], deny: ["$JS.API.STREAM.UPDATE.>"] },
      subscribe: "_INBOX.>" } } ] }
"""


def test_without_direct_access_the_last_messages_are_asked_for_in_the_other_way() -> None:
    import nats

    with nats_server(TWO_USERS) as server:
        whole, limited = (server.url.replace("://", f"://{user}:x@") for user in ("all", "one"))

        async def work() -> None:
            client = await nats.connect(whole)
            await client.jetstream().add_stream(name="KVBM", subjects=["kvbm.v1.events.>", "kvbm.v1.fence.>"])
            await client.jetstream().add_stream(
                name="KVBM_PULSE", subjects=["kvbm.v1.pulse.>"], max_msgs_per_subject=1, storage="memory"
            )
            stream = await NatsStream.connect(limited, WAIT_S)
            assert await stream.tail("c", ONE, WAIT_S) is None
            fence = await stream.set_fence("c", ONE, Epoch(2), "r", 0, WAIT_S)
            assert await stream.fence("c", ONE, WAIT_S) == fence
            acked = Position(Epoch(1), Offset(9))
            await stream.publish("c", ONE, make_frame(0, epoch=2).data, WAIT_S, fence=fence, acked=acked)
            assert await stream.tail("c", ONE, WAIT_S) == Tail(Position(Epoch(2), Offset(1)), acked)
            heartbeat = PlainOwner("c").heartbeat(Position(Epoch(1), Offset(0)))
            await stream.send_pulse(heartbeat)

            async def has_pulse() -> bool:  # nothing confirms a pulse
                return await stream.last_pulse("c", ONE, WAIT_S) == heartbeat

            await eventually_async(has_pulse, "the pulse does not arrive")
            await client.close()
            await stream.close()

        asyncio.run(work())


def test_a_refused_subscription_is_an_error_of_its_watcher_alone() -> None:
    with nats_server(TWO_USERS) as server:

        async def work() -> None:
            stream = await NatsStream.connect(server.url.replace("://", "://all:x@"), WAIT_S)
            await stream.close()
            stream = await NatsStream.connect(server.url.replace("://", "://one:x@"), WAIT_S)
            watching = asyncio.ensure_future(anext(stream.watch_snapshot_asks("c", ONE)))
            count = 0
            async with asyncio.timeout(WAIT_S):
                while not watching.done():
                    await asyncio.gather(*(stream.publish("c", ONE, make_frame(at).data, WAIT_S) for at in range(20)))
                    count += 20
            with pytest.raises(StreamError, match="permissions violation"):
                await watching
            assert count
            await stream.close()

        asyncio.run(work())


def test_a_message_that_is_too_large_for_the_server_says_what_to_raise() -> None:
    with nats_server("max_payload: 65536") as server:
        frames = MemoryLog()
        for at in range(200):
            frames.append(make_frame(at, blocks=64))
        publisher = PublisherThread(frames, server.url, "c", ONE, PlainOwner("c"), interval_s=0.1)
        publisher.start()
        try:
            assert comes_to(publisher, Position(Epoch(1), Offset(200)), WAIT_S)  # in messages it takes
        finally:
            publisher.stop(0.0)

        async def work() -> None:
            stream = await NatsStream.connect(server.url, WAIT_S)
            assert stream.max_message_bytes < 65536
            await stream.publish("c", ONE, bytes(stream.max_message_bytes), WAIT_S)
            with pytest.raises(MessageTooLargeError, match="raise max_payload") as refused:
                await stream.publish("c", ONE, bytes(65537), WAIT_S)
            assert (refused.value.message_bytes, refused.value.most_bytes) == (65537, 65536)
            await stream.close()

        asyncio.run(work())


# -- a stream that cannot serve ----------------------------------------------------------------------------------------


def limit_stream(url: str, **limits: Any) -> None:
    """Change the stream of events as an operator would."""
    import nats

    async def change() -> None:
        client = await nats.connect(url)
        config = (await client.jsm().stream_info("KVBM")).config
        await client.jsm().update_stream(config.evolve(**limits))
        await client.close()

    asyncio.run(change())


@pytest.mark.parametrize("limits", [{"max_bytes": 3 << 20}, {"max_msgs": 100}], ids=["bytes", "messages"])
def test_a_stream_that_keeps_less_than_an_instance_sends_at_once_is_refused_in_words(
    fresh_nats: str, limits: dict[str, int]
) -> None:
    async def make() -> None:
        await (await NatsStream.connect(fresh_nats, WAIT_S)).close()

    asyncio.run(make())
    limit_stream(fresh_nats, **limits)
    frames = MemoryLog()
    frames.append(make_frame(0))
    publisher = PublisherThread(frames, fresh_nats, "c", ONE, PlainOwner("c"), interval_s=0.1)
    with capture_logs() as logs:
        publisher.start()
        try:
            eventually(lambda: any(line["event"] == "publisher.disconnected" for line in logs))
            (line,) = [line for line in logs if line["event"] == "publisher.disconnected"]
            (key,) = limits
            assert f"keeps {key}={limits[key]}" in line["why"] and "nats stream edit KVBM" in line["why"]
            limit_stream(fresh_nats, **dict.fromkeys(limits, -1))
            assert comes_to(publisher, Position(Epoch(1), Offset(1)), WAIT_S)
        finally:
            publisher.stop(0.0)


def test_a_stream_that_comes_to_keep_too_little_while_it_is_used_is_not_hammered(
    fresh_nats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own messages push out the instance's fence; the publisher says why it stops, tries now and then, and goes on
    later.
    """
    monkeypatch.setattr(publisher_reports, "STALLED_S", 0.5)
    frames, fences = MemoryLog(), []
    publisher = PublisherThread(frames, fresh_nats, "c", ONE, PlainOwner("c"), interval_s=0.1)
    do = publisher._step

    def count(happened: Any) -> None:
        fences.append(isinstance(happened, FencedOff))
        do(happened)

    publisher._step = count  # type: ignore[method-assign]
    with capture_logs() as logs:
        publisher.start()
        try:
            frames.append(make_frame(0))
            publisher.notify()
            assert comes_to(publisher, Position(Epoch(1), Offset(1)), WAIT_S)
            limit_stream(fresh_nats, max_bytes=200 << 10)
            for at in range(1, 200):
                frames.append(make_frame(at, blocks=1500))
            publisher.notify()
            eventually(lambda: any("keeps max_bytes=204800" in str(line.get("why")) for line in logs))
            eventually(lambda: "nothing is published after" in publisher.trouble)
            assert [line["waits_for"] for line in logs if line["event"] == "publisher.stalled"]
            assert sum(fences) < 1000
            limit_stream(fresh_nats, max_bytes=-1)
            assert comes_to(publisher, Position(Epoch(1), Offset(200)), WAIT_S)
            eventually(lambda: not publisher.trouble)
        finally:
            publisher.stop(0.0)


def test_replicas_that_a_server_alone_cannot_keep_are_refused_in_words(fresh_nats: str) -> None:
    async def connect() -> None:
        await NatsStream.connect(fresh_nats, WAIT_S, replicas=3)

    with pytest.raises(StreamError, match=r"nats\.replicas is 3: set it to 1, or run a cluster"):
        asyncio.run(connect())


def test_a_reader_is_told_how_far_the_stream_was_looked_through_for_it(nats_url: str, cluster: str) -> None:
    """What its filter leaves out moves it on too: to know that all was read, nobody needs a message of its own."""

    async def play() -> None:
        stream = await NatsStream.connect(nats_url, WAIT_S)
        reader = await stream.pull(0, cluster, timeout_s=WAIT_S)
        await stream.publish(f"{cluster}-other", ONE, make_frame(0).data, WAIT_S)
        end = await stream.last_sequence(WAIT_S)

        async def has_looked() -> bool:
            assert not await reader.fetch(0.2)
            return reader.reached >= end

        await eventually_async(has_looked, "the reader stays behind what it was not sent")
        await stream.close()

    asyncio.run(play())
