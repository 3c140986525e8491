"""Engines that own HBM: an instance of `kvbm.open_engine_manager`, its requests and its workers, as the vLLM connector
uses it.

An engine keeps its prefix cache itself and says what it gains and loses there. Requests find what HBM lacks with
`begin_acquire`, ask again and again, are aborted, or have it copied from HOST's rows; what was computed is stored there
by workers that take their time, fail in part, and write whatever they like into rows that are theirs. Meanwhile the
cache is reset, HOST and NVME are cleared, and whatever else happens in a run happens.

It must hold that no call but `clear` and `end_store` waits; that rows are a store's own until it has ended, and a
request's until it gives them back; that what a request is given has its bytes; that a request is over at its deadline;
that it gets nothing of what was cleared while it waited; that the manager knows what HBM holds; that no start brings
back from NVME what a durable clear has withdrawn; and that in the end nothing is held for anybody.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm import assembly
from kvbm.core.errors import LedgerError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from tests.faults.simulator.kernel import Lock, Process, Violation, Waiter
from tests.faults.simulator.limits import Interrupted

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Node

REQUESTS = 3  # threads of an engine, each with one request at a time
FORGOTTEN_SHARE = 0.3  # of prompts, where there are peers: blocks are dropped first, so that others are read from
OWNER_SHARE = 0.75  # of instances in such runs
_LONGEST_NAMES = 4  # blocks that a worker that fails leaves in pieces, at most

Call = Callable[..., Any]  # how an engine calls its manager: a signal may come in the middle


class OwningEngine:
    """The engine of one process.

    Args:
        namespaces: those that it may be asked for.
        rows_of: hashes → the bytes that these blocks must have.

    Attributes:
        hbm: blocks that its prefix cache holds, those used last at the end.
        stores: of its own that have not ended.
        reached: how often what happened, of all engines of a run.
    """

    def __init__(
        self,
        node: Node,
        process: Process,
        manager: EngineHbmManager,
        namespaces: Sequence[Namespace],
        rows_of: Callable[[bytes], np.ndarray],
    ) -> None:
        self._node, self._world, self._process, self._manager = node, node.world, process, manager
        self._namespaces, self._rows_of = namespaces, rows_of
        self._rng = node.world.rng
        self._turn = Lock(node.world)  # a step of its scheduler
        self._in_use: Counter[bytes] = Counter()
        self._room = manager.pools.slots[Tier.HBM].slots // 2  # what was reset and is still copied has its slots
        memory = manager.pools.slots[Tier.HOST].memory
        assert memory is not None
        self._rows = memory
        self.hbm: dict[bytes, None] = {}
        self.stores: dict[int, Store] = {}
        self._copied_on: set[int] = set()  # stores that the last reset has left their slots
        self.reached = node.cluster.owning

    # -- a request ----------------------------------------------------------------------------------------------------

    def operate(self, call: Call, namespace: NamespaceId, hashes: bytes) -> None:
        """Do what an engine does next. Raises Interrupted; LedgerError: the manager is closed."""
        rng, manager, dice = self._rng, self._manager, self._rng.random()
        if dice < 0.80:
            self.serve(call, namespace, hashes)
        elif dice < 0.83:
            self._clear(call)
        elif dice < 0.84:
            self._reset(call)
        elif dice < 0.87:
            manager.evict(rng.choice((Tier.HOST, *(tier for tier in manager.pools.slots if tier != Tier.HBM))), hashes)
        elif dice < 0.90:
            manager.keep(hashes, rng.uniform(0.1, 5.0), rng.choice((0, 50, 99)))
        elif dice < 0.92:
            manager.take_snapshot()
        elif dice < 0.94:
            manager.report_load(rng.randrange(1000), rng.randrange(8))
        elif dice < 0.97:
            self._find(namespace, hashes)
        else:
            self._ask_for_others(namespace, hashes)

    def serve(self, call: Call, namespace: NamespaceId, hashes: bytes) -> None:
        """One prompt: what HBM has of it is used, what lies elsewhere is brought, the rest is computed and stored."""
        rng, blocks = self._rng, split_hashes(hashes)
        if self._node.cluster.peers is not None and rng.random() < FORGOTTEN_SHARE:
            for tier in [one for one in self._manager.pools.slots if one != Tier.HBM]:
                self._manager.evict(tier, hashes)
        first = next((at for at, block in enumerate(blocks) if block not in self.hbm), len(blocks))
        used = list(blocks[:first])
        self._in_use.update(used)
        try:
            depth = first
            if first < len(blocks):
                depth += self._bring(call, namespace, hashes, first)
            end = rng.randint(depth, len(blocks))  # where it is cancelled
            if not self._gain(call, namespace, hashes, first, end):
                return
            self._in_use.update(blocks[first:end])
            used += blocks[first:end]
            if rng.random() < 0.5:
                Waiter(self._world).wait(rng.expovariate(50))
            begin = rng.choice((0, depth, depth))
            while begin < end:
                until = min(end, begin + rng.choice((1, 4, end)))
                self._store(call, namespace, hashes, begin, until)
                begin = until
            if rng.random() < 0.3:
                self._manager.refresh(hashes, namespace)
        finally:
            self._in_use.subtract(used)

    def _bring(self, call: Call, namespace: NamespaceId, hashes: bytes, first: int) -> int:
        """Have blocks from `first` on brought to HOST, and copied from there; how many came."""
        rng, manager = self._rng, self._manager
        wait_s = rng.choice((None, 0.0, 0.01, 0.1, 1.0))
        acquiring = self._at_once(
            call, manager.begin_acquire, namespace, hashes, wait_s, first, rng.random() < 0.3, points=8
        )
        try:
            if not self._await(call, acquiring):
                return 0
            self._copy(acquiring, hashes, first)
            return int(acquiring.depth)
        finally:
            self._release(call, acquiring)

    def _await(self, call: Call, acquiring: Acquiring) -> bool:
        """Ask until a request is over. False where the client gave it up."""
        rng, gives_up = self._rng, self._rng.random() < 0.25
        begun = self._manager._copies.cancellations
        while True:
            cleared, is_late = self._manager._copies.cancellations > begun, self._clock_s() >= acquiring.deadline_s
            if self._at_once(call, acquiring.poll, points=3):
                break
            if is_late:
                raise Violation(f"a request of {self._process} goes on beyond its deadline")
            if gives_up and rng.random() < 0.5:
                self.reached["given_up"] += 1
                return False
            if rng.random() < 0.04:
                self._clear(call)
            Waiter(self._world).wait(rng.expovariate(100))
        self.reached[acquiring.why or "whole"] += 1
        self.reached["brought"] += acquiring.depth
        if acquiring.depth and cleared:
            raise Violation(
                f"a request of {self._process} got {acquiring.depth} blocks that were cleared while it waited"
            )
        return True

    def _copy(self, acquiring: Acquiring, hashes: bytes, first: int) -> None:
        """What workers do: they read the rows of a request, one after the other, while these are its own."""
        slots, depth = acquiring.slots, acquiring.depth
        if len(set(slots)) != depth or len(slots) != depth or first + depth > len(hashes) // HASH_BYTES:
            raise Violation(f"a request of {self._process} has {depth} blocks in slots {slots}")
        wanted = self._rows_of(hashes[first * HASH_BYTES : (first + depth) * HASH_BYTES])
        for begin, end in ((0, depth), (0, depth // 2), (depth // 2, depth)):
            if not (self._is_closing or np.array_equal(self._rows[slots[begin:end]], wanted[begin:end])):
                raise Violation(f"wrong bytes in HOST of {self._node.instance} at {self._world.now:.3f} s")
            if depth:
                self._node._nap()

    def _release(self, call: Call, acquiring: Acquiring) -> None:
        """Give up what a request holds: done twice where a signal comes in its middle, and now and then without one."""
        self._insist(call, acquiring.release)
        if self._rng.random() < 0.2:
            acquiring.release()

    # -- what it stores -----------------------------------------------------------------------------------------------

    def _store(self, call: Call, namespace: NamespaceId, hashes: bytes, begin: int, end: int) -> None:
        """Have workers copy blocks from HBM to HOST, which goes on by itself."""
        manager = self._manager
        run, uses = hashes[begin * HASH_BYTES : end * HASH_BYTES], self._rng.randint(1, 2)
        with self._turn:
            if self._rng.random() < 0.5 and not manager.storable(namespace, begin, end - begin):
                return
            args = (namespace, _parent(hashes, begin), begin, run, uses)
            store = self._at_once(call, manager.begin_store, *args, points=6)
            if store is None:
                return
            if not self.hbm.keys() >= set(split_hashes(store.hashes)):
                raise Violation(f"a store of {self._process} is to copy blocks that HBM does not hold")
        self.stores[store.copy.id] = store
        self.reached["stored"] += len(store.slots)
        blocks = split_hashes(store.hashes)
        self._in_use.update(blocks)
        self._node.spawn(self._process, lambda: self._fill(call, store, blocks), "worker")

    def _fill(self, call: Call, store: Store, blocks: list[SequenceHash]) -> None:
        """What workers do: they write the rows of a store, one half after the other, and say what is in place."""
        rng, count = self._rng, len(blocks)
        written, arrived = self._rows_of(store.hashes).copy(), [True] * count
        if rng.random() < 0.15:
            for at in rng.sample(range(count), rng.randint(1, min(count, _LONGEST_NAMES))):
                arrived[at] = False
                written[at, rng.randrange(written.shape[1]) :] ^= 0xFF
        for begin, end in ((0, count // 2), (count // 2, count)):
            self._node._nap()
            self._rows[store.slots[begin:end]] = written[begin:end]
        self._node._nap()
        if not (self._is_closing or np.array_equal(self._rows[store.slots], written)):
            raise Violation(f"rows of a store of {self._process} were written by somebody else")
        try:
            self._end_store(call, store, arrived, assembly.NATIVE.checksums(written))
        finally:
            self._in_use.subtract(blocks)
            del self.stores[store.copy.id]

    def _end_store(self, call: Call, store: Store, arrived: list[bool], checksums: np.ndarray) -> None:
        try:
            call(self._manager.end_store, store, arrived, checksums, points=4)
        except Interrupted:  # it may have ended
            with suppress(LedgerError):
                self._manager.end_store(store, arrived, checksums)
        except LedgerError:
            if not self._is_closing:
                raise

    # -- its prefix cache ---------------------------------------------------------------------------------------------

    def _gain(self, call: Call, namespace: NamespaceId, hashes: bytes, begin: int, end: int) -> bool:
        """HBM holds these blocks of a prompt from now on. False where it has no room for them."""
        blocks = split_hashes(hashes)[begin:end]
        with self._turn:
            fresh = [block for block in blocks if block not in self.hbm]
            short = len(self.hbm) + len(fresh) - self._room
            unused = [block for block in self.hbm if self._in_use[block] <= 0 and block not in blocks]
            if short > len(unused):
                return False
            if short > 0:
                self._lose(call, unused[:short])
            if not blocks:
                return True
            for block in blocks:
                self.hbm.pop(block, None)
                self.hbm[block] = None
            run = b"".join(blocks)
            known = self._insist(call, self._manager.engine_stored, namespace, _parent(hashes, begin), begin, run)
            self._agree("stored", known, len(blocks) - len(fresh))
        return True

    def _lose(self, call: Call, blocks: list[bytes]) -> None:
        for block in blocks:
            del self.hbm[block]
        self._agree("removed", self._insist(call, self._manager.engine_removed, b"".join(blocks)), len(blocks))

    def _reset(self, call: Call) -> None:
        """The prefix cache is emptied, as `/reset_prefix_cache` does; what workers still copy stays where it lies."""
        with self._turn:
            if self._copied_on & self.stores.keys():  # slots of two resets would be more than there are
                return
            self._copied_on = set(self.stores)
            count = len(self.hbm)
            self.hbm.clear()
            self._agree("cleared", self._insist(call, self._manager.engine_cleared), count)

    def _agree(self, what: str, known: int | None, held: int) -> None:
        """What the manager says that it knew is what HBM held.

        None: a signal came in the middle, and nobody knows what it has done.
        """
        if known is not None and known != held:
            raise Violation(f"{self._process} {what} blocks of which HBM held {held}; the manager knew of {known}")

    # -- what else is called ------------------------------------------------------------------------------------------

    def _clear(self, call: Call) -> None:
        """HOST and NVME are emptied."""
        manager = self._manager
        held = set(manager.held(Tier.NVME)) if Tier.NVME in manager.pools.slots else set()
        call(manager.clear, points=6)
        with manager._lock:
            epoch, applied = manager._ledger.epoch, manager._ledger.applied
        nvme: Any = manager.pools.slots.get(Tier.NVME)
        is_noted = nvme is not None and nvme.generations is not None and not nvme.generations._has_failed
        if is_noted and manager._offsets.wait_durable(epoch, applied, 0.0):
            self._node.cluster.checker.cleared(self._process, held)

    def _find(self, namespace: NamespaceId, hashes: bytes) -> None:
        finding = self._at_once(plain, self._manager.begin_find, [(namespace, hashes)])
        if finding is None:
            return
        while not finding.done:
            if self._rng.random() < 0.1:
                finding.release()
                return
            Waiter(self._world).wait(self._rng.expovariate(100))
        finding.result()

    def _ask_for_others(self, namespace: NamespaceId, hashes: bytes) -> None:
        """Nobody is given blocks of another namespace, by whatever hashes."""
        other = next(one.id for one in self._namespaces if one.id != namespace)
        acquiring = self._at_once(plain, self._manager.begin_acquire, other, hashes, 0.0)
        if not acquiring.poll() or acquiring.depth:
            raise Violation(f"{self._process} got {acquiring.depth} blocks of another namespace")
        acquiring.release()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_closing(self) -> bool:
        return bool(self._manager._stream.closing or self._manager._stream.ended)

    def _clock_s(self) -> float:
        return self._process.clock.monotonic()

    def _at_once(self, call: Call, what: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """A call that may not wait. Raises Violation: it has."""
        now_s = self._world.now
        result = call(what, *args, **more)
        is_excused = self._process.thawed_s >= now_s or self._node.signals or self._is_closing
        if self._world.now > now_s and not is_excused:
            raise Violation(f"a call of an engine's scheduler in {self._process} took {self._world.now - now_s:.4f} s")
        return result

    def _insist(self, call: Call, what: Callable[..., Any], *args: Any) -> Any:
        """A call that an engine makes again where a signal came in its middle; None then."""
        try:
            return call(what, *args, points=4)
        except Interrupted:
            what(*args)
            return None


def plain(what: Callable[..., Any], *args: Any, points: int = 1) -> Any:
    """A call that nothing interrupts."""
    return what(*args)


def _parent(hashes: bytes, begin: int) -> SequenceHash:
    return SequenceHash(hashes[(begin - 1) * HASH_BYTES : begin * HASH_BYTES]) if begin else NO_PARENT


def call_of(caller: Any) -> Call:
    """How calls are made of a manager, or of one whose calls signals interrupt."""
    return getattr(caller, "interrupted_call", plain)


def unended(node: Node) -> str:
    """What an engine that owns HBM holds though it rests; "" when all is well."""
    engine, manager = node.engine, node.manager
    if engine is None or manager is None:
        return ""
    copies = manager._copies
    if engine.stores:
        return f"{len(engine.stores)} stores have not ended"
    if copies.open or copies.coming or copies.stores or copies._cancelled:
        return (
            "copies are remembered that have ended: "
            f"{copies.open or copies.stores or copies._cancelled or copies.coming}"
        )
    known, held = set(manager.held(Tier.HBM)), engine.hbm.keys()
    if known != held:
        return f"HBM holds {len(held - known)} blocks that the manager does not know of, and lacks {len(known - held)}"
    return ""


def drawn_owner(rng: random.Random) -> bool:
    """Whether an instance has an engine that owns HBM."""
    return rng.random() < OWNER_SHARE
