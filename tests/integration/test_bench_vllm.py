"""What the benchmark inside vLLM computes about its samples, and the LRU it holds kvbm to."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest


class Parts(NamedTuple):
    bench: ModuleType
    conversations: ModuleType
    lru: ModuleType
    model: ModuleType
    paired: ModuleType


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Parts:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "tools"))
    import bench_vllm
    from engine_bench import conversations, lru, model, paired

    return Parts(bench_vllm, conversations, lru, model, paired)


def test_students_t_is_that_of_the_tables(parts: Parts) -> None:
    tables = {3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 19: 2.093, 29: 2.045, 120: 1.980}
    for degrees, value in tables.items():
        assert parts.paired.student_t(degrees) == pytest.approx(value, rel=0.003)
    assert math.isinf(parts.paired.student_t(1))


def test_the_interval_of_a_mean_is_the_textbooks(parts: Parts) -> None:
    found = parts.paired.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(1.963, rel=0.003)
    assert math.isinf(parts.paired.interval([1.0, 1.0]).half)


def test_the_interval_holds_the_truth_nineteen_times_of_twenty(parts: Parts) -> None:
    chance = random.Random(3)
    samples = [[chance.gauss(1.0, 0.05) for _ in range(8)] for _ in range(2000)]
    found = [parts.paired.interval(sample) for sample in samples]
    assert sum(abs(one.mean - 1.0) <= one.half for one in found) / len(found) == pytest.approx(0.95, abs=0.015)


def test_a_few_values_that_happen_to_agree_do_not_end_a_measurement(parts: Parts) -> None:
    assert not parts.paired.is_settled([1.0, 1.0, 1.0], 0.01, 6)
    assert parts.paired.is_settled([1.0, 1.0, 1.0, 1.001, 1.0, 1.0], 0.01, 6)
    assert not parts.paired.is_settled([1.0, 1.1, 0.9, 1.2, 0.8, 1.0], 0.01, 6)


def test_a_spread_is_half_the_distance_of_the_quartiles_over_the_median(parts: Parts) -> None:
    assert parts.paired.spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.15)
    assert parts.paired.spread([1.0]) is None


def measured_pairs(
    parts: Parts, seconds: dict[bool, list[float]], most: int
) -> tuple[list[Any], list[tuple[int, bool]]]:
    """What comes of processes that take so long, without kvbm and with it, and in which order they were measured."""
    order: list[tuple[int, bool]] = []

    def measured(number: int, is_with: bool) -> Any:
        order.append((number, is_with))
        return parts.bench.Ran(seconds[is_with][number], 1.0, [], [])

    def is_enough(pairs: Any) -> bool:
        return bool(parts.paired.is_settled([pair.time for pair in pairs], 0.01, 6))

    return parts.bench.alternating(measured, is_enough, most), order


def test_processes_without_and_with_take_turns_in_being_first(parts: Parts) -> None:
    pairs, order = measured_pairs(parts, {False: [2.0, 4.0, 2.0], True: [1.0, 6.0, 2.0]}, 3)
    assert [is_with for _, is_with in order] == [False, True, True, False, False, True]
    assert [number for number, _ in order] == [0, 0, 1, 1, 2, 2]
    assert [pair.time for pair in pairs] == [0.5, 1.5, 1.0]


def test_pairs_of_processes_end_when_their_interval_is_narrow_or_there_are_enough(parts: Parts) -> None:
    steady = {False: [1.0] * 20, True: [1.0, 1.001] * 10}
    assert len(measured_pairs(parts, steady, 20)[0]) == 6
    noisy = {False: [1.0] * 20, True: [1.0, 1.2] * 10}
    assert len(measured_pairs(parts, noisy, 20)[0]) == 20
    settling = {False: [1.0] * 20, True: [1.03, *[1.0] * 19]}
    assert 6 < len(measured_pairs(parts, settling, 20)[0]) < 20


def test_a_process_counts_as_the_mean_of_its_rounds(parts: Parts) -> None:
    found = parts.bench.mean_of([parts.bench.Ran(1.0, 2.0, [[1]], [0]), parts.bench.Ran(2.0, 4.0, [[2]], [0])])
    assert found[:2] == (1.5, 3.0)


@pytest.mark.parametrize(
    ("with_s", "met"),
    [([1.004, 1.005] * 4, True), ([1.02, 1.021] * 4, False), ([0.98, 0.981] * 4, False), ([1.0, 1.1] * 4, None)],
)
def test_the_goal_is_a_change_of_a_percent_either_way_where_it_is_known_so_well(
    parts: Parts, tmp_path: Path, with_s: list[float], met: bool | None
) -> None:
    bench = parts.bench.Bench(parts.bench.QUICK, parts.model.TINY, tmp_path, 1, control=False)
    ran = [parts.bench.Ran(seconds, 1.0, [], []) for seconds in with_s]
    pairs = [parts.bench.Pair(parts.bench.Ran(1.0, 1.0, [], []), one) for one in ran]
    found = bench._processes_found({"HOST": pairs}, 1.0)
    assert found.rows[0].met is met
    assert found.rows[0].value == pytest.approx(sum(with_s) / len(with_s) - 1)
    assert found.numbers["process_pairs_host"] == len(pairs)


def served(parts: Parts, *prompts: range) -> list[object]:
    return [parts.lru.Served(list(prompt), [1000]) for prompt in prompts]


def test_an_lru_answers_for_whole_blocks_of_a_prefix_and_never_for_the_last_token(parts: Parts) -> None:
    requests = served(parts, range(9), range(9), range(8), range(12), range(1, 9))
    assert parts.lru.hit_tokens(requests, 100, 4) == [0, 8, 4, 8, 0]


def test_generated_tokens_are_hits_of_the_next_turn_except_the_last_ones_block(parts: Parts) -> None:
    first = parts.lru.Served([1, 2, 3, 4, 5, 6], [7, 8, 9])
    again = parts.lru.Served([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0])
    assert parts.lru.hit_tokens([first, again], 100, 4) == [0, 8]
    shorter = parts.lru.Served([1, 2, 3, 4, 5, 6], [7, 8])
    assert parts.lru.hit_tokens([shorter, again], 100, 4) == [0, 4]  # token 8 was answered, its KV never computed


def test_an_lru_gives_up_the_deepest_blocks_of_the_oldest_chain_first(parts: Parts) -> None:
    old, new = range(17), range(100, 117)
    assert parts.lru.hit_tokens(served(parts, old, new, old), 6, 4) == [0, 0, 8]
    assert parts.lru.hit_tokens(served(parts, old, new, old), 8, 4) == [0, 0, 16]
    assert parts.lru.hit_tokens(served(parts, old, new, range(9), range(200, 205), old), 8, 4)[-1] == 12


def test_a_chain_longer_than_the_slots_keeps_its_beginning(parts: Parts) -> None:
    assert parts.lru.hit_tokens(served(parts, range(41), range(41)), 3, 4) == [0, 12]


def test_a_script_is_the_same_again_and_its_conversations_go_on_where_they_were(parts: Parts) -> None:
    first, second = (parts.conversations.Script(seed=5, vocabulary=64, open=3, turns=3) for _ in range(2))
    heard: list[list[int]] = []
    continued = 0
    for turn in range(60):
        prompt = first.next()
        assert prompt == second.next()
        continued += any(prompt[: len(one)] == one for one in heard)
        for script in (first, second):
            script.answered([turn, turn])
        heard.append([*prompt, turn, turn])
    assert continued == 60 * 2 // 3


def test_a_models_words_are_its_numbers(parts: Parts) -> None:
    shape = parts.model.MIDDLE
    assert 20e6 < shape.parameters < 100e6
    assert shape.kv_bytes_per_token == 8192
    assert "33 M" in shape.words


def test_without_vllm_a_sentence_says_what_to_do(pytestconfig: pytest.Config) -> None:
    hidden = "import importlib.util as u, runpy, sys; found = u.find_spec; sys.path.insert(0, 'tools'); "
    hidden += "u.find_spec = lambda name, *more: None if name == 'vllm' else found(name, *more); "
    hidden += "sys.argv = ['bench_vllm.py']; runpy.run_path('tools/bench_vllm.py', run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", hidden],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("vLLM is not installed for ")
    assert "pip install" in ended.stderr
