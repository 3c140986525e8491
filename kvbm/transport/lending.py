"""What an owner lends: who keeps the blocks, and leases, which say how long and how much.

A lease is counted by its reader from before its question and by its owner from after its answer, so the reader's is
over first. Its word, time, or the end of its connection ends it; then its blocks are pinned no more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.ids import HASH_BYTES, Tier, pack_slots
from kvbm.transport.wire import ArenaShape


class PinnedRun(NamedTuple):
    """Consecutive blocks of a chain, pinned where they lie.

    Attributes:
        tiers, slots: of each block, HOST or NVME.
        checksums: CRC-32C of each, u32, as they were when they came into the tier.
        rows: the bytes of each, uint8; of HOST a view of the slot.
    """

    tiers: tuple[Tier, ...]
    slots: tuple[int, ...]
    checksums: np.ndarray
    rows: Sequence[np.ndarray]

    def cut(self, count: int) -> tuple[PinnedRun, PinnedRun]:
        """The first blocks, and the others."""
        tiers, slots, checksums, rows = self
        return (
            PinnedRun(tiers[:count], slots[:count], checksums[:count], rows[:count]),
            PinnedRun(tiers[count:], slots[count:], checksums[count:], rows[count:]),
        )

    def host_blocks(self) -> int:
        """How many lie in HOST before the first that does not."""
        return next((at for at, tier in enumerate(self.tiers) if tier is not Tier.HOST), len(self.tiers))

    def packed_slots(self) -> bytes:
        """The slots, packed u32."""
        return pack_slots(self.slots)


class LentMapping(NamedTuple):
    """HOST's memory as others may map it: a descriptor that can only be read, and what lies in it."""

    fd: int
    shape: ArenaShape


class BlockLender(Protocol):
    """Keeps the blocks an owner lends. Any thread."""

    @property
    def memory(self) -> LentMapping | None:
        """HOST's memory; None: it has none that can be mapped, and all bytes are sent."""

    def opening(self, namespace: bytes) -> tuple[bytes, int] | None:
        """Root (16 bytes) and block_bytes of a namespace that is lent; None: it is not."""

    def lend(self, namespace: bytes, hashes: bytes) -> PinnedRun | None:
        """The longest run of this namespace from the first hash on, in HOST or NVME, pinned;

        None: not even one block.
        """

    def give_back(self, lent: PinnedRun) -> None:
        """These blocks are pinned once less."""

    def suspect(self, namespace: bytes, hashes: bytes) -> None:
        """A reader found other bytes than these blocks'. They are evicted where the owner finds that too."""


class LentLimits(NamedTuple):
    """How much is lent.

    Attributes:
        lease_s: how long a lease lasts.
        blocks: pinned at once, for all readers together.
        retry_s: when to come again where that is reached.
    """

    lease_s: float = 2.0
    blocks: int = 16_384
    retry_s: float = 0.02


class _Lease(NamedTuple):
    lent: PinnedRun
    until_s: float


class Leases:
    """All that one owner lends now.

    Any thread. Nothing reads a clock here: times are given, in seconds that only grow.

    Attributes:
        is_fenced: nothing more is granted: another process may have taken the owner's place.
    """

    def __init__(
        self,
        lender: BlockLender,
        epoch: int,
        limits: LentLimits = LentLimits(),  # noqa: B008  # immutable
    ) -> None:
        self.lender, self.limits = lender, limits
        self.is_fenced = False
        self._epoch = epoch
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._last = 0
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """Pinned now."""
        return self._blocks

    def lend(self, namespace: bytes, hashes: bytes) -> PinnedRun | None:
        """As `BlockLender.lend`, of no more blocks than may ever be lent at once: a reader asks on for what follows."""
        return self.lender.lend(namespace, hashes[: HASH_BYTES * self.limits.blocks])

    def begin(self, lent: PinnedRun, now_s: float, is_timed: bool = True) -> int:
        """A lease of these blocks: its id; 0: as much is lent as may be, and these are given back.

        Args:
            is_timed: False: only `end` ends it, for bytes that its owner sends itself.
        """
        count = len(lent.slots)
        if self._blocks + count > self.limits.blocks:
            self.expire(now_s)
        with self._lock:
            has_room = self._blocks + count <= self.limits.blocks
            if has_room:
                self._last += 1
                lease = (self._epoch & 0xFFFFFFFF) << 32 | (self._last & 0xFFFFFFFF)
                self._leases[lease] = _Lease(lent, now_s + self.limits.lease_s if is_timed else math.inf)
                self._blocks += count
        if not has_room:
            self.lender.give_back(lent)
            return 0
        return lease

    def end(self, lease: int) -> bool:
        """It is over; whether it was not before."""
        with self._lock:
            found = self._leases.pop(lease, None)
            if found:
                self._blocks -= len(found.lent.slots)
        if found:
            self.lender.give_back(found.lent)
        return found is not None

    def expire(self, now_s: float) -> None:
        """End what has run out."""
        with self._lock:
            over = [lease for lease, found in self._leases.items() if found.until_s <= now_s]
        for lease in over:
            self.end(lease)

    def next_end_s(self, leases: Sequence[int]) -> float | None:
        """When the first of these ends; None: none of them still lasts."""
        ends = [found.until_s for lease in leases if (found := self._leases.get(lease))]
        return min(ends, default=None)
