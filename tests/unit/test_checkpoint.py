"""Checkpoints of the native index: what is not a whole one is refused in a sentence, never half believed."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from kvbm import _native
from kvbm.core.errors import CheckpointError
from kvbm.core.events import BlocksCreated, InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Reach, SequenceHash, Tier
from tests.indexes import ROOM, frame_bytes

HEADER = struct.Struct("<IHHIII")  # magic, version, kind, number, payload bytes, checksum
FRONT, BLOCKS, END = 1, 2, 3
POOLS = (PoolStated(Tier.HBM, 64, 1024), PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, "pool"))
NAMES = [InstanceId("one"), InstanceId("two"), InstanceId("three")]
SPACES = [Namespace(model=model, block_tokens=16).id for model in ("m", "n")]


def block(number: int) -> SequenceHash:
    return SequenceHash(number.to_bytes(16, "little"))


def filled(blocks: int) -> _native.ClusterIndex:
    """Three instances and a pool hold blocks, of some all of them."""
    index = _native.ClusterIndex(1 << 24)
    for name in NAMES:
        index.apply(frame_bytes(name, InstanceStarted(epoch=Epoch(1), pools=POOLS)))
    for at, name in enumerate(NAMES):
        for space in SPACES:
            hashes = b"".join(block(number) for number in range(blocks) if number % (at + 1) == 0)
            for first in range(0, len(hashes), 16 * 4096):
                run = hashes[first : first + 16 * 4096]
                index.apply(frame_bytes(name, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=run)))
    index.claim("pool", SPACES[0], b"".join(map(block, range(0, blocks, 7))))
    return index


def chunks(data: bytes) -> list[bytes]:
    """The chunks a checkpoint is a row of."""
    found, at = [], 0
    while at < len(data):
        size = HEADER.size + HEADER.unpack_from(data, at)[4]
        found.append(data[at : at + size])
        at += size
    return found


def kinds(data: bytes) -> list[int]:
    return [HEADER.unpack_from(chunk)[2] for chunk in chunks(data)]


def resealed(chunk: bytes, number: int) -> bytes:
    """A chunk with another number and the checksum that goes with it."""
    magic, version, kind, _, size, _ = HEADER.unpack_from(chunk)
    head = struct.pack("<IHHII", magic, version, kind, number, size)
    return head + struct.pack("<I", _native.crc32c(chunk[HEADER.size :], _native.crc32c(head))) + chunk[HEADER.size :]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "checkpoint"
    filled(40).write_checkpoint(str(path), b"a note")
    return path.read_bytes()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """More than one chunk of blocks, and more than one of front."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    size, entries, _ = filled(60_000).write_checkpoint(str(path), random.Random(76).randbytes(1_500_000))
    data = path.read_bytes()
    assert (len(data), entries) == (size, 120_000)
    assert kinds(data).count(FRONT) == 2 and kinds(data).count(BLOCKS) > 1 and kinds(data)[-1] == END
    return data


def refusal(data: bytes, tmp_path: Path) -> CheckpointError:
    path = tmp_path / "damaged"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        _native.ClusterIndex(ROOM).load_checkpoint(str(path))
    error = refused.value
    assert 0 <= error.at <= len(data)
    assert error.detail and str(error) == f"checkpoint, byte {error.at}: {error.detail}"
    return error


@pytest.mark.parametrize("note", [b"", b"positions", bytes(range(256)) * 9000])
def test_a_note_comes_back(note: bytes, tmp_path: Path) -> None:
    path, index = str(tmp_path / "checkpoint"), filled(10)
    size, entries, frames = index.write_checkpoint(path, note)
    assert (size, entries, frames) == (os.path.getsize(path), 20, 9)
    loaded = _native.ClusterIndex(ROOM)
    assert loaded.load_checkpoint(path) == note


def test_an_empty_index_has_a_checkpoint_too(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    _native.ClusterIndex(ROOM).write_checkpoint(path)
    loaded = _native.ClusterIndex(ROOM)
    assert loaded.load_checkpoint(path) == b""
    assert loaded.block_count() == 0 and loaded.instances() == []


def test_what_was_written_is_what_is_loaded(large: bytes, tmp_path: Path) -> None:
    path, index = tmp_path / "checkpoint", filled(60_000)
    path.write_bytes(large)
    loaded = _native.ClusterIndex(1 << 24)
    loaded.load_checkpoint(str(path))
    for name in NAMES:
        assert loaded.view(name) == index.view(name)
        assert loaded.recomputed_digest(name) == index.recomputed_digest(name)
    assert loaded.claim_counts() == index.claim_counts()
    assert loaded.block_count() == index.block_count() == 120_000
    for number in random.Random(1).sample(range(60_000), 500):
        for space in SPACES:
            assert loaded.holders(space, block(number)) == index.holders(space, block(number))
    loaded.write_checkpoint(str(tmp_path / "again"), b"")
    again = _native.ClusterIndex(1 << 24)
    again.load_checkpoint(str(tmp_path / "again"))
    assert again.residency_count() == index.residency_count()


def test_a_checkpoint_cut_at_a_chunks_border_is_refused(large: bytes, tmp_path: Path) -> None:
    length = 0
    for chunk in chunks(large):
        assert refusal(large[:length], tmp_path).at == length
        length += len(chunk)


def test_a_checkpoint_cut_anywhere_is_refused(small: bytes, tmp_path: Path) -> None:
    for length in range(len(small)):
        assert "cut off" in refusal(small[:length], tmp_path).detail


def test_a_large_checkpoint_cut_anywhere_is_refused(large: bytes, tmp_path: Path) -> None:
    chance = random.Random(2)
    for _ in range(20):
        assert "cut off" in refusal(large[: chance.randrange(len(large))], tmp_path).detail


def test_bytes_after_the_end_are_refused(small: bytes, tmp_path: Path) -> None:
    assert refusal(small + b"x", tmp_path).at == len(small)
    refusal(small + small, tmp_path)


def test_a_flipped_bit_is_refused(small: bytes, tmp_path: Path) -> None:
    chance = random.Random(3)
    header_bits = [8 * at + bit for at in range(HEADER.size) for bit in range(8)]
    for bit in [*header_bits, *chance.sample(range(8 * len(small)), 600)]:
        data = bytearray(small)
        data[bit // 8] ^= 1 << bit % 8
        refusal(bytes(data), tmp_path)


def test_a_flipped_bit_in_a_large_checkpoint_is_refused(large: bytes, tmp_path: Path) -> None:
    chance = random.Random(4)
    for bit in chance.sample(range(8 * len(large)), 30):
        data = bytearray(large)
        data[bit // 8] ^= 1 << bit % 8
        refusal(bytes(data), tmp_path)


def test_chunks_out_of_order_missing_or_twice_are_refused(large: bytes, tmp_path: Path) -> None:
    row = chunks(large)
    for at in range(len(row) - 1):
        refusal(b"".join([*row[:at], row[at + 1], row[at], *row[at + 2 :]]), tmp_path)
        refusal(b"".join([*row[:at], *row[at + 1 :]]), tmp_path)
        refusal(b"".join([*row[:at], row[at], *row[at:]]), tmp_path)


def test_a_row_of_good_chunks_that_is_no_checkpoint_is_refused(large: bytes, tmp_path: Path) -> None:
    """Each has its checksum and its number, and yet: a front after blocks, blocks left out, no end, no front."""
    row = chunks(large)
    first = kinds(large).index(BLOCKS)
    for order in (
        [*row[:first], row[first], row[0], row[-1]],
        [*row[:first], *row[first + 1 :]],
        [*row[:-1], row[first]],
        row[first:],
        [row[0], *row[first:]],  # half a front
        [row[-1]],
    ):
        refusal(b"".join(resealed(chunk, number) for number, chunk in enumerate(order)), tmp_path)


@pytest.mark.parametrize("kind", [FRONT, BLOCKS, END])
def test_a_good_checksum_over_nonsense_does_no_harm(small: bytes, tmp_path: Path, kind: int) -> None:
    """Whoever writes checkpoints of their own may write a wrong one, but none that reads beyond its bytes."""
    row, chance = chunks(small), random.Random(kind)
    which = kinds(small).index(kind)
    path = tmp_path / "nonsense"
    loads = 0
    for _ in range(2000):
        payload = bytearray(row[which][HEADER.size :])
        for _ in range(chance.randint(1, 3)):
            payload[chance.randrange(len(payload))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        damaged = resealed(row[which][: HEADER.size] + bytes(payload), which)
        path.write_bytes(b"".join([*row[:which], damaged, *row[which + 1 :]]))
        index = _native.ClusterIndex(ROOM)
        try:
            index.load_checkpoint(str(path))
        except CheckpointError:
            continue
        loads += 1
        for name in index.instances():
            index.view(name)
            index.recomputed_digest(name)
        index.prefixes(SPACES[0], b"".join(map(block, range(40))))
        index.apply(frame_bytes(NAMES[0], BlocksCreated(namespace=SPACES[0], tier=Tier.HBM, hashes=block(1))))
        index.apply(frame_bytes(NAMES[0], InstanceStarted(epoch=Epoch(2), pools=POOLS), epoch=2))
        while index.sweep():
            pass
    assert loads < 2000


@pytest.mark.parametrize("told", ["start", "heard of", "claim"])
def test_a_checkpoint_is_loaded_into_an_empty_index_only(told: str, small: bytes, tmp_path: Path) -> None:
    path, index = tmp_path / "checkpoint", _native.ClusterIndex(ROOM)
    path.write_bytes(small)
    if told == "start":
        index.apply(frame_bytes(NAMES[0], InstanceStarted(epoch=Epoch(1), pools=POOLS)))
    elif told == "heard of":
        index.wait(NAMES[0], True)
    else:
        index.claim("pool", NamespaceId(bytes(16)), block(1))
    before = (index.instances(), index.claim_counts(), index.block_count())
    with pytest.raises(CheckpointError, match="empty index"):
        index.load_checkpoint(str(path))
    assert (index.instances(), index.claim_counts(), index.block_count()) == before


def test_what_does_not_fit_the_capacity_is_refused_and_its_instance_partial(small: bytes, tmp_path: Path) -> None:
    path, index = tmp_path / "checkpoint", _native.ClusterIndex(50)
    path.write_bytes(small)
    index.load_checkpoint(str(path))
    assert index.residency_count() + sum(index.claim_counts().values()) == 50
    refused = index.anomalies()["refused-at-capacity"]
    whole = filled(40)
    assert refused == whole.residency_count() + sum(whole.claim_counts().values()) - 50
    views = [view for name in NAMES if (view := index.view(name)) is not None]
    assert any(view.partial for view in views)
    for name in NAMES:
        view = index.view(name)
        assert view is not None and view.digest == index.recomputed_digest(name)


def test_a_path_that_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    index = filled(3)
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            index.write_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="cannot be read"):
        _native.ClusterIndex(ROOM).load_checkpoint(str(tmp_path / "missing"))
    with pytest.raises(CheckpointError):
        _native.ClusterIndex(ROOM).load_checkpoint(str(tmp_path))


def test_a_full_device_is_told() -> None:
    with pytest.raises(CheckpointError, match="No space left"):
        filled(3).write_checkpoint("/dev/full", b"note")
