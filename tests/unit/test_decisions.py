"""The pages of decisions: few, each with its reasons and what was not taken; every number that anybody cites is
there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "README.md"
PAGES = sorted(set(FOLDER.iterdir()) - {INDEX})
MOST_FILES = 45
NEVER_GIVEN = {"090", "124", "134", "136"}
CITING = ("kvbm", "native", "tests", "tools", "bench", "examples", "docs")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".cu", ".md", ".toml", ".yml", ".sh"}
HEADING = re.compile(r"^## ((\d{3}): (.+))$", re.MULTILINE)
CITED = re.compile(r"\b[Dd]ecisions? (\d{3})(?:(?:, | and )(\d{3}))*(?: to (\d{3}))?")


def slug(heading: str) -> str:
    """The anchor of a heading, the same on the site and on GitHub."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def headings() -> Iterator[tuple[str, str, str, str]]:
    """Number, title, page and anchor of each decision."""
    for page in PAGES:
        for whole, number, title in HEADING.findall(page.read_text()):
            yield number, title, page.stem, slug(whole)


def citing_files() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    yield ROOT / "Makefile"
    for folder in CITING:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file())


def test_there_are_few_files_with_names_of_subjects() -> None:
    assert 20 < len(PAGES) < MOST_FILES
    assert [page.name for page in PAGES if not re.fullmatch(r"[a-z]+(?:-[a-z]+)*\.md", page.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_decision_has_its_reason_and_what_was_not_taken(page: Path) -> None:
    title, *decisions = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    assert title.startswith("# ") and decisions
    for decision in decisions:
        assert re.match(r"\d{3}: ", decision), decision.partition("\n")[0]
        labels = re.findall(r"^\*\*(Decided|Reason|Not taken)\.\*\*", decision, re.MULTILINE)
        assert labels == ["Decided", "Reason", "Not taken"], decision.partition("\n")[0]


def test_the_index_leads_from_each_number_to_its_page() -> None:
    found = sorted(headings())
    assert len({number for number, *_ in found}) == len(found) > 130
    rows = re.findall(r"^\| (\d{3}) \| (.+) \| \[([a-z-]+)\]\(\3\.md#(\S+)\) \|$", INDEX.read_text(), re.MULTILINE)
    assert rows == found


def test_the_index_lists_each_subject_with_its_numbers() -> None:
    rows = dict(re.findall(r"^\| \[.+\]\(([a-z-]+)\.md\) \| ([\d, ]+) \|$", INDEX.read_text(), re.MULTILINE))
    assert rows == {
        page.stem: ", ".join(number for _, number, _ in HEADING.findall(page.read_text())) for page in PAGES
    }


def test_no_number_between_is_missing_but_those_never_given() -> None:
    given = {number for number, *_ in headings()}
    every = {f"{number:03}" for number in range(1, int(max(given)) + 1)}
    assert every - given == NEVER_GIVEN


def test_each_cited_number_exists() -> None:
    given = {number for number, *_ in headings()}
    cited = 0
    for path in citing_files():
        for match in CITED.finditer(path.read_text(errors="replace")):
            numbers = re.findall(r"\d{3}", match[0].partition(" to ")[0])  # of a range, its first
            cited += len(numbers)
            assert set(numbers) <= given, f"{path.relative_to(ROOT)}: {match[0]}"
    assert cited > 20
