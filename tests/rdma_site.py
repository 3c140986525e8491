"""An owner that lends over RDMA and a reader of its, both up to the device: the server is native, queue pairs are
stand-ins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvbm.core.errors import VerbsError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.leasing_connection import OVER_RDMA, LeasingConnection, ReaderProof
from kvbm.transport.lending import LentLimits
from kvbm.transport.rdma_hello import NO_MEMORY, NOWHERE, RdmaLentMemory, RdmaReady, RdmaStatus
from kvbm.transport.rdma_lending import RdmaLending
from kvbm.transport.rdma_owner import RdmaAdmission
from kvbm.transport.server import Lending
from kvbm.verbs.completions import Completion
from kvbm.verbs.device import DeviceLimits
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
    """A native server with eight blocks in HOST, and who answers for RDMA.

    Attributes:
        tcp: host:port, where it listens.
    """

    def __init__(self, folder: Path) -> None:
        self.lender = NativeLender(SLOTS, BLOCK, folder)
        self.lender.put(hashes_of(8), blocks_of(8, BLOCK))
        self._unix, self.tcp = str(folder / "s"), "127.0.0.1:0"
        self.pairs = Pairs()
        self._listen()

    def connection(
        self, *namespaces: Namespace, key: bytes = KEY, tcp: str = "", within_s: float = WAIT_S
    ) -> LeasingConnection:
        """Proved, at the owner's address or at another that leads there."""

        def known() -> Sequence[Namespace]:
            return namespaces

        reader = ReaderProof(InstanceId("reader"), key, root_of, known)
        return LeasingConnection(OVER_RDMA, tcp or self.tcp, InstanceId(OWNER), reader, time.monotonic() + within_s)

    def start(self) -> None:
        """Listen where it listened before, and answer for RDMA."""
        self._listen()
        self.rdma.start()

    def stop(self) -> None:
        self.rdma.stop()
        self.server.close()
        self.rdma.close()

    def close(self) -> None:
        self.stop()
        self.lender.close()

    def _listen(self) -> None:
        self.server: Lending = self.lender.listen(self._unix, self.tcp, LentLimits(lease_s=WAIT_S))
        self.tcp = self.server.tcp
        self.rdma = RdmaLending(self.server.native, self.pairs, InstanceId(OWNER), [NAMESPACE])


class ReaderDevice:
    """A reader's device: what it READs it copies out of the owner's HOST."""

    def __init__(self, host: np.ndarray) -> None:
        self.limits = DeviceLimits(16, 64, 1 << 20, 3)
        self.host = host
        self.registered = 0
        self.is_reachable = True
        self.trouble = ""  # of what is READ
        self.on_take: Callable[[], object] = lambda: None

    def pair(self, *_: object, **__: object) -> ReaderPair:
        return ReaderPair(self)

    def memory(self, _: object, array: np.ndarray, is_lent: bool) -> ReaderMemory:
        self.registered += 1
        return ReaderMemory(array)


class ReaderMemory:
    """Where a reader's READs arrive."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def close(self) -> None: ...


class ReaderPair:
    """A reader's queue pair. Its READs are done when they are waited for."""

    def __init__(self, device: ReaderDevice) -> None:
        self._device = device
        self.end = END
        self.outstanding = 0
        self._posted: list[int] = []

    def connect(self, remote: RemoteEnd) -> None:
        if not self._device.is_reachable:
            raise VerbsError("the other end cannot be reached")

    def read(self, request: int, into: ReaderMemory, offset: int, size: int, remote: tuple[int, int]) -> None:
        begin = remote[0] - ADDRESS
        into.array[offset : offset + size] = self._device.host.reshape(-1)[begin : begin + size]
        self._posted.append(request)

    def take(self, until_s: float, also: int) -> list[Completion]:
        self._device.on_take()
        done, self._posted = self._posted, []
        return [Completion(request, self._device.trouble) for request in done]

    def drain(self, within_s: float) -> bool:
        return True

    def fail(self) -> None: ...
    def close(self) -> None: ...
