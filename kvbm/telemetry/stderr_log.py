"""Where kvbm's remarks go while nobody has told structlog: to standard error, since standard output is the program's
own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from types import MappingProxyType
from typing import NamedTuple, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from kvbm.telemetry.json_log import JsonFormatter, render_json, utc_now
from kvbm.terminal import plain

_EVERYTHING: Mapping[str, int] = MappingProxyType({})


class LogStyle(NamedTuple):
    """How remarks are written, and which.

    Attributes:
        level: of `logging`; those below it are left out.
        levels: first word of a remark's name → another level for it.
    """

    is_json: bool = False
    level: int = logging.NOTSET
    levels: Mapping[str, int] = _EVERYTHING

    def writes(self, method: str, event: object) -> bool:
        """Whether a remark is written."""
        level = logging.getLevelNamesMapping().get(method.upper(), logging.ERROR)
        return level >= self.levels.get(str(event).partition(".")[0], self.level)


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
    fields["timestamp"] = utc_now()
    return fields


def configure(style: LogStyle) -> None:
    """Set structlog up, from now on and for all loggers.

    Loggers are not kept (`cache_logger_on_first_use`), so that it may be called again while threads write.
    """
    _styles[:] = [style]
    by_noun: tuple[Processor, ...] = (_left_out(style),) if style.levels else ()
    structlog.configure(
        processors=[*by_noun, structlog.processors.add_log_level, stamp, *_last(style)],
        wrapper_class=structlog.make_filtering_bound_logger(min((style.level, *style.levels.values()))),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, StandardError())),
        cache_logger_on_first_use=False,
    )


def configure_libraries(style: LogStyle) -> None:
    """Set up how what libraries say by `logging` is written where nobody has taken it: warnings at least."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(JsonFormatter() if style.is_json else PlainFormatter())
        logging.lastResort.setLevel(max(logging.WARNING, style.levels.get("library", style.level)))


def is_json() -> bool:
    """Whether standard error has been set up to take nothing but JSON."""
    return _styles[0].is_json


def to_standard_error(style: LogStyle = LogStyle()) -> None:  # noqa: B008  # immutable
    """Send remarks there unless the process has set structlog up, or does so later. `logging` is the process's own."""
    if not structlog.is_configured():
        if style != LogStyle():
            configure(style)
            return
        first = [
            stamp if isinstance(one, structlog.processors.TimeStamper) else one
            for one in structlog.get_config()["processors"][:-1]  # all but the renderer
        ]
        factory = structlog.WriteLoggerFactory(cast(TextIO, StandardError()))
        structlog.configure(processors=[*first, *for_terminals()], logger_factory=factory)


_styles = [LogStyle()]  # the one that counts


def _last(style: LogStyle) -> Sequence[Processor]:
    return (render_json,) if style.is_json else for_terminals()


def _left_out(style: LogStyle) -> Processor:
    def check(logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
        if not style.writes(method, fields.get("event", "")):
            raise structlog.DropEvent
        return fields

    return check


def _with_plain_fields(logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
    return {name: plain(value) if isinstance(value, str) else value for name, value in fields.items()}


def _format_exception(out: TextIO, error: ExcInfo) -> None:
    """A traceback without the values of variables: tokens and secrets are among them."""
    words = StringIO()
    structlog.dev.plain_traceback(words, error)
    out.write("\n".join(map(plain, words.getvalue().split("\n"))))
