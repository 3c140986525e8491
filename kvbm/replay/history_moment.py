"""What was held at a moment, without a look at stays: from the counts of an open history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvbm.core.errors import MissingExtraError
from kvbm.core.ids import InstanceId
from kvbm.replay.history_counts import CountFile, total_held
from kvbm.replay.history_manifest import HistoryManifest
from kvbm.replay.history_tables import TIERS
from kvbm.replay.sql import DamagedHistoryError

_BEGIN = datetime(1970, 1, 1)  # noqa: DTZ001 - the times of a history are in UTC, without a zone


class HeldCount(NamedTuple):
    """Blocks of a namespace that one life of an instance held in a tier."""

    instance: InstanceId
    stream: str
    life: int
    tier: str
    namespace: str
    blocks: int


class Moments:
    """Counts of an open history. One thread at a time.

    Args:
        folder, history: as `read_manifest` gives it.
    Raises: SourceError: it is damaged. MissingExtraError. So do its methods.
    """

    def __init__(self, folder: Path, history: HistoryManifest) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("the Parquet library (pyarrow)", "parquet") from None
        self._arrow: Any = pyarrow
        self._data = folder / history.data
        self._lives = [(InstanceId(instance), stream, life) for instance, stream, life in history.lives]
        self._files: list[CountFile] = []
        self._namespaces: list[str] = []
        with _read(self._data, pyarrow):
            for run in history.runs:
                if run.counts is not None and run.marks is not None:
                    paths = [self._data / one.name for one in (run.counts, run.marks)]
                    self._files.append(CountFile(pyarrow, *paths))
            if history.tail.counts is not None:
                self._files.append(CountFile(pyarrow, self._data / history.tail.counts.name, None))
            if history.tail.namespaces is not None:
                table = pyarrow.parquet.read_table(self._data / history.tail.namespaces.name, columns=["namespace"])
                self._namespaces = table.column("namespace").to_pylist()

    def held_at(self, moment: datetime) -> Iterator[HeldCount]:
        """What was held after all that happened at a moment, in UTC without a zone."""
        at_us = _us(moment)
        with _read(self._data, self._arrow):
            held = total_held(file.held_at(at_us) for file in self._files)
        for row in held.tolist():
            life, namespace, tier, blocks = row
            instance, stream, number = self._lives[life]
            yield HeldCount(instance, stream, number, TIERS[tier], self._namespaces[namespace], blocks)

    def by_tier(self, moment: datetime) -> dict[str, int]:
        """Blocks in each tier after a moment."""
        held = dict.fromkeys(TIERS, 0)
        for one in self.held_at(moment):
            held[one.tier] += one.blocks
        return held

    def changed(self, since: datetime, until: datetime) -> Iterable[np.ndarray]:
        """`history_counts.COUNT_ROW` of a stretch of time, its end not counted, in pieces."""
        for file in self._files:
            with _read(self._data, self._arrow):
                yield from file.between(_us(since), _us(until))


class _read:  # noqa: N801 - a context manager
    """Has what the library says of a file be a SourceError."""

    def __init__(self, data: Path, arrow: Any) -> None:
        self._data, self._arrow = data, arrow

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, OSError | self._arrow.ArrowException):
            raise DamagedHistoryError(f"{self._data} is damaged ({error}); make the history anew") from None


def _us(moment: datetime) -> int:
    return (moment - _BEGIN) // timedelta(microseconds=1)
