"""Blocks from another instance's memory by RDMA READs, which its CPU has no part in.

The lanes are registered with the device. The memory that a READ which did not end may still write stays in quarantine
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvbm.core.errors import PeerWireError, VerbsError
from kvbm.transport.base import PeerReader
from kvbm.transport.leased import NOT_PROVED, Arrivals, LeasedReader, ProvedConnection, Rows
from kvbm.transport.rdma_hello import RDMA_READY, RdmaReady, RdmaStatus, decode_ready, encode_hello, receive_message
from kvbm.transport.sockets import send_message
from kvbm.verbs.device import Device
from kvbm.verbs.memory import RegisteredMemory, new_memory
from kvbm.verbs.quarantine import Quarantine
from kvbm.verbs.queue_pair import QueuePair

_REQUESTS = 64  # READs posted at once
_LANE_BYTES = 64 << 20  # of memory for what is on its way
_HANDSHAKE_S = 2.0
_REFUSALS = {
    RdmaStatus.NOT_PROVED: NOT_PROVED,
    RdmaStatus.FULL: "it has no room for another reader over RDMA",
}


class RdmaReader(LeasedReader):
    """A reader of one instance's memory over RDMA, as `LeasedReader`.

    Attributes:
        quarantine: of what did not drain; shared by the readers of a device.
    """

    transport = "rdma"
    error = VerbsError

    def __init__(
        self,
        device: Device,
        connect: Callable[[float], ProvedConnection],
        rows: Rows,
        quarantine: Quarantine | None = None,
        lane_bytes: int = _LANE_BYTES,
        requests: int = _REQUESTS,
        drain_s: float = 0.1,
        handshake_s: float = _HANDSHAKE_S,
        others: PeerReader | None = None,
    ) -> None:
        """Nothing is connected yet.

        Args:
            connect, rows, others, handshake_s: as of `LeasedReader`.
            lane_bytes: of memory for READs on their way, at most (at least one block).
            requests: READs posted at once, at most.
            drain_s: how long what is on its way may take to end after a deadline; a quarter of the deadline at most.
        """
        super().__init__(connect, rows, others, handshake_s)
        self._device = device
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self._lane_bytes, self._drain_s = lane_bytes, drain_s
        self._requests = min(requests, device.limits.requests)

    def close(self) -> None:
        """As `PeerReader.close`; waits for the read that is under way, which fails."""
        super().close()
        with self._lock:
            self.quarantine.sweep()

    def _spared_s(self, deadline_s: float) -> float:
        return min(self._drain_s, deadline_s / 4)

    def _prepare(self) -> None:
        if self.quarantine.sweep() >= self.quarantine.most:
            raise VerbsError(
                f"{len(self.quarantine)} queue pairs did not drain and cannot be destroyed; no new one is made"
            )

    def _join(self, connection: ProvedConnection, block_bytes: int, until_s: float) -> _Way:
        lanes = (self._lane_bytes, self._requests)
        return _Way(self._device, connection, block_bytes, lanes, (self.quarantine, self._drain_s), until_s)


class _Way:
    """A queue pair that is joined to the owner's, its lanes, and the connection on which blocks are asked for."""

    def __init__(
        self,
        device: Device,
        connection: ProvedConnection,
        block_bytes: int,
        most: tuple[int, int],
        ending: tuple[Quarantine, float],
        until_s: float,
    ) -> None:
        """
        Args:
            most: bytes of lanes, and READs posted at once.
            ending: where what does not drain goes, and how long that is waited for.
        """
        self.connection = connection
        self._quarantine, self._drain_s = ending
        lane_bytes, requests = most
        self._piece_bytes = min(block_bytes, device.limits.message_bytes)
        self._pieces = -(-block_bytes // self._piece_bytes)
        lanes = max(1, min(requests // self._pieces, lane_bytes // block_bytes))
        self._pair: QueuePair | None = None
        self._registered: RegisteredMemory | None = None
        try:
            self._pair = QueuePair(device, lanes * self._pieces, is_lent=False)
            ready = self._exchange(self._pair, until_s)  # before memory is registered: it may refuse
            self.memory = ready.memory
            if self.memory.stride != block_bytes:  # slots follow one another without a gap
                raise PeerWireError(f"its blocks have {self.memory.stride} bytes, those of this instance {block_bytes}")
            self._registered = RegisteredMemory(device, new_memory(lanes * block_bytes), is_lent=False)
            self.lanes = self._registered.array.reshape(lanes, block_bytes)
            self._pair.connect(ready.end)
        except BaseException:
            self._free()
            raise

    @property
    def slots(self) -> int:
        """Of the owner's memory."""
        return self.memory.slots

    def fetch(self, slots: np.ndarray, arrived: Arrivals, until_s: float) -> str:
        """As `JoinedWay.fetch`, lane by lane."""
        pair = self._pair
        if pair is None:
            return "this connection is closed"
        free, waiting = list(range(len(self.lanes))), list(range(len(slots)))[::-1]
        block_in: dict[int, int] = {}
        missing: dict[int, int] = {}  # lane → pieces that are on their way
        while waiting or block_in:
            while waiting and free:
                lane, block = free.pop(), waiting.pop()
                block_in[lane], missing[lane] = block, self._pieces
                self._post(pair, lane, int(slots[block]))
            done = pair.take(until_s, self.connection.socket.fileno())
            if time.monotonic() >= until_s:
                return "not there by the deadline"  # the slots may have held other blocks when they were read
            if not done:
                return "the owner is gone"
            whole = []
            for completion in done:
                if completion.trouble:
                    return f"a READ failed: {completion.trouble}"
                missing[completion.request] -= 1
                if not missing[completion.request]:
                    whole.append(completion.request)
            if whole:
                arrived.take([block_in.pop(lane) for lane in whole], whole)
                free += whole
        return ""

    def leave(self) -> None:
        """End what is on its way, and free everything that nothing writes any more; the rest goes into quarantine."""
        with suppress(Exception):  # a connection that is broken may close as it likes
            self.connection.close()
        pair, registered = self._pair, self._registered
        if pair is None or registered is None:
            return
        self._pair = self._registered = None
        try:
            if pair.outstanding:
                pair.fail()
            is_drained = pair.drain(self._drain_s)
        except VerbsError:
            is_drained = False
        if is_drained:
            self._quarantine.free(pair, registered)
        else:
            self._quarantine.put(pair, registered)

    def _post(self, pair: QueuePair, lane: int, slot: int) -> None:
        assert self._registered is not None
        block_bytes = self.lanes.shape[1]
        for begin in range(0, block_bytes, self._piece_bytes):
            size = min(self._piece_bytes, block_bytes - begin)
            remote = (self.memory.address + slot * self.memory.stride + begin, self.memory.key)
            pair.read(lane, self._registered, lane * block_bytes + begin, size, remote)

    def _exchange(self, pair: QueuePair, until_s: float) -> RdmaReady:
        connection = self.connection.socket
        send_message(connection, encode_hello(pair.end), until_s)
        ready = decode_ready(receive_message(connection, RDMA_READY, until_s))
        if ready.status is not RdmaStatus.READY:
            raise VerbsError(_REFUSALS[ready.status])
        return ready

    def _free(self) -> None:
        """Of what was never used."""
        for one in (self._pair, self._registered):
            with suppress(VerbsError):
                if one is not None:
                    one.close()
