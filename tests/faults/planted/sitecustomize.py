"""Plants a defect in every Python process that has this folder in PYTHONPATH: one module is read from another file.

`PLANTED_DEFECT` is `module=file`. The module keeps its own name and place; only its text is another's.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

_NAME, _, _FILE = os.environ.get("PLANTED_DEFECT", "").partition("=")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(Path(_FILE).read_bytes(), self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        top = Path(__file__).resolve().parents[3]
        origin = str(top.joinpath(*fullname.split(".")).with_suffix(".py"))
        return importlib.util.spec_from_file_location(fullname, origin, loader=_Loader(fullname, origin))


if _FILE:
    sys.meta_path.insert(0, _Finder())
