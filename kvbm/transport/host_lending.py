"""Lends HOST as a whole beside the native server, to readers that reach its memory by themselves: what RDMA and NIXL
have in common. Who has proved every namespace is let in, and sent away when another namespace comes.

Readers say HELLO on a connection of the native server, which keeps their leases and needs no GIL for them. The thread
here lets them in, once each, and hears when their connections end.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvbm.core.errors import KvbmError
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.safe_log import SafeLog
from kvbm.transport.wire import GrantTransport

log = SafeLog()

_WAIT_S = 60.0  # the thread waits so long at a time
_CLOSE_S = 2.0


class JoinServer(Protocol):
    """What the native server knows of readers that reach HOST by themselves, `kvbm._native.LendingServer`."""

    def open_joins(self, transport: int) -> None:
        """Offer this way, a `GrantTransport`, from now on."""

    def take_joins(self, transport: int, timeout_s: float) -> list[tuple[int, bytes | None]]:
        """Readers, by number, with the body of their HELLO, or None where their connection has ended; waits so long for
        one.
        """

    def opened_by(self, transport: int, number: int) -> list[bytes]:
        """Namespaces that a reader who waits has proved, and that are still admitted as they were then."""

    def answer_join(self, transport: int, number: int, ready: bytes) -> bool:
        """Answer a reader; False: it waits no more."""

    def hang_up_on_nixl(self) -> None:
        """End the connections of all that have said NIXL_HELLO."""


class HostAdmission(NamedTuple):
    """What a reader is answered.

    Attributes:
        number: for `dismiss`; 0: it is not let in.
        ready: the message.
    """

    number: int
    ready: bytes


class HostLending(ABC):
    """Lends HOST in one way, from `start` until `close`. Any thread.

    Attributes:
        transport: the way. word: its name in logs.
    """

    transport: GrantTransport
    word: str

    def __init__(self, server: JoinServer, instance: InstanceId, namespaces: Iterable[Namespace]) -> None:
        """
        Args:
            namespaces: that the owner has now; `declare` tells of others.
        """
        self._server, self._instance = server, instance
        self._namespaces = frozenset(one.id for one in namespaces)
        self._let_in: dict[int, int] = {}  # reader → number of its admission
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvbm-lend-{type(self).word}-{instance}", daemon=True)

    @abstractmethod
    def _admitted(self, hello: bytes, has_proved_all: bool, revoked: int) -> HostAdmission:
        """Let a reader in, or not. Raises KvbmError: its HELLO makes no sense, and it is answered by `_refused`."""

    @property
    @abstractmethod
    def _refused(self) -> bytes:
        """The answer to who is not let in now."""

    @property
    @abstractmethod
    def _revoked(self) -> int:
        """How often all readers were sent away."""

    @abstractmethod
    def _dismiss(self, number: int) -> None:
        """A reader's connection has ended."""

    @abstractmethod
    def _revoke(self) -> None:
        """Nobody reaches HOST any more. Raises KvbmError."""

    @abstractmethod
    def _close(self) -> None:
        """Lend nothing any more. Raises KvbmError."""

    def _begin(self) -> None:  # noqa: B027 - what a way does not need it need not have
        """Called first in the thread."""

    def start(self) -> None:
        """Offer it to readers."""
        self._server.open_joins(self.transport)
        self._thread.start()

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """The owner has these namespaces too: before a block of a new one is written, nobody reads any more who has not
        proved it.
        """
        known = self._namespaces | {one.id for one in namespaces}
        if known != self._namespaces:
            self._namespaces = known
            self.revoke()

    def revoke(self) -> None:
        """Who reads has to prove everything anew."""
        try:
            self._revoke()
        except KvbmError as error:  # what lends is gone, and who was let in with it
            log.warning("joins.not_revoked", transport=self.word, instance=self._instance, why=str(error))

    def stop(self) -> None:
        """Admit nobody any more.

        Idempotent. To be called before the native server is closed, which ends the thread's wait.
        """
        self._closed.set()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Nobody reads any more, and nothing knows HOST.

        To be called once the native server is closed. Idempotent.
        """
        self.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        try:
            self._close()
        except KvbmError as error:  # it stays registered until the process ends
            log.warning("joins.left_open", transport=self.word, instance=self._instance, why=str(error))

    def _run(self) -> None:
        try:
            self._begin()
        except Exception:  # it is tried again for each reader
            log.exception("joins.failed", transport=self.word, instance=self._instance, remedy="report it")
        while not self._closed.is_set():
            for number, hello in self._server.take_joins(self.transport, _WAIT_S):
                try:
                    if hello is not None:
                        self._answer(number, hello)
                    elif admitted := self._let_in.pop(number, 0):
                        self._dismiss(admitted)
                except Exception:  # of one reader; others come
                    log.exception("joins.failed", transport=self.word, instance=self._instance, remedy="report it")

    def _answer(self, number: int, hello: bytes) -> None:
        admission, is_heard = self._admission(number, hello), False
        try:
            is_heard = self._server.answer_join(self.transport, number, admission.ready)
        finally:
            if admission.number and is_heard:
                self._let_in[number] = admission.number
            elif admission.number:
                self._dismiss(admission.number)

    def _admission(self, number: int, hello: bytes) -> HostAdmission:
        """What to answer, whatever goes wrong: who is not answered waits until its connection is ended."""
        try:
            revoked = self._revoked  # before: whatever changes from here on sends the reader away again
            opened = {NamespaceId(one) for one in self._server.opened_by(self.transport, number)}
            has_proved_all = self._namespaces <= opened
            return self._admitted(hello, has_proved_all, revoked)
        except KvbmError as error:
            log.warning("joins.refused", transport=self.word, instance=self._instance, why=str(error))
        except Exception:  # of one reader; others come
            log.exception("joins.failed", transport=self.word, instance=self._instance, remedy="report it")
        return HostAdmission(0, self._refused)
