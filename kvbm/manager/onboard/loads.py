"""Loads: blocks come from colder tiers, from the pod, from other instances and from the object pool to the target tier,
for requests that wait.

The *target tier* is where requests get their blocks: HBM, or HOST where the engine owns HBM. A load that has not ended
in time is late: its request goes on without it, and it serves the next one.

    plan_locked     copies of what colder tiers of this instance hold
    submit          threads carry them out; each adds what it brought to its Waiter
    plan_remote     outside the lock, because it asks other pools: copies of what lies beyond the own tiers
    collect_locked  what is pinned in the target tier now, from the first block on
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvbm.core.events import MigrateCause
from kvbm.core.fetching import OBJECTS, FetchSource, Links, Stretch, plan
from kvbm.core.ids import (
    DURABLE_TIERS,
    HASH_BYTES,
    NO_PARENT,
    InstanceId,
    NamespaceId,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.results import Copy, Match
from kvbm.locate.base import NOTHING_FOUND, FoundElsewhere, Locator, Nowhere
from kvbm.manager.copies.copies_in_flight import CopiesInFlight, lender
from kvbm.manager.copies.copy_spans import CopySpan, copy_values, load_name
from kvbm.manager.copies.transfer import Moved, RemoteSource
from kvbm.manager.counters import Counters
from kvbm.manager.objects.claim_watch import ClaimWatch
from kvbm.manager.offload.queue import Offloader
from kvbm.manager.onboard.expected import ExpectedBlocks
from kvbm.manager.options import ManagerOptions
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.pools.base import ReadOutcome
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Load

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan

log = SafeLog()

_NOWHERE = 0xFF  # as the ledger's `holders`
_NAMED_S = 1.0  # for so long the catalog is not asked again where an instance lends
_NAMED_LONGEST_S, _NAMED_MOST = 10.0, 256
_LOAD_BLOCKS = 64  # a longer segment is brought by several copies: at a time, and each is there when it is there


class Prefix(NamedTuple):
    """What `acquire` brought to HBM.

    Attributes:
        depth: blocks of the prompt, from the first on, that are in HBM now and pinned.
        slots: the HBM slot of each, `depth` entries.
        hits: how many of them were found in each tier.
    """

    depth: int
    slots: list[int]
    hits: dict[Tier, int]


_NOTHING = Match(0, b"", b"")


class Waiter:
    """A request that waits for blocks, and what it has got so far; read and written under the lock, but for what a look
    beyond the own tiers finds out (`said`, `why`, `is_in_vain`), which is read once that is over.

    Attributes:
        hashes: packed, of the run it wants.
        found: what the ledger held of it at the start; what lay in the target tier is pinned.
        waiting: a copy that ends later pins nothing.
        planned: the copies that have begun for it.
        prefix: what it was given in the end, pinned; None before.
        brought: block → its slot in the target tier, pinned once, and where it was.
        lent: those of them that other instances lent.
        others: copies of other requests that bring some of its blocks.
        said: blocks behind those of the own tiers that others were said to have. why: why fewer are brought, where that
            is known before.
        expected: blocks that somebody is about to have. is_again: they were asked for before, and none had come.
        is_in_vain: nobody is to have them any more, as far as was found out.
        span: of the request, where it is traced.
    """

    def __init__(
        self,
        namespace: NamespaceId,
        hashes: bytes,
        expected: ExpectedBlocks | None = None,
        is_again: bool = False,
        span: TraceSpan | None = None,
    ) -> None:
        self.namespace, self.hashes, self.found = namespace, hashes, _NOTHING
        self.expected, self.is_again, self.is_in_vain, self.span = expected, is_again, False, span
        self.waiting = True
        self.planned: list[Copy] = []
        self.prefix: Prefix | None = None
        self.brought: dict[SequenceHash, tuple[int, Tier]] = {}
        self.lent: set[SequenceHash] = set()
        self.others: set[int] = set()
        self.said, self.why = 0, ""


class PlannedLoad(NamedTuple):
    """A copy to the target tier that is to begin; `remote` where its source has no slots of ours."""

    copy: Copy
    remote: RemoteSource | None = None


class Segment(NamedTuple):
    """Blocks that one source beyond the own tiers seems to have.

    Attributes:
        wanted: packed hashes, some of those of `remote`.
    """

    source: Tier | InstanceId
    remote: RemoteSource
    wanted: bytes


class InFlightLoad(NamedTuple):
    """A copy to the target tier that a request waits for."""

    copy: Copy
    ended: Future[None]


class Loads:
    """See the module.

    Args:
        locator: who knows what the object pool is claimed to hold.
        executor: carries out loads.

    Attributes:
        nobody_waits: set while no request waits for bytes; offloads yield to those that do.
        load: what the engine has last told of its queue.
        looks_beyond: whether there are pools beyond the own tiers.
    """

    def __init__(
        self,
        stream: LedgerStream,
        copies: CopiesInFlight,
        offloader: Offloader,
        locator: Locator,
        revisioned: RevisionedNamespaces,
        counters: Counters,
        claims: ClaimWatch,
        executor: Executor,
        options: ManagerOptions,
    ) -> None:
        self._stream, self._ledger, self._lock = stream, stream.ledger, stream.lock
        self._copies, self._pools, self._target = copies, copies.pools, copies.target
        self._offloader, self.locator, self._revisioned = offloader, locator, revisioned
        self._counters, self._claims, self._executor = counters, claims, executor
        self._wait_s, self._locate_s, self._threads = options.wait_s, options.locate_s, options.load_threads
        self.looks_beyond = any(one is not None for one in (copies.pools.object, copies.pools.pod, copies.pools.peers))
        self._is_in_place = copies.pools.memory(copies.target) is not None  # then no load needs a lane
        self.nobody_waits = threading.Event()
        self.nobody_waits.set()
        self._waiting: set[object] = set()  # who waits; a number would be wrong for good once an exception came between
        self._expecting: set[object] = set()  # who waits for what others compute
        # where instances lend that requests have named: as the catalog has last said, and when
        self._named: OrderedDict[str, tuple[float, FoundElsewhere]] = OrderedDict()
        self.load = Load()
        self._looks_fail = False
        self._links, self._clock = Links(), options.clock  # of the object pool

    # -- one request --------------------------------------------------------------------------------------------------

    def bring(self, waiter: Waiter, planned: list[PlannedLoad], reachable: int, wait_s: float) -> Prefix:
        """Carry out what was planned, and what lies beyond, and wait for it no longer than told. Outside the lock."""
        begun = self.submit(planned, waiter)
        if reachable == waiter.found.depth:
            begun += self.submit(self.plan_remote(waiter.hashes, reachable, waiter), waiter)
        self._stream.recorded()  # a copy may have evicted to make room
        if begun:
            with self._lock:
                self.begin_waiting_locked(waiter)
            since_s = 0.0 if waiter.span is None else self._clock()
            wait([load.ended for load in begun], timeout=wait_s)
            if waiter.span is not None:
                waiter.span.put({"wait_s": round(self._clock() - since_s, 6)})
                waiter.why = waiter.why if all(load.ended.done() for load in begun) else "late"
        with self._lock:
            self.give_up_locked(waiter, begun)
            prefix = self.collect_locked(waiter)
            self.count_locked(waiter.namespace, waiter.hashes, prefix.depth, prefix.hits)
        self._stream.recorded()
        return prefix

    def abandon(self, waiter: Waiter) -> None:
        """An error ends a request: nobody gets what was pinned for it, nor what comes later. Outside the lock."""
        with self._lock:
            if waiter.prefix is None:  # wherever it was: to give up and to collect may be done again
                self.give_up_locked(waiter, [])
            prefix = waiter.prefix or self.collect_locked(waiter)
            self._ledger.unpin(self._target, pack_slots(prefix.slots))
        self._stream.recorded()

    @property
    def requests_waiting(self) -> int:
        """How many requests wait for bytes."""
        return len(self._waiting)

    @property
    def expecting_requests(self) -> int:
        """How many requests wait for blocks that others compute."""
        return len(self._expecting)

    def begin_waiting_locked(self, request: object, is_expecting: bool = False) -> None:
        """A request waits for bytes; offloads yield to it meanwhile, but not for as long as others compute."""
        if is_expecting:
            self._expecting.add(request)
            return
        self._waiting.add(request)
        self.nobody_waits.clear()

    def end_waiting_locked(self, request: object) -> None:
        """It does no more, if it did."""
        self._expecting.discard(request)
        self._waiting.discard(request)
        if not self._waiting and not self.nobody_waits.is_set():
            self.nobody_waits.set()

    def give_up_locked(self, waiter: Waiter, begun: list[InFlightLoad]) -> None:
        """End copies that have not started.

        Running copies finish on their own and are counted as late.
        """
        waiter.waiting = False
        self.end_waiting_locked(waiter)
        for _, ended in begun:
            ended.cancel()
        for copy in waiter.planned:
            if copy.id in self._copies.late:
                continue
            if copy.id in self._copies.running:
                self._copies.mark_late_locked(copy)
            elif copy.id in self._copies.open and not self._stream.ended:
                self._copies.drop_locked(copy)

    def collect_locked(self, waiter: Waiter) -> Prefix:
        """What is pinned in the target tier now, from the first block on; what lies behind a hole is unpinned again."""
        slots: list[int] = []
        behind: list[int] = []
        hits: dict[Tier, int] = {}
        whole, found = True, waiter.found
        found_slots = split_slots(found.slots)
        for index, block in enumerate(split_hashes(waiter.hashes)):
            if index < found.depth and found.tiers[index] == self._target:
                slot, tier = found_slots[index], self._target
            elif block in waiter.brought:
                slot, tier = waiter.brought[block]
            else:
                whole = False
                continue
            if whole:
                slots.append(slot)
                hits[tier] = hits.get(tier, 0) + 1
                self._counters.peer_hits += block in waiter.lent
            else:
                behind.append(slot)
        unwanted = pack_slots(behind)  # before the prefix is given: nothing is unpinned twice
        waiter.prefix = Prefix(len(slots), slots, hits)
        self._ledger.unpin(self._target, unwanted)
        return waiter.prefix

    def count_locked(self, namespace: NamespaceId, hashes: bytes, depth: int, hits: dict[Tier, int]) -> None:
        """Count hits and misses of a prompt, of which so much came, and offer what was used again."""
        for tier, count in hits.items():
            self._counters.hit_blocks[tier] += count
        self._counters.missed_blocks += len(hashes) // HASH_BYTES - depth
        if depth and self._stream.usage is not None:
            self._stream.usage.read_locked(namespace, hits)
        if depth:
            used = hashes[: depth * HASH_BYTES]
            self._offloader.offer(namespace, Tier.HBM, used, 2, NO_PARENT, 0)

    # -- where blocks lie ---------------------------------------------------------------------------------------------

    def plan_locked(self, waiter: Waiter) -> tuple[list[PlannedLoad], int]:
        """Begin copies for each stretch of the run that lies in one colder tier.

        Returns: them, and how deep the run can get.
        """
        planned: list[PlannedLoad] = []
        found, hashes, copies = waiter.found, waiter.hashes, self._copies
        if found.tiers.count(self._target) == found.depth:
            return planned, found.depth
        end = 0
        for number, group in groupby(found.tiers):
            at, end = end, end + len(list(group))
            if number == self._target:
                continue
            tier = Tier(number)
            for first in range(at, end, _LOAD_BLOCKS):
                if self._is_silent(tier) or (tier in DURABLE_TIERS and not self._revisioned.may(waiter.namespace)):
                    return planned, first
                wanted = hashes[first * HASH_BYTES : min(first + _LOAD_BLOCKS, end) * HASH_BYTES]
                self._note_others_locked(wanted, waiter)
                copy = copies.begin_locked(waiter.namespace, tier, self._target, wanted, begun=waiter.planned)
                if copy is not None:
                    planned.append(PlannedLoad(copy))
                if copy is None or copy.hashes != wanted:
                    return planned, first
        return planned, end

    def plan_remote(self, hashes: bytes, depth: int, waiter: Waiter) -> list[PlannedLoad]:
        """Begin copies of what lies beyond the own tiers, which end at `depth`. Looks and asks outside the lock.

        Args:
            hashes: packed, of the prompt from its first block on, because objects begin at whole multiples of their
                size.
        """
        with self._lock:
            if not self.looks_beyond or not self._revisioned.may(waiter.namespace):
                waiter.is_in_vain = True
                return []
        segments = self._seen_beyond(waiter, hashes, depth)
        planned: list[PlannedLoad] = []
        with self._lock:
            for source, remote, wanted in segments if waiter.waiting and not self._stream.closing else ():
                self._note_others_locked(wanted, waiter)
                is_lent = remote.peer is not None
                copy = self._copies.begin_locked(
                    waiter.namespace, source, self._target, wanted, is_lent, waiter.planned
                )
                if copy is None:
                    waiter.why, waiter.is_in_vain = "no_room", True
                    break
                planned.append(PlannedLoad(copy, remote))
        return planned

    def _seen_beyond(self, waiter: Waiter, hashes: bytes, depth: int) -> list[Segment]:
        """What the pod, objects and other instances seem to have from block `depth` on.

        Trouble is a miss: what is pinned is a request's.
        """
        segments: list[Segment] = []
        try:
            segments += self._look_in_pod(waiter.namespace, hashes, depth)
            in_pod = sum(len(segment.wanted) for segment in segments) // HASH_BYTES
            waiter.said = in_pod
            segments += self._look_elsewhere(waiter, hashes, depth + in_pod)
            self._looks_fail = False
        except Exception:
            if not self._looks_fail:  # one warning until it works again
                log.exception(
                    "load.not_looked", effect="what lies beyond the own tiers is computed", remedy="report it"
                )
            self._looks_fail = waiter.is_in_vain = True
        return segments

    def find_beyond(self, runs: Sequence[tuple[NamespaceId, bytes]]) -> list[bytes]:
        """For each run what seems to lie beyond the own tiers, each block by itself: a byte for each, its tier or 0xFF.

        Asks outside the lock.

        Objects of several blocks are left out: they hold prefixes, which `plan_remote` asks for.
        """
        return [self._beyond(namespace, hashes) for namespace, hashes in runs]

    def _beyond(self, namespace: NamespaceId, hashes: bytes) -> bytes:
        found = np.full(len(hashes) // HASH_BYTES, _NOWHERE, dtype=np.uint8)
        with self._lock:
            may = self._revisioned.may(namespace)
        pool, pod = self._pools.object, self._pools.pod
        if may and pool is not None and pool.blocks == 1 and not self._is_silent(Tier.OBJECT):
            claimed = np.frombuffer(self.locator.claimed(pool.name, namespace, hashes, self._locate_s), dtype=np.uint8)
            found[np.flatnonzero(np.unpackbits(claimed, bitorder="little")[: len(found)])] = Tier.OBJECT
        if may and pod is not None:
            found[pod.present(namespace, hashes)] = Tier.NVME
        return found.tobytes()

    def silent_sources(self) -> list[Tier | InstanceId]:
        """Whose reads do not end."""
        return [source for source in tuple(self._copies.late_from) if self._is_silent(source)]

    def _is_silent(self, source: Tier | InstanceId) -> bool:
        """Whether so many reads of a source are late that another would only wait: it is a miss at once until one has
        ended.
        """
        return self._copies.late_from.get(source, 0) >= self._threads

    def _note_others_locked(self, wanted: bytes, waiter: Waiter) -> None:
        """Remember who brings some of these blocks already."""
        if coming := self._copies.coming:
            waiter.others.update(coming[block] for block in split_hashes(wanted) if block in coming)

    def _look_in_pod(self, namespace: NamespaceId, hashes: bytes, depth: int) -> list[Segment]:
        """What other instances of the pod seem to have, from block `depth` on."""
        segments: list[Segment] = []
        rest = hashes[depth * HASH_BYTES :]
        for instance, slots in self._pools.pod.find(namespace, rest) if self._pools.pod is not None and rest else ():
            if self._is_silent(instance):
                break
            for at in range(0, len(slots), _LOAD_BLOCKS):
                wanted = rest[at * HASH_BYTES : min(at + _LOAD_BLOCKS, len(slots)) * HASH_BYTES]
                segments.append(Segment(instance, RemoteSource(wanted, slots[at : at + _LOAD_BLOCKS]), wanted))
            rest = rest[len(slots) * HASH_BYTES :]
        return segments

    def _look_elsewhere(self, waiter: Waiter, hashes: bytes, depth: int) -> list[Segment]:
        """What to read of objects and from other instances, from block `depth` on.

        The waiter learns what they were said to have.

        Objects are whole, so the catalog is asked from the beginning of the one on that block `depth` belongs to.
        """
        namespace, blocks = waiter.namespace, len(hashes) // HASH_BYTES
        pool, peers = self._pools.object, self._pools.peers
        k = 1 if pool is None else pool.blocks
        begin, objects_end = depth // k * k, blocks // k * k
        if pool is None or self._is_silent(Tier.OBJECT) or objects_end <= depth:
            pool = None
        if peers is None or depth == blocks or not peers.knows(namespace):
            peers = None
        if pool is None and peers is None:
            waiter.is_in_vain = self._pools.pod is None
            return []
        chain = hashes[begin * HASH_BYTES : (objects_end if peers is None else blocks) * HASH_BYTES]
        asked_from = len(chain) // HASH_BYTES if peers is None else depth - begin
        expected, lot = waiter.expected, max(k, _LOAD_BLOCKS // k * k)
        who = "" if expected is None else expected.instance
        asks = partial(self._found_elsewhere, "" if pool is None else pool.name, namespace, chain, asked_from, who)
        span = None if isinstance(self.locator, Nowhere) else waiter.span
        found = asks() if span is None else _located(span, len(chain) // HASH_BYTES, asks)
        if isinstance(self.locator, Nowhere):
            waiter.is_in_vain = self._pools.pod is None
        elif found is NOTHING_FOUND:
            waiter.why, waiter.is_in_vain = "unanswered", True
        lenders = (
            []
            if peers is None
            else [
                one for one in peers.sources(namespace, found.peers, who) if not self._is_silent(lender(one.instance))
            ]
        )
        if who and not any(one.is_expected for one in lenders):  # it has gone, or cannot be read from
            waiter.is_in_vain = peers is None or not peers.is_busy(who)
        asked = len(hashes) // HASH_BYTES - depth  # a catalog may say more
        sources = [
            FetchSource(depth - begin + min(one.end, asked), one.link, one.together_bytes_per_s) for one in lenders
        ]
        if pool is not None:
            claimed = min(found.claimed, objects_end - begin) // k * k
            sources.append(FetchSource(claimed, self._links.link(self._clock(), OBJECTS, OBJECTS)))
        is_computed = expected is not None and expected.is_sure  # elsewhere
        compute_s = 0.0 if is_computed else self._compute_s(namespace)
        stretches = plan(depth - begin, sources, self._pools.slots[self._target].block_bytes, compute_s, lot)
        said = max((one.end for one in sources), default=0) - (depth - begin)
        if said > sum(end - first for _, first, end in stretches):
            waiter.why = "slower"  # than computing
        waiter.said += max(0, said)
        if expected is not None:  # what is on its way to a lender, behind what is known to be somewhere
            reached = stretches[-1].end if stretches else depth - begin
            most = depth - begin + min(expected.blocks - depth, lot if waiter.is_again else asked)
            of = next((number for number, one in enumerate(lenders) if one.is_expected), None)
            if of is not None and most > reached:
                stretches.append(Stretch(of, reached, most))
        segments: list[Segment] = []
        for number, first, end in stretches:
            for at in range(first // lot * lot, end, lot):
                one, other = begin + max(at, first), begin + min(at + lot, end)
                wanted = hashes[one * HASH_BYTES : other * HASH_BYTES]
                if number < len(lenders):
                    peer = lenders[number]
                    segments.append(Segment(peer.instance, RemoteSource(wanted, peer=peer), wanted))
                else:
                    whole = hashes[one // k * k * HASH_BYTES : -(-other // k) * k * HASH_BYTES]
                    segments.append(Segment(Tier.OBJECT, RemoteSource(whole), wanted))
        return segments

    def _found_elsewhere(self, pool: str, namespace: NamespaceId, chain: bytes, first: int, who: str) -> FoundElsewhere:
        """What of a chain can be read from elsewhere, and where the instance that is named lends, if it does."""
        if not who:
            return self.locator.find(pool, namespace, chain, first, self._locate_s)
        found = self.locator.find(pool, namespace, chain, first, self._locate_s) if pool else NOTHING_FOUND
        begin = first * HASH_BYTES
        named = (
            self._lends_at(namespace, chain[begin : begin + HASH_BYTES], who) if begin < len(chain) else NOTHING_FOUND
        )
        if found is NOTHING_FOUND or named is NOTHING_FOUND:
            return named if found is NOTHING_FOUND else found
        others = [one for one in found.peers if one.instance != who]
        return FoundElsewhere(found.claimed, (*named.peers, *others))

    def _lends_at(self, namespace: NamespaceId, block: bytes, who: str) -> FoundElsewhere:
        """Where an instance lends, of which requests may ask again and again.

        A catalog that is away says nothing of the instance.
        """
        now_s = self._clock()
        with self._lock:
            at_s, known = self._named.get(who, (-math.inf, NOTHING_FOUND))
        if now_s < at_s + _NAMED_S:
            return known
        found = self.locator.find("", namespace, block, 0, self._locate_s, who)
        if found is NOTHING_FOUND:
            return known if now_s < at_s + _NAMED_LONGEST_S else found
        found = FoundElsewhere(0, tuple(msgspec.structs.replace(one, depth=0) for one in found.peers))
        with self._lock:
            self._named.pop(who, None)
            if found.peers:
                self._named[who] = now_s, found
                if len(self._named) > _NAMED_MOST:
                    self._named.popitem(last=False)
        return found

    def _compute_s(self, namespace: NamespaceId) -> float:
        """How long the engine takes to compute a block; 0: not known."""
        rate = self.load.prefill_tokens_per_s
        return self._revisioned.block_tokens.get(namespace, 0) / rate if rate > 0 else 0.0

    # -- threads ------------------------------------------------------------------------------------------------------

    def submit(self, planned: list[PlannedLoad], waiter: Waiter) -> list[InFlightLoad]:
        """Have copies carried out. Outside the lock: an executor may do it at once."""
        begun: list[InFlightLoad] = []
        since_s = 0.0 if waiter.span is None else self._clock()
        for load in planned:
            try:
                begun.append(InFlightLoad(load.copy, self._executor.submit(self._carry_out, load, waiter, since_s)))
            except RuntimeError:  # the manager closes, or there is no thread: it is a miss
                with self._lock:
                    if not self._stream.ended:
                        self._copies.drop_locked(load.copy)
        return begun

    def begin_find(self, runs: Sequence[tuple[NamespaceId, bytes]]) -> Future[list[bytes]]:
        """`find_beyond` in a thread. Raises RuntimeError: the manager closes, or there is no thread."""
        return self._executor.submit(self.find_beyond, runs)

    def look_beyond(self, hashes: bytes, depth: int, waiter: Waiter, begun: list[InFlightLoad]) -> Future[None]:
        """Have what lies beyond the own tiers brought, which end at `depth`; loads are added to `begun` before it has
        ended.

        Raises: RuntimeError: the manager closes, or there is no thread.
        """
        return self._executor.submit(self._look_beyond, hashes, depth, waiter, begun)

    def _look_beyond(self, hashes: bytes, depth: int, waiter: Waiter, begun: list[InFlightLoad]) -> None:
        begun += self.submit(self.plan_remote(hashes, depth, waiter), waiter)
        self._stream.recorded()

    def _carry_out(self, load: PlannedLoad, waiter: Waiter, since_s: float) -> None:
        copy, copies, span = load.copy, self._copies, None
        with self._lock:
            if self._stream.ended or copy.id not in copies.open:  # or it was dropped just as this began
                return
            copies.begin_run_locked(copy)
        try:
            finish: Callable[[Moved], None] = partial(self._finish_locked, load, waiter, self._clock())
            if waiter.span is not None and waiter.span.is_recording:
                values = copy_values(copy, self._pools.slots[self._target].block_bytes)
                values["queued_s"] = round(self._clock() - since_s, 6)  # waited for a thread
                span = CopySpan(waiter.span.child(load_name(copy, copies.is_lent(copy)), values))
                finish = span.noting(finish)
            lane = None
            if not self._is_in_place and self._pools.memory(copy.source) is None:
                lane = copies.staging.take(self._wait_s, is_offload=False)
            copies.carry_out(copy, finish, lane, load.remote)
        finally:
            copies.end_run(copy)
            if span is not None:
                span.end(is_late=not waiter.waiting)

    def _finish_locked(self, load: PlannedLoad, waiter: Waiter, begun_s: float, moved: Moved) -> None:
        """The bytes of a load are in place, or will never be."""
        copy, remote = load
        blocks = split_hashes(copy.hashes)
        if copy.source == Tier.OBJECT and remote is not None:
            outcomes = zip(blocks, moved.outcomes, strict=True)
            good = b"".join(block for block, outcome in outcomes if outcome == ReadOutcome.GOOD)
            self._claims.seen_locked(copy.namespace, remote.objects_of(good, self._pools.object_blocks))
            size = len(good) // HASH_BYTES * self._pools.slots[self._target].block_bytes
            if size:
                self._links.measured(self._clock(), OBJECTS, OBJECTS, size, self._clock() - begun_s)
        is_own = isinstance(copy.source, Tier)
        is_lent = self._copies.is_lent(copy)
        foreign = Tier.HOST if is_lent else Tier.NVME  # pods share no other
        tier = copy.source if isinstance(copy.source, Tier) else foreign
        cause = MigrateCause.ONBOARD if is_own else MigrateCause.FETCH
        holders = self._copies.end_locked(
            copy, self._copies.arrived_locked(copy, moved.arrived), cause, pinned=waiter.waiting
        )
        if waiter.waiting:
            for block, slot in zip(blocks, holders, strict=True):
                if slot is not None:
                    waiter.brought[block] = (slot, tier)
                    if is_lent:
                        waiter.lent.add(block)
        else:
            self._counters.late_copies += 1
            self._counters.peer_late_copies += is_lent
        waiter.is_in_vain |= ReadOutcome.FAILED in moved.outcomes and not is_lent  # it would be read again and again
        self._copies.settle_trouble_locked(copy, moved, remote)


def _located(request: TraceSpan, blocks: int, asks: Callable[[], FoundElsewhere]) -> FoundElsewhere:
    """What the catalog says, in a span that its own names as their parent."""
    span = request.child_question("kvbm.locate", {"blocks": blocks})
    found = NOTHING_FOUND
    try:
        with span.current():
            found = asks()
    finally:
        span.end(
            {
                "outcome": "unanswered" if found is NOTHING_FOUND else "answered",
                "claimed": found.claimed,
                "owners": [one.instance for one in found.peers],
            }
        )
    return found
