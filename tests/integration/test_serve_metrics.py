"""A manager's metrics over HTTP and in a registry: what its numbers are, whoever asks and however badly."""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import urllib3

import kvbm
from kvbm.core.codec import FrameBytes
from kvbm.core.ids import Epoch, Offset, Tier
from kvbm.manager import metrics
from kvbm.manager.metrics import MANAGER_ROWS, read_manager
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.record.publisher_port import Publishing
from kvbm.manager.stats import TROUBLED_PARTS
from kvbm.streams.base import Position
from kvbm.streams.memory import MemoryLog
from kvbm.telemetry.metrics_server import MetricsServer
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.managers import hashes_of, make_manager, serve

parser = needed("prometheus_client.parser", "catalog")
prometheus_client = needed("prometheus_client", "catalog")

HTTP = urllib3.PoolManager(timeout=WAIT_S)
SIZES = {Tier.HBM: 16, Tier.HOST: 16}
TYPE, VALUE = kvbm.ArgumentTypeError, kvbm.ArgumentValueError
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def manager() -> Iterator[kvbm.Manager]:
    with make_manager(SIZES) as made:
        yield made


def samples_of(text: str) -> Samples:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
    }


def scraped(server: MetricsServer) -> Samples:
    answer = HTTP.request("GET", server.url)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return samples_of(answer.data.decode())


def value(samples: Samples, name: str, instance: str = "test", **labels: str) -> float:
    return samples[f"kvbm_manager_{name}", frozenset((labels | {"instance": instance}).items())]


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_what_a_manager_has_done_is_scraped(manager: kvbm.Manager) -> None:
    serve(manager, 1, 4)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(1, 4))
    serve(manager, 1, 6)
    assert manager.settle(WAIT_S)
    taken = manager.allocate(1)
    assert taken is not None
    assert manager.allocate(SIZES[Tier.HBM] + 1) is None
    eventually(lambda: manager.durable() == manager.applied(), "the journal does not take all")
    with kvbm.serve_metrics(manager) as server:
        found = scraped(server)
    stats = manager.stats()
    assert value(found, "created_blocks_total") == 6
    assert value(found, "hit_blocks_total", tier="HOST") == 4
    assert value(found, "hit_blocks_total", tier="HBM") == 0
    assert value(found, "missed_blocks_total") == stats.missed_blocks > 0
    assert value(found, "offloaded_blocks_total", tier="HOST") == 6
    assert value(found, "short_allocations_total") == 1
    assert value(found, "late_acquires_total") == 0
    for tier, counts in stats.pools.items():
        assert value(found, "slots", tier=tier.name) == SIZES[tier]
        assert value(found, "free_slots", tier=tier.name) == counts.free
        assert value(found, "held_blocks", tier=tier.name) == counts.held == 6
        assert value(found, "evictable_blocks", tier=tier.name) == counts.evictable
    assert value(found, "allocated_slots", tier="HBM") == 1
    assert value(found, "applied_offset") == value(found, "durable_offset") == manager.applied() > 0
    assert str(value(found, "published_offset")) == "nan"  # there is no stream
    assert value(found, "epoch") == 1
    assert {value(found, "trouble", part=part) for part in TROUBLED_PARTS} == {0}
    assert {value(found, "skipped_offloads_total", why=why.value) for why in Skipped} == {0}
    assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_every_number_of_the_stats_is_a_metric_or_said_by_one() -> None:
    """Else a field that somebody adds to `ManagerStats` would be missing."""
    read = inspect.getsource(metrics)
    lost = [name for name in kvbm.ManagerStats._fields if not re.search(rf"\b(?:one|stats)\.{name}\b", read)]
    assert lost == ["skipped_offloads", "trouble"]  # the sum of `skipped`, and the words of `troubled`


@pytest.mark.parametrize("row", MANAGER_ROWS, ids=lambda row: row.name)
def test_a_row_reads_as_one(row: Any) -> None:
    assert [one.name for one in MANAGER_ROWS].count(row.name) == 1
    assert row.help[:1].isupper() or row.help[:1].isdigit()
    assert row.help.endswith(".") and "\n" not in row.help
    assert not row.name.endswith(("_s", "_total"))
    assert "instance" not in row.labels


class FullJournal(MemoryLog):
    """A journal whose disk is full."""

    def append(self, frame: FrameBytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_journal_that_refuses_is_trouble_of_that_part() -> None:
    with make_manager(SIZES, sink=FullJournal()) as manager:
        serve(manager, 1, 2)
        eventually(manager.trouble, "no trouble is told")
        with kvbm.serve_metrics(manager) as server:
            found = scraped(server)
    assert value(found, "trouble", part="journal") == 1
    assert {value(found, "trouble", part=part) for part in TROUBLED_PARTS if part != "journal"} == {0}
    assert value(found, "durable_offset") < value(found, "applied_offset")


def test_a_manager_whose_place_another_run_has_says_so_in_words_and_in_a_part(manager: kvbm.Manager) -> None:
    port = manager.publisher_port
    port.publishing = Publishing(lambda: None, lambda: Position(Epoch(0), Offset(0)), lambda _: True)
    port.publishing = port.publishing._replace(place=lambda: "place: run other has it")
    with kvbm.serve_metrics(manager) as server:
        found = scraped(server)
    assert manager.trouble() == "place: run other has it"
    assert {part for part in TROUBLED_PARTS if value(found, "trouble", part=part)} == {"place"}


def test_positions_of_an_epoch_are_never_ahead_of_those_they_follow(manager: kvbm.Manager) -> None:
    with kvbm.serve_metrics(manager) as server:
        done = threading.Event()

        def work() -> None:
            for prompt in range(200):
                serve(manager, prompt, 4)
            done.set()

        worker = threading.Thread(target=work)
        worker.start()
        while not done.is_set():
            read = read_manager(manager, "0")
            assert read.durable <= read.applied
            assert scraped(server)
        worker.join()


def test_published_of_an_epoch_before_is_nothing_of_this_one(manager: kvbm.Manager) -> None:
    port = manager.publisher_port
    port.publishing = Publishing(lambda: None, lambda: Position(Epoch(0), Offset(9)), lambda _: True)
    assert read_manager(manager, "0").published == 0
    port.publishing = port.publishing._replace(published=lambda: Position(Epoch(1), Offset(2)))
    assert read_manager(manager, "0").published == 2
    port.publishing = None
    assert read_manager(manager, "0").published is None


def test_managers_of_one_process_are_told_apart_and_a_registry_takes_them() -> None:
    with make_manager(SIZES, instance="one") as one, make_manager({Tier.HBM: 8}, instance="two") as two:
        serve(one, 1, 4)
        registry = prometheus_client.CollectorRegistry()
        registry.register(kvbm.metrics_collector(one, two))
        text = prometheus_client.generate_latest(registry).decode()
        found = samples_of(text)
        assert text.count("# TYPE kvbm_manager_slots gauge") == 1
        assert value(found, "created_blocks_total", "one") == 4
        assert value(found, "created_blocks_total", "two") == 0
        assert value(found, "slots", "two", tier="HBM") == 8
        with kvbm.serve_metrics(one, two) as server:
            assert {dict(labels).get("instance") for _, labels in scraped(server)} >= {"one", "two"}


def test_a_manager_that_is_closed_first_is_still_scraped() -> None:
    with make_manager(SIZES) as manager:
        serve(manager, 1, 4)
        server = kvbm.serve_metrics(manager)
    with server:
        assert value(scraped(server), "created_blocks_total") == 4


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("managers", "more", "kind", "named"),
    [
        ([], {}, VALUE, "managers"),
        ([None], {}, TYPE, "managers"),
        (["manager"], {}, TYPE, "managers"),
        (["twice"], {}, VALUE, "managers"),
        (None, {"host": None}, TYPE, "host"),
        (None, {"host": b"127.0.0.1"}, TYPE, "host"),
        (None, {"port": "9400"}, TYPE, "port"),
        (None, {"port": True}, TYPE, "port"),
        (None, {"port": None}, TYPE, "port"),
        (None, {"port": -1}, VALUE, "port"),
        (None, {"port": 65536}, VALUE, "port"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(
    manager: kvbm.Manager, managers: Any, more: dict[str, Any], kind: type[Exception], named: str
) -> None:
    given = [manager, manager] if managers == ["twice"] else [manager] if managers is None else managers
    threads = threading.active_count()
    with pytest.raises(kind, match=rf"^{named} "):
        kvbm.serve_metrics(*given, **more)
    if not more:
        with pytest.raises(kind, match=rf"^{named} "):
            kvbm.metrics_collector(*given)
    assert threading.active_count() == threads


def test_a_place_where_nobody_can_listen_is_named_with_a_remedy(manager: kvbm.Manager) -> None:
    with kvbm.serve_metrics(manager) as server:
        for host, port in (
            ("127.0.0.1", server.port),
            ("no-such-host.invalid", 0),
            ("a" * 70 + ".x", 0),
            ("", 1 << 15),
        ):
            if not host:
                continue
            with pytest.raises(kvbm.ConfigError, match=rf"cannot be served at {host}:{port} .*give another"):
                kvbm.serve_metrics(manager, host=host, port=port)
        assert scraped(server)


def test_without_the_library_an_error_says_what_to_install(
    manager: kvbm.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not installed
    for ours in ("kvbm.telemetry.metrics", "kvbm.manager.metrics"):
        monkeypatch.delitem(sys.modules, ours)
    for call in (kvbm.serve_metrics, kvbm.metrics_collector):
        with pytest.raises(kvbm.MissingExtraError, match=r"pip install 'kvbm-ledger\[catalog\]'"):
            call(manager)


# -- strangers --------------------------------------------------------------------------------------------------------


def said(server: MetricsServer, request: bytes) -> bytes:
    """All that comes back."""
    with closing(socket.create_connection((server.host, server.port), WAIT_S)) as connection:
        connection.sendall(request)
        connection.settimeout(WAIT_S)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"a" * 100_000, 431),
    ],
)
def test_what_is_asked_badly_is_refused_and_the_next_scrape_goes_on(
    manager: kvbm.Manager, request_bytes: bytes, status: int
) -> None:
    with kvbm.serve_metrics(manager) as server:
        answer = said(server, request_bytes)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        assert length > 0
        assert len(body) == (0 if request_bytes.startswith(b"HEAD") else length)
        assert scraped(server)


def test_strangers_that_take_every_place_and_say_nothing_keep_nobody_out(manager: kvbm.Manager) -> None:
    with kvbm.serve_metrics(manager) as server:
        silent = [socket.create_connection((server.host, server.port), WAIT_S) for _ in range(100)]
        try:
            for one in silent[::3]:
                one.sendall(b"GET /metrics HTT")
            for _ in range(3):
                assert value(scraped(server), "slots", tier="HBM") == 16
            assert len(server._connections) <= 16
        finally:
            for one in silent:
                one.close()


def test_one_that_never_reads_its_answer_holds_up_nobody() -> None:
    with MetricsServer(lambda: b"x" * (32 << 20), "text/plain", "127.0.0.1", 0) as server:
        deaf = socket.create_connection((server.host, server.port), WAIT_S)
        with closing(deaf):
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert len(HTTP.request("GET", server.url).data) == 32 << 20


def test_a_connection_that_takes_too_long_is_dropped(manager: kvbm.Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.telemetry.metrics_server._CONNECTION_S", 0.0)
    with (
        kvbm.serve_metrics(manager) as server,
        closing(socket.create_connection((server.host, server.port), WAIT_S)) as slow,
    ):
        slow.sendall(b"GET /")
        slow.settimeout(WAIT_S)
        try:
            assert slow.recv(1) == b""
        except ConnectionResetError:
            pass


def test_however_many_ask_a_manager_is_read_seldom() -> None:
    reads: list[int] = []

    def read() -> bytes:
        reads.append(1)
        return b"new\n"

    with MetricsServer(read, "text/plain", "127.0.0.1", 0) as server:
        server._text, server._read_s = b"old\n", float("inf")  # as if it had just been read, for the whole test
        assert {HTTP.request("GET", server.url).data for _ in range(50)} == {b"old\n"}
        assert reads == []
        server._read_s = 0.0
        assert HTTP.request("GET", server.url).data == b"new\n"


def test_a_read_that_fails_is_said_and_the_next_one_is_tried() -> None:
    answers = iter([OSError("no"), b"good\n"])

    def read() -> bytes:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with MetricsServer(read, "text/plain", "127.0.0.1", 0) as server:
        assert HTTP.request("GET", server.url).status == 500
        assert HTTP.request("GET", server.url).data == b"good\n"


def test_over_ipv6_where_there_is_some(manager: kvbm.Manager) -> None:
    try:
        server = kvbm.serve_metrics(manager, host="::1")
    except kvbm.ConfigError:
        assert not Path("/proc/net/if_inet6").exists() or "00000000000000000000000000000001" not in (
            Path("/proc/net/if_inet6").read_text()
        )
        return
    with server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert scraped(server)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_closed_server_gives_its_port_back_and_closing_again_does_nothing(manager: kvbm.Manager) -> None:
    server = kvbm.serve_metrics(manager)
    waiting = socket.create_connection((server.host, server.port), WAIT_S)
    with closing(waiting):
        assert scraped(server)
        thread = server._thread
        server.close()
        server.close()
        assert not thread.is_alive()
        with pytest.raises(urllib3.exceptions.HTTPError):
            HTTP.request("GET", server.url, retries=False)
        with kvbm.serve_metrics(manager, port=server.port) as again:
            assert scraped(again)


def test_a_server_whose_manager_is_stuck_closes_in_time_and_gives_its_port_back(manager: kvbm.Manager) -> None:
    server = kvbm.serve_metrics(manager)
    with manager._lock:
        asking = threading.Thread(target=lambda: said(server, b"GET /metrics HTTP/1.1\r\n\r\n"))
        asking.start()
        eventually(lambda: server._connections, "nobody asks")
        server.close(0.1)
        with kvbm.serve_metrics(manager, port=server.port) as again:
            assert again.port == server.port
    asking.join(WAIT_S)
    server._thread.join(WAIT_S)
    assert not server._thread.is_alive()


def test_a_forked_child_has_no_port_of_its_parents(manager: kvbm.Manager) -> None:
    server = kvbm.serve_metrics(manager)
    child = os.fork()
    if child == 0:
        signal.pause()  # until it is killed
        os._exit(0)
    try:
        assert scraped(server)
        server.close()
        with kvbm.serve_metrics(manager, port=server.port) as again:
            assert scraped(again)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_program_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    script = (
        "import kvbm\n"
        "settings = kvbm.load_settings(flags={'pools.hbm.slots': 2, 'pools.hbm.device': 'memory', "
        "'nats.enabled': False, 'journal.in_memory': True})\n"
        "space = kvbm.Namespace(model='m', revision='1', block_tokens=16)\n"
        "manager = kvbm.open_manager(settings, [space], 64)\n"
        "print(kvbm.serve_metrics(manager).url)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True, cwd=tmp_path
    )
    assert done.stdout.startswith("http://127.0.0.1:")
    assert "Traceback" not in done.stderr and "left_open" not in done.stderr
