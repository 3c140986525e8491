"""`kvbm-replay` on captures and journal folders: what it says and what it returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.core.backend import REFERENCE
from kvbm.core.codec import Frame, encode_frame
from kvbm.replay.scan import scan
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from tests.captures import frame_bytes, make_capture, packed, starts
from tests.readable import READABLE, main

FRAMES = make_capture(7, commands=120).frames()
EVENTS = sum(len(frame.events) for frame in FRAMES)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A good capture file."""
    path = tmp_path / "good.kvbm"
    path.write_bytes(packed(FRAMES))
    return path


def write_journal(folder: Path, frames: list[Frame], segment_bytes: int = 1500) -> Journal:
    """An open journal that holds these frames, in several segments."""
    journal = Journal.open(folder, frames[0].instance, REFERENCE, JournalOptions(segment_bytes=segment_bytes))
    for frame in frames:
        if frame.epoch > journal.epoch:
            journal.begin_epoch(frame.epoch)
        journal.append(frame_bytes(frame))
    return journal


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvbj"))


def test_a_good_capture_verifies_in_one_line(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(capture)]) == 0
    epochs = len({frame.epoch for frame in FRAMES})
    expected = f"verified: 1 instance, {epochs:,} epochs, {len(FRAMES):,} frames, {EVENTS:,} events, 0 findings"
    assert capsys.readouterr().out == f"{expected} (reference fold)\n"
    assert main(["verify", str(capture)], READABLE._replace(backend=NATIVE, fold=NATIVE_FOLD)) == 0
    assert capsys.readouterr().out == f"{expected} (native fold)\n"


def test_a_finding_is_a_sentence_with_file_byte_instance_epoch_and_offset(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = starts(FRAMES)
    data = bytearray(packed(FRAMES))
    data[at[3] + 70] ^= 4
    capture.write_bytes(data)
    assert main(["verify", str(capture)]) == 1
    verdict, sentence = capsys.readouterr().out.splitlines()
    assert verdict.startswith("FAILED: 1 finding in 1 instance, ")
    place = (
        f"corrupt-frame at {capture} byte {at[3]:,}, instance one epoch {FRAMES[3].epoch} offset "
        f"{FRAMES[3].first_offset}: "
    )
    assert sentence.strip().startswith(place)


def test_cat_writes_a_line_an_event_and_stops_at_the_limit(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", str(capture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == EVENTS
    assert lines[0].startswith(f"one e{FRAMES[0].epoch}+0 2026-01-01T00:00:00.000000Z InstanceStarted epoch ")
    assert main(["cat", str(capture), "--limit", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:5]
    assert main(["cat", str(capture), "--limit", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_cat_as_json_lines_has_every_field(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", str(capture), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == EVENTS
    created = next(row for row in rows if row["event"] == "BlocksCreated")
    assert created["tier"] == "HBM" and len(created["hashes"]) == len(created["slots"])
    assert {"instance", "epoch", "offset", "wall_time_ns", "place", "namespace", "parent", "start"} <= set(created)
    evicted = next(row for row in rows if row["event"] == "BlocksEvicted")
    assert evicted["reason"] in ("CAPACITY", "TTL", "CLEARED", "MISSING")


def test_every_report_can_be_json_on_standard_output_or_in_a_file(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, key in (("verify", "findings"), ("stat", "instances"), ("state", "instances")):
        assert main([command, str(capture), "--json", "-"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert key in shown
        file = tmp_path / f"{command}.json"
        assert main([command, str(capture), "--json", str(file)]) == 0
        assert json.loads(file.read_text()) == shown
        assert capsys.readouterr().out


def test_state_lists_blocks_when_asked(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", str(capture), "--at", f"e{FRAMES[0].epoch}+8", "--blocks"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"one: epoch {FRAMES[0].epoch}, before offset 8, ")
    assert " slot 0" in out


def test_blocks_that_go_to_a_file_are_not_printed_as_well(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state.json"
    at = f"e{FRAMES[0].epoch}+8"
    assert main(["state", str(capture), "--at", at, "--blocks", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one: epoch") and " slot 0" not in out
    assert any(tier["blocks"] for tier in json.loads(file.read_text())["instances"][0]["tiers"])


@pytest.mark.parametrize("content", [b"KVBM", b'{"name": "package"}', b"[tool]\n"])
def test_json_is_written_over_an_older_one_and_over_no_other_file(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    other = tmp_path / "mine"
    other.write_bytes(content)
    for command in ("stat", "cat", "verify", "state"):
        assert main([command, str(capture), "--json", str(other)]) == 2
        said = capsys.readouterr()
        assert f"--json {other} is there already and was not written by kvbm-replay: it stays as it is" in said.err
        assert not said.out and other.read_bytes() == content
        for _ in range(2):
            assert main([command, str(capture), "--json", str(tmp_path / "ours.json")]) == 0
        capsys.readouterr()
    assert main(["stat", str(capture), "--json", str(capture)]) == 2
    assert main(["verify", str(capture)]) == 0
    other.write_bytes(b"")
    assert main(["stat", str(capture), "--json", str(other)]) == 0
    assert main(["diff", str(capture), str(capture), "--json", str(other)]) == 0 and b'"a": ' in other.read_bytes()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"], READABLE._replace(version="1.2"))
    assert (ended.value.code, capsys.readouterr().out) == (0, "kvbm-replay 1.2\n")


def test_a_journal_is_read_while_its_manager_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = write_journal(tmp_path / "journal", FRAMES[:-1])
    assert len(segments(tmp_path / "journal")) > 2
    assert main(["verify", str(tmp_path / "journal")]) == 0
    assert f" {len(FRAMES) - 1:,} frames" in capsys.readouterr().out
    journal.append(frame_bytes(FRAMES[-1]))
    journal.close()
    assert main(["verify", str(tmp_path / "journal"), "--reference"]) == 0
    assert f" {len(FRAMES):,} frames" in capsys.readouterr().out


def test_a_torn_tail_of_a_journal_is_said_and_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(tmp_path, FRAMES).close()
    last = segments(tmp_path)[-1]
    whole = last.stat().st_size
    for torn in (encode_frame(FRAMES[-1])[:-1], encode_frame(FRAMES[-1])[:20], b"KV"):
        with last.open("ab") as file:
            file.truncate(whole)
            file.write(torn)
        assert main(["verify", str(tmp_path)]) == 0
        note, verdict = capsys.readouterr().out.splitlines()
        assert (
            f"{last}: tail torn at byte {whole:,}: {len(torn):,} byte" in note and "after the last whole frame" in note
        )
        assert verdict.endswith(", 0 findings (reference fold)")
        assert main(["stat", str(tmp_path)]) == 0
        assert "tail torn" in capsys.readouterr().err


def test_a_segment_that_is_torn_though_another_follows_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(tmp_path, FRAMES).close()
    first = segments(tmp_path)[0]
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size - 3)
    assert main(["verify", str(tmp_path)]) == 1
    assert f"corrupt-frame at {first} byte" in capsys.readouterr().out


def test_a_journal_whose_first_segment_was_let_go_begins_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epoch = FRAMES[-1].epoch
    frames = [frame for frame in FRAMES if frame.epoch == epoch]
    write_journal(tmp_path, frames, segment_bytes=600).close()
    first, second, *_ = segments(tmp_path)
    first.unlink()
    offset = int(second.stem.partition("-")[2])
    assert main(["verify", str(tmp_path)]) == 0
    assert f"begins at offset {offset:,} of epoch {epoch}: nothing is known before" in capsys.readouterr().out
    capture = tmp_path / "capture.kvbm"
    capture.write_bytes(b"".join(path.read_bytes() for path in segments(tmp_path)))
    assert main(["verify", str(capture)]) == 1
    assert "missing-frame" in capsys.readouterr().out


def test_a_missing_segment_in_the_middle_is_a_missing_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = [frame for frame in FRAMES if frame.epoch == FRAMES[-1].epoch]
    write_journal(tmp_path, frames, segment_bytes=600).close()
    segments(tmp_path)[1].unlink()
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "missing-frame" in out and "FAILED: 1 finding " in out


def test_a_folder_of_journals_is_all_its_instances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write_journal(tmp_path / name / "journal", make_capture(3, instance=name).frames()).close()
    assert main(["verify", str(tmp_path)]) == 0
    assert "verified: 2 instances, " in capsys.readouterr().out
    assert main(["stat", str(tmp_path), "--instance", "b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("b (b/journal): ") and "total: 1 instance" in out


def test_the_same_instance_in_two_journals_is_two_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("copy", "original"):
        write_journal(tmp_path / folder, FRAMES).close()
    assert main(["verify", str(tmp_path)]) == 0
    assert "verified: 2 instances, " in capsys.readouterr().out


def test_input_that_cannot_be_used_is_one_sentence_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.kvbm").touch()
    (tmp_path / "words.txt").write_text("these are words")
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "odd.kvbj").touch()
    cases = {
        str(tmp_path / "absent"): "does not exist",
        str(tmp_path / "empty.kvbm"): "is empty",
        str(tmp_path / "words.txt"): "is not a capture",
        str(tmp_path / "folder"): "holds no journal",
        str(tmp_path / "odd"): "is not named",
        "http://localhost:1": "no kind of source",
    }
    for source, words in cases.items():
        for command in ("cat", "stat", "state", "verify"):
            assert main([command, source]) == 2
            shown = capsys.readouterr()
            assert words in shown.err and len(shown.err.splitlines()) == 1
            assert shown.out == ""


def test_an_instance_that_is_not_there_and_a_place_that_is_none_are_said(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("stat", "state", "verify"):
        assert main([command, str(capture), "--instance", "nobody"]) == 2
        assert "'nobody'" in capsys.readouterr().err
    assert main(["state", str(capture), "--at", "noon"]) == 2
    assert "neither a time nor an offset" in capsys.readouterr().err


def test_a_frame_inside_damage_is_found_again_by_its_magic() -> None:
    frames = make_capture(2, instance="x").frames()[:4]
    pieces = [encode_frame(frame) for frame in frames]
    data = pieces[0] + bytes(100) + pieces[1] + b"KVBM" + bytes(60) + pieces[2] + pieces[3][:-1]
    found = [
        (piece.at, type(piece.found).__name__)
        for piece in scan(lambda at, size: data[at : at + size], len(data), REFERENCE)
    ]
    lengths = [len(piece) for piece in pieces]
    second = lengths[0] + 100
    third = second + lengths[1] + 64
    assert found == [
        (0, "ScannedFrame"),
        (lengths[0], "Damage"),
        (second, "ScannedFrame"),
        (second + lengths[1], "Damage"),
        (third, "ScannedFrame"),
        (third + lengths[2], "Damage"),
    ]
