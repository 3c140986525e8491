"""A bar on the terminal for work that takes a while."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_S = 1.0
_EVERY = 64  # steps between two looks at the clock
_allowed = [True]


def allow_bars(yes: bool) -> None:
    """Whether bars may be shown in this process: not with --quiet or --json, and not among log lines as JSON."""
    _allowed[0] = yes


def bars_are_shown() -> bool:
    """Whether they may be, and standard error, where they go, is a terminal."""
    return _allowed[0] and _is_terminal()


class Watch:
    """Once work has taken a second and standard error is a terminal, a bar shows how far it is. A context manager.

    The bar also shows while one step takes long. Where the terminal is gone, or no thread starts, there is none.

    Args:
        name: what is worked on.
        total: how much there is; 0 while that is not known.

    Attributes:
        shows: whether there can be a bar.
    """

    def __init__(self, name: str, total: int = 0) -> None:
        self.total = total
        self._name = name
        self._done = 0
        self._steps = 0
        self.shows = bars_are_shown()
        self._began_s = time.monotonic()
        self._lock = threading.Lock()  # held while the bar begins or ends
        self._has_ended = False
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._timer = threading.Timer(_PATIENCE_S, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self.shows:
            with suppress(RuntimeError):  # no thread starts: then a step begins the bar
                self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._has_ended = True
            if self._progress is not None:
                with suppress(OSError, ValueError):
                    self._progress.stop()

    @property
    def done(self) -> int:
        """How much was done, in the unit of `total`."""
        return self._done

    @done.setter
    def done(self, done: int) -> None:
        self._done = done
        self._steps += 1
        if self.shows and (self._steps % _EVERY == 1 or 0 < self.total <= _EVERY):
            self._show()

    def _show(self) -> None:
        if self._progress is None:
            if time.monotonic() - self._began_s < _PATIENCE_S:
                return
            self._begin()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done, total=self.total or None)

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        with self._lock:
            if self._progress is not None or self._has_ended:
                return
            try:
                # Standard output is the answers' own, even where it is a terminal too
                progress = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False)
                self._task = progress.add_task(self._name, total=self.total or None, completed=self._done)
                progress.start()
            except (OSError, ValueError, RuntimeError):
                self.shows = False
                return
            self._progress = progress


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
