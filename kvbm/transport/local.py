"""Reads from an owner in the same process: what tests and the simulator run on, and what the other transports are held
to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvbm.core.backend import Checksum
from kvbm.core.checksum import crc32c
from kvbm.core.ids import HASH_BYTES, Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead, RootOf, check_wish, failed_read
from kvbm.transport.lending import Leases, PinnedRun


class LocalReader:
    """A reader whose owner is an object.

    Args:
        root_of: of a namespace, as its owner has it where both have the same tenants' secrets.
        clock: seconds that only grow, the same that the owner's leases are counted by.
    """

    transport = "local"

    def __init__(
        self,
        leases: Leases,
        root_of: RootOf,
        clock: Callable[[], float] = time.monotonic,
        checksum: Checksum = crc32c,
    ) -> None:
        self._leases, self._root_of, self._clock, self._checksum = leases, root_of, clock, checksum
        self._is_closed = False

    def read(
        self,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        deadline_s: float,
    ) -> PeerRead:
        """As `PeerReader.read`. Nothing waits here, so the deadline is that of the copies."""
        count, piece_blocks = check_wish(hashes, rows, at), max(1, self._leases.limits.blocks)
        places, until_s = range(count) if at is None else at, self._clock() + deadline_s
        found = PeerRead(ReadResult([], np.zeros(0, dtype=np.uint32)))
        for first in range(0, count, piece_blocks):  # no more is granted at once
            end = min(count, first + piece_blocks)
            wanted = hashes[HASH_BYTES * first : HASH_BYTES * end]
            piece = self._read_piece(namespace, wanted, rows, places[first:end], until_s - self._clock())
            outcomes = found.result.outcomes + piece.result.outcomes
            is_missing = ReadOutcome.MISSING in outcomes
            if piece.trouble or is_missing:
                outcomes += [ReadOutcome.MISSING if is_missing else ReadOutcome.FAILED] * (count - end)
            checksums = np.zeros(len(outcomes), dtype=np.uint32)
            checksums[:first], checksums[first:end] = found.result.checksums, piece.result.checksums
            found = piece._replace(result=ReadResult(outcomes, checksums))
            if len(outcomes) == count:
                break
        return found

    def close(self) -> None:
        """Nothing is read any more."""
        self._is_closed = True

    def _read_piece(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int], deadline_s: float
    ) -> PeerRead:
        count = len(at)
        if self._is_closed:
            return failed_read(count, "this reader is closed")
        asked_s = self._clock()
        opening = self._leases.lender.opening(namespace.id)
        missing = PeerRead(ReadResult([ReadOutcome.MISSING] * count, np.zeros(count, dtype=np.uint32)))
        if opening is None or opening[0] != self._root_of(namespace):
            return missing._replace(
                trouble="it does not open the namespace: it does not know it, or its tenant's secret is another",
                is_shut=True,
            )
        if opening[1] != rows.shape[1]:
            return failed_read(count, f"its blocks have {opening[1]} bytes, those of this instance {rows.shape[1]}")
        if self._leases.is_fenced:
            return failed_read(count, "it is fenced")
        self._leases.expire(asked_s)
        lent = self._leases.lender.lend(namespace.id, hashes)
        if lent is None:
            return missing
        lease = self._leases.begin(lent, self._clock())
        if not lease:
            return failed_read(count, "it is busy", self._leases.limits.retry_s)
        try:
            return self._copied(
                namespace, hashes, rows, at, lent, asked_s + min(deadline_s, self._leases.limits.lease_s)
            )
        finally:
            self._leases.end(lease)

    def _copied(
        self,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int],
        lent: PinnedRun,
        until_s: float,
    ) -> PeerRead:
        count = len(hashes) // HASH_BYTES
        outcomes, checksums = [ReadOutcome.MISSING] * count, np.zeros(count, dtype=np.uint32)
        for block, source in enumerate(lent.rows):
            row = rows[at[block]]
            row[:] = source
            checksums[block] = self._checksum(
                row.tobytes()
            )  # of our own row: the slot may change under a lease that is over
            is_whole = checksums[block] == lent.checksums[block]
            outcomes[block] = ReadOutcome.GOOD if is_whole else ReadOutcome.CORRUPT
        if self._clock() >= until_s:
            lent_blocks = len(lent.rows)
            outcomes[:lent_blocks] = [ReadOutcome.FAILED] * lent_blocks
            return PeerRead(ReadResult(outcomes, checksums), "its lease was over before the copy was")
        failed = b"".join(
            hashes[HASH_BYTES * block : HASH_BYTES * (block + 1)]
            for block, outcome in enumerate(outcomes)
            if outcome is ReadOutcome.CORRUPT
        )
        if failed:
            self._leases.lender.suspect(namespace.id, failed)
        return PeerRead(ReadResult(outcomes, checksums))
