"""Every command and code block of README and docs/ is run as it stands there, or checked where it cannot run here.

`tests/pages.py` says how.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DATA, RUN_AS, Block, Reader, blocks, check, pages

PAGES = [page for page in pages() if blocks(page)]
IN_AN_ENGINE = "docs/vllm.md"  # what it has to run, tests/engines/vllm runs


def _named(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path):
    with Reader(tmp_path) as reader:
        for block in blocks(page):
            check(block)
            reader.read(block)


def _blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def test_each_block_says_what_it_is():
    for block in _blocks():
        assert block.language in {*RUN_AS, *DATA}, f"{block.place}: write the language behind the fence, or text"
        if block.kind == "not run":
            assert len(block.words) > 10, f"{block.place}: say why it is not run"
        if block.kind == "output":
            assert block.language == "text", f"{block.place}: output is text"
        if block.kind == "tested":
            assert block.page == IN_AN_ENGINE, f"{block.place}: only tests of that page look for such a mark"


def test_most_blocks_are_run():
    """So that the mark is the exception."""
    code = [block for block in _blocks() if block.language in RUN_AS and block.page != IN_AN_ENGINE]
    assert sum(block.runs for block in code) > 2 * sum(not block.runs for block in code)


def test_a_block_that_fails_is_told_with_its_place(tmp_path: Path):
    page = Block("docs/x.md", 7, "sh", "", "", "echo one\nfalse\n")
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match=r"docs/x\.md:7 returned 1\s+one"):
        reader.read(page)


def test_output_that_differs_is_told(tmp_path: Path):
    with Reader(tmp_path) as reader:
        reader.read(Block("x.md", 1, "sh", "", "", "echo 5 blocks in 3.2 ms\n"))
        reader.read(Block("x.md", 4, "text", "output", "", "5 blocks in … ms\n"))
        with pytest.raises(AssertionError, match="the page says"):
            reader.read(Block("x.md", 4, "text", "output", "", "6 blocks in … ms\n"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("make no-such-target", "no target"),
        ("kvbm-replay verify --no-such-flag X", "has no --no-such-flag"),
        ("kvbm no-such-command", "no such command"),
        ("tools/churn.py --no-such-flag", "has no --no-such-flag"),
        ("kvbm-catalog serve --set nats.uri=nats://x", "no setting"),
        ("if true; then", "syntax error"),
    ],
)
def test_a_command_that_does_not_exist_is_found_without_running_it(text: str, words: str):
    with pytest.raises(Exception, match=words):
        check(Block("x.md", 1, "sh", "not run", "it needs a GPU", text + "\n"))
