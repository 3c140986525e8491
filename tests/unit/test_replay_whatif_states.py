"""`kvbm-replay whatif --states`: which states of recurrent layers to store."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvbm.cli import replay_main
from kvbm.core.ids import SequenceHash
from kvbm.replay.whatif import Accesses
from kvbm.replay.whatif_states import HybridPool, what_if_states
from kvbm.workload.generator import ConversationMix, generate

BLOCK_TOKENS = 384  # of a Qwen3-Next


def block(number: int) -> SequenceHash:
    return SequenceHash(number.to_bytes(16, "little"))


def conversations(requests: int, block_tokens: int = BLOCK_TOKENS, mix: ConversationMix | None = None) -> Accesses:
    made = generate(3, requests, mix, block_tokens)
    prompts = [
        (0, [block(one) for one in request.hash_ids[: request.input_tokens // block_tokens]]) for request in made
    ]
    return Accesses("made", prompts, 1, block_tokens, 1.0, [])


def test_storing_every_state_finds_what_storing_every_block_finds() -> None:
    pool, held = HybridPool("all", 0), set[SequenceHash]()
    for _, prompt in conversations(300).prompts:
        assert pool.ask(prompt) == next((at for at, one in enumerate(prompt) if one not in held), len(prompt))
        held.update(prompt)


@pytest.mark.parametrize("policy", ["all", "ends", "second_use"])
def test_a_pool_finds_a_prompt_as_far_as_a_state_was_stored(policy: str) -> None:
    chosen = random.Random(policy)
    pool, states, seen = HybridPool(policy, 0), set[int](), dict[int, int]()
    held: set[int] = set()
    for _ in range(400):
        numbers = [
            at if at < chosen.randrange(6) else at + 10 * chosen.randrange(4) for at in range(chosen.randrange(1, 8))
        ]
        chain = [hash(tuple(numbers[: at + 1])) % (1 << 60) for at in range(len(numbers))]  # a block is all before it
        depth = next((at for at, one in enumerate(chain) if one not in held), len(chain))
        found = next((end for end in range(depth, 0, -1) if chain[end - 1] in states), 0)
        assert pool.ask([block(one) for one in chain]) == found
        for end, one in enumerate(chain, 1):
            if end <= found:
                continue
            seen[one] = seen.get(one, 0) + 1
            is_wanted = {"all": True, "second_use": seen[one] > 1}.get(
                policy, end == len(chain) or end == depth or seen[one] > 1
            )
            if is_wanted:
                states.add(one)
        held.update(chain)
    assert pool.stored_states == len(states)


def test_of_conversations_ends_and_partings_keep_the_hits_with_a_fraction_of_the_states() -> None:
    report = what_if_states(conversations(2000), ["ends"], [20_000], state_slots=3)
    every, ends, unbounded, unbounded_ends = report.results
    assert [one.states for one in report.results] == ["all", "ends"] * 2
    for whole, chosen in ((every, ends), (unbounded, unbounded_ends)):
        assert chosen.hit_blocks >= 0.9 * whole.hit_blocks
        assert chosen.stored_states <= 0.25 * whole.stored_states
    assert every.hit_blocks > 0.5 * every.blocks


def test_the_command_compares_policies_of_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 512 * 4, "output_length": 1, "hash_ids": [0, 1, 2 + at % 3, 9 + at]}
        for at in range(12)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        replay_main(["whatif", str(trace), "--capacity", "50", "--states", "ends,second_use", "--state-slots", "2"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "a state takes 2 slots" in printed
    assert [line.split()[1] for line in printed.splitlines()[2:]] == ["all", "ends", "second_use"] * 2
    with pytest.raises(SystemExit):
        replay_main(["whatif", str(trace), "--capacity", "50", "--states", "some"])
