"""Kernel or copy engines: decided by what was measured on the GPU, kept in a file, and by defaults without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from kvbm.pools.hbm.ways import NEVER, SIZES, UNMEASURED, Ways, known_ways, measure_ways, ways_file


def rates(engines_from: dict[bool, int]) -> object:
    """Copy engines are as quick as the kernel from a size on, in each direction."""

    def rate(way: str, gathers: bool, segment_bytes: int) -> float:
        return 20.0 if way == "kernel" or segment_bytes >= engines_from[gathers] else 5.0

    return rate


def test_copy_engines_are_used_from_the_size_on_where_they_are_as_quick() -> None:
    ways = measure_ways("gpu", rates({True: 64 << 10, False: 1 << 20}))  # type: ignore[arg-type]
    assert ways == Ways(64 << 10, 1 << 20, "gpu")
    assert [ways.engines_gather(size) for size in (16 << 10, 64 << 10)] == [False, True]
    assert [ways.engines_scatter(size) for size in (64 << 10, 1 << 20)] == [False, True]


def test_copy_engines_that_are_never_as_quick_are_not_used_and_others_always() -> None:
    measured = measure_ways("gpu", rates({True: 1 << 40, False: 0}))  # type: ignore[arg-type]
    assert measured == Ways(NEVER, SIZES[0], "gpu")


def test_a_size_at_which_they_are_slower_counts_for_all_below() -> None:
    def rate(way: str, gathers: bool, segment_bytes: int) -> float:
        return 10.0 if way == "kernel" or segment_bytes != 256 << 10 else 9.0

    assert measure_ways("gpu", rate).gather_bytes == 1 << 20


def test_a_gpu_is_measured_once_and_each_has_its_own(tmp_path: Path) -> None:
    file, measured = tmp_path / "kvbm" / "ways.json", []

    def measure(name: str) -> Ways:
        measured.append(name)
        return Ways(len(measured), 7, name)

    for _ in range(3):
        assert known_ways("one", lambda: measure("one"), file) == Ways(1, 7, "one")
    assert known_ways("other", lambda: measure("other"), file) == Ways(2, 7, "other")
    assert known_ways("one", None, file) == Ways(1, 7, "one")
    assert measured == ["one", "other"]
    assert known_ways("third", None, file) is UNMEASURED


@pytest.mark.parametrize("content", [b"", b"[]", b'{"one": [1]}', b'{"one": {"gather_bytes": "x"}}', b"\xff"])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ways.json"
    file.write_bytes(content)
    assert known_ways("one", lambda: Ways(5, 6, "one"), file) == Ways(5, 6, "one")
    assert known_ways("one", None, file) == Ways(5, 6, "one")


def test_a_gpu_that_cannot_be_measured_has_the_defaults_and_it_is_said(tmp_path: Path) -> None:
    def measure() -> Ways:
        raise RuntimeError("CUDA error: out of memory")

    with structlog.testing.capture_logs() as logs:
        assert known_ways("one", measure, tmp_path / "ways.json") is UNMEASURED
    assert [log["event"] for log in logs] == ["hbm.unmeasured"]


def test_a_measurement_that_cannot_be_kept_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with structlog.testing.capture_logs() as logs:
        assert known_ways("one", lambda: Ways(5, 6, "one"), tmp_path / "file" / "ways.json") == Ways(5, 6, "one")
    assert [log["event"] for log in logs] == ["hbm.measured", "hbm.not_kept"]


def test_the_file_lies_where_caches_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ways_file() == tmp_path / "kvbm" / "hbm_ways.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ways_file() == tmp_path / ".cache" / "kvbm" / "hbm_ways.json"
