"""What a journal, on disk or in memory, does for the frame writer beside taking frames: `frames.Keeping`."""

from __future__ import annotations

from collections import deque

from kvbm.core.codec import FrameBytes
from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import Position
from kvbm.streams.journal.journal import Journal
from kvbm.streams.memory import MemoryLog


class JournalKeeping:
    """Of a journal on disk.

    Args:
        pool_id: name of the durable pool whose slots its events speak of, "" for none.
        sync_interval_s: the journal's.
    """

    def __init__(self, journal: Journal, pool_id: str, sync_interval_s: float) -> None:
        self._journal, self._pool_id, self._sync_interval_s = journal, pool_id, sync_interval_s

    @property
    def epoch(self) -> Epoch:
        """See `Keeping.epoch`."""
        return self._journal.epoch

    def begin_epoch(self, epoch: Epoch, round_end: Offset) -> None:
        """See `Keeping.begin_epoch`."""
        self._journal.begin_epoch(epoch, self._pool_id, round_end)

    def begin_round(self) -> None:
        """See `Keeping.begin_round`."""
        self._journal.roll()

    def sync(self, now_s: float) -> float | None:
        """See `Keeping.sync`."""
        if self._journal.sync_due(now_s):
            self._journal.sync()
        next_s = now_s + self._sync_interval_s
        return next_s if self._journal.sync_due(next_s) else None

    def let_go(self, published: Position, whole_round: Position) -> None:
        """See `Keeping.let_go`."""
        self._journal.let_go(published, whole_round)

    def used_bytes(self) -> int:
        """See `Keeping.used_bytes`."""
        return self._journal.used_bytes


class MemoryKeeping:
    """Of a log in memory, which nobody recovers from; a sink too, so that it knows how much it keeps."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._kept: deque[tuple[Position, int]] = deque()  # end and size of each frame
        self._used_bytes = 0
        self.epoch = Epoch(0)

    def append(self, frame: FrameBytes) -> None:
        """See `FrameSink.append`."""
        self._log.append(frame)
        self._kept.append((Position(frame.epoch, frame.next_offset), len(frame.data)))
        self._used_bytes += len(frame.data)

    def begin_epoch(self, epoch: Epoch, round_end: Offset) -> None:
        """See `Keeping.begin_epoch`."""
        self.epoch = epoch

    def begin_round(self) -> None:
        """See `Keeping.begin_round`."""

    def sync(self, now_s: float) -> float | None:
        """See `Keeping.sync`."""
        return None

    def let_go(self, published: Position, whole_round: Position) -> None:
        """See `Keeping.let_go`."""
        needless = min(published, whole_round)
        self._log.drop_before(needless)
        while self._kept and self._kept[0][0] <= needless:
            self._used_bytes -= self._kept.popleft()[1]

    def used_bytes(self) -> int:
        """See `Keeping.used_bytes`."""
        return self._used_bytes
