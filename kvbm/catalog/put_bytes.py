"""What instances have put in the object pool, as their heartbeats tell it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from kvbm.core.ids import InstanceId
from kvbm.streams.base import Heartbeat

Sizes = tuple[int, int]  # bytes in memory, and as they lie in the store


def put_by_instance(beats: Iterable[tuple[InstanceId, Heartbeat]]) -> dict[str, Sizes]:
    """What each instance has put; it grows for as long as its run lasts.

    Where a heartbeat tells no total it is the sum of what it tells.
    """
    found: dict[str, Sizes] = {}
    for instance, beat in beats:
        total = beat.put_total
        if not any(total):
            total = reduce(_sum, beat.put_bytes.values(), (0, 0))
        if any(total):
            found[instance] = total
    return found


def put_by_namespace(beats: Iterable[tuple[InstanceId, Heartbeat]]) -> dict[str, Sizes]:
    """What was put of each namespace that heartbeats tell of now, by its id in hex."""
    found: dict[str, Sizes] = {}
    for _, beat in beats:
        for namespace, sizes in beat.put_bytes.items():
            found[namespace.hex()] = _sum(found.get(namespace.hex(), (0, 0)), sizes)
    return found


def _sum(one: Sizes, other: Sizes) -> Sizes:
    return one[0] + other[0], one[1] + other[1]
