"""What people read of us: pages, the help of commands and of metrics.

No class of ours is named there, unless in code marks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "kvbm").rglob("*.py"))}
NAMES = {
    node.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef) and re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}", node.name)
}
NAMED = re.compile(r"\b(" + "|".join(sorted(NAMES)) + r")\b")
WORDS_OF_COMMANDS = ("help", "description", "epilog", "documentation")


def lines_of(page: Path) -> Iterator[tuple[int, str]]:
    """A page without what is code: fences, code marks, indented blocks, targets of links."""

    def emptied(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = page.read_text()
    for code in (r"(?s)```.*?```", r"`[^`]*`", r"(?m)^    .*$", r"\]\([^)]*\)"):
        text = re.sub(code, emptied, text)
    return enumerate(text.split("\n"), 1)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """What a module says to people who run commands or look at metrics."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            said = [keyword.value for keyword in node.keywords if keyword.arg in WORDS_OF_COMMANDS]
            if isinstance(node.func, ast.Name) and node.func.id.endswith("MetricFamily"):
                said += node.args[1:2]
            if isinstance(node.func, ast.Name) and node.func.id == "MetricRow":
                said += node.args[2:3]
            for one in said:
                yield from (
                    part.value
                    for part in ast.walk(one)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
        elif isinstance(node, ast.Dict):  # of metrics: name → help
            yield from (
                one.value for one in node.values if isinstance(one, ast.Constant) and isinstance(one.value, str)
            )


def test_no_page_names_a_class_of_ours_outside_code_marks() -> None:
    assert len(NAMES) > 300
    found = [
        f"{page.relative_to(ROOT)}:{at}: {name}"
        for page in PAGES
        for at, line in lines_of(page)
        for name in NAMED.findall(line)
    ]
    assert not found


def test_no_help_names_a_class_of_ours_outside_code_marks() -> None:
    texts = [(path, text) for path, tree in TREES.items() for text in texts_of(tree)]
    assert sum("of suspect instances" in text for _, text in texts) == 1  # the help of metrics is among them
    assert [
        f"{path.relative_to(ROOT)}: {text}" for path, text in texts if NAMED.search(re.sub(r"`[^`]*`", "", text))
    ] == []
