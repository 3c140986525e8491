"""The reference pages that tools/reference.py writes from the code are complete, and what other pages name is
on them.
"""

from __future__ import annotations

import re

import msgspec

from kvbm.catalog.edge.routes import openapi
from kvbm.config import default_lines
from kvbm.config.log_nouns import LOG_NOUNS
from tests.pages import ROOT, pages
from tools import reference

_LOG_NAME = re.compile(r"[a-z_]+\.[a-z_]+")


def _prose() -> list[tuple[str, str]]:
    """Every page, as (name, text)."""
    return [(str(page.relative_to(ROOT)), page.read_text()) for page in pages()]


def test_each_setting_has_a_meaning():
    missing = [one.key for _, _, own in reference.settings() for one in own if not one.meaning]
    assert not missing, f"say in the docstring of their table in kvbm/config/settings.py what these are: {missing}"


def test_each_setting_is_on_its_page():
    text = reference.settings_page()
    keys = [line.partition(" = ")[0] for line in default_lines()]
    assert len(keys) > 50
    assert [key for key in keys if f"| `{key}` |" not in text] == []


def test_a_second_entry_on_a_line_of_attributes_is_one():
    class Kept(msgspec.Struct):
        """What is kept. `least_s`: snapshots are so far apart.

        Attributes:
            first: of
                two lines. second, third: of both.
        """

    assert reference.described(Kept).meanings == {
        "first": "of two lines.",
        "second": "of both.",
        "third": "of both.",
        "least_s": "snapshots are so far apart",
    }


def test_each_metric_that_a_page_names_exists():
    known = {
        one.name for one in (*reference.catalog_metrics(), *reference.manager_metrics(), *reference.vllm_metrics())
    }
    assert len(known) > 50
    for page, text in _prose():
        for name in re.findall(r"\bkvbm_(?:catalog|manager|vllm)_[a-z_]*[a-z]\b", text):
            assert name.removesuffix("_bucket") in known, f"{page}: there is no metric {name}"


def test_each_path_that_a_page_names_exists():
    known = [re.sub(r"\{\w+\}", "[^/]+", path) for path in openapi()["paths"]]
    for page, text in _prose():
        for path in re.findall(r"(?<![\w.])/v1/[a-z]+(?:/[\w{}]+)*", text):
            assert any(re.fullmatch(one, path) for one in known), f"{page}: there is no path {path}"


def test_each_setting_and_log_line_that_a_page_names_exists():
    settings = {one.key for _, _, own in reference.settings() for one in own}
    lines = {one.name for one in reference.logged()}
    nouns = {name.partition(".")[0] for name in settings | lines} - {"kvbm", "catalog", "manager"}
    known = settings | lines | {key.rpartition(".")[0] for key in settings}
    for page, text in _prose():
        if page.startswith(("docs/decisions", "ARCHITECTURE")):
            continue  # they also name files and attributes
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", text):
            if name.partition(".")[0] in nouns and not name.endswith(".py"):
                assert name in known, f"{page}: there is neither a setting nor a log line {name}"


def test_each_log_line_has_a_constant_name():
    found = reference.logged()
    assert len(found) > 80
    for one in found:
        assert _LOG_NAME.fullmatch(one.name), f"{one.module}: {one.name!r} is no noun.verb_past"
    assert list(LOG_NOUNS) == sorted({one.name.partition(".")[0] for one in found} | {"library"})


def test_errors_of_the_api_are_found():
    codes = {code for code, _, _ in reference.error_codes()}
    assert {"not_ready", "no_instance", "bad_hash", "scheme_not_hashable", "position_not_reached"} <= codes


def test_every_page_of_the_reference_is_written():
    for name, page in reference.PAGES.items():
        text = page()
        assert text.startswith("# "), name
        assert text.count("```") % 2 == 0, name


def test_links_between_files_of_the_repository_lead_somewhere():
    """As they are read in the repository; `make docs` checks those of the site."""
    generated = {name.removesuffix(".md") for name in reference.PAGES} | {"design"}
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            target = (page.parent / link).resolve()
            written = (
                str(target.relative_to(ROOT / "docs")).removesuffix(".md") if (ROOT / "docs") in target.parents else ""
            )
            assert target.exists() or written in generated, f"{page.relative_to(ROOT)}: {link} leads nowhere"
