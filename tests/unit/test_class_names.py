"""A class name stands for one thing in kvbm. Names that begin with an underscore are their module's alone."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

KVBM = Path(__file__).parents[2] / "kvbm"
# Names that stand for two things still. Of each, code of kvbm/manager, erasure, assembly, config or bench has one or uses one; `BlockManager`
# and `Store` are public beside that, and the class of `Lent` names its message.
SHARED = {
    "Asked", "BlockManager", "Claims", "Group", "Lent", "LimitSettings", "Limits", "Log", "Place", "Reader", "RoutingSettings", "Source", "Store", "Stored",
}  # fmt: skip


def test_a_class_name_stands_for_one_thing() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(KVBM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(KVBM).as_posix())
    shared = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SHARED} == {}, "choose another name"
    assert shared.keys() >= SHARED, "strike those that are one thing's by now"
