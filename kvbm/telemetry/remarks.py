"""Where kvbm's remarks go while nobody has told structlog: to standard error, since standard output is the program's own."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


class _StandardError:
    """Whatever standard error is by then. A remark that cannot be written is lost, and nothing else."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def to_standard_error() -> None:
    """Send remarks there unless the process has set structlog up, or does so later."""
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())))
