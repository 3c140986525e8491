"""The functions that exist twice: the readable specification here, their twins in C++. Assembly chooses which one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.checksum import crc32c
from kvbm.core.codec import Frame, decode_frame, encode_frame
from kvbm.core.hashing import sequence_hashes


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


class ChecksumRows(Protocol):
    """Signature of `reference_checksums`."""

    def __call__(self, rows: np.ndarray) -> np.ndarray: ...


def reference_checksums(rows: np.ndarray) -> np.ndarray:
    """The CRC-32C of each row of a C-contiguous (n, bytes) uint8 array, as a u32 array of n."""
    return np.fromiter((crc32c(row.tobytes()) for row in rows), dtype=np.uint32, count=len(rows))


REFERENCE = Kernels("reference", sequence_hashes, crc32c, reference_checksums, encode_frame, decode_frame)
