"""The folder of checkpoints: what is written whole is found again, what is not is passed over."""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kvbm import _native
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow import checkpoints
from kvbm.catalog.follow.checkpoints import Checkpointer, Checkpointing, LoadedCheckpoint, Writing, load_newest
from kvbm.catalog.follow.sequencer import SequencerState
from kvbm.core.errors import CatalogError, CheckpointError
from kvbm.core.events import BlocksCreated, InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Tier
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.streams.base import Mark
from tests.indexes import frame_bytes

SPACE = Namespace(model="m", block_tokens=16).id


def filled(blocks: int) -> _native.ClusterIndex:
    index = _native.ClusterIndex(1000)
    hashes = b"".join(number.to_bytes(16, "little") for number in range(blocks))
    start = InstanceStarted(epoch=Epoch(1), pools=(PoolStated(Tier.HBM, 64, 1024),))
    index.apply(frame_bytes(InstanceId("one"), start, BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=hashes)))
    return index


def write(folder: Path, sequence: int, blocks: int = 3, settled: int | None = None) -> None:
    state = SequencerState(sequence=sequence, newest_wall_ns=1, namespaces=(), followed=())
    writing = Writing(folder, filled(blocks), state, "KVBM")
    assert not writing.has_begun()
    writing.write()
    assert writing.has_begun()
    writing.finish(Mark(sequence if settled is None else settled, 7))


def load(
    folder: Path, stored: int = 1000, end: int = 1000, stream: str = "KVBM", fingerprint: int = 7
) -> LoadedCheckpoint | None:
    async def holds(mark: Mark) -> bool:
        return mark.sequence <= end and mark.fingerprint == fingerprint

    return asyncio.run(load_newest(folder, _native.ClusterIndex, 1000, stream.__eq__, stored, holds))


def test_the_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, 9, blocks=3)
    write(tmp_path, 10, blocks=4, settled=12)
    found = load(tmp_path)
    assert found is not None
    assert (found.held.residency_count(), found.state.sequence, found.settled) == (4, 10, 12)


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for sequence in (8, 9, 10, 11):
        write(tmp_path, sequence)
    assert sorted(int(path.name[:20]) for path in tmp_path.iterdir()) == [10, 10, 11, 11]


@pytest.mark.parametrize(
    "asked",
    [{"stored": 9}, {"end": 11}, {"stream": "another"}, {"fingerprint": 8}],
    ids=["ahead of SQL", "ahead of the stream", "of another stream", "of messages the stream has lost"],
)
def test_a_checkpoint_that_would_lose_something_is_passed_over(tmp_path: Path, asked: dict[str, object]) -> None:
    write(tmp_path, 10, settled=12)
    assert load(tmp_path) is not None
    assert load(tmp_path, **asked) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["index flipped", "index cut", "index gone", "manifest flipped", "manifest empty"])
def test_a_damaged_checkpoint_costs_one_warning_and_the_one_before_is_loaded(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 9, blocks=2)
    write(tmp_path, 10, blocks=4)
    index, manifest = sorted(path for path in tmp_path.iterdir() if path.name.startswith("00000000000000000010"))
    match damage:
        case "index flipped":
            data = bytearray(index.read_bytes())
            data[len(data) // 2] ^= 4
            index.write_bytes(data)
        case "index cut":
            os.truncate(index, index.stat().st_size - 1)
        case "index gone":
            index.unlink()
        case "manifest flipped":
            manifest.write_bytes(manifest.read_bytes().replace(b'"sequence":10', b'"sequence":90'))
        case "manifest empty":
            manifest.write_bytes(b"")
    with capture_logs() as logs:
        found = load(tmp_path)
    assert found is not None and found.held.residency_count() == 2
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["checkpoint.damaged"]


def test_a_checkpoint_that_was_not_finished_is_nothing(tmp_path: Path) -> None:
    state = SequencerState(sequence=10, newest_wall_ns=1, namespaces=(), followed=())
    Writing(tmp_path, filled(3), state, "KVBM").write()
    assert load(tmp_path) is None


def test_a_folder_that_takes_nothing_is_one_sentence_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(ReferenceIndex):
        def write_checkpoint(self, path: str, note: bytes = b"") -> tuple[int, int, int]:
            Path(path).write_bytes(b"half")
            raise CheckpointError(4, "writing failed (No space left on device)")

        def load_checkpoint(self, path: str) -> bytes:
            return b""

    state = SequencerState(sequence=10, newest_wall_ns=1, namespaces=(), followed=())
    with pytest.raises(CatalogError, match="No space left"):
        Writing(tmp_path, Full(9), state, "KVBM").write()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CatalogError, match="no checkpoint can be written"):
        Writing(tmp_path / "file", filled(1), state, "KVBM").write()


def test_what_a_writer_that_died_has_left_goes_after_a_while(tmp_path: Path) -> None:
    old, young = tmp_path / "00000000000000000001-aa.index.part", tmp_path / "00000000000000000002-bb.index"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    long_ago = old.stat().st_mtime - 2 * checkpoints.ORPHAN_S
    os.utime(old, (long_ago, long_ago))
    write(tmp_path, 10)
    assert not old.exists() and young.exists()


def test_the_readable_index_has_no_checkpoints() -> None:
    assert isinstance(_native.ClusterIndex(1), Checkpointing)
    assert not isinstance(ReferenceIndex(1), Checkpointing)


def test_a_checkpoint_of_a_newer_kvbm_is_passed_over_in_words(tmp_path: Path) -> None:
    write(tmp_path, 9)
    write(tmp_path, 10)
    (newest,) = tmp_path.glob(f"{10:020}*.json")
    body = newest.read_bytes().rstrip(b"\n").rpartition(b"\n")[0]
    assert b'"version":1,' in body
    body = body.replace(b'"version":1,', b'"version":2,').replace(b'"stream":', b'"streams":')
    newest.write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
    with capture_logs() as logs:
        found = load(tmp_path)
    assert found is not None and found.state.sequence == 9
    assert [(entry["event"], entry["why"]) for entry in logs] == [
        ("checkpoint.unread", "a newer kvbm wrote it, as version 2; this one reads 1")
    ]
    (index,) = tmp_path.glob(f"{9:020}*.index")
    data = bytearray(index.read_bytes())
    data[4:6] = (3).to_bytes(2, "little")
    index.write_bytes(data)
    with capture_logs() as logs:
        assert load(tmp_path) is None
    assert "written by a newer kvbm, as version 3; this build reads version 2; upgrade kvbm" in logs[-1]["why"]


class Held:
    """An index whose checkpoints take as long as the test wants."""

    def __init__(self) -> None:
        self.index, self.begun, self.may_end = filled(3), threading.Event(), threading.Event()

    def write_checkpoint(self, path: str, note: bytes) -> tuple[int, int, int]:
        done = self.index.write_checkpoint(path, note)
        self.begun.set()
        assert self.may_end.wait(60.0)
        return done


def checkpointer(folder: Path, index: object, sequence: int) -> Checkpointer:
    state = SequencerState(sequence=sequence, newest_wall_ns=1, namespaces=(), followed=())
    sequencer = SimpleNamespace(sequence=sequence, mark=Mark(sequence, 7), state=lambda _: state)
    of_index, of_sequencer = cast(Checkpointing, index), cast(Any, sequencer)
    return Checkpointer(folder, of_index, of_sequencer, asyncio.Lock(), lambda: "KVBM", Degraded(), every_s=1.0)


def names(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.iterdir()}


def test_a_checkpoint_that_was_under_way_does_not_outlive_the_one_that_is_written_alone(tmp_path: Path) -> None:
    held = Held()

    async def both() -> None:
        writer = checkpointer(tmp_path, held, 10)
        usual = asyncio.create_task(writer.write())
        assert await asyncio.to_thread(held.begun.wait, 60.0)
        under_way = names(tmp_path)
        alone = asyncio.create_task(writer.write_alone())
        await asyncio.sleep(0)
        held.may_end.set()
        async with asyncio.timeout(60.0):
            await usual
            assert await alone
        assert writer.written == 2 and len(names(tmp_path)) == 1
        assert not under_way & names(tmp_path)

    asyncio.run(both())


def test_what_writers_that_died_and_an_older_store_of_the_stream_have_left_goes_with_an_erasure(tmp_path: Path) -> None:
    for sequence in (1000, 1001):
        write(tmp_path, sequence)
    for name in ("left.index.part", "left.index", "left.json.part"):
        (tmp_path / name).write_bytes(b"names of the erased")
    old = names(tmp_path)
    assert asyncio.run(checkpointer(tmp_path, filled(3), 10).write_alone())
    assert len(names(tmp_path)) == 1 and not old & names(tmp_path)
    found = load(tmp_path)
    assert found is not None and found.state.sequence == 10


def test_a_checkpoint_of_a_stream_that_began_anew_outlives_those_of_before(tmp_path: Path) -> None:
    for sequence in (1000, 1001, 10):
        write(tmp_path, sequence)
    assert sorted({int(name[:20]) for name in names(tmp_path)}) == [10, 1001]
