"""The connections of a catalog: how many there are, of whom, and how long each may take.

uvicorn has no deadline for a header and no bound on sockets. Here every connection is in one of five stages, and one
look a second ends those that have been in theirs too long. When there are too many, those of the peer with most go,
first those that never asked. Those on which a caller with a name was answered go last: strangers from many addresses do
not end them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from asyncio import sslproto
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from kvbm.catalog.access.judge import peer_key
from kvbm.catalog.access.limits import TokenBuckets
from kvbm.catalog.edge.handshakes import Handshakes
from kvbm.config.settings import LimitSettings
from kvbm.safe_log import RateLimitedLog

LOOK_S = 1.0
_BODY_S = 30.0  # the handler gives up on a body before that
_SLOW_S = 1.0  # a body or a reader that takes longer may be ended for others
_READ_BYTES = 16 << 10
_SPARE_DESCRIPTORS = 128  # for NATS, the database, files


class ConnectionStage(IntEnum):
    """What a connection does. In this order they go when there are too many."""

    HEADER = 0  # the header of a request is not complete, or nothing came yet
    BODY = 1
    IDLE = 2  # it has asked before
    KNOWN = 3  # so it has, by a name
    ANSWER = 4


class Connection:
    """One connection. Made when it is taken; its transport comes when it can be used."""

    __slots__ = ("peer", "since_s", "sock", "stage", "stuck_s", "transport", "turn", "unsent")

    def __init__(self, sock: socket.socket, peer: _Peer, now_s: float) -> None:
        self.sock, self.peer = sock, peer
        self.stage, self.since_s = ConnectionStage.HEADER, now_s
        self.transport: asyncio.Transport | None = None
        self.turn: asyncio.Future[None] | None = (
            None  # for TLS's handshake; until it is there, nothing of that has begun
        )
        self.stuck_s: float | None = None  # since when its caller does not take an answer
        self.unsent = 0

    def end(self) -> None:
        """Close it at once, whatever it does."""
        if self.transport is not None:
            self.transport.abort()
        elif self.turn is not None and not self.turn.done():
            self.turn.cancel()
        else:  # in TLS's handshake: asyncio closes it when it meets the end
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class _Peer:
    """The connections of one address, by stage, each in the order in which they came there."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.count = 0
        self.stages: tuple[OrderedDict[Connection, None], ...] = tuple(OrderedDict() for _ in ConnectionStage)


class Connections:
    """All connections of one catalog. Belongs to one asyncio loop.

    Args:
        most: at a time, where the process may have fewer files than the settings want.

    Attributes:
        handshakes: of TLS, those under way.
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
        self._count = 0
        self._peers: dict[str, _Peer] = {}
        self._taken = TokenBuckets(settings.connects_per_s, 4 * settings.connects_per_s)
        self._stuck: OrderedDict[Connection, None] = OrderedDict()
        self._unsent = 0
        self.limited_log = RateLimitedLog(clock=clock)
        self.handshakes = Handshakes(clock=clock)

    def change(self, settings: LimitSettings, most: int) -> None:
        """From now on these count. Connections that are more than that go when others come."""
        self._settings, self._most = settings, min(settings.sockets, most)
        self._taken.change(settings.connects_per_s, 4 * settings.connects_per_s)

    def __len__(self) -> int:
        return self._count

    def admit(self, sock: socket.socket, address: Any) -> Connection | None:
        """A new connection, for which others may have to go; None: it may not stay."""
        now_s = self._clock()
        key = peer_key(str(address[0]) if address else "")
        if self._taken.take(now_s, key):
            self.refusals["connection_rate"] += 1
            self.limited_log.warn("catalog.connections_refused", why="too many a second", peer=key)
            return None
        peer = self._peers.get(key)
        full = [peer] if peer is not None and peer.count >= self._settings.sockets_per_peer else []
        if not full and self._count >= self._most:
            full = sorted(self._peers.values(), key=lambda one: one.count, reverse=True)
        if full and not any(
            make_room(one, now_s) for make_room in (self._end_stranger, self._end_known) for one in full
        ):
            self.refusals["connection_room"] += 1
            self.limited_log.warn("catalog.connections_refused", why="all are busy", peer=key)
            return None
        peer = self._peers.get(key) or self._peers.setdefault(key, _Peer(key))
        connection = Connection(sock, peer, now_s)
        self._count += 1
        peer.count += 1
        peer.stages[ConnectionStage.HEADER][connection] = None
        return connection

    def opened(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """The connection can be used now; False: it has to go already."""
        connection.transport = transport
        return connection in connection.peer.stages[connection.stage]

    def closed(self, connection: Connection) -> None:
        """It is gone. Idempotent."""
        self.flows(connection)
        peer = connection.peer
        if connection not in peer.stages[connection.stage]:
            return
        del peer.stages[connection.stage][connection]
        self._count -= 1
        peer.count -= 1
        if not peer.count:
            self._peers.pop(peer.key, None)

    def moved(self, connection: Connection, stage: ConnectionStage) -> None:
        """It does something else now."""
        stages = connection.peer.stages
        if stage is connection.stage or connection not in stages[connection.stage]:
            return
        del stages[connection.stage][connection]
        connection.stage, connection.since_s = stage, self._clock()
        stages[stage][connection] = None

    def asked(self, connection: Connection) -> None:
        """It was answered just now: what it does next begins now."""
        stages = connection.peer.stages[connection.stage]
        if connection in stages:
            connection.since_s = self._clock()
            stages.move_to_end(connection)

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
        self.refusals["connection_slow"] += self.handshakes.look()
        idle_s = settings.idle_s + 2 * LOOK_S
        for stage, most_s in (
            (ConnectionStage.HEADER, settings.header_s),
            (ConnectionStage.BODY, _BODY_S),
            (ConnectionStage.IDLE, idle_s),
            (ConnectionStage.KNOWN, idle_s),
        ):
            for peer in list(self._peers.values()):
                while (first := next(iter(peer.stages[stage]), None)) is not None and now_s >= first.since_s + most_s:
                    if stage in (ConnectionStage.HEADER, ConnectionStage.BODY):
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
        for stage in (ConnectionStage.HEADER, ConnectionStage.BODY, ConnectionStage.IDLE):
            first = next(iter(peer.stages[stage]), None)
            if first is not None and (stage is not ConnectionStage.BODY or now_s >= first.since_s + _SLOW_S):
                self._replace(first)
                return True
        return False

    def _end_known(self, peer: _Peer, now_s: float) -> bool:
        """End one that a caller with a name has used, or one that does not take its answer."""
        first = next(iter(peer.stages[ConnectionStage.KNOWN]), None) or next(
            (one for one in self._stuck if one.peer is peer), None
        )
        if first is None or (first.stage is ConnectionStage.ANSWER and now_s < (first.stuck_s or 0.0) + _SLOW_S):
            return False
        self._replace(first)
        return True

    def _replace(self, connection: Connection) -> None:
        self.refusals["connection_replaced"] += 1
        stage = connection.stage.name
        self.limited_log.warn(
            "catalog.connections_ended", why="too many at a time", peer=connection.peer.key, stage=stage
        )
        self._end(connection)

    def _end_unread(self, connection: Connection) -> None:
        self.refusals["connection_unread"] += 1
        self.limited_log.warn("catalog.connections_ended", why="answers are not taken")
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        self.closed(connection)
        connection.end()


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
    """asyncio gives each TLS connection 256 KiB to read into, before its handshake: 1,024 strangers would have
    256 MiB.
    """
    sslproto.SSLProtocol.max_size = _READ_BYTES


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What of answers waits here. asyncio's TLS hands all of an answer to the socket's transport, and counts only what
    comes after.
    """
    within = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return transport.get_write_buffer_size() + (within.get_write_buffer_size() if within is not None else 0)


class RateLimitFilter(logging.Filter):
    """Lets each message of a logger through once in a while: callers can cause them."""

    def __init__(self) -> None:
        super().__init__()
        self._limited_log = RateLimitedLog()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        more = self._limited_log.due(str(record.msg))
        if more:
            record.msg = f"{record.msg} ({more} more like this before)"
        return more is not None
