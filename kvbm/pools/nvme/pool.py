"""NVME: slots in preallocated files or block devices that outlive the process, striped over them.

Slot s lies in stripe s % n of n. A stripe is a header, drawn in file_header.py, then its slots, drawn in block_io.py.

A block is proved by its own header, so a slot that was torn, swapped or never written reads as CORRUPT, whoever reads
it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import LayoutError, PoolError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.nvme.aside import DEFAULT_ASIDE_BYTES, Aside
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockEngine, BlockIoOptions, OpenEngine, stride_of
from kvbm.pools.nvme.file_header import shape_of
from kvbm.pools.nvme.generations import NO_GENERATION, GenerationRecord, Generations, new_record
from kvbm.pools.nvme.hints import SlotHints
from kvbm.pools.nvme.slot_header import HEADER_BYTES
from kvbm.pools.nvme.stripes import StripeFiles, rewrite, write_record
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots
from kvbm.safe_log import SafeLog

log = SafeLog()

CLOSE_S = 5.0  # a device that takes longer to end what it has is given up

_OUTCOMES = {int(outcome): outcome for outcome in ReadOutcome}


class Headers(NamedTuple):
    """What n slots' headers say; of a slot without a whole one, everything but `outcomes` means nothing.

    Attributes:
        outcomes: uint8: 0: no whole header, 1: that of a block of the pool's size, 2: it cannot be read.
        namespaces, hashes: packed.
        epochs: u64. generations: u32. sealed: uint8, whether a seal follows.
    """

    outcomes: np.ndarray
    namespaces: bytes
    hashes: bytes
    epochs: np.ndarray
    generations: np.ndarray
    sealed: np.ndarray


class NvmePool:
    """Slots of files or devices, each block beside its proof, verified at each read.

    Bytes go past the page cache where the file system can; they survive the process, and what power loss takes is found
    by the block's checksum. The engine reads before it writes: a request waits for reads only.

    Attributes:
        opened: "created": every stripe is new and empty, whatever a journal says. "reopened": blocks of earlier epochs
            are there.
        slots: as many as were wanted; those it had where the disk lacks the room for more.
        room_slots: slots it had before it became smaller, while blocks of those beyond may still be moved; else 0.
        generations: what tells blocks that were cleared from others; None where the device has no room for it.
        pool_id: name the pool got when it was made.
        notice: for the operator when something was not as it was left or as it was wanted, else "".
        io: "io_uring" or "threads".
        direct: whether bytes go past the page cache.
        hints: for the other instances of the pod, where it has that reach; a `PodFolder` closes them.
    """

    hints: SlotHints | None
    memory: np.ndarray | None = None

    def __init__(
        self,
        paths: Sequence[Path],
        slots: int,
        block_bytes: int,
        shape: Namespace,
        instance: InstanceId,
        checksums: ChecksumRows,
        open_engine: OpenEngine,
        options: BlockIoOptions = BlockIoOptions(),  # noqa: B008  # frozen
        reach: Reach = Reach.INSTANCE,
        aside_bytes: int = DEFAULT_ASIDE_BYTES,
    ) -> None:
        """Open the stripes, or make them with all their bytes reserved. They stay locked until `close`.

        Args:
            paths: a file or block device each, in the order they were made in.
            shape: any namespace of the pool; LoRA, tenant and hash scheme may differ between blocks of one file.
            open_engine: what moves the blocks.
            aside_bytes: room for files that were made for something else, and are set aside.
        Raises: LayoutError: below 1 slot or byte, or no path. PoolMismatchError: a stripe has another place or is of
            another pool; it is left as it is. PoolFullError: a disk lacks the room; nothing is left behind. PoolError:
            a file is in use, foreign, or cannot be opened; or the options ask for what the machine has not.
        """
        check_size("NVME", slots, block_bytes)
        if not paths:
            raise LayoutError("NVME pool: no path; it takes at least one file or block device")
        self.tier = Tier.NVME
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach
        self.paths = tuple(paths)
        self._calls = 0
        self._idle = threading.Condition()
        self._engine: BlockEngine | None = None
        self._given_up: BlockEngine | None = None
        self._ending: BlockEngine | None = None  # closed, and its files still open
        self._closing = threading.RLock()
        self._shape = shape_of(shape, block_bytes, slots, instance, len(paths), options.encrypted)
        with ExitStack() as undo:
            files = StripeFiles(self.paths, self._shape, checksums, aside_bytes)
            opened = files.open()
            for stripe in opened.stripes:
                undo.callback(os.close, stripe.fd)
            self.opened = files.opened
            self._notices = files.notices
            self._fds = [stripe.fd for stripe in opened.stripes]
            self._headers = [stripe.header for stripe in opened.stripes if stripe.header is not None]
            self._shape, self.slots, self.room_slots = opened.shape, opened.shape.slots, opened.room_slots
            self.pool_id = self._headers[0].pool_id
            self._tails = {self._headers[0].tail_at}
            self._checksums = checksums
            self._asides = [Aside(path, aside_bytes) for path in self.paths]
            self.generations = None if opened.record is None else Generations(opened.record, self._store_record)
            self.direct = self._set_direct(options.direct)
            self._engine = self._started(open_engine, options)
            self.hints = None
            if reach == Reach.POD:
                self.hints = SlotHints(self.path, self.slots, self.opened == "reopened")
            undo.pop_all()

    @property
    def path(self) -> Path:
        """The first stripe."""
        return self.paths[0]

    @property
    def notice(self) -> str:
        """Sentences for the operator, "" for none."""
        return "; ".join(self._notices)

    @property
    def io(self) -> str:
        """What moves the bytes: "io_uring" or "threads"."""
        return self._engine.io if self._engine is not None else ""

    @property
    def plain_engine(self) -> BlockEngine | None:
        """What moves the bytes, where they lie as they are: None where blocks are sealed, or the pool is closed."""
        return None if self._shape.encrypted else self._engine

    @property
    def file_bytes(self) -> int:
        """Bytes all stripes take: their headers, every slot, and their tails."""
        return sum(header.file_bytes for header in self._headers)

    @property
    def stamp(self) -> int:
        """The generation of what sets out for it now: a clear that overtakes that on its way counts for it."""
        return NO_GENERATION if self.generations is None else self.generations.stamp

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Put blocks into slots. Raises PoolError: closed, or the device refused; the slots then prove nothing."""
        count = check_proof("NVME", rows, proof, self.block_bytes, at)
        indexes = check_slots("NVME", slots, count, self.slots)
        if count == 0:
            return
        with self._using() as engine:
            if engine is None:
                raise PoolError(f"{self}: it is closed; {count} blocks were not written")
            sums = np.ascontiguousarray(proof.checksums, dtype=np.uint32)
            errors = engine.write(
                indexes,
                rows,
                _row_numbers(at, count),
                proof.namespace,
                proof.hashes,
                proof.epoch,
                sums,
                self.stamp if proof.generation is None else proof.generation,
            )
        refused = errors[errors != 0]
        if self.hints is not None and not len(refused):
            self.hints.note(slots, proof.namespace, proof.hashes)
        if len(refused):
            why = errno.errorcode.get(int(refused[0]), "")
            raise PoolError(
                f"{self}: the device refused {len(refused)} blocks of {count}: {os.strerror(int(refused[0]))} ({why});"
                " check its room and health"
            )

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows from slots and hold each to its header, its hash and its checksum."""
        count = check_rows("NVME", rows, hashes, self.block_bytes, at)
        indexes = check_slots("NVME", slots, count, self.slots)
        with self._using() as engine:
            if engine is None or count == 0:
                return all_failed(count)
            outcomes, sums = engine.read(indexes, rows, _row_numbers(at, count), namespace, hashes)
        return ReadResult([_OUTCOMES[outcome] for outcome in outcomes.tolist()], sums)

    def written(self, slots: Sequence[int]) -> list[int]:
        """Those slots whose header is not blank: something was written there since the file was made.

        Raises PoolError.
        """
        stripes, stride = len(self._fds), stride_of(self.block_bytes)
        found = []
        with self._using() as engine, mmap.mmap(-1, PAGE_BYTES) as page:
            if engine is None:
                raise PoolError(f"{self}: it is closed; {len(slots)} headers were not read")
            for slot in slots:
                try:
                    os.preadv(self._fds[slot % stripes], [page], PAGE_BYTES + slot // stripes * stride)
                except OSError as error:
                    raise PoolError(f"{self}: the header of slot {slot} cannot be read ({error.strerror})") from error
                if page[:HEADER_BYTES].strip(b"\0"):
                    found.append(slot)
        return found

    def scan(self, slots: Sequence[int], depth: int) -> Headers:
        """What the headers of slots say; those beyond the pool's end are read too, while it is still as long as it was.

        Args:
            depth: headers under way at a time, of each stripe.
        Raises: PoolError: closed.
        """
        with self._using() as engine:
            if engine is None:
                raise PoolError(f"{self}: it is closed; {len(slots)} headers were not read")
            return Headers(*engine.scan(np.asarray(slots, dtype=np.int64), depth))

    def relocate(self, sources: Sequence[int], targets: Sequence[int], wanted: Sequence[bytes]) -> list[bool]:
        """Copy slots with their headers and seals, as they lie.

        For each whether its source was that of the block and it is there now.

        Args:
            sources: also slots beyond the pool's end.
            wanted: namespace and hash of each block.
        """
        stride, stripes, moved = stride_of(self.block_bytes), len(self._fds), [False] * len(sources)
        with self._using() as engine, mmap.mmap(-1, stride) as room, memoryview(room) as view:
            for at, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if engine is None:
                    break
                here, there = (PAGE_BYTES + slot // stripes * stride for slot in (source, target))
                with suppress(OSError):
                    if os.preadv(self._fds[source % stripes], [view], here) != stride or view[8:40] != wanted[at]:
                        continue
                    moved[at] = os.pwritev(self._fds[target % stripes], [view], there) == stride
        if self.hints is not None:
            for at, target in enumerate(targets):
                if moved[at]:
                    self.hints.note([target], NamespaceId(wanted[at][:HASH_BYTES]), wanted[at][HASH_BYTES:])
        return moved

    def trim(self) -> None:
        """Give back the room of slots beyond the pool's end. Raises PoolError."""
        moving = nullcontext(new_record()) if self.generations is None else self.generations.moving()
        with self._using() as engine, moving as record:
            if engine is None or not self.room_slots:
                return
            for at, header in enumerate(self._headers):
                smaller = msgspec.structs.replace(header, room_slots=0)
                if not at:
                    self._tails = {header.tail_at, smaller.tail_at}  # until it is sure which of them counts
                try:
                    rewrite(self.paths[at], self._fds[at], smaller, record, self._checksums)
                except OSError as error:
                    raise PoolError(f"{self}: its end cannot be given back ({error.strerror})") from error
                self._headers[at] = smaller
                if not at:
                    self._tails = {smaller.tail_at}
            self.room_slots = 0

    def forget_asides(self) -> int:
        """Delete files of kvbm's that were set aside, whosever blocks lie there; gives how many. Raises PoolError."""
        try:
            return sum(aside.give_up_all() for aside in self._asides)
        except OSError as error:
            raise PoolError(f"{self}: a file that was set aside cannot be deleted ({error.strerror})") from error

    def _store_record(self, record: GenerationRecord) -> None:
        """Raises PoolError."""
        with self._using() as engine:
            if engine is None:
                raise PoolError(f"{self}: it is closed; what was cleared was not noted")
            try:
                for tail_at in self._tails:
                    write_record(self._fds[0], tail_at, record, self._checksums)
            except OSError as error:
                raise PoolError(f"{self}: what was cleared cannot be noted ({error.strerror})") from error

    def sync(self) -> None:
        """Bring what was written to the devices. Raises PoolError: one refuses."""
        with self._using() as engine:
            for fd in self._fds if engine is not None else ():
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise PoolError(
                        f"{self}: it cannot be synced ({error.strerror}); check the device's health"
                    ) from error
        if self.hints is not None:
            self.hints.sync()

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """Raises LayoutError: there is no `memory` to compute them over."""
        raise LayoutError(f"{self}: it has no memory in reach of the CPU; only `read` gets at its {len(slots)} blocks")

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Raises LayoutError: nobody can have put bytes into it but `write`, which keeps proofs itself."""
        raise LayoutError(
            f"{self}: it has no memory in reach of the CPU; `write` puts {len(slots)} blocks and their proofs into it"
        )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Refuse new calls, and close and unlock the files once calls under way are over. Idempotent.

        What the device has not ended by then keeps its memory and its files, and these their locks, until the process
        is gone: a late write must not meet a slot that somebody else uses.
        """
        with self._closing:
            self._close_locked(timeout_s)

    def _close_locked(self, timeout_s: float) -> None:
        with self._idle:
            self._ending = self._ending or self._engine  # until all is done: a signal's handler may raise anywhere
            self._engine = None
        if self._ending is None:
            return
        is_over = self._ending.close(timeout_s)
        with self._idle:
            is_over = self._idle.wait_for(lambda: self._calls == 0, timeout_s) and is_over
        while is_over and self._fds:
            fcntl.flock(self._fds[-1], fcntl.LOCK_UN)  # at once, whatever else in the kernel still knows the file
            os.close(self._fds.pop())  # its number is soon another file's
        self._ending = None
        if is_over:
            return
        self._notices.append(
            f"{self}: the device has not ended every transfer within {timeout_s:g} s; its files stay open and locked "
            "until this"
            " process ends: check the device's health"
        )
        log.warning("pool.left_open", tier="NVME", paths=[str(path) for path in self.paths], waited_s=timeout_s)

    def disown(self) -> None:
        """This process is a forked child: let go of the files, which would stay locked for as long as it lives.

        No transfer ends here.
        """
        self._idle, self._closing = threading.Condition(), threading.RLock()
        if self._engine is None and self._ending is None:
            return
        self._given_up = self._engine or self._ending  # whatever it has belongs to threads that are not here
        self._engine = self._ending = None
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)

    def __str__(self) -> str:
        return f"NVME pool {':'.join(map(str, self.paths))}"

    @contextmanager
    def _using(self) -> Iterator[BlockEngine | None]:
        """The engine, its files kept open while used; None once closed. A number used later could be another file's."""
        with self._idle:
            engine = self._engine
            self._calls += 1
        try:
            yield engine
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _set_direct(self, wanted: str) -> bool:
        """Let bytes go past the page cache where that is wanted and can be. Raises PoolError: "on", and it cannot."""
        if wanted == "off":
            return False
        for path, fd in zip(self.paths, self._fds, strict=True):
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    os.preadv(fd, [page], 0)
            except OSError as error:
                if wanted == "on":
                    raise PoolError(
                        f"NVME pool {path}: its file system refuses direct transfers of {PAGE_BYTES} bytes "
                        f"({error.strerror});"
                        " set pools.nvme.direct to auto, or put the pool on a local device"
                    ) from error
                for other in self._fds:
                    fcntl.fcntl(other, fcntl.F_SETFL, fcntl.fcntl(other, fcntl.F_GETFL) & ~os.O_DIRECT)
                self._notices.append(
                    f"NVME pool {path}: its file system refuses direct transfers ({error.strerror}); bytes go through "
                    "the page cache"
                )
                return False
        return True

    def _started(self, open_engine: OpenEngine, options: BlockIoOptions) -> BlockEngine:
        io, depth, offload_share = options.io, options.depth, options.offload_share
        try:
            slots = max(self.slots, self.room_slots)
            engine = open_engine(self._fds, slots, self.block_bytes, io, self.direct, depth, offload_share)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise PoolError(
                    f"{self}: the system gives no thread to move its bytes; raise ulimit -u or the container's pids "
                    "limit"
                ) from error
            raise PoolError(
                f"{self}: pools.nvme.io is {io}, and the kernel refuses ({error.strerror}); set it to auto or threads, "
                "or allow"
                " io_uring (sysctl kernel.io_uring_disabled, the container's seccomp profile)"
            ) from error
        if engine.refusal:
            self._notices.append(f"{self}: io_uring is refused ({engine.refusal}); threads move its bytes")
        return engine


def _row_numbers(at: Sequence[int] | None, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) if at is None else np.asarray(at, dtype=np.int64)
