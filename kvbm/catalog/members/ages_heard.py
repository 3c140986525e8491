"""How old blocks become, as instances tell it in their heartbeats: all together, by tier, counted since the catalog
began.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.ages import AGE_BOUNDS_S, FOLLOWED, TierAges, added
from kvbm.core.ids import InstanceId

_MOST = 1 << 50  # of a count between two heartbeats; more is no count
_BUCKETS = len(AGE_BOUNDS_S) + 1


class AgesHeard:
    """Sums what instances say. One thread; what a heartbeat says is its instance's word."""

    def __init__(self) -> None:
        self._sums = [TierAges() for _ in FOLLOWED]
        self._last: dict[InstanceId, tuple[str, tuple[TierAges, ...]]] = {}  # of whose run, and what it said

    def hear(self, instance: InstanceId, last: LastHeartbeat) -> None:
        """Take note of a heartbeat that is believed.

        Of the first that is heard of a run nothing counts: it may be long at it.
        """
        said = last.heartbeat.ages
        if not _is_whole(said):
            return
        before = self._last.get(instance)
        self._last[instance] = (last.heartbeat.run, said)
        if before is None or before[0] != last.heartbeat.run or before[1] == said:
            return
        grown = [_grown(one, now) for one, now in zip(before[1], said, strict=True)]
        self._sums = added(self._sums, grown)

    def forget(self, instance: InstanceId) -> None:
        """The next heartbeat of an instance is its first."""
        self._last.pop(instance, None)

    def counted(self) -> Sequence[TierAges]:
        """What was counted so far, by tier: HBM, HOST, NVME."""
        return self._sums


def _is_whole(said: tuple[TierAges, ...]) -> bool:
    """Whether these are counts as this kvbm makes them."""
    return len(said) == len(FOLLOWED) and all(len(one.wanted) == len(one.evicted) == _BUCKETS for one in said)


def _grown(before: TierAges, now: TierAges) -> TierAges:
    def more(then: int, count: int) -> int:
        return min(max(0, count - then), _MOST)

    return TierAges(
        tuple(map(more, before.wanted, now.wanted)),
        tuple(map(more, before.evicted, now.evicted)),
        more(before.wanted_s, now.wanted_s),
        more(before.evicted_s, now.evicted_s),
        more(before.reused, now.reused),
        more(before.unused, now.unused),
    )
