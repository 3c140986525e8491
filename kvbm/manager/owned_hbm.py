"""A block manager that owns HBM: an engine asks it for slots to compute in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvbm.core.arguments import MOST_BLOCKS, check_place, check_run, check_seconds, checked_hash, packed_slots
from kvbm.core.checks import check_text, checked_int
from kvbm.core.errors import ArgumentValueError, KvbmError, LedgerError
from kvbm.core.ids import HASH_BYTES, SLOT_BYTES, NamespaceId, Tier, split_slots
from kvbm.core.results import TierCounts
from kvbm.manager.base import BlockManager
from kvbm.manager.onboard.loads import Prefix, Waiter
from kvbm.manager.spans import end_request
from kvbm.pools.hbm.pool import HbmPool
from kvbm.safe_log import RateLimitedLog, SafeLog

if TYPE_CHECKING:
    import torch

    from kvbm.pools.hbm.cuda import Touch

log = SafeLog()


class Manager(BlockManager):
    """A block manager that owns HBM: an engine asks it for slots to compute in.

    `kvbm.open_manager` makes one from settings.

    Every call may come from any thread. What escapes is a bug in the caller: an ArgumentError or a LedgerError, and the
    manager is as it was before.
    """

    _target, _owns_hbm = Tier.HBM, True

    @property
    def hbm(self) -> HbmPool:
        """The HBM pool; its `tensor` is what the engine computes in. Raises LedgerError: the pool has no tensor."""
        pool = self.pools.slots[Tier.HBM]
        if not isinstance(pool, HbmPool):
            raise LedgerError('the HBM pool has no tensor: pools.hbm.device is "memory"; use "auto", "cpu" or "cuda"')
        return pool

    def acquire(
        self, namespace: NamespaceId, hashes: bytes, wait_s: float | None = None, trace: str | None = None
    ) -> Prefix:
        """Bring the longest run of held blocks to HBM and pin it there for the caller.

        Blocks come from this instance's tiers and, beyond those, from the pools of its pod's other instances, and
        beyond those from the object pool where the catalog knows of whole objects. What does not arrive within
        `wait_s`, is corrupt or has no room is a miss from there on; a late copy still ends properly and serves the next
        request. An engine that gives a request up while it waits here, by an exception of a signal's handler, loses no
        more than that time: what has come is unpinned again, and what has not keeps its slots until the device says
        that it is over.

        Args:
            namespace: id of the prompt's namespace, `Namespace.id`; one the manager was opened with, or was told by
                `declare`.
            hashes: n packed hashes of the prompt's blocks, from its first on.
            wait_s: the longest this request waits for bytes; None: as the manager was told. What no thread has begun by
                then is taken back at once.
            trace: a `traceparent` header, of the request's span, where that is not the caller's current one; "" begins
                a trace. It matters where traces are made.
        Returns: slots stay pinned until `unpin`.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        if wait_s is not None:
            check_seconds(wait_s, "wait_s")
        if trace is not None:
            check_text(trace, "trace")
        waiter: Waiter | None = None
        span = None if self._tracing is None else self._begin_span(self._tracing, namespace, hashes, trace)
        try:
            with self._lock:
                self._stream.require_open_locked()
                self._stream.expire_locked(self._clock())
                self._namespaces.use(namespace)
                waiter = Waiter(namespace, hashes, span=span)  # before anything is pinned
                found = waiter.found = self._ledger.match(hashes, True, Tier.HBM, namespace)
                all_in_hbm = found.tiers.count(Tier.HBM) == found.depth
                has_all = all_in_hbm and (not self._loads.looks_beyond or found.depth * HASH_BYTES == len(hashes))
                if has_all:
                    hits = {Tier.HBM: found.depth} if found.depth else {}
                    prefix = Prefix(found.depth, split_slots(found.slots), hits)
                    self._loads.count_locked(namespace, hashes, found.depth, hits)
                else:
                    planned, reachable = self._loads.plan_locked(waiter)
            if not has_all:
                prefix = self._loads.bring(waiter, planned, reachable, self._wait_s if wait_s is None else wait_s)
            if hashes < self._sampled_below:
                self._sample(namespace, hashes, prefix.depth)
            if span is not None:
                wanted, said = len(hashes) // HASH_BYTES, waiter.found.depth + waiter.said
                end_request(span, wanted, prefix.depth, max(said, prefix.depth), prefix.hits, waiter.why)
        except BaseException:  # a signal's handler may raise anything anywhere
            if waiter is not None:
                self._loads.abandon(waiter)
            if span is not None:
                span.end({"outcome": "given_up"})
            raise
        return prefix

    def allocate(self, count: int, namespace: NamespaceId | None = None) -> list[int] | None:
        """HBM slots to write, evicting unpinned blocks if need be; None when there are too few.

        Args:
            count: so many slots, or none at all.
            namespace: id of the namespace whose blocks will be written; it matters where tenants have shares.
        Returns: `count` slots, which are the caller's until `create` or `release`; None is no error: HBM is short,
            because requests have too many blocks pinned. Wait for one to end, or compute without keeping the blocks.
            `stats` counts it, its `pools` say how slots are used, and `hbm.short` in the log says so once in a while.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        count = checked_int(count, "count", most=MOST_BLOCKS)
        if namespace is not None:
            self._check_namespace(namespace)
        allocation = None
        try:
            with self._lock:
                self._stream.require_open_locked()
                self._stream.expire_locked(self._clock())
                allocation = self._ledger.allocate(Tier.HBM, count, namespace)
                used = self._ledger.counts(Tier.HBM) if allocation is None else None
                self._counters.short_allocations += allocation is None
            self._stream.recorded()
            if used is not None:
                self._tell_short(count, used)
            slots = None if allocation is None else split_slots(allocation.slots)
        except BaseException:  # a signal's handler may raise anything anywhere
            if allocation is not None:
                with self._lock:
                    self._ledger.release(Tier.HBM, allocation.slots)
            raise
        return slots

    def create(
        self,
        namespace: NamespaceId,
        parent: bytes,
        start: int,
        hashes: bytes,
        slots: Sequence[int],
        stream: torch.cuda.Stream | torch.cuda.Event | None = None,
    ) -> list[int]:
        """Declare allocated HBM slots full. They stay pinned for the caller.

        Bytes first, then the claim: from this call on the blocks are copied to colder tiers. On a CPU they must be in
        place. On CUDA the work that writes them must be queued before, and `stream` says where; the copy then waits for
        it on the device, and this call does not. Without `stream` it is what the default stream has now. Nothing else
        that is queued is waited for.

        Args:
            namespace: id of the blocks' namespace, `Namespace.id`; one the manager was opened with, or was told by
                `declare`.
            parent: hash of the block before `start`; NO_PARENT where `start` is 0, and only there.
            start: position of the first block in its chain, in blocks.
            hashes: n packed hashes, of the blocks from `start` on.
            slots: the n slots that hold them, as `allocate` gave them.
            stream: on CUDA, the stream on which the blocks are written, or an event recorded behind that. None: the
                default stream, or the caller has waited for the device. Of no account on a CPU.
        Returns: the slot that holds each block; not the given one where the block was held already.
        Raises: ArgumentError: an argument that cannot be used, such as a slot that HBM has not. LedgerError: a slot is
            not allocated or is a copy's, a hash or a slot is given twice, a block is held under another namespace, or
            the manager is closed.
        """
        self._check_namespace(namespace)
        before, start = checked_hash(parent, "parent"), checked_int(start, "start", most=MOST_BLOCKS - 1)
        given = self._packed(slots)
        check_place(before, start)
        self._check_blocks(start, hashes, given)
        touch = self._recorded(stream)
        with self._lock:
            self._stream.require_open_locked()
            self._touched_locked(given, touch)  # first: a signal's handler may raise anything behind the ledger's call
            try:
                holders = self._ledger.create(namespace, Tier.HBM, before, start, hashes, given)
            except LedgerError as error:
                raise self._named(error, given) from None
            self._namespaces.use(namespace)
            self._counters.created_blocks += len(given) // SLOT_BYTES
            self._offloader.offer(namespace, Tier.HBM, hashes, 1, parent, start)
        self._stream.recorded()
        return split_slots(holders)

    def unpin(self, slots: Sequence[int], stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
        """The caller no longer uses these blocks of HBM.

        Args:
            slots: in prompt order: of a prompt, the deepest block leaves first. Each loses one pin.
            stream: as in `create`: where the work is that still reads them; a copy into these slots waits for it.
        Raises: ArgumentError: a slot that HBM has not, or no list of slots. LedgerError: a slot is not pinned.
        """
        given = self._packed(slots)
        touch = self._recorded(stream)
        with self._lock:
            self._touched_locked(given, touch)
            try:
                self._ledger.unpin(Tier.HBM, given)
            except LedgerError as error:
                raise self._named(error, given) from None

    def release(self, slots: Sequence[int], stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
        """Give back allocated HBM slots in which no block was created.

        Args:
            stream: as in `create`: where the work is that still touches them; a copy into these slots waits for it.
        Raises: ArgumentError: a slot that HBM has not, or no list of slots. LedgerError: a slot is not allocated.
        """
        given = self._packed(slots)
        touch = self._recorded(stream)
        with self._lock:
            self._touched_locked(given, touch)
            try:
                self._ledger.release(Tier.HBM, given)
            except LedgerError as error:
                raise self._named(error, given) from None

    # -- inside -------------------------------------------------------------------------------------------------------

    @cached_property
    def _shortages(self) -> RateLimitedLog:
        return RateLimitedLog()

    def _tell_short(self, wanted: int, counts: TierCounts) -> None:
        """Why there are no slots, in numbers, not each time."""
        more = self._shortages.due("hbm.short")
        if more is not None:
            log.info(
                "hbm.short",
                instance=self.instance,
                wanted=wanted,
                slots=counts.slots,
                free=counts.free,
                evictable=counts.evictable,
                allocated=counts.allocated,
                pinned_or_kept=counts.held - counts.evictable,
                not_said_before=more,
                remedy="unpin what requests that are over have, let others end first, or raise pools.hbm.slots",
            )

    def _packed(self, slots: Sequence[int]) -> bytes:
        """Slots of a caller as the ledger takes them. Raises ArgumentError: they are no list of slots."""
        return packed_slots(slots, self.pools.slots[Tier.HBM].slots)

    def _check_blocks(self, start: int, hashes: bytes, slots: bytes) -> None:
        """Refuse a run whose hashes and slots do not go together. Raises ArgumentError."""
        check_run(hashes)
        blocks, given = len(hashes) // HASH_BYTES, len(slots) // SLOT_BYTES
        if blocks != given:
            raise ArgumentValueError("slots", f"has {given} entries for {blocks} hashes; give one slot a block")
        if start + blocks > MOST_BLOCKS:
            raise ArgumentValueError("start", f"is {start}, for {blocks} blocks; a chain has at most {MOST_BLOCKS}")

    def _recorded(self, stream: torch.cuda.Stream | torch.cuda.Event | None) -> Touch | None:
        """A caller's work as it is now; None on a CPU. Raises ArgumentTypeError."""
        pool = self.pools.slots[Tier.HBM]
        return pool.recorded(stream) if isinstance(pool, HbmPool) else None

    def _touched_locked(self, given: bytes, touch: Touch | None) -> None:
        """Copies from and to these slots wait for this work from now on, also where the call is refused then."""
        pool = self.pools.slots[Tier.HBM]
        if isinstance(pool, HbmPool) and pool.has_order:
            pool.touched(split_slots(given), touch)

    def _named(self, error: LedgerError, given: bytes) -> KvbmError:
        """Why a run of slots was refused: a slot that the pool does not have, or else the ledger's own word."""
        count = self.pools.slots[Tier.HBM].slots
        beyond = next((slot for slot in split_slots(given) if slot >= count), None)
        if beyond is None:
            return error
        return ArgumentValueError("slots", f"has slot {beyond}; each must be 0 to {count - 1}, the slots of the pool")
