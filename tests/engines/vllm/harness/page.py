"""The blocks of a page of docs that a user pastes: those marked as tested, by name, and code in a language."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "docs" / "vllm.md"
_FENCED = re.compile(
    r"^(?:<!-- tested: (?P<name>[a-z-]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def tested_blocks() -> dict[str, Any]:
    """The page's JSON by name. Raises AssertionError: a block without a name, a name twice, a mark without a block."""
    text = PAGE.read_text()
    found: dict[str, Any] = {}
    for block in _FENCED.finditer(text):
        if block["language"] == "json":
            assert block["name"], f"{PAGE.name}: no <!-- tested: NAME --> above this block:\n{block['text']}"
            assert block["name"] not in found, f"{PAGE.name}: two blocks are called {block['name']}"
            found[block["name"]] = json.loads(block["text"])
    marks = text.count("<!-- tested:")
    assert marks == len(found), f"{PAGE.name}: {marks} marks, {len(found)} blocks below one"
    return found


def code(language: str, beginning: str = "") -> str:
    """The page's only code in a language that begins so."""
    blocks = [block["text"] for block in _FENCED.finditer(PAGE.read_text()) if block["language"] == language]
    (found,) = (block for block in blocks if block.startswith(beginning))
    return str(found)
