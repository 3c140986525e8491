"""What instances have put in the object pool, as their heartbeats tell it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvbm.core.ids import InstanceId
from kvbm.streams.base import Heartbeat

Sizes = tuple[int, int]  # bytes in memory, and as they lie in the store


class PutBytes(NamedTuple):
    """For `CatalogNumbers`, whose fields have these names.

    Attributes:
        put_bytes: by instance; grows for as long as its run lasts.
        namespace_put_bytes: by namespace, of those that are told of now.
    """

    put_bytes: dict[str, Sizes]
    namespace_put_bytes: dict[str, Sizes]


def put_bytes(beats: Iterable[tuple[InstanceId, Heartbeat]]) -> PutBytes:
    """The sums of the last heartbeats. Of an instance whose kvbm tells no total it is the sum of what it tells."""
    found = PutBytes({}, {})
    for instance, beat in beats:
        total: Sizes = (0, 0)
        for namespace, sizes in beat.put_bytes.items():
            name = namespace.hex()
            total = _sum(total, sizes)
            found.namespace_put_bytes[name] = _sum(found.namespace_put_bytes.get(name, (0, 0)), sizes)
        total = beat.put_total if any(beat.put_total) else total
        if any(total):
            found.put_bytes[instance] = total
    return found


def _sum(one: Sizes, other: Sizes) -> Sizes:
    return one[0] + other[0], one[1] + other[1]
