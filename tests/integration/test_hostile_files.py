"""What others put into a pod's folder costs a bounded look and one warning: a pipe, a link, a folder, a sparse file, a
crowd.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import structlog

from kvbm.assembly import NATIVE, OPEN_BLOCK_IO
from kvbm.core.errors import PoolError
from kvbm.core.ids import InstanceId
from kvbm.files import read_plain
from kvbm.pools.nvme import pod as pod_module
from kvbm.pools.nvme.block_io import PAGE_BYTES
from kvbm.pools.nvme.file_header import FileHeader, encode_header, shape_of
from kvbm.pools.nvme.hints import SlotHints, hints_path
from kvbm.pools.nvme.pod import PodFolder
from kvbm.streams.journal.disk import OsDevice
from tests.managers import BLOCK_BYTES, NAMESPACE

WAIT_S = 120.0
ABSURD_SLOTS = 1 << 30  # hints of 32 GiB


def folder_of(tmp_path: Path) -> PodFolder:
    own = tmp_path / "c.me.pool"
    return PodFolder(own, "c", BLOCK_BYTES, NAMESPACE, NATIVE.checksums, OPEN_BLOCK_IO)


def looked(folder: PodFolder, times: int = 3) -> list[str]:
    """The warnings of some looks, each of which must end."""
    said: list[str] = []

    def look() -> None:
        with structlog.testing.capture_logs() as logs:
            for _ in range(times):
                folder.poll()
        said.extend(f"{entry['event']} {entry.get('why', '')}" for entry in logs if entry["log_level"] == "warning")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "a look at the folder hangs"
    folder.close()
    return said


def put_pool(path: Path, instance: str, slots: int, size_bytes: int) -> None:
    """A sparse pool whose header is whole."""
    shape = shape_of(NAMESPACE, BLOCK_BYTES, slots, InstanceId(instance))
    header = encode_header(path, FileHeader(shape=shape, pool_id="p"), NATIVE.checksums)
    path.write_bytes(header)
    os.truncate(path, size_bytes)


@pytest.mark.parametrize("suffix", [".pool", ".slots"])
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "device"])
def test_what_is_no_plain_file_is_one_warning(tmp_path: Path, kind: str, suffix: str) -> None:
    pool = tmp_path / "c.other.pool"
    if suffix == ".slots":
        put_pool(pool, "other", 8, PAGE_BYTES * 64)
    path = pool.with_suffix(suffix)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to("/dev/null")  # to make a device takes rights that a test has not
    said = looked(folder_of(tmp_path))
    assert len(said) == 1, said
    assert "plain file" in said[0]


def test_sparse_hints_larger_than_their_pool_are_one_warning_and_are_not_read(tmp_path: Path) -> None:
    pool = tmp_path / "c.other.pool"
    put_pool(pool, "other", 8, PAGE_BYTES * 64)
    hints_path(pool).touch()
    os.truncate(hints_path(pool), 32 << 30)
    said = looked(folder_of(tmp_path))
    assert len(said) == 1, said
    assert "its hints take" in said[0]


def test_a_header_that_claims_absurdly_many_slots_costs_a_bounded_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(path: Path, most_bytes: int) -> bytes:
        reads.append(most_bytes)
        return read_plain(path, most_bytes)

    monkeypatch.setattr(pod_module, "_SLOTS_MOST", 1024)
    monkeypatch.setattr(pod_module, "read_plain", read)
    pool = tmp_path / "c.other.pool"
    put_pool(pool, "other", ABSURD_SLOTS, 4 << 40)
    hints_path(pool).touch()
    os.truncate(hints_path(pool), ABSURD_SLOTS * 32)
    looked(folder_of(tmp_path))
    assert max(reads) <= max(PAGE_BYTES, 1024 * 32), reads


def test_hints_of_all_peers_together_take_a_bounded_room_and_what_is_cut_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_module, "_HINTS_MOST", 20)
    reads: dict[str, int] = {}

    def read(path: Path, most_bytes: int) -> bytes:
        if path.suffix == ".slots":
            reads[path.name] = most_bytes // 32
        return read_plain(path, most_bytes)

    monkeypatch.setattr(pod_module, "read_plain", read)
    for name in "abcd":
        pool = tmp_path / f"c.{name}.pool"
        put_pool(pool, name, 8, PAGE_BYTES * 64)
        hints_path(pool).write_bytes(bytes(8 * 32))
    folder = folder_of(tmp_path)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            folder.poll()
    assert sorted(reads.values()) == [0, 4, 8, 8]
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["pod.hints_full"]
    whole = next(name for name, slots in reads.items() if slots == 8)
    hints_path(tmp_path / whole).unlink()
    (tmp_path / whole).with_suffix(".pool").unlink()
    for _ in range(3):
        folder.poll()
    del reads[whole]
    assert sorted(reads.values()) == [4, 8, 8]
    folder.close()


def test_a_crowd_of_files_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_module, "_ENTRIES_MOST", 16)
    for number in range(64):
        (tmp_path / f"x{number}").touch()
    said = looked(folder_of(tmp_path))
    assert said == ["pod.crowded "]


def test_own_hints_never_follow_a_link_and_a_pipe_there_is_an_error(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(np.arange(64, dtype=np.uint8).tobytes())
    pool = tmp_path / "c.me.pool"
    hints_path(pool).symlink_to(victim)
    with pytest.raises(PoolError, match="plain file"):
        SlotHints(pool, 4, keep=False)
    assert victim.stat().st_size == 64
    hints_path(pool).unlink()
    os.mkfifo(hints_path(pool))
    with pytest.raises(PoolError, match="hints"):
        SlotHints(pool, 4, keep=False)


def test_a_journals_segments_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(OsDevice().open(tmp_path / "segment"))
    finally:
        os.umask(before)
    assert (tmp_path / "segment").stat().st_mode & 0o777 == 0o600
