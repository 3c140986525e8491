"""What reading from another instance costs, by how far apart the two stand: learned from what instances tell of their
reads.

Until there are reads, and again when they are old, it is what `core.fetching` assumes. A read counts only within
bounds: whoever may send heartbeats may say anything.
"""

from __future__ import annotations

from kvbm.catalog.routing.router import PeerLink
from kvbm.catalog.routing.transfers import MOST_DISTANCE
from kvbm.core.fetching import Links, Transfer, assumed_link

MEMORY, TCP = "memory", "tcp"
MEASURED_WITHIN = 32.0
"""A link is taken to be at most so many times as quick as is assumed, and at least its so-many-th part."""

_KEPT_S = 1.0  # prices follow what is learned after so long
_LEAST_BYTES = 4 << 20  # and as so many at least, where nothing came of it
_MOST_BYTES = 64 << 20  # a read counts as so many at most: a large one of one instance is not all that is known
_DISTANCES = range(MOST_DISTANCE + 1)


class PeerLinks:
    """See the module. One thread; the time is an argument."""

    def __init__(self) -> None:
        self._links = Links()
        self._made_s = float("-inf")
        self._table: tuple[list[PeerLink], list[PeerLink]] = ([], [])

    def measured(self, now_s: float, read: Transfer) -> None:
        """An instance tells of a read.

        Args:
            read: of bounded numbers, as `Transfers` lets through. All ways between machines are one: the best of them
                was taken.
        """
        transport = MEMORY if read.transport == MEMORY else TCP
        apart = min(max(0, read.distance), MOST_DISTANCE)
        size = min(read.size, _MOST_BYTES)
        took_s = read.took_us * 1e-6 * (size / read.size if read.size else 1.0)
        assumed = assumed_link(transport, apart)
        slowest_s = assumed.latency_s + max(size, _LEAST_BYTES) * MEASURED_WITHIN / assumed.bytes_per_s
        took_s = min(took_s, slowest_s)  # one that hung, or says it did, is not all that is known either
        self._links.measured(now_s, str(apart), transport, size, took_s, apart)

    def table(self, now_s: float) -> tuple[list[PeerLink], list[PeerLink]]:
        """The links through memory, and those between machines, by distance: as of a second ago at most."""
        if now_s >= self._made_s + _KEPT_S or now_s < self._made_s:
            self._made_s = now_s
            self._table = (
                [self._link(now_s, MEMORY, apart) for apart in _DISTANCES],
                [self._link(now_s, TCP, apart) for apart in _DISTANCES],
            )
        return self._table

    def _link(self, now_s: float, transport: str, apart: int) -> PeerLink:
        assumed = assumed_link(transport, apart)
        learned = self._links.link(now_s, str(apart), transport, apart).bytes_per_s
        rate = min(max(learned, assumed.bytes_per_s / MEASURED_WITHIN), assumed.bytes_per_s * MEASURED_WITHIN)
        together = max(rate, assumed.bytes_per_s) if transport == TCP else 0.0
        return PeerLink(assumed.latency_s, rate, together)
