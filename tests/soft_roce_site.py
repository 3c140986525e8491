"""Owners that lend over RDMA, and readers of theirs: as instances have them, a native server beside a real device.

`tools/rxe_vm.sh` makes a pair of devices in software; `tests/rdma_site.py` has stand-ins for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.base import PeerReader, RootOf
from kvbm.transport.leasing_connection import OVER_RDMA, LeasingConnection, ReaderProof
from kvbm.transport.lending import LentLimits
from kvbm.transport.rdma import RdmaReader
from kvbm.transport.rdma_lending import RdmaLending
from kvbm.transport.rdma_owner import RdmaOwner
from kvbm.transport.tcp import TcpReader
from kvbm.verbs.device import Device
from kvbm.verbs.quarantine import Quarantine
from tests.host_site import HostSite
from tests.lenders import COPIER, KEY, NAMESPACE, OTHER, OWNER, READER, new_client, root_of
from tests.native_owner import NativeLender

RDMA_S = 120.0  # the processor of the VM is emulated


class RdmaDevices(NamedTuple):
    """What an owner lends with, and what its readers read with."""

    lends: Device
    reads: Device

    def close(self) -> None:
        for device in self:
            device.close()


def open_devices() -> RdmaDevices:
    """The pair that the VM has."""
    return RdmaDevices(Device("rxe0"), Device("rxe1"))


def rdma_reader(
    device: Device,
    tcp: str,
    owner: InstanceId = OWNER,
    root_of: RootOf = root_of,
    key: bytes = KEY,
    known: Sequence[Namespace] = (NAMESPACE, OTHER),
    **more: Any,
) -> RdmaReader:
    """A reader, by this device, of the owner at an address.

    Args:
        known: namespaces that it opens.
        more: options of `RdmaReader`.
    """
    proof = ReaderProof(READER, key, root_of, lambda: known)
    connect = partial(LeasingConnection, OVER_RDMA, tcp, owner, proof)
    return RdmaReader(device, connect, COPIER, **{"handshake_s": RDMA_S} | more)


class RdmaSite(HostSite):
    """An owner that lends over RDMA beside its sockets. What does not come over RDMA comes over TCP."""

    def __init__(
        self, lender: NativeLender, limits: LentLimits, folder: Path, devices: RdmaDevices, falls_back: bool = True
    ) -> None:
        self.devices, self.quarantine = devices, Quarantine()
        super().__init__("rdma", lender, limits, folder, falls_back, handshake_s=RDMA_S)

    def reader(
        self,
        owner: InstanceId = OWNER,
        root_of: RootOf = root_of,
        key: bytes = KEY,
        streams: int = 2,
        **more: Any,
    ) -> PeerReader:
        others = TcpReader(new_client, self.tcp, READER, owner, root_of, key, streams) if self._falls_back else None
        options: dict[str, Any] = {"quarantine": self.quarantine, "others": others} | more
        made = rdma_reader(self.devices.reads, self.tcp, owner, root_of, key, **options)
        self._readers.append(made)
        return made

    def close(self) -> None:
        super().close()
        assert self.quarantine.sweep() == 0, "a READ has not ended"

    def _lend_host(self) -> RdmaLending:
        self.rdma = RdmaOwner(self.devices.lends, self.lender.host, most_readers=100)
        return RdmaLending(self.lending.native, self.rdma, InstanceId(OWNER), [NAMESPACE, OTHER])

    def _take_host_back(self) -> None:
        self.joins.close()
        self.rdma.close()  # again: it raises where the device still reaches HOST
