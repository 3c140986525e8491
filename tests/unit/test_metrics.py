"""A metric is one row: it is scraped as the row says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.edge.metrics import ANOMALIES, DEGRADED_PARTS, ROWS
from kvbm.telemetry.metrics import COUNTER, GAUGE, HISTOGRAM, CatalogMetrics, HistogramBuckets, MetricRow
from tests.extras import needed

text_string_to_metric_families = needed("prometheus_client.parser", "catalog").text_string_to_metric_families


class Counted(NamedTuple):
    """What the rows below are read of."""

    asked: int
    age_s: float | None
    sizes: dict[tuple[str, ...], float]
    times: HistogramBuckets


SOME: tuple[MetricRow[Counted], ...] = (
    MetricRow("asked", COUNTER, "Questions asked.", lambda at: at.asked),
    MetricRow("age_seconds", GAUGE, "Age of the view.", lambda at: at.age_s),
    MetricRow("sizes", GAUGE, "Bytes, by place and form.", lambda at: at.sizes, ("place", "form")),
    MetricRow("times", HISTOGRAM, "How long it took, by tier.", lambda at: {("HOST",): at.times}, ("tier",)),
)
NOW = Counted(3, 0.5, {("b", "raw"): 7, ("a", "raw"): 9}, HistogramBuckets((1, 2.5), (4, 0, 1), 8.0))


def scraped(now: Counted) -> str:
    return CatalogMetrics(SOME, now, {}).exposition().decode()


def test_each_row_is_scraped_with_its_help_its_kind_and_its_value() -> None:
    assert scraped(NOW).splitlines()[:17] == [
        "# HELP kvbm_catalog_asked_total Questions asked.",
        "# TYPE kvbm_catalog_asked_total counter",
        "kvbm_catalog_asked_total 3.0",
        "# HELP kvbm_catalog_age_seconds Age of the view.",
        "# TYPE kvbm_catalog_age_seconds gauge",
        "kvbm_catalog_age_seconds 0.5",
        "# HELP kvbm_catalog_sizes Bytes, by place and form.",
        "# TYPE kvbm_catalog_sizes gauge",
        'kvbm_catalog_sizes{form="raw",place="a"} 9.0',
        'kvbm_catalog_sizes{form="raw",place="b"} 7.0',
        "# HELP kvbm_catalog_times How long it took, by tier.",
        "# TYPE kvbm_catalog_times histogram",
        'kvbm_catalog_times_bucket{le="1.0",tier="HOST"} 4.0',
        'kvbm_catalog_times_bucket{le="2.5",tier="HOST"} 4.0',
        'kvbm_catalog_times_bucket{le="+Inf",tier="HOST"} 5.0',
        'kvbm_catalog_times_count{tier="HOST"} 5.0',
        'kvbm_catalog_times_sum{tier="HOST"} 8.0',
    ]


def test_a_number_that_is_not_known_is_no_number() -> None:
    families = {one.name: one for one in text_string_to_metric_families(scraped(NOW._replace(age_s=None)))}
    assert math.isnan(families["kvbm_catalog_age_seconds"].samples[0].value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_the_catalog_reads_as_one(row: MetricRow) -> None:  # type: ignore[type-arg]
    assert [one.name for one in ROWS].count(row.name) == 1
    assert row.help[:1].isupper() or row.help[:1].isdigit()
    assert row.help.endswith(".") and "\n" not in row.help
    assert not row.name.endswith(("_s", "_total"))


def test_every_rule_that_the_index_counts_is_counted_from_zero_on() -> None:
    """What appears with its first count has not grown, for Prometheus."""
    source = (Path(__file__).parents[2] / "native" / "bindings" / "cluster_index.cpp").read_text()
    names = re.search(r"kAnomalyNames\[kAnomalyCount\] = \{(.*?)\};", source, re.DOTALL)
    assert names is not None
    assert re.findall(r'"([a-z-]+)"', names[1]) == list(ANOMALIES)


def test_each_part_that_may_be_degraded_is_told_apart() -> None:
    degraded = Degraded()
    parts = next(row for row in ROWS if row.name == "degraded_parts")
    at: Any = SimpleNamespace(degraded=degraded)
    assert parts.get(at) == {(part,): 0 for part in DEGRADED_PARTS}
    degraded.note("NATS", "away")
    degraded.note("instance e-1", "ignored")
    degraded.note("catalog-follow", "has ended")
    assert parts.get(at) == {(part,): part in ("NATS", "instances", "tasks") for part in DEGRADED_PARTS}
    degraded.clear("NATS")
    degraded.note("archive stream", "NATS is away")  # no folder refuses anything
    assert parts.get(at) == {(part,): part in ("NATS", "instances", "tasks") for part in DEGRADED_PARTS}
    degraded.clear("archive stream")
    assert parts.get(at) == {(part,): part in ("instances", "tasks") for part in DEGRADED_PARTS}
    degraded.clear("catalog-follow")
    degraded.note("history", "no room")
    degraded.note("erasures", "NATS is away")  # both are tried again, so no task has ended
    assert parts.get(at) == {(part,): part in ("instances", "history", "erasures") for part in DEGRADED_PARTS}
