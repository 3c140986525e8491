"""`kvbm bench replay`: how fast `kvbm-replay verify` proves a journal, natively and with the readable specification."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.bench.ingest import Churn
from kvbm.bench.measure import Row, Sample, row_of, timed
from kvbm.core.backend import REFERENCE, Backend, NewFold
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, hash_count
from kvbm.replay.opening import open_source
from kvbm.replay.verify import verify
from kvbm.streams.journal.journal import Journal

_RUNS = 150_000  # of 16 blocks created, and as many evicted once the pool is full
_REFERENCE_RUNS = 6_000  # the specification is slower


def bench_replay(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """Block events a second of `verify` over a journal's segments: decoding, order, legality, snapshots, digests."""
    numbers: dict[str, float] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        for name, backend, fold, runs in (
            ("native", NATIVE, NATIVE_FOLD, _RUNS),
            ("--reference", REFERENCE, Residencies, _REFERENCE_RUNS),
        ):
            path = Path(folder) / name.strip("-")
            blocks = _write(path, runs, seed)
            count = samples if backend is NATIVE else 2
            taken = [_verify(path, backend, fold) for _ in range(count + 1)][1:]
            values = [blocks / sample.wall_s / 1e6 for sample in taken]
            rows.append(row_of(f"kvbm-replay verify, journal segments, {name}", "M events/s", values, taken))
            numbers[f"verify_{name.strip('-')}_events_per_s"] = rows[-1].value * 1e6
    return rows, numbers


def _write(folder: Path, runs: int, seed: int) -> int:
    """A journal as a busy instance writes it: frames of 256 block events. Returns how many block events there are."""
    journal = Journal.open(folder, InstanceId("bench"), NATIVE)
    blocks = 0
    try:
        journal.begin_epoch(Epoch(1))
        for frame in Churn("bench", seed).frames(runs):
            journal.append(frame)
            events = NATIVE.decode_frame(frame.data)[0].events
            blocks += sum(hash_count(getattr(event, "hashes", b"")) for event in events)
    finally:
        journal.close()
    return blocks


def _verify(folder: Path, backend: Backend, fold: NewFold) -> Sample:
    def work() -> None:
        verified = verify(open_source(str(folder)), backend, fold)
        assert not verified.findings, verified.findings[0]

    return timed(work)
