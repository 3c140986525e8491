"""Owners that lend over NIXL, and readers of theirs: as instances have them, a native server beside a real process of
NIXL.

Owners and readers have a process of NIXL each, for all tests of a run: one takes a second to start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.base import PeerReader, RootOf
from kvbm.transport.leasing_connection import OVER_NIXL, LeasingConnection, ReaderProof
from kvbm.transport.lending import LentLimits, LentMapping
from kvbm.transport.nixl import NixlReader
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_lending import NixlLending
from kvbm.transport.nixl_owner import NixlOwner
from kvbm.transport.tcp import TcpReader
from kvbm.transport.wire import ArenaShape
from tests.host_site import HostSite
from tests.lenders import COPIER, KEY, NAMESPACE, OTHER, OWNER, READER, new_client, root_of
from tests.native_owner import NativeLender

NIXL_S = 60.0  # the machine has other work


def nixl_reader(
    process: NixlProcess,
    tcp: str,
    owner: InstanceId = OWNER,
    root_of: RootOf = root_of,
    key: bytes = KEY,
    known: Sequence[Namespace] = (NAMESPACE, OTHER),
    **more: Any,
) -> NixlReader:
    """A reader, by this process, of the owner at an address.

    Args:
        known: namespaces that it opens.
        more: options of `NixlReader`.
    """
    proof = ReaderProof(READER, key, root_of, lambda: known)
    connect = partial(LeasingConnection, OVER_NIXL, tcp, owner, proof)
    return NixlReader(process, connect, COPIER, **{"handshake_s": NIXL_S} | more)


class NixlSite(HostSite):
    """An owner that lends over NIXL beside its sockets. What does not come over NIXL comes over TCP.

    Args:
        processes: of the owner and of its readers.
        falls_back: False: readers read over NIXL alone.
        tcp: where it is to listen.
    """

    def __init__(
        self,
        lender: NativeLender,
        limits: LentLimits,
        folder: Path,
        processes: tuple[NixlProcess, NixlProcess],
        falls_back: bool = True,
        tcp: str = "127.0.0.1:0",
    ) -> None:
        self.tcp = tcp
        self.lends, self.reads = processes
        super().__init__("nixl", lender, limits, folder, falls_back, handshake_s=NIXL_S)

    def reader(
        self,
        owner: InstanceId = OWNER,
        root_of: RootOf = root_of,
        key: bytes = KEY,
        streams: int = 2,
        **more: Any,
    ) -> PeerReader:
        known: Sequence[Namespace] = more.pop("namespaces", (NAMESPACE, OTHER))
        others = TcpReader(new_client, self.tcp, READER, owner, root_of, key, streams) if self._falls_back else None
        made = nixl_reader(self.reads, self.tcp, owner, root_of, key, known, others=others, **more)
        self._readers.append(made)
        return made

    def _lend_host(self) -> NixlLending:
        pool = self.lender.pool
        self._fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY)
        slots, stride = self.lender.host.shape
        self.nixl = NixlOwner(
            self.lends, LentMapping(self._fd, ArenaShape(pool.mapped_bytes, slots, stride)), most_readers=100
        )
        return NixlLending(self.lending.native, self.nixl, InstanceId(OWNER), [NAMESPACE, OTHER])

    def _take_host_back(self) -> None:
        self.nixl.revoke()  # and its process goes on
        os.close(self._fd)
