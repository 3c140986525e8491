"""How an instance reads blocks that another one lends, whichever way their bytes come.

The blocks are pinned where they lie while they are read, and each row is held to its checksum once its bytes are here:
what the catalog said before may be stale, and the owner may have put another block in a slot meanwhile; both are a
miss, never wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import LayoutError
from kvbm.core.ids import Namespace, hash_count
from kvbm.core.reads import ReadOutcome, ReadResult

_WAITED_RETRY_S = 0.1

RootOf = Callable[[Namespace], bytes]  # the root of a namespace, 16 bytes, which its tenant's secret makes


class PeerRead(NamedTuple):
    """How a read went.

    Attributes:
        result: MISSING: the owner does not hold that block any more, or no block before it. FAILED: it did not answer,
            or not in time.
        trouble: why something failed, for people; empty: nothing did, and the owner may be asked again at once.
        retry_s: above 0: the owner lends as much as it may, and said when to come again.
        is_shut: the owner does not lend this namespace; others it may.
        by: the transport that it went by, and that the rest is about, where that is not the reader's own; empty: it is.
        passed_over: why the reader's own was not used, for people; empty: it was.
    """

    result: ReadResult
    trouble: str = ""
    retry_s: float = 0.0
    is_shut: bool = False
    by: str = ""
    passed_over: str = ""


class PeerReader(Protocol):
    """Reads from one other instance in one way. Any thread; reads that find all its connections in use wait for one.

    Attributes:
        transport: "memory", "rdma", "nixl" or "tcp": what the bytes come through.
    """

    @property
    def transport(self) -> str: ...

    def read(
        self,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        deadline_s: float,
    ) -> PeerRead:
        """Fill rows with blocks, verified. Trouble is an outcome, never an exception. The GIL is released.

        When it returns, nobody writes the rows any more, whatever has happened.

        Args:
            hashes: packed, in the order of their chain: what follows a block that the owner lacks is not asked for.
            rows: (m, block_bytes) uint8, the bytes of a row side by side; rows whose outcome is not GOOD hold anything
                afterwards.
            at: block i goes to row `at[i]`; None: to row i.
            deadline_s: from now; no later than this it returns.
        Raises: LayoutError: rows, `at` and hashes disagree; nothing was asked.
        """

    def close(self) -> None:
        """End reads under way, which fail, and give back connections. Idempotent."""


def check_wish(hashes: bytes, rows: np.ndarray, at: Sequence[int] | None) -> int:
    """The number n of blocks in a read. Raises LayoutError: rows, `at` and hashes disagree."""
    count = hash_count(hashes)
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise LayoutError(f"rows are {rows.dtype} in {rows.ndim} dimensions; give uint8 as (rows, block_bytes)")
    named = len(rows) if at is None else len(at)
    if named != count:
        raise LayoutError(f"{count} hashes come with {named} rows")
    if at is not None and count and not 0 <= min(at) <= max(at) < len(rows):
        raise LayoutError(f"rows {min(at)} to {max(at)} are wanted, there are 0 to {len(rows) - 1}")
    return count


def waited_read(count: int) -> PeerRead:
    """The answer to a read that has waited for others until its deadline: nothing is wrong, and the next may
    come soon.
    """
    return failed_read(count, "other reads were under way until the deadline", _WAITED_RETRY_S)


def failed_read(count: int, trouble: str, retry_s: float = 0.0) -> PeerRead:
    """The answer where nothing could be read."""
    return PeerRead(ReadResult([ReadOutcome.FAILED] * count, np.zeros(count, dtype=np.uint32)), trouble, retry_s)
