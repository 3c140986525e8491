"""Memory for copies between two tiers of which neither is in reach of the CPU and the device at once."""

from __future__ import annotations

import mmap
import threading

import numpy as np

from kvbm.pools.host.pool import register, unregister
from kvbm.safe_log import SafeLog

log = SafeLog()

_ALIGNMENT_BYTES = 4096  # what direct I/O wants


class Staging:
    """A bounded arena, taken once and cut into lanes; a copy has one to itself and goes through it in parts.

    Any thread.

    Requests never wait for offloads here: as many lanes as requests can use at once are never lent to an offload. A
    lane whose copy cannot be confirmed is not given back, since the device may still write it.

    Attributes:
        lane_blocks: blocks one lane holds.
        lanes: how many there are.
    """

    def __init__(
        self,
        staging_bytes: int,
        block_bytes: int,
        onboard_lanes: int = 2,
        offload_lanes: int = 2,
        object_blocks: int = 1,
        pins: bool = False,
    ) -> None:
        """Take the memory; its pages come when they are first written.

        Args:
            staging_bytes: the most it takes; but always room for two lanes of one object.
            onboard_lanes, offload_lanes: copies at a time of either kind; fewer where their lanes would not hold an
                object.
            object_blocks: blocks of an object; a lane holds whole objects.
            pins: register it with CUDA, so that a GPU reads and writes it without a detour; one warning where that
                cannot be done.
        """
        object_bytes = object_blocks * block_bytes
        self.lanes = max(2, min(onboard_lanes + offload_lanes, staging_bytes // object_bytes))
        self.lane_blocks = max(1, staging_bytes // self.lanes // object_bytes) * object_blocks
        self._reserved = min(onboard_lanes, self.lanes - 1)
        lane_bytes = -(-self.lane_blocks * block_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = np.frombuffer(mmap.mmap(-1, self.lanes * lane_bytes), dtype=np.uint8).reshape(self.lanes, lane_bytes)
        self._pinned: np.ndarray | None = None
        if pins:
            is_pinned, why = register(memory, "staging (offload.staging_bytes)")
            self._pinned = memory if is_pinned else None
            if why:
                log.warning("staging.unpinned", why=why)
        used = self.lane_blocks * block_bytes
        self._free = [lane[:used].reshape(self.lane_blocks, block_bytes) for lane in memory]
        self._changed = threading.Condition()

    def take(self, timeout_s: float, is_offload: bool) -> np.ndarray | None:
        """A lane, (lane_blocks, block_bytes) uint8, to be given back; None where none became free in time."""
        least = self._reserved if is_offload else 0
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) > least, timeout_s):
                return None
            return self._free.pop()

    def close(self) -> None:
        """CUDA has it no more. No copy may be under way. Idempotent."""
        if self._pinned is not None:
            unregister(self._pinned.ctypes.data)
            self._pinned = None

    def give(self, lane: np.ndarray) -> None:
        """Give back a lane whose copy has ended."""
        with self._changed:
            self._free.append(lane)
            self._changed.notify_all()
