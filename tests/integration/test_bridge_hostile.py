"""The bridge and servers that answer without end, or as nobody expects: nothing holds it, and no engine to whom nobody
listens passes for heard.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

import kvbm.bridge.found
import kvbm.bridge.polled
import kvbm.bridge.subscribed
from kvbm.bridge.polled import PolledEngine
from kvbm.bridge.subscribed import SubscribedWorker
from kvbm.core.ids import Tier
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import EngineConnected, Input, PublishedMessage, ReplayEnded
from kvbm.streams.foreign.wire import Kind, decode_batch
from tests.bridge_site import Site, site
from tests.bridged import Driven, native
from tests.dynamo_workers import Lookup, Worker, heard, stored, subject
from tests.eventually import eventually
from tests.foreign_engines import MODEL, Prompt, payload, stored_event
from tests.nats_fixture import WAIT_S, cluster, nats_url
from tests.scripted_http import Answer, ScriptedServer, scripted, sends
from tests.trtllm_server import TrtllmServer
from tests.zmq_publisher import Publisher

__all__ = ["cluster", "nats_url", "site", "subject"]

PROMPT = Prompt(tuple(range(100, 124)))  # six blocks
WELL = sends(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
ILL = sends(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
NOWHERE = sends(b"HTTP/1.1 302 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n")  # no URL, whoever reads it
NO_EVENTS = sends(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")


def drips(head: bytes, drop: bytes = b"x") -> Answer:
    """The head, then a drop after the other, for ever: none is late."""

    def answer(connection: socket.socket) -> bool:
        connection.sendall(head)
        while True:
            connection.sendall(drop)
            time.sleep(0.05)

    return answer


def answer_of(said: dict[str, Any]) -> Answer:
    body = json.dumps(said).encode()
    return sends(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)


def server_info(publisher: Publisher) -> dict[str, Any]:
    """As an SGLang server whose events `publisher` sends."""
    endpoints = [f"tcp://*:{port}" for port in publisher.ports]
    events = {"publisher": "zmq", "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    return {"model_path": MODEL, "page_size": 4, "dp_size": 1, "kv_events_config": json.dumps(events)}


class Says:
    """What a server answers now."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def __call__(self, path: str) -> Answer:
        return self.answer


@contextmanager
def listening(url: str, subject: str, health: str = "") -> Iterator[SubscribedWorker]:
    worker = SubscribedWorker(url, subject, health=health)
    worker.start()
    try:
        yield worker
    finally:
        closing = threading.Thread(target=worker.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()


@pytest.mark.parametrize("site", [2.0], indirect=True)
@pytest.mark.parametrize("answer", [drips(b"HTTP/1.1 200 OK\r\nX-Drops: "), NOWHERE], ids=["drips", "nowhere"])
def test_a_worker_whose_health_is_no_answer_is_left_out(site: Site, nats_url: str, subject: str, answer: Answer):
    says = Says(WELL)
    worker, lookup = Worker(nats_url, subject), Lookup(site)
    with scripted(says) as health:
        site.bridge(a=worker.settings | {"health": f"http://127.0.0.1:{health.port}/health"})
        heard(lookup, worker, stored(0, 1), {"a": 2})
        says.answer = answer
        lookup.agrees({})
        says.answer = WELL
        lookup.agrees({"a": 2})


def test_a_health_answer_without_end_does_not_hold_the_thread(nats_url: str, subject: str):
    says = Says(drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65_536))
    with (
        scripted(says) as health,
        listening(nats_url, subject, f"http://127.0.0.1:{health.port}/") as worker,
    ):
        eventually(lambda: worker.is_connected)
        says.answer = ILL
        eventually(lambda: not worker.is_connected)


def test_a_thread_that_does_not_end_is_left_behind_and_said_once(
    nats_url: str, subject: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kvbm.bridge.subscribed, "_CLOSE_S", 0.01, raising=False)
    with scripted(Says(drips(b"HTTP/1.1 200 OK\r\nX-Drops: "))) as health:
        worker = SubscribedWorker(nats_url, subject, health=f"http://127.0.0.1:{health.port}/")
        worker.start()
        eventually(lambda: health.asked)
        with capture_logs() as logs:
            worker.close()
        assert [log["event"] for log in logs] == ["bridge.thread_left"]
        eventually(lambda: not worker._thread.is_alive())


class NonsenseFirst:
    """A nats-server behind it, for whoever comes a second time; the first hears what no such server says."""

    def __init__(self, url: str) -> None:
        self.came = 0
        self._to = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                self.came += 1
                if self.came == 1:
                    with one:
                        one.sendall(b"INFO []\r\n")
                    continue
                other = socket.create_connection(self._to)
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=_pass_on, args=ends, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65_536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


def test_a_subscription_begins_again_after_what_nobody_expects(nats_url: str, subject: str):
    server = NonsenseFirst(nats_url)
    try:
        with capture_logs() as logs, listening(server.url, subject) as worker:
            eventually(lambda: worker.is_connected)
        assert [log["event"] for log in logs] == ["bridge.subscription_failed"], logs
    finally:
        server.close()


@contextmanager
def polling(answer: Callable[[str], Answer]) -> Iterator[tuple[ScriptedServer, PolledEngine]]:
    with scripted(answer) as server:
        engine = PolledEngine(f"http://127.0.0.1:{server.port}")
        engine.start()
        try:
            yield server, engine
        finally:
            engine.ranks[0].close()
            server.goes_on.set()


@pytest.mark.parametrize(
    "answer",
    [drips(b"HTTP/1.1 200 OK\r\nX-Drops: "), drips(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"), NOWHERE],
    ids=["head", "body", "nowhere"],
)
def test_an_engine_whose_events_are_no_answer_is_not_heard_until_they_are(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kvbm.bridge.polled, "_ANSWER_S", 2.0)
    says = Says(NO_EVENTS)
    with capture_logs() as logs, polling(says) as (_, engine):
        eventually(lambda: engine.ranks[0].is_connected)
        says.answer = answer
        eventually(lambda: not engine.ranks[0].is_connected)
        says.answer = NO_EVENTS
        eventually(lambda: engine.ranks[0].is_connected)
    assert {log["event"] for log in logs} == {"bridge.poll_failed"}


def test_events_that_wait_are_bounded_in_bytes_and_what_goes_costs_the_epoch():
    engine = TrtllmServer()
    polled = PolledEngine(f"http://127.0.0.1:{engine.port}")
    rank = polled.ranks[0]
    try:
        with capture_logs() as logs:
            for number in range(5):
                engine.publish({"type": "created", "filler": str(number) * (20 << 20)})
                polled.ask()
        came: list[Input] = list(rank.receive(100))
        assert isinstance(came[0], EngineConnected)
        assert [one.sequence for one in came[1:] if isinstance(one, PublishedMessage)] == [3, 4]
        (dropped,) = (log for log in logs if log["event"] == "bridge.messages_dropped")
        assert dropped["messages"] == 4
    finally:
        rank.close()
        engine.close()


LARGE = 200_000  # blocks


@pytest.mark.parametrize("answer", [NOWHERE, drips(b"HTTP/1.1 200 OK\r\nX-Drops: ")], ids=["nowhere", "drips"])
def test_an_engine_is_found_after_answers_that_nobody_expects(
    site: Site, answer: Answer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kvbm.bridge.found, "_ANSWER_S", 2.0)
    publisher, says = Publisher(), Says(answer)
    try:
        publisher.publish(stored_event(PROMPT))
        with scripted(says) as server:
            bridge = site.bridge(a={"kind": "sglang", "endpoint": f"http://127.0.0.1:{server.port}"})
            eventually(lambda: server.asked)
            says.answer = answer_of(server_info(publisher))
            bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    finally:
        publisher.close()


def large_message() -> bytes:
    keys = list(range(1, LARGE + 1))
    event: dict[str, Any] = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": None}
    event |= {"token_ids": [7] * (4 * len(keys)), "block_size": 4}
    return msgspec.msgpack.encode([1.5, [event], 0])


def test_other_threads_have_turns_during_a_large_message_and_see_all_of_it_or_nothing():
    driven = Driven(native(ForeignSource(MODEL)), lambda data: decode_batch(data, Kind.VLLM))
    driven.turn(EngineConnected())
    driven.turn(ReplayEnded(), PublishedMessage(0, payload(stored_event(PROMPT))))
    blocks, ledger = driven.made
    begins, has_turn, message = threading.Event(), threading.Event(), large_message()
    seen: list[int] = []

    def look() -> None:
        begins.wait(WAIT_S)
        has_turn.set()
        seen.append(ledger.counts(Tier.HBM).held)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody has the GIL but whom it is given to
    try:
        begins.set()
        is_taken = blocks.take(message, None)
        had_turn = has_turn.is_set()
    finally:
        sys.setswitchinterval(before)
    looking.join(WAIT_S)
    assert is_taken
    assert had_turn
    assert seen == [6 + LARGE]
