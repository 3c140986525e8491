"""CRC-32C (Castagnoli): the checksum of frames and of blocks that leave HBM. The native twin is what production runs."""

from __future__ import annotations

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
