"""Where remarks are made: structlog's words, and none of them ever ends who makes it.

What a process does with remarks is its own choice, so anything may come of one: a disk that is full, a stream that is closed, a traceback
that wants to read source files while there are no descriptors. A thread that ends for that leaves its work undone for good.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import structlog


class Remarks:
    """Those of one module. A remark that cannot be made is lost. Any thread."""

    def __init__(self) -> None:
        self._log: Any = structlog.get_logger()  # as the process has set structlog up by the time of the first remark

    def debug(self, event: str, **fields: object) -> None:
        """For who looks for a fault."""
        with suppress(Exception):
            self._log.debug(event, **fields)

    def info(self, event: str, **fields: object) -> None:
        """What has happened."""
        with suppress(Exception):
            self._log.info(event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        """What somebody should look at."""
        with suppress(Exception):
            self._log.warning(event, **fields)

    def error(self, event: str, **fields: object) -> None:
        """What has ended for good."""
        with suppress(Exception):
            self._log.error(event, **fields)

    def exception(self, event: str, **fields: object) -> None:
        """A fault of ours, with the traceback of the exception that is being handled."""
        with suppress(Exception):
            self._log.exception(event, **fields)
