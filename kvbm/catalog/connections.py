"""The connections of a catalog: how many there are, of whom, and how long each may take.

uvicorn has no deadline for a header and no bound on sockets. Here every connection is in one of five stages, and one look a second ends
those that have been in theirs too long. When there are too many, those of the peer with most go, first those that never asked. Those on
which a caller with a name was answered go last: strangers from many addresses do not end them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import time
from asyncio import sslproto
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvbm.catalog.limits import Buckets, LimitSettings, Seldom, peer_key

MAX_HEADER_BYTES = 32 << 10
LOOK_S = 1.0
_BODY_S = 30.0  # the handler gives up on a body before that
_SLOW_S = 1.0  # a body or a reader that takes longer may be ended for others
_MOST_A_TURN = 32  # connections taken before the loop does something else
_READ_BYTES = 16 << 10
_UNSENT_BYTES = 64 << 10
_BUFFERED_BYTES = 8 << 10  # of a body nobody has asked for yet
_SPARE_DESCRIPTORS = 128  # for NATS, the database, files
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RESET = struct.pack("ii", 1, 0)


class Stage(IntEnum):
    """What a connection does. In this order they go when there are too many."""

    HEADER = 0  # the header of a request is not complete, or nothing came yet
    BODY = 1
    IDLE = 2  # it has asked before
    KNOWN = 3  # so it has, by a name
    ANSWER = 4


class Connection:
    """One connection. Made when it is taken; its transport comes when it can be used."""

    __slots__ = ("number", "peer", "since_s", "sock", "stage", "stuck_s", "transport", "unsent")

    def __init__(self, sock: socket.socket, peer: _Peer, now_s: float) -> None:
        self.sock, self.number, self.peer = sock, sock.fileno(), peer
        self.stage, self.since_s = Stage.HEADER, now_s
        self.transport: asyncio.Transport | None = None
        self.stuck_s: float | None = None  # since when its caller does not take an answer
        self.unsent = 0

    def end(self) -> None:
        """Close it at once, whatever it does."""
        if self.transport is not None:
            self.transport.abort()
        else:  # in TLS's handshake: asyncio closes it when it meets the end
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class _Peer:
    """The connections of one address, by stage, each in the order in which they came there."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.count = 0
        self.stages: tuple[OrderedDict[Connection, None], ...] = tuple(OrderedDict() for _ in Stage)


class Connections:
    """All connections of one catalog. Belongs to one asyncio loop.

    Args:
        most: at a time, where the process may have fewer files than the settings want.
    """

    def __init__(
        self,
        settings: LimitSettings,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        refusals: Counter[str] | None = None,
    ) -> None:
        self._settings, self._clock = settings, clock
        self.refusals: Counter[str] = Counter() if refusals is None else refusals
        self._most = settings.sockets if most is None else min(settings.sockets, most)
        self._by_file: dict[int, Connection] = {}
        self._peers: dict[str, _Peer] = {}
        self._taken = Buckets(settings.connects_per_s, 4 * settings.connects_per_s)
        self._stuck: OrderedDict[Connection, None] = OrderedDict()
        self._unsent = 0
        self.remarks = Seldom(clock=clock)

    def __len__(self) -> int:
        return len(self._by_file)

    def admit(self, sock: socket.socket, address: Any) -> bool:
        """Whether a new connection may stay. Others may have to go for it."""
        now_s = self._clock()
        key = peer_key(str(address[0]) if address else "")
        if self._taken.take(now_s, key):
            self.refusals["connection_rate"] += 1
            self.remarks.warn("catalog.connections_refused", why="too many a second", peer=key)
            return False
        peer = self._peers.get(key)
        full = [peer] if peer is not None and peer.count >= self._settings.sockets_per_peer else []
        if not full and len(self._by_file) >= self._most:
            full = sorted(self._peers.values(), key=lambda one: one.count, reverse=True)
        if full and not any(
            make_room(one, now_s) for make_room in (self._end_stranger, self._end_known) for one in full
        ):
            self.refusals["connection_room"] += 1
            self.remarks.warn("catalog.connections_refused", why="all are busy", peer=key)
            return False
        if (old := self._by_file.get(sock.fileno())) is not None:  # closed without a word, in TLS's handshake
            self.closed(old)
        peer = self._peers.get(key) or self._peers.setdefault(key, _Peer(key))
        connection = Connection(sock, peer, now_s)
        self._by_file[connection.number] = connection
        peer.count += 1
        peer.stages[Stage.HEADER][connection] = None
        return True

    def opened(self, transport: asyncio.Transport) -> Connection | None:
        """The connection that can be used now. None: it has to go already."""
        sock = transport.get_extra_info("socket")
        connection = self._by_file.get(sock.fileno()) if sock is not None else None
        if connection is not None:
            connection.transport = transport
        return connection

    def closed(self, connection: Connection) -> None:
        """It is gone. Idempotent."""
        self.flows(connection)
        peer = connection.peer
        if connection not in peer.stages[connection.stage]:
            return
        del peer.stages[connection.stage][connection]
        peer.count -= 1
        if not peer.count:
            self._peers.pop(peer.key, None)
        if self._by_file.get(connection.number) is connection:
            del self._by_file[connection.number]

    def moved(self, connection: Connection, stage: Stage) -> None:
        """It does something else now."""
        stages = connection.peer.stages
        if stage is connection.stage or connection not in stages[connection.stage]:
            return
        del stages[connection.stage][connection]
        connection.stage, connection.since_s = stage, self._clock()
        stages[stage][connection] = None

    def stuck(self, connection: Connection, unsent: int) -> None:
        """Its caller does not take an answer, of which so many bytes wait here."""
        if connection.stuck_s is not None or connection not in connection.peer.stages[connection.stage]:
            return
        connection.stuck_s, connection.unsent = self._clock(), unsent
        self._stuck[connection] = None
        self._unsent += unsent
        while self._unsent > self._settings.unsent_bytes and len(self._stuck) > 1:
            self._end_unread(next(iter(self._stuck)))

    def flows(self, connection: Connection) -> None:
        """Its caller takes the answer."""
        if connection.stuck_s is not None:
            self._unsent -= connection.unsent
            connection.stuck_s, connection.unsent = None, 0
            self._stuck.pop(connection, None)

    def look(self) -> None:
        """End what takes too long."""
        now_s, settings = self._clock(), self._settings
        idle_s = settings.idle_s + 2 * LOOK_S
        for stage, most_s in (
            (Stage.HEADER, settings.header_s), (Stage.BODY, _BODY_S), (Stage.IDLE, idle_s), (Stage.KNOWN, idle_s),
        ):  # fmt: skip
            for peer in list(self._peers.values()):
                while (first := next(iter(peer.stages[stage]), None)) is not None and now_s >= first.since_s + most_s:
                    if stage in (Stage.HEADER, Stage.BODY):
                        self.refusals["connection_slow"] += 1
                    self._end(first)
        for one in [one for one in self._stuck if one.transport is not None and not unsent_bytes(one.transport)]:
            self.flows(one)
        while (slow := next(iter(self._stuck), None)) is not None and now_s >= (slow.stuck_s or 0.0) + settings.write_s:
            self._end_unread(slow)

    async def look_for_ever(self) -> None:
        """`look`, once a second."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _end_stranger(self, peer: _Peer, now_s: float) -> bool:
        """End the one connection of a peer that is missed least, of those without a name."""
        for stage in (Stage.HEADER, Stage.BODY, Stage.IDLE):
            first = next(iter(peer.stages[stage]), None)
            if first is not None and (stage is not Stage.BODY or now_s >= first.since_s + _SLOW_S):
                self._replace(first)
                return True
        return False

    def _end_known(self, peer: _Peer, now_s: float) -> bool:
        """End one that a caller with a name has used, or one that does not take its answer."""
        first = next(iter(peer.stages[Stage.KNOWN]), None) or next(
            (one for one in self._stuck if one.peer is peer), None
        )
        if first is None or (first.stage is Stage.ANSWER and now_s < (first.stuck_s or 0.0) + _SLOW_S):
            return False
        self._replace(first)
        return True

    def _replace(self, connection: Connection) -> None:
        self.refusals["connection_replaced"] += 1
        stage = connection.stage.name
        self.remarks.warn("catalog.connections_ended", why="too many at a time", peer=connection.peer.key, stage=stage)
        self._end(connection)

    def _end_unread(self, connection: Connection) -> None:
        self.refusals["connection_unread"] += 1
        self.remarks.warn("catalog.connections_ended", why="answers are not taken")
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        self.closed(connection)
        connection.end()


class Listener(socket.socket):
    """A listening socket that takes what may stay, and goes on when the process has no files left.

    asyncio would try again for each place of its backlog, log each, and start as many times again a second later.
    """

    _connections: Connections | None = None
    _reserve: int | None = None
    _left = _MOST_A_TURN

    def limit(self, connections: Connections) -> None:
        """Ask them about every new connection."""
        self._connections = connections
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that may stay. Raises BlockingIOError: there is none now."""
        if self._connections is None:
            return super().accept()
        while self._left > 0:
            if self._left == _MOST_A_TURN:
                asyncio.get_running_loop().call_soon(self._begin_turn)
            self._left -= 1
            try:
                taken, address = super().accept()
            except OSError as error:
                if error.errno not in _NO_MORE:
                    raise
                self._shed(error)
                continue
            if self._connections.admit(taken, address):
                return taken, address
            _reset(taken)
        raise BlockingIOError(errno.EAGAIN, "enough for one turn")

    def close(self) -> None:
        """Close it, and the file it keeps for when there are no others."""
        super().close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _begin_turn(self) -> None:
        self._left = _MOST_A_TURN

    def _shed(self, error: OSError) -> None:
        """Take a connection with the file that is kept for this, and close it: else it would be offered for ever."""
        assert self._connections is not None
        self._connections.refusals["no_files"] += 1
        self._connections.remarks.warn("catalog.connections_refused", why=os.strerror(error.errno or 0))
        if self._reserve is None:
            self._left = 0
            raise error  # asyncio takes nothing for a second
        os.close(self._reserve)
        self._reserve = None
        with contextlib.suppress(OSError):
            _reset(super().accept()[0])
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def room_for_sockets(wanted: int, may_raise: bool) -> int:
    """How many sockets the process may have beside the files it needs.

    Args:
        may_raise: its limit on open files, as far as the system lets it.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _SPARE_DESCRIPTORS
    need = wanted + open_now + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need and may_raise:
        raised = need if hard == resource.RLIM_INFINITY else min(need, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - open_now - _SPARE_DESCRIPTORS))


def small_tls_buffers() -> None:
    """asyncio gives each TLS connection 256 KiB to read into, before its handshake: 1,024 strangers would have 256 MiB."""
    sslproto.SSLProtocol.max_size = _READ_BYTES


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What of answers waits here. asyncio's TLS hands all of an answer to the socket's transport, and counts only what comes after."""
    within = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return transport.get_write_buffer_size() + (within.get_write_buffer_size() if within is not None else 0)


def protocol_within(connections: Connections) -> type[H11Protocol]:
    """uvicorn's protocol, with each connection's stage told to `connections`."""

    class LimitedProtocol(H11Protocol):
        _connection: Connection | None = None
        _idle = Stage.IDLE

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._connection = connections.opened(transport)
            if self._connection is None:
                transport.abort()
            elif hasattr(transport, "max_size"):
                transport.max_size = _READ_BYTES

        def connection_lost(self, exc: Exception | None) -> None:
            if self._connection is not None:
                connections.closed(self._connection)
            super().connection_lost(exc)
            self._unset_keepalive_if_required()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            cycle: RequestResponseCycle | None = self.cycle
            if cycle is not None and len(cycle.body) > _BUFFERED_BYTES:
                self.flow.pause_reading()
            self._tell_stage()

        def on_response_complete(self) -> None:
            self._idle = Stage.KNOWN if getattr(self.cycle.scope.get("kvbm.caller"), "name", "") else Stage.IDLE
            super().on_response_complete()
            self._tell_stage()
            if self._connection is not None and (unsent := unsent_bytes(self.transport)) > _UNSENT_BYTES:
                connections.stuck(self._connection, unsent)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._connection is not None:
                connections.stuck(self._connection, unsent_bytes(self.transport))

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._connection is not None:
                connections.flows(self._connection)

        def _tell_stage(self) -> None:
            if self._connection is None:
                return
            connections.moved(self._connection, _stage(self.conn, self.cycle is not None, self._idle))

    return LimitedProtocol


def _stage(conn: h11.Connection, has_asked: bool, idle: Stage) -> Stage:
    if conn.their_state is not h11.IDLE:
        return Stage.BODY if conn.their_state is h11.SEND_BODY else Stage.ANSWER
    return idle if has_asked and not conn.trailing_data[0] else Stage.HEADER


class SeldomFilter(logging.Filter):
    """Lets each message of a logger through once in a while: callers can cause them."""

    def __init__(self) -> None:
        super().__init__()
        self._remarks = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        more = self._remarks.due(str(record.msg))
        if more:
            record.msg = f"{record.msg} ({more} more like this before)"
        return more is not None
