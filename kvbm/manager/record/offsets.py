"""applied ≥ durable ≥ published in each epoch: how far an instance's events have come, and waiting for it."""

from __future__ import annotations

import threading

from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import ORIGIN, Position


class Offsets:
    """How far the journal has come, with waiting. Any thread may call it.

    An epoch's first snapshot states all that is held, so once it is durable nothing of the epochs before it is waited
    for any more, whether it was written or lost. A simulator waits in its own way by a class derived from this one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._durable = ORIGIN
        self._ends: dict[Epoch, Offset] = {}  # how far epochs came that later ones have followed
        self._snapshot_end = Offset(0)  # of the newest epoch
        self._whole = Epoch(0)  # the newest epoch whose first snapshot is durable

    @property
    def durable(self) -> Position:
        """Everything before this in its epoch survives a killed process."""
        return self._durable

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        """A newer epoch begins, whose first snapshot ends before `snapshot_end`."""
        with self._changed:
            self._ends = {ended: offset for ended, offset in self._ends.items() if ended >= self._whole}
            self._ends[self._durable.epoch] = self._durable.offset
            self._durable, self._snapshot_end = Position(epoch, Offset(0)), snapshot_end

    def advance_durable(self, epoch: Epoch, offset: Offset) -> None:
        """The journal has written everything before `offset` of an epoch."""
        with self._changed:
            self._durable = max(self._durable, Position(epoch, offset))
            if self._durable.offset >= self._snapshot_end:
                self._whole = self._durable.epoch
            self._changed.notify_all()

    def is_durable(self, epoch: Epoch, offset: Offset) -> bool:
        """Whether everything before an offset is durable, or listed again by a later epoch whose first snapshot is."""
        with self._changed:  # else another epoch may begin between looking at its number and at its offset
            if epoch == self._durable.epoch:
                return self._durable.offset >= offset
            return self._whole > epoch or self._ends.get(epoch, Offset(0)) >= offset

    def is_whole(self, epoch: Epoch) -> bool:
        """Whether the first snapshot of an epoch, or of a later one, is durable."""
        return self._whole >= epoch

    def wait_durable(self, epoch: Epoch, offset: Offset, timeout_s: float) -> bool:
        """Wait until `is_durable`; False when it is not in time."""
        if self.is_durable(epoch, offset):
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self.is_durable(epoch, offset), timeout_s)
