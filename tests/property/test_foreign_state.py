"""What is made of an engine's messages equals what the engine holds, whatever is lost, repeated or restarted on the
way.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.ids import Tier
from tests.foreign_engines import Engine, Fold, Line, new_state, some_prompts

TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)
FAULTS = (
    "none",
    "lose",
    "restart",
    "restart away",
    "cut",
    "refuse",
    "silent",
    "lossy answer",
    "broken answer",
    "late answer",
    "check",
    "check late",
)


def held(fold: Fold) -> dict[Tier, set[bytes]]:
    return {tier: set(fold.held[tier]) for tier in TIERS}


def has_no_more_than(engine: Engine, fold: Fold, fault: str) -> None:
    """What is held is never more than the engine has."""
    for tier in TIERS:
        assert set(fold.held[tier]) <= engine.held().get(tier, set()), (fault, tier)


def befall(line: Line, choose: random.Random, fault: str) -> None:
    """What happens while nothing is brought."""
    engine = line.engine
    if "restart" in fault:
        engine.restart()
    loses = fault in ("lose", "refuse", "silent", "lossy answer", "broken answer", "restart away", "cut")
    if loses or (
        fault != "restart" and choose.random() < 0.2
    ):  # another process is another connection, if anything of it was lost
        for _ in range(choose.randint(1, 12)):
            engine.work()
    if fault == "lossy answer":
        line.lost_answers = 2
    if fault in ("restart away", "cut", "broken answer"):
        line.connect()
    if fault == "broken answer":
        line.broken_after = choose.randint(0, 3)
        line.settle()
    if fault.startswith("check"):
        line.silent = choose.random() < 0.3
        line.check()
        if fault == "check":
            line.settle()
        line.silent = False


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(FAULTS), max_size=12), st.sampled_from((10_000, 8)))
def test_what_is_held_is_what_the_engine_holds(seed: int, faults: list[str], buffered: int):
    choose = random.Random(seed)
    prompts = some_prompts(choose)
    engine = Engine(choose, prompts, buffered)
    for _ in range(choose.choice((0, 0, 5, 20))):
        engine.work()  # before anybody listens
    state, fold = new_state(), Fold()
    line = Line(engine, state, fold)
    line.connect()
    line.settle()
    for fault in ("none", *faults, "none"):
        line.refuses, line.silent = fault == "refuse", fault == "silent"
        befall(line, choose, fault)
        if fault == "broken answer":  # and nothing comes after it
            has_no_more_than(engine, fold, fault)
        for _ in range(choose.randint(1, 6)):
            line.bring(engine.work())
            if fault not in ("late answer", "check late") or choose.random() < 0.3:
                line.settle()
        line.settle()
        truth = {tier: engine.held().get(tier, set()) for tier in TIERS}
        has_no_more_than(engine, fold, fault)
        if not state.is_partial:
            assert held(fold) == truth, fault
    assert state.blocks.is_empty == (not any(fold.held.values()))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_memory_of_blocks_is_bounded_and_forgets_the_longest_gone(seed: int):
    choose = random.Random(seed)
    engine = Engine(choose, some_prompts(choose, 12))
    state, fold = new_state(most_gone=3, most_blocks=20), Fold()
    line = Line(engine, state, fold)
    line.connect()
    line.settle()
    for _ in range(60):
        line.bring(engine.work())
        assert state.blocks.remembered <= 23
    for tier in TIERS:
        assert set(fold.held[tier]) <= engine.held().get(tier, set())
