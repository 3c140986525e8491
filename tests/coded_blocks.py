"""Blocks whose coded bytes are fixed, and kinds of data that a coder meets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbm.pools.object.coding import Coding


class CodedCase(NamedTuple):
    """A block, made from integers alone so that every version of numpy makes the same."""

    name: str
    coding: Coding
    block: np.ndarray


def _mix(count: int, seed: int) -> np.ndarray:
    """count pseudo-random u64: SplitMix64."""
    value = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


def _exponents(count: int, seed: int, middle: int) -> np.ndarray:
    """Exponents of numbers that are normally distributed, nearly: each smaller one half as frequent."""
    bits = _mix(count, seed)
    return (middle - np.minimum(np.bitwise_count(bits & (~bits + np.uint64(1)) - np.uint64(1)), 30)).astype(np.uint16)


def bfloat16(count: int, seed: int, middle: int = 127) -> np.ndarray:
    """Bytes of count bfloat16 below 2 ** (middle - 126)."""
    rest = _mix(count, seed + 1).astype(np.uint16)
    return ((rest & 0x807F) | _exponents(count, seed, middle) << 7).astype("<u2").view(np.uint8)


def golden_cases() -> list[CodedCase]:
    """One of each thing a chunk may be."""
    planes = np.concatenate([bfloat16(2048, 20 + at, 127 - 6 * (at % 2)) for at in range(8)])
    wide = (_mix(9000, 5).astype(np.uint32) & np.uint32(0x807FFFFF)) | _exponents(9000, 6, 124).astype(np.uint32) << 23
    return [
        CodedCase("bfloat16, two chunks, the second of one table", Coding.PLANES_16, bfloat16(17_000, 1)),
        CodedCase("bfloat16, streams of two kinds", Coding.PLANES_16, planes),
        CodedCase("bfloat16, few elements", Coding.PLANES_16, bfloat16(700, 2)),
        CodedCase(
            "bytes",
            Coding.PLANES_8,
            (_exponents(3000, 3, 60) << 1 | _mix(3000, 4).astype(np.uint16) & 1).astype(np.uint8),
        ),
        CodedCase("float32", Coding.PLANES_32, wide.astype("<u4").view(np.uint8)),
        CodedCase("one symbol", Coding.PLANES_16, np.full(2000, 63, dtype=np.uint8)),
        CodedCase(
            "a chunk that does not shrink",
            Coding.PLANES_8,
            np.concatenate([_mix(2048, 7).view(np.uint8), np.zeros(16_384, dtype=np.uint8)]),
        ),
        CodedCase("random", Coding.PLANES_16, _mix(500, 8).view(np.uint8)),
    ]
