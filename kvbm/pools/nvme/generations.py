"""Clear generations of an NVME pool: which of its blocks a scan of slots may bring back after the journal was lost.

A slot's header proves which block lies there, not whether it was withdrawn since. So each slot is stamped with the
pool's newest generation, and each clear begins another: a block counts only if its generation is not older than the
last clear of its namespace. That is durable before the clear is recorded. A generation is a random number, so those of
a record that was lost mean nothing to the next one.

The record lies twice in the tail of the pool's first stripe, and a clear writes both before it goes on. So either copy
alone says enough: a copy that is torn or damaged, or older by one, belongs to a clear that was not recorded yet.

    tail       0  4096 bytes   copy of the file's header
            4096  28,672       record
          32,768  28,672       the same

    record     0  8 bytes      magic "KVBMGENS"
               8  4            version
              12  4            json_bytes
              16  …            JSON, then zeros
          28,668  4            CRC-32C of the bytes above
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.nvme.block_io import PAGE_BYTES
from kvbm.safe_log import SafeLog

log = SafeLog()

RECORD_BYTES = 7 * PAGE_BYTES
RECORDS_AT = (PAGE_BYTES, PAGE_BYTES + RECORD_BYTES)  # in the tail
TAIL_BYTES = PAGE_BYTES + 2 * RECORD_BYTES
NO_GENERATION = 0  # of what is written while the pool keeps none

_MAGIC = b"KVBMGENS"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_MOST_GENERATIONS = 256  # that are told apart; blocks of older ones are not brought back


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is durable.

    Generations have places, counted from 1; `marks` are the newest ones, and the last of them is that of today.

    Attributes:
        sequence: grows with each write.
        first: place of the first of `marks`.
        floor: place from which on blocks count, of namespaces that are not in `cleared`.
        cleared: the same of namespaces, by id in hexadecimal.
        is_scan_due: a scan was begun, or is to begin, and has not ended.
        epoch: the last one that began with the pool. An instance that has begun a later one has not had it, and may
            have cleared then.
    """

    sequence: int
    first: int
    marks: tuple[int, ...]
    floor: int
    cleared: Mapping[str, int] = {}
    is_scan_due: bool = False
    epoch: int = 0


def new_record() -> GenerationRecord:
    """That of a pool of which nothing is known: nothing that lies there now counts."""
    return GenerationRecord(sequence=1, first=1, marks=(_mark(()),), floor=1)


def raised(record: GenerationRecord, namespaces: Iterable[NamespaceId] | None) -> GenerationRecord:
    """The record after a clear of some namespaces, or of all."""
    place = record.first + len(record.marks)
    cleared = {} if namespaces is None else {**record.cleared, **{one.hex(): place for one in namespaces}}
    floor = place if namespaces is None else record.floor
    marks = (*record.marks, _mark(record.marks))
    gone = max(0, floor - record.first, len(marks) - _MOST_GENERATIONS)
    return msgspec.structs.replace(
        record,
        sequence=record.sequence + 1,
        first=record.first + gone,
        marks=marks[gone:],
        floor=floor,
        cleared=cleared,
    )


def encode_record(record: GenerationRecord, checksums: ChecksumRows) -> bytes:
    """One copy of a record. Where it says too much of namespaces, a clear of one counts for all."""
    text = msgspec.json.encode(record)
    if len(text) > RECORD_BYTES - _PREFIX.size - _CRC.size:
        newest = record.first + len(record.marks) - 1
        text = msgspec.json.encode(msgspec.structs.replace(record, floor=newest, cleared={}))
    proved = (_PREFIX.pack(_MAGIC, _VERSION, len(text)) + text).ljust(RECORD_BYTES - _CRC.size, b"\0")
    return proved + _CRC.pack(_crc(checksums, proved))


def decode_record(data: bytes, checksums: ChecksumRows) -> GenerationRecord | None:
    """What one copy says; None: nothing that can be believed."""
    if len(data) != RECORD_BYTES or _CRC.pack(_crc(checksums, data[: -_CRC.size])) != data[-_CRC.size :]:
        return None
    magic, version, json_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return None
    try:
        record = msgspec.json.decode(data[_PREFIX.size : _PREFIX.size + json_bytes], type=GenerationRecord)
    except msgspec.DecodeError:
        return None
    return record if record.marks else None


def newest_record(copies: Iterable[bytes], checksums: ChecksumRows) -> GenerationRecord | None:
    """What the copies of a tail say; None: both are lost."""
    found = [record for data in copies if (record := decode_record(data, checksums)) is not None]
    return max(found, key=lambda record: record.sequence, default=None)


class Generations:
    """The generations of a pool in use. Any thread.

    Args:
        record: as it was read; it is written before this is made.
        store: makes a record durable, in both its places. Raises PoolError: the device refuses.

    Attributes:
        stamp: the generation of what is written now.
    """

    def __init__(self, record: GenerationRecord, store: Callable[[GenerationRecord], None]) -> None:
        self._record, self._store = record, store
        self._lock = threading.Lock()
        self._clears = 0  # under way
        self._has_failed = False
        self.stamp = record.marks[-1]

    @property
    def record(self) -> GenerationRecord:
        """As it is now."""
        return self._record

    @property
    def is_scan_due(self) -> bool:
        """Whether slots may hold blocks that nobody has claimed yet."""
        return self._record.is_scan_due

    @contextmanager
    def clearing(self, namespaces: Iterable[NamespaceId] | None = None) -> Iterator[None]:
        """While blocks of some namespaces, or of all, are withdrawn for good.

        What was written before this ends is not brought back.

        A device that refuses does not hold up the clear, which counts all the same for this process: one warning, and
        the next record that can be written says it.
        """
        with self._lock:
            self._clears += 1
            self._record = raised(self._record, namespaces)
            self._try_store_locked()
        try:
            yield
        finally:
            with self._lock:
                self._clears -= 1
                if not self._clears:
                    self.stamp = self._record.marks[-1]

    def note_scan(self, is_due: bool) -> None:
        """Remember that a scan is to begin, or has ended. Raises PoolError: the device refuses."""
        with self._lock:
            if is_due != self._record.is_scan_due:
                self._record = msgspec.structs.replace(
                    self._record, sequence=self._record.sequence + 1, is_scan_due=is_due
                )
                self._store(self._record)

    @contextmanager
    def moving(self) -> Iterator[GenerationRecord]:
        """The record, which does not change and is not stored while its place does."""
        with self._lock:
            yield self._record

    def note_epoch(self, epoch: Epoch) -> None:
        """Remember the epoch that has begun with the pool. A device that refuses costs what a scan would have found."""
        with self._lock:
            self._record = msgspec.structs.replace(self._record, sequence=self._record.sequence + 1, epoch=epoch)
            self._try_store_locked()

    def forget(self) -> None:
        """Nothing that lies there now is brought back, and no scan is due: somebody may have cleared it who could not
        say so here.
        """
        with self._lock:
            self._record = msgspec.structs.replace(raised(self._record, None), is_scan_due=False)
            if not self._clears:
                self.stamp = self._record.marks[-1]
            self._try_store_locked()

    def counts(self, namespaces: bytes, generations: np.ndarray) -> np.ndarray:
        """For each of n blocks whether it was written since its namespace was cleared, as n booleans.

        Args:
            namespaces: packed ids.
            generations: u32, as they lie in headers.
        """
        with self._lock:
            record = self._record
        places = {mark: record.first + at for at, mark in enumerate(record.marks)}
        marks, of_mark = np.unique(generations, return_inverse=True)
        written = np.array([places.get(mark, 0) for mark in marks.tolist()], dtype=np.int64)[of_mark]
        rows = np.frombuffer(namespaces, dtype=np.uint64).reshape(-1, HASH_BYTES // 8)
        since, left = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=bool)
        while left.any():  # once for each namespace: a pool has few
            one = rows[left.argmax()]
            of_it = (rows == one).all(axis=1)
            since[of_it] = max(record.floor, record.cleared.get(one.tobytes().hex(), 0))
            left &= ~of_it
        counted: np.ndarray = written >= since
        return counted

    def _try_store_locked(self) -> None:
        try:
            self._store(self._record)
            self._has_failed = False
        except PoolError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "pool.generation_unwritten",
                    why=str(error),
                    effect="a scan after a lost journal could bring back what was cleared now; see to the device",
                )


def _mark(known: Iterable[int]) -> int:
    """A number that no generation has yet."""
    while (mark := secrets.randbits(32)) in known or mark == NO_GENERATION:
        pass
    return mark


def _crc(checksums: ChecksumRows, data: bytes) -> int:
    return int(checksums(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0])
