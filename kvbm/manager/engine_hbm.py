"""A block manager for an engine that owns HBM: the engine says what it holds there, and HOST is where its blocks come
and go.

What the engine's own prefix cache gains and loses is recorded as residencies in HBM, in slots that only the ledger
knows. They tell routers where a prompt is warm, and no byte of them is ever read here. Between HBM and HOST the
engine's workers copy, in rows of the HOST pool's memory that they map (`pools/host/mapping.py`); everything colder is
the manager's own affair, as ever.

    store     begin_store → workers fill the rows → end_store: checksums first, then the claim
    acquire   begin_acquire → `poll` → workers read the rows of `slots` → release

Neither call waits: an engine's scheduler asks again at its next step. A store that is never ended keeps its rows,
because a worker may still write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from kvbm.core.arguments import (
    MOST_BLOCKS,
    check_flag,
    check_place,
    check_run,
    check_seconds,
    checked_hash,
    checked_runs,
)
from kvbm.core.checks import check_text, checked_int, kind_of
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError, LedgerError, PoolError
from kvbm.core.events import EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, pack_slots, split_hashes, split_slots
from kvbm.core.results import NOT_HELD, Copy, Match
from kvbm.manager.acquiring import Acquiring, WantedRun
from kvbm.manager.base import BlockManager
from kvbm.manager.copies.copy_spans import copy_values
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.offload.chain_runs import ChainRun
from kvbm.manager.onboard.expected import ExpectedBlocks
from kvbm.manager.onboard.finding import Finding
from kvbm.pools.base import Proof
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan, Tracing, Value

log = SafeLog()

_CLEAR_WAIT_S = 2.0  # for a clear to be durable
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


class _NoSuchCallError(LedgerError, AttributeError):
    """A call that only a manager which owns HBM has."""


_INSTEAD = {
    "hbm": "copy between its tensors and HOST",
    "acquire": "use begin_acquire",
    "allocate": "let the engine allocate",
    "create": "use engine_stored",
    "unpin": "use Acquiring.release",
    "release": "let the engine free its blocks",
}


class EngineHbmManager(BlockManager):
    """A block manager for an engine that owns HBM: the engine says what it holds there, and HOST is where its blocks
    come and go.

    `kvbm.open_engine_manager` makes one from settings. Neither storing nor acquiring waits: an engine's scheduler asks
    again at its next step. A store that is never ended keeps its rows, because a worker may still write them.
    """

    _target, _owns_hbm = Tier.HOST, False

    # -- what the engine holds in HBM ----------------------------------------------------------------------------------

    def engine_stored(self, namespace: NamespaceId, parent: bytes, start: int, hashes: bytes) -> int:
        """The engine holds these blocks in HBM now.

        Where it keeps a block twice, only the first and the last copy speak.

        Args:
            namespace: id of the blocks' namespace, one the manager knows.
            parent: hash of the block before `start`; NO_PARENT where `start` is 0, and only there.
            start: position of the first block in its chain, in blocks.
            hashes: packed, of the blocks from `start` on.
        Returns: how many of them it was known to hold already.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        start = self._check_chain(namespace, parent, start, hashes)
        surplus = 0
        with self._lock:
            self._stream.require_open_locked()
            self._namespaces.use(namespace)
            blocks = split_hashes(hashes)
            fresh = set(split_hashes(self._ledger.lacking(Tier.HBM, hashes)))
            duplicates, room = len(blocks) - len(fresh), self._ledger.counts(Tier.HBM).free
            if duplicates:  # what is held under another namespace is none, and is not recorded
                mine = self._ledger.holders(hashes, Tier.HBM, namespace)
                both = zip(blocks, mine, strict=True)
                duplicates -= sum(holder != Tier.HBM and block not in fresh for block, holder in both)
            for begin, end in _runs(blocks, fresh):
                count = min(end - begin, room)
                surplus += end - begin - count
                room -= count
                before = blocks[begin - 1] if begin else parent
                self._gain_locked(namespace, before, start + begin, blocks[begin : begin + count])
            self._counters.engine_duplicates += duplicates
            is_first = surplus and not self._counters.engine_surplus
            self._counters.engine_surplus += surplus
        self._stream.recorded()
        if is_first:
            log.warning(
                "engine.beyond_capacity",
                instance=self.instance,
                blocks=surplus,
                slots=self.pools.slots[Tier.HBM].slots,
                remedy="give pools.hbm.slots as many as the engine has blocks; what is beyond is not recorded",
            )
        return duplicates

    def _gain_locked(self, namespace: NamespaceId, parent: bytes, start: int, blocks: list[SequenceHash]) -> None:
        """Record blocks, which HBM lacks and has room for."""
        if not blocks:
            return
        room = None
        try:
            room = self._ledger.allocate(Tier.HBM, len(blocks), namespace)
            assert room is not None
            self._ledger.create(namespace, Tier.HBM, SequenceHash(parent), start, b"".join(blocks), room.slots)
            slots, room = room.slots, None
            self._ledger.unpin(Tier.HBM, slots)
        except BaseException:  # a signal's handler may raise anything anywhere
            if room is not None:
                self._give_back_locked(room.slots)
            raise
        self._counters.created_blocks += len(blocks)

    def _give_back_locked(self, slots: bytes) -> None:
        """Leave slots of HBM that were allocated to nobody."""
        try:
            self._ledger.release(Tier.HBM, slots)
        except LedgerError:  # they have become blocks, which only this call has pinned
            self._ledger.unpin(Tier.HBM, slots)

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

    # -- asking, bringing, storing -------------------------------------------------------------------------------------

    def holders(self, hashes: bytes, namespace: NamespaceId | None = None, objects: bool = False) -> bytes:
        """For each block the hottest own tier colder than HBM that holds it, one byte each, 0xFF where none does.

        Args:
            namespace: whose blocks count; None: everybody's.
            objects: what this instance has put into objects since `follow_objects` counts as OBJECT, where no own tier
                holds it.
        Raises: ArgumentError: `hashes` is no packed run, `objects` no bool, or nobody has told of the namespace.
        """
        check_run(hashes)
        check_flag(objects, "objects")
        if namespace is not None:
            self._check_namespace(namespace)
        with self._lock:
            found = self._ledger.holders(hashes, Tier.HOST, namespace)
            if not objects or NOT_HELD not in found:
                return found
            has = self._offloader.claims.has
            return bytes(
                Tier.OBJECT if tier == NOT_HELD and has(one) else tier
                for one, tier in zip(split_hashes(hashes), found, strict=True)
            )

    def follow_objects(self) -> None:
        """Remember which blocks are put into objects from now on, for `holders`."""
        with self._lock:
            self._offloader.claims.follow_blocks()

    @property
    def looks_beyond(self) -> bool:
        """Whether there is anything beyond the own tiers that `begin_find` would ask."""
        return self._loads.looks_beyond

    def begin_find(self, runs: Sequence[tuple[NamespaceId, bytes]]) -> Finding | None:
        """Begin to ask which of these blocks lie beyond the own tiers, in the pod or in objects of one block, each by
        itself.

        Args:
            runs: namespaces and packed hashes, in any order and with holes.
        Returns: None where there is nothing beyond the own tiers.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        wanted = checked_runs(runs)
        for namespace, _ in wanted:
            self._check_namespace(namespace)
        with self._lock:
            self._stream.require_open_locked()
        if not self._loads.looks_beyond:
            return None
        try:
            return Finding(self._loads.begin_find(wanted), self._clock, self._clock() + self._wait_s)
        except RuntimeError:  # the manager closes
            return None

    def begin_acquire(
        self,
        namespace: NamespaceId,
        hashes: bytes,
        wait_s: float | None = None,
        first: int = 0,
        is_whole: bool = False,
        expected: ExpectedBlocks | None = None,
        trace: str | None = None,
    ) -> Acquiring:
        """Begin to bring the longest run of held blocks to HOST, pinned there for the caller.

        As `Manager.acquire`, and it does not wait: what lies in HOST is pinned at once, what lies in NVME, in the pod
        or in the object pool is brought by threads. Blocks that another request brings are waited for.

        Args:
            hashes: n packed hashes of a prompt's blocks, from its first on. Where objects have several blocks they may
                not begin later.
            wait_s: for bytes, after which what has come counts; None: as the manager was told.
            first: blocks of the prompt that the engine has in HBM itself; the run begins behind them.
            is_whole: all of it is said to lie somewhere, and a part is of little use: where one source ends, others are
                looked into again.
            expected: blocks of the prompt that somebody computes or stores now. They are asked for until they are
                there, or nothing more of them comes; then whoever else may have them.
            trace: as in `Manager.acquire`.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        first = checked_int(first, "first", most=len(hashes) // HASH_BYTES)
        if wait_s is not None:
            check_seconds(wait_s, "wait_s")
        check_flag(is_whole, "is_whole")
        if expected is not None:
            if not isinstance(expected, ExpectedBlocks):
                raise ArgumentTypeError("expected", f"is {kind_of(expected)}; give ExpectedBlocks, or None")
            checked_int(expected.blocks, "expected.blocks", most=len(hashes) // HASH_BYTES)
            check_seconds(expected.quiet_s, "expected.quiet_s")
            check_text(expected.instance, "expected.instance")
        if trace is not None:
            check_text(trace, "trace")
        now_s = self._clock()
        deadline_s = now_s + (self._wait_s if wait_s is None else wait_s)
        span = None if self._tracing is None else self._begin_span(self._tracing, namespace, hashes, trace, first)
        acquiring = Acquiring(
            self._stream,
            self._copies,
            self._loads,
            self._sample,
            self._clock,
            WantedRun(namespace, hashes, first, is_whole, expected, span),
            deadline_s,
        )
        try:
            with self._lock:
                self._stream.require_open_locked()
                self._stream.expire_locked(now_s)
                self._namespaces.use(namespace)
                go_on = acquiring.plan_locked()
            go_on()
        except BaseException:  # a signal's handler may raise anything anywhere
            acquiring.release()
            raise
        return acquiring

    def storable(self, namespace: NamespaceId, start: int, count: int) -> int:
        """How many blocks of a run HOST has room for now; the rest is worth another look once stores or offloads have
        ended.

        Beyond what HOST can hold of a prompt it has room only as fast as blocks go on to what is colder.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        self._check_namespace(namespace)
        start = checked_int(start, "start", most=MOST_BLOCKS - 1)
        count = checked_int(count, "count", most=MOST_BLOCKS - start)
        with self._lock:
            counts = self._ledger.counts(Tier.HOST)
            room = counts.free + counts.evictable
            self._stream.require_open_locked()
            run = ChainRun(bytes(count * HASH_BYTES), start)
            if self._offloader.passes_through(namespace, Tier.HOST, run, self._clock()):
                room, _ = self._transit.room()
            return max(0, min(count, room))

    def begin_store(
        self,
        namespace: NamespaceId,
        parent: bytes,
        start: int,
        hashes: bytes,
        uses: int = 1,
        trace: str | None = None,
    ) -> Store | None:
        """Take HOST slots for blocks of the engine's HBM that its workers will copy there, evicting unpinned blocks if
        need be.

        Both ends are the copy's until `end_store`: the engine must not overwrite the blocks before. Where HOST is
        short, the run is cut to what fits.

        Args:
            parent, start: as `engine_stored`. Runs of a chain in its order, so that objects of several blocks become
                whole.
            uses: 1 for what was just computed, 2 for what was used again; `offload.host` says what is wanted.
            trace: as in `Manager.acquire`.
        Returns: None where nothing is to be copied, or nothing fits.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        start = self._check_chain(namespace, parent, start, hashes)
        uses = checked_int(uses, "uses", least=1)
        if trace is not None:
            check_text(trace, "trace")
        begun: list[Copy] = []
        try:
            with self._lock:
                self._stream.require_open_locked()
                self._stream.expire_locked(self._clock())
                self._offloader.offer(namespace, Tier.HBM, hashes, uses, parent, start)
                wanted = self._wanted_in_host_locked(namespace, hashes, uses, start)
                copy = (
                    self._copies.begin_locked(namespace, Tier.HBM, Tier.HOST, wanted, begun=begun) if wanted else None
                )
                if copy is not None:
                    self._copies.begin_run_locked(copy)
                    self._copies.stores[copy.id] = None
                    self._counters.engine_stores += 1
            self._stream.recorded()
            if copy is None:
                return None
            index = {block: at for at, block in enumerate(split_hashes(hashes))}
            at = [index[block] for block in split_hashes(copy.hashes)]
            store = Store(copy, copy.hashes, split_slots(copy.target_slots), at, start)
            if self._tracing is not None:
                self._copies.store_spans[copy.id] = self._begin_store_span(self._tracing, copy, trace)
        except BaseException:  # a signal's handler may raise anything anywhere; no worker has been told
            for copy in begun:
                self._end_unended(copy)
            raise
        return store

    def end_store(self, store: Store, arrived: Sequence[bool], checksums: Sequence[int] | np.ndarray) -> None:
        """All ranks have answered: nobody writes the slots any more.

        Args:
            arrived: for each block of the store whether its whole row is in place.
            checksums: CRC-32C of each row, u32, or a list of them; those of rows that have not arrived mean nothing.
        Raises: ArgumentError: no Store, or columns of another length or type; the store goes on then, and is still to
            be ended. LedgerError: it has ended already. Whatever a signal's handler raises: its blocks may be lost
            then, and the same call again makes sure that nothing of it is held.
        """
        if not isinstance(store, Store):
            raise ArgumentTypeError(
                "store", f"is {kind_of(store)}; give what begin_store returned, unless that is None"
            )
        copy, count = store.copy, len(store.slots)
        there, sums = _flags("arrived", arrived, count), _checksums("checksums", checksums, count)
        ends = False
        try:
            with self._lock:
                if copy.id not in self._copies.stores:
                    raise LedgerError(f"store {copy.id} is not under way; it ends once", copy=copy.id)
                ends = True
            self._end_store(store, there, sums)
        finally:
            if ends:
                self._end_unended(copy)
                if (span := self._copies.store_spans.pop(copy.id, None)) is not None:
                    span.end(_stored_values(there), "" if all(there) else "a worker failed")
        self._stream.recorded()

    def keep_stored(
        self, store: Store, ttl_s: float, priority: int = 0, until_read: bool = False, most: int | None = None
    ) -> None:
        """Keep the blocks of a store that is under way from their arrival on, as `keep` does: before anybody can read
        them.

        Args:
            ttl_s: for how long from now on.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        if not isinstance(store, Store):
            raise ArgumentTypeError(
                "store", f"is {kind_of(store)}; give what begin_store returned, unless that is None"
            )
        rule = self._checked_keep(ttl_s, priority, until_read, most)
        with self._lock:
            self._stream.require_open_locked()
            stores = self._copies.stores
            if (id := store.copy.id) in stores:
                stores[id] = rule if (before := stores[id]) is None else before.joined(rule)

    def refresh(self, hashes: bytes, namespace: NamespaceId | None = None) -> None:
        """A request that used this chain is over: in HOST its beginning counts as used last, its deepest block before
        all others.

        What was loaded or stored first would else leave first, and a chain without its beginning is of no use. A use it
        counts as, so only for policies that go by recency.

        Args:
            namespace: whose blocks count; None: everybody's.
        Raises: ArgumentError: `hashes` is no packed run, or nobody has told of the namespace. LedgerError: the manager
            is closed.
        """
        check_run(hashes)
        if namespace is not None:
            self._check_namespace(namespace)
        with self._lock:
            self._stream.require_open_locked()
            found = None
            try:
                found = self._ledger.match(hashes, True, Tier.HOST, namespace)
                slots, found = _slots_in_host(found), None
                self._ledger.unpin(Tier.HOST, slots)
            except BaseException:  # a signal's handler may raise anything anywhere
                if found is not None:
                    self._ledger.unpin(Tier.HOST, _slots_in_host(found))
                raise

    def clear(self) -> int:
        """Empty HOST and NVME, with reason `cleared`, and forget what was to be offloaded.

        Returns how many blocks they held.

        What is pinned keeps its slots until it is released, what is on its way does not arrive, and what requests wait
        for they do not get. Objects stay, and so does what other instances of the pod have. It is durable when this
        returns, if the journal's device answers soon: a process that dies then does not bring the blocks back.
        Raises: LedgerError: the manager is closed.
        """
        with self._lock:
            self._stream.require_open_locked()
            self._copies.cancel_all_locked()
            self._offloader.forget()
        count = self._clear(Tier.HOST) if Tier.HOST in self.pools.slots else 0
        if Tier.NVME not in self.pools.slots:
            return count
        with self._salvage.clearing():
            count += self._clear(Tier.NVME)
        with self._lock:
            epoch, applied = self._ledger.epoch, self._ledger.applied
        self._offsets.wait_durable(epoch, applied, _CLEAR_WAIT_S)
        return count

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Calls of a `Manager` that are looked for here: say what to call instead."""
            if name in _INSTEAD:
                raise _NoSuchCallError(
                    f'pools.hbm.owner is "engine", so kvbm has no HBM slots to give; {_INSTEAD[name]}'
                )
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_chain(self, namespace: NamespaceId, parent: bytes, start: int, hashes: bytes) -> int:
        """Refuse what is no run of a chain; gives `start`. Raises ArgumentError."""
        self._check_namespace(namespace)
        before = checked_hash(parent, "parent")
        check_run(hashes)
        start = checked_int(start, "start", most=MOST_BLOCKS - len(hashes) // HASH_BYTES)
        check_place(before, start)
        return start

    def _clear(self, tier: Tier) -> int:
        """Withdraw all that a tier holds now."""
        with self._lock:
            self._stream.require_open_locked()
            held = self._ledger.held(tier)
        count, run_bytes = 0, _CLEARED_BLOCKS * HASH_BYTES
        for at in range(0, len(held), run_bytes):
            with self._lock:
                count += self._ledger.evict(tier, held[at : at + run_bytes], EvictReason.CLEARED)
            self._stream.recorded()
        return count

    def _begin_store_span(self, tracing: Tracing, copy: Copy, trace: str | None) -> TraceSpan:
        """The span of a store, until all ranks have answered. Outside the lock."""
        return tracing.begin("kvbm.store", trace, copy_values(copy, self.pools.slots[Tier.HOST].block_bytes))

    def _wanted_in_host_locked(self, namespace: NamespaceId, hashes: bytes, uses: int, start: int) -> bytes:
        """As much of a run as HOST should get now."""
        if not self._offloader.wants(Tier.HOST, uses):
            return b""
        run, beyond = self._offloader.within(namespace, Tier.HOST, ChainRun(hashes, start))
        if beyond.hashes:
            self._offloader.skip(Skipped.BEYOND, self._offloader.lacking(Tier.HOST, beyond.hashes))
        return run.hashes

    def _end_unended(self, copy: Copy) -> None:
        """A store is over, with nothing where that is not so yet. Outside the lock."""
        try:
            self._copies.end_unended(copy, MigrateCause.OFFLOAD)
        finally:
            self._copies.end_run(copy)
            self._copies.stores.pop(copy.id, None)  # last: an exception before it may be followed by another call

    def _end_store(self, store: Store, arrived: list[bool], checksums: np.ndarray) -> None:
        """Bytes first, then the claim."""
        copy, blocks, why = store.copy, split_hashes(store.hashes), ""
        kept = [at for at, ok in enumerate(arrived) if ok]
        if kept:
            proof = Proof(copy.namespace, copy.epoch, b"".join(blocks[at] for at in kept), checksums[kept])
            try:
                self.pools.slots[Tier.HOST].seal([store.slots[at] for at in kept], proof)
            except PoolError as error:
                arrived, why = [False] * len(blocks), str(error)
        with self._lock:
            if not all(arrived):
                self._counters.failed_copies += 1
            if copy.id in self._copies.open and not self._stream.ended:
                holders = self._copies.end_locked(
                    copy, self._copies.arrived_locked(copy, arrived), MigrateCause.OFFLOAD
                )
                there = b"".join(block for block, slot in zip(blocks, holders, strict=True) if slot is not None)
                if (rule := self._copies.stores.get(copy.id)) is not None:
                    self._keep_locked(there, rule, copy.namespace)
                self._counters.offloaded_blocks[Tier.HOST] += len(there) // HASH_BYTES
                positions = dict(zip(blocks, (store.start + at for at in store.at), strict=True))
                at = [positions[block] for block in split_hashes(there)]
                self._offloader.offer_arrived(copy.namespace, Tier.HOST, there, at)
        if not all(arrived):
            with suppress(OSError):
                log.warning(
                    "copy.failed",
                    source="HBM",
                    target="HOST",
                    unread_blocks=arrived.count(False),
                    why=why or "a worker failed",
                )


def _stored_values(arrived: Sequence[bool]) -> dict[str, Value]:
    """How a store ended."""
    count = sum(arrived)
    return {"arrived": count, "outcome": "arrived" if count == len(arrived) else "part" if count else "miss"}


def _check_column(argument: str, column: Sequence[object] | np.ndarray, count: int) -> None:
    """Refuse what has not one entry a block. Raises ArgumentError."""
    try:
        given = len(column)
    except TypeError:
        raise ArgumentTypeError(argument, f"is {kind_of(column)}; give one entry a block, {count}") from None
    if given != count:
        raise ArgumentValueError(argument, f"has {given} entries for a store of {count} blocks; give one a block")


def _flags(argument: str, column: Sequence[bool], count: int) -> list[bool]:
    """A column of True and False. Raises ArgumentError."""
    _check_column(argument, column, count)
    try:
        return [bool(one) for one in column]
    except (TypeError, ValueError):  # an entry of several, such as a row of an array
        raise ArgumentTypeError(argument, f"is {kind_of(column)} of others; give one True or False a block") from None


def _checksums(argument: str, column: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """A column of checksums, as u32. Raises ArgumentError."""
    _check_column(argument, column, count)
    try:
        given = np.asarray(column)
    except ValueError:  # rows of several lengths
        given = np.empty(0, dtype=object)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        what = f"an array of {given.dtype}" if given.ndim == 1 else f"an array of {given.ndim} dimensions"
        raise ArgumentTypeError(argument, f"is {what}; give u32, one a block")
    return given.astype(np.uint32)


def _slots_in_host(found: Match) -> bytes:
    """Those of a match's slots that are HOST's, packed."""
    if found.tiers.count(Tier.HOST) == found.depth:
        return found.slots
    both = zip(found.tiers, split_slots(found.slots), strict=True)
    return pack_slots(slot for tier, slot in both if tier == Tier.HOST)


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
