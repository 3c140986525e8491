"""A bar on the terminal for reading that takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import Progress

from kvbm.replay.source import Located, Source

_PATIENCE_S = 1.0
_EVERY = 64  # frames between two looks at the clock


def watched(located: Iterable[Located], source: Source) -> Iterator[Located]:
    """The same frames; once reading has taken a second and standard error is a terminal, a bar shows how far it is."""
    if not sys.stderr.isatty():
        yield from located
        return
    began_s = time.monotonic()
    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task(source.name, total=None)
    is_shown = False
    try:
        for index, one in enumerate(located):
            yield one
            if index % _EVERY:
                continue
            if not is_shown and time.monotonic() - began_s > _PATIENCE_S:
                progress.start()
                is_shown = True
            if is_shown:
                progress.update(task, completed=source.done, total=source.total or None)
    finally:
        if is_shown:
            progress.stop()
