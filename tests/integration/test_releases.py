"""What each release has left in files is opened by the code that is here, and reads as its manifest says.

A release's files are never changed: where this fails, it is the code that has to read them again.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli import replay_main
from kvbm.core.codec import VERSION
from tests.managers import hashes_of, rows_of
from tests.releases import (
    ARCHIVE,
    CHECKPOINT,
    GOLDEN,
    JOURNAL,
    MANIFEST,
    METRICS,
    OBJECT,
    POOL,
    POSTGRES,
    SQLITE,
    read_release,
    sha256,
)

pytestmark = pytest.mark.bytes

RELEASES = sorted(path.parent for path in GOLDEN.glob(f"*/{MANIFEST}"))
PARTS = (JOURNAL, ARCHIVE, POOL, CHECKPOINT, OBJECT, SQLITE, POSTGRES)
of_each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
of_each_part = pytest.mark.parametrize("part", PARTS)
TOOL = Path(__file__).parents[2] / "tools" / "write_release.py"


def manifest_of(release: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / MANIFEST).read_text())
    return found


@pytest.fixture
def postgres_for(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The URL of an empty database for a part that needs one."""
    return lambda part: str(request.getfixturevalue("postgres_url")) if part == POSTGRES else ""


def test_there_is_a_release() -> None:
    assert [release.name for release in RELEASES][:1] == ["0.1.0"]


@of_each_release
def test_its_files_are_those_that_were_written(release: Path) -> None:
    """And no others, so that each is read by something here."""
    manifest = manifest_of(release)
    files = [path for path in release.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert {str(path.relative_to(release)): sha256(path.read_bytes()) for path in files} == manifest["sha256"]
    assert {Path(name).parts[0] for name in manifest["sha256"]} == {METRICS, *PARTS}
    assert manifest["frame_version"] <= VERSION and len(manifest["commit"]) == 40
    assert set(manifest["reads"]) == {"told", *PARTS}


@of_each_release
@of_each_part
def test_it_reads_as_it_was_written(
    release: Path, part: str, tmp_path: Path, postgres_for: Callable[[str], str]
) -> None:
    reads = manifest_of(release)["reads"]
    assert read_release(release, part, tmp_path, reads, postgres_for(part)) == reads[part]


@of_each_release
@pytest.mark.parametrize("log", [JOURNAL, ARCHIVE])
def test_replay_finds_nothing_in_it(release: Path, log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["verify", str(release / log)]) == 0
    assert "0 findings" in capsys.readouterr().out


@of_each_release
def test_all_of_it_tells_the_same(release: Path) -> None:
    """The manifest is what the running cluster answered, not what a reader made of the files."""
    reads = manifest_of(release)["reads"]
    told, digest = reads["told"], reads[CHECKPOINT]["digest"]
    assert len(set(told["depths"])) > 1  # some were evicted
    assert reads[ARCHIVE]["folded"]["depths"] == reads[CHECKPOINT]["depths"] == told["depths"]
    assert reads[ARCHIVE]["folded"]["digest"] == digest == reads[SQLITE]["epochs"][-1][3]
    assert reads[CHECKPOINT]["pool_depths"] == told["pool_depths"] and reads[SQLITE] == reads[POSTGRES]
    assert reads[JOURNAL]["findings"] == [] and reads[JOURNAL]["folded"]["usage_events"] >= 2


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 0x10
    path.write_bytes(data)


def damage(release: Path, part: str) -> None:
    """One byte of one file, where it is not padding."""
    if part == POOL:
        data = bytearray(gzip.decompress((release / POOL).read_bytes()))
        last = hashes_of(manifest_of(release)["reads"]["told"]["depths"].index(4), 1)
        data[data.index(rows_of(last).tobytes()) + 5] ^= 1
        (release / POOL).write_bytes(gzip.compress(bytes(data)))
    elif part in (SQLITE, POSTGRES):
        text = (release / part).read_text()
        assert "'shutdown'" in text
        (release / part).write_text(text.replace("'shutdown'", "'shutdowm'"))
    elif part == OBJECT:
        flip(release / OBJECT, (release / OBJECT).stat().st_size - 1)
    else:
        largest = max((release / part).iterdir(), key=lambda path: path.stat().st_size)
        flip(largest)


@of_each_part
def test_one_wrong_byte_is_seen(part: str, tmp_path: Path, postgres_for: Callable[[str], str]) -> None:
    """So a reader that reads something else does not pass above."""
    release, work = tmp_path / "release", tmp_path / "work"
    shutil.copytree(RELEASES[-1], release)
    work.mkdir()
    reads = manifest_of(release)["reads"]
    damage(release, part)
    if part == CHECKPOINT:
        with pytest.raises(AssertionError, match="can be loaded"):
            read_release(release, part, work, reads)
        return
    found = read_release(release, part, work, reads, postgres_for(part))
    assert found != reads[part]
    if part in (JOURNAL, ARCHIVE):
        assert found["findings"], "kvbm-replay has nothing to say of it"


def test_what_is_there_is_not_written_again() -> None:
    before = (RELEASES[0] / MANIFEST).read_bytes()
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "what was released stays as it is" in done.stderr, done.stderr
    assert (RELEASES[0] / MANIFEST).read_bytes() == before
