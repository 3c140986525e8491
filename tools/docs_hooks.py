"""MkDocs' hooks: pages of the site that are written while it is built, from the code and from what lies elsewhere in
the repository.

reference/*.md        tools/reference.py
design.md             ARCHITECTURE.md
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
_IN_DOCS = re.compile(r"\]\(docs/([^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages. Decisions are in the site without each being in its menu."""
    pages = {name: page() for name, page in _module("reference").PAGES.items()}
    pages["design.md"] = _IN_DOCS.sub(_as_page, (ROOT / "ARCHITECTURE.md").read_text())
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for file in files:
        if file.src_uri.startswith("decisions/") and file.src_uri != "decisions/README.md":
            file.inclusion = InclusionLevel.NOT_IN_NAV
    return files


def _as_page(link: re.Match[str]) -> str:
    """A link of the repository as one of the site."""
    return f"]({link[1]}README.md)" if link[1].endswith("/") else f"]({link[1]})"


def _module(name: str) -> Any:
    """A neighbour in tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
