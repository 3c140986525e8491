"""The manager driven by hand, in its own time: what it does when its journal refuses, another run has its fence, or a
reader asks.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE, NATIVE_LEDGER
from kvbm.assembly.native import NATIVE_METER
from kvbm.core.codec import FrameBytes, decode_frame
from kvbm.core.errors import JournalError
from kvbm.core.events import (
    Event,
    InstanceStarted,
    InstanceStopped,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier
from kvbm.core.usage import HOUR_MS
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.record.journal_retention import DiskRetention
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.prompt_samples import Samples
from kvbm.manager.record.snapshot_policy import SnapshotPolicy
from kvbm.manager.record.usage_account import UsagePlan
from kvbm.streams.base import ORIGIN, Position, StreamState
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from kvbm.streams.memory import MemoryLog
from tests.managers import NAMESPACE, hashes_of, make_manager, serve

SMALL = {Tier.HBM: 64, Tier.HOST: 32, Tier.NVME: 32}
EVENT_BYTES = 1 << 20


class Disk(MemoryLog):
    """A journal that keeps its word and has as much room as it is given; `JournalRetention` and sink in one."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = Epoch(1)
        self.room = 1 << 40
        self.error: Exception | None = None  # instead of taking a frame
        self.epoch_error: Exception | None = None
        self.snapshot_end = Offset(0)
        self.tried = 0
        self.truncated: list[tuple[Position, Position]] = []
        self.frames: list[FrameBytes] = []

    def append(self, frame: FrameBytes) -> None:
        self.tried += 1
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        is_first_snapshot = frame.epoch == self.epoch and frame.first_offset < self.snapshot_end
        if len(frame.data) > self.room and not is_first_snapshot:
            raise OSError(errno.ENOSPC, "the journal is full")
        super().append(frame)
        self.room -= len(frame.data)
        self.frames.append(frame)

    def begin_epoch(self, epoch: Epoch, snapshot_end: Offset) -> None:
        if self.epoch_error is not None:
            raise self.epoch_error
        assert epoch > self.epoch
        self.epoch, self.snapshot_end = epoch, snapshot_end

    def begin_snapshot(self) -> None:
        return

    def let_in(self, until: Position) -> bool:
        raise AssertionError("it never says that it is full by its own bound")

    def sync(self, now_s: float) -> float | None:
        return None

    def truncate(self, published: Position, completed_snapshot: Position) -> None:
        self.truncated.append((published, completed_snapshot))
        self.room = 1 << 40

    def used_bytes(self) -> int:
        return 0

    def events(self) -> list[Event]:
        return [event for frame in self.frames for event in decode_frame(frame.data)[0].events]

    def fold(self) -> Residencies:
        """What the frames say, held to the strictest rules: no hole, no illegal event, every digest right."""
        fold, expected = Residencies(strict=True), Position(Epoch(1), Offset(0))
        for frame in self.frames:
            begins = Position(frame.epoch, frame.first_offset)
            assert begins == expected or (begins.epoch > expected.epoch and begins.offset == 0)
            decoded, _ = decode_frame(frame.data)
            for event in decoded.events:
                fold.evolve(event)
            assert fold.digest == decoded.digest
            expected = Position(frame.epoch, frame.next_offset)
        return fold

    def end(self) -> Position:
        return Position(self.frames[-1].epoch, self.frames[-1].next_offset)


class Driven:
    """A manager without threads, and the time it lives in."""

    def __init__(self, slots: dict[Tier, int] = SMALL, **named: Any) -> None:
        self.disk = Disk()
        self.now_s = 1000.0
        self.manager: Manager = make_manager(
            slots,
            sink=self.disk,
            retention=self.disk,
            by_hand=True,
            clock=lambda: self.now_s,
            event_bytes=EVENT_BYTES,
            wait_s=0.0,
            **named,
        )
        self.turn()

    def turn(self, times: int = 1, runs: int = 8) -> float | None:
        """Turns of the event writer, each at the time the last one asked for, or a second later."""
        wake_s = None
        for _ in range(times):
            wake_s = self.manager.step_frames(self.now_s, runs)
            self.now_s = max(self.now_s, self.now_s + 1.0 if wake_s is None else wake_s)
        return wake_s

    def overflow(self) -> None:
        for prompt in range(10_000):
            serve(self.manager, prompt, 60)
            if self.manager.trouble().endswith("until it takes events again") and "unseen" in self.manager.trouble():
                return
        raise AssertionError("the ledger takes everything")

    def check(self) -> None:
        """The journal says exactly what the manager holds."""
        fold = self.disk.fold()
        assert fold.epoch == self.manager.epoch
        assert fold.digest == self.manager.digest()[1]
        for tier in SMALL:
            assert set(fold.held[tier]) == set(self.manager.held(tier))


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven(offload=())
    yield driven
    driven.manager.close()


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


# -- a journal that refuses --------------------------------------------------------------------------------------------


def test_a_journal_that_refuses_is_told_once_and_what_it_refused_is_written_when_it_takes_again(driven: Driven) -> None:
    serve(driven.manager, 1, 8)
    driven.disk.error = full()
    with capture_logs() as told:
        driven.turn(5)
        trouble = driven.manager.trouble()
        assert "No space left on device" in trouble
        assert driven.manager.heartbeat(ORIGIN).trouble == driven.manager.stats().trouble == trouble
        serve(driven.manager, 2, 8)
        driven.disk.error = None
        driven.turn(2)
    assert [entry["event"] for entry in told] == ["journal.write_failed", "journal.write_resumed"]
    assert driven.manager.trouble() == driven.manager.heartbeat(ORIGIN).trouble == ""
    assert driven.manager.durable() == driven.manager.applied()
    assert driven.manager.epoch == 1
    driven.check()


def test_a_journal_that_refuses_is_asked_again_less_and_less_often(driven: Driven) -> None:
    serve(driven.manager, 1, 8)
    driven.disk.error = full()
    tried, waits = driven.disk.tried, []
    for _ in range(8):
        before = driven.now_s
        wake_s = driven.manager.step_frames(before)
        assert wake_s is not None
        assert driven.manager.step_frames(before + (wake_s - before) / 2) == wake_s  # too early: nothing is tried
        waits.append(wake_s - before)
        driven.now_s = wake_s
    assert driven.disk.tried == tried + 8
    assert waits == sorted(waits)
    assert waits[0] < 0.5 and waits[-1] == waits[-2] <= 5


def test_a_journal_that_refuses_as_an_hour_ends_is_asked_no_oftener_and_has_its_usage_then() -> None:
    wall_ms = [500_000 * HOUR_MS]
    driven = Driven(offload=(), usage=UsagePlan(NATIVE_METER), wall_clock_ns=lambda: wall_ms[0] * 1_000_000)
    serve(driven.manager, 1, 8)
    driven.disk.error = full()
    driven.turn()
    wall_ms[0] += HOUR_MS
    for _ in range(3):
        before = driven.now_s
        wake_s = driven.manager.step_frames(before)
        assert wake_s is not None and wake_s > before, "the writer's thread turns without end"
        assert driven.manager.step_frames(before) == wake_s  # woken meanwhile, it waits as long
        driven.now_s = wake_s
    driven.disk.error = None
    driven.turn(2)
    usages = [event for event in driven.disk.events() if isinstance(event, UsageRecorded)]
    assert [(event.since_ms, event.until_ms) for event in usages] == [(wall_ms[0] - HOUR_MS, wall_ms[0])]
    assert [row.put_blocks[Tier.HBM] for row in usages[0].rows] == [8]
    driven.check()
    driven.manager.close()
    last, end = driven.disk.events()[-2:]
    assert isinstance(last, UsageRecorded) and last.is_last and isinstance(end, InstanceStopped)


def test_while_the_journal_refuses_nothing_durable_is_begun_and_the_rest_goes_on() -> None:
    driven = Driven()
    manager = driven.manager
    serve(manager, 1, 4)
    driven.disk.error = full()
    driven.turn()
    while manager.offload_one():
        pass
    assert len(manager.held(Tier.HOST)) == 4
    assert manager.held(Tier.NVME) == []
    assert manager.stats().skipped_offloads == 4
    driven.disk.error = None
    driven.turn(2)
    serve(manager, 2, 4)
    while manager.offload_one():
        driven.turn()
    assert len(manager.held(Tier.NVME)) == 4
    manager.close()
    driven.check()


def test_an_overflow_ends_the_epoch_and_another_begins_when_the_journal_takes_again() -> None:
    driven = Driven(offload=(), has_stream=True)
    driven.disk.error = full()
    with capture_logs() as told:
        driven.overflow()
        driven.turn(3)
        ended = driven.manager.applied()
        serve(driven.manager, 77, 40)
        driven.disk.error = None
        driven.turn(2)
    assert driven.manager.epoch == 2
    assert driven.manager.trouble() == ""
    names = [entry["event"] for entry in told]
    assert sorted(names) == [
        "instance.epoch_begun",
        "journal.write_failed",
        "journal.write_resumed",
        "ledger.overflowed",
    ]
    events = driven.disk.events()
    assert events[ended - 1] == InstanceStopped(reason=StopReason.OVERFLOW)
    assert isinstance(events[ended], InstanceStarted)
    driven.check()
    serve(driven.manager, 78, 40)
    driven.turn()
    driven.check()


def test_an_epoch_that_cannot_be_begun_is_tried_again(driven: Driven) -> None:
    driven.disk.error, driven.disk.epoch_error = full(), JournalError("EPOCH cannot be written")
    driven.overflow()
    driven.turn(3)
    driven.disk.error = None
    driven.turn(3)
    assert driven.manager.epoch == 1
    assert "EPOCH cannot be written" in driven.manager.trouble()
    driven.disk.epoch_error = None
    driven.turn(3)
    assert driven.manager.epoch == 2
    driven.check()


def test_a_full_journal_whose_frames_are_all_published_is_left_for_another_epoch() -> None:
    driven = Driven(offload=(), has_stream=True)
    driven.disk.room = 0
    driven.overflow()
    driven.turn(5)
    assert driven.manager.epoch == 1  # what the journal holds may still be published, which makes room
    driven.manager.publisher_port.on_published(driven.disk.end())
    driven.turn(2)
    assert driven.manager.epoch == 2  # its first snapshot goes beyond the room
    driven.check()
    assert driven.manager.durable() == driven.manager.applied()
    for prompt in range(70, 90):
        serve(driven.manager, prompt, 60)
        driven.turn()
    assert driven.manager.trouble()  # full again until the snapshot is published
    driven.manager.publisher_port.on_published(driven.disk.end())
    driven.turn(3)
    assert driven.disk.truncated[-1][1] == Position(Epoch(2), Offset(0))
    assert driven.manager.trouble() == ""
    driven.check()


def test_usage_that_a_full_journal_did_not_take_is_recorded_with_the_epoch_that_follows() -> None:
    wall_ms = [500_000 * HOUR_MS]
    driven = Driven(
        offload=(),
        has_stream=True,
        usage=UsagePlan(NATIVE_METER),
        wall_clock_ns=lambda: wall_ms[0] * 1_000_000,
    )
    driven.disk.room = 0
    wall_ms[0] += HOUR_MS
    driven.turn()  # the hour's usage is taken, and refused
    driven.overflow()
    driven.manager.publisher_port.on_published(driven.disk.end())
    driven.turn(3)
    assert driven.manager.epoch == 2
    driven.manager.publisher_port.on_published(driven.disk.end())
    driven.turn(4)
    usages = [event for event in driven.disk.events() if isinstance(event, UsageRecorded)]
    assert [(event.since_ms, event.until_ms) for event in usages] == [(wall_ms[0] - HOUR_MS, wall_ms[0])]
    driven.check()
    driven.manager.close()


@pytest.mark.parametrize("has_stream", [False, True])
def test_a_journal_filled_within_a_turn_takes_the_rest_with_a_snapshot_and_is_emptied_by_it(
    tmp_path: Path, has_stream: bool
) -> None:
    capacity_bytes = 1 << 14
    journal = Journal.open(tmp_path, InstanceId("test"), NATIVE, JournalOptions("off", 1 << 12, capacity_bytes))
    journal.begin_epoch(Epoch(1))
    manager = make_manager(
        SMALL,
        sink=journal,
        retention=DiskRetention(journal, "", 1.0),
        snapshots=SnapshotPolicy(1.0, capacity_bytes),
        by_hand=True,
        clock=lambda: now_s,
        offload=(),
        has_stream=has_stream,
    )
    now_s, port, end = 1000.0, manager.publisher_port, Position(Epoch(1), Offset(0))
    for burst in range(5):
        for prompt in range(40):  # their events do not fit into the journal
            serve(manager, 40 * burst + prompt, 60)
        manager.step_frames(now_s)
        while has_stream and manager.durable() > end.offset:
            assert "no room" in manager.trouble() or manager.durable() == manager.applied()
            end = Position(Epoch(1), manager.durable())
            port.on_published(end)  # what is not on the stream yet is not let go, so nothing is let in before
            manager.step_frames(now_s)
        for _ in range(5):
            now_s += 1.0
            manager.step_frames(now_s)
        assert (manager.trouble(), manager.epoch, manager.durable()) == ("", 1, manager.applied())
        if has_stream:
            end = Position(Epoch(1), manager.durable())
            port.on_published(end)
            manager.step_frames(now_s)
        assert journal.used_bytes < 3 * capacity_bytes
    manager.close()
    journal.close()


def test_a_device_that_takes_no_frame_of_the_new_epoch_gets_no_third_one() -> None:
    driven = Driven(offload=(), has_stream=True)
    driven.disk.error = full()
    driven.overflow()
    driven.manager.publisher_port.on_published(driven.disk.end())
    driven.turn(2)
    assert driven.manager.epoch == 2
    driven.overflow()
    driven.turn(20)
    assert driven.manager.epoch == 2  # its first snapshot is nowhere yet
    driven.disk.error = None
    driven.turn(3)
    assert driven.manager.epoch == 3
    driven.check()


def test_frames_lost_by_a_bug_are_followed_by_another_epoch_and_never_by_what_came_after_them(driven: Driven) -> None:
    serve(driven.manager, 1, 8)
    driven.disk.error = RuntimeError("a bug in the journal")
    with capture_logs() as told:
        driven.turn()
    assert "journal.writer_broke" in [entry["event"] for entry in told]
    assert "frames were lost by a bug (RuntimeError: a bug in the journal)" in driven.manager.trouble()
    serve(driven.manager, 2, 8)
    driven.disk.error, driven.disk.epoch_error = None, full()
    driven.turn(3)
    assert len(driven.disk.frames) == 1  # nothing is written after the hole
    driven.disk.epoch_error = None
    driven.turn(2)
    assert driven.manager.epoch == 2
    assert driven.manager.trouble() == ""
    driven.check()


# -- another run -------------------------------------------------------------------------------------------------------


def test_a_fenced_manager_begins_a_later_epoch_in_the_writers_turn(driven: Driven) -> None:
    serve(driven.manager, 1, 8)
    driven.turn()
    serve(driven.manager, 2, 8)
    driven.manager.publisher_port.on_fenced(Epoch(7))
    assert driven.manager.epoch == 1
    driven.turn(2)
    assert driven.manager.epoch == driven.disk.epoch == 8
    assert driven.manager.heartbeat(ORIGIN).run == driven.manager.run == "a-run"
    driven.check()
    driven.turn(5)
    assert driven.manager.epoch == 8


def test_an_epoch_is_above_whatever_the_journal_has_begun(driven: Driven) -> None:
    driven.disk.epoch = Epoch(20)
    driven.manager.publisher_port.on_fenced(Epoch(7))
    driven.turn(2)
    assert driven.manager.epoch == 21
    driven.check()


def test_a_copy_of_the_last_epoch_is_written_once_the_new_epochs_snapshot_is_durable() -> None:
    waits: list[tuple[Epoch, Offset]] = []
    begins: list[Callable[[], None]] = []

    class Turning(Offsets):
        def wait_durable(self, epoch: Epoch, offset: Offset, timeout_s: float) -> bool:
            waits.append((epoch, offset))
            if offset and begins:
                assert not self.is_durable(epoch, offset)
                begins.pop()()
            return self.is_durable(epoch, offset)

    driven = Driven({Tier.HBM: 64, Tier.HOST: 32, Tier.NVME: 4}, offload=(Tier.NVME,), offsets=Turning())
    manager = driven.manager
    serve(manager, 1, 4)
    while manager.offload_one():
        driven.turn()
    serve(manager, 2, 4)  # its offload evicts what NVME holds

    def lose() -> None:
        driven.disk.error = RuntimeError("the withdrawal is lost")
        driven.turn()
        driven.disk.error = None
        driven.turn(3)

    begins.append(lose)
    assert manager.offload_one()
    assert waits[-1][0] == 1
    assert manager.epoch == 2
    assert manager.stats().failed_copies == 0
    driven.turn()
    assert set(manager.held(Tier.NVME)) == {hashes_of(2, 4)[at : at + 16] for at in range(0, 64, 16)}
    driven.check()


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_that_is_asked_for_goes_run_by_run_while_the_engine_goes_on() -> None:
    driven = Driven({Tier.HBM: 4000, Tier.HOST: 32, Tier.NVME: 32}, offload=(), snapshots=SnapshotPolicy(10.0))
    serve(driven.manager, 1, 2500)
    driven.turn()
    before = len(driven.disk.events())
    driven.manager.publisher_port.on_snapshot_asked()
    assert driven.turn(runs=1) == driven.now_s  # at once again
    serve(driven.manager, 2, 40)
    driven.turn(10, runs=1)
    said = driven.disk.events()[before:]
    listed = [
        len(event.hashes) // 16 for event in said if isinstance(event, ResidenciesListed) and event.tier == Tier.HBM
    ]
    assert listed == [1024, 1024, 452]  # and none of what came meanwhile
    assert [event.tier for event in said if isinstance(event, SnapshotEnded)] == [Tier.HBM, Tier.HOST, Tier.NVME]
    driven.check()
    driven.manager.publisher_port.on_snapshot_asked()
    driven.turn()
    assert len(driven.disk.events()) == before + len(said)  # not so soon
    driven.now_s += 10.0
    driven.turn(3)
    assert len(driven.disk.events()) > before + len(said)


def test_a_snapshot_begins_in_a_quarter_of_what_the_stream_keeps(driven: Driven) -> None:
    before = len(driven.disk.events())
    driven.manager.publisher_port.on_stream_state(StreamState(1, 5, 100, -1, 400.0, "a"))
    assert driven.manager.step_frames(driven.now_s) == 1100.0
    driven.manager.step_frames(1099.0)
    assert len(driven.disk.events()) == before
    driven.manager.step_frames(1100.0)
    assert isinstance(driven.disk.events()[-1], SnapshotEnded)
    driven.manager.step_frames(1101.0)
    assert len(driven.disk.events()) == before + 3


def test_what_is_published_goes_only_behind_a_snapshot_that_is_whole_and_published() -> None:
    driven = Driven(offload=(), has_stream=True)
    manager, disk = driven.manager, driven.disk
    serve(manager, 1, 8)
    driven.turn()
    assert disk.truncated == []
    manager.publisher_port.on_published(disk.end())
    driven.turn()
    assert disk.truncated == [(disk.end(), Position(Epoch(1), Offset(0)))]
    began = Position(Epoch(1), manager.applied())
    manager.take_snapshot()
    driven.turn()
    assert len(disk.truncated) == 1
    ended = Position(Epoch(1), manager.applied())
    manager.publisher_port.on_published(Position(ended.epoch, Offset(ended.offset - 1)))
    driven.turn()
    assert len(disk.truncated) == 1  # the snapshot's end is not on the stream
    manager.publisher_port.on_published(ended)
    driven.turn()
    assert disk.truncated[1:] == [(ended, began)]
    assert manager.published() == ended


# -- the rest ----------------------------------------------------------------------------------------------------------


class Later(Executor):
    """Carries out what it is given when it is told to."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((future, lambda: fn(*args, **named)))
        return future

    def run(self) -> None:
        for future, work in self.work:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        self.work.clear()


class AtOnce(Later):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future = super().submit(fn, *args, **named)
        self.run()
        return future


def test_onboards_are_carried_out_by_the_executor_and_late_ones_are_a_miss() -> None:
    for executor, depth in ((AtOnce(), 4), (Later(), 0)):
        driven = Driven(executor=executor)
        serve(driven.manager, 1, 4)
        assert driven.manager.settle(10.0)
        driven.manager.evict(Tier.HBM, hashes_of(1, 4))
        prefix = driven.manager.acquire(NAMESPACE.id, hashes_of(1, 4))
        assert prefix.depth == depth
        driven.manager.close()
        driven.check()


def test_a_manager_that_is_driven_by_hand_closes_in_its_own_turns(driven: Driven) -> None:
    serve(driven.manager, 1, 8)
    driven.manager.close()
    assert driven.disk.events()[-1] == InstanceStopped(reason=StopReason.SHUTDOWN)
    assert driven.manager.durable() == driven.manager.applied()
    driven.manager.publisher_port.on_fenced(Epoch(9))
    driven.turn(3)
    assert driven.manager.epoch == 1


def test_a_close_within_the_pause_after_a_refusal_tries_once_more(driven: Driven) -> None:
    serve(driven.manager, 1, 8)
    driven.disk.error = full()
    wake_s = driven.manager.step_frames(driven.now_s)
    assert wake_s is not None and wake_s > driven.now_s
    driven.disk.error = None
    driven.manager.close()
    assert driven.disk.events()[-1] == InstanceStopped(reason=StopReason.SHUTDOWN)
    assert driven.manager.durable() == driven.manager.applied()
    driven.check()


def test_prompts_are_sampled_by_their_first_block_and_lost_beyond_the_room() -> None:
    samples = Samples(0.5, capacity=40)
    driven = Driven({Tier.HBM: 1000}, samples=samples)
    for prompt in range(60):
        for depth in (2, 3):
            serve(driven.manager, prompt, depth)
    taken = driven.manager.publisher_port.take_samples()
    chosen = [prompt for prompt in range(60) if hashes_of(prompt, 1) < samples.below]
    assert 15 < len(chosen) < 45
    expected = [(hashes_of(prompt, depth), depth - 2) for prompt in chosen for depth in (2, 3)]
    found = [(sample.hashes, max(0, sample.depth - 1)) for sample in taken]
    assert found == [(hashes, depth) for hashes, depth in expected][:40]
    assert samples.dropped == max(0, len(expected) - 40)
    assert {(sample.rate, sample.instance, sample.namespace) for sample in taken} == {(0.5, "test", NAMESPACE.id)}
    assert driven.manager.publisher_port.take_samples() == []


def test_all_prompts_or_none_are_sampled_where_the_rate_says_so() -> None:
    for rate, count in ((0.0, 0), (1.0, 20)):
        driven = Driven({Tier.HBM: 100}, samples=Samples(rate))
        for prompt in range(20):
            serve(driven.manager, prompt, 2)
        assert len(driven.manager.publisher_port.take_samples()) == count


# -- everything at once ------------------------------------------------------------------------------------------------


class Never(Offsets):
    """Waits for nothing: what is not durable now is not written."""

    def wait_durable(self, epoch: Epoch, offset: Offset, timeout_s: float) -> bool:
        return self.is_durable(epoch, offset)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_the_journal_says_in_the_end_what_is_held(seed: int) -> None:
    chance = random.Random(seed)
    driven = Driven(
        executor=AtOnce(),
        snapshots=SnapshotPolicy(2.0, 1 << 20),
        has_stream=True,
        new_ledger=NATIVE_LEDGER,
        offsets=Never(),
    )
    manager, disk = driven.manager, driven.disk
    for _ in range(200):
        match chance.randrange(14):
            case 0 | 1 | 2 | 3:
                serve(manager, chance.randrange(40), chance.randrange(1, 40))
            case 4 | 5:
                manager.offload_one()
            case 6:
                manager.evict(chance.choice([*SMALL]), hashes_of(chance.randrange(40), 20))
            case 7 | 8 | 9:
                driven.turn(1 + chance.randrange(3), runs=1 + chance.randrange(4))
            case 10:
                disk.error = chance.choice([None, None, None, full(), RuntimeError("a bug")])
            case 11:
                disk.epoch_error = chance.choice([None, None, JournalError("no room")])
                disk.room = chance.choice([1 << 40, 10_000])
            case 12:
                manager.publisher_port.on_snapshot_asked()
                if chance.randrange(4) == 0:
                    manager.publisher_port.on_fenced(Epoch(manager.epoch + chance.randrange(3)))
            case _:
                if disk.frames:
                    manager.publisher_port.on_published(disk.end())
        if chance.randrange(80) == 0:
            disk.error = full()
            driven.overflow()
    disk.error, disk.epoch_error, disk.room = None, None, 1 << 40
    manager.publisher_port.on_published(disk.end())
    driven.turn(30)
    assert manager.trouble() == ""
    assert manager.durable() == manager.applied()
    driven.check()
    manager.close()
    driven.check()
