"""What exists twice: the readable specification here, its native implementation in C++.

Assembly chooses which one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from types import TracebackType
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.checksum import crc32c, joined_checksums
from kvbm.core.codec import Frame, FrameBytes, ScannedFrame, decode_frame, encode_frame, scan_frames
from kvbm.core.engine_chains import digest_hashes, engine_digests
from kvbm.core.errors import FrameError
from kvbm.core.events import MAX_RUN_BLOCKS, Event, EvictReason, MigrateCause, PoolStated, StopReason, UsageRecorded
from kvbm.core.fold import FoldedFrame, TierBlocks
from kvbm.core.hashing import derived_hashes, sequence_hashes
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, SequenceHash, Tier
from kvbm.core.number_lists import read_number_list
from kvbm.core.plain_questions import PlainQuestion, read_plain_question
from kvbm.core.policy import Share
from kvbm.core.results import Allocation, Copy, Match, Recovered, ShareCounts, TierCounts


class SequenceHashes(Protocol):
    """Signature of `hashing.sequence_hashes`."""

    def __call__(
        self, tokens: Sequence[int] | np.ndarray, block_tokens: int, root: bytes, extra_keys: Sequence[bytes] = ()
    ) -> bytes: ...


class DerivedHashes(Protocol):
    """Signature of `hashing.derived_hashes`."""

    def __call__(self, root: bytes, digests: Sequence[bytes]) -> bytes: ...


class EngineDigests(Protocol):
    """Signature of `engine_chains.engine_digests`."""

    def __call__(
        self, kind: str, tokens: Sequence[int] | np.ndarray, hash_tokens: int, begin: bytes, keys: Sequence[bytes] = ()
    ) -> bytes: ...


class DigestHashes(Protocol):
    """Signature of `engine_chains.digest_hashes`."""

    def __call__(self, root: bytes, digests: bytes, scale: int = 1, in_hex: bool = False) -> bytes: ...


class Checksum(Protocol):
    """Signature of `checksum.crc32c`."""

    def __call__(self, data: bytes | bytearray | memoryview, initial: int = 0) -> int: ...


class EncodeFrame(Protocol):
    """Signature of `codec.encode_frame`."""

    def __call__(self, frame: Frame) -> bytes: ...


class DecodeFrame(Protocol):
    """Signature of `codec.decode_frame`."""

    def __call__(self, data: bytes, at: int = 0) -> tuple[Frame, int]: ...


class ScanFrames(Protocol):
    """Signature of `codec.scan_frames`."""

    def __call__(self, data: bytes | mmap, at: int = 0) -> tuple[list[ScannedFrame], FrameError | None]: ...


class ReadNumberList(Protocol):
    """Signature of `number_lists.read_number_list`."""

    def __call__(self, text: bytes | bytearray | memoryview, at: int, into: np.ndarray) -> tuple[int, int]: ...


class ReadPlainQuestion(Protocol):
    """Signature of `plain_questions.read_plain_question`."""

    def __call__(self, data: bytes | bytearray | memoryview, begin: int, end: int) -> PlainQuestion | None: ...


class Fold(Protocol):
    """What reading a stream offline needs of `fold.Residencies`, and what its native implementation offers."""

    strict: bool

    @property
    def epoch(self) -> Epoch: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def digest(self) -> int: ...
    @property
    def pools(self) -> Mapping[Tier, PoolStated]: ...
    def evolve(self, event: Event) -> object: ...
    def evolve_frame(self, data: bytes, at: int = 0, first: int = 0) -> FoldedFrame: ...
    def count(self, tier: Tier | None = None) -> int: ...
    def blocks(self, tier: Tier) -> TierBlocks: ...
    def tier_digest(self, tier: Tier) -> int: ...
    def is_whole(self, tier: Tier) -> bool: ...
    def is_cluster(self, tier: Tier) -> bool: ...
    def miss_events(self) -> None: ...
    def begin_blind(self, epoch: Epoch) -> object: ...


NewFold = Callable[[], Fold]  # strict


class Backend(NamedTuple):
    """One choice of the functions that exist twice.

    Attributes:
        name: "native" or "reference".
        checksums: (n, block_bytes) uint8 rows → n CRC-32C as u32, one for each row.
    """

    name: str
    sequence_hashes: SequenceHashes
    derived_hashes: DerivedHashes
    engine_digests: EngineDigests
    digest_hashes: DigestHashes
    crc32c: Checksum
    checksums: ChecksumRows
    joined_checksums: JoinedChecksums
    encode_frame: EncodeFrame
    decode_frame: DecodeFrame
    scan_frames: ScanFrames
    read_number_list: ReadNumberList
    read_plain_question: ReadPlainQuestion


class ChecksumRows(Protocol):
    """Signature of `reference_checksums`."""

    def __call__(self, rows: np.ndarray) -> np.ndarray: ...


class JoinedChecksums(Protocol):
    """Signature of `checksum.joined_checksums`."""

    def __call__(self, checksums: np.ndarray, part_bytes: int) -> np.ndarray: ...


def reference_checksums(rows: np.ndarray) -> np.ndarray:
    """The CRC-32C of each row of a C-contiguous (n, bytes) uint8 array, as a u32 array of n."""
    return np.fromiter((crc32c(row.tobytes()) for row in rows), dtype=np.uint32, count=len(rows))


class LedgerProtocol(Protocol):
    """Signature of `ledger.Ledger`, which says what each of these does."""

    @property
    def pools(self) -> tuple[PoolStated, ...]: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def applied(self) -> Offset: ...
    @property
    def digest(self) -> int: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def overflowed(self) -> bool: ...

    def start(
        self,
        epoch: Epoch,
        namespaces: Sequence[Namespace] = (),
        topology: Sequence[str] = (),
        engine: str = "",
        version: str = "",
        recovered: Mapping[Tier, Sequence[Recovered]] | None = None,
        attributes: Mapping[str, bytes] = ...,
    ) -> None: ...
    def restart(self, epoch: Epoch) -> Offset: ...
    def stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None: ...
    def record_usage(self, usage: UsageRecorded) -> None: ...
    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]: ...

    def match(
        self, hashes: bytes, pinned: bool = False, hottest: Tier = Tier.HBM, namespace: NamespaceId | None = None
    ) -> Match: ...
    def lend(self, namespace: NamespaceId, hashes: bytes, coldest: Tier = Tier.NVME) -> Match: ...
    def holders(self, hashes: bytes, hottest: Tier = Tier.HBM, namespace: NamespaceId | None = None) -> bytes: ...
    def holds(self, tier: Tier, block: SequenceHash, namespace: NamespaceId | None = None) -> bool: ...
    def lacking(self, tier: Tier, hashes: bytes) -> bytes: ...
    def held(self, tier: Tier) -> bytes: ...
    def held_of(self, tier: Tier, namespace: NamespaceId | None = None) -> tuple[bytes, bytes]: ...
    def pin(self, tier: Tier, slots: bytes) -> None: ...
    def unpin(self, tier: Tier, slots: bytes, read: bool = False) -> None: ...
    def allocate(self, tier: Tier, count: int, namespace: NamespaceId | None = None) -> Allocation | None: ...
    def release(self, tier: Tier, slots: bytes) -> None: ...
    def create(
        self, namespace: NamespaceId, tier: Tier, parent: SequenceHash, start: int, hashes: bytes, slots: bytes
    ) -> bytes: ...
    def evict(self, tier: Tier, hashes: bytes, reason: EvictReason) -> int: ...
    def forget(self, tier: Tier, namespace: NamespaceId, hashes: bytes, reason: EvictReason) -> None: ...
    def claim(self, tier: Tier, namespace: NamespaceId, hashes: bytes, finder: InstanceId) -> None: ...
    def adopt(self, namespace: NamespaceId, tier: Tier, hashes: bytes, slots: bytes, finder: InstanceId) -> int: ...
    def keep(
        self,
        tier: Tier,
        hashes: bytes,
        until_s: float,
        priority: int = 0,
        namespace: NamespaceId | None = None,
        until_read: bool = False,
        most: int | None = None,
    ) -> int: ...
    def expire(self, now_s: float) -> int: ...

    def begin_copy(
        self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes
    ) -> Copy | None: ...
    def end_copy(
        self, copy: Copy, arrived: Sequence[bool], cause: MigrateCause, kept: bool = True, pinned: bool = False
    ) -> list[int | None]: ...
    def copies_in_flight(self) -> int: ...
    def begin_snapshot(self) -> bool: ...
    def step_snapshot(self, limit: int = MAX_RUN_BLOCKS) -> bool: ...
    def counts(self, tier: Tier) -> TierCounts: ...
    def kept(self, tier: Tier) -> int: ...
    def assign(self, namespace: NamespaceId, tenant: str) -> None: ...
    def share_counts(self, tier: Tier) -> list[ShareCounts]: ...


class LockProtocol(Protocol):
    """A lock around a ledger, as `threading.Lock` is one."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...


REFERENCE = Backend(
    "reference",
    sequence_hashes,
    derived_hashes,
    engine_digests,
    digest_hashes,
    crc32c,
    reference_checksums,
    joined_checksums,
    encode_frame,
    decode_frame,
    scan_frames,
    read_number_list,
    read_plain_question,
)


NewLedger = Callable[
    [Sequence[PoolStated], str, int, Sequence[Share]], LedgerProtocol
]  # pools, eviction, event_bytes, shares
