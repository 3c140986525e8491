"""Drive N managers with a trace, without a model: virtual time, synthetic bytes, real events on NATS, a real catalog
that routes.

An instance is one first-come-first-served prefill queue; decoding takes time but no turn. A request's blocks are
acquired when its prefill begins, created when it ends, and pinned until its last token. The same trace runs again on
managers that are routed to at random and on one manager with all the slots, and once through an unbounded set: the
bounds between which routing can do something.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbm.assembly import NATIVE, open_manager
from kvbm.config import RoutingSettings, Settings, load_settings
from kvbm.core.errors import ConfigError
from kvbm.core.hashing import derived_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, InstanceId, Namespace, Tier
from kvbm.locate.http import CatalogClient
from kvbm.manager.onboard.loads import Prefix
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.progress import bars_are_shown
from kvbm.reports import check_report_path, write_report
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.catalog_view import counter, wait_applied, wait_live
from kvbm.workload.generator import generate
from kvbm.workload.processes import CATALOG_MODULES, START_WAIT_S, machine, require_modules, start_catalog
from kvbm.workload.trace import TRACE_BLOCK_TOKENS, TraceRequest, full_blocks, read_trace

BLOCK_BYTES = 64  # synthetic: the block's hash, four times
PREFILL_TOKENS_PER_S = 10_000.0
REQUESTS_PER_S = 230.0  # how fast virtual time is paced, on the wall clock, while a catalog follows
DECODE_TOKEN_S = 0.03
UNBOUNDED_SLOTS = 1 << 22
LAG_SAMPLE_EVERY = 100  # requests
SETTLE_WAIT_S = 30.0
NAMESPACE = Namespace(
    model="trace", revision="r1", block_tokens=TRACE_BLOCK_TOKENS, kv_dtype="uint8", layout="synthetic"
)
POOL_TIERS = ("hbm", "host", "nvme")

Route = Callable[["Arrival"], int]


class Arrival(NamedTuple):
    """One request with its identity."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    hashes: bytes


class RoutingOutcome(msgspec.Struct, kw_only=True):
    """What one way of routing gave.

    Attributes:
        hit_ratio: hit blocks over full blocks.
        hit_ratio_of_all_ids: hit blocks over all ids of the trace, partial last blocks included, as some papers count.
        load_max_over_mean: prompt blocks on the busiest instance over the mean; `_requests`: the same for requests.
    """

    requests: int = 0
    blocks: int = 0
    hit_ratio: float = 0.0
    hit_ratio_of_all_ids: float = 0.0
    hits_by_tier: dict[str, int] = {}
    load_max_over_mean: float = 1.0
    load_max_over_mean_requests: float = 1.0
    mean_ttft_s: float = 0.0
    wrong_bytes: int = 0


class SimulationReport(msgspec.Struct, kw_only=True):
    """What `kvbm simulate --json` writes. `hit_ratio` and the like are those of the catalog's routing."""

    trace: str = ""
    instances: int = 0
    pools: str = ""
    requests: int = 0
    blocks: int = 0
    hit_ratio: float = 0.0
    hits_by_tier: dict[str, int] = {}
    load_max_over_mean: float = 1.0
    ideal_hit_ratio: float = 0.0
    routing: dict[str, RoutingOutcome] = {}
    events: int = 0
    events_per_s: float = 0.0
    block_events_per_s: float = 0.0
    catalog_lag_ms_p50: float = 0.0
    catalog_lag_ms_p99: float = 0.0
    digests_equal: bool = False
    machine: str = ""
    elapsed_s: float = 0.0


class Instance:
    """A manager and the queue before it, in virtual time."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.queue: deque[tuple[Arrival, int]] = deque()  # with the tokens that were missing when it came
        self.busy = False
        self.queued_tokens = 0
        self.running = 0
        self.prompt_blocks = 0
        self.requests = 0
        self.wrong_bytes = 0
        self._hbm = manager.pools.slots[Tier.HBM]

    def report_load(self) -> None:
        self.manager.report_load(self.queued_tokens, self.running)

    def acquire(self, request: Arrival) -> tuple[Prefix, list[int]] | None:
        """The held prefix, its bytes checked, and slots for the rest; None when pins leave too few."""
        prefix = self.manager.acquire(NAMESPACE.id, request.hashes)
        fresh = self.manager.allocate(len(request.hashes) // HASH_BYTES - prefix.depth)
        if fresh is None:
            self.manager.unpin(prefix.slots)
            return None
        if prefix.depth:
            hashes = request.hashes[: prefix.depth * HASH_BYTES]
            rows = np.empty((prefix.depth, BLOCK_BYTES), dtype=np.uint8)
            self._hbm.read(prefix.slots, NAMESPACE.id, hashes, rows)
            self.wrong_bytes += int(np.any(rows != synthetic_rows(hashes), axis=1).sum())
        return prefix, fresh

    def create(self, request: Arrival, prefix: Prefix, fresh: list[int]) -> list[int]:
        """Write the bytes of what was missing, then say that it is there. Returns all slots of the prompt."""
        if not fresh:
            return prefix.slots
        at = prefix.depth * HASH_BYTES
        hashes = request.hashes[at:]
        rows = synthetic_rows(hashes)
        self._hbm.write(fresh, rows, Proof(NAMESPACE.id, self.manager.epoch, hashes, NATIVE.checksums(rows)))
        parent = request.hashes[at - HASH_BYTES : at] if at else NO_PARENT
        return prefix.slots + self.manager.create(NAMESPACE.id, parent, prefix.depth, hashes, fresh)


def synthetic_rows(hashes: bytes) -> np.ndarray:
    """Bytes that only these blocks have: (n, BLOCK_BYTES) uint8, each row its hash repeated."""
    return np.tile(np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES), BLOCK_BYTES // HASH_BYTES)


class Simulation:
    """The trace on some instances in virtual time.

    Args:
        route: chooses the instance of an arrival.
        clock: told the virtual time before anything happens at it.
    """

    def __init__(self, instances: Sequence[Instance], route: Route, clock: Callable[[float], None]) -> None:
        self.instances = instances
        self._route, self._clock = route, clock
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now_s = 0.0
        self._ttft_s = 0.0
        self._hits = {tier: 0 for tier in Tier}

    def run(self, arrivals: Sequence[Arrival], all_ids: int, advance: Callable[[int], None]) -> RoutingOutcome:
        """Everything until the last token."""
        for arrival in arrivals:
            self._until(arrival.at_s)
            self._arrive(arrival)
            advance(arrival.number + 1)
        self._until(float("inf"))
        blocks = sum(instance.prompt_blocks for instance in self.instances)
        hits = sum(self._hits.values())
        return RoutingOutcome(
            requests=len(arrivals),
            blocks=blocks,
            hit_ratio=round(hits / max(1, blocks), 3),
            hit_ratio_of_all_ids=round(hits / max(1, all_ids), 3),
            hits_by_tier={tier.name: count for tier, count in self._hits.items() if count},
            load_max_over_mean=_max_over_mean([instance.prompt_blocks for instance in self.instances]),
            load_max_over_mean_requests=_max_over_mean([instance.requests for instance in self.instances]),
            mean_ttft_s=round(self._ttft_s / max(1, len(arrivals)), 3),
            wrong_bytes=sum(instance.wrong_bytes for instance in self.instances),
        )

    def _until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            self._now_s, _, happen = heapq.heappop(self._events)
            if at_s != float("inf"):  # after the last arrival nobody routes, so nobody's clock matters
                self._clock(self._now_s)
            happen()
        if at_s != float("inf"):
            self._now_s = at_s
            self._clock(at_s)

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._count, happen))

    def _arrive(self, arrival: Arrival) -> None:
        instance = self.instances[self._route(arrival)]
        missing = arrival.input_tokens - instance.manager.match(arrival.hashes).depth * TRACE_BLOCK_TOKENS
        instance.queue.append((arrival, missing))
        instance.queued_tokens += missing
        instance.prompt_blocks += len(arrival.hashes) // HASH_BYTES
        instance.requests += 1
        self._start(instance)
        instance.report_load()

    def _start(self, instance: Instance) -> None:
        if instance.busy or not instance.queue:
            return
        request, expected = instance.queue[0]
        taken = instance.acquire(request)
        if taken is None:
            if not instance.running:
                blocks = len(request.hashes) // HASH_BYTES
                raise ConfigError(
                    f"a request of {blocks} blocks does not fit an idle HBM pool; give --pools hbm={blocks} or more"
                )
            return  # a request that ends will start it
        prefix, fresh = taken
        instance.queue.popleft()
        instance.busy = True
        for tier, count in prefix.hits.items():
            self._hits[tier] += count
        missing = request.input_tokens - prefix.depth * TRACE_BLOCK_TOKENS
        instance.queued_tokens += missing - expected
        self._later(missing / PREFILL_TOKENS_PER_S, lambda: self._prefilled(instance, request, prefix, fresh, missing))

    def _prefilled(self, instance: Instance, request: Arrival, prefix: Prefix, fresh: list[int], missing: int) -> None:
        slots = instance.create(request, prefix, fresh)
        instance.busy = False
        instance.queued_tokens -= missing
        instance.running += 1
        self._ttft_s += self._now_s - request.at_s
        self._later(request.output_tokens * DECODE_TOKEN_S, lambda: self._ended(instance, slots))
        self._start(instance)
        instance.report_load()

    def _ended(self, instance: Instance, slots: list[int]) -> None:
        instance.manager.unpin(slots)
        instance.running -= 1
        self._start(instance)
        instance.report_load()


def _max_over_mean(values: Sequence[int]) -> float:
    mean = sum(values) / len(values)
    return round(max(values) / mean, 3) if mean else 1.0


class SimulatedCluster:
    """N managers in this process; with `live` also nats-server and a catalog process they publish to."""

    def __init__(self, count: int, pools: dict[str, int], folder: Path, live: bool, pace: float = 1.0) -> None:
        """
        Args:
            pace: virtual seconds in one of the wall clock's, which is the catalog's: its settings are scaled by it.
        """
        self._pace = pace
        self._opened = ExitStack()
        self._began_s = time.monotonic()
        self.client: CatalogClient | None = None
        self.instances: list[Instance] = []
        flags: dict[str, object] = {
            "instance.data_dir": str(folder),
            "pools.hbm.device": "memory",
            "nats.enabled": live,
            "journal.in_memory": not live,
            **{f"pools.{tier}.slots": slots for tier, slots in pools.items()},
        }
        try:
            if live:
                flags |= self._start_servers(folder)
            for number in range(count):
                settings = load_settings(flags={**flags, "instance.id": f"sim-{number}"})
                self.instances.append(Instance(self._open(settings)))
            self._wait_live()
            self._began_s = time.monotonic()
        except BaseException:
            self.close()
            raise

    def _wait_live(self) -> None:
        """Wait until the catalog has heard every instance."""
        if self.client is not None:
            wait_live(self.client, [instance.manager.instance for instance in self.instances], START_WAIT_S)

    def _start_servers(self, folder: Path) -> dict[str, object]:
        server = EmbeddedServer.start(folder / "nats")
        self._opened.callback(server.stop)
        paced = RoutingSettings()
        self.client = start_catalog(
            folder,
            server.url,
            self._opened,
            {
                "catalog.routing.prefill_tokens_per_s": PREFILL_TOKENS_PER_S * self._pace,
                "catalog.routing.crowding_weight": paced.crowding_weight * self._pace,
                "catalog.routing.balance_s": paced.balance_s / self._pace,
                "catalog.routing.half_life_s": paced.half_life_s / self._pace,
                "catalog.routing.prior_s": paced.prior_s / self._pace,
                "catalog.routing.hold_s": paced.hold_s / self._pace,
            },
        )
        return {"nats.url": server.url, "nats.heartbeat_s": 0.02}

    def _open(self, settings: Settings) -> Manager:
        manager = open_manager(settings, [NAMESPACE], BLOCK_BYTES, engine="simulate")
        self._opened.callback(manager.close)
        return manager

    def pace(self, now_s: float) -> None:
        """Wait while virtual time (seconds since the trace began) runs ahead of the wall clock, as the catalog
        sees it.
        """
        if self.client is not None:
            ahead_s = now_s / self._pace - (time.monotonic() - self._began_s)
            if ahead_s > 0.001:
                time.sleep(ahead_s)

    def wait_all_applied(self) -> float:
        """Wait until the catalog has applied every event decided so far. Returns how long that took, in seconds."""
        assert self.client is not None
        began = time.monotonic()
        managers = [instance.manager for instance in self.instances]
        wait_applied(self.client, [(m.instance, m.epoch, m.applied()) for m in managers], 60.0)
        return time.monotonic() - began

    def close(self) -> None:
        """End managers and servers."""
        self._opened.close()


class CatalogRoute:
    """Asks the catalog, as a router would, and measures how far it lags."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._names = {instance.manager.instance: number for number, instance in enumerate(cluster.instances)}
        self.lags_s: list[float] = []

    def __call__(self, arrival: Arrival) -> int:
        client = self._cluster.client
        assert client is not None
        if arrival.number % LAG_SAMPLE_EVERY == LAG_SAMPLE_EVERY - 1:
            self.lags_s.append(self._cluster.wait_all_applied())
        return self._names[InstanceId(client.route(NAMESPACE.id, arrival.hashes, arrival.input_tokens).instance)]


def arrivals_of(requests: Sequence[TraceRequest], root: bytes) -> list[Arrival]:
    """The trace with sequence hashes: each id is another engine's digest, adopted under the namespace's root."""
    known: dict[int, bytes] = {}

    def adopted(hash_id: int) -> bytes:
        found = known.get(hash_id)
        if found is None:
            width = max(8, -(-hash_id.bit_length() // 8))  # some traces' ids are digests
            found = known[hash_id] = derived_hashes(root, [hash_id.to_bytes(width, "little")])
        return found

    return [
        Arrival(
            number,
            request.timestamp_ms / 1e3,
            request.input_tokens,
            request.output_tokens,
            b"".join(adopted(hash_id) for hash_id in full_blocks(request)),
        )
        for number, request in enumerate(requests)
    ]


def ideal_hit_ratio(arrivals: Sequence[Arrival]) -> float:
    """What one pool without bounds would hit: the share of full blocks whose whole prefix came before."""
    seen: set[bytes] = set()
    hits = blocks = 0
    for arrival in arrivals:
        hashes = [arrival.hashes[at : at + HASH_BYTES] for at in range(0, len(arrival.hashes), HASH_BYTES)]
        blocks += len(hashes)
        for block in hashes:
            if block not in seen:
                break
            hits += 1
        seen.update(hashes)
    return round(hits / max(1, blocks), 3)


def parse_pools(text: str, tiers: Sequence[str] = POOL_TIERS) -> dict[str, int]:
    """ "hbm=4000,host=8500" or "unbounded" → slots by tier, of these.

    Raises ConfigError: what is wrong, and how to write it.
    """
    if text == "unbounded":
        return {"hbm": UNBOUNDED_SLOTS}
    pools: dict[str, int] = {}
    for part in text.split(","):
        tier, _, slots = part.partition("=")
        if tier not in tiers or not slots.isdecimal() or not int(slots):
            raise ConfigError(
                f'--pools {text!r}: {part!r} is not TIER=SLOTS with one of {", ".join(tiers)}; or say "unbounded"'
            )
        if tier in pools:
            raise ConfigError(f"--pools {text!r} gives {tier} twice; give it once")
        if int(slots) > UNBOUNDED_SLOTS:
            raise ConfigError(
                f'--pools {text!r}: {part!r} is more than {UNBOUNDED_SLOTS}; lower it, or say "unbounded"'
            )
        pools[tier] = int(slots)
    if "hbm" not in pools:
        raise ConfigError(f"--pools {text!r} has no hbm; an instance needs an HBM pool")
    return pools


def simulate(
    requests: Sequence[TraceRequest],
    name: str,
    count: int,
    pools_text: str,
    seed: int,
    step: Callable[[str, int], Callable[[int], None]],
) -> SimulationReport:
    """All ways of routing, the catalog's first.

    Args:
        step: told the name of a part and its length, gives the function to tell its progress to.
    """
    began = time.monotonic()
    pools = parse_pools(pools_text)
    arrivals = arrivals_of(requests, NAMESPACE.root())
    all_ids = sum(len(request.hash_ids) for request in requests)
    report = SimulationReport(
        trace=name,
        instances=count,
        pools=pools_text,
        requests=len(arrivals),
        machine=machine(),
        ideal_hit_ratio=ideal_hit_ratio(arrivals),
    )
    with TemporaryDirectory(prefix="kvbm-simulate-", ignore_cleanup_errors=True) as folder:
        _run_catalog(
            report, count, pools, Path(folder), arrivals, all_ids, step("routed by the catalog", len(arrivals))
        )
        if count > 1:
            rng = random.Random(seed)
            pooled = {tier: slots * count for tier, slots in pools.items()}
            others: list[tuple[str, int, dict[str, int], Route]] = [
                ("random", count, pools, lambda arrival: rng.randrange(count)),
                ("pooled", 1, pooled, lambda arrival: 0),
            ]
            for label, size, slots, route in others:
                cluster = SimulatedCluster(size, slots, Path(folder) / label, live=False)
                try:
                    advance = step(
                        f"routed: {label}" if label == "random" else "one pooled LRU of the same size", len(arrivals)
                    )
                    report.routing[label] = Simulation(cluster.instances, route, cluster.pace).run(
                        arrivals, all_ids, advance
                    )
                finally:
                    cluster.close()
    report.elapsed_s = round(time.monotonic() - began, 1)
    return report


def _run_catalog(
    report: SimulationReport,
    count: int,
    pools: dict[str, int],
    folder: Path,
    arrivals: list[Arrival],
    all_ids: int,
    advance: Callable[[int], None],
) -> None:
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    cluster = SimulatedCluster(
        count, pools, folder / "live", live=True, pace=max(1.0, span_s * REQUESTS_PER_S / len(arrivals))
    )
    try:
        route = CatalogRoute(cluster)
        began = time.monotonic()
        outcome = Simulation(cluster.instances, route, cluster.pace).run(arrivals, all_ids, advance)
        for instance in cluster.instances:
            instance.manager.settle(SETTLE_WAIT_S)  # an offload that ends after the wait would change the digest
        route.lags_s.append(cluster.wait_all_applied())
        elapsed_s = time.monotonic() - began
        assert cluster.client is not None
        seen = {entry.instance: entry.digest for entry in cluster.client.instances()}
        managers = [instance.manager for instance in cluster.instances]
        report.digests_equal = all(seen[m.instance] == f"{m.digest()[1]:016x}" for m in managers)
        report.events = sum(manager.applied() for manager in managers)
        report.events_per_s = round(report.events / elapsed_s, 1)
        blocks = counter(cluster.client, "blocks")
        report.block_events_per_s = round(blocks / elapsed_s, 1)
    finally:
        cluster.close()
    report.routing["catalog"] = outcome
    report.requests, report.blocks = outcome.requests, outcome.blocks
    report.hit_ratio, report.hits_by_tier = outcome.hit_ratio, outcome.hits_by_tier
    report.load_max_over_mean = outcome.load_max_over_mean
    lags_ms = sorted(lag * 1e3 for lag in route.lags_s)
    report.catalog_lag_ms_p50 = round(statistics.median(lags_ms), 2)
    report.catalog_lag_ms_p99 = round(lags_ms[min(len(lags_ms) - 1, int(0.99 * len(lags_ms)))], 2)


def table(report: SimulationReport) -> Table:
    """The report for people."""
    title = f"{report.requests} requests, {report.blocks} full blocks, {report.instances} x {report.pools}"
    result = Table(title=title, title_justify="left")
    result.add_column("routing")
    for column in ("hit ratio", "of all ids", "load max/mean", "by requests"):
        result.add_column(column, justify="right")
    labels = {"random": "random", "catalog": "the catalog", "pooled": "one pooled LRU"}
    for name, label in labels.items():
        if (outcome := report.routing.get(name)) is not None:
            result.add_row(
                label,
                f"{outcome.hit_ratio:.3f}",
                f"{outcome.hit_ratio_of_all_ids:.3f}",
                f"{outcome.load_max_over_mean:.3f}",
                f"{outcome.load_max_over_mean_requests:.3f}",
            )
    result.add_row("ideal, no eviction", f"{report.ideal_hit_ratio:.3f}", "", "", "")
    return result


def main(trace: Path | None, requests: int, seed: int, instances: int, pools: str, json_path: Path | None) -> int:
    """Simulate with a progress bar. Returns 0, or 1 when the catalog's view differed or bytes were wrong."""
    for option, value in (("--instances", instances), ("--requests", requests)):
        if value < 1:
            raise ConfigError(f"{option} {value}: at least 1 is needed")
    slots = parse_pools(pools)["hbm"]
    check_report_path(json_path)
    require_modules("kvbm simulate", CATALOG_MODULES, "catalog")
    workload = _read(trace) if trace is not None else generate(seed, requests)
    _check_fit(workload, slots)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, disable=not bars_are_shown()
    ) as progress:

        def step(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda done: progress.update(task, completed=done)

        report = simulate(workload, str(trace) if trace else f"generated, seed {seed}", instances, pools, seed, step)
    write_report(json_path, report)
    console.print(table(report))
    tiers = ", ".join(f"{count} from {tier}" for tier, count in report.hits_by_tier.items())
    console.print(f"hit blocks routed by the catalog: {tiers or 'none'}")
    console.print(
        f"{report.events} events ({report.events_per_s:.0f}/s, {report.block_events_per_s:.0f} block events/s), "
        "catalog lag "
        f"p50 {report.catalog_lag_ms_p50} ms, p99 {report.catalog_lag_ms_p99} ms, digests equal: "
        f"{'yes' if report.digests_equal else 'NO'}, {report.elapsed_s} s on {report.machine}"
    )
    wrong = sum(outcome.wrong_bytes for outcome in report.routing.values())
    if wrong:
        console.print(f"[red]FAILED[/red]: {wrong} blocks came back with wrong bytes")
    return 0 if report.digests_equal and not wrong else 1


def _read(path: Path) -> list[TraceRequest]:
    try:
        requests = list(read_trace(path))
    except OSError as error:
        raise ConfigError(
            f"trace {path} cannot be read ({error.strerror}); give a JSONL file, or leave --trace out"
        ) from None
    if not requests:
        raise ConfigError(
            f"trace {path} holds no request; give a JSONL file with one request a line, or leave --trace out"
        )
    return requests


def _check_fit(requests: Sequence[TraceRequest], slots: int) -> None:
    """Refuse before anything is started what no instance could ever serve."""
    blocks, number = max((len(full_blocks(request)), -number) for number, request in enumerate(requests, 1))
    if blocks > slots:
        raise ConfigError(
            f"request {-number} has {blocks} blocks of {TRACE_BLOCK_TOKENS} tokens, an instance's HBM pool {slots} "
            "slots; "
            f"give --pools hbm={blocks} or more"
        )
