"""Settings → the RDMA device of an instance, and what it lends over it.

What cannot be used is one warning, and TCP serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.core.errors import VerbsError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.pools.host.pool import HostPool
from kvbm.safe_log import SafeLog
from kvbm.transport.host_lending import JoinServer
from kvbm.transport.rdma_lending import RdmaLending
from kvbm.transport.rdma_owner import RdmaOwner
from kvbm.verbs.device import Device
from kvbm.verbs.ports import Port, ports

log = SafeLog()

AUTO = "auto"


def open_device(wanted: str) -> Device | None:
    """The device that `transport.rdma` names; None: it names none, or none that can be used."""
    if not wanted:
        return None
    try:
        return Device(device_name(wanted, ports()))
    except VerbsError as error:
        log.warning("rdma.unavailable", why=str(error), effect="blocks are lent and read over TCP")
        return None


def device_name(wanted: str, known: Sequence[Port]) -> str:
    """The name itself, or of the first device whose link is up. Raises VerbsError: there is none."""
    if wanted != AUTO:
        return wanted
    found = next((port.device for port in known if port.number == 1 and port.state == "ACTIVE"), None)
    if found is None:
        raise VerbsError("there is no RDMA device whose link is up")
    return found


def open_rdma_lending(
    device: Device, server: JoinServer, host: HostPool, instance: InstanceId, namespaces: Sequence[Namespace]
) -> RdmaLending | None:
    """HOST, lent over a device; nothing is before `start`. None: the device cannot reach it."""
    memory = host.memory
    if memory is None:
        return None
    try:
        owner = RdmaOwner(device, memory)
    except VerbsError as error:
        log.warning("rdma.unavailable", why=str(error), effect="blocks are lent over TCP")
        return None
    return RdmaLending(server, owner, instance, namespaces)
