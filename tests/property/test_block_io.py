"""The native engine of the NVME pool: no damage gets past it, and it agrees with the plain one on every byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm._native import BlockIo, checksums
from kvbm.core.errors import LayoutError, PoolError
from kvbm.core.ids import InstanceId
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockIoOptions, stride_of
from kvbm.pools.nvme.pool import NvmePool
from tests.faults.simulator.blocks import PlainBlockIo
from tests.pool_runs import SHAPE, Run, random_run

GOOD, CORRUPT = ReadOutcome.GOOD, ReadOutcome.CORRUPT
SLOTS = 64
INJECTIONS, QUICK_INJECTIONS = 10_048, 1_024  # in each way; whole turns of one for each slot
WAYS = [("io_uring", "on"), ("io_uring", "off"), ("threads", "off")]


@pytest.fixture(params=WAYS, ids="-".join)
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[NvmePool, Run, int]]:
    """A pool of two stripes with a block in every slot, the blocks, and bytes of each."""
    io, direct = request.param
    block_bytes = 4096 if direct == "on" else 1000  # where a block ends in the middle of a page, too
    paths = (tmp_path / "0", tmp_path / "1")
    try:
        pool = NvmePool(
            paths, SLOTS, block_bytes, SHAPE, InstanceId("a"), checksums, BlockIo, BlockIoOptions(io, direct)
        )
    except PoolError as error:
        pytest.skip(str(error))
    run = random_run(SLOTS, block_bytes)
    pool.write(range(SLOTS), run.rows, run.proof)
    yield pool, run, block_bytes
    pool.close()


@pytest.mark.parametrize("injections", [QUICK_INJECTIONS, pytest.param(INJECTIONS, marks=pytest.mark.nightly)])
def test_every_flipped_bit_is_found_wherever_it_is(filled: tuple[NvmePool, Run, int], injections: int) -> None:
    pool, run, block_bytes = filled
    random = np.random.default_rng(11)
    files = [os.open(path, os.O_RDWR) for path in pool.paths]
    everything = list(range(SLOTS))

    def flip(slot: int, at: int, mask: int) -> None:
        position = PAGE_BYTES + slot // 2 * stride_of(block_bytes) + at
        byte = os.pread(files[slot % 2], 1, position)[0]
        os.pwrite(files[slot % 2], bytes([byte ^ mask]), position)

    found = 0
    for _ in range(injections // SLOTS):
        of_headers = random.integers(0, 64, SLOTS)  # half of them where every byte means something
        anywhere = random.integers(0, PAGE_BYTES + block_bytes, SLOTS)
        places = np.where(random.random(SLOTS) < 0.5, of_headers, anywhere).tolist()
        masks = (1 << random.integers(0, 8, SLOTS)).tolist()
        for slot in everything:
            flip(slot, places[slot], masks[slot])
        found += pool.read(everything, run.namespace, run.hashes, run.room()).outcomes.count(CORRUPT)
        for slot in everything:
            flip(slot, places[slot], masks[slot])
    assert found == injections
    rows = run.room()
    assert pool.read(everything, run.namespace, run.hashes, rows).outcomes == [GOOD] * SLOTS
    assert (rows == run.rows).all()
    for fd in files:
        os.close(fd)


def test_slots_exchanged_torn_or_overwritten_never_give_other_bytes(filled: tuple[NvmePool, Run, int]) -> None:
    pool, run, block_bytes = filled
    random = np.random.default_rng(12)
    stride = stride_of(block_bytes)
    files = [os.open(path, os.O_RDWR) for path in pool.paths]
    everything = list(range(SLOTS))
    damaged = found = 0
    for _ in range(60):
        kept = [os.pread(fd, PAGE_BYTES + SLOTS // 2 * stride, 0) for fd in files]
        slots = random.choice(SLOTS, 2, replace=False).tolist()
        first, second = ((slot % 2, PAGE_BYTES + slot // 2 * stride) for slot in slots)
        begin = int(random.integers(0, PAGE_BYTES + block_bytes - 1))
        match random.integers(0, 4):
            case 0:  # exchanged, whole
                os.pwrite(files[first[0]], kept[second[0]][second[1] : second[1] + stride], first[1])
                os.pwrite(files[second[0]], kept[first[0]][first[1] : first[1] + stride], second[1])
                changed = set(slots)
            case 1:  # a write of another block that did not get to its end
                cut = kept[second[0]][second[1] : second[1] + begin]
                os.pwrite(files[first[0]], cut, first[1])
                changed = {slots[0]} if begin > 5 else set()  # before, magic and version are the same
            case 2:  # zeros
                os.pwrite(files[first[0]], bytes(PAGE_BYTES + block_bytes - min(begin, 63)), first[1] + min(begin, 63))
                changed = {slots[0]}
            case _:  # anything
                os.pwrite(files[first[0]], random.bytes(stride), first[1])
                changed = {slots[0]}
        rows = run.room()
        outcomes = pool.read(everything, run.namespace, run.hashes, rows).outcomes
        for slot in everything:
            if outcomes[slot] == GOOD:
                assert (rows[slot] == run.rows[slot]).all()
            else:
                assert outcomes[slot] == CORRUPT
                assert slot in slots
        if begin > 40:
            damaged += len(changed)
            found += sum(outcomes[slot] == CORRUPT for slot in changed)
        for fd, content in zip(files, kept, strict=True):
            os.pwrite(fd, content, 0)
    assert found == damaged > 50
    for fd in files:
        os.close(fd)


@pytest.mark.parametrize("block_bytes", [1, 64, 4096, 5000])
def test_native_and_plain_engines_write_and_read_the_same_bytes(tmp_path: Path, block_bytes: int) -> None:
    run = random_run(20, block_bytes)
    random = np.random.default_rng(block_bytes)
    files = [[os.open(tmp_path / f"{kind}{number}", os.O_RDWR | os.O_CREAT) for number in range(3)] for kind in "np"]
    engines: list[Any] = [
        BlockIo(files[0], 50, block_bytes, "threads"),
        PlainBlockIo(os, files[1], 50, block_bytes),
    ]
    slots, at = random.permutation(50)[:20], random.permutation(20)
    order = b"".join(run.hashes[16 * row : 16 * row + 16] for row in at.tolist())
    sums = np.ascontiguousarray(run.proof.checksums[at])
    for engine in engines:
        assert not engine.write(slots, run.rows, at, run.namespace, order, 1 << 40, sums).any()
    for number in range(3):
        assert (tmp_path / f"n{number}").read_bytes() == (tmp_path / f"p{number}").read_bytes()
    for _ in range(200):  # what one thinks of damage, the other does too
        position, byte = int(random.integers(PAGE_BYTES, 12 * stride_of(block_bytes))), random.bytes(1)
        for kind in files:
            os.pwrite(kind[0], byte, position)
    results = [engine.read(slots, run.room(), at, run.namespace, order) for engine in engines]
    assert results[0][0].tolist() == results[1][0].tolist()
    assert {GOOD, CORRUPT} == set(results[0][0].tolist())
    good = results[0][0] == GOOD
    assert (results[0][1][good] == results[1][1][good]).all()
    for engine in engines:
        assert engine.close(5.0)
    for fd in files[0] + files[1]:
        os.close(fd)


def test_a_call_that_contradicts_itself_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    engine = BlockIo([fd], 4, 64, "threads")
    run = random_run(2, 64)
    two, name = np.arange(2), run.namespace
    for slots, rows, at, hashes in (
        (np.array([0, 4]), run.rows, two, run.hashes),
        (np.array([0, -1]), run.rows, two, run.hashes),
        (two, run.rows, np.array([0, 2]), run.hashes),
        (two, run.rows, np.arange(1), run.hashes),
        (two, run.rows, two, run.hashes[1:]),
        (two, np.zeros((2, 63), dtype=np.uint8), two, run.hashes),
    ):
        with pytest.raises(LayoutError):
            engine.write(slots, rows, at, name, hashes, 1, run.proof.checksums)
        with pytest.raises(LayoutError):
            engine.read(slots, rows, at, name, hashes)
    with pytest.raises(LayoutError, match="1 checksums"):
        engine.write(two, run.rows, two, name, run.hashes, 1, run.proof.checksums[:1])
    for given in (([], 4, 64), ([fd], 0, 64), ([fd], 4, 0), ([fd], 4, 64, "aio"), ([fd], 4, 64, "threads", False, 0)):
        with pytest.raises(LayoutError):
            BlockIo(*given)  # type: ignore[arg-type]
    assert os.fstat(fd).st_size == 0
    assert engine.close(5.0)
    os.close(fd)


def test_headers_are_scanned_the_same_by_both_engines(tmp_path: Path) -> None:
    """Whatever the headers are: whole, of each kind, damaged at any byte, of another size, or none."""
    random, run, block_bytes = np.random.default_rng(7), random_run(SLOTS, 1000), 1000
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT, 0o600) for number in range(2)]
    try:
        plain, native = PlainBlockIo(os, fds, SLOTS, block_bytes), BlockIo(fds, SLOTS, block_bytes)
        slots, seals = np.arange(SLOTS, dtype=np.int64), np.ones((SLOTS, 64), dtype=np.uint8)
        for turn in range(40):
            some = slots[random.random(SLOTS) < 0.5]
            hashes = b"".join(run.hashes[16 * slot : 16 * slot + 16] for slot in some.tolist())
            generation, sums = int(random.integers(0, 1 << 32)), run.proof.checksums[some]
            if turn % 3:
                plain.write(some, run.rows, some, run.namespace, hashes, turn, sums, generation)
            else:
                native.write(some, run.rows, some, run.namespace, hashes, turn, sums, generation, seals[some])
            for slot in random.integers(0, SLOTS, 8).tolist():
                at = PAGE_BYTES + slot // 2 * stride_of(block_bytes) + int(random.integers(0, 64))
                os.pwrite(fds[slot % 2], random.bytes(1), at)
            order = random.permutation(slots)
            ours, theirs = native.scan(order, 1 + turn % 9), plain.scan(order, 1)
            assert np.array_equal(ours[0], theirs[0]) and set(ours[0].tolist()) <= {0, 1}
            for index in np.flatnonzero(ours[0]).tolist():
                for column in (1, 2):
                    assert ours[column][16 * index : 16 * index + 16] == theirs[column][16 * index : 16 * index + 16]
                for column in (3, 4, 5):
                    assert ours[column][index] == theirs[column][index]
        assert native.close(5)
    finally:
        for fd in fds:
            os.close(fd)
