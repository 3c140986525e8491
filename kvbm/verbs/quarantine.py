"""Queue pairs that did not drain, and the memory that they may still write: kept until the queue pair is destroyed."""

from __future__ import annotations

import threading

from kvbm.core.errors import VerbsError
from kvbm.verbs.memory import RegisteredMemory
from kvbm.verbs.queue_pair import QueuePair


class Quarantine:
    """What must not be used again yet. Any thread.

    Attributes:
        most: queue pairs in it at once; whoever finds it full makes no new ones.
    """

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._held: list[tuple[QueuePair, RegisteredMemory]] = []

    def __len__(self) -> int:
        return len(self._held)

    def put(self, pair: QueuePair, memory: RegisteredMemory) -> None:
        """Keep both: whatever happens, neither is freed before the queue pair is destroyed."""
        with self._lock:
            self._held.append((pair, memory))

    def free(self, pair: QueuePair, memory: RegisteredMemory) -> None:
        """Destroy what has drained, and free its memory; what the device does not let go of is kept."""
        if not _destroyed(pair, memory):
            self.put(pair, memory)

    def sweep(self) -> int:
        """Try to destroy what is in it, and then free its memory: how many are left."""
        with self._lock:
            self._held = [held for held in self._held if not _destroyed(*held)]
            return len(self._held)


def _destroyed(pair: QueuePair, memory: RegisteredMemory) -> bool:
    try:
        pair.close()
        memory.close()
    except VerbsError:
        return False
    return True
