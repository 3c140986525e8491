"""Whatever is damaged, missing, late or refused, answers are right, nothing hangs, and the engine goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engines.vllm.harness import patches, scenarios
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import WrongAnswerError
from tests.engines.vllm.harness.words import Ask

FULL = pytest.mark.engines_full
HEADER_BYTES = 4096
NVME = {"pools.nvme.slots": 400}
PATCHES = "tests.engines.vllm.harness.patches"
ENGINES = [
    pytest.param("llama", {}, id="inside"),
    pytest.param("gemma", {"core": "process"}, id="hybrid-process"),
    pytest.param("llama", {"ranks": 2, "core": "process", "asynchronous": True}, id="ranks", marks=FULL),
]


def reusable(asks: list[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


def pool_file(folder: Path) -> Path:
    found = list(folder.rglob("nvme.pool"))
    assert len(found) == 1
    return found[0]


def change(path: Path, how: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change what a file holds behind its header, as a failing device would: under whoever has it open."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        changed = how(np.frombuffer(file.read(), dtype=np.uint8))
        file.seek(HEADER_BYTES)
        file.write(changed.tobytes())
        os.fsync(file.fileno())


def flip_everywhere(path: Path) -> None:
    change(path, lambda data: patches.flip_bits(data, 512))


def flip_here_and_there(path: Path) -> None:
    """In about every third block of 36 KiB."""
    change(path, lambda data: patches.flip_bits(data, 100_003 * 4))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_the_header(path: Path) -> None:
    os.truncate(path, HEADER_BYTES)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    change(path, np.zeros_like)


def delete(path: Path) -> None:
    path.unlink()


DAMAGES = [flip_everywhere, flip_here_and_there, zero, cut_in_half, cut_to_the_header, delete]


def store_to_nvme(engine: Engine, truth, asks: list[Ask]) -> None:
    scenarios.ask(engine, truth, asks, [0] * len(asks))
    engine.offload()


@pytest.mark.parametrize("damage", [*DAMAGES, cut_to_nothing], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(("kind", "setup"), ENGINES)
def test_nvme_damaged_under_a_running_engine(engines, truth_of, tmp_path, kind, setup, damage):
    truth = truth_of(kind)
    asks = truth.prompts("damaged", 4, 300)
    with engines.running(with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)) as engine:
        store_to_nvme(engine, truth, asks)
        damage(pool_file(tmp_path))
        engine.in_core("drop", "HOST")
        answers = scenarios.ask_after_garbage(engine, truth, asks)
        if damage in (flip_everywhere, zero, cut_to_the_header, cut_to_nothing):
            scenarios.expect_cached(answers, [0] * 4)
        elif damage is delete:
            scenarios.expect_cached(answers, reusable(asks))  # the open file is still whole
        if damage is flip_everywhere:
            assert engine.in_core("counted")["corrupt_blocks"] > 0
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))  # from HOST, which has them again
        more = truth.prompts("after-damage", 4, 300)
        scenarios.ask(engine, truth, more, [0] * 4)
        scenarios.ask_after_garbage(engine, truth, more, reusable(more))
        assert engine.in_core("refusal") == ""


@pytest.mark.parametrize("damage", [*DAMAGES, cut_to_nothing], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(("kind", "setup"), ENGINES)
def test_nvme_damaged_between_two_runs(engines, truth_of, tmp_path, kind, setup, damage):
    truth = truth_of(kind)
    asks = truth.prompts("damaged", 4, 300)
    described = with_kvbm(engines.model(kind), tmp_path / "a", NVME, **setup)
    with engines.running(described) as engine:
        store_to_nvme(engine, truth, asks)
    damage(pool_file(tmp_path))
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, None if damage is flip_here_and_there or damage is cut_in_half else [0] * 4)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))


@pytest.mark.parametrize("loss", ["journal", "everything"])
def test_files_gone_between_two_runs(engines, llama, truth, tmp_path, loss):
    asks = truth.prompts("gone", 3, 300)
    described = with_kvbm(llama, tmp_path / "a", NVME)
    with engines.running(described) as engine:
        store_to_nvme(engine, truth, asks)
    journals = list(tmp_path.rglob("journal"))
    assert len(journals) == 1
    shutil.rmtree(journals[0] if loss == "journal" else tmp_path / "a")
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))


def test_without_checksums_the_same_flipped_bits_are_caught_by_this_suite(engines, llama, truth, tmp_path):
    """The negative control of all of the above."""
    asks = truth.prompts("damaged", 4, 300)
    described = with_kvbm(llama, tmp_path / "a", NVME, patches=(f"{PATCHES}:nothing_is_verified",))
    with engines.running(described) as engine:
        store_to_nvme(engine, truth, asks)
        flip_everywhere(pool_file(tmp_path))
        engine.in_core("drop", "HOST")
        with pytest.raises(WrongAnswerError):
            scenarios.ask_after_garbage(engine, truth, asks)


COPY_ENGINES = [
    pytest.param("llama", {}, {}, id="inside"),
    pytest.param("llama", {"core": "process", "asynchronous": True}, {}, id="process"),
    pytest.param("gemma", {}, {}, id="hybrid"),
    pytest.param("llama", {"ranks": 2, "core": "process"}, {patches.RANK: "1"}, id="one-rank"),
]


@pytest.mark.parametrize("failing", ["loads_fail_at_once", "loads_fail_late"])
@pytest.mark.parametrize(("kind", "setup", "said"), COPY_ENGINES)
def test_loads_that_fail_are_computed(engines, truth_of, tmp_path, kind, setup, said, failing):
    truth = truth_of(kind)
    asks = truth.prompts("failing", 4, 300)
    described = with_kvbm(
        engines.model(kind),
        tmp_path / "a",
        NVME,
        patches=(f"{PATCHES}:{failing}",),
        environment={patches.SKIPPED: "2", **said},
        **setup,
    )
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0] * 4)
        for _ in range(3):
            scenarios.ask_after_garbage(engine, truth, asks)
        assert engine.metrics()["kvbm_vllm_failed_loads_total{}"] > 0
        assert engine.in_core("refusal") == ""


@pytest.mark.parametrize(("kind", "setup", "said"), COPY_ENGINES)
def test_stores_that_fail_are_no_hits(engines, truth_of, tmp_path, kind, setup, said):
    truth = truth_of(kind)
    asks = truth.prompts("failing", 4, 300)
    described = with_kvbm(
        engines.model(kind), tmp_path / "a", NVME, patches=(f"{PATCHES}:stores_fail",), environment=said, **setup
    )
    with engines.running(described) as engine:
        for _ in range(3):
            scenarios.ask_after_garbage(engine, truth, asks, [0] * 4)
        assert engine.metrics()["kvbm_vllm_failed_stores_total{}"] > 0


@pytest.mark.parametrize(("kind", "setup"), ENGINES)
def test_slow_copies_change_nothing(engines, truth_of, tmp_path, kind, setup):
    truth = truth_of(kind)
    asks = truth.prompts("slow", 4, 300)
    described = with_kvbm(
        engines.model(kind),
        tmp_path / "a",
        NVME,
        hbm_blocks=120,
        context_tokens=512,
        patches=(f"{PATCHES}:copies_are_slow",),
        environment={patches.SECONDS: "0.3"},
        **setup,
    )
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0] * 4)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
        scenarios.pressure(engine, truth, "slow", prompts=12, rounds=2)


def test_nvme_that_answers_late_is_not_waited_for(engines, llama, truth, tmp_path):
    asks = truth.prompts("late", 3, 300)
    described = with_kvbm(
        llama,
        tmp_path / "a",
        NVME | {"onboard.wait_s": 0.5},
        patches=(f"{PATCHES}:nvme_is_slow",),
        environment={patches.SECONDS: "4"},
    )
    with engines.running(described) as engine:
        store_to_nvme(engine, truth, asks)
        engine.in_core("drop", "HOST")
        scenarios.ask_after_garbage(engine, truth, asks, [0] * 3)
        engine.offload()
        assert engine.in_core("counted")["late_copies"] > 0
        scenarios.ask_after_garbage(engine, truth, asks)
