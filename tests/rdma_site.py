"""An owner that lends over RDMA up to the device: a native server, and queue pairs that are numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.leasing_connection import OVER_RDMA, LeasingConnection, ReaderProof
from kvbm.transport.lending import LentLimits
from kvbm.transport.rdma_hello import NO_MEMORY, NOWHERE, RdmaLentMemory, RdmaReady, RdmaStatus
from kvbm.transport.rdma_lending import RdmaLending
from kvbm.transport.rdma_owner import RdmaAdmission
from kvbm.transport.server import Lending
from kvbm.verbs.queue_pair import RemoteEnd
from tests.lenders import KEY, NAMESPACE, OWNER, blocks_of, hashes_of, root_of
from tests.native_owner import NativeLender

SLOTS, BLOCK, ADDRESS = 20, 5_000, 4096
WAIT_S = 60.0
END = RemoteEnd(bytes(15) + b"\1", 0, 77, 5, 3, 16)


class Pairs:
    """As `RdmaOwner`, of queue pairs that are numbers."""

    def __init__(self) -> None:
        self.revoked = self.made = 0
        self.open: set[int] = set()
        self.ends: list[RemoteEnd] = []
        self.is_closed = False

    def admit(self, end: RemoteEnd, has_proved_all: bool, revoked: int) -> RdmaAdmission:
        if not has_proved_all or revoked != self.revoked:
            status = RdmaStatus.FULL if has_proved_all else RdmaStatus.NOT_PROVED
            return RdmaAdmission(0, RdmaReady(status, NOWHERE, NO_MEMORY))
        self.made += 1
        self.open.add(self.made)
        self.ends.append(end)
        return RdmaAdmission(
            self.made, RdmaReady(RdmaStatus.READY, END, RdmaLentMemory(ADDRESS, SLOTS * BLOCK, 3, SLOTS, BLOCK))
        )

    def dismiss(self, number: int) -> None:
        self.open.discard(number)

    def revoke(self) -> None:
        self.revoked += 1
        self.open.clear()

    def close(self) -> None:
        self.is_closed = True


class Owner:
    """A native server with eight blocks in HOST, and who answers for RDMA."""

    def __init__(self, folder: Path) -> None:
        self.lender = NativeLender(SLOTS, BLOCK, folder)
        self.lender.put(hashes_of(8), blocks_of(8, BLOCK))
        self.server: Lending = self.lender.listen(str(folder / "s"), "127.0.0.1:0", LentLimits(lease_s=WAIT_S))
        self.pairs = Pairs()
        self.rdma = RdmaLending(self.server.native, self.pairs, InstanceId(OWNER), [NAMESPACE])

    def connection(self, *namespaces: Namespace, key: bytes = KEY) -> LeasingConnection:
        def known() -> Sequence[Namespace]:
            return namespaces

        reader = ReaderProof(InstanceId("reader"), key, root_of, known)
        return LeasingConnection(OVER_RDMA, self.server.tcp, InstanceId(OWNER), reader, time.monotonic() + WAIT_S)

    def close(self) -> None:
        self.rdma.stop()
        self.server.close()
        self.rdma.close()
        self.lender.close()
