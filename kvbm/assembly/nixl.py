"""Settings → the processes of NIXL of an instance: one that reads, and one that lends HOST.

NIXL that is not installed is an error, as of every extra that a setting asks for; NIXL that does not work is one
warning, and TCP serves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvbm.core.errors import NixlError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.pools.host.pool import HostPool
from kvbm.safe_log import SafeLog
from kvbm.transport.host_lending import JoinServer
from kvbm.transport.lending import LentMapping
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_lending import NixlLending
from kvbm.transport.nixl_owner import NixlOwner
from kvbm.transport.wire import ArenaShape

log = SafeLog()


def open_nixl(wanted: bool) -> NixlProcess | None:
    """A process that reads by NIXL, which is being started; None: none is wanted, or none can be started.

    Raises: MissingExtraError: NIXL is not installed.
    """
    if not wanted:
        return None
    process = NixlProcess()
    try:
        process.start()
    except NixlError as error:
        log.warning("nixl.unavailable", why=str(error), effect="blocks are lent and read over TCP")
        return None
    return process


def open_nixl_lending(
    server: JoinServer, host: HostPool, instance: InstanceId, namespaces: Sequence[Namespace]
) -> NixlLending | None:
    """HOST, lent by a process of its own that can only read it; nothing is before `start`. None: HOST has no memory
    that another process could map.
    """
    memory = host.memory
    if memory is None or host.fd < 0:
        log.warning("nixl.unavailable", why="HOST has no memory that can be shared", effect="blocks are lent over TCP")
        return None
    fd = os.open(f"/proc/self/fd/{host.fd}", os.O_RDONLY | os.O_CLOEXEC)
    mapping = LentMapping(fd, ArenaShape(host.mapped_bytes, len(memory), memory.shape[1]))
    owner = NixlOwner(NixlProcess(), mapping, on_closed=lambda: os.close(fd))
    return NixlLending(server, owner, instance, namespaces)
