"""How blocks become smaller without loss, by the type of their elements.

The bytes of KV are not alike: of a bfloat16 the exponent takes few values and the mantissa all of them. So the planes
of the elements' bytes are told apart, those with something to gain go through a Huffman coder, the rest stays as it is.
A block that would not shrink, or that a cheap look at a part of it says would not, stays raw.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np


class Coding(IntEnum):
    """How one block is kept; the number is on the wire."""

    RAW = 0
    PLANES_16 = 1  # elements of two bytes: the high plane coded, the low one raw
    PLANES_8 = 2  # elements of one byte, coded
    PLANES_32 = 3  # elements of four bytes: the highest plane coded, the others raw


ELEMENT_CODINGS = {
    "bfloat16": Coding.PLANES_16,
    "float16": Coding.PLANES_16,
    "float8_e4m3fn": Coding.PLANES_8,
    "float8_e5m2": Coding.PLANES_8,
    "float32": Coding.PLANES_32,
}  # by `Namespace.kv_dtype`; what is not here stays raw


class Encoded(NamedTuple):
    """Blocks as they are kept, one behind the other.

    Attributes:
        body: their bytes.
        lengths: n, bytes of each in `body`, u32.
        codings: n, a `Coding` each, u8.
    """

    body: np.ndarray
    lengths: np.ndarray
    codings: np.ndarray


class EncodeBlocks(Protocol):
    """Signature of the native encoder."""

    def __call__(self, rows: np.ndarray, at: np.ndarray, coding: int) -> Encoded:
        """Code the rows `at[0]`, `at[1]`, … of (m, block_bytes) uint8, without the GIL; each by `coding`, or RAW where
        that gains nothing.
        """


class DecodeBlocks(Protocol):
    """Signature of the native decoder."""

    def __call__(
        self, body: np.ndarray, lengths: np.ndarray, codings: np.ndarray, rows: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill row `at[i]` with block i; a block whose `at` is negative is passed over. Without the GIL.

        Bytes that no encoder wrote are found or give other bytes, but nothing outside the row is read or written.
        Returns: whether each block could be decoded (n booleans), and CRC-32C of the rows (n, u32).
        """


class BlockCoder(NamedTuple):
    """The coder that a pool uses."""

    encode: EncodeBlocks
    decode: DecodeBlocks
