"""What must hold of an engine with a connector, however it is set up. Each leaves the engine as it likes.

They ask nothing of the connector but answers that are right and hits where there must be some, so that a connector that
lies can be put through the same checks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Answer, Ask


class MissedError(AssertionError):
    """Fewer, or more, tokens came from a cache than must have."""


def ask(engine: Engine, truth: Truth, asks: Sequence[Ask], cached: Sequence[int] | None = None) -> list[Answer]:
    """Have requests answered, rightly, with so many tokens each from a cache (None: however many)."""
    answers = engine.generate(asks)
    truth.check(asks, answers)
    expect_cached(answers, cached)
    return answers


def ask_after_garbage(
    engine: Engine, truth: Truth, asks: Sequence[Ask], cached: Sequence[int] | None = None
) -> list[Answer]:
    """The same, once device KV was overwritten: what is claimed to be cached must have been loaded."""
    engine.forget()
    return ask(engine, truth, asks, cached)


def expect_cached(answers: Sequence[Answer], cached: Sequence[int] | None) -> None:
    """Raises MissedError unless so many tokens of each came from a cache."""
    found = [answer.cached_tokens for answer in answers]
    if cached is not None and found != list(cached):
        raise MissedError(f"tokens from a cache: {found}, not {list(cached)}")


def cold_then_warm(engine: Engine, truth: Truth, seed: str) -> None:
    """Prompts of several lengths, computed once and loaded after; one of them is shorter than a block."""
    asks = [truth.prompt(f"{seed}-{tokens}", tokens) for tokens in (20, 33, 64, 65, 150, 300, 481, 500)]
    ask(engine, truth, asks, [0] * len(asks))
    for _ in range(2):
        ask_after_garbage(engine, truth, asks, [one.reusable_tokens for one in asks])


def partial_hits(engine: Engine, truth: Truth, seed: str) -> None:
    """Prompts that share a beginning with one that is held get just that beginning."""
    whole = truth.prompt(seed, 320)
    ask(engine, truth, [whole], [0])
    for shared in (31, 32, 100, 192, 310):
        other = truth.prompt(f"{seed}-after-{shared}", 400, after=whole.tokens[:shared])
        ask_after_garbage(engine, truth, [other], [shared // BLOCK_TOKENS * BLOCK_TOKENS])
    ask_after_garbage(engine, truth, [Ask(whole.tokens[:96])], [64])  # the last block is computed for its output


def continued(engine: Engine, truth: Truth, seed: str) -> None:
    """A dialogue: what was generated is part of the next prompt, and is loaded as well."""
    tokens: tuple[int, ...] = truth.prompt(seed, 100).tokens
    for turn in range(4):
        one = truth.prompt(f"{seed}-{turn}", len(tokens) + 20, after=tokens, output_tokens=30)
        answer = ask_after_garbage(engine, truth, [one])[0]
        if turn:
            held = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # of the last output token there is no KV
            expect_cached([answer], [held])
        tokens = one.tokens + answer.tokens


def salts(engine: Engine, truth: Truth, seed: str) -> None:
    """The same tokens under another salt, or none, are another prompt: neither is answered with the other's blocks."""
    plain = truth.prompt(seed, 200)
    a, b = plain._replace(salt="a"), plain._replace(salt="b")
    ask(engine, truth, [a], [0])
    ask_after_garbage(engine, truth, [b, plain], [0, 0])
    ask_after_garbage(engine, truth, [a, b, plain], [plain.reusable_tokens] * 3)


def shared_in_a_batch(engine: Engine, truth: Truth, seed: str) -> None:
    """Requests of one batch that begin alike load the beginning, each or one for all, and are all answered rightly."""
    beginning = truth.prompt(seed, 256)
    asks = [truth.prompt(f"{seed}-{at}", 300, after=beginning.tokens) for at in range(6)]
    ask(engine, truth, [beginning], [0])
    ask_after_garbage(engine, truth, asks, [256] * len(asks))
    ask_after_garbage(engine, truth, asks, [one.reusable_tokens for one in asks])


def forgotten_everywhere(engine: Engine, truth: Truth, seed: str) -> None:
    """`reset_prefix_cache` with `reset_connector` leaves nothing to load, and what comes after is kept again."""
    asks = truth.prompts(seed, 2, 200)
    ask(engine, truth, asks, [0, 0])
    engine.forget(with_connector=True)
    ask(engine, truth, asks, [0, 0])
    ask_after_garbage(engine, truth, asks, [one.reusable_tokens for one in asks])


def pressure(engine: Engine, truth: Truth, seed: str, prompts: int = 24, rounds: int = 4) -> int:
    """Many prompts, more than there is room for, in any order and several at a time; gives how many tokens were not
    computed.
    """
    chosen = random.Random(seed)
    stems = truth.prompts(seed, 4, 128)
    asks = [truth.prompt(f"{seed}/{at}", 200 + 16 * (at % 7), after=stems[at % 4].tokens) for at in range(prompts)]
    cached = 0
    for _ in range(rounds):
        chosen.shuffle(asks)
        for begin in range(0, len(asks), 6):
            cached += sum(answer.cached_tokens for answer in ask_after_garbage(engine, truth, asks[begin : begin + 6]))
    return cached


EVERYWHERE = (cold_then_warm, partial_hits, continued, salts, shared_in_a_batch, forgotten_everywhere)
