"""Every metric's name, labels and meaning, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple

from kvbm.core.ages import AGE_BOUNDS_S, FOLLOWED, TierAges
from kvbm.core.errors import MissingExtraError
from kvbm.core.ids import Tier
from kvbm.core.missed import WHYS
from kvbm.telemetry.transfers import BYTES_PER_S, Transferred

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingExtraError("the metrics library (prometheus-client)", "catalog") from None

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MOST_NAMESPACES = 64  # clients choose them, so a label for each would be one for every tenant there ever was
_ANSWER_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class CatalogNumbers(NamedTuple):
    """What a catalog has counted since its start, and what is so right now.

    Attributes:
        stored_sequence: messages up to here are in SQL.
        claims: blocks claimed, by pool.
        put_bytes: what instances have put in the object pool, by instance: bytes in memory, and in the store.
        namespace_put_bytes: the same by namespace, of those that heartbeats tell of now.
        residencies: blocks held, by instance and tier; of instances that answers count.
        index_bytes: memory of the index, by what for.
        transfers: reads of blocks from other instances that were told of, by transport and distance.
        misses: questions about prompts that found nothing, by question and reason.
        ages: how old blocks become, by tier: HBM, HOST, NVME.
    """

    messages: int
    frames: int
    events: int
    blocks: int
    repeats: int
    stale: int
    strays: int
    forgotten: int
    holes: int
    gaps: int
    digest_mismatches: int
    digest_divergence: int
    gaps_repaired: int
    digest_repaired: int
    blind_starts: int
    lives: int
    poison: int
    foreign: int
    newer: int
    snapshots_asked: int
    zombies: int
    double_ids: int
    audits: int
    namespaces_refused: int
    routes_shared: int
    routes_unshared: int
    routes_received: int
    routes_refused: int
    rows_read_again: int
    rows_refused: int
    checkpoints: int
    archive_lost: int
    samples: int
    samples_lost: int
    checkpoint_sequence: int
    archive_sequence: int
    suspect: int
    behind: int
    behind_s: float
    excluded: int
    ignored: int
    gone: int
    watches: int
    view_age_s: float
    anomalies: dict[str, int]
    stream_sequence: int
    stored_sequence: int
    lag_messages: int | None
    lag_s: float
    ready: bool
    degraded: bool
    indexed_blocks: int
    residencies: dict[tuple[str, str], int]
    claims: dict[str, int]
    index_bytes: dict[str, int]
    put_bytes: dict[str, tuple[int, int]]
    namespace_put_bytes: dict[str, tuple[int, int]]
    transfers: Mapping[tuple[str, int], Transferred]
    misses: Mapping[tuple[str, str], int]
    ages: Sequence[TierAges]


_COUNTERS = {
    "messages": "Messages read from the stream.",
    "frames": "Frames applied to the index.",
    "events": "Events applied to the index.",
    "blocks": "Blocks named by the events that were applied.",
    "repeats": "Frames ignored because they had been applied before.",
    "strays": "Messages ignored because they name a fence of a history that the stream has lost.",
    "stale": "Frames ignored because they belong to an epoch that is over.",
    "holes": "Times later frames came before the next one; most are filled soon.",
    "gaps": "Holes whose events will not come any more; the instance is suspect until its next snapshot.",
    "digest_mismatches": "Frames whose digest differed from the index's; repaired by the next snapshot.",
    "digest_divergence": "Instances of whose residencies an audit found others in memory than were applied.",
    "gaps_repaired": "Gaps after which a snapshot or a new epoch has made the instance whole again.",
    "digest_repaired": "Divergences after which a snapshot or a new epoch has made the instance whole again.",
    "blind_starts": "Epochs whose start was not seen; whole after their next snapshot.",
    "lives": "Times a fence said that what was read of an instance is of another life: its journal or the stream's end were lost.",
    "forgotten": "Instances forgotten: gone for long, or by name.",
    "poison": "Messages that are no frames, skipped.",
    "foreign": "Messages with a frame of another instance than their subject's, refused.",
    "newer": "Frames a newer kvbm wrote, and those behind one in its epoch, not applied; their instance is left out of answers.",
    "snapshots_asked": "Snapshots asked of suspect instances.",
    "zombies": "Heartbeats of epochs that are over, ignored.",
    "double_ids": "Heartbeats of a second run that claims a live instance's id and epoch, ignored.",
    "routes_shared": "Routes that other catalogs of the cluster were told.",
    "routes_unshared": "Routes that they could not be told, or without their blocks: too many at once, or NATS took none.",
    "routes_received": "Routes of other catalogs, counted as load here.",
    "routes_refused": "Routes of other catalogs that were none, or of instances that are not heard here; a message that is none counts as one.",
    "namespaces_refused": "Namespaces that instances named and that are not kept: there are too many.",
    "audits": "Passes of the audit over the whole index.",
    "rows_read_again": "Times rows were let go because the database was away, and read again from the stream.",
    "rows_refused": "Rows left out because the database refuses what they hold.",
    "checkpoints": "Checkpoints of the index written.",
    "archive_lost": "Messages that aged out of the stream before they were archived.",
    "samples": "Sampled accesses archived.",
    "samples_lost": "Sampled accesses heard and not archived.",
}
_GAUGES = {
    "stream_sequence": "Sequence of the last message read.",
    "stored_sequence": "Sequence up to which SQL has everything.",
    "lag_messages": "Messages on the stream that were not read yet; NaN while the stream does not say where it ends.",
    "lag_s": "Age of the newest frame read while messages are waiting, or of the view while the stream does not say where it ends; else 0.",
    "ready": "1 once the stream was read up to its end at the start.",
    "degraded": "1 while NATS, the database or a folder does not take what it should.",
    "checkpoint_sequence": "Sequence of the last checkpoint written.",
    "archive_sequence": "Sequence up to which the archive has everything.",
    "suspect": "Instances that a snapshot would make whole.",
    "behind": "Instances that may have decided for a while what is not read: they say so, or are not heard.",
    "behind_s": "How long ago the one of them known worst was known whole.",
    "excluded": "Instances whose residencies are left out of answers.",
    "ignored": "Instances in whose name heartbeats come that count for nothing: another run has the place on the stream.",
    "gone": "Instances known and stopped, silent or unheard; forgotten after catalog.forget_s.",
    "watches": "Feeds of changes that are open.",
    "view_age_s": "Age of the view that answers rest on while silence does not count, or nobody confirms that all is read; else 0.",
    "indexed_blocks": "Distinct blocks somebody holds.",
}


REFUSALS = {
    "unknown_caller": "requests of nobody known (401)",
    "not_allowed": "requests that a role may not make (403)",
    "too_many_requests": "requests over requests_per_s (429)",
    "too_much_work": "requests of callers that have had loop_share of the loop's time, while others ask (429)",
    "too_many_bytes": "requests without room in body_bytes (429, 503)",
    "too_many_waits": "requests without a place in waits (429, 503)",
    "too_many_watches": "feeds without a place in watches (429, 503)",
    "too_large": "bodies that are too large, or have too much of something (413, 422)",
    "too_slow": "bodies that came too slowly (408)",
    "connection_rate": "connections over connects_per_s",
    "connection_room": "connections when all others are busy",
    "no_files": "connections when the process had no file left",
    "connection_slow": "connections ended: a header or body took too long",
    "connection_replaced": "connections ended for others",
    "connection_unread": "connections ended: answers were not taken",
}
MISSED_QUESTIONS = ("lookup", "route", "presence", "find", "block", "watch")
_MOST_CALLERS = 1024
_OTHER_CALLERS = "(others)"


class CatalogMetrics:
    """A catalog's metrics, in a registry of their own.

    Args:
        numbers: asked at each scrape.
        refusals: how much was refused, by the kinds of `REFUSALS`; read at each scrape.
    """

    def __init__(self, numbers: Callable[[], CatalogNumbers], refusals: Mapping[str, int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Numbers(numbers))
        self._registry.register(_Refusals(refusals))
        self._callers: set[str] = set()
        self.lookup_s = self._latency("lookup", "Time to answer a lookup, without its wait for positions.")
        self.route_s = self._latency("route", "Time to answer a route, without its wait for positions.")

        self._requests = Counter(
            "kvbm_catalog_requests", "Requests by who asked; nobody known: caller is empty.", ["caller", "outcome"],
            registry=self._registry,
        )  # fmt: skip

    def count_request(self, caller: str, outcome: str) -> None:
        """A request of a caller has "passed", or was refused because the caller is "unknown" or "forbidden" to ask it."""
        if caller not in self._callers:  # names come and go with the file of callers
            if len(self._callers) < _MOST_CALLERS:
                self._callers.add(caller)
            else:
                caller = _OTHER_CALLERS
        self._requests.labels(caller, outcome).inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _latency(self, what: str, meaning: str) -> Histogram:
        return Histogram(f"kvbm_catalog_{what}_seconds", meaning, buckets=_ANSWER_BUCKETS_S, registry=self._registry)


class _Refusals(Collector):
    def __init__(self, refusals: Mapping[str, int]) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """One counter for each kind, whoever it was: strangers choose no label."""
        refused = CounterMetricFamily(
            "kvbm_catalog_refusals", "Requests and connections refused, and connections ended, by why.", labels=["why"]
        )
        for why in REFUSALS:
            refused.add_metric([why], self._refusals.get(why, 0))
        yield refused


class _Numbers(Collector):
    def __init__(self, numbers: Callable[[], CatalogNumbers]) -> None:
        self._numbers = numbers

    def describe(self) -> Iterable[Metric]:
        """Nothing: asking the catalog before it runs would be too early."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The catalog's numbers as metrics."""
        now = self._numbers()
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"kvbm_catalog_{name}", meaning, value=getattr(now, name))
        for name, meaning in _GAUGES.items():
            number = getattr(now, name)
            yield GaugeMetricFamily(
                f"kvbm_catalog_{name.removesuffix('_s') + '_seconds' if name.endswith('_s') else name}",
                meaning,
                value=math.nan if number is None else float(number),
            )
        anomalies = CounterMetricFamily("kvbm_catalog_anomalies", "Rules broken by events, by rule.", labels=["rule"])
        for rule, count in sorted(now.anomalies.items()):
            anomalies.add_metric([rule], count)
        yield anomalies
        residencies = GaugeMetricFamily(
            "kvbm_catalog_residencies",
            "Blocks an instance holds in a tier; not of instances that have stopped or are left out of answers.",
            labels=["instance", "tier"],
        )
        for (instance, tier), count in sorted(now.residencies.items()):
            residencies.add_metric([instance, tier], count)
        yield residencies
        claims = GaugeMetricFamily("kvbm_catalog_claims", "Blocks claimed for a pool.", labels=["pool"])
        for pool, count in sorted(now.claims.items()):
            claims.add_metric([pool], count)
        yield claims
        index = GaugeMetricFamily(
            "kvbm_catalog_index_bytes",
            "Memory of the index: table is the blocks, sets who holds them together, rest instances and every namespace ever seen.",
            labels=["part"],
        )
        for part, size in sorted(now.index_bytes.items()):
            index.add_metric([part], size)
        yield index
        put = CounterMetricFamily(
            "kvbm_catalog_object_put_bytes",
            "Bytes an instance has put in the object pool: raw in memory, stored in the store; raw over stored is the ratio.",
            labels=["instance", "form"],
        )
        _add_sizes(put, sorted(now.put_bytes.items()))
        yield put
        of_namespaces = GaugeMetricFamily(
            "kvbm_catalog_object_namespace_put_bytes",
            f"The same of the {_MOST_NAMESPACES} namespaces with the most of it, of those that were used lately; it also falls.",
            labels=["namespace", "form"],
        )
        _add_sizes(
            of_namespaces, nlargest(_MOST_NAMESPACES, now.namespace_put_bytes.items(), key=lambda one: (one[1], one[0]))
        )
        yield of_namespaces
        missed = CounterMetricFamily(
            "kvbm_catalog_prompts_missed",
            "Lookups, routes, questions of presence, of what can be read and of blocks, and watches that found nothing, by why: no_full_block, namespace_unknown, hashes_short, excluded, not_held.",
            labels=["question", "why"],
        )
        for question in MISSED_QUESTIONS:
            for why in WHYS:
                missed.add_metric([question, why], now.misses.get((question, why), 0))
        yield missed
        yield from _of_ages(now.ages)
        yield from _of_transfers(now.transfers)


def _add_sizes(metric: CounterMetricFamily | GaugeMetricFamily, sizes: Iterable[tuple[str, tuple[int, int]]]) -> None:
    for name, both in sizes:
        for form, count in zip(("raw", "stored"), both, strict=True):
            metric.add_metric([name, form], count)


def _of_ages(ages: Sequence[TierAges]) -> Iterator[Metric]:
    """Metrics of how old blocks become. Of HBM no event says what is wanted again."""
    wanted = HistogramMetricFamily(
        "kvbm_catalog_wanted_age_seconds",
        "How old blocks of a tier were when they were wanted again in a hotter one, as instances tell it.",
        labels=["tier"],
    )
    evicted = HistogramMetricFamily(
        "kvbm_catalog_evicted_age_seconds",
        "How old blocks of a tier were when they were evicted for want of room or because their time was over, as instances tell it.",
        labels=["tier"],
    )
    unused = CounterMetricFamily(
        "kvbm_catalog_evicted_unused", "Those of them that were never wanted again since they came.", labels=["tier"]
    )
    bounds = [*map(str, map(float, AGE_BOUNDS_S)), "+Inf"]
    for tier, one in zip(FOLLOWED, ages, strict=False):
        evicted.add_metric([tier.name], list(zip(bounds, accumulate(one.evicted), strict=True)), one.evicted_s)
        if tier != Tier.HBM:
            wanted.add_metric([tier.name], list(zip(bounds, accumulate(one.wanted), strict=True)), one.wanted_s)
            unused.add_metric([tier.name], one.unused)
    yield from (wanted, evicted, unused)


def _of_transfers(transfers: Mapping[tuple[str, int], Transferred]) -> Iterator[Metric]:
    """Metrics of reads from other instances."""
    labels = ["transport", "distance"]
    rates = HistogramMetricFamily(
        "kvbm_catalog_transfer_bytes_per_second",
        "Rates of reads of blocks from other instances' memory, as they tell them; distance 0 is the same node.",
        labels=labels,
    )
    sizes = CounterMetricFamily("kvbm_catalog_transfer_bytes", "Bytes that came by them.", labels=labels)
    failures = CounterMetricFamily("kvbm_catalog_transfer_failures", "Such reads that brought nothing.", labels=labels)
    for (transport, distance), one in sorted(transfers.items()):
        values = [transport, str(distance)]
        bounds = [*map(str, BYTES_PER_S), "+Inf"]
        rates.add_metric(values, list(zip(bounds, accumulate(one.by_rate), strict=True)), one.rates)
        sizes.add_metric(values, one.size)
        failures.add_metric(values, one.failed)
    yield from (rates, sizes, failures)
