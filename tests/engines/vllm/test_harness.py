"""The suite itself: wrong KV shows, engines that lie are rejected, crashes and hangs are told, and models are what they
are meant to be.
"""

from __future__ import annotations

import math

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import CORE_ACCESS, EngineDiedError, Engines
from tests.engines.vllm.harness.scenarios import MissedError
from tests.engines.vllm.harness.truth import TOLERANCE, Truth, WrongAnswerError, difference
from tests.engines.vllm.harness.words import Ask, Group, Setup

LIARS = "tests.engines.vllm.harness.liars"


def lying(model: str, name: str) -> Setup:
    connector = {"kv_connector": name, "kv_connector_module_path": LIARS, "kv_role": "kv_both"}
    return Setup(model, connector=connector)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_token_said_500_tokens_ago_moves_log_probabilities_far_more_than_the_tolerance(engines, truth_of, kind):
    truth = truth_of(kind)
    asked = truth.prompt("far", 500)
    for at in (0, 40, 480):
        changed = Ask((*asked.tokens[:at], asked.tokens[at] ^ 1, *asked.tokens[at + 1 :]))
        first, other = (answer.likely[0] for answer in truth.of([asked, changed]))
        both = first.keys() & other.keys()
        assert not both or max(abs(first[token] - other[token]) for token in both) > 10 * TOLERANCE


def test_the_engine_without_a_connector_is_right_over_garbage(engines, llama, truth):
    asks = truth.prompts("plain", 3, 200)
    with engines.running(Setup(llama)) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        scenarios.ask(engine, truth, asks, [one.reusable_tokens for one in asks])
        scenarios.ask_after_garbage(engine, truth, asks, [0] * 3)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("liar", ["EmptyHanded", "WrongBlocks"])
def test_a_connector_that_lies_is_rejected(engines, truth_of, kind, liar):
    truth = truth_of(kind)
    with engines.running(lying(engines.model(kind), liar)) as engine:
        with pytest.raises((WrongAnswerError, MissedError)):
            scenarios.cold_then_warm(engine, truth, "lie")
        asks = truth.prompts("lie", 2, 300)
        answers = engine.generate(asks)
        assert any(answer.cached_tokens for answer in answers)
        assert all(difference(answer, right) for answer, right in zip(answers, truth.of(asks), strict=True))


def test_a_nan_is_no_right_answer(truth):
    asked = truth.prompt("nan", 40)
    right = truth.of([asked])[0]
    hollow = right._replace(likely=tuple({token: math.nan for token in position} for position in right.likely))
    assert not difference(right, right)
    assert difference(hollow, right)


def test_the_hybrid_model_has_several_kv_groups(engines, gemma):
    with engines.running(Setup(gemma)) as engine:
        assert engine.kv_groups() == [
            Group("SlidingWindowSpec", 32, 2),
            Group("SlidingWindowSpec", 32, 2),
            Group("FullAttentionSpec", 32, 2),
        ]


def test_an_engine_that_hangs_is_ended_and_says_where(engines, llama):
    with engines.running(Setup(llama)) as engine:
        engine.begin("in_core", f"{CORE_ACCESS}:stuck", 60)
        with pytest.raises(EngineDiedError, match="no answer within"):
            engine.answer(1.0)


def test_an_engine_that_dies_is_told(engines: Engines, llama: str):
    with engines.running(Setup(llama, core="process")) as engine:
        engine.kill()
        with pytest.raises((EngineDiedError, BrokenPipeError)):
            engine.generate([Ask(tuple(range(40)))])


def test_the_truth_finds_where_an_answer_differs(truth: Truth):
    asked = truth.prompt("differs", 40)
    right = truth.of([asked])[0]
    moved = dict(right.likely[3])
    token = next(iter(moved))
    moved[token] += 3 * TOLERANCE
    assert "output 3" in difference(right._replace(likely=(*right.likely[:3], moved, *right.likely[4:])), right)
    assert "output 7" in difference(right._replace(tokens=(*right.tokens[:7], right.tokens[7] ^ 1)), right)
