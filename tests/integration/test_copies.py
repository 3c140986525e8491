"""Moving the bytes of one copy between real pools."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm._native import Arena, BlockIo, RowCopier, checksums
from kvbm.core.errors import PoolError
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier, pack_slots
from kvbm.core.results import Copy
from kvbm.manager.copies.transfer import Moved, Pools, RemoteSource, move
from kvbm.manager.record.offsets import Offsets
from kvbm.pools.base import ReadOutcome, ReadResult, SlotPool
from kvbm.pools.host.pool import HostPool
from kvbm.pools.memory import MemoryPool
from kvbm.pools.nvme.pool import NvmePool
from tests.object_pools import memory_objects
from tests.pool_runs import SHAPE, Run, part, random_run
from tests.wrapped_pools import OutOfReach, Wrapped

BLOCK_BYTES = 4096
WAIT_S = 60.0
AFTER = Offset(7)  # the withdrawal of what the slots hold is durable from here on
SLOTS = [0, 1, 2]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    nvme = NvmePool((tmp_path / "pool",), 8, BLOCK_BYTES, SHAPE, InstanceId("a"), checksums, BlockIo)
    pools = Pools({Tier.NVME: nvme}, memory_objects(BLOCK_BYTES))
    yield pools
    pools.close()


def staged(pools: Pools, run: Run, offsets: Offsets, wait_s: float, lane_blocks: int = 2) -> Moved:
    """An onboard from OBJECT to NVME: neither is memory, so its bytes go through a lane, in parts."""
    assert pools.need_staging(Tier.OBJECT, Tier.NVME)
    copy = Copy(1, run.namespace, Tier.OBJECT, Tier.NVME, run.hashes, b"", pack_slots(SLOTS), AFTER, Epoch(1))
    lane = np.zeros((lane_blocks, BLOCK_BYTES), dtype=np.uint8)
    return move(copy, pools, offsets, wait_s, lane, RemoteSource(run.hashes))


def held(pools: Pools, run: Run) -> list[ReadOutcome]:
    """What NVME says of a run in the slots."""
    return pools.slots[Tier.NVME].read(SLOTS, run.namespace, run.hashes, run.room(), None).outcomes


def prepared(pools: Pools) -> tuple[Run, Run, Offsets]:
    """A run that NVME holds, one in the object pool that is to take its place, and a journal that has not said
    so yet.
    """
    before, after = random_run(3, BLOCK_BYTES, 1), random_run(3, BLOCK_BYTES, 2)
    pools.slots[Tier.NVME].write(SLOTS, before.rows, before.proof, None)
    assert pools.object is not None and all(pools.object.put(after.rows, after.proof))
    offsets = Offsets()
    offsets.begin_epoch(Epoch(1), Offset(0))
    offsets.advance_durable(Epoch(1), Offset(AFTER - 1))
    return before, after, offsets


def test_a_staged_copy_leaves_slots_alone_whose_withdrawal_never_becomes_durable(pools: Pools) -> None:
    before, after, offsets = prepared(pools)
    moved = staged(pools, after, offsets, 0.0)
    assert moved.arrived == [False] * 3 and "not durable" in moved.unwritten
    assert held(pools, before) == [ReadOutcome.GOOD] * 3


def test_a_staged_copy_waits_for_the_withdrawal_of_what_its_slots_hold(pools: Pools) -> None:
    before, after, _ = prepared(pools)
    asked, told = threading.Event(), threading.Event()

    class Watched(Offsets):
        def wait_durable(self, epoch: Epoch, offset: Offset, timeout_s: float) -> bool:
            asked.set()
            assert told.wait(WAIT_S)
            return super().wait_durable(epoch, offset, timeout_s)

    offsets = Watched()
    offsets.begin_epoch(Epoch(1), Offset(0))
    found: list[Moved] = []
    mover = threading.Thread(target=lambda: found.append(staged(pools, after, offsets, WAIT_S)))
    mover.start()
    assert asked.wait(WAIT_S)
    assert held(pools, before) == [ReadOutcome.GOOD] * 3  # while it waits nothing is written
    offsets.advance_durable(Epoch(1), AFTER)
    told.set()
    mover.join(WAIT_S)
    assert [moved.arrived for moved in found] == [[True] * 3]
    assert held(pools, after) == [ReadOutcome.GOOD] * 3


def test_blocks_behind_one_that_did_not_come_are_proved_by_their_own_checksums() -> None:
    with_lost = random_run(4, BLOCK_BYTES, 3)
    host, objects = HostPool(8, BLOCK_BYTES, Arena, RowCopier(1), huge_pages="off"), memory_objects(BLOCK_BYTES)
    pools = Pools({Tier.HOST: host}, objects)
    try:
        kept = part(with_lost, [0, 2, 3])
        assert all(objects.put(kept.rows, kept.proof))
        slots = [5, 4, 3, 2]
        copy = Copy(
            1, kept.namespace, Tier.OBJECT, Tier.HOST, with_lost.hashes, b"", pack_slots(slots), AFTER, Epoch(1)
        )
        moved = move(copy, pools, Offsets(), WAIT_S, None, RemoteSource(with_lost.hashes))
        assert moved.arrived == [True, False, True, True]
        assert list(host.checksums([5, 3, 2])) == list(kept.proof.checksums)
    finally:
        pools.close()


def test_of_an_object_with_a_block_that_cannot_be_read_nothing_is_put(tmp_path: Path) -> None:
    nvme = NvmePool((tmp_path / "pool",), 8, BLOCK_BYTES, SHAPE, InstanceId("a"), checksums, BlockIo)
    objects = memory_objects(BLOCK_BYTES, blocks=2)
    pools = Pools({Tier.NVME: nvme}, objects)
    try:
        run = random_run(4, BLOCK_BYTES, 5)
        nvme.write([0, 1, 2, 3], run.rows, run.proof, None)
        nvme.write([1], random_run(1, BLOCK_BYTES, 6).rows, random_run(1, BLOCK_BYTES, 6).proof, None)
        copy = Copy(
            1, run.namespace, Tier.NVME, Tier.OBJECT, run.hashes, pack_slots([0, 1, 2, 3]), b"", AFTER, Epoch(1)
        )
        offsets = Offsets()
        offsets.begin_epoch(Epoch(1), Offset(0))
        offsets.advance_durable(Epoch(1), AFTER)
        moved = move(copy, pools, offsets, WAIT_S, np.zeros((4, BLOCK_BYTES), dtype=np.uint8))
        assert moved.outcomes == [ReadOutcome.GOOD, ReadOutcome.CORRUPT, ReadOutcome.GOOD, ReadOutcome.GOOD]
        assert moved.arrived == [False, False, True, True]
        room = run.room()
        found = objects.get(run.namespace, run.hashes, room, range(4), 0)
        assert found.outcomes == [ReadOutcome.MISSING] * 2 + [ReadOutcome.GOOD] * 2
        assert np.array_equal(room[2:], run.rows[2:])
    finally:
        pools.close()


class Told(Wrapped):
    """A pool whose calls are told, and wait for what a test has of them."""

    def __init__(self, pool: SlotPool, call: str, before: Callable[[int], None]) -> None:
        super().__init__(pool)
        self.begun = 0
        self._call, self._before = call, before

    def read(self, *given: Any) -> ReadResult:
        if self._call == "read":
            self.begun += 1
            self._before(self.begun)
        return super().read(*given)

    def write(self, *given: Any) -> None:
        if self._call == "write":
            self.begun += 1
            self._before(self.begun)
        super().write(*given)


def onboard(pools: Pools, run: Run) -> Moved:
    """From NVME into HBM of a GPU, a lane of four blocks between them: two at a time."""
    copy = Copy(
        1, run.namespace, Tier.NVME, Tier.HBM, run.hashes, pack_slots(range(8)), pack_slots(range(8)), AFTER, Epoch(1)
    )
    offsets = Offsets()
    offsets.begin_epoch(Epoch(1), Offset(0))
    offsets.advance_durable(Epoch(1), AFTER)
    assert pools.need_staging(Tier.NVME, Tier.HBM)
    return move(copy, pools, offsets, WAIT_S, np.zeros((4, BLOCK_BYTES), dtype=np.uint8))


@pytest.fixture
def run_in_nvme(pools: Pools) -> Run:
    run = random_run(8, BLOCK_BYTES, 3)
    pools.slots[Tier.NVME].write(range(8), run.rows, run.proof, None)
    return run


def hbm() -> MemoryPool:
    return MemoryPool(Tier.HBM, 8, BLOCK_BYTES, checksums)


def test_the_next_part_is_read_while_one_is_written_to_a_gpu(pools: Pools, run_in_nvme: Run) -> None:
    reads = [threading.Event() for _ in range(5)]
    pools.slots[Tier.NVME] = Told(pools.slots[Tier.NVME], "read", lambda number: reads[number].set())
    target = Told(OutOfReach(hbm()), "write", lambda number: None if number == 4 else waited(reads[number + 1]))
    pools.slots[Tier.HBM] = target
    moved = onboard(pools, run_in_nvme)
    assert moved.arrived == [True] * 8 and target.begun == 4
    rows = run_in_nvme.room()
    target.pool.pool.read(range(8), run_in_nvme.namespace, run_in_nvme.hashes, rows, None)  # type: ignore[attr-defined]
    assert (rows == run_in_nvme.rows).all()


def test_a_lane_is_not_left_while_a_part_is_read_into_it(pools: Pools, run_in_nvme: Run) -> None:
    second, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def read(number: int) -> None:
        if number == 2:
            second.set()
            waited(may_end)

    def refuse(number: int) -> None:
        waited(second)
        raise PoolError("the device failed")

    pools.slots[Tier.NVME] = Told(pools.slots[Tier.NVME], "read", read)
    pools.slots[Tier.HBM] = Told(OutOfReach(hbm()), "write", refuse)
    found: list[Moved] = []

    def copy() -> None:
        found.append(onboard(pools, run_in_nvme))
        ended.set()

    copying = threading.Thread(target=copy)
    copying.start()
    waited(second)
    assert not ended.wait(0.05)
    may_end.set()
    copying.join(WAIT_S)
    assert found[0].arrived == [False] * 8 and found[0].unwritten == "the device failed"


def test_where_there_is_no_thread_parts_are_read_one_after_the_other(
    pools: Pools, run_in_nvme: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pools.slots[Tier.HBM] = OutOfReach(hbm())
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert onboard(pools, run_in_nvme).arrived == [True] * 8


def test_what_a_read_ahead_raises_is_raised_where_its_part_is_taken(pools: Pools, run_in_nvme: Run) -> None:
    def read(number: int) -> None:
        if number == 3:
            raise OSError("broken")

    pools.slots[Tier.NVME] = Told(pools.slots[Tier.NVME], "read", read)
    target = Told(OutOfReach(hbm()), "write", lambda number: None)
    pools.slots[Tier.HBM] = target
    with pytest.raises(OSError, match="broken"):
        onboard(pools, run_in_nvme)
    assert target.begun == 2


def waited(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
