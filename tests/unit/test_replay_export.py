"""`kvbm-replay export`: what pyarrow reads back is what the events say."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import NATIVE, decode_columns
from kvbm.cli import replay_main
from kvbm.core import columns
from kvbm.core.codec import Frame, decode_frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStopped,
    MigrateCause,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.ids import NO_PARENT, InstanceId, Tier, split_hashes, split_slots
from kvbm.replay import export as export_module
from kvbm.replay.opening import open_source
from kvbm.replay.source import SourceError
from tests.captures import NAMESPACE, chain, make_capture, packed
from tests.extras import needed
from tests.readable import export, main

parquet = needed("pyarrow.parquet", "parquet")

FRAMES = make_capture(7, commands=120).frames() + make_capture(8, 120, instance="two").frames()


def row_of(frame: Frame, offset: int, event: Event) -> dict[str, Any]:
    """The row an event is to be, said without columns."""
    row: dict[str, Any] = dict.fromkeys(
        ("tier", "source", "target", "reason", "cause", "kept", "namespace", "parent", "start", "snapshot", "count")
    )
    row |= {
        "instance": frame.instance,
        "epoch": frame.epoch,
        "offset": offset,
        "wall_time_ns": frame.wall_time_ns,
        "event": type(event).__name__,
        "blocks": [],
        "slots": [],
    }
    if isinstance(event, BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed):
        row["namespace"], row["blocks"] = event.namespace, list(split_hashes(event.hashes))
        row["count"] = len(row["blocks"])
        slots = b"" if isinstance(event, BlocksEvicted) else event.slots
        row["slots"] = list(split_slots(slots)) if slots else [None] * row["count"]
    match event:
        case BlocksCreated():
            row |= {"tier": event.tier.name, "start": event.start}
            row["parent"] = None if event.parent == NO_PARENT else event.parent
        case BlocksMigrated():
            source = event.source.name if isinstance(event.source, Tier) else event.source
            row |= {"tier": event.target.name, "target": event.target.name, "source": source}
            row |= {"cause": event.cause.name.lower(), "kept": event.kept}
        case BlocksEvicted():
            row |= {"tier": event.tier.name, "reason": event.reason.name.lower()}
        case ResidenciesListed():
            row |= {"tier": event.tier.name, "snapshot": event.snapshot}
        case SnapshotEnded():
            row |= {"tier": event.tier.name, "snapshot": event.snapshot, "count": event.count}
        case InstanceStopped():
            row["reason"] = event.reason.name.lower()
    return row


def expected(frames: list[Frame]) -> list[dict[str, Any]]:
    return [
        row_of(frame, offset, event)
        for frame in frames
        for offset, event in enumerate(frame.events, frame.first_offset)
    ]


def more_kinds() -> Frame:
    """Events a ledger of one instance alone does not write."""
    fetched = BlocksMigrated(
        namespace=NAMESPACE,
        source=InstanceId("far"),
        target=Tier.HOST,
        kept=True,
        cause=MigrateCause.FETCH,
        hashes=chain(1, 2),
    )
    child = BlocksCreated(
        namespace=NAMESPACE,
        tier=Tier.HBM,
        hashes=chain(0, 4)[32:],
        parent=chain(0, 2)[16:],  # type: ignore[arg-type]
        start=2,
    )
    stopped = InstanceStopped(reason=StopReason.OVERFLOW)
    last = FRAMES[-1]
    return Frame(
        instance=last.instance,
        epoch=last.epoch,
        first_offset=last.next_offset,
        wall_time_ns=5,
        digest=0,
        events=(fetched, child, stopped),
    )


@pytest.mark.parametrize("decode", [decode_columns, columns.decode_columns])
@pytest.mark.parametrize("batch_bytes", [1, 2000, 8 << 20])
def test_each_event_is_a_row_that_says_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode: Any, batch_bytes: int
) -> None:
    monkeypatch.setattr(export_module, "_BATCH_BYTES", batch_bytes)
    frames = [*FRAMES, more_kinds()]
    (tmp_path / "a.kvbm").write_bytes(packed([*frames, FRAMES[0]]))
    report = export(open_source(str(tmp_path / "a.kvbm")), tmp_path / "a.parquet", NATIVE, decode)
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert rows == expected(frames)
    assert (report.rows, report.events) == (len(rows), len(rows))
    assert report.blocks == sum(len(row["blocks"]) for row in rows)
    assert [note for note in report.notes if note.startswith("1 repeats")]


def test_with_blocks_each_block_of_a_run_is_a_row(tmp_path: Path) -> None:
    frames = [*FRAMES, more_kinds()]
    (tmp_path / "a.kvbm").write_bytes(packed(frames))
    export(open_source(str(tmp_path / "a.kvbm")), tmp_path / "a.parquet", NATIVE, decode_columns, by_block=True)
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    wanted = []
    for row in expected(frames):
        blocks, slots = row.pop("blocks"), row.pop("slots")
        del row["count"]
        for at, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            position = None if row["event"] != "BlocksCreated" else row["start"] + at
            wanted.append(row | {"block": block, "slot": slot, "position": position})
    assert rows == wanted


def test_a_folder_takes_files_of_so_many_rows_and_reads_as_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_module, "_BATCH_BYTES", 2000)
    monkeypatch.setattr(export_module, "_PART_ROWS", 20)
    (tmp_path / "a.kvbm").write_bytes(packed(FRAMES))
    assert replay_main(["export", str(tmp_path / "a.kvbm"), str(tmp_path / "out" / "x"), "--instance", "two"]) == 0
    files = sorted((tmp_path / "out" / "x").iterdir())
    assert len(files) > 2 and all(file.suffix == ".parquet" for file in files)
    assert f"in {len(files):,} files" in capsys.readouterr().out
    rows = parquet.read_table(tmp_path / "out" / "x").to_pylist()
    assert rows == expected([frame for frame in FRAMES if frame.instance == "two"])


def test_the_file_is_compressed_with_zstd_and_names_are_dictionaries(tmp_path: Path) -> None:
    (tmp_path / "a.kvbm").write_bytes(packed(FRAMES))
    export(open_source(str(tmp_path / "a.kvbm")), tmp_path / "a.parquet")
    group = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    columns = {group.column(at).path_in_schema: group.column(at) for at in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "RLE_DICTIONARY" in columns["instance"].encodings
    assert "RLE_DICTIONARY" not in columns["blocks.list.element"].encodings


def test_what_is_there_already_is_never_written_over_and_an_error_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.kvbm"
    path.write_bytes(packed(FRAMES))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "there.parquet").touch()
    for target, words in (
        ("there.parquet", "is there already"),
        ("full", "with files in it"),
        ("a.kvbm/x.parquet", "cannot be written"),
    ):
        assert main(["export", str(path), str(tmp_path / target)]) == 2
        shown = capsys.readouterr().err
        assert words in shown and len(shown.splitlines()) == 1
    assert (tmp_path / "there.parquet").stat().st_size == 0
    with pytest.raises(SourceError):
        export(open_source(str(tmp_path / "full" / "x")), tmp_path / "new.parquet")
    assert not list(tmp_path.glob("*new*"))


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.kvbm").write_bytes(packed(FRAMES))
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["export", str(tmp_path / "a.kvbm"), str(tmp_path / "a.parquet")]) == 2
    assert "pip install 'kvbm-ledger[parquet]'" in capsys.readouterr().err


def test_rows_come_from_frames_as_they_were_written() -> None:
    assert [decode_frame(encode_frame(frame))[0] for frame in FRAMES] == FRAMES
