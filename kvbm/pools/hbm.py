"""HBM: slots in one tensor on the accelerator, or on the CPU for tests and the reference engine."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError, PoolFullError
from kvbm.core.ids import NamespaceId, Reach, Tier
from kvbm.core.kernels import ChecksumRows
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.host import require_memory
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")

_STAGING_BYTES = 32 << 20  # pinned memory of one lane; a longer run goes through it in parts
_LANES = 2  # runs that copy at the same time


class _Lane(NamedTuple):
    """What one copy between GPU and host needs for itself.

    Attributes:
        staging: pinned host memory, (blocks, block_bytes) uint8.
        stream: the copies' own order on the device.
    """

    staging: torch.Tensor
    stream: torch.cuda.Stream


class HbmPool:
    """A uint8 tensor of (slots, block_bytes) that the engine computes in and the manager copies from and to.

    The engine writes `tensor` itself, so nothing is verified here; every block that is read gets its checksum, which
    travels with it from then on. On CUDA a copy starts after everything queued on the default stream and is over when
    the call returns; an engine that computes on other streams waits for them before it creates a block.

    Attributes:
        tensor: the slots; the engine may keep views of it.
    """

    def __init__(self, slots: int, block_bytes: int, checksums: ChecksumRows, device: str = "auto") -> None:
        """Take the memory.

        Args:
            device: "cpu", "cuda", or "auto": CUDA when there is one, else the CPU.
        Raises: MissingExtraError: no torch. LayoutError: below 1 slot or byte. PoolFullError: the device lacks the
            memory. PoolError: CUDA is wanted and not there.
        """
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingExtraError("torch", "engine") from error
        if device not in DEVICES:
            raise ConfigError(f"pools.hbm.device {device!r} is unknown; use one of {', '.join(DEVICES)}")
        check_size("HBM", slots, block_bytes)
        self.tier = Tier.HBM
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = Reach.INSTANCE
        self._checksum_rows = checksums
        self._closed = False
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        there = torch.cuda.is_available()
        if device == "cuda" and not there:
            raise PoolError(
                "HBM pool: device cuda is wanted and torch sees none; install its CUDA build or use device cpu"
            )
        self._on_cuda = there and device != "cpu"
        if not self._on_cuda:
            require_memory("HBM", slots * block_bytes, "lower pools.hbm.slots or capacity_bytes, or free memory")
            self.tensor = torch.zeros((slots, block_bytes), dtype=torch.uint8)
            return
        _require_hbm(slots * block_bytes)
        self.tensor = torch.zeros((slots, block_bytes), dtype=torch.uint8, device="cuda")
        staged_blocks = max(1, _STAGING_BYTES // block_bytes)
        for _ in range(_LANES):
            staging = torch.empty((staged_blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
            self._lanes.put(_Lane(staging, torch.cuda.Stream()))  # type: ignore[no-untyped-call]

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof) -> None:
        """Put rows into slots. Raises PoolError: closed, or the device failed; the slots then hold nothing."""
        indexes = check_slots("HBM", slots, check_proof("HBM", rows, proof, self.block_bytes), self.slots)
        if self._closed:
            raise PoolError(f"HBM pool: it is closed; {len(indexes)} blocks were not written")
        if not self._on_cuda:
            self.tensor.numpy()[indexes] = rows
            return
        try:
            self._write_cuda(indexes, rows)
        except RuntimeError as error:  # what torch raises for every failure of the device
            raise PoolError(f"HBM pool: {len(indexes)} blocks were not written, the device failed: {error}") from error

    def read(self, slots: Sequence[int], namespace: NamespaceId, hashes: bytes, rows: np.ndarray) -> ReadResult:
        """Fill rows from slots and compute their checksums."""
        count = check_rows("HBM", rows, hashes, self.block_bytes)
        indexes = check_slots("HBM", slots, count, self.slots)
        if self._closed:
            return all_failed(count)
        if self._on_cuda:
            try:
                self._read_cuda(indexes, rows)
            except RuntimeError:  # what torch raises for every failure of the device
                return all_failed(count)
        else:
            np.take(self.tensor.numpy(), indexes, axis=0, out=rows, mode="clip")
        return ReadResult([ReadOutcome.GOOD] * count, self._checksum_rows(rows))

    def close(self) -> None:
        """Give the memory back once the engine's views of it are gone. Idempotent; no call may be under way."""
        if self._closed:
            return
        self._closed = True
        self.tensor = self.tensor.new_empty((0, self.block_bytes))
        self._lanes = queue.SimpleQueue()

    def _write_cuda(self, indexes: np.ndarray, rows: np.ndarray) -> None:
        import torch

        with self._lane() as (staging, stream):
            for begin in range(0, len(indexes), len(staging)):
                part = indexes[begin : begin + len(staging)]
                staged = staging[: len(part)]
                staged.numpy()[:] = rows[begin : begin + len(part)]
                with torch.cuda.stream(stream):
                    where = torch.from_numpy(part).to("cuda")
                    self.tensor.index_copy_(0, where, staged.to("cuda", non_blocking=True))
                stream.synchronize()

    def _read_cuda(self, indexes: np.ndarray, rows: np.ndarray) -> None:
        import torch

        with self._lane() as (staging, stream):
            for begin in range(0, len(indexes), len(staging)):
                part = indexes[begin : begin + len(staging)]
                staged = staging[: len(part)]
                with torch.cuda.stream(stream):
                    where = torch.from_numpy(part).to("cuda")
                    staged.copy_(self.tensor.index_select(0, where), non_blocking=True)
                stream.synchronize()
                rows[begin : begin + len(part)] = staged.numpy()

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """A lane to oneself, ordered after what the engine has queued on the default stream."""
        import torch

        lane = self._lanes.get()
        try:
            lane.stream.wait_stream(torch.cuda.default_stream())
            yield lane
        finally:
            self._lanes.put(lane)


def _require_hbm(wanted_bytes: int) -> None:
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    if wanted_bytes > free_bytes:
        raise PoolFullError(
            f"HBM pool: {wanted_bytes} bytes wanted, {free_bytes} bytes free on the GPU;"
            " lower pools.hbm.slots or capacity_bytes",
            wanted_bytes,
            free_bytes,
        )
