"""A class name stands for one thing in kvbm. Names that begin with an underscore are their module's alone."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

KVBM = Path(__file__).parents[2] / "kvbm"


def test_a_class_name_stands_for_one_thing() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(KVBM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(KVBM).as_posix())
    assert len(found) > 900
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}, "choose another name"
