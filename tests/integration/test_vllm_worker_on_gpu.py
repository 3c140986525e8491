"""A worker's half on a GPU that stands in: HOST is registered at the start, and a step's copies wait for no forward
that they need not wait for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvbm._native import Arena, RowCopier, checksums
from kvbm.engines.vllm import host_link
from kvbm.engines.vllm import worker as worker_module
from kvbm.engines.vllm.host_link import leave_host
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, StepPlan
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.regions import block_regions
from kvbm.engines.vllm.worker import RankWorker
from kvbm.pools.hbm import cuda
from kvbm.pools.hbm.ways import Ways
from kvbm.pools.host.pool import HostPool
from tests.eventually import eventually
from tests.extras import needed
from tests.gpu_stand_in import Gpu
from tests.vllm_configs import FullAttentionSpec, config_of, tensors_of

torch = needed("torch", "engine")

CONFIG = config_of("LBHNC", [[FullAttentionSpec()] * 3])
RANKS = Ranks((Stage(block_regions(CONFIG).part_bytes),))
ROWS, LONG_S = 9, 60.0


class Rank:
    """A worker with tensors of a GPU that stands in, and HOST."""

    def __init__(self, folder: Path) -> None:
        self.pool = HostPool(ROWS, RANKS.row_bytes, Arena, RowCopier(1), huge_pages="off", pins=False)
        meeting = Meeting("engine", folder)
        named = os.getpid(), self.pool.fd, self.pool.mapped_bytes, ROWS, RANKS
        self.share = HostShare(*named, token="a token")
        rows = self.pool.memory
        assert rows is not None
        self.rows = rows
        self.rows[:] = np.random.default_rng(5).integers(0, 256, rows.shape, dtype=np.uint8)
        self.worker = RankWorker(0, CONFIG, threads=1, meeting=meeting)
        self.tensors = tensors_of(CONFIG)
        self.worker.register(self.tensors)
        assert self.worker.refused == ""
        leave_host(meeting, self.share, LONG_S)
        assert self.worker.settle_host()

    def fill(self, block: int, value: float) -> None:
        """What a forward does with a block it computes."""
        for view in self.tensors.values():
            view[block] = value

    def block(self, block: int) -> bytes:
        return b"".join(view[block].contiguous().view(torch.uint8).numpy().tobytes() for view in self.tensors.values())

    def answered(self, loaded: int = 0, stored: int = 0) -> Answers:
        """Answers, once so many jobs of each kind are over."""
        answers = Answers()

        def are_there() -> bool:
            answers.merge(self.worker.finish())
            return len(answers.loaded) >= loaded and len(answers.stored) >= stored

        eventually(are_there, f"{loaded} loads and {stored} stores are not over")
        return answers

    def close(self) -> None:
        self.worker.close()
        self.pool.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(host_link, "_FIND_S", LONG_S)  # a rank's thread may be slow to find the scheduler's word
    made = Gpu().install(monkeypatch)
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    monkeypatch.setattr(cuda, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(cuda, "measured_ways", lambda device: Ways(1, 1))
    monkeypatch.setattr(worker_module, "_kind_of", lambda device: "cuda")
    return made


@pytest.fixture
def rank(gpu: Gpu, tmp_path: Path) -> Iterator[Rank]:
    with closing(Rank(tmp_path)) as made:
        yield made
        gpu.default.is_held = False
        gpu.run()


def job(id: int, blocks: list[int], rows: list[int], request: str = "", after: int = -1) -> Job:
    return Job(id, np.array(blocks, "<u4").tobytes(), np.array(rows, "<u4").tobytes(), request, after=after)


def test_the_first_step_registers_nothing_and_copies_straight_from_and_to_host(gpu: Gpu, rank: Rank) -> None:
    assert list(gpu.registered.values()) == [rank.share.mapped_bytes]
    before = gpu.calls["cudaHostRegister"]
    kept = rank.block(4)
    gpu.calls["cuMemcpyBatchAsync"] = 0  # each side has tried its way
    rank.worker.begin_step(1)
    rank.worker.begin(StepPlan(rank.share, step=1, stores=[job(1, [4], [2])], loads=[job(2, [1], [7], "r")]))
    answers = rank.answered(1, 1)
    assert rank.rows[2].tobytes() == kept and rank.block(1) == rank.rows[7].tobytes()
    assert answers.stored[1][0].checksums == checksums(rank.rows[[2]].copy()).astype("<u4").tobytes()
    assert gpu.calls["cudaHostRegister"] == before
    assert gpu.calls["cuMemcpyBatchAsync"] == 2
    host = rank.worker._host
    assert host is not None and cuda.device_address(host) == host.ctypes.data  # so no run goes through staging


def test_a_load_is_over_while_the_forward_of_its_step_and_those_that_never_had_its_blocks_run(
    gpu: Gpu, rank: Rank
) -> None:
    rank.worker.begin_step(1)
    gpu.run()
    gpu.default.is_held = True
    gpu.default.queue(lambda: rank.fill(3, 1.0))  # the forward of step 1
    rank.worker.begin(StepPlan(step=1))
    rank.worker.begin_step(2)
    gpu.default.queue(lambda: rank.fill(4, 2.0))  # of step 2, launched before vLLM asks for the step's copies
    loads = [job(1, [0], [6], "a", after=0), job(2, [3], [7], "b", after=1), job(3, [5], [8], "c")]
    rank.worker.begin(StepPlan(rank.share, step=2, loads=loads, stores=[job(4, [2], [1])]))
    answers = rank.answered(loaded=1)
    assert answers.loaded == {1: 1}
    assert rank.block(0) == rank.rows[6].tobytes()
    assert rank.worker.under_way == 3  # behind the forward of step 1, which has not run
    gpu.default.is_held = False
    answers = rank.answered(2, 1)
    assert sorted(answers.loaded) == [2, 3] and not answers.failed
    assert rank.block(3) == rank.rows[7].tobytes()


def test_stores_do_not_wait_for_the_forward_of_their_step(gpu: Gpu, rank: Rank) -> None:
    kept = rank.block(2)
    rank.worker.begin_step(1)
    gpu.run()
    gpu.default.is_held = True
    gpu.default.queue(lambda: rank.fill(3, 1.0))
    rank.worker.begin(StepPlan(rank.share, step=1, stores=[job(1, [2], [4])]))
    rank.answered(stored=1)
    assert rank.rows[4].tobytes() == kept


def test_a_plan_without_a_number_goes_behind_all_that_is_queued(gpu: Gpu, rank: Rank) -> None:
    gpu.default.is_held = True
    gpu.default.queue(lambda: rank.fill(3, 1.0))
    rank.worker.begin(StepPlan(rank.share, stores=[job(1, [3], [4])]))
    assert not rank.worker.flush(0.05)
    gpu.default.is_held = False
    rank.answered(stored=1)
    assert rank.rows[4].tobytes() == rank.block(3)
