"""Made-up conversations, the same for the same seed: a workload for those who have no trace.

Conversations share a few system prompts, some far more popular than others, and grow turn by turn: a turn's prompt is
the whole history (system prompt, earlier questions and answers) with a new question at its end.
"""

from __future__ import annotations

import heapq
import random
from itertools import accumulate, islice
from typing import NamedTuple

from kvbm.core.errors import ConfigError
from kvbm.workload.trace import TRACE_BLOCK_TOKENS, TraceRequest


class ConversationMix(NamedTuple):
    """What generated conversations are like. Where a mean is given, values are exponential and at least 1.

    Attributes:
        system_prompts: how many different ones there are, at least 1.
        system_prompt_tokens: tokens of each, 0 or more.
        zipf_exponent: the k-th most popular is drawn in proportion to 1 / k ** zipf_exponent; 0 draws them evenly.
        mean_turns: questions per conversation, at least 1; geometric.
        mean_user_tokens, mean_answer_tokens: of one turn, at least 1.
        mean_arrival_gap_s: between the starts of two conversations, above 0.
        mean_think_s: from one question to the next of the same conversation, above 0.
        max_input_tokens: a conversation ends rather than send a longer prompt.
        system_prompt_spread: lengths of system prompts lie between system_prompt_tokens divided by it and times it; 1
            or more.
        long_think_share, mean_long_think_s: so many pauses are of this mean instead; a share of 0 to 1, and above 0.
    """

    system_prompts: int = 8
    system_prompt_tokens: int = 2_048
    zipf_exponent: float = 1.0
    mean_turns: float = 4.0
    mean_user_tokens: float = 1_500.0
    mean_answer_tokens: float = 350.0
    mean_arrival_gap_s: float = 1.0
    mean_think_s: float = 60.0
    max_input_tokens: int = 131_072
    system_prompt_spread: float = 1.0
    long_think_share: float = 0.0
    mean_long_think_s: float = 300.0


class Dialogue(NamedTuple):
    """One conversation as token ids. Whoever drives it appends the model's answer after each question.

    Attributes:
        system_prompt: index of its system prompt; dialogues with the same index begin with the same tokens.
        system_tokens: tokens of that prompt.
        user_turns: tokens of each question, in order.
    """

    system_prompt: int
    system_tokens: tuple[int, ...]
    user_turns: tuple[tuple[int, ...], ...]


def generate(
    seed: int, requests: int, mix: ConversationMix | None = None, block_tokens: int = TRACE_BLOCK_TOKENS
) -> list[TraceRequest]:
    """Requests of many interleaved conversations, in order of arrival, in the form of a recorded trace.

    Hash ids count from 0 in order of first appearance. A partial last block has an id of its own, never seen again, as
    in the recorded format: the next turn fills that block with other tokens.

    Args:
        seed: the same seed gives the same requests.
        requests: how many to give, 0 or more.
        mix: what the conversations are like; None for the defaults.
        block_tokens: tokens that one hash id covers, at least 1.
    Raises: ConfigError: a number is out of its range.
    """
    mix = mix or ConversationMix()
    _check(mix)
    _check_at_least("requests", requests, 0)
    _check_at_least("block_tokens", block_tokens, 1)
    rng = random.Random(seed)
    popularity = _popularity(mix.system_prompts, mix.zipf_exponent)
    lengths = _system_prompt_tokens(random.Random(f"system prompts {seed}"), mix)
    ids = _HashIds()
    given: list[TraceRequest] = []
    started = 1
    # (arrival_s, conversation number, its state): numbers differ, so states are never compared
    turns: list[tuple[float, int, _Conversation]] = [(0.0, 0, _begin(rng, mix, popularity, lengths))]
    while len(given) < requests:
        arrival_s, number, conversation = heapq.heappop(turns)
        if conversation.turn == 0:
            start_s = arrival_s + rng.expovariate(1.0 / mix.mean_arrival_gap_s)
            heapq.heappush(turns, (start_s, started, _begin(rng, mix, popularity, lengths)))
            started += 1
        answer_tokens = _length(rng, mix.mean_answer_tokens)
        input_tokens = conversation.input_tokens
        shared_tokens = lengths[conversation.system_prompt]
        hash_ids = ids.of(conversation.system_prompt, number, input_tokens, shared_tokens, block_tokens)
        given.append(TraceRequest(int(arrival_s * 1000), input_tokens, answer_tokens, hash_ids))
        following_tokens = input_tokens + answer_tokens + _length(rng, mix.mean_user_tokens)
        goes_on = rng.random() >= 1.0 / mix.mean_turns
        if goes_on and following_tokens <= mix.max_input_tokens:
            is_long = mix.long_think_share > 0 and rng.random() < mix.long_think_share
            mean_s = mix.mean_long_think_s if is_long else mix.mean_think_s
            after_s = arrival_s + rng.expovariate(1.0 / mean_s)
            following = _Conversation(conversation.system_prompt, conversation.turn + 1, following_tokens)
            heapq.heappush(turns, (after_s, number, following))
    return given


def generate_dialogues(
    seed: int,
    dialogues: int,
    turns: int,
    vocabulary_size: int,
    system_prompts: int = 3,
    system_prompt_tokens: int = 64,
    user_tokens: int = 24,
    zipf_exponent: float = 1.0,
) -> list[Dialogue]:
    """Conversations as real token ids, for an engine that runs a model.

    Every system prompt and question has exactly the given length, so that sizes can be chosen against block_tokens.

    Args:
        seed: the same seed gives the same dialogues.
        dialogues: how many to give, 0 or more.
        turns: questions in each, at least 1.
        vocabulary_size: token ids are below it; at least 1.
        system_prompts: how many different ones there are, at least 1.
        system_prompt_tokens: tokens of each, 0 or more.
        user_tokens: tokens of each question, at least 1.
        zipf_exponent: popularity of system prompts, as in ConversationMix.
    Raises: ConfigError: a number is out of its range.
    """
    _check_at_least("dialogues", dialogues, 0)
    _check_at_least("turns", turns, 1)
    _check_at_least("vocabulary_size", vocabulary_size, 1)
    _check_at_least("system_prompts", system_prompts, 1)
    _check_at_least("system_prompt_tokens", system_prompt_tokens, 0)
    _check_at_least("user_tokens", user_tokens, 1)
    _check_at_least("zipf_exponent", zipf_exponent, 0)
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary_size) for _ in range(count))

    prompts = [tokens(system_prompt_tokens) for _ in range(system_prompts)]
    popularity = _popularity(system_prompts, zipf_exponent)
    given: list[Dialogue] = []
    for _ in range(dialogues):
        drawn = _draw(rng, popularity)
        given.append(Dialogue(drawn, prompts[drawn], tuple(tokens(user_tokens) for _ in range(turns))))
    return given


class _Conversation(NamedTuple):
    """A conversation before its next question: the system prompt's index, the turn from 0, the prompt's length."""

    system_prompt: int
    turn: int
    input_tokens: int


class _HashIds:
    """Gives each distinct prefix the next free number, from 0."""

    def __init__(self) -> None:
        self._shared: dict[tuple[int, int], int] = {}  # (system prompt, block index) → id
        self._private: dict[int, list[int]] = {}  # conversation number → ids of its full blocks behind the shared ones
        self._next = 0

    def of(
        self, system_prompt: int, number: int, input_tokens: int, shared_tokens: int, block_tokens: int
    ) -> tuple[int, ...]:
        # [0, shared) lie wholly in the system prompt · [shared, full) belong to the conversation · then the partial one
        shared = min(shared_tokens, input_tokens) // block_tokens
        full, rest = divmod(input_tokens, block_tokens)
        ids = [self._shared_id(system_prompt, block) for block in range(shared)]
        private = self._private.setdefault(number, [])
        private.extend(self._fresh() for _ in range(full - shared - len(private)))
        ids.extend(islice(private, full - shared))
        if rest:
            ids.append(self._fresh())
        return tuple(ids)

    def _shared_id(self, system_prompt: int, block: int) -> int:
        key = (system_prompt, block)
        if key not in self._shared:
            self._shared[key] = self._fresh()
        return self._shared[key]

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def _begin(rng: random.Random, mix: ConversationMix, popularity: list[float], lengths: list[int]) -> _Conversation:
    system_prompt = _draw(rng, popularity)
    shared_tokens = lengths[system_prompt]
    longest = mix.max_input_tokens - shared_tokens
    return _Conversation(system_prompt, 0, shared_tokens + min(longest, _length(rng, mix.mean_user_tokens)))


def _system_prompt_tokens(rng: random.Random, mix: ConversationMix) -> list[int]:
    """The length of each system prompt; popularity and length have nothing to do with each other."""
    longest = mix.max_input_tokens - 1
    return [
        min(longest, round(mix.system_prompt_tokens * mix.system_prompt_spread ** rng.uniform(-1.0, 1.0)))
        for _ in range(mix.system_prompts)
    ]


def _length(rng: random.Random, mean_tokens: float) -> int:
    return max(1, round(rng.expovariate(1.0 / mean_tokens)))


def _popularity(count: int, zipf_exponent: float) -> list[float]:
    """Cumulative Zipf weights of `count` things, the most popular first."""
    return list(accumulate(1.0 / rank**zipf_exponent for rank in range(1, count + 1)))


def _draw(rng: random.Random, popularity: list[float]) -> int:
    return rng.choices(range(len(popularity)), cum_weights=popularity)[0]


def _check(mix: ConversationMix) -> None:
    _check_at_least("system_prompts", mix.system_prompts, 1)
    _check_at_least("system_prompt_tokens", mix.system_prompt_tokens, 0)
    _check_at_least("zipf_exponent", mix.zipf_exponent, 0)
    _check_at_least("mean_turns", mix.mean_turns, 1)
    _check_at_least("mean_user_tokens", mix.mean_user_tokens, 1)
    _check_at_least("mean_answer_tokens", mix.mean_answer_tokens, 1)
    _check_above_zero("mean_arrival_gap_s", mix.mean_arrival_gap_s)
    _check_above_zero("mean_think_s", mix.mean_think_s)
    _check_above_zero("mean_long_think_s", mix.mean_long_think_s)
    _check_at_least("system_prompt_spread", mix.system_prompt_spread, 1)
    _check_at_least("long_think_share", mix.long_think_share, 0)
    _check_at_least("max_input_tokens", mix.max_input_tokens, mix.system_prompt_tokens + 1)


def _check_at_least(name: str, value: float, least: int) -> None:
    if not value >= least:  # written so that NaN fails too
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


def _check_above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}; it must be above 0")
