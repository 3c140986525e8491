"""Generated conversations."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from kvbm.core.errors import ConfigError
from kvbm.workload.generator import ConversationMix, generate, generate_dialogues
from kvbm.workload.trace import TraceRequest, full_blocks, read_trace

MIX = ConversationMix(system_prompts=3, system_prompt_tokens=1_300, mean_turns=4.0, mean_think_s=20.0)


def first_appearances(requests: list[TraceRequest]) -> list[int]:
    return list(dict.fromkeys(block for request in requests for block in request.hash_ids))


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    assert generate(7, 300, MIX) == generate(7, 300, MIX)
    assert generate(7, 300, MIX) != generate(8, 300, MIX)


def test_fewer_requests_are_the_beginning_of_more() -> None:
    assert generate(7, 300, MIX)[:120] == generate(7, 120, MIX)
    assert generate(7, 0, MIX) == []


def test_requests_arrive_in_order_and_ids_count_up_from_zero() -> None:
    requests = generate(1, 400, MIX)
    arrivals = [request.timestamp_ms for request in requests]
    assert arrivals == sorted(arrivals)
    assert first_appearances(requests) == list(range(len(first_appearances(requests))))


def test_an_equal_id_means_an_equal_prefix() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in generate(2, 600, MIX):
        for index, block in enumerate(request.hash_ids):
            assert before.setdefault(block, request.hash_ids[:index]) == request.hash_ids[:index]


def test_a_partial_last_block_is_never_seen_again() -> None:
    requests = generate(3, 600, MIX)
    seen = Counter(block for request in requests for block in request.hash_ids)
    partial = [request.hash_ids[-1] for request in requests if request.input_tokens % 512]
    assert partial and all(seen[block] == 1 for block in partial)


def test_conversations_share_only_the_full_blocks_of_their_system_prompt() -> None:
    requests = generate(4, 500, MIX._replace(mean_turns=1.0))  # one turn each: whatever is shared is a system prompt's
    seen = Counter(block for request in requests for block in full_blocks(request))
    shared = {block for block, count in seen.items() if count > 1}
    assert len(shared) == 3 * (1_300 // 512)
    assert all(set(request.hash_ids[:2]) <= shared and not set(request.hash_ids[2:]) & shared for request in requests)


def test_a_later_turn_repeats_the_whole_history() -> None:
    lone = MIX._replace(mean_arrival_gap_s=1e9, mean_turns=1e9)  # one conversation that goes on
    requests = generate(5, 8, lone)
    for earlier, later in itertools.pairwise(requests):
        assert full_blocks(later)[: len(full_blocks(earlier))] == full_blocks(earlier)
        assert later.input_tokens > earlier.input_tokens + earlier.output_tokens


def test_popular_system_prompts_are_drawn_more_often() -> None:
    dialogues = generate_dialogues(6, 2_000, turns=1, vocabulary_size=100, system_prompts=4, system_prompt_tokens=8)
    counts = Counter(dialogue.system_prompt for dialogue in dialogues)
    assert counts[0] > counts[1] > counts[2] > counts[3] > 0
    assert counts[0] / counts[3] == pytest.approx(4.0, rel=0.4)


def test_means_are_kept() -> None:
    requests = generate(9, 4_000, MIX._replace(mean_think_s=1.0, mean_turns=2.0, mean_arrival_gap_s=0.5))
    answers = [request.output_tokens for request in requests]
    assert sum(answers) / len(answers) == pytest.approx(MIX.mean_answer_tokens, rel=0.1)
    assert requests[-1].timestamp_ms == pytest.approx(4_000 / 2.0 * 0.5 * 1_000, rel=0.1)


def test_no_prompt_exceeds_the_longest_allowed() -> None:
    requests = generate(10, 500, MIX._replace(max_input_tokens=2_000, mean_turns=50.0))
    assert max(request.input_tokens for request in requests) <= 2_000


def test_generated_requests_pass_through_a_trace_file(tmp_path: Path) -> None:
    requests = generate(11, 200, MIX)
    path = tmp_path / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, request, strict=True))) + "\n" for request in requests))
    assert list(read_trace(path)) == requests


def test_a_block_size_of_its_own_decides_how_many_ids_there_are() -> None:
    for request in generate(12, 100, MIX, block_tokens=100):
        assert len(request.hash_ids) == -(-request.input_tokens // 100)


def test_dialogues_of_one_system_prompt_begin_with_its_tokens_and_go_on_with_their_own() -> None:
    dialogues = generate_dialogues(1, 40, turns=3, vocabulary_size=50_000, system_prompts=2)
    prompts = {dialogue.system_prompt: dialogue.system_tokens for dialogue in dialogues}
    assert len(prompts) == 2 and prompts[0] != prompts[1]
    for dialogue in dialogues:
        assert dialogue.system_tokens == prompts[dialogue.system_prompt]
        assert len(dialogue.system_tokens) == 64
        assert [len(turn) for turn in dialogue.user_turns] == [24, 24, 24]
        assert all(0 <= token < 50_000 for turn in dialogue.user_turns for token in turn)
    assert len({dialogue.user_turns for dialogue in dialogues}) == 40


def test_the_same_seed_gives_the_same_dialogues() -> None:
    assert generate_dialogues(3, 5, 2, 100) == generate_dialogues(3, 5, 2, 100)
    assert generate_dialogues(3, 5, 2, 100) != generate_dialogues(4, 5, 2, 100)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (MIX._replace(system_prompts=0), "system_prompts is 0; it must be 1 or more"),
        (MIX._replace(mean_turns=0.5), "mean_turns is 0.5; it must be 1 or more"),
        (MIX._replace(mean_think_s=0.0), "mean_think_s is 0.0; it must be above 0"),
        (MIX._replace(mean_arrival_gap_s=float("nan")), "mean_arrival_gap_s is nan; it must be above 0"),
        (MIX._replace(max_input_tokens=1_300), "max_input_tokens is 1300; it must be 1301 or more"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_with_its_number(mix: ConversationMix, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(1, 1, mix)


def test_dialogues_without_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match="turns is 0; it must be 1 or more"):
        generate_dialogues(1, 1, turns=0, vocabulary_size=10)


def test_system_prompts_may_differ_in_length_and_pauses_may_be_long() -> None:
    spread = MIX._replace(system_prompts=20, system_prompt_tokens=4_000, system_prompt_spread=2.0, mean_turns=1.0)
    requests = generate(4, 800, spread)
    seen = Counter(block for request in requests for block in full_blocks(request))
    shared = {sum(seen[block] > 1 for block in full_blocks(request)) for request in requests}
    assert len(shared) > 5
    assert 2_000 // 512 <= min(shared) < 4_000 // 512 < max(shared) <= 8_000 // 512
    often = MIX._replace(mean_arrival_gap_s=1e-3, mean_turns=2.0)
    with_long = often._replace(long_think_share=0.5, mean_long_think_s=100_000.0)
    assert generate(4, 3_000, with_long)[-1].timestamp_ms > generate(4, 3_000, often)[-1].timestamp_ms
