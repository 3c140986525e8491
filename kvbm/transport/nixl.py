"""Blocks from another instance's memory by NIXL, over whatever UCX finds between the two.

NIXL runs in a process of its own and reads into lanes that it shares with this one. What still arrives there when a way
has ended, nobody looks at.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np

from kvbm.core.errors import NixlError, PeerWireError
from kvbm.transport.base import PeerReader
from kvbm.transport.leased import NOT_PROVED, Arrivals, LeasedReader, ProvedConnection, Rows
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_hello import NixlLentMemory, NixlStatus, encode_hello, receive_ready
from kvbm.transport.nixl_process import Failed, Fetch, Fetched, Join, receive, send
from kvbm.transport.sockets import send_message

_LANE_BYTES = 64 << 20  # of memory for what is on its way
_LOT_BLOCKS = 64
_LOTS = 2  # at once: one is copied while the other is on its way
_HANDSHAKE_S = 5.0
_LATE = "not there by the deadline"
_REFUSALS = {
    NixlStatus.NOT_PROVED: NOT_PROVED,
    NixlStatus.FULL: "it has no room for another reader over NIXL",
}


class NixlReader(LeasedReader):
    """A reader of one instance's memory over NIXL, as `LeasedReader`."""

    transport = "nixl"
    error = NixlError

    def __init__(
        self,
        process: NixlProcess,
        connect: Callable[[float], ProvedConnection],
        rows: Rows,
        others: PeerReader | None = None,
        lane_bytes: int = _LANE_BYTES,
        handshake_s: float = _HANDSHAKE_S,
    ) -> None:
        """Nothing is connected yet.

        Args:
            process: that reads; several readers may share it.
            connect, rows, others, handshake_s: as of `LeasedReader`.
            lane_bytes: of memory for what is on its way, at most (at least one block for each lot).
        """
        super().__init__(connect, rows, others, handshake_s)
        self._process, self._lane_bytes = process, lane_bytes

    def _join(self, connection: ProvedConnection, block_bytes: int, until_s: float) -> _Way:
        send_message(connection.socket, encode_hello(), until_s)
        ready = receive_ready(connection.socket, until_s)
        if ready.status is not NixlStatus.READY:
            raise NixlError(_REFUSALS[ready.status])
        if ready.memory.stride != block_bytes:
            raise PeerWireError(f"its blocks have {ready.memory.stride} bytes, those of this instance {block_bytes}")
        count = _LOTS * max(1, min(_LOT_BLOCKS, ready.memory.slots, self._lane_bytes // block_bytes // _LOTS))
        descriptor = os.memfd_create("kvbm-lanes", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, count * block_bytes)
            mapping = mmap.mmap(descriptor, count * block_bytes)
            fetching = self._process.join(Join(ready.metadata, count, block_bytes), descriptor, until_s)
        finally:
            os.close(descriptor)
        lanes = np.frombuffer(mapping, dtype=np.uint8).reshape(count, block_bytes)
        return _Way(connection, fetching, lanes, ready.memory)


class _Way:
    """Lanes, the socket of what fills them, and the connection on which blocks are asked for.

    Attributes:
        lanes: (lanes, block_bytes) uint8.
    """

    def __init__(
        self, connection: ProvedConnection, fetching: socket.socket, lanes: np.ndarray, memory: NixlLentMemory
    ) -> None:
        self.connection, self._fetching, self.lanes, self.memory = connection, fetching, lanes, memory
        self._poller = select.poll()
        self._poller.register(fetching, select.POLLIN)
        self._poller.register(connection.socket, select.POLLRDHUP)

    @property
    def slots(self) -> int:
        """Of the owner's memory."""
        return self.memory.slots

    def fetch(self, slots: np.ndarray, arrived: Arrivals, until_s: float) -> str:
        """As `JoinedWay.fetch`, lot by lot."""
        each = len(self.lanes) // _LOTS
        lots = [list(range(begin, min(begin + each, len(slots)))) for begin in range(0, len(slots), each)]
        lanes = [list(range(each * half, each * (half + 1))) for half in range(_LOTS)]
        posted = taken = 0
        while taken < len(lots):
            while posted < len(lots) and posted < taken + _LOTS:
                blocks = lots[posted]
                addresses = [self.memory.address + int(slots[block]) * self.memory.stride for block in blocks]
                send(self._fetching, Fetch(addresses, lanes[posted % _LOTS][: len(blocks)]))
                posted += 1
            trouble = self._wait(until_s)
            if not trouble and time.monotonic() >= until_s:
                trouble = _LATE  # the slots may have held other blocks when it was read
            if trouble:
                return trouble
            blocks = lots[taken]
            arrived.take(blocks, lanes[taken % _LOTS][: len(blocks)])
            taken += 1
        return ""

    def leave(self) -> None:
        """Nobody waits for anything any more. What still arrives does so in memory that is not used again."""
        with suppress(Exception):  # a connection that is broken may close as it likes
            self.connection.close()
        with suppress(OSError):  # a forked child may have it too
            self._fetching.shutdown(socket.SHUT_RDWR)
        self._fetching.close()

    def _wait(self, until_s: float) -> str:
        """For one lot."""
        left_s = until_s - time.monotonic()
        ready = dict(self._poller.poll(1000 * left_s)) if left_s > 0 else {}
        if not ready:
            return _LATE
        if self._fetching.fileno() not in ready:
            return "the owner is gone"
        try:
            answer = receive(self._fetching)
        except msgspec.DecodeError as error:
            return f"the process of NIXL says what makes no sense: {error}"
        if isinstance(answer, Fetched):
            return ""
        return (
            f"a read over NIXL failed: {answer.words}"
            if isinstance(answer, Failed)
            else "the process of NIXL has ended"
        )
