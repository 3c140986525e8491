"""An owner over RDMA beside its native server: a queue pair for each reader that has proved every namespace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.host_lending import HostAdmission, HostLending, JoinServer
from kvbm.transport.rdma_hello import NO_MEMORY, NOWHERE, RdmaReady, RdmaStatus, decode_hello, encode_ready
from kvbm.transport.rdma_owner import RdmaAdmission, RdmaOwner
from kvbm.transport.wire import GrantTransport
from kvbm.verbs.queue_pair import RemoteEnd


class QueuePairs(Protocol):
    """As `RdmaOwner`."""

    @property
    def revoked(self) -> int: ...
    def admit(self, end: RemoteEnd, has_proved_all: bool, revoked: int) -> RdmaAdmission: ...
    def dismiss(self, number: int) -> None: ...
    def revoke(self) -> None: ...
    def close(self) -> None: ...


class RdmaLending(HostLending):
    """Lends HOST over RDMA, as `HostLending`."""

    transport = GrantTransport.RDMA
    word = "rdma"

    def __init__(
        self, server: JoinServer, owner: QueuePairs | RdmaOwner, instance: InstanceId, namespaces: Iterable[Namespace]
    ) -> None:
        super().__init__(server, instance, namespaces)
        self._owner = owner

    def _admitted(self, hello: bytes, has_proved_all: bool, revoked: int) -> HostAdmission:
        admission = self._owner.admit(decode_hello(hello), has_proved_all, revoked)
        return HostAdmission(admission.number, encode_ready(admission.ready))

    @property
    def _refused(self) -> bytes:
        return encode_ready(RdmaReady(RdmaStatus.FULL, NOWHERE, NO_MEMORY))

    @property
    def _revoked(self) -> int:
        return self._owner.revoked

    def _dismiss(self, number: int) -> None:
        self._owner.dismiss(number)

    def _revoke(self) -> None:
        self._owner.revoke()

    def _close(self) -> None:
        self._owner.close()
