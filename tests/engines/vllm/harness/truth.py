"""What is right: the same model without connector and without prefix cache, and how near an answer must come to it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.models import VOCABULARY
from tests.engines.vllm.harness.words import OUTPUT_TOKENS, Answer, Ask, Setup

TOLERANCE = 5e-4  # of a log probability; a CPU with AMX sums prompts side by side in another order than alone (2.5e-4)
_CLEAR = 2e-3  # by how much a chosen token leads at least; where two are as likely, which one is chosen says nothing


class WrongAnswerError(AssertionError):
    """An engine's answer is not the truth. The message says where."""


class Truth:
    """Right answers, each computed once, and prompts whose answers are clear."""

    def __init__(self, engines: Engines, model: str, options: Mapping[str, Any] | None = None) -> None:
        self._engines, self._model, self._options = engines, model, options or {}
        self._known: dict[tuple[tuple[int, ...], int, tuple[int, str] | None], Answer] = {}
        self._engine: Engine | None = None

    def of(self, asks: Sequence[Ask]) -> list[Answer]:
        """The right answer to each. What a request is salted with does not matter."""
        unknown = {(ask.tokens, ask.output_tokens, ask.lora): ask for ask in asks}
        unknown = {key: ask for key, ask in unknown.items() if key not in self._known}
        if unknown:
            plain = [Ask(ask.tokens, "", ask.output_tokens, None, ask.lora) for ask in unknown.values()]
            self._known.update(zip(unknown, self._running().generate(plain), strict=True))
        return [self._known[ask.tokens, ask.output_tokens, ask.lora] for ask in asks]

    def prompt(self, seed: str, tokens: int, after: Sequence[int] = (), output_tokens: int = OUTPUT_TOKENS) -> Ask:
        """A request for a prompt of so many tokens, the same for the same seed, that begins with `after`."""
        for attempt in range(20):
            chosen = random.Random(f"{seed}/{attempt}")
            more = [chosen.randrange(VOCABULARY) for _ in range(tokens - len(after))]
            ask = Ask((*after, *more), output_tokens=output_tokens)
            if is_clear(self.of([ask])[0]):
                return ask
        raise AssertionError(f"20 prompts of seed {seed!r} have answers that are too close")

    def prompts(self, seed: str, count: int, tokens: int, after: Sequence[int] = ()) -> list[Ask]:
        """Several of them."""
        return [self.prompt(f"{seed}-{at}", tokens, after) for at in range(count)]

    def check(self, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
        """Raises WrongAnswerError unless all answers are right."""
        assert len(asks) == len(answers)
        for at, (ask, answer, right) in enumerate(zip(asks, answers, self.of(asks), strict=True)):
            wrong = difference(answer, right)
            if wrong:
                raise WrongAnswerError(
                    f"request {at} of {len(asks)}, {len(ask.tokens)} tokens of which {answer.cached_tokens} came from "
                    f"a cache: {wrong}"
                )

    def close(self) -> None:
        """End the engine behind it."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _running(self) -> Engine:
        if self._engine is None:
            self._engine = self._engines.start(
                Setup(self._model, prefix_caching=False, requests=1, options=self._options)
            )
        return self._engine


def difference(answer: Answer, right: Answer) -> str:
    """Where an answer differs from the right one, "" when it does not.

    The chosen token's log probability and those of the likeliest tokens are compared at each position. Of two tokens
    that are equally likely either may be the last of the likeliest, so a token that only one of both names must be as
    likely as the other's last.
    """
    if answer.finish != "length":
        return f"it ended by {answer.finish!r}"
    if answer.tokens != right.tokens:
        at = next(
            (at for at, both in enumerate(zip(answer.tokens, right.tokens, strict=False)) if both[0] != both[1]), -1
        )
        return f"tokens {list(answer.tokens)} instead of {list(right.tokens)}, from output {at} on"
    for at, (said, known) in enumerate(zip(answer.likely, right.likely, strict=True)):
        least = min(said.values()), min(known.values())
        for token in said.keys() | known.keys():
            off = abs(said.get(token, least[0]) - known.get(token, least[1]))
            if not off <= TOLERANCE:  # a NaN is off too
                return f"output {at}, token {token}: log probability off by {off:g}"
    return ""


def is_clear(answer: Answer) -> bool:
    """Whether each chosen token leads the next likely one so far that no rounding makes it another."""
    for position in answer.likely:
        first, second = sorted(position.values(), reverse=True)[:2]
        if not first - second >= _CLEAR:
            return False
    return True
