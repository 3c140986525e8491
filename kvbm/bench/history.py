"""`kvbm bench history`: a log folded into a history, and the questions that `kvbm-replay` asks it.

Instances fill their pools and replace half of what is in them, so there are twice as many block events as residencies
at the end, over ten hours of their clocks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from kvbm.assembly import NATIVE, NATIVE_STAYS
from kvbm.bench.ingest import RUN_BLOCKS, Churn
from kvbm.bench.measure import Row, Sample, row_of, timed
from kvbm.replay.history import write_history
from kvbm.replay.history_answers import HistoryAnswers
from kvbm.replay.opening import open_source
from kvbm.replay.questions import changes, tenants, why
from kvbm.replay.sql import MEMORY_BYTES, HistoryDatabase

_MOST_SLOTS = 1_000_000  # of an instance
_LONG_S, _STRETCH = 36_000, timedelta(minutes=5)
_BEGIN_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z
_BEGIN = datetime(2026, 1, 1)  # noqa: DTZ001 - histories are in UTC, without a zone
_NAMES = ("history_build_s", "asof_10m_s", "block_life_s", "changes_5min_s", "overview_s")


def bench_history(live: int, samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """Making it; what was held at a moment, by tenant and tier; one block's life; what changed in five minutes."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as above:
        capture, folder = Path(above) / "capture.kvbm", Path(above) / "history"
        _write(capture, live, seed)
        built = [
            timed(lambda: write_history(open_source(str(capture)), folder, NATIVE, NATIVE_STAYS, anew=True))
            for _ in "ab"
        ]
        with HistoryDatabase(folder) as history:
            size = history.manifest.bytes / max(1, history.manifest.stays)
            blocks = [row[0] for row in history.ask("SELECT block FROM history USING SAMPLE 1000 ROWS").rows]
            moments = itertools.cycle(_BEGIN + timedelta(seconds=_LONG_S * part / 16) for part in range(4, 16))
            block = itertools.cycle(blocks)
            taken: list[list[Sample]] = [
                built[1:],
                _taken(samples, lambda: tenants(history, next(moments))),
                _taken(20 * samples, lambda: why(history, next(block))),
                _taken(samples, lambda: _changes(history, next(moments))),
            ]
        taken.append(_overviews(folder, samples, moments))
    words = (
        f"a history of {live:,} residencies and {2 * live:,} block events, made",
        "what was held at a moment, by tenant and tier",
        "why: a block's life",
        "what changed in five minutes",
        "an overview of a moment, as a catalog's page asks it",
    )
    rows = [
        row_of(what, "s", [sample.wall_s for sample in found], found) for what, found in zip(words, taken, strict=True)
    ]
    for row, goal in zip(rows, ("", "2", "0.2", "", "0.5"), strict=True):
        row.goal = goal
    numbers = {name: row.value for name, row in zip(_NAMES, rows, strict=True)}
    return rows, numbers | {"history_bytes_per_stay": size}


def _overviews(folder: Path, samples: int, moments: Iterator[datetime]) -> list[Sample]:
    answers = HistoryAnswers(folder, MEMORY_BYTES)
    try:
        return _taken(10 * samples, lambda: answers.overview(next(moments).isoformat()))
    finally:
        answers.close()


def _changes(history: HistoryDatabase, moment: datetime) -> None:
    changes(history, moment, moment + _STRETCH)


def _taken(count: int, work: Callable[[], object]) -> list[Sample]:
    """The first warms up."""
    return [timed(work) for _ in range(count + 1)][1:]


def _write(capture: Path, live: int, seed: int) -> None:
    """The frames of all instances, one after the other."""
    slots = min(live, _MOST_SLOTS)
    with capture.open("wb") as file:
        for number in range(-(-live // slots)):
            runs = slots * 3 // (2 * RUN_BLOCKS)
            writer = Churn(f"instance-{number}", seed + number, slots, _clock(runs // 8))
            for frame in writer.frames(runs):
                file.write(frame.data)


def _clock(frames: int) -> Callable[[], int]:
    """Times that spread so many frames evenly."""
    times: Iterator[int] = itertools.count(_BEGIN_NS, _LONG_S * 1_000_000_000 // max(1, frames))
    return lambda: next(times)
