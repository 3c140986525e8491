"""Rows of stays, sorted by block and time in bounded memory: many are put into files by the first byte of their block,
each of which is then sorted by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from kvbm.files import write_new
from kvbm.replay.history_tables import LIFE_ROW

_HELD_ROWS = 1 << 19


class Spills:
    """See the module. Use as a context manager, which removes what is left.

    Args:
        folder: where files go.

    Attributes:
        rows: how many were added.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: list[np.ndarray] = []
        self._held_rows = 0
        self.rows = 0
        self._files: dict[int, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full device: what is not written yet is not wanted any more
                file.close()
            Path(file.name).unlink(missing_ok=True)
        self._files.clear()

    def add(self, stays: np.ndarray, life: int) -> None:
        """Append stays of a life of an instance. Raises OSError."""
        if not len(stays):
            return
        rows = np.empty(len(stays), dtype=LIFE_ROW)
        rows["stay"], rows["life"] = stays, life
        self._held.append(rows)
        self._held_rows += len(rows)
        self.rows += len(rows)
        if self._held_rows >= _HELD_ROWS:
            self._spill()

    def sorted(self) -> Iterator[np.ndarray]:
        """All rows, each piece behind the one before, by block, then by begin. Raises OSError."""
        if not self._files:
            if self._held:
                yield _sorted(np.concatenate(self._held))
            return
        self._spill()
        for byte in sorted(self._files):
            file = self._files.pop(byte)
            file.flush()
            path = Path(file.name)
            rows = np.fromfile(path, dtype=LIFE_ROW)
            file.close()
            path.unlink()
            yield _sorted(rows)

    def _spill(self) -> None:
        if not self._held:
            return
        rows = np.concatenate(self._held)
        self._held, self._held_rows = [], 0
        first = rows["stay"]["hash"][:, 0]
        order = np.argsort(first, kind="stable")
        bytes_there, begins = np.unique(first[order], return_index=True)
        for byte, begin, end in zip(bytes_there, begins, [*begins[1:], len(order)], strict=True):
            self._file(int(byte)).write(rows[order[begin:end]].tobytes())

    def _file(self, byte: int) -> BinaryIO:
        file = self._files.get(byte)
        if file is None:
            path = self._folder / f".spill-{byte:02x}"
            write_new(path, b"")
            file = self._files[byte] = path.open("ab")
        return file


def joined(pieces: Iterable[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """The same rows in fewer pieces: a row group has its own dictionaries, so it should not be small."""
    held: list[np.ndarray] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= rows:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def _sorted(rows: np.ndarray) -> np.ndarray:
    blocks = np.ascontiguousarray(rows["stay"]["hash"]).view(">u8").reshape(-1, 2)
    stay = rows["stay"]
    keys = (stay["begin_offset"], stay["epoch"], stay["begin_ns"], blocks[:, 1], blocks[:, 0])
    return rows[np.lexsort(keys)]
