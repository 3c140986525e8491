"""What `tools/sizes.py` says of lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import sizes

WIDE = "a " * 61  # 122 columns


@pytest.fixture
def root(tmp_path: Path) -> Path:
    subprocess.check_call(["git", "init", "-q", str(tmp_path)])
    return tmp_path


def wide(root: Path) -> list[tuple[str, int]]:
    return [(one.what, one.size) for one in sizes.line_sizes(root) if one.size > sizes.LIMITS[one.kind]]


@pytest.mark.parametrize("name", ["one.py", "one.cu", "native/one.hpp", "Makefile", "one.toml", ".ci/run", "one.md"])
def test_a_wide_line_is_named(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(f"short\n{WIDE}\n{'×' * 120}\n")  # characters count, not bytes
    assert wide(root) == [(f"{name}:2", 122)]
    sizes.main(["--root", str(root)])
    assert f"line {name}:2: 122, the limit is 120\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["one.inc", "one.json", "corpus/0a1b"])
def test_lines_of_data_and_of_what_is_generated_may_be_wide(root: Path, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(f"{WIDE}\n")
    assert wide(root) == []


def test_files_that_git_ignores_are_not_looked_at(root: Path) -> None:
    (root / ".gitignore").write_text("build/\n")
    (root / "build").mkdir()
    (root / "build" / "one.py").write_text(WIDE)
    assert wide(root) == []


def test_of_markdown_prose_counts_and_not_what_cannot_be_broken(root: Path) -> None:
    link = f"[text](https://example.com/{'x' * 120})"
    page = ["| a table |", f"| {WIDE} |", "```", WIDE, "```", "  ```python", WIDE, "  ```", f"  {link}", f"one {link}"]
    (root / "page.md").write_text("\n".join([*page, WIDE]))
    assert [what for what, _ in wide(root)] == ["page.md:10", "page.md:11"]
