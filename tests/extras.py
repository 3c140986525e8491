"""Packages of extras that a test needs: where one is missing, the test fails and says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from kvbm.core.errors import MissingExtraError


def needed(module: str, extra: str) -> Any:
    """A module of an extra. Raises MissingExtraError: it is not installed; says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise MissingExtraError(module, extra) from None
        raise
