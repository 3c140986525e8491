"""Which block each slot of a pod's pool seems to hold: a small file beside the pool's, for the other instances of the
pod.

32 bytes a slot, by slot number: namespace id, then hash; zeros where nothing was written. It is a hint and nothing
more: written after the block, never waited for, and whoever follows it holds the slot to its own header and checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Lock

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.files import open_plain
from kvbm.safe_log import SafeLog

log = SafeLog()

HINT_BYTES = 2 * HASH_BYTES


def hints_path(pool: Path) -> Path:
    """Where the hints of a pool's file lie."""
    return pool.with_suffix(".slots")


class SlotHints:
    """The hints of an instance's own pool.

    Any thread; trouble is one warning, since peers then see less and nothing else.

    Attributes:
        is_new: there was no file of this size; blocks of earlier epochs are not in it.
    """

    def __init__(self, pool: Path, slots: int, keep: bool) -> None:
        """Open them, or make them empty. Raises PoolError: the folder refuses.

        Args:
            keep: whether the pool's file was there already, so that what is hinted may be true.
        """
        self.path = hints_path(pool)
        self.slots = slots
        self._lock = Lock()
        self._is_dirty = self._has_failed = False
        try:
            self._fd = open_plain(self.path, os.O_RDWR | os.O_CREAT)
            self.is_new = not keep or os.fstat(self._fd).st_size != slots * HINT_BYTES
            if self.is_new:
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, slots * HINT_BYTES)
        except OSError as error:
            raise PoolError(f"NVME pool {pool}: its hints {self.path} cannot be opened ({error.strerror})") from error

    def note(self, slots: Sequence[int], namespace: NamespaceId, hashes: bytes) -> None:
        """These slots hold these blocks now."""
        rows = np.empty((len(slots), HINT_BYTES), dtype=np.uint8)
        rows[:, :HASH_BYTES] = np.frombuffer(namespace, dtype=np.uint8)
        rows[:, HASH_BYTES:] = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        numbers = np.asarray(slots, dtype=np.int64)
        order = np.argsort(numbers, kind="stable")
        rows, numbers = rows[order], numbers[order]
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        self._try(
            lambda: [
                os.pwrite(self._fd, run.tobytes(), int(first) * HINT_BYTES)
                for run, first in zip(np.split(rows, cuts), numbers[np.concatenate(([0], cuts))], strict=True)
            ]
        )
        self._is_dirty = True

    def sync(self) -> None:
        """Let other machines see what was noted."""
        if self._is_dirty:
            self._is_dirty = False  # before: what is noted meanwhile waits for the next time
            if not self._try(self._sync, locked=False):
                self._is_dirty = True

    def close(self) -> None:
        """Idempotent."""
        self.sync()
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _sync(self) -> None:
        """Raises OSError."""
        with self._lock:
            fd = os.dup(self._fd) if self._fd >= 0 else -1  # a device that hangs must not hold up who notes
        if fd >= 0:
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def _try(self, write: Callable[[], object], locked: bool = True) -> bool:
        """Whether it was written."""
        try:
            with self._lock if locked else nullcontext():  # a number used after `close` could be another file's
                if self._fd >= 0:
                    write()
            return True
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("pod.hints_unwritten", path=str(self.path), why=error.strerror, remedy="check the folder")
            return False
