"""A TCP proxy of ours between two processes: cuts, stalls, swallows, delays and slows what passes, each direction by
itself.

All proxies of a hub live in one thread with a loop of its own; every public method may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

READ_BYTES = 16 << 10
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
    """

    stall: bool = False
    swallow: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


FREE = Rules()


class ProxyHub:
    """The thread that all proxies of a test live in. `close` ends every connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxies", daemon=True)
        self._thread.start()
        self._proxies: list[Proxy] = []

    def open(self, target_port: int, host: str = "127.0.0.1") -> Proxy:
        """A proxy on a free port, in front of a port where nobody need listen yet."""
        proxy = Proxy(self, host, target_port)
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

    def end(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """One port in front of another.

    "up" is from the client to the target, "down" the way back. `ProxyHub.open` makes it.

    Attributes:
        port: where clients connect.
        passed_bytes, swallowed_bytes: in both directions since the start.
    """

    def __init__(self, hub: ProxyHub, host: str, target_port: int) -> None:
        self.port = 0
        self.passed_bytes = self.swallowed_bytes = 0
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

    def heal(self) -> None:
        """Let everything pass again. A connection that has lost bytes ends."""

        async def apply() -> None:
            self._is_cut = False
            self._up = self._down = FREE
            for one in list(self._connections.values()):
                one.set(FREE, FREE)
                if one.swallowed:
                    one.end()

        self._hub.call(apply)

    # -- in the hub's loop --------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Bind a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=READ_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def end(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
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
            target_reader, target_writer = await asyncio.open_connection(
                self._host, self._target_port, limit=READ_BYTES
            )
            connection.writers.append(target_writer)
            for one in connection.writers:
                one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            if not data:
                return
            while connection.rules[way].stall:
                await connection.changed.wait()
            rules = connection.rules[way]
            if rules.swallow:
                connection.swallowed = True
                self.swallowed_bytes += len(data)
                continue
            wait_s = rules.delay_s + (len(data) / rules.bytes_per_s if rules.bytes_per_s else 0.0)
            if wait_s:
                await asyncio.sleep(wait_s)
            self.passed_bytes += len(data)
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                return


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
