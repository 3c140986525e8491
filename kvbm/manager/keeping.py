"""What a journal, on disk or in memory, does for the frame writer beside taking frames: `frames.Keeping`."""

from __future__ import annotations

from kvbm.core.ids import Epoch
from kvbm.streams.base import Position
from kvbm.streams.journal import Journal
from kvbm.streams.memory import MemoryLog


class JournalKeeping:
    """Of a journal on disk.

    Args:
        pool_id: name of the durable pool whose slots its events speak of, "" for none.
    """

    def __init__(self, journal: Journal, pool_id: str) -> None:
        self._journal, self._pool_id = journal, pool_id

    @property
    def epoch(self) -> Epoch:
        """See `Keeping.epoch`."""
        return self._journal.epoch

    def begin_epoch(self, epoch: Epoch) -> None:
        """See `Keeping.begin_epoch`."""
        self._journal.begin_epoch(epoch, self._pool_id)

    def let_go(self, published: Position, whole_round: Position) -> None:
        """See `Keeping.let_go`."""
        self._journal.drop_epochs_before(whole_round.epoch)

    def used_bytes(self) -> int:
        """See `Keeping.used_bytes`."""
        return 0


class MemoryKeeping:
    """Of a log in memory, which nobody recovers from: what the stream holds may go."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.epoch = Epoch(0)

    def begin_epoch(self, epoch: Epoch) -> None:
        """See `Keeping.begin_epoch`."""
        self.epoch = epoch

    def let_go(self, published: Position, whole_round: Position) -> None:
        """See `Keeping.let_go`."""
        self._log.drop_before(min(published, whole_round))

    def used_bytes(self) -> int:
        """See `Keeping.used_bytes`."""
        return 0
