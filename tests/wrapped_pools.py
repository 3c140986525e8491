"""Pools with something in the way: a gate that holds copies up, jitter, memory that a copy cannot reach."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbm.core.ids import NamespaceId, Tier
from kvbm.pools.base import Proof, ReadResult, SlotPool

WAIT_S = 60.0


class Wrapped:
    """A pool with something in its way."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.tier, self.slots, self.block_bytes, self.reach = pool.tier, pool.slots, pool.block_bytes, pool.reach

    @property
    def memory(self) -> np.ndarray | None:
        return self.pool.memory

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        self.pool.write(slots, rows, proof, at)

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        return self.pool.read(slots, namespace, hashes, rows, at)

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        return self.pool.checksums(slots)

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        self.pool.seal(slots, proof)

    def close(self) -> None:
        self.pool.close()


class OutOfReach(Wrapped):
    """A pool without memory to speak of: every copy with it asks it, as with HBM on a GPU."""

    @property
    def memory(self) -> np.ndarray | None:
        return None


class Gate:
    """Holds reads or writes of one tier until it opens."""

    def __init__(self, tier: Tier, call: str) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self._tier, self._call = tier, call
        self.opened.set()

    def __call__(self, pool: SlotPool) -> SlotPool:
        return _Gated(pool, self, self._call) if pool.tier == self._tier else pool

    def hold(self) -> None:
        self.entered.set()
        self.opened.wait(WAIT_S)

    def close(self) -> None:
        self.entered.clear()
        self.opened.clear()


class _Gated(Wrapped):
    def __init__(self, pool: SlotPool, gate: Gate, call: str) -> None:
        super().__init__(pool)
        self._gate, self._call = gate, call

    def read(self, *run: Any) -> ReadResult:
        if self._call == "read":
            self._gate.hold()
        return super().read(*run)

    def write(self, *run: Any) -> None:
        if self._call == "write":
            self._gate.hold()
        super().write(*run)


class Jittery(Wrapped):
    """Reads and writes take their time, seeded; their bytes land at its end."""

    def __init__(self, pool: SlotPool, rng: random.Random) -> None:
        super().__init__(pool)
        self._rng = rng

    def _nap(self) -> None:
        time.sleep(self._rng.choice((0.0, 0.0, 0.0005, 0.002, 0.004)))

    def read(self, *run: Any) -> ReadResult:
        self._nap()
        return super().read(*run)

    def write(self, *run: Any) -> None:
        self._nap()
        super().write(*run)

    def seal(self, *run: Any) -> None:
        self._nap()
        super().seal(*run)
