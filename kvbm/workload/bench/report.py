"""One bench run: its rows, its report, its printed table."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.workload.bench.codec import bench_codec
from kvbm.workload.bench.events import bench_events
from kvbm.workload.bench.hashing import bench_hash
from kvbm.workload.bench.index import bench_index
from kvbm.workload.bench.ledger import bench_ledger
from kvbm.workload.bench.measure import Row
from kvbm.workload.bench.replay import bench_replay
from kvbm.workload.processes import CATALOG_MODULES, require_modules
from kvbm.workload.reports import check_report_path, write_report


class BenchOptions(NamedTuple):
    """What to measure.

    Attributes:
        what: a name of BENCHES, or "all".
        live: residencies the index holds while it is measured; one part for each.
        replacements: how often the whole set is replaced for the memory numbers; 0 leaves them out.
        samples: of each row, beside the warm-up.
        seed: of the workload.
    """

    what: str
    live: tuple[int, ...] = (1_000_000,)
    replacements: int = 3
    samples: int = 7
    seed: int = 1


class BenchReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was measured, on what. The numbers beside `rows` are those of the issue tables; absent where not measured."""

    machine: str
    build: str
    load_average: float
    rows: list[Row]
    apply_events_per_s: float | None = None
    bytes_per_residency: float | None = None
    query_us_p50: float | None = None
    query_us_p99: float | None = None
    ledger_ns_per_block_run16: float | None = None
    encode_blocks_per_s: float | None = None
    decode_blocks_per_s: float | None = None
    hash_blocks_per_s: float | None = None
    event_ns_per_block_run16: float | None = None
    event_ns_per_block_run1: float | None = None
    verify_native_events_per_s: float | None = None
    verify_reference_events_per_s: float | None = None
    ingest_events_per_s: float | None = None
    visible_ms_p50: float | None = None
    visible_ms_p99: float | None = None
    withheld_s_default: float | None = None
    withheld_s_quick: float | None = None
    restart_ready_s: float | None = None
    gap_repaired_s: float | None = None


Bench = Callable[[BenchOptions], tuple[list[Row], dict[str, float]]]


def _ingest(options: BenchOptions) -> tuple[list[Row], dict[str, float]]:
    require_modules("kvbm bench ingest", CATALOG_MODULES, "catalog")
    from kvbm.workload.bench.ingest import bench_ingest

    return bench_ingest(options.samples, options.seed)


def _stream(options: BenchOptions) -> tuple[list[Row], dict[str, float]]:
    require_modules("kvbm bench stream", CATALOG_MODULES, "catalog")
    from kvbm.workload.bench.stream import bench_stream

    return bench_stream(max(options.live), options.samples, options.seed)


BENCHES: dict[str, Bench] = {
    "hash": lambda options: bench_hash(options.samples, options.seed),
    "codec": lambda options: bench_codec(options.samples, options.seed),
    "ledger": lambda options: bench_ledger(options.samples, options.seed),
    "index": lambda options: bench_index(options.live, options.replacements, options.samples, options.seed),
    "events": lambda options: bench_events(options.samples, options.seed),
    "replay": lambda options: bench_replay(options.samples, options.seed),
    "ingest": _ingest,
    "stream": _stream,
}


def run_bench(options: BenchOptions, json_path: Path | None) -> int:
    """Measure, print, write. Raises ConfigError: the report cannot be written."""
    check_report_path(json_path)
    print(f"{_machine()}\n{_build()}; one core, load average {os.getloadavg()[0]:.1f} at the start")
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    for name in BENCHES if options.what == "all" else [options.what]:
        print(f"\n{name}")
        found, named = BENCHES[name](options)
        rows += found
        numbers |= named
        for row in found:
            print(_line(row), flush=True)
    report = BenchReport(machine=_machine(), build=_build(), load_average=os.getloadavg()[0], rows=rows, **numbers)
    write_report(json_path, report)
    return 0


def _line(row: Row) -> str:
    noise = f"± {row.noise:.0%}" if row.noise is not None else ""
    cpu = f"CPU {row.cpu:.0%}" if row.cpu is not None else ""
    number = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.2f}"
    return f"  {row.what:68} {number:>12} {row.unit:14} {noise:6} {cpu}"


def _machine() -> str:
    model = "unknown processor"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def _build() -> str:
    from kvbm.assembly import kvbm_version

    commit = ""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            check=False,
            capture_output=True,
            text=True,
            timeout=5,
        )
        commit = f" ({found.stdout.strip()})" if found.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        pass
    return f"kvbm {kvbm_version()}{commit}, native core"
