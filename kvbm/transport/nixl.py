"""Blocks from another instance's memory by NIXL, over whatever UCX finds between the two.

NIXL runs in a process of its own and reads into lanes that it shares with this one; only what has arrived whole is
copied to the caller's rows. So memory that a transfer may still write is never the caller's. The checksum is of the
caller's row.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from kvbm.core.errors import KvbmError, NixlError, PeerWireError
from kvbm.core.ids import HASH_BYTES, Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead, PeerReader, check_wish, failed_read, waited_read
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_hello import NixlLentMemory, NixlStatus, encode_hello, receive_ready
from kvbm.transport.nixl_process import Failed, Fetch, Fetched, Join, receive, send
from kvbm.transport.rdma import ProvedConnection, Rows
from kvbm.transport.rdma_hello import is_hung_up, send_message
from kvbm.transport.wire import MOST_HASHES

_LANE_BYTES = 64 << 20  # of memory for what is on its way
_LOT_BLOCKS = 64
_LOTS = 2  # at once: one is copied while the other is on its way
_PIECE_BYTES = 64 << 20  # of blocks that one question names: no lease lasts much longer than they take
_HANDSHAKE_S = 5.0
_FULL = "it has no room for another reader over NIXL"
_LATE = "not there by the deadline"


class NixlReader:
    """A reader of one instance's memory over NIXL. Any thread; reads that find another under way wait for it.

    Attributes:
        transport: "nixl".
    """

    transport = "nixl"

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
            connect: makes a proved connection until a time of `time.monotonic`. Raises OSError or KvbmError.
            others: reads in another way what does not come over NIXL: what is not in HOST, and everything while the
                owner has namespaces that this reader cannot prove. It is closed with this. None: that is missing, or
                fails.
            lane_bytes: of memory for what is on its way, at most (at least one block for each lot).
            handshake_s: how long the owner may take to answer NIXL_HELLO.
        """
        self._process, self._connect, self._rows, self._others = process, connect, rows, others
        self._lane_bytes, self._handshake_s = lane_bytes, handshake_s
        self._lock = threading.Lock()
        self._way: _Way | None = None
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
        until_s = time.monotonic() + deadline_s
        if not count:
            return PeerRead(ReadResult([], np.zeros(0, dtype=np.uint32)))
        if not self._lock.acquire(timeout=max(0.0, deadline_s)):
            return waited_read(count)
        places = range(count) if at is None else at
        try:
            if time.monotonic() >= until_s:
                return waited_read(count)  # asking now would only break a connection that others use
            found = self._read(namespace, hashes, rows, places, until_s)
        except (OSError, KvbmError, msgspec.DecodeError) as error:
            self._drop()
            return failed_read(count, str(error) or type(error).__name__)
        finally:
            self._lock.release()
        return self._with_others(found, namespace, hashes, rows, places, until_s)

    def close(self) -> None:
        """As `PeerReader.close`; a read that is under way ends, for its connection does."""
        self._is_closed = True
        way = self._way
        if way is not None:
            way.interrupt()
        with self._lock:
            self._drop()
        if self._others is not None:
            self._others.close()

    def _read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, places: Sequence[int], until_s: float
    ) -> PeerRead:
        """The longest run that comes over NIXL; what follows it is MISSING."""
        count, first = len(places), 0
        outcomes = [ReadOutcome.MISSING] * count
        checksums = np.zeros(count, dtype=np.uint32)
        found = PeerRead(ReadResult(outcomes, checksums))
        most = max(1, min(MOST_HASHES, _PIECE_BYTES // max(1, rows.shape[1])))
        while first < count and (way := self._joined(rows.shape[1], until_s)) is not None:
            wanted = hashes[HASH_BYTES * first : HASH_BYTES * min(count, first + most)]
            piece = self._read_piece(way, namespace, wanted, rows, places[first : first + most], until_s)
            granted = len(piece.result.outcomes)
            outcomes[first : first + granted], checksums[first : first + granted] = piece.result
            first += granted
            if piece.trouble or piece.retry_s:
                outcomes[first:] = [ReadOutcome.FAILED] * (count - first)
                return piece._replace(result=ReadResult(outcomes, checksums))
            if not granted:
                break
        return found

    def _read_piece(
        self,
        way: _Way,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        places: Sequence[int],
        until_s: float,
    ) -> PeerRead:
        """What one lease is of: a result for the blocks that are granted."""
        run = way.connection.ask(namespace, hashes, until_s)
        none = ReadResult([], np.zeros(0, dtype=np.uint32))
        if not run.lease:
            # A namespace that is not opened is `others`' to say something about.
            return PeerRead(none, run.trouble if self._others is None else "", run.retry_s)
        granted = len(run.slots)
        if granted > len(places) or len(run.checksums) != granted or not (run.slots < way.memory.slots).all():
            raise PeerWireError(
                f"{granted} blocks are granted of {len(places)}, in slots beyond the {way.memory.slots} there are"
            )
        targets = np.asarray(places[:granted], dtype=np.int64)
        is_there, found = np.zeros(granted, dtype=bool), np.zeros(granted, dtype=np.uint32)

        def take(blocks: list[int], lanes: list[int]) -> None:
            into = np.ascontiguousarray(targets[blocks])
            self._rows.copy_rows(rows, into, way.lanes, np.array(lanes, dtype=np.int64))
            found[blocks] = self._rows.checksum_rows(rows, into)
            is_there[blocks] = True

        trouble = way.fetch(run.slots, take, min(until_s, run.until_s))
        outcomes = np.where(found == run.checksums, ReadOutcome.GOOD, ReadOutcome.CORRUPT)
        outcomes[~is_there] = ReadOutcome.FAILED
        failed = b"".join(
            hashes[HASH_BYTES * block : HASH_BYTES * (block + 1)]
            for block in np.flatnonzero(outcomes == ReadOutcome.CORRUPT)
        )
        if trouble:
            self._drop()
        else:
            with suppress(OSError, PeerWireError):  # the next question finds that out
                way.connection.end(namespace, run.lease, failed)
        return PeerRead(ReadResult([ReadOutcome(outcome) for outcome in outcomes], found), trouble)

    def _with_others(
        self,
        found: PeerRead,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        places: Sequence[int],
        until_s: float,
    ) -> PeerRead:
        outcomes, checksums = found.result
        if self._others is None or found.trouble or found.retry_s or ReadOutcome.MISSING not in outcomes:
            return found
        first = outcomes.index(ReadOutcome.MISSING)
        left_s = max(0.0, until_s - time.monotonic())
        rest = self._others.read(namespace, hashes[HASH_BYTES * first :], rows, list(places)[first:], left_s)
        joined = np.concatenate([checksums[:first], rest.result.checksums])
        return rest._replace(result=ReadResult(outcomes[:first] + rest.result.outcomes, joined))

    def _joined(self, block_bytes: int, until_s: float) -> _Way | None:
        """The connection, made anew where there is none of any use;

        None: `others` has to serve. Raises OSError, KvbmError.
        """
        if self._is_closed:
            raise NixlError("this reader is closed")
        way = self._way
        if way is not None and (way.lanes.shape[1] != block_bytes or is_hung_up(way.connection.socket)):
            self._drop()
        if self._way is None:
            connection = self._connect(until_s)
            try:
                self._way = _joined(self._process, connection, block_bytes, self._lane_bytes, self._answer_s(until_s))
            finally:
                if self._way is None:
                    connection.close()
            if self._way is None and self._others is None:
                raise NixlError(
                    "its whole memory is only for who has proved each of its namespaces, and for blocks of "
                    f"{block_bytes} bytes"
                )
        return self._way

    def _answer_s(self, until_s: float) -> float:
        return min(until_s, time.monotonic() + self._handshake_s)

    def _drop(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.leave()


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

    def fetch(self, slots: np.ndarray, take: Callable[[list[int], list[int]], None], until_s: float) -> str:
        """Read these slots, lot by lot: what went wrong, empty: all are there.

        Args:
            take: is given blocks that are there, and the lanes they are in.
        """
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
            take(blocks, lanes[taken % _LOTS][: len(blocks)])
            taken += 1
        return ""

    def interrupt(self) -> None:
        """End a wait of another thread."""
        with suppress(OSError):
            self.connection.socket.shutdown(socket.SHUT_RDWR)

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
        answer = receive(self._fetching)
        if isinstance(answer, Fetched):
            return ""
        return (
            f"a read over NIXL failed: {answer.words}"
            if isinstance(answer, Failed)
            else "the process of NIXL has ended"
        )


def _joined(
    process: NixlProcess, connection: ProvedConnection, block_bytes: int, lane_bytes: int, until_s: float
) -> _Way | None:
    """A way to an owner;

    None: it does not tell this reader how to reach its memory, or its blocks have another size.
    """
    send_message(connection.socket, encode_hello(), until_s)
    ready = receive_ready(connection.socket, until_s)
    if ready.status is NixlStatus.FULL:
        raise NixlError(_FULL)
    if ready.status is not NixlStatus.READY or ready.memory.stride != block_bytes:
        return None
    count = _LOTS * max(1, min(_LOT_BLOCKS, ready.memory.slots, lane_bytes // block_bytes // _LOTS))
    descriptor = os.memfd_create("kvbm-lanes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, count * block_bytes)
        lanes = np.frombuffer(mmap.mmap(descriptor, count * block_bytes), dtype=np.uint8).reshape(count, block_bytes)
        fetching = process.join(Join(ready.metadata, count, block_bytes), descriptor, until_s)
    finally:
        os.close(descriptor)
    return _Way(connection, fetching, lanes, ready.memory)
