"""The same scenarios with every kind of engine: one process or several, scheduled ahead or not, chunked, split over
ranks, hybrid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.setups import with_kvbm, with_others
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import Setup

FULL = pytest.mark.engines_full
DENSE = {
    "prefix_cache_retention_interval": None
}  # sliding layers' blocks stay findable everywhere, not at prompts' ends alone

KINDS = {
    "inside": ("llama", {}),
    "process": ("llama", {"core": "process"}),
    "asynchronous": ("llama", {"asynchronous": True}),
    "asynchronous-process": ("llama", {"core": "process", "asynchronous": True}),
    "chunked": ("llama", {"step_tokens": 48}),
    "ranks": ("llama", {"ranks": 2, "core": "process"}),
    "stages": ("llama", {"stages": 2, "core": "process"}),
    "stages-ranks": ("llama", {"stages": 2, "ranks": 2, "core": "process", "step_tokens": 64}),
    "hybrid": ("gemma", {"options": DENSE}),
    "hybrid-chunked": ("gemma", {"options": DENSE, "step_tokens": 48}),
    "hybrid-ranks": ("gemma", {"options": DENSE, "ranks": 2, "core": "process", "asynchronous": True}),
}
OFTEN = {"process", "asynchronous", "chunked", "ranks", "hybrid"}


class Case(NamedTuple):
    engine: Engine
    truth: Truth


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in OFTEN else FULL) for name in KINDS],
)
def case(
    request: pytest.FixtureRequest,
    engines: Engines,
    truth_of: Callable[[str], Truth],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    model, setup = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    with engines.running(with_kvbm(engines.model(model), folder, **setup)) as engine:
        yield Case(engine, truth_of(model))


@pytest.mark.parametrize("scenario", scenarios.EVERYWHERE, ids=lambda scenario: scenario.__name__)
def test_scenario(case: Case, scenario: Callable[[Engine, Truth, str], None]) -> None:
    scenario(case.engine, case.truth, scenario.__name__)
    assert case.engine.in_core("refusal") == ""


@pytest.mark.parametrize("core", ["inside", "process"])
def test_scheduling_a_step_ahead_is_what_the_engine_does_when_asked(engines, llama, core):
    for asynchronous in (False, True):
        with engines.running(Setup(llama, core=core, asynchronous=asynchronous)) as engine:
            assert engine.in_core("is_asynchronous") is asynchronous


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllms_steps_say_which_blocks_their_requests_got(engines, llama, truth, tmp_path, asynchronous):
    with engines.running(with_kvbm(llama, tmp_path, asynchronous=asynchronous)) as engine:
        before, _ = engine.in_core("touched")
        whole = truth.prompt("touched", 100)
        scenarios.ask(engine, truth, [whole], [0])
        steps, blocks = engine.in_core("touched")
        (size,) = {group.block_tokens for group in engine.kv_groups()}
        assert steps > before
        assert blocks >= 100 // size


@pytest.mark.parametrize(
    ("step_tokens", "options"), [(2048, {}), (48, {}), (2048, {"prefix_cache_retention_interval": 128})]
)
def test_a_hybrid_model_finds_again_what_vllm_itself_would(engines, gemma, gemma_truth, tmp_path, step_tokens, options):
    """By default vLLM keeps the blocks of sliding layers findable at the ends of prompts alone, and so they are stored.

    With an interval it keeps those behind each multiple of it, too.
    """
    found: list[list[int]] = []
    plain = Setup(gemma, step_tokens=step_tokens, options=options)
    for setup in (plain, with_kvbm(gemma, tmp_path / "a", step_tokens=step_tokens, options=options)):
        with engines.running(setup) as engine:
            row = []
            for shared in (64, 128, 200, 256, 290, 310):
                whole = gemma_truth.prompt(f"sparse-{shared}", 320)
                scenarios.ask(engine, gemma_truth, [whole], [0])
                if setup.connector:
                    engine.forget()
                other = gemma_truth.prompt(f"sparse-after-{shared}", 400, after=whole.tokens[:shared])
                row += [answer.cached_tokens for answer in scenarios.ask(engine, gemma_truth, [other])]
            found.append(row)
    assert found[0] == found[1]
    assert any(found[0])


def test_beside_another_connector(engines, llama, truth, tmp_path):
    """vLLM's own example keeps whole prompts in files. Kvbm is asked first, and answers for what it has."""
    (tmp_path / "files").mkdir()
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }
    with engines.running(with_others(llama, tmp_path / "a", [other])) as engine:
        for scenario in (scenarios.cold_then_warm, scenarios.partial_hits, scenarios.shared_in_a_batch):
            scenario(engine, truth, scenario.__name__)
        assert engine.in_core("counted")["hits_HOST"] > 0


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        ("llama", {}),
        ("llama", {"core": "process", "asynchronous": True, "step_tokens": 64}),
        ("gemma", {"options": DENSE}),
        pytest.param("llama", {"ranks": 2, "core": "process"}, marks=FULL),
    ],
)
def test_pressure_with_evictions(engines, truth_of, tmp_path, kind, setup):
    pools = {"pools.host.slots": 24, "pools.nvme.slots": 40}
    setup = {"hbm_blocks": 60, "context_tokens": 512, **setup}
    with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", pools, **setup)) as engine:
        assert scenarios.pressure(engine, truth_of(kind), "pressed") > 0
        engine.offload()
        engine.in_core("drop", "HOST")
        assert scenarios.pressure(engine, truth_of(kind), "pressed", rounds=1) > 0
        counted = engine.in_core("counted")
        assert counted["hits_HOST"] > 0
        assert counted["hits_NVME"] > 0
        assert engine.in_core("refusal") == ""


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        ("llama", {"hbm_blocks": 26}),
        ("llama", {"hbm_blocks": 26, "asynchronous": True}),
        ("gemma", {"hbm_blocks": 70, "options": DENSE}),
    ],
)
def test_preempted_requests_are_answered_rightly(engines, truth_of, tmp_path, kind, setup):
    truth = truth_of(kind)
    asks = [truth.prompt(f"preempted-{at}", 100, output_tokens=100) for at in range(6)]
    with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", context_tokens=224, **setup)) as engine:
        scenarios.ask(engine, truth, asks)
        assert engine.metrics()["vllm:num_preemptions_total{}"] > 0
        scenarios.ask_after_garbage(engine, truth, asks)
        assert engine.in_core("refusal") == ""
