"""The manager when something under it breaks: no thread dies, nothing escapes to the engine, no slot is reused
or lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvbm.manager.record.event_writer
import kvbm.pools.nvme.pool
from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.codec import FrameBytes, decode_frame
from kvbm.core.errors import LedgerError
from kvbm.core.events import InstanceStarted, InstanceStopped, StopReason
from kvbm.core.fold import Residencies
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Offset, Tier
from kvbm.manager.record.event_writer import EventWriter
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.publisher_port import PublisherPort
from kvbm.pools.base import ReadResult
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Position
from kvbm.streams.memory import MemoryLog
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, make_manager, serve
from tests.wrapped_pools import Wrapped

WAIT_S = 60.0


class Breaking(Wrapped):
    """An NVME pool that breaks its promise never to raise, while told to."""

    breaks = False

    def read(self, *run: Any) -> ReadResult:
        if self.tier == Tier.NVME and Breaking.breaks:
            raise RuntimeError("a bug in the pool")
        return super().read(*run)

    def write(self, *run: Any) -> None:
        if self.tier == Tier.NVME and Breaking.breaks:
            raise RuntimeError("a bug in the pool")
        super().write(*run)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(Breaking, "breaks", True)
    return monkeypatch


def test_an_offload_that_breaks_is_counted_and_the_next_one_is_carried_out(breaks: pytest.MonkeyPatch) -> None:
    with make_manager({Tier.HBM: 16, Tier.NVME: 16}, wrap=Breaking, offload=(Tier.NVME,)) as manager:
        serve(manager, 1, 4)
        eventually(lambda: manager.stats().failed_copies, "the broken copy was not counted")
        assert manager.stats().copies_in_flight == 1  # nobody knows whether its bytes still move: it keeps its slots
        breaks.setattr(Breaking, "breaks", False)
        serve(manager, 2, 4)
        eventually(lambda: len(manager.held(Tier.NVME)) == 4, "the offload thread has died")
        assert manager.stats().pools[Tier.NVME].free == 8


def test_a_turn_that_breaks_does_not_end_the_offload_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_manager({Tier.HBM: 16, Tier.NVME: 16}, offload=(Tier.NVME,)) as manager:
        broken = threading.Event()

        def look_idle() -> None:
            broken.set()
            raise RuntimeError("a bug in the watch over claims")

        monkeypatch.setattr(manager._offloads._claims, "look_idle", look_idle)
        assert broken.wait(WAIT_S)
        for prompt in range(3):
            serve(manager, prompt, 4)
            assert manager.settle(WAIT_S), "the offload thread has died"
        assert len(manager.held(Tier.NVME)) == 12


def test_an_onboard_that_breaks_is_a_miss_and_keeps_its_slots(breaks: pytest.MonkeyPatch) -> None:
    breaks.setattr(Breaking, "breaks", False)
    with make_manager({Tier.HBM: 8, Tier.NVME: 8}, wrap=Breaking, offload=(Tier.NVME,)) as manager:
        serve(manager, 1, 4)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, hashes_of(1, 4, start=2))
        breaks.setattr(Breaking, "breaks", True)
        prefix = manager.acquire(NAMESPACE.id, hashes_of(1, 4))
        assert prefix.depth == 2
        manager.unpin(prefix.slots)
        assert manager.stats().failed_copies == 1
        assert manager.stats().pools[Tier.HBM].allocated == 2


def test_copies_that_never_began_give_their_slots_back_when_the_request_gives_up() -> None:
    release = threading.Event()

    class Hanging(Wrapped):
        def read(self, *run: Any) -> ReadResult:
            if self.tier == Tier.NVME:
                release.wait(WAIT_S)
            return super().read(*run)

    slots = {Tier.HBM: 12, Tier.NVME: 16}
    with make_manager(slots, wrap=Hanging, wait_s=0.2, offload=(Tier.NVME,)) as manager:
        for prompt in range(4):
            serve(manager, prompt, 3)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
        for prompt in range(4):  # two threads hang; the copies behind them never begin
            assert manager.acquire(NAMESPACE.id, hashes_of(prompt, 3)).depth == 0
        assert manager.stats().copies_in_flight == 2
        assert manager.stats().pools[Tier.HBM].free == 6
        release.set()
        assert manager.settle(WAIT_S)
        assert serve(manager, 3, 3).prefix.hits == {Tier.NVME: 3}


def test_a_closed_manager_says_so_and_takes_back_what_it_gave() -> None:
    manager = make_manager({Tier.HBM: 8})
    served = serve(manager, 1, 4, keep=True)
    rest = manager.allocate(2)
    assert rest is not None
    manager.close()
    for call in (
        lambda: manager.acquire(NAMESPACE.id, hashes_of(1, 4)),
        lambda: manager.allocate(8),
        lambda: manager.create(NAMESPACE.id, NO_PARENT, 0, hashes_of(2, 2), rest),
        lambda: manager.evict(Tier.HBM, hashes_of(1, 4)),
        manager.take_snapshot,
    ):
        with pytest.raises(LedgerError, match="the manager is closed"):
            call()
    manager.unpin(served.slots)
    manager.release(rest)


def test_a_request_that_waits_while_the_manager_closes_gets_a_miss() -> None:
    begun, release = threading.Event(), threading.Event()

    class Hanging(Wrapped):
        def read(self, *run: Any) -> ReadResult:
            if self.tier == Tier.NVME:
                begun.set()
                release.wait(WAIT_S)
            return super().read(*run)

    manager = make_manager({Tier.HBM: 12, Tier.NVME: 12}, wrap=Hanging, wait_s=5.0, offload=(Tier.NVME,))
    for prompt in range(4):
        serve(manager, prompt, 3)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
    depths: list[int] = []

    def ask(prompt: int) -> None:
        depths.append(manager.acquire(NAMESPACE.id, hashes_of(prompt, 3)).depth)

    askers = [threading.Thread(target=ask, args=(prompt,)) for prompt in range(4)]
    for asker in askers:
        asker.start()
    assert begun.wait(WAIT_S)
    eventually(lambda: manager.stats().copies_in_flight == 4, "two copies run, two wait")
    closer = threading.Thread(target=manager.close)
    closer.start()
    eventually(lambda: manager._stream.closing, "nobody closes it")
    release.set()
    for thread in (*askers, closer):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(depths) == 4  # whatever each got, none saw an exception


def test_closing_does_not_wait_for_a_device_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "pools.hbm.slots": 8,
        "pools.hbm.device": "memory",
        "pools.nvme.slots": 8,
        "nats.enabled": False,
        "onboard.wait_s": 0.1,
    }
    manager = open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES)
    serve(manager, 1, 4)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(1, 4))
    release, ended = threading.Event(), list[int]()
    read = kvbm.pools.nvme.pool.NvmePool.read

    def hang(*run: Any, **where: Any) -> ReadResult:
        release.wait(WAIT_S)
        ended.append(1)
        return read(*run, **where)

    monkeypatch.setattr(kvbm.pools.nvme.pool.NvmePool, "read", hang)
    assert manager.acquire(NAMESPACE.id, hashes_of(1, 4)).depth == 0
    manager.close(timeout_s=0.3)
    assert not ended
    release.set()


# -- the event writer's thread; its turns are in test_manager_turns.py -------------------------------------------------


def test_a_stop_that_comes_as_the_writer_wakes_is_not_lost() -> None:
    ledger = Ledger([])
    ledger.start(Epoch(1))
    stream = LedgerStream(InstanceId("i"), ledger, time.time_ns)
    port = PublisherPort(InstanceId("i"), "c", "a-run", stream, heartbeat=lambda _: pytest.fail("no publisher asks"))
    writer = EventWriter(stream, MemoryLog(), Offsets(), port)

    class StoppedMeanwhile(threading.Event):
        def clear(self) -> None:
            if not writer._stopping:  # stop() runs just here, in another thread
                writer._stopping = True
                self.set()
            super().clear()

    stream.wake = StoppedMeanwhile()
    writer.start()
    writer._thread.join(WAIT_S)
    assert not writer._thread.is_alive()


def test_a_sink_that_always_breaks_costs_the_engine_nothing_and_is_told() -> None:
    class Refusing(MemoryLog):
        def append(self, frame: FrameBytes) -> None:
            raise LedgerError("a bug in the journal")

    manager = make_manager({Tier.HBM: 4}, sink=Refusing())
    serve(manager, 1, 4)  # the engine does not notice
    eventually(manager.trouble, "nobody is told")
    assert manager.durable() == 0
    assert not manager._writer.stop(1.0)
    manager.close(0.1)


def test_a_log_on_the_same_full_disk_does_not_end_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = threading.Event()
    is_full.set()

    class Full(MemoryLog):
        def append(self, frame: FrameBytes) -> None:
            if is_full.is_set():
                raise OSError(28, "No space left on device")
            super().append(frame)

    class FullLog:
        def __getattr__(self, level: str) -> Callable[..., None]:
            def write(*_: object, **__: object) -> None:
                if is_full.is_set():
                    raise OSError(28, "No space left on device")

            return write

    monkeypatch.setattr(kvbm.manager.record.event_writer, "log", FullLog())
    with make_manager({Tier.HBM: 4}, sink=Full()) as manager:
        serve(manager, 1, 4)
        eventually(manager.trouble, "the writer has not noticed")
        is_full.clear()
        eventually(lambda: manager.durable() == manager.applied(), "the writer has died")


def test_a_journal_that_hangs_ends_the_epoch_and_not_the_engine_and_another_follows() -> None:
    hangs = threading.Event()

    class Hanging(MemoryLog):
        def append(self, frame: FrameBytes) -> None:
            if hangs.is_set():
                raise OSError(5, "Input/output error")
            super().append(frame)

    log = Hanging()
    with make_manager({Tier.HBM: 64, Tier.NVME: 16}, sink=log, offload=(), event_bytes=1 << 20) as manager:
        serve(manager, 1, 64)
        hangs.set()
        serve(manager, 2, 64)
        eventually(lambda: manager.stats().trouble, "the writer has not noticed")
        refused = len(manager._writer._unwritten)
        for prompt in range(3, 600):
            serve(manager, prompt, 64)
        ended = manager.applied()
        assert manager.acquire(NAMESPACE.id, hashes_of(599, 64)).hits == {Tier.HBM: 64}
        assert len(manager._writer._unwritten) == refused  # the rest waits in the ledger
        hangs.clear()
        eventually(lambda: manager.epoch == 2 and not manager.trouble(), "no other epoch has begun")
        eventually(lambda: manager.durable() == manager.applied(), "its snapshot was not written")
    events = [e for f in log.read_after(Position(Epoch(1), Offset(0)), 1 << 30) for e in decode_frame(f.data)[0].events]
    assert events[ended - 1] == InstanceStopped(reason=StopReason.OVERFLOW)
    assert isinstance(events[ended], InstanceStarted)
    fold = Residencies(strict=True)
    for event in events:
        fold.evolve(event)
    assert set(fold.held[Tier.HBM]) == set(manager.held(Tier.HBM))
