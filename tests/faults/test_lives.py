"""An instance that is killed on one pool file, or works at full speed, loses and confuses nothing; `tools/pool_kills.py` and
`tools/churn.py` do much more of it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from kvbm.core.ids import HASH_BYTES
from tests.faults.processes.lives import CHURN, SMALL, WAIT_S, Begun, churn, folded, kill_again_and_again


def live_and_end(folder: Path, seed: int, how: signal.Signals) -> Begun:
    life = Begun(folder, SMALL, seed)
    life.wait(time.monotonic() + WAIT_S, "recovered")
    life.wait(time.monotonic() + WAIT_S, "created")
    life.end(how)
    return life


@pytest.mark.parametrize("seed", range(2))
def test_a_manager_killed_at_any_moment_serves_from_nvme_what_its_journal_says(tmp_path: Path, seed: int) -> None:
    killed = kill_again_and_again(tmp_path, seed, 10)
    assert killed.points == 10
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


def test_full_speed_with_kills_ends_with_the_digest_of_its_journal_and_no_wrong_byte(tmp_path: Path) -> None:
    load = CHURN._replace(block_bytes=64 << 10, slots=(96, 48, 192), prompts=40)
    result = churn(tmp_path, 1, 5.0, load, life_s=1.5)
    assert result.lives > 2 and result.kills > 0
    assert result.verified > 0 and result.written > 0 and result.served > 0
    assert int(result.digest, 16)


def test_prompts_share_their_beginnings_and_every_place_of_a_block_has_its_own_bytes() -> None:
    assert SMALL.hashes(3, 6)[: 2 * HASH_BYTES] == SMALL.hashes(4, 6)[: 2 * HASH_BYTES]
    assert SMALL.hashes(3, 6)[2 * HASH_BYTES :] != SMALL.hashes(4, 6)[2 * HASH_BYTES :]
    rows = SMALL.rows(SMALL.hashes(3, 6))
    assert len({row.tobytes() for row in rows}) == 6
    pages = [rows[0, at : at + 4096].tobytes() for at in range(0, SMALL.block_bytes - 4096, 4096)]
    assert len(set(pages)) == len(pages)
