"""How many blocks each instance held in each tier, by time: what an overview of a moment is made of, without its stays.

    counts   one row for each time at which blocks of one life, tier and namespace were gained or lost, in the order of
             time, GROUP_ROWS in a row group
    marks    a row group for each of those: what was held before it

What was held at a moment is one row group of marks and a part of one of counts, for each run of a history; their sum
is that of its stays, whose times they have.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.core.columns import NO_CODE
from kvbm.core.stays import CLAIMED, LASTING
from kvbm.files import write_new
from kvbm.replay.stays import begun_since

COUNT_ROW = np.dtype(
    [("time", "<i8"), ("life", "<u4"), ("namespace", "<u4"), ("tier", "u1"), ("gained", "<i8"), ("lost", "<i8")]
)
HELD_ROW = np.dtype([("life", "<u4"), ("namespace", "<u4"), ("tier", "u1"), ("blocks", "<i8")])
GROUP_ROWS = 64 << 10
_SUM_ROWS = 4 << 20  # not summed yet
_KEY = ("life", "tier", "namespace")


class StayCounts:
    """What was gained and lost, summed now and then."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._loose = 0

    def add(self, stays: np.ndarray, life: int, since: tuple[int, int]) -> None:
        """Stays of one life: their ends, and their begins where those are in that epoch and at that offset, or
        later.
        """
        stays = stays[(stays["begin"] != NO_CODE) & (stays["end"] != CLAIMED)]
        begin_us = (stays["begin_ns"] // 1000).astype(np.int64)
        # One that ended before it began, by its instance's clock, was held at no moment
        end_us = np.maximum((stays["end_ns"] // 1000).astype(np.int64), begin_us)
        begun, is_over = begun_since(stays, since), stays["end"] != LASTING
        for times, there, name in ((begin_us, begun, "gained"), (end_us, is_over, "lost")):
            rows = np.zeros(int(there.sum()), dtype=COUNT_ROW)
            if len(rows):
                rows["time"], rows["life"], rows[name] = times[there], life, 1
                rows["tier"], rows["namespace"] = stays["tier"][there], stays["namespace"][there]
                self.take(summed(rows))

    def take(self, rows: np.ndarray) -> None:
        """COUNT_ROW, in any order."""
        self._rows.append(rows)
        self._loose += len(rows)
        if self._loose > _SUM_ROWS:
            self._rows, self._loose = [self.rows()], 0

    def rows(self) -> np.ndarray:
        """All of it, by time."""
        return summed(np.concatenate(self._rows)) if self._rows else np.empty(0, dtype=COUNT_ROW)


def summed(rows: np.ndarray) -> np.ndarray:
    """One row for each time and key, by time."""
    return _summed(rows, ("time", *_KEY), ("gained", "lost"))


def held_after(rows: np.ndarray, before: np.ndarray | None = None) -> np.ndarray:
    """HELD_ROW: what is held after these, without keys of which nothing is.

    Args:
        before: HELD_ROW, held before them.
    """
    changed = np.empty(len(rows), dtype=HELD_ROW)
    for name in _KEY:
        changed[name] = rows[name]
    changed["blocks"] = rows["gained"] - rows["lost"]
    return total_held([changed] if before is None else [before, changed])


def total_held(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of several HELD_ROW."""
    held = _summed(np.concatenate([np.empty(0, dtype=HELD_ROW), *parts]), _KEY, ("blocks",))
    is_there: np.ndarray = held["blocks"] != 0
    some: np.ndarray = held[is_there]
    return some


def _summed(rows: np.ndarray, keys: Sequence[str], sums: Sequence[str]) -> np.ndarray:
    if len(rows) < 2:
        return rows
    rows = rows[np.lexsort([rows[name] for name in reversed(keys)])]
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = np.logical_or.reduce([rows[name][1:] != rows[name][:-1] for name in keys])
    begins = np.flatnonzero(is_new)
    made = rows[begins]
    for name in sums:
        made[name] = np.add.reduceat(rows[name], begins)
    return made


# -- files ------------------------------------------------------------------------------------------------------------


def write_counts(arrow: Any, rows: np.ndarray, counts: Path, marks: Path) -> None:
    """Write COUNT_ROW, by time, and its marks. Raises OSError."""
    held = np.empty(0, dtype=HELD_ROW)
    with (
        _writer(arrow, counts, COUNT_ROW) as count_file,
        _writer(arrow, marks, HELD_ROW) as mark_file,
    ):
        for begin in range(0, len(rows), GROUP_ROWS):
            part = rows[begin : begin + GROUP_ROWS]
            mark_file.write_table(_table(arrow, held), row_group_size=max(1, len(held)))
            count_file.write_table(_table(arrow, part), row_group_size=GROUP_ROWS)
            held = held_after(part, held)


def read_counts(arrow: Any, path: Path) -> np.ndarray:
    """COUNT_ROW of a file. Raises OSError, pyarrow.ArrowException."""
    return _rows(arrow.parquet.read_table(path), COUNT_ROW)


class CountFile:
    """Counts and marks, opened. Raises OSError, pyarrow.ArrowException, as its methods do."""

    def __init__(self, arrow: Any, counts: Path, marks: Path | None) -> None:
        self._counts = arrow.parquet.ParquetFile(counts)
        self._marks = arrow.parquet.ParquetFile(marks) if marks is not None else None
        metadata = self._counts.metadata
        self._firsts = [metadata.row_group(group).column(0).statistics.min for group in range(metadata.num_row_groups)]

    def held_at(self, time_us: int) -> np.ndarray:
        """HELD_ROW at a moment, in microseconds of Unix time: after all that happened then."""
        group = bisect_right(self._firsts, time_us) - 1
        if group < 0:
            return np.empty(0, dtype=HELD_ROW)
        rows = _rows(self._counts.read_row_group(group), COUNT_ROW)
        rows = rows[: np.searchsorted(rows["time"], time_us, side="right")]
        before = _rows(self._marks.read_row_group(group), HELD_ROW) if self._marks is not None else None
        return held_after(rows, before)

    def between(self, since_us: int, until_us: int) -> Iterable[np.ndarray]:
        """COUNT_ROW from one moment on and before another, by time, a row group at a time."""
        # Those that begin at that very moment may have rows of it before them
        for group in range(max(0, bisect_left(self._firsts, since_us) - 1), len(self._firsts)):
            if self._firsts[group] >= until_us:
                return
            rows = _rows(self._counts.read_row_group(group), COUNT_ROW)
            first, end = np.searchsorted(rows["time"], [since_us, until_us], side="left")
            yield rows[first:end]


def _writer(arrow: Any, path: Path, dtype: np.dtype[Any]) -> Any:
    write_new(path, b"")  # its owner's alone
    schema = _table(arrow, np.empty(0, dtype=dtype)).schema
    return arrow.parquet.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=False)


def _table(arrow: Any, rows: np.ndarray) -> Any:
    return arrow.table({name: arrow.array(np.ascontiguousarray(rows[name])) for name in rows.dtype.names or ()})


def _rows(table: Any, dtype: np.dtype[Any]) -> np.ndarray:
    rows = np.empty(table.num_rows, dtype=dtype)
    for name in dtype.names or ():
        rows[name] = table.column(name).to_numpy()
    return rows
