"""An owner over RDMA beside its native server: who has proved every namespace gets a queue pair, and loses it when
another namespace comes.

Readers say RDMA_HELLO on a connection of the native server, which keeps their leases and needs no GIL for them. The
thread here makes the queue pairs, once for each reader, and destroys them when connections end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from kvbm.core.errors import PeerWireError, VerbsError
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.safe_log import SafeLog
from kvbm.transport.rdma_hello import NO_MEMORY, NOWHERE, RdmaReady, RdmaStatus, decode_hello, encode_ready
from kvbm.transport.rdma_owner import RdmaAdmission, RdmaOwner
from kvbm.verbs.queue_pair import RemoteEnd

log = SafeLog()

_WAIT_S = 60.0  # the thread waits so long at a time
_CLOSE_S = 2.0


class RdmaServer(Protocol):
    """What the native server knows of readers over RDMA, `kvbm._native.LendingServer`."""

    def open_rdma(self) -> None:
        """Offer RDMA from now on."""

    def take_rdma(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Readers, by number, with the body of their RDMA_HELLO, or b"" where their connection has ended; waits so long
        for one.
        """

    def opened_by(self, number: int) -> list[bytes]:
        """Namespaces that a reader who waits has proved, and that are still admitted as they were then."""

    def answer_rdma(self, number: int, ready: bytes) -> bool:
        """Answer a reader; False: it waits no more."""


class QueuePairs(Protocol):
    """As `RdmaOwner`."""

    @property
    def revoked(self) -> int: ...
    def admit(self, end: RemoteEnd, has_proved_all: bool, revoked: int) -> RdmaAdmission: ...
    def dismiss(self, number: int) -> None: ...
    def revoke(self) -> None: ...
    def close(self) -> None: ...


class RdmaLending:
    """Lends HOST over RDMA, from `start` until `close`. Any thread.

    Args:
        namespaces: that the owner has now; `declare` tells of others.
    """

    def __init__(
        self, server: RdmaServer, owner: QueuePairs | RdmaOwner, instance: InstanceId, namespaces: Iterable[Namespace]
    ) -> None:
        self._server, self._owner, self._instance = server, owner, instance
        self._namespaces = frozenset(one.id for one in namespaces)
        self._pairs: dict[int, int] = {}  # reader → queue pair
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvbm-lend-rdma-{instance}", daemon=True)

    def start(self) -> None:
        """Offer it to readers."""
        self._server.open_rdma()
        self._thread.start()

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """The owner has these namespaces too: before a block of a new one is written, nobody READs any more who has not
        proved it.
        """
        known = self._namespaces | {one.id for one in namespaces}
        if known != self._namespaces:
            self._namespaces = known
            self.revoke()

    def revoke(self) -> None:
        """Who READs has to prove everything anew."""
        try:
            self._owner.revoke()
        except VerbsError as error:  # the device is gone, and its queue pairs with it
            log.warning("rdma.not_revoked", instance=self._instance, why=str(error))

    def stop(self) -> None:
        """Admit nobody any more.

        Idempotent. To be called before the native server is closed, which ends the thread's wait.
        """
        self._closed.set()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Nobody READs any more, and the device knows nothing of HOST.

        To be called once the native server is closed. Idempotent.
        """
        self.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        try:
            self._owner.close()
        except VerbsError as error:  # it stays registered until the process ends
            log.warning("rdma.left_open", instance=self._instance, why=str(error))

    def _run(self) -> None:
        while not self._closed.is_set():
            for number, hello in self._server.take_rdma(_WAIT_S):
                try:
                    if hello:
                        self._answer(number, hello)
                    elif pair := self._pairs.pop(number, 0):
                        self._owner.dismiss(pair)
                except Exception:  # of one reader; others come
                    log.exception("rdma.failed", instance=self._instance, remedy="report it")

    def _answer(self, number: int, hello: bytes) -> None:
        revoked = self._owner.revoked  # before: whatever changes from here on sends the reader away again
        has_proved_all = self._namespaces <= {NamespaceId(one) for one in self._server.opened_by(number)}
        try:
            admission = self._owner.admit(decode_hello(hello), has_proved_all, revoked)
        except PeerWireError as error:
            log.warning("rdma.refused", instance=self._instance, why=str(error))
            admission = RdmaAdmission(0, RdmaReady(RdmaStatus.FULL, NOWHERE, NO_MEMORY))
        is_heard = self._server.answer_rdma(number, encode_ready(admission.ready))
        if admission.number and is_heard:
            self._pairs[number] = admission.number
        elif admission.number:
            self._owner.dismiss(admission.number)
