"""Loads and stores of a GPU's queue, on a GPU that stands in: what waits for what, what goes beside what, and that
bytes are right in any order.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import structlog

from kvbm._native import checksums
from kvbm.assembly import last_touches
from kvbm.core.errors import ConfigError
from kvbm.engines.vllm.forwards import UNKNOWN, Forwards
from kvbm.pools.hbm import copy_queue, cuda, measuring
from kvbm.pools.hbm.batch import BatchMover
from kvbm.pools.hbm.copy_queue import ThreadedQueue
from kvbm.pools.hbm.paged import SLOTS, PagedLayout, PagedTensor, ReferenceCopies, SegmentCopies, paged_layout
from kvbm.pools.hbm.ways import UNMEASURED, Ways
from tests.eventually import eventually
from tests.extras import needed
from tests.gpu_stand_in import LOWEST, Gpu

torch = needed("torch", "engine")

BLOCKS, SEGMENTS, SEGMENT_BYTES, ROWS = 24, 3, 40, 32
LONG_S = 60.0
DEVICE = torch.device("cuda")
MEASURED_WAYS = cuda.measured_ways  # the tests' fixture has another in its place
# 0: runs are launched at once, and wait on the device.
READY = pytest.mark.parametrize("ready_s", [copy_queue._READY_S, 0.0])


def copies(addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int) -> SegmentCopies:
    return ReferenceCopies(addresses, strides, sizes, slots, checksums)


class Engine:
    """An engine's tensors, HOST's rows, and the queue between them."""

    def __init__(self, gpu: Gpu, new_copies: Callable[..., SegmentCopies] = copies, is_pinned: bool = True) -> None:
        self.gpu = gpu
        chance = np.random.default_rng(3)
        self.tensors = [
            torch.from_numpy(chance.integers(0, 256, (BLOCKS, SEGMENT_BYTES), dtype=np.uint8)) for _ in range(SEGMENTS)
        ]
        self.rows = chance.integers(0, 256, (ROWS, SEGMENTS * SEGMENT_BYTES), dtype=np.uint8)
        if is_pinned:
            gpu.registered[self.rows.ctypes.data] = self.rows.nbytes
        layers = [[PagedTensor(tensor, (SLOTS, "bytes"))] for tensor in self.tensors]
        self.layout = paged_layout(layers)
        self.queue: ThreadedQueue = cuda.open_queue(layers, self.layout, DEVICE, new_copies)
        assert gpu.launches  # each side has tried its way
        gpu.launches.clear()
        gpu.calls.clear()

    def block(self, block: int) -> bytes:
        return b"".join(tensor[block].numpy().tobytes() for tensor in self.tensors)

    def fill(self, block: int, byte: int) -> None:
        """What a forward does with a block it computes."""
        for tensor in self.tensors:
            tensor[block] = byte

    def forward(self, work: Callable[[], None]) -> None:
        """Launch on the engine's stream."""
        self.gpu.default.queue(work)

    def ended(self, count: int) -> dict[int, tuple[np.ndarray | None, str]]:
        """So many runs, once they are over."""
        found: dict[int, tuple[np.ndarray | None, str]] = {}

        def are_there() -> bool:
            found.update({id: (sums, why) for id, sums, _, why in self.queue.ended()})
            return len(found) >= count

        eventually(are_there, f"{count} runs are not over")
        return found


def at(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    made = Gpu().install(monkeypatch)
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    monkeypatch.setattr(cuda, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(cuda, "measured_ways", lambda device: Ways(1, 1))
    return made


@pytest.fixture
def engine(gpu: Gpu) -> Iterator[Engine]:
    made = Engine(gpu)
    yield made
    gpu.default.is_held = False
    made.queue.close()


def test_a_run_is_one_batch_straight_from_and_to_pinned_rows_on_a_stream_of_the_lowest_priority(engine: Engine) -> None:
    kept = [engine.block(5), engine.block(2)]
    engine.queue.gather(1, at(5, 2), engine.rows, at(9, 4))
    sums, why = engine.ended(1)[1]
    assert why == "" and sums is not None
    assert [engine.rows[9].tobytes(), engine.rows[4].tobytes()] == kept
    assert (sums == checksums(engine.rows[[9, 4]].copy())).all()
    engine.queue.scatter(2, at(1), engine.rows, at(4))
    assert engine.ended(1) == {2: (None, "")}
    assert engine.block(1) == kept[1]
    (stored, _), (loaded, _) = engine.gpu.launches
    assert [sizes for _, sizes in engine.gpu.launches] == [[SEGMENT_BYTES] * SEGMENTS * 2, [SEGMENT_BYTES] * SEGMENTS]
    assert stored is not loaded and stored is not engine.gpu.default and loaded is not engine.gpu.default
    assert (stored.priority, loaded.priority) == (LOWEST, LOWEST)
    assert engine.gpu.calls["cuMemcpyBatchAsync"] == 2


def test_rows_that_are_not_pinned_go_through_staging(gpu: Gpu) -> None:
    engine = Engine(gpu, is_pinned=False)
    kept = engine.block(5)
    engine.queue.gather(1, at(5), engine.rows, at(9))
    sums, _ = engine.ended(1)[1]
    assert engine.rows[9].tobytes() == kept
    assert sums is not None and (sums == checksums(engine.rows[[9]].copy())).all()
    engine.queue.scatter(2, at(1), engine.rows, at(9))
    engine.ended(1)
    assert engine.block(1) == kept
    engine.queue.close()


def test_a_driver_without_batches_gets_a_call_for_each_segment(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(cuMemcpyAsync=gpu.cuMemcpyAsync, cuPointerGetAttribute=gpu.cuPointerGetAttribute)
    monkeypatch.setattr(cuda, "_driver", lambda: older)
    engine = Engine(gpu)
    kept = engine.block(5)
    engine.queue.gather(1, at(5, 6), engine.rows, at(9, 8))
    engine.ended(1)
    assert engine.rows[9].tobytes() == kept
    assert gpu.calls["cuMemcpyAsync"] == 2 * SEGMENTS and not gpu.calls["cuMemcpyBatchAsync"]
    engine.queue.close()


def test_what_the_driver_refuses_ends_the_run_in_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.gpu, "cuMemcpyBatchAsync", lambda *arguments: 700)
    engine.queue.scatter(1, at(5), engine.rows, at(9))
    assert engine.ended(1) == {1: (None, "CUDA error: cuMemcpyBatchAsync answers 700")}
    monkeypatch.undo()


def sized(segment_bytes: int) -> tuple[list[list[PagedTensor]], PagedLayout]:
    layers = [[PagedTensor(torch.zeros((4, segment_bytes), dtype=torch.uint8), (SLOTS, "bytes"))] for _ in range(2)]
    return layers, paged_layout(layers)


def test_the_size_of_segments_decides_the_way_of_each_direction(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no Triton: what is not copy engines is torch
    ways = Ways(100, 1000)
    assert isinstance(cuda.mover_of("auto", *sized(99), DEVICE, ways), cuda.MemcpyMover)
    assert isinstance(cuda.mover_of("auto", *sized(1000), DEVICE, ways), BatchMover)
    split = cuda.mover_of("auto", *sized(100), DEVICE, ways)
    assert isinstance(split, cuda.SplitMover) and split.takes_memory
    movers = [move.__self__ for move in (split.gather, split.scatter)]  # type: ignore[attr-defined]
    assert [type(mover) for mover in movers] == [BatchMover, cuda.MemcpyMover]
    assert isinstance(cuda.mover_of("batch", *sized(1), DEVICE), BatchMover)
    assert isinstance(cuda.mover_of("torch", *sized(1000), DEVICE, ways), cuda.MemcpyMover)
    monkeypatch.setattr(gpu, "cuMemcpyBatchAsync", lambda *arguments: 801)
    with structlog.testing.capture_logs() as logs:
        assert isinstance(cuda.mover_of("auto", *sized(1000), DEVICE, ways), cuda.MemcpyMover)
    assert [(log["event"], log["why"]) for log in logs] == [
        ("hbm.engines_refused", "CUDA error: cuMemcpyBatchAsync answers 801")
    ]
    monkeypatch.setattr(cuda, "_driver", lambda: None)
    assert isinstance(cuda.mover_of("auto", *sized(1000), DEVICE, ways), cuda.MemcpyMover)
    with pytest.raises(ConfigError, match="needs CUDA's driver"):
        cuda.mover_of("batch", *sized(1), DEVICE)


def test_a_gpu_is_measured_at_the_first_start_and_not_at_the_next(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def rate(way: str, gathers: bool, segment_bytes: int) -> float:
        asked.append(way)
        return 2.0 if way == "batch" and segment_bytes > 1 << 20 else 1.0 if way == "kernel" else 0.5

    monkeypatch.setattr(cuda, "rate_on", lambda device, movers, pinned: rate)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert MEASURED_WAYS(DEVICE) == UNMEASURED and not asked  # without Triton there is nothing to compare
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    first = MEASURED_WAYS(DEVICE)
    assert (first.gather_bytes, first.scatter_bytes) == (4 << 20, 4 << 20)
    assert "a GPU that stands in" in first.of
    assert set(asked) == {"kernel", "batch"}
    asked.clear()
    assert MEASURED_WAYS(DEVICE) == first and not asked


def test_a_rate_is_measured_over_whole_runs_of_blocks(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_BYTES", 1 << 12)
    movers = {"batch": lambda layout: BatchMover(layout, DEVICE, gpu)}
    rate = measuring.rate_on(torch.device("cpu"), movers, lambda shape: torch.zeros(shape, dtype=torch.uint8))
    assert rate("batch", True, 256) > 0
    assert rate("batch", False, 1 << 20) > 0
    many, one = gpu.launches[0][1], gpu.launches[-1][1]
    assert many == [256] * 16  # four blocks of four segments
    assert one == [1 << 20] * 4  # at least one block
    assert len(gpu.launches) == 2 * (measuring._TIMES + 1)


@READY
def test_a_store_takes_what_the_forward_before_it_computes(
    engine: Engine, ready_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_queue, "_READY_S", ready_s)
    engine.gpu.default.is_held = True
    engine.forward(lambda: engine.fill(7, 0x5A))
    engine.queue.gather(1, at(7), engine.rows, at(3))
    assert not engine.queue.wait(0.05)
    engine.gpu.default.is_held = False
    engine.ended(1)
    assert engine.rows[3].tobytes() == bytes([0x5A]) * len(engine.rows[3])


def test_a_load_does_not_wait_for_a_forward_that_was_launched_after_its_mark(engine: Engine) -> None:
    before = engine.queue.mark()
    engine.gpu.run()
    engine.gpu.default.is_held = True
    engine.forward(lambda: engine.fill(7, 0x5A))
    engine.queue.scatter(1, at(2), engine.rows, at(3), before)
    engine.ended(1)  # the forward has not run
    assert engine.block(2) == engine.rows[3].tobytes()
    engine.queue.scatter(2, at(7), engine.rows, at(3))  # of now: the forward writes its block
    assert not engine.queue.wait(0.05)
    engine.gpu.default.is_held = False
    engine.ended(1)
    assert engine.block(7) == engine.rows[3].tobytes()


def test_a_load_never_stands_behind_a_store_nor_behind_a_load_that_has_to_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_queue, "_READY_S", 3600.0)
    before = engine.queue.mark()
    engine.gpu.run()
    engine.gpu.default.is_held = True
    engine.forward(lambda: engine.fill(7, 0x5A))
    engine.queue.gather(1, at(7), engine.rows, at(3))
    engine.queue.scatter(2, at(8), engine.rows, at(4))
    engine.queue.scatter(3, at(9), engine.rows, at(5), before)
    assert list(engine.ended(1)) == [3]
    assert engine.queue.under_way == 2
    engine.gpu.default.is_held = False
    assert sorted(engine.ended(2)) == [1, 2]


def test_a_store_that_the_device_does_not_finish_holds_up_no_load(engine: Engine) -> None:
    engine.queue.gather(1, at(7), engine.rows, at(3))
    engine.ended(1)
    ((stores, _),) = engine.gpu.launches
    stores.is_held = True
    engine.queue.gather(2, at(7), engine.rows, at(3))
    eventually(lambda: len(engine.gpu.launches) == 2, "the store was not launched")
    engine.queue.scatter(3, at(9), engine.rows, at(5))
    assert list(engine.ended(1)) == [3]
    stores.is_held = False
    assert list(engine.ended(1)) == [2]


def test_the_next_store_is_copied_while_checksums_are_computed(gpu: Gpu) -> None:
    may_sum = threading.Event()

    class Slow(ReferenceCopies):
        def checksums(self, slots: np.ndarray) -> np.ndarray:
            assert may_sum.wait(LONG_S)
            return super().checksums(slots)

    engine = Engine(gpu, lambda *segments: Slow(*segments, checksums))
    kept = engine.block(8)
    engine.queue.gather(1, at(7), engine.rows, at(3))
    engine.queue.gather(2, at(8), engine.rows, at(4))
    eventually(lambda: engine.rows[4].tobytes() == kept, "the second store waits for the first one's checksums")
    assert engine.queue.under_way == 2
    may_sum.set()
    assert sorted(engine.ended(2)) == [1, 2]
    engine.queue.close()


_NUMBERS = itertools.count()


class Request:
    """A request: its blocks, and what each holds once all that was launched has run.

    A block stays as it was computed.
    """

    def __init__(self, holds: dict[int, bytes], is_ready: bool) -> None:
        self.holds = holds
        self.is_ready = is_ready  # its loads are over
        self.is_new = True  # no step had it yet
        self.name = str(next(_NUMBERS))


class Simulation:
    """vLLM with asynchronous scheduling, as far as blocks go: a request's last forward is launched before anybody knows
    that it has ended.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.chance = engine, random.Random(seed)
        self.touches = last_touches(BLOCKS)
        self.forwards = Forwards(engine.queue.mark, engine.queue.is_passed)
        self.free = set(range(BLOCKS))
        self.requests: list[Request] = []
        self.loads: dict[int, tuple[Request, list[int]]] = {}  # run → whose, from which rows
        self.stores: dict[int, tuple[int, int, bytes]] = {}  # run → block, row, and what is to be in both
        self.wrong: list[str] = []
        self.runs = 0

    def step(self) -> None:
        load = self.plan_load() if self.chance.random() < 0.6 else None
        ready = [one for one in self.requests if one.is_ready]
        if self.chance.random() < 0.5:
            ready.append(Request({}, is_ready=True))
            self.requests.append(ready[-1])
        stores = [(block, one.holds[block]) for one in ready for block in one.holds if self.chance.random() < 0.2]
        taken = [(one.name, [self.compute(one)]) for one in ready]
        self.forwards.begin(self.touches.plan(taken))
        for one in ready:
            self.launch(dict(one.holds), one)
        if load is not None:
            self.begin_load(*load)
        for block, held in stores:
            self.begin_store(block, held)
        for _ in range(self.chance.randrange(8)):
            self.engine.gpu.step()
        while len(self.engine.gpu.default) > 24:  # vLLM is no more than a step ahead
            self.engine.gpu.step()
        if self.engine.queue.under_way > 2:
            self.engine.queue.wait(0.005)
        self.collect()
        for one in [one for one in ready if self.chance.random() < 0.3 or len(one.holds) > 4]:
            self.end(one)

    def compute(self, request: Request) -> list[int]:
        """Give a request a block that this step computes, if there is one; the blocks that its last step did
        not have.
        """
        taken = list(request.holds) if request.is_new else []
        request.is_new = False
        if self.free:
            block = self.take()
            request.holds[block] = bytes([self.chance.randrange(256)]) * (SEGMENTS * SEGMENT_BYTES)
            taken.append(block)
            self.engine.forward(lambda: self.engine.fill(block, request.holds[block][0]))
        return taken

    def launch(self, holds: dict[int, bytes], request: Request) -> None:
        def attend() -> None:
            self.wrong += [f"block {b} is not what its request has" for b in holds if self.engine.block(b) != holds[b]]

        self.engine.forward(attend)

    def plan_load(self) -> tuple[Request, list[int], list[int], int] | None:
        rows = self.quiet_rows()
        if len(self.free) < 2 or len(rows) < 2:
            return None
        blocks, rows = [self.take(), self.take()], self.chance.sample(rows, 2)
        holds = {block: self.engine.rows[row].tobytes() for block, row in zip(blocks, rows, strict=True)}
        request = Request(holds, is_ready=False)
        self.requests.append(request)
        return request, blocks, rows, self.touches.of(blocks)

    def begin_load(self, request: Request, blocks: list[int], rows: list[int], after: int) -> None:
        self.runs += 1
        self.loads[self.runs] = request, rows
        mark = self.forwards.behind(after)
        self.engine.queue.scatter(self.runs, at(*blocks), self.engine.rows, at(*rows), mark)

    def begin_store(self, block: int, held: bytes) -> None:
        if rows := self.quiet_rows():
            self.runs += 1
            self.stores[self.runs] = block, rows[0], held
            self.engine.queue.gather(self.runs, at(block), self.engine.rows, at(rows[0]), self.forwards.behind(UNKNOWN))

    def collect(self) -> None:
        for id, _, _, why in self.engine.queue.ended():
            assert why == ""
            if id in self.loads:
                request, _ = self.loads.pop(id)
                request.is_ready = True
                holds = request.holds
                self.wrong += [f"block {b} was not loaded" for b in holds if self.engine.block(b) != holds[b]]
                continue
            block, row, held = self.stores.pop(id)
            if self.engine.rows[row].tobytes() != held:
                self.wrong.append(f"row {row} is not what block {block} had")
            if not self.is_kept(block) and all(block not in one.holds for one in self.requests):
                self.free.add(block)

    def end(self, request: Request) -> None:
        """A request is over, or preempted: what its blocks held is gone either way."""
        self.requests.remove(request)
        self.touches.leave(request.name)
        self.free |= {block for block in request.holds if not self.is_kept(block)}

    def is_kept(self, block: int) -> bool:
        """Whether a store keeps a block from reuse."""
        return any(block == stored for stored, _, _ in self.stores.values())

    def quiet_rows(self) -> list[int]:
        """Rows that nothing fills or reads."""
        busy = {row for _, row, _ in self.stores.values()} | {row for _, rows in self.loads.values() for row in rows}
        quiet = sorted(set(range(ROWS)) - busy)
        self.chance.shuffle(quiet)
        return quiet

    def take(self) -> int:
        block = self.chance.choice(sorted(self.free))
        self.free.remove(block)
        return block


@READY
@pytest.mark.parametrize("seed", range(10))
def test_bytes_are_right_whatever_the_device_runs_first(
    gpu: Gpu, seed: int, ready_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_queue, "_READY_S", ready_s)
    gpu._chance.seed(seed)
    engine = Engine(gpu)
    simulation = Simulation(engine, seed)

    def has_run_enough() -> bool:
        simulation.step()
        assert simulation.wrong == []
        return simulation.runs > 50

    for _ in range(150):
        has_run_enough()
    eventually(has_run_enough, "too few loads and stores begin", state=lambda: simulation.runs)
    assert engine.queue.wait(LONG_S)
    gpu.run()
    simulation.collect()
    assert simulation.wrong == []
    engine.queue.close()
