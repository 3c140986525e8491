"""Copies on a device's queue, on a device that does what the test says: late, never, in failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvbm._native import checksums
from kvbm.core.errors import PoolError
from kvbm.pools.hbm.device import DeviceCopies, DeviceTimeoutError, Half, Lane, row_copies
from kvbm.pools.hbm.paged import ReferenceCopies, SegmentCopies
from tests.eventually import eventually
from tests.extras import needed

torch = needed("torch", "engine")

SLOTS, BLOCK_BYTES, STAGED_BLOCKS = 40, 24, 4
LONG_S, SHORT_S = 60.0, 0.05  # deadlines of a device that answers, and of one that does not


def copies(addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int) -> SegmentCopies:
    return ReferenceCopies(addresses, strides, sizes, slots, checksums)


class Device:
    """Work waits in its queue until the device is running; what has run is passed."""

    def __init__(self) -> None:
        self.slots = np.random.default_rng(1).integers(0, 256, (SLOTS, BLOCK_BYTES), dtype=np.uint8)
        self.running = True
        self.failing = False
        self.launched: list[int] = []  # blocks of each launch
        self.waiting: list[tuple[Callable[[], None], Done]] = []
        self.most_waiting = 0

    def begin(self) -> None:
        """Nothing of an engine's to wait for."""

    def run(self, work: Callable[[], None]) -> Done:
        done = Done(self)
        work()
        self.waiting.append((lambda: None, done))
        self.step()
        return done

    def queue(self, work: Callable[[], None]) -> None:
        self.waiting.append((work, Done(self)))

    def step(self) -> None:
        if self.running:
            for work, done in self.waiting:
                work()
                done.over = True
            self.waiting.clear()

    def gather(self, slots: object, at: object, rows: np.ndarray, address: int) -> None:
        if self.failing:
            raise RuntimeError("CUDA error: out of memory")
        assert rows.ctypes.data == address
        self.launched.append(len(slots))
        self.queue(lambda: rows.__setitem__(at.numpy(), self.slots[slots.numpy()]))

    def scatter(self, slots: object, at: object, rows: np.ndarray, address: int) -> None:
        if self.failing:
            raise RuntimeError("CUDA error: out of memory")
        self.launched.append(len(slots))
        self.queue(lambda: self.slots.__setitem__(slots.numpy(), rows[at.numpy()]))


class Done:
    """A mark of the device's queue."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.over = False

    def query(self) -> bool:
        self.device.step()
        return self.over


def half() -> Half:
    rows = np.zeros((STAGED_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    indexes = (torch.zeros(16, dtype=torch.int64) for _ in range(2))
    return Half(rows, row_copies(copies, rows), rows.ctypes.data, *indexes)


def opened(device: Device, reaches: bool, lanes: int = 1, deadline_s: float = LONG_S) -> DeviceCopies:
    made = [Lane(device, (half(), half())) for _ in range(lanes)]
    return DeviceCopies(device, made, copies, lambda rows: rows.ctypes.data if reaches else None, deadline_s, 16)


def rows_of(count: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("reaches", [True, False])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 16, 37])
def test_runs_of_any_length_arrive_in_their_rows(reaches: bool, count: int) -> None:
    device = Device()
    moving = opened(device, reaches)
    random = np.random.default_rng(count)
    slots, at = random.permutation(SLOTS)[:count], random.permutation(50)[:count]
    rows = np.full((50, BLOCK_BYTES), 0xA5, dtype=np.uint8)
    sums = moving.gather(slots, rows, at)
    assert (rows[at] == device.slots[slots]).all()
    assert (np.delete(rows, at, axis=0) == 0xA5).all()
    assert (sums == checksums(np.ascontiguousarray(rows[at]))).all()
    before = device.slots.copy()
    new = rows_of(50)
    moving.scatter(slots, new, at)
    before[slots] = new[at]
    assert (device.slots == before).all()


def test_rows_that_the_device_reaches_take_one_launch_and_others_go_through_staging_in_parts() -> None:
    device = Device()
    opened(device, True).gather(np.arange(16), np.zeros((16, BLOCK_BYTES), dtype=np.uint8), None)
    assert device.launched == [16]
    device.launched.clear()
    opened(device, False).gather(np.arange(10), np.zeros((10, BLOCK_BYTES), dtype=np.uint8), None)
    assert device.launched == [4, 4, 2]


def test_a_gather_that_does_not_arrive_in_time_writes_no_row_later() -> None:
    device = Device()
    moving = opened(device, False, deadline_s=SHORT_S)
    device.running = False
    rows = np.full((10, BLOCK_BYTES), 0xA5, dtype=np.uint8)
    with pytest.raises(DeviceTimeoutError, match="did not arrive"):
        moving.gather(np.arange(10), rows, None)
    device.running = True
    device.step()
    assert (rows == 0xA5).all()
    with pytest.raises(PoolError, match="0 lanes are left"):  # its staging is still the device's
        moving.gather(np.arange(10), rows, None)


@pytest.mark.parametrize("reaches", [True, False])
def test_a_copy_that_writes_what_others_would_get_holds_it_until_the_device_confirms(reaches: bool) -> None:
    device = Device()
    moving = opened(device, reaches, lanes=2, deadline_s=SHORT_S)
    device.running = False
    rows, ended = rows_of(3), threading.Event()

    def scatter() -> None:
        moving.scatter(np.array([5, 6, 7]), rows, None)
        ended.set()

    thread = threading.Thread(target=scatter)
    thread.start()
    try:
        eventually(lambda: moving._held.count == 1, "the copy is not held")
        assert not ended.wait(2 * SHORT_S)
        with pytest.raises(DeviceTimeoutError, match="not confirmed 1 earlier"):
            moving.gather(np.array([1]), rows_of(1), None)
    finally:
        device.running = True
        thread.join(LONG_S)
    assert ended.is_set()
    assert (device.slots[[5, 6, 7]] == rows).all()
    assert len(moving.gather(np.array([1]), rows_of(1), None)) == 1  # the device is back, and so is the lane


def test_a_launch_that_fails_leaves_the_lane_usable_once_what_was_queued_is_over() -> None:
    device = Device()
    moving = opened(device, False)
    device.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        moving.scatter(np.arange(10), rows_of(10), None)
    device.failing = False
    rows = np.zeros((10, BLOCK_BYTES), dtype=np.uint8)
    moving.gather(np.arange(10), rows, None)
    assert (rows == device.slots[:10]).all()


def test_a_caller_waits_for_a_lane_no_longer_than_the_deadline() -> None:
    device = Device()
    moving = opened(device, False, lanes=1, deadline_s=SHORT_S)
    taken = moving._lanes.get()
    with pytest.raises(DeviceTimeoutError, match="no lane came free"):
        moving.gather(np.arange(1), rows_of(1), None)
    moving._lanes.put(taken)
    assert len(moving.gather(np.arange(1), rows_of(1), None)) == 1


def test_threads_share_the_lanes() -> None:
    device = Device()
    lock = threading.Lock()
    step = device.step

    def locked_step() -> None:
        with lock:
            step()

    device.step = locked_step  # type: ignore[method-assign]
    moving = opened(device, False, lanes=3)
    wrong: list[int] = []

    def work(worker: int) -> None:
        slots = np.arange(worker, SLOTS, 4)
        for _ in range(10):
            rows = np.zeros((len(slots), BLOCK_BYTES), dtype=np.uint8)
            moving.gather(slots, rows, None)
            if not (rows == device.slots[slots]).all():
                wrong.append(worker)

    with ThreadPoolExecutor(4) as workers:
        for done in [workers.submit(work, worker) for worker in range(4)]:
            done.result()
    assert wrong == []


@pytest.mark.parametrize("reaches", [True, False])
def test_gathers_leave_a_lane_for_a_scatter(reaches: bool) -> None:
    device = Device()
    moving = opened(device, reaches, lanes=3)
    may_gather, gathering = threading.Event(), threading.Semaphore(0)
    gather = device.gather

    def slow(*run: object) -> None:
        gathering.release()
        assert may_gather.wait(LONG_S)
        gather(*run)  # type: ignore[arg-type]

    device.gather = slow  # type: ignore[method-assign]
    threads = [threading.Thread(target=moving.gather, args=(np.array([slot]), rows_of(1), None)) for slot in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):  # two have a lane, two wait for one
            assert gathering.acquire(timeout=LONG_S)
        rows = rows_of(2)
        moving.scatter(np.array([8, 9]), rows, None)
        assert (device.slots[[8, 9]] == rows).all()
        assert not gathering.acquire(blocking=False)
    finally:
        may_gather.set()
        for thread in threads:
            thread.join(LONG_S)


def test_a_lane_that_a_gather_has_lost_is_missing_to_gathers_and_not_to_scatters() -> None:
    device = Device()
    moving = opened(device, False, lanes=3, deadline_s=SHORT_S)
    for _ in range(2):
        device.running = False
        with pytest.raises(DeviceTimeoutError, match="did not arrive"):
            moving.gather(np.arange(2), rows_of(2), None)
        device.running = True
        device.step()
    with pytest.raises(DeviceTimeoutError, match="no lane for a gather"):
        moving.gather(np.arange(2), rows_of(2), None)
    rows = rows_of(2, seed=9)
    moving.scatter(np.arange(2), rows, None)
    assert (device.slots[:2] == rows).all()


class Driver:
    """CUDA's driver, which has registered one piece of host memory and calls it by another address."""

    def __init__(self, begin: int, size: int, shift: int) -> None:
        self.begin, self.size, self.shift = begin, size, shift

    def cuPointerGetAttribute(self, room: object, attribute: int, address: object) -> int:
        if not self.begin <= address.value < self.begin + self.size:
            return 1  # CUDA_ERROR_INVALID_VALUE
        room._obj.value = (
            1 if attribute == 2 else address.value + self.shift
        )  # CU_MEMORYTYPE_HOST, or the device's address
        return 0


def test_rows_are_reached_only_when_cuda_has_registered_every_byte_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm.pools.hbm import cuda

    memory = np.zeros((8, BLOCK_BYTES), dtype=np.uint8)
    address = memory.ctypes.data
    monkeypatch.setattr(cuda, "_driver", lambda: Driver(address + BLOCK_BYTES, 4 * BLOCK_BYTES, 1 << 20))
    assert cuda.device_address(memory[1:5]) == address + BLOCK_BYTES + (1 << 20)
    assert cuda.device_address(memory[:5]) is None
    assert cuda.device_address(memory[1:6]) is None
    assert cuda.device_address(memory[1:1]) is None
    monkeypatch.setattr(cuda, "_driver", lambda: None)  # a machine without the driver
    assert cuda.device_address(memory[1:5]) is None
