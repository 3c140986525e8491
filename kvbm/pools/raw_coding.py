"""Blocks as they are, until the native coder is here."""

from __future__ import annotations

import numpy as np

from kvbm._native import checksums
from kvbm.pools.coding import BlockCoder, Coding, Encoded


def _encode(rows: np.ndarray, at: np.ndarray, coding: int) -> Encoded:
    body = rows[at].ravel()
    return Encoded(body, np.full(len(at), rows.shape[1], dtype=np.uint32), np.full(len(at), Coding.RAW, dtype=np.uint8))


def _decode(
    body: np.ndarray, lengths: np.ndarray, codings: np.ndarray, rows: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    good = (lengths == rows.shape[1]) & (codings == Coding.RAW)
    sums = np.zeros(len(at), dtype=np.uint32)
    if good.all():
        source = body.reshape(len(at), -1)
        wanted = at >= 0
        rows[at[wanted]] = source[wanted]
        sums[wanted] = checksums(np.ascontiguousarray(source[wanted]))
    return good & (at >= 0), sums


RAW_CODER = BlockCoder(_encode, _decode)
