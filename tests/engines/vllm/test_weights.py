"""Weights that change while the engine runs: adapters loaded anew under an old name, models loaded in place.

No block may outlive them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines.vllm.harness import models, scenarios
from tests.engines.vllm.harness.engine import Engines
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import Ask

FULL = pytest.mark.engines_full
NVME = {"pools.nvme.slots": 400}
ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 4}
ENGINES = [
    pytest.param({}, id="inside"),
    pytest.param({"core": "process", "asynchronous": True}, id="process"),
    pytest.param({"core": "process", "ranks": 2}, id="ranks", marks=FULL),
]


@pytest.fixture(scope="module")
def adapted(engines: Engines, llama: str) -> Iterator[Truth]:
    """Right answers of the Llama with adapters."""
    truth = Truth(engines, llama, ADAPTERS)
    yield truth
    truth.close()


def with_adapter(asks: Sequence[Ask], number: int, folder: str) -> list[Ask]:
    return [ask._replace(lora=(number, folder)) for ask in asks]


@pytest.fixture
def versions(adapted: Truth, tmp_path: Path) -> Iterator[Callable[[int, int], list[Ask]]]:
    """Four prompts for one adapter under some number, once another version of it lies in its only folder."""
    prompts = adapted.prompts("adapter", 4, 200)

    def asks(number: int, version: int) -> list[Ask]:
        asked = with_adapter(prompts, number, models.adapter(tmp_path / "sql", version))
        adapted.of(asked)  # while these files are there; numbers are the tests' own, so the truth loads them anew
        return asked

    yield asks
    adapted.close()


def reusable(asks: Sequence[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


@pytest.mark.parametrize("setup", ENGINES)
def test_an_adapter_loaded_anew_under_its_old_name_gets_no_old_blocks(
    engines, llama, adapted, versions, tmp_path, setup
):
    described = with_kvbm(llama, tmp_path / "a", NVME, options=ADAPTERS, **setup)
    with engines.running(described) as engine:
        first = versions(1, 1)
        engine.ask("load_adapter", *first[0].lora)
        scenarios.ask(engine, adapted, first, [0] * 4)
        engine.offload()
        scenarios.ask_after_garbage(engine, adapted, first, reusable(first))

        engine.ask("unload_adapter", 1)
        second = versions(2, 2)
        engine.ask("load_adapter", *second[0].lora)
        scenarios.ask_after_garbage(engine, adapted, second, [0] * 4)
        engine.offload()
        scenarios.ask_after_garbage(engine, adapted, second, reusable(second))
        engine.ask("unload_adapter", 2)
    with engines.running(described) as engine:  # what lies in NVME is each version's own
        for number in (3, 4):
            asked = versions(number, number - 2)
            engine.ask("load_adapter", *asked[0].lora)
            scenarios.ask_after_garbage(engine, adapted, asked, reusable(asked))
            engine.ask("unload_adapter", number)


@pytest.mark.parametrize("setup", ENGINES)
def test_an_adapter_loaded_in_place_gets_no_old_blocks(engines, llama, adapted, versions, tmp_path, setup):
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, options=ADAPTERS, **setup)) as engine:
        first = versions(1, 1)
        engine.ask("load_adapter", *first[0].lora)
        scenarios.ask(engine, adapted, first, [0] * 4)
        engine.offload()

        second = versions(2, 2)
        engine.ask("load_adapter", 1, second[0].lora[1], True)  # no step in between that could tell the scheduler
        for allowed in ({0}, {0, 192}, {192}):  # requests that came before the ranks had said it are not stored
            engine.forget()
            answers = engine.generate(with_adapter(second, *first[0].lora))
            adapted.check(second, answers)
            assert {answer.cached_tokens for answer in answers} <= allowed
            engine.offload()


def test_an_adapter_whose_files_change_behind_the_engines_back_gets_no_old_blocks(
    engines, llama, adapted, versions, tmp_path
):
    """vLLM holds one adapter here, so another one's request makes it forget the first, which it then reads again from
    other files.
    """
    other = models.adapter(tmp_path / "other", 9)
    filler = with_adapter(adapted.prompts("filler", 1, 100), 50, other)
    options = ADAPTERS | {"max_cpu_loras": 1}
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, options=options)) as engine:
        first = versions(1, 1)
        scenarios.ask(engine, adapted, first, [0] * 4)
        engine.offload()
        scenarios.ask_after_garbage(engine, adapted, first, reusable(first))
        second = versions(2, 2)
        scenarios.ask(engine, adapted, filler)
        for cached in (0, None):
            engine.forget()
            answers = engine.generate(with_adapter(second, *first[0].lora))
            adapted.check(second, answers)
            assert cached is None or {answer.cached_tokens for answer in answers} == {cached}
            engine.offload()


def test_files_that_change_after_the_load_are_not_taken_for_what_was_loaded(
    engines, llama, adapted, versions, tmp_path
):
    described = with_kvbm(llama, tmp_path / "a", NVME, options=ADAPTERS)
    with engines.running(described) as engine:
        first = versions(1, 1)
        engine.ask("load_adapter", *first[0].lora)
        second = versions(2, 2)  # before the first request
        scenarios.ask(engine, adapted, first)
        engine.offload()
        scenarios.ask_after_garbage(engine, adapted, first)
    with engines.running(described) as engine:
        engine.ask("load_adapter", *second[0].lora)
        scenarios.ask(engine, adapted, second, [0] * 4)


def test_blocks_that_vllm_itself_mixes_are_not_kept(engines, llama, adapted, versions, tmp_path):
    """Without a reset vLLM goes on with the old adapter's blocks in HBM; what it builds on them must not reach a colder
    tier.
    """
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, options=ADAPTERS)) as engine:
        first = versions(1, 1)
        engine.ask("load_adapter", *first[0].lora)
        scenarios.ask(engine, adapted, [ask._replace(tokens=ask.tokens[:100]) for ask in first])
        engine.ask("unload_adapter", 1)
        second = versions(2, 2)
        engine.ask("load_adapter", *second[0].lora)
        engine.generate(second)
        engine.offload()
        scenarios.ask_after_garbage(engine, adapted, second)


@pytest.mark.parametrize("setup", ENGINES)
def test_a_model_loaded_in_place_gets_no_old_blocks(engines, truth_of, llama, tmp_path, setup):
    asks = truth_of("llama").prompts("in-place", 3, 200)
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, **setup)) as engine:
        scenarios.ask(engine, truth_of("llama"), asks, [0] * 3)
        engine.offload()
        engine.ask("on_ranks", "reload_weights", None, engines.model("llama-2"))
        for _ in range(2):
            engine.forget()
            scenarios.ask(engine, truth_of("llama-2"), asks, [0] * 3)
        assert "changed in place (reload_weights)" in engine.in_core("refusal")
        assert engine.in_core("held")["HBM"] == 0


@pytest.mark.parametrize("setup", ENGINES)
def test_weights_that_somebody_loads_into_the_model_itself_are_noticed(engines, truth, llama, tmp_path, setup):
    asks = truth.prompts("in-place", 3, 200)
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, **setup)) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        engine.offload()
        engine.ask("on_ranks", "load_into_model", llama)
        scenarios.ask_after_garbage(engine, truth, asks, [0] * 3)
        assert "changed in place (model.load_weights)" in engine.in_core("refusal")
