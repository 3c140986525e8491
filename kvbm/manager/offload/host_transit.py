"""Blocks of prompts longer than HOST, on their way through it to what is colder.

They go to HOST only as fast as they leave it again. Else they would push out the beginning of their prompt before it is where it is on
its way to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm.core.ids import DURABLE_TIERS, HASH_BYTES, Tier
from kvbm.core.results import Copy
from kvbm.manager.copies.copies_in_flight import CopiesInFlight
from kvbm.manager.offload.queue import Offloader, OffloadRequest, Route, Skipped
from kvbm.manager.options import ManagerOptions
from kvbm.manager.record.event_writer import EventWriter
from kvbm.manager.record.ledger_stream import LedgerStream

_OTHERS_PART = 8  # of HOST stays free of blocks that only pass through: others' blocks would push them out


class HostTransit:
    """See the module. All of it under the lock."""

    def __init__(
        self,
        stream: LedgerStream,
        copies: CopiesInFlight,
        offloader: Offloader,
        writer: EventWriter,
        options: ManagerOptions,
    ) -> None:
        self._ledger, self._copies, self._offloader, self._writer = stream.ledger, copies, offloader, writer
        self._budgets = options.budgets
        self._clock: Callable[[], float] = options.clock

    def next(self) -> OffloadRequest | None:
        """The next request that can be carried out now."""
        passed_over: set[Route] = set()
        while (request := self._offloader.next(passed_over)) is not None:
            namespace, target, now_s = request.namespace, request.target, self._clock()
            if not any(self._offloader.passes_through(namespace, target, run, now_s) for run in request.runs):
                return request
            if why := self._ends_in_host(request):
                self._offloader.skip(why, request.hashes)
            elif self.room() < len(request.hashes) // HASH_BYTES and self._is_left():
                self._offloader.defer(request)
                passed_over.add(request.route)
            else:
                return request
        return None

    def room(self) -> int:
        """Blocks HOST could take without giving up one that is to go on to what is colder."""
        counts = self._ledger.counts(Tier.HOST)
        if not self._is_left():
            return counts.free + counts.evictable
        return counts.free - counts.slots // _OTHERS_PART

    def is_kept(self, copy: Copy, there: Sequence[bool]) -> bool:
        """Whether the source of an offload keeps its blocks: HOST does not where they only passed through."""
        if copy.source != Tier.HOST or not self._offloader.leaves_host(copy.namespace, self._clock()):
            return True
        others = [tier for tier in self._offloader.behind_host() if tier != copy.target]
        if Tier.NVME in others and self._ledger.lacking(Tier.NVME, copy.hashes):
            return True
        return not all(there) or Tier.OBJECT in others  # which takes whole objects from HOST, later

    def _ends_in_host(self, request: OffloadRequest) -> Skipped | None:
        """Why blocks cannot go on from HOST to what is colder; None where they can."""
        if self._writer.refusal or self._ledger.overflowed:
            return Skipped.JOURNAL
        pool = self._copies.pools.slots[request.source]
        wanted_bytes = len(request.hashes) // HASH_BYTES * pool.block_bytes
        behind = [self._budgets[tier] for tier in self._offloader.behind_host() if tier in self._budgets]
        now_s = self._clock()
        return Skipped.BUDGET if any(budget.left_bytes(now_s) < wanted_bytes for budget in behind) else None

    def _is_left(self) -> bool:
        """Whether blocks are on their way to HOST, or from there to what is colder, or wait for that."""
        return bool(
            self._offloader.waiting_in(Tier.HOST)
            or any(
                copy.target in DURABLE_TIERS if copy.source == Tier.HOST else copy.target == Tier.HOST
                for copy in self._copies.running.values()
                if copy.source in (Tier.HBM, Tier.HOST)
            )
        )
