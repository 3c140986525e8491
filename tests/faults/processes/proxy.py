"""A proxy of ours between two ends of TCP or of a unix socket: cuts, stalls, swallows, delays, slows and spoils what
passes, each direction by itself, at once or after so many bytes.

All proxies of a hub live in one thread with a loop of its own; every public method may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple, TypeVar

READ_BYTES = 16 << 10
_NARROW_BYTES, _NARROW_SEGMENT = 32 << 10, 1400  # the sender's buffer grows with the segments
CALL_WAIT_S = 60.0
R = TypeVar("R")


class Rules(NamedTuple):
    """What happens to bytes that go in one direction.

    Attributes:
        stall: nothing is read: the sender's buffers fill, and all of it arrives late.
        swallow: read and thrown away, as a network that drops packets; the connection is useless afterwards and ends
            when healed.
        delay_s: how long each piece waits.
        bytes_per_s: 0 for no limit.
        keeps_end: the end of a connection is not passed on: for the other side it goes on, half-open.
    """

    stall: bool = False
    swallow: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    keeps_end: bool = False


FREE = Rules()
_SILENT = Rules(swallow=True, keeps_end=True)
_FULL = Rules(stall=True, keeps_end=True)


class Breakage(Enum):
    """What happens to connections.

    Attributes:
        RESET: all end with a reset, as where the other side's machine has started anew. CLOSE: all are closed, in the
            middle of whatever was said.
        SILENCE: whatever is sent is lost from now on, also on connections that are made later, and no end is told: the
            other side's machine has vanished. FORGOTTEN: so it is for connections that stand, not for later ones: what
            keeps track of connections in between has lost its table.
        STALL: nobody takes what is sent, and no end is told.
        FLIP: one bit comes otherwise.
    """

    RESET = "reset"
    CLOSE = "close"
    SILENCE = "silence"
    FORGOTTEN = "forgotten"
    STALL = "stall"
    FLIP = "flip"


class _Plan(NamedTuple):
    """What happens once so many bytes have passed in one direction, on all connections together."""

    breakage: Breakage
    way: str
    after_bytes: int


class ProxyHub:
    """The thread that all proxies of a test live in. `close` ends every connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxies", daemon=True)
        self._thread.start()
        self._proxies: list[Proxy] = []

    def open(
        self, target_port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, is_narrow: bool = False
    ) -> Proxy:
        """A proxy on a free port, in front of a port where nobody need listen yet.

        Args:
            tls: what clients have to speak; to the target their words go plainly. None: bytes go as they come.
            is_narrow: the system takes little of what the target sends before it is passed on.
        """
        proxy = Proxy(self, host, target_port, tls=tls, is_narrow=is_narrow)
        self.call(proxy.listen)
        self._proxies.append(proxy)
        return proxy

    def call(self, work: Callable[[], Awaitable[R]]) -> R:
        """Run a coroutine in the hub's loop and wait for it."""

        async def run() -> R:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_WAIT_S)

    def close(self) -> None:
        """End all connections, listeners and the thread. Idempotent."""
        if self._loop.is_closed():
            return
        for proxy in self._proxies:
            self.call(proxy.end)
        self.call(_cancel_others)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_WAIT_S)
        self._loop.close()


class _Connection:
    """One client's connection and its other half."""

    def __init__(self, number: int, up: Rules, down: Rules) -> None:
        self.number = number
        self.rules = {"up": up, "down": down}
        self.changed = asyncio.Event()
        self.swallowed = False  # bytes are missing: it must not be used again
        self.writers: list[asyncio.StreamWriter] = []

    def set(self, up: Rules, down: Rules) -> None:
        self.rules = {"up": up, "down": down}
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, with_reset: bool = False) -> None:
        for writer in self.writers:
            about = writer.get_extra_info("socket")
            if with_reset and about.family != socket.AF_UNIX and about.fileno() >= 0:
                about.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """One port in front of another.

    "up" is from the client to the target, "down" the way back. `ProxyHub.open` makes it.

    Attributes:
        port: where clients connect.
        passed_bytes, swallowed_bytes: in both directions since the start.
        passed: bytes in each direction since the start, or since something was planned.
    """

    def __init__(
        self,
        hub: ProxyHub,
        host: str,
        target_port: int,
        tls: ssl.SSLContext | None = None,
        is_narrow: bool = False,
    ) -> None:
        self.port = 0
        self.passed_bytes = self.swallowed_bytes = 0
        self.passed = {"up": 0, "down": 0}
        self._plan: _Plan | None = None
        self._tls, self._is_narrow = tls, is_narrow
        self._hub, self._host, self._target_port = hub, host, target_port
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._up = self._down = FREE
        self._is_cut = False
        self._server: asyncio.Server | None = None

    # -- any thread ---------------------------------------------------------------------------------------------------

    def connections(self) -> list[int]:
        """Numbers of the connections that stand now."""
        return sorted(self._connections)

    def set(self, up: Rules = FREE, down: Rules = FREE, connection: int | None = None) -> None:
        """From now on, for one connection, or for all and those to come."""

        async def apply() -> None:
            if connection is None:
                self._up, self._down = up, down
            for one in list(self._connections.values()):
                if connection in (None, one.number):
                    one.set(up, down)

        self._hub.call(apply)

    def cut(self) -> None:
        """End all connections with a reset and refuse new ones, until `heal`."""

        async def apply() -> None:
            self._is_cut = True
            self._end_all()

        self._hub.call(apply)

    def reset(self, connection: int | None = None) -> None:
        """End one connection, or all, with a reset; new ones are taken."""

        async def apply() -> None:
            self._end_all(connection)

        self._hub.call(apply)

    def plan(self, breakage: Breakage, way: str, after_bytes: int) -> None:
        """Break connections once so many bytes have passed in one direction from now on, in place of what was
        planned.
        """

        async def apply() -> None:
            self.passed = {"up": 0, "down": 0}
            self._plan = _Plan(breakage, way, after_bytes)

        self._hub.call(apply)

    @property
    def is_planned(self) -> bool:
        """What was planned has not happened yet."""
        return self._plan is not None

    def heal(self) -> None:
        """Let everything pass again. A connection that has lost bytes ends; nothing is planned any more."""

        async def apply() -> None:
            self._is_cut, self._plan = False, None
            self._up = self._down = FREE
            for one in list(self._connections.values()):
                one.set(FREE, FREE)
                if one.swallowed:
                    one.end()

        self._hub.call(apply)

    # -- in the hub's loop --------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Bind a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=READ_BYTES, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def end(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for one in self._connections.values():
            one.set(FREE, FREE)  # nobody waits for a change that does not come
        self._end_all()

    def _end_all(self, connection: int | None = None) -> None:
        for one in list(self._connections.values()):
            if connection in (None, one.number):
                one.end()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        connection = _Connection(next(self._numbers), self._up, self._down)
        connection.writers.append(writer)
        self._connections[connection.number] = connection
        try:
            target_reader, target_writer = await self._connected()
            connection.writers.append(target_writer)
            pumps = [
                asyncio.create_task(self._pump(connection, "up", reader, target_writer)),
                asyncio.create_task(self._pump(connection, "down", target_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # nobody listens there now: the client sees a reset
        finally:
            connection.end()
            del self._connections[connection.number]

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the target. asyncio sets TCP_NODELAY, here and where it accepts."""
        to_target = socket.socket()
        try:
            if self._is_narrow:
                to_target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_BYTES)
                to_target.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _NARROW_SEGMENT)
            to_target.setblocking(False)
            await asyncio.get_running_loop().sock_connect(to_target, (self._host, self._target_port))
            return await asyncio.open_connection(sock=to_target, limit=READ_BYTES)
        except BaseException:
            to_target.close()
            raise

    def _break(self, breakage: Breakage) -> None:
        connections = list(self._connections.values())
        rules = _FULL if breakage is Breakage.STALL else _SILENT
        for one in connections:
            if breakage is Breakage.CLOSE:
                for writer in one.writers:
                    writer.close()
            elif breakage is Breakage.RESET:
                one.end(with_reset=True)
            else:
                one.set(rules, rules)
                one.swallowed = True
        if breakage in (Breakage.SILENCE, Breakage.STALL):
            self._up = self._down = rules

    def _cut(self, way: str, data: bytes) -> tuple[bytes, Breakage | None]:
        """What of some bytes passes, and what happens then."""
        plan = self._plan
        if plan is None or plan.way != way or plan.after_bytes >= self.passed[way] + len(data):
            return data, None
        self._plan, at = None, max(0, plan.after_bytes - self.passed[way])
        if plan.breakage is Breakage.FLIP:
            return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :], None
        return data[:at], plan.breakage

    async def _pump(
        self, connection: _Connection, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass bytes on by the rules of the moment until either side ends."""
        while True:
            while connection.rules[way].stall:
                await connection.changed.wait()
            rules = connection.rules[way]
            size = READ_BYTES if not rules.bytes_per_s else max(1, min(READ_BYTES, int(rules.bytes_per_s / 10)))
            try:
                data = await reader.read(size)
            except OSError:
                return
            while connection.rules[way].stall or (not data and connection.rules[way].keeps_end):
                await connection.changed.wait()
            if not data:
                return
            rules = connection.rules[way]
            if rules.swallow:
                connection.swallowed = True
                self.swallowed_bytes += len(data)
                continue
            wait_s = rules.delay_s + (len(data) / rules.bytes_per_s if rules.bytes_per_s else 0.0)
            if wait_s:
                await asyncio.sleep(wait_s)
            data, breakage = self._cut(way, data)
            self.passed_bytes += len(data)
            self.passed[way] += len(data)
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                return
            if breakage is not None:
                self._break(breakage)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
