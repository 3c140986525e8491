"""Where kvbm's remarks go while nobody has told structlog: to standard error, since standard output is the program's
own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from io import StringIO
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from kvbm.terminal import plain


class StandardError:
    """Whatever standard error is by then.

    Where the disk behind it is full, or it is closed, a remark is lost and nothing else: no loop ends for want of a
    word.
    """

    def write(self, text: str) -> None:
        """Write, if it can be done."""
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if it can be done."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def for_terminals() -> Sequence[Processor]:
    """The last steps of a remark that people read: what others have named, and their words in an error, are `plain`."""
    renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_format_exception)
    return (_with_plain_fields, renderer)


class PlainFormatter(logging.Formatter):
    """For what libraries say by `logging`: their words may hold those of a caller."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return "\n".join(map(plain, super().format(record).split("\n")))


def stamp(logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
    """Say when: ISO 8601, UTC, milliseconds; engines and services alike."""
    fields["timestamp"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return fields


def to_standard_error() -> None:
    """Send remarks there unless the process has set structlog up, or does so later."""
    if not structlog.is_configured():
        first = [
            stamp if isinstance(one, structlog.processors.TimeStamper) else one
            for one in structlog.get_config()["processors"][:-1]  # all but the renderer
        ]
        factory = structlog.PrintLoggerFactory(cast(TextIO, StandardError()))
        structlog.configure(processors=[*first, *for_terminals()], logger_factory=factory)


def _with_plain_fields(logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
    return {name: plain(value) if isinstance(value, str) else value for name, value in fields.items()}


def _format_exception(out: TextIO, error: ExcInfo) -> None:
    """A traceback without the values of variables: tokens and secrets are among them."""
    words = StringIO()
    structlog.dev.plain_traceback(words, error)
    out.write("\n".join(map(plain, words.getvalue().split("\n"))))
