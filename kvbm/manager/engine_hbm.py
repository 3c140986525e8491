"""A block manager for an engine that owns HBM: the engine says what it holds there, and HOST is where its blocks come and go.

What the engine's own prefix cache gains and loses is recorded as residencies in HBM, in slots that only the ledger knows. They tell
routers where a prompt is warm, and no byte of them is ever read here. Between HBM and HOST the engine's workers copy, in rows of the HOST
pool's memory that they map (`pools/host/mapping.py`); everything colder is the manager's own affair, as ever.

    store     begin_store → workers fill the rows → end_store: checksums first, then the claim
    acquire   begin_acquire → poll `done` → workers read the rows of `slots` → release

Neither call waits: an engine's scheduler asks again at its next step. A store that is never ended keeps its rows, because a worker may
still write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import structlog

from kvbm.core.arguments import MOST_BLOCKS, check_run, check_seconds, checked_hash
from kvbm.core.checks import checked_int, kind_of
from kvbm.core.copies import Copy
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError, LedgerError, PoolError
from kvbm.core.events import EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, pack_slots, split_hashes, split_slots
from kvbm.core.ledger import Match
from kvbm.manager.chain_runs import ChainRun
from kvbm.manager.manager import Arrivals, Manager, Onboard, Planned, Prefix
from kvbm.manager.offload_queue import Skipped
from kvbm.pools.base import Proof
from kvbm.pools.hbm.pool import HbmPool

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()

_CLEARED_BLOCKS = 8192  # withdrawn at a time, so that nobody waits long for the lock


class Store(NamedTuple):
    """Blocks on their way from the engine's HBM to HOST.

    Attributes:
        hashes: packed, of those blocks of the run that HBM holds, HOST lacks and nobody brings.
        slots: the HOST slot of each, to be filled.
        at: index of each in the run.
        start: position of the run in its chain, in blocks.
    """

    copy: Copy
    hashes: bytes
    slots: list[int]
    at: list[int]
    start: int


class Acquiring:
    """Blocks on their way to HOST for one request. One thread at a time.

    Attributes:
        depth: blocks of the run, from its first on, that lie in HOST now, pinned until `release`; final once done, as all here.
        hits: how many of them were found in each tier.
    """

    def __init__(
        self, manager: EngineHbmManager, namespace: NamespaceId, hashes: bytes, first: int, deadline_s: float
    ) -> None:
        self.depth = 0
        self._slots = b""  # packed
        self.hits: dict[Tier, int] = {}
        self.namespace, self.hashes, self.first, self.deadline_s = namespace, hashes, first, deadline_s
        self._manager = manager
        self._is_over = False
        self._is_released = False
        self._clears = manager._clears  # nothing that was cleared meanwhile may be had
        self._found = Match(0, b"", b"")
        self._arrivals = Arrivals()
        self._begun: list[Onboard] = []
        self._ended = 0  # of those begun, so many have ended, from the first on
        self._look: Future[None] | None = None  # beyond the own tiers; it adds to `_begun` before it ends

    @property
    def slots(self) -> list[int]:
        """The HOST slot of each block."""
        return split_slots(self._slots)

    @property
    def done(self) -> bool:
        """Whether it is over: nothing is under way any more, or the time is up. Never waits; ask again."""
        return self._is_over or self._manager._poll(self)

    def release(self) -> None:
        """Unpin the blocks. Before it is done this gives it up: copies under way end by themselves. Idempotent."""
        self._manager._release(self)

    @property
    def next_block(self) -> bytes:
        """The block behind those that have come; empty where they are all."""
        at = (self.first + self.depth) * HASH_BYTES
        return self.hashes[at : at + HASH_BYTES]

    def _is_under_way(self, open_copies: set[int]) -> bool:
        if self._look is not None and not self._look.done():
            return True
        while self._ended < len(self._begun) and self._begun[self._ended].ended.done():
            self._ended += 1
        return self._ended < len(self._begun) or not self._arrivals.others.isdisjoint(open_copies)


class EngineHbmManager(Manager):
    """A `Manager` whose HBM is the engine's. `kvbm.assembly.open_engine_manager` makes one from settings."""

    _front = Tier.HOST
    _clears = 0  # how often it was cleared

    # -- what the engine holds in HBM -----------------------------------------------------------------------------------

    def engine_stored(self, namespace: NamespaceId, parent: bytes, start: int, hashes: bytes) -> int:
        """The engine holds these blocks in HBM now. Where it keeps a block twice, only the first and the last copy speak.

        Args:
            namespace: id of the blocks' namespace, one the manager knows.
            parent: hash of the block before `start`, or NO_PARENT.
            start: position of the first block in its chain, in blocks.
            hashes: packed, of the blocks from `start` on.
        Returns: how many of them it was known to hold already.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        start = self._check_chain(namespace, parent, start, hashes)
        surplus = 0
        with self._lock:
            self._require_open()
            self._namespaces.setdefault(namespace)
            blocks = split_hashes(hashes)
            fresh = set(split_hashes(self._ledger.lacking(Tier.HBM, hashes)))
            duplicates, room = len(blocks) - len(fresh), self._ledger.counts(Tier.HBM).free
            for begin, end in _runs(blocks, fresh):
                count = min(end - begin, room)
                surplus += end - begin - count
                room -= count
                before = blocks[begin - 1] if begin else parent
                self._gain(namespace, before, start + begin, blocks[begin : begin + count])
            self._engine_duplicates += duplicates
            self._engine_surplus, is_first = self._engine_surplus + surplus, surplus and not self._engine_surplus
        self._wake_writer()
        if is_first:
            log.warning(
                "engine.beyond_capacity", instance=self.instance, blocks=surplus, slots=self.pools.slots[Tier.HBM].slots,
                remedy="give pools.hbm.slots as many as the engine has blocks; what is beyond is not recorded",
            )  # fmt: skip
        return duplicates

    def _gain(self, namespace: NamespaceId, parent: bytes, start: int, blocks: list[SequenceHash]) -> None:
        """Record blocks, which HBM lacks and has room for. Under the lock."""
        if not blocks:
            return
        room = self._ledger.allocate(Tier.HBM, len(blocks), namespace)
        assert room is not None
        self._ledger.create(namespace, Tier.HBM, SequenceHash(parent), start, b"".join(blocks), room.slots)
        self._ledger.unpin(Tier.HBM, room.slots)
        self._created += len(blocks)

    def engine_removed(self, hashes: bytes, reason: EvictReason = EvictReason.CAPACITY) -> int:
        """The engine no longer holds these blocks in HBM, in any copy. Returns how many it was known to hold.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        return self.evict(Tier.HBM, hashes, reason)

    def engine_cleared(self) -> int:
        """The engine has dropped its whole prefix cache. Returns how many blocks it was known to hold.

        Raises: LedgerError: the manager is closed.
        """
        return self._clear(Tier.HBM)

    # -- asking, bringing, storing --------------------------------------------------------------------------------------

    def holders(self, hashes: bytes) -> bytes:
        """For each block the hottest own tier colder than HBM that holds it, one byte each, 0xFF where none does.

        Raises: ArgumentError: `hashes` is no packed run.
        """
        check_run(hashes)
        with self._lock:
            return self._ledger.holders(hashes, hottest=Tier.HOST)

    def begin_acquire(
        self, namespace: NamespaceId, hashes: bytes, wait_s: float | None = None, first: int = 0
    ) -> Acquiring:
        """Begin to bring the longest run of held blocks to HOST, pinned there for the caller.

        As `Manager.acquire`, and it does not wait: what lies in HOST is pinned at once, what lies in NVME, in the pod or in the
        object pool is brought by threads. Blocks that another request brings are waited for.

        Args:
            hashes: n packed hashes of a prompt's blocks, from its first on. Only without an object pool may they begin later.
            wait_s: after which what has come counts; None: as the manager was told.
            first: blocks of the prompt that the engine has in HBM itself; the run begins behind them.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        first = checked_int(first, "first", most=len(hashes) // HASH_BYTES)
        if wait_s is not None:
            check_seconds(wait_s, "wait_s")
        deadline_s = self._clock() + (self._wait_s if wait_s is None else wait_s)
        with self._lock:
            self._require_open()
            self._expire()
            self._namespaces.setdefault(namespace)
            acquiring = Acquiring(self, namespace, hashes, first, deadline_s)
            planned, looks = self._plan(acquiring)
            is_under_way = bool(planned or looks or acquiring._arrivals.others)
            if is_under_way:
                self._begin_waiting()
            else:
                self._collect_for(acquiring)
                self._finish(acquiring)
        if is_under_way:
            self._set_out(acquiring, planned, looks)
        else:
            self._offer_sample(acquiring)
        return acquiring

    def storable(self, namespace: NamespaceId, start: int, count: int) -> int:
        """How many blocks of a run HOST has room for now; the rest is worth another look once stores or offloads have ended.

        Beyond what HOST can hold of a prompt it has room only as fast as blocks go on to what is colder.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        self._check_namespace(namespace)
        start = checked_int(start, "start", most=MOST_BLOCKS - 1)
        count = checked_int(count, "count", most=MOST_BLOCKS - start)
        with self._lock:
            counts = self._ledger.counts(Tier.HOST)
            room = counts.free + counts.evictable
            self._require_open()
            run = ChainRun(bytes(count * HASH_BYTES), start)
            if self._offloader.passes_through(namespace, Tier.HOST, run, self._clock()):
                room = self._room_to_pass()
            return max(0, min(count, room))

    def begin_store(
        self, namespace: NamespaceId, parent: bytes, start: int, hashes: bytes, uses: int = 1
    ) -> Store | None:
        """Take HOST slots for blocks of the engine's HBM that its workers will copy there, evicting unpinned blocks if need be.

        Both ends are the copy's until `end_store`: the engine must not overwrite the blocks before. Where HOST is short, the run is
        cut to what fits.

        Args:
            parent, start: as `engine_stored`. Runs of a chain in its order, so that objects of several blocks become whole.
            uses: 1 for what was just computed, 2 for what was used again; `offload.host` says what is wanted.
        Returns: None where nothing is to be copied, or nothing fits.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        start = self._check_chain(namespace, parent, start, hashes)
        uses = checked_int(uses, "uses", least=1)
        with self._lock:
            self._require_open()
            self._expire()
            self._offer(namespace, Tier.HBM, hashes, uses, parent, start)
            wanted = self._wanted_in_host(namespace, hashes, uses, start)
            copy = self._begin_copy(namespace, Tier.HBM, Tier.HOST, wanted) if wanted else None
            if copy is not None:
                self._begin_run(copy)
                self._stores.add(copy.id)
                self._engine_stores += 1
        self._wake_writer()
        if copy is None:
            return None
        index = {block: at for at, block in enumerate(split_hashes(hashes))}
        at = [index[block] for block in split_hashes(copy.hashes)]
        return Store(copy, copy.hashes, split_slots(copy.target_slots), at, start)

    def end_store(self, store: Store, arrived: Sequence[bool], checksums: np.ndarray) -> None:
        """All ranks have answered: nobody writes the slots any more.

        Args:
            arrived: for each block of the store whether its whole row is in place.
            checksums: CRC-32C of each row, u32; those of rows that have not arrived mean nothing.
        Raises: ArgumentError: no Store, or columns of another length or type. LedgerError: it has ended already.
        """
        if not isinstance(store, Store):
            raise ArgumentTypeError(
                "store", f"is {kind_of(store)}; give what begin_store returned, unless that is None"
            )
        copy, blocks = store.copy, split_hashes(store.hashes)
        _check_column("arrived", arrived, len(blocks))
        _check_column("checksums", checksums, len(blocks))
        if getattr(getattr(checksums, "dtype", None), "kind", "u") not in "iu":
            raise ArgumentTypeError("checksums", f"is an array of {checksums.dtype}; give u32")
        with self._lock:
            if copy.id not in self._stores:
                raise LedgerError(f"store {copy.id} is not under way; it ends once")
            self._stores.discard(copy.id)
        try:
            self._end_store(store, list(arrived), checksums)
        finally:
            self._end_run(copy)
        self._wake_writer()

    def refresh(self, hashes: bytes) -> None:
        """A request that used this chain is over: in HOST its beginning counts as used last, its deepest block before all others.

        What was loaded or stored first would else leave first, and a chain without its beginning is of no use. A use it counts
        as, so only for policies that go by recency.

        Raises: ArgumentError: `hashes` is no packed run. LedgerError: the manager is closed.
        """
        check_run(hashes)
        with self._lock:
            self._require_open()
            found = self._ledger.match(hashes, pinned=True, hottest=Tier.HOST)
            slots = found.slots
            if found.tiers.count(Tier.HOST) < found.depth:
                both = zip(found.tiers, split_slots(slots), strict=True)
                slots = pack_slots(slot for tier, slot in both if tier == Tier.HOST)
            self._ledger.unpin(Tier.HOST, slots)

    def clear(self) -> int:
        """Empty HOST and NVME, with reason `cleared`, and forget what was to be offloaded. Returns how many blocks they held.

        What is pinned keeps its slots until it is released, what is on its way does not arrive, and what requests wait for they do
        not get. Objects stay, and so does what other instances of the pod have.
        Raises: LedgerError: the manager is closed.
        """
        with self._lock:
            self._require_open()
            self._clears += 1
            self._barred |= self._open
            self._offloader.forget()
        return sum(self._clear(tier) for tier in (Tier.HOST, Tier.NVME) if tier in self.pools.slots)

    # -- what such a manager does not do ----------------------------------------------------------------------------------

    @property
    def hbm(self) -> HbmPool:
        """Raises LedgerError: it is the engine's."""
        self._refuse("copy between its tensors and HOST")

    def acquire(self, namespace: NamespaceId, hashes: bytes, wait_s: float | None = None) -> Prefix:
        """Raises LedgerError: HBM is the engine's."""
        self._refuse("use begin_acquire")

    def allocate(self, count: int, namespace: NamespaceId | None = None) -> list[int] | None:
        """Raises LedgerError: HBM is the engine's."""
        self._refuse("let the engine allocate")

    def create(
        self,
        namespace: NamespaceId,
        parent: bytes,
        start: int,
        hashes: bytes,
        slots: Sequence[int],
        stream: torch.cuda.Stream | torch.cuda.Event | None = None,
    ) -> list[int]:
        """Raises LedgerError: HBM is the engine's."""
        self._refuse("use engine_stored")

    def unpin(self, slots: Sequence[int], stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
        """Raises LedgerError: HBM is the engine's."""
        self._refuse("use Acquiring.release")

    def release(self, slots: Sequence[int], stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
        """Raises LedgerError: HBM is the engine's."""
        self._refuse("let the engine free its blocks")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _refuse(self, instead: str) -> NoReturn:
        raise LedgerError(f'pools.hbm.owner is "engine", so kvbm has no HBM slots to give; {instead}')

    def _check_chain(self, namespace: NamespaceId, parent: bytes, start: int, hashes: bytes) -> int:
        """Refuse what is no run of a chain; gives `start`. Raises ArgumentError."""
        self._check_namespace(namespace)
        checked_hash(parent, "parent")
        check_run(hashes)
        return checked_int(start, "start", most=MOST_BLOCKS - len(hashes) // HASH_BYTES)

    def _clear(self, tier: Tier) -> int:
        """Withdraw all that a tier holds now."""
        with self._lock:
            self._require_open()
            held = self._ledger.held(tier)
        count, run_bytes = 0, _CLEARED_BLOCKS * HASH_BYTES
        for at in range(0, len(held), run_bytes):
            with self._lock:
                count += self._ledger.evict(tier, held[at : at + run_bytes], EvictReason.CLEARED)
            self._wake_writer()
        return count

    def _wanted_in_host(self, namespace: NamespaceId, hashes: bytes, uses: int, start: int) -> bytes:
        """As much of a run as HOST should get now. Under the lock."""
        if not self._offloader.wants(Tier.HOST, uses):
            return b""
        run, beyond = self._offloader.within(namespace, Tier.HOST, ChainRun(hashes, start))
        if beyond.hashes:
            self._offloader.skip(Skipped.BEYOND, self._ledger.lacking(Tier.HOST, beyond.hashes))
        return run.hashes

    def _end_store(self, store: Store, arrived: list[bool], checksums: np.ndarray) -> None:
        """Bytes first, then the claim."""
        copy, blocks, why = store.copy, split_hashes(store.hashes), ""
        kept = [at for at, ok in enumerate(arrived) if ok]
        if kept:
            proof = Proof(
                copy.namespace, copy.epoch, b"".join(blocks[at] for at in kept),
                np.ascontiguousarray(checksums[kept], dtype=np.uint32),
            )  # fmt: skip
            try:
                self.pools.slots[Tier.HOST].seal([store.slots[at] for at in kept], proof)
            except PoolError as error:
                arrived, why = [False] * len(blocks), str(error)
        with self._lock:
            if not all(arrived):
                self._failed += 1
            if not self._source.ended:
                holders = self._end_copy(copy, self._arrived(copy, arrived), MigrateCause.OFFLOAD)
                there = b"".join(block for block, slot in zip(blocks, holders, strict=True) if slot is not None)
                self._offloaded[Tier.HOST] += len(there) // HASH_BYTES
                positions = dict(zip(blocks, (store.start + at for at in store.at), strict=True))
                self._offer_arrived(
                    copy.namespace, Tier.HOST, there, [positions[block] for block in split_hashes(there)]
                )
        if not all(arrived):
            with suppress(OSError):
                log.warning(
                    "copy.failed",
                    source="HBM",
                    target="HOST",
                    unread_blocks=arrived.count(False),
                    why=why or "a worker failed",
                )

    def _plan(self, acquiring: Acquiring) -> tuple[list[Planned], bool]:
        """Pin what lies in HOST behind what has come so far, and begin copies of what own tiers have. Under the lock.

        Returns: the copies, and whether to look beyond the own tiers.
        """
        at = acquiring.first + acquiring.depth
        rest = acquiring.hashes[at * HASH_BYTES :]
        found = self._ledger.match(rest, pinned=True, hottest=Tier.HOST)
        arrivals = Arrivals()
        acquiring._found, acquiring._arrivals, acquiring._begun, acquiring._ended = found, arrivals, [], 0
        acquiring._look = None
        planned, reachable = self._begin_onboards(acquiring.namespace, rest, found, arrivals)
        looks = reachable == found.depth and found.depth * HASH_BYTES < len(rest) and self._may_lie_beyond(acquiring)
        return planned, looks

    def _may_lie_beyond(self, acquiring: Acquiring) -> bool:
        """Whether there is a pool beyond the own tiers that could have the next block. Under the lock."""
        if self.pools.pod is not None or self.pools.object is None:
            return self.pools.pod is not None
        depth, k = acquiring.first + acquiring.depth + acquiring._found.depth, self.pools.object_blocks
        return len(acquiring.hashes) // HASH_BYTES // k * k > depth

    def _set_out(self, acquiring: Acquiring, planned: list[Planned], looks: bool) -> None:
        """Have copies carried out, and other pools looked into. Outside the lock."""
        acquiring._begun = self._submit(planned, acquiring._arrivals)
        if looks:
            with suppress(RuntimeError):  # the manager closes
                acquiring._look = self._onboarders.submit(
                    self._look_beyond, acquiring.namespace, acquiring.hashes,
                    acquiring.first + acquiring.depth + acquiring._found.depth, acquiring._arrivals, acquiring._begun,
                )  # fmt: skip
        self._wake_writer()

    def _look_beyond(
        self, namespace: NamespaceId, hashes: bytes, depth: int, arrivals: Arrivals, begun: list[Onboard]
    ) -> None:
        """Bring what lies beyond the own tiers, which end at `depth`. On a thread that may wait."""
        begun += self._submit(self._begin_fetches(namespace, hashes, depth, arrivals), arrivals)
        self._wake_writer()

    def _poll(self, acquiring: Acquiring) -> bool:
        """Whether an acquiring is over now."""
        is_late = self._clock() >= acquiring.deadline_s
        if acquiring._is_under_way(self._open) and not is_late:
            return False
        planned: list[Planned] = []
        looks = False
        with self._lock:
            waited = bool(acquiring._arrivals.others)
            self._give_up_all(acquiring)
            self._collect_for(acquiring)
            is_in_vain = is_late or self._stopped or acquiring._clears != self._clears
            goes_on = not is_in_vain and (waited or self._lies_in_host(acquiring.next_block))
            if goes_on:  # with what others have brought, or what lay behind a hole
                planned, looks = self._plan(acquiring)
                goes_on = bool(planned or looks or acquiring._arrivals.others)
                if not goes_on:
                    self._collect_for(acquiring)
            if not goes_on:
                self._end_waiting()
                self._finish(acquiring)
        if goes_on:
            self._set_out(acquiring, planned, looks)
            return False
        self._wake_writer()
        self._offer_sample(acquiring)
        return True

    def _release(self, acquiring: Acquiring) -> None:
        with self._lock:
            if acquiring._is_released:
                return
            acquiring._is_released = True
            if not acquiring._is_over:
                self._give_up_all(acquiring)
                self._collect_for(acquiring)
                self._end_waiting()
                acquiring._is_over = True
                acquiring.depth, acquiring.hits = 0, {}
            self._ledger.unpin(Tier.HOST, acquiring._slots)
            acquiring._slots = b""
        self._wake_writer()

    def _give_up_all(self, acquiring: Acquiring) -> None:
        """Nothing that is still under way for it pins anything any more. Under the lock."""
        acquiring._arrivals.waiting = False
        if acquiring._look is not None:
            acquiring._look.cancel()
        self._give_up(acquiring._begun)
        acquiring._begun = []

    def _lies_in_host(self, block: bytes) -> bool:
        return bool(block) and self._ledger.holds(Tier.HOST, SequenceHash(block))

    def _collect_for(self, acquiring: Acquiring) -> None:
        """Add what has come to what there is. Under the lock."""
        at = (acquiring.first + acquiring.depth) * HASH_BYTES
        found, arrivals = acquiring._found, acquiring._arrivals
        if not arrivals.brought and found.tiers.count(Tier.HOST) == found.depth:
            depth, packed, hits = found.depth, found.slots, {Tier.HOST: found.depth} if found.depth else {}
        else:
            depth, slots, hits = self._collect(acquiring.hashes[at:], found, arrivals)
            packed = pack_slots(slots)
        acquiring._found, acquiring._arrivals = Match(0, b"", b""), Arrivals()
        acquiring.depth += depth
        acquiring._slots += packed
        for tier, count in hits.items():
            acquiring.hits[tier] = acquiring.hits.get(tier, 0) + count

    def _finish(self, acquiring: Acquiring) -> None:
        """It is over: count what it found, that of the engine's own HBM too. Under the lock."""
        acquiring._is_over = True
        if acquiring._clears != self._clears:
            self._ledger.unpin(Tier.HOST, acquiring._slots)
            acquiring.depth, acquiring._slots, acquiring.hits = 0, b"", {}
        hits = acquiring.hits | ({Tier.HBM: acquiring.first} if acquiring.first else {})
        prefix = Prefix(acquiring.first + acquiring.depth, [], hits)
        self._count(acquiring.namespace, acquiring.hashes, prefix)

    def _offer_sample(self, acquiring: Acquiring) -> None:
        if acquiring.hashes < self._sampled_below:
            self._sample(acquiring.namespace, acquiring.hashes, acquiring.first + acquiring.depth)


def _check_column(argument: str, column: Sequence[bool] | np.ndarray, count: int) -> None:
    """Refuse what has not one entry a block. Raises ArgumentError."""
    try:
        given = len(column)
    except TypeError:
        raise ArgumentTypeError(argument, f"is {kind_of(column)}; give one entry a block, {count}") from None
    if given != count:
        raise ArgumentValueError(argument, f"has {given} entries for a store of {count} blocks; give one a block")


def _runs(blocks: Sequence[SequenceHash], wanted: set[SequenceHash]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of consecutive blocks that are in a set, which is emptied: a repeated block is in none."""
    begin = 0
    for at, block in enumerate(blocks):
        if block in wanted:
            wanted.discard(block)
            continue
        if begin < at:
            yield begin, at
        begin = at + 1
    if begin < len(blocks):
        yield begin, len(blocks)
