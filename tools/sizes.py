"""The sizes that the project keeps small: files, classes, functions and constructors of kvbm/, files and functions of native/.

python tools/sizes.py           what is above a limit; exit 1 where something is
python tools/sizes.py --all 10  ... and the ten largest of each kind

A limit is no aim. What has to be larger stands in ALLOWED with the reason.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

LIMITS = {
    "file": 700,
    "class": 400,
    "function": 80,
    "constructor": 10,  # parameters, `self` not counted
    "C++ file": 1200,
    "C++ function": 90,
}

# (kind, what) → why it may be larger than its limit.
ALLOWED: dict[tuple[str, str], str] = {}


class Size(NamedTuple):
    """How large one thing is.

    Attributes:
        kind: a key of LIMITS.
        what: the path below the root, and the name within it.
        size: lines, or parameters of a constructor.
    """

    kind: str
    what: str
    size: int


def python_sizes(root: Path) -> Iterator[Size]:
    """Files, classes, functions and constructors of kvbm/."""
    for path in sorted((root / "kvbm").rglob("*.py")):
        text, where = path.read_text(), str(path.relative_to(root))
        yield Size("file", where, len(text.splitlines()))
        yield from _nodes(ast.parse(text), f"{where}:")


def _nodes(parent: ast.AST, where: str) -> Iterator[Size]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _nodes(node, where)
            continue
        name = f"{where}{node.name}"
        is_class = isinstance(node, ast.ClassDef)
        yield Size("class" if is_class else "function", name, (node.end_lineno or 0) - node.lineno + 1)
        if not isinstance(node, ast.ClassDef) and node.name == "__init__":
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
            yield Size("constructor", where.removesuffix("."), count)
        yield from _nodes(node, f"{name}.")


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


def main(arguments: list[str] | None = None) -> int:
    """Print what is too large. Returns 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=int, default=0, metavar="N", help="print the N largest of each kind as well")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args(arguments)
    sizes = sorted([*python_sizes(options.root), *native_sizes(options.root)], key=lambda one: -one.size)
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
            f"{one.kind} {one.what}: {one.size:,}, the limit is {LIMITS[one.kind]:,}{f' (allowed: {why})' if why else ''}"
        )
    for kind, what in ALLOWED.keys() - {(one.kind, one.what) for one in sizes if one.size > LIMITS[one.kind]}:
        broken += 1
        print(f"{kind} {what} is within its limit, and ALLOWED names it; take it out")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
