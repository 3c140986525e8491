"""KV that vLLM keeps as 8-bit floats: blocks come back as they were, and to no engine that keeps it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.setup_truth import SetupTruth
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth, WrongAnswerError
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask, Setup

pytestmark = pytest.mark.skipif(
    not {"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text().split()),
    reason="vLLM 0.32 keeps KV in 8 bits on CPUs with AVX-512 or AMX alone",
)
NVME = {"pools.nvme.slots": 400}
LIARS = "tests.engines.vllm.harness.liars"
E4M3, E5M2 = ({"options": {"kv_cache_dtype": name}} for name in ("fp8", "fp8_e5m2"))
FLOAT32: dict[str, Any] = {}
RANKS = {"ranks": 2, "core": "process"}


@pytest.fixture(scope="module")
def truth_with(engines: Engines, llama: str) -> Iterator[Callable[[Mapping[str, Any]], Truth]]:
    """Right answers of an engine set up so: of 8 bits they are others, and how ranks round a sum decides which."""
    known: dict[str, Truth] = {}

    def of(setup: Mapping[str, Any]) -> Truth:
        return known.setdefault(repr(setup), SetupTruth(engines, Setup(llama, **setup)))

    yield of
    for truth in known.values():
        truth.close()


def reusable(asks: list[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


def hits(engine: Engine) -> set[str]:
    return {name for name, count in engine.in_core("counted").items() if name.startswith("hits_") and count}


@pytest.mark.parametrize(
    "setup", [pytest.param(E4M3, id="e4m3"), pytest.param(E5M2, id="e5m2"), pytest.param(E4M3 | RANKS, id="e4m3-ranks")]
)
def test_a_prompt_comes_back_from_each_tier(engines, llama, truth_with, tmp_path, setup):
    truth = truth_with(setup)
    asks = [truth.prompt(f"tiers-{tokens}", tokens) for tokens in (33, 64, 150, 300, 481)]
    described = with_kvbm(llama, tmp_path / "a", NVME, **setup)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0] * len(asks))
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
        assert hits(engine) == {"hits_HOST"}
        engine.offload()
        assert engine.in_core("refusal") == ""
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, reusable(asks))
        assert hits(engine) == {"hits_NVME"}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(E4M3, E5M2, id="bytes of another kind"),  # a block is as large: the pool's shape tells nothing
        pytest.param(E4M3, FLOAT32, id="wider"),
        pytest.param(FLOAT32, E4M3, id="narrower"),
    ],
)
def test_an_engine_that_keeps_kv_otherwise_hits_nothing_of_it(engines, llama, truth_with, tmp_path, first, then):
    asks = truth_with(first).prompts("others", 2, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, **first)) as engine:
        scenarios.ask(engine, truth_with(first), asks, [0] * 2)
        engine.offload()
        blocks = engine.in_core("held")["NVME"]
    assert blocks == sum(len(ask.tokens) // BLOCK_TOKENS for ask in asks)
    with engines.running(with_kvbm(llama, tmp_path / "a", NVME, **then)) as engine:
        scenarios.ask(engine, truth_with(then), asks, [0] * 2)
        scenarios.ask_after_garbage(engine, truth_with(then), asks, reusable(asks))
        assert hits(engine) == {"hits_HOST"}


def test_wrong_bytes_show_in_8_bits_too(engines, llama, truth_with):
    """What the tests above rest on: an engine that takes garbage for KV answers otherwise."""
    truth = truth_with(E4M3)
    asks = truth.prompts("lie", 2, 300)
    connector = {"kv_connector": "EmptyHanded", "kv_connector_module_path": LIARS, "kv_role": "kv_both"}
    with engines.running(Setup(llama, connector=connector, **E4M3)) as engine, pytest.raises(WrongAnswerError):
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
