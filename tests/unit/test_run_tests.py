"""`tools/run_tests.py`: what of a failed run is run again, and what never is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import run_tests
from tools.run_tests import MOST, Recorder, settle, to_run_again

REALTIME, FAILED = ("realtime",), pytest.ExitCode.TESTS_FAILED


def failed(name: str, words: str = "no answer", markers: tuple[str, ...] = REALTIME) -> pytest.TestReport:
    keywords: dict[str, Any] = dict.fromkeys((name, *markers), 1)
    told = f"    def {name}():\nE   AssertionError: {words}"
    return pytest.TestReport(
        f"test_it.py::{name}", ("test_it.py", 1, name), keywords, "failed", told, "call", duration=3.0
    )


def heard(*reports: pytest.TestReport) -> Recorder:
    recorder = Recorder()
    for report in reports:
        recorder.pytest_runtest_logreport(report)
    return recorder


@pytest.fixture
def flakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_tests, "FLAKES", tmp_path / "build" / "flakes.jsonl")
    return tmp_path / "build" / "flakes.jsonl"


def test_one_that_meets_clocks_and_passes_alone_is_told_and_kept(
    flakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test_a", "test_b"):
        assert settle(to_run_again(FAILED, heard(failed(name))), lambda test: True)
        assert f"FLAKED: test_it.py::{name}, " in capsys.readouterr().out
    assert [json.loads(line)["test"] for line in flakes.read_text().splitlines()] == [
        "test_it.py::test_a",
        "test_it.py::test_b",
    ]


def test_one_that_fails_again_fails_the_run(flakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes_alone: Callable[[str], bool] = lambda test: test.endswith("_a")  # noqa: E731
    assert not settle(to_run_again(FAILED, heard(failed("test_a"), failed("test_b"))), passes_alone)
    out = capsys.readouterr().out
    assert "FAILED AGAIN: test_it.py::test_b" in out and "FLAKED: test_it.py::test_a" in out
    assert len(flakes.read_text().splitlines()) == 1
    flakes.unlink()
    assert not settle(to_run_again(FAILED, heard(failed("test_b"))), passes_alone)
    assert not flakes.exists()


def test_words_of_a_silence_are_of_no_bytes() -> None:
    words = (
        "Finding(check='object store', found='OBJECT pool s3://bucket/blocks does not answer (no answer within 1.8 s)')"
    )
    assert [one.test for one in to_run_again(FAILED, heard(failed("test_a", words)))] == ["test_it.py::test_a"]


@pytest.mark.parametrize(
    "reports",
    [
        [failed("test_a", markers=())],
        [failed("test_a"), failed("test_b", markers=())],
        [failed("test_a", markers=("realtime", "bytes"))],
        [failed("test_a", "the digest differs")],
        [failed("test_a", "3 wrong bytes in slot 4")],
        [failed("test_a", "block is CORRUPT")],
        [failed(f"test_{number}") for number in range(MOST + 1)],
    ],
    ids=["logic", "one of each", "marked", "a digest", "bytes", "corrupt", "many"],
)
def test_what_else_fails_is_not_run_again(reports: list[pytest.TestReport]) -> None:
    assert to_run_again(FAILED, heard(*reports)) == []


def test_a_run_that_did_not_end_is_not_settled() -> None:
    recorder = heard(failed("test_a"))
    for status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        assert to_run_again(status, recorder) == []
    assert [one.test for one in to_run_again(FAILED, recorder)] == ["test_it.py::test_a"]
    recorder.is_broken = True  # a module that cannot be imported, a worker that died
    assert to_run_again(FAILED, recorder) == []
