"""A process dies by kill -9 between the put of an object and the event that would claim it; its store is a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.ids import Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.stores.base import Body, Get, Got, Listed, Put, Refusal, StoreTrouble
from tests.managers import BLOCK_BYTES, NAMESPACE, KnowsAll, hashes_of, serve
from tests.object_pools import memory_objects

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
K = 4


class FolderStore:
    """A store whose objects are files, so that they outlive the process that put them.

    Args:
        dies_after: objects put by this process, after which it kills itself.
    """

    def __init__(self, folder: Path, dies_after: int = -1) -> None:
        self.name, self.forgets, self._folder, self._left = "folder://objects", False, folder, dies_after
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        answers: list[Refusal | None] = []
        for put in puts:
            path = self._path(put.name)
            if path.exists():
                answers.append(Refusal(StoreTrouble.TAKEN, f"{put.name} is there"))
                continue
            path.write_bytes(put.flat())
            answers.append(None)
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return answers

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        answers: list[Got | Refusal] = []
        for get in gets:
            answers.append(Refusal(StoreTrouble.ABSENT, f"nothing is named {get.name}"))
            with suppress(FileNotFoundError):
                body = self._path(get.name).read_bytes()
                end = len(body) if get.count is None else get.first + get.count
                answers[-1] = Got(body[get.first : end], len(body))
        return answers

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        for name in names:
            self._path(name).unlink(missing_ok=True)
        return [None] * len(names)

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        for path in sorted(self._folder.iterdir()):
            yield Listed(path.name.replace("_", "/"), path.stat().st_size, path.stat().st_mtime_ns)

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        self._path(name).write_bytes(body)
        return None

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...]:
        return ("it has one writer here",)

    def close(self) -> None:
        return

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "_")


def opened(tmp_path: Path, dies_after: int = -1) -> Manager:
    settings = load_settings(
        flags={
            "instance.id": "a",
            "instance.data_dir": str(tmp_path / "a"),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 32,
            "pools.host.slots": 32,
            "pools.nvme.slots": 32,
        }
    )
    objects = memory_objects(BLOCK_BYTES, K, FolderStore(tmp_path / "store", dies_after))
    return open_manager(settings, [NAMESPACE], BLOCK_BYTES, "test", objects)


@pytest.mark.parametrize("dies_after", [1, 2, 3])
def test_an_object_whose_writer_was_killed_before_its_claim_is_claimed_by_the_next_put(
    tmp_path: Path, dies_after: int
) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.integration.test_object_writer_killed import opened
from tests.managers import serve
manager = opened(Path({str(tmp_path)!r}), {dies_after})
serve(manager, 1, 14)
manager.settle({WAIT_S})
"""
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, timeout=2 * WAIT_S, check=False, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "store").iterdir())) == dies_after
    with opened(tmp_path) as manager:
        assert serve(manager, 1, 14).prefix.hits.get(Tier.OBJECT, 0) == 0  # nobody has claimed it; checks every byte
        assert manager.settle(WAIT_S)
        assert manager.stats().offloaded_blocks[Tier.OBJECT] == 12  # what was there already counts, and is claimed now
        manager._loads.locator = KnowsAll()
        for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
            manager.evict(tier, hashes_of(1, 14))
        assert serve(manager, 1, 14).prefix.hits == {Tier.OBJECT: 12}
        assert manager.stats().corrupt_blocks == 0
