"""Restarts: real processes killed at any moment, and every kind of journal and pool file a restart may find."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.assembly import NATIVE, journal_folder, open_manager
from kvbm.config import Settings, load_settings
from kvbm.core.checksum import crc32c
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.errors import JournalError
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, SequenceHash, Tier, split_hashes
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.streams.base import Position
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.segments import segment_files
from tests.cores import CORES
from tests.eventually import eventually
from tests.held import slots_of as slots_in
from tests.journals import whole_frames
from tests.managers import BLOCK_BYTES, NAMESPACE, rows_of, serve
from tests.nats_fixture import cluster, nats_url
from tests.nvme_volumes import WAIT_S, unhurried

__all__ = ["cluster", "nats_url", "unhurried"]

ROOT = Path(__file__).parents[2]
INSTANCE = InstanceId("instance-0")

# Imports once, then forks a manager for each line it reads: (seed, folder) → pid, and "ended" once somebody has killed
# it.
SERVING = """
import os, random, sys
import structlog
from tests.integration import test_recovery
from tests.managers import serve
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
for line in sys.stdin:
    seed, folder = line.split()
    pid = os.fork()
    if pid == 0:
        rng = random.Random(seed)
        manager = test_recovery.open_at(folder)
        while True:
            serve(manager, rng.randrange(12), rng.randrange(1, 6))
            if rng.random() < 0.02:
                manager.take_snapshot()
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


def settings_at(folder: Path | str, **more: Any) -> Settings:
    flags = {
        "instance.data_dir": str(folder),
        "pools.hbm.slots": 24,
        "pools.hbm.device": "memory",
        "pools.host.slots": 8,
        "pools.nvme.slots": 16,
        "nats.enabled": False,
        "journal.segment_bytes": 4096,
        "onboard.wait_s": WAIT_S,
    }
    return load_settings(flags=flags | {key.replace("__", "."): value for key, value in more.items()})


def open_at(folder: Path | str, core: str = "native", **more: Any) -> Manager:
    return open_manager(settings_at(folder, **more), [NAMESPACE], BLOCK_BYTES, core=CORES[core])


def pool_path(folder: Path) -> Path:
    return folder / "instances" / INSTANCE / "nvme.pool"


def segments(folder: Path) -> list[Path]:
    return [path for _, _, path in segment_files(journal_folder(settings_at(folder)))]


def folded(folder: Path) -> tuple[Epoch, dict[SequenceHash, int | None]]:
    """The last epoch with frames, and what NVME holds as the strict fold of the journal says."""
    epochs: dict[Epoch, Residencies] = {}
    ends: dict[Epoch, int] = {}
    for path in segments(folder):
        for frame in whole_frames(path):
            fold = epochs.setdefault(frame.epoch, Residencies(strict=True))
            assert frame.first_offset == ends.get(frame.epoch, 0), "offsets have a hole"
            ends[frame.epoch] = frame.next_offset
            for event in frame.events:
                fold.evolve(event)
            assert fold.digest == frame.digest
    for epoch in sorted(epochs, reverse=True):
        if epochs[epoch].is_whole(Tier.NVME):
            return max(epochs), {block: held.slot for block, held in epochs[epoch].held[Tier.NVME].items()}
    return max(epochs, default=Epoch(0)), {}


def slots_of(manager: Manager) -> dict[SequenceHash, int]:
    with manager._lock:
        return slots_in(manager._ledger, Tier.NVME, split_hashes(manager._ledger.held(Tier.NVME)))


def read_all(manager: Manager) -> list[ReadOutcome]:
    """Read every block NVME claims to hold; wrong bytes that pass for good fail the test."""
    held = slots_of(manager)
    hashes = b"".join(held)
    rows = np.empty((len(held), BLOCK_BYTES), dtype=np.uint8)
    outcomes = (
        manager.pools.slots[Tier.NVME]
        .read([s for s in held.values() if s is not None], NAMESPACE.id, hashes, rows)
        .outcomes
    )
    for index, block in enumerate(held):
        if outcomes[index] == ReadOutcome.GOOD:
            assert np.array_equal(rows[index : index + 1], rows_of(block)), "wrong bytes"
    return outcomes


def fill(folder: Path, **more: Any) -> dict[SequenceHash, int | None]:
    """A folder with an epoch behind it; what NVME held at its end."""
    with open_at(folder, **{"pools__host__slots": 16, **more}) as manager:
        for prompt in range(3):
            serve(manager, prompt, 4)
            assert manager.settle(WAIT_S)  # so that each prompt has frames of its own
        held = slots_of(manager)
    assert len(held) == 12
    return held


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVING], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.communicate(timeout=WAIT_S)


def serve_and_kill(server: subprocess.Popen[str], folder: Path, seed: int, after_s: float, is_open: bool) -> None:
    """Kill a manager a while after its start, or after the first word of its epoch."""
    assert server.stdin is not None and server.stdout is not None
    before = newest_epoch(folder)
    server.stdin.write(f"{seed} {folder}\n")
    server.stdin.flush()
    pid = int(server.stdout.readline())
    if is_open:
        eventually(lambda: newest_epoch(folder) > before, "the manager says nothing")
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    assert server.stdout.readline() == "ended\n"


def newest_epoch(folder: Path) -> int:
    """Of those that have said something."""
    return max((epoch for epoch, _, _ in segment_files(journal_folder(settings_at(folder)))), default=0)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 24))]
)
def test_a_killed_manager_recovers_what_its_journal_says_and_no_wrong_byte(
    server: subprocess.Popen[str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for life in range(4):
        is_open = rng.random() >= 0.4  # else it opens and recovers, most likely
        serve_and_kill(server, tmp_path, seed * 10 + life, rng.uniform(0, 0.08 if is_open else 0.012), is_open)
        if not segments(tmp_path) or rng.random() < 0.4:
            continue  # killed again before anybody looked
        last, expected = folded(tmp_path)
        with open_at(tmp_path) as manager:
            assert manager.epoch > last
            assert slots_of(manager) == expected
            assert read_all(manager) == [ReadOutcome.GOOD] * len(expected)  # a kill takes nothing that was written
            serve(manager, 1, 5)
    last, expected = folded(tmp_path) if segments(tmp_path) else (Epoch(0), {})
    with open_at(tmp_path) as manager:
        assert slots_of(manager) == expected
        assert read_all(manager) == [ReadOutcome.GOOD] * len(expected)


def test_a_folder_has_one_manager_at_a_time(tmp_path: Path) -> None:
    with open_at(tmp_path) as manager:
        with pytest.raises(JournalError, match="is in use by another manager") as refused:
            open_at(tmp_path)
        assert "\n" not in str(refused.value)
        serve(manager, 1, 4)  # the first one did not notice
    open_at(tmp_path).close()


def test_epochs_that_were_killed_before_they_said_anything_lose_nothing(tmp_path: Path) -> None:
    held = fill(tmp_path)
    for _ in range(2):
        journal = Journal.open(journal_folder(settings_at(tmp_path)), INSTANCE, NATIVE)
        journal.begin_epoch(Epoch(journal.epoch + 1), journal.pool_id)
        journal.close()
    with open_at(tmp_path) as manager:
        assert manager.epoch == 4
        assert slots_of(manager) == held


def test_an_epoch_killed_inside_its_first_snapshot_loses_nothing(tmp_path: Path) -> None:
    held = fill(tmp_path)
    before = segments(tmp_path)[0]
    kept = before.read_bytes()
    with open_at(tmp_path):
        pass
    before.write_bytes(kept)  # it went when the next epoch's snapshot was whole
    last = segments(tmp_path)[-1]
    frame = whole_frames(last)[0]
    begun = Frame(
        instance=INSTANCE,
        epoch=frame.epoch,
        first_offset=frame.first_offset,
        wall_time_ns=0,
        digest=0,
        events=frame.events[:2],
    )
    last.write_bytes(encode_frame(begun))
    with open_at(tmp_path) as manager:
        assert slots_of(manager) == held


def test_a_missing_pool_file_is_an_empty_pool_also_when_the_next_start_is_killed(tmp_path: Path) -> None:
    fill(tmp_path)
    pool_path(tmp_path).unlink()
    with open_at(tmp_path) as manager:
        assert slots_of(manager) == {}
    last = segments(tmp_path)[-1]
    last.unlink()  # as if it had been killed before its first frame
    with open_at(tmp_path) as manager:
        assert slots_of(manager) == {}  # the first epoch speaks of the file that is gone
        serve(manager, 1, 4)


def test_a_foreign_pool_file_is_set_aside_and_the_engine_starts(tmp_path: Path) -> None:
    fill(tmp_path)
    pool_path(tmp_path).write_bytes(b"somebody's photographs")
    with open_at(tmp_path) as manager:
        assert slots_of(manager) == {}
    assert pool_path(tmp_path).with_name("nvme.pool.aside-1").read_bytes() == b"somebody's photographs"


def test_a_version_that_a_flipped_bit_made_newer_is_damage_and_no_newer_kvbm(tmp_path: Path) -> None:
    fill(tmp_path)
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[5] ^= 0x08
    path.write_bytes(data)
    with open_at(tmp_path) as manager:
        assert manager.epoch == 2
    assert path.with_suffix(".damaged").read_bytes() == data


def test_a_journal_of_a_newer_kvbm_is_refused_in_one_sentence(tmp_path: Path) -> None:
    fill(tmp_path)
    path = segments(tmp_path)[-1]
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[8:12], "little")
    data[4] = 9
    data[size - 4 : size] = crc32c(bytes(data[: size - 4])).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"frame version 9.*upgrade kvbm or use another folder") as refused:
        open_at(tmp_path)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize("left", [1, 40, 100])
def test_a_torn_tail_is_cut_and_kept_beside(tmp_path: Path, left: int) -> None:
    held = fill(tmp_path)
    path = segments(tmp_path)[-1]
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:left])
    Journal.open(journal_folder(settings_at(tmp_path)), INSTANCE, NATIVE).close()
    assert path.read_bytes() == whole
    assert path.with_suffix(".damaged").read_bytes() == whole[:left]
    with open_at(tmp_path) as manager:
        assert slots_of(manager) == held


def test_a_journal_with_a_hole_is_not_believed(tmp_path: Path) -> None:
    held = fill(tmp_path, journal__segment_bytes=1)
    middle = segments(tmp_path)
    assert len(middle) >= 3
    middle[1].unlink()
    with open_at(tmp_path) as manager:
        eventually(lambda: slots_of(manager) == held, "not all comes back")  # the slots say it


def test_a_damaged_snapshot_is_not_believed(tmp_path: Path) -> None:
    held = fill(tmp_path)
    with open_at(tmp_path):
        pass
    path = segments(tmp_path)[-1]
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)  # whatever the epoch withdrew and overwrote is unknown now
    with open_at(tmp_path) as manager:
        eventually(lambda: slots_of(manager) == held, "not all comes back")


def test_bytes_that_changed_on_the_device_are_found_at_their_first_read(tmp_path: Path) -> None:
    held = fill(tmp_path)
    with open(pool_path(tmp_path), "r+b") as file:
        for slot in list(held.values())[:5]:
            file.seek(2 * PAGE_BYTES + (slot or 0) * stride_of(BLOCK_BYTES) + 6)
            file.write(b"\xff\xfe")
    with open_at(tmp_path) as manager:
        outcomes = read_all(manager)
        assert (outcomes.count(ReadOutcome.CORRUPT), outcomes.count(ReadOutcome.GOOD)) == (5, 7)
        for prompt in range(3):
            serve(manager, prompt, 4)  # checks every byte
        assert manager.stats().corrupt_blocks > 0


# -- the stream knows better -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_lost_journal_begins_after_the_epoch_the_stream_has_seen(
    tmp_path: Path, nats_url: str, cluster: str, in_memory: bool
) -> None:
    more = {
        "nats__enabled": True,
        "nats__url": nats_url,
        "nats__timeout_s": WAIT_S,
        "instance__cluster": cluster,
        "journal__in_memory": in_memory,
    }
    for life in range(1, 4):
        with open_at(tmp_path / str(life), **more) as manager:
            assert manager.epoch == life
            serve(manager, 1, 4)
            manager.close(WAIT_S)
        assert manager.published() == Position(manager.epoch, manager.applied())


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a port that is taken, and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"nats://127.0.0.1:{taken.getsockname()[1]}"


def test_a_stream_that_does_not_answer_holds_a_start_up_no_longer_than_told(tmp_path: Path, nobody: str) -> None:
    manager = open_at(tmp_path, nats__enabled=True, nats__url=nobody, nats__timeout_s=0.5)
    assert manager.epoch == 1  # nobody ever answers at that port
    manager.close(0.1)


def test_older_epochs_stay_until_the_new_ones_snapshot_is_on_the_stream(
    tmp_path: Path, nats_url: str, cluster: str
) -> None:
    more = {
        "nats__enabled": True,
        "nats__url": nats_url,
        "nats__timeout_s": WAIT_S,
        "instance__cluster": cluster,
        "nats__heartbeat_s": 0.02,
    }
    fill(tmp_path, **more)
    with open_at(tmp_path, **more) as manager:
        begun = Position(manager.epoch, manager.applied())
        folder = journal_folder(settings_at(tmp_path))
        eventually(
            lambda: all(epoch >= manager.epoch for epoch, _, _ in segment_files(folder)),
            "the first epoch's segments stay",
        )
        assert manager.published() >= begun
    assert len(folded(tmp_path)[1]) == 12


def test_what_one_core_has_written_the_other_recovers(tmp_path: Path) -> None:
    kept: list[dict[SequenceHash, int | None]] = []
    for number, core in enumerate(("reference", "native", "reference")):
        with open_at(tmp_path, core=core, pools__eviction="s3fifo") as manager:
            assert manager._backend.name == core
            assert not kept or slots_of(manager) == kept[-1]
            assert set(read_all(manager)) <= {ReadOutcome.GOOD}
            serve(manager, number, 5)
            assert manager.settle(WAIT_S)
            kept.append(slots_of(manager))
    assert len(kept[-1]) == 15
    assert folded(tmp_path)[1] == kept[-1]


def test_a_restart_begins_again_with_a_journal_that_is_full(tmp_path: Path, nobody: str) -> None:
    more = {  # nobody takes what is written, so nothing can be let go
        "nats__enabled": True,
        "nats__url": nobody,
        "nats__timeout_s": 0.2,
        "journal__capacity_bytes": 4 * 4096,
        "pools__nvme__slots": 0,
    }
    manager = open_at(tmp_path, **more)
    folder = journal_folder(settings_at(tmp_path))
    prompts = itertools.count()

    def is_full() -> bool:
        serve(manager, next(prompts), 4)
        return "journal" in manager.heartbeat(manager.published()).trouble

    eventually(is_full, "the journal takes everything")
    manager.close(0.1)
    again = open_at(tmp_path, **more)
    eventually(
        lambda: [one for one, _, _ in segment_files(folder) if one == again.epoch],
        "its first snapshot is not in the journal",
    )
    again.close(0.1)
