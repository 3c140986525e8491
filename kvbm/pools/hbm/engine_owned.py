"""HBM that an engine keeps to itself: slots that say how much it holds, and no bytes that anybody here could reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.core.ids import NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadResult
from kvbm.pools.run import check_size


class EngineHbm:
    """A slot pool whose bytes only the engine has. Its slots are numbers of the ledger, not the engine's block ids.

    Args:
        slots: blocks the engine can hold.
    """

    def __init__(self, slots: int, block_bytes: int, reach: Reach = Reach.INSTANCE) -> None:
        """Raises LayoutError: below 1 slot or byte."""
        check_size("HBM", slots, block_bytes)
        self.tier = Tier.HBM
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach

    @property
    def memory(self) -> np.ndarray | None:
        """None: it is the engine's."""
        return None

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Raises PoolError."""
        self._refuse(len(slots), "written")

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Raises PoolError."""
        self._refuse(len(slots), "read")

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """Raises PoolError."""
        self._refuse(len(slots), "read")

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Raises PoolError."""
        self._refuse(len(slots), "sealed")

    def close(self) -> None:
        """There is nothing to give back."""

    def _refuse(self, count: int, done: str) -> NoReturn:
        raise PoolError(
            f'HBM pool: pools.hbm.owner is "engine", so {count} blocks cannot be {done} here; the engine copies its '
            "blocks itself"
        )
