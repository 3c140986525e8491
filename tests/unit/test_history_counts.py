"""Counts of a history, by time: what lies in which row group makes no difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvbm.replay.history_counts import COUNT_ROW, CountFile, write_counts
from tests.extras import needed


def test_rows_of_one_moment_may_lie_in_several_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needed("pyarrow.parquet", "sql")
    arrow = needed("pyarrow", "sql")
    monkeypatch.setattr("kvbm.replay.history_counts.GROUP_ROWS", 2)
    rows = np.zeros(9, dtype=COUNT_ROW)
    rows["time"], rows["life"], rows["gained"] = [1, 5, 5, 5, 5, 5, 5, 7, 9], range(9), 1
    paths = [tmp_path / name for name in ("counts", "marks")]
    write_counts(arrow, rows, *paths)
    opened = CountFile(arrow, *paths)
    lives = list(enumerate(rows["time"].tolist()))
    for since in range(11):
        for until in range(since, 11):
            found = [life for one in opened.between(since, until) for life in one["life"].tolist()]
            assert found == [life for life, time in lives if since <= time < until]
        assert opened.held_at(since)["life"].tolist() == [life for life, time in lives if time <= since]
