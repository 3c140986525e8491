"""The programs `kvbm`, `kvbm-catalog` and `kvbm-replay`: they see whose the package `kvbm` is, then start what
it has.
"""

from __future__ import annotations

import importlib
import sys

from kvbm_ledger import conflict
from kvbm_ledger.hang_ups import HANG_UPS, runs_long

__all__ = ["catalog_main", "main", "replay_main"]


def main() -> int:
    """The `kvbm` command; 2 when the package of that name is not ours."""
    return _started("cli", "main", "kvbm")


def catalog_main() -> int:
    """The `kvbm-catalog` command, likewise."""
    return _started("catalog_cli", "catalog_main", "kvbm-catalog")


def replay_main() -> int:
    """The `kvbm-replay` command, likewise."""
    return _started("cli", "replay_main", "kvbm-replay")


def _started(module: str, command: str, name: str) -> int:
    if runs_long(name, sys.argv[1:]):
        HANG_UPS.install()  # first of all: what is imported next takes a while
    why = conflict()
    if why:
        print(f"{name}: {why}", file=sys.stderr)
        return 2
    code: int = getattr(importlib.import_module(f"kvbm.{module}"), command)()
    return code
