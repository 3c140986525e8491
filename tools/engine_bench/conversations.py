"""A scripted workload: conversations of several turns that begin with one of a few system prompts, continued as Zipf's
law has it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Script:
    """Whose turn it is, from a seed.

    Attributes:
        open: conversations going on at a time; of rank r, one is continued with a probability proportional to 1 / r.
        turns: after so many a conversation is over, and another takes its place.
        system_tokens, turn_tokens: shortest and longest.
    """

    seed: int
    vocabulary: int
    open: int = 24
    turns: int = 7
    system_prompts: int = 4
    system_tokens: tuple[int, int] = (100, 260)
    turn_tokens: tuple[int, int] = (15, 90)
    _said: list[list[int]] = field(default_factory=list, init=False)
    _turns: list[int] = field(default_factory=list, init=False)
    _at: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._systems = [self._tokens(self.system_tokens) for _ in range(self.system_prompts)]
        self._said = [self._beginning() for _ in range(self.open)]
        self._turns = [0] * self.open

    def next(self) -> list[int]:
        """The next prompt: all that was said in its conversation, and a new turn."""
        self._at = self._random.choices(range(self.open), [1 / rank for rank in range(1, self.open + 1)])[0]
        self._said[self._at] += self._tokens(self.turn_tokens)
        return list(self._said[self._at])

    def answered(self, output: Sequence[int]) -> None:
        """What the engine has answered to the last prompt; the conversation goes on from there, or is over."""
        self._said[self._at] += output
        self._turns[self._at] += 1
        if self._turns[self._at] == self.turns:
            self._said[self._at], self._turns[self._at] = self._beginning(), 0

    def _beginning(self) -> list[int]:
        ranks = range(1, self.system_prompts + 1)
        return list(self._random.choices(self._systems, [1 / rank for rank in ranks])[0])

    def _tokens(self, least_most: tuple[int, int]) -> list[int]:
        return [self._random.randrange(self.vocabulary) for _ in range(self._random.randint(*least_most))]
