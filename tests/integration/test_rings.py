"""Runs of blocks by rings, the native ones over a driver that stands in: bytes, waits, lanes, staging, captures, and a
device that is lost.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from kvbm._native import RowCopier, checksums
from kvbm.assembly import segment_copies
from kvbm.core.errors import ArgumentTypeError, ConfigError, LayoutError, PoolError
from kvbm.core.ids import Epoch, NamespaceId
from kvbm.pools.base import Proof
from kvbm.pools.hbm import rings
from kvbm.pools.hbm.device import DeviceTimeoutError, row_copies
from kvbm.pools.hbm.paged import SLOTS as DIMENSION
from kvbm.pools.hbm.paged import PagedTensor, PieceSegments
from kvbm.pools.hbm.rings import SHORT_BYTES, After, RingCopies, RingHalf, RingLane, ring_sizes
from tests.eventually import eventually
from tests.extras import needed
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
        self.segments = PieceSegments(*(np.array(column, dtype=np.int64) for column in columns))
        new, copies = cuda.rings(lot_bytes=3 * BLOCK_BYTES), segment_copies(RowCopier(1))

        def lane() -> RingLane:
            staging = [np.zeros((5, BLOCK_BYTES), dtype=np.uint8) for _ in range(2)]
            first, second = (RingHalf(rows, row_copies(copies, rows)) for rows in staging)
            return RingLane(new(*self.segments, SLOTS, 0, 1 << 20), (first, second))

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
    with pytest.raises(DeviceTimeoutError, match="no ring came free"):
        place.copies.gather(column(1), place.rows, column(1))
    cuda.set("held", 0)
    place.copies.scatter(column(20), place.rows, column(3))  # the other direction goes on
    assert not any(place.block(20))
    assert not place.rows.any()


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


torch = needed("torch", "engine")


class Event:
    """As torch's."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.cuda_event = Event.made


class Whole:
    """As torch's stream."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An order of 8 slots of a pool that is told of all that touches them, and events that were passed."""
    from kvbm.pools.hbm.cuda import EngineOrder

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Whole(77))
    made = EngineOrder(8, is_told=True, device=torch.device("cuda", 0))
    made.passed = set()  # type: ignore[attr-defined]
    ring = SimpleNamespace(has_passed=lambda handle: handle in made.passed)  # type: ignore[attr-defined]
    made.ring = ring  # type: ignore[assignment]
    return made


def test_a_run_waits_for_what_touched_its_slots_and_for_nothing_else(order: Any) -> None:
    one, two, three = Event(), Event(), Event()
    order.touched(column(0, 1), one)
    order.touched(column(2, 3), two)
    assert order.of(column(0))[:2] == ([one.cuda_event], [])
    assert order.of(column(1, 2))[:2] == ([one.cuda_event, two.cuda_event], [])
    assert order.of(column(5, 6))[:2] == ([], [])  # nobody has touched them
    order.touched(column(1, 2), three)  # a reader, of both
    assert order.of(column(1)).events == [one.cuda_event, three.cuda_event]
    assert order.of(column(2)).events == [two.cuda_event, three.cuda_event]
    assert order.of(column(0)).events == [one.cuda_event]
    everything = Event()
    order.after(everything)
    assert set(order.of(column(5)).events) == {everything.cuda_event}
    order.passed.add(everything.cuda_event)
    order.after(two)
    assert order.of(column(5)).events == [two.cuda_event]


def test_readers_of_a_block_are_all_waited_for_until_they_were_passed(order: Any) -> None:
    readers = [Event() for _ in range(50)]
    for reader in readers:
        order.touched(column(4), reader)
    assert order.of(column(4)).events == [reader.cuda_event for reader in readers]
    order.passed.update(reader.cuda_event for reader in readers[:49])
    last = Event()
    order.touched(column(4), last)
    assert order.of(column(4)).events == [readers[49].cuda_event, last.cuda_event]


def test_work_without_an_event_is_waited_for_with_its_whole_stream(order: Any) -> None:
    order.touched(column(3), Whole(77))
    assert order.of(column(3))[:2] == ([], [77])
    assert order.of(column(2))[:2] == ([], [])
    reader = Event()
    order.touched(column(3), reader)
    assert order.of(column(3))[:2] == ([reader.cuda_event], [77])


def test_slots_of_a_pool_that_is_told_nothing_may_have_been_touched_by_the_current_stream(order: Any) -> None:
    order._is_told = False
    one = Event()
    order.touched(column(3), one)
    assert order.of(column(3))[:2] == ([one.cuda_event], [])
    assert order.of(column(3, 4))[:2] == ([one.cuda_event], [77])


def test_works_that_no_slot_remembers_are_forgotten(order: Any) -> None:
    for turn in range(6000):
        event = Event()
        order.touched(column(1, 2) if turn % 2 else column(1), event)
        order.passed.add(event.cuda_event)
    assert len(order._touches) < 1200 and len(order._named) < 1200


# -- a whole pool, on a GPU that stands in ---------------------------------------------------------------------------


class Stream:
    """An engine's, as torch's."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.cuda_stream = cuda, cuda.stream()

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_event=self.cuda.event(self.cuda_stream), query=bool, wait=bool)


@pytest.fixture
def pool(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An HBM pool of 8 slots whose tensor's device is called a GPU, with rings over the driver that stands in."""
    from kvbm.pools.hbm import cuda as module
    from kvbm.pools.hbm import pool as pools

    monkeypatch.setattr(module, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0, synchronize=bool)
    )
    monkeypatch.setattr(
        torch.cuda, "default_stream", lambda device=None: SimpleNamespace(cuda_stream=0, record_event=bool)
    )
    monkeypatch.setattr(pools, "device_of", lambda layers: torch.device("cuda", 0))
    tensor = torch.arange(8 * 256).to(torch.uint8).reshape(8, 256)
    layers = [[PagedTensor(tensor, (DIMENSION, "bytes"))]]
    copies = segment_copies(RowCopier(1))
    gc.collect()
    return pools.HbmPool.of_layers(layers, checksums, copies, "ring", cuda.rings(), 1 << 20, is_told=True), tensor


def write(pool: Any, slot: int, value: int) -> None:
    rows = np.full((1, 256), value, dtype=np.uint8)
    proof = Proof(NamespaceId(bytes(16)), Epoch(1), bytes(16), np.zeros(1, dtype=np.uint32))
    pool.write([slot], rows, proof)


def test_an_event_that_is_recorded_again_after_it_was_given_is_waited_for_as_it_was(cuda: FakeCuda, pool: Any) -> None:
    made, tensor = pool
    reader, later = Stream(cuda), Stream(cuda)
    cuda.block(reader.cuda_stream)
    event = reader.record_event()
    made.touched([3], made.recorded(event))
    cuda.record(event.cuda_event, later.cuda_stream)  # there it is passed at once
    writing = threading.Thread(target=write, args=(made, 3, 9))
    writing.start()
    eventually(lambda: cuda.count("cuEventQuery") > 100, "nobody waits")
    assert set(tensor[3].tolist()) != {9}
    cuda.unblock()
    writing.join(LONG_S)
    assert set(tensor[3].tolist()) == {9}
    cuda.block(later.cuda_stream)  # nor is what comes later waited for
    cuda.record(event.cuda_event, later.cuda_stream)
    write(made, 3, 5)
    assert set(tensor[3].tolist()) == {5}
    made.close()


def test_a_stream_of_which_no_mark_can_be_had_is_waited_for_as_a_whole(cuda: FakeCuda, pool: Any) -> None:
    made, tensor = pool
    reader = Stream(cuda)
    cuda.block(reader.cuda_stream)
    cuda.refuse("cuEventCreate", -1, 2)
    made.touched([3], made.recorded(reader))
    cuda.refuse("cuEventCreate", 0, 0)
    writing = threading.Thread(target=write, args=(made, 3, 9))
    writing.start()
    eventually(lambda: cuda.count("cuEventQuery") > 100, "nobody waits")
    assert set(tensor[3].tolist()) != {9}
    cuda.unblock()
    writing.join(LONG_S)
    assert set(tensor[3].tolist()) == {9}
    made.close()


def test_streams_and_events_of_others_are_refused_and_one_never_recorded_is_nothing(pool: Any) -> None:
    made, _ = pool
    for other in (SimpleNamespace(query=bool, wait=bool), SimpleNamespace(record_event=bool), 7):
        with pytest.raises(ArgumentTypeError, match=r"torch\.cuda"):
            made.recorded(other)
    never = SimpleNamespace(cuda_event=0, query=bool, wait=bool)
    assert made.recorded(never) is None
    made.touched([3], made.recorded(never))
    assert made._order.of(column(3))[:2] == ([], [])
    made.close()


def test_a_closed_pool_has_given_all_back(cuda: FakeCuda, pool: Any) -> None:
    made, tensor = pool
    stream = Stream(cuda)
    opened = cuda.live()
    for slot in range(8):
        made.touched([slot], made.recorded(stream))
        made.touched([slot], made.recorded(None))
        write(made, slot, slot)
    assert tensor[:, 0].tolist() == list(range(8))
    assert cuda.live() <= opened + 16  # one for each that somebody may wait for
    made.close()
    gc.collect()
    assert cuda.live() < opened - 4 * 16  # four rings had sixteen events each for their parts alone


def test_a_device_lost_between_two_runs_is_said(cuda: FakeCuda) -> None:
    place = Place(cuda)
    place.copies.gather(column(1), place.rows, column(1))
    cuda.refuse("cuMemcpyHtoDAsync", -1, 226)  # CUDA_ERROR_CONTAINED
    with structlog.testing.capture_logs() as logs:
        with pytest.raises(RuntimeError, match=LOST):
            place.copies.gather(column(1), place.rows, column(1))
        with pytest.raises(PoolError, match=LOST):
            place.copies.scatter(column(1), place.rows, column(1))
    assert [line["event"] for line in logs] == ["hbm.lost"]


def test_a_run_that_is_refused_leaves_no_wait_behind(cuda: FakeCuda) -> None:
    place, engine, captured = Place(cuda), cuda.stream(), cuda.stream()
    cuda.block(engine)
    behind = cuda.event(engine)
    place.waits = lambda slots: After([behind], [captured])
    cuda.set("captured stream", captured)
    with pytest.raises(RuntimeError, match="captured into a graph"):
        place.copies.gather(column(1), place.rows, column(1))
    place.waits = lambda slots: After([], [])
    place.copies.gather(column(1), place.rows, column(2))
    assert place.rows[2].tobytes() == place.block(1)


def test_rows_whose_bytes_lie_apart_or_in_each_other_are_refused(cuda: FakeCuda) -> None:
    place = Place(cuda)
    ring = place.copies._gathers._lanes[0].ring
    wide = np.zeros((4, 2 * BLOCK_BYTES), dtype=np.uint8)
    within = np.lib.stride_tricks.as_strided(wide, (4, BLOCK_BYTES), (100, 1))
    for rows in (wide[:, ::2], within):
        for at in (None, np.arange(4)):
            with pytest.raises(LayoutError):
                ring.gather(np.arange(4), rows, at, [], [])


def test_a_lane_whose_gather_was_given_up_serves_again_once_the_device_has_confirmed_it(cuda: FakeCuda) -> None:
    place = Place(cuda, is_pinned=False, deadline_s=0.05, lanes=1)
    cuda.set("held", 1)
    with pytest.raises(DeviceTimeoutError, match="did not arrive"):
        place.copies.gather(np.arange(12), place.rows, np.arange(12))
    cuda.set("held", 0)
    cuda.set("steps", 1000)
    kept = place.block(1)
    place.copies.gather(column(1), place.rows, column(1))
    assert place.rows[1].tobytes() == kept


def test_a_ring_that_cannot_be_had_is_said_and_another_way_taken(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.pools.hbm import cuda as module
    from kvbm.pools.hbm.paged import paged_layout

    other = object()
    monkeypatch.setattr(module, "_moved_copies", lambda *given: other)
    monkeypatch.setattr(module, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
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
