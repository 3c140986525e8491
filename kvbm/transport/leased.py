"""Blocks that an owner leases and their reader fetches from its memory by itself: what reads over RDMA and over NIXL
have in common.

What is fetched arrives in lanes of the reader's own, and only what has arrived whole is copied to the caller's rows. So
memory that may still be written when a read ends is never the caller's. The checksum is of the caller's row.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import KvbmError, PeerWireError
from kvbm.core.ids import HASH_BYTES, Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead, PeerReader, check_wish, failed_read, waited_read
from kvbm.transport.sockets import is_hung_up
from kvbm.transport.wire import MOST_HASHES

_PIECE_BYTES = 64 << 20  # of blocks that one question names: no lease lasts much longer than they take
_CAME = (ReadOutcome.GOOD, ReadOutcome.CORRUPT)
NOT_PROVED = "its whole memory is only for who has proved each of its namespaces"


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
        socket: on which HELLO and READY of RDMA or NIXL are exchanged before anything is asked; its end tells that the
            owner is gone.
    """

    @property
    def socket(self) -> socket.socket: ...

    def ask(self, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        """Ask for a lease of blocks in HOST.

        Raises OSError, KvbmError: the connection is of no use any more, or not for this namespace.
        """

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


class Arrivals:
    """The blocks of one lease, as they arrive in lanes and leave for their rows.

    Attributes:
        is_there, checksums: of each block.
    """

    def __init__(self, copies: Rows, rows: np.ndarray, targets: np.ndarray, lanes: np.ndarray) -> None:
        """
        Args:
            targets: the row of each block, int64.
        """
        self._copies, self._rows, self._targets, self._lanes = copies, rows, targets, lanes
        self.is_there = np.zeros(len(targets), dtype=bool)
        self.checksums = np.zeros(len(targets), dtype=np.uint32)

    def take(self, blocks: list[int], lanes: list[int]) -> None:
        """Copy blocks from their lanes to their rows, and take the checksums of the rows."""
        targets = np.ascontiguousarray(self._targets[blocks])
        self._copies.copy_rows(self._rows, targets, self._lanes, np.array(lanes, dtype=np.int64))
        self.checksums[blocks] = self._copies.checksum_rows(self._rows, targets)
        self.is_there[blocks] = True


class JoinedWay(Protocol):
    """A way to an owner's memory: lanes, what fills them, and the connection on which blocks are asked for."""

    @property
    def connection(self) -> ProvedConnection: ...

    @property
    def lanes(self) -> np.ndarray:
        """(lanes, block_bytes) uint8."""

    @property
    def slots(self) -> int:
        """Of the owner's memory."""

    def fetch(self, slots: np.ndarray, arrived: Arrivals, until_s: float) -> str:
        """Fetch these slots: what went wrong, empty: all have arrived. Raises OSError, KvbmError: likewise."""

    def leave(self) -> None:
        """Hang up, and free everything that nothing writes any more."""


class LeasedReader(ABC):
    """Reads from one instance's memory. Any thread; reads that find another under way wait for it.

    What does not come this way comes by `others` in the same read, as long as there is time: what the owner does not
    hold in HOST, everything where there is no way to its memory, and what has not arrived when a way fails.

    Attributes:
        transport: the way's word.
        error: what a way that cannot be made raises.
    """

    transport: str
    error: type[KvbmError]

    def __init__(
        self,
        connect: Callable[[float], ProvedConnection],
        rows: Rows,
        others: PeerReader | None,
        handshake_s: float,
    ) -> None:
        """Nothing is connected yet.

        Args:
            connect: makes a proved connection until a time of `time.monotonic`. Raises OSError or KvbmError.
            others: it is closed with this. None: what it would bring is missing, or has failed.
            handshake_s: how long joining may take; half of a read's time at most, so that `others` has some.
        """
        self._connect, self._rows, self._others, self._handshake_s = connect, rows, others, handshake_s
        self._lock = threading.Lock()
        self._way: JoinedWay | None = None
        self._failed_s, self._why = -math.inf, ""  # when a connection failed last, and why
        self._is_closed = False

    @abstractmethod
    def _join(self, connection: ProvedConnection, block_bytes: int, until_s: float) -> JoinedWay:
        """The way to the owner's memory. Raises OSError, KvbmError: there is none, and nothing of it is left."""

    def _prepare(self) -> None:  # noqa: B027 - what a way does not need it need not have
        """Called before a connection is made. Raises KvbmError: none is to be."""

    def _spared_s(self, deadline_s: float) -> float:
        """Of a read's time, what it takes to end a way."""
        return 0.0

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
        until_s = begun_s + deadline_s - self._spared_s(deadline_s)
        if not count:
            return PeerRead(ReadResult([], np.zeros(0, dtype=np.uint32)))
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            return waited_read(count)
        places = list(range(count) if at is None else at)
        why = ""
        try:
            if time.monotonic() >= until_s:
                return waited_read(count)  # asking now would only break a connection that others use
            if self._failed_s > begun_s and self._way is None:
                raise self.error(self._why)  # found while this one waited, and not to be found by each that did
            found = self._read(namespace, hashes, rows, places, until_s)
        except (OSError, KvbmError) as error:
            self._drop()
            why = str(error) or type(error).__name__
            found = failed_read(count, why)
            if self._failed_s <= begun_s:
                self._failed_s, self._why = time.monotonic(), why
        finally:
            self._lock.release()
        return self._with_others(found, namespace, hashes, rows, places, until_s)

    def close(self) -> None:
        """As `PeerReader.close`; a read that is under way ends, for its connection does."""
        self._is_closed = True
        if (way := self._way) is not None:
            with suppress(OSError):  # it has gone by itself
                way.connection.socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()
        if self._others is not None:
            self._others.close()

    def _with_others(
        self,
        found: PeerRead,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        places: Sequence[int],
        until_s: float,
    ) -> PeerRead:
        """The same, with what has not come, from the first such block on, read in another way where there is one."""
        outcomes, checksums = found.result
        first = next((at for at, outcome in enumerate(outcomes) if outcome not in _CAME), None)
        left_s = until_s - time.monotonic()
        if self._others is None or self._is_closed or first is None or found.retry_s or left_s <= 0:
            return found
        rest = self._others.read(namespace, hashes[HASH_BYTES * first :], rows, places[first:], left_s)
        joined = np.concatenate([checksums[:first], rest.result.checksums])
        rest = rest._replace(result=ReadResult(outcomes[:first] + rest.result.outcomes, joined))
        if found.trouble:
            return rest._replace(by=self._others.transport, passed_over=found.trouble)
        return rest if first else rest._replace(by=self._others.transport)  # nothing came this way

    def _read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, places: Sequence[int], until_s: float
    ) -> PeerRead:
        """The longest run that comes this way; what follows it is MISSING, or FAILED where something went wrong.

        Raises OSError, KvbmError.
        """
        count, first = len(places), 0
        outcomes = [ReadOutcome.MISSING] * count
        checksums = np.zeros(count, dtype=np.uint32)
        most = max(1, min(MOST_HASHES, _PIECE_BYTES // max(1, rows.shape[1])))
        while first < count:
            way = self._joined(rows.shape[1], until_s)
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
        return PeerRead(ReadResult(outcomes, checksums))

    def _read_piece(
        self,
        way: JoinedWay,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        places: Sequence[int],
        until_s: float,
    ) -> PeerRead:
        """What one lease is of: a result for the blocks that are granted."""
        run = way.connection.ask(namespace, hashes, until_s)
        if not run.lease:
            return PeerRead(ReadResult([], np.zeros(0, dtype=np.uint32)), run.trouble, run.retry_s)
        granted = len(run.slots)
        if granted > len(places) or len(run.checksums) != granted or not (run.slots < way.slots).all():
            raise PeerWireError(
                f"{granted} blocks are granted of {len(places)}, in slots beyond the {way.slots} there are"
            )
        arrived = Arrivals(self._rows, rows, np.asarray(places[:granted], dtype=np.int64), way.lanes)
        trouble = way.fetch(run.slots, arrived, min(until_s, run.until_s))
        outcomes = np.where(arrived.checksums == run.checksums, ReadOutcome.GOOD, ReadOutcome.CORRUPT)
        outcomes[~arrived.is_there] = ReadOutcome.FAILED
        failed = b"".join(
            hashes[HASH_BYTES * block : HASH_BYTES * (block + 1)]
            for block in np.flatnonzero(outcomes == ReadOutcome.CORRUPT)
        )
        if trouble:
            self._drop()
        else:
            with suppress(OSError, PeerWireError):  # the next question finds that out
                way.connection.end(namespace, run.lease, failed)
        return PeerRead(ReadResult([ReadOutcome(outcome) for outcome in outcomes], arrived.checksums), trouble)

    def _joined(self, block_bytes: int, until_s: float) -> JoinedWay:
        """The way, made anew where there is none of any use. Raises OSError, KvbmError."""
        self._check_open()
        way = self._way
        if way is not None and (way.lanes.shape[1] != block_bytes or is_hung_up(way.connection.socket)):
            self._drop()
        if self._way is None:
            self._prepare()
            now_s = time.monotonic()
            join_s = until_s if self._others is None else now_s + max(0.0, until_s - now_s) / 2
            connection = self._connect(join_s)
            try:
                join_s = min(join_s, time.monotonic() + self._handshake_s)
                self._way = self._join(connection, block_bytes, join_s)
            finally:
                if self._way is None:
                    with suppress(Exception):  # a connection that is broken may close as it likes
                        connection.close()
            self._check_open()  # `close` has not seen this one
        return self._way

    def _check_open(self) -> None:
        if self._is_closed:
            raise self.error("this reader is closed")

    def _drop(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.leave()
