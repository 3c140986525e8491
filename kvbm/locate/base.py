"""Asking where blocks are, beyond what the own ledger knows. Trouble is an answer of zero, never an exception."""

from __future__ import annotations

from typing import Protocol

from kvbm.core.ids import NamespaceId


class Locator(Protocol):
    """How a manager asks for blocks in a pool of cluster reach."""

    def claimed_depth(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> int:
        """How many of these blocks, from the first on without a hole, somebody claims the pool holds.

        Stale answers cost a miss, never a wrong block: the pool itself proves what it returns. 0 when nobody answers in time.
        """

    def close(self) -> None:
        """Give back connections. Idempotent."""


class Nowhere:
    """Knows of no block elsewhere: an instance without a catalog."""

    def claimed_depth(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> int:
        return 0

    def close(self) -> None:
        return
