"""What a metric is, and how metrics are scraped.

The rows of the catalog are in `kvbm/catalog/edge/metrics.py`, those of a manager in `kvbm/manager/metrics.py`.
"""

from __future__ import annotations

import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from kvbm.core.errors import MissingExtraError

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingExtraError("the metrics library (prometheus-client)", "catalog") from None

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ANSWER_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"
PREFIX = "kvbm_catalog_"
Source = TypeVar("Source")


class HistogramBuckets(NamedTuple):
    """A histogram.

    Attributes:
        bounds: B upper bounds of its buckets.
        counts: B + 1: what was up to each bound and not up to the one before, and what was more.
        total: the sum of what was counted.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


Labelled = Mapping[tuple[str, ...], float | HistogramBuckets]


class MetricRow(NamedTuple, Generic[Source]):
    """One metric.

    Attributes:
        name: as it is scraped, without `prefix` before it and the `_total` behind counters.
        kind: COUNTER, GAUGE or HISTOGRAM.
        help: the line beside it at /metrics and in the documentation.
        get: its value now; None for one that is not known; with labels, the value for each.
        labels: their names.
        prefix: says whose metric it is.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    get: Callable[[Source], float | Labelled | None]
    labels: tuple[str, ...] = ()
    prefix: str = PREFIX

    @property
    def scraped(self) -> str:
        """Its name at /metrics."""
        return f"{self.prefix}{self.name}{'_total' if self.kind == COUNTER else ''}"


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
_MOST_CALLERS = 1024
_OTHER_CALLERS = "(others)"


class CatalogMetrics:
    """A catalog's metrics, and those of its process, in a registry of their own.

    Args:
        rows: what is read at each scrape. source: what it is read of.
        refusals: how much was refused, by the kinds of `REFUSALS`; read at each scrape.
        version: of kvbm.

    Attributes:
        answers: how many answers had each status; whoever answers counts there.
    """

    def __init__(
        self, rows: Sequence[MetricRow[Source]], source: Source, refusals: Mapping[str, int], version: str = ""
    ) -> None:
        self.answers: dict[int, int] = defaultdict(int)
        self._registry = CollectorRegistry()
        self._registry.register(MetricRowCollector(rows, lambda: {(): source}))
        self._registry.register(_Refusals(refusals))
        self._registry.register(_Answers(self.answers))
        self._registry.register(_Build(version))
        ProcessCollector(registry=self._registry)  # process_resident_memory_bytes, process_open_fds and their like
        self._callers: set[str] = set()
        self._passed: dict[str, Counter] = {}  # by caller, of its requests that passed
        self.lookup_s = self._latency("lookup", "Time to answer a lookup, without its wait for positions.")
        self.route_s = self._latency("route", "Time to answer a route, without its wait for positions.")

        self._requests = Counter(
            "kvbm_catalog_requests",
            "Requests by who asked; nobody known: caller is empty.",
            ["caller", "outcome"],
            registry=self._registry,
        )

    def count_request(self, caller: str, outcome: str) -> None:
        """A request of a caller has "passed", or was refused because the caller is "unknown" or "forbidden" to
        ask it.
        """
        known = self._passed.get(caller) if outcome == "passed" else None
        if known is not None:
            known.inc()
            return
        if caller not in self._callers:  # names come and go with the file of callers
            if len(self._callers) < _MOST_CALLERS:
                self._callers.add(caller)
            else:
                caller = _OTHER_CALLERS
        counter = self._requests.labels(caller, outcome)
        counter.inc()
        if outcome == "passed" and caller in self._callers:
            self._passed[caller] = counter

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


class _Answers(Collector):
    def __init__(self, answers: Mapping[int, int]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """One counter for each status that was answered."""
        answered = CounterMetricFamily(
            "kvbm_catalog_answers", "Answers over HTTP and NATS, by status.", labels=["status"]
        )
        for status, count in sorted(self._answers.items()):
            answered.add_metric([str(status)], count)
        yield answered


class _Build(Collector):
    def __init__(self, version: str) -> None:
        self._labels = [version, platform.python_version()]

    def collect(self) -> Iterator[Metric]:
        """A gauge that is 1: what it is of stands in its labels."""
        build = GaugeMetricFamily(
            "kvbm_catalog_build_info", "1, of the version of kvbm and of Python that run.", labels=["version", "python"]
        )
        build.add_metric(self._labels, 1)
        yield build


class MetricRowCollector(Collector, Generic[Source]):
    """Rows as a collector of prometheus-client.

    Args:
        rows: what is read at each scrape.
        sources: gives what it is read of, once a scrape, by the values of `labels`.
        labels: names that tell sources apart; they stand before those of a row.
    """

    def __init__(
        self,
        rows: Sequence[MetricRow[Source]],
        sources: Callable[[], Mapping[tuple[str, ...], Source]],
        labels: tuple[str, ...] = (),
    ) -> None:
        self._rows, self._sources, self._labels = rows, sources, labels

    def describe(self) -> Iterable[Metric]:
        """Nothing: asking a catalog before it runs would be too early."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """A family for each row."""
        sources = self._sources()
        for row in self._rows:
            name, labels = row.prefix + row.name, (*self._labels, *row.labels)
            if row.kind == HISTOGRAM:
                histogram = HistogramMetricFamily(name, row.help, labels=labels)
                for of, one in _values(row, sources):
                    assert isinstance(one, HistogramBuckets)
                    bounds = [*map(str, map(float, one.bounds)), "+Inf"]
                    histogram.add_metric(of, list(zip(bounds, accumulate(one.counts), strict=True)), one.total)
                yield histogram
                continue
            family = CounterMetricFamily if row.kind == COUNTER else GaugeMetricFamily
            metric = family(name, row.help, labels=labels)
            for of, one in _values(row, sources):
                assert not isinstance(one, HistogramBuckets)
                metric.add_metric(of, math.nan if one is None else float(one))
            yield metric


def _values(
    row: MetricRow[Source], sources: Mapping[tuple[str, ...], Source]
) -> Iterator[tuple[tuple[str, ...], float | HistogramBuckets | None]]:
    """A row's values with those of all labels."""
    for whose, source in sources.items():
        value = row.get(source)
        if isinstance(value, Mapping):
            yield from (((*whose, *labels), one) for labels, one in sorted(value.items()))
        else:
            yield whose, value
