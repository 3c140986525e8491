"""The NVME pool on a real file: what damage it finds, whom it refuses, what it keeps."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvbm._native import checksums
from kvbm.core.errors import LayoutError, PoolError, PoolFullError, PoolMismatchError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.pools import nvme
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme import PAGE_BYTES, NvmePool
from tests.pool_runs import SHAPE, part, random_run

SLOTS = 16
BLOCK_BYTES = 6000
STRIDE = 8192
GOOD, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.CORRUPT, ReadOutcome.FAILED


def _open(path: Path, shape: Namespace = SHAPE, slots: int = SLOTS, instance: str = "a") -> NvmePool:
    return NvmePool(path, slots, BLOCK_BYTES, shape, InstanceId(instance), checksums)


def _flip_bit(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def test_reopening_keeps_blocks_and_the_name(tmp_path: Path) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    assert pool.opened == "created"
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    again = _open(tmp_path / "pool")
    rows = run.room()
    assert (again.opened, again.pool_id, again.notice) == ("reopened", pool.pool_id, "")
    assert again.read(range(SLOTS), run.namespace, run.hashes, rows).outcomes == [GOOD] * SLOTS
    assert (rows == run.rows).all()
    again.close()


def test_every_flipped_bit_of_a_block_is_found(tmp_path: Path) -> None:
    run = random_run(1, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write([3], run.rows, run.proof)
    random = np.random.default_rng(0)
    of_the_header = [(byte, bit) for byte in range(64) for bit in range(8)]
    of_the_bytes = [(int(at), int(random.integers(8))) for at in random.integers(64, 64 + BLOCK_BYTES, 500)]
    for at, bit in of_the_header + of_the_bytes:
        position = PAGE_BYTES + 3 * STRIDE + at
        _flip_bit(pool.path, position, bit)
        assert pool.read([3], run.namespace, run.hashes, run.room()).outcomes == [CORRUPT], (at, bit)
        _flip_bit(pool.path, position, bit)
    assert pool.read([3], run.namespace, run.hashes, run.room()).outcomes == [GOOD]
    pool.close()


def test_a_write_torn_at_any_place_is_found(tmp_path: Path) -> None:
    first, second = random_run(1, BLOCK_BYTES, seed=1), random_run(1, BLOCK_BYTES, seed=2)
    pool = _open(tmp_path / "pool")
    pool.write([1], first.rows, first.proof)
    before = pool.path.read_bytes()
    pool.write([1], second.rows, second.proof)
    after = pool.path.read_bytes()
    begin = PAGE_BYTES + STRIDE
    for cut in [*range(5, 64), 64, 65, 512, 4096, 64 + BLOCK_BYTES - 1]:
        for torn in (after[: begin + cut] + before[begin + cut :], before[: begin + cut] + after[begin + cut :]):
            pool.path.write_bytes(torn)
            for run in (first, second):
                rows = run.room()
                outcomes = pool.read([1], run.namespace, run.hashes, rows).outcomes
                assert outcomes == [CORRUPT] or (rows == run.rows).all(), cut
    pool.close()


def test_swapped_slots_are_found(tmp_path: Path) -> None:
    run = random_run(3, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write([0, 1, 2], run.rows, run.proof)
    content = pool.path.read_bytes()
    slot = [content[PAGE_BYTES + at * STRIDE : PAGE_BYTES + (at + 1) * STRIDE] for at in range(3)]
    pool.path.write_bytes(content[:PAGE_BYTES] + slot[1] + slot[0] + slot[2] + content[PAGE_BYTES + 3 * STRIDE :])
    outcomes = pool.read([0, 1, 2], run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [CORRUPT, CORRUPT, GOOD]
    pool.close()


def test_a_file_cut_while_open_costs_only_the_blocks_cut_off(tmp_path: Path) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    os.truncate(pool.path, PAGE_BYTES + 5 * STRIDE + 100)
    outcomes = pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [GOOD] * 5 + [CORRUPT] * (SLOTS - 5)
    pool.close()


def test_a_cut_file_is_made_whole_again_and_says_so(tmp_path: Path) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    os.truncate(pool.path, PAGE_BYTES + 5 * STRIDE)
    again = _open(pool.path)
    assert again.opened == "reopened"
    assert f"had {PAGE_BYTES + 5 * STRIDE} of {PAGE_BYTES + SLOTS * STRIDE} bytes" in again.notice
    assert pool.path.stat().st_size == PAGE_BYTES + SLOTS * STRIDE
    outcomes = again.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [GOOD] * 5 + [CORRUPT] * (SLOTS - 5)
    again.close()


def test_a_damaged_header_gives_an_empty_pool_that_says_why(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for position in [8, 12, 20, PAGE_BYTES - 1, *random.integers(8, PAGE_BYTES, 5).tolist()]:
        path = tmp_path / f"pool{position}"
        _open(path).close()
        _flip_bit(path, position, 3)
        pool = _open(path)
        assert pool.opened == "created"
        assert "checksum of the file's header" in pool.notice
        pool.close()
    os.truncate(path, 100)
    pool = _open(path)
    assert pool.opened == "created"
    assert "ends after 100 bytes" in pool.notice
    pool.close()
    assert not list(tmp_path.glob("*.creating"))


@pytest.mark.parametrize("content", [b"x", b"something else " * 1000, bytes(PAGE_BYTES)])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pool"
    path.write_bytes(content)
    with pytest.raises(PoolError, match="no kvbm pool"):
        _open(path)
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_pool(tmp_path: Path) -> None:
    (tmp_path / "pool").touch()
    pool = _open(tmp_path / "pool")
    assert pool.opened == "created"
    pool.close()


def test_a_folder_or_device_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(PoolError, match="no plain file"):
            _open(path)
    (tmp_path / "file").touch()
    with pytest.raises(PoolError, match="cannot be opened"):
        _open(tmp_path / "file" / "pool")


@pytest.mark.parametrize(
    ("field", "shape", "instance", "slots"),
    [
        ("model 'tiny'.*'other'", Namespace(model="other", block_tokens=16, layout=SHAPE.layout), "a", SLOTS),
        ("kv_dtype", Namespace(model="tiny", block_tokens=16, layout=SHAPE.layout, kv_dtype="bfloat16"), "a", SLOTS),
        ("layout", Namespace(model="tiny", block_tokens=16), "a", SLOTS),
        ("ranks", Namespace(model="tiny", block_tokens=16, layout=SHAPE.layout, ranks="tp2"), "a", SLOTS),
        ("instance 'a'.*'b'", SHAPE, "b", SLOTS),
        (f"slots {SLOTS}.*{SLOTS + 1}", SHAPE, "a", SLOTS + 1),
    ],
)
def test_a_file_of_another_shape_is_refused_by_name_and_left_alone(
    tmp_path: Path, field: str, shape: Namespace, instance: str, slots: int
) -> None:
    run = random_run(1, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write([0], run.rows, run.proof)
    pool.close()
    content = pool.path.read_bytes()
    with pytest.raises(PoolMismatchError, match=field):
        _open(pool.path, shape, slots, instance)
    assert pool.path.read_bytes() == content


def test_tenants_and_adapters_share_a_file(tmp_path: Path) -> None:
    _open(tmp_path / "pool").close()
    tenant = Namespace(model="tiny", block_tokens=16, layout=SHAPE.layout, tenant="acme", lora="adapter")
    pool = _open(tmp_path / "pool", tenant)
    assert pool.opened == "reopened"
    pool.close()


def test_a_second_manager_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    pool = _open(tmp_path / "pool")
    with pytest.raises(PoolError, match="in use by another manager"):
        _open(tmp_path / "pool")
    pool.close()
    _open(tmp_path / "pool").close()


@pytest.mark.parametrize("attempt", range(20))
def test_of_many_managers_that_start_at_once_one_gets_the_file(tmp_path: Path, attempt: int) -> None:
    opened: list[NvmePool] = []
    refused: list[PoolError] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        try:
            opened.append(_open(tmp_path / "pool"))
        except PoolError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1, attempt
    assert all("in use" in str(error) for error in refused)
    assert opened[0].path.stat().st_ino == os.fstat(opened[0]._fd).st_ino
    opened[0].close()


def test_a_pool_made_by_another_manager_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[NvmePool] = []
    really = nvme._open_locked

    def late(path: Path, flags: int) -> int:
        monkeypatch.undo()
        first.append(_open(tmp_path / "pool"))
        return really(path, flags)

    monkeypatch.setattr(nvme, "_open_locked", late)
    with pytest.raises(PoolError, match="in use by another manager"):
        _open(tmp_path / "pool")
    assert first[0].path.stat().st_ino == os.fstat(first[0]._fd).st_ino
    first[0].close()
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]


def test_a_lock_is_on_the_file_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"old")
    really = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        path.write_bytes(b"new")
        really(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    fd = nvme._open_locked(path, os.O_RDWR)
    assert os.read(fd, 3) == b"new"
    os.close(fd)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PoolFullError, match="bytes wanted for 1099511627776 slots of 8192 bytes") as caught:
        _open(tmp_path / "pool", slots=1 << 40)
    assert caught.value.wanted_bytes == PAGE_BYTES + (1 << 40) * STRIDE
    assert 0 < caught.value.free_bytes < caught.value.wanted_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, at: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PoolFullError):
        _open(tmp_path / "pool")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_refuses_some_blocks_fails_only_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    bad = PAGE_BYTES + 6 * STRIDE
    really = os.preadv

    def refuse(fd: int, pieces: list[memoryview], position: int) -> int:
        if position <= bad < position + len(pieces) // 3 * STRIDE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(fd, pieces, position)

    monkeypatch.setattr(os, "preadv", refuse)
    outcomes = pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [GOOD] * 6 + [FAILED] + [GOOD] * (SLOTS - 7)
    pool.close()


def test_a_device_that_refuses_a_write_is_an_error_and_the_slot_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(2, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")

    def refuse(fd: int, pieces: list[memoryview], position: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(PoolError, match="refused 2 blocks"):
        pool.write([0, 1], run.rows, run.proof)
    assert pool.read([0, 1], run.namespace, run.hashes, run.room()).outcomes == [CORRUPT] * 2
    pool.close()


def test_long_runs_go_in_several_calls(tmp_path: Path) -> None:
    run = random_run(700, 64)
    pool = NvmePool(tmp_path / "pool", 700, 64, SHAPE, InstanceId("a"), checksums)
    descending = list(reversed(range(700)))
    pool.write(descending, run.rows, run.proof)
    asked = part(run, [5, 699, 0])
    rows = asked.room()
    result = pool.read([descending[at] for at in (5, 699, 0)], asked.namespace, asked.hashes, rows)
    assert result.outcomes == [GOOD] * 3
    assert (rows == asked.rows).all()
    pool.close()


def test_a_pool_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="0 slots"):
        _open(tmp_path / "pool", slots=0)
    assert list(tmp_path.iterdir()) == []
