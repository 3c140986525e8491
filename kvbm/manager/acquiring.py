"""Blocks on their way to HOST for one request of an engine that owns HBM.

Nothing here waits: the engine asks again at its next step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, pack_slots, split_slots
from kvbm.core.results import Match
from kvbm.manager.copies.copies_in_flight import CopiesInFlight
from kvbm.manager.onboard.expected import ExpectedBlocks
from kvbm.manager.onboard.loads import InFlightLoad, Loads, PlannedLoad, Waiter
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.spans import end_request

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan

# from one question for blocks that are expected to the next: each time longer, until some have come
_AGAIN_S, _AGAIN_MOST_S, _AGAIN_GROWTH = 0.002, 0.05, 1.5
_ANYBODY_S = 0.01  # the first of them, where the catalog is to say who has them
_EACH_S = 0.001  # the more requests expect blocks, the longer each waits: so many seconds for each of them

Sample = Callable[[NamespaceId, bytes, int], None]  # namespace, hashes and depth of a prompt that was asked for

_NOBODY = Waiter(NamespaceId(b""), b"")  # of a request that waits for nothing; nothing is brought to it


class WantedRun(NamedTuple):
    """What a request wants brought; see `EngineHbmManager.begin_acquire`."""

    namespace: NamespaceId
    hashes: bytes
    first: int
    is_whole: bool
    expected: ExpectedBlocks | None
    span: TraceSpan | None = None


class Acquiring:
    """A prompt that is being acquired without waiting.

    `EngineHbmManager.begin_acquire` makes one; one thread at a time uses it.

    Attributes:
        depth: blocks of the run, from its first on, that lie in HOST now, pinned until `release`; final once `poll` has
            said that it is over, as all here.
        hits: how many of them were found in each tier.
        predicted: blocks of the run, from its first on, that were said to be held: by the ledger, the pod's folder, or
            the catalog.
        why: why `depth` is less than that: "late" (they did not come in time), "slower" (than computing them),
            "no_room" (in HOST), "cleared" (meanwhile), or "unread" (they were not there, or damaged). Where the catalog
            has not answered, "unanswered": then nobody knows what it would have said. "" where all of it has come.
        is_fetched: something was to be brought, or looked for beyond the own tiers. is_told: for whoever counts it.
    """

    def __init__(
        self,
        stream: LedgerStream,
        copies: CopiesInFlight,
        loads: Loads,
        sample: Sample,
        clock: Callable[[], float],
        wanted: WantedRun,
        deadline_s: float,
    ) -> None:
        self.namespace, self.hashes, self.first, self._is_whole, self._expected, self._span = wanted
        self.depth = self.predicted = 0
        self.why, self.is_fetched, self.is_told = "", False, False
        self._again_s = 0.0  # before it, nobody is asked again for blocks that are expected
        is_of_anybody = self._expected is not None and not self._expected.instance
        self._least_pause_s = _ANYBODY_S if is_of_anybody else _AGAIN_S
        self._pause_s = self._least_pause_s
        self._polled_s = clock()
        self._wait_s = deadline_s - self._polled_s  # for what is under way
        self._expect_until_s = self._polled_s + (0.0 if self._expected is None else self._expected.quiet_s)
        self._planned_at = 0  # depth when copies were last begun
        self._slots = b""  # packed
        self.hits: dict[Tier, int] = {}
        self.deadline_s = deadline_s
        self._stream, self._ledger, self._lock = stream, stream.ledger, stream.lock
        self._copies, self._loads, self._sample, self._clock = copies, loads, sample, clock
        self._cancellations = copies.cancellations  # nothing that was cleared meanwhile may be had
        self._is_over = self._is_released = self._is_late = False
        self._waiter = _NOBODY
        self._begun: list[InFlightLoad] = []
        self._ended = 0  # of those begun, so many have ended, from the first on
        self._look: Future[None] | None = None  # beyond the own tiers; it adds to `_begun` before it ends

    # -- what an engine asks ------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[int]:
        """The HOST slot of each block."""
        return split_slots(self._slots)

    def poll(self) -> bool:
        """Go on with what has come, and begin what that makes possible. Never waits; ask again.

        Returns: whether it is over: nothing is under way any more, or the time is up.
        """
        if self._is_over:
            return True
        now_s = self._clock()
        if self._expected is not None:  # an engine that is full does not ask; nobody has looked meanwhile
            self._expect_until_s += max(0.0, now_s - self._polled_s - _AGAIN_MOST_S)
            self._polled_s = now_s
        is_under_way = self._is_under_way()
        is_late = now_s >= self.deadline_s and (self._expected is None or is_under_way)
        if not is_late and (is_under_way or self._pauses(now_s)):
            return False
        planned: list[PlannedLoad] = []
        looks = False
        with self._lock:
            waited, before, is_in_vain = bool(self._waiter.others), self.depth, self._waiter.is_in_vain
            self._give_up_locked()
            self._collect_locked()
            if self._expected is not None and self.depth > before:
                self._expect_until_s, is_late = now_s + self._expected.quiet_s, False
                self._pause_s = self._least_pause_s
            asks_all = False
            if self._expected is not None and (is_in_vain or now_s >= self._expect_until_s):
                asks_all, self._expected = bool(self._expected.instance), None  # whoever else has them
            expected = self._expected
            self._is_late = is_late
            is_over = is_late or self._stream.closing or self._is_cancelled
            may_go_on = self._is_whole and self.depth > self._planned_at and bool(self.next_block)
            may_go_on |= asks_all and bool(self.next_block)
            may_go_on |= expected is not None and self.first + self.depth < expected.blocks
            goes_on = not is_over and (waited or may_go_on or self._lies_in_host_locked(self.next_block))
            if goes_on and (asks_all or expected is not None):
                self.deadline_s = now_s + self._wait_s
            if goes_on:  # with what others have brought, or what lay behind a hole
                rest = self.hashes[(self.first + self.depth) * HASH_BYTES :]
                self._expect_locked(rest)
                planned, looks = self._plan_locked()
                goes_on = bool(planned or looks or self._waiter.others)
                if not goes_on:
                    self._collect_locked()
            if not goes_on:
                self._loads.end_waiting_locked(self)
                self._finish_locked()
        if goes_on:
            self._set_out(planned, looks)
            return False
        self._stream.recorded()
        self._tell_over()
        return True

    def release(self) -> None:
        """Unpin the blocks. Before it is over this gives it up: copies under way end by themselves. Idempotent."""
        with self._lock:
            if self._is_released:
                return
            if not self._is_over:
                self._give_up_locked()
                self._collect_locked()
                self._loads.end_waiting_locked(self)
                self._is_over = True
                self.depth, self.hits = 0, {}
            slots, self._slots = self._slots, b""
            self._ledger.unpin(Tier.HOST, slots)
            self._is_released = True
        self._stream.recorded()
        if self._span is not None:  # else it has ended
            self._span.end({"outcome": "given_up"})

    @property
    def next_block(self) -> bytes:
        """The block behind those that have come; empty where they are all."""
        at = (self.first + self.depth) * HASH_BYTES
        return self.hashes[at : at + HASH_BYTES]

    # -- what its manager asks ----------------------------------------------------------------------------------------

    def plan_locked(self) -> Callable[[], None]:
        """Begin: pin what lies in HOST, begin copies of what own tiers have.

        Returns: what is left to do outside the lock.
        """
        rest = self.hashes[self.first * HASH_BYTES :]
        depth, tiers, slots = self._expect_locked(rest)
        if depth * HASH_BYTES == len(rest) and tiers.count(Tier.HOST) == depth:  # as most are
            hits = {Tier.HOST: depth} if depth else {}
            self._slots, self.depth, self.hits, self._waiter = slots, depth, hits, _NOBODY
            self.predicted = depth
            self._finish_locked()
            return self._tell_over
        planned, looks = self._plan_locked()
        if planned or looks or self._waiter.others:
            self._loads.begin_waiting_locked(self, is_expecting=self._expected is not None)
            return lambda: self._set_out(planned, looks)
        self._collect_locked()
        self._finish_locked()
        return self._tell_over

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_cancelled(self) -> bool:
        return self._cancellations != self._copies.cancellations

    def _pauses(self, now_s: float) -> bool:
        """Whether nothing has come of what is expected, and it is too early to ask again."""
        is_early = self._expected is not None and now_s < min(self._again_s, self._expect_until_s)
        return is_early and not (self._waiter.brought or self._waiter.is_in_vain)

    def _is_under_way(self) -> bool:
        if self._look is not None and not self._look.done():
            return True
        while self._ended < len(self._begun) and self._begun[self._ended].ended.done():
            self._ended += 1
        return self._ended < len(self._begun) or not self._waiter.others.isdisjoint(self._copies.open)

    def _expect_locked(self, rest: bytes) -> Match:
        """Wait for the blocks behind what has come so far; pin those in HOST.

        Returns what own tiers hold of them.

        There is a waiter before anything is pinned: an exception may come between any two lines.
        """
        self._planned_at = self.depth
        is_again = self._pause_s > self._least_pause_s
        waiter = Waiter(self.namespace, rest, self._expected, is_again, self._span)
        self._waiter, self._begun, self._ended, self._look = waiter, [], 0, None
        if self._expected is not None:
            self._again_s = self._clock() + max(self._pause_s, self._loads.expecting_requests * _EACH_S)
            self._pause_s = min(self._pause_s * _AGAIN_GROWTH, _AGAIN_MOST_S)
        self._waiter.found = self._ledger.match(rest, True, Tier.HOST, self.namespace)
        return self._waiter.found

    def _plan_locked(self) -> tuple[list[PlannedLoad], bool]:
        """Begin copies of what own tiers have of the blocks that are waited for.

        Returns: the copies, and whether to look beyond the own tiers.
        """
        found, rest = self._waiter.found, self._waiter.hashes
        planned, reachable = self._loads.plan_locked(self._waiter)
        looks = reachable == found.depth and found.depth * HASH_BYTES < len(rest) and self._may_lie_beyond_locked()
        return planned, looks

    @property
    def _own_depth(self) -> int:
        """Up to where the own tiers have the prompt."""
        return self.first + self.depth + self._waiter.found.depth

    def _may_lie_beyond_locked(self) -> bool:
        """Whether there is a pool beyond the own tiers that could have the next block."""
        pools = self._copies.pools
        if pools.pod is not None or pools.peers is not None or pools.object is None:
            return pools.pod is not None or pools.peers is not None
        k = pools.object_blocks
        return len(self.hashes) // HASH_BYTES // k * k > self._own_depth

    def _set_out(self, planned: list[PlannedLoad], looks: bool) -> None:
        """Have copies carried out, and other pools looked into. Outside the lock."""
        self.is_fetched = True
        self._begun = self._loads.submit(planned, self._waiter)
        if looks:
            with suppress(RuntimeError):  # the manager closes, or there is no thread
                self._look = self._loads.look_beyond(self.hashes, self._own_depth, self._waiter, self._begun)
        self._stream.recorded()

    def _give_up_locked(self) -> None:
        """Nothing that is still under way for it pins anything any more."""
        self._waiter.waiting = False
        if self._look is not None:
            self._look.cancel()
        self._loads.give_up_locked(self._waiter, self._begun)
        self._begun = []

    def _lies_in_host_locked(self, block: bytes) -> bool:
        return bool(block) and self._ledger.holds(Tier.HOST, SequenceHash(block), self.namespace)

    def _collect_locked(self) -> None:
        """Add what has come to what there is, all at once."""
        waiter, found = self._waiter, self._waiter.found
        if not waiter.brought and found.tiers.count(Tier.HOST) == found.depth:
            depth, packed, hits = found.depth, found.slots, {Tier.HOST: found.depth} if found.depth else {}
        else:
            depth, slots, hits = waiter.prefix or self._loads.collect_locked(waiter)
            packed = pack_slots(slots)
        self.predicted = max(self.predicted, self.depth + found.depth + waiter.said)
        self.why = waiter.why or self.why
        sums = self.hits | {tier: self.hits.get(tier, 0) + count for tier, count in hits.items()}
        self._slots, self.depth, self.hits, self._waiter = self._slots + packed, self.depth + depth, sums, _NOBODY
        self.predicted = max(self.predicted, self.depth)  # more may come than was said: it was computed meanwhile

    def _finish_locked(self) -> None:
        """It is over: count what it found, that of the engine's own HBM too."""
        self._is_over = True
        if self._cancellations != self._copies.cancellations:
            slots, self._slots, self.depth, self.hits = self._slots, b"", 0, {}
            self._ledger.unpin(Tier.HOST, slots)
            self.why = "cleared"
        self._judge()
        hits = self.hits | {Tier.HBM: self.first} if self.first else self.hits
        self._loads.count_locked(self.namespace, self.hashes, self.first + self.depth, hits)

    def _judge(self) -> None:
        """Say why fewer blocks have come than were said to be there."""
        if self.depth >= self.predicted:
            self.why = self.why if self.why == "unanswered" else ""
        elif self.why in ("", "unanswered"):
            self.why = "late" if self._is_late else "unread"

    def _tell_over(self) -> None:
        """Offer a sample, and end the span. Outside the lock."""
        self._sample(self.namespace, self.hashes, self.first + self.depth)
        if self._span is not None:
            wanted = len(self.hashes) // HASH_BYTES - self.first
            end_request(self._span, wanted, self.depth, self.predicted, self.hits, self.why)
