"""Compare ways of routing on the same requests, in virtual time and without bytes: `kvbm simulate --policy a,b,c`."""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbm.bench.measure import percentile
from kvbm.bench.virtual_time.block_pool import ColderPool
from kvbm.bench.virtual_time.changes import ModelChange, What, check_changes
from kvbm.bench.virtual_time.instance_model import InstanceModel, WorkloadRequest
from kvbm.bench.virtual_time.policies import POLICIES, KvbmRouting, Policy
from kvbm.bench.virtual_time.workloads import LOADS, WORKLOADS, check_workload, workload
from kvbm.core.errors import ConfigError
from kvbm.core.ids import Tier
from kvbm.progress import bars_are_shown
from kvbm.reports import check_report_path, write_report
from kvbm.workload.trace import TRACE_BLOCK_TOKENS, TraceRequest, full_blocks, read_trace

DECODE_TOKEN_S = 0.03
PREFILL_TOKENS_PER_S = 10_000.0
HBM, COMPUTED = Tier.HBM.name, "computed"  # where tokens came from


class CompareOptions(NamedTuple):
    """What `kvbm simulate --policy` was asked.

    Attributes:
        workloads: names of generated ones; () with a trace.
        loads: names of LOADS.
        seeds: of the generated workloads and of policies that draw; a row is the mean over them.
        speeds: tokens each instance prefills in a second.
        slots: of each instance's HBM pool.
        changes: of instances in the middle of each run.
    """

    policies: tuple[str, ...] = tuple(POLICIES)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    loads: tuple[str, ...] = ("normal", "overload")
    seeds: tuple[int, ...] = (1,)
    requests: int = 4_000
    speeds: tuple[float, ...] = (PREFILL_TOKENS_PER_S,) * 4
    slots: int = 4_000
    trace: Path | None = None
    changes: tuple[ModelChange, ...] = ()


class PolicyRow(msgspec.Struct, kw_only=True):
    """What one policy gave on one workload, as the mean over its seeds.

    Attributes:
        hit_ratio: hit blocks over full blocks.
        mean_ttft_s, p50_ttft_s, p99_ttft_s: from arrival to the end of the prefill.
        load_max_over_mean: prompt blocks on the busiest instance over the mean; `_requests`: the same for requests.
        against_best: mean_ttft_s over the least of the workload's rows.
    """

    workload: str
    load: str
    policy: str
    seeds: list[int]
    requests: int
    hit_ratio: float
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    load_max_over_mean: float
    load_max_over_mean_requests: float
    against_best: float = 1.0


class PolicyOutcome(msgspec.Struct, kw_only=True):
    """One run: every time to first token, ascending, who was given what, and where the prompts' tokens came from."""

    ttft_s: list[float]
    hits: int
    blocks: int
    prompt_blocks: list[int]
    requests: list[int]
    tokens: dict[str, int]


class PolicyReport(msgspec.Struct, kw_only=True):
    """What `kvbm simulate --policy … --json` writes."""

    rows: list[PolicyRow]
    instances: int
    slots: int
    speeds: list[float]
    elapsed_s: float


class PolicyComparison:
    """One workload on fresh instances under one policy.

    Args:
        policy: made from the instances.
        speeds: tokens each instance prefills in a second.
        colder: makes the pools of an instance's colder tiers.
        changes: of instances while it runs.
    """

    def __init__(
        self,
        policy: Callable[[Sequence[InstanceModel]], Policy],
        speeds: Sequence[float],
        slots: int,
        colder: Callable[[], Mapping[Tier, ColderPool]] = dict,
        changes: Sequence[ModelChange] = (),
    ) -> None:
        self.instances = [InstanceModel(slots, speed, colder()) for speed in speeds]
        self._policy = policy(self.instances)
        self._heard = self._policy if isinstance(self._policy, KvbmRouting) else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now_s = 0.0
        self._ttft_s: list[float] = []
        self._tokens: Counter[str] = Counter()
        self._speeds, self._slots = speeds, slots
        for change in changes:
            self._later(change.at_s, partial(self._change, change))

    def run(self, requests: Sequence[WorkloadRequest]) -> PolicyOutcome:
        """Everything until the last first token."""
        self._beat(0.0)
        for request in requests:
            self._until(request.at_s)
            self._arrive(request)
        self._heard = None  # nobody routes any more
        self._until(float("inf"))
        return PolicyOutcome(
            ttft_s=sorted(self._ttft_s),
            hits=sum(instance.hits for instance in self.instances),
            blocks=sum(instance.prompt_blocks for instance in self.instances),
            prompt_blocks=[instance.prompt_blocks for instance in self.instances],
            requests=[instance.requests for instance in self.instances],
            tokens=dict(self._tokens),
        )

    def _beat(self, now_s: float) -> None:
        if self._heard is not None:
            self._heard.hear(now_s)
            self._later(self._heard.next_heartbeat_s() - now_s, lambda: self._beat(self._now_s))

    def _until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
        if at_s != float("inf"):
            self._now_s = at_s

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._count, happen))

    def _change(self, change: ModelChange) -> None:
        instance = self.instances[change.instance]
        match change.what:
            case What.SPEED:
                instance.tokens_per_s = self._speeds[change.instance] * change.share
            case What.SLOTS:
                instance.pool.resize(max(1, round(self._slots * change.share)))
                self._start(instance)
            case What.DRAIN:
                instance.is_drained = True

    def _arrive(self, request: WorkloadRequest) -> None:
        instance = self.instances[self._policy.choose(self._now_s, request)]
        missing = request.input_tokens - instance.depth(request.blocks) * TRACE_BLOCK_TOKENS
        instance.queue.append((request, missing))
        instance.waiting_tokens += missing
        instance.assigned_tokens += missing
        instance.prompt_blocks += len(request.blocks)
        instance.requests += 1
        instance.begin(request)
        self._start(instance)

    def _start(self, instance: InstanceModel) -> None:
        if instance.busy is not None or not instance.queue:
            return
        request, expected = instance.queue[0]
        depth = instance.pool.acquire(request.blocks)
        if depth is None:
            if not instance.running:
                blocks = len(request.blocks)
                raise ConfigError(
                    f"a request of {blocks} blocks does not fit an idle HBM pool; give --pools hbm={blocks} or more"
                )
            return  # a request that ends will start it
        instance.queue.popleft()
        instance.waiting_tokens -= expected
        instance.busy = (math.inf, expected)
        self._bring(instance, request, depth, expected)

    def _bring(self, instance: InstanceModel, request: WorkloadRequest, in_hbm: int, expected: int) -> None:
        """Read what lies elsewhere than in HBM, then compute the rest. Here nothing does.

        Args:
            in_hbm: blocks from the first on that are pinned there; the others have slots.
            expected: its tokens that were missing when it came.
        """
        self._compute(instance, request, in_hbm, expected, [HBM] * in_hbm)

    def _compute(
        self, instance: InstanceModel, request: WorkloadRequest, in_hbm: int, expected: int, sources: Sequence[str]
    ) -> None:
        """Compute what no source had.

        Args:
            sources: of each block from the first on that is in HBM now, where it was.
        """
        missing = request.input_tokens - len(sources) * TRACE_BLOCK_TOKENS
        instance.assigned_tokens += missing - expected
        instance.hits += len(sources)
        for source in sources:
            self._tokens[source] += TRACE_BLOCK_TOKENS
        self._tokens[COMPUTED] += missing
        instance.busy = (self._now_s, missing)
        self._later(missing / instance.tokens_per_s, lambda: self._prefilled(instance, request, in_hbm, missing))

    def _prefilled(self, instance: InstanceModel, request: WorkloadRequest, in_hbm: int, missing: int) -> None:
        instance.pool.create(request.blocks[in_hbm:])
        began_s = self._now_s if instance.busy is None else instance.busy[0]
        instance.busy = None
        instance.assigned_tokens -= missing
        instance.meter.prefilled(missing, self._now_s - began_s)  # its speed may have changed meanwhile
        instance.running += 1
        self._ttft_s.append(self._now_s - request.at_s)
        self._later(request.output_tokens * DECODE_TOKEN_S, lambda: self._ended(instance, request))
        self._start(instance)

    def _ended(self, instance: InstanceModel, request: WorkloadRequest) -> None:
        instance.pool.unpin(request.blocks)
        instance.end(request)
        instance.running -= 1
        self._start(instance)


def requests_of(trace: Sequence[TraceRequest]) -> list[WorkloadRequest]:
    """A trace's requests as they are routed: without partial blocks, ids as hashes."""
    packed: dict[int, bytes] = {}
    rng = random.Random(1)
    requests = []
    for number, request in enumerate(trace):
        blocks = full_blocks(request)
        for block in blocks:
            if block not in packed:
                packed[block] = rng.randbytes(16)
        hashes = b"".join([packed[block] for block in blocks])
        requests.append(
            WorkloadRequest(
                number, request.timestamp_ms / 1e3, request.input_tokens, request.output_tokens, blocks, hashes
            )
        )
    return requests


def run_policy(
    name: str,
    requests: Sequence[WorkloadRequest],
    speeds: Sequence[float],
    slots: int,
    seed: int,
    changes: Sequence[ModelChange] = (),
) -> PolicyOutcome:
    """One policy on one workload."""
    run = PolicyComparison(
        lambda instances: POLICIES[name](instances, random.Random(seed)), speeds, slots, changes=changes
    )
    return run.run(requests)


def compare(options: CompareOptions, advance: Callable[[], None] = lambda: None) -> PolicyReport:
    """Every policy on every workload and load, on the same requests for each seed.

    Args:
        advance: told after each run of one policy.
    """
    began = time.monotonic()
    rows: list[PolicyRow] = []
    for name in options.workloads if options.trace is None else (options.trace.name,):
        for load in options.loads:
            outcomes: dict[str, list[PolicyOutcome]] = {policy: [] for policy in options.policies}
            for seed in options.seeds:
                requests = requests_of(requests_for(options, name, load, seed))
                for policy in options.policies:
                    outcomes[policy].append(
                        run_policy(policy, requests, options.speeds, options.slots, seed, options.changes)
                    )
                    advance()
            rows += rows_of(name, load, options.seeds, outcomes)
    return PolicyReport(
        rows=rows,
        instances=len(options.speeds),
        slots=options.slots,
        speeds=list(options.speeds),
        elapsed_s=round(time.monotonic() - began, 1),
    )


def requests_for(options: CompareOptions, name: str, load: str, seed: int) -> list[TraceRequest]:
    """Those of the trace, or of a generated workload. Raises ConfigError: the trace cannot be read, or holds none."""
    if options.trace is None:
        return workload(name, load, seed, options.requests, len(options.speeds))
    try:
        recorded = list(read_trace(options.trace))
    except OSError as error:
        raise ConfigError(f"trace {options.trace} cannot be read ({error.strerror}); give a JSONL file") from None
    if not recorded:
        raise ConfigError(f"trace {options.trace} holds no request; give a JSONL file with one request a line")
    return [one._replace(timestamp_ms=int(one.timestamp_ms / LOADS[load])) for one in recorded]


def rows_of(name: str, load: str, seeds: Sequence[int], outcomes: dict[str, list[PolicyOutcome]]) -> list[PolicyRow]:
    """A row for each policy, means over the seeds."""
    rows = [
        PolicyRow(
            workload=name,
            load=load,
            policy=policy,
            seeds=list(seeds),
            requests=len(runs[0].ttft_s),
            hit_ratio=statistics.mean(run.hits / max(1, run.blocks) for run in runs),
            mean_ttft_s=statistics.mean(statistics.mean(run.ttft_s) for run in runs),
            p50_ttft_s=statistics.mean(percentile(run.ttft_s, 0.5) for run in runs),
            p99_ttft_s=statistics.mean(percentile(run.ttft_s, 0.99) for run in runs),
            load_max_over_mean=statistics.mean(max_over_mean(run.prompt_blocks) for run in runs),
            load_max_over_mean_requests=statistics.mean(max_over_mean(run.requests) for run in runs),
        )
        for policy, runs in outcomes.items()
    ]
    best_s = min(row.mean_ttft_s for row in rows)
    for row in rows:
        row.against_best = row.mean_ttft_s / best_s if best_s else 1.0
    return rows


def max_over_mean(values: Sequence[int]) -> float:
    """The largest over the mean; 1 where all are 0."""
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def tables(report: PolicyReport) -> list[Table]:
    """The report for people: a table for each workload and load."""
    result: list[Table] = []
    for row in report.rows:
        title = f"{row.workload}, {row.load}"
        if not result or result[-1].title != title:
            result.append(Table(title=title, title_justify="left", box=box.SIMPLE))
            result[-1].add_column("policy", no_wrap=True)
            for column in ("hits", "mean", "of best", "p50", "p99", "blocks", "requests"):
                result[-1].add_column(column, justify="right", no_wrap=True)
        result[-1].add_row(
            row.policy,
            f"{row.hit_ratio:.3f}",
            f"{row.mean_ttft_s:.3f}",
            f"{row.against_best:.3f}",
            f"{row.p50_ttft_s:.3f}",
            f"{row.p99_ttft_s:.3f}",
            f"{row.load_max_over_mean:.3f}",
            f"{row.load_max_over_mean_requests:.3f}",
        )
    return result


def main(options: CompareOptions, json_path: Path | None) -> int:
    """Compare with a progress bar. Returns 0. Raises ConfigError: an option names what there is not."""
    check_options(options)
    check_report_path(json_path)
    console = Console()
    workloads = len(options.workloads) if options.trace is None else 1
    total = workloads * len(options.loads) * len(options.seeds) * len(options.policies)
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, disable=not bars_are_shown()
    ) as progress:
        task = progress.add_task("runs", total=total)
        report = compare(options, lambda: progress.advance(task))
    write_report(json_path, report)
    for table in tables(report):
        console.print(table)
    console.print(
        "mean, p50, p99: seconds to the first token; blocks, requests: of the busiest instance over the mean of all"
    )
    console.print(
        f"{report.instances} instances of {report.slots} slots; seeds {', '.join(map(str, options.seeds))}; {total} "
        f"runs in {report.elapsed_s} s"
    )
    return 0


def check_options(options: CompareOptions) -> None:
    """Raises ConfigError: an option names what there is not."""
    for policy in options.policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policy {policy!r}: there is none of that name; choose from {', '.join(POLICIES)}")
    for name in options.workloads:
        for load in options.loads:
            check_workload(name, load)
    if options.requests < 1:
        raise ConfigError(f"--requests {options.requests}: at least 1 is needed")
    if not options.speeds or not all(0 < speed < float("inf") for speed in options.speeds):
        raise ConfigError(f"--speeds {options.speeds}: one number above 0 for each instance is needed")
    check_changes(options.changes, len(options.speeds))
