"""One launch that copies all chunks of all blocks of a run, in Triton.

Import it only where Triton is: it comes with torch for CUDA.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from kvbm.pools.hbm.paged import PieceSegments

CHUNK_BYTES = 8192  # copied by one program: enough to be worth its start, little enough to keep all of the GPU busy
_WARPS = 4
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_chunks(  # type: ignore[no-untyped-def]
    chunks,  # int64 [chunks, 4]: address, stride, offset in the block, words
    slots,  # int64 [blocks]
    at,  # int64 [blocks]: the row of each
    rows,  # address of row 0
    row_stride,  # bytes from a row to the next
    chunk_count,
    GATHER: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803  bytes that every address and size is a multiple of
    STEP: tl.constexpr,  # noqa: N803  the same in words
    WIDTH: tl.constexpr,  # noqa: N803  words of a whole chunk
):
    program = tl.program_id(0).to(tl.int64)
    block = program // chunk_count
    chunk = chunks + (program % chunk_count) * 4
    address = tl.load(chunk) + tl.load(slots + block) * tl.load(chunk + 1)
    row = rows + tl.load(at + block) * row_stride + tl.load(chunk + 2)
    words = tl.multiple_of(tl.load(chunk + 3), STEP)
    # Known alignment turns the words below into loads and stores of 16 bytes.
    here = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGN)
    there = tl.multiple_of(row.to(tl.pointer_type(WORD)), ALIGN)
    word = tl.arange(0, WIDTH)
    inside = word < words
    if GATHER:
        tl.store(there + word, tl.load(here + word, mask=inside), mask=inside)
    else:
        tl.store(here + word, tl.load(there + word, mask=inside), mask=inside)


class SegmentKernel:
    """Copies between segments and rows of any memory that the device reaches.

    Launches are queued on the current stream.
    """

    def __init__(self, segments: PieceSegments, device: torch.device) -> None:
        """Cut the segments into chunks; their table goes to the device."""
        self._segments = segments
        self._device = device
        numbers = np.concatenate([segments.addresses, segments.strides, segments.sizes])
        self._align = math.gcd(16, int(np.gcd.reduce(numbers)))  # of every piece, so of every offset in a block too
        self._tables: dict[int, torch.Tensor] = {}
        self._table(min(self._align, 8))

    def gather(self, slots: torch.Tensor, at: torch.Tensor, rows_address: int, row_stride: int) -> None:
        """Fill the rows `at` from slots.

        Both are int64 on the device, of one length; the rows begin `row_stride` bytes apart.
        """
        self._launch(slots, at, rows_address, row_stride, True)

    def scatter(self, slots: torch.Tensor, at: torch.Tensor, rows_address: int, row_stride: int) -> None:
        """Fill slots from the rows `at`."""
        self._launch(slots, at, rows_address, row_stride, False)

    def _launch(self, slots: torch.Tensor, at: torch.Tensor, rows_address: int, row_stride: int, gathers: bool) -> None:
        if not len(slots):
            return
        align = math.gcd(self._align, rows_address, row_stride)
        word_bytes = min(align, 8)
        table = self._table(word_bytes)
        _copy_chunks[(len(slots) * len(table),)](
            table,
            slots,
            at,
            rows_address,
            row_stride,
            len(table),
            GATHER=gathers,
            WORD=_WORDS[word_bytes],
            ALIGN=align,
            STEP=align // word_bytes,
            WIDTH=CHUNK_BYTES // word_bytes,
            num_warps=_WARPS,
        )

    def _table(self, word_bytes: int) -> torch.Tensor:
        """Chunks in words of this size, (chunks, 4): address, stride, offset in the block, words."""
        if word_bytes not in self._tables:
            chunks = []
            offset = 0
            for address, stride, size in zip(*(column.tolist() for column in self._segments), strict=True):
                for begin in range(0, size, CHUNK_BYTES):
                    words = min(CHUNK_BYTES, size - begin) // word_bytes
                    chunks.append((address + begin, stride, offset + begin, words))
                offset += size
            self._tables[word_bytes] = torch.tensor(chunks, dtype=torch.int64).to(self._device)
        return self._tables[word_bytes]
