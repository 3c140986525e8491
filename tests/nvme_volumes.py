"""Volumes that one start has left and another finds: engines over them, what NVME holds, and damage."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.assembly import journal_folder, open_manager
from kvbm.config import Settings, load_settings
from kvbm.core.fold import Residencies
from kvbm.core.ids import InstanceId, Namespace, SequenceHash, Tier, split_hashes
from kvbm.erasure import manager as erasable
from kvbm.manager import engine_hbm
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.recovery import salvage
from kvbm.manager.recovery.salvage import Salvage
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme import stripes
from kvbm.streams.journal.segments import segment_files
from tests.cores import CORES
from tests.eventually import eventually
from tests.held import slots_of as slots_in
from tests.journals import whole_frames
from tests.managers import BLOCK_BYTES, NAMESPACE, rows_of, serve

INSTANCE = InstanceId("instance-0")
WAIT_S = 60.0
PROMPTS, DEPTH = 4, 4
TENANT = Namespace(model="test", revision="r1", block_tokens=16, tenant="acme")


def settings_at(folder: Path, **more: Any) -> Settings:
    flags = {
        "instance.data_dir": str(folder),
        "pools.hbm.slots": 24,
        "pools.hbm.device": "memory",
        "pools.host.slots": 16,
        "pools.nvme.slots": 16,
        "nats.enabled": False,
        "onboard.wait_s": WAIT_S,
    }
    return load_settings(flags=flags | {key.replace("__", "."): value for key, value in more.items()})


def open_at(
    folder: Path, namespace: Namespace = NAMESPACE, block_bytes: int = BLOCK_BYTES, core: str = "native", **more: Any
) -> Manager:
    return open_manager(settings_at(folder, **more), [namespace, TENANT], block_bytes, core=CORES[core])


def pool_path(folder: Path) -> Path:
    return folder / "instances" / INSTANCE / "nvme.pool"


def segments(folder: Path) -> list[Path]:
    return [path for _, _, path in segment_files(journal_folder(settings_at(folder)))]


def held(manager: Manager) -> dict[SequenceHash, int]:
    with manager._lock:
        return slots_in(manager._ledger, Tier.NVME, split_hashes(manager._ledger.held(Tier.NVME)))


def fill(folder: Path, **more: Any) -> dict[SequenceHash, int]:
    """A folder with an epoch behind it, in which NVME has got four prompts, and what it holds."""
    with open_at(folder, **more) as manager:
        for prompt in range(PROMPTS):
            serve(manager, prompt, DEPTH)
            assert manager.settle(WAIT_S)
        found = held(manager)
    assert len(found) == PROMPTS * DEPTH
    return found


def salvaged(manager: Manager) -> dict[SequenceHash, int]:
    """What NVME holds once nothing more comes back; each block is read, and has the right bytes."""
    eventually(lambda: manager._salvage.is_over, "the scan does not end")
    assert manager.settle(WAIT_S)  # nor does anything leave for what a request has used
    found = held(manager)
    chain = b"".join(found)
    rows = np.empty((len(found), BLOCK_BYTES), dtype=np.uint8)
    if found:
        outcomes = manager.pools.slots[Tier.NVME].read(list(found.values()), NAMESPACE.id, chain, rows).outcomes
        assert outcomes == [ReadOutcome.GOOD] * len(found)
        assert np.array_equal(rows, rows_of(chain))
    return found


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def verify(folder: Path) -> None:
    """Every frame of the newest epoch is legal for the strict fold, and every digest agrees."""
    fold = Residencies(strict=True)
    frames = [frame for path in segments(folder) for frame in whole_frames(path)]
    last = max(frame.epoch for frame in frames)
    for frame in frames:
        if frame.epoch == last:
            for event in frame.events:
                fold.evolve(event)
            assert fold.digest == frame.digest
    assert fold.is_whole(Tier.NVME)


@pytest.fixture(autouse=True)
def unhurried() -> Iterator[None]:
    """No start and no scan gives up on a journal or a device that is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "LOCK_WAIT_S", WAIT_S)  # the lock of a process that is gone goes with its last transfer
        patch.setattr(salvage, "_DURABLE_WAIT_S", WAIT_S)
        patch.setattr(erasable, "_DURABLE_WAIT_S", WAIT_S)
        patch.setattr(engine_hbm, "_CLEAR_WAIT_S", WAIT_S)
        yield


@contextmanager
def refused_soon() -> Iterator[None]:
    """Whoever is refused a pool's lock does not wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "LOCK_WAIT_S", 0.02)
        yield


@contextmanager
def scans_wait() -> Iterator[Callable[[], None]]:
    """No scan begins before what this gives is called."""
    begins = threading.Event()
    run = Salvage.run

    def later(self: Salvage) -> None:
        assert begins.wait(WAIT_S)
        run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Salvage, "run", later)
        yield begins.set
        begins.set()


def flip_in_journal(folder: Path) -> None:
    path = segments(folder)[-1]
    flip(path, path.stat().st_size // 2)


def lose_journal(folder: Path) -> None:
    shutil.rmtree(journal_folder(settings_at(folder)))
