"""Answers of a catalog as tables for people, whose names, numbers and remarks can be read on a narrow terminal, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbm.core.overview import TenantsTold
from kvbm.terminal import plain

_WIDTH = 120  # of tables where standard output is no terminal
_REMARK_WIDTH = 30  # columns in which a remark of more can be read
_WRAPPED_WIDTH = 12  # columns that a text which may be wrapped has at least
_BETWEEN = 2  # columns
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
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


def tenant_rows(told: TenantsTold) -> list[dict[str, object]]:
    """A row for each tenant, with the fields of TenantColumns."""
    columns = msgspec.structs.asdict(told.tenants)
    columns.pop("more")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def tenant_table(told: TenantsTold) -> list[Listing | str]:
    """Tenants against their limits."""
    tenants, all_blocks = told.tenants, sum(pool.blocks for pool in told.pools)
    if not tenants.tenant:
        return ["the catalog knows no tenant yet: no instance has named a namespace, and there are no limits"]
    table = Listing(
        "tenant",
        *("#namespaces", "#instances", "#blocks in pools", "#in pools", "#of all", "#quota", "#of quota"),
        *("#HOST limit", "#NVMe limit"),
        remark="remark",
    )
    parts = (tenants.namespaces, tenants.instances, tenants.blocks, tenants.held, tenants.quota)
    limits = (tenants.host_quota, tenants.nvme_quota)
    for name, spaces, instances, blocks, held, quota, host, nvme in zip(tenants.tenant, *parts, *limits, strict=True):
        is_above = held is not None and quota is not None and held > quota
        table.add(
            {"": "(none)", "*": "* (others)"}.get(name, name),
            *(spaces, instances, blocks),
            "?" if held is None else size_words(held),
            _percent(blocks, all_blocks),
            _limit_words(quota),
            "" if held is None else _percent(held, quota),
            *(_limit_words(host), _limit_words(nvme)),
            remark="above its quota: the janitor's next run takes what was least recently used" if is_above else "",
        )
    told_more: list[Listing | str] = [f"{tenants.more} more tenants have less"] if tenants.more else []
    return [table, *told_more]


def size_words(size: int) -> str:
    """A number of bytes in the largest unit of which it is one at least."""
    power = min(max(0, size.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{size / (1 << 10 * power):.1f} {_UNITS[power]}" if power else f"{size} B"


def _limit_words(size: int | None) -> str:
    return "" if size is None else size_words(size)


def _percent(part: int, whole: int | None) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


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
