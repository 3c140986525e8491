"""The engine of the NVME pool over a simulated disk: `kvbm.pools.nvme.block_io.BlockEngine` in plain Python, without
threads.

Its bytes on disk are those of the native engine; tests/property/test_block_io.py holds the two together.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbm._native import checksums as checksum_rows
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.slot_header import HEADER_BYTES, SLOT_MAGIC, empty_headers, encode_headers, read_headers, verify


class PlainBlockIo:
    """One block after another through an `os`: the module, or a stand-in for it."""

    io = "threads"
    refusal = ""

    def __init__(self, os: Any, fds: Sequence[int], slots: int, block_bytes: int) -> None:
        self._os, self._fds, self._block_bytes = os, tuple(fds), block_bytes
        self._stride = stride_of(block_bytes)
        self._is_closed = False

    def read(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray, namespace: bytes, hashes: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        outcomes = np.full(len(slots), ReadOutcome.FAILED, dtype=np.uint8)
        sums = np.zeros(len(slots), dtype=np.uint32)
        for index, (slot, row) in enumerate(zip(slots.tolist(), at.tolist(), strict=True)):
            page, header = bytearray(PAGE_BYTES), empty_headers(1)
            try:
                if self._is_closed:
                    raise OSError(errno.ECANCELED, "closed")
                fd, position = self._place(slot)
                whole = self._os.preadv(fd, [page, rows[row]], position) == PAGE_BYTES + self._block_bytes
            except OSError:
                continue
            if whole and not any(page[HEADER_BYTES:]):
                header[0] = np.frombuffer(page, dtype=np.uint8, count=HEADER_BYTES)
            asked = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            verdict = verify(SLOT_MAGIC, header, rows[row : row + 1], NamespaceId(namespace), asked, checksum_rows)
            outcomes[index] = ReadOutcome.GOOD if verdict.good[0] else ReadOutcome.CORRUPT
            sums[index] = verdict.checksums[0]
        return outcomes, sums

    def write(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        epoch: int,
        checksums: np.ndarray,
        generation: int = 0,
    ) -> np.ndarray:
        proof = Proof(NamespaceId(namespace), Epoch(epoch), hashes, checksums)
        headers = encode_headers(SLOT_MAGIC, proof, self._block_bytes, checksum_rows, generation)
        errors = np.zeros(len(slots), dtype=np.int32)
        for index, (slot, row) in enumerate(zip(slots.tolist(), at.tolist(), strict=True)):
            page = headers[index].tobytes().ljust(PAGE_BYTES, b"\0")
            try:
                if self._is_closed:
                    raise OSError(errno.ECANCELED, "closed")
                fd, position = self._place(slot)
                if self._os.pwritev(fd, [page, rows[row]], position) != PAGE_BYTES + self._block_bytes:
                    errors[index] = errno.ENODATA
            except OSError as error:
                errors[index] = error.errno or errno.EIO
        return errors

    def scan(
        self, slots: np.ndarray, depth: int
    ) -> tuple[np.ndarray, bytes, bytes, np.ndarray, np.ndarray, np.ndarray]:
        headers, outcomes = empty_headers(len(slots)), np.zeros(len(slots), dtype=np.uint8)
        for index, slot in enumerate(slots.tolist()):
            page = bytearray(PAGE_BYTES)
            try:
                self._os.preadv(self._place(slot)[0], [page], self._place(slot)[1])
            except OSError:
                outcomes[index] = 2
                continue
            headers[index] = np.frombuffer(page, dtype=np.uint8, count=HEADER_BYTES)
        found = read_headers(SLOT_MAGIC, headers, self._block_bytes, checksum_rows)
        return (np.where(outcomes == 2, outcomes, found.whole), *found[1:])

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        return True

    def _place(self, slot: int) -> tuple[int, int]:
        return self._fds[slot % len(self._fds)], PAGE_BYTES + slot // len(self._fds) * self._stride
