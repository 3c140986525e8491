"""A bar on the terminal for work that takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, TaskID

from kvbm.replay.source import FrameSource, Located

_PATIENCE_S = 1.0
_EVERY = 64  # steps between two looks at the clock


class Watch:
    """Once work has taken a second and standard error is a terminal, a bar shows how far it is. A context manager.

    Args:
        name: what is worked on.
        total: how much there is; 0 while that is not known.
    """

    def __init__(self, name: str, total: int = 0) -> None:
        self.total = total
        self._name = name
        self._done = 0
        self._steps = 0
        self._is_terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def done(self) -> int:
        """How much was done, in the unit of `total`."""
        return self._done

    @done.setter
    def done(self, done: int) -> None:
        self._done = done
        self._steps += 1
        if self._is_terminal and self._steps % _EVERY == 1:
            self._show()

    def _show(self) -> None:
        if self._progress is None:
            if time.monotonic() - self._began_s < _PATIENCE_S:
                return
            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._name, total=None)
            self._progress.start()
        self._progress.update(self._task, completed=self._done, total=self.total or None)


def watched(located: Iterable[Located], source: FrameSource) -> Iterator[Located]:
    """The same frames; a bar shows how far reading is."""
    if not sys.stderr.isatty():
        yield from located
        return
    with Watch(source.name) as watch:
        for one in located:
            yield one
            watch.total = source.total
            watch.done = source.done
