"""The owner's side of NIXL: HOST's memory in a process of its own that can only read it, and who may be told how to
reach it.

A reader reaches the whole memory, whatever it has been granted, and UCX takes no key back. So only a reader that has
proved every namespace its owner has is told; who adds a namespace calls `revoke`, which ends the agent that readers
knew.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from kvbm.core.errors import KvbmError
from kvbm.safe_log import SafeLog
from kvbm.transport.lending import LentMapping
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_hello import NO_MEMORY, NixlLentMemory, NixlReady, NixlStatus
from kvbm.transport.nixl_process import Lent
from kvbm.transport.rdma_hello import is_hung_up

log = SafeLog()

_LEND_S = 5.0


class NixlAdmission(NamedTuple):
    """What a reader is answered.

    Attributes:
        number: for `dismiss`, to be called when the reader's connection ends; 0: it is not told how to reach the
            memory.
    """

    number: int
    ready: NixlReady


class NixlOwner:
    """Lends the memory of HOST to readers over NIXL. Any thread.

    Attributes:
        most_readers: connected at once.
        revoked: how often all readers were sent away: who looks at what a reader has proved looks at this before.
    """

    def __init__(self, process: NixlProcess, memory: LentMapping, most_readers: int = 64) -> None:
        """Nothing is lent yet.

        Args:
            process: of this owner alone; it is closed with this.
            memory: whose descriptor can only be read, and stays open.
        """
        self._process, self._memory, self.most_readers = process, memory, most_readers
        self._lock = threading.Lock()
        self._lent: tuple[socket.socket, Lent] | None = None
        self._readers: set[int] = set()
        self.revoked = self._last = 0
        self._is_closed = False

    @property
    def readers(self) -> int:
        """Connected now."""
        return len(self._readers)

    def admit(self, has_proved_all: bool, revoked: int, within_s: float = _LEND_S) -> NixlAdmission:
        """What to answer a reader's NIXL_HELLO.

        Args:
            has_proved_all: the reader has proved every namespace of this owner.
            revoked: the attribute of that name, before that was looked at.
        """
        if not has_proved_all:
            return _refused(NixlStatus.NOT_PROVED)
        until_s = time.monotonic() + within_s
        if not self._lock.acquire(timeout=within_s):
            return _refused(NixlStatus.FULL)
        try:
            if self._is_closed or revoked != self.revoked or len(self._readers) >= self.most_readers:
                return _refused(NixlStatus.FULL)
            lent = self._lend(until_s)
            self._last += 1
            self._readers.add(self._last)
            shape = self._memory.shape
            memory = NixlLentMemory(lent.address, shape.bytes, shape.slots, shape.stride)
            return NixlAdmission(self._last, NixlReady(NixlStatus.READY, lent.metadata, memory))
        except (KvbmError, OSError) as error:
            log.warning("nixl.not_lent", why=str(error))
            return _refused(NixlStatus.FULL)
        finally:
            self._lock.release()

    def dismiss(self, number: int) -> None:
        """This reader's connection has ended. What it was told it may still use until `revoke`: it can only read."""
        self._readers.discard(number)

    def revoke(self) -> None:
        """No reader reaches the memory any more: for a namespace that none of them has proved."""
        with self._lock:
            self.revoked += 1
            self._readers.clear()
            self._unlend()

    def close(self) -> None:
        """Lend nothing any more; the memory may be unmapped from here on. Idempotent."""
        self._is_closed = True
        self.revoke()
        self._process.close()

    def _lend(self, until_s: float) -> Lent:
        if self._lent is not None and is_hung_up(self._lent[0]):
            self._unlend()  # its process has died
        if self._lent is None:
            self._lent = self._process.lend(self._memory.fd, self._memory.shape.bytes, until_s)
        return self._lent[1]

    def _unlend(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            self._process.end(lent[0])


def _refused(status: NixlStatus) -> NixlAdmission:
    return NixlAdmission(0, NixlReady(status, b"", NO_MEMORY))
