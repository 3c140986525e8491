"""A model with recurrent states: a prefix is loaded as far as its blocks and the state at its very boundary are held,
and never further.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import scenarios, state_models
from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.models import STATES, VOCABULARY
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth, WrongAnswerError, difference
from tests.engines.vllm.harness.words import Ask, Group, Setup

FULL = pytest.mark.engines_full
BLOCK_TOKENS = 64  # a state is as large as so many tokens of attention
NVME = {"pools.nvme.slots": 400}
DENSE = {"prefix_cache_retention_interval": None}  # vLLM offers every state it computes at a boundary
EVERYWHERE = {"step_tokens": BLOCK_TOKENS, "options": DENSE}  # and it computes one at every boundary
ALL = {"offload.states": "all"}
PATCHES = "tests.engines.vllm.harness.patches"


def setup_of(
    engines: Engines,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Setup:
    return with_kvbm(engines.model("qwen-next"), folder, settings, options={**STATES, **(options or {})}, **more)


def whole(ask: Ask) -> int:
    """Tokens of a prompt that a cache can answer for: whole blocks, never the last token."""
    return (len(ask.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def truth(truth_of: Any) -> Truth:
    found: Truth = truth_of("qwen-next")
    return found


@pytest.fixture(scope="module")
def engine(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engines.running(setup_of(engines, tmp_path_factory.mktemp("states"), NVME)) as engine:
        yield engine
        assert engine.in_core("refusal") == ""


def test_the_model_has_groups_of_states_and_one_of_attention(engine):
    assert engine.kv_groups() == [Group("MambaSpec", 64, 1)] * 3 + [Group("FullAttentionSpec", 64, 1)]


@pytest.mark.smoke
def test_a_prompt_is_read_back_from_each_tier(engine, truth):
    asks = [truth.prompt(f"tiers-{tokens}", tokens) for tokens in (20, 64, 70, 128, 140, 300, 500)]
    scenarios.ask(engine, truth, asks, [0] * len(asks))
    scenarios.ask_after_garbage(engine, truth, asks, [whole(ask) for ask in asks])
    warm = engine.in_core("counted")
    assert warm["hits_HOST"] > 0 and not warm["hits_NVME"]
    engine.offload()
    engine.in_core("drop", "HOST")
    scenarios.ask_after_garbage(engine, truth, asks, [whole(ask) for ask in asks])
    assert engine.in_core("counted")["hits_NVME"] > 0


def test_where_prompts_part_a_state_is_left_for_the_next(engine, truth):
    """The first prompt leaves a state at its end alone.

    The second one, which shares a part of it, is computed; the third one hits.
    """
    stem = truth.prompt("parting", 330)
    scenarios.ask(engine, truth, [stem], [0])
    for shared in (200, 128):
        second, third = (truth.prompt(f"parting-{shared}-{at}", 400, after=stem.tokens[:shared]) for at in (0, 1))
        scenarios.ask_after_garbage(engine, truth, [second], [0])
        scenarios.ask_after_garbage(engine, truth, [third], [shared // BLOCK_TOKENS * BLOCK_TOKENS])
    scenarios.ask_after_garbage(engine, truth, [stem], [whole(stem)])


@pytest.mark.parametrize("drops", [40, pytest.param(200, marks=[FULL])])
def test_whatever_is_lost_a_hit_reaches_as_far_as_blocks_and_a_state_are_held(engines, truth, tmp_path, drops):
    """Blocks and states are dropped at random; the hit is what trying every length over what is left gives, and the
    answer is right.
    """
    chosen = random.Random("drops")
    stem = truth.prompt("drops", 256, output_tokens=2)
    asks = [truth.prompt(f"drops-{at}", 270 + 40 * at, stem.tokens[: 64 * at], output_tokens=2) for at in range(5)]
    found: Counter[int] = Counter()
    with engines.running(setup_of(engines, tmp_path / "a", ALL, **EVERYWHERE)) as engine:
        scenarios.ask(engine, truth, asks)
        for at in range(drops):
            engine.forget()
            engine.in_core("drop_some", f"drops-{at}", chosen.choice((0.02, 0.1, 0.4)))
            ask = chosen.choice(asks)
            expected = reach_of(engine.in_core("held_of", list(ask.tokens)), whole(ask))
            scenarios.ask(engine, truth, [ask], [expected])
            found[expected * 4 // whole(ask)] += 1
        assert engine.in_core("refusal") == ""
    assert set(found) == {0, 1, 2, 3, 4}  # nothing, everything, and all between


def reach_of(groups: Sequence[tuple[bool, int, Sequence[bool]]], limit: int) -> int:
    """The longest prefix of whole blocks that every group has all of, or the state behind."""
    for end in range(limit, 0, -BLOCK_TOKENS):
        if all(held[end // size - 1] if is_state else all(held[: end // size]) for is_state, size, held in groups):
            return end
    return 0


@pytest.mark.smoke
@pytest.mark.parametrize("liar", ["states_of_another_boundary", "states_of_another_request"])
def test_an_engine_that_loads_another_state_is_found_out(engines, truth, tmp_path, liar):
    asks = truth.prompts("liar", 2, 300)
    setup = setup_of(engines, tmp_path / "a", ALL, patches=(f"{PATCHES}:{liar}",), **EVERYWHERE)
    with engines.running(setup) as engine:
        scenarios.ask(engine, truth, asks, [0, 0])
        if liar == "states_of_another_request":  # the first one has no other
            scenarios.ask_after_garbage(engine, truth, asks[:1], [whole(asks[0])])
        with pytest.raises(WrongAnswerError, match="of which 256 came from a cache"):
            scenarios.ask_after_garbage(engine, truth, asks[1:])


@pytest.mark.parametrize("end", ["killed", pytest.param("stopped", marks=FULL)])
def test_states_outlive_the_engine(engines, truth, tmp_path, end):
    asks = truth.prompts("restart", 3, 300)
    described = setup_of(engines, tmp_path / "a", NVME)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        engine.offload()
        engine.kill() if end == "killed" else engine.stop()
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [whole(ask) for ask in asks])
        scenarios.ask_after_garbage(engine, truth, asks, [whole(ask) for ask in asks])


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param({"step_tokens": 100}, id="chunked"),
        pytest.param({"core": "process", "asynchronous": True, "step_tokens": 200}, id="asynchronous"),
        pytest.param({"options": DENSE}, id="dense", marks=FULL),
        pytest.param({"core": "process"}, id="process", marks=FULL),
    ],
)
def test_prompts_come_back_however_the_engine_steps(engines, truth, tmp_path, setup):
    asks = [truth.prompt(f"steps-{tokens}", tokens) for tokens in (20, 64, 128, 150, 300, 481)]
    with engines.running(setup_of(engines, tmp_path / "a", NVME, **setup)) as engine:
        scenarios.ask(engine, truth, asks, [0] * len(asks))
        for _ in range(2):
            scenarios.ask_after_garbage(engine, truth, asks, [whole(ask) for ask in asks])
        assert engine.in_core("refusal") == ""


@pytest.mark.parametrize("setup", [{}, pytest.param({"step_tokens": 100, "asynchronous": True}, marks=FULL)])
def test_pressure_with_evictions(engines, truth, tmp_path, setup):
    pools = {"pools.host.slots": 60, "pools.nvme.slots": 100}
    setup = {"hbm_blocks": 80, "context_tokens": 512, **setup}
    with engines.running(setup_of(engines, tmp_path / "a", pools, **setup)) as engine:
        assert scenarios.pressure(engine, truth, "pressed", prompts=12, rounds=3) > 0
        engine.offload()
        engine.in_core("drop", "HOST")
        assert scenarios.pressure(engine, truth, "pressed", prompts=12, rounds=1) > 0
        counted = engine.in_core("counted")
        assert counted["hits_HOST"] > 0
        assert counted["hits_NVME"] > 0
        assert engine.in_core("refusal") == ""


def test_preempted_requests_lose_no_state_and_win_none(engines, truth, tmp_path):
    """What is computed again after a preemption is rounded otherwise, so only what is asked afterwards is held to the
    truth.
    """
    asks = [truth.prompt(f"preempted-{at}", 100) for at in range(6)]
    longer = [ask._replace(output_tokens=100) for ask in asks]
    with engines.running(setup_of(engines, tmp_path / "a", ALL, DENSE, hbm_blocks=34, context_tokens=256)) as engine:
        assert [answer.finish for answer in engine.generate(longer)] == ["length"] * 6
        assert engine.metrics()["vllm:num_preemptions_total{}"] > 0
        scenarios.ask_after_garbage(engine, truth, asks, [64] * 6)
        assert engine.in_core("refusal") == ""


@pytest.mark.parametrize("step_tokens", [2048, pytest.param(100, marks=FULL)])
def test_as_many_tokens_hit_as_in_vllms_own_cache(engines, truth, tmp_path, step_tokens):
    """A script of prompts that go on, part and come back; with kvbm all of HBM is lost before each."""
    stem = truth.prompt("script", 330)
    asks = [stem]
    for shared in (200, 128, 300):
        asks += [truth.prompt(f"script-{shared}-{at}", 400, after=stem.tokens[:shared]) for at in range(3)]
    asks += [*asks[:4], truth.prompt("script-longer", 600, after=asks[1].tokens)]
    found = []
    plain = Setup(engines.model("qwen-next"), step_tokens=step_tokens, options=STATES)
    for setup in (plain, setup_of(engines, tmp_path / "a", step_tokens=step_tokens)):
        with engines.running(setup) as engine:
            row = []
            for ask in asks:
                if setup.connector:
                    engine.forget()
                row += [answer.cached_tokens for answer in scenarios.ask(engine, truth, [ask])]
            found.append(row)
    assert found[0] == found[1]
    assert sum(found[0]) > 0


def test_blocks_of_384_tokens_hit_as_in_vllms_own_cache_and_once_hbm_is_empty_too(engines, tmp_path):
    """A model as large as a user's first try, with vLLM's dummy weights: a second prompt of 700 tokens hits one
    block.
    """
    shape = state_models.without_weights(tmp_path / "shape")
    described: dict[str, Any] = {
        "hbm_blocks": 32,
        "options": {"dtype": "bfloat16", "load_format": "dummy", "block_size": None},
    }
    chosen = random.Random("shape")
    ask = Ask(tuple(chosen.randrange(VOCABULARY) for _ in range(700)))
    with engines.running(Setup(shape, **described)) as engine:
        (right,) = engine.generate([ask])
        (again,) = engine.generate([ask])
        assert (right.cached_tokens, again.cached_tokens) == (0, 384)
    with engines.running(with_kvbm(shape, tmp_path / "a", {"pools.host.slots": 64}, **described)) as engine:
        assert [group.block_tokens for group in engine.kv_groups()] == [384] * 4
        for cached in (0, 384):
            (answer,) = engine.generate([ask])
            assert (difference(answer, right), answer.cached_tokens) == ("", cached)
        engine.forget()
        (answer,) = engine.generate([ask])
        assert (difference(answer, right), answer.cached_tokens) == ("", 384)
        assert engine.in_core("counted")["hits_HOST"] == 4  # attention, and each layer's state
        assert engine.in_core("refusal") == ""
