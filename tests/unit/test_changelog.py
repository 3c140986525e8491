"""The changelog stays short enough to be read before an upgrade, and leads to the pages that say more."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
MOST_LINES, MOST_COLUMNS = 40, 120


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_it_is_short() -> None:
    lines = CHANGELOG.splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


def test_its_links_lead_to_headings_of_pages() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", CHANGELOG)
    assert len(links) > 15
    for name, anchor in links:
        page = ROOT / name
        assert page.is_file(), name
        assert not anchor or anchor in anchors(page), f"{name}#{anchor}"


def test_its_newest_version_is_the_one_that_is_built() -> None:
    newest = re.findall(r"^## (\d+\.\d+\.\d+\S*)$", CHANGELOG, re.MULTILINE)[0]
    assert newest == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
