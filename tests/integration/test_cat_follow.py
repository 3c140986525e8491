"""`kvbm-replay cat`: events of a block, and those that come while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.cli import replay_main as main
from kvbm.core.codec import encode_frame
from kvbm.core.ids import Tier
from tests.captures import packed
from tests.catalog_site import Instance
from tests.eventually import eventually
from tests.nats_fixture import cluster, fresh_nats
from tests.small_histories import LOG, ONE, THREE, created, frames_of

__all__ = ["cluster", "fresh_nats"]


def test_only_events_of_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capture = tmp_path / "capture.kvbm"
    capture.write_bytes(packed(frames_of(LOG)))
    assert main(["cat", str(capture), "--hash", ONE.hex()[:8].upper()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["e1+1", "e1+2", "e1+3", "e1+4", "e1+5", "e2+1", "e2+3"]
    assert all(line.endswith(f"names {ONE.hex()}") for line in lines)
    assert main(["cat", str(capture), "--hash", "0x" + THREE.hex(), "--json"]) == 0
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["BlocksMigrated"]
    assert main(["cat", str(capture), "--hash", "44444444"]) == 0
    assert capsys.readouterr().out == ""
    for digits in ("1111", "x" * 32, "1" * 33):
        with pytest.raises(SystemExit):
            main(["cat", str(capture), "--hash", digits])
        assert "--hash" in capsys.readouterr().err


@pytest.fixture
def cat() -> Iterator[object]:
    """Starts the command; gives how to read its lines so far."""
    started: list[subprocess.Popen[bytes]] = []

    def start(out: Path, *arguments: str) -> object:
        with out.open("wb") as file:
            program = "import sys; from kvbm.cli import replay_main; sys.exit(replay_main(sys.argv[1:]))"
            started.append(subprocess.Popen([sys.executable, "-c", program, "cat", *arguments], stdout=file))
        return lambda: out.read_text().splitlines()

    yield start
    for process in started:
        process.terminate()
        process.wait()


def test_a_growing_archive_is_followed_over_torn_writes_and_new_files(tmp_path: Path, cat):
    archive = tmp_path / "archive"
    archive.mkdir()
    frames = [encode_frame(frame) for frame in frames_of(LOG)]
    first, second = archive / f"{1:020}.kvbm", archive / f"{9:020}.kvbm"
    first.write_bytes(frames[0])
    lines = cat(tmp_path / "out", str(archive), "--follow", "--limit", "6")
    eventually(lambda: len(lines()) == 1, "the first")
    with first.open("ab") as file:
        file.write(frames[1] + frames[2][:20])
    eventually(lambda: len(lines()) == 2, "a whole one")
    with first.open("ab") as file:
        file.write(frames[2][20:])
    second.write_bytes(frames[3] + frames[4])
    eventually(lambda: len(lines()) == 6, "a new file")
    assert [line.split()[1] for line in lines()] == ["e1+0", "e1+1", "e1+2", "e1+3", "e1+4", "e1+5"]


def test_it_ends_at_its_limit_without_waiting_for_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capture = tmp_path / "capture.kvbm"
    capture.write_bytes(packed(frames_of(LOG)))
    count = sum(map(len, LOG))
    assert main(["cat", str(capture), "--follow", "--limit", str(count)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == count


def test_the_live_stream_is_followed(tmp_path: Path, fresh_nats: str, cluster: str, cat):
    one = Instance(fresh_nats, cluster, "one")
    one.publish()
    lines = cat(tmp_path / "out", fresh_nats, "--follow", "--timeout", "60")
    eventually(lambda: len(lines()) == 3, "the start")
    one.create(0, 2)
    one.publish()
    eventually(lambda: len(lines()) == 4, "what came")
    assert "BlocksCreated HBM 2 blocks" in lines()[3]


def test_what_is_no_more_what_it_was_is_said(tmp_path: Path):
    capture = tmp_path / "capture.kvbm"
    frames = frames_of(LOG)
    capture.write_bytes(packed(frames))
    program = "import sys; from kvbm.cli import replay_main; sys.exit(replay_main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "cat", str(capture), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(11):
            assert process.stdout.readline()
        other = tmp_path / "other"
        other.write_bytes(packed(frames_of([[created(Tier.HBM, ONE, [0])]] * 20, "two")))
        os.replace(other, capture)
        assert b"is not what it was" in process.stderr.read()
        assert process.wait() == 2
