"""What an instance's journal needs no more and keeps for those who ask later why a block left.

A segment that is let go is renamed from `.kvbj` to `.kept`: nobody recovers from it, publishes it or counts it as the
journal's, and `kvbm-replay` reads it before the others. The oldest goes first: when it is too old, when the folder
takes more than it may, or when the device has no room for what is written.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kvbm.safe_log import SafeLog
from kvbm.streams.journal.disk import DiskWriter

log = SafeLog()

KEPT_SUFFIX = ".kept"
DAMAGED_SUFFIX = ".damaged"
_MOST_SEGMENTS = 4096  # so that a start never lists more, however small they are


class Retention(NamedTuple):
    """How much history stays.

    Attributes:
        keep_s: for how long after its last event; 0 for none at all.
        max_bytes: the whole folder, history and what the journal needs, takes no more as long as there is history to
            give up.
    """

    keep_s: float = 0.0
    max_bytes: int = 0


class _Kept(NamedTuple):
    path: Path
    size_bytes: int
    written_s: float


class History:
    """The kept segments of one folder. Whoever holds the journal's lock calls it.

    Args:
        wall_clock: seconds of the clock that files are dated by.
    """

    def __init__(self, retention: Retention, device: DiskWriter, wall_clock: Callable[[], float] = time.time) -> None:
        self._retention, self._device, self._wall_clock = retention, device, wall_clock
        self._kept: deque[_Kept] = deque()  # the oldest first
        self.used_bytes = 0

    @property
    def is_wanted(self) -> bool:
        """Whether anything is kept at all."""
        return self._retention.keep_s > 0

    def load(self, paths: Iterable[Path]) -> None:
        """Take up what an earlier process kept, in its order. Raises OSError."""
        for path in paths:
            self._add(path)

    def take(self, segment: Path) -> None:
        """Keep a segment instead of removing it. Raises OSError."""
        if not self.is_wanted:
            self._remove(segment)
            return
        kept = segment.with_suffix(KEPT_SUFFIX)
        self._device.replace(segment, kept)
        self._add(kept)

    def trim(self, needed_bytes: int) -> None:
        """Give up what is too old or too much.

        Args:
            needed_bytes: what the journal takes beside it.
        """
        oldest_s = self._wall_clock() - self._retention.keep_s
        while self._kept and (
            self._kept[0].written_s < oldest_s
            or self.used_bytes + needed_bytes > self._retention.max_bytes
            or len(self._kept) > _MOST_SEGMENTS
        ):
            self.give_up_oldest()

    def give_up_oldest(self) -> bool:
        """Make room; False when there is nothing left to give up."""
        if not self._kept:
            return False
        kept = self._kept.popleft()
        self.used_bytes -= kept.size_bytes
        try:
            self._remove(kept.path)
        except OSError as error:  # the next start finds it
            log.warning("journal.segment_kept", segment=str(kept.path), why=str(error))
        return True

    def _add(self, path: Path) -> None:
        size_bytes = path.stat().st_size
        damaged = path.with_suffix(DAMAGED_SUFFIX)
        if damaged.exists():
            size_bytes += damaged.stat().st_size
        self._kept.append(_Kept(path, size_bytes, path.stat().st_mtime))
        self.used_bytes += size_bytes

    def _remove(self, path: Path) -> None:
        self._device.remove(path)
        self._device.remove(path.with_suffix(DAMAGED_SUFFIX))
