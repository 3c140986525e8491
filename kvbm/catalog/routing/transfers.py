"""What instances tell of their reads from one another: how quick they were, by transport and by how far apart the two
stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.fetching import Transfer
from kvbm.core.ids import InstanceId
from kvbm.telemetry.transfers import BYTES_PER_S, Transferred

MOST_TOLD = 64  # of one heartbeat; a kvbm says no more
MOST_DISTANCE = 8
_KNOWN = ("memory", "tcp", "rdma", "nixl")
_OTHER = "other"
_MOST_BYTES = 1 << 40  # of one read; more is no size


class Transfers:
    """Counts reads since the start.

    One thread; what a heartbeat says is its instance's word, and chooses no label of its own.
    """

    def __init__(self, measured: Callable[[float, Transfer], object] = lambda now_s, read: None) -> None:
        """
        Args:
            measured: told of each read that counts, with when it was heard of.
        """
        self._measured = measured
        self._counted: dict[tuple[str, int], Transferred] = {}
        self._heard: dict[InstanceId, int] = {}  # the time that the last heartbeat of each bears

    def hear(self, instance: InstanceId, last: LastHeartbeat) -> None:
        """Take note of a heartbeat that is believed.

        The stream keeps the last one of each instance and gives it out again, so one counts once, and the first that is
        heard does not.
        """
        before, now = self._heard.get(instance), last.heartbeat.wall_time_ns
        self._heard[instance] = now
        if before is None or now == before:
            return
        for one in last.heartbeat.transfers[:MOST_TOLD]:
            transport = one.transport if one.transport in _KNOWN else _OTHER
            if not 0 <= one.size <= _MOST_BYTES or one.took_us < 0:
                continue
            self._measured(last.at_s, one)
            key = (transport, min(max(0, one.distance), MOST_DISTANCE))
            counted = self._counted.get(key)
            if counted is None:
                counted = self._counted[key] = Transferred([0] * (len(BYTES_PER_S) + 1))
            if not one.size:
                counted.failed += 1
                continue
            rate = one.size * 1e6 / max(1, one.took_us)
            counted.by_rate[bisect_left(BYTES_PER_S, rate)] += 1
            counted.rates += rate
            counted.size += one.size

    def forget(self, instance: InstanceId) -> None:
        """The next heartbeat of an instance is its first."""
        self._heard.pop(instance, None)

    def counted(self) -> Mapping[tuple[str, int], Transferred]:
        """What was counted so far."""
        return self._counted
