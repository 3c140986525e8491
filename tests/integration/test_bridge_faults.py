"""What goes wrong between engines, the bridge and the stream: nothing wrong is said, and all is well again after it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tests.bridge_site import Site, site
from tests.eventually import WAIT_S, eventually
from tests.foreign_engines import Prompt, removed_event, stored_event
from tests.nats_fixture import cluster, nats_url
from tests.servers import free_port
from tests.zmq_publisher import Publisher

__all__ = ["cluster", "nats_url", "site"]

PROMPT = Prompt(tuple(range(100, 124)))  # six blocks
OTHER = Prompt(tuple(range(500, 512)))
GREETING = b"\xff" + b"\0" * 7 + b"\1\x7f\3\0NULL" + b"\0" * 48  # of ZMTP 3.0, 64 bytes
READY = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3PUB"


class Relay:
    """Carries bytes to a server, until it is cut and from when it is whole again."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._to = (str(place.hostname), int(place.port or 0))
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._ends: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.heal()

    def heal(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for one in self._ends:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(self._to)
            except OSError:
                return
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=(source, target), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def engine() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


@pytest.fixture
def relay(nats_url: str) -> Iterator[Relay]:
    made = Relay(nats_url)
    yield made
    made.cut()


def test_what_engines_do_while_the_stream_is_away_is_there_when_it_is_back(
    site: Site, engine: Publisher, relay: Relay
) -> None:
    bridge = site.bridge(relay.url, a=engine.settings)
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    relay.cut()
    engine.publish(removed_event(PROMPT.keys()[4:]))
    for number in range(200):
        engine.publish(stored_event(Prompt((number, 1, 2, 3))))
    engine.publish(stored_event(OTHER))
    relay.heal()
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    bridge.agrees(PROMPT, {"a": {"HBM": 4}})
    found = site.catalog.instance("a")
    assert found is not None
    assert found.held_blocks["HBM"] == 4 + 200 + 3


def test_of_two_bridges_of_one_name_one_is_believed_alone(site: Site, engine: Publisher) -> None:
    other = Publisher()
    try:
        engine.publish(stored_event(PROMPT))
        other.publish(stored_event(OTHER))
        first = site.bridge(a=engine.settings)
        first.agrees(PROMPT, {"a": {"HBM": 6}})
        site.bridge(a=other.settings)

        def depth(prompt: Prompt) -> int:
            return int(first.depths(prompt).get("a", {}).get("HBM", 0))

        def held() -> tuple[int, int]:
            """Both at one moment, though they are two questions: the first's answer is the same after the other."""
            while True:
                mine, others = depth(PROMPT), depth(OTHER)
                if depth(PROMPT) == mine:
                    return mine, others

        for number in range(50):  # whoever it is, the other's blocks are never among them
            engine.publish(stored_event(Prompt((number, 1, 2, 3))))
            other.publish(stored_event(Prompt((number, 4, 5, 6))))
            assert held() in ((6, 0), (0, 3), (0, 0))
        eventually(lambda: held() in ((6, 0), (0, 3)), state=held)
    finally:
        other.close()


def test_a_publisher_that_is_silent_when_asked_costs_the_epoch_after_two_seconds(site: Site, engine: Publisher) -> None:
    bridge = site.bridge(a=engine.settings)
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.hangs.set()
    engine.publish(removed_event(PROMPT.keys()), is_lost=True)
    engine.publish(stored_event(OTHER))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    assert bridge.depths(PROMPT) == {}


def test_a_publisher_that_refuses_when_asked_costs_the_epoch(site: Site) -> None:
    nobody = free_port()
    engine = Publisher()
    try:
        settings = engine.settings | {"replay": f"tcp://127.0.0.1:{nobody}", "silence_s": 60.0}
        bridge = site.bridge(a=settings)

        def hears() -> bool:
            engine.publish(stored_event(PROMPT))
            return bridge.depths(PROMPT) == {"a": {"HBM": 6}}

        eventually(hears)
        engine.publish(removed_event(PROMPT.keys()), is_lost=True)
        engine.publish(stored_event(OTHER))
        bridge.agrees(OTHER, {"a": {"HBM": 3}})
        assert bridge.depths(PROMPT) == {}
    finally:
        engine.close()


def test_an_engine_that_vanishes_amid_a_message_has_said_nothing_with_it(site: Site) -> None:
    port = free_port()
    engine = socket.socket()
    engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    engine.bind(("127.0.0.1", port))
    engine.listen()
    engine.settimeout(WAIT_S)
    bridge = site.bridge(a={"endpoint": f"tcp://127.0.0.1:{port}"})
    peer, _ = engine.accept()
    with peer:
        peer.settimeout(WAIT_S)
        peer.sendall(GREETING)
        said = b""
        while len(said) < 64:
            said += peer.recv(1 << 12)
        peer.sendall(READY)
        while b"SUB" not in said or said[-2:] == b"SUB":
            said += peer.recv(1 << 12)
        # topic, number, and a payload of 10,000 bytes of which half come
        peer.sendall(b"\1\0" + b"\1\x08" + b"\0" * 8 + b"\2" + (10_000).to_bytes(8, "big") + b"\x93" * 5_000)
    engine.close()
    again = Publisher((port, free_port()))
    try:

        def hears() -> bool:
            again.publish(stored_event(PROMPT))
            return bridge.depths(PROMPT) == {"a": {"HBM": 6}}

        eventually(hears)
        trouble = getattr(site.catalog.instance("a"), "trouble", "")
        assert "malformed" not in trouble
    finally:
        again.close()
