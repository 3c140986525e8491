"""Engines of several stages (pipeline parallelism) and of several data-parallel ranks: cold, warm, after a restart,
over another's volume, and with faults.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import patches, scenarios
from tests.engines.vllm.harness.engine import Engine, EngineDiedError, EngineError
from tests.engines.vllm.harness.models import STATES
from tests.engines.vllm.harness.setups import with_kvbm, with_others
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import OUTPUT_TOKENS, Ask
from tests.eventually import eventually
from tests.servers import free_port

FULL = pytest.mark.engines_full
WAIT_S = 120.0
NVME = {"pools.nvme.slots": 400}
PATCHES = "tests.engines.vllm.harness.patches"
PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's variable: layers of each stage
DENSE = {"prefix_cache_retention_interval": None}
TWO: dict[str, Any] = {"stages": 2, "core": "process"}


def reusable(asks: list[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


def uneven(*layers: int) -> dict[str, Any]:
    """A hybrid model whose stages have so many layers."""
    return {**TWO, "options": DENSE, "environment": {PARTITION: ",".join(map(str, layers))}}


ENGINES = {
    "two stages": ("llama", TWO),
    "two stages of two ranks": ("llama", {**TWO, "ranks": 2}),
    "a hybrid model, uneven stages": ("gemma", uneven(4, 2)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "two stages" else FULL) for name in ENGINES])
def test_stages_hit_in_host_and_after_a_restart_in_nvme(engines, truth_of, tmp_path, name):
    kind, setup = ENGINES[name]
    truth = truth_of(kind)
    asks = [truth.prompt(f"stages-{tokens}", tokens) for tokens in (33, 150, 300, 481)]
    described = with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0] * len(asks))
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
        engine.offload()
        assert engine.in_core("refusal") == ""
    with engines.running(described) as engine:
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
        assert engine.in_core("counted")["hits_NVME"] > 0


# -- over the volume of another ----------------------------------------------------------------------------------------

OTHERS = {
    "one stage": ("llama", TWO, {}),
    "two ranks instead": ("llama", TWO, {"ranks": 2, "core": "process"}),
    "layers moved to the other stage": ("gemma", uneven(4, 2), uneven(2, 4)),  # rows of the same size
}


@FULL
@pytest.mark.parametrize("name", OTHERS)
def test_over_the_volume_of_other_stages_an_engine_starts_cold(engines, truth_of, tmp_path, name):
    kind, before, after = OTHERS[name]
    truth = truth_of(kind)
    asks = truth.prompts("rollout", 2, 300)
    with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", NVME, **before)) as engine:
        scenarios.ask(engine, truth, asks, [0] * 2)
        engine.offload()
    for setup in (after, before):  # and back
        with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)) as engine:
            scenarios.ask(engine, truth, asks, [0] * 2 if setup is after else None)
            scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
            assert engine.in_core("refusal") == ""


# -- faults ------------------------------------------------------------------------------------------------------------


@FULL
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_fails_on_one_stage_fails_for_the_block(engines, llama, truth, tmp_path, rank):
    asks = truth.prompts("failing", 3, 300)
    failing = {"patches": (f"{PATCHES}:stores_fail",), "environment": {patches.RANK: rank}}
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, **TWO, **failing)) as engine:
        for _ in range(2):
            scenarios.ask_after_garbage(engine, truth, asks, [0] * 3)
        assert engine.in_core("held")["HOST"] == 0
        assert engine.metrics()["kvbm_vllm_failed_stores_total{}"] > 0
    failing = {
        "patches": (f"{PATCHES}:loads_fail_late",),
        "environment": {patches.RANK: rank, patches.SKIPPED: "1"},
    }
    with engines.running(with_kvbm(llama, tmp_path / "b", NVME, **TWO, **failing)) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        for _ in range(2):
            scenarios.ask_after_garbage(engine, truth, asks)
        assert engine.metrics()["kvbm_vllm_failed_loads_total{}"] > 0
        assert engine.in_core("refusal") == ""


@FULL
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("loss", ["nothing", "nvme.pool", "journal"])
def test_a_stage_that_dies_amid_stores_costs_hits_alone(engines, llama, truth, tmp_path, stage, loss):
    """The other stage's parts are in HOST by then. Beside it something of the volume is gone at the next start."""
    known, late = truth.prompts("known", 2, 300), truth.prompts("late", 3, 400)
    described = with_kvbm(llama, tmp_path / "a", NVME, **TWO)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, known, [0] * 2)
        engine.offload()
    dying = {"patches": (f"{PATCHES}:a_rank_dies",), "environment": {patches.RANK: str(stage), patches.SKIPPED: "2"}}
    mortal = with_kvbm(llama, tmp_path / "a", NVME, **TWO, **dying, step_tokens=64)
    with engines.running(mortal) as engine, pytest.raises((EngineDiedError, EngineError)):
        engine.generate(late)
    _lose(tmp_path / "a" / "instances" / "a", loss)
    with engines.running(described) as engine:
        assert engine.in_core("salvaged", WAIT_S)
        scenarios.ask_after_garbage(engine, truth, known, [0] * 2 if loss == "nvme.pool" else reusable(known))
        scenarios.ask(engine, truth, late)
        scenarios.ask_after_garbage(engine, truth, late, reusable(late))


def _lose(folder: Path, name: str) -> None:
    for path in [folder / name] if name != "journal" else list((folder / "journal").glob("*.kvbj")):
        path.unlink(missing_ok=name == "nothing")


@FULL
def test_inside_another_connector_stages_are_not_served(engines, llama, truth, tmp_path):
    """vLLM's MultiConnector asks one connector for what its ranks have, and hands that to all."""
    (tmp_path / "files").mkdir()
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }
    asks = truth.prompts("beside", 2, 300)
    with engines.running(with_others(llama, tmp_path / "a", [other], **TWO)) as engine:
        scenarios.ask(engine, truth, asks)
        assert not engine.in_core("is_serving")


# -- data parallelism --------------------------------------------------------------------------------------------------


@FULL
@pytest.mark.parametrize("named", [False, True], ids=["below its folder", "a file that is named"])
def test_data_parallel_ranks_are_instances_of_their_own(engines, llama, truth, tmp_path, named):
    """They have one configuration, and each its own journal, pool and hits, also after a restart."""
    path = {"pools.nvme.path": str(tmp_path / "flash.pool")} if named else {}
    first, second = truth.prompts("ranks", 2, 300)
    asks = [(0, first), (1, second), (0, second), (1, first)]
    cached = [0, 0, 0, 0]
    described = with_kvbm(llama, tmp_path / "a", NVME | path, cores=2)
    for _ in range(2):
        with engines.running(described) as engine:
            found = engine.ask("generate_on", [(rank, ask.tokens) for rank, ask in asks], OUTPUT_TOKENS)
            engine.stop()
        assert [tuple(tokens) for tokens, _ in found] == [truth.of([ask])[0].tokens for _, ask in asks]
        assert [count for _, count in found] == cached
        cached = [ask.reusable_tokens for _, ask in asks]  # from NVMe: HOST and HBM have gone with the processes
    assert sorted(folder.name for folder in (tmp_path / "a" / "instances").iterdir()) == ["a", "a-dp1"]
    pools = sorted(file.name for file in tmp_path.rglob("*.pool*") if file.is_file())
    assert pools == (["flash.pool", "flash.pool-dp1"] if named else ["nvme.pool", "nvme.pool"])


@FULL
def test_ranks_of_a_mixture_of_experts_are_instances_of_their_own(engines, tmp_path):
    """They start, which needs all of them; vLLM's communicator for a CPU then cannot exchange tokens between
    experts.
    """
    port = str(free_port())
    shared = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
    model, options = engines.model("qwen-next"), {**STATES, "enable_expert_parallel": True}
    setups = [
        with_kvbm(
            model,
            tmp_path / "a",
            NVME,
            core="process",
            options=options,
            environment=shared | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)},
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as both:
        started = list(both.map(engines.start, setups))
    try:
        assert [engine.in_core("instance") for engine in started] == ["a-dp0", "a-dp1"]
        assert all("NVME" in engine.in_core("held") for engine in started)
    finally:
        for engine in started:
            engine.close()


# -- several hosts -----------------------------------------------------------------------------------------------------

HOSTS: dict[str, Any] = {"core": "process", "hosts": 2}
ON_HOSTS = {
    "a rank on each of two hosts": ("llama", {**HOSTS, "ranks": 2}),
    "a stage on each of two hosts": ("llama", {**HOSTS, "stages": 2}),
    "a hybrid model, uneven stages": ("gemma", {**HOSTS, **uneven(4, 2), "step_tokens": 64}),
}


def begun(engine: Engine, truth: Truth) -> None:
    """Have a first prompt answered, and wait until both hosts have their memory: before, nothing is stored."""
    first = truth.prompts("first", 1, 40)
    scenarios.ask(engine, truth, first)

    def have_memory() -> bool:
        if engine.in_core("has_all_hosts"):  # the engine steps meanwhile, for half a minute
            return True
        if time.monotonic() - begun_s > WAIT_S / 6:
            scenarios.ask(engine, truth, first)
        return False

    begun_s = time.monotonic()
    eventually(have_memory, "a host has no memory", WAIT_S)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if "rank on" in name else FULL) for name in ON_HOSTS])
def test_each_host_keeps_the_parts_of_its_ranks_in_host(engines, truth_of, tmp_path, name):
    """vLLM's workers of the second host have a parent of their own, and take their memory themselves.

    NVMe is left out.
    """
    kind, setup = ON_HOSTS[name]
    truth = truth_of(kind)
    with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)) as engine:
        begun(engine, truth)
        for scenario in (scenarios.cold_then_warm, scenarios.partial_hits, scenarios.forgotten_everywhere):
            scenario(engine, truth, scenario.__name__)
        held = engine.in_core("held")
        assert held["HOST"] > 0
        assert "NVME" not in held
        assert engine.in_core("refusal") == ""


@FULL
def test_an_engine_whose_second_host_has_no_room_runs_as_if_kvbm_were_absent(engines, llama, truth, tmp_path):
    asks = truth.prompts("no-room", 2, 300)
    full = {"patches": (f"{PATCHES}:no_room_on_other_hosts",)}
    with engines.running(with_kvbm(llama, tmp_path / "a", **HOSTS, ranks=2, **full)) as engine:
        for _ in range(2):
            scenarios.ask_after_garbage(engine, truth, asks, [0] * 2)
        assert "rank 1: host 1 has no room for HOST" in engine.in_core("refusal")


@FULL
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_dies_amid_stores_costs_hits_alone(engines, llama, truth, tmp_path, rank):
    """The other host's parts are in place by then. Beside it the journal is gone at the next start."""
    asks = truth.prompts("host", 3, 400)
    dying = {"patches": (f"{PATCHES}:a_rank_dies",), "environment": {patches.RANK: str(rank), patches.SKIPPED: "2"}}
    mortal = with_kvbm(llama, tmp_path / "a", **HOSTS, ranks=2, step_tokens=64, **dying)
    with engines.running(mortal) as engine:
        begun(engine, truth)
        with pytest.raises((EngineDiedError, EngineError)):
            engine.generate(asks)
    _lose(tmp_path / "a" / "instances" / "a", "journal")
    with engines.running(with_kvbm(llama, tmp_path / "a", **HOSTS, ranks=2)) as engine:
        begun(engine, truth)
        scenarios.ask(engine, truth, asks, [0] * 3)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))


@FULL
def test_one_engine_after_another_on_one_host_and_on_two(engines, llama, truth, tmp_path):
    """What one host has in NVMe is no use to two, and is there again for one."""
    asks = truth.prompts("moved", 2, 300)
    one = with_kvbm(llama, tmp_path / "a", NVME, ranks=2, core="process")
    with engines.running(one) as engine:
        scenarios.ask(engine, truth, asks, [0] * 2)
        engine.offload()
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, **HOSTS, ranks=2)) as engine:
        begun(engine, truth)
        scenarios.ask(engine, truth, asks, [0] * 2)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
    with engines.running(one) as engine:
        scenarios.ask(engine, truth, asks)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
