"""One bench run: its rows, its report, its printed table."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kvbm.bench.bridge import bench_bridge
from kvbm.bench.codec import bench_codec
from kvbm.bench.connector import bench_connector
from kvbm.bench.events import bench_events
from kvbm.bench.fetch import FetchOptions, bench_fetch
from kvbm.bench.hashing import bench_hash
from kvbm.bench.history import bench_history
from kvbm.bench.index import bench_index
from kvbm.bench.ledger import bench_ledger
from kvbm.bench.measure import Found, Row
from kvbm.bench.page import PageOptions, bench_page
from kvbm.bench.pools import PoolsOptions, bench_pools
from kvbm.bench.replay import bench_replay
from kvbm.progress import Watch
from kvbm.reports import check_report_path, write_report
from kvbm.terminal import say
from kvbm.workload.processes import CATALOG_MODULES, require_modules


class BenchOptions(NamedTuple):
    """What to measure.

    Attributes:
        what: a name of BENCHES, or "all".
        live: residencies the index holds while it is measured; one part for each.
        replacements: how often the whole set is replaced for the memory numbers; 0 leaves them out.
        samples: of each row, beside the warm-up.
        seed: of the workload.
        pools: what `pools` alone needs.
        instances: of the part of `catalog` that has many.
        indexed: residencies of the part of `catalog` that asks the index itself.
        checkpoint: `catalog` measures the checkpoint of 50 M residencies, too.
        fetch, page: what they alone need.
    """

    what: str
    live: tuple[int, ...] = (1_000_000,)
    replacements: int = 3
    samples: int = 7
    seed: int = 1
    pools: PoolsOptions = PoolsOptions()
    instances: int = 10_000
    indexed: int = 10_000_000
    checkpoint: bool = False
    fetch: FetchOptions = FetchOptions()
    page: PageOptions = PageOptions()


_Ratio: TypeAlias = float | UnsetType | None  # unset: not asked for; None: could not be measured here


class BenchReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was measured, on what.

    The numbers beside `rows` are those of the issue tables: absent where not asked for, null where they could not be
    measured.

    Attributes:
        notes: what was measured on what, where that needs saying.
    """

    machine: str
    build: str
    load_average: float
    rows: list[Row]
    notes: list[str] = []
    apply_events_per_s: float | None = None
    bytes_per_residency: float | None = None
    query_us_p50: float | None = None
    query_us_p99: float | None = None
    query_us_p99_small_frames: float | None = None
    checkpoint_pause_ms_50m: _Ratio = UNSET
    ledger_ns_per_block_run16: float | None = None
    connector_first_us: float | None = None
    connector_again_us: float | None = None
    connector_step_us: float | None = None
    connector_coming_us: float | None = None
    connector_ending_us: float | None = None
    connector_first_of_groups_us: float | None = None
    connector_first_of_states_us: float | None = None
    bridge_blocks_per_s: float | None = None
    bridge_events_per_s: float | None = None
    bridge_bytes_per_block: float | None = None
    bridge_visible_ms_p50: float | None = None
    bridge_visible_ms_p99: float | None = None
    engine_event_ns_per_block: float | None = None
    encode_blocks_per_s: float | None = None
    decode_blocks_per_s: float | None = None
    hash_blocks_per_s: float | None = None
    event_ns_per_block_run16: float | None = None
    event_ns_per_block_run1: float | None = None
    verify_native_events_per_s: float | None = None
    verify_reference_events_per_s: float | None = None
    history_build_s: float | None = None
    history_bytes_per_stay: float | None = None
    asof_10m_s: float | None = None
    block_life_s: float | None = None
    changes_5min_s: float | None = None
    overview_s: float | None = None
    first_paint_ms: float | None = None
    slider_step_ms: float | None = None
    slider_step_worst_ms: float | None = None
    ingest_events_per_s: float | None = None
    http_lookups_per_s: float | None = None
    http_lookup_us_p50: float | None = None
    http_routes_per_s: float | None = None
    http_route_us_p50: float | None = None
    binary_prompts_per_s: float | None = None
    unix_us_p50: float | None = None
    nats_us_p50: float | None = None
    replica_lookup_us_p50: float | None = None
    replica_route_us_p50: float | None = None
    replica_p99_us_loaded: float | None = None
    many_lookup_ms_p50: float | None = None
    many_lookup_ms_p99: float | None = None
    many_route_ms_p50: float | None = None
    many_route_ms_p99: float | None = None
    many_answer_bytes: float | None = None
    loaded_lookup_ms_p99: float | None = None
    ingest_loss: float | None = None
    heartbeat_core_share: float | None = None
    rss_10k_mib: float | None = None
    sql_claims_per_s: _Ratio = UNSET
    sql_claims_per_s_sqlite: _Ratio = UNSET
    reclaims_per_s: _Ratio = UNSET
    reclaims_per_s_sqlite: _Ratio = UNSET
    visible_ms_p50: float | None = None
    visible_ms_p99: float | None = None
    excluded_s_default: float | None = None
    excluded_s_quick: float | None = None
    restart_ready_s: float | None = None
    gap_repaired_s: float | None = None
    nvme_read_over_fio: _Ratio = UNSET
    nvme_scan_over_fio: _Ratio = UNSET
    nvme_write_over_fio: _Ratio = UNSET
    checksum_cost: _Ratio = UNSET
    nvme_encryption_cost: _Ratio = UNSET
    host_copy_over_memcpy: _Ratio = UNSET
    metadata_blocks_per_s: _Ratio = UNSET
    nvme_read_p99_over_p50_loaded: _Ratio = UNSET
    bf16_ratio: _Ratio = UNSET
    encode_gb_per_s: _Ratio = UNSET
    decode_gb_per_s: _Ratio = UNSET
    fp8_ratio_over_limit: _Ratio = UNSET
    object_put_over_client: _Ratio = UNSET
    object_get_over_client: _Ratio = UNSET
    memory_over_memcpy: _Ratio = UNSET
    memory_over_tcp: _Ratio = UNSET
    tcp_over_sockets: _Ratio = UNSET
    memory_over_nixl: _Ratio = UNSET
    tcp_over_nixl: _Ratio = UNSET
    tcp_link_share: _Ratio = UNSET
    fetch_us_over_bare: _Ratio = UNSET
    fetch_busy_over_idle: _Ratio = UNSET
    idle_connection_cpu_share: _Ratio = UNSET
    lend_us: _Ratio = UNSET
    hbm_read_over_memcpy: float | None = None
    hbm_write_over_memcpy: float | None = None
    hbm_read_over_copies: float | None = None
    hbm_write_over_copies: float | None = None


Bench = Callable[[BenchOptions], Found]


def _found(measured: tuple[list[Row], Mapping[str, float]]) -> Found:
    return Found(measured[0], dict(measured[1]))


def _together(*parts: Found) -> Found:
    return Found(
        [row for part in parts for row in part.rows],
        {key: value for part in parts for key, value in part.numbers.items()},
        tuple(note for part in parts for note in part.notes),
    )


def _ingest(options: BenchOptions) -> Found:
    require_modules("kvbm bench ingest", CATALOG_MODULES, "catalog")
    from kvbm.bench.ingest import bench_ingest

    return _found(bench_ingest(options.samples, options.seed))


def _bridge(options: BenchOptions) -> Found:
    require_modules("kvbm bench bridge", (*CATALOG_MODULES, "zmq"), "dev")
    from kvbm.bench.bridge_line import bench_bridge_line
    from kvbm.bench.engine_events import bench_engine_events

    return _together(
        _found(bench_bridge(min(options.live), options.replacements, options.samples, options.seed)),
        bench_bridge_line(options.samples, options.seed),
        bench_engine_events(options.samples, options.seed),
    )


def _catalog(options: BenchOptions) -> Found:
    require_modules("kvbm bench catalog", CATALOG_MODULES, "catalog")
    from kvbm.bench.catalog import bench_catalog
    from kvbm.bench.catalog_index import CHECKPOINT_LIVE, bench_checkpoint_pause, bench_small_frames
    from kvbm.bench.catalog_loaded import bench_loaded
    from kvbm.bench.catalog_many import bench_many
    from kvbm.bench.catalog_replica import bench_replica
    from kvbm.bench.stream import bench_visible

    return _together(
        bench_catalog(max(options.live), options.samples, options.seed),
        bench_replica(max(options.live), options.samples, options.seed),
        bench_loaded(max(options.live), options.samples, options.seed),
        bench_many(options.samples, options.seed, options.instances),
        _found(bench_visible(options.samples, options.seed)),
        bench_small_frames(options.indexed, options.samples, options.seed),
        bench_checkpoint_pause(CHECKPOINT_LIVE if options.checkpoint else 0, options.samples, options.seed),
    )


def _stream(options: BenchOptions) -> Found:
    require_modules("kvbm bench stream", CATALOG_MODULES, "catalog")
    from kvbm.bench.stream import bench_stream

    return _found(bench_stream(max(options.live), options.samples, options.seed))


def _sql(options: BenchOptions) -> Found:
    require_modules("kvbm bench sql", CATALOG_MODULES, "catalog")
    from kvbm.bench.sql import bench_sql

    return bench_sql(max(options.live), options.samples, options.seed)


def _page(options: BenchOptions) -> Found:
    require_modules("kvbm bench page", (*CATALOG_MODULES, "selenium"), "dev")
    return bench_page(options.samples, options.seed, max(options.live), options.page)


BENCHES: dict[str, Bench] = {
    "hash": lambda options: _found(bench_hash(options.samples, options.seed)),
    "codec": lambda options: _found(bench_codec(options.samples, options.seed)),
    "ledger": lambda options: _found(bench_ledger(options.samples, options.seed)),
    "index": lambda options: _found(bench_index(options.live, options.replacements, options.samples, options.seed)),
    "events": lambda options: bench_events(options.samples, options.seed),
    "replay": lambda options: _found(bench_replay(options.samples, options.seed)),
    "history": lambda options: _found(bench_history(max(options.live), options.samples, options.seed)),
    "bridge": _bridge,
    "ingest": _ingest,
    "catalog": _catalog,
    "sql": _sql,
    "stream": _stream,
    "connector": lambda options: _found(bench_connector(options.samples, options.seed)),
    "pools": lambda options: bench_pools(options.pools, options.samples, options.seed),
    "fetch": lambda options: bench_fetch(options.fetch, options.samples, options.seed),
    "page": _page,
}
ASKED_FOR = frozenset({"page"})  # not of "all": it needs a browser


def run_bench(options: BenchOptions, json_path: Path | None) -> int:
    """Measure, print, write. Raises ConfigError: the report cannot be written."""
    check_report_path(json_path)
    cores = "" if options.what in ("pools", "fetch", "page") else "one core, "
    say(_machine(), f"{_build()}; {cores}load average {os.getloadavg()[0]:.1f} at the start")
    rows: list[Row] = []
    numbers: dict[str, float | None] = {}
    notes: list[str] = []
    for name in [one for one in BENCHES if one not in ASKED_FOR] if options.what == "all" else [options.what]:
        say("", name)
        with Watch(name):
            found = BENCHES[name](options)
        rows += found.rows
        numbers |= {key: one for key, one in found.numbers.items() if one is not None or key not in numbers}
        notes += found.notes
        for row in found.rows:
            say(_line(row))
        for note in found.notes:
            say(f"  {note}")
    report = BenchReport(
        machine=_machine(), build=_build(), load_average=os.getloadavg()[0], rows=rows, notes=notes, **numbers
    )
    write_report(json_path, report)
    return 0


def _line(row: Row) -> str:
    noise = f"± {row.noise:.0%}" if row.noise is not None else ""
    noise = f"± {row.spread:.2f}" if row.spread is not None else noise
    cpu = f"CPU {row.cpu:.0%}" if row.cpu is not None else ""
    number = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.2f}"
    goal = f"goal {row.goal}" if row.goal else ""
    return f"  {row.what:68} {number:>12} {row.unit:14} {noise:6} {cpu:9} {goal}".rstrip()


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
