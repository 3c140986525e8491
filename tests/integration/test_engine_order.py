"""What an engine's streams still write is waited for: `create(…, stream=…)` down to a copy's queue, on a device that
lags behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm._native import checksums
from kvbm.core.ids import Tier
from kvbm.pools.hbm.device import DeviceCopies, Half, Lane, row_copies
from kvbm.pools.hbm.paged import ReferenceCopies, SegmentCopies
from kvbm.pools.hbm.pool import HbmPool
from tests.extras import needed
from tests.managers import hashes_of

torch = needed("torch", "engine")

SPACE = kvbm.Namespace(model="m", revision="r1", block_tokens=16)
SLOTS, BLOCK_BYTES, WAIT_S = 8, 64, 60.0


def copies(addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int) -> SegmentCopies:
    return ReferenceCopies(addresses, strides, sizes, slots, checksums)


class Event:
    """As a CUDA event: passed once what was on its stream before it has run."""

    def __init__(self, waiting: list[Callable[[], None]]) -> None:
        self.work = list(waiting)
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return all(work in DONE for work in self.work)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


DONE: list[Callable[[], None]] = []  # work that the device has done


class Stream:
    """As a CUDA stream: work runs in its order, when the device comes to it; work behind an event waits for
    that too.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.behind: list[Event] = []

    def queue(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def record_event(self) -> Event:
        return Event(self.waiting)

    def wait_event(self, event: Event) -> None:
        self.behind.append(event)

    def advance(self) -> None:
        """What can run runs."""
        if all(event.query() for event in self.behind):
            for work in self.waiting:
                work()
                DONE.append(work)
            self.waiting.clear()


class CopyQueue:
    """A lane's queue: as `pools.cuda.StreamOrder`, on a stream of the device that lags behind."""

    def __init__(self, order: Any) -> None:
        self.order, self.stream = order, Stream()

    def begin(self) -> None:
        self.order.hold(self.stream)

    def run(self, work: Callable[[], None]) -> Event:
        work()
        return Launched(self.stream)


class Launched(Event):
    """A mark behind all that a stream has; asking moves the stream on."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.waiting)
        self.stream = stream

    def query(self) -> bool:
        self.stream.advance()
        return super().query()


class Mover:
    """Copies between the pool's tensor and rows, when the device comes to them."""

    def __init__(self, pool: HbmPool) -> None:
        self.slots = pool.tensor.numpy()
        self.queue: CopyQueue

    def gather(self, slots: Any, at: Any, rows: np.ndarray, address: int) -> None:
        self.queue.stream.queue(lambda: rows.__setitem__(at.numpy(), self.slots[slots.numpy()]))

    def scatter(self, slots: Any, at: Any, rows: np.ndarray, address: int) -> None:
        self.queue.stream.queue(lambda: self.slots.__setitem__(slots.numpy(), rows[at.numpy()]))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[kvbm.Manager]:
    """A manager whose HBM pool copies as on CUDA."""
    from kvbm.pools.hbm.cuda import EngineOrder

    DONE.clear()
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.slots": SLOTS,
        "pools.hbm.device": "cpu",
        "pools.host.slots": SLOTS,
        "offload.host": "write_through",
        "onboard.wait_s": WAIT_S,
    }
    with kvbm.open_manager(kvbm.load_settings(flags=flags), [SPACE], BLOCK_BYTES) as opened:
        pool, mover = opened.hbm, Mover(opened.hbm)
        order = EngineOrder()
        lane_of = CopyQueue(order)
        mover.queue = lane_of

        def half() -> Half:
            rows = np.zeros((SLOTS, BLOCK_BYTES), dtype=np.uint8)
            indexes = (torch.zeros(SLOTS, dtype=torch.int64) for _ in range(2))
            return Half(rows, row_copies(copies, rows), rows.ctypes.data, *indexes)

        pool._order, pool._memory = order, None  # as on a GPU, a CPU does not reach it
        pool._device_copies = DeviceCopies(
            mover,
            [Lane(lane_of, (half(), half()))],
            copies,
            lambda rows: rows.ctypes.data,
            WAIT_S,
            SLOTS,  # type: ignore[arg-type]
        )
        yield opened


def rows_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, (2, BLOCK_BYTES), dtype=np.uint8)


def in_host(manager: kvbm.Manager, hashes: bytes) -> np.ndarray:
    """The rows of a prompt's two blocks in HOST."""
    assert manager.settle(WAIT_S)
    found = manager._ledger.match(hashes, False, Tier.HOST)
    assert found.depth == 2
    rows = np.zeros((2, BLOCK_BYTES), dtype=np.uint8)
    slots = np.frombuffer(found.slots, dtype="<u4").tolist()
    manager.pools.slots[Tier.HOST].read(slots, SPACE.id, hashes, rows)
    return rows


def created(
    manager: kvbm.Manager, prompt: int, stream: Stream, named: Stream | Event | None
) -> tuple[bytes, list[int]]:
    """Two blocks whose bytes are still on their way on a stream when `create` is called."""
    hashes, slots = hashes_of(prompt, 2), manager.allocate(2)
    assert slots is not None
    memory = manager.hbm.tensor.numpy()
    stream.queue(lambda: memory.__setitem__(slots, rows_of(prompt)))
    named = stream.record_event() if isinstance(named, Event) else named
    return hashes, manager.create(SPACE.id, kvbm.NO_PARENT, 0, hashes, slots, named)  # type: ignore[arg-type]


def test_a_copy_waits_for_the_streams_that_create_was_told_of(manager: kvbm.Manager) -> None:
    streams = [Stream(), Stream()]
    made = [created(manager, number, stream, stream) for number, stream in enumerate(streams)]
    assert not manager.settle(0.2)  # a copy of either waits for both
    streams[1].advance()
    assert not manager.settle(0.2)  # the newer word has not taken the older one's place
    streams[0].advance()
    for number, (hashes, _) in enumerate(made):
        assert (in_host(manager, hashes) == rows_of(number)).all()


def test_an_event_does_as_a_stream_does(manager: kvbm.Manager) -> None:
    stream = Stream()
    hashes, _ = created(manager, 3, stream, Event([]))
    assert not manager.settle(0.2)
    stream.advance()
    assert (in_host(manager, hashes) == rows_of(3)).all()


def test_without_a_word_of_the_stream_a_copy_takes_what_is_there(manager: kvbm.Manager) -> None:
    hashes, slots = created(manager, 4, Stream(), None)  # the engine's bug that the argument is for
    assert (in_host(manager, hashes) == manager.hbm.tensor.numpy()[slots]).all()
    assert not (in_host(manager, hashes) == rows_of(4)).all()


def test_a_slot_that_was_given_back_is_written_after_what_still_reads_it(manager: kvbm.Manager) -> None:
    stream = Stream()
    hashes, slots = created(manager, 5, stream, stream)
    stream.advance()
    assert manager.settle(WAIT_S)
    seen: list[np.ndarray] = []
    memory = manager.hbm.tensor.numpy()
    stream.queue(lambda: seen.append(memory[slots].copy()))  # a kernel that reads them, still to run
    manager.unpin(slots, stream)  # type: ignore[arg-type]
    manager.evict(Tier.HBM, hashes)
    taken = manager.allocate(SLOTS)
    assert taken is not None
    manager.release(slots)  # so that the blocks come back to the slots they were in
    brought = threading.Thread(target=lambda: manager.acquire(SPACE.id, hashes, WAIT_S))
    brought.start()
    brought.join(0.2)
    assert brought.is_alive()  # on the device, the copy stands behind the kernel
    stream.advance()
    brought.join(WAIT_S)
    assert not brought.is_alive()
    assert (seen[0] == rows_of(5)).all()
    assert (memory[slots] == rows_of(5)).all()


def test_events_that_the_device_has_passed_are_forgotten(manager: kvbm.Manager) -> None:
    stream = Stream()
    events = [stream.record_event() for _ in range(100)]
    for event in events:
        manager.hbm.order_after(event)  # type: ignore[arg-type]
    assert all(event.queries <= 2 for event in events)


class Stop(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("call", ["create", "unpin", "release"])
def test_work_is_named_before_the_ledger_acts(
    manager: kvbm.Manager, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A handler that raises behind the ledger's call must not leave slots free, or blocks held, whose work nobody waits
    for.
    """
    stream = Stream()
    hashes = hashes_of(3, 1)
    slots = manager.allocate(1)
    assert slots is not None
    if call == "unpin":
        manager.create(SPACE.id, kvbm.NO_PARENT, 0, hashes, slots)
    before = len(manager.hbm._order._named)  # type: ignore[union-attr]
    ledger = manager._ledger

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            def acted(*given: Any, **named: Any) -> Any:
                getattr(ledger, name)(*given, **named)
                raise Stop

            return acted if name == call else getattr(ledger, name)

    given = (SPACE.id, kvbm.NO_PARENT, 0, hashes) if call == "create" else ()
    with monkeypatch.context() as signal:
        signal.setattr(manager, "_ledger", Interrupted())
        with pytest.raises(Stop):
            getattr(manager, call)(*given, slots, stream)
    assert len(manager.hbm._order._named) == before + 1  # type: ignore[union-attr]
