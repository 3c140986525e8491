"""Whose the installed package `kvbm` is.

This module has a name of its own, so it can tell also when `kvbm` is not ours any more.

Another distribution on PyPI, NVIDIA's `kvbm`, installs a package of the same name into the same folder. pip lets the
second installed overwrite the first, and uninstalling one deletes files of the other.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["conflict"]

_OUR_FIRST_WORDS = '"""kvbm: an event-sourced lifecycle manager'
_REMEDY = (
    "run: pip uninstall {others}; pip install --force-reinstall --no-deps kvbm-ledger (or its wheel file); or "
    "give each an environment of its own"
)


def conflict() -> str:
    """What is wrong with the package `kvbm` and what to do, in a sentence; "" where it is kvbm-ledger's alone.

    Cheap enough for every start: it reads the head of one file and lists one folder. Only an error looks further.
    """
    try:
        found = importlib.util.find_spec("kvbm")
    except ValueError:
        return ""  # a stand-in that was made by hand
    folder = _folder(found.origin, found.submodule_search_locations) if found is not None else None
    if folder is None:
        return f"the Python package kvbm is not there; {_REMEDY.format(others='kvbm')}"
    beside = _distributions_beside(folder)
    if not _is_ours(folder / "__init__.py"):
        others = beside or _owners()
        whose = (
            f"belongs to the distribution {' and '.join(others)}, not to"
            if others
            else "has lost files of, or is none of,"
        )
        return f"the Python package kvbm at {folder} {whose} kvbm-ledger; {_remedy(others)}"
    if beside:
        return (
            f"kvbm-ledger and the distribution {' and '.join(beside)} both write the Python package kvbm at {folder}, "
            "so its files "
            f"are mixed; {_remedy(beside)}"
        )
    return ""


def _folder(origin: str | None, locations: Iterable[str] | None) -> Path | None:
    """Where a package lies; also one that has lost its __init__.py."""
    if origin is not None:
        return Path(origin).parent
    return next((Path(place) for place in locations or ()), None)


def _is_ours(init: Path) -> bool:
    try:
        with open(init, encoding="utf-8", errors="replace") as text:
            return text.read(len(_OUR_FIRST_WORDS)) == _OUR_FIRST_WORDS
    except OSError:
        return False


def _distributions_beside(folder: Path) -> list[str]:
    """Installed distributions named kvbm in the folder that holds the package, as "kvbm 1.6.1"."""
    try:
        names = sorted(os.listdir(folder.parent))
    except OSError:
        return []
    return [
        name.removesuffix(".dist-info").replace("-", " ", 1)
        for name in names
        if name.startswith("kvbm-") and name.endswith(".dist-info")
    ]


def _owners() -> list[str]:
    """All distributions that have files of the package; slow, for an error alone."""
    import importlib.metadata

    names = set(importlib.metadata.packages_distributions().get("kvbm", [])) - {"kvbm-ledger"}
    return sorted(f"{name} {importlib.metadata.version(name)}" for name in names)


def _remedy(others: list[str]) -> str:
    return _REMEDY.format(others=" ".join(other.partition(" ")[0] for other in others) or "kvbm")
