"""The NVME pool on a real file: what damage it finds, whom it refuses, what it keeps."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbm._native import BlockIo, checksums
from kvbm.core.errors import LayoutError, PoolError, PoolFullError, PoolMismatchError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.pools.base import ReadOutcome
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.nvme import stripes
from kvbm.pools.nvme.aside import DEFAULT_ASIDE_BYTES
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockIoOptions, OpenEngine, stride_of
from kvbm.pools.nvme.file_header import encode_header
from kvbm.pools.nvme.generations import (
    RECORDS_AT,
    TAIL_BYTES,
    decode_record,
    encode_record,
    new_record,
    raised,
)
from kvbm.pools.nvme.pool import NvmePool
from tests.eventually import eventually
from tests.extras import needed
from tests.pool_runs import SHAPE, part, random_run

SLOTS = 16
BLOCK_BYTES = 6000
STRIDE = stride_of(BLOCK_BYTES)
WAIT_S = 60.0
GOOD, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.CORRUPT, ReadOutcome.FAILED
WAYS = [{"io": io, "direct": direct} for io in ("io_uring", "threads") for direct in ("on", "off")]


def _open(
    path: Path,
    shape: Namespace = SHAPE,
    slots: int = SLOTS,
    instance: str = "a",
    more: tuple[Path, ...] = (),
    engine: OpenEngine = BlockIo,
    aside_bytes: int = DEFAULT_ASIDE_BYTES,
    block_bytes: int = BLOCK_BYTES,
    **way: Any,
) -> NvmePool:
    return NvmePool(
        (path, *more),
        slots,
        block_bytes,
        shape,
        InstanceId(instance),
        checksums,
        engine,
        BlockIoOptions(**way),
        aside_bytes=aside_bytes,
    )


@pytest.fixture(autouse=True)
def long_lock_wait() -> Iterator[None]:
    """A device may give the lock of a closed file back a little later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "LOCK_WAIT_S", WAIT_S)
        yield


@contextmanager
def short_lock_wait() -> Iterator[None]:
    """Whoever is refused a lock is refused soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "LOCK_WAIT_S", 0.02)
        yield


@pytest.fixture(params=WAYS, ids=lambda way: f"{way['io']}-{way['direct']}")
def way(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Each engine, past the page cache and through it; those the machine has."""
    asked: dict[str, str] = request.param
    try:
        _open(tmp_path / "tried", **asked).close()
    except PoolError as error:
        pytest.skip(str(error))
    (tmp_path / "tried").unlink()
    return asked


def _aligned(rows: np.ndarray) -> np.ndarray:
    """The same rows in memory that a device takes as it is."""
    memory = np.frombuffer(mmap.mmap(-1, rows.nbytes), dtype=np.uint8).reshape(rows.shape)
    memory[:] = rows
    return memory


def _flip_bit(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def test_reopening_keeps_blocks_and_the_name(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    assert pool.opened == "created"
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    again = _open(tmp_path / "pool", **way)
    rows = run.room()
    assert (again.opened, again.pool_id, again.notice) == ("reopened", pool.pool_id, "")
    assert again.read(range(SLOTS), run.namespace, run.hashes, rows).outcomes == [GOOD] * SLOTS
    assert (rows == run.rows).all()
    again.close()


def test_a_device_that_takes_little_at_once_gets_the_whole_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    with monkeypatch.context() as little:
        little.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:1000], at))
        pool = _open(tmp_path / "pool")
    pool.close()
    again = _open(tmp_path / "pool")
    assert (again.opened, again.pool_id, again.notice) == ("reopened", pool.pool_id, "")
    again.close()


def test_every_flipped_bit_of_a_block_is_found(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(1, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write([3], run.rows, run.proof)
    random = np.random.default_rng(0)
    of_the_header = [(byte, bit) for byte in range(64) for bit in range(8)]
    places = random.integers(64, PAGE_BYTES + BLOCK_BYTES, 500)  # the rest of the header's page too
    of_the_bytes = [(int(at), int(random.integers(8))) for at in places]
    for at, bit in of_the_header + of_the_bytes:
        position = PAGE_BYTES + 3 * STRIDE + at
        _flip_bit(pool.path, position, bit)
        assert pool.read([3], run.namespace, run.hashes, run.room()).outcomes == [CORRUPT], (at, bit)
        _flip_bit(pool.path, position, bit)
    assert pool.read([3], run.namespace, run.hashes, run.room()).outcomes == [GOOD]
    pool.close()


def test_a_write_torn_at_any_place_is_found(tmp_path: Path, way: dict[str, str]) -> None:
    first, second = random_run(1, BLOCK_BYTES, seed=1), random_run(1, BLOCK_BYTES, seed=2)
    pool = _open(tmp_path / "pool", **way)
    pool.write([1], first.rows, first.proof)
    before = pool.path.read_bytes()
    pool.write([1], second.rows, second.proof)
    after = pool.path.read_bytes()
    begin = PAGE_BYTES + STRIDE
    for cut in [*range(5, 64), 64, 65, 512, 4095, 4096, 4097, 8192, PAGE_BYTES + BLOCK_BYTES - 1]:
        for torn in (after[: begin + cut] + before[begin + cut :], before[: begin + cut] + after[begin + cut :]):
            pool.path.write_bytes(torn)
            for run in (first, second):
                rows = run.room()
                outcomes = pool.read([1], run.namespace, run.hashes, rows).outcomes
                assert outcomes == [CORRUPT] or (rows == run.rows).all(), cut
    pool.close()


def test_swapped_slots_are_found(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(3, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write([0, 1, 2], run.rows, run.proof)
    content = pool.path.read_bytes()
    slot = [content[PAGE_BYTES + at * STRIDE : PAGE_BYTES + (at + 1) * STRIDE] for at in range(3)]
    pool.path.write_bytes(content[:PAGE_BYTES] + slot[1] + slot[0] + slot[2] + content[PAGE_BYTES + 3 * STRIDE :])
    outcomes = pool.read([0, 1, 2], run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [CORRUPT, CORRUPT, GOOD]
    pool.close()


def test_a_file_cut_while_open_costs_only_the_blocks_cut_off(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    os.truncate(pool.path, PAGE_BYTES + 5 * STRIDE + 100)
    outcomes = pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [GOOD] * 5 + [CORRUPT] * (SLOTS - 5)
    pool.close()


def test_a_cut_file_is_made_whole_again_and_says_so(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    os.truncate(pool.path, PAGE_BYTES + 5 * STRIDE)
    again = _open(pool.path, **way)
    assert again.opened == "reopened"
    assert f"had {PAGE_BYTES + 5 * STRIDE} of {pool.file_bytes} bytes" in again.notice
    assert pool.path.stat().st_size == pool.file_bytes == PAGE_BYTES + SLOTS * STRIDE + TAIL_BYTES
    outcomes = again.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [GOOD] * 5 + [CORRUPT] * (SLOTS - 5)
    again.close()


def test_a_damaged_header_is_written_anew_from_its_copy(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    run = random_run(SLOTS, BLOCK_BYTES)
    for position in [0, 8, 12, 20, PAGE_BYTES - 1, *random.integers(8, PAGE_BYTES, 5).tolist()]:
        path = tmp_path / f"pool{position}"
        pool = _open(path)
        pool.write(range(SLOTS), run.rows, run.proof)
        pool.close()
        _flip_bit(path, position, 3)
        for notice in ("written anew from its copy", ""):
            again = _open(path)
            assert (again.opened, again.pool_id) == ("reopened", pool.pool_id)
            assert notice in again.notice
            assert again.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes == [GOOD] * SLOTS
            again.close()


@pytest.mark.parametrize("zeros", [False, True])
def test_a_header_damaged_with_its_copy_gives_an_empty_pool_that_says_why(tmp_path: Path, zeros: bool) -> None:
    path = tmp_path / "pool"
    pool = _open(path)
    pool.close()
    for at in (0, pool.file_bytes - TAIL_BYTES):
        _flip_bit(path, at + 20, 3)
        if zeros:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(PAGE_BYTES))
    pool = _open(path)
    assert pool.opened == "created"
    assert ("header is lost" if zeros else "checksum of the file's header") in pool.notice
    pool.close()
    os.truncate(path, 100)
    pool = _open(path)
    assert pool.opened == "created"
    assert "ends after 100 bytes" in pool.notice
    pool.close()
    assert not list(tmp_path.glob("*.creating"))


@pytest.mark.parametrize("content", [b"x", b"something else " * 1000, bytes(PAGE_BYTES)])
def test_a_foreign_file_is_set_aside_whole(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pool"
    path.write_bytes(content)
    pool = _open(path)
    assert pool.opened == "created"
    assert "no kvbm pool" in pool.notice and "set aside as pool.aside-1" in pool.notice
    pool.close()
    assert (tmp_path / "pool.aside-1").read_bytes() == content
    _open(path).close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["pool", "pool.aside-1"]


def test_a_foreign_file_beyond_the_bound_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"something else " * 1000)
    with pytest.raises(PoolError, match=r"no kvbm pool.*pools\.nvme\.aside_bytes"):
        _open(path, aside_bytes=4096)
    assert path.read_bytes() == b"something else " * 1000


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
        (
            "model 'tiny'.*'other'",
            Namespace(model="other", revision="r1", block_tokens=16, layout=SHAPE.layout),
            "a",
            SLOTS,
        ),
        (
            "kv_dtype",
            Namespace(model="tiny", revision="r1", block_tokens=16, layout=SHAPE.layout, kv_dtype="bfloat16"),
            "a",
            SLOTS,
        ),
        ("layout", Namespace(model="tiny", revision="r1", block_tokens=16), "a", SLOTS),
        (
            "ranks",
            Namespace(model="tiny", revision="r1", block_tokens=16, layout=SHAPE.layout, ranks="tp2"),
            "a",
            SLOTS,
        ),
        ("instance 'a'.*'b'", SHAPE, "b", SLOTS),
    ],
)
def test_a_file_of_another_shape_is_set_aside_by_name(
    tmp_path: Path, field: str, shape: Namespace, instance: str, slots: int
) -> None:
    run = random_run(1, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write([0], run.rows, run.proof)
    pool.close()
    content = pool.path.read_bytes()
    other = _open(pool.path, shape, slots, instance)
    assert other.opened == "created" and other.pool_id != pool.pool_id
    assert re.search(field, other.notice)
    other.close()
    assert (tmp_path / "pool.aside-1").read_bytes() == content


def test_what_was_set_aside_stays_within_its_bound_and_makes_room_for_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"somebody's")
    for number in range(6):
        shape = Namespace(model=f"model {number}", revision="r1", block_tokens=16, layout=SHAPE.layout)
        pool = _open(path, shape, aside_bytes=3 * (PAGE_BYTES + SLOTS * STRIDE + TAIL_BYTES))
        pool.close()
    names = sorted(one.name for one in tmp_path.glob("*.aside-*"))
    assert names == ["pool.aside-1", "pool.aside-5", "pool.aside-6"]  # and the two pools before were deleted
    assert (tmp_path / "pool.aside-1").read_bytes() == b"somebody's"
    reserve, asked = os.posix_fallocate, []

    def full_twice(fd: int, at: int, size: int) -> None:
        asked.append(size)
        if len(asked) <= 2:
            raise OSError(errno.ENOSPC, "full")
        reserve(fd, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full_twice)
    _open(path, SHAPE).close()
    assert [one.name for one in tmp_path.glob("*.aside-*") if one.name != "pool.aside-1"] == ["pool.aside-7"]


def test_a_file_that_cannot_be_set_aside_gives_its_blocks_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool"
    _open(path).close()
    rename = os.rename

    def full(source: Path, target: Path) -> None:
        if "aside" in str(target):
            raise OSError(errno.ENOSPC, "full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    pool = _open(path, Namespace(model="other", revision="r1", block_tokens=16, layout=SHAPE.layout))
    assert pool.opened == "created" and "given up" in pool.notice
    pool.close()
    assert [one.name for one in tmp_path.iterdir()] == ["pool"]


# -- another size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_pool_that_grows_keeps_its_blocks(tmp_path: Path, way: dict[str, str], stripes: int) -> None:
    first, *more = [tmp_path / f"pool{number}" for number in range(stripes)]
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(first, more=more, **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    larger = _open(first, slots=2 * SLOTS + 1, more=more, **way)
    assert (larger.opened, larger.pool_id, larger.slots) == ("reopened", pool.pool_id, 2 * SLOTS + 1)
    assert larger.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes == [GOOD] * SLOTS
    larger.write(range(SLOTS, 2 * SLOTS), run.rows, run.proof)
    assert larger.generations is not None and pool.generations is not None
    assert larger.generations.record.marks == pool.generations.record.marks
    larger.close()
    assert sum(path.stat().st_size for path in (first, *more)) == larger.file_bytes


def test_a_pool_without_room_to_grow_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    content = pool.path.read_bytes()
    again = _open(pool.path, slots=1 << 40)
    assert (again.opened, again.slots) == ("reopened", SLOTS)
    assert f"the pool stays at {SLOTS} slots" in again.notice
    assert again.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes == [GOOD] * SLOTS
    again.close()
    assert pool.path.read_bytes() == content


def test_a_pool_that_shrinks_keeps_what_lies_beyond_until_it_was_moved(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    for _ in range(2):  # also where a start was killed before it had moved them
        smaller = _open(pool.path, slots=6, **way)
        assert (smaller.opened, smaller.slots, smaller.room_slots) == ("reopened", 6, SLOTS)
        found = smaller.scan(range(SLOTS), 4)
        assert found.hashes == run.hashes and found.outcomes.tolist() == [1] * SLOTS
        smaller.close()
    smaller = _open(pool.path, slots=6, **way)
    wanted = [run.namespace + run.hashes[16 * at : 16 * at + 16] for at in (SLOTS - 1, 7)]
    assert smaller.relocate([SLOTS - 1, 6, 7], [0, 1, 2], [wanted[0], wanted[0], wanted[1]]) == [True, False, True]
    smaller.trim()
    hashes = run.hashes[16 * (SLOTS - 1) :] + run.hashes[16:32] + run.hashes[16 * 7 : 16 * 8]
    assert smaller.read(range(3), run.namespace, hashes, run.room()[:3]).outcomes == [GOOD] * 3
    assert smaller.room_slots == 0 and pool.path.stat().st_size == smaller.file_bytes
    smaller.close()
    again = _open(pool.path, slots=6, **way)
    assert again.room_slots == 0 and again.notice == ""
    again.close()


@pytest.mark.parametrize("slots", [6, 30])
def test_a_resize_killed_at_any_write_leaves_a_pool_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    run = random_run(4, BLOCK_BYTES)
    pwrite, left = os.pwrite, [0]

    class Killed(Exception):
        pass

    def until_killed(fd: int, data: bytes, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            pwrite(fd, bytes(data)[: len(data) // 2], at)  # torn
            raise Killed
        return pwrite(fd, data, at)

    for writes in range(12):
        path = tmp_path / f"pool{writes}"
        pool = _open(path)
        pool.write(range(4), run.rows, run.proof)
        pool.close()
        left[0] = writes
        monkeypatch.setattr(os, "pwrite", until_killed)
        with ExitStack() as opened:
            is_over = False
            with suppress(Killed):
                resized = _open(path, slots=slots, direct="off")
                opened.callback(resized.close)
                resized.trim()
                is_over = True
        monkeypatch.setattr(os, "pwrite", pwrite)
        for wanted in (slots, SLOTS):
            again = _open(path, slots=wanted)
            assert (again.opened, again.pool_id, again.slots) == ("reopened", pool.pool_id, wanted)
            assert again.read(range(4), run.namespace, run.hashes, run.room()).outcomes == [GOOD] * 4
            assert again.generations is not None and pool.generations is not None
            assert again.generations.record.marks == pool.generations.record.marks
            again.close()
    assert is_over


def test_a_pool_of_before_gets_a_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    header = msgspec.structs.replace(pool._headers[0], has_tail=False)
    with pool.path.open("r+b") as file:
        file.write(encode_header(pool.path, header, checksums))
    os.truncate(pool.path, header.file_bytes)
    again = _open(pool.path)
    assert (again.opened, again.pool_id) == ("reopened", pool.pool_id)
    assert again.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes == [GOOD] * SLOTS
    found = again.scan(range(SLOTS), 4)
    assert again.generations is not None
    assert not again.generations.counts(
        found.namespaces, found.generations
    ).any()  # what was cleared of them nobody noted
    again.write([3], run.rows[:1], run.proof._replace(hashes=run.hashes[:16], checksums=run.proof.checksums[:1]))
    found = again.scan(range(SLOTS), 4)
    assert np.flatnonzero(again.generations.counts(found.namespaces, found.generations)).tolist() == [3]
    again.close()


def test_a_kvbm_of_before_takes_the_file_for_damaged_and_starts(tmp_path: Path) -> None:
    pool = _open(tmp_path / "pool")
    pool.close()
    page = pool.path.read_bytes()[:PAGE_BYTES]
    assert page[:8] == b"KVBMPOOL"  # first it looks at this, then at the checksum, then at the version
    assert page[-4:] != int(checksums(np.frombuffer(page[:-4], dtype=np.uint8).reshape(1, -1))[0]).to_bytes(4, "little")


# -- generations -------------------------------------------------------------------------------------------------------


def test_what_was_written_before_a_clear_does_not_count(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(4, BLOCK_BYTES)
    other = run.proof._replace(namespace=NamespaceId(b"other namespace!"))

    def counted(pool: NvmePool) -> list[bool]:
        found = pool.scan(range(SLOTS), 4)
        assert pool.generations is not None
        return [
            bool(ok) and whole == 1
            for ok, whole in zip(
                pool.generations.counts(found.namespaces, found.generations), found.outcomes, strict=True
            )
        ][:8]

    pool = _open(tmp_path / "pool", **way)
    assert pool.generations is not None
    pool.write(range(4), run.rows, run.proof)
    pool.write(range(4, 6), run.rows[:2], other._replace(hashes=run.hashes[:32], checksums=run.proof.checksums[:2]))
    assert counted(pool) == [True] * 6 + [False] * 2
    with pool.generations.clearing([run.namespace]):
        pool.write([0], run.rows[:1], run.proof._replace(hashes=run.hashes[:16], checksums=run.proof.checksums[:1]))
    assert counted(pool) == [False] * 4 + [True] * 2 + [False] * 2
    pool.write([6], run.rows[:1], run.proof._replace(hashes=run.hashes[:16], checksums=run.proof.checksums[:1]))
    pool.close()
    for _ in range(2):
        pool = _open(pool.path, **way)
        assert counted(pool) == [False] * 4 + [True, True, True, False]
        pool.close()
    pool = _open(pool.path, **way)
    assert pool.generations is not None
    with pool.generations.clearing():
        pass
    assert not any(counted(pool))
    pool.close()


@pytest.mark.parametrize("copies", [[0], [1], [0, 1]])
def test_one_copy_of_the_record_is_enough_and_without_both_nothing_counts(tmp_path: Path, copies: list[int]) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    for copy in copies:
        _flip_bit(pool.path, pool.file_bytes - TAIL_BYTES + RECORDS_AT[copy] + 40, 3)
    for _ in range(2):
        pool = _open(pool.path)
        found = pool.scan(range(SLOTS), 4)
        assert pool.generations is not None
        counted = pool.generations.counts(found.namespaces, found.generations)
        assert counted.tolist() == [len(copies) == 1] * SLOTS
        pool.close()


def test_a_clear_killed_at_any_write_was_either_noted_or_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(1, BLOCK_BYTES)
    path = tmp_path / "pool"
    pool = _open(path)
    pool.write([0], run.rows, run.proof)
    assert pool.generations is not None
    pwrite, writes = os.pwrite, list[int]()

    def torn(fd: int, data: bytes, at: int) -> int:
        writes.append(at)
        return pwrite(fd, bytes(data)[:100] if len(writes) == 2 else data, at)

    monkeypatch.setattr(os, "pwrite", torn)
    with pool.generations.clearing():
        pass
    monkeypatch.setattr(os, "pwrite", pwrite)
    pool.close()
    again = _open(path)
    found = again.scan([0], 1)
    assert again.generations is not None
    assert not again.generations.counts(found.namespaces, found.generations).any()
    again.close()


def test_a_device_that_refuses_the_record_does_not_hold_a_clear_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(1, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write([0], run.rows, run.proof)
    assert pool.generations is not None
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pool.generations.clearing():
        pass
    found = pool.scan([0], 1)
    assert not pool.generations.counts(found.namespaces, found.generations).any()
    monkeypatch.setattr(os, "pwrite", pwrite)
    pool.close()


def test_a_record_of_many_clears_stays_small(tmp_path: Path) -> None:
    record = new_record()
    for number in range(3000):
        record = raised(record, [NamespaceId(number.to_bytes(16, "little"))])
    assert len(record.marks) <= 256
    stored = decode_record(encode_record(record, checksums), checksums)
    assert stored is not None and stored.floor == record.first + len(record.marks) - 1 and not stored.cleared
    few = raised(raised(new_record(), None), [NamespaceId(bytes(16))])
    assert decode_record(encode_record(few, checksums), checksums) == few
    assert decode_record(b"", checksums) is None


def test_tenants_and_adapters_share_a_file(tmp_path: Path) -> None:
    _open(tmp_path / "pool").close()
    tenant = Namespace(model="tiny", revision="r1", block_tokens=16, layout=SHAPE.layout, tenant="acme", lora="adapter")
    pool = _open(tmp_path / "pool", tenant)
    assert pool.opened == "reopened"
    pool.close()


def test_a_second_manager_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    pool = _open(tmp_path / "pool")
    with short_lock_wait(), pytest.raises(PoolError, match="in use by another manager"):
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
    with short_lock_wait():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(opened) == 1, attempt
    assert all("in use" in str(error) for error in refused)
    assert opened[0].path.stat().st_ino == os.fstat(opened[0]._fds[0]).st_ino
    opened[0].close()


def test_a_pool_made_by_another_manager_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[NvmePool] = []
    really = stripes._open_with_lock

    def late(path: Path, flags: int) -> int:
        monkeypatch.undo()
        first.append(_open(tmp_path / "pool"))
        return really(path, flags)

    monkeypatch.setattr(stripes, "_open_with_lock", late)
    with short_lock_wait(), pytest.raises(PoolError, match="in use by another manager"):
        _open(tmp_path / "pool")
    assert first[0].path.stat().st_ino == os.fstat(first[0]._fds[0]).st_ino
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
    fd = stripes._open_with_lock(path, os.O_RDWR)
    assert os.read(fd, 3) == b"new"
    os.close(fd)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PoolFullError, match="bytes wanted for 1099511627776 slots of 12288 bytes") as caught:
        _open(tmp_path / "pool", slots=1 << 40)
    assert caught.value.wanted_bytes == PAGE_BYTES + (1 << 40) * STRIDE + TAIL_BYTES
    assert 0 < caught.value.free_bytes < caught.value.wanted_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, at: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PoolFullError):
        _open(tmp_path / "pool")
    assert list(tmp_path.iterdir()) == []


class Wrapped:
    """An engine with something wrong."""

    def __init__(self, *given: Any) -> None:
        self.engine = BlockIo(*given)
        self.refused: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def read(self, slots: np.ndarray, *given: Any) -> tuple[np.ndarray, np.ndarray]:
        outcomes, sums = self.engine.read(slots, *given)
        outcomes[np.isin(slots, list(self.refused))] = FAILED
        return outcomes, sums

    def write(self, slots: np.ndarray, *given: Any, **named: Any) -> np.ndarray:
        errors = np.zeros(len(slots), dtype=np.int32)
        errors[np.isin(slots, list(self.refused))] = errno.EIO
        return errors


def test_a_device_that_refuses_some_blocks_fails_only_those(tmp_path: Path) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    pool = _open(tmp_path / "pool", engine=Wrapped)  # type: ignore[arg-type]
    pool._engine.refused.add(6)  # type: ignore[union-attr]
    outcomes = pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [GOOD] * 6 + [FAILED] + [GOOD] * (SLOTS - 7)
    with pytest.raises(PoolError, match=r"refused 1 blocks of 2: Input/output error \(EIO\)"):
        pool.write([5, 6], run.rows[:2], part(run, [0, 1]).proof)
    pool.close()


@pytest.mark.parametrize("io", ["io_uring", "threads"])
def test_what_the_kernel_refuses_is_told_for_each_block(tmp_path: Path, io: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES + 4 * STRIDE))
    run = random_run(4, BLOCK_BYTES)
    numbers = np.arange(4)
    for flags, write_error, outcome in ((os.O_RDONLY, errno.EBADF, CORRUPT), (os.O_WRONLY, 0, FAILED)):
        fd = os.open(path, flags)
        try:
            engine = BlockIo([fd], 4, BLOCK_BYTES, io)
        except OSError as error:
            pytest.skip(str(error))
        errors = engine.write(numbers, run.rows, numbers, run.namespace, run.hashes, 1, run.proof.checksums)
        assert errors.tolist() == [write_error] * 4
        outcomes, _ = engine.read(numbers, run.room(), numbers, run.namespace, run.hashes)
        assert outcomes.tolist() == [outcome] * 4
        assert engine.close(WAIT_S)
        os.close(fd)


def test_long_runs_come_back_in_any_order(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(700, 64)
    pool = _open(tmp_path / "pool", slots=700, block_bytes=64, **way)
    descending = list(reversed(range(700)))
    pool.write(descending, run.rows, run.proof)
    asked = part(run, [5, 699, 0])
    rows = asked.room()
    result = pool.read([descending[at] for at in (5, 699, 0)], asked.namespace, asked.hashes, rows)
    assert result.outcomes == [GOOD] * 3
    assert (rows == asked.rows).all()
    assert (result.checksums == asked.proof.checksums).all()
    pool.close()


def test_rows_lie_where_the_caller_says_and_no_other_is_touched(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(6, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write([2, 9, 4], run.rows, part(run, [5, 0, 3]).proof, at=[5, 0, 3])
    rows = run.room()
    result = pool.read([4, 2], run.namespace, part(run, [3, 5]).hashes, rows, at=[1, 4])
    assert result.outcomes == [GOOD, GOOD]
    assert (rows[[1, 4]] == run.rows[[3, 5]]).all()
    assert (rows[[0, 2, 3, 5]] == 0xA5).all()
    pool.close()


@pytest.mark.parametrize("block_bytes", [1, 511, 4096, 6000, 3 * 4096, (1 << 20) + 8])
def test_any_block_size_goes_from_any_memory(tmp_path: Path, way: dict[str, str], block_bytes: int) -> None:
    run = random_run(5, block_bytes)
    pool = _open(tmp_path / "pool", block_bytes=block_bytes, **way)
    for slots, rows in (([0, 1, 2, 3, 4], run.rows), ([9, 7, 8, 5, 6], _aligned(run.rows))):
        pool.write(slots, rows, run.proof)
        for room in (run.room(), _aligned(run.room())):
            assert pool.read(slots, run.namespace, run.hashes, room).outcomes == [GOOD] * 5
            assert (room == run.rows).all()
    pool.close()


def test_aligned_rows_go_to_the_device_without_a_copy(tmp_path: Path) -> None:
    run = random_run(4, 4096)
    aligned = _aligned(run.rows)
    pool = _open(tmp_path / "pool", block_bytes=4096)
    if not pool.direct:
        pytest.skip("the file system takes no direct transfers")
    pool.write(range(4), aligned, run.proof)
    assert pool.read(range(4), run.namespace, run.hashes, aligned).outcomes == [GOOD] * 4
    assert pool._engine.counts()["bounced"] == 0  # type: ignore[union-attr]
    unaligned = np.zeros(4 * 4096 + 1, dtype=np.uint8)[1:].reshape(4, 4096)
    assert pool.read(range(4), run.namespace, run.hashes, unaligned).outcomes == [GOOD] * 4
    assert pool._engine.counts()["bounced"] == 4  # type: ignore[union-attr]
    assert (unaligned == run.rows).all()
    pool.close()


def test_blocks_go_to_hbm_on_the_cpu_without_a_copy(tmp_path: Path) -> None:
    needed("torch", "engine")
    run = random_run(4, 3 * 4096)
    pool, hbm = _open(tmp_path / "pool", block_bytes=3 * 4096), HbmPool(6, 3 * 4096, checksums, "cpu")
    if not pool.direct:
        pytest.skip("the file system takes no direct transfers")
    assert hbm.memory is not None and not hbm.memory.any()
    pool.write(range(4), _aligned(run.rows), run.proof)
    assert pool.read(range(4), run.namespace, run.hashes, hbm.memory, [5, 1, 3, 0]).outcomes == [GOOD] * 4
    assert (hbm.tensor.numpy()[[5, 1, 3, 0]] == run.rows).all()
    assert pool._engine.counts()["bounced"] == 0  # type: ignore[union-attr]
    hbm.close()
    pool.close()


def test_a_pool_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="0 slots"):
        _open(tmp_path / "pool", slots=0)
    with pytest.raises(LayoutError, match="no path"):
        NvmePool((), SLOTS, BLOCK_BYTES, SHAPE, InstanceId("a"), checksums, BlockIo)
    assert list(tmp_path.iterdir()) == []


def test_nobody_reaches_into_its_memory(tmp_path: Path) -> None:
    run = random_run(1, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    assert pool.memory is None
    for reach_in in (lambda: pool.checksums([0]), lambda: pool.seal([0], run.proof)):
        with pytest.raises(LayoutError, match="no memory in reach"):
            reach_in()
    pool.close()


# -- how bytes are moved -----------------------------------------------------------------------------------------------


def test_a_file_system_without_direct_transfers_is_told_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    run = random_run(2, BLOCK_BYTES)
    pool = _open(tmp_path / "pool")
    assert not pool.direct
    assert "refuses direct transfers" in pool.notice
    pool.write([0, 1], run.rows, run.proof)
    assert pool.read([0, 1], run.namespace, run.hashes, run.room()).outcomes == [GOOD] * 2
    pool.close()
    with pytest.raises(PoolError, match=r"set pools\.nvme\.direct to auto"):
        _open(tmp_path / "pool", direct="on")
    _open(tmp_path / "pool").close()  # the lock went with it


def test_a_kernel_without_io_uring_is_told_or_refused(tmp_path: Path) -> None:
    class Refused:
        refusal = "io_uring_setup: Operation not permitted"
        io = "threads"

        def __init__(self, fds: Any, slots: int, block_bytes: int, io: str, *how: Any) -> None:
            if io == "io_uring":
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            self.close = BlockIo(fds, slots, block_bytes, "threads", *how).close

    pool = _open(tmp_path / "pool", engine=Refused)  # type: ignore[arg-type]
    assert pool.io == "threads"
    assert "io_uring is refused (io_uring_setup: Operation not permitted)" in pool.notice
    pool.close()
    with pytest.raises(PoolError, match="set it to auto or threads"):
        _open(tmp_path / "pool", engine=Refused, io="io_uring")  # type: ignore[arg-type]


# -- a device that does not answer -------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    begun: list[threading.Thread] = []

    def begin(work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        begun.append(thread)
        return thread

    yield begin
    for thread in begun:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_read_that_never_returns_holds_up_nothing_else_and_a_close_gives_it_up(
    tmp_path: Path, way: dict[str, str], threads: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    engine: Any = pool._engine
    engine.withhold(3)
    ended = threading.Event()
    outcomes: list[ReadOutcome] = []

    def read() -> None:
        outcomes.extend(pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes)
        ended.set()

    threads(read)
    eventually(lambda: engine.counts()["in_flight"] == 1)  # the others have come back
    others = [slot for slot in range(SLOTS) if slot != 3]
    for _ in range(5):
        asked = part(run, others)
        assert pool.read(others, asked.namespace, asked.hashes, asked.room()).outcomes == [GOOD] * len(others)
    assert not ended.is_set()
    pool.close(0.2)
    assert "has not ended every transfer" in pool.notice
    with short_lock_wait(), pytest.raises(PoolError, match="in use by another manager"):
        _open(pool.path)  # whoever took the slots over could meet a late write
    assert not ended.is_set()  # the slots are the copy's, and stay it
    engine.withhold(-1)
    assert ended.wait(WAIT_S)
    assert outcomes == [GOOD] * SLOTS  # late, and still right
    for fd in pool._fds:
        os.close(fd)


def test_closing_fails_what_has_not_begun_and_waits_for_the_rest(
    tmp_path: Path, way: dict[str, str], threads: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", depth=1, **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    engine: Any = pool._engine
    engine.withhold(0)
    outcomes: list[ReadOutcome] = []
    reading = threads(lambda: outcomes.extend(pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes))
    eventually(lambda: engine.counts()["in_flight"] == 1)  # depth is 1: the others are queued
    closing = threads(lambda: pool.close(WAIT_S))
    is_closing, one = threading.Event(), np.zeros(1, dtype=np.int64)

    def refused() -> None:
        engine.read(one, run.room()[:1], one, run.namespace, run.hashes[:HASH_BYTES])
        is_closing.set()

    threads(refused)
    assert is_closing.wait(WAIT_S)  # only a close ends a call that is queued, or begins later
    closing.join(0.05)
    assert closing.is_alive()  # it waits for the transfer that has begun
    engine.withhold(-1)
    reading.join(WAIT_S)
    closing.join(WAIT_S)
    assert outcomes == [GOOD] + [FAILED] * (SLOTS - 1)
    assert pool.notice == ""
    _open(pool.path).close()


def test_calls_and_a_close_at_once_all_end(
    tmp_path: Path, way: dict[str, str], threads: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(tmp_path / "pool", depth=4, **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    seen: list[ReadOutcome] = []
    wrong: list[int] = []

    def read() -> None:
        while True:
            rows = run.room()
            outcomes = pool.read(range(SLOTS), run.namespace, run.hashes, rows).outcomes
            wrong.extend(at for at in range(SLOTS) if outcomes[at] == GOOD and not (rows[at] == run.rows[at]).all())
            seen.extend(outcomes)
            if FAILED in outcomes:
                return

    def write() -> None:
        try:
            while True:
                pool.write(range(SLOTS), run.rows, run.proof)
        except PoolError:
            return

    begun = [threads(work) for work in (read, read, write)]
    eventually(lambda: len(seen) >= 10 * SLOTS)
    pool.close(WAIT_S)
    for thread in begun:
        thread.join(WAIT_S)
    assert pool.notice == ""
    assert wrong == []


# -- stripes -----------------------------------------------------------------------------------------------------------


def _stripes(folder: Path, count: int = 3) -> tuple[Path, ...]:
    return tuple(folder / f"disk{number}" / "pool" for number in range(count))


def _striped(paths: tuple[Path, ...], slots: int = SLOTS, instance: str = "a", **way: Any) -> NvmePool:
    return _open(paths[0], slots=slots, instance=instance, more=paths[1:], **way)


def test_blocks_are_spread_over_the_stripes_and_found_again(tmp_path: Path, way: dict[str, str]) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    paths = _stripes(tmp_path)
    pool = _striped(paths, **way)
    pool.write(range(SLOTS), run.rows, run.proof)
    sizes = [path.stat().st_size for path in paths]
    assert sizes == [PAGE_BYTES + count * STRIDE + TAIL_BYTES for count in (6, 5, 5)]
    assert pool.file_bytes == sum(sizes)
    pool.close()
    for slot in range(SLOTS):
        at = PAGE_BYTES + slot // 3 * STRIDE + PAGE_BYTES
        assert paths[slot % 3].read_bytes()[at : at + BLOCK_BYTES] == run.rows[slot].tobytes()
    again = _striped(paths, **way)
    rows = run.room()
    assert (again.opened, again.pool_id, again.notice) == ("reopened", pool.pool_id, "")
    assert again.read(range(SLOTS), run.namespace, run.hashes, rows).outcomes == [GOOD] * SLOTS
    assert (rows == run.rows).all()
    again.close()


def _filled(paths: tuple[Path, ...], instance: str = "a") -> tuple[Any, str]:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _striped(paths, instance=instance)
    pool.write(range(SLOTS), run.rows, run.proof)
    pool.close()
    return run, pool.pool_id


def test_exchanged_stripes_are_refused_by_name(tmp_path: Path) -> None:
    paths = _stripes(tmp_path)
    _filled(paths)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(PoolMismatchError, match=f"{paths[2]}: it is stripe 2 of 3 and is named as stripe 1"):
        _striped((paths[0], paths[2], paths[1]))
    for number, path in enumerate((paths[1], paths[0])):
        path.write_bytes(before[number])  # the files themselves
    with pytest.raises(PoolMismatchError, match=f"{paths[0]}: it is stripe 1 of 3 and is named as stripe 0"):
        _striped(paths)
    assert [path.read_bytes() for path in paths] == [before[1], before[0], before[2]]


def test_a_stripe_of_another_pool_is_refused_by_name(tmp_path: Path) -> None:
    ours, theirs = _stripes(tmp_path / "ours"), _stripes(tmp_path / "theirs")
    _, our_id = _filled(ours)
    _, their_id = _filled(theirs)
    with pytest.raises(PoolMismatchError, match=f"{theirs[1]}: it is a stripe of pool {their_id}, {ours[0]} is one of"):
        _striped((ours[0], theirs[1], ours[2]))
    assert our_id != their_id


def test_stripes_of_another_number_are_set_aside(tmp_path: Path) -> None:
    paths = _stripes(tmp_path)
    _filled(paths)
    pool = _striped(paths[:2])
    assert pool.opened == "created" and "stripes 3, this manager has stripes 2" in pool.notice
    pool.close()
    with pytest.raises(PoolError, match="named twice"):
        _striped((paths[0], paths[1], paths[0]))


@pytest.mark.parametrize("damage", ["gone", "empty", "header", "cut"])
def test_a_lost_stripe_costs_its_own_blocks(tmp_path: Path, damage: str) -> None:
    paths = _stripes(tmp_path)
    run, pool_id = _filled(paths)
    if damage == "gone":
        paths[1].unlink()
    elif damage == "header":
        _flip_bit(paths[1], 20, 3)
        _flip_bit(paths[1], paths[1].stat().st_size - TAIL_BYTES + 20, 3)  # its copy too
    else:
        os.truncate(paths[1], 0 if damage == "empty" else 100)
    pool = _striped(paths)
    assert (pool.opened, pool.pool_id) == ("reopened", pool_id)
    assert f"{paths[1]}: stripe 1 was made anew" in pool.notice
    outcomes = pool.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [CORRUPT if slot % 3 == 1 else GOOD for slot in range(SLOTS)]
    pool.close()
    again = _striped(paths)
    assert again.notice == ""
    again.close()


def test_one_disk_without_room_leaves_nothing_on_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _stripes(tmp_path)
    really = os.posix_fallocate
    calls: list[int] = []

    def refuse(fd: int, at: int, count: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(fd, at, count)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PoolFullError, match=str(paths[2])):
        _striped(paths)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_stripe_in_use_leaves_the_others_free(tmp_path: Path) -> None:
    paths = _stripes(tmp_path)
    _filled(paths)
    fd = stripes._open_with_lock(paths[2], os.O_RDWR)
    with short_lock_wait(), pytest.raises(PoolError, match=f"{paths[2]}: the file is in use"):
        _striped(paths)
    os.close(fd)
    _striped(paths).close()


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "file version 1 is none that kvbm writes"), (4, "file version 4 is newer than 3, the newest this kvbm reads")],
)
def test_a_file_of_another_version_is_set_aside(tmp_path: Path, version: int, words: str) -> None:
    pool = _open(tmp_path / "pool")
    page = bytearray(pool.path.read_bytes()[:PAGE_BYTES])
    pool.close()
    page[8:12] = version.to_bytes(4, "little")
    page[-4:] = int(checksums(np.frombuffer(page[:-4], dtype=np.uint8).reshape(1, -1))[0]).to_bytes(4, "little")
    with pool.path.open("r+b") as file:
        file.write(page)
    os.truncate(pool.path, PAGE_BYTES + SLOTS * STRIDE)
    content = pool.path.read_bytes()
    again = _open(pool.path)
    assert again.opened == "created" and words in again.notice
    again.close()
    assert (tmp_path / "pool.aside-1").read_bytes() == content


# -- block devices -----------------------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A block device of 4 MiB of zeros; only root can make one."""
    backing = tmp_path / "backing"
    backing.write_bytes(bytes(4 << 20))
    try:
        made = subprocess.run(
            ["losetup", "--find", "--show", backing], check=False, capture_output=True, text=True, timeout=WAIT_S
        )
    except OSError as error:
        pytest.fail(f"no losetup ({error}); apt-get install mount")
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "--detach", path], check=False, timeout=WAIT_S)


def test_a_blank_device_becomes_a_pool_and_stays_one(device: Path) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    pool = _open(device)
    assert pool.opened == "created"
    pool.write(range(SLOTS), run.rows, run.proof)
    with short_lock_wait(), pytest.raises(PoolError):
        _open(device)
    pool.close()
    again = _open(device)
    assert (again.opened, again.pool_id) == ("reopened", pool.pool_id)
    assert again.read(range(SLOTS), run.namespace, run.hashes, run.room()).outcomes == [GOOD] * SLOTS
    again.close()


@pytest.mark.parametrize("at", [0, 510, 1080, 4096, 65600, (4 << 20) - 4096])
def test_a_device_with_anything_on_it_is_refused_and_left_alone(device: Path, at: int) -> None:
    with device.open("r+b") as file:
        file.seek(at)
        file.write(b"\x53\xef")
    before = device.read_bytes()
    with pytest.raises(PoolError, match="no kvbm pool"):
        _open(device)
    assert device.read_bytes() == before


def test_a_device_too_small_is_named(device: Path) -> None:
    with pytest.raises(PoolFullError, match="4194304 bytes free"):
        _open(device, slots=1000)
