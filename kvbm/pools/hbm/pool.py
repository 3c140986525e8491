"""HBM: slots in the engine's tensors on the accelerator, or on the CPU for tests and the demo's engine."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.checks import kind_of
from kvbm.core.errors import (
    ArgumentTypeError,
    ConfigError,
    LayoutError,
    MissingExtraError,
    PoolError,
    PoolFullError,
)
from kvbm.core.ids import NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.hbm.paged import (
    SLOTS,
    NewSegmentCopies,
    PagedLayout,
    PagedTensor,
    ReferenceCopies,
    SegmentCopies,
    paged_layout,
)
from kvbm.pools.hbm.rings import RING_BYTES, NewRing
from kvbm.pools.host.pool import require_memory
from kvbm.pools.run import all_failed, check_proof, check_rows, check_size, check_slots

if TYPE_CHECKING:
    import torch

    from kvbm.pools.hbm.cuda import EngineOrder, Touch
    from kvbm.pools.hbm.device import DeviceCopies
    from kvbm.pools.hbm.rings import RingCopies

DEVICES = ("auto", "cpu", "cuda")


class HbmPool:
    """Slots in a uint8 tensor of its own, or in the tensors an engine keeps its KV in, which a block then gathers from
    all layers.

    The engine writes the tensors itself, so nothing is verified here; every block that is read gets its checksum, which
    travels with it from then on.

    On CUDA a copy runs on streams of its own: it starts after the work that `order_after` named for its slots, and for
    slots without any after everything on the calling thread's current stream (the default one, unless the thread chose
    another); it is over when the call returns.

    Attributes:
        layout: the order of a block's bytes in words, for a namespace's `layout` field; "" for a tensor of its own,
            whose inside is the engine's affair.
        is_told: whether the slots lie on a GPU, and `touched` names all that touches them: a copy waits for that alone.
    """

    layout: str
    _tensor: torch.Tensor | None
    _memory: np.ndarray | None  # of a tensor of its own on the CPU
    _layers: Sequence[Sequence[PagedTensor]]  # the segments' memory is theirs
    _closed: bool
    _order: EngineOrder | None  # of a GPU's copies

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        checksums: ChecksumRows,
        device: str = "auto",
        copies: NewSegmentCopies | None = None,
        rings: NewRing | None = None,
        ring_bytes: int = RING_BYTES,
        is_told: bool = False,
    ) -> None:
        """Take the memory.

        Args:
            device: "cpu", "cuda", or "auto": CUDA when there is one, else the CPU.
            copies: moves bytes on the CPU; the readable ones by default.
            rings: makes what copies between a GPU and pinned rows; None: copies go another way.
            ring_bytes: of the GPU's memory, for the rings of each direction.
            is_told: whether `order_after` names what touches each slot; then a copy waits for that alone.
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
        there = torch.cuda.is_available()
        if device == "cuda" and not there:
            raise PoolError(
                "HBM pool: device cuda is wanted and torch sees none; install its CUDA build or use device cpu"
            )
        if there and device != "cpu":
            _require_hbm(slots * block_bytes)
            self._tensor = torch.zeros((slots, block_bytes), dtype=torch.uint8, device="cuda")
        else:
            require_memory("HBM", slots * block_bytes, "lower pools.hbm.slots or capacity_bytes, or free memory")
            self._tensor = torch.from_numpy(_aligned_rows(slots, block_bytes))
        layers = [[PagedTensor(self._tensor, (SLOTS, "bytes"))]]
        self._open(layers, paged_layout(layers), checksums, copies, "auto", rings, ring_bytes, is_told)
        self._memory = self._tensor.numpy() if self._device_copies is None else None
        self.layout = ""

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[Sequence[PagedTensor]],
        checksums: ChecksumRows,
        copies: NewSegmentCopies | None = None,
        way: str = "auto",
        rings: NewRing | None = None,
        ring_bytes: int = RING_BYTES,
        is_told: bool = False,
    ) -> HbmPool:
        """A pool whose slots lie in an engine's tensors; it has no memory of its own.

        Args:
            layers: the tensors of each layer, all on one device; `PagedTensor` says how they are described.
            way: how bytes leave a GPU: "ring", "kernel", "batch", "memcpy", "torch", or "auto", as
                `kvbm.pools.hbm.cuda.open_copies` says.
            rings, ring_bytes, is_told: as of the class.
        Raises: LayoutError: tensors that make no pool; the message names the first. ConfigError: the way cannot be had.
        """
        layout = paged_layout(layers)
        devices = {str(getattr(paged.tensor, "device", "cpu")) for layer in layers for paged in layer}
        if len(devices) > 1:
            raise LayoutError(f"paged KV lies on {', '.join(sorted(devices))}; give each device a pool of its own")
        pool = cls.__new__(cls)
        pool._tensor = None
        pool._open(layers, layout, checksums, copies, way, rings, ring_bytes, is_told)
        pool._memory = None
        pool.layout = layout.layout
        return pool

    @property
    def tensor(self) -> torch.Tensor:
        """The pool's own slots, (slots, block_bytes) uint8; the engine may keep views.

        Raises PoolError: they are the engine's.
        """
        if self._tensor is None:
            raise PoolError("HBM pool: its slots lie in the engine's own tensors; compute in those")
        return self._tensor

    @property
    def memory(self) -> np.ndarray | None:
        """The pool's own tensor where it is on the CPU; None on a GPU, in an engine's tensors, and once closed."""
        return self._memory

    @property
    def has_order(self) -> bool:
        """Whether copies are ordered behind an engine's work, as `touched` names it."""
        return self._order is not None

    def order_after(self, work: torch.cuda.Stream | torch.cuda.Event) -> None:
        """Copies that begin from now on wait for this work of the engine's too, on the device; the caller does not
        wait.

        For an engine that computes on other streams than the default one. A block may be read, and a released slot
        written, once the work that last touched it was given here, or to `touched`; `Manager.create`, `unpin` and
        `release` do so. On a CPU nothing is waited for.

        Args:
            work: a stream, for all that is on it now; or an event that was recorded behind the work. Of what has no
                torch stream, `torch.cuda.ExternalStream(pointer)`.
        Raises: ArgumentTypeError: it is neither.
        """
        touch = self.recorded(work)
        if self._order is not None and touch is not None:
            self._order.after(touch)

    def recorded(self, work: torch.cuda.Stream | torch.cuda.Event | None) -> Touch | None:
        """This work as it is now, for `touched`; without work the default stream's. None: there is nothing to wait for.

        Raises: ArgumentTypeError: it is neither a stream nor an event of CUDA's.
        """
        is_stream = hasattr(work, "record_event")
        if work is not None and not is_stream and not (hasattr(work, "query") and hasattr(work, "wait")):
            raise ArgumentTypeError(
                "stream", f"is {kind_of(work)}; give a torch.cuda.Stream, or a torch.cuda.Event behind the work"
            )
        if self._order is None:
            return None
        handle = "cuda_stream" if is_stream else "cuda_event"
        if work is not None and self._order.ring is not None and not hasattr(work, handle):
            raise ArgumentTypeError(
                "stream", f"is {kind_of(work)}, which is not CUDA's; give a torch.cuda.Stream or Event"
            )
        if work is not None and getattr(work, handle, 1) == 0 and not is_stream:
            return None  # it was never recorded: there is nothing to wait for
        if work is None and not self.is_told:
            return None
        return self._order.recorded(work)

    def touched(self, slots: Sequence[int], touch: Touch | None) -> None:
        """Copies from and into these slots wait for this from now on, and of others those that nobody has named
        anything for.

        Args:
            touch: as `recorded` gave it.
        """
        if self._order is None or touch is None:
            return
        if self.is_told:
            self._order.touched(_column(np.asarray([slot for slot in slots if slot < self.slots])), touch)
        else:
            self._order.after(touch)

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Put rows into slots. Raises PoolError: closed, or the device failed; the slots then hold nothing."""
        indexes = check_slots("HBM", slots, check_proof("HBM", rows, proof, self.block_bytes, at), self.slots)
        if self._closed:
            raise PoolError(f"HBM pool: it is closed; {len(indexes)} blocks were not written")
        if self._device_copies is None:
            self._copies.scatter(_column(indexes), rows, _rows_at(at))
            return
        try:
            self._device_copies.scatter(_column(indexes), rows, _rows_at(at))
        except RuntimeError as error:  # what torch raises for every failure of the device
            raise PoolError(f"HBM pool: {len(indexes)} blocks were not written, the device failed: {error}") from error

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows from slots and compute their checksums."""
        count = check_rows("HBM", rows, hashes, self.block_bytes, at)
        indexes = check_slots("HBM", slots, count, self.slots)
        if self._closed:
            return all_failed(count)
        if self._device_copies is None:
            sums = self._copies.gather(_column(indexes), rows, _rows_at(at))
        else:
            try:
                sums = self._device_copies.gather(_column(indexes), rows, _rows_at(at))
            except (
                RuntimeError,
                PoolError,
            ):  # what torch raises for every failure of the device; or it does not answer
                return all_failed(count)
        return ReadResult([ReadOutcome.GOOD] * count, sums)

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """CRC-32C of what slots hold now. Raises PoolError: closed, or on a GPU, where a read gives them."""
        indexes = check_slots("HBM", slots, len(slots), self.slots)
        if self._closed:
            raise PoolError(f"HBM pool: it is closed; {len(indexes)} checksums cannot be had")
        if self._device_copies is not None:
            raise PoolError("HBM pool: it is on a GPU; the checksums of its blocks come with a read")
        return self._copies.checksums(_column(indexes))

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Nothing is kept: the engine vouches for what its slots hold. Raises PoolError: closed."""
        check_slots("HBM", slots, len(proof.checksums), self.slots)
        if self._closed:
            raise PoolError(f"HBM pool: it is closed; {len(slots)} blocks were not sealed")

    def close(self) -> None:
        """Give the memory back once the engine's views of it are gone. Idempotent; no call may be under way."""
        if self._closed:
            return
        self._closed = True
        self._layers = []
        self._memory = None
        if self._tensor is not None:
            self._tensor = self._tensor.new_empty((0, self.block_bytes))
        if self._device_copies is not None:
            self._device_copies.close()
        self._order = None  # it asks a ring

    def _open(
        self,
        layers: Sequence[Sequence[PagedTensor]],
        layout: PagedLayout,
        checksums: ChecksumRows,
        copies: NewSegmentCopies | None,
        way: str,
        rings: NewRing | None,
        ring_bytes: int,
        is_told: bool,
    ) -> None:
        import torch

        def readable(addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int) -> SegmentCopies:
            return ReferenceCopies(addresses, strides, sizes, slots, checksums)

        new_copies = copies or readable
        self.tier = Tier.HBM
        self.slots = layout.slots
        self.block_bytes = layout.block_bytes
        self.reach = Reach.INSTANCE
        self._closed = False
        self._layers = layers
        self._device_copies: DeviceCopies | RingCopies | None = None
        self._order = None
        self.is_told = False
        device = device_of(layers)
        if device.type == "cuda":
            from kvbm.pools.hbm.cuda import EngineOrder, open_copies

            self._order, self.is_told = EngineOrder(layout.slots, is_told, device), is_told
            self._device_copies = open_copies(layers, layout, device, self._order, new_copies, way, rings, ring_bytes)
            torch.cuda.current_stream(device).synchronize()  # what fills the tensors at first was named by nobody
        elif device.type == "cpu":
            self._copies = new_copies(*layout.segments, layout.slots)
        else:
            raise LayoutError(f"paged KV lies on {device}; a pool can be on cuda or cpu")


def device_of(layers: Sequence[Sequence[PagedTensor]]) -> torch.device:
    """Where an engine's tensors lie."""
    import torch

    first = layers[0][0].tensor
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")


def _aligned_rows(slots: int, block_bytes: int) -> np.ndarray:
    """Zeroed rows that begin at a page, in huge pages where they are to be had: a disk reads into them as they are, in
    few pieces.
    """
    memory = mmap.mmap(-1, slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8).reshape(slots, block_bytes)


def _column(indexes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(indexes, dtype=np.int64)


def _rows_at(at: Sequence[int] | None) -> np.ndarray | None:
    return None if at is None else _column(np.asarray(at))


def _require_hbm(wanted_bytes: int) -> None:
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # what torch keeps for the next who asks
    if wanted_bytes > free_bytes:
        raise PoolFullError(
            f"HBM pool: {wanted_bytes} bytes wanted, {free_bytes} bytes free on the GPU;"
            " lower pools.hbm.slots or capacity_bytes",
            wanted_bytes,
            free_bytes,
        )
