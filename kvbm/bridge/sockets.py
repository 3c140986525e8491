"""The ZeroMQ sockets of one publisher: its messages as they come, and those it sends again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.streams.foreign.events import MAX_BATCH_BYTES
from kvbm.streams.foreign.state import EngineConnected, Input, PublishedMessage, Replayed, ReplayEnded, ReplayRefused

_SEQUENCE_BYTES = 8
_END = b"\xff" * _SEQUENCE_BYTES
TURN_BYTES = 1 << 20  # taken at once, and what begins within them: then others have their turn
_WAITING_MESSAGES = 20_000  # in the socket; what comes beyond is lost and asked for again
_RECONNECT_MS, _RECONNECT_MOST_MS = 100, 1_000
_HEARTBEAT_MS = 2_000  # of ZeroMQ itself, so that a machine that is gone is noticed
_REDIAL_S = 1.0  # after a connection that ZeroMQ has given up


class Address(NamedTuple):
    """Where a publisher is.

    Attributes:
        endpoint: such as tcp://host:5557; with a host of `*` we listen there and the publisher connects.
        replay: where it is asked to send again; "" where it cannot be.
        topic: what the topics of its messages begin with.
    """

    endpoint: str
    replay: str = ""
    topic: str = ""

    def of_rank(self, rank: int) -> Address:
        """That of a data-parallel rank: ports are counted up by the rank, as vLLM and SGLang do."""
        return Address(_ported(self.endpoint, rank), _ported(self.replay, rank), self.topic)


def _ported(endpoint: str, rank: int) -> str:
    if not rank or not endpoint:
        return endpoint
    host, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ConfigError(
            f"{endpoint} has no port to count ranks from; write tcp://host:port, or a source for each rank"
        )
    return f"{host}{colon}{int(port) + rank}"


def zmq_module() -> Any:
    """ZeroMQ. Raises MissingExtraError: it is not installed."""
    try:
        import zmq
        import zmq.utils.monitor
    except ImportError:
        raise MissingExtraError("pyzmq, with which the bridge hears engines,", "bridge") from None
    return zmq


class PublisherSockets:
    """See the module. One thread.

    Args:
        zmq: the module. context: of the process.
    Raises: ConfigError: an address that cannot be used.

    Attributes:
        is_connected: whether a connection stands.
        unreadable: messages that are none of a publisher's, and connections that were given up because what came was
            no ZeroMQ or too long for a message.
    """

    def __init__(self, zmq: Any, context: Any, address: Address, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_connected = False
        self.unreadable = 0
        self._zmq, self._context, self._address, self._clock = zmq, context, address, clock
        self._listens = _is_any(address.endpoint)
        self._open: set[int] = set()  # connections that stand at the listener, strangers' too
        self._lost_s: float | None = None  # since when there is no connection, while ZeroMQ does not say it tries again
        self._replay: Any = None
        self._messages = self._socket(zmq.SUB)
        self._messages.setsockopt(zmq.SUBSCRIBE, address.topic.encode())
        self._monitor = self._messages.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECT_RETRIED
        )
        try:
            if self._listens:
                self._messages.bind(address.endpoint)
            else:
                self._messages.connect(address.endpoint)
            if address.replay:
                self._dealer().close(0)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{address.endpoint} {address.replay}: {error}; write tcp://host:port") from None

    def _socket(self, kind: int) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, _WAITING_MESSAGES),
            (zmq.MAXMSGSIZE, MAX_BATCH_BYTES),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS),
            (zmq.IPV6, 1),
        ):
            made.setsockopt(option, value)
        return made

    def _dealer(self) -> Any:
        made = self._socket(self._zmq.DEALER)
        try:
            made.connect(self._address.replay)
        except self._zmq.ZMQError:
            made.close(0)
            raise
        return made

    def sockets(self) -> list[Any]:
        """Those to wait for."""
        return [self._messages, self._monitor, *([] if self._replay is None else [self._replay])]

    def ask(self, start: int) -> None:
        """Ask for messages from one on. What an earlier ask brings is never seen."""
        self.end_ask()
        if self._address.replay:
            self._replay = self._dealer()
            with suppress(self._zmq.ZMQError):  # silence says the same
                self._replay.send_multipart((b"", start.to_bytes(_SEQUENCE_BYTES, "big")), self._zmq.DONTWAIT)

    def end_ask(self) -> None:
        """Take no answers any more."""
        if self._replay is not None:
            self._replay.close(0)
            self._replay = None

    def receive(self, limit: int) -> Iterator[Input]:
        """What has come, up to so many messages and TURN_BYTES.

        Stop when it tells of an answer and another ask has begun.
        """
        came: list[list[bytes]] = []
        room = TURN_BYTES
        while len(came) < limit and room > 0 and (taken := self._take(self._messages)) is not None:
            came.append(taken)
            room -= len(taken[-1])
        # Looked at last and told first: a message of a new connection never comes before its word
        yield from self._connections()
        for frames in came:
            if len(frames) == 3 and len(frames[1]) == _SEQUENCE_BYTES:
                yield PublishedMessage(int.from_bytes(frames[1], "big"), frames[2])
            else:
                self.unreadable += 1
        room = TURN_BYTES
        for _ in range(limit):
            asked = self._replay
            answer = None if asked is None or room <= 0 else self._take(asked)
            if answer is None:
                break
            room -= len(answer[-1])
            yield self._answer(answer)
        self._redial()

    def _answer(self, frames: list[bytes]) -> Input:
        """(b"", topic, sequence, payload); of older publishers without the topic."""
        if len(frames) not in (3, 4) or len(frames[-2]) != _SEQUENCE_BYTES:
            self.unreadable += 1
            return ReplayRefused("an answer that is none")
        if frames[-2] == _END:
            return ReplayEnded()
        return Replayed(int.from_bytes(frames[-2], "big"), frames[-1])

    def _connections(self) -> Iterator[Input]:
        zmq = self._zmq
        while True:
            frames = self._take(self._monitor)
            if frames is None:
                return
            said = zmq.utils.monitor.parse_monitor_message(frames)
            event, number = said["event"], said["value"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected, self._lost_s = True, None
                yield EngineConnected()
            elif event == zmq.EVENT_ACCEPTED:
                self._open.add(number)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._lost_s = None
            elif self._listens:  # a stranger that leaves is not the engine
                self._open.discard(number)
                self.is_connected &= bool(self._open)
            else:
                self.is_connected, self._lost_s = False, self._clock()

    def _redial(self) -> None:
        """Connect anew where ZeroMQ does not: it never tries again after bytes that break its protocol."""
        if self._lost_s is None or self._clock() < self._lost_s + _REDIAL_S:
            return
        self._lost_s = self._clock()
        self.unreadable += 1
        endpoint = self._address.endpoint
        with suppress(self._zmq.ZMQError):  # it may know the address no more
            self._messages.disconnect(endpoint)
        self._messages.connect(endpoint)

    def _take(self, socket: Any) -> list[bytes] | None:
        try:
            frames: list[bytes] = socket.recv_multipart(self._zmq.DONTWAIT)
        except self._zmq.Again:
            return None
        return frames

    def close(self) -> None:
        """Close them all."""
        self.end_ask()
        self._messages.disable_monitor()
        self._monitor.close(0)
        self._messages.close(0)


def _is_any(endpoint: str) -> bool:
    """Whether we listen there."""
    return any(host in endpoint for host in ("//*:", "//0.0.0.0:", "//[::]:"))
