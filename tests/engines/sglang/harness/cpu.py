"""SGLang on a machine without a GPU: what has to be so before its modules are imported.

SGLang imports torchvision, whose operators a CPU's torch does not load: their names are declared here, and none is ever
called.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []  # what is declared lasts as long as this


def prepare() -> None:
    """Make SGLang's modules importable. Idempotent."""
    if _declared:
        return
    found = importlib.util.find_spec("torchvision")
    assert found is not None and found.origin is not None, "torchvision is not installed; run make test-sglang"
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    names = re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', text)
    _declared.append(torch.library.Library("torchvision", "DEF"))
    for name in dict.fromkeys(names):
        _declared[0].define(f"{name}() -> ()")
