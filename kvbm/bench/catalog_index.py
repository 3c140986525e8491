"""The parts of `kvbm bench catalog` that need the index alone, in this process: questions beside frames that its own
thread applies, and the longest frame while a checkpoint is written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvbm.bench.index import LiveSet, ask_beside_runs, pause_beside_checkpoint
from kvbm.bench.measure import Found, percentile, row_of

CHECKPOINT_LIVE = 50_000_000
_EVENTS_PER_S = 1_000_000
_QUESTIONS = 20_000  # of each sample


def bench_small_frames(live: int, samples: int, seed: int) -> Found:
    """How long a prefix query takes while frames of 256 blocks come.

    Args:
        live: residencies the index holds.
    """
    held = LiveSet(live, seed)
    label = f"{live / 1e6:g} M residencies"
    p50: list[float] = []
    p99: list[float] = []
    rates: list[float] = []
    for _ in range(max(3, samples // 2)):
        times_us, rate = ask_beside_runs(held, _QUESTIONS, _EVENTS_PER_S)
        p50.append(percentile(times_us, 0.5))
        p99.append(percentile(times_us, 0.99))
        rates.append(rate / 1e6)
    what = f"prefix query of 256 hashes beside runs of frames of 256 blocks, {label}"
    rows = [
        row_of(f"{what}: p50", "µs", p50),
        row_of("… p99", "µs", p99),
        row_of("… events applied meanwhile", "M events/s", rates),
    ]
    return Found(rows, {"query_us_p99_small_frames": rows[1].value})


def bench_checkpoint_pause(live: int, samples: int, seed: int) -> Found:
    """The longest that frames wait for a checkpoint: the median of several.

    Args:
        live: residencies in the checkpoint; 0: it is not measured.
    """
    if not live:
        note = (
            f"The checkpoint of {CHECKPOINT_LIVE:,} residencies was not measured, for it takes 5 GB of memory and some "
            "minutes; --checkpoint measures it"
        )
        return Found([], {"checkpoint_pause_ms_50m": None}, (note,))
    held = LiveSet(live, seed)
    label = f"{live / 1e6:g} M residencies"
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        path = str(Path(folder) / "checkpoint")
        pauses = [pause_beside_checkpoint(held, path, label) for _ in range(max(3, samples // 2))]
    row = row_of(pauses[0].what, pauses[0].unit, [one.value for one in pauses])
    return Found([row], {"checkpoint_pause_ms_50m": row.value})
