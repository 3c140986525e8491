"""Rows copied natively against rows copied by numpy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm._native import RowCopier, checksums
from kvbm.core.checksum import crc32c
from kvbm.core.errors import LayoutError
from kvbm.pools.host.rows import RowCopies
from tests.examples import examples

COPIERS: list[RowCopies] = [RowCopier(1), RowCopier(3)]


class NumpyRows:
    """Row copies as numpy does them, in the caller's thread: what the native ones are held to."""

    threads = 1

    def copy_rows(
        self,
        target: np.ndarray,
        target_at: np.ndarray | None,
        source: np.ndarray,
        source_at: np.ndarray | None,
        checksums: np.ndarray | None = None,
    ) -> None:
        """As `RowCopies.copy_rows`."""
        to, of = _indexes(target, target_at), _indexes(source, source_at)
        if len(to) != len(of) or target.shape[1] != source.shape[1]:
            raise LayoutError(
                f"{len(of)} rows of {source.shape[1]} bytes cannot become {len(to)} rows of {target.shape[1]} bytes"
            )
        if checksums is not None and checksums.shape != (len(of),):
            raise LayoutError(f"{len(of)} rows come with room for {len(checksums)} checksums")
        target[to] = source[of]
        if checksums is not None:
            checksums[:] = self.checksum_rows(source, source_at)

    def checksum_rows(self, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """As `RowCopies.checksum_rows`."""
        indexes = _indexes(rows, at)
        return np.fromiter((crc32c(rows[index].tobytes()) for index in indexes), dtype=np.uint32, count=len(indexes))


def _indexes(rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
    if at is None:
        return np.arange(len(rows))
    outside = at[(at < 0) | (at >= len(rows))]
    if len(outside):
        raise LayoutError(f"row {outside[0]} is wanted of {len(rows)}")
    return at


@st.composite
def _buffers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two buffers of rows of one size: whole arrays, or columns of wider ones."""
    row_bytes = draw(st.integers(1, 300))

    def buffer(fill: int) -> np.ndarray:
        count, before, behind = draw(st.integers(0, 12)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
        wide = np.full((count, before + row_bytes + behind), fill, dtype=np.uint8)
        wide[:] = np.random.default_rng(fill).integers(0, 256, wide.shape, dtype=np.uint8)
        return wide[:, before : before + row_bytes]

    return buffer(1), buffer(2)


@settings(max_examples=examples(150), deadline=None)
@given(buffers=_buffers(), data=st.data())
def test_native_and_numpy_copies_agree_and_refuse_alike(
    buffers: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    target, source = buffers
    count = data.draw(st.integers(0, 14))
    anywhere = st.integers(-1, 12)
    source_at = data.draw(st.none() | st.lists(anywhere, min_size=count, max_size=count))
    target_at = data.draw(st.none() | st.lists(anywhere, min_size=count, max_size=count, unique=True))
    at = [None if rows is None else np.array(rows, dtype=np.int64) for rows in (target_at, source_at)]

    def outcome(copier: RowCopies) -> tuple[bytes, bytes] | str:
        base = np.asarray(target.base).copy()
        first = (target.ctypes.data - np.asarray(target.base).ctypes.data) if target.size else 0
        room = base[:, first : first + target.shape[1]]
        sums = np.full(len(source) if at[1] is None else len(at[1]), 7, dtype=np.uint32)
        try:
            copier.copy_rows(room, at[0], source, at[1], sums)
        except LayoutError:
            assert np.array_equal(base, np.asarray(target.base)), "a byte has moved"
            return "refused"
        if len(sums):
            assert np.array_equal(sums, copier.checksum_rows(source, at[1]))
        return base.tobytes(), sums.tobytes()

    expected = outcome(NumpyRows())
    for copier in COPIERS:
        assert outcome(copier) == expected


def test_large_rows_arrive_with_their_checksums_from_several_threads_at_once() -> None:
    copier = RowCopier(3)
    source = np.random.default_rng(0).integers(0, 256, (6, 1_000_003), dtype=np.uint8)
    expected = checksums(source)
    order = np.array([4, 0, 5, 2, 1, 3])
    wrong: list[int] = []

    def copy(caller: int) -> None:
        for _ in range(5):
            target, sums = np.zeros_like(source), np.zeros(6, dtype=np.uint32)
            copier.copy_rows(target, order, source, None, sums)
            if not (np.array_equal(target[order], source) and np.array_equal(sums, expected)):
                wrong.append(caller)

    threads = [threading.Thread(target=copy, args=(caller,)) for caller in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_rows_whose_bytes_lie_apart_are_refused() -> None:
    rows = np.zeros((4, 20), dtype=np.uint8)
    with pytest.raises(LayoutError, match="side by side"):
        RowCopier(1).copy_rows(rows[:, :10], None, rows[:, ::2], None)
    with pytest.raises(LayoutError, match="side by side"):
        RowCopier(1).checksum_rows(rows[:, ::2])


def test_a_target_that_nobody_may_write_to_and_room_of_another_kind_are_refused() -> None:
    source, target = np.ones((2, 8), dtype=np.uint8), np.zeros((2, 8), dtype=np.uint8)
    target.flags.writeable = False
    with pytest.raises(TypeError):
        RowCopier(1).copy_rows(target, None, source, None)
    with pytest.raises(TypeError):
        RowCopier(1).copy_rows(np.zeros((2, 8), dtype=np.uint8), None, source, None, np.zeros(2, dtype=np.int32))
    assert not target.any()
