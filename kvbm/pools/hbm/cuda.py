"""CUDA's part of HBM copies: streams and events, the ways to move a run, and what of the host's memory a GPU
reaches.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from kvbm.core.errors import ConfigError, LayoutError
from kvbm.pools.hbm import rings as by_ring
from kvbm.pools.hbm.batch import BatchMover
from kvbm.pools.hbm.copy_queue import Ordering, QueueSide, ThreadedQueue
from kvbm.pools.hbm.device import DeviceCopies, Half, Lane, Mover, QueueMark, row_copies
from kvbm.pools.hbm.measuring import NewMover, rate_on
from kvbm.pools.hbm.paged import NewSegmentCopies, PagedLayout, PagedTensor, block_order
from kvbm.pools.hbm.rings import RING_BYTES, After, NewRing, Ring, RingCopies, ring_sizes
from kvbm.pools.hbm.ways import Ways, known_ways, measure_ways
from kvbm.safe_log import SafeLog

log = SafeLog()

WAYS = ("auto", "ring", "kernel", "batch", "memcpy", "torch")

_STAGING_BYTES = 32 << 20  # pinned memory of one lane; a longer run goes through it in parts
_RUN_BLOCKS = 8192  # of one launch straight to pinned rows
_LANES = 3  # runs that copy at the same time; gathers leave one of them free
_DEADLINE_S = 30.0
_FORGETS_EVERY = 1024  # calls
_DEVICE_POINTER, _MEMORY_TYPE, _HOST_MEMORY = 3, 2, 1  # of cuda.h: CU_POINTER_ATTRIBUTE_…, CU_MEMORYTYPE_HOST


class RingMark:
    """A ring's event behind an engine's work, which lives as long as somebody may wait for it."""

    def __init__(self, ring: Ring, events: list[int], streams: list[int]) -> None:
        """Raises RuntimeError: the device takes none, or a stream is captured into a graph."""
        self._ring = ring
        self.cuda_event = 0
        self.cuda_event = ring.mark(events, streams)

    def __del__(self) -> None:
        if self.cuda_event:
            self._ring.drop_mark(self.cuda_event)


# What a copy waits for: an event behind some work, or a stream, for all that is on it when the copy begins.
Touch = torch.cuda.Event | RingMark | torch.cuda.Stream


def _is_pending(event: torch.cuda.Event | torch.cuda.Stream) -> bool:
    try:
        return not event.query()
    except RuntimeError:  # the device failed; a copy that waits for it says so
        return True


class EngineOrder:
    """Which of the engine's work a copy waits for: what touched its slots, where that is known.

    Args:
        slots: of the pool.
        is_told: whether whoever owns the slots names what touches each of them, so that slots nobody has named were
            touched by nothing; else such slots may have been touched by what is on the calling thread's current stream.

    Attributes:
        ring: gives marks of its own, and tells which were passed; None: an engine's events are kept as they are.
    """

    def __init__(self, slots: int = 0, is_told: bool = False, device: torch.device | None = None) -> None:
        self.ring: Ring | None = None
        self._device = device
        self._is_told = is_told
        self._lock = threading.Lock()
        self._named: list[Touch] = []  # all that were named, but for some that the device has passed
        self._everywhere: list[Touch] = []  # those of them that were named for all slots
        self._last = np.zeros(slots, dtype=np.int64)  # the number of what touched a slot; 0: nobody has said
        self._touches: dict[int, tuple[Touch, ...]] = {}
        self._number = self._calls = 0

    def recorded(self, work: torch.cuda.Stream | torch.cuda.Event | None) -> Touch:
        """This work as it is now, or, where no event behind it can be had, all that is on its stream when a copy
        begins.

        Args:
            work: None: the default stream's.
        """
        stream = torch.cuda.default_stream(self._device) if work is None else work
        record = getattr(stream, "record_event", None)
        try:
            if self.ring is None:
                event: Touch = stream if record is None else record()
                return event
            if record is not None:
                return RingMark(self.ring, [], [stream.cuda_stream])  # type: ignore[union-attr]
            return RingMark(self.ring, [stream.cuda_event], [])  # type: ignore[union-attr]
        except RuntimeError:  # it is captured into a graph, or the device failed; a copy that waits for it says so
            return stream

    def after(self, touch: Touch) -> None:
        """Copies that begin from now on wait for this too, until the device has passed it."""
        with self._lock:
            self._named = [*self._pending(self._named), touch]
            self._everywhere = [*self._pending(self._everywhere), touch]

    def touched(self, slots: np.ndarray, touch: Touch) -> None:
        """Copies from and into these slots wait for this from now on."""
        with self._lock:
            numbers, groups = np.unique(self._last[slots], return_inverse=True)
            fresh = np.arange(self._number + 1, self._number + 1 + len(numbers), dtype=np.int64)
            for number, new in zip(numbers.tolist(), fresh.tolist(), strict=True):
                before = self._pending(self._touches.get(number, ()))
                self._touches[new] = tuple(dict.fromkeys((*before, touch)))
            self._number += len(numbers)
            self._last[slots] = fresh[groups]
            self._named.append(touch)
            self._calls += 1
            if self._calls % _FORGETS_EVERY == 0 or len(self._touches) > 2 * len(self._last) + _FORGETS_EVERY:
                self._forget_locked()

    def of(self, slots: np.ndarray) -> After:
        """What a copy from or into these slots waits for."""
        with self._lock:
            touches = list(self._everywhere)
            numbers = np.unique(self._last[slots]).tolist()
            for number in numbers:
                touches += self._touches.get(number, ())
        if not self._is_told and 0 in numbers:
            touches.append(torch.cuda.current_stream(self._device))
        touches = list(dict.fromkeys(touches))
        events = [touch.cuda_event for touch in touches if hasattr(touch, "cuda_event")]
        streams = [touch.cuda_stream for touch in touches if hasattr(touch, "cuda_stream")]
        return After(events, streams, touches)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What is queued on a stream from now on waits, on the device, for all that was named."""
        with self._lock:
            self._named = named = self._pending(self._named)
        for touch in named:
            if hasattr(touch, "cuda_stream"):
                stream.wait_stream(touch)  # type: ignore[arg-type]
            else:
                stream.wait_event(touch)  # type: ignore[arg-type]  # where there is no ring it is torch's

    def _pending(self, touches: Iterable[Touch]) -> list[Touch]:
        return [touch for touch in touches if not self._is_passed(touch)]

    def _is_passed(self, touch: Touch) -> bool:
        if self.ring is not None and hasattr(touch, "cuda_event"):
            return self.ring.has_passed(touch.cuda_event)
        if self.ring is not None:  # to ask torch of a stream could end a capture
            return False
        return not _is_pending(touch)  # type: ignore[arg-type]

    def _forget_locked(self) -> None:
        """What no slot has as its last, and what was passed."""
        self._named = self._pending(self._named)
        last = set(np.unique(self._last).tolist())
        self._touches = {number: touches for number, touches in self._touches.items() if number in last}


class StreamOrder:
    """A lane's stream, of the lowest priority: what the engine computes goes before what is copied."""

    def __init__(self, device: torch.device, engine: EngineOrder) -> None:
        self._device = device
        self._engine = engine
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is a static method
        self._stream = torch.cuda.Stream(device, priority=lowest)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Wait, on the device, for the calling thread's stream (the default one, unless it chose) and the engine's
        events.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._engine.hold(self._stream)

    def run(self, work: Callable[[], None]) -> QueueMark:
        """Launch on the stream; an event behind it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event


class KernelMover:
    """One launch that reads or writes the rows in the host's memory itself."""

    def __init__(self, layout: PagedLayout, device: torch.device) -> None:
        from kvbm.pools.hbm.segment_kernel import SegmentKernel

        self._kernel = SegmentKernel(layout.segments, device)
        self._block_bytes = layout.block_bytes
        self._device = device

    def gather(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """As `Mover.gather`."""
        self._kernel.gather(self._there(slots), self._there(at), address, rows.strides[0])

    def scatter(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """As `Mover.scatter`."""
        self._kernel.scatter(self._there(slots), self._there(at), address, rows.strides[0])

    def try_out(self) -> None:
        """Compile, and copy a block beside the others. Raises anything: Triton cannot be used here."""
        block = torch.empty(self._block_bytes, dtype=torch.uint8, device=self._device)
        first = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._kernel.gather(first, first, block.data_ptr(), self._block_bytes)
        block[:1].cpu()  # waits for it

    def _there(self, indexes: torch.Tensor) -> torch.Tensor:
        return indexes.to(self._device, non_blocking=True)


class MemcpyMover:
    """Contiguous blocks on the device, and one asynchronous copy for each run of consecutive rows."""

    def __init__(self, pack: TensorPacking | KernelPacking, device: torch.device) -> None:
        self._pack = pack
        self._device = device

    def gather(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """As `Mover.gather`."""
        packed = self._pack.gather(slots.to(self._device, non_blocking=True))
        target = torch.from_numpy(rows)
        for begin, end in _consecutive(at, rows):
            first = int(at[begin])
            target[first : first + end - begin].copy_(packed[begin:end], non_blocking=True)

    def scatter(self, slots: torch.Tensor, at: torch.Tensor, rows: np.ndarray, address: int) -> None:
        """As `Mover.scatter`."""
        packed = self._pack.room(len(slots))
        source = _readable(rows)
        for begin, end in _consecutive(at, rows):
            first = int(at[begin])
            packed[begin:end].copy_(source[first : first + end - begin], non_blocking=True)
        self._pack.scatter(slots.to(self._device, non_blocking=True), packed)


class SplitMover:
    """One way from the device, and one to it."""

    def __init__(self, gathers: Mover, scatters: Mover) -> None:
        self.gather = gathers.gather
        self.scatter = scatters.scatter
        self.takes_memory = MemcpyMover in (type(gathers), type(scatters))


class KernelPacking:
    """Blocks ↔ contiguous rows on the device, by one launch."""

    def __init__(self, layout: PagedLayout, device: torch.device) -> None:
        from kvbm.pools.hbm.segment_kernel import SegmentKernel

        self._kernel = SegmentKernel(layout.segments, device)
        self._block_bytes = layout.block_bytes
        self._device = device

    def room(self, count: int) -> torch.Tensor:
        """Rows on the device for so many blocks."""
        return torch.empty((count, self._block_bytes), dtype=torch.uint8, device=self._device)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """The blocks of slots, one after another."""
        packed = self.room(len(slots))
        self._kernel.gather(slots, torch.arange(len(slots), device=self._device), packed.data_ptr(), self._block_bytes)
        return packed

    def scatter(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Fill slots from blocks one after another."""
        numbers = torch.arange(len(slots), device=self._device)
        self._kernel.scatter(slots, numbers, packed.data_ptr(), self._block_bytes)


class TensorPacking:
    """The same without Triton: one indexed copy a tensor. Slower by the number of layers."""

    def __init__(self, layers: Sequence[Sequence[PagedTensor]], layout: PagedLayout, device: torch.device) -> None:
        self._block_bytes = layout.block_bytes
        self._device = device
        self._tensors = [_blocks_first(paged) for layer in layers for paged in layer]

    def room(self, count: int) -> torch.Tensor:
        """Rows on the device for so many blocks."""
        return torch.empty((count, self._block_bytes), dtype=torch.uint8, device=self._device)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """The blocks of slots, one after another."""
        parts = [tensor.index_select(0, slots).contiguous() for tensor in self._tensors]
        return torch.cat([part.view(len(slots), -1).view(torch.uint8) for part in parts], dim=1)

    def scatter(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Fill slots from blocks one after another."""
        begin = 0
        for tensor in self._tensors:
            end = begin + tensor[0].numel() * tensor.element_size()
            part = packed[:, begin:end].clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            tensor.index_copy_(0, slots, part.view(len(slots), *tensor.shape[1:]))
            begin = end


def open_copies(
    layers: Sequence[Sequence[PagedTensor]],
    layout: PagedLayout,
    device: torch.device,
    engine: EngineOrder,
    copies: NewSegmentCopies,
    way: str = "auto",
    rings: NewRing | None = None,
    ring_bytes: int = RING_BYTES,
) -> DeviceCopies | RingCopies:
    """Copies between tensors on a GPU and rows on the host.

    Args:
        way: as `mover_of` has it; "ring": pieces are packed in a ring on the device and copied whole; "auto": that,
            where it can be had.
        rings: makes rings.
        ring_bytes: of the GPU's memory, for those of each direction.
    Raises: ConfigError: the way is unknown, or needs what is not there.
    """
    if way in ("auto", "ring") and rings is not None:
        try:
            lanes = [_ring_lane(layout, device, copies, rings, size) for size in ring_sizes(ring_bytes) * 2]
        except (RuntimeError, LayoutError) as error:
            if way == "ring":
                raise ConfigError(f'HBM pool: to copy by "ring" cannot be had: {error}') from error
            log.warning("hbm.ring_refused", why=str(error), instead="copies that take more of the engine's GPU")
        else:
            engine.ring = lanes[0].ring
            return RingCopies(lanes[:2], lanes[2:], engine.of, copies, _DEADLINE_S)
    if way == "ring":
        raise ConfigError('HBM pool: to copy by "ring" needs kvbm\'s native rings; use "auto"')
    return _moved_copies(layers, layout, device, engine, copies, way, _LANES)


def _ring_lane(
    layout: PagedLayout, device: torch.device, copies: NewSegmentCopies, rings: NewRing, size: int
) -> by_ring.RingLane:
    """A ring, and pinned staging for rows that it does not reach. Raises RuntimeError, LayoutError."""
    index: int | None = device.index
    made = rings(*layout.segments, layout.slots, index or 0, size)
    blocks = max(1, _STAGING_BYTES // 2 // layout.block_bytes)

    def half() -> by_ring.RingHalf:
        staging = _pinned((blocks, layout.block_bytes), torch.uint8)
        rows = staging.numpy()
        return by_ring.RingHalf(rows, row_copies(copies, rows), by_ring.Outliving(staging))

    return by_ring.RingLane(made, (half(), half()))


def _moved_copies(
    layers: Sequence[Sequence[PagedTensor]],
    layout: PagedLayout,
    device: torch.device,
    engine: EngineOrder,
    copies: NewSegmentCopies,
    way: str,
    lanes: int,
    ways: Ways | None = None,
) -> DeviceCopies:
    """Copies by a mover, each lane with a stream and staging of its own.

    Args:
        ways: what "auto" decides by; None: what was measured on such a GPU before, else the defaults.
    """
    mover = mover_of(way, layers, layout, device, ways)
    half_blocks = max(1, _STAGING_BYTES // 2 // layout.block_bytes)
    takes_memory = isinstance(mover, MemcpyMover) or (isinstance(mover, SplitMover) and mover.takes_memory)
    run_blocks = half_blocks if takes_memory else _RUN_BLOCKS  # of the GPU's memory, for a run
    made = []
    for _ in range(lanes):
        first, second = (_pinned_half(half_blocks, layout.block_bytes, run_blocks, copies) for _ in range(2))
        made.append(Lane(StreamOrder(device, engine), (first, second)))

    def reached(rows: np.ndarray) -> int | None:
        torch.cuda.current_stream(device).query()  # gives this thread the context that the driver's question needs
        return device_address(rows)

    return DeviceCopies(mover, made, copies, reached, _DEADLINE_S, run_blocks)


def open_queue(
    layers: Sequence[Sequence[PagedTensor]],
    layout: PagedLayout,
    device: torch.device,
    copies: NewSegmentCopies,
    rings: NewRing | None = None,
    ring_bytes: int = RING_BYTES,
) -> ThreadedQueue:
    """Copies beside the caller; each run waits, on the device, for its mark: what the caller's current stream had when
    that was made.

    Loads and stores share nothing: a ring, or a lane with its stream and staging, and the marks that are waited for are
    one side's own.
    """

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    # The thread's current stream is one where nothing runs: a copy may also wait for that of its thread.
    def aside() -> AbstractContextManager[Any]:
        idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        made: AbstractContextManager[Any] = torch.cuda.stream(idle)
        return made

    if rings is not None:
        try:
            return _ring_queue(layout, device, copies, rings, ring_bytes, mark, aside)
        except (RuntimeError, LayoutError) as error:
            log.warning("hbm.ring_refused", why=str(error), instead="copies that take more of the engine's GPU")
    ways = measured_ways(device)

    def side() -> tuple[DeviceCopies, Ordering]:
        order = EngineOrder(device=device)
        moving = _moved_copies(layers, layout, device, order, copies, "auto", 1, ways)
        return moving, Ordering(mark, order.after, aside(), lambda mark: not _is_pending(mark))

    loads, (stores, behind) = side(), side()
    return ThreadedQueue(
        loads[0], layout.slots, layout.block_bytes, loads[1], QueueSide(stores, behind, fetch=stores.fetch)
    )


class _MarkOrder:
    """The mark of a queue's run, for the ring that carries it out: one thread's."""

    def __init__(self) -> None:
        self._mark: torch.cuda.Event | None = None

    def follow(self, mark: torch.cuda.Event) -> None:
        """The next run is behind this."""
        self._mark = mark

    def of(self, slots: np.ndarray) -> After:
        """As `RingCopies` asks."""
        assert self._mark is not None
        return After([self._mark.cuda_event], [], self._mark)


def _ring_queue(
    layout: PagedLayout,
    device: torch.device,
    copies: NewSegmentCopies,
    rings: NewRing,
    ring_bytes: int,
    mark: Callable[[], torch.cuda.Event],
    aside: Callable[[], AbstractContextManager[Any]],
) -> ThreadedQueue:
    """A ring for each side, whose runs come one after the other.

    Raises RuntimeError, LayoutError: a ring cannot be had.
    """
    loads, stores = (_ring_lane(layout, device, copies, rings, ring_bytes) for _ in range(2))

    def has_passed(event: torch.cuda.Event) -> bool:
        return loads.ring.has_passed(event.cuda_event)

    def side(gathers: Sequence[by_ring.RingLane], scatters: Sequence[by_ring.RingLane]) -> tuple[RingCopies, Ordering]:
        order = _MarkOrder()
        moving = RingCopies(gathers, scatters, order.of, copies, _DEADLINE_S)
        return moving, Ordering(mark, order.follow, aside(), has_passed)

    (loading, of_loads), (storing, of_stores) = side((), (loads,)), side((stores,), ())
    return ThreadedQueue(loading, layout.slots, layout.block_bytes, of_loads, QueueSide(storing, of_stores))


def measured_ways(device: torch.device) -> Ways:
    """From which size of segments on a GPU's copy engines are used: measured now, unless it was before."""
    driver = _driver()
    if driver is None or importlib.util.find_spec("triton") is None:  # there is nothing to compare
        return known_ways(_name_of(device))

    def measure() -> Ways:
        movers: dict[str, NewMover] = {
            "kernel": lambda layout: KernelMover(layout, device),
            "batch": lambda layout: BatchMover(layout, device, driver),
        }
        return measure_ways(_name_of(device), rate_on(device, movers, lambda shape: _pinned(shape, torch.uint8)))

    return known_ways(_name_of(device), measure)


def _name_of(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def mover_of(
    way: str,
    layers: Sequence[Sequence[PagedTensor]],
    layout: PagedLayout,
    device: torch.device,
    ways: Ways | None = None,
) -> Mover:
    """The way bytes leave a GPU and come back.

    Args:
        way: "kernel": a launch that reads and writes pinned rows itself; "batch": copy engines, one copy a segment;
            "memcpy": a launch on the device, then asynchronous copies; "torch": the same without Triton, one indexed
            copy a tensor; "auto": "batch" where segments are large (`ways`), else "kernel" where Triton is, else
            "torch".
    Raises: ConfigError: the way is unknown, or needs Triton or CUDA's driver, which is not there.
    """
    if way not in WAYS:
        raise ConfigError(f"HBM pool: the way to copy is {way!r}; use one of {', '.join(WAYS)}")
    triton = importlib.util.find_spec("triton") is not None
    if way in ("kernel", "memcpy") and not triton:
        raise ConfigError(
            f'HBM pool: to copy by "{way}" needs Triton, which comes with torch\'s CUDA builds; use "torch"'
        )
    driver = _driver()
    if way == "batch":
        if driver is None:
            raise ConfigError('HBM pool: to copy by "batch" needs CUDA\'s driver (libcuda.so.1); use "auto"')
        return BatchMover(layout, device, driver)
    if way == "memcpy":
        return MemcpyMover(KernelPacking(layout, device), device)
    if way == "kernel":
        return KernelMover(layout, device)
    if way == "auto" and driver is not None:
        ways = ways or known_ways(_name_of(device))
        segment_bytes = layout.block_bytes / len(layout.segments.sizes)
        gathers, scatters = ways.engines_gather(segment_bytes), ways.engines_scatter(segment_bytes)
        engines = _engines(layout, device, driver) if gathers or scatters else None
        if engines is not None:
            if gathers and scatters:
                return engines
            other = _without_engines(triton, layers, layout, device)
            return SplitMover(engines if gathers else other, engines if scatters else other)
    return _without_engines(triton and way == "auto", layers, layout, device)


def _engines(layout: PagedLayout, device: torch.device, driver: ctypes.CDLL) -> BatchMover | None:
    engines = BatchMover(layout, device, driver)
    try:
        engines.try_out(_pinned((1, layout.block_bytes), torch.uint8))
    except Exception as error:  # noqa: BLE001  a driver of another version, or none that answers
        log.warning("hbm.engines_refused", why=str(error), instead="a kernel, or one torch copy a tensor")
        return None
    return engines


def _without_engines(
    triton: bool, layers: Sequence[Sequence[PagedTensor]], layout: PagedLayout, device: torch.device
) -> Mover:
    if triton:
        try:
            mover = KernelMover(layout, device)
            mover.try_out()
        # Triton compiles here, with what compiler and folders there are, and raises anything
        except Exception as error:  # noqa: BLE001
            log.warning("hbm.kernel_refused", why=str(error), instead="one torch copy a tensor, slower")
        else:
            return mover
    return MemcpyMover(TensorPacking(layers, layout, device), device)


def device_address(rows: np.ndarray) -> int | None:
    """The GPU's address of rows in the host's memory that CUDA has registered; None where it has not."""
    if not rows.nbytes:
        return None
    extent = (len(rows) - 1) * rows.strides[0] + rows.shape[1]
    first = _registered(rows.ctypes.data)
    last = _registered(rows.ctypes.data + extent - 1)
    if first is None or last is None or last - first != extent - 1:
        return None
    return first


def _registered(address: int) -> int | None:
    driver = _driver()
    if driver is None:
        return None
    kind = ctypes.c_uint(0)
    if (
        driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        or kind.value != _HOST_MEMORY
    ):
        return None
    there = ctypes.c_uint64(0)
    if driver.cuPointerGetAttribute(ctypes.byref(there), _DEVICE_POINTER, ctypes.c_uint64(address)):
        return None
    return there.value


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _pinned_half(blocks: int, block_bytes: int, run_blocks: int, copies: NewSegmentCopies) -> Half:
    staging = _pinned((blocks, block_bytes), torch.uint8)
    rows = staging.numpy()
    indexes = (_pinned((max(blocks, run_blocks),), torch.int64) for _ in range(2))
    return Half(rows, row_copies(copies, rows), staging.data_ptr(), *indexes)


def _blocks_first(paged: PagedTensor) -> torch.Tensor:
    """A tensor as [slots, …] in the order of a block, its elements as integers of their size, for not every dtype can
    be indexed.
    """
    tensor = paged.tensor
    assert isinstance(tensor, torch.Tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).permute(block_order(paged))


def _consecutive(at: torch.Tensor, rows: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of entries whose rows follow one another without a gap: torch copies others by a detour that
    does not wait.
    """
    if not rows.flags.c_contiguous:
        return [(entry, entry + 1) for entry in range(len(at))]
    breaks = (np.flatnonzero(np.diff(at.numpy()) != 1) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(at)], strict=True))


def _readable(rows: np.ndarray) -> torch.Tensor:
    """Rows as a tensor that is only read, also when nobody may write to them."""
    if rows.flags.writeable:
        return torch.from_numpy(rows)
    pointer = ctypes.cast(rows.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    flat = np.ctypeslib.as_array(pointer, shape=((len(rows) - 1) * rows.strides[0] + rows.shape[1],))
    return torch.from_numpy(np.lib.stride_tricks.as_strided(flat, rows.shape, rows.strides))
