"""docs/threats.md names tests that are there: each file and each test that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "threats.md").read_text()
_FOLDERS = ("unit", "integration", "conformance", "property", "faults")
_NAMED = re.compile(rf"`(?:tests/)?((?:(?:{'|'.join(_FOLDERS)})/)?)(test_\w+\.py)`")
_TOLD = re.compile(rf"{_NAMED.pattern}|`(…\w+…?|test_\w+)`")  # a file; or a test, or a part of its name
FOLDERS = {path.name: f"{folder}/" for folder in _FOLDERS for path in (TESTS / folder).rglob("test_*.py")}


def named() -> list[tuple[str, str]]:
    """Files as the text names them, each with the tests that it names behind it on that line;

    "" for the file, and for a test alone.
    """
    found = []
    for line in TEXT.splitlines():
        file = ""
        for folder, name, part in _TOLD.findall(line):
            if name:
                file = f"{folder or FOLDERS.get(name, '')}{name}"
            found.append((file, part.strip("…")))
    return found


@pytest.mark.parametrize(("file", "part"), sorted(set(named())))
def test_a_test_that_threats_names_is_there(file: str, part: str) -> None:
    paths = [TESTS / file] if file else [path for folder in _FOLDERS for path in (TESTS / folder).rglob("test_*.py")]
    assert all(path.is_file() for path in paths), f"docs/threats.md names tests/{file}"
    tests = [name for path in paths for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert any(part in one for one in tests), f"docs/threats.md names {part} in tests/{file}"


def test_each_line_of_what_a_party_can_do_names_a_test_or_says_that_none_shows_it() -> None:
    _, _, section = TEXT.partition("## What each party can do, and the test that shows it\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) > 30
    for row in rows:
        shown = row.strip("|").split("|")[-1]
        assert _NAMED.search(shown) or "no test" in shown, row
