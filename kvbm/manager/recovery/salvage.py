"""Brings back what NVME's slots prove and no journal says any more, in a thread of its own, while requests are served.

A slot's header proves which block lies there. It counts if it was written since its namespace was cleared, which the
pool knows (`pools/nvme/generations.py`), and if nothing else keeps the block away: an erasure, or a namespace without a
revision. Its bytes are held to their checksum when they are first read, as those of every block of a restart.

Slots that are scanned are allocated from before the first request until they are found or given back, so nobody writes
them meanwhile. What is found becomes a residency by the event of a copy from this instance itself: bytes were there
first, then the claim.

A pool that has become smaller keeps its old end until the blocks there were copied into slots before it: ordinary
copies, whose source is this instance, again. At last the end is cut off. A process that dies in between finds in the
pool that a scan is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import KvbmError, PoolError
from kvbm.core.events import EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier, pack_slots, split_hashes, split_slots
from kvbm.core.results import NOT_HELD, Recovered
from kvbm.manager.copies.transfer import Pools
from kvbm.manager.copies.workers import Workers
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.offsets import Offsets
from kvbm.pools.nvme.pool import Headers, NvmePool
from kvbm.safe_log import SafeLog

log = SafeLog()

_RUN_SLOTS = 4096  # scanned at once
_LOOK_S = 1.0  # between two looks at whether the scan is to end
_TURN_SLOTS = 512  # judged and adopted in one turn under the lock
_MOVED_BLOCKS = 32  # copied in one step from beyond the pool's end
_DURABLE_WAIT_S = 5.0
_ASKED_NAMESPACES = 64  # that a clear of some blocks is looked for in
_NOBODY = bytes(HASH_BYTES)  # the namespace of zeros that an erasure writes


class WaitedFor(Protocol):
    """How many requests wait for bytes."""

    @property
    def requests_waiting(self) -> int: ...


class SlotHeaders(NamedTuple):
    """What the headers of n slots say, in columns: whether a block lies there that we could read, whose, which, and
    written when.
    """

    usable: np.ndarray
    namespaces: bytes
    hashes: bytes
    generations: np.ndarray


class NamespaceRun(NamedTuple):
    """Blocks of one namespace that come back: their places among the slots that were looked at, rising, and their
    packed hashes.
    """

    namespace: NamespaceId
    places: np.ndarray
    hashes: bytes


class SalvagePlan(NamedTuple):
    """What a start has found to be brought back.

    Attributes:
        scans: whether slots are asked what they hold.
        beyond: blocks of slots beyond the pool's end, as a journal has them; the most valuable come last.
        keeps: for each block of a run of one namespace whether it may be held and served, as a start asks it of blocks
            of a journal.
        depth: headers read at a time.
        is_sealed: whether the pool's blocks are encrypted.
    """

    scans: bool = False
    beyond: Sequence[Recovered] = ()
    keeps: Callable[[NamespaceId, bytes], np.ndarray] = lambda _, hashes: np.ones(len(hashes) // HASH_BYTES, dtype=bool)
    depth: int = 32
    is_sealed: bool = False


class Salvage:
    """Made once the ledger has started and before anybody uses it.

    Args:
        pools: where NVME has no files there is nothing to do.
        loads: what requests wait for, who go first.

    Attributes:
        found_blocks, moved_blocks: so far.
        elapsed_s: that it took; 0 before it has ended.
    """

    def __init__(
        self, stream: LedgerStream, pools: Pools, offsets: Offsets, plan: SalvagePlan, loads: WaitedFor
    ) -> None:
        nvme = pools.slots.get(Tier.NVME)
        self._files = nvme if isinstance(nvme, NvmePool) else None
        self._stream, self._offsets, self._keeps = stream, offsets, plan.keeps
        self._ledger, self._depth, self._is_sealed, self._loads = stream.ledger, plan.depth, plan.is_sealed, loads
        self._scans, self._beyond = plan.scans, list(plan.beyond)
        self._closing = threading.Event()
        self._forbidden = False  # under the ledger's lock
        self._cleared: set[NamespaceId] = set()  # likewise
        self._clears = 0  # likewise: that have begun
        self._thread: threading.Thread | None = None
        self.found_blocks = self.moved_blocks = 0
        self.elapsed_s = 0.0
        self._mine: list[int] = []
        if plan.scans:
            free = self._ledger.counts(Tier.NVME).free
            taken = self._ledger.allocate(Tier.NVME, free) if free else None
            self._mine = [] if taken is None else split_slots(taken.slots)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes back."""
        return not self._is_wanted or (self._thread is not None and not self._thread.is_alive())

    @property
    def _is_wanted(self) -> bool:
        return self._files is not None and (self._scans or bool(self._beyond) or bool(self._files.room_slots))

    @property
    def _pool(self) -> NvmePool:
        assert self._files is not None
        return self._files

    def start(self) -> None:
        """Begin, beside whoever serves, where there is anything to be done."""
        if not self._is_wanted:
            return
        thread = threading.Thread(target=self.run, name=f"kvbm-salvage-{self._stream.instance}", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """End with what is under way, and wait for it so long; the next start goes on. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @contextmanager
    def clearing(self, namespaces: Iterable[NamespaceId] | None = None) -> Iterator[None]:
        """While blocks of some namespaces, or of all, are withdrawn for good: none comes back from now on, nor after a
        restart.
        """
        named = None if namespaces is None else list(namespaces)
        with self._stream.lock:
            self._clears += 1
            self._forbidden = self._forbidden or named is None
            self._cleared.update(named or ())
        generations = None if self._files is None else self._files.generations
        with nullcontext() if generations is None else generations.clearing(named):
            yield

    def evicting(
        self, tier: Tier, hashes: bytes, reason: EvictReason, namespaces: Sequence[NamespaceId]
    ) -> AbstractContextManager[None]:
        """While blocks of a run are evicted: `clearing`, where NVME is cleared of them, of those namespaces they are
        held of.

        A block that is not held may lie in a slot all the same: the scan has not come to it, or it has left for room,
        or arrives just now. Whose it is, nobody knows.

        Args:
            namespaces: those that are known; where blocks are not held, or of others, or there are many, all count as
                cleared.
        """
        is_cleared = tier is Tier.NVME and reason is EvictReason.CLEARED
        if self._files is None or not is_cleared or self._stream.closing or not hashes:
            return nullcontext()
        if len(namespaces) > _ASKED_NAMESPACES:
            return self.clearing()
        with self._stream.lock:
            counts = {
                one: len(hashes) // HASH_BYTES - self._ledger.holders(hashes, Tier.NVME, one).count(NOT_HELD)
                for one in namespaces
            }
        named = [one for one, count in counts.items() if count]
        return self.clearing(named if sum(counts.values()) == len(hashes) // HASH_BYTES else None)

    def run(self) -> None:
        """Bring back all there is. In the caller's thread."""
        began_s = time.monotonic()
        is_whole = False
        try:
            self._scan()
            self._move(self._beyond, gives_way=True)
            if self._scans and self._pool.room_slots:
                self._move(list(self._found_beyond()), gives_way=False)
            is_whole = not self._closing.is_set()
        except KvbmError as error:
            log.warning("salvage.ended_early", why=str(error), effect="what was not found is computed again")
        finally:
            self._give_back(self._mine)
            self._stream.recorded()
        if is_whole:
            self._settle()
        self.elapsed_s = time.monotonic() - began_s
        log.info(
            "salvage.ended",
            found_blocks=self.found_blocks,
            moved_blocks=self.moved_blocks,
            is_whole=is_whole,
            elapsed_s=round(self.elapsed_s, 3),
        )

    # -- slots of the pool --------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """While the headers of a run are judged, those of the next are read."""
        runs = [self._mine[at : at + _RUN_SLOTS] for at in range(0, len(self._mine), _RUN_SLOTS)]
        reader = Workers(1, "kvbm-salvage-read")
        try:
            reading = self._begin(reader, runs[:1])
            for number, run in enumerate(runs):
                while reading and not wait(reading, _LOOK_S)[0] and not self._closing.is_set():
                    pass  # a device that hangs holds up nobody who ends the scan
                if not reading or self._closing.is_set():
                    return
                found = reading[0].result()
                reading = self._begin(reader, runs[number + 1 : number + 2])
                for at, judged in self._judged(found, len(run)):
                    self._adopt(run[at : at + len(judged.usable)], judged)
                self._stream.recorded()
        finally:
            reader.shutdown()

    def _begin(self, reader: Workers, runs: Sequence[Sequence[int]]) -> list[Future[Headers]]:
        """Begin to read headers, once there is a thread for it; nothing where the manager closes."""
        while not self._closing.is_set():
            try:
                return [reader.submit(self._read, run) for run in runs]
            except RuntimeError:  # the system gives none now; or never again, since the process ends
                self._closing.wait(_LOOK_S)
        return []

    def _read(self, slots: Sequence[int]) -> Headers:
        """What headers say. Raises PoolError: the pool is closed."""
        return self._pool.scan(slots, max(1, self._depth // 4) if self._loads.requests_waiting else self._depth)

    def _judged(self, found: Headers, count: int) -> Iterator[tuple[int, SlotHeaders]]:
        """What the headers of a run say of blocks we could use, in parts, each with its place in the run."""
        usable = (found.outcomes == 1) & (found.sealed == int(self._is_sealed))
        for at in range(0, count, _TURN_SLOTS):
            end = min(count, at + _TURN_SLOTS)
            part = slice(at * HASH_BYTES, end * HASH_BYTES)
            yield at, SlotHeaders(usable[at:end], found.namespaces[part], found.hashes[part], found.generations[at:end])

    def _adopt(self, slots: Sequence[int], headers: SlotHeaders) -> None:
        """Claim those slots that count, and give the others back, in one turn under the lock: no clear comes
        between.
        """
        with self._stream.lock:
            if self._stream.closing or self._stream.ended:
                self._closing.set()
                return
            del self._mine[: len(slots)]  # whatever comes of them, they are given back or adopted once
            numbers, left = np.asarray(slots, dtype="<u4"), np.ones(len(slots), dtype=bool)
            for namespace, places, hashes in self._counted_locked(headers):
                left[places] = False
                self.found_blocks += self._ledger.adopt(
                    namespace, Tier.NVME, hashes, numbers[places].tobytes(), self._stream.instance
                )
                if self._pool.hints is not None:
                    self._pool.hints.note(numbers[places].tolist(), namespace, hashes)
            self._ledger.release(Tier.NVME, numbers[left].tobytes())

    def _counted_locked(self, headers: SlotHeaders) -> list[NamespaceRun]:
        """The blocks that may come back. No clear may come between this and the claim."""
        generations = self._pool.generations
        if generations is None or not len(headers.usable):
            return []
        since = generations.counts(headers.namespaces, headers.generations)
        return namespace_runs(headers._replace(usable=headers.usable & since), self._keeps)

    def _give_back(self, slots: list[int]) -> None:
        with self._stream.lock:
            if slots and not self._stream.ended:
                self._ledger.release(Tier.NVME, pack_slots(slots))
            slots.clear()

    # -- slots beyond its end -----------------------------------------------------------------------------------------

    def _found_beyond(self) -> Iterator[Recovered]:
        """What the headers of slots beyond the pool's end prove."""
        for first in range(self._pool.slots, self._pool.room_slots, _RUN_SLOTS):
            run = range(first, min(self._pool.room_slots, first + _RUN_SLOTS))
            for at, headers in self._judged(self._read(run), len(run)):
                with self._stream.lock:
                    counted = self._counted_locked(headers)
                for namespace, places, hashes in counted:
                    for place, block in zip(places.tolist(), split_hashes(hashes), strict=True):
                        yield Recovered(block, namespace, run[0] + at + place)

    def _move(self, blocks: Sequence[Recovered], gives_way: bool) -> None:
        """Copy blocks into slots of the pool, the most valuable first.

        Args:
            gives_way: whether blocks that are less valuable leave for them; else only free slots are taken.
        """
        for namespace, group in groupby(reversed(blocks), key=_by_namespace):
            run = list(group)
            for at in range(0, len(run), _MOVED_BLOCKS):
                if self._closing.is_set():
                    return
                self._move_some(namespace, run[at : at + _MOVED_BLOCKS], gives_way)
                self._stream.recorded()

    def _move_some(self, namespace: NamespaceId, run: Sequence[Recovered], gives_way: bool) -> None:
        with self._stream.lock:
            if self._stream.closing or self._stream.ended:
                self._closing.set()
                return
            if self._forbidden or namespace in self._cleared:
                return
            room = len(run) if gives_way else self._ledger.counts(Tier.NVME).free
            sources = {one.hash: one.slot for one in run[:room]}
            clears = self._clears
            copy = self._ledger.begin_copy(namespace, self._stream.instance, Tier.NVME, b"".join(sources))
        if copy is None:
            return
        self._stream.recorded()
        blocks, arrived = split_hashes(copy.hashes), [False] * (len(copy.hashes) // HASH_BYTES)
        try:
            if self._offsets.wait_durable(copy.epoch, copy.after, _DURABLE_WAIT_S):
                arrived = self._pool.relocate(
                    [sources[block] for block in blocks],
                    split_slots(copy.target_slots),
                    [namespace + block for block in blocks],
                )
        finally:
            with self._stream.lock:
                if not self._stream.ended:
                    if self._clears != clears:  # what was cleared meanwhile does not arrive
                        arrived = [False] * len(arrived)
                    holders = self._ledger.end_copy(copy, arrived, MigrateCause.OFFLOAD)
                    self.moved_blocks += sum(slot is not None for slot in holders)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Once what was found is durable, nothing is due any more, and the room beyond the pool's end is given back."""
        with self._stream.lock:
            epoch, applied = self._ledger.epoch, self._ledger.applied
        if not self._offsets.wait_durable(epoch, applied, _DURABLE_WAIT_S):
            return  # the next start scans again
        try:
            self._pool.trim()
            if self._pool.generations is not None:
                self._pool.generations.note_scan(False)
        except PoolError as error:
            log.warning("salvage.unnoted", why=str(error), effect="the next start scans again")


def namespace_runs(headers: SlotHeaders, keeps: Callable[[NamespaceId, bytes], np.ndarray]) -> list[NamespaceRun]:
    """The usable blocks that may be kept, each hash once, the first place where it lies: namespace by namespace, as a
    place comes first.

    Nobody's, which an erasure leaves, are none. A property test has the rule as it reads, block by block.
    """
    owners, blocks = (np.frombuffer(column, dtype="V16") for column in (headers.namespaces, headers.hashes))
    left = headers.usable & (owners != np.void(_NOBODY))
    taken: list[tuple[NamespaceId, np.ndarray]] = []
    while left.any():  # once for each namespace: a pool has few
        owner = owners[left.argmax()]
        of_it = np.flatnonzero(left & (owners == owner))
        left[of_it] = False
        namespace = NamespaceId(owner.tobytes())
        taken.append((namespace, of_it[keeps(namespace, blocks[of_it].tobytes())]))
    places = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *(places for _, places in taken)]))
    first = np.zeros(len(blocks), dtype=bool)
    first[places[np.unique(blocks[places], return_index=True)[1]]] = True
    runs = [(namespace, places[first[places]]) for namespace, places in taken]
    return [NamespaceRun(namespace, places, blocks[places].tobytes()) for namespace, places in runs if len(places)]


def _by_namespace(one: Recovered) -> NamespaceId:
    return one.namespace
