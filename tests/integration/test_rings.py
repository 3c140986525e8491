"""Runs of blocks by rings, the native ones over a driver that stands in: bytes, waits, lanes, staging, captures, and a device that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from kvbm._native import RowCopier, checksums
from kvbm.assembly import segment_copies
from kvbm.core.errors import ConfigError, LayoutError, PoolError
from kvbm.pools.hbm import rings
from kvbm.pools.hbm.device import DeviceTimeoutError, row_copies
from kvbm.pools.hbm.paged import Segments
from kvbm.pools.hbm.rings import SHORT_BYTES, After, Half, Lane, RingCopies, ring_sizes
from tests.eventually import eventually
from tests.fake_cuda import FakeCuda

SLOTS, ROWS, LONG_S = 64, 48, 60.0
SIZES = (4096, 1024, 8192)  # of a block's segments
BLOCK_BYTES = sum(SIZES)
LOST = "the GPU is lost"


@pytest.fixture(scope="module")
def driver() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def cuda(driver: FakeCuda) -> FakeCuda:
    driver.reset()
    return driver


class Place:
    """An engine's tensors, a pool's rows, and copies between them."""

    def __init__(self, cuda: FakeCuda, is_pinned: bool = True, deadline_s: float = LONG_S, lanes: int = 2) -> None:
        self.cuda = cuda
        chance = np.random.default_rng(5)
        self.tensors = [chance.integers(0, 256, (SLOTS, size), dtype=np.uint8) for size in SIZES]
        self.rows = np.zeros((ROWS, BLOCK_BYTES), dtype=np.uint8)
        if is_pinned:
            cuda.pin(self.rows)
        self.waits: Callable[[np.ndarray], After] = lambda slots: After([], [])
        columns = ([tensor.ctypes.data for tensor in self.tensors], SIZES, SIZES)
        self.segments = Segments(*(np.array(column, dtype=np.int64) for column in columns))
        new, copies = cuda.rings(lot_bytes=3 * BLOCK_BYTES), segment_copies(RowCopier(1))

        def lane() -> Lane:
            staging = [np.zeros((5, BLOCK_BYTES), dtype=np.uint8) for _ in range(2)]
            first, second = (Half(rows, row_copies(copies, rows)) for rows in staging)
            return Lane(new(*self.segments, SLOTS, 0, 1 << 20), (first, second))

        both = [lane() for _ in range(2 * lanes)]
        self.copies = RingCopies(both[:lanes], both[lanes:], lambda slots: self.waits(slots), copies, deadline_s)

    def block(self, slot: int) -> bytes:
        return b"".join(tensor[slot].tobytes() for tensor in self.tensors)


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("count", [1, 4, 5, 6, 23])
def test_blocks_go_out_and_come_back(cuda: FakeCuda, is_pinned: bool, count: int) -> None:
    place, chance = Place(cuda, is_pinned), np.random.default_rng(count)
    slots, at = chance.permutation(SLOTS), chance.permutation(ROWS)[:count]
    out, into = slots[:count], slots[-count:]
    kept = [place.block(slot) for slot in out]
    sums = place.copies.gather(out, place.rows, at)
    assert [place.rows[row].tobytes() for row in at] == kept
    assert (sums == checksums(place.rows[at])).all()
    for tensor in place.tensors:
        tensor[into] = 0
    place.copies.scatter(into, place.rows, at)
    assert [place.block(slot) for slot in into] == kept
    again = place.copies.gather(into, place.rows, None)  # into the first rows
    assert [row.tobytes() for row in place.rows[:count]] == kept and (again == sums).all()
    assert not len(place.copies.gather(column(), place.rows, None))
    place.copies.scatter(column(), place.rows, None)
    place.copies.close()
    with pytest.raises(PoolError, match="closed"):
        place.copies.scatter(into, place.rows, at)


def test_what_is_not_there_is_refused_and_the_next_run_goes_well(cuda: FakeCuda) -> None:
    place = Place(cuda)
    for wrong in (column(SLOTS), column(-1)):
        with pytest.raises(LayoutError):
            place.copies.gather(wrong, place.rows, column(0))
    with pytest.raises(LayoutError):
        place.copies.scatter(column(1), place.rows, column(ROWS))
    place.copies.gather(column(1), place.rows, column(2))
    assert place.rows[2].tobytes() == place.block(1)


def test_a_short_run_does_not_wait_for_a_long_one(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SHORT_BYTES", 2 * BLOCK_BYTES)
    place, engine = Place(cuda), cuda.stream()
    cuda.block(engine)
    behind = cuda.event(engine)
    place.waits = lambda slots: After([behind] if len(slots) > 2 else [], [])
    long_run = threading.Thread(target=place.copies.scatter, args=(np.arange(20), place.rows, np.arange(20)))
    long_run.start()
    eventually(lambda: cuda.count("cuMemcpyHtoDAsync") > 4, "the long run has not begun")
    place.rows[40] = 7
    place.copies.scatter(column(30), place.rows, column(40))
    assert set(place.block(30)) == {7}
    assert long_run.is_alive()
    cuda.unblock()
    long_run.join(LONG_S)
    assert not long_run.is_alive()
    assert sum(ring_sizes(1 << 20)) == 1 << 20 and SHORT_BYTES > 0


def test_a_device_that_does_not_answer_keeps_rows_and_slots_and_takes_no_other_run(cuda: FakeCuda) -> None:
    place, ended = Place(cuda, deadline_s=0.05), threading.Event()
    cuda.set("held", 1)

    def run() -> None:
        place.copies.gather(np.arange(9), place.rows, np.arange(9))
        ended.set()

    with structlog.testing.capture_logs() as logs:
        runs = threading.Thread(target=run)
        runs.start()
        eventually(lambda: any(line["event"] == "hbm.copy_held" for line in logs), "nobody says it")
        with pytest.raises(DeviceTimeoutError, match="has not confirmed 1 earlier copies"):
            place.copies.scatter(column(20), place.rows, column(20))
        assert not ended.is_set()
        cuda.set("held", 0)
        assert ended.wait(LONG_S)
    runs.join(LONG_S)
    assert place.rows[8].tobytes() == place.block(8)
    place.copies.scatter(column(20), place.rows, column(8))
    assert place.block(20) == place.block(8)


def test_a_gather_into_staging_gives_up_and_what_comes_late_reaches_nobody(cuda: FakeCuda) -> None:
    place = Place(cuda, is_pinned=False, deadline_s=0.05, lanes=1)
    cuda.set("held", 1)
    with pytest.raises(DeviceTimeoutError, match="did not arrive"):
        place.copies.gather(np.arange(12), place.rows, np.arange(12))
    cuda.set("held", 0)
    with pytest.raises(DeviceTimeoutError, match="no ring came free"):
        place.copies.gather(column(1), place.rows, column(1))
    assert not place.rows.any()
    place.copies.scatter(column(20), place.rows, column(3))  # the other direction goes on
    assert not any(place.block(20))


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_graph_that_is_captured_meanwhile_is_not_ended_nor_are_copies(cuda: FakeCuda, is_pinned: bool) -> None:
    place = Place(cuda, is_pinned)
    engine = cuda.stream()
    behind = cuda.event(engine)
    place.waits = lambda slots: After([behind], [])
    cuda.set("capturing", 1)
    kept = place.block(3)
    place.copies.gather(np.arange(20), place.rows, np.arange(20))
    place.copies.scatter(column(40), place.rows, column(3))
    assert place.block(40) == kept
    assert cuda.count("cuEventQuery") and cuda.count("broken captures") == 0


def copy_until_it_fails(place: Place) -> None:
    for _ in range(10):
        place.copies.gather(np.arange(20), place.rows, np.arange(20))


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("steps", range(0, 30, 3))
def test_a_lost_device_is_said_once_and_nothing_waits_for_it(cuda: FakeCuda, is_pinned: bool, steps: int) -> None:
    place = Place(cuda, is_pinned)
    cuda.set("die_after", steps)
    with structlog.testing.capture_logs() as logs:
        with pytest.raises(RuntimeError, match=LOST):
            copy_until_it_fails(place)
        for _ in range(3):
            with pytest.raises(PoolError, match=LOST):
                place.copies.scatter(column(1), place.rows, column(1))
        place.copies.close()
    assert [line["event"] for line in logs] == ["hbm.lost"]


class Stop(BaseException):
    """A signal's handler's."""


@pytest.mark.parametrize("is_pinned", [True, False])
def test_an_exception_amid_a_run_is_raised_once_the_device_has_confirmed_it(
    cuda: FakeCuda, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(cuda, is_pinned)
    whole = RingCopies._end
    calls = iter([True, False])

    def end(self: RingCopies, ring: Any) -> None:
        if next(calls, False):
            raise Stop
        whole(self, ring)

    monkeypatch.setattr(RingCopies, "_end", end)
    place.rows[7] = 9
    with pytest.raises(Stop):
        place.copies.scatter(column(1), place.rows, column(7))
    assert set(place.block(1)) == {9}  # it was over before anybody could get the slot
    place.copies.scatter(column(2), place.rows, column(7))
    assert set(place.block(2)) == {9}


# -- what a run waits for --------------------------------------------------------------------------------------------


torch = pytest.importorskip("torch")


class Event:
    """As torch's."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.cuda_event = Event.made


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An order of 8 slots of a pool that is told of all that touches them, and events that were passed."""
    from kvbm.pools.hbm.cuda import EngineOrder

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    made = EngineOrder(8, is_told=True, device=torch.device("cuda", 0))
    made.passed = set()  # type: ignore[attr-defined]
    made.has_passed = lambda event: event in made.passed  # type: ignore[attr-defined]
    return made


def test_a_run_waits_for_what_last_touched_its_slots_and_for_nothing_else(order: Any) -> None:
    one, two, three = Event(), Event(), Event()
    order.touched(column(0, 1), one, True)
    order.touched(column(2, 3), two, True)
    assert order.of(column(0))[:2] == ([one.cuda_event], [])
    assert order.of(column(1, 2))[:2] == ([one.cuda_event, two.cuda_event], [])
    assert order.of(column(5, 6))[:2] == ([], [])  # nobody has touched them
    order.touched(column(1, 2), three, False)  # a reader, of both
    assert set(order.of(column(1)).events) == {one.cuda_event, three.cuda_event}
    assert order.of(column(0)).events == [one.cuda_event]
    order.touched(column(1), two, True)  # a new block, written behind all that the engine has ordered itself
    assert order.of(column(1)).events == [two.cuda_event]
    everything = Event()
    order.after(everything)
    assert set(order.of(column(5)).events) == {everything.cuda_event}
    order.passed.add(everything)
    order.after(two)
    assert order.of(column(5)).events == [two.cuda_event]


def test_readers_of_a_block_are_all_waited_for_until_they_were_passed(order: Any) -> None:
    readers = [Event() for _ in range(50)]
    for reader in readers:
        order.touched(column(4), reader, False)
    assert order.of(column(4)).events == [reader.cuda_event for reader in readers]
    order.passed.update(readers[:49])
    last = Event()
    order.touched(column(4), last, False)
    assert order.of(column(4)).events == [readers[49].cuda_event, last.cuda_event]


def test_work_without_an_event_may_be_on_the_default_stream(order: Any) -> None:
    order.touched(column(3), None, True)
    assert order.of(column(3))[:2] == ([], [77])
    assert order.of(column(2))[:2] == ([], [])
    reader = Event()
    order.touched(column(3), reader, False)
    assert order.of(column(3))[:2] == ([reader.cuda_event], [77])


def test_slots_of_a_pool_that_is_told_nothing_may_have_been_touched_by_the_current_stream(order: Any) -> None:
    order._is_told = False
    one = Event()
    order.touched(column(3), one, True)
    assert order.of(column(3))[:2] == ([one.cuda_event], [])
    assert order.of(column(3, 4))[:2] == ([one.cuda_event], [77])


def test_works_that_no_slot_remembers_are_forgotten(order: Any) -> None:
    for _ in range(5000):
        order.touched(column(1, 2), Event(), True)
    order.passed.update(order._events)
    for _ in range(1100):
        order.touched(column(1), Event(), True)
    assert len(order._works) < 1200 and len(order._events) < 1200


def test_a_ring_that_cannot_be_had_is_said_and_another_way_taken(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.pools.hbm import cuda as module
    from kvbm.pools.hbm.paged import SLOTS as DIMENSION
    from kvbm.pools.hbm.paged import PagedTensor, paged_layout

    other = object()
    monkeypatch.setattr(module, "_moved_copies", lambda *given: other)
    monkeypatch.setattr(module, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(module, "_outlived", lambda staging: staging)
    layers = [[PagedTensor(torch.zeros((4, 256), dtype=torch.uint8), (DIMENSION, "bytes"))]]
    named = layers, paged_layout(layers), torch.device("cuda", 0), module.EngineOrder(4), segment_copies(RowCopier(1))
    assert isinstance(module.open_copies(*named, "auto", cuda.rings()), RingCopies)
    assert module.open_copies(*named, "auto") is other
    with pytest.raises(ConfigError, match="native rings"):
        module.open_copies(*named, "ring")
    cuda.set("memory", 1 << 20)
    with structlog.testing.capture_logs() as logs:
        assert module.open_copies(*named, "auto", cuda.rings()) is other
    assert [line["event"] for line in logs] == ["hbm.ring_refused"] and "OUT_OF_MEMORY" in logs[0]["why"]
    with pytest.raises(ConfigError, match="OUT_OF_MEMORY"):
        module.open_copies(*named, "ring", cuda.rings())


def test_the_kernel_that_is_shipped_is_that_of_the_source() -> None:
    import importlib.util
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("ring_kernel", root / "tools" / "ring_kernel.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.digest() in tool.MADE.read_text().splitlines()[0], "run tools/ring_kernel.py"
