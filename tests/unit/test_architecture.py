"""ARCHITECTURE.md stays short and plain, and what it and the pages of docs/design name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = ROOT / "ARCHITECTURE.md"
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
MOST_WORDS = 2500
MOST_WORDS_OF_A_SENTENCE = 25
_FENCED = re.compile(r"(?ms)^```.*?^```$")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]*)*")
_TEST = re.compile(r"(test_\w+\.py)::(test_\w+)(?:\[\w+\])?")
_ABBREVIATIONS = re.compile(r"\b(?:e\.g|i\.e|cf)\.")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def sentences(text: str) -> Iterator[str]:
    """The prose of a page: without fences, tables and headings; a code mark is one word, a link is its text."""
    text = _FENCED.sub("", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*(?=\S)|(?<=\S)\*", "", _ABBREVIATIONS.sub("CODE", text))  # emphasis
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=[|#])", text):
        if paragraph.startswith(("|", "#")):
            continue
        flat = re.sub(r"^\s*(?:[-*]|\d+\.)\s", "", paragraph).replace("\n", " ")
        yield from (one for one in re.split(r"(?<=[.!?])\)?\s+", flat) if one.strip())


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def marks(page: Path) -> list[str]:
    """What stands in code marks outside fences."""
    return re.findall(r"`([^`\n]+)`", _FENCED.sub("", page.read_text()))


@cache
def file_names() -> frozenset[str]:
    folders = ("kvbm", "kvbm_ledger", "tests", "tools", "examples")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def native_stems() -> frozenset[str]:
    return frozenset(path.stem for path in (ROOT / "native").rglob("*.[ch]pp"))


def exists(name: str) -> bool:
    """Whether a path in a page leads somewhere: from the root or from kvbm/; of native/ a stem; alone any file of that
    name.
    """
    if re.fullmatch(r"native/\w+", name) and not (ROOT / name).exists():
        return name.removeprefix("native/") in native_stems()
    if "/" not in name:
        return name in file_names() or (ROOT / name).exists()
    return (ROOT / name).exists() or (ROOT / "kvbm" / name).exists()


def is_path(mark: str) -> bool:
    """Whether a code mark means a file or folder of the repository."""
    if _PATH.fullmatch(mark) is None:
        return False
    first = mark.partition("/")[0]
    return mark.endswith(".py") or ("/" in mark and (ROOT / first).is_dir() | (ROOT / "kvbm" / first).is_dir())


def test_the_map_is_short() -> None:
    assert len(MAP.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", [MAP, *DESIGN], ids=name_of)
def test_no_sentence_is_long(page: Path) -> None:
    found = [one for one in sentences(page.read_text()) if words(one) > MOST_WORDS_OF_A_SENTENCE]
    assert found == []


@pytest.mark.parametrize("page", [MAP, *DESIGN], ids=name_of)
def test_each_file_and_folder_that_is_named_exists(page: Path) -> None:
    named = [mark for mark in marks(page) if is_path(mark)]
    assert len(named) > 5
    assert [name for name in named if not exists(name)] == []


@pytest.mark.parametrize("page", [MAP, *DESIGN], ids=name_of)
def test_each_test_that_is_named_exists(page: Path) -> None:
    for mark in marks(page):
        if (found := _TEST.fullmatch(mark)) is not None:
            files = list((ROOT / "tests").rglob(found[1]))
            assert any(f"def {found[2]}(" in file.read_text() for file in files), mark


def test_each_twin_in_native_exists() -> None:
    table = MAP.read_text().partition("| concept |")[2].partition("\n\n")[0].split("\n")[2:]
    stems = [stem for row in table for stem in re.findall(r"`([^`]+)`", row.split("|")[3])]
    assert len(table) > 10
    assert [stem for stem in stems if stem not in native_stems()] == []


def test_each_page_of_design_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DESIGN if f": design/{page.name}\n" not in menu] == []


def test_a_long_sentence_is_found() -> None:
    long = "word " * (MOST_WORDS_OF_A_SENTENCE + 1)
    page = f"# Heading {long}\n\nShort. {long}end.\n- an item of `{long}`\n\n| a table {long} |\n"
    assert [words(one) for one in sentences(page) if words(one) > MOST_WORDS_OF_A_SENTENCE] == [
        MOST_WORDS_OF_A_SENTENCE + 2
    ]
