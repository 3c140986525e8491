"""Remarks as JSON for collectors of logs: one object a line, in ASCII, whatever the fields hold.

    {"time":"2026-12-01T08:00:00.123Z","level":"info","event":"catalog.started","stream":"KVBM","stored":0}

Time, level and event come first. A field of one of these names has "_" at its end. A traceback is the field
`exception`, without the values of variables. Bytes, and characters that are none, are written as escapes, what JSON
does not know as its `repr`. What is very long or deep is cut, so that journald and collectors take a line whole.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from io import StringIO
from itertools import islice
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

_MOST_CHARACTERS = 8192  # of a text; of a longer one the middle is left out
_MOST_ITEMS = 64
_MOST_DEPTH = 4
_MOST_LINE = 40_000  # journald takes 48 KiB
_HEAD = ("time", "level", "event")


def utc_now() -> str:
    """ISO 8601, UTC, milliseconds."""
    return _utc(datetime.now(UTC))


def json_line(time: str, level: str, event: object, fields: Mapping[str, object]) -> str:
    """One remark. It never raises for what the fields hold."""
    line: dict[str, object] = {"time": time, "level": level, "event": _text(event)}
    for name, value in fields.items():
        key = _text(name)
        line[f"{key}_" if key in _HEAD else key] = _value(value)
    text = _dumped(line)
    if len(text) > _MOST_LINE:
        shown = _text(text[: _MOST_LINE // 4])
        text = _dumped({one: line[one] for one in _HEAD} | {"cut": len(text), "beginning": shown})
    return text


def render_json(logger: WrappedLogger, method: str, fields: EventDict) -> str:
    """The last step of structlog's."""
    rest = dict(fields)
    time, event = rest.pop("timestamp", None) or utc_now(), rest.pop("event", "")
    level = str(rest.pop("level", method))
    trace = _trace(rest.pop("exc_info", None))
    if trace:
        rest["exception"] = trace
    return json_line(str(time), level, event, rest)


class JsonFormatter(logging.Formatter):
    """For what libraries say by `logging`: the event is library.logged."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        try:
            words = record.getMessage()
        except Exception as error:  # noqa: BLE001  # arguments of others that do not fit their words
            words = f"{record.msg!r} ({type(error).__name__})"
        fields: dict[str, object] = {"logger": record.name, "message": words}
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = _trace(record.exc_info)
        time = _utc(datetime.fromtimestamp(record.created, UTC))
        return json_line(time, record.levelname.lower(), "library.logged", fields)


# -- inside -----------------------------------------------------------------------------------------------------------


def _utc(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _dumped(line: Mapping[str, object]) -> str:
    return json.dumps(line, separators=(",", ":"), allow_nan=False)


def _trace(found: Any) -> str:
    """A traceback; "" for none. `found` is what structlog and logging take for `exc_info`."""
    if not found:
        return ""
    if isinstance(found, BaseException):
        found = (type(found), found, found.__traceback__)
    kind, error, trace = found if isinstance(found, tuple) else sys.exc_info()
    if kind is None or error is None:
        return ""
    words = StringIO()
    try:
        structlog.dev.plain_traceback(words, (kind, error, trace))
    except Exception as failure:  # noqa: BLE001  # words of others, and files that cannot be read now
        return f"{kind.__name__} (its traceback cannot be written: {type(failure).__name__})"
    return words.getvalue().strip("\n")


def _text(value: object) -> str:
    text = value if isinstance(value, str) else _repr(value)
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # a stranger's __repr__
        return f"<{type(value).__name__}>"


def _value(value: object, depth: int = 0) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, bytes | bytearray):
        return _text(bytes(value[: 2 * _MOST_CHARACTERS]).decode("utf-8", "backslashreplace"))
    if depth < _MOST_DEPTH:
        try:
            if isinstance(value, Mapping):
                return {_text(key): _value(one, depth + 1) for key, one in islice(value.items(), _MOST_ITEMS)}
            if isinstance(value, list | tuple | Set):
                return [_value(one, depth + 1) for one in islice(value, _MOST_ITEMS)]
        except RuntimeError:  # another thread changes it
            return f"<{type(value).__name__}>"
    return _text(value)
