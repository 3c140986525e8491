"""An owner over NIXL beside its native server: who has proved every namespace is told how NIXL reaches HOST."""

from __future__ import annotations

from collections.abc import Iterable

from kvbm.core.errors import PeerWireError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.host_lending import HostAdmission, HostLending, JoinServer
from kvbm.transport.nixl_hello import NO_MEMORY, NixlReady, NixlStatus, encode_ready
from kvbm.transport.nixl_owner import NixlOwner
from kvbm.transport.wire import GrantTransport


class NixlLending(HostLending):
    """Lends HOST over NIXL, as `HostLending`. Its process starts with it, so that the first reader need not wait."""

    transport = GrantTransport.NIXL
    word = "nixl"

    def __init__(
        self, server: JoinServer, owner: NixlOwner, instance: InstanceId, namespaces: Iterable[Namespace]
    ) -> None:
        super().__init__(server, instance, namespaces)
        self._owner = owner

    def disown(self) -> None:
        """This process is a forked child: close what it has inherited, and end nothing."""
        self._closed.set()
        self._owner.disown()

    def _begin(self) -> None:
        self._owner.lend()

    def _admitted(self, hello: bytes, has_proved_all: bool, revoked: int) -> HostAdmission:
        if hello:
            raise PeerWireError(f"NIXL_HELLO has a body of {len(hello)} bytes")
        admission = self._owner.admit(has_proved_all, revoked)
        try:
            return HostAdmission(admission.number, encode_ready(admission.ready))
        except PeerWireError:  # NIXL tells of itself what no message holds
            self._owner.dismiss(admission.number)
            raise

    @property
    def _refused(self) -> bytes:
        return encode_ready(NixlReady(NixlStatus.FULL, b"", NO_MEMORY))

    @property
    def _revoked(self) -> int:
        return self._owner.revoked

    def _dismiss(self, number: int) -> None:
        self._owner.dismiss(number)

    def _revoke(self) -> None:
        self._owner.revoke()
        self._server.hang_up_on_nixl()  # who was let in before comes again, instead of finding out by a read that fails

    def _close(self) -> None:
        self._owner.close()
