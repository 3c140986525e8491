"""How fast a GPU moves blocks of some size of segments, by each way: what `ways.py` decides by.

It takes some 30 MiB of the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvbm.pools.hbm.device import Mover
from kvbm.pools.hbm.paged import SLOTS, PagedLayout, PagedTensor, paged_layout
from kvbm.pools.hbm.ways import Rate

if TYPE_CHECKING:
    import torch

_BYTES = 16 << 20  # of a run
_SEGMENTS = 4  # of a block
_TIMES = 3

NewMover = Callable[[PagedLayout], Mover]


def rate_on(
    device: torch.device, new_movers: Mapping[str, NewMover], pinned: Callable[[tuple[int, ...]], torch.Tensor]
) -> Rate:
    """What measures on a device.

    Args:
        new_movers: way → what moves blocks of a layout by it.
        pinned: uint8 memory of the host, of a shape, that the device reaches.
    """
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def rate(way: str, gathers: bool, segment_bytes: int) -> float:
        """Bytes a second, the best of a few."""
        blocks = max(1, _BYTES // (_SEGMENTS * segment_bytes))
        tensors = [torch.zeros((blocks, segment_bytes), dtype=torch.uint8, device=device) for _ in range(_SEGMENTS)]
        layout = paged_layout([[PagedTensor(tensor, (SLOTS, "bytes"))] for tensor in tensors])
        mover = new_movers[way](layout)
        rows = pinned((blocks, layout.block_bytes))
        numbers = torch.arange(blocks, dtype=torch.int64)
        move = mover.gather if gathers else mover.scatter
        best_s = float("inf")
        stream.wait_stream(torch.cuda.current_stream(device))  # the tensors' zeros
        with torch.cuda.stream(stream):
            for turn in range(_TIMES + 1):
                begin_s = time.perf_counter()
                move(numbers, numbers, rows.numpy(), rows.data_ptr())
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
                event.synchronize()
                if turn:  # the first is the warm-up
                    best_s = min(best_s, time.perf_counter() - begin_s)
        return blocks * layout.block_bytes / best_s

    return rate
