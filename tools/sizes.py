"""The sizes that the project keeps small: files, classes, functions and constructors of kvbm/, files and functions of
native/, and the lines of all that somebody writes.

python tools/sizes.py           what is above a limit; exit 1 where something is
python tools/sizes.py --all 10  ... and the ten largest of each kind

A line counts in Python where it has code: what is blank, a comment or a docstring does not. How wide a line is counts
everywhere, in characters; in Markdown, of prose: tables, fenced blocks and what stands alone, as a long link, may be
wider.

A limit is no aim. What has to be larger stands in ALLOWED with the reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

LIMITS = {
    "file": 600,
    "class": 380,
    "function": 80,
    "constructor": 10,  # parameters, `self` not counted
    "C++ file": 1200,
    "C++ function": 90,
    "line": 120,  # columns
}

# (kind, what) → why it may be larger than its limit.
_WIRING = "puts parts together, an argument a line, and decides nothing"
_FLAGS = "declares a command's flags, an argument a line"
ALLOWED: dict[tuple[str, str], str] = {
    ("function", "kvbm/assembly/manager.py:_open_manager"): _WIRING,
    ("function", "kvbm/manager/base.py:BlockManager.__init__"): _WIRING,
    ("function", "kvbm/catalog/service.py:CatalogService.__init__"): _WIRING,
    ("function", "kvbm/cli.py:_add_bench"): _FLAGS,
    ("C++ function", "native/bindings/cluster_index.cpp:bind_cluster_index"): _WIRING,
}


class Size(NamedTuple):
    """How large one thing is.

    Attributes:
        kind: a key of LIMITS.
        what: the path below the root, and the name within it.
        size: lines, of Python those with code; parameters of a constructor; columns of a line.
    """

    kind: str
    what: str
    size: int


def python_sizes(root: Path) -> Iterator[Size]:
    """Files, classes, functions and constructors of kvbm/."""
    for path in sorted((root / "kvbm").rglob("*.py")):
        text, where = path.read_text(), str(path.relative_to(root))
        tree = ast.parse(text)
        code = _code_lines(text, tree)
        yield Size("file", where, len(code))
        yield from _nodes(tree, f"{where}:", code)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def _code_lines(text: str, tree: ast.Module) -> list[int]:
    """The numbers of the lines that have code, in order: of a string over lines all, of a docstring none."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for one in tokens if one.type not in _NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return sorted(lines)


def _nodes(parent: ast.AST, where: str, code: list[int]) -> Iterator[Size]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _nodes(node, where, code)
            continue
        name = f"{where}{node.name}"
        is_class = isinstance(node, ast.ClassDef)
        size = bisect_right(code, node.end_lineno or 0) - bisect_left(code, node.lineno)
        yield Size("class" if is_class else "function", name, size)
        if not isinstance(node, ast.ClassDef) and node.name == "__init__":
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
            yield Size("constructor", where.removesuffix("."), count)
        yield from _nodes(node, f"{name}.", code)


_CPP_HEAD = re.compile(r"^(?! )(?!namespace|class|struct|enum|union|extern|constexpr|using|#|//)[A-Za-z_~].*")
_CPP_NAME = re.compile(r"([A-Za-z_~][\w:~]*)\s*\(")


def native_sizes(root: Path) -> Iterator[Size]:
    """Files of native/, and the functions of its sources that begin at the margin, as the formatter lays them out."""
    for path in sorted([*(root / "native").glob("src/*.cpp"), *(root / "native").glob("bindings/*.cpp")]):
        lines, where = path.read_text().splitlines(), str(path.relative_to(root))
        yield Size("C++ file", where, len(lines))
        begin = None
        for number, line in enumerate(lines):
            if begin is None and _CPP_HEAD.match(line):
                begin = number
            if begin is None:
                continue
            if line.rstrip().endswith(";") and not line.startswith((" ", "}")):
                begin = None  # a declaration
            elif line.startswith("}") or (number == begin and line.rstrip().endswith("}")):
                found = _CPP_NAME.search(" ".join(lines[begin : number + 1]))
                yield Size("C++ function", f"{where}:{found[1] if found else '?'}", number - begin + 1)
                begin = None
    for path in sorted((root / "native" / "include").rglob("*.hpp")):
        yield Size("C++ file", str(path.relative_to(root)), len(path.read_text().splitlines()))


_WRITTEN_NAMES = {"CMakeLists.txt", "Dockerfile", "Makefile"}
_WRITTEN_SUFFIXES = {".cmake", ".cpp", ".cu", ".hpp", ".md", ".py", ".pyi", ".sh", ".toml", ".yaml", ".yml"}
_FENCE = re.compile(r"\s*(```+|~~~+)")


def line_sizes(root: Path) -> Iterator[Size]:
    """Lines of the files that git keeps or would take, where somebody writes them: nothing generated, no data."""
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    for where in sorted(set(subprocess.check_output(listed, cwd=root, text=True).split("\0"))):
        path = root / where
        is_written = path.name in _WRITTEN_NAMES or path.suffix in _WRITTEN_SUFFIXES or path.parent.name == ".ci"
        if is_written and path.is_file():  # one that is deleted is still listed
            lines = path.read_text().split("\n")
            for number, line in _prose(lines) if path.suffix == ".md" else enumerate(lines, 1):
                yield Size("line", f"{where}:{number}", len(line))


def _prose(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The lines of Markdown that can be broken: outside tables and fences, and of more than one word."""
    fence = ""
    for number, line in enumerate(lines, 1):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence):
            fence = ""
        elif not fence and not line.lstrip().startswith("|") and len(line.split()) > 1:
            yield number, line


def main(arguments: list[str] | None = None) -> int:
    """Print what is too large. Returns 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=int, default=0, metavar="N", help="print the N largest of each kind as well")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args(arguments)
    found = [*python_sizes(options.root), *native_sizes(options.root), *line_sizes(options.root)]
    sizes = sorted(found, key=lambda one: -one.size)
    for kind in LIMITS if options.all else ():
        for one in [one for one in sizes if one.kind == kind][: options.all]:
            print(f"{kind:12} {one.size:6,}  {one.what}")
    broken = 0
    for one in sizes:
        if one.size <= LIMITS[one.kind]:
            continue
        why = ALLOWED.get((one.kind, one.what), "")
        broken += not why
        print(
            f"{one.kind} {one.what}: {one.size:,}, the limit is "
            f"{LIMITS[one.kind]:,}{f' (allowed: {why})' if why else ''}"
        )
    for kind, what in ALLOWED.keys() - {(one.kind, one.what) for one in sizes if one.size > LIMITS[one.kind]}:
        broken += 1
        print(f"{kind} {what} is within its limit, and ALLOWED names it; take it out")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
