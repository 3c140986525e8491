"""Copies by a GPU's copy engines: one asynchronous copy for each segment of each block of a run, given to the driver in
one call.

Copy engines take nothing of what the engine computes with, and are at their best with large segments; a kernel is for
small ones (`ways.py`). Rows must be memory that the device reaches.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm.pools.hbm.paged import PagedLayout

if TYPE_CHECKING:
    import torch

_STREAM, _ANY = (
    1,
    3,
)  # CU_MEMCPY_SRC_ACCESS_ORDER_…: read in the stream's order; or earlier, where nobody writes any more


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchMover:
    """Queues runs on the current stream. Any thread."""

    def __init__(self, layout: PagedLayout, device: torch.device, driver: Any) -> None:
        """Take the driver: libcuda.

        One without cuMemcpyBatchAsync (before CUDA 12.8) gets one call for each segment.
        """
        self._segments = layout.segments
        self._offsets = np.cumsum([0, *layout.segments.sizes[:-1]]).astype(np.int64)
        self._device = device
        self._driver = driver
        self._has_batches = hasattr(driver, "cuMemcpyBatchAsync")

    def gather(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """As `Mover.gather`."""
        there, here = self._places(slots, at, rows, address)
        self._copy(here, there, len(slots), _STREAM)

    def scatter(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """As `Mover.scatter`."""
        there, here = self._places(slots, at, rows, address)
        self._copy(there, here, len(slots), _ANY)

    def try_out(self, room: torch.Tensor) -> None:
        """Copy slot 0 into memory of the host that the device reaches.

        Raises anything: this driver cannot be used so.
        """
        import torch

        first = torch.zeros(1, dtype=torch.int64)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self.gather(first, first, room.numpy(), room.data_ptr())
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        event.synchronize()

    def _places(
        self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where each piece lies on the device and in the rows."""
        addresses, strides, _ = self._segments
        there = addresses[None, :] + slots.numpy()[:, None] * strides[None, :]
        here = address + at.numpy()[:, None] * rows.strides[0] + self._offsets[None, :]
        return np.ascontiguousarray(there, dtype=np.uint64).ravel(), np.ascontiguousarray(here, dtype=np.uint64).ravel()

    def _copy(self, targets: np.ndarray, sources: np.ndarray, blocks: int, order: int) -> None:
        import torch

        if not blocks:
            return
        sizes = np.tile(self._segments.sizes.astype(np.uint64), blocks)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        if not self._has_batches:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                named = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
                _check("cuMemcpyAsync", self._driver.cuMemcpyAsync(*named, stream))
            return
        attributes, first, failed = _Attributes(src_access_order=order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        columns = (ctypes.c_void_p(column.ctypes.data) for column in (targets, sources, sizes))
        error = self._driver.cuMemcpyBatchAsync(
            *columns,
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            stream,
        )
        _check("cuMemcpyBatchAsync", error)


def _check(name: str, error: int) -> None:
    """Raise RuntimeError, as torch does, for what the driver refuses."""
    if error:
        raise RuntimeError(f"CUDA error: {name} answers {error}")
