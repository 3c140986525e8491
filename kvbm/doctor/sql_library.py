"""The catalog's database library, which this machine may lack: imported by one thread at a time, and silent."""

from __future__ import annotations

import logging
import threading
from types import ModuleType

_IMPORT = threading.Lock()


def sql_library() -> ModuleType:
    """`kvbm.catalog.sql.database`. Raises MissingExtraError.

    Where an import fails, CPython gives a thread that has waited for it the half-made module instead of the error.
    """
    with _IMPORT:
        # Another library may send all remarks to the terminal: those of migrations are none of this machine's trouble
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from kvbm.catalog.sql import database

        return database
