"""Blocks of prompts longer than HOST, on their way through it to what is colder.

They go to HOST only as fast as they leave it again. Else they would push out the beginning of their prompt before it is
where it is on its way to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm.core.ids import DURABLE_TIERS, Tier
from kvbm.core.results import Copy
from kvbm.manager.copies.copies_in_flight import CopiesInFlight
from kvbm.manager.offload.queue import Offloader
from kvbm.manager.record.ledger_stream import LedgerStream

_OTHERS_PART = 8  # of HOST stays free of blocks that only pass through: others' blocks would push them out


class HostTransit:
    """See the module. All of it under the lock."""

    def __init__(
        self,
        stream: LedgerStream,
        copies: CopiesInFlight,
        offloader: Offloader,
        clock: Callable[[], float],
    ) -> None:
        self._ledger, self._copies, self._offloader, self._clock = stream.ledger, copies, offloader, clock

    def room(self) -> tuple[int, bool]:
        """Blocks HOST could take without giving up one that is to go on to what is colder, and whether waiting makes
        more room (`_empties`).
        """
        counts, empties = self._ledger.counts(Tier.HOST), self._empties()
        return counts.free - counts.slots // _OTHERS_PART if empties else counts.free + counts.evictable, empties

    def is_kept(self, copy: Copy, there: Sequence[bool]) -> bool:
        """Whether the source of an offload keeps its blocks: HOST does not where they only passed through."""
        if copy.source != Tier.HOST or not self._offloader.leaves_host(copy.namespace, self._clock()):
            return True
        others = [tier for tier in self._offloader.behind_host() if tier != copy.target]
        if Tier.NVME in others and self._offloader.lacking(Tier.NVME, copy.hashes):
            return True
        return not all(there) or Tier.OBJECT in others  # which takes whole objects from HOST, later

    def _empties(self) -> bool:
        """Whether waiting makes room: blocks are on their way to HOST, or from there to what is colder, or wait for
        that.
        """
        return bool(
            self._offloader.waiting_in(Tier.HOST)
            or any(
                copy.target in DURABLE_TIERS if copy.source == Tier.HOST else copy.target == Tier.HOST
                for copy in self._copies.running.values()
                if copy.source in (Tier.HBM, Tier.HOST)
            )
        )
