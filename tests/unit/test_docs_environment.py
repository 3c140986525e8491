"""docs/environment.md: each of its lines names, in a comment that no reader sees, tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRIES = re.findall(r"^- (.+(?:\n  .+)*)", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
LINES = [" ".join(entry.split()) for entry in ENTRIES]


def test_the_page_has_lines() -> None:
    assert len(LINES) > 25


@pytest.mark.parametrize("line", LINES, ids=[line[:38] for line in LINES])
def test_a_line_is_held_by_tests_that_are_there(line: str) -> None:
    found = re.search(r"<!-- (tests/\w+/\w+\.py):([\w, ]*) -->$", line)
    assert found is not None, line
    tests = re.findall(r"def (test_\w+)", (ROOT / found[1]).read_text())
    for part in filter(None, (one.strip() for one in found[2].split(","))):
        assert any(part in test for test in tests), f"{found[1]} has no test with {part} in its name"
