"""The NVME part of `kvbm bench pools`: verified reads and writes of runs beside fio's, on one file, from one memory, in
turn.

A device's speed depends on where a file lies, on how scattered memory is, and on the second: so fio has the pool's own
file and the pages of the HOST pool that rows lie in, and a pass of either side is cut into slices that take turns.
Blocks come in random order on both sides. A block that comes from HOST brings its checksum along, so do those written
here; what computing it would add is measured beside.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from kvbm.assembly import NATIVE, NATIVE_ARENA, OPEN_BLOCK_IO, RowCopier
from kvbm.bench.fio import Fio
from kvbm.bench.native import open_unverified
from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.host.pool import HostPool
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockEngine, BlockIoOptions
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.tenant_keys import KEY_BYTES, KEY_ID_BYTES, KeySource, TenantKeys

CALLERS = 2  # threads that read or write runs, as offload.threads and onboard.threads have it
NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
_EPOCH = Epoch(1)
_ROWS_BYTES = 256 << 20  # memory that runs lie in
_STOP_S = 10.0
_HUGE_BYTES = 2 << 20
_SLICES = 4  # of a pass
_KINDS: tuple[Literal["read"], Literal["write"]] = ("read", "write")


class Rates(NamedTuple):
    """Bytes a second, pair by pair.

    Attributes:
        unverified: reads that check nothing.
        computed: writes that compute the checksums in their time.
        fio_reads, fio_writes: empty without fio.
        fio_alone: reads and writes of a fio with memory of its own, once; empty without fio.
    """

    reads: list[float]
    unverified: list[float]
    fio_reads: list[float]
    writes: list[float]
    computed: list[float]
    fio_writes: list[float]
    fio_alone: list[float]


class Latencies(NamedTuple):
    """Seconds of each read of one block: with nothing else to do, and while runs are being written.

    Attributes:
        written_bytes_s: what was written meanwhile.
    """

    alone: list[float]
    loaded: list[float]
    written_bytes_s: float


class Encryption(NamedTuple):
    """Seconds of passes over plain blocks and over as many encrypted ones of the same file, pair by pair."""

    plain_reads: list[float]
    encrypted_reads: list[float]
    plain_writes: list[float]
    encrypted_writes: list[float]


class _Switch:
    """Engines over the same files, of which one checks what it reads, one does not, and one encrypts: only a benchmark
    has such a pool.
    """

    def __init__(
        self, fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
    ) -> None:
        self._checking = OPEN_BLOCK_IO(fds, slots, block_bytes, io, direct, depth, offload_share)
        self._trusting = open_unverified(fds, slots, block_bytes, io, direct, depth, offload_share)
        self._opened = fds, slots, block_bytes, io, direct, depth, offload_share
        self._sealing: BlockEngine | None = None
        self.verified = True
        self.encrypted = False

    def encrypt(self) -> None:
        """Have the engine that encrypts, too. Raises MissingExtraError."""
        if self._sealing is None:
            key = secrets.token_bytes(KEY_BYTES)
            keys = {"": TenantKeys("", key, b"bench".ljust(KEY_ID_BYTES), {b"bench".ljust(KEY_ID_BYTES): key})}
            source = KeySource("the benchmark", lambda: keys, lambda: 0)
            self._sealing = SlotKeys(source, [NAMESPACE]).opening(OPEN_BLOCK_IO, NATIVE.checksums)(*self._opened)

    @property
    def io(self) -> str:
        return self._checking.io

    @property
    def refusal(self) -> str:
        return self._checking.refusal

    def read(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray, namespace: bytes, hashes: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.encrypted and self._sealing is not None:
            return self._sealing.read(slots, rows, at, namespace, hashes)
        engine: BlockEngine = self._checking if self.verified else self._trusting
        return engine.read(slots, rows, at, namespace, hashes)

    def write(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        epoch: int,
        checksums: np.ndarray,
        generation: int = 0,
    ) -> np.ndarray:
        engine: BlockEngine = self._checking
        if self.encrypted and self._sealing is not None:
            engine = self._sealing
        return engine.write(slots, rows, at, namespace, hashes, epoch, checksums, generation)

    def scan(
        self, slots: np.ndarray, depth: int
    ) -> tuple[np.ndarray, bytes, bytes, np.ndarray, np.ndarray, np.ndarray]:
        return self._checking.scan(slots, depth)

    def close(self, timeout_s: float) -> bool:
        closed = [one.close(timeout_s) for one in (self._trusting, self._checking, self._sealing) if one is not None]
        return all(closed)


class Slots:
    """A pool file whose slots all hold blocks, and memory that runs are read to and written from. `close` ends it.

    Attributes:
        run_blocks: blocks of a run: the pool's depth where the file has so many.
    """

    def __init__(self, path: Path, file_bytes: int, block_bytes: int, depth: int) -> None:
        """Make the file and write every slot once, because a slot that never was may be written at another speed."""
        self.path = path
        self.count = file_bytes // block_bytes
        self.block_bytes = block_bytes
        self.run_blocks = max(1, min(depth, self.count // CALLERS))
        self._rng = np.random.default_rng(1)
        self._hashes = self._rng.integers(0, 256, (self.count, HASH_BYTES), dtype=np.uint8)
        rows = max(depth, CALLERS * self.run_blocks, min(self.count, _ROWS_BYTES // block_bytes))
        self._host = HostPool(
            rows + max(1, _HUGE_BYTES // block_bytes), block_bytes, NATIVE_ARENA, RowCopier()
        )  # the last one is for reads of one block, and lies in a whole huge page as well
        self._sums = np.zeros(self._host.slots, dtype=np.uint32)
        self._engines: list[_Switch] = []

        def open_both(
            fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
        ) -> BlockEngine:
            self._engines.append(_Switch(fds, slots, block_bytes, io, direct, depth, offload_share))
            return self._engines[-1]

        try:
            self._pool = NvmePool(
                [path],
                self.count,
                block_bytes,
                NAMESPACE,
                InstanceId("bench"),
                NATIVE.checksums,
                open_both,
                BlockIoOptions(depth=depth),
            )
        except BaseException:
            self._host.close()
            raise
        for row in self._rows():
            row[:] = np.frombuffer(self._rng.bytes(block_bytes), dtype=np.uint8)
        self.write_all()

    @property
    def memory(self) -> str:
        """The file of shared memory that rows lie in, for another process; "": there is none."""
        return "" if self._host.fd < 0 else f"/proc/{os.getpid()}/fd/{self._host.fd}"

    def pages(self) -> str:
        """What pages rows lie in, for a report."""
        of_pool = self._host.page_bytes
        joined = _joined_bytes(self._rows().ctypes.data)
        if joined:
            return f"{of_pool >> 10} KiB, {joined >> 20} of its {self._host.mapped_bytes >> 20} MiB joined to huge ones"
        return f"{of_pool >> 10} KiB"

    def words(self) -> str:
        """How the pool moves bytes, for a report."""
        return f"{self._pool.io}, {'O_DIRECT' if self._pool.direct else 'through the page cache'}"

    def close(self) -> None:
        """Give back memory and file. Idempotent."""
        self._pool.close()
        self._host.close()

    def parts(self, count: int) -> list[np.ndarray]:
        """All slots in random order, in so many parts."""
        return np.array_split(self._rng.permutation(self.count), count)

    def read(self, part: np.ndarray, verified: bool = True) -> float:
        """Seconds that reading these slots takes. Raises PoolError: a block is not what was written."""
        for engine in self._engines:
            engine.verified = verified
        try:
            return self._pass(self._read, part)
        finally:
            for engine in self._engines:
                engine.verified = True

    def write(self, part: np.ndarray, computed: bool = False) -> float:
        """Seconds that writing these slots takes; with the time for checksums, or without."""
        self._seal()
        return self._pass(self._write_computed if computed else self._write, part)

    def write_all(self) -> None:
        """Write every slot."""
        self.write(self.parts(1)[0])

    def encryption(self, pairs: int, step: Callable[[], object]) -> Encryption:
        """Passes over half of the slots, plain, and over the others, encrypted, in turn.

        Raises MissingExtraError, PoolError.
        """
        for engine in self._engines:
            engine.encrypt()
        found = Encryption([], [], [], [])
        halves = self.parts(2)
        try:
            for work, kinds in (
                (self._write, (found.plain_writes, found.encrypted_writes)),
                (self._read, (found.plain_reads, found.encrypted_reads)),
            ):
                self._seal()
                for pair in range(pairs + 1):
                    for which in (0, 1) if pair % 2 else (1, 0):
                        for engine in self._engines:
                            engine.encrypted = which == 1
                        took_s = self._pass(work, self._rng.permutation(halves[which]))
                        if pair:  # the first one warms up
                            kinds[which].append(took_s)
                    step()
        finally:
            for engine in self._engines:
                engine.encrypted = False
        self.write_all()
        return found

    def latencies(self, count: int) -> Latencies:
        """One block read after another, alone and then while another thread writes runs.

        Slots that are written are never read.
        """
        order = self._rng.permutation(self.count)
        read, written = order[: self.count // 2], order[self.count // 2 :]
        self._seal()
        alone = [self._read_one(int(read[at % len(read)])) for at in range(count)]
        over, done = threading.Event(), [0]

        def write() -> None:
            while not over.is_set():
                for at in range(0, len(written), self.run_blocks):
                    run = written[at : at + self.run_blocks]
                    self._write(1, run)
                    done[0] += len(run)
                    if over.is_set():
                        return

        writer = threading.Thread(target=write, name="bench-offload", daemon=True)
        began = time.perf_counter()
        writer.start()
        try:
            loaded = [self._read_one(int(read[at % len(read)])) for at in range(count)]
            took = time.perf_counter() - began
            blocks = done[0]
        finally:
            over.set()
            writer.join(_STOP_S)
        return Latencies(alone, loaded, blocks * self.block_bytes / took)

    def _rows(self) -> np.ndarray:
        memory = self._host.memory
        assert memory is not None
        return memory

    def _read_one(self, slot: int) -> float:
        namespace, hashes = NAMESPACE.id, self._hashes[slot].tobytes()
        began = time.perf_counter()
        result = self._pool.read([slot], namespace, hashes, self._rows(), [self._host.slots - 1])
        took = time.perf_counter() - began
        _require_good(result.outcomes)
        return took

    def _read(self, caller: int, run: np.ndarray) -> None:
        first = caller * self.run_blocks
        at = range(first, first + len(run))
        result = self._pool.read(run.tolist(), NAMESPACE.id, self._hashes[run].tobytes(), self._rows(), list(at))
        _require_good(result.outcomes)

    def _seal(self) -> None:
        """Take the checksums of what lies in memory now: reads and fio leave other bytes there."""
        self._sums = NATIVE.checksums(self._rows())

    def _write(self, caller: int, run: np.ndarray) -> None:
        """Write a run from some stretch of the memory; two callers share rows at times, and only read them."""
        first = self._first(run)
        self._write_rows(run, first, self._sums[first : first + len(run)])

    def _write_computed(self, caller: int, run: np.ndarray) -> None:
        first = self._first(run)
        self._write_rows(run, first, NATIVE.checksums(self._rows()[first : first + len(run)]))

    def _first(self, run: np.ndarray) -> int:
        return int(run[0]) % (self._host.slots - len(run))

    def _write_rows(self, run: np.ndarray, first: int, sums: np.ndarray) -> None:
        proof = Proof(NAMESPACE.id, _EPOCH, self._hashes[run].tobytes(), sums)
        self._pool.write(run.tolist(), self._rows()[first : first + len(run)], proof)

    def _pass(self, work: Callable[[int, np.ndarray], None], order: np.ndarray) -> float:
        """Seconds of work on slots in this order, in runs, shared among the callers."""
        waiting = [order[at : at + self.run_blocks] for at in range(0, len(order), self.run_blocks)]
        guard = threading.Lock()
        troubles: list[Exception] = []

        def call(caller: int) -> None:
            while not troubles:
                with guard:
                    if not waiting:
                        return
                    run = waiting.pop()
                try:
                    work(caller, run)
                except Exception as error:  # noqa: BLE001 - raised by whoever waits
                    troubles.append(error)

        threads = [threading.Thread(target=call, args=(caller,), daemon=True) for caller in range(CALLERS)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            with guard:
                waiting.clear()  # interrupted: the runs under way end, no other begins
            for thread in threads:
                thread.join(_STOP_S)
        took = time.perf_counter() - began
        if troubles:
            raise troubles[0]
        return took


def rates_beside_fio(slots: Slots, fio: Fio | None, depth: int, pairs: int, step: Callable[[], object]) -> Rates:
    """Pairs, the slices of each in turn and begun by another side than those before. Raises FioError, PoolError."""
    rates = Rates([], [], [], [], [], [], [])
    reads: list[tuple[list[float], Callable[[np.ndarray], float]]] = [
        (rates.reads, slots.read),
        (rates.unverified, lambda part: slots.read(part, verified=False)),
    ]
    writes: list[tuple[list[float], Callable[[np.ndarray], float]]] = [
        (rates.writes, slots.write),
        (rates.computed, lambda part: slots.write(part, computed=True)),
    ]
    if fio is not None:
        theirs = fio._replace(memory=slots.memory)
        reads.append((rates.fio_reads, lambda part: _fio_s(theirs, "read", slots, depth, len(part))))
        writes.append((rates.fio_writes, lambda part: _fio_s(theirs, "write", slots, depth, len(part))))
        for kind in _KINDS:
            rates.fio_alone.append(slots.count * slots.block_bytes / _fio_s(fio, kind, slots, depth, slots.count))
        slots.write_all()
    for pair in range(pairs):
        for side in (reads, writes):
            took_s = [0.0] * len(side)
            for number, part in enumerate(slots.parts(min(_SLICES, slots.count))):
                for turn in range(len(side)):
                    which = (pair + number + turn) % len(side)
                    took_s[which] += side[which][1](part)
            for (kept, _), seconds in zip(side, took_s, strict=True):
                kept.append(slots.count * slots.block_bytes / seconds)
                step()
        if fio is not None:
            slots.write_all()  # fio left bytes of its own
    return rates


def _fio_s(fio: Fio, kind: Literal["read", "write"], slots: Slots, depth: int, blocks: int) -> float:
    """Seconds of so many blocks of the pool's file, behind its header."""
    file_bytes = slots.count * slots.block_bytes
    rate = fio.rate(kind, slots.path, file_bytes, slots.block_bytes, depth, first=PAGE_BYTES, blocks=blocks)
    return blocks * slots.block_bytes / rate


def _joined_bytes(address: int) -> int:
    """Bytes of the mapping that begins at an address which the system has joined to huge pages; 0 where it does not
    say.
    """
    with suppress(OSError):
        of_it = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
        for line in of_it.splitlines():
            if line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) << 10
    return 0


def _require_good(outcomes: list[ReadOutcome]) -> None:
    bad = [outcome.name for outcome in outcomes if outcome != ReadOutcome.GOOD]
    if bad:
        raise PoolError(
            f"NVME pool: {len(bad)} of {len(outcomes)} blocks read as {bad[0]}; the device or the pool fails"
        )
