"""Where kvbm's remarks go while nobody has told structlog: to standard error, since standard output is the program's own."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


class StandardError:
    """Whatever standard error is by then. Where the disk behind it is full, or it is closed, a remark is lost and nothing else: no
    loop ends for want of a word."""

    def write(self, text: str) -> None:
        """Write, if it can be done."""
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if it can be done."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def to_standard_error() -> None:
    """Send remarks there unless the process has set structlog up, or does so later."""
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(cast(TextIO, StandardError())))
