"""An instance that is killed on one pool file, or works at full speed, loses and confuses nothing;

`tools/pool_kills.py` and `tools/churn.py` do much more of it.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvbm.core.ids import HASH_BYTES, split_hashes
from kvbm.pools.tenant_keys import add_key
from tests.faults.processes.disk_speed import speed_alone, speed_of_mix
from tests.faults.processes.lives import (
    CHURN,
    NAMESPACE,
    SMALL,
    WAIT_S,
    Begun,
    Load,
    churn,
    folded,
    kill_again_and_again,
)
from tests.faults.processes.noise import SECTOR_BYTES, Noise


def live_and_end(folder: Path, seed: int, how: signal.Signals) -> Begun:
    life = Begun(folder, SMALL, seed)
    life.wait(time.monotonic() + WAIT_S, "recovered")
    life.wait_at_least("written", SMALL.slots[2])
    life.end(how)
    return life


SEALED = SMALL._replace(nvme=(("encrypt", True),))


@pytest.mark.parametrize(
    ("seed", "load", "kills"),
    [
        (0, SMALL, 4),
        (2, SEALED, 4),
        *(pytest.param(*run, 10, marks=pytest.mark.nightly) for run in ((0, SMALL), (1, SMALL), (2, SEALED))),
    ],
    ids=lambda value: "" if isinstance(value, Load) else None,
)
def test_a_manager_killed_at_any_moment_serves_from_nvme_what_its_journal_says(
    tmp_path: Path, seed: int, load: Load, kills: int
) -> None:
    add_key(tmp_path / "keys.toml", NAMESPACE.tenant, "1")
    killed = kill_again_and_again(tmp_path, seed, kills, load)
    assert killed.points == kills
    assert killed.served > 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_serves_hits_from_nvme_at_once(tmp_path: Path, how: signal.Signals) -> None:
    live_and_end(tmp_path, 1, how)
    held = folded(SMALL.settings(tmp_path)).held
    assert len(held) > SMALL.slots[2] // 2
    life = live_and_end(tmp_path, 2, signal.SIGTERM)
    assert life.said("recovered") == len(held)
    first = next(line for line in life.lines if "served" in line)
    assert first["served"] > 0


def test_what_a_life_finds_wrong_reaches_who_began_it(tmp_path: Path) -> None:
    live_and_end(tmp_path, 1, signal.SIGTERM)
    pool = next(tmp_path.rglob("nvme.pool"))
    data = bytearray(pool.read_bytes())
    for at in range(4096 + 100, len(data), 4096):
        data[at] ^= 0xFF
    pool.write_bytes(data)
    life = Begun(tmp_path, SMALL, 2)
    with pytest.raises(AssertionError, match="recovered blocks are CORRUPT"):
        life.wait(time.monotonic() + WAIT_S, "recovered")
    life.end(signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize("nvme", [(), (("encrypt", True),)], ids=["plain", "encrypted"])
def test_full_speed_with_kills_ends_with_the_digest_of_its_journal_and_no_wrong_byte(
    tmp_path: Path, nvme: tuple[tuple[str, bool], ...]
) -> None:
    load = CHURN._replace(block_bytes=64 << 10, slots=(96, 48, 192), prompts=40, depth=12, engines=3, ahead=24)
    add_key(tmp_path / "keys.toml", NAMESPACE.tenant, "1")
    result = churn(tmp_path, 1, 30.0, load._replace(nvme=(*load.nvme, *nvme)), life_s=1.5, mix_s=0.0)
    assert result.lives > 2 and result.kills > 0
    assert result.verified > 0 and result.written > 0 and result.served > 0
    assert result.reached.reads > 0 and result.reached.writes > 0 and result.alone.writes > 0
    assert int(result.digest, 16)


def test_prompts_share_their_beginnings() -> None:
    assert SMALL.hashes(3, 6)[: 2 * HASH_BYTES] == SMALL.hashes(4, 6)[: 2 * HASH_BYTES]
    assert SMALL.hashes(3, 6)[2 * HASH_BYTES :] != SMALL.hashes(4, 6)[2 * HASH_BYTES :]
    assert len({block for prompt in (0, 1, 2) for block in split_hashes(SMALL.hashes(prompt, 6))}) == 2 + 3 * 4


def test_no_sector_of_any_block_is_that_of_another_place() -> None:
    noise, blocks, block_bytes = Noise(16 << 10, 1200), 1200, 16 << 10
    sectors = {
        noise.block(number)[at : at + SECTOR_BYTES].tobytes()
        for number in range(blocks)
        for at in range(0, block_bytes, SECTOR_BYTES)
    }
    assert len(sectors) == blocks * block_bytes // SECTOR_BYTES


@pytest.mark.parametrize("wrong", ["a byte", "two pages", "shifted by a byte", "another block"])
def test_any_byte_that_is_not_its_blocks_is_found(wrong: str) -> None:
    noise, hashes = Noise(64 << 10, 1200), b"".join(number.to_bytes(HASH_BYTES, "little") for number in (3, 700))
    memory = np.zeros((4, 64 << 10), dtype=np.uint8)
    noise.fill(hashes, memory, [2, 1])
    noise.check(hashes, memory, [2, 1], "HBM")
    block = memory[1]
    match wrong:
        case "a byte":
            block[-1] ^= 1
        case "two pages":
            block[:8192] = np.concatenate([block[4096:8192], block[:4096]])
        case "shifted by a byte":
            block[:] = np.roll(block, 1)
        case _:
            block[:] = noise.block(701)
    with pytest.raises(AssertionError, match="of block 700 in slot 1, from"):
        noise.check(hashes, memory, [2, 1], "HBM")


def test_a_disk_is_measured_in_reads_and_writes_alone_and_both_at_once(tmp_path: Path) -> None:
    alone = speed_alone(tmp_path)
    assert alone.writes > 0
    mix = speed_of_mix(tmp_path, 32 << 20, 1 << 20, 0.5, 1.0)
    assert (mix is None) == (shutil.which("fio") is None)
    assert mix is None or (mix.reads > 0 and mix.writes > 0 and mix.both == mix.reads + mix.writes)
    assert list(tmp_path.iterdir()) == []
