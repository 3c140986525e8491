"""applied ≥ durable ≥ published: how far an instance's events have come, and waiting for it."""

from __future__ import annotations

import threading

from kvbm.core.ids import Offset


class Offsets:
    """The offset the journal has reached, with waiting. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._durable = Offset(0)

    @property
    def durable(self) -> Offset:
        """Everything before this offset survives a killed process."""
        return self._durable

    def advance_durable(self, offset: Offset) -> None:
        """The journal has written everything before `offset`."""
        with self._changed:
            self._durable = max(self._durable, offset)
            self._changed.notify_all()

    def wait_durable(self, offset: Offset, timeout_s: float) -> bool:
        """Wait until everything before `offset` is durable; False when it is not in time."""
        if self._durable >= offset:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._durable >= offset, timeout_s)
