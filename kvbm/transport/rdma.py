"""Blocks from another instance's memory by RDMA READs, which its CPU has no part in.

The READs go into lanes of this reader's own memory, and only what has arrived whole is copied to the caller's rows. So
the memory that a READ which did not end may still write is never the caller's: it stays in quarantine here. The
checksum is of the caller's row.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import KvbmError, PeerWireError, VerbsError
from kvbm.core.ids import HASH_BYTES, Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead, PeerReader, check_wish, failed_read, waited_read
from kvbm.transport.rdma_hello import (
    RDMA_READY,
    RdmaReady,
    RdmaStatus,
    decode_ready,
    encode_hello,
    is_hung_up,
    receive_message,
    send_message,
)
from kvbm.transport.wire import MOST_HASHES
from kvbm.verbs.device import Device
from kvbm.verbs.memory import RegisteredMemory, new_memory
from kvbm.verbs.quarantine import Quarantine
from kvbm.verbs.queue_pair import QueuePair

_REQUESTS = 64  # READs posted at once
_LANE_BYTES = 64 << 20  # of memory for what is on its way
_PIECE_BYTES = 64 << 20  # of blocks that one question names: no lease lasts much longer than they take
_HANDSHAKE_S = 2.0
_REFUSALS = {
    RdmaStatus.NOT_PROVED: "its whole memory is only for who has proved each of its namespaces",
    RdmaStatus.FULL: "it has no room for another reader over RDMA",
}


class LeasedRun(NamedTuple):
    """What an owner grants: the longest run from the first hash on that lies in HOST.

    Attributes:
        lease: for `end`; 0: nothing is granted, `trouble` (empty: it is not held) and `retry_s` say why.
        until_s: when it ends, of `time.monotonic`, counted from before the question.
        slots, checksums: u32, one for each block granted.
    """

    lease: int
    until_s: float
    slots: np.ndarray
    checksums: np.ndarray
    trouble: str = ""
    retry_s: float = 0.0


class ProvedConnection(Protocol):
    """A connection to an owner that knows who asks, and on which namespaces can be opened.

    Attributes:
        socket: on which RDMA_HELLO and RDMA_READY are exchanged before anything is asked; its end tells that the owner
            is gone.
    """

    @property
    def socket(self) -> socket.socket: ...

    def ask(self, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        """Ask for a lease of blocks in HOST. Raises OSError, KvbmError: the connection is of no use any more."""

    def end(self, namespace: Namespace, lease: int, failed: bytes) -> None:
        """The reader is done;

        `failed`: packed hashes of blocks whose checksum was wrong. Raises OSError, PeerWireError.
        """

    def close(self) -> None:
        """Hang up, which ends all leases. Idempotent."""


class Rows(Protocol):
    """Copies and checksums of rows, natively and without the GIL: as `kvbm.pools.host.rows.RowCopies`."""

    def copy_rows(
        self, target: np.ndarray, target_at: np.ndarray | None, source: np.ndarray, source_at: np.ndarray | None
    ) -> None:
        """Copy row source_at[i] to row target_at[i]."""

    def checksum_rows(self, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """CRC-32C of these rows."""


class RdmaReader:
    """A reader of one instance's memory over RDMA. Any thread; reads that find another under way wait for it.

    Attributes:
        transport: "rdma".
        quarantine: of what did not drain; shared by the readers of a device.
    """

    transport = "rdma"

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
            connect: makes a proved connection until a time of `time.monotonic`. Raises OSError or KvbmError.
            lane_bytes: of memory for READs on their way, at most (at least one block).
            requests: READs posted at once, at most.
            drain_s: how long what is on its way may take to end after a deadline; a quarter of the deadline at most.
            handshake_s: how long the owner may take to answer RDMA_HELLO.
            others: reads in another way what the owner does not hold in HOST, and everything while there is no
                connection over RDMA; it is closed with this. None: the former is missing, the latter fails.
        """
        self._device, self._connect, self._rows = device, connect, rows
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self._lane_bytes, self._drain_s, self._handshake_s = lane_bytes, drain_s, handshake_s
        self._requests, self._others = min(requests, device.limits.requests), others
        self._lock = threading.Lock()
        self._way: _Way | None = None
        self._failed_s, self._why = -math.inf, ""  # when a connection failed last, and why
        self._is_closed = False

    def read(
        self,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        deadline_s: float,
    ) -> PeerRead:
        """As `PeerReader.read`."""
        count = check_wish(hashes, rows, at)
        begun_s = time.monotonic()
        until_s = begun_s + deadline_s - min(self._drain_s, deadline_s / 4)
        if not count:
            return PeerRead(ReadResult([], np.zeros(0, dtype=np.uint32)))
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            return waited_read(count)
        try:
            if time.monotonic() >= until_s:
                return waited_read(count)  # asking now would only break a connection that others use
            if self._failed_s > begun_s and self._way is None:
                raise VerbsError(self._why)  # found while this one waited, and not to be found by each that did
            found = self._read(namespace, hashes, rows, at, until_s)
        except (OSError, KvbmError) as error:
            self._drop()
            why = str(error) or type(error).__name__
            if self._failed_s <= begun_s:
                self._failed_s, self._why = time.monotonic(), why
        else:
            why = ""
        finally:
            self._lock.release()
        if why:
            return self._passed_over(why, namespace, hashes, rows, at, until_s)
        return self._with_others(found, namespace, hashes, rows, at, until_s)

    def close(self) -> None:
        """As `PeerReader.close`; waits for the read that is under way, which fails."""
        self._is_closed = True
        if (way := self._way) is not None:
            with suppress(OSError):  # it has gone by itself
                way.connection.socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()
            self.quarantine.sweep()
        if self._others is not None:
            self._others.close()

    def _passed_over(
        self, why: str, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, until_s: float
    ) -> PeerRead:
        """Everything in another way, for over RDMA there is none; where there is no other, or no time, that is why it
        failed.
        """
        left_s = until_s - time.monotonic()
        if self._others is None or self._is_closed or left_s <= 0:
            return failed_read(len(hashes) // HASH_BYTES, why)
        found = self._others.read(namespace, hashes, rows, at, left_s)
        return found._replace(by=self._others.transport, passed_over=why)

    def _with_others(
        self,
        found: PeerRead,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        until_s: float,
    ) -> PeerRead:
        """What the owner does not hold in HOST, from the first such block on, it may hold in NVME, and send."""
        outcomes, checksums = found.result
        if self._others is None or found.trouble or found.retry_s or ReadOutcome.MISSING not in outcomes:
            return found
        first = outcomes.index(ReadOutcome.MISSING)
        places = list(range(len(outcomes)) if at is None else at)[first:]
        left_s = max(0.0, until_s - time.monotonic())
        rest = self._others.read(namespace, hashes[HASH_BYTES * first :], rows, places, left_s)
        joined = np.concatenate([checksums[:first], rest.result.checksums])
        return rest._replace(result=ReadResult(outcomes[:first] + rest.result.outcomes, joined))

    def _read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, until_s: float
    ) -> PeerRead:
        count, block_bytes = len(hashes) // HASH_BYTES, rows.shape[1]
        most = max(1, min(MOST_HASHES, _PIECE_BYTES // max(1, block_bytes)))
        outcomes = [ReadOutcome.FAILED] * count
        checksums = np.zeros(count, dtype=np.uint32)
        found = PeerRead(ReadResult(outcomes, checksums))
        for first in range(0, count, most):
            end = min(count, first + most)
            places = range(first, end) if at is None else at[first:end]
            found = self._read_piece(namespace, hashes[HASH_BYTES * first : HASH_BYTES * end], rows, places, until_s)
            outcomes[first:end], checksums[first:end] = found.result
            if ReadOutcome.MISSING in found.result.outcomes:
                outcomes[end:] = [ReadOutcome.MISSING] * (count - end)
            if found.trouble or found.retry_s or ReadOutcome.MISSING in found.result.outcomes:
                break
        return found._replace(result=ReadResult(outcomes, checksums))

    def _read_piece(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int], until_s: float
    ) -> PeerRead:
        count = len(at)
        way = self._joined(rows.shape[1], until_s)
        run = way.connection.ask(namespace, hashes, until_s)
        if not run.lease:
            return _granted_nothing(count, run)
        granted = len(run.slots)
        if granted > count or len(run.checksums) != granted or not (run.slots < way.memory.slots).all():
            raise PeerWireError(
                f"{granted} blocks are granted of {count}, in slots beyond the {way.memory.slots} there are"
            )
        targets = np.asarray(at[:granted], dtype=np.int64)
        arrived = _Arrivals(self._rows, rows, targets, way.lanes)
        trouble = way.fetch(run.slots, arrived, min(until_s, run.until_s))
        outcomes = np.full(count, ReadOutcome.MISSING)
        outcomes[:granted] = np.where(arrived.checksums == run.checksums, ReadOutcome.GOOD, ReadOutcome.CORRUPT)
        outcomes[:granted][~arrived.is_there] = ReadOutcome.FAILED
        failed = b"".join(
            hashes[HASH_BYTES * block : HASH_BYTES * (block + 1)]
            for block in np.flatnonzero(outcomes == ReadOutcome.CORRUPT)
        )
        if trouble:
            self._drop()
        else:
            with suppress(OSError, PeerWireError):  # the next read finds that out
                way.connection.end(namespace, run.lease, failed)
        checksums = np.zeros(count, dtype=np.uint32)
        checksums[:granted] = arrived.checksums
        return PeerRead(ReadResult([ReadOutcome(outcome) for outcome in outcomes], checksums), trouble)

    def _joined(self, block_bytes: int, until_s: float) -> _Way:
        """The connection, made anew where there is none of any use. Raises OSError, KvbmError."""
        self._check_open()
        way = self._way
        if way is not None and (way.lanes.shape[1] != block_bytes or is_hung_up(way.connection.socket)):
            self._drop()
        if self._way is None:
            if self.quarantine.sweep() >= self.quarantine.most:
                raise VerbsError(
                    f"{len(self.quarantine)} queue pairs did not drain and cannot be destroyed; no new one is made"
                )
            connection = self._connect(until_s)
            answer_s = min(until_s, time.monotonic() + self._handshake_s)
            self._way = _Way(self._device, connection, block_bytes, self._lane_bytes, self._requests, answer_s)
            self._check_open()  # `close` has not seen this one
        return self._way

    def _check_open(self) -> None:
        if self._is_closed:
            raise VerbsError("this reader is closed")

    def _drop(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.leave(self.quarantine, self._drain_s)


class _Arrivals:
    """The blocks of one read, as they arrive in lanes and leave for their rows."""

    def __init__(self, copies: Rows, rows: np.ndarray, targets: np.ndarray, lanes: np.ndarray) -> None:
        self._copies, self._rows, self._targets, self._lanes = copies, rows, targets, lanes
        self.is_there = np.zeros(len(targets), dtype=bool)
        self.checksums = np.zeros(len(targets), dtype=np.uint32)

    def take(self, blocks: list[int], lanes: list[int]) -> None:
        """Copy blocks from their lanes to their rows, and take the checksums of the rows."""
        targets = np.ascontiguousarray(self._targets[blocks])
        self._copies.copy_rows(self._rows, targets, self._lanes, np.array(lanes, dtype=np.int64))
        self.checksums[blocks] = self._copies.checksum_rows(self._rows, targets)
        self.is_there[blocks] = True


class _Way:
    """A queue pair that is joined to the owner's, its lanes, and the connection on which blocks are asked for."""

    def __init__(
        self,
        device: Device,
        connection: ProvedConnection,
        block_bytes: int,
        lane_bytes: int,
        requests: int,
        until_s: float,
    ) -> None:
        self.connection = connection
        self._piece_bytes = min(block_bytes, device.limits.message_bytes)
        self._pieces = -(-block_bytes // self._piece_bytes)
        lanes = max(1, min(requests // self._pieces, lane_bytes // block_bytes))
        self._pair: QueuePair | None = None
        self._registered: RegisteredMemory | None = None
        try:
            self._pair = QueuePair(device, lanes * self._pieces, is_lent=False)
            ready = self._exchange(self._pair, until_s)  # before memory is registered: it may refuse
            self.memory = ready.memory
            if self.memory.stride < block_bytes:
                raise PeerWireError(f"its blocks have {self.memory.stride} bytes, those of this instance {block_bytes}")
            self._registered = RegisteredMemory(device, new_memory(lanes * block_bytes), is_lent=False)
            self.lanes = self._registered.array.reshape(lanes, block_bytes)
            self._pair.connect(ready.end)
        except BaseException:
            self._free()
            raise

    def fetch(self, slots: np.ndarray, arrived: _Arrivals, until_s: float) -> str:
        """READ these slots, lot by lot: what went wrong, empty: all are there."""
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

    def leave(self, quarantine: Quarantine, drain_s: float) -> None:
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
            is_drained = pair.drain(drain_s)
        except VerbsError:
            is_drained = False
        if is_drained:
            quarantine.free(pair, registered)
        else:
            quarantine.put(pair, registered)

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
        with suppress(Exception):
            self.connection.close()
        for one in (self._pair, self._registered):
            with suppress(VerbsError):
                if one is not None:
                    one.close()


def _granted_nothing(count: int, run: LeasedRun) -> PeerRead:
    if run.trouble or run.retry_s:
        return failed_read(count, run.trouble, run.retry_s)
    return PeerRead(ReadResult([ReadOutcome.MISSING] * count, np.zeros(count, dtype=np.uint32)))
