"""Blocks on their way to HOST for one request of an engine that owns HBM. Nothing here waits: the engine asks again at its next step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, pack_slots, split_slots
from kvbm.core.ledger import Match
from kvbm.manager.copies import CopiesInFlight
from kvbm.manager.ledger_stream import LedgerStream
from kvbm.manager.loads import InFlightLoad, Loads, PlannedLoad, Waiter

Sample = Callable[[NamespaceId, bytes, int], None]  # namespace, hashes and depth of a prompt that was asked for

_NOBODY = Waiter(
    NamespaceId(b""), b"", Match(0, b"", b"")
)  # of a request that waits for nothing; nothing is brought to it


class Acquiring:
    """See the module. `EngineHbmManager.begin_acquire` makes one; one thread at a time uses it.

    Attributes:
        depth: blocks of the run, from its first on, that lie in HOST now, pinned until `release`; final once done, as all here.
        hits: how many of them were found in each tier.
    """

    def __init__(
        self,
        stream: LedgerStream,
        copies: CopiesInFlight,
        loads: Loads,
        sample: Sample,
        clock: Callable[[], float],
        namespace: NamespaceId,
        hashes: bytes,
        first: int,
        deadline_s: float,
        is_whole: bool = False,
    ) -> None:
        self.depth = 0
        self._is_whole = is_whole
        self._planned_at = 0  # depth when copies were last begun
        self._slots = b""  # packed
        self.hits: dict[Tier, int] = {}
        self.namespace, self.hashes, self.first, self.deadline_s = namespace, hashes, first, deadline_s
        self._stream, self._ledger, self._lock = stream, stream.ledger, stream.lock
        self._copies, self._loads, self._sample, self._clock = copies, loads, sample, clock
        self._cancellations = copies.cancellations  # nothing that was cleared meanwhile may be had
        self._is_over = False
        self._is_released = False
        self._waiter = _NOBODY
        self._begun: list[InFlightLoad] = []
        self._ended = 0  # of those begun, so many have ended, from the first on
        self._look: Future[None] | None = None  # beyond the own tiers; it adds to `_begun` before it ends

    # -- what an engine asks ------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[int]:
        """The HOST slot of each block."""
        return split_slots(self._slots)

    @property
    def done(self) -> bool:
        """Whether it is over: nothing is under way any more, or the time is up. Never waits; ask again."""
        if self._is_over:
            return True
        is_late = self._clock() >= self.deadline_s
        if self._is_under_way() and not is_late:
            return False
        planned: list[PlannedLoad] = []
        looks = False
        with self._lock:
            waited = bool(self._waiter.others)
            self._give_up()
            self._collect()
            is_in_vain = is_late or self._stream.closing or self._is_cancelled
            may_go_on = self._is_whole and self.depth > self._planned_at and bool(self.next_block)
            goes_on = not is_in_vain and (waited or may_go_on or self._lies_in_host(self.next_block))
            if goes_on:  # with what others have brought, or what lay behind a hole
                rest = self.hashes[(self.first + self.depth) * HASH_BYTES :]
                planned, looks = self._plan(rest, self._ledger.match(rest, True, Tier.HOST, self.namespace))
                goes_on = bool(planned or looks or self._waiter.others)
                if not goes_on:
                    self._collect()
            if not goes_on:
                self._loads.end_waiting(self)
                self._finish()
        if goes_on:
            self._set_out(planned, looks)
            return False
        self._stream.recorded()
        self._offer_sample()
        return True

    def release(self) -> None:
        """Unpin the blocks. Before it is done this gives it up: copies under way end by themselves. Idempotent."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
            if not self._is_over:
                self._give_up()
                self._collect()
                self._loads.end_waiting(self)
                self._is_over = True
                self.depth, self.hits = 0, {}
            self._ledger.unpin(Tier.HOST, self._slots)
            self._slots = b""
        self._stream.recorded()

    @property
    def next_block(self) -> bytes:
        """The block behind those that have come; empty where they are all."""
        at = (self.first + self.depth) * HASH_BYTES
        return self.hashes[at : at + HASH_BYTES]

    # -- what its manager asks ----------------------------------------------------------------------------------------

    def plan(self) -> Callable[[], None]:
        """Begin: pin what lies in HOST, begin copies of what own tiers have. Under the lock.

        Returns: what is left to do outside the lock.
        """
        rest = self.hashes[self.first * HASH_BYTES :]
        found = self._ledger.match(rest, True, Tier.HOST, self.namespace)
        depth, tiers, slots = found
        if depth * HASH_BYTES == len(rest) and tiers.count(Tier.HOST) == depth:  # as most are
            self.depth, self._slots = depth, slots
            if depth:
                self.hits = {Tier.HOST: depth}
            self._finish()
            return self._offer_sample
        planned, looks = self._plan(rest, found)
        if planned or looks or self._waiter.others:
            self._loads.begin_waiting(self)
            return lambda: self._set_out(planned, looks)
        self._collect()
        self._finish()
        return self._offer_sample

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_cancelled(self) -> bool:
        return self._cancellations != self._copies.cancellations

    def _is_under_way(self) -> bool:
        if self._look is not None and not self._look.done():
            return True
        while self._ended < len(self._begun) and self._begun[self._ended].ended.done():
            self._ended += 1
        return self._ended < len(self._begun) or not self._waiter.others.isdisjoint(self._copies.open)

    def _plan(self, rest: bytes, found: Match) -> tuple[list[PlannedLoad], bool]:
        """Begin copies of what own tiers have of the blocks behind what has come so far, of which HOST's are pinned. Under the lock.

        Args:
            rest: their hashes.
            found: what own tiers hold of them.
        Returns: the copies, and whether to look beyond the own tiers.
        """
        self._planned_at = self.depth
        self._waiter, self._begun, self._ended, self._look = Waiter(self.namespace, rest, found), [], 0, None
        planned, reachable = self._loads.plan(self._waiter)
        looks = reachable == found.depth and found.depth * HASH_BYTES < len(rest) and self._may_lie_beyond()
        return planned, looks

    @property
    def _own_depth(self) -> int:
        """Up to where the own tiers have the prompt."""
        return self.first + self.depth + self._waiter.found.depth

    def _may_lie_beyond(self) -> bool:
        """Whether there is a pool beyond the own tiers that could have the next block. Under the lock."""
        pools = self._copies.pools
        if pools.pod is not None or pools.peers is not None or pools.object is None:
            return pools.pod is not None or pools.peers is not None
        k = pools.object_blocks
        return len(self.hashes) // HASH_BYTES // k * k > self._own_depth

    def _set_out(self, planned: list[PlannedLoad], looks: bool) -> None:
        """Have copies carried out, and other pools looked into. Outside the lock."""
        self._begun = self._loads.submit(planned, self._waiter)
        if looks:
            with suppress(RuntimeError):  # the manager closes, or there is no thread
                self._look = self._loads.look_beyond(self.hashes, self._own_depth, self._waiter, self._begun)
        self._stream.recorded()

    def _give_up(self) -> None:
        """Nothing that is still under way for it pins anything any more. Under the lock."""
        self._waiter.waiting = False
        if self._look is not None:
            self._look.cancel()
        self._loads.give_up(self._waiter, self._begun)
        self._begun = []

    def _lies_in_host(self, block: bytes) -> bool:
        return bool(block) and self._ledger.holds(Tier.HOST, SequenceHash(block), self.namespace)

    def _collect(self) -> None:
        """Add what has come to what there is. Under the lock."""
        found = self._waiter.found
        if not self._waiter.brought and found.tiers.count(Tier.HOST) == found.depth:
            depth, packed, hits = found.depth, found.slots, {Tier.HOST: found.depth} if found.depth else {}
        else:
            depth, slots, hits = self._loads.collect(self._waiter)
            packed = pack_slots(slots)
        self._waiter = _NOBODY
        self.depth += depth
        self._slots += packed
        for tier, count in hits.items():
            self.hits[tier] = self.hits.get(tier, 0) + count

    def _finish(self) -> None:
        """It is over: count what it found, that of the engine's own HBM too. Under the lock."""
        self._is_over = True
        if self._cancellations != self._copies.cancellations:
            self._ledger.unpin(Tier.HOST, self._slots)
            self.depth, self._slots, self.hits = 0, b"", {}
        hits = self.hits | {Tier.HBM: self.first} if self.first else self.hits
        self._loads.count(self.namespace, self.hashes, self.first + self.depth, hits)

    def _offer_sample(self) -> None:
        self._sample(self.namespace, self.hashes, self.first + self.depth)
