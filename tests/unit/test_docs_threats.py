"""docs/threats.md names tests that are there: each file and each test that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "threats.md").read_text()
_NAMED = re.compile(
    r"`((?:tests/)?(?:unit|integration|conformance|property|faults)/)?(test_\w+\.py)`(?: \(((?:`…?\w+…?`(?:, )?)+)\))?"
)
FOLDERS = {name: folder for folder in ("unit", "integration", "conformance", "property", "faults") for name in
           [path.name for path in (TESTS / folder).rglob("test_*.py")]}  # fmt: skip


def named() -> list[tuple[str, str]]:
    """Files as the text names them, with a test or a part of its name; "" where the file stands alone."""
    found = []
    for folder, name, tests in _NAMED.findall(TEXT):
        parts = re.findall(r"`…?(\w+?)…?`", tests) or [""]
        place = (folder or f"{FOLDERS.get(name, '')}/").removeprefix("tests/")
        found += [(f"{place}{name}", part) for part in parts]
    return found


@pytest.mark.parametrize(("file", "part"), sorted(set(named())))
def test_a_test_that_threats_names_is_there(file: str, part: str) -> None:
    path = TESTS / file
    assert path.is_file(), f"docs/threats.md names tests/{file}"
    tests = re.findall(r"def (test_\w+)", path.read_text())
    assert any(part in one for one in tests), f"docs/threats.md names {part} in tests/{file}"


def test_each_line_of_what_a_party_can_do_names_a_test_or_says_that_none_shows_it() -> None:
    _, _, section = TEXT.partition("## What each party can do, and the test that shows it\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) > 30
    for row in rows:
        shown = row.strip("|").split("|")[-1]
        assert _NAMED.search(shown) or "no test" in shown, row
