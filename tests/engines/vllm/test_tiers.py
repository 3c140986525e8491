"""Blocks come back from every tier, across restarts, from another engine's files and objects; and only where they
should.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask
from tests.eventually import eventually

FULL, SMOKE = pytest.mark.engines_full, pytest.mark.smoke
WAIT_S = 120.0
NVME = {"pools.nvme.slots": 400}


def reusable(asks: list[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


def hits(engine: Engine) -> Mapping[str, int]:
    return {name: count for name, count in engine.in_core("counted").items() if name.startswith("hits_") and count}


def wait_seen(engine: Engine, asks: list[Ask]) -> None:
    """Wait until an engine has looked at the pod's folder and seen these prompts' blocks there."""

    def are_seen(ask: Ask) -> bool:
        return bool(engine.in_core("in_pod", list(ask.tokens), ask.salt) >= ask.reusable_tokens // BLOCK_TOKENS)

    for ask in asks:
        eventually(partial(are_seen, ask), "another engine's blocks were not seen", WAIT_S)


ENGINES = [
    pytest.param("llama", {}, id="inside"),
    pytest.param("llama", {"core": "process", "asynchronous": True}, id="process"),
    pytest.param("gemma", {}, id="hybrid"),
    pytest.param("llama", {"ranks": 2, "core": "process"}, id="ranks", marks=FULL),
    pytest.param("gemma", {"ranks": 2}, id="hybrid-ranks", marks=FULL),
]


@pytest.mark.parametrize(("kind", "setup"), [pytest.param("llama", {}, id="inside", marks=SMOKE), *ENGINES[1:]])
def test_hits_are_counted_for_the_tier_they_come_from(engines, truth_of, tmp_path, kind, setup):
    truth = truth_of(kind)
    asks = truth.prompts("tiers", 3, 300)
    with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        assert hits(engine) == {}
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
        assert hits(engine).keys() == {"hits_HOST"}
        engine.offload()
        engine.in_core("drop", "HOST")
        before = hits(engine)["hits_HOST"]
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
        assert hits(engine)["hits_NVME"] >= before
        assert hits(engine)["hits_HOST"] == before


def test_host_too_small_for_a_prompt_still_takes_it_to_nvme(engines, llama, truth, tmp_path):
    pools = NVME | {"pools.host.slots": 4}
    asks = truth.prompts("small", 3, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", pools, requests=1)) as engine:
        for _ in range(4):
            for ask in asks:
                scenarios.ask_after_garbage(engine, truth, [ask])
                engine.offload()
        assert hits(engine).get("hits_NVME", 0) > 0


@pytest.mark.parametrize(
    ("kind", "setup", "end"),
    [
        pytest.param("llama", {}, "killed", id="killed-inside", marks=SMOKE),
        pytest.param("llama", {}, "stopped", id="stopped-inside"),
        *(
            pytest.param(*one.values, end, id=f"{end}-{one.id}", marks=one.marks)
            for end in ("killed", "stopped")
            for one in ENGINES[1:]
        ),
    ],
)
def test_nvme_outlives_the_engine(engines, truth_of, tmp_path, kind, setup, end):
    truth = truth_of(kind)
    asks = truth.prompts("restart", 3, 300)
    described = with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        engine.offload()
        engine.kill() if end == "killed" else engine.stop()
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, reusable(asks))
        assert hits(engine).keys() == {"hits_NVME"}
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))


def test_an_engine_killed_at_work_comes_back(engines, llama, truth, tmp_path):
    described = with_kvbm(llama, tmp_path / "a", NVME)
    asks = truth.prompts("at-work", 8, 400)
    for _ in range(3):
        with engines.running(described) as engine:
            scenarios.ask(engine, truth, asks[:4])
            engine.begin("generate", asks)
            engine.kill()
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))


def test_another_model_in_the_same_place_gets_no_blocks(engines, truth_of, tmp_path):
    """New weights under the path of the old ones: it starts, and nothing is found; never the old model's blocks."""
    asks = truth_of("llama").prompts("other", 2, 200)
    model = tmp_path / "model"
    shutil.copytree(engines.model("llama"), model)
    described = with_kvbm(str(model), tmp_path / "a", NVME)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth_of("llama"), asks, [0] * 2)
        engine.offload()
    shutil.rmtree(model)
    shutil.copytree(engines.model("llama-2"), model)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth_of("llama-2"), asks, [0] * 2)


def test_a_second_engine_reads_the_first_ones_files(engines, llama, truth, tmp_path):
    pod = NVME | {"pools.nvme.folder": str(tmp_path / "pod")}
    asks, more = truth.prompts("pod", 3, 300), truth.prompts("pod-back", 2, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", pod)) as first:
        with engines.running(with_kvbm(llama, tmp_path / "b", pod, core="process")) as second:
            scenarios.ask(first, truth, asks, [0] * 3)
            first.offload()
            wait_seen(second, asks)
            scenarios.ask(second, truth, asks, reusable(asks))
            scenarios.ask(second, truth, more, [0] * 2)
            second.offload()
            wait_seen(first, more)
            scenarios.ask(first, truth, more, reusable(more))
        first.kill()
    with engines.running(with_kvbm(llama, tmp_path / "c", pod)) as third:  # of those who are gone
        wait_seen(third, [*asks, *more])
        scenarios.ask(third, truth, [*asks, *more], reusable([*asks, *more]))


def test_tenants_do_not_see_each_others_blocks(engines, llama, truth, tmp_path):
    tenants = {"tenants.blue.weight": 1, "tenants.red.weight": 1}
    asked = truth.prompt("tenants", 300)
    blue, red = (asked._replace(transfer={"kvbm.tenant": name}) for name in ("blue", "red"))
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME | tenants)) as engine:
        scenarios.ask(engine, truth, [blue], [0])
        scenarios.ask_after_garbage(engine, truth, [red], [0])
        scenarios.ask_after_garbage(engine, truth, [asked], [0])
        scenarios.ask_after_garbage(engine, truth, [blue], [asked.reusable_tokens])
        scenarios.ask_after_garbage(engine, truth, [red], [asked.reusable_tokens])
