"""The owner's side of RDMA: HOST's memory, registered once, and a queue pair for each reader, which READs by itself
from then on.

A reader reaches the whole memory, whatever it has been granted. So only a reader that has proved every namespace its
owner has is admitted; who adds a namespace calls `revoke`, and readers prove it before they come again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvbm.core.errors import VerbsError
from kvbm.transport.rdma_hello import NO_MEMORY, NOWHERE, RdmaLentMemory, RdmaReady, RdmaStatus
from kvbm.transport.rdma_reach import RdmaReach
from kvbm.verbs.device import Device
from kvbm.verbs.memory import RegisteredMemory
from kvbm.verbs.queue_pair import QueuePair, RemoteEnd

_OWN_REQUESTS = 1  # an owner posts none


class RdmaAdmission(NamedTuple):
    """What a reader is answered.

    Attributes:
        number: for `dismiss`, to be called when the reader's connection ends; 0: it may not READ.
    """

    number: int
    ready: RdmaReady


class RdmaOwner:
    """Lends the memory of HOST to readers over RDMA. Any thread.

    Attributes:
        most_readers: connected at once.
        revoked: how often all readers were sent away: who looks at what a reader has proved looks at this before.
    """

    def __init__(self, device: Device, memory: np.ndarray, most_readers: int = 64) -> None:
        """Register the memory, (slots, block_bytes) uint8, contiguous. Raises VerbsError: it cannot be registered."""
        self._device = device
        self._slots, self._stride = memory.shape
        self._memory = RegisteredMemory(device, memory.reshape(-1), is_lent=True)
        self.most_readers = most_readers
        self._lock = threading.Lock()  # held while a queue pair is connected, too: none is destroyed under that
        self._counting = threading.Lock()
        self._pairs: dict[int, QueuePair] = {}
        self._stuck: list[QueuePair] = []  # that the device does not let go of yet
        self.revoked = self._last = 0
        self._reach = RdmaReach()
        self._is_closed = False

    @property
    def readers(self) -> int:
        """Connected now."""
        return len(self._pairs)

    def admit(self, end: RemoteEnd, has_proved_all: bool, revoked: int) -> RdmaAdmission:
        """A queue pair for a reader.

        Args:
            end: the reader's, as its RDMA_HELLO has it.
            has_proved_all: the reader has proved every namespace of this owner.
            revoked: the attribute of that name, before that was looked at.
        """
        if not has_proved_all:
            return _refused(RdmaStatus.NOT_PROVED)
        try:
            joined = self._joined(end, revoked)
        except VerbsError:
            return _refused(RdmaStatus.FULL)
        if joined is None:
            return _refused(RdmaStatus.FULL)
        number, pair = joined
        memory = RdmaLentMemory(
            self._memory.address, self._memory.array.nbytes, self._memory.remote_key, self._slots, self._stride
        )
        return RdmaAdmission(number, RdmaReady(RdmaStatus.READY, pair.end, memory))

    def dismiss(self, number: int) -> None:
        """This reader READs no more. Nothing happens where it is gone already. Raises VerbsError: as `revoke`."""
        with self._lock:
            pair = self._pairs.pop(number, None)
            self._end_locked([] if pair is None else [pair])

    def revoke(self) -> None:
        """No reader READs any more: for a namespace that none of them has proved.

        Waits for one that is being connected.

        Raises: VerbsError: the device lets go of one not yet; it answers no READ all the same, and the next call tries
            it again.
        """
        with self._counting:
            self.revoked += 1  # before the wait: who is being connected is sent away as well
        with self._lock:
            pairs, self._pairs = self._pairs, {}
            self._end_locked(pairs.values())

    def close(self) -> None:
        """End all readers, then give up the memory, which may be unmapped from here on.

        Idempotent. Raises VerbsError: it is in use.
        """
        self._is_closed = True
        try:
            self.revoke()
        finally:
            self._memory.close()

    def _joined(self, end: RemoteEnd, revoked: int) -> tuple[int, QueuePair] | None:
        """A queue pair for this reader, counted;

        None: there are as many as may be, what it has proved counts no more, or it is not tried now.
        """
        with self._lock:
            if self._is_closed or revoked != self.revoked or self._is_full_locked():
                return None
            if not self._reach.may(time.monotonic(), end.gid):
                return None
            pair = QueuePair(self._device, _OWN_REQUESTS, is_lent=True)
            try:
                pair.connect(end)
            except VerbsError:
                self._reach.failed(time.monotonic(), end.gid)
                self._end_locked([pair])
                raise
            self._reach.worked(end.gid)
            if revoked != self.revoked:
                self._end_locked([pair])
                return None
            self._last += 1
            self._pairs[self._last] = pair
            return self._last, pair

    def _is_full_locked(self) -> bool:
        return len(self._pairs) + len(self._stuck) >= self.most_readers

    def _end_locked(self, pairs: Iterable[QueuePair]) -> None:
        """Destroy them.

        One that stays is ended, so that it answers no READ; where not even that can be, nothing is lent any more.

        Raises: VerbsError: one is there still, and kept for the next time.
        """
        trouble: VerbsError | None = None
        may_answer = False
        pairs, self._stuck = [*self._stuck, *pairs], []
        for pair in pairs:
            try:
                pair.close()
            except VerbsError as error:
                trouble = error
                self._stuck.append(pair)
                try:
                    pair.fail()
                except VerbsError:
                    may_answer = True
        if may_answer:
            self._is_closed = True
            self._memory.close()
        if trouble is not None:
            raise trouble


def _refused(status: RdmaStatus) -> RdmaAdmission:
    return RdmaAdmission(0, RdmaReady(status, NOWHERE, NO_MEMORY))
