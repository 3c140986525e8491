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
from collections.abc import Callable
from typing import NamedTuple

from kvbm.core.errors import KvbmError
from kvbm.safe_log import SafeLog
from kvbm.transport.lending import LentMapping
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_hello import NO_MEMORY, NixlLentMemory, NixlReady, NixlStatus
from kvbm.transport.nixl_process import Lent
from kvbm.transport.sockets import is_hung_up

log = SafeLog()

_LEND_S = 5.0
_TRIES = 12  # at lending before a reader comes


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

    def __init__(
        self,
        process: NixlProcess,
        memory: LentMapping,
        most_readers: int = 64,
        on_closed: Callable[[], object] = lambda: None,
    ) -> None:
        """Nothing is lent yet.

        Args:
            process: of this owner alone; it is closed with this.
            memory: whose descriptor can only be read, and stays open until `on_closed` is called.
        """
        self._process, self._memory, self.most_readers = process, memory, most_readers
        self._on_closed = on_closed
        self._lending = threading.Lock()  # one lends at a time, which takes as long as NIXL does
        self._lock = threading.Lock()  # guards what follows, and nobody waits under it
        self._lent: tuple[socket.socket, Lent] | None = None
        self._readers: set[int] = set()
        self.revoked = self._last = 0
        self._is_closed = self._has_complained = False

    @property
    def readers(self) -> int:
        """Connected now."""
        return len(self._readers)

    def lend(self) -> None:
        """Lend, before a reader comes, who then need not wait for it. Waits while NIXL is being started, at most a
        minute; where it does not lend, that is one warning.
        """
        for _ in range(_TRIES):
            if self._lent_now(time.monotonic() + _LEND_S) is not None or not self._process.is_starting:
                return

    def admit(self, has_proved_all: bool, revoked: int, within_s: float = _LEND_S) -> NixlAdmission:
        """What to answer a reader's NIXL_HELLO.

        Args:
            has_proved_all: the reader has proved every namespace of this owner.
            revoked: the attribute of that name, before that was looked at.
        """
        if not has_proved_all:
            return _refused(NixlStatus.NOT_PROVED)
        if revoked != self.revoked:
            return _refused(NixlStatus.FULL)
        lent = self._lent_now(time.monotonic() + within_s)
        with self._lock:
            is_full = len(self._readers) >= self.most_readers
            if lent is None or self._lent is not lent or revoked != self.revoked or is_full:
                return _refused(NixlStatus.FULL)
            self._last += 1
            self._readers.add(self._last)
            shape, told = self._memory.shape, lent[1]
            memory = NixlLentMemory(told.address, shape.bytes, shape.slots, shape.stride)
            return NixlAdmission(self._last, NixlReady(NixlStatus.READY, told.metadata, memory))

    def dismiss(self, number: int) -> None:
        """This reader's connection has ended. What it was told it may still use until `revoke`: it can only read."""
        self._readers.discard(number)

    def revoke(self) -> None:
        """No reader reaches the memory any more: for a namespace that none of them has proved."""
        with self._lock:
            self.revoked += 1  # what is being lent meanwhile, nobody has been told of
            self._readers.clear()
            lent, self._lent = self._lent, None
        if lent is not None:
            self._process.end(lent[0])

    def close(self) -> None:
        """Lend nothing any more; the memory may be unmapped from here on. Idempotent."""
        self._is_closed = True
        self.revoke()
        self._process.close()
        with self._lending:  # who lends has found out
            self.revoke()
            on_closed, self._on_closed = self._on_closed, lambda: None
        on_closed()

    def disown(self) -> None:
        """This process is a forked child, and ends nothing of its parent's."""
        self._is_closed = True
        self._process.disown()

    def _lent_now(self, until_s: float) -> tuple[socket.socket, Lent] | None:
        """What is lent, anew where its process has died; None: NIXL does not, which is one warning until it does."""
        if not self._lending.acquire(timeout=max(0.0, until_s - time.monotonic())):
            return None
        try:
            if self._is_closed:
                return None
            with self._lock:
                lent = self._lent
                dead = lent if lent is not None and is_hung_up(lent[0]) else None
                if dead is not None:
                    lent = self._lent = None  # whatever comes of it: who takes it from there ends it, and nobody else
            if dead is not None:
                self._process.end(dead[0])
            if lent is None:
                lent = self._process.lend(self._memory.fd, self._memory.shape.bytes, until_s)
                with self._lock:
                    self._lent = lent
            self._has_complained = False
            return lent
        except (KvbmError, OSError) as error:
            if not self._has_complained and not self._is_closed and not self._process.is_starting:
                self._has_complained = True
                log.warning("nixl.not_lent", why=str(error), effect="blocks are lent over TCP")
            return None
        finally:
            self._lending.release()


def _refused(status: NixlStatus) -> NixlAdmission:
    return NixlAdmission(0, NixlReady(status, b"", NO_MEMORY))
