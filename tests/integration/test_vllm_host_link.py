"""HOST in a rank's process: mapped and registered with CUDA while the engine starts, once, and never in a step.

On a GPU that stands in.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from kvbm._native import Arena, RowCopier
from kvbm.core.ids import Tier
from kvbm.engines.vllm import host_link, opening
from kvbm.engines.vllm.host_link import HostLink, leave_host
from kvbm.engines.vllm.host_part import HostPart
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, StepPlan
from kvbm.engines.vllm.opening import ServedEngine, open_scheduler
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.regions import block_regions
from kvbm.engines.vllm.stages import StageBlocks
from kvbm.engines.vllm.worker import RankWorker
from kvbm.pools.host.pinning import CudaRegistrar
from kvbm.pools.host.pool import HostPool
from tests.extras import needed
from tests.gpu_stand_in import Gpu
from tests.vllm_configs import FullAttentionSpec, config_of, tensors_of

torch = needed("torch", "engine")

CONFIG = config_of("LBNHC", [[FullAttentionSpec()] * 3])
RANKS = Ranks((Stage(block_regions(CONFIG).part_bytes),))
ROWS, LONG_S = 9, 60.0


class Host:
    """HOST as the scheduler's process has it."""

    def __init__(self, token: str = "this one") -> None:
        self.pool = HostPool(ROWS, RANKS.row_bytes, Arena, RowCopier(1), huge_pages="off", pins=False)
        self.share = HostShare(os.getpid(), self.pool.fd, self.pool.mapped_bytes, ROWS, RANKS, token=token)

    def close(self) -> None:
        self.pool.close()


@pytest.fixture(autouse=True)
def long_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's thread may be slow to find the scheduler's word."""
    monkeypatch.setattr(host_link, "_FIND_S", LONG_S)
    monkeypatch.setattr(host_link, "_LAST_PIECE_S", LONG_S)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu().install(monkeypatch)


@pytest.fixture
def host(gpu: Gpu) -> Iterator[Host]:
    with closing(Host()) as made:
        yield made


def registrar() -> CudaRegistrar:
    return CudaRegistrar(torch.device("cuda"))


def test_a_rank_registers_host_once_while_the_engine_starts(gpu: Gpu, host: Host, tmp_path: Path) -> None:
    link = HostLink(Meeting("engine", tmp_path), registrar)
    leave_host(Meeting("engine", tmp_path), host.share, LONG_S)
    assert link.settle()
    memory = link.memory_of(host.share)
    assert gpu.registered == {memory.ctypes.data: host.share.mapped_bytes}
    assert gpu.calls["cuThreadExchangeStreamCaptureMode"] == 1  # or a graph that vLLM captures meanwhile would be lost
    rows = host.pool.memory
    assert rows is not None
    rows[3] = 7
    assert (memory[3 * RANKS.row_bytes : 4 * RANKS.row_bytes] == 7).all()
    assert link.memory_of(host.share) is memory
    assert gpu.calls["cudaHostRegister"] == 1
    view = memory[RANKS.row_bytes :]
    del memory
    link.close()
    link.close()
    assert gpu.registered  # a copy that the device has not ended could still write there
    del view
    gc.collect()
    assert gpu.registered == {}


def test_what_a_plan_names_counts_and_it_is_not_registered_then(gpu: Gpu, host: Host, tmp_path: Path) -> None:
    with closing(Host("that one")) as other:
        link = HostLink(Meeting("engine", tmp_path), registrar)
        leave_host(Meeting("engine", tmp_path), other.share, LONG_S)  # of an engine that has had this id
        assert link.settle()
        rows = host.pool.memory
        assert rows is not None
        rows[0] = 9
        memory = link.memory_of(host.share)
        assert (memory[: RANKS.row_bytes] == 9).all()
        assert memory.ctypes.data not in gpu.registered
        assert gpu.calls["cudaHostRegister"] == 1
        link.close()


def test_an_engine_whose_scheduler_says_nothing_starts_all_the_same(
    gpu: Gpu, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_link, "_FIND_S", 0.0)
    link = HostLink(Meeting("engine", tmp_path), registrar)
    with structlog.testing.capture_logs() as logs:
        assert not link.settle()
    assert [log["event"] for log in logs] == ["host.not_found"]
    assert len(link.memory_of(host.share)) == host.share.mapped_bytes
    link._thread.join(LONG_S)  # nobody waits for that word any more
    assert not link._thread.is_alive()
    link.close()
    assert gpu.calls["cudaHostRegister"] == 0


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_rank_that_gets_no_thread_maps_host_at_the_first_copy(
    gpu: Gpu, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with structlog.testing.capture_logs() as logs:
        link = HostLink(Meeting("engine", tmp_path), registrar)
        assert not link.settle()
    assert [(log["event"], log["why"]) for log in logs] == [("host.not_found", "can't start new thread")]
    assert len(link.memory_of(host.share)) == host.share.mapped_bytes
    link.close()
    assert gpu.calls["cudaHostRegister"] == 0


def test_a_host_whose_first_rank_gets_no_thread_has_no_rows(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    part = HostPart(host.share, 1)
    assert part.is_untold
    share, why = part.take()
    assert share is None and "can't start new thread" in why
    assert not part.is_untold
    part.close()


def test_memory_that_cuda_refuses_is_mapped_and_told(gpu: Gpu, host: Host, tmp_path: Path) -> None:
    gpu.refuses = 2
    link = HostLink(Meeting("engine", tmp_path), registrar)
    with structlog.testing.capture_logs() as logs:
        leave_host(Meeting("engine", tmp_path), host.share, LONG_S)
        assert link.settle()
    assert [log["why"] for log in logs if log["event"] == "host.unpinned"] == ["cudaHostRegister answers 2"]
    assert len(link.memory_of(host.share)) == host.share.mapped_bytes
    link.close()


def job(id: int, blocks: list[int], rows: list[int], request: str = "") -> Job:
    return Job(id, np.array(blocks, "<u4").tobytes(), np.array(rows, "<u4").tobytes(), request)


@pytest.mark.parametrize("is_said", [True, False])
def test_no_step_of_a_rank_registers_anything(gpu: Gpu, host: Host, tmp_path: Path, is_said: bool) -> None:
    meeting = Meeting("engine", tmp_path)
    worker = RankWorker(0, CONFIG, threads=1, meeting=meeting)
    tensors = tensors_of(CONFIG)
    worker.register(tensors)
    assert worker.refused == ""
    if is_said:
        leave_host(meeting, host.share, LONG_S)
        assert worker.settle_host()
    before = gpu.calls["cudaHostRegister"]
    worker.begin(StepPlan(host.share, stores=[job(1, [4], [2])], loads=[job(2, [1], [7], "r")]))
    assert worker.flush(LONG_S)
    answers = worker.finish()
    assert answers.loaded == {2: 1} and not answers.failed and answers.stored[1][0].why == ""
    assert gpu.calls["cudaHostRegister"] == before
    worker.close()


def engine(tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The configurations of an engine as the scheduler's process has them."""
    names = {name: None for name in ("quantization", "quantization_config", "hf_overrides", "multimodal_config")}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision="0" * 40,
            seed=0,
            max_model_len=64,
            dtype="float32",
            model_weights="",
            hf_config=SimpleNamespace(to_dict=dict),
            **names,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            nnodes_within_dp=1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config=None,
        lora_config=None,
        speculative_config=None,
        additional_config={},
    )
    extra = {"pools.host.slots": ROWS, "pools.nvme.slots": 8, "instance.data_dir": str(tmp_path / "data")}
    return config, extra


def test_the_schedulers_process_calls_nothing_of_cuda(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "machine_words", lambda: "vllm on a GPU")
    config, extra = engine(tmp_path)
    cache = config_of("LBNHC", [[FullAttentionSpec()] * 3])
    cache.cache_hit_alignment_tokens, cache.hash_block_size = None, None  # type: ignore[attr-defined]
    meeting = Meeting("engine", tmp_path)
    blocks = StageBlocks.of(config, cache)
    assert blocks.why == ""
    wanted = SimpleNamespace(kv_connector_extra_config=extra, kv_role="kv_both")
    scheduler = open_scheduler(ServedEngine(config, cache, blocks), [blocks], wanted, meeting)
    plan = scheduler.plan({}, 0, ())
    scheduler.answered(Answers())
    scheduler.take_numbers()
    assert scheduler.manager.pools.slots[Tier.HOST].memory is not None
    assert not plan.loads
    link = HostLink(meeting, None)  # a rank finds what was left, in another thread than a GPU's
    assert link.settle()
    link.close()
    scheduler.close()
    assert dict(gpu.calls) == {}
    assert gpu.registered == {}


CLAIMING = """
import os, sys
from pathlib import Path
from kvbm.engines.vllm.meeting import Meeting
meeting = Meeting("chosen", Path(sys.argv[1]))
print(meeting.claim(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_an_engine_that_is_killed_leaves_its_id_to_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIMING, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=4 * LONG_S)
    assert done.stdout == "True\n"
    assert Meeting("chosen", tmp_path).claim()
