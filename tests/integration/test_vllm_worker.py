"""A worker's half over real tensors on the CPU and a real HOST: what arrives, what is answered, and what happens when
it cannot be.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm._native import Arena, RowCopier, checksums, crc32c
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, StepPlan
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.regions import block_regions
from kvbm.engines.vllm.worker import RankWorker, Received
from kvbm.pools.host.pool import HostPool
from tests.extras import needed
from tests.vllm_configs import LAYOUTS, Config, FullAttentionSpec, SlidingWindowSpec, config_of, tensors_of

torch = needed("torch", "engine")

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
ROWS = 9
FULL = FullAttentionSpec()


class Host:
    """A HOST pool for ranks, and what the scheduler says of it."""

    def __init__(self, ranks: Ranks) -> None:
        self.pool = HostPool(ROWS, ranks.row_bytes, Arena, RowCopier(1), huge_pages="off")
        self.share = HostShare(os.getpid(), self.pool.fd, self.pool.mapped_bytes, ROWS, ranks)
        assert self.pool.memory is not None
        self.rows = self.pool.memory
        self.rows[:] = np.random.default_rng(5).integers(0, 256, self.rows.shape, dtype=np.uint8)


class Rank:
    """A worker with its tensors."""

    def __init__(self, rank: int, ranks: Ranks, config: Config, seed: int | None = None) -> None:
        self.config = config
        self.tensors = tensors_of(config, rank if seed is None else seed)
        self.worker = RankWorker(rank, config, threads=1)
        self.worker.register(self.tensors)

    @property
    def memory(self) -> np.ndarray:
        """The whole allocation, in place."""
        storage = next(iter(self.tensors.values())).untyped_storage()
        whole: np.ndarray = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return whole

    def block(self, block: int) -> np.ndarray:
        """A block's bytes, by the regions."""
        return np.concatenate(
            [
                self.memory[region.offset + block * region.stride :][: region.bytes]
                for region in block_regions(self.config).regions
            ]
        )

    def views_of(self, block: int) -> list[Any]:
        """What each layer sees of a block, copied."""
        pieces = self.config.kernel_blocks
        return [view[block * pieces : (block + 1) * pieces].clone() for view in self.tensors.values()]

    def done(self) -> Answers:
        assert self.worker.flush(LONG_S)
        return self.worker.finish()


def job(id: int, blocks: Sequence[int], rows: Sequence[int], request: str = "") -> Job:
    return Job(id, np.array(blocks, "<u4").tobytes(), np.array(rows, "<u4").tobytes(), request)


def one_rank(config: Config) -> Ranks:
    return Ranks((Stage(block_regions(config).part_bytes),))


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(left, right, strict=True))


@pytest.fixture
def rank() -> Iterator[Rank]:
    config = config_of("LBNHC", [[FULL] * 3])
    made = Rank(0, one_rank(config), config)
    assert made.worker.refused == ""
    yield made
    made.worker.close()


@pytest.fixture
def host(rank: Rank) -> Host:
    return Host(one_rank(rank.config))


SHAPES = {
    **{layout: config_of(layout, [[FULL] * 3]) for layout in LAYOUTS},
    "kernel blocks": config_of("LBNHC", [[FULL] * 3], kernel_blocks=2),
    "overlaid": config_of("LBNHC", [[FULL] * 3, [SlidingWindowSpec(sliding_window=8)] * 2]),
    "packed and overlaid": config_of("BLHNC", [[FULL, FullAttentionSpec(head_size=24)], [FULL]]),
    "pages of two sizes": config_of("LBHNC", [[FULL, FullAttentionSpec(head_size=24), FULL]]),
    "padded": config_of("LBNHC", [[FullAttentionSpec(padding_bytes=64)] * 2]),
    "a tail": replace(config_of("BLNHC", [[FULL] * 2]), tail_bytes=4096),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_comes_back_into_another_block_as_it_was(shape: str) -> None:
    config = SHAPES[shape]
    rank = Rank(0, one_rank(config), config)
    host = Host(one_rank(config))
    blocks, rows, others = [4, 1], [7, 2], [0, 5]
    wanted = [rank.views_of(block) for block in blocks]
    rank.worker.begin(StepPlan(host.share, stores=[job(1, blocks, rows)]))
    answers = rank.done()
    assert (host.rows[rows] == np.stack([rank.block(block) for block in blocks])).all()
    assert answers.stored[1][0].checksums == checksums(host.rows[rows].copy()).astype("<u4").tobytes()
    before = rank.memory.copy()
    rank.worker.begin(StepPlan(loads=[job(2, others, rows, "r")]))
    answers = rank.done()
    assert answers == Answers(loaded={2: 1})
    assert [rank.block(block).tobytes() for block in others] == [host.rows[row].tobytes() for row in rows]
    assert all(same(rank.views_of(block), kept) for block, kept in zip(others, wanted, strict=True))
    touched = np.zeros(len(before), dtype=bool)
    for region in block_regions(config).regions:
        for block in others:
            touched[region.offset + block * region.stride :][: region.bytes] = True
    assert (rank.memory[~touched] == before[~touched]).all()
    rank.worker.close()


def test_a_step_without_anything_to_do_answers_nothing(rank: Rank) -> None:
    rank.worker.begin(StepPlan())
    assert not rank.worker.finish()
    assert not rank.worker.finish(wait_s=0.002)
    assert rank.worker.flush(LONG_S)
    assert rank.worker.take_numbers() == {}


def test_a_rank_is_idle_once_everything_is_answered_and_received(rank: Rank, host: Host) -> None:
    assert rank.worker.is_idle
    rank.worker.begin(StepPlan(host.share, loads=[job(1, [0], [0], "a")]))
    assert not rank.worker.is_idle
    assert rank.done().loaded == {1: 1}
    assert not rank.worker.is_idle  # who waits for the load was not told
    assert rank.worker.received() == Received({"a"}, set())
    assert rank.worker.is_idle
    rank.worker.refuse("its tensors are elsewhere")
    assert not rank.worker.is_idle
    assert rank.worker.finish().refused
    assert rank.worker.is_idle


def test_each_end_is_answered_once_and_counted(rank: Rank, host: Host) -> None:
    rank.worker.begin(
        StepPlan(
            host.share, loads=[job(1, [0, 1], [0, 1], "a")], stores=[job(2, [2, 3, 4], [3, 4, 5]), job(3, [5], [8])]
        )
    )
    assert rank.worker.under_way == 3
    answers = Answers()
    while rank.worker.under_way:  # pytest's own timeout bounds it
        answers.merge(rank.worker.finish(wait_s=LONG_S))
    assert answers.loaded == {1: 1} and sorted(answers.stored) == [2, 3]
    assert not rank.worker.finish()
    assert rank.worker.received() == Received({"a"}, set())
    assert rank.worker.received() == Received(set(), set())
    numbers = rank.worker.take_numbers()
    part_bytes = block_regions(rank.config).part_bytes
    assert len(numbers.pop("load_seconds")) == 1 and len(numbers.pop("store_seconds")) == 2
    assert numbers == {
        "loaded_blocks": 2,
        "loaded_bytes": 2 * part_bytes,
        "stored_blocks": 4,
        "stored_bytes": 4 * part_bytes,
    }
    assert rank.worker.take_numbers() == {}


def test_a_request_is_received_once_its_last_load_has_ended(rank: Rank, host: Host) -> None:
    loads = [job(1, [0], [0], "a"), job(2, [1], [99], "a"), job(3, [2], [2], "b")]
    rank.worker.begin(StepPlan(host.share, loads=loads))
    assert rank.done().loaded == {1: 1, 2: 1, 3: 1}
    assert rank.worker.received() == Received({"a", "b"}, {"a"})


def test_two_ranks_fill_a_row_side_by_side_and_their_checksums_join() -> None:
    config = config_of("BLNHC", [[FULL] * 2])
    ranks = Ranks((Stage(block_regions(config).part_bytes),), tensor=2)
    host = Host(ranks)
    pair, size = [Rank(rank, ranks, config) for rank in range(2)], block_regions(config).part_bytes
    blocks, rows = [1, 4], [3, 8]
    before = host.rows.copy()
    answers = Answers()
    for rank in pair:
        rank.worker.begin(StepPlan(host.share, stores=[job(1, blocks, rows)]))
        answers.merge(rank.done())
    for block, row in zip(blocks, rows, strict=True):
        assert host.rows[row].tobytes() == b"".join(rank.block(block).tobytes() for rank in pair)
    untouched = np.setdiff1d(np.arange(ROWS), rows)
    assert (host.rows[untouched] == before[untouched]).all()
    assert sorted(answers.stored[1]) == [0, 1]
    sums = np.stack([np.frombuffer(answers.stored[1][part].checksums, "<u4") for part in range(2)])
    assert (sums == [[crc32c(rank.block(block).tobytes()) for block in blocks] for rank in pair]).all()
    for rank in pair:
        rank.worker.begin(StepPlan(loads=[job(2, [0, 5], rows, "r")]))
    for at, rank in enumerate(pair):
        assert rank.done() == Answers(loaded={2: 1})
        part = slice(at * size, (at + 1) * size)
        assert (np.stack([rank.block(0), rank.block(5)]) == host.rows[rows, part]).all()
        rank.worker.close()


def test_stages_of_different_sizes_fill_a_row_one_behind_the_other() -> None:
    configs = [config_of("LBNHC", [[FULL] * layers]) for layers in (3, 3, 1, 1)]
    ranks = Ranks((Stage(block_regions(configs[0]).part_bytes), Stage(block_regions(configs[2]).part_bytes)), tensor=2)
    host = Host(ranks)
    four = [Rank(rank, ranks, config) for rank, config in enumerate(configs)]
    blocks, rows = [1, 4], [3, 8]
    answers = Answers()
    for rank in four:
        rank.worker.begin(StepPlan(host.share, stores=[job(1, blocks, rows)]))
        answers.merge(rank.done())
    for block, row in zip(blocks, rows, strict=True):
        assert host.rows[row].tobytes() == b"".join(rank.block(block).tobytes() for rank in four)
    assert sorted(answers.stored[1]) == [0, 1, 2, 3]
    for rank in four:
        rank.worker.begin(StepPlan(loads=[job(2, [0, 5], rows, "r")]))
        answers.merge(rank.done())
        assert [rank.block(block).tobytes() for block in (0, 5)] == [rank.block(block).tobytes() for block in blocks]
        rank.worker.close()
    assert answers.loaded == {2: 4}


def test_of_ranks_with_the_same_kv_one_stores_and_all_load() -> None:
    config = config_of("LBNHC", [[FULL]])
    ranks = Ranks((Stage(block_regions(config).part_bytes, 2),), tensor=4)
    host = Host(ranks)
    four = [Rank(rank, ranks, config, seed=rank // 2) for rank in range(4)]
    answers = Answers()
    for rank in four:
        rank.worker.begin(StepPlan(host.share, stores=[job(1, [2], [6])]))
        answers.merge(rank.done())
    assert sorted(answers.stored[1]) == [0, 1]
    assert host.rows[6].tobytes() == four[0].block(2).tobytes() + four[2].block(2).tobytes()
    for rank in four:
        rank.worker.begin(StepPlan(loads=[job(2, [0], [6], "r")]))
        answers.merge(rank.done())
    assert answers.loaded == {2: 4}
    for rank in four:
        assert (rank.block(0) == rank.block(2)).all()
        rank.worker.close()


def test_a_host_without_the_scheduler_takes_memory_for_its_ranks_alone() -> None:
    configs = [config_of("LBNHC", [[FULL] * layers]) for layers in (2, 2, 3, 3)]
    stages = tuple(Stage(block_regions(configs[at]).part_bytes) for at in (0, 2))
    ranks = Ranks(stages, tensor=2, hosts=2)
    host = Host(ranks)
    assert host.share.ranks.row_bytes_on(0) == host.rows.shape[1] == 2 * stages[0].part_bytes
    four = [Rank(rank, ranks, config) for rank, config in enumerate(configs)]
    wanted = host.share._replace(huge_pages="off")
    found = Answers()
    for rank in four:
        rank.worker.begin(StepPlan(wanted))
    while not found.hosts:  # pytest's own timeout bounds it
        for rank in four:
            found.merge(rank.worker.finish())
    assert all(rank.worker.is_idle for rank in four)
    other = found.hosts.pop(1)
    assert not found and (other.host, other.rows) == (1, ROWS)
    blocks, rows = [1, 4], [3, 8]
    before = host.rows.copy()
    answers = Answers()
    for rank in four:
        rank.worker.begin(StepPlan(wanted, (other,), stores=[job(1, blocks, rows)]))
        answers.merge(rank.done())
    assert sorted(answers.stored[1]) == [0, 1, 2, 3] and not any(part.why for part in answers.stored[1].values())
    for block, row in zip(blocks, rows, strict=True):
        assert host.rows[row].tobytes() == b"".join(rank.block(block).tobytes() for rank in four[:2])
    untouched = np.setdiff1d(np.arange(ROWS), rows)
    assert (host.rows[untouched] == before[untouched]).all()
    for rank in four:
        rank.worker.begin(StepPlan(wanted, (other,), loads=[job(2, [0, 5], rows, "r")]))
        answers.merge(rank.done())
        assert [rank.block(block).tobytes() for block in (0, 5)] == [rank.block(block).tobytes() for block in blocks]
    assert answers.loaded == {2: 4}
    for rank in four:
        rank.worker.close()


def test_a_host_without_room_takes_no_part() -> None:
    config = config_of("LBNHC", [[FULL]])
    ranks = Ranks((Stage(block_regions(config).part_bytes),), tensor=2, hosts=2)
    rank = Rank(1, ranks, config)
    rank.worker.begin(StepPlan(Host(ranks).share._replace(rows=1 << 50)))
    while rank.worker.refused == "":  # pytest's own timeout bounds it
        answers = rank.worker.finish()
    assert "rank 1: host 1 has no room for HOST" in answers.refused
    rank.worker.begin(StepPlan(Host(ranks).share, stores=[job(1, [0], [0])]))
    assert "no room for HOST" in rank.worker.finish().stored[1][1].why
    rank.worker.close()


CHILD = """
import os, sys
from kvbm.engines.vllm.metadata import HostShare, StepPlan
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.regions import block_regions
from tests.integration.test_vllm_worker import FULL, ROWS, Rank, job
from tests.vllm_configs import config_of
pid, fd, mapped = map(int, sys.argv[1:])
config = config_of("LHBNC", [[FULL] * 2])
ranks = Ranks((Stage(block_regions(config).part_bytes),), tensor=2)

def work(rank):
    made = Rank(rank, ranks, config)
    share = HostShare(pid, fd, mapped, ROWS, ranks)
    made.worker.begin(StepPlan(share, loads=[job(1, [0], [0], "r")], stores=[job(2, [3, 5], [4, 1])]))
    answers = made.done()
    assert answers.loaded == {1: 1} and not answers.failed and not answers.refused, answers
    print(made.block(0).tobytes().hex(), made.block(3).tobytes().hex(), made.block(5).tobytes().hex(),
          answers.stored[2][rank].checksums.hex(), flush=True)

if os.fork():  # each rank is a process
    assert os.wait()[1] == 0
    work(1)
else:
    work(0)
"""


def test_ranks_in_processes_of_their_own_share_the_rows() -> None:
    config = config_of("LHBNC", [[FULL] * 2])
    ranks = Ranks((Stage(block_regions(config).part_bytes),), tensor=2)
    host = Host(ranks)
    share, size = host.share, block_regions(config).part_bytes
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, (share.pid, share.fd, share.mapped_bytes))],
        capture_output=True,
        text=True,
        timeout=4 * LONG_S,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for rank, said in zip(range(2), ran.stdout.splitlines(), strict=True):
        loaded, *stored, sums = map(bytes.fromhex, said.split())
        part = slice(rank * size, (rank + 1) * size)
        assert host.rows[0, part].tobytes() == loaded
        assert [host.rows[row, part].tobytes() for row in (4, 1)] == stored
        assert np.frombuffer(sums, "<u4").tolist() == [crc32c(block) for block in stored]


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_jobs_that_name_what_is_not_there_fail_in_words_and_move_nothing(rank: Rank, host: Host) -> None:
    before = rank.memory.copy(), host.rows.copy()
    rank.worker.begin(
        StepPlan(
            host.share,
            loads=[job(1, [6], [0], "a"), job(2, [0], [ROWS], "b"), job(3, [0, 1], [0], "c")],
            stores=[job(4, [0], [ROWS]), job(5, [0], [0])._replace(blocks=b"abc")],
        )
    )
    answers = rank.done()
    assert sorted(answers.failed) == [1, 2, 3] and answers.loaded == {1: 1, 2: 1, 3: 1}
    assert answers.failed[1] == "rank 0: slot 6 wanted, there are 6"
    assert answers.stored[4][0].checksums == b"" and "row 9 wanted, there are 9" in answers.stored[4][0].why
    assert answers.stored[5][0].checksums == b"" and answers.stored[5][0].why
    assert rank.worker.received() == Received({"a", "b", "c"}, {"a", "b", "c"})
    assert rank.worker.take_numbers() == {"failed_loads": 3, "failed_stores": 2}
    assert (rank.memory == before[0]).all() and (host.rows == before[1]).all()


def test_a_host_that_cannot_be_mapped_is_refused_and_jobs_fail(rank: Rank, host: Host) -> None:
    for share, words in (
        (host.share._replace(fd=9999), "HOST pool"),
        (host.share._replace(mapped_bytes=host.share.mapped_bytes * 2), "HOST pool"),
        (host.share._replace(ranks=Ranks(host.share.ranks.stages, tensor=2)), "HOST has 9 rows of"),
        (host.share._replace(rows=ROWS * 10**6), "HOST has 9000000 rows"),
        (host.share._replace(ranks=Ranks((Stage(8),))), "the scheduler was told 8"),
        (host.share._replace(ranks=host.share.ranks._replace(decode=2, tensor=2, interleave=4)), "told 4"),
        (host.share._replace(ranks=Ranks(())), "the scheduler knows 0 ranks"),
    ):
        made = Rank(0, one_rank(rank.config), rank.config)
        made.worker.begin(StepPlan(share, loads=[job(1, [0], [0], "a")], stores=[job(2, [1], [1])]))
        answers = made.done()
        assert words in answers.refused and answers.refused.startswith("rank 0: ")
        assert words in answers.failed[1] and words in answers.stored[2][0].why
        assert not made.worker.finish()  # said once
        made.worker.begin(StepPlan(host.share, loads=[job(3, [0], [0], "a")]))  # and no other share makes it good again
        assert made.done().failed
        made.worker.close()


def _moved(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "group0.layer1": tensors["group0.layer1"].clone()}


def _lost(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: view for name, view in tensors.items() if name != "group0.layer2"}


def _listed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: [view] for name, view in tensors.items()}


def _swapped(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "group0.layer1": tensors["group0.layer2"], "group0.layer2": tensors["group0.layer1"]}


def _fewer(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: view[:-1] for name, view in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_moved, "layer group0.layer1 lies in other memory"),
        (_lost, "layer group0.layer2 has no tensor"),
        (_listed, "layer group0.layer0 has list; one tensor is served"),
        (_swapped, "layer group0.layer1 has 6 blocks 256 bytes apart from byte 3072 on"),
        (_fewer, "layer group0.layer0 has 5 blocks"),
    ],
)
def test_tensors_that_are_not_where_vllm_says_are_refused(change: Any, words: str) -> None:
    config = config_of("LBNHC", [[FULL] * 3])
    worker = RankWorker(0, config, threads=1)
    worker.register(change(tensors_of(config)))
    assert words in worker.refused
    host = Host(one_rank(config))
    worker.begin(StepPlan(host.share, loads=[job(1, [0], [0], "a")]))
    answers = worker.finish()
    assert words in answers.refused and words in answers.failed[1]
    worker.close()


def test_a_part_of_another_size_than_the_scheduler_was_told_is_refused() -> None:
    config = config_of("LBNHC", [[FULL]])
    worker = RankWorker(0, config, threads=1)
    worker.register(tensors_of(config))
    worker.begin(StepPlan(Host(Ranks((Stage(1000),))).share))
    assert worker.finish().refused == "rank 0: a block has 256 bytes on rank 0, the scheduler was told 1000"


def test_jobs_before_the_tensors_or_host_are_known_fail_in_words() -> None:
    config = config_of("LBNHC", [[FULL]])
    ranks = one_rank(config)
    worker = RankWorker(0, config, threads=1)
    host = Host(ranks)
    worker.begin(StepPlan(host.share, loads=[job(1, [0], [0], "a")]))
    assert worker.finish().failed == {1: "rank 0: its tensors are not registered"}
    other = RankWorker(0, config, threads=1)
    other.register(tensors_of(config))
    other.begin(StepPlan(None, loads=[job(1, [0], [0], "a")]))
    assert other.finish().failed == {1: "rank 0: nobody has said where HOST is"}
    worker.close()
    other.close()


def test_a_load_that_could_not_be_planned_is_answered_as_failed(rank: Rank, host: Host) -> None:
    rank.worker.begin(StepPlan(host.share, loads=[job(1, [], [], "a")._replace(why="no plan")]))
    assert rank.worker.finish().failed == {1: "rank 0: no plan"}
    assert rank.worker.received() == ({"a"}, {"a"})


def test_while_the_engine_sleeps_nothing_is_copied_and_what_was_under_way_has_ended(rank: Rank, host: Host) -> None:
    rank.worker.begin(StepPlan(host.share, stores=[job(1, [0], [0])]))
    rank.worker.suspend()
    assert rank.worker.under_way == 0
    assert rank.worker.finish().stored[1][0].why == ""
    before = host.rows.copy()
    rank.worker.begin(StepPlan(host.share, loads=[job(2, [1], [0], "a")], stores=[job(3, [2], [5])]))
    answers = rank.done()
    assert "the engine sleeps" in answers.failed[2] and "the engine sleeps" in answers.stored[3][0].why
    assert (host.rows == before).all()
    assert rank.worker.refused == ""
    rank.worker.resume()
    rank.worker.begin(StepPlan(host.share, stores=[job(4, [2], [5])]))
    assert rank.done().stored[4][0].why == ""
    assert host.rows[5].tobytes() == rank.block(2).tobytes()


def test_a_closed_worker_lets_go_of_tensors_and_host(rank: Rank, host: Host) -> None:
    gc.collect()
    before = Path("/proc/self/maps").read_text().count("kvbm-host")
    rank.worker.begin(StepPlan(host.share, stores=[job(1, [0, 1], [0, 1])]))
    rank.worker.close()
    rank.worker.close()
    assert rank.worker.flush(LONG_S) and not rank.worker.finish()
    mapped = Path("/proc/self/maps").read_text().count("kvbm-host")
    host.pool.close()
    del host.rows
    assert mapped == before
