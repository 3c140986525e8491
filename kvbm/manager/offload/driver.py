"""Carries out offloads: takes requests from the queue, in threads of its own or a step at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvbm.core.events import MigrateCause
from kvbm.core.ids import HASH_BYTES, SequenceHash, Tier, split_hashes
from kvbm.core.results import Copy
from kvbm.manager.copies.copies_in_flight import CopiesInFlight
from kvbm.manager.copies.copy_spans import CopySpan, copy_values
from kvbm.manager.copies.transfer import Moved
from kvbm.manager.counters import Counters
from kvbm.manager.objects.claim_watch import ClaimWatch
from kvbm.manager.objects.object_groups import groups_of
from kvbm.manager.offload.admission import Counts, Go, Leaving, Skip, Skipped, Verdict, Wait, admit
from kvbm.manager.offload.host_transit import HostTransit
from kvbm.manager.offload.queue import Offloader, OffloadRequest, Route
from kvbm.manager.options import ManagerOptions
from kvbm.manager.record.event_writer import EventWriter
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.safe_log import SafeLog

log = SafeLog()

_YIELD_S = 0.05  # an offload begins this much later at most, because requests wait for bytes


class RequestObjects(NamedTuple):
    """The objects of a request, packed: those that one copy can carry, those not all of which is at the source, and
    those that share blocks with the first and go with another copy.
    """

    whole: bytes
    partial: bytes = b""
    later: bytes = b""


class OffloadDriver:
    """See the module.

    Args:
        foreground_idle: set while no request waits for bytes; offloads yield to those that do.
    """

    def __init__(
        self,
        stream: LedgerStream,
        copies: CopiesInFlight,
        offloader: Offloader,
        transit: HostTransit,
        claims: ClaimWatch,
        writer: EventWriter,
        counters: Counters,
        foreground_idle: threading.Event,
        options: ManagerOptions,
    ) -> None:
        self._stream, self._ledger, self._lock = stream, stream.ledger, stream.lock
        self._copies, self._pools, self._offloader, self._transit = copies, copies.pools, offloader, transit
        self._claims, self._writer, self._counters, self._foreground_idle = claims, writer, counters, foreground_idle
        self._budgets, self._clock, self._wait_s = options.budgets, options.clock, options.wait_s
        self._tracing = options.tracing
        self._begun = 0  # requests taken from the queue and not over
        self._has_threads = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvbm-offload-{stream.instance}-{number}", daemon=True)
            for number in range(options.offload_threads)
        ]

    # -- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        self._has_threads = True
        for thread in self._threads:
            thread.start()

    def offload_one(self) -> bool:
        """Carry out the next offload that waits; False when there is none that can go now, or the manager closes."""
        if self._stream.closing:
            return False
        with self._lock:
            request = self._next_locked()
            if request is None:
                return False
            self._begun += 1
        try:
            self._offload(request)
        finally:
            with self._lock:
                self._begun -= 1
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until no offload waits or runs; False when some still do."""
        deadline = self._clock() + timeout_s
        while self._clock() < deadline:
            if not self._has_threads:  # driven by hand
                if not self.offload_one():
                    return not self._ledger.copies_in_flight()
                continue
            with self._lock:
                waiting = self._offloader.waiting_blocks + self._begun
                if not waiting and not self._ledger.copies_in_flight():
                    return True
            self._offloader.wanted.set()
            time.sleep(0.01)
        return False

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the threads, and for copies that run. Those that never began hold no slots that matter."""
        if not self._has_threads:
            return
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            if thread.ident is None:
                break  # the system gave no thread
            thread.join(max(0.0, deadline - self._clock()))
        while self._copies.running and self._clock() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        wanted = self._offloader.wanted
        while not self._stream.closing:
            wanted.wait(0.5)
            wanted.clear()
            try:
                self._take_turn()
            except Exception:  # the thread is there for whatever comes next
                log.exception("offload.broke", instance=self._stream.instance, remedy="report it; offloads go on")

    def _take_turn(self) -> None:
        """Carry out what waits."""
        self._foreground_idle.wait(_YIELD_S)
        while self.offload_one():
            self._foreground_idle.wait(_YIELD_S)
        self._claims.look_idle()

    # -- one offload --------------------------------------------------------------------------------------------------

    def _next_locked(self) -> OffloadRequest | None:
        """The next request that can be carried out now."""
        passed_over: set[Route] = set()
        while (request := self._offloader.next(self._clock(), passed_over)) is not None:
            if not request.passes_host:
                return request  # admitted once there is memory for it
            match self._admit_locked(request):
                case Skip(why):
                    self._offloader.skip(why, request.hashes)
                case Wait():
                    self._offloader.defer(request)
                    passed_over.add(request.route)
                case Go():
                    return request
        return None

    def _admit_locked(self, request: OffloadRequest) -> Verdict:
        """Whether the first blocks of a request may leave now."""
        passes, is_object, now_s = request.passes_host, request.target == Tier.OBJECT, self._clock()
        ends_in = tuple(self._offloader.behind_host()) if passes else (request.target,)
        takes_events = not (self._writer.refusal or self._ledger.overflowed)
        return admit(
            Leaving(
                len(request.hashes) // HASH_BYTES,
                self._pools.slots[request.source].block_bytes,
                ends_in,
                passes,
                self._pools.object_blocks if is_object else 1,
            ),
            Counts(takes_events, *self._transit.room()) if passes else Counts(takes_events),
            {tier: self._budgets[tier].left_bytes(now_s) for tier in ends_in if tier in self._budgets},
        )

    def _offload(self, request: OffloadRequest) -> None:
        """Carry out a request, as far as journal, memory and budget allow."""
        lane = None
        if self._pools.need_staging(request.source, request.target):
            lane = self._copies.staging.take(self._wait_s if self._has_threads else 0.0, is_offload=True)
            if lane is None:
                with self._lock:
                    self._offloader.skip(Skipped.STAGING, request.hashes)
                return
        copy = self._begin(request)
        if copy is None:
            if lane is not None:
                self._copies.staging.give(lane)
            return
        self._stream.recorded()  # the copy may wait for the withdrawal of what its slots held
        finish: Callable[[Moved], None] = partial(self._finish_locked, request, copy)
        span = None
        try:
            if self._tracing is not None:
                values = copy_values(copy, self._pools.slots[request.source].block_bytes)
                span = CopySpan(self._tracing.begin("kvbm.offload", "", values))
                finish = span.noting(finish)
            self._copies.carry_out(copy, finish, lane)
        finally:
            self._copies.end_run(copy)
            if span is not None:
                span.end()
        self._claims.look()

    def _begin(self, request: OffloadRequest) -> Copy | None:
        """The copy for a request; None when there is nothing to do, or it may not be done now, which is counted."""
        with self._lock:
            if self._stream.closing:
                return None
            hashes = request.hashes
            if not request.passes_host:
                verdict = self._admit_locked(request)
                if isinstance(verdict, Skip) and verdict.why == Skipped.JOURNAL:
                    self._offloader.skip(verdict.why, hashes)  # nobody would know of it
                    return None
                objects = (
                    self._whole_objects_locked(request) if request.target == Tier.OBJECT else RequestObjects(hashes)
                )
                may_blocks = verdict.blocks if isinstance(verdict, Go) else 0
                if objects.partial:
                    self._offloader.skip(Skipped.PARTIAL, objects.partial)
                if objects.later:
                    self._offloader.put_back(request._replace(hashes=objects.later))
                hashes, beyond = objects.whole[: may_blocks * HASH_BYTES], objects.whole[may_blocks * HASH_BYTES :]
                if beyond:
                    self._offloader.skip(Skipped.BUDGET, beyond)
            copy = None
            if hashes:
                copy = self._copies.begin_locked(request.namespace, request.source, request.target, hashes)
            if request.target == Tier.OBJECT:
                if copy is not None and self._pools.object_blocks > 1 and copy.hashes != hashes:
                    self._copies.drop_locked(copy, MigrateCause.OFFLOAD)
                    self._offloader.skip(Skipped.PARTIAL, hashes)  # blocks of another namespace
                    copy = None
            elif copy is None or len(copy.hashes) != len(hashes):
                self._count_left_out_locked(request, hashes, copy)
            if copy is not None:
                self._copies.begin_run_locked(copy)
                if (budget := self._budgets.get(request.target)) is not None:
                    block_bytes = self._pools.slots[request.source].block_bytes
                    budget.spend(len(copy.hashes) // HASH_BYTES * block_bytes)
            return copy

    def _count_left_out_locked(self, request: OffloadRequest, hashes: bytes, copy: Copy | None) -> None:
        """Count what a copy to a tier of ours leaves out and the tier lacks."""
        taken: set[SequenceHash] = set()
        for one in self._copies.running.values():
            taken.update(split_hashes(one.hashes))
        if copy is not None:
            taken.update(split_hashes(copy.hashes))
        lacking = split_hashes(self._offloader.lacking(request.target, hashes))
        left = b"".join(block for block in lacking if block not in taken)
        gone = self._offloader.lacking(request.source, left)
        self._offloader.skip(Skipped.GONE, gone)
        self._offloader.skip(Skipped.ROOM, left[len(gone) :])  # so many

    def _whole_objects_locked(self, request: OffloadRequest) -> RequestObjects:
        """Which objects of a request one copy can carry now: all of each is at the source, and no two share a block."""
        k, unclaimed = self._pools.object_blocks, self._offloader.lacking(Tier.OBJECT, request.hashes)
        if k == 1:
            return RequestObjects(unclaimed)
        whole: list[bytes] = []
        partial: list[bytes] = []
        later: list[bytes] = []
        seen: set[SequenceHash] = set()
        for group in groups_of(unclaimed, k):
            blocks = split_hashes(group)
            if self._offloader.lacking(request.source, group) or len(set(blocks)) < k:
                partial.append(group)
            elif seen.isdisjoint(blocks):
                seen.update(blocks)
                whole.append(group)
            elif group not in whole:
                later.append(group)
        return RequestObjects(b"".join(whole), b"".join(partial), b"".join(later))

    def _finish_locked(self, request: OffloadRequest, copy: Copy, moved: Moved) -> None:
        """The bytes of an offload are in place, or will never be."""
        there = self._copies.arrived_locked(copy, moved.arrived)
        if copy.target == Tier.OBJECT:
            there = self._claimable_locked(copy, there)
        self._copies.end_locked(copy, there, MigrateCause.OFFLOAD, kept=self._transit.is_kept(copy, there))
        self._copies.settle_trouble_locked(copy, moved)
        arrived = [block for block, ok in zip(split_hashes(copy.hashes), there, strict=True) if ok]
        packed = b"".join(arrived)
        self._counters.offloaded_blocks[copy.target] += len(arrived)
        if copy.target == Tier.OBJECT:
            self._offloader.claims.add(packed)
            self._claims.seen_locked(copy.namespace, groups_of(packed, self._pools.object_blocks))
        elif arrived:
            at = request.positions()
            positions = [at[block] for block in arrived]
            self._offloader.offer_arrived(copy.namespace, copy.target, packed, positions)

    def _claimable_locked(self, copy: Copy, stored: list[bool]) -> list[bool]:
        """Which blocks of a copy to OBJECT may be claimed: none of an object of which a block was cleared meanwhile."""
        k = self._pools.object_blocks
        if k == 1:
            return stored
        assert isinstance(copy.source, Tier)
        claimable: list[bool] = []
        for number, group in enumerate(groups_of(copy.hashes, k)):
            is_whole = all(stored[number * k : (number + 1) * k]) and not self._offloader.lacking(copy.source, group)
            claimable += [is_whole] * k
        return claimable
