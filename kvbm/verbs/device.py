"""An open RDMA device and its protection domain: what memory and queue pairs are made in."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from kvbm.core.errors import VerbsError
from kvbm.verbs.library import Pyverbs, load_pyverbs
from kvbm.verbs.ports import ports

_PORT = 1
_MOST_GIDS = 1024  # a table of more does not fit into one answer
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in a GID
_MOST_READS = 16  # of one queue pair that are on their way at once, at most


class DeviceLimits(NamedTuple):
    """What a device can do.

    Attributes:
        reads: RDMA READs of one queue pair on their way at once, as reader and as owner.
        requests: that a queue pair takes before one is done.
        message_bytes: of one READ, at most.
        mtu: as verbs number them: 1 is 256 bytes, 5 is 4,096.
    """

    reads: int
    requests: int
    message_bytes: int
    mtu: int


class Device:
    """One port of a device, opened. Any thread.

    Attributes:
        name: such as "mlx5_0" or "rxe0".
        gid: its address, 16 bytes. lid: its address within an InfiniBand subnet; 0 on Ethernet.
    """

    def __init__(self, name: str) -> None:
        """Open it. Raises VerbsError: no pyverbs fits, there is no such device, or it cannot be used now."""
        self.verbs: Pyverbs = load_pyverbs()
        self.name = name
        here = [port.device for port in ports()]
        if name not in here:
            raise VerbsError(f"there is no RDMA device {name!r}; there are: {', '.join(here) or 'none'}")
        try:
            self.context = self.verbs.device.Context(name=name)
            port = self.context.query_port(_PORT)
            able = self.context.query_device()
            self.gid_index, self.gid = self._address()
            self.domain = self.verbs.pd.PD(self.context)
        except self.verbs.error as error:
            raise VerbsError(f"RDMA device {name!r} cannot be opened: {error}") from error
        self.lid = int(port.lid)
        self.port = _PORT
        reads = min(_MOST_READS, able.max_qp_rd_atom, able.max_qp_init_rd_atom)
        self.limits = DeviceLimits(max(1, reads), int(able.max_qp_wr), int(port.max_msg_sz), int(port.active_mtu))

    def _address(self) -> tuple[int, bytes]:
        """Index and bytes of the best GID: RoCE v2 over IPv4, else RoCE v2, else the first.

        One system call, for there may be 1,024.
        """
        routed = int(self.verbs.enums.IBV_GID_TYPE_ROCE_V2)
        best, rank = (0, bytes(16)), 0
        for entry in self.context.query_gid_table(_MOST_GIDS):
            gid = bytes.fromhex(str(entry.gid_str()).replace(":", ""))
            if int(entry.port_num) != _PORT or not any(gid):
                continue
            is_routed = int(entry.gid_type) == routed
            worth = 1 + is_routed + (is_routed and gid.startswith(_MAPPED))
            if worth > rank:
                best, rank = (int(entry.gid_index), gid), worth
        if not rank:
            raise VerbsError(f"RDMA device {self.name!r} has no address on port {_PORT}; see whether its link is up")
        return best

    def close(self) -> None:
        """Give it back, with everything that was made in it. Idempotent."""
        with suppress(self.verbs.error):
            self.domain.close()
        with suppress(self.verbs.error):
            self.context.close()
