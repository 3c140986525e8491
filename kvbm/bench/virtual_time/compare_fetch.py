"""The same requests without and with reading blocks from other instances, in virtual time: `kvbm simulate --fetch`."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbm.bench.virtual_time.compare_policies import (
    COMPUTED,
    HBM,
    CompareOptions,
    PolicyOutcome,
    PolicyRow,
    check_options,
    requests_for,
    requests_of,
    rows_of,
)
from kvbm.bench.virtual_time.fetch_run import PEER, FetchCluster, FetchingRun
from kvbm.bench.virtual_time.instance_model import WorkloadRequest
from kvbm.bench.virtual_time.policies import POLICIES
from kvbm.core.errors import ConfigError
from kvbm.core.fetching import TCP_LINKS
from kvbm.core.ids import Tier
from kvbm.core.topology import Link
from kvbm.progress import bars_are_shown
from kvbm.reports import check_report_path, write_report

POOL_TIERS = ("hbm", "host", "nvme", "object")
SOURCES = (HBM, Tier.HOST.name, Tier.NVME.name, PEER, Tier.OBJECT.name, COMPUTED)
"""Where a prompt's tokens come from, as `FetchRow.tokens_by_source` names it."""


class FetchRow(PolicyRow, kw_only=True):
    """What one policy gave on one workload without or with reading from other instances, as the mean over its seeds.

    Attributes:
        fetch: whether instances read from each other.
        tokens_by_source: the prompts' tokens, of all seeds, by where they came from; they add up to all.
        against_without: mean_ttft_s over that of the same policy without reading from each other.
    """

    fetch: bool
    tokens_by_source: dict[str, int]
    against_without: float


class FetchReport(msgspec.Struct, kw_only=True):
    """What `kvbm simulate --fetch … --json` writes.

    Attributes:
        topology: of each instance its labels.
        link_latency_s, link_bytes_per_s: between any two; None: as assumed for their distance.
    """

    rows: list[FetchRow]
    instances: int
    pools: dict[str, int]
    topology: list[str]
    link_latency_s: float | None
    link_bytes_per_s: float | None
    speeds: list[float]
    elapsed_s: float


def cluster_of(
    pools: Mapping[str, int], instances: int, topology: Sequence[str] | None, link: str | None
) -> FetchCluster:
    """What the command line says of instances.

    Args:
        pools: slots by tier, as `parse_pools` gives them.
        topology: of each instance its labels, joined by "/"; None: hosts of one rack.
        link: "GB/S[,US]"; None: as assumed for the distance.
    Raises: ConfigError: what is wrong, and how to write it.
    """
    if not {"host", "nvme"} & set(pools):
        raise ConfigError("--pools: instances read from each other's HOST and NVME; give host=SLOTS or nvme=SLOTS, too")
    places = [f"rack/host-{number}" for number in range(instances)] if topology is None else list(topology)
    if len(places) != instances or not all(places):
        raise ConfigError(f"--topology {','.join(places)}: {instances} places are needed, one for each instance")
    slots = {Tier[name.upper()]: count for name, count in pools.items()}
    return FetchCluster(
        slots, [tuple(place.split("/")) for place in places], None if link is None else parse_link(link)
    )


def parse_link(text: str) -> Link:
    """ "2.5" or "2.5,300": GB/s, and microseconds of latency.

    Raises ConfigError: what is wrong, and how to write it.
    """
    rate, _, latency = text.partition(",")
    try:
        link = Link(float(latency) / 1e6 if latency else TCP_LINKS[1].latency_s, float(rate) * 1e9)
    except ValueError:
        link = Link(0.0, 0.0)
    if not (0 < link.bytes_per_s < math.inf and 0 <= link.latency_s < math.inf):
        raise ConfigError(
            f"--fetch-link {text!r}: GB/s above 0 are needed, and microseconds behind a comma if you like, such as "
            "2.5,300"
        )
    return link


def run_fetch(
    policy: str,
    requests: Sequence[WorkloadRequest],
    speeds: Sequence[float],
    cluster: FetchCluster,
    seed: int,
    fetches: bool,
) -> PolicyOutcome:
    """One policy on one workload."""
    return FetchingRun(
        lambda instances: POLICIES[policy](instances, random.Random(seed)), speeds, cluster, fetches
    ).run(requests)


def compare_fetch(
    options: CompareOptions, cluster: FetchCluster, advance: Callable[[], None] = lambda: None
) -> FetchReport:
    """Every policy on every workload and load, without and with reading from other instances, on the same requests for
    each seed.

    Args:
        options: `slots` does not count.
        advance: told after each run.
    """
    began = time.monotonic()
    rows: list[FetchRow] = []
    for name in options.workloads if options.trace is None else (options.trace.name,):
        for load in options.loads:
            outcomes: dict[tuple[str, bool], list[PolicyOutcome]] = {
                (policy, fetches): [] for policy in options.policies for fetches in (False, True)
            }
            for seed in options.seeds:
                requests = requests_of(requests_for(options, name, load, seed))
                for (policy, fetches), runs in outcomes.items():
                    runs.append(run_fetch(policy, requests, options.speeds, cluster, seed, fetches))
                    advance()
            rows += _rows(name, load, options.seeds, outcomes)
    return FetchReport(
        rows=rows,
        instances=len(options.speeds),
        pools={tier.name.lower(): count for tier, count in cluster.slots.items()},
        topology=["/".join(place) for place in cluster.places],
        link_latency_s=None if cluster.link is None else cluster.link.latency_s,
        link_bytes_per_s=None if cluster.link is None else cluster.link.bytes_per_s,
        speeds=list(options.speeds),
        elapsed_s=round(time.monotonic() - began, 1),
    )


def _rows(
    name: str, load: str, seeds: Sequence[int], outcomes: Mapping[tuple[str, bool], Sequence[PolicyOutcome]]
) -> list[FetchRow]:
    """A row without and one with for each policy."""
    keys = {f"{policy} {fetches}": (policy, fetches) for policy, fetches in outcomes}
    plain = rows_of(name, load, seeds, {key: list(outcomes[both]) for key, both in keys.items()})
    means = {keys[row.policy]: row.mean_ttft_s for row in plain}
    rows: list[FetchRow] = []
    for row in plain:
        policy, fetches = keys[row.policy]
        tokens: Counter[str] = Counter()
        for run in outcomes[policy, fetches]:
            tokens.update(run.tokens)
        without_s = means[policy, False]
        rows.append(
            FetchRow(
                **msgspec.structs.asdict(row) | {"policy": policy},
                fetch=fetches,
                tokens_by_source={source: tokens[source] for source in SOURCES},
                against_without=row.mean_ttft_s / without_s if without_s else 1.0,
            )
        )
    return rows


def tables(report: FetchReport) -> list[Table]:
    """The report for people: a table for each workload and load, with the sources there are."""
    sources = [source for source in SOURCES if any(row.tokens_by_source[source] for row in report.rows)]
    result: list[Table] = []
    for row in report.rows:
        title = f"{row.workload}, {row.load}"
        if not result or result[-1].title != title:
            result.append(Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)))
            for column in ("policy", "fetch"):
                result[-1].add_column(column, no_wrap=True)
            for column in ("hits", "mean", "p50", "p99", *sources):
                result[-1].add_column(column, justify="right", no_wrap=True)
        tokens = sum(row.tokens_by_source.values())
        result[-1].add_row(
            row.policy,
            "yes" if row.fetch else "no",
            f"{row.hit_ratio:.3f}",
            f"{row.mean_ttft_s:.3f}",
            f"{row.p50_ttft_s:.3f}",
            f"{row.p99_ttft_s:.3f}",
            *(f"{100 * row.tokens_by_source[source] / max(1, tokens):.1f}" for source in sources),
        )
    return result


def main(options: CompareOptions, cluster: FetchCluster, json_path: Path | None) -> int:
    """Compare with a progress bar. Returns 0. Raises ConfigError: an option names what there is not."""
    check_options(options)
    if len(options.speeds) != len(cluster.places):
        raise ConfigError(f"--speeds gives {len(options.speeds)} numbers for {len(cluster.places)} instances")
    check_report_path(json_path)
    console = Console()
    workloads = len(options.workloads) if options.trace is None else 1
    total = 2 * workloads * len(options.loads) * len(options.seeds) * len(options.policies)
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, disable=not bars_are_shown()
    ) as progress:
        task = progress.add_task("runs", total=total)
        report = compare_fetch(options, cluster, lambda: progress.advance(task))
    write_report(json_path, report)
    for table in tables(report):
        console.print(table)
    console.print("mean, p50, p99: seconds to the first token; then % of the prompts' tokens by where they came from")
    pools = ", ".join(f"{name} {count}" for name, count in report.pools.items())
    link = cluster.link
    by = "as their distance says" if link is None else f"{link.bytes_per_s / 1e9:g} GB/s, {link.latency_s * 1e6:g} µs"
    console.print(
        f"{report.instances} instances of {pools} slots; links: {by}; seeds {', '.join(map(str, options.seeds))}; "
        f"{total} runs in {report.elapsed_s} s"
    )
    return 0
