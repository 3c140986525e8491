"""A model with recurrent states on several ranks: the parts of all of them make a block, those of a state too.

vLLM refuses a pipeline stage without a layer of attention, so each stage has layers of both kinds here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import scenarios, state_models
from tests.engines.vllm.harness.engine import Engines
from tests.engines.vllm.harness.models import STATES
from tests.engines.vllm.harness.setup_truth import SetupTruth
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import Ask, Setup

FULL = pytest.mark.engines_full
BLOCK_TOKENS = 64  # a state is as large as so many tokens of attention
NVME = {"pools.nvme.slots": 400}
KINDS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "core": "process"},
    "ranks": {"ranks": 2, "core": "process"},
    "stages-ranks": {"stages": 2, "ranks": 2, "core": "process"},
}


@pytest.fixture(scope="module")
def model(llama: str) -> str:
    return state_models.make("qwen-next-ranks", Path(llama).parent)


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=FULL) for kind in KINDS])
def setup(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param] | {"options": STATES}


@pytest.fixture(scope="module")
def truth(engines: Engines, model: str, setup: dict[str, Any]) -> Iterator[Truth]:
    found = SetupTruth(engines, Setup(model, **setup))
    yield found
    found.close()


def whole(asks: list[Ask]) -> list[int]:
    return [(len(ask.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for ask in asks]


def test_a_prompt_comes_back_from_each_tier(engines, model, truth, setup, tmp_path):
    # a block and one token is no length here: vLLM computes the token as it does while it decodes, and rounds otherwise
    asks = [truth.prompt(f"tiers-{tokens}", tokens) for tokens in (20, 70, 128, 140, 300, 500)]
    described = with_kvbm(model, tmp_path / "a", NVME, **setup)
    with engines.running(described) as engine:
        layers = 1 if setup.get("stages") else 2
        assert [tuple(one) for one in engine.kv_groups()] == [
            ("MambaSpec", BLOCK_TOKENS, layers),
            ("FullAttentionSpec", BLOCK_TOKENS, layers),
        ]
        scenarios.ask(engine, truth, asks, [0] * len(asks))
        scenarios.ask_after_garbage(engine, truth, asks, whole(asks))
        counted = engine.in_core("counted")
        assert counted["hits_HOST"] > 0 and not counted["hits_NVME"]
        engine.offload()
        assert engine.in_core("refusal") == ""
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, whole(asks))
        counted = engine.in_core("counted")
        assert counted["hits_NVME"] > 0 and not counted["hits_HOST"]
