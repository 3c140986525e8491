"""Sockets of a publisher over real connections: who has the port before it, who comes beside it, and what breaks."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from kvbm.bridge import sockets
from kvbm.bridge.sockets import Address, PublisherSockets, zmq_module
from kvbm.core.errors import ConfigError
from kvbm.streams.foreign.state import EngineConnected, Input, PublishedMessage, Replayed, ReplayEnded
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.foreign_engines import Prompt, stored_event
from tests.servers import free_port
from tests.zmq_publisher import Publisher

zmq = needed("zmq", "bridge")

EVENT = stored_event(Prompt(tuple(range(100, 112))))
GREETING = b"\xff" + b"\0" * 7 + b"\1\x7f\3\0NULL" + b"\0" * 48  # of ZMTP 3.0, 64 bytes


class Hearing:
    """Sockets in hand-made time: each look is a second after the one before."""

    def __init__(self, address: Address) -> None:
        self._context = zmq.Context()
        seconds = itertools.count()
        self.sockets = PublisherSockets(zmq_module(), self._context, address, lambda: float(next(seconds)))
        self.came: list[Input] = []

    def look(self) -> list[Input]:
        self.came += self.sockets.receive(100)
        return self.came

    def hears(self, kind: type) -> None:
        eventually(lambda: any(isinstance(one, kind) for one in self.look()), f"no {kind.__name__} came")

    def hears_of(self, publisher: Publisher) -> bool:
        publisher.publish(EVENT)
        return any(isinstance(one, PublishedMessage) for one in self.look())

    def close(self) -> None:
        self.sockets.close()
        self._context.destroy(0)


@contextmanager
def hearing(address: Address) -> Iterator[Hearing]:
    made = Hearing(address)
    try:
        yield made
    finally:
        made.close()


class Stranger:
    """Listens on a port and says the same bytes to each who comes, until closed.

    Attributes:
        met: how many have come.
    """

    def __init__(self, said: bytes) -> None:
        self.met, self._said = 0, said
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                other, _ = self._socket.accept()
            except OSError:
                return
            with other:
                self.met += 1
                other.sendall(self._said)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._socket.close()


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" + b"\0" * 200, GREETING + b"\xff" * 50, b"\0" * 100, b""],
    ids=["http", "zeros", "broken handshake", "old", "nothing"],
)
def test_a_stranger_at_the_port_does_not_make_the_bridge_deaf_for_who_comes_after_it(said: bytes) -> None:
    stranger = Stranger(said)
    with hearing(Address(f"tcp://127.0.0.1:{stranger.port}")) as heard:
        eventually(lambda: heard.look() or stranger.met)
        stranger.close()
        publisher = Publisher((stranger.port, free_port()))
        try:
            heard.hears(EngineConnected)
            assert heard.sockets.is_connected
            eventually(lambda: heard.hears_of(publisher))
        finally:
            publisher.close()


def test_a_message_above_the_bound_costs_the_connection_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_BATCH_BYTES", 1000)
    publisher = Publisher()
    try:
        with hearing(Address(publisher.settings["endpoint"])) as heard:
            heard.hears(EngineConnected)

            def is_refused() -> int:
                publisher.publish_bytes(b"x" * 2000)
                heard.look()
                return heard.sockets.unreadable

            eventually(is_refused)
            heard.came.clear()
            heard.hears(EngineConnected)
            eventually(lambda: heard.hears_of(publisher))
    finally:
        publisher.close()


def test_a_stranger_at_the_replay_port_is_silence_and_the_next_ask_is_answered() -> None:
    stranger, port = Stranger(GREETING + b"\xff" * 50), free_port()
    with hearing(Address(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{stranger.port}")) as heard:
        heard.sockets.ask(0)
        eventually(lambda: heard.look() or stranger.met)
        stranger.close()
        publisher = Publisher((port, stranger.port))
        try:
            publisher.publish(EVENT)
            heard.sockets.ask(0)
            heard.hears(Replayed)
            heard.hears(ReplayEnded)
        finally:
            publisher.close()


def test_a_stranger_that_comes_and_leaves_where_we_listen_is_not_the_engine() -> None:
    port = free_port()
    with hearing(Address(f"tcp://*:{port}")) as heard:
        context = zmq.Context()
        engine = context.socket(zmq.PUB)
        engine.connect(f"tcp://127.0.0.1:{port}")
        heard.hears(EngineConnected)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            eventually(lambda: heard.look() and len(heard.sockets._open) == 2)
        eventually(lambda: heard.look() and len(heard.sockets._open) == 1)
        assert heard.sockets.is_connected
        engine.send_multipart((b"", b"\0" * 8, b"x"))
        heard.hears(PublishedMessage)
        context.destroy(0)
        eventually(lambda: heard.look() and not heard.sockets.is_connected)


def test_an_address_that_cannot_be_used_is_refused_in_words() -> None:
    context = zmq.Context()
    with pytest.raises(ConfigError, match="write tcp://host:port"):
        PublisherSockets(zmq_module(), context, Address("tcp://h"))
    context.destroy(0)


def test_what_is_taken_at_once_is_bounded_in_bytes_so_that_others_have_their_turn():
    large, count = bytes(sockets.TURN_BYTES // 2 + 1), 6
    with closing(Publisher()) as publisher, hearing(Address(**publisher.settings)) as heard:
        heard.hears(EngineConnected)
        eventually(lambda: heard.hears_of(publisher), "no message came")
        for _ in range(count):
            publisher.publish_bytes(large)
        for kind in (PublishedMessage, Replayed):
            most = came = 0
            heard.sockets.ask(0)
            time.sleep(0.5)  # so that much waits

            def look(kind: type[PublishedMessage | Replayed] = kind) -> bool:
                nonlocal most, came
                sizes = [len(one.payload) for one in heard.sockets.receive(100) if isinstance(one, kind)]
                most, came = max(most, sum(sizes)), came + sizes.count(len(large))
                return came == count

            eventually(look, f"not all of {kind.__name__} came")
            assert most < 2 * sockets.TURN_BYTES
