"""Starts over a volume that an earlier start has left in another shape, or whose bookkeeping is damaged: what comes
back, and what must not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import journal_folder
from kvbm.config import load_settings
from kvbm.core.errors import PoolError
from kvbm.core.events import EvictReason
from kvbm.core.ids import Namespace, Tier, split_hashes
from kvbm.engines.vllm.opening import _opened
from kvbm.erasure.manager import ErasableManager
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.generations import RECORDS_AT, TAIL_BYTES
from kvbm.pools.nvme.pool import NvmePool
from tests.cores import CORES
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve
from tests.nvme_volumes import (
    DEPTH,
    PROMPTS,
    TENANT,
    WAIT_S,
    fill,
    flip,
    flip_in_journal,
    held,
    lose_journal,
    open_at,
    pool_path,
    refused_soon,
    salvaged,
    scans_wait,
    segments,
    settings_at,
    unhurried,
    verify,
)
from tests.owning_engines import opened as opened_owning

__all__ = ["unhurried"]

ROOT = Path(__file__).parents[2]
PROCESS_S = 250.0  # a machine may be slow to import everything


# -- the same volume in another shape ----------------------------------------------------------------------------------


@pytest.mark.parametrize("core", CORES)
def test_a_grown_pool_keeps_every_block(tmp_path: Path, core: str) -> None:
    before = fill(tmp_path, core=core)
    with open_at(tmp_path, core=core, pools__nvme__slots=40) as manager:
        assert held(manager) == salvaged(manager) == before
        serve(manager, PROMPTS, DEPTH)
        assert manager.settle(WAIT_S)
        assert len(held(manager)) == (PROMPTS + 1) * DEPTH
    with open_at(tmp_path, core=core, pools__nvme__slots=40) as manager:
        assert len(salvaged(manager)) == (PROMPTS + 1) * DEPTH


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("slots", [1, 6, 12])
def test_a_shrunk_pool_keeps_the_latest_blocks_that_fit(tmp_path: Path, core: str, slots: int) -> None:
    before = fill(tmp_path, core=core)
    latest = split_hashes(b"".join(hashes_of(prompt, DEPTH) for prompt in range(PROMPTS)))[-slots:]
    with open_at(tmp_path, core=core, pools__nvme__slots=slots) as manager:
        assert set(salvaged(manager)) == set(latest) <= set(before)
        pool = manager.pools.slots[Tier.NVME]
        assert isinstance(pool, NvmePool) and pool.room_slots == 0
        assert (
            pool_path(tmp_path).stat().st_size
            == pool.file_bytes
            == PAGE_BYTES + slots * stride_of(BLOCK_BYTES) + TAIL_BYTES
        )
    verify(tmp_path)
    with open_at(tmp_path, core=core, pools__nvme__slots=slots) as manager:
        assert set(held(manager)) == set(salvaged(manager)) == set(latest)


def test_a_pool_that_was_not_full_shrinks_without_a_loss(tmp_path: Path) -> None:
    before = fill(tmp_path, pools__nvme__slots=64)
    with open_at(tmp_path, pools__nvme__slots=16) as manager:
        assert salvaged(manager).keys() == before.keys()


@pytest.mark.parametrize(
    ("namespace", "block_bytes"),
    [
        (Namespace(model="other", revision="r1", block_tokens=16), BLOCK_BYTES),
        (Namespace(model="test", revision="r2", block_tokens=16), BLOCK_BYTES),
        (Namespace(model="test", revision="r1", block_tokens=16, kv_dtype="fp8"), BLOCK_BYTES),
        (Namespace(model="test", revision="r1", block_tokens=16, ranks="tp2"), BLOCK_BYTES),
        (NAMESPACE, 2 * BLOCK_BYTES),
    ],
    ids=["model", "revision", "dtype", "ranks", "block bytes"],
)
def test_an_engine_of_other_blocks_starts_and_finds_nothing(
    tmp_path: Path, namespace: Namespace, block_bytes: int
) -> None:
    fill(tmp_path)
    with open_at(tmp_path, namespace, block_bytes) as manager:
        eventually(lambda: manager._salvage.is_over)
        assert held(manager) == {}
        assert manager.match(hashes_of(0, DEPTH)).depth == 0
    assert pool_path(tmp_path).with_name("nvme.pool.aside-1").exists()
    with open_at(tmp_path) as manager:  # and back
        eventually(lambda: manager._salvage.is_over)
        serve(manager, 0, DEPTH)


def test_a_disk_without_room_to_grow_keeps_the_pool_as_it_is(tmp_path: Path) -> None:
    before = fill(tmp_path)
    with open_at(tmp_path, pools__nvme__slots=1 << 30) as manager:
        assert salvaged(manager) == before
        assert manager.stats().pools[Tier.NVME].slots == 16


@pytest.mark.parametrize("trouble", ["in use", "no room", "no file"])
def test_an_engine_whose_pool_cannot_be_used_starts_without_it(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "pool"
    flags = {
        "instance.data_dir": str(tmp_path / "engine"),
        "pools.hbm.owner": "engine",
        "pools.hbm.slots": 8,
        "pools.host.slots": 8,
        "pools.nvme.slots": 1 << 40 if trouble == "no room" else 8,
        "pools.nvme.path": str(path),
        "nats.enabled": False,
    }
    with ExitStack() as opened:
        if trouble == "in use":
            opened.enter_context(open_at(tmp_path / "other", pools__nvme__path=str(path)))
        elif trouble == "no file":
            path.mkdir()
        with refused_soon():
            manager = opened.enter_context(_opened(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES, None, None))
        assert Tier.NVME not in manager.pools.slots
    if trouble == "in use":
        with _opened(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES, None, None) as manager:
            assert manager.pools.slots[Tier.NVME].slots == 8


# -- damaged bookkeeping -----------------------------------------------------------------------------------------------


def _lose_segment(folder: Path) -> None:
    for path in segments(folder):
        path.unlink()


def _lose_epoch(folder: Path) -> None:
    flip(journal_folder(settings_at(folder)) / "EPOCH", 20)


def _flip_header(folder: Path) -> None:
    flip(pool_path(folder), 20)
    lose_journal(folder)


def _flip_record(folder: Path) -> None:
    flip(pool_path(folder), pool_path(folder).stat().st_size - TAIL_BYTES + RECORDS_AT[0] + 40)
    lose_journal(folder)


DAMAGES = [flip_in_journal, _lose_segment, lose_journal, _lose_epoch, _flip_header, _flip_record]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_slots_prove_comes_back_whatever_the_journal_has_lost(
    tmp_path: Path, core: str, damage: Callable[[Path], None]
) -> None:
    before = fill(tmp_path, core=core)
    damage(tmp_path)
    with open_at(tmp_path, core=core) as manager:
        assert salvaged(manager) == before
        for prompt in range(PROMPTS):
            serve(manager, prompt, DEPTH)  # each byte is checked
        assert manager.settle(WAIT_S)
    verify(tmp_path)
    with open_at(tmp_path, core=core) as manager:
        assert held(manager) == salvaged(manager)


def test_a_hole_in_the_journal_costs_nothing(tmp_path: Path) -> None:
    before = fill(tmp_path, journal__segment_bytes=1)
    segments(tmp_path)[1].unlink()
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before


def test_requests_are_served_while_slots_are_scanned(tmp_path: Path) -> None:
    fill(tmp_path)
    lose_journal(tmp_path)
    with scans_wait() as begin, open_at(tmp_path) as manager:
        for prompt in range(PROMPTS, 2 * PROMPTS):
            serve(manager, prompt, DEPTH)
        assert held(manager) == {}
        begin()
        assert len(salvaged(manager)) == 16
    verify(tmp_path)


def test_a_scan_is_seen_by_a_pods_other_instances(tmp_path: Path) -> None:
    folder = tmp_path / "pod"
    fill(tmp_path, pools__nvme__folder=str(folder))
    lose_journal(tmp_path)
    hints = next(folder.glob("*.slots"))
    hints.unlink()
    with open_at(tmp_path, pools__nvme__folder=str(folder)) as manager:
        found = salvaged(manager)
        assert len(found) == 16
        data = hints.read_bytes()
        for block, slot in found.items():
            assert data[32 * slot : 32 * slot + 32] == NAMESPACE.id + block


# -- what must not come back -------------------------------------------------------------------------------------------


def test_blocks_that_were_evicted_as_cleared_do_not_come_back(tmp_path: Path) -> None:
    before = fill(tmp_path)
    with open_at(tmp_path) as manager:
        assert manager.evict(Tier.NVME, hashes_of(1, DEPTH)) == DEPTH
        for prompt in range(2):
            serve(manager, prompt + 10, DEPTH)  # written after the clear
        assert manager.settle(WAIT_S)
        after = set(held(manager)) - before.keys()
    assert after
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert set(salvaged(manager)) == after


def test_a_clear_that_the_journal_has_lost_holds_all_the_same(tmp_path: Path) -> None:
    before = fill(tmp_path)
    with open_at(tmp_path) as manager:
        manager.evict(Tier.NVME, hashes_of(1, DEPTH))
        eventually(lambda: manager.durable() == manager.applied())
        size = segments(tmp_path)[-1].stat().st_size
        for prompt in (10, 11):
            serve(manager, prompt, DEPTH)
        assert manager.settle(WAIT_S)
    flip(
        segments(tmp_path)[-1], size - 10
    )  # in the frame that says it: what is before would be believed, and what is behind is whole
    with open_at(tmp_path) as manager:
        assert not salvaged(manager).keys() & before.keys()


def test_a_clear_while_blocks_are_moved_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, pools__nvme__slots=20)
    relocate = NvmePool.relocate
    with scans_wait() as begin, open_at(tmp_path, pools__nvme__slots=12) as manager:

        def cleared_meanwhile(self: NvmePool, *given: Any) -> list[bool]:
            moved = relocate(self, *given)
            with manager._salvage.clearing():
                manager.evict(Tier.NVME, b"".join(manager.held(Tier.NVME)))
            return moved

        monkeypatch.setattr(NvmePool, "relocate", cleared_meanwhile)
        begin()
        assert salvaged(manager) == {}
    verify(tmp_path)


def test_a_clear_of_other_tenants_blocks_costs_nothing(tmp_path: Path) -> None:
    before = fill(tmp_path)
    with open_at(tmp_path) as manager, manager._salvage.clearing([TENANT.id]):
        pass
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before


def test_an_engine_that_has_cleared_everything_gets_nothing_back(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened_owning(tmp_path, pools__nvme__slots=16) as manager:
        eventually(lambda: manager._salvage.is_over)
        assert len(manager.held(Tier.NVME)) == PROMPTS * DEPTH
        manager.clear()
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


@pytest.mark.parametrize("is_over_before", [False, True])
def test_a_clear_while_slots_are_scanned_holds(tmp_path: Path, is_over_before: bool) -> None:
    fill(tmp_path)
    lose_journal(tmp_path)
    with scans_wait() as begin, open_at(tmp_path) as manager:
        if is_over_before:
            begin()
            assert len(salvaged(manager)) == PROMPTS * DEPTH
        with manager._salvage.clearing():
            manager.evict(Tier.NVME, b"".join(manager.held(Tier.NVME)))
        begin()
        assert salvaged(manager) == {}
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


def test_without_a_record_of_clears_nothing_is_scanned(tmp_path: Path) -> None:
    fill(tmp_path)
    size = pool_path(tmp_path).stat().st_size
    for at in RECORDS_AT:
        flip(pool_path(tmp_path), size - TAIL_BYTES + at + 40)
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


def test_a_lost_record_costs_nothing_while_the_journal_is_whole(tmp_path: Path) -> None:
    before = fill(tmp_path)
    size = pool_path(tmp_path).stat().st_size
    for at in RECORDS_AT:
        flip(pool_path(tmp_path), size - TAIL_BYTES + at + 40)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before


def test_what_an_erasure_has_ended_comes_back_by_no_scan(tmp_path: Path) -> None:
    fill(tmp_path)
    lose_journal(tmp_path)
    with scans_wait() as begin, open_at(tmp_path) as manager:
        ErasableManager(manager.parts).end_salvage()
        begin()
        assert salvaged(manager) == {}
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == {}


def test_an_erasure_deletes_files_that_were_set_aside(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_at(tmp_path, Namespace(model="other", revision="r1", block_tokens=16)) as manager:
        assert list(tmp_path.rglob("*.aside-*"))
        ErasableManager(manager.parts).wipe(Tier.NVME, set(range(16)))
        assert not list(tmp_path.rglob("*.aside-*"))


def test_torn_headers_and_bytes_that_changed_cost_their_blocks_alone(tmp_path: Path) -> None:
    before = fill(tmp_path)
    lose_journal(tmp_path)
    blocks = list(before.items())
    flip(pool_path(tmp_path), PAGE_BYTES + blocks[0][1] * stride_of(BLOCK_BYTES) + 30)
    flip(pool_path(tmp_path), 2 * PAGE_BYTES + blocks[5][1] * stride_of(BLOCK_BYTES) + 3)
    with open_at(tmp_path) as manager:
        eventually(lambda: manager._salvage.is_over)
        assert held(manager).keys() == before.keys() - {blocks[0][0]}
        for prompt in range(PROMPTS):
            serve(manager, prompt, DEPTH)  # and no wrong byte


def test_two_managers_on_one_volume_are_one_and_a_refusal(tmp_path: Path) -> None:
    before = fill(tmp_path)
    lose_journal(tmp_path)
    with scans_wait() as begin, open_at(tmp_path) as manager:
        with refused_soon(), pytest.raises(PoolError, match="in use by another manager"):
            open_at(tmp_path / "other", pools__nvme__path=str(pool_path(tmp_path)))
        begin()
        assert salvaged(manager) == before


LEFT = """
import sys, threading, time
from pathlib import Path
from tests import nvme_volumes
import kvbm.manager.recovery.salvage as salvage
salvage._RUN_SLOTS = 2
begins, ends = threading.Event(), threading.Event()
def read(self, slots, real=salvage.Salvage._read):
    begins.set()
    ends.wait(60)
    time.sleep(0.2)
    return real(self, slots)
salvage.Salvage._read = read
manager = nvme_volumes.open_at(Path(sys.argv[1]))
assert begins.wait(60) and not manager._salvage.is_over
ends.set()
"""


def test_a_process_that_ends_without_closing_ends_its_scan_without_a_trace(tmp_path: Path) -> None:
    before = fill(tmp_path)
    lose_journal(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", LEFT, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PROCESS_S,
    )
    assert "Traceback" not in ended.stderr
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before


# -- killed on the way -------------------------------------------------------------------------------------------------

# Imports once, then forks a manager for each line it reads: (folder, slots, turns of its salvage) → how that has ended.
KILLED = """
import os, sys, time
from pathlib import Path
import structlog
from tests import nvme_volumes
from kvbm.manager.recovery.salvage import Salvage
import kvbm.manager.recovery.salvage as salvage
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
salvage._RUN_SLOTS = 2
salvage._MOVED_BLOCKS = 1

def die(folder, slots, after):
    turns = [0]
    for name in ("_adopt", "_move_some", "_settle"):
        def wrapped(self, *given, real=getattr(Salvage, name)):
            real(self, *given)
            turns[0] += 1
            if turns[0] == after:
                self._offsets.wait_durable(self._ledger.epoch, self._ledger.applied, 0.5) if after % 2 else None
                os._exit(9)
        setattr(Salvage, name, wrapped)
    manager = nvme_volumes.open_at(folder, pools__nvme__slots=slots)
    while not manager._salvage.is_over:
        time.sleep(0.01)

for line in sys.stdin:
    folder, slots, after = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            die(Path(folder), int(slots), int(after))
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Killed = Callable[[Path, int, int], bool]


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    """Starts a manager and has it die after so many turns of its salvage; whether it was killed before its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def kill(folder: Path, slots: int, after: int) -> bool:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{folder} {slots} {after}\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        assert status in (0, 9)
        return status == 9

    yield kill
    process.communicate(timeout=PROCESS_S)


@pytest.mark.parametrize("after", [1, 2, 4, 7, 8, 9])
def test_a_scan_killed_anywhere_goes_on_at_the_next_start(tmp_path: Path, killed: Killed, after: int) -> None:
    before = fill(tmp_path)
    lose_journal(tmp_path)
    assert killed(tmp_path, 16, after)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before
    verify(tmp_path)


@pytest.mark.parametrize("after", [1, 3, 4, 5])
def test_a_shrink_killed_anywhere_loses_no_more_than_must_go(tmp_path: Path, killed: Killed, after: int) -> None:
    before = fill(tmp_path, pools__nvme__slots=20)
    assert killed(tmp_path, 12, after)
    with open_at(tmp_path, pools__nvme__slots=12) as manager:
        found = salvaged(manager)
        assert len(found) == 12 and found.keys() <= before.keys()
        assert os.stat(pool_path(tmp_path)).st_size == PAGE_BYTES + 12 * stride_of(BLOCK_BYTES) + TAIL_BYTES
    verify(tmp_path)


def test_evicted_blocks_of_other_reasons_may_come_back(tmp_path: Path) -> None:
    before = fill(tmp_path)
    with open_at(tmp_path) as manager:
        manager.evict(Tier.NVME, hashes_of(1, DEPTH), EvictReason.CAPACITY)
    lose_journal(tmp_path)
    with open_at(tmp_path) as manager:
        assert salvaged(manager) == before
