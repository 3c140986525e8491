"""Instances that read each other's blocks: what lends and what reads is production code, the way between the two is
simulated.

An owner is a manager's ledger behind the readable `Leases`, in threads of its own process; a reader is `LocalReader`,
in the manager's table of `Peers`. They stand for the native server and the native client. Between grant and copy, and
amid each row, time goes on: the owner evicts, clears, uses a slot again, closes, dies, or comes back at its address;
the reader freezes, gives up or dies.

What a reader counts as arrived is held to the bytes it must have, and what it finds corrupt to a cause: while a lease
lasts, and nobody flipped a bit, the bytes of its slots are those of its blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import greenlet
import numpy as np

from kvbm import assembly
from kvbm.assembly.lending import Opened
from kvbm.core.answers import FindAnswer, PeerHolding
from kvbm.core.codec import FrameBytes, decode_frame
from kvbm.core.errors import KvbmError
from kvbm.core.events import BlocksMigrated, MigrateCause
from kvbm.core.fetching import LeftAlone
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Tier, pack_slots, split_hashes, split_slots
from kvbm.core.lent import LentCounts
from kvbm.core.peer_address import PeerAddress
from kvbm.core.reads import ReadOutcome
from kvbm.pools.memory import MemoryPool
from kvbm.transport.base import PeerRead, RootOf, check_wish, failed_read
from kvbm.transport.lending import Leases, LentLimits, PinnedRun
from kvbm.transport.local import LocalReader
from kvbm.transport.peers import MEMORY, TCP, Peers
from tests.faults.simulator.kernel import INSTALLED, Event, Process, Thread, Violation, Waiter, World

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Node

USUAL_STEP_S = 0.001  # of a question, an answer, or half a row, on average
PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.2  # whoever failed is left alone; a minute would leave nothing to see
_REACTION_S = 0.001


class _Ended(Exception):
    """A read is over before its bytes are here, and why."""


class PeerNetwork:
    """Who lends where, and what is wrong with the ways there.

    Args:
        cut: names of machines that reach nobody.
        rows_of: hashes → the bytes that these blocks must have.

    Attributes:
        lent: machine → who lends there now, or did last.
        step_s: what a step of a read takes, on average.
        flips: how probable a flipped bit is, of each row on its way.
        is_stale: the catalog's answers are those it gave before.
        arrived: blocks that reads have brought; fetched: those of them that journals have.
    """

    def __init__(
        self,
        world: World,
        cut: set[str],
        rows_of: Callable[[bytes], np.ndarray],
        told: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.world, self.cut, self.rows_of, self.told = world, cut, rows_of, told
        self.lent: dict[str, SimLending] = {}
        self.readings: dict[Any, _Reading] = {}  # by the thread that reads
        self.roots: dict[Process, Any] = {}  # of namespaces, as each process knows them
        self.step_s, self.flips, self.is_stale = USUAL_STEP_S, 0.0, False
        self.arrived = self.fetched = 0
        self._racks = world.rng.choice((1, 2, 8))  # machines whose number is the same in one share memory
        self._answers: dict[tuple[str, bytes, bytes], Sequence[PeerHolding]] = {}
        self._brought: dict[Process, set[bytes]] = {}

    def host_of(self, machine: str) -> str:
        """What names the memory a machine shares with others."""
        return f"host-{int(machine.rpartition('-')[2]) % self._racks}"

    def lenders(
        self, ask: Callable[[], FindAnswer], asker: str, namespace: NamespaceId, hashes: bytes
    ) -> Sequence[PeerHolding]:
        """Who lends these blocks as the catalog says, or said before."""
        key = (asker, namespace, hashes[:HASH_BYTES])
        if key not in self._answers or not (self.is_stale or self.world.rng.random() < 0.1):
            self._answers[key] = ask().peers
        return self._answers[key]

    def ended(self, reading: _Reading, hashes: bytes, rows: np.ndarray, at: Sequence[int], read: PeerRead) -> None:
        """A read has ended. Raises Violation: with what must not be."""
        reader, owner, now_s = reading.process, reading.owner, self.world.now
        if now_s > reading.until_s + 1e-6 and reader.thawed_s < reading.begun_s:
            raise Violation(f"{reader} read until {now_s:.4f} s, its deadline was at {reading.until_s:.4f} s")
        for block, row, outcome in zip(split_hashes(hashes), at, read.result.outcomes, strict=True):
            if outcome == ReadOutcome.GOOD:
                if not np.array_equal(rows[row], self.rows_of(block)[0]):
                    raise Violation(f"{reader} took wrong bytes for block {block.hex()[:8]} of {reading.owner_name}")
                self.arrived += 1
                self._brought.setdefault(reader, set()).add(block)
            elif outcome == ReadOutcome.CORRUPT and owner is not None and not owner.may_be_corrupt(block, reading):
                raise Violation(
                    f"block {block.hex()[:8]} of {reading.owner_name} changed while {reader} had a lease of it"
                )

    def wrote(self, process: Process, data: FrameBytes) -> None:
        """A frame is in a journal. Raises Violation: it says that blocks were fetched which no read has brought."""
        for event in decode_frame(data.data, 0, assembly.NATIVE.crc32c)[0].events:
            if not isinstance(event, BlocksMigrated) or event.cause != MigrateCause.FETCH:
                continue
            blocks = split_hashes(event.hashes)
            if (
                not event.kept
                or isinstance(event.source, Tier)
                or not self._brought.get(process, set()).issuperset(blocks)
            ):
                raise Violation(f"the journal of {process} has a fetch from {event.source} that no read has brought")
            self.fetched += len(blocks)

    def unsettled(self, node: Node) -> str:
        """What of an instance is lent, pinned or read though nobody asks any more; "" for nothing."""
        manager: Any = node.manager
        lending = self.lent.get(node.machine.name)
        if lending is not None and lending.process is node.process and lending.leases.blocks:
            return f"{lending.leases.blocks} blocks are lent"
        if running := len(manager._copies.running):
            return f"{running} copies have not ended"
        manager._ledger.expire(float("inf"))  # what engines keep is theirs
        for tier in manager.pools.slots:
            counts = manager._ledger.counts(tier)
            if counts.held != counts.evictable:
                return f"{counts.held - counts.evictable} blocks in {tier.name} are pinned"
        return ""


class _Reading:
    """One read under way."""

    def __init__(
        self, network: PeerNetwork, process: Process, owner_name: str, is_memory: bool, deadline_s: float
    ) -> None:
        self.network, self.world, self.process, self.owner_name = network, network.world, process, owner_name
        self.is_memory, self.is_closed = is_memory, False
        self.begun_s = self.world.now
        self.until_s = self.begun_s + deadline_s
        self.owner: SimLending | None = None
        self.places: dict[bytes, int] = {}  # block → its slot in HOST, where it was lent from there
        self.flipped: set[bytes] = set()  # on their way

    def step(self) -> None:
        """Time goes on. Raises _Ended: and the read is over."""
        self.wait(self.world.rng.expovariate(1 / self.network.step_s))

    def step_on_the_way(self) -> None:
        """As `step`, for what the owner sends: not while it is frozen or cut off, and not once it is dead."""
        self.step()
        while not self.is_memory and self.owner is not None:
            if self.owner.is_over:
                raise _Ended("connection reset")
            if not self.owner.process.frozen and not self.is_cut:
                return
            self.wait(0.02)

    @property
    def is_cut(self) -> bool:
        """Whether nothing comes from one to the other. On one machine they need no network."""
        machines = {self.process.machine} if self.owner is None else {self.process.machine, self.owner.process.machine}
        return not self.is_memory and bool(machines & self.network.cut)

    def wait(self, seconds: float) -> None:
        """Raises _Ended: the deadline, or the reader closes."""
        left_s = self.until_s - self.world.now
        Waiter(self.world).wait(max(0.0, min(seconds, left_s)))
        if seconds >= left_s:
            raise _Ended("too late")
        if self.is_closed:
            raise _Ended("this reader is closed")


class _Passage:
    """A row of an owner that is copied piece by piece: whoever takes it as an array waits for its bytes."""

    def __init__(self, reading: _Reading, block: bytes, row: np.ndarray) -> None:
        self._reading, self._block, self._row = reading, block, row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        reading, row = self._reading, self._row
        rng, came = reading.world.rng, np.empty_like(row)
        cut = rng.randrange(len(row))
        reading.step_on_the_way()
        came[:cut] = row[:cut]
        reading.step_on_the_way()
        came[cut:] = row[cut:]
        if rng.random() < reading.network.flips:
            came[rng.randrange(len(came))] ^= 1 << rng.randrange(8)
            reading.flipped.add(self._block)
        return came

    def tobytes(self) -> bytes:
        """What its slot holds now."""
        return self._row.tobytes()


class SimReader:
    """`PeerReader` of one owner. It finds whoever lends at the address when it reads."""

    def __init__(
        self,
        network: PeerNetwork,
        process: Process,
        owner: InstanceId,
        transport: str,
        address: PeerAddress,
        root_of: RootOf,
    ) -> None:
        self.transport = transport
        self._network, self._process, self._owner, self._root_of = network, process, owner, root_of
        self._machine = (address.unix or address.tcp).partition(":")[0]
        self._readings: list[_Reading] = []
        self._is_closed = False

    def read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, deadline_s: float
    ) -> PeerRead:
        """As `PeerReader.read`."""
        count = check_wish(hashes, rows, at)
        reading = _Reading(self._network, self._process, self._owner, self.transport == MEMORY, deadline_s)
        thread = greenlet.getcurrent()
        self._network.readings[thread] = reading
        self._readings.append(reading)
        try:
            read = self._read(reading, namespace, hashes, rows, at)
        except _Ended as ended:
            read = failed_read(count, str(ended))
        finally:
            self._readings.remove(reading)
            del self._network.readings[thread]
        self._network.ended(reading, hashes, rows, range(count) if at is None else at, read)
        return read

    def close(self) -> None:
        """As `PeerReader.close`."""
        self._is_closed = True
        for reading in self._readings:
            reading.is_closed = True

    def _read(
        self, reading: _Reading, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None
    ) -> PeerRead:
        reading.step()
        while reading.is_cut:
            reading.wait(0.02)
        owner = self._network.lent.get(self._machine)
        if self._is_closed or owner is None or owner.is_over:
            raise _Ended("connection refused")
        reading.owner = owner
        try:
            owner.process.shortages.check_thread("native")
        except RuntimeError as error:  # it has none for this connection
            raise _Ended(str(error)) from None
        world = reading.world
        local = LocalReader(owner.leases, self._root_of, lambda: world.now, assembly.NATIVE.crc32c)
        return local.read(namespace, hashes, rows, at, reading.until_s - world.now)


class _Question:
    """What an owner is asked, and its answer: pinned from when it is given until the reader has begun a lease, or does
    not come.
    """

    def __init__(self, world: World, namespace: NamespaceId, hashes: bytes) -> None:
        self.namespace, self.hashes = namespace, hashes
        self.answered, self.taken = Event(world), Event(world)
        self.lent: PinnedRun | None = None


class SimLending:
    """What a manager's native server does: it lends blocks of HOST and NVME under the ledger's lock, each question in a
    thread of the owner.

    It is `BlockLender` to `Leases`, and `Server` to `Exchange`.

    Attributes:
        is_over: the owner is dead, or has closed.
        is_held_back: it grants nothing, as if another had taken its place.
        spoilt: HOST slots in which a bit was flipped.
    """

    memory = None

    def __init__(
        self,
        network: PeerNetwork,
        process: Process,
        ledger: Any,
        lock: Any,
        slots: Any,
        evict: Callable[[Tier, bytes], object],
    ) -> None:
        self.network, self.world, self.process = network, network.world, process
        self.host, self._nvme = slots[Tier.HOST], slots.get(Tier.NVME)
        self.host_rows = self.host.memory  # of whatever kind HOST is
        self._ledger, self._lock, self._evict = ledger, lock, evict
        self._roots: dict[NamespaceId, bytes] = {}
        self._questions: list[_Question] = []
        self._is_fenced = self.is_held_back = self.is_over = False
        self.spoilt: set[int] = set()
        rng = self.world.rng
        limits = LentLimits(rng.choice((0.01, 0.1, 1.0)), rng.choice((2, 8, 64)), 0.01)
        self.leases = Leases(self, rng.randrange(1 << 16), limits)
        process.on_kill.append(self._hang_up)

    def counts(self) -> LentCounts:
        """Nobody looks at it here."""
        return LentCounts()

    def _hang_up(self) -> None:
        """Whoever waits for an answer hears that there will be none."""
        self.is_over = True
        for question in self._questions:
            question.answered.set()

    # -- what the instance says ---------------------------------------------------------------------------------------

    def admit(self, namespace: NamespaceId, root: bytes) -> None:
        self._roots[namespace] = root

    def withdraw(self, namespace: NamespaceId) -> None:
        self._roots.pop(namespace, None)

    def fence(self, fenced: bool) -> None:
        self._is_fenced = fenced

    def close(self, timeout_s: float = 5.0) -> bool:
        self._hang_up()
        for lease in list(self.leases._leases):
            self.leases.end(lease)
        return True

    def disown(self) -> None:
        return

    # -- what readers ask, in their threads ---------------------------------------------------------------------------

    def opening(self, namespace: bytes) -> tuple[bytes, int] | None:
        root = self._roots.get(NamespaceId(namespace))
        return None if root is None else (root, self.host.block_bytes)

    def lend(self, namespace: bytes, hashes: bytes) -> PinnedRun | None:
        reading = self.network.readings[greenlet.getcurrent()]
        reading.step_on_the_way()
        question = _Question(self.world, NamespaceId(namespace), hashes)
        self._questions.append(question)
        self._spawn(lambda: self._answer(question))
        question.answered.wait(max(0.0, reading.until_s - self.world.now))
        self._questions.remove(question)
        if self.is_over:
            raise _Ended("connection reset")
        if not question.answered.is_set():
            raise _Ended("too late")
        if (lent := question.lent) is None:
            return None
        question.taken.set()  # the lease begins before anybody else runs
        blocks = split_hashes(hashes)[: len(lent.slots)]
        for block, tier, slot in zip(blocks, lent.tiers, lent.slots, strict=True):
            if tier is Tier.HOST:
                reading.places[block] = slot
        rows: Any = [_Passage(reading, block, row) for block, row in zip(blocks, lent.rows, strict=True)]
        return lent._replace(rows=rows)

    def give_back(self, lent: PinnedRun) -> None:
        if not self.process.alive:
            return
        with self._lock:
            for tier, slot in reversed(list(zip(lent.tiers, lent.slots, strict=True))):
                self._ledger.unpin(tier, pack_slots([slot]))

    def suspect(self, namespace: bytes, hashes: bytes) -> None:
        self._spawn(lambda: self._look_at(NamespaceId(namespace), hashes))

    def may_be_corrupt(self, block: bytes, reading: _Reading) -> bool:
        """Whether something is known that made a block corrupt which was read under a lease that still lasted."""
        return self.is_over or block in reading.flipped or reading.places.get(block) in self.spoilt

    # -- what the owner does, in its own ------------------------------------------------------------------------------

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = Thread(self.world, target=work, name="lend")
        thread.process = self.process
        self.world.call_at(self.world.now, self.process, thread.start)

    def _answer(self, question: _Question) -> None:
        lent = None
        if not (self.is_over or self._is_fenced or self.is_held_back):
            with self._lock:
                found = self._ledger.lend(question.namespace, question.hashes)
            lent = self._lent(question, [Tier(tier) for tier in found.tiers], list(split_slots(found.slots)))
        question.lent = lent
        question.answered.set()
        if lent is None:
            return
        if not question.taken.wait(_REACTION_S) or self.is_over:
            question.lent = None
            if not question.taken.is_set():
                self.give_back(lent)
            return
        Waiter(self.world).wait(self.leases.limits.lease_s + _REACTION_S)
        self.leases.expire(self.world.now)

    def _lent(self, question: _Question, tiers: list[Tier], slots: list[int]) -> PinnedRun | None:
        """A run that is pinned, with its bytes: of NVME as they are read now, to before the first block that
        cannot be.
        """
        if not slots:
            return None
        count, hashes = len(slots), split_hashes(question.hashes)
        rows: list[np.ndarray] = [np.empty(0, dtype=np.uint8)] * count
        checksums, end = np.zeros(count, dtype=np.uint32), count
        in_nvme = [at for at, tier in enumerate(tiers) if tier is Tier.NVME]
        if in_nvme:
            lane = np.empty((len(in_nvme), self.host.block_bytes), dtype=np.uint8)
            wanted = b"".join(hashes[at] for at in in_nvme)
            result = self._nvme.read([slots[at] for at in in_nvme], question.namespace, wanted, lane)
            for number, at in enumerate(in_nvme):
                rows[at], checksums[at] = lane[number], result.checksums[number]
                if result.outcomes[number] != ReadOutcome.GOOD:
                    end = min(end, at)
                    if result.outcomes[number] == ReadOutcome.CORRUPT:
                        self._evict_corrupt(Tier.NVME, hashes[at])
        lent, others = PinnedRun(tuple(tiers), tuple(slots), checksums, rows).cut(end)
        if self.is_over:
            end, others = 0, PinnedRun(tuple(tiers), tuple(slots), checksums, rows)
        if others.slots:
            self.give_back(others)
        if not end:
            return None
        for at, (tier, slot) in enumerate(zip(lent.tiers, lent.slots, strict=True)):
            if tier is Tier.HOST:
                rows[at], checksums[at] = self.host_rows[slot], self.host.checksums([slot])[0]
        return lent._replace(rows=rows[:end], checksums=checksums[:end])

    def _look_at(self, namespace: NamespaceId, hashes: bytes) -> None:
        """A reader found other bytes than those of these blocks: what is wrong here, too, is evicted."""
        for block in split_hashes(hashes):
            with self._lock:
                found = self._ledger.lend(namespace, block, Tier.HOST)
            for slot in () if self.is_over else split_slots(found.slots):
                is_wrong = assembly.NATIVE.crc32c(self.host_rows[slot].tobytes()) != self.host.checksums([slot])[0]
                with self._lock:
                    self._ledger.unpin(Tier.HOST, pack_slots([slot]))
                if is_wrong:
                    self._evict_corrupt(Tier.HOST, block)

    def _evict_corrupt(self, tier: Tier, block: bytes) -> None:
        try:
            self._evict(tier, block)
        except KvbmError as error:  # it closes
            self.network.told("not_evicted", {"process": str(self.process), "why": str(error)})


# -- what stands for functions of kvbm.assembly.lending ---------------------------------------------------------------


def open_peers(
    settings: Any,
    instance: InstanceId,
    namespaces: Sequence[Namespace],
    roots: Any,
    tls: Any = None,
    device: Any = None,
    nixl: Any = None,
) -> Peers | None:
    """Stands for `kvbm.assembly.peers.open_peers`."""
    network: PeerNetwork | None = INSTALLED.world.peers  # type: ignore[attr-defined]
    if network is None:
        return None
    process = INSTALLED.world.current
    network.roots[process] = roots
    peers = Peers(
        lambda owner, transport, address: SimReader(network, process, owner, transport, address, roots.root),
        network.host_of(process.machine),
        (MEMORY, TCP),
        lambda one: roots.find(one) is not None,
    )
    peers._lacking, peers._broken, peers._shut = (LeftAlone(PAUSE_S, LONGEST_PAUSE_S) for _ in range(3))
    peers.declare(namespaces)
    return peers


def open_lending(
    settings: Any, instance: InstanceId, ledger: Any, lock: Any, pools: Any, tls: Any = None
) -> Opened | None:
    """Stands for `kvbm.assembly.lending.open_lending`. At the address of a process before it lends the next one.

    Raises: RuntimeError: there is no thread to listen with.
    """
    network: PeerNetwork | None = INSTALLED.world.peers  # type: ignore[attr-defined]
    if network is None or Tier.HOST not in pools.slots:
        return None
    process, evict = INSTALLED.world.current, list[Callable[[Tier, Any], object]]()
    process.shortages.check_thread("native")
    lending = SimLending(
        network, process, ledger, lock, pools.slots, lambda tier, block: [withdraw(tier, block) for withdraw in evict]
    )
    network.lent[process.machine] = lending
    address = PeerAddress(network.host_of(process.machine), f"{process.machine}:unix", f"{process.machine}:7711")
    return Opened(lending, address, evict, {})  # type: ignore[arg-type]


def flipped_rows(network: PeerNetwork, rng: random.Random) -> int:
    """Flip a bit in some HOST slots that lend now; how many.

    Not where an engine owns HBM, whose workers take HOST's memory as it is.
    """
    count = 0
    for machine in sorted(network.lent):
        lending = network.lent[machine]
        for slot in range(0 if lending.is_over or not isinstance(lending.host, MemoryPool) else lending.host.slots):
            if rng.random() < 0.2:
                lending.host_rows[slot, rng.randrange(lending.host.block_bytes)] ^= 1 << rng.randrange(8)
                lending.spoilt.add(slot)
                count += 1
    return count
