"""What a scheduler measures of its engine's prompts, for engines that plan a step after the one before, or while it
runs.
"""

from __future__ import annotations

import pytest

from kvbm.engines.vllm.step_meter import LEAST_TOKENS, QueueMeter, StepMeter

DECODING = {f"d{number}": 1 for number in range(8)}
PREFILL_S, DECODE_S = 0.5, 0.01
PROMPT = 4096


def steps_of(meter: StepMeter, steps: list[dict[str, int]], ahead: int, at_s: float = 0.0) -> float:
    """Plan steps as an engine does that has so many planned while one runs. Returns the end."""
    ends: list[float] = []
    for scheduled in steps:
        if len(ends) > ahead:
            at_s = max(at_s, ends[-1 - ahead])
        tokens = sum(scheduled.values())
        meter.planned(scheduled, tokens, at_s)
        begin_s = max(at_s, ends[-1]) if ends else at_s
        ends.append(begin_s + (PREFILL_S if tokens >= PROMPT else DECODE_S))
        if not ahead:
            at_s = ends[-1]
    return ends[-1]


@pytest.mark.parametrize("ahead", [0, 1], ids=["a step after the other", "one step planned ahead"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_prompt_between_steps_that_decode_is_timed_by_its_own_step(ahead: int, prompts: int) -> None:
    meter = StepMeter()
    prompt = [DECODING | {"p": PROMPT}] * prompts
    steps_of(meter, [DECODING] * 4 + prompt + [DECODING | {"p": 1}] * 4, ahead)
    assert meter.tokens_per_s == pytest.approx(PROMPT / PREFILL_S)


def test_nothing_is_known_before_the_first_prompt_and_decoding_says_nothing() -> None:
    meter = StepMeter()
    assert meter.tokens_per_s is None
    steps_of(meter, [DECODING] * 50, 0)
    assert meter.tokens_per_s is None


@pytest.mark.parametrize("idle_after", [1, 2])
def test_a_time_in_which_the_engine_may_have_been_idle_does_not_count(idle_after: int) -> None:
    meter = StepMeter()
    steps = [{"p": PROMPT}, {"p": 1}, {"p": 1}][:idle_after]
    end_s = steps_of(meter, steps, 0)
    steps_of(meter, [{"later": PROMPT}, {"later": 1}, {"later": 1}], 0, end_s + 3600.0)
    assert meter.tokens_per_s == pytest.approx(PROMPT / PREFILL_S)  # of the later one alone


def test_few_prompt_tokens_beside_much_decoding_do_not_count() -> None:
    meter = StepMeter()
    many = {f"d{number}": 1 for number in range(LEAST_TOKENS * 2)}
    for at_s, scheduled in enumerate(
        [many | {"p": LEAST_TOKENS}, many, many, DECODING | {"q": LEAST_TOKENS - 1}, DECODING, DECODING]
    ):
        meter.planned(scheduled, sum(scheduled.values()), float(at_s))
    assert meter.tokens_per_s is None


def test_tokens_a_draft_model_guessed_are_no_prompt() -> None:
    meter = StepMeter()
    guessed = {f"d{number}": 5 for number in range(200)}
    for at_s in range(10):
        meter.planned(guessed, 1000, float(at_s))
    assert meter.tokens_per_s is None


def test_it_says_when_the_rate_has_changed() -> None:
    meter = StepMeter()
    steps = [{"p": PROMPT}, {"p": 1}, {"p": 1}, {"p": 1}]
    said = [meter.planned(scheduled, sum(scheduled.values()), float(at_s)) for at_s, scheduled in enumerate(steps)]
    assert said == [False, False, True, False]


# -- the queue --------------------------------------------------------------------------------------------------------


def test_prompts_that_begin_are_gone_when_the_next_that_waited_begins() -> None:
    meter = QueueMeter()
    assert meter.tokens_per_s is None
    assert not meter.planned(1_000, 3_000, 0.0)
    assert meter.planned(2_000, 1_000, 0.5)  # the first took half a second
    assert meter.tokens_per_s == pytest.approx(2_000.0)
    assert meter.planned(1_000, 0, 1.5)
    assert meter.tokens_per_s == pytest.approx(2_000.0)


def test_a_time_in_which_nobody_waited_does_not_count() -> None:
    meter = QueueMeter()
    meter.planned(1_000, 0, 0.0)
    assert not meter.follows
    assert not meter.planned(1_000, 0, 3_600.0)
    assert meter.tokens_per_s is None


def test_steps_in_which_none_begins_are_part_of_the_time() -> None:
    meter = QueueMeter()
    meter.planned(4_000, 500, 0.0)
    for at_s in (0.5, 1.0, 1.5):
        assert not meter.planned(0, 500, at_s)
    assert meter.planned(500, 0, 2.0)
    assert meter.tokens_per_s == pytest.approx(2_000.0)


def test_prompts_that_are_given_up_leave_no_time_to_measure() -> None:
    meter = QueueMeter()
    meter.planned(1_000, 500, 0.0)
    meter.planned(0, 0, 0.5)  # who waited was given up
    assert not meter.follows
    assert not meter.planned(2_000, 0, 10.0)
    assert meter.tokens_per_s is None


def test_an_engine_that_slows_down_is_seen_in_seconds() -> None:
    meter, at_s = QueueMeter(), 0.0
    for took_s in [0.1] * 600 + [0.4] * 300:
        meter.planned(1_000, 5_000, at_s)
        at_s += took_s
    assert meter.tokens_per_s is not None and 2_400 < meter.tokens_per_s < 3_200  # 10,000 before, 2,500 after
