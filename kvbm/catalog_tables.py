"""Answers of a catalog as tables for people, whose remarks can be read on a narrow terminal, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvbm.terminal import plain

_WIDTH = 120  # of tables where standard output is no terminal
_REMARK_WIDTH = 30  # columns in which a remark of more can be read
_BETWEEN = 2  # columns


class _Row(NamedTuple):
    cells: list[str]
    remark: str


class Listing:
    """Rows of cells and, where there is one, a remark on each: in a last column where that has room, else below.

    Args:
        columns: their names; `#` begins that of one of numbers.
        remark: the name of the last column; "" where there is none.
    """

    def __init__(self, *columns: str, remark: str = "") -> None:
        self._columns, self._remark = columns, remark
        self._rows: list[_Row] = []

    def add(self, *cells: object, remark: str = "") -> None:
        """A row."""
        self._rows.append(_Row([plain(str(cell)) for cell in cells], plain(remark)))

    def print(self, console: Console) -> None:
        """Print all of it."""
        bare = self._table(with_remarks=False)
        if not self._remark:
            console.print(bare)
            return
        taken = Measurement.get(console, console.options.update(max_width=1 << 16), bare).maximum
        longest = max((len(row.remark) for row in self._rows), default=0)
        if console.width - taken - _BETWEEN >= min(_REMARK_WIDTH, longest):
            console.print(self._table(with_remarks=True))
            return
        console.print(bare)
        for row in self._rows:
            if row.remark:
                console.print(f"{row.cells[0]}: {row.remark}", soft_wrap=True)

    def _table(self, with_remarks: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in self._columns:
            is_number = name.startswith("#")
            table.add_column(
                name.removeprefix("#"), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
            )
        if with_remarks:
            table.add_column(self._remark, overflow="fold")
        for row in self._rows:
            table.add_row(*map(Text, [*row.cells, row.remark] if with_remarks else row.cells))
        return table


def print_told(parts: Sequence[Listing | str]) -> None:
    """Print tables and sentences to standard output."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=max(_WIDTH, console.width))
    for part in parts:
        if isinstance(part, Listing):
            part.print(console)
        else:
            console.print(plain(part), soft_wrap=True)
