"""HBM ↔ HOST: runs of a prompt's blocks by each way of kvbm's pool, beside contiguous copies and what vLLM queues for
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch

from gpu_parts.devices import Batch, Device
from gpu_parts.part import Steps
from gpu_parts.report import ONE_COPY, SWAP, CopyRow, Measured, measured
from gpu_parts.shapes import Shape
from kvbm.assembly import NATIVE, NATIVE_ARENA, RowCopier, device_rings, segment_copies
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.hbm.cuda import WAYS
from kvbm.pools.hbm.paged import SLOTS, PagedTensor, PieceSegments, paged_layout
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.pool import HostPool

OUT, IN = "HBM to HOST", "HOST to HBM"
_OURS = "kvbm "
_NAMESPACE = NamespaceId(bytes(16))
_WAIT_S = 30.0
_SPOILED = 512  # bytes from one that is changed to the next; to change all of a large run takes seconds


class CopyPlan(NamedTuple):
    """How much is copied.

    Attributes:
        run_tokens: of the prompt whose blocks are a run.
        samples: of each way and direction, after one that warms up.
        product: width of the square matrices that are multiplied meanwhile. products: of one sample.
    """

    run_tokens: int = 8192
    samples: int = 5
    product: int = 8192
    products: int = 20


SMALL = CopyPlan(run_tokens=128, samples=2, product=64, products=20)


class Region:
    """Tensors whose slots move together, a HOST pool for them, and the slots and rows of one run."""

    def __init__(
        self, layers: Sequence[Sequence[PagedTensor]], run: int, device: Device, copier: RowCopier, opened: ExitStack
    ) -> None:
        layout = paged_layout(layers)
        self.layers = layers
        self.segments: PieceSegments = layout.segments
        self.run = run
        self.block_bytes = layout.block_bytes
        self._opened = opened
        self._copier = copier
        self._pools: dict[str, HbmPool] = {}
        self.host = HostPool(2 * run, layout.block_bytes, NATIVE_ARENA, copier)
        opened.callback(self.host.close)
        memory = self.host.memory
        assert memory is not None
        self.rows = memory
        random = np.random.default_rng(7)
        slots = random.permutation(layout.slots)
        self.slots: list[int] = slots[:run].tolist()
        self.others: list[int] = slots[run : 2 * run].tolist()  # where a run is written when it is looked at
        self.at: list[int] = random.permutation(2 * run)[:run].tolist()
        self.proof = Proof(_NAMESPACE, Epoch(1), bytes(run * HASH_BYTES), np.zeros(run, dtype=np.uint32))

    def pool(self, way: str) -> HbmPool:
        """The tensors as a pool that copies this way. Raises ConfigError: it cannot be had."""
        if way not in self._pools:
            rings = device_rings(self._copier) if way in ("auto", "ring") else None
            pool = HbmPool.of_layers(self.layers, NATIVE.checksums, segment_copies(self._copier), way, rings)
            self._opened.callback(pool.close)
            self._pools[way] = pool
        return self._pools[way]

    def out(self, way: str) -> None:
        """The run into its rows."""
        result = self.pool(way).read(self.slots, _NAMESPACE, self.proof.hashes, self.rows, self.at)
        if set(result.outcomes) != {ReadOutcome.GOOD}:
            raise RuntimeError(f"{way}: blocks were not read, {set(result.outcomes)}")

    def into(self, way: str, others: bool = False) -> None:
        """The rows into the run's slots, or into others."""
        self.pool(way).write(self.others if others else self.slots, self.rows, self.proof, self.at)

    def batch(self, to_device: bool, others: bool = False) -> Batch:
        """A copy for each piece of each block, as an engine queues them."""
        addresses, strides, sizes = self.segments
        slots = np.array(self.others if others else self.slots, dtype=np.int64)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        there = (addresses[None, :] + slots[:, None] * strides[None, :]).ravel()
        rows = self.rows.ctypes.data + np.array(self.at, dtype=np.int64) * self.rows.strides[0]
        here = (rows[:, None] + begins[None, :]).ravel()
        targets, sources = (there, here) if to_device else (here, there)
        each = np.tile(sizes, self.run)
        return Batch(*(np.ascontiguousarray(column, dtype=np.uint64) for column in (targets, sources, each)))

    def differing(self) -> int:
        """Tensors in which the run's other slots do not hold what its slots do."""
        count = 0
        for paged in (paged for layer in self.layers for paged in layer):
            tensor = paged.tensor
            assert isinstance(tensor, torch.Tensor)
            first, second = (torch.tensor(slots, device=tensor.device) for slots in (self.slots, self.others))
            whole = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
            count += not torch.equal(whole.index_select(0, first), whole.index_select(0, second))
        return count

    def spoil(self) -> None:
        """Other bytes in the rows, some in each piece, and in the other slots: so a copy that does nothing is seen."""
        self.rows[self.at, ::_SPOILED] ^= 0xFF
        for paged in (paged for layer in self.layers for paged in layer):
            tensor = paged.tensor
            assert isinstance(tensor, torch.Tensor)
            tensor[torch.tensor(self.others, device=tensor.device)] = 0


class Moves:
    """A shape's tensors on the device, and ways to move a run of them."""

    def __init__(self, shape: Shape, device: Device, plan: CopyPlan, opened: ExitStack) -> None:
        self.shape, self.device, self.plan = shape, device, plan
        copier = RowCopier(0)
        run = shape.blocks(plan.run_tokens)
        self.regions = [Region(kv_tensors(shape, 2 * run, device), run, device, copier, opened)]
        if shape.state_layers:
            self.regions.append(Region(_states(shape, 2, device), 1, device, copier, opened))
        self.run_bytes = sum(region.run * region.block_bytes for region in self.regions)
        self.pieces = sum(region.run * len(region.segments.sizes) for region in self.regions)
        self.link = device.link()
        self.pinned = all(region.host.pinned for region in self.regions)
        self.notices = [region.host.notice for region in self.regions if region.host.notice]

    def ways(self) -> list[str]:
        """All that copy blocks where they lie."""
        return [SWAP, *(f"{_OURS}{way}" for way in WAYS)]

    def move(self, way: str, direction: str) -> Callable[[], None]:
        """A run by this way: queued on the current stream, or by our pool's call, which returns when it is over."""
        if way == ONE_COPY:
            return self._one_copy(direction)
        if way == SWAP:
            return self._swap(direction)
        ours = way.removeprefix(_OURS)

        def move() -> None:
            for region in self.regions:
                if direction == OUT:
                    region.out(ours)
                else:
                    region.into(ours)

        return move

    def _swap(self, direction: str) -> Callable[[], None]:
        """As vLLM's `swap_blocks_batch`: one call of the driver with a copy for each piece."""
        batches = [region.batch(direction == IN) for region in self.regions]

        def move() -> None:
            for batch in batches:
                self.device.batch(batch, direction == IN)

        return move

    def _one_copy(self, direction: str) -> Callable[[], None]:
        """As many contiguous bytes to or from HOST's memory, in one copy for each region."""
        pairs = []
        for region in self.regions:
            size = region.run * region.block_bytes
            here = torch.from_numpy(region.rows.reshape(-1)[:size])
            pairs.append((torch.empty(size, dtype=torch.uint8, device=self.device.torch_device), here))

        def move() -> None:
            for there, here in pairs:
                target, source = (here, there) if direction == OUT else (there, here)
                target.copy_(source, non_blocking=True)

        return move

    def check(self, way: str) -> None:
        """Out by this way, into other slots by it, and compared there. Raises RuntimeError: bytes differ."""
        for region in self.regions:
            region.spoil()
            self.device.settle()
            if way == SWAP:
                with self.device.beside():
                    self.device.batch(region.batch(False), False)
                    self.device.settle()
                    self.device.batch(region.batch(True, others=True), True)
            else:
                region.out(way.removeprefix(_OURS))
                region.into(way.removeprefix(_OURS), others=True)
            self.device.settle()
            if differing := region.differing():
                raise RuntimeError(f"{way}: {differing} tensors came back with other bytes")


def rates(device: Device, moves: Moves, steps: Steps) -> None:
    """A row for each way and direction, into the part's findings: the ways whose bytes are right, one after the other
    in turn.
    """
    ways = [way for way in moves.ways() if steps.step(f"{way}: bytes compared", _bound(moves.check, way))]
    for direction in (OUT, IN):
        steps.step(f"{direction}: rates", _bound(_rates, device, moves, direction, ways, steps))


def costs(device: Device, plan: CopyPlan, moves: Moves, steps: Steps) -> None:
    """What each row's way costs the device: what it slows down, and what it occupies."""
    for row in steps.found.copies:
        steps.step(f"{row.direction}, {row.way}: matrix products", _bound(_slowdown, device, plan, moves, row))
        steps.step(f"{row.direction}, {row.way}: profile", _bound(_profile, device, moves, row))


def _rates(device: Device, moves: Moves, direction: str, ways: Sequence[str], steps: Steps) -> None:
    """The first turn is the warm-up."""
    runs = {way: moves.move(way, direction) for way in [ONE_COPY, *ways]}
    samples: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(moves.plan.samples + 1):
        for way, move in runs.items():
            took_s = _took_s(device, way, move)
            if turn:
                samples[way].append(moves.run_bytes / took_s / 1e9)
    whole = measured(samples[ONE_COPY]).value
    for way, values in samples.items():
        rate = measured(values)
        row = CopyRow(
            shape=moves.shape.name,
            direction=direction,
            way=way,
            run_bytes=moves.run_bytes,
            pieces=len(moves.regions) if way == ONE_COPY else moves.pieces,
            gb_per_s=rate,
            on_device_gb_per_s=None,
            of_one_copy=rate.value / whole,
            of_link=None if moves.link.gb_per_s is None else rate.value / moves.link.gb_per_s,
            sms=None,
            product_slowdown=None,
        )
        steps.found.copies.append(row)


def _took_s(device: Device, way: str, move: Callable[[], None]) -> float:
    """Of what is queued the device's time; of our pool's calls, which return when all is over, the caller's."""
    device.settle()
    if way in (ONE_COPY, SWAP):
        with device.beside():
            return device.timed(move)
    begin = time.perf_counter()
    move()
    return time.perf_counter() - begin


def _slowdown(device: Device, plan: CopyPlan, moves: Moves, row: CopyRow) -> None:
    row.product_slowdown = slowdown(device, plan, moves.move(row.way, row.direction))


def _profile(device: Device, moves: Moves, row: CopyRow) -> None:
    move = moves.move(row.way, row.direction)
    with device.beside():
        profile = device.profile(move)
    if profile is not None:
        row.sms = profile.sms
        row.on_device_gb_per_s = moves.run_bytes / profile.busy_s / 1e9 if profile.busy_s else None


def slowdown(device: Device, plan: CopyPlan, move: Callable[[], None]) -> Measured:
    """Time of matrix products while `move` is done again and again in another thread, over their time alone, in
    turn.
    """
    shape = (plan.product, plan.product)
    left, right = (torch.randn(shape, device=device.torch_device, dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    device.settle()  # they were made on another stream

    def multiply() -> None:
        for _ in range(plan.products):
            torch.mm(left, right, out=result)

    ratios = []
    with device.beside():
        device.timed(multiply)
        for _ in range(plan.samples):
            alone_s = device.timed(multiply)
            with _Again(device, move):
                ratios.append(device.timed(multiply) / alone_s)
            device.settle()
    return measured(ratios)


class _Again:
    """A thread that moves one run after the other, from when the first is over until it is left."""

    def __init__(self, device: Device, move: Callable[[], None]) -> None:
        self._device, self._move = device, move
        self._moving, self._stop = threading.Event(), threading.Event()
        self._why: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="gpu-check-moves", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self._moving.wait(_WAIT_S)

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(_WAIT_S)
        if self._why is not None:
            raise self._why
        if self._thread.is_alive():
            raise RuntimeError(f"a run has not ended within {_WAIT_S:g} s")

    def _work(self) -> None:
        try:
            with self._device.beside(1):
                while not self._stop.is_set():
                    self._device.timed(self._move)  # waits for this stream alone
                    self._moving.set()
        except Exception as error:  # noqa: BLE001  it is raised where the thread is waited for
            self._why = error
        finally:
            self._moving.set()


def _bound(work: Callable[..., object], *given: object) -> Callable[[], object]:
    return lambda: work(*given)


def kv_tensors(shape: Shape, slots: int, device: Device) -> list[list[PagedTensor]]:
    """One tensor a layer, as vLLM lays them out, of random bytes."""
    if shape.parts == 1:
        dims: tuple[str, ...] = (SLOTS, "tokens", "dim")
        sizes: tuple[int, ...] = (slots, shape.block_tokens, shape.kv_heads * shape.dim)
    else:
        dims = (SLOTS, "kv", "tokens", "heads", "dim")
        sizes = (slots, shape.parts, shape.block_tokens, shape.kv_heads, shape.dim)
    layers = []
    for _ in range(shape.kv_layers):
        bits = torch.randint(-(1 << 15), 1 << 15, sizes, dtype=torch.int16, device=device.torch_device)
        layers.append([PagedTensor(bits.view(torch.bfloat16), dims)])
    return layers


def _states(shape: Shape, slots: int, device: Device) -> list[list[PagedTensor]]:
    """One tensor a recurrent layer; a slot holds the state at one boundary."""
    return [
        [
            PagedTensor(
                torch.randint(0, 256, (slots, shape.state_bytes), dtype=torch.uint8, device=device.torch_device),
                (SLOTS, "bytes"),
            )
        ]
        for _ in range(shape.state_layers)
    ]
