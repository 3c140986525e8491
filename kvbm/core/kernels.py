"""The functions that exist twice: the readable specification here, their twins in C++. Assembly chooses which one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.checksum import crc32c
from kvbm.core.codec import Frame, ScannedFrame, decode_frame, encode_frame, scan_frames
from kvbm.core.errors import FrameError
from kvbm.core.events import Event, PoolStated
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import Epoch, Tier
from kvbm.core.residency import FoldedFrame, TierBlocks


class SequenceHashes(Protocol):
    """Signature of `hashing.sequence_hashes`."""

    def __call__(
        self, tokens: Sequence[int] | np.ndarray, block_tokens: int, root: bytes, extra_keys: Sequence[bytes] = ()
    ) -> bytes: ...


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

    def __call__(self, data: bytes, at: int = 0) -> tuple[list[ScannedFrame], FrameError | None]: ...


class Fold(Protocol):
    """What reading a stream offline needs of `residency.Residencies`, and what its native twin offers."""

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
    def recomputed_digest(self) -> int: ...
    def is_whole(self, tier: Tier) -> bool: ...
    def is_cluster(self, tier: Tier) -> bool: ...
    def miss_events(self) -> None: ...
    def begin_blind(self, epoch: Epoch) -> object: ...


NewFold = Callable[[], Fold]  # strict


class Kernels(NamedTuple):
    """One choice of the functions that exist twice.

    Attributes:
        name: "native" or "reference".
        checksums: (n, block_bytes) uint8 rows → n CRC-32C as u32, one for each row.
    """

    name: str
    sequence_hashes: SequenceHashes
    crc32c: Checksum
    checksums: ChecksumRows
    encode_frame: EncodeFrame
    decode_frame: DecodeFrame
    scan_frames: ScanFrames


class ChecksumRows(Protocol):
    """Signature of `reference_checksums`."""

    def __call__(self, rows: np.ndarray) -> np.ndarray: ...


def reference_checksums(rows: np.ndarray) -> np.ndarray:
    """The CRC-32C of each row of a C-contiguous (n, bytes) uint8 array, as a u32 array of n."""
    return np.fromiter((crc32c(row.tobytes()) for row in rows), dtype=np.uint32, count=len(rows))


REFERENCE = Kernels("reference", sequence_hashes, crc32c, reference_checksums, encode_frame, decode_frame, scan_frames)
