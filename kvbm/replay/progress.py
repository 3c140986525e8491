"""How far the reading of a source is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvbm.progress import Watch
from kvbm.replay.source import FrameSource, Located


def watched(located: Iterable[Located], source: FrameSource) -> Iterator[Located]:
    """The same frames; a bar shows how far reading is."""
    with Watch(source.name) as watch:
        if not watch.shows:
            yield from located
            return
        for one in located:
            yield one
            watch.total = source.total
            watch.done = source.done
