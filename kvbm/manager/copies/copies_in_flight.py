"""Copies between two tiers, from the moment the ledger has begun one until its slots are free again.

The ledger gives both ends of a copy to it. What begins here ends here: with its bytes in place, or with nothing, or
never, where a device does not say what became of it. Then its slots, its lane and its pools stay as they are, because
the device may still write them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbm.core.events import EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, SLOT_BYTES, InstanceId, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.results import Copy
from kvbm.manager.copies.staging import Staging
from kvbm.manager.copies.transfer import Moved, Pools, RemoteSource, move
from kvbm.manager.copies.workers import Workers
from kvbm.manager.counters import Counters
from kvbm.manager.objects.claim_watch import ClaimWatch
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.offsets import Offsets
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme.pool import NvmePool
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan

log = SafeLog()

_WITHDRAWN_FOR = {ReadOutcome.CORRUPT: EvictReason.CORRUPT, ReadOutcome.MISSING: EvictReason.MISSING}

_unended: list[
    Pools
] = []  # of closed managers: a device may still write their memory, so it is kept until the process is gone


class KeepRule(NamedTuple):
    """How blocks are kept; see `BlockManager.keep`. `until_s` is on the manager's clock."""

    until_s: float
    priority: int
    until_read: bool
    most: int | None

    def joined(self, other: KeepRule) -> KeepRule:
        """Both, as a block's two keeps are one; `most` is the other's."""
        until_s, priority = max(self.until_s, other.until_s), max(self.priority, other.priority)
        return KeepRule(until_s, priority, self.until_read and other.until_read, other.most)


class CopiesInFlight:
    """The copies of one manager that have begun and may still end.

    Args:
        target: the tier that requests wait for blocks in.
        executor: carries out loads; threads of `Workers` are replaced while they are stuck.
        on_room: called under the lock when a copy has ended, for what waits for its room.
        wait_s: the longest a copy waits until what its slots held is durably withdrawn.

    Attributes:
        running: copies whose bytes move now.
        late: those of them whose request has gone on.
        quarantined: copies that broke: nobody knows whether their bytes still move.
        coming: blocks on their way to the target tier → the copy.
        open: ids of copies that have begun and may still end.
        stores: those of them that an engine's workers carry out, and how their blocks are kept from their arrival on.
        store_spans: of these, where they are traced.
        cancellations: how often all of them were cancelled.
        staging: memory for copies that need a place between their ends.
    """

    def __init__(
        self,
        stream: LedgerStream,
        pools: Pools,
        target: Tier,
        offsets: Offsets,
        staging: Staging,
        executor: Executor,
        on_room: Callable[[], None],
        claims: ClaimWatch,
        counters: Counters,
        wait_s: float,
    ) -> None:
        self.target, self.staging, self.pools = target, staging, pools
        self._stream, self._ledger, self._lock = stream, stream.ledger, stream.lock
        self._offsets, self._executor, self._on_room = offsets, executor, on_room
        self._claims, self._counters, self._wait_s = claims, counters, wait_s
        self.running: dict[int, Copy] = {}
        self.late: dict[int, Copy] = {}
        self._replaced: set[int] = set()  # late copies for whose thread another may be begun
        self.quarantined: dict[int, Copy] = {}
        self.coming: dict[SequenceHash, int] = {}
        self.open: set[int] = set()
        self.stores: dict[int, KeepRule | None] = {}
        self.store_spans: dict[int, TraceSpan] = {}
        self.cancellations = 0
        self._cancelled: set[int] = set()  # open copies whose blocks must not arrive
        self._of_peers: set[int] = set()  # copies from instances that lend
        self._stamps: dict[int, int] = {}  # of open copies to NVME: the pool's generation when they began
        self._left_open = False  # the last copy that ends closes the pools

    # -- in the ledger ------------------------------------------------------------------------------------------------

    def begin_locked(
        self,
        namespace: NamespaceId,
        source: Tier | InstanceId,
        target: Tier,
        hashes: bytes,
        is_lent: bool = False,
        begun: list[Copy] | None = None,
    ) -> Copy | None:
        """As `Ledger.begin_copy`. An exception, a signal's handler's for one, ends the copy again.

        Args:
            is_lent: the source is an instance that lends, not its file in the pod's folder.
            begun: gets the copy as well, so that whoever is interrupted before it has the result can end it.
        """
        copy = self._ledger.begin_copy(namespace, source, target, hashes)
        try:
            if copy is not None:
                self.open.add(copy.id)
                if is_lent:
                    self._of_peers.add(copy.id)
                if isinstance(pool := self.pools.slots.get(target), NvmePool):
                    self._stamps[copy.id] = pool.stamp
                if target == self.target and source != Tier.HBM:  # what an engine stores it has itself
                    self.coming.update(dict.fromkeys(split_hashes(copy.hashes), copy.id))
                if begun is not None:
                    begun.append(copy)
        except BaseException:
            if copy is not None:
                self.drop_locked(copy)
            raise
        return copy

    def end_locked(
        self, copy: Copy, arrived: Sequence[bool], cause: MigrateCause, pinned: bool = False, kept: bool = True
    ) -> list[int | None]:
        """As `Ledger.end_copy`."""
        self._bring_no_more_locked(copy)
        self._cancelled.discard(copy.id)
        self._stamps.pop(copy.id, None)
        try:  # whoever was interrupted before may do it again, and nobody after
            return self._ledger.end_copy(copy, arrived, cause, kept=kept, pinned=pinned)
        finally:
            self.open.discard(copy.id)

    def drop_locked(self, copy: Copy, cause: MigrateCause = MigrateCause.ONBOARD) -> None:
        """End a copy that brings nothing."""
        if copy.id not in self.running:
            self._of_peers.discard(copy.id)
        self.end_locked(copy, [False] * (len(copy.hashes) // HASH_BYTES), cause)

    def end_unended(self, copy: Copy, cause: MigrateCause) -> None:
        """End a copy that an error has left open, with nothing: nobody moves its bytes. Outside the lock."""
        with self._lock:
            if copy.id in self.open and not self._stream.ended:
                self.drop_locked(copy, cause)

    def cancel_all_locked(self) -> None:
        """No block of the copies that are open may arrive."""
        self.cancellations += 1
        self._cancelled |= self.open

    def arrived_locked(self, copy: Copy, there: list[bool]) -> list[bool]:
        """Which blocks of a copy may count as arrived: none where it was cancelled."""
        return [False] * len(there) if copy.id in self._cancelled else there

    def settle_trouble_locked(self, copy: Copy, moved: Moved, remote: RemoteSource | None = None) -> None:
        """Withdraw what proved corrupt or missing, and count; after the copy has ended."""
        if copy.source not in (Tier.HBM, Tier.HOST):
            self._counters.verified_reads += moved.outcomes.count(ReadOutcome.GOOD)
        blocks = split_hashes(copy.hashes)
        self._counters.corrupt_blocks += moved.outcomes.count(ReadOutcome.CORRUPT)
        for outcome, reason in _WITHDRAWN_FOR.items():
            bad = b"".join(block for block, o in zip(blocks, moved.outcomes, strict=True) if o == outcome)
            if not bad or not isinstance(copy.source, Tier):  # what a peer has overwritten is its own affair
                continue
            if copy.source == Tier.OBJECT:
                assert remote is not None
                gone = b"".join(remote.objects_of(bad, self.pools.object_blocks))
                self._claims.lost_locked(copy.namespace, gone, reason)
            else:
                self._ledger.evict(copy.source, bad, reason)
        is_unread = ReadOutcome.FAILED in moved.outcomes and not self.is_lent(copy)  # such reads `peers` counts
        if is_unread or moved.unwritten:
            self._counters.failed_copies += 1

    def _expect_no_more_locked(self, copy: Copy) -> None:
        """Nobody need wait for a copy any more."""
        self.open.discard(copy.id)
        self._bring_no_more_locked(copy)

    def _bring_no_more_locked(self, copy: Copy) -> None:
        if copy.target == self.target:
            for block in split_hashes(copy.hashes):
                self.coming.pop(block, None)

    # -- its bytes ----------------------------------------------------------------------------------------------------

    def begin_run_locked(self, copy: Copy) -> None:
        """The bytes of a copy move from now on."""
        self.running[copy.id] = copy

    def carry_out(
        self,
        copy: Copy,
        finish: Callable[[Moved], None],
        lane: np.ndarray | None = None,
        remote: RemoteSource | None = None,
    ) -> None:
        """Move the bytes of a copy and call `finish` under the lock.

        A pool that raises has broken its promise: nobody knows whether its bytes still move. So the copy keeps its
        slots and its lane, the request sees a miss, and the thread goes on.
        """
        try:
            moved = move(copy, self.pools, self._offsets, self._wait_s, lane, remote, self._stamps.get(copy.id))
            with self._lock:
                if not self._stream.ended:
                    finish(moved)
        except Exception:
            with self._lock:
                self._counters.failed_copies += 1
                self.quarantined[copy.id] = copy
                self._expect_no_more_locked(copy)
            with suppress(OSError):  # the log may lie on a disk that is full
                log.exception(
                    "copy.broke", target=copy.target.name, blocks=len(copy.hashes) // HASH_BYTES, remedy="report it"
                )
        else:
            if lane is not None:
                self.staging.give(lane)
            if moved.unwritten or moved.outcomes.count(ReadOutcome.GOOD) < len(moved.outcomes):
                with suppress(OSError):
                    _log_trouble(copy, moved, self._claims.pool_forgets, remote is not None and remote.peer is not None)
        self._stream.recorded()

    def mark_late_locked(self, copy: Copy) -> None:
        """The request of a running copy has gone on. Whoever was interrupted in it may do it again."""
        if isinstance(self._executor, Workers) and copy.id not in self._replaced:
            self._replaced.add(copy.id)
            try:
                self._executor.replace_stuck()
            except BaseException:  # a signal's handler's
                self._replaced.discard(copy.id)
                raise
        self.late[copy.id] = copy

    @property
    def late_from(self) -> Counter[Tier | InstanceId]:
        """Late copies by source."""
        return Counter(map(self._place, list(self.late.values()))) if self.late else Counter()

    def end_run(self, copy: Copy) -> None:
        """The bytes do not move any more, or nobody knows.

        Who ends last after the manager has closed closes the pools.
        """
        with self._lock:
            self.running.pop(copy.id, None)
            self.late.pop(copy.id, None)
            if copy.id in self._replaced and isinstance(self._executor, Workers):
                self._replaced.discard(copy.id)
                self._executor.reclaim()
            self._of_peers.discard(copy.id)
            self._on_room()
            is_last = self._left_open and not self.running
            if is_last:
                self._left_open = False
            is_unsure = bool(self.quarantined)
        if is_last:
            if is_unsure:
                _unended.append(self.pools)
            else:
                self.pools.close()
                self.staging.close()

    def is_lent(self, copy: Copy) -> bool:
        """Whether its source is an instance that lends."""
        return copy.id in self._of_peers

    def _place(self, copy: Copy) -> Tier | InstanceId:
        return lender(InstanceId(copy.source)) if self.is_lent(copy) and isinstance(copy.source, str) else copy.source

    def close_pools(self) -> int:
        """Close the pools, or leave that to the last copy. Returns how many copies have not ended."""
        with self._lock:
            still, broken = len(self.running), len(self.quarantined)
            self._left_open = bool(still)
        if broken:
            _unended.append(self.pools)
        if not still and not broken:
            self.pools.close()
            self.staging.close()
        return still + broken


def lender(instance: InstanceId) -> InstanceId:
    """What an instance that lends is called where late reads are counted: its file in the pod's folder is read another
    way.
    """
    return InstanceId(f"peer {instance}")


def slots_held(copies: Iterable[Copy]) -> int:
    """Slots at both ends of copies."""
    return sum(len(copy.source_slots) + len(copy.target_slots) for copy in copies) // SLOT_BYTES


def name_of(source: Tier | InstanceId) -> str:
    """A source in words."""
    return source.name if isinstance(source, Tier) else source


def _log_trouble(copy: Copy, moved: Moved, objects_go: bool, is_lent: bool) -> None:
    """One warning for each kind of trouble of a copy. Outside the lock: whoever reads the log may be slow.

    Args:
        is_lent: the source is an instance that lends: what fails there is warned of where it is read.
        objects_go: the object pool forgets, and an object that is gone is no trouble.
    """
    source = name_of(copy.source)
    for outcome, reason in _WITHDRAWN_FOR.items():
        if copy.source == Tier.OBJECT and outcome == ReadOutcome.MISSING and objects_go:
            continue
        if isinstance(copy.source, Tier) and (count := moved.outcomes.count(outcome)):
            first = split_hashes(copy.hashes)[moved.outcomes.index(outcome)]
            log.warning("block.withdrawn", tier=source, reason=reason.name.lower(), blocks=count, first=first[:4].hex())
    failed = 0 if is_lent else moved.outcomes.count(ReadOutcome.FAILED)
    if failed or moved.unwritten:
        why = moved.unwritten or "read failed"
        log.warning("copy.failed", source=source, target=copy.target.name, unread_blocks=failed, why=why)
