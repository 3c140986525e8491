"""An engine that starts over the volume of an earlier one, in another shape or with damaged bookkeeping: it starts,
answers right, and hits what could be kept.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask

FULL = pytest.mark.engines_full
WAIT_S = 120.0
SLOTS = 120
TALKATIVE = {"VLLM_LOGGING_LEVEL": "INFO"}


def nvme(slots: int = SLOTS) -> dict[str, int]:
    return {"pools.nvme.slots": slots}


def reusable(asks: list[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


def fill(engine: Engine, truth: Truth, asks: list[Ask]) -> None:
    scenarios.ask(engine, truth, asks, [0] * len(asks))
    engine.offload()


def salvaged(engine: Engine) -> None:
    assert engine.in_core("salvaged", WAIT_S)


def instance_folder(folder: Path) -> Path:
    return folder / "instances" / folder.name


def kept_line(engine: Engine) -> dict[str, int]:
    """The numbers of the one line that says what a start has kept."""
    (line,) = [one for one in engine.log.read_text().splitlines() if "pool.kept" in one]
    return {name: int(value) for name, value in re.findall(r"(\w+_blocks)=(\d+)", line)}


def found_blocks(engine: Engine) -> int:
    """How many blocks the scan of the slots has brought back; 0 where there was none."""
    return sum(int(found) for found in re.findall(r"salvage\.ended.*\bfound_blocks=(\d+)", engine.printed()))


@pytest.mark.parametrize("slots", [SLOTS - 1, SLOTS + 50])
def test_another_size_keeps_what_fits(engines, llama, truth, tmp_path, slots):
    asks = truth.prompts("sizes", 3, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme())) as engine:
        fill(engine, truth, asks)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme(slots), environment=TALKATIVE)) as engine:
        salvaged(engine)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
    said = kept_line(engine)
    assert said["kept_blocks"] + said["moves_blocks"] == sum(len(ask.tokens) // BLOCK_TOKENS for ask in asks)
    assert said["given_up_blocks"] == 0


def test_a_pool_too_small_for_all_keeps_the_latest_prompt(engines, llama, truth, tmp_path):
    asks = truth.prompts("smaller", 3, 300)
    blocks = asks[-1].reusable_tokens // BLOCK_TOKENS + 1
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme())) as engine:
        for ask in asks:
            fill(engine, truth, [ask])
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme(blocks), environment=TALKATIVE)) as engine:
        salvaged(engine)
        scenarios.ask_after_garbage(engine, truth, asks[-1:], reusable(asks[-1:]))
    assert kept_line(engine)["given_up_blocks"] == sum(len(ask.tokens) // BLOCK_TOKENS for ask in asks) - blocks


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"block_size": 2 * BLOCK_TOKENS}],
    ids=["dtype", "block size"],
)
def test_blocks_of_another_kind_are_set_aside(engines, llama, truth, tmp_path, options):
    asks = truth.prompts("kinds", 2, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme())) as engine:
        fill(engine, truth, asks)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme(), options=options)) as engine:
        assert engine.in_core("held")["NVME"] == 0
    assert list(instance_folder(tmp_path / "a").glob("nvme.pool.aside-*"))
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme())) as engine:  # and back: it starts, cold
        scenarios.ask(engine, truth, asks, [0] * 2)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))


def test_another_model_in_its_place_starts_cold_and_answers_right(engines, llama, truth_of, tmp_path):
    one, other = truth_of("llama"), truth_of("llama-deep")
    asks = one.prompts("models", 2, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme())) as engine:
        fill(engine, one, asks)
    with engines.running(with_kvbm(engines.model("llama-deep"), tmp_path / "a", nvme())) as engine:
        assert engine.in_core("held")["NVME"] == 0
        of_other = other.prompts("models", 2, 300)
        fill(engine, other, of_other)
        scenarios.ask_after_garbage(engine, other, of_other, reusable(of_other))
    assert list(instance_folder(tmp_path / "a").glob("nvme.pool.aside-*"))


FOREIGN = b"something else " * 1000


def test_a_foreign_file_in_the_pools_place_is_set_aside(engines, llama, truth, tmp_path):
    asks = truth.prompts("foreign", 2, 300)
    place = instance_folder(tmp_path / "a") / "nvme.pool"
    place.parent.mkdir(parents=True)
    place.write_bytes(FOREIGN)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme())) as engine:
        fill(engine, truth, asks)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
    assert place.with_name("nvme.pool.aside-1").read_bytes() == FOREIGN


@FULL
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_starts_cold(engines, llama, truth, tmp_path, first, then):
    asks = truth.prompts("ranks", 2, 300)
    of = {1: {}, 2: {"ranks": 2, "core": "process"}}
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme(), **of[first])) as engine:
        fill(engine, truth, asks)
    with engines.running(with_kvbm(llama, tmp_path / "a", nvme(), **of[then])) as engine:
        scenarios.ask(engine, truth, asks, [0] * 2)
    assert list(instance_folder(tmp_path / "a").glob("nvme.pool.aside-*"))


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _flip_in_journal(folder: Path) -> None:
    for path in (folder / "journal").glob("*.kvbj"):
        if size := path.stat().st_size:  # an earlier start may have cut away all of it
            _flip(path, size // 2)


def _lose_segments(folder: Path) -> None:
    for path in (folder / "journal").glob("*.kvbj"):
        path.unlink()


def _lose_journal(folder: Path) -> None:
    shutil.rmtree(folder / "journal")


def _tear_header(folder: Path) -> None:
    _flip(folder / "nvme.pool", 20)


@pytest.mark.parametrize("damage", [_flip_in_journal, _lose_segments, _lose_journal, _tear_header])
def test_damage_to_bookkeeping_costs_no_hits(engines, llama, truth, tmp_path, damage: Callable[[Path], None]):
    asks = truth.prompts("damage", 3, 300)
    described = with_kvbm(llama, tmp_path / "a", nvme(), environment=TALKATIVE)
    with engines.running(described) as engine:
        fill(engine, truth, asks)
        engine.kill()
    damage(instance_folder(tmp_path / "a"))
    with engines.running(described) as engine:
        salvaged(engine)
        scenarios.ask_after_garbage(engine, truth, asks, reusable(asks))
    blocks = sum(len(ask.tokens) // BLOCK_TOKENS for ask in asks)
    assert found_blocks(engine) == (0 if damage is _tear_header else blocks)  # a header has a copy, and needs no scan


def test_what_was_reset_stays_away_when_the_journal_is_lost(engines, llama, truth, tmp_path):
    asks = truth.prompts("reset", 2, 300)
    described = with_kvbm(llama, tmp_path / "a", nvme())
    with engines.running(described) as engine:
        fill(engine, truth, asks)
        engine.in_core("drop", "HOST", "NVME")
        engine.kill()
    _lose_journal(instance_folder(tmp_path / "a"))
    with engines.running(described) as engine:
        salvaged(engine)
        scenarios.ask(engine, truth, asks, [0] * 2)


def test_an_engine_whose_pool_is_in_use_starts_without_it(engines, llama, truth, tmp_path):
    asks = truth.prompts("in-use", 2, 300)
    shared = nvme() | {"pools.nvme.path": str(tmp_path / "shared.pool")}
    with engines.running(with_kvbm(llama, tmp_path / "a", shared)) as first:
        fill(first, truth, asks)
        with engines.running(with_kvbm(llama, tmp_path / "b", shared, core="process")) as second:
            scenarios.ask(second, truth, asks, [0] * 2)
            assert "NVME" not in second.in_core("held")
        scenarios.ask_after_garbage(first, truth, asks, reusable(asks))


def _in_its_place(folder: Path) -> tuple[Path, Path]:
    """One folder, whose files are replaced."""
    return folder / "model", folder / "model"


def _of_another_commit(folder: Path) -> tuple[Path, Path]:
    """Two snapshots of a repository, as the hub's cache has them."""
    snapshots = folder / "models--org--tiny" / "snapshots"
    return snapshots / ("a" * 40), snapshots / ("b" * 40)


@pytest.mark.parametrize("places", [_in_its_place, pytest.param(_of_another_commit, marks=FULL)])
@pytest.mark.parametrize("damage", [_lose_journal, _flip_in_journal, pytest.param(_tear_header, marks=FULL)])
def test_other_weights_get_no_block_of_the_old_ones_whatever_is_lost(engines, truth_of, tmp_path, places, damage):
    """Weights of the same shape follow each other over one volume, and before each start something is damaged.

    What the slots hold is then all that tells of the blocks, and an engine hits those of its own weights alone.
    """
    old, new = truth_of("llama"), truth_of("llama-2")
    asks = old.prompts("weights", 3, 300)
    blocks = sum(len(ask.tokens) // BLOCK_TOKENS for ask in asks)
    of = {"llama": places(tmp_path)[0], "llama-2": places(tmp_path)[1]}

    def started(kind: str) -> AbstractContextManager[Engine]:
        shutil.rmtree(of[kind], ignore_errors=True)
        shutil.copytree(engines.model(kind), of[kind])
        return engines.running(with_kvbm(str(of[kind]), tmp_path / "a", nvme()))

    with started("llama") as engine:
        fill(engine, old, asks)
        engine.kill()
    damage(instance_folder(tmp_path / "a"))
    with started("llama-2") as engine:
        salvaged(engine)
        assert engine.in_core("held")["NVME"] == 0
        fill(engine, new, asks)
        engine.kill()
    damage(instance_folder(tmp_path / "a"))
    with started("llama-2") as engine:
        salvaged(engine)
        assert engine.in_core("held")["NVME"] == blocks
        scenarios.ask_after_garbage(engine, new, asks, reusable(asks))
        engine.kill()
    damage(instance_folder(tmp_path / "a"))
    with started("llama") as engine:  # its own blocks were set aside, and are read no more
        salvaged(engine)
        assert engine.in_core("held")["NVME"] == 0
        scenarios.ask_after_garbage(engine, old, asks, [0] * 3)
    assert len(list(instance_folder(tmp_path / "a").glob("nvme.pool.aside-*"))) == 2
