"""Words that an engine's processes leave for each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog
import structlog.testing

from kvbm.core.errors import PoolError
from kvbm.engines.vllm.meeting import Meeting


def never() -> bool:
    return False


def test_a_word_is_found_by_who_names_the_same_engine_and_by_nobody_else(tmp_path: Path) -> None:
    Meeting("engine", tmp_path).leave("host", {"pid": 5, "rows": [1, 2]})
    assert Meeting("engine", tmp_path).find("host") == {"pid": 5, "rows": [1, 2]}
    assert Meeting("engine", tmp_path).find("other") is None
    assert Meeting("other", tmp_path).find("host") is None


def test_a_later_word_takes_the_place_of_an_earlier_one_and_a_forgotten_one_is_gone(tmp_path: Path) -> None:
    meeting = Meeting("engine", tmp_path)
    meeting.forget("host")  # there is nothing yet
    meeting.leave("host", 1)
    meeting.leave("host", 2)
    assert meeting.wait("host", never, 10.0) == 2
    meeting.forget("host")
    meeting.forget("host")
    assert meeting.wait("host", lambda: True, 10.0) is None
    assert meeting.wait("host", never, 0.0) is None


def test_the_folder_is_its_owners_alone_and_goes_with_the_engine(tmp_path: Path) -> None:
    meeting = Meeting("engine", tmp_path)
    meeting.leave("host", 1)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    meeting.close()
    meeting.close()
    assert list(tmp_path.iterdir()) == []


def test_what_others_could_have_written_is_not_believed(tmp_path: Path) -> None:
    meeting = Meeting("engine", tmp_path)
    meeting.leave("host", 1)
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o770)
    assert meeting.find("host") is None
    with pytest.raises(PoolError, match="not a folder of this user alone"):
        meeting.leave("host", 2)
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    os.symlink(tmp_path / "elsewhere", folder)
    assert meeting.find("host") is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1,"])
def test_what_is_no_word_is_none(tmp_path: Path, content: bytes) -> None:
    meeting = Meeting("engine", tmp_path)
    meeting.leave("host", 1)
    (folder,) = tmp_path.iterdir()
    (folder / "host").write_bytes(content)
    assert meeting.find("host") is None


def test_a_second_engine_of_one_id_says_so_and_one_that_comes_later_does_not(tmp_path: Path) -> None:
    first, second, other = Meeting("chosen", tmp_path), Meeting("chosen", tmp_path), Meeting("another", tmp_path)
    with structlog.testing.capture_logs() as said:
        assert first.claim() and other.claim()
        first.close()  # the start is over, the engine goes on
        assert not said
        assert not second.claim()
        second.release()
    assert [one["event"] for one in said] == ["engine_id.shared"]
    first.release()
    first.release()
    assert second.claim()
    second.release()
    other.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_lock_is_everybodys(tmp_path: Path) -> None:
    assert Meeting("chosen", tmp_path / "absent").claim()
