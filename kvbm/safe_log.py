"""Logging that never raises: structlog's, and a line that cannot be written is dropped.

What a process does with log lines is its own choice, so anything may come of one: a disk that is full, a stream that is
closed, a traceback that wants to read source files while there are no descriptors. A thread that ends for that leaves
its work undone for good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog


class SafeLog:
    """The log of one module. Any thread."""

    def __init__(self) -> None:
        self._log: Any = structlog.get_logger()  # as the process has set structlog up by the time of the first remark

    def says_debug(self) -> bool:
        """Whether `debug` says anything in this process, as it is set up now: for who would make remarks of every
        request. It takes microseconds.
        """
        with suppress(Exception):
            return bool(self._log.bind().is_enabled_for(logging.DEBUG))
        return True

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


REMARK_EVERY_S = 10.0
_MOST_KINDS = 64


class RateLimitedLog:
    """A log whose lines are each written a few times in a while, however often there is cause: for what others can
    cause as often as they like.

    Args:
        most: of one event, in `every_s`.
    """

    def __init__(
        self, every_s: float = REMARK_EVERY_S, clock: Callable[[], float] = time.monotonic, most: int = 1
    ) -> None:
        self._every_s, self._clock, self._most = every_s, clock, most
        self._said: dict[str, tuple[float, int]] = {}  # event → since when it counts, and how often there was cause
        self._log = SafeLog()

    def due(self, event: str) -> int | None:
        """None where it was said often enough just now; else how often it was not said before."""
        now_s = self._clock()
        begin_s, causes = self._said.get(event, (now_s, 0))
        if now_s < begin_s + self._every_s:
            if len(self._said) >= _MOST_KINDS and event not in self._said:
                self._said.clear()
            self._said[event] = (begin_s, causes + 1)
            return 0 if causes < self._most else None
        self._said[event] = (now_s, 1)
        return max(0, causes - self._most)

    def info(self, event: str, **fields: object) -> None:
        """`SafeLog.info`, if it is due."""
        more = self.due(event)
        if more is not None:
            self._log.info(event, **fields, **_unsaid(more))

    def warn(self, event: str, **fields: object) -> None:
        """`SafeLog.warning`, if it is due."""
        more = self.due(event)
        if more is not None:
            self._log.warning(event, **fields, **_unsaid(more))


def _unsaid(more: int) -> dict[str, object]:
    """How many lines before this one were left out, where there were any."""
    return {"more_before": more} if more else {}
