"""How long a journal, on disk or in memory, keeps what it has: what the event writer asks of it beside taking
frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvbm.core.codec import FrameBytes
from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.journal import Journal
from kvbm.streams.memory import MemoryLog


class JournalRetention(Protocol):
    """What a journal does beside taking frames. The event writer alone calls it."""

    @property
    def epoch(self) -> Epoch:
        """The epoch last begun."""

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        """Persist that an epoch begins, before any of its frames. Raises JournalError or OSError: nothing has changed.

        Args:
            snapshot_end: frames that begin before it are taken also when the journal is full.
        """

    def begin_snapshot(self) -> None:
        """What comes next begins a snapshot."""

    def let_in(self, until: Position) -> bool:
        """Take frames that begin before a position also when the journal is full; whether that is new."""

    def sync(self, now_s: float) -> float | None:
        """Bring to the device what is due. Gives when more will be; None for not at all. Raises OSError."""

    def truncate(self, published: Position, completed_snapshot: Position) -> None:
        """Forget what lies before a completed snapshot and is published."""

    def used_bytes(self) -> int:
        """How large the journal is."""

    def erase_before(self, position: Position) -> bool:
        """Delete history; whether nothing from before a position is left.

        For an erasure, from its own thread. Raises OSError.
        """


class NoRetention:
    """Of a sink that keeps nothing for another process."""

    epoch = Epoch(0)

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        """See `JournalRetention.begin_epoch`."""

    def begin_snapshot(self) -> None:
        """See `JournalRetention.begin_snapshot`."""

    def let_in(self, until: Position) -> bool:
        """See `JournalRetention.let_in`."""
        return False

    def sync(self, now_s: float) -> float | None:
        """See `JournalRetention.sync`."""
        return None

    def truncate(self, published: Position, completed_snapshot: Position) -> None:
        """See `JournalRetention.truncate`."""

    def used_bytes(self) -> int:
        """See `JournalRetention.used_bytes`."""
        return 0

    def erase_before(self, position: Position) -> bool:
        """See `JournalRetention.erase_before`."""
        return True


class DiskRetention:
    """Of a journal on disk.

    Args:
        pool_id: name of the durable pool whose slots its events speak of, "" for none.
        sync_interval_s: the journal's.
        begun: called with each epoch that has begun in place.
    """

    def __init__(
        self, journal: Journal, pool_id: str, sync_interval_s: float, begun: Callable[[Epoch], None] = lambda _: None
    ) -> None:
        self._journal, self._pool_id, self._sync_interval_s, self._begun = journal, pool_id, sync_interval_s, begun
        self.begin_snapshot, self.let_in = journal.roll, journal.let_in

    @property
    def epoch(self) -> Epoch:
        """See `JournalRetention.epoch`."""
        return self._journal.epoch

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        """See `JournalRetention.begin_epoch`."""
        self._journal.begin_epoch(epoch, self._pool_id, snapshot_end)
        self._begun(epoch)

    def sync(self, now_s: float) -> float | None:
        """See `JournalRetention.sync`."""
        if self._journal.sync_due(now_s):
            self._journal.sync()
        next_s = now_s + self._sync_interval_s
        return next_s if self._journal.sync_due(next_s) else None

    def truncate(self, published: Position, completed_snapshot: Position) -> None:
        """See `JournalRetention.truncate`."""
        self._journal.truncate(published, completed_snapshot)

    def used_bytes(self) -> int:
        """See `JournalRetention.used_bytes`."""
        return self._journal.used_bytes

    def erase_before(self, position: Position) -> bool:
        """See `JournalRetention.erase_before`."""
        return self._journal.erase_history(position)


class MemoryRetention:
    """Of a log in memory, which nobody recovers from; a sink too, so that it knows how much it keeps."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._kept: deque[tuple[Position, int]] = deque()  # end and size of each frame
        self._used_bytes = 0
        self._dropped = ORIGIN  # all before it
        self.epoch = Epoch(0)

    def append(self, frame: FrameBytes) -> None:
        """See `FrameSink.append`."""
        self._log.append(frame)
        self._kept.append((Position(frame.epoch, frame.next_offset), len(frame.data)))
        self._used_bytes += len(frame.data)

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        """See `JournalRetention.begin_epoch`."""
        self.epoch = epoch

    def begin_snapshot(self) -> None:
        """See `JournalRetention.begin_snapshot`."""

    def let_in(self, until: Position) -> bool:
        """See `JournalRetention.let_in`."""
        return False

    def sync(self, now_s: float) -> float | None:
        """See `JournalRetention.sync`."""
        return None

    def truncate(self, published: Position, completed_snapshot: Position) -> None:
        """See `JournalRetention.truncate`."""
        truncatable = min(published, completed_snapshot)
        self._log.drop_before(truncatable)
        self._dropped = truncatable
        while self._kept and self._kept[0][0] <= truncatable:
            self._used_bytes -= self._kept.popleft()[1]

    def used_bytes(self) -> int:
        """See `JournalRetention.used_bytes`."""
        return self._used_bytes

    def erase_before(self, position: Position) -> bool:
        """See `JournalRetention.erase_before`."""
        return self._dropped >= position
