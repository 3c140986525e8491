"""Several sorted sets of Parquet files as one sorted stream of tables, in the memory of some row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_KEYS = [("block", "ascending"), ("began", "ascending"), ("epoch", "ascending"), ("begin_offset", "ascending")]


def merged(arrow: Any, sets: Sequence[Sequence[Path]], rows: int) -> Iterator[Any]:
    """Tables of at least so many rows each, but for the last.

    Args:
        sets: of files with the columns of stays, each in the order of blocks.
    Raises: OSError, pyarrow.ArrowException.
    """
    inputs = [_Input(arrow, paths) for paths in sets]
    held: list[Any] = []
    while live := [one for one in inputs if one.fill()]:
        # Behind the least of the last blocks that were read, another input may have what comes before
        limit = min((one.last for one in live if not one.is_over), default=None)
        taken = [part for one in live if (part := one.take_before(limit)).num_rows]
        if not taken:
            for one in live:
                if not one.is_over and one.last == limit:
                    one.read()
            continue
        held.append(_sorted(arrow, taken))
        if sum(part.num_rows for part in held) >= rows:
            yield _sorted(arrow, held)
            held = []
    if held:
        yield _sorted(arrow, held)


class _Input:
    """One set of files."""

    def __init__(self, arrow: Any, paths: Sequence[Path]) -> None:
        self._arrow = arrow
        self._groups = self._read_groups(paths)
        self._table: Any = None
        self.is_over = False  # nothing is left to read

    @property
    def last(self) -> str:
        """The last block that was read and not taken."""
        block: str = self._table.column("block")[-1].as_py()
        return block

    def fill(self) -> bool:
        """Have something that is not taken. Returns whether anything is left."""
        while not self.is_over and (self._table is None or not self._table.num_rows):
            self.read()
        return self._table is not None and self._table.num_rows > 0

    def read(self) -> None:
        """One row group more."""
        group = next(self._groups, None)
        if group is None:
            self.is_over = True
        elif self._table is None or not self._table.num_rows:
            self._table = group
        else:
            self._table = self._arrow.concat_tables([self._table, group])

    def take_before(self, limit: str | None) -> Any:
        """The rows of blocks before a limit; all for None."""
        table = self._table
        count = table.num_rows
        if limit is not None:
            compute = self._arrow.compute
            count = compute.sum(compute.less(table.column("block"), limit)).as_py() or 0
        self._table = table.slice(count)
        return table.slice(0, count)

    def _read_groups(self, paths: Sequence[Path]) -> Iterator[Any]:
        for path in paths:
            with self._arrow.parquet.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group)


def _sorted(arrow: Any, parts: Sequence[Any]) -> Any:
    table = arrow.concat_tables(parts).unify_dictionaries().combine_chunks()
    return table if len(parts) == 1 else table.sort_by(_KEYS)
