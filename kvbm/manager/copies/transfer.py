"""Moving the bytes of one copy between two pools. The ledger has given both ends to the copy; nobody else touches them.

Where one of the two ends is memory the CPU reaches, that end is the other's rows, and bytes move once. Between two ends
of which neither is, they go through a lane of the staging arena, in parts where the run is longer. Memory of a tier
that outlives the process is never used in place: such a tier proves what it reads, and knows when its slots may be
written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.core.fetching import Transfer
from kvbm.core.ids import DURABLE_TIERS, HASH_BYTES, Epoch, InstanceId, Namespace, Tier, split_hashes, split_slots
from kvbm.core.results import Copy
from kvbm.manager.record.offsets import Offsets
from kvbm.pools.base import ObjectPool, PodPool, Proof, ReadOutcome, ReadResult, SlotPool
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.transport.peers import Peers, PeerSource, PeerStats

_JOIN_S = 60.0  # between two looks whether a read has ended


class Pools(NamedTuple):
    """The pools of one instance: those with slots by tier, the cluster's object pool and the pod's folder if there are
    any, the keys of what is encrypted in slots, the other instances that blocks are read from, and who else is told of
    further namespaces first.
    """

    slots: dict[Tier, SlotPool]
    object: ObjectPool | None = None
    pod: PodPool | None = None
    keys: SlotKeys | None = None
    peers: Peers | None = None
    on_declare: Callable[[Sequence[Namespace]], None] | None = None

    def declare(self, namespaces: Sequence[Namespace]) -> None:
        """Say what further namespaces are, to pools that must know how blocks are coded and who encrypts them."""
        if self.on_declare is not None:
            self.on_declare(namespaces)
        if self.keys is not None:
            self.keys.declare(namespaces)
        if self.object is not None:
            self.object.admit(namespaces)
        if self.peers is not None:
            self.peers.declare(namespaces)

    @property
    def has_gpu(self) -> bool:
        """Whether HBM is a GPU's."""
        hbm = self.slots.get(Tier.HBM)
        return isinstance(hbm, HbmPool) and hbm.has_order

    @property
    def object_blocks(self) -> int:
        """k, blocks of an object; 1 where there is no object pool."""
        return 1 if self.object is None else self.object.blocks

    @property
    def peer_stats(self) -> PeerStats | None:
        """What reading from other instances has counted; None where none is read from."""
        return None if self.peers is None else self.peers.stats()

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Reads from other instances since the last call."""
        return () if self.peers is None else self.peers.take_transfers()

    def close(self) -> None:
        """Close every pool."""
        for pool in self.slots.values():
            pool.close()
        if self.object is not None:
            self.object.close()
        if self.pod is not None:
            self.pod.close()
        if self.peers is not None:
            self.peers.close()

    def disown(self) -> None:
        """This process is a forked child: let go of files, which would stay locked for as long as it lives."""
        for pool in self.slots.values():
            if isinstance(pool, NvmePool):
                pool.disown()

    def note_epoch(self, epoch: Epoch) -> None:
        """An epoch has begun, durably, that speaks of slots here."""
        nvme = self.slots.get(Tier.NVME)
        if isinstance(nvme, NvmePool) and nvme.generations is not None:
            nvme.generations.note_epoch(epoch)

    def memory(self, tier: Tier | InstanceId) -> np.ndarray | None:
        """The slots of a tier that copies read and write in place; None where they have to ask its pool."""
        if not isinstance(tier, Tier) or tier in DURABLE_TIERS:
            return None
        return self.slots[tier].memory

    def need_staging(self, source: Tier | InstanceId, target: Tier) -> bool:
        """Whether a copy needs a place between its two ends."""
        return self.memory(source) is None and self.memory(target) is None


class Moved(NamedTuple):
    """How a copy ended, block by block.

    Attributes:
        arrived: whether the block's bytes are in place and verified.
        outcomes: what became of its read.
        unwritten: why the target took none of them, "" when it did.
    """

    arrived: list[bool]
    outcomes: list[ReadOutcome]
    unwritten: str = ""


class RemoteSource(NamedTuple):
    """Where the blocks of a copy lie whose source has no slots of ours.

    Attributes:
        chain: packed hashes, among which the copy's are, in their order: whole objects where the source is OBJECT.
        slots: where the source is an instance of the pod, its slot for each block of the chain.
        peer: where the source is an instance that lends, how it is read from.
    """

    chain: bytes
    slots: tuple[int, ...] = ()
    peer: PeerSource | None = None

    def positions(self, hashes: bytes) -> list[int]:
        """Where in the chain these blocks of it are."""
        index = {block: at for at, block in enumerate(split_hashes(self.chain))}
        return [index[block] for block in split_hashes(hashes)]

    def objects_of(self, hashes: bytes, blocks: int) -> list[bytes]:
        """The whole objects, of so many blocks, that these blocks of the chain lie in."""
        size = blocks * HASH_BYTES
        numbers = dict.fromkeys(at // blocks for at in self.positions(hashes))
        return [self.chain[number * size : (number + 1) * size] for number in numbers]


class _Run(NamedTuple):
    """A copy with its columns taken apart.

    Attributes:
        positions: of its blocks in a chain of objects, where one of its ends is OBJECT, or in that of `remote`.
        generation: as in `Proof`.
        wait_s: the longest an instance that lends is waited for.
    """

    copy: Copy
    pools: Pools
    source_slots: list[int]
    target_slots: list[int]
    remote: RemoteSource | None
    positions: Sequence[int]
    generation: int | None
    wait_s: float

    @property
    def blocks(self) -> int:
        return len(self.copy.hashes) // HASH_BYTES

    @property
    def object_blocks(self) -> int:
        """How many blocks belong together at one of the ends."""
        return self.pools.object_blocks if Tier.OBJECT in (self.copy.source, self.copy.target) else 1

    def parts(self, lane_blocks: int) -> Iterator[tuple[int, int]]:
        """The blocks that go through a lane at a time, as half-open ranges; none cuts an object."""
        begin, k = 0, self.object_blocks
        while begin < self.blocks:
            end = min(begin + lane_blocks, self.blocks)
            while begin < end < self.blocks and self.positions[end - 1] // k == self.positions[end] // k:
                end -= 1
            if end == begin:
                raise PoolError(f"a lane of {lane_blocks} blocks holds no object of {k}; raise offload.staging_bytes")
            yield begin, end
            begin = end

    def whole(self, indexes: list[int]) -> list[int]:
        """Those of some blocks that may be written: to OBJECT, none without the others of its object."""
        k = self.object_blocks
        if self.copy.target != Tier.OBJECT or k == 1:
            return indexes
        there = set(indexes)
        return [i for i in indexes if all(other in there for other in range(i // k * k, i // k * k + k))]

    def proof(self, indexes: Sequence[int], checksums: np.ndarray) -> Proof:
        """Of some of its blocks. `checksums` are of the blocks from `indexes` alone."""
        hashes = self.copy.hashes
        if len(indexes) < self.blocks:
            hashes = b"".join(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in indexes)
        return Proof(self.copy.namespace, self.copy.epoch, hashes, np.ascontiguousarray(checksums), self.generation)

    def read(self, begin: int, end: int, rows: np.ndarray, at: Sequence[int] | None) -> ReadResult:
        """Fill rows with the blocks from `begin` to before `end`."""
        copy = self.copy
        hashes = copy.hashes[begin * HASH_BYTES : end * HASH_BYTES]
        if copy.source == Tier.OBJECT:
            return self._get(begin, end, rows, at)
        if isinstance(copy.source, Tier):
            return self.pools.slots[copy.source].read(self.source_slots[begin:end], copy.namespace, hashes, rows, at)
        assert self.remote is not None
        if (peer := self.remote.peer) is not None:
            assert self.pools.peers is not None
            return self.pools.peers.read(peer, copy.namespace, hashes, rows, at, self.wait_s)
        assert self.pools.pod is not None
        slots = [self.remote.slots[position] for position in self.positions[begin:end]]
        return self.pools.pod.read(copy.source, slots, copy.namespace, hashes, rows, at)

    def _get(self, begin: int, end: int, rows: np.ndarray, at: Sequence[int] | None) -> ReadResult:
        """The same from the object pool: one call for each stretch without a hole, which is nearly always the whole
        run.
        """
        pool, remote = self.pools.object, self.remote
        assert pool is not None and remote is not None
        k, outcomes, checksums = pool.blocks, list[ReadOutcome](), list[np.ndarray]()
        wanted = self.positions[begin:end]
        places = range(end - begin) if at is None else at
        cuts = [0, *(i for i, (one, next_) in enumerate(pairwise(wanted), 1) if next_ != one + 1), len(wanted)]
        for first, last in pairwise(cuts):
            from_block, to_block = wanted[first] // k * k, -(-(wanted[last - 1] + 1) // k) * k
            chain = remote.chain[from_block * HASH_BYTES : to_block * HASH_BYTES]
            result = pool.get(self.copy.namespace, chain, rows, places[first:last], wanted[first] - from_block)
            outcomes += result.outcomes
            checksums.append(result.checksums)
        return ReadResult(outcomes, np.concatenate(checksums))

    def write(self, indexes: Sequence[int], proof: Proof, rows: np.ndarray, at: Sequence[int] | None) -> list[bool]:
        """Put rows into the slots of some blocks; for each whether it is there. Raises PoolError: none is."""
        if self.copy.target == Tier.OBJECT:
            assert self.pools.object is not None
            return self.pools.object.put(rows, proof, at)
        self.pools.slots[self.copy.target].write([self.target_slots[i] for i in indexes], rows, proof, at)
        return [True] * len(indexes)


def move(
    copy: Copy,
    pools: Pools,
    offsets: Offsets,
    wait_s: float,
    lane: np.ndarray | None = None,
    remote: RemoteSource | None = None,
    generation: int | None = None,
) -> Moved:
    """Read from the source, verify, write to the target. Returns when the bytes are in place or will never be.

    A target that outlives the process is written only once the withdrawal of what its slots held is durable.

    Args:
        lane: of the staging arena, where `pools.need_staging`.
        remote: where the source's blocks are, if it has no slots of ours.
        generation: of a target of NVME when the copy began.
        wait_s: the longest it waits for that, and for an instance that lends.
    """
    positions = range(len(copy.hashes) // HASH_BYTES) if remote is None else remote.positions(copy.hashes)
    slots = split_slots(copy.source_slots), split_slots(copy.target_slots)
    run = _Run(copy, pools, *slots, remote, positions, generation, wait_s)
    if (there := pools.memory(copy.target)) is not None:
        return _read_in_place(run, there)
    if (here := pools.memory(copy.source)) is not None:
        return _write_in_place(run, here, offsets, wait_s)
    if lane is None:
        return Moved([False] * run.blocks, [ReadOutcome.FAILED] * run.blocks, "no memory for staging was free")
    return _stage(run, lane, offsets, wait_s)


def _read_in_place(run: _Run, memory: np.ndarray) -> Moved:
    """The source reads into the target's slots.

    What is not good leaves them with anything; the ledger frees them afterwards.
    """
    result = run.read(0, run.blocks, memory, run.target_slots)
    good = [outcome == ReadOutcome.GOOD for outcome in result.outcomes]
    kept = [index for index, ok in enumerate(good) if ok]
    if kept:
        try:
            target = run.pools.slots[run.copy.target]
            target.seal([run.target_slots[i] for i in kept], run.proof(kept, result.checksums[kept]))
        except PoolError as error:
            return Moved([False] * run.blocks, result.outcomes, str(error))
    return Moved(good, result.outcomes)


def _write_in_place(run: _Run, memory: np.ndarray, offsets: Offsets, durable_wait_s: float) -> Moved:
    """The target takes its bytes from the source's slots."""
    copy, everything = run.copy, range(run.blocks)
    assert isinstance(copy.source, Tier)
    good = [ReadOutcome.GOOD] * run.blocks
    if why := _not_durable(copy, offsets, durable_wait_s):
        return Moved([False] * run.blocks, good, why)
    try:
        checksums = run.pools.slots[copy.source].checksums(run.source_slots)
        arrived = run.write(everything, run.proof(everything, checksums), memory, run.source_slots)
    except PoolError as error:
        return Moved([False] * run.blocks, good, str(error))
    return Moved(arrived, good, _refused(copy, arrived))


class _ReadAhead:
    """Reads the parts of a run into the halves of a lane in turn: each while the one before it is written, where one of
    the two is a GPU.

    Between two others there is no gain: a device and a store take as much at a time as they can. A context: where it is
    left nothing is read any more, so the lane may be another copy's.
    """

    def __init__(self, run: _Run, lane: np.ndarray) -> None:
        self._run = run
        half = len(lane) // 2 // run.object_blocks * run.object_blocks
        is_gpus = Tier.HBM in (run.copy.source, run.copy.target)  # else its memory is in reach, and nothing is staged
        self._halves = (lane[:half], lane[half : 2 * half]) if half and is_gpus else (lane,)
        self.parts = list(run.parts(len(self._halves[0])))
        self._reading: threading.Thread | None = None
        self._ahead: ReadResult | Exception | None = None  # of the part that was read ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait()

    def take(self, number: int) -> tuple[ReadResult, np.ndarray]:
        """A part, and the rows it lies in until the part after the next is taken. The next is begun."""
        self._wait()
        found, self._ahead = self._ahead, None
        if isinstance(found, Exception):
            raise found
        if found is None:  # the first; or the system gave no thread
            found = self._read(number)
        if number + 1 < len(self.parts) and len(self._halves) > 1:
            self._reading = threading.Thread(
                target=self._read_ahead, args=(number + 1,), name="kvbm-ahead", daemon=True
            )
            try:
                self._reading.start()
            except RuntimeError:
                self._reading = None
        return found, self._rows(number)

    def _rows(self, number: int) -> np.ndarray:
        begin, end = self.parts[number]
        return self._halves[number % len(self._halves)][: end - begin]

    def _read(self, number: int) -> ReadResult:
        return self._run.read(*self.parts[number], self._rows(number), None)

    def _read_ahead(self, number: int) -> None:
        try:
            self._ahead = self._read(number)
        except Exception as error:  # noqa: BLE001  it is raised where the part is taken
            self._ahead = error

    def _wait(self) -> None:
        """A pool that never ends a read holds its copy, as it does without reading ahead."""
        while self._reading is not None:
            self._reading.join(_JOIN_S)
            if not self._reading.is_alive():
                self._reading = None


def _stage(run: _Run, lane: np.ndarray, offsets: Offsets, durable_wait_s: float) -> Moved:
    """Part after part through a lane, the next read while one is written; after a part that the target refuses, no
    other is begun.
    """
    copy = run.copy
    arrived, outcomes = [False] * run.blocks, [ReadOutcome.FAILED] * run.blocks
    may_write = False
    with _ReadAhead(run, lane) as reads:
        for number, (begin, end) in enumerate(reads.parts):
            result, rows = reads.take(number)
            outcomes[begin:end] = result.outcomes
            kept = run.whole([at for at, outcome in enumerate(result.outcomes) if outcome == ReadOutcome.GOOD])
            if not kept:
                continue
            if not may_write and (why := _not_durable(copy, offsets, durable_wait_s)):
                return Moved(arrived, outcomes, why)
            may_write = True
            indexes = [begin + at for at in kept]
            proof = run.proof(indexes, result.checksums[kept])
            try:
                stored = run.write(indexes, proof, rows, None if len(kept) == len(rows) else kept)
            except PoolError as error:
                return Moved(arrived, outcomes, str(error))
            for index, ok in zip(indexes, stored, strict=True):
                arrived[index] = ok
            if why := _refused(copy, stored):
                return Moved(arrived, outcomes, why)
    return Moved(arrived, outcomes)


def _not_durable(copy: Copy, offsets: Offsets, durable_wait_s: float) -> str:
    """Why the target must not be written; "" when it may."""
    if offsets.wait_durable(copy.epoch, copy.after, durable_wait_s):
        return ""
    return f"offset {copy.after} of epoch {copy.epoch} was not durable within {durable_wait_s} s"


def _refused(copy: Copy, stored: list[bool]) -> str:
    return "" if all(stored) or copy.target != Tier.OBJECT else "the object store did not take every block"
