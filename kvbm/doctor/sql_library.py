"""The catalog's database library, which this machine may lack: imported by one thread at a time."""

from __future__ import annotations

import threading
from types import ModuleType

_IMPORT = threading.Lock()


def sql_library() -> ModuleType:
    """`kvbm.catalog.sql.database`. Raises MissingExtraError.

    Where an import fails, CPython gives a thread that has waited for it the half-made module instead of the error.
    """
    with _IMPORT:
        from kvbm.catalog.sql import database

        return database
