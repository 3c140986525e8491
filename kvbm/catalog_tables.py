"""Answers of a catalog as tables for people, whose names, numbers and remarks can be read on a narrow terminal, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbm.terminal import plain

_WIDTH = 120  # of tables where standard output is no terminal
_REMARK_WIDTH = 30  # columns in which a remark of more can be read
_WRAPPED_WIDTH = 12  # columns that a text which may be wrapped has at least
_BETWEEN = 2  # columns
_MANY = 10_000  # a number from here on may be shortened


class Filled(NamedTuple):
    """A cell: so many of so many, 0 where that is not known."""

    held: int
    slots: int


class _Row(NamedTuple):
    cells: list[str]
    short: list[str]
    remark: str


class _Form(NamedTuple):
    """How a table is drawn.

    Attributes:
        has_remarks: beside the rows, not below.
        is_narrow: each word of a number's heading has a line.
        is_short: large numbers are thousands and millions.
    """

    has_remarks: bool
    is_narrow: bool = False
    is_short: bool = False


class Listing:
    """Rows of cells and, where there is one, a remark on each: in a last column where that has room, else below.

    On a narrow terminal headings of numbers take more lines, then large numbers are shortened. Nothing but a text that
    may be wrapped ever is: where no form has room, lines are longer than the terminal.

    Args:
        columns: their names; `#` begins that of one of numbers, `~` that of a text that may be wrapped.
        remark: the name of the last column; "" where there is none.
    """

    def __init__(self, *columns: str, remark: str = "") -> None:
        self._columns, self._remark = columns, remark
        self._rows: list[_Row] = []

    def add(self, *cells: object, remark: str = "") -> None:
        """A row."""
        self._rows.append(_Row([_cell(cell) for cell in cells], [_cell(cell, True) for cell in cells], plain(remark)))

    def print(self, console: Console) -> None:
        """Print all of it."""
        longest = max((len(row.remark) for row in self._rows), default=0)
        if self._remark and console.width - self._width(_Form(False)) - _BETWEEN >= min(_REMARK_WIDTH, longest):
            self._draw(console, _Form(True))
            return
        forms = [_Form(False), _Form(False, is_narrow=True), _Form(False, True, is_short=True)]
        self._draw(console, next((one for one in forms if self._width(one) <= console.width), forms[-1]))
        for row in self._rows:
            if row.remark:
                console.print(f"{row.cells[0]}: {row.remark}", soft_wrap=True)

    def _draw(self, console: Console, form: _Form) -> None:
        width = console.width
        console.width = max(width, self._width(form))
        console.print(self._table(form))
        console.width = width

    def _width(self, form: _Form) -> int:
        """The columns that it takes at least, without remarks."""
        widths = [
            max(cell_len(line) for cell in [name, *cells] for line in cell.split("\n"))
            if not self._columns[at].startswith("~")
            else _WRAPPED_WIDTH
            for at, (name, *cells) in enumerate(zip(self._names(form), *self._cells(form), strict=True))
        ]
        return sum(widths) + len(widths) * (_BETWEEN + 1)

    def _names(self, form: _Form) -> list[str]:
        names = [one.lstrip("#~") for one in self._columns]
        if not form.is_narrow:
            return names
        return [
            name.replace(" / ", "/").replace(" ", "\n") if one.startswith("#") else name
            for one, name in zip(self._columns, names, strict=True)
        ]

    def _cells(self, form: _Form) -> list[list[str]]:
        return [row.short if form.is_short else row.cells for row in self._rows]

    def _table(self, form: _Form) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, name in zip(self._columns, self._names(form), strict=True):
            table.add_column(
                Text(name),
                justify="right" if column.startswith("#") else "left",
                no_wrap=not column.startswith("~"),
                overflow="fold",
            )
        if form.has_remarks:
            table.add_column(self._remark, overflow="fold")
        for row, cells in zip(self._rows, self._cells(form), strict=True):
            table.add_row(*map(Text, [*cells, row.remark] if form.has_remarks else cells))
        return table


def _cell(value: object, is_short: bool = False) -> str:
    number = _shortened if is_short else str
    match value:
        case Filled(held, slots):
            return f"{number(held)} / {number(slots) if slots else '?'}"
        case int():
            return number(value)
        case _:
            return plain(str(value))


def _shortened(number: int) -> str:
    """As `31k` or `1.2M`, rounded down."""
    if number < _MANY:
        return str(number)
    return f"{number // 1000}k" if number < 1_000_000 else f"{number // 100_000 / 10:.1f}M"


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
