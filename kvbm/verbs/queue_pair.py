"""A reliable connection between two devices, by which one end READs the other's memory.

made ─ connect ─► connected ─ fail, or any trouble ─► failed ─ drain ─► nothing on its way ─ close ─► gone
READs alone: a WRITE that is late is noticed by nobody, a READ writes only the memory of who asked for it, who knows
when it is done.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

from kvbm.core.errors import VerbsError
from kvbm.verbs.completions import Completion, Completions
from kvbm.verbs.device import Device
from kvbm.verbs.memory import RegisteredMemory
from kvbm.verbs.modify import modify

MOST_RETRIES = 6  # 7 is for ever where the peer is not ready, and no more than this is needed where a packet was lost
_TIMEOUT = 14  # 4.096 µs × 2**14 = 67 ms until a packet is sent again
_RNR_TIMER = 12  # 0.64 ms
_HOPS = 64
_PSN_BITS = 24


class RemoteEnd(NamedTuple):
    """Where the other end is.

    Attributes:
        gid, lid: of its device. number: of its queue pair. psn: of its first packet, both below 2**24.
        mtu, reads: what its device can do, as in `DeviceLimits`.
    """

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int
    reads: int


class QueuePair:
    """One end of a reliable connection. One thread at a time.

    Attributes:
        outstanding: READs that are posted and not done.
        completions: of this queue pair alone.
    """

    def __init__(self, device: Device, requests: int, is_lent: bool) -> None:
        """Make it, ready to be connected.

        Args:
            requests: READs posted and not done, at most.
            is_lent: the other end may READ memory that is lent; False: it may do nothing.
        Raises: VerbsError: the device refuses.
        """
        self._device, self._verbs = device, device.verbs
        self._requests = requests
        self.outstanding = 0
        self.psn = secrets.randbits(_PSN_BITS)
        self.completions = Completions(device, requests + 1)
        enums, qp = self._verbs.enums, self._verbs.qp
        try:
            room = qp.QPCap(max_send_wr=requests, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            queue = self.completions.queue
            wanted = qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=1)
            self._pair = qp.QP(device.domain, wanted)
            first = qp.QPAttr(qp_state=enums.IBV_QPS_INIT, port_num=device.port)
            first.pkey_index = 0
            first.qp_access_flags = enums.IBV_ACCESS_REMOTE_READ if is_lent else 0
            parts = enums.IBV_QP_STATE | enums.IBV_QP_PKEY_INDEX | enums.IBV_QP_PORT | enums.IBV_QP_ACCESS_FLAGS
            self._pair.modify(first, parts)
        except self._verbs.error as error:
            raise VerbsError(f"{device.name}: no queue pair for {requests} requests: {error}") from error
        self.number = int(self._pair.qp_num)

    @property
    def end(self) -> RemoteEnd:
        """What the other side has to know of this end."""
        device = self._device
        return RemoteEnd(device.gid, device.lid, self.number, self.psn, device.limits.mtu, device.limits.reads)

    def connect(self, remote: RemoteEnd) -> None:
        """Join it to the other end, which does the same.

        The GIL is released: on Ethernet this takes a second where nobody is there.

        Nobody may `close` it meanwhile. Raises VerbsError: the other end cannot be reached, or makes no sense.
        """
        enums, reads = self._verbs.enums, min(remote.reads, self._device.limits.reads)
        try:
            way = self._verbs.addr.GlobalRoute(
                dgid=self._verbs.addr.GID(_spelled(remote.gid)), sgid_index=self._device.gid_index, hop_limit=_HOPS
            )
            arriving = self._verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTR, port_num=self._device.port)
            arriving.ah_attr = self._verbs.addr.AHAttr(gr=way, is_global=1, port_num=self._device.port, dlid=remote.lid)
            arriving.path_mtu = min(remote.mtu, self._device.limits.mtu)
            arriving.dest_qp_num, arriving.rq_psn = remote.number, remote.psn
            arriving.max_dest_rd_atomic, arriving.min_rnr_timer = reads, _RNR_TIMER
            modify(
                self._pair,
                arriving,
                enums.IBV_QP_STATE
                | enums.IBV_QP_AV
                | enums.IBV_QP_PATH_MTU
                | enums.IBV_QP_DEST_QPN
                | enums.IBV_QP_RQ_PSN
                | enums.IBV_QP_MAX_DEST_RD_ATOMIC
                | enums.IBV_QP_MIN_RNR_TIMER,
            )
            sending = self._verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTS)
            sending.timeout, sending.retry_cnt, sending.rnr_retry = _TIMEOUT, MOST_RETRIES, MOST_RETRIES
            sending.sq_psn, sending.max_rd_atomic = self.psn, reads
            modify(
                self._pair,
                sending,
                enums.IBV_QP_STATE
                | enums.IBV_QP_TIMEOUT
                | enums.IBV_QP_RETRY_CNT
                | enums.IBV_QP_RNR_RETRY
                | enums.IBV_QP_SQ_PSN
                | enums.IBV_QP_MAX_QP_RD_ATOMIC,
            )
        except (self._verbs.error, VerbsError, ValueError) as error:
            raise VerbsError(f"{self._device.name}: the other end cannot be reached: {error}") from error

    def read(self, request: int, into: RegisteredMemory, offset: int, size: int, remote: tuple[int, int]) -> None:
        """Post one READ: `size` bytes into `into` from `offset` on.

        Args:
            request: number that its completion will have.
            remote: address in the other process, and the key of its memory.
        Raises: VerbsError: the queue is full or failed; it was not posted.
        """
        if self.outstanding >= self._requests or offset < 0 or size < 1 or offset + size > into.array.nbytes:
            raise VerbsError(
                f"a READ of {size} bytes at {offset}, with {self.outstanding} others on their way, is none"
            )
        enums, wr = self._verbs.enums, self._verbs.wr
        try:
            piece = wr.SGE(into.address + offset, size, into.key)
            wish = wr.SendWR(
                wr_id=request, opcode=enums.IBV_WR_RDMA_READ, num_sge=1, sg=[piece], send_flags=enums.IBV_SEND_SIGNALED
            )
            address, key = remote
            wish.set_wr_rdma(key, address)
            self._pair.post_send(wish)
        except self._verbs.error as error:
            raise VerbsError(f"{self._device.name}: a READ was not taken: {error}") from error
        self.outstanding += 1

    def take(self, until_s: float, also: int = -1) -> list[Completion]:
        """As `Completions.take`, counted."""
        done = self.completions.take(until_s, also)
        self.outstanding -= len(done)
        return done

    def fail(self) -> None:
        """End what is on its way; each READ's completion says so. Raises VerbsError: the device refuses."""
        enums = self._verbs.enums
        try:
            self._pair.modify(self._verbs.qp.QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)
        except self._verbs.error as error:
            raise VerbsError(f"{self._device.name}: a queue pair cannot be ended: {error}") from error

    def drain(self, within_s: float) -> bool:
        """After `fail`: wait until nothing is on its way.

        False: something still may write the memory it was to go to.
        """
        until_s = time.monotonic() + within_s
        while self.outstanding:
            if not self.take(until_s) and time.monotonic() >= until_s:
                return False
        return True

    def close(self) -> None:
        """Destroy it: nothing is written any more.

        Idempotent. Raises VerbsError: the device refuses; it is as before.
        """
        try:
            self._pair.close()
        except self._verbs.error as error:
            raise VerbsError(f"{self._device.name}: a queue pair cannot be destroyed: {error}") from error
        self.completions.close()


def _spelled(gid: bytes) -> str:
    text = gid.hex()
    return ":".join(text[at : at + 4] for at in range(0, 32, 4))
