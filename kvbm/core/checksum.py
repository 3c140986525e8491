"""CRC-32C (Castagnoli): the checksum of frames and of blocks that leave HBM.

The native implementation is what production runs.
"""

from __future__ import annotations

import numpy as np

from kvbm.core.errors import LayoutError

_POLYNOMIAL = 0x82F63B78  # reflected


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, initial: int = 0) -> int:
    """The CRC-32C of a buffer.

    Args:
        data: contiguous bytes.
        initial: the CRC of what came before, to continue it.
    Returns: 32-bit unsigned.
    Source: RFC 3720 appendix B.4; checked against tests/golden/checksums.json.
    """
    value = initial ^ 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def joined_checksums(checksums: np.ndarray, part_bytes: int) -> np.ndarray:
    """CRC-32Cs of blocks that lie in equal parts, from those of the parts: no byte is read again.

    Args:
        checksums: (parts, n) u32, one row for each part in the order they lie in; any strides.
        part_bytes: size of a part, at least 1.
    Returns: (n,) u32: the CRC-32C of block i's parts one after another. Without parts it is that of no bytes, 0.
    Raises: LayoutError: the array is of another shape or type, or the size is below 1.
    Source: a CRC is a remainder of polynomials over GF(2), so crc(a, b) = crc(a) * x**(8 * size of b) + crc(b).
    """
    if checksums.ndim != 2 or checksums.dtype != np.uint32:
        raise LayoutError(
            f"checksums are {checksums.dtype} in {checksums.ndim} dimensions; give uint32 as (parts, blocks)"
        )
    if part_bytes < 1:
        raise LayoutError(f"part_bytes is {part_bytes}; a part has at least 1 byte")
    behind = _power_of_x(8 * part_bytes)
    joined = [0] * checksums.shape[1]
    for part in checksums.tolist():
        joined = [_product(before, behind) ^ crc for before, crc in zip(joined, part, strict=True)]
    return np.array(joined, dtype=np.uint32)


def _product(left: int, right: int) -> int:
    """Of two polynomials, modulo that of the checksum; reflected, so that bit 31 is x**0."""
    total = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            total ^= right
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return total


def _power_of_x(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30  # x**0 and x**1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power
